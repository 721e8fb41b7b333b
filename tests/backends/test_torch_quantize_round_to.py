"""round_to of the PyTorch backend against the Numba one, bit for bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mxsim
from mxsim.backends import torch_quantize
from mxsim.formats import ELEMENTWISE, ROUNDINGS
from tests import inputs, inputs_blocks
from tests.comparing import assert_same_bits
from tests.inputs import Array

pytestmark = pytest.mark.usefixtures("single_threaded")

CUSTOM = (
    mxsim.FloatFormat(1, 0, "none"),
    mxsim.FloatFormat(2, 1, "none"),
    mxsim.FloatFormat(4, 3, "nan"),
    mxsim.FloatFormat(5, 2),
    mxsim.FloatFormat(5, 0, "none"),
    mxsim.FloatFormat(8, 1),
    mxsim.FloatFormat(8, 3),
    mxsim.FloatFormat(8, 21),
    mxsim.FloatFormat(6, 20, "nan"),
)
FORMATS = (*ELEMENTWISE, *CUSTOM)


def corpus(dtype: Any) -> Array:
    """Every exponent, mantissas short and long around ties of bf16, fp16 and fp32; specials."""
    rng = np.random.default_rng(8)
    powers = inputs.powers_of_two(dtype)
    mantissas = 1 + np.concatenate(
        [rng.integers(0, 2**bits, 6) / 2.0**bits for bits in (1, 2, 4, 8, 9, 11, 12, 24, 25)]
    )
    with np.errstate(over="ignore", under="ignore"):
        x = np.multiply.outer(powers.astype(np.float64), mantissas).astype(dtype).ravel()
    x = inputs.with_neighbours(x[np.isfinite(x)])
    x = np.concatenate([x, inputs.random_bits(dtype).ravel()])
    if dtype == np.float64:
        x = np.concatenate([x, inputs.random_near(np.float64).ravel()])
    ends = np.array([0, np.inf, np.nan, np.finfo(dtype).max, 65504, 65519.99, 65520, 3.4e38], dtype)
    x = np.concatenate([x, ends])
    return np.concatenate([x, -x])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_all_roundings(fmt: Any, dtype: Any) -> None:
    x = corpus(dtype)
    for rounding in ROUNDINGS:
        words = inputs_blocks.random_words(x.shape) if rounding == "stochastic" else None
        given = None if words is None else torch.tensor(words)
        with np.errstate(all="ignore"):
            want = mxsim.round_to(x, fmt, rounding, noise=words)
        got = torch_quantize.round_to(torch.tensor(x), fmt, rounding, noise=given)
        assert_same_bits(got.numpy(), want, f"{fmt} {rounding}", x)


def test_named_noise_shapes_and_integers() -> None:
    x = inputs.random_near(np.float32)[:7, :9].T
    noise = mxsim.Noise(3, 1, 4)
    want = mxsim.round_to(x, "bf16", "stochastic", noise=noise)
    got = torch_quantize.round_to(torch.tensor(x), "bf16", "stochastic", noise=noise)
    assert_same_bits(got.numpy(), want)
    for dtype in (np.int16, np.int64):
        whole = np.arange(-1000, 1000, 7).astype(dtype)
        got = torch_quantize.round_to(torch.tensor(whole), "bf16")
        assert_same_bits(got.numpy(), mxsim.round_to(whole, "bf16"))
    assert torch_quantize.round_to(torch.tensor(1 + 2.0**-8), "bf16").item() == 1
    assert torch_quantize.round_to(torch.empty(0, 3), "fp16").shape == (0, 3)


def test_float64_is_rounded_once() -> None:
    x = torch.tensor(1 + 2.0**-8 + 2.0**-40, dtype=torch.float64)
    assert torch_quantize.round_to(x, "bf16").item() == 1.0078125
    x = torch.tensor(1 + 2.0**-11 + 2.0**-40, dtype=torch.float64)
    assert torch_quantize.round_to(x, "fp16").item() == 1 + 2.0**-10


@pytest.mark.parametrize(
    ("call", "arguments", "how"),
    [
        ("quantize", ("mxfp9",), {}),
        ("quantize", (5,), {}),
        ("fake_quantize", ("mxint8", 2), {}),
        ("fake_quantize", ("mxint8",), {"axis": (0, 1)}),
        ("quantize", ("mxint8",), {"block_size": 0}),
        ("quantize", ("mxint8",), {"block_size": (4, 4), "axis": 0}),
        ("quantize", ("mxint8",), {"scale_rule": "ceiling"}),
        ("quantize", ("nvfp4",), {"scale_rule": "floor"}),
        ("quantize", ("mxint8",), {"rounding": "nearest"}),
        ("quantize", ("mxint8",), {"nonfinite": "ignore"}),
        ("round_to", ("mxint8",), {}),
        ("round_to", (mxsim.FloatFormat(9, 3),), {}),
        ("round_to", (mxsim.FloatFormat(8, 22),), {}),
        ("round_to", (mxsim.FloatFormat(5, 30),), {}),
        ("round_to", ("bf16", "up"), {}),
    ],
)
def test_errors_are_those_of_the_front_door(
    call: str, arguments: tuple[Any, ...], how: dict[str, Any]
) -> None:
    x = np.ones((4, 4), np.float32)
    with pytest.raises((TypeError, ValueError)) as theirs:
        getattr(mxsim, call)(x, *arguments, **how)
    with pytest.raises(theirs.type) as ours:
        getattr(torch_quantize, call)(torch.tensor(x), *arguments, **how)
    assert str(ours.value).replace("torch.", "") == str(theirs.value)


def test_errors_about_tensors() -> None:
    quantize = torch_quantize.quantize
    x = torch.ones(4, 4)
    for bad in (x.bool(), x.to(torch.complex64), x.to(torch.float8_e4m3fn)):
        with pytest.raises(TypeError, match=r"x must be real .*got dtype torch"):
            quantize(bad, "mxint8")
    with pytest.raises(TypeError, match=r"x must be a torch\.Tensor; got a ndarray"):
        quantize(np.ones(4), "mxint8")
    with pytest.raises(ValueError, match=f"got {2**53 + 1}"):
        quantize(torch.tensor([1, 2**53 + 1]), "mxint8")
    with pytest.raises(TypeError, match=r"dtype must be torch\.float64.*int8"):
        quantize(x, "mxint8").dequantize(torch.int8)
    for noise, error, match in (
        (None, ValueError, "got None"),
        (np.ones((4, 4), np.uint32), TypeError, "got a ndarray"),
        (x, TypeError, "got dtype torch.float32"),
        (torch.ones(4, dtype=torch.int64), ValueError, r"shape of x, \(4, 4\); got \(4,\)"),
    ):
        with pytest.raises(error, match=match):
            quantize(x, "mxint8", rounding="stochastic", noise=noise)
    with pytest.raises(ValueError, match="noise must be None with rounding 'even'"):
        quantize(x, "mxint8", noise=mxsim.Noise(1))
