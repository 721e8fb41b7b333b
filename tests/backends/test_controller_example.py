"""The example of docs/controller.md, run as it stands in a PyTorch training loop."""

import copy
import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).resolve().parents[2] / "docs" / "controller.md"


def example() -> str:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (found,) = [block for block in blocks if "controller.observe(" in block]
    return str(found)


def test_the_example_trains_and_rolls_back() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    weights = torch.randn(8, 1)
    rungs: list[str] = []
    restored: list[int] = []

    def train_step(model: Any, optimizer: Any, precision: str) -> tuple[float, float]:
        x = torch.randn(64, 8)
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "mxfp8"):
            prediction = model(x)
        loss = torch.mean((prediction.float() - x @ weights) ** 2) + 0.1
        optimizer.zero_grad()
        loss.backward()
        if len(rungs) == 250:  # something goes wrong
            loss = loss * 100
        optimizer.step()
        rungs.append(precision)
        norm = sum(float(p.grad.norm()) ** 2 for p in model.parameters()) ** 0.5
        return loss.item(), norm

    def snapshot(model: Any, optimizer: Any) -> tuple[Any, Any]:
        return copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())

    def restore(model: Any, optimizer: Any, state: tuple[Any, Any]) -> None:
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        restored.append(len(rungs))

    names: dict[str, Any] = {
        "steps": 300,
        "model": model,
        "optimizer": optimizer,
        "train_step": train_step,
        "snapshot": snapshot,
        "restore": restore,
    }
    exec(compile(example(), str(PAGE), "exec"), names)
    log = names["controller"].log
    assert log[0].action == "roll_back"
    assert log[0].step == 250
    assert restored == [251]
    assert rungs[:251] == ["mxfp8"] * 251
    assert rungs[251] == "bf16"
    assert set(log[0].kept) <= set(names["kept"])
