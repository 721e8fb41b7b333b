"""The random words of the PyTorch backend: published answers, and Noise.bits."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import mxsim
from mxsim.backends import torch_philox
from tests.oracle_noise import KNOWN_ANSWERS, MASK, key_of, philox4x32


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_published_answers(
    counter: tuple[int, ...], key: tuple[int, int], output: tuple[int, ...]
) -> None:
    words = torch_philox.philox4x32(*(torch.tensor([c]) for c in counter), *key)
    assert tuple(words.flatten().tolist()) == output


def test_random_counters_and_keys() -> None:
    rng = np.random.default_rng(1)
    counters = rng.integers(0, 2**32, (4, 64))
    counters[:, :16] = rng.choice([0, 1, 2**31 - 1, 2**31, MASK], (4, 16))
    for key in [(0, MASK), (2**31, 12345)]:
        got = torch_philox.philox4x32(*torch.tensor(counters), *key).numpy().T
        want = [philox4x32(tuple(int(c) for c in each), key) for each in counters.T]
        assert np.array_equal(got, want)


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 1023, 1024, 1025, 5000])
def test_bits_are_those_of_noise(size: int) -> None:
    for noise in [mxsim.Noise(0), mxsim.Noise(7, 3, 2), mxsim.Noise(2**70, MASK, MASK)]:
        got = torch_philox.noise_bits(noise, size)
        assert got.dtype == torch.int64
        assert np.array_equal(got.numpy(), noise.bits(size))


def test_step_and_tensor_may_be_tensors() -> None:
    """So that a graph captured once serves every step."""
    key = torch_philox.key_words(5)
    assert key == key_of(5)
    step = torch.tensor(3)
    for at in (3, MASK):
        step.fill_(at)
        got = torch_philox.philox_bits(1500, key, step, torch.tensor(9))
        assert np.array_equal(got.numpy(), mxsim.Noise(5, at, 9).bits(1500))
