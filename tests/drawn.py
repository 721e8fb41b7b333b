"""Hypothesis strategies: lines of numbers, and schemes (format, rule, rounding)."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from tests import inputs
from tests.comparing import SCHEMES
from tests.inputs import Array

schemes = st.sampled_from(SCHEMES)


@st.composite
def lines(draw: st.DrawFn, max_size: int = 70) -> Array:
    """One axis of near exponents, short mantissas and zeros of both signs, float32 or float64.

    Anywhere in the range of float32; float64 reaches past every scale byte on both sides.
    """
    dtype = draw(st.sampled_from(inputs.DTYPES))
    size = draw(st.integers(1, max_size))
    reach = 180 if dtype is np.float64 else 126
    top = draw(st.integers(-reach, reach))
    bits = draw(st.sampled_from([1, 2, 3, 4, 7, 9, 22]))  # 22: almost no ties
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    mantissa = 1 + rng.integers(0, 2**bits, size) / 2**bits
    exponent = top - rng.integers(0, draw(st.integers(1, 24)), size)
    sign = rng.choice([-1.0, 1.0], size) * (rng.uniform(size=size) > draw(st.floats(0, 0.5)))
    return np.asarray((sign * np.ldexp(mantissa, exponent)).astype(dtype))
