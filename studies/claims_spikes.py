"""Do MX runs spike where full precision does not?  Claim 1."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from mxsim.outcome import running_reference
from mxsim.stats import median_over_seeds, share
from mxsim.store import Record
from studies.claims import CONTEXTS, READINGS, TASKS, Key, Reading, Results, Task, failed_at
from studies.claims_cited import against_exact, by_construction, elsewhere
from studies.claims_remedies import who_is_first
from studies.claims_verdicts import Finding, Verdict, corrected

SEARCHED = {"base": "E4M3", "E5M2": "E5M2"}  # conditions of the searched place, by their format
Outcome = Callable[[Key], bool]


def spikes(results: Results) -> Verdict:
    """Claim 1."""
    found = []
    outcomes: tuple[tuple[str, Outcome], ...] = (
        ("spikes or failure", results.troubled),
        ("lasting failure", results.failed),
        ("a spike that recovers", lambda key: recovered(results.records[key])),
    )
    for reading, task in CONTEXTS:
        pairs = [
            pair
            for label in results.design.problems
            for pair in results.pairs(reading, task, label).values()
        ]
        found += [told(reading, task, words, pairs, outcome) for words, outcome in outcomes]
    for reading in READINGS:
        for label, name in SEARCHED.items():
            by_seed = results.pairs(reading, "searched", label)
            pairs = list(by_seed.values())
            for words, outcome in outcomes:
                found.append(told(reading, "searched", f"{words}, {name}", pairs, outcome))
            mx, exact = (
                {at: results.records[pair[arm]] for at, pair in by_seed.items()} for arm in (0, 1)
            )
            words = f"MX {name} fails before exact"
            found.append(who_is_first("precision-induced", reading, "searched", words, mx, exact))
        longer = list(results.pairs(reading, "searched", "longer").values())
        words = "lasting failure, E4M3, longer"
        found.append(told(reading, "searched", words, longer, results.failed))
    return Verdict(
        1,
        "MX runs spike where full precision does not",
        "Training in MX formats shows sharp, stochastic spikes of the loss that full precision "
        "does not show at the same learning rate and seed.",
        "MX against the exact run of its seed: spikes, recovered or not, or fails; lasting "
        "failures alone; and spikes alone that recover, by a rule that is relative to each run's "
        "own loss, over which MX has the noisier floor. Around the base pairs over all settings "
        "of the problem and all rates; in the searched place E4M3 and E5M2, which share their "
        "exact runs, and there also which of the two fails first, and what has become of both "
        "after 1.6 times as many steps. And what else the search found under paper_text, on its "
        "fresh seeds. How sharp spikes are, and how much is left to chance, is told below and "
        "not decided.",
        corrected([*found, *elsewhere(results)]),
        (
            *by_themselves(results),
            *(later(results, reading) for reading in READINGS),
            *by_construction(results),
            *sharpness(results),
            chance(results),
        ),
    )


def recovered(record: Record) -> bool:
    """Whether a run had a spike that it left within the rule's patience."""
    patience = record.meta["rule"]["patience"]
    return any(
        spike["length"] is not None and spike["length"] <= patience
        for spike in record.meta["spikes"]
    )


def told(
    reading: Reading, task: Task, words: str, pairs: Sequence[tuple[Key, Key]], outcome: Outcome
) -> Finding:
    """Does MX have an outcome oftener than exact?"""
    fates = [(outcome(mx), outcome(exact)) for mx, exact in pairs]
    return against_exact(reading, task, f"{words}, MX against exact", fates)


def by_themselves(results: Results) -> Iterator[str]:
    """How often exact runs fail."""
    for task in TASKS:
        exact = [
            results.failed(pair[1])
            for label in results.design.problems
            for pair in results.pairs("paper_text", task, label).values()
        ]
        yield f"Exact runs that fail by themselves, {task}: {share(sum(exact), len(exact))}"


def later(results: Results, reading: Reading) -> str:
    """When MX and exact runs of the searched place fail if they are run on."""
    pairs = list(results.pairs(reading, "searched", "longer").values())
    steps = len(results.records[pairs[0][1]].arrays["losses"])
    parts = []
    for name, arm in (("MX", 0), ("exact", 1)):
        at = [s for pair in pairs if (s := failed_at(results.records[pair[arm]])) is not None]
        when = f", the median at step {np.median(at):.0f}" if at else ""
        parts.append(f"{len(at)} of {len(pairs)} {name} runs fail{when}")
    return f"Run to {steps} steps in the searched place, {reading}: {'; '.join(parts)}."


def rise(record: Record) -> int | None:
    """Steps that the first spike took from twice its reference to its start, ten times it."""
    if not record.meta["spikes"]:
        return None
    rule, start = record.meta["rule"], int(record.meta["spikes"][0]["step"])
    losses = np.asarray(record.arrays["losses"], np.float64)[: start + 1]
    reference = running_reference(losses, rule["window"])[start]
    below = np.flatnonzero(losses <= rule["recovery_ratio"] * reference)
    return start - int(below[-1]) if below.size else None


def sharpness(results: Results) -> Iterator[str]:
    """How steep and how high first spikes are, in MX and exact runs around the base."""
    labels = results.design.problems
    for arm in ("mx", "exact"):
        keys = [
            k for k in results.records if k.arm == arm and k.condition in labels and k.task in TASKS
        ]
        # An exact run stands under both readings.
        spiked = {results.records[k].id: results.records[k] for k in keys}
        records = [r for r in spiked.values() if r.meta["spikes"]]
        steps = np.array([s for r in records if (s := rise(r)) is not None], np.float64)
        heights = np.array([r.meta["spikes"][0]["height"] for r in records], np.float64)
        if len(records):
            yield (
                f"First spikes of {arm} runs around the base rise from twice to ten times the "
                f"reference in {median_over_seeds(steps)} steps, to {median_over_seeds(heights)} "
                f"times it (medians, n {len(records)})."
            )


def chance(results: Results) -> str:
    """Whether seeds of one setting and rate agree."""
    cells = [
        [
            results.troubled(results.pairs(reading, task, label)[lr, seed][0])
            for seed in results.design.seeds_of(task)
        ]
        for reading, task in CONTEXTS
        for label in results.design.problems
        for lr in results.design.rates_of(task)
    ]
    some, every = sum(map(any, cells)), sum(map(all, cells))
    return (
        f"Chance: in {some} of {len(cells)} settings and rates some MX run spikes or fails, in "
        f"{every} all {results.design.seeds} seeds do."
    )
