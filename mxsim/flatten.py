"""A stored run's metadata as flat fields: what came out, what was run, by which versions.

- What came out: ``id``, ``status``, ``first_bad_step``, ``eval_loss``, ``seconds``, ... as
  outcome.py and sweep.py name them; ``spikes`` is their number.
- What was run: ``scheme`` (its label), every field of ProxyConfig by its name, ``rule.patience``,
  ``probe.every``, ...  Fields that a run is older than have their defaults, which by the store's
  rule are what was done before they existed.
- ``commit`` and ``versions.numpy``, ...

Studies whose runs are no ``sweep.Point`` are taken as they are: a mapping in the metadata says what
was run, and is spelled out by dotted names (``cell.seed``); anything else is what came out.
"""

from __future__ import annotations

import json
import marshal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from typing import Any

from mxsim.config import ProxyConfig
from mxsim.label import scheme_label, site_label
from mxsim.outcome import DivergenceRule
from mxsim.precision import SITES, PrecisionScheme, SiteFormat, scheme_from_dict
from mxsim.store import result_id
from mxsim.sweep import Point

Value = bool | int | float | str | None
Flat = dict[str, Value]

_CONFIG = asdict(ProxyConfig())
_RULE = asdict(DivergenceRule())
_WHAT_WAS_RUN = frozenset(field.name for field in fields(Point))
_LEFT_OUT = ("schema", "probe_labels", "probe_groups")  # the labels are in probe.schemes
_SITE_FIELDS = frozenset(field.name for field in fields(SiteFormat))
_SCALARS = frozenset((bool, int, float, str, type(None)))


class Flattener:
    """Flattens the metadata of one study's runs.

    It remembers what many runs share, and which label stands for which scheme: no two schemes get
    the same one.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], Flat] = {}
        self._owner: dict[str, PrecisionScheme] = {}

    def flatten(self, meta: Mapping[str, Any]) -> tuple[Flat, Flat, Flat]:
        """(what came out, what was run, versions) of one record's metadata."""
        outcome: Flat = {"id": meta["id"]}
        settings: Flat = {}
        versions: Flat = {}
        for name in sorted(meta, key=lambda name: name != "scheme"):  # first, as the seed is last
            value = meta[name]
            if name == "versions" and isinstance(value, Mapping):
                for key, each in value.items():
                    name = "commit" if key == "commit" else f"versions.{key}"
                    versions[name] = self._plain(each)
            elif name in _WHAT_WAS_RUN or isinstance(value, Mapping):
                settings |= self._settings(name, value)
            elif name == "spikes" and isinstance(value, list):
                outcome[name] = len(value)
            elif name not in _LEFT_OUT:
                outcome[name] = self._plain(value)
        return outcome, settings, versions

    def _settings(self, name: str, value: Any) -> Flat:
        if name == "config" and isinstance(value, Mapping):
            return {key: self._plain(each) for key, each in (_CONFIG | dict(value)).items()}
        # Cheap to compare: version 2 of the marshal format depends on nothing but the content.
        key = name, marshal.dumps(value, 2)
        if key not in self._known:
            self._known[key] = self._make(name, value)
        return self._known[key]

    def _make(self, name: str, value: Any) -> Flat:
        if name == "rule" and isinstance(value, Mapping):
            value = _RULE | dict(value)
        elif name == "probe" and value is None:
            return {}
        elif name == "probe" and isinstance(value, Mapping):
            pairs = [(label, self._label(scheme)) for label, scheme in value.get("schemes", ())]
            words = (own if own == label else f"{own} = {label}" for own, label in pairs)
            value = dict(value) | {"schemes": ", ".join(words)}
        return self._spelled_out(name, value)

    def _spelled_out(self, name: str, value: Any) -> Flat:
        if not isinstance(value, Mapping) or _is_scheme(value) or set(value) == _SITE_FIELDS:
            return {name: self._plain(value)}
        flat: Flat = {}
        for key, each in value.items():
            flat |= self._spelled_out(f"{name}.{key}", each)
        return flat

    def _plain(self, value: Any) -> Value:
        """A scalar as it is, a scheme or site by its label, anything else as JSON text."""
        named = value if type(value) in _SCALARS else self._named(value)
        return named if type(named) in _SCALARS else json.dumps(named)

    def _named(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            if _is_scheme(value):
                return self._label(value)
            if set(value) == _SITE_FIELDS:
                with suppress(TypeError, ValueError):  # of a later version: spelled out
                    return site_label(SiteFormat(**value))
            return {key: self._named(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._named(each) for each in value]
        return value

    def _label(self, stored: Mapping[str, Any]) -> str:
        """The label of ``dataclasses.asdict(scheme)``; one that cannot be read here says so."""
        try:
            scheme = scheme_from_dict(stored)
        except (TypeError, ValueError):
            return f"unknown scheme #{result_id(stored)}"
        label = scheme_label(scheme)
        if self._owner.setdefault(label, scheme) != scheme:  # six digits can coincide
            label = scheme_label(scheme, digits=16)
        return label


def _is_scheme(value: Mapping[str, Any]) -> bool:
    return all(site in value for site in SITES)
