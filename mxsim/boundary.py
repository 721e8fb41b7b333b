"""Tracing the boundary of a phase diagram: at which learning rate do half of the runs fail?

One column of the diagram is a one-dimensional search over x = log(learning rate).  As psychometrics
does for thresholds (Kontsevich and Tyler 1999, "Bayesian adaptive estimation of psychometric slope
and threshold", Vision Research 39), a posterior is kept on a grid of (threshold, transition width),

    P(fail | x) = lapse + (1 - 2 lapse) logistic((x - threshold) / width),

and the next learning rates are quantiles of the threshold's posterior, so that runs are spent where
the boundary may still be.  Nothing here knows of training: outcomes are (learning rate, failed).

The curve must rise throughout the range.  Where runs become stable again at still higher rates the
range must end below: with stable runs at its upper end the search reports "above".  A boundary
beyond the range is reported one-sided, "above 5", not as a number.

How honest the 95 % intervals are: share of 1000 columns whose interval holds the true threshold,
which lies anywhere in a range of 10 to 1; width 1.15, s the logistic scale of the true transition
in log rate (``python -m tests.test_boundary``, two minutes):

    true curve                    at most 48 runs                     at most 160 runs
                                  covered  runs  ratio  converged     covered  runs  converged
    step                          100.0 %    22   1.10      100 %     100.0 %    22      100 %
    logistic, s = 0.03             97.2 %    30   1.13       97 %      97.2 %    30      100 %
    logistic, s = 0.1              96.5 %    44   1.25       25 %      96.2 %    84       92 %
    probit, s = 0.1                95.8 %    44   1.24       24 %      95.0 %    85       92 %
    cloglog, s = 0.1               96.2 %    44   1.24       24 %      96.3 %    84       93 %
    cloglog, mirrored, s = 0.1     94.6 %    44   1.23       24 %      94.9 %    83       93 %
    3 % lapses, s = 0.03           97.9 %    34   1.13       90 %      97.9 %    35      100 %

Sharp transitions are covered too well: certainty that they are sharp costs a few runs more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from mxsim.stats import CONFIDENCE

Array = NDArray[Any]
Key = TypeVar("Key", bound=Hashable)
Outcome = tuple[float, bool]  # learning rate, whether the run failed

DIGITS = 4  # significant ones of a proposed learning rate
MARGIN = 0.5  # of the range, by which the threshold's prior extends beyond either end
CELLS = 20  # thresholds on the grid for each ``width`` asked for
WIDTHS = 12  # transition widths on the grid
SHARPEST, BROADEST = 1 / 300, 1 / 4  # transition widths: of the interval asked for, of the range
MOST_CELLS = 10_000
# Two priors of the transition width w, as its powers on the logarithmic grid.  The interval is the
# hull of theirs.  The first expects broad transitions: uniform in log w, a few chance outcomes that
# look like a step end the search too early.  The second expects sharp ones: under the first alone,
# a sharp threshold in a wide gap between runs would be placed in the middle of the gap (a grid of 5
# rates over a range of 10 to 1, 8 seeds each: 88 % covered, with both 97 %).
PRIORS = (0.5, -1.0)


@dataclass(frozen=True)
class Search:
    """The search along one column.

    low, high: ends of the learning rates that may be run.  width: the ratio of learning rates below
    which the 95 % interval must come.  per_round: runs proposed at once.  min_runs, max_runs: a
    search ends at ``max_runs`` whatever the interval.  lapse: the share of runs far from the
    boundary that end otherwise than their side; more than 0, or one accident would exclude the
    truth for ever.

    Raises ValueError for values that no search can use.
    """

    low: float
    high: float
    width: float = 1.15
    per_round: int = 4
    min_runs: int = 8
    max_runs: int = 48
    lapse: float = 0.02

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and 0 < self.low < self.high):
            raise ValueError(
                f"low and high must be finite, 0 < low < high; got {self.low}, {self.high}"
            )
        if not 1.01 <= self.width < self.high / self.low:
            raise ValueError(
                f"width must be a ratio of learning rates, at least 1.01 (of {DIGITS} digits) "
                f"and below high / low = {self.high / self.low:.4g}; got {self.width}"
            )
        if self._count > MOST_CELLS:
            raise ValueError(
                f"width {self.width} over [{self.low}, {self.high}] takes {self._count} cells of "
                f"the grid, more than {MOST_CELLS}: narrow the range or widen width"
            )
        if self.per_round < 2:  # one rate at a time would be the median: blind to the width
            raise ValueError(f"per_round must be at least 2; got {self.per_round}")
        if not 1 <= self.min_runs <= self.max_runs:
            raise ValueError(
                f"min_runs must be from 1 to max_runs ({self.max_runs}); got {self.min_runs}"
            )
        if not 0 < self.lapse < 0.5:
            raise ValueError(f"lapse must lie in (0, 0.5); got {self.lapse}")

    @property
    def _count(self) -> int:
        length = math.log(self.high / self.low)
        return math.ceil((1 + 2 * MARGIN) * length * CELLS / math.log(self.width))

    @property
    def edges(self) -> Array:
        """Edges of the grid's equal cells in log learning rate, (thresholds + 1,)."""
        margin = MARGIN * math.log(self.high / self.low)
        start, stop = math.log(self.low) - margin, math.log(self.high) + margin
        return np.linspace(start, stop, self._count + 1)

    @property
    def thresholds(self) -> Array:
        """The cells' centres, (thresholds,)."""
        return np.asarray((self.edges[1:] + self.edges[:-1]) / 2)

    @property
    def transition_widths(self) -> Array:
        """The grid of logistic scales in log learning rate, (widths,): from a step to a slope."""
        sharpest = SHARPEST * math.log(self.width)
        broadest = BROADEST * math.log(self.high / self.low)
        return np.asarray(np.exp(np.linspace(math.log(sharpest), math.log(broadest), WIDTHS)))


@dataclass(frozen=True)
class Threshold:
    """The learning rate at which half of the runs fail.

    value: the posterior's median, NaN if one-sided.  low, high: the 95 % credible interval (hull of
    the equal-tailed ones under two priors), 0 and inf where it leaves the range that was searched.
    n: runs.  converged: whether the interval, or the distance of a one-sided bound from its end of
    the range, is within the ratio asked for, after the fewest runs allowed.
    """

    value: float
    low: float
    high: float
    n: int
    converged: bool

    @property
    def censored(self) -> Literal["below", "above"] | None:
        """On which side of a single bound the boundary lies: above ``low`` or below ``high``."""
        if self.low > 0 and self.high == math.inf:
            return "above"
        if self.low == 0 and self.high < math.inf:
            return "below"
        return None

    def __str__(self) -> str:
        if self.censored == "above":
            return f"above {self.low:.3g}"
        if self.censored == "below":
            return f"below {self.high:.3g}"
        return (
            "-" if math.isnan(self.value) else f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"
        )


@dataclass(frozen=True)
class Trace:
    """One finished search: its outcomes in the order of their seeds, and what they say."""

    search: Search
    outcomes: tuple[Outcome, ...]
    threshold: Threshold


def estimate(search: Search, outcomes: Sequence[Outcome]) -> Threshold:
    """The threshold from any outcomes, proposed here or from a full grid of runs.

    outcomes: (learning rate, failed), independent of each other: see ``trace`` on seeds.
    Raises ValueError for a learning rate that is not positive and finite, TypeError for an outcome
    that is not a boolean.
    """
    return _threshold(search, _likelihood(search, outcomes), len(outcomes))


def propose(search: Search, outcomes: Sequence[Outcome]) -> tuple[float, ...]:
    """The learning rates to run next, rising; empty if the search has ended.

    A function of the outcomes so far alone: an interrupted search that reads its finished runs
    again goes on as it would have.  Hand over whole rounds.  Raises as ``estimate`` does.
    """
    return _next(search, _likelihood(search, outcomes), len(outcomes))


def trace(
    columns: Mapping[Key, Search],
    evaluate: Callable[[Sequence[tuple[Key, float, int]]], Sequence[bool]],
) -> dict[Key, Trace]:
    """Search all columns, the next runs of all unfinished ones in one round.

    ``evaluate`` gets the (key, learning rate, seed) of a round and returns whether each run failed,
    in this order; it may run them in parallel and in any order, and read those that are stored.

    Every new run of a column has a new seed, the number of that column's runs before it.  With the
    same few seeds at every learning rate, outcomes would depend on each other (a seed that fails
    early fails early at the neighbouring rate too), and however many runs were spent the search
    would close in on the boundary of those seeds instead of the median over seeds.

    Raises ValueError if ``evaluate`` returns another number of outcomes than it was asked for,
    TypeError if they are not booleans.
    """
    outcomes: dict[Key, list[Outcome]] = {key: [] for key in columns}
    likelihoods = {key: _nothing(search) for key, search in columns.items()}
    while True:
        wanted = {
            key: _next(search, likelihoods[key], len(outcomes[key]))
            for key, search in columns.items()
        }
        runs = [
            (key, rate, len(outcomes[key]) + i)
            for key, rates in wanted.items()
            for i, rate in enumerate(rates)
        ]
        if not runs:
            break
        failed = evaluate(runs)
        if len(failed) != len(runs):
            raise ValueError(f"evaluate returned {len(failed)} outcomes for {len(runs)} runs")
        found: dict[Key, list[Outcome]] = {}
        for (key, rate, _), each in zip(runs, failed, strict=True):
            found.setdefault(key, []).append((rate, each))
        for key, new in found.items():
            likelihoods[key] = _updated(columns[key], likelihoods[key], new)
            outcomes[key] += [(rate, bool(each)) for rate, each in new]
    return {
        key: Trace(search, tuple(found), _threshold(search, likelihoods[key], len(found)))
        for (key, search), found in zip(columns.items(), outcomes.values(), strict=True)
    }


# The log likelihood, (thresholds, widths), and what follows from it.


def _nothing(search: Search) -> Array:
    return np.zeros((len(search.thresholds), WIDTHS))


def _updated(search: Search, likelihood: Array, outcomes: Sequence[Outcome]) -> Array:
    """Add outcomes one by one, so that the sum does not depend on how they come in rounds."""
    thresholds, widths = search.thresholds[:, None], search.transition_widths
    for rate, failed in outcomes:
        if not isinstance(failed, (bool, np.bool_)):
            raise TypeError(f"an outcome must be a bool, whether the run failed; got {failed!r}")
        if not (rate > 0 and math.isfinite(rate)):
            raise ValueError(f"a learning rate must be positive and finite; got {rate}")
        # logistic(u) = (1 + tanh(u / 2)) / 2, so that P(ok) is P(fail) with the sign turned.
        slope = 0.5 - search.lapse if failed else search.lapse - 0.5
        p = 0.5 + slope * np.tanh((math.log(rate) - thresholds) / (2 * widths))
        likelihood = likelihood + np.log(p)
    return likelihood


def _likelihood(search: Search, outcomes: Sequence[Outcome]) -> Array:
    return _updated(search, _nothing(search), outcomes)


def _cumulated(search: Search, likelihood: Array) -> Array:
    """The threshold's distribution functions at the cells' edges, (priors, thresholds + 1)."""
    priors = search.transition_widths[:, None] ** np.array(PRIORS)
    weights = np.exp(likelihood - likelihood.max()) @ priors
    cumulated = np.concatenate([np.zeros((1, len(PRIORS))), np.cumsum(weights, axis=0)])
    return np.asarray((cumulated / cumulated[-1]).T)


def _threshold(search: Search, likelihood: Array, n: int) -> Threshold:
    tail, edges = (1 - CONFIDENCE) / 2, search.edges
    cumulated = _cumulated(search, likelihood)
    value = math.exp(np.interp(0.5, cumulated[0], edges))
    # Outward to the cells' edges: within a cell the likelihood is known at its centre only.
    low = math.exp(min(edges[np.searchsorted(c, tail, side="right") - 1] for c in cumulated))
    high = math.exp(max(edges[np.searchsorted(c, 1 - tail)] for c in cumulated))
    # Beyond the range nothing was run: an end there is the prior's, no finding.
    under, over = low < search.low, high > search.high
    if under and over:
        return Threshold(math.nan, 0.0, math.inf, n, converged=False)
    if over:
        low = min(low, search.high)
        close = low * search.width >= search.high
        return Threshold(math.nan, low, math.inf, n, close and n >= search.min_runs)
    if under:
        high = max(high, search.low)
        close = high <= search.low * search.width
        return Threshold(math.nan, 0.0, high, n, close and n >= search.min_runs)
    return Threshold(value, low, high, n, high <= low * search.width and n >= search.min_runs)


def _next(search: Search, likelihood: Array, n: int) -> tuple[float, ...]:
    count = min(search.per_round, search.max_runs - n)
    if count <= 0 or _threshold(search, likelihood, n).converged:
        return ()
    # Evenly from tail to tail: runs far out tell the transition's width, without which the
    # threshold's interval does not close.
    tail = 0.5 if count == 1 else 0.3 / count
    levels = np.linspace(tail, 1 - tail, count)
    rates = np.exp(np.interp(levels, _cumulated(search, likelihood)[0], search.edges))
    # Rounded, so that a rate is short to write and the last bits of a sum do not matter.
    rounded = (float(f"{rate:.{DIGITS}g}") for rate in rates.tolist())
    return tuple(min(max(rate, search.low), search.high) for rate in rounded)
