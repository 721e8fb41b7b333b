"""Almost-sure stability without simulation: the top Lyapunov exponent and its generalizations.

The state grows by random matrices, (x, m) <- A(G_t) (x, m); a single run follows

    exponent L = lim log |(x_t, m_t)| / t      (almost surely, Furstenberg and Kesten 1960),

while moments follow log E |(x_t, m_t)|^p / t -> Q(p), a convex function with Q(0) = 0, Q'(0) = L
and Q(2) = log of the second-moment map's spectral radius.  So L <= Q(2) / 2 (Jensen): what is
stable in mean square is stable almost surely, and the converse is false.

Gradient descent: L = E log |1 - a G|, one integral.  With momentum the growth of a step depends on
the direction of the state, which is itself a Markov chain, on the half circle of angles.  The
chain's transfer operator on an even grid of angles (linear interpolation between neighbours) is a
matrix of transition probabilities, and L follows from its Poisson equation.  The error falls with
the square of the grid: below 1e-3 of the threshold on 512 angles against 1024 (tests), but for
two-point gains at b near 0.5, where it can reach 2e-3 (the invariant law is then not smooth), and
for b towards 0, where steps turn a state by up to a right angle and it reaches 3e-3.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.integrate import tanhsinh

from mxsim.theory.model import TAILS, Gains, check, coefficients
from mxsim.threads import one_blas_thread

Array = NDArray[Any]

GRID = 512  # angles on the half circle
NODES = 513  # gains in the quadrature


def growth_exponent(
    optimizer: str,
    eta_lam: float,
    b: float = 0.0,
    gains: Gains = Gains(),  # noqa: B008  (frozen)
    grid: int = GRID,
    nodes: int = NODES,
) -> float:
    """L, in nats a step; negative: almost every run tends to 0.  -inf if a step can hit 0 exactly.

    grid and nodes are the resolution with momentum; gradient descent is integrated adaptively.
    Raises ValueError for a rate <= 0 and as ``check``.
    """
    k, b = _in_heavy_ball_units(optimizer, eta_lam, b)
    if b == 0:
        return _descent_mean(gains, k, lambda factor: np.log(np.abs(factor)))
    chain, growth = _angle_chain(k, b, gains, grid, nodes, 0.0)
    # Poisson equation f - P f + L = growth has one solution with f = 0 at the first angle, since P
    # has the simple eigenvalue 1: the unknown f[0] makes room for L.
    system = np.eye(grid) - chain
    system[:, 0] = 1.0
    with one_blas_thread():
        return float(np.linalg.solve(system, growth)[0])


def moment_growth(
    optimizer: str,
    eta_lam: float,
    order: float,
    b: float = 0.0,
    gains: Gains = Gains(),  # noqa: B008  (frozen)
    grid: int = GRID // 2,
    nodes: int = NODES,
) -> float:
    """Q(order), in nats a step: how fast E |state|^order grows.  Raises as ``growth_exponent``.

    With momentum: log of the Perron eigenvalue of the transfer operator weighted by the step's
    growth to the power ``order``.
    """
    k, b = _in_heavy_ball_units(optimizer, eta_lam, b)
    if b == 0:
        return math.log(_descent_mean(gains, k, lambda factor: np.abs(factor) ** order))
    weighted, _ = _angle_chain(k, b, gains, grid, nodes, order)
    with one_blas_thread():
        return math.log(float(np.linalg.eigvals(weighted).real.max()))


def _in_heavy_ball_units(optimizer: str, eta_lam: float, b: float) -> tuple[float, float]:
    """(k, b) of v <- b v + G x, x <- x - k v."""
    check(optimizer, b)
    if not 0 < eta_lam < math.inf:
        raise ValueError(f"eta_lam must be positive and finite; got {eta_lam}")
    b, c = coefficients(optimizer, b)
    return eta_lam * c, b


def _descent_mean(gains: Gains, k: float, of: Any) -> float:
    """E of(1 - k G); ``of`` may have an integrable singularity where 1 - k G = 0."""
    if gains.s2 == 0 or gains.distribution == "two_point":
        values, weights = gains.quadrature(2)
        with np.errstate(divide="ignore"):
            return float(weights @ of(1 - k * values))

    def integrand(n: Array) -> Array:
        values = of(1 - k * gains.of_normal(n)) * np.exp(-n * n / 2)
        return np.where(np.isfinite(values), values, 0.0)  # at the singularity itself, of weight 0

    singular = min(max(_normal_of(gains, 1 / k), -TAILS), TAILS)
    ends = np.array([-TAILS, singular]), np.array([singular, TAILS])
    with np.errstate(divide="ignore"):  # double exponential: the singularity is at an end
        parts = tanhsinh(integrand, *ends, atol=1e-12, rtol=1e-12, maxlevel=12)
    return float(parts.integral.sum()) / math.sqrt(2 * math.pi)


def _normal_of(gains: Gains, gain: float) -> float:
    """The standard normal variable at which the (gaussian or lognormal) gain has this value > 0."""
    mean = 1 + gains.mu
    if gains.distribution == "gaussian":
        return (gain - mean) / math.sqrt(gains.s2)
    log_variance = math.log1p(gains.s2 / mean**2)
    return (math.log(gain / mean) + log_variance / 2) / math.sqrt(log_variance)


def _angle_chain(
    k: float, b: float, gains: Gains, grid: int, nodes: int, order: float
) -> tuple[Array, Array]:
    """Transition matrix (grid, grid) weighted by growth^order, and E log growth (grid,) by angle.

    Coordinates (x, y = sqrt(k) v), in which a step is
        x' = (1 - k G) x - b sqrt(k) y,     y' = sqrt(k) G x + b y:
    close to a rotation, so that the angle moves evenly.  Exponents do not depend on coordinates.
    A direction and its opposite are one point, hence the half circle.
    """
    values, weights = gains.quadrature(nodes)
    angle = np.arange(grid)[:, None] * (math.pi / grid)
    x, y = np.cos(angle), np.sin(angle)
    new_x = (1 - k * values) * x - b * math.sqrt(k) * y  # (grid, nodes)
    new_y = math.sqrt(k) * values * x + b * y
    squared = new_x**2 + new_y**2  # positive: the determinant is b > 0
    place = np.mod(np.arctan2(new_y, new_x), math.pi) * (grid / math.pi)
    left = np.floor(place).astype(np.intp)
    right_share = place - left
    weight = weights * squared ** (order / 2)
    row = np.arange(grid)[:, None] * grid
    matrix = np.bincount(
        (row + left % grid).ravel(), (weight * (1 - right_share)).ravel(), grid * grid
    )
    matrix += np.bincount(
        (row + (left + 1) % grid).ravel(), (weight * right_share).ravel(), grid * grid
    )
    return matrix.reshape(grid, grid), 0.5 * np.log(squared) @ weights
