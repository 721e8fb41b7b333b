"""Boundaries of training: the searches of boundary.py, whose every evaluation is a stored run.

What a search asks for next depends on the outcomes so far alone, so a trace that starts again asks
for the same runs, finds them stored and goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TypeVar

from rich.console import Console

from mxsim.boundary import Search, Threshold, trace
from mxsim.executors import Execution, Pool
from mxsim.grid import FAILURES, state_of
from mxsim.progress import execute, say
from mxsim.store import Store
from mxsim.sweep import Point, load_points

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True)
class Column:
    """One boundary: its search, and the run at a (learning rate, seed)."""

    search: Search
    point: Callable[[float, int], Point]


class Stopped(Exception):
    """A round of runs was not finished."""


def trace_columns(
    columns: Mapping[Key, Column], store: Store, execution: Execution, console: Console
) -> bool:
    """Run all searches to their ends, a round of all columns at a time; False if interrupted.

    A run counts as failed if it diverged or became non-finite.  A run that raises stops the trace.
    """
    rounds = 0
    with ExitStack() as stack:
        pool: Pool | None = None  # opened when there is something to run, and kept

        def evaluate(asked: Sequence[tuple[Key, float, int]]) -> list[bool]:
            nonlocal rounds, pool
            rounds += 1
            points = [columns[key].point(lr, seed) for key, lr, seed in asked]
            with suppress(FileNotFoundError):
                return outcomes(points, store)
            try:
                pool = pool or stack.enter_context(execution.open())
            except (ImportError, OSError, ValueError) as error:
                say(console, str(error), "red")
                raise Stopped from error
            searched = len({key for key, _, _ in asked})
            part = f"boundary of {searched} columns, round {rounds}: "
            if not execute(points, store, pool, console, part):
                raise Stopped
            return outcomes(points, store)

        try:
            trace({key: column.search for key, column in columns.items()}, evaluate)
        except Stopped:  # said why
            return False
    return True


def stored_traces(
    columns: Mapping[Key, Column], store: Store, partial: bool = False
) -> dict[Key, Threshold]:
    """The thresholds of stored searches, found by going through them again.

    Raises FileNotFoundError if a run is missing; with ``partial``, leaves that column out.
    """
    found = {}
    for key, column in columns.items():

        def evaluate(
            asked: Sequence[tuple[Key, float, int]], column: Column = column
        ) -> list[bool]:
            return outcomes([column.point(lr, seed) for _, lr, seed in asked], store)

        try:
            found[key] = trace({key: column.search}, evaluate)[key].threshold
        except FileNotFoundError:
            if not partial:
                raise
    return found


def outcomes(points: Sequence[Point], store: Store) -> list[bool]:
    """Whether each stored run failed; FileNotFoundError if one has no result."""
    records = load_points(points, store)
    return [state_of(records[point.id]) in FAILURES for point in points]
