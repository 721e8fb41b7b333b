"""How fast a sweep goes: runs an hour, two processes against one, overhead beside training.

    python -m benchmarks.sweep [--sample 32] [--rounds 2]

The sweep is a 16 x 16 diagram (learning rate x depth of 1 to 4, exact and MX alternating) at width
64, batch 128, 300 steps: 256 runs, of which a random sample is run, on one process and on
two by turns.  Overhead is the time of a run of one process beside ``Run.seconds``, its training
and evaluation: making data and buffers, judging, storing, handing over.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from mxsim import ProxyConfig, scheme
from mxsim.executors import Pool, process_pool
from mxsim.store import Store
from mxsim.sweep import Point, compile_kernels, run_points


def diagram() -> list[Point]:
    """The 256 runs."""
    base = ProxyConfig(width=64, batch=128, steps=300, eval_samples=4096)
    return [
        Point(
            replace(base, lr=1e-3 * 1.3**i, depth=1 + j % 4, seed=j // 4),
            scheme("all_e4m3" if (i + j) % 2 else "exact"),
        )
        for i in range(16)
        for j in range(16)
    ]


def timed(points: list[Point], pool: Pool) -> tuple[float, float]:
    """(seconds of all, seconds of training in them), workers being up."""
    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder))
        started = time.perf_counter()
        failed = [each.error for each in run_points(points, store, pool) if each.error]
        seconds = time.perf_counter() - started
        assert not failed, failed[0]
        training = sum(store.load(point.id).meta["seconds"] for point in points)
    return seconds, training


@dataclass(frozen=True)
class Arguments:
    """Throughput of sweeps."""

    sample: int = 32
    """Runs of the 256 that are timed, each time."""
    rounds: int = 2
    """How often, one process and two by turns; the median is reported."""


def main(arguments: Arguments) -> int:
    """Measure and print."""
    everything = diagram()
    order = np.random.default_rng(0).permutation(len(everything))
    sample = [everything[i] for i in order[: arguments.sample]]
    compile_kernels(sample)
    seconds: dict[int, list[float]] = {1: [], 2: []}
    overheads = []
    with process_pool(2) as two, process_pool(1) as one:
        for pool in (one, two):
            timed(sample[:4], pool)  # starts the workers
        for _ in range(arguments.rounds):
            whole, training = timed(sample, one)
            seconds[1].append(whole)
            overheads.append((whole - training) / len(sample))
            seconds[2].append(timed(sample, two)[0])
    console = Console(width=100)
    console.print(
        f"{platform.machine()}, {os.cpu_count()} cores; {len(sample)} of {len(everything)} runs, "
        f"{arguments.rounds} rounds by turns"
    )
    table = Table("processes", "s a run", "runs an hour", "16 x 16 diagram, min", "speed-up")
    medians = {n: statistics.median(each) for n, each in seconds.items()}
    for n, whole in medians.items():
        each = whole / len(sample)
        table.add_row(
            str(n),
            f"{each:.3f}",
            f"{3600 / each:.0f}",
            f"{each * len(everything) / 60:.1f}",
            f"{medians[1] / whole:.2f}",
        )
    console.print(table)
    console.print(f"overhead beside training: {1e3 * statistics.median(overheads):.1f} ms a run")
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Arguments, prog="python -m benchmarks.sweep")))
