"""What happens to one element and to one block's scale: the scalar kernels that every loop calls.

- Exponents come from bits, never from a floating-point log2.  No fastmath, so NaN tests and
  roundings mean what they say.
- An element is rounded once: either q = |x| / scale on the element grid, or |x| itself on the grid
  times the scale.  Scales are powers of two, so the two are the same, bit for bit, as long as
  nothing leaves the floats' range: then the scale is called ordinary, and the second way, which has
  two products fewer, is taken.

Arguments that always travel together are tuples, built in rounders.py:

    scaling = (nan_from, emax, bump_above, lowest, highest)       nan_from: bits of the first block
                    maximum that makes a NaN; lowest .. highest: bits of maxima with ordinary scales
    grid = (smallest_normal, largest, magic_factor, half_ulp)                   element format
    layout = (emin, man_bits, total_bits, is_integer)                           its bit pattern
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxsim.bits import (
    binade,
    from_bits,
    normal_exponent,
    power_of_two,
    unit_fraction,
    with_sign,
)
from mxsim.jit import kernel

EVEN, AWAY, ZERO, STOCHASTIC = 0, 1, 2, 3  # element rounding, in the order of formats.ROUNDINGS
NOT_AT_ALL = -1


# ---------------------------------------------------------------- one element


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
def round_stochastically(q: Any, u: Any, grid: Any) -> Any:
    """Round q >= 0 up with probability (distance from the grid point below) / step.

    u: uint32 random bits, of which the upper 24 are a fraction in [0, 1); up if the distance in
    steps exceeds it.  A distance that is a multiple of 2**-24 steps gets its probability exactly.
    """
    smallest_normal, largest, magic_factor, half_ulp = grid
    q = q if q < largest else largest
    power = binade(q)
    magic = (power if power > smallest_normal else smallest_normal) * magic_factor
    step = magic * half_ulp + magic * half_ulp
    r = (q + magic) - magic
    below = r - step if r > q else r
    return below + step if q - below > unit_fraction(u, q) * step else below


@kernel
def cap_positive(r: Any, x: Any, one_sided: Any, grid: Any) -> Any:
    """The largest positive of a two's complement format lies one step below its most negative."""
    largest = grid[1]
    step = grid[0] * grid[2] * (grid[3] + grid[3])
    return largest - step if one_sided and r == largest and x > 0 else r


@kernel
def raise_tiny(q: Any, x: Any) -> Any:
    """q = |x| / scale, but at least 2**-110 where x is not 0: the product may have underflowed.

    Below 2**-24 steps only u = 0 rounds up, whatever the distance; 2**-110 is below that for any
    element of 8 bits (7 exponent bits: a step of 2**-62).
    """
    tiny = power_of_two(np.int64(-110), q)
    return tiny if q < tiny and x != 0 else q


@kernel
def encode(r: Any, negative: Any, layout: Any, grid: Any) -> Any:
    """Bit pattern of an element of magnitude r (on the grid), as an int64."""
    emin, man_bits, total_bits, is_integer = layout
    if r < grid[0]:
        magnitude = np.int64(r * power_of_two(man_bits - emin, r))
    else:
        field = normal_exponent(r) - emin + 1
        fraction = np.int64(r / binade(r) * power_of_two(man_bits, r)) - (1 << man_bits)
        magnitude = (field << man_bits) + fraction
    if is_integer:
        return (-magnitude if negative else magnitude) & ((1 << total_bits) - 1)
    return magnitude + ((1 << (total_bits - 1)) if negative else 0)


@kernel
def round_float(v: Any, mode: Any, spec: Any) -> Any:
    """v rounded to a floating-point format, any mode but stochastic; NaN and the sign of 0 kept.

    spec = (grid, beyond, of_infinity, infinity): what a value past the largest becomes, what Inf
    becomes, and Inf itself.  Values of 2**64 and more are rounded at 2**-64 of their size, where
    the magic sum cannot overflow, and values below 2**-64 at 2**64 of it, where nothing is
    subnormal: exact both ways.  Free of branches, so that it vectorizes.
    """
    grid, beyond, of_infinity, infinity = spec
    smallest_normal, largest, magic_factor, half_ulp = grid
    q = abs(v)
    down, up = range_factors(q)
    g = (smallest_normal * down, infinity, magic_factor, half_ulp)
    r = round_magnitude(q * down, mode, g) * up
    r = r if r <= largest else beyond
    r = r if q < infinity else of_infinity
    return v if v != v else with_sign(r, v)


@kernel
def rounded_by(v: Any, how: Any) -> Any:
    """v rounded by ``how`` = (mode, spec) of round_float; mode NOT_AT_ALL leaves it alone."""
    return v if how[0] < 0 else round_float(v, how[0], how[1])


@kernel
def range_factors(q: Any) -> Any:
    """Powers of two (down, up), down * up = 1, with q * down away from the ends of the range."""
    one = power_of_two(np.int64(0), q)
    large, small = power_of_two(np.int64(64), q), power_of_two(np.int64(-64), q)
    down = small if q >= large else (large if q < small else one)
    up = large if q >= large else (small if q < small else one)
    return down, up


# ---------------------------------------------------------------- one block's scale


@kernel
def ordinary_scale(bits: Any, scaling: Any, like: Any) -> Any:
    """The scale of a block whose maximum is ordinary; of an all-zero block 0, which serves as well.

    As block_scale, without exponents and ends of the range: floats alone, at full vector width.
    """
    _, emax, bump_above, _, _ = scaling
    amax = from_bits(bits, like)
    power = binade(amax)
    scale = power * power_of_two(-emax, like)
    return scale + scale if amax > bump_above * power else scale


@kernel
def scaled(grid: Any, scale: Any) -> Any:
    """``grid`` in units of x instead of units of the scale."""
    return grid[0] * scale, grid[1] * scale, grid[2], grid[3]


@kernel
def block_scale(bits: Any, scaling: Any, like: Any) -> Any:
    """Shared exponent, 1/scale and scale of a block, from its maximum's bit pattern.

    The exponent is floor(log2 amax) - emax, plus one if amax's significand lies above
    ``bump_above`` (every scale rule has this shape, see BlockFormat.bump_threshold), clamped to
    -127..127.  From ``nan_from`` on it is 128 (byte 255) and both factors are NaN; an Inf below
    that gets 127.  Free of branches, so that it vectorizes over columns.
    """
    nan_from, emax, bump_above, _, _ = scaling
    one = power_of_two(np.int64(0), like)
    zero = one - one
    half = power_of_two(np.int64(-1), like)
    amax = from_bits(bits, like)
    subnormal = binade(amax) == zero
    amax = amax * (power_of_two(np.int64(32), like) if subnormal else one)  # exact
    power = binade(amax)
    exponent = normal_exponent(amax) - emax
    exponent -= np.int64(32) if subnormal else np.int64(0)
    exponent += np.int64(1) if amax > bump_above * power else np.int64(0)
    exponent = exponent if exponent > np.int64(-127) else np.int64(-127)
    exponent = exponent if exponent < np.int64(127) else np.int64(127)
    exponent = exponent if power - power == zero else np.int64(127)  # Inf - Inf is NaN
    # 2**-127 is subnormal in float32: reached by halving.
    low, high = exponent < np.int64(-126), exponent > np.int64(126)
    scale = power_of_two(np.int64(-126) if low else exponent, like) * (half if low else one)
    inverse = power_of_two(np.int64(-126) if high else -exponent, like) * (half if high else one)
    nan = zero / zero
    bad = bits >= nan_from
    return (
        np.int64(128) if bad else exponent,
        nan if bad else inverse,
        nan if bad else scale,
    )
