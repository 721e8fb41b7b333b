"""Where is the clamp cliff?  Coherent bias and saturation of a vector of layer-norm gains.

    python -m studies.gamma_cliff [--tier smoke|full] [--results DIR]

For gammas ~ N(mean, sd), every MX format and scale rule: the aligned gain minus one,
<x, q>/<x, x> - 1, and the share of elements beyond largest * scale before rounding.  No training:
20 seconds on a CPU.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from mxsim import FORMATS, quantize
from mxsim.executors import SERIAL
from mxsim.formats import SCALE_RULES
from mxsim.progress import execute
from mxsim.store import Record, Store, provenance, result_id
from mxsim.sweep import Job, load_points
from studies.command import run_as_command

Array = NDArray[Any]
Tier = Literal["smoke", "full"]
STUDY = "gamma_cliff"
SIX = tuple(n for n, f in FORMATS.items() if f.scale == "e8m0" and n != "mxint8_asymmetric")


@dataclass(frozen=True)
class Design:
    """Means on a logarithmic grid over ``octaves`` octaves below 2.1, ``per_octave`` each."""

    per_octave: int = 96
    octaves: int = 3
    sds: tuple[float, ...] = (0.0, 0.003, 0.01, 0.03, 0.1)
    width: int = 512
    draws: int = 16
    formats: tuple[str, ...] = SIX
    rules: tuple[str, ...] = SCALE_RULES
    study: str = STUDY

    @property
    def means(self) -> Array:
        """The grid, powers of two on it."""
        steps = np.arange(-self.octaves * self.per_octave, 7 * self.per_octave // 96 + 1)
        return np.asarray(2.0 ** (1 + steps / self.per_octave))


DESIGNS: dict[Tier, Design] = {"smoke": Design(per_octave=12, draws=3, width=64), "full": Design()}


@dataclass(frozen=True)
class Cell:
    """One format under one scale rule; ``design`` determines all else."""

    design: Design
    format: str
    rule: str


def cells(design: Design) -> list[Cell]:
    """Every point of a design."""
    return [Cell(design, fmt, rule) for fmt in design.formats for rule in design.rules]


def run(cell: Cell) -> Record:
    """bias and saturated, (sds, means, draws) each: the draws are the same for every cell."""
    design = cell.design
    z = np.random.default_rng(0).standard_normal((design.draws, design.width))
    shape = (len(design.sds), len(design.means), design.draws)
    bias, saturated = np.empty(shape), np.empty(shape)
    for i, sd in enumerate(design.sds):
        for j, mean in enumerate(design.means):
            for k in range(design.draws):
                gamma = (mean + sd * z[k]).astype(np.float32)
                stats = quantize(gamma, cell.format, scale_rule=cell.rule).stats
                assert stats is not None
                bias[i, j, k], saturated[i, j, k] = stats.gain - 1, stats.saturated
    meta = {"cell": asdict(cell), "versions": dict(provenance())}
    return Record(result_id(cell), {"bias": bias, "saturated": saturated}, meta)


def jobs(design: Design) -> list[Job]:
    """``run`` of every cell."""
    return [Job(c, run, f"{c.format}, {c.rule}") for c in cells(design)]


@dataclass(frozen=True)
class Results:
    """Arrays by (format, rule), see ``run``."""

    design: Design
    bias: dict[tuple[str, str], Array]
    saturated: dict[tuple[str, str], Array]


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's results; FileNotFoundError if one is missing."""
    design, store = DESIGNS[tier], Store(results / STUDY)
    wanted = jobs(design)
    by_id = load_points(wanted, store)
    records = {(job.what.format, job.what.rule): by_id[job.id] for job in wanted}
    return Results(
        design,
        {key: record.arrays["bias"] for key, record in records.items()},
        {key: record.arrays["saturated"] for key, record in records.items()},
    )


def print_tables(results: Results, console: Console) -> None:
    """The point that others quote, and where each format's cliff begins and how deep it is."""
    design = results.design
    means, sd = design.means, design.sds.index(0.01)
    near = int(np.abs(np.log(means / 0.97)).argmin())
    table = Table(
        title=f"gamma ~ N({means[near]:.3f}, 0.01), mean over {design.draws} draws of "
        f"{design.width} (sd over draws)",
        title_justify="left",
    )
    for name in ("format", *(f"{rule}\nbias %" for rule in design.rules), "floor\nsaturated %"):
        table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    for fmt in design.formats:
        row = []
        for rule in design.rules:
            values = 100 * results.bias[fmt, rule][sd, near]
            row.append(f"{values.mean():+.2f} ({values.std(ddof=1):.2f})")
        row.append(f"{100 * results.saturated[fmt, 'floor'][sd, near].mean():.1f}")
        table.add_row(fmt, *row)
    console.print(table)
    step = 2 ** (1 / design.per_octave)
    table = Table(
        title=f"equal gammas (sd 0) in [1, 2), floor, on a grid of ratio {step:.4f}",
        title_justify="left",
    )
    for name in ("format", "saturates\nabove", "expected\ntop", "cliff\nbias %", "at"):
        table.add_column(name, justify="left" if name == "format" else "right", no_wrap=True)
    octave = (means >= 1) & (means < 2)
    for fmt in design.formats:
        share = results.saturated[fmt, "floor"][0, octave].mean(axis=-1)
        bias = results.bias[fmt, "floor"][0, octave].mean(axis=-1)
        element = FORMATS[fmt].element
        top = element.largest / 2.0**element.emax
        clean = means[octave][share == 0]
        deepest = int(np.where(share > 0, bias, np.inf).argmin())
        table.add_row(
            fmt,
            f"{clean.max():.3f}",
            f"{top:.4g}",
            f"{100 * bias[deepest]:.1f}",
            f"{means[octave][deepest]:.3f}",
        )
    console.print(table)


@dataclass(frozen=True)
class Arguments:
    """The clamp cliff of layer-norm gains, by format, scale rule, mean and spread."""

    tier: Tier = "full"
    """smoke: a second, for tests; full: the figure."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


def main(arguments: Arguments) -> int:
    """Compute what is missing, print the tables, draw the figure; the exit status."""
    from figures.gamma_cliff import draw  # the figure reads this module

    console = Console()
    store = Store(arguments.results / STUDY)
    design = DESIGNS[arguments.tier]
    wanted = jobs(design)
    if arguments.dry_run:
        left = sum(not store.has(job.id) for job in wanted)
        quantized = left * len(design.sds) * len(design.means) * design.draws
        console.print(
            f"{len(wanted)} cells, {left} to compute: {quantized:,} vectors of {design.width}, "
            f"about {quantized * (25 + 0.02 * design.width) / 1e6:.0f} s"
        )
        return 0
    if not execute(wanted, store, SERIAL, console):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 100)))
    figure = draw(results, store.folder / f"{STUDY}_{arguments.tier}.png")
    console.print(f"figure: {figure}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
