"""The scripts of examples/ that need PyTorch; the loop that docs/controller.md quotes is theirs."""

from __future__ import annotations

import re
import textwrap

import pytest

from tests.test_examples import ROOT, example

pytestmark = pytest.mark.usefixtures("single_threaded")


def test_the_controller_rolls_back_from_a_bad_batch_and_training_ends_well(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert example("controller_in_torch").main([]) == 0
    back, relaxed, with_it, without = capsys.readouterr().out.splitlines()
    assert re.match(r"step 200: roll_back, on in bf16 \(loss_ratio \S+ is above 2\)", back)
    assert relaxed == "step 300: relax, on in mxfp8 (quiet for 100 steps)"
    ends = [line.split(": mean loss of the last 20 steps ") for line in (with_it, without)]
    assert [words for words, _ in ends] == ["with the controller", "without"]
    assert float(ends[0][1]) < 0.1 < 10 < float(ends[1][1])


def test_the_page_on_the_controller_quotes_the_loop_of_the_example() -> None:
    page = (ROOT / "docs" / "controller.md").read_text()
    quoted = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "controller.observe(step, loss, grad_norm)\n" in block
    ]
    (loop,) = (block.split("\n\n", 1)[1] for block in quoted)  # after the import
    source = (ROOT / "examples" / "controller_in_torch.py").read_text()
    assert textwrap.indent(loop, "    ") in source


def test_the_right_quantizer_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert example("check_quantizer").main(["--device", "cpu"]) == 0
    match = re.fullmatch(r"cpu: (\d+) of (\d+) cases agree\n", capsys.readouterr().out)
    assert match is not None
    assert match[1] == match[2]
    assert int(match[2]) >= 40


def test_the_broken_one_is_caught_where_its_logarithm_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert example("check_quantizer").main(["--broken", "--device", "cpu"]) == 1
    text = capsys.readouterr().out
    found = re.findall(r"^differs: (.*), \d+ elements \((.*)\)$", text, re.MULTILINE)
    assert "just below a power of two" in dict(found)
    assert "a float log2 is one too high" in dict(found)["just below a power of two"]
    maxima = re.findall(r"block maximum \S+ \((\S+)\)$", text, re.MULTILINE)
    assert len(maxima) == len(found)
    for maximum in maxima:  # each is a power of two but for a few of its last bits
        assert float.fromhex(maximum).hex().startswith("0x1.ffff"), maximum
    agree, asked = map(int, re.findall(r"^cpu: (\d+) of (\d+) cases agree$", text, re.MULTILINE)[0])
    assert asked - agree == len(found)
