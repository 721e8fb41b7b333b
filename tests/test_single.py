"""mxsim train and mxsim scheme, as a person meets them."""

import importlib
import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim.cli import main
from mxsim.estimate import cost_of, in_words
from mxsim.store import read_whole, write_whole

SMALL = ["--width", "32", "--depth", "2", "--batch", "32", "--steps", "40", "--eval-samples", "64"]


def run_folder(out: Path) -> Path:
    [folder] = out.iterdir()
    return folder


def test_train_writes_config_series_and_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *SMALL, "--scheme", "all_e4m3", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "status: ok" in said or "status: diverged" in said
    assert "zeta over 40 probes" in said
    folder = run_folder(tmp_path)
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint.npz", "run.json", "series.npz"]
    facts = json.loads((folder / "run.json").read_text())
    assert facts["scheme_name"] == "all_e4m3"
    assert facts["config"]["width"] == 32
    assert facts["versions"]["mxsim"] == mxsim.__version__
    assert "commit" in facts["versions"]
    arrays, _ = read_whole(folder / "series.npz")
    cfg = mxsim.ProxyConfig(width=32, depth=2, batch=32, steps=40, eval_samples=64)
    plan = mxsim.ProbePlan(1, (("all_e4m3", mxsim.scheme("all_e4m3")),))
    run = mxsim.train(cfg, mxsim.scheme("all_e4m3"), probe=plan)
    np.testing.assert_array_equal(arrays["losses"], run.losses.astype(np.float32))
    assert facts["eval_loss"] == run.eval_loss
    checkpoint = mxsim.load_checkpoint(folder / "checkpoint.npz")
    assert checkpoint.ended
    assert main(["train", *SMALL, "--scheme", "all_e4m3", "--out", str(tmp_path)]) == 0
    assert "going on from step 40 of 40" in capsys.readouterr().out


def test_dry_run_says_what_and_how_long_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", *SMALL, "--scheme", "paper_code:bwd=mxfp8_e5m2", "--dry-run"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "16,576 parameters" in said  # 2 (32 + 32 + 128 * 32 + 32 * 128 + 32)
    assert "40 steps of" in said
    assert "about" in said
    assert "paper_code_bwd_mxfp8_e5m2-" in said
    assert list(tmp_path.iterdir()) == []


def test_an_estimate_is_of_the_order_of_the_run() -> None:
    cfg = mxsim.ProxyConfig(width=64, depth=2, batch=128, steps=200, eval_samples=1024)
    scheme = mxsim.scheme("all_e4m3")
    plan = mxsim.ProbePlan(20, (("a", scheme),))
    mxsim.train(cfg, scheme, probe=plan)  # compiled
    cost = cost_of(cfg, scheme, plan)
    started = time.perf_counter()
    mxsim.train(cfg, scheme, probe=plan)
    took = time.perf_counter() - started
    assert cost.total == pytest.approx(200 * cost.step + 10 * cost.probe + cost.evaluation)
    assert took / 10 < cost.total < 10 * took  # another process may run beside


def test_durations_in_words() -> None:
    assert [in_words(s) for s in (0.5, 42, 300, 7200)] == ["0.5 s", "42 s", "5.0 min", "2.0 h"]


def test_ctrl_c_saves_and_the_same_command_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", *SMALL, "--steps", "3000", "--scheme", "exact", "--out", str(tmp_path)]
    started: list[mxsim.Training] = []
    begin = mxsim.start

    def watched(*given: Any, **named: Any) -> mxsim.Training:
        started.append(begin(*given, **named))
        return started[0]

    def interrupt() -> None:
        while not started or started[0].step < 200:
            time.sleep(0.001)
        signal.raise_signal(signal.SIGINT)  # the main thread takes it

    monkeypatch.setattr("mxsim.single.start", watched)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        status = main(arguments)
    finally:
        thread.join()
    said = capsys.readouterr().out
    assert status == 130
    assert "the same command goes on from there" in said
    stopped = mxsim.load_checkpoint(run_folder(tmp_path) / "checkpoint.npz")
    assert 200 <= stopped.step < 3000
    assert main(arguments) == 0
    assert f"going on from step {stopped.step} of 3000" in capsys.readouterr().out
    final = mxsim.load_checkpoint(run_folder(tmp_path) / "checkpoint.npz")
    whole = mxsim.train(final.config, final.scheme)
    np.testing.assert_array_equal(final.losses, whole.losses)


def test_ctrl_c_while_evaluating_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", *SMALL, "--scheme", "exact", "--out", str(tmp_path)]
    module = importlib.import_module("mxsim.train")
    evaluate = module.evaluate

    def interrupted(*given: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "evaluate", interrupted)
    assert main(arguments) == 130
    assert "interrupted after 40 of 40 steps, saved in" in capsys.readouterr().out
    monkeypatch.setattr(module, "evaluate", evaluate)
    assert main([*arguments, "--dry-run"]) == 0
    assert "would go on from step 40 of 40" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "going on from step 40 of 40" in capsys.readouterr().out


def test_ctrl_c_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*given: object, **named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mxsim.single.start", interrupted)
    assert main(["train", *SMALL, "--scheme", "exact", "--out", str(tmp_path)]) == 130
    assert "interrupted after 0 of 40 steps, nothing was done yet" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_found_out_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("")
    assert main(["train", *SMALL, "--scheme", "exact", "--out", str(file)]) == 1
    assert "file" in capsys.readouterr().err

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mxsim.store.os.fsync", full)
    monkeypatch.setattr("mxsim.single.start", None)  # would raise if it came to that
    assert main(["train", *SMALL, "--scheme", "exact", "--out", str(tmp_path)]) == 1
    assert "No space left on device" in capsys.readouterr().err


def test_a_run_that_fails_at_once_ends_with_its_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", *SMALL, "--gamma-mean", "1e38", "--scheme", "all_e2m1"]
    assert main([*arguments, "--out", str(tmp_path)]) == 0
    assert "status: nonfinite (step 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "--scheme", "all_e9"], "got 'all_e9' (did you mean "),
        (["train", "--scheme", "paper_code:fwd"], "option=value"),
        (["train", "--probe-every", "-1"], "probe_every must be at least 0; got -1"),
        (["scheme", "exact", "bf16", "mx_mix"], "names must be one or two"),
        (["scheme", "nothing"], "scheme must be a known name; got 'nothing'; known are exact"),
    ],
)
def test_refusals(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 1
    assert words in capsys.readouterr().err


def test_scheme_prints_cards_differences_and_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheme", "paper_code:acts=bf16"]) == 0
    card = capsys.readouterr().out
    assert "x of fc1, fc2" in card
    assert "ties away" in card
    assert "beta gets no gradient" in card
    assert "accumulation: GEMMs in float32" in card
    assert main(["scheme", "all_e4m3", "mx_mix"]) == 0
    assert "mxfp8_e5m2" in capsys.readouterr().out
    assert main(["scheme", "all_e4m3", "paper_text"]) == 0
    assert "the same arithmetic" in capsys.readouterr().out
    assert main(["scheme"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in mxsim.PRESETS)


def test_a_checkpoint_of_another_run_or_a_damaged_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["train", *SMALL, "--scheme", "exact", "--out", str(tmp_path)]
    assert main(arguments) == 0
    path = run_folder(tmp_path) / "checkpoint.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    capsys.readouterr()
    assert main(arguments) == 0
    assert "starting over" in capsys.readouterr().out
    assert path.with_name("checkpoint.damaged.npz").read_bytes() == whole[:100]
    arrays, meta = read_whole(path)
    write_whole(path, arrays, meta | {"checkpoint": 2})
    later = path.read_bytes()
    assert main(arguments) == 1
    assert "is a checkpoint of version 2" in capsys.readouterr().err
    assert path.read_bytes() == later
    other = mxsim.ProxyConfig(width=32, depth=2, batch=32, steps=7, eval_samples=64)
    mxsim.save_checkpoint(mxsim.start(other, mxsim.scheme("exact")), path)
    assert main(arguments) == 1
    assert "holds another run" in capsys.readouterr().err
