"""The page of a benchmark: one HTML file, without network or script, that first says which backend to ship and what it
costs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from attnforge.benchmarks.measure.limits import Ceilings
from attnforge.benchmarks.measure.results import Contender, Growth, Model, Results, Throughput
from attnforge.benchmarks.report import plots
from attnforge.benchmarks.report.advice import advice_on
from attnforge.benchmarks.report.tables import GrowthTable, decimals_of, growth_tables
from attnforge.report.charts import Picture
from attnforge.report.render import check_page, rounded, write_template

TEMPLATE = "bench.html"


def write_page(
    results: Results,
    path: str | os.PathLike[str],
    *,
    force: bool = False,
    compared: Sequence[str] | None = None,
) -> None:
    """Write results to one HTML file with tables and plots.

    Args:
        results: of one run.
        path: of the file.
        force: overwrite the file.
        compared: how these results differ from an earlier run's, one sentence each.

    Raises:
        UnavailableError: the packages that a page needs are not installed: `pip install attnforge[report]`.
        UsageError: `path` is a folder, or exists and `force` is not given.
    """
    check_page(path, force)
    answered = [(model, every) for model in results.models if (every := advice_on(model))]
    shipped = [answer.ship for _, every in answered for answer in every if answer.ship is not None]
    write_template(
        TEMPLATE,
        path,
        results=results,
        names=", ".join(dict.fromkeys(model.name for model in results.models)) or "nothing",
        answers=answered,
        decimals=decimals_of(shipped),
        models=[_section(number, model) for number, model in enumerate(results.models, 1)],
        roofline=plots.roofline(results),
        ceilings=_in_words(results.ceilings) if results.ceilings is not None else None,
        growth=[_growth_section(growth) for growth in results.growth],
        compared=list(compared or ()),
        has_cases=any(c.cases is not None for model in results.models for c in model.contenders),
    )


# --- one model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """One model's part of the page.

    Attributes:
        groups: contenders by precision, the fastest first.
        decimals: of the numbers in a column of the table, by the column's name.
        loads: samples a call and callers at once, of every load that was measured.
        throughput: by contender, the rate at every load, or None.
        stages: of deploying.
    """

    number: int
    model: Model
    groups: dict[str, list[Contender]]
    decimals: dict[str, int]
    loads: list[tuple[int, int]]
    throughput: list[tuple[Contender, list[Throughput | None]]]
    stages: list[str]
    latencies: Picture | None
    ratios: Picture | None

    @property
    def notes(self) -> list[tuple[str, str]]:
        return [(c.key, note) for group in self.groups.values() for c in group for note in _notes(c)]


def _section(number: int, model: Model) -> _Section:
    groups = model.by_precision
    contenders = [contender for group in groups.values() for contender in group]
    by_load = {c.key: {(rate.batch, rate.callers): rate for rate in c.throughput} for c in contenders}
    loads = sorted({load for rates in by_load.values() for load in rates})
    return _Section(
        number,
        model,
        groups,
        decimals_of(contenders),
        loads,
        [(c, [by_load[c.key].get(load) for load in loads]) for c in contenders if c.throughput],
        list(dict.fromkeys(stage for deployed in model.deployed for stage in deployed.seconds)),
        plots.latencies(model),
        plots.ratios(model),
    )


def _notes(contender: Contender) -> list[str]:
    """The contender's own notes, and which reference cases it was not held to, or is wrong in."""
    cases = f"it is wrong in {contender.wrong_in}" if contender.wrong_in is not None else contender.partly
    return [*contender.notes, *([cases] if cases is not None else [])]


def _in_words(ceilings: Ceilings) -> str:
    """What the machine can do at best, and up to which intensity a model waits for its memory."""
    threads = f"{ceilings.threads} thread{'s' if ceilings.threads != 1 else ''}"
    parts = [
        f"At best, with {threads}, this machine was measured to copy {rounded(ceilings.bandwidth / 1e9)} GB/s",
        f"to take {rounded(ceilings.exponentials / 1e9)}·10⁹ exponentials a second",
    ]
    rates = [
        f"{rounded(rate / 1e9)} GFLOP/s in {name}" + (f" ({ceilings.by[name]})" if name in ceilings.by else "")
        for name, rate in ceilings.flops.items()
    ]
    if rates:
        parts.append(f"and to multiply matrices at {', '.join(rates)}")
    ridges = [
        f"{rounded(rate / ceilings.bandwidth)} in {name}"
        for name, rate in ceilings.flops.items()
        if ceilings.bandwidth > 0
    ]
    memory = f" A model of fewer operations a byte than {', '.join(ridges)} waits for the memory." if ridges else ""
    return f"{', '.join(parts)}.{memory}"


# --- growth -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _GrowthSection:
    """The part of the page on one model's growth: tables, each with a plot where there is something to draw."""

    growth: Growth
    tables: list[tuple[GrowthTable, Picture | None]]
    stages: list[str]


def _growth_section(growth: Growth) -> _GrowthSection:
    stages = list(dict.fromkeys(stage for seconds in growth.deploy_seconds for stage in seconds))
    return _GrowthSection(growth, [(t, plots.growth_plot(growth, t.measure)) for t in growth_tables(growth)], stages)
