"""Every figure from stored results, and a contact sheet of them.

    python -m figures.all [--tier smoke|laptop|cluster] [--results DIR] [--only NAME ...]

Draws what it can; the exit status is 1 if any could not be drawn for a missing result, and the
contact sheet then shows those that could.  At the tier cluster figures of the claims' own runs are
of that tier, the others of laptop.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from figures import contact_sheet
from figures.command import launch
from mxsim.formats import not_one_of
from studies import phase_diagrams

Tier = Literal["smoke", "laptop", "cluster"]
OF_THE_CLAIMS = ("last_bin", "losses", "bias_to_divergence", "hybrids")


@dataclass(frozen=True)
class Drawn:
    """A figure: ``script`` in figures/, what it is given, and what it writes beside ``name``.png.

    tiers: where the script's own name of a tier, or the one to be shown, is another.
    """

    name: str
    script: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    tiers: Mapping[str, str] = field(default_factory=dict)
    runs: bool = True  # whether results go into it

    @property
    def files(self) -> tuple[str, ...]:
        """The pictures, the first one first."""
        return (f"{self.name}.png", *self.beside)

    def draw(self, tier: Tier, results: Path, out: Path) -> int:
        """Draw to the folder ``out``; the exit status of the script."""
        script = importlib.import_module(f"figures.{self.script or self.name}")
        given = {**self.given, "out": out / self.files[0]}
        if tier == "cluster" and self.name not in OF_THE_CLAIMS:
            tier = "laptop"
        if self.runs:
            given |= {"tier": self.tiers.get(tier, tier), "results": results}
        return int(script.main(script.Arguments(**given)))


FIGURES: tuple[Drawn, ...] = (
    Drawn("format_codes", runs=False),
    Drawn("last_bin"),
    Drawn("losses", beside=("losses_unit.png", "losses_searched.png")),
    Drawn("activation_norm_losses", "activation_norm"),
    Drawn("bias_to_divergence", beside=("bias_to_divergence_searched.png",)),
    Drawn("interventions"),
    Drawn("interventions_code", "interventions", tiers={"laptop": "laptop_code"}),
    Drawn("hybrids"),
    *(
        Drawn(f"phase_{name}", "phase_diagrams", {"diagram": name})
        for name in get_args(phase_diagrams.Name)
    ),
    Drawn("quantized_edge", beside=("quantized_edge_arms.png",)),
    Drawn("ln_affine_isolation", tiers={"laptop": "long"}),
    Drawn("bias_by_site", beside=("bias_by_site_mechanism.png",)),
    Drawn("bias_vs_scale"),
    Drawn("gamma_cliff", tiers={"laptop": "full"}),
    Drawn("controller"),
    Drawn("edge_of_stability"),
    Drawn("noise_floor"),
    Drawn("noisy_quadratic"),
    Drawn("threshold_prediction"),
)


@dataclass(frozen=True)
class Arguments:
    """Draw every figure from stored results, then the contact sheet."""

    tier: Tier = "laptop"
    """Which of the studies' designs."""
    results: Path = Path("results")
    """Where results are stored."""
    out: Path | None = None
    """The folder to write to; default figures_<tier> in the results' folder."""
    only: tuple[str, ...] = ()
    """Names of the figures to draw; default all."""


def main(arguments: Arguments) -> int:
    """Draw; the exit status is 1 if a result is missing for any figure, 2 for an unknown name."""
    names = tuple(each.name for each in FIGURES)
    for name in arguments.only:
        if name not in names:
            print(not_one_of("a name of --only", name, names), file=sys.stderr)
            return 2
    out = arguments.out or arguments.results / f"figures_{arguments.tier}"
    wanted = [each for each in FIGURES if not arguments.only or each.name in arguments.only]
    absent, pictures = [], []
    for each in wanted:
        if each.draw(arguments.tier, arguments.results, out):
            absent.append(each.name)
        else:
            pictures += [out / name for name in each.files]
    if pictures:
        print(contact_sheet.draw(pictures, out / f"{contact_sheet.NAME}.png"))
    if absent:
        print(f"not drawn for missing results: {', '.join(absent)}", file=sys.stderr)
    return 1 if absent else 0


if __name__ == "__main__":
    launch(main, Arguments, "all")
