"""Intervals and tests against formulas and by coverage."""

import numpy as np
import pytest

from mxsim import stats
from mxsim.stats import NOTHING, Estimate


def test_intervals() -> None:
    # Wilson's interval for 1 of 8: (0.0224, 0.4709), from the formula.
    wilson = stats.share(1, 8)
    assert (wilson.value, wilson.n) == (0.125, 8)
    assert wilson.low == pytest.approx(0.02242, abs=1e-4)
    assert wilson.high == pytest.approx(0.47092, abs=1e-4)
    assert stats.mcnemar(0, 0) == 1.0
    assert stats.mcnemar(5, 0) == pytest.approx(2 * 0.5**5)
    assert stats.mcnemar(1, 3) == pytest.approx(2 * (1 + 4) / 16)
    rng = np.random.default_rng(0)
    inside = 0
    for _ in range(40):
        estimate = stats.median_over_seeds(rng.standard_normal(32))
        assert estimate.low <= estimate.value <= estimate.high
        inside += estimate.low <= 0.0 <= estimate.high
    assert inside >= 32  # 95 % nominal; below 32 of 40 has probability 1e-4
    assert stats.median_over_seeds(np.ones(4)) == Estimate(1.0, 1.0, 1.0, 4)
    assert stats.median_over_seeds(np.array([])) == NOTHING
    with_nan = stats.median_over_seeds(np.array([1.0, np.nan]))
    assert np.isnan(with_nan.value)


def test_the_level_is_95_percent() -> None:
    # Order statistics: of 100 values the 95 % interval of the median runs from about the 40th to
    # the 61st (binomial), whatever the distribution.
    estimate = stats.median_over_seeds(np.arange(100.0))
    assert 38 <= estimate.low <= 41
    assert 58 <= estimate.high <= 61
    assert str(Estimate(0.5, 0.25, 0.75, 8)) == "0.50 [0.25, 0.75]"
    assert str(NOTHING) == "-"
