"""Runs that stop and go on: the same bits, from a file that is whole or refused."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim.checkpoint import CHECKPOINT_VERSION
from mxsim.precision import PrecisionScheme, SiteFormat
from mxsim.store import DamagedResult, read_whole, write_whole
from mxsim.train import Run, Training

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=32, steps=16, lr=1e-2, eval_samples=64)
RANDOM = replace(mxsim.scheme("nvfp4_recipe"), hadamard="random", gradients="bf16", moments="bf16")
CASES: dict[str, tuple[mxsim.ProxyConfig, PrecisionScheme]] = {
    "exact": (CFG, mxsim.scheme("exact")),
    "all_e4m3": (CFG, mxsim.scheme("all_e4m3")),
    "paper_code": (CFG, mxsim.scheme("paper_code")),
    "random bits": (CFG, RANDOM),
    "bf16 weights": (CFG, replace(mxsim.scheme("bf16"), master_weights="bf16", moments="bf16")),
    "mini-batches": (replace(CFG, data="fixed", dataset_size=96), mxsim.scheme("gemm_e2m1")),
    "sgd, cosine": (
        replace(CFG, optimizer="sgd", momentum=0.9, schedule="cosine", lr=0.1),
        mxsim.scheme("all_int8"),
    ),
    "float64": (replace(CFG, dtype="float64"), mxsim.scheme("all_e4m3")),
    "nonfinite": (replace(CFG, optimizer="sgd", lr=1e30), mxsim.scheme("exact")),
    "spiking": (replace(CFG, lr=0.2, steps=60), mxsim.scheme("all_e2m1")),
}
JUMPY = mxsim.DivergenceRule(spike_ratio=1.05, window=2, recovery_ratio=1.01)  # spikes for a test
PLAN = mxsim.ProbePlan(3, (("mx", mxsim.scheme("all_e4m3")), ("sr", RANDOM)))


def assert_same_run(a: Run, b: Run) -> None:
    for name in ("losses", "grad_norms"):
        assert getattr(a, name).tobytes() == getattr(b, name).tobytes(), name
    for one, other in zip(a.params, b.params, strict=True):
        for kind in one:
            assert one[kind].tobytes() == other[kind].tobytes(), kind
    assert repr(a.outcome) == repr(b.outcome)  # status, bad step and tensor, spikes; NaN as NaN
    assert repr(a.eval_loss) == repr(b.eval_loss)
    if a.probes is not None and b.probes is not None:
        for name in ("zeta", "cos", "alpha", "rho", "norm", "gamma_saturated", "gamma_mean"):
            one, other = getattr(a.probes, name), getattr(b.probes, name)
            assert one.tobytes() == other.tobytes(), name
    assert (a.probes is None) == (b.probes is None)


@pytest.mark.parametrize("probe", [None, PLAN], ids=["", "probed"])
@pytest.mark.parametrize("case", CASES)
def test_half_save_load_half_is_the_whole(
    case: str, probe: mxsim.ProbePlan | None, tmp_path: Path
) -> None:
    cfg, scheme = CASES[case]
    rule = JUMPY if case == "spiking" else None
    whole = mxsim.train(cfg, scheme, probe=probe, rule=rule)
    first = mxsim.start(cfg, scheme, probe=probe, rule=rule).advance(cfg.steps // 2)
    path = mxsim.save_checkpoint(first, tmp_path / "half.npz")
    second = mxsim.load_checkpoint(path)
    assert second.step == first.step
    assert second.optimizer.first.tobytes() == first.optimizer.first.tobytes()
    assert second.optimizer.second.tobytes() == first.optimizer.second.tobytes()
    assert second.optimizer.updates == first.optimizer.updates
    run = second.advance().finish()
    assert_same_run(run, whole)
    if case == "nonfinite":
        assert run.status == "nonfinite"
    if case == "spiking":
        assert len(run.spikes) > 1


def test_any_number_of_stops_is_the_whole(tmp_path: Path) -> None:
    cfg, scheme = CASES["random bits"]
    training = mxsim.start(cfg, scheme, probe=PLAN)
    for steps in (1, 0, 4, 2, 9):
        path = mxsim.save_checkpoint(training.advance(steps), tmp_path / "c")
        assert path.name == "c.npz"
        training = mxsim.load_checkpoint(path)
    assert training.ended
    assert_same_run(training.finish(), mxsim.train(cfg, scheme, probe=PLAN))


def test_an_interrupted_step_is_not_half_done() -> None:
    whole = mxsim.train(CFG, mxsim.scheme("all_e4m3"))
    training = mxsim.start(CFG, mxsim.scheme("all_e4m3"))

    def stop(step: int, loss: float) -> None:
        if step == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training.advance(on_step=stop)
    assert training.step == training.optimizer.updates == 7
    assert_same_run(training.advance().finish(), whole)


def test_an_unfinished_run_cannot_be_finished() -> None:
    training = mxsim.start(CFG, mxsim.scheme("exact")).advance(3)
    with pytest.raises(ValueError, match="3 of 16 steps are done"):
        training.finish()
    with pytest.raises(ValueError, match="steps must be at least 0; got -1"):
        training.advance(-1)


def test_a_checkpoint_says_what_made_it(tmp_path: Path) -> None:
    path = mxsim.save_checkpoint(mxsim.start(CFG, RANDOM, probe=PLAN), tmp_path / "c.npz")
    arrays, meta = read_whole(path)
    assert meta["versions"]["mxsim"] == mxsim.__version__
    assert "commit" in meta["versions"]
    assert meta["config"]["width"] == 32
    assert all(array.dtype != object for array in arrays.values())
    loaded = mxsim.load_checkpoint(path)
    assert (loaded.config, loaded.scheme, loaded.probe) == (CFG, RANDOM, PLAN)


def saved(tmp_path: Path) -> Path:
    training = mxsim.start(CFG, mxsim.scheme("all_e4m3"), probe=PLAN).advance(4)
    return mxsim.save_checkpoint(training, tmp_path / "c.npz")


def same_state(a: Training, b: Training) -> bool:
    return (
        a.flat.tobytes() == b.flat.tobytes()
        and a.optimizer.first.tobytes() == b.optimizer.first.tobytes()
        and a.optimizer.second.tobytes() == b.optimizer.second.tobytes()
        and a.losses.tobytes() == b.losses.tobytes()
        and (a.config, a.scheme, a.probe, a.rule) == (b.config, b.scheme, b.probe, b.rule)
        and (a.step, a.optimizer.updates) == (b.step, b.optimizer.updates)
    )


def test_a_flipped_bit_is_harmless_or_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole, reference = path.read_bytes(), mxsim.load_checkpoint(path)
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(0, len(whole), 150):
        damaged = bytearray(whole)
        damaged[position] ^= 1 << int(rng.integers(8))
        path.write_bytes(damaged)
        try:
            loaded = mxsim.load_checkpoint(path)
        except DamagedResult:
            refused += 1
        else:
            assert same_state(loaded, reference)
    assert refused > 100


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(DamagedResult, match=r"c\.npz is not a whole"):
            mxsim.load_checkpoint(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checkpoint": CHECKPOINT_VERSION + 1}, f"version {CHECKPOINT_VERSION + 1}.*reads"),
        ({"step": 17, "updates": 17}, "step 17 of 16"),
        ({"updates": 3}, "step 4 of 16, 3 updates"),
        ({"step": True}, "got True"),
        ({"step": -1}, "at least 0; got -1"),
        ({"step": 1.5}, "got 1.5"),
        ({"config": {"width": 64}}, r"weights must be float32 of shape .* got"),
        ({"config": {"wide": 64}}, "wide"),
        ({"scheme": {"ln_alpha": {}}}, "ln_alpha"),
    ],
)
def test_a_foreign_or_inconsistent_file_is_refused(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    arrays, meta = read_whole(path)
    write_whole(path, arrays, meta | change)
    with pytest.raises(DamagedResult, match=words):
        mxsim.load_checkpoint(path)


def test_a_file_that_cannot_be_read_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)

    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(PermissionError):
        mxsim.load_checkpoint(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mxsim.load_checkpoint(tmp_path / "none.npz")
    store_file = write_whole(tmp_path / "r.npz", {"losses": np.zeros(3)}, {"schema": 1})
    with pytest.raises(DamagedResult, match="is not a checkpoint"):
        mxsim.load_checkpoint(store_file)
    text = tmp_path / "t.npz"
    text.write_text(json.dumps({"checkpoint": 1}))
    with pytest.raises(DamagedResult, match="not a whole"):
        mxsim.load_checkpoint(text)


def test_a_checkpoint_that_cannot_be_written_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path)
    before = path.read_bytes()
    training = mxsim.load_checkpoint(path).advance(1)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        mxsim.save_checkpoint(training, path)
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["c.npz"]
    with pytest.raises(OSError, match="No such file or directory"):
        mxsim.save_checkpoint(training, tmp_path / "nowhere" / "c.npz")
    shutil.rmtree(tmp_path)


def test_two_dimensional_blocks_and_overrides_survive_the_file(tmp_path: Path) -> None:
    scheme = PrecisionScheme(
        fc1_fprop_w=SiteFormat("mxfp8_e4m3", block_size=(32, 32)),
        fc2_fprop_x=SiteFormat("mxint8", block_size="tensor"),
        overrides=((1, "fc1_fprop_w", SiteFormat("nvfp4", block_size=(16, 16))),),
    )
    path = mxsim.save_checkpoint(mxsim.start(CFG, scheme), tmp_path / "c.npz")
    assert mxsim.load_checkpoint(path).scheme == scheme
