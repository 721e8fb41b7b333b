"""The edge-of-stability study from end to end, on a small network that gets there in a second."""

import contextlib
import io
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import scipy.linalg

import mxsim
from figures import edge_of_stability as figure
from mxsim.curvature import hvp
from mxsim.store import Store, result_id
from mxsim.threads import one_blas_thread
from studies import edge_of_stability as study


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of the smoke tier."""
    folder = tmp_path_factory.mktemp("results")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert study.main(study.Arguments(tier="smoke", results=folder)) == 0
    assert "heavy ball" in said.getvalue()
    return folder


def test_the_edge_is_where_theory_has_it(root: Path) -> None:
    """Here within 10 %: in so small a network several eigenvalues crowd at the edge, and the mean
    of their largest is off by more than at the size of the laptop tier, which answers to 5 %.  The
    three numbers differ by factors.
    """
    results = study.load("smoke", root)
    expected = {"gradient descent": 2.0, "heavy ball": 3.8, "Adam": 38.0}
    assert [arm.name for arm in results.design.arms] == list(expected)
    for arm in results.design.arms:
        assert study.theory(results, arm) == pytest.approx(expected[arm.name])
        assert results.stopped[arm] == 0
        late = study.second_half(results, arm, "sharpness")
        np.testing.assert_allclose(late.mean(axis=1), expected[arm.name], rtol=0.1)
        assert (late.std(axis=1) < 0.1 * expected[arm.name]).all()  # it hovers
        losses = results.by_arm[arm]["losses"]
        assert (losses[:, -100:].mean(axis=1) < 0.05 * losses[:, 0]).all()
    along = study.second_half(results, results.design.arms[0], "step_curvature")
    np.testing.assert_allclose(np.median(along, axis=1), 2.0, rtol=study.WITHIN)


@pytest.mark.parametrize("name", ["gradient descent", "Adam"])
def test_what_is_stored_is_what_a_dense_hessian_says(root: Path, name: str) -> None:
    """At the first measurement, by a dense generalized eigenproblem."""
    results = study.load("smoke", root)
    design = results.design
    arm = next(arm for arm in design.arms if arm.name == name)
    seed = 1
    cfg = replace(design.base, seed=seed, **asdict(arm))
    training = mxsim.start(cfg, mxsim.scheme("exact")).advance(design.every)
    x, y = mxsim.make_batches(cfg, mxsim.make_teacher(cfg)).at(0)
    hessian = hvp(training.params, x, y, cfg)
    with one_blas_thread():
        matrix = np.array([hessian(unit) for unit in np.eye(hessian.size)])
    p = np.ones(hessian.size)
    if name == "Adam":
        p = np.sqrt(training.optimizer.second / (1 - 0.999**design.every)) + 1e-8
    with one_blas_thread():
        last = hessian.size - 1
        top = scipy.linalg.eigh(
            (matrix + matrix.T) / 2, np.diag(p), eigvals_only=True, subset_by_index=(last, last)
        )
    before = training.flat.copy()
    update = training.advance(1).flat - before
    stored = {key: values[seed] for key, values in results.by_arm[arm].items()}
    assert stored["steps"][0] == design.every
    assert stored["converged"][0] == 1
    assert abs(stored["sharpness"][0] - top[0]) <= stored["residual"][0] + 1e-9 * top[0]
    assert stored["residual"][0] <= study.TOLERANCE * top[0]
    along = update @ matrix @ update / (update @ (p * update))
    assert stored["step_curvature"][0] == pytest.approx(along, rel=1e-9)


def test_leading_eigenvalues_are_those_of_the_dense_matrix() -> None:
    cfg = mxsim.ProxyConfig(width=4, depth=1, batch=8, dtype="float64")
    training = mxsim.start(cfg, mxsim.scheme("exact")).advance(3)
    x, y = mxsim.make_batches(cfg, mxsim.make_teacher(cfg)).at(0)
    hessian = hvp(training.params, x, y, cfg)
    matrix = np.array([hessian(unit) for unit in np.eye(hessian.size)])
    p = np.exp(np.random.default_rng(0).standard_normal(hessian.size))
    expected = scipy.linalg.eigh((matrix + matrix.T) / 2, np.diag(p), eigvals_only=True)[::-1]
    found = study.leading(hessian, p, 1e-9)
    np.testing.assert_allclose(found, expected[: study.LEADING], rtol=1e-6)


def test_a_run_that_blows_up_is_a_result() -> None:
    design = study.DESIGNS["smoke"]
    wild = replace(design.base, **asdict(study.Arm("sgd", 1e6, 100)))
    record = study.run(study.Cell(wild, design.every))
    assert record.meta["bad_step"] is not None
    assert np.isnan(record.arrays["sharpness"][-1])
    assert np.isnan(record.arrays["leading"]).all()


def test_the_figure_reads_results_only_and_fails_on_a_missing_one(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, again = tmp_path / "picture.png", tmp_path / "again.png"
    for path in (out, again):
        assert figure.main(figure.Arguments("smoke", results=root, out=path)) == 0
    assert out.stat().st_size > 10_000
    assert out.read_bytes() == again.read_bytes()
    assert figure.main(figure.Arguments("smoke", results=tmp_path, out=out)) == 1
    assert "python -m studies.edge_of_stability" in capsys.readouterr().err


def test_a_dry_run_counts_what_is_left_and_writes_nothing(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert study.main(study.Arguments(tier="smoke", results=tmp_path, dry_run=True)) == 0
    assert "6 runs, 6 to do: about" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    assert study.main(study.Arguments(tier="smoke", results=root, dry_run=True)) == 0
    assert "6 runs, 0 to do" in capsys.readouterr().out


def test_every_run_has_an_id_of_its_own() -> None:
    ids = [
        result_id(cell) for tier in study.DESIGNS.values() for cell in study.cells(tier).values()
    ]
    assert len(set(ids)) == len(ids) == 6 + 20
    assert not Store(Path("nowhere")).has(ids[0])
