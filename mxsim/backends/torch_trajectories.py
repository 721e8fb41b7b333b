"""Two runs side by side, step by step: by the Numba backend, and by PyTorch on a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxsim import data
from mxsim.backends.torch_flips import Flip, differing, explain
from mxsim.backends.torch_proxy import ieee_float32
from mxsim.backends.torch_sites import TENSORS, Tensor
from mxsim.backends.torch_step import DeviceStep
from mxsim.bias import bias_of
from mxsim.config import ProxyConfig
from mxsim.ops import squared_norm
from mxsim.optim import clip_gradient, optimizer_step
from mxsim.philox import Noise
from mxsim.precision import SITES, BlockPrecision, PrecisionScheme, precision_of
from mxsim.proxy import loss_and_grads_into, parameter_count, parameter_views, workspace
from mxsim.threads import one_blas_thread
from mxsim.train import start

Array = NDArray[Any]
Key = tuple[int, str]  # block, site
Operands = dict[Key, tuple[Array, Array]]  # before and after a site


@dataclass(frozen=True)
class StepComparison:
    """One step done by both: losses; |g_torch - g_cpu| / |g_cpu|; quantized values that differ."""

    step: int
    loss_cpu: float
    loss_torch: float
    zeta: float
    differing: int
    compared: int

    @property
    def loss_difference(self) -> float:
        """Relative to the CPU's loss."""
        return abs(self.loss_torch - self.loss_cpu) / abs(self.loss_cpu)


@dataclass(frozen=True)
class TrajectoryComparison:
    """``steps`` in order, and the first value that was quantized differently, with its cause.

    Not ``free_running``: both did each step from the CPU's state, so differences do not add up.
    """

    config: ProxyConfig
    scheme: PrecisionScheme
    device: str
    free_running: bool
    steps: tuple[StepComparison, ...]
    first_flip: Flip | None

    @property
    def words(self) -> str:
        """A few lines for people."""
        how = "free-running" if self.free_running else "each step from the CPU's state"
        flips = sum(s.differing for s in self.steps)
        total = sum(s.compared for s in self.steps)
        return "\n".join(
            (
                f"{len(self.steps)} steps, {how}: losses differ by at most "
                f"{max(s.loss_difference for s in self.steps):.1e}, gradients by "
                f"{max(s.zeta for s in self.steps):.1e}, relative; {flips:,} of {total:,} "
                "quantized values differ",
                "no quantized value differs" if self.first_flip is None else self.first_flip.words,
            )
        )


@dataclass(frozen=True)
class _Recording(BlockPrecision):
    """BlockPrecision that shows what goes through its sites."""

    seen: Callable[[str, int, Array, Array], None] = field(kw_only=True)

    def operand(self, site: str, x: Array, axis: int, out: Array) -> Array:
        before = x.copy()
        after = super().operand(site, x, axis, out)
        if self.rounders[site] is not None:
            self.seen(site, self.block, before, after.copy())
        return after


def compare_trajectories(
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    steps: int | None = None,
    device: str = "cpu",
    free_running: bool = False,
) -> TrajectoryComparison:
    """Train for ``steps`` steps (default cfg.steps) by both backends, on the CPU's batches.

    Each step starts from the CPU's state in both, unless ``free_running``: then each goes on from
    its own.  Every operand that a site quantizes is compared.  Stops early at a NaN or Inf.
    Raises ValueError if ``steps`` is more than cfg.steps.
    """
    count = cfg.steps if steps is None else steps
    if not 0 < count <= cfg.steps:
        raise ValueError(f"steps must be between 1 and cfg.steps ({cfg.steps}); got {steps}")
    cpu_seen: Operands = {}
    torch_seen: Operands = {}

    def keep_cpu(site: str, block: int, before: Array, after: Array) -> None:
        cpu_seen.setdefault((block, site), (before, after))  # a reused copy is made again

    def keep_torch(site: str, block: int, before: Tensor, after: Tensor) -> None:
        torch_seen[block, site] = (before.cpu().numpy(), after.cpu().numpy())

    run = start(cfg, scheme)
    batches = data.make_batches(cfg, data.make_teacher(cfg, scheme))
    ws, flat = workspace(cfg, cfg.batch, cfg.real), np.empty(parameter_count(cfg), cfg.real)
    grads = parameter_views(flat, cfg)
    on_device = DeviceStep(cfg, scheme, torch.device(device), seen=keep_torch)
    done: list[StepComparison] = []
    flip: Flip | None = None
    with one_blas_thread(), ieee_float32(), np.errstate(all="ignore"):
        for step in range(count):
            if step == 0 or not free_running:
                on_device.load(run.flat, run.optimizer.first, run.optimizer.second, step)
            x, y = batches.at(step)
            on_device.x.copy_(torch.from_numpy(x))
            on_device.y.copy_(torch.from_numpy(y))
            precision = tuple(
                _Recording(**vars(q), seen=keep_cpu)
                for q in precision_of(scheme, cfg.depth, cfg.seed, step)
            )
            loss = loss_and_grads_into(run.params, x, y, cfg, precision, ws, grads)
            torch_loss, gradient = on_device.gradient()
            found = _compare(step, cfg.seed, scheme, cpu_seen, torch_seen, first=flip is None)
            flip = flip or found[2]
            zeta = bias_of(flat, gradient.cpu().numpy()).zeta
            done.append(StepComparison(step, loss, float(torch_loss.item()), zeta, *found[:2]))
            if not math.isfinite(loss + zeta + done[-1].loss_torch):
                break
            clip_gradient(flat, math.sqrt(squared_norm(flat)), cfg)
            optimizer_step(run.flat, flat, run.optimizer, cfg, scheme)
            on_device.update(torch_loss, gradient)
            cpu_seen.clear()
            torch_seen.clear()
    return TrajectoryComparison(cfg, scheme, device, free_running, tuple(done), flip)


def _compare(
    step: int,
    seed: int,
    scheme: PrecisionScheme,
    cpu: Operands,
    other: Operands,
    first: bool,
) -> tuple[int, int, Flip | None]:
    """(values that differ, values compared, the first of them in the order of computation)."""
    differ = compared = 0
    flip = None
    for (block, site), (before, after) in cpu.items():
        if (block, site) not in other:  # dgrad into data: nothing asks for it
            continue
        how, noise = scheme.at(site, block), None
        if how.rounding == "stochastic":
            noise = Noise(seed, step, block * TENSORS + SITES.index(site))
        befores, afters = zip((before, after), other[block, site], strict=True)
        where = differing(site, how, noise, befores, afters)
        compared += where.size
        differ += int(where.sum())
        if first and flip is None and where.any():
            flip = explain(step, site, block, how, noise, befores, afters, where)
    return differ, compared, flip
