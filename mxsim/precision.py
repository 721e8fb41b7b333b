"""Precision schemes: what is rounded where, in one training step.

A scheme is data: one SiteFormat for each of the fourteen quantization sites, and what is rounded
element by element besides them.  What a site does to an array is in rounders.py, where the sites
sit in the step is in proxy.py and ops.py, named schemes are in presets.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.formats import ELEMENTWISE, FORMATS, ROUNDINGS, SCALE_RULES, choose
from mxsim.layout import BlockSize, as_integer, check_block_size
from mxsim.philox import Noise
from mxsim.rounders import ElementwiseRounder, Rounder, block_rounder, float_spec

Array = NDArray[Any]

# Blocks always run along the contraction axis of the GEMM.  For a linear map y = x w^T:
#   fprop  y = x w^T     x, w along in
#   dgrad  dx = dy w     dy, w along out
#   wgrad  dw = dy^T x   dy, x along batch
OPERANDS = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
GEMM_SITES = tuple(f"{layer}_{operand}" for layer in ("fc1", "fc2") for operand in OPERANDS)
LN_SITES = ("ln_gamma", "ln_beta")
SITES = GEMM_SITES + LN_SITES

SITE_FORMATS = ("exact", *ELEMENTWISE, *FORMATS)
STEPS = ("exact", "bf16")
ACTIVATION_STEPS = ("exact", "bf16", "bf16_gate")
STATES = ("fp32", "bf16")
DETERMINISTIC = tuple(r for r in ROUNDINGS if r != "stochastic")


@dataclass(frozen=True)
class SiteFormat:
    """What happens to one operand: a format name, with scale rule, rounding and block size.

    ``exact`` leaves the operand alone; ``bf16``, ``fp16`` and ``fp32`` round each element.
    ``block_size`` is an int along the contraction axis, a pair (rows, columns) over the operand as
    it is stored, or ``"tensor"``; None is the format's own.  Settings without effect on the format
    are reset to their defaults, so that equal arithmetic compares equal.
    Raises ValueError or TypeError naming the value and what is allowed.
    """

    format: str = "exact"
    scale_rule: str = "floor"
    rounding: str = "even"
    block_size: BlockSize | None = None

    def __post_init__(self) -> None:
        choose("format", self.format, SITE_FORMATS)
        choose("scale_rule", self.scale_rule, SCALE_RULES)
        choose("rounding", self.rounding, ROUNDINGS)
        size = self.block_size
        if size is not None:
            size = check_block_size(tuple(size) if isinstance(size, list) else size)
        block_format = FORMATS.get(self.format)
        if block_format is None or size == block_format.block_size:
            size = None
        object.__setattr__(self, "block_size", size)
        if block_format is None or block_format.scale != "e8m0":
            object.__setattr__(self, "scale_rule", "floor")
        if self.format == "exact":
            object.__setattr__(self, "rounding", "even")

    def rounder(self) -> Rounder | ElementwiseRounder | None:
        """The prepared quantizer, or None for ``exact``."""
        if self.format == "exact":
            return None
        if self.format in ELEMENTWISE:
            return ElementwiseRounder(ELEMENTWISE[self.format], self.rounding)
        rule = self.scale_rule if FORMATS[self.format].scale == "e8m0" else None
        return block_rounder(self.format, self.block_size, rule, self.rounding)


EXACT = SiteFormat()


def _as_site_format(site: str, value: object) -> SiteFormat:
    """Accept a SiteFormat, a format name, or a mapping of SiteFormat's fields."""
    given = value
    try:
        if isinstance(value, str):
            given = SiteFormat(value)
        elif isinstance(value, Mapping):
            given = SiteFormat(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"site {site}: {error}") from None
    if not isinstance(given, SiteFormat):
        raise TypeError(
            f"site {site} must be a SiteFormat, a format name or a mapping; got {value!r}"
        )
    if site in LN_SITES and isinstance(given.block_size, tuple):
        raise ValueError(
            f"site {site} is a vector: block_size must be an int or 'tensor'; "
            f"got {given.block_size}"
        )
    return given


@dataclass(frozen=True)
class Internals:
    """What is rounded element by element besides the sites, in one direction of the pass.

    Each is ``exact`` or ``bf16``; results are computed in the run's dtype, then rounded.

    - gemm_in: operands of GEMMs (x, w, dy), before their sites (but not reused copies again).
    - gemm_out: results of GEMMs, after accumulation in the run's dtype.
    - bias: forward b2 and the sum with it; backward the bias gradient, a sum over dy as ``gemm_in``
      leaves it.
    - layer_norm: its inputs, gamma and beta as their sites make them, and every vector step (sum,
      mean, difference, square, ...).  In one direction alone: the other goes through the same
      steps unrounded, from what the forward pass kept.
    - activation: its inputs and every vector step, by microxcaling's formulas (GELU in its sigmoid
      form).  Backward alone: the exact slope, dy and their product are rounded.  ``bf16_gate``:
      SwiGLU's silu alone, as the paper's script has it.
    - residual: the residual stream after each block; backward its gradient after each block, not
      yet the loss's own.

    Raises ValueError or TypeError naming the value and what is allowed.
    """

    gemm_in: str = "exact"
    gemm_out: str = "exact"
    bias: str = "exact"
    layer_norm: str = "exact"
    activation: str = "exact"
    residual: str = "exact"

    def __post_init__(self) -> None:
        for each in fields(self):
            allowed = ACTIVATION_STEPS if each.name == "activation" else STEPS
            choose(each.name, getattr(self, each.name), allowed)


def _as_internals(direction: str, value: object) -> Internals:
    if isinstance(value, Internals):
        return value
    if isinstance(value, Mapping):
        for name in value:
            choose(f"{direction} internal", name, tuple(f.name for f in fields(Internals)))
        return Internals(**value)
    raise TypeError(f"{direction} must be an Internals or a mapping of its fields; got {value!r}")


@dataclass(frozen=True)
class PrecisionScheme:
    """The format of each of the fourteen sites, for all blocks, and what else is rounded.

    A site may be given as a format name: ``PrecisionScheme(ln_gamma="mxfp8_e4m3")``; vary a
    scheme with dataclasses.replace.

    - overrides: (block index, site, format) triples that take the place of the field in that block;
      a negative index is refused.
    - forward, backward: Internals.  They, gradients and states are rounded by ``internal_rounding``
      (even, away, zero).
    - backward_operands: ``requantize`` dgrad's w and wgrad's x from high precision, or ``reuse``
      the forward's dequantized copies (on which dgrad_w and wgrad_x then act; exact leaves them).
    - gradients: what is handed to the optimizer, ``exact`` or ``bf16``.
    - master_weights, moments (Adam's; SGD's momentum): ``fp32`` (the run's dtype) or ``bf16``,
      rounded after each update.
    - hadamard: rotate both wgrad operands along the batch before they are quantized: times random
      signs, then the orthonormal Walsh-Hadamard matrix of each group of ``hadamard_size`` rows (a
      power of two; a remainder in groups of the largest powers of two that fit).  ``fixed``: one
      vector of ``hadamard_size`` signs for the run; ``random``: new signs each step, layer and
      block.  Not done where both operands are exact.
    - Known faults of the paper's script: ``frozen_beta`` (beta gets no gradient),
      ``quantized_teacher`` (targets pass through the scheme's forward arithmetic).

    Raises ValueError or TypeError naming the field, the value and what is allowed.
    """

    fc1_fprop_x: SiteFormat = EXACT
    fc1_fprop_w: SiteFormat = EXACT
    fc1_dgrad_dy: SiteFormat = EXACT
    fc1_dgrad_w: SiteFormat = EXACT
    fc1_wgrad_dy: SiteFormat = EXACT
    fc1_wgrad_x: SiteFormat = EXACT
    fc2_fprop_x: SiteFormat = EXACT
    fc2_fprop_w: SiteFormat = EXACT
    fc2_dgrad_dy: SiteFormat = EXACT
    fc2_dgrad_w: SiteFormat = EXACT
    fc2_wgrad_dy: SiteFormat = EXACT
    fc2_wgrad_x: SiteFormat = EXACT
    ln_gamma: SiteFormat = EXACT
    ln_beta: SiteFormat = EXACT
    overrides: tuple[tuple[int, str, SiteFormat], ...] = field(default=())
    forward: Internals = Internals()
    backward: Internals = Internals()
    internal_rounding: str = "even"
    backward_operands: str = "requantize"
    gradients: str = "exact"
    master_weights: str = "fp32"
    moments: str = "fp32"
    hadamard: str = "none"
    hadamard_size: int = 16
    frozen_beta: bool = False
    quantized_teacher: bool = False

    def __post_init__(self) -> None:
        for site in SITES:
            object.__setattr__(self, site, _as_site_format(site, getattr(self, site)))
        object.__setattr__(self, "overrides", self._resolved_overrides())
        for direction in ("forward", "backward"):
            value = _as_internals(direction, getattr(self, direction))
            object.__setattr__(self, direction, value)
        choose("internal_rounding", self.internal_rounding, DETERMINISTIC)
        choose("backward_operands", self.backward_operands, ("requantize", "reuse"))
        choose("gradients", self.gradients, STEPS)
        choose("master_weights", self.master_weights, STATES)
        choose("moments", self.moments, STATES)
        choose("hadamard", self.hadamard, ("none", "fixed", "random"))
        allowed = "a power of two from 2 to 65536"
        size = as_integer("hadamard_size", self.hadamard_size, allowed)
        if not 2 <= size <= 2**16 or size & (size - 1):
            raise ValueError(f"hadamard_size must be {allowed}; got {size}")
        object.__setattr__(self, "hadamard_size", 16 if self.hadamard == "none" else size)
        for fault in ("frozen_beta", "quantized_teacher"):
            value = getattr(self, fault)
            if not isinstance(value, (bool, np.bool_)):
                raise TypeError(f"{fault} must be True or False; got {value!r}")
            object.__setattr__(self, fault, bool(value))
        teacher_sites = [s for s in GEMM_SITES if "fprop" in s]
        if self.quantized_teacher and any(
            getattr(self, s).rounding == "stochastic" for s in teacher_sites
        ):
            raise ValueError(
                "quantized_teacher needs deterministic fprop sites (targets are a function of x); "
                "got rounding 'stochastic'"
            )
        if not self._rounds_internally():  # without effect: equal schemes compare equal
            object.__setattr__(self, "internal_rounding", "even")

    def _resolved_overrides(self) -> tuple[tuple[int, str, SiteFormat], ...]:
        try:
            triples = [
                (as_integer("block index", block, "an integer"), site, value)
                for block, site, value in self.overrides
            ]
        except (TypeError, ValueError):
            raise TypeError(
                f"overrides must be (block index, site, format) triples; got {self.overrides!r}"
            ) from None
        for block, site, _ in triples:
            choose("site of an override", site, SITES)
            if block < 0:
                raise ValueError(f"block index of an override must be 0 or more; got {block}")
        resolved = {(block, site): _as_site_format(site, value) for block, site, value in triples}
        # Only what differs from the field has an effect; sorted, so equal schemes compare equal.
        kept = [(b, s, v) for (b, s), v in sorted(resolved.items()) if v != getattr(self, s)]
        return tuple(kept)

    def _rounds_internally(self) -> bool:
        states = (self.gradients, self.master_weights, self.moments)
        return "bf16" in states or not self.forward == self.backward == Internals()

    def at(self, site: str, block: int) -> SiteFormat:
        """The format of ``site`` in block ``block``."""
        choose("site", site, SITES)
        for index, name, value in self.overrides:
            if index == block and name == site:
                return value
        value = getattr(self, site)
        assert isinstance(value, SiteFormat)
        return value

    @property
    def is_exact(self) -> bool:
        return self == PrecisionScheme()


# ---------------------------------------------------------------- made ready for a model


def internal_rounding(scheme: PrecisionScheme, real: Any) -> tuple[int, Any]:
    """(mode, spec) of rounding.round_float by which internals are rounded, for dtype ``real``."""
    return float_spec(ELEMENTWISE["bf16"], scheme.internal_rounding, np.dtype(real))


_TENSORS = 64  # tensor ids of Noise a block: sites from 0 on, signs of rotations from 32 on
_SIGNS = 32
SiteRounder = Rounder | ElementwiseRounder


@dataclass(frozen=True)
class BlockPrecision:
    """A scheme as one block meets it, in one step of one run.

    Stochastic rounding and random signs are a pure function of (seed, step, block, site).
    ``ready``: the forward pass is given weights, gamma and beta that are rounded already.
    """

    scheme: PrecisionScheme
    rounders: Mapping[str, SiteRounder | None]
    block: int
    seed: int = 0
    step: int = 0
    ready: bool = False

    def operand(self, site: str, x: Array, axis: int, out: Array) -> Array:
        """x as the computation sees it: itself if the site is exact, else quantized into out."""
        rounder = self.rounders[site]
        if rounder is None:
            return x
        noise = None
        if rounder.rounding == "stochastic":
            noise = Noise(self.seed, self.step, self.block * _TENSORS + SITES.index(site))
        return rounder(x, axis, out, noise)

    def rotates(self, layer: str) -> bool:
        """Whether wgrad's operands of ``layer`` are rotated: at least one of them is quantized."""
        sites = (f"{layer}_wgrad_dy", f"{layer}_wgrad_x")
        return self.scheme.hadamard != "none" and any(self.rounders[s] for s in sites)

    def signs(self, layer: str, size: int) -> Array:
        """+1 or -1 for each of ``size`` rows, one vector for both operands of a wgrad GEMM."""
        fixed = self.scheme.hadamard == "fixed"
        tensor = _SIGNS + (0 if fixed else self.block * _TENSORS + int(layer == "fc2"))
        period = self.scheme.hadamard_size if fixed else size
        bits = Noise(self.seed, 0 if fixed else self.step, tensor).bits(period) >> np.uint32(31)
        return np.resize(np.where(bits, -1.0, 1.0), size)


def precision_of(
    scheme: PrecisionScheme, depth: int, seed: int = 0, step: int = 0
) -> tuple[BlockPrecision, ...]:
    """The scheme as each block of a model meets it at ``step`` of the run of ``seed``.

    Raises TypeError unless ``scheme`` is a PrecisionScheme, ValueError if an override names a block
    that a model of this depth does not have.
    """
    given: object = scheme
    if not isinstance(given, PrecisionScheme):
        hint = f" (mxsim.scheme({given!r})?)" if isinstance(given, str) else ""
        raise TypeError(f"scheme must be a PrecisionScheme; got {given!r}{hint}")
    if as_integer("step", step, "an integer of at least 0") < 0:
        raise ValueError(f"step must be at least 0; got {step}")
    for block, site, _ in scheme.overrides:
        if block >= depth:
            raise ValueError(
                f"override of {site} names block {block}; a model of depth {depth} has blocks "
                f"0 to {depth - 1}"
            )
    return tuple(
        BlockPrecision(scheme, prepared, block, seed, step)
        for block, prepared in enumerate(_rounders(scheme, depth))
    )


def at_step(blocks: Sequence[BlockPrecision], step: int) -> tuple[BlockPrecision, ...]:
    """``blocks`` at another step of the same run."""
    return tuple(BlockPrecision(b.scheme, b.rounders, b.block, b.seed, step) for b in blocks)


@lru_cache(maxsize=128)
def _rounders(scheme: PrecisionScheme, depth: int) -> tuple[Mapping[str, SiteRounder | None], ...]:
    return tuple(
        MappingProxyType({site: scheme.at(site, block).rounder() for site in SITES})
        for block in range(depth)
    )


def scheme_from_dict(values: Mapping[str, Any]) -> PrecisionScheme:
    """Inverse of dataclasses.asdict; raises ValueError for an unknown field."""
    known = tuple(f.name for f in fields(PrecisionScheme))
    for name in values:
        choose("site", name, known)
    plain = {name: value for name, value in values.items() if name != "overrides"}
    overrides = tuple((b, s, _as_site_format(s, v)) for b, s, v in values.get("overrides", ()))
    return PrecisionScheme(**plain, overrides=overrides)
