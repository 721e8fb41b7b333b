"""MXArray: codes and scales at the bit level; packing, files, conversion, statistics.

Nothing here rounds to an MX format (quantize.py does); decoding is exact table look-up.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from mxsim.formats import (
    FORMATS,
    ROUNDINGS,
    SCALE_BIAS,
    SCALE_NAN,
    SCALE_RULES,
    BlockFormat,
    FloatFormat,
    IntFormat,
    choose,
)
from mxsim.layout import Blocks, BlockSize, as_integer, check_block_size, cut

Array = NDArray[Any]

E4M3 = FloatFormat(4, 3, "nan")  # NVFP4's block scale
FILE_VERSION = 1

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
        error = ee / xx if xx > 0 else 0.0
        return cls(
            elements=elements,
            blocks=int(blocks),
            nonfinite=int(bad),
            saturated=saturated / finite if finite else 0.0,
            saturated_blocks=hit / blocks if blocks else 0.0,
            flushed=flushed / finite if finite else 0.0,
            relative_error=error,
            gain=xq / xx if xx > 0 else 1.0,
            effective_bits=-0.5 * math.log2(error) if error > 0 else math.inf,
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
        kind = np.dtype(dtype)
        if kind.name not in ("float32", "float64", "float16", "bfloat16"):
            raise TypeError(f"dtype must be float64, float32, float16 or bfloat16; got {kind}")
        spread = self.blocks.spread(self.scale_values(), self.shape)
        values: Array = self.format.element.values[self.codes] * spread
        with np.errstate(over="ignore", under="ignore"):
            if self.format.scale != "e8m0":
                values = values.astype(np.float32).astype(np.float64)
            if kind.name in ("float16", "bfloat16"):
                from mxsim.quantize import round_to  # once from float64; the cast is then exact

                values = round_to(values, "fp16" if kind.name == "float16" else "bf16")
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

        Raises TypeError unless both are integer arrays, ValueError for a code or byte out of range
        or a shape of scales that does not fit; NVFP4 needs ``tensor_scale``, no other takes one.
        """
        form = as_format(fmt)
        bits = form.element.bits
        code_array = _as_bytes("codes", codes, 2**bits - 1)
        scale_array = _as_bytes("scales", scales, 255)
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
        scale = _check_tensor_scale(tensor_scale, form)
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

        Raises ValueError if ``packed`` has not the number of bytes that ``shape`` needs.
        """
        form = as_format(fmt)
        data = _as_bytes("packed", packed, 255).reshape(-1)
        shape = _check_shape(shape)
        size = math.prod(shape)
        needed = -(-size * form.element.bits // 8)
        if data.size != needed:
            raise ValueError(
                f"packed must hold {needed} bytes for shape {shape} of {form.name}; got {data.size}"
            )
        codes = unpack_bits(data, form.element.bits, size).reshape(shape)
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
            raise ValueError(f"ml_dtypes has no type for {element}")
        return self.codes.view(getattr(ml_dtypes, _ML_DTYPES[element])), scales

    # ------------------------------------------------------------ files

    def save(self, path: str | Path) -> None:
        """Write an npz without pickle: packed elements, scales, and a JSON header."""
        header = {
            "mxsim": FILE_VERSION,
            "format": self.format.name,
            "shape": list(self.shape),
            "axes": list(self.blocks.axes),
            "sizes": list(self.blocks.sizes),
            "scale_rule": self.scale_rule,
            "rounding": self.rounding,
            "tensor_scale": self.tensor_scale,
        }
        if FORMATS.get(self.format.name) != self.format:
            raise ValueError(f"only the formats in mxsim.FORMATS can be saved; got {self.format}")
        text = np.frombuffer(json.dumps(header).encode(), np.uint8)
        with open(path, "wb") as file:
            np.savez(file, header=text, elements=self.pack(), scales=self.scales)

    @classmethod
    def load(cls, path: str | Path) -> MXArray:
        """Read what ``save`` wrote.  Raises ValueError for a damaged or foreign file."""
        try:
            with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
                header = json.loads(file["header"].tobytes())
                elements, scales = file["elements"], file["scales"]
            if header["mxsim"] != FILE_VERSION or set(header) != _HEADER:
                raise ValueError(
                    f"file version {header['mxsim']}, this version reads {FILE_VERSION}"
                )
            form = FORMATS[choose("format", header["format"], FORMATS)]
            shape = _check_shape(header["shape"])
            blocks = Blocks(_check_shape(header["axes"]), _check_shape(header["sizes"]))
            if not _consistent(blocks, shape) or scales.shape != blocks.grid(shape):
                raise ValueError("scales do not fit the shape")
            rules = SCALE_RULES if form.scale == "e8m0" else (form.name,)
            scale_rule = choose("scale_rule", header["scale_rule"], rules)
            rounding = choose("rounding", header["rounding"], ROUNDINGS)
            if scales.dtype != np.uint8 or elements.dtype != np.uint8:
                raise ValueError("elements and scales must be bytes")
            if elements.size != -(-math.prod(shape) * form.element.bits // 8):
                raise ValueError("elements do not fit the shape")
            codes = unpack_bits(elements.reshape(-1), form.element.bits, math.prod(shape))
            tensor_scale = _check_tensor_scale(header["tensor_scale"], form)
            codes = codes.reshape(shape)
            return cls(codes, scales, form, blocks, scale_rule, rounding, tensor_scale)
        except FileNotFoundError:
            raise
        except Exception as error:  # a damaged archive raises anything: zlib, tokenize, memory
            raise ValueError(f"{path} is not a whole mxsim array file ({error})") from error


_HEADER = {
    "mxsim",
    "format",
    "shape",
    "axes",
    "sizes",
    "scale_rule",
    "rounding",
    "tensor_scale",
}


def _check_shape(shape: object) -> tuple[int, ...]:
    """A tuple of integers of at least 0; TypeError or ValueError naming anything else."""
    if not isinstance(shape, (tuple, list)):
        raise TypeError(f"shape must be a tuple of integers; got {shape!r}")
    lengths = tuple(as_integer("shape", n, "a tuple of integers") for n in shape)
    if any(n < 0 for n in lengths):
        raise ValueError(f"shape must have lengths of at least 0; got {shape!r}")
    return lengths


def _check_tensor_scale(value: object, form: BlockFormat) -> float | None:
    """None for an E8M0 format, a positive float32 for NVFP4; else an error that says so."""
    if form.scale == "e8m0":
        if value is not None:
            raise ValueError(f"tensor_scale must be None for {form.name}; got {value!r}")
        return None
    message = f"tensor_scale must be a positive float32 for {form.name}; got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
        raise TypeError(message)
    if not 2.0**-149 <= value <= float(np.finfo(np.float32).max):
        raise ValueError(message)
    return float(np.float32(value))


def _consistent(blocks: Blocks, shape: tuple[int, ...]) -> bool:
    return (
        len(blocks.axes) == len(blocks.sizes) == len(set(blocks.axes))
        and all(0 <= a < len(shape) for a in blocks.axes)
        and all(s >= 1 for s in blocks.sizes)
        and all(n >= 0 for n in shape)
    )


def as_format(fmt: object) -> BlockFormat:
    """The BlockFormat named or given; ValueError for an unknown name, TypeError otherwise."""
    if isinstance(fmt, BlockFormat):
        return fmt
    if not isinstance(fmt, str):
        raise TypeError(f"fmt must be a BlockFormat or one of {', '.join(FORMATS)}; got {fmt!r}")
    return FORMATS[choose("fmt", fmt, FORMATS)]


def _as_bytes(argument: str, values: ArrayLike, largest: int) -> NDArray[np.uint8]:
    a = np.asarray(values)
    if a.dtype.kind not in "iu":
        raise TypeError(f"{argument} must be an array of integers; got dtype {a.dtype}")
    if a.size and (a.min() < 0 or a.max() > largest):
        bad = a.min() if a.min() < 0 else a.max()
        raise ValueError(f"{argument} must lie in 0..{largest}; got {bad}")
    return np.ascontiguousarray(a.astype(np.uint8)).reshape(a.shape)


def pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """codes (n,) of ``bits`` bits each -> (ceil(n * bits / 8),) bytes, lowest bits first."""
    if bits == 8:
        return codes.copy()
    lowest_first = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(lowest_first.reshape(-1), bitorder="little")


def unpack_bits(packed: NDArray[np.uint8], bits: int, size: int) -> NDArray[np.uint8]:
    """Inverse of ``pack_bits`` for ``size`` codes."""
    if bits == 8:
        return packed.copy()
    lowest_first = np.unpackbits(packed, count=size * bits, bitorder="little").reshape(size, bits)
    return np.packbits(lowest_first, axis=1, bitorder="little").reshape(size)
