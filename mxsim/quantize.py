"""The front door to MX arithmetic: ``quantize``, ``fake_quantize``, ``round_to``, ``MXArray``.

Here arguments are checked and arrays brought into the (outer, n, inner) form of ``kernels.py``;
what rounds is there.  ``Rounder`` is the prepared form that the training loop calls: the same
arithmetic without the checks.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mxsim import kernels
from mxsim.formats import (
    ELEMENTWISE,
    FORMATS,
    ROUNDINGS,
    SCALE_BIAS,
    SCALE_NAN,
    SCALE_RULES,
    BlockFormat,
    Element,
    IntFormat,
    choose,
)

Array = NDArray[Any]

_SIGNIFICAND_BITS = {np.dtype(np.float32): 24, np.dtype(np.float64): 53}
_INTEGER = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


@dataclass(frozen=True, eq=False)
class MXArray:
    """An array in MX form: element codes and one shared scale a block.

    codes: uint8, shape of the source, the element's bit pattern in the low bits.
    scales: uint8 E8M0 bytes (2**(byte - 127), 255 is NaN), the source's shape with ``axis``
    replaced by ceil(n / block_size).  block_size is at most the length of the axis.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    format: BlockFormat
    axis: int
    block_size: int
    scale_rule: str
    rounding: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dequantize(self, dtype: DTypeLike = np.float32) -> Array:
        """element * scale, exact in float64; shape of ``codes``.

        In float32, a value beyond the largest float32 (possible when amax > 448 * 2**118, say, and
        the scale was rounded up) becomes Inf, as IEEE 754 conversion has it; every other value is
        exact.  Elements of a block with scale byte 255 are NaN.

        Raises TypeError for a dtype other than float32 or float64.
        """
        kind = np.dtype(dtype)
        if kind not in _SIGNIFICAND_BITS:
            raise TypeError(f"dtype must be float32 or float64; got {kind}")
        exponents = self.scales.astype(np.int64) - SCALE_BIAS
        scale = np.where(self.scales == SCALE_NAN, np.nan, np.ldexp(1.0, exponents))
        n = self.codes.shape[self.axis]
        spread = np.repeat(scale, self.block_size, axis=self.axis)
        spread = spread.take(np.arange(n), axis=self.axis)
        with np.errstate(over="ignore"):
            return np.asarray((self.format.element.values[self.codes] * spread).astype(kind))


@dataclass(frozen=True)
class Rounder:
    """Quantize-dequantize to one block format, arguments already checked."""

    format: BlockFormat
    block_size: int
    scale_rule: str
    rounding: str

    def __call__(self, x: Array, axis: int, out: Array) -> Array:
        """Write the dequantized x into ``out`` (may be x itself).

        Both are C-contiguous, of one dtype, float32 or float64.
        """
        if x.size == 0:
            return out
        nonfinite, _, emax, bump_above, mode, grid, zero = _block_constants(self, x.dtype)
        outer, n, inner = split_shape(x.shape, axis)
        block = min(self.block_size, n)  # an int that fits the machine's, however large given
        if inner == 1:
            kernels.fake_quantize_last(
                x.reshape(outer, n),
                out.reshape(outer, n),
                block,
                nonfinite,
                emax,
                bump_above,
                mode,
                grid,
                zero,
            )
        else:
            kernels.fake_quantize_rows(
                x.reshape(outer, n, inner),
                out.reshape(outer, n, inner),
                block,
                nonfinite,
                emax,
                bump_above,
                mode,
                grid,
                zero,
            )
        return out


@dataclass(frozen=True)
class ElementwiseRounder:
    """Round to an elementwise format (bf16, fp16), arguments already checked."""

    name: str
    rounding: str

    def __call__(self, x: Array, axis: int, out: Array) -> Array:
        """Write the rounded x into ``out`` (may be x); both C-contiguous.  ``axis`` is unused."""
        real = x.dtype.type
        kernels.round_elementwise(
            x.reshape(-1),
            out.reshape(-1),
            ROUNDINGS.index(self.rounding),
            self.rounding != "zero",
            _grid(ELEMENTWISE[self.name], x.dtype),
            real(np.inf),
        )
        return out


def split_shape(shape: tuple[int, ...], axis: int) -> tuple[int, int, int]:
    """(outer, n, inner): the sizes before, along and after ``axis``."""
    axis = axis % len(shape)
    outer = inner = 1
    for size in shape[:axis]:
        outer *= size
    for size in shape[axis + 1 :]:
        inner *= size
    return outer, shape[axis], inner


def _grid(element: Element, dtype: np.dtype[Any]) -> tuple[Any, Any, Any, Any]:
    """What round_magnitude needs to know of an element format, in the array's float type."""
    real, bits = dtype.type, _SIGNIFICAND_BITS[dtype]
    return (
        real(element.smallest_normal),
        real(element.largest),
        real(2.0 ** (bits - 1 - element.man_bits)),  # adding binade * this leaves man_bits
        real(2.0**-bits),  # half a unit in the last place of that sum
    )


@lru_cache(maxsize=256)
def _block_constants(rounder: Rounder, dtype: np.dtype[Any]) -> tuple[Any, ...]:
    element, real = rounder.format.element, dtype.type
    threshold, inclusive = rounder.format.bump_threshold(rounder.scale_rule)
    bump_above = np.nextafter(real(threshold), real(0)) if inclusive else real(threshold)
    infinity = np.array(np.inf, dtype).view(_INTEGER[dtype])[()]
    is_integer = isinstance(element, IntFormat)
    return (
        infinity,
        is_integer,
        np.int64(element.emax),
        bump_above,
        ROUNDINGS.index(rounder.rounding),
        _grid(element, dtype),
        real(0.0) if is_integer else real(-0.0),  # x + -0.0 is x; x + 0.0 loses -0: INT8 has none
    )


@lru_cache(maxsize=256)
def _checked_rounder(fmt: str, block_size: int, scale_rule: str, rounding: str) -> Rounder:
    return Rounder(FORMATS[fmt], block_size, scale_rule, rounding)


def block_rounder(
    fmt: str, block_size: int = 32, scale_rule: str = "floor", rounding: str = "even"
) -> Rounder:
    """Check the arguments and prepare a Rounder.

    Raises ValueError for an unknown name or a block size below 1, TypeError for a wrong type.
    """
    choose("fmt", fmt, FORMATS)
    choose("scale_rule", scale_rule, SCALE_RULES)
    choose("rounding", rounding, ROUNDINGS)
    return _checked_rounder(fmt, check_block_size(block_size), scale_rule, rounding)


def check_block_size(block_size: object) -> int:
    """``block_size`` as an int; TypeError unless an integer, ValueError below 1."""
    try:
        if isinstance(block_size, (bool, np.bool_)):
            raise TypeError
        size = operator.index(block_size)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(
            f"block_size must be an integer of at least 1; got {block_size!r}"
        ) from None
    if size < 1:
        raise ValueError(f"block_size must be at least 1; got {size}")
    return size


def _check_axis(axis: object, ndim: int) -> int:
    try:
        index = operator.index(axis)  # type: ignore[arg-type]
    except TypeError:
        raise TypeError(f"axis must be an integer; got {axis!r}") from None
    if not -ndim <= index < ndim:
        allowed = f"{-ndim} to {ndim - 1}" if ndim else "none: the array has no axes"
        raise ValueError(f"axis must be in range for shape of {ndim} axes ({allowed}); got {index}")
    return index % ndim


def as_real(x: ArrayLike, argument: str = "x") -> Array:
    """``x`` as a native float32 or float64 array, without rounding any value.

    float32 and float64 stay; float16, bfloat16 and integers are widened exactly.  Raises TypeError
    for other dtypes, ValueError for an integer that float64 cannot hold.
    """
    a = np.asarray(x)
    if a.dtype.newbyteorder("=") in _SIGNIFICAND_BITS:
        return a.astype(a.dtype.newbyteorder("="), copy=False)
    if a.dtype == np.float16 or a.dtype.name == "bfloat16":
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
        f"got dtype {a.dtype}"
    )


def _memory_order(x: Array, axis: int) -> tuple[Array, int, tuple[int, ...]]:
    """x with its axes in memory order, C-contiguous; where ``axis`` went; and the permutation.

    A transposed or Fortran-ordered array is only viewed; any other stride pattern is copied.
    """
    order = tuple(sorted(range(x.ndim), key=lambda i: -abs(x.strides[i])))
    view = x.transpose(order)
    if not view.flags.c_contiguous:
        order = tuple(range(x.ndim))
        view = np.ascontiguousarray(x)
    return view, order.index(axis), order


def quantize(
    x: ArrayLike,
    fmt: str,
    axis: int = -1,
    block_size: int = 32,
    scale_rule: str = "floor",
    rounding: str = "even",
) -> MXArray:
    """Quantize to an MX block format (MX v1.0 section 6.3).

    x: real array of any shape and memory layout; blocks of ``block_size`` run along ``axis``, the
    last one may be shorter.  float64 is rounded once, never through float32.

    - scale_rule ``floor`` (MX v1.0, microxcaling), ``rceil`` (NVIDIA MXFP8), ``ceil``, ``even``:
      see BlockFormat.bump_threshold.  The scale byte is clamped to 0..254.
    - rounding of elements: ``even`` (ties to even), ``away`` (ties away from zero), ``zero``.
      Elements beyond the largest saturate.
    - An all-zero block has byte 0 and keeps its zeros' signs (INT8 has no negative zero).
    - A NaN or Inf makes its block NaN: byte 255, codes 0.

    Returns an MXArray.  Raises ValueError for an unknown name, an axis out of range or a block
    size below 1; TypeError for a complex, boolean, string or object array.
    """
    rounder = block_rounder(fmt, block_size, scale_rule, rounding)
    source = as_real(x)
    axis = _check_axis(axis, source.ndim)
    source = np.ascontiguousarray(source)
    n = source.shape[axis]
    block = min(rounder.block_size, max(n, 1))
    blocks = -(-n // block)
    codes = np.empty(source.shape, np.uint8)
    scales = np.empty((*source.shape[:axis], blocks, *source.shape[axis + 1 :]), np.uint8)
    if source.size:
        outer, n, inner = split_shape(source.shape, axis)
        nonfinite, is_integer, emax, bump_above, mode, grid, _ = _block_constants(
            rounder, source.dtype
        )
        element = rounder.format.element
        kernels.quantize_codes(
            source.reshape(outer, n, inner),
            codes.reshape(outer, n, inner),
            scales.reshape(outer, blocks, inner),
            block,
            nonfinite,
            emax,
            np.int64(element.emin),
            np.int64(element.man_bits),
            np.int64(element.bits),
            is_integer,
            bump_above,
            mode,
            grid,
        )
    return MXArray(codes, scales, rounder.format, axis, block, scale_rule, rounding)


def fake_quantize(
    x: ArrayLike,
    fmt: str,
    axis: int = -1,
    block_size: int = 32,
    scale_rule: str = "floor",
    rounding: str = "even",
    out: Array | None = None,
) -> Array:
    """quantize(x, ...).dequantize(dtype) bit for bit, without the codes: the fast path.

    Arguments and errors as for ``quantize``.  Returns float64 for float64 and for integers
    of 32 bits and more, else float32, in the shape of x; written into ``out`` if given (same shape
    and dtype; may be x itself).
    Raises ValueError if ``out`` has another shape, dtype, or is read-only.
    """
    rounder = block_rounder(fmt, block_size, scale_rule, rounding)
    source = as_real(x)
    axis = _check_axis(axis, source.ndim)
    return _apply(rounder, source, axis, out)


def round_to(x: ArrayLike, fmt: str, rounding: str = "even", out: Array | None = None) -> Array:
    """Round each element to ``bf16`` or ``fp16`` (IEEE 754: overflow to Inf, gradual underflow).

    Returns float64 for float64 input (rounded once), else float32, shape of x.  Rounding toward
    ``zero`` stops at the largest finite value.  Errors as for ``fake_quantize``.
    """
    choose("fmt", fmt, ELEMENTWISE)
    choose("rounding", rounding, ROUNDINGS)
    source = as_real(x)
    return _apply(ElementwiseRounder(fmt, rounding), source, 0, out)


def _apply(
    rounder: Rounder | ElementwiseRounder, source: Array, axis: int, out: Array | None
) -> Array:
    """Run a rounder over an array of any layout."""
    if out is None:
        out = np.empty_like(source)
    elif not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a numpy array; got {type(out).__name__}")
    elif out.shape != source.shape or out.dtype != source.dtype or not out.flags.writeable:
        raise ValueError(
            f"out must be a writable {source.dtype} array of shape {source.shape}; "
            f"got {out.dtype} of shape {out.shape}" + ("" if out.flags.writeable else ", read-only")
        )
    if source.ndim == 0:
        rounder(source.reshape(1), 0, out.reshape(1))
        return out
    view, axis, order = _memory_order(source, axis)
    target = out.transpose(order)
    overlapping = np.may_share_memory(out, source) and out is not source
    if target.flags.c_contiguous and not overlapping:
        rounder(view, axis, target)
    else:
        target[...] = rounder(view, axis, np.empty_like(view))
    return out
