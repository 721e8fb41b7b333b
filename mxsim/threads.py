"""One BLAS thread, so that sums run in one order: the same bits on any machine's core count."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import lru_cache

from threadpoolctl import ThreadpoolController


@lru_cache(maxsize=1)
def _controller() -> ThreadpoolController:
    return ThreadpoolController()  # looks through all loaded libraries: a millisecond


def one_blas_thread() -> AbstractContextManager[object]:
    """A context in which NumPy's BLAS runs on one thread."""
    limited: AbstractContextManager[object] = _controller().limit(limits=1, user_api="blas")
    return limited
