"""The precision controller: held-out loss against cost by arm, one controlled run, early warning.

    python -m figures.controller [--tier smoke|laptop] [--out FILE]

Reads the results of studies/controller.py; fails if any is missing.
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

from figures.command import draw_stored, saved, source, tier_of
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
    YELLOW,
)
from studies.controller import DESIGNS, GOAL_CHEAP, GOAL_LOSS, STUDY, Results, Tier, load
from studies.controller_arms import ARMS

GREY = "#999999"
COLOURS = {
    "exact": BLACK,
    "base": VERMILION,
    "ln_exact": PURPLE,
    "bf16_activations": SKY,
    "exact_backward": BLUE,
    "late_exact": YELLOW,
    "rollback": ORANGE,
    "gnmr": GREY,
    "mxsim": GREEN,
}
CEILING = 1e3  # ratios above are drawn there


def draw(results: Results, out: Path) -> Path:
    """Draw the figure to ``out``; returns it."""
    touchy = [setting.name for setting in results.design.touchy]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(touchy),
            3,
            figsize=(PAGE_WIDTH, 2.6 * len(touchy) + 0.5),
            squeeze=False,
            gridspec_kw={"width_ratios": (1, 1, 1)},
        )
        for row, name in enumerate(touchy):
            trade(axes[row, 0], results, name)
            one_run(axes[row, 1], results, name)
            axes[row, 1].set_title(name, fontsize=8)
        warning(axes[0, 2], results)
        for axis in axes[1:-1, 2]:
            axis.set_visible(False)
        if len(touchy) > 1:
            later(axes[-1, 2], results)
        handles, labels = axes[0, 0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="lower center", ncol=5, handletextpad=0.2)
        figure.suptitle(
            f"{results.design.seeds} seeds an arm: median loss over exact and mean cost, 95 % "
            "intervals; open: single-signal ablations",
            fontsize=8.5,
        )
        figure.tight_layout(rect=(0, 0.07, 1, 1))
        tier = tier_of(DESIGNS, results.design)
        return saved(figure, out, source(STUDY, tier, results.records.values()))


def trade(axis: Axes, results: Results, name: str) -> None:
    """Loss against cost, a marker an arm."""
    for row in results.rows[name]:
        main = row.arm in ARMS
        colour = COLOURS.get(row.arm, GREY)
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
            "o",
            color=colour,
            markersize=4.5 if main else 3,
            markerfacecolor=colour if main else "white",
            label=row.arm.replace("_", " ") if main else None,
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
        axis.plot(shown, color=COLOURS[arm], linewidth=0.6)
    rungs = results.records[name, "mxsim", seed].arrays["rungs"].astype(float)
    axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_ylabel("loss (one seed)")
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
    axis.set_title("rollback to exact (open), and the\nlast tenth exact (filled)", fontsize=7.5)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * 12)  # room for the legend
    axis.legend(fontsize=5, loc="upper left", handletextpad=0.1, borderpad=0.1)


def warning(axis: Axes, results: Results) -> None:
    """Receiver operating curves: diverging runs warned of against false alarms, by signal."""
    axis.set_title(f"warnings\n{results.design.watch.name}", fontsize=7.5)
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
    axis.legend(
        fontsize=5.5,
        loc="lower right",
        labelspacing=0.15,
        handlelength=1,
        frameon=True,
        framealpha=0.85,
        edgecolor="none",
        borderpad=0.1,
    )


@dataclass(frozen=True)
class Arguments:
    """Draw the study's figure again, from stored results."""

    tier: Tier = "laptop"
    """Which of the study's designs."""
    results: Path = Path("results")
    """Where results are stored."""
    out: Path | None = None
    """The file to write; default beside the results."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / f"{STUDY}_{arguments.tier}"
    out = arguments.out or folder / f"{STUDY}.png"
    return draw_stored(STUDY, lambda: load(arguments.tier, arguments.results), {out: draw})


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Arguments, prog=f"python -m figures.{STUDY}")))
