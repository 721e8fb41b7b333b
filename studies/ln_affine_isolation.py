"""Does quantizing layer norm's affine parameters alone bias the gradient as MX training does?

Four arms from the same initial weights on the same data: exact; the twelve GEMM operands in MXFP8
E4M3; all fourteen sites; layer norm's gamma and beta alone.  Along each run, every few steps, the
arm's gradient is compared with the exact one at the same parameters on the same batch.  Along the
exact run, all three quantized schemes are compared at the very same points, so that no difference
of trajectory enters.

    python -m studies.ln_affine_isolation [--tier smoke|laptop|long] [--workers N]

Prints the tables and draws results/<study>/figure.png.  Started again, it skips what is stored.
Reads and writes results/ only; statistics are in ``summarize``, the figure in
figures/ln_affine_isolation.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import DivergenceRule, ProbePlan, ProxyConfig, scheme
from mxsim.executors import Execution
from mxsim.outcome import Spike, fatal_spike, is_censored
from mxsim.progress import describe, execute
from mxsim.stats import CONFIDENCE, Estimate, mcnemar, median_over_seeds, share
from mxsim.store import Record, Store
from mxsim.sweep import Point, load_points
from studies.command import run_as_command

Array = NDArray[Any]
Tier = Literal["smoke", "laptop", "long", "deep"]

STUDY = "ln_affine_isolation"
ARMS = ("exact", "gemm_e4m3", "ln_only_e4m3", "all_e4m3")
QUANTIZED = ARMS[1:]
TABLE_WIDTH = 168  # columns that the widest table needs


@dataclass(frozen=True)
class Design:
    """The frozen design of one tier."""

    base: ProxyConfig
    rates: tuple[float, ...]
    seeds: int
    probe_every: int


DESIGNS: Mapping[Tier, Design] = {
    "smoke": Design(
        ProxyConfig(width=32, depth=2, batch=32, steps=60, eval_samples=1024),
        rates=(5e-3, 2e-2),
        seeds=2,
        probe_every=10,
    ),
    "laptop": Design(
        ProxyConfig(width=64, depth=4, batch=256, steps=1000),
        rates=(5e-3, 1e-2, 2e-2),
        seeds=8,
        probe_every=20,
    ),
    "long": Design(
        ProxyConfig(width=64, depth=4, batch=256, steps=1000),
        rates=(5e-3, 1e-2, 2e-2),
        seeds=32,
        probe_every=20,
    ),
    "deep": Design(
        ProxyConfig(width=64, depth=8, batch=256, steps=800),
        rates=(5e-3, 8e-3),
        seeds=12,
        probe_every=20,
    ),
}


def study_name(tier: Tier) -> str:
    """The results folder of a tier; the default tier has the study's own name."""
    return STUDY if tier == "laptop" else f"{STUDY}_{tier}"


Key = tuple[str, float, int]  # arm, learning rate, seed


def points(design: Design) -> dict[Key, Point]:
    """Every run of a design.  Arms of one rate and seed share initial weights, teacher and data.

    Seeds outermost, so that an interrupted study holds whole pairs.
    """
    plans = {
        arm: ProbePlan(
            design.probe_every,
            tuple((each, scheme(each)) for each in (QUANTIZED if arm == "exact" else (arm,))),
        )
        for arm in ARMS
    }
    return {
        (arm, lr, seed): Point(replace(design.base, lr=lr, seed=seed), scheme(arm), plans[arm])
        for seed in range(design.seeds)
        for lr in design.rates
        for arm in ARMS
    }


@dataclass(frozen=True)
class Results:
    """The stored runs of a design, by (arm, rate, seed)."""

    design: Design
    records: Mapping[Key, Record]

    def series(self, name: str, arm: str, lr: float) -> Array:
        """Array ``name`` of every seed, stacked on a first axis of seeds."""
        seeds = range(self.design.seeds)
        return np.stack([self.records[arm, lr, seed].arrays[name] for seed in seeds])

    def meta(self, name: str, arm: str, lr: float) -> list[Any]:
        """Metadata ``name`` of every seed."""
        return [self.records[arm, lr, seed].meta[name] for seed in range(self.design.seeds)]

    def probe(self, name: str, scheme: str, lr: float, along: str | None = None) -> Array:
        """Probe series over all parameters, (seeds, probes), of ``scheme`` along a run.

        ``along``: the arm whose run the probes were made on; default the scheme's own.
        """
        arm = along or scheme
        labels = self.records[arm, lr, 0].meta["probe_labels"]
        return self.series(f"probe_{name}", arm, lr)[:, :, labels.index(scheme), 0]


def load(tier: Tier, root: Path = Path("results")) -> Results:
    """Stored results of a tier; raises FileNotFoundError if any run is missing."""
    design = DESIGNS[tier]
    wanted = points(design)
    records = load_points(list(wanted.values()), Store(root / study_name(tier)))
    return Results(design, {key: records[point.id] for key, point in wanted.items()})


# What is read off a run's probe series, (probes,) -> scalar.  A run that became non-finite has
# fewer probes; those it has are used.
STATISTICS: Mapping[str, Callable[[Array], Any]] = {
    "median": np.nanmedian,
    "q90": lambda series: np.nanquantile(series, 0.9),
    "peak": np.nanmax,
}


def per_seed(series: Array, statistic: str) -> Array:
    """(seeds, probes) -> (seeds,)."""
    return np.array([STATISTICS[statistic](row) for row in series])


@dataclass(frozen=True)
class ZetaRow:
    """Zeta of one scheme at one rate: statistics over probes, then over seeds."""

    lr: float
    along: str  # "exact" or "own": whose run was probed
    scheme: str
    statistics: Mapping[str, Estimate]
    minus_gemm: Mapping[str, Estimate]  # paired by seed
    cos: Estimate  # median over probes


@dataclass(frozen=True)
class QuietRow:
    """Zeta along the exact run at the probes at which no gamma at all would saturate."""

    lr: float
    probes: int
    gemm: Estimate  # median over those probes, then over seeds
    ln_only: Estimate
    difference: Estimate  # paired by seed


@dataclass(frozen=True)
class OutcomeRow:
    """What became of one arm at one rate, paired with the exact arm by seed."""

    lr: float
    arm: str
    failed: Estimate  # diverged or non-finite
    censored: int  # of those, by a spike still within its patience when the run ended
    nonfinite: int
    shared: int  # this arm and the exact one fail
    precision: int  # this arm fails, the exact one does not
    reverse: int  # the exact arm fails, this one does not
    p_value: float  # exact McNemar test of the last two counts, two-sided
    spikes: int
    recovered: int
    eval_ratio: Estimate  # held-out loss over the exact arm's, pairs where neither failed
    excess_ratio: Estimate  # the same of what lies above the floor 1/width
    gamma_saturated: Estimate  # highest share over probes, mean over blocks


def zeta_rows(results: Results, lr: float, along: str | None) -> list[ZetaRow]:
    """Zeta of each scheme at one rate, along the exact run or (None) along its own."""

    def by_seed(name: str, scheme: str, statistic: str) -> Array:
        return per_seed(results.probe(name, scheme, lr, along), statistic)

    return [
        ZetaRow(
            lr,
            "exact" if along else "own",
            scheme,
            {s: median_over_seeds(by_seed("zeta", scheme, s)) for s in STATISTICS},
            {
                s: median_over_seeds(by_seed("zeta", scheme, s) - by_seed("zeta", "gemm_e4m3", s))
                for s in STATISTICS
            },
            median_over_seeds(by_seed("cos", scheme, "median")),
        )
        for scheme in QUANTIZED
    ]


def quiet_row(results: Results, lr: float) -> QuietRow:
    """Zeta where saturation plays no part; step 0, where gamma = 1 is on the grid, left out."""
    saturated = results.series("probe_gamma_saturated", "exact", lr).max(axis=2)
    quiet = saturated[:, 1:] == 0  # (seeds, probes); NaN, after the end of a run, is not
    gemm, ln_only = (
        np.array(
            [
                np.median(zeta[chosen])
                for zeta, chosen in zip(
                    results.probe("zeta", scheme, lr, "exact")[:, 1:], quiet, strict=True
                )
                if chosen.any()
            ]
        )
        for scheme in ("gemm_e4m3", "ln_only_e4m3")
    )
    return QuietRow(
        lr,
        int(quiet.sum()),
        median_over_seeds(gemm),
        median_over_seeds(ln_only),
        median_over_seeds(ln_only - gemm),
    )


def outcome_row(results: Results, lr: float, arm: str) -> OutcomeRow:
    """Outcomes of one arm at one rate beside those of the exact arm's same seeds."""
    status = np.array(results.meta("status", arm, lr))
    failed = status != "ok"
    exact_failed = np.array(results.meta("status", "exact", lr)) != "ok"
    neither = ~failed & ~exact_failed
    loss = np.array(results.meta("eval_loss", arm, lr), float)[neither]
    exact_loss = np.array(results.meta("eval_loss", "exact", lr), float)[neither]
    floor = 1 / results.design.base.width
    by_seed = [[Spike(**spike) for spike in seed] for seed in results.meta("spikes", arm, lr)]
    rule, steps = DivergenceRule(), results.design.base.steps
    fatal = [fatal_spike(spikes, rule) for spikes in by_seed]
    open_late = [spike is not None and is_censored(spike, steps, rule) for spike in fatal]
    own, other = int((failed & ~exact_failed).sum()), int((~failed & exact_failed).sum())
    saturated = results.series("probe_gamma_saturated", arm, lr).mean(axis=2)
    return OutcomeRow(
        lr=lr,
        arm=arm,
        failed=share(int(failed.sum()), len(failed)),
        censored=int(((status == "diverged") & np.array(open_late)).sum()),
        nonfinite=int((status == "nonfinite").sum()),
        shared=int((failed & exact_failed).sum()),
        precision=own,
        reverse=other,
        p_value=mcnemar(own, other),
        spikes=sum(len(spikes) for spikes in by_seed),
        recovered=sum(s.length is not None for spikes in by_seed for s in spikes),
        eval_ratio=median_over_seeds(loss / exact_loss),
        excess_ratio=median_over_seeds((loss - floor) / (exact_loss - floor)),
        gamma_saturated=median_over_seeds(np.nanmax(saturated, axis=1)),
    )


@dataclass(frozen=True)
class Summary:
    """All numbers that the study prints."""

    zeta: tuple[ZetaRow, ...]
    quiet: tuple[QuietRow, ...]
    outcomes: tuple[OutcomeRow, ...]


def summarize(results: Results) -> Summary:
    """Compute the tables."""
    rates = results.design.rates
    return Summary(
        tuple(
            r for lr in rates for along in ("exact", None) for r in zeta_rows(results, lr, along)
        ),
        tuple(quiet_row(results, lr) for lr in rates),
        tuple(outcome_row(results, lr, arm) for lr in rates for arm in ARMS),
    )


def print_tables(results: Results, console: Console) -> None:
    """Print the headline and the exploratory tables to a rich console."""
    summary, design = summarize(results), results.design
    probes, n = -(-design.base.steps // design.probe_every), design.seeds
    last = QUANTIZED[-1]

    table = new_table(
        f"Same-point zeta = |g~ - g| / |g|: {probes} probes a run, {n} seeds; median over seeds "
        f"[{CONFIDENCE:.0%} bootstrap]",
        ("lr", "run", "scheme", "median", "90 % quantile", "peak", "median cos"),
    )
    for z in summary.zeta:
        values = [str(z.statistics[k]) for k in STATISTICS]
        table.add_row(
            f"{z.lr:g}", z.along, z.scheme, *values, str(z.cos), end_section=z.scheme == last
        )
    console.print(table)

    table = new_table(
        f"Paired difference in zeta to gemm_e4m3 of the same seed, {n} pairs; an interval above 0 "
        "says: more error than from all GEMM operands together",
        ("lr", "run", "scheme", "of medians", "of 90 % quantiles", "of peaks"),
    )
    for z in summary.zeta:
        if z.scheme != "gemm_e4m3":
            values = [str(z.minus_gemm[k]) for k in STATISTICS]
            table.add_row(f"{z.lr:g}", z.along, z.scheme, *values, end_section=z.scheme == last)
    console.print(table)

    table = new_table(
        "Zeta along the exact run, only where no gamma at all would saturate: what the cliff does "
        "not explain",
        ("lr", "probes", "seeds", "gemm_e4m3", "ln_only_e4m3", "paired difference"),
    )
    for q in summary.quiet:
        values = [str(q.gemm), str(q.ln_only), str(q.difference)]
        table.add_row(f"{q.lr:g}", str(q.probes), str(q.difference.n), *values)
    console.print(table)

    table = new_table(
        f"Exploratory: outcomes of {n} seeds an arm (Wilson {CONFIDENCE:.0%}), paired by seed with "
        "the exact arm",
        (
            "lr",
            "arm",
            "failed",
            "late",
            "NaN",
            "both/own/exact",
            "p",
            "spikes (back)",
            "n",
            "held-out / exact",
            "excess / exact",
            "saturated",
        ),
    )
    for o in summary.outcomes:
        table.add_row(
            f"{o.lr:g}",
            o.arm,
            str(o.failed),
            str(o.censored),
            str(o.nonfinite),
            f"{o.shared}/{o.precision}/{o.reverse}",
            f"{o.p_value:.2f}",
            f"{o.spikes} ({o.recovered})",
            str(o.eval_ratio.n),
            str(o.eval_ratio),
            str(o.excess_ratio),
            str(o.gamma_saturated),
            end_section=o.arm == ARMS[-1],
        )
    console.print(table)
    console.print(
        "failed: diverged or non-finite; late: of those, by a spike so near the end that it might "
        "still have recovered. both/own/exact: pairs in which both arms fail, only this one, only "
        "the exact one; p: exact McNemar test of the last two. spikes: number (recovered). "
        f"n: pairs in which neither failed; held-out: their loss on {design.base.eval_samples} "
        "samples; "
        "excess: its part above the floor 1/width that layer norm leaves. saturated: highest share "
        "of gammas over probes (in the exact and GEMM arms: what would saturate)."
    )


def new_table(title: str, columns: tuple[str, ...]) -> Table:
    """A table with a left-aligned title, whose cells are never broken."""
    table = Table(title=title, title_justify="left")
    for name in columns:
        table.add_column(name, no_wrap=True)
    return table


@dataclass(frozen=True)
class Arguments(Execution):
    """Layer-norm-affine quantization against all the rest, paired by seed."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: minutes, 8 seeds; long: 32 seeds; deep: depth 8."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


def main(arguments: Arguments) -> int:
    """Run what is missing, print the tables, draw the figure; the exit status."""
    from figures.ln_affine_isolation import draw  # the figure reads this module

    console = Console()
    store = Store(arguments.results / study_name(arguments.tier))
    wanted = list(points(DESIGNS[arguments.tier]).values())
    if arguments.dry_run:
        describe(wanted, store, arguments, console)
        return 0
    if not execute(wanted, store, arguments, console):
        return 1
    results = load(arguments.tier, arguments.results)
    # Tables keep their width on a narrow terminal or in a file; the progress bar fits its own.
    wide = Console(width=max(console.width, TABLE_WIDTH), force_terminal=console.is_terminal)
    print_tables(results, wide)
    figure = draw(results, store.folder / "figure.png")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
