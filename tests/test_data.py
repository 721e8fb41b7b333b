"""Initial weights, teacher and batches: distributions, and purity in (seed, purpose, step)."""

import numpy as np
import pytest

from mxsim import ProxyConfig, held_out, init_params, make_batches, make_teacher
from mxsim.config import ACTIVATIONS


def test_pytorch_init_is_uniform_within_its_bound() -> None:
    cfg = ProxyConfig(width=64, depth=3)
    for block in init_params(cfg):
        assert (block["ln_gamma"] == 1).all()
        assert (block["ln_beta"] == 0).all()
        for kind, fan_in in (("w1", 64), ("w2", 256), ("b2", 256)):
            scaled = block[kind].astype(np.float64) * np.sqrt(fan_in)
            assert np.abs(scaled).max() <= 1 + 1e-6
            # variance 1/3, its standard error sqrt(4/45 / n): a 4-sigma test
            error = 4 * np.sqrt(4 / 45 / scaled.size)
            assert abs((scaled**2).mean() - 1 / 3) < error
            assert abs(scaled.mean()) < 4 * np.sqrt(1 / 3 / scaled.size)


def test_gammas_start_where_they_are_told() -> None:
    cfg = ProxyConfig(width=512, depth=2, gamma_mean=0.93, gamma_sd=0.02)
    plain = init_params(ProxyConfig(width=512, depth=2))
    gammas = [block["ln_gamma"].astype(np.float64) for block in init_params(cfg)]
    for gamma in gammas:
        assert abs(gamma.mean() - 0.93) < 4 * 0.02 / np.sqrt(512)
        assert abs(gamma.std() / 0.02 - 1) < 4 / np.sqrt(2 * 512)
    assert not np.array_equal(gammas[0], gammas[1])
    for block, other in zip(init_params(cfg), plain, strict=True):  # nothing else moves
        for kind in ("ln_beta", "w1", "w2", "b2"):
            np.testing.assert_array_equal(block[kind], other[kind])
    exactly = init_params(ProxyConfig(width=8, gamma_mean=0.97))
    assert all((block["ln_gamma"] == np.float32(0.97)).all() for block in exactly)


def test_xavier_init_has_gain_one_half_and_zero_bias() -> None:
    block = init_params(ProxyConfig(width=64, depth=1, init="xavier"))[0]
    assert (block["b2"] == 0).all()
    for kind in ("w1", "w2"):
        w = block[kind].astype(np.float64)
        ratio = (w**2).mean() / (0.25 * 2 / (64 + 256))
        assert abs(ratio - 1) < 4 * np.sqrt(2 / w.size)


def test_draws_do_not_depend_on_order_or_on_each_other() -> None:
    cfg = ProxyConfig(width=8, depth=2, batch=4, seed=5)
    batches = make_batches(cfg, make_teacher(cfg))
    late_first = [batches.at(step) for step in (9, 3)]
    early_first = [batches.at(step) for step in (3, 9)]
    for (x, y), (x2, y2) in zip(late_first, reversed(early_first), strict=True):
        np.testing.assert_array_equal(x, x2)
        np.testing.assert_array_equal(y, y2)
    assert not np.array_equal(late_first[0][0], late_first[1][0])
    deeper = ProxyConfig(width=8, depth=3, batch=4, seed=5)
    np.testing.assert_array_equal(init_params(cfg)[1]["w2"], init_params(deeper)[1]["w2"])
    other = ProxyConfig(width=8, depth=2, batch=4, seed=6)
    assert not np.array_equal(init_params(cfg)[0]["w1"], init_params(other)[0]["w1"])


def test_a_float64_run_sees_the_float32_numbers() -> None:
    narrow = ProxyConfig(width=8, depth=2, batch=4)
    wide = ProxyConfig(width=8, depth=2, batch=4, dtype="float64")
    for a, b in zip(init_params(narrow), init_params(wide), strict=True):
        for kind in a:
            np.testing.assert_array_equal(a[kind], b[kind])
            assert b[kind].dtype == np.float64
    x32, y32 = make_batches(narrow, make_teacher(narrow)).at(0)
    x64, y64 = make_batches(wide, make_teacher(wide)).at(0)
    np.testing.assert_array_equal(x32, x64)
    np.testing.assert_allclose(y32, y64, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_targets_are_the_teacher_plus_label_noise(activation: str) -> None:
    cfg = ProxyConfig(width=16, depth=2, activation=activation, eval_samples=4096)
    teacher = make_teacher(cfg)
    x, y = held_out(cfg, teacher)
    noise = (y - teacher(x)) / cfg.label_noise
    assert abs(noise.mean()) < 4 / np.sqrt(noise.size)
    assert abs((noise**2).mean() - 1) < 4 * np.sqrt(2 / noise.size)
    assert abs((x**2).mean() - 1) < 4 * np.sqrt(2 / x.size)


def test_the_scripts_teacher_hides_below_its_label_noise() -> None:
    # Measured on the released script: standard deviation 9e-4 for gelu at depth 4, noise 5e-3.
    cfg = ProxyConfig(width=64, depth=4)
    x, _ = held_out(cfg, make_teacher(cfg))
    assert 5e-4 < make_teacher(cfg)(x).std() < 2e-3


def test_teacher_shapes_and_gain() -> None:
    cfg = ProxyConfig(width=12, depth=2, teacher_width=20, teacher_depth=3)
    teacher = make_teacher(cfg)
    assert [(w1.shape, w2.shape) for w1, w2 in teacher.layers] == [((20, 12), (12, 20))] * 3
    gated = make_teacher(ProxyConfig(width=12, depth=1, activation="swiglu"))
    assert [(w1.shape, w2.shape) for w1, w2 in gated.layers] == [((16, 12), (12, 8))]
    linear = ProxyConfig(width=12, depth=3, teacher_activation="linear", teacher_gain=2.0)
    plain = ProxyConfig(width=12, depth=3, teacher_activation="linear")
    x, _ = held_out(plain, make_teacher(plain))
    np.testing.assert_allclose(make_teacher(linear)(x), 8 * make_teacher(plain)(x), rtol=1e-6)


def test_fixed_data_in_full_batch_and_in_epochs_of_mini_batches() -> None:
    full = ProxyConfig(width=4, depth=1, batch=8, data="fixed")
    batches = make_batches(full, make_teacher(full))
    np.testing.assert_array_equal(batches.at(0)[0], batches.at(17)[0])
    small = ProxyConfig(width=4, depth=1, batch=8, data="fixed", dataset_size=24)
    batches = make_batches(small, make_teacher(small))
    for epoch in (0, 1):
        rows = np.concatenate([batches.at(3 * epoch + i)[0] for i in range(3)])
        assert batches.dataset is not None
        np.testing.assert_array_equal(np.sort(rows, axis=0), np.sort(batches.dataset[0], axis=0))
    assert not np.array_equal(batches.at(0)[0], batches.at(3)[0])
