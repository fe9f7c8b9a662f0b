"""Progress that deploy reports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

import attnforge
from attnforge.progress import Progress, Stages, Steps
from attnforge.runtime.cases import LARGEST
from tests.support.broken import Attention, made
from tests.support.bundles import small_example


class Recorder:
    """Records the stages and steps that it receives."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, int, int]] = []
        self.steps: dict[str, list[tuple[str, float, float | None]]] = {}

    def stage(self, name: str, number: int, total: int) -> None:
        self.stages.append((name, number, total))

    def step(self, what: str, done: float, total: float | None) -> None:
        self.steps.setdefault(self.stages[-1][0], []).append((what, done, total))


def test_deploy_reports_every_stage_and_every_case(tmp_path: Path) -> None:
    module, args, shapes = small_example()
    recorder = Recorder()
    assert isinstance(recorder, Progress)
    bundle = attnforge.deploy(
        module, args, tmp_path / "bundle", shapes, targets=["onnxruntime"], tune=False, progress=recorder
    )
    stages = ["export", "canonicalize", "lower and build for onnxruntime", "reference", "lower for openvino"]
    stages.append("check backends")
    assert recorder.stages == [(name, i + 1, len(stages)) for i, name in enumerate(stages)]
    steps = recorder.steps.pop("reference")
    assert recorder.steps == {"check backends": [("onnxruntime-cpu", 0, 1)]}
    cases = [case.name for case in bundle.manifest.cases]
    draws = [what for what, _, _ in steps[len(cases) :]]
    assert [what for what, _, _ in steps[: len(cases)]] == [LARGEST, *(case for case in cases if case != LARGEST)]
    assert {draw.removeprefix("eager's error, ") for draw in draws} <= set(cases)
    work = [done for _, done, _ in steps]
    (most,) = {total for _, _, total in steps}
    assert work[0] == 0 and work == sorted(set(work)) and most is not None and work[-1] < most
    assert work[1] - work[0] > work[2] - work[1] > 0  # in proportion to the cost of a case
    assert list(bundle.manifest.seconds) == list(bundle.manifest.memory) == stages
    assert all(2**20 < size < 2**40 for size in bundle.manifest.memory.values())
    total = bundle.manifest.total
    assert total.memory == max(bundle.manifest.memory.values())
    assert total.seconds == pytest.approx(sum(bundle.manifest.seconds.values()), abs=0.01)
    assert bundle.manifest.children == {}


def test_tuning_reports_every_site(tmp_path: Path) -> None:
    module, args, shapes = made(Attention)
    recorder = Recorder()
    bundle = attnforge.deploy(module, args, tmp_path / "bundle", shapes, targets=["onnxruntime"], progress=recorder)
    sites = [site.site for site in bundle.manifest.attention.details]
    assert recorder.steps["lower and build for onnxruntime"] == [(site, i, len(sites)) for i, site in enumerate(sites)]
    assert recorder.stages[-2:] == [("measure backends", 6, 7), ("check backends", 7, 7)]
    choice = bundle.manifest.choice
    assert choice is not None
    backends = {what for what, _, _ in recorder.steps["measure backends"]}
    assert backends == {*choice.milliseconds, *choice.dropped} >= {"onnxruntime-cpu"}


def test_a_function_receives_the_names_of_stages() -> None:
    names: list[str] = []
    stages = Stages(names.append, ["first", "second"])
    Steps(stages.begin("first"), 1).begin("a step")
    stages.begin("second")
    assert names == ["first", "second"]
    assert list(stages.seconds()) == names


def test_each_stage_has_a_peak_of_its_own() -> None:
    """In a process of its own: here, threads of earlier tests may still allocate."""
    code = """
        import numpy as np
        from attnforge.memory import reset_peak
        from attnforge.progress import Stages

        stages = Stages(None, ["large", "small"])
        stages.begin("large")
        array = np.ones(2**25)
        del array
        stages.begin("small")
        print(*stages.memory().items(), reset_peak())
    """
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    found = re.fullmatch(r"\('large', (\d+)\) \('small', (\d+)\) (\w+)\n", done.stdout)
    assert found is not None
    large, small, can_reset = found.groups()
    assert int(large) - int(small) > 2**26 if can_reset == "True" else int(small) >= int(large)
