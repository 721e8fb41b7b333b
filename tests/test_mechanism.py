"""Clamp statistics, their closed form, the parts of an error, the error through depth."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim import proxy
from mxsim.mechanism import clamp_statistics, error_parts, forward_error, gaussian_clamp
from mxsim.paired import trajectory_divergence
from mxsim.precision import SITES, PrecisionScheme, SiteFormat, precision_of

CFG = mxsim.ProxyConfig(width=64, depth=2, batch=64)


def point(cfg: mxsim.ProxyConfig = CFG) -> tuple[Any, Any, Any]:
    params = mxsim.init_params(cfg)
    x, y = mxsim.make_batches(cfg, mxsim.make_teacher(cfg)).at(0)
    return params, x, y


# Shares measured for the project elsewhere, in percent, before rounding.
@pytest.mark.parametrize(
    ("fmt", "elements", "blocks"), [("mxfp8_e4m3", 0.857, 16.90), ("mxfp4_e2m1", 2.343, 29.60)]
)
def test_the_closed_form_is_the_known_one(fmt: str, elements: float, blocks: float) -> None:
    found = gaussian_clamp(fmt)
    assert round(100 * found.elements, 3) == elements
    assert round(100 * found.blocks, 2) == blocks


@pytest.mark.parametrize("rule", ["floor", "even", "ceil", "rceil"])
@pytest.mark.parametrize("size", [8, 32])
@pytest.mark.parametrize("fmt", ["mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8"])
def test_the_closed_form_against_the_quantizer(fmt: str, size: int, rule: str) -> None:
    n = 40_000
    x = np.random.default_rng(1).standard_normal((n, size)).astype(np.float32)
    stats = mxsim.quantize(x, fmt, block_size=size, scale_rule=rule).stats
    assert stats is not None
    expected = gaussian_clamp(fmt, size, rule)
    error = np.sqrt(expected.blocks * (1 - expected.blocks) / n)
    assert abs(stats.saturated_blocks - expected.blocks) <= 4 * error
    # elements of a block go together: at most a block's worth of variance
    assert abs(stats.saturated - expected.elements) <= 4 * np.sqrt(expected.elements / n) + 1e-12


def test_clamp_statistics_are_of_the_tensors_in_the_step() -> None:
    params, x, y = point()
    found = clamp_statistics(params, x, y, CFG, mxsim.scheme("all_e4m3"))
    assert set(found) == {(site, k) for site in SITES for k in range(2)}
    for k in range(2):
        by_hand = mxsim.quantize(params[k]["w1"], "mxfp8_e4m3", 1).stats
        assert found["fc1_fprop_w", k] == by_hand
        assert found["ln_gamma", k].saturated == 0  # gammas of 1 sit on the grid
    # The first layer norm's output is Gaussian to a good approximation.
    first, expected = found["fc1_fprop_x", 0], gaussian_clamp("mxfp8_e4m3")
    assert first.saturated_blocks == pytest.approx(expected.blocks, abs=0.15)
    for block in params:
        block["ln_gamma"][...] = 0.97
    moved = clamp_statistics(params, x, y, CFG, mxsim.scheme("all_e4m3"))
    assert moved["ln_gamma", 1].saturated == 1
    assert clamp_statistics(params, x, y, CFG, mxsim.scheme("bf16")) == {}


def test_watching_changes_nothing() -> None:
    params, x, y = point()
    scheme = PrecisionScheme(fc1_fprop_x=SiteFormat("mxfp4_e2m1", rounding="stochastic"))
    before = mxsim.loss_and_grads(params, x, y, CFG, scheme, 3)[0]
    stats = clamp_statistics(params, x, y, CFG, scheme, 3)
    assert mxsim.loss_and_grads(params, x, y, CFG, scheme, 3)[0] == before
    assert set(stats) == {("fc1_fprop_x", 0), ("fc1_fprop_x", 1)}


@pytest.mark.parametrize("fmt", [*mxsim.FORMATS])
def test_parts_of_an_error_sum_to_it(fmt: str) -> None:
    rng = np.random.default_rng(2)
    for x in (
        rng.standard_normal((8, 96)),
        rng.normal(0.97, 0.01, (4, 64)),
        np.exp(3 * rng.standard_normal((8, 64))),
    ):
        x = x.astype(np.float32)  # NVFP4 is defined there
        parts = error_parts(x, fmt)
        total = parts.scale + parts.saturated + parts.flushed + parts.grid
        assert parts.total == pytest.approx(total, rel=1e-12)
        stats = mxsim.quantize(x, fmt).stats
        assert stats is not None
        assert parts.total == pytest.approx(stats.relative_error, rel=1e-9)
        assert parts.gain == pytest.approx(stats.gain, rel=1e-12)
        assert (parts.saturated > 0) == (stats.saturated > 0)
        assert (parts.flushed > 0) == (stats.flushed > 0)


def test_parts_of_errors_at_the_ends() -> None:
    # a block whose NVFP4 scale rounds to zero is flushed, not saturated as well
    x = np.concatenate([[1e6], np.zeros(15), np.ones(32)]).astype(np.float32)
    parts = error_parts(x, "nvfp4")
    assert parts.saturated < 1e-15 < parts.flushed
    whole = parts.scale + parts.saturated + parts.flushed + parts.grid
    assert parts.total == pytest.approx(whole, rel=1e-12)
    wide = np.random.default_rng(0).standard_normal(64)
    middle = error_parts(wide, "mxfp8_e4m3")
    for exponent in (60, -60):  # whole powers of two move nothing
        assert error_parts(np.ldexp(wide, exponent), "mxfp8_e4m3") == middle
    assert error_parts(1e200 * wide, "mxfp8_e4m3").total == pytest.approx(1)  # E8M0 ends at 2^127
    assert error_parts(1e-200 * wide, "mxfp8_e4m3").total == 1
    noise = mxsim.Noise(1)
    stochastic = error_parts(wide, "mxfp4_e2m1", rounding="stochastic", noise=noise)
    assert stochastic.total > error_parts(wide, "mxfp4_e2m1").total


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("mxfp8_e4m3", 32, "up"), "scale_rule must be one of floor"),
        (("nvfp4",), "fmt must have an E8M0 scale; got nvfp4"),
        (("mxfp8_e4m3", 0), "block_size must be at least 1; got 0"),
        (("mxfp8_e4m3", "tensor"), "block_size must be an integer"),
        (("e4m3",), "mxfp8_e4m3"),
    ],
)
def test_the_closed_form_refuses(arguments: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        gaussian_clamp(*arguments)


def test_half_as_many_clamp_where_one_sign_has_a_code_more() -> None:
    half, both = gaussian_clamp("mxint8_asymmetric"), gaussian_clamp("mxint8")
    assert half.elements == pytest.approx(both.elements / 2, rel=1e-12)


def test_on_the_cliff_the_error_is_one_coherent_scaling() -> None:
    x = np.random.default_rng(3).normal(0.97, 0.002, (1, 4096))
    parts = error_parts(x, "mxfp8_e4m3")
    assert parts.gain == pytest.approx(0.875 / 0.97, rel=1e-3)  # all clamped to 448 * 2^-9
    assert parts.scale > 0.99 * parts.total
    off = error_parts(x, "mxfp8_e4m3", scale_rule="rceil")
    assert off.saturated == 0
    assert off.total < 0.2 * parts.total
    with pytest.raises(ValueError, match="nonzero element"):
        error_parts(np.zeros(4), "mxint8")


def test_error_through_depth_by_hand() -> None:
    cfg = replace(CFG, depth=3)
    params, x, _ = point(cfg)
    scheme = mxsim.scheme("all_e2m1")
    found = forward_error(params, x, cfg, scheme)
    assert found.shape == (3,)
    assert (np.diff(found) > 0).all()
    streams = []
    for each in (mxsim.scheme("exact"), scheme):
        ws = proxy.workspace(cfg, len(x), np.float32)
        streams.append(proxy.forward(params, x, cfg, precision_of(each, 3), ws).astype(float))
    exact, rounded = streams
    assert found[2] == pytest.approx(np.linalg.norm(rounded - exact) / np.linalg.norm(exact))
    assert (forward_error(params, x, cfg, mxsim.scheme("exact")) == 0).all()


def test_trajectory_divergence_begins_as_the_same_point_zeta() -> None:
    cfg = replace(CFG, steps=5, lr=1e-3, eval_samples=64)
    scheme = mxsim.scheme("all_e2m1")
    found = trajectory_divergence(cfg, scheme)
    params, x, y = point(cfg)
    assert found.zeta[0] == pytest.approx(mxsim.gradient_bias(params, x, y, cfg, scheme).zeta)
    np.testing.assert_array_equal(found.squared, found.zeta**2)
    assert found.weights[0] == 0
    assert (found.weights[1:] > 0).all()
