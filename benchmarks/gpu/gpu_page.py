"""The page of a GPU run: its figures as Markdown."""

from __future__ import annotations

from collections.abc import Mapping

from attnforge.bench.results import Latency
from attnforge.errors import first_line
from attnforge.report.render import NOTHING, error, fixed, grouped, markdown_table
from attnforge.runtime.backends.registry import BACKENDS
from benchmarks.gpu.steps import COMPILE, EAGER, FATAL, FLASH, SHARES, WHOLE, GpuResults, Item, StepResult, worked

TIMES = (
    "Milliseconds as p50 / p90 / p99. On the device: between CUDA events, the device kept busy until all is enqueued. "
    "End to end: by the clock until the stream is done. To eager: end to end, p50. Ready: from the start of loading or "
    "compiling to the first output; plans are built before. MiB: device memory taken by then."
)
"""Explanation of the numbers in the timing tables."""


def page(results: GpuResults) -> str:
    """Return the figures as Markdown."""
    step = {name: results.steps.get(name, StepResult()) for name in SHARES}
    claims = [(claim.text, claim.answer, claim.because) for claim in results.claims]
    tests = [f"`{key}`: {item.values.get('summary') or 'did not end'}" for key, item in step["tests"].items.items()]
    sections = {
        "Claims": [markdown_table(("claim", "", "because"), claims)],
        "Machine and backends": _environment(step["environment"]),
        "Tests": tests,
        "Parity": _parity(step["parity"]),
        "Ceilings of the device": _ceilings(step["ceilings"]),
        "Published models": _latencies(step["published"]),
        "Decoding": _latencies(step["decoding"]),
        "Attention alone": _attention(step["attention"], ceilings_of(results)),
        "Patch attention": _latencies(step["latency"]),
        "Overhead of a session": [
            text
            for key, item in step["overhead"].items.items()
            for text in (f"### {key}", _timing_table(item), _values(item, ", "))
        ],
        "Failures": _failures(results) or ["Nothing."],
        "Skipped or left out": ["\n".join(_left_out(results)) or "Nothing."],
    }
    versions = ", ".join(f"{key} {value}" for key, value in results.machine.items() if key != "device")
    spent = f"{results.seconds:.0f} of {results.budget_seconds:.0f} s"
    where = f"{results.machine.get('device', 'no device')}; {versions}"
    parts = ["# attnforge on a GPU", where, f"`{results.command}`, {results.date}, {spent}"]
    for title, texts in sections.items():
        parts += [f"## {title}", *texts] if texts else []
    return "\n\n".join(part for part in parts if part) + "\n"


def _environment(step: StepResult) -> list[str]:
    facts, rows = [], []
    for key, item in step.items.items():
        if not key.startswith("try "):
            facts += list(item.values.items())
            continue
        why = [*item.skipped.values(), *(f"{what}: {first_line(text)}" for what, text in item.failed.items())]
        why += [f"{what}: {check.reason}" for what, check in item.checks.items() if not check.passed]
        rows.append((key.removeprefix("try "), _tried(item), "; ".join(why) or _values(item, "; ")))
    tables = [markdown_table(("", ""), facts)] if facts else []
    tables += [markdown_table(("backend, plan for", "", "figures, or why not"), rows)] if rows else []
    return tables or ["No figures."]


def _tried(item: Item) -> str:
    if item.skipped and not item.checks:
        return "not available"
    if not worked(item):
        return "does not work"
    return "works partly" if item.failed or not all(check.passed for check in item.checks.values()) else "works"


def _values(item: Item, between: str) -> str:
    texts = {name: f"{v:.2f}" if isinstance(v, float) else str(v) for name, v in item.values.items()}
    return between.join(f"{name} {text}" for name, text in texts.items())


def _parity(step: StepResult) -> list[str]:
    named = {name for item in step.items.values() for name in (*item.checks, *item.failed)}
    backends = [name for name in (*BACKENDS, EAGER, COMPILE) if name in named]
    rows: dict[str, dict[str, str]] = {}
    for key, item in step.items.items():
        row = rows.setdefault(key.removesuffix(", torch"), {})
        row |= {name: text for name in backends if (text := _check_cell(item, name))}
    cells = [(key, *(row.get(name, NOTHING) for name in backends)) for key, row in rows.items()]
    table = markdown_table(("model, precision", *backends), cells)
    return ["Relative error of the worst case / its budget.", table] if rows else []


def _check_cell(item: Item, name: str) -> str:
    if (check := item.checks.get(name)) is None:
        return "**failed**" if {name, WHOLE, FATAL} & set(item.failed) else ""
    text = f"{error(check.error)} / {error(check.budget)}"
    return text if check.passed else f"**{text}**"


def ceilings_of(results: GpuResults) -> dict[str, float]:
    """Return the device's ceilings: TFLOP/s of matrix products by precision, GB/s of a `copy`."""
    most = {}
    for key, item in results.steps.get("ceilings", StepResult()).items.items():
        rate = item.values.get("gb_per_s" if key == "copy" else "tflops")
        if isinstance(rate, float):
            most[key.removeprefix("product ")] = rate
    return most


def _ceilings(step: StepResult) -> list[str]:
    rows = []
    for key, item in step.items.items():
        if "tflops" in item.values:
            size = item.values["size"]
            rows.append((f"{key}, {size} × {size} × {size}", f"{item.values['tflops']:.1f} TFLOP/s"))
        elif "gb_per_s" in item.values:
            rows.append(("copy, read and written", f"{item.values['gb_per_s']:.0f} GB/s"))
    return [markdown_table(("", "best of many"), rows)] if step.items else []


def _attention(step: StepResult, most: Mapping[str, float]) -> list[str]:
    rows = []
    for item in step.items.values():
        if not item.timings:  # it failed, or is running
            continue
        flash = item.timings.get(FLASH)
        operations, moved = (float(item.values[key] or 0) for key in ("flops", "bytes"))
        for name, timing in sorted(item.timings.items(), key=lambda pair: pair[1].wall.median.value):
            if timing.device is None:
                continue
            ms = timing.device.median.value
            tflops, gigabytes = operations / 1e9 / ms, moved / 1e6 / ms
            to_flash = ratio_text(timing.device, flash.device if flash else None)
            products = f"{tflops:.1f} TFLOP/s{_share(tflops, most.get('fp16'))}"
            bytes_moved = f"{gigabytes:.0f} GB/s{_share(gigabytes, most.get('copy'))}"
            on_device, wall = _times(timing.device), _times(timing.wall)
            rows.append((item.values["tokens"], name, on_device, to_flash, products, bytes_moved, wall))
    header = ("tokens", "", "ms on the device", "to flash", "its products", "Q, K, V and output", "ms end to end")
    return [markdown_table(header, rows) if rows else "Nothing was timed."] if step.items else []


def _share(value: float, most: float | None) -> str:
    return f" ({100 * value / most:.0f}% of the ceiling)" if most else ""


def ratio_text(latency: Latency | None, base: Latency | None) -> str:
    """Return the ratio of two medians, to two decimals; a dash if either is missing."""
    return f"{latency.median.value / base.median.value:.2f}" if latency is not None and base is not None else NOTHING


def _times(latency: Latency | None) -> str:
    return NOTHING if latency is None else f"{latency.median.value:.3f} / {latency.p90:.3f} / {latency.p99:.3f}"


def _timing_table(item: Item) -> str:
    eager = item.timings.get(EAGER)
    rows = []
    for name, timing in sorted(item.timings.items(), key=lambda pair: pair[1].wall.median.value):
        times = _times(timing.device), _times(timing.wall), ratio_text(timing.wall, eager.wall if eager else None)
        costs = f"{timing.per_second:.0f}", f"{timing.host_ms:.3f}", f"{timing.ready_seconds:.2f}"
        says = timing.session_mib if timing.session_mib is not None else timing.peak_mib
        rows.append((name, *times, *costs, fixed(timing.held_mib, 0), fixed(says, 0), timing.calls))
    header = (
        "", "on the device", "end to end", "to eager", "a second", "until the call returns", "ready, s", "MiB taken",
        "MiB reported", "calls",
    )  # fmt: skip
    return markdown_table(header, rows) if rows else ""


def _latencies(step: StepResult) -> list[str]:
    parts = [TIMES] if step.items else []
    for key, item in step.items.items():
        out = [f"{name}: {first_line(why)}" for name, why in (item.skipped | item.failed).items()]
        parts += [f"### {key}", _timing_table(item) or "Nothing was timed."]
        parts += ["Not timed: " + "; ".join(out)] if out else []
    return parts


def _failures(results: GpuResults) -> list[str]:
    lines = []
    for name, step in results.steps.items():
        lines += [(f"{name}, {what}", text) for what, text in step.failed.items()]
        for key, item in step.items.items():
            lines += [(f"{name}: {key}: {what}", text) for what, text in item.failed.items()]
            wrong = {who: check.reason for who, check in item.checks.items() if not check.passed}
            lines += [(f"{name}: {key}: {who}", f"outside the parity budget: {why}") for who, why in wrong.items()]
    return [f"**{where}**\n\n```\n{text}\n```" for where, text in lines]


def _left_out(results: GpuResults) -> list[str]:
    lines = []
    for name in SHARES:
        if (step := results.steps.get(name)) is None:
            lines.append(f"- {name}: not taken")
            continue
        reasons = list(step.left_out.items())
        reasons += [(key, f"{who}: {why}") for key, item in step.items.items() for who, why in item.skipped.items()]
        lines += [f"- {name}: {why} ({'; '.join(keys)})" for why, keys in grouped(reasons).items()]
    return lines
