"""The rules by which a claim is decided, on numbers made by hand."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from mxsim.stats import Estimate
from studies.claims_verdicts import (
    Finding,
    Word,
    corrected,
    decide,
    decide_either,
    decide_match,
    decide_range,
    finding,
    holm,
    paired,
    room_of,
    summarize,
)


def test_pairs_by_hand() -> None:
    estimate, p = paired([1] * 8 + [0] * 4)
    assert (estimate.value, estimate.n) == (8 / 12, 12)
    assert p == 2 / 2**8
    q12, q21, n = 9 / 14, 1 / 14, 14  # Bonett and Price 2012
    half = 1.959964 * np.sqrt((q12 + q21 - (q12 - q21) ** 2) / n)
    assert estimate.low == pytest.approx(q12 - q21 - half, abs=1e-6)
    assert paired([-1] * 7)[0].low == -1
    assert paired([])[0].n == 0


def test_words() -> None:
    def word(values: Sequence[float], room: float = np.inf) -> Word:
        return decide(*paired(values), room)

    assert word([1] * 6 + [0] * 6) == "holds"
    assert word([-1] * 6 + [0] * 6) == "refuted"
    assert word([0] * 12) == "not seen"
    assert word([0] * 12, 5) == word([1] * 5 + [0] * 40, 5) == "no room"
    assert word([0] * 12, 6) == "not seen"
    assert word([1] * 12, 0) == "holds"  # all on one side fail, none on the other: room enough
    assert room_of([True] * 3 + [False] * 9, [True] + [False] * 11) == 4
    assert room_of([True] * 12, [True] * 11 + [False]) == 1
    assert word([0] * 8) == "undecided"
    assert word([1] * 4 + [0] * 8) == "undecided"
    assert word([]) == word([1] * 5) == "no room"
    assert word([0] * 312, 62) == "no room"  # fewer than a fifth of the pairs
    assert word([0] * 312, 63) == "not seen"
    assert decide_either(*paired([-1] * 6)) == "holds"
    assert decide_either(*paired([0] * 12)) == "not seen"
    assert decide_either(*paired([1] * 3)) == "no room"
    assert decide_either(*paired([1] * 3 + [0] * 3)) == "undecided"
    assert decide(Estimate(0.1, 0.02, 0.17, 104), 0.13) == "undecided"  # none is excluded as well
    assert decide_either(*paired([0] * 12), 3) == "no room"
    assert decide_range(Estimate(1, 0.8, 1.3, 5), 0.5, 2) == "no room"
    assert decide_range(Estimate(1, 0.8, 1.3, 9), 0.5, 2) == "holds"
    assert decide_range(Estimate(3, 2.8, 3.3, 9), 0.5, 2) == "not seen"
    assert decide_range(Estimate(2, 1.8, 2.3, 9), 0.5, 2) == "undecided"


def test_a_hybrid_matches_only_if_failures_and_loss_do() -> None:
    none, close = paired([0] * 12), Estimate(1.01, 1.0, 1.02, 12)
    assert decide_match(*none, close, 1.05) == "holds"
    assert decide_match(*none, Estimate(1.03, 1.0, 1.06, 12), 1.05) == "undecided"
    assert decide_match(*none, Estimate(1.2, 1.1, 1.3, 12), 1.05) == "refuted"
    assert decide_match(*paired([1] * 6 + [0] * 6), close, 1.05) == "refuted"
    assert decide_match(*paired([0] * 6), close, 1.05) == "undecided"
    few = Estimate(2.0, 2.0, 2.0, 1)
    assert decide_match(*none, few, 1.05) == "undecided"
    assert decide_match(*none, replace(few, n=6), 1.05) == "refuted"
    assert decide_match(*paired([1] * 6 + [0] * 6), few, 1.05) == "refuted"


def test_holm_by_hand_and_its_effect_on_the_words() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    one = finding("precision-induced", "paper_text", "unit", "x", [1] * 6)
    assert one.word == "holds"
    both = corrected([one, one])
    assert [f.adjusted for f in both] == [0.0625, 0.0625]
    assert [f.word for f in both] == ["undecided", "undecided"]


def test_summaries() -> None:
    def those(*words: Word) -> str:
        return summarize(
            [Finding("measured", "r", f"t{i}", "it", paired([1])[0], 1, w)
             for i, w in enumerate(words)]
        )  # fmt: skip

    assert those("holds", "holds") == "holds"
    assert those("holds", "not seen") == "holds only under it (t0); else 1 not seen"
    assert those("not seen", "not seen") == "not seen"
    assert those("refuted", "undecided") == "refuted under it (t0); else 1 undecided"
    assert those("holds", "refuted") == "holds only under it (t0); refuted under it (t1)"
    assert those("undecided", "not seen") == "not seen (1 not seen, 1 undecided)"
    assert those("undecided", "no room") == "undecided (1 undecided, 1 no room)"
    assert those("no room", "not seen", "no room") == "not seen (1 not seen, 2 no room)"
    aside = Finding("reference", "r", "t", "it", paired([1])[0], 1, "holds")
    assert summarize([aside]) == "-"


def test_what_could_not_reach_significance_is_no_test_of_the_claim() -> None:
    """Tarone 1990: five discordant pairs are not enough, whichever way they go."""
    one = finding("precision-induced", "paper_text", "unit", "x", [1] * 6)
    few = finding("precision-induced", "paper_text", "unit", "y", [1] * 5 + [0] * 30)
    assert (one.able, few.able) == (True, False)
    first, second = corrected([one, few])
    assert (first.adjusted, first.word) == (2 / 2**6, "holds")
    assert (second.adjusted, second.word) == (1.0, "undecided")
