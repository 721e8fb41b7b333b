"""Can a probe of an exact run say at which learning rate training fails, exact and in MX?

    python -m studies.threshold_prediction [--tier smoke|laptop] [--results DIR]

Predictions, never seeing a run that fails: an exact run at a low rate is stopped at a few steps.
There, on a large sample: the exact loss's (preconditioned) sharpness S; over fresh batches, mu and
s2 of <v, g~> / <v, g> - 1 along its top eigenvector v, and alpha, rho of the whole gradient, g the
exact gradient of the same batch.  Each theory then gives a critical rate, its threshold of eta S
over S.  Measurement: the rate at which half of the runs fail, traced by runs of their own
(mxsim.boundary).

All moments are shown: which one matters is part of the question.  Gradient descent and heavy ball
fail in their first steps, or not at all: once training has begun, crossing the edge makes sharpness
fall, not the run fail.  Two controls: the exact prediction used for all schemes (does the scheme
matter at all?), and, for Adam, S with P of the beginning (a second moment that lags).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import (
    DivergenceRule,
    ProxyConfig,
    make_batches,
    make_teacher,
    scheme,
    start,
)
from mxsim.boundary import Search, Threshold
from mxsim.curvature import edge_of_stability, hvp, top_eigenvalue
from mxsim.data import held_out
from mxsim.executors import Execution
from mxsim.precision import PrecisionScheme
from mxsim.progress import execute
from mxsim.stats import Estimate, median_over_seeds
from mxsim.store import Record, Store, provenance, result_id
from mxsim.sweep import Point, load_points
from mxsim.theory.stability import almost_sure_threshold, mean_square_threshold, mean_threshold
from mxsim.threads import one_blas_thread
from mxsim.tracing import Column, stored_traces, trace_columns
from studies.command import run_as_command
from studies.edge_runs import flat_gradient, preconditioner

Array = NDArray[Any]
Tier = Literal["smoke", "laptop"]
STUDY = "threshold_prediction"
SCHEMES = ("exact", "gemm_e4m3", "ln_only_e4m3", "all_e4m3", "gemm_e2m1", "all_e2m1")
THEORIES = ("mean", "mean square", "almost surely", "descent", "exact's")


@dataclass(frozen=True)
class Arm:
    """An optimizer, the low rate of the run that is probed, and the range that is searched."""

    name: str
    config: tuple[tuple[str, Any], ...]
    probe: float
    low: float
    high: float


@dataclass(frozen=True)
class Design:
    """``moments``: steps at which the exact run is probed, each on ``batches`` fresh batches."""

    base: ProxyConfig
    arms: tuple[Arm, ...]
    moments: tuple[int, ...]
    batches: int
    seeds: int
    max_runs: int
    width: float
    schemes: tuple[str, ...] = SCHEMES


ARMS = (
    Arm("gradient descent", (("optimizer", "sgd"),), 0.1, 1.0, 60.0),
    Arm("heavy ball", (("optimizer", "sgd"), ("momentum", 0.9)), 0.02, 0.2, 20.0),
    Arm("Adam", (("optimizer", "adam"),), 1e-3, 4e-3, 0.2),
)
# The rule of the phase diagrams: a run must come below a tenth of the trivial loss.
RULE = DivergenceRule(learned_fraction=0.1)

DESIGNS: Mapping[Tier, Design] = {
    "smoke": Design(
        ProxyConfig(width=8, depth=2, batch=16, steps=20, eval_samples=64),
        ARMS,
        moments=(1, 5),
        batches=4,
        seeds=2,
        max_runs=8,
        width=2.0,
        schemes=("exact", "all_e2m1"),
    ),
    "laptop": Design(
        ProxyConfig(width=32, depth=4, batch=128, steps=300, eval_samples=2048),
        ARMS,
        moments=(1, 3, 10, 30, 100, 299),
        batches=24,
        seeds=6,
        max_runs=36,
        width=1.15,
    ),
}


@dataclass(frozen=True)
class Forecast:
    """An exact run at the low rate, probed: a task."""

    config: ProxyConfig
    schemes: tuple[str, ...]
    moments: tuple[int, ...]
    batches: int
    study: str = STUDY

    @cached_property
    def id(self) -> str:
        return result_id(self)

    @property
    def words(self) -> str:
        return f"forecast, {self.config.optimizer}, seed {self.config.seed}"

    def settings(self) -> dict[str, Any]:
        """What determines it, as plain JSON data."""
        return asdict(self)

    def run(self) -> Record:
        """Arrays: sharpness (moments,); with P of the first moment, lagging (moments,); and
        mu, s2, alpha, rho (moments, schemes)."""
        with one_blas_thread():
            return self._run()

    def _run(self) -> Record:
        cfg = self.config
        training = start(cfg, scheme("exact"))
        teacher = make_teacher(cfg)
        x, y = held_out(cfg, teacher)
        fresh = make_batches(cfg, teacher)
        shape = (len(self.moments), len(self.schemes))
        arrays: dict[str, Array] = {
            name: np.full(shape, np.nan) for name in ("mu", "s2", "alpha", "rho")
        }
        arrays |= {name: np.full(shape[0], np.nan) for name in ("sharpness", "lagging")}
        chosen = [scheme(name) for name in self.schemes]
        first: Array | None = None
        for i, moment in enumerate(self.moments):
            training.advance(moment - training.step)
            if training.bad_step is not None:
                break
            p = preconditioner(training)
            first = p if first is None else first
            hessian = hvp(training.params, x, y, cfg)
            found = top_eigenvalue(hessian, hessian.size, preconditioner=p)
            arrays["sharpness"][i] = found.largest_algebraic
            arrays["lagging"][i] = top_eigenvalue(
                hessian, hessian.size, preconditioner=first, start=found.eigenvector
            ).largest_algebraic
            v = found.eigenvector
            products = np.array(
                [
                    self._products(training.params, fresh.at(10**6 + j), chosen, v, p)
                    for j in range(self.batches)
                ]
            )  # (batches, schemes, 5)
            vg, vq, gg, qg, qq = (products[..., k] for k in range(5))
            gain = (vq * vg).sum(0) / (vg**2).sum(0)
            arrays["mu"][i] = gain - 1
            arrays["s2"][i] = ((vq - gain * vg) ** 2).sum(0) / (vg**2).sum(0)
            alpha = qg.sum(0) / gg.sum(0)
            arrays["alpha"][i] = alpha
            arrays["rho"][i] = np.sqrt(np.maximum(qq.sum(0) / gg.sum(0) - alpha**2, 0))
        meta = {**self.settings(), "versions": dict(provenance()), "status": "ok"}
        return Record(self.id, arrays, meta)

    def _products(
        self,
        params: Any,
        batch: tuple[Array, Array],
        schemes: list[PrecisionScheme],
        v: Array,
        p: Array,
    ) -> list[tuple[Any, ...]]:
        """Of each scheme: <v, g>, <v, g~>, and <g, g>, <g~, g>, <g~, g~> in P's metric."""
        g = flat_gradient(params, batch, self.config, scheme("exact"))
        rows = []
        for each in schemes:
            q = flat_gradient(params, batch, self.config, each)
            rows.append((v @ g, v @ q, g @ (g / p), q @ (g / p), q @ (q / p)))
        return rows


def theory_of(cfg: ProxyConfig) -> tuple[str, float]:
    """The optimizer of mxsim.theory.stability that a configuration is, and its momentum."""
    return ("ema", cfg.beta1) if cfg.optimizer == "adam" else ("heavy_ball", cfg.momentum)


def mean_square_rate(forecast: Forecast, record: Record, name: str, moment: int) -> float:
    """The critical rate of one probed run by mean-square stability; NaN if 1 + mu <= 0."""
    j = forecast.schemes.index(name)
    mu, s2 = (float(record.arrays[key][moment, j]) for key in ("mu", "s2"))
    if not mu > -1:
        return float("nan")
    edge = mean_square_threshold(*theory_of(forecast.config), mu, s2)
    return float(edge / record.arrays["sharpness"][moment])


def config_of(design: Design, arm: Arm) -> ProxyConfig:
    """The base with an arm's optimizer, at the rate of the probed run."""
    return replace(design.base, **dict(arm.config), lr=arm.probe)


def forecasts(design: Design) -> dict[tuple[str, int], Forecast]:
    """(arm, seed) -> the run to probe."""
    return {
        (arm.name, seed): Forecast(
            replace(config_of(design, arm), seed=seed),
            design.schemes,
            design.moments,
            design.batches,
        )
        for seed in range(design.seeds)
        for arm in design.arms
    }


def columns(design: Design) -> dict[tuple[str, str], Column]:
    """(arm, scheme) -> the search for the rate at which half of the runs fail."""
    found = {}
    for arm in design.arms:
        for name in design.schemes:

            def point(lr: float, seed: int, arm: Arm = arm, name: str = name) -> Point:
                cfg = replace(config_of(design, arm), lr=lr, seed=seed)
                return Point(cfg, scheme(name), rule=RULE)

            search = Search(arm.low, arm.high, width=design.width, max_runs=design.max_runs)
            found[arm.name, name] = Column(search, point)
    return found


@dataclass(frozen=True)
class Results:
    """``arrays[arm]`` of the forecasts, stacked over seeds; traced ``thresholds``."""

    design: Design
    arrays: Mapping[str, Mapping[str, Array]]
    thresholds: Mapping[tuple[str, str], Threshold]

    def _of(self, arm: str, name: str) -> tuple[ProxyConfig, str, float, tuple[Array, ...]]:
        """Configuration, optimizer and momentum for the theory; mu, s2, alpha, rho of a scheme."""
        cfg = config_of(self.design, next(a for a in self.design.arms if a.name == arm))
        optimizer, b = (
            ("ema", cfg.beta1) if cfg.optimizer == "adam" else ("heavy_ball", cfg.momentum)
        )
        j = self.design.schemes.index(name)
        values = tuple(self.arrays[arm][key][:, :, j] for key in ("mu", "s2", "alpha", "rho"))
        return cfg, optimizer, b, values

    def critical(self, arm: str, name: str, theory: str) -> Array:
        """Predicted critical rates (seeds, moments) by a theory in closed form."""
        cfg, optimizer, b, (mu, s2, alpha, rho) = self._of(
            arm, "exact" if theory == "exact's" else name
        )
        possible = np.where(mu > -1, mu, np.nan)
        safe = np.nan_to_num(possible, nan=0.0)
        if theory == "descent":
            edge = edge_of_stability(cfg) * alpha / (alpha**2 + rho**2)
        elif theory == "mean square":
            edge = mean_square_threshold(optimizer, b, safe, s2) + 0 * possible
        else:
            edge = mean_threshold(optimizer, b, safe) + 0 * possible
        return np.asarray(edge / self.arrays[arm]["sharpness"])

    def predicted(self, arm: str, name: str, theory: str, moment: int) -> Estimate:
        """The critical rate at the ``moment``-th moment, median over seeds.

        ``almost surely`` (a numerical threshold) is that of the median mu and s2.
        """
        if theory == "almost surely":
            _, optimizer, b, (mu, s2, _, _) = self._of(arm, name)
            m, s = float(np.median(mu[:, moment])), float(np.median(s2[:, moment]))
            edge = almost_sure_threshold(optimizer, b, m, round(s, 9)) if m > -1 else np.nan
            rates = edge / self.arrays[arm]["sharpness"][:, moment]
        else:
            rates = self.critical(arm, name, theory)[:, moment]
        return median_over_seeds(rates[np.isfinite(rates)])

    def ratio(self, arm: str, name: str, theory: str, moment: int) -> float:
        """Predicted over traced."""
        value = self.predicted(arm, name, theory, moment).value
        return value / self.thresholds[arm, name].value


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's results; FileNotFoundError if one is missing."""
    design, store = DESIGNS[tier], Store(results / f"{STUDY}_{tier}")
    wanted = forecasts(design)
    records = load_points(list(wanted.values()), store)
    arrays = {
        arm.name: {
            name: np.stack(
                [
                    np.asarray(records[wanted[arm.name, seed].id].arrays[name], float)
                    for seed in range(design.seeds)
                ]
            )
            for name in ("sharpness", "lagging", "mu", "s2", "alpha", "rho")
        }
        for arm in design.arms
    }
    return Results(design, arrays, stored_traces(columns(design), store))


def print_tables(results: Results, console: Console) -> None:
    """Predicted and traced critical rates, and what went into them."""
    design, base = results.design, results.design.base
    for moment, step in enumerate(design.moments):
        if moment not in (0, 1, len(design.moments) - 1):
            continue
        table = Table(
            title=f"critical learning rate: traced [95 % credible], n runs; predicted at step "
            f"{step} of the probed run, median of {design.seeds} seeds, in brackets predicted / "
            f"traced\n(width {base.width}, depth {base.depth}, batch {base.batch}, "
            f"{base.steps} steps)",
            title_justify="left",
        )
        for word in ("optimizer", "scheme", "traced", *THEORIES):
            table.add_column(word, no_wrap=True)
        for arm in design.arms:
            for name in design.schemes:
                t = results.thresholds[arm.name, name]
                cells = []
                for theory in THEORIES:
                    p = results.predicted(arm.name, name, theory, moment)
                    ratio = results.ratio(arm.name, name, theory, moment)
                    cells.append(f"{p.value:.2g} [{p.low:.2g}, {p.high:.2g}] ({ratio:.2f})")
                star = "" if t.converged else " *"
                table.add_row(arm.name, name, f"{t}, {t.n}{star}", *cells)
            table.add_section()
        console.print(table)
    console.print(f"* wider than a factor of {design.width:g} after {design.max_runs} runs")
    closed = [theory for theory in THEORIES if theory != "almost surely"]
    table = Table(
        title="predicted / traced by step of the probed run: median over schemes [lowest, highest]",
        title_justify="left",
    )
    for word in ("optimizer", "step", *closed):
        table.add_column(word, no_wrap=True)
    for arm in design.arms:
        for moment, step in enumerate(design.moments):
            cells = []
            for theory in closed:
                found = np.array(
                    [results.ratio(arm.name, name, theory, moment) for name in design.schemes]
                )
                known = found[np.isfinite(found)]
                cells.append(
                    f"{np.median(known):.3g} [{known.min():.3g}, {known.max():.3g}]"
                    if len(known)
                    else "-"
                )
            table.add_row(arm.name, str(step), *cells)
        table.add_section()
    console.print(table)
    table = Table(
        title="what went in, by step of the probed run (median over seeds): its rate times S; with "
        "P of the first moment; and 1 + mu, s2, alpha, rho",
        title_justify="left",
    )
    for word in ("optimizer", "step", "rate * S", "lagging P", *design.schemes[1:]):
        table.add_column(word, no_wrap=True)
    for each in design.arms:
        a = results.arrays[each.name]
        for i, moment in enumerate(design.moments):
            cells = [
                f"{each.probe * np.median(a[name][:, i]):.3g}" for name in ("sharpness", "lagging")
            ]
            for j in range(1, len(design.schemes)):
                values = [np.median(a[n][:, i, j]) for n in ("mu", "s2", "alpha", "rho")]
                values[0] += 1
                cells.append(" ".join(f"{v:.2f}" for v in values))
            table.add_row(each.name, str(moment), *cells)
        table.add_section()
    console.print(table)


@dataclass(frozen=True)
class Arguments(Execution):
    """Critical learning rates, predicted from a probe and traced by runs."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: minutes."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print how many runs there are at most."""


def main(arguments: Arguments) -> int:
    """Run what is missing, print the tables, draw the figure; the exit status."""
    from figures.threshold_prediction import draw  # the figure reads this module

    console = Console()
    design = DESIGNS[arguments.tier]
    store = Store(arguments.results / f"{STUDY}_{arguments.tier}")
    wanted, searched = list(forecasts(design).values()), columns(design)
    if arguments.dry_run:
        console.print(
            f"{len(wanted)} forecasts of about 10 s and {len(searched)} columns of at most "
            f"{design.max_runs} runs of about 1 s on one core"
        )
        return 0
    if not execute(wanted, store, arguments, console):
        return 1
    if not trace_columns(searched, store, arguments, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 240)))
    figure = draw(results, store.folder / f"{STUDY}.png")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
