"""The noisy quadratic: runs and thresholds against closed forms, the study from end to end."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from scipy import special, stats

from figures import noisy_quadratic as figure
from mxsim.boundary import estimate
from mxsim.theory.model import Gains
from studies import noisy_quadratic as study
from studies.noisy_quadratic import THRESHOLDS, Column, Design, ends, final_log


def exponent(rate: float, mu: float, s2: float) -> float:
    """E log|N(m, v)|, m = 1 - rate (1 + mu), v = rate^2 s2, as a series.

    (N / sqrt(v))^2 is chi-squared with 1 + 2 J degrees of freedom, J Poisson of mean m^2 / 2v, and
    E log chi^2_n = digamma(n / 2) + log 2.
    """
    m, v = 1 - rate * (1 + mu), rate**2 * s2
    weights = stats.poisson.pmf(np.arange(2000), m * m / v / 2)
    logs = special.digamma(0.5 + np.arange(2000)) + math.log(2)
    return 0.5 * math.log(v) + 0.5 * float(weights @ logs)


def test_thresholds_of_the_reference_case() -> None:
    mean, square, surely, *again = ends(Gains("gaussian", 0.0, 0.25), 5.0)
    assert mean == pytest.approx(2.0)
    assert square == pytest.approx(1.6)
    assert surely == pytest.approx(2.26, abs=0.005)
    assert np.isnan(again).all()


@pytest.mark.parametrize("mu", [-0.2, 0.0, 0.2])
def test_gaussian_gains_have_one_boundary_and_it_is_the_derived_one(mu: float) -> None:
    for s2 in (0.1, 0.4, 0.75, 0.8, 1.0):
        surely = ends(Gains("gaussian", mu, s2), 5.0)[2]
        # The derivation aims at 1e-9; its slope there is above 1.
        assert abs(exponent(surely, mu, s2)) < 1e-8
        signs = [exponent(rate, mu, s2) < 0 for rate in np.geomspace(0.1, 30, 400)]
        assert np.abs(np.diff(signs)).sum() == 1
        assert signs[0]


def test_two_point_gains_have_a_gap() -> None:
    # With gains 1 - s, 1 + s the exponent is log|q| / 2, q = (1 - eta)^2 - s2 eta^2.  q = 1 at
    # 2 / (1 - s2); q = -1 at 2 / (1 +- sqrt(2 s2 - 1)), from s2 = 1/2 on.
    for s2 in (0.1, 0.4):
        assert ends(Gains("two_point", 0.0, s2), 5.0)[2] == pytest.approx(2 / (1 - s2))
    for s2, high in ((0.6, 6.0), (0.8, 12.0)):
        root = math.sqrt(2 * s2 - 1)
        found = ends(Gains("two_point", 0.0, s2), high)[2:]
        np.testing.assert_allclose(found, [2 / (1 + root), 2 / (1 - root), 2 / (1 - s2)], rtol=1e-8)
    # In the study's range the curves of all its columns rise: no second stable interval.
    for tier in study.DESIGNS.values():
        for gains in tier.gains:
            _, _, surely, again, _ = ends(gains, tier.search.high)
            assert tier.search.low < surely < tier.search.high
            assert np.isnan(again)


def test_a_run_is_a_product_of_its_own_gains() -> None:
    # Equal gains: T log|1 - rate (1 + mu)|.
    steady = Column(Gains("gaussian", 0.2, 0.0), 50)
    assert final_log(steady, 1.5, 3) == pytest.approx(50 * math.log(0.8))
    assert final_log(Column(Gains(), 50), 1.0, 0) == -math.inf
    # Two-point gains: a number k of the T factors is the one, the rest the other; k belongs to the
    # seed and is the same at every rate.
    column = Column(Gains("two_point", 0.0, 0.25), 400)
    counts = []
    for seed in range(20):
        k = []
        for rate in (0.7, 3.0):
            one, other = math.log(abs(1 - 0.5 * rate)), math.log(abs(1 - 1.5 * rate))
            k.append((final_log(column, rate, seed) - 400 * other) / (one - other))
        assert k[0] == pytest.approx(round(k[0]), abs=1e-6)
        assert k[0] == pytest.approx(k[1], abs=1e-6)
        counts.append(k[0])
    assert abs(np.mean(counts) - 200) < 4 * math.sqrt(400 / 4 / 20)
    assert len(set(np.round(counts))) > 5  # seeds differ
    # ... and so do columns and repetitions, while a run is the same each time.
    gains = Gains("gaussian", 0.0, 0.25)
    chosen = [Column(gains, 400), Column(gains, 400, repeat=1), Column(Gains("gaussian"), 400)]
    values = [final_log(each, 3.0, seed) for each in chosen[:2] for seed in range(5)]
    assert len(set(values)) == 10
    assert values == [final_log(each, 3.0, seed) for each in chosen[:2] for seed in range(5)]
    assert final_log(chosen[2], 3.0, 0) == final_log(chosen[2], 3.0, 1)  # no variance, one value


def test_gaussian_runs_grow_at_the_exponent() -> None:
    # Mean over 100 runs of 1000 steps.
    column = Column(Gains("gaussian", -0.2, 0.4), 1000)
    for rate in (1.0, 2.0, 4.0):
        grown = [final_log(column, rate, seed) / 1000 for seed in range(100)]
        error = float(np.std(grown, ddof=1)) / 10
        assert abs(np.mean(grown) - exponent(rate, -0.2, 0.4)) < 4 * error


def test_half_of_runs_fail_at_the_almost_sure_threshold() -> None:
    gains, runs = Gains("gaussian", 0.0, 0.25), 400
    _, square, surely, *_ = ends(gains, 5.0)
    column = Column(gains, 2000)
    failed = [
        sum(final_log(column, rate, seed) > 0 for seed in range(runs))
        for rate in (square, surely / 1.1, surely, surely * 1.1)
    ]
    # log|x_T| has drift T * slope * log(rate / threshold), slope above 1.5, against a standard
    # deviation below 1.2 sqrt(T): 10 % are 5 of them.
    assert failed[0] == failed[1] == 0
    assert failed[3] == runs
    assert abs(failed[2] - runs / 2) < 4 * math.sqrt(runs / 4)


def test_the_traced_boundary_is_the_almost_sure_one() -> None:
    laptop = study.DESIGNS["laptop"]
    assert len(laptop.gains) == 16
    design = Design(laptop.gains, 2000, repeats=1, curve=2)
    arrays = study.run(design).arrays
    whole = arrays["grid_failed"].size
    assert whole == 16 * 16 * 8
    assert len(arrays["traced_failed"]) <= whole / 3
    held, near = dict.fromkeys(THRESHOLDS, 0), dict.fromkeys(THRESHOLDS, 0)
    for c in range(16):
        mine = arrays["traced_column"] == c
        rates, failed = arrays["traced_rate"][mine].tolist(), arrays["traced_failed"][mine].tolist()
        found = estimate(design.search, list(zip(rates, failed, strict=True)))
        assert found.high <= design.search.width * found.low
        derived = arrays["derived"][c]
        for name, value in zip(THRESHOLDS, derived, strict=False):
            held[name] += int(found.low <= value <= found.high)
            near[name] += int(abs(math.log(value / derived[2])) <= math.log(design.search.width))
    assert held["almost sure"] >= 16 * 0.95 - 4 * math.sqrt(16 * 0.95 * 0.05)
    # The others lie in an interval only where they are near the almost-sure one, or by a miss.
    for name in ("mean", "mean square"):
        assert near[name] < 16  # they can be told apart
        assert held[name] <= near[name] + 16 - held["almost sure"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    assert study.main(study.Arguments(tier="smoke", results=folder)) == 0
    return folder


def test_what_is_stored_is_what_is_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = study.load("smoke", root)
    design = results.design
    assert [len(column) for column in results.traced] == [design.repeats] * len(design.gains)
    counts = np.bincount(results.arrays["traced_column"])
    assert [sum(t.n for t in column) for column in results.traced] == counts.tolist()
    assert {t.n for t in results.grid} == {design.grid_rates * design.grid_seeds}
    inside = [
        t.low <= derived[2] <= t.high
        for column, derived in zip(results.traced, results.arrays["derived"], strict=True)
        for t in column
    ]
    assert results.within("almost sure") == (sum(inside), len(inside))
    # A second start computes nothing and prints the same.
    assert study.main(study.Arguments(tier="smoke", results=root)) == 0
    out = capsys.readouterr().out
    assert "stored" in out
    assert f"almost sure in {sum(inside)} of {len(inside)} intervals" in out


def test_the_figure_reads_results_only(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "one.png", tmp_path / "two.png"
    for path in (out, again):
        assert figure.main(figure.Arguments("smoke", results=root, out=path)) == 0
    assert out.stat().st_size > 10_000
    assert out.read_bytes() == again.read_bytes()
    assert figure.main(figure.Arguments("smoke", results=tmp_path, out=out)) == 1
    assert "python -m studies.noisy_quadratic" in capsys.readouterr().err


def test_a_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = study.Arguments(tier="smoke", results=tmp_path, dry_run=True)
    assert study.main(arguments) == 0
    assert "about" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
