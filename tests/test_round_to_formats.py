"""Rounding element by element to any float format, all roundings, against exact arithmetic."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxsim
from tests import inputs, inputs_blocks, oracle, oracle_elements, oracle_noise
from tests.comparing import assert_same_bits
from tests.comparing_blocks import float_format
from tests.inputs import Array, layouts
from tests.oracle_elements import ROUNDINGS, Element

BF16, FP16 = Element(8, 7, "ieee"), Element(5, 10, "ieee")
NARROW = [
    Element(4, 3, "nan"),
    Element(5, 2, "ieee"),
    Element(3, 2, "none"),
    Element(2, 3, "none"),
    Element(2, 1, "none"),
    Element(1, 0, "none"),
    Element(5, 0, "none"),
    Element(1, 5, "none"),
    Element(2, 1, "ieee"),
    Element(3, 1, "nan"),
    Element(8, 1, "ieee"),
]
WIDE = [
    BF16,
    FP16,
    Element(8, 10, "ieee"),
    Element(8, 21, "ieee"),
    Element(6, 9, "ieee"),
    Element(7, 12, "nan"),
    Element(7, 15, "none"),
]
WIDEST = [
    Element(8, 23, "ieee"),
    Element(11, 50, "ieee"),
    Element(11, 20, "ieee"),
    Element(10, 40, "none"),
]
each_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)


def exponents(element: Element) -> tuple[int, int]:
    emin = 2 - 2 ** (element.exponent_bits - 1)
    return emin, 2**element.exponent_bits - (1 if element.specials != "ieee" else 2) + emin - 1


def points(element: Element, dtype: Any) -> Array:
    """Ties and neighbours in the lowest, highest and a middle binade; specials; both signs."""
    m = element.mantissa_bits
    emin, emax = exponents(element)
    info = np.finfo(dtype)
    where = [
        emin - m - 2,
        emin - m - 1,
        emin - m,
        emin - 1,
        emin,
        (emin + emax) // 2,
        emax,
        emax + 1,
    ]
    whole = np.unique([0, 1, 2, 3, 2**m // 2, max(2**m - 2, 0), 2**m - 1])
    mantissas = np.concatenate([1 + whole / 2.0**m, 1 + (whole + 0.5) / 2.0**m])
    subnormal = np.ldexp(np.concatenate([whole, whole + 0.5]), emin - m)
    with np.errstate(over="ignore", under="ignore"):
        normal = np.ldexp(mantissas[None, :], np.array(where)[:, None]).ravel()
        near = inputs.with_neighbours(np.concatenate([normal, subnormal]).astype(dtype))
    rest = [
        0.0,
        math.inf,
        math.nan,
        float(info.max),
        float(info.smallest_subnormal),
        float(info.tiny),
    ]
    every = np.concatenate([near, np.array(rest, dtype)])
    return np.concatenate([every, -every])


def deciding_bits(x: Array, element: Element) -> Array:
    """The noise at which each finite rounding turns, or one to either side."""
    emin, _ = exponents(element)
    wide = np.abs(np.where(np.isfinite(x), x, 0).astype(np.float64))
    exponent = np.maximum(np.frexp(wide)[1] - 1, emin) - element.mantissa_bits
    part = np.ldexp(wide, -exponent) % 1
    rng = np.random.default_rng(51)
    turn = np.floor(part * 2.0**24).astype(np.int64) + rng.integers(-1, 2, x.shape)
    upper = np.clip(turn, 0, 2**24 - 1).astype(np.uint32)
    return np.asarray((upper << np.uint32(8)) | rng.integers(0, 256, x.shape, np.uint32))


def assert_rounds(x: Array, element: Element, rounding: str, bits: Array | None = None) -> None:
    want = oracle_elements.round_to_all(element, x, rounding, bits)
    got = mxsim.round_to(x, float_format(element), rounding, noise=bits)
    with np.errstate(over="ignore"):
        assert_same_bits(got, want.astype(x.dtype), f"{element} {rounding}", x)


@pytest.mark.parametrize("element", [*NARROW, *WIDE], ids=str)
@each_dtype
def test_ties_ends_and_specials(element: Element, dtype: Any) -> None:
    x = points(element, dtype)
    for rounding in oracle.ROUNDINGS:
        assert_rounds(x, element, rounding)


@pytest.mark.parametrize("element", WIDEST, ids=str)
def test_formats_that_only_float64_holds(element: Element) -> None:
    x = points(element, np.float64)
    for rounding in oracle.ROUNDINGS:
        assert_rounds(x, element, rounding)
    assert_rounds(x, element, "stochastic", deciding_bits(x, element))


@pytest.mark.parametrize("element", [*NARROW, *WIDE], ids=str)
@each_dtype
def test_stochastic_rounding_where_it_turns(element: Element, dtype: Any) -> None:
    x = points(element, dtype)
    assert_rounds(x, element, "stochastic", deciding_bits(x, element))
    for word in (0, 0xFF, 0xFFFFFFFF):
        assert_rounds(x[::5], element, "stochastic", np.full(x[::5].shape, word, np.uint32))


@pytest.mark.parametrize("element", [*NARROW, *WIDE], ids=str)
@each_dtype
def test_random_patterns(element: Element, dtype: Any) -> None:
    near = inputs.random_near(dtype)[::64]
    largest = np.frexp(np.abs(near).max(axis=1, keepdims=True))[1]
    middle = np.ldexp(near.astype(np.float64), -largest).astype(dtype)
    x = np.concatenate([near, inputs.random_bits(dtype)[::64], middle])
    bits = inputs_blocks.random_words(x.shape, 2)
    for rounding in ROUNDINGS:
        assert_rounds(x, element, rounding, bits if rounding == "stochastic" else None)


@pytest.mark.parametrize("man_bits", [7, 10, 15, 20, 21])
@each_dtype
def test_subnormals_go_up_as_often_as_they_should(man_bits: int, dtype: Any) -> None:
    # the range of float32: there 2^-24 of a step is no float32, for bf16 (7 bits) and all others
    step, n = 2.0 ** (-126 - man_bits), 20_000
    for part in (0.25, 0.5, 0.75):
        x = np.full(n, (5 + part) * step).astype(dtype)
        fmt, noise = mxsim.FloatFormat(8, man_bits), mxsim.Noise(6)
        count = mxsim.round_to(x, fmt, "stochastic", noise=noise).astype(np.float64) / step
        assert set(np.unique(count)) <= {5.0, 6.0}
        assert abs((count == 6).mean() - part) < 4 * math.sqrt(part * (1 - part) / n)


@pytest.mark.parametrize("element", NARROW, ids=str)
@each_dtype
def test_far_past_the_largest(element: Element, dtype: Any) -> None:
    mantissas = np.array([[1, 1.25, 1.4, 1.5, 1.6, 1.9]])
    x = np.ldexp(mantissas, np.append(np.arange(-1, 128, 4), [62, 64, 65])[:, None]).astype(dtype)
    for rounding in oracle.ROUNDINGS:
        assert_rounds(x, element, rounding)


@pytest.mark.parametrize(("name", "element"), [("bf16", BF16), ("fp16", FP16)])
@each_dtype
def test_noise_for_named_formats(name: str, element: Element, dtype: Any) -> None:
    x = inputs.random_near(dtype)[:40]
    bits = oracle_noise.noise_bits(x.size, 1, 2, 3).reshape(x.shape)
    want = oracle_elements.round_to_all(element, x, "stochastic", bits).astype(dtype)
    for layout, same in layouts(x).items():
        got = mxsim.round_to(same, name, "stochastic", noise=mxsim.Noise(1, 2, 3))
        assert_same_bits(got, want, layout)
        assert_same_bits(mxsim.round_to(same, name, "stochastic", noise=bits), want, layout)
    turned = mxsim.round_to(np.asfortranarray(x), name, "stochastic", noise=np.asfortranarray(bits))
    assert_same_bits(turned, want)
    cube = x.reshape(5, 8, 32)
    got = mxsim.round_to(cube, name, "stochastic", noise=mxsim.Noise(1, 2, 3))
    assert_same_bits(got, want.reshape(cube.shape))
    assert_same_bits(
        mxsim.round_to(cube.astype(dtype), float_format(element), "even"),
        mxsim.round_to(cube, name),
    )


@pytest.mark.parametrize("element", [Element(4, 3, "nan"), Element(2, 1, "none")], ids=str)
@each_dtype
def test_formats_without_infinity_saturate(element: Element, dtype: Any) -> None:
    top = float(element.largest)
    x = np.array([top, top * 1.01, top * 2, np.finfo(dtype).max, np.inf, np.nan], dtype)
    x = np.concatenate([x, -x])
    for rounding in ROUNDINGS:
        noise = mxsim.Noise(0) if rounding == "stochastic" else None
        got = mxsim.round_to(x, float_format(element), rounding, noise=noise)
        assert got[:5].tolist() == [top] * 5
        assert got[6:11].tolist() == [-top] * 5
        assert np.isnan(got[[5, 11]]).all()


def test_C5_e5m2_that_does_not_saturate() -> None:
    # 61440 is the tie past the largest
    x = np.array([57344, 57345, 61439, 61440, 65535, np.inf, -61440])
    e5m2 = mxsim.FloatFormat(5, 2)
    inf = math.inf
    want = {
        "even": [57344, 57344, 57344, inf, inf, inf, -inf],
        "away": [57344, 57344, 57344, inf, inf, inf, -inf],
        "zero": [57344, 57344, 57344, 57344, 57344, inf, -57344],
    }
    for rounding, values in want.items():
        assert mxsim.round_to(x, e5m2, rounding).tolist() == values
    inside = x[np.abs(x) < 61440].astype(np.float32)
    witness = inside.astype(ml_dtypes.float8_e5m2).astype(np.float32)
    assert_same_bits(mxsim.round_to(inside, e5m2), witness)


@pytest.mark.parametrize(
    ("element", "kind"),
    [
        (Element(4, 3, "nan"), ml_dtypes.float8_e4m3fn),
        (Element(4, 3, "ieee"), ml_dtypes.float8_e4m3),
        (Element(3, 4, "ieee"), ml_dtypes.float8_e3m4),
        (Element(5, 2, "ieee"), ml_dtypes.float8_e5m2),
        (Element(3, 2, "none"), ml_dtypes.float6_e3m2fn),
        (Element(2, 3, "none"), ml_dtypes.float6_e2m3fn),
        (Element(2, 1, "none"), ml_dtypes.float4_e2m1fn),
    ],
    ids=str,
)
def test_nearest_even_in_range_is_ml_dtypes(element: Element, kind: Any) -> None:
    x = points(element, np.float32)
    x = x[np.abs(x) <= float(element.largest)]
    got = mxsim.round_to(x, float_format(element))
    assert_same_bits(got, x.astype(kind).astype(np.float32), str(kind), x)
