"""What moved between two runs of the benchmark, beyond noise.

Machines are shared and drift, so a time says little on another day. A model's peers, the contenders that are not ours
and are in both runs at the same precision, tell by how much the machine drifted: their median change is divided out of
every time. A change is then uncertain for two reasons, which add in quadrature. Its openings or rounds scatter; the
intervals of both runs (:mod:`.interval`) tell how much. And even equal code is not equally fast in two processes,
because its memory lies elsewhere or something else runs; the spread of the peers' changes tells how much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np

from attnforge.arrays import Array
from attnforge.bench.interval import NORMAL, latency_of, reach
from attnforge.bench.results import Contender, Environment, Growth, Interval, Model, Results, Series
from attnforge.records import Record

TOLERANCE = 0.03
"""How much slower is no regression: the whole interval of a change has to lie beyond."""

USUAL_SPREAD = 0.0125
"""Standard deviation of the logarithm by which equal code differs between runs, where no peers say otherwise."""

BELIEF = 4
"""How many peers it takes to believe their spread as much as the usual one."""

HALF_APART = 0.953873
"""How many standard deviations half of all pairs of normally distributed numbers are apart at most."""

MEDIAN_LOSS = math.pi / 2
"""Variance of a median over that of the mean."""

FEW_ROUNDS = 5
"""Rounds below which the intervals of a single opening are too narrow."""

MEMORY_FACTOR, MEMORY_MIB = 1.1, 4.0
SIZE_FACTOR, SIZE_MB = 1.02, 0.1
COLD_FACTOR, COLD_SECONDS = 1.5, 0.3
DEPLOY_FACTOR, DEPLOY_SECONDS = 1.5, 2.0
"""A number moves when it changes by more than the factor, and by more than the amount."""

EXPONENT = 0.15
"""How much an exponent may grow."""

PARITY_FACTOR, PARITY_SHARE = 2.0, 0.1
"""An error within the budget moves when it changes by more than the factor, and exceeds this share of the budget."""


class Move(Record):
    """Something that differs between the runs by more than noise.

    Attributes:
        model: name of the model, with its sizes where the runs have it at several.
        contender: key of the contender, or `bundle` and the precision.
        what: the quantity, such as `latency`, `extra memory`, `parity`; `gone` for a contender that the new run lacks.
        before, after: in `unit`; None where there is nothing to measure.
        change: ratio of after to before, for times with the drift divided out; None where no number tells it.
        drift: ratio by which the machine is slower, by the model's peers.
        reason: remark of the new run.
    """

    model: str
    contender: str
    what: str
    unit: str = ""
    before: float | None
    after: float | None
    change: Interval | float | None = None
    drift: float | None = None
    regression: bool = False
    reason: str | None = None

    def text(self) -> str:
        told = f"{self.model}, {self.contender}: {self.what}"
        if self.before is not None and self.after is not None:
            told += f" {self.before:.4g} → {self.after:.4g} {self.unit}".rstrip()
        elif (only := self.after if self.before is None else self.before) is not None:
            told += f", {only:.4g} {self.unit} {'now' if self.before is None else 'before'}"
        if isinstance(self.change, Interval):
            told += f", {self.change.value:.3f} times ({self.change.low:.3f} to {self.change.high:.3f})"
        elif self.change is not None:
            told += f", {self.change:.3g} times"
        if self.drift is not None:
            told += f" with the machine's {self.drift:.3f} taken out"
        return told if self.reason is None else f"{told}: {self.reason}"


class Differences(Record):
    """What differs between two runs.

    Attributes:
        moved: quantities that differ by more than noise, for better or worse.
        notes: limits of the comparison; another machine or number of threads first.
    """

    moved: list[Move]
    notes: list[str]

    @property
    def regressions(self) -> list[Move]:
        """Quantities of ours that became worse."""
        return [move for move in self.moved if move.regression]

    def text(self) -> str:
        """A line for every regression, every other move and every note, under one that counts them."""
        others = [move for move in self.moved if not move.regression]
        lines = [f"regressions: {len(self.regressions)}, other changes beyond noise: {len(others)}"]
        lines += [f"REGRESSION {move.text()}" for move in self.regressions]
        lines += [f"changed    {move.text()}" for move in others]
        return "\n".join(lines + [f"note       {note}" for note in self.notes])


def compare(old: Results, new: Results) -> Differences:
    """What moved from the old run to the new one."""
    moved: list[Move] = []
    notes = _conditions(old, new)
    pairs, lost = _paired(old, new, notes)
    changes = [_changes(before, after) for _, before, after in pairs]
    spread, starts = _spread(changes, USUAL_SPREAD), _starts_apart(changes)
    for (label, before, after), change in zip(pairs, changes, strict=True):
        notes += _differences(label, before, after)
        moved += _presence(label, before, after, new.left_out, notes)
        moved += _latencies(label, change, _spread([change], spread), notes)
        moved += [move for pair in change.pairs for move in _measures(label, *pair, change.drift, starts, notes)]
        moved += _bundles(label, before, after, change.drift)
    for label, model, reason in lost:
        moved += [_gone(label, c, reason) for c in model.contenders if c.ours]
    return Differences(moved=moved + _growths(old, new, notes), notes=notes)


# --- what the comparison holds for ------------------------------------------------------------------------------------


def _conditions(old: Results, new: Results) -> list[str]:
    """How the machine, what ran on it and what was asked for differ."""
    before, after, notes = old.environment, new.environment, []
    machines = before.machine.model_dump(), after.machine.model_dump()
    if other := _other(*machines):
        notes.append(f"another machine: {other}; ratios to the peers may differ with it")
    if before.threads != after.threads:
        notes.append(f"another number of threads: {before.threads} before, {after.threads} now")
    if other := _other(before.versions, after.versions):
        notes.append(f"other versions: {other}; the peers may have changed with them")
    if before.governor != after.governor:
        notes.append(f"another governor of the clock: {before.governor} before, {after.governor} now")
    notes += [*_busy("old", before), *_busy("new", after)]
    left_out = {name: why for name, why in new.left_out.items() if name not in old.left_out}
    return notes + [f"left out of the new run: {name}: {why}" for name, why in left_out.items()]


def _other(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """What differs, in words."""
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return "; ".join(f"{name} {before.get(name, 'none')} before, {after.get(name, 'none')} now" for name in names)


def _busy(run: str, environment: Environment) -> list[str]:
    """Whether other processes ran; while it measures, a run is itself as many as it has threads."""
    least, notes = environment.machine.processors / 2, []
    if environment.load_before is not None and environment.load_before > least:
        notes.append(f"the machine was busy before the {run} run: load {environment.load_before:.2g}")
    if environment.load_after is not None and environment.load_after > least + environment.threads:
        notes.append(f"the machine was busy besides the {run} run: load {environment.load_after:.2g} after it")
    return notes


def _paired(
    old: Results, new: Results, notes: list[str]
) -> tuple[list[tuple[str, Model, Model]], list[tuple[str, Model, str]]]:
    """The models at the same sizes in both runs, and those that the new run left out, with its reason."""
    names = [[model.name for model in run.models] for run in (old, new)]
    repeated = {name for run in names for name in run if run.count(name) > 1}

    def label(model: Model) -> str:
        return f"{model.name} ({_sizes(model)})" if model.name in repeated else model.name

    before, after = ({(model.name, _sizes(model)): model for model in run.models} for run in (old, new))
    pairs = [(label(model), before[key], model) for key, model in after.items() if key in before]
    lost: list[tuple[str, Model, str]] = []
    gone = [model for key, model in before.items() if key not in after]
    come = [model for key, model in after.items() if key not in before]
    for model in gone:
        if others := [_sizes(other) for other in come if other.name == model.name]:
            notes.append(f"{model.name}: not compared; {_sizes(model)} before, {' and '.join(others)} now")
        elif model.name in new.left_out:
            lost.append((label(model), model, new.left_out[model.name]))
        else:
            notes.append(f"{label(model)}: only in the old run")
    known = {model.name for model in gone}
    notes += [f"{label(model)}: only in the new run" for model in come if model.name not in known]
    return pairs, lost


def _sizes(model: Model) -> str:
    return ", ".join(f"{name}={size}" for name, size in sorted(model.sizes.items()))


def _differences(label: str, before: Model, after: Model) -> list[str]:
    """How what was measured of a model differs."""
    notes = []
    sources = [{bundle.precision: bundle.source for bundle in model.deployed} for model in (before, after)]
    both = sources[0].keys() & sources[1].keys()
    if other := _other(*({p: source[p] for p in sorted(both)} for source in sources)):
        notes.append(f"{label}: made otherwise: {other}")
    if other := _other(before.inputs, after.inputs):
        notes.append(f"{label}: other inputs: {other}")
    if before.openings != after.openings:
        times = f"{before.openings} before, {after.openings} now"
        notes.append(f"{label}: openings of each contender: {times}; one alone does not tell how openings differ")
    if (fewest := min(before.rounds, after.rounds)) < FEW_ROUNDS:
        notes.append(f"{label}: {fewest} rounds are too few for intervals to hold; measure {FEW_ROUNDS} or more")
    picked = [{c.precision: c.name for c in model.contenders if c.picked} for model in (before, after)]
    if other := _other(*({p: names[p] for p in picked[0] if p in picked[1]} for names in picked)):
        notes.append(f"{label}: another backend is picked: {other}")
    return notes


# --- contenders in one run alone --------------------------------------------------------------------------------------


def _presence(label: str, before: Model, after: Model, left_out: Mapping[str, str], notes: list[str]) -> list[Move]:
    """Contenders that vanished, that miss the parity budget now, and that no longer miss it."""
    moved = []
    was, now = ({c.key: c for c in model.contenders} for model in (before, after))
    for key in (key for key in was if key not in now):
        contender = was[key]
        missed = after.wrong.get(key)
        reason = missed or after.skipped.get(key) or left_out.get(before.name)
        if (
            reason is None
            and contender.ours
            and contender.precision not in {bundle.precision for bundle in after.deployed}
        ):
            reason = f"the model is not deployed in {contender.precision} in the new run"
        if not contender.ours:
            notes.append(f"{label}, {key}: only in the old run: {reason or 'the new one does not say why'}")
        elif missed is not None:
            moved.append(Move(model=label, contender=key, what="parity", unit="of the budget", before=_share(contender),
                              after=None, regression=True, reason=missed))  # fmt: skip
        else:
            moved.append(_gone(label, contender, reason or "the new run does not say why"))
    for key in (key for key in now if key not in was):
        contender = now[key]
        if contender.ours and (missed := before.wrong.get(key)) is not None:
            moved.append(Move(model=label, contender=key, what="parity", unit="of the budget", before=None,
                              after=_share(contender), reason=f"before, {missed}"))  # fmt: skip
        else:
            notes.append(f"{label}, {key}: only in the new run")
    return moved


def _gone(label: str, contender: Contender, reason: str) -> Move:
    return Move(
        model=label, contender=contender.key, what="gone", unit="ms", before=contender.latency.median.value,
        after=None, regression=True, reason=reason,
    )  # fmt: skip


def _share(contender: Contender) -> float:
    """Its error over the budget; numbers that have to be equal have neither."""
    return contender.error / contender.budget if contender.budget > 0 else 0.0


# --- times ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Changes:
    """How the times of the contenders changed that both runs have of a model, all as logarithms.

    Attributes:
        pairs: each contender before and now.
        logs: of now over before, (pairs,).
        below, above: how far the interval of a change reaches to either side, (pairs,).
        variances: of the changes, by the scatter of openings or rounds, (pairs,).
    """

    pairs: list[tuple[Contender, Contender]]
    logs: Array
    below: Array
    above: Array
    variances: Array

    @property
    def peers(self) -> list[int]:
        return [i for i, (_, now) in enumerate(self.pairs) if not now.ours]

    @property
    def drift(self) -> float | None:
        """How many times as long the machine takes; None where no peers tell."""
        return math.exp(float(np.median(self.logs[self.peers]))) if self.peers else None


def _changes(before: Model, after: Model) -> _Changes:
    now = {contender.key: contender for contender in after.contenders}
    pairs = [(contender, now[contender.key]) for contender in before.contenders if contender.key in now]
    old, new = (  # low, value and high, by contender
        np.log(_steady_times([pair[i] for pair in pairs])).T for i in (0, 1)
    )
    (old_below, old_above), (new_below, new_above) = np.diff(old, axis=0), np.diff(new, axis=0)
    errors = [(run[2] - run[0]) / 2 / reach(of.openings) for run, of in ((old, before), (new, after))]
    reaches = np.hypot(new_below, old_above), np.hypot(new_above, old_below)
    return _Changes(pairs, new[1] - old[1], *reaches, errors[0] ** 2 + errors[1] ** 2)


def _steady_times(contenders: Sequence[Contender]) -> Array:
    """The time of each contender of a run without what all of them took longer in a round, with its interval,
    (contenders, 3). That cancels in ratios to the peers, and is no scatter of theirs. Without peers there are no
    ratios, and it stays, as where rounds do not pair."""
    usual = np.ones(max((len(c.latency.rounds) for c in contenders), default=0))
    if len({len(c.latency.rounds) for c in contenders}) == 1 and not all(c.ours for c in contenders):
        medians = np.array([[median(calls) for calls in c.latency.rounds] for c in contenders])
        usual = np.median(medians / np.median(medians, axis=1, keepdims=True), axis=0)
    intervals = []
    for latency in (contender.latency for contender in contenders):
        rounds = [[ms / by for ms in calls] for calls, by in zip(latency.rounds, usual.tolist(), strict=False)]
        intervals.append(latency_of(rounds, latency.openings).median)
    return np.array([[interval.low, interval.value, interval.high] for interval in intervals]).reshape(-1, 3)


def _spread(changes: Iterable[_Changes], usual: float) -> float:
    """Standard deviation of the logarithm by which equal code differs between the runs, by how far apart the peers'
    changes are, less what the scatter of their openings or rounds explains.

    Args:
        usual: what is believed before any peers are seen.
    """
    apart, explained, freedom = [], [], 0
    for change in changes:
        freedom += max(len(change.peers) - 1, 0)
        for i, j in combinations(change.peers, 2):
            apart.append(abs(change.logs[i] - change.logs[j]))
            explained.append((change.variances[i] + change.variances[j]) / 2)
    if not apart:
        return usual
    seen = max((float(np.median(apart)) / HALF_APART) ** 2 - float(np.median(explained)), 0.0)
    return math.sqrt((BELIEF * usual**2 + freedom * seen) / (BELIEF + freedom))


def _latencies(label: str, changes: _Changes, spread: float, notes: list[str]) -> list[Move]:
    """The contenders whose change, with all that is uncertain of it, is beyond the tolerance."""
    peers = changes.peers
    known = math.log(changes.drift) if changes.drift is not None else 0.0
    if changes.pairs and not peers:
        notes.append(f"{label}: no peer is in both runs, so the drift of the machine counts as the contenders' own")
    if abs(known) > math.log1p(TOLERANCE):
        notes.append(f"{label}: the machine takes {math.exp(known):.3f} times as long, by its peers ({len(peers)})")
    if len(peers) > 1 and spread > TOLERANCE:
        notes.append(f"{label}: the peers' changes differ by {spread:.0%}, so smaller ones of ours do not show")
    moved = []
    of_peers = float(changes.variances[peers].mean()) if peers else 0.0
    unknown = NORMAL * math.sqrt(spread**2 + (spread**2 + of_peers) * MEDIAN_LOSS / max(len(peers), 1))
    for i, (was, now) in enumerate(changes.pairs):
        if peers == [i]:
            continue  # its change is the drift
        log = float(changes.logs[i]) - known
        low = log - math.hypot(changes.below[i], unknown)
        high = log + math.hypot(changes.above[i], unknown)
        if low <= math.log1p(TOLERANCE) and high >= -math.log1p(TOLERANCE):
            continue
        change = Interval(value=math.exp(log), low=math.exp(low), high=math.exp(high))
        moved.append(Move(
            model=label, contender=now.key, what="latency", unit="ms", before=was.latency.median.value,
            after=now.latency.median.value, change=change, drift=changes.drift, regression=now.ours and log > 0,
        ))  # fmt: skip
    return moved


# --- all else ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Number:
    """A number that moves when it changes, either way, by more than a factor and by more than so many of its units.

    Attributes:
        counts: whether it is a regression where it grew.
        is_time: whether the machine's drift is taken out.
    """

    what: str
    unit: str
    before: float
    after: float
    factor: float
    least: float
    counts: bool = False
    is_time: bool = False

    def move(self, label: str, key: str, drift: float | None, chance: float = 1.0) -> list[Move]:
        """Its move, if it moved; no regression where it grew by less than `chance`, as the peers' did."""
        taken_out = drift if self.is_time else None
        expected = self.before * (taken_out or 1)
        low, high = sorted((expected, self.after))
        if high <= low * self.factor or high - low <= self.least:
            return []
        worse = self.counts and self.after > expected
        as_peers = worse and self.is_time and self.after <= expected * chance
        return [Move(
            model=label, contender=key, what=self.what, unit=self.unit, before=self.before, after=self.after,
            change=self.after / expected if expected > 0 else None, drift=taken_out,
            regression=worse and not as_peers,
            reason=f"those of peers moved by up to {chance:.3g} times" if as_peers else None,
        )]  # fmt: skip


def _cold_seconds(contender: Contender) -> float | None:
    return contender.cold.load_s + contender.cold.first_s if contender.cold else None


MEASURES: tuple[tuple[str, str, Callable[[Contender], float | None], float, float], ...] = (
    ("extra memory", "MiB", lambda c: c.memory.extra_mib if c.memory else None, MEMORY_FACTOR, MEMORY_MIB),
    ("peak memory", "MiB", lambda c: c.memory.peak_mib if c.memory else None, MEMORY_FACTOR, MEMORY_MIB),
    ("cold start", "s", _cold_seconds, COLD_FACTOR, COLD_SECONDS),
    ("size", "MB", lambda c: c.size_mb, SIZE_FACTOR, SIZE_MB),
)


def _starts_apart(changes: Sequence[_Changes]) -> float:
    """How many times as long, or as short, the start of any peer took. When neighbours or a disk were busy just then,
    that says nothing of ours."""
    apart = 1.0
    for change in changes:
        for was, now in (change.pairs[i] for i in change.peers):
            before, after = _cold_seconds(was), _cold_seconds(now)
            if before and after and change.drift:
                apart = max(apart, after / before / change.drift, before / after * change.drift)
    return apart


def _measures(
    label: str, was: Contender, now: Contender, drift: float | None, starts: float, notes: list[str]
) -> list[Move]:
    """What else moved of a contender; a start for worse only where it moved by more than `starts`."""
    moved = []
    for what, unit, of, factor, least in MEASURES:
        before, after = of(was), of(now)
        if before is not None and after is not None:
            number = _Number(what, unit, before, after, factor, least, counts=now.ours, is_time=unit == "s")
            moved += number.move(label, now.key, drift, starts)
        elif before is not None and now.ours:
            notes.append(f"{label}, {now.key}: {what} was measured before and is not now")
    shares = _share(was), _share(now)
    if max(shares) > PARITY_SHARE:
        moved += _Number("parity", "of the budget", *shares, PARITY_FACTOR, 0).move(label, now.key, None)
    if was.cases is not None and was.wrong_in is None and now.wrong_in is not None:
        moved.append(Move(model=label, contender=now.key, what="parity", before=None, after=None, regression=now.ours,
                          reason=f"now it is wrong in {now.wrong_in}"))  # fmt: skip
    return moved


def _bundles(label: str, before: Model, after: Model, drift: float | None) -> list[Move]:
    """Bundles that are of another size, or that it takes another time to deploy: too noisy to be a regression."""
    moved = []
    was = {bundle.precision: bundle for bundle in before.deployed}
    for now in (bundle for bundle in after.deployed if bundle.precision in was):
        old = was[now.precision]
        seconds = sum(old.seconds.values()), sum(now.seconds.values())
        for number in (
            _Number("size", "MB", old.size_mb, now.size_mb, SIZE_FACTOR, SIZE_MB, counts=True),
            _Number("deploying", "s", *seconds, DEPLOY_FACTOR, DEPLOY_SECONDS, is_time=True),
        ):
            moved += number.move(label, f"bundle {now.precision}", drift)
    return moved


# --- growth -----------------------------------------------------------------------------------------------------------


def _growths(old: Results, new: Results, notes: list[str]) -> list[Move]:
    """The series whose exponents moved."""
    moved = []
    before, after = ({(growth.model, growth.along): growth for growth in run.growth} for run in (old, new))
    for key, now in after.items():
        if key in before:
            moved += _growth(before[key], now, notes)
        else:
            notes.append(f"{now.model} over {now.along}: only in the new run")
    notes += [f"{was.model} over {was.along}: only in the old run" for key, was in before.items() if key not in after]
    return moved


def _growth(before: Growth, after: Growth, notes: list[str]) -> list[Move]:
    label, moved = f"{after.model} over {after.along}", []
    if before.sizes != after.sizes:
        sizes = [", ".join(map(str, growth.sizes)) for growth in (before, after)]
        notes.append(f"{label}: not compared; sizes {sizes[0]} before, {sizes[1]} now")
        return []
    was, now = ({f"{series.name} {series.precision}": series for series in growth.series} for growth in (before, after))
    notes += [f"{label}, {key}: only in the new run" for key in now if key not in was]
    for key, series in was.items():
        if key in now:
            moved += _exponents(after, key, series, now[key], notes)
        elif series.ours:
            moved.append(Move(model=after.model, contender=key, what=f"growth over {after.along}, gone", before=None,
                              after=None, regression=True, reason="the new run does not have it"))  # fmt: skip
        else:
            notes.append(f"{label}, {key}: only in the old run")
    return moved


def _exponents(growth: Growth, key: str, before: Series, after: Series, notes: list[str]) -> list[Move]:
    """The exponents that differ, beyond their intervals, and between the two largest sizes too. A few MiB have none
    that holds."""
    moved = []
    for kind, was, now, values, least in (
        ("time", before.time, after.time, (before.ms, after.ms), 0.0),
        ("memory", before.memory, after.memory, (before.extra_mib, after.extra_mib), MEMORY_MIB),
    ):
        at = [[i for i, value in enumerate(series) if value is not None] for series in values]
        if at[0] != at[1]:
            why = "; ".join(after.notes) or "the new run does not say why"
            notes.append(f"{growth.model} over {growth.along}, {key}: {kind} is not of the same sizes as before: {why}")
        elif was is not None and now is not None:
            more = now.exponent.value - was.exponent.value, now.last - was.last
            largest = max((value for series in values for value in series if value is not None), default=0.0)
            low, high = sorted((was.exponent, now.exponent), key=lambda exponent: exponent.value)
            if largest > least and high.low > low.high and (min(more) > EXPONENT or max(more) < -EXPONENT):
                moved.append(Move(
                    model=growth.model, contender=key, what=f"exponent of {kind} over {growth.along}",
                    before=was.exponent.value, after=now.exponent.value, regression=after.ours and min(more) > 0,
                    reason=f"between the two largest sizes {was.last:.2f} before, {now.last:.2f} now",
                ))  # fmt: skip
    return moved
