"""The first two steps: the machine and which backends work; and the tests that need a GPU."""

from __future__ import annotations

import csv
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import onnxruntime as ort
import torch

from attnforge.arrays import to_numpy
from attnforge.bundle import PORTABLE
from attnforge.runtime.backends.registry import why_unavailable
from benchmarks.experiment import machine
from benchmarks.gpu.device import Device
from benchmarks.gpu.models import PatchPoint, large_of, patch_attention, patch_truth, targets_of
from benchmarks.gpu.racing import Ways, in_session, race
from benchmarks.gpu.running import Task, attempt, shortened, tail
from benchmarks.gpu.steps import SIDES, Item

ROOT = Path(__file__).resolve().parents[2]
"""Root of the source checkout, if this is one."""

PYTEST = "pytest -m gpu"

SECONDS = 0.2
"""Seconds for which a backend is timed when it is tried."""


def environment(device: Device) -> list[Task]:
    """Return tasks for the device, the software, and a trial of every backend with one small model."""
    tasks: list[Task] = [("device", partial(_device, device)), ("software", partial(_software, device))]
    if device.settings.place == "cpu":
        return [*tasks, *((f"try {name}", partial(_try, device, name, ())) for name in device.settings.backends)]
    capability = device.run.results.machine.get("compute capability", "CURRENT")
    for name in dict.fromkeys((PORTABLE, "CURRENT", capability, "SM80")):
        wanted = () if name == PORTABLE else (name,)
        tasks.append((f"try tensorrt_rtx, {name}", partial(_try, device, "tensorrt_rtx", wanted)))
    others = ("onnxruntime-cuda", "tensorrt", "onnxruntime-tensorrt")  # the last may take minutes to build
    return [*tasks, *((f"try {name}", partial(_try, device, name, ())) for name in others)]


def _device(device: Device, item: Item) -> None:
    item.values |= {key: str(value) for key, value in machine(os.cpu_count() or 1).items()}
    fields = (
        "name", "driver_version", "memory.total", "power.limit", "clocks.max.sm", "clocks.max.memory", "clocks.sm",
        "temperature.gpu", "pstate",
    )  # fmt: skip
    query = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", f"--id={device.settings.device}"]

    def ask() -> None:
        done = subprocess.run(query, stdout=subprocess.PIPE, text=True, timeout=30, check=True)
        item.values.update(zip(fields, next(csv.reader([done.stdout.strip()], skipinitialspace=True)), strict=True))

    attempt(item.failed, "nvidia-smi", ask)
    if device.on_cuda:
        about = torch.cuda.get_device_properties(device.settings.device)
        item.values |= {"memory": int(about.total_memory), "multiprocessors": int(about.multi_processor_count)}


def _software(device: Device, item: Item) -> None:
    item.values |= {
        "torch's CUDA": torch.version.cuda,
        "torch's cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "torch sees CUDA": torch.cuda.is_available(),
        "onnxruntime": ort.__version__,
        "onnxruntime's CUDA": str(getattr(ort, "cuda_version", None)),
        "onnxruntime's providers": ", ".join(ort.get_available_providers()),
    }
    if device.settings.place == "cuda" and not torch.cuda.is_available():
        attempt(item.failed, "torch on CUDA", torch.cuda.init)
    item.skipped |= {name: reason for name, reason in device.absent.items() if name in device.settings.backends}


def _try(device: Device, backend: str, wanted: Sequence[str], item: Item) -> None:
    """Build, load and run patch-attention in fp16, and check its answers against the budget."""
    if backend in device.absent:
        item.skipped[backend] = device.absent[backend]
        return
    point = PatchPoint("fp16", SIDES[0], 1)
    large = large_of(device, patch_attention, point.precision)
    images = point.images(device)
    truth = patch_truth(device, large, images, point)
    start = time.perf_counter()
    bundle = large.deploy(device.scratch("try"), point.sizes, targets_of([backend]), item, wanted)
    if item.failed:
        return
    item.values["seconds to build"] = round(time.perf_counter() - start, 2)
    if (reason := why_unavailable(bundle, backend, device.settings.device)) is not None:
        item.failed["load"] = reason
        return
    with device.stream(), ExitStack() as stack:
        opened = partial(in_session, device, stack, bundle, backend)
        ways: Ways = {f"{backend}, NumPy": partial(opened, [to_numpy("image", images)])}
        if device.peers:
            ways[f"{backend}, torch"] = partial(opened, [images])
        race(device, item, ways, truth, 1, seconds=SECONDS)
    for name, timing in item.timings.items():
        item.values[f"{name}: seconds until ready"] = round(timing.ready_seconds, 2)
        item.values[f"{name}: ms"] = round(timing.wall.median.value, 3)


def tests(device: Device) -> list[Task]:
    """Return the tasks that run the tests that need a GPU, one for each file."""
    return [(f"{PYTEST} {file}", partial(_tests, device, file)) for file in gpu_tests()]


def gpu_tests() -> list[str]:
    """Return the test files that need a GPU, relative to the root of the source checkout, those that need one for every
    test first; empty without a checkout."""
    texts = {file: file.read_text("utf-8") for file in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = [file for file, text in texts.items() if "pytest.mark.gpu" in text]
    files.sort(key=lambda file: "pytestmark = pytest.mark.gpu" not in texts[file])
    return [str(file.relative_to(ROOT)) for file in files]


def _tests(device: Device, file: str, item: Item) -> None:
    if importlib.util.find_spec("pytest") is None:
        item.skipped[PYTEST] = "pytest is not installed"
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", file]
    try:
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=max(device.run.left, 5.0))
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        raise RuntimeError(f"pytest took more than {error.timeout:.0f} s; its output:\n{tail(output, 30)}") from None
    lines = done.stdout.strip().splitlines()
    item.values |= {"exit code": done.returncode, "summary": lines[-1] if lines else "no output"}
    if done.returncode != 0:
        item.failed[PYTEST] = shortened(f"{tail(done.stdout, 60)}\n{tail(done.stderr)}")
