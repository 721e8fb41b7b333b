"""The oracle itself, against the specification's values, ml_dtypes, and its vectorised twin."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests import inputs, oracle
from tests.comparing import SCHEMES, Scheme, assert_same_bits, scheme_id
from tests.oracle import pow2

ML_DTYPES: dict[str, Any] = {
    "mxfp8_e4m3": ml_dtypes.float8_e4m3fn,
    "mxfp8_e5m2": ml_dtypes.float8_e5m2,
    "mxfp6_e3m2": ml_dtypes.float6_e3m2fn,
    "mxfp6_e2m3": ml_dtypes.float6_e2m3fn,
    "mxfp4_e2m1": ml_dtypes.float4_e2m1fn,
}


def test_format_table_of_the_specification() -> None:
    # OCP MX v1.0 tables 2 to 6: emax, largest, smallest normal (INT8: none), smallest positive
    table = {
        "mxfp8_e4m3": (8, 448, pow2(-6), pow2(-9)),
        "mxfp8_e5m2": (15, 57344, pow2(-14), pow2(-16)),
        "mxfp6_e3m2": (4, 28, Fraction(1, 4), Fraction(1, 16)),
        "mxfp6_e2m3": (2, Fraction(15, 2), 1, Fraction(1, 8)),
        "mxfp4_e2m1": (2, 6, 1, Fraction(1, 2)),
        "mxint8": (0, Fraction(127, 64), None, Fraction(1, 64)),
    }
    for fmt, (emax, largest, smallest_normal, smallest) in table.items():
        assert oracle.emax(fmt) == emax
        assert oracle.largest(fmt) == largest
        assert oracle.magnitudes(fmt)[0] == 0
        assert oracle.magnitudes(fmt)[1] == smallest
        if smallest_normal is not None:
            first = 2 ** oracle.ELEMENTS[fmt].mantissa_bits
            assert oracle.magnitudes(fmt)[first] == smallest_normal


@pytest.mark.parametrize("fmt", oracle.FLOAT_FORMATS)
def test_every_code_decodes_as_in_ml_dtypes(fmt: str) -> None:
    for code in range(2 * oracle.ELEMENTS[fmt].sign_bit):
        witness = float(np.array([code], np.uint8).view(ML_DTYPES[fmt])[0])
        if np.isfinite(witness):
            negative, magnitude = oracle.decode(fmt, code)
            assert float(magnitude) == abs(witness)
            assert negative == np.signbit(witness)
        else:
            with pytest.raises(ValueError, match=f"code {code:#x}"):
                oracle.decode(fmt, code)


def test_int8_codes_are_64ths_in_twos_complement() -> None:
    for k in range(-127, 128):
        assert oracle.decode("mxint8", k & 0xFF) == (k < 0, Fraction(abs(k), 64))


def test_rounding_by_eye() -> None:
    grid = [Fraction(value) for value in (0, 1, 2, 3)]
    halves = [Fraction(n, 2) for n in range(8)]
    rounded = {
        rounding: [oracle.round_magnitude(half, grid, rounding) for half in halves]
        for rounding in oracle.ROUNDINGS
    }
    #                  0  .5 1  1.5 2 2.5 3 3.5
    assert rounded == {
        "even": [0, 0, 1, 2, 2, 2, 3, 3],
        "away": [0, 1, 1, 2, 2, 3, 3, 3],
        "zero": [0, 0, 1, 1, 2, 2, 3, 3],
    }


def test_scale_exponent_by_eye() -> None:
    # E4M3, amax / 2^8 in [1, 2): rceil moves after 1.75, ceil after 1, even at 1.9375
    exponents = {
        1.0: {"floor": 0, "ceil": 0, "rceil": 0, "even": 0},
        1.001: {"floor": 0, "ceil": 1, "rceil": 0, "even": 0},
        1.75: {"floor": 0, "ceil": 1, "rceil": 0, "even": 0},
        1.751: {"floor": 0, "ceil": 1, "rceil": 1, "even": 0},
        1.9374: {"floor": 0, "ceil": 1, "rceil": 1, "even": 0},
        1.9375: {"floor": 0, "ceil": 1, "rceil": 1, "even": 1},
        1.999: {"floor": 0, "ceil": 1, "rceil": 1, "even": 1},
    }
    for mantissa, expected in exponents.items():
        amax = Fraction(mantissa) * 256
        found = {rule: oracle.scale_exponent("mxfp8_e4m3", rule, amax) for rule in expected}
        assert found == expected, mantissa


def test_bf16_and_fp16_against_ml_dtypes_and_numpy() -> None:
    x = np.concatenate([inputs.random_bits(np.float32).ravel(), inputs.block_maxima(np.float32)])
    with np.errstate(over="ignore", invalid="ignore"):
        witnesses = {"bf16": x.astype(ml_dtypes.bfloat16), "fp16": x.astype(np.float16)}
        for name, witness in witnesses.items():
            expected = witness.astype(np.float64)
            assert_same_bits(oracle.round_ieee_bulk(name, x, "even"), expected, name, x)


@pytest.mark.parametrize("name", oracle.IEEE)
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
def test_bulk_ieee_rounding_equals_the_scalar_one(name: str, rounding: str) -> None:
    grid = oracle.ieee_grid_array(name)
    middle = inputs.with_neighbours((grid[1:] + grid[:-1]) / 2)
    chosen = np.concatenate([middle[::499], grid[-2:], [0.0, -0.0, 1e300, -1e-300, np.inf, np.nan]])
    scalar = np.array([oracle.round_ieee(name, value, rounding) for value in chosen.tolist()])
    assert_same_bits(oracle.round_ieee_bulk(name, chosen, rounding), scalar, name, chosen)


@pytest.mark.parametrize("scheme", SCHEMES, ids=scheme_id)
@pytest.mark.parametrize("dtype", inputs.DTYPES)
def test_bulk_quantization_equals_the_scalar_one(scheme: Scheme, dtype: Any) -> None:
    fmt, rule, rounding = scheme
    near, bits = inputs.random_near(dtype)[::70], inputs.random_bits(dtype)[::70]
    for x in (near, bits, inputs.maxima_blocks(dtype)[::97], inputs.tie_blocks(fmt, dtype, 0)[::9]):
        bulk = oracle.quantize_rows_bulk(x, fmt, rule, rounding)
        scalar = oracle.quantize_rows(x, fmt, rule, rounding)
        assert_same_bits(bulk.scales, scalar.scales, "scales")
        assert_same_bits(bulk.codes, scalar.codes, "codes", x)
        assert_same_bits(bulk.values, scalar.values, "values", x)


@pytest.mark.parametrize("fmt", oracle.FORMATS)
@pytest.mark.parametrize("rounding", oracle.ROUNDINGS)
def test_bulk_rounding_equals_the_scalar_one_at_every_tie(fmt: str, rounding: str) -> None:
    points = inputs.with_neighbours(inputs.ties(fmt))
    bulk = oracle.round_bulk(points, oracle.grid_array(fmt), rounding)
    for point, index in zip(points.tolist(), bulk.tolist(), strict=True):
        grid = oracle.magnitudes(fmt)
        assert oracle.round_magnitude(Fraction(point), grid, rounding) == index
