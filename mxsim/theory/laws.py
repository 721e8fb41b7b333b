"""Laws of one element, known by their partial moments: Gaussian, lognormal, any cdf.

What blocks of such elements do under quantization is in clamp.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Array = NDArray[Any]

ORDERS = 5  # partial moments of orders 0..4: variances of sums of x^2 need the fourth


@dataclass(frozen=True, eq=False)
class Law:
    """The law of one element by its partial moments.

    partial: t (...) -> (5, ...), E[x^j; x <= t] for j = 0..4; t may be infinite.
    """

    name: str
    partial: Callable[[Array], Array]


def gaussian(mean: float = 0.0, sd: float = 1.0) -> Law:
    """N(mean, sd^2), sd > 0.  Raises ValueError for another sd, or a mean that is not finite.

    With t^(j-1) phi the derivative of nothing simpler, integration by parts gives the recursion
    E_j = mean E_(j-1) + (j-1) sd^2 E_(j-2) - sd t^(j-1) phi((t - mean) / sd).
    """
    check_positive("sd", sd)
    if not math.isfinite(mean):
        raise ValueError(f"mean must be finite; got {mean!r}")

    def partial(t: Array) -> Array:
        z = np.clip((np.asarray(t, np.float64) - mean) / sd, -40.0, 40.0)  # phi(40) = 1e-348: zero
        t = mean + sd * z
        moments = np.zeros((ORDERS, *z.shape))
        density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
        moments[0] = ndtr(z)
        for j in range(1, ORDERS):
            moments[j] = mean * moments[j - 1] - sd * t ** (j - 1) * density
            if j > 1:
                moments[j] += (j - 1) * sd**2 * moments[j - 2]
        return moments

    return Law(f"N({mean:g}, {sd:g})", partial)


def lognormal(median: float = 1.0, sd: float = 1.0) -> Law:
    """median * exp(sd z), z standard normal.  Raises ValueError unless both are positive.

    E[x^j; x <= t] = median^j exp(j^2 sd^2 / 2) Phi(log(t / median) / sd - j sd).
    """
    check_positive("median", median)
    check_positive("sd", sd)

    def partial(t: Array) -> Array:
        t = np.asarray(t, np.float64)
        z = np.log(np.where(t > 0, t, 1.0) / median) / sd
        j = np.arange(ORDERS, dtype=np.float64).reshape(-1, *(1,) * t.ndim)
        whole = median**j * np.exp(j**2 * sd**2 / 2)
        return np.where(t > 0, whole * ndtr(z - j * sd), 0.0)

    return Law(f"lognormal({median:g}, {sd:g})", partial)


def from_cdf(cdf: Callable[[Array], Array], low: float, high: float, name: str = "cdf") -> Law:
    """Any law on [low, high] by its cumulative distribution function, smooth between quantiles.

    E[x^j; x <= t] = t^j F(t) - integral of j x^(j-1) F, by Gauss-Legendre quadrature on panels
    between the law's own quantiles.  Raises ValueError unless low < high are finite and hold all
    but 1e-9 of the law.
    """
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"low and high must be finite, low < high; got {low!r}, {high!r}")
    ends = np.asarray(cdf(np.array([low, high], np.float64)))
    if not (0 <= ends[0] <= 1e-9 and 1 - 1e-9 <= ends[1] <= 1 + 1e-12):
        raise ValueError(f"cdf must go from 0 at low to 1 at high; got {ends[0]!r}, {ends[1]!r}")
    nodes, weights = np.polynomial.legendre.leggauss(20)
    edges = np.unique([low, *_quantiles(cdf, low, high), high])

    def integrals(a: Array, b: Array) -> Array:
        """j x^(j-1) F(x) from a to b, (4, ...) for j = 1..4."""
        x = (a + b)[..., None] / 2 + (b - a)[..., None] / 2 * nodes
        values = np.asarray(cdf(x)) * weights * (b - a)[..., None] / 2
        return np.stack([(j * x ** (j - 1) * values).sum(-1) for j in range(1, ORDERS)])

    below = np.zeros((ORDERS - 1, len(edges)))
    below[:, 1:] = integrals(edges[:-1], edges[1:]).cumsum(-1)

    def partial(t: Array) -> Array:
        t = np.clip(np.asarray(t, np.float64), low, high)
        panel = np.clip(np.searchsorted(edges, t) - 1, 0, len(edges) - 2)
        inside = below[:, panel] + integrals(edges[panel], t)
        f = np.asarray(cdf(t), np.float64)
        return np.stack([f, *(t**j * f - inside[j - 1] for j in range(1, ORDERS))])

    return Law(name, partial)


def _quantiles(cdf: Callable[[Array], Array], low: float, high: float) -> Array:
    """Where the cdf passes 96 probabilities spaced evenly in log odds, by bisection."""
    probabilities = 1 / (1 + np.exp(-np.linspace(-36.0, 36.0, 96)))
    a, b = np.full(96, float(low)), np.full(96, float(high))
    for _ in range(200):  # enough for any two floats
        middle = a + (b - a) / 2
        above = np.asarray(cdf(middle)) >= probabilities
        a, b = np.where(above, a, middle), np.where(above, middle, b)
    return b


def check_positive(name: str, value: float) -> None:
    """ValueError unless ``value`` is positive and finite."""
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be positive and finite; got {value!r}")
