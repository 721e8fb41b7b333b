"""Adam and SGD against their formulas in plain float64, schedules, and the zero gradient."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mxsim import ProxyConfig
from mxsim.optim import learning_rate, optimizer_state, optimizer_step

Array = NDArray[Any]


def gradients(n: int, size: int) -> Array:
    return np.random.default_rng(3).standard_normal((n, size)) * np.logspace(-6, 2, size)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_adam_is_pytorchs(dtype: str, tolerance: float) -> None:
    cfg = ProxyConfig(lr=3e-2, dtype=dtype)
    p = np.linspace(-1, 1, 37)
    flat, state = p.astype(dtype), optimizer_state(cfg, p.size)
    m, v = np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients(12, p.size), start=1):
        optimizer_step(flat, g.astype(dtype), state, cfg)
        # Kingma and Ba, algorithm 1: m-hat / (sqrt(v-hat) + eps)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        m_hat, v_hat = m / (1 - 0.9**t), v / (1 - 0.999**t)
        p = p - 3e-2 * m_hat / (np.sqrt(v_hat) + 1e-8)
    np.testing.assert_allclose(flat, p, rtol=tolerance, atol=tolerance)


def test_sgd_with_momentum_is_heavy_ball() -> None:
    cfg = ProxyConfig(lr=3e-2, optimizer="sgd", momentum=0.9, dtype="float64")
    p = np.linspace(-1, 1, 37)
    flat, state = p.copy(), optimizer_state(cfg, p.size)
    buffer = np.zeros_like(p)
    for g in gradients(12, p.size):
        optimizer_step(flat, g, state, cfg)
        buffer = 0.9 * buffer + g
        p = p - 3e-2 * buffer
    np.testing.assert_allclose(flat, p, rtol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "settings", [{}, {"adam_eps": 0.0}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}]
)
def test_a_zero_gradient_changes_nothing(settings: dict[str, Any], dtype: str) -> None:
    cfg = ProxyConfig(dtype=dtype, **settings)
    flat = np.linspace(-1, 1, 11).astype(dtype)
    before, state = flat.copy(), optimizer_state(cfg, flat.size)
    for _ in range(3):
        optimizer_step(flat, np.zeros_like(flat), state, cfg)
    np.testing.assert_array_equal(flat, before)


def test_schedules() -> None:
    constant = ProxyConfig(lr=1e-2, steps=100)
    assert {learning_rate(constant, t) for t in (0, 50, 99)} == {1e-2}
    cosine = ProxyConfig(lr=1e-2, lr_min=1e-4, steps=100, schedule="cosine")
    assert learning_rate(cosine, 0) == 1e-2
    assert learning_rate(cosine, 50) == pytest.approx((1e-2 + 1e-4) / 2)
    assert learning_rate(cosine, 100) == pytest.approx(1e-4)
