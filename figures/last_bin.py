"""Share of gammas and activations that saturate, over steps, at MX and at exact weights.

    python -m figures.last_bin [--tier smoke|laptop|cluster] [--out FILE]

Reads the watched runs of studies/claims.py; fails if any is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from figures.command import FromResults, draw_stored, launch, saved, source
from figures.style import BLACK, PAGE_WIDTH, STYLE, VERMILION, foot
from studies.claims import READINGS, STUDY, TASKS, Reading, Results, Task, Tier, load

Array = NDArray[Any]

NAME = "last_bin"
ROWS = {
    "ln_gamma": "gamma",
    "ln_output": "first GEMM's input",
    "hidden": "second GEMM's input",
}
SIDES = ((BLACK, "at exact weights: would saturate"), (VERMILION, "at MX weights"))
LINES: tuple[Literal["-", "--"], ...] = ("-", "--")  # by rate
WORDS = {"paper_text": "paper's text", "paper_code": "paper's code", "script": "near-zero teacher",
         "unit": "unit variance"}  # fmt: skip


def shares(results: Results, tensor: str, reading: Reading, task: Task, lr: float) -> Array:
    """Per cent of a tensor's elements that saturate, mean over blocks: (seeds, moments, 2)."""
    records = [results.watched[reading, task, lr, seed] for seed in range(results.design.seeds)]
    series = [np.asarray(r.arrays[f"saturated_{tensor}"], float).mean(axis=2) for r in records]
    return 100 * np.stack(series)


def panel(axis: Axes, steps: Array, values: Array, line: str) -> None:
    """Median over the seeds that got there, and their range; values (seeds, moments, 2)."""
    for side, (colour, _) in enumerate(SIDES):
        there = np.isfinite(values[:, :, side]).any(axis=0)
        known, at = values[:, there, side], steps[there]
        axis.fill_between(
            at, np.nanmin(known, axis=0), np.nanmax(known, axis=0), color=colour, alpha=0.1, lw=0
        )
        axis.plot(at, np.nanmedian(known, axis=0), line, color=colour, linewidth=1)


def draw(results: Results, out: Path) -> Path:
    """A row a tensor, a column a task and reading, to ``out``; returns it."""
    design = results.design
    columns = [(task, reading) for task in TASKS for reading in READINGS]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(ROWS),
            len(columns),
            figsize=(PAGE_WIDTH, 5.4),
            sharex=True,
            sharey="row",
            layout="constrained",
        )
        for row, (tensor, words) in zip(axes, ROWS.items(), strict=True):
            for axis, (task, reading) in zip(row, columns, strict=True):
                for lr, line in zip(design.watched, LINES, strict=True):
                    steps = results.watched[reading, task, lr, 0].arrays["watch_steps"]
                    panel(axis, steps, shares(results, tensor, reading, task, lr), line)
                axis.grid(axis="y")
                if tensor == next(iter(ROWS)):
                    axis.set_title(f"{WORDS[task]},\n{WORDS[reading]}")
            row[0].set_ylabel(f"{words}\nsaturated, %")
            row[0].set_ylim(bottom=0)  # after all panels: they share the other end
        for axis in axes[-1]:
            axis.set_xlabel("step")
        handles = [Line2D([], [], color=colour, label=words) for colour, words in SIDES]
        handles += [
            Line2D([], [], color="#666666", linestyle=line, label=f"lr {lr:g}")
            for lr, line in zip(design.watched, LINES, strict=True)
        ]
        base = design.base
        foot(
            figure,
            "Elements beyond the largest code of their block (E4M3, scale rule floor), mean over "
            f"blocks of the network: median and range of {design.seeds} seeds, of those still "
            f"running. Width {base.width}, depth {base.depth}, batch {base.batch}, "
            f"{base.activation}, Adam. Gamma is counted as in E4M3 blocks also where the reading "
            "keeps it in bf16 (paper's code).",
            handles,
        )
        command = f"python -m figures.{NAME} --tier {results.tier}"
        return saved(figure, out, source(STUDY, results.tier, results.watched.values(), command))


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the share of tensors that saturates over steps, from stored results."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / f"{STUDY}_{arguments.tier}" / f"{NAME}.png"
    return draw_stored(STUDY, load, arguments, {out: draw})


if __name__ == "__main__":
    launch(main, Arguments, NAME)
