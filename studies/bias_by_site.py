"""Which site biases the gradient?  Attribution along an exact and along an MX trajectory.

    python -m studies.bias_by_site [--tier smoke|laptop] [--results DIR]

At three moments of each run, at its own weights: each E4M3 site alone on and alone
off, Shapley shares of zeta^2 for the three GEMMs, gamma and beta, on several batches; and over more
batches the systematic part |E eps| / |E g| apart from the noise of a batch.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import ProxyConfig, make_batches, make_teacher, scheme, start
from mxsim.attribution import GROUPS, shapley_values, site_attribution
from mxsim.estimate import in_words
from mxsim.executors import SERIAL
from mxsim.precision import SITES
from mxsim.progress import execute
from mxsim.stats import Estimate, median_over_seeds
from mxsim.store import Record, Store, provenance, result_id
from mxsim.sweep import Job, load_points
from mxsim.systematic import bias_over_batches
from studies.command import run_as_command

Array = NDArray[Any]
Tier = Literal["smoke", "laptop"]
STUDY = "bias_by_site"
TRAJECTORIES = ("exact", "all_e4m3")
SCHEMES = ("gemm_e4m3", "ln_only_e4m3", "all_e4m3")
PARTS = ("systematic", "systematic_squared", "noise", "alpha", "signal", "operator_norm", "zeta")
TRACE = ("loss", "zeta", "norm", "mean_norm")
FRESH = 10**6  # batches from this step on are seen by no run


@dataclass(frozen=True)
class Design:
    """``base.seed`` is replaced; ``moments`` are steps done."""

    base: ProxyConfig
    moments: tuple[int, ...]
    seeds: int
    attributed: int  # batches for attribution
    averaged: int  # batches for the systematic part
    trace_every: int  # steps between points of the trace, on ``traced`` batches
    traced: int


DESIGNS: dict[Tier, Design] = {
    "smoke": Design(
        ProxyConfig(width=32, depth=2, batch=32, steps=12, eval_samples=32),
        (2, 6, 12),
        2,
        1,
        3,
        4,
        3,
    ),
    "laptop": Design(
        ProxyConfig(width=64, depth=4, batch=256, steps=800, lr=5e-3),
        (100, 400, 800),
        8,
        4,
        16,
        50,
        8,
    ),
}


@dataclass(frozen=True)
class Cell:
    """One run to look at."""

    design: Design
    trajectory: str
    seed: int
    study: str = STUDY


def cells(design: Design) -> list[Cell]:
    """Every run, seeds outermost: an interrupted study holds whole pairs."""
    return [Cell(design, t, seed) for seed in range(design.seeds) for t in TRAJECTORIES]


def run(cell: Cell) -> Record:
    """Arrays by moment: alone, without (moments, batches, sites), whole (moments, batches), shapley
    (moments, batches, groups), parts (moments, schemes, PARTS), gammas (moments, depth, width); and
    trace (points, TRACE) every ``trace_every`` steps, with all 14 sites.
    """
    design = cell.design
    cfg = ProxyConfig(**asdict(design.base) | {"seed": cell.seed})
    training = start(cfg, scheme(cell.trajectory))
    source = make_batches(cfg, make_teacher(cfg))
    batches = [source.at(FRESH + i) for i in range(design.averaged)]
    t, b = len(design.moments), design.attributed
    arrays: dict[str, Array] = {
        "alone": np.full((t, b, len(SITES)), np.nan),
        "without": np.full((t, b, len(SITES)), np.nan),
        "whole": np.full((t, b), np.nan),
        "shapley": np.full((t, b, len(GROUPS)), np.nan),
        "parts": np.full((t, len(SCHEMES), len(PARTS)), np.nan),
        "gammas": np.full((t, cfg.depth, cfg.width), np.nan),
        "trace": np.full((cfg.steps // design.trace_every, len(TRACE)), np.nan),
    }
    everything = scheme("all_e4m3")
    traced = {k * design.trace_every: k - 1 for k in range(1, len(arrays["trace"]) + 1)}
    for step in sorted({*design.moments, *traced}):
        training.advance(step - training.step)
        if training.bad_step is not None:
            break
        params = training.params
        if step in traced:
            bias = bias_over_batches(params, batches[: design.traced], cfg, everything)["all"]
            signal = bias.norm * np.sqrt(max(bias.signal.value, 0.0))
            loss = training.losses[max(step - 20, 0) : step].mean()
            arrays["trace"][traced[step]] = (loss, np.median(bias.zetas), bias.norm, signal)
        if step not in design.moments:
            continue
        i = design.moments.index(step)
        for j, (x, y) in enumerate(batches[:b]):
            found = site_attribution(params, x, y, cfg, everything)
            arrays["alone"][i, j] = [found.alone[site].zeta for site in SITES]
            arrays["without"][i, j] = [found.without[site].zeta for site in SITES]
            arrays["whole"][i, j] = found.all.zeta
            shares = shapley_values(params, x, y, cfg, everything)
            arrays["shapley"][i, j] = [shares[name] for name in GROUPS]
        for k, name in enumerate(SCHEMES):
            bias = bias_over_batches(params, batches, cfg, scheme(name))["all"]
            values = [getattr(bias, part).value for part in PARTS[:5]]
            arrays["parts"][i, k] = [*values, bias.operator_norm, np.median(bias.zetas)]
        arrays["gammas"][i] = [block["ln_gamma"] for block in params]
    meta = {"cell": asdict(cell), "versions": dict(provenance()), "bad_step": training.bad_step}
    return Record(result_id(cell), arrays, meta)


def jobs(design: Design) -> list[Job]:
    """``run`` of every cell."""
    return [Job(c, run, f"{c.trajectory} run, seed {c.seed}") for c in cells(design)]


@dataclass(frozen=True)
class Results:
    """Arrays of all seeds by trajectory: (seeds, ...), see ``run``; NaN where a run had stopped."""

    design: Design
    by_trajectory: dict[str, dict[str, Array]]
    stopped: dict[str, int]  # runs that met a NaN or Inf


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's results; FileNotFoundError if one is missing."""
    design, store = DESIGNS[tier], Store(results / STUDY)
    found: dict[str, list[Any]] = {t: [] for t in TRAJECTORIES}
    stopped = dict.fromkeys(TRAJECTORIES, 0)
    records = load_points(jobs(design), store)
    for cell in cells(design):
        record = records[result_id(cell)]
        found[cell.trajectory].append(record.arrays)
        stopped[cell.trajectory] += record.meta["bad_step"] is not None
    stacked = {
        t: {name: np.stack([each[name] for each in arrays]) for name in arrays[0]}
        for t, arrays in found.items()
    }
    return Results(design, stacked, stopped)


def over_seeds(values: Array) -> Estimate:
    """Median over the seeds that got there; values (seeds,)."""
    return median_over_seeds(values[np.isfinite(values)])


def shapley_share(arrays: dict[str, Array]) -> Array:
    """Shares of zeta^2, summing to 1: (seeds, moments, groups), batches taken together."""
    total = arrays["shapley"].sum(axis=2)
    return np.asarray(total / total.sum(axis=2, keepdims=True))


def print_tables(results: Results, console: Console) -> None:
    """Shares by group, systematic and random parts by scheme, sites alone and left out."""
    design = results.design
    for t, arrays in results.by_trajectory.items():
        title = f"along the {t} run, lr {design.base.lr:g}: median over {design.seeds} seeds [95 %]"
        if results.stopped[t]:
            console.print(f"{results.stopped[t]} of {design.seeds} {t} runs stopped early")
        table = Table(
            title=f"Shapley share of zeta^2, {design.attributed} batches together, {title}",
            title_justify="left",
        )
        table.add_column("step")
        for name in GROUPS:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("zeta of all 14", justify="right", no_wrap=True)
        share, whole = shapley_share(arrays), np.median(arrays["whole"], axis=2)
        for i, moment in enumerate(design.moments):
            shares = [str(over_seeds(share[:, i, g])) for g in range(len(GROUPS))]
            table.add_row(str(moment), *shares, str(over_seeds(whole[:, i])))
        console.print(table)
        table = Table(
            title=f"{design.averaged} batches, all parameters, {title}", title_justify="left"
        )
        shown = ("zeta", "systematic", "noise", "alpha", "signal", "operator_norm")
        for name in ("step", "scheme", *shown):
            table.add_column(name, justify="right" if name in shown else "left", no_wrap=True)
        for i, moment in enumerate(design.moments):
            for k, name in enumerate(SCHEMES):
                values = arrays["parts"][:, i, k]
                cells_ = [str(over_seeds(values[:, PARTS.index(p)])) for p in shown]
                table.add_row(str(moment), name, *cells_)
        console.print(table)
    late = results.by_trajectory
    table = Table(
        title=f"step {design.moments[-1]}: zeta with the site alone, and without it, median of "
        f"{design.attributed} batches, then of {design.seeds} seeds [95 %]",
        title_justify="left",
    )
    table.add_column("site")
    for t in TRAJECTORIES:
        table.add_column(f"{t} run\nalone", justify="right", no_wrap=True)
        table.add_column(f"{t} run\nwithout", justify="right", no_wrap=True)
    for s, site in enumerate(SITES):
        row = []
        for t in TRAJECTORIES:
            for name in ("alone", "without"):
                row.append(str(over_seeds(np.median(late[t][name][:, -1, :, s], axis=1))))
        table.add_row(site, *row)
    console.print(table)


@dataclass(frozen=True)
class Arguments:
    """Which of the fourteen sites biases the gradient, along an exact run and an MX run."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: 8 seeds."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


def main(arguments: Arguments) -> int:
    """Compute what is missing, print the tables, draw the figure; the exit status."""
    from figures.bias_by_site import draw, draw_mechanism  # the figure reads this module

    console = Console()
    store = Store(arguments.results / STUDY)
    design = DESIGNS[arguments.tier]
    wanted = jobs(design)
    if arguments.dry_run:
        left = sum(not store.has(job.id) for job in wanted)
        gradients = 1 + 2 * (len(SITES) + 1) + 2 ** len(GROUPS)  # a batch
        each = design.base.steps + len(design.moments) * (
            design.attributed * gradients + 2 * len(SCHEMES) * design.averaged
        )
        each += design.base.steps // design.trace_every * 2 * design.traced
        cost = 4e-3 * (design.base.width / 64) ** 2 * design.base.depth / 4
        console.print(
            f"{len(wanted)} runs, {left} to do, about {each} gradients each: "
            f"about {in_words(left * each * cost)}"
        )
        return 0
    if not execute(wanted, store, SERIAL, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 150)))
    figure = draw(results, store.folder / f"{STUDY}_{arguments.tier}.png")
    mechanism = draw_mechanism(results, store.folder / f"{STUDY}_{arguments.tier}_mechanism.png")
    console.print(f"figures: {figure}, {mechanism}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
