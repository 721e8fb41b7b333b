"""What the front door refuses, with a message that names argument, value and choices."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mxsim

X = np.ones((2, 64), np.float32)

# The front doors that take blocks; round_to has its own formats
BLOCKED: list[Callable[..., Any]] = [mxsim.quantize, mxsim.fake_quantize]
blocked = pytest.mark.parametrize("function", BLOCKED, ids=lambda f: str(f.__name__))


def assert_refused(
    kind: type[Exception] | tuple[type[Exception], ...], words: list[str], call: Callable[[], Any]
) -> None:
    """`call` raises `kind` and its message has every one of `words`, as a word."""
    with pytest.raises(kind) as caught:
        call()
    for word in words:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", str(caught.value)), caught.value


@blocked
@pytest.mark.parametrize("fmt", ["mxfp8", "MXFP8_E4M3", "fp8_e4m3", "bf16", "", "mxfp8_e4m3 "])
def test_unknown_format(function: Callable[..., Any], fmt: str) -> None:
    words = ["fmt", repr(fmt), "mxfp8_e4m3", "mxint8"]
    assert_refused(ValueError, words, lambda: function(X, fmt))


@blocked
@pytest.mark.parametrize("rule", ["round", "FLOOR", "", "nearest"])
def test_unknown_scale_rule(function: Callable[..., Any], rule: str) -> None:
    words = ["scale_rule", repr(rule), "floor", "rceil", "ceil", "even"]
    assert_refused(ValueError, words, lambda: function(X, "mxfp4_e2m1", scale_rule=rule))


@blocked
@pytest.mark.parametrize("rounding", ["nearest", "floor", "EVEN", ""])
def test_unknown_rounding(function: Callable[..., Any], rounding: str) -> None:
    words = ["rounding", repr(rounding), "even", "away", "zero"]
    assert_refused(ValueError, words, lambda: function(X, "mxfp4_e2m1", rounding=rounding))


@blocked
@pytest.mark.parametrize("name", ["fmt", "scale_rule", "rounding"])
@pytest.mark.parametrize("value", [None, 8, ["even"], {}])
def test_a_name_that_is_no_string(function: Callable[..., Any], name: str, value: object) -> None:
    if (name, value) == ("scale_rule", None):  # stands for the format's own rule
        assert mxsim.quantize(X, "mxint8", scale_rule=None).scale_rule == "floor"
        return
    arguments: dict[str, Any] = {"fmt": "mxint8", name: value}
    assert_refused(
        (TypeError, ValueError),
        [name, "even" if name != "fmt" else "mxint8"],
        lambda: function(X, **arguments),
    )


@blocked
@pytest.mark.parametrize("axis", [2, -3, 100])
def test_axis_out_of_range(function: Callable[..., Any], axis: int) -> None:
    words = ["axis", str(axis), "1"]  # 1 is the last axis of X
    assert_refused(ValueError, words, lambda: function(X, "mxint8", axis=axis))


@blocked
@pytest.mark.parametrize("axis", [None, 0.0, "0", (0, 1)])
def test_axis_that_is_no_integer(function: Callable[..., Any], axis: Any) -> None:
    words = ["axis", repr(axis)]
    assert_refused((TypeError, ValueError), words, lambda: function(X, "mxint8", axis=axis))


@blocked
@pytest.mark.parametrize("block_size", [32, np.int64(8)])
def test_a_pair_of_axes_needs_a_pair_of_lengths(
    function: Callable[..., Any], block_size: Any
) -> None:
    words = ["axis", "integer", "block_size", str(int(block_size)), "pair", "(0, 1)"]
    refused: list[Any] = [(0, 1), [0, 1]]
    for axis in refused:
        call = partial(function, X, "mxint8", axis=axis, block_size=block_size)
        assert_refused(ValueError, words[:-1], call)
    assert_refused(ValueError, words, lambda: function(X, "mxint8", (0, 1), block_size))


@blocked
@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (5, ["axis", "range", "5"]),
        (-3, ["axis", "range", "-3"]),
        ((0, 2), ["axis", "range", "2"]),
        ((0, -2), ["axis", "different", "(0, -2)"]),
        (None, ["axis", "integer", "None"]),
        (1.0, ["axis", "integer", "1.0"]),
        ("0", ["axis", "integer", "'0'"]),
    ],
)
def test_the_axis_of_a_single_block_must_exist(
    function: Callable[..., Any], axis: Any, words: list[str]
) -> None:
    call = partial(function, X, "mxint8", axis, "tensor")
    assert_refused((TypeError, ValueError), words, call)
    assert_refused(
        (TypeError, ValueError), words, partial(function, X[:0], "mxint8", axis, "tensor")
    )


@blocked
def test_a_scalar_has_no_axis(function: Callable[..., Any]) -> None:
    assert_refused(ValueError, ["axis"], lambda: function(np.float32(1), "mxint8"))


@blocked
@pytest.mark.parametrize("block_size", [0, -1, -32, np.int64(0)])
def test_block_size_below_one(function: Callable[..., Any], block_size: Any) -> None:
    words = ["block_size", str(int(block_size)), "1"]
    assert_refused(ValueError, words, lambda: function(X, "mxint8", block_size=block_size))


@blocked
@pytest.mark.parametrize("block_size", [32.0, {}, True, np.float64(16)])
def test_block_size_that_is_no_integer(function: Callable[..., Any], block_size: Any) -> None:
    words = ["block_size", repr(block_size), "integer"]
    assert_refused(TypeError, words, lambda: function(X, "mxint8", block_size=block_size))


@blocked
@pytest.mark.parametrize("block_size", ["32", "row", (32,), (32, 32, 32), (0, 4), (4, -1)])
def test_block_size_that_is_no_pair_and_no_name(
    function: Callable[..., Any], block_size: Any
) -> None:
    words = ["block_size", repr(block_size)]
    x = np.zeros((4, 4), np.float32)
    assert_refused(ValueError, words, lambda: function(x, "mxint8", block_size=block_size))


@blocked
@pytest.mark.parametrize("axis", [0, (0, 0), (0, 2), (0, 1, 2), "rows"])
def test_axes_of_two_dimensional_blocks(function: Callable[..., Any], axis: Any) -> None:
    x = np.zeros((4, 4), np.float32)
    with pytest.raises((TypeError, ValueError), match="axis"):
        function(x, "mxint8", axis=axis, block_size=(2, 2))


@blocked
def test_a_numpy_integer_is_a_block_size(function: Callable[..., Any]) -> None:
    function(X, "mxint8", block_size=np.int64(16))


UNREAL: dict[str, NDArray[Any]] = {
    "complex64": np.ones(32, np.complex64),
    "complex128": np.ones(32, np.complex128),
    "object": np.ones(32, object),
    "<U1": np.full(32, "1"),
    "|S1": np.full(32, b"1"),
    "bool": np.ones(32, bool),
    "datetime64[D]": np.zeros(32, "datetime64[D]"),
}


@pytest.mark.parametrize("dtype", UNREAL)
@pytest.mark.parametrize(
    ("function", "fmt"),
    [*((function, "mxint8") for function in BLOCKED), (mxsim.round_to, "bf16")],
    ids=["quantize", "fake_quantize", "round_to"],
)
def test_arrays_that_are_not_real(function: Callable[..., Any], fmt: str, dtype: str) -> None:
    with pytest.raises(TypeError) as caught:
        function(UNREAL[dtype], fmt)
    for word in ("x ", str(UNREAL[dtype].dtype), "float32", "float64"):
        assert word in str(caught.value)


CALLS: list[Callable[[Any], Any]] = [
    lambda x: mxsim.quantize(x, "mxint8"),
    lambda x: mxsim.fake_quantize(x, "nvfp4"),
    lambda x: mxsim.round_to(x, "bf16"),
]
each_call = pytest.mark.parametrize("call", CALLS, ids=["quantize", "fake_quantize", "round_to"])


@each_call
@pytest.mark.parametrize("x", [[[1, 2], [3]], [1.0, [2.0]], ([1], (1, 2))], ids=str)
def test_ragged_lists(call: Callable[[Any], Any], x: Any) -> None:
    words = ["x", "lists of equal lengths", type(x).__name__]
    assert_refused(ValueError, words, lambda: call(x))


@each_call
@pytest.mark.parametrize(
    ("x", "words"),
    [
        (2**70, ["64 bits", str(2**70)]),
        ([1, -(2**70)], ["64 bits", str(-(2**70))]),
        ([2**64, 2.5], ["64 bits", str(2**64)]),
        ([1.0, None], ["NoneType None"]),
        (None, ["NoneType None"]),
        (np.array([1, "a"], object), ["str 'a'"]),
    ],
    ids=str,
)
def test_python_objects(call: Callable[[Any], Any], x: Any, words: list[str]) -> None:
    assert_refused(
        TypeError, ["x must be real", "float64", "dtype object", *words], lambda: call(x)
    )


@blocked
@pytest.mark.parametrize("integer", [2**53 + 1, -(2**53) - 1, 2**63 - 1])
def test_integers_that_float64_would_round(function: Callable[..., Any], integer: int) -> None:
    x = np.array([1, integer])
    assert_refused(ValueError, ["x", "2**53"], lambda: function(x, "mxint8"))


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "bfloat16", "float16", ""])
def test_round_to_unknown_format(fmt: str) -> None:
    words = ["fmt", repr(fmt), "FloatFormat", "bf16", "fp16", "fp32"]
    assert_refused(ValueError, words, lambda: mxsim.round_to(X, fmt))


def test_round_to_unknown_rounding() -> None:
    words = ["rounding", "'nearest'", "even", "away", "zero"]
    assert_refused(ValueError, words, lambda: mxsim.round_to(X, "bf16", rounding="nearest"))


@pytest.mark.parametrize(
    "out",
    [
        np.empty((2, 63), np.float32),
        np.empty((64, 2), np.float32),
        np.empty((2, 64), np.float64),
        np.broadcast_to(np.float32(0), (2, 64)),  # read-only
        [[0.0] * 64] * 2,
    ],
    ids=["short", "transposed", "float64", "read-only", "a list"],
)
def test_out_that_cannot_take_the_result(out: Any) -> None:
    words = ["out"]
    assert_refused(
        (TypeError, ValueError), words, lambda: mxsim.fake_quantize(X, "mxint8", out=out)
    )


@pytest.mark.parametrize("dtype", [None, "x", "", 3, "float8", ["float32"]], ids=repr)
def test_dequantize_to_what_is_no_type(dtype: Any) -> None:
    words = ["dtype", "float32", "float64", "float16", "bfloat16", repr(dtype)]
    assert_refused(TypeError, words, lambda: mxsim.quantize(X, "mxint8").dequantize(dtype))


@pytest.mark.parametrize("dtype", [np.int32, np.complex64, "longdouble"])
def test_dequantize_to_what_cannot_hold_the_values(dtype: Any) -> None:
    words = ["dtype", "float32", "float64", np.dtype(dtype).name]
    assert_refused(TypeError, words, lambda: mxsim.quantize(X, "mxint8").dequantize(dtype))


def test_a_refused_call_leaves_out_alone() -> None:
    out = np.full(X.shape, 7, np.float32)
    with pytest.raises(ValueError, match="block_size"):
        mxsim.fake_quantize(X, "mxint8", block_size=0, out=out)
    assert (out == 7).all()
