"""Survival curves against a product by hand, tests against enumeration and simulation."""

from itertools import product

import numpy as np
import pytest
from scipy import stats

from mxsim.survival import Time, exchange_test, log_rank, restricted, survival_curve


def test_kaplan_meier_is_the_product_of_conditional_shares() -> None:
    """Times 3, 5+, 5, 8+, 9: at risk 5, then 4 (an event at 5 precedes a censoring), then 1."""
    times = [Time(3, True), Time(5, False), Time(5, True), Time(8, False), Time(9, True)]
    curve = survival_curve(times)
    at = dict(zip(curve.steps.tolist(), curve.share.tolist(), strict=True))
    assert at[0] == 1
    assert at[3] == pytest.approx(4 / 5)
    assert at[5] == pytest.approx(4 / 5 * 3 / 4)
    assert at[9] == 0
    assert (curve.n, curve.events) == (5, 3)
    assert np.all(curve.low <= curve.share)
    assert np.all(curve.share <= curve.high)


def test_intervals_have_ends_where_nothing_or_everything_has_happened() -> None:
    for event in (True, False):
        curve = survival_curve([Time(4, event)] * 3)
        assert np.isfinite(curve.low).all()
        assert np.isfinite(curve.high).all()
        assert 0 < curve.low[0] < 1 == curve.high[0]
    with pytest.raises(ValueError, match="times must not be empty"):
        survival_curve([])


def test_log_rank_by_hand() -> None:
    """Observed against expected events of one group, hypergeometric variance at each time."""
    one = [Time(2, True), Time(4, True), Time(6, False)]
    other = [Time(3, True), Time(5, True), Time(7, True)]
    observed = expected = variance = 0.0
    for at in (2, 3, 4, 5, 7):
        a = sum(t.steps >= at for t in one)
        b = sum(t.steps >= at for t in other)
        n, d = a + b, sum(t.event and t.steps == at for t in (*one, *other))
        observed += sum(t.event and t.steps == at for t in one)
        expected += d * a / n
        if n > 1:
            variance += d * (a / n) * (b / n) * (n - d) / (n - 1)
    z = (observed - expected) / variance**0.5
    assert log_rank(one, other) == pytest.approx(2 * stats.norm.sf(abs(z)))


def test_log_rank_has_nothing_to_say_without_events_or_differences() -> None:
    assert log_rank([Time(5, False)] * 3, [Time(5, False)] * 4) == 1
    assert log_rank([Time(5, True)] * 3, [Time(5, True)] * 4) == 1


def test_restricted_times_stop_at_the_horizon() -> None:
    times = [Time(3, True), Time(50, True), Time(20, False)]
    np.testing.assert_array_equal(restricted(times, 30), [3, 30, 20])


def test_the_exchange_test_counts_assignments() -> None:
    """One control a seed: of the 16 assignments of differences 1, 2, 3, 4 two are as extreme."""
    p = exchange_test([1, 2, 3, 4], [[0], [0], [0], [0]])
    assert p == pytest.approx(2 / 16, abs=0.01)
    assert p == exchange_test([1, 2, 3, 4], [[0], [0], [0], [0]])
    assert exchange_test([5, 5], [[5, 5, 5], [5, 5, 5]]) == 1
    assert exchange_test(np.empty(0), np.empty((0, 3))) == 1


def test_the_exchange_test_against_enumeration() -> None:
    rng = np.random.default_rng(3)
    runs = rng.integers(0, 6, (4, 4)).astype(float)  # ties among them
    statistic = []
    for chosen in product(range(4), repeat=4):
        parts = [row[c] - np.delete(row, c).mean() for row, c in zip(runs, chosen, strict=True)]
        statistic.append(abs(sum(parts)))
    exact = np.mean(np.array(statistic) >= statistic[0] - 1e-9)
    assert exchange_test(runs[:, 0], runs[:, 1:]) == pytest.approx(exact, abs=0.015)


def test_the_exchange_test_has_its_size_whatever_the_skew() -> None:
    """Under the null p < 0.1 in about one of ten: 60 draws of a two-valued, skewed time."""
    rng = np.random.default_rng(4)
    small = 0
    for _ in range(60):
        runs = np.where(rng.random((8, 4)) < 0.1, 800.0, rng.integers(50, 150, (8, 4)))
        small += exchange_test(runs[:, 0], runs[:, 1:]) < 0.1
    assert small <= 13  # of 60, by the binomial with 0.1: 99.8 %


def test_the_exchange_test_refuses_what_it_cannot_use() -> None:
    with pytest.raises(ValueError, match="must not hold NaN"):
        exchange_test([np.nan, 1.0], [[0.0], [0.0]])
    with pytest.raises(ValueError, match="treated must be"):
        exchange_test([1.0], [[0.0], [0.0]])
