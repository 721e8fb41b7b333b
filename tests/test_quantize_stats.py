"""Statistics of a quantization against NumPy, by hand, and for Gaussian blocks in closed form."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import special

import mxsim
from tests import inputs, inputs_blocks, oracle, oracle_blocks
from tests.comparing_blocks import DEFAULT_BLOCK, NAMES
from tests.inputs import Array
from tests.oracle_elements import ELEMENTS, ROUNDINGS

each_name = pytest.mark.parametrize("fmt", NAMES)
each_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)
INF, NAN = math.inf, math.nan


def stats_of(x: Any, fmt: str, *args: Any, **kwargs: Any) -> mxsim.QuantizationStats:
    stats = mxsim.quantize(x, fmt, *args, **kwargs).stats
    assert stats is not None
    return stats


def straightforward(x: Array, q: mxsim.MXArray, axis: Any, block_size: Any) -> dict[str, float]:
    """The same numbers from codes and scales: finite elements of blocks that are not NaN."""
    element = ELEMENTS.get(q.format.name, ELEMENTS["mxfp4_e2m1"])
    wide = (x.astype(np.float32) if q.format.name == "nvfp4" else x).astype(np.float64)
    values, flat = q.dequantize(np.float64), q.scale_values().ravel()
    counted, saturated = np.zeros(x.shape, bool), np.zeros(x.shape, bool)
    blocks_saturated = 0
    lengths = oracle_blocks.block_lengths(x.shape, axis, block_size)
    where = oracle_blocks.block_slices(x.shape, lengths)
    for at, scale in zip(where, flat, strict=True):
        if np.isnan(scale):
            continue
        counted[at] = np.isfinite(wide[at])
        # a negative INT8 may have one more value; NVFP4's largest is decoded in float32
        kind = np.float32 if q.format.name == "nvfp4" else np.float64
        bounds = [
            float(kind(float(element.magnitudes(negative)[-1])) * kind(scale))
            for negative in (True, False)
        ]
        largest = np.where(np.signbit(wide[at]), *bounds)
        saturated[at] = counted[at] & (np.abs(wide[at]) > largest)
        blocks_saturated += bool(saturated[at].any())
    a, b = wide[counted], values[counted]
    n = max(a.size, 1)
    nothing = NAN if a.size == 0 and x.size else 0.0
    power = float(np.square(a).sum())
    error = float(np.square(b - a).sum()) / power if power else 0.0
    return {
        "elements": x.size,
        "blocks": len(where),
        "nonfinite": int((~counted).sum()),
        "saturated": float(saturated.sum()) / n,
        "saturated_blocks": blocks_saturated / max(len(where), 1),
        "flushed": float(((a != 0) & (b == 0)).sum()) / n,
        "relative_error": error + nothing,
        "gain": (float((a * b).sum()) / power if power else 1.0) + nothing,
        "effective_bits": (-math.log2(error) / 2 if error > 0 else INF) + nothing,
    }


def assert_same_stats(
    x: Array, fmt: str, axis: Any = -1, block_size: Any = None, **arguments: Any
) -> None:
    q = mxsim.quantize(x, fmt, axis, block_size, **arguments)
    assert q.stats is not None
    size = DEFAULT_BLOCK[fmt] if block_size is None else block_size
    want = straightforward(x, q, axis, size)
    for name, value in want.items():
        got = getattr(q.stats, name)
        want_value = pytest.approx(value, rel=1e-9, abs=0, nan_ok=True)
        assert got == want_value, f"{fmt} {axis} {arguments} {name}"
    for name in ("elements", "blocks", "nonfinite"):
        assert isinstance(getattr(q.stats, name), int)


def data(dtype: Any) -> Array:
    """Normal numbers with blocks of tiny and of large ones among them; every sum is finite."""
    rng = np.random.default_rng(31)
    x = rng.normal(size=(70, 52)) * np.exp2(rng.integers(-20, 1, (70, 52)))
    x[3], x[4, ::3], x[60] = 0, -0.0, 1.99
    return np.asarray(x.astype(dtype))


@each_name
@each_dtype
def test_finite_data_under_every_rule_and_rounding(fmt: str, dtype: Any) -> None:
    x = data(dtype)
    noise = inputs_blocks.random_words(x.shape)
    for rule in (None,) if fmt == "nvfp4" else oracle.SCALE_RULES:
        for rounding in ROUNDINGS:
            bits = noise if rounding == "stochastic" else None
            assert_same_stats(x, fmt, scale_rule=rule, rounding=rounding, noise=bits)


@each_name
@each_dtype
@pytest.mark.parametrize(
    ("axis", "block_size"),
    [(0, None), (1, 7), (0, 1), (-1, (8, 8)), ((1, 0), (3, 70)), (-1, "tensor")],
)
def test_every_kind_of_block_and_layout(fmt: str, axis: Any, block_size: Any, dtype: Any) -> None:
    x = data(dtype)
    for same in (np.asfortranarray(x), x[::-2, ::2]):
        assert_same_stats(same, fmt, axis, block_size)


@each_name
@each_dtype
@pytest.mark.parametrize("nonfinite", ["propagate", "saturate"])
def test_non_finite_data(fmt: str, dtype: Any, nonfinite: str) -> None:
    x = data(dtype)
    x[0, 0], x[5, 20:22], x[30], x[31, ::5], x[65, 51] = NAN, (INF, 2), INF, -INF, -INF
    x[66, 3:5] = NAN, INF
    for axis, block_size in [(1, None), (0, None), (-1, (8, 8))]:
        assert_same_stats(x, fmt, axis, block_size, nonfinite=nonfinite)
    assert_same_stats(x[28:32], fmt, 1, 1, nonfinite=nonfinite)


@each_name
def test_an_array_of_nothing_but_nan(fmt: str) -> None:
    spread = np.ones((2, 32))
    spread[:, ::16] = INF  # one a block
    for x in (np.full((2, 32), NAN), np.full((2, 32), -INF), spread):
        stats = stats_of(x, fmt)
        assert (stats.elements, stats.nonfinite) == (64, 64)
        assert (stats.saturated, stats.saturated_blocks, stats.flushed) == (0, 0, 0)
        assert all(map(math.isnan, (stats.relative_error, stats.gain, stats.effective_bits)))


@each_name
@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_array_of_nothing(fmt: str, shape: tuple[int, ...]) -> None:
    stats = stats_of(np.zeros(shape), fmt)
    assert (stats.elements, stats.nonfinite, stats.saturated, stats.flushed) == (0, 0, 0, 0)
    assert (stats.relative_error, stats.gain, stats.effective_bits) == (0, 1, INF)


@each_name
def test_infinities_that_saturate_leave_the_others_to_count(fmt: str) -> None:
    x = np.ones((2, 32))
    x[0] = INF
    stats = stats_of(x, fmt, nonfinite="saturate")
    assert stats.nonfinite == 32
    if fmt == "nvfp4":  # a rounded tensor scale
        assert stats.gain == pytest.approx(1, rel=1e-6)
    else:
        assert (stats.relative_error, stats.gain, stats.effective_bits) == (0, 1, INF)
    stats = stats_of(x[:1], fmt, nonfinite="saturate")
    assert all(map(math.isnan, (stats.relative_error, stats.gain, stats.effective_bits)))


@each_name
def test_zeros_have_no_error(fmt: str) -> None:
    stats = stats_of(np.zeros((2, 32)), fmt)
    assert (stats.relative_error, stats.gain, stats.effective_bits) == (0, 1, INF)
    assert (stats.saturated, stats.flushed, stats.nonfinite) == (0, 0, 0)


@pytest.mark.parametrize("fmt", ELEMENTS)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_all_flushed_is_an_error_of_one(fmt: str, dtype: Any) -> None:
    x = np.full((2, 32), 2.0**-149, dtype)  # below half of the smallest element at byte 0
    element = ELEMENTS[fmt]
    if float(element.positive[1]) * 2.0**-127 < 2.0**-147:
        return
    stats = stats_of(x, fmt)
    assert (stats.flushed, stats.gain) == (1, 0)
    assert (stats.relative_error, stats.effective_bits) == (1, 0)
    assert math.copysign(1, stats.effective_bits) == 1  # not printed as -0.00


@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxint8"])
@pytest.mark.parametrize("size", [1e-300, 1e-200, 1e160, 1e300])
def test_float64_whose_squares_leave_its_range(fmt: str, size: float) -> None:
    # shares of an error and a gain, and both known: all is flushed, or saturates under 2^127
    stats = stats_of(np.full((2, 32), size), fmt)
    tiny = size < 1
    assert (stats.flushed, stats.saturated) == ((1, 0) if tiny else (0, 1))
    assert stats.relative_error == pytest.approx(1)
    assert stats.gain == pytest.approx(0, abs=1e-12)
    assert stats.effective_bits == pytest.approx(0, abs=1e-12)


def test_A1_the_share_of_what_floor_saturates() -> None:
    # everyone first thinks it is a bug
    x = np.array([[957, 902.4, 896, 895, 832, 57.79], [1, 1, 1, 1, 1, 1]], np.float32)
    floor, rceil = (stats_of(x, "mxfp8_e4m3", scale_rule=rule) for rule in ("floor", "rceil"))
    assert (floor.elements, floor.blocks) == (12, 2)
    assert floor.saturated == pytest.approx(2 / 12)
    assert floor.saturated_blocks == 0.5
    assert (rceil.saturated, rceil.saturated_blocks) == (0, 0)


def test_A3_a_saturated_cluster_has_a_coherent_bias() -> None:
    x = np.full(32, 1 - 2.0**-20, np.float32)
    floor, rceil = (stats_of(x, "mxfp8_e4m3", scale_rule=rule) for rule in ("floor", "rceil"))
    assert floor.gain == pytest.approx(0.875, rel=1e-5)
    assert floor.effective_bits == pytest.approx(3, rel=1e-4)
    assert floor.saturated == 1
    assert rceil.gain == pytest.approx(1, rel=1e-5)
    assert rceil.saturated == 0


def test_by_hand() -> None:
    # INT8 at scale 1: 1.5 is exact, 1/256 flushed, 1.9999 saturates, -0 is no flush
    x = np.array([1.5, 1 / 256, 1.9999, -0.0])
    stats = stats_of(x, "mxint8")
    assert (stats.elements, stats.blocks, stats.nonfinite) == (4, 1, 0)
    assert (stats.saturated, stats.saturated_blocks, stats.flushed) == (0.25, 1, 0.25)
    power = 2.25 + 2.0**-16 + 1.9999**2
    error = ((1.9999 - 127 / 64) ** 2 + 2.0**-16) / power
    assert stats.relative_error == pytest.approx(error, rel=1e-12)
    assert stats.gain == pytest.approx((2.25 + 1.9999 * 127 / 64) / power, rel=1e-12)
    assert stats.effective_bits == pytest.approx(-math.log2(error) / 2, rel=1e-12)


def test_the_largest_itself_is_not_saturated() -> None:
    for fmt, element in ELEMENTS.items():
        top = float(element.largest)
        x = np.array([top, -top, 2.0**element.emax])
        assert stats_of(x, fmt).saturated == 0
        x[0] = np.nextafter(top, INF)
        assert stats_of(x, fmt).saturated == pytest.approx(1 / 3)


def test_what_came_from_bits_has_no_statistics() -> None:
    q = mxsim.quantize(np.ones(32), "mxint8")
    assert mxsim.MXArray.from_bits(q.codes, q.scales, "mxint8").stats is None


# ---------------------------------------------------------------------------- Gaussian blocks


def gaussian_shares(top: float, n: int = 32) -> tuple[float, float]:
    """P(an element saturates), P(a block maximum does) under floor, for n standard normals.

    The maximum lies in one binade [2^k, 2^(k + 1)), all below 2^(k + 1), and what is above
    top 2^k saturates; F(a) = P(|x| < a) = erf(a / sqrt 2).
    """
    k = np.arange(-60.0, 6)
    high, middle = special.erf(np.array([2 * 2.0**k, top * 2.0**k]) / math.sqrt(2))
    elements = (high - middle) * high ** (n - 1)
    return float(elements.sum()), float((high**n - middle**n).sum())


@pytest.mark.parametrize(
    ("fmt", "elements", "blocks"),
    [("mxfp8_e4m3", 0.857, 16.90), ("mxfp4_e2m1", 2.343, 29.60), ("mxfp8_e5m2", 0.857, 16.90)],
)
def test_F5_gaussian_blocks_saturate_as_often_as_they_should(
    fmt: str, elements: float, blocks: float
) -> None:
    p, p_block = gaussian_shares(float(mxsim.FORMATS[fmt].element.top))
    assert (round(100 * p, 3), round(100 * p_block, 2)) == (elements, blocks)
    n = 40_000
    for axis in (0, 1):
        x = np.random.default_rng(32 + axis).normal(size=(n, 32)).astype(np.float32)
        stats = stats_of(x if axis else np.ascontiguousarray(x.T), fmt, axis)
        assert (stats.elements, stats.blocks) == (32 * n, n)
        spread = math.sqrt(p_block * (1 - p_block) / n)
        assert abs(stats.saturated_blocks - p_block) < 4 * spread
        # the elements of one block depend on each other: the blocks' own shares tell the error
        scale = np.exp2(np.floor(np.log2(np.abs(x).max(axis=1, keepdims=True).astype(np.float64))))
        share = (np.abs(x) > scale * mxsim.FORMATS[fmt].element.top).mean(axis=1)
        assert abs(stats.saturated - p) < 4 * share.std() / math.sqrt(n)
        assert stats.saturated == pytest.approx(share.mean(), rel=1e-12)


def test_rceil_saturates_nothing() -> None:
    x = np.random.default_rng(34).normal(size=(1000, 32)).astype(np.float32)
    for fmt in ELEMENTS:
        for rule in ("rceil", "ceil"):
            assert stats_of(x, fmt, scale_rule=rule).saturated == 0
