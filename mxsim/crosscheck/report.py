"""The matrix for people (a terminal, Markdown) and for programs (JSON)."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mxsim.crosscheck.case import FORMATS, OWN, ROUNDINGS, RULES, Case
from mxsim.crosscheck.matrix import LISTED, Cell, Difference, Example, Matrix

LEGEND = (
    "A cell is a number of cases: 60 agree bit for bit; 50+10: ten differ for a known reason; "
    "!3: three differ without one; -: cannot run. Formats with a rule of their own are "
    "under floor."
)
_SHORT = ("even", "away", "zero", "sto")

Rows = list[tuple[str, list[list[str]]]]  # format; a list of four texts, one a rounding, each rule


def rows_of(matrix: Matrix, backend: str) -> Rows:
    """A line for each format of which the backend ran anything."""
    rows: Rows = []
    for fmt in FORMATS:
        cells = {
            (rule, rounding): matrix.cells.get((backend, (fmt, rule, rounding)))
            for rule in (*RULES, OWN)
            for rounding in ROUNDINGS
        }
        if any(cells.values()):
            rules = (OWN,) if any(cells[OWN, rounding] for rounding in ROUNDINGS) else RULES
            texts = [[_text(cells[rule, rounding]) for rounding in ROUNDINGS] for rule in rules]
            rows.append((fmt, texts + [[""] * len(ROUNDINGS)] * (len(RULES) - len(rules))))
    return rows


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    if cell.failed:
        return f"!{cell.failed}"
    return f"{cell.passed}+{cell.known}" if cell.known else str(cell.passed)


def cannot_run(matrix: Matrix, backend: str) -> list[str]:
    """Each reason for which configs were not run, the most frequent first."""
    reasons: Counter[str] = Counter()
    for (_, reason), count in matrix.cannot[backend].items():
        reasons[reason] += count
    return [f"{reason} ({count:,} configs)" for reason, count in reasons.most_common()]


def print_matrix(matrix: Matrix, console: Console) -> None:
    """To a console of 100 columns or more."""
    for backend in matrix.backends:
        console.print(_table(f"{backend.name} {backend.version}", rows_of(matrix, backend.name)))
        reasons = cannot_run(matrix, backend.name)
        if reasons:
            console.print(f"not run: {'; '.join(reasons)}", markup=False, highlight=False)
        console.print()
    for name, reason in matrix.missing.items():
        console.print(f"{name}: not there ({reason})", markup=False, highlight=False)
    console.print(f"\n{LEGEND}\n", markup=False, highlight=False)
    for difference in matrix.known:
        lines = _known_lines(difference)
        console.print("\n  ".join(lines), markup=False, highlight=False, soft_wrap=True)
    for entry in matrix.stale:
        console.print(
            f"stale: {entry.backend}, {entry.name}: no case shows it any more",
            style="yellow",
            markup=False,
        )
    for difference in matrix.unexplained[:LISTED]:
        lines = [f"UNEXPLAINED: {difference.backend}", *_example_lines(difference.examples[0])]
        console.print("\n  ".join(lines), style="red", markup=False, highlight=False)
    left = len(matrix.unexplained) - LISTED
    if left > 0:
        console.print(f"... and {left} more", style="red")


def _table(title: str, rows: Rows) -> Table:
    """A column a rule, in it the four roundings beside each other."""
    table = Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("", no_wrap=True)
    groups = []
    for rule, name in enumerate(RULES):
        lines = [list(_SHORT), *(texts[rule] for _, texts in rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        head, *group = (
            " ".join(text.rjust(width) for text, width in zip(line, widths, strict=True))
            for line in lines
        )
        table.add_column(f"{name}\n{head}", no_wrap=True)
        groups.append(group)
    for (fmt, _), *texts in zip(rows, *groups, strict=True):
        cells = [Text(text) for text in texts]
        for cell in cells:
            cell.highlight_regex(r"!\d+", "bold red")
        table.add_row(fmt, *cells)
    return table


def _known_lines(difference: Difference) -> list[str]:
    known = difference.known
    assert known is not None
    return [
        f"known: {difference.backend}, {known.name}: {difference.elements:,} elements in "
        f"{difference.cases} configs",
        f"why: {known.why}",
        f"right: {known.right}",
        f"source: {known.source}",
        *_example_lines(difference.examples[0]),
    ]


def _example_lines(example: Example) -> list[str]:
    maximum = f", block maximum {example.block_maximum}" if example.block_maximum else ""
    return [
        f"case: {example.case}; {example.config}",
        f"{example.what}: x = {example.x}{maximum}" if example.x else example.what,
        f"got {example.got}",
        f"specified {example.specified}",
    ]


def markdown(matrix: Matrix, made: Mapping[str, Any], trajectories: Sequence[str]) -> str:
    """The whole report as a page."""
    lines = [
        "# Cross-check of the backends",
        "",
        verdict(matrix),
        "",
        ", ".join(f"{key} {value}" for key, value in made.items()),
        "",
        LEGEND,
    ]
    for backend in matrix.backends:
        columns = ["", *(f"{rule} {rounding}" for rule in RULES for rounding in ROUNDINGS)]
        lines += ["", f"## {backend.name} {backend.version}", ""]
        lines += [_line(columns), _line(["---"] * len(columns))]
        lines += [_line([f, *chain(*texts)]) for f, texts in rows_of(matrix, backend.name)]
        reasons = cannot_run(matrix, backend.name)
        lines += ["", *(["Not run: " + "; ".join(reasons)] if reasons else [])]
    lines += ["", *(f"- {name}: not there ({reason})" for name, reason in matrix.missing.items())]
    lines += ["", "## Known differences"]
    for difference in matrix.known:
        first, *rest = _known_lines(difference)
        lines += ["", f"- {first}", *(f"  - {text}" for text in rest)]
        for example in difference.examples[1:]:
            lines += [f"  - {text}" for text in _example_lines(example)]
    lines += [f"- stale: {k.backend}, {k.name}" for k in matrix.stale]
    lines += ["", "## Unexplained differences", ""]
    for difference in matrix.unexplained:
        lines += [f"- {difference.backend}"]
        lines += [f"  - {text}" for text in _example_lines(difference.examples[0])]
    lines += ["None." if not matrix.unexplained else "", "", "## Trajectories", ""]
    lines += [f"- {text}" for text in trajectories] or ["Not compared."]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def verdict(matrix: Matrix) -> str:
    """One sentence."""
    total = sum(c.passed + c.known + c.failed for c in matrix.cells.values())
    known = sum(c.known for c in matrix.cells.values())
    return (
        f"{matrix.cases} cases, {matrix.configs:,} configs, {len(matrix.backends)} backends: of "
        f"{total:,} comparisons {known:,} differ for a known reason, {len(matrix.unexplained):,} "
        "without one."
    )


def as_json(
    matrix: Matrix, cases: Sequence[Case], made: Mapping[str, Any], trajectories: Sequence[str]
) -> dict[str, Any]:
    """Everything, as plain data."""
    return {
        "schema": 1,
        "verdict": verdict(matrix),
        "made": dict(made),
        "backends": [{"name": b.name, "version": b.version} for b in matrix.backends],
        "missing": matrix.missing,
        "cases": [
            {
                "name": c.name,
                "origin": c.origin,
                "shape": c.x.shape,
                "dtype": c.dtype,
                "axis": c.axis,
                "block_size": c.block_size,
                "formats": c.formats,
            }
            for c in cases
        ],
        "matrix": [
            {
                "backend": backend,
                **dict(zip(("format", "rule", "rounding"), scheme, strict=True)),
                **dataclasses.asdict(cell),
            }
            for (backend, scheme), cell in matrix.cells.items()
        ],
        "cannot_run": [
            {"backend": backend, "format": fmt, "reason": reason, "configs": count}
            for backend, reasons in matrix.cannot.items()
            for (fmt, reason), count in reasons.items()
        ],
        "known": [_difference_json(d) for d in matrix.known],
        "unexplained": [_difference_json(d) for d in matrix.unexplained],
        "stale": [{"backend": k.backend, "name": k.name} for k in matrix.stale],
        "trajectories": list(trajectories),
    }


def _difference_json(difference: Difference) -> dict[str, Any]:
    known = difference.known
    about = (
        {} if known is None else {k: getattr(known, k) for k in ("name", "why", "right", "source")}
    )
    return {
        "backend": difference.backend,
        **about,
        "configs": difference.cases,
        "elements": difference.elements,
        "examples": [dataclasses.asdict(e) for e in difference.examples],
    }
