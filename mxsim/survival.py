"""Times to an event, some of them censored: survival curves and tests, paired and unpaired.

Curves and the log-rank test are scipy's; the choice that is ours is the paired test: arms that
share seeds are compared within each seed, by exchanging which of its runs is called treated.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from mxsim.stats import CONFIDENCE, share

Array = NDArray[np.float64]

PERMUTATIONS = 20_000


@dataclass(frozen=True)
class Time:
    """Steps until an event, or ``seen`` without one: censored."""

    steps: float
    event: bool


@dataclass(frozen=True)
class Curve:
    """Kaplan-Meier: the share without an event after ``steps``, with pointwise 95 % intervals."""

    steps: Array
    share: Array
    low: Array
    high: Array
    n: int
    events: int


def survival_curve(times: Sequence[Time]) -> Curve:
    """The Kaplan-Meier estimate, intervals by the log(-log) transformation (scipy.stats.ecdf).

    From step 0 on.  Raises ValueError without any times.
    """
    if not times:
        raise ValueError("times must not be empty; got no run")
    found = stats.ecdf(_censored(times)).sf
    with warnings.catch_warnings():  # undefined where nothing or everything has happened
        warnings.simplefilter("ignore", RuntimeWarning)
        interval = found.confidence_interval(CONFIDENCE, method="log-log")
    probabilities = np.concatenate([[1.0], found.probabilities])
    low, high = (
        np.concatenate([[np.nan], np.asarray(end.probabilities, np.float64)])
        for end in (interval.low, interval.high)
    )
    for extreme in (0, 1):  # there the interval is Wilson's, for n
        wilson = share(extreme * len(times), len(times))
        low[probabilities == extreme] = wilson.low
        high[probabilities == extreme] = wilson.high
    return Curve(
        np.concatenate([[0.0], found.quantiles]),
        probabilities,
        low,
        high,
        n=len(times),
        events=sum(t.event for t in times),
    )


def log_rank(one: Sequence[Time], other: Sequence[Time]) -> float:
    """Two-sided p-value of the log-rank test (unpaired).

    1 where it has nothing to go by: without any event, or when all that are left fall at once.
    """
    if not any(t.event for t in (*one, *other)):
        return 1.0
    with np.errstate(invalid="ignore"):
        p = float(stats.logrank(_censored(one), _censored(other)).pvalue)
    return 1.0 if np.isnan(p) else p


def restricted(times: Sequence[Time], horizon: float) -> Array:
    """Steps without an event within ``horizon``; one censored earlier counts what was seen."""
    return np.array([min(t.steps, horizon) for t in times], np.float64)


def exchange_test(treated: ArrayLike, controls: ArrayLike) -> float:
    """Two-sided p-value that, within a seed, the treated run might be any of its runs.

    treated: (seeds,); controls: (seeds, replicates).  The statistic is the mean over seeds of the
    treated run minus the mean of its controls; exchanged at random within each seed, 20000 times
    (seeded), the observed assignment counted among them, so that it is never 0.  1 for no seeds.
    Raises ValueError for NaN or where the shapes do not fit.
    """
    own, others = np.asarray(treated, np.float64), np.asarray(controls, np.float64)
    if own.ndim != 1 or others.ndim != 2 or len(own) != len(others) or not others.shape[1]:
        raise ValueError(
            f"treated must be (seeds,), controls (seeds, replicates); got {own.shape} and "
            f"{others.shape}"
        )
    if np.isnan(own).any() or np.isnan(others).any():
        count = int(np.isnan(own).sum() + np.isnan(others).sum())
        raise ValueError(f"treated and controls must not hold NaN; got {count}")
    if not len(own):
        return 1.0
    runs = np.column_stack([own, others])
    total, k = runs.sum(axis=1, keepdims=True), others.shape[1]
    # Each run's difference to the mean of the others, were it the treated one.
    differences = runs - (total - runs) / k
    rng = np.random.default_rng(0)
    chosen = rng.integers(0, k + 1, (PERMUTATIONS, len(runs)))
    sums = np.abs(differences[np.arange(len(runs)), chosen].sum(axis=1))
    observed = abs(differences[:, 0].sum())
    # Equal in exact arithmetic may differ by rounding: a tie counts as at least as large.
    at_least = int((sums >= observed - 1e-9 * np.abs(runs).sum()).sum())
    return (at_least + 1) / (PERMUTATIONS + 1)


def _censored(times: Sequence[Time]) -> stats.CensoredData:
    seen = [t.steps for t in times if t.event]
    return stats.CensoredData(uncensored=seen, right=[t.steps for t in times if not t.event])
