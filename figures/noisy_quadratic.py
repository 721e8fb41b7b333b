"""The boundary of the noisy quadratic over the gains' variance: derived, traced, full grid.

    python -m figures.noisy_quadratic [--tier smoke|laptop] [--out FILE]

Reads the results of studies/noisy_quadratic.py; fails if they are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from figures.command import FromResults, Source, draw_stored, launch, saved, source, stored, tier_of
from figures.style import BLUE, GREEN, PAGE_WIDTH, PURPLE, STYLE, VERMILION, foot
from mxsim.store import result_id
from studies.noisy_quadratic import (
    DESIGNS,
    ENDS,
    STUDY,
    THRESHOLDS,
    Results,
    Tier,
    families,
    grid_rates,
    load,
    study_name,
)

CURVES = {"mean": (PURPLE, ":"), "mean square": (BLUE, "--"), "almost sure": (GREEN, "-")}
LAWS = {"gaussian": "Gaussian", "two_point": "two-point"}


def draw_panel(axis: Axes, results: Results, family: tuple[str, float]) -> None:
    """One family of columns: grid cells behind, derived curves, traced points in front."""
    design, rates = results.design, grid_rates(results.design)
    curve = dict(zip(ENDS, results.arrays["curves"][families(design).index(family)].T, strict=True))
    variances = np.linspace(0, 1, design.curve)
    for name in THRESHOLDS:
        colour, style = CURVES[name]
        # The almost-sure threshold jumps where a gap opens below it: no line across.
        jumps = 1 + np.flatnonzero(np.abs(np.diff(np.log(curve[name]))) > 0.3)
        axis.plot(
            np.insert(variances, jumps, np.nan),
            np.insert(curve[name], jumps, np.nan),
            color=colour,
            linestyle=style,
            zorder=3,
            label=name,
        )
    axis.fill_between(
        variances,
        curve["stable again"],
        curve["unstable again"],
        color=GREEN,
        alpha=0.15,
        linewidth=0,
        zorder=1,
        label="stable again" if np.isfinite(curve["stable again"]).any() else None,
    )
    chosen = [c for c, g in enumerate(design.gains) if (g.distribution, g.mu) == family]
    s2 = np.array([design.gains[c].s2 for c in chosen])
    failed = results.arrays["grid_failed"][chosen].mean(axis=-1)  # (columns, rates)
    axis.scatter(
        np.repeat(s2, len(rates)),
        np.tile(rates, len(chosen)),
        c=1 - 0.5 * failed.ravel(),
        cmap="gray",
        vmin=0,
        vmax=1,
        edgecolors="#9a9a9a",
        linewidths=0.4,
        marker="s",
        s=11,
        zorder=2,
    )
    found = [results.traced[c][0] for c in chosen]
    value = np.array([each.value for each in found])
    bars = np.array([[each.value - each.low, each.high - each.value] for each in found]).T
    axis.errorbar(
        s2,
        value,
        bars,
        fmt="o",
        color=VERMILION,
        markersize=3,
        elinewidth=1.1,
        capsize=2.2,
        zorder=4,
        label="traced [95 %]",
    )
    law, mu = family
    axis.set_title(f"{LAWS[law]}, μ = {mu:g}".replace(", μ = -", ", μ = −"))
    axis.set_xlim(-0.08, 1.08)
    axis.set_xticks([0, 0.5, 1], ["0", "0.5", "1"])
    axis.set_xlabel("variance s² of the gain")


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Draw the figure to ``out``; returns it."""
    design, search = results.design, results.design.search
    panels = families(design)
    counts = [sum((g.distribution, g.mu) == each for g in design.gains) for each in panels]
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1,
            len(panels),
            figsize=(PAGE_WIDTH, 4.1),
            sharey=True,
            squeeze=False,
            layout="constrained",
            width_ratios=[max(count, 4) for count in counts],
        )
        for axis, family in zip(axes[0], panels, strict=True):
            draw_panel(axis, results, family)
        first = axes[0, 0]
        first.set_yscale("log")
        first.set_ylim(search.low / 1.08, search.high * 1.08)
        first.set_yticks([0.5, 1, 2, 5], ["0.5", "1", "2", "5"])
        first.yaxis.set_minor_formatter(NullFormatter())
        first.set_ylabel("learning rate times curvature")
        entries: dict[str, Any] = {}
        for axis in axes[0]:
            handles, labels = axis.get_legend_handles_labels()
            entries |= dict(zip(labels, handles, strict=True))
        for shade, words in (("#ffffff", "grid: none failed"), ("#808080", "grid: all failed")):
            entries[words] = first.scatter(
                [], [], s=11, marker="s", color=shade, edgecolors="#9a9a9a", linewidths=0.4
            )
        for words, handle in entries.items():
            handle.set_label(words)
        firsts = [column[0] for column in results.traced]
        inside, total = results.within("almost sure")
        foot(
            figure,
            f"Runs of {design.steps} steps; traced with {min(t.n for t in firsts)} to "
            f"{max(t.n for t in firsts)} runs a column (points: median and 95 % interval), grid "
            f"{design.grid_rates} rates × {design.grid_seeds} seeds. "
            f"Over {design.repeats} repetitions {inside} of {total} intervals hold the "
            "almost-sure threshold.",
            list(entries.values()),
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def runs_of(results: Results, folder: Path) -> Source:
    """The runs behind the figure, which lie in ``folder``."""
    return source(
        STUDY, tier_of(DESIGNS, results.design), stored(folder, [result_id(results.design)])
    )


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the study's figure again, from stored results."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / study_name(arguments.tier)
    out = arguments.out or folder / f"{STUDY}.png"
    return draw_stored(STUDY, load, arguments, {out: draw}, folder)


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
