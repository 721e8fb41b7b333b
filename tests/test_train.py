"""Runs: a golden trajectory, the same bits again, pairing, and honest failure."""

import importlib
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

import mxsim
from mxsim import proxy
from mxsim.bias import GAMMA_SITE, PROBE_GROUPS, ProbePlan, saturated_share
from mxsim.precision import precision_of
from mxsim.proxy import KINDS
from mxsim.threads import SMALLEST, threaded_dot
from mxsim.train import first_nonfinite

TINY = mxsim.ProxyConfig(width=16, depth=2, batch=32, lr=1e-2, steps=10, seed=7, eval_samples=64)


def same(a: mxsim.Run, b: mxsim.Run) -> bool:
    """Bit for bit: losses, gradient norms, parameters."""
    return (
        a.losses.tobytes() == b.losses.tobytes()
        and a.grad_norms.tobytes() == b.grad_norms.tobytes()
        and a.eval_loss == b.eval_loss
        and all(
            p[kind].tobytes() == q[kind].tobytes()
            for p, q in zip(a.params, b.params, strict=True)
            for kind in KINDS
        )
    )


def test_golden_trajectory() -> None:
    # Computed by mxsim/minimal.py in float64 from the same start and batches.
    golden = [
        1.01491182, 0.937081795, 0.797920102, 0.737074327, 0.466568065,
        0.390349375, 0.367095118, 0.244745026, 0.245154736, 0.210344972,
    ]  # fmt: skip
    run = mxsim.train(TINY, mxsim.scheme("exact"))
    np.testing.assert_allclose(run.losses, golden, rtol=1e-5)


@pytest.mark.parametrize("name", ["exact", "gemm_e4m3", "ln_only_e4m3", "all_e4m3", "all_e2m1"])
def test_the_same_bits_twice_and_whatever_the_thread_count(name: str) -> None:
    cfg = replace(TINY, width=48, batch=70)  # neither a multiple of the block
    first = mxsim.train(cfg, mxsim.scheme(name))
    with threadpool_limits(2, "blas"):
        again = mxsim.train(cfg, mxsim.scheme(name))
    assert same(first, again)


def test_probes_and_callbacks_do_not_change_a_run() -> None:
    scheme = mxsim.scheme("all_e4m3")
    seen: list[tuple[int, float]] = []
    plain = mxsim.train(TINY, scheme)
    probed = mxsim.train(
        TINY,
        scheme,
        probe=ProbePlan(3, (("all_e4m3", scheme),)),
        on_step=lambda step, loss: seen.append((step, loss)),
    )
    assert same(plain, probed)
    assert seen == list(enumerate(plain.losses))
    assert probed.probes is not None
    assert np.isfinite(probed.probes.zeta).all()
    assert list(probed.probes.steps) == [0, 3, 6, 9]


def test_probes_and_held_out_loss_are_of_this_run_at_this_step() -> None:
    scheme = mxsim.scheme("all_e4m3")
    cfg = replace(TINY, steps=7)
    run = mxsim.train(cfg, scheme, probe=ProbePlan(6, (("all_e4m3", scheme),)))
    assert run.probes is not None
    # The parameters that step 6 met are those that a run of six steps ends with.
    before = mxsim.train(replace(cfg, steps=6), scheme).params
    teacher = mxsim.make_teacher(cfg)
    x, y = mxsim.make_batches(cfg, teacher).at(6)
    report = mxsim.gradient_bias(before, x, y, cfg, scheme)
    assert run.losses[6] == report.loss_quantized
    assert run.grad_norms[6] == pytest.approx(report.norm_quantized, rel=1e-9)
    for j, group in enumerate(PROBE_GROUPS):
        bias = report if group == "all" else report.groups[group]
        assert run.probes.zeta[1, 0, j] == pytest.approx(bias.zeta, rel=1e-12)
        assert run.probes.cos[1, 0, j] == pytest.approx(bias.cos, rel=1e-12)
    for k, block in enumerate(before):
        gamma = block["ln_gamma"]
        assert run.probes.gamma_mean[1, k] == pytest.approx(gamma.mean(dtype=np.float64))
        assert run.probes.gamma_saturated[1, k] == saturated_share(gamma, GAMMA_SITE)
    # Held-out data are not the training batches, and the loss is the scheme's own forward.
    x, y = mxsim.held_out(cfg, teacher)
    assert not np.array_equal(x[: cfg.batch], mxsim.make_batches(cfg, teacher).at(0)[0])
    loss, _ = mxsim.loss_and_grads(run.params, x, y, cfg, scheme)
    exact_loss, _ = mxsim.loss_and_grads(run.params, x, y, cfg, mxsim.scheme("exact"))
    assert run.eval_loss == pytest.approx(loss, rel=1e-6)
    assert run.eval_loss != pytest.approx(exact_loss, rel=1e-6)
    assert run.zero_loss == pytest.approx((y.astype(np.float64) ** 2).mean())
    assert run.input_power == pytest.approx((x.astype(np.float64) ** 2).mean())


def test_learning_is_judged_against_the_larger_trivial_loss() -> None:
    # The script's teacher: mean(y^2) is 2.6e-5, far below what layer norm leaves.
    small = mxsim.train(replace(TINY, steps=60), mxsim.scheme("exact"))
    assert small.zero_loss < small.eval_loss < 0.5 * small.input_power
    assert small.outcome.learned
    # A loud teacher: now mean(y^2) is the larger, and a quarter of it passes.
    loud = mxsim.train(replace(TINY, steps=150, teacher_gain=8.0), mxsim.scheme("exact"))
    assert loud.input_power < loud.zero_loss
    assert loud.outcome.learned == (loud.eval_loss < 0.5 * loud.zero_loss)


def test_an_update_that_ruins_the_last_step_is_nonfinite() -> None:
    cfg = mxsim.ProxyConfig(width=8, depth=1, batch=4, lr=1e30, steps=1, eval_samples=8)
    run = mxsim.train(cfg, mxsim.scheme("exact"))
    assert np.isfinite(run.losses).all()
    assert (run.status, run.first_bad_step) == ("nonfinite", 0)
    assert run.first_bad_tensor is not None


@pytest.mark.parametrize("wrong", ["all_e4m3", None, {"ln_gamma": "exact"}])
def test_a_scheme_that_is_none_is_refused_by_name(wrong: object) -> None:
    params = mxsim.init_params(TINY)
    x, y = mxsim.make_batches(TINY, mxsim.make_teacher(TINY)).at(0)
    for call in (
        lambda: mxsim.train(TINY, wrong),  # type: ignore[arg-type]
        lambda: mxsim.loss_and_grads(params, x, y, TINY, wrong),  # type: ignore[arg-type]
        lambda: mxsim.gradient_bias(params, x, y, TINY, wrong),  # type: ignore[arg-type]
    ):
        with pytest.raises(TypeError, match="scheme must be a PrecisionScheme; got"):
            call()
    with pytest.raises(TypeError, match="cfg must be a ProxyConfig; got"):
        mxsim.train({"width": 4}, mxsim.scheme("exact"))  # type: ignore[arg-type]


def test_arms_of_one_seed_share_start_and_data_and_seeds_differ() -> None:
    runs = {name: mxsim.train(TINY, mxsim.scheme(name)) for name in ("exact", "ln_only_e4m3")}
    # Gammas start at 1 and betas at 0, on the grid: the first losses are equal bit for bit.
    assert runs["exact"].losses[0] == runs["ln_only_e4m3"].losses[0]
    assert runs["exact"].losses[-1] != runs["ln_only_e4m3"].losses[-1]
    assert runs["exact"].zero_loss == runs["ln_only_e4m3"].zero_loss
    other = mxsim.train(replace(TINY, seed=8), mxsim.scheme("exact"))
    assert other.losses[0] != runs["exact"].losses[0]


def test_a_run_longer_than_another_begins_like_it() -> None:
    long = mxsim.train(replace(TINY, steps=20), mxsim.scheme("all_e4m3"))
    short = mxsim.train(TINY, mxsim.scheme("all_e4m3"))
    np.testing.assert_array_equal(long.losses[:10], short.losses)


@pytest.mark.parametrize("activation", ["gelu", "relu", "swiglu", "linear"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_every_activation_and_optimizer_learns_in_both_dtypes(
    activation: str, optimizer: str
) -> None:
    cfg = replace(
        TINY,
        activation=activation,
        optimizer=optimizer,
        lr=1e-2 if optimizer == "adam" else 0.5,
        momentum=0.9,
        steps=80,
        data="fixed",
        batch=32,
    )
    for dtype in ("float32", "float64"):
        run = mxsim.train(replace(cfg, dtype=dtype), mxsim.scheme("all_e4m3"))
        assert run.params[0]["w1"].dtype == dtype
        assert run.losses[-1] < 0.5 * run.losses[0]


def test_a_run_that_never_learns_is_diverged() -> None:
    run = mxsim.train(replace(TINY, lr=1e-9), mxsim.scheme("exact"))
    assert run.status == "diverged"
    assert not run.outcome.learned
    assert run.first_bad_step == TINY.steps - 1
    assert run.spikes == ()


def test_nonfinite_is_a_result_with_step_and_tensor() -> None:
    cfg = replace(TINY, lr=1e30, optimizer="sgd", steps=30, activation="linear")
    run = mxsim.train(cfg, mxsim.scheme("exact"))
    assert run.status == "nonfinite"
    step = run.first_bad_step
    assert step is not None
    assert 0 < step < 29
    assert run.first_bad_tensor is not None
    assert np.isfinite(run.losses[:step]).all()
    assert np.isnan(run.losses[step + 1 :]).all()


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [("w1", "block 1 w1"), ("ln_gamma", "block 1 ln_gamma"), ("b2", "block 1 b2")],
)
def test_the_first_bad_tensor_is_the_first_in_order_of_computation(kind: str, tensor: str) -> None:
    params = mxsim.init_params(TINY)
    params[1][kind].flat[0] = np.inf
    x, y = mxsim.make_batches(TINY, mxsim.make_teacher(TINY)).at(0)
    ws = proxy.workspace(TINY, len(x), np.float32)
    grads = proxy.parameter_views(np.empty(proxy.parameter_count(TINY), np.float32), TINY)
    with np.errstate(all="ignore"):
        sites = precision_of(mxsim.scheme("exact"), 2)
        proxy.loss_and_grads_into(params, x, y, TINY, sites, ws, grads)
    assert first_nonfinite(params, x, y, TINY, ws, grads) == tensor
    # An overflow in the hidden layer from finite parameters is named there.
    params = mxsim.init_params(TINY)
    params[0]["w1"][...] = 3e38
    with np.errstate(all="ignore"):
        proxy.loss_and_grads_into(params, x, y, TINY, sites, ws, grads)
    assert first_nonfinite(params, x, y, TINY, ws, grads) == "block 0 hidden"


def test_a_step_on_two_threads_has_the_same_bits() -> None:
    cfg = replace(TINY, width=160, depth=2, batch=256, steps=4, eval_samples=256)
    n, d, h = 256, 160, 640
    assert n * d * h >= SMALLEST  # large enough to be cut
    for name in ("exact", "all_e4m3", "paper_code"):
        one = mxsim.train(cfg, mxsim.scheme(name))
        two = mxsim.train(cfg, mxsim.scheme(name), threads=2)
        three = mxsim.train(cfg, mxsim.scheme(name), threads=3)
        for other in (two, three):
            assert one.losses.tobytes() == other.losses.tobytes()
            for a, b in zip(one.params, other.params, strict=True):
                assert all(a[kind].tobytes() == b[kind].tobytes() for kind in a)
    with pytest.raises(ValueError, match="threads must be at least 1; got 0"):
        mxsim.train(cfg, mxsim.scheme("exact"), threads=0)


def test_a_blas_that_depends_on_the_cut_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(threads: int) -> Any:
        return lambda a, b, out: out.__setitem__(..., (b.T @ a.T).T * np.float32(1 + 2**-23))

    module = importlib.import_module("mxsim.train")  # mxsim.train itself is the function
    monkeypatch.setattr(module, "threaded_dot", careless)
    cfg = replace(TINY, steps=2)
    with pytest.warns(RuntimeWarning, match="other bits.*2 threads: running on one"):
        two = mxsim.train(cfg, mxsim.scheme("exact"), threads=2)
    assert two.losses.tobytes() == mxsim.train(cfg, mxsim.scheme("exact")).losses.tobytes()


def test_a_step_allocates_nothing_large() -> None:
    for name in ("exact", "all_e4m3", "paper_code", "bf16"):
        for data in ("fresh", "fixed", "mini-batches"):
            cfg = replace(TINY, width=64, depth=2, batch=256, steps=50, eval_samples=64)
            if data != "fresh":
                size = 256 if data == "fixed" else 1024
                cfg = replace(cfg, data="fixed", dataset_size=size)
            training = mxsim.start(cfg, mxsim.scheme(name)).advance(3)
            tracemalloc.start()
            training.advance(5)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            # Less than one (256, 64) array: headers, views and Python's own objects.
            assert peak < 64 * 1024, (name, data, peak)


def test_threads_copy_nothing() -> None:
    dy, x = np.ones((256, 1024), np.float32), np.ones((256, 256), np.float32)
    out, run = np.empty((1024, 256), np.float32), threaded_dot(2)
    run(dy.T, x, out)
    tracemalloc.start()
    run(dy.T, x, out)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * 1024
    np.testing.assert_array_equal(out, 256)
