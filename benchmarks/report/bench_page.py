"""The page of a benchmark: one HTML file, without network or script, that first says which backend to ship and what it
costs; and tables of the same results in Markdown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnforge.benchmarks.measure.limits import Ceilings
from attnforge.benchmarks.measure.results import Contender, Deployed, Fit, Growth, Model, Results, Series, Throughput
from attnforge.benchmarks.report import plots
from attnforge.benchmarks.report.plots import interval, places, precisions, shown
from attnforge.report.charts import Picture
from attnforge.report.verify_page import check_page, render

TEMPLATE = "bench.html"

USUAL = ("onnxruntime-plain", "eager")
"""The peers that one would run otherwise; the first of them that was timed is what a backend is compared with."""

SHORT = 45
"""Characters up to which a sentence says what a peer is, and not its name."""


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
        force: overwrite it.
        compared: how these results differ from an earlier run's, one sentence each.

    Raises:
        UnavailableError: the packages that it needs are not installed: `pip install attnforge[report]`.
        UsageError: `path` exists and `force` is not given, or is a folder.
    """
    check_page(path, force)
    filters: dict[str, Callable[..., Any]] = {
        "error": _error,
        "fixed": _fixed,
        "interval": interval,
        "listed": _listed,
        "percent": _percent,
        "shown": shown,
    }
    answers = [(model, found) for model in results.models if (found := _answers(model))]
    render(
        TEMPLATE,
        path,
        filters,
        results=results,
        names=", ".join(dict.fromkeys(model.name for model in results.models)) or "nothing",
        answers=answers,
        decimals=_decimals([one.ship for _, found in answers for one in found if one.ship is not None]),
        models=[_section(i, model) for i, model in enumerate(results.models, 1)],
        roofline=plots.roofline(results),
        ceilings=_in_words(results.ceilings) if results.ceilings is not None else None,
        growth=[_grown(one) for one in results.growth],
        compared=list(compared or ()),
        held=any(one.cases is not None for model in results.models for one in model.contenders),
    )


def _error(number: float) -> str:
    """2.1e-7, not 2.1e-07."""
    mantissa, _, exponent = f"{number:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if number else "0"


def _fixed(number: float | None, decimals: int) -> str:
    return "–" if number is None else f"{number:,.{decimals}f}"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{shown(100 * share, 2)}%"


def _listed(sizes: dict[str, int]) -> str:
    return ", ".join(f"{name} {size:,}" for name, size in sizes.items())


# --- the answer -------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """What to ship of one model at one precision.

    Attributes:
        ship: the backend; None where none of ours kept its budget.
        usual, best: how many times as fast it is as the usual peer, and as the fastest that is not known to be wrong
            where that is another and not faster; and what those are.
        warnings, notes: what else there is to know before it is shipped; what may be chance is no warning.
        deployed: the bundle that it comes from.
        base, gain: the model's first precision, and how many times as fast as at that one it is; None at that one.
    """

    precision: str
    ship: Contender | None
    usual: tuple[float, str] | None = None
    best: tuple[float, str] | None = None
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    deployed: Deployed | None = None
    base: str | None = None
    gain: float | None = None

    @property
    def deploy_seconds(self) -> float | None:
        return sum(self.deployed.seconds.values()) if self.deployed is not None and self.deployed.seconds else None

    @property
    def costs(self) -> str:
        """In words; what was not measured is a dash."""
        assert self.ship is not None
        cold, memory = self.ship.cold, self.ship.memory
        return (
            f"{shown(cold.load_s if cold else None, 2)}\N{NO-BREAK SPACE}s to load, "
            f"{shown(memory.peak_mib if memory else None)}\N{NO-BREAK SPACE}MiB, "
            f"{shown(self.ship.size_mb, 2)}\N{NO-BREAK SPACE}MB on disk, "
            f"deploys in {shown(self.deploy_seconds, 2)}\N{NO-BREAK SPACE}s"
        )


def _answers(model: Model) -> list[Answer]:
    """One for every precision that was deployed or timed."""
    names = precisions([*(d.precision for d in model.deployed), *(c.precision for c in model.contenders)])
    found = [_answer(model, name) for name in names]
    shipped = [one for one in found if one.ship is not None]
    for one in shipped[1:]:
        base = shipped[0]
        assert one.ship is not None and base.ship is not None
        one.base, one.gain = base.precision, base.ship.latency.median.value / one.ship.latency.median.value
    return found


def _answer(model: Model, precision: str) -> Answer:
    """The fastest of ours that is right, or the one that is picked where the two cannot be told apart."""
    timed = [c for c in model.contenders if c.precision == precision and c.error <= c.budget]
    timed.sort(key=lambda c: c.latency.median.value)
    right = [c for c in timed if c.wrong_in is None]
    ours, peers = [c for c in right if c.ours], [c for c in right if not c.ours]
    deployed = next((d for d in model.deployed if d.precision == precision), None)
    if not ours:
        warnings = [f"Not {c.name}: it is wrong in {c.wrong_in}." for c in timed if c.ours]
        return Answer(precision, None, warnings=warnings, deployed=deployed)
    fastest, picked = ours[0], next((c for c in timed if c.ours and c.picked), None)
    ship = picked if picked is not None and picked.wrong_in is None and _overlap(picked, fastest) else fastest
    answer = Answer(precision, ship, deployed=deployed)
    usual = next((peer for name in USUAL for peer in timed if peer.name == name), None)
    if usual is not None:
        wrong = ", which is wrong in another case" if usual.wrong_in is not None else ""
        answer.usual = _times(usual, ship), f"{usual.what if len(usual.what) <= SHORT else usual.name}{wrong}"
    if peers and peers[0] is not usual and not _is_faster(peers[0], ship):
        passed = any(c.latency.median.value < peers[0].latency.median.value for c in timed if not c.ours)
        answer.best = (
            _times(peers[0], ship),
            f"{peers[0].name}, the fastest peer{' not known to be wrong' if passed else ''}",
        )
    if picked is not None and picked is not ship:
        how = f"at {_timed(picked)}" if picked.wrong_in is None else f"which is wrong in {picked.wrong_in}"
        answer.warnings.append(f'backend="auto" picks {picked.name}, {how}: name {ship.name} when you load the bundle.')
    if _is_faster(fastest, ship):
        answer.warnings.append(f"{fastest.name} is a little faster: {_timed(fastest)}, {_speed(fastest, ship)}.")
    elif fastest is not ship:
        answer.notes.append(f"{fastest.name} takes {_timed(fastest)}, which may be chance.")
    if faster := [peer for peer in peers if _is_faster(peer, ship)]:
        first, *others = faster
        speed = _speed(first, ship) + (f", {first.partly}" if first.partly is not None else "")
        more = f"; so {'is' if len(others) == 1 else 'are'} {' and '.join(p.name for p in others)}" if others else ""
        answer.warnings.append(f"A peer is faster: {first.name} takes {_timed(first)}, {speed}{more}.")
    for one in timed:
        ahead = one.latency.median.value <= ship.latency.median.value
        if one.wrong_in is not None and ahead and one is not picked:
            answer.notes.append(f"Not {one.name}, {_speed(one, ship)}: it is wrong in {one.wrong_in}.")
    return answer


def _overlap(a: Contender, b: Contender) -> bool:
    return a.latency.median.low <= b.latency.median.high and b.latency.median.low <= a.latency.median.high


def _times(other: Contender, ship: Contender) -> float:
    """How many times as fast as another `ship` is."""
    if ship.picked and other.ratio is not None:
        return other.ratio.value
    return other.latency.median.value / ship.latency.median.value


def _is_faster(other: Contender, ship: Contender) -> bool:
    """Whether another is faster than `ship`, beyond doubt: by the ratio, whose rounds pair, or by the times alone."""
    if ship.picked and other.ratio is not None:
        return other.ratio.high < 1
    return other.latency.median.high < ship.latency.median.low


def _speed(other: Contender, ship: Contender) -> str:
    return f"{1 / _times(other, ship):.2f}× as fast"


def _timed(one: Contender) -> str:
    return f"{shown(one.latency.median.value)} ms (95%: {interval(one.latency.median)})"


# --- one model --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Section:
    """One model's part of the page.

    Attributes:
        groups: contenders by precision, the fastest first.
        decimals: of the numbers in a column of the table, by what it is of.
        loads: samples a call and callers at once, of all that were measured.
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
        return [(one.key, note) for group in self.groups.values() for one in group for note in _notes(one)]


def _section(number: int, model: Model) -> _Section:
    groups = _groups(model)
    ordered = [one for group in groups.values() for one in group]
    loads = sorted({(found.batch, found.callers) for one in ordered for found in one.throughput})
    throughput = [
        (one, [next((f for f in one.throughput if (f.batch, f.callers) == load), None) for load in loads])
        for one in ordered
        if one.throughput
    ]
    return _Section(
        number,
        model,
        groups,
        _decimals(ordered),
        loads,
        throughput,
        list(dict.fromkeys(stage for deployed in model.deployed for stage in deployed.seconds)),
        plots.latencies(model),
        plots.ratios(model),
    )


def _notes(one: Contender) -> list[str]:
    """With the reference cases that it was held to, where those were not all, or it was wrong in one."""
    told = f"it is wrong in {one.wrong_in}" if one.wrong_in is not None else one.partly
    return [*one.notes, *([told] if told is not None else [])]


def _groups(model: Model) -> dict[str, list[Contender]]:
    """Contenders by precision, the fastest first."""
    ordered = sorted(model.contenders, key=lambda c: c.latency.median.value)
    return {name: [c for c in ordered if c.precision == name] for name in precisions(c.precision for c in ordered)}


def _decimals(contenders: Sequence[Contender]) -> dict[str, int]:
    """So that the points of a column stand below one another."""
    return {
        "ms": places(c.latency.median.value for c in contenders),
        "cold": places((c.cold.load_s for c in contenders if c.cold), 2),
        "peak": places(c.memory.peak_mib for c in contenders if c.memory),
        "extra": places((c.memory.extra_mib for c in contenders if c.memory), 2),
        "size": places((c.size_mb for c in contenders), 2),
        "rate": places((found.per_second.value for c in contenders for found in c.throughput), 2),
    }


def _in_words(ceilings: Ceilings) -> str:
    """What the machine can do, and where a model ceases to wait for its memory."""
    threads = f"{ceilings.threads} thread{'s' if ceilings.threads != 1 else ''}"
    said = [f"At best, with {threads}, this machine was measured to copy {shown(ceilings.bandwidth / 1e9)} GB/s"]
    said += [f"to take {shown(ceilings.exponentials / 1e9)}·10⁹ exponentials a second"]
    rates = [
        f"{shown(rate / 1e9)} GFLOP/s in {name}" + (f" ({ceilings.by[name]})" if name in ceilings.by else "")
        for name, rate in ceilings.flops.items()
    ]
    if rates:
        said.append(f"and to multiply matrices at {', '.join(rates)}")
    ridges = [
        f"{shown(rate / ceilings.bandwidth)} in {name}"
        for name, rate in ceilings.flops.items()
        if ceilings.bandwidth > 0
    ]
    words = f"{', '.join(said)}."
    if ridges:
        words += f" A model of fewer operations a byte than {', '.join(ridges)} waits for the memory."
    return words


# --- growth -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Column:
    """A table of growth: every series' numbers over the sizes, and their law."""

    measure: str
    unit: str
    rows: list[tuple[Series, list[float | None], Fit | None]]
    decimals: int
    picture: Picture | None


@dataclass(frozen=True)
class _Grown:
    """The part of the page on one model's growth."""

    growth: Growth
    tables: list[_Column]
    stages: list[str]


def _grown(one: Growth) -> _Grown:
    stages = list(dict.fromkeys(stage for seconds in one.deploy_seconds for stage in seconds))
    return _Grown(one, _growth_tables(one, with_pictures=True), stages)


def _growth_tables(one: Growth, with_pictures: bool) -> list[_Column]:
    """Time, and memory where some was measured."""
    count = len(one.sizes)
    times = [(s, _filled(s.ms, count), s.time) for s in one.series]
    memories = [(s, _filled(s.extra_mib, count), s.memory) for s in one.series]
    found = []
    measures: list[tuple[plots.Measure, str, list[tuple[Series, list[float | None], Fit | None]]]] = [
        ("time", "ms a call", times),
        ("memory", "MiB that a call adds", memories),
    ]
    for what, unit, rows in measures:
        numbers = [n for _, values, _ in rows for n in values]
        if any(n is not None for n in numbers):
            picture = plots.growth(one, what) if with_pictures else None
            found.append(_Column(what, unit, rows, places(numbers, 2), picture))
    return found


def _filled(values: Sequence[float | None], count: int) -> list[float | None]:
    return [*values, *[None] * count][:count]


# --- Markdown ---------------------------------------------------------------------------------------------------------


def table(model: Model) -> str:
    """One model's contenders as Markdown; ours in bold. † marks what is wrong in another case."""
    groups = _groups(model)
    decimals = _decimals([one for group in groups.values() for one in group])
    head = (
        *("contender", "precision", "median ms (95%)", "ratio to what is picked (95%)", "share of the limit"),
        *("extra MiB", "error"),
    )
    rows = []
    for one in (one for group in groups.values() for one in group):
        found = one.latency.median
        rows.append((
            (f"**{_cell(one.name)}**" if one.ours else _cell(one.name)) + (" †" if one.wrong_in is not None else ""),
            one.precision,
            f"{_fixed(found.value, decimals['ms'])} ({interval(found, decimals['ms'])})",
            f"{one.ratio.value:.2f} ({interval(one.ratio, 2)})" if one.ratio else "–",
            _percent(one.share),
            _fixed(one.memory.extra_mib if one.memory else None, decimals["extra"]),
            _error(one.error),
        ))  # fmt: skip
    wrong = [f"† {one.key} is wrong in {one.wrong_in}." for one in model.contenders if one.wrong_in is not None]
    return "\n\n".join([_markdown(head, rows, words=2), *wrong])


def growth_table(growth: Growth) -> str:
    """Time over the sizes as Markdown, and after it memory where some was measured."""
    tables = []
    for column in _growth_tables(growth, with_pictures=False):
        head = (
            *(column.unit, "precision"),
            *(f"{size:,} {growth.along}" for size in growth.sizes),
            *(f"~ {growth.along}^ (95%)", "between the last two"),
        )
        rows = [
            (
                f"**{_cell(series.name)}**" if series.ours else _cell(series.name),
                series.precision,
                *(_fixed(value, column.decimals) for value in values),
                f"{fit.exponent.value:.2f} ({interval(fit.exponent, 2)})" if fit else "–",
                f"{fit.last:.2f}" if fit else "–",
            )
            for series, values, fit in column.rows
        ]
        tables.append(_markdown(head, rows, words=2))
    return "\n\n".join(tables)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _markdown(head: Sequence[str], rows: Iterable[Sequence[str]], words: int) -> str:
    """A table whose first columns are words, and the others numbers."""
    rule = "|" + "---|" * words + "---:|" * (len(head) - words)
    return "\n".join([f"| {' | '.join(head)} |", rule, *(f"| {' | '.join(row)} |" for row in rows)])
