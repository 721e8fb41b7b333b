"""The quantized edge of stability: measured against predicted, and over steps for four arms.

    python -m figures.quantized_edge [--tier smoke|laptop] [--out FILE]

Reads the results of studies/quantized_edge.py; fails if any run is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from figures.command import FromResults, Source, draw_stored, launch, saved, source, stored, tier_of
from figures.style import (
    BLACK,
    BLUE,
    GREEN,
    ORANGE,
    PAGE_WIDTH,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    foot,
)
from studies.quantized_edge import (
    STUDY,
    Results,
    Tier,
    design_of,
    is_exact,
    load,
    over_seeds,
    prediction,
    runs,
)

Array = NDArray[Any]

LOOK = {
    "GD": (BLUE, "o", "gradient descent"),
    "heavy ball": (GREEN, "s", "heavy ball"),
    "Adam": (VERMILION, "^", "Adam"),
    "GD control": (SKY, "v", "gradient descent, synthetic noise"),
    "Adam control": (PURPLE, "D", "Adam, synthetic noise"),
}
PANELS = {
    "descent in P": "descent condition, in P's metric",
    "displaced": "in mean along v, by displacement",
    "sharpness gap": "stochastic sharpness gap",
}
ARMS = {
    "exact": (BLACK, "exact"),
    "ln fp8_e4m3": (VERMILION, "layer-norm affine, E4M3"),
    "gemm fp8_e4m3": (BLUE, "GEMM operands, E4M3"),
    "all fp8_e4m3": (ORANGE, "all 14 sites, E4M3"),
}


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Measured against predicted edge, each in units of the exact one's, to ``out``."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(PANELS), figsize=(PAGE_WIDTH, 3.35), sharey=True, layout="constrained"
        )
        for axis, (predictor, title) in zip(axes, PANELS.items(), strict=True):
            for (group, label), readings in results.readings.items():
                colour, marker, _ = LOOK[group]
                unit = next(
                    c
                    for name, c in (("Adam", 38.0), ("heavy", 3.8), ("GD", 2.0))
                    if group.startswith(name)
                )
                measured = over_seeds(readings, lambda r: r.measured)
                predicted = over_seeds(readings, prediction(predictor))
                if not (measured.n and predicted.n):
                    continue
                axis.errorbar(
                    predicted.value / unit,
                    measured.value / unit,
                    [
                        [(measured.value - measured.low) / unit],
                        [(measured.high - measured.value) / unit],
                    ],
                    [
                        [(predicted.value - predicted.low) / unit],
                        [(predicted.high - predicted.value) / unit],
                    ],
                    fmt=marker,
                    color=colour,
                    markersize=3.2,
                    elinewidth=0.5,
                    markerfacecolor="white" if is_exact(label) else colour,
                )
            ends = (0.25, 1.8)
            axis.plot(ends, ends, color="grey", linewidth=0.7, linestyle=":")
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlim(ends)
            axis.set_ylim(ends)
            ticks = [0.3, 0.5, 1.0, 1.5]
            axis.set_xticks(ticks, [f"{t:g}" for t in ticks], minor=False)
            axis.set_yticks(ticks, [f"{t:g}" for t in ticks], minor=False)
            axis.minorticks_off()
            axis.set_aspect("equal")
            axis.set_title(title)
            axis.set_xlabel("predicted / exact edge")
        axes[0].set_ylabel("measured / exact edge")
        handles = [
            Line2D([], [], linestyle="", marker=m, color=c, markersize=4, label=words)
            for c, m, words in LOOK.values()
        ]
        foot(
            figure,
            f"ηS over the second half of runs, medians of {results.design.seeds} seeds with "
            "95 % bootstrap intervals; open: exact gradients of the whole batch; dotted: equal. "
            "Bars end at the edges; a predictor that says nothing of an optimizer has no marker.",
            handles,
            ncols=3,
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def draw_arms(results: Results, out: Path, folder: Path | None = None) -> Path:
    """eta S over steps, exact and E4M3 arms, under gradient descent and Adam, to ``out``."""
    groups = {"GD": ("gradient descent", 2.0), "Adam": ("Adam", 38.0)}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, 2, figsize=(PAGE_WIDTH, 2.9), sharex=True, layout="constrained"
        )
        for axis, (group, (title, edge)) in zip(axes, groups.items(), strict=True):
            lr = next(c.config["lr"] for c in results.design.conditions if c.group == group)
            for label, (colour, words) in ARMS.items():
                if (group, label) not in results.arrays:
                    continue
                runs = results.arrays[group, label]
                steps = runs[0]["steps"]
                values = lr * np.stack([run["sharpness"] for run in runs])
                axis.fill_between(
                    steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.14,
                    linewidth=0,
                )  # fmt: skip
                axis.plot(steps, np.median(values, axis=0), color=colour, label=words)
                predicted = over_seeds(results.readings[group, label], prediction("descent in P"))
                axis.plot([steps[-1] * 1.01, steps[-1] * 1.05], [predicted.value] * 2, color=colour)
            axis.axhline(edge, color="grey", linewidth=0.7, linestyle=":")
            axis.set_title(title)
            axis.set_xlabel("step")
            axis.set_ylim(0, 1.6 * edge)
            axis.grid(True, axis="y")
        axes[0].set_ylabel("ηS of the exact loss")
        axes[1].set_ylabel("ηS, S of P⁻¹H")
        foot(
            figure,
            f"Median and range of {results.design.seeds} seeds; dotted: the exact edge; ticks at "
            "the right: what the descent condition predicts, median over seeds. η: learning rate; "
            "S: largest eigenvalue, under Adam in the preconditioner's metric.",
            axes[0].get_legend_handles_labels()[0],
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def runs_of(results: Results, folder: Path) -> Source:
    """The runs behind the figures, which lie in ``folder``."""
    tier = tier_of({tier: design_of(tier) for tier in get_args(Tier)}, results.design)
    return source(STUDY, tier, stored(folder, [run.id for run in runs(results.design).values()]))


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the study's figures again, from stored results."""

    tier: Tier = "laptop"
    out: Path | None = None
    """The scatter's file; default beside the results.  The other goes beside it: ..._arms."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / f"{STUDY}_{arguments.tier}"
    out = arguments.out or folder / f"{STUDY}.png"
    second = "arms.png" if arguments.out is None else f"{out.stem}_arms{out.suffix}"
    return draw_stored(
        STUDY,
        load,
        arguments,
        {out: draw, out.with_name(second): draw_arms},
        folder,
    )


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
