"""The paper's claims about the proxy, one by one, with verdicts.

    python -m studies.claims [--tier smoke|laptop|cluster] [--results DIR] [--page docs/claims.md]

Su et al. (2025, arXiv:2506.20752) make twelve claims about their student-teacher proxy that can be
tested.  Here each is, on pairs of runs (exact, MX) of one seed that share weights, teacher and
data, one factor changed from a base at a time, at rates around the edge of stability, under two
readings and on two tasks:

- ``paper_text``, what the paper describes: layer norm's gamma and beta in MX blocks, too;
  ``paper_code``, what the released script computes: layer norm in bf16, and known faults;
- ``script``, the script's task, whose teacher's outputs are near zero; ``unit``, the same with a
  gain a layer that gives them unit variance.

Of what precision alone changes, the same pairs are run once more in a third place, ``searched``: a
setting that studies/touchy_settings.py found to fail oftener in MX, on seeds that it has not seen.
Where nothing fails in MX only, no remedy can show.

An exact run does not depend on the reading, nor on a condition that changes precision alone: it is
run once.  What is decided, and by what rule, is in claims_verdicts.py; what other studies' stored
results say in claims_cited.py; the page in claims_page.py.  Here: the runs, and how they are read.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from mxsim import ProbePlan, ProxyConfig, scheme
from mxsim.estimate import cost_of, in_words
from mxsim.executors import Execution
from mxsim.grid import requantize
from mxsim.outcome import DivergenceRule
from mxsim.precision import PrecisionScheme
from mxsim.progress import describe, execute
from mxsim.store import Record, Store
from mxsim.sweep import Point, load_points
from studies.claims_teacher import with_unit_teacher
from studies.claims_watch import Watch
from studies.command import run_as_command
from studies.touchy_settings import SLOW

Tier = Literal["smoke", "laptop", "cluster"]
Reading = Literal["paper_text", "paper_code"]
Task = Literal["script", "unit", "searched"]
Arm = Literal["exact", "mx"]
STUDY = "claims"
READINGS: tuple[Reading, ...] = ("paper_text", "paper_code")
TASKS: tuple[Task, ...] = ("script", "unit")
PLACES: tuple[Task, ...] = (*TASKS, "searched")
CONTEXTS: tuple[tuple[Reading, Task], ...] = tuple((r, t) for r in READINGS for t in TASKS)
ALL_CONTEXTS: tuple[tuple[Reading, Task], ...] = tuple((r, t) for r in READINGS for t in PLACES)
# As in studies/phase_diagrams.py: a tenth of the trivial loss is within reach of the script's task,
# and half of it of the other's.
RULES: Mapping[Task, DivergenceRule] = {
    "script": DivergenceRule(learned_fraction=0.1),
    "unit": DivergenceRule(),
    "searched": DivergenceRule(learned_fraction=0.1),
}


@dataclass(frozen=True)
class Condition:
    """One factor changed from the base: the problem (``config``, a factor of the ``rate``) or MX.

    steps: a factor of the run's length.  text, code: the MX scheme under each reading; None where
    the reading does not have it.  places: where it is run.
    """

    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    text: PrecisionScheme | None = scheme("paper_text")  # noqa: RUF009  (frozen)
    code: PrecisionScheme | None = scheme("paper_code")  # noqa: RUF009
    rate: float = 1.0
    steps: float = 1.0
    places: tuple[Task, ...] = PLACES

    def mx(self, reading: Reading) -> PrecisionScheme | None:
        """The MX scheme of a reading."""
        return self.text if reading == "paper_text" else self.code


@dataclass(frozen=True)
class Design:
    """What a tier runs: all conditions at all ``rates`` (of the base), over ``seeds``.

    ``searched``: that place's base, at its own rate alone, over ``searched_seeds``; settings of the
    problem other than the base, and longer runs, over the first ``problem_seeds`` of them.
    """

    base: ProxyConfig
    depths: tuple[int, int]
    widths: tuple[int, int]
    blocks: tuple[int, int]
    rates: tuple[float, ...]
    seeds: int
    sgd_rate: float
    """Its rate over Adam's, for momentum 0.9."""
    searched: ProxyConfig
    searched_seeds: range
    problem_seeds: int
    more: tuple[Condition, ...] = ()
    probe_every: int = 20
    """Steps between probes: of MX runs under their own scheme, of the base's exact ones both."""
    watch_every: int = 20
    """Of the pairs that are watched tensor by tensor (claims_watch.py), at the highest rates."""

    @property
    def problems(self) -> tuple[str, ...]:
        """Labels of the conditions that leave the reading's MX scheme as it is, of both tasks."""
        return self.problems_of("script")

    def problems_of(self, place: Task) -> tuple[str, ...]:
        """The same of a place."""
        return tuple(
            c.label
            for c in conditions(self)
            if place in c.places and (c.config or c.label == "base")
        )

    def base_of(self, task: Task) -> ProxyConfig:
        """The base of a place, with the script's teacher."""
        return self.searched if task == "searched" else self.base

    def rates_of(self, task: Task) -> tuple[float, ...]:
        """The rates of a place."""
        return (self.searched.lr,) if task == "searched" else self.rates

    def seeds_of(self, task: Task, condition: Condition | None = None) -> range:
        """The seeds of a place, those of a condition."""
        if task != "searched":
            return range(self.seeds)
        few = condition is not None and (condition.config or condition.steps != 1)
        return self.searched_seeds[: self.problem_seeds] if few else self.searched_seeds

    @property
    def watched(self) -> tuple[float, ...]:
        """The rates at which runs are watched."""
        return self.rates[-2:]


DESIGNS: Mapping[Tier, Design] = {
    "smoke": Design(
        ProxyConfig(width=16, depth=2, batch=16, steps=24, lr=0.02, eval_samples=64),
        depths=(1, 3),
        widths=(8, 32),
        blocks=(16, 64),
        rates=(0.02, 0.5),
        seeds=1,
        sgd_rate=64,
        searched=ProxyConfig(
            width=16, depth=2, batch=16, steps=24, lr=0.02, eval_samples=64, norm="rms"
        ),
        searched_seeds=range(200, 202),
        problem_seeds=1,
        probe_every=12,
        watch_every=12,
    ),
    "laptop": Design(
        ProxyConfig(width=64, depth=4, batch=64, steps=500, lr=0.02, eval_samples=4096),
        depths=(2, 8),
        widths=(32, 128),
        blocks=(16, 64),
        # Half fail at 0.036 (python -m studies.phase_diagrams); at 0.01 none does.
        rates=(0.02, 0.035, 0.05),
        seeds=8,
        sgd_rate=64,  # half fail at 2.2
        searched=SLOW,
        searched_seeds=range(200, 232),
        problem_seeds=16,
    ),
    "cluster": Design(  # the paper's sizes
        ProxyConfig(width=512, depth=4, batch=2048, steps=9000, lr=6e-4, eval_samples=32768),
        depths=(3, 8),
        widths=(256, 384),
        blocks=(16, 64),
        rates=(1e-5, 5e-5, 1e-4, 5e-4, 6e-4, 1e-3),
        seeds=8,
        sgd_rate=64,
        searched=SLOW,
        searched_seeds=range(200, 264),
        problem_seeds=32,
        more=(
            Condition("depth 6", {"depth": 6}),
            Condition("cosine", {"schedule": "cosine", "lr_min": 1e-5}),
        ),
    ),
}


def conditions(design: Design) -> tuple[Condition, ...]:
    """The base, and all that differs from it in one factor."""
    text, code = scheme("paper_text"), scheme("paper_code")
    of_problem = [
        *(Condition(f"depth {n}", {"depth": n}) for n in design.depths),
        *(Condition(f"width {n}", {"width": n}) for n in design.widths),
        *(Condition(f"norm {n}", {"norm": n}) for n in ("none", "layer_no_affine", "rms")),
        *(Condition(name, {"activation": name}) for name in ("relu", "swiglu")),
        Condition("xavier", {"init": "xavier"}),
        Condition("sgd", {"optimizer": "sgd", "momentum": 0.9}, rate=design.sgd_rate),
        Condition("adamw", {"optimizer": "adamw", "weight_decay": 0.1}),
        *design.more,
    ]
    only_tasks = {"norm rms", "sgd", *(each.label for each in design.more)}  # RMS is its base there
    of_precision = [
        Condition(
            "E4M3 forward, E5M2 backward",
            text=scheme("mx_mix"),
            code=scheme("paper_code", fwd="mxfp8_e4m3", bwd="mxfp8_e5m2"),
        ),
        *(
            Condition(
                f"FP{bits} {short.upper()}",
                text=scheme(f"all_{short}"),
                code=scheme("paper_code", fwd=f"mxfp{bits}_{short}"),
            )
            for bits, short in ((6, "e2m3"), (6, "e3m2"), (4, "e2m1"))
        ),
        *(
            Condition(
                f"block {size}",
                text=requantize(text, block_size=size),
                code=requantize(code, block_size=size),
            )
            for size in design.blocks
        ),
        Condition(
            "bf16 activations",
            text=scheme("hybrid_bf16_activations"),
            code=scheme("paper_code", acts="bf16"),
        ),
        Condition(
            "exact backward",
            text=scheme("hybrid_forward_only"),
            code=scheme("paper_code", backward="exact"),
        ),
    ]
    # Losses can be compared with the exact run's only where the targets are the same.
    of_faults = [
        Condition("beta trained", text=None, code=replace(code, frozen_beta=False), places=TASKS),
        *(
            Condition(f"{label}exact teacher", text=None, code=replace(it, quantized_teacher=False))
            for label, it in (
                ("", code),
                ("bf16 activations, ", scheme("paper_code", acts="bf16")),
                ("exact backward, ", scheme("paper_code", backward="exact")),
            )
        ),
    ]
    where_mx_fails = [
        Condition("GEMM operands alone", text=scheme("gemm_e4m3"), code=None),
        Condition("norm gains alone", text=scheme("ln_only_e4m3"), code=None),
        Condition("E5M2", text=scheme("all_e5m2"), code=scheme("paper_code", fwd="mxfp8_e5m2")),
        Condition("half the rate", rate=0.5),
        # What a run does after its last step; and half the rate over the same distance.
        Condition("longer", steps=1.6),
        Condition("half the rate, twice as long", rate=0.5, steps=2.0),
    ]
    return (
        Condition("base"),
        *(replace(each, places=TASKS) if each.label in only_tasks else each for each in of_problem),
        Condition("norm layer", {"norm": "layer"}, places=("searched",)),
        *of_precision,
        *of_faults,
        *(replace(each, places=("searched",)) for each in where_mx_fails),
    )


@dataclass(frozen=True, order=True)
class Key:
    """One run.  ``lr``: the rate of the grid; a condition's own may be a multiple of it."""

    reading: Reading
    task: Task
    condition: str
    lr: float
    seed: int
    arm: Arm


def config_of(
    design: Design, task: Task, condition: Condition, lr: float, seed: int
) -> ProxyConfig:
    """The problem of a run."""
    base = design.base_of(task)
    steps = round(base.steps * condition.steps)
    cfg = replace(base, **condition.config, lr=lr * condition.rate, steps=steps, seed=seed)
    return with_unit_teacher(cfg) if task == "unit" else cfg


def points(design: Design) -> dict[Key, Point]:
    """Every run.  Keys whose settings are the same share one (equal ids).  Seeds outermost."""
    found: dict[Key, Point] = {}
    both = tuple((reading, scheme(reading)) for reading in READINGS)
    for seed, task, lr in _grid(design, PLACES):
        for condition in conditions(design):
            if task not in condition.places or seed not in design.seeds_of(task, condition):
                continue
            cfg = config_of(design, task, condition, lr, seed)
            for reading in READINGS:
                own = condition.mx(reading)
                if own is None:
                    continue
                plain = not condition.config  # its exact run is the base's
                every = design.probe_every
                exact = ProbePlan(every, both) if plain else None
                mx = ProbePlan(every, ((reading, own),))
                where = (reading, task, condition.label, lr, seed)
                found[Key(*where, "exact")] = Point(cfg, PrecisionScheme(), exact, RULES[task])
                found[Key(*where, "mx")] = Point(cfg, own, mx, RULES[task])
    return found


def _grid(design: Design, tasks: Sequence[Task]) -> Iterator[tuple[int, Task, float]]:
    for seed in sorted({seed for task in tasks for seed in design.seeds_of(task)}):
        for task in tasks:
            if seed in design.seeds_of(task):
                for lr in design.rates_of(task):
                    yield seed, task, lr


def watches(design: Design) -> dict[tuple[Reading, Task, float, int], Watch]:
    """(reading, task, lr, seed) -> the base condition's pair in lockstep, watched."""
    base = Condition("base")
    return {
        (reading, task, lr, seed): Watch(
            config_of(design, task, base, lr, seed),
            scheme(reading),
            RULES[task],
            design.watch_every,
        )
        for seed, task, lr in _grid(design, TASKS)
        if lr in design.watched
        for reading in READINGS
    }


# ---------------------------------------------------------------- what came of it


def failed_at(record: Record) -> int | None:
    """The step of the first NaN or Inf, or at which a spike began that the run did not leave.

    Left: back within the rule's patience, and not open at the end.  None else; so also for a run
    whose loss only came down too slowly to count as learned by the end.
    """
    if record.meta["status"] == "nonfinite":
        return int(record.meta["first_bad_step"])
    patience = record.meta["rule"]["patience"]
    for spike in record.meta["spikes"]:
        if spike["length"] is None or spike["length"] > patience:
            return int(spike["step"])
    return None


def lasted(record: Record) -> float:
    """Steps until a run failed; infinite if it did not."""
    bad = failed_at(record)
    return math.inf if bad is None else bad


@dataclass(frozen=True)
class Results:
    """Every run's record, and every watched pair's; where other studies' results lie."""

    tier: Tier
    design: Design
    records: Mapping[Key, Record]
    watched: Mapping[tuple[Reading, Task, float, int], Record]
    root: Path

    @property
    def runs(self) -> int:
        """Different runs, shared ones counted once."""
        return len({record.id for record in (*self.records.values(), *self.watched.values())})

    def failed(self, key: Key) -> bool:
        """Whether a run became non-finite or ran into a spike that it did not leave."""
        return failed_at(self.records[key]) is not None

    def troubled(self, key: Key) -> bool:
        """Whether it failed or spiked at all, recovered or not."""
        return self.failed(key) or bool(self.records[key].meta["spikes"])

    def fates(self, reading: Reading, task: Task, condition: str) -> list[tuple[bool, bool]]:
        """Of a condition's pairs: did the MX run fail, did the exact one?"""
        pairs = self.pairs(reading, task, condition).values()
        return [(self.failed(mx), self.failed(exact)) for mx, exact in pairs]

    def slow(self, key: Key) -> bool:
        """Whether a run did not fail, but had not learned by its end."""
        return not self.failed(key) and not self.records[key].meta["learned"]

    def pairs(
        self, reading: Reading, task: Task, condition: str
    ) -> dict[tuple[float, int], tuple[Key, Key]]:
        """(lr, seed) -> keys of (MX, exact), of all seeds that the condition has.

        KeyError for a condition that a reading or a place does not have.
        """
        found = {
            (lr, seed): (mx, replace(mx, arm="exact"))
            for lr in self.design.rates_of(task)
            for seed in self.design.seeds_of(task)
            if (mx := Key(reading, task, condition, lr, seed, "mx")) in self.records
        }
        if not found:
            raise KeyError(f"no runs of {condition!r}, {reading}, {task}")
        return found


def load(tier: Tier, results: Path = Path("results")) -> Results:
    """Read a tier's runs; FileNotFoundError if one is missing."""
    design, store = DESIGNS[tier], Store(results / f"{STUDY}_{tier}")
    wanted, seen = points(design), watches(design)
    records = load_points([*wanted.values(), *seen.values()], store)
    return Results(
        tier,
        design,
        {key: records[point.id] for key, point in wanted.items()},
        {key: records[watch.id] for key, watch in seen.items()},
        results,
    )


# ---------------------------------------------------------------- command


@dataclass(frozen=True)
class Arguments(Execution):
    """The paper's claims about the proxy, one by one, with verdicts."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: about 4300 runs of a second or two, 1400 of them of seven;
    cluster: the paper's sizes."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    page: Path | None = None
    """Where the page of claims goes; by default beside the results."""
    dry_run: bool = False
    """Print how many runs there are, how many are to do, and how long it should take."""


def main(arguments: Arguments) -> int:
    """Run what is missing and write the page; the exit status."""
    from studies.claims_page import write_page  # it reads this module, as the verdicts do

    console = Console()
    design = DESIGNS[arguments.tier]
    store = Store(arguments.results / f"{STUDY}_{arguments.tier}")
    wanted, seen = list(points(design).values()), list(watches(design).values())
    if arguments.dry_run:
        describe(wanted, store, arguments, console)
        each = cost_of(seen[0].config, seen[0].scheme).total
        console.print(f"and {len(seen)} watched pairs, about {in_words(2 * each)} each")
        return 0
    if not execute([*wanted, *seen], store, arguments, console):
        return 1
    page = arguments.page or store.folder / "claims.md"
    console.print(f"page: {write_page(arguments.tier, arguments.results, page)}")
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
