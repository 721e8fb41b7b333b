"""Curvature: the sharpness of a loss, curvature along a step, the edge of stability.

Operators are symmetric matrices given by their products, (size,) -> (size,): ``hvp`` makes that of
the exact proxy (mxsim.hessian).  Vectors are flat (size,), in the order of
mxsim.proxy.parameter_views.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

from mxsim.config import ProxyConfig
from mxsim.hessian import Hessian, hvp
from mxsim.optim import OptimizerState
from mxsim.threads import one_blas_thread

__all__ = [
    "Hessian",
    "Sharpness",
    "adam_preconditioner",
    "edge_of_stability",
    "hvp",
    "step_curvature",
    "top_eigenvalue",
]

Array = NDArray[Any]
Operator = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class Sharpness:
    """The ends of the spectrum of H, or of P^-1 H for a diagonal P > 0.

    - largest_algebraic: the sharpness, what stability thresholds multiply by the rate.
    - eigenvector (size,): unit w with P^-1 H w = lam w.  x <- x - eta P^-1 g moves the coordinate
      along w by -eta <w, g> / <w, P w>: gradients are projected on w itself.
    - residual: |S u - lam u| for the unit eigenvector u = P^1/2 w / |P^1/2 w| of the symmetric
      S = P^-1/2 H P^-1/2.  An eigenvalue lies within it of lam, and lam, a Rayleigh quotient, is
      not above the true largest.
    - smallest_algebraic, smallest_eigenvector, smallest_residual: of the other end; NaN and None
      unless both ends were asked for.
    - matvecs: Hessian-vector products spent.
    - converged: False where Lanczos gave up, and the pairs are those of its first sweep; where a
      residual is larger than asked for, as of an operator that is not symmetric; or where a product
      was not finite or all were zero, and they are NaN.
    """

    largest_algebraic: float
    eigenvector: Array
    residual: float
    smallest_algebraic: float
    smallest_eigenvector: Array | None
    smallest_residual: float
    matvecs: int
    converged: bool

    @property
    def largest_magnitude(self) -> float:
        """The eigenvalue largest in magnitude, with its sign; NaN unless both ends are known."""
        if math.isnan(self.smallest_algebraic):
            return math.nan
        return max(self.largest_algebraic, self.smallest_algebraic, key=abs)


def top_eigenvalue(
    hessian: Operator,
    size: int,
    *,
    preconditioner: ArrayLike | None = None,
    start: ArrayLike | None = None,
    both_ends: bool = False,
    tolerance: float = 1e-3,
    basis: int = 16,
    restarts: int = 50,
) -> Sharpness:
    """Largest eigenvalue of ``hessian`` or of P^-1 ``hessian``, by Lanczos (ARPACK).

    hessian: a symmetric operator (size,) -> (size,), of ``hvp`` or any other; preconditioner: the
    diagonal P (size,), positive.  start: an eigenvector found nearby (size,), to begin with.
    both_ends: the smallest algebraic eigenvalue as well.  tolerance: of residuals, in |lam|.
    A sweep takes ``basis`` products, and a whole one is always done: stopped where the tolerance is
    met, Lanczos would stay with a start that is an eigenvector, blind to another that has overtaken
    it.  A little noise, always the same, gives the others a part in the start; one is seen if it
    stands out by (log(8 size) / 4 basis)^2 of the spectrum's width (4 % for 17 000 parameters), the
    least for which Chebyshev polynomials of that degree lift it out of the noise.
    Raises ValueError for what does not fit.
    """
    if size < 3:
        raise ValueError(f"size must be at least 3; got {size}")
    if not (basis >= 3 and restarts >= 1 and tolerance >= 0):
        raise ValueError(
            "basis must be at least 3, restarts at least 1 and tolerance at least 0; got "
            f"{basis}, {restarts}, {tolerance}"
        )
    metric = _vector("preconditioner", 1.0 if preconditioner is None else preconditioner, size)
    usable = np.isfinite(metric) & (metric > 0)
    if not usable.all():
        value = metric[~usable][0]
        raise ValueError(f"preconditioner must be positive and finite; got {value} in it")
    root = np.sqrt(metric)
    first = np.random.default_rng(0).standard_normal(size)
    if start is not None:
        warm = _vector("start", start, size) * root
        norm = np.linalg.norm(warm)
        if not 0 < norm < math.inf:
            raise ValueError(f"start must be finite and not zero; got one of norm {norm}")
        first = 0.1 * first / np.linalg.norm(first) + warm / norm
    matvecs = 0

    def symmetric(u: Array) -> Array:
        nonlocal matvecs
        matvecs += 1
        product = hessian(u / root) / root
        if not np.isfinite(product).all():
            raise FloatingPointError
        return product

    def lanczos(tolerance: float, restarts: int) -> tuple[Array, Array]:
        values, vectors = eigsh(
            LinearOperator((size, size), matvec=symmetric, dtype=np.float64),
            k=2 if both_ends else 1,
            which="BE" if both_ends else "LA",
            v0=first,
            ncv=min(basis, size),
            tol=tolerance,
            maxiter=restarts,
        )
        return values, vectors.T

    with one_blas_thread(), np.errstate(all="ignore"):
        try:
            try:
                values, vectors = lanczos(tolerance, restarts)
                converged = True
            except ArpackNoConvergence:  # which tells nothing: take the pairs of one sweep
                values, vectors = lanczos(math.inf, 1)
                converged = False
            residuals = [
                float(np.linalg.norm(symmetric(u) - lam * u))
                for lam, u in zip(values, vectors, strict=True)
            ]
        except (FloatingPointError, ArpackError):
            nothing = np.full(size, math.nan)
            both = nothing if both_ends else None
            nan = math.nan
            return Sharpness(nan, nothing, nan, nan, both, nan, matvecs, converged=False)
        # ARPACK trusts the operator to be symmetric; the residual does not.
        limit = 2 * max(tolerance, 1e-12) * float(np.abs(values).max())
        converged = converged and max(residuals) <= limit
        own = vectors / root
        own /= np.linalg.norm(own, axis=1, keepdims=True)
    return Sharpness(
        largest_algebraic=float(values[-1]),
        eigenvector=own[-1],
        residual=residuals[-1],
        smallest_algebraic=float(values[0]) if both_ends else math.nan,
        smallest_eigenvector=own[0] if both_ends else None,
        smallest_residual=residuals[0] if both_ends else math.nan,
        matvecs=matvecs,
        converged=converged,
    )


def _vector(name: str, values: ArrayLike, size: int) -> Array:
    """``values`` as float64 (size,), a scalar repeated; ValueError for another shape."""
    array = np.asarray(values, np.float64)
    if array.shape not in ((), (size,)):
        raise ValueError(f"{name} must have shape ({size},); got {array.shape}")
    return np.broadcast_to(array, (size,))


def adam_preconditioner(state: OptimizerState, cfg: ProxyConfig) -> Array:
    """P = sqrt(v / (1 - beta2^t)) + eps of Adam after t updates, (size,) float64.

    The step is -eta P^-1 m / (1 - beta1^t).  The last factor, 1 to 0.5 % after 50 updates, is left
    to the rate; Cohen et al. (2022, arXiv:2207.14484) put it into P.
    Raises ValueError for SGD and before the first update.
    """
    if cfg.optimizer == "sgd":
        raise ValueError("optimizer must be adam or adamw for a preconditioner; got 'sgd'")
    if state.updates < 1:
        raise ValueError(f"state must have been updated; got {state.updates} updates")
    second = state.second.astype(np.float64)
    return np.asarray(np.sqrt(second / (1 - cfg.beta2**state.updates)) + cfg.adam_eps)


def step_curvature(hessian: Operator, u: ArrayLike, preconditioner: ArrayLike = 1.0) -> float:
    """u^T H u / u^T P u: the curvature along an update or a gradient u (size,); NaN for u = 0.

    With P a Rayleigh quotient of P^-1 H, between the smallest and the largest eigenvalue.
    """
    step = np.asarray(u, np.float64)
    weighted = step * _vector("preconditioner", preconditioner, len(step))
    with one_blas_thread(), np.errstate(all="ignore"):
        return float(np.divide(step @ hessian(step), step @ weighted))


def edge_of_stability(cfg: ProxyConfig) -> float:
    """The eta * lam above which cfg's optimizer leaves a quadratic valley of curvature lam.

    SGD: 2 (1 + momentum), momentum in PyTorch's form (heavy ball).  Adam, by the curvature of
    P^-1 H with P held fixed: 2 (1 + beta1) / (1 - beta1) (Cohen et al. 2022, arXiv:2207.14484).
    """
    if cfg.optimizer == "sgd":
        return 2 * (1 + cfg.momentum)
    return 2 * (1 + cfg.beta1) / (1 - cfg.beta1)
