"""Where does training diverge in MX and not in full precision?  A search with a stated budget.

    python -m studies.touchy_settings [--tier smoke|laptop] [--results DIR]

Each candidate is a setting of the proxy and an MX scheme, all seen to be touchy before; some go
from exact to MX in the middle of the run.  Both arms are run from the same seeds.  Candidates are
ordered by the paired difference in the share of runs that diverge, P(MX) - P(exact).  The best of
many is partly luck, so the first ones are run again on fresh seeds, and only that counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from mxsim import ProxyConfig, SiteFormat, scheme
from mxsim.changes import Change, ChangedRun
from mxsim.executors import Execution
from mxsim.precision import GEMM_SITES, PrecisionScheme
from mxsim.progress import execute
from mxsim.stats import mcnemar, share
from mxsim.store import Record, Store
from mxsim.sweep import load_points
from studies.command import run_as_command

Tier = Literal["smoke", "laptop"]
STUDY = "touchy_settings"


@dataclass(frozen=True)
class Setting:
    """A problem and an MX scheme; ``switch``: steps of exact training before MX begins."""

    name: str
    config: ProxyConfig
    scheme: PrecisionScheme
    switch: int = 0

    def run(self, seed: int, mx: bool, leads: tuple[int, ...] = ()) -> ChangedRun:
        """One of the two arms, from ``seed``."""
        cfg = replace(self.config, seed=seed)
        if not mx:
            return ChangedRun(cfg, scheme("exact"))
        if not self.switch:
            return ChangedRun(cfg, self.scheme, leads=leads)
        return ChangedRun(cfg, scheme("exact"), (Change(self.switch, self.scheme),), leads=leads)


def gradients_in(name: str) -> PrecisionScheme:
    """Exact but for the gradient operands dy of dgrad and wgrad."""
    sites = {site: SiteFormat(name) for site in GEMM_SITES if site.endswith("_dy")}
    return PrecisionScheme(**sites)  # type: ignore[arg-type]


DEEP = ProxyConfig(width=128, depth=4, batch=64, lr=1e-2, steps=1500, eval_samples=4096)
SMALL = replace(DEEP, width=64, batch=128, steps=1000)
RMS = replace(SMALL, norm="rms", lr=5e-3, batch=64, steps=2400)
SLOW = replace(RMS, lr=4e-3, steps=2600)
BARE = replace(DEEP, width=96, activation="swiglu", norm="none", lr=5e-3, steps=1500)

CANDIDATES = (
    Setting("width 128, lr 0.01, MX-mix", DEEP, scheme("mx_mix")),
    Setting("width 128, lr 0.01, E4M3", DEEP, scheme("all_e4m3")),
    Setting("width 128, lr 0.01, E5M2", DEEP, scheme("all_e5m2")),
    Setting("width 128, lr 0.01, E2M1", DEEP, scheme("all_e2m1")),
    Setting("width 128, lr 0.01, dy E5M2", DEEP, gradients_in("mxfp8_e5m2")),
    Setting("width 128, lr 0.01, dy E2M1", DEEP, gradients_in("mxfp4_e2m1")),
    Setting("width 128, lr 0.01, NVFP4 recipe", DEEP, scheme("nvfp4_recipe")),
    Setting(
        "width 128, lr 0.01, gammas on the cliff, E4M3",
        replace(DEEP, gamma_mean=0.97, gamma_sd=0.01),
        scheme("all_e4m3"),
    ),
    Setting("width 64, lr 0.025, E4M3", replace(SMALL, lr=0.025), scheme("all_e4m3")),
    Setting("width 64, lr 0.032, E2M1", replace(SMALL, lr=0.032), scheme("all_e2m1")),
    Setting("no LN, swiglu, lr 0.005, E2M1", BARE, scheme("all_e2m1")),
    Setting("no LN, swiglu, lr 0.005, dy E5M2", BARE, gradients_in("mxfp8_e5m2")),
    Setting(
        "no LN, swiglu, lr 0.001, exact then E4M3",
        replace(BARE, lr=1e-3),
        scheme("all_e4m3"),
        600,
    ),
    Setting(
        "no LN, swiglu, lr 0.001, exact then E2M1",
        replace(BARE, lr=1e-3),
        scheme("all_e2m1"),
        600,
    ),
    Setting("no LN, swiglu, AdamW, E4M3", replace(BARE, optimizer="adamw"), scheme("all_e4m3")),
    Setting("RMS norm, lr 0.01, E4M3", replace(RMS, lr=1e-2, steps=1500), scheme("all_e4m3")),
    Setting("RMS norm, lr 0.005, E4M3", RMS, scheme("all_e4m3")),
    Setting("RMS norm, lr 0.005, E5M2", RMS, scheme("all_e5m2")),
    Setting("RMS norm, lr 0.005, MX-mix", RMS, scheme("mx_mix")),
    Setting("RMS norm, lr 0.005, E2M1", RMS, scheme("all_e2m1")),
    Setting("RMS norm, lr 0.004, E4M3", SLOW, scheme("all_e4m3")),
    Setting("RMS norm, lr 0.004, E5M2", SLOW, scheme("all_e5m2")),
)


@dataclass(frozen=True)
class Design:
    """Seeds 0 to ``seeds`` - 1 for the search, ``fresh`` more for the best ``confirmed``."""

    candidates: tuple[Setting, ...]
    seeds: int
    confirmed: int
    fresh: int


_TINY = replace(DEEP, width=16, depth=1, batch=16, steps=40, eval_samples=64)
DOOMED = replace(
    _TINY, norm="none", optimizer="sgd", lr=8.0, warmup=120, steps=120
)  # for tests: a warm-up past the edge, to Inf about step 90
DESIGNS: Mapping[Tier, Design] = {
    "smoke": Design(
        (
            Setting("E2M1", _TINY, scheme("all_e2m1")),
            Setting("exact then E2M1", _TINY, scheme("all_e2m1"), 20),
        ),
        2,
        1,
        2,
    ),
    "laptop": Design(CANDIDATES, 4, 4, 16),
}


@dataclass(frozen=True)
class Pairs:
    """Outcomes of both arms over seeds: how many fail in both, in MX alone, in exact alone."""

    setting: Setting
    n: int
    both: int
    mx_only: int
    exact_only: int

    @property
    def mx(self) -> int:
        return self.both + self.mx_only

    @property
    def exact(self) -> int:
        return self.both + self.exact_only

    @property
    def difference(self) -> float:
        """P(MX) - P(exact)."""
        return (self.mx_only - self.exact_only) / self.n


def search_runs(design: Design) -> dict[tuple[str, int, bool], ChangedRun]:
    """(candidate, seed, MX) -> run, of the search."""
    return {
        (each.name, seed, mx): each.run(seed, mx)
        for each in design.candidates
        for seed in range(design.seeds)
        for mx in (False, True)
    }


def fresh_runs(design: Design, best: Sequence[Setting]) -> dict[tuple[str, int, bool], ChangedRun]:
    """The same for the settings that are confirmed, on seeds that the search has not seen."""
    seeds = range(design.seeds, design.seeds + design.fresh)
    return {
        (setting.name, seed, mx): setting.run(seed, mx)
        for setting in best
        for seed in seeds
        for mx in (False, True)
    }


def pairs_of(
    settings: Sequence[Setting],
    runs: Mapping[tuple[str, int, bool], ChangedRun],
    records: Mapping[str, Record],
) -> list[Pairs]:
    """The outcomes by setting, largest difference first, ties by name."""
    found = []
    for setting in settings:
        failed: dict[int, dict[bool, bool]] = {}
        for (name, seed, mx), run in runs.items():
            if name == setting.name:
                failed.setdefault(seed, {})[bool(mx)] = records[run.id].meta["status"] != "ok"
        outcomes = [(each[True], each[False]) for each in failed.values()]
        found.append(
            Pairs(
                setting,
                len(outcomes),
                outcomes.count((True, True)),
                outcomes.count((True, False)),
                outcomes.count((False, True)),
            )
        )
    return sorted(found, key=lambda pairs: (-pairs.difference, pairs.setting.name))


@dataclass(frozen=True)
class Results:
    """What the search found, and what became of its best on fresh seeds, largest first."""

    design: Design
    searched: list[Pairs]
    confirmed: list[Pairs]

    @property
    def runs(self) -> int:
        """How many runs were spent (an exact arm that candidates share counts once)."""
        best = [pairs.setting for pairs in self.searched[: self.design.confirmed]]
        tasks = [*search_runs(self.design).values(), *fresh_runs(self.design, best).values()]
        return len({task.id for task in tasks})


def load(tier: Tier, results: Path) -> Results:
    """Read a tier's runs; FileNotFoundError if one is missing."""
    design, store = DESIGNS[tier], Store(results / f"{STUDY}_{tier}")
    searched = _read(design.candidates, search_runs(design), store)
    best = [pairs.setting for pairs in searched[: design.confirmed]]
    return Results(design, searched, _read(best, fresh_runs(design, best), store))


def _read(
    settings: Sequence[Setting], runs: Mapping[tuple[str, int, bool], ChangedRun], store: Store
) -> list[Pairs]:
    return pairs_of(settings, runs, load_points(list(runs.values()), store))


def print_tables(results: Results, console: Console) -> None:
    """The search and the confirmation, with exact McNemar p-values."""
    for pairs_list, title in (
        (results.searched, f"search, {results.design.seeds} seeds an arm"),
        (results.confirmed, f"confirmation, {results.design.fresh} fresh seeds an arm"),
    ):
        table = Table(title=f"runs that diverge: {title} [95 %]", title_justify="left")
        names = ("setting", "MX", "exact", "both", "MX only", "exact only", "difference", "p")
        for name in names:
            table.add_column(name, justify="left" if name == "setting" else "right", no_wrap=True)
        for p in pairs_list:
            table.add_row(
                p.setting.name,
                str(share(p.mx, p.n)),
                str(share(p.exact, p.n)),
                *(str(count) for count in (p.both, p.mx_only, p.exact_only)),
                f"{p.difference:+.2f}",
                f"{mcnemar(p.mx_only, p.exact_only):.2g}",
            )
        console.print(table)
    most = [p for p in results.confirmed if p.mx > p.n / 2 and p.exact <= p.n / 4]
    words = ", ".join(p.setting.name for p in most) or "none"
    console.print(
        f"{results.runs} runs; confirmed to diverge in most MX and at most a quarter of exact "
        f"runs: {words}",
        soft_wrap=True,
    )


@dataclass(frozen=True)
class Arguments(Execution):
    """Search for settings in which MX diverges and full precision does not."""

    tier: Tier = "laptop"
    """smoke: seconds, for tests; laptop: 22 candidates, 4 seeds, the best four on 16 more."""
    results: Path = Path("results")
    """Where results are stored, a folder a study."""
    dry_run: bool = False
    """Print how many runs there are and how many are to do."""


def main(arguments: Arguments) -> int:
    """Run what is missing, print the tables; the exit status."""
    console = Console()
    design = DESIGNS[arguments.tier]
    store = Store(arguments.results / f"{STUDY}_{arguments.tier}")
    first: Any = search_runs(design)
    if arguments.dry_run:
        tasks = {task.id for task in first.values()}
        left = sum(not store.has(each) for each in tasks)
        again = 2 * design.confirmed * design.fresh
        console.print(
            f"{len(tasks)} runs of the search, {left} to do, then {again} more of its best, about "
            "6 s each on one core"
        )
        return 0
    if not execute(list(first.values()), store, arguments, console):
        return 1
    best = [p.setting for p in _read(design.candidates, first, store)[: design.confirmed]]
    fresh = list(fresh_runs(design, best).values())
    if not execute(fresh, store, arguments, console, part="confirmation: "):
        return 1
    print_tables(load(arguments.tier, arguments.results), Console(width=max(console.width, 150)))
    return 0


if __name__ == "__main__":
    run_as_command(main, Arguments, STUDY)
