"""The optimizers of optim.py on a device, without a number from the host: a step can be captured.

Rates and bias corrections of all steps are made beforehand; each product, sum and quotient is
rounded by itself, in the order of PyTorch's formulas, so that a gradient of the same bits gives
moments of the same bits on every backend, and weights of the same bits but for Adam's root: on x86
PyTorch's is within 0.75 units in the last place, not correctly rounded.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxsim.backends.torch_sites import Rounding, Tensor, unrounded
from mxsim.config import ProxyConfig
from mxsim.optim import learning_rate
from mxsim.precision import PrecisionScheme


def coefficients(cfg: ProxyConfig) -> NDArray[Any]:
    """(steps, 3) in cfg.dtype: rate, root of Adam's second correction, weight decay's factor."""
    rows = np.ones((cfg.steps, 3))
    with np.errstate(over="ignore", invalid="ignore"):
        for step in range(cfg.steps):
            rate = learning_rate(cfg, step)
            if cfg.weight_decay:
                rows[step, 2] = 1 - rate * cfg.weight_decay
            if cfg.optimizer != "sgd":
                rate /= 1 - cfg.beta1 ** (step + 1)
                rows[step, 1] = math.sqrt(1 - cfg.beta2 ** (step + 1))
            rows[step, 0] = rate
        return rows.astype(cfg.real)


def clipped(gradient: Tensor, norm: Tensor, cfg: ProxyConfig) -> Tensor:
    """``gradient``, of (float64) ``norm``, scaled down to cfg.grad_clip (clip_grad_norm_)."""
    if cfg.grad_clip is None:
        return gradient
    factor = torch.full_like(norm, cfg.grad_clip) / (norm + 1e-6)  # of a number, reciprocal first
    return gradient * torch.where(factor < 1, factor, 1.0).to(gradient.dtype)


def updated(
    flat: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    row: Tensor,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    bf16: Rounding,
) -> tuple[Tensor, Tensor, Tensor]:
    """(flat, first, second) after one update; ``row`` (3,) is the step's of ``coefficients``.

    Moments and weights that the scheme keeps in bf16 are rounded by ``bf16`` as they are updated.
    """
    moments = bf16 if scheme.moments == "bf16" else unrounded
    weights = bf16 if scheme.master_weights == "bf16" else unrounded
    rate, correction, decay = row.unbind()
    if cfg.optimizer == "sgd":
        first = moments(cfg.momentum * first + gradient)
        return weights(flat - rate * first), first, second
    if cfg.weight_decay:
        flat = flat * decay
    first = moments(cfg.beta1 * first + (1 - cfg.beta1) * gradient)
    second = moments(cfg.beta2 * second + (1 - cfg.beta2) * (gradient * gradient))
    change = rate * first / (torch.sqrt(second) / correction + cfg.adam_eps)
    change = torch.where(first == 0, 0.0, change)  # with adam_eps = 0, 0 / 0 is not formed
    return weights(flat - change), first, second
