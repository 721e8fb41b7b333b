"""Everything random about a run: initial weights, teacher, batches, held-out set.

Each draw is a pure function of (seed, purpose, step): no generator is carried along, so a run can
start anywhere, and schemes compared at one seed see the same numbers.  Numbers are drawn in
float32 whatever the run's dtype, so a float64 run is the twin of a float32 one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim import ops, steps
from mxsim.config import ProxyConfig
from mxsim.precision import BlockPrecision, PrecisionScheme, internal_rounding, precision_of
from mxsim.proxy import Params, parameter_count, parameter_views

Array = NDArray[Any]

# Purposes, the first word of a spawn key.  Their numbers are part of every stored result.
STUDENT, TEACHER, BATCH, HELD_OUT, DATASET, ORDER, GAMMA = range(7)


def generator(seed: int, purpose: int, *key: int) -> np.random.Generator:
    """The generator of (seed, purpose, key); independent of all others and of call order."""
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(purpose, *key))
    return np.random.Generator(np.random.PCG64DXSM(sequence))


def _weight(rng: np.random.Generator, shape: tuple[int, int], init: str) -> Array:
    """A weight (out, in) by the named init: PyTorch's Linear default, or Xavier normal gain 0.5."""
    fan_out, fan_in = shape
    if init == "pytorch":
        return _uniform(rng, shape, fan_in)
    std = np.float32(0.5 * np.sqrt(2.0 / (fan_in + fan_out)))
    return np.asarray(rng.standard_normal(shape, dtype=np.float32) * std)


def _uniform(rng: np.random.Generator, shape: tuple[int, ...], fan_in: int) -> Array:
    bound = np.float32(1.0 / np.sqrt(fan_in))
    return np.asarray((2 * rng.random(shape, dtype=np.float32) - 1) * bound)


def init_params(cfg: ProxyConfig) -> Params:
    """The student's initial parameters in cfg.dtype: gamma 1, beta 0, weights by ``cfg.init``.

    Views into one flat vector (mxsim.proxy.parameter_views).
    """
    params = parameter_views(np.empty(parameter_count(cfg), cfg.real), cfg)
    for k, block in enumerate(params):
        rng = generator(cfg.seed, STUDENT, k)
        block["ln_gamma"][...] = cfg.gamma_mean
        if cfg.gamma_sd:  # a stream of its own: the other weights do not depend on it
            spread = generator(cfg.seed, GAMMA, k).standard_normal(cfg.width, dtype=np.float32)
            block["ln_gamma"] += np.float32(cfg.gamma_sd) * spread
        block["ln_beta"][...] = 0
        for kind in ("w1", "w2"):
            block[kind][...] = _weight(rng, block[kind].shape, cfg.init)
        bias = _uniform(rng, block["b2"].shape, cfg.hidden)  # drawn always: one stream for both
        block["b2"][...] = bias if cfg.init == "pytorch" else 0
    return params


@dataclass(frozen=True)
class Teacher:
    """The frozen target map: layers of (w1, w2), y = w2 phi(w1 x), no bias, norm or residual.

    ``scheme``: forward arithmetic of the linear maps and the activation; exact but for the fault
    ``quantized_teacher``, under which the weights here are rounded already.
    """

    layers: tuple[tuple[Array, Array], ...]
    activation: str
    scheme: PrecisionScheme = PrecisionScheme()  # noqa: RUF009  (frozen)

    def __call__(self, x: Array) -> Array:
        """x (n, d) -> (n, d), in x's dtype."""
        precision = replace(precision_of(self.scheme, 1)[0], ready=True)
        how = internal_rounding(self.scheme, x.dtype)
        for w1, w2 in self.layers:
            u = _linear(x, w1, "fc1", precision, how)
            hidden, slope = np.empty((len(x), w2.shape[1]), x.dtype), np.empty_like(u)
            if self.scheme.forward.activation == "exact":
                ops.activation_forward(u, hidden, slope, self.activation)
            else:  # the library's own, in bf16 steps, also where the student's is left alone
                gate = np.empty_like(hidden)
                steps.activation_forward(u, hidden, slope, gate, self.activation, how, how, how)
            x = _linear(hidden, w2, "fc2", precision, how)
        return x


def _linear(x: Array, w: Array, layer: str, precision: BlockPrecision, how: ops.Rounding) -> Array:
    """x (n, i), w (o, i) -> (n, o)."""
    y = np.empty((len(x), len(w)), x.dtype)
    ops.linear_forward(x, w, y, layer, precision, how, _scratch(x, w))
    return y


def _scratch(x: Array, w: Array) -> ops.LinearScratch:
    nothing = np.empty((0, 0), x.dtype)
    return ops.LinearScratch(
        x=np.empty_like(x),
        w=np.empty_like(w),
        dy=nothing,
        x_in=np.empty_like(x),
        w_in=np.empty_like(w),
        dy_in=nothing,
    )


def make_teacher(cfg: ProxyConfig, scheme: PrecisionScheme | None = None) -> Teacher:
    """The teacher of ``cfg`` in cfg.dtype; each layer's second weight carries ``teacher_gain``.

    Under a ``scheme`` with quantized_teacher its arithmetic is the scheme's; overrides by block
    index are the student's.
    """
    activation = cfg.teacher_activation or cfg.activation
    width = cfg.teacher_width or cfg.width
    hidden = round(2 * width / 3) if activation == "swiglu" else width
    rows = 2 * hidden if activation == "swiglu" else hidden
    layers = []
    for k in range(cfg.teacher_depth or cfg.depth):
        rng = generator(cfg.seed, TEACHER, k)
        w1 = _weight(rng, (rows, cfg.width), cfg.init)
        w2 = _weight(rng, (cfg.width, hidden), cfg.init) * np.float32(cfg.teacher_gain)
        layers.append((w1.astype(cfg.real), w2.astype(cfg.real)))
    if scheme is None or not scheme.quantized_teacher:
        return Teacher(tuple(layers), activation)
    own = replace(scheme, overrides=())
    rounded = [(_rounded(w1, "fc1", own), _rounded(w2, "fc2", own)) for w1, w2 in layers]
    return Teacher(tuple(rounded), activation, own)


def _rounded(w: Array, layer: str, scheme: PrecisionScheme) -> Array:
    """w (o, i) as the teacher's forward GEMM sees it."""
    how = internal_rounding(scheme, w.dtype)
    scratch = _scratch(np.empty((0, w.shape[1]), w.dtype), w)
    return ops.forward_weight(w, layer, precision_of(scheme, 1)[0], how, scratch).copy()


def _sample(
    rng: np.random.Generator, samples: int, cfg: ProxyConfig, teacher: Teacher
) -> tuple[Array, Array]:
    """x ~ N(0, 1) and y = teacher(x) + label_noise * N(0, 1), both (samples, width)."""
    x = rng.standard_normal((samples, cfg.width), dtype=np.float32)
    noise = rng.standard_normal((samples, cfg.width), dtype=np.float32)
    noise *= np.float32(cfg.label_noise)
    x = x.astype(cfg.real, copy=False)
    y = teacher(x)
    y += noise
    return x, y


@dataclass(frozen=True)
class Batches:
    """The training data of a run: ``batches.at(step)`` is (x, y), each (batch, width)."""

    cfg: ProxyConfig
    teacher: Teacher
    dataset: tuple[Array, Array] | None

    def at(self, step: int) -> tuple[Array, Array]:
        cfg = self.cfg
        if self.dataset is None:
            return _sample(generator(cfg.seed, BATCH, step), cfg.batch, cfg, self.teacher)
        x, y = self.dataset
        if len(x) == cfg.batch:
            return x, y
        epoch, position = divmod(step, len(x) // cfg.batch)
        order = generator(cfg.seed, ORDER, epoch).permutation(len(x))
        chosen = order[position * cfg.batch : (position + 1) * cfg.batch]
        return x[chosen], y[chosen]


def make_batches(cfg: ProxyConfig, teacher: Teacher) -> Batches:
    """Fresh batches, or a data set drawn once, as ``cfg.data`` says."""
    if cfg.data == "fresh":
        return Batches(cfg, teacher, None)
    rng = generator(cfg.seed, DATASET)
    return Batches(cfg, teacher, _sample(rng, cfg.dataset_size or cfg.batch, cfg, teacher))


def held_out(cfg: ProxyConfig, teacher: Teacher) -> tuple[Array, Array]:
    """The evaluation set, (eval_samples, width) each: one of a seed, never trained on."""
    return _sample(generator(cfg.seed, HELD_OUT), cfg.eval_samples, cfg, teacher)
