"""The task of the quantized-edge study: what it records is what it says, by other means."""

from dataclasses import replace

import numpy as np
import pytest

import mxsim
import mxsim.proxy
from mxsim.curvature import hvp, top_eigenvalue
from mxsim.data import Batches
from mxsim.proxy import KINDS, parameter_views
from mxsim.store import Record
from studies.edge_runs import EdgeRun, GradientNoise, whole_data
from studies.quantized_edge import PREDICTORS, read

CONFIG = mxsim.ProxyConfig(
    width=8,
    depth=2,
    batch=16,
    data="fixed",
    label_noise=0.0,
    teacher_depth=1,
    teacher_gain=5.3,
    dtype="float64",
    optimizer="sgd",
    lr=0.3,
    steps=40,
    eval_samples=16,
)
MX = mxsim.scheme("all_e4m3")
ADAM = replace(CONFIG, optimizer="adam", lr=0.01)


def data_of(cfg: mxsim.ProxyConfig) -> Batches:
    return mxsim.make_batches(cfg, mxsim.make_teacher(cfg))


def run(
    cfg: mxsim.ProxyConfig, scheme: mxsim.PrecisionScheme, noise: GradientNoise | None = None
) -> Record:
    return EdgeRun(cfg, scheme, noise, every=5, burst=12).run()


def flat(tree: mxsim.proxy.Params) -> np.ndarray:
    return np.concatenate([b[k].ravel() for b in tree for k in KINDS])


def test_products_are_those_of_the_gradients_at_that_step() -> None:
    record = run(CONFIG, MX)
    row = int(np.flatnonzero(record.arrays["steps"] == 30)[0])
    training = mxsim.start(CONFIG, MX).advance(30)
    x, y = whole_data(data_of(CONFIG))
    _, exact = mxsim.loss_and_grads(training.params, x, y, CONFIG, mxsim.scheme("exact"))
    loss, quantized = mxsim.loss_and_grads(training.params, x, y, CONFIG, MX)
    g, q = flat(exact), flat(quantized)
    assert loss == training.advance(1).losses[30]
    for name, expected in (("gg", g @ g), ("qg", q @ g), ("qq", q @ q)):
        assert record.arrays[name][row] == pytest.approx(expected, rel=1e-10)
        assert record.arrays[f"{name}_p"][row] == pytest.approx(expected, rel=1e-10)  # P = 1
    bias = mxsim.gradient_bias(mxsim.start(CONFIG, MX).advance(30).params, x, y, CONFIG, MX)
    ratio = record.arrays["qg"][row] / record.arrays["qq"][row]
    assert ratio == pytest.approx(bias.alpha / (bias.alpha**2 + bias.rho**2), rel=1e-9)


def test_sharpness_and_the_products_along_its_eigenvector() -> None:
    record = run(CONFIG, MX)
    training = mxsim.start(CONFIG, MX).advance(35)
    x, y = whole_data(data_of(CONFIG))
    hessian = hvp(training.params, x, y, CONFIG)
    dense = np.stack([hessian(e) for e in np.eye(hessian.size)])
    values, vectors = np.linalg.eigh((dense + dense.T) / 2)
    row = int(np.flatnonzero(record.arrays["steps"] == 35)[0])
    assert record.arrays["sharpness"][row] == pytest.approx(values[-1], rel=1e-5)
    along = abs(vectors[:, -1] @ hessian.gradient)
    assert abs(record.arrays["vg"][row]) == pytest.approx(along, rel=1e-2)
    # the last steps one by one; step 35 is the eighth of the twelve
    assert record.arrays["burst_vg"][35 - 28] == record.arrays["vg"][row]
    assert np.isfinite(record.arrays["burst_vq"][2:]).all()  # from the first v, of step 30, on


def test_the_third_derivative_is_that_of_the_sharpness() -> None:
    record = run(CONFIG, mxsim.scheme("exact"))
    row = int(np.flatnonzero(record.arrays["steps"] == 25)[0])
    training = mxsim.start(CONFIG, mxsim.scheme("exact")).advance(25)
    x, y = whole_data(data_of(CONFIG))

    def sharpness(theta: np.ndarray) -> float:
        there = hvp(parameter_views(theta.copy(), CONFIG), x, y, CONFIG)
        return top_eigenvalue(there, there.size, tolerance=1e-10).largest_algebraic

    hessian = hvp(training.params, x, y, CONFIG)
    v = top_eigenvalue(hessian, hessian.size, tolerance=1e-10).eigenvector
    off = hessian.gradient - v * (v @ hessian.gradient)
    h = 1e-4 / np.linalg.norm(off)
    slope = (sharpness(training.flat + h * off) - sharpness(training.flat - h * off)) / (2 * h)
    assert record.arrays["drift"][row] == pytest.approx(-slope, rel=2e-2)


@pytest.mark.parametrize("cfg", [CONFIG, ADAM])
def test_exact_gradients_leave_every_theory_at_the_exact_edge(cfg: mxsim.ProxyConfig) -> None:
    reading = read(run(cfg, mxsim.scheme("exact")))
    edge = 2.0 if cfg.optimizer == "sgd" else 38.0
    for name in PREDICTORS:
        if np.isfinite(reading.predicted[name]):
            assert reading.predicted[name] == pytest.approx(edge, rel=1e-9)
    assert (reading.alpha, reading.rho) == pytest.approx((1, 0), abs=1e-7)


def test_a_common_gain_is_found_as_such() -> None:
    reading = read(run(CONFIG, mxsim.scheme("exact"), GradientNoise("common", 0.25, 0.0)))
    assert reading.alpha == pytest.approx(1.25, rel=1e-9)
    assert reading.gain == pytest.approx(1.25, rel=1e-9)
    for name in ("descent", "descent in P", "displaced"):
        assert reading.predicted[name] == pytest.approx(1.6, rel=1e-9)


def test_the_answer_to_a_displacement_is_the_gradients_own() -> None:
    record = run(CONFIG, MX)
    row = int(np.flatnonzero(record.arrays["steps"] == 25)[0])
    training = mxsim.start(CONFIG, MX).advance(25)
    x, y = whole_data(data_of(CONFIG))
    hessian = hvp(training.params, x, y, CONFIG)
    v = top_eigenvalue(hessian, hessian.size, tolerance=1e-10).eigenvector
    bend = v @ hessian(v)
    # Of the second half so far.
    first = int(np.flatnonzero(record.arrays["steps"] == 20)[0])
    swing = float(np.sqrt(np.mean(record.arrays["vg"][first : row + 1] ** 2)))
    found = []
    for scheme in (MX, mxsim.scheme("exact")):
        sides = []
        for sign in (1, -1):
            theta = training.flat + (-(v @ hessian.gradient) + sign * swing) / bend * v
            tree = parameter_views(theta, CONFIG)
            sides.append(v @ flat(mxsim.loss_and_grads(tree, x, y, CONFIG, scheme, step=25)[1]))
        found.append(sides[0] - sides[1])
    assert record.arrays["answer_exact"][row] == pytest.approx(found[1], rel=2e-2)
    assert record.arrays["answer"][row] == pytest.approx(found[0], rel=0.1)  # v to 1e-3, E4M3 steps
    assert record.arrays["answer_exact"][row] == pytest.approx(2 * swing, rel=0.3)  # nearly linear


def test_the_descent_condition_is_held_to_what_the_loss_does() -> None:
    record = run(ADAM, MX)
    row = int(np.flatnonzero(record.arrays["steps"] == 30)[0])
    training = mxsim.start(ADAM, MX).advance(30)
    x, y = whole_data(data_of(ADAM))
    hessian = hvp(training.params, x, y, ADAM)
    before = training.flat.copy()
    u = training.advance(1).flat - before
    scale = -2 * (hessian.gradient @ u) / (u @ hessian(u))
    assert record.arrays["scale"][row] == pytest.approx(scale if scale > 0 else np.inf, rel=1e-6)
    change = hvp(training.params, x, y, ADAM).loss - hessian.loss
    assert record.arrays["change"][row] == pytest.approx(change, rel=1e-9)


def test_products_along_the_run_only_say_how_it_moved() -> None:
    # A stable valley, eta lam = 0.3, with additive noise: its edge is 2, the identity says 0.3.
    rng = np.random.default_rng(0)
    x, g, q = 0.0, [], []
    for noise in rng.standard_normal(20_000):
        g.append(x)
        q.append(x + noise)
        x -= 0.3 * q[-1]
    vg, vq = np.array(g), np.array(q)
    assert 2 * (vq @ vg) / (vq @ vq) == pytest.approx(0.3, rel=0.05)


def test_noise_has_the_moments_asked_for() -> None:
    gradient = np.ones(40_000)
    GradientNoise("each", 0.5, 0.09)(3)(7, gradient)
    z = gradient - 1
    assert abs(z.mean() - 0.5) < 4 * 0.3 / 200
    assert abs(z.var() - 0.09) < 4 * 0.09 * np.sqrt(2 / 40_000)
    again, other = np.ones(3), np.ones(3)
    GradientNoise("common", 0.0, 1.0)(3)(7, again)
    GradientNoise("common", 0.0, 1.0)(3)(8, other)
    assert len(set(again)) == 1
    assert again[0] != other[0]
    repeated = np.ones(3)
    GradientNoise("common", 0.0, 1.0)(3)(7, repeated)
    np.testing.assert_array_equal(repeated, again)


def test_of_a_mini_batch_the_full_gradient_is_the_exact_one() -> None:
    cfg = replace(CONFIG, batch=8, dataset_size=16)
    record = run(cfg, mxsim.scheme("exact"))
    late = np.isfinite(record.arrays["qq"])
    assert (record.arrays["qq"] > record.arrays["gg"])[late].mean() > 0.5  # batches add noise
    x, _ = whole_data(data_of(cfg))
    assert x.shape == (16, 8)


def test_a_run_is_a_pure_function_and_ends_where_it_diverges() -> None:
    task = EdgeRun(ADAM, MX, every=5, burst=12)
    first, second = task.run(), task.run()
    for name, array in first.arrays.items():
        np.testing.assert_array_equal(array, second.arrays[name])
    broken = run(replace(CONFIG, lr=1e6), mxsim.scheme("exact"))
    assert broken.meta["status"] == "nonfinite"
    assert np.isnan(broken.arrays["sharpness"][-1])
    assert np.isnan(read(broken).measured)


def test_fresh_data_have_no_whole() -> None:
    cfg = replace(CONFIG, data="fresh")
    with pytest.raises(
        ValueError, match="data must be 'fixed' to measure at the edge; got 'fresh'"
    ):
        run(cfg, MX)
