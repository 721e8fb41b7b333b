"""The noise floor on paper: the linear student's law against simulations of it."""

import math
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mxsim
from mxsim.theory.noise_floor import (
    Features,
    backward_zeta,
    critical_batch,
    crossing_excess,
    derive,
    floor_zeta,
    isotropic,
    main,
    measured_features,
    simulate,
    systematic_zeta,
    zeta,
)

Array = NDArray[Any]
Error = Callable[[Array, np.random.Generator], Array]
OUTPUTS, WIDTH = 12, 20


def loss(w: Array, x: Array, y: Array, shift: Array) -> float:
    """Mean squared error of the student w, its prediction moved by ``shift``."""
    return float(np.mean((x @ w.T + shift - y) ** 2))


def gradient(residual: Array, x: Array) -> Array:
    """Of the loss with this residual, in w (o, i): the straight-through one if it is shifted."""
    return 2 / residual.size * residual.T @ x


def ratio_off(
    predicted: float, a: Array, root: Array, sigma: float, batch: int, error: Error, seed: int
) -> float:
    """How many standard errors the mean of |eps|^2 - predicted^2 |g|^2 lies from 0.

    a = W - W*; x = root times standard normals; ``error`` the forward error of x.
    """
    rng = np.random.default_rng(seed)
    differences = []
    for _ in range(500):
        x = rng.standard_normal((batch, root.shape[1])) @ root.T
        n = sigma * rng.standard_normal((batch, len(a)))
        exact = gradient(x @ a.T - n, x)
        eps = gradient(error(x, rng), x)
        differences.append((eps**2).sum() - predicted**2 * (exact**2).sum())
    values = np.array(differences)
    return float(abs(values.mean()) / (values.std(ddof=1) / math.sqrt(len(values))))


def root_of(kind: str, rng: np.random.Generator) -> Array:
    if kind == "isotropic":
        return np.eye(WIDTH)
    rotation = np.linalg.qr(rng.standard_normal((WIDTH, WIDTH)))[0]
    return np.asarray(rotation * np.sqrt(4.0 / np.arange(1, WIDTH + 1)))


def test_the_simulation_takes_the_gradient_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    w, w0 = rng.standard_normal((2, 3, 4))
    x = rng.standard_normal((5, 4))
    y = x @ w0.T + rng.standard_normal((5, 3))
    shift = rng.standard_normal((5, 3))
    for s in (0 * shift, shift):
        by_formula = gradient(x @ w.T + s - y, x)
        for at in np.ndindex(w.shape):
            step = np.zeros_like(w)
            step[at] = 0.5  # the loss is quadratic: any step is exact
            slope = loss(w + step, x, y, s) - loss(w - step, x, y, s)
            assert slope == pytest.approx(by_formula[at], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("kind", ["isotropic", "anisotropic"])
@pytest.mark.parametrize("batch", [1, 5, 20, 150])
def test_zeta_at_any_batch(kind: str, batch: int) -> None:
    rng = np.random.default_rng(batch)
    root = root_of(kind, rng)
    s = root @ root.T
    a, d = 0.1 * rng.standard_normal((2, OUTPUTS, WIDTH))
    sigma = 0.4
    e, q2 = (np.trace(m @ s @ m.T) / OUTPUTS for m in (a, d))
    features = Features(
        np.trace(s),
        *(np.trace(m @ s @ s @ m.T) / np.trace(m @ s @ m.T) for m in (a, d)),
    )
    if kind == "isotropic":
        same = isotropic(WIDTH)
        assert zeta(e, q2, sigma**2, batch, same) == pytest.approx(
            zeta(e, q2, sigma**2, batch, features), rel=1e-12
        )
    predicted = zeta(e, q2, sigma**2, batch, features)
    off = ratio_off(predicted, a, root, sigma, batch, lambda x, _: x @ d.T, seed=batch)
    assert off < 4
    # ... which a law off by 10 % would not pass.
    assert ratio_off(1.1 * predicted, a, root, sigma, batch, lambda x, _: x @ d.T, batch) > 4


@pytest.mark.parametrize("batch", [4, 100])
def test_an_error_that_is_partly_noise_over_samples(batch: int) -> None:
    rng = np.random.default_rng(7)
    root = root_of("anisotropic", rng)
    s = root @ root.T
    a, d = 0.1 * rng.standard_normal((2, OUTPUTS, WIDTH))
    spread, sigma = 0.3, 0.4
    e, common = (np.trace(m @ s @ m.T) / OUTPUTS for m in (a, d))
    q2 = common + spread**2
    mean = np.trace(d @ s @ s @ d.T) / OUTPUTS  # |E delta x^T|^2: noise has none
    features = Features(np.trace(s), np.trace(a @ s @ s @ a.T) / (OUTPUTS * e), mean / q2)

    def error(x: Array, rng: np.random.Generator) -> Array:
        return np.asarray(x @ d.T + spread * rng.standard_normal((len(x), OUTPUTS)))

    predicted = zeta(e, q2, sigma**2, batch, features)
    assert ratio_off(predicted, a, root, sigma, batch, error, seed=1) < 4
    whole = Features(features.trace, features.signal, mean / common)  # as if all were common
    assert ratio_off(zeta(e, q2, sigma**2, batch, whole), a, root, sigma, batch, error, seed=1) > 4


def test_weights_rounded_to_e4m3() -> None:
    rng = np.random.default_rng(3)
    target = rng.standard_normal((OUTPUTS, 32)) / 6
    w = (target + 0.004 * rng.standard_normal(target.shape)).astype(np.float32)
    d = (mxsim.fake_quantize(w, "mxfp8_e4m3", axis=-1) - w).astype(np.float64)
    a, sigma = w - target, 0.05
    e, q2 = ((m**2).sum() / OUTPUTS for m in (a, d))
    assert 0.3 < q2 / e < 30
    for batch in (16, 128):
        predicted = zeta(e, q2, sigma**2, batch, isotropic(32))
        off = ratio_off(predicted, a, np.eye(32), sigma, batch, lambda x, _: x @ d.T, seed=batch)
        assert off < 4


def test_where_zeta_crosses_one() -> None:
    # By hand: d = 64, sigma^2 = 1/64: sigma^2 d = 1, so e = q2 - 1 / (B + 65).
    features = isotropic(64)
    assert crossing_excess(0.01, 1 / 64, 935, features) == pytest.approx(0.009)
    assert crossing_excess(0.01, 1 / 64, 10, features) == 0  # q2 < 1 / 75
    assert critical_batch(0.01, 1 / 64, features) == pytest.approx(1 / 0.01 - 65)
    assert critical_batch(1.0, 1 / 64, features) < 1  # an error larger than the noise: at once
    # Simulated at the crossing: the two have one mean square.
    rng = np.random.default_rng(5)
    root = root_of("anisotropic", rng)
    s = root @ root.T
    a, d = rng.standard_normal((2, OUTPUTS, WIDTH))
    signal, error = (np.trace(m @ s @ s @ m.T) / np.trace(m @ s @ m.T) for m in (a, d))
    own = Features(np.trace(s), signal, error)
    q2 = np.trace(d @ s @ d.T) / OUTPUTS
    sigma = math.sqrt(2 * q2)
    assert crossing_excess(q2, sigma**2, 2, own) == 0
    assert 2 < critical_batch(q2, sigma**2, own) < 64
    e = crossing_excess(q2, sigma**2, 64, own)
    a *= math.sqrt(e / (np.trace(a @ s @ a.T) / OUTPUTS))
    assert ratio_off(1.0, a, root, sigma, 64, lambda x, _: x @ d.T, seed=6) < 4


def test_the_floor_grows_as_the_root_of_the_batch() -> None:
    features = isotropic(64)
    # By hand: 255 + 64 + 1 = 320 = 5 * 64.
    assert floor_zeta(0.01, 0.04, 255, features) == pytest.approx(math.sqrt(5) / 2)
    batches = 4.0 ** np.arange(6, 12)
    growth = floor_zeta(0.01, 0.04, batches, features)
    np.testing.assert_allclose(growth[1:] / growth[:-1], 2, rtol=65 / batches[0])
    assert (growth[1:] / growth[:-1] < 2).all()
    # Below the width it hardly grows; B = 1 is short of sqrt(q2) / sigma by 2 / d alone.
    assert floor_zeta(0.01, 0.04, 1, features) == pytest.approx(0.5 * math.sqrt(66 / 64))
    # An error in stiff directions is seen from fewer samples on: t / ke of them.
    stiff = Features(64, 1, 16)
    assert floor_zeta(0.01, 0.04, 64, stiff) == pytest.approx(0.5 * math.sqrt(1 + 65 / 4))
    # Independent of the width where the noise is 1 / width, as layer norm has it.
    for width in (16, 256):
        value = floor_zeta(0.01, 1 / width, 1000, isotropic(width))
        assert value == pytest.approx(math.sqrt(0.01 * (1001 + width)))
    rng = np.random.default_rng(8)
    d = rng.standard_normal((OUTPUTS, WIDTH))
    nothing = np.zeros_like(d)
    predicted = floor_zeta((d**2).sum() / OUTPUTS, 9.0, 60, isotropic(WIDTH))
    assert ratio_off(predicted, nothing, np.eye(WIDTH), 3.0, 60, lambda x, _: x @ d.T, seed=9) < 4


def test_limits() -> None:
    features = Features(50, 2, 3)
    # Large batches: no noise, |E eps| / |E g|.
    assert zeta(0.2, 0.1, 5.0, 1e12, features) == pytest.approx(math.sqrt(0.1 * 3 / (0.2 * 2)))
    assert systematic_zeta(0.2, 0.1, features) == pytest.approx(math.sqrt(0.75))
    assert zeta(0.2, 0.1, 1e9, 16, features) < 1e-3  # noise hides any error
    assert zeta(0, 0.1, 0, 16, features) == math.inf
    assert floor_zeta(0.1, 0, 16, features) == systematic_zeta(0, 0.1, features) == math.inf
    assert zeta(0.2, 0.0, 5.0, 16, features) == 0
    assert critical_batch(0.1, 1.0, Features(50, 2, 0)) == math.inf
    # Where a run under a constant error ends, W - W* = -D: the two means cancel.
    assert systematic_zeta(0.1, 0.1, Features(50, 3, 3)) == 1
    # Arrays broadcast.
    grid = zeta(np.array([[0.1], [0.2]]), 0.1, 1.0, np.array([16, 64, 256]), features)
    assert grid.shape == (2, 3)
    assert grid[1, 2] == zeta(0.2, 0.1, 1.0, 256, features)
    assert math.isnan(zeta(math.nan, 0.1, 1.0, 16, features))


@pytest.mark.parametrize("batch", [1, 6, 80])
def test_a_relative_error_of_dy_is_no_floor(batch: int) -> None:
    rng = np.random.default_rng(11)
    root = root_of("anisotropic", rng)
    s = root @ root.T
    a = rng.standard_normal((OUTPUTS, WIDTH))
    e, relative = np.trace(a @ s @ a.T) / OUTPUTS, 0.1
    features = Features(np.trace(s), np.trace(a @ s @ s @ a.T) / (OUTPUTS * e))
    for sigma, scale in ((1.0, 1.0), (1.0, 0.0), (0.0, 1.0)):
        predicted = backward_zeta(e * scale**2, sigma**2, batch, relative, features)
        assert predicted <= relative * (1 + 1e-12)
        if scale == 0:
            assert predicted == pytest.approx(relative, rel=1e-12)
        simulator = np.random.default_rng(batch)
        differences = []
        for _ in range(500):
            x = simulator.standard_normal((batch, WIDTH)) @ root.T
            residual = scale * x @ a.T - sigma * simulator.standard_normal((batch, OUTPUTS))
            rounding = relative * simulator.choice([-1.0, 1.0], residual.shape)
            g, eps = gradient(residual, x), gradient(rounding * residual, x)
            differences.append((eps**2).sum() - predicted**2 * (g**2).sum())
        standard_error = np.std(differences, ddof=1) / math.sqrt(len(differences))
        # One sample without noise: eps = g up to signs, and the two squares are equal.
        assert abs(np.mean(differences)) < 4 * standard_error + 1e-9 * e
    # Far above the floor it averages over the batch.
    far = [backward_zeta(1.0, 0.0, b, relative, isotropic(64)) for b in (10**4, 4 * 10**4)]
    assert far[0] / far[1] == pytest.approx(2, rel=65 / 10**4)


def test_features_from_moments() -> None:
    # By hand, o = 8: ks = 2, ke = 3, t = 50, e = 0.2, q2 = 0.1, sigma^2 = 0.5.
    found = measured_features(
        0.2, 0.1, 0.5, 8, 4 / 8 * 0.2 * 2, 4 / 8 * (0.2 * (2 + 50) + 0.5 * 50), 4 / 8 * 0.1 * 3
    )
    values = [np.asarray(each, float) for each in (found.trace, found.signal, found.error)]
    np.testing.assert_allclose(values, (50, 2, 3), rtol=1e-12)
    hidden = measured_features(0.2, 0.1, 0.5, 8, -1e-3, 10.0, [-1e-3, 0.15])
    np.testing.assert_allclose(
        np.asarray(hidden.error, float), (0, 3)
    )  # an estimate of a square below 0
    assert hidden.signal == 0


def test_the_derivation() -> None:
    found = derive()
    by_name = {s.name: s for s in found["zeta2"].free_symbols | found["backward"].free_symbols}
    values = {"e": 0.3, "q2": 0.2, "sigma2": 0.5, "B": 7, "t": 11, "ks": 1, "ke": 1, "r2": 0.01}
    at = {by_name[name]: value for name, value in values.items()}
    # Isotropic, d = 11, by hand: (B + d + 1) / B = 19/7, noise 0.5 * 11 / 7.
    assert float(found["gradient"].subs(at)) == pytest.approx((0.3 * 19 + 5.5) / 7)
    assert float(found["error"].subs(at)) == pytest.approx(0.2 * 19 / 7)
    assert float(found["crossing"].subs(at)) == pytest.approx(0.2 - 5.5 / 19)
    assert float(found["backward"].subs(at)) == pytest.approx(0.01 * (0.3 * 13 + 5.5) / 7)
    s = next(symbol for symbol in found["fourth"].free_symbols)
    assert found["fourth"] == 3 * s**2


def test_its_own_simulation_agrees_with_another() -> None:
    rng = np.random.default_rng(12)
    a, d = rng.standard_normal((2, OUTPUTS, WIDTH))
    found = simulate(a, d, np.ones(WIDTH), 1.5, 30, 300, seed=0)
    squares = []
    for _ in range(300):
        x = rng.standard_normal((30, WIDTH))
        squares.append((gradient(x @ a.T - 1.5 * rng.standard_normal((30, OUTPUTS)), x) ** 2).sum())
    off = found.gradient - np.mean(squares)
    assert abs(off) < 4 * math.hypot(found.gradient_error, np.std(squares) / math.sqrt(300))
    # d has the same moments as noise-free a: |eps|^2 by hand, 4 q2 (B + i + 1) / (o B).
    expected = 4 * (d**2).sum() / OUTPUTS**2 * (30 + WIDTH + 1) / 30
    assert abs(found.error - expected) < 4 * found.error_error


def test_refusals_name_the_argument() -> None:
    good = isotropic(8)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("excess", lambda: zeta(-1.0, 1.0, 1.0, 4, good)),
        ("added", lambda: zeta(1.0, [1.0, -1.0], 1.0, 4, good)),
        ("noise", lambda: crossing_excess(1.0, -1.0, 4, good)),
        ("batch", lambda: floor_zeta(1.0, 1.0, 0, good)),
        ("relative", lambda: backward_zeta(1.0, 1.0, 4, -0.1, good)),
        ("trace", lambda: Features(0.0)),
        ("signal", lambda: Features(1.0, -1.0)),
        ("error", lambda: Features(1.0, 1.0, -1.0)),
        ("width", lambda: isotropic(0)),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=f"^{name} must be"):
            call()


def test_the_command_prints_derivation_and_simulation(capsys: pytest.CaptureFixture[str]) -> None:
    main()
    output = capsys.readouterr().out
    assert "q2*(ke*(B + 1) + t)/(e*(ks*(B + 1) + t) + sigma2*t)" in output
    rows = [line for line in output.splitlines() if line.startswith(("all 1", "1 to"))]
    assert len(rows) == 8
    for row in rows:
        deviations = [float(word) for word in row.split() if word[0] in "+-"]
        assert len(deviations) == 2
        assert max(map(abs, deviations)) < 4


def test_sympy_is_imported_only_when_asked() -> None:
    code = "import sys, mxsim, mxsim.theory.noise_floor; sys.exit('sympy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
