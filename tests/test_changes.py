"""Changes in the middle of a run: same data, same optimizer state, other precision."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxsim import ProxyConfig, scheme, start, train
from mxsim.changes import (
    Change,
    ChangedRun,
    apply_change,
    lead_state,
    nudge_weights,
    restore_state,
    snapshot_of,
)
from mxsim.interventions import INTERVENTIONS
from mxsim.precision import PrecisionScheme
from mxsim.store import Store, canonical

CFG = ProxyConfig(width=16, depth=2, batch=16, lr=2e-2, steps=30, eval_samples=64)
MX = scheme("all_e4m3")
# Warms up past its edge: diverges to Inf within its 80 steps.
DOOMED = ProxyConfig(
    width=16,
    depth=2,
    batch=16,
    lr=22.0,
    steps=80,
    eval_samples=64,
    optimizer="sgd",
    norm="none",
    warmup=80,
)


def test_a_change_that_changes_nothing_is_the_original_run() -> None:
    original = train(CFG, MX)
    for name in ("none", "activation_exact"):
        change = INTERVENTIONS[name].change(12, MX)
        record = ChangedRun(CFG, MX, (change,)).run()
        np.testing.assert_array_equal(record.arrays["losses"], np.float32(original.losses))
        assert record.meta["eval_loss"] == original.eval_loss


@pytest.mark.parametrize("name", sorted(set(INTERVENTIONS) - {"none", "activation_exact"}))
def test_an_intervention_changes_what_follows_and_nothing_before(name: str) -> None:
    original = train(CFG, MX)
    change = INTERVENTIONS[name].change(12, MX)
    losses = ChangedRun(CFG, MX, (change,)).run().arrays["losses"]
    before, after = np.float32(original.losses[:12]), np.float32(original.losses[12:])
    np.testing.assert_array_equal(losses[:12], before)
    assert (losses[12:] != after).any()


def test_a_switch_to_exact_and_back_is_three_runs_in_a_row() -> None:
    """By hand: the same weights and moments go from one scheme to the next."""
    changes = (Change(10, PrecisionScheme()), Change(20, MX))
    run = ChangedRun(CFG, MX, changes).run()
    training = start(CFG, MX).advance(10)
    for other in (PrecisionScheme(), MX):
        state, losses = snapshot_of(training), training.losses.copy()
        training = start(CFG, other)
        restore_state(training, state)
        training.step = training.optimizer.updates = state.step
        training.losses[:] = losses
        training.advance(10)
    np.testing.assert_array_equal(run.arrays["losses"], np.float32(training.losses))


@pytest.mark.parametrize("name", sorted(INTERVENTIONS))
def test_where_a_run_begins_leaves_no_trace(name: str) -> None:
    """From step 0, from before the change, from the change itself: one id, one result."""
    change = INTERVENTIONS[name].change(12, MX)
    whole = ChangedRun(CFG, MX, (Change(3, scheme("bf16")), change))
    training = start(CFG, MX).advance(3)
    apply_change(training, whole.changes[0])
    states = [snapshot_of(training.advance(n)) for n in (2, 7)]
    assert [state.step for state in states] == [5, 12]
    expected = whole.run()
    for state in states:
        again = replace(whole, begin=state)
        assert again.id == whole.id
        found = again.run()
        for key, values in expected.arrays.items():
            np.testing.assert_array_equal(found.arrays[key], values)
        assert found.meta["eval_loss"] == expected.meta["eval_loss"]


def test_the_state_before_a_divergence_is_kept_and_leads_back_to_it(tmp_path: Path) -> None:
    task = ChangedRun(DOOMED, PrecisionScheme(), leads=(20, 5, 1000))
    record = task.run()
    bad = record.meta["first_bad_step"]
    assert bad is not None
    assert bad > 20
    store = Store(tmp_path)
    store.save(record)
    stored = store.load(task.id)
    assert lead_state(stored, 1000) is None
    for lead in (20, 5):
        state = lead_state(stored, lead)
        assert state is not None
        assert state.step == bad - lead
        again = replace(task, leads=(), begin=state).run()
        assert again.meta["first_bad_step"] == bad
        np.testing.assert_array_equal(again.arrays["losses"], record.arrays["losses"])


def test_the_placebo_moves_every_weight_by_one_unit_and_signs_depend_on_its_number() -> None:
    moved = []
    for nudge in (0, 0, 1):
        training = start(CFG, MX).advance(4)
        before = training.flat.copy()
        nudge_weights(training, nudge)
        steps = training.flat.view(np.int32).astype(np.int64) - before.view(np.int32)
        assert set(np.unique(steps[before != 0])) == {-1, 1}
        assert (training.flat != before).all()
        moved.append(training.flat.copy())
    np.testing.assert_array_equal(moved[0], moved[1])
    assert (moved[0] != moved[2]).any()


def test_bf16_masters_move_by_a_unit_of_bf16() -> None:
    training = start(CFG, replace(MX, master_weights="bf16")).advance(4)
    before = training.flat.copy()
    nudge_weights(training, 0)
    units = (training.flat.view(np.int32).astype(np.int64) - before.view(np.int32)) / 2**16
    assert set(np.unique(units[before != 0])) == {-1, 1}


def test_a_lower_rate_is_the_rate_times_the_factor() -> None:
    """SGD without momentum: the first step after the change is half as long."""
    cfg = replace(CFG, optimizer="sgd")
    steps = []
    for factor in (1.0, 0.5):
        training = start(cfg, PrecisionScheme()).advance(5)
        apply_change(training, Change(5, lr_factor=factor))
        before = training.flat.astype(np.float64)
        steps.append(training.advance(1).flat - before)
    np.testing.assert_allclose(steps[1], steps[0] / 2, rtol=0, atol=1e-7)


def test_bf16_masters_are_rounded_when_they_are_switched_on() -> None:
    training = start(CFG, MX).advance(5)
    apply_change(training, Change(5, replace(MX, master_weights="bf16")))
    assert not (training.flat.view(np.int32) & 0xFFFF).any()


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ({"step": -1}, ValueError, "step must be at least 0; got -1"),
        ({"step": 2.5}, TypeError, "step"),
        ({"step": 1, "scheme": "exact"}, TypeError, "scheme must be a PrecisionScheme or None"),
        ({"step": 1, "lr_factor": 0.0}, ValueError, "lr_factor must be a finite number above 0"),
        ({"step": 1, "nudge": -1}, ValueError, "nudge must be at least 0; got -1"),
    ],
)
def test_bad_changes_are_refused(
    values: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        Change(**values)


def test_changes_out_of_order_or_too_late_are_refused() -> None:
    for steps in ((12, 4), (30,)):
        with pytest.raises(ValueError, match="changes must be in order, before step 30"):
            ChangedRun(CFG, MX, tuple(Change(step) for step in steps))
    with pytest.raises(ValueError, match="change is for step 7; the run stands at 0"):
        apply_change(start(CFG, MX), Change(7))


def test_ids_depend_on_the_changes() -> None:
    tasks = [ChangedRun(CFG, MX), ChangedRun(CFG, MX, leads=(5,))]
    tasks += [ChangedRun(CFG, MX, (Change(4, nudge=n),)) for n in (None, 0, 1)]
    assert len({task.id for task in tasks}) == len(tasks)
    assert canonical(tasks[0]) == canonical(replace(tasks[0]))
