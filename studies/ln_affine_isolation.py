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

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy import stats

from mxsim import PRESETS, ProbePlan, ProxyConfig
from mxsim.progress import execute
from mxsim.store import Record, Store
from mxsim.sweep import Point, load_points

Array = NDArray[Any]
Tier = Literal["smoke", "laptop", "long"]

STUDY = "ln_affine_isolation"
ARMS = ("exact", "gemm_e4m3", "ln_only_e4m3", "all_e4m3")
QUANTIZED = ARMS[1:]
CONFIDENCE = 0.95
RESAMPLES = 10_000
TABLE_WIDTH = 144  # columns that the widest table needs


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
            tuple((each, PRESETS[each]) for each in (QUANTIZED if arm == "exact" else (arm,))),
        )
        for arm in ARMS
    }
    return {
        (arm, lr, seed): Point(replace(design.base, lr=lr, seed=seed), PRESETS[arm], plans[arm])
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


@dataclass(frozen=True)
class Estimate:
    """A statistic with its 95 % interval and the number of independent values behind it."""

    value: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def median_over_seeds(values: Array) -> Estimate:
    """Median with a bootstrap interval (percentile, resampling seeds); values (seeds,)."""
    if np.ptp(values) == 0 or not np.isfinite(values).all():
        middle = float(np.median(values))
        return Estimate(middle, float(values.min()), float(values.max()), len(values))
    result = stats.bootstrap(
        (values,),
        np.median,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    return Estimate(float(np.median(values)), float(result.low), float(result.high), len(values))


def share(count: int, n: int) -> Estimate:
    """A share with its Wilson interval."""
    interval = stats.binomtest(count, n).proportion_ci(CONFIDENCE, method="wilson")
    return Estimate(count / n, float(interval.low), float(interval.high), n)


def mcnemar(one: int, other: int) -> float:
    """Two-sided exact p-value that discordant pairs fall either way alike; 1 without any."""
    return float(stats.binomtest(one, one + other).pvalue) if one + other else 1.0


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
class OutcomeRow:
    """What became of one arm at one rate, paired with the exact arm by seed."""

    lr: float
    arm: str
    failed: Estimate  # diverged or non-finite
    nonfinite: int
    shared: int  # this arm and the exact one fail: not due to precision
    precision: int  # this arm fails, the exact one does not
    reverse: int  # the exact arm fails, this one does not
    p_value: float  # exact McNemar test of the last two counts, two-sided
    spikes: int
    recovered: int
    eval_ratio: Estimate  # held-out loss over the exact arm's, pairs where neither failed
    gamma_saturated: Estimate  # highest share over probes, mean over blocks


def summarize(results: Results) -> tuple[list[ZetaRow], list[OutcomeRow]]:
    """All numbers that the study prints."""
    zeta_rows, outcome_rows = [], []
    for lr in results.design.rates:
        for along in ("exact", None):
            gemm = results.probe("zeta", "gemm_e4m3", lr, along)
            for scheme in QUANTIZED:
                zeta = results.probe("zeta", scheme, lr, along)
                values = {name: per_seed(zeta, name) for name in STATISTICS}
                zeta_rows.append(
                    ZetaRow(
                        lr,
                        "exact" if along else "own",
                        scheme,
                        {name: median_over_seeds(v) for name, v in values.items()},
                        {
                            name: median_over_seeds(v - per_seed(gemm, name))
                            for name, v in values.items()
                        },
                        median_over_seeds(
                            per_seed(results.probe("cos", scheme, lr, along), "median")
                        ),
                    )
                )
        exact_failed = np.array(results.meta("status", "exact", lr)) != "ok"
        exact_eval = np.array(results.meta("eval_loss", "exact", lr), float)
        for arm in ARMS:
            status = np.array(results.meta("status", arm, lr))
            failed = status != "ok"
            spikes = [spike for seed in results.meta("spikes", arm, lr) for spike in seed]
            both = ~failed & ~exact_failed
            ratio = np.array(results.meta("eval_loss", arm, lr), float)[both] / exact_eval[both]
            saturated = np.nanmax(
                results.series("probe_gamma_saturated", arm, lr).mean(axis=2), axis=1
            )
            outcome_rows.append(
                OutcomeRow(
                    lr,
                    arm,
                    share(int(failed.sum()), len(failed)),
                    int((status == "nonfinite").sum()),
                    int((failed & exact_failed).sum()),
                    int((failed & ~exact_failed).sum()),
                    int((~failed & exact_failed).sum()),
                    mcnemar(
                        int((failed & ~exact_failed).sum()), int((~failed & exact_failed).sum())
                    ),
                    len(spikes),
                    sum(spike["length"] is not None for spike in spikes),
                    median_over_seeds(ratio) if both.any() else Estimate(np.nan, np.nan, np.nan, 0),
                    median_over_seeds(saturated),
                )
            )
    return zeta_rows, outcome_rows


def print_tables(results: Results, console: Console) -> None:
    """Print the headline and the exploratory table to a rich console."""
    zeta_rows, outcome_rows = summarize(results)
    design = results.design
    probes = -(-design.base.steps // design.probe_every)
    n = design.seeds
    table = Table(
        title=f"Same-point zeta = |g~ - g| / |g|: {probes} probes a run, {n} seeds; "
        f"median over seeds [{CONFIDENCE:.0%} bootstrap]",
        title_justify="left",
    )
    for name in ("lr", "run", "scheme", "median", "90 % quantile", "peak", "median cos"):
        table.add_column(name, no_wrap=True)
    for row in zeta_rows:
        s = row.statistics
        table.add_row(
            f"{row.lr:g}",
            row.along,
            row.scheme,
            *(str(s[k]) for k in STATISTICS),
            str(row.cos),
            end_section=row.scheme == QUANTIZED[-1],
        )
    console.print(table)

    table = Table(
        title=f"Paired difference in zeta to gemm_e4m3 of the same seed, {n} pairs; "
        "an interval above 0 says: more bias than all GEMM operands together",
        title_justify="left",
    )
    for name in ("lr", "run", "scheme", "of medians", "of 90 % quantiles", "of peaks"):
        table.add_column(name, no_wrap=True)
    for row in zeta_rows:
        if row.scheme != "gemm_e4m3":
            d = row.minus_gemm
            table.add_row(
                f"{row.lr:g}",
                row.along,
                row.scheme,
                *(str(d[k]) for k in STATISTICS),
                end_section=row.scheme == QUANTIZED[-1],
            )
    console.print(table)

    table = Table(
        title=f"Exploratory: outcomes of {n} seeds an arm (Wilson {CONFIDENCE:.0%}); "
        "pairs by seed with the exact arm",
        title_justify="left",
    )
    for name in ("lr", "arm", "failed", "both/own/exact", "p", "NaN", "spikes (back)"):
        table.add_column(name, no_wrap=True)
    table.add_column("held-out / exact", no_wrap=True)
    table.add_column("saturated", no_wrap=True)
    for o in outcome_rows:
        table.add_row(
            f"{o.lr:g}",
            o.arm,
            str(o.failed),
            f"{o.shared}/{o.precision}/{o.reverse}",
            f"{o.p_value:.2f}",
            str(o.nonfinite),
            f"{o.spikes} ({o.recovered})",
            f"{o.eval_ratio} n={o.eval_ratio.n}",
            str(o.gamma_saturated),
            end_section=o.arm == ARMS[-1],
        )
    console.print(table)
    console.print(
        "failed: diverged or non-finite. both/own/exact: pairs in which both arms fail (not due to "
        "precision), only this arm (precision-induced), only the exact arm; p: exact McNemar "
        "test of the last two. NaN: runs that became non-finite. Spikes: number (recovered). "
        f"Held-out loss on {design.base.eval_samples} samples, pairs in which neither failed. "
        "Saturated: the highest share of gammas over probes (in the exact and GEMM arms: what "
        "would saturate)."
    )


@dataclass(frozen=True)
class Arguments:
    """Layer-norm-affine quantization against all the rest, paired by seed."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: minutes, 8 seeds; long: 32 seeds."""
    workers: int = os.cpu_count() or 1
    """Processes, one BLAS thread each."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""


def main(arguments: Arguments) -> int:
    """Run what is missing, print the tables, draw the figure; the exit status."""
    from figures.ln_affine_isolation import draw  # the figure reads this module

    console = Console()
    if not console.is_terminal or console.width < TABLE_WIDTH:
        console = Console(width=TABLE_WIDTH, force_terminal=console.is_terminal)
    store = Store(arguments.results / study_name(arguments.tier))
    wanted = list(points(DESIGNS[arguments.tier]).values())
    if not execute(wanted, store, arguments.workers, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, console)
    figure = draw(results, store.folder / "figure.png")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Arguments, description=__doc__)))
