"""What quantization would do to a user's own arrays: statistics, gains on the cliff, pictures.

Numbers and figures only; printing and arguments are in cli.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.arrayfile import FILE_MEMBERS, numpy_reason, open_numpy
from mxsim.formats import BlockFormat, FloatFormat
from mxsim.layout import as_real
from mxsim.mxarray import MXArray, QuantizationStats
from mxsim.quantize import quantize

Array = NDArray[Any]

# A word that ends in norm, or ln (layernorm, rms_norm, norms.0, ln_1, ...); then weight, gamma, ...
# as the last word, with a qualifier and indices between at most, or nothing; or gamma itself.
GAINS = (
    r"(norm(s|alization)?|(?<![a-z])ln)"
    r"(\d*(_\w+)?([./]\d+)*[._/-](weight|gamma|scale|gain|g)|_?\d*|_f)$"
    r"|(?<![a-z])gamma\d*$"
)
_NEVER_GAINS = re.compile(r"(bias|beta|(?<![a-z])b)$|(?<![a-z])running_\w*$", re.IGNORECASE)


def load_arrays(path: Path) -> tuple[dict[str, Array], dict[str, str]]:
    """(arrays, skipped) of an .npz, .npy or .safetensors file, by name.

    arrays: all that ``quantize`` takes, floats and integers; skipped: why each other is not there.
    safetensors needs the package of that name and ml_dtypes.
    Raises ValueError for another suffix, a file that cannot be read or one that MXArray.save wrote.
    """
    if path.suffix == ".safetensors":
        members = _safetensors_members(path)
    elif path.suffix in (".npz", ".npy"):
        members = _numpy_members(path)
    else:
        raise ValueError(f"file must be .npz, .npy or .safetensors; got {path}")
    skipped = {name: reason for name, a in members.items() if (reason := _why_not(a))}
    arrays = {name: a for name, a in members.items() if name not in skipped}
    return arrays, skipped  # type: ignore[return-value]


def _why_not(member: Array | str) -> str:
    """Why ``quantize`` would not take it, or nothing; a reason given already stays."""
    if isinstance(member, str):
        return member
    try:
        as_real(member)
    except TypeError:
        return f"dtype {member.dtype}"
    except ValueError as error:  # an integer that float64 cannot hold
        return str(error)
    return ""


def _numpy_members(path: Path) -> dict[str, Array | str]:
    with open(path, "rb") as stream:
        try:
            loaded = open_numpy(stream)
            if isinstance(loaded, np.ndarray):
                return {path.stem: loaded}
            members = {name: _npz_member(loaded, name) for name in loaded.files}
        except Exception as error:  # zipfile, zlib and numpy raise many kinds for damaged files
            raise ValueError(f"{path} cannot be read as arrays ({numpy_reason(error)})") from error
    if set(members) == set(FILE_MEMBERS):
        raise ValueError(
            f"{path} holds one quantized array, its codes and scales, not tensors "
            "(mxsim.MXArray.load reads it)"
        )
    return members


def _npz_member(archive: Any, name: str) -> Array | str:
    try:
        return np.asarray(archive[name])
    except ValueError as error:
        if "pickle" in str(error):
            return numpy_reason(error)
        raise


def _safetensors_members(path: Path) -> dict[str, Array | str]:
    try:
        import ml_dtypes
        from safetensors import deserialize
    except ImportError:
        raise ImportError(
            "reading .safetensors needs two packages: pip install safetensors ml_dtypes"
        ) from None
    kinds: dict[str, Any] = {"BF16": ml_dtypes.bfloat16, "BOOL": bool, "C64": "complex64"}
    for letter, word in (("F", "float"), ("I", "int"), ("U", "uint")):
        kinds |= {f"{letter}{bits}": f"{word}{bits}" for bits in (8, 16, 32, 64)}
    content = path.read_bytes()
    try:
        tensors: Any = deserialize(content)  # type: ignore[no-untyped-call]
    except Exception as error:  # safetensors has its own exception type
        raise ValueError(f"{path} cannot be read as safetensors ({error})") from error
    members: dict[str, Array | str] = {}
    for name, tensor in sorted(tensors):
        kind = kinds.get(tensor["dtype"])
        members[name] = f"dtype {tensor['dtype']}"
        if kind is not None:
            members[name] = np.frombuffer(tensor["data"], kind).reshape(tensor["shape"])
    return members


def gain_pattern(pattern: str) -> re.Pattern[str]:
    """The compiled ``pattern``, whatever the case of letters; ValueError if it is none."""
    try:
        return re.compile(pattern, re.IGNORECASE)
    except (re.error, OverflowError) as error:
        raise ValueError(f"gains must be a regular expression; got {pattern!r} ({error})") from None


def is_gain(name: str, array: Array, pattern: str = GAINS) -> bool:
    """Whether an array looks like a norm layer's gain: a vector, by its name.

    Biases and running statistics never are, whatever the ``pattern``.
    """
    return (
        array.ndim == 1
        and gain_pattern(pattern).search(name) is not None
        and _NEVER_GAINS.search(name) is None
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


def number(value: float, spec: str) -> str:
    """``format`` without a sign before nan."""
    return "nan" if math.isnan(value) else format(value, spec)


def stats_card(stats: QuantizationStats) -> dict[str, str]:
    """The statistics of a quantization, by label, as text."""
    return {
        "elements": f"{stats.elements:,}",
        "blocks": f"{stats.blocks:,}",
        "elements in NaN blocks, or Inf": f"{stats.nonfinite:,}",
        "elements saturated (before rounding)": f"{100 * stats.saturated:.3f} %",
        "block maxima saturated": f"{100 * stats.saturated_blocks:.3f} %",
        "elements flushed to zero": f"{100 * stats.flushed:.3f} %",
        "relative mean squared error": number(stats.relative_error, ".4g"),
        "effective bits": number(stats.effective_bits, "z.2f"),
        "aligned gain - 1 (coherent bias)": number(stats.gain - 1, "+z.5f"),
    }


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
    from matplotlib.ticker import MaxNLocator

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
        _error_by_magnitude(right, np.log2(magnitude), error)
    # not a logarithmic axis: its margins leave the range of float64 where |x| is near the end
    right.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    right.xaxis.set_major_formatter(lambda exponent, _: _power(exponent))
    right.set_xlabel("|x|")
    right.set_ylabel("relative error")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{q.format.name}, scale rule {q.scale_rule}, n = {source.size}", fontsize=9)
    figure.savefig(out, dpi=160)
    plt.close(figure)
    return out


def _power(exponent: float) -> str:
    """A power of two, in decimals where its exponent is none."""
    return f"$2^{{{exponent:g}}}$" if exponent == round(exponent) else f"{2.0**exponent:.4g}"


def _error_by_magnitude(axis: Any, exponent: Array, error: Array) -> None:
    """Median and 10-90 % of the error in eighth-binade bins of log2 |x|."""
    bins = np.floor(8 * exponent).astype(int)
    order = np.argsort(bins, kind="stable")
    edges = np.flatnonzero(np.diff(bins[order])) + 1
    groups = [g for g in np.split(order, edges) if g.size >= 5]
    if len(groups) < 3:  # a line through two bins shows nothing: the elements, a few thousand
        some = slice(None, None, max(exponent.size // 4000, 1))
        axis.plot(exponent[some], error[some], ".", color="#D55E00", markersize=3)
        return
    centre = np.array([(bins[g[0]] + 0.5) / 8 for g in groups])
    low, middle, high = np.array([np.quantile(error[g], (0.1, 0.5, 0.9)) for g in groups]).T
    axis.fill_between(centre, low, high, alpha=0.25, linewidth=0, color="#D55E00", label="10-90 %")
    axis.plot(centre, middle, color="#D55E00", linewidth=1.1, label="median")
    axis.legend(frameon=False, fontsize=7)
