"""Losses by learning rate, depth and width, exact and MX under both readings of the paper.

    python -m figures.losses [--tier smoke|laptop|cluster] [--out FILE]

Reads the results of studies/claims.py; fails if any run is missing.  Two pictures, one a task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import matplotlib.pyplot as plt

from figures.command import draw_stored, launch, saved, source
from figures.loss_lines import Look, counts_in_words, draw_losses, handles
from figures.style import BLACK, BLUE, PAGE_WIDTH, STYLE, VERMILION, foot
from mxsim.store import Record
from studies.claims import (
    STUDY,
    Arm,
    Design,
    Key,
    Reading,
    Results,
    Task,
    Tier,
    failed_at,
    load,
)

NAME = "losses"
TASKS: dict[Task, str] = {
    "script": "near-zero teacher, as in the script",
    "unit": "teacher of unit variance",
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


FAILED = "a spike not left again, NaN or Inf"


def has_failed(record: Record) -> bool:
    """As the claims count."""
    return failed_at(record) is not None


def middle_rate(design: Design) -> float:
    """The rate at which depths and widths are shown: the last but one."""
    return design.rates[-2]


def panels(design: Design) -> dict[str, list[tuple[str, str, float]]]:
    """What is varied -> (its value in words, condition, rate), in order of the value."""
    found = {"learning rate": [(f"lr {lr:g}", "base", lr) for lr in design.rates[-COLUMNS:]]}
    for factor, values in (("depth", design.depths), ("width", design.widths)):
        named = {value: f"{factor} {value}" for value in values}
        named[getattr(design.base, factor)] = "base"
        found[factor] = [
            (f"{factor} {value}", named[value], middle_rate(design)) for value in sorted(named)
        ]
    return found


def arms(results: Results, task: Task, condition: str, lr: float) -> dict[str, list[Record]]:
    """Exact and both readings of one condition -> the records of all seeds."""
    return {
        name: [
            results.records[Key(reading, task, condition, lr, seed, arm)]
            for seed in range(results.design.seeds)
        ]
        for name, (reading, arm) in ARMS.items()
    }


def draw(results: Results, out: Path, task: Task = "script") -> Path:
    """A row a factor, a column a value of it, for one task, to ``out``; returns it."""
    design, used = results.design, []
    with plt.rc_context(STYLE):
        rows = panels(design)
        figure, axes = plt.subplots(
            len(rows), COLUMNS, figsize=(PAGE_WIDTH, 6.4), sharex=True, sharey=True,
            layout="constrained",
        )  # fmt: skip
        for row, values in zip(axes, rows.values(), strict=True):
            for axis, (words, condition, lr) in zip(row, values, strict=False):
                shown = arms(results, task, condition, lr)
                draw_losses(axis, shown, LOOKS, has_failed)
                axis.set_title(words, loc="left")
                used += [record for records in shown.values() for record in records]
            for axis in row[len(values) :]:
                axis.set_visible(False)
            row[0].set_ylabel("training loss")
        for axis in axes[-1]:
            axis.set_xlabel("step")
        base = design.base
        foot(
            figure,
            f"{TASKS[task].capitalize()}. Unless varied: width {base.width}, depth {base.depth}, "
            f"batch {base.batch}, lr {middle_rate(design):g}, {base.activation}, Adam. "
            f"{counts_in_words(design.seeds, FAILED)}",
            handles(LOOKS),
        )
        command = f"python -m figures.{NAME} --tier {results.tier}"
        return saved(figure, out, source(STUDY, results.tier, used, command))


@dataclass(frozen=True)
class Arguments:
    """Draw losses by learning rate, depth and width, from stored results."""

    tier: Tier = "laptop"
    """Which of the study's designs."""
    results: Path = Path("results")
    """Where results are stored."""
    out: Path | None = None
    """The first picture's file; default beside the results.  The other's ends in _unit."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / f"{STUDY}_{arguments.tier}" / f"{NAME}.png"
    second = out.with_name(f"{out.stem}_unit{out.suffix}")
    pictures: dict[Path, Callable[..., Path]] = {out: draw, second: partial(draw, task="unit")}
    return draw_stored(STUDY, lambda: load(arguments.tier, arguments.results), pictures)


if __name__ == "__main__":
    launch(main, Arguments, NAME)
