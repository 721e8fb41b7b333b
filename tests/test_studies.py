"""The smaller studies from end to end, on designs that take seconds."""

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import mxsim
import mxsim.curvature
from figures import bias_by_site as site_figure
from figures import bias_vs_scale as scale_figure
from figures import gamma_cliff as cliff_figure
from figures import quantized_edge as edge_figure
from figures import threshold_prediction as prediction_figure
from mxsim.attribution import GROUPS
from mxsim.executors import SERIAL
from mxsim.progress import execute
from mxsim.store import Record, Store, result_id
from mxsim.sweep import Job, load_points, survey
from studies import (
    bias_by_site,
    bias_vs_scale,
    gamma_cliff,
    quantized_edge,
    threshold_prediction,
)

STUDIES: list[Any] = [
    (gamma_cliff, cliff_figure),
    (bias_by_site, site_figure),
    (bias_vs_scale, scale_figure),
    (quantized_edge, edge_figure),
    (threshold_prediction, prediction_figure),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of all smoke tiers."""
    folder = tmp_path_factory.mktemp("results")
    for study, _ in STUDIES:
        extra = {"workers": 1} if hasattr(study.Arguments(), "workers") else {}
        with contextlib.redirect_stdout(io.StringIO()):
            assert study.main(study.Arguments(tier="smoke", results=folder, **extra)) == 0
    return folder


@pytest.mark.parametrize(("study", "figure"), STUDIES)
def test_figures_read_results_only_and_fail_on_a_missing_one(
    study: Any, figure: Any, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "picture.png"
    assert figure.main(figure.Arguments("smoke", results=root, out=out)) == 0
    assert out.stat().st_size > 10_000
    again = tmp_path / "again.png"
    assert figure.main(figure.Arguments("smoke", results=root, out=again)) == 0
    assert out.read_bytes() == again.read_bytes()
    assert figure.main(figure.Arguments("smoke", results=tmp_path, out=out)) == 1
    assert f"python -m studies.{study.STUDY}" in capsys.readouterr().err


@pytest.mark.parametrize("study", [study for study, _ in STUDIES])
def test_a_dry_run_writes_nothing(
    study: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main(study.Arguments(tier="smoke", results=tmp_path, dry_run=True)) == 0
    assert "about" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_the_cliff_is_where_the_quantizer_says(root: Path) -> None:
    results = gamma_cliff.load("smoke", root)
    design, means = results.design, results.design.means
    assert 1.0 in means
    at = int(np.abs(means - 0.97).argmin())
    rng = np.random.default_rng(0).standard_normal((design.draws, design.width))
    gamma = (means[at] + 0.01 * rng[1]).astype(np.float32)
    stats = mxsim.quantize(gamma, "mxfp6_e2m3", scale_rule="ceil").stats
    assert stats is not None
    found = results.bias["mxfp6_e2m3", "ceil"][design.sds.index(0.01), at, 1]
    assert found == stats.gain - 1
    equal = results.bias["mxfp8_e4m3", "floor"][0].mean(axis=-1)
    np.testing.assert_allclose(equal[means == 1.0], 0, atol=1e-12)
    below = (means > 0.93) & (means < 1)
    np.testing.assert_allclose(equal[below], 0.875 / means[below] - 1, rtol=1e-6)


def test_shares_of_sites_sum_to_one(root: Path) -> None:
    results = bias_by_site.load("smoke", root)
    for arrays in results.by_trajectory.values():
        share = bias_by_site.shapley_share(arrays)
        assert share.shape == (2, 3, len(GROUPS))
        np.testing.assert_allclose(share.sum(axis=2), 1, rtol=1e-9)
        total = arrays["shapley"].sum(axis=3)
        np.testing.assert_allclose(total, arrays["whole"] ** 2, rtol=1e-9)
    design = results.design
    # the first moment of the exact run of seed 1, by hand
    cfg = mxsim.ProxyConfig(width=32, depth=2, batch=32, steps=12, eval_samples=32, seed=1)
    training = mxsim.start(cfg, mxsim.scheme("exact")).advance(design.moments[0])
    x, y = mxsim.make_batches(cfg, mxsim.make_teacher(cfg)).at(bias_by_site.FRESH)
    bias = mxsim.gradient_bias(training.params, x, y, cfg, mxsim.scheme("all_e4m3"))
    assert results.by_trajectory["exact"]["whole"][1, 0, 0] == bias.zeta


def test_zeta_by_scale_is_that_of_the_records(root: Path) -> None:
    results = bias_vs_scale.load("smoke", root)
    design = results.design
    fields = bias_vs_scale.rows(results)
    assert [word for word, _, _ in fields["width"]] == ["32", "64"]
    assert [word for word, _, _ in fields["block size"]] == ["8", "16", "32", "64"]
    assert len(fields["format"]) == 6
    cfg = mxsim.ProxyConfig(width=64, depth=2, batch=32, steps=40, eval_samples=32, seed=1)
    run = mxsim.train(cfg, mxsim.scheme("exact"), probe=bias_vs_scale.plan(design, False))
    assert run.probes is not None
    label = run.probes.labels.index("ln_only mxfp8_e4m3")
    expected = run.probes.zeta[1:, label, 0].astype(np.float32)  # step 0 is left out
    found = results.zeta[("width", 64), "ln_only mxfp8_e4m3"][1]
    np.testing.assert_array_equal(found, expected)


def test_predictions_are_thresholds_over_sharpness(root: Path) -> None:
    results = threshold_prediction.load("smoke", root)
    for arm, edge in (("gradient descent", 2.0), ("heavy ball", 3.8), ("Adam", 38.0)):
        sharpness = results.arrays[arm]["sharpness"]
        assert sharpness.shape == (2, 2)
        for theory in ("mean", "mean square", "descent"):  # of exact gradients all say the same
            found = results.critical(arm, "exact", theory)
            np.testing.assert_allclose(found, edge / sharpness, rtol=1e-6)
        almost = results.predicted(arm, "exact", "almost surely", 1)
        assert almost.value == pytest.approx(np.median(edge / sharpness[:, 1]), rel=1e-3)
        a = results.arrays[arm]
        j = results.design.schemes.index("all_e2m1")
        expected = edge * a["alpha"][..., j] / (a["alpha"] ** 2 + a["rho"] ** 2)[..., j] / sharpness
        np.testing.assert_allclose(results.critical(arm, "all_e2m1", "descent"), expected)
        value = results.predicted(arm, "all_e2m1", "descent", 1).value
        assert value == pytest.approx(np.median(expected[:, 1]))
        traced = results.thresholds[arm, "all_e2m1"].value
        ratio = results.ratio(arm, "all_e2m1", "descent", 1)
        np.testing.assert_allclose(ratio, value / traced)
    cfg = threshold_prediction.config_of(results.design, results.design.arms[0])
    training = mxsim.start(cfg, mxsim.scheme("exact")).advance(5)
    x, y = mxsim.held_out(cfg, mxsim.make_teacher(cfg))
    hessian = mxsim.curvature.hvp(training.params, x, y, cfg)
    top = np.linalg.eigvalsh(np.stack([hessian(e) for e in np.eye(hessian.size)]))[-1]
    assert results.arrays["gradient descent"]["sharpness"][0, 1] == pytest.approx(top, rel=1e-4)


@dataclass(frozen=True)
class Toy:
    name: str


def test_interrupted_jobs_are_gone_on_with(tmp_path: Path) -> None:
    store, done = Store(tmp_path / "jobs"), []
    console = Console(file=io.StringIO())
    interrupted = [True]

    def make(toy: Toy) -> Record:
        if toy.name == "two" and interrupted.pop():
            raise KeyboardInterrupt
        done.append(toy.name)
        return Record(result_id(toy), {"a": np.zeros(1)}, {"toy": toy.name})

    jobs = [Job(Toy(name), make, name) for name in ("one", "two")]
    assert not execute(jobs, store, SERIAL, console)
    interrupted.append(False)
    assert execute(jobs, store, SERIAL, console)
    assert done == ["one", "two"]
    metas = [record.meta for record in load_points(jobs, store).values()]
    assert [(meta["toy"], meta["status"]) for meta in metas] == [("one", "ok"), ("two", "ok")]


def test_a_job_that_raises_is_stored_as_failed_and_tried_again(tmp_path: Path) -> None:
    store, console = Store(tmp_path / "jobs"), Console(file=io.StringIO())

    def broken(toy: Toy) -> Record:
        raise ZeroDivisionError(toy.name)

    job = Job(Toy("one"), broken, "one")
    assert not execute([job], store, SERIAL, console)
    stored = store.load(job.id).meta
    assert (stored["status"], stored["name"]) == ("failed", "one")
    with pytest.raises(FileNotFoundError, match="1 of 1"):
        load_points([job], store)
    assert survey([job], store).missing == (job,)
