"""One training run: student, teacher and data of a ProxyConfig under a PrecisionScheme.

A run is a pure function of its arguments; divergence and NaN are results (outcome.py), not
exceptions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from mxsim import data
from mxsim.bias import Probe, ProbePlan, ProbeSeries
from mxsim.config import ProxyConfig, check_config
from mxsim.ops import squared_norm
from mxsim.optim import optimizer_state, optimizer_step
from mxsim.outcome import DivergenceRule, Outcome, Spike, Status, judge
from mxsim.precision import PrecisionScheme, rounders
from mxsim.proxy import (
    KINDS,
    Params,
    Workspace,
    evaluate,
    loss_and_grads_into,
    parameter_count,
    parameter_views,
    workspace,
)

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.  Series have one entry a step, NaN where a non-finite run stopped before.

    losses, grad_norms: (steps,), of the scheme's own forward and gradient, before the update.
    eval_loss: held-out mean squared error after the last step, under the scheme.
    zero_loss, input_power: mean(y^2) and mean(x^2) of the same set, the loss of predicting zero and
    that of leaving the residual stream as it is; eval_loss is judged against the larger.
    """

    config: ProxyConfig
    scheme: PrecisionScheme
    rule: DivergenceRule
    losses: Array
    grad_norms: Array
    outcome: Outcome
    eval_loss: float
    zero_loss: float
    input_power: float
    probes: ProbeSeries | None
    params: Params
    seconds: float

    @property
    def status(self) -> Status:
        """``ok``, ``diverged`` or ``nonfinite``."""
        return self.outcome.status

    @property
    def first_bad_step(self) -> int | None:
        return self.outcome.first_bad_step

    @property
    def first_bad_tensor(self) -> str | None:
        return self.outcome.first_bad_tensor

    @property
    def spikes(self) -> tuple[Spike, ...]:
        return self.outcome.spikes


def train(
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    *,
    probe: ProbePlan | None = None,
    rule: DivergenceRule | None = None,
    on_step: Callable[[int, float], None] | None = None,
) -> Run:
    """Train a student from its initial weights for ``cfg.steps`` steps.

    probe: same-point gradient comparisons along the way; they do not change the run.
    on_step: called with (step, loss) after each step.
    A run that meets a NaN or Inf stops there with status ``nonfinite``; its parameters are those
    before the step that failed.  Same arguments, same bits, whatever the number of threads.
    """
    check_config(cfg)
    sites = rounders(scheme, cfg.depth)
    started = time.perf_counter()
    rule = rule or DivergenceRule()
    with threadpool_limits(1, "blas"), np.errstate(all="ignore"):
        teacher = data.make_teacher(cfg)
        batches = data.make_batches(cfg, teacher)
        size = parameter_count(cfg)
        flat, flat_grads = np.empty(size, cfg.real), np.empty(size, cfg.real)
        params, grads = parameter_views(flat, cfg), parameter_views(flat_grads, cfg)
        for block, initial in zip(params, data.init_params(cfg), strict=True):
            for kind in KINDS:
                block[kind][...] = initial[kind]
        state = optimizer_state(cfg, size)
        ws = workspace(cfg, cfg.batch, cfg.real)
        prober = Probe(probe, cfg) if probe else None

        losses, grad_norms = np.full(cfg.steps, np.nan), np.full(cfg.steps, np.nan)
        bad_step: int | None = None
        bad_tensor: str | None = None
        for step in range(cfg.steps):
            x, y = batches.at(step)
            if prober:
                prober(step, params, x, y)
            losses[step] = loss_and_grads_into(params, x, y, cfg, sites, ws, grads)
            grad_norms[step] = math.sqrt(squared_norm(flat_grads))
            if not (math.isfinite(losses[step]) and math.isfinite(grad_norms[step])):
                bad_tensor = first_nonfinite(params, x, y, cfg, ws, grads)
                if bad_tensor is not None:
                    bad_step = step
                    break
            optimizer_step(flat, flat_grads, state, cfg)
            if on_step:
                on_step(step, float(losses[step]))

        x, y = data.held_out(cfg, teacher)
        eval_loss = evaluate(params, x, y, cfg, scheme)
        if bad_step is None and not math.isfinite(eval_loss):  # the last update's doing
            bad_step = cfg.steps - 1
            bad_tensor = first_nonfinite_parameter(params) or "held-out loss"
        zero_loss = float(np.mean(np.square(y), dtype=np.float64))
        input_power = float(np.mean(np.square(x), dtype=np.float64))
        trivial_loss = max(zero_loss, input_power)
    return Run(
        config=cfg,
        scheme=scheme,
        rule=rule,
        losses=losses,
        grad_norms=grad_norms,
        outcome=judge(losses, eval_loss, trivial_loss, rule, bad_step, bad_tensor),
        eval_loss=eval_loss,
        zero_loss=zero_loss,
        input_power=input_power,
        probes=prober.series if prober else None,
        params=params,
        seconds=time.perf_counter() - started,
    )


def first_nonfinite_parameter(params: Params) -> str | None:
    """Name of the first parameter, by block, that holds a NaN or Inf; else None."""
    named = ((f"block {k} {kind}", b[kind]) for k, b in enumerate(params) for kind in KINDS)
    return next((name for name, values in named if not np.isfinite(values).all()), None)


def first_nonfinite(
    params: Params, x: Array, y: Array, cfg: ProxyConfig, ws: Workspace, grads: Params
) -> str | None:
    """Name of the first tensor, in the order of computation, that holds a NaN or Inf; else None.

    Called after loss_and_grads_into, whose buffers it reads.
    """
    parameter = first_nonfinite_parameter(params)
    if parameter is not None:
        return parameter
    tensors: list[tuple[str, Array]] = [("x", x), ("y", y)]
    for k, state in enumerate(ws.blocks):
        tensors += [
            (f"block {k} layer-norm output", state.z),
            (f"block {k} hidden", state.hidden),
        ]
    tensors.append(("prediction", ws.stream))
    tensors.append(("loss", np.asarray(np.mean(np.square(ws.stream - y, dtype=np.float64)))))
    for k in reversed(range(cfg.depth)):
        order = ("b2", "w2", "w1", "ln_gamma", "ln_beta")  # as backward computes them
        tensors += [(f"block {k} gradient of {kind}", grads[k][kind]) for kind in order]
    return next((name for name, values in tensors if not np.isfinite(values).all()), None)
