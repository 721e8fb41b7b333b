"""A run by PyTorch as a task of a study: sweep.Point on a device, for any executor of executors.py.

Each process of a pool takes a GPU of its own, so a pool wants as many workers as there are GPUs
(``--workers 4``).  What is stored is a Point's record, with the backend among its settings and
what it ran on among its versions.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from mxsim.backends.torch_train import TorchTraining, on_device
from mxsim.bias import ProbePlan
from mxsim.config import ProxyConfig
from mxsim.outcome import DivergenceRule
from mxsim.precision import PrecisionScheme
from mxsim.store import Record, result_id
from mxsim.sweep import Point, record_of
from mxsim.train import Run, start


@dataclass(frozen=True)
class TorchPoint:
    """One run by PyTorch; ``device`` is ``cpu``, ``cuda`` (one GPU a worker) or ``cuda:<index>``.

    ``id`` hashes the settings with the backend and the device's type, but not with its index.
    """

    config: ProxyConfig
    scheme: PrecisionScheme
    device: str
    probe: ProbePlan | None = None
    rule: DivergenceRule = DivergenceRule()  # noqa: RUF009  (frozen)

    @property
    def point(self) -> Point:
        """What is run, whatever runs it."""
        return Point(self.config, self.scheme, self.probe, self.rule)

    @property
    def _where(self) -> dict[str, str]:
        return {"name": "torch", "device": self.device.partition(":")[0]}

    @cached_property
    def id(self) -> str:
        return result_id({"backend": self._where, "point": self.point})

    @property
    def words(self) -> str:
        return f"{self.point.words}, PyTorch on {self.device}"

    def settings(self) -> dict[str, Any]:
        """What determines the run, as plain JSON data."""
        return {**self.point.settings(), "backend": self._where}

    def run(self) -> Record:
        """Run it and make its record."""
        begun = start(self.config, self.scheme, probe=self.probe, rule=self.rule)
        training = on_device(begun, device_of_worker(self.device)).advance()
        return self.record(training, training.finish())

    def record(self, training: TorchTraining, run: Run) -> Record:
        """A Point's record, with ``backend``, and among the versions what it ran on."""
        plain = record_of(self.point, run)
        versions = {**plain.meta["versions"], **training.describe()}
        meta = {**plain.meta, "backend": self._where, "versions": versions}
        return dataclasses.replace(plain, id=self.id, meta=meta)


def device_of_worker(device: str) -> str:
    """``cuda`` in a worker of a pool: cuda:<the worker's number modulo that of GPUs>."""
    if device != "cuda" or not torch.cuda.is_available():
        return device
    numbers = multiprocessing.current_process()._identity
    worker = numbers[-1] - 1 if numbers else 0  # processes are numbered from 1; none: not a worker
    return f"cuda:{worker % torch.cuda.device_count()}"
