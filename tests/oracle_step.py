"""One training step under a precision scheme, in plain NumPy, from the specification.

Sources: the docstrings of SiteFormat, Internals and PrecisionScheme, the paper's script, and
microxcaling's formulas (layer norm, activations).  What a site does to an array is
mxsim.fake_quantize, which oracle.py holds to account; checked here is which array goes through
which site along which axis, and what is rounded when.  Nothing is fast or reused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

import mxsim
from mxsim.precision import SITES, PrecisionScheme, SiteFormat

Array = NDArray[Any]
Rounding = Callable[[Array], Array]
Params = list[dict[str, Array]]

# Random bits have one tensor number a use: block * 64 + index of the site for the sites of a block,
# from 32 on for the signs of a rotation.
TENSORS, SIGNS = 64, 32


def round_bf16(x: Array, mode: str) -> Array:
    """To the nearest multiple of 2^(exponent - 7), no finer than bfloat16's smallest subnormal.

    The work is done in float64, where every product, quotient and result is exact.
    """
    wide = np.abs(x.astype(np.float64))
    finite = np.isfinite(wide)
    _, exponent = np.frexp(np.where(finite, wide, 1.0))  # wide = m * 2^exponent, 1/2 <= m < 1
    quantum = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
    quotient = np.where(finite, wide, 0.0) / quantum
    if mode == "even":
        rounded = np.rint(quotient)
    elif mode == "away":
        rounded = np.floor(quotient) + (quotient - np.floor(quotient) >= 0.5)
    else:
        assert mode == "zero"
        rounded = np.floor(quotient)
    size = rounded * quantum
    largest = (2.0 - 2.0**-7) * 2.0**127
    beyond = largest if mode == "zero" else math.inf
    size = np.where(finite, np.where(size > largest, beyond, size), wide)
    return np.copysign(size, x.astype(np.float64)).astype(x.dtype)


def sylvester(n: int) -> Array:
    """The orthonormal Hadamard matrix of order n = 2^k."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / math.sqrt(n)


def group_sizes(n: int, size: int) -> list[int]:
    """n rows in groups of ``size``, then of the largest power of two that fits in the rest."""
    groups = []
    while n:
        group = min(size, 2 ** (n.bit_length() - 1))
        groups.append(group)
        n -= group
    return groups


@dataclass
class Block:
    """One residual block in one step: x + w2 phi(w1 LN(x)) + b2, and its gradient.

    Tests break it on purpose by overriding a method; every rounding and every site, named, passes
    through ``seen``.
    """

    cfg: mxsim.ProxyConfig
    scheme: PrecisionScheme
    step: int
    index: int

    def seen(self, name: str, before: Array, after: Array) -> Array:
        return after

    def rounding(self, direction: str, internal: str, *when: str) -> Rounding:
        """How ``internal`` is rounded in a direction, if its setting is among ``when`` (bf16)."""
        setting = getattr(getattr(self.scheme, direction), internal)
        return self.rounding_if(setting in (when or ("bf16",)), f"{direction}.{internal}")

    def rounding_if(self, rounds: bool, name: str) -> Rounding:
        if not rounds:
            return lambda x: x
        return lambda x: self.seen(name, x, round_bf16(x, self.scheme.internal_rounding))

    def format_of(self, site: str) -> SiteFormat:
        for index, name, value in self.scheme.overrides:
            if (index, name) == (self.index, site):
                return value
        return getattr(self.scheme, site)  # type: ignore[no-any-return]

    def site(self, name: str, x: Array, axis: int) -> Array:
        return self.seen(name, x, self.quantized(name, x, axis))

    def quantized(self, name: str, x: Array, axis: int) -> Array:
        how = self.format_of(name)
        if how.format == "exact":
            return x
        noise = None
        if how.rounding == "stochastic":
            tensor = self.index * TENSORS + SITES.index(name)
            noise = mxsim.Noise(self.cfg.seed, self.step, tensor)
        if how.format not in mxsim.FORMATS:  # element by element
            return mxsim.round_to(np.ascontiguousarray(x), how.format, how.rounding, noise=noise)
        return mxsim.fake_quantize(
            np.ascontiguousarray(x),
            how.format,
            axis=(0, 1) if isinstance(how.block_size, tuple) else axis,  # as it is stored
            block_size=how.block_size,
            scale_rule=None if how.format == "nvfp4" else how.scale_rule,
            rounding=how.rounding,
            noise=noise,
        )

    def rotated(self, layer: str, x: Array) -> Array:
        """H D x along the batch, x (n, features), if the rotation is on and has an effect."""
        sites = (f"{layer}_wgrad_dy", f"{layer}_wgrad_x")
        if self.scheme.hadamard == "none" or all(
            self.format_of(s).format == "exact" for s in sites
        ):
            return x
        n = len(x)
        signed = self.signs(layer, n)[:, None] * x
        out, start = np.empty_like(x), 0
        for group in group_sizes(n, self.scheme.hadamard_size):
            rows = slice(start, start + group)
            out[rows] = np.einsum("ij,jk->ik", sylvester(group), signed[rows])
            start += group
        return self.seen(f"{layer}_rotation", x, out)

    def signs(self, layer: str, n: int) -> Array:
        """The diagonal of D, (n,)."""
        if self.scheme.hadamard == "fixed":  # one vector a run, repeated group by group
            size = self.scheme.hadamard_size
            bits = mxsim.Noise(self.cfg.seed, 0, SIGNS).bits(size)
            bits = np.tile(bits, -(-n // size))[:n]
        else:
            tensor = SIGNS + TENSORS * self.index + (1 if layer == "fc2" else 0)
            bits = mxsim.Noise(self.cfg.seed, self.step, tensor).bits(n)
        return np.where(bits >= 2**31, -1.0, 1.0)

    # Layer norm: x (n, d), gamma, beta (d,)

    def layer_norm(self, x: Array, gamma: Array, beta: Array) -> Array:
        r = self.rounding("forward", "layer_norm")
        n = x.dtype.type(x.shape[1])
        self.gamma = self.site("ln_gamma", gamma, -1)
        x, scale, shift = r(x), r(self.gamma), r(self.site("ln_beta", beta, -1))
        mean = r(r(x.sum(axis=1, keepdims=True)) / n)
        centred = r(x - mean)
        variance = r(r(r(centred * centred).sum(axis=1, keepdims=True)) / n)
        self.vare = r(variance + x.dtype.type(self.cfg.ln_eps))
        self.x_norm = r(centred * r(1 / r(np.sqrt(self.vare))))
        return r(r(scale * self.x_norm) + shift)

    def layer_norm_backward(self, dy: Array) -> tuple[Array, Array, Array]:
        """(dx, dgamma, dbeta)."""
        b = self.rounding("backward", "layer_norm")
        n = dy.dtype.type(dy.shape[1])
        dy, gamma = b(dy), b(self.gamma)
        dbeta = b(dy.sum(axis=0))
        dgamma = b(b(dy * self.x_norm).sum(axis=0))
        t = b(dy * gamma)
        s = b(np.sqrt(self.vare))
        a = b(t * b(1 / s))
        c = b(b(b(b(t * self.x_norm) * s).sum(axis=1, keepdims=True)) / n)
        c = b(c * b(1 / self.vare))
        u = b(a - b(c * self.x_norm))
        dx = b(u - b(b(u.sum(axis=1, keepdims=True)) / n))
        return dx, dgamma, dbeta

    # Linear: x (n, in), w (out, in)

    def linear(self, layer: str, x: Array, w: Array) -> Array:
        into, out = self.rounding("forward", "gemm_in"), self.rounding("forward", "gemm_out")
        xq = self.site(f"{layer}_fprop_x", into(x), 1)
        wq = self.site(f"{layer}_fprop_w", into(w), 1)
        reuse = self.scheme.backward_operands == "reuse"
        self.stash[layer] = (xq, wq) if reuse else (x, w)
        return out(np.matmul(xq, wq.T))

    def linear_backward(self, layer: str, dy: Array) -> tuple[Array, Array]:
        """(dx, dw)."""
        into, out = self.rounding("backward", "gemm_in"), self.rounding("backward", "gemm_out")
        dy, (x, w) = into(dy), self.stash[layer]
        if self.scheme.backward_operands == "requantize":  # a reused copy is left as it is
            x, w = into(x), into(w)
        dx = np.matmul(
            self.site(f"{layer}_dgrad_dy", dy, 1),
            self.site(f"{layer}_dgrad_w", w, 0),
        )
        dw = np.matmul(
            self.site(f"{layer}_wgrad_dy", self.rotated(layer, dy), 0).T,
            self.site(f"{layer}_wgrad_x", self.rotated(layer, x), 0),
        )
        return out(dx), out(dw)

    # Activations

    def activation(self, u: Array) -> Array:
        name = self.cfg.activation
        if name == "swiglu":
            return self.swiglu(u)
        r = self.rounding("forward", "activation")
        if name == "gelu" and self.scheme.forward.activation == "bf16":
            x = r(u)
            t = r(r(x * x) * x)
            t = r(x.dtype.type(1.59375) * r(r(x.dtype.type(0.044677734375) * t) + x))
            phi = r(1 / r(r(np.exp(-t)) + 1))
            self.kept: tuple[Array, ...] = (x, phi)
            return r(x * phi)
        self.kept = (u,)
        if name == "gelu":
            return u * self.normal_cdf(u)
        return r(np.maximum(u, 0) if name == "relu" else u)

    def activation_backward(self, dy: Array) -> Array:
        name = self.cfg.activation
        if name == "swiglu":
            return self.swiglu_backward(dy)
        b = self.rounding("backward", "activation")
        x = self.kept[0]
        real = x.dtype.type
        if name == "gelu" and len(self.kept) == 2:
            phi = self.kept[1]
            p = b(phi * b(1 - phi))
            dt = b(real(1.59375) + b(real(0.2138671875) * b(x * x)))
            slope = b(phi + b(x * b(dt * p)))
        elif name == "gelu":
            density = np.exp(-x * x / 2) / real(math.sqrt(2 * math.pi))
            slope = b(self.normal_cdf(x) + x * density)
        else:
            slope = (x > 0).astype(real) if name == "relu" else np.ones_like(x)
        return b(b(dy) * slope)

    @staticmethod
    def normal_cdf(x: Array) -> Array:
        return np.asarray((1 + erf(x / math.sqrt(2))) / 2, x.dtype)

    def swiglu(self, u: Array) -> Array:
        r = self.rounding("forward", "activation")
        gate = self.rounding("forward", "activation", "bf16", "bf16_gate")
        half = u.shape[1] // 2
        a, z = r(u[:, :half]), gate(u[:, half:])
        sigmoid = gate(1 / gate(gate(np.exp(-z)) + 1))
        silu = gate(z * sigmoid)
        self.kept = (a, sigmoid, silu)
        return r(a * silu)

    def swiglu_backward(self, dy: Array) -> Array:
        b = self.rounding("backward", "activation")
        gate = self.rounding("backward", "activation", "bf16", "bf16_gate")
        a, sigmoid, silu = self.kept
        slope = gate(sigmoid + gate(silu * gate(1 - sigmoid)))
        dy = b(dy)
        return np.concatenate([b(dy * silu), gate(gate(dy * a) * slope)], axis=1)

    # The block

    def forward(self, x: Array, p: Mapping[str, Array]) -> Array:
        self.stash: dict[str, tuple[Array, Array]] = {}
        bias, stream = self.rounding("forward", "bias"), self.rounding("forward", "residual")
        z = self.layer_norm(x, p["ln_gamma"], p["ln_beta"])
        hidden = self.activation(self.linear("fc1", z, p["w1"]))
        branch = bias(self.linear("fc2", hidden, p["w2"]) + bias(p["b2"]))
        return stream(x + branch)

    def backward(self, dy: Array) -> tuple[Array, dict[str, Array]]:
        bias, stream = self.rounding("backward", "bias"), self.rounding("backward", "residual")
        db2 = bias(self.rounding("backward", "gemm_in")(dy).sum(axis=0))
        dhidden, dw2 = self.linear_backward("fc2", dy)
        dz, dw1 = self.linear_backward("fc1", self.activation_backward(dhidden))
        dx, dgamma, dbeta = self.layer_norm_backward(dz)
        if self.scheme.frozen_beta:
            dbeta = np.zeros_like(dbeta)
        grads = {"ln_gamma": dgamma, "ln_beta": dbeta, "w1": dw1, "w2": dw2, "b2": db2}
        final = self.rounding_if(self.scheme.gradients == "bf16", "gradients")
        return stream(dy + dx), {kind: final(each) for kind, each in grads.items()}


def loss_and_grads(
    params: Sequence[Mapping[str, Array]],
    x: Array,
    y: Array,
    cfg: mxsim.ProxyConfig,
    scheme: PrecisionScheme,
    step: int = 0,
    block_type: type[Block] = Block,
) -> tuple[float, Params]:
    """The loss, a mean of squares over all entries, and its gradient; in the dtype of x."""
    blocks = [block_type(cfg, scheme, step, k) for k in range(cfg.depth)]
    with np.errstate(over="ignore"):
        stream = x
        for block, p in zip(blocks, params, strict=True):
            stream = block.forward(stream, p)
        residual = stream - y
        loss = float(np.mean(np.square(residual, dtype=np.float64)))
        d = residual * x.dtype.type(2 / residual.size)
        grads: Params = []
        for block in reversed(blocks):
            d, g = block.backward(d)
            grads.insert(0, g)
    return loss, grads
