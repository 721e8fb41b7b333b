"""The cross-check: its corpus, what agrees, what is known to differ, what is printed.

PyTorch is not needed; tests/backends/test_crosscheck_torch.py has what does.
"""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from mxsim import cli
from mxsim.crosscheck import corpus as corpus_module
from mxsim.crosscheck.backend import Backend, Result, minimal_backend, numba_backend
from mxsim.crosscheck.backends import all_backends
from mxsim.crosscheck.case import (
    BLOCK_FORMATS,
    E8M0_FORMATS,
    ELEMENTWISE,
    FORMATS,
    ROUNDINGS,
    RULES,
    Array,
    Case,
    Config,
)
from mxsim.crosscheck.corpus import corpus
from mxsim.crosscheck.known import Known
from mxsim.crosscheck.main import crosscheck, main
from mxsim.crosscheck.matrix import Matrix, check
from mxsim.crosscheck.reference import SPECS, judge
from mxsim.crosscheck.report import as_json, markdown, print_matrix, rows_of, verdict
from mxsim.crosscheck.witnesses import microxcaling_backend

GOLDEN = np.load(Path(__file__).parent / "golden" / "reference_qdq.npz")
SOME = ("mxfp8_e4m3", "mxfp4_e2m1", "mxint8", "nvfp4", "bf16")  # every kind of format


def names(*parts: str) -> list[Case]:
    """The cases in whose name one of the parts is."""
    return [case for case in corpus() if any(part in case.name for part in parts)]


def elements(fmt: str) -> Config:
    return Config(fmt, "own" if fmt in (*ELEMENTWISE, "nvfp4") else "floor", "even")


# ------------------------------------------------------------------------------------ the corpus


def test_the_corpus_is_the_same_every_time() -> None:
    again = corpus_module.corpus.__wrapped__()
    for a, b in zip(corpus(), again, strict=True):
        assert a.name == b.name
        assert a.x.dtype == b.x.dtype
        assert a.x.tobytes() == b.x.tobytes()


def test_the_corpus_covers_what_it_should() -> None:
    configs = [config for case in corpus() for config in case.configs()]
    for fmt in FORMATS:
        mine = [config for config in configs if config.fmt == fmt]
        assert {config.rounding for config in mine} == set(ROUNDINGS)
        assert {config.dtype for config in mine} == {"float32", "float64", "bfloat16", "float16"}
        assert {config.finite for config in mine} == {True, False}
        if fmt in E8M0_FORMATS:
            assert {config.rule for config in mine} == set(RULES)
        if fmt in BLOCK_FORMATS:
            assert {config.nonfinite for config in mine} == {"propagate", "saturate"}
            assert {0, 1, -1, (0, 2)} <= {config.axis for config in mine}
            sizes = {config.block_size for config in mine}
            assert {1, 2, 8, 16, (4, 8), (32, 32), "tensor"} <= sizes
            assert {0, 254, 255} <= scale_bytes(fmt) or fmt == "nvfp4"
    assert all(case.origin and not case.x.flags.writeable for case in corpus())
    assert sum(case.x.size for case in corpus()) < 250_000


def scale_bytes(fmt: str) -> set[int]:
    found: set[int] = set()
    for case in corpus():
        if fmt in case.formats:
            scales = judge(case.x, case.config(fmt, "floor", "even")).scales
            assert scales is not None
            found |= set(scales.ravel().tolist())
    return found


@pytest.mark.parametrize("fmt", E8M0_FORMATS)
def test_every_code_is_met(fmt: str) -> None:
    [case] = names(f"codes and ties of {fmt} at 2^0, float32")
    codes = judge(case.x, case.config(fmt, "floor", "even")).codes
    assert codes is not None
    spec = SPECS[fmt]
    # Every magnitude with either sign, but two's complement has one zero; -2 is a code of its own,
    # and no element of the pinned blocks is as large.
    expected = 2 * (spec.largest_code + 1) - spec.integer
    assert len(np.unique(codes)) == expected


def test_the_golden_sample_is_part_of_the_recording() -> None:
    backend, roundings = (
        microxcaling_backend(),
        {"nearest": "away", "even": "even", "floor": "zero"},
    )
    seen = 0
    for key in GOLDEN:
        if not key.startswith("out/"):
            continue
        _, family, fmt, rounding, *blocks = key.split("/")
        elementwise = fmt == "bfloat16"
        axis, block = (1, 32) if elementwise else map(int, blocks)
        [case] = names(f"golden {family}, axis {axis}, block {block}")
        config = case.config("bf16" if elementwise else f"mx{fmt}", "floor", roundings[rounding])
        part = np.s_[4:6, :] if axis else np.s_[:, 40:46]
        assert np.array_equal(case.x, GOLDEN[f"in/{family}"][part])
        assert np.array_equal(backend.run(case.x, config).values, GOLDEN[key][part])
        seen += 1
    assert seen == 250


# ------------------------------------------------------------------------------- what is right


def test_what_is_here_agrees() -> None:
    backends, missing = all_backends()
    assert {"numba", "minimal", "microxcaling"} <= {backend.name for backend in backends}
    assert not {backend.name for backend in backends} & set(missing)
    quick = [b for b in backends if b.name in ("numba", "minimal", "ml_dtypes", "microxcaling")]
    matrix = check(corpus(), quick, missing, SOME)
    assert not matrix.unexplained, matrix.unexplained[0]
    assert not matrix.stale
    for fmt in SOME:
        for rule in RULES if fmt in E8M0_FORMATS else ("own",):
            for rounding in ROUNDINGS:
                cell = matrix.cells["numba", (fmt, rule, rounding)]
                assert (cell.passed > 40, cell.known, cell.failed) == (True, 0, 0)
    assert matrix.cells["minimal", ("mxint8", "rceil", "zero")].passed > 40
    assert matrix.cells["microxcaling", ("mxint8", "floor", "away")].passed == 20


def test_a_recording_is_compared_as_numbers_and_all_else_bit_by_bit() -> None:
    case = Case("zeros", np.array([[-0.0, 1.0]], np.float32), "")
    right = numba_backend()

    def positive_zeros(x: Array, config: Config) -> Result:
        return Result(right.run(x, config).values + np.float32(0))

    def ran(as_numbers: bool) -> int:
        backend = Backend("lax", "", right.can_run, positive_zeros, as_numbers)
        return len(check([case], [backend], formats=("mxfp4_e2m1",)).unexplained)

    assert ran(as_numbers=True) == 0
    assert ran(as_numbers=False) == len(RULES) * len(ROUNDINGS)


# --------------------------------------------------------------------------- known differences


def doubled_under_byte_0(backend: Backend) -> Backend:
    def run(x: Array, config: Config) -> Result:
        found = backend.run(x, config)
        assert found.scales is not None
        at = judge(x, config).block_byte == 0
        return Result(np.where(at, found.values * np.float32(2), found.values))

    return Backend("doubling", "", backend.can_run, run)


def in_byte_0(config: Config, x: Array, judged: Any) -> Array:
    return np.asarray(judged.block_byte == 0)


DOUBLED = Known("doubled", "doubling", in_byte_0, "it doubles", "the specification", "a test")


def test_a_known_difference_covers_what_it_names_and_nothing_else() -> None:
    cases, backend = names("byte 0"), doubled_under_byte_0(numba_backend())
    fmt = ("mxfp8_e4m3",)
    explained = check(cases, [backend], formats=fmt, known=[DOUBLED])
    assert not explained.unexplained
    assert not explained.stale
    assert [d.known for d in explained.known] == [DOUBLED]
    assert explained.known[0].examples[0].case == "byte 0"
    assert check(cases, [backend], formats=fmt, known=[]).unexplained
    elsewhere = dataclasses.replace(DOUBLED, backend="another")
    assert check(cases, [backend], formats=fmt, known=[elsewhere]).unexplained
    in_codes = dataclasses.replace(DOUBLED, outputs=("codes",))
    assert check(cases, [backend], formats=fmt, known=[in_codes]).unexplained


def test_a_known_difference_that_is_gone_is_stale() -> None:
    right = dataclasses.replace(numba_backend(), name="doubling")
    matrix = check(names("byte 0"), [right], formats=("mxfp8_e4m3",), known=[DOUBLED])
    assert matrix.stale == [DOUBLED]
    absent = check(names("byte 0"), [minimal_backend()], formats=("mxint8",), known=[DOUBLED])
    assert absent.stale == []  # its backend did not run


# ------------------------------------------------------------------------------- what is printed


def small_matrix() -> Matrix:
    broken = Backend("broken", "1.0", lambda c: True, lambda x, c: Result(x))
    return check(names("957", "byte 0"), [numba_backend(), broken], {"absent": "no module"})


def test_the_printed_matrix_fits_100_columns_and_shows_what_is_wrong() -> None:
    console = Console(width=100, record=True, file=StringIO())
    print_matrix(small_matrix(), console)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 200  # examples are not wrapped
    tables = [line for line in text.splitlines() if line.startswith(("mxfp", "mxint", "nvfp4"))]
    assert max(map(len, tables)) <= 100
    assert "mxint8_asymmetric" in text
    assert "UNEXPLAINED: broken" in text
    assert "absent: not there (no module)" in text
    assert "!2" in text


def test_markdown_and_json_hold_every_cell() -> None:
    matrix, cases = small_matrix(), names("957", "byte 0")
    page = markdown(matrix, {"made": "today"}, ["a run"])
    for text in ("## broken 1.0", "| mxint8_asymmetric | 2 | 2 |", "made today", "- a run", "!2"):
        assert text in page
    data = json.loads(json.dumps(as_json(matrix, cases, {"made": "today"}, ["a run"])))
    assert data["verdict"] == verdict(matrix)
    assert len(data["matrix"]) == len(matrix.cells)
    counts = [row["passed"] + row["known"] + row["failed"] for row in data["matrix"]]
    assert sum(counts) == 2 * sum(len(list(case.configs())) for case in cases)
    assert len(data["unexplained"]) == len(matrix.unexplained)
    assert [fmt for fmt, _ in rows_of(matrix, "numba")] == list(FORMATS)


def test_the_command_writes_a_report_and_its_status_says_whether_all_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = numba_backend()
    monkeypatch.setattr("mxsim.crosscheck.main.corpus", lambda: tuple(names("957", "byte 0")))
    absent = {"torch cpu": "No module named 'torch'"}

    def ran(backend: Backend) -> int:
        monkeypatch.setattr("mxsim.crosscheck.main.all_backends", lambda d: ([backend], absent))
        return main(["--out", str(tmp_path / "report")])

    assert ran(quick) == 0
    assert "0 without one" in (tmp_path / "report" / "report.md").read_text()
    assert json.loads((tmp_path / "report" / "report.json").read_text())["unexplained"] == []
    assert ran(doubled_under_byte_0(quick)) == 1


def test_the_command_takes_some_formats_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cases = names("957", "byte 0")
    monkeypatch.setattr("mxsim.crosscheck.main.corpus", lambda: tuple(cases))
    renamed = dataclasses.replace(numba_backend(), name="ml_dtypes")  # much is known of that one
    absent = {"torch cpu": "No module named 'torch'"}
    monkeypatch.setattr("mxsim.crosscheck.main.all_backends", lambda d: ([renamed], absent))
    for command in (main, lambda words: cli.main(["crosscheck", *words])):
        out = ["--out", str(tmp_path / "report"), "--formats"]
        assert command([*out, "mxint8", "mxfp4_e2m1"]) == 0
        data = json.loads((tmp_path / "report" / "report.json").read_text())
        assert {row["format"] for row in data["matrix"]} == {"mxint8", "mxfp4_e2m1"}
        assert data["made"]["formats"] == "mxint8 mxfp4_e2m1"
        assert data["stale"] == []  # what is known may be of the other formats
        capsys.readouterr()
        assert command([*out, "mxint9"]) == 1
        assert "got 'mxint9' (did you mean mxint8?)" in capsys.readouterr().err


def test_a_gpu_that_is_not_there_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec("torch") is not None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = r"device must be cpu (without PyTorch|where PyTorch finds no GPU); got 'cuda'"
    with pytest.raises(ValueError, match=r"device must be one of cpu, cuda; got 'tpu'"):
        all_backends("tpu")
    with pytest.raises(ValueError, match=message):
        crosscheck("cuda", tmp_path)
    for command in (main, lambda words: cli.main(["crosscheck", *words])):
        assert command(["--device", "cuda", "--out", str(tmp_path)]) == 1
        assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.iterdir())
