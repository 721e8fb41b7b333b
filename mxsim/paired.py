"""Several schemes side by side, from the same weights on the same data.

Each scheme trains its own copy; at every step the distances to the first one (the reference) are
recorded.  Among them is the paper's own zeta, between gradients of separately evolved models: it
holds the distance of the weights as well as the bias, unlike the same-point instruments of bias.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mxsim.bias import bias_of
from mxsim.config import ProxyConfig
from mxsim.layout import as_integer
from mxsim.precision import PrecisionScheme
from mxsim.threads import one_blas_thread
from mxsim.train import Training, start, uninterrupted

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Distances:
    """Every scheme against the first, step by step, before the update: (steps done, schemes).

    The first column is the reference itself.  NaN from where either has stopped for a NaN or Inf.

    - loss: each scheme's own loss; loss_gap: minus the reference's.
    - weights: |w - w_ref| / |w_ref| over all parameters.
    - gradient: |g - g_ref| / |g_ref|, each at its own weights, as the optimizer got them (after
      ``grad_clip``); its square is what the script of Su et al. logs as zeta.
    - gradient_cos: <g, g_ref> / (|g| |g_ref|).
    - moved: |w - w_start| / |w_start|, for scale.
    """

    labels: tuple[str, ...]
    loss: Floats
    loss_gap: Floats
    weights: Floats
    gradient: Floats
    gradient_cos: Floats
    moved: Floats


class PairedRun:
    """Schemes trained in lockstep from one start (see the module).

    schemes: label -> scheme, the first is the reference.  Under a quantized teacher or bf16 master
    weights, targets or the start itself are that scheme's own.
    Raises TypeError or ValueError for no schemes, or anything that is not a scheme.
    """

    def __init__(self, cfg: ProxyConfig, schemes: Mapping[str, PrecisionScheme]) -> None:
        if not isinstance(schemes, Mapping):
            raise TypeError(f"schemes must map labels to PrecisionSchemes; got {schemes!r}")
        if not schemes:
            raise ValueError("schemes must name at least one scheme; got none")
        self.config = cfg
        for label in schemes:
            if not isinstance(label, str):
                raise TypeError(f"labels of schemes must be strings; got {label!r}")
        self.trainings: dict[str, Training] = {
            label: start(cfg, scheme) for label, scheme in schemes.items()
        }
        self._start = {label: t.flat.astype(np.float64) for label, t in self.trainings.items()}
        self._rows: list[Floats] = []

    @property
    def step(self) -> int:
        """Steps done."""
        return len(self._rows)

    def advance(self, steps: int | None = None) -> PairedRun:
        """Do ``steps`` more, by default all that are left.  Returns self.

        A scheme that meets a NaN or Inf stops there; the others go on.  ValueError for a negative
        number.
        """
        count = self.config.steps if steps is None else as_integer("steps", steps, "an integer")
        if count < 0:
            raise ValueError(f"steps must be at least 0; got {count}")
        with one_blas_thread():  # the distances, too: same bits, and no threads that spin
            for _ in range(min(count, self.config.steps - self.step)):
                with uninterrupted():  # Ctrl-C must not leave some a step ahead of the others
                    self._rows.append(self._measured_step())
        return self

    def _measured_step(self) -> Floats:
        """One step of each scheme; its row (schemes, quantities) of what held before the update."""
        trainings, origins = list(self.trainings.values()), list(self._start.values())
        before = [t.flat.astype(np.float64) for t in trainings]
        row = np.full((len(trainings), 5), np.nan)
        gradients: list[Floats | None] = []
        for k, training in enumerate(trainings):
            if training.ended:
                gradients.append(None)
                continue
            training.advance(1)
            row[k, 0] = training.losses[self.step]
            gradients.append(training.last_gradient.astype(np.float64))
            row[k, 4] = _distance(before[k], origins[k])
        reference = gradients[0]
        for k, gradient in enumerate(gradients):
            if gradient is not None and reference is not None:
                bias = bias_of(reference, gradient)
                row[k, 1] = _distance(before[k], before[0])
                row[k, 2], row[k, 3] = bias.zeta, bias.cos
        return row

    def distances(self) -> Distances:
        """What has been recorded so far."""
        rows = np.array(self._rows).reshape(self.step, len(self.trainings), 5)
        loss = rows[:, :, 0]
        return Distances(
            labels=tuple(self.trainings),
            loss=loss,
            loss_gap=loss - loss[:, :1],
            weights=rows[:, :, 1],
            gradient=rows[:, :, 2],
            gradient_cos=rows[:, :, 3],
            moved=rows[:, :, 4],
        )


def _distance(a: Floats, b: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):  # weights on their way to Inf
        norm = float(np.linalg.norm(b))
        return float(np.linalg.norm(a - b)) / norm if norm > 0 else float("nan")


@dataclass(frozen=True)
class TrajectoryDivergence:
    """The paper's own comparison: gradients of two models trained apart from one start.

    zeta (steps,): |g~ - g| / |g| at different weights; squared: its square, which the released
    script logs under the name of zeta; cos; weights: |w~ - w| / |w|.  NaN from a NaN or Inf on.
    """

    zeta: Floats
    squared: Floats
    cos: Floats
    weights: Floats


def trajectory_divergence(cfg: ProxyConfig, scheme: PrecisionScheme) -> TrajectoryDivergence:
    """Train the exact model and ``scheme``'s side by side for cfg.steps and compare them.

    Unlike the same-point instruments, this holds the distance of the weights as well as the bias.
    """
    found = PairedRun(cfg, {"exact": PrecisionScheme(), "scheme": scheme}).advance().distances()
    zeta = found.gradient[:, 1]
    return TrajectoryDivergence(zeta, zeta**2, found.gradient_cos[:, 1], found.weights[:, 1])
