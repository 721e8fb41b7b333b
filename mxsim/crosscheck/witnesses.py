"""Outside witnesses: other people's libraries, each asked for what it claims to compute.

torchao and gfloat quantize blocks by themselves.  ml_dtypes and gfloat's rounding know elements
only: the scale around them is the judge's, exact, so they witness the rounding alone.  microxcaling
is a recording of its outputs (golden/).
"""

from __future__ import annotations

import json
import logging
from importlib.resources import files
from typing import Any

import numpy as np

from mxsim.crosscheck.backend import Backend, CanRun, Result, as_array, as_tensor, installed
from mxsim.crosscheck.case import OWN, Array, Case, Config
from mxsim.crosscheck.reference import SPECS, block_index, magnitudes, shared_exponents

# --------------------------------------------------------------------------------------- torchao

_TORCHAO_FORMATS = {
    "mxfp8_e4m3": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
    "mxfp6_e3m2": "DTYPE_FP6_E3M2",
    "mxfp6_e2m3": "DTYPE_FP6_E2M3",
    "mxfp4_e2m1": "float4_e2m1fn_x2",
}


def torchao_backend(device: str) -> Backend:
    """torchao's MX tensors, in eager mode; imports torch and torchao."""
    import torch

    logging.disable(logging.WARNING)  # of compiled extensions that it can do without
    try:
        from torchao.prototype.mx_formats import constants
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        from torchao.prototype.mx_formats.nvfp4_tensor import (
            NVFP4Tensor,
            per_tensor_amax_to_scale,
        )
    finally:
        logging.disable(logging.NOTSET)

    def quantized(t: Any, config: Config) -> Any:
        if config.fmt == "nvfp4":
            s_t = per_tensor_amax_to_scale(t.abs().max())
            return NVFP4Tensor.to_nvfp4(t, per_tensor_scale=s_t)
        name = _TORCHAO_FORMATS[config.fmt]
        kind = getattr(torch, name, None) or getattr(constants, name)
        return MXTensor.to_mx(t, kind, config.block_size, ScaleCalculationMode(config.rule))

    def run(x: Array, config: Config) -> Result:
        q = quantized(as_tensor(x, config, device).contiguous(), config)
        values = as_array(q.dequantize(torch.float32))
        scales = as_array(q.scale.view(torch.uint8)).reshape(*x.shape[:-1], -1)
        codes = as_array(q.qdata.view(torch.uint8))
        if config.fmt in ("mxfp4_e2m1", "nvfp4"):  # two in a byte, the first in its low half
            codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(x.shape)
        return Result(values, None, codes, scales)

    return Backend(f"torchao {device}", str(installed("torchao")), _torchao_can_run, run)


def _torchao_can_run(config: Config) -> CanRun:
    if config.fmt == "nvfp4" and (config.block_size, len(config.shape)) != (16, 2):
        return "NVFP4 in blocks of 16 and matrices only"
    if config.fmt == "nvfp4" and not config.finite:
        return "its NVFP4 does not say what becomes of NaN and Inf"
    if config.fmt not in (*_TORCHAO_FORMATS, "nvfp4"):
        return f"has no {config.fmt}"
    if config.rounding != "even":
        return "rounds to even only"
    if config.dtype not in ("float32", "bfloat16"):
        return "takes float32 and bfloat16"
    if not isinstance(config.block_size, int) or config.axis not in (-1, len(config.shape) - 1):
        return "blocks run along the last axis"
    if not config.shape[-1] or config.shape[-1] % config.block_size:
        return "whole blocks only"
    if not config.shape[0]:
        return "not of empty tensors"
    if config.fmt == "mxfp4_e2m1" and config.block_size % 2:
        return "packs two elements in a byte"
    if config.nonfinite != "propagate":
        return "has no choice of what becomes of NaN and Inf"
    return True


# ------------------------------------------------------------------------------ rounding elements

_ML_DTYPES = {
    "mxfp8_e4m3": "float8_e4m3fn",
    "mxfp8_e5m2": "float8_e5m2",
    "mxfp6_e3m2": "float6_e3m2fn",
    "mxfp6_e2m3": "float6_e2m3fn",
    "mxfp4_e2m1": "float4_e2m1fn",
    "bf16": "bfloat16",
}


def scaled_elements(x: Array, config: Config) -> tuple[Array, Array]:
    """(x / scale in float64, exponent of the scale), by the judge's scale.

    The product is exact: a power of two, and nothing here leaves float64's range to one side or
    the other that rounding would notice.
    """
    if config.elementwise:
        return x.astype(np.float64), np.zeros(x.shape, np.int64)
    exponent = shared_exponents(x, config)
    with np.errstate(under="ignore"):
        return np.ldexp(x.astype(np.float64), -exponent), exponent


def ml_dtypes_backend() -> Backend:
    """ml_dtypes' casts; imports ml_dtypes."""
    import ml_dtypes

    def run(x: Array, config: Config) -> Result:
        scaled, exponent = scaled_elements(x, config)
        if not config.elementwise:  # its casts beyond the largest give NaN
            largest = magnitudes(SPECS[config.fmt])[SPECS[config.fmt].largest_code]
            scaled = np.clip(scaled, -largest, largest)
        kind = np.float16 if config.fmt == "fp16" else getattr(ml_dtypes, _ML_DTYPES[config.fmt])
        if config.dtype != "float64":  # else it would not be asked about float32
            scaled = narrow(scaled)
        with np.errstate(over="ignore", under="ignore"):
            rounded = scaled.astype(kind)
            values = np.ldexp(rounded.astype(np.float64), exponent).astype(config.result_dtype)
        codes = None if config.elementwise else rounded.view(np.uint8)
        return Result(values, None, codes, None)

    def can_run(config: Config) -> CanRun:
        if config.fmt not in _ML_DTYPES and config.fmt != "fp16":
            return f"has no {config.fmt}"
        if config.rounding != "even":
            return "rounds to even only"
        return _elements_can_run(config)

    return Backend("ml_dtypes", ml_dtypes.__version__, can_run, run)


def narrow(scaled: Array) -> Array:
    """As float32 if that is exact (but where scaling left its range), else as it is."""
    with np.errstate(over="ignore", under="ignore"):
        single = scaled.astype(np.float32)
    return single if np.array_equal(single, scaled, equal_nan=True) else scaled


def _elements_can_run(config: Config) -> CanRun:
    if not config.elementwise and not config.finite:
        return "rounds elements only: nothing to witness in a NaN block"
    return True


def gfloat_elements_backend() -> Backend:
    """gfloat's array rounding; imports gfloat."""
    import gfloat

    modes, known = _gfloat_modes(), _gfloat_elements()

    def run(x: Array, config: Config) -> Result:
        info = known[config.fmt]
        scaled, exponent = scaled_elements(x, config)
        saturates = not config.elementwise
        rounded = gfloat.round_ndarray(info, scaled, modes[config.rounding], saturates)
        with np.errstate(over="ignore", under="ignore"):
            values = np.ldexp(rounded, exponent).astype(config.result_dtype)
        codes = None
        if saturates:
            codes = gfloat.encode_ndarray(info, rounded).astype(np.uint8)
        return Result(values, None, codes, None)

    def can_run(config: Config) -> CanRun:
        reason = _gfloat_can_run(config, known)
        return _elements_can_run(config) if reason is True else reason

    return Backend("gfloat elements", str(installed("gfloat")), can_run, run)


def gfloat_blocks_backend() -> Backend:
    """gfloat's block formats with its own scale, compute_scale_amax; imports gfloat."""
    import gfloat
    from gfloat.block import compute_scale_amax

    modes, known = _gfloat_modes(), _gfloat_elements()

    def run(x: Array, config: Config) -> Result:
        info = known[config.fmt]
        block, counts = block_index(config)
        order = np.argsort(block, axis=None, kind="stable")
        ends = np.flatnonzero(np.diff(block.ravel()[order])) + 1
        scale = np.array(
            [compute_scale_amax(info.emax, each) for each in np.split(x.ravel()[order], ends)],
            np.float64,
        )
        rounded = gfloat.round_ndarray(info, x / scale[block], modes[config.rounding], True)
        byte = (np.frexp(scale)[1] - 1 + 127).astype(np.uint8)
        with np.errstate(over="ignore", under="ignore"):
            values = (rounded * scale[block]).astype(config.result_dtype)
        codes = gfloat.encode_ndarray(info, rounded).astype(np.uint8)
        return Result(values, None, codes, byte.reshape(counts))

    def can_run(config: Config) -> CanRun:
        if config.elementwise:
            return "see gfloat elements"
        if config.rule != "floor" and config.rule != OWN:
            return "knows the rule floor"
        if not config.finite:
            return "its formats without NaN raise"
        if config.dtype not in ("float32", "float64"):
            return "NumPy has no bfloat16; in float16 its scales overflow"
        return _gfloat_can_run(config, known)

    return Backend("gfloat blocks", str(installed("gfloat")), can_run, run)


def _gfloat_modes() -> dict[str, Any]:
    from gfloat import RoundMode

    return {
        "even": RoundMode.TiesToEven,
        "away": RoundMode.TiesToAway,
        "zero": RoundMode.TowardZero,
    }


def _gfloat_elements() -> dict[str, Any]:
    from gfloat import formats as f

    return {
        "mxfp8_e4m3": f.format_info_ocp_e4m3,
        "mxfp8_e5m2": f.format_info_ocp_e5m2,
        "mxfp6_e3m2": f.format_info_ocp_e3m2,
        "mxfp6_e2m3": f.format_info_ocp_e2m3,
        "mxfp4_e2m1": f.format_info_ocp_e2m1,
        "mxint8_asymmetric": f.format_info_ocp_int8,  # it allows the code of -2
        "bf16": f.format_info_bfloat16,
        "fp16": f.format_info_binary16,
    }


def _gfloat_can_run(config: Config, known: dict[str, Any]) -> CanRun:
    if config.fmt not in known:
        return f"has no {config.fmt}"
    if config.rounding == "stochastic":
        return "compares random bits in another way"
    if config.nonfinite != "propagate":
        return "has no choice of what becomes of NaN and Inf"
    if not all(config.shape):
        return "not of empty arrays"
    return True


# ------------------------------------------------------------------------------------- recording


def _golden() -> tuple[dict[str, Any], dict[str, Array]]:
    folder = files("mxsim.crosscheck") / "golden"
    about = json.loads((folder / "microxcaling.json").read_text())
    with (folder / "microxcaling.npz").open("rb") as file, np.load(file) as stored:
        return about, dict(stored)


def golden_cases() -> list[Case]:
    """The inputs of the recording, one case an axis and block size."""
    about, stored = _golden()
    sizes = sorted({each["block_size"] for each in about["combinations"]}, reverse=True)
    return [
        Case(
            f"golden {family}, axis {axis}, block {size}",
            stored[f"in_axis{axis}"][i].copy(),
            "golden: microxcaling, the library of the paper's script",
            axis=axis,
            block_size=size,
            rules=("floor",),
            noise=(10, i, axis),
        )
        for i, family in enumerate(about["families"])
        for axis in (0, 1)
        for size in sizes
    ]


def microxcaling_backend() -> Backend:
    """The recorded outputs, found by the case's name."""
    about, stored = _golden()
    outputs: dict[tuple[str, str, str], Array] = {}
    for i, family in enumerate(about["families"]):
        for axis in (0, 1):
            for c, each in enumerate(about["combinations"]):
                name = f"golden {family}, axis {axis}, block {each['block_size']}"
                rounding = about["roundings"][each["rounding"]]
                for f, fmt in enumerate(about["formats"]):
                    outputs[name, fmt, rounding] = stored[f"out_axis{axis}"][i, f, c]
        for r, rounding in enumerate(about["bfloat16_roundings"]):
            name = f"golden {family}, axis 1, block 32"
            outputs[name, "bf16", about["roundings"][rounding]] = stored["out_bfloat16"][i, r]

    def can_run(config: Config) -> CanRun:
        if config.fmt not in about["formats"] and config.fmt != "bf16":
            return f"no recording of {config.fmt}"
        if config.rule not in ("floor", OWN):
            return "recorded under floor"
        if not config.case.startswith("golden"):
            return "a recording of the golden inputs alone"
        if (config.case, config.fmt, config.rounding) not in outputs:
            return "not recorded with this rounding, axis and block size"
        return True

    def run(x: Array, config: Config) -> Result:
        return Result(outputs[config.case, config.fmt, config.rounding])

    return Backend("microxcaling", "recorded", can_run, run, as_numbers=True)
