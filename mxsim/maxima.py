"""Block maxima, and how a row of blocks is walked: shared by kernels.py and nvfp4.py.

A maximum is a bit pattern (bits.magnitude_bits): patterns are ordered as magnitudes are, NaN above
Inf above all, and their maxima vectorize where maxima of floats do not.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxsim.bits import from_bits, largest_of_32, magnitude_bits
from mxsim.jit import kernel

TILE = 4096  # columns handled at once when walking rows: 32 rows of them fit the L2 cache


@kernel
def tile_width(m: Any, columns: Any) -> Any:
    """Columns handled at once: about TILE, a multiple of the block's, at most a row."""
    return min(m, max(TILE // columns * columns, columns))


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
