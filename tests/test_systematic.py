"""The gradient error over batches: estimators against models whose answer is known."""

import numpy as np
import pytest

import mxsim
from mxsim.precision import PrecisionScheme, SiteFormat
from mxsim.systematic import BatchBias, bias_over_batches, from_products

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=64)


def from_vectors(g: np.ndarray, eps: np.ndarray) -> BatchBias:
    """BatchBias of gradients and errors (m, size)."""
    return from_products(g @ g.T, eps @ g.T, eps @ eps.T)


def model(seed: int, m: int = 24, size: int = 400, z: float = 0.3, noise: float = 0.0) -> BatchBias:
    """g_i = mean + noise of a batch; eps_i = z mean (a systematic error) + noise of its own."""
    rng = np.random.default_rng(seed)
    mean = np.random.default_rng(99).standard_normal(size) / np.sqrt(size)  # |mean| ~ 1
    mean /= np.linalg.norm(mean)
    g = mean + 0.05 * rng.standard_normal((m, size))  # |g - mean| = 1: as large as the mean
    return from_vectors(g, z * mean + noise * rng.standard_normal((m, size)))


def test_squared_estimates_are_unbiased() -> None:
    # True: |E eps|^2 / |E g|^2 = 0.09, E |eps - E eps|^2 = size noise^2 = 0.36, <E g~, E g> = 1.3
    found = [model(seed, noise=0.03) for seed in range(300)]
    squared = np.array([each.systematic_squared.value for each in found])
    error = squared.std() / np.sqrt(len(squared))
    assert abs(squared.mean() - 0.09) < 4 * error + 0.002  # a ratio has a bias of order 1 / m
    alpha = np.array([each.alpha.value for each in found])
    assert abs(alpha.mean() - 1.3) < 4 * alpha.std() / np.sqrt(len(alpha)) + 0.005
    noise = np.array([each.noise.value for each in found])
    assert noise.mean() == pytest.approx(0.6, rel=0.03)
    assert np.mean([each.norm**2 for each in found]) == pytest.approx(2.0, rel=0.02)
    signal = np.array([each.signal.value for each in found])
    assert signal.mean() == pytest.approx(0.5, rel=0.05)
    # The plain mean over batches would call the noise systematic: 0.09 + 0.36 / 24.
    assert squared.mean() < 0.1


def test_no_systematic_error_is_seen_where_there_is_none() -> None:
    found = [model(seed, z=0.0, noise=0.05) for seed in range(200)]
    squared = np.array([each.systematic_squared.value for each in found])
    assert (squared < 0).any()
    assert abs(squared.mean()) < 4 * squared.std() / np.sqrt(len(squared))
    assert all(each.systematic.value == 0 for each in found if each.systematic_squared.value < 0)


def test_intervals_cover_what_they_say() -> None:
    inside = 0
    for seed in range(200):
        interval = model(seed, noise=0.03).alpha
        inside += interval.low <= 1.3 <= interval.high
    assert inside >= 170  # 95 % nominal; bootstrap of 24 batches covers a little less


def test_the_operator_norm_of_one_linear_map_is_approached_from_below() -> None:
    rng = np.random.default_rng(0)
    size, m = 40, 12
    z = rng.standard_normal((size, size)) / 10
    true = np.linalg.norm(z, 2)
    g = rng.standard_normal((m, size))
    bias = from_vectors(g, g @ z.T)
    assert max(bias.zetas) <= bias.operator_norm <= true * (1 + 1e-9)
    assert bias.operator_norm > 1.05 * max(bias.zetas)
    full = from_vectors(np.eye(size), z.T)  # all directions seen: the norm itself
    assert full.operator_norm == pytest.approx(true, rel=1e-9)
    twice = np.concatenate([g, g])  # a rank-deficient span changes nothing
    assert from_vectors(twice, twice @ z.T).operator_norm == pytest.approx(
        bias.operator_norm, rel=1e-6
    )


def test_no_gradient_at_all_is_nan_without_a_warning() -> None:
    bias = from_vectors(np.zeros((3, 5)), np.zeros((3, 5)))
    assert np.isnan(bias.systematic.value)
    assert np.isnan(bias.operator_norm)


def test_few_batches_have_no_interval_and_any_size_is_in_range() -> None:
    rng = np.random.default_rng(1)
    g = 1 + 0.1 * rng.standard_normal((3, 50))
    bias = from_vectors(g, 0.1 * g)
    assert bias.alpha.value == pytest.approx(1.1)
    assert np.isnan([bias.alpha.low, bias.alpha.high]).all()
    g = 1 + 0.1 * rng.standard_normal((6, 50))
    middle = from_vectors(g, 0.1 * g)
    tiny = from_vectors(1e-150 * g, 1e-151 * g)
    assert tiny.alpha.value == pytest.approx(middle.alpha.value)
    assert tiny.norm == pytest.approx(1e-150 * middle.norm)
    assert tiny.operator_norm == pytest.approx(0.1)


def batches(m: int) -> list[tuple[np.ndarray, np.ndarray]]:
    source = mxsim.make_batches(CFG, mxsim.make_teacher(CFG))
    return [source.at(step) for step in range(m)]


def test_groups_are_of_the_models_own_gradients() -> None:
    params, some = mxsim.init_params(CFG), batches(4)
    scheme = mxsim.scheme("all_e4m3")
    found = bias_over_batches(params, some, CFG, scheme)
    for i, (x, y) in enumerate(some):
        report = mxsim.gradient_bias(params, x, y, CFG, scheme, step=i)
        assert found["all"].zetas[i] == pytest.approx(report.zeta, rel=1e-6)
        for group in ("ln_gamma", "w2", 1, ("w1", 0)):
            assert found[group].zetas[i] == pytest.approx(report.groups[group].zeta, rel=1e-6)
    # by hand, from all pairs
    g, e = [], []
    for i, (x, y) in enumerate(some):
        exact = mxsim.loss_and_grads(params, x, y, CFG, PrecisionScheme())[1][1]["w2"]
        rounded = mxsim.loss_and_grads(params, x, y, CFG, scheme, i)[1][1]["w2"]
        g.append(exact.ravel().astype(np.float64))
        e.append((rounded - exact).ravel().astype(np.float64))
    pairs = [(i, j) for i in range(4) for j in range(4) if i != j]
    top = np.mean([e[i] @ e[j] for i, j in pairs])
    bottom = np.mean([g[i] @ g[j] for i, j in pairs])
    assert found["w2", 1].systematic_squared.value == pytest.approx(top / bottom, rel=1e-6)


def test_stochastic_rounding_of_dy_is_noise_and_ties_to_even_is_not_all() -> None:
    # rceil: nothing saturates, so the mean over the bits is exact: no systematic part is left.
    params = mxsim.init_params(CFG)
    x, y = batches(1)[0]
    one = SiteFormat("mxfp4_e2m1", scale_rule="rceil", rounding="stochastic")
    scheme = PrecisionScheme(fc2_wgrad_dy=one)
    found = bias_over_batches(params, [(x, y)] * 40, CFG, scheme)["w2"]
    assert found.noise.value > 0.05
    assert found.systematic_squared.low <= 1e-4
    assert found.systematic.value < 0.3 * found.noise.value


def test_refusals() -> None:
    params, [one] = mxsim.init_params(CFG), batches(1)
    with pytest.raises(ValueError, match=r"at least two.*got 1"):
        bias_over_batches(params, [one], CFG, mxsim.scheme("exact"))
    with pytest.raises(TypeError, match=r"\(x, y\) pairs; batch 0 is ndarray"):
        bias_over_batches(params, list(one), CFG, mxsim.scheme("exact"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="batch 1: x must have shape"):
        bias_over_batches(params, [one, (one[0][:, :3], one[1])], CFG, mxsim.scheme("exact"))
