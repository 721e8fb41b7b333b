"""The judge: what the specification gives, in integers.

Written from docs/formats.md; it shares no code with a backend but the bits of a Noise.  A finite
number is m * 2**(k - 52) with an integer m of 53 bits (2**52 <= m < 2**53, or 0), exactly, for
float64 and all that is narrower; rounding is a shift of m and a comparison of the bits shifted out.
No sum, product or logarithm of floats is taken, so nothing can be rounded by accident.  (NVFP4 is
defined by float32 operations: there they are taken.)  tests/test_crosscheck_reference.py holds it
to an oracle in fractions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.crosscheck.case import Array, Config
from mxsim.philox import Noise

WHOLE = 2**52  # the significand of a power of two
LOWEST = -(2**20)  # stands for the exponent of zero: below all others
NAN_BYTE, E4M3_NAN = 255, 0x7F


@dataclass(frozen=True)
class Spec:
    """An element format: mantissa bits, exponents of the lowest and highest binade, largest code.

    Codes are of magnitudes and ascend with them; ``bits`` is the width with the sign.
    """

    bits: int
    man_bits: int
    emin: int
    emax: int
    largest_code: int
    integer: bool = False  # two's complement: a single binade, no -0
    one_sided: bool = False  # the most negative code is allowed
    infinite: bool = False  # beyond the largest is infinity; else it saturates


SPECS = {  # MX v1.0 section 5.3; IEEE 754 for fp16
    "mxfp8_e4m3": Spec(8, 3, 1 - 7, 8, 0b1111_110),  # 1111_111 is NaN
    "mxfp8_e5m2": Spec(8, 2, 1 - 15, 15, 0b11110_11),  # exponent 11111 is Inf and NaN
    "mxfp6_e3m2": Spec(6, 2, 1 - 3, 4, 0b111_11),
    "mxfp6_e2m3": Spec(6, 3, 1 - 1, 2, 0b11_111),
    "mxfp4_e2m1": Spec(4, 1, 1 - 1, 2, 0b11_1),
    "mxint8": Spec(8, 6, 0, 0, 127, integer=True),
    "mxint8_asymmetric": Spec(8, 6, 0, 0, 127, integer=True, one_sided=True),
    "nvfp4": Spec(4, 1, 1 - 1, 2, 0b11_1),
    "bf16": Spec(16, 7, 1 - 127, 127, 0b11111110_1111111, infinite=True),
    "fp16": Spec(16, 10, 1 - 15, 15, 0b11110_1111111111, infinite=True),
}


@dataclass(frozen=True)
class Judgement:
    """What the specification gives for one array and config.

    values: float64, exact (NVFP4: the float32 product).  codes, scales: uint8, None for an
    elementwise format.  block: each element's block, as an index into the raveled scales.
    amax: each block's largest finite magnitude.
    """

    values: Array
    codes: Array | None
    scales: Array | None
    block: NDArray[np.int64]
    amax: Array

    def values_as(self, dtype: np.dtype[Any]) -> Array:
        """In float32 a value past the largest finite float is an infinity."""
        with np.errstate(over="ignore"):
            return self.values.astype(dtype)

    @property
    def block_amax(self) -> Array:
        """amax of each element's block."""
        return np.asarray(self.amax[self.block])

    @property
    def block_byte(self) -> Array:
        """The scale byte of each element's block."""
        assert self.scales is not None
        return np.asarray(self.scales.ravel()[self.block])


def judge(x: Array, config: Config) -> Judgement:
    """The specification's answer; x as in Case."""
    random = np.zeros(x.shape, np.uint32)
    if config.noise is not None:
        random = Noise(*config.noise).bits(x.size).reshape(x.shape)
    if config.elementwise:
        return _judge_elementwise(x, config, random)
    if config.fmt == "nvfp4":
        return _judge_nvfp4(x, config, random)
    return _judge_e8m0(x, config, random)


# ----------------------------------------------------------------------------- numbers as integers


def split(x: Array) -> tuple[Array, Array]:
    """(m, k) of finite |x| = m * 2**(k - 52); zero is (0, LOWEST).  frexp is exact."""
    half, exponent = np.frexp(np.abs(x.astype(np.float64)))
    m = (half * 2.0**53).astype(np.int64)
    return m, np.where(m > 0, exponent.astype(np.int64) - 1, LOWEST)


def round_code(m: Array, k: Array, spec: Spec, rounding: str, random: Array) -> Array:
    """The magnitude code, not yet saturated, of m * 2**(k - 52) in units of the scale.

    Stochastic: up where the part above the code below exceeds u, the upper 24 random bits / 2**24.
    """
    binade = np.maximum(k, spec.emin)  # subnormals have the lowest binade's step
    shift = binade - spec.man_bits - (k - 52)  # >= 52 - man_bits: bits of m below the step
    near = np.minimum(shift, 62)  # m has 53 bits: further down nothing changes
    whole = m >> near
    rest, half = m & ((1 << near) - 1), 1 << (near - 1)
    if rounding == "stochastic":
        u = (random >> 8).astype(np.int64)
        fine = np.minimum(shift - 24, 62)
        part, below = rest >> fine, rest & ((1 << fine) - 1)
        up = (part > u) | ((part == u) & (below > 0))
    else:
        up = {
            "zero": np.zeros(m.shape, bool),
            "away": rest >= half,
            "even": (rest > half) | ((rest == half) & (whole % 2 == 1)),
        }[rounding]
    # whole holds the leading bit, which moves the exponent field from 0 to 1; a carry moves it on.
    return np.asarray(((binade - spec.emin) << spec.man_bits) + whole + up)


@cache
def magnitudes(spec: Spec) -> Array:
    """The value of every magnitude code up to one past the largest, in float64."""
    code = np.arange(spec.largest_code + 2)
    field, fraction = code >> spec.man_bits, code % 2**spec.man_bits
    if spec.integer:
        return np.asarray(code / 2.0**spec.man_bits)
    significand = np.where(field > 0, 2**spec.man_bits + fraction, fraction)
    exponent = np.maximum(field, 1) - 1 + spec.emin - spec.man_bits
    return np.asarray(np.ldexp(significand.astype(np.float64), exponent))


def saturate(code: Array, negative: Array, spec: Spec) -> Array:
    """Magnitude codes, none beyond the largest of its sign."""
    return np.asarray(np.minimum(code, spec.largest_code + (negative & spec.one_sided)))


def store(code: Array, negative: Array, spec: Spec) -> Array:
    """The bit pattern of a magnitude code and a sign."""
    if spec.integer:
        bits = np.where(negative, -code, code) % 2**spec.bits
    else:
        bits = code + np.where(negative, 2 ** (spec.bits - 1), 0)
    return np.asarray(bits.astype(np.uint8))


def signed(magnitude: Array, negative: Array, spec: Spec) -> Array:
    """With its sign; integers have no -0."""
    value = np.where(negative, -magnitude, magnitude)
    return np.asarray(value + 0.0 if spec.integer else value)


# ---------------------------------------------------------------------------------------- blocks


def block_index(config: Config) -> tuple[NDArray[np.int64], tuple[int, ...]]:
    """Which block each element is in, and how many blocks there are along each axis."""
    shape = config.shape
    lengths = [1] * len(shape)
    if config.block_size == "tensor":
        lengths = list(shape)
    elif isinstance(config.block_size, tuple):
        axes = config.axis if isinstance(config.axis, tuple) else (-2, -1)
        for axis, length in zip(axes, config.block_size, strict=True):
            lengths[axis] = length
    else:
        assert isinstance(config.axis, int)
        assert isinstance(config.block_size, int)
        lengths[config.axis] = config.block_size
    counts = tuple(-(-n // length) for n, length in zip(shape, lengths, strict=True))
    where = [i // length for i, length in zip(np.indices(shape), lengths, strict=True)]
    return np.ravel_multi_index(where, counts).astype(np.int64), counts


def maxima(x: Array, block: NDArray[np.int64], blocks: int) -> tuple[Array, Array, Array]:
    """Of each block: the largest finite magnitude, whether it holds a NaN, an Inf."""
    amax, nan, inf = np.zeros(blocks), np.zeros(blocks, bool), np.zeros(blocks, bool)
    finite = np.isfinite(x)
    np.maximum.at(amax, block[finite], np.abs(x[finite].astype(np.float64)))
    nan[block[np.isnan(x)]] = True
    inf[block[np.isinf(x)]] = True
    return amax, nan, inf


def scale_exponent(amax: Array, spec: Spec, rule: str) -> Array:
    """The exponent of the E8M0 scale 2**e; of an all-zero block -127."""
    m, k = split(amax)
    largest = int(magnitudes(spec)[spec.largest_code] * 2.0 ** (52 - spec.emax))
    bump = {
        "floor": np.zeros(m.shape, bool),
        "rceil": m > largest,  # amax > largest * 2**(k - emax): it would saturate
        "ceil": m > WHOLE,
        "even": m + 2 ** (52 - spec.man_bits - 1) >= 2 * WHOLE,  # rounded half up, it carries
    }[rule]
    return np.asarray(np.clip(k - spec.emax + bump, -127, 127))


def shared_exponents(x: Array, config: Config) -> Array:
    """The exponent of each element's E8M0 scale, of an array without NaN and Inf."""
    block, counts = block_index(config)
    amax, _, _ = maxima(x, block, math.prod(counts))
    return np.asarray(scale_exponent(amax, SPECS[config.fmt], config.rule)[block])


def _judge_e8m0(x: Array, config: Config, random: Array) -> Judgement:
    spec = SPECS[config.fmt]
    block, counts = block_index(config)
    amax, nan, inf = maxima(x, block, math.prod(counts))
    e = scale_exponent(amax, spec, config.rule)
    if config.nonfinite == "saturate":
        e[inf] = 127
    else:
        nan |= inf
    negative, exponent = np.signbit(x), e[block]
    m, k = split(np.where(np.isfinite(x), x, 0.0))
    code = round_code(m, k - exponent, spec, config.rounding, random)
    code[np.isinf(x)] = spec.largest_code + 1
    code = saturate(code, negative, spec)
    values = signed(np.ldexp(magnitudes(spec)[code], exponent), negative, spec)
    codes, scales = store(code, negative, spec), (e + 127).astype(np.uint8)
    values[nan[block]], codes[nan[block]], scales[nan] = np.nan, 0, NAN_BYTE
    return Judgement(values, codes, scales.reshape(counts), block, amax)


def _judge_nvfp4(given: Array, config: Config, random: Array) -> Judgement:
    """s_t, s_b and elements by float32 operations, in the order of mxsim/nvfp4.py's recipe."""
    f32, e4m3, e2m1 = np.float32, SPECS["mxfp8_e4m3"], SPECS["nvfp4"]
    with np.errstate(over="ignore", under="ignore"):
        x = given.astype(f32)
        block, counts = block_index(config)
        amax, nan, inf = maxima(x, block, math.prod(counts))
        largest = f32(amax.max(initial=0.0))
        s_t = f32(1) if largest == 0 else max(largest / f32(6 * 448), f32(2.0**-149))
        wanted = amax.astype(f32) / (f32(6) * s_t)
        s_code = saturate(_nearest_code(wanted, e4m3), np.zeros(wanted.shape, bool), e4m3)
        if config.nonfinite == "saturate":
            s_code[inf] = e4m3.largest_code
        else:
            nan |= inf
        scale = (magnitudes(e4m3)[s_code].astype(f32) * s_t)[block]
        safe = np.where(scale > 0, scale, f32(1))
        quotient = np.where(scale > 0, np.abs(np.where(np.isfinite(x), x, f32(0))) / safe, f32(0))
        code = round_code(*split(quotient), e2m1, config.rounding, random)
        code[np.isinf(x)] = e2m1.largest_code
        code = saturate(code, np.signbit(x), e2m1)
        product = magnitudes(e2m1)[code].astype(f32) * scale
    values = signed(product, np.signbit(x), e2m1).astype(np.float64)
    codes, scales = store(code, np.signbit(x), e2m1), s_code.astype(np.uint8)
    values[nan[block]], codes[nan[block]], scales[nan] = np.nan, 0, E4M3_NAN
    return Judgement(values, codes, scales.reshape(counts), block, amax)


def _nearest_code(x: Array, spec: Spec) -> Array:
    return round_code(*split(x), spec, "even", np.zeros(x.shape, np.uint32))


def _judge_elementwise(x: Array, config: Config, random: Array) -> Judgement:
    """IEEE 754: overflow to Inf, but not toward zero; NaN and Inf stay."""
    spec, finite = SPECS[config.fmt], np.isfinite(x)
    code = round_code(*split(np.where(finite, x, 0.0)), spec, config.rounding, random)
    beyond = code > spec.largest_code
    magnitude = magnitudes(spec)[np.minimum(code, spec.largest_code)]
    if config.rounding != "zero":
        magnitude = np.where(beyond, np.inf, magnitude)
    values = np.where(finite, signed(magnitude, np.signbit(x), spec), x)
    nothing = np.zeros(x.shape, np.int64)
    return Judgement(values.astype(np.float64), None, None, nothing, np.zeros(1))
