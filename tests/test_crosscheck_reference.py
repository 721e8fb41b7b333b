"""The judge of the cross-check (integers) against the oracle (fractions and searches)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mxsim.crosscheck.case import E8M0_FORMATS, OWN, ROUNDINGS, RULES, Case
from mxsim.crosscheck.reference import judge
from tests import inputs, inputs_blocks, oracle_blocks, oracle_elements, oracle_noise
from tests.comparing import assert_same_bits


def oracle_of(case: Case, fmt: str, rule: str, rounding: str, scalar: bool) -> Any:
    config = case.config(fmt, rule, rounding)
    noise = config.noise or (0, 0, 0)
    bits = oracle_noise.noise_bits(case.x.size, *noise).reshape(case.x.shape)
    element = "nvfp4" if fmt == "nvfp4" else oracle_elements.ELEMENTS[fmt]
    return oracle_blocks.quantize(
        case.x,
        element,
        config.axis,
        config.block_size or 1,
        "floor" if rule == OWN else rule,
        rounding,
        bits if rounding == "stochastic" else None,
        case.nonfinite,
        scalar,
    )


def assert_judged_as_the_oracle(case: Case, fmt: str, scalar: bool = False) -> None:
    for config in case.configs((fmt,)):
        got = judge(case.x, config)
        expected = oracle_of(case, fmt, config.rule, config.rounding, scalar)
        assert got.codes is not None
        assert got.scales is not None
        assert_same_bits(got.scales, expected.scales, f"{config} scales")
        assert_same_bits(got.codes, expected.codes, f"{config} codes", case.x)
        assert_same_bits(got.values, expected.values.astype(np.float64), str(config), case.x)


@pytest.mark.parametrize("nonfinite", ["propagate", "saturate"])
@pytest.mark.parametrize("fmt", E8M0_FORMATS)
def test_random_bits_scalar_oracle(fmt: str, nonfinite: str) -> None:
    x = inputs.random_near(np.float64, 6).copy()
    x[1, 3], x[2, 5], x[3, 0:2] = np.nan, -np.inf, 0
    case = Case("near", x, "", block_size=(2, 9), nonfinite=nonfinite, noise=(3, 4, 5))
    assert_judged_as_the_oracle(case, fmt, scalar=True)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("fmt", E8M0_FORMATS)
def test_maxima_and_random_bits(fmt: str, dtype: Any) -> None:
    assert_judged_as_the_oracle(Case("bits", inputs.random_bits(dtype, 32).copy(), ""), fmt)
    maxima = inputs.maxima_blocks(dtype)[::7].copy()
    assert_judged_as_the_oracle(Case("maxima", maxima, "", noise=(1, 2**31, 2**32 - 1)), fmt)


@pytest.mark.parametrize("name", list(inputs_blocks.tensors(np.float32)))
def test_nvfp4(name: str) -> None:
    for axis, nonfinite in ((0, "propagate"), (-1, "saturate")):
        x = inputs_blocks.tensors(np.float32)[name]
        assert_judged_as_the_oracle(Case(name, x, "", axis=axis, nonfinite=nonfinite), "nvfp4")


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(("fmt", "bits"), [("bf16", (8, 7)), ("fp16", (5, 10))])
def test_elementwise(fmt: str, bits: tuple[int, int], rounding: str) -> None:
    x = np.concatenate([inputs.random_bits(np.float64, 8), inputs.random_near(np.float64, 8)])
    x[0, :6] = 65520, 65519.99, 3.3961775e38, 2.0**-150, 0.0, -0.0
    case = Case("elements", x, "", noise=(5, 6, 7))
    config = case.config(fmt, OWN, rounding)
    random = oracle_noise.noise_bits(x.size, 5, 6, 7).reshape(x.shape)
    element = oracle_elements.Element(*bits, "ieee")
    expected = oracle_elements.round_to_all(element, x, rounding, random)
    assert_same_bits(judge(x, config).values, expected, str(config), x)


def test_every_rule_and_rounding_is_judged() -> None:
    case = Case("any", np.ones((2, 32), np.float32), "")
    assert len(list(case.configs(("mxint8",)))) == len(RULES) * len(ROUNDINGS)
    assert len(list(case.configs(("nvfp4",)))) == len(ROUNDINGS)
