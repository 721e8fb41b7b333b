"""What imports what: layers as data, no cycles, torch where it belongs; ARCHITECTURE.md is true."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 500  # lines of a source file

# Every module of mxsim is in one layer, by its name below the package or by its subpackage's, and
# imports from its own layer and those above it in this table only.  "" is the package itself.
LAYERS: Mapping[str, str] = {
    "page": "minimal",
    "arithmetic": """formats layout jit bits special philox rounding maxima kernels elementwise
        nvfp4 rounders packing arrayfile mxarray quantize""",
    "tools": "store stats survival threads boundary executors",
    "schemes": "precision presets card label",
    "training": "config outcome ops steps proxy data optim bias train checkpoint paired",
    "theory": "theory",
    "instruments": """hessian curvature systematic attribution mechanism signals floor gemm_cost
        estimate report""",
    "control": "changes interventions control controlled",
    "sweeps": "sweep progress grid tracing flatten results results_table single",
    "package": "",
    "backends": "backends",
    "crosscheck": "crosscheck",
    "command": "cli",
}
PACKAGES = ("mxsim", "studies", "figures", "benchmarks", "examples", "tests")


@dataclass(frozen=True)
class Import:
    """``module`` is a module of this repository, or the first name of another package's."""

    module: str
    name: str | None  # what is taken from it
    at_top: bool


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def sources(*packages: str) -> dict[str, Path]:
    found = (path for package in packages for path in sorted((ROOT / package).rglob("*.py")))
    return {name_of(path): path for path in found}


MODULES = sources(*PACKAGES)


def read_imports(text: str, known: Mapping[str, object]) -> Iterator[Import]:
    """All imports of a module, those inside functions too."""
    for node in ast.walk(ast.parse(text)):
        at_top = getattr(node, "col_offset", 0) == 0
        if isinstance(node, ast.Import):
            for alias in node.names:
                known_as = alias.name if alias.name in known else alias.name.partition(".")[0]
                yield Import(known_as, None, at_top)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not node.level, f"import {node.module} by its full name"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known and not (node.module == "mxsim" and alias.name == "quantize"):
                    yield Import(full, None, at_top)
                elif node.module in known:
                    yield Import(node.module, alias.name, at_top)
                else:
                    yield Import(node.module.partition(".")[0], alias.name, at_top)


IMPORTS = {name: list(read_imports(path.read_text(), MODULES)) for name, path in MODULES.items()}


def graph(package: str, at_top_only: bool = False) -> dict[str, set[str]]:
    """Module -> modules of the repository that it imports, for those of some packages.

    The package's own version is no module's: the store takes it when it is asked for.
    """
    return {
        name: {
            each.module
            for each in imports
            if each.module in MODULES
            and each.name != "__version__"
            and (each.at_top or not at_top_only)
        }
        for name, imports in IMPORTS.items()
        if re.match(package, name)
    }


def cycle_in(edges: Mapping[str, set[str]]) -> list[str]:
    """Modules that import one another in a ring, or nothing."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done:
            return []
        for other in sorted(edges.get(name, ())):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(edges) if (found := visit(name, []))), [])


def layer_of(module: str) -> int:
    """The index of the one layer that names a module of mxsim."""
    below = module.removeprefix("mxsim").removeprefix(".")
    names = {below, below.partition(".")[0]}
    places = [i for i, each in enumerate(LAYERS.values()) if names & set(each.split() or [""])]
    assert len(places) == 1, f"{module} must be in one layer; it is in {len(places)}"
    return places[0]


def test_the_reader_of_imports_and_the_search_for_cycles_see_what_is_there() -> None:
    text = "import os.path\nfrom a import b, c\ndef f():\n    import a.b\n    from d.e import g\n"
    known = {"a": 1, "a.b": 1}
    assert list(read_imports(text, known)) == [
        Import("os", None, True),
        Import("a.b", None, True),
        Import("a", "c", True),
        Import("a.b", None, False),
        Import("d", "g", False),
    ]
    assert cycle_in({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    assert cycle_in({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


def test_no_module_of_mxsim_is_in_a_cycle_not_even_inside_a_function() -> None:
    assert cycle_in(graph("mxsim")) == []


def test_nothing_else_is_in_a_cycle_when_imported() -> None:
    assert cycle_in(graph(".*", at_top_only=True)) == []


def test_modules_of_mxsim_import_from_their_own_layer_and_those_before_it() -> None:
    for name, imported in graph("mxsim").items():
        for other in imported:
            assert other.startswith("mxsim"), f"{name} imports {other}"
            assert layer_of(other) <= layer_of(name), f"{name} imports {other}, of a later layer"


def test_every_name_in_the_table_is_a_module() -> None:
    for names in LAYERS.values():
        for name in names.split():
            assert f"mxsim.{name}" in MODULES, name


def test_only_the_store_asks_for_the_package_version() -> None:
    asked = [n for n in IMPORTS for each in IMPORTS[n] if each.name == "__version__"]
    assert [name for name in asked if name.startswith("mxsim")] == ["mxsim.store"]


def test_studies_sit_on_mxsim_and_figures_on_studies() -> None:
    for name, imports in IMPORTS.items():
        package = name.partition(".")[0]
        for each in imports:
            other = each.module.partition(".")[0]
            if other not in PACKAGES or package not in ("studies", "figures"):
                continue
            if package == "studies" and other == "figures":  # a study's main draws its own figure
                assert not each.at_top, name
                assert each.module == f"figures.{name.partition('.')[2]}", name
            else:
                allowed = ("mxsim", "studies", "figures")[: 2 if package == "studies" else 3]
                assert other in allowed, f"{name} imports {each.module}"


def test_examples_take_the_package_alone() -> None:
    """What a reader copies runs where only mxsim is installed."""
    for name in (name for name in IMPORTS if name.startswith("examples.")):
        ours = {each.module.partition(".")[0] for each in IMPORTS[name]} & set(PACKAGES)
        assert ours == {"mxsim"}, name


@pytest.mark.parametrize("package", ["torch", "torchao", "gfloat"])
def test_torch_and_witnesses_are_imported_by_backends_and_the_crosscheck_alone(
    package: str,
) -> None:
    for name, imports in IMPORTS.items():
        taken = [each for each in imports if each.module == package]
        if not taken or name.startswith(("tests.", "benchmarks.", "examples.")):
            continue
        assert name.startswith(("mxsim.backends.", "mxsim.crosscheck.")), name
        if name.startswith("mxsim.crosscheck."):  # which runs without it, too
            assert not any(each.at_top for each in taken), name


def test_no_source_file_is_longer_than_a_room() -> None:
    lengths = {name: len(path.read_text().splitlines()) for name, path in MODULES.items()}
    assert {name: n for name, n in lengths.items() if n > LONGEST} == {}


# -------------------------------------------------------------------------- ARCHITECTURE.md


PAGE = ROOT / "ARCHITECTURE.md"
QUOTED = re.findall(r"`([^`\n]+)`", PAGE.read_text()) if PAGE.exists() else []


def exists(path: str) -> bool:
    """Whether a path, taken from the root or from mxsim/, is there; ``*`` stands for any name."""
    return any(any(folder.glob(path.rstrip("/"))) for folder in (ROOT, ROOT / "mxsim"))


def test_the_page_is_one_page_and_its_paths_exist() -> None:
    assert len(PAGE.read_text().splitlines()) < 90
    paths = [q for q in QUOTED if re.fullmatch(r"[\w*./-]+(\.\w+|/)", q) and "()" not in q]
    paths = [q for q in paths if q.endswith(("/", ".py", ".md", ".npz", ".png"))]
    assert len(paths) > 30
    assert [path for path in paths if not exists(path)] == []


def test_the_page_names_functions_that_exist() -> None:
    """`file.py: name` says that the file has the function, class or method."""
    named = [re.fullmatch(r"([\w/]+\.py): (.+)", q) for q in QUOTED]
    found = [match.groups() for match in named if match]
    assert len(found) > 10
    for file, names in found:
        tree = ast.parse((ROOT / "mxsim" / file).read_text())
        there = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, (ast.FunctionDef, ast.ClassDef))
        }
        for name in names.split(", "):
            assert set(name.split(".")) <= there, f"{file} has no {name}"


def test_the_page_tells_every_layer() -> None:
    text = PAGE.read_text()
    for layer in LAYERS:
        assert f"| {layer} |" in text, layer
