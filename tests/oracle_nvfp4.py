"""The oracle for NVFP4: the recipe in float32, written with one np.float32 operation a line.

    s_t = amax(tensor) / (6 * 448);  s_b = E4M3 of amax(block) / (6 * s_t);
    element = E2M1 of x / (s_b * s_t);  value = element * (s_b * s_t)

Where the recipe is silent: amax(tensor) is over the finite elements; an s_t that underflows is
2^-149; a block whose scale is zero has zero elements; a block with a NaN, or with an Inf that is
not to saturate, has the NaN code of E4M3 and codes 0; an Inf that saturates is 6 under the largest
s_b.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np

from tests.oracle import Array, Quantized
from tests.oracle_elements import ELEMENTS, round_index

F32 = np.float32
E4M3, E2M1 = ELEMENTS["mxfp8_e4m3"], ELEMENTS["mxfp4_e2m1"]
E2M1_VALUES = [float(value) for value in E2M1.positive]
NAN_CODE, LARGEST_CODE = 0x7F, 0x7E


def to_float32(x: Array) -> Array:
    """Rounded to float32 first, where the recipe begins (a float64 may become an infinity)."""
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return x.astype(F32)


def finite_maximum(x: Array) -> Any:
    magnitudes = np.abs(x[np.isfinite(x)])
    return F32(magnitudes.max()) if magnitudes.size else F32(0)


def tensor_scale(x: Array) -> Any:
    """s_t of a float32 tensor."""
    amax = finite_maximum(x)
    if amax == 0:
        return F32(1)
    s_t = amax / F32(6 * 448)
    return s_t if s_t > 0 else F32(2.0**-149)


def block_scale_code(amax: Any, s_t: Any) -> int:
    """E4M3, ties to even, saturating."""
    divisor = F32(6) * s_t
    ratio = amax / divisor
    return round_index(Fraction(float(ratio)), E4M3.positive, "even")


def round_element(quotient: Any, rounding: str, bits: int) -> int:
    """The magnitude code of a float32 >= 0. In float64 no difference from an E2M1 is rounded."""
    return round_index(float(quotient), E2M1_VALUES, rounding, bits)


def quantize_row(
    row: Array, s_t: Any, rounding: str, bits: Array, nonfinite: str
) -> tuple[int, list[int], list[Any]]:
    """(scale code, element codes, float32 values) of one block."""
    infinite = bool(np.isinf(row).any())
    if np.isnan(row).any() or (infinite and nonfinite == "propagate"):
        return NAN_CODE, [0] * row.size, [F32(np.nan)] * row.size
    code = LARGEST_CODE if infinite else block_scale_code(finite_maximum(row), s_t)
    s_b = F32(float(E4M3.positive[code]))
    scale = s_b * s_t
    codes, values = [], []
    for x, random in zip(row, bits.tolist(), strict=True):
        index = 0
        if math.isinf(x):
            index = len(E2M1.positive) - 1
        elif scale > 0:
            quotient = np.abs(x) / scale
            index = round_element(quotient, rounding, random)
        codes.append(E2M1.encode(bool(np.signbit(x)), index))
        values.append(np.copysign(F32(E2M1_VALUES[index]) * scale, x))
    return code, codes, values


def quantize_rows(
    x: Array, s_t: Any, rounding: str, bits: Array | None = None, nonfinite: str = "propagate"
) -> Quantized:
    """Each row of a 2-D float32 array is one block of a tensor with scale s_t."""
    random = np.zeros(x.shape, np.uint32) if bits is None else bits
    with np.errstate(over="ignore", under="ignore"):
        rows = [
            quantize_row(row, s_t, rounding, r, nonfinite) for row, r in zip(x, random, strict=True)
        ]
    codes = np.array([row[1] for row in rows], np.uint8).reshape(x.shape)
    values = np.array([row[2] for row in rows], F32).reshape(x.shape)
    return Quantized(codes, np.array([row[0] for row in rows], np.uint8), values)
