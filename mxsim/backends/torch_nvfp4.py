"""NVFP4 in PyTorch: E2M1 elements, an E4M3 scale a block, one float32 scale for the tensor.

In float32, in this order: s_t = amax(tensor) / 2688, s_b = E4M3 of amax(block) / (6 s_t), element =
E2M1 of |x| / (s_b s_t), value = element * (s_b s_t).  amax is over finite elements; an all-zero
tensor has s_t = 1, one whose s_t underflows 2**-149, and a block whose scale is zero has zeros.
Divisions are by tensors: by a Python number PyTorch multiplies with its rounded reciprocal on a
GPU.  Compiled for one by Inductor they are IEEE 754's only if its config.eager_numerics has
division_rounding = True.

Source: NVIDIA's recipe for pretraining in NVFP4, as docs/formats.md has it.
"""

from __future__ import annotations

from typing import Any

import torch

from mxsim.backends.torch_bits import FLOAT_BITS, magnitude_bits
from mxsim.backends.torch_elements import (
    E2M1,
    E4M3,
    decode_elements,
    encode_elements,
    native_type,
    saturated,
)

Tensor = Any

NAN_SCALE, LARGEST_SCALE = 0x7F, 0x7E  # of E4M3


def nvfp4_scales(folded: Tensor, within: tuple[int, ...], nonfinite: str) -> tuple[Tensor, Tensor]:
    """(s_t, E4M3 codes of s_b): a 0-d float32, and integers, of length 1 along ``within``.

    folded: float32, its blocks along the axes ``within``.
    """
    infinity = FLOAT_BITS[torch.float32].infinity
    magnitude = magnitude_bits(folded)
    maxima = magnitude.amax(within, keepdim=True)
    finite = magnitude.masked_fill(magnitude >= infinity, 0).amax(within, keepdim=True)
    finite = finite.view(torch.float32)
    amax = finite.amax()
    s_t = amax / torch.full_like(amax, E2M1.largest * E4M3.largest)
    s_t = torch.where(amax == 0, 1.0, s_t.clamp_min_(2.0**-149))
    ratio = saturated(finite / (E2M1.largest * s_t), E4M3)
    codes = encode_elements(ratio, E4M3, "even", None, native_type(E4M3, "even", ratio))
    codes = codes.to(torch.int32)
    if nonfinite == "saturate":
        codes = codes.masked_fill_(maxima == infinity, LARGEST_SCALE)
        return s_t, codes.masked_fill_(maxima > infinity, NAN_SCALE)
    return s_t, codes.masked_fill_(maxima >= infinity, NAN_SCALE)


def nvfp4_scale_values(codes: Tensor, s_t: Tensor) -> Tensor:
    """s_b s_t in float32 of E4M3 codes; NaN for NaN."""
    s_b = decode_elements(codes, E4M3, torch.float32)
    return s_b.mul_(s_t).masked_fill_(codes == NAN_SCALE, float("nan"))


def nvfp4_quotients(folded: Tensor, scales: Tensor) -> Tensor:
    """x / scale; zeros of x's sign where a scale is zero (or NaN)."""
    return folded / torch.where(scales > 0, scales, float("inf"))
