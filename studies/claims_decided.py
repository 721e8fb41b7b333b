"""The twelve claims, each a function from results to a verdict; the rules are claims_verdicts.py's.

Claims 5 and 6, of what a run shows before it fails, are in claims_signs.py; claim 7, of runs that
are changed midway, in claims_cited.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise

import numpy as np

from mxsim.stats import median_over_seeds, share
from studies.claims import (
    ALL_CONTEXTS,
    CONTEXTS,
    PLACES,
    READINGS,
    TASKS,
    Key,
    Reading,
    Results,
    Task,
)
from studies.claims_cited import averted, rate_against_precision, searched
from studies.claims_signs import gradient_bias, last_bin
from studies.claims_verdicts import (
    Finding,
    Verdict,
    corrected,
    decide_match,
    finding,
    paired,
)

GOAL = 1.05  # a hybrid matches if its held-out loss is within 5 % of the exact run's
Outcome = Callable[[Key], bool]


def excess(
    results: Results, reading: Reading, task: Task, condition: str, outcome: Outcome | None = None
) -> dict[tuple[float, int], int]:
    """(lr, seed) -> MX minus exact: 1 if the MX run alone has the outcome, by default failed."""
    happened = outcome or results.failed
    pairs = results.pairs(reading, task, condition)
    return {at: happened(mx) - happened(exact) for at, (mx, exact) in pairs.items()}


def exact_failures(results: Results, task: Task, condition: str) -> dict[tuple[float, int], int]:
    """(lr, seed) -> 1 if the exact run failed."""
    pairs = results.pairs("paper_text", task, condition)
    return {at: int(results.failed(exact)) for at, (_, exact) in pairs.items()}


def _difference(
    one: Mapping[tuple[float, int], int], other: Mapping[tuple[float, int], int]
) -> list[int]:
    return [one[at] - other[at] for at in one if at in other]


def compared(results: Results, words: str, one: str, other: str) -> Iterator[Finding]:
    """Problem ``one`` against ``other``: MX in each reading and task, exact runs in each task."""
    yield from beyond_exact(results, words, one, other, CONTEXTS)
    for task in TASKS:
        own = [exact_failures(results, task, condition) for condition in (one, other)]
        yield finding("optimizer-driven", "", task, words, _difference(*own))


def beyond_exact(
    results: Results,
    words: str,
    one: str,
    other: str,
    contexts: Sequence[tuple[Reading, Task]] = ALL_CONTEXTS,
) -> Iterator[Finding]:
    """MX of condition ``one`` against that of ``other``, beyond the exact pairs' failures."""
    for reading, task in contexts:
        sides = [excess(results, reading, task, condition) for condition in (one, other)]
        yield finding("precision-induced", reading, task, words, _difference(*sides))


def _counts(
    results: Results,
    reading: Reading,
    task: Task,
    labels: Sequence[str],
    outcome: Outcome | None = None,
    verb: str = "fail",
) -> str:
    happened = outcome or results.failed
    pairs = [p for label in labels for p in results.pairs(reading, task, label).values()]
    seen = [(happened(mx), happened(exact)) for mx, exact in pairs]
    both, mx, exact = (seen.count(each) for each in ((True, True), (True, False), (False, True)))
    return f"{both} {verb} in both, {mx} in MX only, {exact} in exact only"


# ---------------------------------------------------------------- the claims


def spikes(results: Results) -> Verdict:
    """Claim 1."""
    labels = results.design.problems
    found = []
    for reading, task in CONTEXTS:
        values = [
            d
            for label in labels
            for d in excess(results, reading, task, label, results.troubled).values()
        ]
        found.append(
            finding(
                "precision-induced",
                reading,
                task,
                "spikes or failure, MX against exact",
                values,
                _counts(results, reading, task, labels, results.troubled, "spike or fail"),
            )
        )
    for reading in READINGS:
        found.append(
            finding(
                "precision-induced",
                reading,
                "searched",
                "failure, MX against exact",
                list(excess(results, reading, "searched", "base").values()),
                _counts(results, reading, "searched", ["base"]),
            )
        )
    shares = [
        share(sum(results.failed(exact) for _, exact in pairs), len(pairs))
        for task in TASKS
        for pairs in [[p for c in labels for p in results.pairs("paper_text", task, c).values()]]
    ]
    notes = [
        f"Exact runs that fail by themselves, {t}: {s}" for t, s in zip(TASKS, shares, strict=True)
    ]
    return Verdict(
        1,
        "MX runs spike where full precision does not",
        "Training in MX formats shows sharp, stochastic spikes of the loss that full precision "
        "does not show at the same learning rate and seed.",
        "Pairs over all settings of the problem, all rates: spiked, recovered or not, or failed. "
        "And settings found by a search for it under paper_text, on seeds that the search has not "
        "seen, one of them again under both readings: failed.",
        corrected([*found, *searched(results)]),
        tuple(notes),
    )


def sizes(results: Results) -> Verdict:
    """Claim 2."""
    d = results.design
    found = [
        *compared(results, "depth", *(f"depth {n}" for n in (d.depths[1], d.depths[0]))),
        *compared(results, "width", *(f"width {n}" for n in (d.widths[1], d.widths[0]))),
    ]
    low, high = d.rates[0], d.rates[-1]
    for reading, task in CONTEXTS:
        values = [
            by[high, seed] - by[low, seed]
            for label in d.problems
            for by in [excess(results, reading, task, label)]
            for seed in d.seeds_of(task)
        ]
        found.append(finding("precision-induced", reading, task, "learning rate", values))
    for task in TASKS:
        values = [
            by[high, seed] - by[low, seed]
            for label in d.problems
            for by in [exact_failures(results, task, label)]
            for seed in d.seeds_of(task)
        ]
        found.append(finding("optimizer-driven", "", task, "learning rate", values))
    return Verdict(
        2,
        "More so at larger depth, width and learning rate",
        "Instabilities come sooner and oftener in deeper and wider models and at higher rates.",
        f"Depth {d.depths[1]} against {d.depths[0]}, width {d.widths[1]} against {d.widths[0]}, at "
        f"all rates; rate {high:g} against {low:g} in all settings.",
        corrected(found),
    )


def layer_norm(results: Results) -> Verdict:
    """Claim 3."""
    found = [
        *compared(results, "with layer norm against without", "base", "norm none"),
        *compared(results, "affine layer norm against plain", "base", "norm layer_no_affine"),
    ]
    place: list[tuple[Reading, Task]] = [("paper_text", "searched")]
    gains, rest = "norm gains alone", "GEMM operands alone"
    found += beyond_exact(
        results, "gains in MX, too, against GEMM operands alone", "base", rest, place
    )
    values = list(excess(results, *place[0], gains).values())
    words = "norm gains alone in MX against exact"
    found.append(finding("precision-induced", *place[0], words, values))
    return Verdict(
        3,
        "Layer norm, and its affine part, matter",
        "Without layer norm, or without its affine parameters, the instabilities vanish or become "
        "fewer.",
        "The base against the same without layer norm, and without its gamma and beta. In the "
        "searched setting, of RMS norm: what its gains in MX do beyond the GEMM operands, and "
        "alone.",
        corrected(found),
        tuple(
            f"RMS norm, {reading}, {task}: {_counts(results, reading, task, ['norm rms'])}"
            for reading, task in CONTEXTS
        ),
    )


def activations(results: Results) -> Verdict:
    """Claim 4."""
    found = [
        *compared(results, "swiglu against gelu", "swiglu", "base"),
        *compared(results, "swiglu against relu", "swiglu", "relu"),
    ]
    return Verdict(
        4,
        "SwiGLU is less stable than GELU and ReLU",
        "Models with SwiGLU diverge more easily than those with GELU or ReLU.",
        "SwiGLU against each, all else equal.",
        corrected(found),
    )


def formats(results: Results) -> Verdict:
    """Claim 8."""
    found = [
        *beyond_exact(results, "E4M3 against E4M3 forward, E5M2 backward", "base",
                  "E4M3 forward, E5M2 backward"),
        *beyond_exact(results, "FP6 E2M3 against E4M3", "FP6 E2M3", "base"),
        *beyond_exact(results, "FP6 E3M2 against E4M3", "FP6 E3M2", "base"),
        *beyond_exact(results, "FP4 E2M1 against E4M3", "FP4 E2M1", "base"),
    ]  # fmt: skip
    labels = ("base", "E4M3 forward, E5M2 backward", "FP6 E2M3", "FP6 E3M2", "FP4 E2M1")
    return Verdict(
        8,
        "Formats have an order of stability",
        "E4M3 forward with E5M2 backward is the most stable, then E4M3, FP6 and FP4.",
        "Each format against E4M3 throughout: more failures beyond the exact pair's.",
        corrected(found),
        tuple(
            f"{reading}, {task}, failures in MX only minus in exact only: "
            + ", ".join(
                f"{'E4M3' if c == 'base' else c} {sum(excess(results, reading, task, c).values())}"
                for c in (*labels, *(["E5M2"] if task == "searched" else []))
            )
            for reading, task in ALL_CONTEXTS
        ),
    )


def block_size(results: Results) -> Verdict:
    """Claim 9."""
    small, large = results.design.blocks
    words = f"blocks of {large} against {small}"
    return Verdict(
        9,
        "Smaller blocks are more stable",
        "The block size matters: smaller blocks share their scale with less and fail less.",
        f"Blocks of {large} against blocks of {small}.",
        corrected(beyond_exact(results, words, f"block {large}", f"block {small}")),
    )


def hybrids(results: Results) -> Verdict:
    """Claim 10."""
    found = []
    for reading, task in ALL_CONTEXTS:
        for label in ("bf16 activations", "exact backward"):
            # The script's quantized teacher gives the two runs other targets: no loss to compare.
            label += ", exact teacher" if reading == "paper_code" else ""
            estimate, p = paired(list(excess(results, reading, task, label).values()))
            ratio = median_over_seeds(np.array(loss_ratios(results, reading, task, label)))
            found.append(
                Finding(
                    "precision-induced",
                    reading,
                    task,
                    f"{label} matches exact",
                    estimate,
                    p,
                    decide_match(estimate, p, ratio, GOAL),
                    p,
                    f"held-out loss over exact's {ratio}, n {ratio.n}",
                )
            )
    return Verdict(
        10,
        "Hybrids match full precision",
        "E4M3 weights with bf16 activations, and a quantized forward with an exact backward pass, "
        "train as full precision does.",
        "Holds if the excess of failures lies within a fifth of all pairs either way and the "
        f"median held-out loss of pairs that are ok in both is below {GOAL} times the exact run's, "
        "interval included; not seen if there are more failures (p < 0.05) or the loss's lower end "
        "is above; a loss of fewer than six pairs decides nothing. Under paper_code with the exact "
        "teacher, so that both losses are of one task.",
        tuple(found),
        tuple(
            f"{label} with the script's quantized teacher, paper_code, {task}: "
            + _counts(results, "paper_code", task, [label])
            for task in PLACES
            for label in ("bf16 activations", "exact backward")
        ),
    )


def loss_ratios(results: Results, reading: Reading, task: Task, label: str) -> list[float]:
    """Held-out loss over the exact run's, of the pairs that fail in neither."""
    return [
        results.records[mx].meta["eval_loss"] / results.records[exact].meta["eval_loss"]
        for mx, exact in results.pairs(reading, task, label).values()
        if not (results.failed(mx) or results.failed(exact))
    ]


def init_and_optimizer(results: Results) -> Verdict:
    """Claim 11."""
    found = [
        f
        for label, words in (
            ("xavier", "Xavier init against PyTorch's"),
            ("sgd", "SGD with momentum against Adam"),
            ("adamw", "AdamW against Adam"),
        )
        for f in compared(results, words, label, "base")
    ]
    return Verdict(
        11,
        "Initialization and optimizer change the picture",
        "How often training breaks depends on the initialization and on the optimizer.",
        "A difference either way; SGD at rates as near to its own edge as Adam's are.",
        corrected(found, either=True),
    )


def rate_or_precision(results: Results) -> Verdict:
    """Claim 12."""
    found, notes = [], []
    for reading, task in ALL_CONTEXTS:
        fates = lower_rate(results, reading, task)
        words = f"{'half the' if task == 'searched' else 'the next lower'} rate against exact"
        values = [int(lower) - int(exact) for lower, exact in fates]
        found.append(finding("measured", reading, task, words, values))
        for kind, of_exact in (("precision-induced", True), ("optimizer-driven", False)):
            own = [lower for lower, exact in fates if exact == of_exact]
            averted = f"{share(sum(own), len(own))}, n {len(own)}" if own else "n 0"
            notes.append(f"{kind} failures averted by it, {reading}, {task}: {averted}")
    return Verdict(
        12,
        "A lower rate averts more than a higher precision",
        "Lowering the learning rate and raising the precision both avert instabilities; the "
        "paper raises the precision.",
        "From the first step, of MX runs that fail: averted by a lower rate in MX, against averted "
        "by full precision at the same rate, which by definition averts what is precision-induced "
        "and nothing else; so what counts is how much of each kind there is, and how much of each "
        "a lower rate averts (notes). Midway, from the interventions: steps gained by half the "
        "rate minus by full precision, by seed.",
        corrected([*found, *rate_against_precision(results)]),
        tuple(notes),
    )


def lower_rate(results: Results, reading: Reading, task: Task) -> list[tuple[bool, bool]]:
    """Of MX runs that fail: does the next lower rate in MX not, does the exact run not?

    In the searched setting, which has one rate, half of it.
    """
    seeds = results.design.seeds_of(task)
    if task == "searched":
        (lr,) = results.design.rates_of(task)
        base = results.pairs(reading, task, "base")
        half = results.pairs(reading, task, "half the rate")
        trios = [(*base[lr, seed], half[lr, seed][0]) for seed in seeds]
    else:
        trios = [
            (*pairs[high, seed], pairs[low, seed][0])
            for label in results.design.problems
            for pairs in [results.pairs(reading, task, label)]
            for low, high in pairwise(results.design.rates)
            for seed in seeds
        ]
    return [
        (not results.failed(lower), not results.failed(exact))
        for mx, exact, lower in trios
        if results.failed(mx)  # there is something to avert
    ]


CLAIMS: tuple[Callable[[Results], Verdict], ...] = (
    spikes,
    sizes,
    layer_norm,
    activations,
    gradient_bias,
    last_bin,
    averted,
    formats,
    block_size,
    hybrids,
    init_and_optimizer,
    rate_or_precision,
)


def verdicts(results: Results) -> tuple[Verdict, ...]:
    """All claims, in their order."""
    return tuple(claim(results) for claim in CLAIMS)


def faults(results: Results) -> tuple[Finding, ...]:
    """Does the base under paper_code fail oftener with each of the script's faults than without?"""
    code: list[tuple[Reading, Task]] = [("paper_code", task) for task in PLACES]
    return corrected(
        [
            *beyond_exact(results, "frozen beta", "base", "beta trained", code[:-1]),
            *beyond_exact(results, "quantized teacher", "base", "exact teacher", code),
        ]
    )
