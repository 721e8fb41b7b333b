"""minimal.py by itself (spot values, derivatives, the probe), then the fast code held to it."""

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest

import mxsim
from mxsim import minimal
from mxsim.minimal import Array, Params, fake_quantize

ACTIVATIONS = ["gelu", "relu", "swiglu", "linear"]
RULES = ["floor", "rceil", "ceil", "even"]
ROUNDINGS = ["even", "away", "zero"]
E4M3 = "mxfp8_e4m3"


def problem(
    activation: str, width: int = 16, depth: int = 2, batch: int = 8, seed: int = 0
) -> tuple[Params, Array, Array]:
    """A student with scattered gammas and betas, and a target of the size of its output."""
    rng = np.random.default_rng(seed)
    params = minimal.init(rng, width, depth, activation)
    for p in params:
        p["ln_gamma"] = p["ln_gamma"] + 0.2 * rng.standard_normal(width)
        p["ln_beta"] = 0.2 * rng.standard_normal(width)
    return params, rng.standard_normal((batch, width)), rng.standard_normal((batch, width))


def leaves(params: Params) -> Iterator[tuple[int, str]]:
    return ((i, k) for i, p in enumerate(params) for k in p)


# ---- spot values: every dequantized value worked out by hand -----------------------------------


@pytest.mark.parametrize(
    ("fmt", "rule", "x", "want"),
    [
        # the block maximum saturates under floor, not under the rules that bump the exponent
        (E4M3, "floor", [957, 902.4, 896, 895, 832, 57.79], [896, 896, 896, 896, 832, 56]),
        (E4M3, "rceil", [957, 902.4, 896, 895, 832, 57.79], [960, 896, 896, 896, 832, 56]),
        (E4M3, "ceil", [957, 902.4, 896, 895, 832, 57.79], [960, 896, 896, 896, 832, 56]),
        # a cluster of layer-norm gains collapses onto one value
        (E4M3, "floor", [0.9990, 0.9375, 0.90625, 0.875, 0.85], [0.875] * 5),
        (E4M3, "rceil", [0.9990, 0.9375, 0.90625, 0.875, 0.85], [1, 0.9375, 0.875, 0.875, 0.875]),
        (E4M3, "even", [0.9990, 0.9375, 0.90625, 0.875, 0.85], [1, 0.9375, 0.875, 0.875, 0.875]),
        # exponents right next to a power of two, where a float32 log2 rounds to the wrong side
        (E4M3, "floor", [np.nextafter(np.float32(1024), np.float32(0))], [896]),
        (E4M3, "rceil", [np.nextafter(np.float32(448 * 1024), np.float32(np.inf))], [458752]),
        (E4M3, "rceil", [448 * 1024], [448 * 1024]),
        # the rounding of the maximum (half up) to the element's mantissa: 1.75 for one bit
        ("mxfp4_e2m1", "even", [6.9, 3, 0.25], [6, 3, 0]),
        ("mxfp4_e2m1", "even", [7.0, 3, 0.25], [8, 3, 0]),
        ("mxfp4_e2m1", "rceil", [6.9, 3, 0.25], [6, 3, 0]),
        # tiny blocks: the scale stays at 2^-127
        (E4M3, "floor", [2.0**-130] * 31 + [2.0**-149], [2.0**-130] * 31 + [0]),
        # subnormal elements: the step is that of the lowest binade
        (E4M3, "floor", [256, 2.0**-10, 2.0**-10 * 1.0001, 3 * 2.0**-10], [256, 0, 2**-9, 2**-8]),
        (E4M3, "floor", [256, 15.9, 2**-6 * (1 - 2**-8)], [256, 16, 2**-6]),
        ("mxfp6_e2m3", "floor", [2**-6, 2**-5, 2**-4, 2**-3, 0.25, 0.5, 1, 8],
         [0, 0, 0, 0, 0.25, 0.5, 1, 8]),
        # ties to even
        ("mxfp4_e2m1", "floor", [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], [0, 1, 1, 2, 2, 4, 4]),
        (E4M3, "floor", [432, 464, 4.25, 256], [448, 448, 4, 256]),
        ("mxint8", "floor", [1.999, -1.999, 1.984375, 1 / 128, 3 / 128],
         [1.984375, -1.984375, 1.984375, 0, 0.03125]),
    ],
)  # fmt: skip
def test_spot_values(fmt: str, rule: str, x: list[float], want: list[float]) -> None:
    for dtype in (np.float32, np.float64):
        q = fake_quantize(np.array(x, dtype), fmt, scale_rule=rule)
        assert q.dtype == dtype
        np.testing.assert_array_equal(q, np.array(want, dtype))


def test_tiny_block_is_finite() -> None:
    x = np.array([2.8094e-36, 9.18355e-40], np.float32)
    np.testing.assert_array_equal(
        fake_quantize(x, E4M3), np.array([448 * 2.0**-127, 0.15625 * 2.0**-127], np.float32)
    )
    np.testing.assert_array_equal(
        fake_quantize(x, E4M3, scale_rule="rceil"),
        np.array([240 * 2.0**-126, 0.078125 * 2.0**-126], np.float32),
    )


@pytest.mark.parametrize("fmt", minimal.FORMATS)
def test_largest_element_is_exact_at_every_power_of_two(fmt: str) -> None:
    emax, largest = minimal.FORMATS[fmt][3:]
    for k in range(-120, 127 - emax):
        amax = np.array([largest * 2.0**k])
        for rule in ("floor", "rceil"):
            assert minimal.scale_exponent(amax, fmt, rule) == k
            assert fake_quantize(amax, fmt, scale_rule=rule) == amax


def test_float64_is_rounded_once() -> None:
    assert fake_quantize(np.array([-431.99999999999994]), E4M3) == -416
    assert fake_quantize(np.array([1 + 2**-8 + 2**-40]), "bf16") == 1 + 2**-7


def test_bf16() -> None:
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -np.inf, np.nan, -0.0], np.float32)
    q = fake_quantize(x, "bf16")
    np.testing.assert_array_equal(q, np.array([1, 1.015625, np.inf, -np.inf, np.nan, 0]))
    assert np.signbit(q[5])


@pytest.mark.parametrize("fmt", minimal.FORMATS)
def test_nonfinite_and_zero_blocks(fmt: str) -> None:
    for poison, at in itertools.product((np.nan, np.inf, -np.inf), (0, 15, 31)):
        x = np.ones(64)
        x[at] = poison
        q = fake_quantize(x, fmt)
        assert np.isnan(q[:32]).all()
        assert (q[32:] == 1).all()
    q = fake_quantize(np.array([0.0, -0.0]), fmt)
    assert (q == 0).all()
    assert list(np.signbit(q)) == [False, fmt != "mxint8"]


# ---- derivatives and the probe, from their definitions ------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradient_is_the_central_difference(activation: str) -> None:
    params, x, y = problem(activation, width=8, batch=6, seed=0)
    if activation == "relu":  # the difference quotient must not straddle a kink
        stream = x
        for p in params:
            z, *_ = minimal.layernorm_forward(stream, p["ln_gamma"], p["ln_beta"])
            u = z @ p["w1"].T
            assert np.abs(u).min() > 3e-4
            stream = stream + np.maximum(u, 0) @ p["w2"].T + p["b2"]
    _, grads = minimal.loss_and_grads(params, x, y, activation)
    h = 1e-5
    for i, k in leaves(params):
        tensor = params[i][k]
        quotient = np.zeros_like(tensor)
        for index in np.ndindex(tensor.shape):
            start = tensor[index]
            tensor[index] = start + h
            above, _ = minimal.loss_and_grads(params, x, y, activation)
            tensor[index] = start - h
            below, _ = minimal.loss_and_grads(params, x, y, activation)
            tensor[index] = start
            quotient[index] = (above - below) / (2 * h)
        error = np.linalg.norm(quotient - grads[i][k]) / np.linalg.norm(grads[i][k])
        assert error < 1e-8, (i, k, error)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("preset", minimal.PRESETS)
def test_probe_identity(activation: str, preset: str) -> None:
    report = minimal.probe(*problem(activation), activation, minimal.PRESETS[preset])
    assert list(report) == ["all", "ln_gamma", "ln_beta", "w1", "w2", "b2"]
    for b in report.values():
        assert b["zeta"] ** 2 == pytest.approx((b["alpha"] - 1) ** 2 + b["rho"] ** 2, abs=1e-14)
        assert b["alpha"] == pytest.approx(b["cos"] * math.hypot(b["alpha"], b["rho"]), rel=1e-12)
    assert (report["all"]["zeta"] > 0) == (preset != "exact")


def test_probe_at_a_zero_gradient() -> None:
    params, x, _ = problem("linear")
    for p in params:  # with w2 = 0 and b2 = 0 the student is the identity
        p["w2"], p["b2"] = 0 * p["w2"], 0 * p["b2"]
    report = minimal.probe(params, x, x, "linear", minimal.PRESETS["all_e4m3"])
    assert all(math.isnan(v) for v in report["all"].values())


def test_an_unknown_site_is_refused() -> None:
    with pytest.raises(ValueError, match="fc3_fprop_x"):
        minimal.loss_and_grads(*problem("gelu"), "gelu", {"fc3_fprop_x": E4M3})


# ---- the fast code, held to this page ------------------------------------------------------------


def bits(x: Array) -> Array:
    """The bit patterns, so that -0 differs from 0; every NaN counts as one."""
    x = np.where(np.isnan(x), np.nan, x).astype(x.dtype)
    return x.view(f"u{x.itemsize}")


def awkward(rng: np.random.Generator, shape: tuple[int, ...], k: int, dtype: str) -> Array:
    """Values of many sizes around 2^k: ties, neighbours of ties, signed zeros, a NaN or an inf."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 3, shape)
    tie = np.round(x * 64) / 64 * 2.0 ** rng.integers(-3, 4, shape)
    near = np.nextafter(tie.astype(dtype), rng.choice([-np.inf, np.inf], shape).astype(dtype))
    x = np.ldexp(np.choose(rng.integers(0, 3, shape), [x, tie, near]).astype(dtype), k)
    x *= rng.choice(np.array([0.0, -0.0] + 10 * [1.0]), shape)
    x.flat[rng.integers(x.size)] = rng.choice([np.nan, np.inf, float(np.finfo("float32").max)])
    return np.asarray(x)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("fmt", minimal.FORMATS)
def test_fake_quantize_agrees_bit_for_bit(fmt: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    powers = [-155, -140, -130, -120, -40, 0, 9, 60, 115, 120]  # around the E8M0 range
    powers += [-1060, -300, 300, 1000] if dtype == "float64" else []  # and far outside
    for k, shape in itertools.product(powers, [(5, 64), (37, 43), (2, 33, 40), (70,)]):
        x = awkward(rng, shape, k, dtype)
        for axis, rule, rounding in itertools.product((0, -1), RULES, ROUNDINGS):
            size = int(rng.choice([32, 32, 16, 7]))
            want = fake_quantize(x, fmt, axis, size, rule, rounding)
            got = mxsim.fake_quantize(
                x, fmt, axis=axis, block_size=size, scale_rule=rule, rounding=rounding
            )
            assert got.dtype == want.dtype
            wrong = np.argwhere(bits(got) != bits(want))
            assert not wrong.size, (k, shape, axis, rule, rounding, size, len(wrong), wrong[0])


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_bf16_agrees_bit_for_bit(dtype: str) -> None:
    rng = np.random.default_rng(0)
    for k, rounding in itertools.product((-160, -140, -130, 0, 9, 120), ROUNDINGS):
        x = awkward(rng, (37, 43), k, dtype)
        x[0, :2] = [3.4e38, -3.4e38] if dtype == "float32" else [1e300, -1e300]
        want = fake_quantize(x, "bf16", rounding=rounding)
        got = mxsim.round_to(x, "bf16", rounding=rounding)
        np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", [(16, 2, 8), (40, 3, 70)])  # width, depth, batch: partial blocks
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("preset", minimal.PRESETS)
def test_gradients_and_probe_agree(
    preset: str, activation: str, shape: tuple[int, int, int], seed: int
) -> None:
    # The quantized presets get the bound of the exact one: in float64 the two codes could differ by
    # more only where a value lies within some 1e-15 of a tie, and no value does at these seeds.
    params, x, y = problem(activation, *shape, seed)
    cfg = mxsim.ProxyConfig(*shape, activation=activation, dtype="float64")
    scheme, sites = mxsim.scheme(preset), minimal.PRESETS[preset]
    want_loss, want = minimal.loss_and_grads(params, x, y, activation, sites)
    loss, grads = mxsim.loss_and_grads(params, x, y, cfg, scheme)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    for i, k in leaves(params):
        error = np.linalg.norm(grads[i][k] - want[i][k]) / np.linalg.norm(want[i][k])
        assert error < 1e-12, (i, k, error)

    report = mxsim.gradient_bias(params, x, y, cfg, scheme)
    for group, b in minimal.probe(params, x, y, activation, sites).items():
        got = report if group == "all" else report.groups[group]
        for name, value in b.items():
            assert getattr(got, name) == pytest.approx(value, rel=1e-12, abs=1e-12), (group, name)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_start_and_teacher_agree(activation: str) -> None:
    cfg = mxsim.ProxyConfig(48, 2, 24, activation=activation, dtype="float64")
    start = mxsim.init_params(cfg)
    want = minimal.init(np.random.default_rng(0), 48, 2, activation)
    for i, k in leaves(want):
        assert start[i][k].shape == want[i][k].shape
        if k.startswith("ln"):
            np.testing.assert_array_equal(start[i][k], want[i][k])
        else:  # other draws of one distribution: U(-bound, bound)
            bound = 1 / math.sqrt(want[i]["w2"].shape[1] if k == "b2" else want[i][k].shape[1])
            for a in (start[i][k], want[i][k]):
                assert 0.8 * bound < np.abs(a).max() <= bound * (1 + 1e-7)
                spread = bound * math.sqrt(4 / 45 / a.size)  # of the mean square, bound^2 / 3
                assert abs((a**2).mean() - bound**2 / 3) < 4 * bound * spread

    teacher = mxsim.make_teacher(cfg)
    layers = [{"w1": w1, "w2": w2} for w1, w2 in teacher.layers]
    own = minimal.init(np.random.default_rng(0), 48, 2, activation, ratio=1)
    for layer, w in zip(layers, own, strict=True):
        assert (layer["w1"].shape, layer["w2"].shape) == (w["w1"].shape, w["w2"].shape)
    x, y = minimal.draw_batch(np.random.default_rng(1), layers, 24, activation)
    rng = np.random.default_rng(1)
    np.testing.assert_array_equal(x, rng.standard_normal(x.shape))
    noise = 0.005 * rng.standard_normal(x.shape)
    np.testing.assert_allclose(teacher(x) + noise, y, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("preset", minimal.PRESETS)
def test_a_few_steps_of_training_agree(preset: str, activation: str) -> None:
    cfg = mxsim.ProxyConfig(
        40, 2, 24, lr=1e-2, steps=5, activation=activation, dtype="float64", eval_samples=1
    )
    run = mxsim.train(cfg, mxsim.scheme(preset))
    params = mxsim.init_params(cfg)
    batches = mxsim.make_batches(cfg, mxsim.make_teacher(cfg))
    m, v = ([{k: np.zeros_like(a) for k, a in p.items()} for p in params] for _ in range(2))
    for step in range(cfg.steps):
        x, y = batches.at(step)
        loss, grads = minimal.loss_and_grads(params, x, y, activation, minimal.PRESETS[preset])
        assert run.losses[step] == pytest.approx(loss, rel=1e-11), step
        minimal.adam_step(params, grads, m, v, step + 1, cfg.lr)
    for i, k in leaves(params):
        np.testing.assert_allclose(run.params[i][k], params[i][k], rtol=1e-9, atol=1e-11)
