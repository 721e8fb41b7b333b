"""Facts about number formats: elements, block formats, and the scale rules.

A format is the few independent facts; everything else is a property computed from them, so that
nothing can disagree.  No array is touched here: rounding lives in ``rounding.py``.

Source: OCP Microscaling Formats (MX) Specification v1.0, sections 5 (elements, scales) and 6.3
(conversion).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ROUNDINGS = ("even", "away", "zero", "stochastic")
NONFINITE = ("propagate", "saturate", "raise")
SCALE_RULES = ("floor", "rceil", "ceil", "even")  # of E8M0 scales

SCALE_EXPONENT_MIN, SCALE_EXPONENT_MAX = -127, 127  # E8M0 bytes 0..254
SCALE_BIAS = 127
SCALE_NAN = 255

MANY = 14  # names that an error still lists before the value that was given


def choose(argument: str, value: object, allowed: Mapping[str, object] | tuple[str, ...]) -> str:
    """``value`` if it is one of ``allowed``; else an error that names all three, and what is near.

    Raises TypeError for a value that is not a string, ValueError for an unknown string.
    """
    if not isinstance(value, str):
        raise TypeError(f"{argument} must be a string, one of {', '.join(allowed)}; got {value!r}")
    if value not in allowed:
        raise ValueError(not_one_of(argument, value, allowed))
    return value


def not_one_of(argument: str, value: str, allowed: Iterable[str]) -> str:
    """What an error says of an unknown name; of many allowed ones the list comes last."""
    names = list(allowed)
    near = get_close_matches(value, names, n=2)
    got = f"got {value!r}" + (f" (did you mean {' or '.join(near)}?)" if near else "")
    if len(names) > MANY:
        return f"{argument} must be a known name; {got}; known are {', '.join(names)}"
    return f"{argument} must be one of {', '.join(names)}; {got}"


def _check_count(
    name: str, value: object, low: int, high: int | None = None, given: str = ""
) -> None:
    """TypeError unless ``value`` is an int, ValueError unless in low..high; both say what is."""
    allowed = f"an integer in {low}..{high}" if high is not None else f"an integer from {low} on"
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be {allowed}{given}; got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {allowed}{given}; got {value}")


@dataclass(frozen=True)
class FloatFormat:
    """A signed binary floating-point format, 1 sign + ``exp_bits`` + ``man_bits``.

    ``specials`` says what the all-ones exponent means: ``"ieee"`` Inf and NaN, ``"nan"`` only the
    all-ones code is NaN (E4M3), ``"none"`` every code is a number (FP6, FP4).
    """

    exp_bits: int
    man_bits: int
    specials: Literal["ieee", "nan", "none"] = "ieee"

    def __post_init__(self) -> None:
        choose("specials", self.specials, ("ieee", "nan", "none"))
        least = {"ieee": (2, 1), "nan": (1, 1), "none": (1, 0)}[self.specials]
        given = f" with specials={self.specials!r}"
        _check_count("exp_bits", self.exp_bits, least[0], 11, given)
        _check_count("man_bits", self.man_bits, least[1], 52, given)

    @property
    def bits(self) -> int:
        return 1 + self.exp_bits + self.man_bits

    @property
    def bias(self) -> int:
        return int(2 ** (self.exp_bits - 1) - 1)

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number, and of all subnormals."""
        return 1 - self.bias

    @property
    def emax(self) -> int:
        top_field = 2**self.exp_bits - (2 if self.specials == "ieee" else 1)
        return int(top_field - self.bias)

    @property
    def largest(self) -> float:
        codes_lost = 1 if self.specials == "nan" else 0  # S.1111.111 is not a number
        top_mantissa = 2 ** (self.man_bits + 1) - 1 - codes_lost
        return float(top_mantissa * 2.0 ** (self.emax - self.man_bits))

    @property
    def top(self) -> float:
        """largest / 2**emax, the mantissa above which a block maximum saturates under floor."""
        return self.largest / 2.0**self.emax

    @property
    def smallest_normal(self) -> float:
        return float(2.0**self.emin)

    @property
    def smallest_subnormal(self) -> float:
        return float(2.0 ** (self.emin - self.man_bits))

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The value of every code, shape (2**bits,), indexed by the code."""
        code = np.arange(2**self.bits)
        mantissa = code % 2**self.man_bits
        field = (code >> self.man_bits) % 2**self.exp_bits
        sign = np.where(code >> (self.bits - 1), -1.0, 1.0)
        significand = np.where(field > 0, 2**self.man_bits + mantissa, mantissa)
        values: NDArray[np.float64] = sign * np.ldexp(
            significand.astype(np.float64), np.maximum(field, 1) - self.bias - self.man_bits
        )
        if self.specials == "ieee":
            infinite = field == 2**self.exp_bits - 1
            values[infinite] = np.where(mantissa[infinite], np.nan, sign[infinite] * np.inf)
        elif self.specials == "nan":
            values[(code % 2 ** (self.bits - 1)) == 2 ** (self.bits - 1) - 1] = np.nan
        values.setflags(write=False)
        return values


@dataclass(frozen=True)
class IntFormat:
    """Two's complement fixed point: k / 2**man_bits.

    ``symmetric``: the most negative code is not used (MX v1.0 section 5.3.4 allows either).  It has
    the same derived facts as a float format with a single binade (emin = emax = 0), which is why
    the same rounding kernel serves both.
    """

    man_bits: int
    symmetric: bool = True

    def __post_init__(self) -> None:
        _check_count("man_bits", self.man_bits, 0, 52)
        if not isinstance(self.symmetric, bool):
            raise TypeError(f"symmetric must be True or False; got {self.symmetric!r}")

    @property
    def emin(self) -> int:
        return 0

    @property
    def emax(self) -> int:
        return 0

    @property
    def bits(self) -> int:
        return self.man_bits + 2  # sign and one integer bit

    @property
    def largest(self) -> float:
        return float((2 ** (self.man_bits + 1) - 1) / 2**self.man_bits)

    @property
    def top(self) -> float:
        return self.largest

    @property
    def smallest_normal(self) -> float:
        return 1.0

    @property
    def smallest_subnormal(self) -> float:
        return float(2.0**-self.man_bits)

    @cached_property
    def values(self) -> NDArray[np.float64]:
        """The value of every code, shape (2**bits,); the most negative decodes even if unused."""
        code = np.arange(2**self.bits)
        signed = np.where(code < 2 ** (self.bits - 1), code, code - 2**self.bits)
        values = signed / 2.0**self.man_bits
        values.setflags(write=False)
        return values


Element = FloatFormat | IntFormat

E4M3 = FloatFormat(4, 3, "nan")  # NVFP4's block scale, too


@dataclass(frozen=True)
class BlockFormat:
    """Elements in blocks that share one scale.

    ``scale``: ``e8m0`` is a power of two, 2**(byte - 127); ``e4m3`` is NVFP4's, a byte in E4M3
    times one float32 scale a tensor.  ``block_size`` is the format's own, taken unless another is
    asked for.  Elements have at most 8 bits.  Raises ValueError for a wider element.
    """

    name: str
    element: Element
    block_size: int = 32
    scale: Literal["e8m0", "e4m3"] = "e8m0"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string; got {self.name!r}")
        if not isinstance(self.element, (FloatFormat, IntFormat)):
            raise TypeError(f"element must be a FloatFormat or an IntFormat; got {self.element!r}")
        if self.element.bits > 8:
            raise ValueError(
                f"element of format {self.name} must have at most 8 bits; got {self.element.bits}"
            )
        _check_count("block_size", self.block_size, 1)
        choose("scale", self.scale, ("e8m0", "e4m3"))
        if self.scale == "e4m3" and self.element != FloatFormat(2, 1, "none"):
            raise ValueError(f"scale 'e4m3' goes with elements in E2M1 (NVFP4); got {self.element}")

    def __hash__(self) -> int:
        return hash(self.name)  # cheap: rounders are looked up by it in every training step

    @property
    def bits_per_element(self) -> float:
        """Element bits and the block's share of the scale, at the format's own block size."""
        return self.element.bits + 8 / self.block_size

    def bump_threshold(self, scale_rule: str) -> tuple[float, bool]:
        """Where the shared exponent exceeds floor(log2 amax) - emax by one.

        With the block maximum's significand m in [1, 2), every scale rule is "floor, plus one if
        m is above a threshold".  Returns (threshold, inclusive): bump if m > threshold, or also
        at equality when inclusive.

        - ``floor`` (MX v1.0 section 6.3): never.
        - ``rceil``: the smallest e with amax <= largest * 2**e, so m > top.
        - ``ceil``: ceil(log2 amax) - emax, so m > 1.
        - ``even``: amax rounded half up to the element's mantissa width carries into the exponent,
          so m >= 2 - 2**-(man_bits + 1).
        """
        man = self.element.man_bits
        thresholds = {
            "floor": (2.0, False),
            "rceil": (self.element.top, False),
            "ceil": (1.0, False),
            "even": (2.0 - 2.0 ** -(man + 1), True),
        }
        return thresholds[scale_rule]


FORMATS: Mapping[str, BlockFormat] = MappingProxyType(
    {
        f.name: f
        for f in (
            BlockFormat("mxfp8_e4m3", E4M3),
            BlockFormat("mxfp8_e5m2", FloatFormat(5, 2, "ieee")),
            BlockFormat("mxfp6_e3m2", FloatFormat(3, 2, "none")),
            BlockFormat("mxfp6_e2m3", FloatFormat(2, 3, "none")),
            BlockFormat("mxfp4_e2m1", FloatFormat(2, 1, "none")),
            BlockFormat("mxint8", IntFormat(6)),
            BlockFormat("mxint8_asymmetric", IntFormat(6, symmetric=False)),
            BlockFormat("nvfp4", FloatFormat(2, 1, "none"), block_size=16, scale="e4m3"),
        )
    }
)
"""Block formats by name: the concrete formats of MX v1.0, table 1 (INT8 with and without the code
of -2), and NVIDIA's NVFP4."""

ELEMENTWISE: Mapping[str, FloatFormat] = MappingProxyType(
    {"bf16": FloatFormat(8, 7), "fp16": FloatFormat(5, 10), "fp32": FloatFormat(8, 23)}
)
"""Formats applied element by element, without a shared scale."""


def as_format(fmt: object) -> BlockFormat:
    """The BlockFormat named or given; ValueError for an unknown name, TypeError otherwise."""
    if isinstance(fmt, BlockFormat):
        return fmt
    if not isinstance(fmt, str):
        raise TypeError(f"fmt must be a BlockFormat or one of {', '.join(FORMATS)}; got {fmt!r}")
    return FORMATS[choose("fmt", fmt, FORMATS)]
