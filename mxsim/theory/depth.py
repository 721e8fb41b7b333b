"""Gain bias through depth: common factors on the operands of a linear residual net.

x_{k+1} = x_k + w2 w1 x_k + b2, the proxy with ``activation="linear", norm="none"`` (the one choice
that makes it linear: every other norm divides by a statistic of the sample).  A quantizer that
scales an operand in common, as the clamp cliff does (cliff.py), is a number at its site.  The
recursion here is the proxy's forward and straight-through backward pass with such numbers, over
polynomials in one variable delta: so gradients come out with their whole dependence on delta, not
as an expansion to first order.  Then the two parts that any gradient bias has.

Derivations in symbols, for shallow nets: depth_symbols.py; predictions beside measurements:
depth_tables.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mxsim.config import ProxyConfig
from mxsim.formats import choose
from mxsim.precision import GEMM_SITES, PrecisionScheme, precision_of
from mxsim.proxy import (
    KINDS,
    Params,
    check_batch,
    check_params,
    forward,
    loss_and_grads,
    workspace,
)
from mxsim.threads import one_blas_thread

Array = NDArray[Any]
Tree = list[dict[str, Array]]

GAIN_SITES = ("ln_gamma", *GEMM_SITES)
"""Where a gain can sit.  ln_gamma scales z, fc1's input: forward (and with it wgrad's x), and dz on
the way back, as a norm's gain does; with a norm of the stream in front the net is not linear."""
WEIGHTS = ("w1", "w2", "b2")

# ---------------------------------------------------------------- polynomials in delta
# An array (degree + 1, ...): coefficients first, lowest degree first.


def _times(p: Array, c: float, s: float) -> Array:
    """p (c + s delta)."""
    if s == 0:
        return c * p if c != 1 else p
    out = np.zeros((len(p) + 1, *p.shape[1:]))
    out[:-1] += c * p
    out[1:] += s * p
    return out


def _plus(p: Array, q: Array) -> Array:
    if len(p) < len(q):
        p, q = q, p
    out = p.copy()
    out[: len(q)] += q
    return out


def _outer(dy: Array, x: Array) -> Array:
    """dy^T x of polynomials with coefficients (n, o), (n, i) -> (o, i)."""
    out = np.zeros((len(dy) + len(x) - 1, dy.shape[2], x.shape[2]))
    for a, left in enumerate(dy):
        for b, right in enumerate(x):
            out[a + b] += left.T @ right
    return out


@dataclass(frozen=True)
class _Gains:
    """Of one block: the gain at a site is value + slope delta."""

    value: Mapping[str, float]
    slope: Mapping[str, float]

    def on(self, p: Array, *sites: str) -> Array:
        for site in sites:
            p = _times(p, self.value.get(site, 1.0), self.slope.get(site, 0.0))
        return p


# ---------------------------------------------------------------- the net


@dataclass(frozen=True)
class GainExpansion:
    """Loss and gradients as polynomials in delta; nothing is left out.

    loss: (degree + 1,), grads: w1, w2, b2 of each block, (degree + 1, *shape), prediction
    (degree + 1, n, d); coefficients of 1, delta, delta^2, ...
    """

    loss: Array
    grads: Tree
    prediction: Array

    def at(self, delta: float) -> tuple[float, Tree]:
        """Loss and gradients where the gains are 1 + slope delta."""
        tree = [{kind: _value(p, delta) for kind, p in block.items()} for block in self.grads]
        return float(_value(self.loss, delta)), tree

    def remainder(self, delta: float) -> Tree:
        """What value and first order leave of the gradients: exactly the higher coefficients."""
        return [
            {kind: _value(np.concatenate([0 * p[:2], p[2:]]), delta) for kind, p in block.items()}
            for block in self.grads
        ]


def _value(p: Array, delta: float) -> Array:
    return np.asarray(np.tensordot(delta ** np.arange(len(p)), p, 1))


def gain_expansion(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    slopes: Sequence[Mapping[str, float]],
    gains: Sequence[Mapping[str, float]] | None = None,
) -> GainExpansion:
    """Loss (mean squared error) and gradients of a linear residual net under gains, exactly.

    params: blocks with w1 (h, d), w2 (d, h), b2 (d,) (other parameters are not looked at); x, y
    (n, d).  In block k the operand at ``site`` is multiplied by gains[k][site] + slopes[k][site]
    delta (1 and 0 where nothing is said), in every GEMM that the site stands for; gradients pass
    straight through.  All in float64.

    The prediction has degree 1 in the gain of each block: one path passes a block at most once.
    So a gain on one block's gamma makes the loss and the gradients polynomials of degree 2 in it.
    Raises ValueError for an unknown site, and unless slopes and gains have one entry a block.
    """
    blocks = [{kind: np.asarray(p[kind], np.float64) for kind in WEIGHTS} for p in params]
    values = [{}] * len(blocks) if gains is None else gains
    for name, given in (("slopes", slopes), ("gains", values)):
        if len(given) != len(blocks):
            raise ValueError(
                f"{name} must have {len(blocks)} entries, one a block; got {len(given)}"
            )
        for site in (site for each in given for site in each):
            choose(f"site in {name}", site, GAIN_SITES)
    sites = [_Gains(v, s) for v, s in zip(values, slopes, strict=True)]
    stream = np.asarray(x, np.float64)[None]
    kept = []
    for p, g in zip(blocks, sites, strict=True):
        # 1. z = gamma x
        z = g.on(stream, "ln_gamma")
        # 2. hidden = z w1^T
        hidden = g.on(z, "fc1_fprop_x", "fc1_fprop_w") @ p["w1"].T
        # 3. x = x + hidden w2^T + b2
        stream = _plus(stream, g.on(hidden, "fc2_fprop_x", "fc2_fprop_w") @ p["w2"].T)
        stream[0] += p["b2"]
        kept.append((z, hidden))
    prediction = stream
    residual = _plus(prediction, -np.asarray(y, np.float64)[None])
    size = residual[0].size
    loss = np.zeros(2 * len(residual) - 1)
    for a, left in enumerate(residual):
        for b, right in enumerate(residual):
            loss[a + b] += (left * right).sum() / size
    dy = residual * (2 / size)
    grads: Tree = []
    for p, g, (z, hidden) in zip(reversed(blocks), reversed(sites), reversed(kept), strict=True):
        # 3. x = x + hidden w2^T + b2
        dw2 = _outer(g.on(dy, "fc2_wgrad_dy"), g.on(hidden, "fc2_wgrad_x"))
        dhidden = g.on(dy, "fc2_dgrad_dy", "fc2_dgrad_w") @ p["w2"]
        # 2. hidden = z w1^T
        dw1 = _outer(g.on(dhidden, "fc1_wgrad_dy"), g.on(z, "fc1_wgrad_x"))
        dz = g.on(dhidden, "fc1_dgrad_dy", "fc1_dgrad_w") @ p["w1"]
        grads.append({"w1": dw1, "w2": dw2, "b2": dy.sum(1)})
        # 1. z = gamma x
        dy = _plus(dy, g.on(dz, "ln_gamma"))
    return GainExpansion(loss, grads[::-1], prediction)


def loss_and_grads_under_gains(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    gains: Sequence[Mapping[str, float]],
) -> tuple[float, Tree]:
    """Loss and gradients with gains[k][site] on the operands of block k; as ``gain_expansion``."""
    return gain_expansion(params, x, y, [{}] * len(params), gains).at(0.0)


def path_contributions(params: Sequence[Mapping[str, ArrayLike]], x: ArrayLike) -> Array:
    """The prediction by path length, (depth + 1, n, d): their sum is the prediction.

    Entry j is what has passed j branches and skipped the others, so that a gain 1 + delta common to
    all branches makes the prediction sum_j (1 + delta)^j entry_j.  (b2 enters with no branch
    passed.)
    """
    branch = [{"ln_gamma": 1.0}] * len(params)
    return gain_expansion(params, x, x, branch, [{"ln_gamma": 0.0}] * len(params)).prediction


# ---------------------------------------------------------------- the two parts of the bias


@dataclass(frozen=True)
class BiasParts:
    """g~ - g = jacobian + residual, trees like the gradients; see ``bias_parts``.

    residual_change: |prediction~ - prediction| / |prediction - y|.
    """

    exact: Params
    jacobian: Params
    residual: Params
    residual_change: float

    def sizes(self, kinds: Sequence[str] = KINDS) -> tuple[float, float, float]:
        """|g~ - g|, |jacobian|, |residual|, in units of |g|, over the parameters of kinds."""
        g, j, r = (
            np.concatenate([np.ravel(b[kind]).astype(np.float64) for b in tree for kind in kinds])
            for tree in (self.exact, self.jacobian, self.residual)
        )
        zeta, *parts = (float(np.linalg.norm(v) / np.linalg.norm(g)) for v in (j + r, j, r))
        return zeta, parts[0], parts[1]


def bias_parts(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
) -> BiasParts:
    """Split the gradient bias of any scheme in two, at one point.

    A gradient is a backward pass applied to the residual r = prediction - y.  Quantizing changes
    the pass (J -> J~) and the residual (r -> r~):

        g~ - g = [J~(r) - J(r)] + [J~(r~) - J~(r)] = jacobian + residual

    J~(r) is had by moving the targets along with the prediction.  A gain of a few per cent changes
    J by a few per cent; but r~ - r is a few per cent of the *branches*, which in a student that
    cancels its own stream are much larger than r.  Arguments and errors as for ``gradient_bias``.
    """
    checked = check_params(params, cfg)
    x_, y_ = check_batch(x, y, cfg, checked[0]["w1"].dtype)
    exact, quantized = (_prediction(checked, x_, cfg, s, step) for s in (PrecisionScheme(), scheme))
    _, g = loss_and_grads(checked, x_, y_, cfg, PrecisionScheme(), step)
    _, same_residual = loss_and_grads(checked, x_, y_ + (quantized - exact), cfg, scheme, step)
    _, full = loss_and_grads(checked, x_, y_, cfg, scheme, step)
    change = np.linalg.norm(quantized - exact) / np.linalg.norm(exact - y_)
    return BiasParts(g, _minus(same_residual, g), _minus(full, same_residual), float(change))


def _prediction(
    params: Params, x: Array, cfg: ProxyConfig, scheme: PrecisionScheme, step: int
) -> Array:
    precision = precision_of(scheme, cfg.depth, cfg.seed, step)
    with one_blas_thread():
        return forward(params, x, cfg, precision, workspace(cfg, len(x), x.dtype)).copy()


def _minus(a: Params, b: Params) -> Params:
    return [{kind: p[kind] - q[kind] for kind in p} for p, q in zip(a, b, strict=True)]
