"""Faults that other people's quantizers had, each with its input and the right answer.

One test a case; its id (A1, B3, ...) stands in the test's name, and the comment says which fault it
excludes. The values are worked out from OCP MX v1.0, none by the code under test. Faults of blocks,
axes and memory layout (D) are in test_quantize_cases_layout.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mxsim
from tests import inputs, oracle
from tests.comparing import SCHEMES, Scheme, assert_same_bits, scheme_id
from tests.inputs import Array

E4M3, E5M2, E3M2, E2M3, E2M1, INT8 = oracle.FORMATS
LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def quantize(
    x: Any, fmt: str, rule: str = "floor", rounding: str = "even", dtype: Any = np.float32
) -> tuple[int, list[float], list[float]]:
    """(byte, elements, dequantized values) of a single block."""
    block = np.asarray(x, dtype)
    q = mxsim.quantize(block, fmt, -1, block.size, rule, rounding)
    decoded = [oracle.decode(fmt, code) for code in q.codes.tolist()]
    elements = [float(-value if negative else value) for negative, value in decoded]
    fast = mxsim.fake_quantize(block, fmt, -1, block.size, rule, rounding)
    assert_same_bits(fast, q.dequantize(dtype))
    return int(q.scales[0]), elements, q.dequantize(dtype).tolist()


def at_scale_one(x: list[float], fmt: str, dtype: Any = np.float32) -> list[float]:
    """x rounded to the element grid, beside a 2^emax that pins the scale to 1 (floor)."""
    byte, elements, _ = quantize([*x, 2.0 ** oracle.emax(fmt)], fmt, dtype=dtype)
    assert byte == 127
    return elements[:-1]


def float32(x: Any) -> Array:
    return np.array(x, np.float32)


def next_above(x: float) -> float:
    return float(np.nextafter(np.float32(x), np.float32(np.inf)))


def next_below(x: float) -> float:
    return float(np.nextafter(np.float32(x), np.float32(0)))


# -------------------------------------------------------------------------------- F: number facts


@pytest.mark.parametrize("k", range(-125, 128))  # test_quantize_exact.py goes on below 2^-126
def test_F1_exponent_beside_every_power_of_two(k: int) -> None:
    # a float32 log2 is an integer already for the floats just below and above 2^k
    def clamped(exponent: int) -> int:
        return min(max(exponent + 127, 0), 254)

    for fmt in oracle.FORMATS:
        emax = oracle.emax(fmt)
        for steps in (1, 2, 22, 44):  # at 2^120 a float32 log2 takes 44 floats below it for 2^120
            below = [math.ldexp(1 - steps * 2.0**-24, k)]
            assert quantize(below, fmt, "floor")[0] == clamped(k - 1 - emax)
        assert quantize([2.0**k], fmt, "ceil")[0] == clamped(k - emax)
        assert quantize([next_above(2.0**k)], fmt, "ceil")[0] == clamped(k + 1 - emax)


def test_F2_values_past_the_largest_saturate_and_inf_is_not_a_number() -> None:
    # casts that turn 464.0001 into NaN, or infinity into the largest
    assert at_scale_one([464.0, 464.0001, 480.0, 511.0], E4M3) == [448.0] * 4
    byte, elements, values = quantize([1e4, 464.0001], E4M3)
    assert (byte, elements, values) == (132, [320.0, 15.0], [10240.0, 480.0])
    assert quantize([np.inf, 1.0], E4M3)[0] == 255


def test_F3_scale_bytes_are_computed_never_cast() -> None:
    # a cast to E8M0 rounds to nearest (1.5 -> 128), which no scale rule does; 0 casts to NaN
    for rule, expected in {
        "floor": [127, 127, 128, 128],
        "rceil": [127, 127, 128, 128],
        "ceil": [128, 128, 129, 129],
        "even": [127, 127, 128, 128],
    }.items():
        assert [quantize([x], INT8, rule)[0] for x in (1.5, 1.49, 2.9, 3.0)] == expected
        assert quantize([0.0], INT8, rule)[0] == 0
        assert quantize([3.4e38], INT8, rule)[0] == 254


def test_F4_float64_is_rounded_once() -> None:
    # double rounding through float32 moves a value onto a tie and then away from it
    byte, _, values = quantize([-431.99999999999994], E4M3, dtype=np.float64)
    assert (byte, values) == (127, [-416.0])
    assert mxsim.round_to(np.array([1 + 2**-8 + 2**-40]), "bf16").tolist() == [1.0078125]


@pytest.mark.parametrize(
    ("fmt", "elements", "blocks"), [(E2M1, 2.343, 29.60), (E4M3, 0.857, 16.90)]
)
def test_F5_share_of_gaussian_blocks_that_floor_saturates(
    fmt: str, elements: float, blocks: float
) -> None:
    # a `floor` that is really another rule; the shares are percentages of normal blocks of 32
    n = 20_000
    x = np.random.default_rng(7).normal(size=(n, 32)).astype(np.float32)
    q = mxsim.quantize(x, fmt)
    over = np.abs(x) > float(oracle.largest(fmt)) * np.ldexp(1.0, q.scales.astype(int) - 127)
    share = blocks / 100
    assert abs(over.any(axis=1).mean() - share) < 4 * math.sqrt(share * (1 - share) / n)
    # the elements of one block are dependent: the error of the mean is that of the block means
    spread = over.mean(axis=1).std() / math.sqrt(n)
    assert abs(over.mean() - elements / 100) < 4 * spread


def test_F6_byte_zero_scales_the_elements_too() -> None:
    # elements left undivided when the byte is 0, but multiplied by 2^-127 on decoding
    byte, elements, values = quantize([2.0**-127, 2.0**-120], E4M3, "rceil")
    assert (byte, elements, values) == (0, [1.0, 128.0], [2.0**-127, 2.0**-120])


# ------------------------------------------------------------------------------- A: shared scale


def test_A1_957_comes_out_as_896_under_floor() -> None:
    # a quantizer "mended" so that floor does not saturate
    x = [957, 902.4, 896, 895, 832, 57.79]
    assert quantize(x, E4M3, "floor")[::2] == (128, [896, 896, 896, 896, 832, 56])
    for rule in ("rceil", "ceil"):
        assert quantize(x, E4M3, rule)[::2] == (129, [960, 896, 896, 896, 832, 56])
    assert quantize(x, E4M3, "rceil")[1][0] == 240


def test_A3_a_cluster_just_below_a_power_of_two_collapses_under_floor() -> None:
    # saturation of a whole layer-norm gain block hidden by a scale that is not the rule's
    gains = [0.9990, 0.9375, 0.90625, 0.875, 0.85]
    assert quantize(gains, E4M3, "floor") == (118, [448] * 5, [0.875] * 5)
    assert quantize([1 - 2**-24, 0.84375, next_below(0.84375)], E4M3)[2] == [0.875, 0.875, 0.8125]
    for rule in ("rceil", "even"):
        byte, _, values = quantize(gains, E4M3, rule)
        assert (byte, values) == (119, [1.0, 0.9375, 0.875, 0.875, 0.875])


def test_A4_exponents_next_to_powers_come_from_bits() -> None:
    # log2 in float32, or exp2 of its ceiling, is off by one beside a power of two
    assert quantize([next_below(1024)], E4M3, "floor") == (128, [448], [896])
    assert quantize([next_above(448 * 1024)], E4M3, "rceil") == (138, [224], [458752])
    assert quantize([448 * 1024], E4M3, "rceil") == (137, [448], [448 * 1024])


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_A4_exponent_equals_frexp_for_every_power_and_its_neighbours(dtype: Any) -> None:
    powers = np.ldexp(dtype(1), np.arange(-126, 128))
    x = inputs.with_neighbours(powers)
    expected = [min(max(math.frexp(v)[1] - 1 + 127, 0), 254) for v in x.tolist()]
    assert mxsim.quantize(x, INT8, block_size=1).scales.tolist() == expected


def test_A5_four_rules_on_150() -> None:
    # ceil taken for rceil, or the other way round
    bytes_by_rule = {"floor": 126, "ceil": 127, "rceil": 126, "even": 126}
    for rule, byte in bytes_by_rule.items():
        assert quantize([150.0], E4M3, rule)[::2] == (byte, [144.0])


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_A6_a_maximum_that_is_exactly_the_largest_keeps_the_scale(fmt: str) -> None:
    # frexp's mantissa lies in [0.5, 1): taken for [1, 2) it doubles the scale
    largest = float(oracle.largest(fmt))
    for k in range(-127, 128 - oracle.emax(fmt)):
        x = [largest * 2.0**k, -largest * 2.0**k]
        assert quantize(x, fmt, "rceil") == (127 + k, [largest, -largest], x)


def test_A9_the_exponent_is_read_before_any_narrowing() -> None:
    # a maximum narrowed to bf16 first rounds up to 1.0 and doubles the scale
    x = float32([0.9985, 0.5])
    assert quantize(x, E4M3, "floor")[::2] == (118, [0.875, 0.5])
    assert quantize(mxsim.round_to(x, "bf16"), E4M3, "floor")[::2] == (119, [1.0, 0.5])


def test_A10_the_even_rule_rounds_to_the_width_of_the_element() -> None:
    # the threshold of another format: E2M1 has one mantissa bit, so it is 1.75
    assert quantize([6.9, 3, 0.25], E2M1, "even")[::2] == (127, [6, 3, 0])
    assert quantize([7.0, 3, 0.25], E2M1, "even")[::2] == (128, [8, 3, 0])
    assert [quantize([x, 3, 0.25], E2M1, "rceil")[0] for x in (6.9, 7.0)] == [128, 128]
    assert [quantize([x, 3, 0.25], E2M1, "rceil")[2][0] for x in (6.9, 7.0)] == [6, 8]


@pytest.mark.parametrize(
    ("fmt", "threshold"),
    [(E4M3, 1.9375), (E5M2, 1.875), (E3M2, 1.875), (E2M3, 1.9375), (E2M1, 1.75), (INT8, 1.9921875)],
)
def test_A10_the_even_threshold_of_each_format(fmt: str, threshold: float) -> None:
    byte = 127 - oracle.emax(fmt)
    assert quantize([next_below(threshold)], fmt, "even")[0] == byte
    assert quantize([threshold], fmt, "even")[0] == byte + 1


def test_A12_the_largest_float32() -> None:
    # a rounded exponent field of 255 read as NaN; a scale byte past 254
    x = [LARGEST_FLOAT32]
    assert quantize(x, E4M3, "floor") == (246, [448], [1.75 * 2.0**127])
    for rule in ("ceil", "even", "rceil"):
        assert quantize(x, E4M3, rule) == (247, [256], [math.inf])
        exact = mxsim.quantize(float32(x), E4M3, scale_rule=rule).dequantize(np.float64)
        assert exact.tolist() == [2.0**128]
    for rule in oracle.SCALE_RULES:
        assert quantize(x, INT8, rule) == (254, [127 / 64], [127 / 64 * 2.0**127])


# ------------------------------------------------------- B: bytes 0, 254, 255, zeros, NaN and Inf


def test_B1_byte_0_is_two_to_minus_127_and_255_is_nan() -> None:
    # a byte shifted into a float32's exponent field: 0 gives zero, 255 infinity
    byte, elements, values = quantize([2.0**-127], E4M3)
    assert (byte, elements, values) == (0, [1.0], [2.0**-127])
    q = mxsim.quantize(np.full(128, 2.0**-119, np.float32), E4M3)
    assert not q.scales.any()
    assert float(np.float32(2.0**112) * q.dequantize() @ np.ones(128, np.float32)) == 1.0
    assert np.isnan(mxsim.quantize(float32([np.nan, 1]), E4M3).dequantize()).all()


def test_B3_tiny_inputs_stay_finite() -> None:
    # the reciprocal of a tiny scale overflows or is flushed to zero
    x = float32([2.8094e-36, 9.18355e-40])
    byte, elements, values = quantize(x, E4M3, "floor")
    assert (byte, elements) == (0, [448, 0.15625])
    np.testing.assert_allclose(values, [2.6331e-36, 9.1835e-40], rtol=2e-5)
    byte, elements, values = quantize(x, E4M3, "rceil")
    assert (byte, elements) == (1, [240, 0.078125])
    np.testing.assert_allclose(values, [2.8212e-36, 9.1835e-40], rtol=2e-5)
    assert quantize([2.0**-130] * 31 + [2.0**-149], E4M3)[:2] == (0, [0.125] * 31 + [0])


@pytest.mark.parametrize("k", range(-149, -125))
def test_B3_every_subnormal_power_as_the_maximum(k: int) -> None:
    for fmt in oracle.FORMATS:
        for rule in oracle.SCALE_RULES:
            byte, _, values = quantize([2.0**k], fmt, rule)
            smallest = float(oracle.magnitudes(fmt)[1]) * 2.0**-127
            assert byte == max(k - oracle.emax(fmt) + 127, 0)
            assert values == [2.0**k if 2.0**k >= smallest else 0.0]


@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
@pytest.mark.parametrize("axis", [0, 1])
def test_B5_a_nan_spreads_over_its_block_and_no_further(scheme: Scheme, axis: int) -> None:
    # a maximum that ignores NaN, or a NaN that leaves its block
    for position in (0, 15, 31):
        x = np.ones((2, 64), np.float32)
        x[0, position] = np.nan
        x = x if axis == 1 else np.ascontiguousarray(x.T)
        fmt, rule, rounding = scheme
        q = mxsim.quantize(x, fmt, axis, 32, rule, rounding)
        scales, values = (a if axis == 1 else a.T for a in (q.scales, q.dequantize()))
        assert (scales == 255).tolist() == [[True, False], [False, False]]
        assert np.isnan(values[0, :32]).all()
        assert (values[0, 32:] == 1).all()
        assert (values[1] == 1).all()
        fast = mxsim.fake_quantize(x, fmt, axis, 32, rule, rounding)
        assert_same_bits(fast, q.dequantize())


@pytest.mark.parametrize("specials", [[np.inf], [-np.inf], [np.inf, np.nan], [np.inf, -np.inf]])
def test_B6_an_infinity_makes_its_block_nan(specials: list[float]) -> None:
    # Inf * 0 in some elements and a saturated scale in others: three policies in one block
    x = np.ones(64, np.float32)
    x[5 : 5 + len(specials)] = specials
    for fmt in oracle.FORMATS:
        q = mxsim.quantize(x, fmt)
        assert (q.scales == 255).tolist() == [True, False]
        assert not q.codes[:32].any()
        assert np.isnan(q.dequantize()).tolist() == [True] * 32 + [False] * 32


@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
def test_B7_an_all_zero_block(scheme: Scheme) -> None:
    # 0 / 0, a warning, or a lost sign (warnings are errors in this suite)
    byte, elements, values = quantize([0.0, -0.0, 0.0], *scheme)
    assert (byte, elements) == (0, [0, 0, 0])
    negative = [False, scheme.fmt != INT8, False]
    assert np.signbit(values).tolist() == negative


def test_B8_zero_has_a_finite_scale_and_minus_one_a_positive_one() -> None:
    # a scale had by casting the maximum: E8M0 has no zero and no sign
    for fmt in oracle.FORMATS:
        assert quantize([0.0], fmt)[::2] == (0, [0.0])
        assert quantize([-1.0], fmt)[::2] == (127 - oracle.emax(fmt), [-1.0])


# ------------------------------------------------------------------------------ C: element rounding


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_C1_encoding_a_decoded_code_gives_the_code(fmt: str) -> None:
    # subnormals a binade low, odd mantissas truncated, sticky bits dropped
    codes = oracle.finite_codes(fmt)
    decoded = [oracle.decode(fmt, code) for code in codes]
    x = np.array([math.copysign(float(value), -negative) for negative, value in decoded])
    q = mxsim.quantize(x.astype(np.float32), fmt, block_size=x.size)
    assert q.scales.tolist() == [127]
    assert q.codes.tolist() == codes


def test_C1_sticky_bits_decide() -> None:
    # 0.25 is a tie to zero in E2M1; one unit in the last place above it is not
    assert at_scale_one([0.25, 0.25000006], E2M1) == [0, 0.5]


def test_C2_subnormal_elements_have_the_step_of_the_lowest_binade() -> None:
    # subnormals rounded with half or twice their step
    step = 2.0**-9
    assert at_scale_one([2.0**-10, 2.0**-10 * 1.0001, 3 * 2.0**-10], E4M3) == [0, step, 2 * step]
    x = [2**-6, 2**-5, 2**-4, 2**-3, 0.25, 0.5, 1, 8]
    assert quantize(x, E2M3)[::2] == (128, [0, 0, 0, 0, 0.25, 0.5, 1, 8])


def test_C3_ties_go_to_even() -> None:
    # ">=" at every threshold is ties away; floor(x + 0.5) is ties up
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5]
    even = [0, 1, 1, 2, 2, 4, 4]
    assert at_scale_one(ties, E2M1) == even
    assert at_scale_one([-x for x in ties], E2M1) == [-x for x in even]
    assert at_scale_one([4.25], E4M3) == [4]


def test_C4_the_top_binade_is_finite() -> None:
    # exponent field 15 (E4M3) or 3 (E2M3) taken for infinity: the largest becomes 240 or 3.75
    top = [256.0 + 32 * i for i in range(7)]
    assert at_scale_one(top, E4M3) == top
    assert at_scale_one([432, 464], E4M3) == [448, 448]  # 432: tie of 416 and 448, to even
    assert at_scale_one([4.0, 4.5, 7.5], E2M3) == [4.0, 4.5, 7.5]
    assert at_scale_one([57344], E5M2) == [57344]


def test_C5_elements_saturate() -> None:
    # an IEEE cast: 61440 is the tie past E5M2's largest and would become infinity
    assert at_scale_one([57345, 61439, 61440, 65535], E5M2) == [57344] * 4
    assert at_scale_one([28.5, 31.9], E3M2) == [28, 28]
    assert at_scale_one([6.5, 7.9], E2M1) == [6, 6]
    assert at_scale_one([7.9], E2M3) == [7.5]


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_C6_float64_just_beside_every_tie_is_rounded_once(fmt: str) -> None:
    # float64 sent through float32 becomes the tie itself
    grid = oracle.grid_array(fmt)
    middles = (grid[1:] + grid[:-1]) / 2
    below, above = np.nextafter(middles, 0), np.nextafter(middles, np.inf)
    pin = [float(grid[-1])]
    assert quantize([*below, *pin], fmt, dtype=np.float64)[2] == [*grid[:-1], *pin]
    assert quantize([*above, *pin], fmt, dtype=np.float64)[2] == [*grid[1:], *pin]


def test_C7_a_rounded_mantissa_carries_into_the_exponent() -> None:
    # 1.11..1 rounded up within its own binade, or a subnormal that cannot become normal
    assert at_scale_one([15.9, 2.0**-6 * (1 - 2.0**-8)], E4M3) == [16, 2.0**-6]
    assert at_scale_one([0.75, 0.8, 0.99, 1.0, 3.9], E2M1) == [1, 1, 1, 1, 4]


def test_C9_bf16_rounds_to_nearest_even() -> None:
    # truncation: every error has the same sign, and no tolerance notices
    x = np.random.default_rng(8).normal(size=100_000).astype(np.float32)
    error = mxsim.round_to(x, "bf16").astype(np.float64) - x
    towards_zero = -error * np.sign(x)
    for signed in (error, towards_zero):
        assert abs(signed.mean()) < 4 * signed.std() / math.sqrt(x.size)
    exact = float32([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, -3.4e38])
    assert mxsim.round_to(exact, "bf16").tolist() == [1.0, 1.015625, math.inf, -math.inf]
    assert np.isnan(mxsim.round_to(float32([np.nan]), "bf16")).all()


def test_C10_int8_is_symmetric() -> None:
    # -128 / 64 stored for -1.999; a bit lost to ceil(log2)
    x = [1.999, -1.999, 1.984375, 1 / 128, 3 / 128]
    expected = [1.984375, -1.984375, 1.984375, 0, 0.03125]
    assert quantize(x, INT8) == (127, expected, expected)
    assert mxsim.quantize(float32(x), INT8).codes.tolist() == [127, 129, 127, 0, 2]
