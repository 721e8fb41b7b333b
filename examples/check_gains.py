"""Do your own model's layer-norm gains lie on the clamp cliff?

    python examples/check_gains.py model.safetensors    # or .npz, .npy
    python examples/check_gains.py                      # a small model made for the purpose

Under the scale rule ``floor`` a block whose largest element lies just below a power of two is
clamped: in E4M3, between 0.875 and 1 times it, where trained gains tend to be.  The gains then
shrink together, by up to 12.5 %.  For each gain you see the share of elements clamped and the
common scaling that comes of it, under ``floor`` and under ``rceil``, which takes the next scale
instead of clamping.  (The scaling of a gain that is not clamped is rounding's.)  A second.

``mxsim report`` prints the same of all tensors of a file; here are the functions behind it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mxsim.formats import FORMATS, choose
from mxsim.report import is_gain, load_arrays, tensor_report

ON_CLIFF = 0.5  # of a gain's elements are clamped under floor


def synthetic(path: Path) -> Path:
    """A model of two blocks: gains at 0.97 are on the cliff, gains at 0.8 are not."""
    rng = np.random.default_rng(0)
    arrays = {"blocks.0.mlp.weight": rng.standard_normal((64, 64))}
    for block, mean in enumerate((0.97, 0.8)):
        arrays[f"blocks.{block}.norm.weight"] = rng.normal(mean, 0.01, 256)
        arrays[f"blocks.{block}.norm.bias"] = rng.normal(0.0, 0.01, 256)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line a gain; the exit status is 1 if one is on the cliff, 2 for a bad file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a .safetensors, .npz or .npy file")
    parser.add_argument("--format", default="mxfp8_e4m3", help="see: mxsim formats")
    options = parser.parse_args(arguments)
    path = options.model or synthetic(Path("results") / "check_gains" / "model.npz")
    try:
        choose("format", options.format, FORMATS)
        arrays, _ = load_arrays(path)
    except (OSError, ValueError, ImportError) as error:
        parser.error(str(error))
    gains = {name: array for name, array in arrays.items() if is_gain(name, array)}

    print(f"{len(gains)} norm gains among {len(arrays)} tensors of {path}, {options.format}")
    print(f"{'':32} {'mean':>6}  clamped: floor  rceil   scaling: floor   rceil")
    on_cliff = 0
    for name, gain in gains.items():
        rules = tensor_report(name, gain, options.format, ("floor", "rceil")).by_rule
        floor, rceil = rules["floor"], rules["rceil"]
        on_cliff += floor.saturated > ON_CLIFF
        print(
            f"{name:32} {gain.mean():6.3f} {floor.saturated:15.1%} {rceil.saturated:6.1%} "
            f"{floor.gain - 1:+16.2%} {rceil.gain - 1:+7.2%}"
            + ("   on the cliff" if floor.saturated > ON_CLIFF else "")
        )
    print(f"on the cliff: {on_cliff} of {len(gains)}")
    return int(on_cliff > 0)


if __name__ == "__main__":
    raise SystemExit(main())
