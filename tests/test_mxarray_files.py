"""Saving and loading: what is written comes back, and what is damaged is refused or harmless.

A file that loads in spite of damage must hold the very array that was saved.  Whole files that are
something else are in test_mxarray_foreign_files.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxsim
from tests import inputs
from tests.array_files import assert_refused, assert_same_array, header_of, members, saved
from tests.comparing import assert_same_bits
from tests.comparing_blocks import NAMES, block_format
from tests.oracle_elements import UNUSUAL

each_name = pytest.mark.parametrize("fmt", NAMES)


# -------------------------------------------------------------------------------- what comes back


@each_name
@pytest.mark.parametrize(
    ("axis", "block_size"), [(-1, None), (0, 5), (-1, (4, 3)), ((1, 0), (4, 3)), (-1, "tensor")]
)
def test_round_trip(tmp_path: Path, fmt: str, axis: Any, block_size: Any) -> None:
    x = inputs.random_near(np.float32)[:7, :19].copy()
    x[2, 2], x[3, 3] = np.nan, -0.0
    rule = None if fmt == "nvfp4" else "rceil"
    for same in (x, x.T, x[::-1, ::-1], x[:0]):
        q = mxsim.quantize(same, fmt, axis, block_size, rule, "away")
        q.save(tmp_path / "q.npz")
        assert_same_array(mxsim.MXArray.load(tmp_path / "q.npz"), q)
        assert_same_array(mxsim.MXArray.load(str(tmp_path / "q.npz")), q)


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (3, 0), (1, 1, 1, 1), (2, 3, 4, 5)])
def test_round_trip_of_every_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    for fmt in NAMES:
        q = mxsim.quantize(x, fmt)
        q.save(tmp_path / "q")
        assert_same_array(mxsim.MXArray.load(tmp_path / "q"), q)


@each_name
def test_round_trip_of_given_bits(tmp_path: Path, fmt: str) -> None:
    q = mxsim.quantize(inputs.random_near(np.float32)[:3], fmt)
    given = mxsim.MXArray.from_bits(q.codes, q.scales, fmt, tensor_scale=q.tensor_scale)
    packed = mxsim.MXArray.unpack(q.pack(), q.shape, q.scales, fmt, tensor_scale=q.tensor_scale)
    for each in (given, packed):
        each.save(tmp_path / "q")
        assert_same_array(mxsim.MXArray.load(tmp_path / "q"), each)


def test_A10_a_file_carries_rule_and_rounding(tmp_path: Path) -> None:
    # results that do not say which scale rule they are from
    path = tmp_path / "q.npz"
    for rule in ("floor", "rceil", "ceil", "even"):
        q = mxsim.quantize(np.ones(40), "mxfp4_e2m1", scale_rule=rule, rounding="zero")
        q.save(path)
        back = mxsim.MXArray.load(path)
        assert (back.scale_rule, back.rounding) == (rule, "zero")
        assert (header_of(path)["scale_rule"], header_of(path)["rounding"]) == (rule, "zero")
    noise = mxsim.Noise(1)
    mxsim.quantize(np.ones(40), "mxint8", rounding="stochastic", noise=noise).save(path)
    assert mxsim.MXArray.load(path).rounding == "stochastic"


def test_the_path_is_the_file_written(tmp_path: Path) -> None:
    # np.savez adds .npz to a name without it
    saved(tmp_path / "plain")
    assert [each.name for each in tmp_path.iterdir()] == ["plain"]


def test_elements_are_packed_and_no_pickle_is_needed(tmp_path: Path) -> None:
    path = tmp_path / "q.npz"
    q = saved(path)
    parts = members(path)
    assert_same_bits(parts["elements"], q.pack())
    assert_same_bits(parts["scales"], q.scales)
    assert all(part.dtype == np.uint8 for part in parts.values())


def test_what_was_loaded_has_no_statistics(tmp_path: Path) -> None:
    saved(tmp_path / "q")
    assert mxsim.MXArray.load(tmp_path / "q").stats is None


@pytest.mark.parametrize("element", UNUSUAL[:2], ids=str)
def test_a_format_without_a_name_cannot_be_saved(tmp_path: Path, element: Any) -> None:
    q = mxsim.quantize(np.ones(32), block_format(element))
    with pytest.raises(ValueError, match=r"mxsim\.FORMATS"):
        q.save(tmp_path / "q")
    assert not (tmp_path / "q").exists()


# ------------------------------------------------------------------------------- damaged files


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut"
    saved(path, "mxfp4_e2m1")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert_refused(path)


@pytest.mark.parametrize(("fmt", "turn"), [("mxfp4_e2m1", 0), ("nvfp4", 1)])
def test_a_flipped_bit_is_refused_or_harmless(tmp_path: Path, fmt: str, turn: int) -> None:
    path = tmp_path / "flipped"
    q = saved(path, fmt)
    whole = path.read_bytes()
    wrong: dict[str, list[int]] = {}
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << (turn * at % 8)  # the lowest bit of each byte, or one bit after another
        path.write_bytes(damaged)
        try:
            back = mxsim.MXArray.load(path)
        except ValueError:
            continue
        except Exception as error:
            wrong.setdefault(type(error).__name__, []).append(at)
        else:
            assert_same_array(back, q)  # a date, or another field that nothing depends on
    assert not wrong, f"bytes of {len(whole)} with an error other than ValueError: {wrong}"


def test_bytes_before_and_after_are_refused_or_harmless(tmp_path: Path) -> None:
    path = tmp_path / "longer"
    q = saved(path)
    whole = path.read_bytes()
    for damaged in (whole + b"x", b"x" + whole, whole + whole, whole[:100] + whole):
        path.write_bytes(damaged)
        try:
            assert_same_array(mxsim.MXArray.load(path), q)
        except ValueError:
            continue
