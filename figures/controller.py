"""The precision controller: held-out loss against cost by arm, one controlled run, early warning.

    python -m figures.controller [--tier smoke|laptop] [--out FILE]

Reads the results of studies/controller.py; fails if any is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from figures.command import FromResults, Source, draw_stored, launch, saved, source, tier_of
from figures.style import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PAGE_WIDTH,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    foot,
)
from studies.controller import DESIGNS, GOAL_CHEAP, GOAL_LOSS, STUDY, Results, Tier, load
from studies.controller_arms import ARMS

LOOK = {  # colour and marker
    "exact": (BLACK, "o"),
    "base": (VERMILION, "s"),
    "ln_exact": (PURPLE, "^"),
    "bf16_activations": (SKY, "D"),
    "exact_backward": (BLUE, "v"),
    "late_exact": (BROWN, "P"),
    "rollback": (ORANGE, "X"),
    "gnmr": (GREY, "p"),
    "mxsim": (GREEN, "*"),
}
WORDS = {"base": "MX throughout", "gnmr": "gradient-norm rule", "mxsim": "the controller"}
CEILING = 1e3  # ratios above are drawn there


def draw(results: Results, out: Path) -> Path:
    """Draw the figure to ``out``; returns it."""
    touchy = [setting.name for setting in results.design.touchy]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(touchy),
            3,
            figsize=(PAGE_WIDTH, 2.75 * len(touchy) + 1.0),
            squeeze=False,
            layout="constrained",
        )
        for row, name in enumerate(touchy):
            trade(axes[row, 0], results, name)
            one_run(axes[row, 1], results, name)
            axes[row, 0].set_title(name.replace(", exact", ",\nexact"), loc="left")
        warning(axes[0, 2], results)
        for axis in axes[1:-1, 2]:
            axis.set_visible(False)
        if len(touchy) > 1:
            later(axes[-1, 2], results)
        design = results.design
        foot(
            figure,
            f"{design.seeds} seeds an arm. Left: median held-out loss over the exact run's of the "
            f"same seed (drawn at {CEILING:g} if above), and mean GEMM time over bf16's, 95 % "
            "intervals; small and open: ablations with a single signal. Middle: seed "
            f"{design.first_seed}; pale: the controller's rung (right axis). Upper right: warnings "
            f"by signal, with the area under each curve, over "
            f"{len(design.watched_seeds)} runs of {design.watch.name} (no interval). Dotted: "
            "the goals, and chance.",
            [
                Line2D(
                    [], [], linestyle="", marker=mark, color=colour, markersize=5,
                    label=WORDS.get(arm, arm.replace("_", " ").replace("ln ", "LN ")),
                )
                for arm, (colour, mark) in LOOK.items()
            ],
            ncols=5,
        )  # fmt: skip
        return saved(figure, out, runs_of(results))


def runs_of(results: Results) -> Source:
    """The runs behind the figure."""
    return source(STUDY, tier_of(DESIGNS, results.design), results.records.values())


def trade(axis: Axes, results: Results, name: str) -> None:
    """Loss against cost, a marker an arm."""
    for row in results.rows[name]:
        main = row.arm in ARMS
        colour, mark = LOOK.get(row.arm, (GREY, "o"))
        value, low, high = (
            min(each, CEILING) for each in (row.loss.value, row.loss.low, row.loss.high)
        )
        if main:
            axis.plot([row.cost.value] * 2, [low, high], color=colour, linewidth=0.8)
            if np.isfinite(row.cost.low):
                axis.plot([row.cost.low, row.cost.high], [value] * 2, color=colour, linewidth=0.8)
        axis.plot(
            row.cost.value,
            value,
            mark,
            color=colour,
            markersize=5 if main else 3,
            markeredgewidth=0.6,
            markerfacecolor=colour if main else "white",
        )
    axis.axhline(GOAL_LOSS, color=GREY, linewidth=0.5, linestyle=":")
    axis.set_yscale("log")
    axis.set_xlabel("GEMM time over bf16")
    axis.set_ylabel("held-out loss over exact")


def one_run(axis: Axes, results: Results, name: str) -> None:
    """Losses of one seed under MX, exact and the controller, and the controller's rungs."""
    seed = results.design.first_seed
    for arm in ("base", "exact", "mxsim"):
        losses = np.asarray(results.records[name, arm, seed].arrays["losses"], float)
        shown = np.where(losses < 1e2, losses, np.nan)
        axis.plot(shown, color=LOOK[arm][0], linewidth=0.6)
    rungs = results.records[name, "mxsim", seed].arrays["rungs"].astype(float)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("training loss, one seed")
    other = axis.twinx()
    other.step(np.arange(len(rungs)), np.where(rungs < 0, np.nan, rungs), color=GREEN, alpha=0.35)
    other.set_ylim(-0.2, 18)  # in the lower third
    other.set_yticks([0, 5], ["MX", "exact"])
    other.spines["right"].set_visible(True)


def later(axis: Axes, results: Results) -> None:
    """Loss against the share of steps on the cheapest rung, of the arms that were chosen later."""
    colours = (VERMILION, ORANGE, BLUE, SKY)
    markers = {"rollback to exact": "o", "and the last tenth exact": "s"}
    for colour, (name, rows) in zip(colours, results.second.items(), strict=False):
        for row in rows:
            if row.arm in markers:
                axis.plot(
                    row.cheap.value,
                    min(row.loss.value, CEILING),
                    markers[row.arm],
                    color=colour,
                    markersize=4.5,
                    markerfacecolor="white" if row.arm == "rollback to exact" else colour,
                    label=name if row.arm == "and the last tenth exact" else None,
                )
    axis.axhline(GOAL_LOSS, color=GREY, linewidth=0.5, linestyle=":")
    axis.axvline(GOAL_CHEAP, color=GREY, linewidth=0.5, linestyle=":")
    axis.set_xlim(-0.03, 1.03)
    axis.set_yscale("log")
    axis.set_xlabel("steps on the cheapest rung")
    axis.set_ylabel("held-out loss over exact")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.set_title("rollback to exact (open), and\nthe last tenth exact (filled)", loc="left")
    beneath(axis, 1)


def warning(axis: Axes, results: Results) -> None:
    """Receiver operating curves: diverging runs warned of against false alarms, by signal."""
    axis.set_title("warnings, area under curve", loc="left")
    colours = (GREEN, ORANGE, GREY, PURPLE, BLUE, VERMILION, SKY, BLACK)
    for colour, w in zip(colours, results.warnings, strict=True):
        if len(w.roc):
            words = f"{w.signal.replace('_', ' ')} {w.auc:.2f}"
            axis.plot(*w.roc.T, color=colour, label=words, linewidth=0.9)
    axis.plot([0, 1], [0, 1], color=GREY, linewidth=0.5, linestyle=":")
    axis.set_xlabel("false alarms")
    axis.set_ylabel("diverging runs warned of")
    axis.set_xlim(-0.03, 1.03)
    axis.set_ylim(-0.03, 1.03)
    beneath(axis, 2)


def beneath(axis: Axes, columns: int) -> None:
    """A panel's own legend, under its name of the x axis."""
    axis.legend(
        fontsize=6,
        loc="upper center",
        bbox_to_anchor=(0.45, -0.22),
        ncols=columns,
        labelspacing=0.2,
        handlelength=1,
        handletextpad=0.4,
        columnspacing=0.8,
        borderpad=0,
    )


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the study's figure again, from stored results."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / f"{STUDY}_{arguments.tier}"
    out = arguments.out or folder / f"{STUDY}.png"
    return draw_stored(STUDY, load, arguments, {out: draw})


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
