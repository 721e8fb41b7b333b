"""The gradient error over several batches at fixed parameters: systematic part, random part, |Z|.

With g_i, g~_i the exact and the scheme's gradient of batch i, eps_i = g~_i - g_i.  Squares of means
over batches are estimated without bias by leaving out the products of a batch with itself,

    |E v|^2  ~  sum over i != j of <v_i, v_j> / (m (m - 1)),

so the noise of a batch does not pass for a systematic error; such an estimate may be negative.
Ratios of two such estimates have a bias of order 1/m, and are of little use where |E g|^2 itself is
hardly seen above its own uncertainty (``signal`` near 0).
Everything comes from the inner products of the m gradients with each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.linalg import eigh

from mxsim.bias import Group
from mxsim.config import ProxyConfig
from mxsim.precision import PrecisionScheme, precision_of
from mxsim.proxy import (
    KINDS,
    check_batch,
    check_params,
    loss_and_grads_into,
    parameter_count,
    parameter_views,
    workspace,
)
from mxsim.stats import CONFIDENCE, Estimate
from mxsim.threads import one_blas_thread

Array = NDArray[Any]
RESAMPLES = 2000
RANK_TOLERANCE = 1e-10  # of the largest eigenvalue: below it a direction of the span is rounding


@dataclass(frozen=True)
class BatchBias:
    """How g~ differs from g over m batches, for one group of parameters.

    - systematic: |E eps| / |E g|, the part that more data does not average away; 0 where the
      estimate of its square, ``systematic_squared``, is negative.
    - alpha: <E g~, E g> / |E g|^2, the aligned gain of the mean gradient.
    - noise: sqrt(E |eps - E eps|^2) / |E g|, the random part, a batch's worth.
    - signal: |E g|^2 / E |g|^2; near 0 the batch gradient is noise, and |g| does not shrink with
      |E g|.
    - norm: sqrt(E |g|^2), so that |E g| = norm sqrt(signal).
    - zetas: |eps_i| / |g_i| of each batch.
    - operator_norm: a lower bound on |Z| if one Z with eps = Z g serves all batches: the largest
      |E c| / |G c| over combinations c of the batches, never below the largest single zeta.  It
      says nothing if no such Z exists (rounding is not linear), and it grows with m.

    Intervals: percentile bootstrap over batches, products of a batch with itself left out; meant as
    95 %, they cover about 88 % at m = 8, 90 % at 16 and 94 % at 64, and have NaN ends below m = 4.
    Values are NaN where |E g|^2 is not seen above 0 (resamples of that kind are left out), zetas
    and operator_norm where a batch has no gradient at all.
    """

    systematic: Estimate
    systematic_squared: Estimate
    alpha: Estimate
    noise: Estimate
    signal: Estimate
    norm: float
    zetas: tuple[float, ...]
    operator_norm: float


def bias_over_batches(
    params: Sequence[Mapping[str, ArrayLike]],
    batches: Sequence[tuple[ArrayLike, ArrayLike]],
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
) -> Mapping[Group, BatchBias]:
    """Compare gradients at ``params`` on each of m >= 2 batches (x, y).

    Keys: "all", a kind ("ln_gamma", ...), a block index, a (kind, block index) pair.  Batch i uses
    the random bits of step i.  Raises as ``loss_and_grads``; ValueError for fewer than two batches.
    """
    if len(batches) < 2:
        raise ValueError(f"batches must hold at least two (x, y) pairs; got {len(batches)}")
    checked = check_params(params, cfg)
    real = checked[0]["w1"].dtype
    size, m = parameter_count(cfg), len(batches)
    flat = np.empty((2, m, size), real)  # exact gradients, errors
    with one_blas_thread():
        ws = None
        for i, batch in enumerate(batches):
            if not isinstance(batch, tuple) or len(batch) != 2:
                raise TypeError(
                    f"batches must hold (x, y) pairs; batch {i} is {type(batch).__name__}"
                )
            try:
                x_, y_ = check_batch(*batch, cfg, real)
            except (TypeError, ValueError) as error:
                raise type(error)(f"batch {i}: {error}") from None
            if ws is None or len(x_) != len(ws.stream):
                ws = workspace(cfg, len(x_), real)
            for row, each in enumerate((PrecisionScheme(), scheme)):
                grads = parameter_views(flat[row, i], cfg)
                precision = precision_of(each, cfg.depth, cfg.seed, i)
                loss_and_grads_into(checked, x_, y_, cfg, precision, ws, grads)
    flat[1] -= flat[0]
    return _by_group(flat, cfg)


def _by_group(flat: Array, cfg: ProxyConfig) -> dict[Group, BatchBias]:
    """flat (2, m, size) -> every group's BatchBias; inner products of groups add up."""
    m = flat.shape[1]
    parts: dict[tuple[str, int], Array] = {}
    views = [[parameter_views(flat[row, i], cfg) for i in range(m)] for row in range(2)]
    for k in range(cfg.depth):
        for kind in KINDS:
            rows = [view[k][kind].ravel().astype(np.float64) for row in views for view in row]
            stacked = np.stack(rows)  # (2 m, size of the tensor)
            parts[kind, k] = stacked @ stacked.T
    groups: dict[Group, Array] = {"all": np.sum(list(parts.values()), axis=0)}
    for kind in KINDS:
        groups[kind] = np.sum([parts[kind, k] for k in range(cfg.depth)], axis=0)
    for k in range(cfg.depth):
        groups[k] = np.sum([parts[kind, k] for kind in KINDS], axis=0)
    for place, gram in parts.items():
        groups[place] = gram
    return {
        name: from_products(gram[:m, :m], gram[m:, :m], gram[m:, m:])
        for name, gram in groups.items()
    }


def from_products(gg: Array, eg: Array, ee: Array) -> BatchBias:
    """BatchBias from inner products (m, m): <g_i, g_j>, <eps_i, g_j>, <eps_i, eps_j>."""
    m = len(gg)
    largest = float(np.max(np.diag(gg), initial=0.0))
    unit = 2.0 ** np.floor(np.log2(largest)) if 0 < largest < np.inf else 1.0
    gg, eg, ee = gg / unit, eg / unit, ee / unit  # ratios stay, and products of them in range
    counts = np.random.default_rng(0).multinomial(m, np.full(m, 1 / m), RESAMPLES)
    weights = np.concatenate([np.ones((1, m)), counts])  # the first is the sample itself
    mean_gg, mean_eg, mean_ee = (_mean_product(weights, each) for each in (gg, eg, ee))
    own = weights / weights.sum(axis=1, keepdims=True)
    power_g, power_e = own @ np.diag(gg), own @ np.diag(ee)
    with np.errstate(all="ignore"):
        seen = np.where(mean_gg > 0, mean_gg, np.nan)
        squared = mean_ee / seen
        series = {
            "systematic_squared": squared,
            "systematic": np.sqrt(np.maximum(squared, 0)),
            "alpha": 1 + mean_eg / seen,
            "noise": np.sqrt(np.maximum(power_e - mean_ee, 0) / seen),
            "signal": mean_gg / power_g,
        }
        zetas = np.sqrt(np.diag(ee) / np.diag(gg))
    estimates = {name: _interval(values, m) for name, values in series.items()}
    return BatchBias(
        **estimates,
        norm=float(np.sqrt(np.diag(gg).mean()) * np.sqrt(unit)),
        zetas=tuple(float(z) for z in zetas),
        operator_norm=_operator_norm(gg, ee, zetas),
    )


def _mean_product(weights: Array, products: Array) -> Array:
    """sum w_i w_j <u_i, v_j> over i != j, over the sum of w_i w_j, for each row of weights."""
    off = products - np.diag(np.diag(products))
    pairs = weights.sum(axis=1) ** 2 - (weights**2).sum(axis=1)
    with np.errstate(all="ignore"):
        return np.asarray(np.einsum("bi,ij,bj->b", weights, off, weights) / pairs)


def _interval(values: Array, m: int) -> Estimate:
    """values[0] is the estimate, the rest its resamples."""
    resampled = values[1:][np.isfinite(values[1:])]
    if not len(resampled) or m < 4:
        return Estimate(float(values[0]), math.nan, math.nan, m)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail))
    return Estimate(float(values[0]), float(low), float(high), m)


def _operator_norm(gg: Array, ee: Array, zetas: Array) -> float:
    """sqrt of the largest generalized eigenvalue of (ee, gg) on the span that gg resolves."""
    if not (np.isfinite(gg).all() and np.isfinite(ee).all()):
        return math.nan
    scale = np.sqrt(np.diag(gg))
    if (scale == 0).any():
        return math.nan
    values, vectors = np.linalg.eigh(gg / np.outer(scale, scale))
    kept = values > RANK_TOLERANCE * values[-1]
    basis = vectors[:, kept] / np.sqrt(values[kept]) / scale[:, None]
    largest = eigh(basis.T @ ee @ basis, eigvals_only=True)[-1]
    return float(max(math.sqrt(max(largest, 0.0)), zetas.max()))
