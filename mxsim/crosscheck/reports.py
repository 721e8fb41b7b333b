"""Corner cases that somebody's quantizer got wrong, as arrays, with the public report of each.

The reports are restated; what is right is not said here: the judge works it out.  Rows are blocks,
filled up to 32 with zeros, so that libraries without partial blocks can run them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mxsim.crosscheck.case import Array, Case

TINY = 2.0**-149  # smallest float32


def rows(*blocks: Sequence[float], dtype: Any = np.float32) -> Array:
    """Each block as a row of 32, zeros at its end."""
    x = np.zeros((len(blocks), 32), dtype)
    for row, block in zip(x, blocks, strict=True):
        row[: len(block)] = block
    return x


def below(x: float, dtype: Any = np.float32) -> float:
    """The float just below x > 0."""
    return float(np.nextafter(dtype(x), dtype(0)))


def above(x: float, dtype: Any = np.float32) -> float:
    """The float just above x > 0."""
    return float(np.nextafter(dtype(x), dtype(np.inf)))


def _specials(places: Sequence[int], value: float) -> Array:
    """A row of ones for each place, with ``value`` there, and after each a row without."""
    x = np.ones((2 * len(places), 32), np.float32)
    x[2 * np.arange(len(places)), places] = value
    return x


def _scale_reports() -> list[Case]:
    gains = (0.9990, 0.9375, 0.90625, 0.875, 0.85)
    powers = [2.0**k for k in range(-126, 128, 2)]
    largests = [448.0, 57344.0, 28.0, 7.5, 6.0, 127 / 64]
    grown = [largest * 2.0**k for largest in largests for k in (-120, -20, -1, 0, 1, 10, 100)]
    return [
        Case(
            "957 comes out as 896",
            rows((957, 902.4, 896, 895, 832, 57.79), (960, -959, 958.5, -448, 449)),
            "microsoft/microxcaling#4: floor saturates, as the specification has it",
        ),
        Case(
            "clustered gains",
            rows(gains, [-g for g in gains], (1.0, *gains), (below(1), 0.9, 0.84375, 0.8437)),
            "ROCm/aiter#3212, pytorch/ao#2035: floor clips all of a cluster below a power of two",
        ),
        Case(
            "just below a power of two",
            rows(*([below(p), 0.3 * p] for p in powers)),
            "higham/chop#5, sgl-project/sglang#29954, jax-ml/jax#40419, "
            "tenstorrent/tt-metal#52665: a float log2 is one too high",
        ),
        Case(
            "just above a power of two",
            rows(*([above(p), 0.3 * p] for p in powers), (above(448 * 1024), 448)),
            "pytorch/ao#4725: ceil of a float log2 is one too low",
        ),
        Case(
            "maximum exactly the largest",
            rows(*([v, v / 2] for v in grown if v < 3e38)),
            "microsoft/onnxruntime#32122: frexp's mantissa lies in [1/2, 1)",
        ),
        Case(
            "just above the largest",
            rows(*([above(v), -v / 2] for v in grown if v < 3e38)),
            "pytorch/ao#4725, #1835: the smallest scale that does not saturate",
        ),
        Case("four rules on 150", rows((150, 1, -75.5)), "pytorch/ao#2035, #516, #1835"),
        Case(
            "narrowed before the exponent is read",
            rows((0.9985, 0.5), (1.998, -0.25), (below(2), 1)),
            "pytorch/ao#4725: 0.9985 is 1 in bfloat16",
        ),
        Case(
            "threshold of the even rule",
            rows((6.9, 3, 0.25), (7.0, 3, 0.25), (below(7), 3, 0.25), (1.75, 1.9375, 1.96875)),
            "vllm-project/vllm#43557: half up at the element's width, not at 1.5",
        ),
        Case(
            "the largest float32",
            rows((3.4028234663852886e38, 1.5e38, 1), (-3.4e38, 2.0**127, 2.0**120)),
            "stillwater-sc/universal#1503: NaN or a wrong sign in the top binade",
        ),
    ]


def _byte_reports() -> list[Case]:
    ones = [2.0**-130] * 31
    return [
        Case(
            "byte 0",
            rows((2.0**-120, 2.0**-124, 2.0**-127), (2.0**-119, 2.0**-128), (2.0**-127,)),
            "NVIDIA/TransformerEngine#3262, triton-lang/triton#11624: 2**-127 read as zero",
        ),
        Case(
            "tiny blocks",
            rows((2.8094e-36, 9.18355e-40), (*ones, TINY), (TINY,), (1e-38, -3e-39, 1e-45)),
            "flashinfer-ai/flashinfer#2440: the reciprocal of a tiny scale overflowed",
        ),
        Case(
            "every subnormal maximum",
            rows(*([s, -s / 2, s / 4, TINY] for s in (2.0**k for k in range(-149, -117)))),
            "flashinfer-ai/flashinfer#2440",
        ),
        Case(
            "a NaN in the block",
            _specials((0, 15, 31), np.nan),
            "pytorch/ao#4201, #4654: lost by a maximum that ignores it",
        ),
        Case(
            "an infinity in the block",
            _specials((0, 16, 31), -np.inf),
            "pytorch/ao#4725, NVIDIA/TransformerEngine#2408",
        ),
        Case(
            "an infinity that saturates",
            np.concatenate([_specials((3, 30), np.inf), rows((np.inf, -np.inf), (np.inf, np.nan))]),
            "NVIDIA/TransformerEngine#2408: Inf times a flushed reciprocal is NaN",
            nonfinite="saturate",
        ),
        Case(
            "NaN and infinities alone",
            rows([np.nan] * 32, [np.inf] * 32, [np.nan, -np.inf] * 16),
            "pytorch/ao#4725",
        ),
        Case(
            "all zeros, both signs",
            rows([0.0] * 32, [-0.0] * 32, [0.0, -0.0] * 16, [1.0, -0.0]),
            "pytorch/ao#4713: 0 / 0",
        ),
    ]


def _element_reports() -> list[Case]:
    ties_e2m1 = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0)
    steps_e4m3 = (448, 2.0**-10, 2.0**-10 * 1.0001, 3 * 2.0**-10, 2.0**-9, below(2.0**-6))
    top_e4m3 = (256, 288, 320, 352, 384, 416, 432, 448)
    carries = (15.9, 2.0**-6 * (1 - 2.0**-8), 3.9, 0.99, 0.76, 256)
    single = float(np.float32(1 / 3))
    return [
        Case(
            "ties of E2M1",
            rows(ties_e2m1, [-t for t in ties_e2m1], (0.25000003, 0.24999999, 4)),
            "ROCm/aiter#3992: >= at every threshold is half away",
        ),
        Case(
            "steps of subnormal elements",
            rows(steps_e4m3, (2.0**-6, 2.0**-5, 2.0**-4, 2.0**-3, 0.25, 0.5, 1, 8)),
            "PTO-ISA/SuperNPUBench#49, quic/cloud-ai-sdk#7",
        ),
        Case(
            "the top binade",
            rows(top_e4m3, (464, 465, 447, 256), (4.0, 6.0, 7.5, 5.0), (57344, 61440, 61439)),
            "KhronosGroup/glslang#3981, tracel-ai/cubecl#1472: taken for NaN or Inf",
        ),
        Case(
            "a carry of the mantissa",
            rows(carries, [-c for c in carries]),
            "intel/auto-round#2302, apytypes/apytypes#1024",
        ),
        Case(
            "rounded twice",
            rows(
                (448, -431.99999999999994, 432.00000000000006, 433 - 1e-13, 1 + 2.0**-8 + 2.0**-40),
                (4, 1.25 + 2.0**-40, 1.75 - 2.0**-45, 2.5 + 2.0**-50, 0.25 + 2.0**-54, 1 / 3),
                (1, 1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-50, single),
                dtype=np.float64,
            ),
            "jax-ml/ml_dtypes#401, halide/Halide#8906: through float32 a value meets a tie",
        ),
        Case(
            "ends of INT8",
            rows(
                (1.999, -1.999, 1.984375, 1 / 128, 3 / 128, -1 / 128),
                (-1.9921875, 1.9921875, 0.015625, -(2.0**-8)),
                (-2, 1.984375, -1.984375),
            ),
            "DeepWok/mase#321, microsoft/microxcaling#15",
        ),
        Case(
            "not idempotent",
            rows((1.95, 1.875, 1.75), (0.4, 0.1), (2688, 0.0065), (2688, 0.005859375)),
            "docs/formats.md: the only inputs that a second quantization moves",
        ),
        Case(
            "bfloat16 by truncation",
            rows((1 + 2.0**-8, 1 + 3 * 2.0**-8, 3.4e38, 3.3961775e38, 65519.99, 65520)),
            "ROCm/aiter#5151: a one-sided error",
        ),
    ]


def report_cases() -> list[Case]:
    """All of this file's."""
    return [*_scale_reports(), *_byte_reports(), *_element_reports()]
