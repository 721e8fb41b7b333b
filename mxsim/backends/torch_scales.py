"""E8M0 scales in PyTorch: from the bits of block maxima to bytes, and from bytes to numbers.

No scale is got by a cast, which rounds to nearest: neither the rules' rounding nor the same on
all devices.  Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5.4.1 and 6.3.
"""

from __future__ import annotations

from typing import Any

from mxsim.backends.torch_bits import FLOAT_BITS, power_of_two
from mxsim.formats import SCALE_BIAS, SCALE_NAN, Element

Tensor = Any

LARGEST_BYTE = SCALE_NAN - 1


def scale_bytes(
    maxima: Tensor, element: Element, scale_rule: str, nonfinite: str, dtype: Any
) -> Tensor:
    """E8M0 bytes of block maxima, as integers of the width of ``dtype``.

    maxima: bits of the largest |x| of each block, x of ``dtype``; NaN above Inf above numbers.
    """
    bits = FLOAT_BITS[dtype]
    number = maxima
    if element.emax == 0 and bits.bias == SCALE_BIAS:
        # Subnormals from 2**-127 on: moved up one place they have a normal number's mantissa.
        # With emax > 0 their byte is 0 whatever it is.
        number = maxima + (maxima - (1 << bits.mantissa)).clamp_max_(0)
    raised = _carry(element, scale_rule, bits.mantissa)
    field = (number + raised if raised else number) >> bits.mantissa
    bytes_ = (field - (bits.bias - SCALE_BIAS + element.emax)).clamp_(0, LARGEST_BYTE)
    if nonfinite == "saturate":
        bytes_ = bytes_.masked_fill_(maxima == bits.infinity, LARGEST_BYTE)
        return bytes_.masked_fill_(maxima > bits.infinity, SCALE_NAN)
    return bytes_.masked_fill_(maxima >= bits.infinity, SCALE_NAN)


def _carry(element: Element, scale_rule: str, mantissa: int) -> int:
    """What a scale rule adds to a maximum's bits before their exponent is read.

    - ``rceil``: a carry as soon as the mantissa exceeds the largest element's;
    - ``ceil``: as soon as it exceeds 1;
    - ``even``: half a unit of the element's last place.
    """
    if scale_rule == "floor":
        return 0
    if scale_rule == "even":
        return 1 << (mantissa - element.man_bits - 1)
    held = round((element.largest / 2.0**element.emax - 1) * 2**mantissa)
    return (1 << mantissa) - 1 - (held if scale_rule == "rceil" else 0)


def scale_values(bytes_: Tensor, dtype: Any) -> Tensor:
    """2**(byte - 127) of integers of the width of ``dtype``; NaN for 255."""
    field = bytes_ + (FLOAT_BITS[dtype].bias - SCALE_BIAS)
    return power_of_two(field, dtype).masked_fill_(bytes_ == SCALE_NAN, float("nan"))


def inverse_scales(bytes_: Tensor, dtype: Any) -> Tensor:
    """2**(127 - byte) of integers of the width of ``dtype``; arbitrary for 255."""
    return power_of_two(FLOAT_BITS[dtype].bias + SCALE_BIAS - bytes_, dtype)
