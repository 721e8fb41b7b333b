"""The main job in its smoke tier, end to end, and its figure from stored results."""

from pathlib import Path

import numpy as np
import pytest

from figures import ln_affine_isolation as figure
from mxsim.store import Store
from studies import ln_affine_isolation as study
from studies.ln_affine_isolation import ARMS, DESIGNS


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("results")
    assert study.main(study.Arguments(tier="smoke", workers=2, results=root)) == 0
    return root


def test_designs_are_paired_and_as_large_as_they_must_be() -> None:
    laptop, long = DESIGNS["laptop"], DESIGNS["long"]
    assert laptop.seeds >= 8
    assert long.seeds >= 32
    assert laptop.rates == (5e-3, 1e-2, 2e-2)
    base = laptop.base
    assert (base.width, base.depth, base.batch, base.steps) == (64, 4, 256, 1000)
    assert (base.activation, base.optimizer, base.eval_samples) == ("gelu", "adam", 32768)
    points = study.points(laptop)
    assert len({point.id for point in points.values()}) == len(points) == 4 * 3 * 8
    for (_, lr, seed), point in points.items():
        assert (point.config.lr, point.config.seed) == (lr, seed)
        assert point.config == points["exact", lr, seed].config  # differ by the scheme alone


def test_the_second_time_everything_is_stored(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {p: p.stat().st_mtime_ns for p in (root / "ln_affine_isolation_smoke").glob("*.npz")}
    assert len(files) == 16
    assert study.main(study.Arguments(tier="smoke", workers=2, results=root)) == 0
    output = capsys.readouterr().out
    assert "16 runs are stored" in output
    assert {p: p.stat().st_mtime_ns for p in files} == files
    for arm in ARMS:
        assert arm in output
    assert "…" not in output  # no column cut off


def test_a_dry_run_counts_what_is_missing_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = study.Arguments(tier="smoke", workers=2, results=tmp_path, dry_run=True)
    assert study.main(arguments) == 0
    assert "16 runs, 0 stored" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_numbers_in_the_tables_are_those_of_the_records(root: Path) -> None:
    results = study.load("smoke", root)
    summary = study.summarize(results)
    zeta_rows = summary.zeta
    assert len(zeta_rows) == 2 * 2 * 3
    assert len(summary.outcomes) == 2 * 4
    lr = results.design.rates[1]
    row = next(r for r in zeta_rows if (r.lr, r.along, r.scheme) == (lr, "own", "all_e4m3"))
    medians = [
        np.median(results.records["all_e4m3", lr, seed].arrays["probe_zeta"][:, 0, 0])
        for seed in range(2)
    ]
    assert row.statistics["median"].value == pytest.approx(np.median(medians))
    assert row.statistics["median"].n == 2
    # Along the exact run the schemes meet at the same points: label order decides the column.
    exact = results.records["exact", lr, 0]
    assert exact.meta["probe_labels"] == list(study.QUANTIZED)
    row = next(r for r in zeta_rows if (r.lr, r.along, r.scheme) == (lr, "exact", "ln_only_e4m3"))
    difference = [
        np.max(results.records["exact", lr, s].arrays["probe_zeta"][:, 1, 0])
        - np.max(results.records["exact", lr, s].arrays["probe_zeta"][:, 0, 0])
        for s in range(2)
    ]
    assert row.minus_gemm["peak"].value == pytest.approx(np.median(difference))


def test_the_figure_is_drawn_without_training_and_fails_on_a_missing_point(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figure.png"
    arguments = figure.Arguments(tier="smoke", out=out, results=root)
    assert figure.main(arguments) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    out.unlink()
    store = Store(root / study.study_name("smoke"))
    point = next(iter(study.points(DESIGNS["smoke"]).values()))
    kept = store.path(point.id).read_bytes()
    store.path(point.id).unlink()
    try:
        assert figure.main(arguments) == 1
        assert "1 of 16 results are missing" in capsys.readouterr().err
        assert not out.exists()
    finally:
        store.path(point.id).write_bytes(kept)
