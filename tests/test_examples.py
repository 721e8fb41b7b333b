"""The scripts of examples/ at their smallest size; tests/backends has those in PyTorch."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[1]


def example(name: str) -> Any:
    """examples/<name>.py as a module: what a person runs, but for its last two lines."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_lists_every_script_and_no_other() -> None:
    listed = re.findall(r"^\| \[(\w+\.py)\]\((\w+\.py)\)", page := readme(), re.MULTILINE)
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name, _ in listed} == {link for _, link in listed} == scripts
    assert {path.name for path in (ROOT / "examples").iterdir()} - {"__pycache__"} == {
        *scripts,
        "README.md",
    }
    for command in re.findall(r"examples/(\w+\.py)", page):
        assert command in scripts


def readme() -> str:
    return (ROOT / "examples" / "README.md").read_text()


# ------------------------------------------------------------------------------- own_format.py


@pytest.fixture(scope="module")
def diagram(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path, list[str]]:
    """The module, its results, how it is called: two depths, two rates, a trace of two rounds."""
    module, root = example("own_format"), tmp_path_factory.mktemp("results")
    module.RATES, module.DEPTHS, module.MOST_RUNS = (0.01, 5.0), (1, 2), 8
    options = ["--steps", "60", "--seeds", "2", "--workers", "1", "--results", str(root)]
    assert module.main(options) == 0
    return module, root / "own_format", options


def test_a_recipe_gets_its_phase_diagram_and_pairs(
    diagram: tuple[Any, Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    module, folder, options = diagram
    stored = {path: path.stat().st_mtime_ns for path in folder.glob("*.npz")}
    assert len(stored) > 3 * 2 * 2 * 2  # the grid, and the runs of the traces
    (folder / "diagram.png").unlink()
    assert module.main(options) == 0
    text = capsys.readouterr().out
    assert "24 runs are stored" in text  # the second time nothing is run
    fails = re.findall(
        r"^(\w+): (\d+) of 8 runs fail, (\d+) of them not unstable", text, re.MULTILINE
    )
    assert [found[0] for found in fails] == list(module.ARMS)
    assert all(int(slow) <= int(failed) for _, failed, slow in fails)
    assert {path: path.stat().st_mtime_ns for path in folder.glob("*.npz")} == stored
    assert (folder / "diagram.png").read_bytes().startswith(b"\x89PNG")
    # At a rate of 5 every arm fails, so that the arms cannot differ by more than the other half.
    pairs = re.findall(r"^share failed, (\w+) - (\w+): (\S+) \[.*\], 2 seeds$", text, re.MULTILINE)
    assert [pair[:2] for pair in pairs] == [("e4m3", "exact"), ("mine", "exact"), ("mine", "e4m3")]
    assert all(-0.5 <= float(value) <= 0.5 for _, _, value in pairs)
    thresholds = re.findall(
        r"^half of the runs fail at depth (\d), (\w+): (.*), \d+ runs$", text, re.M
    )
    assert [found[:2] for found in thresholds] == [(d, a) for d in "12" for a in module.ARMS]
    exact = [words for _, arm, words in thresholds if arm == "exact"]
    assert all(0.01 < float(words.split()[0]) < 5 for words in exact), exact


def test_the_recipe_is_what_its_comment_says() -> None:
    module = example("own_format")
    for site in ("fc1_fprop_x", "fc2_wgrad_dy"):
        how = getattr(module.MINE, site)
        assert (how.format, how.scale_rule, how.block_size) == ("mxfp4_e2m1", "rceil", 16)
    assert module.MINE.ln_gamma.format == "exact"


def test_slow_is_diverged_by_no_spike() -> None:
    is_slow = example("own_format").is_slow
    spikes: dict[str, list[dict[str, int | None]]] = {
        "none": [],
        "left": [{"length": 3}, {"length": 200}],
        "long": [{"length": 3}, {"length": 201}],
        "open": [{"length": 3}, {"length": None}],
    }
    for each in spikes.values():
        for spike in each:
            spike |= {"step": 30, "height": 20}
    slow = {name: is_slow({"status": "diverged", "spikes": each}) for name, each in spikes.items()}
    assert slow == {"none": True, "left": True, "long": False, "open": False}
    for status in ("ok", "nonfinite"):
        assert not is_slow({"status": status, "spikes": []})


# ------------------------------------------------------------------------------ check_gains.py


def lines_of(text: str) -> dict[str, str]:
    return {line.split()[0]: line for line in text.splitlines() if line.startswith("blocks.")}


def test_gains_on_the_cliff_are_flagged_and_others_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    module = example("check_gains")
    assert module.main([]) == 1
    text = capsys.readouterr().out
    lines = lines_of(text)
    assert set(lines) == {"blocks.0.norm.weight", "blocks.1.norm.weight"}  # no weight, no bias
    assert lines["blocks.0.norm.weight"].split()[2:4] == ["100.0%", "0.0%"]
    assert lines["blocks.0.norm.weight"].endswith("on the cliff")
    assert lines["blocks.1.norm.weight"].split()[2:4] == ["0.0%", "0.0%"]
    assert not lines["blocks.1.norm.weight"].endswith("on the cliff")
    assert text.endswith("on the cliff: 1 of 2\n")
    # Clamped to 7/8 throughout, from a mean of 0.97: 0.875 / 0.97 - 1 = -9.8 %.
    assert float(lines["blocks.0.norm.weight"].split()[4].rstrip("%")) == pytest.approx(
        -9.8, abs=0.2
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.npz"], "No such file or directory: 'absent.npz'"),
        (["README.md"], "must be .npz, .npy or .safetensors; got README.md"),
        (["--format", "mxfp8"], "format must be one of mxfp8_e4m3"),
    ],
)
def test_a_file_it_cannot_read_is_not_a_gain_on_the_cliff(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        example("check_gains").main(arguments)
    assert stop.value.code == 2
    assert words in capsys.readouterr().err


def test_a_model_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "model.npz"
    tops = {"ln_1.weight": 0.875, "ln_2.weight": 0.876, "ln_3.weight": 1.0}
    np.savez(file, **{name: np.full(64, top, np.float32) for name, top in tops.items()})  # type: ignore[arg-type]
    module = example("check_gains")
    assert module.main([str(file)]) == 1
    flagged = [line for line in capsys.readouterr().out.splitlines() if line.endswith("the cliff")]
    assert [line.split()[0] for line in flagged] == ["ln_2.weight"]  # above 7/8 and below 1 alone
    assert module.main([str(file), "--format", "mxint8"]) == 0  # its top is 127/64: 0.876 is safe


@pytest.mark.parametrize("name", ["controller_in_torch", "check_quantizer"])
def test_without_pytorch_an_example_says_where_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(
        SystemExit, match=f"needs PyTorch .*: .venv-torch/bin/python examples/{name}"
    ):
        example(name)
