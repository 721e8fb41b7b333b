"""Every command of the pages of ``tests.docs_commands`` is run: here, by another test, or by CI.

A command that no rule covers fails; so does a rule that covers nothing.  Here commands run as they
stand where that takes a second, and training for two steps; of what another test or CI runs the
arguments are parsed.
"""

import importlib
import importlib.util
import re
import runpy
import subprocess
import sys
import tomllib
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import safetensors.numpy
import tyro

import mxsim
from mxsim import cli
from mxsim.store import Store
from mxsim.sweep import Point, run_points
from tests.docs_commands import ROOT, block, commands, pages, python_blocks

COMMANDS = commands()
Words = tuple[str, ...]

# The smoke tier of each study is run by this test (make reproduce runs some of them, too).
SMOKE = {
    "ln_affine_isolation": "test_study.py",
    "gamma_cliff": "test_studies.py",
    "bias_by_site": "test_studies.py",
    "bias_vs_scale": "test_studies.py",
    "quantized_edge": "test_studies.py",
    "threshold_prediction": "test_studies.py",
    "claims": "test_claims.py",
    "edge_of_stability": "test_edge_of_stability.py",
    "touchy_settings": "test_intervention_studies.py",
    "interventions": "test_intervention_studies.py",
    "controller": "test_intervention_studies.py",
    "noise_floor": "test_noise_floor_study.py",
    "noisy_quadratic": "test_noisy_quadratic.py",
    "phase_diagrams": "test_phase_diagrams.py",
}
# A module's main() is called by this test.
MAINS = {
    "mxsim.theory.descent": "test_theory_descent.py",
    "mxsim.theory.noise_floor": "test_theory_noise_floor.py",
    "mxsim.crosscheck": "test_crosscheck.py",
}
# Scripts of examples/ are run by one of these.
EXAMPLES = ("test_examples.py", "backends/test_examples_torch.py")
# Python blocks with names that are the reader's own, by a phrase of theirs: run by this test.
READERS = {"controller.observe(": "backends/test_examples_torch.py"}

# Not run, each for its reason; that it exists and takes these arguments is checked.
LONG_TARGETS = {
    "exhaustive": "20 minutes; tests/test_exhaustive.py runs a sample",
    "lower-bounds": "installs an environment of its own and runs this suite in it",
    "clean": "removes the kernels that this very test runs on",
    "distclean": "removes the environment that this very test runs in",
    "format": "edits files; make check runs the same tools",
}
LONG_MODULES = {
    "mxsim.theory.stability": "45 s; tests/test_theory_stability.py holds what it prints",
    "mxsim.theory.cliff": "10 s; tests/test_theory_clamp.py and others hold what it prints",
    "mxsim.theory.depth_tables": "a minute; tests/test_theory_depth.py holds what it prints",
    "benchmarks.quantize": "a minute, and times are no test",
    "benchmarks.step": "minutes, and times are no test",
    "benchmarks.sweep": "minutes, and times are no test",
    "tests.exhaustive": "20 minutes; tests/test_exhaustive.py runs a sample",
}
STANDARD = {  # not ours: installed by whoever uses them
    ("git", "clone"): "what is there before anything of ours",
    ("cd", "mxsim"): "a shell's own",
    ("source", ".venv/bin/activate"): "a shell's own",
    ("python", "-m", "build"): "run by tests/wheel.py",
}
PLACEHOLDERS = {"NAME": "paper_code", "A": "exact", "B": "bf16", "OUT": "out"}
# Blocks that train for longer than a test should, made smaller.
SMALLER = {
    "docs/sweeps.md": (
        ("steps=300", "steps=3"),
        ("seeds=4", "seeds=1"),
        ("workers=2", 'executor="serial"'),
    ),
    "docs/guide.md": (("steps=300", "steps=20"),),
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that commands are about: arrays, a model, results, a cluster."""
    folder = tmp_path_factory.mktemp("reader")
    rng = np.random.default_rng(0)
    gain = np.full(64, 0.97, np.float32)
    weights = rng.standard_normal((64, 64)).astype(np.float32)
    for words in COMMANDS:
        for word in words:
            if word.endswith(".npy"):
                np.save(folder / word, weights)
            elif word.endswith(".npz"):
                np.savez(folder / word, norm_weight=gain, fc_weight=weights)
            elif word.endswith(".safetensors"):
                model = {"norm.weight": gain, "fc.weight": weights}
                safetensors.numpy.save_file(model, folder / word)
        if words[:2] == ("mxsim", "results"):
            cfg = mxsim.ProxyConfig(width=32, depth=1, batch=8, steps=2, eval_samples=8)
            some = [Point(replace(cfg, lr=lr), mxsim.scheme("exact")) for lr in (0.01, 0.1)]
            list(run_points(some, Store(folder / "results" / words[2])))
    (folder / "cluster.toml").write_text(block("docs/sweeps.md", "toml"))
    return folder


@pytest.fixture
def _there(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)


def status_of(run: Any) -> int:
    """The exit status of a call that may leave by SystemExit."""
    try:
        return int(run() or 0)
    except SystemExit as left:  # its code may be a sentence, printed by the interpreter
        return left.code if isinstance(left.code, int) else int(left.code is not None)


def run_module(module: str, arguments: Words, monkeypatch: pytest.MonkeyPatch) -> int:
    """``python -m module arguments`` in this process; the exit status."""
    monkeypatch.setattr(sys, "argv", [module, *arguments])

    def run() -> None:
        with warnings.catch_warnings():  # that the module was imported before
            warnings.simplefilter("ignore", RuntimeWarning)
            runpy.run_module(module, run_name="__main__", alter_sys=True)

    return status_of(run)


def text_of(test: str) -> str:
    return (ROOT / "tests" / test).read_text()


def in_ci() -> set[str]:
    return set(re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE))


def check_make(arguments: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run by CI; or made of commands that are covered; or too long."""
    makefile = (ROOT / "Makefile").read_text()
    for name, _, value in (word.partition("=") for word in arguments if "=" in word):
        assert value
        assert re.search(rf"^{name} \?=", makefile, re.MULTILINE), f"no variable {name}"
    for target in (word for word in arguments if "=" not in word):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"no target {target}"
        if target in in_ci() or target in LONG_TARGETS:
            continue
        command = ["make", "--dry-run", target, *(word for word in arguments if "=" in word)]
        shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        steps = re.findall(r"^\.venv/bin/python (-m .+)$", shown.stdout, re.MULTILINE)
        recipe = [("python", *step.split()) for step in steps if "-m venv" not in step]
        assert recipe, f"make {target} is neither in .ci/run nor a command of ours"
        for words in recipe:
            check_python(words, monkeypatch)


def check_study(module: str, arguments: Words) -> None:
    """Its arguments, and that its smoke tier is run by a test (a dry run trains to estimate)."""
    name = module.removeprefix("studies.")
    assert re.search(rf"\b{name}\b", text_of(SMOKE[name]))
    assert re.search(r'Arguments\(\s*tier="smoke"', text_of(SMOKE[name]))
    tyro.cli(importlib.import_module(module).Arguments, args=arguments)


def check_python(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python -m MODULE ...``, ``python -c CODE`` or ``python FILE ...``."""
    if words[1] == "-c":
        exec(words[2], {})
        return
    if words[1] != "-m":
        if any(f"Save as `{words[1]}`" in (ROOT / page).read_text() for page in pages()):
            return  # a Python block, and run as such
        script = ROOT / words[1]
        assert script.exists(), f"no file {words[1]}"
        assert any(f'"{script.stem}"' in text_of(test) for test in EXAMPLES)
        return
    module, arguments = words[2], words[3:]
    if module.startswith("studies."):
        check_study(module, arguments)
    elif module.startswith("figures."):  # drawn by the tests of figures and by make reproduce
        figure = importlib.import_module(module)
        tyro.cli(figure.Arguments, args=arguments)
    elif module == "pytest":
        check_pytest(arguments)
    elif module in MAINS:
        assert re.search(r"\bmain\b", text_of(MAINS[module]))
        assert status_of(lambda: run_help(module, arguments, monkeypatch)) == 0
    elif module in LONG_MODULES:
        assert not arguments, "no argument of a command that is not run"
        assert importlib.util.find_spec(module), f"no module {module}"
    elif module == "tests.wheel":
        assert "wheel" in in_ci()
    else:
        assert module.startswith("mxsim."), f"no rule for {' '.join(words)}"
        assert run_module(module, arguments, monkeypatch) == 0


def run_help(module: str, arguments: Words, monkeypatch: pytest.MonkeyPatch) -> int:
    """Nothing for a command without arguments; with some, the help, which knows them all."""
    if not arguments:
        return 0
    return run_module(module, (*arguments, "--help"), monkeypatch)


def check_pytest(arguments: Words) -> None:
    """Tests that are there; make test runs them all."""
    files = arguments[: arguments.index("-k")] if "-k" in arguments else arguments
    for word in files:
        assert word.startswith("-") or (ROOT / word.partition("::")[0]).exists(), f"no {word}"


def check_mxsim(arguments: Words) -> None:
    """As it stands; training takes two steps; what needs a GPU or PyTorch is parsed only.

    The cross-check is run by make crosscheck, in CI.
    """
    given = [PLACEHOLDERS.get(word, word) for word in arguments]
    if "cuda" in given or "torch" in given or given[0] == "crosscheck":
        tyro.cli(cli.Command, args=given)
        return
    if given[0] == "train":
        if "--steps" in given:
            at = given.index("--steps")
            del given[at : at + 2]
        given += ["--steps", "2"]
    assert status_of(lambda: cli.main(given)) == 0


def check_pip(arguments: Words) -> None:
    """``pip install`` of this package with extras that it has."""
    assert arguments[0] == "install"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for word in arguments[1:]:
        named = re.fullmatch(r"(?:mxsim|\.)(?:\[([\w,]+)\])?|-e|dist/.+\.whl", word)
        assert named, f"pip install {word}: not this package"
        assert set((named[1] or "").split(",")) - {""} <= set(extras), f"no such extra: {word}"


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_is_run(words: Words, monkeypatch: pytest.MonkeyPatch) -> None:
    if COMMANDS[words].startswith("docs/howto/"):  # run there, with the page's diff applied
        assert "howto" in text_of("test_howto.py")
        return
    match words:
        case ("make", *arguments):
            check_make(tuple(arguments), monkeypatch)
        case _ if words[:2] in STANDARD or words[:3] in STANDARD:
            pass
        case ("python", *_):
            check_python(words, monkeypatch)
        case ("mxsim", *arguments):
            check_mxsim(tuple(arguments))
        case ("pytest", *arguments):
            check_pytest(tuple(arguments))
        case ("pip", *arguments):
            check_pip(tuple(arguments))
        case ("bash", script, *_) | (script, *_) if script.endswith(".sh"):
            subprocess.run(["bash", "-n", ROOT / script], check=True)
        case (".ci/run",):
            assert in_ci() >= {"check", "test", "crosscheck", "docs", "wheel", "reproduce"}
        case _:
            pytest.fail(f"no rule for {' '.join(words)} ({COMMANDS[words]})")


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("page", [page for page in pages() if python_blocks(page)])
def test_python_blocks_run(page: str) -> None:
    """In order, in one namespace a page; how-to pages have a test of their own."""
    if page.startswith("docs/howto/"):
        assert "howto" in text_of("test_howto.py")
        return
    matplotlib.use("Agg")
    names: dict[str, Any] = {"__name__": "__main__"}
    for code in python_blocks(page):
        elsewhere = [test for phrase, test in READERS.items() if phrase in code]
        if elsewhere:
            assert Path(page).name in text_of(elsewhere[0])
            continue
        for old, new in SMALLER.get(page, ()):
            code = code.replace(old, new)
        exec(compile(code, page, "exec"), names)


def test_no_rule_is_idle() -> None:
    """Every study, exception and placeholder is there for something that a page says."""
    said = {words[2] for words in COMMANDS if words[:2] == ("python", "-m") and len(words) > 2}
    targets = {word for words in COMMANDS if words[0] == "make" for word in words[1:]}
    studies = {f"studies.{name}" for name in SMOKE if name != "ln_affine_isolation"}
    assert studies <= said
    assert set(MAINS) | set(LONG_MODULES) <= said | {"tests.exhaustive"}
    assert set(LONG_TARGETS) - targets <= {"format", "distclean"}
    for page, pairs in SMALLER.items():
        assert all(old in "".join(python_blocks(page)) for old, _ in pairs)


def test_a_new_command_needs_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    for words in (("rm", "-rf", "results"), ("python", "-m", "nonsense")):
        COMMANDS.setdefault(words, "nowhere")
        with pytest.raises((pytest.fail.Exception, AssertionError), match="no rule"):
            test_every_command_is_run(words, monkeypatch)
        del COMMANDS[words]
    with pytest.raises(AssertionError, match="no target"):
        check_make(("nonsense",), monkeypatch)
    with pytest.raises(AssertionError, match="no such extra"):
        check_pip(("install", "mxsim[nonsense]"))
