"""The whole laboratory on one page of plain NumPy: read this file first.

What lives here: the MX quantizer, a residual student trained against a frozen teacher with every
quantization site a switch, its hand-written backward pass, Adam, and the probe that measures the
gradient bias g~ - g at one point in parameter space. The rest of the package computes the same
numbers faster and with more choices; this page imports none of it, so that the tests can hold the
fast code to a second opinion. Run it (a few seconds): python -m mxsim.minimal
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import erf

Array = NDArray[Any]
Rng = np.random.Generator
Params = list[dict[str, Array]]  # a dict for each block: ln_gamma, ln_beta, w1, w2, b2
Sites = Mapping[str, str]  # site -> format; a site that is missing is exact

# ---- the MX quantizer: blocks of small elements that share one power-of-two scale ----------------

FORMATS = {  # exponent bits, mantissa bits, bias, exponent of the top binade, largest element
    "mxfp8_e4m3": (4, 3, 2**3 - 1, 8, 1.75 * 2**8),  # 1.875 * 2^8 would be the code of NaN
    "mxfp8_e5m2": (5, 2, 2**4 - 1, 15, 1.75 * 2**15),
    "mxfp6_e3m2": (3, 2, 2**2 - 1, 4, 1.75 * 2**4),
    "mxfp6_e2m3": (2, 3, 2**1 - 1, 2, 1.875 * 2**2),
    "mxfp4_e2m1": (2, 1, 2**1 - 1, 2, 1.5 * 2**2),
    "mxint8": (0, 6, 1, 0, 127 / 64),  # k / 64: bias 1 puts every |v| < 2 on one grid, step 2^-6
}


def scale_exponent(amax: Array, fmt: str, scale_rule: str = "floor") -> Array:
    # amax (...) finite -> (...), the e of the E8M0 scale 2^e
    _, man_bits, _, emax, largest = FORMATS[fmt]
    half, e = np.frexp(amax)  # half * 2^e, half in [1/2, 1), is exact; a computed log2 rounds
    mantissa = 2 * half
    one_more = {  # does the rule go one above floor(log2 amax) - emax?
        "floor": mantissa > 2,  # never (OCP MX v1.0, 6.3)
        "rceil": mantissa > largest / 2**emax,  # if the maximum would saturate
        "ceil": mantissa > 1,
        "even": mantissa >= 2 - 2.0 ** -(man_bits + 1),  # if the maximum, rounded half up, carries
    }
    return np.asarray(np.clip(e - 1 - emax + one_more[scale_rule], -127, 127))


def round_elements(v: Array, man_bits: int, bias: int, rounding: str) -> Array:
    # v (...) -> (...), floats with man_bits mantissa bits and no upper end
    binade = np.maximum(np.frexp(v)[1] - 1, 1 - bias)  # subnormals keep the lowest binade's step
    step = np.ldexp(1.0, binade - man_bits)
    r = v / step  # exact: the rounding below is the only one
    low = np.trunc(r)
    away = low + np.copysign(np.abs(r - low) >= 0.5, r)  # r + 1/2 would itself round, below a tie
    return np.asarray({"even": np.rint(r), "away": away, "zero": low}[rounding] * step)


def fake_quantize(
    x: Array,
    fmt: str,
    axis: int = -1,
    block_size: int = 32,
    scale_rule: str = "floor",
    rounding: str = "even",
) -> Array:
    """Quantize and dequantize x along axis: its shape and dtype, rounded once from its exact value.

    fmt: a key of FORMATS, "bf16" (elementwise, overflows to inf) or "exact" (x itself). A NaN or an
    infinity turns its block into NaN. Zeros keep their sign, but integers have no -0.
    """
    if fmt == "exact":
        return x
    with np.errstate(over="ignore", invalid="ignore"):  # float32 has no 2^128: that becomes inf
        if fmt == "bf16":
            q = round_elements(x.astype(np.float64), 7, 127, rounding)
            over = (np.abs(q) >= 2.0**128) & np.isfinite(x)
            beyond = (2 - 2.0**-7) * 2.0**127 if rounding == "zero" else np.inf  # IEEE 754, 7.4
            return np.where(over, np.copysign(beyond, q), q).astype(x.dtype)
        _, man_bits, bias, _, largest = FORMATS[fmt]
        padded = np.moveaxis(x, axis, -1).astype(np.float64)
        *rows, n = padded.shape
        padded = np.pad(padded, [(0, 0)] * len(rows) + [(0, -n % block_size)])
        v = padded.reshape(*rows, -(-n // block_size), block_size)
        amax = np.abs(v).max(-1, keepdims=True)  # np.max hands NaN on
        bad = ~np.isfinite(amax)
        v, amax = np.where(bad, 0.0, v), np.where(bad, 0.0, amax)
        e = scale_exponent(amax, fmt, scale_rule)
        q = round_elements(np.ldexp(v, -e), man_bits, bias, rounding)
        q = np.ldexp(np.clip(q, -largest, largest), e)  # saturate after rounding
        q = np.where(bad, np.nan, q + 0.0 if fmt == "mxint8" else q)
        return np.moveaxis(q.reshape(padded.shape)[..., :n], -1, axis).astype(x.dtype)


# ---- the student: forward beside backward, every rounding passed straight through ----------------
# Blocks run along the axis that the GEMM sums over, so an operand of two GEMMs is rounded twice, in
# two directions, each time from the high-precision tensor.

GEMMS = ("fprop_x", "fprop_w", "dgrad_dy", "dgrad_w", "wgrad_dy", "wgrad_x")
GEMM_SITES = [f"{fc}_{gemm}" for fc in ("fc1", "fc2") for gemm in GEMMS]
LN_SITES = ["ln_gamma", "ln_beta"]
PRESETS: dict[str, Sites] = {
    "exact": {},
    "gemm_e4m3": dict.fromkeys(GEMM_SITES, "mxfp8_e4m3"),
    "all_e4m3": dict.fromkeys(GEMM_SITES + LN_SITES, "mxfp8_e4m3"),
    "ln_only_e4m3": dict.fromkeys(LN_SITES, "mxfp8_e4m3"),
}
EXACT = PRESETS["exact"]


def at(site: str, sites: Sites, x: Array, axis: int = -1) -> Array:
    return fake_quantize(x, sites.get(site, "exact"), axis)


def linear_forward(x: Array, w: Array, fc: str, sites: Sites) -> Array:
    # x (n, i), w (o, i) -> (n, o); sums over i
    return at(f"{fc}_fprop_x", sites, x, -1) @ at(f"{fc}_fprop_w", sites, w, -1).T


def linear_backward(dy: Array, x: Array, w: Array, fc: str, sites: Sites) -> tuple[Array, Array]:
    # dy (n, o) -> dx (n, i), sums over o; dw (o, i), sums over the batch n
    dx = at(f"{fc}_dgrad_dy", sites, dy, -1) @ at(f"{fc}_dgrad_w", sites, w, 0)
    dw = at(f"{fc}_wgrad_dy", sites, dy, 0).T @ at(f"{fc}_wgrad_x", sites, x, 0)
    return dx, dw


def layernorm_forward(x: Array, gamma: Array, beta: Array) -> tuple[Array, Array, Array]:
    # x (n, d), gamma (d,), beta (d,) -> z (n, d); kept for backward: xhat (n, d), rstd (n, 1)
    centered = x - x.mean(-1, keepdims=True)
    rstd = 1 / np.sqrt((centered**2).mean(-1, keepdims=True) + 1e-5)
    xhat = centered * rstd
    return xhat * gamma + beta, xhat, rstd


def layernorm_backward(dz: Array, xhat: Array, rstd: Array, gamma: Array) -> tuple[Array, ...]:
    # dz (n, d) -> dx (n, d), dgamma (d,), dbeta (d,)
    dxhat = dz * gamma
    dx = dxhat - dxhat.mean(-1, keepdims=True) - xhat * (dxhat * xhat).mean(-1, keepdims=True)
    return dx * rstd, (dz * xhat).sum(0), dz.sum(0)


def phi(u: Array, activation: str) -> tuple[Array, Array]:
    # u (n, h) -> phi(u), its slope (n, h); swiglu: u = [a | b] (n, 2h) -> (n, h), (n, 2h)
    if activation == "swiglu":
        a, b = np.split(u, 2, axis=-1)
        s = 0.5 * (1 + np.tanh(b / 2))  # the sigmoid, in a spelling that cannot overflow
        return a * b * s, np.concatenate([b * s, a * s * (1 + b * (1 - s))], axis=-1)
    if activation == "gelu":
        cdf, pdf = 0.5 * (1 + erf(u / math.sqrt(2))), np.exp(-u * u / 2) / math.sqrt(2 * math.pi)
        return u * cdf, cdf + u * pdf
    return {"relu": (np.maximum(u, 0), u > 0), "linear": (u, np.ones_like(u))}[activation]


def loss_and_grads(
    params: Params, x: Array, y: Array, activation: str = "gelu", sites: Sites = EXACT
) -> tuple[float, Params]:
    """x, y (n, d) -> mean squared error and its gradient: the tree of params, in their dtype."""
    if unknown := set(sites) - set(GEMM_SITES + LN_SITES):
        raise ValueError(f"unknown sites {sorted(unknown)}: see GEMM_SITES and LN_SITES")
    x, y = (t.astype(params[0]["w1"].dtype) for t in (x, y))
    kept = []
    for p in params:  # x <- x + w2 phi(w1 LN(x)) + b2
        gamma, beta = at("ln_gamma", sites, p["ln_gamma"]), at("ln_beta", sites, p["ln_beta"])
        z, xhat, rstd = layernorm_forward(x, gamma, beta)
        u = linear_forward(z, p["w1"], "fc1", sites)
        hidden, slope = phi(u, activation)
        x = x + linear_forward(hidden, p["w2"], "fc2", sites) + p["b2"]
        kept.append((p, gamma, z, xhat, rstd, slope, hidden))
    loss = ((x - y) ** 2).mean()
    dx = (x - y) * (2 / x.size)
    grads: Params = []
    for p, gamma, z, xhat, rstd, slope, hidden in reversed(kept):
        dhidden, dw2 = linear_backward(dx, hidden, p["w2"], "fc2", sites)
        du = np.tile(dhidden, slope.shape[1] // dhidden.shape[1]) * slope  # swiglu: twice as wide
        dz, dw1 = linear_backward(du, z, p["w1"], "fc1", sites)
        dbranch, dgamma, dbeta = layernorm_backward(dz, xhat, rstd, gamma)
        grads.append({"ln_gamma": dgamma, "ln_beta": dbeta, "w1": dw1, "w2": dw2, "b2": dx.sum(0)})
        dx = dx + dbranch  # the residual stream hands dx on unchanged
    return float(loss), grads[::-1]


# ---- the probe: exact and quantized gradient at the same parameters on the same batch ------------


def probe(
    params: Params, x: Array, y: Array, activation: str = "gelu", sites: Sites = EXACT
) -> dict[str, dict[str, float]]:
    """The bias in "all" parameters and in each kind (ln_gamma, w1, ...), the blocks taken together.

    zeta = |g~ - g| / |g|, alpha = <g~, g> / |g|^2 is the gain along g, rho = |g~ - alpha g| / |g|
    what is thrown across it: zeta^2 = (alpha - 1)^2 + rho^2. A zero g leaves them undefined: NaN.
    """
    trees = [loss_and_grads(params, x, y, activation, s)[1] for s in (EXACT, sites)]
    report = {}
    for name, kinds in {"all": list(params[0]), **{kind: [kind] for kind in params[0]}}.items():
        g, g_q = (np.concatenate([p[k].ravel() for p in tree for k in kinds]) for tree in trees)
        norm = np.linalg.norm(g.astype(np.float64)) or math.nan
        g, g_q = g / norm, g_q / norm
        alpha, gain = float(g_q @ g), float(np.linalg.norm(g_q)) or math.nan
        zeta, rho = float(np.linalg.norm(g_q - g)), float(np.linalg.norm(g_q - alpha * g))
        report[name] = {"zeta": zeta, "cos": alpha / gain, "alpha": alpha, "rho": rho}
    return report


# ---- start, teacher, data, optimizer, and a run --------------------------------------------------


def init(rng: Rng, width: int, depth: int, activation: str = "gelu", ratio: int = 4) -> Params:
    """PyTorch's default for Linear, U(-1, 1) / sqrt(fan_in). With ratio 1, w1, w2 are a teacher."""
    d, glu = width, activation == "swiglu"
    h = round(ratio * d * 2 / 3) if glu else ratio * d
    shapes = {"w1": (2 * h if glu else h, d), "w2": (d, h), "b2": (d,)}
    return [
        {"ln_gamma": np.ones(d), "ln_beta": np.zeros(d)}
        | {k: rng.uniform(-1, 1, shapes[k]) / math.sqrt(d if k == "w1" else h) for k in shapes}
        for _ in range(depth)
    ]


def draw_batch(rng: Rng, teacher: Params, n: int, activation: str = "gelu") -> tuple[Array, Array]:
    # -> x, y (n, d); the teacher has no layer norm, residual or bias, and is never quantized
    x = y = rng.standard_normal((n, teacher[0]["w1"].shape[1]))
    for p in teacher:
        y = phi(y @ p["w1"].T, activation)[0] @ p["w2"].T
    return x, y + 0.005 * rng.standard_normal(x.shape)


def adam_step(params: Params, grads: Params, m: Params, v: Params, t: int, lr: float) -> None:
    """Step t = 1, 2, ... of Adam by PyTorch's formula; the trees params, m and v are updated."""
    for p, g, m_, v_ in zip(params, grads, m, v, strict=True):
        for k in p:
            m_[k] = 0.9 * m_[k] + (1 - 0.9) * g[k]
            v_[k] = 0.999 * v_[k] + (1 - 0.999) * g[k] ** 2
            denominator = np.sqrt(v_[k]) / math.sqrt(1 - 0.999**t) + 1e-8
            p[k] = p[k] - lr / (1 - 0.9**t) * m_[k] / denominator


def main(width: int = 32, depth: int = 2, batch: int = 64, steps: int = 300) -> None:
    """The same start and the same batches under each preset."""
    print("      preset  step     loss    zeta     cos  saturated gammas")
    teacher = init(np.random.default_rng(0), width, depth, ratio=1)
    for name, sites in PRESETS.items():
        params = init(np.random.default_rng(1), width, depth)
        m, v = ([{k: np.zeros_like(a) for k, a in p.items()} for p in params] for _ in range(2))
        for t in range(steps + 1):
            x, y = draw_batch(np.random.default_rng([2, t]), teacher, batch)
            loss, grads = loss_and_grads(params, x, y, sites=sites)
            if t % 50 == 0:
                b = probe(params, x, y, sites=sites)["all"]
                gamma = np.abs([p["ln_gamma"] for p in params])  # would E4M3 saturate it?
                e = scale_exponent(gamma.max(-1, keepdims=True), "mxfp8_e4m3")
                share = (gamma > FORMATS["mxfp8_e4m3"][-1] * 2.0**e).mean()
                print(f"{name:>12} {t:5} {loss:8.5f} {b['zeta']:7.4f} {b['cos']:7.4f} {share:6.1%}")
            adam_step(params, grads, m, v, t + 1, lr=1e-2)


if __name__ == "__main__":
    main()
