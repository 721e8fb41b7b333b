"""Many runs: points, execution on an executor, resuming.

A point is everything that determines a run.  Each result is stored as soon as it is there, so that
an interrupted study loses at most the runs in progress.  Executors are in executors.py.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    wait,
)
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mxsim.bias import PROBE_GROUPS, ProbePlan
from mxsim.config import ProxyConfig
from mxsim.executors import SERIAL, Pool
from mxsim.outcome import DivergenceRule
from mxsim.precision import PrecisionScheme
from mxsim.store import DamagedResult, Record, Store, provenance, result_id
from mxsim.train import Run, train

WORKER_DIED = "a worker process died (out of memory, or killed)"
PROBE_ARRAYS = ("zeta", "cos", "alpha", "rho", "norm", "gamma_saturated", "gamma_mean")


@dataclass(frozen=True)
class Point:
    """One run of a study.  ``id`` hashes all of it; seeds lie in the config, never in the order."""

    config: ProxyConfig
    scheme: PrecisionScheme
    probe: ProbePlan | None = None
    rule: DivergenceRule = DivergenceRule()  # noqa: RUF009  (frozen)

    @cached_property
    def id(self) -> str:
        return result_id(self)

    @property
    def words(self) -> str:
        return f"lr {self.config.lr:g}, seed {self.config.seed}"

    def settings(self) -> dict[str, Any]:
        """What determines the run, as plain JSON data."""
        return {
            "config": dataclasses.asdict(self.config),
            "scheme": dataclasses.asdict(self.scheme),
            "rule": dataclasses.asdict(self.rule),
            "probe": None if self.probe is None else dataclasses.asdict(self.probe),
        }

    def run(self) -> Record:
        """Run it and make its record: float32 series, probes, and metadata."""
        run = train(self.config, self.scheme, probe=self.probe, rule=self.rule)
        return record_of(self, run)


class Task(Protocol):
    """What can be run, stored and found again: a Point, or what a study defines in its place.

    It is a value that can be pickled; ``run`` is a pure function of it.
    """

    @property
    def id(self) -> str: ...

    @property
    def words(self) -> str:
        """A few words for people: what it is."""

    def settings(self) -> dict[str, Any]:
        """What determines it, as plain JSON data: stored if it raises."""

    def run(self) -> Record:
        """Compute its record, which has a ``status`` in its metadata."""


@dataclass(frozen=True)
class Job:
    """A Task for a study whose runs are no Points: a value, and what makes a record of it.

    what: a dataclass, whose id the record has.  make: a module's own function, so that a worker can
    be sent it.  words: see Task.
    """

    what: Any
    make: Callable[[Any], Record]
    words: str

    @cached_property
    def id(self) -> str:
        return result_id(self.what)

    def settings(self) -> dict[str, Any]:
        """What determines it, as plain JSON data."""
        return dataclasses.asdict(self.what)

    def run(self) -> Record:
        """The record; its status is "ok" unless it says another."""
        record = self.make(self.what)
        return dataclasses.replace(record, meta={"status": "ok", **record.meta})


TaskT = TypeVar("TaskT", bound=Task)


def run_task(task: Task) -> Record:
    """``task.run()``, as a function that a worker can be sent."""
    return task.run()


def record_of(point: Point, run: Run) -> Record:
    """The record of a finished run."""
    return Record(point.id, _arrays(run), _meta(point, run))


def failure_of(task: Task, error: Exception) -> Record:
    """The record of a run that raised: status ``failed``; a study started again tries it again."""
    message = f"{type(error).__name__}: {error}"
    meta = {**task.settings(), "versions": dict(provenance()), "status": "failed", "error": message}
    return Record(task.id, {}, meta)


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
        **point.settings(),
        "versions": dict(provenance()),
        "probe_labels": None if run.probes is None else list(run.probes.labels),
        "probe_groups": list(PROBE_GROUPS),
        **dataclasses.asdict(run.outcome),
        "eval_loss": run.eval_loss,
        "zero_loss": run.zero_loss,
        "input_power": run.input_power,
        "seconds": run.seconds,
        "probe_seconds": run.probe_seconds,
    }


class StoreFailed(Exception):
    """A result could not be written: the rest of a study would be lost as well."""


class WorkersLost(Exception):
    """The executor can compute no more: a worker process died, or the scheduler is gone."""


@dataclass(frozen=True)
class Finished(Generic[TaskT]):
    """What became of one point: ``status`` of its run, or the ``error`` that kept it from one."""

    point: TaskT
    status: str | None
    error: str | None = None


@dataclass(frozen=True)
class Survey(Generic[TaskT]):
    """What of some points is stored: ``missing`` ones in order, files that are ``damaged``."""

    missing: tuple[TaskT, ...]  # or stored as failed: they are tried again
    stored: int
    damaged: tuple[Path, ...]


def survey(points: Sequence[TaskT], store: Store) -> Survey[TaskT]:
    """Read what is stored of the points, once; duplicates are dropped.

    A damaged or foreign file counts as missing; the run that replaces it overwrites it.
    """
    unique = {point.id: point for point in points}
    absent, damaged = [], []
    for result, point in unique.items():
        try:
            found = _load(result, store)
        except DamagedResult:
            found = None
            damaged.append(store.path(result))
        if found is None:
            absent.append(point)
    return Survey(tuple(absent), len(unique) - len(absent), tuple(damaged))


def _load(result: str, store: Store) -> Record | None:
    """A stored record; None if there is none, or one that only says that its run failed.

    Raises DamagedResult, and OSError where the folder cannot be read.
    """
    try:
        record = store.load(result)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return None if record.meta.get("status") == "failed" else record


def missing(points: Sequence[TaskT], store: Store) -> list[TaskT]:
    """The points without a whole stored result, in order, duplicates dropped."""
    return list(survey(points, store).missing)


def compile_kernels(points: Sequence[Task]) -> None:
    """Compile (or load from the cache) what the points need, on toy runs in this process.

    Workers then load the cache instead of compiling the same kernels each.  Other tasks are passed
    over.
    """
    seen = set()
    for point in points:
        if not isinstance(point, Point):
            continue
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


def run_points(
    points: Sequence[TaskT], store: Store, pool: Pool | Executor = SERIAL
) -> Generator[Finished[TaskT], None, None]:
    """Run the points, each stored as it finishes; yields in order of completion.

    pool: an executor, alone or with the number of its workers; default this process.  Workers
    only compute; this process stores, so they need not share its file system.  Closing the
    iterator, or leaving it by Ctrl-C, abandons the runs in progress; what has been yielded is
    stored.
    A run that raises is yielded, and stored, with its error, and the others go on.
    Raises StoreFailed if the folder takes no more results, WorkersLost if the executor is broken.
    """
    if isinstance(pool, Executor):
        workers = int(getattr(pool, "_max_workers", os.cpu_count() or 1))
        pool = Pool(pool, lambda: workers, type(pool).__name__)
    pending: dict[Future[Record], TaskT] = {}
    queue = iter(points)
    try:
        while True:
            room = pool.workers() + pool.queued - len(pending)
            for point in islice(queue, max(room, 0 if pending else 1)):
                pending[pool.executor.submit(run_task, point)] = point
            if not pending:
                return
            done, _ = wait(pending, return_when=FIRST_COMPLETED)
            for future in done:
                yield _finish(pending[future], future, store)
                del pending[future]
    except BrokenExecutor as error:  # submitting, too, finds a worker dead
        words = ", ".join(f"{task.id} ({task.words})" for task in pending.values())
        raise WorkersLost(f"{WORKER_DIED}, with these runs under way: {words}") from error
    finally:
        for future in pending:  # what is done is not thrown away
            if not future.cancel() and future.done() and not future.exception():
                with suppress(OSError):
                    store.save(future.result())


def _finish(point: TaskT, future: Future[Record], store: Store) -> Finished[TaskT]:
    try:
        record = future.result()
    except BrokenExecutor:
        raise
    except CancelledError as error:  # not by this process: by a scheduler that closed
        raise WorkersLost("the scheduler dropped the runs in progress") from error
    except Exception as error:
        record = failure_of(point, error)
    try:
        store.save(record)
    except OSError as error:
        raise StoreFailed(f"{store.folder} does not take results ({error})") from error
    status, message = str(record.meta["status"]), record.meta.get("error")
    return Finished(point, None if message else status, message)


def load_points(points: Sequence[Task], store: Store) -> dict[str, Record]:
    """The records of all points by id; raises FileNotFoundError naming how many are missing."""
    records, absent = {}, []
    for point in points:
        try:
            found = _load(point.id, store)
        except DamagedResult:
            found = None
        if found is None:
            absent.append(point.id)
        else:
            records[point.id] = found
    if absent:
        raise FileNotFoundError(
            f"{len(absent)} of {len(points)} results are missing in {store.folder}, "
            f"the first {absent[0]}"
        )
    return records
