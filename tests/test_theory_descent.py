"""The one-step descent condition, against losses that are simply evaluated."""

import math
from functools import partial

import numpy as np
import pytest

from mxsim.theory.descent import critical_rate, critical_scale, derive, main


def quadratic(rng: np.random.Generator, size: int, definite: bool = True) -> np.ndarray:
    root = rng.standard_normal((size, size))
    return root @ root.T if definite else (root + root.T) / 2


def rises(hessian: np.ndarray, x: np.ndarray, u: np.ndarray, s: float) -> bool:
    """Whether x - s u has a larger loss x^T H x / 2 than x."""
    new = x - s * u
    return bool(new @ hessian @ new > x @ hessian @ x)


def test_the_loss_rises_exactly_above_the_critical_rate() -> None:
    rng = np.random.default_rng(0)
    for size in (2, 5, 40):
        for _ in range(30):
            hessian = quadratic(rng, size)
            x = rng.standard_normal(size)
            g = hessian @ x
            alpha, rho = rng.uniform(0.05, 2), rng.exponential(1.0)
            r = rng.standard_normal(size)
            r -= g * (r @ g) / (g @ g)
            r *= rho * np.linalg.norm(g) / np.linalg.norm(r)
            biased = alpha * g + r
            along = biased @ hessian @ biased / (biased @ biased)
            rate = critical_rate(alpha, rho, along)
            assert not rises(hessian, x, biased, rate * (1 - 1e-6))
            assert rises(hessian, x, biased, rate * (1 + 1e-6))
            # The same step by the vector form, with H as a function or already applied.
            assert critical_scale(g, biased, partial(np.matmul, hessian)) == pytest.approx(rate)
            assert critical_scale(g, biased, hessian @ biased) == pytest.approx(rate)
            # The top eigenvalue gives a bound on the safe side.
            top = np.linalg.eigvalsh(hessian)[-1]
            assert critical_rate(alpha, rho, top) <= rate * (1 + 1e-9)


def test_any_step_such_as_adam_s() -> None:
    rng = np.random.default_rng(1)
    for _ in range(100):
        hessian = quadratic(rng, 12)
        x = rng.standard_normal(12)
        g = hessian @ x
        u = np.sign(g) * rng.uniform(0, 1, 12) + 0.1 * rng.standard_normal(12)
        scale = critical_scale(g, u, hessian @ u)
        if g @ u <= 0:
            assert scale == 0
            assert rises(hessian, x, u, 1e-3)
            continue
        assert not rises(hessian, x, u, scale * (1 - 1e-6))
        assert rises(hessian, x, u, scale * (1 + 1e-6))
        losses = [(x - s * u) @ hessian @ (x - s * u) for s in np.linspace(0, scale, 201)]
        assert int(np.argmin(losses)) == 100  # the best step is half the critical one


def test_isotropic_curvature_needs_no_hessian() -> None:
    rng = np.random.default_rng(2)
    g, biased = rng.standard_normal((2, 3, 7))  # any shape
    biased += 2 * g
    alpha = np.sum(g * biased) / np.sum(g * g)
    rho = np.linalg.norm(biased - alpha * g) / np.linalg.norm(g)
    lam = 3.7
    by_vectors = critical_scale(g, biased, lambda v: lam * v)
    assert by_vectors == pytest.approx(critical_rate(alpha, rho, lam))
    cosine = np.sum(g * biased) / np.linalg.norm(g) / np.linalg.norm(biased)
    stretched = np.linalg.norm(biased) / np.linalg.norm(g)
    assert by_vectors == pytest.approx(2 * cosine / (lam * stretched))
    assert critical_rate(1.0, 0.0, lam) == pytest.approx(2 / lam)


def test_the_derivation() -> None:
    found = derive()
    by_name = {symbol.name: symbol for symbol in found["change"].free_symbols}
    values = {"alpha": 0.8, "rho": 0.6, "lambda": 5.0, "eta": 0.1}
    # By hand: -0.1 * 0.8 + 0.01 * 5 * (0.64 + 0.36) / 2 = -0.055; the root is 1.6 / 5.
    at = {by_name[name]: value for name, value in values.items()}
    assert float(found["change"].subs(at)) == pytest.approx(-0.055)
    assert float(found["critical_rate"].subs(at)) == pytest.approx(0.32)
    assert float(found["optimal_rate"].subs(at)) == pytest.approx(0.16)
    assert float(found["gain"].subs(at)) == pytest.approx(0.64)
    assert critical_rate(0.8, 0.6, 5.0) == pytest.approx(0.32)


def test_where_there_is_no_such_rate() -> None:
    assert critical_rate(-0.1, 0.5, 1.0) == 0  # uphill
    assert critical_rate(0.0, 0.5, 1.0) == 0
    assert critical_rate(-0.1, 0.5, -1.0) == 0  # uphill at first
    assert critical_rate(0.5, 0.5, 0.0) == math.inf
    assert critical_rate(0.5, 0.5, -1.0) == math.inf
    assert critical_rate(0.0, 0.5, -1.0) == math.inf  # level, then downhill
    assert critical_rate(0.0, 0.0, 1.0) == 0  # no step at all
    assert math.isnan(critical_rate(math.nan, 0.5, 1.0))
    np.testing.assert_allclose(
        critical_rate([1.0, 0.5, -1.0], 0.5, 2.0), [1 / 1.25, 0.5 / 0.5, 0.0]
    )
    with pytest.raises(ValueError, match="rho"):
        critical_rate(1.0, -0.5, 1.0)
    with pytest.raises(ValueError, match="shape"):
        critical_scale(np.ones(3), np.ones(4), np.ones(4))


def test_indefinite_curvature() -> None:
    rng = np.random.default_rng(3)
    seen = set()
    for _ in range(100):
        hessian = quadratic(rng, 6, definite=False)
        x = rng.standard_normal(6)
        g = hessian @ x
        scale = critical_scale(g, g, hessian @ g)
        seen.add(math.isinf(scale))
        tried = np.geomspace(1e-4, 1e4, 50) if math.isinf(scale) else scale * (1 - 1e-6)
        for s in np.atleast_1d(tried):
            assert not rises(hessian, x, g, s)
    assert seen == {True, False}


def test_descent_now_is_not_stability() -> None:
    # The top direction is hardly present: the rate that lowers this step's loss diverges later.
    hessian = np.diag([100.0, 1.0])
    x = np.array([1e-6, 1.0])
    g = hessian @ x
    rate = 0.5 * critical_scale(g, g, hessian @ g)
    assert rate == pytest.approx(1.0, rel=1e-5)
    assert not rises(hessian, x, g, rate)
    for _ in range(10):
        x = x - rate * (hessian @ x)
    assert x @ hessian @ x > 1e9
    assert rate > 2 / 100  # in mean, stability asks for 2 / lambda_max


def test_the_command_prints_the_derivation(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    assert "2*alpha/(lambda*(alpha**2 + rho**2))" in capsys.readouterr().out
