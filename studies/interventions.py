"""Does a change of precision in the middle of a run avert its divergence, or would anything?

    python -m studies.interventions [--tier smoke|laptop|laptop_code] [--results DIR]

The paper's experiment (Su et al. 2025, arXiv:2506.20752): MX runs that diverge are taken up again
some steps before they do, with weights, optimizer state and data as they were and another precision
(mxsim/interventions.py).  Near the edge almost any perturbation moves one seed's spike, so that an
intervention counts only by how it beats a placebo, which moves every weight by one unit in the last
place and changes nothing else.  Compared are times to divergence over seeds: survival curves, the
log-rank test (for what it is worth: it takes a seed's placebos for independent), and an exchange
test on times restricted to the horizon: which of a seed's runs, the changed one and its placebos,
is which.  The control changes nothing and must give the original run's bits.

The setting is the one of studies/touchy_settings.py with the largest P(MX) - P(exact) among those
that diverge in the middle of MX training (where a switch to MX is itself the divergence, there is
nothing before it to change), with room for the horizon; the seeds are fresh.  Its exact runs
diverge, too, at times: full precision is no guarantee there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from scipy.stats import false_discovery_control

from mxsim import scheme
from mxsim.changes import ChangedRun, lead_state
from mxsim.executors import Execution
from mxsim.interventions import INTERVENTIONS
from mxsim.progress import execute
from mxsim.stats import Estimate, mean_over_seeds, share
from mxsim.store import Record, Store
from mxsim.survival import Time, exchange_test, log_rank, restricted
from mxsim.sweep import load_points
from studies.command import run_as_command
from studies.touchy_settings import DOOMED, SLOW, Setting

Array = NDArray[Any]
Tier = Literal["smoke", "laptop", "laptop_code"]
STUDY = "interventions"
OUTCOMES = ("averted", "delayed", "no effect", "hastened")


@dataclass(frozen=True)
class Design:
    """Base runs of seeds ``first_seed`` on, ``tried`` of them; those that diverge are used.

    leads: steps before the divergence at which a run is changed.  Seeds that diverge before
    ``earliest`` are left out.  horizon: steps that are run after the change.  same: a divergence
    within so many steps of the original's counts as no effect.
    """

    setting: Setting
    tried: int
    leads: tuple[int, ...]
    placebos: int
    horizon: int
    earliest: int
    first_seed: int = 100
    same: int = 10


LAPTOP = Design(
    Setting("RMS norm, lr 0.004, E5M2", replace(SLOW, steps=3400), scheme("all_e5m2")),
    14,
    (400, 100, 20),
    3,
    800,
    500,
)
DESIGNS: Mapping[Tier, Design] = {
    "smoke": Design(Setting("tiny", DOOMED, scheme("all_e2m1")), 3, (20, 5), 2, 30, 30),
    "laptop": LAPTOP,
    "laptop_code": replace(
        LAPTOP,
        leads=(100,),
        setting=Setting(
            "RMS norm, lr 0.004, paper_code in E5M2",
            LAPTOP.setting.config,
            scheme("paper_code", fwd="mxfp8_e5m2"),
        ),
    ),
}


@dataclass(frozen=True)
class Key:
    """One changed run."""

    seed: int
    lead: int
    name: str
    replicate: int = 0


def base_runs(design: Design) -> dict[int, ChangedRun]:
    """seed -> the MX run to be changed."""
    seeds = range(design.first_seed, design.first_seed + design.tried)
    return {seed: design.setting.run(seed, mx=True, leads=design.leads) for seed in seeds}


def usable(design: Design, records: Mapping[int, Record]) -> dict[int, int]:
    """seed -> step of divergence, of the base runs that diverge late enough."""
    steps = {seed: record.meta["first_bad_step"] for seed, record in records.items()}
    last = design.setting.config.steps - 1  # where a run that never learned is put: no divergence
    return {s: n for s, n in steps.items() if n is not None and design.earliest <= n < last}


def arms(design: Design) -> dict[str, int]:
    """Intervention -> number of replicates; those without effect under the scheme are left out."""
    return {
        name: design.placebos if each.nudge else 1
        for name, each in INTERVENTIONS.items()
        if name == "none" or not each.does_nothing(design.setting.scheme)
    }


def changed_runs(design: Design, records: Mapping[int, Record]) -> dict[Key, ChangedRun]:
    """All changed runs of the usable seeds, each from the state that its base run kept."""
    runs = {}
    base = base_runs(design)
    for seed, bad_step in usable(design, records).items():
        for lead in design.leads:
            step = bad_step - lead
            original = replace(base[seed], leads=(), begin=lead_state(records[seed], lead))
            # Shorter than the original: its learning rate must not depend on the number of steps.
            steps = min(step + design.horizon, original.config.steps)
            original = replace(original, config=replace(original.config, steps=steps))
            for name, replicates in arms(design).items():
                for replicate in range(replicates):
                    change = INTERVENTIONS[name].change(step, design.setting.scheme, replicate)
                    key = Key(seed, lead, name, replicate)
                    runs[key] = replace(original, changes=(*original.changes, change))
    return runs


# ---------------------------------------------------------------- what came of it


@dataclass(frozen=True)
class Arm:
    """An intervention at one lead, over seeds, against the placebo at the same lead.

    gain: steps without divergence within the horizon beyond the placebo's mean of the same seed.
    paired, log_rank: p-values; q: the paired ones of all interventions and leads, corrected for
    their number (Benjamini and Hochberg).
    """

    name: str
    lead: int
    times: tuple[Time, ...]
    outcomes: Mapping[str, int]
    delay: float
    gain: Estimate
    paired: float
    log_rank: float
    q: float = np.nan


@dataclass(frozen=True)
class Results:
    """``arms`` by (lead, name); ``reproduced``: controls with the original's bits, and of how many.

    losses: (seed, lead, name) -> losses from the change on, of the first replicate.  late: changed
    runs that count as diverged by a spike still within its patience at the horizon.
    """

    design: Design
    tried: int
    diverged: int
    used: Mapping[int, int]
    arms: Mapping[tuple[int, str], Arm]
    reproduced: tuple[int, int]
    late: int
    losses: Mapping[tuple[int, int, str], Array]


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's runs and compare the arms; FileNotFoundError if a run is missing."""
    design, store = DESIGNS[tier], Store(results / f"{STUDY}_{tier}")
    records = _base_records(design, store)
    used = usable(design, records)
    runs = changed_runs(design, records)
    found = load_points(list(runs.values()), store)
    times = {
        key: time_of(found[run.id], used[key.seed] - key.lead, run.config.steps)
        for key, run in runs.items()
    }
    losses = {
        (k.seed, k.lead, k.name): found[run.id].arrays["losses"][used[k.seed] - k.lead :]
        for k, run in runs.items()
        if k.replicate == 0
    }
    same = [
        np.array_equal(
            found[run.id].arrays["losses"],
            records[key.seed].arrays["losses"][: run.config.steps],
            equal_nan=True,
        )
        for key, run in runs.items()
        if key.name == "none"
    ]
    return Results(
        design,
        len(records),
        sum(record.meta["status"] != "ok" for record in records.values()),
        used,
        compare(design, used, times),
        (sum(same), len(same)),
        sum(bool(record.meta["censored"]) for record in found.values()),
        losses,
    )


def _base_records(design: Design, store: Store) -> dict[int, Record]:
    base = base_runs(design)
    records = load_points(list(base.values()), store)
    return {seed: records[run.id] for seed, run in base.items()}


def time_of(record: Record, changed_at: int, steps: int) -> Time:
    """Steps from the change to the divergence, or to the end of the run."""
    bad_step = record.meta["first_bad_step"]
    if bad_step is None or bad_step < changed_at:
        return Time(steps - changed_at, event=bad_step is not None)
    return Time(bad_step - changed_at, event=True)


def compare(
    design: Design, used: Mapping[int, int], times: Mapping[Key, Time]
) -> dict[tuple[int, str], Arm]:
    """Each intervention at each lead against the placebo, paired by seed."""
    found = {}
    for lead in design.leads:
        placebo = {
            seed: [times[Key(seed, lead, "placebo", r)] for r in range(design.placebos)]
            for seed in used
        }
        all_placebos = [time for each in placebo.values() for time in each]
        for name in arms(design):
            own = [times[Key(seed, lead, name)] for seed in used]
            controls = np.array([restricted(placebo[seed], design.horizon) for seed in used])
            controls = controls.reshape(len(used), design.placebos)
            lasted = restricted(own, design.horizon)
            shown = all_placebos if name == "placebo" else own
            outcomes, delay = _outcomes(shown, lead, design.same)
            is_placebo = name == "placebo"
            found[lead, name] = Arm(
                name,
                lead,
                tuple(shown),
                outcomes,
                delay,
                mean_over_seeds(lasted - controls.mean(axis=1)),
                np.nan if is_placebo else exchange_test(lasted, controls),
                np.nan if is_placebo else log_rank(own, all_placebos),
            )
    return _corrected(found)


def _outcomes(times: Sequence[Time], lead: int, same: int) -> tuple[dict[str, int], float]:
    """How many of each outcome, and the median delay of those that are delayed."""
    shifts = [time.steps - lead for time in times if time.event]
    counts = {
        "averted": len(times) - len(shifts),
        "delayed": sum(shift > same for shift in shifts),
        "no effect": sum(abs(shift) <= same for shift in shifts),
        "hastened": sum(shift < -same for shift in shifts),
    }
    later = [shift for shift in shifts if shift > same]
    return counts, float(np.median(later)) if later else np.nan


def _corrected(found: Mapping[tuple[int, str], Arm]) -> dict[tuple[int, str], Arm]:
    tested = [key for key, arm in found.items() if key[1] not in ("none", "placebo")]
    if not tested:
        return dict(found)
    values = false_discovery_control([found[key].paired for key in tested])
    q = dict(zip(tested, values.tolist(), strict=True))
    return {key: replace(arm, q=q.get(key, np.nan)) for key, arm in found.items()}


# ---------------------------------------------------------------- tables and command


def print_tables(results: Results, console: Console) -> None:
    """Outcomes, times against the placebo, and tests, a table a lead."""
    design = results.design
    console.print(
        f"{design.setting.name}: {results.diverged} of {results.tried} runs diverge, "
        f"{len(results.used)} of them at step {design.earliest} or later; the control gave the "
        f"original's bits in {results.reproduced[0]} of {results.reproduced[1]} runs; "
        f"{results.late} changed runs are diverged by a spike so late that it might have "
        "recovered; averted: none within the horizon, which is counted from the change",
        soft_wrap=True,
    )
    for lead in design.leads:
        table = Table(
            title=f"changed {lead} steps before the divergence, followed for {design.horizon}: "
            "steps gained over the placebo [95 %]",
            title_justify="left",
        )
        names = (
            "intervention",
            "n",
            *OUTCOMES,
            "by",
            "averted",
            "gain",
            "paired p",
            "q",
            "log-rank",
        )
        for name in names:
            left = name == "intervention"
            table.add_column(name, justify="left" if left else "right", no_wrap=True)
        for name in arms(design):
            arm = results.arms[lead, name]
            n = len(arm.times)
            gain = arm.gain
            table.add_row(
                name,
                str(n),
                *(str(arm.outcomes[outcome]) for outcome in OUTCOMES),
                "-" if np.isnan(arm.delay) else f"{arm.delay:.0f}",
                str(share(arm.outcomes["averted"], n)) if n else "-",
                f"{gain.value:+.0f} [{gain.low:.0f}, {gain.high:.0f}]",
                *("-" if np.isnan(p) else f"{p:.2g}" for p in (arm.paired, arm.q, arm.log_rank)),
            )
        console.print(table)
    nothing = [n for n, each in INTERVENTIONS.items() if each.does_nothing(design.setting.scheme)]
    nothing.remove("none")
    console.print(f"without effect under this scheme, not run: {', '.join(nothing) or 'none'}")


@dataclass(frozen=True)
class Arguments(Execution):
    """Interventions before a divergence, against a placebo."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: 14 base runs, three leads; laptop_code: paper_code
    instead of paper_text, one lead."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print how many runs there are and how many are to do."""


def main(arguments: Arguments) -> int:
    """Run what is missing, print the tables, draw the figure; the exit status."""
    from figures.interventions import draw  # the figure reads this module

    console = Console()
    design = DESIGNS[arguments.tier]
    store = Store(arguments.results / f"{STUDY}_{arguments.tier}")
    base = list(base_runs(design).values())
    each = len(design.leads) * sum(arms(design).values())
    if arguments.dry_run:
        left = sum(not store.has(task.id) for task in base)
        console.print(
            f"{len(base)} base runs, {left} to do, about 10 s each on one core; then {each} "
            "changed runs for each that diverges, about 3 s each"
        )
        return 0
    if not execute(base, store, arguments, console):
        return 1
    changed = list(changed_runs(design, _base_records(design, store)).values())
    if not execute(changed, store, arguments, console, part="changed runs: "):
        return 1
    results = load(arguments.tier, arguments.results)
    print_tables(results, Console(width=max(console.width, 170)))
    console.print(f"figure: {draw(results, store.folder / f'{STUDY}.png')}", soft_wrap=True)
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
