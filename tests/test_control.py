"""The controller on made-up numbers: what it decides, when, and why."""

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from mxsim.control import Controller, Decision, Policy, Trigger

LADDER = ("e4m3", "bf16", "exact")
LOUD = Trigger("loss_ratio", level=3.0, quiet=1.5)
POLICY = Policy(LADDER, (LOUD,), lock=5, calm=10, window=4, warmup=8)


def drive(policy: Policy, losses: Iterable[float], **signals: float) -> list[Decision]:
    controller = Controller(policy)
    return [controller.observe(t, loss, 1.0, **signals) for t, loss in enumerate(losses)]


def moves(decisions: list[Decision]) -> list[tuple[int, str, str]]:
    return [(d.step, d.action, d.rung) for d in decisions if d.action != "hold"]


def test_a_loss_above_its_level_climbs_one_rung_and_calm_gives_it_back() -> None:
    found = moves(drive(POLICY, [1.0] * 20 + [5.0] + [1.0] * 30))
    assert found == [(20, "escalate", "bf16"), (30, "relax", "e4m3")]


def test_the_lock_keeps_it_from_climbing_at_once() -> None:
    found = moves(drive(POLICY, [1.0] * 20 + [5.0] * 12))
    assert found == [(20, "escalate", "bf16"), (25, "escalate", "exact")]


def test_between_the_two_levels_nothing_moves() -> None:
    """Hysteresis: 2 is neither trouble nor calm."""
    found = moves(drive(POLICY, [1.0] * 20 + [5.0] + [2.0] * 40 + [1.0] * 12))
    assert found == [(20, "escalate", "bf16"), (70, "relax", "e4m3")]


def test_no_trigger_counts_before_the_warm_up() -> None:
    assert moves(drive(POLICY, [1.0, 1.0, 1.0, 1.0, 9.0, 9.0, 1.0])) == []


def test_persistence_counts_observations_in_a_row() -> None:
    policy = Policy(LADDER, (Trigger("zeta", 0.5, 0.4, persist=3),), lock=0, calm=None, warmup=0)
    controller = Controller(policy)
    zetas = [0.6, 0.6, 0.1, 0.6, 0.6, 0.6, 0.6]
    found = [controller.observe(t, 1.0, 1.0, zeta=z) for t, z in enumerate(zetas)]
    assert moves(found) == [(5, "escalate", "bf16")]
    assert found[5].reason == "zeta 0.6 is above 0.5 for 3 observations"


def test_a_probe_that_is_not_made_leaves_its_trigger_as_it_was() -> None:
    policy = Policy(LADDER, (Trigger("zeta", 0.5, 0.4, persist=2),), lock=0, warmup=0)
    controller = Controller(policy)
    controller.observe(0, 1.0, 1.0, zeta=0.6)
    assert controller.observe(1, 1.0, 1.0).action == "hold"
    assert controller.observe(2, 1.0, 1.0, zeta=0.6).action == "escalate"


def test_a_signal_below_its_level() -> None:
    trigger = Trigger("margin", 1.0, 1.2, side="below", to_top=True)
    policy = Policy(LADDER, (trigger,), warmup=0)
    found = drive(policy, [1.0], margin=0.9)
    assert (found[0].action, found[0].rung) == ("escalate", "exact")
    assert drive(policy, [1.0], margin=1.1)[0].action == "hold"
    assert drive(policy, [1.0], margin=math.nan)[0].action == "escalate"


def test_ratios_are_what_they_say() -> None:
    """Loss over the lowest median of 4; norm over the mean of the last 4, and of the last one."""
    controller = Controller(Policy(LADDER, window=4))
    losses, norms = [8.0, 4.0, 2.0, 4.0, 1.0, 6.0], [1.0, 2.0, 3.0, 2.0, 4.0, 11.0]
    for t in range(5):
        controller.observe(t, losses[t], norms[t])
    controller.observe(5, losses[5], norms[5])
    medians = [np.median(losses[i : i + 4]) for i in range(2)]
    assert controller.seen["loss_ratio"] == pytest.approx(6.0 / min(medians))
    assert controller.seen["grad_ratio"] == pytest.approx(11.0 / np.mean([2, 3, 2, 4]))
    assert controller.seen["grad_jump"] == pytest.approx(11.0 / 4.0)


def test_a_loss_that_is_not_finite_goes_to_the_top_whatever_the_lock() -> None:
    losses = [1.0] * 20 + [5.0, math.nan]
    assert moves(drive(POLICY, losses)) == [(20, "escalate", "bf16"), (21, "escalate", "exact")]
    assert moves(drive(POLICY, [math.inf])) == [(0, "escalate", "exact")]


def test_the_last_good_state_is_one_that_has_proved_good() -> None:
    back = Trigger("loss_ratio", 3.0, 1.5, roll_back=True)
    policy = Policy(LADDER, (back,), lock=5, calm=10, window=4, warmup=8, save_every=6)
    found = drive(policy, [1.0] * 22 + [5.0])
    saved = [d.step for d in found if d.save]
    assert saved == [7, 13, 19]
    last = found[-1]
    assert (last.action, last.restore, last.rung) == ("roll_back", 13, "bf16")  # 19 is too fresh
    assert 13 in last.kept
    for decision in found:  # never asks for a state that was not kept
        assert set(decision.kept) <= set(saved)


def test_trouble_spoils_a_state_that_was_just_kept() -> None:
    back = Trigger("loss_ratio", 3.0, 1.5, roll_back=True)
    policy = Policy(LADDER, (back,), lock=5, calm=10, window=4, warmup=8, save_every=6)
    found = drive(policy, [1.0] * 15 + [2.0] * 6 + [5.0])
    assert [d.step for d in found if d.save] == [7, 13]
    assert found[-1].restore == 7


def test_rollbacks_are_limited_and_refusals_logged() -> None:
    back = Trigger("loss_ratio", 3.0, 1.5, roll_back=True)
    policy = Policy(
        ("only",), (back,), lock=0, window=4, warmup=4, save_every=2, rollbacks=1, calm=None
    )
    controller = Controller(policy)
    for t, loss in enumerate([1.0] * 10 + [5.0] + [1.0] * 10 + [5.0, 5.0, 5.0]):
        controller.observe(t, loss, 1.0)
    assert [d.action for d in controller.log] == ["roll_back", "hold"]
    assert "1 rollbacks are spent; already at only" in controller.log[-1].reason


def test_the_budget_bounds_the_share_of_dear_steps() -> None:
    policy = Policy(LADDER, (LOUD,), lock=5, calm=1000, budget=0.1, window=4, warmup=8)
    controller = Controller(policy)
    dear = []
    for t, loss in enumerate([1.0] * 50 + [5.0] * 350):
        dear.append(controller.rung != "e4m3")
        controller.observe(t, loss, 1.0)
    shares = np.cumsum(dear) / np.arange(1, len(dear) + 1)
    assert 0.08 < shares[-1] <= shares.max() <= 0.1
    assert any("budget of 10% is spent" in d.reason for d in controller.log)


def test_it_goes_on_from_its_state_as_if_nothing_had_happened() -> None:
    rng = np.random.default_rng(0)
    losses = np.exp(rng.normal(0, 0.45, 300)).tolist()
    back = Trigger("loss_ratio", 3.0, 1.5, roll_back=True)
    policy = Policy(LADDER, (back, Trigger("cos", 0.2, 0.4, "below")), lock=3, calm=2, window=4,
                    warmup=8, save_every=6)  # fmt: skip
    whole, half = Controller(policy), Controller(policy)
    for t, loss in enumerate(losses):
        if t == 150:
            half = Controller(policy, json.loads(json.dumps(half.state())))
        first = whole.observe(t, loss, loss, cos=math.sin(t / 15))
        assert half.observe(t, loss, loss, cos=math.sin(t / 15)) == first
    assert whole.log == half.log
    assert {d.action for d in whole.log} >= {"escalate", "relax", "roll_back"}
    with pytest.raises(ValueError, match="state must be of the same policy"):
        Controller(POLICY, whole.state())


def test_every_move_has_a_reason() -> None:
    controller = Controller(POLICY)
    for t, loss in enumerate([1.0] * 20 + [5.0] * 9 + [1.0] * 40):
        controller.observe(t, loss, 1.0)
    assert [d.action for d in controller.log] == ["escalate", "escalate", "relax", "relax"]
    assert all(d.reason for d in controller.log)
    assert controller.log[0].reason == "loss_ratio 5 is above 3"
    assert controller.log[-1].reason.startswith("quiet for ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ladder": ()}, "ladder must have rungs of different names"),
        ({"ladder": ("a", "a")}, "ladder must have rungs of different names"),
        ({"first": 3}, "first must be below 3; got 3"),
        ({"lock": -1}, "lock must be at least 0; got -1"),
        ({"calm": 0}, "calm must be at least 1; got 0"),
        ({"window": 1}, "window must be at least 2; got 1"),
        ({"budget": 1.5}, "budget must be a share from 0 to 1, or None; got 1.5"),
        ({"triggers": (Trigger("cos", 1, 1, roll_back=True),)}, "save_every must be given"),
    ],
)
def test_bad_policies_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Policy(**{"ladder": LADDER, **change})


def test_bad_triggers_and_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="quiet of trigger 'zeta' must not be above its level 1"):
        Trigger("zeta", 1.0, 2.0)
    with pytest.raises(ValueError, match="persist must be at least 1; got 0"):
        Trigger("zeta", 1.0, 1.0, persist=0)
    with pytest.raises(ValueError, match="side must be one of above, below"):
        Trigger("zeta", 1.0, 1.0, side="beside")  # type: ignore[arg-type]
    controller = Controller(POLICY)
    controller.observe(3, 1.0, 1.0)
    with pytest.raises(ValueError, match="step must grow; got 3 after 3"):
        controller.observe(3, 1.0, 1.0)


def test_a_budget_of_nothing_is_never_exceeded_but_states_are_put_back() -> None:
    back = Trigger("loss_ratio", 3.0, 1.5, roll_back=True)
    policy = Policy(LADDER, (back,), lock=5, budget=0.0, window=4, warmup=8, save_every=4)
    found = drive(policy, [1.0] * 30 + [5.0] + [1.0] * 10)
    assert {d.rung for d in found} == {"e4m3"}
    assert moves(found) == [(30, "roll_back", "e4m3")]


def test_the_restored_state_is_not_taken_for_a_spike() -> None:
    """The loss falls; what it had fallen to since the state was kept is undone with it."""
    back = Trigger("loss_ratio", 3.0, 1.5, roll_back=True)
    policy = Policy(("a", "b"), (back,), lock=10, window=10, warmup=10, save_every=40, calm=None)
    controller = Controller(policy)
    progress, moved = 0, []
    kept = {}
    for t in range(400):
        loss = math.exp(-progress / 30) * (20 if t == 180 else 1)
        decision = controller.observe(t, loss, 1.0)
        progress += 1
        if decision.save:
            kept[t] = progress
        if decision.restore is not None:
            progress = kept[decision.restore]
            moved.append((t, decision.restore))
    assert len(moved) == 1
    assert moved[0][0] == 180


def test_a_probe_that_was_not_quiet_is_not_forgotten_between_probes() -> None:
    trigger = Trigger("zeta", 2.0, 1.0)
    policy = Policy(("a", "b"), (trigger,), lock=0, calm=10, warmup=0)
    controller = Controller(policy)
    for t in range(100):
        signals = {"zeta": 5.0 if t < 41 else 0.5} if t % 20 == 0 else {}
        controller.observe(t, 1.0, 1.0, **signals)
    assert [(d.step, d.action) for d in controller.log if d.action != "hold"] == [
        (0, "escalate"),
        (69, "relax"),  # quiet from the probe at 60 on
    ]


def test_what_was_kept_before_a_trigger_does_not_prove_good() -> None:
    triggers = (Trigger("zeta", 2.0, 1.0), Trigger("loss_ratio", 3.0, 2.0, roll_back=True))
    policy = Policy(("a", "b"), triggers, lock=0, calm=3, warmup=0, save_every=20, window=4)
    controller = Controller(policy)
    for t in range(24):
        zeta = 5.0 if t == 15 else 0.5
        controller.observe(t, 1.0, 1.0, zeta=zeta)
    last = controller.observe(24, 9.0, 1.0, zeta=0.5)
    assert last.restore is None
    assert "no good state to go back to" in last.reason


def test_state_is_json_whatever_the_numbers_are() -> None:
    controller = Controller(POLICY)
    for t in range(12):
        controller.observe(np.int64(t), np.float32(1.5), np.float32(2), other=np.float32(1))  # type: ignore[arg-type]
    again = Controller(POLICY, json.loads(json.dumps(controller.state())))
    assert again.state() == controller.state()


def test_a_misspelt_signal_is_seen_not_to_be_given() -> None:
    controller = Controller(Policy(LADDER, (LOUD, Trigger("zta", 1.0, 1.0))))
    controller.observe(0, 1.0, 1.0, zeta=3.0)
    assert controller.unseen == ("zta",)


def test_a_refused_observation_is_not_remembered() -> None:
    controller = Controller(POLICY)
    with pytest.raises(TypeError, match="loss must be a number; got None"):
        controller.observe(0, None, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="loss_ratio is worked out by the controller; got 50"):
        controller.observe(0, 1.0, 1.0, loss_ratio=50.0)
    assert controller.observe(0, 1.0, 1.0).action == "hold"


def test_kinds_of_fields_are_checked() -> None:
    with pytest.raises(TypeError, match="ladder must be a sequence of str; got 'abc'"):
        Policy("abc")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="triggers must be a sequence of Trigger"):
        Policy(LADDER, ("loss",))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="level must be a number; got '1'"):
        Trigger("zeta", "1", 1.0)  # type: ignore[arg-type]
