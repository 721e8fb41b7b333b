"""What a controller can watch in a run of the proxy: signals of a step, and same-point probes.

Cheap, every step: the share of gammas that E4M3 under ``floor`` would saturate, the cosine of
consecutive gradients, and ``progress``, the share of the run's steps that are done.  Every k steps,
at the step's own point and batch: zeta and cos of the run's gradient against the exact one, and, if
asked for, the margin to the edge: the scale 2 <g, u> / (u^T H u) by which the step that is about to
be taken could be stretched before a quadratic loss would rise (theory/descent.py); below 1 the step
is too long.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mxsim.bias import GAMMA_SITE, bias_of, saturated_share
from mxsim.gemm_cost import EXACT_GRADIENT, MARGIN
from mxsim.hessian import Hessian, hvp
from mxsim.precision import PrecisionScheme, precision_of
from mxsim.proxy import (
    loss_and_grads_into,
    parameter_count,
    parameter_views,
    workspace,
)
from mxsim.theory.descent import critical_scale
from mxsim.train import Training

Array = NDArray[np.float64]

SIGNALS = ("progress", "gamma_saturated", "cos_consecutive", "zeta", "cos", "margin")


class Meter:
    """Measures a run in progress: hand ``on_gradient`` to ``advance``, then ask for ``signals``.

    probe_every: steps between probes, None for none; margin: with the margin to the edge, too.
    ``previous`` is the last step's gradient (size,) and belongs to the state of a run.
    """

    def __init__(self, training: Training, probe_every: int | None, margin: bool = False) -> None:
        self.training, self.probe_every, self.margin = training, probe_every, margin
        cfg, size = training.config, training.flat.size
        self.previous = np.zeros(size, training.flat.dtype)
        self.cost = 0.0  # of all probes so far, in bf16 steps
        self._gammas = [block["ln_gamma"] for block in training.params]  # views
        self._workspace = None
        if probe_every and not margin:
            self._workspace = workspace(cfg, cfg.batch, cfg.real)
            self._exact = np.empty(parameter_count(cfg), cfg.real)
        self._seen: dict[str, float] = {}
        self._hessian: Hessian | None = None

    def on_gradient(self, step: int, gradient: Array) -> None:
        """Look at the gradient before the optimizer sees it, at the point where it was taken."""
        training = self.training
        before = float(np.linalg.norm(self.previous))
        now = float(np.linalg.norm(gradient))
        aligned = float(gradient @ self.previous) / before / now if before * now > 0 else math.nan
        self._seen = {
            "progress": (step + 1) / training.config.steps,
            "gamma_saturated": saturated_share(np.stack(self._gammas), GAMMA_SITE),
            "cos_consecutive": aligned,
        }
        if math.isnan(aligned) and math.isfinite(now):
            del self._seen["cos_consecutive"]  # nothing to compare with, as in the first step
        np.copyto(self.previous, gradient)
        if self.probe_every and step % self.probe_every == 0:
            bias = bias_of(self._exact_gradient(step), gradient)
            self._seen |= {"zeta": bias.zeta, "cos": bias.cos}
            if self._hessian is not None:
                self._before = training.flat.copy()

    def signals(self) -> dict[str, float]:
        """Those of the step just done, after it; the margin needs the step itself."""
        if self._hessian is not None:
            h, self._hessian = self._hessian, None
            self._seen["margin"] = critical_scale(h.gradient, self._before - self.training.flat, h)
        return self._seen

    def _exact_gradient(self, step: int) -> Array:
        """g at the run's parameters on the batch of ``step``."""
        training = self.training
        cfg = training.config
        x, y = training.batch_at(step)
        self.cost += EXACT_GRADIENT
        if self.margin:
            self.cost += MARGIN
            self._hessian = hvp(training.params, x, y, cfg)
            return self._hessian.gradient
        assert self._workspace is not None
        exact = precision_of(PrecisionScheme(), cfg.depth)
        views = parameter_views(self._exact, cfg)
        loss_and_grads_into(training.params, x, y, cfg, exact, self._workspace, views)
        return self._exact
