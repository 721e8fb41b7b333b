"""How every kernel of mxsim is compiled: one decorator, so that the promise is in one place.

- no fastmath: it deletes NaN tests and reorders roundings;
- IEEE division (x / 0 is Inf or NaN, not an exception): no hidden branch in a loop;
- compiled code is cached on disk beside the source; the cache notices edits of the kernel's own
  file only, so after editing one whose kernels others call (bits, philox, rounding, special, maxima
  or ops) run ``make clean``;
- the GIL is released: kernels touch arrays only;
- subnormals are kept: ``check_subnormals`` refuses a process that flushes them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit

kernel: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    cache=True, error_model="numpy", nogil=True
)

# For small functions whose callers must vectorize: pasted into the caller's own code, so that no
# call is left however large the body.
inlined: Callable[[Callable[..., Any]], Callable[..., Any]] = njit(
    error_model="numpy", inline="always"
)


def check_subnormals() -> None:
    """Raise RuntimeError if this process flushes subnormal floats to zero.

    Some libraries switch the processor to flush-to-zero (torch.set_flush_denormal, a shared object
    built with -ffast-math); the scale 2**-127 and small elements would then be wrong without a
    word.  Called on import; call it again after importing such a library.
    """
    smallest_normal = np.full(64, 2.0**-126, np.float32)  # long enough for vector instructions
    with np.errstate(under="ignore"):
        halved = smallest_normal * np.float32(0.5)
        restored = halved * np.float32(2.0)  # also catches subnormal inputs taken as zero
    if (restored != smallest_normal).any():
        raise RuntimeError(
            "subnormal floats are flushed to zero in this process: another library has switched "
            "the processor to flush-to-zero mode (torch.set_flush_denormal(True)? a library built "
            "with -ffast-math?). MX scales down to 2**-127 need subnormals; switch it off, or "
            "import mxsim in a process of its own."
        )
