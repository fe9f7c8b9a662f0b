"""What follows from the figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attnforge.benchmarks.gpu.records import (
    COMPILE,
    EAGER,
    FATAL,
    FLASH,
    PATCH,
    SIDES,
    WHOLE,
    Claim,
    Item,
    Results,
    Step,
    first_line,
    ours,
)
from attnforge.bundle import FLAVOURS
from attnforge.runtime.backends.registry import BACKENDS, ON_GPU, WITHOUT_TARGET


def wrong_answers(results: Results) -> list[str]:
    """Every answer of attnforge's that was outside the budget."""
    return [
        f"{name}, {key}, {who}: {verdict.reason}"
        for name, taken in results.steps.items()
        for key, item in taken.items.items()
        for who, verdict in item.verdicts.items()
        if ours(who) and not verdict.passed
    ]


def failed_tests(results: Results) -> list[str]:
    """What pytest said in the end where it did not end well; not where there was no time for it to end."""
    return [
        f"tests, {key}: {item.values.get('summary')}"
        for key, item in results.steps.get("tests", Step()).items.items()
        if item.values.get("exit code", 0) != 0
    ]


def claims(results: Results) -> list[Claim]:
    """What the figures say yes or no to."""
    found = [parity_claim(results, backend) for backend in BACKENDS if backend not in WITHOUT_TARGET]
    for precision in ("fp16", "fp32", "bf16"):
        found.append(latency_claim(results, precision, EAGER, 0.5, "takes at most half the time of torch eager"))
        found.append(latency_claim(results, precision, COMPILE, 1.0, "is faster than torch.compile"))
    return [*found, attention_claim(results)]


def parity_claim(results: Results, backend: str) -> Claim:
    text = f"every model in every precision is within the parity budget on {backend}"
    taken = results.steps.get("parity", Step())
    items = {key: item for key, item in taken.items.items() if not key.endswith(", torch")}
    left_out = [key for key in taken.left_out if not key.endswith(", torch")]
    judged = {key: item.verdicts[backend] for key, item in items.items() if backend in item.verdicts}
    wrong = [key for key, verdict in judged.items() if not verdict.passed]
    failed = [key for key, item in items.items() if {backend, WHOLE, FATAL} & set(item.failed)]
    skipped = {key: item.skipped[backend] for key, item in items.items() if backend in item.skipped}
    if not judged and not failed:
        why = next(iter(skipped.values()), None) or _why_not(results, "parity")
        return Claim(text=text, holds=None, because=why)
    parts = [f"{len(judged) - len(wrong)} of {len(judged)} that ran are"]
    for what, keys in (("outside it", wrong), ("failed to run", failed), ("not deployed for it", list(skipped))):
        parts += [f"{what}: {', '.join(keys)}"] if keys else []
    if left_out or taken.failed:
        why = (
            f"{len(left_out)}, as {left_out[0]}: {taken.left_out[left_out[0]]}"
            if left_out
            else _why_not(results, "parity")
        )
        parts.append(f"not measured: {why}")
    holds = False if wrong or failed or skipped else None if left_out or taken.failed else True
    return Claim(text=text, holds=holds, because="; ".join(parts))


def latency_claim(results: Results, precision: str, peer: str, limit: float, words: str) -> Claim:
    """At batch 1, end to end at the median, the fastest session on inputs that lie on the device against a peer."""
    text = f"{precision}, batch 1: the fastest attnforge session {words}"
    taken = results.steps.get("latency", Step())
    start = f"{precision}, batch 1, "
    ratios: dict[str, float] = {}
    missing = {key.removeprefix(start): why for key, why in taken.left_out.items() if key.startswith(start)}
    for key, item in taken.items.items():
        if not key.startswith(start):
            continue
        where, own = key.removeprefix(start), {name: one for name, one in item.timings.items() if name in ON_GPU}
        if own and peer in item.timings:
            best = min(own, key=lambda name: own[name].wall_ms.p50)
            ratios[f"{where} ({best})"] = own[best].wall_ms.p50 / item.timings[peer].wall_ms.p50
        else:
            missing[where] = _why_untimed(item, (peer,) if own else ON_GPU)
    parts = [f"{where} {ratio:.2f}×" for where, ratio in ratios.items()]
    parts += [f"{', '.join(where)} not measured: {why}" for why, where in grouped(missing).items()]
    if not parts:
        return Claim(text=text, holds=None, because=_why_not(results, "latency"))
    held = [ratio <= limit if limit < 1 else ratio < limit for ratio in ratios.values()]
    return Claim(text=text, holds=False if not all(held) else None if missing else True, because="; ".join(parts))


def attention_claim(results: Results) -> Claim:
    tokens = (SIDES[-1] // PATCH) ** 2
    text = f"attention alone at {tokens} tokens, fp16, takes at most 1.2 times torch's flash kernel on the device"
    taken = results.steps.get("attention", Step())
    item = taken.items.get(f"{tokens} tokens")
    if item is None or f"{tokens} tokens" in taken.left_out:
        why = taken.left_out.get(f"{tokens} tokens") or _why_not(results, "attention")
        return Claim(text=text, holds=None, because=why)
    times = {name: one.device_ms.p50 for name, one in item.timings.items() if one.device_ms is not None}
    own = {name: time for name, time in times.items() if name in FLAVOURS}
    if not own or FLASH not in times:
        return Claim(text=text, holds=None, because=_why_untimed(item, (FLASH,) if own else FLAVOURS))
    best = min(own, key=lambda name: own[name])
    ratio = own[best] / times[FLASH]
    figures = f"{best} {own[best]:.3f} ms, flash {times[FLASH]:.3f} ms: {ratio:.2f}×"
    return Claim(text=text, holds=ratio <= 1.2, because=figures)


def _why_untimed(item: Item, names: Sequence[str]) -> str:
    """Why none of these contenders has a time."""
    said = {name: text for name, text in (item.skipped | item.failed).items() if name in (*names, WHOLE, FATAL)}
    return "; ".join(f"{name}: {first_line(text)}" for name, text in said.items()) or f"{names[0]} was not timed"


def _why_not(results: Results, name: str) -> str:
    taken = results.steps.get(name)
    if taken is None:
        return f"the step {name} was not taken"
    return first_line(next(iter([*taken.failed.values(), *taken.left_out.values()]), "nothing of it ran"))


def grouped(reasons: Mapping[str, str]) -> dict[str, list[str]]:
    """What has the same reason, by reason."""
    found: dict[str, list[str]] = {}
    for key, why in reasons.items():
        found.setdefault(why, []).append(key)
    return found


def answer(claim: Claim) -> str:
    return {True: "yes", False: "no", None: "not measured"}[claim.holds]
