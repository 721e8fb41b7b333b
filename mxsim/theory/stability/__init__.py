"""How large a rate is stable under a multiplicative gradient bias?  Three answers.

    python -m mxsim.theory.stability [--runs 200]    # a table of them; where half of runs diverge

On a quadratic of curvature lam with gradient (1 + z) lam x, z independent over steps, mean mu > -1,
variance s2 (``mxsim.theory.model``), thresholds of eta lam:

                    in mean                  in mean square
    gd              2 / w                    2 w / (w^2 + s2)                           w = 1 + mu
    ema, adam       2 (1+b) / ((1-b) w)      2 (1+b) w / ((1-b) w^2 + (1+b) s2)
    heavy ball      (1-b) times that         (1-b) times that

In mean square is the smallest of the three.  For ema it is governed by the noise, not by momentum,
once s2 > (1-b) w^2 / (1+b) (b = 0.9: a standard deviation of 0.23), and never exceeds 2 w / s2.
Almost surely has no closed form (``mxsim.theory.lyapunov``).  It lies above that in mean square,
and on either side of that in mean: 2.26 against 2 for gd, 11.5 against 38 for ema with b = 0.9,
with gaussian gains, mu = 0, s2 = 0.25.

Independence over steps is what these numbers rest on.  For gd the almost-sure threshold needs only
the law of one gain.  With momentum, where the noise governs, gains that remember raise it (second
table: 11.5 to 21 for ema with b = 0.9, once they do so for 10 steps), and where it does not, lower
it slightly.

Thresholds of several directions at once: each direction has its own eta lam, and in mean and in
mean square the largest lam decides, since the stable rates are the interval (0, threshold).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import brentq

from mxsim.theory.lyapunov import GRID, NODES, growth_exponent
from mxsim.theory.model import Gains, check

Array = NDArray[Any]

SCAN = 1.02  # ratio of neighbouring rates in the search for the first unstable one
COARSE = (128, 129)  # angles and gains during that search
FLOOR = -50.0  # stands for an exponent of -inf


def _numeric(optimizer: str, what: str) -> Any:
    from mxsim.theory.moments import numeric  # sympy: half a second, and only here

    return numeric(optimizer, what)


def mean_threshold(optimizer: str, b: ArrayLike = 0.0, mu: ArrayLike = 0.0) -> Any:
    """The eta lam below which E x tends to 0.  Float for scalars, else an array (broadcast).

    optimizer: gd | heavy_ball | ema | adam; b: momentum, 0 <= b < 1; mu: mean of z.
    Derived in ``mxsim.theory.moments.derive_mean``.  Raises ValueError outside the domain.
    """
    return _threshold("mean", optimizer, b, mu, 0.0)


def mean_square_threshold(
    optimizer: str, b: ArrayLike = 0.0, mu: ArrayLike = 0.0, s2: ArrayLike = 0.0
) -> Any:
    """The eta lam below which E x^2 tends to 0.  Float for scalars, else an array (broadcast).

    s2: variance of z; no other property of its distribution enters.
    Derived in ``mxsim.theory.moments.derive_mean_square``.  Raises ValueError outside the domain.
    """
    return _threshold("mean_square", optimizer, b, mu, s2)


def _threshold(what: str, optimizer: str, b: ArrayLike, mu: ArrayLike, s2: ArrayLike) -> Any:
    check(optimizer, b, mu, s2)
    b, mu, s2 = np.broadcast_arrays(*(np.asarray(each, dtype=float) for each in (b, mu, s2)))
    found = np.asarray(_numeric(optimizer, what)(math.nan, b, mu, s2))
    return found if found.ndim else float(found)


def second_moment_matrix(
    optimizer: str, eta_lam: float, b: float = 0.0, mu: float = 0.0, s2: float = 0.0
) -> Array:
    """The exact map of (E x^2, E x m, E m^2) from step to step, (3, 3), m in units of lam."""
    check(optimizer, b, mu, s2)
    return np.asarray(_numeric(optimizer, "second_moment_map")(eta_lam, b, mu, s2), dtype=float)


def almost_sure_threshold(
    optimizer: str,
    b: float = 0.0,
    mu: float = 0.0,
    s2: float = 0.0,
    distribution: str = "gaussian",
) -> float:
    """The upper end of the interval (0, threshold) of eta lam in which almost every run tends to 0.

    The stable set may have further intervals above it (``almost_sure_intervals``); small rates
    belong to this one.  Everything below the threshold in mean square is stable almost surely; from
    0.9 of it the search goes up in steps of 2 %, so an unstable gap narrower than that is missed.
    Accuracy: that of ``mxsim.theory.lyapunov``; for gd a relative 1e-9.
    Raises ValueError outside the domain.
    """
    check(optimizer, b, mu, s2)
    if s2 == 0:
        return float(mean_threshold(optimizer, b, mu))
    return _almost_sure(optimizer, float(b), Gains(distribution, float(mu), float(s2)))


@lru_cache(maxsize=1024)
def _almost_sure(optimizer: str, b: float, gains: Gains) -> float:
    rate = 0.9 * mean_square_threshold(optimizer, b, gains.mu, gains.s2)
    while _exponent(rate, optimizer, b, gains, *COARSE) < 0:
        rate *= SCAN
    low, high = rate / SCAN, rate
    while _exponent(low, optimizer, b, gains) >= 0:
        low /= SCAN
    while _exponent(high, optimizer, b, gains) <= 0:
        high *= SCAN
    found = brentq(_exponent, low, high, args=(optimizer, b, gains), rtol=1e-9)
    return float(found)


def _exponent(
    rate: float, optimizer: str, b: float, gains: Gains, grid: int = GRID, nodes: int = NODES
) -> float:
    return max(growth_exponent(optimizer, rate, b, gains, grid, nodes), FLOOR)


def almost_sure_intervals(
    optimizer: str, b: float, gains: Gains, rates: ArrayLike
) -> tuple[tuple[float, float], ...]:
    """All intervals of eta lam that are stable almost surely, as far as ``rates`` show them.

    rates: increasing.  Ends between two of them are refined; an interval or a gap that falls
    between two neighbours is missed.  An interval that reaches the first or the last rate ends
    there.  Example: gd, two-point gains 0.2 and 4: (0, 0.53) and (4.72, 5.25), around 1 / 0.2.
    """
    rates = np.asarray(rates, dtype=float)
    exponents = np.array([_exponent(float(rate), optimizer, b, gains) for rate in rates])
    ends: list[float] = [float(rates[0])] if exponents[0] < 0 else []
    for i in np.flatnonzero((exponents[:-1] < 0) != (exponents[1:] < 0)):
        ends.append(float(brentq(_exponent, rates[i], rates[i + 1], args=(optimizer, b, gains))))
    if exponents[-1] < 0:
        ends.append(float(rates[-1]))
    return tuple(zip(ends[::2], ends[1::2], strict=True))
