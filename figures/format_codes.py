"""The codes of the six MX formats: relative gap to the next code, and the region that overflows.

    python -m figures.format_codes [--out FILE]

From mxsim.FORMATS and exact arithmetic alone: no run goes into it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures.command import computed, launch, saved
from figures.style import BLUE, ORANGE, PAGE_WIDTH, STYLE, VERMILION, bare_name, foot
from mxsim import FORMATS
from mxsim.formats import Element, IntFormat

SHOWN = ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")
WIDEST = 8  # octaves shown below the top one
OF = "positive codes of the six formats"


def positive_codes(element: Element) -> list[Fraction]:
    """The positive finite values of an element, in order, each over 2**emax: the last is ``top``.

    A block whose maximum sets its scale by ``floor`` has that maximum in [1, 2) of these units.
    """
    unit = Fraction(2) ** element.emax
    values = {Fraction(v) / unit for v in element.values.tolist() if 0 < v < math.inf}
    return sorted(v for v in values if v * unit <= Fraction(element.largest))


def relative_gaps(codes: list[Fraction]) -> list[Fraction]:
    """(next - code) / code of all codes but the last."""
    return [(after - code) / code for code, after in pairwise(codes)]


def overflow_share(element: Element) -> float:
    """Share of the top octave, in its logarithm, that lies beyond the largest code."""
    return 1 - math.log2(element.top)


def draw(out: Path) -> Path:
    """Draw the figure to ``out``; returns it."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, 3, figsize=(PAGE_WIDTH, 4.4), sharey=True, layout="constrained"
        )
        for axis, name in zip(axes.flat, SHOWN, strict=True):
            panel(axis, name)
        for axis in axes[:, 0]:
            axis.set_ylabel("gap to the next code, %")
        for axis in axes[1]:
            axis.set_xlabel("code / 2$^{emax}$")
        handles = [
            Line2D([], [], color=BLUE, marker=".", linewidth=0.8, label="normal codes"),
            Line2D([], [], color=VERMILION, marker=".", linewidth=0.8, label="subnormal codes"),
            Patch(facecolor=ORANGE, alpha=0.35, label="overflow: clamped to the largest code"),
        ]
        counts = [len(positive_codes(FORMATS[name].element)) for name in SHOWN]
        foot(
            figure,
            "All positive codes of the six formats of MX v1.0 "
            f"(n = {', '.join(map(str, counts))}; octaves below "
            f"2$^{{-{WIDEST}}}$ not shown), by exact arithmetic: no run, no interval. "
            "Under the scale rule floor the maximum of a block lies in the octave [1, 2): what "
            "exceeds the largest code there is clamped. Per cent: the shaded share of the "
            "octave's logarithm, the chance of that for a maximum that is log-uniform in it.",
            handles,
        )
        return saved(figure, out, computed("format_codes", sum(counts), OF))


def panel(axis: Axes, name: str) -> None:
    """One format: a dot a code at its relative gap, the overflow region shaded to 2."""
    element = FORMATS[name].element
    codes = positive_codes(element)
    lowest = Fraction(element.smallest_normal) / Fraction(2) ** element.emax
    gaps = [100 * float(gap) for gap in relative_gaps(codes)]
    x = [float(code) for code in codes]
    first = 0 if isinstance(element, IntFormat) else sum(code < lowest for code in codes)
    axis.plot(x[:first], gaps[:first], ".-", color=VERMILION, markersize=3, linewidth=0.6)
    axis.plot(x[first:-1], gaps[first:], ".-", color=BLUE, markersize=3, linewidth=0.6)
    axis.axvspan(x[-1], 2, color=ORANGE, alpha=0.35, linewidth=0)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    octaves = min(WIDEST, -math.floor(math.log2(x[0])))
    axis.set_xlim(2.0 ** -(octaves + 0.3), 2.0**1.05)
    axis.set_ylim(0.5, 150)
    axis.set_yticks([1, 10, 100], ["1", "10", "100"])
    every = 2 if octaves > 5 else 1
    powers = range(-octaves + octaves % every, 2, every)
    axis.set_xticks([2.0**p for p in powers], [f"$2^{{{p}}}$" for p in powers])
    axis.minorticks_off()
    axis.grid(True)
    axis.set_axisbelow(True)
    axis.set_title(f"{bare_name(name)}, largest {element.largest:g}")
    axis.text(
        0.86,
        0.9,
        f"{100 * overflow_share(element):.0f} % clamped",
        transform=axis.transAxes,
        ha="right",
        fontsize=7,
    )


@dataclass(frozen=True)
class Arguments:
    """Draw the codes of the MX formats."""

    out: Path = Path("results") / "format_codes.png"
    """The file to write."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status."""
    print(draw(arguments.out))
    return 0


if __name__ == "__main__":
    launch(main, Arguments, "format_codes")
