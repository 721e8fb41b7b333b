"""Stored results as a table: what is read, chosen, written."""

import csv
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim import results
from mxsim.outcome import Outcome, Spike
from mxsim.precision import SiteFormat
from mxsim.results import Results
from mxsim.store import Record, Store, result_id
from mxsim.sweep import Point, record_of
from mxsim.train import Run

CONFIG = mxsim.ProxyConfig(width=8, depth=2, batch=8, steps=12, eval_samples=16)
PLAN = mxsim.ProbePlan(4, (("mine", mxsim.scheme("all_e4m3")), ("exact", mxsim.scheme("exact"))))
SCHEMES = {
    "exact": mxsim.scheme("exact"),
    "all_e4m3": mxsim.scheme("all_e4m3"),
    "ln: mxint8 rule=rceil": replace(
        mxsim.scheme("exact"),
        ln_gamma=SiteFormat("mxint8", "rceil"),
        ln_beta=SiteFormat("mxint8", "rceil"),
    ),
}
LRS = (0.001, 0.01, 0.1)
SPIKES = (Spike(3, 20.0, 2), Spike(8, 11.0, None))
OUTCOMES = (
    Outcome("ok", None, None, (), 1.5, True),
    Outcome("diverged", 8, None, SPIKES, 9.0, True, censored=True),
    Outcome("nonfinite", 5, "block 1 hidden", SPIKES[:1], math.nan, False),
)
ABSENT = ("exact", 0.1, 1)


@pytest.fixture(scope="module")
def a_run() -> Run:
    return mxsim.train(CONFIG, mxsim.scheme("exact"))


def stored(a_run: Run, name: str, lr: float, seed: int) -> Record:
    """The run with this verdict: by learning rate; eval_loss = 100 lr + seed."""
    point = Point(replace(CONFIG, lr=lr, seed=seed), SCHEMES[name], PLAN)
    outcome = OUTCOMES[LRS.index(lr)]
    return record_of(point, replace(a_run, outcome=outcome, eval_loss=100 * lr + seed))


@pytest.fixture(scope="module")
def folder(a_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    store = Store(tmp_path_factory.mktemp("results") / "study")
    for name in SCHEMES:
        for lr in LRS:
            for seed in (0, 1):
                if (name, lr, seed) != ABSENT:
                    store.save(stored(a_run, name, lr, seed))
    return store.folder


@pytest.fixture(scope="module")
def table(folder: Path) -> Results:
    return results.load(folder)


def write(folder: Path, result: str, meta: dict[str, Any]) -> None:
    Store(folder).save(Record(result, {"x": np.zeros(3)}, meta))


# ---------------------------------------------------------------- reading


def test_a_record_says_what_was_run_and_what_came_out(a_run: Run, table: Results) -> None:
    assert len(table.records) == 17
    wanted = stored(a_run, "ln: mxint8 rule=rceil", 0.01, 1)
    [row] = [row for row in table.records if row["id"] == wanted.id]
    config = {**vars(CONFIG), "lr": 0.01, "seed": 1}
    assert {name: row[name] for name in config} == config
    expected = {
        "status": "diverged",
        "first_bad_step": 8,
        "first_bad_tensor": None,
        "spikes": 2,
        "final_over_best": 9.0,
        "learned": True,
        "censored": True,
        "eval_loss": 2.0,
        "zero_loss": a_run.zero_loss,
        "input_power": a_run.input_power,
        "seconds": a_run.seconds,
        "scheme": "ln: mxint8 rule=rceil",
        "rule.patience": 200,
        "probe.every": 4,
        "probe.schemes": "mine = all_e4m3, exact",
        "probe.gamma_site": "mxfp8_e4m3",
        "versions.numpy": np.__version__,
        "commit": wanted.meta["versions"]["commit"],
    }
    assert {name: row[name] for name in expected} == expected
    assert set(row) == set(table.fields)
    assert set(table.settings) >= {*config, "scheme", "rule.window", "probe.schemes"}
    assert not set(table.settings) & {"id", "status", "seconds", "commit", "versions.numpy"}
    assert table.varying == ("scheme", "lr", "seed")
    assert table.damaged == ()


def test_a_run_older_than_a_field_has_its_default(tmp_path: Path, a_run: Run) -> None:
    record = stored(a_run, "all_e4m3", 0.01, 0)
    meta = json.loads(json.dumps(dict(record.meta)))
    del meta["config"]["norm"], meta["scheme"]["hadamard"], meta["rule"]["patience"]
    for site in meta["scheme"].values():  # as runs of version 0.1.0 have it
        if isinstance(site, dict) and "block_size" in site:
            site["block_size"] = 32
    write(tmp_path, "old", meta)
    [row] = results.load(tmp_path).records
    assert (row["norm"], row["scheme"], row["rule.patience"]) == ("layer", "all_e4m3", 200)


def test_a_setting_of_a_later_version_is_kept(tmp_path: Path, a_run: Run) -> None:
    meta = json.loads(json.dumps(dict(stored(a_run, "all_e4m3", 0.01, 0).meta)))
    meta["config"]["gears"] = 3
    meta["scheme"]["ln_gamma"]["format"] = "mxfp3"
    meta["probe"]["gamma_site"]["format"] = "mxfp3"
    write(tmp_path, "new", meta)
    meta["scheme"]["ln_gamma"]["format"] = "mxfp2"
    write(tmp_path, "newer", meta)
    table = results.load(tmp_path)
    one, other = table.records
    assert one["gears"] == 3
    assert str(one["scheme"]).startswith("unknown scheme #")
    assert one["scheme"] != other["scheme"]
    assert json.loads(str(one["probe.gamma_site"]))["format"] == "mxfp3"


def test_studies_of_other_kinds_are_listed_with_what_they_have(
    tmp_path: Path, a_run: Run, folder: Path
) -> None:
    scheme = json.loads(json.dumps(stored(a_run, "exact", 0.001, 0).meta["scheme"]))
    for seed in (0, 1):
        cell = {"seed": seed, "deep": {"lrs": [0.1, 1], "site": scheme["ln_beta"]}, "arm": scheme}
        meta: dict[str, Any] = {"cell": cell, "bad_step": 4 + seed, "spikes": 7}
        write(tmp_path, f"r{seed}", {**meta, "versions": {"commit": None, "numpy": "2"}})
    point = stored(a_run, "exact", 0.001, 0)
    Store(tmp_path).save(point)
    table = results.load(tmp_path)
    assert [row for row in table.records if row["id"] == "r1"] == [
        {
            "id": "r1",
            "bad_step": 5,
            "spikes": 7,
            "cell.seed": 1,
            "cell.deep.lrs": "[0.1, 1]",
            "cell.deep.site": "exact",
            "cell.arm": "exact",
            "commit": None,
            "versions.numpy": "2",
        }
    ]
    assert {row["id"] for row in table.where("lr=None").records} == {"r0", "r1"}
    assert [row["id"] for row in table.where("bad_step>4").records] == ["r1"]
    both = table.where("cell.seed!=None")
    assert both.varying == ("cell.seed",)
    np.testing.assert_array_equal(both.array("bad_step", "cell.seed").values, [4, 5])


def test_what_cannot_be_read_is_reported_and_no_more(folder: Path, tmp_path: Path) -> None:
    good = sorted(folder.glob("*.npz"))[0]
    (tmp_path / good.name).write_bytes(good.read_bytes())
    (tmp_path / "half.npz").write_bytes(good.read_bytes()[:-40])
    (tmp_path / "folder.npz").mkdir()
    np.savez(tmp_path / "foreign.npz", x=np.zeros(2))
    (tmp_path / "notes.txt").write_text("no result")
    (tmp_path / ".abc.tmp").write_text("a run being written")
    table = results.load(tmp_path)
    assert [row["id"] for row in table.records] == [good.stem]
    assert [path.name for path, _ in table.damaged] == ["folder.npz", "foreign.npz", "half.npz"]
    assert all(str(path) in reason for path, reason in table.damaged)


def test_a_study_is_a_folder_or_a_name(
    folder: Path, table: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = folder.parent
    assert results.load("study", root=root).records == table.records
    assert results.load(str(folder)).records == table.records
    monkeypatch.chdir(root.parent)
    assert results.load("study", root.name).records == table.records
    with pytest.raises(
        FileNotFoundError, match=r"'studies': .* \(did you mean study\?\); .* holds study\. "
    ):
        results.load("studies", root)
    with pytest.raises(
        FileNotFoundError, match=r"no stored study .*; absent holds none\. .*studies\.NAME"
    ):
        results.load("study", "absent")
    for name, command in (
        ("gamma_cliff", "gamma_cliff"),
        ("interventions_laptop_code", "interventions --tier laptop_code"),
        ("command", "NAME, in a clone"),  # no study
    ):
        with pytest.raises(FileNotFoundError, match=rf"python -m studies\.{command}$"):
            results.load(name, root)
    file = next(folder.glob("*.npz"))
    with pytest.raises(FileNotFoundError, match=r"no stored study .*\.npz"):
        results.load(file, root)
    with pytest.raises(FileNotFoundError, match=r"holds no stored runs"):
        results.load(root)


def test_schemes_whose_short_labels_coincide_are_told_apart(tmp_path: Path, a_run: Run) -> None:
    base = mxsim.scheme("all_e4m3")
    pair = [replace(base, overrides=((block, "ln_gamma", SiteFormat()),)) for block in (4020, 5709)]
    assert len({result_id(scheme)[:6] for scheme in pair}) == 1  # found by search
    for scheme in pair:
        Store(tmp_path).save(record_of(Point(CONFIG, scheme), a_run))
    labels = {str(row["scheme"]) for row in results.load(tmp_path).records}
    assert len(labels) == 2
    assert sorted(map(len, labels)) == [len("all: mxfp8_e4m3 #") + n for n in (6, 16)]


def test_runs_that_only_their_probes_tell_apart(tmp_path: Path, a_run: Run) -> None:
    for plan in (None, PLAN, replace(PLAN, every=2)):
        point = Point(CONFIG, mxsim.scheme("exact"), plan)
        Store(tmp_path).save(record_of(point, a_run))
    table = results.load(tmp_path)
    assert table.varying == ("probe.every", "probe.schemes", "probe.gamma_site")
    with pytest.raises(ValueError, match=r"they differ in probe\.every"):
        table.array("eval_loss", "lr")
    assert table.array("eval_loss", "probe.every").coords == {"probe.every": (2, 4, None)}


# ---------------------------------------------------------------- choosing


Choice = Callable[[Any], bool]
CONDITIONS: list[tuple[list[str], Choice]] = [
    (["lr=0.01"], lambda r: r["lr"] == 0.01),
    (["lr==1e-2"], lambda r: r["lr"] == 0.01),
    (["lr != 0.01"], lambda r: r["lr"] != 0.01),
    (["lr>=0.01"], lambda r: r["lr"] in (0.01, 0.1)),
    (["lr > 0.01"], lambda r: r["lr"] == 0.1),
    (["lr<=0.01", "lr>0.001"], lambda r: r["lr"] == 0.01),
    (["lr>=1e-2"], lambda r: r["lr"] >= 0.01),  # as text "0.1" < "1e-2"
    (["width=8", "seed<1"], lambda r: r["seed"] == 0),
    (["width=8.0"], lambda r: True),
    (["width=64"], lambda r: False),
    (["status!=ok"], lambda r: r["status"] != "ok"),
    (["status = nonfinite"], lambda r: r["status"] == "nonfinite"),
    (["first_bad_step<6"], lambda r: r["first_bad_step"] == 5),  # None is not below 6
    (["first_bad_step>=0"], lambda r: r["first_bad_step"] in (5, 8)),
    (["first_bad_step=None"], lambda r: r["status"] == "ok"),
    (["first_bad_step!=None"], lambda r: r["status"] != "ok"),
    (["first_bad_step!=5"], lambda r: r["status"] != "nonfinite"),
    (["first_bad_tensor=block 1 hidden"], lambda r: r["status"] == "nonfinite"),
    (["final_over_best=nan"], lambda r: r["status"] == "nonfinite"),
    (["final_over_best<5"], lambda r: r["status"] == "ok"),  # NaN is not below 5
    (["grad_clip=1"], lambda r: False),
    (["grad_clip!=1"], lambda r: True),
    (["grad_clip>0"], lambda r: False),
    (["learned=false"], lambda r: r["status"] == "nonfinite"),
    (["censored=True"], lambda r: r["status"] == "diverged"),
    (["censored!=True"], lambda r: r["status"] != "diverged"),
    (["scheme=all_e4m3"], lambda r: r["scheme"] == "all_e4m3"),
    (["scheme=paper_text"], lambda r: r["scheme"] == "all_e4m3"),  # the same arithmetic
    (["scheme!=exact"], lambda r: r["scheme"] != "exact"),
    (["scheme=ln: mxint8 rule=rceil"], lambda r: r["scheme"].startswith("ln: ")),
    (["scheme=paper_code:bwd=mxfp8_e5m2"], lambda r: False),
    ([], lambda r: True),
]


@pytest.mark.parametrize(("conditions", "test"), CONDITIONS)
def test_where(table: Results, conditions: list[str], test: Choice) -> None:
    chosen = table.where(conditions)
    assert chosen.records == tuple(row for row in table.records if test(row))
    assert chosen.fields == table.fields
    if len(conditions) == 1:
        assert table.where(conditions[0]) == chosen
    chained = table
    for condition in conditions:
        chained = chained.where(condition)
    assert chained == chosen


def test_a_choice_has_its_own_varying_settings(table: Results) -> None:
    assert table.where(["lr=0.1", "scheme!=exact"]).varying == ("scheme", "seed")
    assert table.where("status=failed").varying == ()


@pytest.mark.parametrize(
    ("condition", "words"),
    [
        (
            "rate=1",
            r"the field of a condition must be a known name; got 'rate'; known are id, .*, lr, ",
        ),
        ("lr", "a condition must be FIELD=VALUE, or with != < <= > >=; got 'lr'"),
        ("lr=", "a condition must be"),
        ("=3", "a condition must be"),
        ("lr=>3", "a condition must be|lr holds numbers; got '>3'"),
        ("lr=high", "lr holds numbers; got 'high'"),
        ("lr<high", "< compares numbers only; got 'lr<high'"),
        ("lr<None", "< compares numbers only"),
        ("status>3", "> compares numbers only; got 'status>3'"),
        ("learned>0", "> compares numbers only"),
        ("learned=1", "learned is True or False; got '1'"),
        ("status=divrged", r"status .* one of ok, .*; got 'divrged' \(did you mean diverged\?\)"),
        ("status!=divrged", "did you mean diverged"),
        ("optimizer==adm", r"one of adam, adamw, sgd; got 'adm' \(did you mean adam"),
        ("scheme=all_e4m", r"scheme in a condition .*; got 'all_e4m' \(did you mean all_e4m3"),
    ],
)
def test_conditions_that_make_no_sense(table: Results, condition: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table.where([condition])


def test_large_integers_are_compared_exactly(tmp_path: Path) -> None:
    write(tmp_path, "a", {"cell": {"seed": 2**53}})
    write(tmp_path, "b", {"cell": {"seed": 2**53 + 1}})
    table = results.load(tmp_path)
    assert [r["id"] for r in table.where(f"cell.seed={2**53 + 1}").records] == ["b"]
    assert [r["id"] for r in table.where(f"cell.seed>{2**53}").records] == ["b"]


def test_sorted(table: Results) -> None:
    rows = table.sorted(["lr", "eval_loss"]).records
    keys = [(r["lr"], r["eval_loss"]) for r in rows]
    assert keys == sorted(keys)
    steps = [row["first_bad_step"] for row in table.sorted(["first_bad_step"]).records]
    assert steps == [5] * 5 + [8] * 6 + [None] * 6
    ratios = [row["final_over_best"] for row in table.sorted(["final_over_best"]).records]
    assert ratios[:12] == [1.5] * 6 + [9.0] * 6
    assert all(isinstance(ratio, float) and math.isnan(ratio) for ratio in ratios[12:])
    with pytest.raises(ValueError, match=r"sort must be a known name; got 'rate'; known are id, "):
        table.sorted(["rate"])


# ---------------------------------------------------------------- files


def test_csv_says_everything_exactly(table: Results, tmp_path: Path) -> None:
    path = table.to_csv(tmp_path / "runs.csv")
    assert b"\r" not in path.read_bytes()
    with path.open(newline="") as file:
        header, *lines = csv.reader(file)
    assert tuple(header) == table.fields
    assert len(lines) == 17
    for line, row in zip(lines, table.records, strict=True):
        for text, value in zip(line, row.values(), strict=True):
            if value is None or isinstance(value, str):
                assert text == (value or "")
            elif isinstance(value, float):
                assert float(text) == value or (math.isnan(value) and text == "nan")
            else:
                assert text == str(value)
    assert path.stat().st_mode & 0o777 == 0o644
    some = table.to_csv(str(tmp_path / "some.csv"), ["seed", "scheme"])
    first = table.records[0]
    assert some.read_text().splitlines()[:2] == [
        "seed,scheme",
        f"{first['seed']},{first['scheme']}",
    ]


def test_parquet_keeps_types(table: Results, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    path = table.to_parquet(tmp_path / "runs.parquet")
    read = parquet.read_table(path)
    assert tuple(read.column_names) == table.fields
    kinds = {name: str(read.schema.field(name).type) for name in read.column_names}
    assert kinds["lr"] == kinds["final_over_best"] == "double"
    assert kinds["seed"] == kinds["first_bad_step"] == "int64"
    assert kinds["status"] == "string"
    assert kinds["learned"] == "bool"
    for name in table.fields:
        for value, row in zip(read[name].to_pylist(), table.records, strict=True):
            assert value == row[name] or (math.isnan(value) and math.isnan(row[name]))  # type: ignore[arg-type]
    some = table.where("lr=0.1").to_parquet(tmp_path / "some.parquet", ["seed"])
    assert parquet.read_table(some).to_pydict().keys() == {"seed"}
    assert parquet.read_table(some).num_rows == 5


def test_parquet_of_mixed_columns(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    columns: dict[str, tuple[Any, Any, Any]] = {
        "numbers": (1, 2.5, None),
        "mixed": (1, "two", None),
        "large": (1, 2**64, None),
        "truth": (True, 1, None),
        "nothing": (None, None, None),
    }
    rows = tuple({name: values[i] for name, values in columns.items()} for i in range(3))
    path = Results(rows, (), tuple(columns)).to_parquet(tmp_path / "mixed.parquet")
    assert parquet.read_table(path).to_pydict() == {
        "numbers": [1.0, 2.5, None],
        "mixed": ["1", "two", None],
        "large": ["1", "18446744073709551616", None],
        "truth": ["True", "1", None],
        "nothing": [None, None, None],
    }


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_is_written_whole_or_not_at_all(
    table: Results, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    write_to = getattr(table, f"to_{kind}")
    path = tmp_path / f"runs.{kind}"
    path.write_text("the old one")
    with pytest.raises(OSError, match="absent/runs"):
        write_to(tmp_path / "absent" / "runs")
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken'"):
        write_to(tmp_path / "taken")
    with pytest.raises(
        ValueError, match=r"columns must be a known name; got 'rate'; known are id, "
    ):
        write_to(path, ["rate"])

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=rf"No space left on device: .*runs\.{kind}"):
            write_to(path)
    assert path.read_text() == "the old one"
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"runs.{kind}", "taken"]
    assert write_to(path) == path
    assert path.read_bytes() != b"the old one"
    assert len(list(tmp_path.iterdir())) == 2  # no temporary left


def test_parquet_without_pyarrow_says_what_to_install(
    table: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"pip install pyarrow"):
        table.to_parquet(tmp_path / "runs.parquet")
    assert list(tmp_path.iterdir()) == []
