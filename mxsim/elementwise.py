"""The Numba loops that know no blocks: rounding element by element, and Hadamard rotation.

``mode`` and ``spec`` are what rounding.round_float takes, ``random`` what philox.draw does.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mxsim.bits import with_sign
from mxsim.jit import kernel
from mxsim.philox import WINDOW, draw
from mxsim.rounding import EVEN, STOCHASTIC, range_factors, round_float, round_stochastically


@kernel
def round_elementwise(x: Any, out: Any, mode: Any, spec: Any, random: Any) -> None:
    """x, out (n,): each element rounded to a floating-point format (spec: rounding.round_float).

    ``out`` may be x, but see ``round_in_place``.
    """
    if mode == EVEN:  # a constant mode lets the others' corrections go
        for i in range(x.size):
            out[i] = round_float(x[i], EVEN, spec)
        return
    if mode != STOCHASTIC:
        for i in range(x.size):
            out[i] = round_float(x[i], mode, spec)
        return
    grid, beyond, of_infinity, infinity = spec
    u = random[0][:0]
    for i in range(x.size):
        if i % WINDOW == 0:
            u = draw(random, i, min(WINDOW, x.size - i))
        v = x[i]
        q = abs(v)
        down, up = range_factors(q)
        g = (grid[0] * down, infinity, grid[2], grid[3])
        if v != v:
            out[i] = v
        elif q == infinity:
            out[i] = with_sign(of_infinity, v)
        elif q >= grid[1] + grid[1]:  # further than any rounding reaches
            out[i] = with_sign(beyond, v)
        else:
            r = round_stochastically(q * down, u[i % WINDOW], g) * up
            out[i] = with_sign(r if r <= grid[1] else beyond, v)


@kernel
def round_in_place(x: Any, mode: Any, spec: Any) -> None:
    """x (n,): as round_elementwise into x itself, any mode but stochastic.

    Two names for one array would keep that loop scalar: LLVM has to suppose that they overlap.
    """
    if mode == EVEN:
        for i in range(x.size):
            x[i] = round_float(x[i], EVEN, spec)
    else:
        for i in range(x.size):
            x[i] = round_float(x[i], mode, spec)


@kernel
def rotate_rows(x: Any, signs: Any, size: Any) -> None:
    """x (n, m), in place: H D x along the first axis, in groups of ``size`` rows (a power of two).

    D = diag(signs), H the orthonormal Walsh-Hadamard matrix of each group.  Rows that do not fill a
    group are taken in groups of the largest power of two that fits.
    """
    n, m = x.shape
    one = x.dtype.type(1)
    first = 0
    while first < n:
        group = size
        while group > n - first:
            group //= 2
        factor = one / np.sqrt(x.dtype.type(group))
        for i in range(first, first + group):
            sign = x.dtype.type(signs[i]) * factor
            for j in range(m):
                x[i, j] *= sign
        half = 1
        while half < group:
            for low in range(first, first + group, 2 * half):
                for i in range(low, low + half):
                    a, b = x[i], x[i + half]
                    for j in range(m):
                        s, d = a[j] + b[j], a[j] - b[j]
                        a[j] = s
                        b[j] = d
            half *= 2
        first += group
