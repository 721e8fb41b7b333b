"""A tight cluster of gains on paper: the clamp cliff, and what the code grid alone does to it.

Layer-norm gammas begin equal and stay close, so that one scale and a few codes serve them all and
what quantization does to them it does in common.  Blocks with a spread are in clamp.py, whose
exact sums hold both effects; here are the laws that explain them, derived with sympy.

    python -m mxsim.theory.cliff        # predictions beside measurements; ten seconds
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import sympy as sp  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import ArrayLike, NDArray

from mxsim.formats import FORMATS, SCALE_RULES, BlockFormat, as_format, choose
from mxsim.quantize import quantize
from mxsim.theory.clamp import bias_modes, clamp_shares, coherent_bias
from mxsim.theory.laws import check_positive, gaussian

Array = NDArray[Any]
Expression = Any  # sympy has no types

# ---------------------------------------------------------------- the cliff

SIGNIFICAND, TOP, THRESHOLD = sp.symbols("m top threshold", positive=True)


@dataclass(frozen=True)
class CliffLaw:
    """The cliff in symbols: a cluster of equal values with significand m, under one scale rule.

    bias: top / m - 1 where top < m < threshold, else 0; depth: its limit at the threshold;
    share, mean: of an octave that saturates, and of the bias, for log-uniform m (where the
    threshold is above top).
    """

    bias: Expression
    depth: Expression
    share: Expression
    mean: Expression


@cache
def cliff_law() -> CliffLaw:
    """Derive it: below the threshold a cluster m 2^k has the scale 2^(k - emax).

    So it is clamped to largest 2^(k - emax) = top 2^k, the factor top / m.  The averages are over
    the density 1 / (m log 2) of a log-uniform m in [1, 2).
    """
    m, top, threshold = SIGNIFICAND, TOP, THRESHOLD
    clamped = top / m - 1
    density = 1 / (m * sp.log(2))
    return CliffLaw(
        bias=sp.Piecewise((clamped, (m > top) & (m < threshold)), (0, True)),
        depth=clamped.subs(m, threshold),
        share=sp.integrate(density, (m, top, threshold)),
        mean=sp.integrate(sp.expand(clamped * density), (m, top, threshold)),
    )


@cache
def _of_cluster() -> Callable[..., Any]:
    return sp.lambdify((SIGNIFICAND, TOP, THRESHOLD), cliff_law().bias, "numpy")  # type: ignore[no-any-return]


@cache
def _of_octave() -> Callable[..., Any]:
    law = cliff_law()
    return sp.lambdify((TOP, THRESHOLD), (law.depth, law.share, law.mean), "numpy")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Cliff:
    """A format's cliff under a scale rule: clusters with significands in (begin, end) are clamped.

    depth: bias just below the end; share, mean: of an octave that saturates, and of the bias over
    it, for a log-uniform significand.  begin = end and zeros where the rule never saturates.
    """

    begin: float
    end: float
    depth: float
    share: float
    mean: float


def cliff(fmt: str | BlockFormat, scale_rule: str = "floor") -> Cliff:
    """The numbers of ``cliff_law``.  Raises ValueError for NVFP4, and as ``quantize``."""
    top, threshold = _ends(fmt, scale_rule)
    if threshold <= top:
        return Cliff(top, top, 0.0, 0.0, 0.0)
    return Cliff(top, threshold, *(float(v) for v in _of_octave()(top, threshold)))


def cliff_bias(
    significand: ArrayLike, fmt: str | BlockFormat, scale_rule: str = "floor"
) -> NDArray[np.float64]:
    """Bias of a cluster of equal values by clamping alone; significand (...) in [1, 2) -> (...).

    Raises ValueError outside [1, 2), and as ``cliff``.
    """
    top, threshold = _ends(fmt, scale_rule)
    m = np.asarray(significand, np.float64)
    if not ((m >= 1) & (m < 2)).all():
        raise ValueError(f"significand must lie in [1, 2); got {significand!r}")
    return np.asarray(_of_cluster()(m, top, threshold), np.float64)


def _format(fmt: str | BlockFormat, scale_rule: str) -> BlockFormat:
    form = as_format(fmt)
    choose("scale_rule", scale_rule, SCALE_RULES)
    if form.scale != "e8m0":
        raise ValueError(f"fmt must have an E8M0 scale; got {form.name}")
    return form


def _ends(fmt: str | BlockFormat, scale_rule: str) -> tuple[float, float]:
    form = _format(fmt, scale_rule)
    return form.element.top, form.bump_threshold(scale_rule)[0]


# ---------------------------------------------------------------- the grid


@cache
def sine_moment() -> Expression:
    """E[x sin(w x)], x ~ N(mean, sd^2), in (w, mean, sd): minus the derivative of E[cos(w x)].

    E[cos(w x)] is the real part of the characteristic function exp(i w mean - w^2 sd^2 / 2).
    """
    w, mean, sd = sp.symbols("w mean sd", real=True)
    cosine = sp.cos(w * mean) * sp.exp(-((w * sd) ** 2) / 2)
    return sp.Lambda((w, mean, sd), sp.simplify(-sp.diff(cosine, w)))


@cache
def _sine_moment() -> Callable[..., Any]:
    law = sine_moment()
    return sp.lambdify(law.variables, law.expr, "numpy")  # type: ignore[no-any-return]


def grid_bias(mean: float, sd: float, spacing: float) -> float:
    """Bias E[x Q(x)] / E[x^2] - 1 by the code grid alone, x ~ N(mean, sd^2), codes evenly spaced.

    The rounding error is a sawtooth of period D = ``spacing``,
        Q(x) - x = (D / pi) sum over j >= 1 of (-1)^j / j sin(2 pi j x / D),
    and averaging over the cluster damps each harmonic by exp(-2 pi^2 j^2 (sd / D)^2): a cluster
    narrower than the spacing is moved in common, by at most D / 2; at sd = D / 2 less than 1 % of
    that is left.  Exact while the cluster stays inside one binade and is not clamped.

    sd = 0 is the sawtooth itself, ties to the even code.  Raises ValueError unless mean and spacing
    are positive and sd is 0 or at least spacing / 1000: the number of harmonics grows as spacing /
    sd (``clamp.coherent_bias`` has no such limit).
    """
    check_positive("mean", mean)
    check_positive("spacing", spacing)
    if sd == 0:
        return float(np.rint(mean / spacing) * spacing / mean - 1)
    if not spacing / 1000 <= sd < math.inf:
        raise ValueError(f"sd must be 0 or at least spacing / 1000; got {sd!r}")
    j = np.arange(1, 2 + math.ceil(9 * spacing / (2 * math.pi * sd)))  # exp(-9^2 / 2) = 3e-18
    harmonics = (-1.0) ** j / j * _sine_moment()(2 * math.pi * j / spacing, mean, sd)
    return float(spacing / math.pi * harmonics.sum() / (mean**2 + sd**2))


def largest_grid_bias(fmt: str | BlockFormat, scale_rule: str = "floor") -> float:
    """The largest |bias| that the grid alone can give a cluster of equal values (a supremum).

    Attained at a point half way between two codes that clusters can come to lie at; for the MX
    floating-point formats half a spacing above a power of two, 1 / (2^(man_bits + 1) + 1).
    Raises as ``cliff``.
    """
    form = _format(fmt, scale_rule)
    codes = np.unique(form.element.values[np.isfinite(form.element.values)])
    codes = codes[(codes > 0) & (codes <= form.element.largest)]
    middles = (codes[1:] + codes[:-1]) / 2
    bias = (codes[1:] - codes[:-1]) / 2 / middles
    threshold, _ = form.bump_threshold(scale_rule)
    m = middles / 2.0**form.element.emax
    reached = ((m >= 1) & (m <= threshold)) | ((2 * m >= threshold) & (2 * m <= 2))
    return float(bias[reached].max(initial=0.0))


# ---------------------------------------------------------------- the tables


def main() -> None:
    """Print predictions beside what the quantizer does on seeded draws."""
    rng = np.random.default_rng(0)
    six = [f for f in FORMATS.values() if f.scale == "e8m0" and f.name != "mxint8_asymmetric"]
    blocks, law = 200_000, gaussian()
    x = rng.standard_normal((blocks, 32))
    print(f"standard Gaussian, blocks of 32, floor: saturated, %, measured on {blocks} blocks")
    print("format       elements  measured (sigma)   blocks  measured (sigma)")
    for form in six:
        stats, shares = quantize(x, form).stats, clamp_shares(law, form)
        assert stats is not None
        sigma = (
            np.sqrt([shares.element_variance, shares.blocks * (1 - shares.blocks)]) / blocks**0.5
        )
        off = np.array([stats.saturated - shares.elements, stats.saturated_blocks - shares.blocks])
        off = off / sigma
        print(
            f"{form.name:11}  {100 * shares.elements:8.4f}"
            f"  {100 * stats.saturated:8.4f} {off[0]:+6.1f}"
            f"  {100 * shares.blocks:8.3f}  {100 * stats.saturated_blocks:8.3f} {off[1]:+6.1f}"
        )
    draws = 400
    x, law = rng.normal(0.97, 0.01, (draws * 16, 32)), gaussian(0.97, 0.01)
    print(f"\ngamma ~ N(0.97, 0.01), {draws} draws of 512: bias, %, and its part by clamping")
    print("format       rule   predicted   clamping  measured (sigma)   saturated  measured")
    for form in six:
        for rule in SCALE_RULES:
            bias, shares = coherent_bias(law, form, 32, rule), clamp_shares(law, form, 32, rule)
            stats = quantize(x, form, scale_rule=rule).stats
            assert stats is not None
            sigma = bias.total_sd / len(x) ** 0.5
            print(
                f"{form.name:11}  {rule:5}  {100 * bias.total:+9.3f}  {100 * bias.clamp:+9.3f}"
                f"  {100 * (stats.gain - 1):+8.3f} {(stats.gain - 1 - bias.total) / sigma:+6.1f}"
                f"     {100 * shares.elements:7.2f}  {100 * stats.saturated:8.2f}"
            )
    print("\nthe two kinds of block behind E4M3, floor: probability, bias, sd over blocks, %")
    for mode in bias_modes(law, "mxfp8_e4m3"):
        b = mode.bias
        print(
            f"scale 2^{mode.exponent}  {100 * mode.probability:6.2f}  {100 * b.total:+7.3f}"
            f"  {100 * b.total_sd:6.3f}"
        )
    means, sds = (
        (0.8, 0.86, 0.875, 0.89, 0.92, 0.95, 0.97, 0.985, 1.0, 1.02),
        (0.001, 0.01, 0.03, 0.1),
    )
    print("\nE4M3, floor, bias, % (by clamping), gamma ~ N(mean, sd)")
    print("mean   " + "".join(f"sd {sd:<16g}" for sd in sds))
    for mean in means:
        row = [coherent_bias(gaussian(mean, sd), "mxfp8_e4m3") for sd in sds]
        cells = (f"{100 * b.total:+8.3f} ({100 * b.clamp:+7.3f})" for b in row)
        print(f"{mean:<5g} " + " ".join(cells))
    print("\nthe cliff: begin, end, depth %, share of the octave %, mean bias over it %")
    for form in six:
        for rule in ("floor", "even"):
            c = cliff(form, rule)
            print(
                f"{form.name:11}  {rule:5}  {c.begin:8.6g}  {c.end:9.7g}  {100 * c.depth:8.3f}"
                f"  {100 * c.share:6.2f}  {100 * c.mean:8.4f}"
            )
    print("\nthe grid alone, rceil: largest |bias| of a cluster in [1, 2), %")
    print("format       equal    sd 0.01   at mean   sd 0.03")
    for form in six:
        grid = 2 ** np.linspace(0, 1, 400, endpoint=False)
        narrow, wide = (
            np.abs([coherent_bias(gaussian(m, sd), form, 32, "rceil").total for m in grid])
            for sd in (0.01, 0.03)
        )
        print(
            f"{form.name:11}  {100 * largest_grid_bias(form, 'rceil'):6.2f}"
            f"  {100 * narrow.max():8.2f}  {grid[narrow.argmax()]:8.3f}  {100 * wide.max():8.2f}"
        )


if __name__ == "__main__":
    main()
