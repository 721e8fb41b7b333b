"""Clamping on paper: how often power-of-two scales saturate, and the coherent bias of a block.

A block of n independent draws from a law without atoms (laws.py) is quantized under one scale.
Here are, as finite sums of the law's partial moments: the shares of elements and of blocks that
saturate, the aligned gain that clamping and rounding leave, and how it varies over blocks.  The
cliff of a cluster of equal values, and what the code grid does to it, are in cliff.py.

The scale is 2^e for block maxima M in (u_(e-1), u_e], u_e = theta 2^(e + emax): every scale rule is
"floor, plus one above the significand theta" (``BlockFormat.bump_threshold``).  M <= u is the event
that all n elements are, so with G(u) = P(|x| <= u):

    P(scale 2^e) = G(u_e)^n - G(u_(e-1))^n
    E[sum of f over the block; M <= u] = n E[f; |x| <= u] G(u)^(n-1)

An element that saturates, |x| > largest 2^e, lies above u_(e-1), because top >= theta / 2: wherever
there is one, M > u_(e-1) holds already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.formats import (
    SCALE_EXPONENT_MAX,
    SCALE_EXPONENT_MIN,
    SCALE_RULES,
    BlockFormat,
    Element,
    IntFormat,
    as_format,
    choose,
)
from mxsim.layout import as_integer
from mxsim.theory.laws import Law

Array = NDArray[Any]


# ---------------------------------------------------------------- scales and their cells


@dataclass(frozen=True)
class _Cells:
    """The scales that a block can get: one entry each, (cells,), those of probability 0 left out.

    Block maxima in (lower, upper] get the scale 2^exponent; elements above ``up`` or below
    ``-down`` saturate under it.
    """

    exponent: Array
    lower: Array
    upper: Array
    up: Array
    down: Array
    probability: Array


def _cells(law: Law, form: BlockFormat, n: int, scale_rule: str) -> _Cells:
    element = form.element
    threshold, _ = form.bump_threshold(scale_rule)
    exponent = np.arange(SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX + 1)
    upper = np.ldexp(threshold, exponent + element.emax)
    lower = np.concatenate([[0.0], upper[:-1]])  # the smallest scale takes all that is smaller,
    upper[-1] = np.inf  # the largest all that is larger
    probability = _within(law, upper) ** n - _within(law, lower) ** n
    scale = np.ldexp(1.0, exponent)
    beyond = isinstance(element, IntFormat) and not element.symmetric  # one code more below zero
    down = element.largest + (element.smallest_subnormal if beyond else 0.0)
    all_ = (
        exponent,
        lower,
        upper,
        np.minimum(element.largest * scale, upper),
        np.minimum(down * scale, upper),
        probability,
    )
    return _Cells(*(each[probability > 0] for each in all_))


def _within(law: Law, u: Array) -> Array:
    """P(|x| <= u)."""
    return np.asarray(law.partial(u)[0] - law.partial(-u)[0])


def _checked(
    law: object, fmt: str | BlockFormat, block_size: object, scale_rule: str
) -> tuple[Law, BlockFormat, int]:
    """The arguments that all functions share; ValueError or TypeError naming what does not fit."""
    if not isinstance(law, Law):
        raise TypeError(f"law must be a Law (gaussian, lognormal, from_cdf); got {law!r}")
    form = as_format(fmt)
    choose("scale_rule", scale_rule, SCALE_RULES)
    if form.scale != "e8m0":
        raise ValueError(f"fmt must have an E8M0 scale; got {form.name}")
    size = as_integer("block_size", block_size, "an integer of at least 1")
    if size < 1:
        raise ValueError(f"block_size must be an integer of at least 1; got {size}")
    return law, form, size


# ---------------------------------------------------------------- how often


@dataclass(frozen=True)
class ClampShares:
    """Expected shares that saturate, |x| > largest * scale before rounding.

    elements: of elements; blocks: of blocks that hold such an element (for symmetric formats:
    whose maximum is one).  element_variance: variance of one block's share of elements, so that
    the share over B blocks has variance element_variance / B (elements of a block share a scale:
    they are not independent).
    """

    elements: float
    blocks: float
    element_variance: float


def clamp_shares(
    law: Law, fmt: str | BlockFormat, block_size: int = 32, scale_rule: str = "floor"
) -> ClampShares:
    """The shares for full blocks of independent draws; what ``quantize(...).stats`` counts.

    With q the probability that an element saturates under the scale of a cell, over cells:
    elements = sum q G(u)^(n-1); blocks = sum G(u)^n - (G(u) - q)^n; and two of a block together
    with probability sum q^2 G(u)^(n-2).  Absolute error about n 1e-16.  Raises ValueError for
    NVFP4 (its scales depend on the whole tensor), and as ``quantize`` for unknown names.
    """
    law, form, n = _checked(law, fmt, block_size, scale_rule)
    cells = _cells(law, form, n, scale_rule)
    g = _within(law, cells.upper)
    above = law.partial(cells.upper)[0] - law.partial(cells.up)[0]
    below = law.partial(-cells.down)[0] - law.partial(-cells.upper)[0]
    q = np.clip(above, 0, None) + np.clip(below, 0, None)
    elements = float((q * g ** (n - 1)).sum())
    blocks = float((g**n - np.clip(g - q, 0, None) ** n).sum())
    pairs = float((q**2 * g ** max(n - 2, 0)).sum())  # n = 1 has none
    variance = (elements + (n - 1) * pairs) / n - elements**2
    return ClampShares(elements, blocks, max(variance, 0.0))


# ---------------------------------------------------------------- how far


@dataclass(frozen=True)
class CoherentBias:
    """Aligned gain minus one, <Q(g), g> / <g, g> - 1, of blocks.

    clamp: if elements were clamped to the largest and not rounded; total: as quantized, nearest
    code (ties have probability zero, so "even" and "away" are alike; under stochastic rounding the
    expectation is ``clamp``).  clamp_sd, total_sd: standard deviation from block to block.
    """

    clamp: float
    total: float
    clamp_sd: float
    total_sd: float

    @property
    def rounding(self) -> float:
        """What rounding adds to clamping."""
        return self.total - self.clamp


@dataclass(frozen=True)
class BiasMode:
    """The blocks that get the scale 2^exponent: their probability and their bias."""

    exponent: int
    probability: float
    bias: CoherentBias


@dataclass(frozen=True)
class _Sums:
    """Expectations over |x| <= u: g of 1; of d = x^2: d, dd; of p = x C(x), x Q(x): (2,) each."""

    g: float
    d: float
    dd: float
    p: Array
    pp: Array
    pd: Array

    def power(self, n: int) -> tuple[float, float, float]:
        """n g^(n-1), n (n-1) g^(n-2), g^n: the weights of one element, of a pair, of none."""
        return n * self.g ** (n - 1), n * (n - 1) * self.g ** max(n - 2, 0), self.g**n

    def covariances(self, n: int, r: Array) -> tuple[Array, Array]:
        """E[(N - r D)^2; M <= u] and E[(N - r D) D; M <= u], N = sum p, D = sum d, (2,) each."""
        one, pair, _ = self.power(n)
        a = self.p - r * self.d
        return (
            one * (self.pp - 2 * r * self.pd + r**2 * self.dd) + pair * a**2,
            one * (self.pd - r * self.dd) + pair * a * self.d,
        )


def _sums(law: Law, element: Element, e: int, up: float, down: float, u: float) -> _Sums:
    """Under the scale 2^e, which saturates outside [-down, up]; C clamps, Q rounds as well."""
    codes = np.unique(element.values[np.isfinite(element.values)])
    if isinstance(element, IntFormat) and element.symmetric:
        codes = codes[codes >= -element.largest]
    codes = np.ldexp(codes, e)
    middles = (codes[1:] + codes[:-1]) / 2
    grid = np.diff(law.partial(np.clip([-np.inf, *middles, np.inf], -u, u)))  # (5, codes)
    low, middle, high = np.diff(law.partial(np.clip([-np.inf, -down, up, np.inf], -u, u))).T
    whole = grid.sum(-1)
    return _Sums(
        g=float(whole[0]),
        d=float(whole[2]),
        dd=float(whole[4]),
        p=np.array([up * high[1] + middle[2] - down * low[1], codes @ grid[1]]),
        pp=np.array([up**2 * high[2] + middle[4] + down**2 * low[2], codes**2 @ grid[2]]),
        pd=np.array([up * high[3] + middle[4] - down * low[3], codes @ grid[3]]),
    )


def _cell_sums(
    law: Law, fmt: str | BlockFormat, block_size: int, scale_rule: str
) -> tuple[int, list[tuple[int, float, _Sums, _Sums]]]:
    """n, and of each cell (exponent, probability, sums up to upper, sums up to lower)."""
    law, form, n = _checked(law, fmt, block_size, scale_rule)
    c = _cells(law, form, n, scale_rule)
    found = []
    for e, lower, upper, up, down, p in zip(
        c.exponent, c.lower, c.upper, c.up, c.down, c.probability, strict=True
    ):
        upto = [_sums(law, form.element, int(e), up, down, u) for u in (upper, lower)]
        found.append((int(e), float(p), upto[0], upto[1]))
    return n, found


def _means(n: int, upper: _Sums, lower: _Sums) -> tuple[Array, float]:
    """E[N; cell] (2,) and E[D; cell]."""
    a, b = upper.power(n)[0], lower.power(n)[0]
    return a * upper.p - b * lower.p, a * upper.d - b * lower.d


def coherent_bias(
    law: Law, fmt: str | BlockFormat, block_size: int = 32, scale_rule: str = "floor"
) -> CoherentBias:
    """Expected bias E<Q(g), g> / E<g, g> - 1: that of a long vector of independent draws.

    Exact as the number of blocks B goes to infinity; measured over B blocks its standard error is
    sd / sqrt(B).  (As the spread of one block's own ratio, sd is first-order in the spread of
    <g, g>.)  Sums over scales and codes of partial moments, no sampling.  Raises as
    ``clamp_shares``.
    """
    n, cells = _cell_sums(law, fmt, block_size, scale_rule)
    products, squares = np.zeros(2), 0.0
    for _, _, upper, lower in cells:
        each = _means(n, upper, lower)
        products, squares = products + each[0], squares + each[1]
    gain = products / squares
    spread = np.zeros(2)
    for _, _, upper, lower in cells:
        spread += upper.covariances(n, gain)[0] - lower.covariances(n, gain)[0]
    sd = np.sqrt(np.clip(spread, 0, None)) / squares
    return CoherentBias(*(float(v) for v in (*(gain - 1), *sd)))


def bias_modes(
    law: Law,
    fmt: str | BlockFormat,
    block_size: int = 32,
    scale_rule: str = "floor",
    least: float = 1e-6,
) -> tuple[BiasMode, ...]:
    """The law of one block's bias over blocks: one mode for each scale it may get.

    On the cliff the bias of a block is no bell: some blocks have their maximum beyond a power of
    two and lose nothing, the others lose all in common.  Within a mode, mean and sd of the ratio
    N / D to second and first order in the spread of D = <g, g>: for clusters (relative spread of an
    element up to 0.1) the sd is good to 1 %, for zero-mean Gaussians and heavy tails it is a rough
    guide.  Modes of probability below ``least`` are left out.  Raises as ``clamp_shares``.
    """
    n, cells = _cell_sums(law, fmt, block_size, scale_rule)
    modes = []
    for e, probability, upper, lower in cells:
        if probability < least:
            continue
        products, squares = _means(n, upper, lower)
        ratio, square = products / squares, squares / probability
        above, below = upper.covariances(n, ratio), lower.covariances(n, ratio)
        variance = (above[0] - below[0]) / probability
        mean = ratio - (above[1] - below[1]) / probability / square**2
        sd = np.sqrt(np.clip(variance, 0, None)) / square
        modes.append(
            BiasMode(e, probability, CoherentBias(*(float(v) for v in (*(mean - 1), *sd))))
        )
    return tuple(modes)
