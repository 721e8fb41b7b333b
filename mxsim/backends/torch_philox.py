"""The random bits of mxsim.Noise in PyTorch: Philox4x32-10, counter-based, on any device.

The layout of the bits is that of ``mxsim.philox``: element i lies in window i // 1024 at
j = i % 1024 and takes word j // 256 of the block of counter 256 * (i // 1024) + j % 256.
PyTorch has hardly any arithmetic of unsigned 32 bits, so words lie in the low half of an int64.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mxsim.philox import Noise

Tensor = Any

LOW = 2**32 - 1
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # of the golden ratio, and of sqrt(3) - 1
WINDOW, LANES, ROUNDS = 1024, 256, 10


def noise_bits(noise: Noise, size: int, device: Any = None) -> Tensor:
    """The bits of elements 0 .. size - 1, (size,) int64 in 0 .. 2**32 - 1: Noise.bits(size)."""
    return philox_bits(size, key_words(noise.seed), noise.step, noise.tensor, device)


@torch.compiler.assume_constant_result
def key_words(seed: int) -> tuple[int, int]:
    """The two words of the key, which NumPy's SeedSequence makes of a seed."""
    first, second = np.random.SeedSequence(seed).generate_state(2, np.uint32)
    return int(first), int(second)


def philox_bits(
    size: int, key: tuple[int, int], step: Any = 0, tensor: Any = 0, device: Any = None
) -> Tensor:
    """Bits of elements 0 .. size - 1, (size,) int64, under a key.

    step, tensor: ints, or int64 tensors of one entry on ``device``, which a captured CUDA graph
    can be replayed with; both below 2**32.
    """
    windows = -(-size // WINDOW)
    counter = torch.arange(windows * LANES, dtype=torch.int64, device=device)
    high = counter >> 32
    words = philox4x32(counter & LOW, high, high * 0 + step, high * 0 + tensor, *key)
    return words.view(4, windows, LANES).transpose(0, 1).reshape(-1)[:size]


@torch.library.custom_op(
    "mxsim::philox4x32",
    mutates_args=(),
    schema="(Tensor c0, Tensor c1, Tensor c2, Tensor c3, int k0, int k1) -> Tensor",
)
def philox4x32(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int, k1: int) -> Tensor:
    """The four output words, (4, n), of counters c of four words under a key k, (n,) int64 each.

    One operation to a compiler: Inductor would substitute ten rounds into each other, for minutes.
    """
    for _ in range(ROUNDS):
        high0, low0 = _product(c0, MULTIPLIERS[0])
        high1, low1 = _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = _mix(high1, c1, k0), low1, _mix(high0, c3, k1), low0
        k0, k1 = (k0 + KEY_STEPS[0]) & LOW, (k1 + KEY_STEPS[1]) & LOW
    return torch.stack((c0, c1 & LOW, c2, c3 & LOW))


@philox4x32.register_fake
def _(c0: Tensor, c1: Tensor, c2: Tensor, c3: Tensor, k0: int, k1: int) -> Tensor:
    return c0.new_empty((4, *c0.shape))


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """(high, low) words of a product of 64 bits, their low halves right.

    A multiplier of 32 bits less 2**32 lies within 30 bits and a sign, so that no product leaves
    int64; what it lacks is word * 2**32, which belongs to the high word.
    """
    low = word * (multiplier - 2**32)
    return (low >> 32).add_(word), low


def _mix(high: Tensor, word: Tensor, key: int) -> Tensor:
    return high.bitwise_xor_(word).bitwise_xor_(key).bitwise_and_(LOW)
