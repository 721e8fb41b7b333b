"""MXArray: codes and scales at the bit level, and what they mean; statistics of a quantization.

Nothing here rounds to an MX format (quantize.py does); decoding is exact table look-up.  Bytes are
in packing.py, files in arrayfile.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mxsim.arrayfile import check_path, read_array, write_members
from mxsim.formats import (
    E4M3,
    ELEMENTWISE,
    FORMATS,
    SCALE_BIAS,
    SCALE_NAN,
    BlockFormat,
    FloatFormat,
    IntFormat,
    as_format,
)
from mxsim.layout import Blocks, BlockSize, check_block_size, cut
from mxsim.packing import (
    as_bytes,
    check_bits,
    check_lengths,
    check_tensor_scale,
    pack_bits,
    unpacked,
)
from mxsim.rounders import ElementwiseRounder

Array = NDArray[Any]

# ml_dtypes' names of our elements and scales
_ML_DTYPES = {
    FloatFormat(4, 3, "nan"): "float8_e4m3fn",
    FloatFormat(5, 2, "ieee"): "float8_e5m2",
    FloatFormat(3, 2, "none"): "float6_e3m2fn",
    FloatFormat(2, 3, "none"): "float6_e2m3fn",
    FloatFormat(2, 1, "none"): "float4_e2m1fn",
}


@dataclass(frozen=True)
class QuantizationStats:
    """What a quantization did, over the finite elements of blocks that are not NaN.

    - elements, blocks: their numbers (all of them), nonfinite: elements in NaN blocks, and Inf.
    - saturated: share of elements with |x| > largest * scale, before rounding (NVFP4: that product
      in float32; asymmetric INT8: negatives from beyond -2); saturated_blocks: share of all blocks
      that hold one.
    - flushed: share of elements that are not zero and became zero.
    - relative_error: sum (q - x)^2 / sum x^2 (0 for all zeros).
    - gain: aligned gain <x, q> / <x, x> (1 for all zeros); gain - 1 is the coherent bias.
    - effective_bits: -log2(relative_error) / 2, Inf without error.

    Where not one element counts (all are in NaN blocks, or Inf) these three are NaN; an empty array
    is as one of zeros.
    """

    elements: int
    blocks: int
    nonfinite: int
    saturated: float
    saturated_blocks: float
    flushed: float
    relative_error: float
    gain: float
    effective_bits: float

    @classmethod
    def from_sums(cls, elements: int, sums: Array) -> QuantizationStats:
        """From the kernels' sums: blocks, saturated blocks, saturated, flushed, xx, xq, ee, bad."""
        blocks, hit, saturated, flushed, xx, xq, ee, bad = (float(v) for v in sums)
        finite = elements - bad
        error, gain = (ee / xx, xq / xx) if xx > 0 else (0.0, 1.0)
        bits = 0.0 - 0.5 * math.log2(error) if error > 0 else math.inf  # 0.0 -: never -0.0
        if elements and not finite:
            error = gain = bits = math.nan
        return cls(
            elements=elements,
            blocks=int(blocks),
            nonfinite=int(bad),
            saturated=saturated / finite if finite else 0.0,
            saturated_blocks=hit / blocks if blocks else 0.0,
            flushed=flushed / finite if finite else 0.0,
            relative_error=error,
            gain=gain,
            effective_bits=bits,
        )


@dataclass(frozen=True, eq=False)
class MXArray:
    """An array in MX form: element codes and one scale a block.

    codes: uint8, shape of the source, the element's bit pattern in the low bits.
    scales: uint8, shape of the source with each blocked axis replaced by its number of blocks.
    E8M0: 2**(byte - 127), 255 is NaN.  NVFP4: an E4M3 code, times the float32 ``tensor_scale``.
    stats: what quantizing did; None for an array that came from bits or a file.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8]
    format: BlockFormat
    blocks: Blocks
    scale_rule: str = "floor"
    rounding: str = "even"
    tensor_scale: float | None = None
    stats: QuantizationStats | None = field(default=None, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def axis(self) -> int | tuple[int, ...]:
        """The blocked axis, or axes, counted from 0."""
        return self.blocks.axes[0] if len(self.blocks.axes) == 1 else self.blocks.axes

    @property
    def block_size(self) -> int | tuple[int, ...]:
        """Block length along ``axis``, at most the axis's own."""
        return self.blocks.sizes[0] if len(self.blocks.sizes) == 1 else self.blocks.sizes

    @property
    def nbytes(self) -> int:
        """Bytes of the packed elements and the scales (and NVFP4's tensor scale)."""
        extra = 0 if self.tensor_scale is None else 4
        return -(-self.codes.size * self.format.element.bits // 8) + self.scales.size + extra

    @property
    def bits_per_element(self) -> float:
        """8 * nbytes over the number of elements; NaN for an empty array."""
        return 8 * self.nbytes / self.codes.size if self.codes.size else math.nan

    def scale_values(self) -> NDArray[np.float64]:
        """The scales as numbers, shape of ``scales``; NaN for a NaN block.  Exact."""
        if self.format.scale == "e8m0":
            exponents = self.scales.astype(np.int64) - SCALE_BIAS
            return np.where(self.scales == SCALE_NAN, np.nan, np.ldexp(1.0, exponents))
        assert self.tensor_scale is not None
        # NVFP4 multiplies the two scales in float32.
        s_b = E4M3.values[self.scales].astype(np.float32)
        return (s_b * np.float32(self.tensor_scale)).astype(np.float64)

    def dequantize(self, dtype: DTypeLike = np.float32) -> Array:
        """element * scale, in the shape of ``codes``.

        E8M0: the exact product, rounded once to ``dtype``; in float64 always exact, in float32
        exact but for a value beyond the largest float32 (an amax near it, with a scale that was
        rounded up), which becomes Inf as IEEE 754 conversion has it.  NVFP4: the float32 product,
        then converted.  Elements of a NaN block are NaN.

        Raises TypeError for a dtype other than float64, float32, float16 or ml_dtypes' bfloat16.
        """
        message = "dtype must be float64, float32, float16 or bfloat16; got"
        if dtype is None:  # to NumPy, float64
            raise TypeError(f"{message} None")
        try:
            kind = np.dtype(dtype)
        except TypeError:
            raise TypeError(f"{message} {dtype!r}") from None
        if kind.name not in ("float32", "float64", "float16", "bfloat16"):
            raise TypeError(f"{message} {kind}")
        spread = self.blocks.spread(self.scale_values(), self.shape)
        values: Array = self.format.element.values[self.codes] * spread
        with np.errstate(over="ignore", under="ignore"):
            if self.format.scale != "e8m0":
                values = values.astype(np.float32).astype(np.float64)
            if kind.name in ("float16", "bfloat16"):
                narrow = ELEMENTWISE["fp16" if kind.name == "float16" else "bf16"]
                values = np.ascontiguousarray(values)
                # Once from float64; the cast is then exact.
                values = ElementwiseRounder(narrow, "even")(values, -1, values)
            return np.asarray(values.astype(kind))

    # ------------------------------------------------------------ bits

    @classmethod
    def from_bits(
        cls,
        codes: ArrayLike,
        scales: ArrayLike,
        fmt: str | BlockFormat,
        axis: int | tuple[int, int] = -1,
        block_size: BlockSize | None = None,
        tensor_scale: float | None = None,
    ) -> MXArray:
        """An MXArray of given element codes and scale bytes; how they came about it cannot know,
        and it says the format's default scale rule and rounding.

        Raises TypeError unless both are integer arrays, ValueError for a code or byte that the
        format does not have (see packing.check_bits) or a shape of scales that does not fit; NVFP4
        needs ``tensor_scale``, no other takes one.
        """
        form = as_format(fmt)
        bits = form.element.bits
        code_array = as_bytes("codes", codes, 2**bits - 1)
        scale_array = as_bytes("scales", scales, 255)
        blocks = cut(
            code_array.shape,
            axis,
            form.block_size if block_size is None else check_block_size(block_size),
        )
        if scale_array.shape != blocks.grid(code_array.shape):
            raise ValueError(
                f"scales must have shape {blocks.grid(code_array.shape)} for codes of shape "
                f"{code_array.shape}; got {scale_array.shape}"
            )
        check_bits(code_array, scale_array, form)
        scale = check_tensor_scale(tensor_scale, form)
        rule = "floor" if form.scale == "e8m0" else form.name
        return cls(code_array, scale_array, form, blocks, rule, tensor_scale=scale)

    def pack(self) -> NDArray[np.uint8]:
        """The element codes without gaps, in C order, as bytes (ceil(size * bits / 8),).

        4-bit elements lie two to a byte, element 0 in the low nibble; 6-bit ones four to three
        bytes, little-endian, element 0 in the lowest six bits; the end is filled with zeros.
        """
        return pack_bits(self.codes.reshape(-1), self.format.element.bits)

    @classmethod
    def unpack(
        cls,
        packed: ArrayLike,
        shape: tuple[int, ...],
        scales: ArrayLike,
        fmt: str | BlockFormat,
        axis: int | tuple[int, int] = -1,
        block_size: BlockSize | None = None,
        tensor_scale: float | None = None,
    ) -> MXArray:
        """Inverse of ``pack``; other arguments and errors as for ``from_bits``.

        Raises ValueError if ``packed`` has not the number of bytes that ``shape`` needs, or does
        not end in zero bits.
        """
        form = as_format(fmt)
        data = as_bytes("packed", packed, 255).reshape(-1)
        codes = unpacked("packed", data, check_lengths("shape", shape), form)
        return cls.from_bits(codes, scales, form, axis, block_size, tensor_scale)

    def to_ml_dtypes(self) -> tuple[Array, Array]:
        """(elements, scales) as arrays of ml_dtypes types, bit for bit; INT8 elements as int8.

        Scales are float8_e8m0fnu, or float8_e4m3fn for NVFP4 (times ``tensor_scale``).
        Raises ImportError without ml_dtypes, ValueError for an element that ml_dtypes lacks.
        """
        try:
            import ml_dtypes
        except ImportError:
            raise ImportError(
                "to_ml_dtypes needs the package ml_dtypes: pip install ml_dtypes"
            ) from None
        element = self.format.element
        scale = "float8_e8m0fnu" if self.format.scale == "e8m0" else "float8_e4m3fn"
        scales = self.scales.view(getattr(ml_dtypes, scale))
        if isinstance(element, IntFormat):
            return self.codes.view(np.int8), scales
        if element not in _ML_DTYPES:
            raise ValueError(
                f"element must be one of ml_dtypes, {', '.join(_ML_DTYPES.values())}; got {element}"
            )
        return self.codes.view(getattr(ml_dtypes, _ML_DTYPES[element])), scales

    # ------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write an npz without pickle: packed elements, scales, and a JSON header.

        Raises TypeError unless ``path`` is a string or a path, ValueError for a custom format.
        """
        check_path(path)
        if FORMATS.get(self.format.name) != self.format:
            raise ValueError(f"only the formats in mxsim.FORMATS can be saved; got {self.format}")
        header = {
            "format": self.format.name,
            "shape": list(self.shape),
            "axes": list(self.blocks.axes),
            "sizes": list(self.blocks.sizes),
            "scale_rule": self.scale_rule,
            "rounding": self.rounding,
            "tensor_scale": self.tensor_scale,
        }
        write_members(path, header, self.pack(), self.scales)

    @classmethod
    def load(cls, path: str | Path) -> MXArray:
        """Read what ``save`` wrote.

        Raises TypeError unless ``path`` is a string or a path, OSError where it cannot be opened,
        ValueError for a damaged or foreign file.
        """
        return cls(**read_array(path))
