"""Grids of runs: axes as data, each level saying what it changes in a run's settings.

A grid is a product of axes, arms (precision schemes) and seeds.  Runs of one cell and seed share
initial weights, teacher and data whatever their arm, so arms are compared in pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, Literal

from mxsim.config import ProxyConfig
from mxsim.outcome import DivergenceRule
from mxsim.precision import SITES, PrecisionScheme, SiteFormat
from mxsim.store import DamagedResult, Record, Store
from mxsim.sweep import Point

State = Literal["ok", "recovered", "diverged", "nonfinite", "failed", "not run"]
STATES: tuple[State, ...] = ("ok", "recovered", "diverged", "nonfinite", "failed", "not run")
FAILURES: tuple[State, ...] = ("diverged", "nonfinite")


@dataclass(frozen=True)
class Level:
    """One value of an axis: its label, and what it changes.

    config: fields of ProxyConfig.  sites: fields of SiteFormat (format, block_size, scale_rule,
    rounding), set at every site that the arm quantizes, overrides included.  rate: factor of the
    learning rate, applied after all ``config`` changes.
    """

    label: str
    config: Mapping[str, Any] = field(default_factory=dict)
    sites: Mapping[str, Any] = field(default_factory=dict)
    rate: float = 1.0


@dataclass(frozen=True)
class Axis:
    """A named axis with its levels, in the order they are drawn."""

    name: str
    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        labels = [level.label for level in self.levels]
        if not labels or len(set(labels)) != len(labels):
            raise ValueError(
                f"axis {self.name} must have levels with labels of their own; got {labels}"
            )

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(level.label for level in self.levels)


def config_axis(name: str, values: Iterable[Any], label: str = "{}") -> Axis:
    """An axis of one field of ProxyConfig."""
    return Axis(name, tuple(Level(label.format(_word(v)), {name: v}) for v in values))


def site_axis(name: str, values: Iterable[Any], label: str = "{}") -> Axis:
    """An axis of one field of SiteFormat, set at every quantized site."""
    return Axis(name, tuple(Level(label.format(_word(v)), sites={name: v}) for v in values))


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def requantize(scheme: PrecisionScheme, **settings: Any) -> PrecisionScheme:
    """``scheme`` with fields of SiteFormat set anew at every site that is not exact.

    Raises ValueError or TypeError for what SiteFormat does not take.
    """
    allowed = [each.name for each in fields(SiteFormat)]
    for name in settings:
        if name not in allowed:
            raise ValueError(f"site settings are {', '.join(allowed)}; got {name!r}")

    def anew(site: SiteFormat) -> SiteFormat:
        return site if site.format == "exact" else replace(site, **settings)

    changes: dict[str, Any] = {site: anew(getattr(scheme, site)) for site in SITES}
    changes["overrides"] = tuple((b, site, anew(value)) for b, site, value in scheme.overrides)
    return replace(scheme, **changes)


@dataclass(frozen=True)
class Cell:
    """A place in a grid: the label on each axis, the arm, the seed."""

    labels: tuple[str, ...]
    arm: str
    seed: int


@dataclass(frozen=True)
class Grid:
    """Every combination of levels, arms and seeds 0, 1, ..., around a base configuration."""

    base: ProxyConfig
    axes: tuple[Axis, ...]
    arms: Mapping[str, PrecisionScheme]
    seeds: int
    rule: DivergenceRule = DivergenceRule()  # noqa: RUF009  (frozen)

    def point(self, levels: Sequence[Level], arm: str, seed: int, lr: float | None = None) -> Point:
        """The run at some levels; ``lr``, if given, is its learning rate whatever they say."""
        config: dict[str, Any] = {}
        scheme, rate = self.arms[arm], 1.0
        for level in levels:
            config |= level.config
            rate *= level.rate
            if level.sites:
                scheme = requantize(scheme, **level.sites)
        cfg = replace(self.base, **config, seed=seed)
        cfg = replace(cfg, lr=cfg.lr * rate if lr is None else lr)
        return Point(cfg, scheme, rule=self.rule)

    def points(self) -> dict[Cell, Point]:
        """Every run.  Cells whose arm an axis leaves alone share a run (equal ids).

        Seeds outermost, so that an interrupted grid holds whole pairs.
        """
        return {
            Cell(tuple(level.label for level in levels), arm, seed): self.point(levels, arm, seed)
            for seed in range(self.seeds)
            for levels in product(*(axis.levels for axis in self.axes))
            for arm in self.arms
        }


def state_of(record: Record | None) -> State:
    """What became of a run, in the words of a phase diagram.

    ``ok``; ``recovered``: ok after a spike; ``diverged``; ``nonfinite``; ``failed``: it raised an
    error instead of a result; ``not run``: there is none.
    """
    if record is None:
        return "not run"
    status: State = record.meta["status"]
    return "recovered" if status == "ok" and record.meta["spikes"] else status


def load_cells(points: Mapping[Cell, Point], store: Store) -> dict[Cell, Record | None]:
    """The stored record of each cell, None where there is none (or a damaged one)."""
    loaded: dict[str, Record | None] = {}
    for point in points.values():
        if point.id not in loaded:
            try:
                loaded[point.id] = store.load(point.id)
            except (FileNotFoundError, DamagedResult):
                loaded[point.id] = None
    return {cell: loaded[point.id] for cell, point in points.items()}
