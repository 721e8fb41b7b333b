"""The front door to MX arithmetic: ``quantize``, ``fake_quantize``, ``round_to``.

Here arguments are checked and put before the kernels; what rounds is in rounding.py, kernels.py
and nvfp4.py.  ``Rounder`` is the prepared form that the training loop calls: the same arithmetic,
unchecked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mxsim import kernels, nvfp4
from mxsim.formats import (
    ELEMENTWISE,
    NONFINITE,
    ROUNDINGS,
    SCALE_RULES,
    BlockFormat,
    Element,
    FloatFormat,
    IntFormat,
    choose,
)
from mxsim.layout import (
    SIGNIFICAND_BITS,
    Blocks,
    BlockSize,
    View,
    as_array,
    as_real,
    check_block_size,
    contiguous_view,
    cut,
    view_of,
)
from mxsim.mxarray import E4M3, MXArray, QuantizationStats, as_format
from mxsim.philox import WINDOW, Noise, Random, random_source

Array = NDArray[Any]

_INTEGER = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def _random(noise: Noise | Array | None, shape: tuple[int, ...], view: View) -> Random:
    """The kernels' ``random`` for an array of ``shape`` seen through ``view``.

    Bits go by an element's index in C order.  Where the kernel walks the axes in another order
    they are drawn beforehand and permuted.
    """
    if noise is None:
        return NO_RANDOM
    elements = math.prod(shape)
    if isinstance(noise, Noise):
        if view.order == tuple(range(len(shape))):
            return random_source(noise, elements, kernels.tile_width(view.shape[2], view.block[1]))
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
            random = _random(noise, x.shape, view)
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
        narrow = _to_float32(x)
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
        if _holds(self.format, x.dtype):
            out[...] = x
            return
        mode, spec = float_spec(self.format, self.rounding, x.dtype)
        kernels.round_elementwise(x.reshape(-1), out.reshape(-1), mode, spec, random)


@lru_cache(maxsize=64)
def _holds(form: FloatFormat, dtype: np.dtype[Any]) -> bool:
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


def _check_noise(
    noise: Noise | ArrayLike | None, rounding: str, shape: tuple[int, ...]
) -> Noise | Array | None:
    """``noise`` as Noise or a uint32 array of ``shape``; an error unless it fits ``rounding``."""
    if rounding != "stochastic":
        if noise is not None:
            raise ValueError(f"noise must be None with rounding {rounding!r}; got {noise!r}")
        return None
    if noise is None:
        raise ValueError(
            "noise must be a Noise or an array of uint32 bits with rounding 'stochastic'; got None"
        )
    if isinstance(noise, Noise):
        return noise
    bits = as_array("noise", noise)
    if bits.dtype != np.uint32:
        raise TypeError(f"noise must be a Noise or an array of uint32 bits; got dtype {bits.dtype}")
    if bits.shape != shape:
        raise ValueError(f"noise must have the shape of x, {shape}; got {bits.shape}")
    return np.ascontiguousarray(bits)


def _check_finite(given: Array, x: Array) -> None:
    """Raise ValueError naming index and value of the first NaN or Inf.

    x: what is quantized, ``given`` itself or (for NVFP4) its float32.
    """
    bad = ~np.isfinite(x)
    if bad.any():
        index = tuple(int(i) for i in np.argwhere(bad)[0])
        value = given[index]
        beyond = ", which overflows NVFP4's float32" if np.isfinite(value) else ""
        raise ValueError(
            f"x must be finite with nonfinite='raise'; got {value} at index {index}{beyond}"
        )


def quantize(
    x: ArrayLike,
    fmt: str | BlockFormat,
    axis: int | tuple[int, int] = -1,
    block_size: BlockSize | None = None,
    scale_rule: str | None = None,
    rounding: str = "even",
    *,
    noise: Noise | ArrayLike | None = None,
    nonfinite: str = "propagate",
) -> MXArray:
    """Quantize to a block format (MX v1.0 section 6.3, or nvfp4.py's recipe).

    x: real array of any shape and memory layout.  float64 is rounded once, never through float32
    (but NVFP4 is defined in float32: there x is first rounded to it).

    - block_size: an int runs along ``axis``, the last block may be shorter; a pair (rows, columns)
      along the last two axes, or the pair given as ``axis``; ``"tensor"`` is one block, whichever
      ``axis`` (but it must exist).  Default: the format's own, 32 (NVFP4 16).
    - scale_rule of E8M0: ``floor`` (default; MX v1.0, microxcaling), ``rceil`` (NVIDIA MXFP8),
      ``ceil``, ``even``: see BlockFormat.bump_threshold.  The byte is clamped to 0..254.
    - rounding of elements: ``even`` (ties to even), ``away`` (ties away from zero), ``zero``,
      ``stochastic``.  Elements beyond the largest saturate.
    - noise, for ``stochastic``: a Noise(seed, step, tensor), whose bits depend on the element's
      index in C order alone, or uint32 bits of x's shape.
    - nonfinite: ``propagate``, a NaN or Inf makes its block NaN (byte 255, codes 0); ``saturate``,
      Inf becomes the largest element under the largest scale, NaN still propagates; ``raise``.
    - An all-zero block has byte 0 and keeps its zeros' signs (INT8 has no negative zero).

    Returns an MXArray.  Raises ValueError for an unknown name, an axis out of range, a block size
    below 1, missing noise, a ragged list, or with ``raise`` a NaN or Inf; TypeError for a complex,
    boolean, string or object array.
    """
    rounder = block_rounder(fmt, block_size, scale_rule, rounding, nonfinite)
    given = source = as_real(x)
    blocks = cut(source.shape, axis, rounder.block_size)
    checked_noise = _check_noise(noise, rounding, source.shape)
    nv = rounder.format.scale == "e4m3"
    if nv:
        source = _to_float32(source)
    if nonfinite == "raise":
        _check_finite(given, source)
    codes = np.empty(source.shape, np.uint8)
    scales = np.empty(blocks.grid(source.shape), np.uint8)
    sums = np.zeros(8)
    s_t = float(nvfp4.tensor_scale(np.ascontiguousarray(source).reshape(-1))) if nv else None
    if source.size:
        view = view_of(source, blocks, memory_order=False)
        random = _random(checked_noise, source.shape, view)
        unit = _unit(source)
        code_view, scale_view = _target(codes, view), _scale_target(scales, view)
        c = _constants(rounder, source.dtype)
        if s_t is not None:
            nvfp4.nvfp4_blocks(
                view.of(source),
                _NO_VALUES,
                code_view,
                scale_view,
                view.block,
                c.scaling[0],
                np.float32(s_t),
                c.style[0],
                c.grid,
                c.layout,
                _grid(E4M3, source.dtype),
                _layout(E4M3),
                random,
                unit,
                sums,
            )
        else:
            kernels.quantize_blocks(
                view.of(source),
                code_view,
                scale_view,
                view.block,
                c.scaling,
                c.style,
                c.grid,
                c.layout,
                random,
                unit,
                sums,
            )
        _return(code_view, codes, view)
        _return(scale_view, scales, view)
    stats = QuantizationStats.from_sums(source.size, sums)
    return MXArray(codes, scales, rounder.format, blocks, rounder.scale_rule, rounding, s_t, stats)


def _unit(x: Array) -> float:
    """A power of two that brings the largest finite element of x near 1."""
    largest = float(kernels.finite_maximum(np.ascontiguousarray(x).reshape(-1)))
    return math.ldexp(1.0, -max(math.frexp(largest)[1], -1000)) if largest > 0 else 1.0


def _to_float32(x: Array) -> Array:
    with np.errstate(over="ignore", under="ignore"):
        return x.astype(np.float32, copy=False)


def _target(array: Array, view: View) -> Array:
    """Where the kernel writes: a view of ``array`` if its memory fits, else fresh memory."""
    return (
        array.transpose(view.order).reshape(view.shape)
        if view.fits(array)
        else np.empty(view.shape, array.dtype)
    )


def _scale_target(scales: Array, view: View) -> Array:
    outer, n, m = view.shape
    rows, columns = view.block
    shape = (outer, -(-n // rows), -(-m // columns))
    if view.fits(scales) or scales.ndim == 1:
        return scales.transpose(view.order).reshape(shape)
    return np.empty(shape, scales.dtype)


def _return(written: Array, array: Array, view: View) -> None:
    """Copy what the kernel wrote into ``array``, unless it is a view of it."""
    if not np.shares_memory(written, array):
        moved = array.transpose(view.order)
        moved[...] = written.reshape(moved.shape)


def fake_quantize(
    x: ArrayLike,
    fmt: str | BlockFormat,
    axis: int | tuple[int, int] = -1,
    block_size: BlockSize | None = None,
    scale_rule: str | None = None,
    rounding: str = "even",
    out: Array | None = None,
    *,
    noise: Noise | ArrayLike | None = None,
    nonfinite: str = "propagate",
) -> Array:
    """quantize(x, ...).dequantize(dtype) bit for bit, without the codes: the fast path.

    Arguments and errors as for ``quantize``.  Returns float64 for float64 and for integers
    of 32 bits and more, else float32, in the shape of x; written into ``out`` if given (same shape
    and dtype; may be x itself).
    Raises ValueError if ``out`` has another shape, dtype, or is read-only.
    """
    rounder = block_rounder(fmt, block_size, scale_rule, rounding, nonfinite)
    source = as_real(x)
    if source.flags.c_contiguous and type(axis) is int and source.size:
        view = contiguous_view(source.shape, axis, rounder.block_size)  # remembered
    else:
        blocks = cut(source.shape, axis, rounder.block_size)
        if source.size:
            view = view_of(source, blocks, memory_order=rounding != "stochastic")
    checked_noise = _check_noise(noise, rounding, source.shape)
    if nonfinite == "raise":
        _check_finite(source, source if rounder.format.scale == "e8m0" else _to_float32(source))
    target = _check_out(out, source)
    if source.size:
        written = _written(target, source, view)
        random = _random(checked_noise, source.shape, view)
        rounder.run(view.of(source), written, view, random)
        _return(written, target, view)
    return target


def round_to(
    x: ArrayLike,
    fmt: str | FloatFormat,
    rounding: str = "even",
    out: Array | None = None,
    *,
    noise: Noise | ArrayLike | None = None,
) -> Array:
    """Round each element to a floating-point format: ``bf16``, ``fp16``, ``fp32``, a FloatFormat.

    IEEE 754: overflow to Inf, gradual underflow, NaN and the sign of zero kept; but a format
    without Inf (``specials`` "nan" or "none") saturates.  Stochastic rounding beyond the largest
    goes to Inf or back with its probability.  Rounding toward ``zero`` stops at the
    largest finite value.  Returns float64 for float64 (rounded once) and for integers of 32 bits
    and more, else float32, shape of x.  A format that holds every value of that type (``fp32`` for
    float32) changes none.  Errors as for ``fake_quantize``; ValueError for a format that is too
    wide for the array's float type in its exponent or mantissa alone.
    """
    form = _float_format(fmt)
    choose("rounding", rounding, ROUNDINGS)
    source = as_real(x)
    info = np.finfo(source.dtype)
    wide = form.man_bits > info.nmant - 2 or form.emin < info.minexp or form.emax >= info.maxexp
    if wide and not _holds(form, source.dtype):
        raise ValueError(f"fmt must be narrower than {source.dtype}, or hold all of it; got {form}")
    checked_noise = _check_noise(noise, rounding, source.shape)
    target = _check_out(out, source)
    if source.size:
        order = tuple(range(source.ndim))
        if rounding != "stochastic" and source.ndim:
            order = view_of(source, Blocks((0,), (1,))).order
        view = View(order, (1, 1, source.size), (1, 1))
        written = _written(target, source, view)
        random = _random(checked_noise, source.shape, view)
        ElementwiseRounder(form, rounding).run(view.of(source), written, random)
        _return(written, target, view)
    return target


def _float_format(fmt: object) -> FloatFormat:
    """The FloatFormat named or given; ValueError for an unknown name, TypeError otherwise."""
    if isinstance(fmt, FloatFormat):
        return fmt
    if isinstance(fmt, str) and fmt in ELEMENTWISE:
        return ELEMENTWISE[fmt]
    kind = ValueError if isinstance(fmt, str) else TypeError
    raise kind(f"fmt must be a FloatFormat or one of {', '.join(ELEMENTWISE)}; got {fmt!r}")


def _check_out(out: Array | None, source: Array) -> Array:
    """``out``, or a new array laid out as ``source``."""
    if out is None:
        return np.empty_like(source)
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array; got {type(out).__name__}")
    if out.shape != source.shape or out.dtype != source.dtype or not out.flags.writeable:
        raise ValueError(
            f"out must be a writable {source.dtype} array of shape {source.shape}; "
            f"got {out.dtype} of shape {out.shape}" + ("" if out.flags.writeable else ", read-only")
        )
    if out.size and any(s == 0 and n > 1 for s, n in zip(out.strides, out.shape, strict=True)):
        raise ValueError(f"out must have memory of its own for each element; got {out.strides=}")
    return out


def _written(out: Array, source: Array, view: View) -> Array:
    """Where a kernel may write: in ``out`` if its memory fits and is x's own or apart from it."""
    if out is not source and np.may_share_memory(out, source):
        return np.empty(view.shape, out.dtype)
    return _target(out, view)
