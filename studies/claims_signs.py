"""What a run shows before it fails: its probes against those of runs that do not.  Claims 5, 6."""

from __future__ import annotations

from collections import defaultdict

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
    two_shares,
)

Floats = NDArray[np.float64]
SCRIPT_METRIC = "the script's zeta"
LAST, EARLIER = 3, 5  # probes just before the failure, and those before them


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

    Those are of the same condition at the same steps, else (where all fail) of any.
    """
    keys = own_scheme(results, reading, task, "mx")
    series = {key: series_of(results.records[key], name) for key in keys}
    calm: dict[str, list[Floats]] = defaultdict(list)
    for key in keys:
        if not results.failed(key):
            calm[key.condition].append(series[key])
            calm[""].append(series[key])
    found: dict[Kind, list[float]] = {"precision-induced": [], "optimizer-driven": []}
    for key in keys:
        bad = failed_at(results.records[key])
        if bad is None:
            continue
        probes = -(-bad // results.design.probe_every)  # those before the step
        own = change(series[key], probes)
        others = [change(each, probes) for each in calm[key.condition] or calm[""]]
        if np.isfinite(own) and np.isfinite(others).any():
            shared = results.failed(Key(*key_of(key), arm="exact"))
            kind: Kind = "optimizer-driven" if shared else "precision-induced"
            found[kind].append(own - float(np.nanmedian(others)))
    return found


def key_of(key: Key) -> tuple[Reading, Task, str, float, int]:
    """All of a key but its arm."""
    return key.reading, key.task, key.condition, key.lr, key.seed


def own_scheme(results: Results, reading: Reading, task: Task, arm: Arm) -> list[Key]:
    """Keys of an arm's runs in all settings of the problem, under the reading's own scheme."""
    problems = results.design.problems
    return [
        key
        for key in results.records
        if (key.reading, key.task, key.arm) == (reading, task, arm) and key.condition in problems
    ]


def peak(results: Results, reading: Reading, task: Task) -> list[tuple[bool, float]]:
    """(failed, highest zeta before the failure) of each MX run that has a probe there."""
    found = []
    for key in own_scheme(results, reading, task, "mx"):
        record = results.records[key]
        bad = failed_at(record)
        stop = None if bad is None else -(-bad // results.design.probe_every)
        zeta = np.exp(series_of(record, "zeta")[:stop])
        if np.isfinite(zeta).any():
            found.append((bad is not None, float(np.nanmax(zeta))))
    return found


def crowded(results: Results, reading: Reading, task: Task, arm: Arm) -> list[bool]:
    """Of each run with trained gammas and probes: did half of a layer's saturate at some probe?"""
    without = ("norm none", "norm layer_no_affine")
    found = []
    for key in own_scheme(results, reading, task, arm):
        record = results.records[key]
        if key.condition not in without and "probe_gamma_saturated" in record.arrays:
            found.append(bool(np.nanmax(record.arrays["probe_gamma_saturated"]) >= 0.5))
    return found


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
        for words, series, sign in (("zeta grows", "zeta", 1), ("cos falls", "cos", -1)):
            for kind, values in before_failure(results, reading, task, series).items():
                detail = f"median {np.median(values):+.2g}" if values else ""
                signs = [float(np.sign(sign * v)) for v in values]
                found.append(finding(kind, reading, task, words, signs, detail))
        peaks = peak(results, reading, task)
        found.append(_foretold(peaks, reading, task, "a zeta above 2 foretells failure"))
    for reading, task in CONTEXTS:
        peaks = script_peak(results, reading, task)
        found.append(_foretold(peaks, reading, task, f"{SCRIPT_METRIC} above 2 foretells failure"))
    return Verdict(
        5,
        "zeta grows and cos falls before divergence, which comes at a norm of Z of about 2",
        "Before a divergence the gradient's relative error zeta grows and its cosine with the "
        "exact gradient falls; by a crude bound an operator norm of Z of about 2 breaks training.",
        "MX runs of all settings, probed at the same point: the change from the probes before to "
        "the last three before the first bad step (log of zeta; cos), against the median change of "
        "runs that do not fail, at the same steps: failing runs in which it is larger minus those "
        "in which it is smaller, sign test. And whether zeta exceeds 2 before the failure oftener "
        "than in runs that do not fail (Fisher), by the probes and, in the watched pairs, by the "
        "script's own measure: the squared ratio between the gradients of two trajectories.",
        corrected(found),
    )


def _foretold(peaks: list[tuple[bool, float]], reading: str, task: str, words: str) -> Finding:
    """Of (failed, highest zeta): is it above 2 oftener in the runs that fail?"""
    failing = [p for failed, p in peaks if failed]
    calm = [p for failed, p in peaks if not failed]
    over = [sum(p > 2 for p in each) for each in (failing, calm)]
    estimate, p = two_shares(over[0], len(failing), over[1], len(calm))
    detail = f"{over[0]} of {len(failing)} failing, {over[1]} of {len(calm)} other runs"
    return Finding("measured", reading, task, words, estimate, p, "undecided", p, detail)


def script_peak(results: Results, reading: Reading, task: Task) -> list[tuple[bool, float]]:
    """(failed, highest value of the script's zeta before the failure) of each watched MX run.

    The first step is left out: both runs still have the same weights there.
    """
    found = []
    for (a, b, _, _), record in results.watched.items():
        bad = failed_at(record)
        series = record.arrays["zeta_script"][1:bad]
        if (a, b) == (reading, task) and np.isfinite(series).any():
            found.append((bad is not None, float(np.nanmax(series))))
    return found


def last_bin(results: Results) -> Verdict:
    """Claim 6."""
    found, notes = [], []
    reference = gaussian_clamp("mxfp8_e4m3").elements
    for reading, task in ALL_CONTEXTS:
        for kind, values in before_failure(results, reading, task, "gamma_saturated").items():
            signs = [float(np.sign(v)) for v in values]
            found.append(
                finding(kind, reading, task, "gammas crowd into the last bin first", signs)
            )
    tested = corrected(found)
    measured = []
    for reading, task in ALL_CONTEXTS:
        for arm in ("mx", "exact"):
            runs = crowded(results, reading, task, arm)
            estimate = share(sum(runs), len(runs)) if runs else NOTHING
            words = f"runs in which half of a layer's gammas saturate at once, {arm}"
            if arm == "mx":
                word = decide_range(estimate, 0.5, 1.0)
                measured.append(Finding("measured", reading, task, words, estimate, np.nan, word))
            else:
                notes.append(f"{words}, {task}: {estimate}, n {estimate.n}")
        if task not in TASKS:  # no pair is watched there
            continue
        shares = np.array(saturation(results, reading, task, "ln_output"))
        overflow = median_over_seeds(100 * shares)
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
    notes = sorted(set(notes))
    notes.append(f"A Gaussian tensor overflows by {100 * reference:.2f} % (theory).")
    return Verdict(
        6,
        "Gammas crowd into the last bin; about 1 % of activations overflow",
        "Layer norm's gammas cluster so that whole blocks of them land in the last quantization "
        "bin, and about one in a hundred activations exceeds the largest representable number.",
        "Crowded: at some probe half of a layer's gammas or more saturate; holds if that is so in "
        "most runs (Wilson interval above 0.5). Overflow: median over watched runs, holds if its "
        "interval lies within 0.5 to 2 %. First: the share just before a failure against earlier, "
        "as in claim 5.",
        (*tested, *measured),
        tuple(notes),
    )
