"""Random bits for stochastic rounding: Philox4x32, a counter-based generator.

The 32 bits of element i are a pure function of (seed, step, tensor, i): no state, so any number of
threads, any order and a resumed run give the same values.  The key is made of the seed by numpy's
SeedSequence.  Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3"
(SC 2011); ten rounds, their default.

Element i lies in window w = i // 1024 at j = i % 1024 and takes word j // 256 of the block that
Philox makes of the counter (c mod 2**32, c // 2**32, step, tensor), c = 256 w + j % 256: in this
order 256 counters fill a window, and the loop over them vectorizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.jit import inlined, kernel
from mxsim.layout import as_integer

Array = NDArray[Any]
Random = tuple[Array, Array, Array]

WINDOW = 1024  # elements filled at once
_LANES = np.uint64(WINDOW // 4)

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_32 = np.uint64(32)


@dataclass(frozen=True)
class Noise:
    """Names a stream of random bits: one for each (seed, step, tensor), all independent.

    Raises TypeError unless all three are integers, ValueError if one is negative, or step or tensor
    2**32 or more.
    """

    seed: int
    step: int = 0
    tensor: int = 0

    def __post_init__(self) -> None:
        for name in ("seed", "step", "tensor"):
            number = as_integer(name, getattr(self, name), "an integer of at least 0")
            if number < 0:
                raise ValueError(f"{name} must be at least 0; got {number}")
            if name != "seed" and number >= 2**32:  # a word of the counter
                raise ValueError(f"{name} must be below 2**32; got {number}")
            object.__setattr__(self, name, number)

    @property
    def words(self) -> NDArray[np.uint64]:
        """(4,): the two key words, step and tensor."""
        return np.array([*_key(self.seed), self.step, self.tensor], np.uint64)

    def bits(self, size: int, start: int = 0) -> NDArray[np.uint32]:
        """The bits of elements start .. start + size - 1, (size,).

        Raises TypeError or ValueError unless both are integers of at least 0.
        """
        for name, value in (("size", size), ("start", start)):
            if as_integer(name, value, "an integer of at least 0") < 0:
                raise ValueError(f"{name} must be at least 0; got {value}")
        first = start // WINDOW
        windows = -(-(start + size) // WINDOW) - first
        filled = np.empty((windows, WINDOW), np.uint32)
        for w in range(windows):
            fill_window(filled[w], first + w, self.words)
        return filled.reshape(-1)[start - first * WINDOW :][:size].copy()


@lru_cache(maxsize=256)
def _key(seed: int) -> tuple[int, int]:
    first, second = np.random.SeedSequence(seed).generate_state(2, np.uint32)
    return int(first), int(second)


@inlined
def _round(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    # Only the low halves of the words count: masks stand where the processor's 32-bit multiplier
    # applies them for nothing, so upper halves are left as they fall.
    p0, p1 = _M0 * (c0 & _LOW), _M1 * (c2 & _LOW)
    return (p1 >> _32) ^ c1 ^ k0, p1, (p0 >> _32) ^ c3 ^ k1, p0


@inlined
def _two_rounds(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    k0, k1 = k0 + _W0, k1 + _W1
    c0, c1, c2, c3 = _round(c0, c1, c2, c3, k0, k1)
    return c0, c1, c2, c3, k0 + _W0, k1 + _W1


@inlined
def philox4x32(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """Ten rounds on a 4 x 32-bit counter with a 2 x 32-bit key; words are low halves of uint64."""
    # Spelled out and inlined: the loop over counters vectorizes only if its body has no call.
    c0, c1, c2, c3, k0, k1 = _two_rounds(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _two_rounds(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _two_rounds(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _two_rounds(c0, c1, c2, c3, k0, k1)
    c0, c1, c2, c3, k0, k1 = _two_rounds(c0, c1, c2, c3, k0, k1)
    return c0, c1, c2, c3


@kernel
def fill_window(out: Any, window: Any, words: Any) -> None:
    """out (1024,) uint32: the bits of the elements of ``window``; words as Noise.words."""
    quarter = out.size // 4
    w0, w1, w2, w3 = (
        out[:quarter],
        out[quarter : 2 * quarter],
        out[2 * quarter : -quarter],
        out[-quarter:],
    )
    first = np.uint64(window) * _LANES
    k0, k1, step, tensor = words[0], words[1], words[2], words[3]
    for lane in range(quarter):
        counter = first + np.uint64(lane)
        a, b, c, d = philox4x32(counter & _LOW, counter >> _32, step, tensor, k0, k1)
        w0[lane] = a
        w1[lane] = b
        w2[lane] = c
        w3[lane] = d


@kernel
def draw(random: Any, start: Any, size: Any) -> Any:
    """Bits of the elements start .. start + size - 1, (size,) uint32: a view until the next call.

    random: (buffer, words, held), see random_source; size at most its ``longest``.
    """
    buffer, words, held = random
    if start < held[0] or start + size > held[1]:
        first = start // WINDOW
        for w in range(buffer.size // WINDOW):
            fill_window(buffer[w * WINDOW : (w + 1) * WINDOW], first + w, words)
        held[0] = first * WINDOW
        held[1] = held[0] + buffer.size
    return buffer[start - held[0] : start - held[0] + size]


def random_source(noise: Noise | Array | None, elements: int, longest: int) -> Random:
    """What ``draw`` draws from: ``noise``, or bits of the caller's (elements,), uint32.

    Returns (buffer, words, held): ``buffer`` has the bits of the elements held[0] .. held[1] - 1,
    of all of them if the caller gave them.  Room for a few windows more than ``longest``, the most
    that is drawn at once, keeps windows from being filled twice.
    """
    if isinstance(noise, Noise):
        windows = min(-(-elements // WINDOW), -(-longest // WINDOW) + 4)
        return np.empty(windows * WINDOW, np.uint32), noise.words, np.zeros(2, np.int64)
    bits = np.empty(0, np.uint32) if noise is None else noise
    return bits, np.zeros(4, np.uint64), np.array([0, bits.size])
