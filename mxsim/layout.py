"""How an array is cut into blocks, and brought before the kernels without copying.

Checks what callers hand in (dtype, axis, block size); knows nothing of formats or rounding.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]

SIGNIFICAND_BITS = {np.dtype(np.float32): 24, np.dtype(np.float64): 53}

BlockSize = int | tuple[int, int] | str


def as_real(x: ArrayLike, argument: str = "x") -> Array:
    """``x`` as a native float32 or float64 array, without rounding any value.

    float32 and float64 stay; float16, bfloat16 and integers are widened exactly.  Raises TypeError
    for other dtypes, ValueError for an integer that float64 cannot hold or a ragged list.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{argument} must be a plain array; got a masked one (fill or compress it)")
    a = as_array(argument, x)
    if a.dtype in SIGNIFICAND_BITS:
        return a
    if a.dtype.newbyteorder("=") in SIGNIFICAND_BITS:
        return a.astype(a.dtype.newbyteorder("="), copy=False)
    if a.dtype.newbyteorder("=") == np.float16 or a.dtype.name == "bfloat16":
        return a.astype(np.float32)
    if a.dtype.kind in "iu":
        if a.dtype.itemsize < 8:
            return a.astype(np.float32 if a.dtype.itemsize <= 2 else np.float64)
        # Two exact halves; their float64 sum is exact if nothing of the low one was lost.
        high, low = (a >> 32) * 2.0**32, (a & 0xFFFFFFFF).astype(np.float64)
        wide = high + low
        lost = low - (wide - high) != 0
        if lost.any():
            value = a[lost].flat[0]
            raise ValueError(
                f"{argument} must hold integers that float64 can, such as all up to 2**53; "
                f"got {value}"
            )
        return np.asarray(wide)
    raise TypeError(
        f"{argument} must be real (float32, float64, float16, bfloat16 or integer); "
        f"got dtype {a.dtype}{_first_object(a)}"
    )


def as_array(argument: str, values: ArrayLike) -> Array:
    """np.asarray; ValueError naming ``argument`` for a ragged list."""
    try:
        return np.asarray(values)
    except ValueError as error:
        raise ValueError(
            f"{argument} must be an array, or lists of equal lengths; got a "
            f"{type(values).__name__} of which NumPy says: {error}"
        ) from None


def _first_object(a: Array) -> str:
    """What made an array one of Python objects, in words: its first entry that is no number."""
    for value in a.flat if a.dtype == object else ():
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            return f", with an integer of more than 64 bits: {value}"
        if not isinstance(value, (int, float, np.number)):
            return f", with the {type(value).__name__} {value!r}"
    return ""


def as_integer(argument: str, value: object, allowed: str) -> int:
    """``value`` as an int; TypeError naming argument, value and what is allowed."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"{argument} must be {allowed}; got {value!r}") from None


_BLOCK_SIZES = "an integer of at least 1, a pair of them, or 'tensor'"


def check_block_size(block_size: object) -> BlockSize:
    """A valid block size: an int, a pair, or "tensor".

    Raises TypeError for another type, ValueError below 1 or for another string.
    """
    if isinstance(block_size, str):
        if block_size != "tensor":
            raise ValueError(f"block_size must be {_BLOCK_SIZES}; got {block_size!r}")
        return block_size
    if isinstance(block_size, (tuple, list)):
        if len(block_size) != 2:
            raise ValueError(f"block_size must be {_BLOCK_SIZES}; got {block_size!r}")
        rows, columns = (as_integer("block_size", each, _BLOCK_SIZES) for each in block_size)
        if min(rows, columns) < 1:
            raise ValueError(f"block_size must be at least 1 both ways; got {block_size!r}")
        return rows, columns
    size = as_integer("block_size", block_size, _BLOCK_SIZES)
    if size < 1:
        raise ValueError(f"block_size must be at least 1; got {size}")
    return size


def check_axis(axis: object, ndim: int) -> int:
    """``axis`` counted from 0; TypeError unless an integer, ValueError if out of range."""
    index = as_integer("axis", axis, "an integer")
    if not -ndim <= index < ndim:
        allowed = f"{-ndim} to {ndim - 1}" if ndim else "none: the array has no axes"
        raise ValueError(f"axis must be in range for shape of {ndim} axes ({allowed}); got {index}")
    return index % ndim


def _check_axes(axes: Sequence[object], ndim: int) -> tuple[int, ...]:
    """``axes`` counted from 0; ValueError unless they are different ones in range."""
    counted = tuple(check_axis(each, ndim) for each in axes)
    if len(set(counted)) < len(counted):
        raise ValueError(f"axis must name different axes; got {tuple(axes)!r}")
    return counted


@dataclass(frozen=True)
class Blocks:
    """The cut of an array: block lengths ``sizes`` along ``axes``, length 1 along all others."""

    axes: tuple[int, ...]
    sizes: tuple[int, ...]

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the array of scales: ceil(length / size) along each blocked axis."""
        counts = list(shape)
        for axis, size in zip(self.axes, self.sizes, strict=True):
            counts[axis] = -(-shape[axis] // size)
        return tuple(counts)

    def spread(self, scales: Array, shape: Sequence[int]) -> Array:
        """A value a block, repeated for each of its elements: ``shape`` from ``grid(shape)``."""
        for axis, size in zip(self.axes, self.sizes, strict=True):
            if size > 1:
                scales = np.repeat(scales, size, axis=axis)
                scales = scales.take(np.arange(shape[axis]), axis=axis)
        return scales


def cut(shape: Sequence[int], axis: object, block_size: BlockSize) -> Blocks:
    """The blocks of ``block_size`` (checked) in an array of ``shape``.

    An int runs along ``axis``.  A pair runs along two axes: ``axis`` is then a pair, or the default
    -1 for the last two.  "tensor" is one block along all axes: ``axis`` (one or several) must only
    exist.  No block is longer than its axis.  Raises ValueError or TypeError naming what does not
    fit.
    """
    ndim = len(shape)
    if isinstance(block_size, str):
        if not ndim:
            raise ValueError("block_size 'tensor' needs an array with axes; got a scalar")
        _check_axes(axis if isinstance(axis, (tuple, list)) else (axis,), ndim)
        return Blocks(tuple(range(ndim)), tuple(max(n, 1) for n in shape))
    sizes: tuple[int, ...]
    if isinstance(block_size, tuple):
        pair: object = (-2, -1) if isinstance(axis, int) and axis == -1 else axis
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise ValueError(f"axis must be a pair with block_size {block_size}; got {axis!r}")
        axes, sizes = _check_axes(pair, ndim), block_size
    elif isinstance(axis, (tuple, list)):
        raise ValueError(
            f"axis must be an integer with block_size {block_size} (a pair of axes needs a pair as "
            f"block_size); got {axis!r}"
        )
    else:
        axes, sizes = (check_axis(axis, ndim),), (block_size,)
    fitted = tuple(min(size, max(shape[a], 1)) for a, size in zip(axes, sizes, strict=True))
    return Blocks(axes, fitted)


@dataclass(frozen=True)
class View:
    """An array as the kernels take it: its axes in ``order`` and C-contiguous, then (outer, n, m).

    ``block`` is (rows, columns) of the last two.
    """

    order: tuple[int, ...]
    shape: tuple[int, int, int]
    block: tuple[int, int]

    def of(self, x: Array) -> Array:
        """``x`` in this form: a view where its memory allows, else a copy."""
        return np.ascontiguousarray(x.transpose(self.order)).reshape(self.shape)

    def fits(self, x: Array) -> bool:
        """Whether ``of(x)`` is a view of x."""
        return bool(x.transpose(self.order).flags.c_contiguous)


def view_of(x: Array, blocks: Blocks, memory_order: bool = True) -> View:
    """How the kernels should see ``x`` (not empty, with axes) cut into ``blocks``.

    memory_order: take a transposed or Fortran-ordered array as it lies in memory; otherwise in the
    order of its indices, which random bits by index need.
    """
    order = tuple(range(x.ndim))
    if memory_order and not x.flags.c_contiguous:
        sorted_axes = tuple(sorted(order, key=lambda i: -abs(x.strides[i])))
        if x.transpose(sorted_axes).flags.c_contiguous:
            order = sorted_axes
    return view_in_order(x.shape, order, blocks)


@lru_cache(maxsize=1024)
def contiguous_view(shape: tuple[int, ...], axis: int, block_size: BlockSize) -> View:
    """The View of a C-contiguous array; remembered, since a training step asks every time."""
    return view_in_order(shape, tuple(range(len(shape))), cut(shape, axis, block_size))


def view_in_order(shape: tuple[int, ...], order: tuple[int, ...], blocks: Blocks) -> View:
    """The View of an array of ``shape`` whose axes lie in memory in ``order``."""
    size = math.prod(shape)
    if len(blocks.axes) == len(shape) and blocks.sizes == tuple(shape[a] for a in blocks.axes):
        last = shape[order[-1]]
        return View(order, (1, size // last, last), (size // last, last))
    if len(blocks.axes) == 2:
        row_axis, column_axis = blocks.axes
        rows, columns = blocks.sizes
        others = tuple(a for a in order if a not in blocks.axes)
        if order.index(row_axis) > order.index(column_axis):  # a block is its own transpose
            row_axis, column_axis, rows, columns = column_axis, row_axis, columns, rows
        n, m = shape[row_axis], shape[column_axis]
        return View((*others, row_axis, column_axis), (size // (n * m), n, m), (rows, columns))
    axis, block = order.index(blocks.axes[0]), blocks.sizes[0]
    lengths = [shape[a] for a in order]
    outer, n, inner = math.prod(lengths[:axis]), lengths[axis], math.prod(lengths[axis + 1 :])
    if inner == 1:
        if n % block == 0:  # rows of whole blocks are one long row
            outer, n = 1, outer * n
        return View(order, (1, outer, n), (1, block))
    return View(order, (outer, n, inner), (block, 1))
