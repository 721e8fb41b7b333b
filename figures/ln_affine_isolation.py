"""Losses, zeta, cos and gamma saturation over steps, four arms, spread over seeds.

    python -m figures.ln_affine_isolation [--tier smoke|laptop|long|deep] [--out FILE]

Reads the results of studies/ln_affine_isolation.py; fails if any run is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from figures.command import FromResults, Source, draw_stored, launch, saved, source, tier_of
from figures.style import BLACK, BLUE, ORANGE, PAGE_WIDTH, STYLE, VERMILION, foot
from studies.ln_affine_isolation import (
    ARMS,
    DESIGNS,
    QUANTIZED,
    STUDY,
    Results,
    Tier,
    load,
    study_name,
)

Array = NDArray[Any]

LOOK = {
    "exact": (BLACK, "-", "exact"),
    "gemm_e4m3": (BLUE, "-", "GEMM operands (12 sites)"),
    "ln_only_e4m3": (VERMILION, "-", "layer-norm affine (2 sites)"),
    "all_e4m3": (ORANGE, "--", "all 14 sites"),
}


def band(axis: Axes, steps: Array, values: Array, arm: str) -> None:
    """Median over seeds and the 10-90 % range; values (seeds, steps), NaN where a run had ended."""
    colour, line, label = LOOK[arm]
    alive = np.isfinite(values).any(axis=0)
    steps, values = steps[alive], values[:, alive]
    low, middle, high = np.nanquantile(values, (0.1, 0.5, 0.9), axis=0)
    axis.fill_between(steps, low, high, color=colour, alpha=0.16, linewidth=0)
    axis.plot(steps, middle, line, color=colour, label=label)


def smooth(losses: Array, window: int = 10) -> Array:
    """Median of consecutive windows of steps, (seeds, steps) -> (seeds, steps // window)."""
    whole = losses.shape[1] // window * window
    blocks = losses[:, :whole].reshape(len(losses), -1, window)
    return np.asarray(np.median(blocks, axis=2))


def draw(results: Results, out: Path) -> Path:
    """Draw the figure to ``out`` (any format matplotlib writes); returns ``out``."""
    design = results.design
    rates, seeds = design.rates, design.seeds
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            4, len(rates), figsize=(PAGE_WIDTH, 7.2), sharex=True, squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for row in axes[1:]:  # losses differ too much to share a scale
            for axis in row[1:]:
                axis.sharey(row[0])
                axis.tick_params(labelleft=False)
        for column, lr in enumerate(rates):
            loss, zeta, cos, saturated = axes[:, column]
            loss.set_title(f"learning rate {lr:g}")
            probe_steps = results.records["exact", lr, 0].arrays["probe_steps"]
            for arm in ARMS:
                losses = smooth(results.series("losses", arm, lr))
                band(loss, 10 * np.arange(losses.shape[1]) + 5, losses, arm)
                share = results.series("probe_gamma_saturated", arm, lr).mean(axis=2)
                band(saturated, probe_steps, share, arm)
            for arm in QUANTIZED:
                values = results.probe("zeta", arm, lr)
                # Zero at the start (gamma = 1 is on the grid) has no place on a log axis.
                band(zeta, probe_steps, np.where(values > 0, values, np.nan), arm)
                band(cos, probe_steps, results.probe("cos", arm, lr), arm)
            loss.axhline(1 / design.base.width, color="grey", linewidth=0.7, linestyle=":")
            zeta.axhline(1, color="grey", linewidth=0.7, linestyle=":")
            cos.axhline(0, color="grey", linewidth=0.7, linestyle=":")
            loss.set_yscale("log")
            zeta.set_yscale("log")
            saturated.set_ylim(-0.02, 1.02)
            saturated.set_xlabel("step")
            for axis in axes[:, column]:
                axis.grid(True, axis="y")
        for row, label in enumerate(
            ("training loss", "ζ = |g̃ − g| / |g|", "cos(g̃, g)", "share of gammas\nsaturated")
        ):
            axes[row, 0].set_ylabel(label)
        base = design.base
        foot(
            figure,
            f"MXFP8 E4M3, scale rule floor; {base.activation} student, width {base.width}, depth "
            f"{base.depth}, batch {base.batch}, Adam. Lines: median of {seeds} seeds; bands: "
            "10–90 % of seeds. ζ and cos along each arm's own run, at the same point. Dotted: the "
            "floor 1/d that layer norm leaves; ζ = 1; cos = 0. Saturation in the exact and GEMM "
            "arms is what would saturate.",
            axes[0, 0].get_legend_handles_labels()[0],
        )
        figure.align_ylabels(axes[:, 0])
        return saved(figure, out, runs_of(results))


def runs_of(results: Results) -> Source:
    """The runs behind the figure."""
    return source(STUDY, tier_of(DESIGNS, results.design), results.records.values())


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the figure of the layer-norm-affine study from stored results."""

    tier: Tier = "laptop"
    out: Path | None = None
    """The file to write; default figure.png beside the results."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / study_name(arguments.tier) / "figure.png"
    return draw_stored(STUDY, load, arguments, {out: draw})


if __name__ == "__main__":
    launch(main, Arguments, "ln_affine_isolation")
