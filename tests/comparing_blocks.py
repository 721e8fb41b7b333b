"""Comparison with the oracle for any element, block shape, noise and non-finite policy."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, cast

import numpy as np

import mxsim
from tests import oracle_blocks, oracle_noise
from tests.comparing import assert_same_bits
from tests.inputs import Array
from tests.oracle import Quantized
from tests.oracle_blocks import Axis, BlockSize
from tests.oracle_elements import ELEMENTS, Element

NAMES = (*ELEMENTS, "nvfp4")
DEFAULT_BLOCK = {name: 16 if name == "nvfp4" else 32 for name in NAMES}


class How(NamedTuple):
    """Everything but the array: what to quantize to, and how. `fmt` is a name or any element."""

    fmt: str | Element
    axis: Axis = -1
    block_size: BlockSize | None = None
    scale_rule: str | None = None
    rounding: str = "even"
    nonfinite: str = "propagate"

    @property
    def format(self) -> str | mxsim.BlockFormat:
        return self.fmt if isinstance(self.fmt, str) else block_format(self.fmt)

    def arguments(self) -> dict[str, Any]:
        return {**self._asdict(), "fmt": self.format}


def float_format(element: Element) -> mxsim.FloatFormat:
    specials = cast(Literal["ieee", "nan", "none"], element.specials)
    return mxsim.FloatFormat(element.exponent_bits, element.mantissa_bits, specials)


def block_format(element: Element, block_size: int = 32) -> mxsim.BlockFormat:
    """The library's name for an oracle's element."""
    name = f"{element.exponent_bits}_{element.mantissa_bits}_{element.specials}"
    if element.is_integer:
        symmetric = element.specials == "symmetric"
        part: Any = mxsim.IntFormat(element.mantissa_bits, symmetric)
    else:
        part = float_format(element)
    return mxsim.BlockFormat(name, part, block_size)


def expected(x: Array, how: How, bits: Array | None = None, scalar: bool = False) -> Quantized:
    """What the oracle says."""
    fmt, axis, block_size, rule, rounding, nonfinite = how
    element = ELEMENTS.get(fmt, fmt) if isinstance(fmt, str) else fmt
    size = DEFAULT_BLOCK.get(str(fmt), 32) if block_size is None else block_size
    return oracle_blocks.quantize(
        x, element, axis, size, rule or "floor", rounding, bits, nonfinite, scalar
    )


def assert_agrees(
    x: Array,
    how: How,
    *,
    noise: mxsim.Noise | Array | None = None,
    scalar: bool = False,
    seed: tuple[int, ...] = (),
) -> mxsim.MXArray:
    """Scales, codes, values in each precision, and the fast path are the oracle's.

    `noise` goes to the library; where it is no array, `seed` gives the oracle the same stream.
    """
    bits = noise if isinstance(noise, np.ndarray) else None
    if isinstance(noise, mxsim.Noise):
        bits = oracle_noise.noise_bits(x.size, *seed).reshape(x.shape)
    want = expected(x, how, bits, scalar)
    what = f"{' '.join(map(str, how))} {x.dtype} {x.shape}"
    q = mxsim.quantize(x, **how.arguments(), noise=noise)
    assert_same_bits(q.scales, want.scales, f"{what} scales")
    assert_same_bits(q.codes, want.codes, f"{what} codes", x)
    narrow = want.values_as(np.float32)
    assert_same_bits(q.dequantize(), narrow, f"{what} float32", x)
    wide = oracle_wide(want)
    assert_same_bits(q.dequantize(np.float64), wide, f"{what} float64", x)
    fast = mxsim.fake_quantize(x, **how.arguments(), noise=noise)
    assert_same_bits(fast, wide if x.dtype == np.float64 else narrow, f"{what} fake_quantize", x)
    return q


def oracle_wide(want: Quantized) -> Array:
    return want.values.astype(np.float64)
