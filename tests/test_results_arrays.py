"""Arrays of stored results: one cell a run, NaN or nothing where there is none."""

import numpy as np
import pytest

from mxsim.results import LabelledArray, Results

LRS = (0.001, 0.01, 0.1)
SCHEMES = ("all_e4m3", "exact", "gemm_e4m3")
VERDICTS = (
    ("ok", None, None, True),
    ("diverged", 8, None, True),
    ("nonfinite", 5, "hidden", False),
)
FIELDS = ("status", "first_bad_step", "first_bad_tensor", "learned")
ABSENT = ("exact", 0.1, 1)
SETTINGS = ("scheme", "lr", "seed", "width", "grad_clip")


@pytest.fixture
def table() -> Results:
    """Verdicts by learning rate; eval_loss = 100 lr + seed."""
    rows = tuple(
        {
            "id": f"{scheme}-{lr}-{seed}",
            **dict(zip(FIELDS, verdict, strict=True)),
            "eval_loss": 100 * lr + seed,
            "scheme": scheme,
            "lr": lr,
            "seed": seed,
            "width": 8,
            "grad_clip": None,
        }
        for seed in (1, 0)
        for scheme in SCHEMES
        for lr, verdict in zip(LRS, VERDICTS, strict=True)
        if (scheme, lr, seed) != ABSENT
    )
    return Results(rows, (), tuple(rows[0]), SETTINGS)


def test_an_array_over_all_settings_that_vary(table: Results) -> None:
    found = table.array("eval_loss", ["lr", "scheme", "seed"])
    assert found.dims == ("lr", "scheme", "seed")
    assert found.coords == {
        "lr": LRS,
        "scheme": SCHEMES,
        "seed": (0, 1),
    }
    expected = np.empty((3, 3, 2))
    for i, lr in enumerate(LRS):
        for seed in (0, 1):
            expected[i, :, seed] = 100 * lr + seed
    expected[2, 1, 1] = np.nan  # ABSENT
    assert found.values.dtype == np.float64
    np.testing.assert_array_equal(found.values, expected)
    turned = table.array("eval_loss", ("seed", "scheme", "lr"))
    np.testing.assert_array_equal(turned.values, expected.transpose(2, 1, 0))


def test_arrays_of_text_and_truth_and_absent_values(table: Results) -> None:
    dims = ("scheme", "lr", "seed")
    status = table.array("status", dims).sel(scheme="exact")
    assert status.values.dtype == np.dtype("<U9")
    expected = [["ok", "ok"], ["diverged", "diverged"], ["nonfinite", ""]]
    np.testing.assert_array_equal(status.values, expected)
    learned = table.array("learned", dims).sel(scheme="exact")
    np.testing.assert_array_equal(learned.values, [[1, 1], [1, 1], [0, np.nan]])
    steps = table.array("first_bad_step", dims).sel(scheme="exact")
    np.testing.assert_array_equal(steps.values, [[np.nan, np.nan], [8, 8], [5, np.nan]])
    tensors = table.array("first_bad_tensor", dims).sel(scheme="exact")
    np.testing.assert_array_equal(tensors.values, [["", ""], ["", ""], ["hidden", ""]])
    nothing = table.array("grad_clip", dims)
    assert nothing.values.shape == (3, 3, 2)
    assert np.isnan(nothing.values).all()


def test_sel(table: Results) -> None:
    found = table.array("eval_loss", ["lr", "scheme", "seed"])
    part = found.sel(lr=0.01, seed=1)
    assert part.dims == ("scheme",)
    assert list(part.coords) == ["scheme"]
    np.testing.assert_array_equal(part.values, [2.0, 2.0, 2.0])
    one = part.sel(scheme="exact")
    assert one.dims == ()
    assert float(one.values) == 2.0
    np.testing.assert_array_equal(found.sel().values, found.values)
    with pytest.raises(ValueError, match=r"lr must be one of 0.001, 0.01, 0.1; got 0.02"):
        found.sel(lr=0.02)
    with pytest.raises(ValueError, match=r"sel takes the dims scheme; got lr"):
        part.sel(lr=0.01)
    with pytest.raises(ValueError, match=r"sel takes the dims none; got lr"):
        one.sel(lr=0.01)


def test_none_is_a_coordinate_after_all_others() -> None:
    rows = tuple({"id": str(v), "clip": v, "loss": i} for i, v in enumerate((None, 2.0, 1)))
    table = Results(rows, (), ("id", "clip", "loss"), ("clip",))
    found = table.array("loss", "clip")
    assert found.coords == {"clip": (1, 2.0, None)}
    np.testing.assert_array_equal(found.values, [2, 1, 0])
    assert float(found.sel(clip=None).values) == 0


def test_two_runs_in_one_cell_are_refused_with_what_tells_them_apart(table: Results) -> None:
    with pytest.raises(ValueError, match=r"dims lr: 3 cells hold several runs") as error:
        table.array("eval_loss", "lr")
    assert "they differ in scheme, seed: add to dims" in str(error.value)
    with pytest.raises(ValueError, match="they differ in seed: add to dims"):
        table.array("eval_loss", ["lr", "scheme"])
    with pytest.raises(ValueError, match="they differ in scheme, lr, seed"):
        table.array("eval_loss", [])
    one = table.where(["lr=0.1", "scheme=exact"]).array("eval_loss", [])
    assert float(one.values) == 10.0
    twins = Results(({"id": "a", "x": 1}, {"id": "b", "x": 1}), (), ("id", "x"), ("x",))
    with pytest.raises(ValueError, match=r"\(x=1\) a and b; no setting tells them apart"):
        twins.array("id", "x")


@pytest.mark.parametrize(
    ("field", "dims", "words"),
    [
        ("loss", ["lr"], r"field must be one of id, .*; got 'loss' \(did you mean eval_loss"),
        ("eval_loss", ["rate"], r"dims must be of scheme, .*; got 'rate'"),
        ("eval_loss", ["status"], r"dims must be of .*; got 'status'"),
        ("eval_loss", ["lr", "lr"], "dims must differ; got lr, lr"),
    ],
)
def test_arrays_that_make_no_sense(table: Results, field: str, dims: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        table.array(field, dims)


def test_an_array_of_no_runs(table: Results) -> None:
    found = table.where("status=failed").array("eval_loss", ["lr", "seed"])
    assert isinstance(found, LabelledArray)
    assert found.values.shape == (0, 0)
