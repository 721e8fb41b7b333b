"""A pair of runs in lockstep, watched: the task of studies/claims.py for its claims 5 and 6.

Exact and MX, from one start on the same batches.  Every step: the distance between the two, by
which the paper's script judges (gradients at different weights, its zeta the squared ratio).
Every ``every`` steps: the share of each MX run's tensors that saturates, and the same at the exact
run's weights (what would saturate).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim import PairedRun, ProxyConfig, make_batches, make_teacher
from mxsim.mechanism import clamp_statistics
from mxsim.outcome import DivergenceRule
from mxsim.precision import PrecisionScheme, SiteFormat
from mxsim.store import Record, provenance, result_id
from mxsim.train import Training

Array = NDArray[Any]
ARMS = ("exact", "mx")
E4M3 = SiteFormat("mxfp8_e4m3")
TENSORS = {  # what is watched, and the site that quantizes it
    "ln_output": "fc1_fprop_x",
    "hidden": "fc2_fprop_x",
    "w1": "fc1_fprop_w",
    "w2": "fc2_fprop_w",
    "ln_gamma": "ln_gamma",
}


@dataclass(frozen=True)
class Watch:
    """A task of sweep.py; see the module.

    Arrays: ``losses`` (steps, 2), exact and MX; ``zeta``, ``zeta_script`` (its square), ``cos``,
    ``weights`` (steps,): MX against exact, step by step; ``watch_steps`` (m,); ``saturated_<t>``
    (m, 2, depth) for each t of TENSORS: share of elements saturated, in exact and MX weights.
    Gammas are counted as in E4M3 blocks also where the scheme keeps them out of blocks.
    NaN from where a run has stopped.
    """

    config: ProxyConfig
    scheme: PrecisionScheme
    rule: DivergenceRule
    every: int

    @cached_property
    def id(self) -> str:
        return result_id(self)

    @property
    def words(self) -> str:
        return f"watched, lr {self.config.lr:g}, seed {self.config.seed}"

    def settings(self) -> dict[str, Any]:
        """What determines it, as plain JSON data."""
        return {
            "config": asdict(self.config),
            "scheme": asdict(self.scheme),
            "rule": asdict(self.rule),
            "every": self.every,
        }

    def run(self) -> Record:
        """Train both and watch."""
        cfg = self.config
        pair = PairedRun(cfg, {"exact": PrecisionScheme(), "mx": self.scheme})
        for training in pair.trainings.values():
            training.rule = self.rule
        steps = np.arange(0, cfg.steps, self.every)
        saturated = {name: np.full((len(steps), 2, cfg.depth), np.nan) for name in TENSORS}
        batches = make_batches(cfg, make_teacher(cfg, self.scheme))
        with np.errstate(all="ignore"):
            for i, step in enumerate(steps):
                x, y = batches.at(int(step))
                for j, arm in enumerate(ARMS):
                    if not pair.trainings[arm].ended:
                        for name, share in self._shares(pair.trainings[arm], x, y).items():
                            saturated[name][i, j] = share
                pair.advance(self.every)
        distances = pair.distances()
        zeta = distances.gradient[:, 1]
        with np.errstate(over="ignore"):
            arrays = {
                "losses": distances.loss,
                "zeta": zeta,
                "zeta_script": zeta**2,
                "cos": distances.gradient_cos[:, 1],
                "weights": distances.weights[:, 1],
                **{f"saturated_{name}": share for name, share in saturated.items()},
            }
            arrays = {name: np.asarray(a, np.float32) for name, a in arrays.items()}
        runs = {arm: training.finish() for arm, training in pair.trainings.items()}
        meta = {
            **self.settings(),
            "versions": dict(provenance()),
            **asdict(runs["mx"].outcome),
            "exact": asdict(runs["exact"].outcome),
            "eval_loss": runs["mx"].eval_loss,
            "seconds": sum(run.seconds for run in runs.values()),
        }
        return Record(self.id, {**arrays, "watch_steps": steps}, meta)

    def _shares(self, training: Training, x: Array, y: Array) -> Mapping[str, Array]:
        """Share of each tensor's elements saturated, (depth,), at the weights of a run."""
        counted = replace(self.scheme, ln_gamma=E4M3)
        found = clamp_statistics(training.params, x, y, self.config, counted, training.step)
        depth = range(self.config.depth)
        return {
            name: np.array([found[site, k].saturated if (site, k) in found else 0.0 for k in depth])
            for name, site in TENSORS.items()
        }
