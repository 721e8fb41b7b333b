"""A backend with a bug that somebody had is caught by the case that shows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mxsim
from mxsim import minimal
from mxsim.crosscheck.backend import Backend, Result, arguments, numba_backend
from mxsim.crosscheck.case import ROUNDINGS, RULES, Array, Case, Config
from mxsim.crosscheck.corpus import corpus
from mxsim.crosscheck.known import Known
from mxsim.crosscheck.matrix import check, compare
from mxsim.crosscheck.reference import SPECS, judge, magnitudes, shared_exponents
from mxsim.philox import Noise


def names(*parts: str) -> list[Case]:
    """The cases in whose name one of the parts is."""
    return [case for case in corpus() if any(part in case.name for part in parts)]


def values_with(x: Array, config: Config, exponent: Array, rounding: str = "even") -> Array:
    """Elements of x under given scale exponents, by minimal.py's rounding (E4M3, E2M1)."""
    spec = SPECS[config.fmt]
    largest = magnitudes(spec)[spec.largest_code]
    rounded = minimal.round_elements(
        np.ldexp(x.astype(np.float64), -exponent), spec.man_bits, 1 - spec.emin, rounding
    )
    with np.errstate(over="ignore"):
        values = np.ldexp(np.clip(rounded, -largest, largest), exponent)
        return np.asarray(values.astype(config.result_dtype))


def float_log2(x: Array, config: Config) -> Array:
    with np.errstate(divide="ignore"):
        log = np.log2(np.abs(x).max(-1, keepdims=True))
    exponent = np.clip(np.floor(log) - SPECS[config.fmt].emax, -127, 127)
    return values_with(x, config, exponent.astype(int))


def numba_but(**changed: Any) -> Callable[[Array, Config], Array]:
    def run(x: Array, config: Config) -> Array:
        return np.asarray(mxsim.fake_quantize(x, config.fmt, **(arguments(config) | changed)))

    return run


def scale_off_by_one(x: Array, config: Config) -> Array:
    return values_with(x, config, shared_exponents(x, config) + 1)


def nan_lost(x: Array, config: Config) -> Array:
    return numba_but()(np.nan_to_num(x, nan=0.0), config)


def byte_0_as_zero(x: Array, config: Config) -> Array:
    q = mxsim.quantize(x, config.fmt, **arguments(config))
    spread = q.blocks.spread(q.scales, q.shape)
    return np.where(spread == 0, x * np.float32(0), q.dequantize())


def narrowed_maximum(x: Array, config: Config) -> Array:
    return values_with(x, config, shared_exponents(mxsim.round_to(x, "bf16"), config))


def straddling_blocks(x: Array, config: Config) -> Array:
    flat = mxsim.fake_quantize(x.reshape(-1), config.fmt, **arguments(config))
    return np.asarray(flat.reshape(x.shape))


def rounded_through_float32(x: Array, config: Config) -> Array:
    return numba_but()(x.astype(np.float32), config).astype(np.float64)


def subnormals_flushed(x: Array, config: Config) -> Array:
    values, spec = numba_but()(x, config), SPECS[config.fmt]
    smallest = np.ldexp(1.0, shared_exponents(x, config) + spec.emin)
    return np.where(np.abs(values) < smallest, x * np.float32(0), values)


def zero_sign_lost(x: Array, config: Config) -> Array:
    return numba_but()(x, config) + np.float32(0)


def square_numba(x: Array, config: Config) -> Array:
    return np.asarray(mxsim.fake_quantize(x.T, config.fmt, **arguments(config)).T)


def one_stream(x: Array, config: Config) -> Array:
    return numba_but(noise=Noise(config.noise[0] if config.noise else 0))(x, config)


def generator(x: Array, config: Config) -> Array:
    """Bits of a generator that is started anew for every tensor."""
    bits = np.random.default_rng(0).integers(0, 2**32, x.shape, np.uint32)
    return numba_but(noise=bits)(x, config)


BROKEN: dict[str, tuple[Callable[[Array, Config], Array], str, str]] = {
    # what is broken: (how, rounding, cases that must show it)
    "exponent by a float log2": (float_log2, "even", "just below a power of two"),
    "ties away": (numba_but(rounding="away"), "even", "ties of E2M1"),
    "truncation": (numba_but(rounding="zero"), "even", "normal, float32"),
    "scale off by one": (scale_off_by_one, "even", "957 comes out as 896"),
    "another scale rule": (numba_but(scale_rule="even"), "even", "clustered gains"),
    "NaN lost": (nan_lost, "even", "a NaN in the block"),
    "infinities saturate": (numba_but(nonfinite="saturate"), "even", "an infinity in the block"),
    "byte 0 read as zero": (byte_0_as_zero, "even", "byte 0"),
    "maximum narrowed to bfloat16": (narrowed_maximum, "even", "narrowed before"),
    "transposed blocks": (square_numba, "even", "along axis 0"),
    "blocks that straddle rows": (straddling_blocks, "even", "partial last blocks"),
    "blocks of 16": (numba_but(block_size=16), "even", "log-normal, float32"),
    "float64 through float32": (rounded_through_float32, "even", "rounded twice"),
    "subnormal elements flushed": (subnormals_flushed, "even", "steps of subnormal"),
    "sign of zero lost": (zero_sign_lost, "even", "all zeros, both signs"),
    "one stream for every step and tensor": (one_stream, "stochastic", "log-normal, float32"),
    "a generator started anew": (generator, "stochastic", "normal, float32"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_backend_is_caught(what: str) -> None:
    how, rounding, shown_by = BROKEN[what]
    fmt = "mxfp4_e2m1" if "E2M1" in shown_by else "mxfp8_e4m3"

    def can_run(config: Config) -> Any:
        return (config.rule, config.rounding) == ("floor", rounding) or "not broken there"

    backend = Backend("broken", "", can_run, lambda x, config: Result(how(x, config)))
    matrix = check(names(shown_by), [backend], formats=(fmt,))
    assert matrix.unexplained
    assert matrix.cells["broken", (fmt, "floor", rounding)].failed >= 1
    example = matrix.unexplained[0].examples[0]
    assert shown_by in example.case
    # The numbers of the report are the case's and the judge's own.
    [case] = [case for case in corpus() if case.name == example.case]
    config = case.config(fmt, "floor", rounding)
    got, right = how(case.x, config)[example.index], judge(case.x, config)
    specified = right.values_as(config.result_dtype)[example.index]
    assert float(got).hex() in example.got or str(got) in example.got
    assert float(specified).hex() in example.specified or str(specified) in example.specified
    assert not np.array_equal(np.float64(got).view(np.int64), np.float64(specified).view(np.int64))


def test_rounding_under_given_exponents_is_right_itself() -> None:
    """Under the judge's own exponents it agrees, so that what it breaks is the exponent alone."""
    backend = Backend(
        "sound",
        "",
        lambda config: config.rounding == "even" or "to even only",
        lambda x, config: Result(values_with(x, config, shared_exponents(x, config))),
    )
    cases = names("just below", "957", "narrowed", "ties of E2M1", "block maxima")
    assert not check(cases, [backend], formats=("mxfp8_e4m3", "mxfp4_e2m1")).unexplained


def test_wrong_codes_scales_forms_and_exceptions_are_caught() -> None:
    right, [case] = numba_backend(), names("957")

    def ran(spoil: Callable[[Result], Result]) -> str:
        backend = Backend("b", "", right.can_run, lambda x, config: spoil(right.run(x, config)))
        matrix = check([case], [backend], formats=("mxfp8_e4m3",))
        assert len(matrix.unexplained) == len(RULES) * len(ROUNDINGS)
        example = matrix.unexplained[0].examples[0]
        return f"{example.what}: {example.got}"

    def raising(result: Result) -> Result:
        raise ZeroDivisionError("by zero")

    def with_codes(result: Result) -> Result:
        assert result.codes is not None
        return dataclasses.replace(result, codes=result.codes ^ 1)

    def with_scales(result: Result) -> Result:
        assert result.scales is not None
        return dataclasses.replace(result, scales=result.scales + np.uint8(1))

    assert "codes 127, scales 128" in ran(with_codes)  # 957 is 448 * 2: 126
    assert "codes 126, scales 129" in ran(with_scales)
    assert "float64" in ran(lambda r: dataclasses.replace(r, values=r.values.astype("f8")))
    assert "(32, 2)" in ran(lambda r: dataclasses.replace(r, values=r.values.T))
    assert "ZeroDivisionError: by zero" in ran(raising)


def test_a_known_difference_covers_no_other_value() -> None:
    """At the very elements that may differ, a value far off, or another scale, is unexplained."""
    entry = Known(
        name="anything odd",
        backend="odd",
        where=lambda config, x, judged: np.ones(x.shape, bool),
        why="for the test",
        right="the specification",
        source="none",
    )
    case = next(case for case in corpus() if case.name == "957 comes out as 896")
    config = next(c for c in case.configs(("mxfp8_e4m3",)) if c.rounding == "even")
    judged = judge(case.x, config)
    right = judged.values_as(config.result_dtype)
    assert judged.codes is not None
    assert judged.scales is not None
    for values, scales, explained in (
        (right * 2, judged.scales, True),
        (right * 3, judged.scales, False),
        (-right, judged.scales, False),
        (right, judged.scales + 1, True),
        (right, judged.scales + 2, False),
    ):
        result = Result(values.astype(right.dtype), codes=None, scales=scales.astype(np.uint8))
        odd = Backend("odd", "1", lambda config: True, lambda x, config, r=result: r)  # type: ignore[misc]
        found = compare(odd, case.x, config, judged, (entry,))
        assert (None not in [known for known, _, _ in found]) == explained
