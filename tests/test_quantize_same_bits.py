"""The same bits in every memory layout, by the fast path, into ``out``, and from two threads."""

from __future__ import annotations

import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mxsim
from tests import inputs, oracle
from tests.comparing import Scheme, assert_same_bits
from tests.drawn import lines, schemes
from tests.inputs import Array, layouts


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", inputs.DTYPES)
@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_every_memory_layout_gives_the_same_bits(fmt: str, dtype: Any, axis: int) -> None:
    x = inputs.random_near(dtype)[:70, :28].copy()
    x[3, 4], x[50, 7] = np.nan, -0.0
    expected = mxsim.quantize(x, fmt, axis)
    values = expected.dequantize(dtype)
    for name, same in layouts(x).items():
        before = same.copy()
        q = mxsim.quantize(same, fmt, axis)
        assert_same_bits(q.codes, expected.codes, name)
        assert_same_bits(q.scales, expected.scales, name)
        assert_same_bits(mxsim.fake_quantize(same, fmt, axis), values, name)
        assert_same_bits(same.astype(dtype), before.astype(dtype), f"{name}: the input changed")
        assert_same_bits(mxsim.fake_quantize(same.T, fmt, 1 - axis), values.T, f"{name}, swapped")


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("permutation", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_permuted_axes_give_the_same_bits(permutation: tuple[int, ...], axis: int) -> None:
    x = inputs.random_near(np.float32).ravel()[: 5 * 6 * 40].reshape(5, 6, 40)
    expected = np.transpose(mxsim.fake_quantize(x, "mxfp8_e4m3", permutation[axis]), permutation)
    got = mxsim.fake_quantize(np.transpose(x, permutation), "mxfp8_e4m3", axis)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_broadcast_inputs_give_the_same_bits(axis: int) -> None:
    line = inputs.random_near(np.float32)[0]
    for view in (np.broadcast_to(line, (40, 32)), np.broadcast_to(line[:, None], (32, 40))):
        assert 0 in view.strides
        for fmt in oracle.FORMATS:
            q, expected = (mxsim.quantize(each, fmt, axis) for each in (view, view.copy()))
            assert_same_bits(q.codes, expected.codes)
            assert_same_bits(q.scales, expected.scales)
            assert_same_bits(mxsim.fake_quantize(view, fmt, axis), expected.dequantize())


@given(lines(), schemes, st.integers(1, 70))
def test_fake_quantize_is_quantize_then_dequantize(
    x: Array, scheme: Scheme, block_size: int
) -> None:
    fmt, rule, rounding = scheme
    expected = mxsim.quantize(x, fmt, -1, block_size, rule, rounding).dequantize(x.dtype)
    assert_same_bits(mxsim.fake_quantize(x, fmt, -1, block_size, rule, rounding), expected)
    column = mxsim.fake_quantize(np.stack([x, x], axis=1), fmt, 0, block_size, rule, rounding)
    assert_same_bits(column[:, 1].copy(), expected, "along the first axis")


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_out_is_written_and_returned_whatever_its_layout(dtype: Any, axis: int) -> None:
    x = inputs.random_near(dtype)[:70, :28].copy()
    expected = mxsim.fake_quantize(x, "mxfp6_e2m3", axis)
    for name, same in layouts(x).items():
        if name in ("read-only", "big-endian"):
            continue
        out = same
        out[...] = np.nan
        assert mxsim.fake_quantize(x, "mxfp6_e2m3", axis, out=out) is out
        assert_same_bits(out, expected, name)
    in_place = x.copy()
    assert mxsim.fake_quantize(in_place, "mxfp6_e2m3", axis, out=in_place) is in_place
    assert_same_bits(in_place, expected, "in place")
    shared = np.concatenate([x, x[:1]])
    mxsim.fake_quantize(shared[:-1], "mxfp6_e2m3", axis, out=shared[1:])
    assert_same_bits(shared[1:], expected, "out overlaps x")


@pytest.mark.parametrize("axis", [0, 1])
def test_two_threads_at_once_give_the_same_bits(axis: int) -> None:
    rng = np.random.default_rng(6)
    arrays = [rng.normal(size=(257, 260)).astype(np.float32) for _ in range(2)]
    expected = [mxsim.quantize(x, "mxfp8_e4m3", axis) for x in arrays]
    start = threading.Barrier(2)

    def repeat(i: int) -> None:
        start.wait(timeout=30)
        for _ in range(20):
            q = mxsim.quantize(arrays[i], "mxfp8_e4m3", axis)
            assert_same_bits(q.codes, expected[i].codes)
            assert_same_bits(q.scales, expected[i].scales)
            fast = mxsim.fake_quantize(arrays[i], "mxfp8_e4m3", axis)
            assert_same_bits(fast, expected[i].dequantize())

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as pool:
            for done in [pool.submit(repeat, i) for i in range(2)]:
                done.result(timeout=60)
    finally:
        sys.setswitchinterval(interval)
