"""Hybrid precisions against full MX and exact: losses, and held-out loss over the exact run's.

    python -m figures.hybrids [--tier smoke|laptop|cluster] [--out FILE]

Reads the results of studies/claims.py; fails if any run is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from figures.command import FromResults, draw_stored, launch, saved, source
from figures.loss_lines import Look, counts_in_words, draw_losses, handles
from figures.losses import FAILED, has_failed
from figures.style import BLACK, BLUE, GREEN, GREY, PAGE_WIDTH, STYLE, VERMILION, foot
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
FLOOR, CEILING = 0.5, 10.0  # ratios beyond are drawn there, above as triangles


def condition_of(reading: Reading, label: str) -> str:
    """The condition shown: the script's quantized teacher would give MX runs other targets."""
    if reading == "paper_text":
        return label
    return "exact teacher" if label == "base" else f"{label}, exact teacher"


def records_of(
    results: Results, reading: Reading, task: Task, lr: float
) -> dict[str, list[Record]]:
    """Arm -> the records of all seeds."""
    return {
        name: [
            results.records[Key(reading, task, condition_of(reading, label), lr, seed, arm)]
            for seed in range(results.design.seeds)
        ]
        for name, (label, arm) in ARMS.items()
    }


def ratios(axis: Axes, by_rate: dict[float, dict[str, list[Record]]]) -> None:
    """Held-out loss over the exact run's of the same seed, by rate: median, 95 %.

    A failed run counts as infinite; pairs whose exact run failed are left out.
    """
    axis.axhline(1, color=BLACK, linewidth=0.6)
    for i, arms in enumerate(by_rate.values()):
        if all(map(has_failed, arms["exact"])):
            axis.text(i, 3, "exact\nfailed", ha="center", va="center", fontsize=6.5, color=GREY)
        for j, (name, marker) in enumerate(MARKERS.items()):
            pairs = [
                (np.inf if has_failed(own) else own.meta["eval_loss"]) / exact.meta["eval_loss"]
                for own, exact in zip(arms[name], arms["exact"], strict=True)
                if not has_failed(exact)
            ]
            if not pairs:
                continue
            found = median_over_seeds(np.array(pairs))
            value, low, high = (
                min(max(each, FLOOR), CEILING) for each in (found.value, found.low, found.high)
            )
            at, colour = i + 0.2 * (j - 1), LOOKS[name].colour
            axis.plot([at, at], [low, high], color=colour, linewidth=0.9)
            axis.plot(at, value, marker, color=colour, markersize=2.8)
            if high == CEILING:
                axis.plot(at, CEILING, "^", color=colour, markersize=3.5, clip_on=False)
    axis.set_yscale("log")
    axis.set_ylim(FLOOR, CEILING)
    axis.set_yticks([0.5, 1, 2, 5, 10], ["<0.5", "1", "2", "5", ">10"])
    axis.minorticks_off()
    pairs_of = {lr: sum(not has_failed(r) for r in arms["exact"]) for lr, arms in by_rate.items()}
    axis.set_xticks(range(len(by_rate)), [f"{lr:g}\nn = {n}" for lr, n in pairs_of.items()])
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
        for (upper, lower), (task, reading) in zip(axes.T, columns, strict=True):
            by_rate = {lr: records_of(results, reading, task, lr) for lr in design.rates}
            used += [r for arms in by_rate.values() for records in arms.values() for r in records]
            draw_losses(upper, by_rate[highest], LOOKS, has_failed)
            ratios(lower, by_rate)
            upper.set_title(f"{WORDS[task]},\n{WORDS[reading]}", pad=14)
            upper.set_xlabel("step")
            lower.set_xlabel("learning rate")
        axes[0, 0].set_ylabel(f"training loss at lr {highest:g}")
        axes[1, 0].set_ylabel("held-out loss over exact")
        base = design.base
        foot(
            figure,
            f"Width {base.width}, depth {base.depth}, batch {base.batch}, {base.activation}, Adam; "
            "paper's code with the exact teacher, so that all losses are of one task. "
            f"Upper row. {counts_in_words(design.seeds, FAILED)}"
            f" Lower row. Median over the seeds (at most {design.seeds}) whose exact run did "
            "not fail, n below the rates, bars: 95 % bootstrap interval; a run that failed counts "
            f"as infinite, triangles at the top: beyond {CEILING:g}.",
            handles(LOOKS),
        )
        command = f"python -m figures.{NAME} --tier {results.tier}"
        return saved(figure, out, source(STUDY, results.tier, used, command))


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the hybrids, from stored results."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / f"{STUDY}_{arguments.tier}" / f"{NAME}.png"
    return draw_stored(STUDY, lambda: load(arguments.tier, arguments.results), {out: draw})


if __name__ == "__main__":
    launch(main, Arguments, NAME)
