"""A precision scheme as PyTorch's student meets it: sites, roundings, straight-through rule.

What a site does to a tensor is in torch_quantize.py; which tensor goes through which site along
which axis is in torch_linear.py, torch_norm.py and torch_proxy.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mxsim.backends.torch_philox import key_words, philox_bits
from mxsim.backends.torch_quantize import fake_quantize, round_to
from mxsim.formats import ELEMENTWISE, FORMATS
from mxsim.precision import SITES, PrecisionScheme, SiteFormat

Tensor = Any  # torch is optional, and unknown to the type checker
Rounding = Callable[[Tensor], Tensor]
Seen = Callable[[str, int, Tensor, Tensor], None]  # site, block, before, after

# Tensor numbers of Noise, as every backend has them: 64 a block, sites from 0, signs from 32.
TENSORS, SIGNS = 64, 32


def unrounded(x: Tensor) -> Tensor:
    """The rounding that does nothing."""
    return x


class _Gate(torch.autograd.Function):  # type: ignore[misc,unused-ignore]
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Rounding, backward: Rounding) -> Tensor:
        ctx.rounding = backward
        return x.view_as(x) if forward is unrounded else forward(x)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        return ctx.rounding(d), None, None


def gate(x: Tensor, forward: Rounding = unrounded, backward: Rounding = unrounded) -> Tensor:
    """``forward(x)``; its gradient passes straight through and is rounded by ``backward``."""
    if forward is unrounded and backward is unrounded:
        return x
    return _Gate.apply(x, forward, backward)


@dataclass(frozen=True)
class Sites:
    """A scheme in one block, at one step of the run of ``seed``.

    step: an int, or a tensor of one integer on the device, so that a captured step reads a new one
    each time.  seen: called with (site, block, before, after) for every site that quantizes.
    """

    scheme: PrecisionScheme
    formats: Mapping[str, SiteFormat]
    block: int
    key: tuple[int, int]  # of the seed
    step: int | Tensor = 0
    seen: Seen | None = None

    def operand(self, site: str, x: Tensor, axis: int) -> Tensor:
        """x as the computation sees it: itself if the site is exact, else quantized along axis."""
        how = self.formats[site]
        if how.format == "exact":
            return x
        noise = None
        if how.rounding == "stochastic":
            tensor = self.block * TENSORS + SITES.index(site)
            noise = philox_bits(x.numel(), self.key, self.step, tensor, x.device).view(x.shape)
        if how.format in ELEMENTWISE:
            after = round_to(x, how.format, how.rounding, noise=noise)
        else:
            after = fake_quantize(
                x,
                how.format,
                axis=-1 if isinstance(how.block_size, tuple) else axis,  # as it is stored
                block_size=how.block_size,
                scale_rule=how.scale_rule if FORMATS[how.format].scale == "e8m0" else None,
                rounding=how.rounding,
                noise=noise,
            )
        if self.seen is not None:
            self.seen(site, self.block, x.detach(), after.detach())
        return after

    def through(self, site: str, x: Tensor, axis: int) -> Tensor:
        """``operand`` with the straight-through rule: the gradient passes as it is."""
        if self.formats[site].format == "exact":
            return x
        return gate(x, lambda v: self.operand(site, v, axis))

    def rounding(self, direction: str, internal: str, *when: str) -> Rounding:
        """How an internal is rounded in a direction, if its setting is among ``when`` (bf16)."""
        setting = getattr(getattr(self.scheme, direction), internal)
        return self.bf16 if setting in (when or ("bf16",)) else unrounded

    def bf16(self, x: Tensor) -> Tensor:
        """x rounded to bf16 by the scheme's ``internal_rounding``, in x's own dtype."""
        return round_to(x, "bf16", self.scheme.internal_rounding)

    def rotates(self, layer: str) -> bool:
        """Whether wgrad's operands of ``layer`` are rotated: at least one of them is quantized."""
        sites = (f"{layer}_wgrad_dy", f"{layer}_wgrad_x")
        return self.scheme.hadamard != "none" and any(
            self.formats[s].format != "exact" for s in sites
        )

    def rotated(self, layer: str, x: Tensor) -> Tensor:
        """H D x along the batch, x (n, features): random signs, then Walsh-Hadamard by groups."""
        n, scheme = len(x), self.scheme
        fixed = scheme.hadamard == "fixed"
        tensor = SIGNS + (0 if fixed else self.block * TENSORS + int(layer == "fc2"))
        period = min(scheme.hadamard_size, n) if fixed else n
        bits = philox_bits(period, self.key, 0 if fixed else self.step, tensor, x.device)
        signs = 1 - 2 * (bits >> 31).to(x.dtype)
        return rotate_rows(x, signs.repeat(-(-n // period))[:n], scheme.hadamard_size)


def sites_of(
    scheme: PrecisionScheme, depth: int, seed: int, step: int | Tensor = 0, seen: Seen | None = None
) -> tuple[Sites, ...]:
    """The scheme in each block of a model; ValueError for an override beyond its depth."""
    given: object = scheme
    if not isinstance(given, PrecisionScheme):
        raise TypeError(f"scheme must be a PrecisionScheme; got {given!r}")
    for block, site, _ in scheme.overrides:
        if block >= depth:
            raise ValueError(
                f"override of {site} names block {block}; a model of depth {depth} has blocks "
                f"0 to {depth - 1}"
            )
    key = key_words(seed)
    return tuple(
        Sites(scheme, {s: scheme.at(s, block) for s in SITES}, block, key, step, seen)
        for block in range(depth)
    )


def rotate_rows(x: Tensor, signs: Tensor, size: int) -> Tensor:
    """H D x, x (n, m), D = diag(signs), H orthonormal Walsh-Hadamard by groups of ``size`` rows.

    Rows that do not fill a group are taken in groups of the largest power of two that fits.  The
    butterflies go from neighbours to halves, so the sums run in one order on every backend.
    """
    parts, first, n = [], 0, len(x)
    while first < n:
        group = size
        while group > n - first:
            group //= 2
        count = (n - first) // group if group == size else 1
        stop = first + count * group
        factor = 1 / np.sqrt(np.array(group, str(x.dtype).removeprefix("torch.")))
        v = x[first:stop] * (signs[first:stop] * factor.item())[:, None]
        half = 1
        while half < group:
            pairs = v.reshape(-1, 2, half, x.shape[1])
            a, b = pairs[:, 0], pairs[:, 1]
            v = torch.stack((a + b, a - b), dim=1)
            half *= 2
        parts.append(v.reshape(stop - first, x.shape[1]))
        first = stop
    return torch.cat(parts)
