"""Precision schemes: which operand of which GEMM, which part of layer norm, gets which format.

A scheme is data: one SiteFormat for each of the fourteen quantization sites.  What a site does to
an array is in quantize.py, where the sites sit in the step is in proxy.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from mxsim.formats import ELEMENTWISE, FORMATS, ROUNDINGS, SCALE_RULES, choose
from mxsim.layout import as_integer
from mxsim.quantize import ElementwiseRounder, Rounder, block_rounder

# Blocks always run along the contraction axis of the GEMM.  For a linear map y = x w^T:
#   fprop  y = x w^T     x, w along in
#   dgrad  dx = dy w     dy, w along out
#   wgrad  dw = dy^T x   dy, x along batch
OPERANDS = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
GEMM_SITES = tuple(f"{layer}_{operand}" for layer in ("fc1", "fc2") for operand in OPERANDS)
LN_SITES = ("ln_gamma", "ln_beta")
SITES = GEMM_SITES + LN_SITES

SITE_FORMATS = ("exact", *ELEMENTWISE, *FORMATS)
SITE_ROUNDINGS = tuple(r for r in ROUNDINGS if r != "stochastic")


@dataclass(frozen=True)
class SiteFormat:
    """What happens to one operand: a format name, with scale rule, rounding and block size.

    ``exact`` leaves the operand alone; ``bf16`` and ``fp16`` round each element.  Settings without
    effect on the format are reset to their defaults, so that equal arithmetic compares equal.
    Raises ValueError or TypeError naming the value and what is allowed.
    """

    format: str = "exact"
    scale_rule: str = "floor"
    rounding: str = "even"
    block_size: int = 32

    def __post_init__(self) -> None:
        choose("format", self.format, SITE_FORMATS)
        choose("scale_rule", self.scale_rule, SCALE_RULES)
        choose("rounding", self.rounding, SITE_ROUNDINGS)
        size = as_integer("block_size", self.block_size, "an integer of at least 1")
        if size < 1:
            raise ValueError(f"block_size must be at least 1; got {size}")
        object.__setattr__(self, "block_size", size)
        if self.format not in FORMATS or FORMATS[self.format].scale != "e8m0":
            object.__setattr__(self, "scale_rule", "floor")
            object.__setattr__(self, "block_size", 32)
        if self.format == "exact":
            object.__setattr__(self, "rounding", "even")

    def rounder(self) -> Rounder | ElementwiseRounder | None:
        """The prepared quantizer, or None for ``exact``."""
        if self.format == "exact":
            return None
        if self.format in ELEMENTWISE:
            return ElementwiseRounder(ELEMENTWISE[self.format], self.rounding)
        if FORMATS[self.format].scale != "e8m0":  # NVFP4: its own block size and scale rule
            return block_rounder(self.format, rounding=self.rounding)
        return block_rounder(self.format, self.block_size, self.scale_rule, self.rounding)


EXACT = SiteFormat()


def _as_site_format(site: str, value: object) -> SiteFormat:
    """Accept a SiteFormat, a format name, or a mapping of SiteFormat's fields."""
    if isinstance(value, SiteFormat):
        return value
    try:
        if isinstance(value, str):
            return SiteFormat(value)
        if isinstance(value, Mapping):
            return SiteFormat(**value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"site {site}: {error}") from None
    raise TypeError(f"site {site} must be a SiteFormat, a format name or a mapping; got {value!r}")


@dataclass(frozen=True)
class PrecisionScheme:
    """The format of each of the fourteen sites, for all blocks, with overrides by block index.

    A field may be given as a format name: ``PrecisionScheme(ln_gamma="mxfp8_e4m3")``; vary a
    scheme with dataclasses.replace.  ``overrides`` holds (block index, site, format) triples that
    take the place of the field in that block; a negative index is refused.
    Raises ValueError or TypeError naming site, value and what is allowed.
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

    def __post_init__(self) -> None:
        for site in SITES:
            object.__setattr__(self, site, _as_site_format(site, getattr(self, site)))
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
        object.__setattr__(self, "overrides", tuple(kept))

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


BlockRounders = Mapping[str, Rounder | ElementwiseRounder | None]


def rounders(scheme: PrecisionScheme, depth: int) -> tuple[BlockRounders, ...]:
    """Prepared quantizers by site, one mapping a block.

    Raises TypeError unless ``scheme`` is a PrecisionScheme, ValueError if an override names a block
    that a model of this depth does not have.
    """
    given: object = scheme
    if not isinstance(given, PrecisionScheme):
        hint = f" (mxsim.scheme({given!r})?)" if isinstance(given, str) else ""
        raise TypeError(f"scheme must be a PrecisionScheme; got {given!r}{hint}")
    return _rounders(scheme, depth)


@lru_cache(maxsize=128)
def _rounders(scheme: PrecisionScheme, depth: int) -> tuple[BlockRounders, ...]:
    for block, site, _ in scheme.overrides:
        if block >= depth:
            raise ValueError(
                f"override of {site} names block {block}; a model of depth {depth} has blocks "
                f"0 to {depth - 1}"
            )
    return tuple(
        MappingProxyType({site: scheme.at(site, block).rounder() for site in SITES})
        for block in range(depth)
    )


# Presets: which sites, in which element format.  Everything not named is exact.
_GROUPS: Mapping[str, tuple[str, ...]] = {"gemm": GEMM_SITES, "all": SITES, "ln_only": LN_SITES}
_SHORT = {  # e4m3 -> mxfp8_e4m3
    name.split("_")[-1].removeprefix("mx"): name
    for name in FORMATS
    if name.startswith("mx") and name != "mxint8_asymmetric"
}


def _uniform(sites: tuple[str, ...], name: str) -> PrecisionScheme:
    chosen: dict[str, Any] = dict.fromkeys(sites, SiteFormat(name))
    return PrecisionScheme(**chosen)


PRESETS: Mapping[str, PrecisionScheme] = MappingProxyType(
    {"exact": PrecisionScheme()}
    | {
        f"{group}_{short}": _uniform(sites, name)
        for group, sites in _GROUPS.items()
        for short, name in _SHORT.items()
    }
)
"""Schemes by name: ``exact``; ``gemm_*`` the twelve GEMM sites, ``all_*`` the fourteen,
``ln_only_*`` the layer-norm affine parameters; * is e4m3, e5m2, e3m2, e2m3, e2m1 or int8."""


def scheme(name: str) -> PrecisionScheme:
    """The preset of that name (see PRESETS).

    Raises ValueError for an unknown name, listing the known ones; TypeError if not a string.
    """
    return PRESETS[choose("scheme", name, PRESETS)]


def scheme_from_dict(values: Mapping[str, Any]) -> PrecisionScheme:
    """Inverse of dataclasses.asdict; raises ValueError for an unknown site."""
    known = [f.name for f in fields(PrecisionScheme)]
    for name in values:
        choose("site", name, tuple(known))
    plain = {name: value for name, value in values.items() if name != "overrides"}
    overrides = tuple((b, s, _as_site_format(s, v)) for b, s, v in values.get("overrides", ()))
    return PrecisionScheme(**plain, overrides=overrides)
