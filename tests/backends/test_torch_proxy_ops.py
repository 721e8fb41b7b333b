"""Each operation in PyTorch within the bound of its own sums and roundings, operand by operand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit

import mxsim
from mxsim.backends import torch_activation, torch_norm
from mxsim.backends.torch_linear import linear
from mxsim.backends.torch_proxy import mean_square
from mxsim.backends.torch_sites import rotate_rows, sites_of
from mxsim.elementwise import rotate_rows as numba_rotate_rows
from mxsim.precision import PrecisionScheme, precision_of
from tests.backends.bounded_student import ERFC, EXP, gelu, norm_backward_autograd
from tests.backends.running_error import UNIT, Array, Bounded, exactly, excess

pytestmark = pytest.mark.usefixtures("single_threaded")

DTYPES = ("float32", "float64")
EXACT = PrecisionScheme()


def normal(seed: int, *shape: int, dtype: str = "float64") -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def leaf(a: Array) -> Any:
    return torch.from_numpy(a.copy()).requires_grad_()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["exact", "gemm_e4m3", "gemm_e2m1", "nvfp4_recipe", "bf16"])
def test_linear_maps(name: str, dtype: str) -> None:
    """Operands quantized by the Numba backend, bit for bit; sums within gamma_n sum |a| |b|."""
    n, i, o, u = 96, 80, 48, UNIT[dtype]
    x, w, dy = (normal(k, *shape, dtype=dtype) for k, shape in enumerate(((n, i), (o, i), (n, o))))
    scheme = dataclasses.replace(mxsim.scheme(name), forward=EXACT.forward, backward=EXACT.backward)
    scheme = dataclasses.replace(scheme, hadamard="none")
    x_, w_ = leaf(x), leaf(w)
    y = linear(x_, w_, "fc1", sites_of(scheme, 1, seed=5, step=2)[0])
    y.backward(torch.from_numpy(dy))
    precision = precision_of(scheme, 1, 5, 2)[0]

    def operand(site: str, a: Array, axis: int) -> Bounded:
        return exactly(precision.operand(f"fc1_{site}", a, axis, np.empty_like(a)), u)

    found = {"y": y.detach(), "dx": x_.grad, "dw": w_.grad}
    bounds = {
        "y": operand("fprop_x", x, 1) @ operand("fprop_w", w, 1).T,
        "dx": operand("dgrad_dy", dy, 1) @ operand("dgrad_w", w, 0),
        "dw": operand("wgrad_dy", dy, 0).T @ operand("wgrad_x", x, 0),
    }
    for name, bounded in bounds.items():
        assert excess(found[name], bounded) <= 1, name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_norms(kind: str, dtype: str) -> None:
    n, d, u, eps = 40, 96, UNIT[dtype], 1e-5
    x, dz = 3 + normal(0, n, d, dtype=dtype), normal(1, n, d, dtype=dtype)
    gamma, beta = (normal(k, d, dtype=dtype) for k in (2, 3))
    leaves = [leaf(a) for a in (x, gamma, beta)]
    [sites] = sites_of(EXACT, 1, seed=0)
    z = torch_norm.norm(leaves[0], leaves[1], leaves[2], kind, eps, sites)
    z.backward(torch.from_numpy(dz))
    given, dz_ = exactly(x, u), exactly(dz, u)
    shift = given - given.mean(1) if kind == "layer" else given
    s = ((shift * shift).mean(1) + float(np.dtype(dtype).type(eps))).sqrt()
    r = exactly(1.0, u) / s
    xhat = shift * r
    bounds = [xhat * exactly(gamma, u) + (exactly(beta, u) if kind == "layer" else 0.0)]
    dx = norm_backward_autograd(dz_ * exactly(gamma, u), shift, s, r, xhat, kind == "layer")
    bounds += [dx, (dz_ * xhat).sum(0)]
    found = [z.detach(), leaves[0].grad, leaves[1].grad[None]]
    if kind == "layer":
        bounds, found = [*bounds, dz_.sum(0)], [*found, leaves[2].grad[None]]
    for a, bounded in zip(found, bounds, strict=True):
        assert excess(a, bounded) <= 1


def sigmoid_form(x: Bounded, kind: str) -> tuple[Array, Array, Array, Array]:
    """(value, slope, own errors of both) of tanh-form GELU and of silu, at x without error."""
    v, u = x.value, x.u
    if kind == "gelu_tanh":
        t, dt = (
            np.sqrt(8 / np.pi) * (v + 0.044715 * v**3),
            np.sqrt(8 / np.pi) * (1 + 0.134145 * v * v),
        )
    else:
        t, dt = v, np.ones_like(v)
    s = expit(t)
    # 1 / (1 + e^-t): each of t's 6 roundings moves it by s (1 - s) |t|, exp and the rest by s
    own = u * (6 * s * (1 - s) * np.abs(t) + (EXP + 4) * s)
    own = own + 2.0**-126  # where e^-t overflows, s is 0
    rest = s * (1 - s)
    own_rest = own + u * (rest + s)  # 1 - s keeps the absolute error of s
    value, slope = v * s, s + v * rest * dt
    size = s + np.abs(v) * rest * dt
    wild = np.abs(v) * np.abs(dt)
    return (
        value,
        slope,
        np.abs(v) * own + 2 * u * np.abs(value),
        own + wild * own_rest + 12 * u * size,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "relu", "linear", "swiglu"])
def test_activations(kind: str, dtype: str) -> None:
    u = UNIT[dtype]
    v = np.concatenate((np.linspace(-12, 12, 4001), normal(0, 4095))).astype(dtype).reshape(16, -1)
    dy = normal(1, *v.shape, dtype=dtype)
    wide = v.astype(np.float64)
    exactly_v = exactly(v, u)
    if kind == "swiglu":
        gate, dy = v, dy
        a = normal(2, *v.shape, dtype=dtype)
        given = leaf(np.concatenate((a, gate), 1))
    else:
        given = leaf(v)
    hidden = torch_activation.exact(given, kind)
    hidden.backward(torch.from_numpy(dy))
    if kind in ("relu", "linear"):
        expected = np.maximum(v, 0) if kind == "relu" else v
        np.testing.assert_array_equal(hidden.detach().numpy(), expected)
        np.testing.assert_array_equal(given.grad.numpy(), dy * (v > 0) if kind == "relu" else dy)
        return
    if kind == "gelu":
        value, slope = gelu(exactly_v, "torch")
    else:
        value_, slope_, own, own_slope = sigmoid_form(exactly_v, kind)
        value, slope = Bounded(value_, own, u), Bounded(slope_, own_slope, u)
    assert value.error.max() < 64 * u * np.abs(wide).max()
    if kind == "swiglu":
        assert excess(hidden.detach(), exactly(a, u) * value) <= 1
        da, db = given.grad.chunk(2, dim=1)
        assert excess(da, exactly(dy, u) * value) <= 1
        assert excess(db, exactly(dy, u) * exactly(a, u) * slope) <= 1
    else:
        assert excess(hidden.detach(), value) <= 1
        assert excess(given.grad, exactly(dy, u) * slope) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_loss(dtype: str) -> None:
    u = UNIT[dtype]
    p, y = (normal(k, 30, 41, dtype=dtype) for k in (0, 1))
    given = leaf(p)
    loss = mean_square(given, torch.from_numpy(y))
    loss.backward()
    residual = exactly(p, u) - exactly(y, u)
    wide = Bounded(residual.value, residual.error, 2.0**-52)
    assert excess(loss.detach(), (wide * wide).sum(0).sum(1) / p.size) <= 1
    assert excess(given.grad, residual * (exactly(2.0, u) / p.size)) <= 1


@pytest.mark.parametrize("n", [5, 16, 40, 96])
@pytest.mark.parametrize("size", [2, 16, 64])
def test_rotations_have_the_bits_of_the_numba_backend(n: int, size: int) -> None:
    for dtype in DTYPES:
        x = normal(n, n, 7, dtype=dtype)
        signs = np.where(normal(1, n) > 0, 1.0, -1.0).astype(dtype)
        found = rotate_rows(torch.from_numpy(x), torch.from_numpy(signs), size).numpy()
        numba_rotate_rows(x, signs, size)
        assert found.tobytes() == x.tobytes()


def test_bounds_of_functions_notice_ten_units_in_the_last_place() -> None:
    x = exactly(np.linspace(0.5, 3, 100), UNIT["float64"])
    value, _ = gelu(x, "torch")
    assert ERFC < 10
    assert excess(value.value * (1 + 20 * 2.0**-52), value) > 1


def test_the_bound_of_a_product_notices_tf32() -> None:
    """Operands of ten bits of mantissa, as a GPU has them where TF32 is left on."""
    u = UNIT["float32"]
    x, w = (normal(k, 96, 96, dtype="float32") for k in (0, 1))
    tf32 = mxsim.FloatFormat(8, 10, "ieee")
    found = mxsim.round_to(x, tf32) @ mxsim.round_to(w, tf32).T
    bounded = exactly(x, u) @ exactly(w, u).T
    assert excess(x @ w.T, bounded) <= 1
    assert excess(found, bounded) > 1
