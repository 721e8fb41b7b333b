"""All figures on few pages, as large as they can be read in print, and which runs each shows.

    python -m figures.contact_sheet --folder DIR [--out FILE]

Reads the pictures and sidecars that the other scripts wrote to a folder, in figures.all's order;
fails if a picture, or the sidecar that says how many runs it shows, is missing.  Writes A3 pages to
a pdf, and one picture (png) of all pages below each other.
"""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.backends.backend_pdf import PdfPages
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

from figures.command import UNDATED, launch, write_sidecar
from figures.style import CAPTION, STYLE
from mxsim.store import whole_file

Array = NDArray[Any]

NAME = "contact_sheet"
PAGE = (16.54, 11.69)  # inches: A3, landscape
COLUMNS, ROWS = 3, 2  # tiles a page
GAP, TITLE, FOOT = 0.12, 0.24, 0.3  # inches: around a tile, of its name, of the page's caption
TILE = (PAGE[0] / COLUMNS - 2 * GAP, (PAGE[1] - FOOT) / ROWS - TITLE - 2 * GAP)  # its picture
DPI = 150
SHADES = 256  # of the png's palette: a quarter of the bytes, no colour off by more than can be seen


@dataclass(frozen=True)
class Tile:
    """A figure as it is on the sheet."""

    picture: Path
    image: Array
    sidecar: dict[str, Any]

    @property
    def inches(self) -> tuple[float, float]:
        """Width and height of its own."""
        height, width = (each / STYLE["savefig.dpi"] for each in self.image.shape[:2])
        return width, height

    @property
    def scale(self) -> float:
        """Of the figure on the sheet: its points are so many points there."""
        return min(1.0, *(room / own for room, own in zip(TILE, self.inches, strict=True)))


def read(picture: Path) -> Tile:
    """A picture and its sidecar; FileNotFoundError if either is missing."""
    sidecar = json.loads(picture.with_suffix(".json").read_text())
    return Tile(picture, plt.imread(picture), sidecar)


def told(tiles: Sequence[Tile]) -> dict[str, Any]:
    """What the sheet's own sidecar says: n of each tile, runs and commits of all."""
    runs = sorted({run for tile in tiles for run in tile.sidecar["runs"]})
    return {
        "caption": caption(tiles, len(runs)),
        "command": "python -m figures.all",
        "n": len(runs),
        "n_of": "stored results",
        "tiles": [
            {
                "picture": tile.picture.name,
                "sidecar": tile.picture.with_suffix(".json").name,
                **{key: tile.sidecar[key] for key in ("command", "study", "tier", "n", "n_of")},
            }
            for tile in tiles
        ],
        "commits": sorted({commit for tile in tiles for commit in tile.sidecar["commits"]}),
        "runs": runs,
    }


def caption(tiles: Sequence[Tile], runs: int) -> str:
    """How many figures of how many runs."""
    return (
        f"{len(tiles)} figures of {runs} stored results, which are runs but where the figure says "
        "otherwise; n and interval of each are in its own caption, ids and commits in its sidecar."
    )


def page_of(tiles: Sequence[Tile], words: str) -> Figure:
    """One page: the tiles in rows, their names above them, the caption at the foot."""
    figure = plt.figure(figsize=PAGE)
    width, height = PAGE
    for i, tile in enumerate(tiles):
        left = (i % COLUMNS) * width / COLUMNS + GAP
        top = height - (i // COLUMNS) * (height - FOOT) / ROWS - GAP
        own = [tile.scale * each for each in tile.inches]
        x = left + (TILE[0] - own[0]) / 2
        figure.text(
            (left + TILE[0] / 2) / width, top / height, tile.picture.stem, ha="center", va="top",
            fontsize=9, weight="bold",
        )  # fmt: skip
        box = (x / width, (top - TITLE - own[1]) / height, own[0] / width, own[1] / height)
        axis = figure.add_axes(box)
        axis.set_axis_off()
        axis.imshow(tile.image, aspect="auto", interpolation_stage="rgba")
    figure.text(GAP / width, GAP / height, words, **CAPTION)
    return figure


def draw(pictures: Sequence[Path], out: Path) -> Path:
    """Draw the sheet to ``out`` (png), its pages and its sidecar beside it; returns ``out``.

    Raises FileNotFoundError if a picture is missing, ValueError for an ``out`` of another format.
    """
    if out.suffix != ".png":
        raise ValueError(f"out must end in .png; got {out}")
    tiles = [read(picture) for picture in pictures]
    content = told(tiles)
    of_page = COLUMNS * ROWS
    pages = math.ceil(len(tiles) / of_page)
    rasters = []
    with (
        plt.rc_context(STYLE),
        whole_file(out.with_suffix(".pdf")) as file,
        PdfPages(file, metadata=UNDATED[".pdf"]) as book,
    ):
        for i in range(pages):
            words = f"Page {i + 1} of {pages}. {content['caption']}"
            figure = page_of(tiles[i * of_page : (i + 1) * of_page], words)
            book.savefig(figure)
            raster = io.BytesIO()
            figure.savefig(raster, format="png", dpi=DPI)
            rasters.append(Image.open(raster).convert("RGB"))
            plt.close(figure)
    sheet = Image.fromarray(np.concatenate([np.asarray(page) for page in rasters]))
    with whole_file(out) as file:
        palette = sheet.quantize(SHADES, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
        palette.save(file, format="png", optimize=True)
    write_sidecar(out, {"files": [out.name, out.with_suffix(".pdf").name], **content})
    return out


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
    launch(main, Arguments, NAME)
