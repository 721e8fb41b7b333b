"""What became of a run: spikes, divergence, whether it learned.  Values, not exceptions.

All is judged from the recorded losses after the run, so a stored run can be judged again by other
rules.  Why not one ratio: final over best alone misses runs that sit high from the start and flags
runs that recover, and loss floors differ 600-fold with and without layer norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mxsim.layout import as_integer

Array = NDArray[Any]
Status = Literal["ok", "diverged", "nonfinite"]


@dataclass(frozen=True)
class DivergenceRule:
    """When a run counts as diverged.

    The reference at step t is the lowest median of any ``window`` consecutive losses before t.
    A spike starts where the loss exceeds ``spike_ratio`` times the reference, and ends at the
    first step whose loss is back within ``recovery_ratio`` times the reference it started from.
    A run is diverged if a spike lasts longer than ``patience`` steps, or is still open when the run
    ends, or if the run never learned: its held-out loss is not below ``learned_fraction`` of a
    trivial loss, the larger of mean(y^2), the zero predictor's, and mean(x^2), what the student's
    own residual stream leaves if it is not cancelled.  (The zero predictor alone will not do: with
    the paper's near-zero teacher it has loss 2.6e-5, far below the 1/width that layer norm makes
    the student leave, so no run at all would pass.)
    """

    spike_ratio: float = 10.0
    window: int = 20
    recovery_ratio: float = 2.0
    patience: int = 200
    learned_fraction: float = 0.5

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("patience", 0)):
            count = as_integer(name, getattr(self, name), f"an integer of at least {least}")
            if count < least:
                raise ValueError(f"{name} must be at least {least}; got {count}")
            object.__setattr__(self, name, count)
        for name, low, high in (
            ("recovery_ratio", 1.0, math.inf),
            ("spike_ratio", float(self.recovery_ratio), math.inf),
            ("learned_fraction", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} must be a number; got {value!r}")
            if not low < value < math.inf or value > high:
                limit = "recovery_ratio " if name == "spike_ratio" else ""
                raise ValueError(f"{name} must be finite and above {limit}{low:g}; got {value}")
            object.__setattr__(self, name, float(value))


@dataclass(frozen=True)
class Spike:
    """One excursion: ``step`` it starts, ``height`` = highest loss / reference, and ``length``.

    ``length`` counts the steps until recovery, None if the run ended first.
    """

    step: int
    height: float
    length: int | None


def running_reference(losses: Array, window: int) -> Array:
    """Lowest ``window``-step median among losses[:t], for each t; Inf where there is none yet."""
    n = len(losses)
    reference = np.full(n, np.inf)
    if n > window:
        medians = np.median(np.lib.stride_tricks.sliding_window_view(losses, window), axis=1)
        medians = np.where(np.isnan(medians), np.inf, medians)
        reference[window:] = np.minimum.accumulate(medians[: n - window])
    return reference


def find_spikes(losses: Array, rule: DivergenceRule) -> tuple[Spike, ...]:
    """The spikes of a loss series, in order.

    It ends at its last finite loss; what is not finite before that, as in a run that was rolled
    back, is beyond any spike.
    """
    finite = np.asarray(losses, np.float64)
    known = np.flatnonzero(np.isfinite(finite))
    finite = finite[: known[-1] + 1] if known.size else finite[:0]
    finite = np.where(np.isfinite(finite), finite, np.inf)
    reference = running_reference(finite, rule.window)
    spikes = []
    t = 0
    above = np.flatnonzero(finite > rule.spike_ratio * reference)
    while (later := above[above >= t]).size:
        start = int(later[0])
        back = np.flatnonzero(finite[start:] <= rule.recovery_ratio * reference[start])
        length = int(back[0]) if back.size else None
        stop = len(finite) if length is None else start + length
        height = float(finite[start:stop].max() / reference[start])
        spikes.append(Spike(start, height, length))
        if length is None:
            break
        t = stop
    return tuple(spikes)


def fatal_spike(spikes: Sequence[Spike], rule: DivergenceRule) -> Spike | None:
    """The first spike that makes a run diverge: open at the end, or longer than the patience."""
    return next((s for s in spikes if s.length is None or s.length > rule.patience), None)


def is_censored(spike: Spike, steps: int, rule: DivergenceRule) -> bool:
    """Whether a spike of a run of ``steps`` was cut short by its end, still within its patience."""
    return spike.length is None and steps - spike.step <= rule.patience


@dataclass(frozen=True)
class Outcome:
    """The verdict on a run.

    - ``status``: ``nonfinite`` (a NaN or Inf appeared), ``diverged``, else ``ok``.
    - ``first_bad_step``: the step of the first non-finite value, else the start of the spike that
      made the run diverge, else the last step if it never learned, else None.
    - ``first_bad_tensor``: what was non-finite first, else None.
    - ``final_over_best``: median of the last window over the lowest window median (1 = at its
      best); NaN if the run is shorter than a window.
    - ``censored``: diverged by a spike that was still within its patience when the run ended, so
      that a longer run might have recovered.
    - ``learned``: the held-out loss fell below the rule's fraction of the trivial loss.
    """

    status: Status
    first_bad_step: int | None
    first_bad_tensor: str | None
    spikes: tuple[Spike, ...]
    final_over_best: float
    learned: bool
    censored: bool = False


def judge(
    losses: Array,
    eval_loss: float,
    trivial_loss: float,
    rule: DivergenceRule,
    bad_step: int | None = None,
    bad_tensor: str | None = None,
) -> Outcome:
    """Judge a finished run; ``bad_step`` and ``bad_tensor`` say where it became non-finite."""
    done = np.asarray(losses, np.float64)[: len(losses) if bad_step is None else bad_step]
    spikes = find_spikes(done, rule)
    learned = bool(eval_loss < rule.learned_fraction * trivial_loss)
    final_over_best = math.nan
    if len(done) >= rule.window:
        windows = np.lib.stride_tricks.sliding_window_view(done, rule.window)
        best = float(np.median(windows, axis=1).min())
        last = float(np.median(done[-rule.window :]))
        final_over_best = last / best if best > 0 else math.nan
    common = (spikes, final_over_best, learned)
    if bad_step is not None:
        return Outcome("nonfinite", bad_step, bad_tensor, *common)
    fatal = fatal_spike(spikes, rule)
    if fatal is not None:
        censored = is_censored(fatal, len(losses), rule)
        return Outcome("diverged", fatal.step, None, *common, censored=censored)
    if not learned:
        return Outcome("diverged", len(losses) - 1, None, *common)
    return Outcome("ok", None, None, *common)
