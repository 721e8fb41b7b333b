"""Blocks of every shape against brute-force slicing: two axes, the whole tensor, partial edges.

And D7: a square block makes a tensor and its transpose agree, in every format and memory layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mxsim
from tests import inputs, inputs_blocks, oracle
from tests.comparing import assert_same_bits
from tests.comparing_blocks import NAMES, How, assert_agrees
from tests.inputs import Array, layouts
from tests.oracle_elements import ROUNDINGS, Element

each_name = pytest.mark.parametrize("fmt", NAMES)
each_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)
PAIRS = [(1, 1), (2, 3), (16, 16), (32, 32), (33, 1), (1, 40), (70, 28), (64, 64), (2**40, 2**70)]


def rules(fmt: str) -> tuple[str | None, ...]:
    return (None,) if fmt == "nvfp4" else oracle.SCALE_RULES


def matrix(dtype: Any, shape: tuple[int, ...] = (70, 28)) -> Array:
    """Near exponents, the occasional -0, NaN and Inf; every even shape of at most 12288."""
    x = inputs.random_near(dtype).ravel()[: np.prod(shape)].reshape(shape).copy()
    flat = x.reshape(-1)
    flat[[flat.size // 9, flat.size // 2, -1]] = np.nan, -np.inf, -0.0
    return x


@each_dtype
@each_name
@pytest.mark.parametrize("block_size", PAIRS)
def test_blocks_of_rows_and_columns(fmt: str, block_size: tuple[int, int], dtype: Any) -> None:
    x = matrix(dtype)
    noise = inputs_blocks.random_words(x.shape)
    for rule in rules(fmt)[:2]:
        assert_agrees(x, How(fmt, -1, block_size, rule))
    for rounding in ROUNDINGS[1:]:
        bits = noise if rounding == "stochastic" else None
        assert_agrees(x, How(fmt, -1, block_size, None, rounding), noise=bits)


@each_dtype
@each_name
@pytest.mark.parametrize("axis", [(0, 1), (1, 0), (-1, 0), (0, 2), (2, 1), (-3, -2)])
def test_pairs_of_axes_in_either_order(fmt: str, axis: tuple[int, int], dtype: Any) -> None:
    x = matrix(dtype, (9, 10, 11))
    for block_size in [(3, 4), (16, 2), (1, 11), (9, 11)]:
        assert_agrees(x, How(fmt, axis, block_size))


@each_name
def test_the_last_two_of_four_axes_are_blocked_unless_said(fmt: str) -> None:
    x = matrix(np.float32, (2, 3, 9, 10))
    q = assert_agrees(x, How(fmt, -1, (4, 4)))
    assert q.axis == (2, 3)
    assert q.block_size == (4, 4)
    assert q.scales.shape == (2, 3, 3, 3)
    assert_agrees(x, How(fmt, (1, 3), (2, 4)))


@each_dtype
@each_name
def test_one_block_for_the_tensor(fmt: str, dtype: Any) -> None:
    for shape in [(7,), (5, 9), (3, 4, 5), (1, 1), (2, 3, 4, 5), (1, 300)]:
        x = matrix(dtype, shape) if np.prod(shape) > 1 else np.full(shape, 3, dtype)
        x = np.where(np.isfinite(x), x, 0).astype(dtype)
        for rule in rules(fmt):
            q = assert_agrees(x, How(fmt, -1, "tensor", rule))
            assert q.scales.shape == (1,) * len(shape)
        assert_agrees(matrix(dtype, (5, 9)), How(fmt, -1, "tensor"))


@each_dtype
@each_name
@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3, 0, 2), (0, 0)])
def test_empty_arrays(fmt: str, shape: tuple[int, ...], dtype: Any) -> None:
    x = np.zeros(shape, dtype)
    for axis in range(len(shape)):
        assert_agrees(x, How(fmt, axis, 4))
    assert_agrees(x, How(fmt, -1, "tensor"))
    if len(shape) > 1:
        q = assert_agrees(x, How(fmt, -1, (2, 2)))
        assert q.stats is not None
        assert (q.stats.elements, q.stats.saturated, q.stats.gain) == (0, 0, 1)
        assert np.isnan(q.bits_per_element)


@each_dtype
@each_name
@pytest.mark.parametrize("block_size", [1, 2, 15, 16, 33, 64, 67, 68])
def test_block_sizes_from_one_to_past_the_axis(fmt: str, block_size: int, dtype: Any) -> None:
    x = matrix(dtype, (4, 67, 3))
    for axis, turned in ((1, x), (2, x.swapaxes(1, 2)), (0, x.swapaxes(0, 1)[:, :2])):
        noise = inputs_blocks.random_words(turned.shape)
        assert_agrees(turned, How(fmt, axis, block_size))
        assert_agrees(turned, How(fmt, axis, block_size, None, "stochastic"), noise=noise)


@each_name
def test_long_rows_and_columns(fmt: str) -> None:
    # past the width of any tile, and of a group of blocks
    for shape in [(2, 4500), (4500, 2), (2, 5, 530)]:
        x = matrix(np.float32, shape)
        assert_agrees(x, How(fmt, -1, 32))
        assert_agrees(x, How(fmt, -2, 32))
        for block_size in [(3, 7), (40, 500), (1, 4096)]:
            assert_agrees(x, How(fmt, -1, block_size))
            assert_agrees(x, How(fmt, (-1, -2), block_size))


@each_dtype
@each_name
def test_memory_layouts_under_every_kind_of_block(fmt: str, dtype: Any) -> None:
    x = matrix(dtype)
    noise = inputs_blocks.random_words(x.shape)
    for axis, block_size in [(-1, 32), (0, 9), (-1, (4, 8)), ((1, 0), (4, 8)), (-1, "tensor")]:
        for rounding in ("even", "stochastic"):
            how = How(fmt, axis, block_size, None, rounding)  # type: ignore[arg-type]
            bits = noise if rounding == "stochastic" else None
            want = mxsim.quantize(x, **how.arguments(), noise=bits)
            fast = want.dequantize(dtype)
            for name, same in layouts(x).items():
                q = mxsim.quantize(same, **how.arguments(), noise=bits)
                assert_same_bits(q.codes, want.codes, name)
                assert_same_bits(q.scales, want.scales, name)
                got = mxsim.fake_quantize(same, **how.arguments(), noise=bits)
                assert_same_bits(got, fast, name)
                out = np.full_like(same, 9) if same.dtype == dtype else None
                if out is not None and name != "read-only":
                    assert mxsim.fake_quantize(x, **how.arguments(), noise=bits, out=out) is out
                    assert_same_bits(out, fast, f"out {name}")
                    result = mxsim.fake_quantize(out, **how.arguments(), noise=bits, out=out)
                    assert result is out


@each_name
@pytest.mark.parametrize("n", [1, 2, 8, 16, 32])
def test_D7_square_blocks_of_a_transpose_are_the_transpose(fmt: str, n: int) -> None:
    # a weight and its transpose quantized apart must agree where blocks are square
    a = inputs.random_near(np.float32).ravel()[: 70 * 45].reshape(70, 45)
    for transposed in (a.T, np.ascontiguousarray(a.T)):
        for rule in rules(fmt):
            for rounding in oracle.ROUNDINGS:
                q = mxsim.quantize(a, fmt, -1, (n, n), rule, rounding)
                t = mxsim.quantize(transposed, fmt, -1, (n, n), rule, rounding)
                assert_same_bits(t.codes, q.codes.T)
                assert_same_bits(t.scales, q.scales.T)
                assert_same_bits(t.dequantize(), q.dequantize().T)
                fast = mxsim.fake_quantize(transposed, fmt, -1, (n, n), rule, rounding)
                assert_same_bits(fast, q.dequantize().T)


@each_name
def test_D7_exchanged_axes_exchange_the_block(fmt: str) -> None:
    a = matrix(np.float32)
    q = mxsim.quantize(a, fmt, (0, 1), (4, 6))
    for t in (mxsim.quantize(a.T, fmt, (0, 1), (6, 4)), mxsim.quantize(a.T, fmt, (1, 0), (4, 6))):
        assert_same_bits(t.codes, q.codes.T)
        assert_same_bits(t.scales, q.scales.T)


@each_name
def test_a_pair_with_a_one_is_a_block_along_one_axis(fmt: str) -> None:
    x = matrix(np.float32)
    for pair, axis in [((1, 8), 1), ((8, 1), 0)]:
        q, line = mxsim.quantize(x, fmt, -1, pair), mxsim.quantize(x, fmt, axis, 8)
        assert_same_bits(q.codes, line.codes)
        assert_same_bits(q.scales, line.scales)


@each_name
def test_the_tensor_is_the_largest_pair(fmt: str) -> None:
    x = inputs.random_near(np.float32)[:9]
    q, pair = mxsim.quantize(x, fmt, -1, "tensor"), mxsim.quantize(x, fmt, -1, (9, 32))
    assert_same_bits(q.codes, pair.codes)
    assert q.scales.tolist() == pair.scales.tolist()


def test_a_custom_element_in_two_dimensional_blocks() -> None:
    for element in (Element(3, 3, "nan"), Element(0, 4, "asymmetric"), Element(3, 0, "none")):
        for block_size in [(5, 3), (32, 32), "tensor"]:
            assert_agrees(matrix(np.float64), How(element, -1, block_size))  # type: ignore[arg-type]
