"""Survival curves against a product by hand, tests against enumeration and simulation."""

from itertools import permutations

import numpy as np
import pytest
from scipy import stats

from mxsim.survival import Time, log_rank, paired_permutation, restricted, survival_curve


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


def test_the_paired_test_counts_signs() -> None:
    """Of the 16 signs of (1, 2, 3, 4) two have a mean as far from 0; with -1, four have."""
    assert paired_permutation([1, 2, 3, 4]) == 2 / 16
    assert paired_permutation([-1, 2, 3, 4]) == 4 / 16
    assert paired_permutation([0.1, 0.2, -0.3]) == 1.0
    assert paired_permutation([]) == 1.0
    values = {paired_permutation(list(order)) for order in permutations((1.0, -5.0, 2.5))}
    assert len(values) == 1


def test_many_pairs_are_sampled_and_agree_with_the_normal_approximation() -> None:
    rng = np.random.default_rng(1)
    differences = rng.normal(0.4, 1.0, 60)
    z = differences.sum() / np.sqrt((differences**2).sum())
    p = paired_permutation(differences.tolist())
    assert p == pytest.approx(2 * stats.norm.sf(abs(z)), abs=0.01)
    assert p == paired_permutation(differences.tolist())
