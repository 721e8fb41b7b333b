"""Same-point comparisons of gradients along a run on a device: bias.Probe by autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.backends.torch_proxy import loss_and_gradient
from mxsim.backends.torch_sites import Tensor, sites_of
from mxsim.bias import ProbePlan, ProbeSeries, bias_of, saturated_share
from mxsim.config import ProxyConfig
from mxsim.precision import PrecisionScheme
from mxsim.proxy import KINDS, parameter_views

Array = NDArray[Any]


def probe(
    plan: ProbePlan,
    series: ProbeSeries,
    step: int,
    flat: Tensor,
    x: Tensor,
    y: Tensor,
    cfg: ProxyConfig,
) -> None:
    """Record the probes of ``step``, which the plan has, into ``series``."""
    i = step // plan.every

    def groups(scheme: PrecisionScheme) -> list[Array]:
        """The scheme's gradient in float64, in the order of PROBE_GROUPS."""
        sites = sites_of(scheme, cfg.depth, cfg.seed, step)
        _, gradient = loss_and_gradient(flat, x, y, cfg, sites)
        blocks = parameter_views(gradient.double().cpu().numpy(), cfg)
        parts = [np.concatenate([b[kind].reshape(-1) for b in blocks]) for kind in KINDS]
        return [np.concatenate(parts), *parts]

    exact = groups(PrecisionScheme())
    series.norm[i] = [np.linalg.norm(g) for g in exact]
    for s, (_, scheme) in enumerate(plan.schemes):
        for j, (g, quantized) in enumerate(zip(exact, groups(scheme), strict=True)):
            bias = bias_of(g, quantized)
            series.zeta[i, s, j], series.cos[i, s, j] = bias.zeta, bias.cos
            series.alpha[i, s, j], series.rho[i, s, j] = bias.alpha, bias.rho
    for k, block in enumerate(parameter_views(flat.cpu().numpy(), cfg)):
        gamma = block["ln_gamma"]
        series.gamma_saturated[i, k] = saturated_share(gamma, plan.gamma_site)
        series.gamma_mean[i, k] = gamma.mean(dtype=np.float64)
