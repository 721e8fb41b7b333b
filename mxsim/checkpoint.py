"""A run in progress as one file: what a Training needs to go on, bit for bit.

An npz without pickle: weights, moments and series as arrays, the rest as JSON in ``meta``, with
CHECKPOINT_VERSION and the versions that wrote it.  Written whole or not at all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.bias import ProbePlan, ProbeSeries, blank_series
from mxsim.config import ProxyConfig
from mxsim.outcome import DivergenceRule
from mxsim.precision import SiteFormat, scheme_from_dict
from mxsim.store import DamagedResult, provenance, read_whole, write_whole
from mxsim.train import Training, start

CHECKPOINT_VERSION = 1


class ForeignVersion(DamagedResult):
    """A checkpoint that another version of mxsim wrote: whole, but not to be read here."""


_SERIES = tuple(f.name for f in dataclasses.fields(ProbeSeries) if f.name != "labels")


def save_checkpoint(training: Training, path: Path | str) -> Path:
    """Write ``training`` to ``path`` (made to end in .npz if it has no suffix).

    Raises OSError (no such folder, a full disk) and leaves an older file of that name as it was.
    """
    where = Path(path)
    where = where if where.suffix else where.with_suffix(".npz")
    return write_whole(where, *parts_of(training), compress=False)


def parts_of(training: Training) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays and the metadata from which ``training_of`` makes it again."""
    arrays = {
        "weights": training.flat,
        "first_moment": training.optimizer.first,
        "second_moment": training.optimizer.second,
        "losses": training.losses,
        "grad_norms": training.grad_norms,
    }
    if training.probes is not None:
        arrays |= {f"probe_{name}": getattr(training.probes, name) for name in _SERIES}
    meta = {
        "checkpoint": CHECKPOINT_VERSION,
        "config": dataclasses.asdict(training.config),
        "scheme": dataclasses.asdict(training.scheme),
        "rule": dataclasses.asdict(training.rule),
        "probe": None if training.probe is None else dataclasses.asdict(training.probe),
        "step": training.step,
        "updates": training.optimizer.updates,
        "bad_step": training.bad_step,
        "bad_tensor": training.bad_tensor,
        "seconds": training.seconds,
        "probe_seconds": training.probe_seconds,
        "versions": dict(provenance()),
    }
    return arrays, meta


def load_checkpoint(path: Path | str) -> Training:
    """The Training that ``save_checkpoint`` wrote to ``path``.

    Raises OSError if it cannot be read now, ForeignVersion if another version wrote it, and
    DamagedResult, of which that is a kind, if it is truncated or foreign or its arrays do not fit
    its own configuration.
    """
    where = Path(path)
    return training_of(*read_whole(where), where)


def training_of(
    arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], where: Path
) -> Training:
    """The Training of what was read from ``where``; raises as ``load_checkpoint`` does."""
    if "checkpoint" not in meta:
        raise DamagedResult(f"{where} is not a checkpoint")
    if meta["checkpoint"] != CHECKPOINT_VERSION:
        raise ForeignVersion(
            f"{where} is a checkpoint of version {meta['checkpoint']}; this version of mxsim reads "
            f"{CHECKPOINT_VERSION}"
        )
    try:
        training = start(
            ProxyConfig(**meta["config"]),
            scheme_from_dict(meta["scheme"]),
            probe=_plan(meta["probe"]),
            rule=DivergenceRule(**meta["rule"]),
        )
        training.step = _count(meta["step"])
        training.optimizer.updates = _count(meta["updates"])
        training.bad_step = None if meta["bad_step"] is None else _count(meta["bad_step"])
        training.bad_tensor = None if meta["bad_tensor"] is None else str(meta["bad_tensor"])
        training.seconds = float(meta["seconds"])
        training.probe_seconds = float(meta["probe_seconds"])
        _fill(training.flat, arrays, "weights")
        _fill(training.optimizer.first, arrays, "first_moment")
        _fill(training.optimizer.second, arrays, "second_moment")
        _fill(training.losses, arrays, "losses")
        _fill(training.grad_norms, arrays, "grad_norms")
        if training.probe is not None:
            training.probes = blank_series(training.probe, training.config)
            for name in _SERIES:
                _fill(getattr(training.probes, name), arrays, f"probe_{name}")
    except (KeyError, TypeError, ValueError) as error:
        raise DamagedResult(f"{where} is not a whole checkpoint ({error})") from error
    if training.step > training.config.steps or training.optimizer.updates != training.step:
        raise DamagedResult(
            f"{where} is not a whole checkpoint (step {training.step} of {training.config.steps}, "
            f"{training.optimizer.updates} updates)"
        )
    return training


def _plan(values: Mapping[str, Any] | None) -> ProbePlan | None:
    if values is None:
        return None
    schemes = tuple((label, scheme_from_dict(each)) for label, each in values["schemes"])
    return ProbePlan(values["every"], schemes, SiteFormat(**values["gamma_site"]))


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"a count of steps must be an integer of at least 0; got {value!r}")
    return value


def _fill(target: NDArray[Any], arrays: Mapping[str, NDArray[Any]], name: str) -> None:
    """Copy an array of the file into its place; ValueError unless shape and dtype are the same."""
    found = arrays[name]
    if found.shape != target.shape or found.dtype != target.dtype:
        raise ValueError(
            f"{name} must be {target.dtype} of shape {target.shape}; "
            f"got {found.dtype} of shape {found.shape}"
        )
    np.copyto(target, found)
