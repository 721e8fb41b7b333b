"""Stored runs as a table for people: the settings that differ and what came out, a run a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxsim.results import Results

_OUTCOMES = ("status", "first_bad_step", "spikes", "eval_loss", "seconds")
_STYLES = {"diverged": "yellow", "nonfinite": "red"}


def show_results(
    stored: Results,
    where: Sequence[str],
    columns: Sequence[str],
    sort: Sequence[str],
    files: Mapping[str, Path | None],
    console: Console,
) -> None:
    """Print the runs that meet the conditions, and write them.

    columns: what to show and write; by default shown are the settings that differ and what came
    out, written all fields.  files: "csv" and "parquet", None for none.  Raises ValueError for a
    field that no run has.
    """
    stored.check_fields("columns", columns)
    results = stored.where(where)
    varying = stored.varying  # of the whole study: what is filtered by stays in sight
    results = results.sorted(sort or varying)
    written = columns or None
    if not columns:
        # A probe does not change its run: in the way, unless nothing else tells runs apart.
        columns = [name for name in varying if not name.startswith("probe.")]
        if len({tuple(map(row.get, columns)) for row in results.records}) < len(results.records):
            columns = list(varying)
        columns += [name for name in _OUTCOMES if name in results.fields]
    wide = console if console.is_terminal else Console(width=100)
    if results.records or not where:
        wide = _print_runs(results, columns or ["id"], console)
    else:
        wide.print(f"no run meets {' and '.join(where)}", markup=False, soft_wrap=True)
    total = f"{len(results.records)} of {len(stored.records)}" if where else len(results.records)
    counts = Counter(str(row.get("status", "without status")) for row in results.records)
    by_status = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    wide.print(f"runs: {total}" + (f"; {by_status}" if counts else ""), soft_wrap=True)
    if results.damaged:
        wide.print(f"[red]files that cannot be read: {len(results.damaged)}", soft_wrap=True)
        for _, reason in results.damaged:
            wide.print(f"- {reason}", markup=False, highlight=False, soft_wrap=True)
    for kind, write in (("csv", results.to_csv), ("parquet", results.to_parquet)):
        path = files[kind]
        if path is not None:
            wide.print(f"written: {write(path, written)}", markup=False, soft_wrap=True)


def _print_runs(results: Results, columns: Sequence[str], console: Console) -> Console:
    """Print the runs; the console of the width that it took."""
    lines = [
        (
            _STYLES.get(str(row.get("status"))) if console.is_terminal else None,
            [_cell(row.get(name), name in results.settings) for name in columns],
        )
        for row in results.records
    ]
    headings = [name.replace(".", ".\n") for name in columns]
    widths = [
        max(map(cell_len, (*heading.split("\n"), *cells)))
        for heading, *cells in zip(headings, *(cells for _, cells in lines), strict=True)
    ]
    needed = sum(widths) + 3 * len(widths) + 1
    # A terminal gets what fits it, a file or a pipe whole lines.
    wide = console if console.is_terminal else Console(width=max(needed, 100))
    fits = needed <= wide.width
    table = Table()
    for name, heading, width in zip(columns, headings, widths, strict=True):
        numbers = all(not isinstance(row.get(name), str) for row in results.records)
        table.add_column(
            Text(heading),
            justify="right" if numbers else "left",
            overflow="fold",
            width=width if fits else None,  # else rich narrows the widest ones
        )
    if fits:  # each run is one line: many in one row of the table take rich a third of the time
        lines = [
            (style, ["\n".join(column) for column in zip(*(c for _, c in group), strict=True)])
            for style, group in groupby(lines, key=itemgetter(0))
        ]
    for style, cells in lines:
        table.add_row(*map(Text, cells), style=style)
    wide.print(table)
    return wide


def _cell(value: object, exact: bool) -> str:
    """A value on one line; ``exact``: as it can be asked for."""
    if value is None:
        return "-"
    short = isinstance(value, float) and not exact
    return f"{value:.4g}" if short else " ".join(str(value).splitlines())
