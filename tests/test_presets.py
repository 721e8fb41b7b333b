"""Named schemes: what each is, its options, its card, and what differs between two."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim.card import differences, precision_card, remarks
from mxsim.precision import GEMM_SITES, SITES, Internals, PrecisionScheme, SiteFormat
from mxsim.presets import paper_code

E4M3 = SiteFormat("mxfp8_e4m3")
AWAY = SiteFormat("mxfp8_e4m3", rounding="away")
EXACT = SiteFormat()


def formats(scheme: PrecisionScheme) -> dict[str, str]:
    """operand -> element format, of fc1; fc2 must have the same."""
    found: dict[str, SiteFormat] = {}
    for site in GEMM_SITES:
        layer, operand = site.split("_", 1)
        found.setdefault(operand, getattr(scheme, site))
        assert found[operand] == getattr(scheme, site), layer
    return {operand: value.format for operand, value in found.items()}


def test_mx_mix_has_the_forward_format_in_wgrad_x() -> None:
    assert formats(mxsim.scheme("mx_mix")) == {
        "fprop_x": "mxfp8_e4m3",
        "fprop_w": "mxfp8_e4m3",
        "dgrad_dy": "mxfp8_e5m2",
        "dgrad_w": "mxfp8_e5m2",
        "wgrad_dy": "mxfp8_e5m2",
        "wgrad_x": "mxfp8_e4m3",
    }


def test_hybrids_are_what_their_names_say() -> None:
    assert formats(mxsim.scheme("hybrid_bf16_activations")) == {
        "fprop_x": "bf16",
        "fprop_w": "mxfp8_e4m3",
        "dgrad_dy": "bf16",
        "dgrad_w": "mxfp8_e4m3",
        "wgrad_dy": "bf16",
        "wgrad_x": "bf16",
    }
    forward_only = formats(mxsim.scheme("hybrid_forward_only"))
    assert {k: v for k, v in forward_only.items() if v != "exact"} == {
        "fprop_x": "mxfp8_e4m3",
        "fprop_w": "mxfp8_e4m3",
    }


def test_paper_text_is_all_sites_and_nothing_else() -> None:
    everywhere: dict[str, Any] = dict.fromkeys(SITES, E4M3)
    assert mxsim.scheme("paper_text") == PrecisionScheme(**everywhere)


def test_recipes() -> None:
    rceil = mxsim.scheme("mxfp8_rceil")
    assert {getattr(rceil, site) for site in GEMM_SITES} == {SiteFormat("mxfp8_e4m3", "rceil")}
    nv = mxsim.scheme("nvfp4_recipe")
    assert nv.fc1_dgrad_dy.rounding == nv.fc2_wgrad_dy.rounding == "stochastic"
    assert nv.fc1_fprop_w == nv.fc1_dgrad_w == SiteFormat("nvfp4", block_size=(16, 16))
    assert nv.fc1_fprop_x == nv.fc1_wgrad_x == SiteFormat("nvfp4")
    assert (nv.hadamard, nv.hadamard_size) == ("fixed", 16)
    assert nv.ln_gamma == nv.ln_beta == EXACT


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ["mxfp8_e4m3"] * 6),
        ({"bwd": "mxfp8_e5m2"}, ["mxfp8_e4m3"] * 2 + ["mxfp8_e5m2"] * 3 + ["mxfp8_e4m3"]),
        ({"fwd": "mxfp6_e2m3"}, ["mxfp6_e2m3"] * 6),
        ({"acts": "bf16"}, ["bf16", "mxfp8_e4m3", "bf16", "mxfp8_e4m3", "bf16", "bf16"]),
        ({"weights": "bf16"}, ["mxfp8_e4m3", "bf16"] + ["mxfp8_e4m3"] * 4),
        ({"backward": "exact"}, ["mxfp8_e4m3"] * 2 + ["exact"] * 4),
    ],
)
def test_options_of_paper_code(options: dict[str, str], expected: list[str]) -> None:
    scheme = mxsim.scheme("paper_code", **options)
    assert list(formats(scheme).values()) == expected
    assert scheme.frozen_beta
    assert scheme.quantized_teacher
    assert scheme.internal_rounding == "away"
    steps = Internals("bf16", "bf16", "bf16", "bf16", "bf16_gate", "exact")
    assert scheme.forward == steps
    assert scheme.backward == (Internals() if "backward" in options else steps)
    rounded = [s for s in GEMM_SITES if getattr(scheme, s).format != "exact"]
    assert {getattr(scheme, s).rounding for s in rounded} == {"away"}
    assert scheme.ln_gamma == scheme.ln_beta == EXACT


def test_the_faults_of_the_script_are_fields_of_their_own() -> None:
    library = mxsim.scheme("microxcaling")
    mended = replace(paper_code(), frozen_beta=False, quantized_teacher=False)
    assert library == replace(mended, forward=library.forward, backward=library.backward)
    everywhere = Internals(*["bf16"] * 6)
    assert library.forward == library.backward == everywhere


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: mxsim.scheme("paper_cod"), ValueError, "got 'paper_cod'.*mean paper_code"),
        (lambda: mxsim.scheme("paper_code", fwd="e4m3"), ValueError, "fwd.*got 'e4m3'"),
        (lambda: mxsim.scheme("paper_code", backward="no"), ValueError, "mx, exact; got 'no'"),
        (lambda: mxsim.scheme("paper_code", mode="x"), TypeError, "fwd, bwd.*got mode='x'"),
        (lambda: mxsim.scheme("all_e4m3", fwd="bf16"), TypeError, "no options; got fwd='bf16'"),
        (lambda: mxsim.presets.scheme_of("paper_code:fwd"), ValueError, "option=value"),
    ],
)
def test_refusals(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()


def test_a_scheme_in_words() -> None:
    assert mxsim.presets.scheme_of("all_int8") == mxsim.scheme("all_int8")
    text = "paper_code:bwd=mxfp8_e5m2,acts=bf16"
    assert mxsim.presets.scheme_of(text) == paper_code(bwd="mxfp8_e5m2", acts="bf16")


@pytest.mark.parametrize("name", mxsim.PRESETS)
def test_every_preset_trains_and_has_a_card(name: str) -> None:
    cfg = mxsim.ProxyConfig(width=32, depth=2, batch=32, steps=3, lr=1e-3, eval_samples=64)
    scheme = mxsim.scheme(name)
    run = mxsim.train(cfg, scheme)
    assert np.isfinite(run.losses).all()
    exact = mxsim.train(cfg, mxsim.scheme("exact"))
    same = np.array_equal(run.losses, exact.losses)
    assert same == (name == "exact")
    card = precision_card(scheme)
    quantized = [row for row in card[:8] if row.format != "exact"]
    used = {getattr(scheme, site).format for site in SITES} - {"exact"}
    assert {row.format for row in quantized} == used
    text = " ".join(remarks(scheme))
    assert ("beta gets no gradient" in text) == scheme.frozen_beta
    assert ("Hadamard of 16" in text) == (scheme.hadamard != "none")


def test_a_card_says_where_layers_and_blocks_differ() -> None:
    scheme = PrecisionScheme(
        fc1_fprop_x=E4M3, overrides=((1, "fc2_wgrad_x", SiteFormat("bf16", rounding="away")),)
    )
    rows = {row.tensor: row for row in precision_card(scheme)}
    assert rows["x of fc1"].format == "mxfp8_e4m3"
    assert rows["x of fc1"].axis == "in"
    assert rows["x of fc2"].format == "exact"
    override = rows["fc2_wgrad_x"]
    assert (override.used_in, override.format, override.rounding) == (
        "block 1",
        "bf16",
        "ties away",
    )


def test_differences_name_every_field_that_differs_and_no_other() -> None:
    assert differences(mxsim.scheme("all_e4m3"), mxsim.scheme("paper_text")) == []
    found = {row[0]: row[1:] for row in differences(mxsim.scheme("exact"), paper_code())}
    assert found.pop("the 12 GEMM sites") == ("exact", "mxfp8_e4m3, E8M0, floor, ties away, 32")
    assert found.pop("forward.activation") == ("exact", "bf16_gate")
    assert found.pop("frozen_beta") == ("False", "True")
    rest = {f"{d}.{i}" for d in ("forward", "backward") for i in vars(Internals())}
    rest -= {"forward.activation", "forward.residual", "backward.residual"}
    assert set(found) == rest | {"internal_rounding", "quantized_teacher"}
    [row] = differences(mxsim.scheme("exact"), PrecisionScheme(overrides=((1, "ln_beta", E4M3),)))
    assert row == (
        "overrides",
        "none",
        "block 1 ln_beta: mxfp8_e4m3, E8M0, floor, ties to even, 32",
    )
