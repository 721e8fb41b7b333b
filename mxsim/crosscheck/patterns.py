"""Systematic cases: every code, tie and threshold of every format, layouts, random blocks.

Deterministic: a random array's seed is part of its case.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from mxsim.crosscheck.case import BLOCK_FORMATS, E8M0_FORMATS, ELEMENTWISE, Array, Case
from mxsim.crosscheck.reference import SPECS, magnitudes
from mxsim.philox import Noise

# Significands of a block maximum at which some rule of some format adds one to the exponent
THRESHOLDS = (1, 1.5, 1.75, 1.875, 1.9375, 1.984375, 1.9921875)


def _neighbours(x: Array) -> Array:
    """Each x >= 0 and the floats on either side of it, what is finite of them, ascending."""
    with np.errstate(over="ignore", under="ignore"):
        near = np.concatenate([x, np.nextafter(x, x.dtype.type(np.inf)), np.nextafter(x, -x)])
    return np.unique(near[np.isfinite(near)])


def _in_blocks(points: Array, pin: Any) -> Array:
    """(blocks, 32): both signs of the points up to ``pin``, which heads each block."""
    inside = points[points <= pin]
    signed = np.concatenate([inside, -inside])
    filled = np.resize(signed, (-(-signed.size // 31), 31))
    return np.insert(filled, 0, pin, axis=1)


def _code_cases() -> list[Case]:
    """Every code, midpoint and the floats beside it, at scales from the lowest to the highest."""
    cases = []
    for fmt in E8M0_FORMATS:
        spec = SPECS[fmt]
        grid = magnitudes(spec)[: spec.largest_code + 1]
        points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, [grid[1] / 4]])
        for dtype, exponents in ((np.float32, (-127, -126, 0)), (np.float64, (0, 127 - spec.emax))):
            for exponent in exponents:
                scale = 2.0**exponent
                with np.errstate(under="ignore"):
                    near = _neighbours((points * scale).astype(dtype))
                pins = (2.0**spec.emax * scale, grid[-1] * scale)
                x = np.concatenate([_in_blocks(near, dtype(pin)) for pin in pins]).astype(dtype)
                cases.append(
                    Case(
                        f"codes and ties of {fmt} at 2^{exponent}, {np.dtype(dtype)}",
                        x,
                        "MX v1.0, 5.3: every code; tenstorrent/tt-metal#51971: a round trip "
                        "changed codes",
                        formats=("mxfp4_e2m1", "nvfp4") if fmt == "mxfp4_e2m1" else (fmt,),
                    )
                )
    return cases


def _maxima_cases() -> list[Case]:
    """Block maxima on, just below and just above every threshold of every rule."""
    cases = []
    for dtype, low, high, step in ((np.float32, -149, 128, 3), (np.float64, -170, 160, 5)):
        exponents = sorted({*range(low, high, step), -127, -126, -119, 126, 127})
        powers = np.ldexp(1.0, np.array([k for k in exponents if low <= k < high]))
        with np.errstate(under="ignore"):
            maxima = _neighbours(np.multiply.outer(powers, THRESHOLDS).ravel().astype(dtype))
        cases.append(
            Case(
                f"block maxima at every threshold, {np.dtype(dtype)}",
                np.stack([maxima, -maxima / 3], axis=1).astype(dtype),
                "MX v1.0, 6.3; pytorch/ao#2035",
                block_size=2,
                formats=BLOCK_FORMATS,
            )
        )
    return cases


def _noise_cases() -> list[Case]:
    """Elements whose distance from the code below is the noise, or 2**-24 of a step beside it."""
    cases = []
    for fmt in E8M0_FORMATS:
        spec, noise = SPECS[fmt], (2**63 + 5, 2**31 + 3, 2**32 - 2)
        shape = (34, 32)  # 1088 elements: past the first window of the generator
        u = (Noise(*noise).bits(shape[0] * shape[1]) >> 8).reshape(shape).astype(np.float64)
        beside = np.random.default_rng(5).integers(-1, 2, shape)
        part = np.clip(u + beside, 0, 2**24 - 1) / 2**24
        base, step = (0.0, 2.0**-spec.man_bits) if spec.integer else (1.0, 2.0**-spec.man_bits)
        x = (base + part * step) * np.where(np.arange(32) % 2, -1, 1)
        x[:, 0] = 2.0**spec.emax
        cases.append(
            Case(
                f"noise where the rounding of {fmt} turns",
                x,
                "apytypes/apytypes#94, AMD-AGI/Primus-Turbo#365, karpathy/llm.c#597",
                formats=(fmt,),
                noise=noise,
            )
        )
    return cases


def _layout_cases() -> list[Case]:
    """Shapes, axes, blocks and strides; the two rules tell where a block's maximum is from."""
    rng = np.random.default_rng(6)
    x = (rng.standard_normal((6, 10, 70)) * np.exp2(rng.integers(-9, 9, (6, 10, 70)))).astype("f4")
    square = rng.standard_normal((64, 64)) * np.exp2(rng.integers(-6, 6, (64, 1)))
    square = square.astype(np.float32)
    wide = np.asfortranarray(x[0])
    cut = "pytorch/torchtitan#1703, #2262, NVIDIA/TransformerEngine#2966: lengths of no whole block"
    way = "triton-lang/triton#8839, pytorch/ao#1501: blocks run along the axis that is asked for"
    view = "tracel-ai/burn#5278, pytorch/FBGEMM#2919: strides ignored"
    size = "pytorch/ao#4254, ROCm/aiter#5547, meta-pytorch/MSLK#145"
    cases = [
        Case("partial last blocks", x[0, :4], cut),
        Case("partial blocks along axis 1 of 3", x, cut, axis=1, block_size=4, noise=(1, 2, 3)),
        Case("along axis 0", square, way, axis=0, noise=(4, 5, 6)),
        Case("along axis 0 of 3, partial", x, way, axis=0, block_size=4, noise=(7, 8, 9)),
        Case("a vector", square[0].astype("f4"), way, axis=0),
        Case("a Fortran-ordered array", wide, view, noise=(1, 1, 1)),
        Case("a transposed view", square.T, view, axis=0, noise=(1, 1, 2)),
        Case("every other element", x[2, ::2, ::2], view, noise=(1, 1, 3)),
        Case("backwards", x[3, ::-1, ::-1], view, noise=(1, 1, 4)),
        Case("one row, repeated", np.broadcast_to(x[4, 0], (3, 70)), view, noise=(1, 1, 5)),
        Case("blocks of 8", x[5, :8, :64].copy(), size, block_size=8),
        Case("blocks of 1", x[5, :3, :9].copy(), size, block_size=1),
        Case("blocks of 4 x 8, partial", x[1], size, block_size=(4, 8), noise=(2, 0, 1)),
        Case("blocks of 32 x 32", square, size, block_size=(32, 32)),
        Case("blocks over axes 0 and 2", x, size, axis=(0, 2), block_size=(4, 16)),
        Case("one block for the tensor", x[1:3, :3, :40].copy(), size, block_size="tensor"),
        Case("no rows", np.zeros((0, 32), np.float32), "microsoft/microxcaling#36"),
        Case("no columns", np.zeros((3, 0), np.float32), "microsoft/microxcaling#36"),
    ]
    return [replace(case, rules=("floor", "rceil")) for case in cases]


def _gain_cases() -> list[Case]:
    rng = np.random.default_rng(7)
    origin = "Su et al. 2025, arXiv:2506.20752: layer-norm gains cluster below a power of two"
    cases = []
    for mean in (0.97, 0.875, 1.02):
        x = (mean + 0.01 * rng.standard_normal((4, 64))).astype(np.float32)
        cases.append(Case(f"gammas around {mean}", x, origin, noise=(8, 1, 2)))
    return cases


def _random_arrays(dtype: Any) -> dict[str, Array]:
    """Normal, log-normal (every row and every element), and bit patterns; (8, 64) each."""
    rng = np.random.default_rng(8)
    normal, shape = rng.standard_normal((8, 64)), (8, 64)
    near = np.ldexp(rng.uniform(1, 2, shape), rng.integers(-100, 100, (8, 1)))
    near *= np.exp2(-rng.integers(0, 21, shape)) * rng.choice([-1, 1], shape)
    return {
        "normal": normal.astype(dtype),
        "log-normal": (np.exp(3 * rng.standard_normal(shape)) * np.sign(normal)).astype(dtype),
        "rows of all sizes": near.astype(dtype),
    }


def bfloat16_values(x: Array) -> Array:
    """Every float32 with its lower 16 bits cleared: a bfloat16 value."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    return np.asarray(bits.view(np.float32))


def _random_cases() -> list[Case]:
    large = np.random.default_rng(10).standard_normal((64, 1037)).astype(np.float32)
    cases = [
        Case(
            "a large array",  # past what fits a vector, a thread, a window of the generator
            large * np.float32(0.02),
            "random",
            rules=("floor",),
            noise=(10, 0, 7),
        )
    ]
    for number, (name, x) in enumerate(_random_arrays(np.float64).items()):
        noise = (9, number, 1)
        cases += [
            Case(f"{name}, float32", x.astype(np.float32), "random", noise=noise),
            Case(f"{name}, float64", x, "random", noise=noise),
            Case(f"{name}, bfloat16", bfloat16_values(x), "random", dtype="bfloat16", noise=noise),
        ]
    half = _random_arrays(np.float64)["normal"].astype(np.float16)
    half[0, :4] = 65504, 6e-8, -0.0, 1 + 2.0**-10
    origin = "numba/numba#4402, #8138: float16 must be widened, exactly"
    cases.append(Case("normal, float16", half, origin))
    rng = np.random.default_rng(9)
    with np.errstate(invalid="ignore"):  # + 0 quiets what signals, so that no conversion warns
        words = rng.integers(0, 2**32, (16, 32), np.uint32).view(np.float32) + np.float32(0)
        wide = rng.integers(0, 2**64, (16, 32), np.uint64).view(np.float64) + 0.0
    short = bfloat16_values(words[::-1])
    cases += [
        Case("random bit patterns, float32", words, "random"),
        Case("random bit patterns, float64", wide, "random"),
        Case("random bit patterns, bfloat16", short, "random", dtype="bfloat16"),
    ]
    return cases


def _elementwise_cases() -> list[Case]:
    """Around every binade of bf16 and fp16, a tie and the floats beside it."""
    cases = []
    for fmt in ELEMENTWISE:
        spec = SPECS[fmt]
        powers = np.ldexp(1.0, np.arange(spec.emin - spec.man_bits - 2, spec.emax + 1))
        half = 2.0 ** -(spec.man_bits + 1)
        significands = (1, 1 + half, 1 + 2 * half, 1 + 3 * half, 2 - 2 * half, 2 - half)
        for dtype in (np.float32, np.float64):
            with np.errstate(under="ignore"):
                points = np.multiply.outer(powers, significands).ravel().astype(dtype)
            near = _neighbours(points)
            x = np.concatenate([near, -near])
            cases.append(
                Case(
                    f"ties of {fmt}, {np.dtype(dtype)}",
                    x[: x.size // 32 * 32].reshape(-1, 32),
                    "IEEE 754; ROCm/aiter#5151",
                    formats=(fmt,),
                )
            )
    return cases


def pattern_cases() -> list[Case]:
    """All of this file's."""
    return [
        *_code_cases(),
        *_maxima_cases(),
        *_elementwise_cases(),
        *_noise_cases(),
        *_layout_cases(),
        *_gain_cases(),
        *_random_cases(),
    ]
