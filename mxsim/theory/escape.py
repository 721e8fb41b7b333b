"""Where a run of finite length is lost: between the thresholds in mean square and almost surely.

With additive gradient noise a run that is stable almost surely settles around 0, at a typical |x|
of about sqrt(eta lam / 2) noise standard deviations, with the tail P(|x| > r) ~ r^-index (Kesten
1973; index 2 at the threshold in mean square, 0 at the almost-sure one): excursions of any size
come sooner or later.  A loss that is not a quadratic far out does not let all of them return.  So
the rate at which half of the runs are lost depends on their length T and on the level that counts
as lost; it tends to the almost-sure threshold as log(level) / log(T) grows, provided that T also
suffices for growth to the level at all.

The estimate here takes log |x| for a random walk of drift L (the exponent), reflected at the
typical size, and asks for a mean time T to reach the level.  It is an approximation: within 7 % of
simulation for the cases of ``mxsim.theory.stability`` (within 3 % for gd), whose table shows both.
"""

from __future__ import annotations

import math

from scipy.optimize import brentq

from mxsim.theory.lyapunov import growth_exponent, moment_growth
from mxsim.theory.model import Gains
from mxsim.theory.stability import almost_sure_threshold, mean_square_threshold

GRID, NODES = 128, 129  # resolution: far better than the approximation
LARGEST_INDEX = 8.0
SMALL_ORDER = 0.2  # Q(SMALL_ORDER) gives the variance of log |x| per step where there is no index


def tail_index(optimizer: str, eta_lam: float, b: float, gains: Gains) -> float:
    """The order > 0 at which E |x|^order neither grows nor decays: Q(order) = 0.

    Zero where the exponent L is not negative (no stationary law), inf if it exceeds 8.
    Raises as ``mxsim.theory.lyapunov.growth_exponent``.
    """

    def growth(order: float) -> float:
        return moment_growth(optimizer, eta_lam, order, b, gains, GRID, NODES)

    if growth_exponent(optimizer, eta_lam, b, gains, GRID, NODES) >= 0:
        return 0.0
    high = SMALL_ORDER / 4
    while growth(high) < 0:  # convex with Q(0) = 0 and Q'(0) = L < 0: negative up to the index
        if high > LARGEST_INDEX:
            return math.inf
        high *= 2
    low = high / 2
    while growth(low) >= 0:  # an index below the first order tried
        low /= 2
        if low < 1e-6:
            return 0.0
    return float(brentq(growth, low, high, rtol=1e-4))


def mean_escape_time(optimizer: str, eta_lam: float, b: float, gains: Gains, level: float) -> float:
    """Mean number of steps until |x| first exceeds ``level``; inf if it practically never does.

    level > sqrt(eta lam / 2): in units of the gradient noise's standard deviation over lam.  For
    Brownian motion of drift L and variance V per step, reflected at 0, started there, to reach h:
        V (exp(-2 L h / V) - 1) / (2 L^2) + h / L        (h^2 / V for L = 0).
    Here V is chosen so that -2 L / V is the exact tail index where there is one.
    Raises ValueError for a lower level.
    """
    height = math.log(level / math.sqrt(eta_lam / 2))
    if not height > 0:
        raise ValueError(f"level must exceed the typical size, sqrt(eta_lam / 2); got {level}")
    drift = growth_exponent(optimizer, eta_lam, b, gains, GRID, NODES)
    index = tail_index(optimizer, eta_lam, b, gains)
    if index == math.inf or index * height > 700:
        return math.inf
    if index > 0:
        variance = -2 * drift / index
    else:
        small = moment_growth(optimizer, eta_lam, SMALL_ORDER, b, gains, GRID, NODES)
        variance = 2 * (small - drift * SMALL_ORDER) / SMALL_ORDER**2
    slope = -2 * drift * height / variance
    if abs(slope) < 1e-3:
        return height**2 / variance * (1 + slope / 3)
    return height**2 / variance * 2 * (math.expm1(slope) - slope) / slope**2


def escape_threshold(optimizer: str, b: float, gains: Gains, steps: float, level: float) -> float:
    """The eta lam at which a run exceeds ``level`` within ``steps`` steps, in the mean.

    Raises ValueError if it does not lie between 0.8 of the threshold in mean square and 3 times the
    almost-sure one.
    """
    low = 0.8 * mean_square_threshold(optimizer, b, gains.mu, gains.s2)
    high = 3 * almost_sure_threshold(optimizer, b, gains.mu, gains.s2, gains.distribution)

    def excess(log_rate: float) -> float:
        time = mean_escape_time(optimizer, math.exp(log_rate), b, gains, level)
        return min(math.log(time / steps), 700.0) if time < math.inf else 700.0

    if not excess(math.log(low)) > 0 > excess(math.log(high)):
        raise ValueError(
            f"steps = {steps} and level = {level} put the escape outside eta lam {low:.3g} to "
            f"{high:.3g}, where alone this estimate is meant"
        )
    return math.exp(float(brentq(excess, math.log(low), math.log(high), xtol=1e-4)))
