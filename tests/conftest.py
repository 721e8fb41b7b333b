"""For the whole test run: fixed hypothesis examples, and kernels compiled from today's sources.

Numba's cache notices an edit of the kernel's own file only; these are pasted into kernels
elsewhere, so their content chooses the cache folder (set before Numba is imported).
"""

import hashlib
import os
import tempfile
from pathlib import Path

from hypothesis import settings

SHARED = (
    "bits.py",
    "jit.py",
    "philox.py",
    "special.py",
    "rounding.py",
    "maxima.py",
    "ops.py",
)

if "NUMBA_CACHE_DIR" not in os.environ:
    package = Path(__file__).resolve().parents[1] / "mxsim"
    content = b"".join((package / name).read_bytes() for name in SHARED)
    folder = f"mxsim-kernels-{os.getuid()}-{hashlib.sha256(content).hexdigest()[:12]}"
    os.environ["NUMBA_CACHE_DIR"] = str(Path(tempfile.gettempdir()) / folder)

settings.register_profile("mxsim", deadline=None, derandomize=True, database=None, max_examples=300)
settings.load_profile("mxsim")
