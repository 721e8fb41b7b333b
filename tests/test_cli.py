"""The command line: what it prints, what it writes, how it refuses."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mxsim
from mxsim.cli import main
from mxsim.formats import FORMATS
from mxsim.report import is_gain, load_arrays


@pytest.fixture
def array(tmp_path: Path) -> tuple[Path, Any]:
    x = np.random.default_rng(0).standard_normal((16, 96)).astype(np.float32)
    np.save(tmp_path / "weights.npy", x)
    return tmp_path / "weights.npy", x


@pytest.mark.parametrize("fmt", list(FORMATS))
def test_quantize_writes_codes_and_scales_and_a_picture(
    array: tuple[Path, Any], fmt: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, x = array
    assert main(["quantize", str(file), "--format", fmt, "--out", str(tmp_path / "out")]) == 0
    output = capsys.readouterr().out
    q = mxsim.quantize(x, fmt)
    assert q.stats is not None
    assert f"{100 * q.stats.saturated:.3f} %" in output
    assert f"{q.stats.effective_bits:.2f}" in output
    loaded = mxsim.MXArray.load(tmp_path / "out" / f"weights.{fmt}.npz")
    np.testing.assert_array_equal(loaded.codes, q.codes)
    np.testing.assert_array_equal(loaded.scales, q.scales)
    picture = tmp_path / "out" / f"weights.{fmt}.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_quantize_passes_its_options_on(array: tuple[Path, Any], tmp_path: Path) -> None:
    file, x = array
    options = ["--axis", "0", "--rule", "rceil", "--rounding", "stochastic", "--seed", "3"]
    options += ["--block-size", "8", "--out", str(tmp_path)]
    assert main(["quantize", str(file), *options]) == 0
    expected = mxsim.quantize(x, "mxfp8_e4m3", 0, 8, "rceil", "stochastic", noise=mxsim.Noise(3))
    loaded = mxsim.MXArray.load(tmp_path / "weights.mxfp8_e4m3.npz")
    np.testing.assert_array_equal(loaded.codes, expected.codes)
    assert (loaded.axis, loaded.block_size, loaded.scale_rule) == (0, 8, "rceil")


@pytest.mark.parametrize("x", [np.zeros(5), np.full(3, np.nan), np.zeros((0, 4)), np.ones(1)])
def test_quantize_draws_whatever_comes(x: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", x)
    assert main(["quantize", str(tmp_path / "x.npy"), "--out", str(tmp_path)]) == 0


def model() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "layers.0.ln.weight": (0.95 + 0.01 * rng.standard_normal(64)).astype(np.float32),
        "layers.0.ln.bias": np.zeros(64, np.float32),
        "layers.0.fc1.weight": rng.standard_normal((8, 64)).astype(np.float32),
        "norm_f.scale": np.full(64, 1.125, np.float32),
    }


def test_report_names_the_gains_on_the_cliff(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    np.savez(tmp_path / "model.npz", **model())
    assert main(["report", str(tmp_path / "model.npz")]) == 0
    output = capsys.readouterr().out
    cliff = next(line for line in output.splitlines() if "layers.0.ln.weight *" in line)
    stats = mxsim.quantize(model()["layers.0.ln.weight"], "mxfp8_e4m3").stats
    assert stats is not None
    assert "100.00" in cliff
    assert f"{stats.gain - 1:+.4f}" in cliff
    assert stats.gain < 0.95  # a coherent shrink under floor
    assert "* 2 norm gains, 1 of them more than half saturated" in output
    assert "layers.0.ln.bias *" not in output


def test_safetensors_in_all_its_float_types(tmp_path: Path) -> None:
    numpy = pytest.importorskip("safetensors.numpy")
    x = np.random.default_rng(0).standard_normal((3, 5))
    numpy.save_file(
        {"a": x, "b": x.astype(np.float32), "c": x.astype(np.float16), "i": np.arange(3)},
        tmp_path / "m.safetensors",
    )
    arrays = dict(load_arrays(tmp_path / "m.safetensors"))
    assert {k: v.dtype.name for k, v in arrays.items()} == {
        "a": "float64", "b": "float32", "c": "float16",
    }  # fmt: skip
    np.testing.assert_array_equal(arrays["b"], x.astype(np.float32))
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense" * 10)
    with pytest.raises(ValueError, match=r"bad\.safetensors cannot be read"):
        list(load_arrays(tmp_path / "bad.safetensors"))


def test_bfloat16_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    x = np.array([1.0, -2.5, 3e38], ml_dtypes.bfloat16)
    # The format: length of the header, the header, the data.
    header = json.dumps({"w": {"dtype": "BF16", "shape": [3], "data_offsets": [0, 6]}}).encode()
    content = len(header).to_bytes(8, "little") + header + x.tobytes()
    (tmp_path / "m.safetensors").write_bytes(content)
    arrays = dict(load_arrays(tmp_path / "m.safetensors"))
    np.testing.assert_array_equal(arrays["w"].astype(np.float32), x.astype(np.float32))
    assert main(["report", str(tmp_path / "m.safetensors")]) == 0


@pytest.mark.parametrize(
    ("name", "shape", "gain"),
    [
        ("transformer.h.0.ln_1.weight", (8,), True),
        ("model.layers.3.input_layernorm.weight", (8,), True),
        ("blocks/0/ln_gamma", (8,), True),
        ("norm.scale", (8,), True),
        ("ln_f.bias", (8,), False),
        ("layers.0.ln.beta", (8,), False),
        ("fc1.weight", (8,), False),
        ("ln_1.weight", (8, 8), False),
    ],
)
def test_which_tensors_are_gains(name: str, shape: tuple[int, ...], gain: bool) -> None:
    assert is_gain(name, np.zeros(shape)) == gain


def test_formats_prints_every_card_and_every_small_value(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["formats"]) == 0
    output = capsys.readouterr().out
    for name in FORMATS:
        assert name in output
    assert "0 0.5 1 1.5 2 3 4 6" in output  # E2M1
    assert main(["formats", "mxint8"]) == 0
    output = capsys.readouterr().out
    assert "1.98438" in output
    assert "mxfp8" not in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantize", "absent.npy"], "no such file: absent.npy"),
        (["quantize", "model.npz"], "must be a .npy"),
        (["quantize", "text.npy"], "text.npy cannot be read"),
        (["quantize", "complex.npy"], "complex.npy holds no real array"),
        (["quantize", "ok.npy", "--axis", "4"], "axis must be in range"),
        (["quantize", "ok.npy", "--block-size", "0"], "block_size must be at least 1; got 0"),
        (["quantize", "ok.npy", "--format", "nvfp4", "--rule", "floor"], "scale_rule must be None"),
        (["report", "model.gguf"], "must be .npz, .npy or .safetensors"),
        (["report", "complex.npy"], "holds no real arrays"),
        (["report", "ok.npy", "--format", "nvfp4"], "nvfp4 has its own scales"),
        (["formats", "mxfp9"], "mxfp8_e4m3"),
    ],
)
def test_refusals_are_one_sentence(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.npy").write_text("no array")
    np.save("complex.npy", np.ones(3, complex))
    np.save("ok.npy", np.ones(3))
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("mxsim: ")
    assert error.count("\n") == 1
