"""Spikes, divergence and learning, on loss series made by hand."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mxsim.outcome import DivergenceRule, Spike, find_spikes, judge, running_reference

Array = NDArray[Any]
RULE = DivergenceRule()


def flat(n: int = 600, level: float = 0.02) -> Array:
    return np.full(n, level)


def test_reference_is_the_lowest_window_median_of_the_past() -> None:
    losses = np.concatenate([np.full(30, 4.0), np.full(30, 1.0), np.full(30, 9.0)])
    reference = running_reference(losses, 20)
    assert np.isinf(reference[:20]).all()
    assert reference[20] == 4.0
    assert reference[40] == 2.5  # steps 20-39: ten of 4, ten of 1; the median lies between
    assert reference[-1] == 1.0
    by_hand = [min(np.median(losses[s - 20 : s]) for s in range(20, t + 1)) for t in range(20, 90)]
    np.testing.assert_array_equal(reference[20:], by_hand)


def test_a_recovered_spike_is_recorded_and_the_run_is_ok() -> None:
    losses = flat()
    losses[300:340] = 0.5
    losses[310] = 1.0
    assert find_spikes(losses, RULE) == (Spike(300, 50.0, 40),)
    outcome = judge(losses, 0.02, 1.0, RULE)
    assert (outcome.status, outcome.first_bad_step) == ("ok", None)
    assert outcome.final_over_best == 1.0
    assert outcome.learned


def test_a_rise_of_less_than_ten_is_no_spike() -> None:
    losses = flat()
    losses[300:] = 0.19
    assert find_spikes(losses, RULE) == ()
    assert judge(losses, 0.19, 1.0, RULE).final_over_best == pytest.approx(9.5)


def test_a_spike_longer_than_the_patience_diverges_even_if_it_recovers() -> None:
    losses = flat()
    losses[200:401] = 0.5
    outcome = judge(losses, 0.02, 1.0, RULE)
    assert outcome.spikes == (Spike(200, 25.0, 201),)
    assert (outcome.status, outcome.first_bad_step) == ("diverged", 200)
    losses[400] = 0.02  # one step sooner it is within the patience
    assert judge(losses, 0.02, 1.0, RULE).status == "ok"


def test_a_spike_open_at_the_end_diverges() -> None:
    losses = flat()
    losses[590:] = 0.5
    outcome = judge(losses, 0.5, 1.1, RULE)
    assert outcome.spikes == (Spike(590, 25.0, None),)
    assert (outcome.status, outcome.first_bad_step) == ("diverged", 590)
    assert outcome.censored  # 10 steps old, it might have recovered
    losses[300:] = 0.5
    assert not judge(losses, 0.5, 1.1, RULE).censored


def test_settling_above_twice_the_level_is_no_recovery() -> None:
    losses = flat()
    losses[200:220] = 0.5
    losses[220:] = 0.05
    assert judge(losses, 0.05, 1.0, RULE).status == "diverged"


def test_two_spikes_are_two() -> None:
    losses = flat()
    losses[100:110] = 0.4
    losses[110:115] = 0.3  # the same excursion: not back within twice the level
    losses[300:302] = 0.6
    assert find_spikes(losses, RULE) == (Spike(100, 20.0, 15), Spike(300, 30.0, 2))


def test_a_run_high_from_the_start_never_learned() -> None:
    outcome = judge(flat(level=0.9), 0.9, 1.0, RULE)
    assert not outcome.learned
    assert (outcome.status, outcome.first_bad_step) == ("diverged", 599)


def test_nonfinite_names_step_and_tensor_and_keeps_the_spikes_before() -> None:
    losses = flat()
    losses[290:] = 5.0
    losses[300:] = np.nan
    outcome = judge(losses, np.nan, 1.0, RULE, 300, "block 1 hidden")
    assert (outcome.status, outcome.first_bad_step) == ("nonfinite", 300)
    assert outcome.first_bad_tensor == "block 1 hidden"
    assert outcome.spikes == (Spike(290, 250.0, None),)


@pytest.mark.parametrize("n", [0, 1, 19, 20, 21])
def test_short_runs(n: int) -> None:
    outcome = judge(flat(n), 0.02, 1.0, RULE)
    assert outcome.spikes == ()
    assert np.isnan(outcome.final_over_best) == (n < 20)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"window": 0}, ValueError, "window must be at least 1; got 0"),
        ({"window": 2.5}, TypeError, "window.*2.5"),
        ({"patience": -1}, ValueError, "patience must be at least 0; got -1"),
        ({"spike_ratio": 2.0}, ValueError, "spike_ratio.*above recovery_ratio 2; got 2.0"),
        ({"spike_ratio": float("nan")}, ValueError, "spike_ratio.*nan"),
        ({"recovery_ratio": 1.0}, ValueError, "recovery_ratio.*above 1; got 1.0"),
        ({"learned_fraction": "half"}, TypeError, "learned_fraction.*'half'"),
    ],
)
def test_rules_that_make_no_sense(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        DivergenceRule(**changes)
