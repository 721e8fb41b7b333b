"""The model behind the stability thresholds: update rules as data, gain distributions, checks.

One direction of a quadratic, loss lam x^2 / 2.  At step t the optimizer sees the gradient

    g_t = (1 + z_t) lam x_t,      z_t independent over t, mean mu, variance s2;

1 + z is called the gain.  Every optimizer here is an update of (x, m),

    m <- b m + c g,      x <- x - eta m,

so that it is no more than a pair (b, c).  Nothing changes if lam is set to 1 and eta to eta lam:
measure m in units of lam.  So rates and thresholds are in units of eta lam, dimensionless.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

OPTIMIZERS = ("gd", "heavy_ball", "ema", "adam")
DISTRIBUTIONS = ("gaussian", "two_point", "lognormal")
TAILS = 8.5  # standard deviations of the normal that quadrature covers: 2e-17 lies outside


def coefficients(optimizer: str, b: Any) -> tuple[Any, Any]:
    """(b, c) of m <- b m + c g; b may be a number or a symbol.

    - gd: (0, 1), x <- x - eta g.
    - heavy_ball: (b, 1), v <- b v + g.
    - ema: (b, 1 - b).  At the rate eta it takes the steps of heavy ball at (1 - b) eta.
    - adam: as ema, with lam = lambda_max(P^-1 H): with P = diag(sqrt(v) + eps) frozen and the bias
      correction left out (its factors 1 - b^t tend to 1), x <- x - eta P^-1 m.  In y = P^1/2 x this
      is ema on the curvature P^-1/2 H P^-1/2, which has the eigenvalues of P^-1 H; a gain common to
      all components of g leaves its eigendirections apart.

    Raises ValueError for another name.
    """
    if optimizer == "gd":
        return 0 * b, 1
    if optimizer == "heavy_ball":
        return b, 1
    if optimizer in ("ema", "adam"):
        return b, 1 - b
    raise ValueError(f"optimizer must be one of {OPTIMIZERS}; got {optimizer!r}")


def check(optimizer: str, b: Any, mu: Any = 0.0, s2: Any = 0.0) -> None:
    """Raise ValueError unless 0 <= b < 1 (0 for gd), mu > -1 and s2 >= 0, all finite."""
    coefficients(optimizer, 0.0)
    b, mu, s2 = (np.asarray(each, dtype=float) for each in (b, mu, s2))
    if not ((b >= 0) & (b < 1)).all():
        raise ValueError(f"b must satisfy 0 <= b < 1; got {b}")
    if optimizer == "gd" and (b != 0).any():
        raise ValueError(f"b must be 0 for gd, which has no momentum; got {b}")
    if not ((mu > -1) & (mu < np.inf)).all():
        raise ValueError(
            f"mu must be above -1, or the mean gradient does not point downhill and no rate is "
            f"stable; got {mu}"
        )
    if not ((s2 >= 0) & (s2 < np.inf)).all():
        raise ValueError(f"s2 must be >= 0 and finite; got {s2}")


@dataclass(frozen=True)
class Gains:
    """A distribution of the gain 1 + z with mean 1 + mu and variance s2.

    - gaussian: normal.  It crosses 0: now and then a step goes uphill.
    - two_point: 1 + mu - sqrt(s2) or 1 + mu + sqrt(s2), one half each.
    - lognormal: positive, with a heavy upper tail.

    Raises ValueError for another name, mu <= -1, s2 < 0.
    """

    distribution: str = "gaussian"
    mu: float = 0.0
    s2: float = 0.0

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS:
            raise ValueError(
                f"distribution must be one of {DISTRIBUTIONS}; got {self.distribution!r}"
            )
        check("gd", 0.0, self.mu, self.s2)

    def of_normal(self, n: Any) -> Any:
        """The gain as a function of a standard normal variable n (two_point: of its sign)."""
        mean, sd = 1 + self.mu, math.sqrt(self.s2)
        if self.distribution == "gaussian":
            return mean + sd * n
        if self.distribution == "two_point":
            return mean + sd * np.where(np.asarray(n) < 0, -1.0, 1.0)
        log_variance = math.log1p(self.s2 / mean**2)
        return mean * np.exp(math.sqrt(log_variance) * n - log_variance / 2)

    def draw(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Independent gains, float64."""
        return np.asarray(self.of_normal(rng.standard_normal(shape)))

    def quadrature(self, nodes: int) -> tuple[Array, Array]:
        """Values and probabilities (n,): n = 2 for two_point, 1 for s2 = 0, else ``nodes``.

        The trapezoidal rule over the normal variable converges faster than any power of the step
        for smooth integrands, and, unlike Gauss-Hermite, its nodes are even: a near-singularity
        anywhere is resolved alike.
        """
        if self.s2 == 0:
            return np.array([1 + self.mu]), np.ones(1)
        if self.distribution == "two_point":
            return np.asarray(self.of_normal(np.array([-1.0, 1.0]))), np.full(2, 0.5)
        n = np.linspace(-TAILS, TAILS, nodes)
        density = np.exp(-(n**2) / 2)
        return np.asarray(self.of_normal(n)), density / density.sum()
