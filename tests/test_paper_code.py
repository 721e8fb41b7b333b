"""paper_code against what the paper's released script computed: golden/reference_step_gelu_d32.npz.

Tensors that the script rounds to bf16 are compared as numbers, entry by entry, float32 ones by the
norm of their difference.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim import proxy
from mxsim.optim import optimizer_state, optimizer_step
from mxsim.precision import precision_of

GOLDEN = Path(__file__).parent / "golden" / "reference_step_gelu_d32.npz"
KINDS = {
    "ln.weight": "ln_gamma",
    "ln.bias": "ln_beta",
    "fc1.weight": "w1",
    "fc2.weight": "w2",
    "fc2.bias": "b2",
}
VARIANTS: dict[str, Any] = {
    "fp32": mxsim.scheme("exact"),
    "e4m3": mxsim.scheme("paper_code"),
    "e4m3_fwd_e5m2_bwd": mxsim.scheme("paper_code", bwd="mxfp8_e5m2"),
    "e2m3": mxsim.scheme("paper_code", fwd="mxfp6_e2m3"),
    "e4m3_bf16_act": mxsim.scheme("paper_code", acts="bf16"),
    "e4m3_fwd_only": mxsim.scheme("paper_code", backward="exact"),
    "e4m3_bf16_weight": mxsim.scheme("paper_code", weights="bf16"),
}
CFG = mxsim.ProxyConfig(width=32, depth=2, batch=64, lr=1e-2)
UNROUNDED_BACKWARD = ("fp32", "e4m3_fwd_only")


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    with np.load(GOLDEN) as file:
        return {name: file[name] for name in file.files}


def parameters(golden: dict[str, Any]) -> proxy.Params:
    params = proxy.parameter_views(np.empty(proxy.parameter_count(CFG), np.float32), CFG)
    for k, block in enumerate(params):
        for theirs, ours in KINDS.items():
            block[ours][...] = golden[f"param/layers.{k}.{theirs}"]
    return params


def bf16_units(a: Any, b: Any) -> Any:
    """|a - b| in units of bf16's last place at the larger of the two."""
    size = np.maximum(np.abs(a), np.abs(b)).astype(np.float64)
    exponent = np.frexp(np.where(size > 0, size, 1.0))[1] - 1
    return np.abs(a.astype(np.float64) - b) / np.ldexp(1.0, exponent - 7)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_step_is_the_scripts(variant: str, golden: dict[str, Any]) -> None:
    ws = proxy.workspace(CFG, 64, np.float32)
    flat = np.empty(proxy.parameter_count(CFG), np.float32)
    grads = proxy.parameter_views(flat, CFG)
    params, x, y = parameters(golden), golden["x"], golden["y"]
    precision = precision_of(VARIANTS[variant], CFG.depth)
    loss = proxy.loss_and_grads_into(params, x, y, CFG, precision, ws, grads)
    assert loss == pytest.approx(float(golden[f"{variant}/loss"]), rel=1e-6)

    pairs = {"pred": ws.stream}
    for k, block in enumerate(ws.blocks):
        pairs |= {f"blk{k}/ln_out": block.z, f"blk{k}/hidden": block.hidden}
    for k in range(CFG.depth):
        for theirs, ours in KINDS.items():
            name = f"grad/layers.{k}.{theirs}"
            if f"{variant}/{name}" in golden:
                pairs[name] = grads[k][ours]
            else:  # the script's layer norm gives beta no gradient
                assert ours == "ln_beta"
                np.testing.assert_array_equal(grads[k][ours], 0.0)
    assert len(pairs) == 5 + (10 if variant == "fp32" else 8)

    unequal = entries = 0
    for name, got in pairs.items():
        want = golden[f"{variant}/{name}"]
        full = variant == "fp32" or name.endswith("hidden") or name == "pred"
        if full or (variant in UNROUNDED_BACKWARD and name.startswith("grad")):
            error = np.linalg.norm(got.astype(np.float64) - want)
            assert error <= 1e-6 * np.linalg.norm(want), name
        else:
            unequal += int((got != want).sum())
            entries += got.size
            assert bf16_units(got, want).max() <= 2, name
            np.testing.assert_array_equal(got, mxsim.round_to(got, "bf16"))  # on its grid
    assert unequal <= 5e-4 * entries


def test_the_exceptions_hang_on_one_tie_of_float32(golden: dict[str, Any]) -> None:
    # Of all variants only entries of dw1 in block 0 under acts="bf16" differ, in one row where this
    # was written.  A row sums over one column of dy; there an entry, a float32 value that erf and a
    # sum made, is a tie of bf16 to its last bits.  Rounded the other way, the row is the script's.
    ws = proxy.workspace(CFG, 64, np.float32)
    grads = proxy.parameter_views(np.empty(proxy.parameter_count(CFG), np.float32), CFG)
    precision = precision_of(VARIANTS["e4m3_bf16_act"], CFG.depth)
    x, y = golden["x"], golden["y"]
    proxy.loss_and_grads_into(parameters(golden), x, y, CFG, precision, ws, grads)
    got, want = grads[0]["w1"], golden["e4m3_bf16_act/grad/layers.0.fc1.weight"]
    rows = np.unique(np.nonzero(got != want)[0])
    assert len(rows) <= 3
    for row in rows:
        dy, rounded = ws.wide[:, row].astype(np.float64), ws.fc1.dy_in[:, row].astype(np.float64)
        unit = np.ldexp(1.0, np.frexp(dy)[1] - 8)  # bf16's last place
        from_tie = np.abs(np.abs(dy) / unit % 1.0 - 0.5) * 2.0**16  # in last places of float32
        [close] = np.nonzero(from_tie <= 4)
        assert 1 <= len(close) <= 3
        explained = []
        for some in itertools.product((0, 1), repeat=len(close)):
            other = rounded.copy()
            other[close] += some * np.sign(dy - rounded)[close] * unit[close]
            dw = mxsim.round_to((other @ ws.fc1.x_in).astype(np.float32), "bf16", "away")
            explained.append(np.array_equal(dw, want[row]))
        assert any(explained)


@pytest.mark.parametrize("variant", VARIANTS)
def test_twelve_steps_of_adam_are_the_scripts(variant: str, golden: dict[str, Any]) -> None:
    size = proxy.parameter_count(CFG)
    flat, flat_grads = np.empty(size, np.float32), np.empty(size, np.float32)
    params, grads = proxy.parameter_views(flat, CFG), proxy.parameter_views(flat_grads, CFG)
    for block, initial in zip(params, parameters(golden), strict=True):
        for kind in block:
            block[kind][...] = initial[kind]
    state, ws = optimizer_state(CFG, size), proxy.workspace(CFG, 64, np.float32)
    precision = precision_of(VARIANTS[variant], CFG.depth)
    losses = []
    for _ in range(12):
        losses.append(
            proxy.loss_and_grads_into(params, golden["x"], golden["y"], CFG, precision, ws, grads)
        )
        optimizer_step(flat, flat_grads, state, CFG, VARIANTS[variant])
    # The last bit of erf decides roundings where activations or backward are not quantized.
    loose = variant in ("e4m3_bf16_act", "e4m3_fwd_only")
    np.testing.assert_allclose(
        losses, golden[f"{variant}/adam_losses"], rtol=1e-2 if loose else 1e-6
    )
