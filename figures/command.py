"""What a figure's command does: read stored results, draw and say where, or say what is missing."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure


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


def saved(figure: Figure, out: Path) -> Path:
    """Write the figure, in a folder that is made if need be, and close it; returns ``out``."""
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out)
    plt.close(figure)
    return out
