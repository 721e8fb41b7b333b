"""The teacher's gain that gives its outputs unit variance, by init, depth and width.

With PyTorch's default init every linear map shrinks what passes it, so the script's teacher is near
zero (standard deviation 9e-4 with gelu at depth 4).  ``teacher_gain`` multiplies each layer's
second weight; wanted is the gain at which the outputs have mean square 1, in the median over
teachers of eight seeds.  The numbers are a table, not computed on the fly, so that no run's id can
change in the last digit with the machine; ``python -m studies.claims_teacher`` prints it again.

The teacher is gelu's whatever the student's activation, so that activations are compared on one
task.  Of swiglu, which squares its input layer by layer, no gain makes a usable teacher: calibrated
at depth 4, outputs of eight teachers have standard deviations from 0.02 to 0.8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from scipy.optimize import brentq

from mxsim import ProxyConfig, make_teacher

SEEDS, SAMPLES = 8, 256

# (init, depth, width) -> gain
UNIT_GAINS: Mapping[tuple[str, int, int], float] = {
    ("pytorch", 2, 64): 4.98,
    ("pytorch", 4, 64): 4.99,
    ("pytorch", 8, 64): 4.86,
    ("pytorch", 4, 32): 5.19,
    ("pytorch", 4, 128): 5.05,
    ("xavier", 4, 64): 6.91,
    ("pytorch", 1, 16): 5.02,
    ("pytorch", 2, 16): 4.97,
    ("pytorch", 3, 16): 4.89,
    ("pytorch", 2, 8): 5.16,
    ("pytorch", 2, 32): 5.07,
    ("xavier", 2, 16): 6.87,
    ("pytorch", 3, 512): 5.02,
    ("pytorch", 4, 512): 5.02,
    ("pytorch", 6, 512): 5.04,
    ("pytorch", 8, 512): 5.03,
    ("pytorch", 4, 256): 5.06,
    ("pytorch", 4, 384): 5.04,
    ("xavier", 4, 512): 6.91,
}


def output_power(cfg: ProxyConfig) -> float:
    """Mean square of the teacher's outputs over SAMPLES inputs, median over SEEDS teachers."""
    found = []
    for seed in range(SEEDS):
        x = np.random.default_rng(seed).standard_normal((SAMPLES, cfg.width), np.float32)
        y = make_teacher(replace(cfg, seed=seed))(x)
        found.append(float(np.mean(np.square(y, dtype=np.float64))))
    return float(np.median(found))


def unit_gain(init: str, depth: int, width: int) -> float:
    """The gain at which ``output_power`` is 1, to three digits."""
    cfg = ProxyConfig(width=width, init=init, depth=depth)

    def excess(log_gain: float) -> float:
        return float(np.log(output_power(replace(cfg, teacher_gain=float(np.exp(log_gain))))))

    return float(f"{np.exp(brentq(excess, np.log(2.0), np.log(20.0), xtol=1e-4)):.3g}")


def with_unit_teacher(cfg: ProxyConfig) -> ProxyConfig:
    """``cfg`` with a teacher of unit-variance outputs; KeyError if its size is not in the table."""
    gain = UNIT_GAINS[cfg.init, cfg.depth, cfg.width]
    teacher = None if cfg.activation == "gelu" else "gelu"
    return replace(cfg, teacher_gain=gain, teacher_activation=teacher)


if __name__ == "__main__":
    for key in UNIT_GAINS:
        print(f"    {key}: {unit_gain(*key):g},".replace("'", '"'))
