"""Hybrid precisions against full MX and exact: losses, failures, held-out loss over exact.

    python -m figures.hybrids [--tier smoke|laptop|cluster] [--out FILE]

Reads the results of studies/claims.py; fails if any run is missing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from figures.command import FromResults, draw_stored, launch, saved, source
from figures.loss_lines import Look, counts_in_words, draw_losses, handles, interval_of_shares
from figures.losses import FAILED, has_failed, records_of
from figures.style import BLACK, BLUE, GREEN, GREY, PAGE_WIDTH, SMALLEST, STYLE, VERMILION, foot
from mxsim.stats import mcnemar, median_over_seeds
from mxsim.store import Record
from studies.claims import READINGS, STUDY, TASKS, Arm, Reading, Results, Task, Tier, load

Pair = tuple[bool, bool]

NAME = "hybrids"
ARMS: dict[str, tuple[str, Arm]] = {  # (condition, arm)
    "exact": ("base", "exact"),
    "mx": ("base", "mx"),
    "bf16": ("bf16 activations", "mx"),
    "forward": ("exact backward", "mx"),
}
LOOKS = {
    "exact": Look(BLACK, "exact"),
    "mx": Look(VERMILION, "MX E4M3"),
    "bf16": Look(BLUE, "E4M3 weights, bf16 activations"),
    "forward": Look(GREEN, "quantized forward, exact backward", "--"),
}
MARKERS = {"mx": "o", "bf16": "s", "forward": "D"}
SHORT = {"mx": "MX", "bf16": "bf16\nact.", "forward": "exact\nbackw."}
OUTCOMES: dict[Pair, tuple[str, str, str]] = {  # (own fails, exact fails): fill, hatch
    (True, False): ("#555555", "", "only it fails"),
    (True, True): ("#bbbbbb", "////", "exact fails, too"),
    (False, True): ("white", "....", "only exact fails"),
    (False, False): ("white", "", "neither fails"),
}
WORDS = {"paper_text": "paper's text", "paper_code": "paper's code", "script": "near-zero teacher",
         "unit": "unit variance", "searched": "where MX was found to fail"}  # fmt: skip
FLOOR, CEILING = 0.5, 10.0  # ratios beyond are drawn there, above as triangles


def condition_of(reading: Reading, label: str) -> str:
    """The condition shown: the script's quantized teacher would give MX runs other targets."""
    if reading == "paper_text":
        return label
    return "exact teacher" if label == "base" else f"{label}, exact teacher"


def arms_of(results: Results, reading: Reading, task: Task, lr: float) -> dict[str, list[Record]]:
    """Arm -> the records of all seeds."""
    return {
        name: records_of(results, reading, task, condition_of(reading, label), lr, arm)
        for name, (label, arm) in ARMS.items()
    }


def ratios(axis: Axes, by_rate: dict[float, dict[str, list[Record]]]) -> None:
    """Held-out loss over the exact run's of the same seed, by rate: median, 95 %.

    A failed run counts as infinite; pairs whose exact run failed are left out.
    """
    axis.axhline(1, color=BLACK, linewidth=0.6)
    for i, arms in enumerate(by_rate.values()):
        if all(map(has_failed, arms["exact"])):
            axis.text(i, 3, "exact\nfailed", ha="center", va="center", fontsize=6.5, color=GREY)
        for j, (name, marker) in enumerate(MARKERS.items()):
            pairs = [
                (np.inf if has_failed(own) else own.meta["eval_loss"]) / exact.meta["eval_loss"]
                for own, exact in zip(arms[name], arms["exact"], strict=True)
                if not has_failed(exact)
            ]
            if not pairs:
                continue
            found = median_over_seeds(np.array(pairs))
            value, low, high = (
                min(max(each, FLOOR), CEILING) for each in (found.value, found.low, found.high)
            )
            at, colour = i + 0.2 * (j - 1), LOOKS[name].colour
            axis.plot([at, at], [low, high], color=colour, linewidth=0.9)
            axis.plot(at, value, marker, color=colour, markersize=2.8)
            if high == CEILING:
                axis.plot(at, CEILING, "^", color=colour, markersize=3.5, clip_on=False)
    scale(axis)
    pairs_of = {lr: sum(not has_failed(r) for r in arms["exact"]) for lr, arms in by_rate.items()}
    axis.set_xticks(range(len(by_rate)), [f"{lr:g}\nn = {n}" for lr, n in pairs_of.items()])
    axis.set_xlim(-0.5, len(by_rate) - 0.5)


def scale(axis: Axes) -> None:
    """The y axis of a panel of ratios."""
    axis.set_yscale("log")
    axis.set_ylim(FLOOR, CEILING)
    axis.set_yticks([0.5, 1, 2, 5, 10], ["<0.5", "1", "2", "5", ">10"])
    axis.minorticks_off()
    axis.grid(axis="y")


def paired(arms: dict[str, list[Record]], name: str, other: str = "exact") -> Counter[Pair]:
    """(whether the run of ``name`` failed, that of ``other``) -> seeds."""
    return Counter(
        (has_failed(own), has_failed(its)) for own, its in zip(arms[name], arms[other], strict=True)
    )


def failures(axis: Axes, arms: dict[str, list[Record]]) -> None:
    """A bar an arm: of how many pairs of seeds it failed, its exact run, both, neither."""
    for i, name in enumerate(MARKERS):
        found, bottom = paired(arms, name), 0
        for outcome, (fill, hatch, _) in OUTCOMES.items():
            if n := found[outcome]:
                bar: Any = {"facecolor": fill, "hatch": hatch, "edgecolor": BLACK, "linewidth": 0.4}
                axis.bar(i, n, 0.7, bottom, **bar)
                words: Any = {"ha": "center", "va": "center", "fontsize": SMALLEST}
                words["color"] = "white" if outcome == (True, False) else BLACK
                if hatch:
                    words["bbox"] = {"facecolor": fill, "linewidth": 0, "pad": 0.3}
                axis.text(i, bottom + n / 2, str(n), **words)
                bottom += n
    axis.set_xticks(range(len(MARKERS)), [SHORT[name] for name in MARKERS])
    axis.tick_params(axis="x", length=0)
    axis.set_ylim(0, len(arms["exact"]))
    axis.set_ylabel("pairs")


def survivors(axis: Axes, arms: dict[str, list[Record]]) -> None:
    """Held-out loss over the exact run's of every pair of which both did not fail; their median."""
    axis.axhline(1, color=BLACK, linewidth=0.6)
    words = []
    for i, (name, marker) in enumerate(MARKERS.items()):
        found = [
            min(max(own.meta["eval_loss"] / exact.meta["eval_loss"], FLOOR), CEILING)
            for own, exact in zip(arms[name], arms["exact"], strict=True)
            if not has_failed(own) and not has_failed(exact)
        ]
        colour = LOOKS[name].colour
        across = np.linspace(-0.18, 0.18, len(found)) if len(found) > 1 else [0.0]
        for x, value in zip(across, found, strict=False):
            axis.plot(i + x, value, marker, color=colour, markersize=2.8, clip_on=False)
        if found:
            middle = float(np.median(found))
            axis.plot([i - 0.32, i + 0.32], [middle, middle], color=colour, linewidth=0.9)
        words.append(f"n = {len(found)}\n{SHORT[name]}")
    scale(axis)
    axis.set_xticks(range(len(MARKERS)), words)
    axis.tick_params(axis="x", length=0)
    axis.set_xlim(-0.5, len(MARKERS) - 0.5)
    axis.set_ylabel("loss over exact")


def against_full(by_reading: dict[Reading, dict[str, list[Record]]]) -> str:
    """The hybrids' failures against full MX's of the same seeds, in words."""
    found = []
    for reading, arms in by_reading.items():
        for name in ("bf16", "forward"):
            pairs = paired(arms, name, "mx")
            mx, own = pairs[False, True], pairs[True, False]
            counts = f"{mx} and {own} (p = {mcnemar(mx, own):.2g})"
            found.append(f"{LOOKS[name].label}, {WORDS[reading]}: {counts}")
    return (
        "Seeds on which only full MX fails and on which only the hybrid does, exact McNemar test: "
        f"{'; '.join(found)}."
    )


def legend() -> list[Any]:
    """Arms, with their marks, and what became of a pair."""
    arms = handles(LOOKS)
    for name, line in zip(LOOKS, arms, strict=True):
        line.set(marker=MARKERS.get(name, ""), markersize=2.8)
    return arms + [
        Patch(facecolor=fill, hatch=hatch, edgecolor=BLACK, linewidth=0.4, label=words)
        for fill, hatch, words in OUTCOMES.values()
    ]


def draw(results: Results, out: Path) -> Path:
    """A column a task and reading, the place where MX was found to fail below; returns ``out``."""
    design, used = results.design, []
    columns = [(task, reading) for task in TASKS for reading in READINGS]
    highest = design.rates[-1]
    with plt.rc_context(STYLE):
        figure = plt.figure(figsize=(PAGE_WIDTH, 6.9), layout="constrained")
        rows: Any = figure.subfigures(2, 1, height_ratios=(3.5, 1.9))  # else: or a single one
        above, below = rows
        axes = above.subplots(2, len(columns), sharey="row")
        for (upper, lower), (task, reading) in zip(axes.T, columns, strict=True):
            by_rate = {lr: arms_of(results, reading, task, lr) for lr in design.rates}
            used += [r for arms in by_rate.values() for records in arms.values() for r in records]
            draw_losses(upper, by_rate[highest], LOOKS, has_failed)
            ratios(lower, by_rate)
            upper.set_title(f"{WORDS[task]},\n{WORDS[reading]}", pad=14)
            upper.set_xlabel("step")
            lower.set_xlabel("learning rate")
        axes[0, 0].set_ylabel(f"training loss at lr {highest:g}")
        axes[1, 0].set_ylabel("held-out loss over exact")
        (lr,), n = design.rates_of("searched"), len(design.seeds_of("searched"))
        found = {reading: arms_of(results, reading, "searched", lr) for reading in READINGS}
        for part, (reading, arms) in zip(below.subfigures(1, 2), found.items(), strict=True):
            part.suptitle(f"{WORDS['searched']}, {WORDS[reading]}", fontsize=8)
            left, right = part.subplots(1, 2)
            failures(left, arms)
            survivors(right, arms)
            used += [record for records in arms.values() for record in records]
        base, searched = design.base, design.searched
        foot(
            figure,
            f"Width {base.width}, depth {base.depth}, batch {base.batch}, {base.activation}, Adam; "
            "paper's code with the exact teacher, so that all losses are of one task. "
            f"Top row. {counts_in_words([design.seeds], FAILED)}"
            f" Middle row. Median over the seeds (at most {design.seeds}) whose exact run did "
            "not fail, n below the rates, bars: 95 % bootstrap interval; a run that failed counts "
            f"as infinite, triangles at the top: beyond {CEILING:g}. "
            f"Bottom row. {searched.norm.upper()} norm, lr {lr:g}, {searched.steps} steps, {n} "
            f"seeds of their own; {interval_of_shares(n)}. Left: pairs (arm, exact) by what "
            "failed. Right: pairs of which neither failed, dash: median; what is left is few and "
            f"chosen by surviving. {against_full(found)}",
            legend(),
        )
        command = f"python -m figures.{NAME} --tier {results.tier}"
        return saved(figure, out, source(STUDY, results.tier, used, command))


@dataclass(frozen=True)
class Arguments(FromResults):
    """Draw the hybrids, from stored results."""

    tier: Tier = "laptop"


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing."""
    out = arguments.out or arguments.results / f"{STUDY}_{arguments.tier}" / f"{NAME}.png"
    return draw_stored(STUDY, load, arguments, {out: draw})


if __name__ == "__main__":
    launch(main, Arguments, NAME)
