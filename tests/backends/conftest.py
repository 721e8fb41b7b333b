"""Without PyTorch nothing here is collected but what holds without it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

WITHOUT_TORCH = "test_without_torch.py"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    needs_torch = collection_path.suffix == ".py" and collection_path.name != WITHOUT_TORCH
    return True if needs_torch and find_spec("torch") is None else None


@pytest.fixture(scope="module")
def single_threaded() -> Iterator[None]:
    """PyTorch on one thread: on small tensors more of them cost more than they save."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
