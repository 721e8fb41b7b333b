"""The study of the paper's claims: its design, its verdicts on made-up outcomes, its page."""

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim.boundary import Threshold
from mxsim.stats import Estimate
from mxsim.store import Record
from studies import (
    claims,
    claims_cited,
    claims_decided,
    claims_remedies,
    claims_signs,
    claims_spikes,
)
from studies.claims import DESIGNS, TASKS, Key, Results, conditions, points, watches
from studies.claims_page import page
from studies.claims_teacher import with_unit_teacher
from studies.claims_verdicts import (
    Verdict,
    Word,
)
from studies.claims_watch import Watch
from studies.touchy_settings import Setting


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    with contextlib.redirect_stdout(io.StringIO()):
        arguments = claims.Arguments(tier="smoke", results=folder, executor="serial")
        assert claims.main(arguments) == 0
    return folder


# ---------------------------------------------------------------- design


def test_exact_runs_do_not_depend_on_the_reading_or_on_precision() -> None:
    design = DESIGNS["laptop"]
    runs = points(design)
    for key, point in runs.items():
        if key.arm == "exact":
            assert point.scheme.is_exact
            twin = runs.get(replace(key, reading="paper_code"))
            assert twin is None or twin.id == point.id
    base = Key("paper_text", "unit", "base", 0.02, 1, "exact")
    for label in ("FP4 E2M1", "block 16", "exact backward"):
        assert runs[replace(base, condition=label)].id == runs[base].id
        assert runs[replace(base, condition=label, arm="mx")].id != runs[replace(base, arm="mx")].id
    assert len({point.id for point in runs.values()}) + len(watches(design)) <= 4500
    searched = {k for k in runs if k.task == "searched" and k.arm == "mx"}
    assert {k.seed for k in searched if k.condition == "depth 8"} == set(range(200, 216))
    assert {k.seed for k in searched if k.condition == "FP4 E2M1"} == set(range(200, 232))


def test_pairs_share_their_problem_and_conditions_change_one_thing() -> None:
    design = DESIGNS["smoke"]
    runs = points(design)
    for key, point in runs.items():
        assert point.config == runs[replace(key, arm="exact")].config
    base = mxsim.scheme("paper_text"), mxsim.scheme("paper_code")
    for condition in conditions(design):
        of_precision = (condition.text, condition.code) != base
        of_problem = bool(condition.config) or (condition.rate, condition.steps) != (1, 1)
        assert of_precision + of_problem == (condition.label != "base")


@pytest.mark.parametrize("tier", DESIGNS)
def test_every_tier_has_its_teachers(tier: claims.Tier) -> None:
    design = DESIGNS[tier]
    for condition in conditions(design):
        cfg = claims.config_of(design, "unit", condition, design.rates[0], 0)
        assert cfg.teacher_gain > 4
        assert (cfg.teacher_activation or cfg.activation) == "gelu"


@pytest.mark.parametrize(("init", "depth", "width"), [("pytorch", 4, 64), ("xavier", 4, 64)])
def test_the_unit_teacher_has_unit_outputs(init: str, depth: int, width: int) -> None:
    cfg = with_unit_teacher(mxsim.ProxyConfig(width=width, depth=depth, init=init))
    rng = np.random.default_rng(77)
    x = rng.standard_normal((256, width), np.float32)
    powers = [
        float(np.mean(mxsim.make_teacher(replace(cfg, seed=seed))(x) ** 2))
        for seed in range(50, 58)
    ]
    assert 0.8 < np.median(powers) < 1.25
    with pytest.raises(KeyError):
        with_unit_teacher(replace(cfg, depth=5))


# ---------------------------------------------------------------- claims on made-up outcomes

DESIGN = replace(
    DESIGNS["smoke"], seeds=6, searched_seeds=range(200, 224), problem_seeds=12, probe_every=2
)
KEYS = tuple(points(DESIGN))


def made_up(
    fails: Callable[[Key], bool],
    loss: Callable[[Key], float] = lambda key: 0.02,
    zeta: Callable[[bool], Any] = lambda failed: np.full(12, 0.5),
    gamma: Callable[[bool], Any] = lambda failed: np.full(12, 0.1),
) -> Results:
    """Results of runs that fail at step 20 or not, with probes at every second step."""

    def record(key: Key) -> Record:
        failed = fails(key)
        losses = np.full(24, 1.0)
        losses[20:] = 50.0 if failed else 1.0
        arrays: dict[str, Any] = {
            "losses": losses,
            "probe_zeta": zeta(failed)[:, None, None],
            "probe_cos": -zeta(failed)[:, None, None],
            "probe_gamma_saturated": gamma(failed)[:, None],
        }
        meta: Mapping[str, Any] = {
            "status": "diverged" if failed else "ok",
            "rule": {"patience": 200, "window": 5, "recovery_ratio": 2.0},
            "learned": True,
            "spikes": [{"step": 20, "length": None, "height": 50.0}] if failed else [],
            "first_bad_step": 20 if failed else None,
            "eval_loss": loss(key),
        }
        return Record("made up", arrays, meta)

    return Results("smoke", DESIGN, {key: record(key) for key in KEYS}, {}, Path("nowhere"))


def words_of(verdict: Verdict, **where: str) -> set[Word]:
    return {
        f.word
        for f in verdict.findings
        if all(getattr(f, name) == value for name, value in where.items())
    }


def test_claim_1_tells_precision_from_the_optimizer() -> None:
    mx_only = made_up(lambda k: k.arm == "mx" and k.reading == "paper_code" and k.task == "script")
    verdict = claims_spikes.spikes(mx_only)
    assert words_of(verdict, reading="paper_code", task="script") == {
        "holds",
        "no room",  # no spike recovers
    }
    assert words_of(verdict, reading="paper_text") == {"no room", "missing"}
    shared = claims_spikes.spikes(made_up(lambda k: k.lr > 0.1))
    assert words_of(shared, task="unit") == {"not seen", "no room"}  # no spike recovers
    assert words_of(shared) == {"not seen", "no room", "missing"}  # the search has not been run
    assert np.isnan(shared.findings[-1].p)
    there = claims_spikes.spikes(made_up(lambda k: k.arm == "mx" and k.task == "searched"))
    failing = [f for f in there.findings if f.task == "searched" and "recovers" not in f.words]
    assert {f.word for f in failing} == {"holds"}  # both formats, both readings
    assert len(failing) == 2 * (2 * 3 + 1)
    assert {f.word for f in there.findings if "recovers" in f.words} == {"no room"}
    first = {f.words for f in there.findings if "before exact" in f.words}
    assert first == {"MX E4M3 fails before exact", "MX E5M2 fails before exact"}
    later = "Run to 24 steps in the searched place, paper_code: 12 of 12 MX runs fail, the median "
    assert f"{later}at step 20; 0 of 12 exact runs fail." in there.notes
    (found,) = (
        f for f in there.findings
        if f.words == "lasting failure, E4M3, MX against exact" and f.reading == "paper_code"
    )  # fmt: skip
    assert found.detail == "0 in both, 24 in MX only, 0 in exact only"
    assert words_of(there, task="unit") == {"no room"}
    assert shared.findings[0].detail.startswith("78 in both, ")
    assert sum("in 1.00 [1.00, 1.00] steps, to 50.00" in note for note in shared.notes) == 2
    assert (
        "in 52 of 104 settings and rates some MX run spikes or fails, in 52 all" in shared.notes[-1]
    )


def test_claims_2_to_4_and_11_tell_settings_apart() -> None:
    deep = claims_decided.sizes(made_up(lambda k: k.condition == "depth 3" and k.arm == "mx"))
    assert words_of(deep, words="depth", kind="precision-induced") == {"holds"}
    assert "holds" not in words_of(deep, words="depth", kind="optimizer-driven")
    assert "holds" not in words_of(deep, words="width")
    fast = claims_decided.sizes(made_up(lambda k: k.lr > 0.1))
    assert words_of(fast, words="learning rate", kind="optimizer-driven") == {"holds"}
    assert "holds" not in words_of(fast, kind="precision-induced")
    assert words_of(claims_decided.sizes(made_up(lambda k: False)), words="depth") == {"no room"}
    normed = claims_decided.layer_norm(made_up(lambda k: k.condition == "base" and k.arm == "mx"))
    code = "layer norm against none", "affine layer norm against plain"
    for words in code:
        assert words_of(normed, words=words, reading="paper_code", task="unit") == {"holds"}
        assert words_of(normed, words=words, task="searched") == {"no room"}  # the base has RMS
    assert words_of(normed, words="RMS norm against none") == {"holds", "no room"}
    assert {f.kind for f in normed.findings if f.words.startswith("RMS norm")} == {"reference"}
    spiky = claims_decided.layer_norm(made_up(lambda k: k.condition == "norm none"))
    words = "layer norm against none, spikes or failure"
    assert words_of(spiky, words=words, kind="optimizer-driven") == {"refuted"}
    gains = "gains in MX, too, against GEMM operands alone"
    assert words_of(normed, words=gains) == {"holds"}
    assert words_of(normed, words="norm gains alone in MX against exact") == {"no room"}
    gated = claims_decided.activations(made_up(lambda k: k.condition == "swiglu"))
    assert words_of(gated, kind="optimizer-driven") == {"holds"}
    assert words_of(gated, kind="precision-induced") == {"no room"}  # nothing left for MX to add
    stable = claims_decided.init_and_optimizer(made_up(lambda k: k.condition == "base"))
    assert words_of(stable, kind="optimizer-driven") == {"holds"}


def test_claim_5_needs_a_change_that_calm_runs_do_not_have() -> None:
    def fails(key: Key) -> bool:
        return key.arm == "mx" and key.seed % 2 == 0

    def growing(failed: bool) -> Any:
        return np.geomspace(0.1, 5.0, 12)

    alike = claims_signs.gradient_bias(made_up(fails, zeta=growing))
    assert not words_of(alike, kind="precision-induced") & {"holds"}

    def before(failed: bool) -> Any:
        return growing(failed) if failed else np.full(12, 0.1)

    lonely = made_up(lambda k: k.arm == "mx" and k.seed % 6 != 0, zeta=before)  # one calm a setting
    told = [f.estimate.n for f in claims_signs.gradient_bias(lonely).findings if f.task == "unit"]
    assert max(told) == len(DESIGN.problems) * len(DESIGN.rates)  # pairs of peaks alone
    verdict = claims_signs.gradient_bias(made_up(fails, zeta=before))
    assert words_of(verdict, kind="precision-induced") == {"holds"}
    assert words_of(verdict, kind="optimizer-driven") == {"no room"}
    assert words_of(verdict, words="zeta above 2 foretells failure") == {"holds"}


def test_peaks_are_compared_over_equally_many_steps_each_calm_run_once() -> None:
    rising = np.arange(1.0, 13.0)
    a, b = ("base", 0.1), ("deep", 0.1)
    runs = [(a, 5, rising), (a, None, 2 * rising), (b, None, 9 * rising), (a, 11, rising)]
    # Probes at every second step: up to step 5 there are three, up to 11 six.
    assert claims_signs.matched_peaks(runs, 2) == [(3.0, 6.0)]  # b is another setting
    more = [*runs, (a, None, 3 * rising), (a, 12, rising)]
    assert claims_signs.matched_peaks(more, 2) == [(3.0, 6.0), (6.0, 18.0)]
    assert claims_signs.matched_peaks([runs[0], *runs[2:]], 2) == []


def test_the_scripts_metric_is_judged_before_the_failure_alone() -> None:
    def record(failed: bool, seed: int) -> Record:
        series = np.full(24, 0.5)
        series[20:] = 99.0  # parted by then, failed or not
        if failed:
            series[15] = 5.0
        spikes = [{"step": 20, "length": None}] if failed else []
        meta = {"status": "ok", "rule": {"patience": 200}, "spikes": spikes}
        return Record(f"{seed}", {"zeta_script": series}, meta)

    results = made_up(lambda k: False)
    watched: dict[Any, Record] = {
        ("paper_code", "unit", 0.5, seed): record(seed % 2 == 0, seed) for seed in range(24)
    }
    results = replace(results, watched=watched)
    peaks = claims_signs.matched_peaks(claims_signs.watched(results, "paper_code", "unit"))
    assert peaks == [(5.0, 0.5)] * 12  # the calm ones up to step 20, too
    verdict = claims_signs.gradient_bias(results)
    words = f"{claims_signs.SCRIPT_METRIC} above 4 foretells failure"
    (found,) = (f for f in verdict.findings if f.words == words and f.estimate.n)
    assert found.detail.startswith("12 of 12 failing, 0 of as many others; 12 of 12 failing runs")
    assert found.word == "holds"


def test_claim_6_says_in_how_many_runs_and_whether_first() -> None:
    def gamma(failed: bool) -> Any:
        return np.linspace(0.1, 0.9, 12) if failed else np.full(12, 0.6)

    verdict = claims_signs.last_bin(made_up(lambda k: k.seed % 2 == 0, gamma=gamma))
    words = "gammas crowd into the last bin first"
    assert words_of(verdict, words=words, kind="optimizer-driven") == {"holds"}
    crowd = [f for f in verdict.findings if "half of a layer" in f.words]
    assert {f.word for f in crowd} == {"holds"}
    assert crowd[0].estimate.value == 1
    precision = [f for f in verdict.findings if f.words.startswith("gammas crowd in MX")]
    assert {f.word for f in precision} == {"no room"}  # exact runs crowd as well
    assert {f.word for f in verdict.findings if "overflowing" in f.words} == {"no room"}


def test_claims_8_to_10_and_the_faults_by_their_schemes() -> None:
    fp4 = claims_decided.formats(made_up(lambda k: k.arm == "mx" and k.condition == "FP4 E2M1"))
    assert words_of(fp4, words="FP4 E2M1 against E4M3") == {"holds"}
    assert "holds" not in words_of(fp4, words="FP6 E2M3 against E4M3")
    large = claims_decided.block_size(
        made_up(lambda k: k.arm == "mx" and k.condition == "block 64")
    )
    assert words_of(large) == {"holds"}
    calm = claims_remedies.hybrids(made_up(lambda k: False, lambda k: 0.02 + 1e-4 * k.seed))
    assert words_of(calm, kind="reference") == {"holds"}
    assert words_of(calm, kind="precision-induced") == {"no room"}  # full MX matches as well
    worse = claims_remedies.hybrids(made_up(lambda k: False, lambda k: 1.5 if k.arm == "mx" else 1))
    assert words_of(worse, words="bf16 activations matches exact") == {"refuted"}
    better = claims_remedies.hybrids(
        made_up(lambda k: k.arm == "mx" and k.condition in ("base", "exact teacher"))
    )
    assert words_of(better, words="exact backward matches exact") == {"holds"}
    assert words_of(better, words="full MX against exact backward") == {"holds"}
    assert words_of(better, kind="reference") == {"refuted"}
    frozen = made_up(
        lambda k: k.arm == "mx" and k.condition != "beta trained" and k.reading == "paper_code"
    )
    found = claims_decided.faults(frozen)
    assert {f.word for f in found if f.words == "frozen beta"} == {"holds"}
    assert {f.word for f in found if f.words == "quantized teacher"} == {"not seen"}  # all fail


def test_claim_12_tells_steps_from_distance() -> None:
    averts = "half the rate averts most failures, in as many steps"
    both = claims_remedies.rate_or_precision(
        made_up(lambda k: k.task == "searched" and k.condition == "base")
    )
    assert words_of(both, words=averts, kind="optimizer-driven") == {"holds"}
    assert words_of(both, words=averts, kind="precision-induced") == {"no room"}  # there are none
    assert {f.estimate.n for f in both.findings if f.words == averts} == {24, 0}
    every = claims_remedies.rate_or_precision(made_up(lambda k: k.task == "searched"))
    assert words_of(every, words=averts, kind="optimizer-driven") == {"not seen"}
    # All fail at the same step: at half the rate that is half the distance.
    farther = "half the rate gets farther, run until it fails"
    assert words_of(every, words=farther) == {"refuted"}
    (more,) = {
        f.estimate.value for f in every.findings if f.words.startswith("half the rate lasts more")
    }
    assert more == 0
    assert "At half the rate, twice as long, paper_code: 12 of 12 MX runs fail and 12 of" in (
        " ".join(every.notes)
    )
    assert {f.word for f in every.findings if f.words.startswith("midway")} == {"missing"}


def test_the_next_lower_rate_stands_beside_the_next_higher_one() -> None:
    high, low = DESIGN.rates[-1], DESIGN.rates[0]
    found = claims_remedies.rate_or_precision(
        made_up(lambda k: k.lr == high or (k.condition == "sgd" and k.lr == low))
    )
    lower, higher = (f"the next {name} rate averts most" for name in ("lower", "higher"))
    here = [f for f in found.findings if (f.reading, f.task) == ("paper_code", "unit")]
    by = {f.words: f.detail for f in here}
    n = 6 * (len(DESIGN.problems) - 1)
    assert by[f"{lower}, optimizer-driven"] == f"{n} of {n}"
    assert by[f"{lower}, SGD, optimizer-driven"] == "0 of 6"
    assert by[f"{higher}, SGD, optimizer-driven"] == "0 of 6"
    assert by[f"{higher}, optimizer-driven"] == "0 of 0"


def test_a_setting_run_here_is_not_counted_again_and_a_switch_not_at_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fate = claims_cited.Fate
    text = mxsim.scheme("paper_text")
    other = replace(DESIGN.searched, lr=0.5)
    fresh = {
        "the same": (Setting("the same", DESIGN.searched, text), [fate(9, None)] * 8),
        "another": (Setting("another", other, text), [fate(9, 3)] * 8),
        "switched": (Setting("switched", DESIGN.searched, text, 20), [fate(20, None)] * 8),
    }
    monkeypatch.setattr(claims_cited, "_fresh", lambda tier, root: fresh)
    results = made_up(lambda k: k.arm == "mx" and k.task == "searched")
    found = {(f.reading, f.task, f.words): f for f in claims_cited.elsewhere(results)}
    words = "lasting failure, MX against exact"
    assert list(found) == [("paper_text", "searched: another", words)]  # the rest: on own seeds
    assert found["paper_text", "searched: another", words].detail.startswith("8 in both")
    (note,) = claims_cited.by_construction(results)
    assert "switched. 8 of 8 runs fail 0 to 0 steps after the switch to MX at step 20" in note


def test_critical_rates_compare_with_the_ends_of_both_intervals() -> None:
    low, high = Threshold(0.04, 0.03, 0.05, 20, True), Threshold(0.1, 0.08, 0.2, 20, True)
    bounded = Threshold(np.nan, 0.16, np.inf, 20, True)
    ratio = claims_cited._over(low, high)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.4, 0.15, 0.625))
    assert claims_cited.decide_below_one(ratio) == "holds"
    assert claims_cited.decide_below_one(claims_cited._over(high, low)) == "refuted"
    assert claims_cited.decide_below_one(claims_cited._over(low, low)) == "undecided"
    ratio = claims_cited._over(low, bounded)
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((0.25, 0, 0.3125))


def test_gains_over_the_placebo() -> None:
    gain = Estimate(90.0, 40.0, 140.0, 10)
    assert claims_remedies.gained(gain, 0.01, 800) == "holds"
    assert claims_remedies.gained(replace(gain, value=-90.0), 0.01, 800) == "refuted"
    assert claims_remedies.gained(replace(gain, high=70.0), 0.3, 800) == "not seen"
    assert claims_remedies.gained(gain, 0.3, 800) == "undecided"
    assert claims_remedies.too_late("holds", ["holds", "undecided"]) == "refuted"
    assert claims_remedies.too_late("undecided", ["undecided"]) == "no room"
    assert claims_remedies.too_late("not seen", ["holds"]) == "holds"
    assert claims_remedies.too_late("undecided", ["holds"]) == "undecided"
    assert claims_signs.change(np.array([1.0] * 5 + [3.0] * 3), 8) == 2
    assert np.isnan(claims_signs.change(np.ones(8), 7))


def test_the_quantized_edge_is_read_as_the_claim_would_have_it() -> None:
    edges = {("GD", "one"): (1.5, 1.7), ("GD", "two"): (0.9, 1.1), ("GD", "wide"): (0.5, 2.5)}
    found: Any = SimpleNamespace(
        readings={at: [SimpleNamespace(measured=m) for m in ms] for at, ms in edges.items()},
        exact_edge=lambda group, label: 2.0,
    )
    told = claims_cited.told
    first = told(found, ("GD", "one"), ("GD", "two"))
    assert first.startswith("GD, two 0.50 [0.45, 0.55] (n 2) against GD, one 0.80 [0.75, 0.85]")
    assert first.endswith(": lower, as the claim would have it")
    assert told(found, ("GD", "two"), ("GD", "one")).endswith(": higher, against the claim")
    assert told(found, ("GD", "one"), ("GD", "wide")).endswith(": not told apart")
    assert told(found, None, ("GD", "two")).endswith("against 1: lower, as the claim would have it")


# ---------------------------------------------------------------- a watched pair


def test_a_watched_exact_pair_does_not_part_and_is_the_run_itself() -> None:
    cfg = mxsim.ProxyConfig(width=8, depth=2, batch=8, steps=25, eval_samples=16)
    record = Watch(cfg, mxsim.scheme("exact"), claims.RULES["script"], 10).run()
    assert not record.arrays["zeta_script"].any()
    losses = mxsim.train(cfg, mxsim.scheme("exact")).losses.astype(np.float32)
    assert np.array_equal(record.arrays["losses"], np.stack([losses, losses], axis=1))
    assert record.arrays["watch_steps"].tolist() == [0, 10, 20]
    assert record.arrays["saturated_ln_gamma"].shape == (3, 2, 2)
    mx = Watch(cfg, mxsim.scheme("paper_code"), claims.RULES["script"], 10).run()
    assert mx.arrays["zeta_script"].max() > 0
    assert np.allclose(mx.arrays["zeta"] ** 2, mx.arrays["zeta_script"])
    share = mx.arrays["saturated_ln_output"][0]
    assert (share[0] == share[1]).all()  # both start from the same weights
    assert 0 < share[0].max() < 0.2


# ---------------------------------------------------------------- end to end


def test_the_page_has_all_claims_with_numbers_and_says_what_is_missing(root: Path) -> None:
    text = (root / "claims_smoke" / "claims.md").read_text()
    for number in range(1, 13):
        assert f"\n## {number}. " in text
        assert f"\n| {number} | " in text
    results = claims.load("smoke", root)
    assert f"{results.runs} runs" in text
    for study in ("interventions", "touchy_settings", "quantized_edge", "phase_diagrams"):
        assert any(
            f"-m studies.{study}" in line and "missing" in line for line in text.splitlines()
        )
    assert "python -m studies.claims --tier smoke --page claims.md" in text
    assert str(root) not in text
    assert text == page(results, root / "claims_smoke" / "claims.md")
    for line in text.splitlines():  # a bar in a cell would be a column more
        if line.startswith("|"):
            assert line.count("|") in (7, 8)


def test_counts_on_the_page_are_the_records_own(root: Path) -> None:
    results = claims.load("smoke", root)
    first = claims_spikes.spikes(results).findings[0]
    pairs = [
        pair
        for label in results.design.problems
        for pair in results.pairs("paper_text", TASKS[0], label).values()
    ]

    def spiked(key: Key) -> bool:
        meta = results.records[key].meta
        return meta["status"] == "nonfinite" or bool(meta["spikes"])

    both = sum(spiked(mx) and spiked(exact) for mx, exact in pairs)
    assert first.estimate.n == len(pairs) == 2 * len(results.design.problems)
    assert first.detail.startswith(f"{both} in both")
    assert 0 < both < len(pairs)


def test_slow_learning_is_no_failure_and_a_spike_that_is_left_neither() -> None:
    def record(status: str, length: int | None = None, spikes: bool = True) -> Record:
        meta = {
            "status": status,
            "first_bad_step": 499,
            "rule": {"patience": 200},
            "spikes": [{"step": 40, "length": length}] if spikes else [],
        }
        return Record("made up", {}, meta)

    assert claims.failed_at(record("diverged", spikes=False)) is None  # never learned
    assert claims.failed_at(record("diverged", 30)) is None  # nor this one, which spiked early
    assert claims.failed_at(record("diverged", 201)) == 40
    assert claims.failed_at(record("diverged", None)) == 40
    assert claims.failed_at(record("nonfinite", 30)) == 499


def test_a_missing_run_is_an_error(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="results are missing"):
        claims.load("smoke", tmp_path)
