"""What any MX quantizer must satisfy, on drawn blocks: no expected value is written down here.

Fixed points, idempotence, symmetry, order, error bounds, isolation of NaN, signed zeros.  Memory
layouts and the fast path are in test_quantize_same_bits.py.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import mxsim
from tests import inputs, oracle
from tests.comparing import SCHEMES, Scheme, assert_same_bits
from tests.comparing_blocks import block_format
from tests.drawn import lines, schemes
from tests.inputs import Array
from tests.oracle_elements import ELEMENTS, UNUSUAL, Element

# Idempotence, of every format but nvfp4 (its tensor scale moves: see below). What quantizing once
# and twice makes of a block where it is not; docs/formats.md gives the same.
# - Rounding toward zero undoes what the rule `even` counted on: 1.95 raises the scale, then
#   truncates to 1.875, which alone would not raise it, and which E4M3 saturates to 1.75 at the
#   lower scale: it lacks the code for 1.875 * 2^8. Others have their full top binade.
# - A negative maximum that rounds to the code of -2 has the next scale, with twice the step.
MX = [
    Scheme(*each)
    for each in itertools.product(
        [name for name in mxsim.FORMATS if name != "nvfp4"], oracle.SCALE_RULES, oracle.ROUNDINGS
    )
]
NOT_IDEMPOTENT: dict[Scheme, list[list[list[float]]]] = {
    Scheme("mxfp8_e4m3", "even", "zero"): [
        [[1.95, 1.875, 1.75], [1.875, 1.875, 1.75], [1.75, 1.75, 1.75]],
        [[1.9375], [1.875], [1.75]],
    ],
    Scheme("mxint8_asymmetric", "floor", "even"): [
        [[-1.9921875, 0.015625], [-2, 0.015625], [-2, 0]],
        [[-1.9974, 1.5176438], [-2, 1.515625], [-2, 1.5]],
    ],
    Scheme("mxint8_asymmetric", "floor", "away"): [
        [[-1.9921875, 0.015625], [-2, 0.015625], [-2, 0.03125]],
        [[-1.9974, 1.5176438], [-2, 1.515625], [-2, 1.53125]],
    ],
}


def is_idempotent(element: Element, rule: str, rounding: str) -> bool:
    """Whether it should be: the same two reasons, for elements of any width."""
    loses_a_code = element.specials == "nan" and element.exponent_bits > 1
    if loses_a_code and (rule, rounding) == ("even", "zero"):
        return False
    return not (element.specials == "asymmetric" and rule == "floor" and rounding != "zero")


@st.composite
def lines_with_high_maxima(draw: st.DrawFn) -> Array:
    """Lines whose first block has its maximum just below a power of two."""
    x = draw(lines())
    below = draw(st.integers(1, 12 if x.dtype == np.float32 else 40))
    exponent = int(np.frexp(np.abs(x[:32]).max())[1])
    x[draw(st.integers(0, min(x.size, 32) - 1))] = draw(st.sampled_from([-1, 1])) * np.ldexp(
        1 - 2.0**-below, exponent
    )
    return x


def dequantized(x: Array, scheme: Scheme, axis: int = -1, block_size: int = 32) -> Array:
    """Values in float64, where none overflows."""
    fmt, rule, rounding = scheme
    return mxsim.quantize(x, fmt, axis, block_size, rule, rounding).dequantize(np.float64)


def stored_scales(x: Array, scheme: Scheme, block_size: int = 32) -> Array:
    """The stored scale of each element of a line."""
    fmt, rule, rounding = scheme
    scales = mxsim.quantize(x, fmt, -1, block_size, rule, rounding).scales
    return np.ldexp(1.0, np.repeat(scales.astype(np.int64) - 127, block_size))[: x.size]


# ------------------------------------------------------------------------------ values and codes


@given(st.data(), schemes, st.integers(0, 254))
def test_a_block_on_the_grid_of_its_scale_is_a_fixed_point(
    data: st.DataObject, scheme: Scheme, byte: int
) -> None:
    fmt, rule, rounding = scheme
    values = oracle.magnitudes(fmt)
    top_binade = range(values.index(oracle.pow2(oracle.emax(fmt))), len(values))
    # a maximum in the top binade keeps its scale; under `ceil` only 2^emax does
    anchor = top_binade[0] if rule == "ceil" else data.draw(st.sampled_from(top_binade))
    others = data.draw(st.lists(st.tuples(st.booleans(), st.integers(0, anchor)), max_size=31))
    codes = [oracle.encode(fmt, *each) for each in [(False, anchor), *others]]
    signs = [-1.0 if negative else 1.0 for negative, _ in [(False, 0), *others]]
    indices = [anchor, *(index for _, index in others)]
    x = np.copysign(np.ldexp(oracle.grid_array(fmt)[indices], byte - 127), signs)
    q = mxsim.quantize(x, fmt, scale_rule=rule, rounding=rounding)
    assert q.scales.tolist() == [byte]
    assert q.codes.tolist() == codes
    np.testing.assert_array_equal(q.dequantize(np.float64), x)


@given(st.one_of(lines(), lines_with_high_maxima()))
@example(np.array([7.0, 3.0, 0.25], np.float32))
def test_idempotent_in_value(x: Array) -> None:
    # in value, not in code: under ceil and rceil a maximum that rounds down onto a power of two
    # lowers the byte, and the same values get other codes
    for scheme in MX:
        if scheme not in NOT_IDEMPOTENT:
            once = dequantized(x, scheme)
            assert_same_bits(dequantized(once, scheme), once, str(scheme))


@pytest.mark.parametrize("element", [*ELEMENTS.values(), *UNUSUAL], ids=str)
def test_idempotent_in_value_at_every_threshold(element: Element) -> None:
    # every maximum with eight mantissa bits in three binades, and every grid value below it
    mantissas = 1 + np.arange(256) / 256
    maxima = np.ldexp(mantissas, np.array([[-126], [0], [126]])).reshape(-1, 1)
    grid = element.grids[0]
    positive = [maxima, maxima * grid / grid[-1], maxima * np.exp2(-grid)]
    x = np.concatenate([positive[0], *positive[1:], -positive[1], -positive[2]], axis=1)
    x[::2, 0] *= -1  # only a maximum of either sign is special
    x[:, 1:] *= np.where(np.abs(x[:, 1:]) == maxima, 0.5, 1)
    fmt = block_format(element, x.shape[1])
    for rule, rounding in itertools.product(oracle.SCALE_RULES, oracle.ROUNDINGS):
        once = mxsim.quantize(x, fmt, scale_rule=rule, rounding=rounding).dequantize(np.float64)
        twice = mxsim.quantize(once, fmt, scale_rule=rule, rounding=rounding).dequantize(np.float64)
        changed = ~(once == twice).all(axis=1)
        if is_idempotent(element, rule, rounding):
            assert not changed.any(), (rule, rounding, float(maxima[np.argmax(changed), 0]).hex())
            continue
        # the maxima that crossed to another binade, from half a step below it on
        high = np.tile(mantissas >= 2 - 2.0 ** -(element.mantissa_bits + 1), 3)
        if element.is_integer:
            high[1::2] = False  # -2 is negative
        elif element == ELEMENTS["mxfp8_e4m3"]:
            high[:256] = False  # in the lowest binade byte 0 is the least there is
        else:
            continue  # which of them depends on where the lowest byte lies
        assert (changed == high).all(), (rule, rounding)


def test_what_is_idempotent_and_what_is_not() -> None:
    # the list of counterexamples and the two reasons for them agree
    for scheme in MX:
        expected = is_idempotent(ELEMENTS[scheme.fmt], scheme.scale_rule, scheme.rounding)
        assert expected == (scheme not in NOT_IDEMPOTENT), scheme


@pytest.mark.parametrize(
    ("scheme", "values"),
    [(scheme, values) for scheme, examples in NOT_IDEMPOTENT.items() for values in examples],
)
def test_the_schemes_that_are_not_idempotent(scheme: Scheme, values: list[list[float]]) -> None:
    x, once, twice = (np.array(each) for each in values)
    np.testing.assert_array_equal(dequantized(x, scheme), once)
    np.testing.assert_array_equal(dequantized(once, scheme), twice)


@pytest.mark.parametrize("man_bits", range(1, 6))
@pytest.mark.parametrize("exp_bits", range(1, 7))
def test_elements_that_lack_their_last_code(exp_bits: int, man_bits: int) -> None:
    if 1 + exp_bits + man_bits > 8:
        return
    fmt = mxsim.BlockFormat("mine", mxsim.FloatFormat(exp_bits, man_bits, "nan"))
    x = np.array([2 - 2.0 ** -(man_bits + 1)])
    once = mxsim.fake_quantize(x, fmt, scale_rule="even", rounding="zero")
    twice = mxsim.fake_quantize(once, fmt, scale_rule="even", rounding="zero")
    if exp_bits == 1:  # one step for all values: at the higher scale it is too long to matter
        assert once == twice == 2 - 2.0 ** (1 - man_bits)
    else:
        assert (once[0], twice[0]) == (2 - 2.0**-man_bits, 2 - 2.0 ** (1 - man_bits))


@pytest.mark.parametrize("man_bits", range(7))
def test_asymmetric_integers_of_any_width(man_bits: int) -> None:
    fmt = mxsim.BlockFormat("mine", mxsim.IntFormat(man_bits, symmetric=False))
    x = np.array([-2 + 2.0 ** -(man_bits + 1), 2.0**-man_bits])
    for rounding, last in (("even", 0), ("away", 2 * x[1])):
        once = mxsim.fake_quantize(x, fmt, rounding=rounding)
        assert once.tolist() == [-2, x[1]]
        assert mxsim.fake_quantize(once, fmt, rounding=rounding).tolist() == [-2, last]


@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
def test_nvfp4_is_not_idempotent(rounding: str) -> None:
    def twice(x: list[float], block_size: int) -> list[list[float]]:
        given = np.array(x, np.float32)
        once = mxsim.fake_quantize(given, "nvfp4", -1, block_size, None, rounding)
        again = mxsim.fake_quantize(once, "nvfp4", -1, block_size, None, rounding)
        return [once.tolist(), again.tolist()]

    # amax / 2688 is not exact, so the tensor scale moves
    if rounding == "zero":
        [[once], [again]] = twice([0.1], 16)
        assert once == float(np.float32(0.1)) + 2.0**-27
        assert again == pytest.approx(0.1 * 4 / 6, rel=1e-6)  # just below 6 units is 4
    else:
        [[once], [again]] = twice([0.4], 16)
        one = float(np.spacing(np.float32(0.4)))
        assert (once, again) == (float(np.float32(0.4)) + one, float(np.float32(0.4)) + 2 * one)
    # s_t = 1: the second block's scale, 1.11 of E4M3's least, is that; 3.3 units become 3; half of
    # the least scale then ties to zero
    once_and_again = twice([2688, 0.0065], 1)
    assert once_and_again == [[2688, 3 * 2.0**-9], [2688, 0]]


@pytest.mark.parametrize("fmt", [name for name in mxsim.FORMATS if name != "nvfp4"])
@pytest.mark.parametrize("sign", [-1, 1])
def test_a_maximum_that_float32_cannot_hold_once_quantized(fmt: str, sign: int) -> None:
    # a maximum that rounds to 2^128 is an infinity in float32, and the next time a NaN
    half_step = 2 - 2.0 ** -(ELEMENTS[fmt].mantissa_bits + 1)
    high = np.array([sign * half_step * 2.0**127], np.float32)
    below = np.nextafter(high, np.float32(0))
    top = np.array([sign * np.finfo(np.float32).max])
    for rule, rounding in itertools.product(oracle.SCALE_RULES, oracle.ROUNDINGS):
        beyond = rounding != "zero" and rule != "floor" and fmt != "mxint8"
        if fmt == "mxint8_asymmetric":
            beyond = rounding != "zero" and sign < 0
        for x in (high, top):
            once = mxsim.fake_quantize(x, fmt, scale_rule=rule, rounding=rounding)
            twice = mxsim.fake_quantize(once, fmt, scale_rule=rule, rounding=rounding)
            assert np.isinf(once[0]) == beyond, (rule, rounding)
            assert np.isnan(twice[0]) == beyond, (rule, rounding)
        once = mxsim.fake_quantize(below, fmt, scale_rule=rule, rounding=rounding)
        assert np.isfinite(once).all(), (rule, rounding)


@given(lines(), schemes)
def test_odd_symmetry(x: Array, scheme: Scheme) -> None:
    fmt, rule, rounding = scheme
    q, negated = (mxsim.quantize(each, fmt, -1, 32, rule, rounding) for each in (x, -x))
    assert_same_bits(negated.scales, q.scales)
    flipped = -q.codes if fmt == "mxint8" else q.codes ^ oracle.ELEMENTS[fmt].sign_bit
    assert_same_bits(negated.codes, flipped.astype(np.uint8))
    np.testing.assert_array_equal(negated.dequantize(np.float64), -q.dequantize(np.float64))


@given(lines(), schemes)
def test_monotone_within_a_block(x: Array, scheme: Scheme) -> None:
    ascending = np.sort(x)
    assert (np.diff(dequantized(ascending, scheme, block_size=x.size)) >= 0).all()


@given(lines(max_size=32), schemes, st.integers(-60, 60))
def test_a_power_of_two_passes_through(x: Array, scheme: Scheme, shift: int) -> None:
    wide = x.astype(np.float64)
    moved = np.ldexp(wide, shift)
    maxima = np.array([np.abs(wide).max(), np.abs(moved).max()])
    assume(((maxima > 2.0**-100) & (maxima < 2.0**120)).all())  # no byte is clamped
    expected = np.ldexp(dequantized(wide, scheme), shift)
    assert_same_bits(dequantized(moved, scheme), expected, str(scheme))


@given(lines(), schemes)
def test_error_is_within_half_a_step_unless_saturated(x: Array, scheme: Scheme) -> None:
    fmt, _, rounding = scheme
    element = oracle.ELEMENTS[fmt]
    smallest_exponent = 0 if fmt == "mxint8" else 1 - element.bias
    scale = stored_scales(x, scheme)
    magnitude = np.abs(x.astype(np.float64)) / scale
    value = np.abs(dequantized(x, scheme)) / scale
    exponent = np.maximum(np.frexp(magnitude)[1] - 1, smallest_exponent)
    step = np.ldexp(1.0, exponent - element.mantissa_bits)
    saturated = magnitude > float(oracle.largest(fmt))
    assert (value[saturated] == float(oracle.largest(fmt))).all()
    error, step = (magnitude - value)[~saturated], step[~saturated]
    if rounding == "zero":
        assert ((error >= 0) & (error < step)).all()
    else:
        assert (np.abs(error) <= step / 2).all()


@given(lines(), st.sampled_from([s for s in SCHEMES if s.scale_rule in ("ceil", "rceil")]))
def test_ceil_and_rceil_never_saturate_below_the_clamp(x: Array, scheme: Scheme) -> None:
    scale = stored_scales(x, scheme)
    magnitude = np.abs(x.astype(np.float64))
    unclamped = scale < 2.0**127
    assert (magnitude <= float(oracle.largest(scheme.fmt)) * scale)[unclamped].all()


@given(lines(), st.sampled_from(oracle.FORMATS), st.sampled_from(oracle.ROUNDINGS))
def test_rceil_is_floor_with_the_exponent_bumped_where_the_block_overflows(
    x: Array, fmt: str, rounding: str
) -> None:
    floor = mxsim.quantize(x, fmt, scale_rule="floor", rounding=rounding)
    rceil = mxsim.quantize(x, fmt, scale_rule="rceil", rounding=rounding)
    largest, grid = float(oracle.largest(fmt)), oracle.grid_array(fmt)
    for block in range(floor.scales.size):
        part = slice(32 * block, 32 * block + 32)
        magnitude = np.abs(x[part].astype(np.float64))
        byte = int(floor.scales[block])
        overflows = bool((magnitude > largest * 2.0 ** (byte - 127)).any())
        bumped = min(byte + overflows, 254)
        assert rceil.scales[block] == bumped
        index = oracle.round_bulk(np.ldexp(magnitude, 127 - bumped), grid, rounding)
        negative = np.signbit(x[part]).tolist()
        codes = [oracle.encode(fmt, *each) for each in zip(negative, index.tolist(), strict=True)]
        assert rceil.codes[part].tolist() == codes
        if not overflows:
            assert floor.codes[part].tolist() == codes


# ---------------------------------------------------------------------- NaN, infinities and zeros


@pytest.mark.parametrize("special", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 15, 31, 32, 63, 64, 69])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_a_nan_or_inf_makes_its_own_block_nan_and_no_other(
    special: float, position: int, axis: int, dtype: Any
) -> None:
    clean = np.random.default_rng(5).normal(size=(70, 5)).astype(dtype)
    block = slice(position // 32 * 32, position // 32 * 32 + 32)
    spoiled = clean.copy()
    spoiled[position, 2] = special
    if axis == 1:
        clean, spoiled = (np.ascontiguousarray(each.T) for each in (clean, spoiled))
    for fmt, rule, rounding in SCHEMES:
        q = mxsim.quantize(spoiled, fmt, axis, 32, rule, rounding)
        expected = mxsim.quantize(clean, fmt, axis, 32, rule, rounding)
        codes, scales = expected.codes.copy(), expected.scales.copy()
        values = expected.dequantize(dtype)
        for array in (codes, values):
            (array if axis == 0 else array.T)[block, 2] = 0 if array is codes else np.nan
        (scales if axis == 0 else scales.T)[position // 32, 2] = oracle.NAN_BYTE
        assert_same_bits(q.scales, scales)
        assert_same_bits(q.codes, codes)
        assert_same_bits(q.dequantize(dtype), values)
        fast = mxsim.fake_quantize(spoiled, fmt, axis, 32, rule, rounding)
        assert_same_bits(fast, values)


@pytest.mark.parametrize("fmt", oracle.FORMATS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("loud", [0.0, 1e-30, 1.0])
def test_zeros_and_what_rounds_to_zero_keep_their_sign(
    fmt: str, axis: int, dtype: Any, loud: float
) -> None:
    x = np.zeros((40, 3), dtype)
    x[::2] = -0.0
    x[1::4], x[2::4] = 1e-44 * (loud > 0), -1e-44 * (loud > 0)  # too little even for byte 0
    x[5] = loud
    if axis == 1:
        x = np.ascontiguousarray(x.T)
    for rule in oracle.SCALE_RULES:
        for rounding in oracle.ROUNDINGS:
            got = mxsim.fake_quantize(x, fmt, axis, 32, rule, rounding)
            zeros = got == 0
            assert (zeros == (x != dtype(loud) if loud else True)).all()
            negative = np.signbit(got)[zeros]
            expected = np.zeros(negative.shape, bool) if fmt == "mxint8" else np.signbit(x)[zeros]
            assert (negative == expected).all()
            if loud == 0:
                q = mxsim.quantize(x, fmt, axis, 32, rule, rounding)
                assert not q.scales.any()
