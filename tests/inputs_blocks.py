"""Adversarial inputs for any element format, for stochastic rounding and for NVFP4.

Rows are blocks, as in inputs.py; every function is deterministic.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests import inputs, oracle_elements
from tests.inputs import Array
from tests.oracle_elements import Element


def tie_blocks(element: Element, dtype: Any, exponent: int = 0) -> Array:
    """(blocks, 32): values, midpoints, points past the end, and their neighbours, both signs.

    Column 0 pins the scale at 2^exponent: 2^emax, the largest, and what saturates under `floor`.
    """
    grid = element.grids[1]
    beyond = grid[-1] + (grid[-1] - grid[-2]) / 2 * np.arange(1, 9)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, beyond, [grid[1] / 4]])
    scale = 2.0**exponent
    with np.errstate(over="ignore", under="ignore"):
        top = np.nextafter(dtype(2.0 ** (element.emax + 1) * scale), dtype(0))
        points = inputs.with_neighbours((points * scale).astype(dtype))
    blocks = []
    for pin in (dtype(2.0**element.emax * scale), dtype(float(element.largest) * scale), top):
        inside = points[points <= pin]
        signed = np.concatenate([inside, -inside])
        filled = np.resize(signed, (-(-signed.size // 31), 31))
        blocks.append(np.insert(filled, 0, pin, axis=1))
    return np.concatenate(blocks).astype(dtype)


def random_words(shape: tuple[int, ...], seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


def deciding_bits(x: Array, element: Element, rule: str = "floor") -> Array:
    """For each element of finite blocks (rows) the noise at which its rounding turns, or beside it.

    u is the part of a step above the value below, or 2^-24 less or more; it is 0 only where that is
    2^-24 at most, and x / scale does not underflow. The eight bits that must not matter are random.
    """
    wide = np.abs(x.astype(np.float64))
    bytes_ = oracle_elements.scale_bytes_bulk(wide.max(axis=1), element, rule)
    scaled = np.ldexp(wide, 127 - bytes_[:, None])
    part = np.zeros(x.shape)
    for negative, grid in zip((False, True), element.grids, strict=True):
        at = np.signbit(x) == negative
        clamped = np.minimum(scaled[at], grid[-1])
        below = np.minimum(np.searchsorted(grid, clamped, side="right") - 1, len(grid) - 2)
        part[at] = (clamped - grid[below]) / (grid[below + 1] - grid[below])
    rng = np.random.default_rng(11)
    turn = np.floor(part * 2.0**24).astype(np.int64) + rng.integers(-1, 2, x.shape)
    underflow = (scaled < np.finfo(x.dtype).tiny) & (wide > 0)
    upper = np.clip(turn, underflow, 2**24 - 1).astype(np.uint32)
    low = rng.integers(0, 256, x.shape, np.uint32)
    return np.asarray((upper << np.uint32(8)) | low)


def tensors(dtype: Any) -> dict[str, Array]:
    """(rows, 48) tensors for formats with a scale for the whole: every magnitude, every special."""
    rng = np.random.default_rng(12)
    normal = rng.normal(size=(16, 48))
    spread = normal * np.exp2(rng.integers(-30, 1, (16, 48)))
    rows = normal * np.exp2(rng.integers(-24, 1, (16, 1)))
    short = np.round(normal * 8) / 8
    specials = normal.copy()
    specials[3, 5], specials[7, 40], specials[9, 0:2] = np.nan, np.inf, (-np.inf, np.nan)
    specials[11, 17], specials[13, ::2] = -np.inf, -0.0
    sound = {
        "normal": normal,
        "spread": spread,
        "rows of different size": rows,
        "short mantissas": short,
        "zeros": np.copysign(np.zeros((16, 48)), normal),
        "one element": np.where(np.arange(16 * 48).reshape(16, 48) == 555, normal, 0),
        "specials": specials,
    }
    scaled = {
        "near the largest": np.clip(rows * 2.0**127, -(2.0**127), 2.0**127) * 1.5,
        "all subnormal": np.round(spread * 2.0**10) * 2.0**-149,
        "few smallest": np.round(normal) * 2.0**-149,
        "around the smallest normal": rows * 2.0**-120,
        "scale at its least": np.round(normal * 2000) * 2.0**-149,
    }
    return {name: x.astype(dtype) for name, x in {**sound, **scaled}.items()}
