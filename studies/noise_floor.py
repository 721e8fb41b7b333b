"""When does the exact gradient fall below the quantization error's contribution?

    python -m studies.noise_floor [--tier smoke|laptop] [--results DIR]

Along exact runs, at constant and at decaying learning rate, one large sample is cut into batches of
several sizes.  At each point: the excess loss, the mean squared forward error of each scheme, the
mean and the variance of gradients and of their errors, and zeta by batch size; beside them what the
linear student's law (mxsim/theory/noise_floor.py) makes of the first two, and where it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import ProxyConfig, make_batches, make_teacher, scheme, start
from mxsim.estimate import in_words
from mxsim.executors import SERIAL
from mxsim.progress import execute
from mxsim.stats import Estimate, median_over_seeds
from mxsim.store import Record, Store, provenance, result_id
from mxsim.sweep import Job, load_points
from mxsim.theory.noise_floor import (
    Features,
    critical_batch,
    crossing_excess,
    isotropic,
    measured_features,
    zeta,
)
from studies.command import run_as_command
from studies.noise_floor_point import ARMS, MEAN, SCHEMES, VARIANCE, measure

Array = NDArray[Any]
Tier = Literal["smoke", "laptop"]
STUDY = "noise_floor"
RESAMPLES = 500
FRESH = 10**6  # batches from this step on are seen by no run


@dataclass(frozen=True)
class Setting:
    """A run: what differs from the base, and the ``moments`` (steps done) at which to look."""

    batch: int
    schedule: str
    moments: tuple[int, ...]

    @property
    def label(self) -> str:
        return f"{self.schedule}, batch {self.batch}"


@dataclass(frozen=True)
class Design:
    """``base.seed``, batch, schedule and steps are replaced; ``sizes`` divide one another."""

    base: ProxyConfig
    settings: tuple[Setting, ...]
    sizes: tuple[int, ...]  # batches of the probes; the largest is the sample
    seeds: int

    def config(self, setting: Setting, seed: int) -> ProxyConfig:
        own = replace(self.base, batch=setting.batch, schedule=setting.schedule, seed=seed)
        return replace(own, steps=setting.moments[-1])


DESIGNS: dict[Tier, Design] = {
    "smoke": Design(
        ProxyConfig(width=32, depth=2, eval_samples=32, lr=5e-3),
        (Setting(32, "constant", (10, 20)), Setting(32, "cosine", (10, 20, 40))),
        (32, 64, 128),
        3,
    ),
    "laptop": Design(
        ProxyConfig(width=64, depth=4, eval_samples=64, lr=5e-3),
        (
            *(Setting(batch, "constant", (100, 200)) for batch in (64, 256, 1024, 4096)),
            Setting(256, "cosine", tuple(range(100, 801, 100))),
        ),
        (64, 256, 1024, 4096),
        5,
    ),
}


@dataclass(frozen=True)
class Cell:
    """One run to look at."""

    design: Design
    setting: Setting
    seed: int
    study: str = STUDY


def cells(design: Design) -> list[Cell]:
    """Every run, seeds outermost."""
    return [Cell(design, s, seed) for seed in range(design.seeds) for s in design.settings]


# ---------------------------------------------------------------- running


def run(cell: Cell) -> Record:
    """Arrays by moment: excess (moments,); added (moments, schemes); zeta (moments, schemes,
    sizes); gradient (moments, 2), error and forward (moments, schemes, 2), pairs (MEAN, VARIANCE).
    NaN from where a run stopped.
    """
    design, schemes = cell.design, len(SCHEMES)
    cfg = design.config(cell.setting, cell.seed)
    teacher = make_teacher(cfg)
    x, y = make_batches(replace(cfg, batch=max(design.sizes)), teacher).at(FRESH)
    training = start(cfg, scheme("exact"))
    shapes: dict[str, tuple[int, ...]] = {"excess": (), "added": (schemes,), "gradient": (2,)}
    shapes |= {"error": (schemes, 2), "forward": (schemes, 2)}
    shapes["zeta"] = (schemes, len(design.sizes))
    t = len(cell.setting.moments)
    arrays = {name: np.full((t, *shape), np.nan) for name, shape in shapes.items()}
    for i, step in enumerate(cell.setting.moments):
        training.advance(step - training.step)
        if training.bad_step is not None:
            break
        for name, value in measure(training.params, x, y, cfg, design.sizes).items():
            arrays[name][i] = value
    meta = {"cell": asdict(cell), "versions": dict(provenance()), "bad_step": training.bad_step}
    return Record(result_id(cell), arrays, meta)


def jobs(design: Design) -> list[Job]:
    """``run`` of every cell."""
    return [Job(c, run, f"{c.setting.label}, seed {c.seed}") for c in cells(design)]


# ---------------------------------------------------------------- reading


@dataclass(frozen=True)
class Results:
    """Arrays of all seeds by setting: (seeds, moments, ...), see ``run``."""

    design: Design
    by_setting: dict[Setting, dict[str, Array]]
    stopped: int  # runs that met a NaN or Inf

    @property
    def noise(self) -> float:
        """sigma^2 an entry: label noise, and the mean that layer norm forgets (mxsim/floor.py)."""
        return 1 / self.design.base.width + self.design.base.label_noise**2


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's results; FileNotFoundError if one is missing."""
    design, store, stopped = DESIGNS[tier], Store(results / STUDY), 0
    found: dict[Setting, list[Any]] = {s: [] for s in design.settings}
    records = load_points(jobs(design), store)
    for cell in cells(design):
        record = records[result_id(cell)]
        found[cell.setting].append(record.arrays)
        stopped += record.meta["bad_step"] is not None
    stacked = {
        s: {name: np.stack([each[name] for each in arrays]) for name in arrays[0]}
        for s, arrays in found.items()
    }
    return Results(design, stacked, stopped)


@dataclass(frozen=True, eq=False)
class Series:
    """One scheme at all points of some settings, (seeds, points); zeta (seeds, points, sizes).

    features: measured at each point.  error_mean: |E eps|^2.  forward: |E eps| of the forward
    error alone, through the exact backward pass, over |E eps|.  variance: tr Cov eps over what the
    law makes of it, (4 / width) q2 (ke + t).
    """

    excess: Array
    added: Array
    zeta: Array
    features: Features
    error_mean: Array
    forward: Array
    variance: Array


def series(results: Results, name: str, settings: Sequence[Setting] | None = None) -> Series:
    """The points of ``settings``, by default all, joined in order."""
    chosen = [results.by_setting[s] for s in settings or results.design.settings]
    joined = {key: np.concatenate([a[key] for a in chosen], axis=1) for key in chosen[0]}
    i, width = list(SCHEMES).index(name), results.design.base.width
    e, q2, g = joined["excess"], joined["added"][..., i], joined["gradient"]
    error, forward = joined["error"][..., i, :], joined["forward"][..., i, MEAN]
    means = (g[..., MEAN], g[..., VARIANCE], error[..., MEAN])
    features = measured_features(e, q2, results.noise, width, *means)
    expected = 4 / width * q2 * np.add(features.error, features.trace)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.sqrt(np.maximum(forward, 0) / error[..., MEAN])
    variance = error[..., VARIANCE] / expected
    return Series(e, q2, joined["zeta"][..., i, :], features, error[..., MEAN], share, variance)


def typical(features: Features, seeds: Any = slice(None)) -> Features:
    """Three numbers: medians over the points of the seeds."""
    parts = (np.asarray(each)[seeds] for each in (features.trace, features.signal, features.error))
    return Features(*(float(np.nanmedian(part)) for part in parts))


LAWS = ("isotropic", "other seeds", "at the point")


def predicted(results: Results, points: Series, law: str) -> tuple[Array, Array]:
    """zeta, and the excess at which it is 1, by a law: (seeds, points, sizes) each.

    Every law has the point's own excess and q2.  isotropic: nothing else is measured.  other seeds:
    three numbers, medians over all points of the other seeds.  at the point: all three measured
    there, which leaves little to predict (the variance of eps).
    """
    f, sizes = points.features, np.array(results.design.sizes)
    found = []
    for j in range(len(points.excess)):
        features = isotropic(results.design.base.width)
        if law == "other seeds":
            features = typical(f, np.arange(len(points.excess)) != j)
        elif law == "at the point":
            own = (np.asarray(v)[j][:, None] for v in (f.trace, f.signal, f.error))
            features = Features(*own)
        e, q2 = points.excess[j][:, None], points.added[j][:, None]
        value = zeta(e, q2, results.noise, sizes, features)
        found.append((value, crossing_excess(q2, results.noise, sizes, features)))
    return np.stack([z for z, _ in found]), np.stack([c for _, c in found])


def threshold(excess: Array, above: Array) -> float:
    """The excess below which zeta > 1 with the fewest exceptions; 0 for never, inf for always.

    excess, above (n,): of the points, and whether their zeta is above 1.
    """
    order = np.argsort(excess)
    e, a = excess[order], above[order]
    below_1, above_1 = (np.concatenate([[0], np.cumsum(each)]) for each in (~a, a))
    k = int(np.argmin(below_1 - above_1))  # the k smallest are taken to be above
    if k == 0:
        return 0.0
    return float(np.sqrt(e[k - 1] * e[k])) if k < len(e) else np.inf


def measured_crossing(points: Series, size: int, unit: float = 1.0) -> Estimate:
    """``unit`` times ``threshold`` over all points, bootstrap over seeds; size: a batch's index."""
    n = len(points.excess)
    rng = np.random.default_rng(0)
    values = []
    for chosen in (np.arange(n), *(rng.integers(n, size=n) for _ in range(RESAMPLES))):
        e, z = points.excess[chosen].ravel(), points.zeta[chosen, :, size].ravel()
        seen = np.isfinite(e)
        values.append(unit * threshold(e[seen], z[seen] > 1))
    low, high = np.quantile(values[1:], (0.025, 0.975), method="nearest")
    return Estimate(values[0], float(low), float(high), n)


def over_seeds(values: Array) -> Estimate:
    """Median over each seed's points, then over seeds; values (seeds, ...)."""
    each = np.array([np.median(v[np.isfinite(v)]) for v in values if np.isfinite(v).any()])
    return median_over_seeds(each)


# ---------------------------------------------------------------- tables


def _table(title: str, columns: Sequence[str], left: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for i, name in enumerate(columns):
        table.add_column(name, no_wrap=True, justify="left" if i < left else "right")
    return table


def print_tables(results: Results, console: Console) -> None:
    """How well each law carries over, where zeta crosses 1, what the laws' numbers are, batches."""
    for table in (laws_table, crossings_table, features_table, batches_table):
        console.print(table(results))
    console.print(f"{len(cells(results.design))} runs, {results.stopped} of them stopped early")


def laws_table(results: Results) -> Table:
    """Measured over predicted."""
    design = results.design
    table = _table(
        f"zeta measured / predicted: median over points, then over {design.seeds} seeds [95 %]; "
        "(10 to 90 % of points)",
        ("scheme", "batch", *LAWS),
    )
    for name in ARMS:
        points = series(results, name)
        ratios = [points.zeta / predicted(results, points, law)[0] for law in LAWS]
        for b, size in enumerate(design.sizes):
            row = []
            for ratio in ratios:
                low, high = np.nanquantile(ratio[..., b], (0.1, 0.9))
                row.append(f"{over_seeds(ratio[..., b])} ({low:.2f} to {high:.2f})")
            table.add_row(name, str(size), *row)
        table.add_section()
    return table


def crossings_table(results: Results) -> Table:
    """The loss at which zeta crosses 1."""
    design = results.design
    table = _table(
        "excess loss x 1e3 below which zeta > 1 (0: nowhere): measured [95 %, seeds resampled],\n"
        "and by the law at the median q2; right: share of points on the side of 1 that the law\n"
        "says, at their own q2 (three numbers: those of the other seeds)",
        ("scheme", "batch", "zeta > 1", "measured", "isotropic", "right", "three numbers", "right"),
    )
    for name in ARMS:
        points = series(results, name)
        laws = {"isotropic": isotropic(design.base.width), "other seeds": typical(points.features)}
        for b, size in enumerate(design.sizes):
            above = points.zeta[..., b] > 1
            row = [f"{above.mean():.2f}", str(measured_crossing(points, b, 1e3))]
            for law, features in laws.items():
                q2 = float(np.nanmedian(points.added))
                right = (points.excess < predicted(results, points, law)[1][..., b]) == above
                crossing = crossing_excess(q2, results.noise, size, features)
                row += [f"{1e3 * crossing:.2f}", f"{right.mean():.2f}"]
            table.add_row(name, str(size), *row)
        table.add_section()
    return table


def features_table(results: Results) -> Table:
    """What the laws take for constant or leave out."""
    of_an_arm = ("q2", "ke", "B*", "forward", "Cov")
    names = ["run", "step", "excess", "t / width", "ks"]
    names += [f"{arm}\n{each}" for arm in ("ln", "gemm") for each in of_an_arm]
    names += ["x alone\nke", "w alone\nke", "ln / all\nq2", "ln / all\n|E eps|^2"]
    table = _table(
        "medians over seeds: excess, q2 x 1e3; t / width, ks, ke; B*: batch above which zeta > 1 "
        "near the floor;\nforward: |E eps| of the forward error alone / |E eps|; Cov: tr Cov eps "
        "/ the law's; x, w alone: those GEMM operands",
        names,
    )
    for setting in results.design.settings:
        ln, mm, both, x, w = (series(results, name, (setting,)) for name in SCHEMES)
        t, ks = np.asarray(ln.features.trace), np.asarray(ln.features.signal)
        columns = [1e3 * ln.excess, t / results.design.base.width, ks]
        for p in (ln, mm):
            critical = critical_batch(p.added, results.noise, p.features)
            ke = np.asarray(p.features.error)
            columns += [1e3 * p.added, ke, critical, p.forward, p.variance]
        columns += [np.asarray(p.features.error) for p in (x, w)]
        columns += [ln.added / both.added, ln.error_mean / both.error_mean]
        for i, step in enumerate(setting.moments):
            middle = (np.nanmedian(values[:, i]) for values in columns)
            row = (f"{value:.{2 if value < 100 else 0}f}" for value in middle)
            table.add_row(setting.label, str(step), *row)
        table.add_section()
    return table


def batches_table(results: Results) -> Table:
    """What a batch does to zeta as the run's, and as the probe's."""
    sizes = results.design.sizes
    table = _table(
        "zeta at each run's last point: median over seeds [95 %]; p: the exponent in zeta ~ B^p "
        "over the probes' batches",
        ("scheme", "run", *(f"probe {size}" for size in sizes), "p"),
        left=2,
    )
    for name in ARMS:
        for setting in results.design.settings:
            last = series(results, name, (setting,)).zeta[:, -1]
            exponents = [np.polyfit(np.log(sizes), np.log(z), 1)[0] for z in last]
            row = [str(over_seeds(last[:, b])) for b in range(len(sizes))]
            table.add_row(name, setting.label, *row, str(over_seeds(np.array(exponents))))
        table.add_section()
    return table


# ---------------------------------------------------------------- the command


@dataclass(frozen=True)
class Arguments:
    """At which loss the quantization error's share of the gradient outweighs the exact gradient."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: 5 seeds, 4 minutes."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


def main(arguments: Arguments) -> int:
    """Compute what is missing, print the tables, draw the figure; the exit status."""
    from figures.noise_floor import draw  # the figure reads this module

    console = Console()
    store = Store(arguments.results / STUDY)
    design = DESIGNS[arguments.tier]
    wanted = jobs(design)
    if arguments.dry_run:
        left = [job.what for job in wanted if not store.has(job.id)]
        probe = max(design.sizes) * (1 + 2 * len(SCHEMES))
        each = ((c.setting.batch * c.setting.moments[-1], len(c.setting.moments)) for c in left)
        gradients = sum(trained + probes * probe for trained, probes in each)
        cost = 2e-5 * (design.base.width / 64) ** 2 * design.base.depth / 4  # a sample's
        console.print(
            f"{len(wanted)} runs, {len(left)} to do, about {gradients} samples' gradients: "
            f"about {in_words(gradients * cost)}"
        )
        return 0
    if not execute(wanted, store, SERIAL, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 190)))
    figure = draw(results, store.folder / f"{STUDY}_{arguments.tier}.png")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
