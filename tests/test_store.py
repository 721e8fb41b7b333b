"""The store: ids, atomic writes, damaged and foreign files."""

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim.precision import SiteFormat
from mxsim.store import DamagedResult, Record, Store, canonical, result_id
from mxsim.sweep import Point

E4M3 = SiteFormat("mxfp8_e4m3")
POINT = Point(mxsim.ProxyConfig(width=8, seed=3), mxsim.scheme("ln_only_e4m3"))


def record(result: str = "abc") -> Record:
    return Record(result, {"losses": np.arange(4, dtype=np.float32)}, {"status": "ok"})


def test_canonical_form_leaves_out_defaults() -> None:
    e4m3 = {"format": "mxfp8_e4m3"}
    assert canonical(POINT) == {
        "config": {"width": 8, "seed": 3},
        "scheme": {"ln_gamma": e4m3, "ln_beta": e4m3},
    }


def test_ids_are_what_they_were() -> None:
    # A change here orphans every stored result: raise SCHEMA_VERSION only if the meaning changed.
    assert result_id(Point(mxsim.ProxyConfig(), mxsim.scheme("exact"))) == "e8835c6a657824d6"
    assert POINT.id == "38fa25778cbd66f1"


def test_a_new_field_at_its_default_keeps_the_id() -> None:
    @dataclass(frozen=True)
    class Now:
        width: int = 64

    @dataclass(frozen=True)
    class Later:
        width: int = 64
        norm: str = "layer"

    assert result_id(Now(32)) == result_id(Later(32))
    assert result_id(Later(32)) != result_id(Later(32, "rms"))


def test_everything_that_matters_changes_the_id() -> None:
    others = [
        replace(POINT, config=replace(POINT.config, seed=4)),
        replace(POINT, config=replace(POINT.config, lr=1e-3)),
        replace(POINT, scheme=replace(POINT.scheme, ln_beta=SiteFormat("exact"))),
        replace(POINT, scheme=replace(POINT.scheme, ln_beta=SiteFormat("mxfp8_e4m3", "rceil"))),
        replace(POINT, rule=mxsim.DivergenceRule(patience=100)),
        replace(POINT, probe=mxsim.ProbePlan(10, (("a", mxsim.scheme("exact")),))),
    ]
    assert len({POINT.id, *(other.id for other in others)}) == len(others) + 1


def test_presets_are_hashed_by_content_and_not_by_name() -> None:
    rebuilt = replace(mxsim.scheme("exact"), ln_gamma=E4M3, ln_beta=E4M3)
    assert Point(POINT.config, rebuilt).id == POINT.id


def test_no_canonical_form_for_arbitrary_objects() -> None:
    with pytest.raises(TypeError, match="ndarray"):
        canonical({"a": np.zeros(3)})


def test_round_trip(tmp_path: Path) -> None:
    store = Store(tmp_path / "study")
    path = store.save(record())
    assert path == tmp_path / "study" / "abc.npz"
    loaded = store.load("abc")
    np.testing.assert_array_equal(loaded.arrays["losses"], [0, 1, 2, 3])
    assert loaded.meta["status"] == "ok"
    assert store.has("abc")
    assert not store.has("abd")
    with pytest.raises(FileNotFoundError):
        store.load("abd")
    assert [p.name for p in path.parent.iterdir()] == ["abc.npz"]  # no temporary left


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def damage_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 0xFF
    path.write_bytes(content)


def damage_empty(path: Path) -> None:
    path.write_bytes(b"")


def damage_foreign(path: Path) -> None:
    np.savez(path, other=np.zeros(3))


def damage_text(path: Path) -> None:
    path.write_text("not an archive")


def damage_pickle(path: Path) -> None:
    np.savez(path, meta=np.array([{"id": "abc"}], dtype=object))


def damage_other_id(path: Path) -> None:
    meta = np.frombuffer(json.dumps({"id": "xyz", "schema": 1}).encode(), np.uint8)
    np.savez(path, meta=meta)


def damage_schema(path: Path) -> None:
    meta = np.frombuffer(json.dumps({"id": "abc", "schema": 99}).encode(), np.uint8)
    np.savez(path, meta=meta)


@pytest.mark.parametrize(
    "damage", [v for k, v in dict(globals()).items() if k.startswith("damage_")]
)
def test_a_damaged_or_foreign_file_is_said_to_be_one(tmp_path: Path, damage: Any) -> None:
    store = Store(tmp_path)
    damage(store.save(record()))
    with pytest.raises(DamagedResult, match=r"abc\.npz"):
        store.load("abc")
    assert not store.has("abc")
    assert [p.name for p in store.damaged()] == ["abc.npz"]


def test_whatever_bit_is_flipped_the_file_reads_the_same_or_is_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save(record())
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    outcomes = {"same": 0, "damaged": 0}
    for _ in range(400):
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content)
        try:
            loaded = store.load("abc")
        except DamagedResult:
            outcomes["damaged"] += 1
        else:
            np.testing.assert_array_equal(loaded.arrays["losses"], [0, 1, 2, 3])
            outcomes["same"] += 1
    assert outcomes["damaged"] > 200
    assert outcomes["same"] > 0


def test_a_failed_write_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.save(record())
    before = (tmp_path / "abc.npz").read_bytes()

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.save(record())
    assert (tmp_path / "abc.npz").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["abc.npz"]
