"""Times to an event, some of them censored: survival curves and tests, paired and unpaired.

Curves and the log-rank test are scipy's; the choice that is ours is the paired test: arms that
share seeds are compared within each seed, by the sign-flip permutation test on restricted times.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from mxsim.stats import CONFIDENCE, share

Array = NDArray[np.float64]

PERMUTATIONS = 20_000  # above 14 seeds signs are sampled, below all are enumerated


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
        raise ValueError("times must not be empty")
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


def paired_permutation(differences: Sequence[float]) -> float:
    """Two-sided p-value that the mean of paired differences is 0, by flipping their signs.

    All 2^n signs up to n = 14, else 20000 random ones (seeded) and the observed.  1 for n = 0.
    """
    d = np.asarray(differences, np.float64)
    if not len(d):
        return 1.0
    if len(d) <= 14:
        signs = np.array(list(product((1.0, -1.0), repeat=len(d))))
    else:
        rng = np.random.default_rng(0)
        signs = np.where(rng.integers(0, 2, (PERMUTATIONS, len(d))) > 0, 1.0, -1.0)
        signs[0] = 1.0
    means = np.abs(signs @ d)
    # Equal in exact arithmetic may differ by rounding: a tie counts as at least as large.
    return float(np.mean(means >= means[0] * (1 - 1e-9)))


def _censored(times: Sequence[Time]) -> stats.CensoredData:
    seen = [t.steps for t in times if t.event]
    return stats.CensoredData(uncensored=seen, right=[t.steps for t in times if not t.event])
