"""How a claim is decided: rules written down before looking, data in, verdict out.

**Failures** are compared in pairs that share weights, teacher and data.  A pair's difference d is
+1 if only the side fails that the claim says should, -1 if only the other does, else 0 (or the
difference of two such differences).  Tested by the exact sign test of the pairs with d != 0 (for
single differences that is exact McNemar), two-sided; p-values are corrected within a claim for all
of its comparisons that have pairs enough to reach ALPHA (Holm; Tarone 1990).  The interval is
Wald's after one +1 and one -1 are added (Bonett and Price 2012). Pairs of one seed at different
rates and settings count as independent. Then:

- ``holds``: p < 0.05, in the claim's direction; ``refuted``: p < 0.05 the other way;
- ``no room``: fewer than ENOUGH pairs; or fewer than that, or than MARGIN of the pairs, of the runs
  compared fail, or do not: on such a floor or ceiling no difference could have shown (where it is
  asked which of two fails first, a ceiling is none);
- ``not seen``: there was room, and the interval excludes a difference of MARGIN in its direction
  and does not exclude none;
- ``undecided``: none of these: n is too small to tell.

**Kinds.**  A failure of an MX run is optimizer-driven if its exact pair fails too, else
precision-induced.  Precision: d is MX minus exact; comparisons of settings take the difference of
the two d.  Optimizer: failures of the exact runs alone.  What a claim is not about, but has to be
read against, is of kind ``reference``: shown, and no part of a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy import stats

from mxsim.stats import CONFIDENCE, NOTHING, Estimate, mcnemar

Word = Literal["holds", "refuted", "not seen", "no room", "undecided", "missing"]
Kind = Literal["precision-induced", "optimizer-driven", "measured", "reference"]
ALPHA = 0.05
MARGIN = 0.2  # a fifth of all pairs; with none discordant, 12 pairs exclude it
# Of six values the smallest and largest enclose the median in 97 % of cases, of five in 94; and of
# five discordant pairs no sign test reaches ALPHA.
ENOUGH = 6
Z = float(stats.norm.ppf((1 + CONFIDENCE) / 2))


@dataclass(frozen=True)
class Finding:
    """One comparison: whether it holds in one context (a kind, a reading, a task).

    estimate: of what ``words`` say, with n; p: raw; adjusted: by Holm within the claim; room: of
    the runs compared, those that fail or those that do not, whichever are fewer; able: whether
    there are pairs enough that differ for the sign test to reach ALPHA at all.
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
    room: float = np.inf
    able: bool = True

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


def finding(
    kind: Kind,
    reading: str,
    task: str,
    words: str,
    values: Sequence[float],
    detail: str = "",
    room: float = np.inf,
) -> Finding:
    """A comparison of pairs, still to be corrected."""
    estimate, p = paired(values)
    word = decide(estimate, p, room)
    able = np.count_nonzero(values) >= ENOUGH
    return Finding(kind, reading, task, words, estimate, p, word, p, detail, room, bool(able))


def room_of(*outcomes: Sequence[bool]) -> int:
    """Of all runs those with the outcome, or those without, whichever are fewer."""
    every = [each for side in outcomes for each in side]
    return min(sum(every), len(every) - sum(every))


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number, in their order (Holm 1979)."""
    order = np.argsort(p, kind="stable")
    corrected, running = [0.0] * len(p), 0.0
    for rank, i in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[i]))
        corrected[i] = running
    return corrected


def decide(estimate: Estimate, p: float, room: float = np.inf) -> Word:
    """The rule above, for a claim that the difference is positive."""
    if estimate.n < ENOUGH:
        return "no room"
    if p < ALPHA:
        return "holds" if estimate.value > 0 else "refuted"
    if room < max(ENOUGH, MARGIN * estimate.n):
        return "no room"
    return "not seen" if estimate.high < MARGIN and estimate.low <= 0 else "undecided"


def decide_either(estimate: Estimate, p: float, room: float = np.inf) -> Word:
    """For a claim that there is a difference, whichever way."""
    if estimate.n and p < ALPHA:
        return "holds"
    if estimate.n < ENOUGH or room < max(ENOUGH, MARGIN * estimate.n):
        return "no room"
    excluded = estimate.n and max(abs(estimate.low), abs(estimate.high)) < MARGIN
    return "not seen" if excluded else "undecided"


def decide_match(excess: Estimate, p: float, ratio: Estimate, goal: float) -> Word:
    """For a claim that a scheme matches full precision, in failures and in loss.

    holds: excess failures within MARGIN either way, and the held-out loss's median ratio to the
    exact run's below ``goal``, upper end included.  refuted: more failures (p < 0.05), or the
    ratio's lower end above ``goal``.  A median of fewer than ENOUGH pairs decides nothing.
    """
    known = ratio.n >= ENOUGH
    if excess.n and ((p < ALPHA and excess.value > 0) or (known and ratio.low > goal)):
        return "refuted"
    equal = excess.n and max(abs(excess.low), abs(excess.high)) < MARGIN
    return "holds" if equal and known and ratio.high < goal else "undecided"


def decide_range(estimate: Estimate, low: float, high: float) -> Word:
    """For a claim that a number lies in a range: its interval inside, outside, or across.

    Fewer than ENOUGH values leave no room.
    """
    if estimate.n < ENOUGH:
        return "no room"
    if np.isnan(estimate.low):
        return "undecided"
    if low <= estimate.low and estimate.high <= high:
        return "holds"
    return "not seen" if estimate.high < low or estimate.low > high else "undecided"


def corrected(findings: Iterable[Finding], either: bool = False) -> tuple[Finding, ...]:
    """Holm over the findings, and their words; what is missing stays so.

    What could not have reached ALPHA, whichever way its pairs went, is no test and does not count
    (Tarone 1990).
    """
    found = list(findings)
    rule = decide_either if either else decide
    able = [i for i, each in enumerate(found) if each.able and each.word != "missing"]
    adjusted = dict(zip(able, holm([found[i].p for i in able]), strict=True))
    for i, each in enumerate(found):
        if each.word != "missing":
            p = adjusted.get(i, 1.0)
            found[i] = replace(each, adjusted=p, word=rule(each.estimate, p, each.room))
    return tuple(found)


def summarize(findings: Iterable[Finding]) -> str:
    """One verdict of several contexts: ``holds``, ``holds only under ...``, and so on.

    Where the contexts differ every word is given with its count; references do not count.
    """
    found = [f for f in findings if f.kind != "reference"]
    words = [f.word for f in found]
    if not words:
        return "-"
    if len(set(words)) == 1 and words[0] != "refuted":
        return words[0]
    told = [
        f"{say} under {_under(found, word)}"
        for word, say in (("holds", "holds only"), ("refuted", "refuted"))
        if word in words
    ]
    rest = sorted(
        {word for word in words if word not in ("holds", "refuted")},
        key=lambda word: (word == "no room", -words.count(word), word),
    )
    counts = [f"{words.count(word)} {word}" for word in rest]
    if not told:  # then the commonest of those that had room is the verdict
        return f"{counts[0].split(' ', 1)[1]} ({', '.join(counts)})"
    return "; ".join([*told, *([f"else {', '.join(counts)}"] if counts else [])])


def _under(findings: Sequence[Finding], word: str) -> str:
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
    faults: str | None = None
    """How it stands to the script's faults, where the base's failures do not tell."""

    def under(self, reading: str) -> tuple[Finding, ...]:
        """What one reading says: of precision, or measured."""
        return tuple(
            f for f in self.findings if f.reading == reading and f.kind != "optimizer-driven"
        )

    @property
    def of_the_optimizer(self) -> tuple[Finding, ...]:
        """What is said of failures that exact training has, too, under either reading."""
        return tuple(f for f in self.findings if f.kind == "optimizer-driven")
