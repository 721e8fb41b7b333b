"""Statistics that studies report: a value never stands without its interval and its n.

The arithmetic is scipy's; here are the choices (95 %, resampling of seeds, Wilson, exact McNemar).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Array = NDArray[Any]

CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % interval and the number of independent values behind it."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        if not self.n:
            return "-"
        if np.isnan(self.low):
            return f"{self.value:.2f} [no interval]"
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


NOTHING = Estimate(np.nan, np.nan, np.nan, 0)


def median_over_seeds(values: Array) -> Estimate:
    """Median with a bootstrap interval (percentile, resampling seeds); values (seeds,).

    No values give NOTHING; equal or non-finite ones give their range as the interval.
    """
    if not len(values):
        return NOTHING
    middle = float(np.median(values))
    if not np.isfinite(values).all() or np.ptp(values) == 0:
        return Estimate(middle, float(values.min()), float(values.max()), len(values))
    interval = stats.bootstrap(
        (values,),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(middle, float(interval.low), float(interval.high), len(values))


def mean_over_seeds(values: Array) -> Estimate:
    """Mean with Student's t interval; values (seeds,).

    No ends (NaN) from fewer than two values, or from equal ones, which say nothing of their spread.
    """
    n = len(values)
    if not n:
        return NOTHING
    mean = float(np.mean(values))
    if n == 1 or np.ptp(values) == 0:
        return Estimate(mean, np.nan, np.nan, n)
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, n - 1) * stats.sem(values))
    return Estimate(mean, mean - half, mean + half, n)


def share(count: int, n: int) -> Estimate:
    """A share with its Wilson interval."""
    interval = stats.binomtest(count, n).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(count / n, float(interval.low), float(interval.high), n)


def mcnemar(one: int, other: int) -> float:
    """Two-sided exact p-value that discordant pairs fall either way alike; 1 without any."""
    return float(stats.binomtest(one, one + other).pvalue) if one + other else 1.0
