"""Short names of schemes, for tables and axes; all of it is on its card, card.py."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from functools import lru_cache

from mxsim.precision import (
    EXACT,
    GEMM_SITES,
    LN_SITES,
    OPERANDS,
    SITES,
    PrecisionScheme,
    SiteFormat,
)
from mxsim.presets import PRESETS
from mxsim.store import result_id

# Larger groups first: what they name is left out of the smaller ones.
_GROUPS: Mapping[str, tuple[str, ...]] = {
    "all": SITES,
    "gemm": GEMM_SITES,
    **{layer: tuple(s for s in GEMM_SITES if s.startswith(layer)) for layer in ("fc1", "fc2")},
    **{gemm: tuple(s for s in GEMM_SITES if gemm in s) for gemm in ("fprop", "dgrad", "wgrad")},
    "ln": LN_SITES,
    **{operand: (f"fc1_{operand}", f"fc2_{operand}") for operand in OPERANDS},
    **{site: (site,) for site in SITES},
}


def scheme_label(scheme: PrecisionScheme, digits: int = 6) -> str:
    """A short name of the scheme's arithmetic.

    The name of the preset that equals it (of presets alike, the last listed: ``all_e4m3``, not
    ``paper_text``); else its sites by format, exact ones left out:
    ``gemm: mxfp8_e4m3; ln: mxfp6_e2m3 rule=rceil``.  Where anything else differs from the defaults
    (overrides, internals, states, ...), ``#`` and the first ``digits`` (1 to 16) hexadecimal digits
    of the scheme's result id follow.

    Labels without ``#`` never coincide; two schemes with the same sites share one with chance
    16 ** -digits, for 6 digits one in 17 million.
    Raises TypeError unless ``scheme`` is a PrecisionScheme, ValueError for other ``digits``.
    """
    given: object = scheme
    if not isinstance(given, PrecisionScheme):
        raise TypeError(f"scheme must be a PrecisionScheme; got {given!r}")
    if not 1 <= digits <= 16:
        raise ValueError(f"digits must be in 1..16; got {digits}")
    preset = _preset_names().get(scheme)
    if preset is not None:
        return preset
    groups: dict[SiteFormat, set[str]] = {}
    for site in SITES:
        value = getattr(scheme, site)
        if value != EXACT:
            groups.setdefault(value, set()).add(site)
    label = "; ".join(f"{_sites(sites)}: {site_label(value)}" for value, sites in groups.items())
    # Not by replacing the sites: overrides that equal the replaced field would vanish.
    if all(getattr(scheme, f.name) == f.default for f in fields(scheme) if f.name not in SITES):
        return label
    return f"{label or 'exact'} #{result_id(scheme)[:digits]}"


def site_label(site: SiteFormat) -> str:
    """The format's name and what differs from its defaults: ``mxfp8_e4m3 block=16 rule=rceil``."""
    words = [site.format]
    size = site.block_size
    if size is not None:
        words.append(f"block={size[0]}x{size[1]}" if isinstance(size, tuple) else f"block={size}")
    if site.scale_rule != "floor":
        words.append(f"rule={site.scale_rule}")
    if site.rounding != "even":
        words.append(f"rounding={site.rounding}")
    return " ".join(words)


def _sites(sites: Collection[str]) -> str:
    left, words = set(sites), []
    for name, members in _GROUPS.items():
        if left.issuperset(members):
            words.append(name)
            left.difference_update(members)
    return ",".join(words)


@lru_cache(maxsize=1)
def _preset_names() -> Mapping[PrecisionScheme, str]:
    return {preset.scheme: name for name, preset in PRESETS.items()}
