"""Conclusions from the figures of a run: claims, wrong answers and failed tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from attnforge.bundle import FLAVOURS
from attnforge.errors import first_line
from attnforge.report.render import by_reason
from attnforge.runtime.backends.registry import ON_GPU, REGISTRY
from benchmarks.experiment import Verdict, verdict
from benchmarks.gpu.second_opinion import opinion_of
from benchmarks.gpu.steps import (
    COMPILE,
    EAGER,
    FATAL,
    FLASH,
    PATCH,
    SIDES,
    WHOLE,
    Claim,
    GpuResults,
    Item,
    StepResult,
    is_ours,
)


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
