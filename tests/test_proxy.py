"""The hand-written backward pass, and where each of the fourteen sites sits in it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mxsim
from mxsim import ops, proxy
from mxsim.config import ACTIVATIONS, NORMS
from mxsim.precision import SITES, BlockPrecision, PrecisionScheme, SiteFormat, precision_of
from mxsim.proxy import KINDS, Params

Array = NDArray[Any]
EXACT = mxsim.scheme("exact")
E2M1 = SiteFormat("mxfp4_e2m1")


def problem(
    activation: str,
    width: int = 6,
    depth: int = 3,
    samples: int = 5,
    dtype: str = "float64",
    norm: str = "layer",
) -> tuple[mxsim.ProxyConfig, Params, Array, Array]:
    """A small student away from its symmetric start, and a batch that it does not fit."""
    cfg = mxsim.ProxyConfig(
        width=width, depth=depth, batch=samples, activation=activation, dtype=dtype, norm=norm
    )
    rng = np.random.default_rng(1)
    params = mxsim.init_params(cfg)
    for block in params:
        for value in block.values():
            value += 0.1 * rng.standard_normal(value.shape).astype(value.dtype)
    x, y = rng.standard_normal((2, samples, width)).astype(dtype)
    return cfg, params, x, y


UNUSED: dict[str, tuple[str, ...]] = {
    "none": ("ln_gamma", "ln_beta"),
    "layer_no_affine": ("ln_gamma", "ln_beta"),
}
UNUSED |= {"rms": ("ln_beta",), "layer": ()}


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_backward_against_central_differences(activation: str, norm: str) -> None:
    cfg, params, x, y = problem(activation, norm=norm)
    _, grads = mxsim.loss_and_grads(params, x, y, cfg, EXACT)
    h = 1e-5

    def loss() -> float:
        return mxsim.loss_and_grads(params, x, y, cfg, EXACT)[0]

    if activation == "relu":  # no pre-activation within reach of the kink
        ws = proxy.workspace(cfg, len(x), np.float64)
        proxy.forward(params, x, cfg, precision_of(EXACT, cfg.depth), ws)
        for block, state in zip(params, ws.blocks, strict=True):
            assert np.abs(state.z @ block["w1"].T).min() > 20 * h
    for k, block in enumerate(params):
        for kind, value in block.items():
            numeric = np.empty_like(value)
            for index in np.ndindex(value.shape):
                kept = value[index]
                value[index] = kept + h
                above = loss()
                value[index] = kept - h
                numeric[index] = (above - loss()) / (2 * h)
                value[index] = kept
            error, size = np.linalg.norm(numeric - grads[k][kind]), np.linalg.norm(grads[k][kind])
            if kind in UNUSED[norm]:
                assert size == np.linalg.norm(numeric) == 0
            else:
                assert size > 0
                assert error < 1e-8 * size, (k, kind)


def test_norms_are_what_they_say() -> None:
    cfg, params, x, _ = problem("linear", width=8, depth=1)
    ws = proxy.workspace(cfg, len(x), np.float64)
    gamma, beta = params[0]["ln_gamma"], params[0]["ln_beta"]
    centred = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + cfg.ln_eps)
    rms = x / np.sqrt((x**2).mean(1, keepdims=True) + cfg.ln_eps)
    expected = {
        "layer": centred * gamma + beta,
        "layer_no_affine": centred,
        "rms": rms * gamma,
        "none": x,
    }
    for norm, z in expected.items():
        proxy.forward(params, x, replace(cfg, norm=norm), precision_of(EXACT, 1), ws)
        np.testing.assert_allclose(ws.blocks[0].z, z, rtol=1e-13, atol=1e-14, err_msg=norm)


def test_the_tanh_form_of_gelu() -> None:
    cfg, params, x, _ = problem("gelu_tanh", width=8, depth=1)
    ws = proxy.workspace(cfg, len(x), np.float64)
    proxy.forward(params, x, cfg, precision_of(EXACT, 1), ws)
    u = ws.blocks[0].z @ params[0]["w1"].T
    t = np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u**3))
    np.testing.assert_allclose(ws.blocks[0].hidden, 0.5 * u * (1 + t), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "swiglu"])
def test_slopes_far_out_are_those_of_the_function(activation: str) -> None:
    far = np.array([[-3e38, -1e20, -1e13, -1e3, 1e3, 1e13, 1e20, 3e38]], np.float32)
    u = np.concatenate([np.ones_like(far), far], axis=1) if activation == "swiglu" else far
    hidden, slope = np.empty_like(far), np.empty_like(u)
    ops.activation_forward(u, hidden, slope, activation)
    np.testing.assert_array_equal(hidden, np.maximum(far, 0))
    np.testing.assert_array_equal(slope[:, -8:], (far > 0).astype(np.float32))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("scheme", ["all_e4m3", "paper_code", "bf16"])
def test_every_norm_works_under_every_kind_of_scheme(norm: str, scheme: str) -> None:
    cfg, params, x, y = problem("swiglu", width=40, samples=33, dtype="float32", norm=norm)
    exact = mxsim.loss_and_grads(params, x, y, cfg, EXACT)
    loss, grads = mxsim.loss_and_grads(params, x, y, cfg, mxsim.scheme(scheme))
    assert loss != exact[0]
    assert loss == pytest.approx(exact[0], rel=0.1)
    for kind in ("w1", "w2", "b2"):
        for a, b in zip(exact[1], grads, strict=True):
            assert np.linalg.norm(a[kind] - b[kind]) < 0.25 * np.linalg.norm(a[kind]), kind


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_float32_agrees_with_float64(activation: str) -> None:
    cfg, params, x, y = problem(activation, width=48, samples=40)
    narrow = [{k: v.astype(np.float32) for k, v in block.items()} for block in params]
    wide = [{k: v.astype(np.float64) for k, v in block.items()} for block in narrow]
    x32, y32 = x.astype(np.float32), y.astype(np.float32)
    loss32, grads32 = mxsim.loss_and_grads(narrow, x32, y32, cfg, EXACT)
    loss64, grads64 = mxsim.loss_and_grads(wide, x32, y32, cfg, EXACT)
    assert grads32[0]["w1"].dtype == np.float32
    assert loss32 == pytest.approx(loss64, rel=1e-6)
    for a, b in zip(grads32, grads64, strict=True):
        for kind in KINDS:
            assert np.linalg.norm(a[kind] - b[kind]) < 3e-6 * np.linalg.norm(b[kind]), kind


# For each site: does it change the loss, and which gradients of a two-block model does it change?
# f fprop sites change everything; a dgrad site changes what lies below; wgrad its own weight only.
BELOW_FC2 = {"ln_gamma", "ln_beta", "w1"}
BELOW_FC1 = {"ln_gamma", "ln_beta"}
REACH = {
    "fc1_dgrad_dy": BELOW_FC1,
    "fc1_dgrad_w": BELOW_FC1,
    "fc2_dgrad_dy": BELOW_FC2,
    "fc2_dgrad_w": BELOW_FC2,
    "fc1_wgrad_dy": {"w1"},
    "fc1_wgrad_x": {"w1"},
    "fc2_wgrad_dy": {"w2"},
    "fc2_wgrad_x": {"w2"},
}


@pytest.mark.parametrize("site", SITES)
def test_each_site_alone_reaches_what_it_must_and_nothing_else(site: str) -> None:
    cfg, params, x, y = problem("gelu", width=8, depth=2)
    # Quantize the site in the upper block only; the lower block then sees its dx.
    scheme = replace(EXACT, overrides=((1, site, E2M1),))
    loss, exact = mxsim.loss_and_grads(params, x, y, cfg, EXACT)
    loss_q, quantized = mxsim.loss_and_grads(params, x, y, cfg, scheme)
    changed = {
        (k, kind)
        for k in range(2)
        for kind in KINDS
        if not np.array_equal(exact[k][kind], quantized[k][kind])
    }
    everything = {(k, kind) for k in range(2) for kind in KINDS}
    if site in REACH:
        assert loss_q == loss
        own = {(1, kind) for kind in REACH[site]}
        wgrad = "wgrad" in site
        assert changed == (own if wgrad else own | {(0, kind) for kind in KINDS})
    else:
        assert loss_q != loss
        assert changed == everything


def test_six_operands_come_from_high_precision_along_the_contraction_axis() -> None:
    cfg, params, x, y = problem("gelu", width=8, depth=1)
    seen: dict[str, tuple[Array, int]] = {}

    class Recorder:
        rounding = "even"

        def __init__(self, site: str) -> None:
            self.site = site

        def __call__(self, values: Array, axis: int, out: Array, noise: None) -> Array:
            assert self.site not in seen, f"{self.site} is quantized twice"
            seen[self.site] = values.copy(), axis
            out[...] = 0.5 * values  # a marked copy: must not reach another site
            return out

    recorders: Any = {site: Recorder(site) for site in SITES}
    sites = [BlockPrecision(EXACT, recorders, 0)]
    ws = proxy.workspace(cfg, len(x), np.float64)
    grads = proxy.parameter_views(np.empty(proxy.parameter_count(cfg)), cfg)
    proxy.loss_and_grads_into(params, x, y, cfg, sites, ws, grads)
    axes = {site: axis for site, (_, axis) in seen.items()}
    contraction = {"fprop_x": 1, "fprop_w": 1, "dgrad_dy": 1, "dgrad_w": 0, "wgrad_dy": 0}
    contraction["wgrad_x"] = 0
    assert axes == {f"{fc}_{op}": a for fc in ("fc1", "fc2") for op, a in contraction.items()} | {
        "ln_gamma": 0,
        "ln_beta": 0,
    }
    state = ws.blocks[0]
    high_precision = {
        "fc1_fprop_x": state.z,
        "fc1_wgrad_x": state.z,
        "fc2_fprop_x": state.hidden,
        "fc2_wgrad_x": state.hidden,
        "fc1_fprop_w": params[0]["w1"],
        "fc1_dgrad_w": params[0]["w1"],
        "fc2_fprop_w": params[0]["w2"],
        "fc2_dgrad_w": params[0]["w2"],
        "fc2_dgrad_dy": ws.dstream,
        "fc2_wgrad_dy": ws.dstream,
        "ln_gamma": params[0]["ln_gamma"],
        "ln_beta": params[0]["ln_beta"],
    }
    for site, values in high_precision.items():
        np.testing.assert_array_equal(seen[site][0], values, err_msg=site)
    np.testing.assert_array_equal(seen["fc1_dgrad_dy"][0], seen["fc1_wgrad_dy"][0])


@pytest.mark.parametrize("name", ["exact", "all_e4m3", "paper_code", "nvfp4_recipe", "bf16"])
@pytest.mark.parametrize("norm", NORMS)
def test_evaluation_with_weights_rounded_once_is_the_forward_pass(name: str, norm: str) -> None:
    cfg, params, x, y = problem("gelu", width=40, samples=64, dtype="float32", norm=norm)
    scheme = mxsim.scheme(name)
    ws = proxy.workspace(cfg, 64, np.float32)
    prediction = proxy.forward(params, x, cfg, precision_of(scheme, cfg.depth, 0, 9), ws)
    loss = float(np.mean((prediction - y).astype(np.float64) ** 2))
    assert proxy.evaluate(params, x, y, cfg, scheme, 9) == pytest.approx(loss, rel=1e-7)


def test_layer_norm_backward_uses_the_quantized_gamma() -> None:
    # One block above a second: the lower block's gradient passes through the upper gamma.
    cfg, params, x, y = problem("gelu", width=8, depth=2)
    only = replace(EXACT, overrides=((1, "ln_gamma", E2M1),))
    _, quantized = mxsim.loss_and_grads(params, x, y, cfg, only)
    rounded = [{k: v.copy() for k, v in block.items()} for block in params]
    rounded[1]["ln_gamma"] = mxsim.fake_quantize(params[1]["ln_gamma"], "mxfp4_e2m1")
    _, reference = mxsim.loss_and_grads(rounded, x, y, cfg, EXACT)
    for kind in KINDS:
        np.testing.assert_array_equal(quantized[0][kind], reference[0][kind], err_msg=kind)


def test_loss_and_grads_is_pure_and_takes_any_layout() -> None:
    cfg, params, x, y = problem("swiglu", width=10, samples=7)
    before = [{k: v.copy() for k, v in block.items()} for block in params]
    scheme = mxsim.scheme("all_e4m3")
    loss, grads = mxsim.loss_and_grads(params, x, y, cfg, scheme)
    odd = [{k: np.asfortranarray(v) for k, v in block.items()} for block in params]
    strided = np.repeat(x, 2, axis=0)[::2]
    loss2, grads2 = mxsim.loss_and_grads(odd, strided, np.asfortranarray(y), cfg, scheme)
    assert loss == loss2
    for k in range(cfg.depth):
        for kind in KINDS:
            np.testing.assert_array_equal(params[k][kind], before[k][kind])
            np.testing.assert_array_equal(grads[k][kind], grads2[k][kind])


def test_evaluation_in_chunks_equals_one_batch() -> None:
    cfg, params, _, _ = problem("gelu", width=40, samples=16)
    x, y = np.random.default_rng(2).standard_normal((2, 50, 40))
    scheme = mxsim.scheme("all_e4m3")
    whole, _ = mxsim.loss_and_grads(params, x, y, cfg, scheme)
    assert proxy.evaluate(params, x, y, cfg, scheme) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p, x, y: (p[:1], x, y), ValueError, "3 blocks"),
        (lambda p, x, y: ([{**b, "w1": b["w1"].T} for b in p], x, y), ValueError, "w1"),
        (lambda p, x, y: ([{**b, "extra": b["w1"]} for b in p], x, y), ValueError, "extra"),
        (lambda p, x, y: (p, x[:, :2], y), ValueError, r"\(n, 6\)"),
        (lambda p, x, y: (p, x, y[:2]), ValueError, "one shape"),
        (lambda p, x, y: (p, x[:0], y[:0]), ValueError, "n >= 1"),
        (lambda p, x, y: (p, x * 1j, y), TypeError, "complex"),
        (lambda p, x, y: ([{**b, "b2": b["b2"] * 1j} for b in p], x, y), TypeError, "complex"),
    ],
)
def test_what_does_not_fit_is_named(change: Any, error: type[Exception], words: str) -> None:
    cfg, params, x, y = problem("gelu")
    p, x, y = change(params, x, y)
    with pytest.raises(error, match=words):
        mxsim.loss_and_grads(p, x, y, cfg, EXACT)


def test_an_override_beyond_the_depth_is_refused() -> None:
    cfg, params, x, y = problem("gelu")
    scheme = PrecisionScheme(overrides=((7, "ln_gamma", SiteFormat("bf16")),))
    with pytest.raises(ValueError, match=r"block 7.*depth 3"):
        mxsim.loss_and_grads(params, x, y, cfg, scheme)
