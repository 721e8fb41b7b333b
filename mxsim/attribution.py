"""Which site does it: each alone on, each alone off, and Shapley values of groups of sites.

At one point, on one batch.  eps of several sites together is not the sum of theirs alone (roundings
meet in one sum, and errors may cancel), so "alone on" and "alone off" differ; Shapley values divide
|eps|^2 / |g|^2 among groups without a remainder, each its mean share over all orders of joining.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mxsim.bias import Bias, bias_of
from mxsim.config import ProxyConfig
from mxsim.formats import choose
from mxsim.precision import EXACT, GEMM_SITES, SITES, PrecisionScheme, precision_of
from mxsim.proxy import (
    check_batch,
    check_params,
    loss_and_grads_into,
    parameter_count,
    parameter_views,
    workspace,
)
from mxsim.threads import one_blas_thread

Array = NDArray[Any]

GROUPS: Mapping[str, tuple[str, ...]] = {
    "fprop": tuple(s for s in GEMM_SITES if "fprop" in s),
    "dgrad": tuple(s for s in GEMM_SITES if "dgrad" in s),
    "wgrad": tuple(s for s in GEMM_SITES if "wgrad" in s),
    "ln_gamma": ("ln_gamma",),
    "ln_beta": ("ln_beta",),
}
"""The usual players: the three GEMMs, and layer norm's two vectors."""


@dataclass(frozen=True)
class Attribution:
    """Gradient errors of a scheme's sites, over all parameters.

    all: the whole scheme.  none: the scheme with every site exact (its internals alone).
    alone: site -> with that site only.  without: site -> with all but that site.
    """

    all: Bias
    none: Bias
    alone: Mapping[str, Bias]
    without: Mapping[str, Bias]


def with_sites(scheme: PrecisionScheme, on: Sequence[str]) -> PrecisionScheme:
    """``scheme`` with all sites exact but ``on``; overrides of the others go as well.

    Raises ValueError for an unknown site.
    """
    for site in on:
        choose("site", site, SITES)
    off: dict[str, Any] = {site: EXACT for site in SITES if site not in on}
    kept = tuple(each for each in scheme.overrides if each[1] in on)
    return replace(scheme, overrides=kept, **off)


def active_sites(scheme: PrecisionScheme) -> tuple[str, ...]:
    """The sites that are not exact, in some block."""
    overridden = {site for _, site, value in scheme.overrides if value != EXACT}
    return tuple(s for s in SITES if getattr(scheme, s) != EXACT or s in overridden)


class _Meter:
    """Gradients of many schemes at one point, in one set of buffers."""

    def __init__(
        self,
        params: Sequence[Mapping[str, ArrayLike]],
        x: ArrayLike,
        y: ArrayLike,
        cfg: ProxyConfig,
        step: int,
    ) -> None:
        self.cfg, self.step = cfg, step
        self.params = check_params(params, cfg)
        real = self.params[0]["w1"].dtype
        self.x, self.y = check_batch(x, y, cfg, real)
        self.ws = workspace(cfg, len(self.x), real)
        self.flat = np.empty(parameter_count(cfg), real)
        self.exact = self.gradient(PrecisionScheme()).copy()

    def gradient(self, scheme: PrecisionScheme) -> Array:
        grads = parameter_views(self.flat, self.cfg)
        precision = precision_of(scheme, self.cfg.depth, self.cfg.seed, self.step)
        with one_blas_thread():
            loss_and_grads_into(self.params, self.x, self.y, self.cfg, precision, self.ws, grads)
        return self.flat

    def bias(self, scheme: PrecisionScheme) -> Bias:
        return bias_of(self.exact, self.gradient(scheme))


def site_attribution(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
) -> Attribution:
    """Each site of ``scheme`` alone on and alone off, on the batch (x, y).

    Arguments and errors as for ``gradient_bias``.
    """
    precision_of(scheme, cfg.depth)  # refuses what is no scheme
    meter = _Meter(params, x, y, cfg, step)
    active = active_sites(scheme)
    return Attribution(
        all=meter.bias(scheme),
        none=meter.bias(with_sites(scheme, ())),
        alone={site: meter.bias(with_sites(scheme, (site,))) for site in active},
        without={
            site: meter.bias(with_sites(scheme, [s for s in active if s != site]))
            for site in active
        },
    )


def shapley_values(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    groups: Mapping[str, Sequence[str]] = GROUPS,
    step: int = 0,
) -> Mapping[str, float]:
    """Each group's share of zeta^2 = |eps|^2 / |g|^2, exactly: 2^k gradients for k groups.

    The shares sum to the scheme's zeta^2 minus that of the scheme without any group (its internals,
    sites in no group).  A share may be negative: a group whose error makes up for another's.
    Raises TypeError unless ``groups`` maps names to sequences of sites, ValueError for an unknown
    site, a site in two groups, or more than ten groups.
    """
    precision_of(scheme, cfg.depth)  # refuses what is no scheme
    if not isinstance(groups, Mapping) or any(isinstance(g, str) for g in groups.values()):
        raise TypeError(f"groups must map names to sequences of sites; got {groups!r}")
    if len(groups) > 10:
        raise ValueError(f"groups must be at most 10 (2^k gradients); got {len(groups)}")
    members = [site for sites in groups.values() for site in sites]
    for site in members:
        choose("site of a group", site, SITES)
    if len(set(members)) < len(members):
        raise ValueError(f"groups must not share a site; got {dict(groups)}")
    meter = _Meter(params, x, y, cfg, step)
    names = tuple(groups)
    rest = [site for site in active_sites(scheme) if site not in members]
    worth: dict[frozenset[str], float] = {}
    for size in range(len(names) + 1):
        for chosen in itertools.combinations(names, size):
            on = rest + [site for name in chosen for site in groups[name]]
            worth[frozenset(chosen)] = meter.bias(with_sites(scheme, on)).zeta ** 2
    n = len(names)
    shares = {}
    for name in names:
        others = [other for other in names if other != name]
        share = 0.0
        for size in range(n):
            weight = math.factorial(size) * math.factorial(n - size - 1) / math.factorial(n)
            for chosen in itertools.combinations(others, size):
                before = frozenset(chosen)
                share += weight * (worth[before | {name}] - worth[before])
        shares[name] = share
    return shares
