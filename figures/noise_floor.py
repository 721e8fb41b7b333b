"""Same-point zeta against excess loss, batch by batch, with the linear student's law.

    python -m figures.noise_floor [--tier smoke|laptop] [--out FILE]

Reads the results of studies/noise_floor.py; fails if any is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from figures.command import FromResults, Source, draw_stored, launch, saved, source, stored, tier_of
from figures.style import BLACK, BLUE, PAGE_WIDTH, STYLE, VERMILION, foot
from mxsim.store import result_id
from mxsim.theory.noise_floor import Features, crossing_excess, isotropic, zeta
from studies.noise_floor import (
    DESIGNS,
    STUDY,
    Results,
    Series,
    Tier,
    cells,
    load,
    measured_crossing,
    series,
    typical,
)

LOOK = {
    "ln_only_e4m3": (VERMILION, "layer-norm affine"),
    "gemm_e4m3": (BLUE, "GEMM operands"),
}
MARKERS = {"constant": ("o", "none"), "cosine": ("s", None)}


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Draw the figure to ``out``; returns it."""
    design = results.design
    sizes = design.sizes
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(LOOK),
            len(sizes),
            figsize=(PAGE_WIDTH, 4.4),
            sharex=True,
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        for row, (name, (colour, label)) in zip(axes, LOOK.items(), strict=True):
            pooled = series(results, name)
            for b, axis in enumerate(row):
                _measured(axis, results, name, b, colour)
                _crossing(axis, pooled, b, colour)
                _law(axis, results, pooled, b)
                axis.axhline(1, color="#999999", linewidth=0.6, zorder=0)
                axis.set_xscale("log")
                axis.set_yscale("log")
                axis.yaxis.set_major_formatter("{x:g}")
                axis.grid()
                axis.set_axisbelow(True)
            row[0].set_ylabel(f"{label}\nζ")
        for axis, size in zip(axes[0], sizes, strict=True):
            axis.set_title(f"batch {size}")
        for axis in axes[-1]:
            axis.set_xlabel("excess loss")
        base = design.base
        foot(
            figure,
            f"Exact runs (width {base.width}, depth {base.depth}, {base.activation}, lr "
            f"{base.lr:g}), E4M3, {design.seeds} seeds: a marker a probe of a run; bands: 95 % "
            "interval of the loss below which ζ > 1. Excess loss: what is above the floor that "
            "layer norm leaves.",
            axes[0, 0].get_legend_handles_labels()[0],
            ncols=3,
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def _measured(axis: Axes, results: Results, name: str, b: int, colour: str) -> None:
    for schedule, (marker, face) in MARKERS.items():
        settings = [s for s in results.design.settings if s.schedule == schedule]
        points = series(results, name, settings)
        axis.plot(
            points.excess.ravel(),
            points.zeta[..., b].ravel(),
            marker,
            color=colour,
            markerfacecolor=face or colour,
            markersize=2.6,
            markeredgewidth=0.6,
            alpha=0.75,
            label=f"measured, {schedule} rate",
        )


def _law(axis: Axes, results: Results, points: Series, b: int) -> None:
    """The law at the median q2, isotropic and with three measured numbers; marks where it is 1."""
    size, q2 = results.design.sizes[b], float(np.nanmedian(points.added))
    e = np.geomspace(np.nanmin(points.excess), np.nanmax(points.excess), 100)
    law: tuple[tuple[str, str, Features], ...] = (
        ("--", "law, isotropic features", isotropic(results.design.base.width)),
        ("-", "law, three measured numbers", typical(points.features)),
    )
    for style, label, features in law:
        axis.plot(
            e, zeta(e, q2, results.noise, size, features), style, color=BLACK, label=label, zorder=3
        )
        at = crossing_excess(q2, results.noise, size, features)
        if e[0] < at < e[-1]:
            axis.plot(at, 1, "v", color=BLACK, markersize=5, zorder=4)
    axis.plot([], [], "v", color=BLACK, markersize=5, label="ζ crosses 1, by the law")


def _crossing(axis: Axes, points: Series, b: int, colour: str) -> None:
    """A band: the interval of the loss below which zeta > 1, as measured."""
    found = measured_crossing(points, b)
    low, high = np.nanmin(points.excess), np.nanmax(points.excess)
    label = "ζ crosses 1, measured (95 %)"
    if not 0 < found.value < np.inf:  # nowhere, or everywhere
        axis.axvspan(np.nan, np.nan, color=colour, alpha=0.15, linewidth=0, label=label)
        return
    axis.axvspan(
        float(np.clip(found.low, low, high)),
        float(np.clip(found.high, low, high)),
        color=colour,
        alpha=0.15,
        linewidth=0,
        label=label,
        zorder=0,
    )
    axis.axvline(found.value, color=colour, linewidth=0.8, zorder=1)


def runs_of(results: Results, folder: Path) -> Source:
    """The runs behind the figure, which lie in ``folder``."""
    return source(
        STUDY,
        tier_of(DESIGNS, results.design),
        stored(folder, [result_id(cell) for cell in cells(results.design)]),
    )


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the study's figure again, from stored results."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / STUDY
    out = arguments.out or folder / f"{STUDY}_{arguments.tier}.png"
    return draw_stored(STUDY, load, arguments, {out: draw}, folder)


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
