"""The table of stability thresholds: on paper, and where half of simulated runs diverge."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

import numpy as np

from mxsim.stats import Estimate, median_over_seeds
from mxsim.theory.escape import escape_threshold
from mxsim.theory.model import Gains
from mxsim.theory.simulate import (
    Count,
    correlated_gains,
    count_escaped,
    count_grown,
    half_divergence,
    run_thresholds,
)
from mxsim.theory.stability import almost_sure_threshold, mean_square_threshold, mean_threshold

LEVELS = (1e6, 1e3)
MEMORIES = (0.0, 0.5, 0.9, 0.99)
STEPS = (1_000, 10_000)
CASES = (  # optimizer, b, distribution, s2
    ("gd", 0.0, "gaussian", 0.25),
    ("gd", 0.0, "two_point", 0.25),
    ("gd", 0.0, "lognormal", 0.25),
    ("ema", 0.5, "gaussian", 0.25),
    ("ema", 0.9, "gaussian", 0.01),
    ("ema", 0.9, "gaussian", 0.25),
    ("ema", 0.9, "lognormal", 0.25),
    ("ema", 0.95, "gaussian", 0.25),
)


def half_divergence_points(
    optimizer: str, b: float, gains: Gains, steps: int, runs: int, seed: int = 0
) -> tuple[Estimate, ...]:
    """The rate at which half of simulated runs diverge, for each meaning of diverge.

    The first: a run without additive noise ends larger than it began.  Then, for each of LEVELS:
    |x| ever exceeds the level on a quadratic with additive noise.
    """
    low = 0.75 * mean_square_threshold(optimizer, b, gains.mu, gains.s2)
    high = 2 * almost_sure_threshold(optimizer, b, gains.mu, gains.s2, gains.distribution)

    def grown(rate: float, rng: np.random.Generator) -> int:
        return count_grown(optimizer, rate, b, gains, rng, steps, runs)

    def escaped(level: float, rate: float, rng: np.random.Generator) -> int:
        return count_escaped(optimizer, rate, b, gains, rng, steps, runs, level)

    counts: list[Count] = [grown]
    counts += [partial(escaped, level) for level in LEVELS]
    return tuple(half_divergence(count, low, high, runs, seed) for count in counts)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print two tables: the thresholds with half-divergence points, and gains with a memory."""
    parser = argparse.ArgumentParser(description="Stability thresholds of eta lam, mu = 0.")
    parser.add_argument("--runs", type=int, default=200, help="simulated runs at each rate")
    print_thresholds(parser.parse_args(arguments).runs)
    print_memory()


def print_thresholds(runs: int) -> None:
    """The three thresholds, and predicted and simulated half-divergence points."""
    print(f"""Thresholds of eta lam (mu = 0), and the rate at which half of {runs} simulated runs
diverge [95 %]: the run ends larger than it began, without additive noise; |x| is ever beyond a
level, with it.  Before each colon: the prediction (almost-sure threshold; mxsim.theory.escape).
""")
    heads = ["ends larger", *(f"|x| > {level:g}" for level in LEVELS)]
    print(f"{'optimizer b gains s2':26}{'mean':>7}{'square':>8}{'surely':>8}{'steps':>7}", end="")
    print("".join(f"{head:^30}" for head in heads))
    for optimizer, b, distribution, s2 in CASES:
        gains = Gains(distribution, 0.0, s2)
        surely = almost_sure_threshold(optimizer, b, 0.0, s2, distribution)
        cells = (
            f"{f'{optimizer} {b:g} {distribution} {s2:g}':26}{mean_threshold(optimizer, b):7.2f}"
        )
        cells += f"{mean_square_threshold(optimizer, b, 0.0, s2):8.2f}{surely:8.2f}"
        for steps in STEPS:
            points = half_divergence_points(optimizer, b, gains, steps, runs)
            lost = (escape_threshold(optimizer, b, gains, steps, each) for each in LEVELS)
            pairs = zip((surely, *lost), points, strict=True)
            row = "".join(f"{f'{each:.2f}: {point}':^30}" for each, point in pairs)
            print(f"{cells}{steps:7d}{row}", flush=True)


def print_memory(runs: int = 20, steps: int = 20_000) -> None:
    """How the almost-sure threshold changes if gains of neighbouring steps are correlated."""
    print(f"""
Gains that remember (correlation of neighbouring steps): the rate above which a run of {steps} steps
grows, median over {runs} runs [95 %].  Independent gains, on paper: "surely".
""")
    heads = "".join(f"{f'memory {memory:g}':^24}" for memory in MEMORIES)
    print(f"{'optimizer b gains s2':26}{'surely':>8}{heads}")
    for optimizer, b, distribution, s2 in CASES:
        if distribution != "gaussian":
            continue
        gains = Gains(distribution, 0.0, s2)
        surely = almost_sure_threshold(optimizer, b, 0.0, s2, distribution)
        low = mean_square_threshold(optimizer, b, 0.0, s2) / 2
        row = f"{f'{optimizer} {b:g} {distribution} {s2:g}':26}{surely:8.2f}"
        for memory in MEMORIES:
            drawn = correlated_gains(gains, np.random.default_rng(0), (runs, steps), memory)
            found = median_over_seeds(run_thresholds(optimizer, b, drawn, low))
            row += f"{found!s:^24}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
