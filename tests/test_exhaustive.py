"""A strided sample of tests/exhaustive.py, with the chunks where something changes."""

import pytest

from tests.exhaustive import (
    CASTS,
    CHUNK,
    ELEMENTS,
    PATTERNS,
    RULES,
    SIGN,
    tasks,
    wrong_casts,
    wrong_elements,
    wrong_scales,
)

STARTS = {
    "zero and subnormals": 0x00000000,
    "smallest normals": 0x00800000 - CHUNK // 2,
    "one": 0x3F800000 - CHUNK // 2,
    "448": 0x43E00000 - CHUNK // 2,
    "largest and Inf": 0x7F800000 - CHUNK // 2,
    "negative": 0xBF000000,
    "negative Inf and NaN": 0xFF800000 - CHUNK // 2,
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_elements(start: int) -> None:
    for fmt in ELEMENTS:
        assert [wrong_elements(fmt, start, axis) for axis in (0, 1)] == [0, 0], fmt
    for fmt in CASTS:
        assert wrong_casts(fmt, start) == 0, fmt


@pytest.mark.parametrize("rule", RULES)
def test_scales(rule: str) -> None:
    for fmt in ELEMENTS:
        for what, start in STARTS.items():
            if start < SIGN:
                assert wrong_scales(fmt, rule, start) == 0, (fmt, what)


def test_the_whole_covers_every_pattern_of_every_kind_once() -> None:
    chunks: dict[str, set[int]] = {}
    for what, _, arguments in tasks(1):
        starts = [a for a in arguments if isinstance(a, int)]
        assert starts[0] not in chunks.setdefault(what, set())
        chunks[what].add(starts[0])
    for what, covered in chunks.items():
        end = SIGN if "scales" in what else PATTERNS
        assert covered == set(range(0, end, CHUNK)), what
    assert len(chunks) == len(ELEMENTS) + len(CASTS) + len(ELEMENTS) * len(RULES)


def test_the_reference_notices_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    import mxsim

    whole = mxsim.fake_quantize

    def ties_away(x: object, fmt: str, axis: int) -> object:
        return whole(x, fmt, axis=axis, rounding="away")  # type: ignore[arg-type]

    monkeypatch.setattr(mxsim, "fake_quantize", ties_away)
    assert wrong_elements("mxfp8_e4m3", 0x3F800000, 1) > 0
