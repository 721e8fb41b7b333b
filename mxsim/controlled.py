"""A run of the proxy under a precision controller (control.py): the loop that does what it says.

A state that is rolled back to gives weights and moments back, not time: its batches are not seen
again, the step goes on counting, and the steps that were lost are lost from the run's budget.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.changes import (
    Snapshot,
    restore_state,
    round_masters,
    snapshot_from,
    snapshot_of,
    switch_scheme,
)
from mxsim.checkpoint import parts_of, training_of
from mxsim.config import ProxyConfig, check_config
from mxsim.control import DERIVED, Controller, Policy
from mxsim.data import held_out, make_teacher
from mxsim.formats import choose
from mxsim.gemm_cost import step_cost
from mxsim.interventions import INTERVENTIONS
from mxsim.layout import as_integer
from mxsim.outcome import DivergenceRule
from mxsim.precision import PrecisionScheme
from mxsim.proxy import evaluate
from mxsim.signals import SIGNALS, Meter
from mxsim.store import DamagedResult, Record, provenance, read_whole, result_id, write_whole
from mxsim.threads import one_blas_thread
from mxsim.train import start

Array = NDArray[Any]
Ladder = tuple[tuple[str, PrecisionScheme], ...]

RUNGS = ("rceil", "ln_exact", "bf16_activations", "exact_backward", "full_precision")


def precision_ladder(base: PrecisionScheme) -> Ladder:
    """From ``base`` to exact, each rung the one below and one intervention of RUNGS more.

    An intervention without effect on the rung below is left out.
    """
    rungs: list[tuple[str, PrecisionScheme]] = [("base", base)]
    for name in RUNGS:
        change = INTERVENTIONS[name].change(0, rungs[-1][1]).scheme
        if change is not None and change != rungs[-1][1]:
            rungs.append((name, change))
    return tuple(rungs)


@dataclass(frozen=True)
class ControlledRun:
    """A run under a policy; a task of sweep.py.

    ladder: the scheme of each rung of ``policy.ladder``, in its order.  probe_every: steps between
    same-point probes, None for none; margin: with the margin to the edge, too (signals.py).
    exact_until: steps of exact training first, which the controller sees and cannot change (its
    warm-up should be as long).
    Raises ValueError if the names of ladder and policy differ.
    """

    config: ProxyConfig
    ladder: Ladder
    policy: Policy
    probe_every: int | None = None
    margin: bool = False
    exact_until: int = 0
    rule: DivergenceRule = DivergenceRule()  # noqa: RUF009  (frozen)

    def __post_init__(self) -> None:
        check_config(self.config)
        names = tuple(name for name, _ in self.ladder)
        if names != self.policy.ladder:
            raise ValueError(
                f"ladder must have the policy's rungs {self.policy.ladder}; got {names}"
            )

        every = self.probe_every
        if every is not None and as_integer("probe_every", every, "an integer or None") < 1:
            raise ValueError(f"probe_every must be at least 1; got {every}")
        if not 0 <= as_integer("exact_until", self.exact_until, "an integer") <= self.policy.warmup:
            raise ValueError(
                f"exact_until must be from 0 to the policy's warmup ({self.policy.warmup}); got "
                f"{self.exact_until}"
            )
        measured = [*DERIVED, *SIGNALS[:3]] + ["zeta", "cos"] * bool(every)
        measured += ["margin"] * bool(every and self.margin)
        for trigger in self.policy.triggers:
            choose("signal of a trigger", trigger.signal, tuple(measured))

    @cached_property
    def id(self) -> str:
        return result_id(self)

    @property
    def words(self) -> str:
        return f"controlled, lr {self.config.lr:g}, seed {self.config.seed}"

    def settings(self) -> dict[str, Any]:
        """What determines the run, as plain JSON data."""
        return {
            "config": asdict(self.config),
            "ladder": [[name, asdict(scheme)] for name, scheme in self.ladder],
            "policy": asdict(self.policy),
            "probe_every": self.probe_every,
            "margin": self.margin,
            "exact_until": self.exact_until,
            "rule": asdict(self.rule),
        }

    def run(self) -> Record:
        """Arrays: losses, grad_norms, rungs, DERIVED and SIGNALS (steps,), NaN where not measured.

        ``rungs`` is -1 where the controller had no say, and after the end.

        Metadata: the controller's log; ``cost`` in bf16 steps, probes included, and ``probe_cost``
        of it; ``eval_loss`` under the last rung, ``eval_exact`` of the same weights without any
        quantization.
        """
        controlled = Controlled(self)
        controlled.advance()
        return controlled.record()


class Controlled:
    """A ControlledRun in progress: ``advance`` it, ``save`` it, make its ``record``."""

    def __init__(self, task: ControlledRun) -> None:
        self.task = task
        self.schemes = dict(task.ladder)
        self.controller = Controller(task.policy)
        self.training = start(task.config, self._scheme(0), rule=task.rule)
        steps = task.config.steps
        self.rungs = np.full(steps, -1, np.int8)
        self.series = {name: np.full(steps, np.nan) for name in (*DERIVED, *SIGNALS)}
        self.kept: dict[int, Snapshot] = {}
        self.cost = 0.0
        self.meter = Meter(self.training, task.probe_every, task.margin)

    def advance(self, steps: int | None = None) -> Controlled:
        """Do ``steps`` more steps, by default all; returns self."""
        training = self.training
        if steps is not None and as_integer("steps", steps, "an integer") < 0:
            raise ValueError(f"steps must be at least 0; got {steps}")
        stop = training.config.steps if steps is None else training.step + steps
        with one_blas_thread(), np.errstate(all="ignore"):
            while not training.ended and training.step < stop:
                self._step()
        return self

    def _step(self) -> None:
        """One step, what the controller says to it, and doing that."""
        training, controller = self.training, self.controller
        step = training.step
        if step >= self.task.exact_until:
            self.rungs[step] = self.task.policy.ladder.index(controller.rung)
        training.advance(1, on_gradient=self.meter.on_gradient)
        signals = self.meter.signals()
        self.cost += step_cost(training.scheme, training.config)
        loss, norm = training.losses[step], training.grad_norms[step]
        if training.bad_step is not None:
            loss = norm = math.nan
        decision = controller.observe(step, float(loss), float(norm), **signals)
        for name, value in controller.seen.items():
            self.series[name][step] = value
        if decision.save:
            self.kept[step] = snapshot_of(training)
        if decision.restore is not None:
            self._go_back(decision.restore)
        for old in set(self.kept) - set(decision.kept):
            del self.kept[old]
        switch_scheme(training, self._scheme(training.step))

    def _scheme(self, step: int) -> PrecisionScheme:
        return (
            PrecisionScheme()
            if step < self.task.exact_until
            else self.schemes[self.controller.rung]
        )

    def _go_back(self, number: int) -> None:
        training = self.training
        if training.bad_step is not None:  # that step was not taken; its batch is passed over
            training.losses[training.step] = training.grad_norms[training.step] = np.inf
            training.bad_step = training.bad_tensor = None
            training.step += 1
            training.optimizer.updates += 1
        restore_state(training, self.kept[number])
        round_masters(training)

    def record(self) -> Record:
        """The record of the ended run; ValueError while steps are left."""
        task, run = self.task, self.training.finish()
        with np.errstate(all="ignore"), one_blas_thread():
            x, y = held_out(task.config, make_teacher(task.config, run.scheme))
            exact = evaluate(run.params, x, y, task.config, PrecisionScheme())
        arrays: dict[str, Array] = {"losses": run.losses, "grad_norms": run.grad_norms}
        arrays |= self.series
        with np.errstate(over="ignore"):  # a loss beyond float32 is stored as Inf
            arrays = {name: np.asarray(a, np.float32) for name, a in arrays.items()}
        meta = {
            **task.settings(),
            "versions": dict(provenance()),
            **asdict(run.outcome),
            "eval_loss": run.eval_loss,
            "eval_exact": exact,
            "log": self.controller.state()["log"],
            "cost": self.cost + self.meter.cost,
            "probe_cost": self.meter.cost,
            "seconds": run.seconds,
        }
        return Record(task.id, arrays | {"rungs": self.rungs}, meta)

    # ------------------------------------------------------------ saved and taken up again

    def save(self, path: Path | str) -> Path:
        """Write all of it to ``path``, whole or not at all; raises OSError."""
        arrays, meta = parts_of(self.training)
        arrays |= {f"signal_{name}": values for name, values in self.series.items()}
        arrays |= {"rungs": self.rungs, "previous": self.meter.previous}
        for number, snapshot in self.kept.items():
            arrays |= snapshot.arrays(f"kept_{number}")
        controlled = {
            "task": self.task.id,
            "controller": self.controller.state(),
            "kept": list(self.kept),
            "cost": self.cost,
            "probe_cost": self.meter.cost,
        }
        return write_whole(Path(path), arrays, {**meta, "controlled": controlled}, compress=False)

    @classmethod
    def load(cls, task: ControlledRun, path: Path | str) -> Controlled:
        """Go on with ``task`` from what ``save`` wrote.

        Raises OSError, DamagedResult if the file is not whole, ValueError if it is of another task.
        """
        where = Path(path)
        arrays, meta = read_whole(where)
        extra: Mapping[str, Any] = meta.get("controlled", {})
        if extra.get("task") != task.id:
            raise ValueError(f"{where} is not of this run; got {extra.get('task')}, not {task.id}")
        self = cls(task)
        try:
            self.training = training_of(arrays, meta, where)
            self.controller = Controller(task.policy, extra["controller"])
            self.meter = Meter(self.training, task.probe_every, task.margin)
            self.meter.previous[...] = arrays["previous"]
            self.meter.cost, self.cost = float(extra["probe_cost"]), float(extra["cost"])
            self.rungs[...] = arrays["rungs"]
            for name, values in self.series.items():
                values[...] = arrays[f"signal_{name}"]
            for number in extra["kept"]:
                self.kept[number] = snapshot_from(arrays, f"kept_{number}", number + 1)
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedResult(f"{where} is not a whole checkpoint ({error})") from error
        return self


def uncontrolled(task: ControlledRun, rung: int) -> ControlledRun:
    """The same run held at one rung: what is watched is watched, nothing is done."""
    name, scheme = task.ladder[rung]
    return replace(task, ladder=((name, scheme),), policy=Policy((name,)))
