"""Precision cards: what a scheme rounds, where, to what, how, and along which axis, in words.

A card is data, rows of text derived from the scheme; the command line only prints it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from mxsim.formats import FORMATS
from mxsim.precision import (
    GEMM_SITES,
    LN_SITES,
    OPERANDS,
    SITES,
    Internals,
    PrecisionScheme,
    SiteFormat,
)


@dataclass(frozen=True)
class Row:
    """One tensor on a card; "-" where a column does not apply."""

    tensor: str
    used_in: str
    format: str
    scale: str = "-"
    rounding: str = "-"
    blocks: str = "-"
    axis: str = "-"


LEGEND = (
    "fc1: hidden = phi(w1 x), x the layer norm's output; fc2: w2 hidden + b2. Each is y = x w^T in "
    "fprop, dx = dy w in dgrad, dw = dy^T x in wgrad; blocks lie along the axis a GEMM sums over."
)

# operand -> (tensor, GEMM, the axis it contracts)
_OPERANDS = {
    "fprop_x": ("x", "fprop", "in"),
    "fprop_w": ("w", "fprop", "in"),
    "dgrad_dy": ("dy", "dgrad", "out"),
    "dgrad_w": ("w", "dgrad", "out"),
    "wgrad_dy": ("dy", "wgrad", "batch"),
    "wgrad_x": ("x", "wgrad", "batch"),
}

# internal -> (forward tensor, backward tensor)
_INTERNALS = {
    "gemm_in": ("x, w before their sites", "x, w, dy before sites"),
    "gemm_out": ("GEMM results y", "GEMM results dx, dw"),
    "bias": ("b2, and y + b2", "db2"),
    "layer_norm": ("layer norm, every step", "layer norm, every step"),
    "activation": ("activation, every step", "activation, every step"),
    "residual": ("residual stream", "its gradient"),
}


def site_cells(site: SiteFormat, axis: str) -> tuple[str, str, str, str, str]:
    """(format, scale, rounding, blocks, axis) of one site."""
    if site.format == "exact":
        return "exact", "-", "-", "-", "-"
    rounding = {"even": "ties to even", "away": "ties away", "zero": "toward zero"}
    how = rounding.get(site.rounding, site.rounding)
    form = FORMATS.get(site.format)
    if form is None:
        return site.format, "-", how, "-", "each element"
    size = form.block_size if site.block_size is None else site.block_size
    scale = f"E8M0, {site.scale_rule}" if form.scale == "e8m0" else "E4M3 x float32"
    if isinstance(size, tuple):
        return site.format, scale, how, f"{size[0]} x {size[1]}", "both"
    return site.format, scale, how, str(size), "all" if size == "tensor" else axis


def precision_card(scheme: PrecisionScheme) -> list[Row]:
    """The rows of a scheme's card, in the order of a training step."""
    rows = []
    for operand in OPERANDS:
        tensor, gemm, axis = _OPERANDS[operand]
        cells = {fc: site_cells(getattr(scheme, f"{fc}_{operand}"), axis) for fc in ("fc1", "fc2")}
        if cells["fc1"] == cells["fc2"]:
            rows.append(Row(f"{tensor} of fc1, fc2", gemm, *cells["fc1"]))
        else:
            rows += [Row(f"{tensor} of {fc}", gemm, *cells[fc]) for fc in ("fc1", "fc2")]
    for site, tensor in (("ln_gamma", "gamma"), ("ln_beta", "beta")):
        rows.append(
            Row(f"layer norm's {tensor}", "both", *site_cells(getattr(scheme, site), "features"))
        )
    for block, site, value in scheme.overrides:
        operand = site.split("_", 1)[1]
        axis = _OPERANDS[operand][2] if operand in _OPERANDS else "features"
        rows.append(Row(site, f"block {block}", *site_cells(value, axis)))
    how = {"even": "ties to even", "away": "ties away", "zero": "toward zero"}
    ties = how[scheme.internal_rounding]

    def plain(tensor: str, used_in: str, value: str) -> Row:
        rounded = value.startswith("bf16")
        return Row(tensor, used_in, value, rounding=ties if rounded else "-")

    for name, (forward, backward) in _INTERNALS.items():
        for words, direction in ((forward, "forward"), (backward, "backward")):
            value = getattr(getattr(scheme, direction), name)
            rows.append(plain(words, direction, value))
    rows += [
        plain("gradients", "optimizer", scheme.gradients),
        plain("moments", "optimizer", scheme.moments),
        plain("master weights", "optimizer", scheme.master_weights),
    ]
    return rows


def remarks(scheme: PrecisionScheme) -> list[str]:
    """What a table of tensors does not say: accumulation, copies, rotation, faults."""
    lines = [
        "accumulation: GEMMs in float32 (BLAS, the run's dtype); layer-norm and bias sums in the "
        "run's dtype; the loss in float64"
    ]
    if scheme.backward_operands == "reuse":
        lines.append("dgrad's w and wgrad's x start from the forward's dequantized copies")
    else:
        lines.append("dgrad's w and wgrad's x are requantized from high precision")
    if scheme.hadamard != "none":
        signs = "one vector a run" if scheme.hadamard == "fixed" else "new each step and layer"
        lines.append(
            f"wgrad's operands are rotated along the batch before their sites: Hadamard of "
            f"{scheme.hadamard_size}, random signs, {signs}"
        )
    if scheme.frozen_beta:
        lines.append("known fault, on: beta gets no gradient")
    if scheme.quantized_teacher:
        line = "known fault, on: the teacher's targets pass through the forward arithmetic"
        if scheme.forward.activation != "exact":
            line += ", with the activation in bf16 steps (GELU in its sigmoid form)"
        lines.append(line)
    return lines


def differences(a: PrecisionScheme, b: PrecisionScheme) -> list[tuple[str, str, str]]:
    """(field, in a, in b) of every field in which two schemes differ; sites alike in one row."""
    sites: dict[tuple[str, str], list[str]] = {}
    for site in SITES:
        one, other = getattr(a, site), getattr(b, site)
        if one != other:
            sites.setdefault((_words(one), _words(other)), []).append(site)
    found = [(_site_names(names), *words) for words, names in sites.items()]
    for field in dataclasses.fields(PrecisionScheme):
        one, other = getattr(a, field.name), getattr(b, field.name)
        if one == other or field.name in SITES:
            continue
        if isinstance(one, Internals):
            for part in dataclasses.fields(Internals):
                x, y = getattr(one, part.name), getattr(other, part.name)
                if x != y:
                    found.append((f"{field.name}.{part.name}", x, y))
        else:
            found.append((field.name, _words(one), _words(other)))
    return found


def _site_names(names: list[str]) -> str:
    """Site names in few words: fc1 and fc2 together, all twelve GEMM sites as such."""
    if set(names) >= set(GEMM_SITES):
        return ", ".join(["the 12 GEMM sites", *(n for n in names if n in LN_SITES)])
    both = [o for o in OPERANDS if {f"fc1_{o}", f"fc2_{o}"} <= set(names)]
    paired = {f"{fc}_{o}" for fc in ("fc1", "fc2") for o in both}
    words = [f"fc1, fc2 {o}" for o in both]
    return "\n".join(words + [n for n in names if n not in paired])


def _words(value: Any) -> str:
    if isinstance(value, SiteFormat):
        cells = site_cells(value, "")
        return ", ".join(cell for cell in cells if cell not in ("-", ""))
    if isinstance(value, tuple):
        return "; ".join(f"block {b} {s}: {_words(v)}" for b, s, v in value) or "none"
    return str(value)
