"""The quantized linear map y = x w^T: three GEMMs, each with operands of its own.

The straight-through rule: the backward pass differentiates the unquantized map, at operands that
are quantized again for each GEMM, since each contracts another axis.
"""

from __future__ import annotations

from typing import Any

import torch

from mxsim.backends.torch_sites import Sites, Tensor


class _Linear(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, layer: str, sites: Sites) -> Tensor:
        into, out = sites.rounding("forward", "gemm_in"), sites.rounding("forward", "gemm_out")
        xq = sites.operand(f"{layer}_fprop_x", into(x), 1)
        wq = sites.operand(f"{layer}_fprop_w", into(w), 1)
        reuse = sites.scheme.backward_operands == "reuse"
        ctx.save_for_backward(*((xq, wq) if reuse else (x, w)))
        ctx.layer, ctx.sites = layer, sites
        return out(xq @ wq.T)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        sites, layer = ctx.sites, ctx.layer
        into, out = sites.rounding("backward", "gemm_in"), sites.rounding("backward", "gemm_out")
        x, w = ctx.saved_tensors
        dy = into(dy)
        if sites.scheme.backward_operands == "requantize":
            x, w = into(x), into(w)
        # y = x w^T  ->  dx = dy w, contracts over out
        dx = None
        if ctx.needs_input_grad[0]:
            dyq = sites.operand(f"{layer}_dgrad_dy", dy, 1)
            dx = out(dyq @ sites.operand(f"{layer}_dgrad_w", w, 0))
        # y = x w^T  ->  dw = dy^T x, contracts over the batch
        if sites.rotates(layer):
            dy, x = sites.rotated(layer, dy), sites.rotated(layer, x)
        dyq = sites.operand(f"{layer}_wgrad_dy", dy, 0)
        dw = out(dyq.T @ sites.operand(f"{layer}_wgrad_x", x, 0))
        return dx, dw, None, None


def linear(x: Tensor, w: Tensor, layer: str, sites: Sites) -> Tensor:
    """x (n, in), w (out, in) -> (n, out); ``layer``: fc1 or fc2, whose sites it goes through."""
    return _Linear.apply(x, w, layer, sites)
