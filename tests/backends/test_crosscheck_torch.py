"""PyTorch's backend and the outside witnesses on the cross-check's corpus.

`make crosscheck` runs the whole matrix; here is what a test can hold in seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mxsim.backends import torch_trajectories
from mxsim.crosscheck.backend import Backend, Result, as_array, as_tensor, torch_backend
from mxsim.crosscheck.backends import all_backends
from mxsim.crosscheck.case import FORMATS, Array, Case, Config
from mxsim.crosscheck.corpus import corpus
from mxsim.crosscheck.known import KNOWN
from mxsim.crosscheck.main import TOLERANCES, compare_runs, crosscheck
from mxsim.crosscheck.matrix import check

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
    ),
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("device", DEVICES)
def test_pytorch_agrees_on_a_third_of_the_corpus(device: str) -> None:
    matrix = check(corpus()[::3], [torch_backend(device)])
    assert not matrix.unexplained, matrix.unexplained[0]
    assert not matrix.known
    for fmt in FORMATS:
        ran = [cell.passed for (_, scheme), cell in matrix.cells.items() if scheme[0] == fmt]
        assert min(ran) > 10


def test_every_known_difference_still_occurs_and_no_other_does() -> None:
    backends, missing = all_backends()
    assert not missing
    outside = [b for b in backends if b.name.split()[0] in ("torchao", "ml_dtypes", "gfloat")]
    matrix = check(corpus(), outside)
    assert not matrix.unexplained, matrix.unexplained[0]
    assert not matrix.stale
    assert {d.known for d in matrix.known} == set(KNOWN)
    assert all(d.examples for d in matrix.known)


def test_a_witness_that_hides_behind_a_known_difference_is_caught() -> None:
    """torchao, spoilt where it is known to differ, but in another way or place."""
    [torchao] = [b for b in all_backends()[0] if b.name == "torchao cpu"]
    cases = [case for case in corpus() if case.name in ("a NaN in the block", "byte 0")]

    def spoilt(x: Array, config: Config) -> Result:
        found = torchao.run(x, config)
        return dataclasses.replace(found, values=np.nan_to_num(found.values, nan=1.0))

    broken = Backend(torchao.name, torchao.version, torchao.can_run, spoilt)
    formats = ("mxfp8_e4m3",)
    assert not check(cases, [torchao], formats=formats).unexplained
    found = check(cases, [broken], formats=formats).unexplained
    assert {d.examples[0].case for d in found} == {"a NaN in the block"}


LAYOUTS = (
    "a Fortran-ordered array",
    "a transposed view",
    "every other element",
    "backwards",
    "one row, repeated",
    "no rows",
    "normal, bfloat16",
    "normal, float16",
)


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_have_the_values_and_the_strides_of_the_case(name: str) -> None:
    [case] = [case for case in corpus() if case.name == name]
    t = as_tensor(case.x, case.config("mxint8", "floor", "even"), "cpu")
    assert np.array_equal(as_array(t.float()), case.x.astype(np.float32))
    assert str(t.dtype) == f"torch.{case.dtype}"
    if case.x.size and "backwards" not in name:
        assert t.stride() == tuple(step // case.x.itemsize for step in case.x.strides)


def test_trajectories_are_compared() -> None:
    words, sound = compare_runs("cpu")
    assert sound
    assert len(words) == len(TOLERANCES) == 4
    for (dtype, name), text in zip(TOLERANCES, words, strict=True):
        assert text.startswith(f"torch cpu beside numba, {dtype}, {name}: ")


@pytest.mark.parametrize(
    "change",
    [
        {"zeta": 3.0},
        {"zeta": float("nan")},
        {"loss_torch": float("nan")},
        {"loss_torch": 0.5},
        {"differing": 40_000},
    ],
    ids=str,
)
def test_trajectories_that_part_fail(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong gradient, a NaN in the middle, another loss, too many other codes: each is seen."""
    real = torch_trajectories.compare_trajectories

    def spoilt(*arguments: Any, **keywords: Any) -> Any:
        found = real(*arguments, **keywords)
        steps = list(found.steps)
        steps[4] = dataclasses.replace(steps[4], **change)
        return dataclasses.replace(found, steps=tuple(steps))

    monkeypatch.setattr(torch_trajectories, "compare_trajectories", spoilt)
    words, sound = compare_runs("cpu")
    assert not sound
    assert all(text.startswith("DISAGREES: ") for text in words)


def test_the_command_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few: Any = [case for case in corpus() if case.name in ("957 comes out as 896", "byte 0")]
    monkeypatch.setattr("mxsim.crosscheck.main.corpus", lambda: tuple(few))
    assert crosscheck("cpu", tmp_path) == 0
    page = (tmp_path / "report.md").read_text()
    for text in (
        "## torch cpu",
        "## torchao cpu",
        "torch cpu beside numba, float64, exact",
        "2^-127",
    ):
        assert text in page


def test_a_case_that_pytorch_gets_wrong_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = torch_backend("cpu")
    wrong = dataclasses.replace(right, run=lambda x, c: Result(right.run(x, c).values * 2))
    few = (Case("one", np.ones((1, 32), np.float32), "a test"),)
    monkeypatch.setattr("mxsim.crosscheck.main.corpus", lambda: few)
    monkeypatch.setattr("mxsim.crosscheck.main.all_backends", lambda d: ([wrong], {}))
    assert crosscheck("cpu", tmp_path) == 1
