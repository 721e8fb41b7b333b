"""zeta and cos before a divergence, beside runs that do not diverge.

    python -m figures.bias_to_divergence [--tier smoke|laptop|cluster] [--out FILE]

Reads the MX runs of studies/claims.py in all settings of the problem, and its watched pairs of the
base; fails if any is missing.  Two pictures: both tasks, and the place where MX was found to fail.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from figures.command import FromResults, draw_stored, launch, saved, source
from figures.style import BLUE, GREY, PAGE_WIDTH, STYLE, VERMILION, foot
from mxsim.config import ProxyConfig
from mxsim.stats import median_over_seeds
from mxsim.store import Record
from studies.claims import (
    READINGS,
    STUDY,
    TASKS,
    Reading,
    Results,
    Task,
    Tier,
    failed_at,
    load,
)

Array = NDArray[Any]

NAME = "bias_to_divergence"
LOOK = {"paper_text": (VERMILION, "paper's text"), "paper_code": (BLUE, "paper's code")}
WORDS = {
    "script": "near-zero teacher",
    "unit": "unit-variance teacher",
    "searched": "where MX fails oftener",
}
ROWS = {
    "zeta": "ζ at the\nsame weights",
    "cos": "cos at the\nsame weights",
    "script": "ζ² of the script,\ntwo trajectories",
}
BEFORE, AFTER = 0.4, 0.08  # of a run's steps, shown on each side of the divergence
BINS = 25  # over a whole run, unless probes are fewer
FEWEST = 3  # runs that have a value in a bin, for a median of them


@dataclass(frozen=True)
class Series:
    """One MX run: its same-point probes, and every step the script's ratio against the exact run.

    diverged: the step at which it diverged; None if it did not.
    """

    diverged: int | None
    values: dict[str, tuple[Array, Array]]  # row -> (steps, values)
    records: tuple[Record, ...]


def series(results: Results, task: Task, reading: Reading) -> list[Series]:
    """MX runs in all settings of the problem; those that never learned are left out."""
    found = []
    for condition in results.design.problems_of(task):
        for (lr, seed), (mx, _) in results.pairs(reading, task, condition).items():
            probed = results.records[mx]
            bad = failed_at(probed)
            if bad is None and not probed.meta["learned"]:
                continue
            steps = np.asarray(probed.arrays["probe_steps"])
            values = {
                "zeta": (steps, np.asarray(probed.arrays["probe_zeta"], float)[:, 0, 0]),
                "cos": (steps, np.asarray(probed.arrays["probe_cos"], float)[:, 0, 0]),
            }
            records: tuple[Record, ...] = (probed,)
            watched = results.watched.get((reading, task, lr, seed))
            if condition == "base" and watched is not None:
                script = np.asarray(watched.arrays["zeta_script"], float)
                values["script"] = (np.arange(len(script)), script)
                records = (probed, watched)
            found.append(Series(bad, values, records))
    return found


def where_in_words(results: Results, task: Task) -> str:
    """Settings, rates, norm and seeds of a place."""
    design = results.design
    rates, settings = design.rates_of(task), design.problems_of(task)
    seeds = {len(results.pairs("paper_text", task, each)) // len(rates) for each in settings}
    return (
        f"{len(settings)} settings at lr {', '.join(f'{lr:g}' for lr in rates)}, "
        f"{design.base_of(task).norm} norm unless varied, "
        f"{' or '.join(map(str, sorted(seeds)))} seeds"
    )


def binned(at: Array, values: Array, edges: Array) -> Array:
    """Median of the values in each bin, NaN in an empty one."""
    known = np.isfinite(values)
    which = np.digitize(at[known], edges) - 1
    return np.array(
        [
            np.median(values[known][which == i]) if (which == i).any() else np.nan
            for i in range(len(edges) - 1)
        ]
    )


def edges_of(base: ProxyConfig, every: int, diverge: bool) -> Array:
    """Bins of whole probes: around the divergence, or over the whole run."""
    width = every * max(1, round(base.steps / BINS / every))
    first, last = (-BEFORE, AFTER) if diverge else (0, 1)
    start, stop = (round(part * base.steps / width) for part in (first, last))
    return width * np.arange(start, stop + 1)


def panel(axis: Axes, runs: Sequence[Series], row: str, edges: Array, look: str) -> None:
    """Each run thin, from its divergence on if it has one; their median thick, with its 95 %."""
    middles, thin = [], min(0.35, 12 / max(1, len(runs)))
    for run in runs:
        if row not in run.values:
            continue
        steps, values = run.values[row]
        at = steps - (run.diverged or 0)
        inside = (at >= edges[0]) & (at < edges[-1])
        axis.plot(at[inside], values[inside], color=look, linewidth=0.35, alpha=thin)
        middles.append(binned(at, values, edges))
    if not middles:
        return
    columns = [column[np.isfinite(column)] for column in np.stack(middles).T]
    found = [median_over_seeds(each if len(each) >= FEWEST else each[:0]) for each in columns]
    centres = (edges[:-1] + edges[1:]) / 2
    low, middle, high = (
        np.array([getattr(e, end) for e in found]) for end in ("low", "value", "high")
    )
    axis.fill_between(centres, low, high, color=look, alpha=0.2, linewidth=0, zorder=3)
    axis.plot(centres, middle, color=look, linewidth=1.4, zorder=4)


def why_empty(row: str, runs: Sequence[Series], diverge: bool) -> str:
    """What an empty panel says."""
    if not runs:
        return "no run\ndiverges" if diverge else "every run\ndiverges"
    if row == "script":
        which = "none diverges" if diverge else "each diverges"
        return f"of the watched pairs\n(base setting, the two\nhighest rates)\n{which}"
    return "no finite\nprobe"


def draw(results: Results, out: Path, tasks: Sequence[Task] = TASKS) -> Path:
    """A row a measure; a pair of columns a place, runs that diverge and runs that do not."""
    design, used = results.design, []
    rows = {row: words for row, words in ROWS.items() if row != "script" or set(tasks) & set(TASKS)}
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(rows), 2 * len(tasks), figsize=(PAGE_WIDTH, 1.35 * len(rows) + 1.35),
            sharex="col", sharey="row", layout="constrained",
        )  # fmt: skip
        for t, task in enumerate(tasks):
            runs = {reading: series(results, task, reading) for reading in READINGS}
            used += [record for each in runs.values() for run in each for record in run.records]
            bad = [r.diverged for each in runs.values() for r in each if r.diverged is not None]
            for side, diverge in enumerate((True, False)):
                column = axes[:, 2 * t + side]
                edges = edges_of(design.base_of(task), design.probe_every, diverge)
                kept = {
                    reading: [run for run in each if (run.diverged is not None) == diverge]
                    for reading, each in runs.items()
                }
                counts = ", ".join(str(len(each)) for each in kept.values())
                column[0].set_title(
                    f"{WORDS[task] if diverge else ''}\n"
                    f"{'diverge' if diverge else 'do not'}: n = {counts}",
                    loc="left",
                )
                for axis, row in zip(column, rows, strict=True):
                    for reading, each in kept.items():
                        panel(axis, each, row, edges, LOOK[reading][0])
                    if diverge or bad:
                        at = 0.0 if diverge else float(np.median(bad))
                        axis.axvline(at, color=GREY, linewidth=0.6, zorder=0)
                    axis.grid(axis="y")
                    axis.set_xlim(edges[0], edges[-1])
                    together = [run for each in kept.values() for run in each]
                    if not any(row in run.values for run in together):
                        axis.text(
                            0.5, 0.5, why_empty(row, together, diverge), ha="center", va="center",
                            fontsize=6.5, color="#333333", transform=axis.transAxes,
                        )  # fmt: skip
                column[-1].set_xlabel("step − divergence" if diverge else "step")
        for (row, words), axis in zip(rows.items(), axes[:, 0], strict=True):
            axis.set_ylabel(words)
            if row != "cos":
                axis.set_yscale("log")
        where = "; ".join(
            where_in_words(results, task)
            for task in (tasks if len({design.rates_of(t) for t in tasks}) > 1 else tasks[:1])
        )
        lowest = (
            " Lowest: what the script logs, two runs' gradients, each at its own weights (pairs "
            "watched: the base setting at the two highest rates)."
            if "script" in rows
            else ""
        )
        foot(
            figure,
            f"MX E4M3 runs ({where}), those that never learned left out; n: paper's text, paper's "
            "code. Left columns: aligned at the step at which a run begins to diverge; right: over "
            "all steps, the line at the median step at which the others do. Thin: runs; thick: "
            f"medians of runs in bins, where {FEWEST} or more have a value, with 95 % bootstrap "
            "intervals. "
            "ζ and cos: quantized against exact gradient at the same weights on the same batch."
            + lowest,
            [Line2D([], [], color=colour, label=words) for colour, words in LOOK.values()],
        )
        command = f"python -m figures.{NAME} --tier {results.tier}"
        return saved(figure, out, source(STUDY, results.tier, used, command))


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw zeta and cos before divergences, from stored results; the second ends in _searched."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / f"{STUDY}_{arguments.tier}" / f"{NAME}.png"
    second = out.with_name(f"{out.stem}_searched{out.suffix}")
    pictures: dict[Path, Callable[..., Path]] = {
        out: draw,
        second: partial(draw, tasks=("searched",)),
    }
    return draw_stored(STUDY, load, arguments, pictures)


if __name__ == "__main__":
    launch(main, Arguments, NAME)
