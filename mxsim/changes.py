"""Changes in the middle of a run: another scheme, another rate, a nudge of one unit in last place.

The paper's remedy is such a change (Su et al. 2025, arXiv:2506.20752, section on in-situ
interventions): from a checkpoint, same data, same optimizer state, other precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.config import ProxyConfig, check_config
from mxsim.layout import as_integer
from mxsim.ops import round_in_place
from mxsim.outcome import DivergenceRule
from mxsim.precision import PrecisionScheme, internal_rounding, precision_of
from mxsim.proxy import parameter_count
from mxsim.store import Record, provenance, result_id
from mxsim.train import Training, start

Array = NDArray[Any]


@dataclass(frozen=True)
class Change:
    """What happens to a run before its step ``step``; by default nothing.

    - scheme: the precision from here on; None keeps it.
    - lr_factor: the learning rate (and lr_min) from here on, times the present one.
    - nudge: seed of random signs by which every weight moves to the next number up or down (of the
      master weights' type), and nothing else: the placebo.

    Raises TypeError or ValueError naming the field, its value and what is allowed.
    """

    step: int
    scheme: PrecisionScheme | None = None
    lr_factor: float = 1.0
    nudge: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", as_integer("step", self.step, "an integer of at least 0"))
        if self.step < 0:
            raise ValueError(f"step must be at least 0; got {self.step}")
        if self.scheme is not None and not isinstance(self.scheme, PrecisionScheme):
            raise TypeError(f"scheme must be a PrecisionScheme or None; got {self.scheme!r}")
        factor = self.lr_factor
        if not isinstance(factor, (int, float, np.floating)) or not 0 < factor < math.inf:
            raise ValueError(f"lr_factor must be a finite number above 0; got {factor!r}")
        object.__setattr__(self, "lr_factor", float(factor))
        if self.nudge is not None:
            object.__setattr__(self, "nudge", as_integer("nudge", self.nudge, "an integer or None"))
            if self.nudge < 0:
                raise ValueError(f"nudge must be at least 0; got {self.nudge}")


def apply_change(training: Training, change: Change) -> None:
    """Change a run in progress, between two steps; weights, moments and data stay.

    (Inputs always; targets follow the scheme where it has ``quantized_teacher``.)  Raises
    ValueError unless the run stands before step ``change.step``, and if the scheme does not
    fit the model.
    """
    if training.step != change.step:
        raise ValueError(f"change is for step {change.step}; the run stands at {training.step}")
    if change.scheme is not None:
        switch_scheme(training, change.scheme)
    if change.lr_factor != 1:
        cfg = training.config
        lr, lr_min = cfg.lr * change.lr_factor, cfg.lr_min * change.lr_factor
        training.reconfigure(replace(cfg, lr=lr, lr_min=lr_min), training.scheme)
    if change.nudge is not None:
        nudge_weights(training, change.nudge)


def switch_scheme(training: Training, scheme: PrecisionScheme) -> None:
    """Go on under ``scheme``; weights are rounded where it keeps its master weights in bf16."""
    precision_of(scheme, training.config.depth)  # refuses what does not fit
    if scheme == training.scheme:
        return
    training.reconfigure(training.config, scheme)
    round_masters(training)


def round_masters(training: Training) -> None:
    """Round the weights where the scheme keeps its master weights in bf16."""
    if training.scheme.master_weights == "bf16":
        rounding = internal_rounding(training.scheme, training.flat.dtype)
        round_in_place(training.flat, "bf16", rounding)


def nudge_weights(training: Training, nudge: int) -> None:
    """Move every weight by one unit in the last place, up or down as (seed, step, nudge) say."""
    flat = training.flat
    key = (2**18, training.step, nudge)  # a stream that no data comes from
    rng = np.random.default_rng(np.random.SeedSequence(training.config.seed, spawn_key=key))
    up = rng.integers(0, 2, flat.size, dtype=np.int8).astype(bool)
    if training.scheme.master_weights == "bf16":
        # In bits: a float32's neighbour of the same sign is the next integer, of bf16, whose
        # numbers are float32's with 16 bits less, the next multiple of 2^16.
        moved = flat.astype(np.float32)
        bits: Array = moved.view(np.int32)
        zero = moved == 0
        bits += np.where(zero | (up == (moved > 0)), 2**16, -(2**16)).astype(np.int32)
        np.copyto(moved, np.where(up, np.abs(moved), -np.abs(moved)), where=zero)
        flat[...] = moved
    else:
        towards = np.where(up, flat.dtype.type(np.inf), flat.dtype.type(-np.inf))
        np.nextafter(flat, towards, out=flat)


# ---------------------------------------------------------------- the state between two steps


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights and moments (size,) of a run before ``step``, and its series up to there (step,)."""

    step: int
    weights: Array
    first: Array
    second: Array
    losses: Array
    grad_norms: Array

    def arrays(self, prefix: str) -> dict[str, Array]:
        """What a record keeps of it; the series are the record's own."""
        names = ("weights", "first", "second")
        return {f"{prefix}_{name}": getattr(self, name) for name in names}


NO_SERIES = np.empty(0)


def snapshot_from(
    arrays: Mapping[str, Array],
    prefix: str,
    step: int,
    losses: Array = NO_SERIES,
    grad_norms: Array = NO_SERIES,
) -> Snapshot:
    """The Snapshot whose ``arrays(prefix)`` are among these; KeyError if they are not."""
    weights, first, second = (arrays[f"{prefix}_{n}"] for n in ("weights", "first", "second"))
    return Snapshot(step, weights, first, second, losses, grad_norms)


def snapshot_of(training: Training) -> Snapshot:
    """A copy of the state of a run in progress."""
    step = training.step
    return Snapshot(
        step,
        training.flat.copy(),
        training.optimizer.first.copy(),
        training.optimizer.second.copy(),
        training.losses[:step].copy(),
        training.grad_norms[:step].copy(),
    )


def restore_state(training: Training, snapshot: Snapshot) -> None:
    """Put weights and moments back; the step, the series and the optimizer's clock stay."""
    training.flat[...] = snapshot.weights
    training.optimizer.first[...] = snapshot.first
    training.optimizer.second[...] = snapshot.second


def begin_at(training: Training, snapshot: Snapshot) -> None:
    """Bring a run that has not begun to where ``snapshot`` was taken."""
    restore_state(training, snapshot)
    training.step = training.optimizer.updates = snapshot.step
    training.losses[: snapshot.step] = snapshot.losses
    training.grad_norms[: snapshot.step] = snapshot.grad_norms


# ---------------------------------------------------------------- a run with changes, as a task


@dataclass(frozen=True)
class ChangedRun:
    """A run with ``changes`` in the order of their steps; a task of sweep.py.

    leads: how many steps before it diverges its state is kept (weights and moments, as
    ``lead_<n>_...`` of its record), if it diverges that late; costs a second run up to there.
    begin: the state to begin from, of the same run before its last changes.  It saves time and
    changes nothing else: no bit of the arrays or of the held-out loss, nor the id (but ratios of
    losses before it are of stored, float32 losses).
    Raises ValueError or TypeError naming what does not fit.
    """

    config: ProxyConfig
    scheme: PrecisionScheme
    changes: tuple[Change, ...] = ()
    rule: DivergenceRule = DivergenceRule()  # noqa: RUF009  (frozen)
    leads: tuple[int, ...] = ()
    begin: Snapshot | None = None

    def __post_init__(self) -> None:
        check_config(self.config)
        if not all(isinstance(change, Change) for change in self.changes):
            raise TypeError(f"changes must be Change objects; got {self.changes!r}")
        for lead in self.leads:
            if as_integer("leads", lead, "integers of at least 1") < 1:
                raise ValueError(f"leads must be at least 1; got {lead}")
        if self.begin is not None and self.begin.weights.shape != (parameter_count(self.config),):
            raise ValueError(
                f"begin must have {parameter_count(self.config)} weights; got "
                f"{self.begin.weights.shape}"
            )
        steps = [change.step for change in self.changes]
        if steps != sorted(steps) or (steps and steps[-1] >= self.config.steps):
            raise ValueError(
                f"changes must be in order, before step {self.config.steps}; got steps {steps}"
            )
        if self.begin is not None and self.leads:
            raise ValueError(
                f"leads must be empty for a run that begins in the middle (begin); got {self.leads}"
            )

    @cached_property
    def id(self) -> str:
        return result_id(replace(self, begin=None))

    @property
    def words(self) -> str:
        at = f", changed at {self.changes[-1].step}" if self.changes else ""
        return f"lr {self.config.lr:g}, seed {self.config.seed}{at}"

    def settings(self) -> dict[str, Any]:
        """What determines the run, as plain JSON data."""
        return {
            "config": asdict(self.config),
            "scheme": asdict(self.scheme),
            "changes": [asdict(change) for change in self.changes],
            "rule": asdict(self.rule),
        }

    def training(self) -> tuple[Training, tuple[Change, ...]]:
        """The run where it begins, and the changes that are still to come."""
        passed = self.changes
        if self.begin is None:
            return start(self.config, self.scheme, rule=self.rule), passed
        done = [change for change in passed if change.step < self.begin.step]
        training = start(self.config, self.scheme, rule=self.rule)
        for change in done:  # their schemes and rates; what they did to weights is in the state
            training.step = change.step
            apply_change(training, replace(change, nudge=None))
        begin_at(training, self.begin)
        return training, passed[len(done) :]

    def run(self) -> Record:
        """Arrays: ``losses`` and ``grad_norms`` (steps,), float32; the states before divergence."""
        training, changes = self.training()
        advance_through(training, changes)
        run = training.finish()
        arrays: dict[str, Array] = {"losses": run.losses, "grad_norms": run.grad_norms}
        with np.errstate(over="ignore"):  # a loss beyond float32 is stored as Inf
            arrays = {name: np.asarray(a, np.float32) for name, a in arrays.items()}
        if self.leads and run.first_bad_step is not None:
            arrays |= self._states_before(run.first_bad_step)
        meta = {
            **self.settings(),
            "leads": list(self.leads),
            "versions": dict(provenance()),
            **asdict(run.outcome),
            "eval_loss": run.eval_loss,
            "seconds": run.seconds,
        }
        return Record(self.id, arrays, meta)

    def _states_before(self, bad_step: int) -> dict[str, Array]:
        training, changes = self.training()
        kept: dict[str, Array] = {}
        for lead in sorted(self.leads, reverse=True):
            if bad_step - lead > 0:
                changes = advance_through(training, changes, bad_step - lead)
                kept |= snapshot_of(training).arrays(f"lead_{lead}")
        return kept


def advance_through(
    training: Training, changes: tuple[Change, ...], stop: int | None = None
) -> tuple[Change, ...]:
    """Advance to the end, or to ``stop``, with the changes on the way; returns those left.

    A change at ``stop`` itself is left; a run that ends before a change meets no more.
    """
    last = training.config.steps if stop is None else stop
    while changes and changes[0].step < last and not training.ended:
        change, *rest = changes
        training.advance(change.step - training.step)
        if training.step == change.step and training.bad_step is None:
            apply_change(training, change)
        changes = tuple(rest)
    training.advance(last - training.step)
    return changes


def lead_state(record: Record, lead: int) -> Snapshot | None:
    """The state that a ChangedRun kept ``lead`` steps before it diverged; None if there is none."""
    if f"lead_{lead}_weights" not in record.arrays:
        return None
    step = int(record.meta["first_bad_step"]) - lead
    losses, norms = (
        np.asarray(record.arrays[name][:step], np.float64) for name in ("losses", "grad_norms")
    )
    return snapshot_from(record.arrays, f"lead_{lead}", step, losses, norms)
