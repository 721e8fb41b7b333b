"""Losses by learning rate, depth and width, exact and MX under both readings of the paper.

    python -m figures.losses [--tier smoke|laptop|cluster] [--out FILE]

Reads the results of studies/claims.py; fails if any run is missing.  A picture a task, and one of
the place where MX was found to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt

from figures.command import FromResults, draw_stored, launch, saved, source
from figures.loss_lines import Look, counts_in_words, draw_losses, handles
from figures.style import BLACK, BLUE, PAGE_WIDTH, STYLE, VERMILION, foot
from mxsim.store import Record
from studies.claims import (
    PLACES,
    STUDY,
    Arm,
    Design,
    Reading,
    Results,
    Task,
    Tier,
    conditions,
    failed_at,
    load,
)

NAME = "losses"
TASKS: dict[Task, str] = {
    "script": "Near-zero teacher, as in the script",
    "unit": "Teacher of unit variance",
    "searched": "Where MX was found to fail; near-zero teacher",
}
# The arms of studies/claims.py: name -> (reading, arm).  Exact runs do not depend on the reading.
ARMS: Mapping[str, tuple[Reading, Arm]] = {
    "exact": ("paper_text", "exact"),
    "paper_text": ("paper_text", "mx"),
    "paper_code": ("paper_code", "mx"),
}
LOOKS: Mapping[str, Look] = {
    "exact": Look(BLACK, "exact"),
    "paper_text": Look(VERMILION, "MX E4M3, paper's text (14 sites)"),
    "paper_code": Look(BLUE, "MX E4M3, paper's code (LN in bf16)", "--"),
}
COLUMNS = 3
HALF = "half the rate"  # a condition of the place that has one rate

FAILED = "a spike not left again, NaN or Inf"


def has_failed(record: Record) -> bool:
    """As the claims count."""
    return failed_at(record) is not None


def middle_rate(design: Design, task: Task) -> float:
    """The rate at which depths and widths are shown: the last but one, or the only one."""
    return design.rates_of(task)[-2:][0]


def panels(design: Design, task: Task) -> dict[str, list[tuple[str, str, float]]]:
    """What is varied in a place -> (its value in words, condition, rate), in order of the value."""
    base, rates = design.base_of(task), design.rates_of(task)
    known = {each.label: each.rate for each in conditions(design) if task in each.places}
    named = [("base", lr) for lr in rates[-COLUMNS:]]
    if HALF in known:
        named.insert(0, (HALF, rates[0]))
    found = {"learning rate": [(f"lr {lr * known[name]:g}", name, lr) for name, lr in named]}
    for factor, values in (("depth", design.depths), ("width", design.widths)):
        labels = {value: f"{factor} {value}" for value in values}
        labels[getattr(base, factor)] = "base"
        found[factor] = [
            (f"{factor} {value}", labels[value], middle_rate(design, task))
            for value in sorted(labels)
            if labels[value] in known
        ]
    return {factor: values for factor, values in found.items() if len(values) > 1}


def records_of(
    results: Results, reading: Reading, task: Task, condition: str, lr: float, arm: Arm
) -> list[Record]:
    """The records of all seeds that the condition has."""
    pairs = results.pairs(reading, task, condition)
    return [
        results.records[exact if arm == "exact" else mx]
        for (rate, _), (mx, exact) in pairs.items()
        if rate == lr
    ]


def arms(results: Results, task: Task, condition: str, lr: float) -> dict[str, list[Record]]:
    """Exact and both readings of one condition -> the records of all seeds."""
    return {
        name: records_of(results, reading, task, condition, lr, arm)
        for name, (reading, arm) in ARMS.items()
    }


def draw(results: Results, out: Path, task: Task = "script") -> Path:
    """A row a factor, a column a value of it, for one task, to ``out``; returns it."""
    design, used = results.design, []
    with plt.rc_context(STYLE):
        rows = panels(design, task)
        figure, axes = plt.subplots(
            len(rows), max(map(len, rows.values())), figsize=(PAGE_WIDTH, 1.0 + 1.8 * len(rows)),
            sharex=True, sharey=True, squeeze=False, layout="constrained",
        )  # fmt: skip
        seeds: set[int] = set()
        for row, values in zip(axes, rows.values(), strict=True):
            for axis, (words, condition, lr) in zip(row, values, strict=False):
                shown = arms(results, task, condition, lr)
                draw_losses(axis, shown, LOOKS, has_failed)
                axis.set_title(words, loc="left")
                used += [record for records in shown.values() for record in records]
                seeds |= {len(records) for records in shown.values()}
            for axis in row[len(values) :]:
                axis.set_visible(False)
            row[0].set_ylabel("training loss")
        for axis in axes[-1]:
            axis.set_xlabel("step")
        base, norm = design.base_of(task), ""
        if base.norm != design.base.norm:
            norm = f"{base.norm.upper()} norm, "
        foot(
            figure,
            f"{TASKS[task]}. Unless varied: width {base.width}, depth {base.depth}, "
            f"batch {base.batch}, lr {middle_rate(design, task):g}, {norm}{base.activation}, Adam. "
            f"{counts_in_words(sorted(seeds), FAILED)}",
            handles(LOOKS),
        )
        command = f"python -m figures.{NAME} --tier {results.tier}"
        return saved(figure, out, source(STUDY, results.tier, used, command))


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw losses by learning rate, depth and width, from stored results."""

    tier: Tier = "laptop"
    out: Path | None = None
    """The first picture's file; default beside the results.  Others end in _unit, _searched."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / f"{STUDY}_{arguments.tier}" / f"{NAME}.png"
    pictures: dict[Path, Callable[..., Path]] = {out: draw}
    for task in PLACES[1:]:
        pictures[out.with_name(f"{out.stem}_{task}{out.suffix}")] = partial(draw, task=task)
    return draw_stored(STUDY, load, arguments, pictures)


if __name__ == "__main__":
    launch(main, Arguments, NAME)
