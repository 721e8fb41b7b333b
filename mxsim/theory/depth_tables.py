"""Gain bias through depth: predictions beside measurements.

python -m mxsim.theory.depth_tables        # a minute: the third table trains three runs
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.config import ProxyConfig
from mxsim.data import init_params, make_batches, make_teacher
from mxsim.precision import PrecisionScheme, SiteFormat
from mxsim.presets import scheme as preset
from mxsim.proxy import Params, loss_and_grads
from mxsim.theory.depth import (
    bias_parts,
    gain_expansion,
    loss_and_grads_under_gains,
)
from mxsim.train import start

Array = NDArray[Any]
EXACT = PrecisionScheme()


def flat(grads: Params) -> Array:
    """The gradients of all w1 and w2 as one vector."""
    return np.concatenate([np.ravel(b[kind]) for b in grads for kind in ("w1", "w2")])


def under(params: Params, x: Array, y: Array, gain: float, hold: bool) -> Array:
    """Gradient of a linear net, ``gain`` on every gamma; hold: with the residual of gain 1."""
    gains = [{"ln_gamma": gain}] * len(params)
    if hold:
        plain, gained = (
            gain_expansion(params, x, y, [{}] * len(params), each).prediction[0]
            for each in (None, gains)
        )
        y = y + (gained - plain)
    return flat(loss_and_grads_under_gains(params, x, y, gains)[1])


def linear_table(delta: float) -> None:
    """Random linear nets at PyTorch's initial weights, every gamma's gain 1 + delta.

    rate: d log alpha / d delta, alpha the aligned gain of the gradient, at fixed residual.  A
    random branch is nearly orthogonal to the stream and adds E|w2 w1 x|^2 = |x|^2 / 9 to its
    square, so the square's share 1 / 10 takes the place of the scalar a / (1 + a): the rate is
    1 + (L - 1) / 10, for a residual that has nothing to do with the weights.
    """
    print(f"linear net, width 64, batch 256, gain {1 + delta:.4f} on every gamma, w1 and w2")
    print("                                 rate with the teacher's")
    print("depth   zeta  jacobian  residual  targets    other   1 + (L-1)/10   proxy agrees to")
    for depth in (1, 2, 4, 8, 16):
        cfg = ProxyConfig(
            width=64, depth=depth, activation="linear", norm="none", dtype="float64", batch=256
        )
        params = init_params(cfg)
        x, y = make_batches(cfg, make_teacher(cfg)).at(0)
        g, same, full = (
            under(params, x, y, 1 + step, hold)
            for step, hold in ((0, False), (delta, True), (delta, False))
        )
        zeta, jacobian, residual = (
            np.linalg.norm(v) / np.linalg.norm(g) for v in (full - g, same - g, full - same)
        )
        rates, h = [], 1e-4
        for targets in (y, 1e6 * np.random.default_rng(0).standard_normal(y.shape)):
            low, middle, high = (under(params, x, targets, 1 + s, True) for s in (-h, 0, h))
            rates.append((high - low) @ middle / (2 * h * middle @ middle))
        scaled = [p | {"w1": (1 + delta) * p["w1"]} for p in params]
        _, proxy = loss_and_grads(scaled, x, y, cfg, EXACT)
        proxy = [p | {"w1": (1 + delta) * p["w1"]} for p in proxy]  # dw1 is taken with z
        off = np.linalg.norm(flat(proxy) - full) / np.linalg.norm(full)
        print(
            f"{depth:5}  {zeta:5.3f}  {jacobian:8.3f}  {residual:8.3f}  {rates[0]:7.2f}"
            f"  {rates[1]:7.2f}  {1 + (depth - 1) / 10:13.2f}  {off:16.0e}"
        )


def layer_norm_table() -> None:
    """What the linear law leaves out under layer norm: curvature beyond degree 2, by block."""
    depth = 4
    cfg = ProxyConfig(
        width=64, depth=depth, activation="linear", batch=256, dtype="float64", gamma_mean=0.97
    )
    params = init_params(cfg)
    x, y = make_batches(cfg, make_teacher(cfg)).at(0)
    print("\nlinear net with layer norm, depth 4, gammas 0.97 of one block in E4M3 (gain 0.9021)")
    print("block   zeta  jacobian  residual   beyond degree 2, of the change")
    for block in range(depth):
        scheme = PrecisionScheme(overrides=((block, "ln_gamma", SiteFormat("mxfp8_e4m3")),))
        at, nodes = 0.875 / 0.97, np.array([1.0, 0.5, 1.5])
        others = [np.delete(nodes, i) for i in range(3)]
        weights = [np.prod((at - o) / (n - o)) for n, o in zip(nodes, others, strict=True)]
        flats = []
        for c in nodes:
            scaled = [dict(p) for p in params]
            scaled[block]["ln_gamma"] = c * params[block]["ln_gamma"]
            flats.append(flat(loss_and_grads(scaled, x, y, cfg, EXACT)[1]))
        full = flat(loss_and_grads(params, x, y, cfg, scheme)[1])
        left = full - sum(w * f for w, f in zip(weights, flats, strict=True))
        beyond = np.linalg.norm(left) / np.linalg.norm(full - flats[0])
        sizes = bias_parts(params, x, y, cfg, scheme).sizes(("w1", "w2"))
        print(f"{block:5}  {sizes[0]:5.3f}  {sizes[1]:8.3f}  {sizes[2]:8.3f}   {beyond:10.1e}")


def training_table(seeds: int = 3) -> None:
    """The parts of the bias along exact runs of the proxy itself."""
    print("\nproxy (gelu, layer norm), width 64, depth 4, batch 256, lr 0.005, along exact runs")
    print("seed  step  scheme          zeta  jacobian  residual   |r~ - r| / |r|   mean gamma")
    for seed in range(seeds):
        cfg = ProxyConfig(lr=0.005, steps=801, seed=seed)
        batches, run = make_batches(cfg, make_teacher(cfg)), start(cfg, preset("exact"))
        for step in (100, 400, 800):
            run.advance(step - run.step)
            x, y = batches.at(step)
            gamma = np.mean([p["ln_gamma"] for p in run.params])
            for name in ("ln_only_e4m3", "gemm_e4m3"):
                parts = bias_parts(run.params, x, y, cfg, preset(name))
                zeta, jacobian, residual = parts.sizes()
                print(
                    f"{seed:4}  {step:4}  {name:12}  {zeta:6.3f}  {jacobian:8.3f}  {residual:8.3f}"
                    f"   {parts.residual_change:14.3f}   {gamma:10.3f}"
                )


def main() -> None:
    """Print what the section in docs/theory.md quotes."""
    linear_table(0.875 / 0.97 - 1)
    layer_norm_table()
    training_table()


if __name__ == "__main__":
    main()
