"""The how-to pages: each diff applies to this tree, and its page's commands show what it says.

A page is tried in a copy of the tree.  The copy compiles no kernels: its cache is this run's.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = {path.stem: path.read_text() for path in (ROOT / "docs" / "howto").glob("*.md")}
COPIED = ("mxsim", "studies", "figures", "tests")
TORCH = ".venv-torch/bin/python"
PROGRAMS = {
    "python": [sys.executable],
    TORCH: [sys.executable],
    "mxsim": [sys.executable, "-c", "import sys; from mxsim.cli import main; sys.exit(main())"],
}

# What each command of a page shows, in order: patterns that must all be found.
SHOWN: dict[str, tuple[tuple[str, ...], ...]] = {
    "add_format": (
        (r"largest +│ 31 ", r"2\^emax │ 1\.9375 ", r"smallest step +│ 0\.015625 "),
        (r"layer norm's gamma +│ both +│ mxfp8_e3m4 +│ E8M0, floor",),
        (r"\b\d\d passed, \d+ deselected",),
        (r"\b\d{2,} passed, \d+ deselected",),
    ),
    "add_scheme": (
        (r"ln_gamma │ .*floor.* │ .*rceil", r"ln_beta"),
        (r"\bok\b",),
        (r"\b2 passed, \d+ deselected",),
    ),
    "add_study": (
        (
            r"running 3 runs",
            r"│ floor +│ 0\.\d\d \[.*\] +│ 3 │",
            r"by seed +│ -0\.\d\d \[.*\] +│ 3 │",
        ),
        (r"3 runs, 3 stored .* 0 to run",),
        (r"\b1 passed",),
    ),
    "add_backend": (
        (r"\b2 passed",),
        (r"\ntable ", r"\nmxfp4_e2m1 .*\d+ +\d+ +\d+ +- ", r"known reason, 0 without one"),
    ),
}


def diff_of(page: str) -> str:
    """Its one fenced diff."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGES[page], re.MULTILINE | re.DOTALL)
    return str(diff)


def commands_of(page: str) -> list[list[str]]:
    """The indented lines after the diff, as words."""
    after = PAGES[page].split("\n## That it worked\n")[1]
    return [shlex.split(line) for line in after.splitlines() if line.startswith("    ")]


def patched_tree(page: str, folder: Path) -> Path:
    """A copy of the tree, a repository of its own, with the page's diff applied by git."""
    tree = folder / "tree"
    for part in COPIED:  # with the times of the sources, which tell whether a cached kernel is good
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "pyproject.toml", tree)
    diff = folder / f"{page}.diff"
    diff.write_text(diff_of(page))
    for words in (["init", "--quiet"], ["apply", "--whitespace=error-all", str(diff)]):
        done = subprocess.run(["git", *words], cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, f"docs/howto/{page}.md: git {words[0]}: {done.stderr}"
    return tree


def environment(tree: Path, folder: Path) -> dict[str, str]:
    """Python finds the copy's packages, and Numba this tree's kernels for them."""
    cache = folder / "kernels"
    cache.mkdir(exist_ok=True)
    for path in (ROOT / "mxsim").rglob("__init__.py"):
        ours, copied = (
            f"{at.name}_{hashlib.sha1(str(at).encode()).hexdigest()}"  # as Numba names them
            for at in (path.parent, tree / path.parent.relative_to(ROOT))
        )
        kernels = Path(os.environ["NUMBA_CACHE_DIR"]) / ours
        kernels.mkdir(parents=True, exist_ok=True)
        (cache / copied).symlink_to(kernels)
    changes = {"PYTHONPATH": str(tree), "NUMBA_CACHE_DIR": str(cache), "COLUMNS": "120"}
    return os.environ | changes


def run_commands(page: str, folder: Path, torch: bool) -> None:
    """Apply the page's diff and run its commands, those in PyTorch's environment or the others."""
    tree = patched_tree(page, folder)
    env = environment(tree, folder)
    commands, patterns = commands_of(page), SHOWN[page]
    assert len(commands) == len(patterns), f"docs/howto/{page}.md: {commands}"
    for (program, *words), expected in zip(commands, patterns, strict=True):
        if (program == TORCH) != torch:
            continue
        done = subprocess.run(
            [*PROGRAMS[program], *words], cwd=tree, env=env, capture_output=True, text=True
        )
        text = done.stdout + done.stderr
        assert done.returncode == 0, f"{program} {shlex.join(words)}:\n{text}"
        for pattern in expected:
            assert re.search(pattern, text), f"{program} {shlex.join(words)}: {pattern}\n{text}"


def test_every_page_says_what_its_commands_show() -> None:
    assert set(PAGES) == set(SHOWN)


@pytest.mark.parametrize("page", SHOWN)
def test_the_diff_applies_and_the_commands_show_it(page: str, tmp_path: Path) -> None:
    run_commands(page, tmp_path, torch=False)


@pytest.mark.parametrize("page", SHOWN)
def test_what_the_diff_adds_is_up_to_the_house_rules(page: str, tmp_path: Path) -> None:
    assert find_spec("ruff") is not None
    tree = patched_tree(page, tmp_path)
    changed = re.findall(r"^\+\+\+ b/(\S+\.py)$", diff_of(page), re.MULTILINE)
    assert changed
    for rule in (["check"], ["format", "--check"]):
        ruff = [sys.executable, "-m", "ruff", *rule, "--no-cache", *changed]
        done = subprocess.run(ruff, cwd=tree, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
