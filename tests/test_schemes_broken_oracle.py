"""A broken oracle is seen by the rules of test_schemes_exactly.py: each rounding, site and axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxsim
from mxsim.precision import GEMM_SITES, SITES, Internals, PrecisionScheme, SiteFormat
from tests import oracle_step
from tests.oracle_step import Array, Block, Rounding
from tests.test_schemes_exactly import (
    ALL_E2M1,
    ALL_SR,
    ALL_STEPS,
    BF16,
    EXACT,
    INTERNALS,
    PRESETS,
    Case,
    alone,
    apart,
    check_float32,
    disagreements,
    internal,
)

# ---------------------------------------------------------------- the rules see a broken oracle


def skipping(target: int, seen: list[str]) -> type[Block]:
    """A Block that leaves out rounding or site number ``target`` of those that change something.

    Counts in block 1 alone, all of whose results are used: nobody asks for the input's gradient.
    """

    class Skipping(Block):
        def seen(self, name: str, before: Array, after: Array) -> Array:
            if self.index == 1 and not np.array_equal(before, after):
                seen.append(name)
                return before if len(seen) - 1 == target else after
            return after

    return Skipping


# One switch each: where two meet, one rounds again what the other has left unrounded.
GATES = [Internals(activation=each) for each in ("bf16", "bf16_gate")]
ROUNDED: dict[str, tuple[PrecisionScheme, str]] = {
    **{
        f"{direction}.{name}, {activation}": (internal(direction, name), activation)
        for direction in ("forward", "backward")
        for name in INTERNALS
        for activation in (["gelu", "swiglu"] if name == "activation" else ["gelu"])
    },
    **{
        f"activation, {activation}": (alone(forward=GATES[0], backward=GATES[0]), activation)
        for activation in ("gelu", "swiglu")
    },
    "forward.activation, relu": (internal("forward", "activation"), "relu"),
    "gate, swiglu": (alone(forward=GATES[1], backward=GATES[1]), "swiglu"),
    "gradients": (alone(gradients="bf16"), "gelu"),
    "sites": (ALL_E2M1, "gelu"),
    "rotated": (replace(ALL_E2M1, hadamard="random"), "gelu"),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_every_rounding_left_out_is_seen(name: str) -> None:
    scheme, activation = ROUNDED[name]
    case = Case(scheme, activation, ln_eps=0.3)  # large enough that its sum needs its rounding
    every: list[str] = []
    assert not disagreements(apart(case, skipping(-1, every)))
    assert every
    unseen = [n for i, n in enumerate(every) if not disagreements(apart(case, skipping(i, [])))]
    assert not unseen
    if name in ("sites", "rotated"):
        assert set(every) >= set(SITES)


@pytest.mark.parametrize("site", GEMM_SITES)
def test_a_wrong_axis_is_seen(site: str) -> None:
    class Transposed(Block):
        def quantized(self, name: str, x: Array, axis: int) -> Array:
            return super().quantized(name, x, axis if name != site else 1 - axis)

    for scheme in (ALL_E2M1, mxsim.scheme("all_e4m3")):
        assert disagreements(apart(Case(scheme), Transposed))


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("field", ["step", "index"])
def test_wrong_random_bits_are_seen(site: str, field: str) -> None:
    class OtherBits(Block):
        def quantized(self, name: str, x: Array, axis: int) -> Array:
            if name != site:
                return super().quantized(name, x, axis)
            moved: dict[str, Any] = {field: getattr(self, field) + 1}
            return Block.quantized(replace(self, **moved), name, x, axis)

    assert disagreements(apart(Case(ALL_SR), OtherBits))


class LateLayerNormSite(Block):
    """gamma and beta rounded by layer norm's steps before they meet their sites."""

    def layer_norm(self, x: Array, gamma: Array, beta: Array) -> Array:
        r = self.rounding("forward", "layer_norm")
        return super().layer_norm(x, r(gamma), r(beta))


class ExactGammaBackward(Block):
    """Layer norm's backward pass through the unquantized gamma."""

    def layer_norm(self, x: Array, gamma: Array, beta: Array) -> Array:
        out = super().layer_norm(x, gamma, beta)
        self.gamma = gamma
        return out


class SignsAfterRotation(Block):
    """D H x in place of H D x."""

    def rotated(self, layer: str, x: Array) -> Array:
        signs = self.signs(layer, len(x))[:, None]
        return np.asarray(signs * super().rotated(layer, signs * x), x.dtype)


class PlainRemainder(Block):
    """Rows beyond the last whole group left alone."""

    def rotated(self, layer: str, x: Array) -> Array:
        out, size = super().rotated(layer, x), self.scheme.hadamard_size
        whole = len(x) // size * size
        return np.concatenate([out[:whole], x[whole:]])


class SitesBeforeRounding(Block):
    """GEMM operands quantized first and rounded to bf16 then."""

    def rounding(self, direction: str, internal: str, *when: str) -> Rounding:
        if internal == "gemm_in":
            return lambda x: x
        return super().rounding(direction, internal, *when)

    def site(self, name: str, x: Array, axis: int) -> Array:
        x = super().site(name, x, axis)
        return super().rounding("forward", "gemm_in")(x) if "fprop" in name else x


class BiasAfterResidual(Block):
    """(x + w2 hidden) + b2, with their roundings in that order."""

    def forward(self, x: Array, p: Mapping[str, Array]) -> Array:
        bias = self.rounding("forward", "bias")
        return bias(super().forward(x, {**p, "b2": np.zeros_like(p["b2"])}) + bias(p["b2"]))


class UnroundedBiasGradient(Block):
    """b2's gradient from dy before it is rounded as an operand."""

    def backward(self, dy: Array) -> tuple[Array, dict[str, Array]]:
        dx, grads = super().backward(dy)
        return dx, grads | {"b2": self.rounding("backward", "bias")(dy.sum(axis=0))}


class RoundedLossGradient(Block):
    """The loss's gradient rounded like the residual stream's."""

    def backward(self, dy: Array) -> tuple[Array, dict[str, Array]]:
        last = self.index == self.cfg.depth - 1
        return super().backward(self.rounding("backward", "residual")(dy) if last else dy)


class ForwardCopies(Block):
    """Backward on the bf16 copies of x and w that the forward made."""

    def linear(self, layer: str, x: Array, w: Array) -> Array:
        r = self.rounding("forward", "gemm_in")
        return super().linear(layer, r(x), r(w))


class RoundedCopies(Block):
    """The forward's dequantized copies rounded again before they are reused."""

    def linear(self, layer: str, x: Array, w: Array) -> Array:
        y = super().linear(layer, x, w)
        b = self.rounding("backward", "gemm_in")
        self.stash[layer] = (b(self.stash[layer][0]), b(self.stash[layer][1]))
        return y


class OtherSigns(Block):
    """The other layer's signs."""

    def signs(self, layer: str, n: int) -> Array:
        return super().signs("fc1" if layer == "fc2" else "fc2", n)


class SwappedHalves(Block):
    """SwiGLU as silu(a) * b."""

    def swiglu(self, u: Array) -> Array:
        return super().swiglu(np.roll(u, u.shape[1] // 2, axis=1))


NVFP4 = alone(**dict.fromkeys(SITES, SiteFormat("nvfp4")))
FIXED, RANDOM = (replace(ALL_E2M1, hadamard=kind) for kind in ("fixed", "random"))
BROKEN: list[tuple[type[Block], Case]] = [
    (LateLayerNormSite, Case(replace(NVFP4, forward=ALL_STEPS), "relu")),
    (ExactGammaBackward, Case(ALL_E2M1)),
    (SignsAfterRotation, Case(FIXED)),
    (SignsAfterRotation, Case(RANDOM)),
    (PlainRemainder, Case(FIXED, samples=40)),
    (OtherSigns, Case(RANDOM)),
    (SitesBeforeRounding, Case(replace(ALL_E2M1, forward=Internals(gemm_in="bf16")))),
    (BiasAfterResidual, Case(alone(forward=ALL_STEPS))),
    (UnroundedBiasGradient, Case(BF16)),
    (RoundedLossGradient, Case(internal("backward", "residual"))),
    (ForwardCopies, Case(internal("forward", "gemm_in"))),
    (RoundedCopies, Case(replace(NVFP4, backward_operands="reuse", backward=ALL_STEPS), "relu")),
    (SwappedHalves, Case(EXACT, "swiglu")),
]


@pytest.mark.parametrize(("broken", "case"), BROKEN)
def test_another_reading_of_the_step_is_seen(broken: type[Block], case: Case) -> None:
    assert not disagreements(apart(case))
    assert disagreements(apart(case, broken))
    seeds = [replace(case, seed=seed) for seed in range(4)]
    assert check_float32(seeds, broken)


@pytest.mark.parametrize("site", SITES)
def test_a_site_left_out_is_seen_in_float32(site: str) -> None:
    class WithoutSite(Block):
        def quantized(self, name: str, x: Array, axis: int) -> Array:
            return x if name == site else super().quantized(name, x, axis)

    cases = [Case(scheme) for name, scheme in PRESETS.items() if name.startswith("all_")]
    assert not check_float32(cases)
    assert check_float32(cases, WithoutSite)


# ---------------------------------------------------------------- the oracle's own rounding


def test_the_oracles_bf16_is_bfloat16() -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 20000, np.uint32)
    bits[:4000] &= np.uint32(0xFFFF8000)  # ties
    bits[4000:6000] &= np.uint32(0x80FFFFFF)  # among the subnormals
    x = bits.view(np.float32)
    x = np.append(x[np.isfinite(x)], np.array([0.0, -0.0, np.inf, -np.inf], np.float32))
    bits, finite = x.view(np.uint32), np.isfinite(x)
    cut = np.uint32(0xFFFF0000)
    with np.errstate(over="ignore"):
        expected = {
            "even": x.astype(ml_dtypes.bfloat16).astype(np.float32),
            "away": ((bits + np.uint32(0x8000) * finite) & cut).view(np.float32),
            "zero": (bits & cut).view(np.float32),
        }
        for mode, values in expected.items():
            rounded = oracle_step.round_bf16(x, mode)
            np.testing.assert_array_equal(rounded.view(np.uint32), values.view(np.uint32))
            np.testing.assert_array_equal(
                oracle_step.round_bf16(x.astype(np.float64), mode), values
            )
    just_above_a_tie = np.array([1 + 2.0**-8 + 2.0**-50])  # rounded once, not through float32
    assert oracle_step.round_bf16(just_above_a_tie, "even") == 1 + 2.0**-7
