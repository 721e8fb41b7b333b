"""Running a study's points under a person's eyes: progress bar, Ctrl-C, what is left to do."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from mxsim.estimate import cost_of, in_words
from mxsim.store import Record, Store
from mxsim.sweep import Finished, Point, StoreFailed, compile_kernels, missing, run_points

QUIET_INTERVAL = 30.0  # seconds between lines when the output is not a terminal


def execute(points: Sequence[Point], store: Store, workers: int, console: Console) -> bool:
    """Run the points that are not stored yet; True if afterwards all are.

    Shows a bar on a terminal and a line now and then elsewhere.  Ctrl-C, a run's error, a dead
    worker and a full disk end in a sentence that says what is stored, not in a traceback.
    """
    try:
        for path in store.damaged() if store.folder.exists() else ():
            console.print(
                f"[yellow]{path.name} is damaged or foreign and will be replaced", soft_wrap=True
            )
        todo = missing(points, store)
    except OSError as error:  # not damaged: not to be read now
        console.print(f"[red]{store.folder} cannot be read ({error})", soft_wrap=True)
        return False
    stored = len({point.id for point in points}) - len(todo)
    if stored:
        console.print(f"{stored} runs are stored in {store.folder} already", soft_wrap=True)
    if workers < 1:
        raise ValueError(f"workers must be at least 1; got {workers}")
    if not todo:
        return True
    try:
        store.check_writable()
    except OSError as error:
        console.print(f"[red]{store.folder} does not take results ({error})", soft_wrap=True)
        return False
    console.print(
        f"running {len(todo)} runs on {min(workers, len(todo))} processes", soft_wrap=True
    )
    failed: list[Finished] = []
    ended = None
    try:
        compile_kernels(todo)
        failed = _run(todo, store, min(workers, len(todo)), console)
    except KeyboardInterrupt:
        ended = "interrupted"
    except BrokenProcessPool:
        ended = "a worker process died (out of memory, or killed)"
    except StoreFailed as error:
        ended = str(error)
    left = len(missing(points, store))
    for each in failed[:5]:
        console.print(
            f"[red]run {each.point.id} (lr {each.point.config.lr:g}, seed "
            f"{each.point.config.seed}) raised {each.error}",
            soft_wrap=True,
            highlight=False,
        )
    if ended or left:
        total = len({point.id for point in points})
        console.print(
            f"[yellow]{ended or f'{len(failed)} runs failed'}: {total - left} of {total} runs are "
            f"stored in {store.folder}; start the same command again to go on",
            soft_wrap=True,
        )
    return not ended and not left


def execute_jobs(jobs: Mapping[str, Callable[[], Record]], store: Store, console: Console) -> bool:
    """Do the jobs whose result is not stored yet, one after another; True if afterwards all are.

    For studies whose runs are no ``Point``: a job is named by its result's id and makes the record.
    Ctrl-C and a full disk end in a sentence; what is finished is stored.
    """
    todo = {result: job for result, job in jobs.items() if not store.has(result)}
    if len(todo) < len(jobs):
        console.print(f"{len(jobs) - len(todo)} results are stored in {store.folder} already")
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    done = 0
    try:
        store.check_writable()
        with progress:
            task = progress.add_task("jobs", total=len(todo))
            for job in todo.values():
                store.save(job())
                done += 1
                progress.advance(task)
    except KeyboardInterrupt:
        ended = "interrupted"
    except OSError as error:
        ended = f"{store.folder} does not take results ({error})"
    else:
        return True
    console.print(
        f"[yellow]{ended}: {len(jobs) - len(todo) + done} of {len(jobs)} results are stored in "
        f"{store.folder}; start the same command again to go on",
        soft_wrap=True,
    )
    return False


def describe(points: Sequence[Point], store: Store, workers: int, console: Console) -> None:
    """Say what ``execute`` would run and how long it should take, and run nothing.

    One point of each kind (all but learning rate and seed alike) is timed for a few steps.
    """
    todo = missing(points, store)
    total = len({point.id for point in points})
    costs: dict[object, float] = {}
    seconds = 0.0
    for point in todo:
        kind = (replace(point.config, lr=1.0, seed=0), point.scheme, point.probe)
        if kind not in costs:
            costs[kind] = cost_of(point.config, point.scheme, point.probe).total
        seconds += costs[kind]
    at_once = max(min(workers, len(todo)), 1)
    console.print(
        f"{total} runs, {total - len(todo)} stored in {store.folder}, {len(todo)} to run on "
        f"{at_once} processes: about {in_words(seconds / at_once)}",
        soft_wrap=True,
        highlight=False,
    )


def _run(todo: Sequence[Point], store: Store, workers: int, console: Console) -> list[Finished]:
    """Run the points, showing progress; returns those that raised."""
    failed: list[Finished] = []
    statuses: Counter[str] = Counter()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("{task.fields[statuses]}"),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=600,
    )
    started = said = time.monotonic()
    with progress:
        task = progress.add_task("runs", total=len(todo), statuses="")
        for finished in run_points(todo, store, workers):
            statuses[finished.status or "failed"] += 1
            if finished.error:
                failed.append(finished)
            text = ", ".join(f"{count} {status}" for status, count in sorted(statuses.items()))
            progress.update(task, advance=1, statuses=text)
            now, done = time.monotonic(), statuses.total()
            if not console.is_terminal and (now - said > QUIET_INTERVAL or done == len(todo)):
                said = now
                left = (now - started) / done * (len(todo) - done)
                console.print(
                    f"{done}/{len(todo)} runs, {now - started:.0f} s, {left:.0f} s left: {text}"
                )
    return failed
