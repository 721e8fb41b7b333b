"""The student with bounds on its rounding errors, for what is rounded at sites or not at all.

Layer norm's backward pass is there twice, since autograd and proxy.py add up different terms.
A quantized operand is taken from ``operands``, in which both backends have to agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from scipy.special import erfc

import mxsim
from tests.backends.running_error import Array, Bounded, exactly

Operand = Callable[[str, int, Bounded], Bounded]  # site, block, before
# Errors of the libraries' functions, in units of u: PyTorch's erfc and exp are within 4 and 2 units
# in the last place on CPUs (SLEEF) and GPUs (CUDA's tables); mxsim's are in special.py.
ERFC, EXP = 8, 4
NUMBA_CDF = 2.5e-7  # absolute, of the float32 polynomial


def cdf_and_density(u: Array) -> tuple[Array, Array]:
    return erfc(-u * np.sqrt(0.5)) / 2, np.exp(-u * u / 2) / np.sqrt(2 * np.pi)


def gelu(x: Bounded, backend: str) -> tuple[Bounded, Bounded]:
    """(gelu, its slope); |gelu'| < 1.13, |gelu''| < 0.8."""
    u, v = x.u, x.value
    cdf, density = cdf_and_density(v)
    wild = 1 + v * v  # how much an exponent's rounding is multiplied
    own_cdf = u * ((ERFC + 2) * cdf + 4 * np.abs(v) * density)
    if backend == "numba" and u > 1e-10:
        own_cdf = own_cdf + NUMBA_CDF
    own = np.abs(v) * own_cdf + 2 * u * np.abs(v) * cdf
    own_slope = own_cdf + u * (4 * cdf + (EXP + 8) * np.abs(v) * density * wild)
    return x.mapped(v * cdf, 1.13, own), x.mapped(cdf + v * density, 0.8, own_slope)


def norm_backward_autograd(
    dxhat: Bounded, shift: Bounded, s: Bounded, r: Bounded, xhat: Bounded, centre: bool = True
) -> Bounded:
    """Through xhat = shift r, r = 1 / s, s = sqrt(v), v = mean(shift^2) + eps, shift = x - mean."""
    n: int = xhat.value.shape[1]
    dr = (dxhat * shift).sum(1)
    dv = (-(dr * r) * r) / (s * 2)
    dsquare = (dv / n) * shift
    dshift = dxhat * r + (dsquare + dsquare)
    return dshift - dshift.sum(1) / n if centre else dshift


def norm_backward_numba(
    dxhat: Bounded, shift: Bounded, s: Bounded, r: Bounded, xhat: Bounded
) -> Bounded:
    n: int = xhat.value.shape[1]
    inverse = exactly(1.0, xhat.u) / n
    mean, slope = dxhat.sum(1) * inverse, (dxhat * xhat).sum(1) * inverse
    return r * (dxhat - mean - xhat * slope)


NORM_BACKWARD = {"torch": norm_backward_autograd, "numba": norm_backward_numba}


def student(
    params: list[Mapping[str, Any]],
    x: Any,
    y: Any,
    cfg: mxsim.ProxyConfig,
    u: float,
    backend: str,
    operand: Operand = lambda site, block, before: before,
) -> tuple[Bounded, list[dict[str, Bounded]]]:
    """(loss, gradients) of the GELU student with layer norm, and their bounds for a ``backend``."""
    stream, kept = exactly(x, u), []
    for k, p in enumerate(params):
        w1, w2, b2 = (exactly(p[name], u) for name in ("w1", "w2", "b2"))
        gamma = operand("ln_gamma", k, exactly(p["ln_gamma"], u))
        beta = operand("ln_beta", k, exactly(p["ln_beta"], u))
        shift = stream - stream.mean(1)
        s = ((shift * shift).mean(1) + cfg.ln_eps).sqrt()
        r = exactly(1.0, u) / s
        xhat = shift * r
        z = xhat * gamma + beta
        wide = operand("fc1_fprop_x", k, z) @ operand("fc1_fprop_w", k, w1).T
        hidden, slope = gelu(wide, backend)
        branch = operand("fc2_fprop_x", k, hidden) @ operand("fc2_fprop_w", k, w2).T
        stream = stream + (branch + b2)
        kept.append((w1, w2, gamma, shift, s, r, xhat, z, hidden, slope))
    residual = stream - exactly(y, u)
    # the loss is summed in float64, its gradient has a factor of its own
    wide_residual = Bounded(residual.value, residual.error, 2.0**-52)
    squares = wide_residual * wide_residual
    loss = squares.sum(0).sum(1) / residual.value.size
    d = residual * (exactly(2.0, u) / residual.value.size)
    grads: list[dict[str, Bounded]] = []
    for k in reversed(range(cfg.depth)):
        w1, w2, gamma, shift, s, r, xhat, z, hidden, slope = kept[k]
        g = {"b2": d.sum(0)}
        dhidden, g["w2"] = linear_backward("fc2", k, d, hidden, w2, operand)
        dz, g["w1"] = linear_backward("fc1", k, dhidden * slope, z, w1, operand)
        g["ln_gamma"], g["ln_beta"] = (dz * xhat).sum(0), dz.sum(0)
        d = d + NORM_BACKWARD[backend](dz * gamma, shift, s, r, xhat)
        grads.insert(0, g)
    return loss, grads


def linear_backward(
    layer: str, k: int, dy: Bounded, x: Bounded, w: Bounded, operand: Operand
) -> tuple[Bounded, Bounded]:
    dx = operand(f"{layer}_dgrad_dy", k, dy) @ operand(f"{layer}_dgrad_w", k, w)
    dw = operand(f"{layer}_wgrad_dy", k, dy).T @ operand(f"{layer}_wgrad_x", k, x)
    return dx, dw
