"""Is your own GPU quantizer right?  Hold it to the corpus, bit for bit.

    python examples/check_quantizer.py             # on the GPU if there is one, else on the CPU
    python examples/check_quantizer.py --broken    # with its exponent by a float32 log2

Replace ``quantize`` by yours, and say in ``can_run`` what it can do.  Here: float32, whole blocks
of 32 along the last axis, E4M3 under ``floor``.  Every case of the corpus that it can run is
compared with the specification, worked out in integers.  You see how many agree, and of each other
one what went in, what came out, what is right, and who reported it first.  Needs PyTorch; a few
seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

try:
    import torch
except ModuleNotFoundError:
    say = "needs PyTorch (make crosscheck): .venv-torch/bin/python examples/check_quantizer.py"
    raise SystemExit(say) from None

from mxsim.crosscheck.backend import Backend, CanRun, Result, as_array, as_tensor
from mxsim.crosscheck.case import Array, Config
from mxsim.crosscheck.corpus import corpus
from mxsim.crosscheck.matrix import check

Tensor = Any


def quantize(x: Tensor, exponent_of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Yours; here: the scale from the exponent of the block maximum, then a cast, saturating."""
    blocks = x.unflatten(-1, (-1, 32)).double()  # where dividing by any scale is exact
    amax = blocks.abs().amax(-1, keepdim=True)
    exponent = torch.frexp(amax).exponent - 1 if exponent_of is None else exponent_of(amax)
    shared = (exponent - 8).clamp(-127, 127).long()  # 8: the exponent of 448
    scale = (shared + 1023 << 52).view(torch.float64)  # 2^shared, from its bits
    rounded = (blocks / scale).clamp(-448, 448).float().to(torch.float8_e4m3fn)
    values = rounded.double() * scale
    return torch.where(amax.isfinite(), values, torch.nan).flatten(-2).float()


def by_log2(amax: Tensor) -> Tensor:
    """The usual fault: just below a power of two a float32 log2 is rounded up to its exponent."""
    return amax.float().log2().floor()


def can_run(config: Config) -> CanRun:
    """What to ask ``quantize`` about: True, or in words why not."""
    if (config.fmt, config.rule, config.rounding) != ("mxfp8_e4m3", "floor", "even"):
        return "E4M3, floor, ties to even only"
    if config.block_size != 32 or config.axis not in (-1, len(config.shape) - 1):
        return "blocks of 32 along the last axis only"
    if config.dtype != "float32" or config.shape[-1] % 32 or 0 in config.shape:
        return "float32 and whole blocks only"
    return True if config.nonfinite == "propagate" else "NaN and Inf propagate"


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; the exit status is 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broken", action="store_true", help="with a fault")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=device)
    options = parser.parse_args(arguments)

    def run(x: Array, config: Config) -> Result:
        t = as_tensor(x, config, options.device)
        return Result(as_array(quantize(t, by_log2 if options.broken else None)))

    yours = Backend("yours", "", can_run, run)
    matrix = check(corpus(), [yours], formats=("mxfp8_e4m3",))
    origins = {case.name: case.origin for case in corpus()}
    for difference in matrix.unexplained:
        (first,) = difference.examples
        print(f"differs: {first.case}, {difference.elements} elements ({origins[first.case]})")
        print(f"  {first.what} {first.x}, block maximum {first.block_maximum}")
        print(f"  got {first.got}\n  right {first.specified}")
    (cell,) = matrix.cells.values()
    print(f"{options.device}: {cell.passed} of {cell.passed + cell.failed} cases agree")
    return int(cell.failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
