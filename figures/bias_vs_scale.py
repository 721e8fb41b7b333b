"""Same-point zeta against width, depth, batch, block size and format, three arms.

    python -m figures.bias_vs_scale [--tier smoke|laptop] [--out FILE]

Reads the results of studies/bias_vs_scale.py; fails if any run is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from figures.command import FromResults, Source, draw_stored, launch, saved, source, stored, tier_of
from figures.style import BLUE, ORANGE, PAGE_WIDTH, STYLE, VERMILION, bare_name, foot
from mxsim.stats import median_over_seeds
from studies.bias_vs_scale import (
    ARMS,
    DESIGNS,
    STUDY,
    Results,
    Tier,
    load,
    over_probes,
    points,
    rows,
)

LOOK = {
    "gemm": (BLUE, "o", "GEMM operands (12 sites)"),
    "ln_only": (VERMILION, "s", "layer-norm affine (2 sites)"),
    "all": (ORANGE, "^", "all 14 sites"),
}


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Draw the figure to ``out``; returns it."""
    design = results.design
    panels = rows(results)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1,
            len(panels),
            figsize=(PAGE_WIDTH, 2.9),
            sharey=True,
            layout="constrained",
            width_ratios=[max(len(values), 2) for values in panels.values()],
        )
        for axis, (field, values) in zip(axes, panels.items(), strict=True):
            for i, name in enumerate(ARMS):
                colour, marker, label = LOOK[name]
                found = [
                    median_over_seeds(over_probes(results, key, f"{name} {which}", 0.5))
                    for _, key, which in values
                ]
                at = np.arange(len(values)) + 0.16 * (i - 1)
                middle = np.array([each.value for each in found])
                ends = np.array([[e.value - e.low, e.high - e.value] for e in found]).T
                axis.errorbar(
                    at,
                    middle,
                    ends,
                    fmt=marker,
                    color=colour,
                    markersize=3.5,
                    label=label,
                    elinewidth=0.8,
                )
            axis.set_xticks(
                np.arange(len(values)),
                [bare_name(word) if field == "format" else word for word, _, _ in values],
                rotation=60 if field == "format" else 0,
                ha="right" if field == "format" else "center",
            )
            axis.set_xlim(-0.6, len(values) - 0.4)
            axis.set_title(field)
            axis.set_yscale("log")
            axis.grid(axis="y")
        axes[0].set_ylabel("ζ, median of a run's probes")
        base = design.base
        foot(
            figure,
            f"Along exact runs (width {base.width}, depth {base.depth}, batch {base.batch}, "
            f"{base.activation}, lr {base.lr:g}), E4M3 unless said; median of {design.seeds} "
            "seeds, 95 % bootstrap intervals. ζ: quantized against exact gradient at the same "
            "weights on the same batch.",
            axes[0].get_legend_handles_labels()[0],
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def runs_of(results: Results, folder: Path) -> Source:
    """The runs behind the figure, which lie in ``folder``."""
    return source(
        STUDY,
        tier_of(DESIGNS, results.design),
        stored(folder, [point.id for point in points(results.design).values()]),
    )


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
