"""Any element in a block, bit for bit: INT8 with -2.0, and floats and integers no standard has."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import mxsim
from tests import inputs, inputs_blocks, oracle
from tests.comparing import assert_same_bits
from tests.comparing_blocks import NAMES, How, assert_agrees, block_format
from tests.oracle_elements import ELEMENTS, UNUSUAL, Element

each_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)
each_rule = pytest.mark.parametrize("rule", oracle.SCALE_RULES)
each_rounding = pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
NEW = {**{str(each): each for each in UNUSUAL}, "mxint8_asymmetric": "mxint8_asymmetric"}
each_format = pytest.mark.parametrize("fmt", NEW.values(), ids=NEW)
ASYMMETRIC = "mxint8_asymmetric"


def oracle_element(fmt: str | Element) -> Element:
    return ELEMENTS[fmt] if isinstance(fmt, str) else fmt


def exponents(element: Element, dtype: Any) -> list[int]:
    """The lowest byte, the middle, and the highest scale whose pins the type can hold."""
    top = 127 - (max(element.emax, 0) if dtype is np.float32 else 0)
    return [-127, 0, top]


@each_dtype
@each_rule
@each_format
def test_ties_and_their_neighbours(fmt: str | Element, rule: str, dtype: Any) -> None:
    element = oracle_element(fmt)
    for exponent in exponents(element, dtype):
        x = inputs_blocks.tie_blocks(element, dtype, exponent)
        for rounding in oracle.ROUNDINGS:
            assert_agrees(x, How(fmt, scale_rule=rule, rounding=rounding))


@each_dtype
@each_format
def test_block_maxima_at_every_power_of_two_and_threshold(fmt: str | Element, dtype: Any) -> None:
    x = inputs.maxima_blocks(dtype)[::7]
    for rule in oracle.SCALE_RULES:
        assert_agrees(x, How(fmt, -1, 3, rule))


@each_dtype
@each_format
def test_random_patterns(fmt: str | Element, dtype: Any) -> None:
    x = np.concatenate([inputs.random_bits(dtype)[::6], inputs.random_near(dtype)[::6]])
    for rule in oracle.SCALE_RULES:
        for rounding in oracle.ROUNDINGS:
            assert_agrees(x, How(fmt, scale_rule=rule, rounding=rounding))


@each_format
def test_ties_against_the_scalar_oracle(fmt: str | Element) -> None:
    x = inputs_blocks.tie_blocks(oracle_element(fmt), np.float32)[::5]
    for rounding in oracle.ROUNDINGS:
        assert_agrees(x, How(fmt, rounding=rounding), scalar=True)


def test_ties_without_a_mantissa_go_up() -> None:
    # 0, 0.25, 0.5, 1, ... 16: of two neighbours above zero neither is even
    fmt = mxsim.BlockFormat("e3m0", mxsim.FloatFormat(3, 0, "none"))
    x = [16, 12, 6, 3, 1.5, 0.75, 0.375, 0.125, np.nextafter(1.5, 0)]
    want = [16, 16, 8, 4, 2, 1, 0.5, 0, 1]
    for rounding in ("even", "away"):
        got = mxsim.quantize([x, [-v for v in x]], fmt, rounding=rounding).dequantize()
        want[7] = 0 if rounding == "even" else 0.25  # zero is even
        assert got.tolist() == [want, [-v for v in want]]


@pytest.mark.parametrize("element", UNUSUAL, ids=str)
def test_codes_of_an_element_decode_to_the_oracles_values(element: Element) -> None:
    values = block_format(element).element.values
    assert values.shape == (2**element.bits,)
    for negative in (False, True):
        for index, magnitude in enumerate(element.magnitudes(negative)):
            got = values[element.encode(negative, index)]
            assert abs(got) == magnitude
            assert np.signbit(got) == (negative and (index > 0 or not element.is_integer))
    finite = {element.encode(s, i) for s in (False, True) for i in range(len(element.positive))}
    for code in set(range(2**element.bits)) - finite:
        if not element.is_integer:
            assert not math.isfinite(values[code])


@pytest.mark.parametrize("element", [*ELEMENTS.values(), *UNUSUAL], ids=str)
def test_derived_facts_of_a_format(element: Element) -> None:
    part = block_format(element).element
    assert part.bits == element.bits
    assert part.largest == element.largest
    assert part.emax == element.emax
    assert part.smallest_subnormal == element.positive[1]
    assert part.top == element.largest / oracle.pow2(element.emax)


@pytest.mark.parametrize("name", [name for name in NAMES if name != "nvfp4"])
def test_a_named_format_is_its_element(name: str) -> None:
    x = inputs.random_near(np.float32)[::8]
    own = block_format(ELEMENTS[name])
    assert mxsim.FORMATS[name].element == own.element
    assert_same_bits(mxsim.quantize(x, own).codes, mxsim.quantize(x, name).codes)


def test_a_formats_own_block_size_is_the_default() -> None:
    x = inputs.random_near(np.float32)[:4]
    for size in (1, 5, 16, 100):
        q = mxsim.quantize(x, block_format(ELEMENTS["mxfp8_e4m3"], size))
        assert q.scales.shape == (4, -(-32 // size))
    assert mxsim.quantize(x, "nvfp4").scales.shape == (4, 2)
    assert [mxsim.FORMATS[name].block_size for name in NAMES] == [32] * 7 + [16]
    assert list(mxsim.FORMATS) == list(NAMES)


def test_ties_of_a_format_without_mantissa() -> None:
    # IEEE 754-2019, 4.3.1: if neither neighbour is even, the larger; 0 is even
    fmt = block_format(Element(3, 0, "none"))
    x = np.array([0.125, 0.375, 0.75, 3, -12, 16], np.float32)
    assert mxsim.quantize(x, fmt).dequantize().tolist() == [0, 0.5, 1, 4, -16, 16]


# ------------------------------------------------------------------------ INT8 with the code of -2


def test_C10_the_most_negative_code_is_an_option() -> None:
    # -2.0 stored by the symmetric format, or refused by the one that allows it
    x = np.array([1.999, -1.999, 1.984375, 1 / 128, 3 / 128], np.float32)
    q = mxsim.quantize(x, ASYMMETRIC)
    assert q.scales.tolist() == [127]
    assert q.dequantize().tolist() == [1.984375, -2.0, 1.984375, 0, 0.03125]
    assert q.codes.tolist() == [127, 128, 127, 0, 2]
    symmetric = mxsim.quantize(x, "mxint8")
    assert symmetric.dequantize().tolist() == [1.984375, -1.984375, 1.984375, 0, 0.03125]


def test_C10_saturation_on_either_side() -> None:
    # the byte is clamped at 254, and everything is past the largest
    x = np.array([1e300, -1e300, 1.984375 * 2.0**127, -(2.0**128), -1.9921875 * 2.0**127])
    q = mxsim.quantize(x, ASYMMETRIC)
    assert q.scales.tolist() == [254]
    assert q.codes.tolist() == [127, 128, 127, 128, 128]
    assert mxsim.fake_quantize(x, ASYMMETRIC).tolist() == [
        1.984375 * 2.0**127,
        -(2.0**128),
        1.984375 * 2.0**127,
        -(2.0**128),
        -(2.0**128),
    ]


@each_rounding
def test_C10_minus_two_is_reached_by_rounding_alone_where_it_should_be(rounding: str) -> None:
    x = np.array([-1.9921874, -1.9921875, -1.9921876, -1.9999, 1.9999, 1])
    codes = mxsim.quantize(x, ASYMMETRIC, rounding=rounding).codes.tolist()
    assert (
        codes
        == {
            "even": [129, 128, 128, 128, 127, 64],
            "away": [129, 128, 128, 128, 127, 64],
            "zero": [129, 129, 129, 129, 127, 64],
        }[rounding]
    )
