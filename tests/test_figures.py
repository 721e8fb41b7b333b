"""The figures of the paper's claims, on made-up records; every figure of the project at once."""

import json
import math
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.figure import Figure

from figures import all as every
from figures import bias_to_divergence, contact_sheet, format_codes, hybrids, last_bin, losses
from figures.command import Source
from figures.loss_lines import smooth
from figures.style import PAGE_WIDTH, STYLE
from mxsim import FORMATS
from mxsim.store import Record
from studies import claims

CLAIMS: list[Any] = [losses, last_bin, bias_to_divergence, hybrids]
COMMIT = "f" * 40
DIVERGED = 16  # the step, of the made-up runs that diverge


def made_up(seeds: int = 3, steps: int = 24) -> claims.Results:
    """Records of the smoke design: MX runs at the highest rate diverge, and all where MX was found
    to fail; all others learn."""
    design = replace(claims.DESIGNS["smoke"], seeds=seeds)
    records, watched = {}, {}
    for key, point in claims.points(design).items():
        bad = key.arm == "mx" and (key.task == "searched" or key.lr == design.rates[-1])
        series = np.geomspace(1, 0.01, steps) * (1 + 0.1 * key.seed)
        if bad:
            series[DIVERGED:] = 1e4
        at = np.arange(0, steps, design.probe_every)
        zeta = np.where(at < DIVERGED, 0.1 + at, 50.0) if bad else np.full(len(at), 0.1)
        meta: dict[str, Any] = {
            "versions": {"commit": COMMIT},
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
        watched[where] = Record(watch.id, arrays, {"versions": {"commit": COMMIT}})
    return claims.Results("smoke", design, records, watched, Path("results"))


def sidecar(picture: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(picture.with_suffix(".json").read_text())
    return content


@pytest.mark.parametrize("figure", CLAIMS)
def test_a_figure_names_the_runs_it_shows_and_how_many_seeds(figure: Any, tmp_path: Path) -> None:
    results = made_up()
    out = figure.draw(results, tmp_path / "one.png")
    content = sidecar(out)
    known = {r.id for r in (*results.records.values(), *results.watched.values())}
    assert 0 < content["n"] == len(content["runs"])
    assert content["n_of"] == "stored results"
    assert content["commits"] == {COMMIT: content["n"]}
    assert (content["study"], content["tier"]) == (figure.STUDY, "smoke")
    assert content["files"] == ["one.png", "one.pdf"]
    for suffix in (".png", ".pdf"):
        assert out.with_suffix(suffix).stat().st_size > 10_000
    assert set(content["runs"]) <= known
    assert content["command"] == f"python -m figures.{figure.NAME} --tier smoke"
    assert "3 seeds" in content["caption"]


def test_the_place_where_mx_fails_has_a_picture_of_its_own(tmp_path: Path) -> None:
    results = made_up()
    content = sidecar(bias_to_divergence.draw(results, tmp_path / "one.png", tasks=("searched",)))
    problems = results.design.problems_of("searched")
    expected = {
        record.id
        for key, record in results.records.items()
        if key.task == "searched" and key.arm == "mx" and key.condition in problems
    }
    assert set(content["runs"]) == expected
    said = f"{len(problems)} settings at lr 0.02, rms norm unless varied, 1 or 2 seeds"
    assert said in content["caption"]


@pytest.mark.parametrize(
    ("row", "runs", "diverge", "words"),
    [
        ("zeta", [], True, "no run diverges"),
        ("cos", [], False, "every run diverges"),
        ("script", [None], True, "of the watched pairs (base setting, the two highest rates) none "
         "diverges"),
    ],
)  # fmt: skip
def test_an_empty_panel_says_why(row: str, runs: list[Any], diverge: bool, words: str) -> None:
    assert " ".join(bias_to_divergence.why_empty(row, runs, diverge).split()) == words


def test_bins_are_whole_probes_around_the_divergence_or_over_the_run() -> None:
    base = replace(claims.DESIGNS["laptop"].base, steps=500)
    around = bias_to_divergence.edges_of(base, 20, diverge=True)
    over = bias_to_divergence.edges_of(base, 20, diverge=False)
    assert (around[0], around[-1], over[0], over[-1]) == (-200, 40, 0, 500)
    assert set(np.diff(around)) == set(np.diff(over)) == {20}


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
    rows = losses.panels(claims.DESIGNS["laptop"], "script")
    assert [condition for _, condition, _ in rows["depth"]] == ["depth 2", "base", "depth 8"]
    assert [condition for _, condition, _ in rows["width"]] == ["width 32", "base", "width 128"]
    rates = [lr for _, _, lr in rows["learning rate"]]
    assert rates == sorted(rates) == list(claims.DESIGNS["laptop"].rates)


def test_the_place_of_one_rate_is_shown_at_half_of_it_too() -> None:
    rows = losses.panels(claims.DESIGNS["laptop"], "searched")
    assert rows["learning rate"] == [
        ("lr 0.002", "half the rate", 0.004),
        ("lr 0.004", "base", 0.004),
    ]


@pytest.fixture
def unsaved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Source, str]]:
    """What would have been saved of losses and hybrids: source and caption; rendering is slow."""
    found: list[tuple[Source, str]] = []

    def saved(figure: Figure, out: Path, source: Source) -> Path:
        found.append((source, " ".join(figure.texts[0].get_text().split())))
        plt.close(figure)
        return out

    for module in (losses, hybrids):
        monkeypatch.setattr(module, "saved", saved)
    return found


def where_mx_fails(results: claims.Results, *shown: tuple[str, str, str]) -> set[str]:
    """Ids of all runs of that place of some (reading, condition, arm)."""
    return {
        record.id
        for key, record in results.records.items()
        if key.task == "searched" and (key.reading, key.condition, key.arm) in shown
    }


def test_losses_where_mx_was_found_to_fail_are_of_all_its_seeds(
    unsaved: list[tuple[Source, str]],
) -> None:
    results = made_up()
    losses.draw(results, Path("one.png"), task="searched")
    ((source, caption),) = unsaved
    expected = where_mx_fails(
        results,
        *(
            (reading, condition, arm)
            for reading, arm in losses.ARMS.values()
            for condition in ("base", "half the rate", "depth 1", "depth 3", "width 8", "width 32")
        ),
    )
    assert {record.id for record in source.records} == expected
    assert f"each of {results.design.problem_seeds} or 2 seeds" in caption
    assert "lr 0.02, RMS norm" in caption


def test_hybrids_are_also_shown_where_full_mx_fails(unsaved: list[tuple[Source, str]]) -> None:
    """Full MX among them, and all to the same targets."""
    results = made_up()
    hybrids.draw(results, Path("one.png"))
    ((source, caption),) = unsaved
    text = ("base", "bf16 activations", "exact backward")
    code = ("exact teacher", *(f"{each}, exact teacher" for each in text[1:]))
    expected = where_mx_fails(
        results,
        *(("paper_text", each, "mx") for each in text),
        *(("paper_code", each, "mx") for each in code),
        ("paper_text", "base", "exact"),
    )
    assert len(expected) == 2 * (3 + 3 + 1)
    everywhere = where_mx_fails(
        results, *((k.reading, k.condition, k.arm) for k in results.records)
    )
    assert {record.id for record in source.records} & everywhere == expected
    assert "RMS norm, lr 0.02, 24 steps, 2 seeds of their own" in caption


def test_the_hybrids_failures_are_paired_by_seed() -> None:
    results = made_up()
    arms = hybrids.arms_of(results, "paper_text", "searched", 0.02)
    none, other = arms["exact"]
    # On the first seed full MX alone fails, on the second the hybrid alone.
    arms |= {"mx": [arms["mx"][0], other], "bf16": [none, arms["bf16"][1]]}
    assert hybrids.paired(arms, "mx") == {(True, False): 1, (False, False): 1}
    assert hybrids.paired(arms, "bf16", "mx") == {(False, True): 1, (True, False): 1}
    arms["exact"] = [arms["mx"][0], none]  # now exact fails on the first, too
    assert hybrids.paired(arms, "mx") == {(True, True): 1, (False, False): 1}
    assert hybrids.paired(arms, "bf16") == {(False, True): 1, (True, False): 1}
    words = hybrids.against_full({"paper_text": arms})
    assert "bf16 activations, paper's text: 1 and 1 (p = 1)" in words


def test_held_out_ratios_are_of_the_pairs_of_which_neither_failed() -> None:
    results = made_up()
    arms = hybrids.arms_of(results, "paper_text", "searched", 0.02)
    made = {"mx": (1.5, 1.5), "bf16": (3.0, 40.0), "forward": (1.0, 0.8)}
    fine = arms["exact"][0]
    for name, (one, two) in made.items():
        arms[name] = [Record(fine.id, {}, {**fine.meta, "eval_loss": loss}) for loss in (one, two)]
    bad = {"status": "nonfinite", "first_bad_step": 3}
    arms["mx"][1] = Record(fine.id, {}, {**fine.meta, **bad})
    arms["forward"] = [Record(fine.id, {}, {**fine.meta, **bad})] * 2
    figure, axis = plt.subplots()
    hybrids.survivors(axis, arms)
    points = [line for line in axis.lines if line.get_marker() not in ("None", "")]
    assert [float(np.asarray(p.get_ydata())[0]) for p in points] == [1.5, 3.0, hybrids.CEILING]
    labels = [label.get_text().split("\n")[0] for label in axis.get_xticklabels()]
    assert labels == ["n = 1", "n = 2", "n = 0"]
    plt.close(figure)


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
    content = sidecar(folder / "contact_sheet.png")
    assert content["caption"].startswith("1 figures of 0 stored results")
    assert (content["n"], content["runs"], content["commits"]) == (0, [], [])
    (tile,) = content["tiles"]
    assert tile["picture"] == "format_codes.png"


def test_a_figure_of_no_run_says_how_much_was_computed(folder: Path) -> None:
    content = sidecar(folder / "format_codes.png")
    n = sum(2 ** FORMATS[name].element.bits // 2 for name in format_codes.SHOWN)
    left_out = 1 + 1 + 1 + 1 + 1 + 1 + 1 + 4  # zeros; NaN of E4M3; Inf and NaNs of E5M2
    assert (content["n"], content["n_of"]) == (n - left_out, "positive codes of the six formats")
    assert (content["study"], content["tier"], content["runs"]) == (None, None, [])
    assert content["command"] == "python -m figures.format_codes"


def test_what_cannot_be_drawn_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert every.main(every.Arguments("smoke", tmp_path, only=("hybrids", "gamma_cliff"))) == 1
    assert "not drawn for missing results: hybrids, gamma_cliff" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    assert every.main(every.Arguments("smoke", tmp_path, only=("nonsense",))) == 2
    assert "nonsense" in capsys.readouterr().err


def test_at_the_cluster_tier_the_claims_own_figures_are_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, str] = {}

    def script(name: str) -> Any:
        def main(arguments: Any) -> int:
            asked[name.removeprefix("figures.")] = arguments.tier
            return 1

        return SimpleNamespace(main=main, Arguments=lambda **given: SimpleNamespace(**given))

    monkeypatch.setattr("figures.all.importlib.import_module", script)
    only = ("losses", "hybrids", "interventions", "ln_affine_isolation")
    assert every.main(every.Arguments("cluster", tmp_path, only=only)) == 1
    assert asked == {
        "losses": "cluster",
        "hybrids": "cluster",
        "interventions": "laptop",
        "ln_affine_isolation": "long",
    }


def test_a_contact_sheet_fails_on_a_missing_picture_or_sidecar(
    folder: Path, tmp_path: Path
) -> None:
    assert contact_sheet.main(contact_sheet.Arguments(tmp_path)) == 1
    (tmp_path / "codes.png").write_bytes((folder / "format_codes.png").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"codes\.json"):
        contact_sheet.draw([tmp_path / "codes.png"], tmp_path / "sheet.png")
    assert not (tmp_path / "sheet.png").exists()


def test_a_contact_sheet_gathers_runs_and_n_of_its_tiles(tmp_path: Path) -> None:
    pictures = []
    for i, runs in enumerate((["a", "b"], ["b", "c", "d"]) * 4):  # more than a page
        picture = tmp_path / f"p{i}.png"
        plt.imsave(picture, np.full((40, 60 + i), 0.5))
        told = {"command": "c", "study": "s", "tier": "smoke", "n": len(runs), "n_of": "runs"}
        told |= {"runs": runs, "commits": {f"commit {runs[0]}": len(runs)}}
        picture.with_suffix(".json").write_text(json.dumps(told))
        pictures.append(picture)
    out = contact_sheet.draw(pictures, tmp_path / "sheet.png")
    content = sidecar(out)
    assert content["files"] == ["sheet.png", "sheet.pdf"]
    assert (content["runs"], content["n"]) == (["a", "b", "c", "d"], 4)
    assert content["commits"] == ["commit a", "commit b"]
    assert [tile["n"] for tile in content["tiles"]] == [2, 3] * 4
    assert [tile["picture"] for tile in content["tiles"]] == [each.name for each in pictures]
    assert out.with_suffix(".pdf").read_bytes().count(b"/Type /Page ") == 2
    height, width = plt.imread(out).shape[:2]
    page = [round(contact_sheet.DPI * inches) for inches in contact_sheet.PAGE]
    assert abs(width - page[0]) <= 1
    assert abs(height - 2 * page[1]) <= 2
    with pytest.raises(ValueError, match=r"out must end in \.png"):
        contact_sheet.draw(pictures, tmp_path / "sheet.svg")


@pytest.mark.parametrize("height", [3.0, 7.2])
def test_tick_labels_on_the_contact_sheet_can_be_read(height: float, tmp_path: Path) -> None:
    """At least 5 points in print, of the tallest figures, too."""
    image = np.zeros((round(height * 200), round(PAGE_WIDTH * 200)))
    tile = contact_sheet.Tile(tmp_path, image, {})
    assert min(STYLE[f"{axis}tick.labelsize"] for axis in "xy") * tile.scale >= 5
    assert STYLE["savefig.dpi"] == 200
