"""One look for all figures: print size, colour-blind safe, sans serif, the caption at the foot."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure

# Okabe and Ito's palette, distinguishable with any colour vision; its yellow is too pale for paper.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
BLUE, VERMILION, PURPLE = "#0072B2", "#D55E00", "#CC79A7"
BROWN = "#6B4C00"  # instead: dark, so that no eye takes it for one of the others
GREY, PALE = "#808080", "#dddddd"

PAGE_WIDTH = 6.8  # inches: what a page's two columns leave, so that points are points in print
SMALLEST = 6  # points: nothing on a figure is set smaller

STYLE: Any = {  # matplotlib types its keys one by one
    "figure.dpi": 150,
    "savefig.dpi": 200,
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "grid.linewidth": 0.4,
    "grid.color": PALE,
    "legend.frameon": False,
    "svg.hashsalt": "mxsim",
}

CAPTION: Any = {"fontsize": 6.5, "va": "bottom", "ha": "left", "color": "#333333"}  # figure.text's
LETTERS = 20.3  # of a caption to the inch, at least
LINE, ROW, MARGIN = 0.11, 0.165, 0.05  # inches: of a caption, of a legend, around them


def foot(figure: Figure, caption: str, handles: Sequence[Any] = (), ncols: int = 4) -> None:
    """Write the caption and a legend of ``handles`` below the axes of a constrained layout.

    The caption is filled to the figure's width anew, whatever its line breaks.
    """
    width, height = (float(inches) for inches in figure.get_size_inches())
    lines = textwrap.wrap(caption, int(LETTERS * width), break_on_hyphens=False)
    rows = math.ceil(len(handles) / ncols)
    text = LINE * len(lines) + 2 * MARGIN
    whole = text + (ROW * rows + MARGIN if rows else 0)
    figure.text(MARGIN / width, MARGIN / height, "\n".join(lines), **CAPTION)
    if rows:
        figure.legend(
            handles=handles,
            loc="lower center",
            ncols=ncols,
            bbox_to_anchor=(0.5, text / height),
            borderaxespad=0,
            borderpad=0,
            columnspacing=1.4,
            handlelength=1.8,
        )
    engine: Any = figure.get_layout_engine()
    engine.set(rect=(0, whole / height, 1, 1 - whole / height))


def bare_name(fmt: str) -> str:
    """A block format's name as a figure has it: E4M3, INT8."""
    return fmt.removeprefix("mx").split("_")[-1].upper()
