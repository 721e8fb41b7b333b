"""How fast is a training step?  Milliseconds, one BLAS thread, and where they go.

    python -m benchmarks.step [--widths 64 128 256] [--quick]

Batch 256, depth 4, gelu, Adam, fresh data, float32; a step is data, forward, backward, update.
Next to our schemes: the step's six GEMMs a block by the same BLAS and nothing else, and, where
torch is installed, the same student in PyTorch with autograd, one thread.  The paper's script takes
14 / 38 / 132 ms (fp32) and 324 / 617 / 1473 ms (MX) at widths 64 / 128 / 256, measured for this
project on one core of another two-core machine.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import mxsim
from mxsim import data, ops, proxy
from mxsim.optim import optimizer_state, optimizer_step
from mxsim.precision import precision_of
from mxsim.threads import one_blas_thread

Array = NDArray[Any]
SCHEMES = ("exact", "ln_only_e4m3", "gemm_e4m3", "all_e4m3", "paper_code", "bf16", "nvfp4_recipe")
BATCH, DEPTH = 256, 4
PAPER = {64: (14, 324), 128: (38, 617), 256: (132, 1473)}


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median of ``repeats`` after one to warm up, in ms."""
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return 1e3 * float(np.median(times))


def interleaved(functions: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median ms of each, in turns of five after one to warm the caches.

    Turns, because what disturbs one then disturbs its neighbours as well.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(-(-repeats // 5)):
        for name, function in functions.items():
            function()
            for _ in range(5):
                started = time.perf_counter()
                function()
                times[name].append(time.perf_counter() - started)
    return {name: 1e3 * float(np.median(each)) for name, each in times.items()}


def gemms(width: int) -> Callable[[], None]:
    """The six GEMMs of each block, and nothing else."""
    n, d, h = BATCH, width, 4 * width
    rng = np.random.default_rng(0)

    def new(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    z, u, dy, w1, w2 = new(n, d), new(n, h), new(n, d), new(h, d), new(d, h)
    wide, narrow, dw1, dw2 = new(n, h), new(n, d), new(h, d), new(d, h)

    def run() -> None:
        for _ in range(DEPTH):
            np.dot(z, w1.T, out=wide)
            np.dot(u, w2.T, out=narrow)
            np.dot(dy, w2, out=wide)
            np.dot(dy.T, u, out=dw2)
            np.dot(u, w1, out=narrow)
            np.dot(u.T, z, out=dw1)

    return run


def training(width: int, scheme: str) -> Callable[[], object]:
    """One step of ours, again and again."""
    cfg = mxsim.ProxyConfig(width=width, depth=DEPTH, batch=BATCH, steps=10**6, lr=1e-3)
    run = mxsim.start(cfg, mxsim.scheme(scheme))
    return lambda: run.advance(1)


def pytorch(width: int) -> Callable[[], object] | None:
    """The same student, teacher, data and Adam in PyTorch, or None where it is not installed."""
    try:
        import torch
        from torch import nn
    except ImportError:
        return None
    torch.set_num_threads(1)
    torch.manual_seed(0)

    class Block(nn.Module):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.ln = nn.LayerNorm(width)
            self.fc1 = nn.Linear(width, 4 * width, bias=False)
            self.fc2 = nn.Linear(4 * width, width)

        def forward(self, x: Any) -> Any:
            return x + self.fc2(nn.functional.gelu(self.fc1(self.ln(x))))

    student = nn.Sequential(*(Block() for _ in range(DEPTH)))
    layers: list[Any] = []
    for _ in range(DEPTH):
        layers += [nn.Linear(width, width, bias=False), nn.GELU()]
        layers += [nn.Linear(width, width, bias=False)]
    teacher = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-3)

    def step() -> None:
        with torch.no_grad():
            x = torch.randn(BATCH, width)
            y = teacher(x) + 5e-3 * torch.randn(BATCH, width)
        optimizer.zero_grad()
        loss = ((student(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()

    return step


def parts(width: int, repeats: int) -> dict[str, float]:
    """Ms of the exact step's parts, each timed alone on the step's own buffers."""
    cfg = mxsim.ProxyConfig(width=width, depth=DEPTH, batch=BATCH)
    params = mxsim.init_params(cfg)
    batches = data.make_batches(cfg, data.make_teacher(cfg))
    x, y = batches.at(0)
    ws = proxy.workspace(cfg, BATCH, np.float32)
    size = proxy.parameter_count(cfg)
    flat, flat_grads = np.zeros(size, np.float32), np.zeros(size, np.float32)
    grads = proxy.parameter_views(flat_grads, cfg)
    state = optimizer_state(cfg, size)
    precision = precision_of(mxsim.scheme("exact"), DEPTH)
    proxy.loss_and_grads_into(params, x, y, cfg, precision, ws, grads)
    s, g, p = ws.blocks[1], grads[1], params[1]
    eps = np.float32(1e-5)
    once = {
        "layer norm, forward": lambda: ops.layer_norm_forward(
            ws.stream, s.gamma, s.beta, eps, s.z, s.xhat, s.rstd, s.var_eps, True
        ),
        "layer norm, backward": lambda: ops.layer_norm_backward(
            ws.branch,
            s.xhat,
            s.rstd,
            s.gamma,
            ws.dstream,
            g["ln_gamma"],
            g["ln_beta"],
            ws.rows[0],
            True,
        ),
        "gelu and its slope": lambda: ops.activation_forward(ws.wide, s.hidden, s.slope, "gelu"),
        "gelu, backward": lambda: ops.activation_backward(ws.dhidden, s.slope, ws.wide),
        "residual and bias": lambda: (
            ops.add_branch(ws.stream, ws.branch, p["b2"]),
            ops.column_sums(ws.dstream, g["b2"]),
        ),
    }
    found = {name: DEPTH * milliseconds(each, repeats) for name, each in once.items()}
    found["data and teacher"] = milliseconds(lambda: batches.at(1), repeats)
    found["loss"] = milliseconds(
        lambda: ops.mse_forward_backward(ws.stream, y, ws.dstream), repeats
    )
    found["Adam"] = milliseconds(lambda: optimizer_step(flat, flat_grads, state, cfg), repeats)
    return found


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    arguments = parser.parse_args()
    console = Console()
    with one_blas_thread():
        for width in arguments.widths:
            repeats = 8 if arguments.quick else 40
            console.print(table(width, repeats))
    return 0


def table(width: int, repeats: int) -> Table:
    """One width: whole steps, then the parts of the exact one."""
    functions: dict[str, Callable[[], object]] = {"GEMMs alone": gemms(width)}
    functions |= {name: training(width, name) for name in SCHEMES}
    torch_step = pytorch(width)
    if torch_step is not None:
        functions["PyTorch fp32, autograd"] = torch_step
    times = interleaved(functions, repeats)
    exact = times["exact"]
    result = Table(
        title=f"width {width}, batch {BATCH}, depth {DEPTH}, one thread", title_justify="left"
    )
    for heading in ("what", "ms", "/ exact"):
        result.add_column(heading, justify="left" if heading == "what" else "right")
    for name, value in times.items():
        result.add_row(name, f"{value:.2f}", f"{value / exact:.2f}")
    if torch_step is None:
        result.add_row("PyTorch fp32, autograd", "not installed", "-")
    for what, value in zip(("fp32", "MX"), PAPER.get(width, ()), strict=False):
        result.add_row(f"the paper's script, {what} (elsewhere)", f"{value:.0f}", "-")
    result.add_section()
    pieces = parts(width, repeats)
    for name, value in pieces.items():
        result.add_row(f"  {name}", f"{value:.2f}", f"{value / exact:.2f}")
    rest = exact - times["GEMMs alone"] - sum(pieces.values())
    result.add_row("  the rest: Python, norms of gradients", f"{rest:.2f}", f"{rest / exact:.2f}")
    return result


if __name__ == "__main__":
    sys.exit(main())
