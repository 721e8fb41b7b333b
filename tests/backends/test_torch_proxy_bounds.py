"""Loss and gradient of PyTorch and of the Numba backend, within bounds that are derived.

They are worst cases: of the exact scheme in float32 they are wide at the first block (its rounding
errors add up to some 1e-7, the bound allows all of it), in float64 they are below a millionth.
Quantized operands have to agree in all bits, so errors do not get past a site.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

import mxsim
from mxsim.backends.torch_proxy import loss_and_grads
from tests.backends.bounded_student import student
from tests.backends.running_error import UNIT, Bounded, excess

pytestmark = pytest.mark.usefixtures("single_threaded")

CFG = mxsim.ProxyConfig(width=32, depth=2, batch=64, gamma_sd=0.2)
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
SCHEMES = ("exact", "all_e4m3", "gemm_e2m1", "ln_only_e4m3")


def point(cfg: mxsim.ProxyConfig) -> tuple[Any, Any, Any]:
    params = mxsim.init_params(cfg)
    rng = np.random.default_rng(1)
    for block in params:
        block["ln_beta"] += rng.normal(0, 0.1, cfg.width).astype(cfg.real)
    return params, *mxsim.make_batches(cfg, mxsim.make_teacher(cfg)).at(0)


def by_numba(params: Any, x: Any, y: Any, cfg: Any, scheme: Any) -> Any:
    return mxsim.loss_and_grads(params, x, y, cfg, scheme)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["torch", "numba"])
@pytest.mark.parametrize("scheme_name", SCHEMES)
def test_loss_and_gradient_lie_within_the_running_error_bound(
    scheme_name: str, backend: str, device: str, dtype: str
) -> None:
    cfg, scheme = dataclasses.replace(CFG, dtype=dtype), mxsim.scheme(scheme_name)
    params, x, y = point(cfg)
    seen: dict[tuple[str, int], Any] = {}
    found = loss_and_grads(
        params,
        x,
        y,
        cfg,
        scheme,
        device=device,
        seen=lambda s, k, *both: seen.update({(s, k): both}),
    )
    if backend == "numba":
        found = by_numba(params, x, y, cfg, scheme)

    def operand(site: str, block: int, before: Bounded) -> Bounded:
        """Before: within the bound.  After: the bits that PyTorch made of it, in both backends."""
        if (site, block) not in seen:
            return before
        given, made = (t.cpu().numpy() for t in seen[site, block])
        assert excess(given, before) <= 1
        wide = made.astype(np.float64)
        return Bounded(wide, np.zeros_like(wide), before.u)

    loss, grads = student(params, x, y, cfg, UNIT[dtype], backend, operand)
    assert excess(found[0], loss) <= 1
    for block, bounds in zip(found[1], grads, strict=True):
        for kind, bounded in bounds.items():
            assert excess(block[kind], bounded) <= 1, kind
            if dtype == "float64":  # the bounds say something
                assert np.linalg.norm(bounded.error) < 1e-6 * np.linalg.norm(bounded.value), kind


def test_the_bound_notices_an_epsilon_that_is_off_by_a_thousandth() -> None:
    cfg = dataclasses.replace(CFG, dtype="float64")
    params, x, y = point(cfg)
    other = dataclasses.replace(cfg, ln_eps=cfg.ln_eps * (1 + 1e-3))
    _, wrong = loss_and_grads(params, x, y, other, mxsim.scheme("exact"))
    _, grads = student(params, x, y, cfg, UNIT["float64"], "torch")
    assert max(excess(wrong[1][kind], bounded) for kind, bounded in grads[1].items()) > 1
