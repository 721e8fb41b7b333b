"""One training run: student, teacher and data of a ProxyConfig under a PrecisionScheme.

A run is a pure function of its arguments; divergence and NaN are results (outcome.py), not
exceptions.
"""

from __future__ import annotations

import math
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim import data
from mxsim.bias import Probe, ProbePlan, ProbeSeries, blank_series
from mxsim.config import ProxyConfig, check_config
from mxsim.layout import as_integer
from mxsim.ops import round_in_place, squared_norm
from mxsim.optim import OptimizerState, clip_gradient, optimizer_state, optimizer_step
from mxsim.outcome import DivergenceRule, Outcome, Spike, Status, judge
from mxsim.precision import PrecisionScheme, at_step, internal_rounding, precision_of
from mxsim.proxy import (
    KINDS,
    Params,
    Workspace,
    evaluate,
    loss_and_grads_into,
    parameter_count,
    parameter_shapes,
    parameter_views,
    workspace,
)
from mxsim.threads import Dot, dot, one_blas_thread, same_bits, threaded_dot

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
    probe_seconds: float  # of them, what the probes took

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


@dataclass(eq=False)
class Training:
    """A run in progress, between two steps: advance it, save it (checkpoint.py), go on, finish it.

    All that determines what follows is here; data and random bits are functions of (seed, step).
    ``step`` is the number of steps done; ``bad_step`` is set where it met a NaN or Inf and stopped.
    """

    config: ProxyConfig
    scheme: PrecisionScheme
    rule: DivergenceRule
    probe: ProbePlan | None
    flat: Array  # all weights, (size,)
    optimizer: OptimizerState
    losses: Array
    grad_norms: Array
    probes: ProbeSeries | None
    step: int = 0
    bad_step: int | None = None
    bad_tensor: str | None = None
    seconds: float = 0.0
    probe_seconds: float = 0.0
    threads: int = 1  # of this process; the bits are the same for any number

    @property
    def params(self) -> Params:
        """The weights as blocks, views into ``flat``."""
        return parameter_views(self.flat, self.config)

    @property
    def ended(self) -> bool:
        """Whether there is nothing left to do but ``finish``."""
        return self.step >= self.config.steps or self.bad_step is not None

    @cached_property
    def _bench(self) -> Bench:
        return Bench(self)

    def batch_at(self, step: int) -> tuple[Array, Array]:
        """The batch (n, width) of inputs and targets that ``step`` trains on, in new arrays."""
        return self._bench.batches.at(step)

    def reconfigure(self, cfg: ProxyConfig, scheme: PrecisionScheme) -> None:
        """Go on from here under other settings (changes.py), of the same model and data."""
        self.config, self.scheme = cfg, scheme
        self.__dict__.pop("_bench", None)  # made of the settings: to be made again

    @property
    def _batches(self) -> data.Batches:
        return self._bench.batches

    def _evaluate(self, x: Array, y: Array) -> float:
        """The loss on a sample of the weights as they are."""
        cfg = self.config
        return evaluate(self.params, x, y, cfg, self.scheme, cfg.steps)

    @property
    def last_gradient(self) -> Array:
        """The flat gradient (size,) of the step done last; a buffer of the next one."""
        return self._bench.flat_grads

    def advance(
        self,
        steps: int | None = None,
        on_step: Callable[[int, float], None] | None = None,
        on_gradient: Callable[[int, Array], None] | None = None,
    ) -> Training:
        """Do ``steps`` more steps, by default all that are left; stops early at a NaN or Inf.

        on_step: called with (step, loss) after each step.  on_gradient: called with (step, flat
        gradient) before the optimizer sees it, and may change it in place.  Returns self.  An
        exception, Ctrl-C included, leaves the state as it was after the last whole step.
        Raises ValueError for a negative number of steps.
        """
        count = self.config.steps if steps is None else as_integer("steps", steps, "an integer")
        if count < 0:
            raise ValueError(f"steps must be at least 0; got {count}")
        stop = min(self.step + count, self.config.steps)
        cfg, bench = self.config, self._bench
        params = bench.params
        started, before = time.perf_counter(), self.seconds
        with one_blas_thread(), np.errstate(all="ignore"):
            while self.step < stop and self.bad_step is None:
                x, y = bench.batches.fill(self.step, bench.sample)
                if bench.prober:
                    probing = time.perf_counter()
                    bench.prober(self.step, params, x, y)
                    self.probe_seconds += time.perf_counter() - probing
                loss = bench.loss(params, x, y, self.step)
                if on_gradient:
                    on_gradient(self.step, bench.flat_grads)
                norm = math.sqrt(squared_norm(bench.flat_grads))
                self.losses[self.step], self.grad_norms[self.step] = loss, norm
                if not (math.isfinite(loss) and math.isfinite(norm)):
                    self.bad_tensor = first_nonfinite(params, x, y, cfg, bench.ws, bench.grads)
                    if self.bad_tensor is not None:
                        self.bad_step = self.step
                        break
                clip_gradient(bench.flat_grads, norm, cfg)
                with uninterrupted():
                    optimizer_step(self.flat, bench.flat_grads, self.optimizer, cfg, self.scheme)
                    self.step += 1
                    self.seconds = before + time.perf_counter() - started
                if on_step:
                    on_step(self.step - 1, loss)
        return self

    def finish(self) -> Run:
        """Evaluate on the held-out set and judge; ValueError while steps are left."""
        if not self.ended:
            raise ValueError(
                f"the run must have ended; {self.step} of {self.config.steps} steps are done"
            )
        cfg, params = self.config, self.params
        bad_step, bad_tensor = self.bad_step, self.bad_tensor
        started = time.perf_counter()
        with one_blas_thread(), np.errstate(all="ignore"):
            x, y = data.held_out(cfg, self._batches.teacher)
            eval_loss = self._evaluate(x, y)
            if bad_step is None and not math.isfinite(eval_loss):  # the last update's doing
                bad_step = cfg.steps - 1
                bad_tensor = first_nonfinite_parameter(params) or "held-out loss"
            zero_loss = float(np.mean(np.square(y), dtype=np.float64))
            input_power = float(np.mean(np.square(x), dtype=np.float64))
        trivial_loss = max(zero_loss, input_power)
        return Run(
            config=cfg,
            scheme=self.scheme,
            rule=self.rule,
            losses=self.losses,
            grad_norms=self.grad_norms,
            outcome=judge(self.losses, eval_loss, trivial_loss, self.rule, bad_step, bad_tensor),
            eval_loss=eval_loss,
            zero_loss=zero_loss,
            input_power=input_power,
            probes=self.probes,
            params=params,
            seconds=self.seconds + time.perf_counter() - started,
            probe_seconds=self.probe_seconds,
        )


class Bench:
    """What a run in progress works with and can make again: data, buffers, prepared rounding."""

    def __init__(self, run: Training) -> None:
        self.cfg = cfg = run.config
        self.precision = precision_of(run.scheme, cfg.depth, cfg.seed)
        self.prober = Probe(run.probe, cfg, run.probes) if run.probe and run.probes else None
        with one_blas_thread(), np.errstate(all="ignore"):
            self.batches = data.make_batches(cfg, data.make_teacher(cfg, run.scheme))
        self.ws = workspace(cfg, cfg.batch, cfg.real, _dot_on(run.threads, cfg))
        self.sample = data.sample_buffers(cfg, cfg.batch, self.batches.teacher)
        self.flat_grads = np.empty(parameter_count(cfg), cfg.real)
        self.grads = parameter_views(self.flat_grads, cfg)
        self.params = parameter_views(run.flat, cfg)

    def loss(self, params: Params, x: Array, y: Array, step: int) -> float:
        """The loss; its gradient is in ``grads``, which are views into ``flat_grads``."""
        precision = at_step(self.precision, step)
        return loss_and_grads_into(params, x, y, self.cfg, precision, self.ws, self.grads)


def _dot_on(threads: int, cfg: ProxyConfig) -> Dot:
    """GEMMs on ``threads`` threads; on one, with a warning, where BLAS would give other bits."""
    if threads == 1:
        return dot
    parallel = threaded_dot(threads)
    n, d = cfg.batch, cfg.width
    wide = {parameter_shapes(cfg)["w1"][0], cfg.hidden}  # fc1's and fc2's, not the same in SwiGLU
    shapes = [each for h in wide for each in ((n, d, h), (n, h, d), (d, n, h), (h, n, d))]
    with one_blas_thread():
        if same_bits(parallel, shapes, cfg.real):
            return parallel
    warnings.warn(
        f"this BLAS gives other bits when a GEMM is cut for {threads} threads: running on one",
        RuntimeWarning,
        stacklevel=4,
    )
    return dot


def start(
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    *,
    probe: ProbePlan | None = None,
    rule: DivergenceRule | None = None,
    threads: int = 1,
) -> Training:
    """A run before its first step: initial weights (rounded if the scheme's masters are bf16).

    threads: how many do a step's large GEMMs (pays from width 256 on); no bit depends on it.
    """
    check_config(cfg)
    if as_integer("threads", threads, "an integer of at least 1") < 1:
        raise ValueError(f"threads must be at least 1; got {threads}")
    precision_of(scheme, cfg.depth)  # refuses what does not fit
    size = parameter_count(cfg)
    flat = np.empty(size, cfg.real)
    for block, initial in zip(parameter_views(flat, cfg), data.init_params(cfg), strict=True):
        for kind in KINDS:
            block[kind][...] = initial[kind]
    if scheme.master_weights == "bf16":
        round_in_place(flat, "bf16", internal_rounding(scheme, flat.dtype))
    return Training(
        config=cfg,
        scheme=scheme,
        rule=rule or DivergenceRule(),
        probe=probe,
        flat=flat,
        optimizer=optimizer_state(cfg, size),
        losses=np.full(cfg.steps, np.nan),
        grad_norms=np.full(cfg.steps, np.nan),
        probes=blank_series(probe, cfg) if probe else None,
        threads=threads,
    )


def train(
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    *,
    probe: ProbePlan | None = None,
    rule: DivergenceRule | None = None,
    on_step: Callable[[int, float], None] | None = None,
    threads: int = 1,
) -> Run:
    """Train a student from its initial weights for ``cfg.steps`` steps.

    probe: same-point gradient comparisons along the way; they do not change the run.
    on_step: called with (step, loss) after each step.
    threads: as for ``start``.
    A run that meets a NaN or Inf stops there with status ``nonfinite``; its parameters are those
    before the step that failed.  Same arguments, same bits, whatever the number of threads, and
    whether in one go or stopped, saved and taken up again (``start``, checkpoint.py).
    """
    training = start(cfg, scheme, probe=probe, rule=rule, threads=threads)
    return training.advance(on_step=on_step).finish()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep Ctrl-C back until the block is done: it must not leave half an update behind."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []
    handler = signal.signal(signal.SIGINT, lambda *arguments: caught.append(arguments))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught and callable(handler):
            handler(*caught[0])


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
