"""Stability thresholds: derivations against exact enumeration, eigenvalues and simulated runs."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import sympy as sp  # type: ignore[import-untyped, unused-ignore]
from scipy.special import digamma
from scipy.stats import norm, poisson

from mxsim.theory import moments
from mxsim.theory.escape import escape_threshold, mean_escape_time, tail_index
from mxsim.theory.lyapunov import growth_exponent, moment_growth
from mxsim.theory.model import DISTRIBUTIONS, OPTIMIZERS, Gains
from mxsim.theory.simulate import (
    correlated_gains,
    count_escaped,
    count_grown,
    half_divergence,
    log_growth,
    run_thresholds,
    simulated_exponent,
    step,
)
from mxsim.theory.stability import __main__ as table
from mxsim.theory.stability import (
    almost_sure_intervals,
    almost_sure_threshold,
    mean_square_threshold,
    mean_threshold,
    second_moment_matrix,
)

WITH_MOMENTUM = ("heavy_ball", "ema", "adam")


def written_out(optimizer: str, rate: float, b: float, gain: float) -> np.ndarray:
    """One step as a matrix on (x, m), from the textbook, not from the package."""
    if optimizer == "gd":
        return np.array([[1 - rate * gain, 0.0], [gain, 0.0]])
    c = 1.0 if optimizer == "heavy_ball" else 1 - b
    return np.array([[1 - rate * c * gain, -rate * b], [c * gain, b]])


def two_point_moments(optimizer: str, rate: float, b: float, mu: float, s2: float) -> np.ndarray:
    """The map of (x, m) x (x, m) under two equally likely gains: (4, 4), exact."""
    matrices = [written_out(optimizer, rate, b, 1 + mu + sign * math.sqrt(s2)) for sign in (-1, 1)]
    return np.asarray(sum(np.kron(a, a) for a in matrices) / 2)


def radius(matrix: np.ndarray) -> float:
    return float(np.abs(np.linalg.eigvals(matrix)).max())


def cases(count: int, seed: int) -> list[tuple[str, float, float, float]]:
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        optimizer = OPTIMIZERS[i % len(OPTIMIZERS)]
        b = 0.0 if optimizer == "gd" else float(rng.choice([0.0, rng.random(), 0.99]))
        found.append((optimizer, b, float(rng.uniform(-0.9, 2)), float(rng.exponential(1.0))))
    return found


# ---------------------------------------------------------------- in mean and in mean square


def test_the_formulas_are_those_of_the_design() -> None:
    for optimizer, b, mu, s2 in cases(200, 0):
        w = 1 + mu
        scale = 1 - b if optimizer == "heavy_ball" else 1.0
        mean = scale * 2 * (1 + b) / (1 - b) / w
        square = scale * 2 * (1 + b) * w / ((1 - b) * w**2 + (1 + b) * s2)
        assert mean_threshold(optimizer, b, mu) == pytest.approx(mean, rel=1e-12)
        assert mean_square_threshold(optimizer, b, mu, s2) == pytest.approx(square, rel=1e-12)
    assert mean_threshold("gd") == pytest.approx(2)
    np.testing.assert_allclose(mean_threshold("ema", [0.5, 0.9, 0.95]), [6, 38, 78])
    np.testing.assert_allclose(mean_threshold("heavy_ball", [0.5, 0.9]), [3, 3.8])
    assert mean_square_threshold("gd", 0, 0, 0.25) == pytest.approx(1.6)


def test_the_second_moment_map_is_exact() -> None:
    # All 2^8 sequences of two gains, each run step by step.
    steps, b, mu, s2 = 8, 0.7, 0.2, 0.5
    for optimizer in OPTIMIZERS:
        b_ = 0.0 if optimizer == "gd" else b
        states = []
        for signs in itertools.product((-1, 1), repeat=steps):
            state = np.array([1.0, 0.5])
            for sign in signs:
                gain = 1 + mu + sign * math.sqrt(s2)
                state = written_out(optimizer, 1.3, b_, gain) @ state
            states.append(state)
        x, m = np.array(states).T
        exact = [np.mean(x * x), np.mean(x * m), np.mean(m * m)]
        matrix = second_moment_matrix(optimizer, 1.3, b_, mu, s2)
        start = np.array([1.0, 0.5, 0.25])
        found = np.linalg.matrix_power(matrix, steps) @ start
        np.testing.assert_allclose(found, exact, rtol=1e-10)


def test_stable_below_the_threshold_and_nowhere_above() -> None:
    # By eigenvalues of maps written out here; the derivation has none.
    for optimizer, b, mu, s2 in cases(120, 1):
        square = mean_square_threshold(optimizer, b, mu, s2)
        mean = mean_threshold(optimizer, b, mu)
        for share in (1e-3, 0.03, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1 - 1e-6):
            assert radius(two_point_moments(optimizer, share * square, b, mu, s2)) < 1
            assert radius(written_out(optimizer, share * mean, b, 1 + mu)) < 1
        for share in (1 + 1e-6, 1.01, 1.3, 2, 5, 30):
            assert radius(two_point_moments(optimizer, share * square, b, mu, s2)) > 1
            assert radius(written_out(optimizer, share * mean, b, 1 + mu)) > 1


def test_which_margin_binds() -> None:
    for optimizer in OPTIMIZERS:
        for derivation in (moments.derive_mean(optimizer), moments.derive_mean_square(optimizer)):
            symbols = (moments.RATE, moments.MOMENTUM, moments.MEAN_GAIN, moments.VARIANCE)
            margins = sp.lambdify(symbols, list(derivation.margins.values()))
            threshold = sp.lambdify(symbols[1:], derivation.threshold)
            place = list(derivation.margins).index(derivation.binding)
            for _, b, mu, s2 in cases(50, 2):
                b = 0.0 if optimizer == "gd" else b
                limit = threshold(b, 1 + mu, s2)
                for share in (1e-3, 0.3, 0.9, 1.0):
                    values = margins(share * limit, b, 1 + mu, s2)
                    others = values[:place] + values[place + 1 :]
                    assert min(others) > 0
                assert margins(1.001 * limit, b, 1 + mu, s2)[place] < 0


def test_the_last_margin_is_positive_by_its_coefficients() -> None:
    # b = B / (1 + B) and k w = 2 (1 + b) t / (1 + t) cover b in [0, 1) and all of stability in
    # mean as B >= 0 and t > 0 range freely: a numerator without minus signs cannot vanish.
    big_b, t = sp.symbols("B t", positive=True)
    rate, b, w, s2 = moments.RATE, moments.MOMENTUM, moments.MEAN_GAIN, moments.VARIANCE
    margin = moments.derive_mean_square("heavy_ball").margins["1 - p1 + p0 p2 - p0^2"]
    slow = 2 * (1 + b) * t / (1 + t)
    replaced = sp.expand(margin).subs(w, slow / rate).subs(b, big_b / (1 + big_b))
    numerator, denominator = sp.fraction(sp.together(replaced))
    for polynomial in (numerator, denominator):
        coefficients = sp.Poly(sp.expand(polynomial), rate, s2, big_b, t).coeffs()
        assert min(coefficients) > 0


def test_a_wrong_certificate_is_refused() -> None:
    matrix = moments.mean_map("ema")
    certificates = dict(moments.mean_certificates("ema"))
    certificates["p(1)"] = 2 * certificates["p(1)"]
    with pytest.raises(ArithmeticError, match=r"p\(1\)"):
        moments.derive(matrix, "p(-1)", certificates)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_one_step_of_an_ensemble(optimizer: str, distribution: str) -> None:
    rng = np.random.default_rng(3)
    b, mu, s2, rate, runs = (0.0 if optimizer == "gd" else 0.8), -0.2, 0.6, 1.7, 100_000
    x, m = rng.standard_normal((2, runs))
    m = 0.6 * x + 0.8 * m
    new_x, new_m = step(optimizer, rate, b, x, m, Gains(distribution, mu, s2).draw(rng, (runs,)))
    before = np.stack([x * x, x * m, m * m])
    after = np.stack([new_x * new_x, new_x * new_m, new_m * new_m])
    difference = after - second_moment_matrix(optimizer, rate, b, mu, s2) @ before
    assert (np.abs(difference.mean(axis=1)) < 4 * difference.std(axis=1) / np.sqrt(runs)).all()


def test_a_long_run_does_not_show_the_mean_square() -> None:
    # gd between the thresholds: E x^2 grows 1.71-fold a step, and 2000 runs all go to 0.
    gains, rate, steps = Gains("gaussian", 0.0, 0.25), 1.9, 1000
    assert second_moment_matrix("gd", rate, 0.0, 0.0, 0.25)[0, 0] == pytest.approx(
        0.81 + 1.9**2 / 4
    )
    growth = log_growth("gd", rate, 0.0, gains.draw(np.random.default_rng(4), (2000, 1, steps)))
    assert growth.max() < 0


def test_frozen_adam_is_ema_on_the_preconditioned_hessian() -> None:
    rng = np.random.default_rng(5)
    root = rng.standard_normal((3, 3))
    hessian, p, b = root @ root.T, np.diag(rng.uniform(0.1, 3, 3)), 0.9
    top = np.linalg.eigvals(np.linalg.inv(p) @ hessian).real.max()
    for share in (1 - 1e-6, 1 + 1e-6):
        eta = share * mean_threshold("adam", b) / top
        one = np.eye(3)
        m_of_x, m_of_m = (1 - b) * hessian, b * one
        p_inverse = np.linalg.inv(p)
        whole = np.block(
            [[one - eta * p_inverse @ m_of_x, -eta * p_inverse @ m_of_m], [m_of_x, m_of_m]]
        )
        assert (radius(whole) < 1) == (share < 1)


def test_limits() -> None:
    for b in (0.3, 0.9):
        for mu in (-0.5, 0.4):
            mean = mean_threshold("ema", b, mu)
            assert mean_square_threshold("ema", b, mu, 0.0) == pytest.approx(mean)
            assert mean_square_threshold("ema", 0.0, mu, 0.3) == pytest.approx(
                mean_square_threshold("gd", 0.0, mu, 0.3)
            )
    assert mean_square_threshold("ema", 1 - 1e-9, 0.4, 0.3) == pytest.approx(2 * 1.4 / 0.3)
    s2 = np.array([0.0, 0.1, 1.0])
    assert mean_square_threshold("ema", [[0.5], [0.9]], 0.0, s2).shape == (2, 3)


# ---------------------------------------------------------------- almost surely


def log_abs_normal(mean: float, sd: float) -> float:
    """E log |N(mean, sd^2)|: a noncentral chi-square is a Poisson mixture of central ones."""
    k = np.arange(2000)
    weights = poisson.pmf(k, mean**2 / (2 * sd**2))
    return math.log(sd) + 0.5 * float(weights @ (digamma(0.5 + k) + math.log(2)))


def test_gradient_descent_with_gaussian_gains() -> None:
    for rate, mu, s2 in ((0.3, 0.0, 0.25), (1.0, 0.0, 0.01), (1.7, 0.5, 0.25), (4.0, -0.5, 2.0)):
        series = log_abs_normal(1 - rate * (1 + mu), rate * math.sqrt(s2))
        found = growth_exponent("gd", rate, 0.0, Gains("gaussian", mu, s2))
        assert found == pytest.approx(series, abs=1e-9)
    threshold = almost_sure_threshold("gd", 0.0, 0.0, 0.25)
    assert round(threshold, 2) == 2.26
    assert abs(log_abs_normal(1 - threshold, threshold / 2)) < 1e-8


def test_gradient_descent_with_two_gains_has_roots_on_paper() -> None:
    # (1 - a/2) (1 - 3a/2) = 1 at a = 8/3
    assert almost_sure_threshold("gd", 0.0, 0.0, 0.25, "two_point") == pytest.approx(8 / 3)
    # Gains 0.2 and 4: 0.8 a^2 - 4.2 a + 1 = 1 or -1.
    gains = Gains("two_point", 1.1, 3.61)
    found = almost_sure_intervals("gd", 0.0, gains, np.linspace(0.01, 6, 300))
    root = math.sqrt(4.2**2 - 6.4)
    expected = [[0.01, (4.2 - root) / 1.6], [(4.2 + root) / 1.6, 5.25]]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    first = almost_sure_threshold("gd", 0.0, 1.1, 3.61, "two_point")
    assert first == pytest.approx((4.2 - root) / 1.6)
    # Gains 1 -+ sqrt(0.502): an unstable gap of 13 % only, from the roots of 0.498 a^2 - 2 a + 2.
    narrow = almost_sure_threshold("gd", 0.0, 0.0, 0.502, "two_point")
    assert narrow == pytest.approx((1 - math.sqrt(0.004)) / 0.498)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(
    ("optimizer", "rate", "b"),
    [("gd", 1.2, 0.0), ("heavy_ball", 2.0, 0.5), ("ema", 11.0, 0.9), ("adam", 20.0, 0.95)],
)
def test_the_exponent_is_that_of_a_long_run(
    optimizer: str, rate: float, b: float, distribution: str
) -> None:
    gains = Gains(distribution, 0.1, 0.25)
    run = simulated_exponent(optimizer, rate, b, gains, np.random.default_rng(6), 500_000)
    sigma = (run.high - run.low) / 4.02  # Student's t, 49 degrees of freedom: 2.01 either side
    found = growth_exponent(optimizer, rate, b, gains)
    finer = growth_exponent(optimizer, rate, b, gains, 1024)  # what the grid leaves open
    assert abs(found - run.value) < 4 * sigma + abs(found - finer)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_operator_of_order_two_is_the_second_moment_map(distribution: str) -> None:
    for rate, b in ((2.0, 0.5), (6.0, 0.9), (11.0, 0.9)):
        exact = math.log(radius(two_point_moments("ema", rate, b, 0.1, 0.25)))
        errors = [
            abs(moment_growth("ema", rate, 2.0, b, Gains(distribution, 0.1, 0.25), grid) - exact)
            for grid in (64, 128, 256)
        ]
        assert errors[2] < 1e-4
        assert errors[0] > 3 * errors[1] > 9 * errors[2]  # second order: a factor of 4 each
    gains = Gains(distribution, 0.1, 0.25)
    found = moment_growth("gd", 1.2, 2.0, 0.0, gains)
    assert found == pytest.approx(math.log(0.32**2 + 1.44 * 0.25), abs=1e-9)
    # The derivative at order 0 is the exponent.
    for optimizer, rate, b in (("gd", 1.2, 0.0), ("ema", 6.0, 0.9)):
        slope = moment_growth(optimizer, rate, 1e-4, b, gains, 512) / 1e-4
        curvature = moment_growth(optimizer, rate, 2.0, b, gains)
        exponent = growth_exponent(optimizer, rate, b, gains)
        assert abs(slope - exponent) < 1e-3 * (abs(curvature) + abs(exponent))


def test_without_noise_the_exponent_is_the_mean_map_s() -> None:
    for rate in (0.05, 3.0, 37.0, 39.0):
        expected = math.log(radius(written_out("ema", rate, 0.9, 1.0)))
        assert growth_exponent("ema", rate, 0.9, Gains()) == pytest.approx(expected, abs=2e-4)
    assert almost_sure_threshold("ema", 0.9, 0.5) == pytest.approx(38 / 1.5)


def test_almost_sure_thresholds_converge_and_are_ordered() -> None:
    for b, s2, distribution, bound in (
        (0.1, 0.25, "gaussian", 1e-3),
        (0.9, 0.25, "gaussian", 1e-3),
        (0.9, 0.25, "lognormal", 1e-3),
        (0.99, 0.01, "gaussian", 1e-3),
        (0.5, 0.25, "two_point", 2e-3),
    ):
        found = almost_sure_threshold("ema", b, 0.0, s2, distribution)
        assert found > mean_square_threshold("ema", b, 0.0, s2)
        gains = Gains(distribution, 0.0, s2)
        for share in (1 - bound, 1 + bound):
            exponent = growth_exponent("ema", share * found, b, gains, 1024, 1025)
            assert (exponent < 0) == (share < 1)
    heavy = almost_sure_threshold("heavy_ball", 0.9, 0.0, 0.25)
    assert heavy == pytest.approx(0.1 * almost_sure_threshold("ema", 0.9, 0.0, 0.25), rel=1e-8)
    # Little noise: all three coincide, up to the order of its share in the mean-square formula.
    share = 1e-4 * 1.9 / 0.1
    assert almost_sure_threshold("ema", 0.9, 0.0, 1e-4) == pytest.approx(38, rel=2 * share)
    assert almost_sure_threshold("ema", 0.0, 0.0, 0.25) == almost_sure_threshold(
        "gd", 0.0, 0.0, 0.25
    )


# ---------------------------------------------------------------- where half of the runs diverge


@pytest.mark.parametrize(("optimizer", "b"), [("gd", 0.0), ("ema", 0.9)])
def test_half_of_long_runs_grow_at_the_almost_sure_threshold(optimizer: str, b: float) -> None:
    gains, steps, runs = Gains("gaussian", 0.0, 0.25), 10_000, 400
    rng = np.random.default_rng(7)
    surely = almost_sure_threshold(optimizer, b, 0.0, 0.25)
    square = mean_square_threshold(optimizer, b, 0.0, 0.25)
    grown = count_grown(optimizer, surely, b, gains, rng, steps, runs)
    assert abs(grown - runs / 2) < 4 * math.sqrt(runs / 4)
    assert count_grown(optimizer, 1.1 * square, b, gains, rng, steps, runs) == 0
    mean = mean_threshold(optimizer, b)
    assert count_grown(optimizer, mean, b, gains, rng, steps, runs) == (runs if b else 0)


def test_the_half_divergence_point_of_a_known_curve() -> None:
    runs, inside, missed = 200, 0, 0.0
    for seed in range(40):
        found = half_divergence(
            lambda rate, rng: int(rng.binomial(runs, norm.cdf(math.log(rate / 3) / 0.02))),
            1.0,
            10.0,
            runs,
            seed,
        )
        inside += found.low <= 3 <= found.high
        missed += found.value - 3
    assert inside >= 40 * (0.95 - 4 * math.sqrt(0.95 * 0.05 / 40))
    assert abs(missed / 40) < 0.01
    nowhere = half_divergence(lambda rate, rng: 0, 1.0, 10.0, runs, 0)
    assert math.isnan(nowhere.value)


def test_runs_of_finite_length_are_lost_where_predicted() -> None:
    gains, steps, runs = Gains("gaussian", 0.0, 0.25), 2000, 100
    for optimizer, b, level, error in (("gd", 0.0, 1e3, 0.03), ("ema", 0.9, 1e6, 0.07)):
        predicted = escape_threshold(optimizer, b, gains, steps, level)

        def count(
            rate: float,
            rng: np.random.Generator,
            optimizer: str = optimizer,
            b: float = b,
            level: float = level,
        ) -> int:
            return count_escaped(optimizer, rate, b, gains, rng, steps, runs, level)

        found = half_divergence(count, predicted / 1.3, predicted * 1.3, runs, 8)
        sigma = (found.high - found.low) / 3.92
        assert abs(predicted - found.value) < error * found.value + 4 * sigma
    assert tail_index("gd", 1.6, 0.0, gains) == pytest.approx(2, rel=1e-3)  # in mean square
    assert tail_index("gd", 2.3, 0.0, gains) == 0.0
    assert mean_escape_time("gd", 0.5, 0.0, Gains("two_point", 0.0, 0.25), 1e3) == math.inf
    times = [mean_escape_time("ema", rate, 0.9, gains, 1e3) for rate in (10.9, 11.5, 11.6, 12.5)]
    assert times == sorted(times, reverse=True)
    with pytest.raises(ValueError, match="level"):
        mean_escape_time("gd", 2.0, 0.0, gains, 0.5)
    with pytest.raises(ValueError, match="steps"):
        escape_threshold("gd", 0.0, gains, 2, 1e6)


def test_gains_have_the_moments_and_the_memory_asked_for() -> None:
    rng = np.random.default_rng(9)
    for distribution in DISTRIBUTIONS:
        gains = Gains(distribution, -0.3, 0.4)
        values, weights = gains.quadrature(257)
        assert weights.sum() == pytest.approx(1)
        assert weights @ values == pytest.approx(0.7, rel=1e-9)
        assert weights @ (values - 0.7) ** 2 == pytest.approx(0.4, rel=1e-9)
        drawn = gains.draw(rng, (200_000,))
        assert abs(drawn.mean() - 0.7) < 4 * math.sqrt(0.4 / 200_000)
    drawn = correlated_gains(Gains("gaussian", 0.0, 0.25), rng, (2000, 400), 0.9) - 1
    for lag in (1, 10):
        products = (drawn[:, lag:] * drawn[:, :-lag]).mean(axis=1)  # runs are independent
        error = products.std() / math.sqrt(len(products))
        assert abs(products.mean() - 0.25 * 0.9**lag) < 4 * error
    assert abs((drawn[:, 0] ** 2).mean() - 0.25) < 4 * 0.25 * math.sqrt(2 / 2000)


def test_memory_of_the_gain_matters_with_momentum_only() -> None:
    gains = Gains("gaussian", 0.0, 0.25)
    drawn = correlated_gains(gains, np.random.default_rng(10), (8, 20_000), 0.9)
    descent = run_thresholds("gd", 0.0, drawn, 1.0)
    surely = almost_sure_threshold("gd", 0.0, 0.0, 0.25)
    assert abs(descent.mean() - surely) < 4 * descent.std(ddof=1) / math.sqrt(8)
    momentum = run_thresholds("ema", 0.9, drawn, 4.0)
    assert momentum.min() > 1.5 * almost_sure_threshold("ema", 0.9, 0.0, 0.25)


# ---------------------------------------------------------------- the front door


def test_sympy_stays_out_until_a_threshold_is_asked_for() -> None:
    code = (
        "import sys, mxsim.theory.stability, mxsim.theory.simulate, mxsim.theory.escape, "
        "mxsim.theory.descent; sys.exit('sympy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_is_refused() -> None:
    for match, call in (
        ("optimizer", lambda: mean_threshold("sgd")),
        ("b must satisfy", lambda: mean_threshold("ema", 1.0)),
        ("b must satisfy", lambda: mean_threshold("ema", [0.5, -0.1])),
        ("b must be 0", lambda: mean_threshold("gd", 0.9)),
        ("mu", lambda: mean_threshold("ema", 0.9, -1.0)),
        ("s2", lambda: mean_square_threshold("ema", 0.9, 0.0, -0.1)),
        ("s2", lambda: mean_square_threshold("ema", 0.9, 0.0, math.nan)),
        ("distribution", lambda: almost_sure_threshold("gd", 0.0, 0.0, 0.1, "cauchy")),
        ("eta_lam", lambda: growth_exponent("gd", 0.0)),
        ("memory", lambda: correlated_gains(Gains(), np.random.default_rng(0), (1, 1), 1.0)),
        ("2 or 3", lambda: moments.jury((1,))),
        ("degree|moments", lambda: moments.expectation(moments.GAIN**3)),
        ("formula", lambda: moments.numeric("gd", "median")),
    ):
        with pytest.raises(ValueError, match=match):
            call()


def test_the_command_prints_its_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(table, "CASES", (("gd", 0.0, "gaussian", 0.25),))
    monkeypatch.setattr(table, "STEPS", (1000,))
    monkeypatch.setattr(table, "MEMORIES", (0.0,))
    table.main(["--runs", "20"])
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines() if line.startswith("gd")]
    assert rows[0][:8] == ["gd", "0", "gaussian", "0.25", "2.00", "1.60", "2.26", "1000"]
    assert rows[1][:5] == ["gd", "0", "gaussian", "0.25", "2.26"]
    assert "nan" not in printed
