"""Changes between two runs of the benchmark that exceed noise.

Machines are shared and drift, so times of different days are not comparable. Ratios to the same run's peers are: peers
are the contenders of a model that are not ours and are in both runs at the same precision. The median of their changes
is the machine's drift, and is divided out of every change. The uncertainties of a change add in quadrature: the scatter
of its loads or rounds, given by the intervals of both runs (:mod:`.interval`); and the difference between two processes
that run the same code, because of memory addresses or other processes, given by the spread of the peers' changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Any, TypeVar

import numpy as np

from attnforge.arrays import Array
from attnforge.bench.interval import NORMAL, latency_of, reach
from attnforge.bench.results import Contender, Interval, Model, Results
from attnforge.records import Record

T = TypeVar("T")

TOLERANCE = 0.03
"""Slowdown that is not a regression yet: the whole interval of a change must lie beyond it."""

USUAL_SPREAD = 0.0125
"""Standard deviation of the logarithm by which equal code differs between runs, assumed before any peers are seen."""

BELIEF = 4
"""Number of peers whose spread weighs as much as the usual one."""

OF_NORMAL = 1.482602
"""Standard deviation of normally distributed numbers over their median absolute deviation."""

MEDIAN_LOSS = math.pi / 2
"""Variance of a median over that of a mean."""

FEW_ROUNDS = 5
"""Rounds below which the intervals of a single load are too narrow."""

MEMORY_FACTOR, MEMORY_MIB = 1.1, 4.0
SIZE_FACTOR, SIZE_MB = 1.02, 0.1
COLD_FACTOR, COLD_SECONDS = 1.5, 0.3
DEPLOY_FACTOR, DEPLOY_SECONDS = 1.5, 2.0
"""A number moves when it changes by more than the factor, and by more than the amount."""

PARITY_FACTOR, PARITY_SHARE = 2.0, 0.1
"""An error within the budget moves when it changes by more than the factor, and exceeds this share of the budget."""


class Move(Record):
    """A quantity that differs between the runs by more than noise.

    Attributes:
        model: name of the model, with its sizes if the runs contain it at several.
        contender: key of the contender, or `bundle` and the precision.
        what: the quantity, such as `latency`, `extra memory`, `parity`; `gone` for a contender that the new run lacks.
        unit: unit of `before` and `after`.
        before, after: the values in `unit`; None where there is nothing to measure.
        change: ratio of after to before, for times with the drift divided out; None if there is no number for it.
        drift: ratio by which the machine is slower, by the model's peers.
        regression: whether a quantity of ours became worse.
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
        line = f"{self.model}, {self.contender}: {self.what}"
        if self.before is not None and self.after is not None:
            line += f" {self.before:.4g} → {self.after:.4g} {self.unit}".rstrip()
        elif (only := self.after if self.before is None else self.before) is not None:
            line += f", {only:.4g} {self.unit} {'now' if self.before is None else 'before'}"
        if isinstance(self.change, Interval):
            line += f", {self.change.value:.3f} times ({self.change.low:.3f} to {self.change.high:.3f})"
        elif self.change is not None:
            line += f", {self.change:.3g} times"
        if self.drift is not None:
            line += f" with the machine's {self.drift:.3f} taken out"
        return line if self.reason is None else f"{line}: {self.reason}"


class Differences(Record):
    """The differences between two runs.

    Attributes:
        moved: quantities that differ by more than noise, in either direction.
        notes: limits of the comparison; another machine or number of threads first.
    """

    moved: list[Move]
    notes: list[str]

    @property
    def regressions(self) -> list[Move]:
        """Our quantities that became worse."""
        return [move for move in self.moved if move.regression]

    def text(self) -> str:
        """Return the number of changes, followed by a line for every regression, other move and note."""
        others = [move for move in self.moved if not move.regression]
        lines = [f"regressions: {len(self.regressions)}, other changes beyond noise: {len(others)}"]
        lines += [f"REGRESSION {move.text()}" for move in self.regressions]
        lines += [f"changed    {move.text()}" for move in others]
        return "\n".join(lines + [f"note       {note}" for note in self.notes])


def move(label: str, key: str, what: str, before: float | None, after: float | None, **more: Any) -> Move:
    """Return a move of a quantity of a contender."""
    return Move(model=label, contender=key, what=what, before=before, after=after, **more)


def compare(old: Results, new: Results) -> Differences:
    """Return what changed from the old run to the new one, growth excepted, which no bundle's benchmark measures."""
    pairs, alone = _paired(old, new)
    changes = [_changes(before, after) for _, before, after in pairs]
    spread = _spread(changes, USUAL_SPREAD)
    starts = _starts_apart([change for of_model in changes for change in of_model])
    found: list[Move | str] = [*_conditions(old, new), *alone]
    for (label, before, after), of_model in zip(pairs, changes, strict=True):
        found += _differences(label, before, after)
        found += _presence(label, before, after, new.left_out)
        found += _latencies(label, of_model, _spread([of_model], spread))
        for change in of_model:
            found += _measures(label, change, starts)
        found += _bundles(label, before, after, _drift(of_model))
    was, now = ([f"{growth.model} over {growth.along}" for growth in run.growth] for run in (old, new))
    found += [f"{label}: only in the new run" for label in now if label not in was]
    found += [f"{label}: only in the old run" for label in was if label not in now]
    moved = [move for move in found if isinstance(move, Move)]
    return Differences(moved=moved, notes=[note for note in found if isinstance(note, str)])


def _matched(
    before: Iterable[T], after: Iterable[T], key: Callable[[T], Hashable]
) -> tuple[list[tuple[T, T]], list[T], list[T]]:
    """Return the pairs with the same key, what is only before, and what is only after."""
    was, now = ({key(item): item for item in items} for items in (before, after))
    gone, come = ([item for at, item in one.items() if at not in other] for one, other in ((was, now), (now, was)))
    return [(item, now[at]) for at, item in was.items() if at in now], gone, come


# --- conditions -------------------------------------------------------------------------------------------------------


def _conditions(old: Results, new: Results) -> Iterator[str]:
    """Yield notes on differences of the machine, its load and the settings."""
    before, after = old.environment, new.environment
    if differing := _differing(before.machine.model_dump(), after.machine.model_dump()):
        yield f"different machine: {differing}; ratios to the peers may differ with it"
    if before.threads != after.threads:
        yield f"different number of threads: {before.threads} before, {after.threads} now"
    if differing := _differing(before.versions, after.versions):
        yield f"different versions: {differing}; the peers may have changed with them"
    if before.governor != after.governor:
        yield f"different frequency governor: {before.governor} before, {after.governor} now"
    for run, environment in (("old", before), ("new", after)):
        # the run itself accounts for as many processes as it has threads
        least, load, later = environment.machine.processors / 2, environment.load_before, environment.load_after
        if load is not None and load > least:
            yield f"the machine was busy before the {run} run: load {load:.2g}"
        if later is not None and later > least + environment.threads:
            yield f"the machine was busy during the {run} run: load {later:.2g} after it"
    for name, why in new.left_out.items():
        if name not in old.left_out:
            yield f"left out of the new run: {name}: {why}"


def _differing(before: Mapping[str, object], after: Mapping[str, object], names: Iterable[str] | None = None) -> str:
    """Return the entries that differ, by default of all names, as text."""
    differing = [n for n in ({**before, **after} if names is None else names) if before.get(n) != after.get(n)]
    return "; ".join(f"{name} {before.get(name, 'none')} before, {after.get(name, 'none')} now" for name in differing)


def _paired(old: Results, new: Results) -> tuple[list[tuple[str, Model, Model]], list[Move | str]]:
    """Return the models at the same sizes in both runs, and notes on the others; our contenders of models that the new
    run left out are gone."""
    names = [[model.name for model in run.models] for run in (old, new)]
    repeated = {name for run in names for name in run if run.count(name) > 1}

    def label(model: Model) -> str:
        return f"{model.name} ({_sizes(model)})" if model.name in repeated else model.name

    both, come, gone = _matched(new.models, old.models, lambda model: (model.name, _sizes(model)))
    alone: list[Move | str] = []
    for model in gone:
        if others := [_sizes(candidate) for candidate in come if candidate.name == model.name]:
            alone.append(f"{model.name}: not compared; {_sizes(model)} before, {' and '.join(others)} now")
        elif (reason := new.left_out.get(model.name)) is not None:
            alone += [_gone(label(model), contender, reason) for contender in model.contenders if contender.ours]
        else:
            alone.append(f"{label(model)}: only in the old run")
    known = {model.name for model in gone}
    alone += [f"{label(model)}: only in the new run" for model in come if model.name not in known]
    return [(label(after), before, after) for after, before in both], alone


def _sizes(model: Model) -> str:
    return ", ".join(f"{name}={size}" for name, size in sorted(model.sizes.items()))


def _differences(label: str, before: Model, after: Model) -> Iterator[str]:
    """Yield notes on differences of how a model was measured."""
    was, now = ({bundle.precision: bundle.source for bundle in model.deployed} for model in (before, after))
    if differing := _differing(was, now, sorted(was.keys() & now.keys())):
        yield f"{label}: different source: {differing}"
    if differing := _differing(before.inputs, after.inputs):
        yield f"{label}: different inputs: {differing}"
    if before.openings != after.openings:
        times = f"{before.openings} before, {after.openings} now"
        yield f"{label}: loads of each contender: {times}; a single load does not show how loads differ"
    if (fewest := min(before.rounds, after.rounds)) < FEW_ROUNDS:
        yield f"{label}: {fewest} rounds are too few for reliable intervals; measure {FEW_ROUNDS} or more"
    was, now = ({c.precision: c.name for c in model.contenders if c.picked} for model in (before, after))
    if differing := _differing(was, now, [precision for precision in was if precision in now]):
        yield f"{label}: different backend picked: {differing}"


# --- contenders in only one run ---------------------------------------------------------------------------------------


def _presence(label: str, before: Model, after: Model, left_out: Mapping[str, str]) -> Iterator[Move | str]:
    """Yield contenders that are gone, that miss the parity budget now, or that no longer miss it."""
    deployed = {bundle.precision for bundle in after.deployed}
    _, gone, come = _matched(before.contenders, after.contenders, attrgetter("key"))
    for contender in gone:
        key, missed, share = contender.key, after.wrong.get(contender.key), _share(contender)
        reason = missed or after.skipped.get(key) or left_out.get(before.name)
        if reason is None and contender.ours and contender.precision not in deployed:
            reason = f"the model is not deployed in {contender.precision} in the new run"
        reason = reason or "the new run gives no reason"
        if not contender.ours:
            yield f"{label}, {key}: only in the old run: {reason}"
        elif missed is None:
            yield _gone(label, contender, reason)
        else:
            yield move(label, key, "parity", share, None, unit="of the budget", regression=True, reason=missed)
    for contender in come:
        key, missed, share = contender.key, before.wrong.get(contender.key), _share(contender)
        if contender.ours and missed is not None:
            yield move(label, key, "parity", None, share, unit="of the budget", reason=f"before, {missed}")
        else:
            yield f"{label}, {key}: only in the new run"


def _gone(label: str, contender: Contender, reason: str) -> Move:
    """Return a regression: a contender of ours is missing from the new run."""
    ms = contender.latency.median.value
    return move(label, contender.key, "gone", ms, None, unit="ms", regression=True, reason=reason)


def _share(contender: Contender) -> float:
    """Return its error over the budget; 0 for outputs that must be equal, which have neither."""
    return contender.error / contender.budget if contender.budget > 0 else 0.0


# --- times ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Change:
    """The change of a contender's time between both runs, relative to the peers of each run.

    Attributes:
        was, now: the contender in the old and the new run.
        drift: how many times as long the machine takes, by the peers; None without peers.
        log: logarithm of its ratio to the peers now over that before.
        below, above: extent of the interval to either side.
        variance: variance of `log`, by the scatter of loads or rounds.
    """

    was: Contender
    now: Contender
    drift: float | None
    log: float
    below: float
    above: float
    variance: float


def _changes(before: Model, after: Model) -> list[_Change]:
    pairs, _, _ = _matched(before.contenders, after.contenders, attrgetter("key"))
    peers = [i for i, (was, _) in enumerate(pairs) if not was.ours]
    if not pairs:
        return []
    old, new = (_times([pair[i] for pair in pairs], bool(peers)) for i in (0, 1))
    logs = new[1] - old[1]
    drift = float(np.median(logs[peers])) if peers else 0.0
    below, above = np.hypot(new[1] - new[0], old[2] - old[1]), np.hypot(new[2] - new[1], old[1] - old[0])
    variances = ((below + above) / 2 / reach(after.openings)) ** 2
    numbers = np.stack([logs - drift, below, above, variances]).T.tolist()
    times = math.exp(drift) if peers else None
    return [_Change(*pair, times, *of_pair) for pair, of_pair in zip(pairs, numbers, strict=True)]


def _times(contenders: Sequence[Contender], has_peers: bool) -> Array:
    """Return logarithms of the low end, value and high end of each contender's time, (3, contenders), with the slowdown
    that all contenders share in each round divided out. It cancels in ratios to the peers; without peers, or where
    rounds do not pair, it stays."""
    counts = {len(contender.latency.rounds) for contender in contenders}
    longer = np.ones(max(counts))
    if has_peers and len(counts) == 1:
        medians = np.array([[median(calls) for calls in contender.latency.rounds] for contender in contenders])
        longer = np.median(medians / np.median(medians, axis=1, keepdims=True), axis=0)
    times = []
    for latency in (contender.latency for contender in contenders):
        pairs = zip(latency.rounds, longer.tolist(), strict=False)
        times.append(latency_of([[ms / by for ms in calls] for calls, by in pairs], latency.openings).median)
    return np.log([[time.low, time.value, time.high] for time in times]).T


def _drift(changes: Sequence[_Change]) -> float | None:
    return changes[0].drift if changes else None


def _peers(changes: Iterable[_Change]) -> list[_Change]:
    return [change for change in changes if not change.now.ours]


def _spread(changes: Sequence[Sequence[_Change]], usual: float) -> float:
    """Return the standard deviation of the logarithm by which equal code differs between the runs: the spread of the
    peers' changes, less the part that the scatter of their loads or rounds explains.

    Args:
        changes: changes by model.
        usual: value assumed before any peers are seen.
    """
    of_models = [peers for of_model in changes if len(peers := _peers(of_model)) > 1]
    peers = [change for of_model in of_models for change in of_model]
    if not peers:
        return usual
    freedom = len(peers) - len(of_models)
    apart = (OF_NORMAL * median(abs(change.log) for change in peers)) ** 2 * len(peers) / freedom
    seen = max(apart - median(change.variance for change in peers), 0.0)
    return math.sqrt((BELIEF * usual**2 + freedom * seen) / (BELIEF + freedom))


def _latencies(label: str, changes: Sequence[_Change], spread: float) -> Iterator[Move | str]:
    """Yield the contenders whose change, with its whole uncertainty, is beyond the tolerance."""
    peers, drift = len(_peers(changes)), _drift(changes)
    if changes and drift is None:
        yield f"{label}: no peer is in both runs, so the machine's drift is not divided out"
    if drift is not None and abs(math.log(drift)) > math.log1p(TOLERANCE):
        yield f"{label}: the machine takes {drift:.3f} times as long, by its peers ({peers})"
    if peers > 1 and spread > TOLERANCE:
        yield f"{label}: the peers' changes spread by {spread:.0%}, which hides smaller ones of ours"
    of_peers = sum(change.variance for change in _peers(changes)) / max(peers, 1)
    unknown = NORMAL * math.sqrt(spread**2 + (spread**2 + of_peers) * MEDIAN_LOSS / max(peers, 1))
    for change in changes:
        was, now, log = change.was, change.now, change.log
        if peers == 1 and not now.ours:
            continue  # its change is the drift
        low, high = log - math.hypot(change.below, unknown), log + math.hypot(change.above, unknown)
        if low > math.log1p(TOLERANCE) or high < -math.log1p(TOLERANCE):
            times = Interval(value=math.exp(log), low=math.exp(low), high=math.exp(high))
            yield move(
                label, now.key, "latency", was.latency.median.value, now.latency.median.value, unit="ms",
                change=times, drift=drift, regression=now.ours and log > 0,
            )  # fmt: skip


# --- other quantities -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Measure:
    """A number that moves when it changes, in either direction, by more than a factor and by more than an amount.

    Attributes:
        what: name of the quantity.
        unit: its unit.
        of: returns the number of a contender or a bundle; None if it was not measured.
        factor: factor that a change must exceed.
        least: amount in `unit` that a change must exceed.
        is_time: whether the machine's drift is divided out.
    """

    what: str
    unit: str
    of: Callable[[Any], float | None]
    factor: float
    least: float
    is_time: bool = False

    def compare(
        self, label: str, key: str, was: object, now: object, drift: float | None = None, counts: bool = False,
        chance: float = 1.0,
    ) -> Iterator[Move | str]:  # fmt: skip
        """Yield the move of the number, if it moved.

        Args:
            label, key: label of the model, and key of the contender or bundle.
            was, now: the contender or bundle, before and now.
            drift: drift of the machine.
            counts: whether growth is a regression.
            chance: factor by which it may grow by chance, as the peers' did.
        """
        before, after = self.of(was), self.of(now)
        if before is None or after is None:
            if before is not None and counts:
                yield f"{label}, {key}: {self.what} was measured before and is not now"
            return
        taken_out = drift if self.is_time else None
        expected = before * (taken_out or 1)
        low, high = sorted((expected, after))
        if high > low * self.factor and high - low > self.least:
            worse = counts and after > expected
            as_peers = worse and self.is_time and after <= expected * chance
            yield move(
                label, key, self.what, before, after, unit=self.unit, drift=taken_out,
                change=after / expected if expected > 0 else None, regression=worse and not as_peers,
                reason=f"those of peers changed by up to {chance:.3g} times" if as_peers else None,
            )  # fmt: skip


def _cold_seconds(contender: Contender) -> float | None:
    return contender.cold.load_s + contender.cold.first_s if contender.cold else None


SIZE = _Measure("size", "MB", lambda c: c.size_mb, SIZE_FACTOR, SIZE_MB)
MEASURES = (
    _Measure("extra memory", "MiB", lambda c: c.memory.extra_mib if c.memory else None, MEMORY_FACTOR, MEMORY_MIB),
    _Measure("peak memory", "MiB", lambda c: c.memory.peak_mib if c.memory else None, MEMORY_FACTOR, MEMORY_MIB),
    _Measure("cold start", "s", _cold_seconds, COLD_FACTOR, COLD_SECONDS, is_time=True),
    SIZE,
)
PARITY = _Measure("parity", "of the budget", _share, PARITY_FACTOR, 0)
DEPLOYING = _Measure("deploying", "s", lambda d: sum(d.seconds.values()), DEPLOY_FACTOR, DEPLOY_SECONDS, is_time=True)


def _starts_apart(changes: Iterable[_Change]) -> float:
    """Return the largest factor by which the start of any peer became slower or faster. A change of ours within that
    factor may come from a busy disk or other processes."""
    apart = 1.0
    for change in _peers(changes):
        before, after = _cold_seconds(change.was), _cold_seconds(change.now)
        if before and after and change.drift:
            apart = max(apart, after / before / change.drift, before / after * change.drift)
    return apart


def _measures(label: str, change: _Change, starts: float) -> Iterator[Move | str]:
    """Yield a contender's other moves; a slower start is a regression only beyond the factor `starts`."""
    was, now = change.was, change.now
    for measure in MEASURES:
        yield from measure.compare(label, now.key, was, now, change.drift, now.ours, starts)
    if max(_share(was), _share(now)) > PARITY_SHARE:
        yield from PARITY.compare(label, now.key, was, now)
    if was.cases is not None and was.wrong_in is None and now.wrong_in is not None:
        reason = f"now it is wrong in {now.wrong_in}"
        yield move(label, now.key, "parity", None, None, regression=now.ours, reason=reason)


def _bundles(label: str, before: Model, after: Model, drift: float | None) -> Iterator[Move | str]:
    """Yield bundles whose size or deploy time changed; deploy time is too noisy to be a regression."""
    both, _, _ = _matched(after.deployed, before.deployed, attrgetter("precision"))
    for now, was in both:
        yield from SIZE.compare(label, f"bundle {now.precision}", was, now, counts=True)
        yield from DEPLOYING.compare(label, f"bundle {now.precision}", was, now, drift)
