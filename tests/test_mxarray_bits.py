"""The bit level: packing by hand, given codes, ml_dtypes' own decoding, and every output type."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxsim
from tests import inputs, oracle
from tests.comparing import assert_same_bits
from tests.comparing_blocks import NAMES, How, block_format, expected
from tests.inputs import Array
from tests.oracle_elements import ELEMENTS, Element
from tests.test_oracle import ML_DTYPES

each_name = pytest.mark.parametrize("fmt", NAMES)
WITNESS: dict[str, Any] = {**ML_DTYPES, "nvfp4": ml_dtypes.float4_e2m1fn}
BITS = {**{name: element.bits for name, element in ELEMENTS.items()}, "nvfp4": 4}


def from_codes(codes: Any, fmt: str) -> mxsim.MXArray:
    """Codes under scale 1."""
    array = np.array(codes, np.uint8)
    tensor_scale = 1.0 if fmt == "nvfp4" else None
    scales = np.full((1,) * array.ndim, 0b0111_000 if fmt == "nvfp4" else 127)
    return mxsim.MXArray.from_bits(array, scales, fmt, -1, "tensor", tensor_scale)


# ----------------------------------------------------------------------------------------- packing


def test_four_bits_two_to_a_byte_the_first_one_low() -> None:
    assert from_codes([0x1, 0xE], "mxfp4_e2m1").pack().tolist() == [0xE1]
    assert from_codes([0x1, 0xE, 0x7, 0x0, 0xF], "mxfp4_e2m1").pack().tolist() == [0xE1, 0x07, 0x0F]
    assert from_codes([[1, 2], [3, 4]], "nvfp4").pack().tolist() == [0x21, 0x43]


def test_six_bits_four_to_three_bytes_the_first_one_low() -> None:
    for fmt in ("mxfp6_e3m2", "mxfp6_e2m3"):
        # 000001 | 000010 << 6 | 000011 << 12 | 000100 << 18 = 0x1030_81
        assert from_codes([1, 2, 3, 4], fmt).pack().tolist() == [0x81, 0x30, 0x10]
        assert from_codes([0x3F, 0, 0x3F, 0], fmt).pack().tolist() == [0x3F, 0xF0, 0x03]
        assert from_codes([0x2A], fmt).pack().tolist() == [0x2A]
        assert from_codes([0x3F, 0x3F], fmt).pack().tolist() == [0xFF, 0x0F]
        assert from_codes([1, 1, 1], fmt).pack().tolist() == [0x41, 0x10, 0x00]
        assert from_codes([1, 2, 3, 4, 5], fmt).pack().tolist() == [0x81, 0x30, 0x10, 0x05]


def test_eight_bits_are_themselves() -> None:
    for fmt in ("mxfp8_e4m3", "mxfp8_e5m2", "mxint8", "mxint8_asymmetric"):
        codes = [0, 1, 0x7E, 0x81 if fmt == "mxint8" else 0x80, 0xFE]
        assert from_codes(codes, fmt).pack().tolist() == codes


def by_definition(codes: Array, bits: int) -> list[int]:
    """All codes as one little-endian number."""
    number = sum(int(code) << (bits * i) for i, code in enumerate(codes.ravel().tolist()))
    return list(number.to_bytes(-(-codes.size * bits // 8), "little"))


@pytest.mark.parametrize(
    "element",
    [
        *ELEMENTS.values(),
        Element(1, 0, "none"),
        Element(2, 2, "ieee"),
        Element(3, 3, "none"),
        Element(0, 1, "symmetric"),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(0,), (1,), (2,), (3,), (5,), (7, 3), (2, 0), (2, 3, 5), (64,)])
def test_packing_and_unpacking_at_odd_sizes(element: Element, shape: tuple[int, ...]) -> None:
    # 2, 3, 4, 5, 6, 7 and 8 bits
    codes = np.random.default_rng(41).integers(0, 2**element.bits, shape, np.uint8)
    if element.specials == "symmetric":
        codes[codes == element.sign_bit] = 0  # the most negative is not one of its codes
    fmt = block_format(element, 4)
    scales = np.full((*shape[:-1], -(-shape[-1] // 4)), 130)
    q = mxsim.MXArray.from_bits(codes, scales, fmt)
    packed = q.pack()
    assert packed.dtype == np.uint8
    assert packed.tolist() == by_definition(codes, element.bits)
    for same in (packed, packed.astype(np.int64)):
        back = mxsim.MXArray.unpack(same, shape, scales, fmt)
        assert_same_bits(back.codes, codes)
        assert_same_bits(back.scales, q.scales)
        assert (back.format, back.block_size, back.axis) == (q.format, q.block_size, q.axis)
    assert q.nbytes == packed.size + q.scales.size
    if codes.size:
        assert q.bits_per_element == 8 * q.nbytes / codes.size


@each_name
@pytest.mark.parametrize(
    ("axis", "block_size"), [(0, None), (1, 7), (-1, (4, 3)), ((1, 0), (4, 3)), (-1, "tensor")]
)
def test_a_quantized_array_survives_packing(fmt: str, axis: Any, block_size: Any) -> None:
    x = inputs.random_near(np.float32)[:35, :31].copy()
    x[7, 9] = np.nan
    for same in (x, np.asfortranarray(x), x[::-1, ::-1]):
        q = mxsim.quantize(same, fmt, axis, block_size)
        packed = q.pack()
        assert packed.tolist() == by_definition(q.codes, BITS[fmt])
        back = mxsim.MXArray.unpack(
            packed, q.shape, q.scales, fmt, axis, block_size, q.tensor_scale
        )
        assert_same_bits(back.codes, q.codes)
        assert_same_bits(back.dequantize(), q.dequantize())
        again = mxsim.MXArray.from_bits(q.codes, q.scales, fmt, axis, block_size, q.tensor_scale)
        assert_same_bits(again.dequantize(np.float64), q.dequantize(np.float64))
        assert (again.axis, again.block_size) == (q.axis, q.block_size)
        assert again.tensor_scale == q.tensor_scale


def test_sizes_of_the_formats() -> None:
    x = np.ones((64, 64))
    bits = {"mxfp8_e4m3": 8.25, "mxfp6_e3m2": 6.25, "mxfp4_e2m1": 4.25, "mxint8": 8.25}
    for fmt, expected_bits in bits.items():
        q = mxsim.quantize(x, fmt)
        assert q.bits_per_element == mxsim.FORMATS[fmt].bits_per_element == expected_bits
        assert q.nbytes == 64 * 64 * expected_bits / 8
    assert mxsim.FORMATS["nvfp4"].bits_per_element == 4.5
    assert mxsim.quantize(x, "nvfp4").nbytes == 64 * 64 * 4.5 / 8 + 4


# --------------------------------------------------------------------------- codes and ml_dtypes


def witness_values(codes: Array, fmt: str) -> Array:
    if fmt in WITNESS:
        return np.asarray(codes.view(WITNESS[fmt]).astype(np.float64))
    return codes.view(np.int8) / 64.0


@each_name
def test_every_code_under_every_scale_decodes_as_in_ml_dtypes(fmt: str) -> None:
    codes = np.arange(2 ** BITS[fmt], dtype=np.uint8)
    codes = codes[(codes != 0x80) | (fmt != "mxint8")]
    bytes_ = np.arange(128 if fmt == "nvfp4" else 256, dtype=np.uint8)[:, None]
    codes = np.tile(codes[None, :], (bytes_.size, 1))
    tensor_scale = 0.7 if fmt == "nvfp4" else None
    q = mxsim.MXArray.from_bits(codes, bytes_, fmt, -1, codes.shape[1], tensor_scale)
    values = witness_values(codes, fmt)
    if fmt == "nvfp4":
        scales = bytes_.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.7)
        want = values.astype(np.float32) * scales
    else:
        scales = bytes_.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
        want = values * scales
    assert_same_bits(q.scale_values(), scales.astype(np.float64))
    assert_same_bits(q.dequantize(np.float64), want.astype(np.float64), fmt)
    with np.errstate(over="ignore", under="ignore"):
        assert_same_bits(q.dequantize(), want.astype(np.float32), fmt)


@each_name
def test_to_ml_dtypes_is_bit_for_bit(fmt: str) -> None:
    x = inputs.random_near(np.float32)[:40].copy()
    x[3, 3] = np.nan
    for axis in (0, 1):
        q = mxsim.quantize(x, fmt, axis)
        elements, scales = q.to_ml_dtypes()
        nv = fmt == "nvfp4"
        assert elements.dtype == WITNESS.get(fmt, np.int8)
        assert scales.dtype == (ml_dtypes.float8_e4m3fn if nv else ml_dtypes.float8_e8m0fnu)
        assert_same_bits(elements.view(np.uint8), q.codes)
        assert_same_bits(scales.view(np.uint8), q.scales)
        wide = elements.astype(np.float64) / (1 if fmt in WITNESS else 64)
        n = q.block_size
        assert isinstance(n, int)
        scale = scales.astype(np.float32) * np.float32(q.tensor_scale) if nv else scales
        spread = np.repeat(scale.astype(np.float64), n, axis)[:40, :32]
        assert_same_bits(q.dequantize(), (wide * spread).astype(np.float32), fmt)


def test_to_ml_dtypes_of_what_it_lacks() -> None:
    q = mxsim.quantize(np.ones(32), block_format(Element(2, 2, "none")))
    with pytest.raises(ValueError, match=r"ml_dtypes.*FloatFormat"):
        q.to_ml_dtypes()


@each_name
def test_codes_may_be_any_integers_in_range(fmt: str) -> None:
    codes = np.arange(2 ** BITS[fmt]).reshape(2, -1)
    if fmt == "mxint8":
        codes[1, 0] = 0  # for 0x80, which it does not have
    tensor_scale = 1 if fmt == "nvfp4" else None
    for kind in (np.int16, np.uint64, np.int64):
        q = mxsim.MXArray.from_bits(
            codes.astype(kind), [[127], [120]], fmt, -1, codes.shape[1], tensor_scale
        )
        assert q.codes.dtype == q.scales.dtype == np.uint8
        assert q.codes.tolist() == codes.tolist()


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxint8"])
def test_given_bits_are_copied(fmt: str) -> None:
    codes, scales = np.ones(32, np.uint8), np.array([127], np.uint8)
    q = mxsim.MXArray.from_bits(codes, scales, fmt)
    codes[:], scales[:] = 9, 9
    assert (q.codes == 1).all()
    assert q.scales.tolist() == [127]
    packed = q.pack()
    packed[:] = 7
    assert (q.codes == 1).all()


# --------------------------------------------------------------------------------- output types


@each_name
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_every_output_type_is_rounded_once(fmt: str, dtype: Any) -> None:
    near = inputs.random_near(dtype)[::2]
    half = np.random.default_rng(42).normal(size=(64, 32)) * np.exp2(
        np.random.default_rng(43).integers(-30, 18, (64, 1))
    )
    for x in (near, half.astype(dtype), inputs.random_bits(dtype)[::4]):
        want = expected(x, How(fmt))
        q = mxsim.quantize(x, fmt)
        exact = want.values.astype(np.float64)
        assert_same_bits(q.dequantize(np.float64), exact)
        assert_same_bits(q.dequantize("float32"), want.values_as(np.float32))
        for name, kind in (("fp16", np.float16), ("bf16", ml_dtypes.bfloat16)):
            got = q.dequantize(kind)
            assert got.dtype == kind
            rounded = oracle.round_ieee_bulk(name, exact, "even")
            assert_same_bits(got.astype(np.float64), rounded, name)


def test_a_bfloat16_is_not_rounded_through_float32() -> None:
    # no value of ours needs more bits than a float32, but float16's subnormals are near
    x = np.array([127 / 64 * 2.0**-24, -125 / 64 * 2.0**-25, 63 / 64 * 2.0**-24])
    q = mxsim.quantize(x, "mxint8", block_size=1)
    assert_same_bits(q.dequantize(np.float64), x)
    assert q.dequantize(np.float16).astype(np.float64).tolist() == [
        2 * 2.0**-24,
        -1 * 2.0**-24,
        2.0**-24,
    ]


# ------------------------------------------------------------------- codes that a format lacks


def test_special_codes_of_elements_are_codes() -> None:
    nan = math.nan
    e4m3 = from_codes([0x7F, 0xFF, 0x7E, 0x38], "mxfp8_e4m3").dequantize()
    np.testing.assert_array_equal(e4m3, [nan, nan, 448, 1])
    e5m2 = from_codes([0x7C, 0xFC, 0x7D, 0x7F, 0xFF, 0x7B], "mxfp8_e5m2").dequantize()
    np.testing.assert_array_equal(e5m2, [math.inf, -math.inf, nan, nan, nan, 57344])
    assert from_codes([0x80, 0x81], "mxint8_asymmetric").dequantize().tolist() == [-2, -127 / 64]


@pytest.mark.parametrize("man_bits", range(7))
def test_the_most_negative_code_of_a_symmetric_integer(man_bits: int) -> None:
    symmetric, asymmetric = (
        mxsim.BlockFormat("mine", mxsim.IntFormat(man_bits, each)) for each in (True, False)
    )
    lowest = 1 << (man_bits + 1)
    for codes in ([lowest], [0, lowest, 1]):
        with pytest.raises(ValueError, match=rf"codes must not be {lowest:#x}.*symmetric mine"):
            mxsim.MXArray.from_bits(codes, [127], symmetric)
        mxsim.MXArray.from_bits(codes, [127], asymmetric)
        packed = mxsim.MXArray.from_bits(codes, [127], asymmetric).pack()
        with pytest.raises(ValueError, match=f"codes must not be {lowest:#x}"):
            mxsim.MXArray.unpack(packed, (len(codes),), [127], symmetric)
    mxsim.MXArray.from_bits([lowest - 1, lowest + 1], [127], symmetric)


@pytest.mark.parametrize("scale", [0x80, 0x81, 0xB8, 0xFE, 0xFF])
def test_nvfp4_scales_have_no_sign(scale: int) -> None:
    words = rf"scales must be.*0\.\.0x7f.*nvfp4; got {scale:#x}"
    with pytest.raises(ValueError, match=words):
        mxsim.MXArray.from_bits([0] * 32, [0x38, scale], "nvfp4", tensor_scale=1.0)
    with pytest.raises(ValueError, match=words):
        mxsim.MXArray.unpack([0] * 16, (32,), [scale, 0x7F], "nvfp4", tensor_scale=1.0)
    nan = mxsim.MXArray.from_bits([0] * 32, [0x38, 0x7F], "nvfp4", tensor_scale=1.0)
    assert np.isnan(nan.dequantize()[16:]).all()  # NaN is a scale


@pytest.mark.parametrize(
    ("fmt", "shape", "used"),
    [("mxfp4_e2m1", (3,), 4), ("mxfp6_e3m2", (3,), 2), ("mxfp6_e2m3", (1, 2), 4), ("nvfp4", 1, 4)],
)
def test_padding_is_zero(fmt: str, shape: Any, used: int) -> None:
    shape = shape if isinstance(shape, tuple) else (shape,)
    codes = np.ones(shape, np.uint8)
    scale = 1.0 if fmt == "nvfp4" else None
    q = mxsim.MXArray.from_bits(codes, np.full((1,) * codes.ndim, 9), fmt, tensor_scale=scale)
    packed = q.pack()
    for bit in range(used, 8):
        bad = packed.copy()
        bad[-1] |= 1 << bit
        with pytest.raises(
            ValueError, match=rf"packed must end in zeros.*{used} bits.*{bad[-1]:#x}"
        ):
            mxsim.MXArray.unpack(bad, shape, q.scales, fmt, tensor_scale=scale)
    back = mxsim.MXArray.unpack(packed, shape, q.scales, fmt, tensor_scale=scale)
    assert_same_bits(back.codes, codes)
