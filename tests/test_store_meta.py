"""The store's metadata without the arrays: the same content, the same errors."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mxsim.store import DamagedResult, Store
from tests import test_store


@pytest.mark.parametrize(
    "damage",
    [v for k, v in vars(test_store).items() if k.startswith("damage_") and "middle" not in k],
)
def test_metadata_fail_as_the_record_does(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    store = Store(tmp_path)
    damage(store.save(test_store.record()))
    with pytest.raises(DamagedResult) as whole:
        store.load("abc")
    with pytest.raises(DamagedResult) as meta:
        store.load_meta("abc")
    assert str(meta.value) == str(whole.value)


def test_metadata_are_those_of_the_record(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save(test_store.record())
    meta = {"schema": 1, "id": "abc", "status": "ok"}
    assert store.load_meta("abc") == store.load("abc").meta == meta
    with pytest.raises(FileNotFoundError):
        store.load_meta("absent")
    np.savez(tmp_path / "list.npz", meta=np.frombuffer(b"[1]", np.uint8))
    with pytest.raises(DamagedResult, match="its meta is no mapping"):
        store.load_meta("list")


def test_whatever_bit_is_flipped_metadata_are_the_same_or_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save(test_store.record())
    whole, meta = path.read_bytes(), store.load_meta("abc")
    rng = np.random.default_rng(0)
    seen = {"damaged": 0, "array": 0}
    for _ in range(300):
        content = bytearray(whole)
        content[rng.integers(len(content))] ^= 1 << rng.integers(8)
        path.write_bytes(content)
        try:
            assert store.load_meta("abc") == meta
        except DamagedResult:
            seen["damaged"] += 1
        else:
            seen["array"] += not store.has("abc")  # its bytes are not looked at
    assert seen["damaged"] > 50
    assert seen["array"] > 50
