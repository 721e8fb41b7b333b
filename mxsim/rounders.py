"""Rounders: one way of rounding, checked and prepared once, then called for every array.

``Rounder`` goes with block formats, ``ElementwiseRounder`` with bf16 and its like.  They put arrays
before the loops of kernels.py, nvfp4.py and elementwise.py, and make the tuples of constants that
those take.  What checks arrays is quantize.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim import elementwise, kernels, nvfp4
from mxsim.formats import (
    E4M3,
    NONFINITE,
    ROUNDINGS,
    SCALE_RULES,
    BlockFormat,
    Element,
    FloatFormat,
    IntFormat,
    as_format,
    choose,
)
from mxsim.layout import (
    SIGNIFICAND_BITS,
    BlockSize,
    View,
    check_block_size,
    contiguous_view,
)
from mxsim.maxima import tile_width
from mxsim.philox import WINDOW, Noise, Random, random_source

Array = NDArray[Any]

_INTEGER = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def random_for(noise: Noise | Array | None, shape: tuple[int, ...], view: View) -> Random:
    """The kernels' ``random`` for an array of ``shape`` seen through ``view``.

    Bits go by an element's index in C order.  Where the kernel walks the axes in another order
    they are drawn beforehand and permuted.
    """
    if noise is None:
        return NO_RANDOM
    elements = math.prod(shape)
    if isinstance(noise, Noise):
        if view.order == tuple(range(len(shape))):
            return random_source(noise, elements, tile_width(view.shape[2], view.block[1]))
        noise = noise.bits(elements).reshape(shape)
    given = np.ascontiguousarray(noise.transpose(view.order)).reshape(-1)
    if not given.flags.writeable:  # another type to Numba
        given = given.copy()
    return random_source(given, elements, elements)


NO_RANDOM = random_source(None, 0, 0)


@dataclass(frozen=True)
class Rounder:
    """Quantize-dequantize to one block format, arguments already checked."""

    format: BlockFormat
    block_size: BlockSize
    scale_rule: str
    rounding: str
    nonfinite: str = "propagate"

    def __call__(self, x: Array, axis: int, out: Array, noise: Noise | None = None) -> Array:
        """Write the dequantized x into ``out`` (may be x itself); stochastic rounding needs noise.

        Both are C-contiguous, of one shape and dtype, float32 or float64.  Two-dimensional blocks
        lie over the last two axes, whatever ``axis``.
        """
        if x.size:
            along = -1 if isinstance(self.block_size, tuple) else axis
            view = contiguous_view(x.shape, along, self.block_size)
            random = random_for(noise, x.shape, view)
            self.run(x.reshape(view.shape), out.reshape(view.shape), view, random)
        return out

    def run(self, x: Array, out: Array, view: View, random: Random) -> None:
        """The kernel's part: x, out (outer, n, m) of a View, out may be x."""
        if self.format.scale == "e4m3":
            self._run_nvfp4(x, out, view, random)
            return
        c = _constants(self, x.dtype)
        if view.block[0] == 1 and view.shape[0] == 1 and self.rounding != "stochastic":
            kernels.fake_quantize_last(x[0], out[0], view.block[1], c.scaling, c.style, c.grid)
        else:
            kernels.fake_quantize_blocks(x, out, view.block, c.scaling, c.style, c.grid, random)

    def _run_nvfp4(self, x: Array, out: Array, view: View, random: Random) -> None:
        narrow = to_float32(x)
        c = _constants(self, narrow.dtype)
        target = out if out.dtype == np.float32 else np.empty_like(narrow)
        nvfp4.nvfp4_blocks(
            narrow,
            target,
            _NO_BYTES,
            _NO_BYTES,
            view.block,
            c.scaling[0],
            nvfp4.tensor_scale(narrow.reshape(-1)),
            c.style[0],
            c.grid,
            c.layout,
            _grid(E4M3, narrow.dtype),
            _layout(E4M3),
            random,
            1.0,
            np.zeros(8),
        )
        if target is not out:
            out[...] = target

    def encode(
        self,
        x: Array,
        codes: Array,
        scales: Array,
        view: View,
        random: Random,
        unit: float,
        sums: Array,
        tensor_scale: float | None,
    ) -> None:
        """As ``run``, to codes (outer, n, m) and scales (outer, row blocks, column blocks).

        unit, sums: see kernels.py.  NVFP4 needs float32 and its ``tensor_scale``.
        """
        c = _constants(self, x.dtype)
        if tensor_scale is None:
            kernels.quantize_blocks(
                x,
                codes,
                scales,
                view.block,
                c.scaling,
                c.style,
                c.grid,
                c.layout,
                random,
                unit,
                sums,
            )
            return
        nvfp4.nvfp4_blocks(
            x,
            _NO_VALUES,
            codes,
            scales,
            view.block,
            c.scaling[0],
            np.float32(tensor_scale),
            c.style[0],
            c.grid,
            c.layout,
            _grid(E4M3, x.dtype),
            _layout(E4M3),
            random,
            unit,
            sums,
        )


_NO_BYTES = np.empty((0, 0, 0), np.uint8)
_NO_VALUES = np.empty((0, 0, 0), np.float32)


@dataclass(frozen=True)
class ElementwiseRounder:
    """Round to an elementwise format (bf16, fp16, fp32, ...), arguments already checked.

    A format that holds every value of the array's type leaves them all as they are.
    """

    format: FloatFormat
    rounding: str

    def __call__(self, x: Array, axis: int, out: Array, noise: Noise | None = None) -> Array:
        """Write the rounded x into ``out`` (may be x); both C-contiguous.  ``axis`` is unused."""
        self.run(x, out, random_source(noise, x.size, WINDOW) if noise else NO_RANDOM)
        return out

    def run(self, x: Array, out: Array, random: Random) -> None:
        """The kernel's part."""
        if holds(self.format, x.dtype):
            out[...] = x
            return
        mode, spec = float_spec(self.format, self.rounding, x.dtype)
        elementwise.round_elementwise(x.reshape(-1), out.reshape(-1), mode, spec, random)


@lru_cache(maxsize=64)
def holds(form: FloatFormat, dtype: np.dtype[Any]) -> bool:
    """Whether ``form`` is at least as wide as a float type, in exponent and in mantissa."""
    info = np.finfo(dtype)
    return (
        form.specials == "ieee"
        and form.man_bits >= info.nmant
        and form.emin <= info.minexp
        and form.emax >= info.maxexp - 1
    )


@lru_cache(maxsize=64)
def float_spec(form: FloatFormat, rounding: str, dtype: np.dtype[Any]) -> tuple[int, Any]:
    """(mode, spec) as rounding.round_float takes them, in the array's float type."""
    real, ieee = dtype.type, form.specials == "ieee"
    grid = _grid(form, dtype)
    infinity = real(np.inf)
    beyond = infinity if ieee and rounding != "zero" else grid[1]
    return ROUNDINGS.index(rounding), (grid, beyond, infinity if ieee else grid[1], infinity)


def _grid(element: Element, dtype: np.dtype[Any]) -> tuple[Any, Any, Any, Any]:
    """What round_magnitude needs to know of an element format, in the array's float type."""
    real, bits = dtype.type, SIGNIFICAND_BITS[dtype]
    largest = element.largest
    if isinstance(element, IntFormat) and not element.symmetric:
        largest += element.smallest_subnormal  # of the negative side: see rounding.cap_positive
    return (
        real(element.smallest_normal),
        real(largest),
        real(2.0 ** (bits - 1 - element.man_bits)),  # adding binade * this leaves man_bits
        real(2.0**-bits),  # half a unit in the last place of that sum
    )


def _layout(element: Element) -> tuple[Any, Any, Any, bool]:
    """What rounding.encode needs to know of an element format."""
    whole = isinstance(element, IntFormat)
    return np.int64(element.emin), np.int64(element.man_bits), np.int64(element.bits), whole


@dataclass(frozen=True)
class _Constants:
    """The kernels' tuples (see rounding.py) for one rounder and float type."""

    scaling: tuple[Any, Any, Any, Any, Any]
    style: tuple[Any, Any, Any]
    grid: tuple[Any, Any, Any, Any]
    layout: tuple[Any, Any, Any, bool]


@lru_cache(maxsize=256)
def _constants(rounder: Rounder, dtype: np.dtype[Any]) -> _Constants:
    element, real = rounder.format.element, dtype.type
    infinity = np.array(np.inf, dtype).view(_INTEGER[dtype])[()]
    nan_from = infinity + _INTEGER[dtype](rounder.nonfinite == "saturate")
    bump_above = real(2.0)
    if rounder.format.scale == "e8m0":
        threshold, inclusive = rounder.format.bump_threshold(rounder.scale_rule)
        bump_above = np.nextafter(real(threshold), real(0)) if inclusive else real(threshold)
    whole = isinstance(element, IntFormat)
    one_sided = isinstance(element, IntFormat) and not element.symmetric
    # x + -0.0 is x; x + 0.0 loses the sign of -0, which two's complement does not have.
    zero = real(0.0) if whole else real(-0.0)
    return _Constants(
        scaling=(nan_from, np.int64(element.emax), bump_above, *_ordinary(element, dtype)),
        style=(ROUNDINGS.index(rounder.rounding), zero, one_sided),
        grid=_grid(element, dtype),
        layout=_layout(element),
    )


def _ordinary(element: Element, dtype: np.dtype[Any]) -> tuple[Any, Any]:
    """Bits of the lowest and highest block maximum whose scale is ordinary (see rounding.py).

    Below, 2**-24 of an element's step (stochastic rounding compares such parts) would fall off the
    subnormals, or the scale be clamped; above, the magic sum would overflow, or the scale be.
    """
    info = np.finfo(dtype)
    smallest = info.minexp - info.nmant  # 2**smallest is the smallest subnormal
    step = element.emin - element.man_bits
    low = max(smallest + 24 + element.emax - step, element.emax - 126)
    high = min(info.maxexp - 2 - info.nmant, element.emax + 126)
    ends = np.ldexp(np.ones(2, dtype), (low, high)).view(_INTEGER[dtype])
    return ends[0], ends[1]


def block_rounder(
    fmt: str | BlockFormat,
    block_size: BlockSize | None = None,
    scale_rule: str | None = None,
    rounding: str = "even",
    nonfinite: str = "propagate",
) -> Rounder:
    """Check the arguments and prepare a Rounder.

    Raises ValueError for an unknown name or a block size below 1, TypeError for a wrong type.
    """
    form = as_format(fmt)
    choose("rounding", rounding, ROUNDINGS)
    choose("nonfinite", nonfinite, NONFINITE)
    size = form.block_size if block_size is None else check_block_size(block_size)
    if form.scale == "e8m0":
        rule = choose("scale_rule", "floor" if scale_rule is None else scale_rule, SCALE_RULES)
    elif scale_rule is None:
        rule = form.name
    else:
        raise ValueError(
            f"scale_rule must be None for {form.name}, whose scales have their own rule; "
            f"got {scale_rule!r}"
        )
    return Rounder(form, size, rule, rounding, nonfinite)


def to_float32(x: Array) -> Array:
    """x in float32, beyond it Inf or zero, without a warning."""
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float32, copy=False)
