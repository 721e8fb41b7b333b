"""A study's stored results as a table: one flat record a run, chosen, ordered, written.

Only metadata is read; the series of a run are the store's (``Store(folder).load(id).arrays``).
How a record is read off the metadata is in flatten.py, printing in cli.py.
"""

from __future__ import annotations

import csv
import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from mxsim.config import CHOICES
from mxsim.flatten import Flattener, Value
from mxsim.formats import choose, not_one_of
from mxsim.label import scheme_label
from mxsim.outcome import Status
from mxsim.presets import PRESETS, scheme_of
from mxsim.store import DamagedResult, Store, whole_file

Row = Mapping[str, Value]

_ORDERS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_NAMES: Mapping[str, tuple[str, ...]] = {
    **CHOICES,
    "status": (*get_args(Status), "failed"),
    "scheme": tuple(PRESETS),
}
_CONDITION = re.compile(r"\s*([^\s=!<>]+)\s*(!=|<=|>=|==?|<|>)\s*(\S.*?)\s*", re.DOTALL)


@dataclass(frozen=True, eq=False)
class LabelledArray:
    """``values`` with one named axis for each of ``dims``, labelled by ``coords[dim]``."""

    values: NDArray[Any]
    dims: tuple[str, ...]
    coords: Mapping[str, tuple[Value, ...]]

    def sel(self, **labels: Value) -> LabelledArray:
        """The part at these coordinates, their dims gone: ``sel(lr=0.01, scheme="exact")``.

        Labels are compared exactly.  Raises ValueError for an unknown dim or label, naming those
        there are.
        """
        index: list[int | slice] = [slice(None)] * len(self.dims)
        for dim, label in labels.items():
            if dim not in self.dims:
                there = ", ".join(self.dims) or "none"
                raise ValueError(f"sel takes the dims {there}; got {dim}")
            if label not in self.coords[dim]:
                there = ", ".join(map(repr, self.coords[dim]))
                raise ValueError(f"{dim} must be one of {there}; got {label!r}")
            index[self.dims.index(dim)] = self.coords[dim].index(label)
        left = tuple(dim for dim in self.dims if dim not in labels)
        values = np.asarray(self.values[tuple(index)])
        return LabelledArray(values, left, {dim: self.coords[dim] for dim in left})


@dataclass(frozen=True)
class Results:
    """Stored runs, one flat record each; see flatten.py for the fields.

    - ``records``: name -> value; a field that a run does not have is absent and counts as None.
    - ``damaged``: (path, reason) of the files that could not be read.
    - ``fields``: every name in any record of the study.
    - ``settings``: those of them that say what was run, not what came out or by which versions.
    """

    records: tuple[Row, ...]
    damaged: tuple[tuple[Path, str], ...] = ()
    fields: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def varying(self) -> tuple[str, ...]:
        """The settings that differ between the records."""
        return self._differing(self.settings, self.records)

    def where(self, conditions: str | Sequence[str]) -> Results:
        """The runs that meet every condition: ``where(["lr>=0.01", "status!=ok"])``.

        A condition is FIELD=VALUE or with != < <= > >=.  Numbers compare as numbers, the rest as
        text; ``None`` stands for a value that is absent, which meets no order; ``scheme`` also
        takes a preset's other names and options (``scheme=paper_code:bwd=mxfp8_e5m2``).
        Raises ValueError for a malformed condition, an unknown field (naming the known ones), a
        value or an order that does not fit the field, and a name that it cannot have.
        """
        kept = self.records
        for text in [conditions] if isinstance(conditions, str) else conditions:
            test = self._condition(text)
            kept = tuple(row for row in kept if test(row))
        return replace(self, records=kept)

    def sorted(self, names: Sequence[str]) -> Results:
        """The runs in order of these fields, absent values last; ValueError for an unknown one."""
        self.check_fields("sort", names)
        ordered = sorted(self.records, key=lambda row: [_order(row.get(name)) for name in names])
        return replace(self, records=tuple(ordered))

    def array(self, field: str, dims: str | Sequence[str]) -> LabelledArray:
        """``field`` over the product of all values of the settings ``dims``, sorted.

        Numbers and truth values (as 0 and 1) become float64, NaN where no run is stored; text
        becomes str, "" where no run is stored.  A run's own None looks the same.
        Raises ValueError for an unknown field, a dim that is no setting, or if two runs fall into
        one cell: then it says which settings tell them apart.
        """
        names = (dims,) if isinstance(dims, str) else tuple(dims)
        self.check_fields("field", [field])
        for name in names:
            if name not in self.settings:
                raise ValueError(f"dims must be of {', '.join(self.settings)}; got {name!r}")
        if len(set(names)) < len(names):
            raise ValueError(f"dims must differ; got {', '.join(names)}")
        coords = {n: tuple(sorted({row.get(n) for row in self.records}, key=_order)) for n in names}
        index = {n: {value: i for i, value in enumerate(values)} for n, values in coords.items()}
        cells: dict[tuple[int, ...], list[Row]] = {}
        for row in self.records:
            cells.setdefault(tuple(index[n][row.get(n)] for n in names), []).append(row)
        shared = [rows for rows in cells.values() if len(rows) > 1]
        if shared:
            self._refuse(names, shared)
        column = _one_kind([rows[0].get(field) for rows in cells.values()])
        shape = tuple(len(coords[n]) for n in names)
        if any(isinstance(value, str) for value in column):
            longest = max(len(value) for value in column if isinstance(value, str))
            array = np.full(shape, "", f"<U{longest}")
        else:
            array = np.full(shape, np.nan)
        for cell, value in zip(cells, column, strict=True):
            if value is not None:
                array[cell] = value
        return LabelledArray(array, names, coords)

    def to_csv(self, path: str | Path, columns: Sequence[str] | None = None) -> Path:
        """Write the records as CSV, whole or not at all; absent values are empty, floats exact.

        Raises OSError naming ``path``, ValueError for an unknown column.
        """
        names = self._columns(columns)
        text = StringIO(newline="")
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([row.get(name) for name in names] for row in self.records)
        return _write_bytes(Path(path), text.getvalue().encode())

    def to_parquet(self, path: str | Path, columns: Sequence[str] | None = None) -> Path:
        """Write the records as Parquet, whole or not at all; needs pyarrow.

        A column of more than one kind of value becomes text.
        Raises OSError naming ``path``, ValueError for an unknown column, ImportError.
        """
        try:
            import pyarrow
            from pyarrow import parquet
        except ImportError:
            raise ImportError("Parquet needs pyarrow: pip install pyarrow") from None
        names = self._columns(columns)
        table = {name: _one_kind([row.get(name) for row in self.records]) for name in names}
        content = BytesIO()
        parquet.write_table(pyarrow.table(table), content)
        return _write_bytes(Path(path), content.getvalue())

    def check_fields(self, argument: str, names: Iterable[str]) -> None:
        """ValueError, listing the fields, if one of ``names`` is none."""
        for name in names:
            if name not in self.fields:
                raise ValueError(not_one_of(argument, name, self.fields))

    def _columns(self, columns: Sequence[str] | None) -> tuple[str, ...]:
        if columns is None:
            return self.fields
        self.check_fields("columns", columns)
        return tuple(columns)

    def _condition(self, text: str) -> Callable[[Row], bool]:
        match = _CONDITION.fullmatch(text)
        if match is None:
            raise ValueError(f"a condition must be FIELD=VALUE, or with != < <= > >=; got {text!r}")
        field, sign, wanted = match.groups()
        self.check_fields("the field of a condition", [field])
        if sign not in _ORDERS and wanted != "None":
            self._check_name(field, wanted)
        kinds = {type(row[field]) for row in self.records if row.get(field) is not None}
        order = _ORDERS.get(sign)
        if order is not None:
            limit = _number(wanted)
            if limit is None or str in kinds or kinds == {bool}:
                raise ValueError(f"{sign} compares numbers only; got {text!r}")
            return lambda row: row.get(field) is not None and order(row[field], limit)
        same = _equal_to(field, wanted, kinds)
        return lambda row: same(row.get(field)) == (sign != "!=")

    def _check_name(self, field: str, wanted: str) -> None:
        """ValueError for a name that no run of any study has, and what is near it."""
        known = _NAMES.get(field)
        if known is None or (field == "scheme" and not wanted.isidentifier()):
            return  # a scheme's label is of more than one word unless it is a preset
        seen = (str(row[field]) for row in self.records if row.get(field) is not None)
        choose(f"{field} in a condition", wanted, dict.fromkeys((*known, *seen)))

    def _refuse(self, dims: Sequence[str], shared: Sequence[Sequence[Row]]) -> None:
        others = [name for name in self.settings if name not in dims]
        found = {name for rows in shared for name in self._differing(others, rows)}
        tell = [name for name in others if name in found]
        row, other = shared[0][:2]
        cell = ", ".join(f"{dim}={row.get(dim)}" for dim in dims) or "one value"
        advice = (
            f"they differ in {', '.join(tell)}: add to dims, or choose by where()"
            if tell
            else "no setting tells them apart"
        )
        raise ValueError(
            f"dims {', '.join(dims)}: {len(shared)} cells hold several runs, the first "
            f"({cell}) {row['id']} and {other['id']}; {advice}"
        )

    @staticmethod
    def _differing(names: Iterable[str], rows: Sequence[Row]) -> tuple[str, ...]:
        return tuple(n for n in names if any(r.get(n) != rows[0].get(n) for r in rows[1:]))


def load(study: str | Path, root: str | Path = "results") -> Results:
    """The results of a study: a folder, or a study's name, which is a folder in ``root``.

    Files that cannot be read are listed in ``damaged``; of the others only the metadata is read.
    Raises FileNotFoundError if there is no such folder, or no result file in it.
    """
    folder = _folder(Path(study), Path(root))
    paths = sorted(folder.glob("*.npz"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no stored runs (no .npz file)")
    store, flattener = Store(folder), Flattener()
    records, damaged = [], []
    fields: dict[str, None] = {}
    settings: dict[str, None] = {}
    for path in paths:
        try:
            meta = store.load_meta(path.stem)
        except (DamagedResult, OSError) as error:
            damaged.append((path, str(error)))
            continue
        outcome, setting, versions = flattener.flatten(meta)
        records.append({**outcome, **setting, **versions})
        fields |= dict.fromkeys(records[-1])
        settings |= dict.fromkeys(setting)
    return Results(tuple(records), tuple(damaged), tuple(fields), tuple(settings))


def _folder(study: Path, root: Path) -> Path:
    for folder in (study, root / study):
        if folder.is_dir():
            return folder
    there = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    near = get_close_matches(study.name, there, n=2)
    raise FileNotFoundError(
        f"no stored study {str(study)!r}: neither {study} nor {root / study} is a folder"
        + (f" (did you mean {' or '.join(near)}?)" if near else "")
        + f"; {root} holds {', '.join(there) or 'none'}. A study stores its runs when it is run: "
        + _command(study.name)
    )


def _command(name: str) -> str:
    """What stores runs in a folder of that name, which is a study's and perhaps a tier's."""
    scripts = Path(__file__).resolve().parents[1] / "studies"  # nothing is there but in a clone
    words = name.split("_")
    for n in range(len(words), 0, -1):
        study, tier = "_".join(words[:n]), "_".join(words[n:])
        script = scripts / f"{study}.py"
        if script.is_file() and "__main__" in script.read_text():
            return f"python -m studies.{study}" + (f" --tier {tier}" if tier else "")
    return "python -m studies.NAME, in a clone"


def _number(text: str) -> int | float | None:
    for kind in (int, float):  # an int as such: seeds may be beyond 2 ** 53
        try:
            return kind(text)
        except ValueError:
            continue
    return None


def _equal_to(field: str, wanted: str, kinds: set[type]) -> Callable[[Value], bool]:
    """A test for values of ``field``, which holds values of these kinds besides None."""
    if wanted == "None":
        return lambda value: value is None
    if str in kinds:
        if field == "scheme":
            with suppress(TypeError, ValueError):  # not a preset: a label as it is
                wanted = scheme_label(scheme_of(wanted))
        return lambda value: value is not None and str(value) == wanted
    if kinds == {bool}:
        if wanted.lower() not in ("true", "false"):
            raise ValueError(f"{field} is True or False; got {wanted!r}")
        return lambda value: value is (wanted.lower() == "true")
    number = _number(wanted)
    if number is None and kinds:
        raise ValueError(f"{field} holds numbers; got {wanted!r}")
    if isinstance(number, float) and math.isnan(number):
        return lambda value: isinstance(value, float) and math.isnan(value)
    return lambda value: value is not None and value == number


def _order(value: Value) -> tuple[int, float, str]:
    """A key by which any values sort: numbers, text, then NaN and None."""
    if value is None or value != value:
        return 2, 0.0, ""
    return (1, 0.0, value) if isinstance(value, str) else (0, value, "")


def _one_kind(values: Sequence[Value]) -> list[Value]:
    """The values with one type besides None: ints beside floats as floats, other mixtures as text.

    So are integers beyond 64 bits, which neither Parquet nor float64 holds.
    """
    kinds = {type(value) for value in values if value is not None}
    if any(type(value) is int and not -(2**63) <= value < 2**63 for value in values):
        kinds = set()
    elif kinds == {int, float}:
        return [None if value is None else float(value) for value in values]
    elif len(kinds) <= 1:
        return list(values)
    return [None if value is None else str(value) for value in values]


def _write_bytes(path: Path, content: bytes) -> Path:
    with whole_file(path) as file:
        file.write(content)
    return path
