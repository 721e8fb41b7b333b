"""Grids: pairs, what levels change, what became of a run; runs that raise are recorded."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import mxsim
from mxsim.grid import (
    Axis,
    Cell,
    Grid,
    Level,
    config_axis,
    load_cells,
    requantize,
    site_axis,
    state_of,
)
from mxsim.precision import SITES, SiteFormat
from mxsim.store import Record, Store
from mxsim.sweep import Point, load_points, missing, run_points

BASE = mxsim.ProxyConfig(width=8, depth=2, batch=8, steps=5, lr=0.01, eval_samples=16)
ARMS = {name: mxsim.scheme(name) for name in ("exact", "all_e4m3")}
RATES = config_axis("lr", (0.01, 0.1))


def test_arms_of_a_cell_and_seed_differ_by_the_scheme_alone() -> None:
    grid = Grid(BASE, (config_axis("depth", (1, 3)), RATES), ARMS, seeds=2)
    points = grid.points()
    assert len(points) == len({p.id for p in points.values()}) == 2 * 2 * 2 * 2
    for cell, point in points.items():
        expected = replace(BASE, depth=int(cell.labels[0]), lr=float(cell.labels[1]))
        assert point.config == replace(expected, seed=cell.seed)
        assert point.scheme == ARMS[cell.arm]
    assert [cell.seed for cell in points] == sorted(cell.seed for cell in points)


def test_site_levels_change_what_is_quantized_and_leave_exact_alone() -> None:
    axes = (site_axis("format", ("mxfp4_e2m1", "nvfp4")), site_axis("block_size", (16, 64)))
    points = Grid(BASE, axes, ARMS, seeds=1).points()
    site = points[Cell(("mxfp4_e2m1", "64"), "all_e4m3", 0)].scheme.ln_gamma
    assert site == SiteFormat("mxfp4_e2m1", block_size=64)
    exact = {point.id for cell, point in points.items() if cell.arm == "exact"}
    assert exact == {Point(BASE, mxsim.scheme("exact")).id}


def test_requantize_spares_exact_sites_and_reaches_overrides() -> None:
    scheme = replace(
        mxsim.scheme("ln_only_e4m3"), overrides=((1, "fc1_fprop_x", SiteFormat("mxfp6_e3m2")),)
    )
    changed = requantize(scheme, scale_rule="rceil", rounding="away")
    for site in SITES:
        expected = SiteFormat("mxfp8_e4m3", "rceil", "away") if site[:2] == "ln" else SiteFormat()
        assert getattr(changed, site) == expected
    assert changed.overrides == ((1, "fc1_fprop_x", SiteFormat("mxfp6_e3m2", "rceil", "away")),)
    with pytest.raises(ValueError, match=r"site settings are format, scale_rule, .* got 'block'"):
        requantize(scheme, block=3)


def test_rate_factors_multiply_the_rate_that_the_levels_set() -> None:
    optimizers = Axis("optimizer", (Level("adam"), Level("sgd", {"optimizer": "sgd", "lr": 0.5})))
    factors = Axis("factor", (Level("half", rate=0.5), Level("4", rate=4.0)))
    for axes in ((optimizers, factors), (factors, optimizers)):
        found = {p.config.lr for p in Grid(BASE, axes, ARMS, 1).points().values()}
        assert found == {0.005, 0.04, 0.25, 2.0}
    grid = Grid(BASE, (optimizers, factors), ARMS, 1)
    assert grid.point(optimizers.levels[1:], "exact", 3, lr=0.7).config.lr == 0.7


def test_axes_need_labels_of_their_own() -> None:
    with pytest.raises(ValueError, match="axis depth must have levels with labels of their own"):
        config_axis("depth", (2, 2))
    with pytest.raises(ValueError, match="axis lr must have levels"):
        config_axis("lr", ())


def record(**meta: object) -> Record:
    return Record("x", {}, {"spikes": [], **meta})


def test_states_are_told_apart() -> None:
    assert state_of(None) == "not run"
    assert state_of(record(status="ok")) == "ok"
    assert state_of(record(status="ok", spikes=[{"step": 3}])) == "recovered"
    assert state_of(record(status="diverged", spikes=[{"step": 3}])) == "diverged"
    assert state_of(record(status="nonfinite")) == "nonfinite"
    assert state_of(record(status="failed")) == "failed"


def test_a_run_that_raises_is_recorded_and_tried_again(tmp_path: Path) -> None:
    store = Store(tmp_path)
    broken = Point(BASE, replace(ARMS["exact"], overrides=((5, "ln_gamma", SiteFormat("bf16")),)))
    whole = Point(BASE, ARMS["exact"])
    assert [f.status for f in run_points([broken, whole], store)] == [None, "diverged"]
    stored = store.load(broken.id)
    assert "block 5" in stored.meta["error"]
    assert stored.meta["config"]["width"] == 8
    assert missing([broken, whole], store) == [broken]
    with pytest.raises(FileNotFoundError, match="1 of 2 results are missing"):
        load_points([broken, whole], store)
    cells = {Cell((), "broken", 0): broken, Cell((), "whole", 0): whole}
    cells |= {Cell((), "absent", 0): Point(replace(BASE, seed=9), ARMS["exact"])}
    loaded = load_cells(cells, store)
    assert [state_of(r) for r in loaded.values()] == ["failed", "diverged", "not run"]
    np.testing.assert_array_equal(np.isfinite(loaded[Cell((), "whole", 0)].arrays["losses"]), True)  # type: ignore[union-attr]
