"""The page of claims, written from stored results: no number on it is typed by hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from mxsim.stats import Estimate
from mxsim.store import provenance, whole_file
from studies.claims import READINGS, Design, Results, Tier, load
from studies.claims_cited import cited
from studies.claims_decided import faults, verdicts
from studies.claims_signs import SCRIPT_METRIC
from studies.claims_verdicts import ALPHA, MARGIN, Finding, Verdict, summarize


def write_page(tier: Tier, root: Path, path: Path) -> Path:
    """Write the page whole, in a folder that is made if need be; returns ``path``.

    The runs are read here, not by the caller: run as a command, claims.py is another module than
    the one that the verdicts know, and its keys are other keys.
    """
    text = page(load(tier, root), path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(text.encode())
    return path


def page(results: Results, path: Path) -> str:
    """The page as Markdown, as it is written to ``path``."""
    found, of_faults = verdicts(results), faults(results)
    lines = [*_head(results, path), *_summary(found), *_how(), *_faults(found, of_faults)]
    for verdict in found:
        lines += _section(verdict, results, of_faults)
    return "\n".join([*lines, *_foot(results, path)]) + "\n"


def _head(results: Results, path: Path) -> Iterator[str]:
    d = results.design
    base = d.base
    yield "# The paper's claims about the proxy, one by one"
    yield ""
    yield (
        "Su et al. (2025, arXiv:2506.20752) explain the instabilities of MX training on a "
        "student-teacher proxy. Here each of their claims about it is put to the test on pairs of "
        "runs, exact and MX, that share weights, inputs and (but for the script's quantized "
        "teacher, under which an MX run has other targets) teacher. This page is written by "
        f"`{command(results, path)}` from stored results."
    )
    yield ""
    yield (
        f"Tier `{results.tier}`: {results.runs} runs, width {base.width}, depth {base.depth}, "
        f"batch {base.batch}, {base.steps} steps, rates {', '.join(f'{r:g}' for r in d.rates)}, "
        f"{d.seeds} seeds. {_searched(d)} These are not the paper's sizes; what is not seen here "
        "may be there (`--tier cluster` is defined for that)."
        if results.tier != "cluster"
        else f"Tier `cluster`, the paper's sizes: {results.runs} runs, {d.seeds} seeds. "
        f"{_searched(d)}"
    )
    yield ""
    yield (
        "Two readings: `paper_text`, what the paper describes (layer norm's gamma and beta in MX "
        "blocks, too), and `paper_code`, what the released script computes (layer norm in bf16, "
        "beta frozen, the teacher quantized). Two tasks: `script`, the script's teacher, whose "
        "outputs are near zero, and `unit`, a teacher of unit-variance outputs "
        "(studies/claims_teacher.py; over conditions its outputs' standard deviation is 0.54 to "
        "1.02). And a third place, `searched`, for what precision alone changes: a setting that "
        "`python -m studies.touchy_settings` found, looking under paper_text only, to fail oftener "
        "in MX; seeds that no other study has used."
    )
    yield ""


def _searched(design: Design) -> str:
    """The third place in words."""
    cfg, seeds = design.searched, design.searched_seeds
    return (
        f"`searched`: {cfg.norm} norm, width {cfg.width}, depth {cfg.depth}, batch {cfg.batch}, "
        f"rate {cfg.lr:g}, {cfg.steps} steps, seeds {seeds[0]} to {seeds[-1]}."
    )


def _summary(found: Sequence[Verdict]) -> Iterator[str]:
    yield "| | claim | under paper_text | under paper_code | of exact training alone | clearest |"
    yield "|---|---|---|---|---|---|"
    for v in found:
        cells = [_cell(_of_reading(v, reading)) for reading in READINGS]
        own = summarize([f for f in v.of("optimizer-driven") if not f.reading])
        yield f"| {v.number} | {v.title} | {' | '.join(cells)} | {own} | {_clearest(v)} |"
    yield ""


def _of_reading(verdict: Verdict, reading: str) -> list[Finding]:
    """The findings under one reading."""
    return [f for f in verdict.findings if f.reading == reading]


def _cell(findings: Sequence[Finding]) -> str:
    return summarize(findings) if findings else "missing"


def _clearest(verdict: Verdict) -> str:
    """The finding with the smallest p, with its interval and n; none if all of them are 1."""
    tested = [f for f in verdict.findings if not np.isnan(f.p) and f.estimate.n]
    if not tested or min(f.p for f in tested) == 1:
        return "-"
    f = min(tested, key=lambda each: (each.adjusted, each.p, -abs(each.estimate.value)))
    return f"{f.words} ({f.where}): {_number(f.estimate)}, n {f.estimate.n}"


def _how() -> Iterator[str]:
    yield "## How it is decided"
    yield ""
    yield (
        "The rules stand in studies/claims_verdicts.py. A first page, of four seeds at the rates "
        "0.01, 0.02 and 0.035, was written by the same rules but one, what a failure is: a NaN or "
        "Inf, or a spike of the loss that the run does not leave. At first a run that had not "
        "learned enough by its last step counted, too, and most of those were slow, not unstable. "
        "Then rates were raised, since at 0.01 no exact run failed and nothing could be told, "
        "seeds doubled, and the searched place added; seeds 0 to 3 are in both pages. A failed "
        "MX run is *optimizer-driven* if its exact pair fails too, else *precision-induced*. "
        "Failures are compared pair by pair: precision-induced is MX minus exact (of two settings, "
        "the difference of the two), optimizer-driven the exact runs alone. Exact sign test "
        "(McNemar), p corrected within a claim for all of its comparisons (Holm). The interval is "
        "Wald's with one pair added either way (Bonett and Price); pairs of a seed at other rates "
        "and settings count as independent."
    )
    yield ""
    yield (
        f"*holds*: p < {ALPHA} in the claim's direction. *opposite*: the other way. *not seen*: "
        f"p at least {ALPHA} and a difference of {MARGIN:g} of all pairs excluded. *undecided*: n "
        "is too small to tell. *holds* wants six or more pairs on one side and none on the other, "
        "and more of them the more comparisons the claim has. A spike still open at a run's last "
        "step counts as not left. "
        "Intervals are not widened for the number of comparisons; claim 10's p is not corrected. "
        "What the paper says is given in our words."
    )
    yield ""


def _faults(found: Sequence[Verdict], of_faults: Sequence[Finding]) -> Iterator[str]:
    yield "## What rests on the script's faults"
    yield ""
    yield (
        "The script's MX phase gives beta no gradient, quantizes the teacher, and judges by "
        "gradients of two trajectories. Excess failures of the base with each of the first two "
        "against without:"
    )
    yield ""
    yield from _table(of_faults)
    code = [v.number for v in found if _holds(v, "paper_code")]
    text = [v.number for v in found if _holds(v, "paper_text")]
    only = [n for n in code if n not in text]
    yield (
        f"Claims of which something holds under paper_code: {_list(code)}; under paper_text: "
        f"{_list(text)}; under paper_code alone, so that they may rest on how the script computes: "
        f"{_list(only)}."
    )
    yield ""
    yield (
        "The cross-trajectory metric bears on claim 5 alone. Two runs part whatever parts them, so "
        "that it grows without any bias of the gradient; does a value above 2 foretell failure?"
    )
    yield ""
    bias = next(v for v in found if v.number == 5)
    yield from _table([f for f in bias.findings if f.words.startswith(SCRIPT_METRIC)])


def _holds(verdict: Verdict, reading: str) -> bool:
    return any(f.word == "holds" for f in verdict.findings if f.reading == reading)


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def rests(verdict: Verdict, of_faults: Sequence[Finding]) -> str:
    """Whether what holds under paper_code rests on a fault of the script."""
    if not any(f.reading == "paper_code" for f in verdict.findings):
        return "Faults: not tried under paper_code."
    if not _holds(verdict, "paper_code"):
        return "Faults: under paper_code nothing of it holds that could rest on them."
    parts = []
    for f in of_faults:
        say = {"holds": "makes failures", "opposite": "prevents failures", "not seen": "does not"}
        parts.append(f"the {f.words} ({f.task}) {say.get(f.word, 'undecided')}")
    also = "; paper_text shows it, too" if _holds(verdict, "paper_text") else ""
    return f"Faults, by the base's failures: {', '.join(parts)}{also}."


def _section(verdict: Verdict, results: Results, of_faults: Sequence[Finding]) -> Iterator[str]:
    yield f"## {verdict.number}. {verdict.title}"
    yield ""
    yield f"*The paper:* {verdict.paper}"
    yield ""
    yield f"*Decided by:* {verdict.rule}"
    yield ""
    for reading in READINGS:
        yield f"- {reading}: **{_cell(_of_reading(verdict, reading))}**"
    yield ""
    if verdict.findings:
        yield from _table(verdict.findings)
    notes = [*verdict.notes, rests(verdict, of_faults), *cited(verdict.number, results)]
    yield from (f"- {note}" for note in notes)
    yield ""


def _table(findings: Sequence[Finding]) -> Iterator[str]:
    yield "| measured | kind | under | n | difference [95 %] | p (corrected) | verdict |"
    yield "|---|---|---|---|---|---|---|"
    for f in findings:
        p = "-" if np.isnan(f.p) else f"{f.p:.2g} ({f.adjusted:.2g})"
        words = f"{f.words}: {f.detail}" if f.detail else f.words
        yield (
            f"| {words} | {f.kind} | {f.where} | {f.estimate.n} | {_number(f.estimate)} | {p} | "
            f"{f.word} |"
        )
    yield ""


def _number(e: Estimate) -> str:
    if not e.n:
        return "-"
    ends = "" if np.isnan(e.low) else f" [{e.low:.3g}, {e.high:.3g}]"
    return f"{e.value:.3g}{ends}"


def command(results: Results, path: Path) -> str:
    """The command that writes the page (a path from the root says nothing to others)."""
    where = path.name if path.is_absolute() else path.as_posix()
    return f"python -m studies.claims --tier {results.tier} --page {where}"


def _foot(results: Results, path: Path) -> Iterator[str]:
    records = [*results.records.values(), *results.watched.values()]
    commits = sorted({str(r.meta["versions"].get("commit")) for r in records})
    now = provenance()["commit"]
    yield (
        f"Written by `{command(results, path)}` at commit {now}, from runs at commit "
        f"{', '.join(commits)}."
    )
