"""What quantization does to the tensors themselves: clamping, its closed form, parts of the error.

The gradient's own error is in bias.py, systematic.py and attribution.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mxsim.config import ProxyConfig
from mxsim.formats import SCALE_RULES, IntFormat, as_format, choose
from mxsim.layout import check_block_size
from mxsim.mxarray import QuantizationStats
from mxsim.philox import Noise
from mxsim.precision import BlockPrecision, PrecisionScheme, precision_of
from mxsim.proxy import (
    check_batch,
    check_params,
    forward,
    loss_and_grads_into,
    parameter_count,
    parameter_views,
    workspace,
)
from mxsim.quantize import quantize
from mxsim.rounders import Rounder
from mxsim.theory.clamp import clamp_shares
from mxsim.theory.laws import gaussian
from mxsim.threads import one_blas_thread

Array = NDArray[Any]


# ---------------------------------------------------------------- clamping in a model


class _Watched:
    """A rounder that keeps the statistics of what it is given."""

    def __init__(
        self,
        rounder: Rounder,
        seen: dict[tuple[str, int], QuantizationStats],
        place: tuple[str, int],
    ) -> None:
        self.rounder, self.seen, self.place = rounder, seen, place
        self.rounding = rounder.rounding

    def __call__(self, x: Array, axis: int, out: Array, noise: Noise | None = None) -> Array:
        r = self.rounder
        rule = r.scale_rule if r.format.scale == "e8m0" else None
        along = -1 if isinstance(r.block_size, tuple) else axis
        q = quantize(x, r.format, along, r.block_size, rule, r.rounding, noise=noise)
        assert q.stats is not None
        self.seen[self.place] = q.stats
        return r(x, axis, out, noise)


def clamp_statistics(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    y: ArrayLike,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
) -> Mapping[tuple[str, int], QuantizationStats]:
    """(site, block) -> statistics of the tensor that the site quantizes, on the batch (x, y).

    Sites with a block format; arguments and errors as for ``gradient_bias``.
    """
    checked = check_params(params, cfg)
    real = checked[0]["w1"].dtype
    x_, y_ = check_batch(x, y, cfg, real)
    seen: dict[tuple[str, int], QuantizationStats] = {}
    watched = []
    for b in precision_of(scheme, cfg.depth, cfg.seed, step):
        rounders: dict[str, Any] = {
            site: _Watched(r, seen, (site, b.block)) if isinstance(r, Rounder) else r
            for site, r in b.rounders.items()
        }
        watched.append(replace(b, rounders=rounders))
    grads = parameter_views(np.empty(parameter_count(cfg), real), cfg)
    with one_blas_thread():
        ws = workspace(cfg, len(x_), real)
        loss_and_grads_into(checked, x_, y_, cfg, watched, ws, grads)
    return seen


@dataclass(frozen=True)
class Clamp:
    """Expected shares, before rounding, for independent standard normal elements.

    elements: of elements with |x| > largest * scale; blocks: of blocks whose maximum is so.
    """

    elements: float
    blocks: float


def gaussian_clamp(fmt: str, block_size: int = 32, scale_rule: str = "floor") -> Clamp:
    """The closed form of what ``clamp_statistics`` counts, for a Gaussian block.

    A thin call to ``mxsim.theory.clamp.clamp_shares``, which has the formula and any distribution.
    Raises as ``quantize`` for unknown names and block sizes, ValueError for NVFP4.
    """
    form = as_format(fmt)
    choose("scale_rule", scale_rule, SCALE_RULES)
    size = check_block_size(block_size)
    if not isinstance(size, int):
        raise ValueError(f"block_size must be an integer; got {block_size!r}")
    shares = clamp_shares(gaussian(), form, size, scale_rule)
    return Clamp(shares.elements, shares.blocks)


# ---------------------------------------------------------------- the parts of an error


@dataclass(frozen=True)
class ErrorParts:
    """|q - x|^2 / |x|^2 and its parts, which sum to it exactly.

    scale: (gain - 1)^2, the coherent part, gain = <x, q> / |x|^2.  What is left after it,
    q - gain x, falls to the elements that were ``saturated`` (|x| > largest * scale), ``flushed``
    to zero, or neither: ``grid``.
    """

    total: float
    scale: float
    saturated: float
    flushed: float
    grid: float
    gain: float


def error_parts(
    x: ArrayLike,
    fmt: str,
    axis: int = -1,
    block_size: int | None = None,
    scale_rule: str | None = None,
    rounding: str = "even",
    noise: Noise | ArrayLike | None = None,
) -> ErrorParts:
    """Split the quantization error of a finite, nonzero array.  Arguments as for ``quantize``.

    An element that is saturated because its scale rounded to zero (NVFP4) counts as flushed.
    """
    q = quantize(x, fmt, axis, block_size, scale_rule, rounding, noise=noise, nonfinite="raise")
    exact = np.asarray(x, np.float64)
    largest = float(np.abs(exact).max(initial=0.0))
    if largest == 0:
        raise ValueError("x must have a nonzero element; got zeros alone")
    unit = math.ldexp(1.0, math.frexp(largest)[1])  # keeps squares in range, changes no ratio
    exact, values = exact / unit, q.dequantize(np.float64) / unit
    power = float((exact**2).sum())
    gain = float((exact * values).sum()) / power
    rest = (values - gain * exact) ** 2 / power
    element = q.format.element
    beyond = isinstance(element, IntFormat) and not element.symmetric  # one step more below zero
    largest_of_sign = element.largest + element.smallest_subnormal * (beyond & (exact < 0))
    limit = largest_of_sign * q.blocks.spread(q.scale_values(), q.shape) / unit
    flushed = (values == 0) & (exact != 0)
    saturated = (np.abs(exact) > limit) & ~flushed
    return ErrorParts(
        total=float(((values - exact) ** 2).sum()) / power,
        scale=(gain - 1) ** 2,
        saturated=float(rest[saturated].sum()),
        flushed=float(rest[flushed].sum()),
        grid=float(rest[~saturated & ~flushed].sum()),
        gain=gain,
    )


# ---------------------------------------------------------------- through depth


def forward_error(
    params: Sequence[Mapping[str, ArrayLike]],
    x: ArrayLike,
    cfg: ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
) -> Array:
    """|x~_k - x_k| / |x_k| of the residual stream after each block k, (depth,)."""
    checked = check_params(params, cfg)
    real = checked[0]["w1"].dtype
    x_, _ = check_batch(x, x, cfg, real)
    found = []
    with one_blas_thread():
        ws = workspace(cfg, len(x_), real)
        for depth in range(1, cfg.depth + 1):
            part = replace(cfg, depth=depth)
            streams = []
            for each in (PrecisionScheme(), scheme):
                blocks: tuple[BlockPrecision, ...] = precision_of(each, cfg.depth, cfg.seed, step)
                shallow = replace(ws, blocks=ws.blocks[:depth])
                streams.append(
                    forward(checked[:depth], x_, part, blocks[:depth], shallow).astype(np.float64)
                )
            exact, quantized = streams
            found.append(np.linalg.norm(quantized - exact) / np.linalg.norm(exact))
    return np.array(found)
