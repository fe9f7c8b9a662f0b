"""The page of a benchmark: one HTML file, without network access or scripts, that starts with which backend to ship and
what it costs: recommendations, with warnings and notes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnforge.bench import plots
from attnforge.bench.results import Contender, Deployed, Model, Results, precisions
from attnforge.report.render import check_page, milliseconds, places, rounded, write_template

USUAL = ("onnxruntime-plain", "eager")
"""The usual alternatives; a backend is compared with the first of them that was timed."""

SHORT = 45
"""Maximum length in characters of a peer's description that is used instead of its name."""


@dataclass
class Advice:
    """Which backend to ship for one model at one precision.

    Attributes:
        precision: the precision.
        ship: the backend; None if none of ours is within its budget.
        usual: how many times as fast as the usual peer `ship` is, and what that peer is.
        best: the same for the fastest peer that is not known to be wrong, if it is another peer and not faster.
        warnings: problems to know before shipping; a difference that may be chance is not a warning.
        notes: further remarks.
        deployed: the bundle that it comes from.
        base: the model's first precision; None at that precision.
        gain: how many times as fast as at `base` it is.
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
        """The costs as text, those that were measured."""
        assert self.ship is not None
        cold, memory = self.ship.cold, self.ship.memory
        numbers = (
            (cold.load_s if cold else None, "{}\N{NO-BREAK SPACE}s to load", 2),
            (memory.peak_mib if memory else None, "{}\N{NO-BREAK SPACE}MiB", 3),
            (self.ship.size_mb, "{}\N{NO-BREAK SPACE}MB on disk", 2),
            (self.deploy_seconds, "deploys in {}\N{NO-BREAK SPACE}s", 2),
        )
        return ", ".join(text.format(rounded(number, digits)) for number, text, digits in numbers if number is not None)


def advice_on(model: Model) -> list[Advice]:
    """Return the advice for every precision that was deployed or timed."""
    names = precisions([*(d.precision for d in model.deployed), *(c.precision for c in model.contenders)])
    every = [_advice(model, name) for name in names]
    shipped = [(advice, advice.ship) for advice in every if advice.ship is not None]
    for advice, ship in shipped[1:]:
        base, first = shipped[0]
        advice.base, advice.gain = base.precision, first.latency.median.value / ship.latency.median.value
    return every


def _advice(model: Model, precision: str) -> Advice:
    timed = [c for c in model.by_precision.get(precision, ()) if c.error <= c.budget]
    advice = Advice(precision, None, deployed=next((d for d in model.deployed if d.precision == precision), None))
    ours = [contender for contender in timed if contender.ours]
    right = [contender for contender in ours if contender.wrong_in is None]
    if not right:
        advice.warnings = [f"Not {c.name}: it is wrong in {c.wrong_in}." for c in ours]
        return advice
    fastest = right[0]
    picked = (c for c in right if c.picked and c.latency.median.low <= fastest.latency.median.high)
    advice.ship = ship = next(picked, fastest)  # the picked one if their times do not differ significantly
    _add_ours(advice, ours, fastest, ship)
    _add_peers(advice, timed, ship)
    advice.notes += [  # why others that are as fast are ruled out; the pick of `auto` already has a warning
        f"Not {c.name}, {_speed(c, ship)}: it is wrong in {c.wrong_in}."
        for c in timed
        if c.wrong_in is not None and c.latency.median.value <= ship.latency.median.value and not (c.ours and c.picked)
    ]
    return advice


def _add_ours(advice: Advice, ours: Sequence[Contender], fastest: Contender, ship: Contender) -> None:
    """Add whether `auto` picks another of our backends, and whether another is faster."""
    picked = next((contender for contender in ours if contender.picked), None)
    if picked is not None and picked is not ship:
        how = f"at {_timed(picked)}" if picked.wrong_in is None else f"which is wrong in {picked.wrong_in}"
        advice.warnings.append(f'backend="auto" picks {picked.name}, {how}: name {ship.name} when you load the bundle.')
    if _is_faster(fastest, ship):
        advice.warnings.append(f"{fastest.name} is a little faster: {_timed(fastest)}, {_speed(fastest, ship)}.")
    elif fastest is not ship:
        advice.notes.append(f"{fastest.name} takes {_timed(fastest)}, which may be chance.")


def _add_peers(advice: Advice, timed: Sequence[Contender], ship: Contender) -> None:
    """Add the comparisons with the usual and the fastest peer, and which peers are faster and right."""
    usual = next((contender for name in USUAL for contender in timed if contender.name == name), None)
    if usual is not None:
        wrong = ", which is wrong in another case" if usual.wrong_in is not None else ""
        advice.usual = _times(usual, ship), f"{usual.what if len(usual.what) <= SHORT else usual.name}{wrong}"
    peers = [contender for contender in timed if not contender.ours]
    right = [peer for peer in peers if peer.wrong_in is None]
    faster = [peer for peer in right if _is_faster(peer, ship)]
    if right and right[0] is not usual and not _is_faster(right[0], ship):
        known = " not known to be wrong" if right[0].latency.median.value > peers[0].latency.median.value else ""
        advice.best = _times(right[0], ship), f"{right[0].name}, the fastest peer{known}"
    if faster:
        first, *others = faster
        speed = _speed(first, ship) + (f", {first.partly}" if first.partly is not None else "")
        verb = "is" if len(others) == 1 else "are"
        more = f"; so {verb} {' and '.join(peer.name for peer in others)}" if others else ""
        advice.warnings.append(f"A peer is faster: {first.name} takes {_timed(first)}, {speed}{more}.")


def _times(contender: Contender, ship: Contender) -> float:
    """Return how many times as fast as another contender `ship` is."""
    if ship.picked and contender.ratio is not None:
        return contender.ratio.value
    return contender.latency.median.value / ship.latency.median.value


def _is_faster(contender: Contender, ship: Contender) -> bool:
    """Return whether another contender is significantly faster than `ship`: by the ratio, whose rounds pair, if there
    is one, otherwise by the times."""
    if ship.picked and contender.ratio is not None:
        return contender.ratio.high < 1
    return contender.latency.median.high < ship.latency.median.low


def _speed(contender: Contender, ship: Contender) -> str:
    return f"{1 / _times(contender, ship):.2f}× as fast"


def _timed(contender: Contender) -> str:
    return milliseconds(contender.latency.median)


# --- the page ---------------------------------------------------------------------------------------------------------


def write_page(
    results: Results, path: str | os.PathLike[str], *, force: bool = False, compared: Sequence[str] | None = None
) -> None:
    """Write results to one HTML file with tables and plots.

    Args:
        results: results of one run.
        path: path of the file.
        force: overwrite the file.
        compared: differences from an earlier run, one sentence each.

    Raises:
        UnavailableError: the packages for pages are not installed: `pip install 'attnforge[report]'`.
        UsageError: `path` is a folder, or exists and `force` is not given.
    """
    check_page(path, force)
    write_template("bench.html", path, **page_values(results, compared))


def page_values(results: Results, compared: Sequence[str] | None = None) -> dict[str, Any]:
    """Return the values of the template; arguments as for :func:`write_page`."""
    answered = [(model, every) for model in results.models if (every := advice_on(model))]
    shipped = [answer.ship for _, every in answered for answer in every if answer.ship is not None]
    return {
        "results": results,
        "names": ", ".join(dict.fromkeys(model.name for model in results.models)) or "nothing",
        "answers": answered,
        "decimals": decimals_of(shipped),
        "roofline": plots.roofline(results),
        "compared": list(compared or ()),
        "has_cases": any(c.cases is not None for model in results.models for c in model.contenders),
        # what the template calls for each model
        "decimals_of": decimals_of,
        "plots": plots,
    }


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
