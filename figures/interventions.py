"""Interventions before a divergence: losses from the change on, survival curves, gain over placebo.

    python -m figures.interventions [--tier smoke|laptop] [--out FILE]

Reads the results of studies/interventions.py; fails if any is missing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from figures.command import FromResults, Source, draw_stored, launch, saved, source, stored, tier_of
from figures.style import (
    BLACK,
    BLUE,
    BROWN,
    GREEN,
    GREY,
    ORANGE,
    PAGE_WIDTH,
    PALE,
    PURPLE,
    SKY,
    STYLE,
    VERMILION,
    foot,
)
from mxsim.store import Store
from mxsim.survival import survival_curve
from mxsim.sweep import load_points
from studies.interventions import DESIGNS, STUDY, Results, Tier, base_runs, changed_runs, load

# Solid: drawn in all rows; dashed: in the lowest only, in the colour of a kindred arm.
LOOK: Mapping[str, tuple[str, Literal["-", "--"]]] = {
    "placebo": (GREY, "-"),
    "none": (GREY, "--"),
    "full_precision": (BLACK, "-"),
    "rceil": (VERMILION, "-"),
    "ln_exact": (PURPLE, "-"),
    "activation_exact": (PURPLE, "--"),
    "bf16_activations_forward": (BLUE, "--"),
    "bf16_activations": (BLUE, "-"),
    "exact_backward": (SKY, "-"),
    "bf16_weights": (BROWN, "-"),
    "lower_lr": (GREEN, "-"),
    "stochastic": (ORANGE, "-"),
    "small_blocks": (VERMILION, "--"),
    "hadamard": (ORANGE, "--"),
}
SHOWN = {name: colour for name, (colour, line) in LOOK.items() if line == "-"}
WIDE = {"full_precision": 2.4}  # points: seen under an arm that does as well


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Draw the figure to ``out``; returns it."""
    design = results.design
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            3,
            len(design.leads),
            figsize=(PAGE_WIDTH, 7.2),
            squeeze=False,
            gridspec_kw={"height_ratios": (1, 1, 1.5)},
            layout="constrained",
        )
        for column, lead in enumerate(design.leads):
            losses(axes[0, column], results, lead)
            survival(axes[1, column], results, lead)
            gains(axes[2, column], results, lead, names=column == 0)
            axes[0, column].set_title(f"changed {lead} steps before")
        axes[0, 0].set_ylabel("training loss, one seed")
        axes[1, 0].set_ylabel("share not diverged")
        shared = axes[2, 0].get_xlim()
        for axis in axes[2, 1:]:
            low, high = axis.get_xlim()
            shared = (min(shared[0], low), max(shared[1], high))
        for axis in axes[2]:
            axis.set_xlim(*shared)
        seeds = len(results.used)
        foot(
            figure,
            f"{design.setting.name}: {seeds} seeds that diverge, {seeds * design.placebos} "
            f"placebos. Upper: seed {middle_seed(results)}, whose divergence is the middle one of "
            "all. Pale line: where the unchanged run diverges. Middle: Kaplan-Meier, with the 95 % "
            "interval of the placebo. Lowest: steps gained over the placebo within "
            f"{design.horizon}, mean over seeds and 95 % interval, filled where q < 0.05; dashed: "
            "arms not drawn above.",
            [
                Line2D([], [], color=colour, linewidth=WIDE.get(name), label=words(name))
                for name, colour in SHOWN.items()
            ],
            ncols=5,
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def words(name: str) -> str:
    """An arm's name as a figure has it."""
    return name.replace("_", " ").replace("ln ", "LN ")


def middle_seed(results: Results) -> int | None:
    """The seed in the middle of those that diverge, by step; None if none does."""
    seeds = sorted(results.used, key=lambda seed: results.used[seed])
    return seeds[len(seeds) // 2] if seeds else None


def losses(axis: Axes, results: Results, lead: int) -> None:
    """Losses of the seed in the middle of those that diverge, from the change on."""
    axis.set_yscale("log")
    axis.set_xlabel("steps after the change")
    seed = middle_seed(results)
    if seed is None:
        return
    for name, colour in SHOWN.items():
        if (seed, lead, name) in results.losses:
            series = np.asarray(results.losses[seed, lead, name], float)
            axis.plot(np.where(series < 1e3, series, np.nan), color=colour, linewidth=0.8)
    axis.axvline(lead, color=PALE, linewidth=0.8, zorder=0)


def survival(axis: Axes, results: Results, lead: int) -> None:
    """Kaplan-Meier curves; the placebo with its interval."""
    axis.set_ylim(-0.03, 1.03)
    axis.set_xlabel("steps after the change")
    for name, colour in SHOWN.items():
        arm = results.arms.get((lead, name))
        if arm is None or not arm.times:
            continue
        curve = survival_curve(arm.times)
        end = results.design.horizon
        steps = np.append(curve.steps, end)
        values = [np.append(each, each[-1]) for each in (curve.share, curve.low, curve.high)]
        axis.step(steps, values[0], where="post", color=colour, linewidth=WIDE.get(name))
        if name == "placebo":
            axis.fill_between(
                steps, values[1], values[2], step="post", color=GREY, alpha=0.25, linewidth=0
            )
    axis.axvline(lead, color=PALE, linewidth=0.8, zorder=0)


def gains(axis: Axes, results: Results, lead: int, names: bool) -> None:
    """Steps gained over the placebo: filled where q < 0.05."""
    arms = [arm for (at, _), arm in results.arms.items() if at == lead and arm.name != "placebo"]
    for row, arm in enumerate(reversed(arms)):
        colour, line = LOOK[arm.name]
        gain = arm.gain
        if np.isfinite(gain.low):
            axis.plot([gain.low, gain.high], [row, row], line, color=colour, linewidth=1.2)
        face = colour if arm.q < 0.05 else "white"
        axis.plot(gain.value, row, "o", color=colour, markerfacecolor=face, markersize=4)
    axis.axvline(0, color=GREY, linewidth=0.6)
    labels = [words(arm.name) for arm in reversed(arms)]
    axis.set_yticks(range(len(arms)), labels if names else [""] * len(arms))
    axis.set_xlabel("steps gained")


def runs_of(results: Results, folder: Path) -> Source:
    """The runs behind the figure, which lie in ``folder``."""
    base = base_runs(results.design)
    found = load_points(list(base.values()), Store(folder))
    records = {seed: found[run.id] for seed, run in base.items()}
    changed = stored(folder, [r.id for r in changed_runs(results.design, records).values()])
    return source(STUDY, tier_of(DESIGNS, results.design), [*records.values(), *changed])


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the study's figure again, from stored results."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / f"{STUDY}_{arguments.tier}"
    out = arguments.out or folder / f"{STUDY}.png"
    return draw_stored(STUDY, load, arguments, {out: draw}, folder)


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
