"""The site is whole: every module and every page has a place, and links read well off the site.

What only a build can tell (anchors, images, docstrings that do not render) ``make docs`` tells.
"""

import re

import mxsim
from studies import ln_affine_isolation, noisy_quadratic
from tests.docs_commands import ROOT, pages

API = {path.stem: path.read_text() for path in (ROOT / "docs" / "api").glob("*.md")}
DOCUMENTED = {name for text in API.values() for name in re.findall(r"automodule:: (\S+)", text)}

# Not for calling from outside: loops, parts of one public module, commands, the page of NumPy.
INSIDE = {
    *["kernels", "maxima", "rounding", "elementwise", "nvfp4", "bits"],
    *["arrayfile", "packing"],  # mxarray's
    *["ops", "steps", "special", "threads"],  # proxy's
    *["cli", "single", "results_table", "minimal"],
    *["theory", "theory.depth_tables"],
    *[
        "backends",
        "crosscheck",
        "crosscheck.patterns",
        "crosscheck.reports",
        "crosscheck.witnesses",
    ],
}
# PyTorch's modules that are for calling; the others are their parts.
TORCH = {"quantize", "proxy", "train", "points", "trajectories"}


def modules() -> set[str]:
    """Every module of the package, without the package's name."""
    package = ROOT / "mxsim"
    paths = [path.relative_to(package).with_suffix("") for path in package.rglob("*.py")]
    dotted = {".".join(path.parts).removesuffix(".__init__") for path in paths}
    return {name for name in dotted if not name.endswith("__main__")} - {"__init__"}


def test_every_module_is_on_a_page_or_inside() -> None:
    inside = set(INSIDE)
    for name in modules():
        backend, _, part = name.partition("backends.torch_")
        if part and not backend and part not in TORCH:
            inside.add(name)
    documented = {name.removeprefix("mxsim.") for name in DOCUMENTED}
    assert documented | inside == modules()
    assert not documented & inside


def test_every_public_name_is_on_a_page() -> None:
    for name in set(mxsim.__all__) - {"FORMATS", "PRESETS", "results"}:
        assert getattr(mxsim, name).__module__ in DOCUMENTED, name
    assert {"mxsim.formats", "mxsim.presets", "mxsim.results"} <= DOCUMENTED


def test_every_page_is_in_the_contents() -> None:
    listed = set()
    for above in ("index", "api/index"):
        text = (ROOT / "docs" / f"{above}.md").read_text()
        folder = above.rpartition("/")[0]
        for tree in re.findall(r"```\{toctree\}\n(.*?)```", text, re.DOTALL):
            for line in filter(None, tree.splitlines()):
                if not line.startswith(":"):
                    listed |= {f"{folder}/{line}".strip("/")}
    for page in pages():
        name = page.removeprefix("docs/").removesuffix(".md")
        if page.startswith("docs/") and not page.startswith("docs/howto/") and name != "index":
            assert name in listed, f"{page} is in no toctree"
    assert "howto/*" in listed


def test_links_lead_somewhere_in_the_repository() -> None:
    """As a code host follows them: from the page's own folder, to a file that is there."""
    for page in pages():
        text = re.sub(r"```.*?```|``.*?``|`[^`]*`", "", (ROOT / page).read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            assert "://" not in target, f"{page}: {target}"
            path = target.partition("#")[0]
            assert not path or ((ROOT / page).parent / path).exists(), f"{page}: {target}"


def test_files_that_pages_speak_of_are_there() -> None:
    for page in pages():
        if page.startswith("docs/howto/"):  # of files that their diffs add, too
            continue
        for path in re.findall(
            r"`((?:mxsim|studies|figures|tests|benchmarks|examples|docs)/[\w/]+\.\w+)`",
            (ROOT / page).read_text(),
        ):
            assert (ROOT / path).exists(), f"{page}: {path}"


def test_examples_are_as_long_as_their_page_says() -> None:
    page = (ROOT / "examples" / "README.md").read_text()
    (said,) = re.findall(r"(\d+) to (\d+) lines", page)
    lengths = [len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")]
    assert int(said[0]) <= min(lengths) <= max(lengths) <= int(said[1])
    site = (ROOT / "docs" / "examples.md").read_text()
    shown = re.findall(r"^## (.+)\n\n```\{literalinclude\} \.\./examples/\1$", site, re.MULTILINE)
    assert sorted(shown) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_results_lie_where_the_page_on_studies_says() -> None:
    """By the line of each study that opens its store: with the tier, or without, or by a rule."""
    page = (ROOT / "docs" / "studies.md").read_text()
    table = page.partition("## Where results lie")[2].partition("\n## ")[0]
    cells = [row.split("|")[2] for row in table.splitlines() if row.startswith("| ")][1:]
    with_tier, but_default, never = (set(re.findall(r"`(\w+)`", cell)) for cell in cells)
    forms = ('f"{STUDY}_{arguments.tier}"', "study_name(arguments.tier)", "STUDY")
    found: dict[str, set[str]] = {form: set() for form in forms}
    for path in (ROOT / "studies").glob("*.py"):
        for form in re.findall(r"Store\(arguments\.results / (.+?)\)$", path.read_text(), re.M):
            found[form].add(path.stem)
    assert [with_tier, but_default, never] == [found[form] for form in forms]
    for study in (ln_affine_isolation, noisy_quadratic):
        assert study.study_name("laptop") == study.STUDY
        assert study.study_name("smoke") == f"{study.STUDY}_smoke"
