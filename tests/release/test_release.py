"""Workflows run make targets that exist, and the lowest versions are those of pyproject.toml."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from attnforge import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
WITHOUT_TARGET = {"publish"}
"""Jobs that only run actions."""


def targets_of(job: dict[str, Any]) -> list[str]:
    """The make targets of a job, for every value of its matrix."""
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert all(
        re.fullmatch(r"make \S+( \w+=\S*| \w+=\$\{\{ [\w.]+ \}\})*|make \$\{\{ matrix\.target \}\}", c)
        for c in commands
    )
    named = [command.split(maxsplit=2)[1] for command in commands]
    matrix: list[str] = job.get("strategy", {}).get("matrix", {}).get("target", [])
    return [target for name in named for target in (matrix if name == "${{" else [name])]


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_every_job_runs_make_targets_that_exist(file: Path) -> None:
    makefile = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    targets = {name: targets_of(job) for name, job in jobs.items()}
    assert {name for name, named in targets.items() if not named} <= WITHOUT_TARGET
    assert {target for named in targets.values() for target in named} <= makefile


def test_there_is_a_workflow_for_each_occasion() -> None:
    assert [file.stem for file in WORKFLOWS] == ["check", "docs", "nightly", "release"]


def test_issue_templates_ask_for_what_doctor_says() -> None:
    for file in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"):
        template = yaml.safe_load(file.read_text(encoding="utf-8"))
        labels = [part["attributes"]["label"] for part in template.get("body", ())]
        assert file.stem == "config" or "attnforge doctor --json" in labels


def test_the_citation_is_of_this_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == __version__


def required_by_project() -> list[Requirement]:
    """The requirements of attnforge and of its extras, those of development left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        k: v for k, v in project["optional-dependencies"].items() if k not in ("dist", "docs", "lint", "tensorrt")
    }
    return [Requirement(line) for lines in (project["dependencies"], *extras.values()) for line in lines]


def test_servers_need_the_versions_that_the_project_needs() -> None:
    lines = (ROOT / "serving/images/requirements.txt").read_text(encoding="utf-8").splitlines()
    known = {(canonicalize_name(r.name), str(r.specifier)) for r in required_by_project()}
    served = {(canonicalize_name(r.name), str(r.specifier)) for r in map(Requirement, lines[1:])}
    assert len(served) == 9 and served <= known


def test_the_lowest_versions_are_those_of_the_requirements() -> None:
    lines = (ROOT / "tests/release/lowest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    for requirement in required_by_project():
        name = canonicalize_name(requirement.name)
        if name in ("attnforge", "torch") or "==" in str(requirement.specifier):
            continue
        if requirement.marker is not None and name == "onnxruntime":  # onnxruntime-gpu elsewhere
            continue
        bound = next(part.version for part in requirement.specifier if part.operator == ">=")
        release = Version(pinned[name]).release
        assert release[: len(Version(bound).release)] == Version(bound).release, f"{requirement}, and {pinned[name]}"
