"""The Hessian of the exact proxy's loss at one point, as a matrix that is never formed.

It acts through Pearlmutter's R-operator (1994, Fast exact multiplication by the Hessian): the
derivative along v of every line of the forward and the backward pass; R{a} is named ra.  H v is
exact up to rounding and costs 1.2 to 1.7 gradients, where a central difference of gradients costs
two, needs a step size, and takes the kinks of relu that it steps over for curvature.  (At a kink
itself the product is that of the piece that ``ops`` takes the point for.)  All in float64.

Vectors are flat (size,), in the order of mxsim.proxy.parameter_views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit

from mxsim import ops
from mxsim.config import ProxyConfig, check_config
from mxsim.jit import kernel
from mxsim.precision import PrecisionScheme, precision_of
from mxsim.proxy import (
    KINDS,
    BlockState,
    Params,
    check_batch,
    check_params,
    forward,
    parameter_count,
    parameter_views,
    workspace,
)
from mxsim.threads import one_blas_thread

Array = NDArray[Any]


@dataclass(frozen=True, eq=False)
class BlockPoint:
    """One block at the point: its parameters, and what the R-operator needs of both passes.

    n samples, width d, hidden h; rows is h, or 2h for swiglu, whose halves are a and b.
    """

    p: Mapping[str, Array]
    s: BlockState  # forward: gamma, xhat, rstd, z, hidden, slope
    dy: Array  # (n, d) gradient of the stream above
    du: Array  # (n, rows) of w1's output
    dz: Array  # (n, d) of the norm's output
    bend: Array  # (n, h) dhidden * d^2 hidden / du^2 (swiglu: / db^2)
    cross: Array  # (n, h) dhidden * d^2 hidden / (da db), swiglu only


@dataclass(frozen=True, eq=False)
class Tangent:
    """Buffers for R of one block's forward values, kept for the backward pass."""

    rxhat: Array  # (n, d)
    pull: Array  # (n,) -R{rstd} / rstd^2
    rz: Array  # (n, d)
    ru: Array  # (n, rows)
    rhidden: Array  # (n, h)


@dataclass(frozen=True, eq=False)
class Scratch:
    """Buffers that a product passes through."""

    stream: Array  # (n, d) R of the stream, and of its gradient
    rdz: Array  # (n, d)
    branch: Array  # (n, d)
    rdu: Array  # (n, rows)
    rdhidden: Array  # (n, h)
    narrow: Array  # (n, h)


@dataclass(frozen=True, eq=False)
class Hessian:
    """The Hessian of the exact loss at one point: ``hessian(v)`` is H v, (size,) -> (size,).

    A point is prepared once by ``hvp``; it keeps its own copy of the parameters.  ``loss`` and
    ``gradient`` (size,) are those of the point.  Products share buffers: one at a time.
    """

    cfg: ProxyConfig
    loss: float
    gradient: Array
    blocks: tuple[BlockPoint, ...]
    tangents: tuple[Tangent, ...]
    scratch: Scratch

    @property
    def size(self) -> int:
        """Number of parameters."""
        return self.gradient.size

    def __call__(self, v: ArrayLike) -> Array:
        """H v, a new array; ValueError unless v is (size,)."""
        direction = np.ascontiguousarray(v, np.float64)
        if direction.shape != (self.size,):
            raise ValueError(f"v must have shape ({self.size},); got {direction.shape}")
        result = np.empty(self.size)
        along = parameter_views(direction, self.cfg)
        with one_blas_thread(), np.errstate(all="ignore"):
            _forward_r(self, along)
            _backward_r(self, along, parameter_views(result, self.cfg))
        return result


def hvp(
    params: Sequence[Mapping[str, ArrayLike]] | Array,
    x: ArrayLike,
    y: ArrayLike,
    cfg: ProxyConfig,
) -> Hessian:
    """Prepare the Hessian of the exact mean squared error at ``params`` on the batch (x, y).

    params: a tree (mxsim.proxy) or a flat vector (size,), float32 or float64, taken as float64;
    x, y: (n, width), a whole fixed data set or any batch.  Costs about two gradients.
    Raises ValueError or TypeError naming what does not fit.
    """
    check_config(cfg)
    real, size = np.dtype(np.float64), parameter_count(cfg)
    if isinstance(params, np.ndarray):
        if params.shape != (size,):
            raise ValueError(f"flat params must have shape ({size},); got {params.shape}")
        params = parameter_views(params, cfg)
    checked = check_params(params, cfg)
    flat = np.concatenate([b[k].ravel() for b in checked for k in KINDS], dtype=real)
    own = parameter_views(flat, cfg)
    x_, y_ = check_batch(x, y, cfg, real)
    with one_blas_thread(), np.errstate(all="ignore"):
        ws = workspace(cfg, len(x_), real)
        prediction = forward(own, x_, cfg, precision_of(PrecisionScheme(), cfg.depth), ws)
        loss = float(ops.mse_forward_backward(prediction, y_, ws.dstream))
        gradient = np.empty(size)
        blocks = _backward(own, ws.blocks, ws.dstream, parameter_views(gradient, cfg), cfg)
    return Hessian(cfg, loss, gradient, blocks, *_buffers(blocks))


def _buffers(blocks: Sequence[BlockPoint]) -> tuple[tuple[Tangent, ...], Scratch]:
    """Everything that a product writes but its result: without them, pages would be faulted in."""
    like, first = np.empty_like, blocks[0]
    tangents = tuple(
        Tangent(like(b.dz), like(b.s.rstd), like(b.dz), like(b.du), like(b.s.hidden))
        for b in blocks
    )
    return tangents, Scratch(
        stream=like(first.dz),
        rdz=like(first.dz),
        branch=like(first.dz),
        rdu=like(first.du),
        rdhidden=like(first.s.hidden),
        narrow=like(first.s.hidden),
    )


def _backward(
    params: Params, states: Sequence[BlockState], dstream: Array, grads: Params, cfg: ProxyConfig
) -> tuple[BlockPoint, ...]:
    """mxsim.proxy.backward of the exact proxy, keeping what it overwrites; fills ``grads``."""
    points = []
    row = np.empty(cfg.width)
    for p, s, g in reversed(list(zip(params, states, grads, strict=True))):
        # 4. x = x + hidden w2^T + b2
        dy = dstream.copy()
        ops.column_sums(dy, g["b2"])
        dhidden = dy @ p["w2"]
        np.dot(dy.T, s.hidden, out=g["w2"])
        # 3. hidden = phi(u)
        du = np.empty_like(s.slope)
        ops.activation_backward(dhidden, s.slope, du)
        bend, cross = _second_derivatives(s.z @ p["w1"].T, cfg.activation)
        bend *= dhidden
        cross *= dhidden if cross.size else 1
        # 2. u = z w1^T
        dz = du @ p["w1"]
        np.dot(du.T, s.z, out=g["w1"])
        # 1. z = LN(x)
        if cfg.norm == "none":
            dstream += dz
        else:
            ops.layer_norm_backward(
                dz, s.xhat, s.rstd, s.gamma, dstream, g["ln_gamma"], g["ln_beta"], row,
                cfg.norm != "rms",
            )  # fmt: skip
        _zero_unused(g, cfg)
        points.append(BlockPoint(p, s, dy, du, dz, bend, cross))
    return tuple(reversed(points))


def _zero_unused(tree: Mapping[str, Array], cfg: ProxyConfig) -> None:
    """Zero in a block's derivative what the norm does not use."""
    if cfg.norm in ("none", "layer_no_affine"):
        tree["ln_gamma"][...] = 0
    if cfg.norm != "layer":
        tree["ln_beta"][...] = 0


def _second_derivatives(u: Array, activation: str) -> tuple[Array, Array]:
    """u (n, h) -> (phi''(u) (n, h), empty); swiglu, u = a, b (n, 2h) -> (a silu''(b), silu'(b))."""
    nothing = np.empty((len(u), 0))
    if activation == "gelu":  # gelu' = Phi + u pdf, pdf' = -u pdf
        pdf = np.exp(-0.5 * u * u) / math.sqrt(2 * math.pi)
        return pdf * (2 - u * u), nothing
    if activation == "gelu_tanh":  # gelu = u s(q), q = c (u + k u^3), s' = s (1 - s)
        c, k = 2 * math.sqrt(2 / math.pi), 0.044715
        s = expit(c * (u + k * u**3))
        dq, ddq = c * (1 + 3 * k * u * u), 6 * c * k * u
        ds = s * (1 - s)
        return ds * (2 * dq + u * ((1 - 2 * s) * dq * dq + ddq)), nothing
    if activation == "swiglu":  # silu = b s, silu' = s + b s (1 - s)
        a, b = np.split(u, 2, axis=1)
        s = expit(b)
        ds = s * (1 - s)
        return a * ds * (2 + b * (1 - 2 * s)), s + b * ds
    return np.zeros_like(u), nothing  # relu, linear


def _forward_r(hessian: Hessian, v: Params) -> None:
    """R of mxsim.proxy.forward and of the loss's gradient: tangents, and R{dstream} in stream."""
    cfg, scratch = hessian.cfg, hessian.scratch
    rx = scratch.stream
    rx[...] = 0  # the data do not move
    for b, t, rp in zip(hessian.blocks, hessian.tangents, v, strict=True):
        # 1. z = LN(x)
        if cfg.norm == "none":
            t.rz[...] = rx
        else:
            rgamma, rbeta = _affine(rp, cfg)
            norm_forward_r(
                rx, b.s.xhat, b.s.rstd, b.s.gamma, rgamma, rbeta, t.rxhat, t.pull, t.rz,
                cfg.norm != "rms",
            )  # fmt: skip
        # 2. u = z w1^T
        np.dot(t.rz, b.p["w1"].T, out=t.ru)
        np.add(t.ru, np.dot(b.s.z, rp["w1"].T, out=scratch.rdu), out=t.ru)
        # 3. hidden = phi(u); swiglu: the halves of slope * ru add up
        if b.cross.size:
            h = b.cross.shape[1]
            np.multiply(b.s.slope, t.ru, out=scratch.rdu)
            np.add(scratch.rdu[:, :h], scratch.rdu[:, h:], out=t.rhidden)
        else:
            np.multiply(b.s.slope, t.ru, out=t.rhidden)
        # 4. x = x + hidden w2^T + b2
        rx += np.dot(t.rhidden, b.p["w2"].T, out=scratch.branch)
        rx += np.dot(b.s.hidden, rp["w2"].T, out=scratch.branch)
        rx += rp["b2"]
    # dstream = 2 (prediction - y) / (n d)
    rx *= 2.0 / rx.size


def _backward_r(hessian: Hessian, v: Params, result: Params) -> None:
    """R of ``_backward``, from R{dstream} in stream -> the tree ``result``."""
    cfg, scratch = hessian.cfg, hessian.scratch
    rdy, rdz, rdu, rdhidden = scratch.stream, scratch.rdz, scratch.rdu, scratch.rdhidden
    for k in reversed(range(cfg.depth)):
        b, t, rp, out = hessian.blocks[k], hessian.tangents[k], v[k], result[k]
        # 4. x = x + hidden w2^T + b2
        ops.column_sums(rdy, out["b2"])
        np.dot(rdy, b.p["w2"], out=rdhidden)
        rdhidden += np.dot(b.dy, rp["w2"], out=scratch.narrow)
        np.dot(rdy.T, b.s.hidden, out=out["w2"])
        out["w2"] += b.dy.T @ t.rhidden
        # 3. du = dhidden * slope
        ops.activation_backward(rdhidden, b.s.slope, rdu)
        if b.cross.size:  # swiglu: slope = silu(b), a silu'(b)
            h = b.cross.shape[1]
            for half, second, ru in (
                (rdu[:, :h], b.cross, t.ru[:, h:]),
                (rdu[:, h:], b.cross, t.ru[:, :h]),
                (rdu[:, h:], b.bend, t.ru[:, h:]),
            ):
                half += np.multiply(second, ru, out=scratch.narrow)
        else:
            rdu += np.multiply(b.bend, t.ru, out=scratch.narrow)
        # 2. u = z w1^T
        np.dot(rdu, b.p["w1"], out=rdz)
        rdz += np.dot(b.du, rp["w1"], out=scratch.branch)
        np.dot(rdu.T, b.s.z, out=out["w1"])
        out["w1"] += b.du.T @ t.rz
        # 1. z = LN(x)
        if cfg.norm == "none":
            rdy += rdz
        else:
            norm_backward_r(
                rdz, b.dz, b.s.xhat, t.rxhat, b.s.rstd, t.pull, b.s.gamma, _affine(rp, cfg)[0],
                rdy, out["ln_gamma"], out["ln_beta"], cfg.norm != "rms",
            )  # fmt: skip
        _zero_unused(out, cfg)


def _affine(rp: Mapping[str, Array], cfg: ProxyConfig) -> tuple[Array, Array]:
    """The directions of gamma and beta, zero where the norm does not use them."""
    used = {kind: rp[kind].copy() for kind in ("ln_gamma", "ln_beta")}
    _zero_unused(used, cfg)
    return used["ln_gamma"], used["ln_beta"]


@kernel
def norm_forward_r(
    rx: Any,
    xhat: Any,
    rstd: Any,
    gamma: Any,
    rgamma: Any,
    rbeta: Any,
    rxhat: Any,
    pull: Any,
    rz: Any,
    centre: Any,
) -> None:
    """R of ops.layer_norm_forward: rx (n, d), rgamma, rbeta (d,) -> rxhat (n, d), pull (n,), rz."""
    n, d = rx.shape
    for i in range(n):
        # 1. mean, 2. centre
        mean = ops.sum_of(rx[i]) / d if centre else 0.0
        total = 0.0
        for j in range(d):
            rxhat[i, j] = rx[i, j] - mean
            total += rxhat[i, j] * xhat[i, j]
        # 3. rstd = (mean(centred^2) + eps)^(-1/2)  ->  R{rstd} = -rstd^2 pull
        pull[i] = total / d
        for j in range(d):
            # 4. xhat = centred * rstd
            rxhat[i, j] = rstd[i] * (rxhat[i, j] - xhat[i, j] * pull[i])
            # 5. z = xhat * gamma + beta
            rz[i, j] = rxhat[i, j] * gamma[j] + xhat[i, j] * rgamma[j] + rbeta[j]


@kernel
def norm_backward_r(
    rdz: Any,
    dz: Any,
    xhat: Any,
    rxhat: Any,
    rstd: Any,
    pull: Any,
    gamma: Any,
    rgamma: Any,
    rdx: Any,
    rdgamma: Any,
    rdbeta: Any,
    centre: Any,
) -> None:
    """R of ops.layer_norm_backward: rdz (n, d) -> rdgamma, rdbeta (d,); adds to rdx (n, d)."""
    n, d = rdz.shape
    rdgamma[:] = 0
    rdbeta[:] = 0
    for i in range(n):
        mean = rmean = slope = rslope = 0.0
        for j in range(d):
            # 5. z = xhat * gamma + beta
            rdgamma[j] += rdz[i, j] * xhat[i, j] + dz[i, j] * rxhat[i, j]
            rdbeta[j] += rdz[i, j]
            dxhat, rdxhat = dz[i, j] * gamma[j], rdz[i, j] * gamma[j] + dz[i, j] * rgamma[j]
            mean += dxhat / d
            rmean += rdxhat / d
            slope += dxhat * xhat[i, j] / d
            rslope += (rdxhat * xhat[i, j] + dxhat * rxhat[i, j]) / d
        if not centre:
            mean = rmean = 0.0
        # 4.-1. dx += rstd * inner, inner = dxhat - mean - xhat * slope
        for j in range(d):
            dxhat, rdxhat = dz[i, j] * gamma[j], rdz[i, j] * gamma[j] + dz[i, j] * rgamma[j]
            inner = dxhat - mean - xhat[i, j] * slope
            rinner = rdxhat - rmean - rxhat[i, j] * slope - xhat[i, j] * rslope
            rdx[i, j] += rstd[i] * (rinner - rstd[i] * pull[i] * inner)
