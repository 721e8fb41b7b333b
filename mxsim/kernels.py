"""The Numba loops behind quantize.py: scales from block maxima, rows, codes, statistics.

What happens to one element or one scale is in rounding.py, maxima are in maxima.py.  What holds
everywhere here:

- Arrays arrive C-contiguous as (outer, n, m), in blocks of (rows, columns).  Blocks along the last
  axis have one row, blocks along the first one column.  Loops walk rows and keep one row of block
  maxima, so no layout needs a transpose or a copy.
- Constants arrive as arguments in the array's own float type: a captured global would be frozen
  into the compile cache, and a float64 literal would widen float32 arithmetic.

Arguments that always travel together are tuples, built in rounders.py: ``scaling``, ``grid`` and
``layout`` (see rounding.py), ``random`` (see philox.draw), and

    style = (mode, zero, one_sided)     rounding; -0.0, or 0.0 where -0 is lost; two's complement
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxsim.bits import with_sign
from mxsim.jit import kernel
from mxsim.maxima import block_maxima, spread, tile_maxima, tile_width
from mxsim.philox import draw
from mxsim.rounding import (
    EVEN,
    STOCHASTIC,
    block_scale,
    cap_positive,
    encode,
    ordinary_scale,
    raise_tiny,
    round_magnitude,
    round_stochastically,
    scaled,
)

GROUP = 64  # blocks handled at once along the last axis


# ---------------------------------------------------------------- scales


@kernel
def column_scales(
    largest: Any, columns: Any, scaling: Any, like: Any, exponents: Any, inverse: Any, scale: Any
) -> None:
    """Exponent and factors of every column, from the maxima (blocks,) of blocks of ``columns``."""
    blocks = largest.size
    for k in range(blocks):
        exponents[k], inverse[k], scale[k] = block_scale(largest[k], scaling, like)
    if columns > 1:
        spread(exponents[:blocks], columns, exponents)
        spread(inverse[:blocks], columns, inverse)
        spread(scale[:blocks], columns, scale)


@kernel
def _all_ordinary(bits: Any, scaling: Any) -> Any:
    """Whether every block maximum is ordinary: ``ordinary_scale`` knows its scale."""
    lowest, highest = scaling[3], scaling[4]
    low = high = lowest
    for k in range(bits.size):
        b = bits[k] if bits[k] else lowest  # zero is ordinary
        low = b if b < low else low
        high = b if b > high else high
    return low == lowest and high <= highest


# ---------------------------------------------------------------- rows


@kernel
def _round_row(row: Any, out: Any, inverse: Any, scale: Any, style: Any, grid: Any) -> None:
    """Quantize-dequantize a contiguous row in which every column has its own scale.

    A NaN factor makes its column NaN: the rounded magnitude is finite, its product with NaN not.
    """
    mode, zero, one_sided = style
    for j in range(row.size):
        r = round_magnitude(abs(row[j]) * inverse[j], mode, grid)
        out[j] = with_sign(cap_positive(r, row[j], one_sided, grid), row[j]) * scale[j] + zero


@kernel
def _round_ordinary_row(row: Any, out: Any, scale: Any, style: Any, grid: Any) -> None:
    """As _round_row where all scales are ordinary: the grid is scaled, elements are not."""
    mode, zero, one_sided = style
    if mode == EVEN and not one_sided:  # kept apart: vectorizes without the corrections
        for j in range(row.size):
            r = round_magnitude(abs(row[j]), EVEN, scaled(grid, scale[j]))
            out[j] = with_sign(r, row[j]) + zero
    else:
        for j in range(row.size):
            g = scaled(grid, scale[j])
            r = round_magnitude(abs(row[j]), mode, g)
            out[j] = with_sign(cap_positive(r, row[j], one_sided, g), row[j]) + zero


@kernel
def _round_row_stochastically(
    row: Any, out: Any, u: Any, inverse: Any, scale: Any, style: Any, grid: Any
) -> None:
    """As _round_row, with the random bits u (row.size,)."""
    _, zero, one_sided = style
    for j in range(row.size):
        q = raise_tiny(abs(row[j]) * inverse[j], row[j])
        r = round_stochastically(q, u[j], grid)
        out[j] = with_sign(cap_positive(r, row[j], one_sided, grid), row[j]) * scale[j] + zero


@kernel
def _round_ordinary_row_stochastically(
    row: Any, out: Any, u: Any, scale: Any, style: Any, grid: Any
) -> None:
    """As _round_ordinary_row, with the random bits u (row.size,)."""
    _, zero, one_sided = style
    for j in range(row.size):
        g = scaled(grid, scale[j])
        r = round_stochastically(abs(row[j]), u[j], g)
        out[j] = with_sign(cap_positive(r, row[j], one_sided, g), row[j]) + zero


# ---------------------------------------------------------------- arrays


@kernel
def fake_quantize_last(x: Any, out: Any, block: Any, scaling: Any, style: Any, grid: Any) -> None:
    """x, out (rows, n): blocks along the last axis.  out may be x.

    The fast path of the commonest layout; same bits as fake_quantize_blocks.  Works on GROUP blocks
    at once: their maxima, then their scales (vectorized over blocks), then their elements.
    """
    rows, n = x.shape
    bits = np.empty(GROUP, type(scaling[0]))
    scale = np.empty(GROUP, x.dtype)
    for i in range(rows):
        for left in range(0, n, GROUP * block):
            right = min(left + GROUP * block, n)
            run, target = x[i, left:right], out[i, left:right]
            blocks = -(-run.size // block)
            block_maxima(run, block, bits[:blocks])
            if not _all_ordinary(bits[:blocks], scaling):
                _round_blocks(run, target, block, bits, scaling, style, grid)
                continue
            for k in range(blocks):
                scale[k] = ordinary_scale(bits[k], scaling, run[0])
            if block == 32:  # a constant length is unrolled
                _round_ordinary_blocks(run, target, 32, scale, style, grid)
            else:
                _round_ordinary_blocks(run, target, block, scale, style, grid)


@kernel
def _round_ordinary_blocks(
    run: Any, out: Any, block: Any, scale: Any, style: Any, grid: Any
) -> None:
    """Quantize-dequantize consecutive blocks of a run, the last maybe shorter."""
    mode, zero, one_sided = style
    whole = run.size // block
    for k in range(whole):
        values, target = run[k * block : k * block + block], out[k * block : k * block + block]
        g = scaled(grid, scale[k])
        if mode == EVEN and not one_sided:  # kept apart: vectorizes without the corrections
            for j in range(block):
                target[j] = with_sign(round_magnitude(abs(values[j]), EVEN, g), values[j]) + zero
        else:
            for j in range(block):
                r = round_magnitude(abs(values[j]), mode, g)
                target[j] = with_sign(cap_positive(r, values[j], one_sided, g), values[j]) + zero
    for j in range(whole * block, run.size):
        g = scaled(grid, scale[whole])
        r = round_magnitude(abs(run[j]), mode, g)
        out[j] = with_sign(cap_positive(r, run[j], one_sided, g), run[j]) + zero


@kernel
def _round_blocks(
    run: Any, out: Any, block: Any, bits: Any, scaling: Any, style: Any, grid: Any
) -> None:
    """As _round_ordinary_blocks, whatever the maxima ``bits`` of the blocks."""
    mode, zero, one_sided = style
    for left in range(0, run.size, block):
        _, down, up = block_scale(bits[left // block], scaling, run[0])
        for j in range(left, min(left + block, run.size)):
            r = round_magnitude(abs(run[j]) * down, mode, grid)
            out[j] = with_sign(cap_positive(r, run[j], one_sided, grid), run[j]) * up + zero


@kernel
def fake_quantize_blocks(
    x: Any, out: Any, shape: Any, scaling: Any, style: Any, grid: Any, random: Any
) -> None:
    """x, out (outer, n, m): blocks of ``shape`` (rows, columns), any rounding.  out may be x."""
    rows, columns = shape
    outer, n, m = x.shape
    width = tile_width(m, columns)
    bits = np.empty(width, type(scaling[0]))
    exponents = np.empty(width, np.int16)
    inverse, scale = np.empty(width, x.dtype), np.empty(width, x.dtype)
    for o in range(outer):
        for top in range(0, n, rows):
            bottom = min(top + rows, n)
            for left in range(0, m, width):
                right = min(left + width, m)
                k = right - left
                largest = tile_maxima(x[o, top:bottom], left, right, columns, bits)
                like = x[o, top, left]
                ordinary = _all_ordinary(largest, scaling)
                if ordinary:
                    for j in range(largest.size):
                        scale[j] = ordinary_scale(largest[j], scaling, like)
                    if columns > 1:
                        spread(scale[: largest.size], columns, scale[:k])
                else:
                    column_scales(
                        largest, columns, scaling, like, exponents[:k], inverse[:k], scale[:k]
                    )
                for i in range(top, bottom):
                    row, target = x[o, i, left:right], out[o, i, left:right]
                    if style[0] != STOCHASTIC:
                        if ordinary:
                            _round_ordinary_row(row, target, scale, style, grid)
                        else:
                            _round_row(row, target, inverse, scale, style, grid)
                        continue
                    u = draw(random, (o * n + i) * m + left, k)
                    if ordinary:
                        _round_ordinary_row_stochastically(row, target, u, scale, style, grid)
                    else:
                        _round_row_stochastically(row, target, u, inverse, scale, style, grid)


@kernel
def quantize_blocks(
    x: Any,
    codes: Any,
    scales: Any,
    shape: Any,
    scaling: Any,
    style: Any,
    grid: Any,
    layout: Any,
    random: Any,
    unit: Any,
    sums: Any,
) -> None:
    """x, codes (outer, n, m), scales (outer, row blocks, column blocks): codes and scale bytes.

    A block with a NaN (or an Inf that counts as one) gets byte 255 and codes 0: FP6, FP4 and INT8
    cannot hold a NaN, so the scale alone carries it (MX v1.0 section 6.3 leaves the codes open).
    ``sums`` (8,) collects statistics, in the order of mxarray.QuantizationStats.from_sums.
    """
    rows, columns = shape
    outer, n, m = x.shape
    width = tile_width(m, columns)
    bits = np.empty(width, type(scaling[0]))
    exponents = np.empty(width, np.int16)
    inverse, scale = np.empty(width, x.dtype), np.empty(width, x.dtype)
    ones = np.ones(width, x.dtype)
    rounded = np.empty(width, x.dtype)
    hit = np.empty(width, np.bool_)
    for o in range(outer):
        for top in range(0, n, rows):
            bottom = min(top + rows, n)
            for left in range(0, m, width):
                right = min(left + width, m)
                k = right - left
                largest = tile_maxima(x[o, top:bottom], left, right, columns, bits)
                like = x[o, top, left]
                column_scales(
                    largest, columns, scaling, like, exponents[:k], inverse[:k], scale[:k]
                )
                hit[:k] = False
                for i in range(top, bottom):
                    row = x[o, i, left:right]
                    if style[0] == STOCHASTIC:
                        u = draw(random, (o * n + i) * m + left, k)
                        _round_row_stochastically(row, rounded, u, inverse, ones, style, grid)
                    else:
                        _round_row(row, rounded, inverse, ones, style, grid)
                    _encode_row(row, rounded, exponents, codes[o, i, left:right], grid, layout)
                    _add_statistics(
                        row, rounded, exponents, inverse, scale, style[2], grid, hit, unit, sums
                    )
                for j in range(0, k, columns):
                    scales[o, top // rows, (left + j) // columns] = exponents[j] + 127
                    sums[0] += 1.0
                    sums[1] += 1.0 if hit[j : min(j + columns, k)].any() else 0.0


@kernel
def _encode_row(row: Any, rounded: Any, exponents: Any, codes: Any, grid: Any, layout: Any) -> None:
    """Codes of a row already rounded in element units."""
    for j in range(row.size):
        if exponents[j] == 128:
            codes[j] = 0
        else:
            negative = with_sign(grid[1], row[j]) < 0
            codes[j] = encode(abs(rounded[j]), negative, layout, grid)


@kernel
def _add_statistics(
    row: Any,
    rounded: Any,
    exponents: Any,
    inverse: Any,
    scale: Any,
    one_sided: Any,
    grid: Any,
    hit: Any,
    unit: Any,
    sums: Any,
) -> None:
    """Add a row's elements to ``sums``; mark columns with a saturated one in ``hit``.

    unit: a power of two that keeps squares in range; what is made of the sums does not see it.
    """
    for j in range(row.size):
        q = abs(row[j]) * inverse[j]
        if exponents[j] == 128 or q - q != 0:  # a NaN block, or an Inf
            sums[7] += 1.0
            continue
        if q > cap_positive(grid[1], row[j], one_sided, grid):
            sums[2] += 1.0
            hit[j] = True
        sums[3] += 1.0 if rounded[j] == 0 and row[j] != 0 else 0.0
        x = np.float64(row[j]) * unit
        y = np.float64(rounded[j]) * (np.float64(scale[j]) * unit)
        sums[4] += x * x
        sums[5] += x * y
        sums[6] += (y - x) * (y - x)
