"""What quantized_edge.py compares: formats, rules, blocks, sizes, optimizers, controls, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mxsim import SiteFormat, scheme
from mxsim.grid import requantize
from mxsim.precision import GEMM_SITES, LN_SITES, PrecisionScheme
from studies.edge_runs import GradientNoise


@dataclass(frozen=True)
class Condition:
    """What is run, over seeds: its label, the group it is drawn with, and the changes."""

    label: str
    group: str
    config: Mapping[str, Any]
    scheme: PrecisionScheme
    noise: GradientNoise | None = None


def sites(names: tuple[str, ...], fmt: str, **settings: Any) -> PrecisionScheme:
    """The named sites in one format."""
    chosen: dict[str, Any] = dict.fromkeys(names, SiteFormat(fmt, **settings))
    return PrecisionScheme(**chosen)


GD = {"optimizer": "sgd", "lr": 0.4, "steps": 1000}
HEAVY = {"optimizer": "sgd", "lr": 1.5, "momentum": 0.9, "warmup": 50, "steps": 1000}
ADAM = {"optimizer": "adam", "lr": 0.02, "steps": 1000}
EXACT = PrecisionScheme()


def conditions() -> tuple[Condition, ...]:
    """All that is compared: formats, rules, blocks, sizes, optimizers, mini-batches, controls."""
    gemm = {
        fmt: sites(GEMM_SITES, fmt)
        for fmt in ("mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8")
    }
    ln = {fmt: sites(LN_SITES, fmt) for fmt in ("mxfp8_e4m3", "mxfp4_e2m1")}
    e4m3, both = gemm["mxfp8_e4m3"], scheme("all_e4m3")
    found = [Condition("exact", "GD", GD, EXACT)]
    found += [Condition(f"gemm {f[2:]}", "GD", GD, s) for f, s in gemm.items()]
    found += [Condition(f"ln {f[2:]}", "GD", GD, s) for f, s in ln.items()]
    found += [
        Condition("all fp8_e4m3", "GD", GD, both),
        Condition("gemm e4m3 rceil", "GD", GD, requantize(e4m3, scale_rule="rceil")),
        Condition(
            "gemm e2m1 stochastic", "GD", GD, requantize(gemm["mxfp4_e2m1"], rounding="stochastic")
        ),
        Condition("gemm e4m3 block 8", "GD", GD, requantize(e4m3, block_size=8)),
        Condition("gemm e4m3 block 128", "GD", GD, requantize(e4m3, block_size=128)),
    ]
    for label, changes in (
        ("width 64", {"width": 64, "teacher_gain": 5.3}),
        ("depth 4", {"depth": 4}),
        ("swiglu", {"activation": "swiglu", "teacher_activation": "gelu"}),
        ("batch 64 of 512", {"batch": 64, "dataset_size": 512}),
    ):
        found += [
            Condition(f"exact, {label}", "GD", GD | changes, EXACT),
            Condition(f"gemm e4m3, {label}", "GD", GD | changes, e4m3),
        ]
    for group, base in (("heavy ball", HEAVY), ("Adam", ADAM)):
        found += [
            Condition("exact", group, base, EXACT),
            Condition("ln fp8_e4m3", group, base, ln["mxfp8_e4m3"]),
            Condition("gemm fp8_e4m3", group, base, e4m3),
            Condition("all fp8_e4m3", group, base, both),
            Condition("gemm fp6_e3m2", group, base, gemm["mxfp6_e3m2"]),
            Condition("gemm fp4_e2m1", group, base, gemm["mxfp4_e2m1"]),
        ]
    faster = ADAM | {"beta2": 0.99}  # v lags less
    found += [
        Condition("exact, beta2 0.99", "Adam", faster, EXACT),
        Condition("gemm e4m3, beta2 0.99", "Adam", faster, e4m3),
    ]
    for group, base in (("GD control", GD), ("Adam control", ADAM)):
        for kind, mu, s2 in (("common", 0.3, 0.0), ("common", 0.0, 0.25), ("each", 0.0, 0.5)):
            noise = GradientNoise(kind, mu, s2)
            found.append(Condition(f"{kind} mu {mu:g} s2 {s2:g}", group, base, EXACT, noise))
    return tuple(found)
