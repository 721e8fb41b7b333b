"""One run under a person's eyes: what ``mxsim train`` does.

A run has a folder, named by its id: ``run.json`` (configuration, versions, status), ``series.npz``
and ``checkpoint.npz``.  Started again, an unfinished run goes on from its checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mxsim.bias import ProbePlan
from mxsim.checkpoint import ForeignVersion, load_checkpoint, save_checkpoint
from mxsim.config import ProxyConfig
from mxsim.estimate import cost_of, in_words
from mxsim.precision import PrecisionScheme
from mxsim.proxy import parameter_count
from mxsim.store import DamagedResult, Store, write_whole
from mxsim.sweep import Point, record_of
from mxsim.train import Run, Training, start

CHECKPOINT = "checkpoint.npz"
QUIET_INTERVAL = 10.0  # seconds between lines when the output is not a terminal
UPDATE_INTERVAL = 0.25  # seconds between updates of the bar


@dataclass(frozen=True)
class Single:
    """One run and where it is kept.  ``probe_every`` 0: no probes; ``save_every`` in seconds."""

    config: ProxyConfig
    scheme_name: str
    scheme: PrecisionScheme
    probe_every: int
    folder: Path
    save_every: float = 60.0
    threads: int = 1
    backend: str = "numba"  # or torch, on ``device``
    device: str = "cpu"

    @property
    def point(self) -> Point:
        probe = None
        if self.probe_every and not self.scheme.is_exact:
            probe = ProbePlan(self.probe_every, ((self.scheme_name, self.scheme),))
        return Point(self.config, self.scheme, probe)

    @property
    def task(self) -> Any:
        """The point, or the TorchPoint."""
        p = self.point
        if self.backend == "numba":
            return p
        return _torch("points").TorchPoint(p.config, p.scheme, self.device, p.probe, p.rule)

    @property
    def place(self) -> Path:
        """The run's own folder."""
        name = re.sub(r"[^A-Za-z0-9_]+", "_", self.scheme_name)
        return self.folder / f"{name}-{self.task.id}"


def _torch(module: str) -> Any:
    """A module of the PyTorch backend, which is optional."""
    try:
        return import_module(f"mxsim.backends.torch_{module}")
    except ModuleNotFoundError as error:
        raise ImportError(
            "backend 'torch' needs PyTorch: pip install torch (in a clone, make crosscheck "
            "does so in .venv-torch)"
        ) from error


def describe(single: Single, console: Console) -> None:
    """Say what would run and how long it should take."""
    cfg, point = single.config, single.point
    console.print(
        f"scheme {single.scheme_name} (mxsim scheme {single.scheme_name}), "
        f"{cfg.depth} blocks of width {cfg.width}, {parameter_count(cfg):,} parameters, "
        f"{cfg.activation}, batch {cfg.batch}, {cfg.optimizer} at {cfg.lr:g} ({cfg.schedule}), "
        f"seed {cfg.seed}, {cfg.dtype}",
        highlight=False,
        soft_wrap=True,
    )
    if single.backend == "torch":
        step = _torch("train").seconds_a_step(cfg, single.scheme, single.device)
        words = f"{cfg.steps} steps of {1e3 * step:.2f} ms by PyTorch on {single.device}: about "
        words += f"{in_words(cfg.steps * step)}, and the probes"
    else:
        cost = cost_of(cfg, single.scheme, point.probe)
        probes = 0 if point.probe is None else -(-cfg.steps // point.probe.every)
        words = (
            f"{cfg.steps} steps of {1e3 * cost.step:.2f} ms, {probes} probes of "
            f"{1e3 * cost.probe:.1f} ms, held-out set {in_words(cost.evaluation)}: "
            f"about {in_words(cost.total)}"
        )
    console.print(words, highlight=False, soft_wrap=True)
    checkpoint, note = single.place / CHECKPOINT, "would write to"
    if checkpoint.exists():
        try:
            done = load_checkpoint(checkpoint).step
            note = f"would go on from step {done} of {cfg.steps} in"
        except (DamagedResult, OSError) as error:
            note = f"cannot go on ({error}); see"
    console.print(f"{note} {single.place}", highlight=False, soft_wrap=True)


def perform(single: Single, console: Console) -> int:
    """Run, or go on; 0 when the run has ended (whatever its status), 130 after Ctrl-C.

    Raises OSError, before a step is done, if the run's folder cannot be written, and ForeignVersion
    or ValueError if what is there belongs to another version or another run.
    """
    if single.backend == "torch":
        _torch("train").checked_device(single.device)
    place = single.place
    Store(place).check_writable()
    for leftover in place.glob(".*.tmp"):  # of a killed process
        leftover.unlink(missing_ok=True)
    checkpoint = place / CHECKPOINT
    training: Training | None = None
    try:
        training = _begin(single, checkpoint, console)
        _advance(training, checkpoint, single.save_every, console)
        save_checkpoint(training, checkpoint)
        run = training.finish()
    except KeyboardInterrupt:
        done = 0 if training is None else training.step
        words = "nothing was done yet"
        if training is not None and done:
            save_checkpoint(training, checkpoint)
            words = f"saved in {checkpoint}; the same command goes on from there"
        console.print(
            f"interrupted after {done} of {single.config.steps} steps, {words}",
            highlight=False,
            soft_wrap=True,
        )
        return 130
    console.print(summary(run), highlight=False, soft_wrap=True)
    _write(single, training, run)
    console.print(f"config, series and checkpoint: {place}", highlight=False, soft_wrap=True)
    return 0


def _begin(single: Single, checkpoint: Path, console: Console) -> Training:
    point = single.point
    try:
        training = load_checkpoint(checkpoint)
    except FileNotFoundError:
        return _start(single)
    except ForeignVersion:
        raise
    except DamagedResult as error:
        aside = checkpoint.with_name("checkpoint.damaged.npz")
        checkpoint.replace(aside)
        console.print(
            f"{error}: set aside as {aside.name}, starting over", highlight=False, soft_wrap=True
        )
        return _start(single)
    found = Point(training.config, training.scheme, training.probe, training.rule)
    if found != point:
        raise ValueError(f"{checkpoint} holds another run; remove it, or choose another --out")
    training.threads = single.threads
    console.print(
        f"going on from step {training.step} of {training.config.steps} ({checkpoint})",
        highlight=False,
        soft_wrap=True,
    )
    return _placed(single, training)


def _start(single: Single) -> Training:
    p = single.point
    begun = start(p.config, p.scheme, probe=p.probe, rule=p.rule, threads=single.threads)
    return _placed(single, begun)


def _placed(single: Single, training: Training) -> Training:
    """The run on the backend's device."""
    if single.backend == "numba":
        return training
    placed: Training = _torch("train").on_device(training, single.device)
    return placed


def _advance(training: Training, checkpoint: Path, save_every: float, console: Console) -> None:
    """Advance to the end, showing progress and saving now and then."""
    total = training.config.steps
    progress = Progress(
        TextColumn("train"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[state]}"),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        expand=True,
    )
    said = saved = time.monotonic()
    with progress:
        task = progress.add_task("train", total=total, completed=training.step, state="")
        training.advance(1)  # compiles; not counted in the speed
        began, first = time.monotonic(), training.step
        chunk = 1
        while not training.ended:
            before = time.monotonic()
            training.advance(chunk)
            now = time.monotonic()
            state = f"loss {training.losses[training.step - 1]:.5g}{_latest_zeta(training)}"
            progress.update(task, completed=training.step, state=state)
            chunk = max(int(chunk * UPDATE_INTERVAL / max(now - before, 1e-6)), 1)
            if not console.is_terminal and now - said > QUIET_INTERVAL:
                said = now
                left = (now - began) / max(training.step - first, 1) * (total - training.step)
                console.print(
                    f"step {training.step}/{total}, {state}, {in_words(left)} left",
                    highlight=False,
                    soft_wrap=True,
                )
            if now - saved > save_every:
                saved = now
                try:
                    save_checkpoint(training, checkpoint)
                except OSError as error:  # the run itself is well
                    console.print(f"not saved: {error}", highlight=False, soft_wrap=True)


def _latest_zeta(training: Training) -> str:
    if training.probes is None:
        return ""
    zeta = training.probes.zeta[:, 0, 0]
    seen = zeta[np.isfinite(zeta)]
    return f", zeta {seen[-1]:.3g}" if len(seen) else ""


def summary(run: Run) -> str:
    """Status, losses and time of a finished run, in a few lines."""
    lines = [f"status: {run.status}"]
    if run.first_bad_step is not None:
        where = f" in {run.first_bad_tensor}" if run.first_bad_tensor else ""
        lines[0] += f" (step {run.first_bad_step}{where})"
    best = run.losses[np.isfinite(run.losses)]
    lines.append(
        f"held-out loss {run.eval_loss:.6g} (trivial {max(run.zero_loss, run.input_power):.4g}), "
        f"last training loss {best[-1] if len(best) else math.nan:.6g}, "
        f"{len(run.spikes)} spikes"
    )
    if run.probes is not None:
        zeta = run.probes.zeta[:, 0, 0]
        zeta = zeta[np.isfinite(zeta)]
        if len(zeta):
            lines.append(
                f"zeta over {len(zeta)} probes: median {np.median(zeta):.3g}, "
                f"90 % {np.quantile(zeta, 0.9):.3g}, largest {zeta.max():.3g}"
            )
    done = run.config.steps if run.first_bad_tensor is None else (run.first_bad_step or 0) + 1
    line = f"{in_words(run.seconds)}, {1e3 * run.seconds / done:.2f} ms a step"
    if run.probes is not None:
        line += f"; probes took {100 * run.probe_seconds / run.seconds:.1f} % of it"
    lines.append(line)
    return "\n".join(lines)


def _write(single: Single, training: Training, run: Run) -> None:
    """run.json and series.npz of a finished run."""
    if single.backend == "numba":
        record = record_of(single.point, run)
    else:
        record = single.task.record(training, run)
    write_whole(single.place / "series.npz", record.arrays, record.meta)
    meta: dict[str, Any] = {"id": record.id, "scheme_name": single.scheme_name, **record.meta}
    text = json.dumps(_plain(meta), indent=1) + "\n"
    temporary = single.place / ".run.json.tmp"
    temporary.write_text(text)
    temporary.replace(single.place / "run.json")


def _plain(value: Any) -> Any:
    """JSON has no NaN or Inf: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
