"""Training in PyTorch: the Numba backend's runs, also stopped and gone on with, or non-finite."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import mxsim
from mxsim import data
from mxsim.backends import torch_step
from mxsim.backends.torch_data import DeviceTeacher, Feed, draw
from mxsim.backends.torch_optim import clipped, coefficients, updated
from mxsim.backends.torch_sites import sites_of
from mxsim.backends.torch_step import DeviceStep
from mxsim.backends.torch_train import checked_device, on_device, train
from mxsim.optim import clip_gradient, optimizer_state, optimizer_step

pytestmark = pytest.mark.usefixtures("single_threaded")

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=64, lr=5e-3, steps=12, eval_samples=128)
WIDE = dataclasses.replace(CFG, dtype="float64")
TURNS: dict[str, dict[str, Any]] = {
    "adam": {"grad_clip": 0.05},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "warmup": 3},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "schedule": "step", "decay_every": 5},
    "mini-batches": {"data": "fixed", "dataset_size": 256},
}


@pytest.mark.parametrize(
    ("words", "scheme_name"),
    [
        ("adam", "nvfp4_recipe"),
        ("adam", "paper_code"),
        ("adamw", "all_e4m3"),
        ("sgd", "bf16"),
        ("mini-batches", "exact"),
    ],
)
def test_a_float64_run_is_that_of_the_numba_backend(words: str, scheme_name: str) -> None:
    """No rounding boundary is met, so all that differs is float64's last places, 2^-52 a step."""
    cfg = dataclasses.replace(WIDE, **TURNS[words])
    scheme = dataclasses.replace(mxsim.scheme(scheme_name), moments="bf16", master_weights="bf16")
    plan = mxsim.ProbePlan(5, (("same", mxsim.scheme("all_e4m3")),))
    expected, found = (f(cfg, scheme, probe=plan) for f in (mxsim.train, train))
    assert found.probes is not None
    assert expected.probes is not None
    close = 2.0**-40  # 4096 units in the last place
    for name in ("losses", "grad_norms", "eval_loss", "zero_loss", "input_power"):
        np.testing.assert_allclose(
            getattr(found, name), getattr(expected, name), close, err_msg=name
        )
    for name in ("norm", "zeta", "cos", "gamma_saturated", "gamma_mean"):
        a, b = getattr(found.probes, name), getattr(expected.probes, name)
        np.testing.assert_allclose(a, b, close, 2.0**-45, err_msg=name)
    for a, b in zip(found.params, expected.params, strict=True):  # masters are bf16: all bits
        for kind in a:
            np.testing.assert_array_equal(a[kind], b[kind], err_msg=kind)
    assert found.outcome.status == expected.outcome.status


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("words", ["adam", "adamw", "sgd"])
def test_updates_have_the_bits_of_the_numba_backend(words: str, dtype: str) -> None:
    """But for Adam's root: 1.5 u of PyTorch's, and u each of Numba's and of what is made of it."""
    cfg = dataclasses.replace(CFG, dtype=dtype, **TURNS[words])
    u = float(np.finfo(dtype).eps) / 2
    for states in ("fp32", "bf16"):
        masters = states if words == "sgd" else "fp32"
        scheme = mxsim.PrecisionScheme(moments=states, master_weights=masters)
        rng, size = np.random.default_rng(0), 1000
        flat, state = rng.standard_normal(size).astype(dtype), optimizer_state(cfg, size)
        rows, bf16 = torch.from_numpy(coefficients(cfg)), sites_of(scheme, 1, seed=0)[0].bf16
        for step in range(cfg.steps):
            gradient = rng.standard_normal(size).astype(dtype) * np.asarray(0.01, dtype)
            gradient[:10] = 0
            before, first, second, given = (
                torch.from_numpy(a.copy()) for a in (flat, state.first, state.second, gradient)
            )
            norm = torch.linalg.vector_norm(given, dtype=torch.float64)
            clip_gradient(gradient, float(norm), cfg)
            optimizer_step(flat, gradient, state, cfg, scheme)
            clip = clipped(given, norm, cfg)
            found, *moments = updated(before, clip, first, second, rows[step], cfg, scheme, bf16)
            for a, b in zip(moments, (state.first, state.second), strict=True):
                assert a.numpy().tobytes() == b.tobytes()
            change = np.abs(flat - before.numpy())
            slack = 0 if words == "sgd" else 8 * u * change + 2 * u * np.abs(flat)
            assert (np.abs(found.numpy() - flat) <= slack).all()


def test_a_run_that_stopped_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    scheme = mxsim.scheme("nvfp4_recipe")
    whole = train(CFG, scheme)
    stopped = on_device(mxsim.start(CFG, scheme)).advance(5)
    path = mxsim.save_checkpoint(stopped, tmp_path / "run.npz")
    resumed = on_device(mxsim.load_checkpoint(path)).advance().finish()
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    np.testing.assert_array_equal(resumed.grad_norms, whole.grad_norms)
    assert resumed.eval_loss == whole.eval_loss
    for a, b in zip(resumed.params, whole.params, strict=True):
        for kind in a:
            np.testing.assert_array_equal(a[kind], b[kind])


def test_ctrl_c_leaves_the_state_after_a_whole_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    scheme = mxsim.scheme("all_e4m3")
    run = on_device(mxsim.start(CFG, scheme))
    gradient = DeviceStep.gradient

    def interrupted(step: DeviceStep) -> Any:
        if step.number.item() == 7:
            raise KeyboardInterrupt
        return gradient(step)

    monkeypatch.setattr(DeviceStep, "gradient", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run.advance()
    monkeypatch.undo()
    assert run.step == run.optimizer.updates == 7
    assert np.isfinite(run.losses).sum() == 7
    path = mxsim.save_checkpoint(run, tmp_path / "run.npz")
    resumed = on_device(mxsim.load_checkpoint(path)).advance().finish()
    np.testing.assert_array_equal(resumed.losses, train(CFG, scheme).losses)


@pytest.mark.parametrize("scheme_name", ["exact", "all_e4m3"])
def test_a_run_stops_where_a_tensor_is_not_finite(scheme_name: str) -> None:
    cfg = dataclasses.replace(CFG, optimizer="sgd", lr=1e30)
    expected, found = (f(cfg, mxsim.scheme(scheme_name)) for f in (mxsim.train, train))
    assert found.outcome == expected.outcome
    assert found.status == "nonfinite"
    np.testing.assert_array_equal(np.isfinite(found.losses), np.isfinite(expected.losses))
    # the parameters are those before the step that failed
    assert all(np.isfinite(values).all() for block in found.params for values in block.values())


def test_losses_are_told_as_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mxsim.backends.torch_train.READ_EVERY", 5)
    told: list[tuple[int, float]] = []
    run = train(CFG, mxsim.scheme("exact"), on_step=lambda *what: told.append(what))
    assert told == list(enumerate(run.losses))


@pytest.mark.parametrize("scheme_name", ["exact", "paper_code", "all_e4m3"])
@pytest.mark.parametrize("activation", ["gelu", "swiglu", "relu"])
def test_targets_made_on_the_device_are_the_hosts(activation: str, scheme_name: str) -> None:
    cfg = dataclasses.replace(WIDE, activation=activation)
    batches = data.make_batches(cfg, data.make_teacher(cfg, mxsim.scheme(scheme_name)))
    x, y = batches.at(4)
    drawn, noise = draw(cfg, 4)
    np.testing.assert_array_equal(drawn, x)
    teacher = DeviceTeacher(batches.teacher, "cpu")
    found = teacher(torch.from_numpy(x)) + torch.from_numpy(noise)
    np.testing.assert_allclose(found.numpy(), y, 0, 2.0**-45 * np.abs(y).max())


def test_batches_are_those_of_the_host_in_any_order() -> None:
    batches = data.make_batches(CFG, data.make_teacher(CFG))
    feed = Feed(CFG, batches, torch.device("cpu"), on_device=False, workers=2)
    for step in (0, 1, 2, 7, 3, CFG.steps - 1):
        for found, expected in zip(feed.take(step), batches.at(step), strict=True):
            np.testing.assert_array_equal(found.numpy(), expected)
    feed.close()


def test_what_the_device_does_not_have_is_refused() -> None:
    for name in ("tpu", "meta", 3.5):
        with pytest.raises(ValueError, match="device must be cpu, cuda"):
            checked_device(name)
    with pytest.raises(ValueError, match="on_gradient must be None"):
        on_device(mxsim.start(CFG, mxsim.scheme("exact"))).advance(on_gradient=lambda *_: None)
    with pytest.raises(ValueError, match="2 of 12 steps are done"):
        on_device(mxsim.start(CFG, mxsim.scheme("exact"))).advance(2).finish()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_refused_and_no_graph_is_captured() -> None:
    with pytest.raises(ValueError, match="one that PyTorch sees"):
        checked_device("cuda")
    run = on_device(mxsim.start(CFG, mxsim.scheme("exact")), graph=True).advance(1)
    assert run.describe()["cuda_graph"] == "no: CUDA graphs need a GPU"
    assert run.describe()["targets"] == "host"


class Pretended:
    """torch.cuda as far as capturing asks for it, on the CPU: nothing is done while capturing."""

    def __init__(self, step: DeviceStep, replay: Any, error: str | None = None) -> None:
        self.step, self.replay, self.error = step, replay, error

    @contextmanager
    def graph(self, graph: Any, capture_error_mode: str) -> Iterator[None]:
        before = [t.clone() for t in self.step.state]
        yield
        for held, each in zip(self.step.state, before, strict=True):
            held.copy_(each)
        if self.error:
            raise RuntimeError(self.error)

    def CUDAGraph(self) -> Any:
        return SimpleNamespace(replay=self.replay)

    def Stream(self) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    current_stream = Stream

    def stream(self, stream: Any) -> Any:
        return nullcontext()


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("whole", "yes: the bits of a step done op by op"),
        ("idle", "no: replayed steps differ by nan"),
        ("stale", "no: replayed steps differ by"),
        ("refused", "no: capturing failed (an operation is not permitted)"),
    ],
)
def test_a_captured_step_is_trusted_if_it_does_what_steps_do(
    kind: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = dataclasses.replace(CFG, lr=0.05)
    run = on_device(mxsim.start(cfg, mxsim.scheme("all_e4m3"))).advance(3)
    step = run.step_on_device

    def stale() -> None:  # what was captured does not see the weights move
        flat = step.flat.clone()
        step()
        step.flat.copy_(flat)

    replays = {"whole": step, "idle": lambda: None, "stale": stale, "refused": step}
    error = "an operation is not permitted\nmore words" if kind == "refused" else None
    monkeypatch.setattr(torch, "cuda", Pretended(step, replays[kind], error))
    before = [t.clone() for t in step.state]
    replay, found = torch_step._captured(step)
    assert found.startswith(words)
    assert (replay is not None) == (kind == "whole")
    for held, each in zip(step.state, before, strict=True):
        np.testing.assert_array_equal(held.numpy(), each.numpy())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("scheme_name", ["exact", "all_e4m3", "nvfp4_recipe"])
def test_a_captured_step_is_the_step(scheme_name: str) -> None:
    scheme = mxsim.scheme(scheme_name)
    plain, replayed = (
        on_device(mxsim.start(CFG, scheme), "cuda", graph=graph).advance()
        for graph in (False, True)
    )
    assert replayed.graph_words.startswith("yes")
    np.testing.assert_allclose(replayed.losses, plain.losses, torch_step.LARGEST_DIFFERENCE)
