"""Hybrid precisions against full MX and exact: losses, and held-out loss over the exact run's.

    python -m figures.hybrids [--tier smoke|laptop|cluster] [--out FILE]

Reads the results of studies/claims.py; fails if any run is missing.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from figures.command import draw_stored, saved, source
from figures.loss_lines import Look, counts_in_words, draw_losses, handles
from figures.style import BLACK, BLUE, CAPTION, GREEN, GREY, PAGE_WIDTH, STYLE, VERMILION
from mxsim.grid import FAILURES, state_of
from mxsim.stats import median_over_seeds
from mxsim.store import Record
from studies.claims import READINGS, STUDY, TASKS, Arm, Key, Reading, Results, Task, Tier, load

NAME = "hybrids"
ARMS: dict[str, tuple[str, Arm]] = {  # (condition, arm)
    "exact": ("base", "exact"),
    "mx": ("base", "mx"),
    "bf16": ("bf16 activations", "mx"),
    "forward": ("exact backward", "mx"),
}
LOOKS = {
    "exact": Look(BLACK, "exact"),
    "mx": Look(VERMILION, "MX E4M3"),
    "bf16": Look(BLUE, "E4M3 weights, bf16 activations"),
    "forward": Look(GREEN, "quantized forward, exact backward", "--"),
}
MARKERS = {"mx": "o", "bf16": "s", "forward": "D"}
WORDS = {"paper_text": "paper's text", "paper_code": "paper's code", "script": "near-zero teacher",
         "unit": "unit variance"}  # fmt: skip
CEILING = 10.0  # ratios above are drawn there, as triangles


def records_of(
    results: Results, reading: Reading, task: Task, lr: float
) -> dict[str, list[Record]]:
    """Arm -> the records of all seeds."""
    return {
        name: [
            results.records[Key(reading, task, condition, lr, seed, arm)]
            for seed in range(results.design.seeds)
        ]
        for name, (condition, arm) in ARMS.items()
    }


def ratios(axis: Axes, by_rate: dict[float, dict[str, list[Record]]]) -> None:
    """Held-out loss over the exact run's of the same seed, by rate: median, 95 %.

    A failed run counts as infinite; pairs whose exact run failed are left out.
    """
    axis.axhline(1, color=BLACK, linewidth=0.6)
    for i, arms in enumerate(by_rate.values()):
        if all(state_of(exact) in FAILURES for exact in arms["exact"]):
            axis.text(i, 3, "exact\nfailed", ha="center", va="center", fontsize=6, color=GREY)
        for j, (name, marker) in enumerate(MARKERS.items()):
            pairs = [
                (np.inf if state_of(own) in FAILURES else own.meta["eval_loss"])
                / exact.meta["eval_loss"]
                for own, exact in zip(arms[name], arms["exact"], strict=True)
                if state_of(exact) not in FAILURES
            ]
            if not pairs:
                continue
            found = median_over_seeds(np.array(pairs))
            value, low, high = (min(each, CEILING) for each in (found.value, found.low, found.high))
            at, colour = i + 0.2 * (j - 1), LOOKS[name].colour
            axis.plot([at, at], [low, high], color=colour, linewidth=0.9)
            axis.plot(at, value, marker, color=colour, markersize=2.8)
            if high == CEILING:
                axis.plot(at, CEILING, "^", color=colour, markersize=3.5, clip_on=False)
    axis.set_yscale("log")
    axis.set_ylim(0.6, CEILING)
    axis.set_yticks([0.7, 1, 2, 5, 10], ["0.7", "1", "2", "5", ">10"])
    axis.minorticks_off()
    axis.set_xticks(range(len(by_rate)), [f"{lr:g}" for lr in by_rate])
    axis.set_xlim(-0.5, len(by_rate) - 0.5)
    axis.grid(axis="y")


def draw(results: Results, out: Path) -> Path:
    """A column a task and reading, to ``out``; returns it."""
    design, used = results.design, []
    columns = [(task, reading) for task in TASKS for reading in READINGS]
    highest = design.rates[-1]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(columns), figsize=(PAGE_WIDTH, 4.6), sharey="row", layout="constrained"
        )
        figure.get_layout_engine().set(rect=(0, 0.2, 1, 0.8))  # type: ignore[union-attr,call-arg]
        for (upper, lower), (task, reading) in zip(axes.T, columns, strict=True):
            by_rate = {lr: records_of(results, reading, task, lr) for lr in design.rates}
            used += [r for arms in by_rate.values() for records in arms.values() for r in records]
            draw_losses(upper, by_rate[highest], LOOKS)
            ratios(lower, by_rate)
            upper.set_title(f"{WORDS[task]},\n{WORDS[reading]}", pad=14)
            upper.set_xlabel("step")
            lower.set_xlabel("learning rate")
        axes[0, 0].set_ylabel(f"training loss at lr {highest:g}")
        axes[1, 0].set_ylabel("held-out loss over exact")
        figure.legend(
            handles=handles(LOOKS), loc="lower center", ncols=4, bbox_to_anchor=(0.5, 0.14),
            columnspacing=1.2, handlelength=1.6,
        )  # fmt: skip
        base = design.base
        figure.text(
            0.01,
            0.008,
            f"Width {base.width}, depth {base.depth}, batch {base.batch}, {base.activation}, Adam. "
            f"Upper row. {counts_in_words(design.seeds)}"
            f"\nLower row. Median over the seeds (at most {design.seeds}) whose exact run did "
            "not fail, bars: 95 % bootstrap interval; a run that failed counts as infinite,\n"
            f"triangles at the top: beyond {CEILING:g}.",
            **CAPTION,
        )
        command = f"python -m figures.{NAME} --tier {results.tier}"
        return saved(figure, out, source(STUDY, results.tier, used, command))


@dataclass(frozen=True)
class Arguments:
    """Draw the hybrids, from stored results."""

    tier: Tier = "laptop"
    """Which of the study's designs."""
    results: Path = Path("results")
    """Where results are stored."""
    out: Path | None = None
    """The file to write; default beside the results."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / f"{STUDY}_{arguments.tier}" / f"{NAME}.png"
    return draw_stored(STUDY, lambda: load(arguments.tier, arguments.results), {out: draw})


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Arguments, prog=f"python -m figures.{NAME}")))
