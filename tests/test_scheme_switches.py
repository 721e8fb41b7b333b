"""Every switch of a scheme besides its sites: what it rounds, and that it rounds nothing else."""

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from scipy.special import ndtr

import mxsim
from mxsim import elementwise, steps
from mxsim.precision import Internals, PrecisionScheme, SiteFormat, precision_of
from mxsim.rounders import float_spec
from mxsim.rounding import NOT_AT_ALL

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=64, steps=6, eval_samples=64, lr=1e-2)
EXACT = mxsim.scheme("exact")
SR = SiteFormat("mxfp4_e2m1", rounding="stochastic")


def problem(cfg: mxsim.ProxyConfig = CFG, seed: int = 0) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(seed)
    params = mxsim.init_params(cfg)
    for block in params:
        block["ln_gamma"] += 0.1 * rng.standard_normal(cfg.width).astype(np.float32)
        block["ln_beta"] += 0.1 * rng.standard_normal(cfg.width).astype(np.float32)
    x, y = rng.standard_normal((2, cfg.batch, cfg.width)).astype(np.float32)
    return params, x, y


def bf16(x: Any) -> Any:
    return x.astype(ml_dtypes.bfloat16).astype(x.dtype)


def gradient(scheme: PrecisionScheme, step: int = 0) -> Any:
    params, x, y = problem()
    return mxsim.loss_and_grads(params, x, y, CFG, scheme, step)[1]


def flat(grads: Any) -> Any:
    return np.concatenate([block[k].ravel() for block in grads for k in block])


# ---------------------------------------------------------------- states and gradients


def test_gradients_are_rounded_for_the_optimizer_alone() -> None:
    exact, rounded = gradient(EXACT), gradient(replace(EXACT, gradients="bf16"))
    for a, b in zip(exact, rounded, strict=True):
        for kind in a:
            np.testing.assert_array_equal(bf16(a[kind]), b[kind])


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("field", ["master_weights", "moments"])
def test_states_stay_on_the_bf16_grid(field: str, optimizer: str) -> None:
    cfg = replace(CFG, optimizer=optimizer, momentum=0.9 if optimizer == "sgd" else 0.0)
    changed: dict[str, Any] = {field: "bf16"}
    training = mxsim.start(cfg, replace(EXACT, **changed)).advance()
    plain = mxsim.start(cfg, EXACT).advance()
    on_grid = {
        "master_weights": np.array_equal(training.flat, bf16(training.flat)),
        "moments": np.array_equal(training.optimizer.first, bf16(training.optimizer.first))
        and np.array_equal(training.optimizer.second, bf16(training.optimizer.second)),
    }
    assert on_grid == {name: name == field for name in on_grid}
    assert not np.array_equal(training.flat, plain.flat)


def test_one_adam_step_with_bf16_states_by_hand() -> None:
    cfg = replace(CFG, steps=2)
    scheme = replace(EXACT, master_weights="bf16", moments="bf16", internal_rounding="zero")
    training = mxsim.start(cfg, scheme)
    w0 = training.flat.copy()
    training.advance(1)
    g = training.last_gradient
    f = np.float32

    def toward_zero(x: Any) -> Any:
        return (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    m = toward_zero(f(1 - 0.9) * g)
    v = toward_zero(f(1 - 0.999) * (g * g))
    denominator = np.sqrt(v) / f(np.sqrt(1 - 0.999)) + f(1e-8)
    np.testing.assert_array_equal(training.optimizer.first, m)
    np.testing.assert_array_equal(training.optimizer.second, v)
    with np.errstate(invalid="ignore"):
        change = np.where(m == 0, f(0), f(1e-2 / (1 - 0.9)) * m / denominator)
    np.testing.assert_array_equal(training.flat, toward_zero(w0 - change))


def test_frozen_beta_freezes_beta_and_nothing_else() -> None:
    exact, frozen = gradient(EXACT), gradient(replace(EXACT, frozen_beta=True))
    for a, b in zip(exact, frozen, strict=True):
        np.testing.assert_array_equal(b["ln_beta"], 0.0)
        for kind in set(a) - {"ln_beta"}:
            np.testing.assert_array_equal(a[kind], b[kind])
    run = mxsim.train(CFG, replace(EXACT, frozen_beta=True))
    assert all((block["ln_beta"] == 0).all() for block in run.params)


def test_a_quantized_teacher_moves_the_targets_and_nothing_else() -> None:
    scheme = replace(mxsim.scheme("all_e4m3"), quantized_teacher=True)
    own, exact = mxsim.make_teacher(CFG, scheme), mxsim.make_teacher(CFG)
    x = np.random.default_rng(3).standard_normal((256, 32)).astype(np.float32)
    target, moved = exact(x), own(x)
    assert 0.01 < np.linalg.norm(moved - target) / np.linalg.norm(target) < 0.2
    y = x
    for w1, w2 in exact.layers:  # the same weights, by hand
        u = mxsim.fake_quantize(y, "mxfp8_e4m3") @ mxsim.fake_quantize(w1, "mxfp8_e4m3").T
        hidden = (u * ndtr(u)).astype(np.float32)
        y = mxsim.fake_quantize(hidden, "mxfp8_e4m3") @ mxsim.fake_quantize(w2, "mxfp8_e4m3").T
    assert np.linalg.norm(moved - y) < 0.02 * np.linalg.norm(y)  # single flips at erf's last bit
    params, xb, yb = problem()
    same = mxsim.loss_and_grads(params, xb, yb, CFG, replace(scheme, quantized_teacher=False))
    assert mxsim.loss_and_grads(params, xb, yb, CFG, scheme)[0] == same[0]
    assert not np.array_equal(
        mxsim.train(CFG, scheme).losses,
        mxsim.train(CFG, replace(scheme, quantized_teacher=False)).losses,
    )


def test_the_scripts_teacher_moves_as_far_as_was_measured() -> None:
    # paper_code_semantics: 12.9 % relative at width 64, depth 2 (one draw of weights there)
    cfg = mxsim.ProxyConfig(width=64, depth=2, batch=256)
    x = np.random.default_rng(0).standard_normal((2048, 64)).astype(np.float32)
    moved = []
    for seed in range(8):
        c = replace(cfg, seed=seed)
        exact = mxsim.make_teacher(c)(x)
        quantized = mxsim.make_teacher(c, mxsim.scheme("paper_code"))(x)
        moved.append(np.linalg.norm(quantized - exact) / np.linalg.norm(exact))
    assert 0.08 < np.median(moved) < 0.17, moved


# ---------------------------------------------------------------- copies, rotation, randomness


def test_reused_copies_differ_from_requantized_ones_only_where_the_axis_does() -> None:
    only = PrecisionScheme(fc1_fprop_w=SiteFormat("mxfp4_e2m1"), backward_operands="reuse")
    params, x, y = problem()
    quantized = [dict(block) for block in params]
    for block in quantized:
        block["w1"] = mxsim.fake_quantize(block["w1"], "mxfp4_e2m1", 1)
    # With the copy reused, forward and backward see one weight: the exact model at that weight.
    got = mxsim.loss_and_grads(params, x, y, CFG, only)
    want = mxsim.loss_and_grads(quantized, x, y, CFG, EXACT)
    assert got[0] == want[0]
    np.testing.assert_array_equal(flat(got[1]), flat(want[1]))
    apart = mxsim.loss_and_grads(params, x, y, CFG, replace(only, backward_operands="requantize"))
    assert not np.array_equal(flat(apart[1]), flat(want[1]))


def test_a_reused_random_copy_is_the_forwards_own() -> None:
    only = PrecisionScheme(fc2_fprop_w=SR, backward_operands="reuse")
    params, x, y = problem()
    fixed = [dict(block) for block in params]
    for k, block in enumerate(fixed):
        site = mxsim.precision.SITES.index("fc2_fprop_w")
        noise = mxsim.Noise(CFG.seed, 5, k * 64 + site)
        block["w2"] = mxsim.fake_quantize(
            block["w2"], "mxfp4_e2m1", 1, rounding="stochastic", noise=noise
        )
    got = mxsim.loss_and_grads(params, x, y, CFG, only, step=5)
    want = mxsim.loss_and_grads(fixed, x, y, CFG, EXACT)
    np.testing.assert_array_equal(flat(got[1]), flat(want[1]))


@pytest.mark.parametrize(("n", "size"), [(64, 16), (64, 32), (50, 16), (7, 4), (1, 2), (33, 32)])
def test_a_rotation_is_orthogonal_and_hadamards(n: int, size: int) -> None:
    rng = np.random.default_rng(0)
    signs = rng.choice([-1.0, 1.0], n)
    x = rng.standard_normal((n, 5))
    turned = x.copy()
    elementwise.rotate_rows(turned, signs, size)
    whole = np.zeros((n, n))
    first = 0
    while first < n:  # groups, the remainder in smaller powers of two
        group = size
        while group > n - first:
            group //= 2
        h = np.ones((1, 1))
        while len(h) < group:
            h = np.block([[h, h], [h, -h]])
        whole[first : first + group, first : first + group] = h / np.sqrt(group)
        first += group
    np.testing.assert_allclose(whole @ whole.T, np.eye(n), atol=1e-12)
    np.testing.assert_allclose(turned, whole @ (signs[:, None] * x), atol=1e-12)


@pytest.mark.parametrize("kind", ["fixed", "random"])
def test_rotation_changes_a_quantized_wgrad_and_leaves_an_exact_one(kind: str) -> None:
    exact = gradient(EXACT)
    np.testing.assert_array_equal(flat(gradient(replace(EXACT, hadamard=kind))), flat(exact))
    wgrad = PrecisionScheme(fc1_wgrad_dy=SiteFormat("mxfp8_e4m3"), hadamard=kind)
    grads, plain = gradient(wgrad), gradient(replace(wgrad, hadamard="none"))
    for k in range(CFG.depth):
        error = np.linalg.norm(grads[k]["w1"] - exact[k]["w1"])
        assert 0 < error < 0.05 * np.linalg.norm(exact[k]["w1"])  # it undoes itself in the product
        assert not np.array_equal(grads[k]["w1"], plain[k]["w1"])
        for other in ("w2", "b2", "ln_gamma", "ln_beta"):
            np.testing.assert_array_equal(grads[k][other], exact[k][other])


def test_signs_are_one_vector_a_run_or_new_ones() -> None:
    fixed = replace(EXACT, hadamard="fixed")
    at = [
        precision_of(fixed, 2, seed=1, step=s)[b].signs("fc1", 64) for s in (0, 9) for b in (0, 1)
    ]
    assert all(np.array_equal(at[0], each) for each in at)
    np.testing.assert_array_equal(at[0][:16], at[0][16:32])
    other = precision_of(fixed, 2, seed=2)[0].signs("fc1", 64)
    assert not np.array_equal(at[0], other)
    new = replace(EXACT, hadamard="random")
    drawn = [
        precision_of(new, 2, seed=1, step=s)[b].signs(layer, 64)
        for s in (0, 1)
        for b in (0, 1)
        for layer in ("fc1", "fc2")
    ]
    assert len({tuple(each) for each in drawn}) == 8
    assert set(np.concatenate(drawn)) == {-1.0, 1.0}


def test_stochastic_sites_are_a_function_of_seed_step_block_and_site() -> None:
    scheme = PrecisionScheme(fc1_fprop_w=SR, fc2_fprop_w=SR, ln_gamma=SR)
    np.testing.assert_array_equal(flat(gradient(scheme, 3)), flat(gradient(scheme, 3)))
    assert not np.array_equal(flat(gradient(scheme, 3)), flat(gradient(scheme, 4)))
    params, x, y = problem()
    other = mxsim.loss_and_grads(params, x, y, replace(CFG, seed=1), scheme, 3)[1]
    assert not np.array_equal(flat(other), flat(gradient(scheme, 3)))
    w = np.full((32, 32), 0.3, np.float32)
    w[:, 0] = 1.0
    seen = {
        precision_of(scheme, 2, 0, step)[block].operand(site, w, 1, np.empty_like(w)).tobytes()
        for step in (0, 1)
        for block in (0, 1)
        for site in ("fc1_fprop_w", "fc2_fprop_w")
    }
    assert len(seen) == 8


def test_stochastic_dy_makes_the_expected_weight_gradient_the_exact_one() -> None:
    # dw is linear in wgrad's dy, so its mean over random bits tends to the exact one; ties to even
    # keep a bias.  E2M1 by rceil: no value saturates, which no rounding could make good.
    params, x, y = problem()
    site = SiteFormat("mxfp4_e2m1", scale_rule="rceil", rounding="stochastic")
    scheme = PrecisionScheme(fc2_wgrad_dy=site)
    exact = gradient(EXACT)[1]["w2"].astype(np.float64)
    draws = [
        mxsim.loss_and_grads(params, x, y, CFG, scheme, step)[1][1]["w2"] for step in range(400)
    ]
    mean, sd = np.mean(draws, axis=0, dtype=np.float64), np.std(draws, axis=0, dtype=np.float64)
    z = (mean - exact) / (sd / np.sqrt(len(draws)))
    assert abs(np.mean(z)) < 5 / np.sqrt(z.size)
    assert 0.8 < np.mean(z**2) < 1.2
    even = PrecisionScheme(fc2_wgrad_dy=replace(site, rounding="even"))
    biased = gradient(even)[1]["w2"]
    assert np.linalg.norm(biased - exact) > 5 * np.linalg.norm(mean - exact)


# ---------------------------------------------------------------- steps


def test_steps_without_rounding_are_the_exact_operations() -> None:
    # One direction by steps, with inputs that bf16 holds, runs the step formulas unrounded.
    rng = np.random.default_rng(5)
    n, d = 40, 32
    how = (NOT_AT_ALL, float_spec(mxsim.FloatFormat(8, 7), "even", np.dtype(np.float64))[1])
    x, dz = rng.standard_normal((2, n, d))
    gamma, beta = rng.standard_normal((2, d))
    z, xhat, rows = np.empty((n, d)), np.empty((n, d)), np.empty((4, d))
    var_eps = np.empty(n)
    steps.layer_norm_forward(x, gamma, beta, 1e-5, z, xhat, var_eps, how, rows, True)
    mean, var = x.mean(1, keepdims=True), x.var(1, keepdims=True)
    want = (x - mean) / np.sqrt(var + 1e-5)
    np.testing.assert_allclose(xhat, want, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(z, want * gamma + beta, rtol=1e-12, atol=1e-14)
    dx, dgamma, dbeta = np.zeros((n, d)), np.empty(d), np.empty(d)
    steps.layer_norm_backward(dz, xhat, var_eps, gamma, dx, dgamma, dbeta, how, rows, True)
    t = dz * gamma
    slope = (t * want).mean(1, keepdims=True)
    full = (t - t.mean(1, keepdims=True) - want * slope) / np.sqrt(var + 1e-5)
    np.testing.assert_allclose(dx, full, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(dgamma, (dz * want).sum(0), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(dbeta, dz.sum(0), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("activation", ["gelu", "relu", "linear", "swiglu"])
def test_step_slopes_are_derivatives_of_the_step_functions(activation: str) -> None:
    rng = np.random.default_rng(6)
    how = (NOT_AT_ALL, float_spec(mxsim.FloatFormat(8, 7), "even", np.dtype(np.float64))[1])
    h = 24
    u = rng.standard_normal((5, 2 * h if activation == "swiglu" else h))

    def run(u: Any) -> tuple[Any, Any, Any]:
        hidden, slope = np.empty((5, h)), np.empty_like(u)
        gate = np.empty((5, h if activation == "swiglu" else 0))
        steps.activation_forward(u, hidden, slope, gate, activation, how, how, how)
        return hidden, slope, gate

    _, slope, gate = run(u)
    dhidden = rng.standard_normal((5, h))
    du = np.empty_like(u)
    steps.activation_backward(dhidden, slope, gate, du, activation, how, how)
    t, direction = 1e-6, rng.standard_normal(u.shape)
    ahead, behind = run(u + t * direction)[0], run(u - t * direction)[0]
    numeric = ((ahead - behind) / (2 * t) * dhidden).sum()
    # GELU's coefficients are bf16 numbers: 0.2138671875 stands for 3 * 1.59375 * 0.044677734375.
    tolerance = 2e-3 if activation == "gelu" else 1e-7
    assert (du * direction).sum() == pytest.approx(numeric, rel=tolerance, abs=tolerance)


def test_internals_act_in_their_direction_alone() -> None:
    params, x, y = problem()
    loss = mxsim.loss_and_grads(params, x, y, CFG, EXACT)[0]
    for name in vars(Internals()):
        forward = PrecisionScheme(forward=Internals(**{name: "bf16"}))
        backward = PrecisionScheme(backward=Internals(**{name: "bf16"}))
        assert mxsim.loss_and_grads(params, x, y, CFG, forward)[0] != loss, name
        got, grads = mxsim.loss_and_grads(params, x, y, CFG, backward)
        assert got == loss, name
        assert not np.array_equal(flat(grads), flat(gradient(EXACT))), name


def test_fields_refuse_what_is_not_allowed() -> None:
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"forward": "bf16"}, TypeError, "forward must be an Internals.*got 'bf16'"),
        ({"forward": {"gemm": "bf16"}}, ValueError, "gemm_in.*got 'gemm'"),
        ({"internal_rounding": "stochastic"}, ValueError, "even, away, zero; got 'stochastic'"),
        ({"backward_operands": "copy"}, ValueError, "requantize, reuse; got 'copy'"),
        ({"gradients": "fp16"}, ValueError, "exact, bf16; got 'fp16'"),
        ({"master_weights": "exact"}, ValueError, "fp32, bf16; got 'exact'"),
        ({"moments": None}, TypeError, "moments must be a string"),
        ({"hadamard": "yes"}, ValueError, "none, fixed, random; got 'yes'"),
        ({"hadamard": "fixed", "hadamard_size": 12}, ValueError, "power of two.*got 12"),
        ({"frozen_beta": 1}, TypeError, "frozen_beta must be True or False; got 1"),
        ({"ln_gamma": SiteFormat("mxint8", block_size=(2, 2))}, ValueError, "ln_gamma is a vector"),
        ({"quantized_teacher": True, "fc1_fprop_x": SR}, ValueError, "quantized_teacher needs"),
    ]
    for fields, error, words in cases:
        with pytest.raises(error, match=words):
            PrecisionScheme(**fields)
    with pytest.raises(ValueError, match="activation must be one of exact, bf16, bf16_gate"):
        Internals(activation="fp16")
    with pytest.raises(ValueError, match="gemm_in must be one of exact, bf16; got 'bf16_gate'"):
        Internals(gemm_in="bf16_gate")
