"""Controlled runs: the loop does what the controller says, and nothing else."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mxsim import ProxyConfig, scheme, train
from mxsim.changes import Change, ChangedRun, Snapshot
from mxsim.control import Policy, Trigger
from mxsim.controlled import Controlled, ControlledRun, precision_ladder, uncontrolled
from mxsim.gemm_cost import EXACT_GRADIENT, MARGIN, step_cost
from mxsim.precision import GEMM_SITES, PrecisionScheme
from mxsim.store import DamagedResult, Record

CFG = ProxyConfig(width=16, depth=2, batch=16, lr=3e-2, steps=60, eval_samples=64)
LADDER = precision_ladder(scheme("all_e4m3"))
NAMES = tuple(name for name, _ in LADDER)
JUMPY = Trigger("grad_ratio", 1.3, 1.1)
POLICY = Policy(NAMES, (JUMPY,), lock=4, calm=6, window=8, warmup=10)
BACK = replace(POLICY, triggers=(replace(JUMPY, roll_back=True),), save_every=5)
# A warm-up past the edge: to Inf about step 50.
DOOMED = replace(CFG, lr=22.0, steps=80, optimizer="sgd", norm="none", warmup=80)


def same(one: Record, other: Record) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, values in one.arrays.items():
        np.testing.assert_array_equal(values, other.arrays[name], err_msg=name)
    metas = [{k: v for k, v in r.meta.items() if k != "seconds"} for r in (one, other)]
    assert json.dumps(metas[0]) == json.dumps(metas[1])


def test_the_ladder_ends_exact_and_costs_never_fall() -> None:
    assert NAMES == (
        "base", "rceil", "ln_exact", "bf16_activations", "exact_backward", "full_precision"
    )  # fmt: skip
    assert LADDER[-1][1].is_exact
    costs = [step_cost(rung, CFG) for _, rung in LADDER]
    assert costs == sorted(costs)
    assert [name for name, _ in precision_ladder(scheme("mxfp8_rceil"))][1] == "bf16_activations"


def test_watching_changes_nothing() -> None:
    task = ControlledRun(CFG, LADDER, POLICY, probe_every=7, margin=True)
    watched = uncontrolled(task, 0).run()
    run = train(CFG, scheme("all_e4m3"))
    np.testing.assert_array_equal(watched.arrays["losses"], np.float32(run.losses))
    assert watched.meta["eval_loss"] == run.eval_loss
    assert watched.meta["log"] == []
    assert np.isfinite(watched.arrays["zeta"][::7]).all()
    assert np.isnan(watched.arrays["zeta"][1:7]).all()


def test_a_controlled_run_is_the_run_with_the_changes_that_its_log_tells() -> None:
    record = ControlledRun(CFG, LADDER, POLICY).run()
    log = record.meta["log"]
    moves = [d for d in log if d["action"] in ("escalate", "relax") and d["step"] + 1 < CFG.steps]
    assert len(moves) >= 2
    changes = tuple(Change(d["step"] + 1, dict(LADDER)[d["rung"]]) for d in moves)
    replay = ChangedRun(CFG, LADDER[0][1], changes).run()
    np.testing.assert_array_equal(record.arrays["losses"], replay.arrays["losses"])
    assert record.meta["eval_loss"] == replay.meta["eval_loss"]


@pytest.mark.parametrize("policy", [POLICY, BACK])
def test_it_is_deterministic_and_goes_on_from_a_file(policy: Policy, tmp_path: Path) -> None:
    task = ControlledRun(CFG, LADDER, policy, probe_every=5, margin=True)
    whole = task.run()
    assert any(d["action"] != "hold" for d in whole.meta["log"])
    for at in (3, 31, 47):
        file = Controlled(task).advance(at).save(tmp_path / f"{at}.npz")
        same(Controlled.load(task, file).advance().record(), whole)
    other = replace(task, config=replace(CFG, seed=1))
    with pytest.raises(ValueError, match="is not of this run"):
        Controlled.load(other, file)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(DamagedResult):
        Controlled.load(task, file)


def test_a_rollback_puts_weights_and_moments_back_and_goes_on_in_time() -> None:
    task = ControlledRun(CFG, LADDER, BACK)
    controlled = Controlled(task)
    kept: dict[int, Snapshot] = {}
    while not any(d.action == "roll_back" for d in controlled.controller.log):
        controlled.advance(1)
        kept |= controlled.kept
    restored = controlled.controller.log[-1].restore
    assert restored is not None
    training = controlled.training
    np.testing.assert_array_equal(training.flat, kept[restored].weights)
    np.testing.assert_array_equal(training.optimizer.second, kept[restored].second)
    assert training.step == training.optimizer.updates == controlled.controller.log[-1].step + 1


def test_a_run_that_meets_inf_is_rolled_back_and_ends() -> None:
    assert train(DOOMED, PrecisionScheme()).status == "nonfinite"
    policy = Policy(("only",), window=8, warmup=10, save_every=5, lock=2)
    record = ControlledRun(DOOMED, (("only", PrecisionScheme()),), policy).run()
    log = record.meta["log"]
    assert log[0]["action"] == "roll_back"
    assert log[0]["reason"] == "loss or gradient norm is not finite"
    losses = record.arrays["losses"]
    assert np.isinf(losses[log[0]["step"]])
    assert np.isfinite(losses[log[0]["step"] + 1])
    assert record.meta["status"] != "ok"  # the rate still grows: it cannot be saved for long


def test_nothing_to_go_back_to_is_the_end() -> None:
    record = ControlledRun(DOOMED, (("only", PrecisionScheme()),), Policy(("only",))).run()
    assert record.meta["status"] == "nonfinite"
    assert record.meta["log"][-1]["action"] == "hold"


def test_exact_steps_first_are_out_of_its_hands() -> None:
    task = ControlledRun(CFG, LADDER, replace(POLICY, warmup=25), exact_until=25)
    record = task.run()
    exact = train(CFG, PrecisionScheme())
    np.testing.assert_array_equal(record.arrays["losses"][:25], np.float32(exact.losses[:25]))
    assert (record.arrays["losses"][26:] != np.float32(exact.losses[26:])).any()
    assert (record.arrays["rungs"][:25] == -1).all()
    assert record.arrays["rungs"][25] == 0


def test_costs_are_counted_by_rung_and_probe() -> None:
    task = uncontrolled(ControlledRun(CFG, LADDER, POLICY, probe_every=6, margin=True), 0)
    record = task.run()
    assert record.meta["probe_cost"] == 10 * (EXACT_GRADIENT + MARGIN)
    assert record.meta["cost"] == 60 * 0.5 + record.meta["probe_cost"]


def test_a_gemm_runs_at_the_rate_of_its_wider_operand() -> None:
    assert step_cost(scheme("all_e2m1"), CFG) == 0.25
    assert step_cost(scheme("bf16"), CFG) == step_cost(scheme("exact"), CFG) == 1
    weights = PrecisionScheme(**{s: "mxfp8_e4m3" for s in GEMM_SITES if s.endswith("_w")})  # type: ignore[arg-type]
    assert step_cost(weights, CFG) == 1
    forward = PrecisionScheme(**{s: "mxfp4_e2m1" for s in GEMM_SITES if "fprop" in s})  # type: ignore[arg-type]
    assert step_cost(forward, CFG) == pytest.approx((0.25 + 1 + 1) / 3)
    half = replace(scheme("all_e4m3"), overrides=((0, "fc1_fprop_x", scheme("exact").ln_beta),))
    assert step_cost(half, CFG) == pytest.approx(0.5 + 0.5 / 12)
