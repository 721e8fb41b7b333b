"""What other studies' stored results say of the claims: part of claim 1, and citations."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mxsim.boundary import Threshold
from mxsim.grid import Cell
from mxsim.stats import NOTHING, Estimate, mean_over_seeds
from mxsim.store import Record, Store
from mxsim.sweep import load_points
from studies import phase_diagrams, quantized_edge, touchy_settings
from studies.claims import Reading, Results, failed_at
from studies.claims_verdicts import Finding, Word, finding, room_of

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
}
SMALLER = (
    "It measures how flat a region training settles in: a ratio of r is a quantized gradient that "
    "acts as a rate 1/r times as high would."
)


def cited(number: int, results: Results) -> Iterator[str]:
    """Sentences on a claim from the phase diagrams and the quantized edge."""
    tier = tier_elsewhere(results)
    for name in DIAGRAMS.get(number, ()):
        study = f"phase_diagrams --diagrams {name}"
        yield from _or_missing(study, partial(_diagram, name, tier, results.root))
    yield from _or_missing("quantized_edge", partial(_edge, number, tier, results.root))


def tier_elsewhere(results: Results) -> Any:
    """The tier of the studies that have no cluster tier."""
    return "smoke" if results.tier == "smoke" else "laptop"


def _or_missing(study: str, sentences: Callable[[], list[str]]) -> list[str]:
    try:
        return sentences()
    except FileNotFoundError:
        return [f"`python -m studies.{study}`: missing, not run at this tier."]


@lru_cache(maxsize=16)
def _diagram(name: phase_diagrams.Name, tier: Any, root: Path) -> list[str]:
    """How exact and MX (as in paper_text) compare over a phase diagram, by this page's failures."""
    found = phase_diagrams.load(name, tier, root)
    it, arms = found.diagram, phase_diagrams.ARMS
    cells = [(x, y) for x in it.x.labels for y in it.y.labels]
    runs: list[list[tuple[Record, Record]]] = []  # by seed: (exact, MX) of each cell
    for seed in range(it.grid.seeds):
        pairs = [[found.records[Cell(c, arm, seed)] for arm in arms] for c in cells]
        runs.append([(exact, mx) for exact, mx in pairs if exact is not None and mx is not None])
    fates = [[tuple(failed_at(run) is not None for run in pair) for pair in each] for each in runs]
    every = [fate for each in fates for fate in each]
    both, mx, exact = (every.count(at) for at in ((True, True), (False, True), (True, False)))
    difference = mean_over_seeds(np.array([np.mean([b - a for a, b in each]) for each in fates]))
    different = len({pair[0].id for each in runs for pair in each})
    half = [
        f"{it.x.name} {x}: {'; '.join(str(found.thresholds[x, arm]) for arm in arms)}"
        for x in it.x.labels
        if all((x, arm) in found.thresholds for arm in arms)
    ]
    return [
        f"`python -m studies.phase_diagrams --diagrams {name}`: of {len(every)} pairs ({different} "
        f"different exact runs) {both} fail in both arms, {mx} in MX only, {exact} in exact only; "
        f"MX minus exact share {difference}, {difference.n} seeds. Failed as on this page; the "
        "diagram also counts what has not learned by its end."
        + (f" By that, half fail above the rate (exact; MX): {', '.join(half)}." if half else "")
    ]


def critical_rates(
    results: Results, name: phase_diagrams.Name, one: object, other: object
) -> list[Finding]:
    """Part of claim 2: is the rate at which half of the runs fail lower at ``one`` than ``other``?

    For reference: from a traced phase diagram, whose failures are nearly all runs that have not
    learned by their end.
    Ratios of critical rates, with the ends of both intervals; where one is only bounded, its bound.
    Nothing if the diagram's results are missing.
    """
    try:
        found = phase_diagrams.load(name, tier_elsewhere(results), results.root)
    except FileNotFoundError:
        return []
    what = found.diagram.x.name
    if any(
        (str(x), arm) not in found.thresholds for x in (one, other) for arm in phase_diagrams.ARMS
    ):
        return []
    exact, mx = (
        _over(found.thresholds[str(one), arm], found.thresholds[str(other), arm])
        for arm in phase_diagrams.ARMS
    )
    words = f"critical rate, {what} {one} over {other}"
    bounded = any(
        math.isnan(found.thresholds[str(x), arm].value)
        for x in (one, other)
        for arm in phase_diagrams.ARMS
    )
    return [
        Finding(
            "reference",
            reading,
            f"phase diagram {name}",
            say,
            ratio,
            np.nan,
            decide_below_one(ratio),
            detail="of failing or not learning" + ("; at most, one is only bounded" * bounded),
        )
        for reading, say, ratio in (
            ("", words, exact),
            ("paper_text", f"{words}, MX's over exact's", _ratio(mx, exact)),
        )
        if math.isfinite(ratio.high)  # else both are bounded alone, and nothing is known
    ]


def _over(one: Threshold, other: Threshold) -> Estimate:
    """The ratio of two critical rates; of a bounded one, its bound."""
    value, reference = (t.low if math.isnan(t.value) else t.value for t in (one, other))
    high = one.high / other.low if other.low else math.inf
    return Estimate(value / reference, one.low / other.high, high, one.n + other.n)


def _ratio(one: Estimate, other: Estimate) -> Estimate:
    low = one.low / other.high if other.high else math.nan
    high = one.high / other.low if other.low else math.inf
    return Estimate(one.value / other.value, low, high, one.n + other.n)


def decide_below_one(ratio: Estimate) -> Word:
    """For a claim that a ratio is below one."""
    if ratio.high < 1:
        return "holds"
    return "refuted" if ratio.low > 1 else "undecided"


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
    if number == 12:
        return [flatter(found)]
    pairs = [
        pair for pair in EDGES.get(number, ()) if all(at in found.readings for at in pair if at)
    ]
    if not pairs:
        return ["Quantized edge: it has measured nothing of this claim."]
    parts = [told(found, *pair) for pair in pairs]
    return [f"Quantized edge, ηS over exact's: {'; '.join(parts)}. {SMALLER}"]


def flatter(found: quantized_edge.Results) -> str:
    """Which lower rate would do to the flatness what more precision does."""
    parts = []
    for what in ("all fp8_e4m3", "gemm fp4_e2m1"):
        if ("Adam", what) in found.readings:
            ratio = _over_exact(found, ("Adam", what))
            parts.append(f"{ratio} from {what} (n {ratio.n})")
    if not parts:
        return "Quantized edge: it has measured nothing of this claim."
    return (
        "Quantized edge: as to how flat a region training settles in, and nothing else, going from "
        "MX to exact does under Adam what a rate lower by this factor would: "
        f"{'; '.join(parts)}."
    )


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


# ---------------------------------------------------------------- claim 1's searched settings

_AGAINST = "lasting failure, MX against exact"


@dataclass(frozen=True)
class Fate:
    """A pair of the search: the steps at which its runs fail, None if they do not."""

    mx: int | None
    exact: int | None


@lru_cache(maxsize=2)
def _fresh(tier: Any, root: Path) -> dict[str, tuple[touchy_settings.Setting, list[Fate]]]:
    """The search's best settings by name, with their pairs on seeds that it had not seen."""
    found = touchy_settings.load(tier, root)
    runs = touchy_settings.fresh_runs(found.design, [p.setting for p in found.confirmed])
    store = Store(root / f"{touchy_settings.STUDY}_{tier}")
    records = load_points(list(runs.values()), store)
    return {
        p.setting.name: (
            p.setting,
            [
                Fate(*(failed_at(records[runs[name, seed, mx].id]) for mx in (True, False)))
                for name, seed, mx in runs
                if name == p.setting.name and mx
            ],
        )
        for p in found.confirmed
    }


def elsewhere(results: Results) -> list[Finding]:
    """Part of claim 1: MX against exact in the settings that a search found, on fresh seeds.

    Settings that this study has run, on other seeds, are left to it.  Not corrected yet.  One
    finding without pairs if the search's results are missing.
    """
    try:
        fresh = _fresh(tier_elsewhere(results), results.root)
    except FileNotFoundError:
        where = "searched: missing, run python -m studies.touchy_settings"
        return [
            Finding("precision-induced", "paper_text", where, _AGAINST, NOTHING, np.nan, "missing")
        ]
    own = replace(results.design.searched, seed=0)
    return [
        against_exact(
            "paper_text",
            f"searched: {name}",
            _AGAINST,
            [(fate.mx is not None, fate.exact is not None) for fate in fates],
        )
        for name, (setting, fates) in fresh.items()
        if not setting.switch and replace(setting.config, seed=0) != own
    ]


def against_exact(
    reading: Reading, where: str, words: str, fates: Sequence[tuple[bool, bool]]
) -> Finding:
    """Of pairs (did the MX run fail, did the exact one?): does MX fail oftener?"""
    both, mx, exact = (fates.count(each) for each in ((True, True), (True, False), (False, True)))
    return finding(
        "precision-induced",
        reading,
        where,
        words,
        [int(a) - int(b) for a, b in fates],
        f"{both} in both, {mx} in MX only, {exact} in exact only",
        room_of([a for a, _ in fates], [b for _, b in fates]),
    )


def by_construction(results: Results) -> Iterator[str]:
    """Settings in which MX begins midway: the switch itself is the spike, nothing to decide."""
    with suppress(FileNotFoundError):
        for name, (setting, fates) in _fresh(tier_elsewhere(results), results.root).items():
            if setting.switch:
                waits = sorted(f.mx - setting.switch for f in fates if f.mx is not None)
                yield (
                    f"Not counted: {name}. {len(waits)} of {len(fates)} runs fail {waits[0]} to "
                    f"{waits[-1]} steps after the switch to MX at step {setting.switch}: its noise "
                    "is a spike over the loss just reached."
                    if waits
                    else f"Not counted: {name}. No run fails after the switch."
                )
