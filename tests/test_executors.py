"""Executors: any will do, a killed Dask worker loses nothing, clusters are described in a file."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import (
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ThreadPoolExecutor,
)
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import mxsim
from mxsim.executors import Execution, Pool, QueueCluster, read_cluster_file
from mxsim.store import Store
from mxsim.sweep import Point, WorkersLost, compile_kernels, missing, run_points
from mxsim.threads import one_blas_thread

# Wide enough for this BLAS to give other bits on two threads of its own.
WIDE = mxsim.ProxyConfig(width=200, depth=1, batch=500, steps=4, eval_samples=16)
CONFIG = mxsim.ProxyConfig(width=8, depth=2, batch=8, steps=12, eval_samples=16)
POINTS = [
    Point(replace(CONFIG, seed=seed), mxsim.scheme(name))
    for seed in range(3)
    for name in ("exact", "all_e4m3")
]


def arrays(store: Store) -> dict[str, bytes]:
    return {p.id: store.load(p.id).arrays["losses"].tobytes() for p in POINTS}


def test_any_executor_gives_the_same_bits(tmp_path: Path) -> None:
    alone, threads = Store(tmp_path / "serial"), Store(tmp_path / "threads")
    list(run_points(POINTS, alone))
    with ThreadPoolExecutor(2) as executor:
        list(run_points(POINTS, threads, Pool(executor, lambda: 2, "2 threads")))
    assert arrays(alone) == arrays(threads)


def test_threads_beside_each_other_do_not_lift_the_blas_limit(tmp_path: Path) -> None:
    points = [Point(replace(WIDE, seed=seed), mxsim.scheme("exact")) for seed in range(10)]
    alone, threads = Store(tmp_path / "serial"), Store(tmp_path / "threads")
    list(run_points(points, alone))
    with ThreadPoolExecutor(2) as executor:  # without a Pool: any executor will do
        list(run_points(points, threads, executor))
    for point in points:
        expected, found = (each.load(point.id).arrays["losses"] for each in (alone, threads))
        assert expected.tobytes() == found.tobytes()


def test_the_blas_limit_lasts_until_the_last_is_out() -> None:
    def most() -> int:
        blas = [each for each in threadpool_info() if each["user_api"] == "blas"]
        return int(max(each["num_threads"] for each in blas))

    with threadpool_limits(2, "blas"):
        first, second = one_blas_thread(), one_blas_thread()
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert most() == 1
        second.__exit__(None, None, None)
        assert most() == 2


def test_a_run_that_ends_its_worker_is_named(tmp_path: Path) -> None:
    class Dying(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(BrokenExecutor())
            return future

    with pytest.raises(WorkersLost, match=f"died.*{POINTS[0].id}"):
        list(run_points(POINTS[:1], Store(tmp_path), Dying()))


def test_a_queue_without_its_command_is_refused(tmp_path: Path) -> None:
    described = tmp_path / "cluster.toml"
    described.write_text('jobs = 1\n[oar]\ncores = 1\nmemory = "1GB"')
    execution = Execution(executor="dask", cluster=described)
    with pytest.raises(ValueError, match="needs the command oarsub"), execution.open():
        pass


def test_no_more_is_submitted_than_workers_can_take(tmp_path: Path) -> None:
    class Counting(ThreadPoolExecutor):
        inside = most = 0

        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.inside += 1
            self.most = max(self.most, self.inside)
            future = super().submit(fn, *args, **kwargs)
            future.add_done_callback(self._left)
            return future

        def _left(self, future: Future[Any]) -> None:
            self.inside -= 1

    with Counting(1) as executor:
        done = list(run_points(POINTS, Store(tmp_path), Pool(executor, lambda: 1, "", queued=1)))
        assert len(done) == 6
        assert 1 <= executor.most <= 2


def test_what_is_done_when_a_sweep_is_left_is_stored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        runs = run_points(POINTS, store, Pool(executor, lambda: 6, ""))
        next(runs)
        executor.shutdown()  # waits: all six are done now
        runs.close()
    assert missing(POINTS, store) == []


def test_a_lost_scheduler_ends_the_sweep(tmp_path: Path) -> None:
    class Dropping(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_exception(CancelledError())
            return future

    with pytest.raises(WorkersLost, match="scheduler dropped"):
        list(run_points(POINTS, Store(tmp_path), Pool(Dropping(), lambda: 2, "")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "workers must be at least 1; got 0"),
        ({"workers": 1.5}, "workers must be an integer"),
        ({"executor": "mpi"}, "executor must be one of processes, serial, dask"),
        ({"address": "tcp://a:1"}, "address needs executor 'dask'"),
        ({"executor": "dask", "address": "a", "cluster": Path("c")}, "exclude each other"),
    ],
)
def test_what_cannot_be_is_refused(settings: Any, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        Execution(**settings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            'jobs = 3\n[slurm]\ncores = 4\nmemory = "8GB"',
            QueueCluster("slurm", {"cores": 4, "memory": "8GB", "processes": 4}, 3),
        ),
        (
            "minimum = 0\nmaximum = 9\n[pbs]\ncores = 4\nprocesses = 2",
            QueueCluster("pbs", {"cores": 4, "processes": 2}, (0, 9)),
        ),
    ],
)
def test_a_cluster_file_is_read(text: str, expected: QueueCluster, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    assert read_cluster_file(path) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs =", "no TOML file"),
        ("jobs = 3", r"exactly one table of \[slurm\]"),
        ("jobs = 3\nslurm = 1", "exactly one table"),
        ("jobs = 3\n[slurm]\n[pbs]", "exactly one table"),
        ("[slurm]", "must have jobs, or minimum and maximum"),
        ("jobs = 3\nnodes = 2\n[slurm]", "got jobs, nodes"),
        ("jobs = 0\n[slurm]", "jobs must be an integer of at least 1; got 0"),
        ("minimum = 4\nmaximum = 2\n[slurm]", r"minimum must be at most maximum \(2\); got 4"),
    ],
)
def test_a_cluster_file_that_does_not_fit_is_refused(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_cluster_file(path)


# Dask leaves threads behind it that pytest would report, so it runs in processes of its own.

DASK = """
import json, os, signal, sys, time
from dataclasses import replace
from pathlib import Path
from distributed import Client, LocalCluster
import mxsim
from mxsim.executors import dask_pool
from mxsim.store import Store
from mxsim.sweep import Point, missing, run_points

def main():
    cfg = mxsim.ProxyConfig(width=8, depth=2, batch=8, steps=int(sys.argv[2]), eval_samples=16)
    points = [
        Point(replace(cfg, seed=s), mxsim.scheme(n))
        for s in range(12) for n in ("exact", "all_e4m3")
    ]
    store = Store(Path(sys.argv[1]))
    with LocalCluster(n_workers=3, threads_per_worker=1, dashboard_address=None) as cluster:
        with dask_pool(1, cluster.scheduler_address) as pool:
            workers = pool.workers()
            for i, finished in enumerate(run_points(points, store, pool)):
                assert finished.status is not None, finished.error
                if i == 3:  # a worker is killed with runs in progress
                    victim = next(iter(cluster.workers.values())).pid
                    os.kill(victim, signal.SIGKILL)
    print(json.dumps({"workers": workers, "missing": len(missing(points, store))}))

if __name__ == "__main__":
    main()
"""


def run_script(text: str, folder: Path, *arguments: str, **settings: Any) -> str:
    script = folder / "script.py"
    script.write_text(text)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        **settings,
    )
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_a_killed_dask_worker_loses_nothing(tmp_path: Path) -> None:
    assert find_spec("distributed")
    compile_kernels(POINTS)
    said = json.loads(run_script(DASK, tmp_path, str(tmp_path / "results"), "150"))
    assert said == {"workers": 3, "missing": 0}
    point = Point(replace(CONFIG, seed=11, steps=150), mxsim.scheme("all_e4m3"))
    stored = Store(tmp_path / "results").load(point.id)
    run = mxsim.train(point.config, point.scheme)
    assert stored.arrays["losses"].tobytes() == run.losses.astype("float32").tobytes()


# A queueing system in miniature: sbatch starts the job script, scancel stops it.
SBATCH = """#!/bin/sh
cp "$1" "$JOBS/script"
setsid sh "$JOBS/script" >"$JOBS/log" 2>&1 &
echo $! >"$JOBS/pid"
echo "Submitted batch job 1"
"""
SCANCEL = """#!/bin/sh
kill -- -"$(cat "$JOBS/pid")"
"""

SLURM = """
import signal
import sys
from dataclasses import replace
from pathlib import Path
from rich.console import Console
import mxsim
from mxsim.executors import Execution
from mxsim.progress import execute
from mxsim.store import Store
from mxsim.sweep import Point

if __name__ == "__main__":
    cfg = mxsim.ProxyConfig(width=8, depth=2, batch=8, steps=12, eval_samples=16)
    points = [Point(replace(cfg, seed=s), mxsim.scheme("exact")) for s in range(6)]
    execution = Execution(executor="dask", cluster=Path(sys.argv[2]))
    handler = signal.getsignal(signal.SIGINT)
    done = execute(points, Store(Path(sys.argv[1])), execution, Console())
    assert signal.getsignal(signal.SIGINT) is handler
    sys.exit(0 if done else 1)
"""


def test_runs_go_through_a_slurm_queue(tmp_path: Path) -> None:
    assert find_spec("dask_jobqueue")  # not imported here: it would take Ctrl-C for itself
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("sbatch", SBATCH), ("scancel", SCANCEL)):
        (tools / name).write_text(text)
        (tools / name).chmod(stat.S_IRWXU)
    described = tmp_path / "cluster.toml"
    described.write_text(
        'jobs = 1\n[slurm]\ncores = 2\nmemory = "2GB"\nqueue = "short"\nwalltime = "00:10:00"\n'
        'interface = "lo"\n'
    )
    path = f"{tools}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "JOBS": str(tmp_path), "HOME": str(tmp_path)}
    results = tmp_path / "results"
    said = run_script(
        SLURM, tmp_path, str(results), str(described), env=environment, cwd=str(tmp_path)
    )
    assert "6/6 runs" in said
    assert len(list(results.glob("*.npz"))) == 6
    script = (tmp_path / "script").read_text()
    assert "#SBATCH -p short" in script
    assert "--nworkers 2" in script
    assert "--nthreads 1" in script


def test_without_dask_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with (
        pytest.raises(ImportError, match="pip install distributed"),
        Execution(executor="dask").open(),
    ):
        pass
