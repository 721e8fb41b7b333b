"""The released reference library's own outputs, entry by entry.

golden/reference_qdq.npz holds `in/<input>` and `out/<input>/<format>/<round>/<axis>/<block>` (or
`out/<input>/bfloat16/<round>`): values after quantize-dequantize by microxcaling, scale rule floor.
Its "nearest" sends ties away from zero, its "floor" truncates. They are compared as numbers, since
the library treats the sign of zero differently.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mxsim

GOLDEN = np.load(Path(__file__).parent / "golden" / "reference_qdq.npz")
ROUNDINGS = {"nearest": "away", "even": "even", "floor": "zero"}
OUTPUTS = sorted(key for key in GOLDEN if key.startswith("out/"))


def test_the_file_is_whole() -> None:
    # 5 inputs x (6 formats x 2 axes x (3 roundings with block 32, nearest also with block 16)
    # + bfloat16 x 2 roundings)
    assert len(OUTPUTS) == 5 * (6 * 2 * (3 + 1) + 2)


@pytest.mark.parametrize("key", OUTPUTS)
def test_equals_the_reference_library(key: str) -> None:
    _, name, fmt, rounding, *blocks = key.split("/")
    x = GOLDEN[f"in/{name}"]
    if fmt == "bfloat16":
        got = mxsim.round_to(x, "bf16", ROUNDINGS[rounding])
    else:
        axis, block_size = map(int, blocks)
        got = mxsim.fake_quantize(x, f"mx{fmt}", axis, block_size, "floor", ROUNDINGS[rounding])
    np.testing.assert_array_equal(got, GOLDEN[key])
