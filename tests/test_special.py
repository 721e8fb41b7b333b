"""The float32 exp, normal distribution and logistic kernels against scipy in float64."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.special import expit, ndtr

from mxsim.jit import kernel
from mxsim.special import exp_nonpositive, exponential, logistic, normal_cdf_pdf

Array = NDArray[Any]


@kernel
def _run_exp(v: Any, out: Any) -> None:
    for i in range(v.size):
        out[i] = exp_nonpositive(v[i])


@kernel
def _run_exponential(v: Any, out: Any) -> None:
    for i in range(v.size):
        out[i] = exponential(v[i])


@kernel
def _run_normal(u: Any, cdf: Any, pdf: Any) -> None:
    for i in range(u.size):
        cdf[i], pdf[i] = normal_cdf_pdf(u[i])


@kernel
def _run_logistic(u: Any, out: Any) -> None:
    for i in range(u.size):
        out[i] = logistic(u[i])


def dense(low: float, high: float) -> Array:
    return np.linspace(low, high, 1_000_001).astype(np.float32)


def test_exp_is_within_one_unit_in_the_last_place() -> None:
    v = dense(-87, 0)
    out = np.empty_like(v)
    _run_exp(v, out)
    true = np.exp(v.astype(np.float64))
    assert (np.abs(out - true) / np.spacing(true.astype(np.float32))).max() <= 1.0


def test_exp_below_its_range_is_zero() -> None:
    v = np.array([-88, -200, -1e30, -np.inf], np.float32)
    out = np.empty_like(v)
    _run_exp(v, out)
    assert (out == 0).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_exponential_over_its_whole_range(dtype: Any) -> None:
    v = np.concatenate([dense(-86, 88.722), dense(88.0, 88.722)]).astype(dtype)
    out = np.empty_like(v)
    _run_exponential(v, out)
    true = np.exp(v.astype(np.float64))
    assert (np.abs(out - true) / np.spacing(true.astype(dtype))).max() <= 1.0
    ends = np.array([np.inf, 1e30, 800.0, np.nan, -1e30, -np.inf], dtype)
    out = np.empty_like(ends)
    _run_exponential(ends, out)
    assert np.isinf(out[:3]).all()
    assert np.isnan(out[3])
    assert (out[4:] == 0).all()


@pytest.mark.parametrize(
    ("low", "high", "ulp"), [(0, 14, 5), (-1, 0, 8), (-4, -1, 15), (-8, -4, 40), (-12, -8, 75)]
)
def test_normal_distribution_in_units_in_the_last_place(low: float, high: float, ulp: int) -> None:
    u = dense(low, high)
    cdf, pdf = np.empty_like(u), np.empty_like(u)
    _run_normal(u, cdf, pdf)
    true = ndtr(u.astype(np.float64))
    assert (np.abs(cdf - true) / np.spacing(true.astype(np.float32))).max() <= ulp


def test_far_tails_are_zero_and_one() -> None:
    u = np.array([-3e38, -1e20, -1e13, -50, 50, 1e13, 1e20, 3e38], np.float32)
    cdf, pdf, s = np.empty_like(u), np.empty_like(u), np.empty_like(u)
    _run_normal(u, cdf, pdf)
    _run_logistic(u[[0, 1, 2, 5, 6, 7]], s[:6])
    np.testing.assert_array_equal(cdf, [0, 0, 0, 0, 1, 1, 1, 1])
    np.testing.assert_array_equal(pdf, 0)
    np.testing.assert_array_equal(s[:6], [0, 0, 0, 1, 1, 1])


def test_normal_distribution_within_its_stated_error() -> None:
    u = dense(-15, 15)
    cdf, pdf = np.empty_like(u), np.empty_like(u)
    _run_normal(u, cdf, pdf)
    wide = u.astype(np.float64)
    assert np.abs(cdf - ndtr(wide)).max() < 2.5e-7
    assert np.abs(pdf - np.exp(-(wide**2) / 2) / np.sqrt(2 * np.pi)).max() < 1e-7
    # In the left tail GELU needs relative accuracy; it is lost only with u^2 / 2's own rounding,
    # down to u = -13, where e^(-u^2/2) meets the lowest value of exp.
    tail = (wide < -1) & (wide > -13)
    relative = np.abs(cdf - ndtr(wide))[tail] / ndtr(wide)[tail]
    assert (relative < 4e-7 + 2**-24 * wide[tail] ** 2).all()


def test_logistic_within_its_stated_error() -> None:
    u = dense(-80, 80)
    out = np.empty_like(u)
    _run_logistic(u, out)
    true = expit(u.astype(np.float64))
    assert (np.abs(out - true) / np.spacing(true.astype(np.float32))).max() <= 3.0


@pytest.mark.parametrize("extreme", [np.inf, -np.inf, 1e30, -1e30])
def test_extremes_are_limits_and_not_nan(extreme: float) -> None:
    u = np.array([extreme], np.float32)
    cdf, pdf, s = np.empty_like(u), np.empty_like(u), np.empty_like(u)
    _run_normal(u, cdf, pdf)
    _run_logistic(u, s)
    limit = 1.0 if extreme > 0 else 0.0
    assert cdf[0] == pytest.approx(limit, abs=1e-30)
    assert pdf[0] == pytest.approx(0.0, abs=1e-30)
    assert s[0] == pytest.approx(limit, abs=1e-30)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_nan_stays_nan(dtype: Any) -> None:
    u = np.array([np.nan], dtype)
    cdf, pdf, s = np.empty_like(u), np.empty_like(u), np.empty_like(u)
    _run_normal(u, cdf, pdf)
    _run_logistic(u, s)
    assert np.isnan(cdf).all()
    assert np.isnan(pdf).all()
    assert np.isnan(s).all()


def test_float64_versions_are_the_library_functions() -> None:
    u = np.linspace(-30, 30, 10_001)
    cdf, pdf, s = np.empty_like(u), np.empty_like(u), np.empty_like(u)
    _run_normal(u, cdf, pdf)
    _run_logistic(u, s)
    np.testing.assert_allclose(cdf, ndtr(u), rtol=1e-12)
    np.testing.assert_allclose(pdf, np.exp(-u * u / 2) / np.sqrt(2 * np.pi), rtol=1e-14)
    np.testing.assert_allclose(s, expit(u), rtol=1e-14)
