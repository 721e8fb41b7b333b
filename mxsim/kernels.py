"""The Numba loops behind quantize.py: shared scale, element rounding, codes.

What holds everywhere here:

- Exponents come from bits, never from a floating-point log2.  No fastmath, so NaN tests and
  roundings mean what they say.
- One element rounding, ``round_magnitude``, serves every loop.  It works on q = |x| / scale, where
  the element grid is fixed; scaling by a power of two is exact both ways, so this is the one
  rounding that an element undergoes.
- Arrays arrive C-contiguous as (outer, n, inner), blocks running along n.  With inner > 1 the
  loops walk rows and keep one row of block maxima, so first-axis blocks need no transpose.
- Constants arrive as arguments in the array's own float type: a captured global would be frozen
  into the compile cache, and a float64 literal would widen float32 arithmetic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxsim.bits import (
    binade,
    from_bits,
    magnitude_bits,
    normal_exponent,
    power_of_two,
    with_sign,
)
from mxsim.jit import kernel

EVEN, AWAY, ZERO = 0, 1, 2  # element rounding, in the order of formats.ROUNDINGS

TILE = 1024  # columns handled at once when walking rows: the block of rows stays in cache


@kernel
def round_magnitude(q: Any, mode: Any, grid: Any) -> Any:
    """Round q >= 0 (finite) to the element grid and saturate; exact in q's own float type.

    Adding and subtracting a power of two whose unit in the last place is the grid's step makes the
    processor round to nearest even; the other modes correct that result, and their tests are
    exact because q - r is.  Clamping q to the largest first is the same as saturating after
    rounding (the largest is on the grid) and bounds the intermediate sum.
    """
    smallest_normal, largest, magic_factor, half_ulp = grid
    q = q if q < largest else largest
    power = binade(q)
    magic = (power if power > smallest_normal else smallest_normal) * magic_factor
    r = (q + magic) - magic
    if mode == AWAY:
        half_step = magic * half_ulp
        if q - r == half_step:
            r += half_step + half_step
    elif mode == ZERO and r > q:
        half_step = magic * half_ulp
        r -= half_step + half_step
    return r


@kernel
def scale_exponent(amax: Any, emax: Any, bump_above: Any) -> Any:
    """Shared exponent of a block with finite maximum magnitude ``amax`` > 0, clamped to E8M0.

    floor(log2 amax) - emax, plus one if amax's significand lies above ``bump_above`` (every scale
    rule has this shape, see BlockFormat.bump_threshold).
    """
    shift = np.int64(0)
    if binade(amax) == 0:  # subnormal: 2**64 brings it into the normal range, exactly
        amax = amax * power_of_two(np.int64(64), amax)
        shift = np.int64(64)
    exponent = normal_exponent(amax) - shift - emax
    if amax / binade(amax) > bump_above:
        exponent += 1
    return min(max(exponent, -127), 127)


@kernel
def scale_value(exponent: Any, like: Any) -> Any:
    """2**exponent for exponent in [-127, 127]; in float32, 2**-127 is subnormal."""
    if exponent < -126:
        return power_of_two(exponent + 64, like) * power_of_two(np.int64(-64), like)
    return power_of_two(exponent, like)


@kernel
def _block_scale(bits: Any, nonfinite: Any, emax: Any, bump_above: Any, like: Any) -> Any:
    """E8M0 byte, 1/scale and scale of a block from its maximum's bit pattern.

    A zero block gets byte 0 with both factors 1, which keeps its signed zeros and avoids
    arithmetic on the subnormal 2**-127.  A block with a NaN or Inf gets byte 255 and NaN factors.
    """
    one = power_of_two(np.int64(0), like)
    if bits == 0:
        return np.uint8(0), one, one
    if bits >= nonfinite:
        nan = from_bits(nonfinite, like) * (one - one)  # Inf * 0
        return np.uint8(255), nan, nan
    exponent = scale_exponent(from_bits(bits, like), emax, bump_above)
    return np.uint8(exponent + 127), scale_value(-exponent, like), scale_value(exponent, like)


@kernel
def _quantize_run(
    x: Any, out: Any, inverse: Any, scale: Any, mode: Any, grid: Any, zero: Any
) -> Any:
    """Quantize-dequantize a contiguous run that shares one finite scale."""
    if mode == EVEN:  # kept apart so that the common mode vectorizes without the corrections
        for i in range(x.size):
            r = round_magnitude(abs(x[i]) * inverse, EVEN, grid)
            out[i] = with_sign(r, x[i]) * scale + zero
    else:
        for i in range(x.size):
            r = round_magnitude(abs(x[i]) * inverse, mode, grid)
            out[i] = with_sign(r, x[i]) * scale + zero


@kernel
def fake_quantize_last(
    x: Any,
    out: Any,
    block: Any,
    nonfinite: Any,
    emax: Any,
    bump_above: Any,
    mode: Any,
    grid: Any,
    zero: Any,
) -> None:
    """x, out (rows, n): blocks run along the contiguous last axis.  out may be x."""
    rows, n = x.shape
    for i in range(rows):
        for start in range(0, n, block):
            stop = min(start + block, n)
            run = x[i, start:stop]
            bits = magnitude_bits(run[0])
            for j in range(1, run.size):
                b = magnitude_bits(run[j])
                bits = b if b > bits else bits
            _, inverse, scale = _block_scale(bits, nonfinite, emax, bump_above, run[0])
            if bits >= nonfinite:
                out[i, start:stop] = scale
            else:
                _quantize_run(run, out[i, start:stop], inverse, scale, mode, grid, zero)


@kernel
def _raise_maxima(row: Any, bits: Any) -> Any:
    """bits[j] = max(bits[j], |row[j]|) on bit patterns."""
    for j in range(row.size):
        b = magnitude_bits(row[j])
        bits[j] = b if b > bits[j] else bits[j]


@kernel
def _quantize_row(
    row: Any, out: Any, inverse: Any, scale: Any, mode: Any, grid: Any, zero: Any
) -> Any:
    """Quantize-dequantize a contiguous row in which every column has its own scale.

    A NaN factor makes its column NaN: the rounded magnitude is finite, its product with NaN not.
    """
    if mode == EVEN:
        for j in range(row.size):
            r = round_magnitude(abs(row[j]) * inverse[j], EVEN, grid)
            out[j] = with_sign(r, row[j]) * scale[j] + zero
    else:
        for j in range(row.size):
            r = round_magnitude(abs(row[j]) * inverse[j], mode, grid)
            out[j] = with_sign(r, row[j]) * scale[j] + zero


@kernel
def fake_quantize_rows(
    x: Any,
    out: Any,
    block: Any,
    nonfinite: Any,
    emax: Any,
    bump_above: Any,
    mode: Any,
    grid: Any,
    zero: Any,
) -> None:
    """x, out (outer, n, inner): blocks run along the middle axis.  out may be x."""
    outer, n, inner = x.shape
    width = min(inner, TILE)
    bits = np.empty(width, type(nonfinite))
    inverse = np.empty(width, x.dtype)
    scale = np.empty(width, x.dtype)
    for o in range(outer):
        for start in range(0, n, block):
            stop = min(start + block, n)
            for left in range(0, inner, width):
                right = min(left + width, inner)
                bits[:] = 0
                for i in range(start, stop):
                    _raise_maxima(x[o, i, left:right], bits)
                for j in range(right - left):
                    _, inverse[j], scale[j] = _block_scale(
                        bits[j], nonfinite, emax, bump_above, x[o, start, j]
                    )
                for i in range(start, stop):
                    _quantize_row(
                        x[o, i, left:right], out[o, i, left:right], inverse, scale, mode, grid, zero
                    )


@kernel
def _code(
    r: Any, negative: Any, emin: Any, man_bits: Any, total_bits: Any, is_integer: Any, grid: Any
) -> Any:
    """Bit pattern of an element whose rounded magnitude is r, as an int64."""
    smallest_normal = grid[0]
    if r < smallest_normal:
        magnitude = np.int64(r * power_of_two(man_bits - emin, r))
    else:
        field = normal_exponent(r) - emin + 1
        fraction = np.int64(r / binade(r) * power_of_two(man_bits, r)) - (1 << man_bits)
        magnitude = (field << man_bits) + fraction
    if is_integer:
        return (-magnitude if negative else magnitude) & ((1 << total_bits) - 1)
    return magnitude + ((1 << (total_bits - 1)) if negative else 0)


@kernel
def quantize_codes(
    x: Any,
    codes: Any,
    scales: Any,
    block: Any,
    nonfinite: Any,
    emax: Any,
    emin: Any,
    man_bits: Any,
    total_bits: Any,
    is_integer: Any,
    bump_above: Any,
    mode: Any,
    grid: Any,
) -> None:
    """x, codes (outer, n, inner), scales (outer, blocks, inner): element codes and scale bytes.

    A block with a NaN or Inf gets byte 255 and codes 0: FP6, FP4 and INT8 cannot hold a NaN, so
    the scale alone carries it (MX v1.0 section 6.3 leaves the element codes open).
    """
    outer, n, inner = x.shape
    for o in range(outer):
        for k in range(scales.shape[1]):
            start = k * block
            stop = min(start + block, n)
            for j in range(inner):
                bits = magnitude_bits(x[o, start, j])
                for i in range(start + 1, stop):
                    b = magnitude_bits(x[o, i, j])
                    bits = b if b > bits else bits
                byte, inverse, _ = _block_scale(bits, nonfinite, emax, bump_above, x[o, start, j])
                scales[o, k, j] = byte
                for i in range(start, stop):
                    v = x[o, i, j]
                    if bits >= nonfinite:
                        codes[o, i, j] = 0
                    else:
                        r = round_magnitude(abs(v) * inverse, mode, grid)
                        negative = with_sign(grid[1], v) < 0
                        codes[o, i, j] = _code(
                            r, negative, emin, man_bits, total_bits, is_integer, grid
                        )


@kernel
def round_elementwise(
    x: Any, out: Any, mode: Any, overflows: Any, grid: Any, infinity: Any
) -> None:
    """x, out (n,): round each element to a floating-point format, NaN and the sign of zero kept.

    Beyond the largest, rounding to nearest overflows to Inf (IEEE 754) if ``overflows``, else and
    toward zero it stops at the largest.  Values of 2**64 and more are rounded at 2**-64 of their
    size, where the magic sum cannot overflow; every format's normal range covers that.
    """
    smallest_normal, largest, magic_factor, half_ulp = grid
    unbounded = (smallest_normal, infinity, magic_factor, half_ulp)
    one = power_of_two(np.int64(0), largest)
    large = power_of_two(np.int64(64), largest)
    small = power_of_two(np.int64(-64), largest)
    for i in range(x.size):
        v = x[i]
        if v != v:
            out[i] = v
            continue
        q = abs(v)
        down = small if q >= large else one
        up = large if q >= large else one
        r = round_magnitude(q * down, mode, unbounded) * up
        if not r <= largest:  # also when r is NaN, from Inf - Inf
            r = infinity if overflows or q == infinity else largest
        out[i] = with_sign(r, v)
