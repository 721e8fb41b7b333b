"""The study of the noise floor in its smoke tier; what it measures, against the instruments."""

import contextlib
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import mxsim
from figures import noise_floor as figure
from mxsim.mechanism import forward_error
from mxsim.precision import PrecisionScheme, precision_of
from mxsim.proxy import forward, workspace
from mxsim.store import Store, result_id
from mxsim.systematic import bias_over_batches
from studies import noise_floor as study
from studies.noise_floor import DESIGNS, Series, threshold
from studies.noise_floor_point import ARMS, MEAN, SCHEMES, VARIANCE, measure

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=32, steps=25, lr=1e-2, eval_samples=32)
SIZES = (32, 64, 256)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    with contextlib.redirect_stdout(io.StringIO()):
        assert study.main(study.Arguments(tier="smoke", results=folder)) == 0
    return folder


def test_one_point_against_the_instruments() -> None:
    params = mxsim.train(CFG, PrecisionScheme()).params
    x, y = mxsim.make_batches(replace(CFG, batch=256), mxsim.make_teacher(CFG)).at(10**6)
    found = measure(params, x, y, CFG, SIZES)
    cut = [(x[i : i + 32], y[i : i + 32]) for i in range(0, 256, 32)]
    for s, scheme in enumerate(SCHEMES.values()):
        # The gradient of all rows at once is the mean of the chunks', wgrad's blocks included.
        whole = mxsim.gradient_bias(params, x, y, CFG, scheme).zeta
        assert found["zeta"][s][2] == pytest.approx(whole, rel=1e-4)
        each = [mxsim.gradient_bias(params, *batch, CFG, scheme) for batch in cut]
        squares = [[(r.zeta * r.norm) ** 2 for r in each], [r.norm**2 for r in each]]
        rms = np.sqrt(np.sum(squares[0]) / np.sum(squares[1]))
        assert found["zeta"][s][0] == pytest.approx(rms, rel=1e-4)
        over = bias_over_batches(params, cut, CFG, scheme)["all"]
        ratio = found["error"][s][MEAN] / found["gradient"][MEAN]
        assert ratio == pytest.approx(over.systematic_squared.value, rel=1e-3)
        noise = found["error"][s][VARIANCE] / 32 / found["gradient"][MEAN]
        assert noise == pytest.approx(over.noise.value**2, rel=1e-3)
        signal = found["gradient"][MEAN] / (found["gradient"][MEAN] + found["gradient"][1] / 32)
        assert signal == pytest.approx(over.signal.value, rel=1e-3)
    prediction = forward(
        params, x, CFG, precision_of(PrecisionScheme(), 2), workspace(CFG, 256, x.dtype)
    ).astype(np.float64)
    for s, scheme in enumerate(SCHEMES.values()):
        relative = forward_error(params, x, CFG, scheme)[-1]
        assert found["added"][s] == pytest.approx(relative**2 * np.mean(prediction**2), rel=1e-4)
    # The excess is the loss less what layer norm forgets and the label noise, on these samples:
    # their cross terms with the rest are sums of 256 * 32 terms.
    loss, forgotten = np.mean((prediction - y) ** 2), np.mean(x.mean(axis=1) ** 2)
    cross = 2 * np.sqrt(found["excess"] * forgotten / 256)
    assert abs(found["excess"] - (loss - forgotten)) < 4 * cross + CFG.label_noise**2
    assert found["excess"] > 0


def test_the_forward_part_of_the_error_by_the_chain_rule() -> None:
    """The exact gradient is affine in the residual: at a residual of delta alone it is the part."""
    cfg = replace(CFG, depth=1)
    params = mxsim.train(cfg, PrecisionScheme()).params
    x, y = mxsim.make_batches(replace(cfg, batch=64), mxsim.make_teacher(cfg)).at(10**6)
    found = measure(params, x, y, cfg, (32, 64))
    scheme = mxsim.scheme("ln_only_e4m3")
    ws = workspace(cfg, 64, x.dtype)
    exact, rounded = (
        forward(params, x, cfg, precision_of(each, 1), ws).copy()
        for each in (PrecisionScheme(), scheme)
    )
    zero = mxsim.loss_and_grads(params, x, exact, cfg, PrecisionScheme())[1]
    moved = mxsim.loss_and_grads(params, x, exact - (rounded - exact), cfg, PrecisionScheme())[1]
    size = sum(float(np.square(block[k], dtype=np.float64).sum()) for block in moved for k in block)
    assert sum(float(np.abs(block[k]).sum()) for block in zero for k in block) == 0
    # In the estimates of one sample |its mean|^2 = |E|^2 + tr Cov / 64.
    mean, variance = found["forward"][0]
    assert mean + variance / 64 == pytest.approx(size, rel=1e-3)


def test_threshold_by_hand() -> None:
    e = np.array([4.0, 1.0, 3.0, 2.0])
    assert threshold(e, e < 2.5) == pytest.approx(np.sqrt(6))
    assert threshold(e, e < 0) == 0
    assert threshold(e, e > 0) == np.inf
    noisy = np.array([False, True, False, True, True, False])  # at 1 .. 6: best below 5, one off
    assert threshold(np.arange(1.0, 7.0), noisy[[1, 0, 3, 4, 2, 5]]) == pytest.approx(np.sqrt(20))


def test_designs() -> None:
    laptop = DESIGNS["laptop"]
    assert (laptop.base.width, laptop.base.depth, laptop.base.lr) == (64, 4, 5e-3)
    assert laptop.sizes == (64, 256, 1024, 4096)
    assert {s.batch for s in laptop.settings if s.schedule == "constant"} == set(laptop.sizes)
    assert any(s.schedule == "cosine" for s in laptop.settings)
    ids = [result_id(c) for c in study.cells(laptop)]
    assert len(set(ids)) == len(ids) == laptop.seeds * len(laptop.settings)
    config = laptop.config(laptop.settings[-1], 3)
    assert (config.schedule, config.steps, config.seed) == ("cosine", 800, 3)


def test_tables_say_what_the_records_hold(root: Path) -> None:
    results = study.load("smoke", root)
    design = results.design
    points: Series = study.series(results, "gemm_e4m3")
    assert points.excess.shape == (3, 5)  # seeds; moments of both runs
    assert points.zeta.shape == (3, 5, 3)
    ln = study.series(results, "ln_only_e4m3")
    record = Store(root / study.STUDY).load(result_id(study.cells(design)[1]))  # cosine, seed 0
    np.testing.assert_array_equal(points.excess[0, 2:], record.arrays["excess"])
    np.testing.assert_array_equal(points.zeta[0, 2:], record.arrays["zeta"][:, 1])
    assert results.noise == pytest.approx(1 / 32 + 25e-6)
    # The isotropic law by hand at one point: d = 32, batch 64.
    e, q2 = points.excess[1, 3], points.added[1, 3]
    value, crossing = study.predicted(results, points, "isotropic")
    expected = np.sqrt(q2 * 97 / (e * 97 + results.noise * 32))
    assert value[1, 3, 1] == pytest.approx(expected)
    assert crossing[1, 3, 1] == pytest.approx(max(q2 - results.noise * 32 / 97, 0))
    # Measured at the point, the law misses the variance of eps alone (at the chunks' own size, of
    # which the moments are made).
    own = points.zeta / study.predicted(results, points, "at the point")[0]
    f = points.features
    law = 4 / 32 * points.added * np.add(f.error, f.trace) / 32  # of a batch of 32
    off = (points.error_mean + points.variance * law) / (points.error_mean + law)
    np.testing.assert_allclose(own[..., 0] ** 2, off, rtol=1e-5)
    # The other seeds' three numbers are not this seed's.
    others = study.typical(points.features, [1, 2])
    assert others.trace == np.median(np.asarray(points.features.trace)[1:])
    features = study.features_table(results)
    assert len(features.columns) == 19
    assert all(column.header for column in features.columns)
    last = next(c for c in features.columns if c.header == "ln\nB*")
    critical = (results.noise / ln.added - 1) * np.divide(ln.features.trace, ln.features.error) - 1
    assert float(str(list(last.cells)[-1])) == pytest.approx(np.median(critical[:, -1]), abs=0.5)
    stream = io.StringIO()
    study.print_tables(results, Console(file=stream, width=190))
    assert "…" not in stream.getvalue()
    assert "6 runs, 0 of them stopped early" in stream.getvalue()
    for name in ARMS:
        assert name in stream.getvalue()


def test_the_figure_reads_results_and_fails_on_a_missing_one(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "picture.png"
    arguments = figure.Arguments("smoke", results=root, out=out)
    assert figure.main(arguments) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    out.unlink()
    victim = Store(root / study.STUDY).path(result_id(study.cells(DESIGNS["smoke"])[2]))
    kept = victim.read_bytes()
    victim.unlink()
    try:
        assert figure.main(arguments) == 1
        assert "python -m studies.noise_floor" in capsys.readouterr().err
        assert not out.exists()
    finally:
        victim.write_bytes(kept)


def test_the_second_time_everything_is_stored(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {p: p.stat().st_mtime_ns for p in (root / study.STUDY).glob("*.npz")}
    assert len(files) == 6
    assert study.main(study.Arguments(tier="smoke", results=root)) == 0
    assert "6 runs are stored" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in files} == files


def test_a_dry_run_computes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert study.main(study.Arguments("smoke", tmp_path, dry_run=True)) == 0
    assert "6 runs, 6 to do" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
