"""Gain bias through depth in symbols: scalars, paths, and one block of a deep net in matrices.

The general recursion, in numbers, is in depth.py, which these derivations check.  Symbols: block k
is x -> x + c_k w2_k w1_k x, c_k = 1 + delta_k its gain, where a gamma on the clamp cliff has it
(forward, in dw1's z, and on the way back); a_k = w2_k w1_k; r the residual.

This module imports sympy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import sympy as sp  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray

Array = NDArray[Any]
Expression = Any  # sympy has no types

# ---------------------------------------------------------------- scalars


@dataclass(frozen=True)
class ScalarNet:
    """A net of width 1 without biases: symbols, prediction, loss, gradients; tuples by block.

    dw1 and dw2 are derivatives of the loss with the gains in place.
    """

    x: Expression
    y: Expression
    w1: tuple[Expression, ...]
    w2: tuple[Expression, ...]
    c: tuple[Expression, ...]
    prediction: Expression
    loss: Expression
    dw1: tuple[Expression, ...]
    dw2: tuple[Expression, ...]


@cache
def scalar_net(depth: int) -> ScalarNet:
    """Write the net down and differentiate it."""
    x, y = sp.symbols("x y")
    w1, w2, c = (sp.symbols(f"{name}:{depth}") for name in ("u", "v", "c"))
    stream = x
    for k in range(depth):
        stream = stream + w2[k] * w1[k] * c[k] * stream
    loss = (stream - y) ** 2
    dw1, dw2 = (tuple(sp.diff(loss, w) for w in ws) for ws in (w1, w2))
    return ScalarNet(x, y, w1, w2, c, stream, loss, dw1, dw2)


@cache
def scalar_gains(depth: int) -> tuple[Expression, ...]:
    """The gain g~ / g of each block's weight gradients, in x, y, v (= a, with w1 = 1) and c.

    Derived by dividing derivatives.  They come out as
        g~_j / g_j = (r~ / r) c_j prod over i != j of (1 + c_i a_i) / (1 + a_i):
    the residual's own change times a factor for every other block of the path, none above the
    share a / (1 + a) that the branch has in the stream.
    """
    net = scalar_net(depth)
    plain = dict.fromkeys(net.c, 1)
    ratios = []
    for dw1, dw2 in zip(net.dw1, net.dw2, strict=True):
        ratio = sp.cancel(dw2 / dw2.subs(plain))
        if sp.cancel(ratio - dw1 / dw1.subs(plain)) != 0:
            raise ArithmeticError("dw1 and dw2 of a block have different gains")
        ratios.append(sp.factor(ratio.subs(dict.fromkeys(net.w1, 1))))
    return tuple(ratios)


@cache
def scalar_log_gains(depth: int) -> Expression:
    """(depth, depth): d log(g~_j / g_j) / d delta_i at delta = 0, in x, y, v.

    1 for i = j, a_i / (1 + a_i) for i != j, and for every i (prediction / r) a_i / (1 + a_i) on
    top: through the residual.
    """
    net = scalar_net(depth)
    plain = dict.fromkeys(net.c, 1)
    rows = [
        [sp.factor(sp.diff(g, c).subs(plain) / g.subs(plain)) for c in net.c]
        for g in scalar_gains(depth)
    ]
    return sp.Matrix(rows)


@cache
def _scalar_functions(depth: int) -> tuple[Callable[..., Any], Callable[..., Any]]:
    net = scalar_net(depth)
    arguments = (net.x, net.y, net.w2, net.c)
    return (
        sp.lambdify(arguments, scalar_gains(depth), "numpy"),
        sp.lambdify(arguments, scalar_log_gains(depth), "numpy"),
    )


def scalar_gain(a: Sequence[float], delta: Sequence[float], x: float, y: float) -> Array:
    """g~ / g of each block (depth,): exact.  a, delta (depth,)."""
    gains = 1 + np.asarray(delta, np.float64)
    return np.array(_scalar_functions(len(a))[0](x, y, list(a), list(gains)), np.float64)


def scalar_log_gain(a: Sequence[float], x: float, y: float) -> Array:
    """(depth, depth): first-order log gain of block j's gradient by a gain on block i."""
    return np.array(_scalar_functions(len(a))[1](x, y, list(a), [1.0] * len(a)), np.float64)


@cache
def _compounding() -> Callable[..., Any]:
    a, delta, depth = sp.symbols("a delta L", positive=True)
    factor = (1 + delta) * ((1 + (1 + delta) * a) / (1 + a)) ** (depth - 1)
    rate = sp.simplify(sp.diff(sp.log(factor), delta).subs(delta, 0))
    return sp.lambdify((a, delta, depth), (factor, rate), "numpy")  # type: ignore[no-any-return]


def compounding(a: float, delta: float, depth: int) -> tuple[float, float]:
    """All blocks alike: the gain of a gradient at fixed residual, and its logarithmic rate.

    (1 + delta) [(1 + (1 + delta) a) / (1 + a)]^(L - 1), and 1 + (L - 1) a / (1 + a) a unit of
    delta: L only where the branch outweighs the stream, 1 where it is small beside it.
    """
    factor, rate = _compounding()(a, delta, depth)
    return float(factor), float(rate)


# ---------------------------------------------------------------- paths


@cache
def paths(depth: int) -> Mapping[tuple[int, ...], Expression]:
    """The prediction of a net without biases, by path: blocks passed -> coefficient.

    prod over k of (1 + c_k A_k), A_k = w2_k w1_k matrices that do not commute, the last block
    leftmost, expanded: 2^depth paths, and a path's coefficient is the product of the gains of the
    blocks on it.  So the prediction is of degree 1 in every gain.
    """
    matrices = [sp.Symbol(f"A{k}", commutative=False) for k in range(depth)]
    gains = sp.symbols(f"c:{depth}")
    product = sp.Integer(1)
    for matrix, gain in zip(matrices, gains, strict=True):
        product = (1 + gain * matrix) * product
    found = {}
    for term in sp.Add.make_args(sp.expand(product)):
        numbers, words = term.args_cnc()
        passed = tuple(reversed([matrices.index(word) for word in words]))
        found[passed] = sp.Mul(*numbers)
    return found


# ---------------------------------------------------------------- one block in matrices


@cache
def block_law() -> Mapping[str, Callable[..., Any]]:
    """Gradients of one block of a net of any depth, by sympy's matrix calculus.

    S (n, d) the stream that enters, later (d, d) what the blocks above make of what leaves it
    (rows: s -> s later), T (n, d) the targets less what biases above contribute; then
        loss = tr(r^T r) / (n d),    r = (S + c S U^T V^T) later - T,
    and the derivatives with respect to V = w2, U = w1 and S come out as
        dV = c D^T S U^T,   dU = c (D V)^T S,   dS = D + c D V U,   D = 2 / (n d) r later^T.
    Returned as NumPy functions of (S, T, later, U, V, c, n, d), by name.
    """
    n, d, h = sp.symbols("n d h", integer=True, positive=True)
    stream, targets = sp.MatrixSymbol("S", n, d), sp.MatrixSymbol("T", n, d)
    later = sp.MatrixSymbol("E", d, d)
    w1, w2 = sp.MatrixSymbol("U", h, d), sp.MatrixSymbol("V", d, h)
    c = sp.Symbol("c")
    residual = (stream + c * stream * w1.T * w2.T) * later - targets
    loss = sp.Trace(residual.T * residual) / (n * d)
    gradients = {"w1": loss.diff(w1), "w2": loss.diff(w2), "stream": loss.diff(stream)}
    arguments = (stream, targets, later, w1, w2, c, n, d)
    return {name: sp.lambdify(arguments, each, "numpy") for name, each in gradients.items()}


def block_gradients(
    stream: Array, targets: Array, later: Array, w1: Array, w2: Array, c: float
) -> dict[str, Array]:
    """dw1 (h, d), dw2 (d, h) and the gradient of the stream (n, d); arguments of ``block_law``."""
    n, d = stream.shape
    return {
        name: np.asarray(f(stream, targets, later, w1, w2, c, n, d))
        for name, f in block_law().items()
    }
