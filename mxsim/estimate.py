"""How long a run will take, from a few of its own steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from mxsim import data
from mxsim.bias import Probe, ProbePlan, blank_series
from mxsim.config import ProxyConfig
from mxsim.precision import PrecisionScheme
from mxsim.proxy import evaluate
from mxsim.threads import one_blas_thread
from mxsim.train import start

STEPS = 5  # timed, after two to warm up


@dataclass(frozen=True)
class Cost:
    """Seconds of one step, of one probe, of the held-out evaluation, and of the whole run."""

    step: float
    probe: float
    evaluation: float
    total: float


def cost_of(cfg: ProxyConfig, scheme: PrecisionScheme, probe: ProbePlan | None = None) -> Cost:
    """Time a few steps (the best of them: other work only adds) and scale up.

    Compiles what is not compiled yet, so it can take seconds where a run takes hours.
    """
    with one_blas_thread(), np.errstate(all="ignore"):  # as in a run
        return _cost_of(cfg, scheme, probe)


def _cost_of(cfg: ProxyConfig, scheme: PrecisionScheme, probe: ProbePlan | None) -> Cost:
    few = replace(cfg, steps=STEPS + 2)
    training = start(few, scheme).advance(2)
    step = min(_seconds(lambda: training.advance(1)) for _ in range(STEPS))
    samples = min(cfg.eval_samples, 2 * cfg.batch)
    teacher = data.make_teacher(cfg, scheme)
    x, y = data.held_out(replace(cfg, eval_samples=samples), teacher)
    evaluation = min(
        _seconds(lambda: evaluate(training.params, x, y, cfg, scheme)) for _ in range(2)
    )
    evaluation *= cfg.eval_samples / samples
    each, probes = 0.0, 0
    if probe is not None:
        prober = Probe(probe, few, blank_series(probe, few))
        batch = data.make_batches(cfg, teacher).at(0)
        each = min(_seconds(lambda: prober(0, training.params, *batch)) for _ in range(2))
        probes = -(-cfg.steps // probe.every)
    return Cost(step, each, evaluation, cfg.steps * step + probes * each + evaluation)


def _seconds(function: Callable[[], object]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def in_words(seconds: float) -> str:
    """A duration for people: 42 s, 3.5 min, 2.1 h."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
