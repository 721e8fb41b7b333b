"""Interventions as data: which sites each of them changes."""

from dataclasses import replace

import pytest

from mxsim import SiteFormat, scheme
from mxsim.interventions import INTERVENTIONS
from mxsim.precision import GEMM_SITES, LN_SITES, SITES, PrecisionScheme

MX = scheme("all_e4m3")
OPERANDS = {
    "rceil": SITES,
    "ln_exact": LN_SITES,
    "bf16_activations_forward": ("fc1_fprop_x", "fc2_fprop_x"),
    "bf16_activations": tuple(s for s in GEMM_SITES if not s.endswith("_w")),
    "exact_backward": tuple(s for s in GEMM_SITES if "fprop" not in s),
    "bf16_weights": ("fc1_fprop_w", "fc2_fprop_w"),
    "stochastic": tuple(s for s in GEMM_SITES if s.endswith("_dy")),
    "small_blocks": SITES,
    "full_precision": SITES,
}


def changed(name: str, before: PrecisionScheme) -> PrecisionScheme:
    after = INTERVENTIONS[name].change(0, before).scheme
    assert after is not None
    return after


@pytest.mark.parametrize("name", sorted(OPERANDS))
def test_an_intervention_changes_its_sites_and_no_other(name: str) -> None:
    after = changed(name, MX)
    assert {s for s in SITES if getattr(after, s) != getattr(MX, s)} == set(OPERANDS[name])


def test_what_the_sites_become() -> None:
    assert changed("rceil", MX).ln_gamma == SiteFormat("mxfp8_e4m3", "rceil")
    assert changed("ln_exact", MX).ln_beta == SiteFormat()
    assert changed("bf16_activations", MX).fc2_wgrad_dy == SiteFormat("bf16")
    assert changed("stochastic", MX).fc1_dgrad_dy.rounding == "stochastic"
    assert changed("small_blocks", MX).fc1_fprop_x.block_size == 8
    assert changed("small_blocks", scheme("nvfp4_recipe")).fc1_fprop_x.block_size == 4
    assert changed("hadamard", MX).hadamard == "random"
    assert changed("full_precision", scheme("paper_code")).is_exact
    assert INTERVENTIONS["lower_lr"].change(0, MX).lr_factor == 0.5


def test_internals_of_the_papers_script_are_made_exact() -> None:
    before = scheme("paper_code")
    after = changed("ln_exact", before)
    assert (after.forward.layer_norm, after.backward.layer_norm) == ("exact", "exact")
    assert after.forward.gemm_in == before.forward.gemm_in == "bf16"
    assert changed("exact_backward", before).backward == type(before.backward)()
    assert changed("activation_exact", before).forward.activation == "exact"


def test_overrides_are_changed_like_the_sites() -> None:
    before = replace(
        MX,
        overrides=(
            (1, "ln_gamma", SiteFormat("mxfp4_e2m1")),
            (0, "fc1_fprop_w", SiteFormat("bf16")),
        ),
    )
    after = changed("rceil", before)
    assert after.at("ln_gamma", 1) == SiteFormat("mxfp4_e2m1", "rceil")
    assert after.at("fc1_fprop_w", 0) == SiteFormat("bf16")
    assert changed("ln_exact", before).at("ln_gamma", 1) == SiteFormat()


def test_what_does_nothing_says_so() -> None:
    assert INTERVENTIONS["none"].does_nothing(MX)
    assert INTERVENTIONS["activation_exact"].does_nothing(MX)
    assert not INTERVENTIONS["activation_exact"].does_nothing(scheme("bf16"))
    assert INTERVENTIONS["ln_exact"].does_nothing(scheme("gemm_e4m3"))
    for name in ("placebo", "lower_lr", "rceil", "full_precision"):
        assert not INTERVENTIONS[name].does_nothing(MX)
