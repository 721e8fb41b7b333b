"""One step: up to which rate does it lower the loss?  From measured gain, bias and curvature.

    python -m mxsim.theory.descent      # the derivation, printed

With g the exact gradient, a step -eta g~ along a biased one, g~ = alpha g + r, r orthogonal to g,
|r| = rho |g| (alpha and rho as ``mxsim.gradient_bias`` reports them), and lam = g~^T H g~ / |g~|^2
the curvature along the step:

    eta* = 2 alpha / (lam (alpha^2 + rho^2)),       the best rate is eta* / 2.

For any step -s u (Adam, momentum; u need not be a gradient):  s* = 2 <g, u> / (u^T H u).

What it says and what not.  On a quadratic it is exact, for one step: the loss rises iff the rate is
above.  On another loss it holds to second order in the step, with H at the point.  It is not a
condition for training to be stable:
- lam is the curvature along this step, at most the top eigenvalue and usually far below it.  A rate
  below eta* may lower the loss now while the component along the top eigenvector, hardly present in
  g~, grows each step: for repeated steps ``mxsim.theory.stability`` decides.
- A rate above it raises the loss once, which need not go on.
It is sufficient for descent of every step only if it is evaluated at every step; with lam replaced
by the top eigenvalue of H it gives a lower bound on eta*.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


def derive() -> Mapping[str, Any]:
    """sympy expressions, by name; each line follows from those before.

    - change: loss(x - eta g~) - loss(x), in units of |g|^2.  The quadratic is exact:
      -eta <g, g~> + eta^2 g~^T H g~ / 2, with <g, g~> = alpha |g|^2 and, since r is orthogonal to
      g, |g~|^2 = (alpha^2 + rho^2) |g|^2.
    - critical_rate: its root other than 0.   optimal_rate: where its derivative is 0.
    - gain: the largest decrease, at the optimal rate, over that of the exact gradient at the same
      curvature: alpha^2 / (alpha^2 + rho^2) = cos(g, g~)^2, whatever the length of g~.
    - scale: the same root for a step -s u, from slope = <g, u> and bend = u^T H u.
    """
    import sympy as sp  # type: ignore[import-untyped, unused-ignore]

    alpha, rho, lam, eta = sp.symbols("alpha rho lambda eta", positive=True)
    change = -eta * alpha + eta**2 * lam * (alpha**2 + rho**2) / 2
    (critical,) = sp.solve(change, eta)  # a symbol declared positive: not the root 0
    (optimal,) = sp.solve(sp.diff(change, eta), eta)
    decrease = sp.factor(-change.subs(eta, optimal))
    exact = decrease.subs({alpha: 1, rho: 0})
    slope, bend, s = sp.symbols("slope bend s", positive=True)
    (scale,) = sp.solve(-s * slope + s**2 * bend / 2, s)
    return {
        "change": change,
        "critical_rate": sp.simplify(critical),
        "optimal_rate": sp.simplify(optimal),
        "gain": sp.simplify(decrease / exact),
        "scale": scale,
    }


def critical_rate(alpha: ArrayLike, rho: ArrayLike, lam: ArrayLike) -> Any:
    """eta*, below which every step -eta g~ lowers the loss; float for scalars, else an array.

    alpha: aligned gain; rho: orthogonal error, >= 0; lam: curvature along g~ (loss per squared
    unit of parameters).  0 where no small step does (alpha < 0, or alpha = 0 and lam >= 0), inf
    where every step does (alpha > 0 and lam <= 0).  Raises ValueError if rho is negative.
    """
    alpha, rho, lam = (np.asarray(each, dtype=float) for each in (alpha, rho, lam))
    if (rho < 0).any():
        raise ValueError(f"rho, a length over a length, must be at least 0; got {rho}")
    return _root(alpha, lam * (alpha**2 + rho**2))


def critical_scale(
    g: ArrayLike, u: ArrayLike, hvp: Callable[[Array], ArrayLike] | ArrayLike
) -> Any:
    """s*, below which every step -s u lowers the loss: 2 <g, u> / (u^T H u).

    g: the exact gradient; u: the step over minus the rate, e.g. momentum, or Adam's m / (sqrt(v) +
    eps); hvp: the function v -> H v, or H u itself.  All of one shape, which may be any.  s* is in
    units of the rate that multiplies u.  0 and inf as in ``critical_rate``.
    Raises ValueError for different shapes.
    """
    g, u = np.asarray(g), np.asarray(u)
    hu = np.asarray(hvp(u) if callable(hvp) else hvp)
    if not g.shape == u.shape == hu.shape:
        raise ValueError(
            f"g, u and H u must have one shape; got {g.shape}, {u.shape} and {hu.shape}"
        )
    g, u, hu = (each.astype(np.float64).ravel() for each in (g, u, hu))
    return _root(np.asarray(g @ u), np.asarray(u @ hu))


def _root(slope: Array, bend: Array) -> Any:
    """The positive root of -s slope + s^2 bend / 2, or 0 (uphill or flat), or inf (no end)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        root = _scale()(slope, bend)
    downhill = (slope > 0) | ((slope == 0) & (bend < 0))
    found = np.where(downhill, np.where((bend > 0), root, np.inf), 0.0)
    found = np.where(np.isnan(slope) | np.isnan(bend), np.nan, found)
    return found if found.ndim else float(found)


@cache
def _scale() -> Any:
    """The derived root as a NumPy function of (slope, bend)."""
    import sympy as sp

    scale = derive()["scale"]
    by_name = {symbol.name: symbol for symbol in scale.free_symbols}
    return sp.lambdify((by_name["slope"], by_name["bend"]), scale, "numpy")


def main() -> None:
    """Print the derivation."""
    for name, expression in derive().items():
        print(f"{name:15} {expression}")


if __name__ == "__main__":
    main()
