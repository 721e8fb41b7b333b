"""The oracle: what OCP MX v1.0 says, in Python integers and fractions, and nothing else.

No line here is shared with mxsim. A format is the list of its values, rounding is a search in that
list, a shared exponent is found from the exact rational maximum of the block. The first part is
scalar and is meant to be checked by eye. What ends in `_bulk` says the same in NumPy, for volume;
every operation in it is exact in float64, and test_oracle.py holds it to the scalar part.

Vocabulary: a *magnitude code* is an element code without its sign; codes ascend with magnitude, so
the last bit of a magnitude code is the last bit of the mantissa, and "tie to even" means the even
code.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Element:
    """An element format, as OCP MX v1.0 section 5.3 gives it. MXINT8: see `magnitudes`."""

    exponent_bits: int
    mantissa_bits: int
    bias: int
    largest_code: int  # magnitude code of the largest finite value

    @property
    def sign_bit(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)


ELEMENTS = {
    "mxfp8_e4m3": Element(4, 3, 7, 0b1111_110),  # 1111_111 is NaN, there is no infinity
    "mxfp8_e5m2": Element(5, 2, 15, 0b11110_11),  # exponent 11111 is infinity or NaN, as in IEEE
    "mxfp6_e3m2": Element(3, 2, 3, 0b111_11),  # every code is finite, here and in the next two
    "mxfp6_e2m3": Element(2, 3, 1, 0b11_111),
    "mxfp4_e2m1": Element(2, 1, 1, 0b11_1),
    "mxint8": Element(1, 6, 0, 127),  # k / 64 in two's complement: 1 bit, point, 6 bits
}
FORMATS = tuple(ELEMENTS)
FLOAT_FORMATS = tuple(name for name in FORMATS if name != "mxint8")
SCALE_RULES = ("floor", "rceil", "ceil", "even")
ROUNDINGS = ("even", "away", "zero")
NAN_BYTE = 255


def pow2(exponent: int) -> Fraction:
    return Fraction(2) ** exponent


def floor_log2(value: Fraction) -> int:
    """The k with 2^k <= value < 2^(k+1)."""
    k = value.numerator.bit_length() - value.denominator.bit_length()
    return k if pow2(k) <= value else k - 1


def ceil_log2(value: Fraction) -> int:
    """The k with 2^(k-1) < value <= 2^k."""
    k = floor_log2(value)
    return k if pow2(k) == value else k + 1


# ------------------------------------------------------------------------------ values of a format


def float_magnitude(code: int, mantissa_bits: int, bias: int) -> Fraction:
    """The value of exponent|mantissa bits; exponent 0 holds zero and the subnormals."""
    exponent, mantissa = code >> mantissa_bits, code & (2**mantissa_bits - 1)
    fraction = Fraction(mantissa, 2**mantissa_bits)
    if exponent == 0:
        return fraction * pow2(1 - bias)
    return (1 + fraction) * pow2(exponent - bias)


@cache
def magnitudes(fmt: str) -> tuple[Fraction, ...]:
    """Every finite magnitude, ascending; the index is the magnitude code (MXINT8: k)."""
    element = ELEMENTS[fmt]
    codes = range(element.largest_code + 1)
    if fmt == "mxint8":
        return tuple(Fraction(k, 64) for k in codes)
    return tuple(float_magnitude(code, element.mantissa_bits, element.bias) for code in codes)


def largest(fmt: str) -> Fraction:
    return magnitudes(fmt)[-1]


def emax(fmt: str) -> int:
    return floor_log2(largest(fmt))


def encode(fmt: str, negative: bool, magnitude_code: int) -> int:
    """The stored bits; a float format keeps the sign of zero, MXINT8 has one zero."""
    if fmt == "mxint8":
        return -magnitude_code % 256 if negative else magnitude_code
    return magnitude_code + (ELEMENTS[fmt].sign_bit if negative else 0)


def decode(fmt: str, code: int) -> tuple[bool, Fraction]:
    """(negative, magnitude) of a finite code; ValueError for NaN, infinity or a bit too many."""
    sign_bit = ELEMENTS[fmt].sign_bit
    if fmt == "mxint8":
        negative, magnitude_code = code >= 128, 256 - code if code >= 128 else code
    else:
        negative, magnitude_code = bool(code & sign_bit), code & (sign_bit - 1)
    if code >= 2 * sign_bit or magnitude_code > ELEMENTS[fmt].largest_code:
        raise ValueError(f"{fmt} has no finite value for code {code:#x}")
    return negative, magnitudes(fmt)[magnitude_code]


def finite_codes(fmt: str) -> list[int]:
    """Every code that a quantizer may store: both signs of every magnitude, MXINT8 without -128."""
    codes = range(ELEMENTS[fmt].largest_code + 1)
    return sorted({encode(fmt, negative, code) for negative in (False, True) for code in codes})


# --------------------------------------------------------------------------------------- rounding


def round_magnitude(magnitude: Fraction, values: Sequence[Fraction], rounding: str) -> int:
    """The index of the value that `magnitude` rounds to; past the end it saturates."""
    if magnitude >= values[-1]:
        return len(values) - 1
    below = bisect_right(values, magnitude) - 1  # values[below] <= magnitude < values[below + 1]
    if rounding == "zero":
        return below
    from_below, to_above = magnitude - values[below], values[below + 1] - magnitude
    if from_below != to_above:
        return below if from_below < to_above else below + 1
    if rounding == "away":
        return below + 1
    assert rounding == "even", rounding
    return below if below % 2 == 0 else below + 1


IEEE = {"bf16": (8, 7), "fp16": (5, 10)}  # exponent bits, mantissa bits


@cache
def ieee_magnitudes(name: str) -> tuple[Fraction, ...]:
    """Every finite magnitude, and last the power of two in whose place infinity stands."""
    exponent_bits, mantissa_bits = IEEE[name]
    bias = 2 ** (exponent_bits - 1) - 1
    infinity_code = (2**exponent_bits - 1) << mantissa_bits
    return tuple(float_magnitude(code, mantissa_bits, bias) for code in range(infinity_code + 1))


def round_ieee(name: str, x: float, rounding: str) -> float:
    """x in bf16 or fp16: overflow is infinity, but toward zero it is the largest finite value."""
    if math.isnan(x) or math.isinf(x):
        return x
    values = ieee_magnitudes(name)
    index = round_magnitude(abs(Fraction(x)), values, rounding)
    if index < len(values) - 1:
        return math.copysign(float(values[index]), x)
    return math.copysign(float(values[-2]) if rounding == "zero" else math.inf, x)


# ---------------------------------------------------------------------------------- the MX block


def scale_exponent(fmt: str, rule: str, amax: Fraction) -> int:
    """The shared exponent before it is clamped to what E8M0 holds; amax > 0."""
    if rule == "floor":
        return floor_log2(amax) - emax(fmt)
    if rule == "ceil":
        return ceil_log2(amax) - emax(fmt)
    if rule == "rceil":  # the smallest e with amax <= largest * 2^e
        return ceil_log2(amax / largest(fmt))
    assert rule == "even", rule
    step = pow2(floor_log2(amax) - ELEMENTS[fmt].mantissa_bits)
    return floor_log2(math.floor(amax / step + Fraction(1, 2)) * step) - emax(fmt)


def scale_byte(fmt: str, rule: str, amax: Fraction) -> int:
    """E8M0: byte b is 2^(b - 127) for b = 0..254; an all-zero block stores byte 0."""
    if amax == 0:
        return 0
    return min(max(scale_exponent(fmt, rule, amax) + 127, 0), 254)


@dataclass(frozen=True)
class Block:
    """One quantized block; `values` is None for the NaN block, and then every code is 0."""

    byte: int
    codes: tuple[int, ...]
    values: tuple[Fraction, ...] | None


def quantize_block(fmt: str, block: Sequence[float], rule: str, rounding: str) -> Block:
    """One block, OCP MX v1.0 section 6.3: a shared scale, then elements rounded, saturated."""
    if not all(math.isfinite(x) for x in block):
        return Block(NAN_BYTE, (0,) * len(block), None)
    byte = scale_byte(fmt, rule, max(abs(Fraction(x)) for x in block))
    scale = pow2(byte - 127)
    codes, values = [], []
    for x in block:
        index = round_magnitude(abs(Fraction(x)) / scale, magnitudes(fmt), rounding)
        codes.append(encode(fmt, math.copysign(1.0, x) < 0, index))
        values.append(int(math.copysign(1, x)) * magnitudes(fmt)[index] * scale)
    return Block(byte, tuple(codes), tuple(values))


# ------------------------------------------------------------------------------ arrays of blocks


@dataclass(frozen=True)
class Quantized:
    """Codes and bytes as uint8, values as float64, which holds every MX value exactly."""

    codes: Array
    scales: Array
    values: Array

    def values_as(self, dtype: Any) -> Array:
        """In float32 a value past the largest finite float is an infinity, without a warning."""
        with np.errstate(over="ignore"):
            return self.values.astype(dtype)


Rows = Callable[[Array, str, str, str], Quantized]


def widen(x: Array) -> Array:
    """Exactly, in float64 (where NumPy warns of a signalling NaN that turns quiet)."""
    with np.errstate(invalid="ignore"):
        return x.astype(np.float64)


def quantize_rows(x: Array, fmt: str, rule: str, rounding: str) -> Quantized:
    """Each row of a 2-D array is one block: the scalar oracle in a loop."""
    blocks = [quantize_block(fmt, row, rule, rounding) for row in widen(x).tolist()]
    codes = np.array([block.codes for block in blocks], np.uint8).reshape(x.shape)
    values = np.full(x.shape, np.nan)
    for row, block in enumerate(blocks):
        if block.values is not None:
            values[row] = [float(value) for value in block.values]
    if fmt != "mxint8":
        values = np.copysign(values, np.where(codes & ELEMENTS[fmt].sign_bit, -1.0, 1.0))
    return Quantized(codes, np.array([block.byte for block in blocks], np.uint8), values)


def quantize_rows_bulk(x: Array, fmt: str, rule: str, rounding: str) -> Quantized:
    """The same as `quantize_rows`, 100 times faster.

    Scaling by a power of two is exact in float64, except where the result leaves its range: above,
    it is an infinity and saturates; below, it is less than every midpoint and rounds to zero. Both
    are as they should be.
    """
    finite = np.all(np.isfinite(x), axis=1)
    sound = np.where(finite[:, None], widen(x), 0.0)
    scales = scale_bytes_bulk(np.abs(sound).max(axis=1), fmt, rule)
    grid = grid_array(fmt)
    with np.errstate(over="ignore", under="ignore"):
        scaled = np.ldexp(np.abs(sound), 127 - scales[:, None])
    index = round_bulk(scaled, grid, rounding)
    values = np.copysign(np.ldexp(grid[index], scales[:, None] - 127), sound)
    codes = np.where(np.signbit(sound), index + ELEMENTS[fmt].sign_bit, index)
    if fmt == "mxint8":
        codes, values = np.where(np.signbit(sound), -index, index) % 256, values + 0.0
    codes[~finite], values[~finite], scales[~finite] = 0, np.nan, NAN_BYTE
    return Quantized(codes.astype(np.uint8), scales.astype(np.uint8), values)


def scale_bytes_bulk(amax: Array, fmt: str, rule: str) -> Array:
    """`scale_byte` of each finite maximum."""
    half_mantissa, exponent = np.frexp(amax)
    mantissa = 2 * half_mantissa  # amax = mantissa * 2^(exponent - 1), 1 <= mantissa < 2
    bump = {
        "floor": np.zeros(amax.shape, bool),
        "ceil": mantissa > 1,
        "rceil": mantissa > float(largest(fmt) / pow2(emax(fmt))),
        "even": mantissa >= float(2 - pow2(-ELEMENTS[fmt].mantissa_bits - 1)),
    }[rule]
    byte = np.clip(exponent - 1 - emax(fmt) + bump + 127, 0, 254)
    return np.where(amax == 0, 0, byte)


@cache
def grid_array(fmt: str) -> Array:
    """`magnitudes` in float64, exactly."""
    return np.array([float(value) for value in magnitudes(fmt)])


def round_bulk(magnitude: Array, grid: Array, rounding: str) -> Array:
    """`round_magnitude` of each entry; a midpoint is one bit longer than the grid: exact."""
    magnitude = np.minimum(magnitude, grid[-1])
    below = np.searchsorted(grid, magnitude, side="right") - 1
    above = np.minimum(below + 1, len(grid) - 1)
    middle = (grid[below] + grid[above]) / 2
    up = {
        "even": (magnitude > middle) | ((magnitude == middle) & (below % 2 == 1)),
        "away": magnitude >= middle,
        "zero": np.zeros(below.shape, bool),
    }[rounding]
    return np.where(up, above, below)


@cache
def ieee_grid_array(name: str) -> Array:
    """`ieee_magnitudes` in float64, exactly."""
    return np.array([float(value) for value in ieee_magnitudes(name)])


def round_ieee_bulk(name: str, x: Array, rounding: str) -> Array:
    """`round_ieee` of each entry, in float64."""
    grid, wide = ieee_grid_array(name), widen(x)
    rounded = np.append(grid[:-1], grid[-2] if rounding == "zero" else np.inf)
    finite = np.isfinite(wide)
    index = round_bulk(np.abs(np.where(finite, wide, 0.0)), grid, rounding)
    return np.where(finite, np.copysign(rounded[index], wide), wide)


def quantize(
    x: Array,
    fmt: str,
    axis: int = -1,
    block_size: int = 32,
    scale_rule: str = "floor",
    rounding: str = "even",
    rows: Rows = quantize_rows_bulk,
) -> Quantized:
    """An array, blocked along `axis`; zeros fill a short last block, and change nothing in it."""
    lines = np.moveaxis(x, axis, -1)
    n, count = lines.shape[-1], -(-lines.shape[-1] // block_size)
    padded = np.zeros((*lines.shape[:-1], count * block_size), x.dtype)
    padded[..., :n] = lines
    out = rows(padded.reshape(-1, block_size), fmt, scale_rule, rounding)
    codes, values = (a.reshape(padded.shape)[..., :n] for a in (out.codes, out.values))
    scales = out.scales.reshape(*lines.shape[:-1], count)
    return Quantized(*(np.moveaxis(a, -1, axis) for a in (codes, scales, values)))
