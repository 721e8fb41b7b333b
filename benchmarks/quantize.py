"""How fast is the quantizer?  ns an element, and the ratio to np.copyto on the same array.

    python -m benchmarks.quantize [--threads 1 2] [--quick]

For 64 Ki and 4 Mi float32 elements, last axis and first axis, every format, rounding even and
stochastic, float32 to float32; next to NumPy + ml_dtypes and, where installed, torchao on the CPU.
Two threads quantize two halves of the array from two Python threads (kernels release the GIL).
microxcaling is in no registry: 122 ns an element on the CPU was measured for this project on
another two-core machine, where np.copyto took 0.16 ns (64 Ki) and 0.65 ns (4 Mi).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

import mxsim
from mxsim.formats import FORMATS

Array = NDArray[Any]
SHAPES = {"64 Ki": (256, 256), "4 Mi": (2048, 2048)}


def nanoseconds(function: Callable[[], object], elements: int, repeats: int) -> float:
    """Best of ``repeats``, after one call to warm up: the least disturbed, in ns an element."""
    function()
    best = np.inf
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        best = min(best, time.perf_counter() - started)
    return float(1e9 * best / elements)


def numpy_with_ml_dtypes(x: Array, axis: int) -> Array:
    """E4M3, floor, ties to even, the way one writes it with NumPy and ml_dtypes."""
    import ml_dtypes

    moved = np.moveaxis(x, axis, -1).reshape(-1, 32)
    amax = np.abs(moved).max(axis=1, keepdims=True)
    exponent = np.frexp(amax)[1] - 1 - 8
    scaled = np.ldexp(moved, -exponent)
    narrow = np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    back = np.ldexp(narrow.astype(np.float32), exponent)
    return np.moveaxis(back.reshape(np.moveaxis(x, axis, -1).shape), -1, axis)


def torchao_function(x: Array, axis: int) -> Callable[[], object] | None:
    """The same by torchao, or None where it is not installed.

    It knows blocks along the last axis only: for the first it transposes and makes contiguous.
    """
    try:
        import torch
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
    except ImportError:
        return None
    tensor = torch.from_numpy(x)
    torch.set_num_threads(1)

    def run() -> object:
        source = tensor if axis == -1 else tensor.t().contiguous()
        narrow = MXTensor.to_mx(source, torch.float8_e4m3fn, 32).dequantize(torch.float32)
        return narrow if axis == -1 else narrow.t().contiguous()

    return run


def in_halves(pool: ThreadPoolExecutor, x: Array, out: Array, quantize: Any) -> None:
    """Quantize two halves, each a whole number of blocks along either axis, on two threads."""
    middle = x.shape[0] // 2
    halves = ((x[:middle], out[:middle]), (x[middle:], out[middle:]))
    for done in [pool.submit(quantize, a, b) for a, b in halves]:
        done.result()


def quantizing(
    x: Array, out: Array, fmt: str, rounding: str, axis: int, pool: ThreadPoolExecutor, threads: int
) -> Callable[[], None]:
    """A call that quantizes x into out on one thread or two."""
    noise = mxsim.Noise(0) if rounding == "stochastic" else None

    def quantize(a: Array, b: Array) -> None:
        mxsim.fake_quantize(a, fmt, axis, rounding=rounding, out=b, noise=noise)

    def run() -> None:
        if threads == 1:
            quantize(x, out)
        else:
            in_halves(pool, x, out, quantize)

    return run


def main() -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], choices=[1, 2])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    arguments = parser.parse_args()
    console = Console()
    for threads in arguments.threads:
        for label, shape in SHAPES.items():
            console.print(table(label, shape, threads, arguments.quick))
    return 0


def table(label: str, shape: tuple[int, int], threads: int, quick: bool) -> Table:
    """One table: every format and rounding, both axes, and the others' ways."""
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    out = np.empty_like(x)
    repeats = (30 if quick else 300) if x.size < 2**20 else (5 if quick else 25)
    copy = nanoseconds(lambda: np.copyto(out, x), x.size, repeats)
    result = Table(
        title=f"{label} float32, {threads} thread{'s' * (threads > 1)}; np.copyto {copy:.3f} ns",
        title_justify="left",
    )
    result.add_column("what")
    for axis in ("last axis", "first axis"):
        result.add_column(f"{axis}\nns", justify="right")
        result.add_column("/ copyto", justify="right")

    def row(what: str, times: list[float | None]) -> None:
        cells = []
        for each in times:
            cells += ["-", "-"] if each is None else [f"{each:.2f}", f"{each / copy:.1f}"]
        result.add_row(what, *cells)

    with ThreadPoolExecutor(2) as pool:
        for fmt in FORMATS:
            for rounding in ("even", "stochastic"):
                times = [quantizing(x, out, fmt, rounding, axis, pool, threads) for axis in (-1, 0)]
                row(f"{fmt} {rounding}", [nanoseconds(each, x.size, repeats) for each in times])
    if threads == 1:
        few = max(2, repeats // 10)
        result.add_section()
        row(
            "NumPy + ml_dtypes, E4M3 even",
            [nanoseconds(partial(numpy_with_ml_dtypes, x, a), x.size, few) for a in (-1, 0)],
        )
        others = [torchao_function(x, a) for a in (-1, 0)]
        row(
            "torchao, E4M3 even",
            [None if f is None else nanoseconds(f, x.size, few) for f in others],
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
