"""Batches for a device: the numbers of mxsim.data, drawn ahead by threads of the host.

Inputs and label noise are the same bits on every backend.  Targets are the host's own, bit for bit,
or (``on_device``) the teacher's forward pass on the device, which agrees up to accumulation: at
width 512, depth 4 and batch 2048 a core of the host draws a batch in 21 ms and makes its targets
in 95 ms, which a GPU does in a fraction of a millisecond.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxsim import data
from mxsim.backends.torch_activation import by_steps, exact
from mxsim.backends.torch_sites import Tensor, sites_of
from mxsim.config import ProxyConfig
from mxsim.threads import one_blas_thread

Array = NDArray[Any]


class DeviceTeacher:
    """data.Teacher on a device: x (n, d) -> (n, d), in the arithmetic of its scheme."""

    def __init__(self, teacher: data.Teacher, device: Any) -> None:
        self.activation = teacher.activation
        self.layers = [tuple(torch.from_numpy(w).to(device) for w in ws) for ws in teacher.layers]
        [self.sites] = sites_of(teacher.scheme, 1, seed=0)

    @torch.no_grad()  # type: ignore[untyped-decorator,unused-ignore]
    def __call__(self, x: Tensor) -> Tensor:
        s = self.sites
        for w1, w2 in self.layers:
            u = self._linear(x, w1, "fc1")
            if s.scheme.forward.activation == "exact":
                hidden = exact(u, self.activation)
            else:
                hidden = by_steps(u, self.activation, s.bf16)
            x = self._linear(hidden, w2, "fc2")
        return x

    def _linear(self, x: Tensor, w: Tensor, layer: str) -> Tensor:
        """x w^T; the weights of a quantized teacher come rounded."""
        s = self.sites
        x = s.operand(f"{layer}_fprop_x", s.rounding("forward", "gemm_in")(x), 1)
        return s.rounding("forward", "gemm_out")(x @ w.T)


def draw(cfg: ProxyConfig, step: int) -> tuple[Array, Array]:
    """x and the labels' noise of ``step``, (batch, width) float32, as mxsim.data draws them."""
    rng = data.generator(cfg.seed, data.BATCH, step)
    shape = (cfg.batch, cfg.width)
    x = rng.standard_normal(shape, dtype=np.float32)
    noise = rng.standard_normal(shape, dtype=np.float32)
    return x, noise * np.float32(cfg.label_noise)


class Feed:
    """The batches of a run, two for each of ``workers`` threads drawn ahead; 0: none are.

    ``take(step)`` gives (x, y), or (x, noise) if targets are made on the device, as host tensors,
    pinned for a GPU.  A batch is a pure function of its step, so any step can be taken at any time.
    """

    def __init__(
        self, cfg: ProxyConfig, batches: data.Batches, device: Any, on_device: bool, workers: int
    ) -> None:
        self.cfg, self.batches, self.device, self.on_device = cfg, batches, device, on_device
        self.ahead = 2 * workers
        self.pool = ThreadPoolExecutor(workers, thread_name_prefix="batches") if workers else None
        self.pending: dict[int, Future[tuple[Tensor, Tensor]]] = {}

    def make(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of ``step``, drawn by the calling thread."""
        if self.on_device:
            arrays = draw(self.cfg, step)
        else:
            with one_blas_thread(), np.errstate(all="ignore"):
                arrays = self.batches.at(step)
        tensors = [torch.from_numpy(a) for a in arrays]
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                tensors = [t.pin_memory() for t in tensors]
        return tensors[0], tensors[1]

    def take(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of ``step``; those after it are being drawn meanwhile."""
        if self.pool is None:
            return self.make(step)
        last = min(step + self.ahead, self.cfg.steps - 1)
        for wanted in range(step, last + 1):
            if wanted not in self.pending:
                self.pending[wanted] = self.pool.submit(self.make, wanted)
        for passed in [each for each in self.pending if each < step]:
            self.pending.pop(passed).cancel()
        return self.pending.pop(step).result()

    def close(self) -> None:
        """Stop drawing, for good."""
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)
