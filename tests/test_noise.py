"""The random bits of stochastic rounding: Philox against its definition, and how they look."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

import mxsim
from tests import oracle_noise
from tests.comparing import assert_same_bits
from tests.inputs import Array

N = 100_000


def uniform(noise: mxsim.Noise, size: int = N) -> Array:
    """The u that rounding compares with, in [0, 1)."""
    return (noise.bits(size) >> np.uint32(8)) / 2.0**24


def assert_uncorrelated(a: Array, b: Array, what: str = "") -> None:
    """Correlation of two samples of independent numbers: of order 1 / sqrt(n)."""
    correlation = float(np.corrcoef(a, b)[0, 1])
    assert abs(correlation) < 4 / math.sqrt(len(a)), f"{what}: {correlation}"


@pytest.mark.parametrize("size", [0, 1, 2, 255, 256, 257, 1023, 1024, 1025, 5000])
def test_bits_of_every_size(size: int) -> None:
    bits = mxsim.Noise(1).bits(size)
    assert_same_bits(bits, oracle_noise.noise_bits(size, 1))


@pytest.mark.parametrize(
    ("seed", "step", "tensor"),
    [(0, 0, 0), (1, 2, 3), (2**32, 2**31, 2**32 - 1), (2**64 + 5, 7, 0), (5, 10**6, 99)],
)
def test_bits_of_a_seed_step_and_tensor(seed: int, step: int, tensor: int) -> None:
    want = oracle_noise.noise_bits(1500, seed, step, tensor)
    assert_same_bits(mxsim.Noise(seed, step, tensor).bits(1500), want)
    assert_same_bits(mxsim.Noise(seed, step=step, tensor=tensor).bits(1500), want)


@pytest.mark.parametrize(
    "start", [1, 255, 1000, 1023, 1024, 4095, 2**31 - 3, 2**34 - 700, 2**34 + 5, 2**40 + 77]
)
def test_bits_from_anywhere(start: int) -> None:
    # 2^34: the counter leaves its first word
    want = oracle_noise.noise_bits(1400, 9, 1, 2, start)
    assert_same_bits(mxsim.Noise(9, 1, 2).bits(1400, start), want)
    assert_same_bits(mxsim.Noise(9, 1, 2).bits(3, start=start), want[:3])


def test_a_stream_does_not_change_from_one_version_to_the_next() -> None:
    # written down once; a seed in a paper must mean these numbers for ever
    words = [524788716, 3953380489, 3872502689, 3457535184]
    assert mxsim.Noise(0).bits(4).tolist() == words
    key = (2968811710, 3677149159)  # of seed 0
    assert [oracle_noise.philox4x32((c, 0, 0, 0), key)[0] for c in range(4)] == words
    words = [2487769917, 1317949875, 2027749270, 673796982]
    assert mxsim.Noise(0, step=1, tensor=2).bits(4).tolist() == words
    assert [oracle_noise.philox4x32((c, 0, 1, 2), key)[0] for c in range(4)] == words


def test_it_is_a_value() -> None:
    assert mxsim.Noise(1, 2, 3) == mxsim.Noise(1, 2, 3)
    assert len({mxsim.Noise(1, 2, 3), mxsim.Noise(1, 2, 3), mxsim.Noise(1, 3, 2)}) == 2
    first = mxsim.Noise(1).bits(10)
    assert_same_bits(mxsim.Noise(1).bits(10), first)


@pytest.mark.parametrize("shift", [1, 2, 3, 16, 32, 64, 255, 256, 257, 512, 768, 1024, 2048])
def test_C11_neighbours_and_blocks_are_uncorrelated(shift: int) -> None:
    # a counter hashed too little: neighbours, or the four words of a counter, go together
    u = uniform(mxsim.Noise(17))
    assert_uncorrelated(u[:-shift], u[shift:], f"shift {shift}")
    low, high = (u < 0.1).astype(float), (u > 0.9).astype(float)
    assert_uncorrelated(low[:-shift], low[shift:], f"below 0.1, shift {shift}")
    assert_uncorrelated(low[:-shift], high[shift:], f"below 0.1 and above 0.9, shift {shift}")


def test_C11_steps_tensors_and_seeds_are_uncorrelated() -> None:
    # one seed for many tensors, or a step that only shifts the stream
    keys = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1), (0, 2, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0)]
    streams = [uniform(mxsim.Noise(*key)) for key in keys]
    for (i, a), (j, b) in itertools.combinations(enumerate(streams), 2):
        assert_uncorrelated(a, b, f"{keys[i]} and {keys[j]}")
        for shift in (1, 256, 1024):
            assert_uncorrelated(a[shift:], b[:-shift], f"{keys[i]}, {keys[j]} shifted {shift}")


def test_C11_every_bit_is_fair_and_every_value_as_likely() -> None:
    bits = mxsim.Noise(18).bits(N)
    for k in range(32):
        share = float((bits >> np.uint32(k) & np.uint32(1)).mean())
        assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(N), k
    counts = np.bincount(bits >> np.uint32(24), minlength=256)
    chi_square = float(((counts - N / 256) ** 2 / (N / 256)).sum())
    assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


@pytest.mark.parametrize("field", ["step", "tensor"])
def test_words_that_would_spill_into_the_next_are_refused(field: str) -> None:
    # each is one word of the counter
    with pytest.raises(ValueError, match=rf"{field} must be below 2\*\*32; got 4294967296"):
        mxsim.Noise(0, **{field: 2**32})
    mxsim.Noise(2**70, **{field: 2**32 - 1})
