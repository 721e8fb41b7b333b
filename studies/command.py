"""How a study is started from the command line; what it does is its own ``main``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

ArgumentsT = TypeVar("ArgumentsT")


def run_as_command(
    main: Callable[[ArgumentsT], int], arguments: type[ArgumentsT], study: str
) -> NoReturn:
    """Exit with ``main``'s status for the command line; Ctrl-C ends in a sentence."""
    import tyro  # here: figures import studies, and have no use for it

    try:
        sys.exit(main(tyro.cli(arguments, prog=f"python -m studies.{study}")))
    except KeyboardInterrupt:
        sys.exit("interrupted; what was finished is stored")
