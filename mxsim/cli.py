"""The commands ``mxsim train``, ``scheme``, ``quantize``, ``report``, ``formats``, ``results`` and
``crosscheck``.

Arguments and printing only.  The one module that imports tyro.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from mxsim.card import LEGEND, differences, precision_card, remarks
from mxsim.config import ProxyConfig
from mxsim.crosscheck.case import FORMATS as CROSSCHECK_FORMATS
from mxsim.crosscheck.main import OUT as CROSSCHECK_OUT
from mxsim.crosscheck.main import crosscheck
from mxsim.formats import FORMATS, ROUNDINGS, SCALE_RULES, FloatFormat, choose
from mxsim.philox import Noise
from mxsim.presets import PRESETS, scheme_of
from mxsim.quantize import quantize
from mxsim.report import (
    GAINS,
    draw_quantization,
    format_card,
    gain_pattern,
    load_arrays,
    number,
    stats_card,
    tensor_report,
)
from mxsim.results import load as load_results
from mxsim.results_table import show_results
from mxsim.single import Single, describe, perform
from mxsim.store import DamagedResult, mxsim_version

# Names that help lists and ``choose`` checks: its refusal says what is near, tyro's does not.
FormatName = Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(FORMATS)}}}")]
Rule = Annotated[str | None, tyro.conf.arg(metavar=f"{{{','.join(SCALE_RULES)}}}")]
Rounding = Annotated[str, tyro.conf.arg(metavar=f"{{{','.join(ROUNDINGS)}}}")]
# Several words after one option, and the option several times: nothing given is dropped.
Repeated = Annotated[tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction]


@dataclass(frozen=True)
class Quantize:
    """Quantize an array: statistics, a picture, codes and scales."""

    file: tyro.conf.Positional[Path]
    """A .npy file with a real array."""
    format: FormatName = "mxfp8_e4m3"
    """Block format (see: mxsim formats)."""
    axis: int = -1
    """The axis that blocks run along."""
    rule: Rule = None
    """Scale rule; default floor (NVFP4 has its own)."""
    rounding: Rounding = "even"
    """Rounding of elements."""
    block_size: int | None = None
    """Elements a block; default the format's."""
    seed: int = 0
    """Seed of stochastic rounding."""
    out: Path = Path()
    """The folder that NAME.FORMAT.npz (codes and scales) and NAME.FORMAT.png go to; what is not the
    default is part of the name, as in NAME.FORMAT.rceil.axis0.npz."""


@dataclass(frozen=True)
class Report:
    """What a format does to a model's tensors; norm gains on the clamp cliff stand out.

    Floats and integers are read; what else the file holds is listed.
    """

    model: tyro.conf.Positional[Path]
    """A .npz, .npy or .safetensors file."""
    format: FormatName = "mxfp8_e4m3"
    """Block format; blocks run along the last axis."""
    gains: str = GAINS
    """Regular expression: vectors whose names match are norm-layer gains (biases and running
    statistics never are)."""


@dataclass(frozen=True)
class Formats:
    """One card a format, with every value of the small ones."""

    name: tyro.conf.Positional[str | None] = None
    """One format only."""


@dataclass(frozen=True)
class Scheme:
    """A scheme's precision card: each tensor, where it is rounded, to what, how, along which axis.

    With two names, what differs between them; without one, all names with their sources.
    """

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """One preset name, or two, with options as in paper_code:bwd=mxfp8_e5m2."""


@dataclass(frozen=True)
class Unchecked(ProxyConfig):
    """A configuration as it was typed: tyro would put its own words around an error."""

    def __post_init__(self) -> None:
        pass

    def checked(self) -> ProxyConfig:
        """Raises as ProxyConfig does, with a word on where the options are listed."""
        try:
            return ProxyConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        except (TypeError, ValueError) as error:
            raise ValueError(f"{error} (options: mxsim train --help)") from error


@dataclass(frozen=True)
class Train:
    """Train a student under a scheme; interrupted, the same command goes on where it stopped."""

    config: tyro.conf.OmitArgPrefixes[Unchecked] = Unchecked()
    """The proxy problem."""
    scheme: str = "all_e4m3"
    """Preset name (see: mxsim scheme), with options as in paper_code:bwd=mxfp8_e5m2,acts=bf16."""
    probe_every: int | None = None
    """Steps between comparisons with the exact gradient; default a 50th of all, 0 makes none."""
    out: Path = Path("runs")
    """The folder that the run's own folder goes to."""
    threads: int = 1
    """Threads of the step's large GEMMs (2 pays from width 256 on); no bit depends on it."""
    backend: Literal["numba", "torch"] = "numba"
    """torch: the same step by PyTorch, on DEVICE."""
    device: str = "cpu"
    """The torch backend's: cpu, cuda or cuda:<index>."""
    dry_run: bool = False
    """Print what would run and how long it should take."""


@dataclass(frozen=True)
class Results:
    """A study's stored runs as a table: by default the settings that differ and what came out."""

    study: tyro.conf.Positional[str]
    """The study's folder, or its name in ROOT."""
    where: Repeated = ()
    """Conditions, all of which must hold: 'lr>=0.01' status!=ok scheme=all_e4m3 (= != < <= > >=;
    None is what a run does not have)."""
    columns: Repeated = ()
    """Fields to show and to write; one that does not exist is answered with a list of all."""
    sort: Repeated = ()
    """Fields to sort by; default the settings that differ."""
    csv: Path | None = None
    """Also write the runs to this file: all fields, or COLUMNS."""
    parquet: Path | None = None
    """The same as Parquet."""
    root: Path = Path("results")
    """The folder that holds a folder a study."""


@dataclass(frozen=True)
class Crosscheck:
    """Every backend against one corpus, bit for bit; fails on an unexplained difference."""

    device: Literal["cpu", "cuda"] = "cpu"
    """cuda: PyTorch and torchao on the GPU, too."""
    out: Path = CROSSCHECK_OUT
    """The folder that report.md and report.json go to."""
    formats: tuple[str, ...] = ()
    """These formats only; default all."""


Command = (
    Annotated[Train, tyro.conf.subcommand("train")]
    | Annotated[Scheme, tyro.conf.subcommand("scheme")]
    | Annotated[Quantize, tyro.conf.subcommand("quantize")]
    | Annotated[Report, tyro.conf.subcommand("report")]
    | Annotated[Formats, tyro.conf.subcommand("formats")]
    | Annotated[Results, tyro.conf.subcommand("results")]
    | Annotated[Crosscheck, tyro.conf.subcommand("crosscheck")]
)


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status is 1 for input that cannot be used."""
    words = sys.argv[1:] if arguments is None else arguments
    if words == ["--version"]:
        print(f"mxsim {mxsim_version()}")
        return 0
    command = tyro.cli(Command, args=words, prog="mxsim")
    console = Console()
    try:
        if isinstance(command, Train):
            return _train(command, console)
        if isinstance(command, Crosscheck):
            formats = command.formats or CROSSCHECK_FORMATS
            return crosscheck(command.device, command.out, formats, console)
        if isinstance(command, Scheme):
            _scheme(command, console)
        elif isinstance(command, Quantize):
            _quantize(command, console)
        elif isinstance(command, Report):
            _report(command, console)
        elif isinstance(command, Results):
            stored = load_results(command.study, command.root)
            columns, where, sort = (
                list(chain(*words)) for words in (command.columns, command.where, command.sort)
            )
            files = {"csv": command.csv, "parquet": command.parquet}
            show_results(stored, where, columns, sort, files, console)
        else:
            _formats(command, console)
    except FileNotFoundError as error:
        path = Path(str(error.filename))
        what = f"no such file: {path}" if error.filename else error
        if error.filename and not path.parent.is_dir():
            what = f"no such folder: {path.parent}, for {path.name}"
        print(f"mxsim: {what}", file=sys.stderr)
        return 1
    except (ValueError, TypeError, ImportError, OSError, DamagedResult) as error:
        print(f"mxsim: {error}", file=sys.stderr)
        return 1
    return 0


def _train(command: Train, console: Console) -> int:
    config = command.config.checked()
    every = max(config.steps // 50, 1)
    if command.probe_every is not None:
        every = command.probe_every
        if every < 0:
            raise ValueError(f"probe_every must be at least 0; got {every}")
    chosen = scheme_of(command.scheme)
    if command.backend == "numba" and command.device != "cpu":
        raise ValueError(f"device must be cpu with backend 'numba'; got {command.device!r}")
    single = Single(
        config,
        command.scheme,
        chosen,
        every,
        command.out,
        threads=command.threads,
        backend=command.backend,
        device=command.device,
    )
    if command.dry_run:
        describe(single, console)
        return 0
    return perform(single, console)


def _scheme(command: Scheme, console: Console) -> None:
    if len(command.names) > 2:
        raise ValueError(f"names must be one or two; got {', '.join(command.names)}")
    schemes = [scheme_of(name) for name in command.names]
    # A terminal gets what fits it, a file or a pipe whole lines.
    wide = console if console.is_terminal else Console(width=100)
    if not command.names:
        table = Table(title="schemes", title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for name, preset in PRESETS.items():
            table.add_row(name, preset.source)
        wide.print(table)
    elif len(command.names) == 1:
        [name] = command.names
        source = PRESETS[name.partition(":")[0]].source
        wide.print(f"[bold]{name}[/]: {source}", highlight=False)
        table = Table()
        for heading in ("tensor", "where", "format", "scale", "rounding", "block", "along"):
            table.add_column(heading)
        for row in precision_card(schemes[0]):
            table.add_row(*dataclasses.astuple(row))
        wide.print(LEGEND, highlight=False)
        wide.print(table)
        for line in remarks(schemes[0]):
            wide.print(f"- {line}", highlight=False)
    else:
        a, b = command.names
        found = differences(*schemes)
        if not found:
            wide.print(f"{a} and {b} are the same arithmetic")
            return
        table = Table("", a, b)
        for cells in found:
            table.add_row(*cells)
        wide.print(table)


def _quantize(command: Quantize, console: Console) -> None:
    choose("format", command.format, FORMATS)
    choose("rule", command.rule or "floor", SCALE_RULES)
    choose("rounding", command.rounding, ROUNDINGS)
    if command.file.suffix != ".npy":
        raise ValueError(f"file must be a .npy array; got {command.file}")
    there = next(p for p in (command.out, *command.out.parents) if p.exists())
    if not there.is_dir():
        raise ValueError(f"out must be a folder; got {command.out}, and {there} is a file")
    arrays, skipped = load_arrays(command.file)
    if skipped:
        raise ValueError(f"{command.file} holds no real array ({', '.join(skipped.values())})")
    [(name, x)] = arrays.items()
    noise = Noise(command.seed) if command.rounding == "stochastic" else None
    q = quantize(
        x,
        command.format,
        command.axis,
        command.block_size,
        command.rule,
        command.rounding,
        noise=noise,
    )
    assert q.stats is not None
    title = (
        f"{command.file.name} {x.shape} {x.dtype} -> {command.format}, axis {q.axis}, "
        f"block {q.block_size}, scale rule {q.scale_rule}, rounding {q.rounding}"
    )
    table = Table(title=title, title_justify="left", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for row in stats_card(q.stats).items():
        table.add_row(*row)
    if x.size:
        table.add_row("bits per element", f"{q.bits_per_element:.3f}")
    console.print(table)
    command.out.mkdir(parents=True, exist_ok=True)
    parts = [name, command.format]  # and what is not the default, so that no run hides another
    if command.rule not in (None, "floor"):
        parts.append(str(command.rule))
    if q.axis != x.ndim - 1:
        parts.append(f"axis{q.axis}")
    if command.block_size not in (None, FORMATS[command.format].block_size):
        parts.append(f"block{command.block_size}")
    if command.rounding != "even":
        seed = str(command.seed) if noise and command.seed else ""
        parts.append(command.rounding + seed)
    stem = ".".join(parts)
    archive, picture = command.out / f"{stem}.npz", command.out / f"{stem}.png"
    q.save(archive)
    draw_quantization(x, q, picture)
    console.print(f"codes and scales: {archive}\npicture: {picture}", soft_wrap=True)


def _report(command: Report, console: Console) -> None:
    if FORMATS[choose("format", command.format, FORMATS)].scale != "e8m0":
        mx = ", ".join(name for name, form in FORMATS.items() if form.scale == "e8m0")
        raise ValueError(
            f"format must be one of {mx}, whose scale rules are compared; {command.format} has its "
            "own scales"
        )
    rules = ("floor", "rceil")
    gain_pattern(command.gains)  # refused before anything is read
    arrays, skipped = load_arrays(command.model)
    if not arrays:
        reasons = ", ".join(f"{name}: {reason}" for name, reason in skipped.items())
        raise ValueError(f"{command.model} holds no real arrays ({reasons or 'it is empty'})")
    reports = [
        tensor_report(name, array, command.format, rules, command.gains)
        for name, array in arrays.items()
    ]
    table = Table(
        title=f"{command.model.name} in {command.format}, blocks of "
        f"{FORMATS[command.format].block_size} along the last axis",
        title_justify="left",
    )
    table.add_column("tensor", overflow="fold")
    table.add_column("shape", no_wrap=True)
    for rule in rules:
        for what in ("sat. %", "bits", "bias"):
            table.add_column(f"{rule}\n{what}", justify="right", no_wrap=True)
    for each in reports:
        cells = []
        for rule in rules:
            s = each.by_rule[rule]
            cells += [
                f"{100 * s.saturated:.2f}",
                number(s.effective_bits, "z.2f"),
                number(s.gain - 1, "+z.4f"),
            ]
        style = "bold yellow" if each.gain and each.by_rule["floor"].saturated > 0.5 else None
        label = f"{each.name} *" if each.gain else each.name
        if each.by_rule["floor"].nonfinite:
            label, style = f"{label} !", "bold red"
        table.add_row(label, "x".join(map(str, each.shape)) or "scalar", *cells, style=style)
    console.print(table)
    for each in reports:
        s = each.by_rule["floor"]
        if s.nonfinite:
            console.print(
                f"! {each.name}: non-finite, {s.nonfinite:,} of {s.elements:,} elements are in NaN "
                "blocks; the numbers are about the others",
                markup=False,
            )
    for reason in dict.fromkeys(skipped.values()):
        names = ", ".join(name for name, why in skipped.items() if why == reason)
        console.print(f"skipped ({reason}): {names}", markup=False)
    on_cliff = [r for r in reports if r.gain and r.by_rule["floor"].saturated > 0.5]
    gains = sum(r.gain for r in reports)
    console.print(
        f"* {gains} norm gains, {len(on_cliff)} of them more than half saturated under floor. "
        "sat.: |x| > largest * scale before rounding. bits: effective bits, "
        "-log2(relative mean squared error) / 2. bias: aligned gain - 1, the coherent scaling."
    )


def _formats(command: Formats, console: Console) -> None:
    names = list(FORMATS)
    if command.name is not None:
        names = [choose("name", command.name, FORMATS)]
    for name in names:
        form = FORMATS[name]
        table = Table(title=f"[bold]{name}", title_justify="left", show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        for label, value in format_card(form).items():
            table.add_row(label, value)
        element = form.element
        if element.bits <= 6 and isinstance(element, FloatFormat):
            half = element.values[: 2 ** (element.bits - 1)]
            text = " ".join(f"{v:g}" for v in half)
            table.add_row("values of codes 0, 1, ...\n(and their negatives)", text)
        console.print(table)
        if isinstance(element, FloatFormat) and element.bits > 6:
            ladder = np.unique(element.values[np.isfinite(element.values)])
            top = " ".join(f"{v:g}" for v in ladder[-8:])
            console.print(f"  largest values: {top}\n")


if __name__ == "__main__":
    sys.exit(main())
