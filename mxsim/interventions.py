"""What one can do to a run in trouble, as data: the paper's list of changes of precision, and ours.

Su et al. (2025, arXiv:2506.20752) go on from a checkpoint before a spike under another scheme.  An
intervention here makes a ``Change`` (changes.py) from the scheme that a run has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from mxsim.changes import Change
from mxsim.formats import FORMATS
from mxsim.precision import (
    EXACT,
    GEMM_SITES,
    LN_SITES,
    SITES,
    Internals,
    PrecisionScheme,
    SiteFormat,
)

BF16 = SiteFormat("bf16")
BACKWARD = tuple(site for site in GEMM_SITES if "fprop" not in site)
GRADIENTS = tuple(site for site in GEMM_SITES if site.endswith("_dy"))


@dataclass(frozen=True)
class Intervention:
    """A change of scheme, rate, or nothing but one unit in the last place; ``source`` says whose.

    nudge: whether it is a placebo, whose ``replicate`` picks the signs.
    """

    words: str
    source: str
    scheme: Callable[[PrecisionScheme], PrecisionScheme] | None = None
    lr_factor: float = 1.0
    nudge: bool = False

    def change(self, step: int, scheme: PrecisionScheme, replicate: int = 0) -> Change:
        """The change at ``step`` of a run under ``scheme``."""
        return Change(
            step,
            scheme=self.scheme(scheme) if self.scheme else None,
            lr_factor=self.lr_factor,
            nudge=replicate if self.nudge else None,
        )

    def does_nothing(self, scheme: PrecisionScheme) -> bool:
        """Whether it leaves a run under ``scheme`` as it was, bit for bit."""
        change = self.change(0, scheme)
        return change.scheme in (None, scheme) and change.lr_factor == 1 and change.nudge is None


def each_site(
    scheme: PrecisionScheme,
    sites: tuple[str, ...],
    new: Callable[[SiteFormat], SiteFormat],
) -> PrecisionScheme:
    """The scheme with ``new`` of the format at each of ``sites``, overrides included."""
    overrides = tuple(
        (block, site, new(value) if site in sites else value)
        for block, site, value in scheme.overrides
    )
    fields = {site: new(getattr(scheme, site)) for site in sites}
    return replace(scheme, **fields, overrides=overrides)  # type: ignore[arg-type]


def _bf16(value: SiteFormat) -> SiteFormat:
    return BF16 if value.format in FORMATS else value


def _rceil(value: SiteFormat) -> SiteFormat:
    return replace(value, scale_rule="rceil")  # without effect where there is no E8M0 scale


def _stochastic(value: SiteFormat) -> SiteFormat:
    return replace(value, rounding="stochastic") if value.format in FORMATS else value


def _quarter(value: SiteFormat) -> SiteFormat:
    """A quarter of the block (32 -> 8, 16 x 16 -> 8 x 8); one scale a tensor stays."""
    if value.format not in FORMATS:
        return value
    size = value.block_size or FORMATS[value.format].block_size
    if isinstance(size, tuple):
        return replace(value, block_size=(max(size[0] // 2, 1), max(size[1] // 2, 1)))
    return replace(value, block_size=max(size // 4, 1)) if isinstance(size, int) else value


def _activations(*operands: str) -> Callable[[PrecisionScheme], PrecisionScheme]:
    sites = tuple(f"{layer}_{operand}" for layer in ("fc1", "fc2") for operand in operands)
    return lambda scheme: each_site(scheme, sites, _bf16)


def _full_precision(scheme: PrecisionScheme) -> PrecisionScheme:
    return PrecisionScheme()


def _bump(scheme: PrecisionScheme) -> PrecisionScheme:
    return each_site(scheme, SITES, _rceil)


def _layer_norm(scheme: PrecisionScheme) -> PrecisionScheme:
    return replace(
        each_site(scheme, LN_SITES, lambda _: EXACT),
        forward=replace(scheme.forward, layer_norm="exact"),
        backward=replace(scheme.backward, layer_norm="exact"),
    )


def _exact_backward(scheme: PrecisionScheme) -> PrecisionScheme:
    exact = each_site(scheme, BACKWARD, lambda _: EXACT)
    return replace(
        exact,
        backward=Internals(),
        backward_operands="requantize",
        hadamard="none",
        gradients="exact",
    )


def _activation_function(scheme: PrecisionScheme) -> PrecisionScheme:
    return replace(
        scheme,
        forward=replace(scheme.forward, activation="exact"),
        backward=replace(scheme.backward, activation="exact"),
    )


def _stochastically(scheme: PrecisionScheme) -> PrecisionScheme:
    return each_site(scheme, GRADIENTS, _stochastic)


def _small_blocks(scheme: PrecisionScheme) -> PrecisionScheme:
    return each_site(scheme, SITES, _quarter)


def _rotated(scheme: PrecisionScheme) -> PrecisionScheme:
    wgrad = [site for site in GEMM_SITES if "wgrad" in site]
    values = [getattr(scheme, site) for site in wgrad]
    values += [value for _, site, value in scheme.overrides if site in wgrad]
    nothing = all(value == EXACT for value in values)  # exact operands are not rotated
    return scheme if nothing else replace(scheme, hadamard="random")


PAPER = "Su et al. 2025"
OURS = "mxsim"

INTERVENTIONS: Mapping[str, Intervention] = MappingProxyType(
    {
        "none": Intervention("nothing: the control, the run again bit for bit", "control"),
        "placebo": Intervention("every weight one unit in the last place", "control", nudge=True),
        "full_precision": Intervention("everything exact", PAPER, _full_precision),
        "rceil": Intervention("the exponent bumped where a block overflows", PAPER, _bump),
        "ln_exact": Intervention("layer norm exact", PAPER, _layer_norm),
        "bf16_activations_forward": Intervention(
            "bf16 activations in the forward pass", PAPER, _activations("fprop_x")
        ),
        "bf16_activations": Intervention(
            "bf16 activations and their gradients, forward and backward",
            PAPER,
            _activations("fprop_x", "wgrad_x", "dgrad_dy", "wgrad_dy"),
        ),
        "exact_backward": Intervention("no quantization in backward", PAPER, _exact_backward),
        "activation_exact": Intervention(
            "the activation function exact", PAPER, _activation_function
        ),
        "bf16_weights": Intervention(
            "bf16 weights in the forward pass (as their script has it)",
            PAPER,
            _activations("fprop_w"),
        ),
        "lower_lr": Intervention("half the learning rate", OURS, lr_factor=0.5),
        "stochastic": Intervention(
            "stochastic rounding of gradient operands", OURS, _stochastically
        ),
        "small_blocks": Intervention("blocks of a quarter of the size", OURS, _small_blocks),
        "hadamard": Intervention("wgrad's operands rotated, random signs", OURS, _rotated),
    }
)
