"""NVFP4 against its recipe in float32, one operation at a time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxsim
from tests import inputs, inputs_blocks, oracle_nvfp4
from tests.comparing import assert_same_bits
from tests.comparing_blocks import How, assert_agrees
from tests.inputs import Array
from tests.oracle_elements import ROUNDINGS

TENSORS = inputs_blocks.tensors(np.float32)
each_tensor = pytest.mark.parametrize("name", TENSORS)
each_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)
F32 = np.float32


@each_tensor
@each_dtype
def test_every_rounding_and_axis(name: str, dtype: Any) -> None:
    x = inputs_blocks.tensors(dtype)[name]
    noise = inputs_blocks.random_words(x.shape)
    for rounding in ROUNDINGS:
        bits = noise if rounding == "stochastic" else None
        for axis in (0, 1):
            q = assert_agrees(x, How("nvfp4", axis, None, None, rounding), noise=bits)
            want = oracle_nvfp4.tensor_scale(oracle_nvfp4.to_float32(x))
            assert q.tensor_scale == want


@each_tensor
def test_infinities_saturate_if_asked(name: str) -> None:
    x = TENSORS[name].copy()
    x[2, 3], x[5, 30:32], x[15] = np.inf, (-np.inf, np.nan), -np.inf
    for axis in (0, 1):
        assert_agrees(x, How("nvfp4", axis, nonfinite="saturate"))
        assert_agrees(x, How("nvfp4", axis))


@each_tensor
def test_blocks_of_other_shapes(name: str) -> None:
    for block_size in (1, 5, 48, (4, 4), (16, 16), (16, 5), "tensor"):
        assert_agrees(TENSORS[name], How("nvfp4", -1, block_size))


def near_ties(s_t: float) -> Array:
    """A row for each of the 126 block scales: a maximum that gives it, and points near its ties."""
    pins = np.array([float(v) for v in oracle_nvfp4.E4M3.positive[1:]])
    middles = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    points = np.outer(pins * s_t, middles).astype(F32)
    near = [points, np.nextafter(points, F32(0)), np.nextafter(points, F32(np.inf))]
    return np.concatenate([(6 * s_t * pins)[:, None].astype(F32), *near], axis=1)


def test_elements_near_every_tie_of_every_block_scale() -> None:
    for s_t in (1.0, 0.7, 1e30):
        x = near_ties(s_t)
        for rounding in ("even", "away", "zero"):
            assert_agrees(x, How("nvfp4", -1, x.shape[1], None, rounding))


def test_block_maxima_around_every_midpoint_of_the_scale() -> None:
    grid = np.array([float(v) for v in oracle_nvfp4.E4M3.positive])
    ratios = inputs.with_neighbours(np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])).astype(F32)
    x = np.append(ratios[ratios <= 448] * F32(6), F32(448 * 6))[:, None]
    for s_t in (1, 3, 2.0**-100):
        assert_agrees((x * F32(s_t)).astype(F32), How("nvfp4", -1, 1))


@pytest.mark.parametrize("seed", range(6))
def test_random_bits_of_a_few_binades(seed: int) -> None:
    rng = np.random.default_rng(seed)
    exponent = rng.integers(-149, 128) - rng.integers(0, 12, (20, 33))
    x = np.ldexp(rng.uniform(1, 2, (20, 33)), np.minimum(exponent, 127)).astype(np.float32)
    assert_agrees(np.copysign(x, rng.normal(size=x.shape)).astype(F32), How("nvfp4"))


def test_by_hand() -> None:
    x = np.zeros((2, 16), np.float32)
    x[0, :4], x[1, :4] = [6 * 448, 448, -1000, 0], [6, -3, 0.24, -0.0]
    q = mxsim.quantize(x, "nvfp4")
    assert q.tensor_scale == 1
    assert q.scales.tolist() == [[0b1111_110], [0b0111_000]]
    assert q.codes[:, :4].tolist() == [[0b0111, 0b0010, 0b1100, 0], [0b0111, 0b1101, 0, 0b1000]]
    assert q.dequantize()[:, :4].tolist() == [[2688, 448, -896, 0], [6, -3, 0, 0]]
    assert q.scale_values().tolist() == [[448], [1]]


def test_the_order_of_operations_shows() -> None:
    # x / s_b / s_t, and x * (1 / (s_b * s_t)), are not what the recipe says, and not the same
    x = near_ties(0.7)
    q = mxsim.quantize(x, "nvfp4", block_size=x.shape[1])
    s_b = q.scales.view(ml_dtypes.float8_e4m3fn).astype(F32)
    s_t = F32(q.tensor_scale)

    def codes(quotients: Array) -> Array:
        return np.abs(quotients).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)

    assert_same_bits(q.codes, codes(x / (s_b * s_t)), x=x)
    for other in (x / s_b / s_t, x * (F32(1) / (s_b * s_t))):
        assert (codes(other) != q.codes).any()


def test_an_all_zero_tensor() -> None:
    x = np.array([0.0, -0.0] * 16, np.float32)
    q = assert_agrees(x, How("nvfp4"))
    assert q.tensor_scale == 1
    assert not q.scales.any()
    assert np.signbit(q.dequantize()).tolist() == [False, True] * 16


def test_a_block_whose_scale_rounds_to_zero_has_zero_elements() -> None:
    x = np.zeros((2, 16), np.float32)
    x[0, 0], x[1] = 2688, 6 * 2.0**-10  # the tie between 0 and E4M3's least, to even
    x[1, ::2] *= -1
    q = assert_agrees(x, How("nvfp4"))
    assert q.scales.tolist() == [[126], [0]]
    assert q.codes[1].tolist() == [8, 0] * 8
    x[1, 3] = np.nextafter(x[1, 3], F32(1))
    assert mxsim.quantize(x, "nvfp4").scales.tolist() == [[126], [1]]


def test_A12_the_largest_float32_and_float64_beyond_it() -> None:
    largest = np.finfo(np.float32).max
    x = np.full((2, 16), largest, np.float32)
    x[1] = 1
    q = assert_agrees(x, How("nvfp4"))
    assert q.scales.tolist() == [[126], [0]]
    wide = np.full((2, 16), 1e300)
    wide[1] = 1
    q = assert_agrees(wide, How("nvfp4"))  # float32 has an infinity for it
    assert q.scales.tolist() == [[127], [126]]
    saturated = assert_agrees(wide, How("nvfp4", nonfinite="saturate"))
    assert saturated.scales.tolist() == [[126], [126]]
    assert saturated.dequantize().tolist() == [[1.0] * 16, [1.0] * 16]
    with pytest.raises(ValueError, match="x must be finite"):
        mxsim.quantize(wide, "nvfp4", nonfinite="raise")


def test_float64_and_integers_are_rounded_to_float32_first() -> None:
    rng = np.random.default_rng(14)
    x = rng.normal(size=(8, 64))
    q, narrow = mxsim.quantize(x, "nvfp4"), mxsim.quantize(x.astype(np.float32), "nvfp4")
    assert_same_bits(q.codes, narrow.codes)
    assert_same_bits(q.scales, narrow.scales)
    fast = mxsim.fake_quantize(x, "nvfp4")
    assert_same_bits(fast, narrow.dequantize(np.float64))
    whole = rng.integers(-99999, 99999, (8, 64))
    assert_same_bits(
        mxsim.quantize(whole, "nvfp4").codes,
        mxsim.quantize(whole.astype(np.float32), "nvfp4").codes,
    )


def test_scale_values_and_sizes() -> None:
    x = np.random.default_rng(15).normal(size=(8, 40)).astype(np.float32)
    q = mxsim.quantize(x, "nvfp4")
    assert q.tensor_scale is not None
    s_b = q.scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert_same_bits(q.scale_values(), (s_b * F32(q.tensor_scale)).astype(np.float64))
    assert q.nbytes == 8 * 40 // 2 + 8 * 3 + 4
    assert q.bits_per_element == 8 * q.nbytes / 320


def test_stochastic_rounding_of_what_underflows() -> None:
    """Every operation is in float32: a quotient that underflows there is 0, whatever the bits."""
    x = np.zeros((1, 16), np.float32)
    x[0, :5] = [3e38, 1e-30, -1e-40, 1e-8, 2e-7]
    lowest = np.zeros(x.shape, np.uint32)  # rounds up all that is not exact
    q = mxsim.quantize(x, "nvfp4", rounding="stochastic", noise=lowest)
    assert q.tensor_scale is not None
    scale = np.float32(q.scale_values()[0, 0])
    quotients = np.abs(x) / scale
    np.testing.assert_array_equal(q.codes[0, :5] % 8 == 0, quotients[0, :5] == 0)
