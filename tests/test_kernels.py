"""The hot loops: which of two ways a block goes, and what the compiler made of them."""

import platform
import re
from typing import Any

import numpy as np
import pytest
from numba import njit

import mxsim
from mxsim import kernels
from mxsim.formats import FORMATS, ROUNDINGS, SCALE_RULES
from mxsim.rounders import _constants, block_rounder

MX = [name for name, form in FORMATS.items() if form.scale == "e8m0"]


def _blocks_of_every_size(dtype: Any) -> Any:
    """(n, 32): one block for every binade of float32, subnormals too, and one of zeros."""
    rng = np.random.default_rng(0)
    exponents = np.arange(-149, 128)
    x = rng.uniform(-1, 1, (exponents.size + 1, 32))
    x[:, 0] = rng.uniform(1, 2, len(x))
    x[:-1] = np.ldexp(x[:-1], exponents[:, None])
    x[-1] = np.copysign(0, x[-1])
    return np.clip(x, -np.finfo(np.float32).max, np.finfo(np.float32).max).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", MX)
def test_a_scaled_grid_and_scaled_elements_are_the_same(
    fmt: str, rounding: str, dtype: Any
) -> None:
    # fake_quantize rounds ordinary blocks on the scaled grid, quantize scales the elements; which
    # blocks are ordinary is decided for 64 of them together along the last axis.
    x = _blocks_of_every_size(dtype)
    noise = mxsim.Noise(1, 2, 3) if rounding == "stochastic" else None
    for rule in SCALE_RULES:
        rounder = block_rounder(fmt, scale_rule=rule, rounding=rounding)
        low, high = _constants(rounder, np.dtype(dtype)).scaling[3:]
        assert low < high
        for order in (np.arange(len(x)), np.random.default_rng(1).permutation(len(x))):
            for axis, array in ((-1, x[order]), (0, np.ascontiguousarray(x[order].T))):
                with np.errstate(over="ignore"):
                    expected = mxsim.quantize(
                        array, fmt, axis, scale_rule=rule, rounding=rounding, noise=noise
                    ).dequantize(dtype)
                got = mxsim.fake_quantize(
                    array, fmt, axis, scale_rule=rule, rounding=rounding, noise=noise
                )
                assert got.tobytes() == expected.tobytes()


@pytest.mark.skipif(platform.machine() != "x86_64", reason="reads x86 assembly")
@pytest.mark.parametrize("name", ["fake_quantize_last", "fake_quantize_blocks"])
def test_the_hot_loops_are_vectorized_in_single_precision(name: str) -> None:
    cached = getattr(kernels, name)
    mxsim.fake_quantize(np.ones((64, 64), np.float32), "mxfp8_e4m3", -1 if "last" in name else 0)
    signature = next(s for s in cached.signatures if "float64" not in str(s))
    fresh = njit(error_model="numpy", nogil=True)(cached.py_func)  # a cached one has no assembly
    fresh.compile(signature)
    assembly = fresh.inspect_asm(signature)
    wide = "zmm" if "zmm" in assembly else "ymm"  # what this processor has
    for packed in ("addps", "subps", "mulps", "minps"):
        assert re.search(rf"v{packed}\s.*%{wide}", assembly), packed
    # Nothing of float32 is widened: no arithmetic on vectors of doubles.
    assert not re.search(r"v(add|sub|mul|min|max)pd\s", assembly)
    assert not re.search(r"vcvtps2pd\s", assembly)
