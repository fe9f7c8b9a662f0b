"""Tables of a benchmark, with the decimals that align each column; as Markdown for the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from attnforge.bench.results import Contender, Fit, Growth, Model, Series
from attnforge.report.render import NOTHING, error, fixed, markdown_table, percent, places, with_interval

Measure = Literal["time", "memory"]


def decimals_of(contenders: Sequence[Contender]) -> dict[str, int]:
    """Return the decimals of every numeric column, by its name."""
    return {
        "ms": places(c.latency.median.value for c in contenders),
        "cold": places((c.cold.load_s for c in contenders if c.cold), 2),
        "peak": places(c.memory.peak_mib for c in contenders if c.memory),
        "extra": places((c.memory.extra_mib for c in contenders if c.memory), 2),
        "size": places((c.size_mb for c in contenders), 2),
        "rate": places((rate.per_second.value for c in contenders for rate in c.throughput), 2),
    }


@dataclass(frozen=True)
class GrowthTable:
    """Time or memory of every series over the sizes, and its fitted law; None where a series was not measured."""

    measure: Measure
    unit: str
    rows: list[tuple[Series, list[float | None], Fit | None]]
    decimals: int


def growth_tables(growth: Growth) -> list[GrowthTable]:
    """Return the table of time, and that of memory if any was measured."""
    count = len(growth.sizes)
    tables = []
    measures: list[tuple[Measure, str]] = [("time", "ms per call"), ("memory", "MiB added per call")]
    for measure, unit in measures:
        is_time = measure == "time"
        rows = [
            (s, [*(s.ms if is_time else s.extra_mib), *[None] * count][:count], s.time if is_time else s.memory)
            for s in growth.series
        ]
        numbers = [number for _, values, _ in rows for number in values]
        if any(number is not None for number in numbers):
            tables.append(GrowthTable(measure, unit, rows, places(numbers, 2)))
    return tables


# --- Markdown ---------------------------------------------------------------------------------------------------------


def table(model: Model) -> str:
    """Return one model's contenders as Markdown, ours in bold. † marks contenders that are wrong in another case."""
    contenders = [contender for group in model.by_precision.values() for contender in group]
    decimals = decimals_of(contenders)
    head = (
        *("contender", "precision", "median ms (95%)", "ratio to what is picked (95%)", "share of the limit"),
        *("extra MiB", "error"),
    )
    rows = [
        (
            _name(contender) + (" †" if contender.wrong_in is not None else ""),
            contender.precision,
            with_interval(contender.latency.median, decimals["ms"]),
            with_interval(contender.ratio, 2) if contender.ratio else NOTHING,
            percent(contender.share),
            fixed(contender.memory.extra_mib if contender.memory else None, decimals["extra"]),
            error(contender.error),
        )
        for contender in contenders
    ]
    wrong = [f"† {c.key} is wrong in {c.wrong_in}." for c in model.contenders if c.wrong_in is not None]
    return "\n\n".join([markdown_table(head, rows, words=2), *wrong])


def growth_table(growth: Growth) -> str:
    """Return time over the sizes as Markdown, followed by memory if any was measured."""
    tables = []
    for grown in growth_tables(growth):
        head = (
            *(grown.unit, "precision"),
            *(f"{size:,} {growth.along}" for size in growth.sizes),
            *(f"~ {growth.along}^ (95%)", "between the last two"),
        )
        rows = [
            (
                _name(series),
                series.precision,
                *(fixed(value, grown.decimals) for value in values),
                with_interval(fit.exponent, 2) if fit else NOTHING,
                f"{fit.last:.2f}" if fit else NOTHING,
            )
            for series, values, fit in grown.rows
        ]
        tables.append(markdown_table(head, rows, words=2))
    return "\n\n".join(tables)


def _name(contender: Contender | Series) -> str:
    return f"**{contender.name}**" if contender.ours else contender.name
