"""The page of a run on a GPU: its figures as Markdown, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attnforge.benchmarks.gpu.conclusions import grouped
from attnforge.benchmarks.gpu.steps import (
    COMPILE,
    EAGER,
    FATAL,
    FLASH,
    SHARES,
    WHOLE,
    GpuResults,
    Item,
    Step,
    worked,
)
from attnforge.benchmarks.measure.results import Latency
from attnforge.benchmarks.publish import markdown_table
from attnforge.errors import first_line
from attnforge.numbers import scientific
from attnforge.runtime.backends.registry import BACKENDS

TIMES = (
    "Milliseconds as p50 / p90 / p99. On the device: between CUDA events, the device kept busy until all is enqueued. "
    "End to end: by the clock until the stream is done. To eager: end to end, p50. Ready: from nothing to the first "
    "output, loading or compiling; plans are built before. MiB: device memory taken by then."
)
"""What the numbers of the timing tables are."""


def page(results: GpuResults) -> str:
    """The figures as Markdown, and nothing else."""
    steps = {name: results.steps.get(name, Step()) for name in SHARES}
    parts = [
        "# attnforge on a GPU",
        _head(results),
        "## Claims",
        markdown_table(
            ("claim", "", "because"), [(claim.text, claim.answer, claim.because) for claim in results.claims]
        ),
        "## The machine, and what runs on it",
        _environment(steps["environment"]),
    ]
    if summary := [item.values.get("summary") for item in steps["tests"].items.values()]:
        parts += ["## Tests", *(f"`pytest -m gpu`: {text or 'did not end'}" for text in summary)]
    if steps["parity"].items:
        parts += ["## Parity", "Relative error of the worst case / its budget.", _parity(steps["parity"])]
    if steps["ceilings"].items:
        parts += ["## What the device can do at most", _ceilings(steps["ceilings"])]
    if steps["attention"].items:
        parts += ["## Attention alone", _attention_table(steps["attention"], ceilings_of(results))]
    if steps["latency"].items:
        parts += ["## Patch attention", TIMES, _latency_tables(steps["latency"])]
    if steps["overhead"].items:
        parts += ["## What a session adds", _overhead(steps["overhead"])]
    parts += ["## What failed, in its own words", _failures(results)]
    parts += ["## What was skipped or left out", _left_out(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(results: GpuResults) -> str:
    of = ", ".join(f"{key} {value}" for key, value in results.machine.items() if key != "device")
    spent = f"{results.seconds:.0f} of {results.budget_seconds:.0f} s"
    return f"{results.machine.get('device', 'no device')}; {of}\n\n`{results.command}`, {results.date}, {spent}"


def _environment(step: Step) -> str:
    facts = [(key, value) for name in ("device", "software") for key, value in _values(step, name).items()]
    rows = []
    for key, item in step.items.items():
        if key.startswith("try "):
            why = [*item.skipped.values(), *(f"{what}: {first_line(text)}" for what, text in item.failed.items())]
            why += [f"{what}: {check.reason}" for what, check in item.checks.items() if not check.passed]
            facts_of = [f"{name} {value}" for name, value in item.values.items()]
            rows.append((key.removeprefix("try "), _tried(item), "; ".join(why or facts_of)))
    tables = [
        markdown_table(("", ""), facts) if facts else "",
        markdown_table(("backend, plan for", "", "figures, or why not"), rows),
    ]
    return "\n\n".join(table for table in tables if table) if facts or rows else "Nothing was found out."


def _tried(item: Item) -> str:
    if item.skipped and not item.checks:
        return "not here"
    if not worked(item):
        return "does not work"
    return "works in part" if item.failed or not all(check.passed for check in item.checks.values()) else "works"


def _values(step: Step, key: str) -> dict[str, Any]:
    return dict(step.items[key].values) if key in step.items else {}


def _parity(step: Step) -> str:
    named = {name for item in step.items.values() for name in (*item.checks, *item.failed)}
    backends = [name for name in (*BACKENDS, EAGER, COMPILE) if name in named]
    rows: dict[str, dict[str, str]] = {}
    for key, item in step.items.items():
        row = rows.setdefault(key.removesuffix(", torch"), {})
        row |= {name: _check_cell(item, name) for name in backends if _check_cell(item, name)}
    cells = [(key, *(row.get(name, "–") for name in backends)) for key, row in rows.items()]
    return markdown_table(("model, precision", *backends), cells)


def _check_cell(item: Item, name: str) -> str:
    if (check := item.checks.get(name)) is None:
        return "**failed**" if {name, WHOLE, FATAL} & set(item.failed) else ""
    text = f"{scientific(check.error)} / {scientific(check.budget)}"
    return text if check.passed else f"**{text}**"


def ceilings_of(results: GpuResults) -> dict[str, float]:
    """The device's ceilings: TFLOP/s of matrix products by precision, GB/s of a `copy`."""
    most = {}
    for key, item in results.steps.get("ceilings", Step()).items.items():
        rate = item.values.get("gb_per_s" if key == "copy" else "tflops")
        if isinstance(rate, float):
            most[key.removeprefix("product ")] = rate
    return most


def _ceilings(step: Step) -> str:
    rows = []
    for key, item in step.items.items():
        if "tflops" in item.values:
            size = item.values["size"]
            rows.append((f"{key}, {size} × {size} × {size}", f"{item.values['tflops']:.1f} TFLOP/s"))
        elif "gb_per_s" in item.values:
            rows.append(("copy, read and written", f"{item.values['gb_per_s']:.0f} GB/s"))
    return markdown_table(("", "the best of many"), rows)


def _attention_table(step: Step, most: Mapping[str, float]) -> str:
    rows: list[tuple[object, ...]] = []
    for item in step.items.values():
        flash = item.timings.get(FLASH)
        operations, moved = (float(item.values[key] or 0) for key in ("flops", "bytes"))
        for name, timing in sorted(item.timings.items(), key=lambda pair: pair[1].wall.median.value):
            if timing.device is None:
                continue
            tflops, gigabytes = (amount / timing.device.median.value for amount in (operations / 1e9, moved / 1e6))
            rows.append(
                (
                    item.values["tokens"],
                    name,
                    _times(timing.device),
                    ratio_text(timing.device, flash.device if flash else None),
                    f"{tflops:.1f} TFLOP/s{_share(tflops, most.get('fp16'))}",
                    f"{gigabytes:.0f} GB/s{_share(gigabytes, most.get('copy'))}",
                    _times(timing.wall),
                )
            )
    header = ("tokens", "", "ms on the device", "to flash", "its products", "Q, K, V and output", "ms end to end")
    return markdown_table(header, rows) if rows else "Nothing was timed."


def _share(value: float, most: float | None) -> str:
    return f" ({100 * value / most:.0f}% of the most)" if most else ""


def ratio_text(latency: Latency | None, other: Latency | None) -> str:
    """One median over another, to two decimals; a dash where either is missing."""
    return f"{latency.median.value / other.median.value:.2f}" if latency is not None and other is not None else "–"


def _times(latency: Latency | None) -> str:
    if latency is None:
        return "–"
    return " / ".join(f"{ms:.3f}" for ms in (latency.median.value, latency.p90, latency.p99))


def _timing_table(item: Item) -> str:
    eager = item.timings.get(EAGER)
    rows = [
        (
            name,
            _times(timing.device),
            _times(timing.wall),
            ratio_text(timing.wall, eager.wall if eager else None),
            f"{timing.per_second:.0f}",
            f"{timing.host_ms:.3f}",
            f"{timing.ready_seconds:.2f}",
            _number(timing.held_mib),
            _number(timing.session_mib if timing.session_mib is not None else timing.peak_mib),
            timing.calls,
        )
        for name, timing in sorted(item.timings.items(), key=lambda pair: pair[1].wall.median.value)
    ]
    header = (
        "", "on the device", "end to end", "to eager", "a second", "until the call returns", "ready, s", "MiB taken",
        "MiB it says", "calls",
    )  # fmt: skip
    return markdown_table(header, rows) if rows else ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _latency_tables(step: Step) -> str:
    parts: list[str] = []
    for key, item in step.items.items():
        out = [f"{name}: {first_line(why)}" for name, why in (item.skipped | item.failed).items()]
        parts += [f"### {key}", _timing_table(item) or "Nothing was timed."]
        parts += ["Not timed: " + "; ".join(out)] if out else []
    return "\n\n".join(parts)


def _overhead(step: Step) -> str:
    parts = []
    for key, item in step.items.items():
        values = [f"{name} {_plain(value)}" for name, value in item.values.items()]
        parts += [f"### {key}", _timing_table(item), ", ".join(values)]
    return "\n\n".join(part for part in parts if part)


def _plain(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _failures(results: GpuResults) -> str:
    lines = []
    for name, step in results.steps.items():
        for what, text in step.failed.items():
            lines.append((f"{name}, {what}", text))
        for key, item in step.items.items():
            lines += [(f"{name}: {key}: {what}", text) for what, text in item.failed.items()]
            lines += [
                (f"{name}: {key}: {contender}", f"outside the parity budget: {check.reason}")
                for contender, check in item.checks.items()
                if not check.passed
            ]
    return "\n\n".join(f"**{where}**\n\n```\n{text}\n```" for where, text in lines) or "Nothing."


def _left_out(results: GpuResults) -> str:
    lines: list[str] = []
    for name in SHARES:
        if (step := results.steps.get(name)) is None:
            lines.append(f"- {name}: not taken")
            continue
        reasons = grouped(step.left_out)
        for key, item in step.items.items():
            for who, why in item.skipped.items():
                reasons.setdefault(f"{who}: {why}", []).append(key)
        lines += [f"- {name}: {why} ({'; '.join(keys)})" for why, keys in reasons.items()]
    return "\n".join(lines) or "Nothing."
