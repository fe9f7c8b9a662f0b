"""The GPU benchmark, as far as it can be tested without one: what it refuses, records, concludes and writes."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import typer

from attnforge.bench.results import Interval, Latency
from attnforge.bundle import MANIFEST, Case
from attnforge.errors import RunError
from attnforge.machine import cuda_devices
from attnforge.precision import precision_named
from attnforge.runtime.backends.registry import REGISTRY
from benchmarks.experiments.decoding import SIZES
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import (
    decoding,
    environment,
    gpu_page,
    models,
    parity,
    racing,
    running,
    steps,
    timings,
)
from benchmarks.gpu.device import Device
from benchmarks.gpu.lean.plans import convert
from benchmarks.gpu.parity import judged
from benchmarks.gpu.running import LOST, GpuRun, read, step, write
from benchmarks.gpu.steps import (
    COMPILE,
    EAGER,
    FATAL,
    FLASH,
    SHARES,
    WHOLE,
    GpuResults,
    Item,
    ParityCheck,
    Settings,
    StepResult,
    Timing,
    capabilities,
    why_broken,
)
from tests.support.bundles import DeploySmall

without_gpu = pytest.mark.skipif(cuda_devices() > 0, reason="there is a CUDA device")


@pytest.fixture
def run(tmp_path: Path) -> GpuRun:
    """A run on the CPU, with time left."""
    settings = Settings(
        out=str(tmp_path / "out"), scratch=str(tmp_path), ends=time.time() + 300, place="cpu",
        backends=["onnxruntime-cpu"], quick=True,
    )  # fmt: skip
    return GpuRun(settings, GpuResults())


def alike(ms: float, noise: float = 0.0) -> Latency:
    """Return a latency of `ms` milliseconds, with an interval of `noise` to either side."""
    median = Interval(value=ms, low=ms * (1 - noise), high=ms * (1 + noise))
    return Latency(rounds=[], median=median, min=ms, p90=1.5 * ms, p99=2 * ms, samples=100)


def timing(wall: float, device: float | None, noise: float = 0.0, **peers: tuple[float, float]) -> Timing:
    """Return a timing in milliseconds, with peers that take the given times end to end and on the device."""

    def ratios(ours: float, which: int) -> dict[str, Interval]:
        return {NAMES[name]: alike(ours / times[which], noise).median for name, times in peers.items()}

    return Timing(
        calls=100, wall=alike(wall), device=None if device is None else alike(device), host_ms=0.01,
        per_second=1000 / wall, ready_seconds=0.5, ratios=ratios(wall, 0),
        device_ratios={} if device is None else ratios(device, 1),
    )  # fmt: skip


NAMES = {"eager": EAGER, "compiled": COMPILE, "flash": FLASH}


def passed(error: float = 2e-4, reason: str | None = None) -> ParityCheck:
    return ParityCheck(passed=reason is None, error=error, budget=1e-3, cases=12, reason=reason)


# Without a device


@without_gpu
def test_without_a_device_it_says_so_in_one_line(tmp_path: Path) -> None:
    words = [sys.executable, "-X", "importtime", "-m", "benchmarks.gpu", "--out", str(tmp_path / "out")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert (done.returncode, len(lines), done.stdout) == (command.NO_DEVICE, 1, "")
    assert lines[0].startswith("no CUDA device: nothing was run; ")
    assert re.search(r"\| +torch$", done.stderr, re.MULTILINE) is None, "torch was imported for nothing"
    assert not (tmp_path / "out").exists()


def test_an_unknown_step_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="unknown step 'latence'; known: environment, tests, parity"):
        command.main(only=["latence"])


# One task after the other


def test_a_task_that_raises_is_recorded_and_the_next_one_taken(run: GpuRun) -> None:
    def bad(item: Item) -> None:
        item.values["so far"] = 1
        raise ValueError("\x1b[31mno such kernel\x1b[0m")

    def good(item: Item) -> None:
        item.values["answer"] = 42

    taken = step(run, "ceilings", lambda: [("bad", bad), ("good", good)])
    assert taken.items["bad"].failed == {WHOLE: "ValueError: no such kernel"}
    assert taken.items["bad"].values == {"so far": 1}
    assert taken.items["good"].values == {"answer": 42} and not taken.items["good"].failed
    assert taken.doing is None and read(run.settings.out) == run.results
    assert "no such kernel" in (Path(run.settings.out) / "gpu.md").read_text(encoding="utf-8")


def test_what_there_is_no_time_for_is_listed(run: GpuRun) -> None:
    def slow(item: Item) -> None:
        run.settings.ends = time.time() + running.LEAST / 2

    def unheard(item: Item) -> None:
        raise AssertionError("taken after the end")

    taken = step(run, "latency", lambda: [("first", slow), ("second", unheard), ("third", unheard)])
    assert list(taken.items) == ["first"] and not taken.items["first"].failed
    assert taken.left_out == {"second": "no time was left", "third": "no time was left"}
    assert "- latency: no time was left (second; third)" in gpu_page.page(run.results)


@pytest.mark.parametrize("name", SHARES)
def test_a_task_without_figures_is_written(run: GpuRun, name: str) -> None:
    """As every task is, before it starts and if it fails."""

    def fails(item: Item) -> None:
        raise ValueError("no such kernel")

    step(run, name, lambda: [("12544 tokens", fails)])
    assert f"**{name}: 12544 tokens: {WHOLE}**" in (Path(run.settings.out) / "gpu.md").read_text(encoding="utf-8")


def test_a_step_that_cannot_begin_is_recorded(run: GpuRun) -> None:
    def tasks() -> list[running.Task]:
        raise ImportError("no module named 'torch'")

    taken = step(run, "parity", tasks)
    assert taken.failed == {WHOLE: "ImportError: no module named 'torch'"} and taken.items == {}


def test_what_a_process_before_this_one_did_is_not_done_again(run: GpuRun) -> None:
    run.results.steps["latency"] = StepResult(items={"a": Item(failed={FATAL: "its process died of SIGSEGV"})})
    taken: list[str] = []

    def task(key: str) -> running.Task:
        return key, lambda item: taken.append(key)

    step(run, "latency", lambda: [task("a"), task("b")])
    assert taken == ["b"] and FATAL in run.results.steps["latency"].items["a"].failed


LOUD = r"""
import os
from benchmarks.gpu.running import attempt

def load():
    os.write(2, b"libcublas.so.13: cannot open\n")
    raise RuntimeError("no provider")

failed = {}
os.write(2, b"what was said before\n")
assert attempt(failed, "load", load) is None
print(failed["load"])
"""


def test_what_libraries_print_is_kept_with_the_error(tmp_path: Path) -> None:
    """Standard error is a file, as in the processes of a run."""
    with (tmp_path / "log").open("ab") as log:
        done = subprocess.run([sys.executable, "-c", LOUD], stdout=subprocess.PIPE, stderr=log, text=True, timeout=60)
    assert done.stdout == "RuntimeError: no provider\nIts log: libcublas.so.13: cannot open\n"


def test_a_process_that_dies_takes_one_task_with_it(run: GpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is killed by a signal in the first task, loses the device in the second, and then succeeds."""
    deaths = iter([(-signal.SIGSEGV, "first"), (LOST, None), (0, None)])

    def process(settings: Settings, name: str, log: Path) -> int:
        code, doing = next(deaths)
        results = read(settings.out)
        record = results.steps.setdefault(name, StepResult())
        record.doing = doing
        if doing is not None:
            record.items[doing] = Item(checks={"tensorrt_rtx": passed()})
        write(results, settings.out)
        log.write_text("Fatal Python error: Segmentation fault\n")
        return code

    monkeypatch.setattr(running, "_in_process", process)
    running.supervise(run.settings, "latency")
    taken = read(run.settings.out).steps["latency"]
    said = "its process died of SIGSEGV. Its log: Fatal Python error: Segmentation fault"
    assert taken.items["first"].failed == {FATAL: said}
    assert taken.items["first"].checks["tensorrt_rtx"].passed, "what was found before is kept"
    assert taken.doing is None and next(deaths, None) is None


@pytest.mark.parametrize(("code", "failed", "left_out"), [(1, [WHOLE], []), (None, [], [WHOLE])])
def test_a_process_that_never_began(
    run: GpuRun, monkeypatch: pytest.MonkeyPatch, code: int | None, failed: list[str], left_out: list[str]
) -> None:
    calls: list[str] = []

    def process(settings: Settings, name: str, log: Path) -> int | None:
        calls.append(name)
        log.write_text("ImportError: libcudart.so.13\n")
        return code

    monkeypatch.setattr(running, "_in_process", process)
    running.supervise(run.settings, "parity")
    taken = read(run.settings.out).steps["parity"]
    assert calls == ["parity"] and (list(taken.failed), list(taken.left_out)) == (failed, left_out)


def test_what_a_process_did_not_come_to_is_listed(run: GpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def process(settings: Settings, name: str, log: Path) -> None:
        half = StepResult(planned=["a", "b", "c"], items={"a": Item(), "b": Item(values={"n": 1})}, doing="b")
        write(GpuResults(steps={name: half}), settings.out)

    monkeypatch.setattr(running, "_in_process", process)
    running.supervise(run.settings, "latency")
    taken = read(run.settings.out).steps["latency"]
    assert taken.left_out == {"b": "it was running when the time was over", "c": "no time was left"}
    assert taken.items["b"].values == {"n": 1} and taken.doing is None


def test_what_the_models_processes_recorded_is_taken_over(run: GpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """One died after two of its tasks, one had no time to start, and one is left out by `quick`."""
    monkeypatch.setattr(parity, "models", lambda: ["vit", "transformer-encoder", "self-attention"])

    def supervise(settings: Settings, name: str) -> None:
        taken = StepResult(left_out={WHOLE: "no time was left"})
        if name == "parity:vit":
            items = {key: Item(checks={"onnxruntime-cpu": passed()}) for key in ("vit, fp16", "vit, fp32")}
            taken = StepResult(items=items, failed={WHOLE: "its process died of SIGSEGV"})
        write(GpuResults(steps={name: taken}), settings.out)

    monkeypatch.setattr(parity, "supervise", supervise)
    parity.supervise_models(run.settings)
    taken = read(run.settings.out).steps["parity"]
    assert list(taken.items) == ["vit, fp16", "vit, fp32"] and all(item.checks for item in taken.items.values())
    assert taken.failed == {f"vit, {WHOLE}": "its process died of SIGSEGV"}
    assert {key: why for key, why in taken.left_out.items() if not key.startswith("self-attention")} == {
        "vit, fp16, torch": "its process failed", "vit, fp32, torch": "its process failed",
        "vit, bf16": "left out by --quick", "vit, tf32": "left out by --quick",
        "vit, bf16, torch": "left out by --quick", "vit, tf32, torch": "left out by --quick",
        "transformer-encoder, fp16": "no time was left", "transformer-encoder, fp32": "no time was left",
        "transformer-encoder, bf16": "left out by --quick", "transformer-encoder, tf32": "left out by --quick",
    }  # fmt: skip
    assert taken.left_out["self-attention, fp16"] == "left out by --quick"


@without_gpu
def test_the_whole_of_it_where_nothing_can_run_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes are real; torch without CUDA computes on the CPU. Figures of other steps are kept with `only`."""
    monkeypatch.setattr(command, "cuda_devices", lambda: 1)
    monkeypatch.setattr(command, "device_and_versions", lambda device: {"device": "a device"})
    kept = GpuResults(machine={"device": "a device"}, steps={"tests": StepResult(items={"pytest -m gpu": Item()})})
    write(kept, tmp_path)
    with pytest.raises(typer.Exit) as ended:
        command.main(tmp_path, 1000, only=["ceilings"])
    results = read(tmp_path)
    assert ended.value.exit_code == 0 and set(results.steps) == {"tests", "ceilings"}
    assert list(results.steps["ceilings"].items) == [
        "copy", "product fp16", "product bf16", "product tf32", "product fp32",
    ]  # fmt: skip
    assert not any(item.failed for item in results.steps["ceilings"].items.values())
    assert gpu_page.ceilings_of(results)["copy"] > 0
    assert "TFLOP/s" in (tmp_path / "gpu.md").read_text(encoding="utf-8")


def test_the_tests_that_need_a_gpu_are_found() -> None:
    files = environment.gpu_tests()
    assert files[0] == "tests/runtime/test_gpu.py", "it has the most, and time may run out"
    assert all((environment.ROOT / file).is_file() for file in files)


def test_every_backend_is_tried_with_a_target_that_it_runs() -> None:
    assert all(models.target_of(name) in row.targets for name, row in REGISTRY.items() if row.targets)


# What can be computed on the CPU


def test_one_model_is_checked_against_the_budget(run: GpuRun) -> None:
    tasks = dict(parity.parity_of(Device(run), "multi-head-attention"))
    assert list(tasks) == [
        f"multi-head-attention, {which}" for which in ("fp16", "fp32", "fp16, torch", "fp32, torch")
    ]  # fmt: skip
    taken = step(run, "parity", lambda: [("multi-head-attention, fp32", tasks["multi-head-attention, fp32"])])
    item = taken.items["multi-head-attention, fp32"]
    assert not item.failed and item.checks["onnxruntime-cpu"].passed and item.checks["onnxruntime-cpu"].cases > 10


def test_polygraphy_judges_what_it_runs_in_a_process_of_its_own(small: DeploySmall, tmp_path: Path) -> None:
    """With ONNX Runtime instead of TensorRT, which needs a GPU."""
    bundle = small("fp32")
    model = bundle.manifest.targets["onnxruntime"].model
    report = judged(bundle, model, ["--onnxrt"], {}, "onnxruntime-cpu", tmp_path, 120)
    assert report.passed and report.cases == len(bundle.manifest.cases)
    with pytest.raises(RunError, match=r"polygraphy run exited with code 1: .*") as failed:
        judged(bundle, MANIFEST, ["--onnxrt", "--model-type", "onnx"], {}, "onnxruntime-cuda", tmp_path, 120)
    assert "\n" not in str(failed.value)
    with pytest.raises(subprocess.TimeoutExpired):
        judged(bundle, model, ["--onnxrt"], {}, "onnxruntime-cpu", tmp_path, 0.01)


def test_models_are_converted_for_the_builder_of_tensorrt_8(tmp_path: Path) -> None:
    source, target = tmp_path / "source.onnx", tmp_path / "elsewhere/target.onnx"
    target.parent.mkdir()
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 23]>
        graph (float[n, 8] x) => (float[n, 8] a, float[n, 8] b, int64[1] c, float[n] d, float[n, 4] e)
        <int64[1] last = {1}, float[8] w = {1, 2, 3, 4, 5, 6, 7, 8}>
        {
            a = Gelu (x)
            b = RMSNormalization <axis = -1, epsilon = 0.01> (x, w)
            c = Shape <start = 1, end = 2> (x)
            d = ReduceMax <keepdims = 0> (x, last)
            e, f = Split <axis = 1, num_outputs = 2> (x)
        }"""
    )
    for weight in model.graph.initializer:  # external data has to be raw
        weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight), weight.name))
    onnx.save(model, source, save_as_external_data=True, location="weights.data", size_threshold=50)
    convert(source, target)
    onnx.checker.check_model(target)
    assert [imported.version for imported in onnx.load(target).opset_import] == [17]
    feeds = {"x": np.random.default_rng(0).standard_normal((3, 8), np.float32)}
    before, after = (onnxruntime.InferenceSession(file).run(None, feeds) for file in (source, target))
    for expected, given in zip(before, after, strict=True):
        np.testing.assert_allclose(given, expected, rtol=1e-5, atol=1e-6)


def test_what_polygraphy_cannot_be_asked_is_said(run: GpuRun, small: DeploySmall) -> None:
    pytest.importorskip("tensorrt_rtx")
    item = Item()
    parity._ask_polygraphy(Device(run), small("bf16"), "tensorrt_rtx", item)
    assert item.skipped == {
        "tensorrt_rtx in Polygraphy": "NumPy has no bfloat16, and Polygraphy's results of other libraries are pickles"
    }
    assert not item.failed and not item.checks


def test_two_opinions_are_compared() -> None:
    ours, theirs = "tensorrt_rtx", "tensorrt_rtx in Polygraphy"
    items = {"vit, fp16": Item(checks={ours: passed(), theirs: passed()})}
    given = GpuResults(steps={"parity": StepResult(items=items)})
    claim = steps.opinion_claim(given, ours)
    assert (claim.answer, claim.because) == ("yes", "1 of 1 that both ran")
    items["vit, fp32"] = Item(checks={ours: passed(), theirs: passed(1, "far off")})
    items["vit, bf16"] = Item(checks={ours: passed()}, skipped={theirs: "NumPy has no bfloat16"})
    given = GpuResults(steps={"parity": StepResult(items=items)})
    claim = steps.opinion_claim(given, ours)
    assert (claim.answer, claim.because) == ("no", "1 of 2 that both ran; vit, fp32; not asked: vit, bf16")
    assert steps.wrong_answers(given) == [], "Polygraphy's alone, which says nothing of attnforge's answer"
    claim = steps.opinion_claim(given, "tensorrt")
    assert claim.answer == "not measured"


def test_large_models_are_timed_once_they_are_right(run: GpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        timings,
        "peers_of",
        lambda device, module, inputs, batch: {EAGER: lambda: racing.OpenContender(partial(module, *inputs))},
    )
    monkeypatch.setattr(racing, "race_seconds", lambda device: 0.1)
    point = models.PatchPoint("fp32", 56, 2)
    item = step(run, "latency", lambda: [(point.name, partial(timings._latency, Device(run), point))]).items[point.name]
    assert not item.failed and set(item.timings) == {"onnxruntime-cpu", EAGER}
    assert all(check.passed for check in item.checks.values())
    ours = item.timings["onnxruntime-cpu"]
    assert ours.calls >= racing.LEAST_ROUNDS and ours.per_second == pytest.approx(2000 / ours.wall.median.value)
    assert ours.wall.median.low <= ours.wall.median.value <= ours.wall.median.high and ours.wall.rounds == []
    ratio, eager = ours.ratios[EAGER], item.timings[EAGER]
    assert ratio.low <= ratio.value <= ratio.high and set(ours.ratios) == {EAGER} and eager.ratios == {}
    assert ratio.value == pytest.approx(ours.wall.median.value / eager.wall.median.value)


def test_a_large_model_is_exported_small_and_built_at_one_size(run: GpuRun, tmp_path: Path) -> None:
    """With 12,544 tokens, none of which is computed on the CPU."""
    item = Item()
    point = models.PatchPoint("fp16", 448, 8)
    model = models.large_of(Device(run), models.patch_attention, point.precision)
    bundle = model.deploy(tmp_path / "bundle", point.sizes, ["onnxruntime", "tensorrt_rtx"], item)
    assert not item.failed and bundle.manifest.attention.fused == {"onnxruntime": 1, "tensorrt_rtx": 1}
    assert bundle.manifest.targets["onnxruntime"].cuda_model is not None and bundle.manifest.cases == []
    assert [spec.dims for spec in (*bundle.manifest.inputs, *bundle.manifest.outputs)] == [
        [8, 3, 448, 448], [8, 12544, 192],
    ]  # fmt: skip
    assert bundle.manifest.targets["tensorrt_rtx"].engines[0].compute_capabilities == ["portable"]


def test_a_wrong_answer_has_no_time(run: GpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(run)
    x = torch.linspace(-1, 1, 12).reshape(1, 3, 4)
    truth = models.truth_of(device, "case", precision_named("fp32"), torch.sin, torch.sin, [x])
    calls: dict[str, Callable[[], torch.Tensor]] = {"right": lambda: x.sin(), "wrong": lambda: x.cos()}
    ways: racing.Ways = {name: partial(racing.OpenContender, call) for name, call in calls.items()}
    item = Item()
    monkeypatch.setattr(racing, "race_seconds", lambda device: 0.05)
    racing.race(device, item, ways, truth, 1)
    assert list(item.timings) == ["right"]
    assert not item.checks["wrong"].passed and item.skipped == {"wrong": "not timed, because its answer is wrong"}


def test_the_truth_of_a_batch_is_that_of_its_samples(run: GpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "MOST_COMPARED", 50)
    seen: list[tuple[int, ...]] = []

    def double(x: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(x.shape))
        return 2 * x

    x = torch.arange(4 * 30, dtype=torch.float16).reshape(4, 30)
    truth = models.truth_of(Device(run), "case", precision_named("fp16"), double, double, [x])
    assert seen == [(1, 30)] * 8 and len(truth.positions) == len(truth.exact) == 50
    assert truth.check(2 * x).error == truth.check(2 * x.numpy()).error == 0
    assert truth.check(2 * x.numpy()).passed and not truth.check(2 * x + 1).passed
    assert truth.case == Case(name="case", sizes={}, kind="normal", seed=0)


def test_bundles_of_another_machine_are_taken(run: GpuRun, small: DeploySmall, tmp_path: Path) -> None:
    shutil.copytree(small("fp32").path, tmp_path / "elsewhere" / "vit-fp32")
    run.settings.bundles = str(tmp_path / "elsewhere")
    assert parity._bundle(Device(run), "vit", "fp32").path == tmp_path / "elsewhere" / "vit-fp32"


def test_published_models_have_inputs_for_every_sample(run: GpuRun) -> None:
    device = Device(run)
    large = models.large_of(device, timings.bert_base, "fp32")
    ids, mask = timings._inputs(device, large, 8)
    assert ids.shape == mask.shape == (8, 128) and len({tuple(row.tolist()) for row in ids}) == 8
    assert mask.sum(-1).tolist() == [128 - 12 * i for i in range(8)]
    sizes = {"batch": 8, "tokens": 128}
    bundle = large.deploy(device.scratch("bert"), sizes, ["onnxruntime"], Item())
    assert [spec.dims for spec in bundle.manifest.outputs] == [[8, 128, 768]]


# What follows from the figures


def test_what_is_said_of_calls() -> None:
    """Percentiles as everywhere in attnforge's benchmarks, without the calls themselves."""
    hundred = racing.without_rounds([[float(n)] for n in range(100, 0, -1)])
    assert (hundred.min, hundred.median.value, hundred.samples, hundred.rounds) == (1, 50.5, 100, [])
    assert hundred.p90 == pytest.approx(90.1) and hundred.p99 == pytest.approx(99.01)
    single = racing.without_rounds([[3.0]])
    assert (single.median.value, single.p90, single.p99) == (3, 3, 3)
    assert gpu_page.ratio_text(alike(3), alike(4)) == "0.75" and gpu_page.ratio_text(alike(3), None) == "–"


def test_the_grid() -> None:
    points = timings.points()
    assert [point.tokens for point in points[:4]] == [196, 1024, 3136, 12544]
    assert {(p.precision, p.batch) for p in points} == {(p, b) for p in ("fp16", "fp32", "bf16") for b in (1, 8, 64)}
    assert models.PatchPoint("fp16", 448, 64).score_bytes == 64 * 3 * 12544**2 * 2


def results() -> GpuResults:
    """Return the results of a run in which TensorRT-RTX ran, but not everywhere."""
    ran = {"tensorrt_rtx": passed()}
    refused = {"onnxruntime-cuda": "no CUDAExecutionProvider"}
    environment = {
        "device": Item(values={"driver_version": "580.65"}),
        "try tensorrt_rtx, portable": Item(
            failed={"load": "UnavailableError: built for other compute capabilities\nits log"}
        ),
        "try tensorrt_rtx, CURRENT": Item(checks={"tensorrt_rtx, NumPy, first call": passed()}),
    }
    parity = {
        "vit, fp16": Item(checks=ran, skipped=refused),
        "vit, fp32": Item(checks={"tensorrt_rtx": passed(2e-6, "error 2.00e-06 is over the budget")}, skipped=refused),
        "vit, fp16, torch": Item(checks={EAGER: passed()}, failed={COMPILE: "RuntimeError: no C compiler"}),
    }
    where: dict[str, Any] = {"precision": "fp16", "batch": 1}
    latency = {
        "fp16, batch 1, 196 tokens": Item(
            values={**where, "tokens": 196},
            timings={
                "tensorrt_rtx": timing(0.1, 0.05, eager=(0.4, 0.3), compiled=(0.08, 0.06)),
                EAGER: timing(0.4, 0.3),
                COMPILE: timing(0.08, 0.06),
            },
            skipped={"tensorrt": "not installed"},
        ),
        "fp16, batch 1, 12544 tokens": Item(
            values={**where, "tokens": 12544},
            timings={"tensorrt_rtx": timing(1.0, 0.9, compiled=(1.25, 1.2)), COMPILE: timing(1.25, 1.2)},
            failed={EAGER: "OutOfMemoryError: CUDA out of memory"},
        ),
    }
    alone: dict[str, Any] = {"tokens": 12544, "batch": 1, "heads": 3, "head_size": 64, "precision": "fp16"}
    alone |= {"flops": 4 * 3 * 12544**2 * 64, "bytes": 4 * 3 * 12544 * 64 * 2}
    times = {"tensorrt_rtx": timing(0.7, 0.6, flash=(0.6, 0.4)), FLASH: timing(0.6, 0.4)}
    attention = {"12544 tokens": Item(values=alone, timings=times)}
    return GpuResults(
        command="python -m benchmarks.gpu --seconds 100",
        date="2026-11-20T00:00:00+00:00",
        machine={"device": "NVIDIA H200", "CUDA of the driver": "13.0", "torch": "2.11.0"},
        steps={
            "environment": StepResult(items=environment),
            "parity": StepResult(items=parity, left_out={"bert, fp16": "no time was left"}),
            "ceilings": StepResult(items={"product fp16": Item(values={"size": 8192, "tflops": 800.0})}),
            "attention": StepResult(items=attention),
            "latency": StepResult(items=latency),
        },
    )


def test_the_last_words_of_a_process() -> None:
    log = "loaded\nterminate called: out of range\nFatal Python error: Aborted\n\n  File a, line 1 in run\n"
    assert running.last_words("noise\n" * 50 + log) == "noise\n" * 8 + log.strip()
    assert running.last_words("noise\n" * 50 + "ImportError: x") == "noise\n" * 29 + "ImportError: x"


def test_claims() -> None:
    found = {claim.text: claim for claim in steps.claims(results())}
    every = "every model in every precision is within the parity budget on "
    rtx = found[f"{every}tensorrt_rtx"]
    assert rtx.answer == "no"
    assert rtx.because == "1 of 2 that ran are; outside it: vit, fp32; not measured: 1, as bert, fp16: no time was left"
    cuda = found[f"{every}onnxruntime-cuda"]
    assert cuda.answer == "not measured" and cuda.because == "no CUDAExecutionProvider"
    half = found["fp16, batch 1: the fastest attnforge session takes at most half the time of torch eager"]
    assert half.answer == "not measured", "it holds where it was measured, and was not measured everywhere"
    assert half.because == (
        "196 tokens (tensorrt_rtx) 0.25×; 12544 tokens not measured: torch eager: OutOfMemoryError: CUDA out of memory"
    )
    faster = found["fp16, batch 1: the fastest attnforge session is faster than torch.compile"]
    assert faster.answer == "no"
    assert faster.because == "196 tokens (tensorrt_rtx) 1.25×; 12544 tokens (tensorrt_rtx) 0.80×"
    flash = next(claim for text, claim in found.items() if text.startswith("attention alone at 12544 tokens"))
    assert flash.answer == "no" and flash.because == "tensorrt_rtx 0.600 ms, flash 0.400 ms: 1.50×"
    fp32 = found["fp32, batch 1: the fastest attnforge session is faster than torch.compile"]
    assert fp32.answer == "not measured" and fp32.because == "nothing of it ran"


def test_claims_that_hold() -> None:
    every = GpuResults(steps={"parity": StepResult(items={"vit, fp16": Item(checks={"onnxruntime-cuda": passed()})})})
    assert steps.parity_claim(every, "onnxruntime-cuda").answer == "yes"
    every.steps["parity"].items["vit, fp32"] = Item(failed={"onnxruntime-cuda": "DeviceError: lost"})
    assert steps.parity_claim(every, "onnxruntime-cuda").answer == "no"
    near = results()
    times = near.steps["attention"].items["12544 tokens"].timings
    times["tensorrt_rtx"] = timing(0.5, 0.48, flash=(0.6, 0.4))
    assert steps.attention_claim(near).answer == "yes"
    times["tensorrt_rtx"] = timing(0.5, 0.48, 0.01, flash=(0.6, 0.4))
    assert steps.attention_claim(near).answer == "within noise"
    assert all(claim.answer == "not measured" for claim in steps.claims(GpuResults()))


def test_wrong_answers_are_those_of_attnforge_alone() -> None:
    given = results()
    given.steps["parity"].items["vit, fp16, torch"].checks[COMPILE] = passed(1, "far off")
    assert steps.wrong_answers(given) == ["parity, vit, fp32, tensorrt_rtx: error 2.00e-06 is over the budget"]


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 1), (None, 0)])
def test_a_run_whose_tests_failed_is_no_success(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    code: int | None,
    ends: int,
) -> None:
    """None means that pytest did not end in time."""

    def take(settings: Settings, name: str) -> None:
        ended: dict[str, str | bool | int | float | None] = (
            {} if code is None else {"exit code": code, "summary": "2 failed, 9 passed"}
        )
        write(GpuResults(steps={name: StepResult(items={"pytest -m gpu": Item(values=ended)})}), settings.out)

    monkeypatch.setattr(command, "cuda_devices", lambda: 1)
    monkeypatch.setattr(command, "device_and_versions", lambda device: {"device": "a device"})
    monkeypatch.setattr(command, "supervise", take)
    with pytest.raises(typer.Exit) as ended:
        command.main(tmp_path, only=["tests"])
    assert ended.value.exit_code == ends
    assert ("failed: tests, pytest -m gpu: 2 failed, 9 passed" in capsys.readouterr().out) == (ends == 1)


def test_plans_are_built_for_what_worked() -> None:
    given = results()
    assert capabilities(given) == ["CURRENT"] and why_broken(given, "tensorrt_rtx") is None
    tried = given.steps["environment"].items
    tried["try tensorrt_rtx, CURRENT"].failed[FATAL] = "its process died of SIGSEGV"
    assert capabilities(given) == []
    said = "it did not work when it was tried: UnavailableError: built for other compute capabilities"
    assert why_broken(given, "tensorrt_rtx") == said and why_broken(given, "tensorrt") is None


def test_the_page_is_made_of_the_figures_alone(tmp_path: Path) -> None:
    write(results(), tmp_path)
    kept = read(tmp_path)
    text = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert text == gpu_page.page(kept)
    for said in (
        "NVIDIA H200; CUDA of the driver 13.0, torch 2.11.0",
        "`python -m benchmarks.gpu --seconds 100`",
        "| tensorrt_rtx, portable | does not work | load: UnavailableError: built for other compute capabilities |",
        "| tensorrt_rtx, CURRENT | works |",
        "| vit, fp16 | 2e-4 / 1e-3 | 2e-4 / 1e-3 | **failed** |",
        "| vit, fp32 | **2e-6 / 1e-3** | – | – |",
        "| tensorrt_rtx | 0.050 / 0.075 / 0.100 | 0.100 / 0.150 / 0.200 | 0.25 | 10000 |",
        "| torch.compile | 0.060 / 0.090 / 0.120 | 0.080 / 0.120 / 0.160 | 0.20 |",
        "| 12544 | tensorrt_rtx | 0.600 / 0.900 / 1.200 | 1.50 | 201.4 TFLOP/s (25% of the ceiling) | 32 GB/s |",
        "Not timed: tensorrt: not installed",
        "**parity: vit, fp16, torch: torch.compile**\n\n```\nRuntimeError: no C compiler\n```",
        "built for other compute capabilities\nits log\n```",
        "outside the parity budget: error 2.00e-06 is over the budget",
        "- overhead: not taken",
        "- parity: no time was left (bert, fp16)",
        "| not measured |",
    ):
        assert said in text, said


def test_figures_that_are_no_numbers_are_kept(tmp_path: Path) -> None:
    bad = ParityCheck(passed=False, error=float("nan"), budget=float("inf"), reason="NaN at 3 places")
    write(GpuResults(steps={"parity": StepResult(items={"vit, fp16": Item(checks={"tensorrt_rtx": bad})})}), tmp_path)
    kept = read(tmp_path).steps["parity"].items["vit, fp16"].checks["tensorrt_rtx"]
    assert np.isnan(kept.error) and kept.budget == float("inf")


def test_steps_of_a_decoder_are_timed_once_they_are_right(run: GpuRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small model, and its step through `torch.compile` without code in C++."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 2, "num_attention_heads": 2}
    small = {**SIZES, **sizes, "intermediate_size": 48, "vocab_size": 60}
    monkeypatch.setattr(decoding, "SIZES", small)
    monkeypatch.setattr(decoding, "OPTIONS", {**decoding.OPTIONS, "tokens": "9", "max_tokens": "16"})
    monkeypatch.setattr(decoding, "CACHE_TOKENS", 256)
    monkeypatch.setattr(decoding, "PRECISION", "fp32")
    monkeypatch.setattr(racing, "race_seconds", lambda device: 0.1)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    items = step(run, "decoding", partial(decoding.decoding, Device(run))).items
    assert list(items) == ["1 × 1 token after 128", "a prompt of 16 tokens"]
    for item in items.values():
        assert not item.failed and set(item.timings) == {"onnxruntime-cpu", COMPILE, EAGER}
        assert all(check.passed for check in item.checks.values())
