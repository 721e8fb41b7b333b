"""What a figure's command does: read stored results, draw and say where, or say what is missing.

A figure is three files of one stem: a picture (png), its vector twin (pdf), and a sidecar (json)
that says which runs it was drawn from, made by which commits, how many, and by which command.
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
class Source:
    """What a figure was drawn from; ``command`` draws it again from results in their own place."""

    study: str
    tier: str
    command: str
    records: tuple[Record, ...]


def source(
    study: str,
    tier: str,
    records: Iterable[Record | None],
    command: str = "",
) -> Source:
    """The source of a figure of a study; ``command`` defaults to that of the figure of its name.

    A record that is None (not run: a partial figure) is left out, one that comes twice counts once.
    """
    unique = {record.id: record for record in records if record is not None}
    return Source(
        study,
        tier,
        command or f"python -m figures.{study} --tier {tier}",
        tuple(unique[name] for name in sorted(unique)),
    )


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
    load: Callable[[], Any],
    pictures: Mapping[Path, Callable[..., Path]],
    folder: Path | None = None,
) -> int:
    """Draw each picture from what ``load`` reads; the exit status is 1 if a result is missing.

    pictures: out -> a function of (what was loaded, out), and of ``folder``, where the runs lie, if
    that is given: for sources of which the loaded results keep no records.
    """
    try:
        results = load()
    except FileNotFoundError as error:
        print(f"a result is missing ({error}); run python -m studies.{study}", file=sys.stderr)
        return 1
    for path, draw in pictures.items():
        print(draw(results, path) if folder is None else draw(results, path, folder=folder))
    return 0


def saved(figure: Figure, out: Path, source: Source | None = None) -> Path:
    """Write the figure, its twin and its sidecar, each whole or not at all, and close the figure.

    The folder is made if need be.  ``out`` says the format; its twin is a pdf beside a raster
    picture, a png beside a vector picture.  ``source``: None for a figure that no run went into.
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
    write_sidecar(out, [out.name, twin.name], caption, source)
    plt.close(figure)
    return out


def write_sidecar(out: Path, files: Sequence[str], caption: str, source: Source | None) -> Path:
    """``<stem of out>.json``: files, command, study, tier, caption, n, commits and ids of runs."""
    content: dict[str, Any] = {"files": list(files), "caption": caption}
    if source is not None:
        commits = Counter(
            str(record.meta.get("versions", {}).get("commit")) for record in source.records
        )
        content |= {
            "command": source.command,
            "study": source.study,
            "tier": source.tier,
            "n": len(source.records),
            "commits": dict(sorted(commits.items())),  # commit -> runs
            "runs": [record.id for record in source.records],
        }
    path = out.with_suffix(".json")
    with whole_file(path) as file:
        file.write((json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode())
    return path
