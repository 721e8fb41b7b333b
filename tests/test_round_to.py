"""bf16 and fp16 by `round_to`, against the oracle and against the casts of ml_dtypes and NumPy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxsim
from tests import inputs, oracle
from tests.comparing import assert_same_bits
from tests.oracle_elements import ROUNDINGS

NAMES = tuple(oracle.IEEE)


def hard_points(name: str, dtype: Any) -> inputs.Array:
    """Every value and midpoint of the format with its neighbours, both signs, and specials."""
    grid = oracle.ieee_grid_array(name)
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2])
    with np.errstate(over="ignore", under="ignore"):
        points = inputs.with_neighbours(points.astype(dtype))
    ends = [0.0, np.inf, np.nan, float(np.finfo(dtype).max), float(np.finfo(dtype).tiny)]
    everything = np.concatenate([points, inputs.block_maxima(dtype), np.array(ends, dtype)])
    return np.concatenate([everything, -everything])


@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_every_tie_and_its_neighbours(name: str, rounding: str, dtype: Any) -> None:
    x = hard_points(name, dtype)
    expected = oracle.round_ieee_bulk(name, x, rounding).astype(dtype)
    assert_same_bits(mxsim.round_to(x, name, rounding), expected, f"{name} {rounding}", x)


@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_random_bits_against_the_scalar_oracle(name: str, rounding: str, dtype: Any) -> None:
    x = np.concatenate([inputs.random_bits(dtype)[:8], inputs.random_near(dtype)[:8]])
    wide = oracle.widen(x).ravel().tolist()
    expected = np.array([oracle.round_ieee(name, v, rounding) for v in wide], dtype)
    got = mxsim.round_to(x, name, rounding)
    assert_same_bits(got, expected.reshape(x.shape), f"{name} {rounding}", x)


def test_nearest_even_against_ml_dtypes_and_numpy() -> None:
    for name, cast in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
        x = hard_points(name, np.float32)
        with np.errstate(over="ignore"):
            expected = x.astype(cast).astype(np.float32)
        assert_same_bits(mxsim.round_to(x, name), expected, name, x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_every_value_is_a_fixed_point(name: str, dtype: Any) -> None:
    grid = oracle.ieee_grid_array(name)[:-1].astype(dtype)
    x = np.concatenate([grid, -grid])
    for rounding in oracle.ROUNDINGS:
        assert_same_bits(mxsim.round_to(x, name, rounding), x, f"{name} {rounding}", x)


@pytest.mark.parametrize(
    ("name", "largest", "tie"),
    [("fp16", 65504.0, 65520.0), ("bf16", 2.0**128 - 2.0**120, 2.0**128 - 2.0**119)],
)
def test_overflow_begins_at_the_midpoint_past_the_largest(
    name: str, largest: float, tie: float
) -> None:
    x = np.array([np.nextafter(tie, 0), tie, -tie, 1e300, -1e300, np.inf])
    inf = np.inf
    expected = {
        "even": [largest, inf, -inf, inf, -inf, inf],  # the tie is with the even 2^(emax + 1)
        "away": [largest, inf, -inf, inf, -inf, inf],
        "zero": [largest, largest, -largest, largest, -largest, inf],
    }
    for rounding, values in expected.items():
        assert mxsim.round_to(x, name, rounding).tolist() == values, rounding


def test_shapes_and_layouts() -> None:
    x = inputs.random_near(np.float32)
    expected = oracle.round_ieee_bulk("bf16", x, "even").astype(np.float32)
    for view, wanted in [
        (x.T, expected.T),
        (x[::-1, ::3], expected[::-1, ::3]),
        (np.asfortranarray(x), expected),
        (x[:0], expected[:0]),
        (x[3, 4], expected[3, 4]),
    ]:
        assert_same_bits(np.asarray(mxsim.round_to(view, "bf16")), np.asarray(wanted))


@pytest.mark.parametrize("shape", [(), (1,), (8, 32), (0, 3)])
def test_out_is_written_and_returned(shape: tuple[int, ...]) -> None:
    x = np.full(shape, 1.001, np.float32)
    out = np.zeros_like(x)
    assert mxsim.round_to(x, "bf16", out=out) is out
    assert (out == 1).all()
    assert mxsim.round_to(x, "bf16", out=x) is x
    assert (x == 1).all()


# ----------------------------------------------------------------------------------------- fp32


def noise_for(rounding: str) -> mxsim.Noise | None:
    return mxsim.Noise(7) if rounding == "stochastic" else None


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", ["fp32", mxsim.FloatFormat(9, 30), mxsim.FloatFormat(11, 52)])
def test_float32_has_room_for_every_float32(rounding: str, fmt: Any) -> None:
    near = inputs.random_near(np.float32)
    for x in (near, inputs.random_bits(np.float32), near.T, near[::2, ::3], near[:0], near[1, 1]):
        noise = noise_for(rounding)
        got = mxsim.round_to(x, fmt, rounding, noise=noise)
        assert_same_bits(np.asarray(got), np.asarray(x), rounding)
        assert not np.shares_memory(got, x)
    out = np.zeros_like(near)
    assert mxsim.round_to(near, fmt, rounding, out, noise=noise_for(rounding)) is out
    assert_same_bits(out, near)
    assert mxsim.round_to(out, fmt, rounding, out, noise=noise_for(rounding)) is out
    assert_same_bits(out, near)


def test_float64_has_room_for_every_float64() -> None:
    x = inputs.random_bits(np.float64)
    assert_same_bits(mxsim.round_to(x, mxsim.FloatFormat(11, 52), "zero"), x)


def test_float64_is_rounded_once_to_float32() -> None:
    points = [inputs.random_near(np.float64).ravel(), inputs.random_bits(np.float64).ravel()]
    rng = np.random.default_rng(8)
    whole = rng.integers(2**23, 2**24, 500) + 0.5  # ties, their neighbours, and in the subnormals
    exponents = rng.integers(-149, 104, 500)
    ties = inputs.with_neighbours(np.ldexp(whole, exponents))
    ends = [0.0, 2.0**-150, 2.0**-149, 2.0**128, 2.0**128 - 2.0**103, 2.0**128 - 2.0**104]
    tiny = np.ldexp(rng.integers(0, 2**9, 200) + 0.5, -149)
    x = np.concatenate([*points, ties, inputs.with_neighbours(np.array(ends)), tiny])
    x = np.concatenate([x, -x, [np.inf, -np.inf, np.nan]])
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = x.astype(np.float32).astype(np.float64)
    assert_same_bits(mxsim.round_to(x, "fp32"), nearest, "even", x)
    step = np.ldexp(1.0, np.maximum(np.frexp(x)[1] - 1, -126) - 23)
    finite = np.isfinite(x)
    with np.errstate(over="ignore", invalid="ignore"):
        below = np.where(finite, np.floor(np.abs(x) / step) * step, np.abs(x))
        above = np.where(finite & (below < np.abs(x)), below + step, below)
    largest = float(np.finfo(np.float32).max)
    toward_zero = np.where(finite, np.minimum(below, largest), below)
    assert_same_bits(mxsim.round_to(x, "fp32", "zero"), np.copysign(toward_zero, x), "zero", x)
    with np.errstate(invalid="ignore"):
        up = np.abs(x) - below >= step / 2
    away = np.where(up, above, below)
    away = np.where(away > largest, np.inf, away)
    assert_same_bits(mxsim.round_to(x, "fp32", "away"), np.copysign(away, x), "away", x)
    got = np.abs(mxsim.round_to(x, "fp32", "stochastic", noise=mxsim.Noise(3)))
    either = [np.where(each > largest, np.inf, each) for each in (below, above)]
    assert ((got == either[0]) | (got == either[1]) | np.isnan(x)).all()


def test_stochastic_rounding_to_float32_is_unbiased() -> None:
    n = 20_000
    x = np.full(n, 1 + 0.3 * 2.0**-23)
    up = mxsim.round_to(x, "fp32", "stochastic", noise=mxsim.Noise(5)) > 1
    assert abs(up.mean() - 0.3) < 4 * (0.3 * 0.7 / n) ** 0.5


def test_a_float32_site_is_a_copy() -> None:
    rounder = mxsim.SiteFormat("fp32").rounder()
    assert rounder is not None
    x = inputs.random_near(np.float32)
    out = np.empty_like(x)
    assert rounder(x, -1, out) is out
    assert_same_bits(out, x)
    wide = x.astype(np.float64) / 3
    expected = wide.astype(np.float32).astype(np.float64)
    assert_same_bits(rounder(wide, -1, wide), expected)
