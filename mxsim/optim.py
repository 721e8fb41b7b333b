"""Optimizers and learning-rate schedules, by PyTorch's formulas.

Each update is one fused pass over the flat vector of all weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.config import ProxyConfig
from mxsim.jit import kernel
from mxsim.precision import PrecisionScheme, internal_rounding
from mxsim.rounding import NOT_AT_ALL, rounded_by

Array = NDArray[Any]


@dataclass
class OptimizerState:
    """Moments over the flat parameter vector (size,), and the number of updates made.

    adam, adamw: ``first`` and ``second`` moments; sgd: ``first`` is the momentum buffer, ``second``
    empty.
    """

    first: Array
    second: Array
    updates: int = 0


def optimizer_state(cfg: ProxyConfig, size: int) -> OptimizerState:
    """The state before the first update: zeros."""
    second = 0 if cfg.optimizer == "sgd" else size
    return OptimizerState(np.zeros(size, cfg.real), np.zeros(second, cfg.real))


def learning_rate(cfg: ProxyConfig, step: int) -> float:
    """The rate of update number ``step`` (from 0)."""
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    step -= cfg.warmup
    if cfg.schedule == "constant":
        return cfg.lr
    if cfg.schedule == "step":
        assert cfg.decay_every is not None
        try:
            return cfg.lr * cfg.decay_factor ** (step // cfg.decay_every)
        except OverflowError:  # a factor above 1, for long: the run ends as nonfinite
            return math.inf
    angle = math.pi * step / (cfg.steps - cfg.warmup)
    return cfg.lr_min + (cfg.lr - cfg.lr_min) * 0.5 * (1 + math.cos(angle))


def clip_gradient(grads: Array, norm: float, cfg: ProxyConfig) -> None:
    """Scale ``grads`` (size,), of norm ``norm``, to at most cfg.grad_clip (clip_grad_norm_)."""
    if cfg.grad_clip is not None:
        factor = cfg.grad_clip / (norm + 1e-6)
        if factor < 1:
            grads *= grads.dtype.type(factor)


def optimizer_step(
    flat: Array,
    grads: Array,
    state: OptimizerState,
    cfg: ProxyConfig,
    scheme: PrecisionScheme | None = None,
) -> None:
    """Update ``flat`` (size,) and ``state`` in place from the gradient ``grads`` (size,).

    Moments that ``scheme`` keeps in bf16 are rounded when they are updated, before the weights
    use them, as tensors of that type would be; weights after their update.
    """
    real = flat.dtype.type
    moments, weights = _state_rounding(scheme or PrecisionScheme(), flat.dtype)
    lr = learning_rate(cfg, state.updates)
    state.updates += 1
    if cfg.optimizer != "sgd":
        if cfg.weight_decay:
            flat *= real(1 - lr * cfg.weight_decay)
        correction1 = 1 - cfg.beta1**state.updates
        correction2 = math.sqrt(1 - cfg.beta2**state.updates)
        adam_update(
            flat,
            grads,
            state.first,
            state.second,
            real(cfg.beta1),
            real(1 - cfg.beta1),
            real(cfg.beta2),
            real(1 - cfg.beta2),
            real(lr / correction1),
            real(correction2),
            real(cfg.adam_eps),
            moments,
            weights,
        )
    else:
        momentum = real(cfg.momentum)
        sgd_update(flat, grads, state.first, momentum, real(lr), moments, weights)


def _state_rounding(
    scheme: PrecisionScheme, dtype: np.dtype[Any]
) -> tuple[tuple[int, Any], tuple[int, Any]]:
    """How moments and master weights are rounded: see rounding.rounded_by."""
    mode, spec = internal_rounding(scheme, dtype)
    return (
        (mode if scheme.moments == "bf16" else NOT_AT_ALL, spec),
        (mode if scheme.master_weights == "bf16" else NOT_AT_ALL, spec),
    )


@kernel
def adam_update(
    p: Any,
    g: Any,
    m: Any,
    v: Any,
    beta1: Any,
    rest1: Any,
    beta2: Any,
    rest2: Any,
    rate: Any,
    correction2: Any,
    eps: Any,
    moments: Any,
    weights: Any,
) -> None:
    """p -= rate * m / (sqrt(v) / correction2 + eps), all (size,); rate is lr / (1 - beta1^t).

    Kingma and Ba (2015), with eps outside the bias-corrected root as PyTorch has it.  With a zero
    gradient from the start, eps keeps the quotient 0 / eps = 0; with eps = 0 it is not formed.
    ``moments`` and ``weights`` are their roundings (rounding.rounded_by).
    """
    zero = p.dtype.type(0)
    if moments[0] < 0 and weights[0] < 0:  # kept apart: vectorizes at full speed
        for i in range(p.size):
            m[i] = beta1 * m[i] + rest1 * g[i]
            v[i] = beta2 * v[i] + rest2 * (g[i] * g[i])
            denominator = np.sqrt(v[i]) / correction2 + eps
            p[i] -= zero if m[i] == zero else rate * m[i] / denominator
        return
    for i in range(p.size):
        m[i] = rounded_by(beta1 * m[i] + rest1 * g[i], moments)
        v[i] = rounded_by(beta2 * v[i] + rest2 * (g[i] * g[i]), moments)
        denominator = np.sqrt(v[i]) / correction2 + eps
        change = zero if m[i] == zero else rate * m[i] / denominator
        p[i] = rounded_by(p[i] - change, weights)


@kernel
def sgd_update(
    p: Any, g: Any, m: Any, momentum: Any, rate: Any, moments: Any, weights: Any
) -> None:
    """m = momentum * m + g; p -= rate * m (heavy ball, PyTorch's form), all (size,)."""
    for i in range(p.size):
        m[i] = rounded_by(momentum * m[i] + g[i], moments)
        p[i] = rounded_by(p[i] - rate * m[i], weights)
