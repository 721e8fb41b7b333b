"""Clamping on paper against the quantizer: shares, coherent bias, the cliff, the code grid."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import integrate, special, stats

import mxsim
from mxsim.formats import FORMATS, SCALE_RULES, BlockFormat
from mxsim.theory.clamp import bias_modes, clamp_shares, coherent_bias
from mxsim.theory.cliff import (
    SIGNIFICAND,
    THRESHOLD,
    TOP,
    cliff,
    cliff_bias,
    cliff_law,
    grid_bias,
    largest_grid_bias,
)
from mxsim.theory.laws import Law, from_cdf, gaussian, lognormal

Array = NDArray[Any]

E8M0 = tuple(f for f in FORMATS.values() if f.scale == "e8m0")
CUSTOM = BlockFormat("e3m1_nan", mxsim.FloatFormat(3, 1, "nan"))  # its top is 1
LAWS: dict[str, tuple[Law, Any]] = {
    "N(0, 1)": (gaussian(), lambda rng, n: rng.standard_normal(n)),
    "N(0, 0.3)": (gaussian(0, 0.3), lambda rng, n: 0.3 * rng.standard_normal(n)),
    "lognormal 0.1": (lognormal(1, 0.1), lambda rng, n: np.exp(0.1 * rng.standard_normal(n))),
    "lognormal 1": (lognormal(1, 1), lambda rng, n: np.exp(rng.standard_normal(n))),
    "N(0.97, 0.01)": (gaussian(0.97, 0.01), lambda rng, n: rng.normal(0.97, 0.01, n)),
    "N(1.2, 0.01)": (gaussian(1.2, 0.01), lambda rng, n: rng.normal(1.2, 0.01, n)),
    "-N(0.97, 0.01)": (gaussian(-0.97, 0.01), lambda rng, n: -rng.normal(0.97, 0.01, n)),
}
FOUR_SIGMA = 2 * stats.norm.sf(4)


@cache
def draws(law: str, blocks: int, size: int) -> Array:
    """(blocks, size) in float64: no rounding but the quantizer's."""
    values: Array = LAWS[law][1](np.random.default_rng(7), (blocks, size))
    return values


def clamped(x: Array, q: mxsim.MXArray) -> Array:
    """x beyond the largest of its block's scale set to it."""
    element = q.format.element
    scales = np.ldexp(1.0, q.scales.astype(int) - 127)
    down = 2.0 if q.format.name == "mxint8_asymmetric" else element.largest
    limited: Array = np.clip(x, -down * scales, element.largest * scales)
    return limited


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize(
    ("fmt", "elements", "blocks"), [("mxfp8_e4m3", 0.857, 16.90), ("mxfp4_e2m1", 2.343, 29.60)]
)
def test_known_shares(fmt: str, elements: float, blocks: float) -> None:
    found = clamp_shares(gaussian(), fmt)
    assert round(100 * found.elements, 3) == elements
    assert round(100 * found.blocks, 2) == blocks
    # powers of two change nothing, other factors do
    assert clamp_shares(gaussian(sd=0.25), fmt) == found
    assert clamp_shares(gaussian(sd=0.3), fmt).blocks != pytest.approx(found.blocks, rel=1e-3)


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("size", [8, 16, 32, 64])
@pytest.mark.parametrize("law", LAWS)
def test_shares_against_the_quantizer(law: str, size: int, rule: str) -> None:
    n = 5000
    x = draws(law, n, size)
    for fmt in (*E8M0, CUSTOM):
        stats_ = mxsim.quantize(x, fmt, block_size=size, scale_rule=rule).stats
        assert stats_ is not None
        expected = clamp_shares(LAWS[law][0], fmt, size, rule)
        # blocks: exact binomial tails at 4 sigma
        count = round(stats_.saturated_blocks * n)
        p = min(max(expected.blocks, 0.0), 1.0)
        tail = min(stats.binom.cdf(count, n, p), stats.binom.sf(count - 1, n, p))
        assert tail > FOUR_SIGMA / 2, (fmt.name, stats_.saturated_blocks, expected)
        # elements: Bernstein's inequality at the same level, which holds for rare events too
        level = math.log(2 / FOUR_SIGMA)
        bound = math.sqrt(2 * expected.element_variance * level / n) + 2 * level / (3 * n)
        assert abs(stats_.saturated - expected.elements) <= bound, (fmt.name, expected)
        if rule in ("rceil", "ceil"):
            assert expected.elements == expected.blocks == 0


def test_the_variance_of_a_blocks_share() -> None:
    n = 60_000
    for fmt, law in (("mxfp8_e4m3", "N(0, 1)"), ("mxfp4_e2m1", "lognormal 1")):
        x = draws(law, n, 32)
        q = mxsim.quantize(x, fmt)
        share = (clamped(x, q) != x).mean(axis=1)
        expected = clamp_shares(LAWS[law][0], fmt)
        squares = (share - share.mean()) ** 2
        assert abs(squares.mean() - expected.element_variance) < 4 * squares.std() / math.sqrt(n)
        error = math.sqrt(expected.element_variance / n)
        assert abs(share.mean() - expected.elements) < 4 * error
        independent = expected.elements * (1 - expected.elements) / 32
        assert expected.element_variance > 1.1 * independent  # elements of a block go together


def test_blocks_of_one() -> None:
    # alone, an element saturates iff its own significand lies beyond top
    found = clamp_shares(gaussian(), "mxfp4_e2m1", 1)
    octaves = 2.0 ** np.arange(-200, 10)
    share = (special.erf(2 * octaves / 2**0.5) - special.erf(1.5 * octaves / 2**0.5)).sum()
    assert found.elements == pytest.approx(share, abs=1e-14)
    assert found.blocks == pytest.approx(share, abs=1e-14)
    assert found.element_variance == pytest.approx(share * (1 - share), abs=1e-14)


def test_the_ends_of_the_scales() -> None:
    # E8M0 ends at 2^127: beyond it all saturates; below 2^-127 the scale is too large for any to
    assert clamp_shares(gaussian(2.0**140, 2.0**130), "mxfp4_e2m1").elements == 1
    assert clamp_shares(gaussian(2.0**-140, 2.0**-150), "mxfp8_e4m3").blocks == 0
    (mode,) = bias_modes(gaussian(2.0**-140, 2.0**-150), "mxfp8_e4m3")
    assert (mode.exponent, mode.probability) == (-127, 1)
    assert mode.bias.total == -1  # below half of the smallest element, 2^-10 2^-127
    x = np.random.default_rng(0).normal(2.0**130, 2.0**128, (4000, 32))
    stats_ = mxsim.quantize(x, "mxfp4_e2m1").stats
    assert stats_ is not None
    expected = clamp_shares(gaussian(2.0**130, 2.0**128), "mxfp4_e2m1")
    assert expected.elements == pytest.approx(special.ndtr(1.0))  # one sd below the mean
    error = 4 * math.sqrt(expected.element_variance / 4000)
    assert abs(stats_.saturated - expected.elements) < error


# ---------------------------------------------------------------- bias


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("law", ["N(0.97, 0.01)", "N(1.2, 0.01)", "N(0, 1)", "-N(0.97, 0.01)"])
def test_bias_against_the_quantizer(law: str, rule: str) -> None:
    n = 4000
    x = draws(law, n, 32)
    power = (x * x).sum()
    for fmt in (*E8M0, CUSTOM):
        q = mxsim.quantize(x, fmt, scale_rule=rule)
        expected = coherent_bias(LAWS[law][0], fmt, 32, rule)
        total = (x * q.dequantize(np.float64)).sum() / power - 1
        clamp = (x * clamped(x, q)).sum() / power - 1
        assert abs(total - expected.total) <= 4 * expected.total_sd / math.sqrt(n) + 1e-15
        assert abs(clamp - expected.clamp) <= 4 * expected.clamp_sd / math.sqrt(n) + 1e-15
        assert expected.rounding == expected.total - expected.clamp


def test_minus_two_in_integers() -> None:
    n = 10_000  # negatives that symmetric INT8 clamps at -127 / 64 and asymmetric rounds to -2
    x = -np.random.default_rng(12).normal(0.99, 0.003, (n, 8))
    found = []
    for fmt in ("mxint8", "mxint8_asymmetric"):
        expected = coherent_bias(gaussian(-0.99, 0.003), fmt, 8)
        measured = (x * mxsim.fake_quantize(x, fmt, block_size=8)).sum() / (x * x).sum() - 1
        error = 4 * expected.total_sd / math.sqrt(n)
        assert abs(measured - expected.total) < error
        found.append(expected)
    assert abs(found[0].total - found[1].total) > 2 * error
    assert found[0].clamp < found[1].clamp == pytest.approx(0, abs=1e-14)


def test_the_measured_point_on_the_cliff() -> None:
    # measured for the project elsewhere: -9.36 % and 95.7 %, 400 draws of 512 gammas
    law = gaussian(0.97, 0.01)
    bias, shares = coherent_bias(law, "mxfp8_e4m3"), clamp_shares(law, "mxfp8_e4m3")
    blocks = 400 * 512 / 32
    half_digit = 0.5e-4
    assert abs(bias.total + 0.0936) < 4 * bias.total_sd / math.sqrt(blocks) + half_digit
    error = math.sqrt(shares.element_variance / blocks)
    assert abs(shares.elements - 0.957) < 4 * error + 10 * half_digit


@pytest.mark.parametrize("law", ["N(0.97, 0.01)", "-N(0.97, 0.01)", "lognormal 0.1"])
@pytest.mark.parametrize("fmt", ["mxfp8_e4m3", "mxfp4_e2m1"])
def test_modes_against_the_quantizer(law: str, fmt: str) -> None:
    n = 20_000
    x = draws(law, n, 32)
    q = mxsim.quantize(x, fmt)
    power = (x * x).sum(axis=1)
    modes = bias_modes(LAWS[law][0], fmt)
    assert sum(m.probability for m in modes) == pytest.approx(1, abs=1e-5)
    for mode in modes:
        here = q.scales[:, 0].astype(int) - 127 == mode.exponent
        assert stats.binomtest(int(here.sum()), n, mode.probability).pvalue > FOUR_SIGMA
        if here.sum() < 100:
            continue
        for values, mean, sd in (
            (q.dequantize(np.float64), mode.bias.total, mode.bias.total_sd),
            (clamped(x, q), mode.bias.clamp, mode.bias.clamp_sd),
        ):
            bias = ((x * values).sum(axis=1) / power)[here] - 1
            count = len(bias)
            if (bias != 0).sum() < 100:  # too rare for its spread to be measured
                assert abs(mean) < 1e-5
                continue
            assert abs(bias.mean() - mean) < 4 * bias.std() / math.sqrt(count)
            kurtosis = stats.kurtosis(bias, fisher=False)
            error = bias.std() * math.sqrt((kurtosis - 1) / (4 * count))
            # first order in the spread of the block's power, relative sd 0.04 at most
            assert abs(bias.std() - sd) < 4 * error + 0.01 * sd


@pytest.mark.parametrize(("median", "size"), [(1.0, 8), (0.9, 4)])
def test_the_mean_of_a_ratio_is_not_the_ratio_of_means(median: float, size: int) -> None:
    n = 1_600_000 // size  # short blocks: the difference is of order 1 / size
    law = lognormal(median, 0.1)
    x = median * np.exp(0.1 * np.random.default_rng(11).standard_normal((n, size)))
    q = mxsim.quantize(x, "mxfp4_e2m1", block_size=size)
    bias = (x * q.dequantize(np.float64)).sum(axis=1) / (x * x).sum(axis=1) - 1
    for mode in bias_modes(law, "mxfp4_e2m1", size, least=0.1):
        here = bias[q.scales[:, 0].astype(int) - 127 == mode.exponent]
        assert abs(here.mean() - mode.bias.total) < 4 * here.std() / math.sqrt(len(here))
    error = bias.std() / math.sqrt(n)
    assert abs(bias.mean() - coherent_bias(law, "mxfp4_e2m1", size).total) > 6 * error


def test_on_the_cliff_the_law_of_the_bias_has_two_modes() -> None:
    low, high = bias_modes(gaussian(0.97, 0.01), "mxfp8_e4m3")
    past = 1 - special.ndtr(3.0) ** 32  # the maximum of 32 beyond 1, three sd above the mean
    assert high.probability == pytest.approx(past, rel=1e-12)
    assert high.bias.clamp == pytest.approx(0, abs=1e-15)
    assert low.bias.clamp == pytest.approx(0.875 / 0.97 - 1, abs=2e-4)
    together = coherent_bias(gaussian(0.97, 0.01), "mxfp8_e4m3")
    assert together.total == pytest.approx(
        low.probability * low.bias.total + high.probability * high.bias.total, abs=2e-5
    )


def test_stochastic_rounding_leaves_clamping_alone() -> None:
    n = 4000
    for law in ("N(0.97, 0.01)", "N(1.2, 0.01)"):
        x = draws(law, n, 32)
        q = mxsim.quantize(x, "mxfp8_e4m3", rounding="stochastic", noise=mxsim.Noise(3))
        products, power = (x * q.dequantize(np.float64)).sum(axis=1), (x * x).sum(axis=1)
        expected = coherent_bias(LAWS[law][0], "mxfp8_e4m3")
        rest = products - (1 + expected.clamp) * power
        assert abs(rest.mean()) < 4 * rest.std() / math.sqrt(n)
    assert abs(expected.rounding) > 10 * rest.std() / math.sqrt(n) / power.mean()  # would be seen


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("t", [-3.0, -0.2, 0.5, 0.97, 1.0, 4.0, math.inf])
def test_partial_moments_by_quadrature(t: float) -> None:
    for law, density, low in (
        (gaussian(0.4, 0.7), lambda x: stats.norm.pdf(x, 0.4, 0.7), -10.0),
        (lognormal(1.5, 0.4), lambda x: stats.lognorm.pdf(x, 0.4, scale=1.5), 0.0),
    ):
        found = law.partial(np.array(t))
        for j in range(5):
            high = max(low, min(t, 300.0))
            expected, _ = integrate.quad(
                lambda x, j=j, f=density: x**j * f(x), low, high, epsabs=1e-13, limit=200
            )
            assert found[j] == pytest.approx(expected, abs=1e-11)


def test_laws_by_their_cdf() -> None:
    t = np.linspace(0.85, 1.2, 41)
    by_cdf = from_cdf(lambda x: special.ndtr((x - 1) / 0.02), 0.5, 1.5)
    np.testing.assert_allclose(by_cdf.partial(t), gaussian(1, 0.02).partial(t), atol=1e-13)
    uniform = from_cdf(lambda x: np.clip(x, 0, 1), 0.0, 1.0)
    inside = np.clip(t, 0, 1)
    for j in range(5):
        np.testing.assert_allclose(uniform.partial(t)[j], inside ** (j + 1) / (j + 1), atol=1e-14)
    found = clamp_shares(uniform, "mxfp4_e2m1", 4)
    octaves = 2.0 ** -np.arange(1, 60)
    assert found.blocks == pytest.approx(((2 * octaves) ** 4 - (1.5 * octaves) ** 4).sum())
    law = lognormal(0.9, 0.1)
    heavy = from_cdf(lambda x: stats.lognorm.cdf(x, 0.1, scale=0.9), 0.0, 4.0)
    assert coherent_bias(heavy, "mxint8").total == pytest.approx(
        coherent_bias(law, "mxint8").total, abs=1e-11
    )


# ---------------------------------------------------------------- the cliff


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("fmt", E8M0, ids=lambda f: f.name)
def test_the_cliff_against_the_quantizer(fmt: BlockFormat, rule: str) -> None:
    points = 4096
    m = 2 ** ((np.arange(points) + 0.5) / points)
    law = cliff(fmt, rule)
    for octave in (-3, 0, 5):
        q = mxsim.quantize(np.ldexp(m, octave)[:, None], fmt, block_size=1, scale_rule=rule)
        values = np.ldexp(q.dequantize(np.float64)[:, 0], -octave)
        inside = clamped(np.ldexp(m, octave)[:, None], q)[:, 0] != np.ldexp(m, octave)
        np.testing.assert_array_equal(inside, (m > law.begin) & (m < law.end))
        assert (values[inside] == law.begin).all()
        bias = np.where(inside, values / m - 1, 0)
        np.testing.assert_allclose(cliff_bias(m, fmt, rule), bias, rtol=0, atol=1e-15)
    # midpoint rule: at each of the two ends half a step of at most the depth
    assert abs(bias.mean() - law.mean) <= abs(law.depth) / points + 1e-7
    assert abs(inside.mean() - law.share) <= 1 / points
    if inside.any():
        assert bias.min() == pytest.approx(law.depth, abs=1.5 * math.log(2) / points)
    else:
        assert (law.depth, law.share, law.mean, law.begin) == (0, 0, 0, law.end)


def test_cliff_by_hand() -> None:
    assert cliff("mxfp8_e4m3").depth == -0.125
    assert cliff("mxfp6_e2m3").depth == -0.0625
    assert cliff("mxfp4_e2m1").depth == -0.25
    assert cliff("mxint8").depth == -1 / 128
    assert cliff("mxfp8_e4m3").mean == pytest.approx((0.125 - math.log(8 / 7)) / math.log(2))
    assert cliff("mxfp8_e4m3", "even").end == 1.9375
    assert cliff_law().bias.subs({TOP: 1.5, SIGNIFICAND: 1.6, THRESHOLD: 2}) == -0.0625


# ---------------------------------------------------------------- the grid


@pytest.mark.parametrize("sd", [0.0005, 0.003, 0.01, 0.02])
def test_the_grid_alone(sd: float) -> None:
    for fmt, spacing in (("mxfp8_e4m3", 1 / 8), ("mxfp6_e2m3", 1 / 8), ("mxfp4_e2m1", 1 / 2)):
        for mean in (1.2, 1.3, 1.31, 1.4):
            found = grid_bias(mean, sd, spacing)
            for rule in SCALE_RULES:  # the same under any: scales are powers of two
                exact = coherent_bias(gaussian(mean, sd), fmt, 32, rule)
                assert found == pytest.approx(exact.total, abs=1e-13), (fmt, mean, rule)
            if fmt == "mxfp8_e4m3":
                x = np.random.default_rng(5).normal(mean, sd, (1000, 32))
                gain = (x * mxsim.fake_quantize(x, fmt, scale_rule="rceil")).sum() / (x * x).sum()
                error = exact.total_sd / math.sqrt(1000)
                assert abs(gain - 1 - found) <= 4 * error + 1e-15


def test_the_grid_effect_goes_out_with_the_spread() -> None:
    spacing, mean = 1 / 8, 1.1875 + 1 / 32  # a quarter of a spacing past a half-way point
    at_rest = grid_bias(mean, 0.0, spacing)
    assert at_rest == 1.25 / mean - 1
    sizes = [abs(grid_bias(mean, s * spacing, spacing)) for s in (0.05, 0.1, 0.2, 0.3, 0.5)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 0.02 * abs(at_rest)
    one = spacing / (math.pi * mean) * math.exp(-2 * math.pi**2 * 0.3**2)
    assert sizes[3] == pytest.approx(one, rel=0.03)  # the first harmonic, at its crest


@pytest.mark.parametrize("rule", SCALE_RULES)
@pytest.mark.parametrize("fmt", E8M0, ids=lambda f: f.name)
def test_the_largest_grid_bias(fmt: BlockFormat, rule: str) -> None:
    points = 20_000
    m = 2 ** ((np.arange(points) + 0.5) / points)
    q = mxsim.quantize(m[:, None], fmt, block_size=1, scale_rule=rule)
    ends = cliff(fmt, rule)
    inside = (m > ends.begin) & (m < ends.end)
    bias = np.abs(q.dequantize(np.float64)[:, 0] / m - 1)[~inside].max()
    largest = largest_grid_bias(fmt, rule)
    assert largest - math.log(2) / points <= bias <= largest
    if fmt.element.bits < 8 or fmt.name.startswith("mxfp8"):
        assert largest == 1 / (2 ** (fmt.element.man_bits + 1) + 1)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: clamp_shares(gaussian(), "nvfp4"), ValueError, "E8M0 scale; got nvfp4"),
        (lambda: coherent_bias(gaussian(), "nvfp4"), ValueError, "E8M0 scale; got nvfp4"),
        (lambda: cliff("nvfp4"), ValueError, "E8M0 scale; got nvfp4"),
        (lambda: clamp_shares(gaussian(), "mxint8", 0), ValueError, "block_size .* got 0"),
        (lambda: clamp_shares(gaussian(), "mxint8", "tensor"), TypeError, "block_size"),  # type: ignore[arg-type]
        (lambda: clamp_shares(gaussian(), "mxint8", 8, "up"), ValueError, "scale_rule"),
        (lambda: clamp_shares("normal", "mxint8"), TypeError, "law must be a Law"),  # type: ignore[arg-type]
        (lambda: gaussian(sd=0), ValueError, "sd must be positive and finite; got 0"),
        (lambda: lognormal(-1), ValueError, "median must be positive"),
        (lambda: from_cdf(special.ndtr, 0.0, 9.0), ValueError, "cdf must go from 0 at low"),
        (lambda: from_cdf(special.ndtr, 9.0, 0.0), ValueError, "low < high"),
        (lambda: cliff_bias(2.0, "mxint8"), ValueError, r"must lie in \[1, 2\); got 2.0"),
        (lambda: grid_bias(1.0, 1e-9, 0.1), ValueError, "at least spacing / 1000"),
        (lambda: grid_bias(-1.0, 0.1, 0.1), ValueError, "mean must be positive"),
    ],
)
def test_refusals(call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call()
