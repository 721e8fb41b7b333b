"""Losses by activation and norm, exact and MX.

    python -m figures.activation_norm [--tier smoke|laptop|cluster] [--out FILE]

Reads the runs of the diagram activation_norm of studies/phase_diagrams.py; fails if any is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import get_args

import matplotlib.pyplot as plt

from figures.command import FromResults, Source, draw_stored, launch, saved, source, tier_of
from figures.loss_lines import Look, counts_in_words, draw_losses, handles
from figures.style import BLACK, PAGE_WIDTH, STYLE, VERMILION, foot
from mxsim.grid import Cell
from studies.phase_diagrams import STUDY, Name, Results, Tier, diagram, load

NAME: Name = "activation_norm"
LOOKS = {"exact": Look(BLACK, "exact"), "all_e4m3": Look(VERMILION, "MX E4M3, all 14 sites", "--")}
NORMS = {
    "layer": "layer norm",
    "layer_no_affine": "layer norm, no affine",
    "rms": "RMS norm",
    "none": "no norm",
}


def draw(results: Results, out: Path) -> Path:
    """A row a norm, a column an activation, to ``out``; returns it."""
    it = results.diagram
    seeds, base = range(it.grid.seeds), it.grid.base
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            len(it.y.labels),
            len(it.x.labels),
            figsize=(PAGE_WIDTH, 7.2),
            sharex=True,
            sharey="row",
            layout="constrained",
        )
        for row, norm in zip(axes, it.y.labels, strict=True):
            for axis, activation in zip(row, it.x.labels, strict=True):
                arms = {
                    arm: [
                        record
                        for seed in seeds
                        if (record := results.records[Cell((activation, norm), arm, seed)])
                    ]
                    for arm in LOOKS
                }
                draw_losses(axis, arms, LOOKS)
                if norm == it.y.labels[0]:
                    axis.set_title(activation, loc="left")
            row[0].set_ylabel(f"{NORMS[norm]}\ntraining loss")
        for axis in axes[-1]:
            axis.set_xlabel("step")
        foot(
            figure,
            f"Width {base.width}, depth {base.depth}, batch {base.batch}, lr {base.lr:g}, Adam. "
            f"{counts_in_words([it.grid.seeds])}",
            handles(LOOKS),
        )
        return saved(figure, out, runs_of(results))


def runs_of(results: Results) -> Source:
    """The runs behind the figure."""
    tier = tier_of({tier: diagram(NAME, tier) for tier in get_args(Tier)}, results.diagram)
    command = f"python -m figures.{NAME} --tier {tier}"
    return source(STUDY, tier, results.records.values(), command)


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw losses by activation and norm, from stored results."""

    tier: Tier = "laptop"
    out: Path | None = None
    """The file to write; default beside the results, as activation_norm_losses.png."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / f"{STUDY}_{arguments.tier}"
    out = arguments.out or folder / f"{NAME}_losses.png"
    return draw_stored(f"{STUDY} --diagrams {NAME}", partial(load, NAME), arguments, {out: draw})


if __name__ == "__main__":
    launch(main, Arguments, NAME)
