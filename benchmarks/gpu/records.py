"""What is recorded, how a backend did when it was tried, and the names and sizes that all steps share."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field

from attnforge.bundle import PORTABLE
from attnforge.records import Record
from attnforge.runtime.backends.registry import BACKENDS, WITHOUT_TARGET

COMMAND = "python -m attnforge.benchmarks.gpu"

WHOLE, FATAL = "all of it", "its process"
"""What failed: a task that raised, and one that took its process with it."""

SHARES = {
    "environment": 0.3,
    "tests": 0.2,
    "parity": 0.4,
    "ceilings": 0.3,
    "attention": 0.4,
    "latency": 0.85,
    "overhead": 1.0,
}
"""The steps, in order of worth, and how much of the time that is left each may take."""

PATCH, WIDTH, HEADS, HEAD = 4, 192, 3, 64
"""Of patch-attention as registered."""

SIDES = (56, 128, 224, 448)
"""Pixels: 196, 1,024, 3,136 and 12,544 tokens."""

EAGER, SDPA, COMPILE, GRAPHED = "torch eager", "torch eager, SDPA", "torch.compile", "torch.compile, CUDA graphs"
FLASH = "torch flash attention"


class Found(Record):
    """A part of the results, which may hold NaN and infinities."""

    model_config = ConfigDict(ser_json_inf_nan="strings")


class Verdict(Found):
    """How answers were held to the parity budget; the errors are those of the worst."""

    passed: bool
    error: float
    budget: float
    cases: int = 1
    reason: str | None = None


class Spread(Found):
    """Milliseconds."""

    p50: float
    p90: float
    p99: float


class Timing(Found):
    """How fast a contender was.

    Attributes:
        device_ms: between CUDA events; None where a call waits for its outputs.
        wall_ms: end to end.
        host_ms: until the call returns; its outputs may still be on their way.
        per_second: samples, end to end at the median.
        ready_seconds: from nothing to the first output: loading, or compiling.
        held_mib: device memory that opening it and its first run took.
        peak_mib: the most that torch's allocator held for it, beyond what was there.
        session_mib: what the session says of its memory on the device.
    """

    calls: int
    device_ms: Spread | None
    wall_ms: Spread
    host_ms: float
    per_second: float
    ready_seconds: float
    held_mib: float | None = None
    peak_mib: float | None = None
    session_mib: float | None = None


class Item(Found):
    """What came of one task, by contender or by what was asked; what was skipped or failed, and why."""

    seconds: float = 0.0
    values: dict[str, str | bool | int | float | None] = Field(default_factory=dict)
    verdicts: dict[str, Verdict] = Field(default_factory=dict)
    timings: dict[str, Timing] = Field(default_factory=dict)
    skipped: dict[str, str] = Field(default_factory=dict)
    failed: dict[str, str] = Field(default_factory=dict)


class Step(Found):
    """What came of a step: `planned` are its tasks, `doing` the one that is, or was, under way."""

    seconds: float = 0.0
    planned: list[str] = Field(default_factory=list)
    items: dict[str, Item] = Field(default_factory=dict)
    left_out: dict[str, str] = Field(default_factory=dict)
    failed: dict[str, str] = Field(default_factory=dict)
    doing: str | None = None


class Claim(Found):
    """A sentence, whether it holds (None: not measured), and the figures that say so."""

    text: str
    holds: bool | None
    because: str


class Results(Found):
    """Everything that was found; the page is made from this alone."""

    command: str = COMMAND
    date: str = ""
    budget_seconds: float = 0.0
    seconds: float = 0.0
    machine: dict[str, str] = Field(default_factory=dict)
    steps: dict[str, Step] = Field(default_factory=dict)
    claims: list[Claim] = Field(default_factory=list)


class Settings(Found):
    """What a process of the run is told.

    Attributes:
        out: folder of the results.
        scratch: folder for bundles and logs.
        ends: by the clock, when the time is over.
        place: where torch computes; on the CPU only to try the code itself.
        backends: that are tried.
        threads: that libraries may use on the CPU; by default their own choice.
    """

    out: str
    scratch: str
    ends: float
    device: int = 0
    quick: bool = False
    place: Literal["cuda", "cpu"] = "cuda"
    backends: list[str] = Field(default_factory=lambda: [name for name in BACKENDS if name not in WITHOUT_TARGET])
    threads: int | None = None


def ours(name: str) -> bool:
    """Whether a contender is attnforge's: `tensorrt_rtx`, or `tensorrt_rtx, NumPy in and out`."""
    return name.partition(",")[0] in BACKENDS


def worked(item: Item) -> bool:
    """Whether what was tried gave some right answer, and left its process alive."""
    return FATAL not in item.failed and any(verdict.passed for verdict in item.verdicts.values())


def tries(results: Results, backend: str) -> dict[str, Item]:
    """What came of trying a backend, by what was tried."""
    items = results.steps.get("environment", Step()).items
    return {key: item for key, item in items.items() if key.partition(",")[0] == f"try {backend}"}


def broken(results: Results, backend: str) -> str | None:
    """Why a backend that is there did not work when it was tried, or None."""
    tried = tries(results, backend)
    if not tried or any(worked(item) for item in tried.values()):
        return None
    item = next(iter(tried.values()))
    if item.skipped:
        return next(iter(item.skipped.values()))
    reasons = [*item.failed.values(), *(v.reason or "" for v in item.verdicts.values()), "it did not end"]
    return f"it did not work when it was tried: {first_line(reasons[0])}"


def capabilities(results: Results) -> list[str]:
    """What to build TensorRT-RTX's plans for: by default for all devices, unless only a plan for this one worked."""
    tried = {key.partition(", ")[2]: worked(item) for key, item in tries(results, "tensorrt_rtx").items()}
    return ["CURRENT"] if tried.get("CURRENT") and not tried.get(PORTABLE, True) else []


def first_line(text: str) -> str:
    return next(iter(text.strip().splitlines()), "")
