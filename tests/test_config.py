"""ProxyConfig: validation and derived sizes."""

from typing import Any

import numpy as np
import pytest

from mxsim import ProxyConfig


@pytest.mark.parametrize("name", ["width", "depth", "batch", "steps", "eval_samples"])
@pytest.mark.parametrize("value", [0, -3])
def test_sizes_must_be_positive(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name} must be at least 1; got {value}"):
        ProxyConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [64.0, "64", None, True, [64]])
def test_sizes_must_be_integers(value: Any) -> None:
    with pytest.raises(TypeError, match="width must be an integer"):
        ProxyConfig(width=value)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"lr": 0.0}, ValueError, "lr must be a finite number above 0; got 0.0"),
        ({"lr": float("nan")}, ValueError, "lr.*nan"),
        ({"lr": float("inf")}, ValueError, "lr.*inf"),
        ({"lr": "1e-3"}, TypeError, "lr.*'1e-3'"),
        ({"lr": 1j}, TypeError, "lr"),
        ({"lr": b"0.1"}, TypeError, "lr"),
        ({"lr": np.bool_(True)}, TypeError, "lr"),
        ({"lr": 10**400}, ValueError, "lr"),
        ({"beta1": 1.0}, ValueError, "beta1.*below 1; got 1.0"),
        ({"label_noise": -1}, ValueError, "label_noise.*at least 0"),
        ({"seed": -1}, ValueError, "seed must be at least 0; got -1"),
        ({"activation": "tanh"}, ValueError, "activation.*gelu.*got 'tanh'"),
        ({"teacher_activation": "tanh"}, ValueError, "teacher_activation.*gelu.*got 'tanh'"),
        ({"optimizer": "adamw9"}, ValueError, "optimizer.*adam, adamw, sgd; got 'adamw9'"),
        ({"dtype": "float16"}, ValueError, "dtype.*float32, float64; got 'float16'"),
        ({"dataset_size": 512}, ValueError, "dataset_size.*fresh.*512"),
        ({"data": "fixed", "dataset_size": 300}, ValueError, "multiple of batch.*256.*300"),
        ({"teacher_depth": 0}, ValueError, "teacher_depth must be at least 1"),
        ({"gamma_sd": 1e39}, ValueError, "gamma_sd must be within float32"),
        ({"lr": 1e39}, ValueError, "lr must be within float32, at most 3.40282e.38; got 1e.39"),
        ({"ln_eps": 1e-46}, ValueError, "ln_eps must be within float32, at least"),
        ({"norm": "batch"}, ValueError, "layer, layer_no_affine, rms, none; got 'batch'"),
        ({"gamma_mean": float("-inf")}, ValueError, "gamma_mean must be a finite number; got -inf"),
        ({"gamma_sd": -1.0}, ValueError, "gamma_sd.*at least 0"),
        ({"grad_clip": 0.0}, ValueError, "grad_clip.*above 0"),
        ({"warmup": -1}, ValueError, "warmup must be at least 0; got -1"),
        ({"schedule": "step"}, ValueError, "decay_every must be given.*None with 'step'"),
        ({"decay_every": 5}, ValueError, "decay_every.*5 with 'constant'"),
        ({"weight_decay": 0.1}, ValueError, "weight_decay must be 0 unless.*0.1 with 'adam'"),
    ],
)
def test_refusals_name_field_value_and_range(
    changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        ProxyConfig(**changes)


def test_numbers_are_normalized_so_that_equal_configs_compare_equal() -> None:
    plain = ProxyConfig(width=32, lr=1.0)
    numpy = ProxyConfig(width=np.int64(32), lr=np.float64(1))  # type: ignore[arg-type]
    assert numpy == plain
    assert type(numpy.width) is int
    assert type(ProxyConfig(lr=1).lr) is float


def test_hidden_widths() -> None:
    assert ProxyConfig(width=64).hidden == 256
    assert ProxyConfig(width=64, activation="swiglu").hidden == 171  # round(8 * 64 / 3)
