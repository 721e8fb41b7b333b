"""The PyTorch quantizer against the Numba one, bit for bit: codes, scales, values, fast path."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import mxsim
from mxsim.backends import torch_elements, torch_quantize
from mxsim.formats import ELEMENTWISE, ROUNDINGS, SCALE_RULES
from tests import inputs, inputs_blocks, oracle
from tests.comparing import assert_same_bits
from tests.inputs import Array
from tests.oracle_elements import ELEMENTS

pytestmark = pytest.mark.usefixtures("single_threaded")

FORMATS = tuple(mxsim.FORMATS)
DTYPES = (np.float32, np.float64)
CUSTOM = tuple(
    mxsim.BlockFormat(f"custom {element}", element)
    for element in (
        mxsim.FloatFormat(1, 0, "none"),
        mxsim.FloatFormat(1, 1, "nan"),
        mxsim.FloatFormat(2, 1, "ieee"),
        mxsim.FloatFormat(3, 0, "none"),
        mxsim.FloatFormat(3, 4, "ieee"),
        mxsim.FloatFormat(5, 0, "none"),
        mxsim.FloatFormat(6, 1, "nan"),
        mxsim.FloatFormat(7, 0, "none"),
        mxsim.IntFormat(0),
        mxsim.IntFormat(2, symmetric=False),
    )
)

each_dtype = pytest.mark.parametrize("dtype", DTYPES)
each_format = pytest.mark.parametrize("fmt", FORMATS)


def rules(fmt: str) -> tuple[str | None, ...]:
    return (None,) if fmt == "nvfp4" else SCALE_RULES


def assert_same(x: Array, fmt: Any, noise: Any = None, **how: Any) -> None:
    """Scales, codes, values in each precision and the fast path are those of the reference."""
    if noise is None and how.get("rounding") == "stochastic":
        noise = inputs_blocks.random_words(x.shape)
    given = torch.tensor(noise) if isinstance(noise, np.ndarray) else noise
    what = f"{fmt} {how} {x.dtype} {x.shape}"
    with np.errstate(all="ignore"):
        want = mxsim.quantize(x, fmt, noise=noise, **how)
        fast = mxsim.fake_quantize(x, fmt, noise=noise, **how)
        narrow, wide = want.dequantize(), want.dequantize(np.float64)
    t = torch.from_numpy(x) if x.flags.writeable and min(x.strides, default=0) > 0 else None
    t = torch.tensor(x) if t is None else t
    got = torch_quantize.quantize(t, fmt, noise=given, **how)
    assert_same_bits(got.scales.numpy(), want.scales, f"{what} scales")
    assert_same_bits(got.codes.numpy(), want.codes, f"{what} codes", x)
    s_t = None if got.tensor_scale is None else got.tensor_scale.item()
    assert s_t == want.tensor_scale, what
    assert_same_bits(got.dequantize().numpy(), narrow, f"{what} float32", x)
    assert_same_bits(got.dequantize(torch.float64).numpy(), wide, f"{what} float64", x)
    values = torch_quantize.fake_quantize(t, fmt, noise=given, **how)
    assert_same_bits(values.numpy(), fast, f"{what} fake_quantize", x)


def corpus(fmt: str, dtype: Any) -> dict[str, Array]:
    """Blocks of rows: thresholds of every rule, ties, random bits, all magnitudes at once."""
    rng = np.random.default_rng(5)
    normal = rng.standard_normal((64, 32))
    gains = rng.normal(0.97, 0.01, (64, 32))  # near the clamp cliff
    spread = normal * np.exp2(rng.normal(0, 12, (64, 32)))
    specials = normal.copy()
    specials[3, 5], specials[7, 31], specials[9, :2] = np.nan, np.inf, (-np.inf, np.nan)
    specials[11], specials[13, ::2], specials[15, 1:] = -0.0, -0.0, 0.0
    blocks = {
        "normal": normal.astype(dtype),
        "gains": gains.astype(dtype),
        "log-normal": spread.astype(dtype),
        "subnormal": (np.round(spread * 64) * 2.0**-149).astype(dtype),
        "specials": specials.astype(dtype),
        "bits": inputs.random_bits(dtype, 192),
        "near": inputs.random_near(dtype, 192),
        "maxima": inputs.maxima_blocks(dtype),
    }
    if fmt in oracle.FORMATS:
        for exponent in inputs.scale_exponents(fmt, dtype):
            blocks[f"ties at {exponent}"] = inputs.tie_blocks(fmt, dtype, exponent)
    return blocks


@each_dtype
@each_format
def test_all_rules_and_roundings(fmt: str, dtype: Any) -> None:
    for x in corpus(fmt, dtype).values():
        for rule, rounding in itertools.product(rules(fmt), ROUNDINGS):
            assert_same(x, fmt, scale_rule=rule, rounding=rounding)


@each_dtype
@pytest.mark.parametrize("fmt", CUSTOM, ids=lambda fmt: fmt.name)
def test_custom_elements(fmt: mxsim.BlockFormat, dtype: Any) -> None:
    for x in (
        inputs.random_bits(dtype, 96),
        inputs.random_near(dtype),
        inputs.maxima_blocks(dtype),
    ):
        for rule, rounding in itertools.product(SCALE_RULES, ROUNDINGS):
            assert_same(x, fmt, scale_rule=rule, rounding=rounding)


@each_dtype
@pytest.mark.parametrize("fmt", [name for name in FORMATS if name in ELEMENTS])
def test_stochastic_rounding_at_the_words_where_it_turns(fmt: str, dtype: Any) -> None:
    element = ELEMENTS[fmt]
    for exponent in (-100, 0, 90):
        x = inputs_blocks.tie_blocks(element, dtype, exponent)
        for rule in SCALE_RULES:
            words = inputs_blocks.deciding_bits(x, element, rule)
            assert_same(x, fmt, words, scale_rule=rule, rounding="stochastic")


@pytest.mark.parametrize("axis", [0, 1, -1])
@each_format
def test_named_noise_along_every_axis(fmt: str, axis: int) -> None:
    x = inputs.random_near(np.float32).ravel()[: 7 * 45 * 13].reshape(7, 45, 13)
    noise = mxsim.Noise(11, 4, 2)
    assert_same(x, fmt, noise, axis=axis, rounding="stochastic")


@each_dtype
@each_format
def test_blocks_of_every_shape(fmt: str, dtype: Any) -> None:
    x = inputs.random_near(dtype).ravel()[: 9 * 10 * 35].reshape(9, 10, 35).copy()
    x.flat[[100, 1000]] = np.nan, -0.0
    for axis, size in itertools.product((0, 1, 2, -1), (1, 2, 7, 8, 16, 35, 1000, "tensor")):
        assert_same(x, fmt, axis=axis, block_size=size)
    for axes in ((0, 1), (2, 0), (-1, -2)):
        for pair in ((1, 1), (3, 4), (16, 2), (9, 10)):
            assert_same(x, fmt, axis=axes, block_size=pair)
            assert_same(x, fmt, axis=axes, block_size=pair, rounding="stochastic")
    assert_same(x[0, 0], fmt)
    assert_same(x[:0], fmt)
    assert_same(x[:, :0], fmt, axis=1)


@each_format
def test_memory_layouts(fmt: str) -> None:
    x = inputs.random_near(np.float32).ravel()[: 64 * 48].reshape(64, 48)
    t = torch.tensor(x)
    for axis in (0, 1):
        for a, b in ((x.T, t.T), (x[::2, 1::3], t[::2, 1::3]), (x[5:, 3], t[5:, 3])):
            along = axis if a.ndim > 1 else 0
            want = mxsim.quantize(a, fmt, axis=along)
            got = torch_quantize.quantize(b, fmt, axis=along)
            assert_same_bits(got.codes.numpy(), want.codes)
            assert got.codes.is_contiguous()
            fast = torch_quantize.fake_quantize(b, fmt, axis=along)
            assert_same_bits(fast.numpy(), want.dequantize())
    broadcast = torch_quantize.fake_quantize(t[:1].expand(64, 48), fmt, axis=0)
    assert_same_bits(
        broadcast.numpy(), mxsim.fake_quantize(np.broadcast_to(x[:1], x.shape), fmt, axis=0)
    )


@each_dtype
@each_format
def test_nonfinite_policies(fmt: str, dtype: Any) -> None:
    for name, x in inputs_blocks.tensors(dtype).items():
        for rule in rules(fmt):
            assert_same(x, fmt, scale_rule=rule, nonfinite="saturate")
        assert_same(x, fmt, axis=0, nonfinite="saturate", rounding="stochastic")
        assert_same(x, fmt, axis=0, rounding="away")
        if name == "specials":
            with pytest.raises(ValueError, match="finite") as ours:
                torch_quantize.quantize(torch.tensor(x), fmt, nonfinite="raise")
            with pytest.raises(ValueError, match="finite") as theirs:
                mxsim.quantize(x, fmt, nonfinite="raise")
            assert str(ours.value) == str(theirs.value)
        else:
            assert_same(x, fmt, nonfinite="raise")


def test_narrow_and_integer_inputs() -> None:
    rng = np.random.default_rng(6)
    x = rng.normal(0, 100, (8, 40))
    for dtype in (np.float16, np.uint8, np.int8, np.int16, np.int32, np.int64):
        assert_same(np.abs(x).clip(0, 127).astype(dtype), "mxfp6_e2m3", scale_rule="rceil")
    want = mxsim.fake_quantize(x.astype(ml_dtypes.bfloat16), "mxfp4_e2m1")
    got = torch_quantize.fake_quantize(torch.tensor(x).to(torch.bfloat16), "mxfp4_e2m1")
    assert_same_bits(got.numpy(), want)


def test_values_of_public_reports() -> None:
    """Worked out by hand, not by the reference: one maximum, E4M3 elements."""

    def blocks(values: list[float], fmt: str, rule: str = "floor") -> tuple[int, list[float]]:
        q = torch_quantize.quantize(torch.tensor(values), fmt, scale_rule=rule)
        return int(q.scales[0]), q.dequantize(torch.float64).tolist()

    x = [957.0, 902.4, 896.0, 895.0, 832.0]
    assert blocks(x, "mxfp8_e4m3") == (128, [896, 896, 896, 896, 832])
    assert blocks(x, "mxfp8_e4m3", "rceil") == (129, [960, 896, 896, 896, 832])
    gains = [0.9990, 0.9375, 0.90625, 0.875, 0.85]
    assert blocks(gains, "mxfp8_e4m3") == (118, [0.875] * 5)
    assert blocks(gains, "mxfp8_e4m3", "even") == (119, [1, 0.9375, 0.875, 0.875, 0.875])
    assert blocks([6.9, 3.0, 0.25], "mxfp4_e2m1", "even") == (127, [6, 3, 0])
    assert blocks([7.0, 3.0, 0.25], "mxfp4_e2m1", "even") == (128, [8, 3, 0])
    ints = [1.999, -1.999, 1.984375, 1 / 128, 3 / 128]
    assert blocks(ints, "mxint8") == (127, [1.984375, -1.984375, 1.984375, 0, 0.03125])
    assert blocks([2.0**-130] * 3 + [2.0**-149], "mxfp8_e4m3") == (0, [2.0**-130] * 3 + [0])
    just_above = float(np.nextafter(np.float32(448 * 1024), np.float32(np.inf)))
    assert blocks([just_above], "mxfp8_e4m3", "rceil") == (138, [458752])
    wide = torch.tensor([448.0, -431.99999999999994], dtype=torch.float64)
    assert torch_quantize.fake_quantize(wide, "mxfp8_e4m3").tolist() == [448, -416]


def test_any_part_of_a_step_goes_up_without_noise() -> None:
    """(q - r) > 0 holds of the smallest float under the largest scale, where q underflows."""
    x = torch.tensor([2.0**127, 2.0**-149, -(2.0**-149), 0.0, -0.0])
    words = torch.zeros(5, dtype=torch.int64)
    q = torch_quantize.quantize(x, "mxfp4_e2m1", rounding="stochastic", noise=words)
    assert q.codes.tolist() == [0b0110, 0b0001, 0b1001, 0b0000, 0b1000]
    q = torch_quantize.quantize(x, "mxfp4_e2m1", rounding="stochastic", noise=words + 256)
    assert q.codes.tolist() == [0b0110, 0b0000, 0b1000, 0b0000, 0b1000]


@pytest.mark.parametrize("element", torch_elements.NATIVE)
def test_the_native_casts_of_a_gpu_do_what_the_arithmetic_does(element: Any) -> None:
    native = torch_elements.NATIVE[element]
    fmt = "mxfp8_e4m3" if element == torch_elements.E4M3 else "mxfp8_e5m2"
    ties = inputs.with_neighbours(inputs.ties(fmt).astype(np.float32))
    y = np.concatenate(
        [ties, inputs.block_maxima(np.float32), inputs.random_bits(np.float32).ravel()]
    )
    y = y[~np.isnan(y)]
    t = torch_elements.saturated(torch.tensor(np.concatenate([y, -y])), element)
    codes = torch_elements.encode_elements(t.clone(), element, "even", None)
    assert torch.equal(torch_elements.encode_elements(t, element, "even", None, native), codes)
    values = torch_elements.round_elements(t.clone(), element, "even", None)
    cast = torch_elements.round_elements(t, element, "even", None, native)
    assert_same_bits(cast.numpy(), values.numpy(), x=t.numpy())
    assert_same_bits(codes.view(native).to(torch.float32).numpy(), values.numpy())


@pytest.mark.parametrize("fmt", [*FORMATS, *CUSTOM], ids=str)
def test_every_code_decodes_to_its_value(fmt: Any) -> None:
    element = (mxsim.FORMATS[fmt] if isinstance(fmt, str) else fmt).element
    finite = np.flatnonzero(np.isfinite(element.values)).astype(np.uint8)
    for dtype, real in ((torch.float32, np.float32), (torch.float64, np.float64)):
        got = torch_elements.decode_elements(torch.tensor(finite), element, dtype).numpy()
        assert_same_bits(got, element.values[finite].astype(real))


@each_format
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_no_value_is_ever_waited_for(fmt: str, rounding: str) -> None:
    """Tensors without values show it: they run through, and give shapes and dtypes."""
    x = torch.empty(6, 70, device="meta")
    noise = mxsim.Noise(1) if rounding == "stochastic" else None
    for nonfinite in ("propagate", "saturate"):
        how: dict[str, Any] = {"rounding": rounding, "noise": noise, "nonfinite": nonfinite}
        y = torch_quantize.fake_quantize(x, fmt, **how)
        assert (y.shape, y.dtype, y.device.type) == ((6, 70), torch.float32, "meta")
        q = torch_quantize.quantize(x.double(), fmt, 0, **how)
        assert (q.codes.shape, q.scales.shape) == ((6, 70), (1, 70))
        assert q.dequantize().shape == (6, 70)
    assert torch_quantize.round_to(x, "fp16", rounding, noise=noise).shape == (6, 70)


def test_results_carry_no_gradient() -> None:
    x = torch.ones(32, requires_grad=True)
    assert not torch_quantize.fake_quantize(x, "mxfp8_e4m3").requires_grad
    assert not torch_quantize.round_to(x, "bf16").requires_grad


def test_input_is_left_as_it_was() -> None:
    x = torch.tensor(inputs.random_near(np.float32))
    before = x.clone()
    for fmt, rounding in itertools.product(FORMATS, ROUNDINGS[:3]):
        torch_quantize.fake_quantize(x, fmt, rounding=rounding)
        torch_quantize.quantize(x, fmt, rounding=rounding)
    for fmt, rounding in itertools.product(ELEMENTWISE, ROUNDINGS[:3]):
        assert torch_quantize.round_to(x, fmt, rounding).data_ptr() != x.data_ptr()
    assert torch.equal(x, before)


@pytest.mark.parametrize("rounding", ["even", "stochastic"])
def test_one_graph_without_breaks(rounding: str) -> None:
    """What torch.compile captures; no compiler is run, which takes a minute or is not there."""
    x = torch.tensor(inputs.random_near(np.float32))
    noise = mxsim.Noise(1, 2, 3) if rounding == "stochastic" else None

    def function(x: Any) -> Any:
        y = torch_quantize.fake_quantize(x, "mxfp8_e4m3", 0, rounding=rounding, noise=noise)
        return torch_quantize.round_to(torch_quantize.fake_quantize(y, "nvfp4"), "bf16", "away")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch's own parts, as they are imported
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        got = compiled(x)
    assert_same_bits(got.numpy(), function(x).numpy())
