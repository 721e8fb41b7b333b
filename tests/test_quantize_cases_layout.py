"""Faults of other people's quantizers in blocks, axes and memory layout: cases D2 to D8, and F-6.

One test a case, as in test_quantize_cases.py; the comment says which fault it excludes.
"""

from __future__ import annotations

import tempfile
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxsim
from tests import inputs, oracle
from tests.comparing import assert_same_bits
from tests.inputs import Array

E4M3, _, _, _, E2M1, INT8 = oracle.FORMATS


@pytest.mark.parametrize("axis", [0, 1])
def test_D2_a_partial_last_block_has_its_own_maximum(axis: int) -> None:
    # an assertion about multiples of 32, or a last block that runs on into the next row
    x = np.ones((3, 70), np.float32)
    x[1, 64:] = 2.0**-20
    x = x if axis == 1 else np.ascontiguousarray(x.T)
    q = mxsim.quantize(x, E4M3, axis)
    scales = q.scales if axis == 1 else q.scales.T
    assert scales.tolist() == [[119, 119, 119], [119, 119, 99], [119, 119, 119]]
    assert_same_bits(q.dequantize(), x)


def test_D3_axes() -> None:
    # None fails far away; negative, single, empty and length-1 axes are forgotten
    x = inputs.random_near(np.float32)[:4]
    with pytest.raises((TypeError, ValueError), match=r"axis.*None"):
        mxsim.quantize(x, E4M3, axis=None)  # type: ignore[arg-type]
    assert_same_bits(mxsim.quantize(x, E4M3, axis=-2).codes, mxsim.quantize(x, E4M3, axis=0).codes)
    one_axis = mxsim.quantize(x[0], E4M3)
    assert one_axis.scales.shape == (1,)
    for shape, axis, scales in [((0,), 0, (0,)), ((3, 0), 0, (1, 0)), ((0, 3), 0, (0, 3))]:
        q = mxsim.quantize(np.zeros(shape, np.float32), E4M3, axis)
        assert (q.codes.shape, q.scales.shape, q.dequantize().shape) == (shape, scales, shape)
    length_one = mxsim.quantize(np.array([[3.0], [0.1]], np.float32), E4M3, axis=1)
    assert length_one.scales.tolist() == [[120], [115]]


def test_D4_blocks_along_rows_and_columns_differ() -> None:
    # one quantized copy used transposed, or quantized a second time, instead of the original
    rng = np.random.default_rng(0)
    a = rng.normal(size=(64, 64)) * np.exp(rng.normal(size=(64, 1)))
    rows, columns = (mxsim.fake_quantize(a, E2M1, axis) for axis in (1, 0))
    twice = mxsim.fake_quantize(rows, E2M1, 0)

    def error(q: Array) -> float:
        return float(np.linalg.norm(q - a) / np.linalg.norm(a))

    assert round(float((rows != columns).mean()), 2) == 0.42
    assert (round(error(twice), 3), round(error(columns), 3)) == (0.145, 0.135)


@pytest.mark.parametrize("fmt", oracle.FORMATS)
def test_D5_views_are_read_through_their_strides(fmt: str) -> None:
    # the buffer of a view read as if it were contiguous
    a = inputs.random_near(np.float32)[:64].copy()
    read_only = a.copy()
    read_only.setflags(write=False)
    for view in (
        a,
        np.asfortranarray(a),
        a[::2, ::2],
        a[::-1, ::-1],
        np.broadcast_to(a[:1], (40, 32)),
        np.broadcast_to(a[:, :1], (64, 40)),
        read_only,
    ):
        contiguous = np.array(view, order="C")
        for axis in (0, 1):
            expected = oracle.quantize(contiguous, fmt, axis)
            q = mxsim.quantize(view, fmt, axis)
            transposed = mxsim.quantize(view.T, fmt, 1 - axis)
            assert_same_bits(q.codes, expected.codes)
            assert_same_bits(q.scales, expected.scales)
            assert_same_bits(transposed.codes.T, expected.codes)
            assert_same_bits(transposed.scales.T, expected.scales)
            assert_same_bits(mxsim.fake_quantize(view, fmt, axis), q.dequantize())
            assert_same_bits(mxsim.fake_quantize(view.T, fmt, 1 - axis).T, q.dequantize())


@pytest.mark.parametrize("block_size", [8, 16, 32, 64, 128, 256])  # 256: one scale for the tensor
def test_D7_block_sizes(block_size: int) -> None:
    # a block size that is fixed at 32 somewhere
    x = np.float32(2.0) ** np.repeat(np.arange(32, dtype=np.float32), 8)  # doubles every 8
    q = mxsim.quantize(x, INT8, block_size=block_size)
    last = np.arange(block_size // 8 - 1, 32, block_size // 8)
    assert q.scales.tolist() == (127 + last).tolist()
    below_maximum = np.repeat(last, block_size) - np.repeat(np.arange(32), 8)
    kept = below_maximum <= 6  # INT8 has six bits below its maximum
    assert_same_bits(q.dequantize(), np.where(kept, x, 0).astype(np.float32))


@pytest.mark.parametrize("block_size", [300, 2**62, 2**70])
def test_D7_a_block_longer_than_the_axis_is_the_whole_axis(block_size: int) -> None:
    # memory or an index in proportion to the block instead of the data
    x = inputs.random_near(np.float32)[:2]
    q, expected = (mxsim.quantize(x, E4M3, block_size=size) for size in (block_size, 32))
    assert_same_bits(q.codes, expected.codes)
    assert_same_bits(q.scales, expected.scales)
    assert_same_bits(mxsim.fake_quantize(x, E4M3, block_size=block_size), expected.dequantize())
    assert_same_bits(q.dequantize(), expected.dequantize())


@pytest.mark.parametrize("axis", [0, 1])
def test_D8_offsets_past_31_bits(axis: int) -> None:
    # a 32-bit product of row and stride; the file is sparse: 8 GiB of addresses, few of bytes
    stride = 2**30
    rows = inputs.random_near(np.float32)[:3]
    with tempfile.TemporaryFile() as file:
        far = np.memmap(file, np.float32, "w+", shape=(2 * stride + 32,))
        view = np.lib.stride_tricks.as_strided(far, (3, 32), (4 * stride, 4))
        view[...] = rows
        for fmt in oracle.FORMATS:
            expected = oracle.quantize(rows, fmt, axis)
            q = mxsim.quantize(view, fmt, axis)
            assert_same_bits(q.codes, expected.codes)
            assert_same_bits(q.scales, expected.scales)
            fast = mxsim.fake_quantize(view, fmt, axis)
            assert_same_bits(np.asarray(fast), expected.values_as(np.float32))
        del view, far


# --------------------------------------------------------------------------- F-6: narrower inputs


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.int8, np.uint16])
def test_F_6_narrow_inputs_are_widened_exactly(dtype: Any) -> None:
    # Numba has no float16: a narrow input must give what its exact float32 copy gives
    bits = np.random.default_rng(9).integers(0, 2**16, (8, 64), dtype=np.uint16)
    x = bits.astype(np.int8) if dtype is np.int8 else bits.view(dtype)
    wide = x.astype(np.float32)
    for fmt in oracle.FORMATS:
        q, expected = (mxsim.quantize(each, fmt) for each in (x, wide))
        assert_same_bits(q.codes, expected.codes)
        assert_same_bits(q.scales, expected.scales)
        fast = mxsim.fake_quantize(x, fmt)
        assert_same_bits(fast, mxsim.fake_quantize(wide, fmt))
