"""The distribution as a user gets it: built, installed in a fresh environment, used far from here.

    python -m tests.wheel        needs `build`, and the network or pip's cache; about a minute

Builds the source archive and, from it, the wheel; looks into both; installs the wheel where there
is nothing else, and there, in an empty folder, imports every module, runs the command line and the
library example of docs/guide.md.  The status is 1 if anything of that fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
import venv
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What the archive is not for: stored results, and settings of this repository.
LEFT_OUT = re.compile(r"results/|\.")
# Neither is to be on the path by accident: only what is installed counts.
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}

IMPORT_ALL = """
import importlib, pkgutil, sys
from pathlib import Path
import mxsim
assert Path(mxsim.__file__).is_relative_to(sys.prefix), f"mxsim is {mxsim.__file__}"
found = without = 0
for module in pkgutil.walk_packages(mxsim.__path__, "mxsim."):
    if module.name.endswith("__main__"):
        continue
    found += 1
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        assert error.name == "torch" and module.name.startswith("mxsim.backends.torch_"), error
        without += 1
print(f"{found - without} modules import, {without} want PyTorch")
assert found > without > 0
assert "torch" not in sys.modules
"""

GOLDEN = """
from mxsim.crosscheck.witnesses import golden_cases
cases = golden_cases()
print(f"{len(cases)} recorded cases")
assert len(cases) > 1
"""

ARRAY = """
import numpy as np
np.save("x.npy", np.linspace(-3, 3, 4096, dtype=np.float32).reshape(64, 64))
"""


class Failure(Exception):
    """What is wrong with the distribution."""


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output; raises Failure with it if the command fails."""
    done = subprocess.run(
        command,
        cwd=cwd,
        env=ENVIRONMENT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        words = " ".join(str(word) for word in command[:4]).replace("\n", " ")
        raise Failure(f"{words} ...: status {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


def expect(condition: bool, otherwise: str) -> None:
    """Raise Failure unless the condition holds."""
    if not condition:
        raise Failure(otherwise)


def tracked() -> list[str]:
    """The repository's files, by git; those left out of an archive excepted."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return [n for n in listed.splitlines() if not LEFT_OUT.match(n) and (ROOT / n).is_file()]


def missing(wanted: Iterable[str], there: Iterable[str]) -> str:
    """Names that are wanted and not there, as a sentence's end; empty if there are none."""
    return ", ".join(sorted(set(wanted) - set(there)))


def version() -> str:
    """The version that the source states."""
    found = re.search(r'^__version__ = "(.+)"', (ROOT / "mxsim/__init__.py").read_text(), re.M)
    expect(found is not None, "mxsim/__init__.py states no version")
    assert found is not None
    return found.group(1)


def look_into_archive(archive: Path, folder: Path) -> str:
    """The source archive holds all that is tracked, and its tests are found by pytest."""
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    [source] = folder.iterdir()
    expect(source.name == f"mxsim-{version()}", f"the archive unpacks to {source.name}")
    names = [str(p.relative_to(source)) for p in source.rglob("*") if p.is_file()]
    lacking = missing(tracked(), names)
    expect(not lacking, f"the source archive lacks {lacking}")
    strays = sorted(n for n in names if n.startswith("results/") or "__pycache__" in n)
    expect(not strays, f"the source archive holds {', '.join(strays[:5])}")
    try:
        import pytest  # noqa: F401
    except ModuleNotFoundError:
        return f"{len(names)} files; pytest is not here, its tests were not collected"
    here = run(sys.executable, "-c", "import mxsim; print(mxsim.__file__)", cwd=source).strip()
    expect(Path(here).is_relative_to(source), f"in the archive, mxsim is {here}")
    listed = run(
        *(sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider"),
        *("--ignore", "tests/backends"),
        cwd=source,
    )
    count = re.search(r"(\d+) tests collected", listed)
    expect(
        count is not None and int(count.group(1)) > 1000, f"tests of the archive: {listed[-500:]}"
    )
    small = ("tests/test_quantize_golden.py", "tests/test_paper_code.py")  # these read stored data
    told = run(sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *small, cwd=source)
    return f"{len(names)} files; {listed.splitlines()[-1]}; of two files {told.splitlines()[-1]}"


def look_into_wheel(wheel: Path) -> str:
    """The wheel holds the package with its data and license, the command, and nothing else."""
    about = f"mxsim-{version()}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        expect(f"{about}/METADATA" in names, f"the wheel has no {about}/METADATA")
        metadata = Parser().parsestr(archive.read(f"{about}/METADATA").decode())
        commands = archive.read(f"{about}/entry_points.txt").decode()
    package = [n for n in tracked() if n.startswith("mxsim/")]
    for wanted in ("mxsim/py.typed", "mxsim/crosscheck/golden/microxcaling.npz"):
        expect(wanted in package, f"{wanted} is not in the repository")
    lacking = missing([*package, f"{about}/licenses/LICENSE"], names)
    expect(not lacking, f"the wheel lacks {lacking}")
    strays = missing((n for n in names if not n.startswith(f"{about}/")), package)
    expect(not strays, f"the wheel holds more than the package: {strays}")
    expect("mxsim = mxsim.cli:main" in commands, f"no command mxsim in {commands!r}")
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    expect(metadata["Version"] == version(), f"the wheel says version {metadata['Version']}")
    expect(
        metadata["Requires-Python"] == stated["requires-python"],
        f"the wheel wants Python {metadata['Requires-Python']}",
    )
    required = metadata.get_all("Requires-Dist", [])
    always = {re.split(r"[<>=!~ ]", r)[0] for r in required if "extra ==" not in r}
    wanted_always = {re.split(r"[<>=!~ ]", r)[0] for r in stated["dependencies"]}
    expect(always == wanted_always, f"the wheel requires {sorted(always)}")
    return (
        f"{len(names)} files, {wheel.stat().st_size / 1e6:.2f} MB, requires {len(always)} packages"
    )


def installed(wheel: Path, folder: Path) -> Path:
    """The bin folder of a fresh environment that holds the wheel and what it requires."""
    venv.create(folder, with_pip=True)
    bin = folder / ("Scripts" if os.name == "nt" else "bin")
    run(bin / "python", "-m", "pip", "install", "--quiet", wheel, cwd=folder)
    run(bin / "python", "-m", "pip", "check", cwd=folder)
    return bin


def library_example() -> str:
    """The first Python block of docs/guide.md's section for users of the wheel."""
    guide = (ROOT / "docs" / "guide.md").read_text()
    section = guide.partition("\n## Without a checkout\n")[2].partition("\n## ")[0]
    found = re.search(r"```python\n(.+?)```", section, re.DOTALL)
    expect(found is not None, "docs/guide.md: 'Without a checkout' has no Python block")
    assert found is not None
    return found.group(1)


def use(bin: Path, empty: Path) -> str:
    """Import everything, run the commands and the guide's example from an empty folder."""
    python, mxsim = bin / "python", bin / "mxsim"
    modules = run(python, "-c", IMPORT_ALL, cwd=empty).strip()
    golden = run(python, "-c", GOLDEN, cwd=empty).strip()
    run(python, "-c", ARRAY, cwd=empty)
    expect("mxfp4_e2m1" in run(mxsim, "formats", cwd=empty), "mxsim formats lacks mxfp4_e2m1")
    told = run(mxsim, "quantize", "x.npy", "--format", "mxfp4_e2m1", cwd=empty)
    for name in ("x.mxfp4_e2m1.npz", "x.mxfp4_e2m1.png"):
        expect((empty / name).is_file(), f"mxsim quantize wrote no {name}:\n{told}")
    small = ("--width", "32", "--depth", "2", "--batch", "64", "--steps", "20")
    told = run(mxsim, "train", *small, "--eval-samples", "1024", cwd=empty)
    expect("zeta over" in told, f"mxsim train told no zeta:\n{told}")
    expect(len(list(empty.glob("runs/*/run.json"))) == 1, "mxsim train stored no run.json")
    run(python, "-m", "mxsim.minimal", cwd=empty)
    run(python, "-c", library_example(), cwd=empty)
    for outside in ("studies", "figures", "tests"):
        code = f"import importlib.util as u; raise SystemExit(u.find_spec({outside!r}) is not None)"
        run(python, "-c", code, cwd=empty)
    return f"{modules}, {golden}, four commands and the guide's example run"


def main() -> int:
    """Build, look, install and use; print a line each; 1 on the first failure."""
    began = begun = time.monotonic()

    def say(what: str) -> None:
        nonlocal begun
        now = time.monotonic()
        print(f"{what} ({now - begun:.0f} s)", flush=True)
        begun = now

    with tempfile.TemporaryDirectory(prefix="mxsim-wheel-") as name:
        place = Path(name)
        built, unpacked, empty = place / "built", place / "unpacked", place / "empty"
        for folder in (built, unpacked, empty):
            folder.mkdir()
        try:
            run(sys.executable, "-m", "build", "--outdir", built, ROOT, cwd=place)
            [archive], [wheel] = built.glob("*.tar.gz"), built.glob("*.whl")
            say(f"built: {archive.name}, {wheel.name}")
            say(f"wheel: {look_into_wheel(wheel)}")
            bin = installed(wheel, place / "venv")
            say("installed in a fresh environment")
            say(f"used from an empty folder: {use(bin, empty)}")
            say(f"source archive: {look_into_archive(archive, unpacked)}")
        except Failure as failure:
            print(f"failed: {failure}", file=sys.stderr)
            return 1
    print(f"mxsim {version()}: passed in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
