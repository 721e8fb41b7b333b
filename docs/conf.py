"""The site: ``make docs`` builds it from these Markdown pages and from mxsim's docstrings.

Warnings are errors there: a link that leads nowhere, an image that is missing, a docstring that
does not render, a module that is no more.
"""

import inspect
import re
from typing import Any

import mxsim

project = "mxsim"
author = "The mxsim authors"
copyright = f"the mxsim authors; version {mxsim.__version__}"
version = release = mxsim.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
nitpicky = True
# What stands in signatures and is documented elsewhere: NumPy's names and rich's, type aliases,
# type variables.
nitpick_ignore_regex = [
    ("py:.*", r"(np|numpy|rich|concurrent|collections|pathlib|fractions|sympy|torch)\..*"),
    ("py:.*", r"re\.Pattern|Array|ArrayLike|DTypeLike|Params|TypeAliasForwardRef"),
    ("py:.*", r"mxsim\.(\w+\.)*(TaskT|Key)"),
    ("py:class", r"mxsim\..*"),  # in a signature, of a module on no page
]

highlight_language = "none"  # of listings that name none: commands, output, formulas
html_theme = "furo"
html_title = "mxsim"
html_static_path = ["_static"]
html_css_files = ["mxsim.css"]
html_show_sphinx = False
html_copy_source = False

myst_heading_anchors = 4  # links such as formats.md#scale-rules, by the rule of code hosts
myst_enable_extensions = ["colon_fence", "substitution"]

autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_mock_imports = ["torch", "torchao", "gfloat"]  # no page needs them installed
autodoc_preserve_defaults = True
autodoc_type_aliases = {name: name for name in ("Array", "ArrayLike", "DTypeLike", "Params")}
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
python_use_unqualified_type_names = True


def public_names() -> str:
    """The table of what ``import mxsim`` gives, each name with the head of its docstring."""
    data = {
        "FORMATS": ("mxsim.formats.FORMATS", "Block formats by name"),
        "PRESETS": ("mxsim.presets.PRESETS", "Precision schemes by name, each with its source"),
        "results": ("mxsim.results", "Stored runs as a table"),
    }
    lines = ["| name | |", "|---|---|"]
    for name in sorted(mxsim.__all__, key=str.lower):
        value = getattr(mxsim, name)
        if name in data:
            target, head = data[name]
        else:
            target = f"{value.__module__}.{name}"
            head = re.split(r"\n\s*\n", inspect.getdoc(value) or "")[0]
        head = " ".join(head.split()).replace("``", "`").replace("|", r"\|").rstrip(".:")
        lines.append(f"| {{py:obj}}`{name} <{target}>` | {head} |")
    return "\n".join(lines)


myst_substitutions = {"public_names": public_names()}


MARKUP = re.compile(r"[\\*|`]|(?<=\w)_(?!\w)")
LITERAL = re.compile(r"(``.+?``)")
ITEM = re.compile(r"(- |\d\. )")


def escaped(line: str) -> str:
    """The line with what is markup to Sphinx escaped, ``literals`` excepted."""
    parts = LITERAL.split(line)
    parts[::2] = [MARKUP.sub(r"\\\g<0>", part) for part in parts[::2]]
    for i in range(2, len(parts), 2):  # a literal must end at a word's end
        if parts[i][:1].isalnum() or parts[i][:1] == "^":
            parts[i] = r"\ " + parts[i]
    return "".join(parts)


def as_prose(lines: list[str]) -> list[str]:
    """A docstring is prose, lists, and formulas or code set off by four spaces: as Sphinx reads it.

    The blank lines that it wants around lists and formulas are put in.
    """
    out: list[str] = []
    kind = "text"
    for line in lines:
        if not line.strip():
            out.append("")
            continue
        was, indent = kind, len(line) - len(line.lstrip())
        if ITEM.match(line):
            kind = "list"
        elif indent == 0:
            kind = "text"
        elif was != "list":
            kind = "formula" if indent >= 4 or was == "formula" else "text"
        if kind != was:
            out += ["", "::", ""] if kind == "formula" else [""]
        out.append(line if kind == "formula" else escaped(line))
    return out


def clean_docstring(
    app: Any, what: str, name: str, value: object, options: object, lines: list[str]
) -> None:
    """Render the docstring as the plain prose that it is."""
    lines[:] = as_prose(lines)


def clean_signature(
    app: Any, what: str, name: str, value: object, options: object, signature: str, returns: str
) -> tuple[str | None, str | None]:
    """Aliases by their names within unions, too, where Sphinx shows how it stands in for them."""
    plain = [
        each and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", each)
        for each in (signature, returns)
    ]
    return plain[0], plain[1]


def skip(app: Any, what: str, name: str, value: object, skipped: bool, options: object) -> Any:
    """Show properties without a docstring, too: their names say enough."""
    shown = skipped and isinstance(value, property) and not name.startswith("_")
    return False if shown else None


def setup(app: Any) -> dict[str, bool]:
    """Connect the hooks."""
    app.connect("autodoc-process-docstring", clean_docstring)
    app.connect("autodoc-process-signature", clean_signature)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True}
