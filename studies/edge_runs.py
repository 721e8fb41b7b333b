"""One full training run measured at the edge of stability: the task of studies/quantized_edge.py.

At the parameters before a measured step: the exact loss's (preconditioned) sharpness on the whole
data set, and the inner products of the gradient that the optimizer is handed, g~ (quantized, of a
mini-batch, or with synthetic noise), with the exact full-batch gradient g at the same point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim import ProxyConfig, loss_and_grads, make_batches, make_teacher, start
from mxsim.curvature import Hessian, adam_preconditioner, hvp, top_eigenvalue
from mxsim.data import Batches
from mxsim.precision import PrecisionScheme
from mxsim.proxy import KINDS, Params, parameter_views
from mxsim.store import Record, provenance, result_id
from mxsim.theory.descent import critical_scale
from mxsim.threads import one_blas_thread
from mxsim.train import Training

Array = NDArray[Any]

# What is recorded at each measurement, (m,).  v: unit top eigenvector of P^-1 H; products with P:
# in the metric P^-1 that Adam descends in (P = 1 for SGD).
MEASURED = (
    "sharpness",
    "converged",
    "loss",
    "gg",  # <g, g>
    "qg",  # <g~, g>
    "qq",  # <g~, g~>
    "gg_p",  # <g, P^-1 g>
    "qg_p",  # <g~, P^-1 g>
    "qq_p",  # <g~, P^-1 g~>
    "vg",  # <v, g>
    "vq",  # <v, g~>
    "answer",  # <v, g~(+h) - g~(-h)>, h along v from the valley's floor: the run's own swing there
    "answer_exact",  # the same of g
    "scale",  # 2 <g, -u> / (u^T H u) of the step u that follows: above 1, a quadratic would fall
    "change",  # what the exact loss does in that step
    "drift",  # -<g, grad S> off v: progressive sharpening, gradient descent only
    "strength",  # |grad S|^2 off v: self-stabilization, gradient descent only
)
BURST = ("vg", "vq")  # also at every one of the last steps, along the v measured last
THIRD = 1e-3  # step of the second difference of gradients, relative to |theta|


@dataclass(frozen=True)
class GradientNoise:
    """Synthetic multiplicative noise on the gradient: (1 + z) g, z iid N(mu, s2) over steps.

    kind: ``common``, one z for all parameters; ``each``, one z a parameter.
    """

    kind: str
    mu: float
    s2: float

    def __call__(self, seed: int) -> Callable[[int, Array], None]:
        """The change in place of the gradient at a step, a function of (seed, step)."""

        def change(step: int, gradient: Array) -> None:
            rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(2**17, step)))
            size = None if self.kind == "common" else gradient.size
            gradient *= 1 + rng.normal(self.mu, np.sqrt(self.s2), size)

        return change


@dataclass(frozen=True)
class EdgeRun:
    """A run to measure: before every ``every``-th step, and along v at the last ``burst`` steps.

    In the first half only every fifth of these is measured.
    """

    config: ProxyConfig
    scheme: PrecisionScheme
    noise: GradientNoise | None = None
    every: int = 11  # odd, since at the edge iterates alternate sides
    burst: int = 150
    study: str = "quantized_edge displaced"

    @cached_property
    def id(self) -> str:
        return result_id(self)

    @property
    def words(self) -> str:
        return f"{self.config.optimizer}, lr {self.config.lr:g}, seed {self.config.seed}"

    def settings(self) -> dict[str, Any]:
        """What determines the run, as plain JSON data."""
        return {
            "config": asdict(self.config),
            "scheme": asdict(self.scheme),
            "noise": None if self.noise is None else asdict(self.noise),
            "every": self.every,
            "burst": self.burst,
        }

    def run(self) -> Record:
        """Arrays: ``steps`` and each of MEASURED, (m,); burst_vg, burst_vq (burst,); losses.

        NaN from a NaN or Inf on.
        """
        with one_blas_thread():
            return self._run()

    def _run(self) -> Record:
        cfg = self.config
        training = start(cfg, self.scheme)
        batches = make_batches(cfg, make_teacher(cfg))
        x, y = whole_data(batches)
        noise = self.noise(cfg.seed) if self.noise else None
        steps = np.arange(self.every, cfg.steps, self.every)
        steps = steps[(steps >= cfg.steps / 2) | (steps // self.every % 5 == 0)]
        rows = {int(step): row for row, step in enumerate(steps)}
        arrays = {name: np.full(len(steps), np.nan) for name in MEASURED}
        bursts = {f"burst_{name}": np.full(self.burst, np.nan) for name in BURST}
        vector: Array | None = None
        contiguous = cfg.steps - self.burst  # from here on every step is looked at
        while not training.ended:
            at = training.step
            row = rows.get(at)
            if row is None and (at < contiguous or vector is None):
                stop = (at // self.every + 1) * self.every
                training.advance(stop - at, on_gradient=noise)
                continue
            hessian = hvp(training.params, x, y, cfg)
            p = preconditioner(training)
            if row is not None:
                found = top_eigenvalue(hessian, hessian.size, preconditioner=p, start=vector)
                if np.isfinite(found.largest_algebraic):
                    vector = found.eigenvector
                arrays["sharpness"][row] = found.largest_algebraic
                arrays["converged"][row] = found.converged
                arrays["loss"][row] = hessian.loss
                if cfg.optimizer == "sgd" and vector is not None:
                    self._third_order(training, x, y, hessian, vector, arrays, row)
                if at >= cfg.steps / 2 and vector is not None:
                    arrays["vg"][row] = vector @ hessian.gradient
                    swing = float(np.sqrt(np.nanmean(arrays["vg"][steps >= cfg.steps / 2] ** 2)))
                    batch = batches.at(at)
                    arrays["answer"][row], arrays["answer_exact"][row] = self._answers(
                        training, (x, y), batch, hessian, vector, swing
                    )
            before = training.flat.astype(np.float64)
            training.advance(1, on_gradient=noise)
            if training.bad_step is not None:
                break
            g, q = hessian.gradient, training.last_gradient.astype(np.float64)
            if row is not None:
                for a, b, name in ((g, g, "gg"), (q, g, "qg"), (q, q, "qq")):
                    arrays[name][row] = a @ b
                    arrays[f"{name}_p"][row] = a @ (b / p)
                u = training.flat - before
                arrays["scale"][row] = critical_scale(g, -u, hessian)
                arrays["change"][row] = hvp(training.params, x, y, cfg).loss - hessian.loss
            if vector is not None:
                along = {"vg": vector @ g, "vq": vector @ q}
                for name, value in along.items():
                    if row is not None:
                        arrays[name][row] = value
                    if at >= contiguous:
                        bursts[f"burst_{name}"][at - contiguous] = value
        arrays |= bursts | {"steps": steps, "losses": training.losses}
        status = "ok" if training.bad_step is None else "nonfinite"
        return Record(
            self.id,
            arrays,
            {**self.settings(), "versions": dict(provenance()), "status": status}
            | {"bad_step": training.bad_step, "seconds": training.seconds},
        )

    def _answers(
        self,
        training: Training,
        whole: tuple[Array, Array],
        batch: tuple[Array, Array],
        hessian: Hessian,
        v: Array,
        swing: float,
    ) -> tuple[float, float]:
        """How <v, g~> and <v, g> answer to a displacement of the parameters along v.

        The displacement is made here, on both sides of the valley's floor along v, by ``swing``
        (of <v, g>): no product of the run's own steps enters, which would only say how it moved.
        """
        cfg = self.config
        bend = float(v @ hessian(v))  # of <v, g> for a unit displacement
        floor = training.flat - (v @ hessian.gradient) / bend * v
        sides = [floor + sign * swing / bend * v for sign in (1, -1)]
        noisy: list[Any] = []
        exact: list[Any] = []
        for side in sides:
            tree = parameter_views(np.ascontiguousarray(side, np.float64), cfg)
            for found, data, scheme in (
                (noisy, batch, self.scheme),
                (exact, whole, PrecisionScheme()),
            ):
                found.append(v @ flat_gradient(tree, data, cfg, scheme, training.step))
        gain = 1 + self.noise.mu if self.noise else 1.0
        return gain * float(noisy[0] - noisy[1]), float(exact[0] - exact[1])

    def _third_order(
        self,
        training: Training,
        x: Array,
        y: Array,
        hessian: Hessian,
        v: Array,
        arrays: dict[str, Array],
        row: int,
    ) -> None:
        """grad S = grad (v^T H v), from the second difference of gradients along the unit v."""
        flat = training.flat.astype(np.float64)
        h = THIRD * float(np.linalg.norm(flat))
        ahead, behind = (
            hvp(parameter_views(flat + sign * h * v, self.config), x, y, self.config).gradient
            for sign in (1, -1)
        )
        slope = (ahead - 2 * hessian.gradient + behind) / h**2
        off = slope - v * (v @ slope)
        arrays["drift"][row] = -(hessian.gradient @ off)
        arrays["strength"][row] = off @ off


def whole_data(batches: Batches) -> tuple[Array, Array]:
    """The fixed data set (n, width) each, whatever the batch."""
    if batches.dataset is None:
        raise ValueError(f"data must be 'fixed' to measure at the edge; got {batches.cfg.data!r}")
    return batches.dataset


def flat_gradient(
    params: Params,
    batch: tuple[Array, Array],
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
) -> Array:
    """The gradient under a scheme as one float64 vector (size,)."""
    _, grads = loss_and_grads(params, *batch, cfg, scheme, step=step)
    return np.concatenate([b[k].ravel() for b in grads for k in KINDS]).astype(np.float64)


def preconditioner(training: Training) -> Array:
    """P (size,): Adam's, ones for SGD and before the first update."""
    if training.config.optimizer == "sgd" or training.optimizer.updates < 1:
        return np.ones(training.flat.size)
    return adam_preconditioner(training.optimizer, training.config)
