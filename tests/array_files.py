"""Files of MXArrays for tests: written, taken apart, and put together otherwise."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxsim
from tests import inputs
from tests.comparing import assert_same_bits
from tests.inputs import Array


def assert_same_array(got: mxsim.MXArray, want: mxsim.MXArray) -> None:
    assert_same_bits(got.codes, want.codes)
    assert_same_bits(got.scales, want.scales)
    assert_same_bits(got.dequantize(), want.dequantize())
    for name in ("format", "axis", "block_size", "scale_rule", "rounding", "tensor_scale", "shape"):
        assert getattr(got, name) == getattr(want, name), name


def assert_refused(path: Path) -> None:
    with pytest.raises(ValueError, match=path.name):
        mxsim.MXArray.load(path)


def saved(path: Path, fmt: str = "mxfp6_e3m2") -> mxsim.MXArray:
    q = mxsim.quantize(inputs.random_near(np.float32)[:3], fmt, block_size=16)
    q.save(path)
    return q


def members(path: Path) -> dict[str, Array]:
    with np.load(path) as file:
        return {name: file[name] for name in file.files}


def header_of(path: Path) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(members(path)["header"].tobytes())
    return header


def rewrite(path: Path, **changed: Any) -> None:
    """The file with other members; a header may be given as an object."""
    parts: dict[str, Any] = members(path)
    for name, value in changed.items():
        if value is None:
            del parts[name]
        elif name == "header" and not isinstance(value, np.ndarray):
            parts[name] = np.frombuffer(json.dumps(value).encode(), np.uint8)
        else:
            parts[name] = value
    with open(path, "wb") as file:
        np.savez(file, **parts)
