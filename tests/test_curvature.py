"""Hessian-vector products against a loss in 50 digits, eigenvalues against dense ones."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import scipy.linalg
from numpy.typing import NDArray

import mxsim
from mxsim.config import ACTIVATIONS, NORMS
from mxsim.curvature import (
    Hessian,
    adam_preconditioner,
    edge_of_stability,
    hvp,
    step_curvature,
    top_eigenvalue,
)
from mxsim.optim import optimizer_state, optimizer_step
from mxsim.proxy import KINDS, parameter_count, parameter_views
from mxsim.threads import one_blas_thread

mpmath: Any = import_module("mpmath")  # sympy brings it; it has no type hints

Array = NDArray[Any]
EPS = 2.0**-52
TINY = mxsim.ProxyConfig(width=3, depth=2, batch=2, dtype="float64")
SMALL = mxsim.ProxyConfig(width=4, depth=2, batch=20, dtype="float64", optimizer="sgd")


def point(cfg: mxsim.ProxyConfig) -> tuple[Array, Array, Array]:
    """Parameters (size,) with no gamma at 1 and no beta at 0, x and y (batch, width)."""
    rng = np.random.default_rng(7)
    flat = 0.7 * rng.standard_normal(parameter_count(cfg))
    x, y = rng.standard_normal((2, cfg.batch, cfg.width))
    return flat, x, y


def hessian_of(cfg: mxsim.ProxyConfig) -> Hessian:
    flat, x, y = point(cfg)
    return hvp(flat, x, y, cfg)


def dense(hessian: Hessian) -> Array:
    with one_blas_thread():  # set once, not for every product
        return np.array([hessian(unit) for unit in np.eye(hessian.size)])


# ---------------------------------------------------------------- products


def activated(u: list[Any], activation: str) -> list[Any]:
    """phi of the numbers u, from its textbook form."""
    if activation == "swiglu":
        a, b = u[: len(u) // 2], u[len(u) // 2 :]
        return [p * q / (1 + mpmath.exp(-q)) for p, q in zip(a, b, strict=True)]
    phi: Any = {
        "gelu": lambda v: v * (1 + mpmath.erf(v / mpmath.sqrt(2))) / 2,
        "gelu_tanh": lambda v: (
            v
            * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (v + mpmath.mpf("0.044715") * v**3)))
            / 2
        ),
        "relu": lambda v: max(v, 0),
        "linear": lambda v: v,
    }[activation]
    return [phi(v) for v in u]


def precise_loss(flat: list[Any], x: Array, y: Array, cfg: mxsim.ProxyConfig) -> Any:
    """The mean squared error of the proxy as mxsim/config.py words it, in mpmath's precision."""
    total = mpmath.mpf(0)
    blocks = parameter_views(np.array(flat, object), cfg)
    for row, target in zip(x, y, strict=True):
        stream = [mpmath.mpf(float(v)) for v in row]
        for p in blocks:
            z = stream
            if cfg.norm != "none":
                mean = 0 if cfg.norm == "rms" else sum(stream) / cfg.width
                centred = [v - mean for v in stream]
                variance = sum(v * v for v in centred) / cfg.width
                z = [v / mpmath.sqrt(variance + mpmath.mpf(cfg.ln_eps)) for v in centred]
            if cfg.norm in ("layer", "rms"):
                z = [v * g for v, g in zip(z, p["ln_gamma"], strict=True)]
            if cfg.norm == "layer":
                z = [v + b for v, b in zip(z, p["ln_beta"], strict=True)]
            u = [mpmath.fdot(w, z) for w in p["w1"]]
            hidden = activated(u, cfg.activation)
            branch = [mpmath.fdot(w, hidden) for w in p["w2"]]
            stream = [s + b + c for s, b, c in zip(stream, branch, p["b2"], strict=True)]
        total += sum((s - mpmath.mpf(float(t))) ** 2 for s, t in zip(stream, target, strict=True))
    return total / x.size


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_products_are_those_of_the_loss_in_fifty_digits(activation: str, norm: str) -> None:
    """u^T H v by a second difference of the loss, step 1e-15, of which 1e-20 is left as error.

    u and v are dense, so an error in any part of H v shows.  The bound is 2^12 roundings.
    """
    cfg = replace(TINY, activation=activation, norm=norm)
    flat, x, y = point(cfg)
    u, v = np.random.default_rng(8).standard_normal((2, len(flat)))
    with mpmath.workdps(50):
        h = mpmath.mpf(10) ** -15
        total = mpmath.mpf(0)
        for a in (1, -1):
            for b in (1, -1):
                moved = [
                    mpmath.mpf(f) + h * (a * mpmath.mpf(p) + b * mpmath.mpf(q))
                    for f, p, q in zip(flat.tolist(), u.tolist(), v.tolist(), strict=True)
                ]
                total += a * b * precise_loss(moved, x, y, cfg)
        expected = float(total / (4 * h * h))
        loss = float(precise_loss([mpmath.mpf(f) for f in flat.tolist()], x, y, cfg))
    hessian = hvp(flat, x, y, cfg)
    product = hessian(v)
    scale = np.linalg.norm(u) * np.linalg.norm(product)
    assert abs(u @ product - expected) < 2**12 * EPS * scale
    assert hessian.loss == pytest.approx(loss, rel=2**12 * EPS)


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_hessian_is_symmetric_and_its_gradient_that_of_the_proxy(
    activation: str, norm: str
) -> None:
    cfg = replace(SMALL, width=16, depth=3, activation=activation, norm=norm)
    flat, x, y = point(cfg)
    hessian = hvp(flat, x, y, cfg)
    loss, grads = mxsim.loss_and_grads(parameter_views(flat, cfg), x, y, cfg, mxsim.scheme("exact"))
    assert hessian.loss == loss
    flat_grads = np.concatenate([block[kind].ravel() for block in grads for kind in KINDS])
    np.testing.assert_array_equal(hessian.gradient, flat_grads)
    u, v = np.random.default_rng(1).standard_normal((2, hessian.size))
    hu, hv = hessian(u), hessian(v)
    assert abs(u @ hv - v @ hu) < 2**12 * EPS * np.linalg.norm(u) * np.linalg.norm(hv)


def test_what_the_norm_does_not_use_has_no_curvature() -> None:
    for norm, unused in (
        ("rms", {"ln_beta"}),
        ("layer_no_affine", {"ln_gamma", "ln_beta"}),
        ("none", {"ln_gamma", "ln_beta"}),
    ):
        cfg = replace(SMALL, norm=norm)
        matrix = dense(hessian_of(cfg))
        columns = parameter_views(np.abs(matrix).sum(axis=0), cfg)
        for block in columns:
            for kind in KINDS:
                assert (block[kind] == 0).all() == (kind in unused), (norm, kind)
        np.testing.assert_array_equal(np.abs(matrix).sum(axis=0) == 0, ~matrix.any(axis=1))


def test_the_last_bias_sees_the_curvature_of_the_mean_square() -> None:
    """The loss is quadratic in the last b2: its block of H is 2 / width times the identity."""
    cfg = replace(SMALL, activation="gelu")
    matrix = dense(hessian_of(cfg))
    block = matrix[-cfg.width :, -cfg.width :]
    np.testing.assert_allclose(block, 2 / cfg.width * np.eye(cfg.width), atol=64 * EPS)


def test_a_point_keeps_its_own_copy_and_takes_float32_for_what_it_is() -> None:
    flat, x, y = point(SMALL)
    single = flat.astype(np.float32)
    tree = parameter_views(single, SMALL)
    hessian = hvp(tree, x, y, SMALL)
    v = np.random.default_rng(2).standard_normal(hessian.size)
    product = hessian(v)
    np.testing.assert_array_equal(product, hvp(single.astype(np.float64), x, y, SMALL)(v))
    single[...] = 0
    np.testing.assert_array_equal(hessian(v), product)


def test_what_does_not_fit_is_named() -> None:
    flat, x, y = point(SMALL)
    hessian = hvp(flat, x, y, SMALL)
    with pytest.raises(ValueError, match=r"v must have shape \(\d+,\); got \(3,\)"):
        hessian(np.ones(3))
    with pytest.raises(ValueError, match=r"flat params must have shape"):
        hvp(flat[:-1], x, y, SMALL)
    with pytest.raises(ValueError, match=r"params must have 2 blocks"):
        hvp(parameter_views(flat, SMALL)[:1], x, y, SMALL)
    with pytest.raises(ValueError, match=r"x must have shape \(n, 4\)"):
        hvp(flat, x[:, :2], y, SMALL)
    for name in ("preconditioner", "start"):
        wrong: dict[str, Any] = {name: np.ones(3)}
        with pytest.raises(ValueError, match=rf"{name} must have shape"):
            top_eigenvalue(hessian, hessian.size, **wrong)
        zero: dict[str, Any] = {name: np.zeros(hessian.size)}
        with pytest.raises(ValueError, match=rf"{name} must be"):
            top_eigenvalue(hessian, hessian.size, **zero)
    with pytest.raises(ValueError, match="size must be at least 3; got 2"):
        top_eigenvalue(lambda v: v, 2)
    with pytest.raises(ValueError, match="basis must be at least 3"):
        top_eigenvalue(hessian, hessian.size, basis=2)


# ---------------------------------------------------------------- eigenvalues


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu"])
@pytest.mark.parametrize("preconditioned", [False, True])
def test_both_ends_are_those_of_the_dense_matrix(activation: str, preconditioned: bool) -> None:
    """Within the residual that is reported (Bauer-Fike), which is within the tolerance."""
    cfg = replace(SMALL, activation=activation)
    hessian = hessian_of(cfg)
    matrix = dense(hessian)
    p = np.exp(np.random.default_rng(3).standard_normal(hessian.size)) if preconditioned else None
    weights = np.ones(hessian.size) if p is None else p
    with one_blas_thread():
        expected = scipy.linalg.eigh((matrix + matrix.T) / 2, np.diag(weights), eigvals_only=True)
    tolerance = 1e-6
    found = top_eigenvalue(
        hessian, hessian.size, preconditioner=p, both_ends=True, tolerance=tolerance
    )
    assert found.converged
    assert found.smallest_eigenvector is not None
    slack = 2**12 * EPS * expected[-1]
    for value, vector, residual, true in (
        (found.largest_algebraic, found.eigenvector, found.residual, expected[-1]),
        (
            found.smallest_algebraic,
            found.smallest_eigenvector,
            found.smallest_residual,
            expected[0],
        ),
    ):
        assert residual <= tolerance * abs(value) + slack
        assert abs(value - true) <= residual + slack
        assert np.linalg.norm(vector) == pytest.approx(1)
        error = matrix @ vector / weights - value * vector  # S u - lam u, seen from w
        scale = np.linalg.norm(np.sqrt(weights) * vector)
        assert np.linalg.norm(np.sqrt(weights) * error) / scale == pytest.approx(residual, rel=1e-3)
    assert found.largest_magnitude == max(
        found.largest_algebraic, found.smallest_algebraic, key=abs
    )
    largest = top_eigenvalue(hessian, hessian.size, preconditioner=p, tolerance=tolerance)
    assert abs(largest.largest_algebraic - expected[-1]) <= largest.residual + slack
    assert np.isnan([largest.smallest_algebraic, largest.largest_magnitude]).all()
    assert largest.smallest_eigenvector is None


class Diagonal:
    """A diagonal operator that counts its products."""

    def __init__(self, entries: Array) -> None:
        self.entries, self.products = entries, 0

    def __call__(self, v: Array) -> Array:
        self.products += 1
        return np.asarray(self.entries * v)


def test_largest_algebraic_and_largest_magnitude_are_kept_apart() -> None:
    entries = np.linspace(-5, 3, 40)
    found = top_eigenvalue(Diagonal(entries), 40, both_ends=True, tolerance=1e-8)
    assert found.largest_algebraic == pytest.approx(3, abs=1e-7)
    assert found.smallest_algebraic == pytest.approx(-5, abs=1e-7)
    assert found.largest_magnitude == found.smallest_algebraic


@pytest.mark.parametrize("overtaken_by", [1.1, 1.5])
def test_a_warm_start_is_not_blind_to_an_eigenvalue_that_has_overtaken(overtaken_by: float) -> None:
    """Started at the eigenvector of 1, Lanczos would stop there but for a whole sweep and noise.

    The noise is always the same, and so is the result.
    """
    rng = np.random.default_rng(4)
    entries = np.concatenate([[overtaken_by, 1.0], 0.9 * rng.random(20_000) - 0.2])
    start = np.zeros(len(entries))
    start[1] = 1
    found, again = (
        top_eigenvalue(Diagonal(entries), len(entries), start=start, tolerance=1e-2)
        for _ in range(2)
    )
    np.testing.assert_array_equal(found.eigenvector, again.eigenvector)
    assert abs(found.largest_algebraic - overtaken_by) <= found.residual + 1e-12
    assert abs(found.eigenvector[0]) > 0.99


def test_a_warm_start_saves_products_where_a_cold_one_restarts() -> None:
    entries = np.concatenate([[1.05, 1.0], np.linspace(0, 0.99, 5000)])
    cold = top_eigenvalue(Diagonal(entries), len(entries), tolerance=1e-6)
    warm = top_eigenvalue(Diagonal(entries), len(entries), start=cold.eigenvector, tolerance=1e-6)
    assert cold.converged
    assert warm.converged
    assert warm.matvecs < cold.matvecs
    assert warm.largest_algebraic == pytest.approx(cold.largest_algebraic, abs=1e-9)


def test_giving_up_is_a_result_with_a_residual_that_tells() -> None:
    entries = np.linspace(0, 1, 5000)  # a crowded end
    operator = Diagonal(entries)
    found = top_eigenvalue(operator, len(entries), tolerance=1e-9, restarts=1)
    assert not found.converged
    assert found.matvecs == operator.products
    assert found.residual > 1e-9
    assert found.largest_algebraic <= 1 + 1e-12
    assert np.abs(entries - found.largest_algebraic).min() <= found.residual


def test_what_is_not_finite_has_no_sharpness() -> None:
    flat, x, y = point(SMALL)
    flat[0] = np.inf
    hessian = hvp(flat, x, y, SMALL)
    found = top_eigenvalue(hessian, hessian.size, both_ends=True)
    assert not found.converged
    assert found.matvecs == 1
    assert np.isnan([found.largest_algebraic, found.smallest_algebraic, found.residual]).all()
    assert np.isnan(found.largest_magnitude)


# ---------------------------------------------------------------- along steps; optimizers


def test_step_curvature_is_the_rayleigh_quotient() -> None:
    hessian = hessian_of(SMALL)
    matrix, g = dense(hessian), hessian.gradient
    p = np.exp(np.random.default_rng(5).standard_normal(hessian.size))
    assert step_curvature(hessian, g) == pytest.approx(g @ matrix @ g / (g @ g), rel=1e-12)
    update = g / p
    expected = update @ matrix @ update / (update @ (p * update))
    assert step_curvature(hessian, update, p) == pytest.approx(expected, rel=1e-12)
    ends = top_eigenvalue(hessian, hessian.size, both_ends=True, tolerance=1e-8)
    assert step_curvature(hessian, ends.eigenvector) == pytest.approx(ends.largest_algebraic)
    assert ends.smallest_algebraic < step_curvature(hessian, g) < ends.largest_algebraic
    assert np.isnan(step_curvature(hessian, np.zeros(hessian.size)))


def test_the_preconditioner_is_what_adam_divides_by() -> None:
    cfg = replace(SMALL, optimizer="adam", lr=1e-3, steps=5, beta1=0.0)
    training = mxsim.start(cfg, mxsim.scheme("exact")).advance(4)
    before = training.flat.copy()
    training.advance(1)  # with beta1 = 0 the step is -lr P^-1 g
    p = adam_preconditioner(training.optimizer, cfg)
    np.testing.assert_allclose(
        before - training.flat, cfg.lr * training.last_gradient / p, rtol=1e-9, atol=1e-14
    )
    with pytest.raises(ValueError, match="optimizer must be adam or adamw"):
        adam_preconditioner(training.optimizer, replace(cfg, optimizer="sgd"))
    with pytest.raises(ValueError, match="state must have been updated; got 0 updates"):
        adam_preconditioner(optimizer_state(cfg, 3), cfg)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize(("times", "stays"), [(0.99, True), (1.01, False)])
def test_sgd_leaves_a_quadratic_valley_beyond_the_edge(
    momentum: float, times: float, stays: bool
) -> None:
    cfg = replace(SMALL, lr=0.1, momentum=momentum)
    curvature = times * edge_of_stability(cfg) / cfg.lr
    x, state = np.ones(1), optimizer_state(cfg, 1)
    for _ in range(4000):
        optimizer_step(x, curvature * x, state, cfg)
    assert (abs(x[0]) < 1e-3) == stays
    assert (abs(x[0]) > 1e3) == (not stays)


@pytest.mark.parametrize("beta1", [0.0, 0.5, 0.9])
def test_adam_leaves_a_preconditioned_valley_beyond_the_edge(beta1: float) -> None:
    """With P held: (x, m) -> (x - m', m'), m' = beta1 m + (1 - beta1) eta lam x."""
    edge = edge_of_stability(replace(SMALL, optimizer="adam", beta1=beta1))
    for times, stable in ((0.999, True), (1.001, False)):
        gain = (1 - beta1) * times * edge
        step = np.array([[1 - gain, -beta1], [gain, beta1]])
        assert (np.abs(np.linalg.eigvals(step)).max() < 1) == stable


def test_what_is_not_symmetric_does_not_count_as_converged() -> None:
    a = np.random.default_rng(0).standard_normal((40, 40))
    found = top_eigenvalue(lambda v: a @ v, 40)
    assert found.residual > 0.1
    assert not found.converged
    nothing = top_eigenvalue(lambda v: 0 * v, 40)
    assert np.isnan(nothing.largest_algebraic)
    assert not nothing.converged
