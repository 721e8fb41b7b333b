"""The file of an MXArray: an npz without pickle, of packed elements, scales and a JSON header.

Reading trusts nothing: what is wrong with a file is said in a sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mxsim.formats import FORMATS, ROUNDINGS, SCALE_RULES, choose
from mxsim.layout import Blocks
from mxsim.packing import check_bits, check_lengths, check_tensor_scale, unpacked

Array = NDArray[Any]

FILE_VERSION = 1
FILE_MEMBERS = ("header", "elements", "scales")
_HEADER = (
    "mxsim",
    "format",
    "shape",
    "axes",
    "sizes",
    "scale_rule",
    "rounding",
    "tensor_scale",
)


def check_path(path: object) -> None:
    """Raise TypeError unless ``path`` is a string or a path."""
    if not isinstance(path, (str, os.PathLike)):  # open() would take, and close, a descriptor
        raise TypeError(f"path must be a string or a path; got {path!r}")


def write_members(
    path: str | Path, header: Mapping[str, Any], elements: Array, scales: Array
) -> None:
    """Write a file; its version is added to ``header``."""
    text = np.frombuffer(json.dumps({"mxsim": FILE_VERSION, **header}).encode(), np.uint8)
    with open(path, "wb") as file:
        np.savez(file, header=text, elements=elements, scales=scales)


def read_array(path: str | Path) -> dict[str, Any]:
    """The fields of the MXArray that is in a file.

    Raises TypeError unless ``path`` is a string or a path, OSError where it cannot be opened,
    ValueError for a damaged or foreign file.
    """
    check_path(path)
    with open(path, "rb") as stream:
        try:
            return _fields(*_read_members(stream))
        except Exception as error:  # a damaged archive raises anything: zlib, tokenize, memory
            reason = numpy_reason(error)
            raise ValueError(f"{path} is not a whole mxsim array file: {reason}") from error


def _fields(header: Mapping[str, Any], elements: Array, scales: Array) -> dict[str, Any]:
    """From the parts of a file; anything may be wrong with them."""
    form = FORMATS[choose("format", header["format"], FORMATS)]
    shape = check_lengths("shape", header["shape"])
    blocks = _check_blocks(header["axes"], header["sizes"], shape)
    if scales.shape != blocks.grid(shape):
        raise ValueError(
            f"scales must have shape {blocks.grid(shape)} for shape {shape} in blocks of "
            f"{blocks.sizes} along axes {blocks.axes}; got {scales.shape}"
        )
    rules = SCALE_RULES if form.scale == "e8m0" else (form.name,)
    scale_rule = choose("scale_rule", header["scale_rule"], rules)
    rounding = choose("rounding", header["rounding"], ROUNDINGS)
    codes = unpacked("elements", elements.reshape(-1), shape, form)
    check_bits(codes, scales, form)
    return {
        "codes": codes,
        "scales": scales,
        "format": form,
        "blocks": blocks,
        "scale_rule": scale_rule,
        "rounding": rounding,
        "tensor_scale": check_tensor_scale(header["tensor_scale"], form),
    }


def _read_members(stream: BinaryIO) -> tuple[dict[str, Any], Array, Array]:
    """(header, elements, scales) of a file; ValueError for what is not there."""
    file = open_numpy(stream)
    if isinstance(file, np.ndarray):
        raise ValueError("it is a .npy file, one plain array")
    missing = [name for name in FILE_MEMBERS if name not in file.files]
    if missing:
        raise ValueError(f"it has no {', '.join(missing)}; it has {', '.join(file.files) or '-'}")
    text, elements, scales = (file[name] for name in FILE_MEMBERS)
    for name, array in zip(FILE_MEMBERS, (text, elements, scales), strict=True):
        kind = getattr(array, "dtype", "none")  # NumPy gives a member that is no array as it is
        if kind != np.uint8:
            raise ValueError(f"{name} must be an array of dtype uint8; got {kind}")
    header = json.loads(text.tobytes())
    if not isinstance(header, dict) or "mxsim" not in header:
        raise ValueError(f"its header must be an object with a file version; got {header!r:.60}")
    if header["mxsim"] != FILE_VERSION:
        raise ValueError(
            f"its file version must be {FILE_VERSION} for this version of mxsim; "
            f"got {header['mxsim']!r}"
        )
    lacks = [key for key in _HEADER if key not in header]
    extra = [key for key in header if key not in _HEADER]
    if lacks or extra:
        what = f"lacks {', '.join(lacks)}" if lacks else f"has an unknown {', '.join(extra)}"
        raise ValueError(f"its header {what}")
    return header, elements, scales


def open_numpy(stream: BinaryIO) -> Any:
    """np.load without pickle, for a stream of a .npy or .npz file; ValueError for any other."""
    start = stream.read(6)
    stream.seek(0)
    if not start.startswith((b"\x93NUMPY", b"PK\x03\x04", b"PK\x05\x06")):
        raise ValueError("it is neither a .npy nor a .npz file")
    return np.load(stream, allow_pickle=False)


def numpy_reason(error: Exception) -> str:
    """Why NumPy could not read a file, in its words, but never its advice to unpickle it."""
    if isinstance(error, ValueError) and "pickle" in str(error):
        return "it holds Python objects"
    return str(error) or type(error).__name__


def _check_blocks(axes: object, sizes: object, shape: tuple[int, ...]) -> Blocks:
    """The Blocks of a file's header; an error naming axes or sizes that do not fit ``shape``."""
    where, lengths = check_lengths("axes", axes), check_lengths("sizes", sizes)
    if not where or len(set(where)) < len(where) or max(where) >= len(shape):
        raise ValueError(f"axes must be different axes of an array of shape {shape}; got {axes!r}")
    longest = [max(shape[a], 1) for a in where]
    fit = len(lengths) == len(longest) and all(
        1 <= n <= most for n, most in zip(lengths, longest, strict=True)
    )
    if not fit:
        raise ValueError(
            f"sizes must be block lengths from 1 to {longest} along axes {where}; got {sizes!r}"
        )
    return Blocks(where, lengths)
