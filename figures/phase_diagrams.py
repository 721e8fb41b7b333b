"""A phase diagram as maps: share of runs that fail, what became of each run, first bad step.

    python -m figures.phase_diagrams --diagram lr_depth [--tier smoke|laptop|cluster] [--partial]

Reads the results of studies/phase_diagrams.py; fails if any run is missing, unless ``--partial``,
which draws what is there and hatches the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_args

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from figures.command import FromResults, Source, draw_stored, launch, saved, source, tier_of, traced
from figures.loss_lines import interval_of_shares
from figures.style import (
    BLACK,
    GREEN,
    ORANGE,
    PAGE_WIDTH,
    PURPLE,
    SKY,
    SMALLEST,
    STYLE,
    VERMILION,
    foot,
)
from mxsim.boundary import Threshold
from mxsim.grid import State
from studies.phase_diagrams import ARMS, STUDY, Name, Results, Tier, diagram, load

Array = NDArray[Any]
Predictions = Mapping[tuple[str, str], float]  # (x label, arm) -> predicted critical rate

# Colour and mark of each state: no two alike, in colour or in grey.
LOOK: Mapping[State, tuple[str, str, str]] = {
    "ok": ("#e8e8e8", "", "ok"),
    "recovered": (SKY, "o", "spiked and recovered"),
    "diverged": (ORANGE, "^", "diverged"),
    "nonfinite": (VERMILION, "x", "non-finite"),
    "failed": (PURPLE, "$?$", "failed (an error)"),
    "not run": ("white", "", "not run"),
}
SHARES = LinearSegmentedColormap.from_list("shares", ["#f7f7f7", ORANGE, "#5b1a00"])
STEPS = "viridis"
HATCH = "/////"


def tile(axis: Axes, x: float, y: float, w: float, h: float, colour: Any, **extra: Any) -> None:
    """A rectangle whose lower left corner is (x, y)."""
    axis.add_patch(Rectangle((x, y), w, h, facecolor=colour, linewidth=0, **extra))


def no_result(axis: Axes, x: float, y: float, w: float, h: float) -> None:
    """A hatched rectangle: not run."""
    axis.add_patch(
        Rectangle((x, y), w, h, facecolor="white", edgecolor="#999999", hatch=HATCH, linewidth=0)
    )


def blank(axis: Axes, i: int, j: int, states: list[State]) -> None:
    """A cell without a result: hatched if not run, in the look of failure if its runs raised."""
    if "failed" in states:
        tile(axis, i - 0.5, j - 0.5, 1, 1, LOOK["failed"][0])
        axis.text(i, j, "?", ha="center", va="center", fontsize=SMALLEST)
    else:
        no_result(axis, i - 0.5, j - 0.5, 1, 1)


def draw_shares(axis: Axes, results: Results, arm: str) -> None:
    """Cells coloured by the share of runs that failed, the counts in them."""
    it = results.diagram
    for i, x in enumerate(it.x.labels):
        for j, y in enumerate(it.y.labels):
            failed = [f for f in results.failed(x, y, arm) if f is not None]
            if not failed:
                blank(axis, i, j, results.states(x, y, arm))
                continue
            share = sum(failed) / len(failed)
            tile(axis, i - 0.5, j - 0.5, 1, 1, SHARES(share))
            axis.text(
                i,
                j,
                f"{sum(failed)}/{len(failed)}",
                ha="center",
                va="center",
                fontsize=SMALLEST,
                color="white" if share > 0.6 else "#333333",
                path_effects=[withStroke(linewidth=1.6, foreground=SHARES(share))],
                zorder=7,  # read across the boundary's line
            )


def draw_runs(axis: Axes, results: Results, arm: str) -> None:
    """Cells cut into one tile a seed, each in the look of what became of it."""
    it = results.diagram
    seeds = it.grid.seeds
    across = math.ceil(math.sqrt(seeds))
    down = math.ceil(seeds / across)
    w, h = 0.92 / across, 0.86 / down
    for i, x in enumerate(it.x.labels):
        for j, y in enumerate(it.y.labels):
            for k, state in enumerate(results.states(x, y, arm)):
                left = i - 0.46 + (k % across) * w
                low = j - 0.43 + (k // across) * h
                colour, mark, _ = LOOK[state]
                if state == "not run":
                    no_result(axis, left, low, w * 0.92, h * 0.88)
                else:
                    tile(axis, left, low, w * 0.92, h * 0.88, colour)
                if mark:
                    axis.plot(
                        left + w * 0.46,
                        low + h * 0.44,
                        marker=mark,
                        linestyle="",
                        color=BLACK,
                        markersize=1.8,
                        markeredgewidth=0.5,
                        fillstyle="none" if mark == "o" else "full",
                    )


def draw_steps(axis: Axes, results: Results, arm: str, norm: Normalize) -> None:
    """Cells coloured by the median first bad step; a dot where no run failed."""
    it, colours = results.diagram, plt.get_cmap(STEPS)
    for i, x in enumerate(it.x.labels):
        for j, y in enumerate(it.y.labels):
            step = results.first_bad_step(x, y, arm)
            if all(f is None for f in results.failed(x, y, arm)):
                blank(axis, i, j, results.states(x, y, arm))
            elif math.isnan(step):
                axis.plot(i, j, ".", color="#aaaaaa", markersize=2.5)
            else:
                tile(axis, i - 0.5, j - 0.5, 1, 1, colours(norm(step)))


def position(results: Results, x: str, arm: str, lr: float) -> float:
    """Where a learning rate lies on the y axis of column ``x``, in levels; log-interpolated."""
    it = results.diagram
    level = next(each for each in it.x.levels if each.label == x)
    rates = [it.grid.point((level, y), arm, 0).config.lr for y in it.y.levels]
    logs = np.log(rates)
    slope = (logs[-1] - logs[0]) / (len(logs) - 1)
    if lr < rates[0] or lr > rates[-1]:  # beyond the axis: straight on
        end = 0 if lr < rates[0] else len(rates) - 1
        return float(end + (math.log(lr) - logs[end]) / slope)
    return float(np.interp(math.log(lr), logs, np.arange(len(logs))))


def draw_boundary(axis: Axes, results: Results, arm: str) -> None:
    """The traced rates at which half of the runs fail, with their intervals.

    An interval that leaves the range that was searched ends in a triangle at the edge.
    """
    bottom, top = -0.5, len(results.diagram.y.labels) - 0.5
    for i, x in enumerate(results.diagram.x.labels):
        if (x, arm) not in results.thresholds:
            continue
        t: Threshold = results.thresholds[x, arm]
        low = bottom if t.low == 0 else position(results, x, arm, t.low)
        high = top if math.isinf(t.high) else position(results, x, arm, t.high)
        axis.plot([i + 0.36, i + 0.36], [low, high], color=GREEN, linewidth=0.9, zorder=5)
        if math.isnan(t.value):
            for at, mark, here in ((bottom, "v", t.low == 0), (top, "^", math.isinf(t.high))):
                if here:
                    axis.plot(
                        i + 0.36, at, mark, color=GREEN, markersize=3, clip_on=False, zorder=6
                    )
            continue
        middle = position(results, x, arm, t.value)
        axis.plot([i - 0.36, i + 0.36], [middle, middle], color="white", linewidth=2.2, zorder=4)
        axis.plot([i - 0.36, i + 0.36], [middle, middle], color=GREEN, linewidth=1.4, zorder=5)


def draw_predictions(axis: Axes, results: Results, arm: str, predicted: Predictions) -> None:
    """Predicted critical rates as diamonds; on the edge where they lie beyond it."""
    bottom, top = -0.5, len(results.diagram.y.labels) - 0.5
    for i, x in enumerate(results.diagram.x.labels):
        if (x, arm) in predicted:
            at = min(max(position(results, x, arm, predicted[x, arm]), bottom), top)
            axis.plot(
                i - 0.2,
                at,
                "D",
                color=BLACK,
                markerfacecolor="white",
                markersize=3.2,
                zorder=6,
                clip_on=False,
            )


def frame(axis: Axes, results: Results) -> None:
    """Ticks and limits."""
    it = results.diagram
    axis.set_xlim(-0.5, len(it.x.labels) - 0.5)
    axis.set_ylim(-0.5, len(it.y.labels) - 0.5)
    words = [label.removeprefix("mx") for label in it.x.labels]
    long = max(map(len, words)) > 5 or sum(map(len, words)) > 22
    axis.set_xticks(
        range(len(words)), words, rotation=45 if long else 0, ha="right" if long else "center"
    )
    axis.set_yticks(range(len(it.y.labels)), it.y.labels)
    axis.tick_params(length=0, pad=2)


def draw(
    results: Results,
    out: Path,
    predicted: Predictions | None = None,
    folder: Path | None = None,
) -> Path:
    """Draw the diagram to ``out``; returns it.  ``predicted`` thresholds are laid over it.

    folder: where the runs lie; default that of ``out``.
    """
    it = results.diagram
    base = it.grid.base
    norm = Normalize(0, base.steps)
    titles = ("share of runs that fail", "each run", "first bad step, median")
    height = 2.1 + 0.42 * max(len(it.y.labels), 5)
    with plt.rc_context({**STYLE, "axes.spines.top": True, "axes.spines.right": True}):
        figure, axes = plt.subplots(
            2,
            3,
            figsize=(PAGE_WIDTH, height),
            sharex=True,
            sharey=True,
            layout="constrained",
        )
        for row, arm in zip(axes, ARMS, strict=True):
            draw_shares(row[0], results, arm)
            draw_runs(row[1], results, arm)
            draw_steps(row[2], results, arm, norm)
            for axis, title in zip(row, titles, strict=True):
                frame(axis, results)
                if arm == ARMS[0]:
                    axis.set_title(title)
            row[0].set_ylabel(
                f"{'exact' if arm == 'exact' else 'MX (14 sites)'}\n{axis_name(it.y.name)}"
            )
            if results.thresholds:
                draw_boundary(row[0], results, arm)
            if predicted:
                draw_predictions(row[0], results, arm, predicted)
        for axis in axes[1]:
            axis.set_xlabel(axis_name(it.x.name))
        mappable = plt.cm.ScalarMappable(norm, STEPS)
        bar = figure.colorbar(mappable, ax=axes[:, 2], shrink=0.6, aspect=24, pad=0.02)
        bar.outline.set_linewidth(0.4)
        bar.ax.tick_params(length=2)
        bar.set_label("step (at the end: never learned)")
        handles = legend_handles(bool(results.thresholds), bool(predicted))
        foot(figure, caption(results), handles)
        return saved(figure, out, runs_of(results, folder or out.parent))


def axis_name(name: str) -> str:
    """An axis' field in words."""
    return {"lr": "learning rate"}.get(name, name.replace("_", " "))


def legend_handles(traced: bool, predicted: bool) -> list[Any]:
    """What the looks mean."""
    handles: list[Any] = []
    for state, (colour, mark, words) in LOOK.items():
        if state == "not run":
            handles.append(
                Patch(facecolor="white", edgecolor="#999999", hatch=HATCH, label=words, linewidth=0)
            )
        else:
            handles.append(
                Line2D(
                    [],
                    [],
                    linestyle="",
                    marker="s",
                    markersize=6,
                    color=colour,
                    label=f"{words}",
                )
                if not mark
                else Line2D(
                    [],
                    [],
                    linestyle="-",
                    linewidth=6,
                    color=colour,
                    marker=mark,
                    markersize=3,
                    markeredgecolor=BLACK,
                    markerfacecolor="none" if mark == "o" else BLACK,
                    solid_capstyle="butt",
                    label=words,
                )
            )
    if traced:
        handles.append(Line2D([], [], color=GREEN, label="half of the runs fail (traced)"))
    if predicted:
        handles.append(
            Line2D(
                [],
                [],
                linestyle="",
                marker="D",
                color=BLACK,
                markerfacecolor="white",
                label="predicted (on the edge: beyond)",
            )
        )
    return handles


def caption(results: Results) -> str:
    """What was run, n, intervals."""
    it = results.diagram
    b = it.grid.base
    text = (
        f"{results.name}: {it.grid.seeds} seeds a cell, paired between arms "
        f"({interval_of_shares(it.grid.seeds)}). Unless varied: width "
        f"{b.width}, depth {b.depth}, batch {b.batch}, {b.steps} steps, {b.activation}, {b.norm} "
        f"norm, lr {b.lr:g}, MXFP8 E4M3 (scale rule floor, ties to even, blocks of 32)."
    )
    if results.thresholds:
        runs = [t.n for t in results.thresholds.values()]
        words = f"{min(runs)}" if min(runs) == max(runs) else f"{min(runs)} to {max(runs)}"
        text += (
            f" Traced by {words} runs a column, each with another seed; bars: "
            "95 % credible interval, a triangle where it leaves the range searched."
        )
    return text


def runs_of(results: Results, folder: Path) -> Source:
    """The runs behind the diagram: of its cells, and of the boundaries traced through them."""
    name, it = results.name, results.diagram
    tier = tier_of({tier: diagram(name, tier) for tier in get_args(Tier)}, it)
    known = results.thresholds  # of diagrams with a learning rate only
    columns = it.columns() if known else {}
    drawn = {key: column for key, column in columns.items() if key in known}
    records = [*results.records.values(), *traced(drawn, folder)]
    command = f"python -m figures.{STUDY} --diagram {name} --tier {tier}"
    return source(STUDY, tier, records, command)


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw a phase diagram again, from stored results."""

    diagram: Name = "lr_depth"
    """Which."""
    tier: Tier = "laptop"
    partial: bool = False
    """Draw what is there; the rest is hatched."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / f"{STUDY}_{arguments.tier}"
    out = arguments.out or folder / f"{arguments.diagram}.png"
    return draw_stored(
        f"{STUDY} --diagrams {arguments.diagram}",
        partial(load, arguments.diagram, partial=arguments.partial),
        arguments,
        {out: draw},
        folder,
    )


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
