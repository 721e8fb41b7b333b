"""The oracle for blocks in any number of axes: cut by slicing, quantized one by one.

An axis that is not blocked has blocks of length 1, and so every layout is one list of lengths.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from tests import oracle_elements, oracle_nvfp4
from tests.oracle import Array, Quantized
from tests.oracle_elements import Element

Sizes = tuple[int, ...]
Axis = int | tuple[int, int]
BlockSize = int | tuple[int, int] | str


def block_lengths(shape: Sizes, axis: Axis, block_size: BlockSize) -> Sizes:
    """The length of a block along every axis."""
    if block_size == "tensor":
        return shape
    lengths = [1] * len(shape)
    if isinstance(block_size, tuple):
        axes = axis if isinstance(axis, tuple) else (-2, -1)
        for each, size in zip(axes, block_size, strict=True):
            lengths[each] = size
    else:
        assert isinstance(axis, int)
        assert isinstance(block_size, int)
        lengths[axis] = block_size
    return tuple(lengths)


def block_counts(shape: Sizes, lengths: Sizes) -> Sizes:
    return tuple(
        math.ceil(n / length) if length else 0 for n, length in zip(shape, lengths, strict=True)
    )


def block_slices(shape: Sizes, lengths: Sizes) -> list[tuple[slice, ...]]:
    """Where each block lies, in the C order of the scales."""
    counts = block_counts(shape, lengths)
    return [
        tuple(slice(k * length, (k + 1) * length) for k, length in zip(at, lengths, strict=True))
        for at in itertools.product(*map(range, counts))
    ]


def quantize(
    x: Array,
    element: Element | str,
    axis: Axis = -1,
    block_size: BlockSize = 32,
    scale_rule: str = "floor",
    rounding: str = "even",
    bits: Array | None = None,
    nonfinite: str = "propagate",
    scalar: bool = False,
) -> Quantized:
    """`element` "nvfp4" is the recipe of that name; else blocks of the element with E8M0 scales.

    Short blocks are filled with zeros, which change nothing in them. Values are float64, of NVFP4
    float32.
    """
    nvfp4 = isinstance(element, str)
    x = oracle_nvfp4.to_float32(x) if nvfp4 else x
    lengths = block_lengths(x.shape, axis, block_size)
    where = block_slices(x.shape, lengths)
    longest = max((x[at].size for at in where), default=0)
    rows = np.zeros((len(where), longest), x.dtype)
    random = np.zeros(rows.shape, np.uint32)
    for row, at in enumerate(where):
        rows[row, : x[at].size] = x[at].ravel()
        if bits is not None:
            random[row, : x[at].size] = bits[at].ravel()
    out = _quantize_rows(rows, x, element, scale_rule, rounding, random, nonfinite, scalar)
    codes, values = np.zeros(x.shape, np.uint8), np.zeros(x.shape, out.values.dtype)
    for row, at in enumerate(where):
        size, shape = x[at].size, x[at].shape
        codes[at] = out.codes[row, :size].reshape(shape)
        values[at] = out.values[row, :size].reshape(shape)
    return Quantized(codes, out.scales.reshape(block_counts(x.shape, lengths)), values)


def _quantize_rows(
    rows: Array,
    x: Array,
    element: Element | str,
    scale_rule: str,
    rounding: str,
    bits: Array,
    nonfinite: str,
    scalar: bool,
) -> Quantized:
    if not rows.size:
        values = np.zeros(rows.shape, np.float32 if isinstance(element, str) else np.float64)
        return Quantized(rows, np.zeros(len(rows), np.uint8), values)
    if isinstance(element, str):
        s_t: Any = oracle_nvfp4.tensor_scale(x)
        return oracle_nvfp4.quantize_rows(rows, s_t, rounding, bits, nonfinite)
    each = oracle_elements.quantize_rows if scalar else oracle_elements.quantize_rows_bulk
    return each(rows, element, scale_rule, rounding, bits, nonfinite)
