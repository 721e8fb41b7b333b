"""Boundary tracing: honest intervals by simulation, arithmetic against a second computation.

``python -m tests.test_boundary`` prints coverage and runs for 1000 columns of every true curve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import special

from mxsim.boundary import Search, Threshold, Trace, estimate, propose, trace

Array = NDArray[Any]
Curve = Callable[[Array], Array]  # log rate minus log threshold -> P(fail), 1/2 at 0
RANGE = (0.5, 5.0)
COLUMNS = 150


def logistic(scale: float) -> Curve:
    return lambda d: special.expit(d / scale)


def probit(scale: float) -> Curve:
    return lambda d: special.ndtr(d / (1.7 * scale))


def cloglog(scale: float, side: int = 1) -> Curve:
    """Asymmetric: one tail is a double exponential; ``side`` -1 is its mirror image."""

    def rising(d: Array) -> Array:
        return np.asarray(-np.expm1(-np.log(2) * np.exp(np.minimum(d / (1.4 * scale), 50))))

    return rising if side > 0 else lambda d: 1 - rising(-d)


def lapses(scale: float, share: float) -> Curve:
    return lambda d: share + (1 - 2 * share) * special.expit(d / scale)


CURVES: dict[str, Curve] = {
    "step": lambda d: (d > 0).astype(float),
    "logistic, s = 0.03": logistic(0.03),
    "logistic, s = 0.1": logistic(0.1),
    "probit, s = 0.1": probit(0.1),
    "cloglog, s = 0.1": cloglog(0.1),
    "cloglog, mirrored, s = 0.1": cloglog(0.1, side=-1),
    "3 % lapses, s = 0.03": lapses(0.03, 0.03),
}


def traced(
    curve: Curve, thresholds: Array, search: Search, seed: int = 0
) -> tuple[dict[int, Trace], float]:
    """Every column searched, and the share of intervals that hold its true threshold."""
    rng = np.random.default_rng(seed)
    at = np.log(thresholds)

    def evaluate(runs: Sequence[tuple[int, float, int]]) -> list[bool]:
        away = np.log([rate for _, rate, _ in runs]) - at[[key for key, _, _ in runs]]
        return list(rng.random(len(runs)) < curve(away))

    traces = trace(dict.fromkeys(range(len(thresholds)), search), evaluate)
    found = [traces[i].threshold for i in range(len(thresholds))]
    held = [t.low <= true <= t.high for t, true in zip(found, thresholds, strict=True)]
    return traces, float(np.mean(held))


def anywhere(columns: int, seed: int = 1) -> Array:
    return np.asarray(
        np.exp(np.random.default_rng(seed).uniform(math.log(RANGE[0]), math.log(RANGE[1]), columns))
    )


@pytest.mark.parametrize("name", CURVES)
def test_coverage_under_curves_that_the_model_does_not_hold(name: str) -> None:
    _, share = traced(CURVES[name], anywhere(COLUMNS), Search(*RANGE))
    assert share >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / COLUMNS)


def test_sharp_boundaries_take_few_runs() -> None:
    # A step over a range of 10 to 1.15 is 16.5 intervals: 4 bits and their confirmation.  The full
    # grid of that spacing with 8 seeds takes 17 * 8 = 136 runs.
    traces, share = traced(CURVES["step"], anywhere(60), Search(*RANGE))
    assert share >= 0.95
    assert all(t.threshold.converged for t in traces.values())
    assert np.mean([t.threshold.n for t in traces.values()]) <= 136 / 4
    for each in traces.values():
        if each.threshold.censored is None:
            assert each.threshold.high <= 1.15 * each.threshold.low


def test_same_seeds_at_every_rate_would_trace_the_boundary_of_those_seeds() -> None:
    # Every seed of a column has its own threshold, so that over seeds P(fail) is logistic.
    columns, search = 80, Search(*RANGE)
    medians = anywhere(columns, seed=2)
    own = np.log(medians)[:, None] + np.random.default_rng(3).logistic(0, 0.1, (columns, 48))

    def held(seeds: int) -> float:
        def evaluate(runs: Sequence[tuple[int, float, int]]) -> list[bool]:
            return [math.log(rate) > own[key, seed % seeds] for key, rate, seed in runs]

        found = trace(dict.fromkeys(range(columns), search), evaluate)
        ends = [found[i].threshold for i in range(columns)]
        return float(np.mean([t.low <= m <= t.high for t, m in zip(ends, medians, strict=True)]))

    assert held(48) >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / columns)
    assert held(4) < 0.95 - 4 * math.sqrt(0.95 * 0.05 / columns)


OUTCOMES = [(0.5, False), (1.1, False), (2.9, True), (5.0, True), (1.7, False), (2.3, True)]
OUTCOMES += [(1.9, True), (2.1, False), (2.6, True), (1.5, False), (2.0, True), (1.8, False)]


def test_the_interval_is_that_of_the_posterior() -> None:
    # A second computation: 4001 thresholds, plain loops over 12 widths from log(1.15) / 300 to a
    # quarter of log(10), weights w^(1/2) or w^(-1) on the logarithmic grid; the wider ends count.
    x = np.linspace(math.log(0.5) - 0.5 * math.log(10), math.log(5) + 0.5 * math.log(10), 4001)
    first, last = math.log(1.15) / 300, math.log(10) / 4
    ends = []
    for power in (0.5, -1.0):
        density = np.zeros_like(x)
        for k in range(12):
            width = first * (last / first) ** (k / 11)
            weight = np.full_like(x, width**power)
            for rate, failed in OUTCOMES:
                u = np.clip((x - math.log(rate)) / width, -700, 700)
                p = 0.03 + 0.94 / (1 + np.exp(u))
                weight *= p if failed else 1 - p
            density += weight
        cumulated = np.cumsum(density) / density.sum()
        ends.append(np.exp(np.interp([0.025, 0.5, 0.975], cumulated, x)))
    broad, sharp = ends
    found = estimate(Search(*RANGE, lapse=0.03), OUTCOMES)
    # Cells are log(1.15) / 20 or less; ends are rounded outward by at most one, and one more for
    # the likelihood's own cell.
    cell = math.log(1.15) / 20
    assert 0 <= math.log(min(broad[0], sharp[0]) / found.low) + cell / 2 < 2 * cell
    assert 0 <= math.log(found.high / max(broad[2], sharp[2])) + cell / 2 < 2 * cell
    assert abs(math.log(found.value / broad[1])) < cell
    assert found.n == len(OUTCOMES)
    assert found.censored is None


def test_up_and_down_are_alike() -> None:
    # 1 / rate with failed and ok exchanged is the mirror image.
    found = estimate(Search(0.5, 4.0), OUTCOMES)
    mirrored = estimate(Search(0.25, 2.0), [(1 / rate, not failed) for rate, failed in OUTCOMES])
    np.testing.assert_allclose(
        [mirrored.low, mirrored.value, mirrored.high],
        [1 / found.high, 1 / found.value, 1 / found.low],
        rtol=1e-9,
    )


@pytest.mark.parametrize(
    ("name", "count", "columns"),
    [("step", 16, 60), ("logistic, s = 0.1", 16, 60), ("step", 5, 400)],
)
def test_a_full_grid_of_runs_can_be_estimated(name: str, count: int, columns: int) -> None:
    # Nothing is placed near the boundary here, so that a step is known to a gap of the grid only,
    # and the interval must not claim more, in a wide gap either.
    rng, search = np.random.default_rng(4), Search(*RANGE)
    rates = np.repeat(np.geomspace(*RANGE, count), 8)
    held = 0
    for true in anywhere(columns, seed=5):
        failed = rng.random(len(rates)) < CURVES[name](np.log(rates / true))
        found = estimate(search, list(zip(rates.tolist(), failed.tolist(), strict=True)))
        held += found.low <= true <= found.high
        if name == "step" and found.censored is None:
            assert rates[~failed][-1] / 1.01 < found.low < found.high < 1.01 * rates[failed][0]
    assert held / columns >= 0.95 - 4 * math.sqrt(0.95 * 0.05 / columns)


@pytest.mark.parametrize("beyond", [1.5, 10.0])
def test_a_boundary_outside_the_range_is_one_sided(beyond: float) -> None:
    low, high = RANGE
    count = 25
    for true, side in ((high * beyond, "above"), (low / beyond, "below")):
        traces, share = traced(logistic(0.03), np.full(count, true), Search(*RANGE))
        assert share == 1
        for each in traces.values():
            found = each.threshold
            assert (found.censored, found.converged) == (side, True)
            assert math.isnan(found.value)
            # The bound is within one ``width`` of the end, never beyond what was run.
            if side == "above":
                assert high / 1.15 <= found.low <= high
                assert found.high == math.inf
            else:
                assert low <= found.high <= low * 1.15
                assert found.low == 0
            assert found.n <= 32


def outcome(key: str, rate: float, seed: int) -> bool:
    """A pure function of its arguments."""
    where = {"a": 1.3, "b": 3.1, "out": 50.0}[key]
    draw = np.random.default_rng([ord(key[0]), seed]).logistic(0, 0.08)
    return bool(math.log(rate / where) > draw)


def test_an_interrupted_search_goes_on_as_it_would_have() -> None:
    columns = {"a": Search(*RANGE), "b": Search(1.0, 8.0, per_round=3), "out": Search(*RANGE)}
    asked: list[tuple[str, float, int]] = []

    def whole(runs: Sequence[tuple[str, float, int]]) -> list[bool]:
        asked.extend(runs)
        return [outcome(*run) for run in runs]

    expected = trace(columns, whole)
    stored: dict[tuple[str, float, int], bool] = {}

    def interrupted(runs: Sequence[tuple[str, float, int]]) -> list[bool]:
        for run in reversed(runs):  # another order of execution
            if run not in stored:
                if len(stored) in (7, 20, 33):
                    stored[run] = outcome(*run)
                    raise KeyboardInterrupt
                stored[run] = outcome(*run)
        return [stored[run] for run in runs]

    found = None
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            trace(columns, interrupted)
    found = trace(dict(reversed(columns.items())), interrupted)
    assert found == expected
    assert set(stored) == set(asked)  # nothing was run for nothing
    for key, each in expected.items():
        search = columns[key]
        mine = [(rate, seed) for name, rate, seed in asked if name == key]
        assert [seed for _, seed in mine] == list(range(len(each.outcomes)))
        assert [rate for rate, _ in mine] == [rate for rate, _ in each.outcomes]
        for start in range(0, len(mine), search.per_round):
            rates = propose(search, each.outcomes[:start])
            assert list(rates) == [rate for rate, _ in mine[start : start + search.per_round]]
            assert list(rates) == sorted(rates)
        assert propose(search, each.outcomes) == ()
        assert each.threshold == estimate(search, each.outcomes)
        for rate, _ in mine:
            assert search.low <= rate <= search.high
            assert rate == float(f"{rate:.4g}")


def test_where_a_search_ends() -> None:
    # A coin at every rate: no interval closes, the runs are spent to the last, also in part rounds.
    coin = np.random.default_rng(0)
    found = trace(
        {0: Search(*RANGE, max_runs=30)}, lambda runs: list(coin.random(len(runs)) < 0.5)
    )[0]
    assert len(found.outcomes) == found.threshold.n == 30
    assert not found.threshold.converged
    # The same step with more runs asked for goes on where the other stopped.
    few = trace({0: Search(*RANGE)}, lambda runs: [rate > 2 for _, rate, _ in runs])[0]
    many = trace({0: Search(*RANGE, min_runs=40)}, lambda runs: [r > 2 for _, r, _ in runs])[0]
    assert few.threshold.n < 40 <= many.threshold.n < 44
    assert many.outcomes[: len(few.outcomes)] == few.outcomes
    assert many.threshold.converged
    assert trace({}, lambda runs: []) == {}
    nothing = estimate(Search(*RANGE), [])
    assert (nothing.low, nothing.high, nothing.n) == (0, math.inf, 0)
    assert nothing.censored is None
    assert not nothing.converged
    assert math.isnan(nothing.value)


def test_how_a_threshold_reads() -> None:
    assert str(Threshold(2.0, 1.9, 2.125, 24, True)) == "2 [1.9, 2.12]"
    assert str(Threshold(math.nan, 4.8, math.inf, 24, True)) == "above 4.8"
    assert str(Threshold(math.nan, 0.0, 0.5, 24, True)) == "below 0.5"
    assert str(Threshold(math.nan, 0.0, math.inf, 0, False)) == "-"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"low": 0.0}, "low and high"),
        ({"low": 6.0}, "low and high"),
        ({"high": math.inf}, "low and high"),
        ({"low": math.nan}, "low and high"),
        ({"width": 1.0}, "width"),
        ({"width": 10.0}, "width"),
        ({"width": 1.01, "low": 1e-300}, "narrow the range"),
        ({"per_round": 1}, "per_round"),
        ({"min_runs": 0}, "min_runs"),
        ({"min_runs": 49}, "min_runs"),
        ({"lapse": 0.0}, "lapse"),
        ({"lapse": 0.5}, "lapse"),
    ],
)
def test_searches_that_cannot_be(change: dict[str, Any], message: str) -> None:
    values: dict[str, Any] = {"low": RANGE[0], "high": RANGE[1]} | change
    with pytest.raises(ValueError, match=message):
        Search(**values)


def test_outcomes_that_cannot_be() -> None:
    search = Search(*RANGE)
    for rate in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="learning rate must be positive"):
            estimate(search, [(rate, True)])
    wrong: Any = [(1.0, 0.5)]
    with pytest.raises(TypeError, match="bool"):
        propose(search, wrong)
    with pytest.raises(ValueError, match="returned 3 outcomes for 4 runs"):
        trace({0: search}, lambda runs: [True] * 3)
    status: Any = lambda runs: ["ok"] * len(runs)  # noqa: E731
    with pytest.raises(TypeError, match="bool"):
        trace({0: search}, status)


def print_coverage(columns: int) -> None:
    print(f"{columns} columns, boundaries anywhere in {RANGE}, width 1.15, s logistic scale")
    for runs in (48, 160):
        for name, curve in CURVES.items():
            traces, share = traced(curve, anywhere(columns), Search(*RANGE, max_runs=runs))
            found = [t.threshold for t in traces.values()]
            ratio = np.median([t.high / t.low for t in found if t.censored is None])
            print(
                f"at most {runs:3d} runs, {name:27s} covered {100 * share:5.1f} %, "
                f"{np.mean([t.n for t in found]):5.1f} runs, interval {ratio:.3f}, "
                f"{100 * np.mean([t.converged for t in found]):3.0f} % converged",
                flush=True,
            )


if __name__ == "__main__":
    print_coverage(1000)
