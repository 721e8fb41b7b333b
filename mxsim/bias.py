"""The same-point gradient-bias instruments: g~ against g at one point, on one batch.

g is the gradient of the exact twin, g~ that of the scheme, eps = g~ - g (Su et al. 2025 model it as
g~ = (I + Z) g).  Sums run in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mxsim.config import ProxyConfig
from mxsim.layout import as_integer
from mxsim.precision import PrecisionScheme, SiteFormat, precision_of
from mxsim.proxy import (
    KINDS,
    Params,
    check_batch,
    check_params,
    loss_and_grads_into,
    parameter_count,
    parameter_views,
    workspace,
)
from mxsim.quantize import quantize
from mxsim.rounders import Rounder
from mxsim.threads import one_blas_thread

Array = NDArray[Any]
Group = str | int | tuple[str, int]


@dataclass(frozen=True)
class Bias:
    """How a quantized gradient g~ differs from the exact g, for one group of parameters.

    - zeta = |g~ - g| / |g|, a lower bound on the operator norm of Z.
    - cos = <g~, g> / (|g~| |g|).
    - alpha = <g~, g> / |g|^2, the aligned gain; alpha - 1 is the multiplicative bias.
    - rho = |g~ - alpha g| / |g|, the part that no gain explains.
      zeta^2 = (alpha - 1)^2 + rho^2 holds exactly.
    - norm = |g|, norm_quantized = |g~|.

    With g = 0: equal gradients give zeta 0, cos 1, alpha 1, rho 0; a g~ that is not 0 gives zeta
    and rho Inf, cos 0, alpha 1.  With g~ = 0 alone, cos is 0.  A NaN or Inf in either gradient
    gives NaN.
    """

    zeta: float
    cos: float
    alpha: float
    rho: float
    norm: float
    norm_quantized: float


@dataclass(frozen=True)
class BiasReport(Bias):
    """The Bias over all parameters, and ``groups`` of them.

    Keys of ``groups``: a kind ("ln_gamma", "ln_beta", "w1", "w2", "b2") over all blocks; a block
    index; a (kind, block index) pair.  ``loss`` is the exact loss, ``loss_quantized`` the scheme's.
    """

    loss: float
    loss_quantized: float
    groups: Mapping[Group, Bias]


def bias_of(exact: Array, quantized: Array) -> Bias:
    """Bias of two gradients given as vectors of one shape; ValueError if their shapes differ."""
    if np.shape(exact) != np.shape(quantized):
        raise ValueError(
            f"exact and quantized must have one shape; got {np.shape(exact)}, {np.shape(quantized)}"
        )
    g = np.asarray(exact, np.float64).ravel()
    q = np.asarray(quantized, np.float64).ravel()
    with np.errstate(all="ignore"):
        return _bias(g, q)


def _bias(g: Array, q: Array) -> Bias:
    # The four ratios do not depend on a common factor; where squares might leave the floats' range,
    # a power of two, which changes no bit of the ratios, brings them back.
    ends = [f(v, initial=0.0) for v in (g, q) for f in (np.min, np.max)]
    largest = float(np.max(np.abs(ends)))
    if not math.isfinite(largest):
        return Bias(math.nan, math.nan, math.nan, math.nan, _norm(g), _norm(q))
    unit = 1.0
    if largest > 0 and not 1e-30 < largest < 1e100:
        unit = math.ldexp(1.0, math.frexp(largest)[1] - 1)
        g, q = g / unit, q / unit
    error = q - g
    norm, quantized, error_norm = _norm(g), _norm(q), _norm(error)
    if norm == 0:
        equal = error_norm == 0
        infinite = 0.0 if equal else math.inf
        return Bias(infinite, float(equal), 1.0, infinite, 0.0, quantized * unit)
    gain = float(error @ g) / norm / norm  # alpha - 1, without cancellation
    cos = float(q @ g) / norm / quantized if quantized > 0 else 0.0
    return Bias(
        zeta=error_norm / norm,
        cos=max(-1.0, min(1.0, cos)),
        alpha=1.0 + gain,
        rho=_norm(error - gain * g) / norm,
        norm=norm * unit,
        norm_quantized=quantized * unit,
    )


def _norm(v: Array) -> float:
    return float(np.linalg.norm(v))


def _flat(params: Sequence[Mapping[str, Array]], kinds: Sequence[str] = KINDS) -> Array:
    return np.concatenate([block[kind].ravel() for block in params for kind in kinds])


def gradient_bias(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
) -> BiasReport:
    """Compare the scheme's gradient with the exact one at ``params`` on the batch (x, y).

    Arguments and errors as for ``loss_and_grads``; the exact twin runs in the same dtype.
    """
    checked = check_params(params, cfg)
    real = checked[0]["w1"].dtype
    x_, y_ = check_batch(x, y, cfg, real)
    ws = workspace(cfg, len(x_), real)
    size = parameter_count(cfg)
    trees, losses = [], []
    with one_blas_thread():
        for each in (PrecisionScheme(), scheme):
            grads = parameter_views(np.empty(size, real), cfg)
            precision = precision_of(each, cfg.depth, cfg.seed, step)
            losses.append(loss_and_grads_into(checked, x_, y_, cfg, precision, ws, grads))
            trees.append(grads)
    exact, quantized = trees
    groups: dict[Group, Bias] = {}
    for kind in KINDS:
        groups[kind] = bias_of(_flat(exact, (kind,)), _flat(quantized, (kind,)))
    for k in range(cfg.depth):
        groups[k] = bias_of(_flat(exact[k : k + 1]), _flat(quantized[k : k + 1]))
        for kind in KINDS:
            groups[kind, k] = bias_of(exact[k][kind], quantized[k][kind])
    total = bias_of(_flat(exact), _flat(quantized))
    return BiasReport(**vars(total), loss=losses[0], loss_quantized=losses[1], groups=groups)


def saturated_share(values: ArrayLike, site: SiteFormat) -> float:
    """Share of a vector's elements with |v| > largest * scale, before rounding, under ``site``.

    Of several vectors as rows (k, n), the share over all of them.  Zero for a site without shared
    scales.  A block with a NaN or Inf counts as saturated.
    """
    given: object = site
    if not isinstance(given, SiteFormat):
        raise TypeError(f"site must be a SiteFormat; got {given!r}")
    rounder = site.rounder()
    if not isinstance(rounder, Rounder) or not np.size(values):
        return 0.0
    own_rule = None if rounder.format.scale != "e8m0" else rounder.scale_rule
    v = np.atleast_1d(values)
    q = quantize(v, rounder.format, -1, rounder.block_size, own_rule)
    limit = rounder.format.element.largest * q.blocks.spread(q.scale_values(), q.shape)
    return float(np.mean(~(np.abs(v) <= limit)))


PROBE_GROUPS = ("all", *KINDS)
GAMMA_SITE = SiteFormat("mxfp8_e4m3")  # floor, blocks of 32


@dataclass(frozen=True)
class ProbePlan:
    """Which same-point comparisons a run makes, and when.

    Every ``every`` steps, before the update, each scheme's gradient is compared with the exact one
    at the run's parameters on the step's batch.  ``schemes`` are (label, scheme) pairs;
    ``gamma_site`` says by which format the saturation of gammas is counted, used or not.
    """

    every: int
    schemes: tuple[tuple[str, PrecisionScheme], ...]
    gamma_site: SiteFormat = GAMMA_SITE

    def __post_init__(self) -> None:
        every = as_integer("every", self.every, "an integer of at least 1")
        if every < 1:
            raise ValueError(f"every must be at least 1 step; got {every}")
        object.__setattr__(self, "every", every)
        pairs = tuple(self.schemes)
        for pair in pairs:
            fits = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
            if not (fits and isinstance(pair[1], PrecisionScheme)):
                raise TypeError(f"schemes must be (label, PrecisionScheme) pairs; got {pair!r}")
        labels = [label for label, _ in pairs]
        if len(set(labels)) < len(labels):
            raise ValueError(f"labels of schemes must differ; got {labels}")
        object.__setattr__(self, "schemes", pairs)


@dataclass(frozen=True)
class ProbeSeries:
    """What a run's probes saw, m of them; NaN where the run ended before.

    steps (m,); labels, one a scheme; zeta, cos, alpha, rho (m, schemes, groups) with groups in the
    order of PROBE_GROUPS; norm (m, groups) of the exact gradient; gamma_saturated (m, depth);
    gamma_mean (m, depth).
    """

    steps: Array
    labels: tuple[str, ...]
    zeta: Array
    cos: Array
    alpha: Array
    rho: Array
    norm: Array
    gamma_saturated: Array
    gamma_mean: Array


def blank_series(plan: ProbePlan, cfg: ProxyConfig) -> ProbeSeries:
    """The series of a run that has not begun: NaN everywhere."""
    m, groups = -(-cfg.steps // plan.every), len(PROBE_GROUPS)
    shape = (m, len(plan.schemes), groups)

    def blank(*size: int) -> Array:
        return np.full(size, np.nan)

    return ProbeSeries(
        steps=np.arange(m) * plan.every,
        labels=tuple(label for label, _ in plan.schemes),
        zeta=blank(*shape),
        cos=blank(*shape),
        alpha=blank(*shape),
        rho=blank(*shape),
        norm=blank(m, groups),
        gamma_saturated=blank(m, cfg.depth),
        gamma_mean=blank(m, cfg.depth),
    )


class Probe:
    """Runs a ProbePlan beside training, in buffers of its own, into ``series``."""

    def __init__(self, plan: ProbePlan, cfg: ProxyConfig, series: ProbeSeries) -> None:
        self.plan, self.cfg, self.series = plan, cfg, series
        self._workspace = workspace(cfg, cfg.batch, cfg.real)
        size = parameter_count(cfg)
        self._exact = parameter_views(np.empty(size, cfg.real), cfg)
        self._quantized = parameter_views(np.empty(size, cfg.real), cfg)
        self._wide = np.empty((2, size))  # both in float64, kind after kind

    def __call__(self, step: int, params: Params, x: Array, y: Array) -> None:
        """Record the probes of ``step`` if the plan has one there."""
        if step % self.plan.every:
            return
        i, series, cfg = step // self.plan.every, self.series, self.cfg
        nothing = precision_of(PrecisionScheme(), cfg.depth)
        loss_and_grads_into(params, x, y, cfg, nothing, self._workspace, self._exact)
        exact = _by_group(self._exact, self._wide[0])
        series.norm[i] = [_norm(g) for g in exact]
        for s, (_, scheme) in enumerate(self.plan.schemes):
            precision = precision_of(scheme, cfg.depth, cfg.seed, step)
            loss_and_grads_into(params, x, y, cfg, precision, self._workspace, self._quantized)
            for j, (g, q) in enumerate(
                zip(exact, _by_group(self._quantized, self._wide[1]), strict=True)
            ):
                bias = bias_of(g, q)
                series.zeta[i, s, j], series.cos[i, s, j] = bias.zeta, bias.cos
                series.alpha[i, s, j], series.rho[i, s, j] = bias.alpha, bias.rho
        for k, block in enumerate(params):
            gamma = block["ln_gamma"]
            series.gamma_saturated[i, k] = saturated_share(gamma, self.plan.gamma_site)
            series.gamma_mean[i, k] = gamma.mean(dtype=np.float64)


def _by_group(grads: Params, wide: Array) -> list[Array]:
    """The gradient in float64 in the order of PROBE_GROUPS: ``wide`` (size,) and its parts."""
    groups, start = [wide], 0
    for kind in KINDS:
        first = start
        for block in grads:
            stop = start + block[kind].size
            wide[start:stop] = block[kind].reshape(-1)
            start = stop
        groups.append(wide[first:start])
    return groups
