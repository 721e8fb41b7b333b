"""Philox4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011) in Python integers, and the bits it gives.

The bits of element i of an array depend on seed, step, tensor and i alone. A window of 1024
elements takes 256 counters; its first 256 elements take word 0 of each, the next 256 word 1, ...
"""

from __future__ import annotations

from functools import cache

import numpy as np

from tests.oracle import Array

Words = tuple[int, ...]

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # of the golden ratio and of sqrt(3) - 1
MASK = 0xFFFFFFFF

WINDOW, COUNTERS = 1024, 256

# (counter, key, output) as published with the generator
KNOWN_ANSWERS: tuple[tuple[Words, Words, Words], ...] = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def philox4x32(counter: Words, key: Words, rounds: int = 10) -> Words:
    """The four output words of a counter under a key."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        high0, low0 = divmod(MULTIPLIERS[0] * c0, 2**32)
        high1, low1 = divmod(MULTIPLIERS[1] * c2, 2**32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & MASK, (k1 + WEYL[1]) & MASK
    return c0, c1, c2, c3


@cache
def key_of(seed: int) -> Words:
    """NumPy's own mixing of a seed, documented to stay as it is."""
    return tuple(int(word) for word in np.random.SeedSequence(seed).generate_state(2))


@cache
def counter_words(counter: int, step: int, tensor: int, key: Words) -> Words:
    return philox4x32((counter & MASK, counter >> 32, step, tensor), key)


def element_bits(index: int, step: int, tensor: int, key: Words) -> int:
    window, j = divmod(index, WINDOW)
    word, offset = divmod(j, COUNTERS)
    return counter_words(COUNTERS * window + offset, step, tensor, key)[word]


def noise_bits(size: int, seed: int, step: int = 0, tensor: int = 0, start: int = 0) -> Array:
    """The bits of elements start ... start + size - 1."""
    key = key_of(seed)
    return np.array([element_bits(start + i, step, tensor, key) for i in range(size)], np.uint32)
