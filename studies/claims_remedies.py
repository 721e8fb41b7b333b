"""What averts a failure: claims 7 (midway), 10 (hybrids) and 12 (a lower rate, or precision)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from mxsim.stats import NOTHING, Estimate, median_over_seeds, share
from mxsim.store import Record
from mxsim.survival import restricted
from studies import interventions
from studies.claims import (
    ALL_CONTEXTS,
    PLACES,
    READINGS,
    TASKS,
    Reading,
    Results,
    Task,
    lasted,
)
from studies.claims_cited import tier_elsewhere
from studies.claims_verdicts import (
    ENOUGH,
    Finding,
    Kind,
    Verdict,
    Word,
    corrected,
    decide_match,
    decide_range,
    finding,
    room_of,
)

GOAL = 1.05  # a hybrid matches if its held-out loss is within 5 % of the exact run's
HYBRIDS = ("bf16 activations", "exact backward")
# Of claim 7: not of precision, so shown beside the rest.
REFERENCES = {"lower_lr": "half the rate, for comparison"}


# ---------------------------------------------------------------- claim 7


def averted(results: Results) -> Verdict:
    """Claim 7, from the interventions' own study."""
    found, notes = [], []
    for reading in READINGS:
        tier = _tier_of(reading, results)
        more, said = _averted(reading, tier, results.root)
        found += more
        notes += said
    return Verdict(
        7,
        "Changing the precision midway averts or delays the divergence",
        "From a checkpoint before the divergence, higher precision, or a bumped exponent (here "
        "`rceil`), averts or delays it; shortly before, it is too late.",
        "All in one setting, RMS norm at lr 0.004 in E5M2 on the script's task, under paper_code "
        "at one lead. Steps gained over the placebo (one unit in the last place) of the same "
        "seed, paired permutation test, corrected over interventions and leads (Benjamini and "
        "Hochberg). Averts or delays: holds if q < 0.05 and the gain is positive, not seen if "
        "the gain's interval ends below a tenth of the horizon. Too late, of the shortest lead, "
        "where there are several, and of what gains at a longer one: refuted if it gains there "
        "as well, holds if its gain's interval ends below a tenth of the horizon; no room for "
        "what gains at no longer lead.",
        tuple(found),
        tuple(notes),
        "Faults: the interventions under paper_code start from runs with all of the script's "
        "faults; without them they were not tried.",
    )


def _tier_of(reading: Reading, results: Results) -> Any:
    """The tier of the interventions under a reading; at the smoke tier they share one setting."""
    tier = tier_elsewhere(results)
    return tier if reading == "paper_text" or tier == "smoke" else f"{tier}_code"


@lru_cache(maxsize=2)
def _interventions(tier: Any, root: Path) -> interventions.Results:
    """Two claims read it."""
    return interventions.load(tier, root)


def _averted(reading: str, tier: Any, root: Path) -> tuple[list[Finding], list[str]]:
    """Each intervention at each lead under one reading, and what to say of them."""
    try:
        stored = _interventions(tier, root)
    except FileNotFoundError as error:
        run = f"python -m studies.interventions --tier {tier}"
        return [], [f"{reading}: missing, {str(error).split(' in ')[0]}; run {run}"]
    design = stored.design
    found, gains = [], {at: gained(a.gain, a.q, design.horizon) for at, a in stored.arms.items()}
    for (lead, name), arm in stored.arms.items():
        if name in ("none", "placebo"):
            continue
        word, words = gains[lead, name], REFERENCES.get(name, name)
        if name not in REFERENCES and len(design.leads) > 1 and lead == min(design.leads):
            longer = [gains[other, name] for other in design.leads if other > lead]
            word, words = too_late(word, longer), f"too late for {name}"
        found.append(
            Finding(
                "reference" if name in REFERENCES else "measured",
                reading,
                f"{lead} steps before",
                words,
                arm.gain,
                arm.paired,
                word,
                arm.q,
                ", ".join(f"{n} {word}" for word, n in arm.outcomes.items() if n),
            )
        )
    return found, [
        f"{reading}: {design.setting.name}; of {stored.tried} runs {len(stored.used)} diverge late "
        f"enough to be changed; averted: not within {design.horizon} steps of the change.",
        *better(stored, gains, reading),
    ]


def better(
    stored: interventions.Results, gains: Mapping[tuple[int, str], Word], reading: str
) -> Iterator[str]:
    """Lead by lead, which interventions beat the placebo, and what the bumped exponent does."""
    for lead in stored.design.leads:
        names = [name for (at, name), word in gains.items() if at == lead and word == "holds"]
        yield f"Better than the placebo, {reading}, {lead} steps: {', '.join(names) or 'nothing'}."
    bumped = {lead: word for (lead, name), word in gains.items() if name == "rceil"}
    told = ", ".join(f"{lead} steps before {word}" for lead, word in bumped.items())
    yield f"The bumped exponent gains, {reading}: {told}."


def gained(gain: Estimate, q: float, horizon: int) -> Word:
    """The word for an intervention's gain over the placebo."""
    if not gain.n or np.isnan(q):
        return "undecided"
    if q < 0.05:
        return "holds" if gain.value > 0 else "refuted"
    return "not seen" if gain.high < horizon / 10 else "undecided"


def too_late(here: Word, longer: Sequence[Word]) -> Word:
    """The word for 'it is too late now', from the words for a gain here and at longer leads."""
    if here == "holds":
        return "refuted"
    if "holds" not in longer:
        return "no room"
    return "holds" if here in ("not seen", "refuted") else "undecided"


# ---------------------------------------------------------------- claim 10


def hybrids(results: Results) -> Verdict:
    """Claim 10."""
    match: list[Finding] = []
    ratios: list[Estimate] = []
    less = []
    for reading, task in ALL_CONTEXTS:
        # The script's quantized teacher gives the two runs other targets: no loss to compare.
        same = ", exact teacher" if reading == "paper_code" else ""
        full = "exact teacher" if same else "base"
        for condition, name in ((full, "full MX"), *((label + same, label) for label in HYBRIDS)):
            found, ratio = matched(results, reading, task, condition, name)
            match.append(found)
            ratios.append(ratio)
        for label in HYBRIDS:
            words = f"full MX against {label}"
            less.append(first_to_fail(results, reading, task, words, full, label + same))
    return Verdict(
        10,
        "Hybrids match full precision",
        "E4M3 weights with bf16 activations, and a quantized forward with an exact backward pass, "
        "train as full precision does.",
        "Matches exact: the excess of failures lies within a fifth of all pairs either way, and "
        f"the median held-out loss of pairs that fail in neither is below {GOAL} times the exact "
        "run's, interval included; no room where full MX does so, too; refuted if there are more "
        "failures (p < 0.05, corrected for all such rows) or the loss's lower end is above; a "
        "loss of fewer than six pairs decides nothing. Full MX against a hybrid: which fails, or "
        "fails first, corrected. Under paper_code with the exact teacher, so that losses are of "
        "one task.",
        (*matching(match, ratios), *corrected(less)),
        tuple(
            f"{label} with the script's quantized teacher, paper_code, {task}: "
            + outcomes(results, "paper_code", task, label)
            for task in PLACES
            for label in HYBRIDS
        ),
    )


def matched(
    results: Results, reading: Reading, task: Task, condition: str, name: str
) -> tuple[Finding, Estimate]:
    """Does an MX scheme train as the exact one does?  Not decided yet; and the ratio of losses."""
    fails = results.fates(reading, task, condition)
    ratio = median_over_seeds(np.array(loss_ratios(results, reading, task, condition)))
    known = str(ratio) if ratio.n >= ENOUGH else f"{ratio.value:.2f}"  # of few no interval
    found = finding(
        "precision-induced",
        reading,
        task,
        f"{name} matches exact",
        [int(mx) - int(exact) for mx, exact in fails],
        f"{sum(mx for mx, _ in fails)} against {sum(exact for _, exact in fails)} fail, held-out "
        f"loss over exact's {known}, n {ratio.n}",
    )
    return found, ratio


def matching(found: Sequence[Finding], ratios: Sequence[Estimate]) -> Iterator[Finding]:
    """The words, by corrected p; full MX is the reference, and where it matches is no room."""
    hybrid = iter(corrected(each for each in found if not _is_full(each)))
    full = False
    for each, ratio in zip(found, ratios, strict=True):
        told = each if _is_full(each) else next(hybrid)
        word = decide_match(told.estimate, told.adjusted, ratio, GOAL)
        if _is_full(each):
            full = word == "holds"
            yield replace(told, word=word, kind="reference")
        else:
            yield replace(told, word="no room" if word == "holds" and full else word)


def _is_full(found: Finding) -> bool:
    return found.words.startswith("full MX")


def first_to_fail(
    results: Results, reading: Reading, task: Task, words: str, one: str, other: str
) -> Finding:
    """Of MX runs of two precisions, by seed and rate: is it ``one`` that fails, or fails first?"""
    sides = [
        {at: results.records[mx] for at, (mx, _) in results.pairs(reading, task, c).items()}
        for c in (one, other)
    ]
    return who_is_first("precision-induced", reading, task, words, *sides)


def who_is_first(
    kind: Kind,
    reading: str,
    task: Task,
    words: str,
    one: Mapping[tuple[float, int], Record],
    other: Mapping[tuple[float, int], Record],
) -> Finding:
    """Of runs by rate and seed, those that both sides have: is it ``one``'s that fails first?

    Room: the pairs of which any run fails.
    """
    both = [at for at in one if at in other]
    steps = [np.array([lasted(side[at]) for at in both]) for side in (one, other)]
    first, second = (int(np.sum(a < b)) for a, b in (steps, steps[::-1]))
    fails = [int(np.isfinite(each).sum()) for each in steps]
    return finding(
        kind,
        reading,
        task,
        words,
        (1.0 * (steps[0] < steps[1]) - (steps[0] > steps[1])).tolist(),
        f"{fails[0]} and {fails[1]} fail, {first} and {second} first",
        int(np.isfinite(np.minimum(*steps)).sum()),
    )


def outcomes(results: Results, reading: Reading, task: Task, condition: str) -> str:
    """Of a condition's pairs, how many fail in both, in MX alone, in exact alone."""
    seen = results.fates(reading, task, condition)
    both, mx, exact = (seen.count(each) for each in ((True, True), (True, False), (False, True)))
    return f"{both} fail in both, {mx} in MX only, {exact} in exact only"


def loss_ratios(results: Results, reading: Reading, task: Task, condition: str) -> list[float]:
    """Held-out loss over the exact run's, of the pairs that fail in neither."""
    return [
        results.records[mx].meta["eval_loss"] / results.records[exact].meta["eval_loss"]
        for mx, exact in results.pairs(reading, task, condition).values()
        if not (results.failed(mx) or results.failed(exact))
    ]


# ---------------------------------------------------------------- claim 12


def rate_or_precision(results: Results) -> Verdict:
    """Claim 12."""
    kinds: tuple[tuple[Kind, bool], ...] = (
        ("precision-induced", True),
        ("optimizer-driven", False),
    )
    found, notes = [], []
    for reading in READINGS:
        fates = halved(results, reading)
        for kind, exact_ok in kinds:
            own = [lower for lower, exact in fates if exact == exact_ok]
            words = "half the rate averts most failures, in as many steps"
            found.append(averts_most(kind, reading, "searched", words, own))
        found += how_far(results, reading)
        notes.append(at_half(results, reading))
        for task in TASKS:
            for kind, exact_ok in kinds:
                found += next_rates(results, reading, task, kind, exact_ok)
    return Verdict(
        12,
        "A lower rate averts failures, too",
        "Lowering the learning rate and raising the precision both avert instabilities; the "
        "paper raises the precision.",
        "Of MX runs that fail, by kind. Full precision from the first step at the same rate averts "
        "all precision-induced failures and no optimizer-driven ones, by definition, so that there "
        "is no contest to decide; what is measured is how much of each kind half the rate, still "
        "in MX, averts in as many steps, which is half the distance: holds if most (Wilson "
        "interval above 0.5, of six or more), not seen if the interval lies below. And, of runs "
        "that are all run until they fail: does half the rate last more steps, and does it get "
        "farther (steps times rate)? Around the base, for reference, the next lower rate beside "
        "the next higher one, which averts as much where seeds fail by chance; SGD apart. Midway, "
        "from the interventions: who lasts longer by seed, half the rate or full precision, sign "
        "test. Those of pairs corrected.",
        (
            *(f for f in found if f.kind != "measured"),
            *corrected([*(f for f in found if f.kind == "measured"), *midway(results)]),
        ),
        tuple(notes),
    )


def averts_most(
    kind: Kind, reading: Reading, task: Task, words: str, averted: Sequence[bool]
) -> Finding:
    """Are more than half of the failures averted?"""
    estimate = share(sum(averted), len(averted)) if len(averted) else NOTHING
    return Finding(
        kind, reading, task, words, estimate, np.nan, decide_range(estimate, 0.5, 1.0), np.nan,
        f"{sum(averted)} of {len(averted)}",
    )  # fmt: skip


def halved(results: Results, reading: Reading) -> list[tuple[bool, bool]]:
    """Of MX runs of the searched base that fail: does one at half the rate not, the exact one?"""
    base = results.pairs(reading, "searched", "base")
    half = results.pairs(reading, "searched", "half the rate")
    return [
        (not results.failed(half[at][0]), not results.failed(exact))
        for at, (mx, exact) in base.items()
        if results.failed(mx)
    ]


def how_far(results: Results, reading: Reading) -> Iterator[Finding]:
    """Of MX runs at the rate and at half of it, run until they fail: steps, steps times rate."""
    steps = [
        {
            seed: lasted(results.records[mx])
            for (_, seed), (mx, _) in results.pairs(reading, "searched", label).items()
        }
        for label in ("longer", "half the rate, twice as long")
    ]
    both = [(steps[0][seed], steps[1][seed]) for seed in steps[0] if seed in steps[1]]
    told = "medians at step {:.0f} and {:.0f}".format(*np.median(np.array(both), axis=0))
    for words, factor in (("lasts more steps", 1.0), ("gets farther", 0.5)):
        signs = [float(np.sign(factor * half - full)) for full, half in both if np.isfinite(full)]
        yield finding(
            "measured",
            reading,
            "searched",
            f"half the rate {words}, run until it fails",
            signs,
            told,
        )


def at_half(results: Results, reading: Reading) -> str:
    """What becomes of exact and MX runs at half the rate over the same distance."""
    pairs = list(results.pairs(reading, "searched", "half the rate, twice as long").values())
    fails = [sum(results.failed(pair[arm]) for pair in pairs) for arm in (0, 1)]
    return (
        f"At half the rate, twice as long, {reading}: {fails[0]} of {len(pairs)} MX runs fail and "
        f"{fails[1]} of as many exact ones."
    )


def next_rates(
    results: Results, reading: Reading, task: Task, kind: Kind, exact_ok: bool
) -> Iterator[Finding]:
    """Of MX runs that fail: does the run at the next lower rate not, does that at the next higher?

    SGD apart, where it has any; for reference.
    """
    rates = results.design.rates
    for sgd in (False, True):
        labels = [c for c in results.design.problems if (c == "sgd") == sgd]
        for name, step in (("lower", -1), ("higher", 1)):
            averted = [
                not results.failed(pairs[other, seed][0])
                for label in labels
                for pairs in [results.pairs(reading, task, label)]
                for rate, other in pairwise(rates[::step])
                for seed in results.design.seeds_of(task)
                for mx, exact in [pairs[rate, seed]]
                if results.failed(mx) and (not results.failed(exact)) == exact_ok
            ]
            if averted or not sgd:
                words = f"the next {name} rate averts most{', SGD' if sgd else ''}, {kind}"
                yield replace(averts_most(kind, reading, task, words, averted), kind="reference")


def midway(results: Results) -> Iterator[Finding]:
    """Half the rate against full precision, from a state before the divergence, by reading."""
    words = "midway, half the rate against exact"
    for reading in READINGS:
        try:
            stored = _interventions(_tier_of(reading, results), results.root)
        except FileNotFoundError:
            where = "missing, run python -m studies.interventions"
            yield Finding("measured", reading, where, words, NOTHING, np.nan, "missing")
            continue
        for lead in stored.design.leads:
            arms = [stored.arms[lead, name] for name in ("lower_lr", "full_precision")]
            lower, exact = (restricted(arm.times, stored.design.horizon) for arm in arms)
            averted = [arm.outcomes["averted"] for arm in arms]
            lasts = [[bool(t >= stored.design.horizon) for t in each] for each in (lower, exact)]
            yield finding(
                "measured",
                reading,
                f"{lead} steps before",
                words,
                np.sign(lower - exact).tolist(),
                f"averted {averted[0]} and {averted[1]} of {len(lower)}",
                room_of(*lasts),
            )
