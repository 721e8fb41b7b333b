"""Stochastic rounding: bit for bit with given noise, and as random as it should be."""

from __future__ import annotations

import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import mxsim
from tests import inputs, inputs_blocks, oracle, oracle_noise
from tests.comparing import assert_same_bits
from tests.comparing_blocks import NAMES, How, assert_agrees
from tests.inputs import Array, layouts
from tests.oracle_elements import ELEMENTS, UNUSUAL, Element

each_name = pytest.mark.parametrize("fmt", NAMES)
each_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)
ALL = {**ELEMENTS, **{str(each): each for each in UNUSUAL}}
each_element = pytest.mark.parametrize("element", ALL.values(), ids=ALL)
N = 100_000


def how(fmt: str | Element, axis: Any = -1, block_size: Any = None, rule: Any = None) -> How:
    return How(fmt, axis, block_size, rule, "stochastic")


# --------------------------------------------------------------------------- against the oracle


@each_element
@each_dtype
def test_noise_at_the_very_value_where_rounding_turns(element: Element, dtype: Any) -> None:
    near = inputs.random_near(dtype)[::4]
    tiny = (inputs.random_near(np.float64)[1:9] * 2.0**-126).astype(dtype)
    for exponent in (-127, 0):
        x = inputs_blocks.tie_blocks(element, dtype, exponent)
        for rule in ("floor", "rceil"):
            for each in (x, near, tiny):
                bits = inputs_blocks.deciding_bits(each, element, rule)
                assert_agrees(each, how(element, rule=rule), noise=bits)


@each_element
@each_dtype
def test_random_noise_and_patterns(element: Element, dtype: Any) -> None:
    for x in (inputs.random_bits(dtype)[::3], inputs.random_near(dtype)[::3]):
        bits = inputs_blocks.random_words(x.shape, 1)
        for rule in oracle.SCALE_RULES:
            assert_agrees(x, how(element, rule=rule), noise=bits)
        assert_agrees(x, how(element, 0), noise=bits)


@pytest.mark.parametrize("element", list(ELEMENTS.values())[::2], ids=str)
def test_against_the_scalar_oracle(element: Element) -> None:
    x = inputs.random_near(np.float32)[::16]
    bits = inputs_blocks.deciding_bits(x, element)
    assert_agrees(x, how(element), noise=bits, scalar=True)


@each_element
@each_dtype
def test_the_least_and_the_greatest_noise(element: Element, dtype: Any) -> None:
    # u = 0 moves everything that is not on the grid up; the low eight bits are not used
    x = inputs.random_near(dtype)[:40]
    for word in (0, 0xFF, 0x100, 0xFFFFFFFF, 0xFFFFFF00, 0x80000000):
        assert_agrees(x, how(element), noise=np.full(x.shape, word, np.uint32))


@each_dtype
def test_the_least_noise_moves_even_what_is_far_below_the_scale(dtype: Any) -> None:
    # x / scale underflows: 2^-149 / 2^119 and still not zero
    x = np.array([[2.0**127, 2.0**-126, 2.0**-149, 1.0, 0.0, -0.0, -(2.0**-149), 2.0**-30]])
    noise = np.zeros(x.shape, np.uint32)
    for fmt in ELEMENTS:
        assert_agrees(x.astype(dtype), how(fmt), noise=noise)


@each_name
@each_dtype
def test_bits_of_a_noise(fmt: str, dtype: Any) -> None:
    x = inputs.random_near(dtype).ravel()[: 33 * 70].reshape(33, 70)
    for axis, block_size in [(1, None), (0, None), (-1, (4, 8)), ((1, 0), (7, 5)), (-1, "tensor")]:
        for key in [(0, 0, 0), (5, 3, 2)]:
            assert_agrees(x, how(fmt, axis, block_size), noise=mxsim.Noise(*key), seed=key)


@each_name
def test_bits_of_a_noise_along_every_axis_of_four(fmt: str) -> None:
    x = inputs.random_near(np.float32).ravel()[: 3 * 9 * 7 * 20].reshape(3, 9, 7, 20)
    for axis in range(4):
        assert_agrees(x, how(fmt, axis, 4), noise=mxsim.Noise(8), seed=(8,))


@each_name
def test_noise_goes_by_the_index_whatever_pair_of_axes_is_blocked(fmt: str) -> None:
    x = inputs.random_near(np.float32).ravel()[: 3 * 4 * 5 * 6].reshape(3, 4, 5, 6)
    bits = inputs_blocks.random_words(x.shape)
    for axis in itertools.permutations(range(4), 2):
        assert_agrees(x, how(fmt, axis, (2, 3)), noise=bits)
        assert_agrees(x, how(fmt, axis, (2, 3)), noise=mxsim.Noise(8), seed=(8,))


@each_name
def test_a_noise_is_its_bits_whatever_the_blocks_and_layout(fmt: str) -> None:
    x = inputs.random_near(np.float32)[:70, :28]
    noise = mxsim.Noise(21, 4, 1)
    bits = oracle_noise.noise_bits(x.size, 21, 4, 1).reshape(x.shape)
    for name, same in layouts(x).items():
        for axis, block_size in [(0, 32), (1, 32), (-1, (8, 8)), (-1, "tensor"), (-1, 1)]:
            arguments = how(fmt, axis, block_size).arguments()
            q = mxsim.quantize(x, **arguments, noise=bits)
            assert_same_bits(mxsim.quantize(same, **arguments, noise=noise).codes, q.codes, name)
            fast = mxsim.fake_quantize(same, **arguments, noise=noise)
            assert_same_bits(fast, q.dequantize(), name)


def test_given_bits_of_any_layout() -> None:
    x = inputs.random_near(np.float32)[:70, :28]
    bits = inputs_blocks.random_words(x.shape)
    want = mxsim.quantize(x, "mxfp4_e2m1", rounding="stochastic", noise=bits).codes
    for name, same in layouts(bits.view(np.float32)).items():
        if name == "big-endian":
            continue
        each = same.view(np.uint32)
        got = mxsim.quantize(x, "mxfp4_e2m1", rounding="stochastic", noise=each).codes
        assert_same_bits(got, want, name)
        assert_same_bits(each, bits, "the noise changed")


@each_name
def test_out_may_be_x(fmt: str) -> None:
    x = inputs.random_near(np.float32)[:33].copy()
    want = mxsim.fake_quantize(x, fmt, 0, rounding="stochastic", noise=mxsim.Noise(2))
    got = mxsim.fake_quantize(x, fmt, 0, rounding="stochastic", noise=mxsim.Noise(2), out=x)
    assert got is x
    assert_same_bits(x, want)


def test_C11_threads_give_the_same_bits() -> None:
    x = np.random.default_rng(22).normal(size=(300, 260)).astype(np.float32)
    arguments: dict[str, Any] = {"rounding": "stochastic", "noise": mxsim.Noise(3, 1, 4)}
    want = [mxsim.fake_quantize(x, "mxfp8_e4m3", axis, **arguments) for axis in (0, 1)]
    codes = mxsim.quantize(x, "mxfp8_e4m3", 0, **arguments).codes

    def again(axis: int) -> None:
        assert_same_bits(mxsim.fake_quantize(x, "mxfp8_e4m3", axis, **arguments), want[axis])
        assert_same_bits(mxsim.quantize(x, "mxfp8_e4m3", 0, **arguments).codes, codes)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(8) as pool:
            for done in [pool.submit(again, i % 2) for i in range(24)]:
                done.result(timeout=60)
    finally:
        sys.setswitchinterval(interval)


# --------------------------------------------------------------------------- as random as it should


def rounded_up(t: float, fmt: str, noise: mxsim.Noise, size: int = N) -> Array:
    """Which of `size` copies of 1 + t steps, beside a 1 that pins the scale, went up."""
    element = ELEMENTS[fmt]
    step = 2.0**-element.mantissa_bits
    one = 2.0**element.emax
    x = np.full((size // 31, 32), one * (1 + t * step))
    x[:, 0] = one
    values = mxsim.fake_quantize(x, fmt, rounding="stochastic", noise=noise)[:, 1:]
    assert set(np.unique(values)) <= {one, one * (1 + step)}
    return np.asarray(values > one)


@pytest.mark.parametrize("t", [0.1, 0.25, 0.5, 0.9])
@pytest.mark.parametrize("fmt", ELEMENTS)
def test_C11_goes_up_as_often_as_it_should(fmt: str, t: float) -> None:
    # a wrong probability, because of a sticky bit
    for key in [(0, 0, 0), (1, 5, 7)]:
        up = rounded_up(t, fmt, mxsim.Noise(*key))
        assert abs(up.mean() - t) < 4 * math.sqrt(t * (1 - t) / up.size)


@pytest.mark.parametrize("t", [0.1, 0.25, 0.5, 0.9])
def test_C11_nvfp4_goes_up_as_often_as_it_should(t: float) -> None:
    x = np.full((N // 16, 16), 1 + t / 2, np.float32)  # E2M1's step above 1 is 1/2
    x[:, 0], x[0, 0] = 6, 6 * 448
    q = mxsim.quantize(x, "nvfp4", rounding="stochastic", noise=mxsim.Noise(6))
    assert q.tensor_scale == 1
    values = q.dequantize()[1:, 1:]
    assert set(np.unique(values)) == {1, 1.5}
    up = values > 1
    assert abs(up.mean() - t) < 4 * math.sqrt(t * (1 - t) / up.size)


@pytest.mark.parametrize("t", [0.1, 0.5])
def test_C11_decisions_are_uncorrelated(t: float) -> None:
    # correlated bits made stochastic rounding worse than none
    def assert_uncorrelated(a: Array, b: Array, what: str) -> None:
        correlation = np.corrcoef(a.ravel(), b.ravel())[0, 1]
        assert abs(correlation) < 4 / math.sqrt(a.size), f"{what}: {correlation}"

    base = rounded_up(t, "mxfp8_e4m3", mxsim.Noise(0, 0, 0)).astype(float)
    for columns in (1, 2, 15):
        assert_uncorrelated(base[:, columns:], base[:, :-columns], f"{columns} elements apart")
    for rows in (1, 2, 8, 32):
        assert_uncorrelated(base[rows:], base[:-rows], f"{rows} blocks apart")
    for key in [(0, 1, 0), (0, 0, 1), (1, 0, 0), (0, 100, 0)]:
        other = rounded_up(t, "mxfp8_e4m3", mxsim.Noise(*key)).astype(float)
        assert_uncorrelated(base, other, str(key))
    assert_same_bits(rounded_up(t, "mxfp8_e4m3", mxsim.Noise(0, 0, 0)).astype(float), base)


@each_name
def test_the_mean_is_unbiased(fmt: str) -> None:
    # of elements that do not saturate; away from them every single draw has the right mean
    x = np.random.default_rng(23).normal(size=(64, 32)).astype(np.float32)
    rule = None if fmt == "nvfp4" else "ceil"
    draws = np.stack(
        [
            mxsim.fake_quantize(x, fmt, -1, None, rule, "stochastic", noise=mxsim.Noise(4, step))
            for step in range(400)
        ]
    ).astype(np.float64)
    error = draws - x
    inside = np.ones(x.shape, bool)
    if fmt == "nvfp4":
        q = mxsim.quantize(x, fmt)
        inside = np.abs(x) <= 6 * np.repeat(q.scale_values(), 16, axis=1)
    overall = error[:, inside].mean(axis=1)
    assert abs(overall.mean()) < 4 * overall.std() / math.sqrt(len(draws))
    low, high = draws[:, inside].min(axis=0), draws[:, inside].max(axis=0)
    variance = (x[inside] - low) * (high - x[inside])  # of a draw with the right mean
    mixed = variance > 0.1 * (high - low) ** 2  # the others are far from normal in 400 draws
    deviation = error[:, inside].mean(axis=0)[mixed] / np.sqrt(variance[mixed] / len(draws))
    assert deviation.size > 500
    assert np.abs(deviation).max() < 5
    assert abs(np.square(deviation).mean() - 1) < 4 * math.sqrt(2 / deviation.size)
    nearest = mxsim.fake_quantize(x, fmt, -1, None, rule)
    assert np.abs(draws.mean(axis=0) - x).mean() < 0.4 * np.abs(nearest - x).mean()


@each_name
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_what_is_on_the_grid_stays(fmt: str, dtype: Any) -> None:
    x = inputs.random_near(dtype)[:64]
    once = mxsim.fake_quantize(x, fmt)
    if fmt == "nvfp4":  # not idempotent: its scales are not powers of two
        return
    once = np.where(np.isfinite(once), once, 0).astype(dtype)
    again = mxsim.fake_quantize(once, fmt, rounding="stochastic", noise=mxsim.Noise(5))
    assert_same_bits(again, once)


@each_name
def test_odd_symmetry_with_the_same_noise(fmt: str) -> None:
    x = inputs.random_near(np.float32)[:64]
    noise = inputs_blocks.random_words(x.shape)
    a, b = (mxsim.fake_quantize(v, fmt, rounding="stochastic", noise=noise) for v in (x, -x))
    if fmt != "mxint8_asymmetric":
        np.testing.assert_array_equal(a, -b)
