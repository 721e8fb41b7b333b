"""Exact gradients and quantization errors at one point, over batches of several sizes.

What noise_floor.py measures along its runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim import ProxyConfig, SiteFormat, scheme
from mxsim.ops import squared_norm
from mxsim.precision import PrecisionScheme, precision_of
from mxsim.proxy import Params, loss_and_grads_into, parameter_count, parameter_views, workspace
from mxsim.threads import one_blas_thread

Array = NDArray[Any]

ARMS = ("ln_only_e4m3", "gemm_e4m3", "all_e4m3")
E4M3 = SiteFormat("mxfp8_e4m3")
SCHEMES: Mapping[str, PrecisionScheme] = {name: scheme(name) for name in ARMS} | {
    "fprop_x": PrecisionScheme(fc1_fprop_x=E4M3, fc2_fprop_x=E4M3),
    "fprop_w": PrecisionScheme(fc1_fprop_w=E4M3, fc2_fprop_w=E4M3),
}
MEAN, VARIANCE = 0, 1  # of a moment pair: |E v|^2, and tr Cov v of a batch of one


def measure(
    params: Params, x: Array, y: Array, cfg: ProxyConfig, sizes: Sequence[int]
) -> dict[str, Any]:
    """What is stored of one point (noise_floor.run), from the sample (x, y) of max(sizes) rows.

    The sample goes through in chunks of min(sizes).  A larger batch's gradient is the mean of its
    chunks': forward blocks lie within a row and wgrad's blocks of 32 rows within a chunk, and dy's
    factor of 1/batch is a power of two to all of them.
    """
    chunk = min(sizes)
    chunks = [(x[i : i + chunk], y[i : i + chunk]) for i in range(0, len(x), chunk)]
    ws = workspace(cfg, chunk, cfg.real)
    flat = np.empty(parameter_count(cfg), cfg.real)
    grads = parameter_views(flat, cfg)
    exact = precision_of(PrecisionScheme(), cfg.depth)
    g = np.empty((len(chunks), flat.size), cfg.real)
    eps, forward = np.empty_like(g), np.empty_like(g)  # the error; the forward error's part of it
    found: dict[str, Any] = {"added": [], "error": [], "forward": [], "zeta": []}
    with one_blas_thread():
        predictions, excess = [], -(cfg.label_noise**2)
        for i, (x_, y_) in enumerate(chunks):
            loss_and_grads_into(params, x_, y_, cfg, exact, ws, grads)
            g[i] = flat
            predictions.append(ws.stream.copy())
            target = y_ + x_.mean(axis=1, keepdims=True)  # the mean passes by layer norm, always
            excess += mean_square(ws.stream - target) / len(chunks)
        lengths = np.array([power(g, size // chunk) for size in sizes])
        for each in SCHEMES.values():
            rounded, added = precision_of(each, cfg.depth, cfg.seed), 0.0
            for i, (x_, y_) in enumerate(chunks):
                loss_and_grads_into(params, x_, y_, cfg, rounded, ws, grads)
                delta = ws.stream - predictions[i]
                added += mean_square(delta) / len(chunks)
                np.subtract(flat, g[i], out=eps[i])
                loss_and_grads_into(params, x_, y_ - delta, cfg, exact, ws, grads)
                np.subtract(flat, g[i], out=forward[i])
            found["added"].append(added)
            found["error"].append(moments(eps, chunk))
            found["forward"].append(moments(forward, chunk))
            errors = np.array([power(eps, size // chunk) for size in sizes])
            found["zeta"].append(np.sqrt(errors / lengths))
    return found | {"excess": excess, "gradient": moments(g, chunk)}


def mean_square(v: Array) -> float:
    """Over all entries."""
    return float(np.mean(np.square(v, dtype=np.float64)))


def moments(v: Array, chunk: int) -> tuple[float, float]:
    """|E v|^2, without bias, and tr Cov v of one sample, from m chunks' means v (m, parameters)."""
    m = len(v)
    equal, mean = power(v, 1), (m * power(v, m) - power(v, 1)) / (m - 1)
    return mean, (equal - mean) * chunk


def power(v: Array, together: int) -> float:
    """Mean of |v|^2 over batches of ``together`` chunks."""
    starts = range(0, len(v), together)
    squares = [float(squared_norm(v[i : i + together].mean(axis=0))) for i in starts]
    return sum(squares) / len(squares)
