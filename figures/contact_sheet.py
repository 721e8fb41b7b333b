"""All figures on one page: a thumbnail and the name of each.

    python -m figures.contact_sheet --folder DIR [--out FILE]

Reads the pictures and sidecars that the other scripts wrote to a folder, in figures.all's order;
fails if a picture, or the sidecar that says how many runs it shows, is missing.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from figures.command import saved
from figures.style import CAPTION, STYLE

WIDTH, ROW = 8.27, 1.6  # inches: seven rows fill a page of A4
COLUMNS = 5
NAME = "contact_sheet"


def runs_in(picture: Path) -> set[str]:
    """Ids of the runs that a picture's sidecar names; FileNotFoundError if there is none."""
    return set(json.loads(picture.with_suffix(".json").read_text()).get("runs", []))


def draw(pictures: Sequence[Path], out: Path) -> Path:
    """Draw the page to ``out``; returns it.  Raises FileNotFoundError if a picture is missing."""
    runs = set().union(*(runs_in(picture) for picture in pictures))
    images = [plt.imread(picture) for picture in pictures]
    rows = math.ceil(len(pictures) / COLUMNS)
    with plt.rc_context(STYLE):
        height = ROW * rows + 0.3  # for the caption
        figure, axes = plt.subplots(
            rows, COLUMNS, figsize=(WIDTH, height), squeeze=False, layout="constrained"
        )
        foot = 0.3 / height
        figure.get_layout_engine().set(rect=(0, foot, 1, 1 - foot))  # type: ignore[union-attr,call-arg]
        for axis in axes.flat:
            axis.set_axis_off()
        for axis, picture, image in zip(axes.flat, pictures, images, strict=False):
            axis.imshow(image, interpolation_stage="rgba")
            axis.set_title(picture.stem, fontsize=6.5, pad=2)
        figure.text(
            0.01,
            0.06 / height,
            f"{len(pictures)} figures of {len(runs)} runs; n and interval of each are in its own "
            "caption, ids and commits of its runs in its sidecar.",
            **CAPTION,
        )
        return saved(figure, out)


@dataclass(frozen=True)
class Arguments:
    """Draw the contact sheet of a folder of figures."""

    folder: Path
    """Where the pictures are."""
    out: Path | None = None
    """The file to write; default contact_sheet.png in the folder."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a picture is missing."""
    from figures.all import FIGURES  # which imports this module

    pictures = [arguments.folder / name for each in FIGURES for name in each.files]
    try:
        print(draw(pictures, arguments.out or arguments.folder / f"{NAME}.png"))
    except FileNotFoundError as error:
        print(f"a picture is missing ({error}); run python -m figures.all", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    import tyro

    sys.exit(main(tyro.cli(Arguments, prog=f"python -m figures.{NAME}")))
