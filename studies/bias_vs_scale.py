"""How does the gradient bias change with width, depth, batch, block size and format?

    python -m studies.bias_vs_scale [--tier smoke|laptop] [--results DIR]

Along exact runs, every 20 steps, the same-point zeta of GEMM operands alone, layer-norm affine
alone and all 14 sites.  One field of the configuration is varied at a time (the teacher has the
student's width and depth, so the task changes with them); formats and block sizes are probed on one
run.  The probe at step 0, where gamma is 1 and beta 0 in every format, is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import ProbePlan, ProxyConfig, SiteFormat, scheme
from mxsim.executors import Execution
from mxsim.precision import GEMM_SITES, LN_SITES, SITES, PrecisionScheme
from mxsim.progress import describe, execute
from mxsim.stats import median_over_seeds
from mxsim.store import Store
from mxsim.sweep import Point, load_points
from studies.command import run_as_command

Array = NDArray[Any]
Tier = Literal["smoke", "laptop"]
STUDY = "bias_vs_scale"
ARMS: Mapping[str, tuple[str, ...]] = {"gemm": GEMM_SITES, "ln_only": LN_SITES, "all": SITES}
FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8")
BLOCKS = (8, 16, 64)  # beside 32


@dataclass(frozen=True)
class Design:
    """``base`` and what is varied from it, one field at a time."""

    base: ProxyConfig
    widths: tuple[int, ...]
    depths: tuple[int, ...]
    batches: tuple[int, ...]
    seeds: int
    probe_every: int = 20


DESIGNS: dict[Tier, Design] = {
    "smoke": Design(
        ProxyConfig(width=32, depth=2, batch=32, steps=40, eval_samples=32), (64,), (), (), 2
    ),
    "laptop": Design(
        ProxyConfig(width=64, depth=4, batch=256, steps=400, lr=5e-3, eval_samples=1024),
        (32, 128),
        (2, 8),
        (64, 1024),
        8,
    ),
}


def arm(name: str, site: SiteFormat) -> PrecisionScheme:
    """The sites of an arm in one format."""
    chosen: dict[str, Any] = dict.fromkeys(ARMS[name], site)
    return PrecisionScheme(**chosen)


def plan(design: Design, everything: bool) -> ProbePlan:
    """The arms in E4M3; with ``everything`` in all formats and block sizes as well."""
    sites = {"mxfp8_e4m3": SiteFormat("mxfp8_e4m3")}
    if everything:
        sites = {fmt: SiteFormat(fmt) for fmt in FORMATS}
        sites |= {f"block {size}": SiteFormat("mxfp8_e4m3", block_size=size) for size in BLOCKS}
    schemes = tuple(
        (f"{name} {label}", arm(name, s)) for label, s in sites.items() for name in ARMS
    )
    return ProbePlan(design.probe_every, schemes)


def settings(design: Design) -> dict[tuple[str, int], ProxyConfig]:
    """(what is varied, its value) -> configuration; ("base", 0) the base."""
    varied = {"width": design.widths, "depth": design.depths, "batch": design.batches}
    found = {("base", 0): design.base}
    for field, values in varied.items():
        changes: dict[str, Any]
        for value in values:
            changes = {field: value}
            found[field, value] = replace(design.base, **changes)
    return found


def points(design: Design) -> dict[tuple[tuple[str, int], int], Point]:
    """(setting, seed) -> an exact run with its probes; seeds outermost."""
    return {
        (key, seed): Point(
            replace(cfg, seed=seed), scheme("exact"), plan(design, everything=key[0] == "base")
        )
        for seed in range(design.seeds)
        for key, cfg in settings(design).items()
    }


@dataclass(frozen=True)
class Results:
    """zeta[(setting, label)] (seeds, probes), label "gemm mxfp8_e4m3"; ``statuses`` of the runs."""

    design: Design
    zeta: dict[tuple[tuple[str, int], str], Array]
    statuses: tuple[str, ...]


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's results; FileNotFoundError if one is missing."""
    design = DESIGNS[tier]
    wanted = points(design)
    records = load_points(list(wanted.values()), Store(results / f"{STUDY}_{tier}"))
    zeta: dict[tuple[tuple[str, int], str], list[Array]] = {}
    statuses = []
    for (key, _), point in wanted.items():
        record = records[point.id]
        statuses.append(str(record.meta["status"]))
        for s, label in enumerate(record.meta["probe_labels"]):
            zeta.setdefault((key, label), []).append(record.arrays["probe_zeta"][1:, s, 0])
    return Results(design, {k: np.array(v) for k, v in zeta.items()}, tuple(statuses))


def rows(results: Results) -> dict[str, list[tuple[str, tuple[str, int], str]]]:
    """What is varied -> (its value in words, setting, label without the arm)."""
    design, e4m3 = results.design, "mxfp8_e4m3"
    found: dict[str, list[tuple[str, tuple[str, int], str]]] = {}
    for field in ("width", "depth", "batch"):
        values = {getattr(design.base, field): ("base", 0)}
        values |= {key[1]: key for key in settings(design) if key[0] == field}
        found[field] = [(str(v), values[v], e4m3) for v in sorted(values)]
    blocks = sorted([(size, f"block {size}") for size in BLOCKS] + [(32, e4m3)])
    found["block size"] = [(str(size), ("base", 0), label) for size, label in blocks]
    found["format"] = [(fmt.removeprefix("mx"), ("base", 0), fmt) for fmt in FORMATS]
    return found


def over_probes(results: Results, key: tuple[str, int], label: str, quantile: float) -> Array:
    """The quantile over a run's probes, (seeds,)."""
    return np.asarray(np.nanquantile(results.zeta[key, label], quantile, axis=1))


def print_tables(results: Results, console: Console) -> None:
    """Median over probes, then over seeds; and the 90 % quantile over probes."""
    design = results.design
    probes = -(-design.base.steps // design.probe_every) - 1
    table = Table(
        title=f"zeta along exact runs, {probes} probes, {design.seeds} seeds: median over probes, "
        "then over seeds [95 %]; 90 %: quantile over probes",
        title_justify="left",
    )
    for name in ("varied", "value", *(f"{a}\n{q}" for a in ARMS for q in ("median", "90 %"))):
        table.add_column(name, no_wrap=True, justify="left" if name == "varied" else "right")
    for field, values in rows(results).items():
        for word, key, label in values:
            cells = []
            for name in ARMS:
                for quantile in (0.5, 0.9):
                    each = over_probes(results, key, f"{name} {label}", quantile)
                    cells.append(str(median_over_seeds(each)))
            table.add_row(field, word, *cells)
        table.add_section()
    console.print(table)
    failed = len(results.statuses) - results.statuses.count("ok")
    console.print(f"{len(results.statuses)} runs, {failed} not ok")


@dataclass(frozen=True)
class Arguments(Execution):
    """The same-point gradient bias against width, depth, batch, block size and format."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: 8 seeds."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


def main(arguments: Arguments) -> int:
    """Run what is missing, print the table, draw the figure; the exit status."""
    from figures.bias_vs_scale import draw  # the figure reads this module

    console = Console()
    store = Store(arguments.results / f"{STUDY}_{arguments.tier}")
    wanted = list(points(DESIGNS[arguments.tier]).values())
    if arguments.dry_run:
        describe(wanted, store, arguments, console)
        return 0
    if not execute(wanted, store, arguments, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 150)))
    figure = draw(results, store.folder / f"{STUDY}.png")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
