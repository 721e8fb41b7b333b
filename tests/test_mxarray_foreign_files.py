"""Loading what ``save`` did not write: every such file is refused, and the error says why."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxsim
from tests.array_files import (
    assert_refused,
    assert_same_array,
    header_of,
    members,
    rewrite,
    saved,
)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"P",
        b"PK\x03\x04",
        b"\x80\x04K\x01.",
        b"header",
        b"\x93NUMPY",
        bytes(200),
        b"\xff" * 999,
    ],
    ids=["empty", "one byte", "zip's magic", "a pickle", "text", "npy's magic", "zeros", "ones"],
)
def test_files_of_another_kind(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    assert_refused(path)


def test_other_numpy_files(tmp_path: Path) -> None:
    path = tmp_path / "other"
    with open(path, "wb") as file:
        np.save(file, np.arange(9))
    assert_refused(path)
    with open(path, "wb") as file:
        np.save(file, np.array([None, {}], object), allow_pickle=True)
    assert_refused(path)
    empty: dict[str, Any] = {}
    bytes_ = np.ones(1, np.uint8)
    for parts in (empty, {"a": np.ones(3)}, {"header": np.ones(3)}, {"elements": bytes_}):
        with open(path, "wb") as file:
            np.savez(file, **parts)
        assert_refused(path)
    with open(path, "wb") as file:
        np.savez(file, header=np.array({"mxsim": 1}, object))
    assert_refused(path)


@pytest.mark.parametrize("name", ["header", "elements", "scales"])
def test_a_member_that_is_no_array(tmp_path: Path, name: str) -> None:
    path = tmp_path / "other"
    saved(path)
    with zipfile.ZipFile(path) as archive:
        parts = {each: archive.read(each) for each in archive.namelist()}
    parts[f"{name}.npy"] = b"not an array"
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in parts.items():
            archive.writestr(each, data)
    assert_refused(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mxsim.MXArray.load(tmp_path / "nothing")
    with pytest.raises((ValueError, OSError)):
        mxsim.MXArray.load(tmp_path)


@pytest.mark.parametrize("name", ["header", "elements", "scales"])
def test_a_missing_or_empty_member(tmp_path: Path, name: str) -> None:
    path = tmp_path / "q"
    saved(path)
    rewrite(path, **{name: None})
    assert_refused(path)
    saved(path)
    rewrite(path, **{name: np.zeros(0, np.uint8)})
    assert_refused(path)


@pytest.mark.parametrize("name", ["elements", "scales"])
def test_members_of_another_shape_or_type(tmp_path: Path, name: str) -> None:
    path = tmp_path / "q"
    for kind in (np.int8, np.float32, np.uint16, np.int64, "<U1"):
        saved(path)
        rewrite(path, **{name: members(path)[name].astype(kind)})
        assert_refused(path)
    for change in (lambda a: a[:-1], lambda a: np.append(a, a), lambda a: a.reshape(-1)[:1]):
        saved(path)
        rewrite(path, **{name: change(members(path)[name])})
        assert_refused(path)


HEADERS = [b"null", b"[]", b"1", b'"text"', b"{}", b'{"mxsim": 1}', b"[1, 2]", b'{"mxsim": null}']
HEADERS += [b'{"mxsim": 2}', b"", b"{", b"\xff\xfe", b"{'mxsim': 1}", b"[" * 100_000]


@pytest.mark.parametrize("text", HEADERS, ids=lambda text: str(text[:16]))
def test_headers_that_are_none(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "q"
    saved(path)
    rewrite(path, header=np.frombuffer(text, np.uint8))
    assert_refused(path)


WRONG: dict[str, list[Any]] = {  # of a (3, 32) array in blocks of 16 along axis 1
    "mxsim": [0, 2, "1", None, [1]],
    "format": ["mxint9", "", None, 3, ["mxint8"], {}, "nvfp4", "mxfp8_e4m3"],
    "shape": [None, 3, "33", [], [3], [96], [3, 32, 1], [-3, -32], [3, "x"], [3.5, 32], {}],
    "shape ": [[3.0, 32.0], [True, 96], ["3", "32"], [[3], [32]], [0, 32], [3, 2**31]],
    "shape  ": [[2**62, 4], [2**70, 2**70], [10**30, 0]],
    "axes": [None, 1, "1", [], [2], [-1], [0], [1, 1], ["1"], [1.0], [0, 1]],
    "sizes": [
        None,
        16,
        "16",
        [],
        [0],
        [-16],
        [15],
        [32],
        [33],
        [16, 16],
        ["16"],
        [16.0],
        [True],
        [2**70],
    ],
    "scale_rule": [None, 3, "", "nearest", ["floor"], {}],
    "rounding": [None, 3, "", "nearest", ["even"], {}],
    "tensor_scale": [1.0, "1", 0, [1]],
}


@pytest.mark.parametrize(
    ("field", "value"),
    [(field.strip(), value) for field, values in WRONG.items() for value in values],
    ids=lambda v: json.dumps(v)[:20],
)
def test_a_wrong_field_is_refused(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "q"
    saved(path)
    rewrite(path, header={**header_of(path), field: value})
    assert_refused(path)


@pytest.mark.parametrize("field", ["mxsim", "format", "shape", "axes", "sizes", "tensor_scale"])
def test_a_missing_field_is_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "q"
    saved(path)
    header = header_of(path)
    del header[field]
    rewrite(path, header=header)
    assert_refused(path)


@pytest.mark.parametrize(
    "value", [None, 0, -1.0, float("nan"), float("inf"), "1.0", [1.0], True, 1e300, 1e-300, {}]
)
def test_a_wrong_tensor_scale_is_refused(tmp_path: Path, value: Any) -> None:
    path = tmp_path / "q"
    saved(path, "nvfp4")
    rewrite(path, header={**header_of(path), "tensor_scale": value})
    assert_refused(path)


def member_with_header(description: str, data: bytes) -> bytes:
    """An npy file that says of itself what `description` says."""
    text = description.encode().ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


@pytest.mark.parametrize("name", ["header", "elements", "scales"])
@pytest.mark.parametrize(
    "description",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1152921504606846976,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (4611686018427387904, 8), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-1,), }",
        "{'descr': '|O', 'fortran_order': False, 'shape': (3,), }",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1000000,), }",
        "{'descr': '|u1'}",
    ],
)
def test_members_that_claim_what_they_are_not(tmp_path: Path, name: str, description: str) -> None:
    path = tmp_path / "q"
    saved(path)
    parts = {}
    for each, array in members(path).items():
        buffer = io.BytesIO()
        np.save(buffer, array)
        parts[each] = buffer.getvalue()
    parts[name] = member_with_header(description, bytes(100))
    with zipfile.ZipFile(path, "w") as archive:
        for each, data in parts.items():
            archive.writestr(f"{each}.npy", data)
    assert_refused(path)


def test_a_stored_checksum_is_checked(tmp_path: Path) -> None:
    # the elements changed where their bytes lie, and nothing else
    path = tmp_path / "q"
    q = saved(path)
    whole = path.read_bytes()
    packed = q.pack().tobytes()
    at = whole.index(packed)
    assert zlib.crc32(packed) != zlib.crc32(bytes([packed[0] ^ 1]) + packed[1:])
    path.write_bytes(whole[:at] + bytes([packed[0] ^ 1]) + whole[at + 1 :])
    assert_refused(path)


# ------------------------------------------------------------------------------ what errors say


def reason(path: Path) -> str:
    """Why a file is refused: what comes after its name."""
    with pytest.raises(ValueError, match="is not a whole mxsim array file") as caught:
        mxsim.MXArray.load(path)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert "pickle" not in message
    return message.split(": ", 1)[1]


@pytest.mark.parametrize("path", [None, 3, True, 1.5, b"q", ["q"]], ids=str)
def test_what_is_no_path(path: Any) -> None:
    q = mxsim.quantize(np.ones(32), "mxint8")
    for call in (mxsim.MXArray.load, q.save):
        with pytest.raises(TypeError, match="path must be a string or a path; got") as caught:
            call(path)
        assert str(caught.value).endswith(repr(path))


def test_a_file_descriptor_is_left_open(tmp_path: Path) -> None:
    q = saved(tmp_path / "q")
    with open(tmp_path / "q", "r+b") as file:
        for call in (mxsim.MXArray.load, q.save):
            with pytest.raises(TypeError, match="path"):
                call(file.fileno())  # type: ignore[arg-type]
        os.fstat(file.fileno())  # raises if it was closed
    assert_same_array(mxsim.MXArray.load(tmp_path / "q"), q)  # nor was it written to


def test_why_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other"
    for content in (b"", b"some text, no array", b"\x80\x04K\x01."):
        path.write_bytes(content)
        assert reason(path) == "it is neither a .npy nor a .npz file"
    with open(path, "wb") as file:
        np.save(file, np.arange(9))
    assert reason(path) == "it is a .npy file, one plain array"
    with open(path, "wb") as file:
        np.save(file, np.array([None, {}], object), allow_pickle=True)
    assert reason(path) == "it holds Python objects"
    with open(path, "wb") as file:
        np.savez(file, weight=np.ones(3), scales=np.ones(3))
    assert reason(path) == "it has no header, elements; it has weight, scales"
    with open(path, "wb") as file:
        np.savez(file, header=np.array({"mxsim": 1}, object), elements=[1], scales=[1])
    assert reason(path) == "it holds Python objects"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"tensor_scale": ...}, ["lacks", "tensor_scale"]),
        ({"axes": ..., "sizes": ...}, ["lacks", "axes, sizes"]),
        ({"mxsim": ...}, ["header", "file version"]),
        ({"comment": "mine"}, ["unknown", "comment"]),
        ({"mxsim": 2}, ["file version", "1", "2"]),
        ({"axes": [2]}, ["axes", "(3, 32)", "[2]"]),
        ({"axes": [1, 1]}, ["axes", "different", "[1, 1]"]),
        ({"axes": [-1]}, ["axes", "at least 0", "[-1]"]),
        ({"axes": "1"}, ["axes", "integers", "'1'"]),
        ({"sizes": [33]}, ["sizes", "1 to [32]", "[33]"]),
        ({"sizes": [0]}, ["sizes", "1 to [32]", "[0]"]),
        ({"sizes": [16, 16]}, ["sizes", "(1,)", "[16, 16]"]),
        ({"sizes": [16.0]}, ["sizes", "integers", "16.0"]),
        ({"sizes": [8]}, ["scales", "(3, 4)", "(3, 2)"]),
        ({"shape": [3, 31]}, ["elements", "(3, 31)", "70", "72"]),
        ({"shape": [3, "x"]}, ["shape", "integers", "'x'"]),
        ({"format": "mxint9"}, ["format", "mxint8", "'mxint9'"]),
        ({"rounding": "up"}, ["rounding", "even", "'up'"]),
        ({"tensor_scale": 2}, ["tensor_scale", "None", "2"]),
    ],
    ids=str,
)
def test_why_a_header_is_refused(tmp_path: Path, changed: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "q"
    saved(path)
    header = {**header_of(path), **changed}
    rewrite(path, header={key: value for key, value in header.items() if value is not ...})
    message = reason(path)
    for word in words:
        assert word in message


def test_codes_that_the_format_lacks_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "q"
    mxsim.quantize(np.ones(32), "mxint8").save(path)
    rewrite(path, elements=np.full(32, 0x80, np.uint8))
    assert "codes must not be 0x80" in reason(path)
    mxsim.quantize(np.ones(3), "mxfp4_e2m1").save(path)
    rewrite(path, elements=np.array([0x21, 0x13], np.uint8))
    assert "elements must end in zeros" in reason(path)
    mxsim.quantize(np.ones(32), "nvfp4").save(path)
    rewrite(path, scales=np.array([0x38, 0xB8], np.uint8))
    assert "scales must be" in reason(path)


@pytest.mark.parametrize("name", ["elements", "scales", "header"])
def test_members_that_are_no_bytes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "q"
    saved(path)
    rewrite(path, **{name: np.ones(3)})
    assert reason(path) == f"{name} must be an array of dtype uint8; got float64"
