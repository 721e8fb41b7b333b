"""What a run shows before it fails: its probes against those of runs that do not.  Claims 5, 6."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.mechanism import gaussian_clamp
from mxsim.stats import NOTHING, median_over_seeds, share
from mxsim.store import Record
from studies.claims import (
    ALL_CONTEXTS,
    CONTEXTS,
    TASKS,
    Arm,
    Key,
    Reading,
    Results,
    Task,
    failed_at,
)
from studies.claims_verdicts import (
    Finding,
    Kind,
    Verdict,
    corrected,
    decide_range,
    finding,
    room_of,
)

Floats = NDArray[np.float64]
SCRIPT_METRIC = "the script's zeta"
LAST, EARLIER = 3, 5  # probes just before the failure, and those before them
COMPANY = 3  # runs that do not fail, without which none that does is compared


def series_of(record: Record, name: str) -> Floats:
    """A probe's series over all parameters: log zeta, cos, or the largest layer's share (m,)."""
    values = np.asarray(record.arrays[f"probe_{name}"], np.float64)
    if name == "gamma_saturated":
        return np.asarray(values.max(axis=1))
    one = values[:, 0, 0]  # its own scheme, over all parameters
    with np.errstate(divide="ignore"):
        return np.log(one) if name == "zeta" else one


def change(values: Floats, probes: int) -> float:
    """Median of the LAST of the first ``probes`` values minus that of EARLIER ones; NaN if few."""
    if probes < LAST + EARLIER:
        return np.nan
    late, early = values[probes - LAST : probes], values[probes - LAST - EARLIER : probes - LAST]
    with np.errstate(invalid="ignore"):
        return float(np.median(late) - np.median(early))


def before_failure(
    results: Results, reading: Reading, task: Task, name: str
) -> dict[Kind, list[float]]:
    """By kind of failure: each failing run's change minus the median of runs that do not fail.

    Those are of the same condition and rate at the same steps, COMPANY of them at least; where
    fewer do not fail a run is not told: runs of other settings differ by more than their fate.
    """
    keys = own_scheme(results, reading, task, "mx")
    series = {key: series_of(results.records[key], name) for key in keys}
    calm: dict[tuple[str, float], list[Floats]] = defaultdict(list)
    for key in keys:
        if not results.failed(key):
            calm[key.condition, key.lr].append(series[key])
    found: dict[Kind, list[float]] = {"precision-induced": [], "optimizer-driven": []}
    for key in keys:
        bad = failed_at(results.records[key])
        if bad is None:
            continue
        probes = -(-bad // results.design.probe_every)  # those before the step
        own = change(series[key], probes)
        others = [change(each, probes) for each in calm[key.condition, key.lr]]
        if np.isfinite(own) and np.isfinite(others).sum() >= COMPANY:
            shared = results.failed(Key(*key_of(key), arm="exact"))
            kind: Kind = "optimizer-driven" if shared else "precision-induced"
            found[kind].append(own - float(np.nanmedian(others)))
    return found


def key_of(key: Key) -> tuple[Reading, Task, str, float, int]:
    """All of a key but its arm."""
    return key.reading, key.task, key.condition, key.lr, key.seed


def own_scheme(results: Results, reading: Reading, task: Task, arm: Arm) -> list[Key]:
    """Keys of an arm's runs in all settings of the problem, under the reading's own scheme."""
    problems = results.design.problems_of(task)
    return [
        key
        for key in results.records
        if (key.reading, key.task, key.arm) == (reading, task, arm) and key.condition in problems
    ]


def matched_peaks(
    series: Sequence[tuple[tuple[Any, ...], int | None, Floats]], every: int = 1
) -> list[tuple[float, float]]:
    """(highest zeta before the failure, that of a calm run over the same steps), a failing run.

    series: of each run its setting, the step at which it failed or None, and zeta at every
    ``every``-th step.  The calm run is the next one of the same setting, each taken once: chosen
    without a look at its zeta.  Without one a failing run is not told: zeta differs between
    settings, of which some fail more than others.
    """
    calm = {i: zeta for i, (_, bad, zeta) in enumerate(series) if bad is None}
    found = []
    for i, (where, bad, zeta) in enumerate(series):
        alike = [j for j in calm if series[j][0] == where]
        if bad is None or not alike:
            continue
        stop = -(-bad // every)
        other = calm.pop(min(alike, key=lambda j: (j - i) % len(series)))
        if np.isfinite(zeta[:stop]).any() and np.isfinite(other[:stop]).any():
            found.append((float(np.nanmax(zeta[:stop])), float(np.nanmax(other[:stop]))))
    return found


def probed(
    results: Results, reading: Reading, task: Task
) -> list[tuple[tuple[Any, ...], int | None, Floats]]:
    """Setting, step of failure and zeta of each MX run, in the order of seeds."""
    return [
        (
            (key.condition, key.lr),
            failed_at(results.records[key]),
            np.exp(series_of(results.records[key], "zeta")),
        )
        for key in sorted(own_scheme(results, reading, task, "mx"), key=lambda k: k.seed)
    ]


def watched(
    results: Results, reading: Reading, task: Task
) -> list[tuple[tuple[Any, ...], int | None, Floats]]:
    """The same of watched runs, by the script's own measure: the squared ratio of two trajectories.

    The first step is no number: both runs still have the same weights there.
    """
    found = []
    for (a, b, lr, _), record in sorted(results.watched.items(), key=lambda item: item[0][3]):
        if (a, b) == (reading, task):
            zeta = np.array(record.arrays["zeta_script"], np.float64)
            zeta[:1] = np.nan
            found.append(((lr,), failed_at(record), zeta))
    return found


def crowded(results: Results, reading: Reading, task: Task, arm: Arm) -> dict[Key, bool]:
    """Of each run with trained gammas and probes: did half of a layer's saturate at some probe?"""
    without = ("norm none", "norm layer_no_affine")
    return {
        key: bool(np.nanmax(results.records[key].arrays["probe_gamma_saturated"]) >= 0.5)
        for key in own_scheme(results, reading, task, arm)
        if key.condition not in without and "probe_gamma_saturated" in results.records[key].arrays
    }


def saturation(results: Results, reading: Reading, task: Task, tensor: str) -> list[float]:
    """Share of a tensor that saturates in each watched MX run: mean over steps and layers."""
    return [
        float(np.nanmean(record.arrays[f"saturated_{tensor}"][:, 1]))
        for (a, b, _, _), record in results.watched.items()
        if (a, b) == (reading, task)
    ]


# ---------------------------------------------------------------- the claims


def gradient_bias(results: Results) -> Verdict:
    """Claim 5."""
    found = []
    for reading, task in ALL_CONTEXTS:
        failing = [results.failed(key) for key in own_scheme(results, reading, task, "mx")]
        for words, series, sign in (("zeta grows", "zeta", 1), ("cos falls", "cos", -1)):
            changes = before_failure(results, reading, task, series)
            told = sum(map(len, changes.values()))
            for kind, values in changes.items():
                detail = f"median {np.median(values):+.2g}; " if values else ""
                detail += f"{told} of {sum(failing)} failing runs are told"
                signs = [float(np.sign(sign * v)) for v in values]
                found.append(finding(kind, reading, task, words, signs, detail))
        peaks = matched_peaks(probed(results, reading, task), results.design.probe_every)
        found.append(foretold(peaks, reading, task, "zeta above 2 foretells failure", sum(failing)))
    for reading, task in CONTEXTS:
        runs = watched(results, reading, task)
        failures = sum(bad is not None for _, bad, _ in runs)
        words = f"{SCRIPT_METRIC} above 4 foretells failure"  # it is squared
        found.append(foretold(matched_peaks(runs), reading, task, words, failures, 4.0))
    return Verdict(
        5,
        "zeta grows and cos falls before divergence, which comes at a norm of Z of about 2",
        "Before a divergence the gradient's relative error zeta grows and its cosine with the "
        "exact gradient falls; by a crude bound an operator norm of Z of about 2 breaks training.",
        "MX runs of all settings, probed at the same point. Grows, falls: the change from the five "
        "probes before to the last three before the first bad step (log of zeta; cos), against the "
        "median change of three or more runs of its setting and rate that do not fail, at the same "
        "steps: failing runs in which it is larger minus those in which it is smaller, sign test. "
        "Runs that fail before their eighth probe, or without such company, are not told. Above 2: "
        "each failing run against one of the same setting and rate that does not fail, each taken "
        "once, both up to the step of the failure; does the failing one alone exceed 2? By the "
        "probes and, in the watched pairs, by the script's own measure: "
        "the squared ratio between the gradients of two trajectories, above 4. Zeta is at most "
        "|Z|_op, so that a zeta below 2 says nothing against the bound.",
        corrected(found),
    )


def foretold(
    peaks: Sequence[tuple[float, float]],
    reading: Reading,
    task: Task,
    words: str,
    failing: int,
    limit: float = 2.0,
) -> Finding:
    """Of (highest zeta of a failing run, of a calm one): is the failing one alone above a limit?"""
    over = [(own > limit, other > limit) for own, other in peaks]
    mine, others = (sum(each[i] for each in over) for i in (0, 1))
    return finding(
        "measured",
        reading,
        task,
        words,
        [int(a) - int(b) for a, b in over],
        f"{mine} of {len(over)} failing, {others} of as many others; {len(over)} of {failing} "
        "failing runs have a probe and a partner",
        room_of(*zip(*over, strict=True)) if over else 0,
    )


def last_bin(results: Results) -> Verdict:
    """Claim 6."""
    found, notes = [], []
    reference = 100 * gaussian_clamp("mxfp8_e4m3").elements
    for reading, task in ALL_CONTEXTS:
        for kind, values in before_failure(results, reading, task, "gamma_saturated").items():
            signs = [float(np.sign(v)) for v in values]
            found.append(
                finding(kind, reading, task, "gammas crowd into the last bin first", signs)
            )
    for reading, task in ALL_CONTEXTS:
        found.append(crowded_by_precision(results, reading, task))
    tested = corrected(found)
    measured = []
    for reading, task in ALL_CONTEXTS:
        runs = list(crowded(results, reading, task, "mx").values())
        estimate = share(sum(runs), len(runs)) if runs else NOTHING
        measured.append(
            Finding(
                "measured",
                reading,
                task,
                "MX runs in which half of a layer's gammas saturate at once",
                estimate,
                np.nan,
                decide_range(estimate, 0.5, 1.0),
            )
        )
        if task not in TASKS:  # no pair is watched there
            continue
        overflow = median_over_seeds(
            100 * np.array(saturation(results, reading, task, "ln_output"))
        )
        measured.append(
            Finding(
                "measured",
                reading,
                task,
                "overflowing share of layer norm's output, in %",
                overflow,
                np.nan,
                decide_range(overflow, 0.5, 2.0),
            )
        )
        inside = "inside" if overflow.low <= reference <= overflow.high else "outside"
        notes.append(f"A Gaussian tensor's {reference:.2f} % is {inside} that, {reading}, {task}.")
    return Verdict(
        6,
        "Gammas crowd into the last bin; about 1 % of activations overflow",
        "Layer norm's gammas cluster so that whole blocks of them land in the last quantization "
        "bin, and about one in a hundred activations exceeds the largest representable number.",
        "Crowded: at some probe half of a layer's gammas or more saturate; holds if that is so in "
        "most runs (Wilson interval above 0.5). In MX rather than in exact: of the base's pairs. "
        "The gammas of exact runs, and of paper_code, which keeps them in bf16, are probed for "
        "what E4M3 blocks would do to them. Overflow: median over watched runs, holds if its "
        "interval lies within 0.5 to 2 %. First: the share just before a failure against earlier, "
        "as in claim 5.",
        (*tested, *measured),
        tuple(notes),
    )


def crowded_by_precision(results: Results, reading: Reading, task: Task) -> Finding:
    """Do gammas crowd oftener under MX than in the exact run of the same seed and rate?"""
    mx, exact = (crowded(results, reading, task, arm) for arm in ("mx", "exact"))
    both = [
        (own, exact[at])
        for key, own in mx.items()
        if (at := Key(*key_of(key), arm="exact")) in exact
    ]
    sides = [[pair[i] for pair in both] for i in (0, 1)]
    return finding(
        "precision-induced",
        reading,
        task,
        "gammas crowd in MX rather than in exact",
        [int(a) - int(b) for a, b in both],
        f"{sum(sides[0])} MX and {sum(sides[1])} exact runs",
        room_of(*sides),
    )
