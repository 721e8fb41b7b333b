"""The further oracles: published values, ml_dtypes, the first oracle, and their bulk twins."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from tests import inputs, oracle, oracle_blocks, oracle_elements, oracle_noise, oracle_nvfp4
from tests.comparing import SCHEMES, assert_same_bits
from tests.oracle_elements import ELEMENTS, UNUSUAL, Element
from tests.test_oracle import ML_DTYPES

ALL = (*ELEMENTS.values(), *UNUSUAL)
each_element = pytest.mark.parametrize("element", ALL, ids=str)


def random_words(shape: tuple[int, ...], seed: int = 0) -> inputs.Array:
    return np.random.default_rng(seed).integers(0, 2**32, shape, np.uint32)


# ----------------------------------------------------------------------------------------- noise


@pytest.mark.parametrize(("counter", "key", "output"), oracle_noise.KNOWN_ANSWERS)
def test_philox_known_answers(counter: Any, key: Any, output: Any) -> None:
    assert oracle_noise.philox4x32(counter, key) == output


def test_elements_of_a_window_take_word_after_word() -> None:
    key = oracle_noise.key_of(3)
    words = [oracle_noise.philox4x32((c, 0, 4, 5), key) for c in range(512)]
    bits = oracle_noise.noise_bits(2048, 3, 4, 5).tolist()
    assert bits[:1024] == [words[c][word] for word in range(4) for c in range(256)]
    assert bits[1024:] == [words[c][word] for word in range(4) for c in range(256, 512)]


# ---------------------------------------------------------------------------------------- elements


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_elements_are_those_of_the_first_oracle(fmt: str) -> None:
    element = ELEMENTS[fmt]
    assert element.positive == element.negative == oracle.magnitudes(fmt)
    assert (element.largest, element.emax) == (oracle.largest(fmt), oracle.emax(fmt))
    for negative in (False, True):
        for index in range(len(element.positive)):
            assert element.encode(negative, index) == oracle.encode(fmt, negative, index)


@pytest.mark.parametrize("fmt", ML_DTYPES)
def test_every_finite_code_is_ml_dtypes(fmt: str) -> None:
    element = ELEMENTS[fmt]
    for negative in (False, True):
        values = element.magnitudes(negative)
        codes = [element.encode(negative, index) for index in range(len(values))]
        witness = np.array(codes, np.uint8).view(ML_DTYPES[fmt]).astype(np.float64)
        assert np.abs(witness).tolist() == [float(value) for value in values]
        assert (np.signbit(witness) == negative).all()


def test_unusual_elements_by_eye() -> None:
    listed: dict[Element, list[float]] = {
        Element(1, 0, "none"): [0, 2],
        Element(3, 0, "none"): [0, 0.25, 0.5, 1, 2, 4, 8, 16],
        Element(1, 1, "none"): [0, 1, 2, 3],
        Element(1, 1, "nan"): [0, 1, 2],
        Element(2, 1, "ieee"): [0, 0.5, 1, 1.5, 2, 3],
        Element(0, 0, "symmetric"): [0, 1],
    }
    for element, values in listed.items():
        assert element.positive == tuple(map(Fraction, values)), element
    signed = Element(0, 0, "asymmetric")
    assert [float(v) for v in signed.positive] == [0, 1]
    assert [float(v) for v in signed.negative] == [0, 1, 2]
    assert [signed.encode(True, k) for k in (1, 2)] == [0b11, 0b10]
    assert ELEMENTS["mxint8_asymmetric"].negative[-1] == 2
    assert ELEMENTS["mxint8_asymmetric"].encode(True, 128) == 0x80
    assert [element.bits for element in ELEMENTS.values()] == [8, 8, 6, 6, 4, 8, 8]


def test_ties_without_a_mantissa_go_to_zero_or_to_the_larger() -> None:
    # significands: zero has 0, every other value 1, so above zero no neighbour is even
    values = Element(3, 0, "none").positive
    halves = [Fraction(1, 8), Fraction(3, 8), Fraction(3, 4), Fraction(3), Fraction(12)]
    found = [oracle_elements.round_index(x, values, "even", one_digit=True) for x in halves]
    assert [float(values[index]) for index in found] == [0, 0.5, 1, 4, 16]


def test_stochastic_rounding_by_eye() -> None:
    grid = tuple(map(Fraction, (0, 1, 2, 4)))
    quarter = 1 << 30
    for x, bits, index in [
        (Fraction(5, 4), 0, 2),
        (Fraction(5, 4), quarter - 1, 2),  # u = 2^-2 - 2^-24
        (Fraction(5, 4), quarter, 1),  # equal is not above
        (Fraction(5, 4), quarter + 255, 1),  # the low eight bits are not used
        (Fraction(5, 2), quarter - 1, 3),  # a step of 2
        (Fraction(5, 2), quarter, 2),
        (Fraction(1), 0, 1),
        (Fraction(9), 0, 3),
        (Fraction(1, 10**9), 0, 1),
        (Fraction(1, 10**9), 256, 0),
    ]:
        assert oracle_elements.round_index(x, grid, "stochastic", bits) == index


@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_blocks_are_those_of_the_first_oracle(dtype: Any) -> None:
    x = np.concatenate([inputs.random_near(dtype)[::99], inputs.random_bits(dtype)[::99]])
    for fmt, rule, rounding in SCHEMES[::5]:  # every name occurs
        want = oracle.quantize_rows(x, fmt, rule, rounding)
        got = oracle_elements.quantize_rows(x, ELEMENTS[fmt], rule, rounding)
        assert_same_bits(got.scales, want.scales, fmt)
        assert_same_bits(got.codes, want.codes, fmt, x)
        assert_same_bits(got.values, want.values, fmt, x)


@each_element
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_bulk_quantization_equals_the_scalar_one(element: Element, dtype: Any) -> None:
    x = np.concatenate([inputs.random_near(dtype)[::200], inputs.random_bits(dtype)[::200]])
    x = np.concatenate([x, hard_blocks(element, dtype)])
    bits = random_words(x.shape)
    bits[::3] &= 0xFF  # u = 0
    for rule in oracle.SCALE_RULES:
        for rounding in oracle_elements.ROUNDINGS:
            nonfinite = "saturate" if rounding in ("even", "stochastic") else "propagate"
            arguments = (x, element, rule, rounding, bits, nonfinite)
            bulk = oracle_elements.quantize_rows_bulk(*arguments)
            scalar = oracle_elements.quantize_rows(*arguments)
            assert_same_bits(bulk.scales, scalar.scales, "scales")
            assert_same_bits(bulk.codes, scalar.codes, f"{rule} {rounding} codes", x)
            assert_same_bits(bulk.values, scalar.values, f"{rule} {rounding} values", x)


def hard_blocks(element: Element, dtype: Any) -> inputs.Array:
    """A few ties, both signs, with maxima at the largest, and with infinities and NaN."""
    grid = element.grids[1]
    middles = (grid[1:] + grid[:-1]) / 2
    chosen = np.concatenate([grid[-3:], middles[-6:], middles[:6]])
    line = np.resize(np.concatenate([chosen, -chosen]), 31)
    rows = [np.append(pin, line) for pin in (grid[-1], 2.0**element.emax, -np.inf, np.nan)]
    return np.array(rows).astype(dtype)


def test_elementwise_rounding_is_that_of_the_first_oracle() -> None:
    for name, (exponent_bits, mantissa_bits) in oracle.IEEE.items():
        element = Element(exponent_bits, mantissa_bits, "ieee")
        x = np.concatenate([inputs.random_bits(np.float64)[0], inputs.random_near(np.float64)[1]])
        edge = float(oracle.ieee_magnitudes(name)[-1])
        x = np.concatenate([x, [edge, np.nextafter(edge, 0), -edge * 0.999, np.inf, 0.0, -0.0]])
        for rounding in oracle.ROUNDINGS:
            want = oracle.round_ieee_bulk(name, x, rounding)
            assert_same_bits(oracle_elements.round_to_all(element, x, rounding), want, name, x)


@pytest.mark.parametrize("element", [e for e in ALL if not e.is_integer], ids=str)
def test_elementwise_rounding_by_step_is_rounding_in_the_list(element: Element) -> None:
    grid = element.grids[0]
    x = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid * 1.01])
    bits = random_words(x.shape)
    for rounding in oracle_elements.ROUNDINGS:
        inside = x[x <= grid[-1]]
        got = oracle_elements.round_to_all(element, inside, rounding, bits[x <= grid[-1]])
        for value, random, rounded in zip(inside, bits[x <= grid[-1]], got, strict=True):
            index = oracle_elements.round_index(
                Fraction(value), element.positive, rounding, int(random), element.one_digit
            )
            assert rounded == grid[index]


# ------------------------------------------------------------------------------ blocks and NVFP4


def test_slices_by_eye() -> None:
    assert oracle_blocks.block_lengths((5, 6, 7), (0, 2), (2, 3)) == (2, 1, 3)
    assert oracle_blocks.block_lengths((5, 6, 7), -1, (2, 3)) == (1, 2, 3)
    assert oracle_blocks.block_lengths((5, 6, 7), 1, 4) == (1, 4, 1)
    assert oracle_blocks.block_counts((5, 6), (2, 4)) == (3, 2)
    assert [x.stop for x, _ in oracle_blocks.block_slices((5, 6), (2, 4))] == [2, 2, 4, 4, 6, 6]
    x = np.arange(1, 7, dtype=np.float32).reshape(2, 3)
    q = oracle_blocks.quantize(x, ELEMENTS["mxint8"], -1, (2, 2))
    assert q.scales.tolist() == [[129, 129]]  # 1 2 4 5 and 3 6
    assert oracle_blocks.quantize(x, ELEMENTS["mxint8"], 0, 1).scales.tolist() == [
        [127, 128, 128],
        [129, 129, 129],
    ]


def test_blocks_along_one_axis_are_those_of_the_first_oracle() -> None:
    x = inputs.random_near(np.float32).ravel()[: 3 * 70 * 4].reshape(3, 70, 4)
    for fmt, rule, rounding in SCHEMES[::5]:
        want = oracle.quantize(x, fmt, 1, 32, rule, rounding)
        got = oracle_blocks.quantize(x, ELEMENTS[fmt], 1, 32, rule, rounding)
        for each in ("scales", "codes", "values"):
            assert_same_bits(getattr(got, each), getattr(want, each), each)


def test_nvfp4_by_hand() -> None:
    # s_t = 6 * 448 / (6 * 448) = 1; the first block: s_b = 448; the second: s_b = 1
    x = np.array([[6 * 448, 448, -1000, 0], [6, -3, 0.24, -0.0]], np.float32)
    s_t = oracle_nvfp4.tensor_scale(x)
    assert (s_t, s_t.dtype) == (1, np.float32)
    q = oracle_nvfp4.quantize_rows(x, s_t, "even")
    assert q.scales.tolist() == [0b1111_110, 0b0111_000]
    assert q.codes.tolist() == [[0b0111, 0b0010, 0b1100, 0], [0b0111, 0b1101, 0, 0b1000]]
    assert q.values.tolist() == [[2688, 448, -896, 0], [6, -3, 0, 0]]
    assert np.signbit(q.values).tolist() == [
        [False, False, True, False],
        [False, True, False, True],
    ]
    assert oracle_nvfp4.tensor_scale(np.zeros(3, np.float32)) == 1
    assert oracle_nvfp4.tensor_scale(np.array([np.nan, -np.inf], np.float32)) == 1
    assert oracle_nvfp4.tensor_scale(np.array([2.0**-149], np.float32)) == 2.0**-149
