"""One look for all figures: print size, colour-blind safe, sans serif."""

from __future__ import annotations

from typing import Any

# Okabe and Ito's palette, distinguishable with any colour vision.
BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"

PAGE_WIDTH = 7.2  # inches

STYLE: Any = {  # matplotlib types its keys one by one
    "figure.dpi": 150,
    "savefig.dpi": 200,
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.labelsize": 8,
    "legend.fontsize": 7.5,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "lines.linewidth": 1.1,
    "grid.linewidth": 0.4,
    "grid.color": "#dddddd",
    "legend.frameon": False,
    "svg.hashsalt": "mxsim",
}

CAPTION: Any = {"fontsize": 6.5, "va": "bottom", "ha": "left", "color": "#333333"}  # figure.text's

GREY = "#999999"


def bare_name(fmt: str) -> str:
    """A block format's name as a figure has it: E4M3, INT8."""
    return fmt.removeprefix("mx").split("_")[-1].upper()
