"""The corpus: every case, by name."""

from __future__ import annotations

from collections import Counter
from functools import cache

from mxsim.crosscheck.case import Case
from mxsim.crosscheck.patterns import pattern_cases
from mxsim.crosscheck.reports import report_cases
from mxsim.crosscheck.witnesses import golden_cases


@cache
def corpus() -> tuple[Case, ...]:
    """All cases, always the same ones in the same order.  Raises ValueError if two share a name."""
    cases = (*report_cases(), *pattern_cases(), *golden_cases())
    twice = [name for name, count in Counter(case.name for case in cases).items() if count > 1]
    if twice:
        raise ValueError(f"cases must have names of their own; got twice: {', '.join(twice)}")
    return cases
