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

Array = NDArray[Any]


@dataclass
class OptimizerState:
    """Moments over the flat parameter vector (size,), and the number of updates made.

    adam: ``first`` and ``second`` moments; sgd: ``first`` is the momentum buffer, ``second`` empty.
    """

    first: Array
    second: Array
    updates: int = 0


def optimizer_state(cfg: ProxyConfig, size: int) -> OptimizerState:
    """The state before the first update: zeros."""
    second = size if cfg.optimizer == "adam" else 0
    return OptimizerState(np.zeros(size, cfg.real), np.zeros(second, cfg.real))


def learning_rate(cfg: ProxyConfig, step: int) -> float:
    """The rate of update number ``step`` (from 0)."""
    if cfg.schedule == "constant":
        return cfg.lr
    return cfg.lr_min + (cfg.lr - cfg.lr_min) * 0.5 * (1 + math.cos(math.pi * step / cfg.steps))


def optimizer_step(flat: Array, grads: Array, state: OptimizerState, cfg: ProxyConfig) -> None:
    """Update ``flat`` (size,) and ``state`` in place from the gradient ``grads`` (size,)."""
    real = flat.dtype.type
    lr = learning_rate(cfg, state.updates)
    state.updates += 1
    if cfg.optimizer == "adam":
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
        )
    else:
        sgd_update(flat, grads, state.first, real(cfg.momentum), real(lr))


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
) -> None:
    """p -= rate * m / (sqrt(v) / correction2 + eps), all (size,); rate is lr / (1 - beta1^t).

    Kingma and Ba (2015), with eps outside the bias-corrected root as PyTorch has it.  With a zero
    gradient from the start, eps keeps the quotient 0 / eps = 0; with eps = 0 it is not formed.
    """
    zero = p.dtype.type(0)
    for i in range(p.size):
        m[i] = beta1 * m[i] + rest1 * g[i]
        v[i] = beta2 * v[i] + rest2 * (g[i] * g[i])
        denominator = np.sqrt(v[i]) / correction2 + eps
        p[i] -= zero if m[i] == zero else rate * m[i] / denominator


@kernel
def sgd_update(p: Any, g: Any, m: Any, momentum: Any, rate: Any) -> None:
    """m = momentum * m + g; p -= rate * m (heavy ball, PyTorch's form), all (size,)."""
    for i in range(p.size):
        m[i] = momentum * m[i] + g[i]
        p[i] -= rate * m[i]
