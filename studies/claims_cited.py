"""What other studies' stored results say of the claims: claim 7, part of claim 1, citations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mxsim.stats import NOTHING, Estimate
from mxsim.survival import restricted
from studies import interventions, phase_diagrams, quantized_edge, touchy_settings
from studies.claims import Reading, Results
from studies.claims_verdicts import Finding, Verdict, Word, finding

DIAGRAMS: dict[int, tuple[phase_diagrams.Name, ...]] = {
    1: ("lr_depth",),
    2: ("lr_depth", "lr_width"),
    3: ("activation_norm",),
    4: ("activation_norm",),
    8: ("lr_format",),
    9: ("format_block",),
    11: ("lr_init", "lr_optimizer"),
}
LESS = ("fp8_e5m2", "fp6_e2m3", "fp6_e3m2", "fp4_e2m1")  # said to be less stable than E4M3
# Of quantized_edge.py: (group, label).  Of a claim: pairs of which it would have the second settle
# at a lower edge, over its exact runs', than the first; None: the exact runs themselves.
Where = tuple[str, str]
PLAIN: Where = ("GD", "gemm fp8_e4m3")
OPTIMIZERS = ("GD", "heavy ball", "Adam")
EDGES: dict[int, tuple[tuple[Where | None, Where], ...]] = {
    1: tuple((None, (group, "all fp8_e4m3")) for group in OPTIMIZERS),
    2: ((PLAIN, ("GD", "gemm e4m3, depth 4")), (PLAIN, ("GD", "gemm e4m3, width 64"))),
    3: tuple((None, (group, "ln fp8_e4m3")) for group in OPTIMIZERS),
    4: ((PLAIN, ("GD", "gemm e4m3, swiglu")),),
    8: tuple((PLAIN, ("GD", f"gemm {name}")) for name in LESS),
    9: ((("GD", "gemm e4m3 block 8"), ("GD", "gemm e4m3 block 128")),),
    11: tuple((PLAIN, (group, "gemm fp8_e4m3")) for group in ("heavy ball", "Adam")),
    12: tuple((None, ("Adam", what)) for what in ("all fp8_e4m3", "gemm fp4_e2m1")),
}
SMALLER = (
    "It measures how flat a region training settles in: a ratio of r is a quantized gradient that "
    "acts as a rate 1/r times as high would."
)


def cited(number: int, results: Results) -> Iterator[str]:
    """Sentences on a claim from the phase diagrams and the quantized edge."""
    tier = _tier(results)
    for name in DIAGRAMS.get(number, ()):
        study = f"phase_diagrams --diagrams {name}"
        yield from _or_missing(study, partial(_diagram, name, tier, results.root))
    yield from _or_missing("quantized_edge", partial(_edge, number, tier, results.root))


def _tier(results: Results) -> Any:
    """The tier of the studies that have no cluster tier."""
    return "smoke" if results.tier == "smoke" else "laptop"


def _or_missing(study: str, sentences: Callable[[], list[str]]) -> list[str]:
    try:
        return sentences()
    except FileNotFoundError:
        return [f"`python -m studies.{study}`: missing, not run at this tier."]


@lru_cache(maxsize=16)
def _comparison(name: phase_diagrams.Name, tier: Any, root: Path) -> phase_diagrams.Comparison:
    return phase_diagrams.compare(phase_diagrams.load(name, tier, root))


def _diagram(name: phase_diagrams.Name, tier: Any, root: Path) -> list[str]:
    """How exact and MX (as in paper_text) compare over a phase diagram."""
    c = _comparison(name, tier, root)
    return [
        f"`python -m studies.phase_diagrams --diagrams {name}`: of {c.pairs} pairs {c.both} fail "
        f"in both arms, {c.mx_only} in MX only, {c.exact_only} in exact only; MX minus exact share "
        f"{c.difference}, {c.difference.n} seeds."
    ]


@lru_cache(maxsize=2)
def _edges(tier: Any, root: Path) -> quantized_edge.Results:
    return quantized_edge.load(tier, root)


def _edge(number: int, tier: Any, root: Path) -> list[str]:
    """What the quantized edge of stability says of a claim."""
    found = _edges(tier, root)
    if number == 5:
        parts = []
        for name in ("descent", "displaced"):
            ratio = found.relative(name, ("GD",))
            if len(ratio):
                words = quantized_edge.PREDICTORS[name].split(":")[0]
                parts.append(f"{words} {sorted(ratio)[len(ratio) // 2]:.2f} (n {len(ratio)})")
        return [f"Quantized edge, measured over predicted, gradient descent: {', '.join(parts)}."]
    pairs = [
        pair for pair in EDGES.get(number, ()) if all(at in found.readings for at in pair if at)
    ]
    if not pairs:
        return ["Quantized edge: it has measured nothing of this claim."]
    parts = [told(found, *pair) for pair in pairs]
    return [f"Quantized edge, ηS over exact's: {'; '.join(parts)}. {SMALLER}"]


def told(found: quantized_edge.Results, high: Where | None, low: Where) -> str:
    """Two edges over their exact ones, and whether the claim has their order right."""
    one, other = _over_exact(found, high), _over_exact(found, low)
    if other.high < one.low:
        word = "lower, as the claim would have it"
    elif other.low > one.high:
        word = "higher, against the claim"
    else:
        word = "not told apart"
    against = f"{', '.join(high)} {one}" if high else "1"
    return f"{', '.join(low)} {other} (n {other.n}) against {against}: {word}"


def _over_exact(found: quantized_edge.Results, at: Where | None) -> Estimate:
    """The measured edge over the exact runs'."""
    if at is None:
        return Estimate(1.0, 1.0, 1.0, 0)
    exact = found.exact_edge(*at)
    return quantized_edge.over_seeds(found.readings[at], lambda r: r.measured / exact)


# ---------------------------------------------------------------- decided from others' results


def searched(results: Results) -> tuple[Finding, ...]:
    """Part of claim 1: the settings that studies/touchy_settings.py found, on its fresh seeds.

    Not corrected yet.  One finding without pairs if its results are missing.
    """
    words = "failure, MX against exact"
    try:
        found = touchy_settings.load(_tier(results), results.root)
    except FileNotFoundError:
        where = "searched: missing, run python -m studies.touchy_settings"
        return (
            Finding("precision-induced", "paper_text", where, words, NOTHING, np.nan, "missing"),
        )
    rest = "{} fail in both, {} in MX only, {} in exact only"
    return tuple(
        finding(
            "precision-induced",
            "paper_text",
            f"searched: {p.setting.name}",
            words,
            [1] * p.mx_only + [-1] * p.exact_only + [0] * (p.n - p.mx_only - p.exact_only),
            rest.format(p.both, p.mx_only, p.exact_only),
        )
        for p in found.confirmed
    )


def averted(results: Results) -> Verdict:
    """Claim 7, from the interventions' own study."""
    title = "Changing the precision midway averts or delays the divergence"
    paper = (
        "From a checkpoint before the divergence, higher precision, or a bumped exponent, averts "
        "or delays it; shortly before, it is too late."
    )
    rule = (
        "Steps gained over the placebo (one unit in the last place) of the same seed, paired "
        "permutation test, corrected over interventions and leads (Benjamini and Hochberg); holds "
        "if q < 0.05 and the gain is positive, not seen if the gain's interval ends below a tenth "
        "of the horizon."
    )
    tier = _tier(results)
    of_code = tier if tier == "smoke" else f"{tier}_code"
    found, notes = _averted("paper_text", tier, results.root)
    more, more_notes = _averted("paper_code", of_code, results.root)
    return Verdict(7, title, paper, rule, (*found, *more), (*notes, *more_notes))


@lru_cache(maxsize=2)
def _interventions(tier: Any, root: Path) -> interventions.Results:
    """Two claims read it."""
    return interventions.load(tier, root)


def _averted(reading: Reading, tier: Any, root: Path) -> tuple[list[Finding], list[str]]:
    """Each intervention at each lead under one reading, and what to say of them.

    At the smoke tier the readings share one setting.
    """
    try:
        stored = _interventions(tier, root)
    except FileNotFoundError as error:
        run = f"python -m studies.interventions --tier {tier}"
        return [], [f"{reading}: missing, {str(error).split(' in ')[0]}; run {run}"]
    found = []
    for (lead, name), arm in stored.arms.items():
        if name in ("none", "placebo"):
            continue
        counts = ", ".join(f"{n} {word}" for word, n in arm.outcomes.items() if n)
        found.append(
            Finding(
                "measured",
                reading,
                f"{lead} steps before",
                name,
                arm.gain,
                arm.paired,
                gained(arm.gain, arm.q, stored.design.horizon),
                arm.q,
                counts,
            )
        )
    setting = stored.design.setting.name
    n, tried = len(stored.used), stored.tried
    note = f"{reading}: {setting}; of {tried} runs {n} diverge late enough to be changed."
    return found, [note, *too_late(found)]


def rate_against_precision(results: Results) -> tuple[Finding, ...]:
    """Part of claim 12: half the rate against full precision, midway; not corrected yet."""
    try:
        stored = _interventions(_tier(results), results.root)
    except FileNotFoundError:
        where = "midway: missing, run python -m studies.interventions"
        words = "half the rate against exact"
        return (Finding("measured", "paper_text", where, words, NOTHING, np.nan, "missing"),)
    found = []
    for lead in stored.design.leads:
        arms = [stored.arms[lead, name] for name in ("lower_lr", "full_precision")]
        lower, exact = (restricted(arm.times, stored.design.horizon) for arm in arms)
        averted = [arm.outcomes["averted"] for arm in arms]
        found.append(
            finding(
                "measured",
                "paper_text",
                f"midway, {lead} steps before",
                "half the rate against exact, who lasts longer",
                np.sign(lower - exact).tolist(),
                f"averted {averted[0]} and {averted[1]} of {len(lower)}",
            )
        )
    return tuple(found)


def gained(gain: Estimate, q: float, horizon: int) -> Word:
    """The word for an intervention's gain over the placebo."""
    if not gain.n or np.isnan(q):
        return "undecided"
    if q < 0.05:
        return "holds" if gain.value > 0 else "opposite"
    return "not seen" if gain.high < horizon / 10 else "undecided"


def too_late(found: Sequence[Finding]) -> Iterator[str]:
    """Lead by lead, which interventions beat the placebo."""
    for lead in dict.fromkeys(f.task for f in found):
        names = [f.words for f in found if f.task == lead and f.word == "holds"]
        reading = found[0].reading
        yield f"Better than the placebo, {reading}, {lead}: {', '.join(names) or 'nothing'}."
