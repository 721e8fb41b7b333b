"""NVFP4's two-level scaling: E2M1 elements, an E4M3 scale a block, a float32 scale a tensor.

Every operation is in float32, in this order:

    s_t     = amax(tensor) / (6 * 448)              1 for an all-zero tensor
    s_b     = E4M3, ties to even, of amax(block) / (6 * s_t)
    element = E2M1 of x / (s_b * s_t)
    value   = element * (s_b * s_t)

Decisions where the recipe is silent: amax(tensor) is over the finite elements; an s_t that
underflows is 2**-149; a block whose s_b rounds to zero has zero elements, signs kept; a block with
a NaN (or an Inf that counts as one) has the E4M3 code of NaN; otherwise Inf saturates and its block
gets the largest s_b.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxsim.bits import from_bits, power_of_two, with_sign
from mxsim.jit import kernel
from mxsim.maxima import finite_maximum, spread, tile_maxima, tile_width
from mxsim.philox import draw
from mxsim.rounding import (
    EVEN,
    STOCHASTIC,
    encode,
    round_magnitude,
    round_stochastically,
)

E4M3_NAN = 0x7F


def tensor_scale(x: Any) -> np.float32:
    """s_t of a float32 array (n,)."""
    amax = finite_maximum(x)
    if amax == 0:
        return np.float32(1)
    smallest = np.float32(2.0**-149)
    return np.float32(max(np.float32(amax) / np.float32(6 * 448), smallest))


@kernel
def _column_scales(
    largest: Any, columns: Any, nan_from: Any, s_t: Any, scale_grid: Any, s_b: Any, scale: Any
) -> None:
    """s_b and s_b * s_t of every column from block maxima; NaN where the block is NaN."""
    six = power_of_two(np.int64(2), s_t) + power_of_two(np.int64(1), s_t)
    zero = s_t - s_t
    blocks = largest.size
    for k in range(blocks):
        wanted = from_bits(largest[k], s_t) / (six * s_t)
        block = round_magnitude(wanted, EVEN, scale_grid)
        s_b[k] = zero / zero if largest[k] >= nan_from else block
    if columns > 1:
        spread(s_b[:blocks], columns, s_b)
    for j in range(scale.size):
        scale[j] = s_b[j] * s_t


@kernel
def _quotient(x: Any, scale: Any) -> Any:
    """|x| / scale; 0 under a zero scale, NaN under a NaN one."""
    q = abs(x) / scale  # always: a branch would keep the loop scalar
    return q if scale > 0 else scale


@kernel
def _round_row(row: Any, out: Any, u: Any, scale: Any, mode: Any, grid: Any) -> None:
    """Elements of a row in element units, signed; NaN where the scale is, 0 where it is 0."""
    if mode == EVEN:  # kept apart: vectorizes
        for j in range(row.size):
            q = _quotient(row[j], scale[j])
            r = round_magnitude(q, EVEN, grid)
            out[j] = with_sign(r, row[j]) if q == q else q
    elif mode != STOCHASTIC:
        for j in range(row.size):
            q = _quotient(row[j], scale[j])
            r = round_magnitude(q, mode, grid)
            out[j] = with_sign(r, row[j]) if q == q else q
    else:
        for j in range(row.size):
            q = _quotient(row[j], scale[j])
            r = round_stochastically(q, u[j], grid)
            out[j] = with_sign(r, row[j]) if q == q else q


@kernel
def nvfp4_blocks(
    x: Any,
    out: Any,
    codes: Any,
    scales: Any,
    shape: Any,
    nan_from: Any,
    s_t: Any,
    mode: Any,
    grid: Any,
    layout: Any,
    scale_grid: Any,
    scale_layout: Any,
    random: Any,
    unit: Any,
    sums: Any,
) -> None:
    """x (outer, n, m) float32, in blocks of ``shape`` (rows, columns).

    Writes the dequantized values into ``out`` (may be x) if it is not empty, else codes
    (outer, n, m), scale codes (outer, row blocks, column blocks) and statistics.
    """
    rows, columns = shape
    outer, n, m = x.shape
    width = tile_width(m, columns)
    bits = np.empty(width, type(nan_from))
    s_b, scale, rounded = (
        np.empty(width, x.dtype),
        np.empty(width, x.dtype),
        np.empty(width, x.dtype),
    )
    hit = np.empty(width, np.bool_)
    u = random[0][:0]
    for o in range(outer):
        for top in range(0, n, rows):
            bottom = min(top + rows, n)
            for left in range(0, m, width):
                right = min(left + width, m)
                k = right - left
                hit[:k] = False
                largest = tile_maxima(x[o, top:bottom], left, right, columns, bits)
                _column_scales(largest, columns, nan_from, s_t, scale_grid, s_b[:k], scale[:k])
                for i in range(top, bottom):
                    row = x[o, i, left:right]
                    if mode == STOCHASTIC:
                        u = draw(random, (o * n + i) * m + left, k)
                    _round_row(row, rounded, u, scale, mode, grid)
                    if out.size:
                        target = out[o, i, left:right]
                        for j in range(k):
                            target[j] = rounded[j] * scale[j]
                        continue
                    for j in range(k):
                        r = rounded[j]
                        negative = with_sign(grid[1], row[j]) < 0
                        codes[o, i, left + j] = (
                            0 if r != r else encode(abs(r), negative, layout, grid)
                        )
                    _add_statistics(row, rounded, scale, grid, hit, unit, sums)
                if out.size:
                    continue
                for j in range(0, k, columns):
                    nan = s_b[j] != s_b[j]
                    scales[o, top // rows, (left + j) // columns] = (
                        E4M3_NAN if nan else encode(s_b[j], False, scale_layout, scale_grid)
                    )
                    sums[0] += 1.0
                    sums[1] += 1.0 if hit[j : min(j + columns, k)].any() else 0.0


@kernel
def _add_statistics(
    row: Any, rounded: Any, scale: Any, grid: Any, hit: Any, unit: Any, sums: Any
) -> None:
    """As kernels._add_statistics."""
    for j in range(row.size):
        if rounded[j] != rounded[j] or row[j] - row[j] != 0:
            sums[7] += 1.0
            continue
        if abs(row[j]) > grid[1] * scale[j]:
            sums[2] += 1.0
            hit[j] = True
        sums[3] += 1.0 if rounded[j] == 0 and row[j] != 0 else 0.0
        x, y = np.float64(row[j]) * unit, np.float64(rounded[j] * scale[j]) * unit
        sums[4] += x * x
        sums[5] += x * y
        sums[6] += (y - x) * (y - x)
