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
from mxsim.precision import PrecisionScheme, internal_rounding, precision_of
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

    def __call__(self, x: Array, buffers: TeacherBuffers | None = None) -> Array:
        """x (n, d) -> (n, d), in x's dtype; in ``buffers.y`` if they are given."""
        b = buffers or teacher_buffers(self, len(x), x.dtype)
        precision = replace(precision_of(self.scheme, 1)[0], ready=True)
        how = internal_rounding(self.scheme, x.dtype)
        for w1, w2 in self.layers:
            ops.linear_forward(x, w1, b.u, "fc1", precision, how, b.fc1)
            if self.scheme.forward.activation == "exact":
                ops.activation_forward(b.u, b.hidden, b.slope, self.activation)
            else:  # the library's own, in bf16 steps, also where the student's is left alone
                steps.activation_forward(
                    b.u, b.hidden, b.slope, b.gate, self.activation, how, how, how
                )
            ops.linear_forward(b.hidden, w2, b.y, "fc2", precision, how, b.fc2)
            x = b.y
        return b.y


@dataclass(frozen=True)
class TeacherBuffers:
    """Where a teacher works on n samples: u (n, rows), hidden, slope, gate; y (n, d) comes out."""

    u: Array
    hidden: Array
    slope: Array
    gate: Array
    y: Array
    fc1: ops.LinearScratch
    fc2: ops.LinearScratch


def teacher_buffers(teacher: Teacher, n: int, real: Any) -> TeacherBuffers:
    """Buffers for ``n`` samples in dtype ``real``."""
    w1, w2 = teacher.layers[0]
    u, hidden, y = (np.empty((n, rows), real) for rows in (len(w1), w2.shape[1], len(w2)))
    return TeacherBuffers(
        u=u,
        hidden=hidden,
        slope=np.empty_like(u),
        gate=np.empty_like(hidden),
        y=y,
        fc1=_scratch(np.empty((n, w1.shape[1]), real), w1),
        fc2=_scratch(hidden, w2),
    )


def _scratch(x: Array, w: Array) -> ops.LinearScratch:
    """For the forward pass alone."""
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


@dataclass(frozen=True)
class SampleBuffers:
    """Where a batch is drawn: x (n, width) in cfg.dtype, float32 draws, the teacher's work."""

    x: Array
    draw: Array
    noise: Array
    teacher: TeacherBuffers


def sample_buffers(cfg: ProxyConfig, samples: int, teacher: Teacher) -> SampleBuffers:
    """Buffers for ``samples`` rows."""
    draw = np.empty((samples, cfg.width), np.float32)
    x = draw if cfg.real == draw.dtype else np.empty(draw.shape, cfg.real)
    return SampleBuffers(x, draw, np.empty_like(draw), teacher_buffers(teacher, samples, cfg.real))


def _sample(
    rng: np.random.Generator, cfg: ProxyConfig, teacher: Teacher, b: SampleBuffers
) -> tuple[Array, Array]:
    """x ~ N(0, 1) and y = teacher(x) + label_noise * N(0, 1), both (samples, width), in ``b``."""
    rng.standard_normal(dtype=np.float32, out=b.draw)
    rng.standard_normal(dtype=np.float32, out=b.noise)
    np.multiply(b.noise, np.float32(cfg.label_noise), out=b.noise)
    if b.x is not b.draw:
        b.x[...] = b.draw
    y = teacher(b.x, b.teacher)
    y += b.noise
    return b.x, y


@dataclass(frozen=True)
class Batches:
    """The training data of a run: ``batches.at(step)`` is (x, y), each (batch, width)."""

    cfg: ProxyConfig
    teacher: Teacher
    dataset: tuple[Array, Array] | None

    def at(self, step: int) -> tuple[Array, Array]:
        """The batch of ``step``, in arrays of its own."""
        return self.fill(step, sample_buffers(self.cfg, self.cfg.batch, self.teacher))

    def fill(self, step: int, buffers: SampleBuffers) -> tuple[Array, Array]:
        """The batch of ``step``, in ``buffers`` (a full batch: the data set itself)."""
        cfg = self.cfg
        if self.dataset is None:
            return _sample(generator(cfg.seed, BATCH, step), cfg, self.teacher, buffers)
        x, y = self.dataset
        if len(x) == cfg.batch:
            return x, y
        epoch, position = divmod(step, len(x) // cfg.batch)
        order = generator(cfg.seed, ORDER, epoch).permutation(len(x))
        chosen = order[position * cfg.batch : (position + 1) * cfg.batch]
        np.take(x, chosen, axis=0, out=buffers.x, mode="clip")  # "raise" would copy
        np.take(y, chosen, axis=0, out=buffers.teacher.y, mode="clip")
        return buffers.x, buffers.teacher.y


def make_batches(cfg: ProxyConfig, teacher: Teacher) -> Batches:
    """Fresh batches, or a data set drawn once, as ``cfg.data`` says."""
    if cfg.data == "fresh":
        return Batches(cfg, teacher, None)
    rng = generator(cfg.seed, DATASET)
    buffers = sample_buffers(cfg, cfg.dataset_size or cfg.batch, teacher)
    return Batches(cfg, teacher, _sample(rng, cfg, teacher, buffers))


def held_out(cfg: ProxyConfig, teacher: Teacher) -> tuple[Array, Array]:
    """The evaluation set, (eval_samples, width) each: one of a seed, never trained on."""
    buffers = sample_buffers(cfg, cfg.eval_samples, teacher)
    return _sample(generator(cfg.seed, HELD_OUT), cfg, teacher, buffers)
