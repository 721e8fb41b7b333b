"""Every figure: its build fails on a missing point; its sidecar says which runs it shows."""

import importlib
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tyro

from figures import threshold_prediction
from figures.all import FIGURES, Drawn
from mxsim.store import Record, Store, result_id
from studies import (
    bias_by_site,
    bias_vs_scale,
    claims,
    controller,
    edge_of_stability,
    gamma_cliff,
    interventions,
    ln_affine_isolation,
    noise_floor,
    noisy_quadratic,
    phase_diagrams,
    quantized_edge,
)
from studies import threshold_prediction as thresholds

COMMIT = "f" * 40
META: dict[str, Any] = {"status": "ok", "spikes": [], "bad_step": None, "first_bad_step": None}
WITH_RUNS = [each for each in FIGURES if each.runs]
OF_CLAIMS = {"losses", "last_bin", "hybrids", "bias_to_divergence"}


def ids(study: Any, records: Iterable[Any]) -> tuple[Any, list[str]]:
    return study, [each.id if hasattr(each, "id") else result_id(each) for each in records]


def smoke(study: Any) -> Any:
    return study.DESIGNS["smoke"]


# Script -> its study, and the ids of the runs that it reads first, in the order of their reading.
FIRST: dict[str, Callable[[Drawn], tuple[Any, list[str]]]] = {
    **{
        name: lambda _: ids(
            claims,
            [*claims.points(smoke(claims)).values(), *claims.watches(smoke(claims)).values()],
        )
        for name in OF_CLAIMS
    },
    "activation_norm": lambda _: of_diagram("activation_norm"),
    "phase_diagrams": lambda each: of_diagram(each.given["diagram"]),
    "interventions": lambda _: ids(
        interventions, interventions.base_runs(smoke(interventions)).values()
    ),
    "quantized_edge": lambda _: ids(
        quantized_edge, quantized_edge.runs(quantized_edge.design_of("smoke")).values()
    ),
    "ln_affine_isolation": lambda _: ids(
        ln_affine_isolation, ln_affine_isolation.points(smoke(ln_affine_isolation)).values()
    ),
    "bias_by_site": lambda _: ids(bias_by_site, bias_by_site.cells(smoke(bias_by_site))),
    "bias_vs_scale": lambda _: ids(
        bias_vs_scale, bias_vs_scale.points(smoke(bias_vs_scale)).values()
    ),
    "gamma_cliff": lambda _: ids(gamma_cliff, gamma_cliff.cells(smoke(gamma_cliff))),
    "controller": lambda _: ids(controller, controller.all_runs(smoke(controller)).values()),
    "edge_of_stability": lambda _: ids(
        edge_of_stability, edge_of_stability.cells(smoke(edge_of_stability)).values()
    ),
    "noise_floor": lambda _: ids(noise_floor, noise_floor.cells(smoke(noise_floor))),
    "noisy_quadratic": lambda _: ids(noisy_quadratic, [smoke(noisy_quadratic)]),
    "threshold_prediction": lambda _: ids(
        thresholds, thresholds.forecasts(smoke(thresholds)).values()
    ),
}
SUFFIXED = {  # studies whose tiers have folders of their own
    "claims", "phase_diagrams", "interventions", "quantized_edge", "bias_vs_scale", "controller",
    "threshold_prediction",
}  # fmt: skip


def of_diagram(name: Any) -> tuple[Any, list[str]]:
    points = phase_diagrams.diagram(name, "smoke").grid.points()
    return ids(phase_diagrams, points.values())


def first_runs(each: Drawn) -> tuple[str, list[str]]:
    """The folder of a figure's results, and the ids of what it reads first, each once."""
    study, wanted = FIRST[each.script or each.name](each)
    named = getattr(study, "study_name", None)
    name = named("smoke") if named else study.STUDY
    return name + "_smoke" * (study.STUDY in SUFFIXED), list(dict.fromkeys(wanted))


def stubs(folder: Path, names: Iterable[str]) -> dict[str, Record]:
    """Stored results of these ids that hold nothing but a status and a commit."""
    store = Store(folder)
    records = {
        name: Record(name, {"x": np.zeros(1)}, {**META, "versions": {"commit": COMMIT}})
        for name in names
    }
    for record in records.values():
        store.save(record)
    return records


@pytest.mark.parametrize("each", WITH_RUNS, ids=lambda each: each.name)
def test_a_figure_of_which_one_run_is_missing_is_not_drawn(
    each: Drawn, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, names = first_runs(each)
    *there, missing = names
    stubs(tmp_path / folder, there)
    out = tmp_path / "out"
    assert each.draw("smoke", tmp_path, out) == 1
    said = capsys.readouterr().err
    assert missing in said or re.search(r"\b1 of \d+ ", said)
    assert said.endswith(f"; run {command_of(each)} --results {tmp_path}\n")
    assert not out.exists()


@pytest.mark.parametrize("each", WITH_RUNS, ids=lambda each: each.name)
def test_the_command_that_is_told_runs_what_is_missing(each: Drawn) -> None:
    """By the study's own parser; a diagram is told by name, without it another would be run."""
    _, _, module, *told = command_of(each).split()
    study = importlib.import_module(module)
    asked = tyro.cli(study.Arguments, args=told, prog=module)
    assert asked.tier == "smoke"
    assert study is FIRST[each.script or each.name](each)[0]
    if study is phase_diagrams:
        (name,) = asked.diagrams
        grid = phase_diagrams.diagram(name, asked.tier).grid
        assert {point.id for point in grid.points().values()} == set(first_runs(each)[1])


def command_of(each: Drawn) -> str:
    """What runs the results of a figure, in the smoke tier."""
    study = FIRST[each.script or each.name](each)[0]
    name = each.given.get("diagram", "activation_norm")
    diagram = f" --diagrams {name}" if study is phase_diagrams else ""
    return f"python -m studies.{study.STUDY}{diagram} --tier smoke"


def source_of(each: Drawn, folder: Path, records: dict[str, Record]) -> Any:
    """What a figure says of its runs, if its results are these records."""
    figure = importlib.import_module(f"figures.{each.script or each.name}")
    study = FIRST[each.script or each.name](each)[0]
    if study is phase_diagrams:
        name = each.given.get("diagram", "activation_norm")
        it = phase_diagrams.diagram(name, "smoke")
        results: Any = phase_diagrams.Results(name, it, records, {})  # type: ignore[arg-type]
    else:
        own = getattr(study, "design_of", lambda _: None)("smoke") or smoke(study)
        results = SimpleNamespace(design=own, records=records)
    inline = each.name in ("controller", "ln_affine_isolation", "activation_norm_losses")
    return figure.runs_of(results) if inline else figure.runs_of(results, folder)


@pytest.mark.parametrize(
    "each", [each for each in WITH_RUNS if each.name not in OF_CLAIMS], ids=lambda each: each.name
)
def test_a_figure_names_its_study_its_command_and_every_run(
    each: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of runs that did not fail: none is changed, none traced."""
    monkeypatch.setattr(threshold_prediction, "traced", lambda *_: [])
    folder, names = first_runs(each)
    found = source_of(each, tmp_path / folder, stubs(tmp_path / folder, names))
    assert [record.id for record in found.records] == sorted(names)
    assert (found.n, found.of, found.tier) == (len(names), "stored results", "smoke")
    assert {record.meta["versions"]["commit"] for record in found.records} == {COMMIT}
    script, study = each.script or each.name, FIRST[each.script or each.name](each)[0]
    assert found.study == study.STUDY
    diagram = f" --diagram {each.given['diagram']}" if "diagram" in each.given else ""
    assert found.command == f"python -m figures.{script}{diagram} --tier smoke"


def test_every_figure_is_among_them() -> None:
    assert {each.script or each.name for each in WITH_RUNS} == set(FIRST)
    assert [each.name for each in FIGURES if not each.runs] == ["format_codes"]
