"""Coherent bias and saturation of layer-norm gains against their mean: the clamp cliff.

    python -m figures.gamma_cliff [--tier smoke|full] [--out FILE]

Reads the results of studies/gamma_cliff.py; fails if any is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

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
from mxsim import FORMATS
from mxsim.store import result_id
from studies.gamma_cliff import DESIGNS, STUDY, Results, Tier, cells, load

RULES = {"floor": VERMILION, "even": ORANGE, "rceil": BLUE, "ceil": SKY}
SDS = (BLACK, VERMILION, ORANGE, GREEN, SKY)
FORMAT_COLOURS = (VERMILION, ORANGE, GREEN, SKY, BLUE, PURPLE)


LINES: dict[str, Any] = {  # dashes on the line of a format of equal mantissa
    "mxfp8_e4m3": (0, (3, 5)),
    "mxfp8_e5m2": (4, (3, 5)),
}


def means_axis(axis: Axes, results: Results) -> None:
    """Logarithmic means with the powers of two marked: the cliff comes back every octave."""
    means = results.design.means
    axis.set_xscale("log", base=2)
    axis.set_xlim(means[0], means[-1])
    axis.set_xticks([0.25, 0.5, 1, 2], ["0.25", "0.5", "1", "2"])
    axis.axhline(0, color="#999999", linewidth=0.5)
    for power in (0.25, 0.5, 1, 2):
        axis.axvline(power, color="#dddddd", linewidth=0.5, zorder=0)


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Draw the figure to ``out``; returns it."""
    design = results.design
    means, sd = design.means, design.sds.index(0.01)
    e4m3 = "mxfp8_e4m3"
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, 3, figsize=(PAGE_WIDTH, 4.8), sharex=True, layout="constrained"
        )
        for (row, values), unit in zip(
            enumerate((results.bias, results.saturated)), ("bias, %", "saturated, %"), strict=True
        ):
            for rule, colour in RULES.items():
                axes[row, 0].plot(
                    means,
                    100 * values[e4m3, rule][sd].mean(axis=-1),
                    color=colour,
                    linestyle="--" if rule == "ceil" else "-",  # often on top of rceil
                    label=rule,
                )
            for i, each in enumerate(design.sds):
                axes[row, 1].plot(
                    means,
                    100 * values[e4m3, "floor"][i].mean(axis=-1),
                    color=SDS[i],
                    label=f"sd {each:g}",
                )
            for fmt, colour in zip(design.formats, FORMAT_COLOURS, strict=True):
                top = FORMATS[fmt].element.largest / 2.0 ** FORMATS[fmt].element.emax
                name = fmt.split("_")[-1].upper().removeprefix("MX")
                axes[row, 2].plot(
                    means,
                    100 * values[fmt, "floor"][sd].mean(axis=-1),
                    color=colour,
                    linestyle=LINES.get(fmt, "-"),
                    zorder=3 if fmt in LINES else 2,
                    label=f"{name} (top {top:.4g})",
                )
            axes[row, 0].set_ylabel(unit)
        axes[0, 0].set_title("E4M3, sd 0.01, by scale rule")
        axes[0, 1].set_title("E4M3, floor, by spread of gamma")
        axes[0, 2].set_title("floor, sd 0.01, by format")
        for axis in axes.flat:
            means_axis(axis, results)
        for axis in axes[1]:
            axis.set_xlabel("mean of gamma")
            axis.legend(
                loc="upper center",
                bbox_to_anchor=(0.5, -0.28),
                ncol=2,
                handlelength=1.2,
                labelspacing=0.2,
                columnspacing=0.8,
            )
        foot(
            figure,
            f"Gammas ~ N(mean, sd): {design.draws} draws of {design.width}, mean over draws. Bias: "
            "<x, q> / <x, x> − 1 of gammas x and their quantized values q; saturated: share beyond "
            "the largest code (top, in units of 2$^{emax}$) of their block. No interval is drawn: "
            "lines of the mean alone.",
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

    tier: Tier = "full"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / STUDY
    out = arguments.out or folder / f"{STUDY}_{arguments.tier}.png"
    return draw_stored(STUDY, load, arguments, {out: draw}, folder)


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
