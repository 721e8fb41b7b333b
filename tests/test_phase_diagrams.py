"""Phase diagrams: designs, pairs, traced boundaries as stored runs, what the figure tells."""

import contextlib
import io
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from rich.console import Console

import mxsim
import mxsim.floor
from figures import phase_diagrams as figure
from mxsim.boundary import Search, Threshold
from mxsim.curvature import adam_preconditioner, hvp, top_eigenvalue
from mxsim.executors import Execution
from mxsim.grid import STATES, Cell
from mxsim.store import Record, Store
from mxsim.sweep import Point, failure_of
from mxsim.tracing import Column, stored_traces, trace_columns
from studies import phase_diagrams as study

SERIAL = Execution(executor="serial")
NAMES: tuple[Any, ...] = get_args(study.Name)
TIERS: tuple[Any, ...] = get_args(study.Tier)


def run_study(root: Path, **settings: Any) -> tuple[int, str]:
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        arguments = study.Arguments(
            tier="smoke", results=root, executor="serial", diagrams=("lr_depth",), **settings
        )
        status = study.main(arguments)
    return status, output.getvalue()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert run_study(folder)[0] == 0
    return folder


@pytest.mark.parametrize(("name", "tier"), [*itertools.product(NAMES, TIERS)])
def test_every_diagram_is_a_grid_of_pairs(name: Any, tier: Any) -> None:
    it = study.diagram(name, tier)
    points = it.grid.points()
    cells = len(it.x.levels) * len(it.y.levels) * it.grid.seeds
    assert len(points) == 2 * cells
    for cell, point in points.items():
        assert point.config == points[replace(cell, arm="exact")].config
    if it.traced:
        rates = [it.grid.point((it.x.levels[0], y), "exact", 0).config.lr for y in it.y.levels]
        assert rates == sorted(rates)
        column = it.columns()[it.x.labels[0], "exact"]
        assert (column.search.low, column.search.high) == (rates[0], rates[-1])


def test_all_dimensions_that_are_asked_for_are_there() -> None:
    assert len(NAMES) == 10
    base = study.SIZES["cluster"].base  # the paper's sizes
    assert (base.width, base.batch, base.steps) == (512, 2048, 7000)
    formats = study.diagram("lr_format", "laptop").x.labels
    assert {"mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8"} <= {
        *formats
    }
    for tier in TIERS:
        norms = study.diagram("activation_norm", tier).y.labels
        assert norms == ("layer", "layer_no_affine", "rms", "none")


def test_the_second_time_nothing_is_run(root: Path) -> None:
    files = {path: path.stat().st_mtime_ns for path in root.glob("*/*.npz")}
    status, said = run_study(root)
    assert status == 0
    assert "running" not in said
    assert {path: path.stat().st_mtime_ns for path in root.glob("*/*.npz")} == files
    for word in ("MX only", "half of the runs fail", "loss / floor"):
        assert word in said


def test_a_dry_run_counts_grid_and_columns(tmp_path: Path) -> None:
    status, said = run_study(tmp_path, dry_run=True)
    assert status == 0
    assert "24 runs, 0 stored" in said
    assert "4 columns to trace, at most 8 runs each" in said
    assert not list(tmp_path.iterdir())


def test_numbers_are_those_of_runs(root: Path) -> None:
    results = study.load("lr_depth", "smoke", root)
    cfg = replace(study.SIZES["smoke"].base, depth=2, lr=0.01, seed=1)
    run = mxsim.train(cfg, mxsim.scheme("all_e4m3"), rule=study.RULE)
    state = "recovered" if run.status == "ok" and run.spikes else run.status
    assert results.states("2", "0.01", "all_e4m3")[1] == state
    assert run.status == "ok"
    floor = mxsim.floor.irreducible_loss(cfg).loss
    assert results.excess("2", "0.01", "all_e4m3")[1] == pytest.approx(run.eval_loss / floor)
    high = replace(cfg, lr=1.0)
    failed = mxsim.train(high, mxsim.scheme("exact"), rule=study.RULE)
    other = mxsim.train(replace(high, seed=0), mxsim.scheme("exact"), rule=study.RULE)
    steps = [failed.first_bad_step, other.first_bad_step]
    assert None not in steps
    assert results.first_bad_step("2", "1", "exact") == np.median(steps)  # type: ignore[arg-type]


def test_predictions_are_laid_over_the_boundary(root: Path) -> None:
    status, said = run_study(root, predict=True)
    assert status == 0
    it, store = study.diagram("lr_depth", "smoke"), Store(root / "phase_diagrams_smoke")
    found = study.predictions(it, store)
    assert set(found) == {(x, arm) for x in ("1", "2") for arm in study.ARMS}
    assert f"predicted for lr_depth 2, exact: {found['2', 'exact']:.3g}" in said
    tasks = study.forecasts(it)
    rates = []
    for seed in range(2):
        cfg = tasks["2", seed].config
        assert (cfg.depth, cfg.lr, cfg.seed) == (2, 0.002, seed)
        training = mxsim.start(cfg, mxsim.scheme("exact")).advance(3)
        x, y = mxsim.held_out(cfg, mxsim.make_teacher(cfg))
        hessian = hvp(training.params, x, y, cfg)
        p = adam_preconditioner(training.optimizer, cfg)
        found_top = top_eigenvalue(hessian, hessian.size, preconditioner=p, tolerance=1e-8)
        rates.append(38 / found_top.largest_algebraic)
    assert found["2", "exact"] == pytest.approx(np.median(rates), rel=1e-4)


def test_a_missing_run_fails_the_figure_unless_partial(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "phase_diagrams_smoke"
    folder.mkdir()
    files = sorted((root / "phase_diagrams_smoke").glob("*.npz"))
    for path in files:
        (folder / path.name).write_bytes(path.read_bytes())
    out = tmp_path / "out.png"
    arguments = figure.Arguments(diagram="lr_depth", tier="smoke", results=tmp_path, out=out)
    assert figure.main(arguments) == 0
    whole = out.read_bytes()
    first = next(iter(study.diagram("lr_depth", "smoke").grid.points().values()))
    (folder / f"{first.id}.npz").unlink()
    assert figure.main(arguments) == 1
    assert figure.main(replace(arguments, partial=True)) == 0
    assert out.read_bytes() != whole


def test_no_two_states_look_alike() -> None:
    assert set(figure.LOOK) == set(STATES)
    looks = [look[:2] for look in figure.LOOK.values()]
    assert len(set(looks)) == len(STATES)
    marks = [mark for _, mark, _ in figure.LOOK.values() if mark]
    assert (
        len(set(marks)) == len(marks) == 4
    )  # told apart without colour; ok is plain, not run hatched


def results_of(failed: dict[tuple[str, str, int], bool]) -> study.Results:
    """Results of the smoke diagram whose records say only whether they failed."""
    it = study.diagram("lr_depth", "smoke")
    records = {
        cell: Record(
            "x", {}, {"status": "diverged" if failed.get(key, False) else "ok", "spikes": []}
        )
        for cell in it.grid.points()
        for key in [(cell.arm, "/".join(cell.labels), cell.seed)]
    }
    return study.Results("lr_depth", it, records, {})


def test_arms_are_compared_in_pairs_with_seeds_as_units() -> None:
    results = results_of(
        {
            ("all_e4m3", "1/1", 0): True,
            ("all_e4m3", "2/1", 0): True,
            ("exact", "2/1", 0): True,
            ("exact", "2/0.1", 1): True,
        }
    )
    c = study.compare(results)
    assert (c.pairs, c.both, c.mx_only, c.exact_only) == (12, 1, 1, 1)
    # six cells a seed: seed 0 has one more failure in MX, seed 1 one fewer
    assert c.difference.value == pytest.approx(0)
    assert c.difference.n == 2
    half = 12.7062 * np.std([1 / 6, -1 / 6], ddof=1) / np.sqrt(2)  # Student's t, 1 degree
    assert c.difference.high == pytest.approx(half, rel=1e-4)


def test_pairs_without_both_results_are_left_out() -> None:
    results = results_of({("all_e4m3", "1/1", 0): True})
    records = dict(results.records)
    records[Cell(("1", "1"), "exact", 0)] = None
    c = study.compare(replace(results, records=records))
    assert (c.pairs, c.mx_only) == (11, 0)


def test_a_boundary_is_placed_between_levels() -> None:
    it = study.diagram("lr_depth", "smoke")  # rates 0.01, 0.1, 1
    results = study.Results("lr_depth", it, {}, {})
    for lr, at in ((0.01, 0), (0.1, 1), (10**-0.5, 1.5), (1.0, 2), (10.0, 3), (0.001, -1)):
        assert figure.position(results, "1", "exact", lr) == pytest.approx(at)


BASE = mxsim.ProxyConfig(width=8, depth=1, batch=8, steps=30, eval_samples=16, optimizer="sgd")


def column() -> Column:
    def point(lr: float, seed: int) -> Point:
        return Point(replace(BASE, lr=lr, seed=seed), mxsim.scheme("exact"))

    return Column(Search(low=0.5, high=500.0, width=3.0, max_runs=12), point)


def test_a_trace_is_gone_on_with_where_it_stopped(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    whole, broken = Store(tmp_path / "whole"), Store(tmp_path / "broken")
    assert trace_columns({"a": column()}, whole, SERIAL, console)
    traced = stored_traces({"a": column()}, whole)["a"]
    assert isinstance(traced, Threshold)
    files = {path.name for path in whole.folder.iterdir()}
    assert len(files) == traced.n

    saved = 0

    class Stopping(Store):
        def save(self, record: Record) -> Path:
            nonlocal saved
            saved += 1
            if saved == 6:
                raise KeyboardInterrupt
            return super().save(record)

    assert not trace_columns({"a": column()}, Stopping(broken.folder), SERIAL, console)
    assert len(list(broken.folder.iterdir())) == 6  # what was computed is stored on the way out
    with pytest.raises(FileNotFoundError):
        stored_traces({"a": column()}, broken)
    assert stored_traces({"a": column()}, broken, partial=True) == {}
    assert trace_columns({"a": column()}, broken, SERIAL, console)
    assert stored_traces({"a": column()}, broken) == {"a": traced}
    assert {path.name for path in broken.folder.iterdir()} == files


def test_every_traced_run_has_a_seed_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert trace_columns({"a": column()}, store, SERIAL, Console(file=io.StringIO()))
    seeds: Sequence[int] = [
        store.load(path.stem).meta["config"]["seed"] for path in tmp_path.glob("*.npz")
    ]
    assert sorted(seeds) == list(range(len(seeds)))


def test_a_failed_run_is_drawn_as_such(root: Path, tmp_path: Path) -> None:
    results = study.load("lr_depth", "smoke", root)
    point = next(iter(results.diagram.grid.points().values()))
    failure = failure_of(point, RuntimeError("see [/usr/lib]"))
    records = {
        cell: failure if cell.labels == ("1", "0.01") and cell.arm == "exact" else record
        for cell, record in results.records.items()
    }
    changed = replace(results, records=records, thresholds={})
    assert changed.states("1", "0.01", "exact") == ["failed", "failed"]
    assert changed.failed("1", "0.01", "exact") == [None, None]
    assert figure.draw(changed, tmp_path / "failed.png").stat().st_size > 10_000
    console = Console(file=io.StringIO(), width=150)
    study.print_tables(changed, console)
    partial = replace(results, thresholds=dict(list(results.thresholds.items())[:1]))
    study.print_tables(partial, console)


def test_a_boundary_that_does_not_rise_is_marked() -> None:
    results = results_of({("exact", "1/0.1", 0): True, ("exact", "1/0.1", 1): True})
    assert not results.rises("1", "exact")
    assert results.rises("2", "exact")
    rising = {("exact", f"1/{y}", s): True for y in ("0.1", "1") for s in (0, 1)}
    assert results_of(rising).rises("1", "exact")
