"""One training step on a device, and the same step as a CUDA graph.

The step works on buffers of its own and asks the host for nothing: its number, the learning rate
and the place of its loss are read on the device, and a NaN or Inf stops the weights there.  So many
steps can be queued, and on a GPU one step is captured once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxsim.backends.torch_data import DeviceTeacher
from mxsim.backends.torch_optim import clipped, coefficients, updated
from mxsim.backends.torch_proxy import loss_and_gradient
from mxsim.backends.torch_sites import Seen, Tensor, sites_of
from mxsim.config import ProxyConfig
from mxsim.precision import PrecisionScheme

Array = NDArray[Any]
TRIAL_STEPS = 2  # done both ways before a captured step is trusted
LARGEST_DIFFERENCE = 1e-3  # relative, of their losses: GEMMs may be cut otherwise, no more


class DeviceStep:
    """State, inputs and results of a run on a device; calling it does one step.

    - flat, first, second (size,): weights and moments.
    - number (1,): the step that is done next.
    - x, y (batch, width): the inputs; y holds the labels' noise if a ``teacher`` is given.
    - losses, norms (steps,): float64, of each step, before its update.
    - stopped: whether a loss or a gradient was not finite; from there on nothing changes.
    """

    def __init__(
        self,
        cfg: ProxyConfig,
        scheme: PrecisionScheme,
        device: Any,
        teacher: DeviceTeacher | None = None,
        seen: Seen | None = None,
    ) -> None:
        self.cfg, self.scheme, self.teacher = cfg, scheme, teacher
        real = getattr(torch, cfg.dtype)
        new = {"device": device, "dtype": real}
        self.number = torch.zeros(1, dtype=torch.int64, device=device)
        self.sites = sites_of(scheme, cfg.depth, cfg.seed, self.number, seen)
        self.rates = torch.from_numpy(coefficients(cfg)).to(device)
        self.x, self.y = (torch.zeros(cfg.batch, cfg.width, **new) for _ in range(2))
        self.flat = self.first = self.second = torch.zeros(0, **new)
        self.losses, self.norms = (
            torch.full((cfg.steps,), np.nan, dtype=torch.float64, device=device) for _ in range(2)
        )
        self.stopped = torch.zeros((), dtype=torch.bool, device=device)

    def load(self, flat: Array, first: Array, second: Array, step: int) -> None:
        """Take up the state of a run after ``step`` steps."""
        arrays = (flat, first, second)
        self.flat, self.first, self.second = (
            torch.from_numpy(a.copy()).to(self.x.device) for a in arrays
        )
        self.number.fill_(step)

    @property
    def state(self) -> tuple[Tensor, ...]:
        """All that a step changes."""
        return (
            self.flat,
            self.first,
            self.second,
            self.number,
            self.losses,
            self.norms,
            self.stopped,
        )

    def targets(self) -> Tensor:
        """y of the batch in the buffers."""
        return self.y if self.teacher is None else self.teacher(self.x) + self.y

    def gradient(self) -> tuple[Tensor, Tensor]:
        """Loss and flat gradient at the weights, on the batch in the buffers."""
        return loss_and_gradient(self.flat, self.x, self.targets(), self.cfg, self.sites)

    def update(self, loss: Tensor, gradient: Tensor) -> None:
        """Write loss and norm down and update the weights, unless something is not finite."""
        cfg = self.cfg
        norm = torch.linalg.vector_norm(gradient, dtype=torch.float64)
        self.losses.index_copy_(0, self.number, loss[None])
        self.norms.index_copy_(0, self.number, norm[None])
        self.stopped.logical_or_(~(loss.isfinite() & norm.isfinite()))
        row = self.rates.index_select(0, self.number)[0]
        new = updated(
            self.flat,
            clipped(gradient, norm, cfg),
            self.first,
            self.second,
            row,
            cfg,
            self.scheme,
            self.sites[0].bf16,
        )
        for held, each in zip((self.flat, self.first, self.second), new, strict=True):
            held.copy_(torch.where(self.stopped, held, each))
        self.number.add_(1)

    def __call__(self) -> None:
        self.update(*self.gradient())


def captured(step: DeviceStep) -> tuple[Callable[[], None] | None, str]:
    """``step`` as one CUDA graph, with the state as it was, and how that went.

    None and the reason where it cannot be captured, or where two replays do not follow two steps
    done one by one.
    """
    if step.x.device.type != "cuda":
        return None, "no: CUDA graphs need a GPU"
    with torch.cuda.device(step.x.device):
        return _captured(step)


def _captured(step: DeviceStep) -> tuple[Callable[[], None] | None, str]:
    before = [t.clone() for t in step.state]

    def restore() -> None:
        for held, each in zip(step.state, before, strict=True):
            held.copy_(each)

    def trial(function: Callable[[], object]) -> Tensor:
        restore()
        first = step.number.clone()
        for _ in range(TRIAL_STEPS):
            function()
        return step.losses.index_select(0, first.expand(1) + TRIAL_STEPS - 1).cpu()

    if int(step.number.item()) + TRIAL_STEPS > step.cfg.steps:
        return None, "no: too few steps are left"
    try:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as capturing asks for: libraries warm up on a side stream
            expected = trial(step)
        torch.cuda.current_stream().wait_stream(side)
        restore()
        graph = torch.cuda.CUDAGraph()
        # other threads may go on drawing batches, which pins memory
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            step()
        found = trial(graph.replay)
    except RuntimeError as error:
        restore()
        reason = str(error).strip().splitlines()[0]
        return None, f"no: capturing failed ({reason})"
    restore()
    if torch.equal(found, expected):
        return graph.replay, "yes: the bits of a step done op by op"
    difference = abs(found.item() - expected.item()) / (abs(expected.item()) or 1.0)
    if difference <= LARGEST_DIFFERENCE:
        return graph.replay, f"yes: losses differ by {difference:.1e} from a step done op by op"
    return None, f"no: replayed steps differ by {difference:.1e} in their loss"
