"""eta times sharpness over steps against the edge of stability, and the training loss.

    python -m figures.edge_of_stability [--tier smoke|laptop] [--out FILE]

Reads the results of studies/edge_of_stability.py; fails if any is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from figures.command import FromResults, Source, draw_stored, launch, saved, source, stored, tier_of
from figures.style import BLACK, BLUE, ORANGE, PAGE_WIDTH, STYLE, foot
from mxsim.store import result_id
from studies.edge_of_stability import DESIGNS, STUDY, Results, Tier, cells, load, theory

COLOURS = (BLUE, ORANGE)  # by rate
EDGES = {
    "gradient descent": "$2$",
    "heavy ball": r"$2\,(1+\beta)$",
    "Adam": r"$P^{-1}H$: $2\,(1+\beta_1)/(1-\beta_1)$",
}


def draw(results: Results, out: Path, folder: Path | None = None) -> Path:
    """Draw the figure to ``out``; returns it."""
    design = results.design
    names = list(dict.fromkeys(arm.name for arm in design.arms))
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(
            2, len(names), figsize=(PAGE_WIDTH, 4.0), sharex="col", height_ratios=(3, 2),
            layout="constrained",
        )  # fmt: skip
        for column, name in enumerate(names):
            upper, lower = axes[:, column]
            arms = [arm for arm in design.arms if arm.name == name]
            for arm, colour in zip(arms, COLOURS, strict=False):
                arrays = results.by_arm[arm]
                steps, values = arrays["steps"][0], arm.lr * arrays["sharpness"]
                upper.plot(steps, np.median(values, axis=0), color=colour, label=f"η {arm.lr:g}")
                upper.fill_between(
                    steps, values.min(axis=0), values.max(axis=0), color=colour, alpha=0.2, lw=0
                )
                losses = arrays["losses"]
                lower.plot(np.median(losses, axis=0), color=colour, linewidth=0.7)
            edge = theory(results, arms[0])
            upper.axhline(edge, color=BLACK, linestyle="--", linewidth=0.8)
            upper.set_ylim(0, 1.45 * edge)
            upper.set_title(f"{name}\n{EDGES[name]}")
            upper.legend(loc="lower right")
            lower.set_yscale("log")
            lower.set_xlabel("step")
        axes[0, 0].set_ylabel("η × sharpness")
        axes[1, 0].set_ylabel("training loss")
        base = design.base
        foot(
            figure,
            f"Exact proxy, float64, full batch of {base.batch} (width {base.width}, depth "
            f"{base.depth}, {base.activation}), median and range of {design.seeds} seeds "
            "(losses: median); dashed: theory, the formula above each panel. η: learning rate; "
            "sharpness: largest eigenvalue of the Hessian H, for Adam of P⁻¹H.",
        )
        return saved(figure, out, runs_of(results, folder or out.parent))


def runs_of(results: Results, folder: Path) -> Source:
    """The runs behind the figure, which lie in ``folder``."""
    return source(
        STUDY,
        tier_of(DESIGNS, results.design),
        stored(folder, [result_id(cell) for cell in cells(results.design).values()]),
    )


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the study's figure again, from stored results."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    folder = arguments.results / STUDY
    out = arguments.out or folder / f"{STUDY}_{arguments.tier}.png"
    return draw_stored(STUDY, load, arguments, {out: draw}, folder)


if __name__ == "__main__":
    launch(main, Arguments, STUDY)
