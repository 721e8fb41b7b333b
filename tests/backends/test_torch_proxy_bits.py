"""What a scheme rounds, PyTorch rounds to the bits of the Numba backend: sites, internals, faults.

In float64 the two backends differ by some 1e-15 before a rounding, and a rounding boundary hardly
ever lies between them; so where all that comes out is rounded to bf16, it has to agree in all bits,
without any tolerance, if every array went through the right rounding.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import mxsim
from mxsim.backends.torch_flips import axis_of
from mxsim.backends.torch_proxy import loss_and_grads
from mxsim.config import ACTIVATIONS, NORMS
from mxsim.precision import SITES, Internals, PrecisionScheme, precision_of

pytestmark = pytest.mark.usefixtures("single_threaded")

CFG = mxsim.ProxyConfig(width=48, depth=2, batch=40, dtype="float64", gamma_sd=0.1, seed=3)
STEP = 7  # random bits are not those of step 0
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
E = mxsim.SiteFormat


def point(cfg: mxsim.ProxyConfig) -> tuple[Any, Any, Any]:
    params = mxsim.init_params(cfg)
    rng = np.random.default_rng(0)
    for block in params:
        block["ln_beta"] += rng.normal(0, 0.1, cfg.width).astype(cfg.real)
    return params, *mxsim.make_batches(cfg, mxsim.make_teacher(cfg)).at(0)


def vary(scheme: PrecisionScheme, **changes: Any) -> PrecisionScheme:
    return dataclasses.replace(scheme, **changes)


def schemes() -> Iterator[tuple[str, mxsim.ProxyConfig, PrecisionScheme]]:
    for name in mxsim.PRESETS:
        yield name, CFG, mxsim.scheme(name)
    for field in ("gemm_in", "gemm_out", "bias", "residual", "layer_norm"):
        for direction in ("forward", "backward"):
            one = vary(PrecisionScheme(), **{direction: Internals(**{field: "bf16"})})
            yield f"{direction} {field}", CFG, one
    for kind, directions in itertools.product(
        ACTIVATIONS, (("bf16", "bf16"), ("bf16", "exact"), ("exact", "bf16"))
    ):
        forward, backward = (Internals(activation=each) for each in directions)
        cfg = dataclasses.replace(CFG, activation=kind)
        yield f"{kind} {directions}", cfg, PrecisionScheme(forward=forward, backward=backward)
    gate = Internals(activation="bf16_gate")
    swiglu = dataclasses.replace(CFG, activation="swiglu")
    yield "bf16_gate", swiglu, PrecisionScheme(forward=gate, backward=gate)
    steps = Internals(layer_norm="bf16")
    for norm in NORMS:
        cfg = dataclasses.replace(CFG, norm=norm)
        yield f"{norm} exact", cfg, PrecisionScheme()
        yield f"{norm} in steps", cfg, PrecisionScheme(forward=steps, backward=steps)
        yield f"{norm} quantized", cfg, mxsim.scheme("all_e4m3")
    base = mxsim.scheme("all_e4m3")
    variants: dict[str, dict[str, Any]] = {
        "reuse": {"backward_operands": "reuse"},
        "fixed signs": {"hadamard": "fixed"},
        "random signs": {"hadamard": "random", "hadamard_size": 8},
        "frozen beta": {"frozen_beta": True},
        "away": {"forward": steps, "backward": steps, "internal_rounding": "away"},
        "zero": {"forward": steps, "backward": steps, "internal_rounding": "zero"},
        "overrides": {"overrides": ((1, "fc1_fprop_x", "exact"), (0, "ln_gamma", "mxfp4_e2m1"))},
        "stochastic": {s: E("mxfp6_e3m2", rounding="stochastic") for s in SITES},
        "elementwise": {s: E("fp16", rounding="stochastic") for s in SITES if s[0] != "l"},
        "blocks": {"fc1_dgrad_w": E("mxfp8_e4m3", "ceil", "away", (16, 8)), "ln_beta": "mxint8"},
        "one block": {"fc2_wgrad_x": E("mxfp8_e5m2", "even", "zero", "tensor")},
    }
    for words, changes in variants.items():
        yield words, CFG, vary(base, **changes)


CASES = {words: (cfg, scheme) for words, cfg, scheme in schemes()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("words", CASES)
def test_gradients_rounded_to_bf16_agree_in_all_bits(words: str, device: str) -> None:
    cfg, scheme = CASES[words]
    scheme = dataclasses.replace(scheme, gradients="bf16")
    params, x, y = point(cfg)
    loss, grads = mxsim.loss_and_grads(params, x, y, cfg, scheme, STEP)
    found, by_torch = loss_and_grads(params, x, y, cfg, scheme, STEP, device)
    assert abs(found - loss) <= 2.0**-40 * loss  # a mean of squares of what has no flip before it
    for a, b in zip(grads, by_torch, strict=True):
        for kind in a:
            np.testing.assert_array_equal(b[kind], a[kind], err_msg=kind)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("words", ["all_e4m3", "mx_mix", "nvfp4_recipe", "stochastic", "one block"])
def test_a_site_makes_the_same_bits_of_the_same_operand(
    words: str, dtype: str, device: str
) -> None:
    cfg, scheme = CASES[words]
    cfg = dataclasses.replace(cfg, dtype=dtype)
    seen: dict[tuple[str, int], tuple[Any, Any]] = {}
    loss_and_grads(
        *point(cfg), cfg, scheme, STEP, device, lambda s, k, *both: seen.update({(s, k): both})
    )
    quantized = {s for s in SITES if scheme.at(s, 0).format != "exact"}
    assert set(seen) == {(s, k) for s in quantized for k in range(cfg.depth)}
    for (site, block), both in seen.items():
        before, after = (np.ascontiguousarray(t.cpu().numpy()) for t in both)
        precision = precision_of(scheme, cfg.depth, cfg.seed, STEP)[block]
        axis = 0 if before.ndim == 1 or axis_of(site) == 0 else 1
        expected = precision.operand(site, before, axis, np.empty_like(before))
        assert after.tobytes() == expected.tobytes(), (site, block)


def test_a_wrong_rounding_is_noticed() -> None:
    cfg, scheme = CASES["gemm_e4m3"]
    scheme = dataclasses.replace(scheme, gradients="bf16")
    params, x, y = point(cfg)
    _, grads = mxsim.loss_and_grads(params, x, y, cfg, scheme)
    for site in (s for s in SITES if s[0] != "l"):
        other = vary(scheme, **{site: E("mxfp8_e4m3", "ceil")})
        _, wrong = loss_and_grads(params, x, y, cfg, other)
        assert any(
            (a[kind] != b[kind]).any() for a, b in zip(grads, wrong, strict=True) for kind in a
        ), site


def test_what_does_not_fit_is_refused_by_name() -> None:
    params, x, y = point(CFG)
    beyond = vary(mxsim.scheme("exact"), overrides=((2, "ln_gamma", "bf16"),))
    with pytest.raises(ValueError, match="names block 2"):
        loss_and_grads(params, x, y, CFG, beyond)
    with pytest.raises(TypeError, match="must be a PrecisionScheme"):
        loss_and_grads(params, x, y, CFG, "exact")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="x must have shape"):
        loss_and_grads(params, x[:, 1:], y, CFG, mxsim.scheme("exact"))
