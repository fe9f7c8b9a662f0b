"""The records of a GPU run's results, the names that the steps share, and what the figures prove."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import ConfigDict, Field

from attnforge.bench.results import Interval, Latency
from attnforge.bundle import FLAVOURS, PORTABLE
from attnforge.errors import first_line
from attnforge.records import Record
from attnforge.report.render import by_reason
from attnforge.runtime.backends.registry import ON_GPU, REGISTRY
from benchmarks.experiment import Verdict, verdict

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

PATCH, HEADS = 4, 3
"""Sizes of the registered patch-attention."""

SIDES = (56, 128, 224, 448)
"""Pixels per side: 196, 1,024, 3,136 and 12,544 tokens."""

EAGER, COMPILE, FLASH = "torch eager", "torch.compile", "torch flash attention"


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


def opinion_of(flavour: str) -> str:
    """Return the name of the second opinion on a flavour of TensorRT: that of Polygraphy's TrtRunner on its plan."""
    return f"{flavour} in Polygraphy"


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


# --- claims -----------------------------------------------------------------------------------------------------------


def wrong_answers(results: GpuResults) -> list[str]:
    """Return every answer of attnforge that was outside the budget."""
    return [
        f"{name}, {key}, {contender}: {check.reason}"
        for name, step in results.steps.items()
        for key, item in step.items.items()
        for contender, check in item.checks.items()
        if is_ours(contender) and not check.passed
    ]


def failed_tests(results: GpuResults) -> list[str]:
    """Return the last line of pytest if tests failed; empty if pytest did not finish in time."""
    return [
        f"tests, {key}: {item.values.get('summary')}"
        for key, item in results.steps.get("tests", StepResult()).items.items()
        if item.values.get("exit code", 0) != 0
    ]


def claims(results: GpuResults) -> list[Claim]:
    """Return every claim, with its answer."""
    every = [parity_claim(results, backend) for backend, row in REGISTRY.items() if row.targets]
    for precision in ("fp16", "fp32", "bf16"):
        every.append(latency_claim(results, precision, EAGER, 0.5, "takes at most half the time of torch eager"))
        every.append(latency_claim(results, precision, COMPILE, 1.0, "is faster than torch.compile"))
    return [*every, attention_claim(results), *(opinion_claim(results, flavour) for flavour in FLAVOURS)]


def parity_claim(results: GpuResults, backend: str) -> Claim:
    """Return the claim that every model in every precision is within the parity budget on a backend."""
    text = f"every model in every precision is within the parity budget on {backend}"
    step = results.steps.get("parity", StepResult())
    items = {key: item for key, item in step.items.items() if not key.endswith(", torch")}
    left_out = [key for key in step.left_out if not key.endswith(", torch")]
    checked = {key: item.checks[backend] for key, item in items.items() if backend in item.checks}
    wrong = [key for key, check in checked.items() if not check.passed]
    failed = [key for key, item in items.items() if {backend, WHOLE, FATAL} & set(item.failed)]
    skipped = {key: item.skipped[backend] for key, item in items.items() if backend in item.skipped}
    if not checked and not failed:
        return _unmeasured(text, next(iter(skipped.values()), None) or _why_not(results, "parity"))
    parts = [f"{len(checked) - len(wrong)} of {len(checked)} that ran are"]
    for problem, keys in (("outside it", wrong), ("failed to run", failed), ("not deployed for it", list(skipped))):
        parts += [f"{problem}: {', '.join(keys)}"] if keys else []
    if left_out:
        parts.append(f"not measured: {len(left_out)}, as {left_out[0]}: {step.left_out[left_out[0]]}")
    elif step.failed:
        parts.append(f"not measured: {_why_not(results, 'parity')}")
    is_whole = not left_out and not step.failed
    word: Verdict = "no" if wrong or failed or skipped else "yes" if is_whole else "not measured"
    return Claim(text=text, answer=word, because="; ".join(parts))


def opinion_claim(results: GpuResults, flavour: str) -> Claim:
    """Return the claim that Polygraphy's TrtRunner agrees with attnforge's runtime on a flavour's plans."""
    text, opinion = f"Polygraphy's TrtRunner agrees with attnforge's {flavour} on every plan", opinion_of(flavour)
    items = results.steps.get("parity", StepResult()).items
    asked = {key: item.checks for key, item in items.items() if {flavour, opinion} <= set(item.checks)}
    unanswered = {
        key: (item.failed | item.skipped)[opinion]
        for key, item in items.items()
        if opinion in {**item.failed, **item.skipped}
    }
    if not asked:
        return _unmeasured(text, next(map(first_line, unanswered.values()), None) or _why_not(results, "parity"))
    differ = [key for key, checks in asked.items() if checks[flavour].passed != checks[opinion].passed]
    parts = [f"{len(asked) - len(differ)} of {len(asked)} that both ran", *differ]
    parts += [f"not asked: {', '.join(unanswered)}"] if unanswered else []
    return Claim(text=text, answer="no" if differ else "yes", because="; ".join(parts))


def latency_claim(results: GpuResults, precision: str, peer: str, at_most: float, words: str) -> Claim:
    """Return the claim that at batch 1, end to end at the median, the fastest session with inputs on the device takes
    at most `at_most` times as long as a peer, at every number of tokens."""
    text = f"{precision}, batch 1: the fastest attnforge session {words}"
    step = results.steps.get("latency", StepResult())
    start = f"{precision}, batch 1, "
    missing = {key.removeprefix(start): why for key, why in step.left_out.items() if key.startswith(start)}
    answers: list[Verdict] = []
    parts: list[str] = []
    for key, item in step.items.items():
        if not key.startswith(start):
            continue
        tokens, ours = key.removeprefix(start), {name: t for name, t in item.timings.items() if name in ON_GPU}
        if ours and peer in item.timings:
            best = min(ours, key=lambda name: ours[name].wall.median.value)
            ratio = ours[best].ratios[peer]
            answers.append(verdict(ratio, at_most))
            parts.append(f"{tokens} ({best}) {ratio.value:.2f}×")
        else:
            missing[tokens] = _why_untimed(item, (peer,) if ours else ON_GPU)
    answers += ["not measured"] if missing else []
    parts += [f"{tokens} not measured: {why}" for tokens, why in by_reason(missing)]
    if not parts:
        return _unmeasured(text, _why_not(results, "latency"))
    return Claim(text=text, answer=_of_all(answers), because="; ".join(parts))


def attention_claim(results: GpuResults) -> Claim:
    """Return the claim that attention alone takes at most 1.2 times as long as torch's flash kernel, on the device."""
    tokens = (SIDES[-1] // PATCH) ** 2
    text = f"attention alone at {tokens} tokens, fp16, takes at most 1.2 times torch's flash kernel on the device"
    step = results.steps.get("attention", StepResult())
    item = step.items.get(f"{tokens} tokens")
    if item is None or f"{tokens} tokens" in step.left_out:
        return _unmeasured(text, step.left_out.get(f"{tokens} tokens") or _why_not(results, "attention"))
    times = {name: t.device.median.value for name, t in item.timings.items() if t.device is not None}
    ours = {name: time for name, time in times.items() if name in ON_GPU}
    if not ours or FLASH not in times:
        return _unmeasured(text, _why_untimed(item, (FLASH,) if ours else ON_GPU))
    best = min(ours, key=lambda name: ours[name])
    ratio = item.timings[best].device_ratios[FLASH]
    figures = f"{best} {ours[best]:.3f} ms, flash {times[FLASH]:.3f} ms: {ratio.value:.2f}×"
    return Claim(text=text, answer=_of_all([verdict(ratio, 1.2)]), because=figures)


def _of_all(answers: Iterable[Verdict]) -> Verdict:
    """Return the answer to a claim that must hold everywhere: the worst of all answers."""
    every = set(answers)
    ordered: tuple[Verdict, ...] = ("no", "within noise", "not measured")
    return next((word for word in ordered if word in every), "yes")


def _unmeasured(text: str, why: str) -> Claim:
    return Claim(text=text, answer="not measured", because=why)


def _why_untimed(item: Item, names: Sequence[str]) -> str:
    """Return why none of these contenders has a time."""
    reasons = {name: text for name, text in (item.skipped | item.failed).items() if name in (*names, WHOLE, FATAL)}
    return "; ".join(f"{name}: {first_line(text)}" for name, text in reasons.items()) or f"{names[0]} was not timed"


def _why_not(results: GpuResults, name: str) -> str:
    """Return why a step has no figures."""
    step = results.steps.get(name)
    if step is None:
        return f"the step {name} was not taken"
    return first_line(next(iter([*step.failed.values(), *step.left_out.values()]), "nothing of it ran"))
