"""zeta and cos before a divergence, beside runs that do not diverge.

    python -m figures.bias_to_divergence [--tier smoke|laptop|cluster] [--out FILE]

Reads the MX runs of studies/claims.py in all settings of the problem, and its watched pairs of the
base; fails if any is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from figures.command import draw_stored, saved, source
from figures.style import BLUE, CAPTION, PAGE_WIDTH, STYLE, VERMILION
from mxsim.stats import median_over_seeds
from mxsim.store import Record
from studies.claims import (
    READINGS,
    STUDY,
    TASKS,
    Key,
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
WORDS = {"script": "near-zero teacher", "unit": "unit-variance teacher"}
ROWS = {
    "zeta": "ζ,\nat the same weights",
    "cos": "cos,\nat the same weights",
    "script": "ζ² of the script,\ntwo trajectories",
}
BEFORE, AFTER = 0.4, 0.08  # of a run's steps, shown on each side of the divergence


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
    found, design = [], results.design
    for condition in design.problems:
        for lr in design.rates:
            for seed in range(design.seeds):
                probed = results.records[Key(reading, task, condition, lr, seed, "mx")]
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


def panel(axis: Axes, runs: Sequence[Series], row: str, zero: int, edges: Array, look: str) -> None:
    """Each run thin, from its divergence or from ``zero`` on; their median thick, with its 95 %."""
    middles = []
    for run in runs:
        if row not in run.values:
            continue
        steps, values = run.values[row]
        at = steps - (zero if run.diverged is None else run.diverged)
        inside = (at >= edges[0]) & (at < edges[-1])
        axis.plot(at[inside], values[inside], color=look, linewidth=0.35, alpha=0.35)
        middles.append(binned(at, values, edges))
    if not middles:
        return
    together = np.stack(middles)
    found = [median_over_seeds(column[np.isfinite(column)]) for column in together.T]
    centres = (edges[:-1] + edges[1:]) / 2
    low, middle, high = (
        np.array([getattr(e, end) for e in found]) for end in ("low", "value", "high")
    )
    axis.fill_between(centres, low, high, color=look, alpha=0.18, linewidth=0)
    axis.plot(centres, middle, color=look, linewidth=1.2)


def draw(results: Results, out: Path) -> Path:
    """A row a measure; a pair of columns a task, runs that diverge and runs that do not."""
    design, used = results.design, []
    width = design.probe_every
    edges = width * np.arange(
        -round(BEFORE * design.base.steps / width), round(AFTER * design.base.steps / width) + 1
    )
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(ROWS), 2 * len(TASKS), figsize=(PAGE_WIDTH, 5.2), sharex=True, sharey="row",
            layout="constrained",
        )  # fmt: skip
        figure.get_layout_engine().set(rect=(0, 0.15, 1, 0.85))  # type: ignore[union-attr,call-arg]
        for t, task in enumerate(TASKS):
            runs = {reading: series(results, task, reading) for reading in READINGS}
            used += [record for each in runs.values() for run in each for record in run.records]
            bad = [r.diverged for each in runs.values() for r in each if r.diverged is not None]
            zero = round(float(np.median(bad))) if bad else design.base.steps - 1
            for side, (diverge, words) in enumerate(((True, "diverge"), (False, "do not"))):
                column = axes[:, 2 * t + side]
                kept = {
                    reading: [run for run in each if (run.diverged is not None) == diverge]
                    for reading, each in runs.items()
                }
                counts = ", ".join(str(len(each)) for each in kept.values())
                column[0].set_title(f"{WORDS[task] if diverge else ''}\n{words}: n = {counts}")
                for axis, row in zip(column, ROWS, strict=True):
                    for reading, each in kept.items():
                        panel(axis, each, row, zero, edges, LOOK[reading][0])
                    axis.axvline(0, color="#999999", linewidth=0.6, zorder=0)
                    axis.grid(axis="y")
                    if not any(row in run.values for each in kept.values() for run in each):
                        axis.text(0.5, 0.5, "none", ha="center", transform=axis.transAxes)
                column[-1].set_xlabel("step − divergence" if diverge else "step − median")
        for axis, words in zip(axes[:, 0], ROWS.values(), strict=True):
            axis.set_ylabel(words)
            axis.set_xlim(edges[0], edges[-1])
        for first in axes[0, 0], axes[2, 0]:
            first.set_yscale("log")
        handles = [Line2D([], [], color=colour, label=words) for colour, words in LOOK.values()]
        figure.legend(handles=handles, loc="lower center", ncols=2, bbox_to_anchor=(0.5, 0.1))
        rates = ", ".join(f"{lr:g}" for lr in design.rates)
        figure.text(
            0.01,
            0.008,
            f"MX E4M3 runs of {design.seeds} seeds in {len(design.problems)} settings at lr "
            f"{rates}, those that never learned left out; n: paper's text, paper's code. Thin:\n"
            f"runs; thick: medians of runs in bins of {width} steps, with 95 % bootstrap intervals."
            " Runs that do not diverge are aligned at the median step at which\nothers of their "
            "task do. Upper rows: quantized against exact gradient at the same weights on the same "
            "batch; lowest: what the script logs,\ntwo runs' gradients, each at its own weights "
            "(base only).",
            **CAPTION,
        )
        command = f"python -m figures.{NAME} --tier {results.tier}"
        return saved(figure, out, source(STUDY, results.tier, used, command))


@dataclass(frozen=True)
class Arguments:
    """Draw zeta and cos before divergences, from stored results."""

    tier: Tier = "laptop"
    """Which of the study's designs."""
    results: Path = Path("results")
    """Where results are stored."""
    out: Path | None = None
    """The file to write; default beside the results."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / f"{STUDY}_{arguments.tier}" / f"{NAME}.png"
    return draw_stored(STUDY, lambda: load(arguments.tier, arguments.results), {out: draw})


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Arguments, prog=f"python -m figures.{NAME}")))
