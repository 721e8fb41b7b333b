"""ProxyConfig: every setting of the proxy problem that is not precision.

Frozen and validated at construction; its canonical form is hashed into the id of every stored
result (store.py), so a field added later must default to what was done before it existed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mxsim.formats import choose
from mxsim.layout import as_integer

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "swiglu", "linear")
NORMS = ("layer", "layer_no_affine", "rms", "none")
INITS = ("pytorch", "xavier")
DATA_KINDS = ("fresh", "fixed")
OPTIMIZERS = ("adam", "adamw", "sgd")
SCHEDULES = ("constant", "cosine", "step")
DTYPES = ("float32", "float64")

CHOICES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "activation": ACTIVATIONS,
        "norm": NORMS,
        "init": INITS,
        "data": DATA_KINDS,
        "optimizer": OPTIMIZERS,
        "schedule": SCHEDULES,
        "dtype": DTYPES,
    }
)
"""The names that a field of ProxyConfig may have, by field."""


@dataclass(frozen=True)
class ProxyConfig:
    """The student-teacher proxy of Su et al. (2025, arXiv:2506.20752), as their script has it.

    Student: x_{k+1} = x_k + w2 phi(w1 LN(x_k)) + b2, ``depth`` blocks of ``width``.
    Teacher: ``teacher_depth`` times [linear, phi, linear] without bias, layer norm or residual,
    hidden width ``teacher_width``, frozen; y = teacher(x) + label_noise * N(0, 1), x ~ N(0, 1).
    Defaults of None mean: as the student.

    - ``activation``: ``gelu`` (erf), ``gelu_tanh`` (tanh form), ``relu``, ``swiglu``, ``linear``.
    - ``norm``: ``layer``; ``layer_no_affine``, gamma and beta unused; ``rms``, no mean taken off,
      beta unused; ``none``, z = x.  Unused parameters stay in the tree, with zero gradients.
    - ``gamma_mean``, ``gamma_sd``: initial gammas ~ N(mean, sd), on or off the clamp cliff.
    - ``init``: ``pytorch`` U(-1/sqrt(fan_in), 1/sqrt(fan_in)), biases too; ``xavier`` normal with
      gain 0.5, zero biases.  Teacher: the same distribution, times ``teacher_gain`` a layer.
    - ``data``: ``fresh`` a new batch each step; ``fixed`` one data set of ``dataset_size`` samples,
      in full batch (``dataset_size`` is then None or equal to ``batch``) or cut into mini-batches
      in an order drawn anew each epoch.
    - ``optimizer``: ``adam`` (beta1, beta2, adam_eps), ``adamw`` (decoupled ``weight_decay``, on
      all parameters) or ``sgd`` (momentum), PyTorch's formulas.
    - ``schedule``: ``constant``; ``cosine`` from lr to lr_min over ``steps``; ``step``, times
      ``decay_factor`` every ``decay_every`` steps.  ``warmup`` steps first raise the rate linearly
      from lr / warmup; the schedule's own clock starts after them.
    - ``grad_clip``: largest global norm of the gradient, scaled down above it (PyTorch's formula).
    - ``eval_samples``: size of the held-out set.
    - ``seed``: fixes initial weights, teacher and data, whatever the precision scheme: runs of one
      seed are paired.

    Raises ValueError or TypeError naming the field, its value and what is allowed.
    """

    width: int = 64
    depth: int = 4
    batch: int = 256
    lr: float = 1e-2
    steps: int = 1000
    seed: int = 0
    activation: str = "gelu"
    init: str = "pytorch"
    ln_eps: float = 1e-5
    teacher_width: int | None = None
    teacher_depth: int | None = None
    teacher_activation: str | None = None
    teacher_gain: float = 1.0
    label_noise: float = 5e-3
    data: str = "fresh"
    dataset_size: int | None = None
    optimizer: str = "adam"
    beta1: float = 0.9
    beta2: float = 0.999
    adam_eps: float = 1e-8
    momentum: float = 0.0
    schedule: str = "constant"
    lr_min: float = 0.0
    eval_samples: int = 32768
    dtype: str = "float32"
    norm: str = "layer"
    gamma_mean: float = 1.0
    gamma_sd: float = 0.0
    weight_decay: float = 0.0
    warmup: int = 0
    decay_every: int | None = None
    decay_factor: float = 0.1
    grad_clip: float | None = None

    def __post_init__(self) -> None:
        for name in ("width", "depth", "batch", "steps", "eval_samples"):
            self._set(name, _integer(name, getattr(self, name), 1))
        for name in ("seed", "warmup"):
            self._set(name, _integer(name, getattr(self, name), 0))
        for name in ("teacher_width", "teacher_depth", "dataset_size", "decay_every"):
            if getattr(self, name) is not None:
                self._set(name, _integer(name, getattr(self, name), 1))
        for name, allowed in CHOICES.items():
            choose(name, getattr(self, name), allowed)
        if self.teacher_activation is not None:
            choose("teacher_activation", self.teacher_activation, ACTIVATIONS)
        for name in ("lr", "ln_eps", "teacher_gain", "decay_factor"):
            self._set(name, _real(name, getattr(self, name), low=0.0, low_open=True))
        if self.grad_clip is not None:
            self._set("grad_clip", _real("grad_clip", self.grad_clip, low=0.0, low_open=True))
        self._set("gamma_mean", _real("gamma_mean", self.gamma_mean, low=-math.inf))
        for name in ("label_noise", "adam_eps", "lr_min", "gamma_sd", "weight_decay"):
            self._set(name, _real(name, getattr(self, name), low=0.0))
        for name in ("beta1", "beta2", "momentum"):
            self._set(name, _real(name, getattr(self, name), low=0.0, below=1.0))
        single, real = float(np.finfo(np.float32).max), np.finfo(self.real)
        largest, smallest = float(real.max), float(real.smallest_subnormal)
        for name in ("gamma_mean", "gamma_sd", "teacher_gain", "label_noise"):  # drawn in float32
            if abs(getattr(self, name)) > single:
                raise ValueError(
                    f"{name} must be within float32, at most {single:g}; got {getattr(self, name)}"
                )
        if self.lr > largest:
            raise ValueError(f"lr must be within {self.dtype}, at most {largest:g}; got {self.lr}")
        if self.ln_eps < smallest:
            raise ValueError(
                f"ln_eps must be within {self.dtype}, at least {smallest:g}; got {self.ln_eps}"
            )
        if self.data == "fresh" and self.dataset_size is not None:
            raise ValueError(
                f"dataset_size must be None with data='fresh'; got {self.dataset_size}"
            )
        if self.dataset_size is not None and self.dataset_size % self.batch:
            raise ValueError(
                f"dataset_size must be a multiple of batch ({self.batch}); got {self.dataset_size}"
            )

        if (self.schedule == "step") != (self.decay_every is not None):
            raise ValueError(
                f"decay_every must be given with schedule='step' and only then; got "
                f"{self.decay_every} with {self.schedule!r}"
            )
        if self.weight_decay and self.optimizer != "adamw":
            raise ValueError(
                f"weight_decay must be 0 unless optimizer is 'adamw'; got {self.weight_decay} with "
                f"{self.optimizer!r}"
            )

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def hidden(self) -> int:
        """Width h of the student's hidden layer (SwiGLU: of the gated product)."""
        return student_hidden(self.width, self.activation)

    @property
    def real(self) -> np.dtype[Any]:
        return np.dtype(self.dtype)


def student_hidden(width: int, activation: str) -> int:
    """4 d, or round(8 d / 3) for SwiGLU, which has a third matrix (same number of parameters)."""
    return round(8 * width / 3) if activation == "swiglu" else 4 * width


def check_config(cfg: object) -> None:
    """TypeError unless ``cfg`` is a ProxyConfig."""
    if not isinstance(cfg, ProxyConfig):
        raise TypeError(f"cfg must be a ProxyConfig; got {cfg!r}")


def _integer(name: str, value: object, least: int) -> int:
    number = as_integer(name, value, f"an integer of at least {least}")
    if number < least:
        raise ValueError(f"{name} must be at least {least}; got {number}")
    return number


def _real(
    name: str, value: object, low: float, low_open: bool = False, below: float = math.inf
) -> float:
    allowed = "a finite number"
    allowed += "" if low == -math.inf else f" {'above' if low_open else 'of at least'} {low:g}"
    allowed += "" if below == math.inf else f" and below {below:g}"
    if isinstance(value, (bool, np.bool_, str, bytes, complex, np.complexfloating)):
        raise TypeError(f"{name} must be {allowed}; got {value!r}")
    try:
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # an integer beyond float64
        number = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be {allowed}; got {value!r}") from None
    if not low <= number < below or (low_open and number == low) or math.isinf(number):
        raise ValueError(f"{name} must be {allowed}; got {number!r}")
    return number
