"""Does the exact proxy train at the edge of stability?  Known results first, before any MX format.

    python -m studies.edge_of_stability [--tier smoke|laptop] [--results DIR]

Full-batch training in float64 on one fixed data set.  Under gradient descent the sharpness rises to
2 / eta and hovers there (Cohen et al. 2021, arXiv:2103.00065), with heavy-ball momentum b at
2 (1 + b) / eta, and under Adam the preconditioned sharpness at 2 (1 + beta1) / ((1 - beta1) eta)
(Cohen et al. 2022, arXiv:2207.14484).  The study holds eta times sharpness, averaged over the
second half of each run, against these numbers.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import ProxyConfig, make_batches, make_teacher, scheme, start
from mxsim.curvature import (
    Hessian,
    adam_preconditioner,
    edge_of_stability,
    hvp,
    step_curvature,
    top_eigenvalue,
)
from mxsim.estimate import in_words
from mxsim.executors import SERIAL
from mxsim.progress import execute
from mxsim.stats import median_over_seeds
from mxsim.store import Record, Store, provenance, result_id
from mxsim.sweep import Job, load_points
from studies.command import run_as_command

Array = NDArray[Any]
Tier = Literal["smoke", "laptop"]
STUDY = "edge_of_stability"
WITHIN = 0.05  # of the theory's number
TOLERANCE = 1e-3  # residual of an eigenvector, relative
LEADING = 8  # eigenvalues looked at after the last measurement


@dataclass(frozen=True)
class Arm:
    """An optimizer at one rate: what is changed in the base configuration."""

    optimizer: str
    lr: float
    steps: int
    momentum: float = 0.0
    warmup: int = 0

    @property
    def name(self) -> str:
        """``gradient descent``, ``heavy ball`` or ``Adam``."""
        if self.optimizer == "adam":
            return "Adam"
        return "heavy ball" if self.momentum else "gradient descent"


@dataclass(frozen=True)
class Design:
    """``every``: steps between measurements; odd, since at the edge iterates alternate sides."""

    base: ProxyConfig
    arms: tuple[Arm, ...]
    seeds: int
    every: int = 21


# A teacher of about unit variance; without label noise, and with more targets (512 x 32) than the
# student fits at once, so that the sharpness goes on rising.  Heavy ball gets to its edge only at a
# high rate, and a warm-up spares it the jump of the first steps, from which it is slow to return.
DESIGNS: dict[Tier, Design] = {
    "smoke": Design(
        ProxyConfig(
            width=8,
            depth=2,
            batch=64,
            data="fixed",
            label_noise=0.0,
            teacher_depth=1,
            teacher_gain=5.3,
            dtype="float64",
            eval_samples=64,
        ),
        (
            Arm("sgd", 0.2, 1600),
            Arm("sgd", 0.5, 800, momentum=0.9, warmup=50),
            Arm("adam", 0.02, 1000),
        ),
        2,
        41,
    ),
    "laptop": Design(
        ProxyConfig(
            width=32,
            depth=2,
            batch=512,
            data="fixed",
            label_noise=0.0,
            teacher_depth=1,
            teacher_gain=5.3,
            dtype="float64",
            eval_samples=512,
        ),
        (
            Arm("sgd", 0.25, 1600),
            Arm("sgd", 0.4, 1000),
            Arm("sgd", 1.5, 1000, momentum=0.9, warmup=50),
            Arm("adam", 0.01, 1000),
            Arm("adam", 0.02, 1000),
        ),
        4,
    ),
}


@dataclass(frozen=True)
class Cell:
    """One run to look at."""

    config: ProxyConfig
    every: int
    tolerance: float = TOLERANCE
    study: str = STUDY


def cells(design: Design) -> dict[tuple[Arm, int], Cell]:
    """(arm, seed) -> run, seeds outermost: an interrupted study holds whole sets of arms."""
    return {
        (arm, seed): Cell(replace(design.base, seed=seed, **asdict(arm)), design.every)
        for seed in range(design.seeds)
        for arm in design.arms
    }


def run(cell: Cell) -> Record:
    """Train, and measure before every ``every``-th step, from the first ``every`` on.

    Arrays: steps (m,) done before each measurement; sharpness (m,), of P^-1 H under Adam; residual,
    matvecs, converged (m,); step_curvature (m,) along the update that follows, in the same metric;
    leading (LEADING,) eigenvalues at the last measurement; losses (steps,).  NaN from a NaN or Inf
    on.
    """
    cfg = cell.config
    training = start(cfg, scheme("exact"))
    x, y = make_batches(cfg, make_teacher(cfg)).at(0)
    steps = np.arange(cell.every, cfg.steps, cell.every)
    names = ("sharpness", "step_curvature", "residual", "matvecs", "converged")
    arrays: dict[str, Array] = {name: np.full(len(steps), np.nan) for name in names}
    arrays["leading"] = np.full(LEADING, np.nan)
    vector: Array | None = None
    for i, step in enumerate(steps):
        training.advance(int(step) - training.step)
        if training.bad_step is not None:
            break
        hessian = hvp(training.flat, x, y, cfg)
        adam = cfg.optimizer == "adam"
        p = adam_preconditioner(training.optimizer, cfg) if adam else np.ones(hessian.size)
        found = top_eigenvalue(
            hessian, hessian.size, preconditioner=p, start=vector, tolerance=cell.tolerance
        )
        if np.isfinite(found.largest_algebraic):
            vector = found.eigenvector
        before = training.flat.copy()
        update = training.advance(1).flat - before
        arrays["sharpness"][i] = found.largest_algebraic
        arrays["step_curvature"][i] = step_curvature(hessian, update, p)
        arrays["residual"][i] = found.residual
        arrays["matvecs"][i] = found.matvecs
        arrays["converged"][i] = found.converged
        if i == len(steps) - 1:
            arrays["leading"][:] = leading(hessian, p, cell.tolerance)
    training.advance()
    meta = {
        "cell": asdict(cell),
        "versions": dict(provenance()),
        "bad_step": training.bad_step,
        "target_sd": float(y.std()),
        "seconds": training.seconds,
    }
    return Record(result_id(cell), arrays | {"steps": steps, "losses": training.losses}, meta)


def leading(hessian: Hessian, p: Array, tolerance: float) -> Array:
    """The LEADING largest eigenvalues of P^-1 H, descending, each found with those above it taken
    off: H - sum lam q q^T, q = P w / sqrt(<w, P w>).
    """
    pairs: list[tuple[float, Array]] = []

    def rest(v: Array) -> Array:
        product = hessian(v)
        for lam, q in pairs:
            product -= lam * (q @ v) * q
        return product

    for _ in range(LEADING):
        found = top_eigenvalue(rest, hessian.size, preconditioner=p, tolerance=tolerance)
        q = p * found.eigenvector
        pairs.append((found.largest_algebraic, q / np.sqrt(found.eigenvector @ q)))
    return np.array([lam for lam, _ in pairs])


def jobs(design: Design) -> list[Job]:
    """``run`` of every cell."""
    return [
        Job(c, run, f"{arm.name}, lr {arm.lr:g}, seed {seed}")
        for (arm, seed), c in cells(design).items()
    ]


@dataclass(frozen=True)
class Results:
    """Arrays of all seeds by arm: (seeds, ...), see ``run``; ``stopped`` runs met a NaN or Inf."""

    design: Design
    by_arm: dict[Arm, dict[str, Array]]
    stopped: dict[Arm, int]


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's results; FileNotFoundError if one is missing."""
    design, store = DESIGNS[tier], Store(results / STUDY)
    found: dict[Arm, list[Any]] = {arm: [] for arm in design.arms}
    stopped = dict.fromkeys(design.arms, 0)
    records = load_points(jobs(design), store)
    for (arm, _), cell in cells(design).items():
        record = records[result_id(cell)]
        found[arm].append(record.arrays)
        stopped[arm] += record.meta["bad_step"] is not None
    stacked = {
        arm: {name: np.stack([each[name] for each in arrays]) for name in arrays[0]}
        for arm, arrays in found.items()
    }
    return Results(design, stacked, stopped)


def theory(results: Results, arm: Arm) -> float:
    """What eta times sharpness is expected to be at the edge."""
    return edge_of_stability(replace(results.design.base, **asdict(arm)))


def second_half(results: Results, arm: Arm, name: str) -> Array:
    """eta times the arm's ``name`` at the measurements of the second half of steps (seeds, m)."""
    arrays = results.by_arm[arm]
    late = arrays["steps"][0] >= arm.steps / 2
    return np.asarray(arm.lr * arrays[name][:, late])


def print_tables(results: Results, console: Console) -> None:
    """eta times sharpness over the second half against the theory, arm by arm."""
    design = results.design
    base = design.base
    table = Table(
        title=f"eta * sharpness (Adam: of P^-1 H), mean over the second half of a run, then median "
        f"of {design.seeds} seeds [95 %]; width {base.width}, depth {base.depth}, {base.batch} "
        f"samples, measured every {design.every} steps",
        title_justify="left",
    )
    columns = (
        "optimizer",
        "eta",
        "steps",
        "eta * sharpness",
        "theory",
        "ratio\nby seed",
        f"within\n{100 * WITHIN:.0f} %",
        "sd over\ntime",
        "at the\nedge",
        "eta * curvature\nalong the step",
        "final loss",
    )
    for name in columns:
        table.add_column(name, justify="left" if name == "optimizer" else "right", no_wrap=True)
    for arm in design.arms:
        late, expected = second_half(results, arm, "sharpness"), theory(results, arm)
        means = late.mean(axis=1)
        along = np.median(second_half(results, arm, "step_curvature"), axis=1)
        ratio = means / expected
        last = arm.lr * results.by_arm[arm]["leading"]
        at_edge = (last >= (1 - WITHIN) * expected).sum(axis=1)
        within = int((np.abs(ratio - 1) <= WITHIN).sum())
        table.add_row(
            arm.name,
            f"{arm.lr:g}",
            str(arm.steps),
            str(median_over_seeds(means)),
            f"{expected:.2f}",
            f"{ratio.min():.3f} to {ratio.max():.3f}",
            f"{within} of {len(means)}",
            f"{np.median(late.std(axis=1)):.2f}",
            f"{at_edge.min()} to {at_edge.max()}",
            str(median_over_seeds(along)),
            f"{np.median(results.by_arm[arm]['losses'][:, -1]):.1e}",
        )
    console.print(table)
    measured = {
        name: np.concatenate([a[name].ravel() for a in results.by_arm.values()])
        for name in ("matvecs", "converged")
    }
    console.print(
        f"{measured['matvecs'].size} measurements, {np.nanmean(measured['matvecs']):.1f} "
        f"Hessian-vector products each, {int(np.sum(measured['converged'] != 1))} not converged; "
        f"{sum(results.stopped.values())} of {len(design.arms) * design.seeds} runs stopped early."
        f"\nWithin: seeds.  At the edge: how many of the {LEADING} largest eigenvalues end above "
        f"{1 - WITHIN:g} of the theory's number.",
        soft_wrap=True,
    )


@dataclass(frozen=True)
class Arguments:
    """The edge of stability of the exact proxy: gradient descent, heavy ball, Adam."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: 4 seeds."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


def main(arguments: Arguments) -> int:
    """Compute what is missing, print the table, draw the figure; the exit status."""
    from figures.edge_of_stability import draw  # the figure reads this module

    console = Console()
    store = Store(arguments.results / STUDY)
    design = DESIGNS[arguments.tier]
    wanted = jobs(design)
    if arguments.dry_run:
        left = [job.what for job in wanted if not store.has(job.id)]
        gradients = sum(c.config.steps * (1 + 30 / c.every) for c in left)  # 17 to 18 products
        console.print(
            f"{len(wanted)} runs, {len(left)} to do: about "
            f"{in_words(gradients * 4e-3 * design.base.batch / 512 * design.base.width / 32)}"
        )
        return 0
    if not execute(wanted, store, SERIAL, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 150)))
    figure = draw(results, store.folder / f"{STUDY}_{arguments.tier}.png")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
