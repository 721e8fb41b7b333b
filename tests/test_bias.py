"""The same-point instruments: identities, corner values, groups, saturation."""

import math

import numpy as np
import pytest

import mxsim
from mxsim.bias import PROBE_GROUPS, Probe, ProbePlan, bias_of, blank_series, saturated_share
from mxsim.precision import PrecisionScheme, SiteFormat
from mxsim.proxy import KINDS

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=16)


def start(
    seed: int = 0,
) -> tuple[list[dict[str, np.ndarray]], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    params = mxsim.init_params(CFG)
    for block in params:
        block["ln_gamma"] += 0.05 * rng.standard_normal(32).astype(np.float32)
        block["ln_beta"] += 0.05 * rng.standard_normal(32).astype(np.float32)
    x, y = rng.standard_normal((2, 16, 32)).astype(np.float32)
    return params, x, y


def test_definitions_on_vectors_worked_by_hand() -> None:
    bias = bias_of(np.array([3.0, 4.0]), np.array([6.0, 4.0]))
    assert bias.zeta == pytest.approx(3 / 5)
    assert bias.alpha == pytest.approx(34 / 25)
    assert bias.cos == pytest.approx(34 / (5 * math.sqrt(52)))
    # g~ - alpha g = (6 - 4.08, 4 - 5.44) = (1.92, -1.44), of norm 2.4
    assert bias.rho == pytest.approx(2.4 / 5)
    assert bias.norm == pytest.approx(5.0)
    assert bias.norm_quantized == pytest.approx(math.sqrt(52))


@pytest.mark.parametrize("name", ["gemm_e4m3", "ln_only_e4m3", "all_e2m1", "all_int8"])
def test_identity_and_groups(name: str) -> None:
    params, x, y = start()
    report = mxsim.gradient_bias(params, x, y, CFG, mxsim.scheme(name))
    blocks = range(CFG.depth)
    assert set(report.groups) == {*KINDS, *blocks, *((kind, k) for kind in KINDS for k in blocks)}
    for bias in (report, *report.groups.values()):
        assert bias.zeta**2 == pytest.approx((bias.alpha - 1) ** 2 + bias.rho**2, rel=1e-12)
        assert bias.cos == pytest.approx(bias.alpha * bias.norm / bias.norm_quantized, rel=1e-9)
    # The parts' squared errors add up to the whole's.
    for keys in (KINDS, tuple(blocks), tuple((kind, k) for kind in KINDS for k in blocks)):
        parts = [report.groups[key] for key in keys]
        total = sum((p.zeta * p.norm) ** 2 for p in parts)
        assert total == pytest.approx((report.zeta * report.norm) ** 2, rel=1e-10)


def test_it_is_the_difference_of_the_two_gradients_at_one_point() -> None:
    params, x, y = start()
    scheme = mxsim.scheme("all_e4m3")
    report = mxsim.gradient_bias(params, x, y, CFG, scheme)
    loss, g = mxsim.loss_and_grads(params, x, y, CFG, mxsim.scheme("exact"))
    loss_q, q = mxsim.loss_and_grads(params, x, y, CFG, scheme)
    assert (report.loss, report.loss_quantized) == (loss, loss_q)
    w1, w1_q = g[1]["w1"].astype(np.float64), q[1]["w1"].astype(np.float64)
    bias = report.groups["w1", 1]
    assert bias.zeta == pytest.approx(np.linalg.norm(w1_q - w1) / np.linalg.norm(w1), rel=1e-12)
    assert bias.alpha == pytest.approx((w1_q * w1).sum() / (w1 * w1).sum(), rel=1e-12)


def test_the_exact_scheme_has_no_bias_at_all() -> None:
    params, x, y = start()
    report = mxsim.gradient_bias(params, x, y, CFG, PrecisionScheme())
    for bias in (report, *report.groups.values()):
        assert (bias.zeta, bias.alpha, bias.rho) == (0.0, 1.0, 0.0)
        assert bias.cos == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("exact", "quantized", "expected"),
    [
        ([0, 0], [0, 0], (0.0, 1.0, 1.0, 0.0)),
        ([0, 0], [1, 0], (math.inf, 0.0, 1.0, math.inf)),
        ([1, 0], [0, 0], (1.0, 0.0, 0.0, 0.0)),
        ([1, 0], [-1, 0], (2.0, -1.0, -1.0, 0.0)),
        ([1e-200, 0], [2e-200, 0], (1.0, 1.0, 2.0, 0.0)),
        ([1e200, 0], [2e200, 0], (1.0, 1.0, 2.0, 0.0)),
        ([5e-324, 0], [5e-324, 0], (0.0, 1.0, 1.0, 0.0)),
    ],
)
def test_corner_values(
    exact: list[float], quantized: list[float], expected: tuple[float, ...]
) -> None:
    bias = bias_of(np.array(exact, float), np.array(quantized, float))
    assert (bias.zeta, bias.cos, bias.alpha, bias.rho) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_nonfinite_gradient_gives_nan_and_no_warning(bad: float) -> None:
    bias = bias_of(np.array([1.0, 2.0]), np.array([1.0, bad]))
    assert all(math.isnan(v) for v in (bias.zeta, bias.cos, bias.alpha, bias.rho))


def test_a_zero_exact_gradient_in_the_network_is_a_value() -> None:
    cfg = mxsim.ProxyConfig(width=8, depth=1, batch=4, activation="linear")
    params = mxsim.init_params(cfg)
    params[0]["w2"][...] = 0
    params[0]["b2"][...] = 0
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    report = mxsim.gradient_bias(params, x, x, cfg, mxsim.scheme("all_e4m3"))
    assert (report.norm, report.zeta, report.cos, report.alpha) == (0.0, 0.0, 1.0, 1.0)


def test_saturated_share_counts_before_rounding() -> None:
    site = SiteFormat("mxfp8_e4m3")
    gammas = np.full(64, 0.9, np.float32)  # one block of 32 on the cliff, one off it
    gammas[32:] = 0.8
    assert saturated_share(gammas, site) == 0.5
    assert (
        saturated_share(np.array([0.875, 0.8751], np.float32), site) == 0.5
    )  # exactly the largest is not
    assert saturated_share(-gammas, site) == 0.5
    assert saturated_share(gammas, SiteFormat("mxfp8_e4m3", "rceil")) == 0.0
    assert saturated_share(gammas, SiteFormat("bf16")) == 0.0
    # A short last block has its own maximum: 0.5 does not saturate there.
    assert saturated_share(np.array([0.9] * 32 + [0.5], np.float32), site) == 32 / 33


def test_bad_arguments_of_the_instruments() -> None:
    params, x, y = start()
    with pytest.raises(ValueError, match=r"one shape; got \(3,\), \(2,\)"):
        bias_of(np.ones(3), np.ones(2))
    with pytest.raises(ValueError, match="step must be at least 0; got -1"):
        mxsim.gradient_bias(params, x, y, CFG, mxsim.scheme("exact"), step=-1)
    with pytest.raises(TypeError, match="site must be a SiteFormat; got 'mxfp8_e4m3'"):
        saturated_share(np.ones(3), "mxfp8_e4m3")  # type: ignore[arg-type]
    assert saturated_share([], SiteFormat("mxfp8_e4m3")) == 0


def test_the_probe_records_what_gradient_bias_computes() -> None:
    params, x, y = start()
    schemes = tuple((name, mxsim.scheme(name)) for name in ("gemm_e4m3", "ln_only_e4m3"))
    plan = ProbePlan(7, schemes)
    probe = Probe(plan, CFG, blank_series(plan, CFG))
    before = [{k: v.copy() for k, v in block.items()} for block in params]
    for step in (0, 5, 7):
        probe(step, params, x, y)
    series = probe.series
    assert series.labels == ("gemm_e4m3", "ln_only_e4m3")
    np.testing.assert_array_equal(series.steps[:3], [0, 7, 14])
    assert np.isfinite(series.zeta[:2]).all()
    assert np.isnan(series.zeta[2:]).all()
    for s, (_, scheme) in enumerate(schemes):
        report = mxsim.gradient_bias(params, x, y, CFG, scheme)
        for j, group in enumerate(PROBE_GROUPS):
            bias = report if group == "all" else report.groups[group]
            for name in ("zeta", "cos", "alpha", "rho"):
                got = getattr(series, name)[1, s, j]
                assert got == pytest.approx(getattr(bias, name), rel=1e-12), (name, group)
            assert series.norm[1, j] == pytest.approx(bias.norm, rel=1e-12)
    gammas = params[1]["ln_gamma"]
    assert series.gamma_saturated[0, 1] == saturated_share(gammas, SiteFormat("mxfp8_e4m3"))
    for a, b in zip(before, params, strict=True):
        for kind in KINDS:
            np.testing.assert_array_equal(a[kind], b[kind])


def test_a_plan_needs_a_positive_interval() -> None:
    with pytest.raises(ValueError, match="every must be at least 1 step; got 0"):
        ProbePlan(0, ())
    with pytest.raises(TypeError, match=r"every must be an integer of at least 1; got 2\.5"):
        ProbePlan(2.5, ())  # type: ignore[arg-type]


def test_a_plan_needs_labelled_schemes() -> None:
    with pytest.raises(TypeError, match=r"schemes must be .* got 'all_e4m3'"):
        ProbePlan(1, ("all_e4m3",))  # type: ignore[arg-type]
    twice = (("a", mxsim.scheme("exact")), ("a", mxsim.scheme("all_e4m3")))
    with pytest.raises(ValueError, match="labels of schemes must differ"):
        ProbePlan(1, twice)
