"""NaN and infinities under each policy: what spreads, what saturates, what is refused."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxsim
from tests import inputs, inputs_blocks, oracle
from tests.comparing import assert_same_bits
from tests.comparing_blocks import NAMES, How, assert_agrees
from tests.inputs import Array, layouts
from tests.oracle_blocks import Axis, BlockSize
from tests.oracle_elements import ELEMENTS, ROUNDINGS
from tests.test_quantize_errors import assert_refused

each_name = pytest.mark.parametrize("fmt", NAMES)
each_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)
INF, NAN = math.inf, math.nan
MIXES = [(INF,), (-INF,), (INF, -INF), (NAN,), (INF, NAN), (NAN, -INF), (INF, NAN, -INF)]


def spoiled(dtype: Any) -> Array:
    """(70, 28) with every mix of specials somewhere, at first, middle and last of a block."""
    x = inputs.random_near(dtype)[:70, :28].copy()
    for row, (mix, place) in enumerate(itertools.product(MIXES, (0, 12, 25))):
        x[3 * row, place : place + len(mix)] = mix
    return x


@each_name
@each_dtype
@pytest.mark.parametrize("nonfinite", ["propagate", "saturate"])
def test_every_mix_under_every_rounding_and_kind_of_block(
    fmt: str, dtype: Any, nonfinite: str
) -> None:
    x = spoiled(dtype)
    noise = inputs_blocks.random_words(x.shape)
    layouts: list[tuple[Axis, BlockSize | None]] = [(1, None), (0, None), (0, 7), (-1, (4, 8))]
    for i, rounding in enumerate(ROUNDINGS + ROUNDINGS):
        axis, block_size = layouts[(i + i // 4) % 4]
        bits = noise if rounding == "stochastic" else None
        assert_agrees(x, How(fmt, axis, block_size, None, rounding, nonfinite), noise=bits)
    assert_agrees(x[:20], How(fmt, 1, 1, None, "even", nonfinite))
    without_nan = np.where(np.isnan(x), 1, x).astype(dtype)
    assert_agrees(without_nan, How(fmt, -1, "tensor", None, "even", nonfinite))


@pytest.mark.parametrize("fmt", ELEMENTS)
@each_dtype
def test_saturation_under_every_scale_rule(fmt: str, dtype: Any) -> None:
    for rule in oracle.SCALE_RULES:
        for axis in (0, 1):
            assert_agrees(spoiled(dtype), How(fmt, axis, 32, rule, "even", "saturate"))


@each_name
@each_dtype
def test_finite_blocks_are_the_same_under_every_policy(fmt: str, dtype: Any) -> None:
    x = inputs.random_near(dtype)[:70, :28]
    for axis in (0, 1):
        want = mxsim.quantize(x, fmt, axis)
        for nonfinite in ("saturate", "raise"):
            q = mxsim.quantize(x, fmt, axis, nonfinite=nonfinite)
            assert_same_bits(q.codes, want.codes)
            assert_same_bits(q.scales, want.scales)
            fast = mxsim.fake_quantize(x, fmt, axis, nonfinite=nonfinite)
            assert_same_bits(fast, want.dequantize(dtype))


@pytest.mark.parametrize("fmt", ELEMENTS)
@pytest.mark.parametrize("axis", [0, 1])
def test_B6_an_infinity_saturates_if_asked(fmt: str, axis: int) -> None:
    # Inf * 0 = NaN where the reciprocal of the largest scale is flushed to 0
    element = ELEMENTS[fmt]
    x = np.ones((2, 64))
    x[0, :6] = INF, -INF, 2.0**127, -(2.0**126), 3.0, -0.0
    x[0, 32 + 5], x[1, 0], x[1, 1] = NAN, INF, NAN
    x = x if axis == 1 else np.ascontiguousarray(x.T)
    q = mxsim.quantize(x, fmt, axis, nonfinite="saturate")
    scales = q.scales if axis == 1 else q.scales.T
    assert scales.tolist() == [[254, 255], [255, 127 - element.emax]]
    values = q.dequantize(np.float64)
    values = values if axis == 1 else values.T
    top, bottom = (float(element.magnitudes(s)[-1]) * 2.0**127 for s in (False, True))
    assert values[0, :6].tolist() == [top, -bottom, 2.0**127, -(2.0**126), 0, 0]
    assert np.isnan(values[0, 32:]).all()
    assert np.isnan(values[1, :32]).all()
    assert (values[1, 32:] == 1).all()
    fast = mxsim.fake_quantize(x, fmt, axis, nonfinite="saturate")
    assert_same_bits(fast, q.dequantize(np.float64))


@each_name
def test_B6_infinities_stay_in_their_block_by_default(fmt: str) -> None:
    x = np.ones((3, 64), np.float32)
    x[1, 40] = INF
    q = mxsim.quantize(x, fmt)
    assert_same_bits(mxsim.quantize(x, fmt, nonfinite="propagate").codes, q.codes)
    width = 16 if fmt == "nvfp4" else 32
    bad = np.zeros((3, 64), bool)
    bad[1, 40 // width * width : (40 // width + 1) * width] = True
    assert (np.isnan(q.dequantize()) == bad).all()
    assert not q.codes[bad].any()


@each_name
@pytest.mark.parametrize("function", [mxsim.quantize, mxsim.fake_quantize])
def test_refusing_names_the_first_index_and_its_value(fmt: str, function: Any) -> None:
    x = np.ones((2, 3, 64))
    x[1, 2, 5] = -INF
    words = ["x", "nonfinite", "raise", "-inf", "(1, 2, 5)"]
    assert_refused(ValueError, words, lambda: function(x, fmt, nonfinite="raise"))
    x[0, 1, 63] = NAN
    words = ["nan", "(0, 1, 63)"]
    for same in (x, x.astype(np.float32), x[:, :, ::-1][:, :, ::-1], np.asfortranarray(x)):
        call = partial(function, same, fmt, 0, nonfinite="raise")
        assert_refused(ValueError, words, call)
    assert_refused(ValueError, ["(1,)"], lambda: function(x[0, 1, 62:], fmt, nonfinite="raise"))


@pytest.mark.parametrize("function", [mxsim.quantize, mxsim.fake_quantize])
def test_refusing_names_what_overflows_nvfp4s_float32(function: Any) -> None:
    # 2^128 - 2^103 is the tie past the largest float32
    x = np.ones((2, 20))
    x[0, 3], x[1, 2] = 2.0**128 - 2.0**104, 1e300
    words = ["x", "nonfinite", "raise", "1e+300", "(1, 2)", "float32"]
    assert_refused(ValueError, words, lambda: function(x, "nvfp4", nonfinite="raise"))
    function(x, "mxint8", nonfinite="raise")
    x[1, 1] = INF
    words = ["inf", "(1, 1)"]
    assert_refused(ValueError, words, lambda: function(x, "nvfp4", nonfinite="raise"))
    with pytest.raises(ValueError, match=r"inf at index \(1, 1\)$"):
        function(x, "nvfp4", nonfinite="raise")


def test_a_refused_array_leaves_out_alone() -> None:
    x = np.array([1, NAN], np.float32)
    out = np.full(2, 7, np.float32)
    with pytest.raises(ValueError, match="nonfinite"):
        mxsim.fake_quantize(x, "mxint8", out=out, nonfinite="raise")
    assert (out == 7).all()


@each_name
@pytest.mark.parametrize("nonfinite", ["propagate", "saturate"])
def test_memory_layouts(fmt: str, nonfinite: str) -> None:
    x = spoiled(np.float32)
    for axis in (0, 1):
        want = mxsim.quantize(x, fmt, axis, nonfinite=nonfinite)
        for name, same in layouts(x).items():
            q = mxsim.quantize(same, fmt, axis, nonfinite=nonfinite)
            assert_same_bits(q.codes, want.codes, name)
            assert_same_bits(q.scales, want.scales, name)
            fast = mxsim.fake_quantize(same, fmt, axis, nonfinite=nonfinite)
            assert_same_bits(fast, want.dequantize(), name)


@each_name
@pytest.mark.parametrize("nonfinite", ["propagate", "saturate"])
def test_nothing_but_specials(fmt: str, nonfinite: str) -> None:
    for line in ([NAN] * 40, [INF] * 40, [INF, -INF] * 20, [-INF] + [0.0, -0.0] * 20):
        x = np.array(line, np.float32)
        assert_agrees(x, How(fmt, nonfinite=nonfinite))
        assert_agrees(x[:, None], How(fmt, 0, nonfinite=nonfinite))


def test_float16_and_bfloat16_specials() -> None:
    x = np.array([1, NAN, INF, 2] * 16, np.float16)
    for nonfinite in ("propagate", "saturate"):
        wide = x.astype(np.float32)
        q, want = (mxsim.quantize(v, "mxint8", nonfinite=nonfinite) for v in (x, wide))
        assert_same_bits(q.scales, want.scales)
    assert_refused(
        ValueError, ["nan", "(1,)"], lambda: mxsim.quantize(x, "mxint8", nonfinite="raise")
    )


@pytest.mark.parametrize("nonfinite", ["", "Propagate", "nan", "ignore"])
@pytest.mark.parametrize("function", [mxsim.quantize, mxsim.fake_quantize])
def test_unknown_policy(function: Any, nonfinite: str) -> None:
    words = ["nonfinite", repr(nonfinite), "propagate", "saturate", "raise"]
    x = np.ones(3)
    assert_refused(ValueError, words, lambda: function(x, "mxint8", nonfinite=nonfinite))
    assert_refused(TypeError, words[:1], lambda: function(x, "mxint8", nonfinite=None))


@each_dtype
def test_A12_what_is_past_the_largest_float32(dtype: Any) -> None:
    # a rounded-up scale near the top: exact in float64, an infinity in float32, no warning
    x = np.full(32, np.finfo(np.float32).max, np.float32).astype(dtype)
    q = mxsim.quantize(x, "mxfp8_e4m3", scale_rule="rceil")
    assert q.scales.tolist() == [247]
    assert q.dequantize(np.float64).tolist() == [2.0**128] * 32
    assert q.dequantize(np.float32).tolist() == [INF] * 32
    fast = mxsim.fake_quantize(x, "mxfp8_e4m3", scale_rule="rceil")
    assert fast.tolist() == [INF if dtype is np.float32 else 2.0**128] * 32
    for narrow in (np.float16, ml_dtypes.bfloat16):
        assert q.dequantize(narrow).astype(np.float64).tolist() == [INF] * 32
