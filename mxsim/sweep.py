"""Many runs: points, execution on several processes, resuming.

A point is everything that determines a run.  Its result is stored by the process that ran it, so
that an interrupted study loses at most the runs in progress.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from mxsim.bias import PROBE_GROUPS, ProbePlan
from mxsim.config import ProxyConfig
from mxsim.outcome import DivergenceRule
from mxsim.precision import PrecisionScheme
from mxsim.store import DamagedResult, Record, Store, provenance, result_id
from mxsim.train import Run, train

PROBE_ARRAYS = ("zeta", "cos", "alpha", "rho", "norm", "gamma_saturated", "gamma_mean")


@dataclass(frozen=True)
class Point:
    """One run of a study.  ``id`` hashes all of it; seeds lie in the config, never in the order."""

    config: ProxyConfig
    scheme: PrecisionScheme
    probe: ProbePlan | None = None
    rule: DivergenceRule = DivergenceRule()  # noqa: RUF009  (frozen)

    @property
    def id(self) -> str:
        return result_id(self)


def run_point(point: Point) -> Record:
    """Run one point and make its record: float32 series, probes, and metadata."""
    return record_of(point, train(point.config, point.scheme, probe=point.probe, rule=point.rule))


def record_of(point: Point, run: Run) -> Record:
    """The record of a finished run."""
    return Record(point.id, _arrays(run), _meta(point, run))


def _arrays(run: Run) -> dict[str, Any]:
    arrays: dict[str, Any] = {"losses": run.losses, "grad_norms": run.grad_norms}
    if run.probes is not None:
        arrays |= {f"probe_{name}": getattr(run.probes, name) for name in PROBE_ARRAYS}
    with np.errstate(over="ignore"):  # a loss beyond float32 is stored as Inf
        arrays = {name: np.asarray(a, np.float32) for name, a in arrays.items()}
    if run.probes is not None:
        arrays["probe_steps"] = run.probes.steps
    return arrays


def _meta(point: Point, run: Run) -> dict[str, Any]:
    return {
        "config": dataclasses.asdict(point.config),
        "scheme": dataclasses.asdict(point.scheme),
        "rule": dataclasses.asdict(point.rule),
        "probe": None if point.probe is None else dataclasses.asdict(point.probe),
        "probe_labels": None if run.probes is None else list(run.probes.labels),
        "probe_groups": list(PROBE_GROUPS),
        **dataclasses.asdict(run.outcome),
        "eval_loss": run.eval_loss,
        "zero_loss": run.zero_loss,
        "input_power": run.input_power,
        "seconds": run.seconds,
        "probe_seconds": run.probe_seconds,
        "versions": dict(provenance()),
    }


class StoreFailed(Exception):
    """A result could not be written: the rest of a study would be lost as well."""


def _run_and_store(point: Point, store: Store) -> str:
    record = run_point(point)
    try:
        store.save(record)
    except OSError as error:
        raise StoreFailed(f"{store.folder} does not take results ({error})") from error
    return str(record.meta["status"])


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end with it even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@dataclass(frozen=True)
class Finished:
    """What became of one point: ``status`` of its run, or the ``error`` that kept it from one."""

    point: Point
    status: str | None
    error: str | None = None


def missing(points: Sequence[Point], store: Store) -> list[Point]:
    """The points without a whole stored result, in order, duplicates dropped.

    A damaged file counts as missing; the run that replaces it overwrites it.
    """
    unique = {point.id: point for point in points}
    return [point for result, point in unique.items() if not store.has(result)]


def compile_kernels(points: Sequence[Point]) -> None:
    """Compile (or load from the cache) what the points need, on toy runs in this process.

    Workers then load the cache instead of compiling the same kernels each.
    """
    seen = set()
    for point in points:
        small = dataclasses.replace(
            point.config,
            width=8,
            depth=2,
            batch=4,
            steps=2,
            eval_samples=4,
            teacher_width=None,
            dataset_size=None,
        )
        scheme = dataclasses.replace(point.scheme, overrides=())
        key = (small.activation, small.dtype, small.optimizer, scheme)
        if key not in seen:
            seen.add(key)
            train(dataclasses.replace(small, seed=0), scheme, probe=point.probe)


def run_points(points: Sequence[Point], store: Store, workers: int = 1) -> Iterator[Finished]:
    """Run the points, each stored as it finishes; yields in order of completion.

    workers: processes, one BLAS thread each; 1 runs in this process.  Closing the iterator (or
    Ctrl-C) abandons the runs in progress; what has been yielded is stored.
    A run that raises is yielded with its error, and the others go on.  A worker that dies ends the
    iteration with BrokenProcessPool, a folder that takes no more results with StoreFailed.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1; got {workers}")
    if workers == 1:
        for point in points:
            yield _finish(point, lambda point=point: _run_and_store(point, store))  # type: ignore[misc]
        return
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(os.getpid(),),
    )
    pending: dict[Future[str], Point] = {}
    queue = iter(points)
    try:
        while True:
            for point in queue:  # no more in flight than workers: nothing waits half-claimed
                pending[pool.submit(_run_and_store, point, store)] = point
                if len(pending) >= workers + 1:
                    break
            if not pending:
                break
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield _finish(pending.pop(future), future.result)
        pool.shutdown()
    except BaseException:
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            with suppress(Exception):
                process.terminate()
        for process in processes:  # none may store a result after this returns
            with suppress(Exception):
                process.join(5.0)
        raise


def _finish(point: Point, result: Callable[[], str]) -> Finished:
    try:
        return Finished(point, result())
    except (BrokenProcessPool, StoreFailed):
        raise
    except Exception as error:
        return Finished(point, None, f"{type(error).__name__}: {error}")


def load_points(points: Sequence[Point], store: Store) -> dict[str, Record]:
    """The records of all points by id; raises FileNotFoundError naming how many are missing."""
    records, absent = {}, []
    for point in points:
        try:
            records[point.id] = store.load(point.id)
        except (FileNotFoundError, DamagedResult):
            absent.append(point.id)
    if absent:
        raise FileNotFoundError(
            f"{len(absent)} of {len(points)} results are missing in {store.folder}, "
            f"the first {absent[0]}"
        )
    return records
