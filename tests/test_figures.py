"""The figures of the paper's claims, on made-up records; every figure of the project at once."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from figures import all as every
from figures import bias_to_divergence, contact_sheet, format_codes, hybrids, last_bin, losses
from figures.loss_lines import smooth
from mxsim import FORMATS
from mxsim.store import Record
from studies import claims

CLAIMS: list[Any] = [losses, last_bin, bias_to_divergence, hybrids]
DIVERGED = 16  # the step, of the made-up runs that diverge


def made_up(seeds: int = 3, steps: int = 24) -> claims.Results:
    """Records of the smoke design: MX runs at the highest rate diverge, all others learn."""
    design = replace(claims.DESIGNS["smoke"], seeds=seeds)
    records, watched = {}, {}
    for key, point in claims.points(design).items():
        bad = key.arm == "mx" and key.lr == design.rates[-1]
        series = np.geomspace(1, 0.01, steps) * (1 + 0.1 * key.seed)
        if bad:
            series[DIVERGED:] = 1e4
        at = np.arange(0, steps, design.probe_every)
        zeta = np.where(at < DIVERGED, 0.1 + at, 50.0) if bad else np.full(len(at), 0.1)
        meta: dict[str, Any] = {
            "status": "diverged" if bad else "ok",
            "first_bad_step": DIVERGED if bad else None,
            "learned": True,
            "spikes": [{"step": DIVERGED, "length": None}] if bad else [],
            "rule": {"patience": 200},
            "eval_loss": 2.0 if key.arm == "mx" else 1.0,
        }
        arrays = {
            "losses": series,
            "probe_steps": at,
            "probe_zeta": zeta[:, None, None],
            "probe_cos": 1 / (1 + zeta[:, None, None]),
        }
        records[key] = Record(point.id, arrays, meta)
    for where, watch in claims.watches(design).items():
        at = np.arange(0, steps, design.watch_every)
        share = np.full((len(at), 2, 2), 0.01) * (1 + np.arange(2))[:, None]  # MX twice exact
        arrays = {f"saturated_{name}": share for name in last_bin.ROWS}
        arrays |= {"watch_steps": at, "zeta_script": np.full(steps, 0.5)}
        watched[where] = Record(watch.id, arrays, {})
    return claims.Results("smoke", design, records, watched, Path("results"))


def sidecar(picture: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(picture.with_suffix(".json").read_text())
    return content


@pytest.mark.parametrize("figure", CLAIMS)
def test_a_figure_names_the_runs_it_shows_and_how_many_seeds(figure: Any, tmp_path: Path) -> None:
    results = made_up()
    out = figure.draw(results, tmp_path / "one.png")
    assert out.stat().st_size > 10_000
    content = sidecar(out)
    known = {r.id for r in (*results.records.values(), *results.watched.values())}
    assert 0 < content["n"] == len(content["runs"])
    assert set(content["runs"]) <= known
    assert content["command"] == f"python -m figures.{figure.NAME} --tier smoke"
    assert "3 seeds" in content["caption"]


@pytest.mark.parametrize("figure", [*CLAIMS, "activation_norm"])
def test_a_missing_run_fails_the_figure_and_nothing_is_written(
    figure: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if isinstance(figure, str):
        from figures import activation_norm as figure
    out = tmp_path / "out" / "one.png"
    assert figure.main(figure.Arguments("smoke", results=tmp_path, out=out)) == 1
    assert f"python -m studies.{figure.STUDY}" in capsys.readouterr().err
    assert not out.parent.exists()


def test_runs_are_aligned_at_their_divergence_and_those_that_never_learned_left_out() -> None:
    results = made_up()
    design, highest = results.design, results.design.rates[-1]
    everything = bias_to_divergence.series(results, "script", "paper_text")
    assert len(everything) == len(design.problems) * len(design.rates) * design.seeds
    found = [run for run in everything if "script" in run.values]  # watched: of the base
    assert [run.diverged for run in found] == [None] * 3 + [DIVERGED] * 3
    steps, values = found[-1].values["zeta"]
    rising = np.arange(0, DIVERGED, design.probe_every) + 0.1
    np.testing.assert_allclose(values[steps < DIVERGED], rising)
    never = claims.Key("paper_text", "script", "base", highest, 0, "mx")
    meta = {"first_bad_step": design.base.steps - 1, "learned": False, "spikes": []}
    old = results.records[never]
    records = {**results.records, never: Record(old.id, old.arrays, {**old.meta, **meta})}
    fewer = bias_to_divergence.series(replace(results, records=records), "script", "paper_text")
    assert len(fewer) == len(everything) - 1


def test_bins_hold_their_medians_and_empty_ones_nothing() -> None:
    at, values = np.array([-5, -4, -3, 0, 1]), np.array([1.0, 9.0, 2.0, 7.0, np.nan])
    found = bias_to_divergence.binned(at, values, np.array([-6, -3, -1, 2]))
    np.testing.assert_equal(found, [5.0, 2.0, 7.0])
    np.testing.assert_equal(
        bias_to_divergence.binned(at, values, np.array([2, 4, 6])), [np.nan, np.nan]
    )


def test_shares_are_per_cent_of_mx_and_exact_weights_over_blocks() -> None:
    results = made_up()
    found = last_bin.shares(results, "ln_gamma", "paper_code", "unit", results.design.rates[-1])
    assert (len(found), found.shape[2]) == (3, 2)  # seeds, sides
    np.testing.assert_allclose(found[:, :, 0], 1)
    np.testing.assert_allclose(found[:, :, 1], 2)


def test_depths_and_widths_stand_in_order_with_the_base_among_them() -> None:
    rows = losses.panels(claims.DESIGNS["laptop"])
    assert [condition for _, condition, _ in rows["depth"]] == ["depth 2", "base", "depth 8"]
    assert [condition for _, condition, _ in rows["width"]] == ["width 32", "base", "width 128"]
    assert [lr for _, _, lr in rows["learning rate"]] == [0.01, 0.02, 0.035]


def test_smoothed_losses_are_medians_of_windows_and_unknown_where_none_is_finite() -> None:
    series = np.array([3.0, 1.0, np.nan, 5.0, np.nan, np.nan, 9.0])
    at, middle = smooth(series, windows=3)
    np.testing.assert_equal(at, [0.5, 2.5, 4.5])
    np.testing.assert_equal(middle, [2.0, 5.0, np.nan])


# ---------------------------------------------------------------- format codes


def test_codes_and_gaps_of_a_format_small_enough_to_list() -> None:
    codes = format_codes.positive_codes(FORMATS["mxfp4_e2m1"].element)
    assert codes == [Fraction(n, 8) for n in (1, 2, 3, 4, 6, 8, 12)]
    gaps = format_codes.relative_gaps(codes)
    assert gaps == [Fraction(*g) for g in ((1, 1), (1, 2), (1, 3), (1, 2), (1, 3), (1, 2))]
    assert format_codes.overflow_share(FORMATS["mxfp4_e2m1"].element) == 1 - math.log2(1.5)


@pytest.mark.parametrize(
    ("name", "n", "top", "least", "most"),
    [
        ("mxfp8_e4m3", 126, Fraction(7, 4), Fraction(1, 15), 1),
        ("mxfp8_e5m2", 123, Fraction(7, 4), Fraction(1, 7), 1),
        ("mxfp6_e3m2", 31, Fraction(7, 4), Fraction(1, 7), 1),
        ("mxfp6_e2m3", 31, Fraction(15, 8), Fraction(1, 15), 1),
        ("mxint8", 127, Fraction(127, 64), Fraction(1, 126), 1),
    ],
)
def test_gaps_of_the_larger_formats(
    name: str, n: int, top: Fraction, least: Any, most: Any
) -> None:
    codes = format_codes.positive_codes(FORMATS[name].element)
    gaps = format_codes.relative_gaps(codes)
    assert (len(codes), codes[-1], min(gaps), max(gaps)) == (n, top, least, most)


# ---------------------------------------------------------------- all of them


def test_no_script_of_a_figure_is_left_out() -> None:
    folder = Path(every.__file__).parent
    scripts = {p.stem for p in folder.glob("*.py") if "class Arguments" in p.read_text()}
    assert {each.script or each.name for each in every.FIGURES} == scripts - {
        "all",
        "contact_sheet",
    }
    files = [name for each in every.FIGURES for name in each.files]
    assert len(set(files)) == len(files)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What figures.all writes if there are no results."""
    root = tmp_path_factory.mktemp("results")
    assert every.main(every.Arguments("smoke", root, only=("hybrids", "format_codes"))) == 1
    return root / "figures_smoke"


def test_the_rest_is_on_the_sheet(folder: Path) -> None:
    stems = {path.stem for path in folder.iterdir()}
    assert stems == {"format_codes", "contact_sheet"}
    assert sidecar(folder / "contact_sheet.png")["caption"].startswith("1 figures of 0 runs")


def test_what_cannot_be_drawn_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert every.main(every.Arguments("smoke", tmp_path, only=("hybrids", "gamma_cliff"))) == 1
    assert "not drawn for missing results: hybrids, gamma_cliff" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert every.main(every.Arguments("smoke", tmp_path, only=("nonsense",))) == 2
    assert "nonsense" in capsys.readouterr().err


def test_a_contact_sheet_fails_on_a_missing_picture_or_sidecar(
    folder: Path, tmp_path: Path
) -> None:
    assert contact_sheet.main(contact_sheet.Arguments(tmp_path)) == 1
    (tmp_path / "codes.png").write_bytes((folder / "format_codes.png").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"codes\.json"):
        contact_sheet.draw([tmp_path / "codes.png"], tmp_path / "sheet.png")
    assert not (tmp_path / "sheet.png").exists()
