"""Schemes in lockstep: each is its own run, and the distances are what they say."""

import signal
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mxsim

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=32, steps=10, lr=1e-2, eval_samples=64)
SCHEMES = {name: mxsim.scheme(name) for name in ("exact", "all_e4m3", "all_e2m1")}


def test_each_scheme_trains_as_if_alone() -> None:
    pair = mxsim.PairedRun(CFG, SCHEMES).advance()
    for k, (name, scheme) in enumerate(SCHEMES.items()):
        alone = mxsim.train(CFG, scheme)
        np.testing.assert_array_equal(pair.distances().loss[:, k], alone.losses)
        assert pair.trainings[name].finish().eval_loss == alone.eval_loss


def test_distances_by_hand() -> None:
    pair = mxsim.PairedRun(CFG, SCHEMES)
    exact = mxsim.start(CFG, SCHEMES["exact"])
    other = mxsim.start(CFG, SCHEMES["all_e2m1"])
    begin = exact.flat.astype(np.float64)
    norm = np.linalg.norm
    for step in range(6):
        pair.advance(1)
        w, v = exact.flat.astype(np.float64), other.flat.astype(np.float64)
        exact.advance(1)
        other.advance(1)
        g, h = exact.last_gradient.astype(np.float64), other.last_gradient.astype(np.float64)
        d = pair.distances()
        assert d.weights[step, 2] == pytest.approx(norm(v - w) / norm(w), rel=1e-12)
        assert d.gradient[step, 2] == pytest.approx(norm(h - g) / norm(g), rel=1e-12)
        assert d.gradient_cos[step, 2] == pytest.approx(g @ h / norm(g) / norm(h), rel=1e-12)
        assert d.moved[step, 0] == pytest.approx(norm(w - begin) / norm(begin), rel=1e-12)
        assert d.loss_gap[step, 2] == other.losses[step] - exact.losses[step]
    assert pair.step == 6
    first = pair.distances()
    assert (first.weights[0] == 0).all()  # one start
    assert (first.weights[:, 0] == 0).all()
    assert (first.gradient[:, 0] == 0).all()
    assert first.gradient[0, 1] < first.gradient[0, 2]  # E4M3 nearer than E2M1


def test_at_the_first_step_the_distance_is_the_same_point_zeta() -> None:
    pair = mxsim.PairedRun(CFG, SCHEMES).advance(1)
    params = mxsim.init_params(CFG)
    x, y = mxsim.make_batches(CFG, mxsim.make_teacher(CFG)).at(0)
    for k, scheme in enumerate(SCHEMES.values()):
        zeta = mxsim.gradient_bias(params, x, y, CFG, scheme).zeta
        assert pair.distances().gradient[0, k] == pytest.approx(zeta, rel=1e-12)


def test_a_scheme_that_ends_leaves_the_others_running() -> None:
    cfg = replace(CFG, optimizer="sgd", lr=1e-2)
    schemes = {"exact": SCHEMES["exact"], "again": SCHEMES["exact"]}
    pair = mxsim.PairedRun(cfg, schemes).advance(3)
    pair.trainings["again"].flat[:] = np.nan
    pair.advance()
    d = pair.distances()
    assert pair.step == 10
    assert np.isfinite(d.loss[:, 0]).all()
    assert np.isfinite(d.loss[:3, 1]).all()
    assert np.isnan(d.loss[4:, 1]).all()
    assert pair.trainings["again"].finish().status == "nonfinite"
    assert pair.trainings["exact"].finish().status != "nonfinite"


def test_ctrl_c_leaves_every_scheme_at_the_same_step() -> None:
    cfg = replace(CFG, steps=400)
    whole = mxsim.PairedRun(cfg, SCHEMES).advance().distances()
    pair = mxsim.PairedRun(cfg, SCHEMES)
    interrupts = 0
    for _ in range(8):
        timer = threading.Timer(0.02, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        try:
            pair.advance()
        except KeyboardInterrupt:
            interrupts += 1
        finally:
            timer.cancel()
            timer.join()
        assert {training.step for training in pair.trainings.values()} == {pair.step}
    assert interrupts > 0
    found = pair.advance().distances()
    for name in ("loss", "weights", "gradient", "moved"):
        np.testing.assert_array_equal(getattr(found, name), getattr(whole, name))


@pytest.mark.parametrize(
    ("build", "error", "words"),
    [
        (lambda: mxsim.PairedRun(CFG, {}), ValueError, "at least one"),
        (lambda: mxsim.PairedRun(CFG, ["exact"]), TypeError, "map labels"),  # type: ignore[arg-type]
        (lambda: mxsim.PairedRun(CFG, {1: SCHEMES["exact"]}), TypeError, "labels.*got 1"),  # type: ignore[dict-item]
        (lambda: mxsim.PairedRun(CFG, {"a": "exact"}), TypeError, "PrecisionScheme"),  # type: ignore[dict-item]
        (lambda: mxsim.PairedRun(CFG, SCHEMES).advance(-1), ValueError, "got -1"),
    ],
)
def test_refusals(build: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        build()
