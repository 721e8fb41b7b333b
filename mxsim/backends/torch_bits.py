"""Where float32 and float64 keep sign, exponent and mantissa, and powers of two made from bits.

Exponents are read from bits, never from a logarithm, and powers of two written as bits, never by
exp2 or ldexp: those are off by a last place on some devices, and may flush subnormals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

Tensor = Any


@dataclass(frozen=True)
class FloatBits:
    """One float type: the integer type of its width, bits of mantissa, exponent bias."""

    integer: Any
    mantissa: int
    bias: int

    @property
    def infinity(self) -> int:
        """Bits of Inf, which are also the mask of the exponent; NaN lies above."""
        return (2 * self.bias + 1) << self.mantissa

    @property
    def magnitude(self) -> int:
        """Mask of all but the sign."""
        return self.infinity | (1 << self.mantissa) - 1

    @property
    def smallest_normal(self) -> float:
        return float(2.0 ** (1 - self.bias))


FLOAT_BITS: Mapping[Any, FloatBits] = MappingProxyType(
    {
        torch.float32: FloatBits(torch.int32, 23, 127),
        torch.float64: FloatBits(torch.int64, 52, 1023),
    }
)


def magnitude_bits(x: Tensor) -> Tensor:
    """The bits of |x| as integers, which ascend with |x|: Inf above all numbers, NaN above Inf."""
    bits = FLOAT_BITS[x.dtype]
    return x.view(bits.integer) & bits.magnitude


def power_of_two(field: Tensor, dtype: Any) -> Tensor:
    """2**(field - bias) in ``dtype`` of biased exponents, integers of its width.

    field: from 0, which is the subnormal 2**-bias, up to 2 * bias.
    """
    bits = FLOAT_BITS[dtype]
    return (field << bits.mantissa).clamp_min_(1 << (bits.mantissa - 1)).view(dtype)


def binade_bits(x: Tensor, emin: int) -> Tensor:
    """The bits of 2**max(floor(log2 |x|), emin), entry by entry; of Inf for Inf and NaN.

    emin: at least the exponent of the smallest normal number of x's type.
    """
    bits = FLOAT_BITS[x.dtype]
    least = (emin + bits.bias) << bits.mantissa
    return (x.view(bits.integer) & bits.infinity).clamp_min_(least)
