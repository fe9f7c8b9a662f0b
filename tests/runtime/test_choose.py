"""Measurements at deployment: the fastest backend within the budget, and the fastest session settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest

import attnforge
from attnforge.bundle import Bundle, Choice, Manifest
from attnforge.model.registry import build_model
from attnforge.runtime import cases as reference
from attnforge.runtime import choose as choosing
from attnforge.runtime import session
from attnforge.runtime.backends.registry import by_preference, fastest_first, why_not_here
from attnforge.runtime.decoding.decoder import Decoder
from attnforge.runtime.parity import verify
from attnforge.runtime.race import medians
from tests.support.bundles import example_of, rewrite
from tests.support.decoders import DeployDecoder

pytestmark = pytest.mark.xdist_group("choose")

needs_openvino = pytest.mark.skipif(why_not_here("openvino") is not None, reason=str(why_not_here("openvino")))


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    module, args, shapes = example_of("self-attention")
    folder = tmp_path_factory.mktemp("choice") / "bundle"
    return attnforge.deploy(module, args, folder, shapes, targets=["onnxruntime"], name="self-attention")


def with_choice(bundle: Bundle, folder: Path, **changes: Any) -> Bundle:
    """Return a copy of the bundle with changed fields of its choice."""
    import shutil

    shutil.copytree(bundle.path, folder)

    def change(manifest: Manifest) -> None:
        assert manifest.choice is not None
        manifest.choice = manifest.choice.model_copy(update=changes)

    return rewrite(folder, change)


@needs_openvino
def test_every_available_backend_is_verified_and_timed(deployed: Bundle) -> None:
    choice = deployed.manifest.choice
    assert choice is not None and choice.dropped == {}
    assert set(choice.milliseconds) == {"onnxruntime-cpu", "openvino"}
    assert all(ms > 0 for ms in choice.milliseconds.values())
    assert choice.picked == min(choice.milliseconds, key=lambda name: choice.milliseconds[name])
    assert set(choice.versions) == {"onnxruntime-gpu", "openvino"} or "onnxruntime" in choice.versions
    assert attnforge.load(deployed).backend == choice.picked
    assert set(attnforge.verify(deployed).backends) == {"onnxruntime-cpu", "openvino"}


@needs_openvino
@pytest.mark.parametrize("fastest", ["onnxruntime-cpu", "openvino"])
def test_auto_loads_the_fastest_backend_of_this_machine(deployed: Bundle, tmp_path: Path, fastest: str) -> None:
    slower = {"onnxruntime-cpu": "openvino", "openvino": "onnxruntime-cpu"}[fastest]
    bundle = with_choice(deployed, tmp_path / "b", milliseconds={slower: 2.0, fastest: 1.0}, picked=fastest)
    assert attnforge.load(bundle).backend == fastest


@needs_openvino
@pytest.mark.parametrize("field", ["processor", "processors", "instructions", "version"])
def test_on_another_machine_the_rules_choose(deployed: Bundle, tmp_path: Path, field: str) -> None:
    chosen = deployed.manifest.choice
    assert chosen is not None
    changes: dict[str, Any] = {"milliseconds": {"openvino": 1.0, "onnxruntime-cpu": 2.0}, "picked": "openvino"}
    if field == "version":
        changes["versions"] = {**chosen.versions, "openvino": "2001.1"}
    else:
        value = {"processor": "Another", "processors": 1024, "instructions": ["avx2"]}[field]
        changes["machine"] = chosen.machine.model_copy(update={field: value})
    bundle = with_choice(deployed, tmp_path / "b", **changes)
    assert attnforge.load(bundle).backend == "onnxruntime-cpu"
    report = attnforge.verify(bundle)
    assert "by name" in report.skipped["openvino"]


@needs_openvino
def test_a_backend_over_the_budget_is_not_chosen_and_the_reason_is_recorded(
    deployed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = verify.hold

    def hold(bundle: Bundle, backend: str, *of: Any, **named: Any) -> Any:
        report = whole(bundle, backend, *of, **named)
        return report.model_copy(update={"passed": False, "reason": "planted"}) if backend == "openvino" else report

    monkeypatch.setattr(choosing, "hold", hold)
    choice = choosing.choose_backend(deployed)
    assert choice is not None and choice.picked == "onnxruntime-cpu"
    assert list(choice.milliseconds) == ["onnxruntime-cpu"]
    assert "planted" in choice.dropped["openvino"]
    bundle = with_choice(deployed, tmp_path / "b", **{name: getattr(choice, name) for name in Choice.model_fields})
    attnforge.load(bundle).close()
    assert not caplog.records
    attnforge.load(bundle, "openvino").close()
    assert "on openvino was left out by deploy on this machine: it missed the parity budget" in caplog.text
    report = attnforge.verify(bundle)
    assert report.passed and "planted" in report.skipped["openvino"]
    assert attnforge.load(bundle).backend == "onnxruntime-cpu"
    assert "openvino" not in by_preference(bundle)


@needs_openvino
def test_a_decoder_is_timed_on_a_prompt_and_as_many_steps(
    decoders: DeployDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: dict[str, Callable[[], Any]] = {}

    def race(given: Mapping[str, Callable[[], Any]], *limits: float) -> dict[str, float]:
        runs.update(given)
        prompts: list[int] = []
        monkeypatch.setattr(Decoder, "prefill", lambda self, tokens: prompts.append(tokens.shape[1]))
        steps: list[int] = []
        monkeypatch.setattr(Decoder, "step", lambda self, tokens: steps.append(len(tokens)))
        for run in given.values():
            run()
        assert prompts == [9, 9] and steps == [2] * 18
        monkeypatch.undo()
        return {name: float(name == "openvino") + 1 for name in given}

    monkeypatch.setattr(choosing, "medians", race)
    choice = choosing.choose_backend(decoders("rotary", "fp32"), seconds=0.0)
    assert choice is not None and choice.picked == "onnxruntime-cpu" and set(runs) == {"onnxruntime-cpu", "openvino"}


def test_gpu_backends_come_first_unless_arrays_are_on_the_host(deployed: Bundle, decoders: DeployDecoder) -> None:
    times = {"openvino": 1.0, "tensorrt_rtx": 3.0, "onnxruntime-cpu": 2.0, "onnxruntime-cuda": 2.5}
    first = fastest_first(times, deployed.manifest)
    assert first == ["onnxruntime-cuda", "tensorrt_rtx", "openvino", "onnxruntime-cpu"]
    assert fastest_first(times, decoders("rotary", "fp32").manifest) == sorted(times, key=lambda name: times[name])


@needs_openvino
def test_a_bundles_own_model_that_misses_the_budget_still_fails_verification(deployed: Bundle, tmp_path: Path) -> None:
    bundle = with_choice(
        deployed,
        tmp_path / "b",
        milliseconds={"openvino": 1.0},
        picked="openvino",
        dropped={"onnxruntime-cpu": "planted"},
    )
    assert "onnxruntime-cpu" in attnforge.verify(bundle).backends  # it is verified although it failed at deployment


@needs_openvino
def test_a_backend_that_fails_is_not_chosen(deployed: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    load = session.load

    def refuse(bundle: Bundle, name: str, **options: Any) -> Any:
        if name == "onnxruntime-cpu":
            raise RuntimeError("out of order\nand more")
        return load(bundle, name, **options)

    monkeypatch.setattr(choosing, "load", refuse)
    choice = choosing.choose_backend(deployed)
    assert choice is not None and choice.picked == "openvino" and choice.dropped == {"onnxruntime-cpu": "out of order"}


@needs_openvino
def test_each_backend_is_opened_first_once_and_verified_once(deployed: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    load, hold = session.load, verify.hold
    opened: list[str] = []
    verified: list[str] = []

    def open_recorded(bundle: Bundle, name: str, **options: Any) -> Any:
        opened.append(name)
        return load(bundle, name, **options)

    def hold_recorded(bundle: Bundle, backend: str, *of: Any, **named: Any) -> Any:
        verified.append(backend)
        return hold(bundle, backend, *of, **named)

    monkeypatch.setattr(choosing, "load", open_recorded)
    monkeypatch.setattr(choosing, "hold", hold_recorded)
    monkeypatch.setattr(choosing, "medians", lambda runs, *limits: {name: 2.0 + len(opened) for name in runs})
    choice = choosing.choose_backend(deployed)
    assert opened == verified + verified + verified[::-1] and sorted(verified) == ["onnxruntime-cpu", "openvino"]
    assert choice is not None and choice.milliseconds == dict.fromkeys(verified, 7.0)

    opened.clear()
    verified.clear()
    choice = choosing.choose_backend(deployed, seconds=0.0)  # no time to open anything twice
    assert opened == verified + verified and sorted(verified) == ["onnxruntime-cpu", "openvino"]
    assert choice is not None and choice.milliseconds == dict.fromkeys(verified, 6.0)


def test_with_one_backend_there_is_nothing_to_choose(deployed: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "why_unavailable", lambda bundle, name: None if name == "onnxruntime-cpu" else "no")
    assert choosing.choose_backend(deployed) is None


def test_nothing_is_measured_with_tune_false(tmp_path: Path) -> None:
    module, args, shapes = build_model("worked-example")
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    assert bundle.manifest.choice is None and bundle.manifest.targets["onnxruntime"].session is None
    stages = {"export", "canonicalize", "lower and build for onnxruntime", "reference", "lower for openvino"}
    assert set(bundle.manifest.seconds) == {*stages, "check backends"}


# --- the session ------------------------------------------------------------------------------------------------------


def test_the_session_is_measured_and_its_optimized_model_kept(deployed: Bundle) -> None:
    settings = deployed.manifest.targets["onnxruntime"].session
    assert settings is not None and settings.version == ort.__version__
    assert {"default", "no spinning", "no arena"} <= set(settings.measured)
    assert settings.optimized is not None and settings.optimized in deployed.manifest.files
    assert set(deployed.manifest.seconds) >= {"export", "reference", "measure backends"}


def test_the_optimized_model_is_loaded_here_and_only_here(deployed: Bundle, tmp_path: Path) -> None:
    def loads_optimized(bundle: Bundle) -> bool:
        (bundle.path / "onnxruntime/optimized.onnx").write_bytes(b"none")
        try:
            attnforge.load(bundle.path, "onnxruntime-cpu")
        except attnforge.errors.BundleError:
            return True
        return False

    assert loads_optimized(with_choice(deployed, tmp_path / "here"))

    def age(manifest: Manifest) -> None:
        session = manifest.targets["onnxruntime"].session
        assert session is not None
        session.version = "1.0.0"

    older = with_choice(deployed, tmp_path / "older")
    assert not loads_optimized(rewrite(older.path, age))


@pytest.mark.parametrize("best", ["one thread", "no spinning", "no arena"])
def test_a_setting_that_wins_twice_is_kept(
    deployed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, best: str
) -> None:
    monkeypatch.setattr(choosing, "this_machine", lambda gpus=True: _with_processors(4))
    monkeypatch.setattr(
        choosing, "medians", lambda runs, *limits: {name: 1.0 if name == best else 2.0 for name in runs}
    )
    settings = choosing.tune_session(with_choice(deployed, tmp_path / "b"))
    kept = {"one thread": settings.threads == 1, "no spinning": not settings.spinning, "no arena": not settings.arena}
    assert [name for name, is_set in kept.items() if is_set] == [best]


@pytest.mark.parametrize("loses", [1, 2])
def test_a_setting_that_does_not_win_again_or_is_slower_at_the_largest_sizes_is_not(
    deployed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses: int
) -> None:
    races: list[Mapping[str, Any]] = []

    def planted(runs: Mapping[str, Callable[[], Any]], *limits: float) -> dict[str, float]:
        races.append(runs)
        return {name: 2.0 if (name == "default") == (len(races) != loses + 1) else 1.0 for name in runs}

    monkeypatch.setattr(choosing, "medians", planted)
    settings = choosing.tune_session(with_choice(deployed, tmp_path / "b"))
    assert settings.threads is None and settings.spinning and settings.arena
    assert len(races) == loses + 1


def test_a_setting_not_tried_at_the_largest_sizes_for_lack_of_time_is_not_kept(
    deployed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        choosing, "medians", lambda runs, *limits: {name: 1.0 if name == "no arena" else 2.0 for name in runs}
    )
    monkeypatch.setattr(choosing, "seconds_of", lambda run: 0.01)
    bundle = with_choice(deployed, tmp_path / "b")
    assert not choosing.tune_session(bundle, seconds=60.0).arena
    assert choosing.tune_session(bundle, seconds=0.05).arena


def test_a_large_model_keeps_the_default_settings(
    deployed: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(choosing, "OnnxRuntime")
    bundle = with_choice(deployed, tmp_path / "b")
    (bundle.path / "weights.data").touch()
    settings = choosing.tune_session(bundle)
    assert (settings.threads, settings.spinning, settings.arena, settings.optimized) == (None, True, True, None)


def _with_processors(count: int) -> Any:
    from attnforge.machine import this_machine

    return this_machine().model_copy(update={"processors": count})


def test_settings_change_no_answer(deployed: Bundle, tmp_path: Path) -> None:
    feeds = reference.make_inputs(reference.at(deployed.manifest.inputs, {}), deployed.manifest.inputs, {})
    expected = attnforge.load(deployed, "onnxruntime-cpu").run(feeds)["output"]

    def change(manifest: Manifest) -> None:
        session = manifest.targets["onnxruntime"].session
        assert session is not None
        session.threads, session.spinning, session.arena = 1, False, False

    bundle = rewrite(with_choice(deployed, tmp_path / "b").path, change)
    np.testing.assert_allclose(attnforge.load(bundle, "onnxruntime-cpu").run(feeds)["output"], expected, rtol=1e-5)


def test_a_race_times_each_contender_separately() -> None:
    import time

    times = medians({"slow": lambda: time.sleep(0.02), "quick": lambda: time.sleep(0.001)}, 5, 1.0)
    assert times["slow"] >= 20 and times["quick"] >= 1
