"""What is asked of a backend: a case is an array and how it is cut, a config one way to round it.

A scheme is (format, scale rule, rounding); every case meets every scheme of its formats.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Axis = int | tuple[int, int]
BlockSize = int | tuple[int, int] | str

E8M0_FORMATS = (
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxfp6_e3m2",
    "mxfp6_e2m3",
    "mxfp4_e2m1",
    "mxint8",
    "mxint8_asymmetric",
)
ELEMENTWISE = ("bf16", "fp16")
FORMATS = (*E8M0_FORMATS, "nvfp4", *ELEMENTWISE)
BLOCK_FORMATS = (*E8M0_FORMATS, "nvfp4")
RULES = ("floor", "rceil", "ceil", "even")
OWN = "own"  # the rule of formats that have one way only to find a scale, or none
ROUNDINGS = ("even", "away", "zero", "stochastic")
DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Config:
    """One way to round one array: all that a backend needs to know to say whether it can.

    rule: a scale rule, or "own".  block_size: None for an elementwise format.  dtype: of the
    input; the result is float64 for float64 and float32 for all others.  finite: no NaN or Inf in
    the input.  noise: (seed, step, tensor) of the random bits, None unless stochastic.  case: the
    name of the case, for a witness that exists as a recording.
    """

    fmt: str
    rule: str
    rounding: str
    axis: Axis = -1
    block_size: BlockSize | None = 32
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    nonfinite: str = "propagate"
    finite: bool = True
    noise: tuple[int, int, int] | None = None
    case: str = ""

    @property
    def elementwise(self) -> bool:
        return self.fmt in ELEMENTWISE

    @property
    def result_dtype(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if self.dtype == "float64" else np.float32)

    def __str__(self) -> str:
        blocks = "" if self.elementwise else f", axis {self.axis}, block {self.block_size}"
        policy = "" if self.nonfinite == "propagate" else f", nonfinite {self.nonfinite}"
        return f"{self.fmt} {self.rule} {self.rounding}{blocks}, {self.dtype}{policy}"


@dataclass(frozen=True, eq=False)
class Case:
    """A named array, how it is cut into blocks, and where it comes from.

    x: float32 or float64, or float16; with dtype "bfloat16" a float32 array of bfloat16 values.
    block_size: None is the format's own (32, NVFP4 16).  formats, rules: those it is about.
    noise: (seed, step, tensor) for stochastic rounding.
    """

    name: str
    x: Array
    origin: str
    axis: Axis = -1
    block_size: BlockSize | None = None
    dtype: str = ""
    formats: tuple[str, ...] = FORMATS
    rules: tuple[str, ...] = RULES
    nonfinite: str = "propagate"
    noise: tuple[int, int, int] = (0, 0, 0)

    def __post_init__(self) -> None:
        if not self.dtype:
            object.__setattr__(self, "dtype", self.x.dtype.name)
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; got {self.dtype!r}")
        if unknown := set(self.formats) - set(FORMATS):
            raise ValueError(f"formats must be of {', '.join(FORMATS)}; got {sorted(unknown)}")
        self.x.setflags(write=False)

    def config(self, fmt: str, rule: str, rounding: str) -> Config:
        size = self.block_size
        if fmt in ELEMENTWISE:
            size = None
        elif size is None:
            size = 16 if fmt == "nvfp4" else 32
        return Config(
            fmt=fmt,
            rule=rule,
            rounding=rounding,
            axis=self.axis,
            block_size=size,
            dtype=self.dtype,
            shape=self.x.shape,
            nonfinite=self.nonfinite,
            finite=bool(np.isfinite(self.x).all()),
            noise=self.noise if rounding == "stochastic" else None,
            case=self.name,
        )

    def configs(self, formats: tuple[str, ...] = FORMATS) -> Iterator[Config]:
        """Every scheme of the case's formats (those that are also in ``formats``)."""
        for fmt in formats:
            if fmt in self.formats:
                rules = self.rules if fmt in E8M0_FORMATS else (OWN,)
                for rule, rounding in itertools.product(rules, ROUNDINGS):
                    yield self.config(fmt, rule, rounding)
