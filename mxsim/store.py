"""Stored results: one file a finished run, named by a hash of what was run.

The name is a hash of the canonical configuration and SCHEMA_VERSION, so a study that starts again
finds what it has, whatever the order or executor.  In the canonical form a field equal to its
default is left out: a setting added later, whose default is what was done before, leaves every
existing id as it was.  Changing a default or the meaning of a value needs a new SCHEMA_VERSION.

A file is an npz without pickle: numeric arrays, and ``meta``, a JSON text in bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

SCHEMA_VERSION = 1


def canonical(value: Any) -> Any:
    """Plain JSON data for ``value``: dataclasses become dicts of the fields not at their default.

    Raises TypeError for anything but dataclasses, dicts, sequences and JSON scalars.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            f.name: canonical(getattr(value, f.name))
            for f in dataclasses.fields(value)
            if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
        }
    if isinstance(value, Mapping):
        return {str(key): canonical(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [canonical(item) for item in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(
        "value must be made of dataclasses, mappings, sequences, numbers, strings, booleans and "
        f"None; got the {type(value).__name__} {value!r}"
    )


def result_id(value: Any) -> str:
    """16 hexadecimal digits that name the results of running ``value`` (a dataclass)."""
    content = {"schema": SCHEMA_VERSION, "run": canonical(value)}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@lru_cache(maxsize=1)
def provenance() -> Mapping[str, Any]:
    """Versions, commit and machine of this process.

    The commit is None outside a checkout and ends in ``-dirty`` if files were edited.
    """
    packages = ("numpy", "scipy", "numba")
    return {
        "mxsim": mxsim_version(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "commit": _commit(),
        "machine": platform.machine(),
        "system": platform.system(),
    }


def mxsim_version() -> str:
    """This package's own, in a checkout that is not installed, too."""
    from mxsim import __version__  # not at the top: the package imports this module

    return __version__


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    command += ["--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


@dataclass(frozen=True, eq=False)
class Record:
    """One stored run: its id, its arrays, its metadata."""

    id: str
    arrays: Mapping[str, NDArray[Any]]
    meta: Mapping[str, Any]


class DamagedResult(Exception):
    """A result file that cannot be read: truncated, foreign, or of another schema."""


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write that comes to be whole or not at all: under a temporary name, then renamed.

    Raises OSError, naming ``path``, without leaving a partial file behind.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{path.stem}.", suffix=".tmp", dir=path.parent
        )
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private to the user
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        if isinstance(error, OSError):  # a full disk says nothing of the file
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_whole(
    path: Path, arrays: Mapping[str, NDArray[Any]], meta: Mapping[str, Any], compress: bool = True
) -> Path:
    """Write an npz by ``whole_file``; ``meta`` is plain JSON data.  Raises OSError as it does."""
    text = np.frombuffer(json.dumps(meta, indent=1).encode(), np.uint8)
    write: Callable[..., None] = np.savez_compressed if compress else np.savez
    with whole_file(path) as file:
        write(file, meta=text, **dict(arrays))
    return path


def read_whole(
    path: Path, meta_only: bool = False
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """(arrays, meta) of a file that ``write_whole`` wrote; ``meta_only``: no arrays, unread.

    Raises OSError if the file is not there or cannot be read now (which says nothing about what is
    in it), DamagedResult if its content is not whole.
    """
    content = path.read_bytes()
    try:
        with np.load(BytesIO(content), allow_pickle=False) as file:
            names = () if meta_only else file.files
            arrays = {name: file[name] for name in names if name != "meta"}
            meta = json.loads(file["meta"].tobytes())
    except MemoryError:
        raise
    except Exception as error:  # a flipped bit raises anything: zlib, tokenize, struct, ...
        reason = "it is no npz" if "pickle" in str(error) else str(error) or type(error).__name__
        raise DamagedResult(f"{path} is not a whole result file ({reason})") from error
    if not isinstance(meta, dict):
        raise DamagedResult(f"{path} is not a whole result file (its meta is no mapping)")
    return arrays, meta


def _check(path: Path, meta: Mapping[str, Any]) -> None:
    """DamagedResult unless ``meta`` is of the id that its path says and of this schema."""
    if meta.get("id") != path.stem:
        raise DamagedResult(f"{path} does not hold the result that its name says")
    if meta.get("schema") != SCHEMA_VERSION:
        raise DamagedResult(
            f"{path} has schema {meta.get('schema')}; this version reads {SCHEMA_VERSION}"
        )


@dataclass(frozen=True)
class Store:
    """The results of one study: a folder of ``<id>.npz`` files."""

    folder: Path

    def check_writable(self) -> None:
        """Write and remove a small file; raises OSError if the folder does not take one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self.folder) as file:
            file.write(bytes(2**16))
            file.flush()
            os.fsync(file.fileno())

    def path(self, result: str) -> Path:
        return self.folder / f"{result}.npz"

    def save(self, record: Record) -> Path:
        """Write a record whole or not at all.

        Raises OSError (a full disk, say) without leaving a partial file behind.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        meta = {"schema": SCHEMA_VERSION, "id": record.id, **record.meta}
        return write_whole(self.path(record.id), record.arrays, meta)

    def load(self, result: str) -> Record:
        """Read one record.

        Raises FileNotFoundError if there is none of that id, DamagedResult if the file is not one
        that ``save`` wrote whole.
        """
        path = self.path(result)
        arrays, meta = read_whole(path)
        _check(path, meta)
        return Record(result, arrays, meta)

    def load_meta(self, result: str) -> dict[str, Any]:
        """The metadata of one record, its arrays left compressed: a third of the time of ``load``.

        Raises as ``load`` does, but damage to the bytes of an array goes unseen.
        """
        path = self.path(result)
        _, meta = read_whole(path, meta_only=True)
        _check(path, meta)
        return meta

    def has(self, result: str) -> bool:
        """Whether a whole record of that id is stored (it is read to see)."""
        try:
            self.load(result)
        except (FileNotFoundError, NotADirectoryError, DamagedResult):
            return False
        return True

    def damaged(self) -> Iterator[Path]:
        """Result files that cannot be read."""
        for path in sorted(self.folder.glob("*.npz")):
            try:
                self.load(path.stem)
            except DamagedResult:
                yield path
