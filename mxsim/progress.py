"""Running a study's points under a person's eyes: progress bar, Ctrl-C, what is left to do."""

from __future__ import annotations

import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from types import FrameType

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from mxsim.estimate import cost_of, in_words
from mxsim.executors import Execution, Pool
from mxsim.store import Store
from mxsim.sweep import (
    Finished,
    Point,
    StoreFailed,
    Survey,
    Task,
    WorkersLost,
    compile_kernels,
    run_points,
    survey,
)

QUIET_INTERVAL = 30.0  # seconds between lines when the output is not a terminal


def execute(
    points: Sequence[Task],
    store: Store,
    execution: Execution | Pool,
    console: Console,
    part: str = "",
) -> bool:
    """Run the points that are not stored yet; True if afterwards all are.

    execution: how; a Pool is used as it is and left open.  part: what of a larger whole this is.
    Shows a bar on a terminal and a line now and then elsewhere.  Ctrl-C, SIGTERM, a run's error, a
    dead worker and a full disk end in a sentence that says what is stored and how to go on, not in
    a traceback.
    """
    found = _look(points, store, console, quiet=bool(part))
    if found is None:
        return False
    if not found.missing:
        return True
    try:
        store.check_writable()
    except OSError as error:
        say(console, f"{store.folder} does not take results ({error})", "red")
        return False
    failed: list[Finished[Task]] = []
    done, ended = 0, None
    try:
        with ExitStack() as stack:  # left by an exception, it abandons what is running
            stack.enter_context(terminable())
            if isinstance(execution, Pool):
                pool = execution
            else:
                try:
                    pool = stack.enter_context(execution.open())
                except (ImportError, OSError, ValueError) as error:
                    say(console, str(error), "red")
                    return False
            say(console, f"{part}running {len(found.missing)} runs on {pool.words}")
            compile_kernels(found.missing)
            # Closed before anything is counted: on its way out it stores what is done.
            with closing(_watched(found.missing, store, pool, console)) as finished:
                for each in finished:
                    if each.error:
                        failed.append(each)
                    else:
                        done += 1
    except KeyboardInterrupt:
        ended = "interrupted"
    except (WorkersLost, StoreFailed, OSError) as error:  # OSError: a scheduler gone
        ended = str(error) or type(error).__name__
    for each in failed[:5]:
        say(console, f"run {each.point.id} ({each.point.words}) raised {each.error}", "red")
    if ended or failed:
        stored = survey(points, store).stored if ended else found.stored + done
        of = "this round's " if part else ""
        say(
            console,
            f"{ended or f'{len(failed)} runs failed'}: {stored} of {of}"
            f"{found.stored + len(found.missing)} runs are stored in {store.folder}; to go on: "
            f"{this_command()}",
            "yellow",
        )
    return not ended and not failed


def say(console: Console, text: str, style: str = "") -> None:
    """Print a line as it is: brackets in it are no markup, and it is not wrapped."""
    console.print(Text(text, style=style), soft_wrap=True)


def _look(
    points: Sequence[Task], store: Store, console: Console, quiet: bool = False
) -> Survey[Task] | None:
    """What is stored; said, damaged files by name.  None if the folder cannot be read."""
    try:
        found = survey(points, store)
    except OSError as error:  # not damaged: not to be read now
        say(console, f"{store.folder} cannot be read ({error})", "red")
        return None
    for path in found.damaged:
        say(console, f"{path.name} is damaged or foreign and will be replaced", "yellow")
    if found.stored and not quiet:
        say(console, f"{found.stored} runs are stored in {store.folder} already")
    return found


def _watched(
    todo: Sequence[Task], store: Store, pool: Pool, console: Console
) -> Generator[Finished[Task], None, None]:
    """Run the points, showing progress."""
    statuses: Counter[str] = Counter()
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False),
        TextColumn("{task.fields[text]}"),
        console=console,
        disable=not console.is_terminal,
        speed_estimate_period=600,
    )
    started = said = time.monotonic()
    with progress, closing(run_points(todo, store, pool)) as runs:
        first = min(pool.workers(), len(todo))
        task = progress.add_task("runs", total=len(todo), text=f"{first} running")
        for finished in runs:
            statuses[finished.status or "failed"] += 1
            now, done = time.monotonic(), statuses.total()
            rate = done / max(now - started, 1e-9)
            running = min(pool.workers(), len(todo) - done)
            parts = [f"{running} running"] * bool(running)
            parts += [f"{count} {status}" for status, count in sorted(statuses.items())]
            parts.append(f"{60 * rate:.3g}/min")
            progress.update(task, advance=1, text=", ".join(parts))
            if not console.is_terminal and (now - said > QUIET_INTERVAL or done == len(todo)):
                said = now
                console.print(
                    f"{done}/{len(todo)} runs, {now - started:.0f} s, "
                    f"{(len(todo) - done) / rate:.0f} s left: {', '.join(parts)}"
                )
            yield finished


def describe(points: Sequence[Point], store: Store, execution: Execution, console: Console) -> None:
    """Say what ``execute`` would run and how long it should take, and run nothing.

    One point of each kind (all but learning rate and seed alike) is timed for a few steps.
    """
    found = survey(points, store)
    costs: dict[object, float] = {}
    seconds = 0.0
    for point in found.missing:
        kind = (replace(point.config, lr=1.0, seed=0), point.scheme, point.probe)
        if kind not in costs:
            costs[kind] = cost_of(point.config, point.scheme, point.probe).total
        seconds += costs[kind]
    todo = len(found.missing)
    theirs = execution.address is not None or execution.cluster is not None
    at_once = max(min(1 if execution.executor == "serial" else execution.workers, todo), 1)
    how = "one worker of the cluster" if theirs else f"{at_once} processes"
    say(
        console,
        f"{found.stored + todo} runs, {found.stored} stored in {store.folder}, {todo} to run on "
        f"{how}: about {in_words(seconds if theirs else seconds / at_once)}",
    )


def this_command() -> str:
    """The command line of this process, to be started again."""
    return shlex.join(sys.orig_argv)


@contextmanager
def terminable() -> Iterator[None]:
    """Take SIGTERM (a queueing system's notice, say) for Ctrl-C within the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
