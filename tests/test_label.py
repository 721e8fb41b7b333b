"""Labels of schemes: what they say, and that no two schemes share one."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim.formats import FORMATS
from mxsim.label import scheme_label, site_label
from mxsim.precision import GEMM_SITES, LN_SITES, SITES, Internals, PrecisionScheme, SiteFormat
from mxsim.store import result_id

E4M3 = SiteFormat("mxfp8_e4m3")
BF16 = SiteFormat("bf16")
FULL = SiteFormat("mxfp8_e4m3", "rceil", "stochastic", 16)
INSIDE = Internals(layer_norm="bf16")
ALL = mxsim.scheme("all_e4m3")


def made(**given: Any) -> PrecisionScheme:
    return PrecisionScheme(**given)


def everywhere(site: SiteFormat, sites: tuple[str, ...] = SITES) -> PrecisionScheme:
    return made(**dict.fromkeys(sites, site))


def test_presets_are_called_by_their_names() -> None:
    labels = {name: scheme_label(preset.scheme) for name, preset in mxsim.PRESETS.items()}
    different = {name: label for name, label in labels.items() if label != name}
    assert different == {"paper_text": "all_e4m3"}  # the same arithmetic
    assert mxsim.scheme("paper_text") == mxsim.scheme("all_e4m3")
    rebuilt = everywhere(SiteFormat("mxfp4_e2m1", block_size=32))  # the format's own block size
    assert scheme_label(rebuilt) == "all_e2m1"


@pytest.mark.parametrize(
    ("scheme", "label"),
    [
        (everywhere(FULL), "all: mxfp8_e4m3 block=16 rule=rceil rounding=stochastic"),
        (
            everywhere(SiteFormat("nvfp4", block_size=(16, 16)), GEMM_SITES),
            "gemm: nvfp4 block=16x16",
        ),
        (everywhere(SiteFormat("mxint8", block_size="tensor")), "all: mxint8 block=tensor"),
        (everywhere(SiteFormat("fp16", rounding="zero"), LN_SITES), "ln: fp16 rounding=zero"),
        (
            replace(everywhere(E4M3, GEMM_SITES), ln_gamma=BF16, ln_beta=BF16),
            "gemm: mxfp8_e4m3; ln: bf16",
        ),
        (replace(ALL, ln_beta=SiteFormat()), "gemm,ln_gamma: mxfp8_e4m3"),
        (PrecisionScheme(fc1_fprop_w=E4M3, fc2_fprop_w=E4M3), "fprop_w: mxfp8_e4m3"),
        (
            made(
                **{s: E4M3 for s in GEMM_SITES if "fprop" in s},
                **{s: SiteFormat("mxfp8_e5m2") for s in GEMM_SITES if "dgrad" in s},
            ),
            "fprop: mxfp8_e4m3; dgrad: mxfp8_e5m2",
        ),
        (PrecisionScheme(fc2_wgrad_x=E4M3), "fc2_wgrad_x: mxfp8_e4m3"),
        (everywhere(E4M3, tuple(s for s in SITES if s.startswith("fc1"))), "fc1: mxfp8_e4m3"),
    ],
)
def test_only_what_differs_is_said(scheme: PrecisionScheme, label: str) -> None:
    assert scheme_label(scheme) == label


BEYOND: list[dict[str, Any]] = [
    {"overrides": ((0, "ln_gamma", FULL),)},
    {"overrides": ((1, "ln_gamma", FULL),)},
    {"overrides": ((0, "ln_gamma", "exact"),)},  # vanishes where ln_gamma itself is exact
    *({"forward": Internals(**{name: "bf16"})} for name in ("gemm_in", "bias", "activation")),
    {"forward": INSIDE},
    {"backward": INSIDE},
    {"forward": INSIDE, "internal_rounding": "away"},
    {"backward_operands": "reuse"},
    {"gradients": "bf16"},
    {"master_weights": "bf16"},
    {"moments": "bf16"},
    {"hadamard": "fixed"},
    {"hadamard": "random"},
    {"hadamard": "random", "hadamard_size": 32},
    {"frozen_beta": True},
]


@pytest.mark.parametrize("name", ["all_e4m3", "ln_only_e2m1", "gemm_e2m1", "mx_mix"])
@pytest.mark.parametrize("change", BEYOND)
def test_what_lies_beyond_the_sites_is_hashed(name: str, change: dict[str, Any]) -> None:
    base = mxsim.scheme(name)
    scheme = replace(base, **change)
    label = scheme_label(scheme)
    if scheme == base:
        assert change["overrides"][0][2] == "exact"
        assert label == name
        return
    sites, _, digits = label.rpartition(" #")
    assert digits == result_id(scheme)[:6]
    assert parsed(sites) == PrecisionScheme(**{site: getattr(base, site) for site in SITES})
    assert scheme_label(scheme, digits=16) == f"{sites} #{result_id(scheme)}"


def test_a_scheme_without_sites() -> None:
    scheme = PrecisionScheme(moments="bf16")
    assert scheme_label(scheme) == f"exact #{result_id(scheme)[:6]}"


MEMBERS = {
    "all": [*GEMM_SITES, "ln_gamma", "ln_beta"],
    "gemm": list(GEMM_SITES),
    "ln": ["ln_gamma", "ln_beta"],
}


def parsed(label: str) -> PrecisionScheme:
    """The scheme that a label of sites describes: read word by word, as a person would."""
    found = {}
    for group in filter(None, label.split("; ")):
        names, _, words = group.partition(": ")
        form, *options = words.split(" ")
        given = dict(option.split("=") for option in options)
        block = given.get("block")
        size: Any = block
        if block is not None and "x" in block:
            size = tuple(int(n) for n in block.split("x"))
        elif block is not None and block.isdigit():
            size = int(block)
        site = SiteFormat(form, given.get("rule", "floor"), given.get("rounding", "even"), size)
        for name in names.split(","):
            for member in MEMBERS.get(name) or [s for s in SITES if name in s]:
                assert member not in found  # each site once
                found[member] = site
    return made(**found)


def test_labels_can_be_read_back_so_no_two_schemes_share_one() -> None:
    choices = [
        SiteFormat(form, rule, rounding, size)
        for form, rule, rounding, size in product(
            ("exact", "bf16", *FORMATS),
            ("floor", "rceil"),
            ("even", "stochastic"),
            (None, 16, 128, "tensor"),
        )
    ]
    rng = np.random.default_rng(0)
    by_label: dict[str, PrecisionScheme] = {}
    for i in range(1500):
        few = rng.choice(len(choices), size=1 + i % 4)
        sites = {s: choices[few[rng.integers(len(few))]] for s in SITES}
        if i % 2:  # layers alike, as in most schemes
            sites |= {s: sites[s.replace("fc2", "fc1")] for s in GEMM_SITES}
        scheme = made(**sites)
        label = scheme_label(scheme)
        assert by_label.setdefault(label, scheme) == scheme
        if label not in mxsim.PRESETS:
            assert parsed(label) == scheme
    assert len(by_label) > 1000


def test_every_single_change_to_every_preset_changes_the_label() -> None:
    by_label: dict[str, PrecisionScheme] = {}
    sites = (E4M3, FULL, SiteFormat("mxfp8_e4m3", block_size=64), BF16)
    changes = [{site: value} for site in SITES for value in sites] + BEYOND
    schemes = [preset.scheme for preset in mxsim.PRESETS.values()]
    for preset in mxsim.PRESETS.values():
        for change in changes:
            if preset.scheme.quantized_teacher and FULL in change.values():
                continue  # refused: targets must be a function of x
            schemes.append(replace(preset.scheme, **change))
    for scheme in schemes:
        assert by_label.setdefault(scheme_label(scheme), scheme) == scheme
    assert len(by_label) == len(set(schemes)) > 1000


def test_a_site_alone() -> None:
    assert site_label(SiteFormat()) == "exact"
    assert site_label(FULL) == "mxfp8_e4m3 block=16 rule=rceil rounding=stochastic"


def test_refusals() -> None:
    with pytest.raises(TypeError, match="scheme must be a PrecisionScheme; got 'exact'"):
        scheme_label("exact")  # type: ignore[arg-type]
    for digits in (0, 17):
        with pytest.raises(ValueError, match=f"digits must be in 1..16; got {digits}"):
            scheme_label(ALL, digits)
