"""How a claim is decided: rules written down before looking, data in, verdict out.

**Failures** are compared in pairs that share weights, teacher and data.  A pair's difference d is
+1 if only the side fails that the claim says should, -1 if only the other does, else 0 (or the
difference of two such differences).  Tested by the exact sign test of the pairs with d != 0 (for
single differences that is exact McNemar), two-sided; p-values are corrected within a claim for all
of its comparisons (Holm).  The interval is Wald's after one +1 and one -1 are added (Bonett and
Price 2012).  Pairs of one seed at different rates and settings count as independent.  Then:

- ``holds``: p < 0.05, in the claim's direction; ``opposite``: p < 0.05 the other way;
- ``not seen``: p >= 0.05, and the interval excludes a difference of MARGIN in its direction;
- ``undecided``: neither: n is too small to tell.

**Kinds.**  A failure of an MX run is optimizer-driven if its exact pair fails too, else
precision-induced.  Precision: d is MX minus exact; comparisons of settings take the difference of
the two d.  Optimizer: failures of the exact runs alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from mxsim.stats import CONFIDENCE, NOTHING, Estimate, mcnemar

Word = Literal["holds", "opposite", "not seen", "undecided", "missing"]
Kind = Literal["precision-induced", "optimizer-driven", "measured"]
ALPHA = 0.05
MARGIN = 0.2  # a fifth of all pairs; with none discordant, 12 pairs exclude it
ENOUGH = 6  # of six values the smallest and largest enclose the median in 97 % of cases, of five 94
Z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class Finding:
    """One comparison: whether it holds in one context (a kind, a reading, a task).

    estimate: of what ``words`` say, with n; p: raw; adjusted: by Holm within the claim.
    """

    kind: Kind
    reading: str
    task: str
    words: str
    estimate: Estimate
    p: float
    word: Word
    adjusted: float = np.nan
    detail: str = ""

    @property
    def where(self) -> str:
        return ", ".join(each for each in (self.reading, self.task) if each)


def paired(values: Sequence[float]) -> tuple[Estimate, float]:
    """Mean difference with its interval, and the sign test's p; values one a pair."""
    d = np.asarray(values, np.float64)
    if not len(d):
        return NOTHING, 1.0
    more = np.concatenate([d, [1.0, -1.0]])
    half = Z * float(np.sqrt(np.var(more) / len(more)))
    middle = float(more.mean())
    limit = max(1.0, float(np.abs(d).max()))
    low, high = max(middle - half, -limit), min(middle + half, limit)
    estimate = Estimate(float(d.mean()), low, high, len(d))
    return estimate, mcnemar(int(np.sum(d > 0)), int(np.sum(d < 0)))


def two_shares(one: int, n: int, other: int, m: int) -> tuple[Estimate, float]:
    """one / n - other / m with Agresti and Caffo's interval, and Fisher's exact p."""
    if not (n and m):
        return NOTHING, 1.0
    p, q = (one + 1) / (n + 2), (other + 1) / (m + 2)
    half = Z * float(np.sqrt(p * (1 - p) / (n + 2) + q * (1 - q) / (m + 2)))
    estimate = Estimate(one / n - other / m, p - q - half, p - q + half, n + m)
    return estimate, float(stats.fisher_exact([[one, n - one], [other, m - other]]).pvalue)


def finding(
    kind: Kind, reading: str, task: str, words: str, values: Sequence[float], detail: str = ""
) -> Finding:
    """A comparison of pairs, still to be corrected."""
    estimate, p = paired(values)
    return Finding(kind, reading, task, words, estimate, p, decide(estimate, p), p, detail)


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in their order (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    corrected, running = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = running
    return corrected


def decide(estimate: Estimate, p: float) -> Word:
    """The rule above, for a claim that the difference is positive."""
    if not estimate.n:
        return "undecided"
    if p < ALPHA:
        return "holds" if estimate.value > 0 else "opposite"
    return "not seen" if estimate.high < MARGIN else "undecided"


def decide_either(estimate: Estimate, p: float) -> Word:
    """For a claim that there is a difference, whichever way."""
    if estimate.n and p < ALPHA:
        return "holds"
    excluded = estimate.n and max(abs(estimate.low), abs(estimate.high)) < MARGIN
    return "not seen" if excluded else "undecided"


def decide_match(excess: Estimate, p: float, ratio: Estimate, goal: float) -> Word:
    """For a claim that a scheme matches full precision, in failures and in loss.

    holds: excess failures within MARGIN either way, and the held-out loss's median ratio to the
    exact run's below ``goal``, upper end included.  not seen: more failures (p < 0.05), or the
    ratio's lower end above ``goal``.  A median of fewer than ENOUGH pairs decides nothing.
    """
    known = ratio.n >= ENOUGH
    if excess.n and ((p < ALPHA and excess.value > 0) or (known and ratio.low > goal)):
        return "not seen"
    equal = excess.n and max(abs(excess.low), abs(excess.high)) < MARGIN
    return "holds" if equal and known and ratio.high < goal else "undecided"


def decide_range(estimate: Estimate, low: float, high: float) -> Word:
    """For a claim that a number lies in a range: its interval inside, outside, or across."""
    if not estimate.n or np.isnan(estimate.low):
        return "undecided"
    if low <= estimate.low and estimate.high <= high:
        return "holds"
    return "not seen" if estimate.high < low or estimate.low > high else "undecided"


def corrected(findings: Iterable[Finding], either: bool = False) -> tuple[Finding, ...]:
    """Holm over the findings, and their words; what is missing stays so, and does not count."""
    found = list(findings)
    rule = decide_either if either else decide
    there = [i for i, each in enumerate(found) if each.word != "missing"]
    for i, p in zip(there, holm([found[i].p for i in there]), strict=True):
        found[i] = replace(found[i], adjusted=p, word=rule(found[i].estimate, p))
    return tuple(found)


def summarize(findings: Sequence[Finding]) -> str:
    """One verdict of several contexts: ``holds``, ``holds only under ...``, and so on."""
    words = [f.word for f in findings]
    if not words:
        return "-"
    if all(word == "holds" for word in words):
        return "holds"
    if "holds" in words:
        return f"holds only under {_under(findings, 'holds')}"
    if "opposite" in words:
        return f"not seen; the opposite under {_under(findings, 'opposite')}"
    for word in ("undecided", "missing"):
        if word in words:
            share = f", {words.count('not seen')} of {len(words)} comparisons not seen"
            return word + (share if "not seen" in words else "")
    return "not seen"


def _under(findings: Sequence[Finding], word: Word) -> str:
    """Where a word was given: what was compared, and in brackets under what, each once."""
    alone = len({f.reading for f in findings}) == 1  # then it goes without saying
    places: dict[str, list[str]] = {}
    for f in findings:
        if f.word == word:
            places.setdefault(f.words, []).append(f.task if alone else f.where)
    return "; ".join(f"{words} ({'; '.join(each)})" for words, each in places.items())


@dataclass(frozen=True)
class Verdict:
    """A claim, the rule by which it is decided, and what was found."""

    number: int
    title: str
    paper: str
    """What the paper says, in our words."""
    rule: str
    findings: tuple[Finding, ...]
    notes: tuple[str, ...] = ()

    def of(self, kind: Kind, reading: str | None = None) -> tuple[Finding, ...]:
        """The findings of one kind; of one reading, those of either count."""
        return tuple(
            f
            for f in self.findings
            if f.kind == kind and (reading is None or f.reading in (reading, ""))
        )
