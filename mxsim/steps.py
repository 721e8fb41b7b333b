"""Layer norm and activations with every vector step rounded, as on a bf16 vector unit.

The arithmetic is microxcaling's (norm_utils.py, activations.py): its inputs, and the result of each
sum, division, product, root or exponential, are rounded before the next step uses them.  Forward
beside backward, shapes and names as in ops.py, whose operations these replace when a scheme's
Internals ask for it.

``how`` is the rounding of a pass, maybe none (rounding.rounded_by, here _r).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.jit import kernel
from mxsim.ops import sum_of
from mxsim.rounding import rounded_by as _r
from mxsim.special import exponential, logistic

Array = NDArray[Any]


# ---------------------------------------------------------------- layer norm


@kernel
def layer_norm_forward(
    x: Any,
    gamma: Any,
    beta: Any,
    eps: Any,
    z: Any,
    xhat: Any,
    var_eps: Any,
    how: Any,
    rows: Any,
    centre: Any,
) -> None:
    """x (n, d), gamma (d,), beta (d,) -> z (n, d); keeps xhat (n, d), var_eps (n,) for backward.

    var_eps is the rounded variance + eps.  ``rows`` (4, d) is scratch.  Without ``centre``, RMS
    norm.
    """
    n, d = x.shape
    size, one = x.dtype.type(d), x.dtype.type(1)
    shift, square, g, b = rows[0], rows[1], rows[2], rows[3]
    for j in range(d):
        g[j] = _r(gamma[j], how)
        b[j] = _r(beta[j], how)
    for i in range(n):
        # 1. mean, 2. centre
        for j in range(d):
            shift[j] = _r(x[i, j], how)
        mean = _r(_r(sum_of(shift), how) / size, how) if centre else size - size
        for j in range(d):
            shift[j] = _r(shift[j] - mean, how)
            square[j] = _r(shift[j] * shift[j], how)
        # 3. variance, 4. normalize
        var_eps[i] = _r(_r(_r(sum_of(square), how) / size, how) + eps, how)
        rstd = _r(one / _r(np.sqrt(var_eps[i]), how), how)
        for j in range(d):
            xhat[i, j] = _r(shift[j] * rstd, how)
            # 5. scale and shift
            z[i, j] = _r(_r(g[j] * xhat[i, j], how) + b[j], how)


@kernel
def layer_norm_backward(
    dz: Any,
    xhat: Any,
    var_eps: Any,
    gamma: Any,
    dx: Any,
    dgamma: Any,
    dbeta: Any,
    how: Any,
    rows: Any,
    centre: Any,
) -> None:
    """dz (n, d) -> dgamma (d,), dbeta (d,); adds to dx (n, d).  ``rows`` (4, d) is scratch.

    With xhat = shift / s, s = sqrt(var + eps), t = dz gamma: dx = u - mean(u),
    u = t / s - xhat mean(t xhat s) / (var + eps).
    """
    n, d = dz.shape
    size, one = dz.dtype.type(d), dz.dtype.type(1)
    u, part, g = rows[0], rows[1], rows[2]
    for j in range(d):
        g[j] = _r(gamma[j], how)
    dgamma[:] = 0
    dbeta[:] = 0
    for i in range(n):
        std = _r(np.sqrt(var_eps[i]), how)
        rstd, rvar = _r(one / std, how), _r(one / var_eps[i], how)
        for j in range(d):
            dy = _r(dz[i, j], how)
            dbeta[j] += dy
            dgamma[j] += _r(dy * xhat[i, j], how)
            t = _r(dy * g[j], how)
            u[j] = _r(t * rstd, how)
            part[j] = _r(_r(t * xhat[i, j], how) * std, how)
        slope = _r(_r(_r(sum_of(part), how) / size, how) * rvar, how)
        for j in range(d):
            u[j] = _r(u[j] + _r(-slope * xhat[i, j], how), how)
        mean = _r(_r(sum_of(u), how) / size, how) if centre else size - size
        for j in range(d):
            dx[i, j] += _r(u[j] - mean, how)
    for j in range(d):
        dgamma[j] = _r(dgamma[j], how)
        dbeta[j] = _r(dbeta[j], how)


# ---------------------------------------------------------------- activations


def activation_forward(
    u: Array,
    hidden: Array,
    slope: Array,
    gate: Array,
    activation: str,
    how: tuple[int, Any],
    gate_how: tuple[int, Any],
    back: tuple[int, Any],
) -> None:
    """u -> hidden (n, h), slope shaped like u; the steps of the slope are rounded by ``back``.

    swiglu: u (n, 2h) = [a | b], hidden = a * silu(b); silu's steps are rounded by ``gate_how``, the
    product by ``how``.  Then slope = [silu(b) | silu'(b)], and ``gate`` (n, h) keeps a.
    """
    if activation == "swiglu":
        _swiglu_forward(u, hidden, slope, gate, how, gate_how, back)
    elif activation in ("gelu", "gelu_tanh"):  # the tanh form is the sigmoid form
        # microxcaling's coefficients, on the bf16 grid: 0.044715, 2 sqrt(2 / pi), their product * 3
        real = u.dtype.type
        constants = (real(0.044677734375), real(1.59375), real(0.2138671875))
        _gelu_forward(u.reshape(-1), hidden.reshape(-1), slope.reshape(-1), constants, how, back)
    else:
        _relu_forward(
            u.reshape(-1), hidden.reshape(-1), slope.reshape(-1), activation == "relu", how
        )


@kernel
def _gelu_forward(u: Any, hidden: Any, slope: Any, constants: Any, how: Any, back: Any) -> None:
    """x sigmoid(1.5958 (x + 0.044715 x^3)), and its derivative (Hendrycks and Gimpel 2016)."""
    cubic, linear, slope_cubic = constants
    one = u.dtype.type(1)
    for i in range(u.size):
        x = _r(u[i], how)
        t = _r(_r(x * x, how) * x, how)
        t = _r(linear * _r(_r(cubic * t, how) + x, how), how)
        cdf = _r(one / _r(_r(exponential(-t), how) + one, how), how)
        hidden[i] = _r(x * cdf, how)
        p = _r(cdf * _r(one - cdf, back), back)
        dt = _r(linear + _r(slope_cubic * _r(x * x, back), back), back)
        slope[i] = _r(cdf + _r(x * _r(dt * p, back), back), back)


@kernel
def _relu_forward(u: Any, hidden: Any, slope: Any, clip: Any, how: Any) -> None:
    zero, one = u.dtype.type(0), u.dtype.type(1)
    for i in range(u.size):
        off = clip and u[i] <= zero
        hidden[i] = _r(zero if off else u[i], how)
        slope[i] = zero if off else one


@kernel
def _swiglu_forward(
    u: Any, hidden: Any, slope: Any, gate: Any, how: Any, gate_how: Any, back: Any
) -> None:
    n, h = hidden.shape
    one = u.dtype.type(1)
    for i in range(n):
        for j in range(h):
            a, b = _r(u[i, j], how), _r(u[i, h + j], gate_how)
            if gate_how[0] < 0:
                s = logistic(b)
            else:
                s = _r(one / _r(_r(exponential(-b), gate_how) + one, gate_how), gate_how)
            silu = _r(b * s, gate_how)
            hidden[i, j] = _r(a * silu, how)
            gate[i, j] = a
            slope[i, j] = silu
            slope[i, h + j] = _r(s + _r(silu * _r(one - s, back), back), back)


def activation_backward(
    dhidden: Array,
    slope: Array,
    gate: Array,
    du: Array,
    activation: str,
    how: tuple[int, Any],
    gate_how: tuple[int, Any],
) -> None:
    """dhidden (n, h), slope and gate of the forward pass -> du, shaped like slope."""
    if activation == "swiglu":
        _swiglu_backward(dhidden, slope, gate, du, how, gate_how)
    else:
        _product(dhidden.reshape(-1), slope.reshape(-1), du.reshape(-1), how)


@kernel
def _product(dhidden: Any, slope: Any, du: Any, how: Any) -> None:
    for i in range(du.size):
        du[i] = _r(_r(dhidden[i], how) * _r(slope[i], how), how)


@kernel
def _swiglu_backward(dhidden: Any, slope: Any, gate: Any, du: Any, how: Any, gate_how: Any) -> None:
    """da = dhidden silu(b); db = (dhidden a) silu'(b)."""
    n, h = dhidden.shape
    for i in range(n):
        for j in range(h):
            dy = _r(dhidden[i, j], how)
            du[i, j] = _r(dy * slope[i, j], how)
            dsilu = _r(dy * gate[i, j], gate_how)
            du[i, h + j] = _r(dsilu * slope[i, h + j], gate_how)


# ---------------------------------------------------------------- bias


@kernel
def add_bias(y: Any, b: Any, how: Any) -> None:
    """y (n, d) += b (d,), the sum rounded."""
    for i in range(y.shape[0]):
        for j in range(y.shape[1]):
            y[i, j] = _r(y[i, j] + b[j], how)
