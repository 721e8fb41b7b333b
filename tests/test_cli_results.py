"""``mxsim results``: what it prints, what it writes, how it refuses."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxsim.cli import main
from mxsim.store import Record, Store


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """Six stored runs of two learning rates and three widths, and a damaged file."""
    store = Store(tmp_path / "results" / "study")
    for width in (32, 64, 128):
        for lr in (0.01, 0.1):
            bad = lr * width > 1.0
            meta: dict[str, Any] = {
                "config": {"lr": lr, "width": width},
                "status": "diverged" if bad else "ok",
                "first_bad_step": 7 if bad else None,
                "spikes": [{"step": 7}] if bad else [],
                "eval_loss": lr / 3,
                "seconds": 12.3456,
                "versions": {"commit": "c" * 120},
            }
            store.save(Record(f"w{width}lr{lr}", {"losses": np.zeros(9)}, meta))
    (store.folder / "half.npz").write_bytes(b"half a file")
    return store.folder


def cells(output: str) -> list[list[str]]:
    """The cells of a table's lines, but not of its heading."""
    lines = [line for line in output.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_results_prints_what_differs_and_what_came_out(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["results", "study", "--root", str(study.parent)]) == 0
    output = capsys.readouterr().out
    heading = "┃ width ┃   lr ┃ status   ┃ first_bad_step ┃ spikes ┃ eval_loss ┃ seconds ┃"
    assert heading in output
    assert cells(output) == [
        ["32", "0.01", "ok", "-", "0", "0.003333", "12.35"],
        ["32", "0.1", "diverged", "7", "1", "0.03333", "12.35"],
        ["64", "0.01", "ok", "-", "0", "0.003333", "12.35"],
        ["64", "0.1", "diverged", "7", "1", "0.03333", "12.35"],
        ["128", "0.01", "diverged", "7", "1", "0.003333", "12.35"],
        ["128", "0.1", "diverged", "7", "1", "0.03333", "12.35"],
    ]
    assert "runs: 6; 4 diverged, 2 ok\n" in output
    assert "files that cannot be read: 1\n" in output
    assert f"- {study / 'half.npz'} is not a whole result file" in output


def test_results_chooses_sorts_and_shows_what_is_asked_for(
    study: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["--where", "width>=64", "lr<1", "--where", "status!=ok", "--sort", "lr", "width"]
    assert main(["results", str(study), *ask, "--columns", "id", "--columns", "lr"]) == 0
    output = capsys.readouterr().out
    assert cells(output) == [["w128lr0.01", "0.01"], ["w64lr0.1", "0.1"], ["w128lr0.1", "0.1"]]
    assert "runs: 3 of 6; 3 diverged\n" in output
    assert main(["results", str(study), "--where", "width=1"]) == 0
    output = capsys.readouterr().out
    assert cells(output) == []
    assert "runs: 0 of 6\n" in output


def test_results_are_whole_lines_on_a_pipe_and_fit_a_terminal(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    ask = ["results", str(study), "--columns", "id", "commit", "status"]
    assert main(ask) == 0
    piped = capsys.readouterr().out
    assert cells(piped)[0] == ["w32lr0.01", "c" * 120, "ok"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    assert main(ask) == 0
    colored = capsys.readouterr().out
    assert "\x1b[33m" in colored  # a run that diverged
    plain = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    shown = [line for line in plain.splitlines() if line.startswith("│")]
    begun = [(row[0], row[2]) for row in cells(plain) if row[0]]
    assert begun == [(row[0], row[2]) for row in cells(piped)]  # each run on lines of its own
    assert max(map(len, shown)) <= 50
    assert sum(line.count("c") for line in shown) == 6 * 120  # folded, not cut


def test_a_wide_terminal_gets_what_a_pipe_gets(
    study: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["results", str(study)]) == 0
    piped = capsys.readouterr().out
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["results", str(study)]) == 0
    assert re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out) == piped


def test_probes_are_shown_only_if_nothing_else_tells_runs_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path)
    for result, lr, site in (("a", 0.1, "bf16"), ("b", 0.2, "fp16")):
        store.save(Record(result, {}, {"config": {"lr": lr}, "probe": {"gamma_site": site}}))
    assert main(["results", str(tmp_path)]) == 0
    assert cells(capsys.readouterr().out) == [["0.1"], ["0.2"]]
    store.save(Record("c", {}, {"config": {"lr": 0.1}, "probe": {"gamma_site": "fp16"}}))
    assert main(["results", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert cells(output) == [["0.1", "bf16"], ["0.1", "fp16"], ["0.2", "fp16"]]
    heads = [line.split("┃") for line in output.splitlines() if line.startswith("┃")]
    assert [head[2].strip() for head in heads] == ["probe.", "gamma_site"]
    assert "runs: 3; 3 without status\n" in output


def test_results_writes_what_it_shows(study: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    files = ["--csv", str(study / "runs.csv"), "--parquet", str(study / "runs.parquet")]
    ask = ["results", str(study), "--where", "width=64", *files]
    assert main(ask) == 0
    assert f"written: {study / 'runs.csv'}\n" in capsys.readouterr().out
    lines = (study / "runs.csv").read_text().splitlines()
    assert lines[0].startswith("id,status,first_bad_step,spikes,eval_loss,seconds,width,depth,")
    assert [line.split(",")[0] for line in lines[1:]] == ["w64lr0.01", "w64lr0.1"]
    assert main([*ask, "--columns", "lr", "eval_loss"]) == 0
    assert (study / "runs.csv").read_text() == f"lr,eval_loss\n0.01,{0.01 / 3}\n0.1,{0.1 / 3}\n"
    read = parquet.read_table(study / "runs.parquet").to_pydict()
    assert read == {"lr": [0.01, 0.1], "eval_loss": [0.01 / 3, 0.1 / 3]}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent"], "no stored study 'absent': neither absent nor results/absent is a folder"),
        (["empty"], "empty holds no stored runs"),
        (
            ["study", "--where", "rate>1"],
            "the field of a condition must be a known name; got 'rate'",
        ),
        (["study", "--where", "lr"], "a condition must be FIELD=VALUE"),
        (["study", "--where", "staus=ok"], "did you mean status or steps?"),
        (["study", "--where", "status=divrged"], "got 'divrged' (did you mean diverged?)"),
        (["stdy"], "(did you mean study?)"),
        (["study", "--columns", "rate"], "columns must be a known name; got 'rate'"),
        (["study", "--sort", "rate"], "sort must be a known name; got 'rate'"),
        (["study", "--csv", "absent/runs.csv"], "no such folder: absent, for runs.csv"),
        (["study", "--csv", "empty"], "'empty'"),
    ],
)
def test_results_refuses_in_one_sentence(
    study: Path,
    arguments: list[str],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(study.parents[1])
    Path("empty").mkdir()
    assert main(["results", *arguments]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("mxsim: ")
    assert error.count("\n") == 1
