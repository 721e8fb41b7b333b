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
from mxsim.report import draw_quantization, is_gain, load_arrays


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
    loaded = mxsim.MXArray.load(tmp_path / "weights.mxfp8_e4m3.rceil.axis0.block8.stochastic3.npz")
    np.testing.assert_array_equal(loaded.codes, expected.codes)
    assert (loaded.axis, loaded.block_size, loaded.scale_rule) == (0, 8, "rceil")


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "weights.mxfp8_e4m3"),
        (["--rule", "floor", "--axis", "1", "--block-size", "32"], "weights.mxfp8_e4m3"),
        (["--rule", "even"], "weights.mxfp8_e4m3.even"),
        (["--axis", "-2"], "weights.mxfp8_e4m3.axis0"),
        (["--axis", "0"], "weights.mxfp8_e4m3.axis0"),
        (["--block-size", "16"], "weights.mxfp8_e4m3.block16"),
        (["--format", "nvfp4", "--block-size", "16"], "weights.nvfp4"),
        (["--format", "nvfp4", "--block-size", "32"], "weights.nvfp4.block32"),
        (["--rounding", "away"], "weights.mxfp8_e4m3.away"),
        (["--rounding", "stochastic"], "weights.mxfp8_e4m3.stochastic"),
        (["--rounding", "stochastic", "--seed", "7"], "weights.mxfp8_e4m3.stochastic7"),
        (["--rounding", "zero", "--rule", "ceil"], "weights.mxfp8_e4m3.ceil.zero"),
    ],
)
def test_what_is_not_the_default_is_in_the_name(
    array: tuple[Path, Any], options: list[str], name: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["quantize", str(array[0]), *options, "--out", str(out)]) == 0
    assert sorted(each.name for each in out.iterdir()) == [f"{name}.npz", f"{name}.png"]


@pytest.mark.parametrize(
    "x",
    [
        np.zeros(5),
        np.full(3, np.nan),
        np.zeros((0, 4)),
        np.ones(1),
        np.array([1e300, 1.0]),
        np.array([5e-324, 1.7e308]),
        np.geomspace(5e-324, 1e300, 3000),
    ],
)
def test_quantize_draws_whatever_comes(
    x: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # every warning is an error here
    np.save(tmp_path / "x.npy", x)
    assert main(["quantize", str(tmp_path / "x.npy"), "--out", str(tmp_path)]) == 0
    assert "-0.00 " not in capsys.readouterr().out


def test_an_array_without_a_finite_block_has_no_statistics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "x.npy", np.full((3, 4), np.nan))
    assert main(["quantize", str(tmp_path / "x.npy"), "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for label in ("relative mean squared error", "effective bits", "aligned gain - 1"):
        [line] = [line for line in lines if label in line]
        assert line.split()[-2] == "nan"
    [line] = [line for line in lines if "NaN blocks" in line]
    assert line.split()[-2] == "12"


@pytest.mark.parametrize("out", ["taken", "taken/folder", "taken/a/b"])
def test_out_must_be_a_folder(
    array: tuple[Path, Any],
    out: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # refused before anything is computed
    (tmp_path / "taken").write_text("mine")
    monkeypatch.setattr("mxsim.cli.quantize", None)
    assert main(["quantize", str(array[0]), "--out", str(tmp_path / out)]) == 1
    error = capsys.readouterr().err
    assert f"out must be a folder; got {tmp_path / out}" in error
    assert (tmp_path / "taken").read_text() == "mine"


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


def test_report_shows_what_is_not_finite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    one = np.ones(64, np.float32)
    one[40] = np.inf
    bad = np.full(64, np.nan, np.float32)
    tensors: dict[str, Any] = {"whole": np.ones(64), "one": one, "ln.weight": bad}
    np.savez(tmp_path / "m.npz", **tensors)
    assert main(["report", str(tmp_path / "m.npz")]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[1]: line for line in lines if line.startswith("│")}
    assert "nan" not in cells["whole"] + cells["one"]
    assert "!" not in cells["whole"]
    assert "one !" in cells["one"]
    assert "ln.weight * !" in cells["ln.weight"]
    assert [word for word in cells["ln.weight"].split() if word == "nan"] == ["nan"] * 4
    assert "inf" not in cells["ln.weight"]
    notes = [line for line in lines if line.startswith("! ")]
    assert [note.split(" elements")[0] for note in notes] == [
        "! one: non-finite, 32 of 64",
        "! ln.weight: non-finite, 64 of 64",
    ]


MEMBERS: dict[str, Any] = {
    "f64": np.ones((3, 5)),
    "f32": np.ones((3, 5), np.float32),
    "f16": np.ones((3, 5), np.float16),
    "i64": np.arange(3),
    "u8": np.arange(3, dtype=np.uint8),
    "huge": np.array([1, 2**60 + 1]),
    "mask": np.ones(3, bool),
    "waves": np.ones(3, np.complex64),
}
SKIPPED = {"huge": str(2**60 + 1), "mask": "dtype bool", "waves": "dtype complex64"}


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_both_formats_are_read_alike(
    suffix: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = tmp_path / f"m.{suffix}"
    if suffix == "npz":
        np.savez(path, **MEMBERS)
    else:
        pytest.importorskip("safetensors.numpy").save_file(MEMBERS, path)
    arrays, skipped = load_arrays(path)
    assert set(arrays) == set(MEMBERS) - set(SKIPPED)
    for name, array in arrays.items():
        assert array.dtype == MEMBERS[name].dtype
        np.testing.assert_array_equal(array, MEMBERS[name])
    assert set(skipped) == set(SKIPPED)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["report", str(path)]) == 0
    output = capsys.readouterr().out
    for name, reason in SKIPPED.items():
        assert reason in skipped[name]
        assert f"skipped ({skipped[name]}): {name}\n" in output
    for name in arrays:
        assert f"│ {name} " in output


def test_text_and_objects_are_skipped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, objects = np.array(["x"]), np.array([None], object)
    np.savez(tmp_path / "m.npz", w=np.ones(3), a=words, b=words, o=objects)
    arrays, skipped = load_arrays(tmp_path / "m.npz")
    assert list(arrays) == ["w"]
    assert skipped == {"a": "dtype <U1", "b": "dtype <U1", "o": "it holds Python objects"}
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["report", str(tmp_path / "m.npz")]) == 0
    assert "skipped (dtype <U1): a, b\n" in capsys.readouterr().out
    np.savez(tmp_path / "m.npz", a=words)
    assert main(["report", str(tmp_path / "m.npz")]) == 1
    assert "holds no real arrays (a: dtype <U1)" in capsys.readouterr().err


def write_safetensors(path: Path, kind: str, shape: list[int], data: bytes) -> None:
    """One tensor "w".  The format: length of the header, the header, the data."""
    tensor = {"dtype": kind, "shape": shape, "data_offsets": [0, len(data)]}
    header = json.dumps({"w": tensor}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_eight_bit_floats_of_safetensors_are_skipped(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("safetensors")
    write_safetensors(tmp_path / "m.safetensors", kind, [3], b"123")
    assert load_arrays(tmp_path / "m.safetensors") == ({}, {"w": f"dtype {kind}"})
    assert main(["report", str(tmp_path / "m.safetensors")]) == 1
    assert f"holds no real arrays (w: dtype {kind})" in capsys.readouterr().err


def test_a_damaged_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"nonsense" * 10)
    with pytest.raises(ValueError, match=r"bad\.safetensors cannot be read"):
        load_arrays(tmp_path / "bad.safetensors")


def test_bfloat16_safetensors(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    x = np.array([1.0, -2.5, 3e38], ml_dtypes.bfloat16)
    write_safetensors(tmp_path / "m.safetensors", "BF16", [3], x.tobytes())
    arrays, _ = load_arrays(tmp_path / "m.safetensors")
    np.testing.assert_array_equal(arrays["w"].astype(np.float32), x.astype(np.float32))
    assert main(["report", str(tmp_path / "m.safetensors")]) == 0


@pytest.mark.parametrize(
    ("name", "shape", "gain"),
    [
        ("transformer.h.0.ln_1.weight", (8,), True),
        ("model.layers.3.input_layernorm.weight", (8,), True),
        ("blocks/0/ln_gamma", (8,), True),
        ("norm.scale", (8,), True),
        ("h0/ln_1/g", (8,), True),
        ("ln_f.g", (8,), True),
        ("blocks.3.ln2.weight", (8,), True),
        ("ln", (8,), True),
        ("norm1", (8,), True),
        ("blk.0.attn_norm.weight", (8,), True),
        ("model.norm.weight", (8,), True),
        ("encoder.norms.1.weight", (8,), True),
        ("rms_norm.gain", (8,), True),
        ("RMSNorm_0/scale", (8,), True),
        ("bert.encoder.LayerNorm.gamma", (8,), True),
        ("layer_normalization_3/gamma", (8,), True),
        ("decoder.layernorm_qkv.layer_norm_weight", (8,), True),
        ("self_attn.q_norm.weight", (8,), True),
        ("block.gamma", (8,), True),
        ("vulnerable", (8,), False),
        ("vulnerable.weight", (8,), False),
        ("plnt", (8,), False),
        ("plnt.scale", (8,), False),
        ("lnear.weight", (8,), False),
        ("abnormal.weight", (8,), False),
        ("enormous.scale", (8,), False),
        ("batchnorm.running_var", (8,), False),
        ("norm.running_mean", (8,), False),
        ("norm.num_batches_tracked", (8,), False),
        ("layernorm_mlp.fc1.weight_scale", (8,), False),
        ("h0/ln_1/b", (8,), False),
        ("norm.beta", (8,), False),
        ("layernorm_bias", (8,), False),
        ("weight", (8,), False),
        ("scale", (8,), False),
        ("ln_f.bias", (8,), False),
        ("layers.0.ln.beta", (8,), False),
        ("fc1.weight", (8,), False),
        ("ln_1.weight", (8, 8), False),
    ],
)
def test_which_tensors_are_gains(name: str, shape: tuple[int, ...], gain: bool) -> None:
    assert is_gain(name, np.zeros(shape)) == gain


@pytest.mark.parametrize("name", ["fc.bias", "h/ln/b", "ln.beta", "bn.running_var"])
def test_biases_and_running_statistics_never_are(name: str) -> None:
    assert not is_gain(name, np.zeros(8), ".*")
    assert is_gain("fc.weight", np.zeros(8), ".*")


def test_report_takes_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "m.npz", **model())
    assert main(["report", str(tmp_path / "m.npz"), "--gains", "^norm_F"]) == 0
    assert "* 1 norm gains" in capsys.readouterr().out


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
        (["quantize", "objects.npy"], "objects.npy cannot be read as arrays (it holds Python obj"),
        (["report", "text.npy"], "it is neither a .npy nor a .npz file"),
        (["report", "text.npz"], "it is neither a .npy nor a .npz file"),
        (["report", "codes.npz"], "codes.npz holds one quantized array, its codes and scales"),
        (["report", "ok.npy", "--gains", "("], "gains must be a regular expression; got '(' (miss"),
        (["report", "ok.npy", "--gains", "a{99999999999}"], "regular expression; got 'a{99999999"),
        (["report", "empty.npz"], "holds no real arrays (it is empty)"),
        (["quantize", "complex.npy"], "complex.npy holds no real array (dtype complex128)"),
        (["quantize", "ok.npy", "--axis", "4"], "axis must be in range"),
        (["quantize", "ok.npy", "--block-size", "0"], "block_size must be at least 1; got 0"),
        (["quantize", "ok.npy", "--format", "nvfp4", "--rule", "floor"], "scale_rule must be None"),
        (["report", "model.gguf"], "must be .npz, .npy or .safetensors"),
        (["report", "complex.npy"], "holds no real arrays"),
        (["report", "ok.npy", "--format", "nvfp4"], "nvfp4 has its own scales"),
        (
            ["quantize", "ok.npy", "--rule", "flor"],
            "one of floor, rceil, ceil, even; got 'flor' (did",
        ),
        (["quantize", "ok.npy", "--rounding", "up"], "even, away, zero, stochastic; got 'up'"),
        (["quantize", "ok.npy", "--format", "mxfp8"], "format must be one of mxfp8_e4m3, "),
        (["report", "ok.npy", "--format", "mxfp8"], "format must be one of mxfp8_e4m3, "),
        (["formats", "mxfp8_e4m2"], "got 'mxfp8_e4m2' (did you mean mxfp8_e5m2 or mxfp8_e4m3?)"),
        (
            ["train", "--lr", "-1"],
            "lr must be a finite number above 0; got -1.0 (options: mxsim tra",
        ),
        (
            ["train", "--width", "0"],
            "width must be at least 1; got 0 (options: mxsim train --help)",
        ),
        (["train", "--scheme", "all_e4m"], "got 'all_e4m' (did you mean all_e4m3"),
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
    Path("text.npz").write_text("no array")
    np.save("objects.npy", np.array([None], object), allow_pickle=True)
    np.savez("empty.npz")
    mxsim.quantize(np.ones(32), "mxint8").save("codes.npz")
    np.save("complex.npy", np.ones(3, complex))
    np.save("ok.npy", np.ones(3))
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("mxsim: ")
    assert error.count("\n") == 1
    assert "pickle" not in error


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mxsim {mxsim.__version__}\n"


@pytest.mark.parametrize(("spread", "points"), [(0.0, 640), (0.002, 640), (2.0, 0)])
def test_elements_are_shown_one_by_one_where_they_lie_too_close_for_a_line(
    spread: float, points: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gains near 0.93 fall into a bin or two: a line through those showed nothing."""
    shown: list[Any] = []
    monkeypatch.setattr("matplotlib.pyplot.close", shown.append)
    x = (0.93 * 2.0 ** (spread * np.linspace(-1, 1, 640))).astype(np.float32)
    draw_quantization(x, mxsim.quantize(x, "mxfp8_e4m3"), tmp_path / "x.png")
    (figure,) = shown
    dots = [line for line in figure.axes[1].lines if line.get_marker() == "."]
    assert sum(len(line.get_xdata()) for line in dots) == points
    assert bool(figure.axes[1].collections) == (not points)
