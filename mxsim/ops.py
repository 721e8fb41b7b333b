"""The operations of the proxy, each forward beside its backward; gradients are named d<name>.

Arrays are C-contiguous, float32 or float64, and written in place: nothing here allocates.  Shapes
use n for samples, d for width, h for the hidden layer, i and o for a linear map's in and out.
Quantization enters through ``BlockPrecision.operand``; a straight-through estimator is the rule
everywhere: the backward pass differentiates the unquantized map, at the quantized operands named in
each place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim import elementwise
from mxsim.jit import kernel
from mxsim.precision import BlockPrecision
from mxsim.rounders import NO_RANDOM
from mxsim.special import logistic, normal_cdf_pdf
from mxsim.threads import Dot, dot

Array = NDArray[Any]
Rounding = tuple[int, Any]  # (mode, spec) of rounding.round_float


# ---------------------------------------------------------------- linear: y = x w^T


@dataclass(frozen=True)
class LinearScratch:
    """Where the rounded copies of a linear map's operands go: x (n, i), w (o, i), dy (n, o).

    ``*_in`` hold what is done before an operand's site: rounding to bf16, rotation.  ``dot`` is the
    GEMM.
    """

    x: Array
    w: Array
    dy: Array
    x_in: Array
    w_in: Array
    dy_in: Array
    dot: Dot = dot


def rounded(x: Array, out: Array, step: str, how: Rounding) -> Array:
    """x itself if ``step`` is "exact", else rounded into out."""
    if step == "exact":
        return x
    elementwise.round_elementwise(x.reshape(-1), out.reshape(-1), *how, NO_RANDOM)
    return out


def round_in_place(x: Array, step: str, how: Rounding) -> None:
    """Round x unless ``step`` is "exact"."""
    if step != "exact":
        elementwise.round_in_place(x.reshape(-1), *how)


def linear_forward(
    x: Array,
    w: Array,
    y: Array,
    layer: str,
    precision: BlockPrecision,
    how: Rounding,
    scratch: LinearScratch,
) -> None:
    """x (n, i), w (o, i) -> y (n, o); contracts over i."""
    steps = precision.scheme.forward
    x = rounded(x, scratch.x_in, steps.gemm_in, how)
    xq = precision.operand(f"{layer}_fprop_x", x, 1, scratch.x)
    wq = w if precision.ready else forward_weight(w, layer, precision, how, scratch)
    scratch.dot(xq, wq.T, y)
    round_in_place(y, steps.gemm_out, how)


def forward_weight(
    w: Array, layer: str, precision: BlockPrecision, how: Rounding, scratch: LinearScratch
) -> Array:
    """w (o, i) as the forward GEMM sees it: itself, or in scratch."""
    w = rounded(w, scratch.w_in, precision.scheme.forward.gemm_in, how)
    return precision.operand(f"{layer}_fprop_w", w, 1, scratch.w)


def linear_backward(
    dy: Array,
    x: Array,
    w: Array,
    dx: Array | None,
    dw: Array,
    layer: str,
    precision: BlockPrecision,
    how: Rounding,
    scratch: LinearScratch,
) -> None:
    """dy (n, o), x (n, i), w (o, i) -> dx (n, i), dw (o, i); dx is skipped if None.

    dy arrives with ``gemm_in`` applied (maybe in scratch.dy_in).  Operands are requantized from
    high precision, since each GEMM contracts another axis, unless the scheme reuses copies.
    """
    steps = precision.scheme.backward
    # y = x w^T  ->  dx = dy w, contracts over o
    if dx is not None:
        w = _backward_operand(w, f"{layer}_fprop_w", precision, how, scratch.w_in, scratch.w)
        spare = scratch.w_in if w is scratch.w else scratch.w
        dyq = precision.operand(f"{layer}_dgrad_dy", dy, 1, scratch.dy)
        wq = precision.operand(f"{layer}_dgrad_w", w, 0, spare)
        scratch.dot(dyq, wq, dx)
        round_in_place(dx, steps.gemm_out, how)
    # y = x w^T  ->  dw = dy^T x, contracts over n
    x = _backward_operand(x, f"{layer}_fprop_x", precision, how, scratch.x_in, scratch.x)
    if precision.rotates(layer):
        signs = precision.signs(layer, len(dy))
        size = precision.scheme.hadamard_size
        dy = _rotated(dy, scratch.dy_in, signs, size)
        x = _rotated(x, scratch.x_in, signs, size)
    spare = scratch.x_in if x is scratch.x else scratch.x
    dyq = precision.operand(f"{layer}_wgrad_dy", dy, 0, scratch.dy)
    xq = precision.operand(f"{layer}_wgrad_x", x, 0, spare)
    scratch.dot(dyq.T, xq, dw)
    round_in_place(dw, steps.gemm_out, how)


def _backward_operand(
    x: Array, site: str, precision: BlockPrecision, how: Rounding, first: Array, second: Array
) -> Array:
    """What a backward site starts from: x, rounded by ``gemm_in``, or the forward's copy of it.

    Uses ``first`` for the rounding and ``second`` for the copy, which is made again: the forward
    site is a function of x, and of its own random bits.
    """
    scheme = precision.scheme
    if scheme.backward_operands == "requantize":
        return rounded(x, first, scheme.backward.gemm_in, how)
    x = rounded(x, first, scheme.forward.gemm_in, how)
    return precision.operand(site, x, 1, second)


def _rotated(x: Array, out: Array, signs: Array, size: int) -> Array:
    if x is not out:
        out[...] = x
    elementwise.rotate_rows(out, signs, size)
    return out


# ---------------------------------------------------------------- layer norm


@kernel
def sum_of(v: Any) -> Any:
    """Sum of a row in four interleaved parts: four times the speed of one chain of additions."""
    a = b = c = e = v.dtype.type(0)
    whole = v.size - v.size % 4
    for j in range(0, whole, 4):
        a += v[j]
        b += v[j + 1]
        c += v[j + 2]
        e += v[j + 3]
    for j in range(whole, v.size):
        a += v[j]
    return (a + b) + (c + e)


@kernel
def _dot(v: Any, w: Any) -> Any:
    """Inner product of two rows, in the order of ``sum_of``."""
    a = b = c = e = v.dtype.type(0)
    whole = v.size - v.size % 4
    for j in range(0, whole, 4):
        a += v[j] * w[j]
        b += v[j + 1] * w[j + 1]
        c += v[j + 2] * w[j + 2]
        e += v[j + 3] * w[j + 3]
    for j in range(whole, v.size):
        a += v[j] * w[j]
    return (a + b) + (c + e)


@kernel
def layer_norm_forward(
    x: Any, gamma: Any, beta: Any, eps: Any, z: Any, xhat: Any, rstd: Any, var_eps: Any, centre: Any
) -> None:
    """x (n, d), gamma (d,), beta (d,) -> z (n, d); keeps xhat (n, d), rstd (n,) for backward.

    var_eps (n,) is the (biased) variance + eps, rstd its inverse root.  gamma and beta arrive
    quantized.  Without ``centre``, no mean is taken off: RMS norm.
    """
    n, d = x.shape
    size = x.dtype.type(d)
    one = x.dtype.type(1)
    for i in range(n):
        # 1. mean, 2. centre
        mean = sum_of(x[i]) / size if centre else size - size
        for j in range(d):
            xhat[i, j] = x[i, j] - mean
        # 3. variance, 4. normalize
        var_eps[i] = _dot(xhat[i], xhat[i]) / size + eps
        rstd[i] = one / np.sqrt(var_eps[i])
        for j in range(d):
            xhat[i, j] *= rstd[i]
            # 5. scale and shift
            z[i, j] = xhat[i, j] * gamma[j] + beta[j]


@kernel
def layer_norm_backward(
    dz: Any,
    xhat: Any,
    rstd: Any,
    gamma: Any,
    dx: Any,
    dgamma: Any,
    dbeta: Any,
    row: Any,
    centre: Any,
) -> None:
    """dz (n, d) -> dgamma (d,), dbeta (d,); adds to dx (n, d).  gamma arrives quantized.

    ``row`` (d,) is scratch.
    """
    n, d = dz.shape
    inverse = dz.dtype.type(1) / dz.dtype.type(d)
    dgamma[:] = 0
    dbeta[:] = 0
    for i in range(n):
        for j in range(d):
            # 5. z = xhat * gamma + beta
            dgamma[j] += dz[i, j] * xhat[i, j]
            dbeta[j] += dz[i, j]
            row[j] = dz[i, j] * gamma[j]  # dxhat
        # 4.-1. xhat = (x - mean) * rstd, both of which depend on x
        mean = sum_of(row) * inverse if centre else inverse - inverse
        slope = _dot(row, xhat[i]) * inverse
        for j in range(d):
            dx[i, j] += rstd[i] * (row[j] - mean - xhat[i, j] * slope)


@kernel
def layer_norm_backward_affine(dz: Any, xhat: Any, dgamma: Any, dbeta: Any) -> None:
    """The part of layer_norm_backward that the first block needs: its x is data."""
    n, d = dz.shape
    dgamma[:] = 0
    dbeta[:] = 0
    for i in range(n):
        for j in range(d):
            dgamma[j] += dz[i, j] * xhat[i, j]
            dbeta[j] += dz[i, j]


# ---------------------------------------------------------------- activations


def activation_forward(u: Array, hidden: Array, slope: Array, activation: str) -> None:
    """u (n, h) -> hidden (n, h); keeps slope, d hidden / d u, shaped like u, for backward.

    swiglu: u (n, 2h) is split in halves a, b -> hidden = a * silu(b).
    The slope costs little beside the function (both need the same exponential), and the backward
    pass then needs neither u nor another exponential.
    """
    if activation == "swiglu":
        _swiglu_forward(u, hidden, slope)
    elif activation == "gelu":
        _gelu_forward(u.reshape(-1), hidden.reshape(-1), slope.reshape(-1))
    elif activation == "gelu_tanh":
        _gelu_tanh_forward(u.reshape(-1), hidden.reshape(-1), slope.reshape(-1))
    elif activation == "relu":
        _relu_forward(u.reshape(-1), hidden.reshape(-1), slope.reshape(-1))
    else:  # linear
        hidden[...] = u
        slope[...] = 1


@kernel
def activation_backward(dhidden: Any, slope: Any, du: Any) -> None:
    """dhidden (n, h), slope (n, h) or (n, 2h) -> du, shaped like slope."""
    n, h = dhidden.shape
    for i in range(n):
        for half in range(slope.shape[1] // h):
            dy, s, out = (
                dhidden[i],
                slope[i, half * h : (half + 1) * h],
                du[i, half * h : (half + 1) * h],
            )
            for j in range(h):
                out[j] = dy[j] * s[j]


@kernel
def _gelu_forward(u: Any, hidden: Any, slope: Any) -> None:
    """gelu(u) = u Phi(u), the erf form; gelu'(u) = Phi(u) + u phi(u)."""
    for i in range(u.size):
        cdf, pdf = normal_cdf_pdf(u[i])
        hidden[i] = u[i] * cdf
        slope[i] = cdf + u[i] * pdf


@kernel
def _gelu_tanh_forward(u: Any, hidden: Any, slope: Any) -> None:
    """u s, s = logistic(2 t), t = sqrt(2/pi) (u + 0.044715 u^3); its slope is s + 2 u s (1 - s) t'.

    The same as u (1 + tanh t) / 2 (Hendrycks and Gimpel 2016).
    """
    one = u.dtype.type(1)
    linear = u.dtype.type(1.5957691216057308)  # 2 sqrt(2 / pi)
    cubic = u.dtype.type(0.044715)
    three, far = u.dtype.type(3), u.dtype.type(16)
    for i in range(u.size):
        s = logistic(linear * u[i] * (one + cubic * (u[i] * u[i])))
        hidden[i] = u[i] * s
        v = far if u[i] > far else (-far if u[i] < -far else u[i])  # beyond, s (1 - s) is 0
        slope[i] = s + v * s * (one - s) * linear * (one + three * cubic * (v * v))


@kernel
def _relu_forward(u: Any, hidden: Any, slope: Any) -> None:
    """relu(u) = max(u, 0); the slope at 0 is 0, and NaN passes through."""
    zero, one = u.dtype.type(0), u.dtype.type(1)
    for i in range(u.size):
        hidden[i] = zero if u[i] <= zero else u[i]
        slope[i] = zero if u[i] <= zero else one


@kernel
def _swiglu_forward(u: Any, hidden: Any, slope: Any) -> None:
    """a * silu(b), silu(b) = b s with s = 1 / (1 + e^-b); silu'(b) = s (1 + b (1 - s))."""
    n, h = hidden.shape
    one = u.dtype.type(1)
    for i in range(n):
        a, b = u[i, :h], u[i, h:]
        slope_a, slope_b = slope[i, :h], slope[i, h:]
        out = hidden[i]
        for j in range(h):
            s = logistic(b[j])
            silu = b[j] * s
            out[j] = a[j] * silu
            slope_a[j] = silu
            slope_b[j] = a[j] * s * (one + b[j] * (one - s))


# ---------------------------------------------------------------- residual, bias, loss


@kernel
def add_branch(x: Any, branch: Any, b: Any) -> None:
    """x (n, d) += branch (n, d) + b (d,), the residual stream's update."""
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            x[i, j] += branch[i, j] + b[j]


@kernel
def column_sums(dy: Any, db: Any) -> None:
    """dy (n, d) -> db (d,), the gradient of a bias added to every row."""
    db[:] = 0
    for i in range(dy.shape[0]):
        for j in range(dy.shape[1]):
            db[j] += dy[i, j]


@kernel
def mse_forward_backward(prediction: Any, y: Any, dprediction: Any) -> Any:
    """prediction, y (n, d) -> mean squared error over all entries; its gradient in dprediction.

    The sum runs in float64: its rounding stays below that of the terms.
    """
    n, d = prediction.shape
    factor = prediction.dtype.type(2.0 / (n * d))
    total = 0.0
    for i in range(n):
        for j in range(d):
            difference = prediction[i, j] - y[i, j]
            total += np.float64(difference) * np.float64(difference)
            dprediction[i, j] = factor * difference
    return total / (n * d)


@kernel
def squared_norm(v: Any) -> Any:
    """Sum of squares of v (size,) in float64: finite whenever a float32 v is."""
    a = b = c = e = 0.0
    whole = v.size - v.size % 4
    for j in range(0, whole, 4):
        a += np.float64(v[j]) * np.float64(v[j])
        b += np.float64(v[j + 1]) * np.float64(v[j + 1])
        c += np.float64(v[j + 2]) * np.float64(v[j + 2])
        e += np.float64(v[j + 3]) * np.float64(v[j + 3])
    for j in range(whole, v.size):
        a += np.float64(v[j]) * np.float64(v[j])
    return (a + b) + (c + e)
