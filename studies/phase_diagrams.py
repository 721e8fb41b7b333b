"""Where does training fail, and where does it fail in MX only?

    python -m studies.phase_diagrams --diagrams lr_depth lr_width ... [--tier smoke|laptop|cluster]

Ten diagrams, each a grid of two axes, exact and MX runs side by side, several seeds a cell, paired:
runs of one cell and seed share initial weights, teacher and data, so that failure which precision
induces is told from failure that the exact run shares.  Where an axis is the learning rate, the
rate at which half of the runs fail is traced as well, column by column, by runs of its own.

Prints tables and draws results/phase_diagrams_<tier>/<diagram>.png.  Started again, it skips what
is stored; diagrams share runs where their settings meet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import DivergenceRule, ProxyConfig, scheme
from mxsim.boundary import Search, Threshold
from mxsim.estimate import cost_of
from mxsim.estimate import in_words as in_words_of
from mxsim.executors import Execution
from mxsim.floor import irreducible_loss
from mxsim.grid import (
    FAILURES,
    Axis,
    Cell,
    Grid,
    Level,
    State,
    config_axis,
    load_cells,
    site_axis,
    state_of,
)
from mxsim.progress import describe, execute
from mxsim.stats import Estimate, mean_over_seeds, share
from mxsim.store import Record, Store
from mxsim.sweep import load_points
from mxsim.tracing import Column, stored_traces, trace_columns
from studies.command import run_as_command
from studies.threshold_prediction import Forecast, mean_square_rate

Array = NDArray[Any]
Tier = Literal["smoke", "laptop", "cluster"]
Name = Literal[
    "lr_depth",
    "lr_width",
    "lr_format",
    "lr_init",
    "lr_optimizer",
    "lr_batch",
    "lr_teacher_gain",
    "format_block",
    "activation_norm",
    "rule_rounding",
]
STUDY = "phase_diagrams"
ARMS = ("exact", "all_e4m3")
FORMATS = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1", "mxint8", "nvfp4")
# A run has learned if its held-out loss is below a tenth of the trivial one.  (By half, the rule's
# default, runs count as ok at rates at which they never get near the floor, and P(fail) falls again
# with the rate.)  That is 3.2, 6.4 and 12.8 times the floor at width 32, 64 and 128, 4.3 times at
# depth 1, and far above it without layer norm: widths and norms are held to one loss, not to one
# distance from the floor, which the tables have as well.
RULE = DivergenceRule(learned_fraction=0.1)


@dataclass(frozen=True)
class Sizes:
    """What a tier's diagrams have in common."""

    base: ProxyConfig
    rates: tuple[float, ...]
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    batches: tuple[int, ...]
    blocks: tuple[int, ...]
    seeds: int
    trace_runs: int  # at most, a column
    trace_width: float  # of the interval at which a column is done, a ratio of rates


SIZES: Mapping[Tier, Sizes] = {
    "smoke": Sizes(
        ProxyConfig(width=16, depth=2, batch=16, steps=40, lr=2e-2, eval_samples=256),
        rates=(1e-2, 0.1, 1.0),
        depths=(1, 2),
        widths=(16, 32),
        batches=(8, 16),
        blocks=(8, 32),
        seeds=2,
        trace_runs=8,
        trace_width=2.0,
    ),
    "laptop": Sizes(
        ProxyConfig(width=64, depth=4, batch=128, steps=300, lr=2e-2, eval_samples=4096),
        rates=(5e-3, 8e-3, 1.26e-2, 2e-2, 3.2e-2, 5e-2, 8e-2),
        depths=(1, 2, 4, 8),
        widths=(32, 64, 128),
        batches=(32, 128, 512),
        blocks=(8, 16, 32, 64),
        seeds=4,
        trace_runs=24,
        trace_width=1.3,
    ),
    "cluster": Sizes(  # the paper's sizes
        ProxyConfig(width=512, depth=4, batch=2048, steps=7000, lr=6e-4, eval_samples=32768),
        rates=(1e-4, 2e-4, 4e-4, 6e-4, 1e-3, 2e-3, 4e-3, 8e-3),
        depths=(3, 4, 6, 8),
        widths=(256, 384, 512),
        batches=(512, 1024, 2048),
        blocks=(8, 16, 32, 64, 128),
        seeds=8,
        trace_runs=40,
        trace_width=1.2,
    ),
}


@dataclass(frozen=True)
class Diagram:
    """Two axes; ``y`` is the learning rate if the boundary is ``traced`` along it."""

    x: Axis
    y: Axis
    grid: Grid
    sizes: Sizes
    traced: bool

    def columns(self) -> dict[tuple[str, str], Column]:
        """(x label, arm) -> the search for its boundary.  Equal columns are the same runs."""
        found = {}
        for level in self.x.levels:
            for arm in ARMS:
                rates = [self.grid.point((level, y), arm, 0).config.lr for y in self.y.levels]

                def point(lr: float, seed: int, level: Level = level, arm: str = arm) -> Any:
                    return self.grid.point((level,), arm, seed, lr)

                search = Search(
                    low=min(rates),
                    high=max(rates),
                    width=self.sizes.trace_width,
                    max_runs=self.sizes.trace_runs,
                )
                found[level.label, arm] = Column(search, point)
        return found


def diagram(name: Name, tier: Tier) -> Diagram:
    """One diagram of a tier."""
    s = SIZES[tier]
    rule = RULE
    rates = config_axis("lr", s.rates)
    y = rates
    match name:
        case "lr_depth":
            x = config_axis("depth", s.depths)
        case "lr_width":
            x = config_axis("width", s.widths)
        case "lr_batch":
            x = config_axis("batch", s.batches)
        case "lr_init":
            x = config_axis("init", ("pytorch", "xavier"))
        case "lr_teacher_gain":
            x = config_axis("teacher_gain", (1.0, 3.0, 4.0, 5.0))
            rule = DivergenceRule()  # a tenth of a unit-variance teacher takes longer to learn
        case "lr_optimizer":
            x = Axis(
                "optimizer",
                (
                    Level("adam"),
                    Level("adamw", {"optimizer": "adamw", "weight_decay": 0.1}),
                    Level("sgd", {"optimizer": "sgd", "lr": 50 * s.base.lr}),
                    Level("momentum", {"optimizer": "sgd", "momentum": 0.9, "lr": 50 * s.base.lr}),
                ),
            )
            y = Axis("rate factor", tuple(_factor(r / s.base.lr) for r in s.rates))
        case "lr_format":
            x = site_axis("format", FORMATS)
        case "format_block":
            x = site_axis("format", FORMATS[:-1])
            y = site_axis("block_size", s.blocks)
        case "rule_rounding":
            x = site_axis("scale_rule", ("floor", "rceil", "ceil", "even"))
            y = site_axis("rounding", ("even", "away", "zero", "stochastic"))
        case "activation_norm":
            x = config_axis("activation", ("gelu", "relu", "swiglu", "linear"))
            y = config_axis("norm", ("layer", "layer_no_affine", "rms", "none"))
    grid = Grid(s.base, (x, y), {arm: scheme(arm) for arm in ARMS}, s.seeds, rule)
    return Diagram(x, y, grid, s, traced=name.startswith("lr_"))


PROBED = (1, 3)  # steps; the second is used: Adam's P means nothing after one step
PREDICTED = ("lr_depth", "lr_width", "lr_batch", "lr_init", "lr_teacher_gain")  # one scheme an arm


def forecasts(it: Diagram) -> dict[tuple[str, int], Forecast]:
    """(x label, seed) -> an exact run at a fifth of the lowest rate, to be probed at its start."""
    lowest = min(level.config["lr"] for level in it.y.levels) / 5
    found = {}
    for seed in range(it.grid.seeds):
        for level in it.x.levels:
            cfg = it.grid.point((level,), "exact", seed, lowest).config
            cfg = replace(cfg, eval_samples=min(cfg.eval_samples, 1024))
            found[level.label, seed] = Forecast(cfg, ARMS, PROBED, batches=16)
    return found


def predictions(it: Diagram, store: Store) -> dict[tuple[str, str], float]:
    """(x label, arm) -> the critical rate by mean-square stability, median over seeds.

    Raises FileNotFoundError if a forecast is missing.
    """
    wanted = forecasts(it)
    records = load_points(list(wanted.values()), store)
    return {
        (x, arm): float(
            np.median(
                [
                    mean_square_rate(task, records[task.id], arm, 1)
                    for (label, _), task in wanted.items()
                    if label == x
                ]
            )
        )
        for x in it.x.labels
        for arm in ARMS
    }


def _factor(ratio: float) -> Level:
    return Level(f"{ratio:.3g}", rate=ratio)


@dataclass(frozen=True)
class Results:
    """A diagram's stored runs: the record of each cell, None where there is none; thresholds."""

    name: Name
    diagram: Diagram
    records: Mapping[Cell, Record | None]
    thresholds: Mapping[tuple[str, str], Threshold]

    def _of(self, x: str, y: str, arm: str) -> list[Record | None]:
        return [self.records[Cell((x, y), arm, s)] for s in range(self.diagram.grid.seeds)]

    def states(self, x: str, y: str, arm: str) -> list[State]:
        """What became of each seed."""
        return [state_of(record) for record in self._of(x, y, arm)]

    def failed(self, x: str, y: str, arm: str) -> list[bool | None]:
        """Whether each seed diverged or became non-finite; None without a result."""
        states = self.states(x, y, arm)
        return [None if s in ("failed", "not run") else s in FAILURES for s in states]

    def rises(self, x: str, arm: str) -> bool:
        """Whether no rate of the grid fails in most seeds while a higher one does in the fewest."""
        shares = [
            np.mean(known)
            for y in self.diagram.y.labels
            if (known := [f for f in self.failed(x, y, arm) if f is not None])
        ]
        most = [i for i, share in enumerate(shares) if share > 0.5]
        return not most or all(share >= 0.5 for share in shares[most[0] :])

    def first_bad_step(self, x: str, y: str, arm: str) -> float:
        """Median over the seeds that failed; NaN if none did."""
        steps = [
            record.meta["first_bad_step"]
            for record in self._of(x, y, arm)
            if record is not None and state_of(record) in FAILURES
        ]
        return float(np.median(steps)) if steps else math.nan

    def excess(self, x: str, y: str, arm: str) -> list[float]:
        """Held-out loss over the floor of its own setting, of the seeds that did not fail."""
        found = []
        for record in self._of(x, y, arm):
            if record is not None and state_of(record) in ("ok", "recovered"):
                floor = irreducible_loss(ProxyConfig(**record.meta["config"]))
                found.append(float(record.meta["eval_loss"]) / floor.loss)
        return found


def load(name: Name, tier: Tier, root: Path = Path("results"), partial: bool = False) -> Results:
    """Stored results; FileNotFoundError if any run is missing, unless ``partial``."""
    store = Store(root / f"{STUDY}_{tier}")
    it = diagram(name, tier)
    points = it.grid.points()
    records = load_cells(points, store)
    absent = sum(state_of(record) in ("failed", "not run") for record in records.values())
    if absent and not partial:
        raise FileNotFoundError(f"{absent} of {len(points)} cells have no result in {store.folder}")
    thresholds = stored_traces(it.columns(), store, partial) if it.traced else {}
    return Results(name, it, records, thresholds)


@dataclass(frozen=True)
class Comparison:
    """All cells and seeds with a result in both arms: how many fail, and where the arms differ.

    difference: MX share failed minus exact share failed, a mean over seeds, each over all cells.
    """

    pairs: int
    both: int
    mx_only: int
    exact_only: int
    difference: Estimate


def compare(results: Results) -> Comparison:
    """Pair the arms by cell and seed; seeds, not cells, are the independent units."""
    it = results.diagram
    mx, exact = (
        np.array(
            [
                [np.nan if f is None else float(f) for f in results.failed(x, y, arm)]
                for x in it.x.labels
                for y in it.y.labels
            ]
        )
        for arm in (ARMS[1], ARMS[0])
    )
    known = ~np.isnan(mx) & ~np.isnan(exact)
    a, b = (mx == 1) & known, (exact == 1) & known
    per_seed = np.array(
        [(a[:, s].sum() - b[:, s].sum()) / n for s in range(a.shape[1]) if (n := known[:, s].sum())]
    )
    return Comparison(
        pairs=int(known.sum()),
        both=int((a & b).sum()),
        mx_only=int((a & ~b).sum()),
        exact_only=int((~a & b).sum()),
        difference=mean_over_seeds(per_seed),
    )


def print_tables(results: Results, console: Console) -> None:
    """The cells, the comparison of the arms, the traced boundary."""
    it, n = results.diagram, results.diagram.grid.seeds
    base = it.grid.base
    table = Table(
        title=f"{results.name}: share of {n} seeds that failed [Wilson 95 %], median first bad "
        f"step, median held-out loss / floor of its own setting of those that did not\n(width "
        f"{base.width}, depth {base.depth}, batch {base.batch}, {base.steps} steps unless varied)",
        title_justify="left",
    )
    for word in (it.x.name, it.y.name):
        table.add_column(word, no_wrap=True)
    for arm in ARMS:
        for word in ("failed", "step", "loss / floor"):
            table.add_column(f"{arm}\n{word}", justify="right", no_wrap=True)
    table.add_column("both/MX only/exact only", no_wrap=True)
    for x in it.x.labels:
        for y in it.y.labels:
            cells = []
            for arm in ARMS:
                failed = [f for f in results.failed(x, y, arm) if f is not None]
                step, excess = results.first_bad_step(x, y, arm), results.excess(x, y, arm)
                cells += [
                    str(share(sum(failed), len(failed))) if failed else "-",
                    "-" if math.isnan(step) else f"{step:.0f}",
                    f"{np.median(excess):.3g}" if excess else "-",
                ]
            pairs = list(zip(*(results.failed(x, y, arm) for arm in ARMS), strict=True))
            counts = [pairs.count(each) for each in ((True, True), (False, True), (True, False))]
            table.add_row(x, y, *cells, "/".join(map(str, counts)))
        table.add_section()
    console.print(table)
    c = compare(results)
    console.print(
        f"{c.pairs} pairs: {c.both} fail in both arms, {c.mx_only} in MX only, {c.exact_only} in "
        f"exact only; MX minus exact share, mean over {c.difference.n} seeds: {c.difference} (95 %)"
    )
    for arm in ARMS:
        different = {r.id for cell, r in results.records.items() if r and cell.arm == arm}
        if len(different) < c.pairs:
            console.print(f"{arm}: {len(different)} different runs, each in several cells")
    if results.thresholds:
        table = Table(
            title="learning rate at which half of the runs fail [95 % credible interval], n runs",
            title_justify="left",
        )
        for word in (it.x.name, *ARMS):
            table.add_column(word, no_wrap=True)
        for x in it.x.labels:
            cells = []
            for arm in ARMS:
                found = results.thresholds.get((x, arm))
                mark = "" if found is None or results.rises(x, arm) else " †"
                cells.append("-" if found is None else in_words(found) + mark)
            table.add_row(x, *cells)
        console.print(table)
        console.print(
            "An interval that closed early on a gradual boundary is too narrow (docs/sweeps.md). "
            "†: in the grid more than half fail at some rate and less than half at a higher one; "
            "the trace takes P(fail) to rise."
        )
        if not all(t.converged for t in results.thresholds.values()):
            most, width = it.sizes.trace_runs, it.sizes.trace_width
            console.print(f"* wider than a factor of {width:g} after {most} runs")


def in_words(t: Threshold) -> str:
    """A threshold for a table, with its n; starred if wider than asked for."""
    return f"{t}, n {t.n}" + ("" if t.converged else " *")


@dataclass(frozen=True)
class Arguments(Execution):
    """Phase diagrams of training failure, exact and MX side by side."""

    diagrams: tuple[Name, ...] = ("lr_depth",)
    """Which of the ten."""
    tier: Tier = "laptop"
    """smoke: seconds; laptop: minutes a diagram on two cores; cluster: the paper's sizes."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    partial: bool = False
    """Print and draw what is there even if runs failed or are missing."""
    trace: bool = True
    """Trace the boundary, too, where one axis is the learning rate."""
    predict: bool = False
    """Lay the rate over the figure that a probe of an exact run's start predicts (Adam, where only
    the configuration varies)."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


def main(arguments: Arguments) -> int:
    """Run what is missing, print the tables, draw the figures; the exit status."""
    from figures.phase_diagrams import draw  # the figure reads this module

    console = Console()
    store = Store(arguments.results / f"{STUDY}_{arguments.tier}")
    chosen = {name: diagram(name, arguments.tier) for name in arguments.diagrams}
    wanted = [point for it in chosen.values() for point in it.grid.points().values()]
    if arguments.dry_run:
        describe(wanted, store, arguments, console)
        traced = [c for it in chosen.values() if it.traced for c in it.columns().values()]
        if traced and arguments.trace:
            most = SIZES[arguments.tier].trace_runs
            points = [column.point(column.search.low, 0) for column in traced]
            seconds = most * sum(cost_of(point.config, point.scheme).total for point in points)
            console.print(
                f"and {len(traced)} columns to trace, at most {most} runs each: at most "
                f"{in_words_of(seconds)} of one worker"
            )
        return 0
    if not execute(wanted, store, arguments, console) and not arguments.partial:
        return 1
    columns = {
        (name, *key): column
        for name, it in chosen.items()
        if it.traced and arguments.trace
        for key, column in it.columns().items()
    }
    if columns and not trace_columns(columns, store, arguments, console) and not arguments.partial:
        return 1
    predicted: dict[Name, dict[tuple[str, str], float]] = {}
    if arguments.predict:
        able = {name: it for name, it in chosen.items() if name in PREDICTED}
        probes = [task for it in able.values() for task in forecasts(it).values()]
        if not execute(probes, store, arguments, console):
            return 1
        predicted = {name: predictions(it, store) for name, it in able.items()}
    for name in chosen:
        results = load(
            name,
            arguments.tier,
            arguments.results,
            partial=arguments.partial or not arguments.trace,
        )
        print_tables(results, Console(width=max(console.width, 150)))
        for (x, arm), rate in predicted.get(name, {}).items():
            console.print(f"predicted for {name} {x}, {arm}: {rate:.3g}", highlight=False)
        picture = draw(results, store.folder / f"{name}.png", predicted.get(name))
        console.print(f"figure: {picture}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
