"""What a backend is, and the three that are ours: Numba, one page of NumPy, PyTorch.

To add one: write ``can_run`` and ``run``, and list it in ``all_backends`` (backends.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

import numpy as np

import mxsim
from mxsim import minimal
from mxsim.crosscheck.case import OWN, Array, Config
from mxsim.philox import Noise

CanRun = Literal[True] | str


@dataclass(frozen=True)
class Result:
    """What a backend made of an array; what it does not have is None and is not compared.

    values: quantized and dequantized, in ``config.result_dtype``.  decoded: the same by way of the
    codes.  codes, scales: uint8, as mxsim.MXArray has them.
    """

    values: Array
    decoded: Array | None = None
    codes: Array | None = None
    scales: Array | None = None


@dataclass(frozen=True)
class Backend:
    """Something that quantizes.

    can_run(config): True, or in words why not.  run(x, config): x as in Case.  as_numbers: compared
    as numbers, the sign of zero does not count; else bit by bit.
    """

    name: str
    version: str
    can_run: Callable[[Config], CanRun]
    run: Callable[[Array, Config], Result]
    as_numbers: bool = False


def installed(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def arguments(config: Config) -> dict[str, Any]:
    """What ``mxsim.quantize`` and its PyTorch twin are called with."""
    return {
        "axis": config.axis,
        "block_size": config.block_size,
        "scale_rule": None if config.rule == OWN else config.rule,
        "nonfinite": config.nonfinite,
        **rounding_arguments(config),
    }


def rounding_arguments(config: Config) -> dict[str, Any]:
    """Rounding and noise: all that ``round_to`` is called with."""
    noise = None if config.noise is None else Noise(*config.noise)
    return {"rounding": config.rounding, "noise": noise}


# ----------------------------------------------------------------------------------------- Numba


def numba_backend() -> Backend:
    """mxsim itself: ``quantize``, ``fake_quantize``, ``round_to``."""
    return Backend("numba", mxsim.__version__, _numba_can_run, _numba_run)


def _numba_can_run(config: Config) -> CanRun:
    if config.dtype == "bfloat16" and installed("ml_dtypes") is None:
        return "NumPy has bfloat16 only with ml_dtypes"
    return True


def _numba_run(x: Array, config: Config) -> Result:
    if config.dtype == "bfloat16":
        import ml_dtypes

        x = x.astype(ml_dtypes.bfloat16)
    if config.elementwise:
        return Result(mxsim.round_to(x, config.fmt, **rounding_arguments(config)))
    q = mxsim.quantize(x, config.fmt, **arguments(config))
    values = mxsim.fake_quantize(x, config.fmt, **arguments(config))
    return Result(values, q.dequantize(config.result_dtype), q.codes, q.scales)


# --------------------------------------------------------------------------------------- minimal


def minimal_backend() -> Backend:
    """mxsim/minimal.py, which shares no code with the package."""
    return Backend("minimal", mxsim.__version__, _minimal_can_run, _minimal_run)


def _minimal_can_run(config: Config) -> CanRun:
    if config.fmt != "bf16" and config.fmt not in minimal.FORMATS:
        return f"has no {config.fmt}"
    if config.rounding == "stochastic":
        return "has no stochastic rounding"
    if config.dtype not in ("float32", "float64"):
        return "takes float32 and float64"
    if not isinstance(config.block_size, int) and not config.elementwise:
        return "blocks run along one axis"
    if config.nonfinite != "propagate":
        return "propagates NaN and Inf only"
    return True


def _minimal_run(x: Array, config: Config) -> Result:
    if config.elementwise:
        return Result(minimal.fake_quantize(x, config.fmt, rounding=config.rounding))
    assert isinstance(config.axis, int)
    assert isinstance(config.block_size, int)
    return Result(
        minimal.fake_quantize(
            x, config.fmt, config.axis, config.block_size, config.rule, config.rounding
        )
    )


# --------------------------------------------------------------------------------------- PyTorch


def torch_backend(device: str) -> Backend:
    """mxsim.backends.torch_quantize on a device; imports torch."""
    import torch

    from mxsim.backends import torch_quantize

    def run(x: Array, config: Config) -> Result:
        t = as_tensor(x, config, device)
        if config.elementwise:
            rounded = torch_quantize.round_to(t, config.fmt, **rounding_arguments(config))
            return Result(as_array(rounded))
        q = torch_quantize.quantize(t, config.fmt, **arguments(config))
        values = torch_quantize.fake_quantize(t, config.fmt, **arguments(config))
        kind = torch.float64 if config.dtype == "float64" else torch.float32
        decoded, codes, scales = map(as_array, (q.dequantize(kind), q.codes, q.scales))
        return Result(as_array(values), decoded, codes, scales)

    return Backend(f"torch {device}", torch.__version__, lambda config: True, run)


def as_tensor(x: Array, config: Config, device: str) -> Any:
    """x on a device with x's own strides, so that views are views there too (not backwards)."""
    import torch

    shared = tuple(0 if step == 0 else slice(None) for step in x.strides)
    if 0 in x.strides and x.size:  # one memory location for several elements
        once = torch.from_numpy(np.array(x[shared]))
        t = once.reshape([1 if s == 0 else n for s, n in zip(x.strides, x.shape, strict=True)])
        t = t.to(device).expand(x.shape)
    else:
        steps = [abs(step) // x.itemsize for step in x.strides]
        source = torch.from_numpy(np.array(x))
        t = torch.empty_strided(x.shape, steps, dtype=source.dtype, device=device)
        t.copy_(source)
    return t.to(torch.bfloat16) if config.dtype == "bfloat16" else t


def as_array(t: Any) -> Array:
    """A tensor of any device as a NumPy array."""
    return np.asarray(t.detach().cpu().numpy())
