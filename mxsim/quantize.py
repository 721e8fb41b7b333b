"""The front door to MX arithmetic: ``quantize``, ``fake_quantize``, ``round_to``.

Arguments and arrays are checked here, and results gathered; rounders.py prepares what rounds, the
loops are in kernels.py, nvfp4.py and elementwise.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mxsim import nvfp4
from mxsim.formats import ELEMENTWISE, ROUNDINGS, BlockFormat, FloatFormat, choose
from mxsim.layout import (
    Blocks,
    BlockSize,
    View,
    as_array,
    as_real,
    contiguous_view,
    cut,
    view_of,
)
from mxsim.maxima import finite_maximum
from mxsim.mxarray import MXArray, QuantizationStats
from mxsim.philox import Noise
from mxsim.rounders import ElementwiseRounder, block_rounder, holds, random_for, to_float32

Array = NDArray[Any]


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
    two_level = rounder.format.scale == "e4m3"
    if two_level:
        source = to_float32(source)
    if nonfinite == "raise":
        _check_finite(given, source)
    codes = np.empty(source.shape, np.uint8)
    scales = np.empty(blocks.grid(source.shape), np.uint8)
    sums = np.zeros(8)
    s_t = None
    if two_level:
        s_t = float(nvfp4.tensor_scale(np.ascontiguousarray(source).reshape(-1)))
    if source.size:
        view = view_of(source, blocks, memory_order=False)
        random = random_for(checked_noise, source.shape, view)
        unit = _unit(source)
        code_view, scale_view = _target(codes, view), _scale_target(scales, view)
        rounder.encode(view.of(source), code_view, scale_view, view, random, unit, sums, s_t)
        _return(code_view, codes, view)
        _return(scale_view, scales, view)
    stats = QuantizationStats.from_sums(source.size, sums)
    return MXArray(codes, scales, rounder.format, blocks, rounder.scale_rule, rounding, s_t, stats)


def _unit(x: Array) -> float:
    """A power of two that brings the largest finite element of x near 1."""
    largest = float(finite_maximum(np.ascontiguousarray(x).reshape(-1)))
    return math.ldexp(1.0, -max(math.frexp(largest)[1], -1000)) if largest > 0 else 1.0


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
        _check_finite(source, source if rounder.format.scale == "e8m0" else to_float32(source))
    target = _check_out(out, source)
    if source.size:
        written = _written(target, source, view)
        random = random_for(checked_noise, source.shape, view)
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
    if wide and not holds(form, source.dtype):
        raise ValueError(f"fmt must be narrower than {source.dtype}, or hold all of it; got {form}")
    checked_noise = _check_noise(noise, rounding, source.shape)
    target = _check_out(out, source)
    if source.size:
        order = tuple(range(source.ndim))
        if rounding != "stochastic" and source.ndim:
            order = view_of(source, Blocks((0,), (1,))).order
        view = View(order, (1, 1, source.size), (1, 1))
        written = _written(target, source, view)
        random = random_for(checked_noise, source.shape, view)
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
