"""The loss that no student of an architecture can beat: label noise, and what its norm forgets.

Layer norm takes a sample's mean off before any weight sees it, so the mean's variance 1/d stays in
the residual stream and in the loss.  Losses of settings with different norms or widths are compared
relative to this floor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim import data
from mxsim.config import ProxyConfig

Array = NDArray[Any]

SAMPLES, DRAWS = 512, 32
PURPOSE = 2**16  # first word of the spawn key: far from data.py's


@dataclass(frozen=True)
class Floor:
    """The floor of the held-out mean squared error, and the standard error of its estimate."""

    loss: float
    standard_error: float
    n: int


def irreducible_loss(cfg: ProxyConfig) -> Floor:
    """Lower bound on the expected loss of any student with the norm and depth of ``cfg``.

    The student is x + F(what the norms let through), so it cannot follow y - x where that varies
    with what they do not: the sample's mean (``layer``, ``layer_no_affine``), at depth 1 also its
    scale (``layer``, ``rms``; from depth 2 on the stream itself carries the scale).  The bound is
    label_noise^2 + E Var(teacher(x) - x | what passes), the variance over DRAWS redrawn means and
    scales of each of SAMPLES inputs, averaged over entries.  With a near-zero teacher it is
    label_noise^2 + 1/d.  ``ln_eps`` lets a trace of the scale through at depth 1; not counted.
    """
    relevant = replace(cfg, lr=1.0, steps=1, batch=1, data="fresh", dataset_size=None)
    return _irreducible_loss(replace(relevant, optimizer="adam", weight_decay=0.0))


@lru_cache(maxsize=4096)
def _irreducible_loss(cfg: ProxyConfig) -> Floor:
    d, noise = cfg.width, cfg.label_noise**2
    forgets_mean = cfg.norm in ("layer", "layer_no_affine")
    forgets_scale = cfg.depth == 1 and cfg.norm != "none"
    if not (forgets_mean or forgets_scale):
        return Floor(noise, 0.0, SAMPLES)
    rng = np.random.Generator(
        np.random.PCG64DXSM(np.random.SeedSequence(cfg.seed, spawn_key=(PURPOSE,)))
    )
    x = np.repeat(rng.standard_normal((SAMPLES, d), np.float32), DRAWS, axis=0)
    other = rng.standard_normal(x.shape, np.float32)
    if forgets_mean:
        x += other.mean(axis=1, keepdims=True) - x.mean(axis=1, keepdims=True)
    if forgets_scale:  # of what the norm sees: the part about the mean, or all
        mean = x.mean(axis=1, keepdims=True) if forgets_mean else np.float32(0)
        theirs = other - other.mean(axis=1, keepdims=True) if forgets_mean else other
        ratio = np.linalg.norm(theirs, axis=1) / np.linalg.norm(x - mean, axis=1)
        x = mean + (x - mean) * ratio[:, None]
    x = x.astype(cfg.real)
    wanted = (data.make_teacher(cfg)(x) - x).reshape(SAMPLES, DRAWS, d)
    variance = wanted.var(axis=1, ddof=1, dtype=np.float64).mean(axis=1)
    error = float(variance.std(ddof=1) / np.sqrt(SAMPLES))
    return Floor(noise + float(variance.mean()), error, SAMPLES)
