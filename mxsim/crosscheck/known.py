"""Known differences of outside witnesses, as data: where, in what, why, and who is right.

Our own backends have none.  An entry must be tight: it names the elements that may differ and the
outputs in which they may, so that nothing else can hide behind it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from mxsim.crosscheck.case import ELEMENTWISE, Array, Config
from mxsim.crosscheck.reference import SPECS, Judgement, magnitudes, round_code, split

Where = Callable[[Config, Array, Judgement], Array]
EVERYTHING = ("values", "codes", "scales")


@dataclass(frozen=True)
class Known:
    """A difference that is explained.

    backend: the first word of its name, or all of it.  where: which elements may differ, a bool
    array of x's shape.  outputs: in which of values, codes and scales.  far: whether a value may be
    anything; else it is of the right one's sign and off by at most its size, or where that is 0 by
    an eighth of the block's maximum, and a scale is off by one byte.  right: who is, by the
    specification.
    """

    name: str
    backend: str
    where: Where
    why: str
    right: str
    source: str
    outputs: tuple[str, ...] = EVERYTHING
    far: bool = False

    def of(self, backend: str) -> bool:
        return self.backend in (backend, backend.split()[0])

    def of_any(self, backends: Iterable[str]) -> bool:
        return any(map(self.of, backends))


def _nowhere(x: Array) -> Array:
    return np.zeros(x.shape, bool)


def _block_holds(x: Array, judged: Judgement, what: Array) -> Array:
    """Elements of blocks that hold one of ``what``."""
    return np.isin(judged.block, judged.block[what])


def _in_nan_blocks(config: Config, x: Array, judged: Judgement) -> Array:
    return _nowhere(x) if config.elementwise else _block_holds(x, judged, np.isnan(x))


def _in_inf_blocks(config: Config, x: Array, judged: Judgement) -> Array:
    if config.elementwise:
        return _nowhere(x)
    holds_nan = _block_holds(x, judged, np.isnan(x))
    return np.asarray(_block_holds(x, judged, np.isinf(x)) & ~holds_nan)


def _in_byte_0(config: Config, x: Array, judged: Judgement) -> Array:
    """Blocks whose scale is 2**-127."""
    if config.elementwise or config.fmt == "nvfp4":
        return _nowhere(x)
    return np.asarray(judged.block_byte == 0)


def _near_powers(x: Array, within: float) -> Array:
    """x > 0 is within a share ``within`` of a power of two, on either side."""
    half = np.frexp(x)[0]
    return np.asarray((x > 0) & (np.minimum(np.abs(1 - half), np.abs(2 * half - 1)) < within))


def _rceil_near_largest(config: Config, x: Array, judged: Judgement) -> Array:
    """Maxima so little above largest * 2**k that float32 puts them there."""
    if config.rule != "rceil":
        return _nowhere(x)
    spec = SPECS[config.fmt]
    ratio = judged.block_amax / magnitudes(spec)[spec.largest_code]
    return _near_powers(ratio, 2.0**-17)


def _just_below_powers(config: Config, x: Array, judged: Judgement) -> Array:
    """Maxima so little below a power of two that their float log2 is its exponent."""
    if config.elementwise:
        return _nowhere(x)
    below = np.nextafter(judged.block_amax, np.inf)  # of a power itself the log2 is exact
    near = _near_powers(below, 2.0**-17 if config.dtype == "float32" else 2.0**-45)
    return np.asarray(near & (np.frexp(judged.block_amax)[0] > 0.75))


def _rounded_twice(config: Config, x: Array, judged: Judgement) -> Array:
    """Where rounding to float32 first leads to another element."""
    if config.dtype != "float64" or config.fmt == "fp16":
        return _nowhere(x)
    scaled, spec = x, SPECS[config.fmt]
    if config.fmt not in ELEMENTWISE:
        scaled = np.ldexp(x, 127 - judged.block_byte.astype(np.int64))
    scaled = np.where(np.isfinite(scaled), scaled, 0.0)
    with np.errstate(over="ignore", under="ignore"):
        narrowed = scaled.astype(np.float32)
    narrowed = np.where(np.isfinite(narrowed), narrowed, np.float32(0))
    none = np.zeros(x.shape, np.uint32)
    once, twice = (round_code(*split(v), spec, "even", none) for v in (scaled, narrowed))
    return np.asarray(once != twice)


def _nvfp4_by_reciprocals(config: Config, x: Array, judged: Judgement) -> Array:
    """Where torchao's order of float32 operations leads to another scale or element."""
    if config.fmt != "nvfp4":
        return _nowhere(x)
    f32, none = np.float32, np.zeros(x.shape, np.uint32)
    e4m3, e2m1 = SPECS["mxfp8_e4m3"], SPECS["nvfp4"]
    with np.errstate(all="ignore"):
        s_t = f32(judged.amax.max(initial=0.0)) / f32(2688)
        wanted = np.clip((judged.block_amax.astype(f32) / f32(6)) / s_t, f32(2.0**-6), f32(448))
        scale_code = round_code(*split(wanted), e4m3, "even", none)
        s_b = magnitudes(e4m3)[np.minimum(scale_code, e4m3.largest_code)].astype(f32)
        quotient = np.clip(np.abs(x.astype(f32)) * ((f32(1) / s_t) / s_b), 0, f32(6))
        code = round_code(*split(quotient), e2m1, "even", none)
    other_scale = scale_code != judged.block_byte
    assert judged.codes is not None
    return np.asarray(other_scale | (code != judged.codes % 8) | ~np.isfinite(quotient))


KNOWN = (
    Known(
        name="2^-127 taken for 2^-126 or 1",
        backend="torchao",
        where=_in_byte_0,
        why="under byte 0 torchao divides elements by 2^-126 (rceil: by 1) and decodes by 2^-127",
        right="the specification: byte 0 is 2^-127, both ways",
        source="MX v1.0, 5.4.1; torchao 0.18, mx_tensor.py: to_mx, _to_mx_rceil",
        outputs=("values", "codes"),
    ),
    Known(
        name="codes of a NaN block",
        backend="torchao",
        where=_in_nan_blocks,
        why="torchao leaves x / NaN in a NaN block's codes, mxsim writes 0",
        right="both: byte 255 makes every element NaN, whatever its code",
        source="MX v1.0, 5.4.1 and 6.2",
        outputs=("codes",),
        far=True,
    ),
    Known(
        name="infinity in a block",
        backend="torchao",
        where=_in_inf_blocks,
        why="torchao reads Inf's exponent field as a number (rceil: byte 254) and saturates",
        right="open: the specification leaves it to the implementer; mxsim makes the block NaN",
        source="MX v1.0, 6.3; pytorch/ao#4725",
        far=True,
    ),
    Known(
        name="rceil by a float32 log2",
        backend="torchao",
        where=_rceil_near_largest,
        why="ceil(log2(amax / largest)) in float32 is one too low just above largest * 2^k",
        right="the specification of rceil: the smallest scale under which amax does not saturate",
        source="pytorch/ao#4725; torchao 0.18, mx_tensor.py: _to_mx_rceil",
    ),
    Known(
        name="NVFP4 by reciprocals",
        backend="torchao",
        where=_nvfp4_by_reciprocals,
        why="torchao takes (amax / 6) / s_t, no block scale below 2^-6, and multiplies by 1 / s",
        right="open: no standard fixes the order of NVFP4's operations; mxsim states its own",
        source="torchao 0.18, nvfp4_tensor.py: nvfp4_quantize",
        far=True,
    ),
    Known(
        name="float64 rounded twice",
        backend="ml_dtypes",
        where=_rounded_twice,
        why="ml_dtypes casts float64 to float32 first, where the value meets a tie",
        right="the specification: the element nearest to the value",
        source="jax-ml/ml_dtypes#401",
    ),
    Known(
        name="floor by a float log2",
        backend="gfloat blocks",
        where=_just_below_powers,
        why="floor(log2(amax)) is one too high just below a power of two",
        right="the specification: the largest power of two not above amax",
        source="MX v1.0, 6.3; gfloat 0.5, block.py: compute_scale_amax",
    ),
)
