"""Adversarial inputs for a quantizer: ties, powers of two, thresholds, random bits.

Rows are blocks. Every function is deterministic; `dtype` is the float type of what it returns.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests import oracle

Array = NDArray[Any]
DTYPES = (np.float32, np.float64)

# Block maxima whose mantissa sits on a threshold of some rule and format: 1 (floor, ceil), the top
# of a format (rceil), 2 - 2^-(m+1) (even)
THRESHOLD_MANTISSAS = (1, 1.5, 1.75, 1.875, 1.984375, 1.9375, 1.9921875)


def with_neighbours(x: Array) -> Array:
    """x >= 0 and the next float on either side of each entry, what is finite of it."""
    with np.errstate(over="ignore", under="ignore"):
        near = np.concatenate([x, np.nextafter(x, x.dtype.type(np.inf)), np.nextafter(x, -x)])
    return np.asarray(near[np.isfinite(near)])


def powers_of_two(dtype: Any) -> Array:
    """Every power of two that the float type holds, subnormals included."""
    info = np.finfo(dtype)
    return np.asarray(np.ldexp(dtype(1), np.arange(info.minexp - info.nmant, info.maxexp)))


@cache
def block_maxima(dtype: Any) -> Array:
    """Maxima around every threshold of every rule, in each binade where the scale can change.

    float64: from where every scale byte is 0 to where every one is 254, and the far ends.
    """
    powers = powers_of_two(dtype).astype(np.float64)
    if dtype is np.float64:
        exponent = np.log2(powers)  # exact: they are powers of two, and only used to choose
        powers = powers[(np.abs(exponent) < 160) | (np.abs(exponent) > 1000)]
    with np.errstate(over="ignore", under="ignore"):
        maxima = np.multiply.outer(powers, np.array(THRESHOLD_MANTISSAS)).ravel().astype(dtype)
    largest = np.finfo(dtype).max
    return np.unique(np.append(with_neighbours(maxima[np.isfinite(maxima)]), largest))


def maxima_blocks(dtype: Any) -> Array:
    """(blocks, 3): each block maximum of `block_maxima`, its negative, and something below it."""
    maxima = block_maxima(dtype)
    share = np.random.default_rng(1).uniform(0, 1, maxima.shape)
    return np.stack([maxima, -maxima, (maxima * share).astype(dtype)], axis=1)


def ties(fmt: str) -> Array:
    """Grid values, midpoints, and points past the largest, in float64 at scale 1, ascending."""
    grid = oracle.grid_array(fmt)
    half_step = (grid[-1] - grid[-2]) / 2
    beyond = grid[-1] + half_step * np.arange(1, 9)  # 464 between 448 and the missing 480
    return np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, beyond, [grid[1] / 4]])


def tie_blocks(fmt: str, dtype: Any, exponent: int) -> Array:
    """(blocks, 32): every tie and its neighbours, both signs, at scale 2^exponent.

    Column 0 pins the scale: 2^emax does it for every rule, the format's largest for all but `ceil`,
    and the float below 2^(emax+1) for `floor`, whose blocks saturate.
    """
    scale = 2.0**exponent
    pins = np.array([2.0 ** oracle.emax(fmt), float(oracle.largest(fmt))]) * scale
    with np.errstate(over="ignore", under="ignore"):
        saturating = np.nextafter(dtype(2.0 ** (oracle.emax(fmt) + 1) * scale), dtype(0))
        points = with_neighbours((ties(fmt) * scale).astype(dtype))
    blocks = []
    for pin in [*pins.astype(dtype), saturating]:
        inside = points[points <= pin]
        signed = np.concatenate([inside, -inside])
        filled = np.zeros(-(-signed.size // 31) * 31, dtype)
        filled[: signed.size] = signed
        column = np.full((filled.size // 31, 1), pin, dtype)
        blocks.append(np.concatenate([column, filled.reshape(-1, 31)], axis=1))
    return np.concatenate(blocks)


def scale_exponents(fmt: str, dtype: Any) -> list[int]:
    """Scales at which to place ties: the bottom byte, the next, the middle, the top that fits."""
    float_top = 127 - (oracle.emax(fmt) if dtype is np.float32 else 0)
    return [-127, -126, 0, float_top]


@cache
def random_bits(dtype: Any, blocks: int = 384) -> Array:
    """(blocks, 32) of uniform bit patterns: every exponent, subnormals, NaN (both kinds), Inf."""
    unsigned = np.uint32 if dtype is np.float32 else np.uint64
    rng = np.random.default_rng(2)
    return rng.integers(0, np.iinfo(unsigned).max, (blocks, 32), unsigned, endpoint=True).view(
        dtype
    )


@cache
def random_near(dtype: Any, blocks: int = 384) -> Array:
    """(blocks, 32) of random bits whose exponents lie within 20 binades below a block's own.

    Half of the mantissas are short, so that elements meet ties; block exponents cover float32.
    """
    rng = np.random.default_rng(3)
    mantissa = 1 + rng.uniform(0, 1, (blocks, 32))
    short = np.floor(mantissa * 256) / 256
    mantissa = np.where(rng.integers(0, 2, (blocks, 32)) == 0, mantissa, short)
    exponent = rng.integers(-149, 127, (blocks, 1)) - rng.integers(0, 21, (blocks, 32))
    sign = rng.choice([-1.0, 1.0], (blocks, 32))
    return np.asarray((sign * np.ldexp(mantissa, exponent)).astype(dtype))


def layouts(x: Array) -> dict[str, Array]:
    """The same values in memory arranged otherwise; x has shape (n, m), both even."""
    padded = np.zeros((2 * x.shape[0], 3 * x.shape[1]), x.dtype)
    padded[::2, ::3] = x
    backwards = np.ascontiguousarray(x[::-1, ::-1])
    read_only = x.copy()
    read_only.setflags(write=False)
    unaligned = np.zeros(x.nbytes + 1, np.uint8)[1:].view(x.dtype).reshape(x.shape)
    unaligned[...] = x
    return {
        "Fortran order": np.asfortranarray(x),
        "transposed": np.ascontiguousarray(x.T).T,
        "strided": padded[::2, ::3],
        "negative strides": backwards[::-1, ::-1],
        "read-only": read_only,
        "unaligned": unaligned,
        "big-endian": x.astype(x.dtype.newbyteorder(">")),
    }
