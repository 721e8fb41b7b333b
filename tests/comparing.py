"""Bit-for-bit comparison of the kernels with the oracle, and what to print where they differ."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import mxsim
from tests import oracle

Array = NDArray[Any]


class Scheme(NamedTuple):
    """One way to quantize a block."""

    fmt: str
    scale_rule: str
    rounding: str


SCHEMES = [
    Scheme(*each)
    for each in itertools.product(oracle.FORMATS, oracle.SCALE_RULES, oracle.ROUNDINGS)
]


def scheme_id(scheme: Scheme) -> str:
    return "-".join(scheme)


def same_bits(a: Array, b: Array) -> Array:
    """Entry by entry: the same bits, or both NaN (a NaN's payload is nobody's business)."""
    kind = np.dtype(f"u{a.dtype.itemsize}")
    bits_agree = np.ascontiguousarray(a).view(kind) == np.ascontiguousarray(b).view(kind)
    return np.asarray(bits_agree | (np.isnan(a) & np.isnan(b)))


def assert_same_bits(got: Array, expected: Array, what: str = "", x: Array | None = None) -> None:
    """Same shape, dtype and bits; else the first entry that differs, in full."""
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    wrong = np.argwhere(~same_bits(got, expected))
    if wrong.size:
        at = tuple(wrong[0])
        given = "" if x is None or x.shape != got.shape else f" for x = {float(x[at]).hex()}"
        raise AssertionError(
            f"{what}: {len(wrong)} of {got.size} entries differ, first at "
            f"{tuple(map(int, at))}: got {got[at]!r}, expected {expected[at]!r}{given}"
        )


def assert_agrees_with_oracle(
    x: Array,
    scheme: Scheme,
    axis: int = -1,
    block_size: int = 32,
    rows: oracle.Rows = oracle.quantize_rows_bulk,
) -> None:
    """Scale bytes, codes, values in both precisions and the fast path are the oracle's."""
    fmt, rule, rounding = scheme
    what = f"{fmt} {rule} {rounding} axis={axis} block_size={block_size} {x.dtype}"
    expected = oracle.quantize(x, fmt, axis, block_size, rule, rounding, rows)
    got = mxsim.quantize(x, fmt, axis, block_size, rule, rounding)
    if got.scales.shape == expected.scales.shape and (got.scales != expected.scales).any():
        line = tuple(np.argwhere(got.scales != expected.scales)[0])
        raise AssertionError(
            f"{what}: scale byte at {tuple(map(int, line))}: got {got.scales[line]}, expected "
            f"{expected.scales[line]}, block maximum {block_maximum(x, axis, block_size, line)}"
        )
    assert_same_bits(got.scales, expected.scales, f"{what} scales")
    assert_same_bits(got.codes, expected.codes, f"{what} codes", x)
    assert_same_bits(got.dequantize(), expected.values_as(np.float32), f"{what} float32", x)
    assert_same_bits(got.dequantize(np.float64), expected.values, f"{what} float64", x)
    fast = mxsim.fake_quantize(x, fmt, axis, block_size, rule, rounding)
    assert_same_bits(fast, expected.values_as(x.dtype), f"{what} fake_quantize", x)


def block_maximum(x: Array, axis: int, block_size: int, at: tuple[int, ...]) -> str:
    """The largest magnitude of one block, in hexadecimal."""
    where: list[Any] = list(at)
    where[axis] = slice(at[axis] * block_size, (at[axis] + 1) * block_size)
    return float(np.abs(x[tuple(where)]).max()).hex()
