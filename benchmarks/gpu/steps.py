"""The steps of a run, the records of their results, and the names and sizes that all steps share."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from attnforge.bench.results import Interval, Latency
from attnforge.bundle import PORTABLE
from attnforge.errors import first_line
from attnforge.records import Record
from attnforge.runtime.backends.registry import REGISTRY
from benchmarks.experiment import Verdict

COMMAND = "python -m benchmarks.gpu"

WHOLE, FATAL = "all of it", "its process"
"""Keys of failures: of a task that raised, and of a task that killed its process."""

SHARES = {
    "environment": 0.3,
    "tests": 0.2,
    "parity": 0.4,
    "ceilings": 0.1,
    "published": 0.5,
    "decoding": 0.4,
    "attention": 0.4,
    "latency": 0.85,
    "overhead": 1.0,
}
"""The steps in order of importance, and the share of the remaining time that each may take."""

PATCH, WIDTH, HEADS, HEAD = 4, 192, 3, 64
"""Sizes of the registered patch-attention."""

SIDES = (56, 128, 224, 448)
"""Pixels per side: 196, 1,024, 3,136 and 12,544 tokens."""

EAGER, SDPA, COMPILE, GRAPHED = "torch eager", "torch eager, SDPA", "torch.compile", "torch.compile, CUDA graphs"
FLASH = "torch flash attention"


class StepRecord(Record):
    """A part of the results, which may contain NaN and infinities."""

    model_config = ConfigDict(ser_json_inf_nan="strings")


class ParityCheck(StepRecord):
    """The check of answers against the parity budget; error and budget are relative, those of the worst case."""

    passed: bool
    error: float
    budget: float
    cases: int = 1
    reason: str | None = None


class Timing(StepRecord):
    """The times of a contender. The calls themselves are not kept, so `rounds` of the latencies are empty.

    Attributes:
        calls: number of timed calls.
        device: latency between CUDA events; None if a call waits for its outputs.
        wall: latency end to end.
        host_ms: milliseconds until the call returns; its outputs may still be pending.
        per_second: samples per second, end to end at the median.
        ready_seconds: time from the start of loading or compiling to the first output.
        ratios: for a contender of attnforge, its median end to end over each peer's, by peer.
        device_ratios: the same on the device.
        held_mib: device memory taken by loading it and its first run.
        peak_mib: peak memory that torch's allocator added for it.
        session_mib: device memory that the session reports.
    """

    calls: int
    device: Latency | None
    wall: Latency
    host_ms: float
    per_second: float
    ready_seconds: float
    ratios: dict[str, Interval] = Field(default_factory=dict)
    device_ratios: dict[str, Interval] = Field(default_factory=dict)
    held_mib: float | None = None
    peak_mib: float | None = None
    session_mib: float | None = None


class Item(StepRecord):
    """The result of one task: figures, checks and times by contender; and what was skipped or failed, with reasons."""

    values: dict[str, str | bool | int | float | None] = Field(default_factory=dict)
    checks: dict[str, ParityCheck] = Field(default_factory=dict)
    timings: dict[str, Timing] = Field(default_factory=dict)
    skipped: dict[str, str] = Field(default_factory=dict)
    failed: dict[str, str] = Field(default_factory=dict)


class StepResult(StepRecord):
    """The results of a step.

    Attributes:
        planned: keys of its tasks.
        items: the result of each task that was started.
        left_out: tasks that were not started, with reasons.
        failed: why the step could not start.
        doing: key of the task that is, or was, running.
    """

    planned: list[str] = Field(default_factory=list)
    items: dict[str, Item] = Field(default_factory=dict)
    left_out: dict[str, str] = Field(default_factory=dict)
    failed: dict[str, str] = Field(default_factory=dict)
    doing: str | None = None


class Claim(StepRecord):
    """A statement, whether it holds, and the figures that show it."""

    text: str
    answer: Verdict
    because: str


class GpuResults(StepRecord):
    """All results of a run; the page is generated from these only.

    Attributes:
        command: command that reproduces the figures.
        machine: the device and the versions.
    """

    command: str = COMMAND
    date: str = ""
    budget_seconds: float = 0.0
    seconds: float = 0.0
    machine: dict[str, str] = Field(default_factory=dict)
    steps: dict[str, StepResult] = Field(default_factory=dict)
    claims: list[Claim] = Field(default_factory=list)


class Settings(StepRecord):
    """The settings of a process of the run.

    Attributes:
        out: folder of the results.
        scratch: folder for bundles and logs.
        ends: end of the time limit, in seconds of `time.time`.
        device: number of the CUDA device.
        quick: run fewer models, sizes and precisions.
        place: where torch computes; `cpu` only for testing the code.
        backends: backends to try.
        threads: number of threads that libraries may use on the CPU; by default their own choice.
        bundles: folder of bundles that another machine deployed; see :func:`.parity.deploy_all`.
    """

    out: str
    scratch: str
    ends: float
    device: int = 0
    quick: bool = False
    place: Literal["cuda", "cpu"] = "cuda"
    backends: list[str] = Field(default_factory=lambda: [name for name, row in REGISTRY.items() if row.targets])
    threads: int | None = None
    bundles: str | None = None


def is_ours(name: str) -> bool:
    """Return whether a contender is attnforge's: `tensorrt_rtx`, or `tensorrt_rtx, NumPy in and out`."""
    return name.partition(",")[0] in REGISTRY


# --- trials of backends -----------------------------------------------------------------------------------------------


def worked(item: Item) -> bool:
    """Return whether any answer was right and the process survived."""
    return FATAL not in item.failed and any(check.passed for check in item.checks.values())


def tries(results: GpuResults, backend: str) -> dict[str, Item]:
    """Return the results of trying a backend in the first step, by task."""
    items = results.steps.get("environment", StepResult()).items
    return {key: item for key, item in items.items() if key.partition(",")[0] == f"try {backend}"}


def why_broken(results: GpuResults, backend: str) -> str | None:
    """Return why a backend did not work when it was tried; None if it did, or was not tried."""
    tried = tries(results, backend)
    if not tried or any(worked(item) for item in tried.values()):
        return None
    item = next(iter(tried.values()))
    if item.skipped:
        return next(iter(item.skipped.values()))
    reasons = [*item.failed.values(), *(check.reason or "" for check in item.checks.values()), "it did not end"]
    return f"it did not work when it was tried: {first_line(reasons[0])}"


def capabilities(results: GpuResults) -> list[str]:
    """Return the compute capabilities to build TensorRT-RTX's plans for: all (an empty list), or `CURRENT` if a
    portable plan did not work and one for this device did."""
    tried = {key.partition(", ")[2]: worked(item) for key, item in tries(results, "tensorrt_rtx").items()}
    return ["CURRENT"] if tried.get("CURRENT") and not tried.get(PORTABLE, True) else []
