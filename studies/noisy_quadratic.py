"""Which stability threshold does a traced boundary follow, and how many runs does tracing save?

    python -m studies.noisy_quadratic [--tier smoke|laptop] [--results DIR]

The reference problem for boundary tracing (mxsim/boundary.py), as its thresholds are known:

    x_{t+1} = (1 - eta lam G_t) x_t,   x_0 = 1, lam = 1,   gains G_t = 1 + z_t of mean 1 + mu and
    variance s2, independent (mxsim/theory/model.py),

and a run failed if |x_T| > 1.  A column is a law of the gains.  Every column is run on a full grid
of rates and seeds, and traced, several times over; both are compared with the thresholds in mean,
in mean square and almost surely (mxsim/theory/stability/).  Half of the runs fail at the
almost-sure one, but for O(1 / T): log|x_T| is a sum of T independent terms, whose median is not
quite its mean.  The transition is sharp at T = 2000 (10 to 90 % within 1 to 5 % of the rate), and
there the traced intervals are wider than they need be: they hold the threshold in more than 95 %.

The almost-sure condition can have several roots.  Stable are small rates up to the first one, the
threshold traced here.  The Gaussian gains here have no other root; with two-point gains, mu = 0,
runs become stable again at higher rates for 1/2 < s2 < 1, and the columns are chosen such that this
lies outside the range of the search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim.boundary import Search, Threshold, estimate, trace
from mxsim.executors import SERIAL
from mxsim.progress import execute
from mxsim.stats import share
from mxsim.store import Record, Store, provenance, result_id
from mxsim.sweep import Job, load_points
from mxsim.theory.model import Gains
from mxsim.theory.stability import (
    almost_sure_intervals,
    almost_sure_threshold,
    mean_square_threshold,
    mean_threshold,
)
from studies.command import run_as_command

Array = NDArray[Any]
Tier = Literal["smoke", "laptop"]
STUDY = "noisy_quadratic"
THRESHOLDS = ("mean", "mean square", "almost sure")
ENDS = (*THRESHOLDS, "stable again", "unstable again")  # NaN if there is no such rate


@dataclass(frozen=True)
class Column:
    """One column of the phase diagram, and which of its repetitions; rates are eta lam."""

    gains: Gains
    steps: int
    repeat: int = 0


def columns(families: dict[tuple[str, float], tuple[float, ...]]) -> tuple[Gains, ...]:
    """(law, mu) -> variances, as laws of gains."""
    return tuple(
        Gains(law, mu, s2) for (law, mu), variances in families.items() for s2 in variances
    )


@dataclass(frozen=True)
class Design:
    """Columns, the search in each, and the grid that it is compared with."""

    gains: tuple[Gains, ...]
    steps: int
    repeats: int
    curve: int
    """Variances in [0, 1] at which thresholds are drawn."""
    grid_rates: int = 16
    grid_seeds: int = 8
    search: Search = Search(0.5, 5.0, width=1.15, max_runs=40)  # noqa: RUF009  (frozen)
    study: str = STUDY


DESIGNS: dict[Tier, Design] = {
    "smoke": Design(
        columns({("gaussian", 0.0): (0.0, 0.25), ("two_point", 0.0): (0.4,)}), 200, 2, 6
    ),
    "laptop": Design(
        columns(
            {
                ("gaussian", 0.0): (0.0, 0.1, 0.25, 0.4, 0.6, 0.8, 1.0),
                ("gaussian", 0.2): (0.1, 0.4, 0.8),
                ("gaussian", -0.2): (0.1, 0.4, 0.8),
                ("two_point", 0.0): (0.1, 0.4, 0.8),
            }
        ),
        2000,
        20,
        61,
    ),
}


def study_name(tier: Tier) -> str:
    """The results folder of a tier; the default tier has the study's own name."""
    return STUDY if tier == "laptop" else f"{STUDY}_{tier}"


def final_log(column: Column, rate: float, seed: int) -> float:
    """log|x_T|: a pure function of its arguments.  A seed's gains are the same at every rate."""
    entropy = (int(result_id(column), 16), seed)
    rng = np.random.default_rng(np.random.SeedSequence(entropy))
    factors = 1 - rate * column.gains.draw(rng, (column.steps,))
    with np.errstate(divide="ignore"):  # a factor of exactly 0 is as stable as can be
        return float(np.log(np.abs(factors)).sum())


def ends(gains: Gains, high: float) -> tuple[float, ...]:
    """The three derived thresholds, then the next interval of stable rates up to ``high``, if any.

    A gap or an interval narrower than 7 % is missed.
    """
    surely = almost_sure_threshold("gd", 0.0, gains.mu, gains.s2, gains.distribution)
    rates = np.geomspace(1.001 * surely, high, 24)  # at a root itself the exponent has no sign
    again = almost_sure_intervals("gd", 0.0, gains, rates) if surely < high / 1.001 else ()
    return (
        mean_threshold("gd", 0.0, gains.mu),
        mean_square_threshold("gd", 0.0, gains.mu, gains.s2),
        surely,
        *(again[0] if again else (np.nan, np.nan)),
    )


def grid_rates(design: Design) -> Array:
    """The grid's rates, from end to end of the search."""
    return np.geomspace(design.search.low, design.search.high, design.grid_rates)


def run(design: Design) -> Record:
    """All of a design: outcomes of the grid and of every trace, and the derived thresholds.

    grid_failed (columns, rates, seeds); traced_* (runs,): column, repeat, rate and outcome, in
    order of seeds; derived (columns, ENDS); curves (families, variances, ENDS).
    """
    search, rates = design.search, grid_rates(design)
    # Seeds that no trace uses, so that grid and trace are independent.  As usual in a phase
    # diagram, and unlike in a trace, they are the same at every rate.
    seeds = range(search.max_runs, search.max_runs + design.grid_seeds)
    grid = [
        [
            [final_log(Column(gains, design.steps), rate, seed) > 0 for seed in seeds]
            for rate in rates
        ]
        for gains in design.gains
    ]

    def evaluate(runs: Sequence[tuple[tuple[int, int], float, int]]) -> list[bool]:
        return [
            final_log(Column(design.gains[c], design.steps, repeat), rate, seed) > 0
            for (c, repeat), rate, seed in runs
        ]

    keys = [(c, repeat) for c in range(len(design.gains)) for repeat in range(design.repeats)]
    traces = trace(dict.fromkeys(keys, search), evaluate)
    traced = [(*key, *outcome) for key in keys for outcome in traces[key].outcomes]
    c, repeat, rate, failed = zip(*traced, strict=True)
    variances = np.linspace(0, 1, design.curve)
    curves = [
        [ends(Gains(law, mu, s2), search.high) for s2 in variances] for law, mu in families(design)
    ]
    arrays = {
        "grid_failed": np.array(grid),
        "traced_column": np.array(c),
        "traced_repeat": np.array(repeat),
        "traced_rate": np.array(rate),
        "traced_failed": np.array(failed),
        "derived": np.array([ends(gains, search.high) for gains in design.gains]),
        "curves": np.array(curves),
    }
    meta = {"design": asdict(design), "versions": dict(provenance())}
    return Record(result_id(design), arrays, meta)


def families(design: Design) -> tuple[tuple[str, float], ...]:
    """(law, mu) of the columns, each once, in order."""
    return tuple(dict.fromkeys((gains.distribution, gains.mu) for gains in design.gains))


@dataclass(frozen=True)
class Results:
    """``arrays`` as ``run`` makes them; traced [column][repeat] and grid [column] estimates."""

    design: Design
    arrays: dict[str, Array]
    traced: tuple[tuple[Threshold, ...], ...]
    grid: tuple[Threshold, ...]

    def within(self, threshold: str, repeats: int | None = None) -> tuple[int, int]:
        """How many traced intervals hold a derived threshold, and of how many."""
        which = THRESHOLDS.index(threshold)
        pairs = [
            (each, derived[which])
            for column, derived in zip(self.traced, self.arrays["derived"], strict=True)
            for each in column[:repeats]
        ]
        return sum(bool(each.low <= value <= each.high) for each, value in pairs), len(pairs)


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's runs and draw conclusions; FileNotFoundError if they are missing."""
    design = DESIGNS[tier]
    job = Job(design, run, "grid and traces")
    arrays = dict(load_points([job], Store(results / study_name(tier)))[job.id].arrays)
    rates, failed = grid_rates(design).tolist(), arrays["grid_failed"]
    outcomes: dict[tuple[int, int], list[tuple[float, bool]]] = {}
    names = ("traced_column", "traced_repeat", "traced_rate", "traced_failed")
    for c, repeat, rate, each in zip(*(arrays[name].tolist() for name in names), strict=True):
        outcomes.setdefault((c, repeat), []).append((rate, each))
    traced = tuple(
        tuple(estimate(design.search, outcomes[c, repeat]) for repeat in range(design.repeats))
        for c in range(len(design.gains))
    )
    grid = tuple(
        estimate(
            design.search,
            [(rate, bool(each)) for rate, row in zip(rates, cells, strict=True) for each in row],
        )
        for cells in failed
    )
    return Results(design, arrays, traced, grid)


def print_tables(results: Results, console: Console) -> None:
    """Derived thresholds, the first trace and the grid column by column; then the totals."""
    design = results.design
    per_column = design.grid_rates * design.grid_seeds
    table = Table(
        title=f"eta lam at which half of the runs of {design.steps} steps fail [95 %]; grid: "
        f"{per_column} runs a column",
        title_justify="left",
    )
    names = ("law", "mu", "s2", *THRESHOLDS, "traced", "runs", "ratio", "grid", "ratio")
    for name in names:
        table.add_column(name, justify="left" if name == "law" else "right", no_wrap=True)
    for gains, derived, traced, grid in zip(
        design.gains, results.arrays["derived"], results.traced, results.grid, strict=True
    ):
        first = traced[0]
        cells = [f"{value:.3f}" for value in derived[: len(THRESHOLDS)]]
        cells += [str(first), str(first.n), f"{ratio(first):.3f}", str(grid), f"{ratio(grid):.3f}"]
        table.add_row(gains.distribution, f"{gains.mu:g}", f"{gains.s2:g}", *cells)
    console.print(table)
    firsts = [column[0] for column in results.traced]
    spent, whole = sum(each.n for each in firsts), len(firsts) * per_column
    apart = [
        max(a.value / b.value, b.value / a.value) for a, b in zip(firsts, results.grid, strict=True)
    ]
    overlap = sum(
        a.low <= b.high and b.low <= a.high for a, b in zip(firsts, results.grid, strict=True)
    )
    held = {name: results.within(name, 1)[0] for name in THRESHOLDS}
    console.print(
        f"traced with {spent} runs, {100 * spent / whole:.0f} % of the grid's {whole}; intervals' "
        f"median ratio {np.median([ratio(t) for t in firsts]):.3f} (grid "
        f"{np.median([ratio(t) for t in results.grid]):.3f}), "
        f"{sum(t.converged for t in firsts)} of {len(firsts)} below {design.search.width:g}",
        soft_wrap=True,
    )
    console.print(
        "of the traced intervals hold the threshold "
        + ", ".join(f"{name} {count}" for name, count in held.items())
        + f" of {len(firsts)}; {overlap} overlap the grid's, values differ by at most "
        f"{100 * (max(apart) - 1):.1f} %",
        soft_wrap=True,
    )
    inside, total = results.within("almost sure")
    runs = np.mean([each.n for column in results.traced for each in column])
    console.print(
        f"over {design.repeats} repetitions: almost sure in {inside} of {total} intervals, "
        f"{share(inside, total)}, {runs:.1f} runs each",
        soft_wrap=True,
    )


def ratio(threshold: Threshold) -> float:
    """The interval's width as a ratio of rates; inf if one-sided."""
    return threshold.high / threshold.low if threshold.low > 0 else np.inf


@dataclass(frozen=True)
class Arguments:
    """The boundary of the noisy quadratic: derived, traced, and on a full grid."""

    tier: Tier = "laptop"
    """smoke: a second, for tests; laptop: 16 columns, 20 repetitions."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


def main(arguments: Arguments) -> int:
    """Compute what is missing, print the table, draw the figure; the exit status."""
    from figures.noisy_quadratic import draw  # the figure reads this module

    console = Console()
    store = Store(arguments.results / study_name(arguments.tier))
    design = DESIGNS[arguments.tier]
    job = Job(design, run, "grid and traces")
    if arguments.dry_run:
        grid = len(design.gains) * design.grid_rates * design.grid_seeds
        traced = len(design.gains) * design.repeats * design.search.max_runs
        stored = store.has(job.id)
        seconds = (grid + traced) * (3e-4 + 5e-8 * design.steps)
        seconds += 0.03 * len(families(design)) * design.curve
        console.print(
            f"{grid} runs of the grid, at most {traced} of traces, "
            f"{'stored' if stored else 'to compute'}: about {0 if stored else seconds:.0f} s"
        )
        return 0
    if not execute([job], store, SERIAL, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 130)))
    figure = draw(results, store.folder / f"{STUDY}.png")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
