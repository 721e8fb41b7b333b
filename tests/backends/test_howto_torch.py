"""The commands of the how-to pages that need PyTorch."""

from pathlib import Path

import pytest

from tests.test_howto import TORCH, commands_of, run_commands

PAGES = ("add_format",)


@pytest.mark.parametrize("page", PAGES)
def test_the_twin_needs_no_change(page: str, tmp_path: Path) -> None:
    assert [words for words in commands_of(page) if words[0] == TORCH]
    run_commands(page, tmp_path, torch=True)
