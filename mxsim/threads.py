"""Threads: one for BLAS, so that sums run in one order, and a dot product on several all the same.

A GEMM is cut by rows of its result.  No sum crosses a cut, so the parts have the bits of the whole
as long as BLAS adds up in an order that does not depend on the number of rows.  OpenBLAS does so in
float32 at all shapes tried, in float64 not at all of them: ``same_bits`` finds out.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import ThreadpoolController

Array = NDArray[Any]
Dot = Callable[[Array, Array, Array], None]  # a (m, k), b (k, n), out (m, n)

SMALLEST = 2**24  # multiplications below which a second thread costs more than it gives


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # looks through all loaded libraries: a millisecond


class _SharedLimit:
    """The number of BLAS threads belongs to the process: limited by the first in, until the last.

    A limiter of each thread's own would lift the others' on its way out.
    """

    def __init__(self) -> None:
        self.lock, self.inside = threading.Lock(), 0
        self.limiter: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self.lock:
            if not self.inside:
                self.limiter = _controller().limit(limits=1, user_api="blas").__enter__()
            self.inside += 1
        try:
            yield
        finally:
            with self.lock:
                self.inside -= 1
                if not self.inside:
                    self.limiter.__exit__(None, None, None)


one_blas_thread = _SharedLimit().__call__
"""A context in which NumPy's BLAS runs on one thread, also while other threads come and go."""


def dot(a: Array, b: Array, out: Array) -> None:
    """out = a b on the calling thread."""
    np.dot(a, b, out=out)


def threaded_dot(threads: int) -> Dot:
    """out = a b, large ones on ``threads`` Python threads (NumPy lets go of the GIL)."""
    if threads == 1:
        return dot
    pool = ThreadPoolExecutor(threads - 1)

    def run(a: Array, b: Array, out: Array) -> None:
        rows = len(a)
        if rows * a.shape[1] * b.shape[1] < SMALLEST:
            np.dot(a, b, out=out)
            return
        step = -(-rows // threads)
        parts = [slice(i, min(i + step, rows)) for i in range(0, rows, step)]
        # matmul, unlike dot, takes rows of a transposed array without copying them
        others = [pool.submit(np.matmul, a[part], b, out[part]) for part in parts[1:]]
        np.matmul(a[parts[0]], b, out=out[parts[0]])
        for other in others:
            other.result()

    return run


def same_bits(candidate: Dot, shapes: Iterable[tuple[int, int, int]], real: Any) -> bool:
    """Whether ``candidate`` computes what ``dot`` does for (m, k, n), plain and transposed."""
    rng = np.random.default_rng(0)
    for m, k, n in shapes:
        a, b = rng.standard_normal((m, k)).astype(real), rng.standard_normal((k, n)).astype(real)
        for left in (a, np.ascontiguousarray(a.T).T):
            for right in (b, np.ascontiguousarray(b.T).T):
                whole, parts = np.empty((m, n), real), np.empty((m, n), real)
                dot(left, right, whole)
                candidate(left, right, parts)
                if whole.tobytes() != parts.tobytes():
                    return False
    return True
