"""The noise floor: when does the exact gradient fall below the error that quantization adds?

    python -m mxsim.theory.noise_floor      # the derivation, and a simulation beside it

A linear student y_hat = W x with o outputs learns y = W* x + n: x ~ N(0, S), n independent of x,
of variance sigma^2 an entry.  The forward pass computes W x + delta(x).  On a batch of B, with the
mean squared error and a straight-through estimator,

    g   = 2/(o B) sum [(W - W*) x - n] x^T         the exact gradient
    eps = 2/(o B) sum delta x^T                    what quantization adds; it knows nothing of n

so that g shrinks with the loss and eps does not.  In units of the loss, per entry: the excess
e = E |(W - W*) x|^2 / o, the error's own q2 = E |delta|^2 / o, the noise sigma^2.  Then

    zeta^2 = E |eps|^2 / E |g|^2
           = q2 [(1 + 1/B) ke + t/B] / {e [(1 + 1/B) ks + t/B] + sigma^2 t/B}

with t = tr S, the squared length of a sample's features, and two weighted means of the eigenvalues
of S: of the signal, ks = |E A x x^T|^2 / E |A x|^2, A = W - W* what is left to learn; and of the
error, ke = |E delta x^T|^2 / E |delta|^2 (lowered by any part of it that is not linear in x).  For
S = I (d features) and delta = D x: ks = ke = 1, t = d, with nothing to fit:

    zeta^2 = q2 (B + d + 1) / [e (B + d + 1) + sigma^2 d]
    zeta = 1 at e = q2 - sigma^2 d / (B + d + 1);  zeta = sqrt(q2 (B + d + 1) / d) / sigma at e = 0

What it says and what not.  Expectations are exact at any B (Gaussian fourth moments), for an error
that is a fixed function of x over the batch and, given delta = D x + rest, a rest that is as
independent of x as n is.  zeta is a ratio of root mean squares; one batch's ratio scatters about
it.  zeta > 1 does not mean that training fails: with D constant, g + eps is the gradient of another
loss of the same curvature, whose minimum, W = W* - D, lies at e = q2.  There E eps = -E g: a run
under such an error comes to rest where |E eps| / |E g| = 1.

A network is linear in its weights near a point, its features the Jacobian's rows; ``Features`` can
then be measured (``measured_features``).  studies/noise_floor.py says how far that carries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]
Expression = Any  # sympy has no types

ARGUMENTS = ("e", "q2", "sigma2", "B", "t", "ks", "ke", "r2")


@dataclass(frozen=True, eq=False)
class Features:
    """What of the features' covariance S enters; numbers, or arrays that broadcast.

    - trace: t = tr S > 0.
    - signal: ks >= 0, the mean eigenvalue of S weighted by what is left to learn.
    - error: ke >= 0, the same of the forward error; 0 for one that is pure noise over samples.

    Only ratios matter.  From about t / ke samples on, the common part of their errors outweighs
    the part that averages away; t / ks says the same of the gradient.
    """

    trace: ArrayLike
    signal: ArrayLike = 1.0
    error: ArrayLike = 1.0

    def __post_init__(self) -> None:
        if (np.asarray(self.trace) <= 0).any():
            raise ValueError(f"trace must be positive; got {self.trace!r}")
        for name in ("signal", "error"):
            if (np.asarray(getattr(self, name)) < 0).any():
                raise ValueError(f"{name} must be at least 0; got {getattr(self, name)!r}")


def isotropic(width: int) -> Features:
    """S = I of ``width`` features and an error linear in them."""
    if width < 1:
        raise ValueError(f"width must be at least 1; got {width}")
    return Features(float(width))


# ---------------------------------------------------------------- derivation


@cache
def derive() -> Mapping[str, Expression]:
    """sympy expressions, by name; each line follows from those before.

    In the eigenbasis of S a row a of A = W - W* has independent components, each contributing
    alone (odd moments vanish); s is the eigenvalue of one.

    - fourth: E x_i^4, by integration.
    - single: of E |a x x^T|^2 over one sample, the part of a_i^2: E x_i^2 |x|^2
      = E x_i^4 + s (t - s).
    - mean: the same of |E a x x^T|^2: s^2.
    - batch: of E |a C|^2, C the sample covariance of B: B (B-1) pairs of different samples and B of
      equal ones, over B^2.  (In matrices: E C^2 = (1 + 1/B) S^2 + S tr(S) / B.)
    - gradient, error: E |g|^2, E |eps|^2 in units of 4 / o.  Sums over components: sum a_i^2 s
      = o e, sum a_i^2 s^2 = o e ks; likewise q2 and ke of the error.  A rest of the error that is
      noise over samples counts in q2 but not in q2 ke: t q2 / B is what it adds, as n adds its own.
    - backward: E |eps|^2 of independent relative errors of the entries of dy, mean square r2.
    - zeta2, backward_zeta2: over the gradient.   crossing: the e where zeta2 = 1.
    - floor: zeta2 at e = 0.   critical_batch: the B where that is 1.   systematic: B -> infinity,
      where zeta is |E eps| / |E g|.
    """
    import sympy as sp  # type: ignore[import-untyped, unused-ignore]

    names = {name: sp.Symbol(name, positive=True) for name in ARGUMENTS}
    e, q2, sigma2, batch, t, ks, ke, r2 = names.values()
    s, x = sp.Symbol("s", positive=True), sp.Symbol("x", real=True)
    density = sp.exp(-(x**2) / (2 * s)) / sp.sqrt(2 * sp.pi * s)
    fourth = sp.integrate(x**4 * density, (x, -sp.oo, sp.oo))
    single = sp.expand(fourth + s * (t - s))
    mean = s**2
    of_batch = sp.expand((batch * (batch - 1) * mean + batch * single) / batch**2)

    def summed(component: Expression, power: Expression, eigenvalue: Expression) -> Expression:
        """Sum over components of a_i^2 component(s), over o."""
        (first, second) = (sp.Poly(component, s).coeff_monomial(s**n) for n in (1, 2))
        assert sp.expand(component - first * s - second * s**2) == 0
        return power * (first + second * eigenvalue)

    noise = sigma2 * t  # E |n|^2 |x|^2 / o, of one sample; over a batch it averages
    gradient = summed(of_batch, e, ks) + noise / batch
    error = summed(of_batch, q2, ke)
    backward = r2 * (summed(single, e, ks) + noise) / batch
    zeta2 = sp.simplify(error / gradient)
    (crossing,) = sp.solve(error - gradient, e)
    floor = sp.simplify(zeta2.subs(e, 0))
    (critical,) = sp.solve(sp.numer(sp.together(floor - 1)), batch)
    return {
        "fourth": fourth,
        "single": single,
        "mean": mean,
        "batch": sp.collect(of_batch, s),
        "gradient": gradient,
        "error": error,
        "zeta2": zeta2,
        "crossing": sp.simplify(crossing),
        "floor": floor,
        "critical_batch": sp.factor(critical + 1) - 1,
        "systematic2": sp.limit(zeta2, batch, sp.oo),
        "backward": backward,
        "backward_zeta2": sp.simplify(backward / gradient),
    }


@cache
def _numeric(name: str) -> Any:
    """A derived expression as a NumPy function of ARGUMENTS."""
    import sympy as sp

    symbols = [sp.Symbol(each, positive=True) for each in ARGUMENTS]
    return sp.lambdify(symbols, derive()[name], "numpy")


def _value(
    name: str,
    features: Features,
    excess: ArrayLike = math.nan,
    added: ArrayLike = math.nan,
    noise: ArrayLike = math.nan,
    batch: ArrayLike = math.nan,
    relative: ArrayLike = math.nan,
) -> Array:
    given = {"excess": excess, "added": added, "noise": noise, "relative": relative}
    for what, value in given.items():
        if (np.asarray(value) < 0).any():
            raise ValueError(f"{what} must be at least 0; got {value!r}")
    if (np.asarray(batch) < 1).any():
        raise ValueError(f"batch must be at least 1; got {batch!r}")
    arrays = (
        np.asarray(each, np.float64)
        for each in (
            excess,
            added,
            noise,
            batch,
            features.trace,
            features.signal,
            features.error,
            np.square(relative),
        )
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(_numeric(name)(*arrays))


def _plain(found: Array) -> Any:
    return found if found.ndim else float(found)


# ---------------------------------------------------------------- numbers


def zeta(
    excess: ArrayLike, added: ArrayLike, noise: ArrayLike, batch: ArrayLike, features: Features
) -> Any:
    """Root mean square of eps over that of g; float for scalars, else an array (broadcast).

    excess: e, the loss above its floor; added: q2, the mean squared forward error; noise: sigma^2,
    label noise and what else no student can follow (``mxsim.floor``); all mean squares an entry.
    batch: samples.  inf where the gradient is 0.  Raises ValueError for a negative argument, and
    for batch < 1.
    """
    return _plain(np.sqrt(_value("zeta2", features, excess, added, noise, batch)))


def systematic_zeta(excess: ArrayLike, added: ArrayLike, features: Features) -> Any:
    """|E eps| / |E g|, the limit of ``zeta`` for large batches: sqrt(q2 ke / (e ks)).

    It has no floor.  What ``mxsim.bias_over_batches`` estimates as ``systematic``, at any batch.
    """
    return _plain(np.sqrt(_value("systematic2", features, excess, added)))


def crossing_excess(
    added: ArrayLike, noise: ArrayLike, batch: ArrayLike, features: Features
) -> Any:
    """The excess loss below which zeta > 1; 0 if there is none (``critical_batch``)."""
    found = _value("crossing", features, added=added, noise=noise, batch=batch)
    return _plain(np.maximum(found, 0.0))


def floor_zeta(added: ArrayLike, noise: ArrayLike, batch: ArrayLike, features: Features) -> Any:
    """The largest zeta, at excess 0: sqrt(q2 [1 + (B + 1) ke / t]) / sigma; inf without noise.

    It grows as sqrt(B) once B ke > t (isotropic: B > d); for batches far smaller it is
    sqrt(q2) / sigma.
    """
    return _plain(np.sqrt(_value("floor", features, added=added, noise=noise, batch=batch)))


def critical_batch(added: ArrayLike, noise: ArrayLike, features: Features) -> Any:
    """The batch above which zeta exceeds 1 near the floor: (sigma^2 / q2 - 1) t / ke - 1.

    A real number, below 1 (even negative) where every batch does; inf for ke = 0 or q2 = 0.
    """
    return _plain(_value("critical_batch", features, added=added, noise=noise))


def backward_zeta(
    excess: ArrayLike, noise: ArrayLike, batch: ArrayLike, relative: ArrayLike, features: Features
) -> Any:
    """zeta of rounding dy: independent relative errors of its entries, zero mean, rms ``relative``.

    At most ``relative``, which it is at the floor at any batch: there the gradient is as much an
    average of independent terms as the error is.  Far above the floor the gradient is not, and
    zeta falls to relative sqrt((t + 2 ks) / (t + (B + 1) ks)).  Its systematic part is 0.  (A
    factor 1 + c common to all entries is another matter: zeta = |c| at any loss and batch.)
    """
    found = _value("backward_zeta2", features, excess, noise=noise, batch=batch, relative=relative)
    return _plain(np.sqrt(found))


def measured_features(
    excess: ArrayLike,
    added: ArrayLike,
    noise: ArrayLike,
    outputs: int,
    gradient_mean: ArrayLike,
    gradient_variance: ArrayLike,
    error_mean: ArrayLike,
) -> Features:
    """The features of a student that is not linear, from the moments of its gradients.

    gradient_mean: |E g|^2; gradient_variance: tr Cov g of a batch of one; error_mean: |E eps|^2.
    The inverse of the model: ks = |E g|^2 o / 4e, ke = |E eps|^2 o / 4 q2, and t from
    tr Cov g = (4 / o) [e (ks + t) + sigma^2 t].  Negative estimates of squares count as 0.
    """
    unit = outputs / 4
    e, q2, s2 = (np.asarray(each, np.float64) for each in (excess, added, noise))
    seen = unit * np.maximum(gradient_mean, 0)
    return Features(
        trace=(unit * np.asarray(gradient_variance) - seen) / (e + s2),
        signal=seen / e,
        error=unit * np.maximum(error_mean, 0) / q2,
    )


# ---------------------------------------------------------------- simulation


@dataclass(frozen=True)
class Simulated:
    """Means over ``repeats`` batches, and their standard errors, of |g|^2 and |eps|^2."""

    gradient: float
    gradient_error: float
    error: float
    error_error: float


def simulate(
    a: Array, d: Array, roots: Array, sigma: float, batch: int, repeats: int, seed: int
) -> Simulated:
    """Draw batches and compute gradients: no expectation is used.

    a = W - W* and d, of the error delta = d x, (o, i); roots (i,), square roots of the eigenvalues
    of S, which is diagonal; sigma: noise of an entry.
    """
    rng = np.random.default_rng(seed)
    squares = np.empty((2, repeats))
    for j in range(repeats):
        x = rng.standard_normal((batch, a.shape[1])) * roots
        n = sigma * rng.standard_normal((batch, len(a)))
        scale = 2 / (len(a) * batch)
        g = scale * (x @ a.T - n).T @ x
        eps = scale * (x @ d.T).T @ x
        squares[:, j] = (g**2).sum(), (eps**2).sum()
    mean, error = squares.mean(axis=1), squares.std(axis=1, ddof=1) / math.sqrt(repeats)
    return Simulated(float(mean[0]), float(error[0]), float(mean[1]), float(error[1]))


def main() -> None:
    """Print the derivation, then zeta by formula beside zeta by simulation."""
    for name, expression in derive().items():
        print(f"{name:15} {expression}")
    rng = np.random.default_rng(0)
    outputs, inputs, sigma, repeats = 24, 32, 0.15, 400
    a, d = (scale * rng.standard_normal((outputs, inputs)) for scale in (0.01, 0.02))
    print(
        f"\n{outputs} outputs, {inputs} inputs, sigma {sigma}, {repeats} batches; deviation of "
        "|g|^2 and |eps|^2 in standard errors"
    )
    print("eigenvalues    batch     zeta   simulated   deviations    at the floor   crossing e")
    for label, spectrum in (
        ("all 1", np.ones(inputs)),
        ("1 to 1/32", 1 / np.arange(1, inputs + 1)),
    ):
        power, added = ((m**2 * spectrum).sum() for m in (a, d))
        features = Features(
            spectrum.sum(),
            (a**2 * spectrum**2).sum() / power,
            (d**2 * spectrum**2).sum() / added,
        )
        e, q2 = power / outputs, added / outputs
        for batch in (8, 32, 128, 512):
            found = simulate(a, d, np.sqrt(spectrum), sigma, batch, repeats, seed=batch)
            arguments = (e, q2, sigma**2, batch)
            expected = [
                4 / outputs * float(_value(name, features, *arguments))
                for name in ("gradient", "error")
            ]
            off = (found.gradient - expected[0]) / found.gradient_error
            error_off = (found.error - expected[1]) / found.error_error
            print(
                f"{label:12} {batch:7d}  {zeta(*arguments, features):7.4f}"
                f"  {math.sqrt(found.error / found.gradient):10.4f}  {off:+5.1f} {error_off:+5.1f}"
                f"  {floor_zeta(q2, sigma**2, batch, features):13.4f}"
                f"  {crossing_excess(q2, sigma**2, batch, features):11.6f}"
                f"  (e = {e:.5f}, q2 = {q2:.5f})"
            )


if __name__ == "__main__":
    main()
