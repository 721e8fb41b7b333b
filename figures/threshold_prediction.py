"""Critical learning rates: predicted by four theories against those traced by runs.

    python -m figures.threshold_prediction [--tier smoke|laptop] [--out FILE]

Reads the results of studies/threshold_prediction.py; fails if any run is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from figures.command import (
    FromResults,
    Source,
    draw_stored,
    launch,
    saved,
    source,
    stored,
    tier_of,
    traced,
)
from figures.style import BLACK, BLUE, GREEN, ORANGE, PAGE_WIDTH, PURPLE, STYLE, VERMILION, foot
from studies.threshold_prediction import (
    DESIGNS,
    SCHEMES,
    STUDY,
    Results,
    Tier,
    columns,
    forecasts,
    load,
)

COLOURS = dict(zip(SCHEMES, (BLACK, BLUE, VERMILION, ORANGE, GREEN, PURPLE), strict=True))
# The moment that is drawn: the start, but for Adam, whose P means nothing after one step.
MOMENT = {"gradient descent": 0, "heavy ball": 0, "Adam": 1}
WORDS = {
    "exact": "exact",
    "gemm_e4m3": "GEMM, E4M3",
    "ln_only_e4m3": "LN, E4M3",
    "all_e4m3": "all, E4M3",
    "gemm_e2m1": "GEMM, E2M1",
    "all_e2m1": "all, E2M1",
}
THEORIES = {"mean square": ("o", "mean square"), "almost surely": ("s", "almost surely"),
            "descent": ("^", "descent")}  # fmt: skip


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """A panel an optimizer, traced against predicted, to ``out``; returns it."""
    design = results.design
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            1, len(design.arms), figsize=(PAGE_WIDTH, 3.1), layout="constrained"
        )
        for axis, arm in zip(axes, design.arms, strict=True):
            ends: list[float] = []
            for name in design.schemes:
                t = results.thresholds[arm.name, name]
                if not math.isfinite(t.value):
                    continue
                for k, (theory, (marker, _)) in enumerate(THEORIES.items()):
                    p = results.predicted(arm.name, name, theory, MOMENT[arm.name])
                    if not p.n:
                        continue
                    axis.errorbar(
                        t.value,
                        p.value,
                        [[p.value - p.low], [p.high - p.value]],
                        [[t.value - t.low], [t.high - t.value]],
                        fmt=marker,
                        color=COLOURS[name],
                        markersize=3.6 - 0.2 * k,
                        elinewidth=0.5,
                    )
                    ends += [0.8 * p.low, 1.25 * p.high, 0.8 * t.low, 1.25 * t.high]
            low, high = min(ends, default=arm.low), max(ends, default=arm.high)
            axis.plot([low, high], [low, high], color="grey", linewidth=0.7, linestyle=":")
            axis.set_xscale("log")
            axis.set_yscale("log")
            axis.set_xlim(low, high)
            axis.set_ylim(low, high)
            axis.set_title(f"{arm.name}, probed at step {design.moments[MOMENT[arm.name]]}")
            axis.set_xlabel("traced critical rate")
            axis.grid(True)
            for each in (axis.xaxis, axis.yaxis):
                each.set_major_locator(LogLocator(subs=(1, 2, 5)))
                each.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
                each.set_minor_locator(NullLocator())
        axes[0].set_ylabel("predicted critical rate")
        handles = [
            Line2D([], [], linestyle="", marker="s", color=c, label=WORDS[n])
            for n, c in COLOURS.items()
            if n in design.schemes
        ]
        handles += [
            Line2D([], [], linestyle="", marker=m, color="grey", label=words)
            for m, words in THEORIES.values()
        ]
        runs = [t.n for t in results.thresholds.values()]
        foot(
            figure,
            f"Traced by {min(runs)} to {max(runs)} runs each, bars 95 % credible intervals; "
            f"predicted from exact runs at a low rate, median of {design.seeds} seeds, "
            "with 95 % bootstrap intervals; dotted: equal.",
            handles,
            ncols=5,
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def runs_of(results: Results, folder: Path) -> Source:
    """The runs behind the figure, which lie in ``folder``."""
    probed = stored(folder, [task.id for task in forecasts(results.design).values()])
    return source(
        STUDY, tier_of(DESIGNS, results.design), [*probed, *traced(columns(results.design), folder)]
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
