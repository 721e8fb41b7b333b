"""What a figure's command does: read stored results, draw and say where, or say what is missing.

A figure is three files of one stem: a picture (png), its vector twin (pdf), and a sidecar (json)
that says which runs it was drawn from, made by which commits, how many, and by which command.
A script is an ``Arguments``, most of them a FromResults, a ``main`` of it, and ``launch``.
The bytes of all three depend on the results alone: there is no date in them.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from mxsim.boundary import trace
from mxsim.store import Record, Store, whole_file
from mxsim.sweep import load_points
from mxsim.tracing import Column, outcomes

Key = TypeVar("Key", bound=Hashable)

RASTER, VECTOR = (".png", ".jpg", ".webp"), (".pdf", ".svg")
UNDATED: Mapping[str, Mapping[str, None]] = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}


@dataclass(frozen=True)
class FromResults:
    """What a figure of a study is told; each says its own tiers."""

    tier: str = "laptop"
    """Which of the study's designs."""
    results: Path = Path("results")
    """Where results are stored."""
    out: Path | None = None
    """The file to write; default beside the results."""


def launch(main: Callable[[Any], int], arguments: type, name: str) -> None:
    """Run a script of figures/ with the arguments of the command line, and exit."""
    import tyro

    sys.exit(main(tyro.cli(arguments, prog=f"python -m figures.{name}")))


@dataclass(frozen=True)
class Source:
    """What a figure was drawn from; ``command`` draws it again from results in their own place.

    n counts ``of``: of a figure of runs, its stored results.  study, tier: None if no run went
    into it, and there are no records then.
    """

    study: str | None
    tier: str | None
    command: str
    records: tuple[Record, ...]
    n: int
    of: str = "stored results"


def source(
    study: str,
    tier: str,
    records: Iterable[Record | None],
    command: str = "",
) -> Source:
    """The source of a figure of a study; ``command`` defaults to that of the figure of its name.

    A record that is None (not run: a partial figure) is left out, one that comes twice counts once.
    Raises ValueError if none is left.
    """
    unique = {record.id: record for record in records if record is not None}
    if not unique:
        raise ValueError(f"a figure of {study} must show at least one stored result; got none")
    return Source(
        study,
        tier,
        command or f"python -m figures.{study} --tier {tier}",
        tuple(unique[name] for name in sorted(unique)),
        len(unique),
    )


def computed(name: str, n: int, of: str) -> Source:
    """The source of a figure that no run goes into: ``n`` values, ``of`` which kind."""
    return Source(None, None, f"python -m figures.{name}", (), n, of)


def tier_of(designs: Mapping[Any, Any], design: Any) -> str:
    """The tier whose design this is; "changed" for one that is none of them."""
    return next((str(tier) for tier, each in designs.items() if each == design), "changed")


def stored(folder: Path, ids: Iterable[str]) -> list[Record]:
    """The records of some ids, without arrays; raises FileNotFoundError if one is missing."""
    store = Store(folder)
    return [Record(name, {}, store.load_meta(name)) for name in ids]


def traced(columns: Mapping[Key, Column], folder: Path) -> list[Record]:
    """The records that searches for boundaries asked for; FileNotFoundError if one is missing."""
    store, found = Store(folder), {}

    def evaluate(asked: Sequence[tuple[Key, float, int]]) -> list[bool]:
        points = [columns[key].point(lr, seed) for key, lr, seed in asked]
        found.update(load_points(points, store))
        return outcomes(points, store)

    trace({key: column.search for key, column in columns.items()}, evaluate)
    return list(found.values())


def draw_stored(
    study: str,
    load: Callable[[Any, Path], Any],
    arguments: FromResults,
    pictures: Mapping[Path, Callable[..., Path]],
    folder: Path | None = None,
) -> int:
    """Draw each picture from what ``load`` reads; the exit status is 1 if a result is missing.

    study: with what it must be told besides tier and results for the missing one to be run.
    load: of (tier, folder of all results); raises FileNotFoundError if one is missing.
    pictures: out -> a function of (what was loaded, out), and of ``folder``, where the runs lie, if
    that is given: for sources of which the loaded results keep no records.
    """
    try:
        results = load(arguments.tier, arguments.results)
    except FileNotFoundError as error:
        command = f"python -m studies.{study} --tier {arguments.tier}"
        if arguments.results != FromResults.results:
            command += f" --results {arguments.results}"
        print(f"{error}; run {command}", file=sys.stderr)
        return 1
    for path, draw in pictures.items():
        print(draw(results, path) if folder is None else draw(results, path, folder=folder))
    return 0


def saved(figure: Figure, out: Path, source: Source) -> Path:
    """Write the figure, its twin and its sidecar, each whole or not at all, and close the figure.

    The folder is made if need be.  ``out`` says the format; its twin is a pdf beside a raster
    picture, a png beside a vector picture.
    The caption is what is written on the figure outside its axes.  Returns ``out``.
    Raises OSError if a file cannot be written, ValueError for a format that is neither.
    """
    if out.suffix not in RASTER + VECTOR:
        raise ValueError(f"out must end in one of {', '.join(RASTER + VECTOR)}; got {out}")
    out.parent.mkdir(parents=True, exist_ok=True)
    twin = out.with_suffix(".pdf" if out.suffix in RASTER else ".png")
    for path in (out, twin):
        with whole_file(path) as file:
            figure.savefig(file, format=path.suffix[1:], metadata=UNDATED.get(path.suffix))
    caption = " ".join(" ".join(text.get_text().split()) for text in figure.texts)
    write_sidecar(out, {"files": [out.name, twin.name], "caption": caption, **told(source)})
    plt.close(figure)
    return out


def told(source: Source) -> dict[str, Any]:
    """What a sidecar says of a source: command, study, tier, n, commits and ids of runs."""
    commits = Counter(
        str(record.meta.get("versions", {}).get("commit")) for record in source.records
    )
    return {
        "command": source.command,
        "study": source.study,
        "tier": source.tier,
        "n": source.n,
        "n_of": source.of,
        "commits": dict(sorted(commits.items())),  # commit -> results made by it
        "runs": [record.id for record in source.records],
    }


def write_sidecar(out: Path, content: Mapping[str, Any]) -> Path:
    """``<stem of out>.json``, whole or not at all; returns it."""
    path = out.with_suffix(".json")
    with whole_file(path) as file:
        file.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return path
