"""The arms of studies/controller.py, as data: levels of the signals, ladders, policies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from mxsim.control import Policy, Trigger
from mxsim.controlled import ControlledRun, Ladder, precision_ladder
from mxsim.interventions import INTERVENTIONS
from mxsim.precision import PrecisionScheme
from studies.touchy_settings import Setting

BELOW = ("cos", "cos_consecutive", "margin")  # signals that fall where there is trouble

LEVELS: Mapping[str, tuple[float, float]] = {  # signal -> (level, quiet)
    "loss_ratio": (3.0, 1.8),
    "grad_ratio": (4.0, 2.5),
    "grad_jump": (4.0, 3.0),
    "gamma_saturated": (0.3, 0.26),
    "cos_consecutive": (-0.9, -0.8),
    "zeta": (2.0, 1.5),
    "cos": (-0.3, 0.0),
    "margin": (0.05, 0.3),
}
PROBES = {"zeta": False, "cos": False, "margin": True}  # signals of a probe: with the margin?


def trigger(signal: str, **more: Any) -> Trigger:
    """The trigger of a signal at its level."""
    level, quiet = LEVELS[signal]
    return Trigger(signal, level, quiet, "below" if signal in BELOW else "above", **more)


@dataclass(frozen=True)
class Arm:
    """How a setting is run: its ladder, its policy, and what is probed."""

    ladder: Callable[[PrecisionScheme], Ladder]
    policy: Policy | None = None
    """Its ladder's names are filled in; None: held at the only rung."""
    probe_every: int | None = None
    margin: bool = False

    def run(self, setting: Setting, seed: int) -> ControlledRun:
        """The arm's run of a setting."""
        ladder = self.ladder(setting.scheme)
        names = tuple(name for name, _ in ladder)
        policy = replace(self.policy, ladder=names) if self.policy else Policy(names)
        warmup = max(policy.warmup, setting.switch)
        return ControlledRun(
            replace(setting.config, seed=seed, eval_samples=_held_out(setting)),
            ladder,
            replace(policy, warmup=warmup),
            self.probe_every,
            self.margin,
            setting.switch,
        )


def _held_out(setting: Setting) -> int:
    """32k samples, but in toy settings."""
    return 32768 if setting.config.width > 16 else setting.config.eval_samples


def fixed(name: str) -> Arm:
    """One precision throughout."""

    def ladder(base: PrecisionScheme) -> Ladder:
        return ((name, INTERVENTIONS[name].change(0, base).scheme or base),)

    return Arm(ladder)


def two_rungs(base: PrecisionScheme) -> Ladder:
    """MX and exact."""
    return (("base", base), ("exact", PrecisionScheme()))


def base_alone(base: PrecisionScheme) -> Ladder:
    """MX throughout."""
    return (("base", base),)


LIMITS = Policy(("filled in",), lock=20, calm=100, window=50, warmup=100)

LATE = Trigger("progress", 0.8, 0.8, to_top=True)

ARMS: Mapping[str, Arm] = {
    "exact": fixed("full_precision"),
    "base": Arm(base_alone, None, 20, True),
    "ln_exact": fixed("ln_exact"),
    "bf16_activations": fixed("bf16_activations"),
    "exact_backward": fixed("exact_backward"),
    "late_exact": Arm(two_rungs, replace(LIMITS, triggers=(LATE,), calm=None)),
    "rollback": Arm(
        base_alone,
        replace(LIMITS, triggers=(Trigger("loss_ratio", 10.0, 2.0, roll_back=True),),
                save_every=50, rollbacks=20),
    ),
    "gnmr": Arm(
        two_rungs,
        replace(
            LIMITS,
            triggers=(trigger("grad_ratio", to_top=True), trigger("grad_jump", to_top=True)),
            lock=10,
            calm=20,
            budget=0.2,
        ),
    ),
    "mxsim": Arm(
        precision_ladder,
        replace(
            LIMITS,
            triggers=(
                trigger("loss_ratio", roll_back=True, to_top=True),
                trigger("grad_ratio", to_top=True),
                LATE,
            ),
            save_every=50,
        ),
    ),
}  # fmt: skip
ABLATIONS: Mapping[str, Arm] = {
    f"only {signal}": Arm(
        two_rungs,
        replace(LIMITS, triggers=(trigger(signal, to_top=True),)),
        20 if signal in PROBES else None,
        PROBES.get(signal, False),
    )
    for signal in LEVELS
}


# Chosen after the first table: what took steps off the cheapest rung there was the last fifth, and
# the rungs between MX and exact on the way down.  Run on seeds that nothing was chosen on.
SECOND: Mapping[str, Arm] = {
    "exact": ARMS["exact"],
    "rollback to exact": Arm(
        two_rungs,
        replace(
            LIMITS,
            triggers=(trigger("loss_ratio", roll_back=True, to_top=True),),
            save_every=50,
        ),
    ),
    "and the last tenth exact": Arm(
        two_rungs,
        replace(
            LIMITS,
            triggers=(
                trigger("loss_ratio", roll_back=True, to_top=True),
                Trigger("progress", 0.9, 0.9, to_top=True),
            ),
            save_every=50,
        ),
    ),
}

EVERY_ARM: Mapping[str, Arm] = {**ARMS, **ABLATIONS, **SECOND}
