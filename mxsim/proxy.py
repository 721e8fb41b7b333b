"""The student: parameters, workspace, forward, backward, loss and gradients.

Parameters are a list of blocks, each a mapping ln_gamma (d,), ln_beta (d,), w1 (h, d) (SwiGLU
(2h, d)), w2 (d, h), b2 (d,), views into one flat vector in this order.  Linear maps are y = x w^T.
What draws numbers (initial weights, teacher, data) is in data.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mxsim import ops, steps
from mxsim.config import ProxyConfig, check_config
from mxsim.precision import (
    BlockPrecision,
    Internals,
    PrecisionScheme,
    internal_rounding,
    precision_of,
)
from mxsim.rounding import NOT_AT_ALL
from mxsim.threads import Dot, dot, one_blas_thread

Array = NDArray[Any]
Params = list[dict[str, Array]]

KINDS = ("ln_gamma", "ln_beta", "w1", "w2", "b2")


def parameter_shapes(cfg: ProxyConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each parameter of a block, in the order of KINDS."""
    d, h = cfg.width, cfg.hidden
    rows = 2 * h if cfg.activation == "swiglu" else h
    return {"ln_gamma": (d,), "ln_beta": (d,), "w1": (rows, d), "w2": (d, h), "b2": (d,)}


def parameter_count(cfg: ProxyConfig) -> int:
    """Number of scalars in all blocks."""
    return cfg.depth * sum(int(np.prod(shape)) for shape in parameter_shapes(cfg).values())


def parameter_views(flat: Array, cfg: ProxyConfig) -> Params:
    """The blocks of parameters as views into ``flat`` (parameter_count(cfg),)."""
    params: Params = []
    start = 0
    for _ in range(cfg.depth):
        block = {}
        for kind, shape in parameter_shapes(cfg).items():
            stop = start + int(np.prod(shape))
            block[kind] = flat[start:stop].reshape(shape)
            start = stop
        params.append(block)
    return params


def check_params(params: Sequence[Mapping[str, ArrayLike]], cfg: ProxyConfig) -> Params:
    """``params`` as C-contiguous arrays of one dtype (float32, or float64 if any of them is).

    Raises ValueError naming block, parameter and shape where they do not fit ``cfg``.
    """
    check_config(cfg)
    if len(params) != cfg.depth:
        raise ValueError(f"params must have {cfg.depth} blocks (cfg.depth); got {len(params)}")
    shapes = parameter_shapes(cfg)
    for k, block in enumerate(params):
        if set(block) != set(shapes):
            raise ValueError(
                f"params[{k}] must have the keys {', '.join(shapes)}; got {', '.join(block)}"
            )
        for kind, shape in shapes.items():
            if np.shape(block[kind]) != shape:
                raise ValueError(
                    f"params[{k}]['{kind}'] must have shape {shape}; got {np.shape(block[kind])}"
                )
    dtypes = [np.asarray(v).dtype for block in params for v in block.values()]
    if any(dtype.kind not in "fiu" for dtype in dtypes):
        raise TypeError(f"params must be real arrays; got dtypes {sorted(set(map(str, dtypes)))}")
    real = np.float64 if any(dtype == np.float64 for dtype in dtypes) else np.float32
    return [{k: np.ascontiguousarray(block[k], real) for k in shapes} for block in params]


def check_batch(x: ArrayLike, y: ArrayLike, cfg: ProxyConfig, real: Any) -> tuple[Array, Array]:
    """x and y as C-contiguous arrays (n, width) of dtype ``real``; ValueError if shapes differ."""
    arrays = []
    for name, values in (("x", x), ("y", y)):
        a = np.asarray(values)
        if a.dtype.kind not in "fiu":
            raise TypeError(f"{name} must be a real array; got dtype {a.dtype}")
        if a.ndim != 2 or a.shape[1] != cfg.width or not len(a):
            raise ValueError(f"{name} must have shape (n, {cfg.width}), n >= 1; got {a.shape}")
        arrays.append(np.ascontiguousarray(a, real))
    if arrays[0].shape != arrays[1].shape:
        raise ValueError(f"x and y must have one shape; got {arrays[0].shape}, {arrays[1].shape}")
    return arrays[0], arrays[1]


@dataclass(frozen=True)
class BlockState:
    """What one block's forward pass keeps for its backward pass."""

    gamma: Array  # (d,) as layer norm saw it, maybe quantized
    beta: Array  # (d,)
    xhat: Array  # (n, d)
    rstd: Array  # (n,)
    var_eps: Array  # (n,)
    z: Array  # (n, d) layer norm's output
    hidden: Array  # (n, h)
    slope: Array  # (n, h) or (n, 2h)
    gate: Array  # (n, h) for swiglu, else empty


@dataclass(frozen=True)
class Workspace:
    """Every buffer of a step for n samples: allocated once, so that a step allocates nothing."""

    blocks: tuple[BlockState, ...]
    stream: Array  # (n, d) the residual stream, the prediction at the end
    dstream: Array  # (n, d)
    branch: Array  # (n, d) w2's output, and in backward dz
    wide: Array  # (n, h or 2h) w1's output u, and in backward du
    dhidden: Array  # (n, h)
    rows: Array  # (4, d)
    fc1: ops.LinearScratch
    fc2: ops.LinearScratch


def workspace(cfg: ProxyConfig, samples: int, real: Any, dot: Dot = dot) -> Workspace:
    """Allocate the buffers for ``samples`` rows in dtype ``real``; ``dot`` does the GEMMs."""
    d, h = cfg.width, cfg.hidden
    shapes = parameter_shapes(cfg)
    rows = shapes["w1"][0]

    def new(*shape: int) -> Array:
        return np.empty(shape, real)

    def scratch(n: int, o: int, i: int) -> ops.LinearScratch:
        return ops.LinearScratch(
            x=new(n, i),
            w=new(o, i),
            dy=new(n, o),
            x_in=new(n, i),
            w_in=new(o, i),
            dy_in=new(n, o),
            dot=dot,
        )

    return Workspace(
        blocks=tuple(
            BlockState(
                gamma=new(d),
                beta=new(d),
                xhat=new(samples, d),
                rstd=new(samples),
                var_eps=new(samples),
                z=new(samples, d),
                hidden=new(samples, h),
                slope=new(samples, rows),
                gate=new(samples, h if cfg.activation == "swiglu" else 0),
            )
            for _ in range(cfg.depth)
        ),
        stream=new(samples, d),
        dstream=new(samples, d),
        branch=new(samples, d),
        wide=new(samples, rows),
        dhidden=new(samples, h),
        rows=new(4, d),
        fc1=scratch(samples, *shapes["w1"]),
        fc2=scratch(samples, *shapes["w2"]),
    )


def _how(step: str, how: ops.Rounding) -> ops.Rounding:
    """``how`` where the internal is ``step``: not at all if it is exact (or fp32)."""
    return how if step.startswith("bf16") else (NOT_AT_ALL, how[1])


def forward(
    params: Params, x: Array, cfg: ProxyConfig, precision: Sequence[BlockPrecision], ws: Workspace
) -> Array:
    """x (n, d) -> prediction (n, d), in ws.stream."""
    stream = ws.stream
    stream[...] = x
    scheme = precision[0].scheme
    internals, how = scheme.forward, internal_rounding(scheme, stream.dtype)
    for p, q, s in zip(params, precision, ws.blocks, strict=True):
        # 1. z = LN(x) with quantized gamma, beta
        _norm_forward(stream, p, q, s, cfg, how, ws.rows)
        # 2. u = z w1^T
        ops.linear_forward(s.z, p["w1"], ws.wide, "fc1", q, how, ws.fc1)
        # 3. hidden = phi(u)
        _activation_forward(ws.wide, s, cfg.activation, scheme, how)
        # 4. x = x + hidden w2^T + b2
        ops.linear_forward(s.hidden, p["w2"], ws.branch, "fc2", q, how, ws.fc2)
        if internals.bias == "exact":
            ops.add_branch(stream, ws.branch, p["b2"])
        else:
            b2 = ops.rounded(p["b2"], ws.rows[0], internals.bias, how)
            steps.add_bias(ws.branch, b2, how)
            np.add(stream, ws.branch, out=stream)
        ops.round_in_place(stream, internals.residual, how)
    return stream


def _norm_forward(
    stream: Array,
    p: Mapping[str, Array],
    q: BlockPrecision,
    s: BlockState,
    cfg: ProxyConfig,
    how: ops.Rounding,
    rows: Array,
) -> None:
    """stream (n, d) -> s.z, by cfg.norm, with gamma and beta as their sites make them."""
    if cfg.norm == "none":
        s.z[...] = stream
        return
    _affine(p, q, cfg, s.gamma, s.beta)
    eps, centre = stream.dtype.type(cfg.ln_eps), cfg.norm != "rms"
    if q.scheme.forward.layer_norm == "exact":
        ops.layer_norm_forward(stream, s.gamma, s.beta, eps, s.z, s.xhat, s.rstd, s.var_eps, centre)
    else:
        steps.layer_norm_forward(
            stream, s.gamma, s.beta, eps, s.z, s.xhat, s.var_eps, how, rows, centre
        )


def _affine(
    p: Mapping[str, Array], q: BlockPrecision, cfg: ProxyConfig, gamma: Array, beta: Array
) -> None:
    """gamma, beta (d,) as the norm sees them: through their sites, or 1 and 0 if unused."""
    for site, out, unused in (("ln_gamma", gamma, 1), ("ln_beta", beta, 0)):
        if cfg.norm == "layer" or (cfg.norm == "rms" and site == "ln_gamma"):
            out[...] = p[site] if q.ready else q.operand(site, p[site], 0, out)
        else:
            out[...] = unused


def ready_for_forward(
    params: Params, cfg: ProxyConfig, precision: Sequence[BlockPrecision], ws: Workspace
) -> tuple[Params, tuple[BlockPrecision, ...]]:
    """Parameters rounded once for many forward passes, and the precision that knows it."""
    how = internal_rounding(precision[0].scheme, ws.stream.dtype)
    rounded = []
    for p, q in zip(params, precision, strict=True):
        gamma, beta = np.empty_like(p["ln_gamma"]), np.empty_like(p["ln_beta"])
        _affine(p, q, cfg, gamma, beta)
        w1 = ops.forward_weight(p["w1"], "fc1", q, how, ws.fc1).copy()
        w2 = ops.forward_weight(p["w2"], "fc2", q, how, ws.fc2).copy()
        rounded.append({"ln_gamma": gamma, "ln_beta": beta, "w1": w1, "w2": w2, "b2": p["b2"]})
    return rounded, tuple(replace(q, ready=True) for q in precision)


def _norm_backward(
    dz: Array,
    s: BlockState,
    g: Mapping[str, Array],
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    how: ops.Rounding,
    ws: Workspace,
    first: bool,
) -> None:
    """dz (n, d) -> gradients of gamma and beta; adds to ws.dstream, unless nothing lies below."""
    dgamma, dbeta, centre = g["ln_gamma"], g["ln_beta"], cfg.norm != "rms"
    if cfg.norm == "none":
        np.add(ws.dstream, dz, out=ws.dstream)
    elif "bf16" in (scheme.forward.layer_norm, scheme.backward.layer_norm):
        how = _how(scheme.backward.layer_norm, how)
        steps.layer_norm_backward(
            dz, s.xhat, s.var_eps, s.gamma, ws.dstream, dgamma, dbeta, how, ws.rows, centre
        )
    elif first:
        ops.layer_norm_backward_affine(dz, s.xhat, dgamma, dbeta)
    else:
        ops.layer_norm_backward(
            dz, s.xhat, s.rstd, s.gamma, ws.dstream, dgamma, dbeta, ws.rows[0], centre
        )
    if cfg.norm in ("none", "layer_no_affine"):
        dgamma[...] = 0
    if cfg.norm != "layer":
        dbeta[...] = 0


def _steps_of_activation(
    internals: Internals, how: ops.Rounding
) -> tuple[ops.Rounding, ops.Rounding]:
    """How the activation's steps are rounded, and how those of SwiGLU's silu."""
    return (
        _how("bf16" if internals.activation == "bf16" else "exact", how),
        _how(internals.activation, how),
    )


def _by_steps(activation: str, scheme: PrecisionScheme) -> bool:
    """Whether the activation goes by rounded steps in either direction."""
    modes = {scheme.forward.activation, scheme.backward.activation}
    return "bf16" in modes or ("bf16_gate" in modes and activation == "swiglu")


def _activation_forward(
    u: Array, s: BlockState, activation: str, scheme: PrecisionScheme, how: ops.Rounding
) -> None:
    if not _by_steps(activation, scheme):
        ops.activation_forward(u, s.hidden, s.slope, activation)
        return
    step, gate = _steps_of_activation(scheme.forward, how)
    back_step, back_gate = _steps_of_activation(scheme.backward, how)
    back = back_gate if activation == "swiglu" else back_step
    if activation.startswith("gelu") and scheme.forward.activation != "bf16":
        ops.activation_forward(
            u, s.hidden, s.slope, activation
        )  # erf; steps are of its sigmoid form
    else:
        steps.activation_forward(u, s.hidden, s.slope, s.gate, activation, step, gate, back)


def _activation_backward(
    dhidden: Array,
    s: BlockState,
    du: Array,
    activation: str,
    scheme: PrecisionScheme,
    how: ops.Rounding,
) -> None:
    if not _by_steps(activation, scheme):
        ops.activation_backward(dhidden, s.slope, du)
        return
    step, gate = _steps_of_activation(scheme.backward, how)
    steps.activation_backward(dhidden, s.slope, s.gate, du, activation, step, gate)


def backward(
    params: Params,
    cfg: ProxyConfig,
    precision: Sequence[BlockPrecision],
    ws: Workspace,
    grads: Params,
) -> None:
    """ws.dstream = d loss / d prediction (n, d) -> grads, the tree of ``params``, overwritten."""
    scheme = precision[0].scheme
    internals, how = scheme.backward, internal_rounding(scheme, ws.stream.dtype)
    for k in reversed(range(cfg.depth)):
        p, q, s, g = params[k], precision[k], ws.blocks[k], grads[k]
        # 4. x = x + hidden w2^T + b2: dstream passes on unchanged beside the branch
        dy = ops.rounded(ws.dstream, ws.fc2.dy_in, internals.gemm_in, how)
        ops.column_sums(dy, g["b2"])
        ops.round_in_place(g["b2"], internals.bias, how)
        ops.linear_backward(dy, s.hidden, p["w2"], ws.dhidden, g["w2"], "fc2", q, how, ws.fc2)
        # 3. hidden = phi(u)
        du = ws.wide
        _activation_backward(ws.dhidden, s, du, cfg.activation, scheme, how)
        # 2. u = z w1^T
        dz = ws.branch
        dy = ops.rounded(du, ws.fc1.dy_in, internals.gemm_in, how)
        ops.linear_backward(dy, s.z, p["w1"], dz, g["w1"], "fc1", q, how, ws.fc1)
        # 1. z = LN(x); nothing lies below the first block but data
        _norm_backward(dz, s, g, cfg, scheme, how, ws, first=k == 0)
        ops.round_in_place(ws.dstream, internals.residual, how)
        for kind in KINDS:
            ops.round_in_place(g[kind], scheme.gradients, how)
        if scheme.frozen_beta:
            g["ln_beta"][...] = 0


def loss_and_grads_into(
    params: Params,
    x: Array,
    y: Array,
    cfg: ProxyConfig,
    precision: Sequence[BlockPrecision],
    ws: Workspace,
    grads: Params,
) -> float:
    """One forward and backward pass into ``grads``; returns the loss.  Allocates no large array."""
    prediction = forward(params, x, cfg, precision, ws)
    loss = ops.mse_forward_backward(prediction, y, ws.dstream)
    backward(params, cfg, precision, ws, grads)
    return float(loss)


def loss_and_grads(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
) -> tuple[float, Params]:
    """Mean squared error of the student under ``scheme``, and its gradient.  Pure.

    params: list of ``cfg.depth`` blocks (shapes at the top of this module); x, y: (n, width), any
    n >= 1.  Computed in float32, or in float64 if the parameters are float64.  The gradient has
    the same tree as ``params``.  Random bits, if the scheme wants any, are those of (cfg.seed,
    ``step``).  Raises ValueError or TypeError naming what does not fit.
    """
    checked = check_params(params, cfg)
    real = checked[0]["w1"].dtype
    x_, y_ = check_batch(x, y, cfg, real)
    grads = parameter_views(np.empty(parameter_count(cfg), real), cfg)
    precision = precision_of(scheme, cfg.depth, cfg.seed, step)
    with one_blas_thread():  # the same bits whatever the number of BLAS threads
        loss = loss_and_grads_into(
            checked, x_, y_, cfg, precision, workspace(cfg, len(x_), real), grads
        )
    return loss, grads


def evaluate(
    params: Params,
    x: Array,
    y: Array,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
) -> float:
    """Mean squared error on a (large) sample under ``scheme``, in chunks of ``cfg.batch`` rows.

    Forward blocks run along features, so chunks do not change what is quantized together (but
    blocks of several rows, NVFP4's tensor scale and random bits go by chunk).  Weights are rounded
    once, for the forward pass only.
    """
    precision = precision_of(scheme, cfg.depth, cfg.seed, step)
    ws = workspace(cfg, min(cfg.batch, len(x)), x.dtype)
    params, precision = ready_for_forward(params, cfg, precision, ws)
    total = 0.0
    for start in range(0, len(x), cfg.batch):
        rows = x[start : start + cfg.batch]
        if len(rows) != len(ws.stream):  # a shorter last chunk
            ws = workspace(cfg, len(rows), x.dtype)
        prediction = forward(params, rows, cfg, precision, ws)
        loss = ops.mse_forward_backward(prediction, y[start : start + cfg.batch], ws.dstream)
        total += loss * len(rows)
    return total / len(x)
