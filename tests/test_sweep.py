"""Sweeps: order and executor change nothing, what is stored is skipped, kills lose little."""

import io
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import mxsim
from mxsim.executors import Execution
from mxsim.precision import SiteFormat
from mxsim.progress import execute
from mxsim.store import Record, Store
from mxsim.sweep import Point, compile_kernels, load_points, missing, run_points

CONFIG = mxsim.ProxyConfig(width=8, depth=2, batch=8, steps=12, eval_samples=16)
PLAN = mxsim.ProbePlan(4, (("all_e4m3", mxsim.scheme("all_e4m3")),))
SERIAL = Execution(executor="serial")
POINTS = [
    Point(replace(CONFIG, seed=seed), mxsim.scheme(name), PLAN)
    for seed in range(2)
    for name in ("exact", "all_e4m3")
]


def contents(store: Store) -> dict[str, dict[str, bytes]]:
    return {
        point.id: {k: v.tobytes() for k, v in store.load(point.id).arrays.items()}
        for point in POINTS
    }


def test_order_and_processes_do_not_change_a_bit(tmp_path: Path) -> None:
    compile_kernels(POINTS)
    alone, reverse = Store(tmp_path / "a"), Store(tmp_path / "b")
    one = list(run_points(POINTS, alone))
    with Execution(workers=2).open() as pool:
        two = list(run_points(POINTS[::-1], reverse, pool))
    assert {f.point.id for f in one} == {f.point.id for f in two} == {p.id for p in POINTS}
    assert contents(alone) == contents(reverse)
    assert missing(POINTS, alone) == []


def test_what_is_stored_is_skipped_and_damage_is_rerun(tmp_path: Path) -> None:
    store = Store(tmp_path)
    list(run_points(POINTS[:2], store))
    assert missing(POINTS + POINTS, store) == POINTS[2:]
    store.path(POINTS[0].id).write_bytes(b"half a file")
    assert missing(POINTS, store) == [POINTS[0], *POINTS[2:]]
    list(run_points(missing(POINTS, store), store))
    assert missing(POINTS, store) == []


def test_a_record_holds_what_was_run(tmp_path: Path) -> None:
    record = POINTS[1].run()
    run = mxsim.train(POINTS[1].config, POINTS[1].scheme, probe=PLAN)
    np.testing.assert_array_equal(record.arrays["losses"], run.losses.astype(np.float32))
    assert record.meta["status"] == run.status
    assert record.meta["eval_loss"] == run.eval_loss
    assert record.meta["config"]["width"] == 8
    assert record.meta["scheme"]["ln_gamma"]["format"] == "mxfp8_e4m3"
    assert record.meta["scheme"]["ln_gamma"]["scale_rule"] == "floor"
    assert record.meta["versions"]["mxsim"] == mxsim.__version__
    assert record.arrays["probe_zeta"].shape == (3, 1, 6)


def test_a_run_that_raises_does_not_stop_the_others(tmp_path: Path) -> None:
    broken = Point(
        CONFIG, replace(POINTS[0].scheme, overrides=((5, "ln_gamma", SiteFormat("bf16")),))
    )
    done = list(run_points([broken, POINTS[0]], Store(tmp_path)))
    assert done[0].status is None
    assert "block 5" in (done[0].error or "")
    assert done[1].error is None


def test_missing_results_are_counted(tmp_path: Path) -> None:
    store = Store(tmp_path)
    list(run_points(POINTS[:3], store))
    assert set(load_points(POINTS[:3], store)) == {p.id for p in POINTS[:3]}
    with pytest.raises(FileNotFoundError, match="1 of 4 results are missing"):
        load_points(POINTS, store)


def test_a_folder_that_takes_nothing_is_said_so_before_running(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    output = io.StringIO()
    console = Console(file=output, width=200)
    assert not execute(POINTS, Store(tmp_path / "file" / "study"), SERIAL, console)
    assert "does not take results" in output.getvalue()
    assert output.getvalue().count("\n") <= 2


def test_a_full_disk_ends_the_sweep_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, output = Store(tmp_path), io.StringIO()
    whole = Store.save

    def save(self: Store, record: Record) -> Path:
        if len(list(tmp_path.glob("*.npz"))) == 2:
            raise OSError(28, "No space left on device")
        return whole(self, record)

    monkeypatch.setattr(Store, "save", save)
    assert not execute(POINTS, store, SERIAL, Console(file=output, width=200))
    assert "No space left on device" in output.getvalue()
    assert "2 of 4 runs are stored" in output.getvalue()
    assert len(list(tmp_path.iterdir())) == 2


# A sweep of runs of some seconds, killed while some are done and some in progress.
SWEEP = """
import sys
from dataclasses import replace
from pathlib import Path
import mxsim
from rich.console import Console
from mxsim.executors import Execution
from mxsim.progress import execute
from mxsim.store import Store
from mxsim.sweep import Point

if __name__ == "__main__":
    cfg = mxsim.ProxyConfig(width=16, depth=2, batch=32, steps=400, eval_samples=16)
    points = [Point(replace(cfg, seed=s), mxsim.scheme("exact")) for s in range(40)]
    done = execute(points, Store(Path(sys.argv[1])), Execution(workers=2), Console(width=200))
    sys.exit(0 if done else 1)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_sweep_keeps_what_was_finished(tmp_path: Path, how: signal.Signals) -> None:
    script, folder = tmp_path / "sweep.py", tmp_path / "results"
    script.write_text(SWEEP)
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.npz"))) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)  # as a terminal does: the workers get it too
    else:
        process.send_signal(how)
    output, _ = process.communicate(timeout=60)
    time.sleep(2.5)  # workers notice that their parent is gone
    stored = list(folder.glob("*.npz"))
    assert 3 <= len(stored) < 40
    store = Store(folder)
    assert list(store.damaged()) == []  # whole files only
    time.sleep(1.0)
    assert len(list(folder.glob("*.npz"))) == len(stored)  # nobody is still at work
    if how != signal.SIGKILL:
        assert process.returncode == 1
        assert f"{len(stored)} of 40 runs are stored" in output
        assert f"to go on: {sys.executable} {script} {folder}" in output
        assert "Traceback" not in output
