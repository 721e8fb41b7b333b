"""Elements in PyTorch: rounding to a grid once scales are divided out, codes, and decoding.

The rule everywhere: measure an element in steps of its binade, t = y / step, which is exact, round
t to an integer n, and multiply back.  The last bit of n is the last bit of the mantissa, so that
``torch.round`` (ties to the even integer) is IEEE 754's rounding, and 2 of the halves between 1
and 2 where there is no mantissa; below the smallest normal number the step stays.  Divisions by a
power of two are products with one made from bits: a division may be approximate once compiled.

Source: OCP Microscaling Formats (MX) Specification v1.0, section 5.3; IEEE 754-2019, 4.3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from mxsim.backends.torch_bits import FLOAT_BITS, binade_bits, power_of_two
from mxsim.formats import Element, FloatFormat, IntFormat

Tensor = Any

E4M3 = FloatFormat(4, 3, "nan")
E2M1 = FloatFormat(2, 1, "none")

NATIVE: Mapping[Element, Any] = MappingProxyType(
    {E4M3: torch.float8_e4m3fn, FloatFormat(5, 2, "ieee"): torch.float8_e5m2}
)
"""Elements that PyTorch has a type for.  Its casts from float32 round ties to even and differ
between libraries and devices beyond the largest only, so values are clamped before."""


def native_type(element: Element, rounding: str, y: Tensor) -> Any:
    """The dtype whose cast does the same, or None: from float32 (of float64 it rounds twice), on
    a GPU (on a CPU the cast is slower than arithmetic).
    """
    if y.is_cuda and y.dtype == torch.float32 and rounding == "even":
        return NATIVE.get(element)
    return None


def saturated(y: Tensor, element: Element) -> Tensor:
    """y clamped, in place, to the range of ``element``; NaN stays.

    Before rounding is the same as after it: both ends of the range are on the grid.
    """
    lowest = -element.largest
    if isinstance(element, IntFormat) and not element.symmetric:
        lowest -= element.smallest_subnormal
    return y.clamp_(lowest, element.largest)


def round_elements(
    y: Tensor, element: Element, rounding: str, noise: Tensor | None, native: Any = None
) -> Tensor:
    """y rounded to values of ``element``, in y's dtype and of its shape.

    y: from ``saturated``, or NaN; overwritten.  noise: see ``_round``.  native: ``native_type``.
    """
    if native is not None:
        return y.to(native).to(y.dtype)
    n, binade = _in_steps(y, element, rounding, noise)
    if binade is None:
        n = n.mul_(element.smallest_subnormal)
        return torch.where(n == 0, 0.0, n)  # two's complement has no negative zero
    step = binade.sub_(element.man_bits << FLOAT_BITS[y.dtype].mantissa)
    return n.mul_(step.view(y.dtype))


def encode_elements(
    y: Tensor, element: Element, rounding: str, noise: Tensor | None, native: Any = None
) -> Tensor:
    """The codes of what ``round_elements`` returns, uint8; arbitrary where y is NaN."""
    if native is not None:
        return y.to(native).view(torch.uint8)
    bits = FLOAT_BITS[y.dtype]
    negative = y.view(bits.integer) < 0
    n, binade = _in_steps(y, element, rounding, noise)
    whole = n.to(bits.integer)
    if binade is None:
        return (whole & 2**element.bits - 1).to(torch.uint8)
    # In the lowest binade n is the code without sign, subnormals included, and every further one
    # has 2**man_bits codes: a carry into the next binade comes out right.
    binades = (binade >> bits.mantissa) - (element.emin + bits.bias)
    codes = whole.abs_() + (binades << element.man_bits)
    return (codes + (negative * 2 ** (element.bits - 1))).to(torch.uint8)


def decode_elements(codes: Tensor, element: Element, dtype: Any) -> Tensor:
    """The values, exact, of finite codes (uint8) in float32 or float64."""
    bits = FLOAT_BITS[dtype]
    sign = 2 ** (element.bits - 1)
    whole = codes.to(bits.integer)
    if isinstance(element, IntFormat):
        return ((whole ^ sign) - sign).to(dtype).mul_(element.smallest_subnormal)
    magnitude = whole & (sign - 1)
    lifted = ((magnitude >> element.man_bits) - 1).clamp_min_(0)  # binades above the lowest
    n = (magnitude - (lifted << element.man_bits)).to(dtype)
    step = power_of_two(lifted + (element.emin - element.man_bits + bits.bias), dtype)
    return torch.where(whole >= sign, -n, n).mul_(step)


def round_float(x: Tensor, form: FloatFormat, rounding: str, noise: Tensor | None) -> Tensor:
    """x rounded to a floating-point format as IEEE 754 has it; see ``torch_quantize.round_to``.

    ``form``: within x's type in exponent and in mantissa.  noise: see ``_round``.
    """
    bits = FLOAT_BITS[x.dtype]
    binade = binade_bits(x, form.emin)
    # Of binades, not of steps: those of a format with x's own exponents may be subnormal.
    t = x * power_of_two(2 * bits.bias - (binade >> bits.mantissa), x.dtype)
    n = _round(t.mul_(2.0**form.man_bits), rounding, noise)
    y = n.mul_(2.0**-form.man_bits).mul_(binade.view(x.dtype))
    if form.specials != "ieee":
        return y.clamp_(-form.largest, form.largest)
    if rounding == "zero":
        return torch.where(x.isinf(), x, y.clamp_(-form.largest, form.largest))
    return torch.where(y.abs() > form.largest, torch.copysign(y.new_full((), math.inf), y), y)


def nonzero_kept(y: Tensor, x: Tensor) -> Tensor:
    """y, x times a power of two, but never zero where x is not.

    Stochastic rounding takes any part of a step above 0 up if its noise is 0; which one does not
    matter below 2**-24.
    """
    least = FLOAT_BITS[y.dtype].smallest_normal
    return torch.where(x == 0, y, y.abs().clamp_min_(least).copysign_(x))


def _in_steps(
    y: Tensor, element: Element, rounding: str, noise: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(n, bits of the binade): y rounded, in steps of its binade; None for an integer's one binade.

    A step is binade / 2**man_bits.  No element of at most 8 bits leaves the normal numbers.  n
    takes y's memory: fresh memory costs more than arithmetic on it.
    """
    if isinstance(element, IntFormat):
        return _round(y.mul_(2.0**element.man_bits), rounding, noise), None
    bits = FLOAT_BITS[y.dtype]
    binade = binade_bits(y, element.emin)
    per_step = ((2 * bits.bias + element.man_bits) << bits.mantissa) - binade
    return _round(y.mul_(per_step.view(y.dtype)), rounding, noise), binade


def _round(t: Tensor, rounding: str, noise: Tensor | None) -> Tensor:
    """t rounded to integers, sign of zero kept; may be t itself.

    noise: 32-bit words (int64) in t's shape, of which the upper 24 decide stochastic rounding: up
    iff the part of t above the integer below exceeds their share of 2**24.
    """
    if rounding == "even":
        return t.round_()
    if rounding == "zero":
        return t.trunc_()
    magnitude = t.abs()
    n = magnitude.floor()
    part = magnitude.sub_(n)  # exact; floor(t + 1/2) would not be
    up = part >= 0.5 if noise is None else part > (noise >> 8).to(t.dtype).mul_(2.0**-24)
    return n.add_(up).copysign_(t)
