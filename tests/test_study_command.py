"""How a study's command line refuses: one sentence and status 2, as tyro's own refusals have."""

import pytest

from studies import interventions, noise_floor
from studies.command import parse

PROGRAM = "python -m studies.any"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--workers", "0"], "workers must be at least 1; got 0"),
        (["--address", "tcp://host:1"], "address needs executor 'dask'; got tcp://host:1 with"),
    ],
)
def test_a_refused_value_is_one_sentence(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(interventions.Arguments, PROGRAM, words)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{PROGRAM}: {sentence}")
    assert error.endswith(f"(options: {PROGRAM} --help)\n")
    assert error.count("\n") == 1


def test_what_is_typed_arrives_as_the_study_declares_it() -> None:
    typed = parse(interventions.Arguments, PROGRAM, ["--tier", "smoke", "--workers", "3"])
    assert typed == interventions.Arguments(tier="smoke", workers=3)
    assert type(typed) is interventions.Arguments  # it checks itself again
    assert parse(noise_floor.Arguments, PROGRAM, []) == noise_floor.Arguments()


def test_help_shows_each_option_with_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(interventions.Arguments, PROGRAM, ["--help"])
    assert stop.value.code == 0
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Interventions before a divergence, against a placebo." in text
    assert "Processes, one BLAS thread each" in text  # of the inherited options, too
    assert "Where results are stored, a folder a study." in text
