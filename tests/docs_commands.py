"""What the pages (README, ARCHITECTURE.md, examples/, docs/) tell a reader to type or to run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parents[1]
HEADS = (
    r"python3?|mxsim|make|pip|pytest|bash|git|cd|source|sphinx-build|tests/|\.ci/|"
    r"benchmarks/\w+\.sh|examples/\w+\.py|\.venv[\w-]*/"
)
TYPED = re.compile(rf"\s*(\$ )?({HEADS})(?![\w.=(])|\s*(\$ )?(\.venv[\w-]*/|\.ci/)")
# In a sentence `make` and `mxsim` alone are names, and `pip` is a program.
QUOTED = re.compile(
    r"(python3? (-m )?[\w.]|make [\w-]|mxsim [\w-]|pip install |pytest |bash |"
    r"benchmarks/\w+\.sh|\.venv[\w-]*/bin/|\.ci/)"
)
SHELLS = ("sh", "bash", "shell", "console")
BIN = re.compile(r"^\.venv[\w-]*/bin/")


def pages() -> list[str]:
    """All pages that there are, as paths from the root."""
    names = ("README.md", "ARCHITECTURE.md", "examples/README.md")
    above = [name for name in names if (ROOT / name).exists()]
    below = sorted(path.relative_to(ROOT) for path in (ROOT / "docs").rglob("*.md"))
    return above + [path.as_posix() for path in below if "_build" not in path.parts]


def _tokens(page: str) -> Iterator[Token]:
    """Code of the page: blocks, fences, and what is quoted within sentences and tables."""
    parser = MarkdownIt("commonmark").enable("table")
    for token in parser.parse((ROOT / page).read_text()):
        yield from (token.children or ()) if token.type == "inline" else (token,)


def _lines(token: Token) -> list[str]:
    """The command lines of a token, a backslash at the end joining two."""
    text = token.content.replace("\\\n", " ")
    if token.type == "code_inline":
        return [text] if QUOTED.match(text) else []
    if token.type == "code_block" or (token.type == "fence" and not token.info.strip()):
        return [line for line in text.splitlines() if TYPED.match(line)]
    if token.type == "fence" and token.info.split()[0] in SHELLS:
        lines = [line for line in text.splitlines() if line.strip() and line[:1] not in ("#", " ")]
        if token.info.split()[0] == "console":  # the others are what it answers
            lines = [line for line in lines if line.startswith("$ ")]
        return lines
    return []


def words_of(line: str) -> tuple[str, ...]:
    """A command line as words, without its comment, the prompt, and the dots of "and so on"."""
    words = shlex.split(line.replace("[--", " [--").strip().removeprefix("$ "), comments=True)
    words = [word for word in words if word != "..."]
    words[0] = BIN.sub("", words[0])
    return ("python", *words[1:]) if words[0] == "python3" else tuple(words)


def commands() -> dict[tuple[str, ...], str]:
    """Every command of every page, as words, with the first page that has it (how-tos last)."""
    found: dict[tuple[str, ...], str] = {}
    for page in sorted(pages(), key=lambda page: page.startswith("docs/howto/")):
        for token in _tokens(page):
            for line in _lines(token):
                found.setdefault(words_of(line), page)
    return found


def python_blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return [
        token.content
        for token in _tokens(page)
        if token.type == "fence" and token.info.strip() == "python"
    ]


def block(page: str, language: str) -> str:
    """The only block of the page in this language."""
    (found,) = [t.content for t in _tokens(page) if t.type == "fence" and t.info == language]
    return found
