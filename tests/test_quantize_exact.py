"""Kernels against the oracle, bit for bit, on inputs chosen to be hard.

Every format, scale rule and rounding, float32 and float64: ties, powers of two, thresholds, random
bit patterns, every axis, partial blocks. Rounding to bf16 and fp16 is in test_round_to.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mxsim
from tests import inputs, oracle
from tests.comparing import (
    SCHEMES,
    Scheme,
    assert_agrees_with_oracle,
    assert_same_bits,
    scheme_id,
)
from tests.test_oracle import ML_DTYPES

each_scheme = pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
each_dtype = pytest.mark.parametrize("dtype", inputs.DTYPES)


@each_dtype
@each_scheme
def test_ties_and_their_neighbours(scheme: Scheme, dtype: Any) -> None:
    for exponent in inputs.scale_exponents(scheme.fmt, dtype):
        assert_agrees_with_oracle(inputs.tie_blocks(scheme.fmt, dtype, exponent), scheme)


@pytest.mark.parametrize("fmt", oracle.FORMATS)
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
@each_dtype
def test_ties_against_the_scalar_oracle(fmt: str, rounding: str, dtype: Any) -> None:
    x = inputs.tie_blocks(fmt, dtype, 0)[::2]
    scheme = Scheme(fmt, "floor", rounding)
    assert_agrees_with_oracle(x, scheme, rows=oracle.quantize_rows)


@each_dtype
@each_scheme
def test_block_maxima_at_every_power_of_two_and_threshold(scheme: Scheme, dtype: Any) -> None:
    assert_agrees_with_oracle(inputs.maxima_blocks(dtype), scheme, block_size=3)


@each_dtype
@each_scheme
def test_random_bit_patterns(scheme: Scheme, dtype: Any) -> None:
    assert_agrees_with_oracle(inputs.random_bits(dtype), scheme)


@each_dtype
@each_scheme
def test_random_elements_within_twenty_binades_of_the_maximum(scheme: Scheme, dtype: Any) -> None:
    assert_agrees_with_oracle(inputs.random_near(dtype), scheme)


@pytest.mark.parametrize("block_size", [1, 3, 16, 32, 33, 67])  # 67 is the whole axis
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
@each_dtype
def test_axes_and_partial_blocks(axis: int, block_size: int, dtype: Any) -> None:
    lengths = [4, 3, 5]
    lengths[axis] = 67
    x = inputs.random_near(dtype).ravel()[: np.prod(lengths)].reshape(lengths).copy()
    x.ravel()[[5, 200, -1]] = np.nan, np.inf, -0.0
    for scheme in SCHEMES:
        assert_agrees_with_oracle(x, scheme, axis, block_size)


@pytest.mark.parametrize("shape", [(40,), (2, 3, 4, 33), (1, 1), (2, 0, 3), (0, 5), (9, 1300)])
@each_dtype
def test_shapes_from_one_axis_to_four_empty_and_wide(shape: tuple[int, ...], dtype: Any) -> None:
    x = inputs.random_near(dtype).ravel()[: np.prod(shape)].reshape(shape)
    for axis in range(-len(shape), len(shape)):
        for scheme in SCHEMES[::5]:  # every name occurs
            assert_agrees_with_oracle(x, scheme, axis, block_size=4)


@pytest.mark.parametrize("fmt", oracle.FORMATS)
@pytest.mark.parametrize("rule", oracle.SCALE_RULES)
@each_dtype
def test_every_code_round_trips(fmt: str, rule: str, dtype: Any) -> None:
    codes = np.array(oracle.finite_codes(fmt), np.uint8)
    decoded = [oracle.decode(fmt, int(code)) for code in codes]
    values = np.array([float(-v if negative else v) for negative, v in decoded])
    values = np.copysign(values, [-1.0 if negative else 1.0 for negative, _ in decoded])
    # the scale of this block is 1 when its maximum is the largest (ceil: when it is 2^emax)
    pin = 2.0 ** oracle.emax(fmt) if rule == "ceil" else float(oracle.largest(fmt))
    kept = np.abs(values) <= pin
    codes, values = codes[kept], values[kept]
    for exponent in inputs.scale_exponents(fmt, dtype):
        x = (values * 2.0**exponent).astype(dtype)
        for rounding in oracle.ROUNDINGS:
            q = mxsim.quantize(x, fmt, -1, x.size, rule, rounding)
            assert q.scales.tolist() == [exponent + 127]
            assert_same_bits(q.codes, codes, f"{fmt} {rule} {rounding} 2^{exponent}", x)
            assert_same_bits(q.dequantize(dtype), x, f"{fmt} {rule} {rounding} 2^{exponent}", x)


@pytest.mark.parametrize("fmt", ML_DTYPES)
def test_element_codes_against_ml_dtypes(fmt: str) -> None:
    # only values in range (past the largest its casts overflow or saturate by format), only float32
    # (it rounds float64 twice), only ties to even
    largest = float(oracle.largest(fmt))
    ties = inputs.with_neighbours(inputs.ties(fmt).astype(np.float32))
    spread = np.random.default_rng(4).normal(0, largest / 3, 50_000).astype(np.float32)
    points = np.concatenate([ties, -ties, spread, spread / np.float32(1000)])
    points = points[np.abs(points) <= largest]
    x = np.append(points, np.float32(largest))
    q = mxsim.quantize(x, fmt, block_size=x.size)
    assert q.scales.tolist() == [127]
    assert_same_bits(q.codes, x.astype(ML_DTYPES[fmt]).view(np.uint8), fmt, x)
