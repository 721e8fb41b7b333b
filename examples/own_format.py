"""The phase diagram of a recipe of your own, beside exact training and E4M3.

    python examples/own_format.py

Trains a small network at five learning rates and three depths, four seeds each, in three arms of
equal start and data: exact, MXFP8 E4M3 everywhere, and ``MINE``.  Prints how much oftener one arm
fails than another, in pairs of equal seed, and the rate above which half of the runs fail, traced
by runs of their own; draws results/own_format/diagram.png.  Under a minute on two cores; started
again, or after Ctrl-C, it goes on with what is stored.

Put your recipe in ``MINE``: any site of any named format, by scale rule, block size and rounding
(docs/schemes.md).  An element that has no name yet gets one by docs/howto/add_format.md.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from rich.console import Console

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mxsim import DivergenceRule, ProxyConfig, scheme
from mxsim.boundary import Search
from mxsim.executors import Execution
from mxsim.grid import FAILURES, Grid, Level, config_axis, load_cells, requantize, state_of
from mxsim.outcome import Spike, fatal_spike
from mxsim.progress import execute
from mxsim.stats import mean_over_seeds
from mxsim.store import Store
from mxsim.tracing import Column, stored_traces, trace_columns

MINE = requantize(scheme("gemm_e2m1"), scale_rule="rceil", block_size=16)  # FP4, finer blocks
ARMS = {"exact": scheme("exact"), "e4m3": scheme("all_e4m3"), "mine": MINE}
RATES, DEPTHS = (0.01, 0.02, 0.04, 0.08, 0.16), (1, 2, 4)
MOST_RUNS = 16  # of a trace
LEARNED = DivergenceRule(learned_fraction=0.1)  # held-out loss below a tenth of the trivial one


def is_slow(meta: Mapping[str, Any]) -> bool:
    """Whether a run diverged by no spike: it was back from each in time, but learned too slowly."""
    fatal = fatal_spike([Spike(**each) for each in meta["spikes"]], LEARNED)
    return meta["status"] == "diverged" and fatal is None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is missing, print, draw; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="of each run")
    parser.add_argument("--seeds", type=int, default=4, help="of each cell")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--results", type=Path, default=Path("results"))
    options = parser.parse_args(arguments)
    base = ProxyConfig(width=32, depth=2, batch=64, steps=options.steps, eval_samples=1024)
    depth, lr = config_axis("depth", DEPTHS), config_axis("lr", RATES)
    grid = Grid(base, (depth, lr), ARMS, options.seeds, LEARNED)
    points, store = grid.points(), Store(options.results / "own_format")
    how, console = Execution(workers=options.workers), Console()

    def column(level: Level, arm: str) -> Column:
        search = Search(min(RATES), max(RATES), width=1.5, max_runs=MOST_RUNS)
        return Column(search, lambda rate, seed: grid.point((level,), arm, seed, rate))

    columns = {(level.label, arm): column(level, arm) for level in depth.levels for arm in ARMS}
    if not execute(list(points.values()), store, how, console):
        return 1
    if not trace_columns(columns, store, how, console):
        return 1

    share = {arm: np.zeros((options.seeds, len(DEPTHS), len(RATES))) for arm in ARMS}
    slow = dict.fromkeys(ARMS, 0)
    for cell, record in load_cells(points, store).items():
        at = cell.seed, depth.labels.index(cell.labels[0]), lr.labels.index(cell.labels[1])
        share[cell.arm][at] = state_of(record) in FAILURES
        slow[cell.arm] += record is not None and is_slow(record.meta)
    for arm in ARMS:
        print(
            f"{arm}: {share[arm].sum():.0f} of {share[arm].size} runs fail, {slow[arm]} of them "
            "not unstable but too slow to learn in time"
        )
    for one, other in (("e4m3", "exact"), ("mine", "exact"), ("mine", "e4m3")):
        more = mean_over_seeds((share[one] - share[other]).mean(axis=(1, 2)))
        print(f"share failed, {one} - {other}: {more}, {more.n} seeds")
    for (x, arm), threshold in stored_traces(columns, store).items():
        print(f"half of the runs fail at depth {x}, {arm}: {threshold}, {threshold.n} runs")

    figure, axes = plt.subplots(1, len(ARMS), figsize=(7, 2.6), sharey=True, layout="constrained")
    for axis, arm in zip(axes, ARMS, strict=True):
        seen = share[arm].mean(axis=0).T
        image = axis.imshow(seen, vmin=0, vmax=1, cmap="Oranges", origin="lower", aspect="auto")
        axis.set_xticks(range(len(DEPTHS)), depth.labels)
        axis.set_yticks(range(len(RATES)), lr.labels)
        axis.set(title=arm, xlabel="depth")
    axes[0].set_ylabel("learning rate")
    figure.colorbar(image, label=f"share of {options.seeds} seeds that fail")
    figure.savefig(store.folder / "diagram.png", dpi=160)
    print(f"picture: {store.folder / 'diagram.png'}")
    return 0


if __name__ == "__main__":  # worker processes import this file again
    raise SystemExit(main())
