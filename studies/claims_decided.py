"""The twelve claims, each a function from results to a verdict; the rules are claims_verdicts.py's.

Here those that compare failures of two settings or schemes.  Claims 5 and 6, of what a run shows
before it fails, are in claims_signs.py; claims 7, 10 and 12, of what averts a failure, in
claims_remedies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mxsim.outcome import running_reference
from mxsim.stats import median_over_seeds
from mxsim.store import Record
from studies.claims import (
    ALL_CONTEXTS,
    CONTEXTS,
    PLACES,
    READINGS,
    TASKS,
    Reading,
    Results,
    Task,
    failed_at,
)
from studies.claims_cited import against_exact, critical_rates
from studies.claims_remedies import (
    averted,
    first_to_fail,
    hybrids,
    loss_ratios,
    outcomes,
    rate_or_precision,
    who_is_first,
)
from studies.claims_signs import gradient_bias, last_bin
from studies.claims_spikes import spikes
from studies.claims_verdicts import ENOUGH, Finding, Kind, Verdict, corrected, finding, room_of


def excess(
    results: Results, reading: Reading, task: Task, condition: str
) -> dict[tuple[float, int], int]:
    """(lr, seed) -> MX minus exact: 1 if the MX run alone failed."""
    pairs = results.pairs(reading, task, condition)
    return {at: results.failed(mx) - results.failed(exact) for at, (mx, exact) in pairs.items()}


def exact_failures(results: Results, task: Task, condition: str) -> dict[tuple[float, int], int]:
    """(lr, seed) -> 1 if the exact run failed."""
    pairs = results.pairs("paper_text", task, condition)
    return {at: int(results.failed(exact)) for at, (_, exact) in pairs.items()}


def compared(
    results: Results, words: str, one: str, other: str, within: Sequence[Task] = PLACES
) -> Iterator[Finding]:
    """Problem ``one`` against ``other``: MX in each reading and place, exact runs in each place.

    In those places that have both.  Of exact runs, as of two precisions, the first to fail counts.
    """
    places = [task for task in within if {one, other} <= set(results.design.problems_of(task))]
    yield from beyond_exact(
        results, words, one, other, [at for at in ALL_CONTEXTS if at[1] in places]
    )
    for task in places:
        sides = [
            {at: results.records[e] for at, (_, e) in results.pairs("paper_text", task, c).items()}
            for c in (one, other)
        ]
        yield who_is_first("optimizer-driven", "", task, words, *sides)


def beyond_exact(
    results: Results,
    words: str,
    one: str,
    other: str,
    contexts: Sequence[tuple[Reading, Task]] = ALL_CONTEXTS,
) -> Iterator[Finding]:
    """MX of condition ``one`` against that of ``other``, beyond the exact pairs' failures.

    Without room if MX runs hardly ever fail, or hardly ever do not; nor is there any, whatever p,
    where the exact runs of a condition hardly ever survive: MX could not add to their failures.
    """
    for reading, task in contexts:
        pairs = [results.pairs(reading, task, c) for c in (one, other)]
        common = [at for at in pairs[0] if at in pairs[1]]
        mx, exact = (
            [[results.failed(side[at][arm]) for at in common] for side in pairs] for arm in (0, 1)
        )
        told = (
            f"{sum(mx[0])} and {sum(mx[1])} MX runs fail, {sum(exact[0])} and {sum(exact[1])} "
            "exact ones"
        )
        values = [
            (a - b) - (c - d) for a, b, c, d in zip(mx[0], exact[0], mx[1], exact[1], strict=True)
        ]
        found = finding("precision-induced", reading, task, words, values, told, room_of(*mx))
        if any(len(side) - sum(side) < ENOUGH for side in exact):
            found = replace(found, able=False, word="no room", room=0)
        yield found


def fails_first(
    results: Results,
    words: str,
    one: str,
    other: str,
    contexts: Sequence[tuple[Reading, Task]] = ALL_CONTEXTS,
) -> Iterator[Finding]:
    """MX of precision ``one`` against that of ``other``, which share their exact run: who is first?

    Unlike counts of failures this tells them apart where nearly all fail, too.
    """
    for reading, task in contexts:
        yield first_to_fail(results, reading, task, words, one, other)


def by_rate(
    results: Results,
    kind: Kind,
    reading: str,
    task: Task,
    series: Callable[[str], Mapping[tuple[float, int], int]],
) -> Finding:
    """The highest rate against the lowest, over all settings of the problem, from their series."""
    low, high = results.design.rates[0], results.design.rates[-1]
    seeds = results.design.seeds_of(task)
    every = [series(label) for label in results.design.problems]
    one, other = ([by[rate, seed] for by in every for seed in seeds] for rate in (high, low))
    return finding(
        kind,
        reading,
        task,
        "learning rate",
        [a - b for a, b in zip(one, other, strict=True)],
        f"{sum(one)} and {sum(other)}" + (" more fail in MX than in exact" if reading else " fail"),
    )


# ---------------------------------------------------------------- the claims


def sizes(results: Results) -> Verdict:
    """Claim 2."""
    d = results.design
    depths = f"depth {d.depths[1]}", f"depth {d.depths[0]}"
    widths = f"width {d.widths[1]}", f"width {d.widths[0]}"
    found = [*compared(results, "depth", *depths), *compared(results, "width", *widths)]
    for reading, task in CONTEXTS:
        own = partial(excess, results, reading, task)
        found.append(by_rate(results, "precision-induced", reading, task, own))
    for task in TASKS:
        own = partial(exact_failures, results, task)
        found.append(by_rate(results, "optimizer-driven", "", task, own))
    return Verdict(
        2,
        "More so at larger depth, width and learning rate",
        "Instabilities come sooner and oftener in deeper and wider models and at higher rates.",
        f"Depth {d.depths[1]} against {d.depths[0]}, width {d.widths[1]} against "
        f"{d.widths[0]}, at all rates; rate {d.rates[-1]:g} against {d.rates[0]:g} in all "
        "settings. And the rate at which half of the runs fail or have not learned by their end, "
        "from the phase diagrams: holds if it is lower, intervals disjoint.",
        (
            *corrected(found),
            *critical_rates(results, "lr_depth", d.depths[1], d.depths[0]),
            *critical_rates(results, "lr_width", d.widths[1], d.widths[0]),
        ),
    )


def layer_norm(results: Results) -> Verdict:
    """Claim 3."""
    plain = "affine layer norm against plain"
    found = [
        *compared(results, "layer norm against none", "base", "norm none", TASKS),
        *compared(results, "layer norm against none", "norm layer", "norm none"),
        *compared(results, plain, "base", "norm layer_no_affine", TASKS),
        *compared(results, plain, "norm layer", "norm layer_no_affine"),
    ]
    place: list[tuple[Reading, Task]] = [("paper_text", "searched")]
    gains, rest = "norm gains alone", "GEMM operands alone"
    found += fails_first(
        results, "gains in MX, too, against GEMM operands alone", "base", rest, place
    )
    for task in TASKS:
        found.append(exact_trouble(results, task, "base", "norm none"))
    fates = results.fates(*place[0], gains)
    beside = [
        *compared(results, "RMS norm against none", "base", "norm none", ["searched"]),
        *compared(results, "RMS norm against layer norm", "base", "norm layer", ["searched"]),
        against_exact(*place[0], "norm gains alone in MX against exact", fates),
    ]
    return Verdict(
        3,
        "Layer norm, and its affine part, matter",
        "Without layer norm, or without its affine parameters, the instabilities vanish or become "
        "fewer.",
        "Layer norm against none, and against layer norm without gamma and beta: failures, of "
        "exact runs also spikes. In the searched place, whose base has RMS norm: whether with its "
        "gains in MX, too, runs fail, or fail first, by seed. For reference, since the claim is "
        "not about them: RMS norm there, for which the place was searched, against the others, "
        "and MX gains alone, which may suffice without being needed.",
        (*corrected(found), *as_reference(corrected(beside))),
        tuple(
            f"RMS norm, {reading}, {task}: {outcomes(results, reading, task, 'norm rms')}"
            for reading, task in CONTEXTS
        ),
    )


def as_reference(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Shown, and no part of the verdict."""
    return (replace(each, kind="reference") for each in findings)


def exact_trouble(results: Results, task: Task, one: str, other: str) -> Finding:
    """Do exact runs of layer norm spike or fail oftener than those without?"""
    sides = [
        [results.troubled(exact) for _, exact in results.pairs("paper_text", task, c).values()]
        for c in (one, other)
    ]
    return finding(
        "optimizer-driven",
        "",
        task,
        "layer norm against none, spikes or failure",
        [int(a) - int(b) for a, b in zip(*sides, strict=True)],
        f"{sum(sides[0])} and {sum(sides[1])} exact runs spike or fail",
        room_of(*sides),
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
        "SwiGLU against each; but for unit, whose teacher is always of GELU, the teacher has the "
        "student's activation.",
        corrected(found),
    )


def formats(results: Results) -> Verdict:
    """Claim 8."""
    mix = "E4M3 forward, E5M2 backward"
    found = []
    for words, one, other in (
        (f"E4M3 against {mix}", "base", mix),
        ("FP6 E2M3 against E4M3", "FP6 E2M3", "base"),
        ("FP6 E3M2 against E4M3", "FP6 E3M2", "base"),
        ("FP4 E2M1 against E4M3", "FP4 E2M1", "base"),
    ):
        for reading, task in ALL_CONTEXTS:
            each = first_to_fail(results, reading, task, words, one, other)
            if task == "searched" and not gets_there(results, reading, one):
                detail = f"{each.detail}; never as low in loss"
                each = replace(each, able=False, room=0, detail=detail)
            found.append(each)
    labels = ("base", mix, "FP6 E2M3", "FP6 E3M2", "FP4 E2M1")
    return Verdict(
        8,
        "Formats have an order of stability",
        "E4M3 forward with E5M2 backward is the most stable, then E4M3, FP6 and FP4.",
        "Each format against E4M3 throughout, pair by pair: which fails, or fails first. No room "
        "in the searched place for a format that never gets as low in loss as where E4M3 fails: it "
        "may just be late. Losses are in the notes.",
        corrected(found),
        tuple(
            f"{reading}, {task}, failures in MX only minus in exact only: "
            + ", ".join(
                f"{'E4M3' if c == 'base' else c} {sum(excess(results, reading, task, c).values())}"
                for c in (*labels, *(["E5M2"] if task == "searched" else []))
            )
            for reading, task in ALL_CONTEXTS
        )
        + tuple(note for reading in READINGS for note in how_low(results, reading)),
    )


def gets_there(results: Results, reading: Reading, condition: str) -> bool:
    """Does a run of a format reach, in the searched place, a loss at which some E4M3 run fails?"""
    failing = lowest(results, reading, "base", failing=True)
    return not len(failing) or lowest(results, reading, condition).min() <= failing.max()


def how_low(results: Results, reading: Reading) -> Iterator[str]:
    """What loss FP4 reaches in the searched setting, beside the one at which E4M3 fails."""
    ratio = median_over_seeds(np.array(loss_ratios(results, reading, "searched", "FP4 E2M1")))
    yield (
        f"FP4 E2M1 in the searched setting, {reading}: held-out loss over exact's where neither "
        f"fails {ratio}, n {ratio.n}; its training loss's lowest median is "
        f"{_scientific(lowest(results, reading, 'FP4 E2M1'))}; E4M3 fails after "
        f"{_scientific(lowest(results, reading, 'base', failing=True))}."
    )


def lowest(
    results: Results, reading: Reading, condition: str, failing: bool = False
) -> NDArray[np.float64]:
    """What MX runs of the searched place reached, all of a condition or those that fail."""
    keys = [mx for mx, _ in results.pairs(reading, "searched", condition).values()]
    return np.array(
        [reached(results.records[mx]) for mx in keys if not failing or results.failed(mx)]
    )


def reached(record: Record) -> float:
    """The lowest median of a window of a run's losses, up to its failure."""
    losses, window = record.arrays["losses"], record.meta["rule"]["window"]
    bad = failed_at(record)
    series = np.asarray(losses if bad is None else losses[: bad + 1], np.float64)
    return float(running_reference(series, window)[-1])


def _scientific(values: NDArray[np.float64]) -> str:
    """Median and range."""
    if not len(values):
        return "none"
    return f"{np.median(values):.2g} ({values.min():.2g} to {values.max():.2g}, n {len(values)})"


def block_size(results: Results) -> Verdict:
    """Claim 9."""
    small, large = results.design.blocks
    words = f"blocks of {large} against {small}"
    return Verdict(
        9,
        "Smaller blocks are more stable",
        "The block size matters: smaller blocks share their scale with less and fail less.",
        f"Blocks of {large} against blocks of {small}, pair by pair: which fail, or fail first.",
        corrected(fails_first(results, words, f"block {large}", f"block {small}")),
    )


def init_and_optimizer(results: Results) -> Verdict:
    """Claim 11."""
    found = [
        *compared(results, "Xavier init against PyTorch's", "xavier", "base"),
        *compared(results, "AdamW against Adam", "adamw", "base"),
    ]
    sgd = compared(results, "SGD with momentum against Adam", "sgd", "base")
    return Verdict(
        11,
        "Initialization and optimizer change the picture",
        "How often training breaks depends on the initialization and on the optimizer.",
        "A difference either way. SGD, for reference, has 64 times Adam's rates, which by failures "
        "of exact runs alone is nearer to its edge.",
        (*corrected(found, either=True), *as_reference(corrected(sgd, either=True))),
    )


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
    """Does the base under paper_code fail first with each of the script's faults, or without?"""
    code: list[tuple[Reading, Task]] = [("paper_code", task) for task in PLACES]
    return corrected(
        [
            *fails_first(results, "frozen beta", "base", "beta trained", code[:-1]),
            *fails_first(results, "quantized teacher", "base", "exact teacher", code),
        ]
    )
