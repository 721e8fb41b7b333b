"""How a study is started from the command line; what it does is its own ``main``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, NoReturn, TypeVar

ArgumentsT = TypeVar("ArgumentsT")


def run_as_command(
    main: Callable[[ArgumentsT], int], arguments: type[ArgumentsT], study: str
) -> NoReturn:
    """Exit with ``main``'s status for the command line; Ctrl-C ends in a sentence."""
    try:
        sys.exit(main(parse(arguments, f"python -m studies.{study}")))
    except KeyboardInterrupt:
        sys.exit("interrupted; what was finished is stored")


def parse(
    arguments: type[ArgumentsT], program: str, words: Sequence[str] | None = None
) -> ArgumentsT:
    """``arguments`` from the command line, or from ``words``.

    Exits with status 2, in one sentence, for a value that its dataclass refuses: tyro would put a
    box and the name of the class around it.
    """
    import tyro  # here: figures import studies, and have no use for it

    namespace = {
        "__post_init__": lambda self: None,
        "__doc__": arguments.__doc__,
        "__module__": arguments.__module__,
    }
    unchecked = type(arguments.__name__, (arguments,), namespace)
    typed: Any = tyro.cli(unchecked, prog=program, args=words)
    try:
        return arguments(**{f.name: getattr(typed, f.name) for f in fields(typed)})
    except (TypeError, ValueError) as error:
        print(f"{program}: {error} (options: {program} --help)", file=sys.stderr)
        sys.exit(2)
