"""Activations: exact, differentiated by autograd, or by vector steps rounded to bf16.

The steps are microxcaling's (activations.py): GELU in its sigmoid form with coefficients on the
bf16 grid, a slope made of what the forward pass kept.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from mxsim.backends.torch_sites import Rounding, Sites, Tensor, unrounded

# 0.044715, 2 sqrt(2 / pi) and three times their product, on the bf16 grid
CUBIC, LINEAR, SLOPE_CUBIC = 0.044677734375, 1.59375, 0.2138671875


def activation(u: Tensor, kind: str, sites: Sites) -> Tensor:
    """u (n, h), or (n, 2h) for swiglu -> (n, h); ``kind`` is ProxyConfig.activation."""
    forward, backward = (
        sites.rounding("forward", "activation"),
        sites.rounding("backward", "activation"),
    )
    if kind == "swiglu":
        gates = tuple(
            sites.rounding(d, "activation", "bf16", "bf16_gate") for d in ("forward", "backward")
        )
        if gates == (unrounded, unrounded):
            return exact(u, kind)
        return _RoundedSwiglu.apply(u, forward, backward, *gates)
    if forward is unrounded and backward is unrounded:
        return exact(u, kind)
    return _Rounded.apply(u, kind, forward, backward)


def exact(u: Tensor, kind: str) -> Tensor:
    """The activation in u's dtype, of primitive operations that autograd differentiates."""
    if kind == "gelu":  # erfc, not 1 + erf: no cancellation where Phi(u) is small
        return u * (0.5 * torch.erfc(u * -math.sqrt(0.5)))
    if kind == "gelu_tanh":
        v = u.clamp(-1e4, 1e4)  # beyond, the sigmoid is 0 or 1, and v^2 stays finite
        return u * torch.sigmoid(2 * math.sqrt(2 / math.pi) * v * (1 + 0.044715 * (v * v)))
    if kind == "relu":
        return torch.relu(u)
    if kind == "swiglu":
        a, b = u.chunk(2, dim=1)
        return a * (b * torch.sigmoid(b))
    return u


def by_steps(u: Tensor, kind: str, r: Rounding) -> Tensor:
    """The library's own activation with every step rounded, as the teacher of the paper has it."""
    if kind == "swiglu":
        a, b = u.chunk(2, dim=1)
        return r(r(a) * _silu(b, r)[1])
    return _rounded_gelu(u, r)[0] if kind.startswith("gelu") else r(exact(u, kind))


def _rounded_gelu(u: Tensor, r: Rounding) -> tuple[Tensor, Tensor, Tensor]:
    """x phi(x), phi = 1 / (1 + exp(-t)), and what the slope is made of: x, phi."""
    x = r(u)
    t = r(LINEAR * r(r(CUBIC * r(r(x * x) * x)) + x))
    phi = r(1 / r(r(torch.exp(-t)) + 1))
    return r(x * phi), x, phi


def _silu(u: Tensor, r: Rounding) -> tuple[Tensor, Tensor]:
    """(sigmoid, silu) of u by rounded steps."""
    b = r(u)
    s = torch.sigmoid(b) if r is unrounded else r(1 / r(r(torch.exp(-b)) + 1))
    return s, r(b * s)


class _Rounded(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """GELU (both forms), ReLU or nothing at all, with steps rounded in one or both directions."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, kind: str, r: Rounding, b: Rounding) -> Tensor:
        ctx.rounding = b
        if kind.startswith("gelu") and r is not unrounded:
            hidden, x, phi = _rounded_gelu(u, r)
            p = b(phi * b(1 - phi))
            dt = b(LINEAR + b(SLOPE_CUBIC * b(x * x)))
            slope = b(phi + b(x * b(dt * p)))
        else:  # the exact slope; GELU is the erf form or the tanh form, as configured
            with torch.enable_grad():
                v = u.detach().requires_grad_()
                hidden = exact(v, kind)
                (slope,) = torch.autograd.grad(hidden.sum(), v)
            hidden = r(hidden.detach())
        ctx.save_for_backward(slope)
        return hidden.clone() if hidden is u else hidden

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (slope,), b = ctx.saved_tensors, ctx.rounding
        return b(b(dy) * b(slope)), None, None, None


class _RoundedSwiglu(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """a * silu(b), u = [a | b]; silu's steps may be rounded alone (bf16_gate)."""

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        r: Rounding,
        back: Rounding,
        gate: Rounding,
        back_gate: Rounding,
    ) -> Tensor:
        a, b = u.chunk(2, dim=1)
        a = r(a)
        sigmoid, silu = _silu(b, gate)
        ctx.save_for_backward(a, sigmoid, silu)
        ctx.roundings = back, back_gate
        return r(a * silu)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        a, sigmoid, silu = ctx.saved_tensors
        b, gate = ctx.roundings
        slope = gate(sigmoid + gate(silu * gate(1 - sigmoid)))
        dy = b(dy)
        da, db = b(dy * silu), gate(gate(dy * a) * slope)
        return torch.cat((da, db), dim=1), None, None, None, None
