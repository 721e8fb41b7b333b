"""Losses of several arms in one panel: every seed, the median of all, how many failed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from mxsim.grid import FAILURES, state_of
from mxsim.stats import share
from mxsim.store import Record

Array = NDArray[Any]

COUNT = 24  # points from one count of failed runs to the next
CEILING = 100.0  # times the first loss: what is beyond is drawn there


@dataclass(frozen=True)
class Look:
    """How an arm is drawn, and what it is called in the legend."""

    colour: str
    label: str
    line: Literal["-", "--", ":"] = "-"


def smooth(losses: Array, windows: int = 50) -> tuple[Array, Array]:
    """Centres and medians of about ``windows`` windows of steps; losses (steps,).

    Windows in which no loss is finite are NaN.
    """
    width = max(1, len(losses) // windows)
    whole = len(losses) // width * width
    blocks = losses[:whole].reshape(-1, width)
    known = np.isfinite(blocks).any(axis=1)
    middle = np.full(len(blocks), np.nan)
    middle[known] = np.nanmedian(np.where(np.isfinite(blocks), blocks, np.nan)[known], axis=1)
    return np.arange(len(blocks)) * width + (width - 1) / 2, middle


def ended_badly(record: Record) -> bool:
    """Whether a run failed in a phase diagram's words: not learned by its end counts, too."""
    return state_of(record) in FAILURES


def draw_losses(
    axis: Axes,
    arms: Mapping[str, Sequence[Record]],
    looks: Mapping[str, Look],
    failed: Callable[[Record], bool] = ended_badly,
) -> None:
    """Each seed's losses as a thin line, the median over seeds of their smoothed ones as a thick.

    arms: name -> records of all seeds; how many ``failed`` stands above the panel at the right.
    Losses beyond the ceiling are drawn there; one that is not finite counts so for the median.
    """
    for name, records in arms.items():
        look = looks[name]
        smoothed = []
        for record in records:
            losses = np.asarray(record.arrays["losses"], float)
            ceiling = CEILING * losses[0]
            losses = np.minimum(losses, ceiling)  # NaN stays
            axis.plot(losses, color=look.colour, linewidth=0.35, alpha=0.35)
            at, middle = smooth(losses)
            smoothed.append(middle)
        together = np.nan_to_num(np.stack(smoothed), nan=np.inf)
        middle = np.median(together, axis=0)
        style: Any = {"linestyle": look.line, "color": look.colour, "linewidth": 1.2}
        axis.plot(at, np.minimum(middle, ceiling), zorder=3, **style)  # above all thin ones
    axis.set_yscale("log")
    axis.grid(axis="y")
    for i, (name, records) in enumerate(reversed(list(arms.items()))):
        axis.annotate(
            f"{sum(map(failed, records))}/{len(records)}",
            (1, 1.03),
            (-COUNT * i, 0),
            xycoords="axes fraction",
            textcoords="offset points",
            color=looks[name].colour,
            ha="right",
            fontsize=6.5,
        )


def handles(looks: Mapping[str, Look]) -> list[Line2D]:
    """What a legend of the arms needs."""
    return [Line2D([], [], color=e.colour, linestyle=e.line, label=e.label) for e in looks.values()]


def interval_of_shares(n: int) -> str:
    """How much ``n`` seeds say at the ends: the Wilson intervals of none and of all."""
    none, every = share(0, n), share(n, n)
    return f"95 % Wilson interval of 0/{n}: 0 to {none.high:.2f}, of {n}/{n}: {every.low:.2f} to 1"


def counts_in_words(
    seeds: Sequence[int], failed: str = "not learned by the end or not finite"
) -> str:
    """What lines and fractions are, with intervals of shares; ``seeds``: each of some panels."""
    intervals = "; ".join(interval_of_shares(n) for n in seeds)
    return (
        f"Thin: each of {' or '.join(map(str, seeds))} seeds; thick: median; "
        f"cut off at {CEILING:g} times the first loss. "
        f"Above each panel, in the legend's order and colours: runs that failed ({failed}; "
        f"{intervals})."
    )
