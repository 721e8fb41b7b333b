"""Runs of both backends side by side, and the first value that they round differently."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim.backends.torch_flips import axis_of, differing, explain
from mxsim.backends.torch_trajectories import compare_trajectories

pytestmark = pytest.mark.usefixtures("single_threaded")

CFG = mxsim.ProxyConfig(width=64, depth=2, batch=128, lr=5e-3, steps=8)
E = mxsim.SiteFormat


def test_each_step_from_one_state_differs_by_roundings_alone() -> None:
    found = compare_trajectories(CFG, mxsim.scheme("all_e4m3"))
    assert [s.step for s in found.steps] == list(range(CFG.steps))
    # every operand of every site: fc1 and fc2 have three each twice, gamma and beta
    n, d, h = CFG.batch, CFG.width, CFG.hidden
    a_block = 2 * (2 * n * d + 2 * n * h + 2 * h * d) + 2 * d
    assert {s.compared for s in found.steps} == {CFG.depth * a_block}
    for s in found.steps:
        if s.differing == 0:  # then only sums differ: a few units in float32's last place
            assert s.loss_difference < 1e-6
            assert s.zeta < 1e-5
    assert (found.first_flip is None) == all(s.differing == 0 for s in found.steps)


def test_the_first_flip_is_told_with_its_boundary() -> None:
    one = dataclasses.replace(
        mxsim.scheme("exact"), fc2_wgrad_dy=E("mxfp8_e4m3"), fc1_wgrad_dy=E("mxfp4_e2m1")
    )
    cfg = dataclasses.replace(CFG, steps=30)
    found = compare_trajectories(cfg, one, free_running=True)
    flip = found.first_flip
    assert flip is not None
    first = next(s for s in found.steps if s.differing)
    assert flip.step == first.step
    assert flip.site in ("fc2_wgrad_dy", "fc1_wgrad_dy")
    assert flip.cause in ("element", "scale")
    low, high = sorted((flip.cpu, flip.torch))
    assert low <= flip.boundary <= high
    assert max(flip.distances) < 1e-3
    assert f"step {flip.step}" in flip.words
    assert flip.words in found.words


@pytest.mark.parametrize("name", ["exact", "paper_code"])
def test_where_nothing_is_rounded_differently_none_is_told(name: str) -> None:
    cfg = dataclasses.replace(CFG, dtype="float64", steps=4)
    found = compare_trajectories(cfg, mxsim.scheme(name), free_running=True)
    assert found.first_flip is None
    assert max(s.zeta for s in found.steps) < 2.0**-40
    assert "no quantized value differs" in found.words


def neighbours(boundary: float) -> tuple[float, float]:
    """The floats beside a boundary."""
    real = np.float32
    return (
        float(np.nextafter(real(boundary), real(0))),
        float(np.nextafter(real(boundary), real(9))),
    )


@pytest.mark.parametrize(
    ("how", "boundary", "cause"),
    [
        (E("mxfp8_e4m3"), 1.0625, "element"),  # between 1 and 1.125, where 32 is the largest
        (E("mxfp8_e4m3", rounding="zero"), 1.125, "element"),
        (E("mxfp8_e4m3", rounding="away"), 1.0625, "element"),
        (E("bf16"), 1 + 2.0**-8, "element"),
        (E("mxint8"), 1 + 0.25, "element"),  # 32 is 1.0 * 2^5, a step is 2^-1
    ],
)
def test_an_element_beside_a_boundary(how: Any, boundary: float, cause: str) -> None:
    operands = []
    for value in neighbours(boundary):
        x = np.full((2, 32), 0.5, np.float32)
        x[0, 0], x[1, 0] = 32.0, 32.0
        x[1, 7] = value
        operands.append(x)
    flip = flip_of(how, *operands)
    assert (flip.index, flip.cause, flip.boundary) == ((1, 7), cause, boundary)
    assert (flip.cpu, flip.torch) == neighbours(boundary)


@pytest.mark.parametrize(
    ("how", "boundary"),
    [
        (E("mxfp8_e4m3"), 4.0),
        (E("mxfp8_e4m3", scale_rule="rceil"), 3.5),
        (E("mxfp8_e4m3", scale_rule="even"), 4 - 2.0**-3),
        (E("mxfp4_e2m1"), 4.0),
    ],
)
def test_a_scale_beside_a_boundary(how: Any, boundary: float) -> None:
    beside = neighbours(boundary)
    if how.scale_rule == "even":  # the boundary itself is above
        beside = beside[0], boundary
    operands = []
    for value in beside:
        x = np.linspace(-2, 2, 64, dtype=np.float32).reshape(2, 32)
        x[1, 7], x[1, 8] = value, 2.0**-16  # E4M3's smallest at the lower scale
        operands.append(x)
    flip = flip_of(how, *operands)
    assert (flip.index[0], flip.cause, flip.boundary) == (1, "scale", boundary)
    assert (flip.cpu, flip.torch) == beside


def test_a_difference_that_came_with_the_input_is_told_so() -> None:
    a, b = (np.full((1, 4), v, np.float32) for v in (1.0, 1 + 2.0**-7))
    assert flip_of(E("bf16"), a, b).cause == "input"


def test_stochastic_rounding_has_its_boundary_at_the_noise() -> None:
    how, noise = E("mxfp8_e4m3", rounding="stochastic"), mxsim.Noise(3, 1, 5)
    part = (int(noise.bits(1, 7)[0]) >> 8) * 2.0**-24
    operands = []
    for value in (1 + (part - 1e-3) / 8, 1 + (part + 1e-3) / 8):
        x = np.zeros((1, 32), np.float32)
        x[0, 0], x[0, 7] = 1.75, value
        operands.append(x)
    flip = flip_of(how, operands[0], operands[1], noise)
    assert (flip.index, flip.cause) == ((0, 7), "element")
    assert math.isclose(flip.boundary, 1 + part / 8)


def flip_of(how: Any, a: Any, b: Any, noise: Any = None) -> Any:
    site, before = "fc1_fprop_x", (a, b)
    if how.format in mxsim.FORMATS:
        after = tuple(
            mxsim.fake_quantize(
                x, how.format, axis_of(site), None, how.scale_rule, how.rounding, noise=noise
            )
            for x in before
        )
    else:
        after = tuple(mxsim.round_to(x, how.format, how.rounding) for x in before)
    where = differing(site, how, noise, before, (after[0], after[1]))
    return explain(0, site, 0, how, noise, before, (after[0], after[1]), where)
