"""Layer norm: exact, differentiated by autograd, or with every vector step rounded to bf16.

The rounded backward pass is no derivative of the rounded forward pass: its steps are microxcaling's
(norm_utils.py), so they are written out.
"""

from __future__ import annotations

from typing import Any

import torch

from mxsim.backends.torch_sites import Rounding, Sites, Tensor


def norm(x: Tensor, gamma: Tensor, beta: Tensor, kind: str, eps: float, sites: Sites) -> Tensor:
    """x (n, d), gamma, beta (d,) -> (n, d); ``kind`` is ProxyConfig.norm.

    gamma and beta go through their sites, unless ``kind`` leaves them unused.
    """
    if kind == "none":
        return x
    used = {"layer": (True, True), "rms": (True, False), "layer_no_affine": (False, False)}[kind]
    gamma = sites.through("ln_gamma", gamma, 0) if used[0] else torch.ones_like(gamma)
    beta = sites.through("ln_beta", beta, 0) if used[1] else torch.zeros_like(beta)
    modes = (sites.scheme.forward.layer_norm, sites.scheme.backward.layer_norm)
    if modes != ("exact", "exact"):
        roundings = tuple(sites.rounding(d, "layer_norm") for d in ("forward", "backward"))
        return _RoundedNorm.apply(x, gamma, beta, eps, kind != "rms", *roundings)
    shift = x if kind == "rms" else x - x.mean(-1, keepdim=True)
    variance = (shift * shift).mean(-1, keepdim=True)
    return shift * (1 / torch.sqrt(variance + eps)) * gamma + beta


class _RoundedNorm(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    """Layer norm (RMS norm without ``centre``) by steps; either rounding may do nothing."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gamma: Tensor,
        beta: Tensor,
        eps: float,
        centre: bool,
        r: Rounding,
        backward: Rounding,
    ) -> Tensor:
        n = x.shape[1]
        x = r(x)
        shift = r(x - r(r(x.sum(1, keepdim=True)) / n)) if centre else x
        variance = r(r(r(shift * shift).sum(1, keepdim=True)) / n)
        var_eps = r(variance + eps)
        xhat = r(shift * r(1 / r(torch.sqrt(var_eps))))
        ctx.save_for_backward(xhat, var_eps, gamma)
        ctx.centre, ctx.rounding = centre, backward
        return r(r(r(gamma) * xhat) + r(beta))

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        # With s = sqrt(var + eps), t = dz gamma: dx = u - mean(u),
        # u = t / s - xhat mean(t xhat s) / (var + eps).
        b, n = ctx.rounding, dz.shape[1]
        xhat, var_eps, gamma = ctx.saved_tensors
        dy = b(dz)
        dgamma, dbeta = b(b(dy * xhat).sum(0)), b(dy.sum(0))
        dx = None
        if ctx.needs_input_grad[0]:
            t, s = b(dy * b(gamma)), b(torch.sqrt(var_eps))
            slope = b(b(b(b(t * xhat) * s).sum(1, keepdim=True)) / n)
            slope = b(slope * b(1 / var_eps))
            dx = b(b(t * b(1 / s)) - b(slope * xhat))
            if ctx.centre:
                dx = b(dx - b(b(dx.sum(1, keepdim=True)) / n))
        return dx, dgamma, dbeta, None, None, None, None
