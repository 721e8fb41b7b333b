"""The precision controller in a PyTorch training loop.

    python examples/controller_in_torch.py

A small network is trained in MXFP8 (E4M3 operands in all six matrix products).  At step 200 a batch
comes in a thousand times too large; its gradient stays in Adam's moments and throws the weights
off.  The controller sees the loss, goes back to the last good state, trains on in bf16, and returns
to MXFP8 when all has been calm for 100 steps.  You see its log, and the loss at the end with it and
without it.  Needs PyTorch; ten seconds.

The loop in ``controlled`` is all that training needs of the controller (see docs/controller.md).
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from typing import Any

try:
    import torch
except ModuleNotFoundError:
    say = "needs PyTorch (make crosscheck): .venv-torch/bin/python examples/controller_in_torch.py"
    raise SystemExit(say) from None

from mxsim import scheme
from mxsim.backends.torch_linear import linear
from mxsim.backends.torch_sites import sites_of
from mxsim.control import Controller, Policy, Trigger

(MXFP8,), (BF16,) = sites_of(scheme("gemm_e4m3"), 1, 0), sites_of(scheme("bf16"), 1, 0)
PRECISIONS = {"mxfp8": MXFP8, "bf16": BF16}
BAD = 200  # the step whose batch is too large
TrainStep = Callable[..., tuple[float, float]]


class Net(torch.nn.Module):  # type: ignore[misc,unused-ignore]
    """x (n, 32) -> (n, 32) by way of 128 hidden units, in a precision given by name."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = torch.nn.Parameter(torch.randn(128, 32) / 32**0.5)
        self.w2 = torch.nn.Parameter(torch.randn(32, 128) / 128**0.5)

    def forward(self, x: Any, precision: str) -> Any:
        hidden = linear(x, self.w1, "fc1", PRECISIONS[precision]).relu()
        return linear(hidden, self.w2, "fc2", PRECISIONS[precision])


def start() -> tuple[Any, Any, TrainStep]:
    """Model, optimizer and training step: the same ones, and the same batches, every time."""
    torch.manual_seed(0)
    teacher, model = Net(), Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    done = 0

    def train_step(model: Any, optimizer: Any, precision: str) -> tuple[float, float]:
        nonlocal done
        x = torch.randn(256, 32)
        y = teacher(x, "bf16").detach()
        loss = ((model(x * 1000 if done == BAD else x, precision) - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
        optimizer.step()
        done += 1
        return loss.item(), norm.item()

    return model, optimizer, train_step


def snapshot(model: Any, optimizer: Any) -> Any:
    """All that training changes."""
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def restore(model: Any, optimizer: Any, state: Any) -> None:
    """Back to a snapshot."""
    model.load_state_dict(state[0])
    optimizer.load_state_dict(state[1])


def controlled(steps: int) -> tuple[list[float], Controller]:
    """The losses of a run under the controller, and the controller."""
    model, optimizer, train_step = start()
    losses = []
    spike = Trigger("loss_ratio", level=2.0, quiet=1.3, roll_back=True)
    controller, kept = Controller(Policy(("mxfp8", "bf16"), (spike,), save_every=50)), {}
    for step in range(steps):
        loss, grad_norm = train_step(model, optimizer, precision=controller.rung)
        decision = controller.observe(step, loss, grad_norm)
        if decision.save:
            kept[step] = snapshot(model, optimizer)
        if decision.restore is not None:
            restore(model, optimizer, kept[decision.restore])
        kept = {number: kept[number] for number in decision.kept}
        losses.append(loss)
    return losses, controller


def main(arguments: Sequence[str] | None = None) -> int:
    """Train twice and print; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=320)
    options = parser.parse_args(arguments)
    losses, controller = controlled(options.steps)
    for move in controller.log:
        print(f"step {move.step}: {move.action}, on in {move.rung} ({move.reason})")
    model, optimizer, train_step = start()
    alone = [train_step(model, optimizer, "mxfp8")[0] for _ in range(options.steps)]
    for words, found in (("with the controller", losses), ("without", alone)):
        print(f"{words}: mean loss of the last 20 steps {sum(found[-20:]) / 20:.3g}")
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)  # for matrices this small more of them cost more than they save
    raise SystemExit(main())
