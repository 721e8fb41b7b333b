"""Site attribution and Shapley values against their definitions."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim.attribution import GROUPS, active_sites, shapley_values, site_attribution, with_sites
from mxsim.precision import EXACT, GEMM_SITES, LN_SITES, SITES, PrecisionScheme, SiteFormat

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=48)
ALL = mxsim.scheme("all_e4m3")


def point() -> tuple[list[dict[str, np.ndarray]], np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    params = mxsim.init_params(CFG)
    for block in params:
        block["ln_gamma"] += 0.05 * rng.standard_normal(32).astype(np.float32)
    x, y = rng.standard_normal((2, 48, 32)).astype(np.float32)
    return params, x, y


def zeta(scheme: PrecisionScheme) -> float:
    params, x, y = point()
    return mxsim.gradient_bias(params, x, y, CFG, scheme).zeta


def test_alone_and_without_are_those_schemes() -> None:
    found = site_attribution(*point(), CFG, ALL)
    assert set(found.alone) == set(found.without) == set(SITES)
    assert found.all.zeta == zeta(ALL)
    assert found.none.zeta == 0
    for site in SITES:
        on: dict[str, Any] = {site: getattr(ALL, site)}
        off: dict[str, Any] = {site: EXACT}
        assert found.alone[site].zeta == zeta(replace(mxsim.scheme("exact"), **on))
        assert found.without[site].zeta == zeta(replace(ALL, **off))


def test_overrides_go_with_their_site() -> None:
    one = SiteFormat("mxint8")
    scheme = PrecisionScheme(ln_beta=one, overrides=((1, "ln_gamma", one), (0, "ln_beta", EXACT)))
    assert active_sites(scheme) == ("ln_gamma", "ln_beta")
    assert with_sites(scheme, ("ln_gamma",)) == PrecisionScheme(overrides=((1, "ln_gamma", one),))
    assert with_sites(scheme, ("ln_beta",)).overrides == ((0, "ln_beta", EXACT),)


def test_shapley_values_sum_to_the_whole() -> None:
    shares = shapley_values(*point(), CFG, ALL)
    assert set(shares) == set(GROUPS)
    assert sum(shares.values()) == pytest.approx(zeta(ALL) ** 2, rel=1e-12)
    inner = replace(ALL, forward=mxsim.Internals(layer_norm="bf16"))
    shares = shapley_values(*point(), CFG, inner)
    base = zeta(replace(mxsim.scheme("exact"), forward=inner.forward)) ** 2
    assert sum(shares.values()) == pytest.approx(zeta(inner) ** 2 - base, rel=1e-12)


def test_shapley_values_are_means_over_orders() -> None:
    groups = {"gemm": GEMM_SITES, "gamma": ("ln_gamma",), "beta": ("ln_beta",)}
    shares = shapley_values(*point(), CFG, ALL, groups)
    gains: dict[str, list[float]] = {name: [] for name in groups}
    for order in itertools.permutations(groups):
        on: list[str] = []
        before = 0.0
        for name in order:
            on += groups[name]
            after = zeta(with_sites(ALL, on)) ** 2
            gains[name].append(after - before)
            before = after
    for name, share in shares.items():
        assert share == pytest.approx(float(np.mean(gains[name])), rel=1e-12, abs=1e-15)


def test_a_group_that_does_nothing_has_no_share() -> None:
    scheme = mxsim.scheme("ln_only_e4m3")
    shares = shapley_values(*point(), CFG, scheme, {"gemm": GEMM_SITES, "ln": LN_SITES})
    assert shares["gemm"] == 0
    assert shares["ln"] == pytest.approx(zeta(scheme) ** 2)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="must not share a site"):
        shapley_values(*point(), CFG, ALL, {"a": ("ln_gamma",), "b": ("ln_gamma",)})
    with pytest.raises(ValueError, match=r"site of a group.*got 'gamma'"):
        shapley_values(*point(), CFG, ALL, {"a": ("gamma",)})
    with pytest.raises(TypeError, match="scheme must be a PrecisionScheme; got 'all_e4m3'"):
        site_attribution(*point(), CFG, "all_e4m3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="groups must map names to sequences"):
        shapley_values(*point(), CFG, ALL, {"g": "ln_gamma"})
    with pytest.raises(ValueError, match=r"site must be one of .*got 'ln_gama'"):
        with_sites(ALL, ("ln_gama",))
    with pytest.raises(ValueError, match="at most 10"):
        shapley_values(*point(), CFG, ALL, {site: (site,) for site in SITES})
