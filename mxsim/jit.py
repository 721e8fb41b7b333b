"""How every kernel of mxsim is compiled: one decorator, so that the promise is in one place.

- no fastmath: it deletes NaN tests and reorders roundings;
- IEEE division (x / 0 is Inf or NaN, not an exception): no hidden branch in a loop;
- compiled code is cached on disk beside the source; the cache notices edits of the kernel's own
  file only, so after editing bits.py or special.py run ``make clean``;
- the GIL is released: kernels touch arrays only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import njit

kernel: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    cache=True, error_model="numpy", nogil=True
)

# For small functions whose callers must vectorize: pasted into the caller's own code, so that no
# call is left however large the body.
inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    error_model="numpy", inline="always"
)
