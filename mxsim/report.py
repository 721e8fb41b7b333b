"""What quantization would do to a user's own arrays: statistics, gains on the cliff, pictures.

Numbers and figures only; printing and arguments are in cli.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.formats import BlockFormat, FloatFormat
from mxsim.layout import as_real
from mxsim.mxarray import FILE_MEMBERS, MXArray, QuantizationStats, numpy_reason, open_numpy
from mxsim.quantize import quantize

Array = NDArray[Any]

GAINS = r"(norm|ln_?\w*)[^/]*?(weight|gamma|scale|gain|g)?$"
_BIASES = re.compile(r"(bias|beta)$", re.IGNORECASE)


def load_arrays(path: Path) -> Iterator[tuple[str, Array]]:
    """(name, array) of every real array in an .npz, .npy or .safetensors file.

    safetensors needs the package of that name (``pip install mxsim[safetensors]``).
    Raises ValueError for another suffix or a file that cannot be read.
    """
    if path.suffix == ".safetensors":
        yield from _load_safetensors(path)
        return
    if path.suffix not in (".npz", ".npy"):
        raise ValueError(f"file must be .npz, .npy or .safetensors; got {path}")
    try:
        with open(path, "rb") as stream:
            loaded = np.load(stream, allow_pickle=False)
            arrays = {path.stem: loaded} if isinstance(loaded, np.ndarray) else dict(loaded)
    except FileNotFoundError:
        raise
    except Exception as error:  # zipfile, zlib and numpy raise many kinds for damaged files
        raise ValueError(f"{path} cannot be read as arrays ({error})") from error
    yield from ((name, a) for name, a in arrays.items() if a.dtype.kind in "fiu")


def _load_safetensors(path: Path) -> Iterator[tuple[str, Array]]:
    try:
        import ml_dtypes
        from safetensors import deserialize
    except ImportError:
        raise ImportError(
            "reading .safetensors needs two packages: pip install 'mxsim[safetensors]'"
        ) from None
    names = {"F64": "float64", "F32": "float32", "F16": "float16"}
    try:
        tensors: Any = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except FileNotFoundError:
        raise
    except Exception as error:  # safetensors has its own exception type
        raise ValueError(f"{path} cannot be read as safetensors ({error})") from error
    for name, tensor in sorted(tensors):
        kind: Any = ml_dtypes.bfloat16 if tensor["dtype"] == "BF16" else names.get(tensor["dtype"])
        if kind is not None:
            yield name, np.frombuffer(tensor["data"], np.dtype(kind)).reshape(tensor["shape"])


def is_gain(name: str, array: Array, pattern: str = GAINS) -> bool:
    """Whether an array looks like a norm layer's gain: a vector, by its name, and not a bias."""
    return (
        array.ndim == 1
        and re.search(pattern, name, re.IGNORECASE) is not None
        and _BIASES.search(name) is None
    )


@dataclass(frozen=True)
class TensorReport:
    """What one format does to one tensor, under each scale rule."""

    name: str
    shape: tuple[int, ...]
    gain: bool
    by_rule: Mapping[str, QuantizationStats]


def tensor_report(
    name: str, array: Array, fmt: str, rules: tuple[str, ...], pattern: str = GAINS
) -> TensorReport:
    """Statistics of ``array`` quantized along its last axis in ``fmt`` under each of ``rules``."""
    rows = array.reshape(1) if array.ndim == 0 else array
    by_rule = {}
    for rule in rules:
        stats = quantize(rows, fmt, scale_rule=rule).stats
        assert stats is not None
        by_rule[rule] = stats
    return TensorReport(name, array.shape, is_gain(name, array, pattern), by_rule)


def format_card(form: BlockFormat) -> dict[str, str]:
    """The facts of a format, by label, as text."""
    e = form.element
    layout = (
        f"1 sign, {e.exp_bits} exponent, {e.man_bits} mantissa"
        if isinstance(e, FloatFormat)
        else f"two's complement k/{2**e.man_bits}"
    )
    specials = {"ieee": "NaN and Inf", "nan": "NaN only", "none": "none"}
    scale = {
        "e8m0": "E8M0, 2^(byte - 127), byte 255 is NaN",
        "e4m3": "E4M3 a block, float32 a tensor",
    }
    return {
        "element bits": f"{e.bits} ({layout})",
        "bias": str(e.bias) if isinstance(e, FloatFormat) else "-",
        "emax": str(e.emax),
        "largest": f"{e.largest:g}",
        "top = largest / 2^emax": f"{e.top:g}",
        "smallest normal": f"{e.smallest_normal:g}",
        "smallest step": f"{e.smallest_subnormal:g}",
        "NaN, Inf": specials[e.specials] if isinstance(e, FloatFormat) else "none",
        "scale": scale[form.scale],
        "block": str(form.block_size),
        "bits per element": f"{form.bits_per_element:g}",
    }


def draw_quantization(x: Array, q: MXArray, out: Path) -> Path:
    """Code histogram and relative error against magnitude, to ``out``; returns ``out``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    values = np.abs(q.format.element.values[q.codes].ravel())
    source = np.asarray(x, np.float64).ravel()
    back = q.dequantize(np.float64).ravel()
    figure, (left, right) = plt.subplots(1, 2, figsize=(7.2, 2.8), layout="constrained")
    levels, counts = np.unique(values[np.isfinite(values)], return_counts=True)
    left.bar(np.arange(levels.size), counts / max(counts.sum(), 1), width=1.0, color="#0072B2")
    shown = np.unique(np.linspace(0, levels.size - 1, min(levels.size, 9)).astype(int))
    left.set_xticks(shown, [f"{levels[i]:.3g}" for i in shown], rotation=45)
    left.set_xlabel("element magnitude (code value)")
    left.set_ylabel("share of elements")
    usable = np.isfinite(source) & np.isfinite(back) & (source != 0)
    magnitude = np.abs(source[usable])
    error = np.abs(back[usable] - source[usable]) / magnitude
    if magnitude.size:
        _error_by_magnitude(right, magnitude, error)
    right.set_xscale("log", base=2)
    right.set_xlabel("|x|")
    right.set_ylabel("relative error")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{q.format.name}, scale rule {q.scale_rule}, n = {source.size}", fontsize=9)
    figure.savefig(out, dpi=160)
    plt.close(figure)
    return out


def _error_by_magnitude(axis: Any, magnitude: Array, error: Array) -> None:
    """Median and 10-90 % of the error in eighth-binade bins."""
    bins = np.floor(8 * np.log2(magnitude)).astype(int)
    order = np.argsort(bins, kind="stable")
    edges = np.flatnonzero(np.diff(bins[order])) + 1
    groups = [g for g in np.split(order, edges) if g.size >= 5]
    if not groups:
        axis.plot(magnitude, error, ".", color="#D55E00", markersize=3)
        return
    centre = np.array([2.0 ** ((bins[g[0]] + 0.5) / 8) for g in groups])
    low, middle, high = np.array([np.quantile(error[g], (0.1, 0.5, 0.9)) for g in groups]).T
    axis.fill_between(centre, low, high, alpha=0.25, linewidth=0, color="#D55E00", label="10-90 %")
    axis.plot(centre, middle, color="#D55E00", linewidth=1.1, label="median")
    axis.legend(frameon=False, fontsize=7)
