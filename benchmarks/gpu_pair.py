"""The authors' spiking setting by PyTorch, exact and all E4M3 side by side, for a given time.

    python -m benchmarks.gpu_pair --device cuda --seconds 150 --out DIR

Depth 4, width 512, batch 2048, gelu, Adam at a constant 6e-4, seed 1337.  Both arms do the same
number of steps, in turns; what does not fit in the time is left out.  DIR gets a record an arm (as
studies store them) if it ended, else its checkpoint and series so far, and summary.json.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mxsim
from mxsim.backends.torch_points import TorchPoint
from mxsim.backends.torch_train import TorchTraining, checked_device, on_device
from mxsim.outcome import find_spikes
from mxsim.store import Store, provenance, write_whole

PAPER = mxsim.ProxyConfig(
    width=512, depth=4, batch=2048, lr=6e-4, steps=6000, seed=1337, activation="gelu"
)
TINY = dataclasses.replace(PAPER, width=32, depth=2, batch=64, steps=40, eval_samples=256)
ARMS = ("exact", "all_e4m3")
TURN = 200  # steps


def advance(runs: dict[str, TorchTraining], seconds: float) -> None:
    """The runs in turns of TURN steps, until they end or the next turn would take too long."""
    started, turns = time.perf_counter(), 0
    while any(not run.ended for run in runs.values()):
        used = time.perf_counter() - started
        if turns and used * (1 + 1 / turns) > seconds:
            return
        for run in runs.values():
            if not run.ended:
                run.advance(TURN)
        turns += 1


def store(name: str, run: TorchTraining, point: TorchPoint, folder: Path) -> dict[str, Any]:
    """Store what there is of a run; its summary."""
    done = run.losses[: run.step]
    found: dict[str, Any] = {
        "scheme": name,
        "id": point.id,
        "steps": run.step,
        "ms_a_step": 1e3 * run.seconds / max(run.step, 1),
        "last_losses_median": float(np.median(done[-20:])) if len(done) else math.nan,
        "spikes": [dataclasses.asdict(s) for s in find_spikes(run.losses, run.rule)],
        "graph": run.graph_words,
    }
    if run.ended:
        finished = run.finish()
        Store(folder).save(point.record(run, finished))
        found |= {"status": finished.status, "eval_loss": finished.eval_loss}
    else:
        run.close()
        mxsim.save_checkpoint(run, folder / f"{name}.checkpoint.npz")
        series = {"losses": run.losses, "grad_norms": run.grad_norms}
        meta = {**point.settings(), "versions": {**provenance(), **run.describe()}}
        write_whole(folder / f"{name}.series.npz", series, meta)
        found["status"] = "not ended"
    return found


def main() -> int:
    """Train, store, print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--steps", type=int, default=PAPER.steps)
    parser.add_argument("--tiny", action="store_true", help="a toy size, to see that it works")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    checked_device(arguments.device)
    if arguments.tiny:
        torch.set_num_threads(1)
    cfg = TINY if arguments.tiny else dataclasses.replace(PAPER, steps=arguments.steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    points = {name: TorchPoint(cfg, mxsim.scheme(name), arguments.device) for name in ARMS}
    runs = {
        name: on_device(mxsim.start(cfg, point.scheme), arguments.device)
        for name, point in points.items()
    }
    with suppress(KeyboardInterrupt):  # what is done is stored
        advance(runs, arguments.seconds)
    summary = [store(name, runs[name], points[name], arguments.out) for name in ARMS]
    (arguments.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    for each in summary:
        print(
            f"{each['scheme']}: {each['status']}, {each['steps']} of {cfg.steps} steps, "
            f"{each['ms_a_step']:.2f} ms a step, loss {each['last_losses_median']:.6g}, "
            f"{len(each['spikes'])} spikes; graph: {each['graph']}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
