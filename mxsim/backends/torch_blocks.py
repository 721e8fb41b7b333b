"""How a tensor is cut into blocks: each blocked axis becomes two, its blocks and their elements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mxsim.layout import Blocks

Tensor = Any


def fold(x: Tensor, blocks: Blocks) -> tuple[Tensor, tuple[int, ...]]:
    """x with each blocked axis split in (blocks, block length), and the axes within a block.

    A view, unless a last block is shorter: then a copy filled up with zeros, which change neither
    a block's maximum nor another element.
    """
    short = {
        axis: -x.shape[axis] % size for axis, size in zip(blocks.axes, blocks.sizes, strict=True)
    }
    if any(short.values()):
        # (before, after) of each axis, the last one first
        ends = [end for axis in reversed(range(x.ndim)) for end in (0, short.get(axis, 0))]
        x = torch.nn.functional.pad(x, ends)
    for axis, size in sorted(zip(blocks.axes, blocks.sizes, strict=True), reverse=True):
        x = x.unflatten(axis, (x.shape[axis] // size, size))
    return x, _within(blocks.axes)


def unfold(x: Tensor, blocks: Blocks, shape: Sequence[int]) -> Tensor:
    """Inverse of ``fold``: the tensor of ``shape``."""
    for axis in sorted(blocks.axes):
        x = x.flatten(axis, axis + 1)
        if x.shape[axis] != shape[axis]:
            x = x.narrow(axis, 0, shape[axis])
    return x


def one_a_block(x: Tensor, blocks: Blocks) -> Tensor:
    """A value a block, of length 1 along the axes within a block, in the shape of the scales."""
    return x.reshape(tuple(n for i, n in enumerate(x.shape) if i not in _within(blocks.axes)))


def beside_blocks(x: Tensor, blocks: Blocks) -> Tensor:
    """Inverse of ``one_a_block``: of a shape that broadcasts against what ``fold`` returns."""
    for axis in _within(blocks.axes):
        x = x.unsqueeze(axis)
    return x


def _within(axes: Sequence[int]) -> tuple[int, ...]:
    """The axes that run within a block, once each blocked axis is two."""
    return tuple(axis + 1 + before for before, axis in enumerate(sorted(axes)))
