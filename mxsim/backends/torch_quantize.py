"""MX quantization in PyTorch, on a CPU or a GPU: ``quantize``, ``fake_quantize``, ``round_to``.

The same functions as in ``mxsim.quantize``, with the same arguments and, bit for bit, the same
results, written from the specification alone: no code that rounds is shared.

Which path is taken: E4M3 and E5M2 elements of float32 input, rounded to even, go through PyTorch's
float8 casts on a GPU (clamped before), bf16 and fp16 likewise on every device, fp32 of float64
too; all else is arithmetic in x's float type that is exact, but for NVFP4's, which is defined in
float32.  float64 arithmetic is done for float64 input only.  Exponents and powers of two are bits;
E8M0 bytes are never cast.

Nothing waits for the device (a CUDA graph can capture all), but ``nonfinite="raise"`` and int64
input, which are checked.  Results carry no gradient.  Subnormals must not be flushed: leave
``torch.set_flush_denormal`` alone.

Source: OCP Microscaling Formats (MX) Specification v1.0; docs/formats.md for what it leaves open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from mxsim.backends.torch_bits import FLOAT_BITS, magnitude_bits
from mxsim.backends.torch_blocks import beside_blocks, fold, one_a_block, unfold
from mxsim.backends.torch_elements import (
    decode_elements,
    encode_elements,
    native_type,
    nonzero_kept,
    round_elements,
    round_float,
    saturated,
)
from mxsim.backends.torch_nvfp4 import (
    NAN_SCALE,
    nvfp4_quotients,
    nvfp4_scale_values,
    nvfp4_scales,
)
from mxsim.backends.torch_philox import noise_bits
from mxsim.backends.torch_scales import inverse_scales, scale_bytes, scale_values
from mxsim.formats import ELEMENTWISE, ROUNDINGS, SCALE_NAN, BlockFormat, FloatFormat, choose
from mxsim.layout import Blocks, BlockSize, cut
from mxsim.philox import Noise
from mxsim.rounders import Rounder, block_rounder  # arguments and their checks; it is not called

Tensor = Any

WIDENED: Mapping[Any, Any] = MappingProxyType(
    {
        torch.float32: torch.float32,
        torch.float64: torch.float64,
        torch.float16: torch.float32,
        torch.bfloat16: torch.float32,
        torch.uint8: torch.float32,
        torch.int8: torch.float32,
        torch.int16: torch.float32,
        torch.int32: torch.float64,
        torch.int64: torch.float64,
    }
)
"""The float type that holds every value of a dtype, and is computed in."""

_CASTS: Mapping[tuple[FloatFormat, Any], Any] = MappingProxyType(
    {
        (ELEMENTWISE["bf16"], torch.float32): torch.bfloat16,
        (ELEMENTWISE["fp16"], torch.float32): torch.float16,
        (ELEMENTWISE["fp32"], torch.float64): torch.float32,
    }
)
"""Elementwise formats, and where PyTorch's cast to them rounds once, ties to even."""


@dataclass(frozen=True, eq=False)
class TorchMX:
    """A tensor in MX form: element codes and one scale a block, as mxsim.MXArray has them.

    codes: uint8, shape of the source, the element's bit pattern in the low bits.
    scales: uint8, shape of the source with each blocked axis replaced by its number of blocks.
    tensor_scale: of NVFP4, float32 without axes, on the device; else None.
    """

    codes: Tensor
    scales: Tensor
    format: BlockFormat
    blocks: Blocks
    tensor_scale: Tensor | None = None

    def dequantize(self, dtype: Any = torch.float32) -> Tensor:
        """element * scale, rounded once to ``dtype``, in the shape of ``codes``.

        Always exact in float64; Inf where beyond the largest number of ``dtype``.  NVFP4: the
        float32 product, then converted.  Raises TypeError unless ``dtype`` is float64, float32,
        float16 or bfloat16.
        """
        if dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise TypeError(
                f"dtype must be torch.float64, float32, float16 or bfloat16; got {dtype!r}"
            )
        wide = dtype == torch.float64 and self.tensor_scale is None
        work = torch.float64 if wide else torch.float32
        folded, _ = fold(self.codes, self.blocks)
        scales = beside_blocks(self.scales, self.blocks).to(torch.int64 if wide else torch.int32)
        values = decode_elements(folded, self.format.element, work)
        values = values.mul_(_scale_numbers(scales, self.tensor_scale, work))
        return unfold(values, self.blocks, self.codes.shape).to(dtype)


def quantize(
    x: Tensor,
    fmt: str | BlockFormat,
    axis: int | tuple[int, int] = -1,
    block_size: BlockSize | None = None,
    scale_rule: str | None = None,
    rounding: str = "even",
    *,
    noise: Noise | Tensor | None = None,
    nonfinite: str = "propagate",
) -> TorchMX:
    """Quantize a tensor to a block format; every argument as for ``mxsim.quantize``.

    x: float32, float64, float16, bfloat16 or integer, of any shape, memory layout and device.
    noise, for ``stochastic``: a Noise, or random words in x's shape, uint32 or int64 in
    0 .. 2**32 - 1 (see ``torch_philox.philox_bits``).

    Raises what ``mxsim.quantize`` does, and TypeError unless x is a tensor.
    """
    rounder = block_rounder(fmt, block_size, scale_rule, rounding, nonfinite)
    source, blocks, words = _checked(x, rounder, axis, noise)
    codes = torch.zeros(source.shape, dtype=torch.uint8, device=source.device)
    if not source.numel():
        scales = codes.new_zeros(blocks.grid(source.shape))
        unit = codes.new_ones((), dtype=torch.float32)
        return TorchMX(codes, scales, rounder.format, blocks, unit if _is_nvfp4(rounder) else None)
    y, bytes_, s_t = _scaled(source, blocks, rounder)
    element = rounder.format.element
    native = native_type(element, rounding, y)
    folded = encode_elements(y, element, rounding, words, native)
    folded = folded.masked_fill_(bytes_ == (SCALE_NAN if s_t is None else NAN_SCALE), 0)
    codes = unfold(folded, blocks, source.shape).contiguous()
    scales = one_a_block(bytes_, blocks).to(torch.uint8).contiguous()
    return TorchMX(codes, scales, rounder.format, blocks, s_t)


def fake_quantize(
    x: Tensor,
    fmt: str | BlockFormat,
    axis: int | tuple[int, int] = -1,
    block_size: BlockSize | None = None,
    scale_rule: str | None = None,
    rounding: str = "even",
    *,
    noise: Noise | Tensor | None = None,
    nonfinite: str = "propagate",
) -> Tensor:
    """quantize(x, ...).dequantize(dtype) bit for bit, without the codes: the fast path.

    Arguments and errors as for ``quantize``.  Returns float64 for float64 and for integers of 32
    bits and more, else float32, in the shape of x, on its device.
    """
    rounder = block_rounder(fmt, block_size, scale_rule, rounding, nonfinite)
    source, blocks, words = _checked(x, rounder, axis, noise)
    if not source.numel():
        return source.clone()
    y, bytes_, s_t = _scaled(source, blocks, rounder)
    element = rounder.format.element
    values = round_elements(y, element, rounding, words, native_type(element, rounding, y))
    values = values.mul_(_scale_numbers(bytes_, s_t, y.dtype))
    return unfold(values, blocks, source.shape).to(source.dtype)


def round_to(
    x: Tensor,
    fmt: str | FloatFormat,
    rounding: str = "even",
    *,
    noise: Noise | Tensor | None = None,
) -> Tensor:
    """Round each element to ``bf16``, ``fp16``, ``fp32`` or a FloatFormat, as mxsim.round_to does.

    Returns float64 for float64 and for integers of 32 bits and more, else float32; errors as
    there, and TypeError unless x is a tensor.
    """
    form = _float_format(fmt)
    choose("rounding", rounding, ROUNDINGS)
    source = _widened(x)
    words = _words(noise, rounding, source)
    if _holds(form, source.dtype):
        return source.clone()
    if rounding == "even" and (form, source.dtype) in _CASTS:
        return source.to(_CASTS[form, source.dtype]).to(source.dtype)
    return round_float(source, form, rounding, words)


def _scaled(
    source: Tensor, blocks: Blocks, rounder: Rounder
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(x / scale saturated, scale bytes as integers, NVFP4's s_t or None), blocks folded."""
    element = rounder.format.element
    folded, within = fold(source, blocks)
    if _is_nvfp4(rounder):
        folded = folded.to(torch.float32)
        s_t, bytes_ = nvfp4_scales(folded, within, rounder.nonfinite)
        y = nvfp4_quotients(folded, nvfp4_scale_values(bytes_, s_t))
        return saturated(y, element), bytes_, s_t
    maxima = magnitude_bits(folded).amax(within, keepdim=True)
    bytes_ = scale_bytes(maxima, element, rounder.scale_rule, rounder.nonfinite, folded.dtype)
    y = folded * inverse_scales(bytes_, folded.dtype)
    if rounder.rounding == "stochastic":
        y = nonzero_kept(y, folded)
    return saturated(y, element), bytes_, None


def _scale_numbers(bytes_: Tensor, s_t: Tensor | None, dtype: Any) -> Tensor:
    """The scales as numbers of ``dtype`` (NVFP4: float32); NaN of a NaN block."""
    return scale_values(bytes_, dtype) if s_t is None else nvfp4_scale_values(bytes_, s_t)


def _is_nvfp4(rounder: Rounder) -> bool:
    return rounder.format.scale == "e4m3"


def _checked(
    x: Tensor, rounder: Rounder, axis: int | tuple[int, int], noise: Noise | Tensor | None
) -> tuple[Tensor, Blocks, Tensor | None]:
    """(x in the float type that is computed in, its blocks, its random words folded alike)."""
    source = _widened(x)
    blocks = cut(source.shape, axis, rounder.block_size)
    words = _words(noise, rounder.rounding, source)
    if rounder.nonfinite == "raise":
        _check_finite(source, _is_nvfp4(rounder))
    if words is not None and source.numel():
        words, _ = fold(words, blocks)
    return source, blocks, words


def _widened(x: Tensor) -> Tensor:
    """x, without its gradient, in the float type that holds every value of its own."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x must be a torch.Tensor; got a {type(x).__name__}")
    if x.dtype not in WIDENED:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in WIDENED)
        raise TypeError(f"x must be real ({names}); got dtype {x.dtype}")
    if x.dtype == torch.int64:
        _check_held(x)
    return x.detach().to(WIDENED[x.dtype])


def _check_held(x: Tensor) -> None:
    """Raise ValueError for an integer that float64 cannot hold."""
    high, low = (x >> 32).to(torch.float64) * 2.0**32, (x & 2**32 - 1).to(torch.float64)
    lost = low - (high + low - high) != 0
    if lost.any():
        raise ValueError(
            f"x must hold integers that float64 can, such as all up to 2**53; got {int(x[lost][0])}"
        )


def _check_finite(x: Tensor, narrowed: bool) -> None:
    """Raise ValueError naming index and value of the first NaN or Inf (of x in float32)."""
    bad = ~(x.to(torch.float32) if narrowed else x).isfinite()
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        value = x[index].item()
        beyond = ", which overflows NVFP4's float32" if math.isfinite(value) else ""
        raise ValueError(
            f"x must be finite with nonfinite='raise'; got {value} at index {index}{beyond}"
        )


def _words(noise: Noise | Tensor | None, rounding: str, x: Tensor) -> Tensor | None:
    """Random words (int64) in x's shape; None unless ``rounding`` is stochastic."""
    if rounding != "stochastic":
        if noise is not None:
            raise ValueError(f"noise must be None with rounding {rounding!r}; got {noise!r}")
        return None
    if isinstance(noise, Noise):
        return noise_bits(noise, x.numel(), x.device).view(x.shape)
    allowed = "noise must be a Noise or a tensor of random words (uint32 or int64)"
    if noise is None:
        raise ValueError(f"{allowed} with rounding 'stochastic'; got None")
    if not isinstance(noise, torch.Tensor):
        raise TypeError(f"{allowed}; got a {type(noise).__name__}")
    if noise.dtype not in (torch.uint32, torch.int64):
        raise TypeError(f"{allowed}; got dtype {noise.dtype}")
    if noise.shape != x.shape:
        raise ValueError(
            f"noise must have the shape of x, {tuple(x.shape)}; got {tuple(noise.shape)}"
        )
    return noise.to(torch.int64)


def _float_format(fmt: object) -> FloatFormat:
    if isinstance(fmt, FloatFormat):
        return fmt
    if isinstance(fmt, str) and fmt in ELEMENTWISE:
        return ELEMENTWISE[fmt]
    kind = ValueError if isinstance(fmt, str) else TypeError
    raise kind(f"fmt must be a FloatFormat or one of {', '.join(ELEMENTWISE)}; got {fmt!r}")


def _holds(form: FloatFormat, dtype: Any) -> bool:
    """Whether ``form`` holds every value of ``dtype``; ValueError if it is too wide otherwise."""
    bits = FLOAT_BITS[dtype]
    exponents = form.emin <= 1 - bits.bias and form.emax >= bits.bias
    if form.specials == "ieee" and exponents and form.man_bits >= bits.mantissa:
        return True
    inside = form.emin >= 1 - bits.bias and form.emax <= bits.bias
    if not inside or form.man_bits > bits.mantissa - 2:
        raise ValueError(f"fmt must be narrower than {dtype}, or hold all of it; got {form}")
    return False
