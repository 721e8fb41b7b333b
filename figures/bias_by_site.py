"""Shapley shares of the gradient error by group of sites, its parts; gammas, zeta beside loss.

    python -m figures.bias_by_site [--tier smoke|laptop] [--out FILE]

Reads the results of studies/bias_by_site.py; fails if any is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from numpy.typing import NDArray

from figures.command import FromResults, Source, draw_stored, launch, saved, source, stored, tier_of
from figures.style import BLUE, GREEN, ORANGE, PAGE_WIDTH, PURPLE, SKY, STYLE, VERMILION, foot
from mxsim import FORMATS, SiteFormat
from mxsim.attribution import GROUPS
from mxsim.bias import saturated_share
from mxsim.store import result_id
from studies.bias_by_site import (
    DESIGNS,
    PARTS,
    SCHEMES,
    STUDY,
    TRAJECTORIES,
    Results,
    Tier,
    cells,
    load,
    shapley_share,
)

Array = NDArray[Any]
RUNS = {"all_e4m3": "MX"}
GROUP_COLOURS = (BLUE, SKY, GREEN, VERMILION, PURPLE)
LOOK = {
    "gemm_e4m3": (BLUE, "GEMM operands"),
    "ln_only_e4m3": (VERMILION, "layer-norm affine"),
    "all_e4m3": (ORANGE, "all 14 sites"),
}


def bars(axis: Axes, values: Array, colours: tuple[str, ...], labels: list[str]) -> None:
    """values (seeds, moments, series): medians as bars, quartiles over seeds as whiskers."""
    series = values.shape[2]
    at = np.arange(values.shape[1])
    low, middle, high = np.nanquantile(values, (0.25, 0.5, 0.75), axis=0)
    width = 0.8 / series
    for s in range(series):
        offset = (s - (series - 1) / 2) * width
        axis.bar(at + offset, middle[:, s], width, color=colours[s], label=labels[s])
        axis.errorbar(
            at + offset,
            middle[:, s],
            np.stack([middle[:, s] - low[:, s], high[:, s] - middle[:, s]]),
            fmt="none",
            ecolor="#333333",
            elinewidth=0.6,
        )
    axis.axhline(0, color="#999999", linewidth=0.5)


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Draw the figure to ``out``; returns it."""
    design = results.design
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(TRAJECTORIES), 3, figsize=(PAGE_WIDTH, 4.8), sharex=True, sharey="col",
            layout="constrained",
        )  # fmt: skip
        for row, t in enumerate(TRAJECTORIES):
            arrays = results.by_trajectory[t]
            bars(axes[row, 0], shapley_share(arrays), GROUP_COLOURS, list(GROUPS))
            colours = tuple(LOOK[name][0] for name in SCHEMES)
            labels = [LOOK[name][1] for name in SCHEMES]
            for column, part in ((1, "systematic"), (2, "noise")):
                bars(axes[row, column], arrays["parts"][..., PARTS.index(part)], colours, labels)
            axes[row, 0].set_ylabel(f"along the {RUNS.get(t, t)} run")
            for axis in axes[row]:
                axis.set_xticks(np.arange(len(design.moments)), [str(m) for m in design.moments])
        axes[0, 0].set_title("Shapley share of ζ²")
        axes[0, 1].set_title("systematic, |E ε| / |E g|")
        axes[0, 2].set_title("random part of a batch / |E g|")
        for column, columns in ((0, 3), (1, 1), (2, 1)):
            axes[1, column].set_xlabel("step")
            axes[1, column].legend(
                loc="upper center", bbox_to_anchor=(0.5, -0.25), ncol=columns, handlelength=1.0
            )
        foot(
            figure,
            f"E4M3, lr {design.base.lr:g}: medians of {design.seeds} seeds, whiskers: quartiles "
            f"over seeds. ε: quantized less exact gradient g at the same weights; E: mean over "
            f"{design.averaged} batches. Shares of ζ² = |ε|² / |g|² by group of sites.",
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def draw_mechanism(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Gammas against the code grid, and zeta beside loss, |g| and |E g|, to ``out``."""
    design, element = results.design, FORMATS["mxfp8_e4m3"].element
    steps = np.arange(1, design.base.steps // design.trace_every + 1) * design.trace_every
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(TRAJECTORIES), 2, figsize=(PAGE_WIDTH, 4.6), sharex="col", squeeze=False,
            layout="constrained",
        )  # fmt: skip
        for row, t in enumerate(TRAJECTORIES):
            arrays = results.by_trajectory[t]
            gammas = arrays["gammas"]
            finite = gammas[np.isfinite(gammas)]
            low, high = np.quantile(finite, (0.002, 0.998))
            bins = np.linspace(low - 0.02, high + 0.02, 81)
            histogram = axes[row, 0]
            site = SiteFormat("mxfp8_e4m3")
            for i, colour in zip(range(len(design.moments)), (SKY, BLUE, VERMILION), strict=True):
                values = gammas[:, i]
                share = np.mean([saturated_share(v, site) for each in values for v in each])
                histogram.hist(
                    values.ravel(),
                    bins,
                    histtype="step",
                    density=True,
                    color=colour,
                    label=f"step {design.moments[i]}: {100 * share:.0f} % saturated",
                )
            positive = element.values[(element.values >= 1) & (element.values < 2)]
            for octave in (0.25, 0.5, 1.0):  # scale of a block whose maximum lies in the octave
                for code in positive:
                    if bins[0] < code * octave < bins[-1]:
                        histogram.axvline(code * octave, color="#cccccc", linewidth=0.6, zorder=0)
                top = element.largest / 2.0**element.emax * octave
                if top < bins[-1] and 2 * octave > bins[0]:
                    histogram.axvspan(
                        max(top, bins[0]), min(2 * octave, bins[-1]), color=ORANGE, alpha=0.15
                    )
            histogram.set_xlim(bins[0], bins[-1])
            histogram.set_ylabel(f"along the {RUNS.get(t, t)} run\ndensity of gamma")
            histogram.set_ylim(top=1.4 * histogram.get_ylim()[1])  # room for the legend
            histogram.legend(loc="upper left", fontsize=7)
            traced = np.nanmedian(arrays["trace"], axis=0)
            for k, (name, colour, style) in enumerate(
                (
                    ("loss", GREEN, "-"),
                    ("ζ", VERMILION, "-"),
                    ("|g|, rms of batches", BLUE, "--"),
                    ("|E g|", BLUE, "-"),
                )
            ):
                axes[row, 1].plot(steps, traced[:, k], style, color=colour, label=name)
            axes[row, 1].set_yscale("log")
            axes[row, 1].grid(axis="y")
        axes[0, 0].set_title("gammas (grey: codes; shaded: clamped)")
        axes[0, 1].set_title("all 14 sites")
        axes[0, 1].set_ylabel("loss; ζ; gradient norm")
        axes[1, 1].set_ylabel("loss; ζ; gradient norm")
        axes[1, 0].set_xlabel("gamma")
        axes[1, 1].set_xlabel("step")
        axes[1, 1].legend(loc="upper center", bbox_to_anchor=(0.5, -0.25), ncols=4)
        foot(
            figure,
            f"E4M3, {design.seeds} seeds, lr {design.base.lr:g}. Left: the gammas of all seeds and "
            "blocks; grey: E4M3 codes at the scale of a block whose maximum lies in their octave. "
            f"Right: medians over seeds; E: mean over {design.averaged} batches.",
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


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
    second = out.with_name(f"{out.stem}_mechanism{out.suffix}")
    pictures = {out: draw, second: draw_mechanism}
    return draw_stored(STUDY, load, arguments, pictures, folder)


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
