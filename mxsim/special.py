"""The normal distribution function and the logistic function as scalar kernels.

The float32 versions are branch-free polynomials, so that LLVM vectorizes the loops that inline
them; the float64 versions call the C library, for gradient checks.  Errors in units in the last
place (ulp), bounded over dense grids by tests/test_special.py: exp 1, logistic 3; the distribution
function 5 for u >= 0, 8 for -1 <= u < 0, and below that more, since the rounding of u^2 / 2 is
multiplied by it: 15 down to -4, 40 down to -8, 75 down to -12 (absolutely, 2.5e-7 everywhere).

Coefficients are minimax fits in the relative error (weighted least squares, Lawson iteration):
    e^r = 1 + r + r^2 Q(r) for |r| <= ln(2)/2,                                  error 3e-9
    Phi(-z) = e^{-z^2/2} t P(t), t = 1 / (1 + 0.3 z), for 0 <= z <= 14,         error 3.5e-9
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types
from numba.extending import overload

from mxsim.bits import power_of_two_at
from mxsim.jit import kernel

_F = np.float32
_LOG2_E = _F(1.4426950408889634)
_LN2_HIGH = _F(0.693359375)  # 10 bits: n * _LN2_HIGH is exact for |n| < 2**14
_LN2_LOW = _F(-2.12194440054690583e-4)
_ROUND = _F(1.5 * 2.0**23)  # adding and subtracting rounds to a whole number
_LOWEST = _F(-87.0)  # e**-87 is normal
_LOWEST_DOUBLED = _F(-86.0)  # here half of it has to be normal
_HIGHEST = _F(89.0)  # e**88.73 overflows
_ONE = _F(1.0)
_TWO = _F(2.0)
_HALF = _F(0.5)
_INV_SQRT_2PI = _F(0.3989422804014327)
_T = _F(0.3)


@kernel
def exp_nonpositive(v: Any) -> Any:
    """e**v for float32 v <= 0, 0 below -87 (where e**v is below 1.7e-38); NaN stays NaN."""
    gone = v < _LOWEST
    v = _LOWEST if gone else v
    shifted = v * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (v - n * _LN2_HIGH) - n * _LN2_LOW
    e = (_ONE + (r + r * r * _polynomial(r))) * power_of_two_at(shifted)
    return _ONE - _ONE if gone else e


@kernel
def _polynomial(r: Any) -> Any:
    """Q of e^r = 1 + r + r^2 Q(r)."""
    q = _F(1.3814537902241985e-3)
    q = q * r + _F(8.368745320375534e-3)
    q = q * r + _F(4.166839083117191e-2)
    q = q * r + _F(1.6666520396767226e-1)
    return q * r + _F(4.999999343189164e-1)


@kernel
def _exponential_f32(v: Any) -> Any:
    """e**v for float32; Inf from where it overflows, 0 below -86; NaN stays NaN."""
    gone = v < _LOWEST_DOUBLED
    v = _HIGHEST if v > _HIGHEST else v
    v = _LOWEST_DOUBLED if gone else v
    shifted = v * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (v - n * _LN2_HIGH) - n * _LN2_LOW
    q = _polynomial(r)
    # 2**128 is no float: half of it, doubled, overflows where the product does
    e = (_ONE + (r + r * r * q)) * power_of_two_at(shifted - _ONE) * _TWO
    return _ONE - _ONE if gone else e


@kernel
def _exponential_f64(v: Any) -> Any:
    """e**v, float64."""
    return np.exp(v)


@kernel
def _normal_cdf_pdf_f32(u: Any) -> Any:
    """(Phi(u), phi(u)) of the standard normal distribution, float32."""
    z = abs(u)
    e = exp_nonpositive(-_HALF * z * z)
    t = _ONE / (_ONE + _T * z)
    p = _F(-2.0612945957917066e-2)
    p = p * t + _F(1.1237641444578479e-1)
    p = p * t + _F(-2.2806901562309806e-1)
    p = p * t + _F(1.915837040843394e-1)
    p = p * t + _F(-7.924901497332422e-2)
    p = p * t + _F(9.605872952352577e-2)
    p = p * t + _F(7.84252686065182e-2)
    p = p * t + _F(1.1022739043036442e-1)
    p = p * t + _F(1.1957283324160806e-1)
    p = p * t + _F(1.1968663449832999e-1)
    tail = e * t * p
    return (_ONE - tail if u > _F(0.0) else tail), _INV_SQRT_2PI * e


@kernel
def _logistic_f32(u: Any) -> Any:
    """1 / (1 + e**-u), float32."""
    e = exp_nonpositive(-abs(u))
    return (_ONE if u > _F(0.0) else e) / (_ONE + e)


@kernel
def _normal_cdf_pdf_f64(u: Any) -> Any:
    """(Phi(u), phi(u)) of the standard normal distribution, float64."""
    return 0.5 * math.erfc(-u * math.sqrt(0.5)), math.exp(-0.5 * u * u) / math.sqrt(2.0 * math.pi)


@kernel
def _logistic_f64(u: Any) -> Any:
    """1 / (1 + e**-u), float64."""
    e = math.exp(-abs(u))
    return (1.0 if u > 0.0 else e) / (1.0 + e)


def exponential(v: Any) -> Any:
    """e**v in v's float type; callable from kernels only."""
    raise NotImplementedError("exponential is called from compiled kernels")


def normal_cdf_pdf(u: Any) -> Any:
    """(Phi(u), phi(u)) in u's float type; callable from kernels only."""
    raise NotImplementedError("normal_cdf_pdf is called from compiled kernels")


def logistic(u: Any) -> Any:
    """1 / (1 + e**-u) in u's float type; callable from kernels only."""
    raise NotImplementedError("logistic is called from compiled kernels")


@overload(normal_cdf_pdf, jit_options={"error_model": "numpy"})
def _choose_normal_cdf_pdf(u: Any) -> Any:
    chosen = _normal_cdf_pdf_f32 if u == types.float32 else _normal_cdf_pdf_f64

    def implementation(u: Any) -> Any:
        return chosen(u)

    return implementation


@overload(exponential, jit_options={"error_model": "numpy"})
def _choose_exponential(v: Any) -> Any:
    chosen = _exponential_f32 if v == types.float32 else _exponential_f64

    def implementation(v: Any) -> Any:
        return chosen(v)

    return implementation


@overload(logistic, jit_options={"error_model": "numpy"})
def _choose_logistic(u: Any) -> Any:
    chosen = _logistic_f32 if u == types.float32 else _logistic_f64

    def implementation(u: Any) -> Any:
        return chosen(u)

    return implementation
