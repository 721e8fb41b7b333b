"""Precision schemes: sites, presets, overrides, refusals."""

import dataclasses
from dataclasses import asdict, replace
from typing import Any

import pytest

import mxsim
from mxsim.precision import (
    EXACT,
    GEMM_SITES,
    LN_SITES,
    SITES,
    PrecisionScheme,
    SiteFormat,
    precision_of,
    scheme_from_dict,
)


def test_the_fourteen_sites_are_the_fields_of_a_frozen_scheme() -> None:
    assert len(SITES) == 14
    fields = [f.name for f in dataclasses.fields(PrecisionScheme)]
    assert tuple(fields[:15]) == (*SITES, "overrides")
    with pytest.raises(dataclasses.FrozenInstanceError):
        mxsim.scheme("exact").ln_gamma = EXACT  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "sites"),
    [
        ("exact", ()),
        ("gemm_e4m3", GEMM_SITES),
        ("all_e4m3", SITES),
        ("ln_only_e4m3", LN_SITES),
    ],
)
def test_presets_quantize_their_sites_and_no_other(name: str, sites: tuple[str, ...]) -> None:
    scheme = mxsim.scheme(name)
    e4m3 = SiteFormat("mxfp8_e4m3", "floor", "even", 32)
    assert {s: getattr(scheme, s) for s in SITES} == {
        s: e4m3 if s in sites else EXACT for s in SITES
    }
    assert scheme.is_exact == (name == "exact")


def test_presets_exist_for_every_element_format() -> None:
    shorts = ("e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "int8")
    expected = {f"{g}_{s}" for g in ("gemm", "all", "ln_only") for s in shorts}
    named = "exact bf16 mx_mix hybrid_bf16_activations hybrid_forward_only paper_text paper_code "
    named += "microxcaling mxfp8_rceil nvfp4_recipe"
    assert set(mxsim.PRESETS) == expected | set(named.split())
    assert mxsim.scheme("all_int8").ln_beta.format == "mxint8"
    assert all(preset.source for preset in mxsim.PRESETS.values())


def test_a_site_may_be_given_by_name_or_mapping() -> None:
    a = replace(mxsim.scheme("all_e4m3"), ln_gamma="exact")  # type: ignore[arg-type]
    assert a.ln_gamma == EXACT
    b = PrecisionScheme(fc1_fprop_x={"format": "mxint8", "block_size": 16})  # type: ignore[arg-type]
    assert b.fc1_fprop_x == SiteFormat("mxint8", block_size=16)


def test_settings_without_effect_do_not_make_schemes_differ() -> None:
    assert SiteFormat("exact", "rceil", "away", 7) == EXACT
    assert SiteFormat("bf16", "rceil", "away", 7) == SiteFormat("bf16", rounding="away")
    same = PrecisionScheme(overrides=((3, "ln_beta", EXACT), (1, "ln_gamma", EXACT)))
    assert same == PrecisionScheme()


def test_overrides_take_the_place_of_a_site_in_one_block() -> None:
    scheme = PrecisionScheme(
        ln_gamma="mxint8",  # type: ignore[arg-type]
        overrides=((2, "fc1_fprop_w", "bf16"), (0, "ln_gamma", "exact")),  # type: ignore[arg-type]
    )
    assert scheme.at("ln_gamma", 0) == EXACT
    assert scheme.at("ln_gamma", 1) == SiteFormat("mxint8")
    assert scheme.at("fc1_fprop_w", 2) == SiteFormat("bf16")
    prepared = [each.rounders for each in precision_of(scheme, 3)]
    assert prepared[0]["ln_gamma"] is None
    assert prepared[1]["ln_gamma"] is not None
    assert scheme_from_dict(asdict(scheme)) == scheme
    shuffled = replace(scheme, overrides=scheme.overrides[::-1])
    assert shuffled == scheme


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: mxsim.scheme("all_e9m9"), ValueError, "got 'all_e9m9'.*all_e4m3"),
        (lambda: mxsim.scheme(3), TypeError, "3"),  # type: ignore[arg-type]
        (lambda: SiteFormat("mxfp8"), ValueError, r"mxfp8_e4m3.*got 'mxfp8'"),
        (lambda: SiteFormat("mxint8", "up"), ValueError, r"rceil.*got 'up'"),
        (lambda: SiteFormat("mxint8", rounding="up"), ValueError, r"even.*got 'up'"),
        (lambda: SiteFormat("mxint8", block_size=0), ValueError, "at least 1; got 0"),
        (lambda: PrecisionScheme(ln_gamma="e4m3"), ValueError, r"site ln_gamma.*got 'e4m3'"),  # type: ignore[arg-type]
        (lambda: PrecisionScheme(ln_gamma=None), TypeError, "site ln_gamma.*None"),  # type: ignore[arg-type]
        (lambda: scheme_from_dict({"ln_alpha": "exact"}), ValueError, "got 'ln_alpha'.*ln_gamma"),
        (lambda: mxsim.scheme("exact").at("fc3", 0), ValueError, "fc1_fprop_x.*got 'fc3'"),
        (lambda: PrecisionScheme(overrides=((-1, "ln_gamma", EXACT),)), ValueError, "got -1"),
        (lambda: PrecisionScheme(overrides=((0, "x", EXACT),)), ValueError, "ln_gamma.*got 'x'"),
        (lambda: PrecisionScheme(overrides=((0, "ln_gamma"),)), TypeError, "triples"),  # type: ignore[arg-type]
        (lambda: PrecisionScheme(overrides=((1.9, "ln_gamma", EXACT),)), TypeError, "triples"),  # type: ignore[arg-type]
        (lambda: PrecisionScheme(overrides=(("1", "ln_gamma", EXACT),)), TypeError, "triples"),  # type: ignore[arg-type]
    ],
)
def test_refusals_name_the_value_and_what_is_allowed(
    build: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        build()


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="ln_alpha"):
        PrecisionScheme(ln_alpha="exact")  # type: ignore[call-arg]
