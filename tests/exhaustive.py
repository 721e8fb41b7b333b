"""Every float32 through the quantizer: ``make exhaustive``, minutes on two cores.

All 2**32 patterns go through fake_quantize for each element format (31 to a block beside a sentinel
that fixes the scale for what is smaller; what is larger sets its own) and through round_to for bf16
and fp16, and all positive finite patterns are taken as a block maximum for each scale rule.  What
they are held to shares no code with mxsim: ml_dtypes and NumPy casts where they round once (clamped
first, since they do not saturate), else the step formula in float64, and np.frexp for exponents.

    python -m tests.exhaustive [--every N] [--only bf16]    every N-th chunk of 2**20 patterns
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

import mxsim

Array = NDArray[Any]
CHUNK = 2**20
PATTERNS = 2**32
SIGN = 2**31
INFINITY = 0x7F800000  # magnitudes from here on are Inf and NaN

# name: (type that rounds to nearest even once, emax, largest); INT8 by formula
ELEMENTS: dict[str, tuple[Any, int, float]] = {
    "mxfp8_e4m3": (ml_dtypes.float8_e4m3fn, 8, 448.0),
    "mxfp8_e5m2": (ml_dtypes.float8_e5m2, 15, 57344.0),
    "mxfp6_e3m2": (ml_dtypes.float6_e3m2fn, 4, 28.0),
    "mxfp6_e2m3": (ml_dtypes.float6_e2m3fn, 2, 7.5),
    "mxfp4_e2m1": (ml_dtypes.float4_e2m1fn, 2, 6.0),
    "mxint8": (None, 0, 127 / 64),
}
MANTISSA_BITS = {"mxfp8_e4m3": 3, "mxfp8_e5m2": 2, "mxfp6_e3m2": 2, "mxfp6_e2m3": 3}
MANTISSA_BITS |= {"mxfp4_e2m1": 1, "mxint8": 6}
RULES = ("floor", "rceil", "ceil", "even")
CASTS: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def patterns(start: int, count: int) -> Array:
    """float32 of the bit patterns start .. start + count - 1."""
    return np.arange(start, start + count, dtype=np.uint64).astype(np.uint32).view(np.float32)


def same(a: Array, b: Array) -> Array:
    """Equal bits, or NaN on both sides."""
    return np.asarray((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b)))


def nearest_element(q: Array, fmt: str) -> Array:
    """q (float64, finite) to the nearest element, ties to even, saturated."""
    kind, _, largest = ELEMENTS[fmt]
    clamped = np.clip(q, -largest, largest)
    if kind is None:
        return np.asarray(np.rint(clamped * 64) / 64 + 0.0)  # two's complement has no -0
    narrow = clamped.astype(np.float32)  # exact: q is a float32 times a power of two ...
    lost = narrow != clamped  # ... but for underflow, far below half the smallest element
    return np.where(lost, np.copysign(0.0, q), narrow.astype(kind).astype(np.float64))


def wrong_elements(fmt: str, start: int, axis: int) -> int:
    """Mismatches of fake_quantize on one chunk of patterns, blocks along ``axis``."""
    _, emax, _ = ELEMENTS[fmt]
    count = -(-CHUNK // 31) * 31
    x = np.empty((count // 31, 32), np.float32)
    x[:, 0] = 2.0**emax  # the scale is 1 for blocks whose patterns are smaller
    x[:, 1:] = patterns(start, count).reshape(-1, 31)
    got = mxsim.fake_quantize(x if axis == 1 else np.ascontiguousarray(x.T), fmt, axis=axis)
    got = got if axis == 1 else np.ascontiguousarray(got.T)
    with np.errstate(invalid="ignore", over="ignore"):
        amax = np.abs(x).max(axis=1, keepdims=True).astype(np.float64)
        bad = ~np.isfinite(amax)
        exponent = np.frexp(np.where(bad, 1.0, amax))[1] - 1 - emax
        exponent = np.clip(exponent, -127, 127)
        q = np.ldexp(np.where(bad, 0.0, x.astype(np.float64)), -exponent)
        expected = np.ldexp(nearest_element(q, fmt), exponent)
        expected = np.where(bad, np.nan, expected).astype(np.float32)
    return int((~same(got, expected)).sum())


def wrong_casts(fmt: str, start: int) -> int:
    """Mismatches of round_to on one chunk of patterns."""
    x = patterns(start, CHUNK)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = x.astype(CASTS[fmt]).astype(np.float32)
    return int((~same(mxsim.round_to(x, fmt), expected)).sum())


def wrong_scales(fmt: str, rule: str, start: int) -> int:
    """Mismatches of the scale byte on one chunk of positive patterns, each a block of its own."""
    _, emax, largest = ELEMENTS[fmt]
    x = patterns(start, CHUNK)
    finite = np.isfinite(x)
    x = np.where(finite, x, np.float32(1))
    got = mxsim.quantize(x, fmt, block_size=1, scale_rule=rule).scales
    half, e = np.frexp(x.astype(np.float64))
    bump = {
        "floor": np.zeros(x.shape, bool),
        "rceil": x > np.ldexp(largest, e - 1 - emax),
        "ceil": half > 0.5,
        "even": half >= 1 - 2.0 ** -(MANTISSA_BITS[fmt] + 2),
    }[rule]
    exponent = np.clip(e - 1 - emax + bump, -127, 127)
    expected = np.where(x == 0, 0, exponent + 127)
    return int((got != expected).sum())


def tasks(every: int) -> Iterator[tuple[str, Callable[..., int], tuple[Any, ...]]]:
    """(what, function, arguments) for every chunk."""
    for fmt in ELEMENTS:
        for i, start in enumerate(range(0, PATTERNS, CHUNK * every)):
            # Both layouts' kernels see every pattern's neighbourhood: they take turns by chunk.
            yield f"{fmt} elements", wrong_elements, (fmt, start, i % 2)
    for fmt in CASTS:
        for start in range(0, PATTERNS, CHUNK * every):
            yield f"{fmt} elements", wrong_casts, (fmt, start)
    for fmt in ELEMENTS:
        for rule in RULES:
            for start in range(0, SIGN, CHUNK * every):
                yield f"{fmt} {rule} scales", wrong_scales, (fmt, rule, start)


def main() -> int:
    """Run all tasks on all cores; print mismatches by kind; 0 if there are none."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds whose name holds this text")
    arguments = parser.parse_args()
    wrong: dict[str, int] = {}
    seen: dict[str, int] = {}
    todo = [task for task in tasks(arguments.every) if arguments.only in task[0]]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=context) as pool, Progress() as bar:
        task = bar.add_task("chunks of 2**20 patterns", total=len(todo))
        futures = {pool.submit(function, *arguments): what for what, function, arguments in todo}
        for future in as_completed(futures):
            what = futures[future]
            wrong[what] = wrong.get(what, 0) + future.result()
            seen[what] = seen.get(what, 0) + CHUNK
            bar.advance(task)
    for what, mismatches in wrong.items():
        print(f"{what:28} {seen[what]:>13,} patterns  {mismatches:>6,} mismatches")
    return 1 if any(wrong.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
