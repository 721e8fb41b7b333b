"""Stability in mean and in mean square, derived with sympy from the update rules, step by step.

1. ``update_matrix``: one step is linear in the state, (x, m) <- A(G) (x, m), G = 1 + z the gain.
2. ``mean_map``: G is independent of the state it multiplies, so E (x, m) <- A(w) E (x, m), w = E G.
3. ``second_moment_map``: (E x^2, E x m, E m^2) likewise follow a fixed 3 x 3 matrix, exactly.
4. ``jury``: all roots of the characteristic polynomial lie inside the unit circle iff a few
   polynomials in the coefficients are positive (Jury 1962; no eigenvalue is computed).
5. ``derive``: one of them binds; it is solved for the rate.  ``Derivation.certificates`` prove that
   the others hold wherever that one does.

Symbols: a = eta lam, the rate; b the momentum; w = 1 + mu the mean gain, w > 0; s2 its variance.
Plain gradient descent is the case b = 0, whose m has no memory (an extra eigenvalue 0).

This module imports sympy; ``mxsim.theory.stability`` imports it only when a threshold is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import sympy as sp  # type: ignore[import-untyped, unused-ignore]

from mxsim.theory.model import coefficients

Expression = Any  # sympy has no types

RATE = sp.Symbol("a", positive=True)
MOMENTUM = sp.Symbol("b", nonnegative=True)
MEAN_GAIN = sp.Symbol("w", positive=True)
VARIANCE = sp.Symbol("s2", nonnegative=True)
GAIN = sp.Symbol("G", real=True)
ROOT = sp.Symbol("r")


def momentum(optimizer: str) -> Expression:
    """The symbol b, or 0 for gd."""
    return coefficients(optimizer, MOMENTUM)[0]


def update_matrix(optimizer: str) -> Expression:
    """A(G), (2, 2), of (x, m) <- A(G) (x, m).

    With m' = b m + c G x and x' = x - a m' (lam = 1):
        x' = (1 - a c G) x - a b m
        m' =       c G   x +   b m
    Its determinant is b whatever G is: the product of the two factors by which a step stretches.
    """
    b, c = coefficients(optimizer, MOMENTUM)
    x, m = sp.symbols("x m", real=True)
    new_m = b * m + c * GAIN * x
    new_x = x - RATE * new_m
    return sp.Matrix([[sp.expand(row).coeff(v) for v in (x, m)] for row in (new_x, new_m)])


def expectation(expression: Expression) -> Expression:
    """E over the gain of a polynomial of degree 2 in it: E G = w, E G^2 = w^2 + s2."""
    polynomial = sp.Poly(sp.expand(expression), GAIN)
    if polynomial.degree() > 2:
        raise ValueError(f"only two moments of the gain are known; got {expression}")
    moments = {0: sp.Integer(1), 1: MEAN_GAIN, 2: MEAN_GAIN**2 + VARIANCE}
    return sp.Add(*(value * moments[power] for (power,), value in polynomial.terms()))


def mean_map(optimizer: str) -> Expression:
    """(2, 2) matrix of (E x, E m) from step to step.

    E[A(G) (x, m)] = E[A(G)] E[(x, m)], since G is independent of the past.
    """
    return update_matrix(optimizer).applyfunc(expectation)


def second_moment_map(optimizer: str) -> Expression:
    """(3, 3) matrix of (E x^2, E x m, E m^2) from step to step.

    The products x'^2, x' m', m'^2 are quadratic in (x, m) with coefficients quadratic in G; the
    expectation factorizes for the same reason.  So this is exact, with no assumption on the
    distribution of G but its two moments.
    """
    x, m = sp.symbols("x m", real=True)
    new_x, new_m = update_matrix(optimizer) * sp.Matrix([x, m])
    rows = []
    for product in (new_x**2, new_x * new_m, new_m**2):
        polynomial = sp.Poly(sp.expand(product), x, m)
        rows.append([expectation(polynomial.coeff_monomial(each)) for each in (x**2, x * m, m**2)])
    return sp.Matrix(rows)


def jury(polynomial: tuple[Expression, ...]) -> Mapping[str, Expression]:
    """Margins, all positive iff all roots of r^n + p[n-1] r^(n-1) + ... + p[0] have |r| < 1.

    polynomial: (p[n-1], ..., p[0]), n = 2 or 3.  For n = 3 Jury's last condition is
    1 - p0^2 > |p1 - p0 p2|.  Only its upper half is listed: p(1) > 0 and -p(-1) > 0 say
    |p0 + p2| < 1 + p1, so that, given |p0| < 1,
        1 - p0^2 + p1 - p0 p2 = 1 + p1 - p0 (p0 + p2) >= (1 + p1) (1 - |p0|) > 0.
    """
    if len(polynomial) == 2:
        p1, p0 = polynomial
        return {"p(1)": 1 + p1 + p0, "p(-1)": 1 - p1 + p0, "1 - p0^2": 1 - p0**2}
    if len(polynomial) == 3:
        p2, p1, p0 = polynomial
        return {
            "p(1)": 1 + p2 + p1 + p0,
            "-p(-1)": 1 - p2 + p1 - p0,
            "1 - p0^2": 1 - p0**2,
            "1 - p1 + p0 p2 - p0^2": 1 - p1 + p0 * p2 - p0**2,
        }
    raise ValueError(f"polynomial must hold 2 or 3 coefficients; got {len(polynomial)}")


@dataclass(frozen=True)
class Derivation:
    """What was derived for one optimizer and one notion of stability.

    - matrix: the map of the moments from step to step.
    - margins: Jury's conditions, each > 0.
    - binding: the name of the one that fails first as the rate grows, for all b in [0, 1), w > 0,
      s2 >= 0.
    - certificates: the margins again, written so that their sign can be read off (see ``derive``).
    - threshold: the largest stable rate a = eta lam, in b, w and s2.
    """

    matrix: Expression
    margins: Mapping[str, Expression]
    binding: str
    certificates: Mapping[str, Expression]
    threshold: Expression


def mean_certificates(optimizer: str) -> Mapping[str, Expression]:
    """The margins of the mean map: p(1) and 1 - b^2 are positive at any rate, p(-1) is not.

    p(-1) > 0 fails first, at an eigenvalue -1: the mean flips its sign each step and grows.
    """
    b, c = coefficients(optimizer, MOMENTUM)
    k = RATE * c  # the rate in heavy ball's units
    return {
        "p(1)": k * MEAN_GAIN,
        "p(-1)": 2 * (1 + b) - k * MEAN_GAIN,
        "1 - p0^2": (1 - b) * (1 + b),
    }


def mean_square_certificates(optimizer: str) -> Mapping[str, Expression]:
    """The margins of the second-moment map, for b in [0, 1), w > 0, s2 >= 0, with k = a c.

    - p(1) = k [(1-b) w (2 (1+b) - k w) - k (1+b) s2].  Where it is positive, so is
      2 (1+b) - k w (else both terms were <= 0): stability in mean square contains that in mean.
    - -p(-1) is a sum of squares with (1+b) (1-b)^2 > 0: positive at any rate.
    - 1 - p0^2 = 1 - b^6.
    - the last one is k w (2 (1+b) - k w) times something >= 0, plus a term >= 0, plus
      (1+b) (1-b^3) (1-b)^2 > 0: positive wherever p(1) is.
    So p(1) > 0 is necessary and sufficient: the eigenvalue 1 is crossed, E x^2 grows steadily.
    None of this holds for w <= 0 (p(1) < 0 at every rate unless w = s2 = 0), nor is it claimed for
    b < 0.
    """
    b, c = coefficients(optimizer, MOMENTUM)
    k, w, s2 = RATE * c, MEAN_GAIN, VARIANCE
    slack = 2 * (1 + b) - k * w
    return {
        "p(1)": k * ((1 - b) * w * slack - k * (1 + b) * s2),
        "-p(-1)": (1 + b) * ((k * w - 1 - b) ** 2 + (1 - b) ** 2) + (1 - b) * s2 * k**2,
        "1 - p0^2": 1 - b**6,
        "1 - p1 + p0 p2 - p0^2": b * (1 - b**2) * k * w * slack
        + b * (1 + b**2) * s2 * k**2
        + (1 + b) * (1 - b**3) * (1 - b) ** 2,
    }


def derive(matrix: Expression, binding: str, certificates: Mapping[str, Expression]) -> Derivation:
    """Jury's conditions for the matrix, checked against the certificates, solved for the rate.

    The binding margin is, up to a factor that is positive, linear in the rate: one root.
    Raises ArithmeticError if a certificate is not the margin it stands for.
    """
    _, *below = matrix.charpoly(ROOT).all_coeffs()
    margins = jury(tuple(below))
    for name, margin in margins.items():
        if sp.expand(margin - certificates[name]) != 0:
            raise ArithmeticError(f"the certificate of {name} is another polynomial")
    (threshold,) = sp.solve(margins[binding], RATE)  # a symbol declared positive: not the root 0
    return Derivation(matrix, margins, binding, certificates, sp.factor(threshold))


@cache
def derive_mean(optimizer: str) -> Derivation:
    """E (x, m) -> 0.  Raises ValueError for an unknown optimizer."""
    return derive(mean_map(optimizer), "p(-1)", mean_certificates(optimizer))


@cache
def derive_mean_square(optimizer: str) -> Derivation:
    """E x^2, E m^2 -> 0.  Raises ValueError for an unknown optimizer."""
    matrix = second_moment_map(optimizer)
    return derive(matrix, "p(1)", mean_square_certificates(optimizer))


@cache
def numeric(optimizer: str, what: str) -> Any:
    """A NumPy function of (a, b, mu, s2).

    what: mean | mean_square, the thresholds (they do not depend on a); mean_map |
    second_moment_map, the matrices, for scalar arguments.
    """
    found: Expression
    if what == "mean":
        found = derive_mean(optimizer).threshold
    elif what == "mean_square":
        found = derive_mean_square(optimizer).threshold
    elif what == "mean_map":
        found = mean_map(optimizer)
    elif what == "second_moment_map":
        found = second_moment_map(optimizer)
    else:
        names = "mean, mean_square, mean_map, second_moment_map"
        raise ValueError(f"what must be a formula, one of {names}; got {what!r}")
    mu = sp.Symbol("mu", real=True)
    return sp.lambdify((RATE, MOMENTUM, mu, VARIANCE), found.subs(MEAN_GAIN, 1 + mu), "numpy")
