"""Precision schemes by name: data, each with its source and all its sites spelled out.

fc1 and fc2 are treated alike, so eight entries spell out fourteen sites.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mxsim.formats import FORMATS, choose
from mxsim.precision import EXACT, OPERANDS, SITE_FORMATS, Internals, PrecisionScheme, SiteFormat


@dataclass(frozen=True)
class Preset:
    """A named scheme and where it comes from."""

    scheme: PrecisionScheme
    source: str


def sites(
    fprop_x: SiteFormat,
    fprop_w: SiteFormat,
    dgrad_dy: SiteFormat,
    dgrad_w: SiteFormat,
    wgrad_dy: SiteFormat,
    wgrad_x: SiteFormat,
    ln_gamma: SiteFormat,
    ln_beta: SiteFormat,
) -> PrecisionScheme:
    """A scheme of these fourteen sites, fc1 and fc2 alike."""
    six = (fprop_x, fprop_w, dgrad_dy, dgrad_w, wgrad_dy, wgrad_x)
    both = {
        f"{layer}_{operand}": value
        for layer in ("fc1", "fc2")
        for operand, value in zip(OPERANDS, six, strict=True)
    }
    return PrecisionScheme(**both, ln_gamma=ln_gamma, ln_beta=ln_beta)  # type: ignore[arg-type]


BF16 = SiteFormat("bf16")
E4M3 = SiteFormat("mxfp8_e4m3")
E4M3_AWAY = SiteFormat("mxfp8_e4m3", rounding="away")
E5M2 = SiteFormat("mxfp8_e5m2")
NVFP4 = SiteFormat("nvfp4")
NVFP4_2D = SiteFormat("nvfp4", block_size=(16, 16))
NVFP4_SR = SiteFormat("nvfp4", rounding="stochastic")

_SHORT = {  # e4m3 -> mxfp8_e4m3
    name.split("_")[-1].removeprefix("mx"): name
    for name in FORMATS
    if name.startswith("mx") and name != "mxint8_asymmetric"
}


def _gemm(q: SiteFormat) -> PrecisionScheme:
    return sites(
        fprop_x=q,
        fprop_w=q,
        dgrad_dy=q,
        dgrad_w=q,
        wgrad_dy=q,
        wgrad_x=q,
        ln_gamma=EXACT,
        ln_beta=EXACT,
    )


def _all(q: SiteFormat) -> PrecisionScheme:
    return replace(_gemm(q), ln_gamma=q, ln_beta=q)


def _ln_only(q: SiteFormat) -> PrecisionScheme:
    return replace(_gemm(EXACT), ln_gamma=q, ln_beta=q)


_BF16_STEPS = Internals("bf16", "bf16", "bf16", "bf16", "bf16", "bf16")


def paper_code(
    fwd: str = "mxfp8_e4m3",
    bwd: str | None = None,
    acts: str | None = None,
    weights: str | None = None,
    backward: str = "mx",
) -> PrecisionScheme:
    """The arithmetic of the MX phase of the paper's released script, its faults included.

    fwd, bwd: element formats of the forward and the backward pass; ``bwd`` defaults to ``fwd``.
    wgrad's x has the forward format: the script never sets the library's field for it.
    acts="bf16": x and dy bf16, so that weights alone are MX.  weights="bf16": the forward weight
    bf16; the backward weight stays MX.  backward="exact": nothing is rounded in backward.

    No block format touches layer norm, whose steps are bf16; ties go away from zero; beta gets no
    gradient; the teacher is quantized.  GELU and ReLU of the student stay as they are.
    Raises ValueError or TypeError naming the argument, the value and what is allowed.
    """
    choose("fwd", fwd, SITE_FORMATS)
    choose("bwd", fwd if bwd is None else bwd, SITE_FORMATS)
    choose("acts", fwd if acts is None else acts, SITE_FORMATS)
    choose("weights", fwd if weights is None else weights, SITE_FORMATS)
    choose("backward", backward, ("mx", "exact"))

    def away(name: str) -> SiteFormat:
        return SiteFormat(name, rounding="away")

    exact = backward == "exact"
    scheme = sites(
        fprop_x=away(acts or fwd),
        fprop_w=away(weights or fwd),
        dgrad_dy=EXACT if exact else away(acts or bwd or fwd),
        dgrad_w=EXACT if exact else away(bwd or fwd),
        wgrad_dy=EXACT if exact else away(acts or bwd or fwd),
        wgrad_x=EXACT if exact else away(acts or fwd),
        ln_gamma=EXACT,
        ln_beta=EXACT,
    )
    steps = replace(_BF16_STEPS, activation="bf16_gate", residual="exact")
    return replace(
        scheme,
        forward=steps,
        backward=Internals() if exact else steps,
        internal_rounding="away",
        frozen_beta=True,
        quantized_teacher=True,
    )


_NAMED = {
    "exact": Preset(_gemm(EXACT), "nothing is rounded: the twin that others are compared with"),
    "bf16": Preset(
        replace(_all(BF16), forward=_BF16_STEPS, backward=_BF16_STEPS),
        "mixed-precision bf16: every operand and every vector step bf16, ties to even; float32 "
        "accumulation, master weights and moments",
    ),
    "mx_mix": Preset(
        sites(
            fprop_x=E4M3,
            fprop_w=E4M3,
            dgrad_dy=E5M2,
            dgrad_w=E5M2,
            wgrad_dy=E5M2,
            wgrad_x=E4M3,  # as in the script: the forward format
            ln_gamma=E4M3,
            ln_beta=E4M3,
        ),
        "Su et al. 2025 (arXiv:2506.20752), 'MX-mix': E4M3 forward, E5M2 backward (dy, and dgrad's "
        "w), but wgrad's x E4M3 as their script computes it",
    ),
    "hybrid_bf16_activations": Preset(
        sites(
            fprop_x=BF16,
            fprop_w=E4M3,
            dgrad_dy=BF16,
            dgrad_w=E4M3,
            wgrad_dy=BF16,
            wgrad_x=BF16,
            ln_gamma=EXACT,
            ln_beta=EXACT,
        ),
        "Su et al. 2025, mitigation: E4M3 weights forward and backward, activations and their "
        "gradients bf16, layer norm exact",
    ),
    "hybrid_forward_only": Preset(
        sites(
            fprop_x=E4M3,
            fprop_w=E4M3,
            dgrad_dy=EXACT,
            dgrad_w=EXACT,
            wgrad_dy=EXACT,
            wgrad_x=EXACT,
            ln_gamma=E4M3,
            ln_beta=E4M3,
        ),
        "Su et al. 2025, mitigation: the forward pass quantized, the backward pass exact (but "
        "through the quantized gamma, by the straight-through rule)",
    ),
    "paper_text": Preset(
        sites(
            fprop_x=E4M3,
            fprop_w=E4M3,
            dgrad_dy=E4M3,
            dgrad_w=E4M3,
            wgrad_dy=E4M3,
            wgrad_x=E4M3,
            ln_gamma=E4M3,
            ln_beta=E4M3,
        ),
        "Su et al. 2025, as the text has it: E4M3 at all fourteen sites, floor, ties to even, "
        "exact internals",
    ),
    "paper_code": Preset(
        paper_code(),
        "Su et al. 2025, as their released script computes (Hither1/systems-scaling, commit "
        "8aa0ac8), faults included; options fwd, bwd, acts, weights, backward",
    ),
    "microxcaling": Preset(
        replace(
            sites(
                fprop_x=E4M3_AWAY,
                fprop_w=E4M3_AWAY,
                dgrad_dy=E4M3_AWAY,
                dgrad_w=E4M3_AWAY,
                wgrad_dy=E4M3_AWAY,
                wgrad_x=E4M3_AWAY,
                ln_gamma=EXACT,
                ln_beta=EXACT,
            ),
            forward=_BF16_STEPS,
            backward=_BF16_STEPS,
            internal_rounding="away",
        ),
        "microsoft/microxcaling as its documentation recommends: E4M3 GEMM operands out of bf16, "
        "ties away, bf16 vector steps; beta trained, no quantized teacher",
    ),
    "mxfp8_rceil": Preset(
        _gemm(SiteFormat("mxfp8_e4m3", scale_rule="rceil")),
        "Mishra et al. 2025, 'Recipes for pre-training LLMs with MXFP8' (arXiv:2506.08027): E4M3 "
        "for weights, activations and gradients, the scale rounded up; the rest in high precision",
    ),
    "nvfp4_recipe": Preset(
        replace(
            sites(
                fprop_x=NVFP4,
                fprop_w=NVFP4_2D,
                dgrad_dy=NVFP4_SR,
                dgrad_w=NVFP4_2D,
                wgrad_dy=NVFP4_SR,
                wgrad_x=NVFP4,
                ln_gamma=EXACT,
                ln_beta=EXACT,
            ),
            hadamard="fixed",
            hadamard_size=16,
        ),
        "NVIDIA 2025, 'Pretraining large language models with NVFP4' (arXiv:2509.25149): "
        "stochastic rounding of gradients, a 16 x 16 Hadamard rotation with one vector of random "
        "signs on wgrad's operands, weights in 16 x 16 blocks; keep chosen blocks in bf16 by "
        "overrides",
    ),
}

_GROUPS: Mapping[str, tuple[Callable[[SiteFormat], PrecisionScheme], str]] = {
    "gemm": (_gemm, "the twelve GEMM sites in {}, floor, ties to even; layer norm exact"),
    "all": (_all, "all fourteen sites in {}, floor, ties to even; internals exact"),
    "ln_only": (_ln_only, "layer norm's gamma and beta in {}, floor, ties to even; GEMMs exact"),
}

PRESETS: Mapping[str, Preset] = MappingProxyType(
    _NAMED
    | {
        f"{group}_{short}": Preset(build(SiteFormat(name)), words.format(name))
        for group, (build, words) in _GROUPS.items()
        for short, name in _SHORT.items()
    }
)
"""Presets by name.  In ``gemm_*``, ``all_*`` and ``ln_only_*``, * is e4m3, e5m2, e3m2, e2m3, e2m1
or int8."""


def scheme(name: str, **options: str) -> PrecisionScheme:
    """The preset of that name (see PRESETS); ``paper_code`` takes the options of ``paper_code()``.

    Raises ValueError for an unknown name, listing the known ones; TypeError if not a string, or for
    an option that the preset does not have.
    """
    choose("scheme", name, PRESETS)
    if not options:
        return PRESETS[name].scheme
    allowed = ("fwd", "bwd", "acts", "weights", "backward") if name == "paper_code" else ()
    for option in options:
        if option not in allowed:
            raise TypeError(
                f"scheme {name!r} takes "
                + (f"the options {', '.join(allowed)}" if allowed else "no options")
                + f"; got {option}={options[option]!r}"
            )
    return paper_code(**options)


def scheme_of(text: str) -> PrecisionScheme:
    """The scheme that ``NAME`` or ``NAME:option=value,option=value`` names, as on a command line.

    Raises as ``scheme`` does, and ValueError for an option without a value.
    """
    name, _, rest = text.partition(":")
    pairs = [part.partition("=") for part in rest.split(",") if part]
    for option, equals, value in pairs:
        if not (option and equals and value):
            raise ValueError(f"options of a scheme must be option=value,...; got {rest!r}")
    return scheme(name, **{option: value for option, _, value in pairs})
