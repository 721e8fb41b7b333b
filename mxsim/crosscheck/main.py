"""The command: run everything, print the matrix, write the report, say whether all is explained."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from mxsim.config import ProxyConfig
from mxsim.crosscheck.backends import all_backends
from mxsim.crosscheck.case import FORMATS
from mxsim.crosscheck.corpus import corpus
from mxsim.crosscheck.matrix import check
from mxsim.crosscheck.report import as_json, markdown, print_matrix, verdict
from mxsim.formats import choose
from mxsim.presets import scheme
from mxsim.store import provenance, whole_file

OUT = Path("results") / "crosscheck"
WIDTH = 100

STEPS = 20
# What two runs may differ by, relative: losses, gradients, and the share of quantized values.  Sums
# in another order differ in their last bits (1e-15 of a float64 loss or gradient, 1e-7 of a float32
# loss and 1e-6 of its gradient were seen), a fault by much more (TF32: 1e-4).  In float64 nothing
# comes near a rounding boundary; in float32 a sum of n products is off by up to n / 2^24, so that
# about that share of values, times the 16 steps of E4M3's significand, rounds the other way, and
# disturbs what comes after it.  Bounds derived for one step are in tests/backends.
TOLERANCES = {
    ("float64", "exact"): (1e-12, 1e-11, 0.0),
    ("float64", "all_e4m3"): (1e-12, 1e-11, 0.0),
    ("float32", "exact"): (1e-5, 1e-4, 0.0),
    ("float32", "all_e4m3"): (1e-3, 5e-2, 1e-3),
}


def crosscheck(
    device: str = "cpu",
    out: Path = OUT,
    formats: tuple[str, ...] = FORMATS,
    console: Console | None = None,
) -> int:
    """Hold every backend to the corpus; 0 if every difference is explained, else 1.

    device: "cuda" adds PyTorch and torchao on the GPU.  out: the folder that report.md and
    report.json go to.  formats: those that are compared.  Raises ValueError for an unknown device
    or format, or a device that is not there.
    """
    for name in formats:
        choose("formats", name, FORMATS)
    began = time.perf_counter()
    console = console or Console()
    wide = console if console.is_terminal and console.width >= WIDTH else Console(width=WIDTH)
    made = {**provenance(), **_device(device)}
    if part := not set(FORMATS) <= set(formats):
        made["formats"] = " ".join(formats)
    out.mkdir(parents=True, exist_ok=True)  # an unusable folder shows before the work
    cases = corpus()
    backends, missing = all_backends(device)
    with _one_torch_thread("torch cpu" not in missing):
        matrix = check(cases, backends, missing, formats)
    if part:  # what is known of a format that was left out is not stale
        matrix.stale.clear()
    print_matrix(matrix, wide)
    trajectories, sound = ["PyTorch is not there"], True
    if f"torch {device}" not in missing:
        trajectories, sound = compare_runs(device)
    made["seconds"] = round(time.perf_counter() - began, 1)
    texts = {
        "report.md": markdown(matrix, made, trajectories),
        "report.json": json.dumps(as_json(matrix, cases, made, trajectories), indent=1),
    }
    for name, text in texts.items():
        with whole_file(out / name) as file:
            file.write(text.encode())
    for text in (*trajectories, verdict(matrix), f"written: {out / 'report.md'}, report.json"):
        wide.print(text, markup=False, highlight=False, soft_wrap=True)
    return 0 if sound and not matrix.unexplained else 1


def compare_runs(device: str) -> tuple[list[str], bool]:
    """PyTorch's training beside Numba's, step by step: in words, and whether they agree."""
    from mxsim.backends.torch_trajectories import compare_trajectories

    words, sound = [], True
    for (dtype, name), limits in TOLERANCES.items():
        config = ProxyConfig(width=32, depth=2, batch=64, lr=1e-2, steps=STEPS, dtype=dtype)
        compared = compare_trajectories(config, scheme(name), device=device)
        values = max(sum(step.compared for step in compared.steps), 1)
        measured = (
            [step.loss_difference for step in compared.steps],
            [step.zeta for step in compared.steps],
            [sum(step.differing for step in compared.steps) / values],
        )
        # A NaN is within no limit, and a comparison that ended early has not been made.
        agrees = len(compared.steps) == STEPS and all(
            all(each <= limit for each in found)
            for found, limit in zip(measured, limits, strict=True)
        )
        sound &= agrees
        text = compared.words.replace("\n", "; ")
        verdict = "" if agrees else "DISAGREES: "
        words.append(f"{verdict}torch {device} beside numba, {dtype}, {name}: {text}")
    return words, sound


def _device(device: str) -> dict[str, Any]:
    """What the report says of PyTorch and the GPU; ValueError for a GPU that is not there."""
    try:
        import torch
    except ImportError:
        if device == "cuda":
            raise ValueError("device must be cpu without PyTorch; got 'cuda'") from None
        return {}
    found = {"torch": torch.__version__}
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("device must be cpu where PyTorch finds no GPU; got 'cuda'")
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda)}
    return found


@contextmanager
def _one_torch_thread(there: bool) -> Iterator[None]:
    """Small arrays: threads cost more than they bring."""
    if not there:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def main(arguments: Sequence[str] | None = None) -> int:
    """``python -m mxsim.crosscheck``: the command without tyro."""
    import argparse
    import sys

    parser = argparse.ArgumentParser(prog="mxsim.crosscheck", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=OUT, help="folder of report.md, report.json")
    parser.add_argument(
        "--formats", nargs="+", default=FORMATS, metavar="NAME", help="these only; default all"
    )
    options = parser.parse_args(arguments)
    try:
        return crosscheck(options.device, options.out, tuple(options.formats))
    except (ValueError, OSError) as error:
        print(f"mxsim.crosscheck: {error}", file=sys.stderr)
        return 1
