"""Every backend on every case: what agrees with the judge, what differs, and whether it is known.

``check`` returns data only; report.py prints and writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mxsim.crosscheck.backend import Backend, Result
from mxsim.crosscheck.case import FORMATS, Array, Case, Config
from mxsim.crosscheck.known import KNOWN, Known
from mxsim.crosscheck.reference import Judgement, judge

Scheme = tuple[str, str, str]  # format, rule, rounding


@dataclass
class Cell:
    """One backend under one scheme: numbers of cases."""

    passed: int = 0
    known: int = 0
    failed: int = 0


@dataclass(frozen=True)
class Example:
    """One element at which a backend differs: where, what went in, what came out, what is right.

    Numbers as text: value and hexadecimal.  in_values: the value differs, not just code or scale.
    """

    case: str
    config: str
    index: tuple[int, ...]
    what: str
    x: str
    block_maximum: str
    got: str
    specified: str
    in_values: bool = True


@dataclass
class Difference:
    """What a backend does otherwise for one reason (or for none that is known)."""

    backend: str
    known: Known | None
    cases: int = 0
    elements: int = 0
    examples: list[Example] = field(default_factory=list)


@dataclass
class Matrix:
    """What came out of a cross-check.

    cannot: backend -> reason -> number of configs.  stale: known differences of backends that ran,
    which nothing showed.
    """

    backends: list[Backend]
    missing: dict[str, str]
    cases: int
    configs: int
    cells: dict[tuple[str, Scheme], Cell]
    cannot: dict[str, Counter[tuple[str, str]]]
    known: list[Difference]
    unexplained: list[Difference]
    stale: list[Known]


EXAMPLES = 3  # of each known difference
OVERFLOWS = 2.0**126  # near the end of float32, where a wrong last place may be Inf
LISTED = 40  # unexplained differences shown in full


def check(
    cases: Sequence[Case],
    backends: Sequence[Backend],
    missing: dict[str, str] | None = None,
    formats: tuple[str, ...] = FORMATS,
    known: Sequence[Known] = KNOWN,
) -> Matrix:
    """Hold every backend to every config of every case that it can run."""
    configs = 0
    cells: dict[tuple[str, Scheme], Cell] = {}
    cannot: dict[str, Counter[tuple[str, str]]] = {b.name: Counter() for b in backends}
    explained = {(b.name, k.name): Difference(b.name, k) for b in backends for k in known}
    unexplained: list[Difference] = []
    for case in cases:
        for config in case.configs(formats):
            configs += 1
            judged = judge(case.x, config)
            for backend in backends:
                reason = backend.can_run(config)
                if reason is not True:
                    cannot[backend.name][config.fmt, reason] += 1
                    continue
                scheme = (config.fmt, config.rule, config.rounding)
                cell = cells.setdefault((backend.name, scheme), Cell())
                found = compare(backend, case.x, config, judged, known)
                reasons = {entry for entry, _, _ in found}
                if None in reasons:
                    cell.failed += 1
                elif reasons:
                    cell.known += 1
                else:
                    cell.passed += 1
                for entry, elements, example in found:
                    if entry is None:
                        unexplained.append(Difference(backend.name, None, 1, elements, [example]))
                        continue
                    difference = explained[backend.name, entry.name]
                    difference.cases += 1
                    difference.elements += elements
                    _keep(difference.examples, example)
    shown = [d for d in explained.values() if d.cases]
    ran = {name for name, _ in cells}
    stale = [k for k in known if k.of_any(ran) and not any(d.known is k for d in shown)]
    return Matrix(
        list(backends),
        missing or {},
        len(cases),
        configs,
        cells,
        cannot,
        shown,
        unexplained,
        stale,
    )


def _keep(examples: list[Example], example: Example) -> None:
    """The first few, those in which a value differs before the others."""
    examples.append(example)
    examples.sort(key=lambda each: not each.in_values)
    del examples[EXAMPLES:]


Found = tuple[Known | None, int, Example]


def compare(
    backend: Backend, x: Array, config: Config, judged: Judgement, known: Sequence[Known] = KNOWN
) -> list[Found]:
    """(why, elements, first example) of each reason for which a backend differs; [] if it agrees.

    An exception is a difference, too.
    """
    try:
        result = backend.run(x, config)
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        example = Example(config.case, str(config), (), "raised", "", "", text, "a result")
        return [(None, x.size, example)]
    found: list[Found] = []
    wrong: dict[str, Array] = {}
    for what, got, right in _pairs(result, config, judged):
        if got.shape != right.shape or got.dtype != right.dtype:
            forms = f"{got.dtype} {got.shape}", f"{right.dtype} {right.shape}"
            example = Example(config.case, str(config), (), f"form of {what}", "", "", *forms)
            found.append((None, x.size, example))
            continue
        differs = ~_same(got, right, backend.as_numbers)
        wrong[what] = differs.ravel()[judged.block] if what == "scales" else differs
    anywhere = np.zeros(x.shape, bool)
    for differs in wrong.values():
        anywhere |= differs
    unexplained = anywhere.copy()
    for entry in known:
        if unexplained.any() and entry.of(backend.name):
            here = unexplained & entry.where(config, x, judged)
            for what, differs in wrong.items():
                if what.replace("decoded", "values") not in entry.outputs:
                    here &= ~differs
            if not entry.far:
                here &= _near(result, config, judged)
            if here.any():
                found.append(
                    (entry, int(here.sum()), _example(x, config, judged, result, here, wrong))
                )
                unexplained &= ~here
    if unexplained.any():
        example = _example(x, config, judged, result, unexplained, wrong)
        found.append((None, int(unexplained.sum()), example))
    return found


def _near(result: Result, config: Config, judged: Judgement) -> Array:
    """Elements whose value and scale are near the right ones: see Known."""
    near = np.ones(judged.block.shape, bool)
    for what, got, right in _pairs(result, config, judged):
        if got.shape != right.shape or what == "codes":
            continue
        if what == "scales":
            off = np.abs(got.astype(np.int64) - right.astype(np.int64)) <= 1
            near &= off.ravel()[judged.block]
            continue
        g, r = got.astype(np.float64), right.astype(np.float64)
        size = np.abs(r)
        if not config.elementwise:
            size = np.where(r == 0, judged.block_amax.astype(np.float64) / 8, size)
        with np.errstate(invalid="ignore", over="ignore"):
            overflown = np.isinf(g) & (size > OVERFLOWS) & (np.sign(g) == np.sign(r))
            near &= (np.abs(g - r) <= size) | (g == r) | (np.isnan(g) & np.isnan(r)) | overflown
    return near


def _pairs(result: Result, config: Config, judged: Judgement) -> list[tuple[str, Array, Array]]:
    """(what, got, right) of everything that the backend has."""
    values = judged.values_as(config.result_dtype)
    pairs: list[tuple[str, Array | None, Array | None]] = [
        ("values", result.values, values),
        ("decoded", result.decoded, values),
        ("codes", result.codes, judged.codes),
        ("scales", result.scales, judged.scales),
    ]
    return [(what, g, r) for what, g, r in pairs if g is not None and r is not None]


def _same(got: Array, right: Array, as_numbers: bool) -> Array:
    """Entry by entry: the same bits or both NaN; as numbers: equal or both NaN."""
    if got.dtype.kind != "f":
        return np.asarray(got == right)
    equal = (got == right) & (as_numbers | (np.signbit(got) == np.signbit(right)))
    return np.asarray(equal | (np.isnan(got) & np.isnan(right)))


def _example(
    x: Array,
    config: Config,
    judged: Judgement,
    result: Result,
    at: Array,
    wrong: dict[str, Array],
) -> Example:
    """One of the elements ``at``, if there is one then one whose value is wrong."""
    in_values = at & wrong["values"] if "values" in wrong else np.zeros(at.shape, bool)
    index = tuple(int(i) for i in np.argwhere(in_values if in_values.any() else at)[0])
    details: dict[str, list[str]] = {"got": [], "right": []}
    for what, got, right in _pairs(result, config, judged):
        where = index
        if got.shape != right.shape:
            continue
        if what == "scales":
            where = tuple(map(int, np.unravel_index(judged.block[index], right.shape)))
        details["got"].append(f"{what} {number(got[where])}")
        details["right"].append(f"{what} {number(right[where])}")
    maximum = "" if config.elementwise else number(judged.block_amax[index])
    said, specified = (", ".join(details[key]) for key in ("got", "right"))
    what = f"element {index}"
    given = number(x[index])
    shows = bool(in_values.any())
    return Example(config.case, str(config), index, what, given, maximum, said, specified, shows)


def number(value: Any) -> str:
    """As text: an integer as it is, a float with its hexadecimal."""
    if isinstance(value, (np.integer, int)):
        return str(value)
    return f"{float(value):.9g} ({float(value).hex()})" if np.isfinite(value) else str(value)
