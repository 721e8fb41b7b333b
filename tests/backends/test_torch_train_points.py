"""Runs by PyTorch as tasks of a study, and ``mxsim train --backend torch``."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mxsim
from mxsim.backends import torch_points
from mxsim.backends.torch_points import TorchPoint, device_of_worker
from mxsim.backends.torch_train import train
from mxsim.cli import main
from mxsim.store import Store, read_whole
from mxsim.sweep import Point, load_points, run_points, survey

pytestmark = pytest.mark.usefixtures("single_threaded")

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=32, steps=10, eval_samples=64)
SMALL = ["--width", "32", "--depth", "2", "--batch", "32", "--steps", "10", "--eval-samples", "64"]
COMMAND = ["train", *SMALL, "--scheme", "all_e4m3", "--probe-every", "0"]


def test_ids_tell_backends_and_device_types_apart_but_not_devices() -> None:
    scheme = mxsim.scheme("all_e4m3")
    ids = [TorchPoint(CFG, scheme, d).id for d in ("cpu", "cuda", "cuda:0", "cuda:3")]
    assert ids[1] == ids[2] == ids[3]
    assert len({Point(CFG, scheme).id, ids[0], ids[1]}) == 3
    other = TorchPoint(dataclasses.replace(CFG, seed=1), scheme, "cpu")
    assert other.id != ids[0]


def test_a_study_runs_stores_and_finds_them(tmp_path: Path) -> None:
    points = [TorchPoint(CFG, mxsim.scheme(name), "cpu") for name in ("exact", "all_e4m3")]
    store = Store(tmp_path)
    sent = pickle.loads(pickle.dumps(points))  # as to a worker
    assert [f.status for f in run_points(sent, store)] == ["ok", "ok"]
    assert survey(points, store).missing == ()
    for point, record in zip(points, load_points(points, store).values(), strict=True):
        run = train(CFG, point.scheme)
        np.testing.assert_array_equal(record.arrays["losses"], run.losses.astype(np.float32))
        assert record.meta["eval_loss"] == run.eval_loss
        assert record.meta["config"] == dataclasses.asdict(CFG)
        assert record.meta["backend"] == {"name": "torch", "device": "cpu"}
        assert record.meta["versions"]["torch"] == str(torch.__version__)
        assert record.meta["versions"]["tf32"] is False
    table = mxsim.results.load(tmp_path)
    assert {row["backend.device"] for row in table.records} == {"cpu"}


def test_a_run_that_cannot_start_is_stored_as_failed(tmp_path: Path) -> None:
    point = TorchPoint(CFG, mxsim.scheme("exact"), "cuda:99")
    [finished] = run_points([point], Store(tmp_path))
    assert finished.error is not None
    assert "one that PyTorch sees" in finished.error


@pytest.mark.parametrize(
    ("identity", "expected"), [((), "cuda:0"), ((1,), "cuda:0"), ((2,), "cuda:1"), ((6,), "cuda:1")]
)
def test_each_worker_takes_a_gpu_of_its_own(
    monkeypatch: pytest.MonkeyPatch, identity: tuple[int, ...], expected: str
) -> None:
    process = SimpleNamespace(current_process=lambda: SimpleNamespace(_identity=identity))
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 4)
    monkeypatch.setattr(torch_points, "multiprocessing", process)
    monkeypatch.setattr(torch_points, "torch", SimpleNamespace(cuda=cuda))
    assert device_of_worker("cpu") == "cpu"
    assert device_of_worker("cuda:2") == "cuda:2"
    assert device_of_worker("cuda") == expected


def folders(out: Path) -> list[Path]:
    return sorted(out.iterdir())


def test_the_command_trains_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch_ = [*COMMAND, "--backend", "torch", "--out", str(tmp_path)]
    assert main([*torch_, "--dry-run"]) == 0
    assert "ms by PyTorch on cpu" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert main(torch_) == 0
    [folder] = folders(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint.npz", "run.json", "series.npz"]
    facts: dict[str, Any] = json.loads((folder / "run.json").read_text())
    run = train(CFG, mxsim.scheme("all_e4m3"))
    assert facts["id"] == TorchPoint(CFG, mxsim.scheme("all_e4m3"), "cpu").id
    assert facts["backend"] == {"name": "torch", "device": "cpu"}
    assert (facts["status"], facts["eval_loss"]) == (run.status, run.eval_loss)
    losses = read_whole(folder / "series.npz")[0]["losses"]
    np.testing.assert_array_equal(losses, run.losses.astype(np.float32))
    capsys.readouterr()
    assert main(torch_) == 0
    assert "going on from step 10 of 10" in capsys.readouterr().out
    assert main([*COMMAND, "--out", str(tmp_path)]) == 0  # by Numba: a folder of its own
    assert len(folders(tmp_path)) == 2


def test_an_interrupted_command_saves_and_goes_on_to_the_same_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mxsim.backends.torch_step import DeviceStep

    arguments = [*COMMAND, "--backend", "torch", "--out", str(tmp_path)]
    gradient = DeviceStep.gradient

    def interrupted(step: DeviceStep) -> Any:
        if step.number.item() == 6:
            raise KeyboardInterrupt
        return gradient(step)

    monkeypatch.setattr(DeviceStep, "gradient", interrupted)
    assert main(arguments) == 130
    assert "interrupted after 6 of 10 steps, saved" in capsys.readouterr().out
    monkeypatch.undo()
    assert main(arguments) == 0
    assert "going on from step 6 of 10" in capsys.readouterr().out
    [folder] = folders(tmp_path)
    whole = train(CFG, mxsim.scheme("all_e4m3"))
    losses = read_whole(folder / "series.npz")[0]["losses"]
    np.testing.assert_array_equal(losses, whole.losses.astype(np.float32))


def test_what_does_not_go_together_is_refused_before_a_folder_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*COMMAND, "--out", str(tmp_path)]
    assert main([*arguments, "--device", "cuda"]) == 1
    assert "device must be cpu with backend 'numba'; got 'cuda'" in capsys.readouterr().err
    assert main([*arguments, "--backend", "torch", "--device", "tpu"]) == 1
    assert "device must be cpu, cuda or cuda:<index>; got 'tpu'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
