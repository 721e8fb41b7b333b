"""Where is the edge of stability when gradients are quantized?

    python -m studies.quantized_edge [--tier smoke|laptop] [--results DIR]

Under full-batch training the exact loss's sharpness S hovers where the optimizer is just stable:
eta S = c, with c = 2 for gradient descent, 2 (1 + b) for heavy ball and 38 for Adam (beta1 = 0.9,
S of P^-1 H).  With a gradient g~ in place of g, the descent condition puts the edge at

    eta S = c alpha / (alpha^2 + rho^2) = c <g~, g> / <g~, g~>,

alpha and rho measured at the same points.  That formula was written down before it was measured.
Its rivals, on the same runs:

- in P's metric: the same with products in P^-1, in which Adam descends;
- displaced: stability in mean along the top eigenvector v, c over the gain with which <v, g~>
  answers when the parameters are displaced along v, to both sides of the valley's floor;
- the stochastic sharpness gap eta beta sigma^2 / (4 alpha) of arXiv:2604.21016 (gradient descent),
  its alpha the progressive sharpening, its beta the strength of self-stabilization.

What cannot be a theory of the edge: anything made of <v, g~> and <v, g> along the run itself.
Wherever <v, g>^2 is stationary, <v, g>' = <v, g> - eta S <v, g~> alone makes

    eta S = 2 sum <v, g~> <v, g> / sum <v, g~>^2,

an identity, whatever the error is (and mean-square stability with mu and s2 by regression over the
run is the same number).  It is printed as a check of the linear picture along v.

Controls put synthetic noise of known mu and s2 on the exact gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import ProxyConfig
from mxsim.curvature import edge_of_stability
from mxsim.executors import Execution
from mxsim.progress import execute
from mxsim.stats import Estimate, median_over_seeds
from mxsim.store import Record, Store
from mxsim.sweep import load_points
from mxsim.theory.stability import almost_sure_threshold, mean_square_threshold, mean_threshold
from studies.command import run_as_command
from studies.edge_conditions import Condition, conditions
from studies.edge_runs import EdgeRun

Array = NDArray[Any]
Tier = Literal["smoke", "laptop"]
STUDY = "quantized_edge"


@dataclass(frozen=True)
class Design:
    """The base that conditions vary, the conditions, and how many seeds."""

    base: ProxyConfig
    conditions: tuple[Condition, ...]
    seeds: int
    every: int
    burst: int


BASE = ProxyConfig(
    width=32,
    depth=2,
    batch=512,
    data="fixed",
    label_noise=0.0,
    teacher_depth=1,
    teacher_gain=5.3,
    dtype="float64",
    eval_samples=512,
)


def small(condition: Condition) -> Condition:
    """The same in a few steps, for tests."""
    changes = {**condition.config, "steps": 40, "warmup": 0}
    return replace(condition, config=changes)


def design_of(tier: Tier) -> Design:
    """The design of a tier."""
    if tier == "laptop":
        return Design(BASE, conditions(), seeds=4, every=21, burst=60)
    chosen = [c for c in conditions() if c.label == "exact" or "control" in c.group]
    chosen += [c for c in conditions() if c.label == "gemm fp8_e4m3"]
    base = replace(BASE, width=8, batch=16, eval_samples=16)
    return Design(base, tuple(map(small, chosen)), seeds=2, every=5, burst=12)


def runs(design: Design) -> dict[tuple[str, str, int], EdgeRun]:
    """(group, label, seed) -> run; seeds outermost."""
    return {
        (c.group, c.label, seed): EdgeRun(
            replace(design.base, **c.config, seed=seed),
            c.scheme,
            c.noise,
            design.every,
            design.burst,
        )
        for seed in range(design.seeds)
        for c in design.conditions
    }


# ---------------------------------------------------------------- what is read off a run


@dataclass(frozen=True)
class Reading:
    """One run: eta S over its second half, and what each theory says it should be."""

    measured: float
    edge: float  # c, the exact one
    predicted: Mapping[str, float]
    identity: float  # 2 sum <v, g~><v, g> / sum <v, g~>^2, plain gradient descent only
    alpha: float  # <g~, g> / |g|^2, pooled over the second half, as are the others
    rho: float
    gain: float  # of <v, g~> where the parameters are displaced along v
    memory: float  # see _memory
    settled: float  # mean of the last quarter over that of the third
    right: float  # share of steps whose rise or fall of the exact loss the descent condition says
    rises: float  # share of steps in which the exact loss rises


PREDICTORS: Mapping[str, str] = {
    "descent": "descent: c alpha / (alpha^2 + rho^2)",
    "descent in P": "descent in P's metric",
    "displaced": "in mean along v, gain by displacement",
    "sharpness gap": "stochastic sharpness gap, arXiv:2604.21016",
}


def read(record: Record) -> Reading:
    """The second half of a run; NaN if nothing was measured there."""
    cfg = ProxyConfig(**record.meta["config"])
    a = {name: np.asarray(each, float) for name, each in record.arrays.items()}
    steps = a["steps"]
    late = (steps >= cfg.steps / 2) & np.isfinite(a["qq"])
    c = edge_of_stability(cfg)
    if not late.any():
        nothing = dict.fromkeys(PREDICTORS, np.nan)
        return Reading(np.nan, c, nothing, *[np.nan] * 8)
    s = cfg.lr * a["sharpness"]
    vg, vq = a["vg"][late], a["vq"][late]
    gain = float(np.sum(a["answer"][late]) / np.sum(a["answer_exact"][late]))
    predicted = {
        "descent": c * float(np.mean((a["qg"] / a["qq"])[late])),
        "descent in P": c * float(np.mean((a["qg_p"] / a["qq_p"])[late])),
        "displaced": c / gain if gain > 0 else np.nan,
        "sharpness gap": np.nan,
    }
    plain = cfg.optimizer == "sgd" and cfg.momentum == 0
    if plain:
        drift, strength = (float(np.mean(a[name][late])) for name in ("drift", "strength"))
        if drift > 0:  # the theory's domain: the sharpness would rise by itself
            gap = cfg.lr**2 * strength * float(np.var(vq - vg)) / (4 * drift)
            predicted["sharpness gap"] = c - gap
    alpha = float(a["qg"][late].sum() / a["gg"][late].sum())
    power = float(a["qq"][late].sum() / a["gg"][late].sum())
    third = late & (steps < 0.75 * cfg.steps)
    settled = float(np.mean(s[late & ~third]) / np.mean(s[third])) if third.any() else np.nan
    falls = a["change"][late] < 0
    return Reading(
        float(np.mean(s[late])),
        c,
        predicted,
        float(2 * (vq @ vg) / (vq @ vq)) if plain else np.nan,
        alpha,
        float(np.sqrt(max(power - alpha**2, 0))),
        gain,
        _memory(a["burst_vg"], a["burst_vq"]),
        settled,
        float(np.mean((a["scale"][late] > 1) == falls)),
        float(np.mean(~falls)),
    )


def _memory(vg: Array, vq: Array) -> float:
    """Correlation from step to step of the error along v beside its mean gain, by v's own sign.

    NaN without such an error.
    """
    known = np.isfinite(vg) & np.isfinite(vq)  # the burst may begin a few steps late
    vg, vq = vg[known], vq[known]
    if len(vg) < 3:
        return np.nan
    rest = (vq - (vq @ vg) / (vg @ vg) * vg) * np.sign(vg)
    if np.ptp(rest) <= 1e-9 * np.ptp(vg):
        return np.nan
    return float(np.corrcoef(rest[1:], rest[:-1])[0, 1])


@dataclass(frozen=True)
class Results:
    """A reading of each run, by (group, label), in order of seeds; ``arrays`` of the runs."""

    design: Design
    readings: Mapping[tuple[str, str], tuple[Reading, ...]]
    arrays: Mapping[tuple[str, str], tuple[Mapping[str, Array], ...]]
    stopped: int

    def exact_edge(self, group: str, label: str) -> float:
        """eta S of the exact full-batch runs of a condition's setting, median over seeds."""
        optimizer = group.removesuffix(" control")
        partner = "exact" + label[label.find(", ") :] if ", " in label else "exact"
        if (optimizer, partner) not in self.readings or "batch" in label:
            partner = "exact"
        return over_seeds(self.readings[optimizer, partner], lambda r: r.measured).value

    def relative(self, predictor: str, groups: tuple[str, ...]) -> Array:
        """Measured edge over the exact runs' over predicted edge over c, of every inexact run."""
        found = [
            (r.measured / self.exact_edge(group, label)) / (r.predicted[predictor] / r.edge)
            for (group, label), each in self.readings.items()
            if group in groups and not is_exact(label)
            for r in each
            if np.isfinite(r.predicted[predictor]) and r.predicted[predictor] > 0
        ]
        return np.array(found)


def is_exact(label: str) -> bool:
    """Whether a condition has exact gradients of the whole batch."""
    return label.startswith("exact") and "batch" not in label


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's results; FileNotFoundError if one is missing."""
    design = design_of(tier)
    wanted = runs(design)
    records = load_points(list(wanted.values()), Store(results / f"{STUDY}_{tier}"))
    readings: dict[tuple[str, str], list[Reading]] = {}
    arrays: dict[tuple[str, str], list[Mapping[str, Array]]] = {}
    stopped = 0
    for (group, label, _), task in wanted.items():
        record = records[task.id]
        stopped += record.meta["status"] != "ok"
        readings.setdefault((group, label), []).append(read(record))
        arrays.setdefault((group, label), []).append(record.arrays)
    return Results(
        design,
        {key: tuple(each) for key, each in readings.items()},
        {key: tuple(each) for key, each in arrays.items()},
        stopped,
    )


def over_seeds(readings: tuple[Reading, ...], value: Callable[[Reading], float]) -> Estimate:
    """Median over the seeds that have the value."""
    values = np.array([value(r) for r in readings])
    return median_over_seeds(values[np.isfinite(values)])


def prediction(name: str) -> Callable[[Reading], float]:
    """What a theory says of a reading."""
    return lambda reading: reading.predicted[name]


def print_tables(results: Results, console: Console) -> None:
    """Measured and predicted edges, and how well each theory does over all runs."""
    design = results.design
    table = Table(
        title=f"eta S over the second half, median of {design.seeds} seeds [95 %], and what each "
        "theory says (median)",
        title_justify="left",
    )
    for name in ("optimizer", "condition"):
        table.add_column(name, no_wrap=True)
    heads = ("measured", "descent", "in P", "displaced", "gap", "identity")
    fields = ("alpha", "rho", "gain", "memory", "settled", "right", "rises")
    for name in (*heads, *fields):
        table.add_column(name, justify="right", no_wrap=True)
    last = None
    for (group, label), each in results.readings.items():
        if last not in (None, group):
            table.add_section()
        last = group
        cells = [str(over_seeds(each, lambda r: r.measured))]
        values = [over_seeds(each, prediction(name)).value for name in PREDICTORS]
        values += [over_seeds(each, attrgetter(name)).value for name in ("identity", *fields)]
        cells += [f"{value:.2f}" if np.isfinite(value) else "-" for value in values]
        table.add_row(group, label, *cells)
    console.print(table)
    console.print(
        "identity: no theory, see the module's first lines. gain: of <v, g~> by displacement along "
        "v. memory: correlation from step to step of the error along v beside its mean gain. "
        "settled: mean of eta S in the last quarter over that in the third (1: it hovers). right: "
        "share of measured steps in which the exact loss does what 2 <g, u> / (u^T H u) > 1 says; "
        "rises: share in which it rises."
    )
    print_controls(results, console)
    table = Table(
        title="measured / predicted, each relative to exact runs, over all inexact runs: median "
        "[10 to 90 %], share within 10 %",
        title_justify="left",
    )
    table.add_column("theory", no_wrap=True)
    kinds = {
        "GD": ("GD",),
        "heavy ball": ("heavy ball",),
        "Adam": ("Adam",),
        "synthetic noise": ("GD control", "Adam control"),
    }
    for kind in kinds:
        table.add_column(kind, no_wrap=True)
    for name, words in PREDICTORS.items():
        cells = []
        for groups in kinds.values():
            ratio = results.relative(name, groups)
            if not len(ratio):
                cells.append("-")
                continue
            low, middle, high = np.quantile(ratio, (0.1, 0.5, 0.9))
            within = np.mean(np.abs(np.log(ratio)) < np.log(1.1))
            cells.append(
                f"{middle:.2f} [{low:.2f}, {high:.2f}] {100 * within:.0f} %, n {len(ratio)}"
            )
        table.add_row(words, *cells)
    console.print(table)
    total = sum(map(len, results.readings.values()))
    console.print(f"{total} runs, {results.stopped} stopped at a NaN or Inf")


def print_controls(results: Results, console: Console) -> None:
    """Noise of known mu and s2 against the thresholds derived for it."""
    table = Table(
        title="synthetic noise common to all parameters: thresholds derived from its mu and s2",
        title_justify="left",
    )
    for name in ("optimizer", "noise", "measured", "in mean", "mean square", "almost surely"):
        table.add_column(name, no_wrap=True, justify="left" if name == "noise" else "right")
    for c in results.design.conditions:
        if c.noise is None or c.noise.kind != "common":
            continue
        cfg = replace(results.design.base, **c.config)
        adam = cfg.optimizer == "adam"
        optimizer, b = ("ema", cfg.beta1) if adam else ("heavy_ball", cfg.momentum)
        mu, s2 = c.noise.mu, c.noise.s2
        thresholds = (
            mean_threshold(optimizer, b, mu),
            mean_square_threshold(optimizer, b, mu, s2),
            almost_sure_threshold(optimizer, b, mu, s2),
        )
        measured = over_seeds(results.readings[c.group, c.label], lambda r: r.measured)
        table.add_row(c.group, c.label, str(measured), *(f"{t:.2f}" for t in thresholds))
    console.print(table)


@dataclass(frozen=True)
class Arguments(Execution):
    """The edge of stability with quantized gradients: measured and predicted."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: 4 seeds a condition."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print how many runs there are and how many are to do."""


def main(arguments: Arguments) -> int:
    """Run what is missing, print the tables, draw the figures; the exit status."""
    from figures.quantized_edge import draw, draw_arms  # the figure reads this module

    console = Console()
    store = Store(arguments.results / f"{STUDY}_{arguments.tier}")
    wanted = list(runs(design_of(arguments.tier)).values())
    if arguments.dry_run:
        left = sum(not store.has(task.id) for task in wanted)
        console.print(f"{len(wanted)} runs, {left} to do, about 8 s each on one core")
        return 0
    if not execute(wanted, store, arguments, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 175)))
    for picture in (
        draw(results, store.folder / f"{STUDY}.png"),
        draw_arms(results, store.folder / "arms.png"),
    ):
        console.print(f"figure: {picture}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
