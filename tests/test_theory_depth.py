"""Gains through depth: the recursion against the proxy, symbols against the recursion."""

import itertools
import math
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mxsim
from mxsim.precision import GEMM_SITES, PrecisionScheme, SiteFormat
from mxsim.theory.depth import (
    WEIGHTS,
    bias_parts,
    gain_expansion,
    loss_and_grads_under_gains,
    path_contributions,
)
from mxsim.theory.depth_symbols import (
    block_gradients,
    compounding,
    paths,
    scalar_gain,
    scalar_log_gain,
)

Array = NDArray[Any]

LINEAR = mxsim.ProxyConfig(
    width=8, depth=3, batch=16, activation="linear", norm="none", dtype="float64"
)
EXACT = mxsim.scheme("exact")
E4M3, E2M1 = SiteFormat("mxfp8_e4m3"), SiteFormat("mxfp4_e2m1")
ON_CLIFF = 1.9  # a significand that both formats clamp: to 1.75 and 1.5


def point(cfg: mxsim.ProxyConfig, seed: int = 0) -> tuple[Any, Array, Array]:
    rng = np.random.default_rng(seed)
    params = mxsim.init_params(replace(cfg, seed=seed))
    for block in params:
        block["w1"] *= 2  # branches as large as the stream
    x = rng.standard_normal((cfg.batch, cfg.width))
    return params, x, rng.standard_normal(x.shape)


def assert_close(found: Sequence[Mapping[str, Array]], expected: Any, rel: float = 1e-12) -> None:
    for k, (one, other) in enumerate(zip(found, expected, strict=True)):
        for kind in WEIGHTS:
            error = np.abs(one[kind] - other[kind]).max() / np.abs(other[kind]).max()
            assert error < rel, (k, kind, error)


def signs(rng: np.random.Generator, *shape: int) -> Array:
    drawn: Array = rng.choice([-1.0, 1.0], shape)
    return drawn


# ---------------------------------------------------------------- the recursion and the proxy


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_without_gains_it_is_the_exact_gradient(depth: int) -> None:
    cfg = replace(LINEAR, depth=depth)
    params, x, y = point(cfg)
    loss, grads = mxsim.loss_and_grads(params, x, y, cfg, EXACT)
    found, tree = loss_and_grads_under_gains(params, x, y, [{}] * depth)
    assert found == pytest.approx(loss, rel=1e-13)
    assert_close(tree, grads)


@pytest.mark.parametrize("fmt", [E4M3, E2M1], ids=["e4m3", "e2m1"])
@pytest.mark.parametrize("site", GEMM_SITES)
def test_every_gemm_site_through_the_quantizer(site: str, fmt: SiteFormat) -> None:
    # A last block in which the site's operand has one magnitude (or zero) throughout, on the cliff:
    # there the quantizer multiplies it by top / 1.9, a common gain, and does nothing else.
    layer, operand = site.split("_", 1)
    on_data, on_dy = operand.endswith("_x"), operand.endswith("_dy")
    depth = 1 if on_data else 2  # a block below sees what dgrad hands down
    cfg = replace(LINEAR, depth=depth)
    params, x, _ = point(cfg)
    rng = np.random.default_rng(1)
    last, h, d = params[-1], cfg.hidden, cfg.width
    last["w1"][...], last["w2"][...] = 0, 0
    last["w1"][np.arange(h), np.arange(h) % d] = signs(rng, h)  # one entry a row: |hidden| as |z|
    last["w2"][np.arange(h) % d, np.arange(h)] = signs(rng, h)  # one a column: |dhidden| as |dy|
    if operand.endswith("_w"):
        last["w1" if layer == "fc1" else "w2"] *= ON_CLIFF
    if on_data:
        x = signs(rng, *x.shape) * ON_CLIFF
    gains: list[dict[str, float]] = [{} for _ in range(depth)]
    gains[-1] = {site: (1.75 if fmt is E4M3 else 1.5) / ON_CLIFF}
    y = rng.standard_normal(x.shape)
    if on_dy:  # dy = 2 / (n d) (prediction - y); no dy site moves the prediction
        stream = x
        for p in params:
            stream = stream + stream @ p["w1"].T @ p["w2"].T + p["b2"]
        y = stream - signs(rng, *x.shape) * ON_CLIFF
    scheme = replace(EXACT, overrides=((depth - 1, site, fmt),))
    loss, grads = mxsim.loss_and_grads(params, x, y, cfg, scheme)
    found, tree = loss_and_grads_under_gains(params, x, y, gains)
    assert found == pytest.approx(loss, rel=1e-12)
    assert_close(tree, grads)
    exact = mxsim.loss_and_grads(params, x, y, cfg, EXACT)[1]
    assert any(  # the site does something
        np.abs(one[kind] - other[kind]).max() > 1e-6
        for one, other in zip(grads, exact, strict=True)
        for kind in WEIGHTS
    )


@pytest.mark.parametrize("block", [0, 1, 2])
def test_weights_on_the_cliff_at_depth(block: int) -> None:
    params, x, y = point(LINEAR)
    rng = np.random.default_rng(2)
    for kind in ("w1", "w2"):
        params[block][kind][...] = signs(rng, *params[block][kind].shape) * ON_CLIFF / 8
    sites = ("fc1_fprop_w", "fc1_dgrad_w", "fc2_fprop_w", "fc2_dgrad_w")
    for chosen in (sites[:1], sites[1:2], sites[:2], sites[2:3], sites[3:], sites):
        scheme = replace(EXACT, overrides=tuple((block, site, E4M3) for site in chosen))
        gains: list[dict[str, float]] = [{}, {}, {}]
        gains[block] = dict.fromkeys(chosen, 1.75 / ON_CLIFF)
        loss, grads = mxsim.loss_and_grads(params, x, y, LINEAR, scheme)
        found, tree = loss_and_grads_under_gains(params, x, y, gains)
        assert found == pytest.approx(loss, rel=1e-12)
        assert_close(tree, grads)


def test_a_gain_on_gamma_is_one_on_the_parameters() -> None:
    # z = c x before w1 is w1 -> c w1, but that dw1 is then taken with z: times c
    params, x, y = point(LINEAR)
    gains = (0.9, 1.0, 1.2)
    scaled = [p | {"w1": c * p["w1"]} for p, c in zip(params, gains, strict=True)]
    loss, grads = mxsim.loss_and_grads(scaled, x, y, LINEAR, EXACT)
    expected = [g | {"w1": c * g["w1"]} for g, c in zip(grads, gains, strict=True)]
    found, tree = loss_and_grads_under_gains(params, x, y, [{"ln_gamma": c} for c in gains])
    assert found == pytest.approx(loss, rel=1e-12)
    assert_close(tree, expected)


# ---------------------------------------------------------------- expansions


@pytest.mark.parametrize("block", [0, 1, 2, None])
def test_the_expansion_is_the_whole_dependence(block: int | None) -> None:
    params, x, y = point(LINEAR)
    slopes = [{"ln_gamma": 1.0} if block in (k, None) else {} for k in range(3)]
    found = gain_expansion(params, x, y, slopes)
    for delta in (-0.125, -0.5, 3.0):
        gains = [1 + delta * s.get("ln_gamma", 0) for s in slopes]
        scaled = [p | {"w1": c * p["w1"]} for p, c in zip(params, gains, strict=True)]
        loss, grads = mxsim.loss_and_grads(scaled, x, y, LINEAR, EXACT)
        expected = [g | {"w1": c * g["w1"]} for g, c in zip(grads, gains, strict=True)]
        value, tree = found.at(delta)
        assert value == pytest.approx(loss, rel=1e-12)
        assert_close(tree, expected)
        rest = found.remainder(delta)
        for k, kind in itertools.product(range(3), WEIGHTS):
            first = found.grads[k][kind][0] + delta * found.grads[k][kind][1]
            np.testing.assert_allclose(tree[k][kind], first + rest[k][kind], atol=1e-12)


def test_degrees_in_the_gain_of_one_block() -> None:
    # r has degree 1; what else depends on the gain adds one: hidden above the block and in it,
    # the way back below it
    params, x, y = point(LINEAR)
    for block in range(3):
        slopes = [{"ln_gamma": 1.0} if k == block else {} for k in range(3)]
        found = gain_expansion(params, x, y, slopes)
        assert len(found.loss) == 3
        assert len(found.prediction) == 2
        for k, grads in enumerate(found.grads):
            assert len(grads["w2"]) == len(grads["w1"]) == 3
            assert len(grads["b2"]) == (3 if k < block else 2)
            assert all(np.abs(p[-1]).max() > 1e-8 for p in grads.values())
    weight = gain_expansion(params, x, y, [{"fc1_fprop_w": 1.0}, {}, {}])
    assert len(weight.grads[0]["w1"]) == 2  # straight through: its own gradient feels r alone


def test_first_order_by_differences() -> None:
    params, x, y = point(LINEAR)
    slopes: list[dict[str, float]] = [
        {"ln_gamma": 0.3},
        {"fc2_fprop_w": -1.0},
        {"fc1_dgrad_w": 2.0},
    ]
    found = gain_expansion(params, x, y, slopes)
    h = 1e-5
    trees = [
        loss_and_grads_under_gains(
            params, x, y, [{site: 1 + step * s for site, s in each.items()} for each in slopes]
        )[1]
        for step in (h, -h)
    ]
    for k, kind in itertools.product(range(3), WEIGHTS):
        slope = (trees[0][k][kind] - trees[1][k][kind]) / (2 * h)
        np.testing.assert_allclose(found.grads[k][kind][1], slope, atol=1e-8)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_paths(depth: int) -> None:
    cfg = replace(LINEAR, depth=depth)
    params, x, _ = point(cfg)
    for block in params:
        block["b2"][...] = 0
    found = path_contributions(params, x)
    assert found.shape == (depth + 1, *x.shape)
    maps = [(p["w2"] @ p["w1"]).T for p in params]
    expected = np.zeros_like(found)
    terms = paths(depth)
    assert len(terms) == 2**depth
    for passed, coefficient in terms.items():
        assert passed == tuple(sorted(passed))
        assert {str(s) for s in coefficient.free_symbols} == {f"c{k}" for k in passed}
        assert coefficient.subs(dict.fromkeys(coefficient.free_symbols, 2)) == 2 ** len(passed)
        row = x
        for k in passed:
            row = row @ maps[k]
        expected[len(passed)] += row
    np.testing.assert_allclose(found, expected, atol=1e-12)
    gained = gain_expansion(params, x, x, [{}] * depth, [{"ln_gamma": 0.7}] * depth).prediction[0]
    np.testing.assert_allclose(np.tensordot(0.7 ** np.arange(depth + 1), found, 1), gained)


# ---------------------------------------------------------------- symbols


@pytest.mark.parametrize("depth", [2, 3])
def test_scalar_gains(depth: int) -> None:
    rng = np.random.default_rng(depth)
    a, delta = rng.uniform(-0.5, 2, depth), rng.uniform(-0.3, 0.3, depth)
    x, y = 1.3, -0.4
    scalars: list[dict[str, Any]] = [{"w1": [[1.0]], "w2": [[v]], "b2": [0.0]} for v in a]
    plain = loss_and_grads_under_gains(scalars, [[x]], [[y]], [{}] * depth)[1]
    gained = loss_and_grads_under_gains(
        scalars, [[x]], [[y]], [{"ln_gamma": 1 + v} for v in delta]
    )[1]
    found = scalar_gain(list(a), list(delta), x, y)
    for k in range(depth):
        for kind in ("w1", "w2"):
            ratio = gained[k][kind][0, 0] / plain[k][kind][0, 0]
            assert found[k] == pytest.approx(ratio, rel=1e-12)
    # the law in words: the residual's change, the block's own gain, a factor for every other block
    before, after = x * np.prod(1 + a) - y, x * np.prod(1 + (1 + delta) * a) - y
    others = (1 + (1 + delta) * a) / (1 + a)
    law = after / before * (1 + delta) * np.prod(others) / others
    np.testing.assert_allclose(found, law, rtol=1e-12)
    # first order: own gain 1, others their share of the stream, and all through the residual
    share = a / (1 + a)
    expected = np.broadcast_to(share, (depth, depth)) * (1 - np.eye(depth)) + np.eye(depth)
    through_residual = x * np.prod(1 + a) / before * share
    np.testing.assert_allclose(scalar_log_gain(list(a), x, y), expected + through_residual)


@pytest.mark.parametrize("depth", [2, 3])
def test_compounding_at_fixed_residual(depth: int) -> None:
    a, delta = 0.4, -0.125
    prediction = 1.5 * (1 + (1 + delta) * a) ** depth
    law, rate = compounding(a, delta, depth)
    # targets far away: the residual hardly changes, what is left is the way through the net
    far = scalar_gain([a] * depth, [delta] * depth, 1.5, 1e9 * prediction)
    np.testing.assert_allclose(far, law, rtol=1e-7)
    h = 1e-6
    up, down = (compounding(a, s, depth)[0] for s in (h, -h))
    assert rate == pytest.approx((math.log(up) - math.log(down)) / (2 * h), rel=1e-6)
    assert compounding(1e-9, delta, 50)[0] == pytest.approx(1 + delta)  # small branches: once only
    assert compounding(1e9, delta, 50)[0] == pytest.approx((1 + delta) ** 50)  # large ones: all


def test_the_block_law_in_matrices() -> None:
    params, x, y = point(LINEAR)
    gains = [0.8, 1.1, 0.9]
    _, tree = loss_and_grads_under_gains(params, x, y, [{"ln_gamma": c} for c in gains])
    for block in range(3):
        stream, later, above = x, np.eye(LINEAR.width), np.zeros(LINEAR.width)
        for k, (p, c) in enumerate(zip(params, gains, strict=True)):
            through = np.eye(LINEAR.width) + c * (p["w2"] @ p["w1"]).T
            if k < block:
                stream = stream @ through + p["b2"]
            else:
                later = later @ through if k > block else later
                above = above @ (through if k > block else np.eye(LINEAR.width)) + p["b2"]
        p = params[block]
        found = block_gradients(stream, y - above, later, p["w1"], p["w2"], gains[block])
        assert_close([found | {"b2": tree[block]["b2"]}], [tree[block]])
        if block:
            below = params[block - 1]
            np.testing.assert_allclose(found["stream"].sum(0), tree[block - 1]["b2"], atol=1e-13)
            assert below is not p


# ---------------------------------------------------------------- with layer norm


def layer_norm_point(depth: int) -> tuple[mxsim.ProxyConfig, Any, Array, Array]:
    cfg = replace(LINEAR, norm="layer", depth=depth)
    params, x, y = point(cfg)
    for block in params:
        block["ln_gamma"][...] = ON_CLIFF / 2
    return cfg, params, x, y


def on_block(block: int) -> PrecisionScheme:
    return replace(EXACT, overrides=((block, "ln_gamma", E4M3),))


def with_gain(params: Any, block: int, gain: float) -> Any:
    return [
        p | {"ln_gamma": gain * p["ln_gamma"]} if k == block else p for k, p in enumerate(params)
    ]


@pytest.mark.parametrize("block", [0, 1, 2])
def test_gammas_on_the_cliff_are_one_common_gain(block: int) -> None:
    # straight through: every gradient, gamma's too, is that of the net with gammas scaled
    cfg, params, x, y = layer_norm_point(3)
    loss, grads = mxsim.loss_and_grads(params, x, y, cfg, on_block(block))
    scaled = with_gain(params, block, 1.75 / ON_CLIFF)
    expected, tree = mxsim.loss_and_grads(scaled, x, y, cfg, EXACT)
    assert loss == pytest.approx(expected, rel=1e-12)
    assert_close(grads, tree)
    np.testing.assert_allclose(grads[block]["ln_gamma"], tree[block]["ln_gamma"], rtol=1e-10)


def curvature_left(block: int, depth: int) -> float:
    """How far the gradients on the cliff are from the parabola through three other gains."""
    cfg, params, x, y = layer_norm_point(depth)
    at = 1.75 / ON_CLIFF
    nodes = np.array([1.0, 0.5, 1.5])
    weights = [
        np.prod((at - np.delete(nodes, i)) / (nodes[i] - np.delete(nodes, i))) for i in range(3)
    ]
    trees = [mxsim.loss_and_grads(with_gain(params, block, c), x, y, cfg, EXACT)[1] for c in nodes]
    grads = mxsim.loss_and_grads(params, x, y, cfg, on_block(block))[1]
    worst = 0.0
    for k, kind in itertools.product(range(depth), WEIGHTS):
        parabola = sum(w * tree[k][kind] for w, tree in zip(weights, trees, strict=True))
        change = np.linalg.norm(grads[k][kind] - trees[0][k][kind])
        worst = max(worst, float(np.linalg.norm(grads[k][kind] - parabola) / change))
    return worst


def test_under_layer_norm_the_last_blocks_gain_is_as_without() -> None:
    # no norm comes after it, and those before it do not see it: degree 2, as the recursion has it
    assert curvature_left(block=2, depth=3) < 1e-11
    # a gain further down goes through the norms above it, which the recursion does not have
    assert curvature_left(block=1, depth=3) > 1e-4
    assert curvature_left(block=0, depth=3) > 1e-4


def test_parts_of_the_bias_under_layer_norm() -> None:
    cfg, params, x, y = layer_norm_point(3)
    delta = 1.75 / ON_CLIFF - 1
    parts = bias_parts(params, x, y, cfg, on_block(2))
    exact = mxsim.loss_and_grads(params, x, y, cfg, EXACT)[1]
    full = mxsim.loss_and_grads(params, x, y, cfg, on_block(2))[1]
    for kind in mxsim.proxy.KINDS:
        for k in range(3):
            whole = exact[k][kind] + parts.jacobian[k][kind] + parts.residual[k][kind]
            np.testing.assert_allclose(whole, full[k][kind], atol=1e-14)
    # at fixed residual the block's own weight gradients feel its own gain, its bias none
    for kind, gain in (("w1", delta), ("w2", delta), ("b2", 0.0)):
        np.testing.assert_allclose(
            parts.jacobian[2][kind], gain * exact[2][kind], rtol=1e-9, atol=1e-14
        )
    zeta, jacobian, residual = parts.sizes()
    assert zeta == pytest.approx(mxsim.gradient_bias(params, x, y, cfg, on_block(2)).zeta)
    assert zeta <= jacobian + residual


def test_parts_of_the_bias_in_a_linear_net() -> None:
    params, x, y = point(LINEAR)
    rng = np.random.default_rng(3)
    params[1]["w1"][...] = signs(rng, *params[1]["w1"].shape) * ON_CLIFF / 8
    scheme = replace(
        EXACT, overrides=tuple((1, site, E4M3) for site in ("fc1_fprop_w", "fc1_dgrad_w"))
    )
    gains: list[dict[str, float]] = [{}, {}, {}]
    gains[1] = dict.fromkeys(("fc1_fprop_w", "fc1_dgrad_w"), 1.75 / ON_CLIFF)
    parts = bias_parts(params, x, y, LINEAR, scheme)
    plain = gain_expansion(params, x, y, [{}] * 3)
    gained = gain_expansion(params, x, y, [{}] * 3, gains)
    moved = gained.prediction[0] - plain.prediction[0]
    change = np.linalg.norm(moved) / np.linalg.norm(plain.prediction[0] - y)
    assert parts.residual_change == pytest.approx(float(change))
    _, same = loss_and_grads_under_gains(params, x, y + moved, gains)
    for k, kind in itertools.product(range(3), WEIGHTS):
        expected = same[k][kind] - plain.grads[k][kind][0]
        np.testing.assert_allclose(parts.jacobian[k][kind], expected, atol=1e-13)


# ---------------------------------------------------------------- refusals, imports


def test_refusals() -> None:
    params, x, y = point(LINEAR)
    with pytest.raises(ValueError, match="slopes must have 3 entries, one a block; got 1"):
        gain_expansion(params, x, y, [{}])
    with pytest.raises(ValueError, match="gains must have 3 entries"):
        loss_and_grads_under_gains(params, x, y, [{}])
    with pytest.raises(ValueError, match="site in gains must be one of ln_gamma, fc1_fprop_x"):
        loss_and_grads_under_gains(params, x, y, [{"ln_beta": 1.0}, {}, {}])


def test_sympy_is_imported_only_when_asked_for() -> None:
    code = (
        "import sys, mxsim, mxsim.theory.clamp, mxsim.theory.depth; print('sympy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
