"""Running error analysis: a value, and a bound on how far any evaluation of it can lie from it.

Wilkinson's rules, element by element (Higham, Accuracy and Stability of Numerical Algorithms,
chapter 3): a result of one operation carries its operands' errors, and a rounding of its own of at
most ``u`` times its size; a sum of n terms, in whatever order, gamma_n = n u / (1 - n u) times the
sum of the terms' sizes.  ``u`` counts the roundings of both that are compared: of the arithmetic
under test, and of the float64 in which the values here are computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
UNIT = {"float32": 2.0**-24 + 2.0**-53, "float64": 2.0**-52}
TINY = 2.0**-149  # what a product may lose to subnormals


def gamma(n: int, u: float) -> float:
    return n * u / (1 - n * u)


@dataclass(frozen=True, eq=False)
class Bounded:
    value: Array
    error: Array
    u: float

    @property
    def size(self) -> Array:
        """The largest that an evaluation can be."""
        return np.asarray(np.abs(self.value) + self.error)

    def _rounded(self, value: Array, error: Array) -> Bounded:
        own = self.u * (np.abs(value) + error) + TINY
        return Bounded(value, error + own, self.u)

    def _other(self, other: Any) -> Bounded:
        if isinstance(other, Bounded):
            return other
        return Bounded(np.asarray(other, np.float64), np.asarray(0.0), self.u)

    def __add__(self, other: Any) -> Bounded:
        o = self._other(other)
        return self._rounded(self.value + o.value, self.error + o.error)

    def __sub__(self, other: Any) -> Bounded:
        o = self._other(other)
        return self._rounded(self.value - o.value, self.error + o.error)

    def __mul__(self, other: Any) -> Bounded:
        o = self._other(other)
        error = np.abs(self.value) * o.error + self.error * o.size
        return self._rounded(self.value * o.value, error)

    def __truediv__(self, other: Any) -> Bounded:
        o = self._other(other)
        assert np.all(o.error < np.abs(o.value))
        quotient = self.value / o.value
        error = (np.abs(quotient) * o.error + self.error) / (np.abs(o.value) - o.error)
        return self._rounded(quotient, error)

    def __neg__(self) -> Bounded:
        return Bounded(-self.value, self.error, self.u)

    def sqrt(self) -> Bounded:
        assert np.all(self.error < self.value)
        root = np.sqrt(self.value)  # PyTorch's, by MKL on x86, is within 0.75 ulp, not 0.5
        error = self.error / (root + np.sqrt(self.value - self.error)) + self.u * root
        return self._rounded(root, error)

    def sum(self, axis: int) -> Bounded:
        """Keeps the axis, of length 1."""
        n = self.value.shape[axis]
        error = self.error.sum(axis, keepdims=True)
        error = error + gamma(n, self.u) * self.size.sum(axis, keepdims=True)
        return Bounded(self.value.sum(axis, keepdims=True), error, self.u)

    def mean(self, axis: int) -> Bounded:
        count: int = self.value.shape[axis]
        return self.sum(axis) / count

    def __matmul__(self, other: Bounded) -> Bounded:
        error = np.abs(self.value) @ other.error + self.error @ other.size
        error = error + gamma(self.value.shape[1], self.u) * (self.size @ other.size)
        return Bounded(self.value @ other.value, error, self.u)

    @property
    def T(self) -> Bounded:
        return Bounded(self.value.T, self.error.T, self.u)

    def mapped(self, value: Array, steepest: Any, own: Array) -> Bounded:
        """A function's ``value`` here: its slope is at most ``steepest``, its own error ``own``."""
        return Bounded(value, steepest * self.error + own, self.u)


def exactly(value: Any, u: float) -> Bounded:
    """An input that everybody has in the same bits."""
    wide = np.asarray(value, np.float64)
    return Bounded(wide, np.zeros_like(wide), u)


def excess(found: Any, bounded: Bounded) -> float:
    """The largest |found - value| / bound: at most 1 if the bound holds."""
    distance = np.abs(np.asarray(found, np.float64) - bounded.value)
    return float((distance / np.maximum(bounded.error, TINY)).max())
