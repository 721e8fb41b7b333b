"""The list of backends, and why one is not there."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from mxsim.crosscheck.backend import Backend, minimal_backend, numba_backend, torch_backend
from mxsim.crosscheck.witnesses import (
    gfloat_blocks_backend,
    gfloat_elements_backend,
    microxcaling_backend,
    ml_dtypes_backend,
    torchao_backend,
)

DEVICES = ("cpu", "cuda")


def all_backends(device: str = "cpu") -> tuple[list[Backend], dict[str, str]]:
    """Those that can be had here, and for each other one the reason.

    device: "cuda" adds PyTorch and torchao on the GPU to those on the CPU; without it they are not
    tried.  Raises ValueError for another name.
    """
    if device not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}; got {device!r}")
    found, missing = [numba_backend(), minimal_backend()], {}
    devices = DEVICES[: DEVICES.index(device) + 1]
    wanted: list[tuple[str, Callable[[], Backend]]] = [
        *((f"torch {each}", partial(torch_backend, each)) for each in devices),
        *((f"torchao {each}", partial(torchao_backend, each)) for each in devices),
        ("ml_dtypes", ml_dtypes_backend),
        ("gfloat elements", gfloat_elements_backend),
        ("gfloat blocks", gfloat_blocks_backend),
        ("microxcaling", microxcaling_backend),
    ]
    for name, make in wanted:
        try:
            found.append(make())
        except ImportError as error:
            missing[name] = str(error)
    return found, missing
