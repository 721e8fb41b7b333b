"""Touchy settings, interventions and the controller's study, on designs that take seconds."""

import contextlib
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import mxsim
from figures import controller as controller_figure
from figures import interventions as interventions_figure
from mxsim.store import Record
from mxsim.survival import Time
from studies import controller, interventions, touchy_settings
from studies.controller import row_of, warning_of
from studies.interventions import Key, compare, time_of
from studies.touchy_settings import DOOMED, Setting, pairs_of

DRAWN: list[Any] = [(interventions, interventions_figure), (controller, controller_figure)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    for study in (touchy_settings, interventions, controller):
        with contextlib.redirect_stdout(io.StringIO()):
            arguments = study.Arguments(tier="smoke", results=folder, executor="serial")
            assert study.main(arguments) == 0
    return folder


@pytest.mark.parametrize(("study", "figure"), DRAWN)
def test_figures_read_results_only_and_fail_on_a_missing_one(
    study: Any, figure: Any, root: Path, tmp_path: Path
) -> None:
    out = tmp_path / "picture.png"
    assert figure.main(figure.Arguments("smoke", results=root, out=out)) == 0
    assert out.stat().st_size > 10_000
    assert figure.main(figure.Arguments("smoke", results=tmp_path, out=out)) == 1


def test_the_control_gives_the_original_bits_and_a_lower_rate_averts(root: Path) -> None:
    """DOOMED leaves its edge by its rate alone: only the rate can keep it there."""
    results = interventions.load("smoke", root)
    same, controls = results.reproduced
    assert same == controls == 2 * len(results.used) > 0
    for lead in results.design.leads:
        none, lower = results.arms[lead, "none"], results.arms[lead, "lower_lr"]
        assert none.outcomes["no effect"] == len(results.used)
        assert lower.outcomes["averted"] == len(results.used)
        assert lower.gain.value > 5


def test_search_and_confirmation_share_no_seed(root: Path) -> None:
    design = touchy_settings.DESIGNS["smoke"]
    results = touchy_settings.load("smoke", root)
    assert [p.n for p in results.searched] == [2, 2]
    assert [p.n for p in results.confirmed] == [2]
    best = [results.searched[0].setting]
    first = {key[1] for key in touchy_settings.search_runs(design)}
    again = {key[1] for key in touchy_settings.fresh_runs(design, best)}
    assert not first & again
    shown = io.StringIO()
    touchy_settings.print_tables(results, Console(file=shown, width=200))
    assert f"{results.runs} runs" in shown.getvalue()


def test_controlled_arms_are_paired_and_costed(root: Path) -> None:
    results = controller.load("smoke", root)
    touchy = results.design.touchy[0].name
    rows = {row.arm: row for row in results.rows[touchy]}
    assert rows["exact"].loss.value == 1
    assert rows["exact"].cost.value == pytest.approx(1)
    assert rows["base"].cost.value == pytest.approx(0.25)  # watched, and not charged for it
    assert rows["base"].moves.value == 0
    shown = io.StringIO()
    controller.print_tables(results, Console(file=shown, width=200))
    assert "moves a run on a stable setting" in shown.getvalue()
    assert not set(results.design.first) & set(results.design.fresh)


# ---------------------------------------------------------------- on made-up outcomes


def record(**meta: Any) -> Record:
    arrays = meta.pop("arrays", {})
    return Record("0" * 16, arrays, meta)


def test_pairs_are_counted_and_ordered() -> None:
    settings = [Setting(name, DOOMED, mxsim.scheme("all_e2m1")) for name in "ab"]
    failed = {("a", 0): (1, 0), ("a", 1): (0, 1), ("b", 0): (1, 1), ("b", 1): (1, 0)}
    runs, records = {}, {}
    for (name, seed), outcomes in failed.items():
        for mx, bad in zip((True, False), outcomes, strict=True):
            run: Any = type("Run", (), {"id": f"{name}{seed}{mx}"})()
            runs[name, seed, mx] = run
            records[run.id] = record(status="diverged" if bad else "ok")
    first, second = pairs_of(settings, runs, records)
    assert (first.setting.name, first.both, first.mx_only, first.exact_only) == ("b", 1, 1, 0)
    assert (second.setting.name, second.both, second.mx_only, second.exact_only) == ("a", 0, 1, 1)
    assert (first.difference, second.difference) == (0.5, 0.0)


def test_times_count_from_the_change() -> None:
    assert time_of(record(first_bad_step=130), 100, 300) == Time(30, event=True)
    assert time_of(record(first_bad_step=None), 100, 300) == Time(200, event=False)


def test_arms_are_compared_with_the_placebo_of_the_same_seed() -> None:
    design = interventions.Design(
        Setting("made up", DOOMED, mxsim.scheme("all_e2m1")), 4, (50,), 2, 100, 0
    )
    used = dict.fromkeys(range(4), 200)
    times = {}
    for seed in used:
        for name, replicates in interventions.arms(design).items():
            for r in range(replicates):
                times[Key(seed, 50, name, r)] = Time(50 + seed, event=True)
        times[Key(seed, 50, "placebo", 0)] = Time(40 + seed, event=True)
        times[Key(seed, 50, "placebo", 1)] = Time(60 + seed, event=True)
        times[Key(seed, 50, "full_precision", 0)] = Time(250, event=False)
    found = compare(design, used, times)
    full, same = found[50, "full_precision"], found[50, "rceil"]
    assert full.outcomes == {"averted": 4, "delayed": 0, "no effect": 0, "hastened": 0}
    assert full.gain.value == pytest.approx(100 - np.mean([50, 51, 52, 53]))
    assert full.paired == pytest.approx(1 / 3**4, abs=0.004)
    assert same.gain.value == 0
    assert same.paired == 1
    assert full.q == pytest.approx(min(1.0, full.paired * (len(interventions.arms(design)) - 2)))
    assert len(found[50, "placebo"].times) == 8


def test_a_signal_that_foretells_has_an_auc_of_one_and_a_lead() -> None:
    """It rises to 5 at 30 steps before the divergence; in the other runs it stays within 1."""
    steps = 400
    quiet = [np.linspace(0, 1, steps) for _ in range(10)]
    loud = []
    for bad in (200, 300):
        values = np.zeros(steps)
        values[bad - 30 :] = 5
        loud.append((bad, values))
    records = [record(first_bad_step=None, arrays={"zeta": v}) for v in quiet]
    records += [record(first_bad_step=bad, arrays={"zeta": v}) for bad, v in loud]
    setting = Setting("made up", DOOMED, mxsim.scheme("all_e2m1"))
    found = warning_of("zeta", records, setting)
    assert (found.diverging, found.stable, found.auc, found.warned) == (2, 10, 1.0, 2)
    assert found.level == pytest.approx(249 / 399)  # to the median divergence, step 250
    assert found.lead.value == 30
    assert found.roc[0].tolist() == [0, 0]
    assert found.roc[-1].tolist() == [1, 1]
    assert [0.0, 1.0] in found.roc.tolist()  # both warned of without a false alarm
    falling = [record(first_bad_step=None, arrays={"cos": 1 - v}) for v in quiet]
    falling += [record(first_bad_step=bad, arrays={"cos": 1 - v}) for bad, v in loud]
    assert warning_of("cos", falling, setting).auc == 1.0


def test_a_run_that_ended_in_nan_has_an_infinite_loss() -> None:
    def one(status: str, loss: float) -> Record:
        arrays = {"rungs": np.zeros(4, np.int8), "losses": np.ones(4, np.float32)}
        return record(
            status=status, eval_exact=loss, eval_loss=loss, log=[], cost=2.0, probe_cost=0.0,
            arrays=arrays,
        )  # fmt: skip

    row = row_of("mxsim", [one("ok", 1.01), one("nonfinite", 0.5)], [one("ok", 1.0)] * 2)
    assert row.loss.high == np.inf
    assert (row.close, row.diverged, row.cost.value) == (1, 1, 0.5)
