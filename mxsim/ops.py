"""The operations of the proxy, each forward beside its backward; gradients are named d<name>.

Arrays are C-contiguous, float32 or float64, and written in place: nothing here allocates.  Shapes
use n for samples, d for width, h for the hidden layer, i and o for a linear map's in and out.
Quantization enters through ``operand``; a straight-through estimator is the rule everywhere: the
backward pass differentiates the unquantized map, at the quantized operands named in each place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.jit import kernel
from mxsim.precision import BlockRounders
from mxsim.quantize import ElementwiseRounder, Rounder
from mxsim.special import logistic, normal_cdf_pdf

Array = NDArray[Any]


# ---------------------------------------------------------------- linear: y = x w^T


@dataclass(frozen=True)
class LinearScratch:
    """Where the quantized copies of a linear map's operands go: x (n, i), w (o, i), dy (n, o)."""

    x: Array
    w: Array
    dy: Array


def operand(rounder: Rounder | ElementwiseRounder | None, x: Array, axis: int, out: Array) -> Array:
    """x as the GEMM sees it: itself if the site is exact, else quantized along axis into out."""
    return x if rounder is None else rounder(x, axis, out)


def linear_forward(
    x: Array, w: Array, y: Array, layer: str, sites: BlockRounders, scratch: LinearScratch
) -> None:
    """x (n, i), w (o, i) -> y (n, o); contracts over i."""
    xq = operand(sites[f"{layer}_fprop_x"], x, 1, scratch.x)
    wq = operand(sites[f"{layer}_fprop_w"], w, 1, scratch.w)
    np.dot(xq, wq.T, out=y)


def linear_backward(
    dy: Array,
    x: Array,
    w: Array,
    dx: Array | None,
    dw: Array,
    layer: str,
    sites: BlockRounders,
    scratch: LinearScratch,
) -> None:
    """dy (n, o), x (n, i), w (o, i) -> dx (n, i), dw (o, i); dx is skipped if None.

    The operands are requantized from high precision, since each GEMM contracts another axis.
    """
    # y = x w^T  ->  dx = dy w, contracts over o
    if dx is not None:
        dyq = operand(sites[f"{layer}_dgrad_dy"], dy, 1, scratch.dy)
        wq = operand(sites[f"{layer}_dgrad_w"], w, 0, scratch.w)
        np.dot(dyq, wq, out=dx)
    # y = x w^T  ->  dw = dy^T x, contracts over n
    dyq = operand(sites[f"{layer}_wgrad_dy"], dy, 0, scratch.dy)
    xq = operand(sites[f"{layer}_wgrad_x"], x, 0, scratch.x)
    np.dot(dyq.T, xq, out=dw)


# ---------------------------------------------------------------- layer norm


@kernel
def _sum(v: Any) -> Any:
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
    """Inner product of two rows, in the order of ``_sum``."""
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
    x: Any, gamma: Any, beta: Any, eps: Any, z: Any, xhat: Any, rstd: Any
) -> None:
    """x (n, d), gamma (d,), beta (d,) -> z (n, d); keeps xhat (n, d), rstd (n,) for backward.

    The variance is the biased one.  gamma and beta arrive quantized.
    """
    n, d = x.shape
    size = x.dtype.type(d)
    one = x.dtype.type(1)
    for i in range(n):
        # 1. mean, 2. centre
        mean = _sum(x[i]) / size
        for j in range(d):
            xhat[i, j] = x[i, j] - mean
        # 3. variance, 4. normalize
        variance = _dot(xhat[i], xhat[i]) / size
        rstd[i] = one / np.sqrt(variance + eps)
        for j in range(d):
            xhat[i, j] *= rstd[i]
            # 5. scale and shift
            z[i, j] = xhat[i, j] * gamma[j] + beta[j]


@kernel
def layer_norm_backward(
    dz: Any, xhat: Any, rstd: Any, gamma: Any, dx: Any, dgamma: Any, dbeta: Any, row: Any
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
        mean = _sum(row) * inverse
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
