"""The page: the figures as Markdown, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attnforge.benchmarks.gpu.claims import answer, grouped
from attnforge.benchmarks.gpu.records import (
    COMPILE,
    EAGER,
    FATAL,
    FLASH,
    SHARES,
    WHOLE,
    Item,
    Results,
    Spread,
    Step,
    first_line,
    worked,
)
from attnforge.runtime.backends.registry import BACKENDS

TIMES = (
    "Milliseconds as p50 / p90 / p99. On the device: between CUDA events, the device kept busy until all is enqueued. "
    "End to end: by the clock until the stream is done. To eager: end to end, p50. Ready: from nothing to the first "
    "output, loading or compiling; plans are built before. MiB: device memory taken by then."
)


def page(results: Results) -> str:
    """The figures as Markdown, and nothing else."""
    steps = {name: results.steps.get(name, Step()) for name in SHARES}
    parts = [
        "# attnforge on a GPU",
        _head(results),
        "## Claims",
        _table(("claim", "", "because"), [(c.text, answer(c), c.because) for c in results.claims]),
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


def _head(results: Results) -> str:
    of = ", ".join(f"{key} {value}" for key, value in results.machine.items() if key != "device")
    spent = f"{results.seconds:.0f} of {results.budget_seconds:.0f} s"
    return f"{results.machine.get('device', 'no device')}; {of}\n\n`{results.command}`, {results.date}, {spent}"


def _table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [[str(cell).replace("|", "\\|").replace("\n", " ") for cell in row] for row in (header, *rows)]
    lines.insert(1, ["---"] * len(header))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _environment(taken: Step) -> str:
    facts = [(key, value) for name in ("device", "software") for key, value in _values(taken, name).items()]
    rows = []
    for key, item in taken.items.items():
        if key.startswith("try "):
            why = [*item.skipped.values(), *(f"{what}: {first_line(text)}" for what, text in item.failed.items())]
            why += [f"{who}: {one.reason}" for who, one in item.verdicts.items() if not one.passed]
            facts_of = [f"{name} {value}" for name, value in item.values.items()]
            rows.append((key.removeprefix("try "), _tried(item), "; ".join(why or facts_of)))
    tables = [_table(("", ""), facts) if facts else "", _table(("backend, plan for", "", "figures, or why not"), rows)]
    return "\n\n".join(table for table in tables if table) if facts or rows else "Nothing was found out."


def _tried(item: Item) -> str:
    if item.skipped and not item.verdicts:
        return "not here"
    if not worked(item):
        return "does not work"
    return "works in part" if item.failed or not all(one.passed for one in item.verdicts.values()) else "works"


def _values(taken: Step, key: str) -> dict[str, Any]:
    return dict(taken.items[key].values) if key in taken.items else {}


def _parity(taken: Step) -> str:
    told = {name for item in taken.items.values() for name in (*item.verdicts, *item.failed)}
    who = [name for name in (*BACKENDS, EAGER, COMPILE) if name in told]
    rows: dict[str, dict[str, str]] = {}
    for key, item in taken.items.items():
        row = rows.setdefault(key.removesuffix(", torch"), {})
        row |= {name: _verdict_cell(item, name) for name in who if _verdict_cell(item, name)}
    cells = [(key, *(row.get(name, "–") for name in who)) for key, row in rows.items()]
    return _table(("model, precision", *who), cells)


def _verdict_cell(item: Item, name: str) -> str:
    if (verdict := item.verdicts.get(name)) is None:
        return "**failed**" if {name, WHOLE, FATAL} & set(item.failed) else ""
    text = f"{verdict.error:.1e} / {verdict.budget:.1e}"
    return text if verdict.passed else f"**{text}**"


def ceilings_of(results: Results) -> dict[str, float]:
    """TFLOP/s of products by precision, and GB/s of a copy."""
    found = {}
    for key, item in results.steps.get("ceilings", Step()).items.items():
        value = item.values.get("gb_per_s" if key == "copy" else "tflops")
        if isinstance(value, float):
            found[key.removeprefix("product ")] = value
    return found


def _ceilings(taken: Step) -> str:
    rows = []
    for key, item in taken.items.items():
        if "tflops" in item.values:
            size = item.values["size"]
            rows.append((f"{key}, {size} × {size} × {size}", f"{item.values['tflops']:.1f} TFLOP/s"))
        elif "gb_per_s" in item.values:
            rows.append(("copy, read and written", f"{item.values['gb_per_s']:.0f} GB/s"))
    return _table(("", "median of 10"), rows)


def _attention_table(taken: Step, most: Mapping[str, float]) -> str:
    rows: list[tuple[object, ...]] = []
    for item in taken.items.values():
        flash = item.timings.get(FLASH)
        for name, one in sorted(item.timings.items(), key=lambda pair: pair[1].wall_ms.p50):
            if one.device_ms is None:
                continue
            tokens, head = (int(item.values[key] or 0) for key in ("tokens", "head_size"))
            heads = int(item.values["batch"] or 0) * int(item.values["heads"] or 0)
            tflops = 4 * heads * tokens**2 * head / one.device_ms.p50 / 1e9
            gigabytes = 4 * heads * tokens * head * 2 / one.device_ms.p50 / 1e6
            rows.append(
                (
                    tokens,
                    name,
                    _times(one.device_ms),
                    ratio_text(one.device_ms, flash.device_ms if flash else None),
                    f"{tflops:.1f} TFLOP/s{_share(tflops, most.get('fp16'))}",
                    f"{gigabytes:.0f} GB/s{_share(gigabytes, most.get('copy'))}",
                    _times(one.wall_ms),
                )
            )
    header = ("tokens", "", "ms on the device", "to flash", "4·n²·d a head", "Q, K, V and output", "ms end to end")
    return _table(header, rows) if rows else "Nothing was timed."


def _share(value: float, most: float | None) -> str:
    return f" ({100 * value / most:.0f}% of the most)" if most else ""


def ratio_text(one: Spread | None, other: Spread | None) -> str:
    """How many times the other's median."""
    return f"{one.p50 / other.p50:.2f}" if one is not None and other is not None else "–"


def _times(times: Spread | None) -> str:
    return "–" if times is None else " / ".join(f"{value:.3f}" for value in (times.p50, times.p90, times.p99))


def _timing_table(item: Item) -> str:
    eager = item.timings.get(EAGER)
    rows = [
        (
            name,
            _times(one.device_ms),
            _times(one.wall_ms),
            ratio_text(one.wall_ms, eager.wall_ms if eager else None),
            f"{one.per_second:.0f}",
            f"{one.host_ms:.3f}",
            f"{one.ready_seconds:.2f}",
            _number(one.held_mib),
            _number(one.session_mib if one.session_mib is not None else one.peak_mib),
            one.calls,
        )
        for name, one in sorted(item.timings.items(), key=lambda pair: pair[1].wall_ms.p50)
    ]
    header = (
        "", "on the device", "end to end", "to eager", "a second", "until the call returns", "ready, s", "MiB taken",
        "MiB it says", "calls",
    )  # fmt: skip
    return _table(header, rows) if rows else ""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}"


def _latency_tables(taken: Step) -> str:
    parts: list[str] = []
    for key, item in taken.items.items():
        out = [f"{name}: {first_line(why)}" for name, why in (item.skipped | item.failed).items()]
        parts += [f"### {key}", _timing_table(item) or "Nothing was timed."]
        parts += ["Not timed: " + "; ".join(out)] if out else []
    return "\n\n".join(parts)


def _overhead(taken: Step) -> str:
    parts = []
    for key, item in taken.items.items():
        values = [f"{name} {_plain(value)}" for name, value in item.values.items()]
        parts += [f"### {key}", _timing_table(item), ", ".join(values)]
    return "\n\n".join(part for part in parts if part)


def _plain(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _failures(results: Results) -> str:
    lines = []
    for name, taken in results.steps.items():
        for what, text in taken.failed.items():
            lines.append((f"{name}, {what}", text))
        for key, item in taken.items.items():
            lines += [(f"{name}: {key}: {what}", text) for what, text in item.failed.items()]
            lines += [
                (f"{name}: {key}: {who}", f"outside the parity budget: {verdict.reason}")
                for who, verdict in item.verdicts.items()
                if not verdict.passed
            ]
    return "\n\n".join(f"**{where}**\n\n```\n{text}\n```" for where, text in lines) or "Nothing."


def _left_out(results: Results) -> str:
    lines: list[str] = []
    for name in SHARES:
        if (taken := results.steps.get(name)) is None:
            lines.append(f"- {name}: not taken")
            continue
        reasons = grouped(taken.left_out)
        for key, item in taken.items.items():
            for who, why in item.skipped.items():
                reasons.setdefault(f"{who}: {why}", []).append(key)
        lines += [f"- {name}: {why} ({'; '.join(keys)})" for why, keys in reasons.items()]
    return "\n".join(lines) or "Nothing."
