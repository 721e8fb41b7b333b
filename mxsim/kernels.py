"""The Numba loops behind quantize.py: block maxima, rows, codes.

What happens to one element or one scale is in rounding.py.  What holds everywhere here:

- Arrays arrive C-contiguous as (outer, n, m), in blocks of (rows, columns).  Blocks along the last
  axis have one row, blocks along the first one column.  Loops walk rows and keep one row of block
  maxima, so no layout needs a transpose or a copy.
- Constants arrive as arguments in the array's own float type: a captured global would be frozen
  into the compile cache, and a float64 literal would widen float32 arithmetic.

Arguments that always travel together are tuples, built in quantize.py: ``scaling``, ``grid`` and
``layout`` (see rounding.py), ``random`` (see philox.draw), and

    style = (mode, zero, one_sided)     rounding; -0.0, or 0.0 where -0 is lost; two's complement
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxsim.bits import from_bits, largest_of_32, magnitude_bits, with_sign
from mxsim.jit import kernel
from mxsim.philox import WINDOW, draw
from mxsim.rounding import (
    EVEN,
    STOCHASTIC,
    block_scale,
    cap_positive,
    encode,
    ordinary_scale,
    raise_tiny,
    range_factors,
    round_float,
    round_magnitude,
    round_stochastically,
    scaled,
)

GROUP = 64  # blocks handled at once along the last axis
TILE = 4096  # columns handled at once when walking rows: 32 rows of them fit the L2 cache


# ---------------------------------------------------------------- columns


@kernel
def column_maxima(x: Any, left: Any, right: Any, bits: Any) -> None:
    """x (rows, m) -> bits (right - left,): the largest bit pattern of |x| down each column."""
    rows = x.shape[0]
    bits[:] = 0
    whole = rows - rows % 4
    for i in range(0, whole, 4):  # four rows a pass: a quarter of the traffic to bits
        a, b = x[i, left:right], x[i + 1, left:right]
        c, d = x[i + 2, left:right], x[i + 3, left:right]
        for j in range(bits.size):
            p, q = magnitude_bits(a[j]), magnitude_bits(b[j])
            r, s = magnitude_bits(c[j]), magnitude_bits(d[j])
            p = p if p > q else q
            r = r if r > s else s
            p = p if p > r else r
            bits[j] = p if p > bits[j] else bits[j]
    for i in range(whole, rows):
        a = x[i, left:right]
        for j in range(bits.size):
            p = magnitude_bits(a[j])
            bits[j] = p if p > bits[j] else bits[j]


@kernel
def tile_maxima(x: Any, left: Any, right: Any, columns: Any, bits: Any) -> Any:
    """x (rows, m), a row of blocks of ``columns`` -> their largest bit patterns (blocks,), in bits.

    Columns left .. right - 1 only; bits must have room for all of them.
    """
    blocks = -(-(right - left) // columns)
    if x.shape[0] == 1:
        block_maxima(x[0, left:right], columns, bits[:blocks])
        return bits[:blocks]
    bits = bits[: right - left]
    column_maxima(x, left, right, bits)
    if columns > 1:
        block_maxima(bits, columns, bits[:blocks])  # block k is read before bits[k] is written
    return bits[:blocks]


@kernel
def block_maxima(run: Any, block: Any, bits: Any) -> None:
    """Largest bit pattern in each of a run's consecutive blocks, the last maybe shorter."""
    whole = run.size // block
    if block == 32:
        for k in range(whole):
            bits[k] = largest_of_32(run, k * 32)
    for k in range(0 if block == 32 else whole):
        largest = magnitude_bits(run[k * block])
        values = run[k * block : k * block + block]
        for j in range(block):
            b = magnitude_bits(values[j])
            largest = b if b > largest else largest
        bits[k] = largest
    if whole < bits.size:
        largest = magnitude_bits(run[whole * block])
        for j in range(whole * block, run.size):
            b = magnitude_bits(run[j])
            largest = b if b > largest else largest
        bits[whole] = largest


@kernel
def spread(values: Any, columns: Any, row: Any) -> None:
    """values (blocks,) -> row: each block's value at its ``columns`` columns, the last maybe fewer.

    ``row`` may start with ``values`` itself.
    """
    for k in range(values.size - 1, -1, -1):
        row[k * columns : k * columns + columns] = values[k]


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
def tile_width(m: Any, columns: Any) -> Any:
    """Columns handled at once: about TILE, a multiple of the block's, at most a row."""
    return min(m, max(TILE // columns * columns, columns))


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


@kernel
def finite_maximum(x: Any) -> Any:
    """Largest magnitude among the finite elements of x (n,); 0 if there are none."""
    like = x.dtype.type(0)
    nothing, infinity = magnitude_bits(like), magnitude_bits(x.dtype.type(np.inf))
    largest = nothing
    for i in range(x.size):  # on bit patterns: a maximum of floats does not vectorize
        bits = magnitude_bits(x[i])
        bits = bits if bits < infinity else nothing
        largest = bits if bits > largest else largest
    return from_bits(largest, like)


@kernel
def round_elementwise(x: Any, out: Any, mode: Any, spec: Any, random: Any) -> None:
    """x, out (n,): each element rounded to a floating-point format (spec: rounding.round_float).

    ``out`` may be x, but see ``round_in_place``.
    """
    if mode == EVEN:  # a constant mode lets the others' corrections go
        for i in range(x.size):
            out[i] = round_float(x[i], EVEN, spec)
        return
    if mode != STOCHASTIC:
        for i in range(x.size):
            out[i] = round_float(x[i], mode, spec)
        return
    grid, beyond, of_infinity, infinity = spec
    u = random[0][:0]
    for i in range(x.size):
        if i % WINDOW == 0:
            u = draw(random, i, min(WINDOW, x.size - i))
        v = x[i]
        q = abs(v)
        down, up = range_factors(q)
        g = (grid[0] * down, infinity, grid[2], grid[3])
        if v != v:
            out[i] = v
        elif q == infinity:
            out[i] = with_sign(of_infinity, v)
        elif q >= grid[1] + grid[1]:  # further than any rounding reaches
            out[i] = with_sign(beyond, v)
        else:
            r = round_stochastically(q * down, u[i % WINDOW], g) * up
            out[i] = with_sign(r if r <= grid[1] else beyond, v)


@kernel
def round_in_place(x: Any, mode: Any, spec: Any) -> None:
    """x (n,): as round_elementwise into x itself, any mode but stochastic.

    Two names for one array would keep that loop scalar: LLVM has to suppose that they overlap.
    """
    if mode == EVEN:
        for i in range(x.size):
            x[i] = round_float(x[i], EVEN, spec)
    else:
        for i in range(x.size):
            x[i] = round_float(x[i], mode, spec)


@kernel
def rotate_rows(x: Any, signs: Any, size: Any) -> None:
    """x (n, m), in place: H D x along the first axis, in groups of ``size`` rows (a power of two).

    D = diag(signs), H the orthonormal Walsh-Hadamard matrix of each group.  Rows that do not fill a
    group are taken in groups of the largest power of two that fits.
    """
    n, m = x.shape
    one = x.dtype.type(1)
    first = 0
    while first < n:
        group = size
        while group > n - first:
            group //= 2
        factor = one / np.sqrt(x.dtype.type(group))
        for i in range(first, first + group):
            sign = x.dtype.type(signs[i]) * factor
            for j in range(m):
                x[i, j] *= sign
        half = 1
        while half < group:
            for low in range(first, first + group, 2 * half):
                for i in range(low, low + half):
                    a, b = x[i], x[i + half]
                    for j in range(m):
                        s, d = a[j] + b[j], a[j] - b[j]
                        a[j] = s
                        b[j] = d
            half *= 2
        first += group
