"""Where runs are computed: this process, processes of this machine, or a Dask cluster.

``mxsim.sweep.run_points`` takes anything with the interface of ``concurrent.futures.Executor``;
here are the three that a study's command line offers, each a context that yields a ``Pool``.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mxsim.formats import choose
from mxsim.layout import as_integer

Kind = Literal["processes", "serial", "dask"]
KINDS: tuple[Kind, ...] = ("processes", "serial", "dask")

# dask-jobqueue's class for each table that a cluster file may have.
QUEUES = {  # and the command that submits a job
    "slurm": ("SLURMCluster", "sbatch"),
    "pbs": ("PBSCluster", "qsub"),
    "sge": ("SGECluster", "qsub"),
    "lsf": ("LSFCluster", "bsub"),
    "oar": ("OARCluster", "oarsub"),
    "htcondor": ("HTCondorCluster", "condor_submit"),
}


@dataclass(frozen=True)
class Execution:
    """How a study's runs are executed; no result depends on it.

    Raises ValueError or TypeError naming the field, its value and what is allowed.
    """

    workers: int = os.cpu_count() or 1
    """Processes, one BLAS thread each (a Dask cluster given by address or file has its own)."""
    executor: Kind = "processes"
    """processes of this machine; serial: in this process; dask: needs distributed."""
    address: str | None = None
    """Dask scheduler to use, as in tcp://host:8786."""
    cluster: Path | None = None
    """TOML file that describes a Dask cluster on Slurm (docs/sweeps.md, On a cluster)."""

    def __post_init__(self) -> None:
        choose("executor", self.executor, KINDS)
        if as_integer("workers", self.workers, "an integer of at least 1") < 1:
            raise ValueError(f"workers must be at least 1; got {self.workers}")
        for name in ("address", "cluster"):
            if getattr(self, name) is not None and self.executor != "dask":
                raise ValueError(
                    f"{name} needs executor 'dask'; got {getattr(self, name)} with "
                    f"{self.executor!r}"
                )
        if self.address is not None and self.cluster is not None:
            raise ValueError(
                f"address and cluster exclude each other; got {self.address} and {self.cluster}"
            )

    def open(self) -> Any:
        """A context manager that yields the ``Pool``."""
        if self.executor == "serial" or (self.executor == "processes" and self.workers == 1):
            return serial_pool()
        if self.executor == "processes":
            return process_pool(self.workers)
        return dask_pool(self.workers, self.address, self.cluster)


@dataclass(frozen=True)
class Pool:
    """An executor and how many runs it computes at once (asked again, since clusters grow)."""

    executor: Executor
    workers: Callable[[], int]
    words: str  # "2 processes"
    queued: int = 2  # runs submitted beyond them, so that none idles while a result is stored


class SerialExecutor(Executor):
    """Calls at once, in this process; Ctrl-C is the caller's."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


SERIAL = Pool(SerialExecutor(), lambda: 1, "1 process", queued=0)


@contextmanager
def serial_pool() -> Iterator[Pool]:
    """This process."""
    yield SERIAL


@contextmanager
def process_pool(workers: int) -> Iterator[Pool]:
    """Spawned processes, which end with this one; left early, their runs are abandoned."""
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(os.getpid(),),
    )
    try:
        yield Pool(pool, lambda: workers, f"{workers} processes")
        pool.shutdown()
    except BaseException:
        processes = list((pool._processes or {}).values())
        manager: Any = pool._executor_manager_thread
        pool.shutdown(wait=False, cancel_futures=True)
        _forget_cancelled(pool)
        for process in processes:
            with suppress(Exception):
                process.terminate()
        for process in processes:
            with suppress(Exception):
                process.join(5.0)
        if manager is not None:  # it closes a pipe that the interpreter, if it ended now, writes to
            manager.join(5.0)
        raise


def _forget_cancelled(pool: ProcessPoolExecutor) -> None:
    """Wait until the pool's own thread has dropped its cancelled futures.

    When its processes end it gives an error to all futures that it still has; a cancelled one takes
    none (InvalidStateError), and the thread dies of it with a traceback.
    """
    patience = time.monotonic() + 1.0
    while time.monotonic() < patience:
        items = list((pool._pending_work_items or {}).values())
        if not any(item.future.cancelled() for item in items):
            return
        time.sleep(0.01)


def _start_worker(parent: int) -> None:
    """Leave Ctrl-C to the parent, and end with it even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def dask_pool(
    workers: int, address: str | None = None, cluster: Path | None = None
) -> Iterator[Pool]:
    """A Dask cluster: running at ``address``, started by a ``cluster`` file, or on this machine.

    Runs of a worker that dies are given to another one (Dask gives up on a run that killed several
    workers; it is then reported as failed).
    Raises ImportError if Dask is not installed, ValueError for a file that does not fit, OSError
    if the scheduler does not answer.
    """
    try:
        from distributed import Client, LocalCluster
    except ImportError as error:
        raise ImportError("executor 'dask' needs distributed: pip install distributed") from error
    own: Any = None
    if cluster is not None:
        own = queue_cluster(read_cluster_file(cluster))
    elif address is None:
        own = LocalCluster(n_workers=workers, threads_per_worker=1, dashboard_address=None)
    try:
        client = Client(address if own is None else own)
        try:
            where = address or (f"Dask, {cluster}" if cluster else f"{workers} Dask workers")
            yield Pool(
                client.get_executor(pure=False),
                lambda: sum(client.nthreads().values()),
                where,
            )
        finally:
            with suppress(Exception):
                client.close()
    finally:
        if own is not None:
            own.close()


@dataclass(frozen=True)
class QueueCluster:
    """A cluster file's content: the queueing system, its arguments, and how many jobs."""

    queue: str
    arguments: Mapping[str, Any]
    jobs: int | tuple[int, int]  # as many, or between (minimum, maximum) as work demands


def read_cluster_file(path: Path) -> QueueCluster:
    """Read a cluster file: ``jobs``, or ``minimum`` and ``maximum``, and one table [slurm].

    The table's entries are the arguments of dask_jobqueue's cluster class; ``processes`` defaults
    to ``cores``, since a run uses one thread.  [pbs], [sge], [lsf], [oar] and [htcondor] go
    likewise.  Raises ValueError, naming the file, for what does not fit; OSError.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no TOML file ({error})") from error
    queues = [name for name in content if name in QUEUES]
    if len(queues) != 1 or not isinstance(content[queues[0]], dict):
        raise ValueError(
            f"{path} must have exactly one table of {', '.join(f'[{q}]' for q in QUEUES)}; got "
            f"{', '.join(content) or 'nothing'}"
        )
    [queue] = queues
    counts = {name: value for name, value in content.items() if name != queue}
    if set(counts) not in ({"jobs"}, {"minimum", "maximum"}):
        raise ValueError(
            f"{path} must have jobs, or minimum and maximum, beside [{queue}]; got "
            f"{', '.join(counts) or 'none of them'}"
        )
    for name, value in counts.items():
        least = 0 if name == "minimum" else 1
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{path}: {name} must be an integer of at least {least}; got {value}")
    arguments = dict(content[queue])
    if "cores" in arguments:
        arguments.setdefault("processes", arguments["cores"])
    if "jobs" in counts:
        return QueueCluster(queue, arguments, counts["jobs"])
    if counts["minimum"] > counts["maximum"]:
        raise ValueError(
            f"{path}: minimum must be at most maximum ({counts['maximum']}); got "
            f"{counts['minimum']}"
        )
    return QueueCluster(queue, arguments, (counts["minimum"], counts["maximum"]))


def queue_cluster(described: QueueCluster) -> Any:
    """Start the cluster: a scheduler here, workers as jobs of the queueing system."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        import dask_jobqueue
    except ImportError as error:
        raise ImportError(
            "a cluster file needs dask-jobqueue: pip install dask-jobqueue"
        ) from error
    finally:  # its import takes Ctrl-C for itself (0.9: runner.py ends the process)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)
    name, submits = QUEUES[described.queue]
    if shutil.which(submits) is None:
        raise ValueError(
            f"[{described.queue}] needs the command {submits}, which is not found here"
        )
    try:
        made = getattr(dask_jobqueue, name)(**described.arguments)
    except Exception as error:  # whatever its many settings lead to
        raise ValueError(f"{name} does not take {dict(described.arguments)}: {error}") from error
    if isinstance(described.jobs, int):
        made.scale(jobs=described.jobs)
    else:
        least, most = described.jobs
        made.adapt(minimum_jobs=least, maximum_jobs=most)
    return made
