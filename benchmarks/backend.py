"""How fast is a training step by PyTorch, on a CPU or a GPU, beside the Numba backend's?

    python -m benchmarks.backend [--device cpu|cuda] [--width 512 --depth 4 --batch 2048] [--out F]

A step is forward, backward and Adam; ``with data`` adds the drawing of batches, their way to the
device and the teacher's targets.  Beside our schemes: the same student of torch.nn modules, in
float32 and under bf16 autocast, and the Numba backend on this machine's cores.  Memory is the most
that PyTorch held on the GPU at a time.  ``op by op``: without a CUDA graph.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import mxsim
from mxsim.backends.torch_proxy import ieee_float32
from mxsim.backends.torch_train import checked_device, describe_device, on_device
from mxsim.store import provenance

SCHEMES = ("exact", "all_e4m3", "nvfp4_recipe")
WARM_UP, SECONDS, MOST = 5, 1.5, 400  # steps; time and steps that a measurement takes


@dataclass(frozen=True)
class Row:
    """ms a step (median of five parts), alone and with data; MiB on the GPU; what of a graph."""

    what: str
    step: float
    with_data: float | None = None
    memory: float | None = None
    note: str = ""


def wait(device: Any) -> None:
    """Until the device has done all that is queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(step: Callable[[], object], device: Any) -> float:
    """Median over five parts of a measurement of about SECONDS."""
    for _ in range(WARM_UP):
        step()
    wait(device)
    started = time.perf_counter()
    step()
    wait(device)
    once = time.perf_counter() - started
    steps = int(min(max(SECONDS / once, 5), MOST)) // 5
    parts = []
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        parts.append((time.perf_counter() - started) / steps)
    return 1e3 * float(np.median(parts))


def measured(cfg: mxsim.ProxyConfig, scheme: str, device: Any, graph: bool) -> Row:
    """A scheme's step by the torch backend."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    run = on_device(mxsim.start(cfg, mxsim.scheme(scheme)), str(device), graph=graph)
    run.advance(WARM_UP)
    with ieee_float32():
        alone = milliseconds(run.replay or run.step_on_device, device)
    memory = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    run = on_device(mxsim.start(cfg, mxsim.scheme(scheme)), str(device), graph=graph)
    run.advance(WARM_UP)
    steps, before = int(min(max(1e3 * SECONDS / alone, 5), MOST)), run.seconds
    run.advance(steps)
    with_data = 1e3 * (run.seconds - before) / steps
    run.close()
    words = "" if device.type == "cpu" else run.graph_words if graph else "op by op"
    return Row(f"torch {scheme}", alone, with_data, memory, words)


def by_numba(cfg: mxsim.ProxyConfig, scheme: str) -> Row:
    """A scheme's step by the Numba backend on all cores."""
    threads = os.cpu_count() or 1
    run = mxsim.start(cfg, mxsim.scheme(scheme), threads=threads).advance(1)
    started = time.perf_counter()
    run.advance(1)
    steps = int(min(max(SECONDS / (time.perf_counter() - started), 2), MOST))
    started = time.perf_counter()
    run.advance(steps)
    with_data = 1e3 * (time.perf_counter() - started) / steps
    return Row(f"numba {scheme}", float("nan"), with_data, None, f"{threads} threads")


class Block(nn.Module):  # type: ignore[misc,unused-ignore]
    """A residual block of torch.nn modules."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, 4 * width, bias=False)
        self.fc2 = nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def modules(cfg: mxsim.ProxyConfig, device: Any, autocast: bool) -> Row:
    """The same student of torch.nn modules, torch.optim.Adam, op by op."""
    torch.manual_seed(0)
    student = nn.Sequential(*(Block(cfg.width) for _ in range(cfg.depth))).to(device)
    optimizer = torch.optim.Adam(student.parameters(), lr=cfg.lr)
    x, y = (torch.randn(cfg.batch, cfg.width, device=device) for _ in range(2))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    def step() -> None:
        optimizer.zero_grad()
        cast = torch.autocast(device.type, torch.bfloat16) if autocast else nullcontext()
        with cast:
            prediction = student(x)
        ((prediction - y) ** 2).mean().backward()
        optimizer.step()

    with ieee_float32():
        alone = milliseconds(step, device)
    memory = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else None
    return Row(f"torch.nn, {'bf16 autocast' if autocast else 'float32'}", alone, None, memory)


def table(rows: list[Row]) -> str:
    """The rows as text."""

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None or value != value else f"{value:.{digits}f}"

    cells = [("", "ms a step", "with data", "MiB", "")]
    for r in rows:
        cells.append(
            (r.what, number(r.step, 2), number(r.with_data, 2), number(r.memory, 0), r.note)
        )
    widths = [max(len(row[i]) for row in cells) for i in range(5)]
    lines = []
    for row in cells:
        middle = "  ".join(cell.rjust(w) for cell, w in zip(row[1:4], widths[1:4], strict=True))
        lines.append(f"{row[0]:<{widths[0]}}  {middle}  {row[4]}".rstrip())
    return "\n".join(lines)


def main() -> int:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--schemes", nargs="+", default=list(SCHEMES))
    parser.add_argument("--threads", type=int, help="of PyTorch on a CPU; default its own choice")
    parser.add_argument("--no-numba", action="store_true")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    device = checked_device(arguments.device)
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    cfg = mxsim.ProxyConfig(
        width=arguments.width,
        depth=arguments.depth,
        batch=arguments.batch,
        steps=4 * MOST,
        lr=6e-4,
        seed=1337,
    )
    rows = [modules(cfg, device, autocast) for autocast in (False, True)]
    for scheme in arguments.schemes:
        rows.append(measured(cfg, scheme, device, graph=device.type == "cuda"))
        if device.type == "cuda":
            rows.append(measured(cfg, scheme, device, graph=False))
    if not arguments.no_numba:
        rows += [by_numba(cfg, scheme) for scheme in arguments.schemes[:2]]
    found = describe_device(device)
    print(
        f"width {cfg.width}, depth {cfg.depth}, batch {cfg.batch}, gelu, Adam, float32; "
        f"{found['device_name'] or device}, torch {found['torch']}"
        + (f", {found['torch_threads']} threads" if found["torch_threads"] else "")
    )
    print(table(rows))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        content = {
            "config": asdict(cfg),
            "device": {"device": device.type, **found},
            "versions": dict(provenance()),
            "rows": [{k: v if v == v else None for k, v in asdict(r).items()} for r in rows],
        }
        arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
