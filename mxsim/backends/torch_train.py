"""Training on a device: a Training whose steps PyTorch does, with the same series and checkpoints.

What a run is, how it is judged and saved is train.py's; a step's arithmetic is torch_step.py's.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxsim import data
from mxsim.backends.torch_data import DeviceTeacher, Feed
from mxsim.backends.torch_probe import probe as record_probe
from mxsim.backends.torch_proxy import (
    blocks_of,
    evaluate,
    gemm_settings,
    ieee_float32,
    loss_and_gradient,
    mean_square,
    predict,
)
from mxsim.backends.torch_sites import Tensor
from mxsim.backends.torch_step import DeviceStep, captured
from mxsim.bias import ProbePlan
from mxsim.config import ProxyConfig
from mxsim.layout import as_integer
from mxsim.outcome import DivergenceRule
from mxsim.precision import PrecisionScheme
from mxsim.proxy import parameter_views
from mxsim.train import Run, Training, first_nonfinite_parameter, start, uninterrupted

Array = NDArray[Any]
READ_EVERY = 50  # steps queued before their losses are read: the host waits once for them all


def checked_device(device: Any) -> Any:
    """``device`` (a name or a torch.device) as a torch.device; ValueError if it is not there."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device must be cpu, cuda or cuda:<index>; got {device!r}") from error
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu, cuda or cuda:<index>; got {device!r}")
    if found.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (found.index or 0) >= count:
            raise ValueError(f"device must be one that PyTorch sees ({count} GPUs); got {device!r}")
    return found


def describe_device(device: Any) -> dict[str, Any]:
    """What a run's arithmetic depended on: versions, device, settings of float32 GEMMs."""
    found = torch.device(device)
    gpu = found.type == "cuda"
    return {
        "device_name": torch.cuda.get_device_name(found) if gpu else platform.processor(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda if gpu else None,
        **gemm_settings(),
        "targets": "device" if gpu else "host",
        "torch_threads": None if gpu else torch.get_num_threads(),
    }


@dataclasses.dataclass(eq=False)
class TorchTraining(Training):
    """A run in progress on ``device``.

    Inherited arrays are the host's copy, up to date whenever ``advance`` is not running.
    graph: replay a captured step; None: on a GPU.  ``graph_words`` says what became of it.
    workers: threads that draw batches ahead; None: for a GPU its share of the cores, up to 12;
    none for a CPU, which computes no step meanwhile.
    """

    device: str = "cpu"
    graph: bool | None = None
    workers: int | None = None
    graph_words: str = "not asked for"

    @cached_property
    def step_on_device(self) -> DeviceStep:
        """The step, at the host's state when it is first asked for."""
        cfg, place = self.config, checked_device(self.device)
        teacher = DeviceTeacher(self._feed.batches.teacher, place) if self._feed.on_device else None
        step = DeviceStep(cfg, self.scheme, place, teacher)
        step.load(self.flat, self.optimizer.first, self.optimizer.second, self.step)
        return step

    @cached_property
    def _feed(self) -> Feed:
        cfg, place = self.config, checked_device(self.device)
        gpu = place.type == "cuda"
        batches = data.make_batches(cfg, data.make_teacher(cfg, self.scheme))
        spare = max((os.cpu_count() or 1) // max(torch.cuda.device_count(), 1) - 1, 1)
        workers = self.workers if self.workers is not None else min(spare, 12) if gpu else 0
        on_device = gpu and cfg.data == "fresh"  # a fixed set has its targets once and for all
        return Feed(cfg, batches, place, on_device, workers)

    @cached_property
    def replay(self) -> Callable[[], None] | None:
        """A replayed step, or None: op by op."""
        place = checked_device(self.device)
        if not (self.graph if self.graph is not None else place.type == "cuda"):
            return None
        self._put(self._feed.make(self.step))
        replay, self.graph_words = captured(self.step_on_device)
        return replay

    @property
    def last_gradient(self) -> Array:
        """Not kept: it would be a copy of all weights' size a step.  Raises AttributeError."""
        raise AttributeError("last_gradient is not kept by the torch backend")

    def reconfigure(self, cfg: ProxyConfig, scheme: PrecisionScheme) -> None:
        """Go on from here under other settings, of the same model and data."""
        for name in ("step_on_device", "replay"):
            self.__dict__.pop(name, None)
        if "_feed" in self.__dict__:
            self.__dict__.pop("_feed").close()
        super().reconfigure(cfg, scheme)

    def _put(self, batch: tuple[Tensor, Tensor]) -> None:
        step = self.step_on_device
        step.x.copy_(batch[0], non_blocking=True)
        step.y.copy_(batch[1], non_blocking=True)

    def advance(
        self,
        steps: int | None = None,
        on_step: Callable[[int, float], None] | None = None,
        on_gradient: Callable[[int, Array], None] | None = None,
    ) -> TorchTraining:
        """Do ``steps`` more steps, by default all that are left; stops at a NaN or Inf.

        on_step is called as losses are read, READ_EVERY steps at a time.  Returns self.  An
        exception, Ctrl-C included, leaves the state as it was after the last whole step.
        Raises ValueError for a negative number of steps, and for ``on_gradient``, which would have
        every gradient brought to the host.
        """
        if on_gradient is not None:
            raise ValueError(
                f"on_gradient must be None with the torch backend; got {on_gradient!r}"
            )
        count = self.config.steps if steps is None else as_integer("steps", steps, "an integer")
        if count < 0:
            raise ValueError(f"steps must be at least 0; got {count}")
        stop = min(self.step + count, self.config.steps)
        started, before = time.perf_counter(), self.seconds
        with ieee_float32(), np.errstate(all="ignore"):
            try:
                while self.step < stop and self.bad_step is None:
                    first = self.step
                    try:
                        self._queue(min(stop, first + READ_EVERY))
                    finally:
                        self._read(first)
                    if on_step:
                        for done in range(first, self.step):
                            on_step(done, self.losses[done])
            finally:
                self._copy_state()
                self.seconds = before + time.perf_counter() - started
        return self

    def _queue(self, stop: int) -> None:
        """Queue the steps up to ``stop``; probes wait for the device."""
        run, step = self.replay, self.step_on_device
        while self.step < stop:
            self._put(self._feed.take(self.step))
            if self.probe and self.probes and self.step % self.probe.every == 0:
                probing = time.perf_counter()
                flat, x, y = step.flat, step.x, step.targets()
                record_probe(self.probe, self.probes, self.step, flat, x, y, self.config)
                self.probe_seconds += time.perf_counter() - probing
            do = run or partial(step.update, *step.gradient())
            with uninterrupted():
                do()
                self.step += 1

    def _read(self, first: int) -> None:
        """Bring the losses from step ``first`` on to the host, and find where they end."""
        step, done = self.step_on_device, slice(first, self.step)
        self.losses[done] = step.losses[done].cpu().numpy()
        self.grad_norms[done] = step.norms[done].cpu().numpy()
        finite = np.isfinite(self.losses[done]) & np.isfinite(self.grad_norms[done])
        if finite.all():
            return
        self.bad_step = self.step = first + int(np.argmin(finite))
        self.losses[self.bad_step + 1 :] = np.nan
        self.grad_norms[self.bad_step + 1 :] = np.nan
        step.number.fill_(self.bad_step)
        self._put(self._feed.make(self.bad_step))
        self.bad_tensor = first_nonfinite(step, parameter_views(step.flat.cpu().numpy(), step.cfg))

    def _copy_state(self) -> None:
        step = self.step_on_device
        moments = (self.optimizer.first, self.optimizer.second)
        for held, each in zip((self.flat, *moments), step.state[:3], strict=True):
            np.copyto(held, each.cpu().numpy())
        self.optimizer.updates = self.step

    def close(self) -> None:
        """Stop drawing batches ahead: of a run that is not finished."""
        self._feed.close()

    @property
    def _batches(self) -> data.Batches:
        return self._feed.batches

    def _evaluate(self, x: Array, y: Array) -> float:
        step = self.step_on_device
        on_device = [torch.from_numpy(a).to(step.x.device) for a in (x, y)]
        with ieee_float32():
            cfg = self.config
            loss: float = evaluate(step.flat, *on_device, cfg, self.scheme, cfg.steps)
        return loss

    def finish(self) -> Run:
        """Evaluate on the held-out set and judge; ValueError while steps are left."""
        run = super().finish()
        self.close()
        return run

    def describe(self) -> dict[str, Any]:
        """``describe_device``, and whether a graph was replayed."""
        return {**describe_device(self.device), "cuda_graph": self.graph_words}


def on_device(
    training: Training,
    device: str = "cpu",
    *,
    graph: bool | None = None,
    workers: int | None = None,
) -> TorchTraining:
    """``training`` (from ``mxsim.start`` or a checkpoint) taken over by PyTorch on ``device``.

    Raises ValueError if PyTorch does not see the device.
    """
    checked_device(device)
    names = [f.name for f in dataclasses.fields(Training)]
    inherited = {name: getattr(training, name) for name in names}
    return TorchTraining(**inherited, device=device, graph=graph, workers=workers)


def train(
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    device: str = "cpu",
    *,
    probe: ProbePlan | None = None,
    rule: DivergenceRule | None = None,
    on_step: Callable[[int, float], None] | None = None,
    graph: bool | None = None,
) -> Run:
    """mxsim.train on ``device``; same arguments on the same device and versions, same bits."""
    training = on_device(start(cfg, scheme, probe=probe, rule=rule), device, graph=graph)
    return training.advance(on_step=on_step).finish()


def seconds_a_step(cfg: ProxyConfig, scheme: PrecisionScheme, device: str) -> float:
    """The time of a step on ``device``, from a few of them."""
    short = dataclasses.replace(cfg, steps=12, warmup=0)
    training = on_device(start(short, scheme), device).advance(4)
    before = training.seconds
    seconds = training.advance(8).seconds - before
    training.close()
    return seconds / 8


def first_nonfinite(step: DeviceStep, params: Any) -> str:
    """Name of the first tensor, in the order of computation, of ``step`` that is not finite.

    The step is done again on the batch in its buffers.
    """
    parameter = first_nonfinite_parameter(params)
    if parameter is not None:
        return parameter
    y, cfg = step.targets(), step.cfg
    tensors: list[tuple[str, Tensor]] = [("x", step.x), ("y", y)]
    with torch.no_grad():
        prediction = predict(
            blocks_of(step.flat, cfg),
            step.x,
            cfg,
            step.sites,
            lambda name, value: tensors.append((name, value)),
        )
        tensors += [("prediction", prediction), ("loss", mean_square(prediction, y))]
    _, gradient = loss_and_gradient(step.flat, step.x, y, cfg, step.sites)
    blocks = blocks_of(gradient, cfg)
    for k in reversed(range(cfg.depth)):
        order = ("b2", "w2", "w1", "ln_gamma", "ln_beta")  # as backward computes them
        tensors += [(f"block {k} gradient of {kind}", blocks[k][kind]) for kind in order]
    return next(
        (name for name, each in tensors if not each.isfinite().all()), "norm of the gradient"
    )
