"""A figure's three files: picture, vector twin, sidecar."""

import io
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from matplotlib.figure import Figure
from rich.console import Console

import mxsim
from figures.command import (
    FromResults,
    Source,
    computed,
    draw_stored,
    saved,
    source,
    stored,
    tier_of,
    traced,
)
from figures.style import CAPTION, PAGE_WIDTH, SMALLEST, STYLE, foot
from mxsim.boundary import Search
from mxsim.executors import Execution
from mxsim.store import Record, Store
from mxsim.sweep import Point
from mxsim.tracing import Column, trace_columns


def record(name: str, commit: str | None) -> Record:
    return Record(name * 16, {}, {"status": "ok", "versions": {"commit": commit}})


def picture() -> Figure:
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(2, 2))
        axis.plot([0, 1], [1, 0], label="seed")
        axis.legend()
        figure.suptitle("4 seeds,\n   95 % interval")
    return figure


def save(out: Path, given: Source | None = None) -> Path:
    with plt.rc_context(STYLE):
        return saved(picture(), out, given or computed("codes", 7, "codes"))


@pytest.mark.parametrize(("suffix", "twin"), [("png", "pdf"), ("pdf", "png"), ("svg", "png")])
def test_a_picture_has_a_twin_of_the_other_kind_and_the_bytes_are_the_same_again(
    suffix: str, twin: str, tmp_path: Path
) -> None:
    heads = {"png": b"\x89PNG", "pdf": b"%PDF", "svg": b"<?xml"}
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        assert save(folder / f"one.{suffix}") == folder / f"one.{suffix}"
    assert {path.name for path in first.iterdir()} == {f"one.{suffix}", f"one.{twin}", "one.json"}
    for kind in (suffix, twin):
        content = (first / f"one.{kind}").read_bytes()
        assert content.startswith(heads[kind])
        assert content == (second / f"one.{kind}").read_bytes()
        assert b"CreationDate" not in content
        assert b"dc:date" not in content


def test_a_format_that_is_neither_picture_nor_drawing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"out must end in one of \.png.*one\.txt"):
        save(tmp_path / "one.txt")
    plt.close("all")
    assert list(tmp_path.iterdir()) == []


def test_the_sidecar_says_what_was_drawn_and_counts_every_run_once(tmp_path: Path) -> None:
    records = [record("b", "1234"), record("a", None), None, record("b", "1234")]
    records.append(record("c", "1234"))
    save(tmp_path / "one.png", source("claims", "smoke", records))
    assert json.loads((tmp_path / "one.json").read_text()) == {
        "files": ["one.png", "one.pdf"],
        "caption": "4 seeds, 95 % interval",
        "command": "python -m figures.claims --tier smoke",
        "study": "claims",
        "tier": "smoke",
        "n": 3,
        "n_of": "stored results",
        "commits": {"1234": 2, "None": 1},
        "runs": ["a" * 16, "b" * 16, "c" * 16],
    }


def test_a_figure_of_no_run_says_so_and_what_its_n_counts(tmp_path: Path) -> None:
    save(tmp_path / "one.png")
    assert json.loads((tmp_path / "one.json").read_text()) == {
        "files": ["one.png", "one.pdf"],
        "caption": "4 seeds, 95 % interval",
        "command": "python -m figures.codes",
        "study": None,
        "tier": None,
        "n": 7,
        "n_of": "codes",
        "commits": {},
        "runs": [],
    }


def test_a_figure_of_a_study_without_a_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="at least one stored result; got none"):
        source("claims", "smoke", [None])


def test_nothing_on_a_figure_is_too_small_and_the_caption_stands_below_the_axes() -> None:
    with plt.rc_context(STYLE):
        figure, axis = plt.subplots(figsize=(PAGE_WIDTH, 3), layout="constrained")
        (line,) = axis.plot([0, 1], label="a run")
        foot(figure, "Words of a caption. " * 40, [line] * 5, ncols=4)
        figure.draw_without_rendering()
    (words,), (legend,) = figure.texts, figure.legends
    boxes = [each.get_window_extent() for each in (words, legend)]
    boxes.append(axis.get_tightbbox() or axis.bbox)
    for lower, upper in pairwise(boxes):
        assert lower.y1 < upper.y0
    assert figure.bbox.x0 <= boxes[0].x0
    assert boxes[0].x1 <= figure.bbox.x1
    assert boxes[0].y0 >= 0
    assert boxes[-1].y1 <= figure.bbox.y1
    sizes = [size for name, size in STYLE.items() if name.endswith("size")]
    assert min([*sizes, CAPTION["fontsize"]]) >= SMALLEST
    plt.close(figure)


def test_stored_records_are_read_by_id_and_a_missing_one_is_an_error(tmp_path: Path) -> None:
    Store(tmp_path).save(record("a", "1234"))
    assert stored(tmp_path, ["a" * 16])[0].meta["versions"] == {"commit": "1234"}
    with pytest.raises(FileNotFoundError):
        stored(tmp_path, ["a" * 16, "b" * 16])


def test_runs_of_a_traced_boundary_are_all_that_its_search_stored(tmp_path: Path) -> None:
    def point(lr: float, seed: int) -> Point:
        cfg = mxsim.ProxyConfig(width=8, depth=1, batch=4, steps=3, eval_samples=8)
        return Point(replace(cfg, lr=lr, seed=seed), mxsim.scheme("exact"))

    columns = {"a": Column(Search(low=0.5, high=500.0, width=3.0, max_runs=8), point)}
    with pytest.raises(FileNotFoundError):
        traced(columns, tmp_path)
    quiet = Console(file=io.StringIO())
    assert trace_columns(columns, Store(tmp_path), Execution(executor="serial"), quiet)
    ids = [path.stem for path in tmp_path.glob("*.npz")]
    assert len(ids) == 8
    assert sorted(each.id for each in traced(columns, tmp_path)) == sorted(ids)


def test_a_tier_is_found_by_its_design() -> None:
    assert tier_of({"smoke": (1, 2), "laptop": (3, 4)}, (3, 4)) == "laptop"
    assert tier_of({"smoke": (1, 2)}, (0, 0)) == "changed"


def test_pictures_are_told_where_the_runs_lie(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(results: Any, out: Path, folder: Path | None = None) -> Path:
        return out / str(results) / str(folder)

    def load(tier: str, results: Path) -> str:
        return f"{tier}_of_{results}"

    asked = FromResults(tier="smoke")
    assert draw_stored("claims", load, asked, {tmp_path: draw}) == 0
    assert draw_stored("claims", load, asked, {tmp_path: draw}, Path("there")) == 0
    expected = [f"{tmp_path}/smoke_of_results/{folder}" for folder in ("None", "there")]
    assert capsys.readouterr().out.split() == expected


@pytest.mark.parametrize(
    ("root", "told"), [(Path("results"), ""), (Path("mine"), " --results mine")]
)
def test_what_is_missing_is_said_once_and_how_to_run_it(
    root: Path, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(tier: str, results: Path) -> Any:
        raise FileNotFoundError("2 of 3 results are missing in there")

    asked = FromResults(tier="smoke", results=root)
    assert draw_stored("claims", load, asked, {tmp_path / "one.png": load}) == 1
    assert capsys.readouterr().err == (
        f"2 of 3 results are missing in there; run python -m studies.claims --tier smoke{told}\n"
    )
    assert list(tmp_path.iterdir()) == []
