"""What noise, formats, bits and output types are refused: argument, value and what is allowed."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import mxsim
from tests.test_quantize_errors import assert_refused

X = np.ones((2, 64), np.float32)
BITS = np.zeros(X.shape, np.uint32)
EITHER = (TypeError, ValueError)
ROUNDING: list[Callable[..., Any]] = [
    partial(mxsim.quantize, X, "mxint8"),
    partial(mxsim.quantize, X, "nvfp4"),
    partial(mxsim.fake_quantize, X, "mxint8"),
    partial(mxsim.round_to, X, "bf16"),
]
rounding_call = pytest.mark.parametrize(
    "call", ROUNDING, ids=["quantize", "nvfp4", "fake_quantize", "round_to"]
)


def refusal(call: Callable[[], Any]) -> str:
    """The message with which it refuses, or nothing."""
    try:
        call()
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


# ----------------------------------------------------------------------------------------- noise


@rounding_call
def test_stochastic_rounding_needs_noise(call: Callable[..., Any]) -> None:
    words = ["noise", "Noise", "uint32", "stochastic", "got None"]
    assert_refused(ValueError, words, lambda: call(rounding="stochastic"))


@rounding_call
@pytest.mark.parametrize("rounding", ["even", "away", "zero"])
def test_other_roundings_take_none(call: Callable[..., Any], rounding: str) -> None:
    for noise in (mxsim.Noise(0), BITS):
        refused = partial(call, rounding=rounding, noise=noise)
        assert_refused(ValueError, ["noise", "None", rounding], refused)


@rounding_call
def test_noise_of_another_type(call: Callable[..., Any]) -> None:
    integers = (BITS.astype(np.int32), BITS.astype(np.uint64))
    others: list[Any] = [*integers, np.ones(X.shape), 3, "noise", []]
    for noise in others:
        refused = partial(call, rounding="stochastic", noise=noise)
        dtype = str(np.asarray(noise).dtype)
        with pytest.raises(TypeError, match="noise must be") as caught:
            refused()
        assert "uint32" in str(caught.value)
        assert dtype in str(caught.value)


@rounding_call
def test_noise_of_another_shape(call: Callable[..., Any]) -> None:
    for shape in [(64, 2), (2, 63), (128,), (), (1, 64), (2, 64, 1)]:
        noise = np.zeros(shape, np.uint32)
        refused = partial(call, rounding="stochastic", noise=noise)
        assert_refused(ValueError, ["noise", "shape", "(2, 64)", str(shape)], refused)


@pytest.mark.parametrize("field", ["seed", "step", "tensor"])
@pytest.mark.parametrize("value", [-1, 1.5, "1", None])
def test_a_noise_counts_in_integers(field: str, value: Any) -> None:
    arguments = {"seed": 0, field: value}
    assert_refused(EITHER, [field, repr(value)], lambda: mxsim.Noise(**arguments))


@pytest.mark.parametrize("arguments", [(-1,), (1, -1), (1.5,), ("1",), (None,), (1, 0.5)])
def test_sizes_of_bits(arguments: tuple[Any, ...]) -> None:
    name = "start" if len(arguments) > 1 else "size"
    assert_refused(EITHER, [name, repr(arguments[-1])], lambda: mxsim.Noise(0).bits(*arguments))


def test_seeds_may_be_numpy_integers() -> None:
    noise = mxsim.Noise(np.int64(3), np.uint8(4), np.int32(5))  # type: ignore[arg-type]
    assert noise.bits(9).tolist() == mxsim.Noise(3, 4, 5).bits(9).tolist()


# --------------------------------------------------------------------------- formats and rules


@pytest.mark.parametrize("rule", ["floor", "rceil", "ceil", "even", "nvfp4", ""])
def test_nvfp4_has_its_own_scale_rule(rule: str) -> None:
    for function in (mxsim.quantize, mxsim.fake_quantize):
        refused = partial(function, X, "nvfp4", scale_rule=rule)
        assert_refused(ValueError, ["scale_rule", "None", "nvfp4", repr(rule)], refused)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((0, 3), ["exp_bits", "0"]),
        ((12, 3), ["exp_bits", "12", "11"]),
        ((1, 3), ["exp_bits", "1", "ieee"]),
        ((4, 0), ["man_bits", "0", "ieee"]),
        ((4, 53), ["man_bits", "53", "52"]),
        ((4, -1, "none"), ["man_bits", "-1"]),
        ((4, 0, "nan"), ["man_bits", "0", "nan"]),
        ((4.0, 3), ["exp_bits", "4.0", "integer"]),
        ((4, "3"), ["man_bits", "'3'", "integer"]),
        ((True, 3), ["exp_bits", "True", "integer"]),
        ((4, 3, "inf"), ["specials", "'inf'", "ieee", "nan", "none"]),
        ((4, 3, None), ["specials", "None", "ieee", "nan", "none"]),
    ],
    ids=str,
)
def test_float_formats(arguments: tuple[Any, ...], words: list[str]) -> None:
    assert_refused(EITHER, words, lambda: mxsim.FloatFormat(*arguments))


@pytest.mark.parametrize("man_bits", [-1, -7, 1.5, "6", None, True])
def test_integer_formats(man_bits: Any) -> None:
    assert_refused(EITHER, ["man_bits", repr(man_bits)], lambda: mxsim.IntFormat(man_bits))


@pytest.mark.parametrize("element", [mxsim.FloatFormat(5, 3), mxsim.IntFormat(7)], ids=str)
def test_elements_of_a_block_have_eight_bits_at_most(element: Any) -> None:
    words = ["element", "8", str(element.bits)]
    assert_refused(ValueError, words, lambda: mxsim.BlockFormat("wide", element))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("block_size", v) for v in (0, -1, 2.5, "32", None, True)),
        *(("scale", v) for v in ("e5m3", "", None, "E8M0")),
        *(("element", v) for v in ("e4m3", None, 8)),
    ],
)
def test_block_formats(field: str, value: Any) -> None:
    element = mxsim.FloatFormat(2, 1, "none")
    arguments = {"name": "mine", "element": element, "block_size": 32, field: value}
    assert_refused(EITHER, [field, repr(value)], lambda: mxsim.BlockFormat(**arguments))


@pytest.mark.parametrize("element", [mxsim.FloatFormat(4, 3, "nan"), mxsim.IntFormat(6)], ids=str)
def test_an_nvfp4_scale_fits_its_element_or_is_refused(element: Any) -> None:
    # its tensor scale is amax / (6 * 448), and 6 is the largest of E2M1 alone
    def values() -> Any:
        fmt = mxsim.BlockFormat("mine", element, 16, "e4m3")
        return mxsim.quantize(X, fmt).dequantize()

    message = refusal(values)
    if message:
        assert "element" in message
    else:
        np.testing.assert_allclose(values(), X, rtol=0.1)


@pytest.mark.parametrize("fmt", [mxsim.FloatFormat(4, 3, "nan"), mxsim.IntFormat(6), 3, object()])
def test_a_format_that_is_no_block_format(fmt: Any) -> None:
    for function in (mxsim.quantize, mxsim.fake_quantize):
        refused = partial(function, X, fmt)
        assert_refused(TypeError, ["fmt", "BlockFormat", "mxint8"], refused)


def test_round_to_takes_formats_that_are_narrower_or_hold_everything() -> None:
    wide: Any
    for wide in (
        mxsim.FloatFormat(8, 22),
        mxsim.FloatFormat(7, 23),
        mxsim.FloatFormat(9, 3),
        mxsim.FloatFormat(9, 22),
        mxsim.FloatFormat(8, 3, "none"),
        mxsim.FloatFormat(8, 23, "nan"),  # has no Inf
        mxsim.FloatFormat(11, 52, "none"),
    ):
        refused = partial(mxsim.round_to, X, wide)
        assert_refused(ValueError, ["fmt", "float32", str(wide.man_bits)], refused)
    wide = mxsim.FloatFormat(11, 51)
    assert_refused(ValueError, ["fmt", "float64"], lambda: mxsim.round_to(np.ones(3), wide))


@pytest.mark.parametrize("fmt", [None, 3, mxsim.IntFormat(6), mxsim.FORMATS["mxint8"]], ids=str)
def test_round_to_a_format_that_is_none(fmt: Any) -> None:
    words = ["fmt", "FloatFormat", "bf16", "fp16", "fp32"]
    assert_refused(TypeError, words, lambda: mxsim.round_to(X, fmt))


# ---------------------------------------------------------------------------------- given bits


@pytest.mark.parametrize(
    ("fmt", "code", "largest"),
    [("mxfp4_e2m1", 16, 15), ("mxfp6_e3m2", 64, 63), ("mxfp8_e4m3", 256, 255), ("mxint8", -1, 255)],
)
def test_codes_out_of_range(fmt: str, code: int, largest: int) -> None:
    codes = np.array([0, 1, code], np.int64)
    words = ["codes", f"0..{largest}"]
    with pytest.raises(ValueError, match=re.escape(str(code))) as caught:
        mxsim.MXArray.from_bits(codes, [127], fmt)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("name", ["codes", "scales", "packed"])
def test_ragged_bits(name: str) -> None:
    ragged: Any = [[1, 2], [3]]
    calls: dict[str, Callable[[], Any]] = {
        "codes": lambda: mxsim.MXArray.from_bits(ragged, [127], "mxint8"),
        "scales": lambda: mxsim.MXArray.from_bits([1] * 4, ragged, "mxint8"),
        "packed": lambda: mxsim.MXArray.unpack(ragged, (4,), [127], "mxint8"),
    }
    assert_refused(ValueError, [name, "equal lengths", "list"], calls[name])


@pytest.mark.parametrize("scale", [-1, 256, 1000])
def test_scales_out_of_range(scale: int) -> None:
    words = ["scales", "0..255", str(scale)]
    with pytest.raises(ValueError, match="scales") as caught:
        mxsim.MXArray.from_bits([0, 1], [scale], "mxint8")
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize("bits", [np.ones(4), np.ones(4, bool), ["1"] * 4, [None] * 4], ids=str)
def test_bits_are_integers(bits: Any) -> None:
    dtype = str(np.asarray(bits).dtype)
    calls: dict[str, Callable[[], Any]] = {
        "codes": lambda: mxsim.MXArray.from_bits(bits, [127], "mxint8"),
        "scales": lambda: mxsim.MXArray.from_bits([1] * 4, bits, "mxint8", block_size=1),
        "packed": lambda: mxsim.MXArray.unpack(bits, (4,), [127], "mxint8"),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name}.*integers") as caught:
            call()
        assert dtype in str(caught.value)


@pytest.mark.parametrize("shape", [(), (1,), (2,), (2, 1), (2, 3), (1, 2), (2, 2, 1)])
def test_scales_of_another_shape(shape: tuple[int, ...]) -> None:
    codes = np.zeros((2, 64), np.uint8)
    scales = np.zeros(shape, np.uint8)
    words = ["scales", "(2, 2)", str(shape), "(2, 64)"]
    assert_refused(ValueError, words, lambda: mxsim.MXArray.from_bits(codes, scales, "mxint8"))


@pytest.mark.parametrize("value", [None, 0, -1.0, np.nan, np.inf, 1e39, 1e-46, "1", [1.0, 2.0]])
def test_nvfp4_needs_a_positive_tensor_scale(value: Any) -> None:
    call = partial(mxsim.MXArray.from_bits, [0] * 16, [0], "nvfp4", tensor_scale=value)
    assert_refused(EITHER, ["tensor_scale", "positive", "float32", repr(value)], call)


def test_other_formats_take_no_tensor_scale() -> None:
    call = partial(mxsim.MXArray.from_bits, [0] * 16, [0], "mxint8", tensor_scale=1.0)
    assert_refused(ValueError, ["tensor_scale", "None", "mxint8", "1.0"], call)


@pytest.mark.parametrize("size", [0, 1, 23, 25, 48])
def test_packed_bytes_of_another_number(size: int) -> None:
    call = partial(mxsim.MXArray.unpack, np.zeros(size, np.uint8), (1, 32), [[0]], "mxfp6_e2m3")
    assert_refused(ValueError, ["packed", "24", str(size), "(1, 32)"], call)


@pytest.mark.parametrize("shape", [(-1, -32), (-1,), (2.5, 4), "33", None, (1, None)])
def test_shapes_to_unpack_into(shape: Any) -> None:
    call = partial(mxsim.MXArray.unpack, np.zeros(32, np.uint8), shape, [[0]], "mxint8")
    assert_refused(EITHER, ["shape"], call)


@pytest.mark.parametrize("block_size", [0, "row", 2.5, (1, 2, 3)])
def test_block_sizes_of_given_bits(block_size: Any) -> None:
    call = partial(mxsim.MXArray.from_bits, [[0]], [[0]], "mxint8", -1, block_size)
    assert_refused(EITHER, ["block_size", repr(block_size)], call)


@pytest.mark.parametrize("axis", [2, -3, None, 0.0, (0, 1)])
def test_axes_of_given_bits(axis: Any) -> None:
    call = partial(mxsim.MXArray.from_bits, [[0]], [[0]], "mxint8", axis)
    assert_refused(EITHER, ["axis", repr(axis)], call)


def test_unknown_format_of_given_bits() -> None:
    call = partial(mxsim.MXArray.from_bits, [0], [0], "mxint9")
    assert_refused(ValueError, ["fmt", "'mxint9'", "mxint8"], call)


# ----------------------------------------------------------------------------------- the rest


@pytest.mark.parametrize("dtype", [np.int32, bool, np.complex128, object, "float8", "longdouble"])
def test_output_types(dtype: Any) -> None:
    q = mxsim.quantize(X, "mxint8")
    words = ["dtype", "float64", "float32", "float16", "bfloat16"]
    assert_refused(TypeError, words if dtype != "float8" else [], lambda: q.dequantize(dtype))


@pytest.mark.parametrize("block_size", ["tensor", (2, 2), 4])
def test_a_number_has_no_blocks(block_size: Any) -> None:
    call = partial(mxsim.quantize, np.float32(1), "mxint8", -1, block_size)
    with pytest.raises(ValueError, match=r"axis|block_size"):
        call()


@pytest.mark.parametrize("axis", [-1, (0, 1), (0, 0)])
def test_a_line_has_no_pairs(axis: Any) -> None:
    with pytest.raises(ValueError, match=r"axis|block_size"):
        mxsim.quantize(np.ones(8), "mxint8", axis, (2, 2))


@pytest.mark.parametrize("axis", [0, 1, -2, (1, 0)])
def test_one_block_for_the_tensor_whatever_the_axis(axis: Any) -> None:
    want = mxsim.quantize(X, "mxint8", -1, "tensor")
    q = mxsim.quantize(X, "mxint8", axis, "tensor")
    assert (q.codes == want.codes).all()
    assert q.scales.shape == want.scales.shape == (1, 1)
