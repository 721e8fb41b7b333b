"""Why a quantized value differs between two backends: which rounding boundary lies between.

Both backends quantize equal inputs to equal bits; inputs that went through a GEMM differ in the
last place, and now and then a boundary lies between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxsim.formats import FORMATS
from mxsim.mxarray import MXArray
from mxsim.philox import Noise
from mxsim.precision import SiteFormat
from mxsim.quantize import quantize

Array = NDArray[Any]


def axis_of(site: str) -> int:
    """The axis that a site's one-dimensional blocks run along, in the operand as it is stored."""
    return 0 if "wgrad" in site or site.endswith("dgrad_w") else -1


@dataclass(frozen=True)
class Flip:
    """The first value of an operand that two backends quantize differently.

    - block: of the model; index: in the operand as it is stored.
    - cause: ``element``, the value itself lies beside a boundary; ``scale``, the largest magnitude
      of its block does; ``input``, it came here with a rounding step between (an internal one).
    - cpu, torch: the two values beside the boundary, before rounding; ``cause`` says of what.
    - cpu_rounded, torch_rounded: what became of the value at ``index``.
    - boundary: where the rounding changes.
    """

    step: int
    site: str
    block: int
    index: tuple[int, ...]
    cause: str
    cpu: float
    torch: float
    cpu_rounded: float
    torch_rounded: float
    boundary: float

    @property
    def distances(self) -> tuple[float, float]:
        """How far each backend's value lies from the boundary, relative to it."""
        size = abs(self.boundary) or 1.0
        return abs(self.cpu - self.boundary) / size, abs(self.torch - self.boundary) / size

    @property
    def words(self) -> str:
        """One line for people."""
        what = {
            "element": "the value",
            "scale": "its block's largest magnitude",
            "input": "what was rounded otherwise before",
        }[self.cause]
        near, far = self.distances
        return (
            f"step {self.step}, block {self.block}, {self.site}{list(self.index)}: "
            f"{self.cpu_rounded:.9g} on the CPU, {self.torch_rounded:.9g} in PyTorch; {what} is "
            f"{self.cpu:.9g} and {self.torch:.9g}, the boundary {self.boundary:.9g} "
            f"({near:.1e} and {far:.1e} from it, relative)"
        )


def differing(
    site: str,
    how: SiteFormat,
    noise: Noise | None,
    before: tuple[Array, Array],
    after: tuple[Array, Array],
) -> Array:
    """Where an operand is quantized differently: in its values, or under NVFP4 in codes or scales.

    Zeros are equal, NaNs are equal.  (NVFP4's tensor scale is the largest magnitude divided by a
    constant: its last place moves all values, but not their codes.)
    """
    a, b = after
    values = np.asarray((a != b) & ~(np.isnan(a) & np.isnan(b)))
    if how.format != "nvfp4" or not values.any():
        return values
    q, r = (_quantized(x, site, how, noise) for x in before)
    value = FORMATS[how.format].element.values
    scales = _spread(q, q.scales), _spread(r, r.scales)
    return np.asarray((value[q.codes] != value[r.codes]) | (scales[0] != scales[1]))


def explain(
    step: int,
    site: str,
    block: int,
    how: SiteFormat,
    noise: Noise | None,
    before: tuple[Array, Array],
    after: tuple[Array, Array],
    where: Array,
) -> Flip:
    """The Flip of the first value (in C order) in the mask ``where``, which is not empty.

    before, after: an operand before and after its site, on the CPU and in PyTorch; ``how`` is the
    site's format, ``noise`` its random bits if it rounds stochastically.
    """
    index = tuple(int(i) for i in np.argwhere(where)[0])
    rounded = float(after[0][index]), float(after[1][index])
    cause, values = "element", (float(before[0][index]), float(before[1][index]))
    boundary = _between(rounded, how, noise, index, before[0].shape)
    if how.format in FORMATS:
        q, r = (_quantized(x, site, how, noise) for x in before)
        if _spread(q, q.scales)[index] != _spread(r, r.scales)[index]:
            cause, inside = "scale", _members(q, index)
            largest = [float(np.abs(x[inside]).max()) for x in before]
            values = largest[0], largest[1]
            scales = [float(_spread(each, each.scale_values())[index]) for each in (q, r)]
            boundary = _scale_boundary(scales, how)
    if cause == "element" and 2 * abs(values[0] - values[1]) >= abs(rounded[0] - rounded[1]):
        cause = "input"
    return Flip(step, site, block, index, cause, *values, *rounded, boundary)


def _between(
    rounded: tuple[float, float],
    how: SiteFormat,
    noise: Noise | None,
    index: tuple[int, ...],
    shape: tuple[int, ...],
) -> float:
    """Where rounding goes over from one of two neighbouring values to the other."""
    low, high = sorted(rounded, key=abs)
    if how.rounding == "zero":
        return high
    part = 0.5
    if noise is not None:
        position = int(np.ravel_multi_index(index, shape))
        part = (int(noise.bits(1, position)[0]) >> 8) * 2.0**-24
    return low + part * (high - low)


def _quantized(x: Array, site: str, how: SiteFormat, noise: Noise | None) -> MXArray:
    axis = (0, 1) if isinstance(how.block_size, tuple) else axis_of(site)
    rule = how.scale_rule if FORMATS[how.format].scale == "e8m0" else None
    return quantize(x, how.format, axis, how.block_size, rule, how.rounding, noise=noise)


def _spread(q: MXArray, each: Array) -> Array:
    """One value a block, in the shape of the operand."""
    return q.blocks.spread(each, q.shape)


def _members(q: MXArray, index: tuple[int, ...]) -> Array:
    """The mask of the elements that share a scale with the one at ``index``."""
    numbers = _spread(q, np.arange(q.scales.size).reshape(q.scales.shape))
    return np.asarray(numbers == numbers[index])


def _scale_boundary(scales: list[float], how: SiteFormat) -> float:
    """The largest magnitude of a block at which its scale goes over to the next."""
    form = FORMATS[how.format]
    if form.scale == "e8m0":  # amax = m 2^e: the scale is raised where m exceeds the threshold
        threshold, _ = form.bump_threshold(how.scale_rule)
        return threshold * max(scales) / 2 * 2.0**form.element.emax
    return sum(scales) / 2 * form.element.largest
