"""The oracle for any element format: E8M0 blocks, stochastic rounding, non-finite policies.

What oracle.py says of six formats is said here of every small float or two's complement integer;
test_oracle_more.py holds the two to each other where both speak. An element is two lists of
magnitudes, one a sign (INT8 with the code of -2 has one more negative value). The scalar part uses
fractions only; what ends in `_bulk` is the same in float64, exactly, for volume.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from tests import oracle
from tests.oracle import NAN_BYTE, Array, Block, Quantized, pow2

ROUNDINGS = (*oracle.ROUNDINGS, "stochastic")
Number = TypeVar("Number", Fraction, float)
LOST_CODES = {"none": 0, "nan": 1}  # of the top exponent; "ieee" loses all of its codes


@dataclass(frozen=True)
class Element:
    """1 sign, `exponent_bits`, `mantissa_bits`; or with `exponent_bits` 0 k / 2^mantissa_bits.

    `specials`: what the top exponent holds, "ieee" (Inf and NaN), "nan" (one code) or "none"; of
    an integer "symmetric" or "asymmetric" (the code of -2.0 is allowed).
    """

    exponent_bits: int
    mantissa_bits: int
    specials: str

    @property
    def is_integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def bits(self) -> int:
        return 1 + max(self.exponent_bits, 1) + self.mantissa_bits

    @property
    def sign_bit(self) -> int:
        return 1 << (self.bits - 1)

    @property
    def one_digit(self) -> bool:
        """A float without mantissa: no value above zero has an even significand."""
        return self.mantissa_bits == 0 and not self.is_integer

    @cached_property
    def positive(self) -> tuple[Fraction, ...]:
        """Every finite magnitude of the positive sign, ascending; the index is its code."""
        m = self.mantissa_bits
        if self.is_integer:
            return tuple(Fraction(k, 2**m) for k in range(2 ** (m + 1)))
        if self.specials == "ieee":
            count = (2**self.exponent_bits - 1) << m
        else:
            count = 2 ** (self.exponent_bits + m) - LOST_CODES[self.specials]
        bias = 2 ** (self.exponent_bits - 1) - 1
        return tuple(oracle.float_magnitude(code, m, bias) for code in range(count))

    @cached_property
    def negative(self) -> tuple[Fraction, ...]:
        return (*self.positive, Fraction(2)) if self.specials == "asymmetric" else self.positive

    def magnitudes(self, negative: bool) -> tuple[Fraction, ...]:
        return self.negative if negative else self.positive

    @property
    def largest(self) -> Fraction:
        """What the scale rules, and saturation of a positive number, are about."""
        return self.positive[-1]

    @property
    def emax(self) -> int:
        return oracle.floor_log2(self.largest)

    def encode(self, negative: bool, index: int) -> int:
        """The stored bits of a sign and an index into its magnitudes."""
        if self.is_integer:
            return -index % 2**self.bits if negative else index
        return index + (self.sign_bit if negative else 0)

    @cached_property
    def grids(self) -> tuple[Array, Array]:
        """`positive` and `negative` in float64, exactly."""
        positive, negative = (
            np.array([float(v) for v in values]) for values in (self.positive, self.negative)
        )
        return positive, negative


ELEMENTS = {
    "mxfp8_e4m3": Element(4, 3, "nan"),
    "mxfp8_e5m2": Element(5, 2, "ieee"),
    "mxfp6_e3m2": Element(3, 2, "none"),
    "mxfp6_e2m3": Element(2, 3, "none"),
    "mxfp4_e2m1": Element(2, 1, "none"),
    "mxint8": Element(0, 6, "symmetric"),
    "mxint8_asymmetric": Element(0, 6, "asymmetric"),
}
# Elements that no format of the specification has: no mantissa, one exponent bit, no exponent
UNUSUAL = (
    Element(1, 0, "none"),
    Element(3, 0, "none"),
    Element(7, 0, "none"),
    Element(1, 1, "none"),
    Element(1, 6, "none"),
    Element(1, 1, "nan"),
    Element(3, 1, "nan"),
    Element(2, 1, "ieee"),
    Element(6, 1, "ieee"),
    Element(4, 3, "ieee"),
    Element(5, 2, "nan"),
    Element(2, 5, "ieee"),
    Element(0, 0, "symmetric"),
    Element(0, 0, "asymmetric"),
    Element(0, 2, "symmetric"),
    Element(0, 5, "asymmetric"),
)


# --------------------------------------------------------------------------------------- rounding


def round_index(
    magnitude: Number,
    values: Sequence[Number],
    rounding: str,
    bits: int = 0,
    one_digit: bool = False,
) -> int:
    """The index in `values` of the value that `magnitude` rounds to; past the end it saturates.

    Stochastic: up where the part above the value below exceeds u steps, u = (bits >> 8) / 2^24.
    `one_digit`: no mantissa, so that of two neighbours above zero neither is even; IEEE 754-2019,
    4.3.1: then a tie goes to the larger. Numbers may be floats where no difference is rounded.
    """
    clamped = min(magnitude, values[-1])
    below = bisect_right(values, clamped) - 1
    if below == len(values) - 1:
        return below
    step = values[below + 1] - values[below]
    part = (clamped - values[below]) / step
    if rounding == "stochastic":
        return below + (part * 2**24 > bits >> 8)
    odd = below > 0 if one_digit else below % 2 == 1
    up = {"zero": False, "away": 2 * part >= 1, "even": 2 * part > 1 or (2 * part == 1 and odd)}
    return below + up[rounding]


def round_bulk(
    magnitude: Array, grid: Array, rounding: str, bits: Array | None, one_digit: bool
) -> Array:
    """`round_index` of each entry; the part above the value below has no more bits than a float64.

    A magnitude too small for the comparison stays positive: it is above nothing but u = 0.
    """
    clamped = np.minimum(magnitude, grid[-1])
    below = np.searchsorted(grid, clamped, side="right") - 1
    above = np.minimum(below + 1, len(grid) - 1)
    step, part = grid[above] - grid[below], clamped - grid[below]
    if rounding == "stochastic":
        assert bits is not None
        return np.asarray(np.where(part > (bits >> 8) / 2.0**24 * step, above, below))
    odd = below > 0 if one_digit else below % 2 == 1
    middle = (grid[below] + grid[above]) / 2
    up = {
        "even": (clamped > middle) | ((clamped == middle) & odd),
        "away": clamped >= middle,
        "zero": np.zeros(below.shape, bool),
    }[rounding]
    return np.asarray(np.where(up & (above > below), above, below))


# ---------------------------------------------------------------------------------- the MX block


def scale_exponent(element: Element, rule: str, amax: Fraction) -> int:
    """The shared exponent before it is clamped to what E8M0 holds; amax > 0."""
    if rule == "floor":
        return oracle.floor_log2(amax) - element.emax
    if rule == "ceil":
        return oracle.ceil_log2(amax) - element.emax
    if rule == "rceil":
        return oracle.ceil_log2(amax / element.largest)
    assert rule == "even", rule
    step = pow2(oracle.floor_log2(amax) - element.mantissa_bits)
    rounded = math.floor(amax / step + Fraction(1, 2)) * step
    return oracle.floor_log2(rounded) - element.emax


def quantize_block(
    element: Element,
    block: Sequence[float],
    rule: str,
    rounding: str,
    bits: Sequence[int] | None = None,
    nonfinite: str = "propagate",
) -> Block:
    """One block. With `saturate` an infinity is the largest element under the largest scale."""
    has_inf = any(math.isinf(x) for x in block)
    if any(math.isnan(x) for x in block) or (has_inf and nonfinite == "propagate"):
        return Block(NAN_BYTE, (0,) * len(block), None)
    amax = max((abs(Fraction(x)) for x in block if math.isfinite(x)), default=Fraction(0))
    byte = 254 if has_inf else 0
    if amax and not has_inf:
        byte = min(max(scale_exponent(element, rule, amax) + 127, 0), 254)
    scale = pow2(byte - 127)
    codes, values = [], []
    for x, random in zip(block, bits or (0,) * len(block), strict=True):
        negative = math.copysign(1.0, x) < 0
        grid = element.magnitudes(negative)
        magnitude = grid[-1] if math.isinf(x) else abs(Fraction(x)) / scale
        index = round_index(magnitude, grid, rounding, random, element.one_digit)
        codes.append(element.encode(negative, index))
        values.append((-1 if negative else 1) * grid[index] * scale)
    return Block(byte, tuple(codes), tuple(values))


def quantize_rows(
    x: Array,
    element: Element,
    rule: str,
    rounding: str,
    bits: Array | None = None,
    nonfinite: str = "propagate",
) -> Quantized:
    """Each row of a 2-D array is one block: the scalar oracle in a loop."""
    random: Any = np.zeros(x.shape, np.uint32) if bits is None else bits
    rows = zip(oracle.widen(x).tolist(), random.tolist(), strict=True)
    blocks = [quantize_block(element, row, rule, rounding, r, nonfinite) for row, r in rows]
    codes = np.array([block.codes for block in blocks], np.uint8).reshape(x.shape)
    values = np.full(x.shape, np.nan)
    for row, block in enumerate(blocks):
        if block.values is not None:
            values[row] = [float(value) for value in block.values]
    if not element.is_integer:
        values = np.copysign(values, np.where(codes & element.sign_bit, -1.0, 1.0))
    return Quantized(codes, np.array([block.byte for block in blocks], np.uint8), values)


def quantize_rows_bulk(
    x: Array,
    element: Element,
    rule: str,
    rounding: str,
    bits: Array | None = None,
    nonfinite: str = "propagate",
) -> Quantized:
    """The same as `quantize_rows`, 100 times faster."""
    wide = oracle.widen(x)
    infinite = np.asarray(np.isinf(wide).any(axis=1))
    bad = np.isnan(wide).any(axis=1) | (infinite & (nonfinite == "propagate"))
    sound = np.where(bad[:, None], 0.0, wide)
    amax = np.abs(np.where(np.isfinite(sound), sound, 0.0)).max(axis=1)
    scales = np.where(infinite, 254, scale_bytes_bulk(amax, element, rule))
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(np.abs(sound), 127 - scales[:, None])
    scaled[(scaled == 0) & (sound != 0)] = np.finfo(np.float64).smallest_subnormal
    codes, values = np.zeros(x.shape, np.int64), np.zeros(x.shape)
    for negative, grid in zip((False, True), element.grids, strict=True):
        at = np.signbit(sound) == negative
        index = round_bulk(
            scaled[at],
            grid,
            rounding,
            None if bits is None else bits[at],
            grid[1] == grid[-1] or (element.mantissa_bits == 0 and not element.is_integer),
        )
        magnitude = np.ldexp(grid[index], np.broadcast_to(scales[:, None], x.shape)[at] - 127)
        values[at] = -magnitude if negative else magnitude
        codes[at] = np.where(negative, -index, index) if element.is_integer else index
        if negative and not element.is_integer:
            codes[at] += element.sign_bit
    if element.is_integer:
        codes, values = codes % 2**element.bits, values + 0.0
    codes[bad], values[bad], scales[bad] = 0, np.nan, NAN_BYTE
    return Quantized(codes.astype(np.uint8), scales.astype(np.uint8), values)


def scale_bytes_bulk(amax: Array, element: Element, rule: str) -> Array:
    """The byte of each finite maximum."""
    half_mantissa, exponent = np.frexp(amax)
    mantissa = 2 * half_mantissa
    bump = {
        "floor": np.zeros(amax.shape, bool),
        "ceil": mantissa > 1,
        "rceil": mantissa > float(element.largest / pow2(element.emax)),
        "even": mantissa >= float(2 - pow2(-element.mantissa_bits - 1)),
    }[rule]
    byte = np.clip(exponent - 1 - element.emax + bump + 127, 0, 254)
    return np.where(amax == 0, 0, byte)


# ------------------------------------------------------------------------- element by element


def round_to(element: Element, x: float, rounding: str, bits: int = 0) -> float:
    """x in a float format of any width, by its step instead of a list of values.

    A format without infinity saturates. One with it has 2^(emax + 1) stand for infinity, which
    rounding toward zero does not reach.
    """
    m = element.mantissa_bits
    emin = 2 - 2 ** (element.exponent_bits - 1)
    top_field = 2**element.exponent_bits - (2 if element.specials == "ieee" else 1)
    emax = top_field + emin - 1
    largest = (2 ** (m + 1) - 1 - (element.specials == "nan")) * pow2(emax - m)
    overflow = math.inf if element.specials == "ieee" else float(largest)
    if math.isnan(x):
        return x
    if math.isinf(x):
        return math.copysign(overflow, x)
    magnitude = abs(Fraction(x))
    if element.specials != "ieee" or rounding == "zero":
        magnitude = min(magnitude, largest)
    step = pow2(max(oracle.floor_log2(magnitude), emin) - m) if magnitude else pow2(emin - m)
    whole = math.floor(magnitude / step)
    part, half = magnitude / step - whole, Fraction(1, 2)
    up = {
        "zero": False,
        "away": part >= half,
        "even": part > half or (part == half and whole % 2 == 1),
        "stochastic": part > Fraction(bits >> 8, 2**24),
    }[rounding]
    rounded = (whole + up) * step
    return math.copysign(overflow if rounded > largest else float(rounded), x)


def round_to_all(element: Element, x: Array, rounding: str, bits: Array | None = None) -> Array:
    """`round_to` of each entry, in float64."""
    random: Any = np.zeros(x.shape, np.uint32) if bits is None else bits
    each: Any = zip(oracle.widen(x).ravel().tolist(), random.ravel().tolist(), strict=True)
    return np.array([round_to(element, v, rounding, r) for v, r in each]).reshape(x.shape)
