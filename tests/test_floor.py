"""The irreducible loss: closed forms where there are some, and no trained run below it."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import gammaln

import mxsim
from mxsim.floor import irreducible_loss

BASE = mxsim.ProxyConfig(width=64, depth=4, label_noise=5e-3)
SEEDS = 20


def mean_and_error(cfg: mxsim.ProxyConfig) -> tuple[float, float]:
    floors = [irreducible_loss(replace(cfg, seed=s)) for s in range(SEEDS)]
    error = math.sqrt(sum(f.standard_error**2 for f in floors)) / SEEDS
    return float(np.mean([f.loss for f in floors])), error


@pytest.mark.parametrize("norm", ["layer", "layer_no_affine"])
@pytest.mark.parametrize("width", [16, 64])
def test_layer_norm_forgets_the_mean(norm: str, width: int) -> None:
    # The teacher's own output is below 1e-3, so it moves the floor by less than 1e-3 of 1 / d.
    found, error = mean_and_error(replace(BASE, norm=norm, width=width))
    assert abs(found - 25e-6 - 1 / width) < 4 * error + 1e-3 / width


def test_from_depth_two_on_rms_norm_forgets_nothing_and_none_never_does() -> None:
    for cfg in (replace(BASE, norm="rms"), replace(BASE, norm="none", depth=1)):
        assert irreducible_loss(cfg).loss == 25e-6


def chi_variance(k: int) -> float:
    """Variance of the norm of k standard normals."""
    return float(k - 2 * math.exp(2 * (gammaln((k + 1) / 2) - gammaln(k / 2))))


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_at_depth_one_the_scale_is_forgotten_too(norm: str) -> None:
    cfg = replace(BASE, norm=norm, depth=1, teacher_gain=1e-6)  # no teacher: a closed form
    expected = chi_variance(64) / 64 if norm == "rms" else (1 + chi_variance(63)) / 64
    found, error = mean_and_error(cfg)
    assert abs(found - 25e-6 - expected) < 4 * error


def test_a_linear_teacher_in_closed_form() -> None:
    # y - x = (A - I) x: of the mean m 1, m ~ N(0, 1/d), (A - I) 1 m is lost.
    cfg = replace(
        BASE, width=16, teacher_activation="linear", teacher_gain=3.0, teacher_depth=1, seed=3
    )
    [(w1, w2)] = mxsim.make_teacher(cfg).layers
    ones = np.ones(16)
    lost = (w2.astype(float) @ w1 @ ones - ones) ** 2
    expected = 25e-6 + lost.mean() / 16
    floor = irreducible_loss(cfg)
    assert abs(floor.loss - expected) < 4 * floor.standard_error
    assert abs(expected - 1 / 16) > 8 * floor.standard_error  # it is not the zero teacher's


@pytest.mark.parametrize("norm", ["layer", "rms", "none"])
def test_no_trained_student_is_below(norm: str) -> None:
    cfg = mxsim.ProxyConfig(
        width=16, depth=2, batch=128, steps=600, lr=5e-3, norm=norm, eval_samples=16384
    )
    cfg = replace(cfg, schedule="cosine")
    run = mxsim.train(cfg, mxsim.scheme("exact"))
    floor = irreducible_loss(cfg)
    sampling = floor.loss * math.sqrt(2 / 16384)  # of a mean square over independent samples
    assert run.eval_loss > floor.loss - 4 * (sampling + floor.standard_error)
    if norm == "layer":  # the others' floor, label noise alone, is 600 times deeper and far away
        assert run.eval_loss < 1.5 * floor.loss
