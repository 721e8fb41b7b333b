"""Simulated runs on the noisy quadratic of ``mxsim.theory.model``, in units of eta lam.

Nothing here knows a threshold: runs are steps of the optimizers as written, m <- b m + c g,
x <- x - eta m.  Gains come from a NumPy Generator that the caller hands down.

Which simulation can check what.  E x_t^2 cannot be had from long runs, neither as an average over
time nor over runs: log |x_t| is close to normal with mean L t and variance V t, so E x_t^2 =
exp(2 (L + V) t) is made by runs with log |x_t| near (L + 2 V) t, one in exp(2 V t) of all.  Once
exp(2 V t) exceeds the number of runs the average falls short, in the end by any factor, and where
L < 0 < L + V it tends to 0 while the expectation grows without bound.  So mean-square results are
checked by ``step`` on an ensemble that starts anew each time (the second-moment map is linear: one
step from any states tests all of it), and long single runs check almost-sure results, which is
what they follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats
from scipy.optimize import brentq, isotonic_regression
from scipy.signal import lfilter

from mxsim.jit import kernel
from mxsim.stats import CONFIDENCE, Estimate
from mxsim.theory.model import Gains, check, coefficients

Array = NDArray[Any]
Count = Callable[[float, np.random.Generator], int]  # rate, random bits -> runs that diverged

RESAMPLES = 2000
RATES = 11  # rates tried at a time in the search for the half-divergence point
ROUNDS = 4
ENOUGH = 4  # of them with shares between 0.1 and 0.9 end the search


def step(
    optimizer: str, eta_lam: float, b: float, x: ArrayLike, m: ArrayLike, gain: ArrayLike
) -> tuple[Array, Array]:
    """One step from states x, m with the given gains (all broadcast): the new x, m."""
    b, c = coefficients(optimizer, b)
    new_m = b * np.asarray(m) + c * np.asarray(gain) * np.asarray(x)
    return np.asarray(x) - eta_lam * new_m, new_m


# ---------------------------------------------------------------- growth without additive noise


@kernel
def _log_growth(gains: Any, eta_lam: Any, b: Any, c: Any, growth: Any) -> Any:
    """gains (runs, blocks, steps) -> growth (runs, blocks): log of |(x, m)| after / before."""
    for run in range(gains.shape[0]):
        x, m = 1.0, 0.0
        for block in range(gains.shape[1]):
            total = 0.0
            for t in range(gains.shape[2]):
                m = b * m + c * gains[run, block, t] * x
                x = x - eta_lam * m
                if t % 16 == 15 or t == gains.shape[2] - 1:  # often enough not to overflow
                    size = math.sqrt(x * x + m * m)
                    total += math.log(size)
                    x, m = x / size, m / size
            growth[run, block] = total


def log_growth(optimizer: str, eta_lam: float, b: float, gains: Array) -> Array:
    """Growth of the state over blocks of steps, (runs, blocks), in nats.

    gains: (runs, blocks, steps).  Each run starts at x = 1, m = 0.  A state that hits 0 exactly (a
    two-point gain of 1 / eta lam without momentum) gives -inf, then NaN.
    """
    check(optimizer, b)
    b, c = coefficients(optimizer, float(b))
    growth = np.empty(gains.shape[:2])
    _log_growth(np.ascontiguousarray(gains), float(eta_lam), float(b), float(c), growth)
    return growth


def simulated_exponent(
    optimizer: str,
    eta_lam: float,
    b: float,
    gains: Gains,
    rng: np.random.Generator,
    steps: int = 1_000_000,
    blocks: int = 50,
) -> Estimate:
    """The Lyapunov exponent from one long run, nats a step; batch means, 95 % (Student's t).

    One block more is run first and left out, so that the direction has forgotten its start.
    n counts blocks; they count as independent, being much longer than the direction's memory (of
    the order of 1 / (1 - b) steps).
    """
    length = steps // blocks
    growth = log_growth(optimizer, eta_lam, b, gains.draw(rng, (1, blocks + 1, length)))
    rates = growth[0, 1:] / length
    mean, error = float(rates.mean()), float(rates.std(ddof=1)) / math.sqrt(blocks)
    half = error * float(stats.t.ppf((1 + CONFIDENCE) / 2, blocks - 1))
    return Estimate(mean, mean - half, mean + half, blocks)


# ---------------------------------------------------------------- gains that remember


def correlated_gains(
    gains: Gains, rng: np.random.Generator, shape: tuple[int, int], memory: float
) -> Array:
    """Gains (runs, steps) of the given law whose normal variable has correlation ``memory``^lag.

    memory: 0 <= memory < 1; 0 gives independent gains.  Raises ValueError for another.
    """
    if not 0 <= memory < 1:
        raise ValueError(f"memory must satisfy 0 <= memory < 1; got {memory}")
    n = rng.standard_normal(shape)
    n[:, 1:] *= math.sqrt(1 - memory**2)  # the first has variance 1: stationary from the start
    return np.asarray(gains.of_normal(lfilter([1.0], [1.0, -memory], n, axis=-1)))


def run_thresholds(optimizer: str, b: float, drawn: Array, low: float) -> Array:
    """For each run of gains (runs, steps), the rate above which it ends larger than it began.

    The search starts at ``low``, which must be a rate at which runs shrink, and goes up by 5 %
    until the run grows; the sign change is then refined.
    """
    found = np.empty(len(drawn))
    for i, run in enumerate(drawn):

        def growth(rate: float, run: Array = run[None, None, :]) -> float:
            return float(log_growth(optimizer, rate, b, run)[0, 0])

        high = 1.05 * low
        while growth(high) < 0:
            high *= 1.05
        found[i] = brentq(growth, high / 1.05, high, rtol=1e-6)
    return found


# ---------------------------------------------------------------- which runs diverge


@kernel
def _escaped(gains: Any, noise: Any, eta_lam: Any, b: Any, c: Any, level: Any) -> Any:
    """gains, noise (runs, steps) -> number of runs in which |x| ever exceeds level."""
    count = 0
    for run in range(gains.shape[0]):
        x, m = 0.0, 0.0
        for t in range(gains.shape[1]):
            m = b * m + c * (gains[run, t] * x + noise[run, t])
            x = x - eta_lam * m
            if not abs(x) <= level:
                count += 1
                break
    return count


def count_grown(
    optimizer: str,
    eta_lam: float,
    b: float,
    gains: Gains,
    rng: np.random.Generator,
    steps: int,
    runs: int,
) -> int:
    """Runs of |(x, m)| from (1, 0) that end larger than they began; no additive noise."""
    growth = log_growth(optimizer, eta_lam, b, gains.draw(rng, (runs, 1, steps)))
    return int((growth > 0).sum())


def count_escaped(
    optimizer: str,
    eta_lam: float,
    b: float,
    gains: Gains,
    rng: np.random.Generator,
    steps: int,
    runs: int,
    level: float,
) -> int:
    """Runs from 0 in which |x| ever exceeds ``level`` within ``steps`` steps.

    The gradient is (1 + z_t) x_t + n_t, n_t standard normal: the noisy quadratic, on which a stable
    run has |x| of order sqrt(eta lam) or eta lam, so that the loss has by then risen by a factor of
    about level^2.
    """
    check(optimizer, b)
    b, c = coefficients(optimizer, float(b))
    noise = rng.standard_normal((runs, steps))
    drawn = gains.draw(rng, (runs, steps))
    return int(_escaped(drawn, noise, float(eta_lam), float(b), float(c), float(level)))


def half_divergence(
    count: Count,
    low: float,
    high: float,
    runs: int,
    seed: int,
) -> Estimate:
    """The rate at which half of the runs diverge, with a 95 % interval; n is runs at each rate.

    count: (rate, rng) -> how many of ``runs`` runs diverged.  RATES rates spread over [low, high]
    are tried, then again over the narrower range in which the share rises from a tenth to nine
    tenths, until several rates lie inside it.  Shares are made monotone (isotonic regression) and
    interpolated in the logarithm of the rate; the interval is the parametric bootstrap of the
    counts at the last set of rates.  NaN where the share does not cross one half.
    """
    parent = np.random.default_rng(seed)
    for _ in range(ROUNDS):
        rates = np.geomspace(low, high, RATES)
        streams = parent.spawn(RATES)
        pairs = zip(rates, streams, strict=True)
        counts = np.array([count(float(rate), rng) for rate, rng in pairs])
        shares = isotonic_regression(counts / runs).x
        if ((shares > 0.1) & (shares < 0.9)).sum() >= ENOUGH:
            break
        low = float(rates[max(int(np.searchsorted(shares, 0.1, "right")) - 1, 0)])
        high = float(rates[min(int(np.searchsorted(shares, 0.9)), RATES - 1)])
    resampled = parent.binomial(runs, counts / runs, (RESAMPLES, RATES))
    found = np.array([_crossing(rates, each / runs) for each in resampled])
    tail = (1 - CONFIDENCE) / 2
    ends = np.quantile(found, (tail, 1 - tail))
    return Estimate(_crossing(rates, counts / runs), float(ends[0]), float(ends[1]), runs)


def _crossing(rates: Array, shares: Array) -> float:
    """Where the isotonic fit of the shares is one half; NaN if it is not between the rates."""
    fitted = isotonic_regression(shares).x
    above = int(np.searchsorted(fitted, 0.5))
    if above in (0, len(rates)):
        return math.nan
    span = fitted[above - 1 : above + 1]
    place = (0.5 - span[0]) / (span[1] - span[0])
    low, high = np.log(rates[above - 1 : above + 1])
    return float(np.exp(low + place * (high - low)))
