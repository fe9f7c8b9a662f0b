"""The laboratory's command: what it writes and prints, its exit code, and what `--only` keeps."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks import experiment
from benchmarks.experiment import MODULES, Claim, Experiment, chosen_of, run
from tests.docs.pages import ROOT


def measure(subject: int, times: int = 2) -> int:
    return subject * times


def claims(figures: dict[str, Any]) -> Iterator[Claim]:
    return (Claim(name, value, 7, "seven") for name, value in figures["models"].items())


SQUARES = Experiment(
    "squares.json", measure, lambda figures: {"squares": str(figures["models"])}, claims, subjects={"a": 1, "ab": 3}
)


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(experiment, "experiment_of", lambda name: SQUARES)
    monkeypatch.setattr(experiment, "RESULTS", tmp_path)
    return tmp_path / "squares.json"


def ended_with(arguments: Sequence[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        run("overhead", arguments)
    return int(ended.value.code or 0)


def test_figures_are_written_and_only_some_are_measured_again(
    squares: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended_with([]) == 0
    written = json.loads(squares.read_bytes())
    assert written["models"] == {"a": 2, "ab": 6} and written["command"] == "python -m benchmarks run overhead"
    assert written["machine"]["processor"] and "torch" in written["tools"]
    assert "squares\n\n{'a': 2, 'ab': 6}" in capsys.readouterr().out
    assert ended_with(["--times", "3", "--only", "ab"]) == 1, "a claim does not hold"
    assert "ab (seven): 9, at most 7" in capsys.readouterr().out
    written = json.loads(squares.read_bytes())
    assert written["models"] == {"a": 2, "ab": 9} and written["command"] == "python -m benchmarks run overhead"
    assert ended_with(["--times", "4", "--results", str(squares.with_name("other.json"))]) == 1
    assert json.loads(squares.with_name("other.json").read_bytes())["command"].endswith("other.json")


def test_an_option_only_of_its_own(squares: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(only: list[str] | None = None, kind: str | None = None) -> Iterator[dict[str, Any]]:
        yield {"models": only}
        raise typer.Exit(1)

    whole = Experiment("squares.json", chosen, lambda figures: {"squares": ""}, variant="kind")
    monkeypatch.setattr(experiment, "experiment_of", lambda name: whole)
    assert ended_with(["--only", "b", "--kind", "of"]) == 1
    written = json.loads(squares.with_name("squares_of.json").read_bytes())
    assert written["models"] == ["b"] and written["command"].endswith("overhead --only b --kind of")


def test_a_wrong_option_or_name_is_refused(squares: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended_with(["--tims", "3"]) == 2 and ended_with(["--only", "c"]) == 2
    assert "known: a, ab" in capsys.readouterr().err
    assert ended_with(["--help"]) == 0 and "--times" in capsys.readouterr().out
    assert not squares.exists()
    with pytest.raises(typer.BadParameter, match="no experiment 'overheads'; known: suite, "):
        run("overheads", [])


def test_names_choose_subjects_by_their_beginning() -> None:
    assert chosen_of(["a", "ab", "b"], ["a"]) == ["a"], "a whole name"
    assert chosen_of(["ab", "ac", "b"], ["b", "a"]) == ["ab", "ac", "b"]
    assert chosen_of(["ab", "b"], None) == ["ab", "b"]


def test_every_experiment_is_listed_and_has_its_command() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks"]
    done = subprocess.run([*command, "list"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in done.stdout.splitlines()] == [*MODULES]
    done = subprocess.run(
        [*command, "run", "export-faults", "--help"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "--count" in done.stdout
