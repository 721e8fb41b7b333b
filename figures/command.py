"""What a figure's command does: read stored results, draw and say where, or say what is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def draw_stored(
    study: str,
    load: Callable[[], Any],
    pictures: Mapping[Path, Callable[[Any, Path], Path]],
) -> int:
    """Draw each picture from what ``load`` reads; the exit status is 1 if a result is missing."""
    try:
        results = load()
    except FileNotFoundError as error:
        print(f"a result is missing ({error}); run python -m studies.{study}", file=sys.stderr)
        return 1
    for path, draw in pictures.items():
        print(draw(results, path))
    return 0
