"""Element codes as bytes without gaps, and which codes, scales and lengths there can be.

What callers and files hand in as bits is checked here; decoding is in mxarray.py.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mxsim.formats import BlockFormat, IntFormat
from mxsim.layout import as_array, as_integer


def pack_bits(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """codes (n,) of ``bits`` bits each -> (ceil(n * bits / 8),) bytes, lowest bits first."""
    if bits == 8:
        return codes.copy()
    lowest_first = np.unpackbits(codes[:, None], axis=1, count=bits, bitorder="little")
    return np.packbits(lowest_first.reshape(-1), bitorder="little")


def unpack_bits(packed: NDArray[np.uint8], bits: int, size: int) -> NDArray[np.uint8]:
    """Inverse of ``pack_bits`` for ``size`` codes."""
    if bits == 8:
        return packed.copy()
    lowest_first = np.unpackbits(packed, count=size * bits, bitorder="little").reshape(size, bits)
    return np.packbits(lowest_first, axis=1, bitorder="little").reshape(size)


def unpacked(
    name: str, data: NDArray[np.uint8], shape: tuple[int, ...], form: BlockFormat
) -> NDArray[np.uint8]:
    """Codes of ``shape`` from packed bytes; ValueError unless these are as ``pack`` makes them."""
    bits, size = form.element.bits, math.prod(shape)
    needed = -(-size * bits // 8)
    if data.size != needed:
        raise ValueError(
            f"{name} must hold {needed} bytes for shape {shape} of {form.name}; got {data.size}"
        )
    used = size * bits % 8  # bits of the last byte
    if used and data[-1] >> used:
        raise ValueError(
            f"{name} must end in zeros above the lowest {used} bits of the last byte; "
            f"got {data[-1]:#x}"
        )
    return unpack_bits(data, bits, size).reshape(shape)


def as_bytes(argument: str, values: ArrayLike, largest: int) -> NDArray[np.uint8]:
    """Integers as uint8; TypeError for other dtypes, ValueError outside 0..``largest``."""
    a = as_array(argument, values)
    if a.dtype.kind not in "iu":
        raise TypeError(f"{argument} must be an array of integers; got dtype {a.dtype}")
    if a.size and (a.min() < 0 or a.max() > largest):
        bad = a.min() if a.min() < 0 else a.max()
        raise ValueError(f"{argument} must lie in 0..{largest}; got {bad}")
    return np.ascontiguousarray(a.astype(np.uint8)).reshape(a.shape)


def check_bits(codes: NDArray[np.uint8], scales: NDArray[np.uint8], form: BlockFormat) -> None:
    """Raise ValueError for a code or scale byte that ``form`` does not have.

    Those are the most negative code of a symmetric integer, and NVFP4 scales with a sign.  NaN and
    Inf of E4M3 and E5M2 elements are codes of theirs, though quantizing writes none.
    """
    element = form.element
    if isinstance(element, IntFormat) and element.symmetric:
        unused = 1 << (element.bits - 1)
        if (codes == unused).any():
            raise ValueError(
                f"codes must not be {unused:#x}, the most negative, which the symmetric "
                f"{form.name} does not have; got {unused:#x}"
            )
    if form.scale == "e4m3" and (scales >= 0x80).any():
        raise ValueError(
            f"scales must be E4M3 codes without a sign, 0..0x7f, for {form.name}; "
            f"got {scales.max():#x}"
        )


def check_tensor_scale(value: object, form: BlockFormat) -> float | None:
    """None for an E8M0 format, a positive float32 for NVFP4; else an error that says so."""
    if form.scale == "e8m0":
        if value is not None:
            raise ValueError(f"tensor_scale must be None for {form.name}; got {value!r}")
        return None
    message = f"tensor_scale must be a positive float32 for {form.name}; got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating)):
        raise TypeError(message)
    if not 2.0**-149 <= value <= float(np.finfo(np.float32).max):
        raise ValueError(message)
    return float(np.float32(value))


def check_lengths(name: str, lengths: object) -> tuple[int, ...]:
    """A tuple of integers of at least 0; TypeError or ValueError naming anything else."""
    if not isinstance(lengths, (tuple, list)):
        raise TypeError(f"{name} must be a tuple of integers; got {lengths!r}")
    counts = tuple(as_integer(name, n, "a tuple of integers") for n in lengths)
    if any(n < 0 for n in counts):
        raise ValueError(f"{name} must be integers of at least 0; got {lengths!r}")
    return counts
