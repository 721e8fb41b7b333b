"""Adam and SGD against their formulas in plain float64, schedules, and the zero gradient."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import mxsim
from mxsim import ProxyConfig
from mxsim.optim import clip_gradient, learning_rate, optimizer_state, optimizer_step
from mxsim.precision import PrecisionScheme

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


@pytest.mark.parametrize("states", ["fp32", "bf16"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"adam_eps": 0.0},
        {"optimizer": "adamw"},
        {"optimizer": "adamw", "adam_eps": 0.0},
        {"optimizer": "sgd"},
        {"optimizer": "sgd", "momentum": 0.9},
    ],
)
def test_a_zero_gradient_changes_nothing(settings: dict[str, Any], dtype: str, states: str) -> None:
    cfg = ProxyConfig(dtype=dtype, grad_clip=1.0, **settings)
    scheme = PrecisionScheme(master_weights=states, moments=states)
    flat = np.linspace(-1, 1, 9).astype(dtype)  # on the bf16 grid
    before, state = flat.copy(), optimizer_state(cfg, flat.size)
    for _ in range(3):
        zero = np.zeros_like(flat)
        clip_gradient(zero, 0.0, cfg)
        optimizer_step(flat, zero, state, cfg, scheme)
    np.testing.assert_array_equal(flat, before)


def test_adams_eps_survives_in_bf16_states() -> None:
    # 1e-8 is 1.001e-8 in bf16 (and 0 in fp16): it enters in the run's dtype in any case.
    cfg = ProxyConfig(lr=1.0)
    scheme = PrecisionScheme(master_weights="bf16", moments="bf16")
    flat, state = np.zeros(1, np.float32), optimizer_state(cfg, 1)
    optimizer_step(flat, np.full(1, 1e-8, np.float32), state, cfg, scheme)
    assert flat[0] == pytest.approx(-0.5, rel=0.01)  # g / (|g| + eps)


def test_adamw_decays_apart_from_the_gradient() -> None:
    cfg = ProxyConfig(lr=3e-2, optimizer="adamw", weight_decay=0.1, dtype="float64")
    plain = ProxyConfig(lr=3e-2, dtype="float64")
    p = np.linspace(-1, 1, 37)
    flat, state, twin = p.copy(), optimizer_state(cfg, p.size), optimizer_state(plain, p.size)
    for g in gradients(12, p.size):
        optimizer_step(flat, g, state, cfg)
        p = p * (1 - 3e-2 * 0.1)  # Loshchilov and Hutter 2019, as PyTorch orders it
        optimizer_step(p, g, twin, plain)
        np.testing.assert_allclose(flat, p, rtol=1e-14)


def test_clipping_is_of_the_global_norm() -> None:
    cfg = ProxyConfig(grad_clip=2.0)
    g = np.array([3.0, 4.0])
    clip_gradient(g, 5.0, cfg)
    np.testing.assert_allclose(g, np.array([3.0, 4.0]) * 2 / (5 + 1e-6), rtol=1e-15)
    small = np.array([0.3, 0.4])
    clip_gradient(small, 0.5, cfg)
    np.testing.assert_array_equal(small, [0.3, 0.4])
    clip_gradient(small, 0.5, ProxyConfig())
    np.testing.assert_array_equal(small, [0.3, 0.4])


def test_a_clipped_run_records_the_norm_before_clipping() -> None:
    cfg = ProxyConfig(width=32, depth=1, batch=32, steps=3, eval_samples=32, optimizer="sgd")
    free = mxsim.train(cfg, mxsim.scheme("exact"))
    bound = 0.5 * float(free.grad_norms[0])
    clipped = mxsim.train(replace(cfg, grad_clip=bound), mxsim.scheme("exact"))
    assert clipped.grad_norms[0] == free.grad_norms[0]
    start = mxsim.init_params(cfg)[0]["w1"]
    moved = [np.linalg.norm(r.params[0]["w1"] - start) for r in (clipped, free)]
    assert 0 < moved[0] < moved[1]


def test_schedules() -> None:
    constant = ProxyConfig(lr=1e-2, steps=100)
    assert {learning_rate(constant, t) for t in (0, 50, 99)} == {1e-2}
    cosine = ProxyConfig(lr=1e-2, lr_min=1e-4, steps=100, schedule="cosine")
    assert learning_rate(cosine, 0) == 1e-2
    assert learning_rate(cosine, 50) == pytest.approx((1e-2 + 1e-4) / 2)
    assert learning_rate(cosine, 100) == pytest.approx(1e-4)
    step = ProxyConfig(lr=1e-2, steps=100, schedule="step", decay_every=30, decay_factor=0.5)
    rates = [learning_rate(step, t) for t in (0, 29, 30, 59, 60, 90)]
    assert rates == pytest.approx([1e-2, 1e-2, 5e-3, 5e-3, 2.5e-3, 1.25e-3])


def test_a_rate_beyond_all_numbers_is_infinite() -> None:
    cfg = ProxyConfig(steps=400, schedule="step", decay_every=1, decay_factor=10.0)
    assert learning_rate(cfg, 399) == np.inf
    run = mxsim.train(
        replace(cfg, width=8, depth=1, batch=8, eval_samples=8, optimizer="sgd", grad_clip=1e-300),
        mxsim.scheme("exact"),
    )
    assert run.status == "nonfinite"


def test_warm_up_is_linear_and_comes_before_the_schedule() -> None:
    for schedule in ("constant", "cosine"):
        cfg = ProxyConfig(lr=1e-2, steps=100, schedule=schedule, warmup=20)
        rates = [learning_rate(cfg, t) for t in range(21)]
        assert rates[:20] == pytest.approx([1e-2 * (t + 1) / 20 for t in range(20)])
        assert rates[20] == 1e-2
    middle = learning_rate(ProxyConfig(lr=1e-2, steps=100, schedule="cosine", warmup=20), 60)
    assert middle == pytest.approx(5e-3)  # half of the 80 steps that are left
    longer = ProxyConfig(lr=1e-2, steps=5, schedule="cosine", warmup=20)
    assert learning_rate(longer, 4) == pytest.approx(1e-2 * 5 / 20)
