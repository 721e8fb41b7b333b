"""What a step would cost on hardware that multiplies narrow formats faster: GEMM time alone.

Units: the GEMMs of one training step with bf16 operands (forward, dgrad and wgrad of fc1 and fc2 in
every block).  Rates relative to bf16 are those of tensor cores that have these formats (dense peak:
FP8 and FP6 twice, FP4 four times); a GEMM runs at the rate of its wider operand.  ``exact`` stands
for the high precision that hardware would use, and counts as bf16.  Quantization itself, rotations
and memory traffic are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from mxsim.config import ProxyConfig
from mxsim.formats import FORMATS
from mxsim.precision import PrecisionScheme
from mxsim.proxy import parameter_shapes

GEMMS = (("fprop_x", "fprop_w"), ("dgrad_dy", "dgrad_w"), ("wgrad_dy", "wgrad_x"))


def _rate(bits: int) -> float:
    return 4.0 if bits <= 4 else 2.0


RATES: Mapping[str, float] = MappingProxyType(
    {name: _rate(each.element.bits) for name, each in FORMATS.items()}
)
"""GEMM throughput of each block format relative to bf16; a name that is not here counts as 1."""

EXACT_GRADIENT = 1.0
"""A same-point exact gradient: a step in high precision."""
MARGIN = 2.0
"""A Hessian-vector product beside it: the R-operator doubles each of a gradient's GEMMs."""


def step_cost(scheme: PrecisionScheme, cfg: ProxyConfig) -> float:
    """GEMM time of one step under ``scheme``, 1 for bf16; ValueError if it does not fit ``cfg``."""
    shapes = parameter_shapes(cfg)
    flops = {"fc1": shapes["w1"][0] * shapes["w1"][1], "fc2": shapes["w2"][0] * shapes["w2"][1]}
    total = 0.0
    for block in range(cfg.depth):
        for layer, size in flops.items():
            for operands in GEMMS:
                formats = [operand_format(scheme, layer, operand, block) for operand in operands]
                total += size / min(RATES.get(name, 1.0) for name in formats)
    return total / (len(GEMMS) * cfg.depth * sum(flops.values()))


def operand_format(scheme: PrecisionScheme, layer: str, operand: str, block: int) -> str:
    """The format in which an operand reaches its GEMM; a reused copy has the forward pass's."""
    own = scheme.at(f"{layer}_{operand}", block).format
    forward = {"dgrad_w": "fprop_w", "wgrad_x": "fprop_x"}.get(operand)
    if own == "exact" and forward and scheme.backward_operands == "reuse":
        return scheme.at(f"{layer}_{forward}", block).format
    return own
