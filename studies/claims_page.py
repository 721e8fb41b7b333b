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
from studies.claims_verdicts import ALPHA, ENOUGH, MARGIN, Finding, Verdict, summarize


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
        "blocks, too), and `paper_code`, what the released script computes (layer norm, its "
        "gamma and beta too, in bf16, beta frozen, the teacher quantized). Two tasks: `script`, "
        "the script's teacher, whose outputs are near zero, and `unit`, a teacher of "
        "unit-variance outputs (studies/claims_teacher.py; over conditions its outputs' standard "
        "deviation is 0.54 to 1.02). And a third place, `searched`, for what precision alone "
        "changes: a setting that `python -m studies.touchy_settings` found, looking under "
        "paper_text only, to fail oftener in MX; seeds that no other study has used; the "
        "script's teacher. But for unit, whose teacher is always of GELU, a teacher has its "
        "student's activation, depth, width and init, so that with them the task changes, too."
    )
    yield ""


def _searched(design: Design) -> str:
    """The third place in words."""
    cfg, seeds = design.searched, design.searched_seeds
    return (
        f"`searched`: {cfg.norm} norm, width {cfg.width}, depth {cfg.depth}, batch {cfg.batch}, "
        f"rate {cfg.lr:g}, {cfg.steps} steps, seeds {seeds[0]} to {seeds[-1]} (other depths, "
        f"widths, norms, activations and the like: the first {design.problem_seeds} of them)."
    )


def _summary(found: Sequence[Verdict]) -> Iterator[str]:
    yield (
        "A failure is *precision-induced* if the exact run of the same seed does not fail, "
        "*optimizer-driven* if it does. The words are explained below the table; *no room* means "
        "that hardly anything failed there, or everything did."
    )
    yield ""
    yield "| | claim | under paper_text | under paper_code | optimizer-driven | clearest |"
    yield "|---|---|---|---|---|---|"
    for v in found:
        cells = [_cell(v.under(reading)) for reading in READINGS]
        own = summarize(v.of_the_optimizer)
        yield f"| {v.number} | {v.title} | {' | '.join(cells)} | {own} | {_clearest(v)} |"
    yield ""


def _cell(findings: Sequence[Finding]) -> str:
    return summarize(findings) if findings else "missing"


def _clearest(verdict: Verdict) -> str:
    """Of what holds or is refuted, that with the smallest p, with its interval and n."""
    told = [
        f
        for f in verdict.findings
        if f.word in ("holds", "refuted") and f.kind != "reference" and not np.isnan(f.p)
    ]
    if not told:
        return "-"
    f = min(told, key=lambda each: (each.adjusted, each.p, -abs(each.estimate.value)))
    return f"{f.word}: {f.words} ({f.where}), {_number(f.estimate)}, n {f.estimate.n}"


def _how() -> Iterator[str]:
    yield "## How it is decided"
    yield ""
    yield (
        "A run fails if it meets a NaN or Inf, or if its loss spikes and does not come back (a "
        "spike still open at the last step counts). Failures are compared pair by pair with the "
        "exact sign test (McNemar), p corrected within a claim for all of its comparisons that "
        "could reach it (Holm, Tarone)."
    )
    yield ""
    yield (
        "- *precision-induced*: MX minus exact; of two settings, the difference of the two. It "
        "means within the run's steps: run on, exact runs of the searched place fail, too (claim "
        "1), so that there it is a matter of sooner."
    )
    yield "- *optimizer-driven*: exact runs alone; of MX runs, those whose exact run fails, too."
    yield "- *reference*: shown to be read against, no part of a verdict."
    yield ""
    yield f"- *holds*: p < {ALPHA} in the claim's direction; *refuted*: p < {ALPHA} the other way."
    yield (
        f"- *no room*: fewer than {ENOUGH} pairs; or p at least {ALPHA}, and fewer than {ENOUGH}, "
        f"or than {MARGIN:g} of the pairs, of the runs compared fail, or do not: no difference "
        f"could have shown; nor where fewer than {ENOUGH} exact runs of a setting survive for MX "
        "to add to. Where two runs are compared with each other (two precisions; exact runs of "
        "two settings), the one counts that fails first, and there is no ceiling."
    )
    yield (
        f"- *not seen*: p at least {ALPHA}, there was room, and the interval excludes a difference "
        f"of {MARGIN:g} of all pairs in the claim's direction."
    )
    yield "- *undecided*: none of these; n is too small to tell."
    yield ""
    yield (
        f"*Holds* wants {ENOUGH} or more discordant pairs on one side if there are none on the "
        "other, and more of them the more comparisons a claim has. Intervals are Wald's with one "
        "pair added either way (Bonett and Price), not widened for the number of comparisons; "
        "pairs of a seed at other rates and settings count as independent. What the paper says "
        "is given in our words. The rules are studies/claims_verdicts.py."
    )
    yield ""
    yield "What changed after numbers were seen:"
    yield ""
    yield (
        "- A first page had four seeds at the rates 0.01, 0.02 and 0.035, and counted as failed a "
        "run that had not learned enough by its last step; most of those were slow, not unstable. "
        "Then rates were raised, since at 0.01 no exact run failed, seeds doubled (0 to 3 are in "
        "both), and the searched place added."
    )
    yield (
        "- On a second page a floor or ceiling read as not seen; claim 1 counted a switch to E2M1 "
        "that is a spike by itself; claim 12 took a lower rate's gain on failures that full "
        "precision by definition does not avert for an advantage; claim 10 had no row of full MX; "
        "claim 5 compared windows of unequal length. These rules were mended on the same runs, and "
        "two precisions told apart by which fails first, since nearly all fail in the searched "
        "place."
    )
    yield (
        "- Other problems in the searched place, and its seeds from 216 on, were run after that. "
        "What came later, on two strict readings: exact runs of two settings are told apart by "
        "which fails first, too; what MX cannot add to, and what a fifth of all pairs hides, is no "
        "room; claim 5 compares runs of one setting and rate; claim 1 has all outcomes everywhere, "
        "spikes that recover apart, and longer runs; claim 12 has half the rate run until it "
        "fails; claim 10's matches are corrected; what bears on a claim only by the way became a "
        "reference (critical rates of runs that are slow, SGD at rates of its own, RMS norm), and "
        "FP4, which never gets to where E4M3 fails, no room."
    )
    yield ""


def _faults(found: Sequence[Verdict], of_faults: Sequence[Finding]) -> Iterator[str]:
    yield "## What rests on the script's faults"
    yield ""
    yield (
        "The script's MX phase gives beta no gradient, quantizes the teacher, and judges by "
        "gradients of two trajectories. Of the base's MX runs with each of the first two and "
        "without, which fail, or fail first:"
    )
    yield ""
    yield from _table(of_faults)
    code = [v.number for v in found if _holds(v, "paper_code")]
    text = [v.number for v in found if _holds(v, "paper_text")]
    only = [n for n in code if n not in text]
    yield (
        f"Claims of which something holds under paper_code: {_list(code)}; under paper_text: "
        f"{_list(text)}; under paper_code alone, so that they may rest on how the script computes: "
        f"{_list(only)}; row by row at each claim. In the searched place RMS norm has no beta to "
        "freeze."
    )
    yield ""
    yield (
        "The cross-trajectory metric bears on claim 5 alone. Two runs part whatever parts them, "
        "so that it grows without any bias of the gradient; does a value above 4, the squared 2, "
        "foretell failure?"
    )
    yield ""
    bias = next(v for v in found if v.number == 5)
    yield from _table([f for f in bias.findings if f.words.startswith(SCRIPT_METRIC)])


def _holds(verdict: Verdict, reading: str) -> bool:
    return any(f.word == "holds" for f in verdict.under(reading) if f.kind != "reference")


def _list(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "none"


def rests(verdict: Verdict, of_faults: Sequence[Finding]) -> str:
    """Whether what holds under paper_code rests on a fault of the script."""
    if verdict.faults is not None:
        return verdict.faults
    if not any(f.reading == "paper_code" for f in verdict.findings):
        return "Faults: not tried under paper_code."
    if not any(f.word in ("holds", "refuted") for f in verdict.under("paper_code")):
        return "Faults: under paper_code nothing of it is decided that could rest on them."
    parts = []
    for f in of_faults:
        say = {
            "holds": "makes failures",
            "refuted": "prevents failures",
            "not seen": "does not",
            "no room": "had no room to",
        }
        parts.append(f"the {f.words} ({f.task}) {say.get(f.word, 'undecided')}")
    same = [
        f.words
        for f in verdict.under("paper_code")
        if f.word in ("holds", "refuted")
        and any(
            (g.words, g.task, g.word) == (f.words, f.task, f.word)
            for g in verdict.under("paper_text")
        )
    ]
    every = [f for f in verdict.under("paper_code") if f.word in ("holds", "refuted")]
    return (
        f"Faults, by the base's failures: {', '.join(parts)}. Of {len(every)} rows decided under "
        f"paper_code {len(same)} are decided alike under paper_text, which has none of the faults."
    )


def _section(verdict: Verdict, results: Results, of_faults: Sequence[Finding]) -> Iterator[str]:
    yield f"## {verdict.number}. {verdict.title}"
    yield ""
    yield f"*The paper:* {verdict.paper}"
    yield ""
    yield f"*Decided by:* {verdict.rule}"
    yield ""
    for reading in READINGS:
        yield f"- {reading}: **{_cell(verdict.under(reading))}**"
    if verdict.of_the_optimizer:
        yield f"- optimizer-driven: **{summarize(verdict.of_the_optimizer)}**"
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
