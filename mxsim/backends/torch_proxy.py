"""The student in PyTorch: loss and gradient by autograd, under any precision scheme.

The second implementation of proxy.py, from the same specification (precision.py, config.py) and of
none of its code, so that each checks the other: gradients come from autograd here, from
hand-written backprop there.  Parameters are one flat vector, in the layout of mxsim.proxy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import ArrayLike

from mxsim.backends.torch_activation import activation
from mxsim.backends.torch_linear import linear
from mxsim.backends.torch_norm import norm
from mxsim.backends.torch_sites import Seen, Sites, Tensor, gate, sites_of
from mxsim.config import ProxyConfig
from mxsim.precision import PrecisionScheme
from mxsim.proxy import (
    KINDS,
    Params,
    check_batch,
    check_params,
    parameter_shapes,
    parameter_views,
)

Blocks = Sequence[Mapping[str, Tensor]]
Kept = Callable[[str, Tensor], None]  # name, value: what a step computed, in order


@contextmanager
def ieee_float32() -> Iterator[None]:
    """GEMMs in float32 proper: no TF32, no reduced-precision sums; as it was on the way out."""
    matmul = torch.backends.cuda.matmul
    tf32 = (
        ("fp32_precision", "ieee") if hasattr(matmul, "fp32_precision") else ("allow_tf32", False)
    )
    wanted = dict([tf32])
    for kind in ("bf16", "fp16"):
        wanted[f"allow_{kind}_reduced_precision_reduction"] = False
    before = {name: getattr(matmul, name) for name in wanted}
    for name, value in wanted.items():
        setattr(matmul, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def gemm_settings() -> dict[str, bool]:
    """What ``ieee_float32`` comes to, read back: all False."""
    with ieee_float32():
        matmul = torch.backends.cuda.matmul
        new = getattr(matmul, "fp32_precision", None)
        return {
            "tf32": matmul.allow_tf32 if new is None else new != "ieee",
            "reduced_precision_reductions": bool(
                matmul.allow_bf16_reduced_precision_reduction
                or matmul.allow_fp16_reduced_precision_reduction
            ),
        }


def blocks_of(flat: Tensor, cfg: ProxyConfig) -> list[dict[str, Tensor]]:
    """The blocks of parameters as differentiable views into ``flat`` (parameter_count(cfg),)."""
    shapes = parameter_shapes(cfg)
    sizes = [math.prod(shape) for shape in shapes.values()]
    parts = iter(flat.split(sizes * cfg.depth))
    return [{k: next(parts).view(shape) for k, shape in shapes.items()} for _ in range(cfg.depth)]


def predict(
    params: Blocks, x: Tensor, cfg: ProxyConfig, sites: Sequence[Sites], kept: Kept | None = None
) -> Tensor:
    """x (n, d) -> prediction (n, d).  ``kept`` is shown what each block makes on the way."""
    stream = x
    for k, (p, s) in enumerate(zip(params, sites, strict=True)):
        # x_{k+1} = x_k + w2 phi(w1 LN(x_k)) + b2; rounded on the way back: the stream's gradient
        stream = gate(stream, backward=s.rounding("backward", "residual"))
        beta = p["ln_beta"].detach() if s.scheme.frozen_beta else p["ln_beta"]
        z = norm(stream, p["ln_gamma"], beta, cfg.norm, cfg.ln_eps, s)
        hidden = activation(linear(z, p["w1"], "fc1", s), cfg.activation, s)
        branch = _with_bias(linear(hidden, p["w2"], "fc2", s), p["b2"], s)
        stream = gate(stream + branch, s.rounding("forward", "residual"))
        if kept is not None:
            kept(f"block {k} layer-norm output", z)
            kept(f"block {k} hidden", hidden)
    return stream


def _with_bias(y: Tensor, b: Tensor, sites: Sites) -> Tensor:
    """y (n, d) + b (d,); b's gradient is the sum over dy as ``gemm_in`` leaves it."""
    forward, backward = sites.rounding("forward", "bias"), sites.rounding("backward", "bias")
    rows = gate(b, forward, backward).expand_as(y)
    return gate(y + gate(rows, backward=sites.rounding("backward", "gemm_in")), forward)


def mean_square(prediction: Tensor, y: Tensor) -> Tensor:
    """Mean squared error over all entries, summed in float64, so that it is finite where they are.

    Differences are taken in the run's dtype.
    """
    return (prediction - y).double().square().mean()


def loss_and_gradient(
    flat: Tensor, x: Tensor, y: Tensor, cfg: ProxyConfig, sites: Sequence[Sites]
) -> tuple[Tensor, Tensor]:
    """The loss (float64) and its gradient, flat as the parameters; both stay on the device."""
    leaf = flat.detach().requires_grad_()
    with torch.enable_grad():
        loss = mean_square(predict(blocks_of(leaf, cfg), x, cfg, sites), y)
        (gradient,) = torch.autograd.grad(loss, leaf)
    if sites[0].scheme.gradients == "bf16":
        gradient = sites[0].bf16(gradient)
    return loss.detach(), gradient


def loss_and_grads(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
    device: str = "cpu",
    seen: Seen | None = None,
) -> tuple[float, Params]:
    """mxsim.loss_and_grads by autograd on ``device``: arrays in, arrays out, the same errors.

    seen: called with (site, block, before, after), tensors, for every operand that is quantized.
    """
    checked = check_params(params, cfg)
    real = checked[0]["w1"].dtype
    arrays = check_batch(x, y, cfg, real)
    flat = np.concatenate([block[kind].reshape(-1) for block in checked for kind in KINDS])
    sites = sites_of(scheme, cfg.depth, cfg.seed, step, seen)
    flat_, x_, y_ = (torch.from_numpy(a.copy()).to(device) for a in (flat, *arrays))
    with ieee_float32():
        loss, gradient = loss_and_gradient(flat_, x_, y_, cfg, sites)
    return loss.item(), parameter_views(gradient.cpu().numpy(), cfg)


@torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
def evaluate(
    flat: Tensor, x: Tensor, y: Tensor, cfg: ProxyConfig, scheme: PrecisionScheme, step: int
) -> float:
    """Mean squared error on a (large) sample under ``scheme``, in chunks of ``cfg.batch`` rows."""
    sites = sites_of(scheme, cfg.depth, cfg.seed, step)
    params = blocks_of(flat, cfg)
    total = torch.zeros((), dtype=torch.float64, device=flat.device)
    for rows, targets in zip(x.split(cfg.batch), y.split(cfg.batch), strict=True):
        total += mean_square(predict(params, rows, cfg, sites), targets) * len(rows)
    return float(total.item()) / len(x)
