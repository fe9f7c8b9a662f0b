"""Intervals have their coverage, and comparing two runs distinguishes a slower program from a slower machine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attnforge.arrays import Array
from attnforge.bench import results
from attnforge.bench.compare import TOLERANCE, Differences, Move, compare
from attnforge.bench.interval import draws, latency_of, ratio_of, resampled_medians
from attnforge.bench.results import (
    Cases,
    Cold,
    Contender,
    Deployed,
    Environment,
    Growth,
    Interval,
    MemoryUse,
    Model,
    Results,
    Series,
)
from attnforge.errors import UsageError
from attnforge.machine import Machine
from benchmarks import growth as of_growth
from benchmarks.growth import fit_of

# Medians and their intervals


def width(interval: Interval) -> float:
    return math.log(interval.high / interval.low)


def holds(interval: Interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high


def test_what_is_said_of_calls() -> None:
    latency = latency_of([[3.0, 1.0], [2.0], [5.0, 4.0, 9.0]])
    assert (latency.median.value, latency.min, latency.samples) == (3.5, 1.0, 6)
    assert latency.p90 == pytest.approx(7.0) and latency.p99 == pytest.approx(8.8)
    assert latency.rounds == [[3.0, 1.0], [2.0], [5.0, 4.0, 9.0]]
    assert latency.median.low >= 1.0 and latency.median.high <= 9.0 and width(latency.median) > 0


@pytest.mark.parametrize("calls", [(1,), (3, 3, 3), (1, 4, 2, 2, 7)])
def test_a_resample_is_whole_rounds(calls: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    rounds = [
        rng.integers(1, 6, count).astype(float) for count in calls
    ]  # few distinct numbers, so that many are equal
    drawn = draws(len(rounds))
    assert (drawn.sum(axis=1) == len(rounds)).all()
    wanted = [np.median(np.concatenate([*map(np.tile, rounds, times)])) for times in drawn]
    assert resampled_medians([one.tolist() for one in rounds], drawn).tolist() == wanted


def test_many_calls_are_resampled_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = np.random.default_rng(0).lognormal(0, 0.1, (9, 7)).tolist()
    whole = resampled_medians(rounds, draws(9))
    monkeypatch.setattr("attnforge.bench.interval.BLOCK", 1000)
    assert (resampled_medians(rounds, draws(9)) == whole).all()


def test_constant_times_have_no_interval() -> None:
    twos, threes = [[2.0] * 3] * 10, [[3.0] * 3] * 10
    assert latency_of(twos).median == Interval(value=2.0, low=2.0, high=2.0)
    assert ratio_of(threes, twos) == Interval(value=1.5, low=1.5, high=1.5)


def test_the_same_times_have_the_same_interval() -> None:
    rounds = np.random.default_rng(0).lognormal(0, 0.1, (12, 3)).tolist()
    assert latency_of(rounds) == latency_of(rounds)
    assert ratio_of(rounds, rounds[::-1]) == ratio_of(rounds, rounds[::-1])


@pytest.mark.parametrize("of_round", [0.0, 0.05], ids=["calls scatter", "rounds scatter"])
@pytest.mark.parametrize("rounds", [12, 30])
def test_the_median_lies_in_its_interval(rounds: int, of_round: float) -> None:
    """If calls were resampled instead of rounds, half of the intervals would miss it when rounds scatter."""
    rng, runs = np.random.default_rng(1), 250
    calls = rng.lognormal(2.0, 0.03, (runs, rounds, 4)) * rng.lognormal(0, of_round, (runs, rounds, 1))
    intervals = [latency_of(one.tolist()).median for one in calls]
    assert 0.90 <= np.mean([holds(one, math.exp(2.0)) for one in intervals]) <= 0.99


def drifting(rng: np.random.Generator, rounds: int, by: float) -> tuple[Array, Array]:
    """Two contenders, 1.25 and 1, slowed down equally, by a different factor each round: (rounds, 3) each."""
    machine = np.exp(np.cumsum(rng.normal(0, by, (rounds, 1)), axis=0))
    a, b = (machine * rng.lognormal(0, 0.02, (rounds, 3)) for _ in range(2))
    return 1.25 * a, b


@pytest.mark.parametrize("by", [0.0, 0.05])
def test_the_ratio_lies_in_its_interval(by: float) -> None:
    rng = np.random.default_rng(2)
    intervals = [ratio_of(*(one.tolist() for one in drifting(rng, 20, by))) for _ in range(250)]
    assert np.mean([holds(one, 1.25) for one in intervals]) >= 0.90


def test_what_slows_down_both_cancels_in_a_ratio() -> None:
    rng, drawn = np.random.default_rng(3), draws(30)
    others = np.random.default_rng(1).multinomial(30, np.full(30, 1 / 30), size=len(drawn))
    for _ in range(20):
        a, b = (one.tolist() for one in drifting(rng, 30, 0.05))
        apart = resampled_medians(a, drawn) / resampled_medians(b, others)
        assert width(ratio_of(a, b)) < 0.5 * math.log(np.percentile(apart, 97.5) / np.percentile(apart, 2.5))


@pytest.mark.parametrize(
    ("rounds", "said"), [([], "no rounds"), ([[1.0], []], "round 1"), ([[1.0, 0.0]], "round 0"), ([[math.nan]], "nan")]
)
def test_what_are_no_times(rounds: list[list[float]], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        latency_of(rounds)


# Loads


def opened(rng: np.random.Generator, openings: int, instance: float = 0.03, rounds: int = 24) -> Array:
    """Calls of a contender whose loads and rounds differ, by 1% per round: (rounds, 1)."""
    of = np.repeat(rng.normal(0, instance, openings), shared(rounds, openings))
    return np.exp(of + rng.normal(0, 0.01, rounds))[:, None]


def test_one_load_is_bootstrapped() -> None:
    rng = np.random.default_rng(5)
    a, b = (rng.lognormal(0, 0.1, (12, 3)).tolist() for _ in range(2))
    assert latency_of(a) == latency_of(a, [12]) and latency_of(a, [12]).openings == []
    assert ratio_of(a, b) == ratio_of(a, b, [12])
    assert (draws(12) == np.random.default_rng(0).multinomial(12, np.full(12, 1 / 12), size=len(draws(12)))).all()
    drawn = resampled_medians(a, draws(12)) / resampled_medians(b, draws(12))
    assert [ratio_of(a, b).low, ratio_of(a, b).high] == np.percentile(drawn, (2.5, 97.5)).tolist()


@pytest.mark.parametrize("openings", [3, 4, 5])
def test_intervals_cover_what_another_load_would_give(openings: int) -> None:
    """Intervals over rounds only miss the ratio of two contenders whose loads differ by 3% in a third of all runs."""
    rng, of, pairs = np.random.default_rng(openings), shared(24, openings), 200
    calls = [[opened(rng, openings).tolist() for _ in range(2)] for _ in range(pairs)]
    assert np.mean([holds(ratio_of(a, b, of), 1.0) for a, b in calls]) >= 0.90
    assert np.mean([holds(latency_of(a, of).median, 1.0) for a, _ in calls]) >= 0.90
    assert np.mean([holds(ratio_of(a, b), 1.0) for a, b in calls]) <= 0.75


def test_similar_loads_widen_intervals_little() -> None:
    rng, of = np.random.default_rng(6), shared(24, 4)
    calls = [[opened(rng, 4, instance=0.0).tolist() for _ in range(2)] for _ in range(60)]
    widths = np.array([[width(ratio_of(a, b, of)), width(ratio_of(a, b))] for a, b in calls]).mean(axis=0)
    assert widths[0] < 1.5 * widths[1]
    twos = latency_of([[2.0] * 3] * 10, [5, 5])
    assert twos.median == Interval(value=2.0, low=2.0, high=2.0) and twos.openings == [5, 5]


@pytest.mark.parametrize("openings", [[1, 1], [2, 2], [3, 0], [4, -1]])
def test_invalid_loads(openings: list[int]) -> None:
    with pytest.raises(UsageError, match="do not add up to 3"):
        latency_of([[1.0]] * 3, openings)


# Exponents


@pytest.mark.parametrize("points", [3, 5, 13])
def test_the_exponent_lies_in_its_interval(points: int) -> None:
    rng, sizes = np.random.default_rng(4), [64 * 2**i for i in range(points)]
    fits = [fit_of(sizes, [1e-4 * n**1.7 * rng.lognormal(0, 0.05) for n in sizes]) for _ in range(400)]
    assert 0.92 <= np.mean([one is not None and holds(one.exponent, 1.7) for one in fits]) <= 0.98


def test_the_exponent_of_a_law() -> None:
    fit = fit_of([400, 100, 200], [160.0, 10.0, 40.0])
    assert fit is not None and fit.exponent.value == pytest.approx(2) and fit.last == pytest.approx(2)
    constant = fit_of([100, 200, 400, 800], [101.0, 104.0, 116.0, 164.0])  # 100 + n²/10⁴
    assert constant is not None and constant.last > constant.exponent.value > 0


def test_points_that_were_not_measured_are_left_out() -> None:
    fit = fit_of([1, 2, 4, 8], [None, 2.0, 8.0, 0.0])
    assert fit is not None and fit.exponent.value == pytest.approx(2)
    assert fit.last == pytest.approx(2) and fit.exponent.low == fit.exponent.value == fit.exponent.high
    assert fit_of([1, 2, 4], [None, 2.0, -1.0]) is None and fit_of([], []) is None


# Runs


PEERS = ("eager", "compiled", "onnxruntime-plain", "openvino-plain", "torchscript")
OURS = tuple(f"backend{i}" for i in range(20))


@dataclass
class Noise:
    """The noise between two runs of equal code, as shares of the times.

    Attributes:
        scatter: of a contender's calls, from the steadiest to the least steady; half its variance is each round's.
        outliers: how many calls take half as long again.
        wander: by how much the machine changes from a round to the next, for all at once.
        machine, each: by how much at most, to either side, the machine and each contender drift between runs.
        instances: by how much one opening of a contender differs from another, as a standard deviation.
    """

    scatter: tuple[float, float] = (0.01, 0.04)
    outliers: float = 0.02
    wander: float = 0.02
    machine: float = 0.2
    each: float = 0.02
    rounds: int = 30
    calls: int = 3
    instances: float = 0.0
    openings: int = 1


EARLIER: dict[str, Any] = {"machine": 0.0, "each": 0.0}
"""The reference run, without drift."""


def measured(
    seed: int, noise: Noise, factors: Mapping[str, float] | None = None, names: Sequence[str] = OURS + PEERS
) -> Model:
    """A model in a run with noise, with some contenders slowed down by factors."""
    rng, shape = np.random.default_rng(seed), (noise.rounds, noise.calls)
    machine = np.exp(np.cumsum(rng.normal(0, noise.wander, (noise.rounds, 1)), axis=0))
    machine *= rng.uniform(1 - noise.machine, 1 + noise.machine)
    openings, contenders = shared(noise.rounds, noise.openings), []
    for i, name in enumerate(names):
        scatter = rng.uniform(*noise.scatter) / math.sqrt(2)
        calls = machine * rng.lognormal(0, scatter, shape) * rng.lognormal(0, scatter, (noise.rounds, 1))
        calls *= np.where(rng.random(shape) < noise.outliers, 1.5, 1.0)
        calls *= 2.0 ** (i % 7) * (factors or {}).get(name, 1.0) * rng.uniform(1 - noise.each, 1 + noise.each)
        if noise.instances:
            calls *= np.repeat(rng.lognormal(0, noise.instances, noise.openings), openings)[:, None]
        contenders.append(contender(name, calls.tolist(), openings))
    return model(contenders, rounds=noise.rounds)


def shared(rounds: int, openings: int) -> list[int]:
    return [rounds // openings + (i < rounds % openings) for i in range(openings)]


def contender(
    name: str, rounds: Sequence[Sequence[float]] = ((10.0,),) * 8, openings: Sequence[int] = (), **found: Any
) -> Contender:
    given: dict[str, Any] = {"precision": "fp32", "ours": name not in PEERS, "error": 1e-7, "budget": 1e-6} | found
    return Contender(name=name, what=name, latency=latency_of(rounds, openings), **given)


def model(contenders: Sequence[Contender], seconds: float = 4.0, size_mb: float = 10.0, **found: Any) -> Model:
    bundle = Deployed(precision="fp32", bundle="b", source="vit()", seconds={"export": seconds}, size_mb=size_mb)
    given: dict[str, Any] = {
        "name": "vit",
        "sizes": {"batch": 1},
        "inputs": {"x": "float32"},
        "rounds": 8,
        "deployed": [bundle],
    }
    return Model(contenders=list(contenders), **(given | found))


def run(*models: Model, growth: Sequence[Growth] = (), left_out: Mapping[str, str] | None = None, **on: Any) -> Results:
    machine = Machine(system="Linux", processor="some", processors=2, instructions=["avx2"], gpus=[])
    given: dict[str, Any] = {
        "machine": machine,
        "versions": {"torch": "2.11"},
        "threads": 2,
        "governor": "none",
        "load_before": 0.1,
    }
    return Results(
        command="attnforge bench", created="2026-01-01", seconds=60.0, environment=Environment(**(given | on)),
        models=list(models), growth=list(growth), left_out=dict(left_out or {}),
    )  # fmt: skip


def compared(before: Sequence[Contender], after: Sequence[Contender], **found: Any) -> Differences:
    return compare(run(model(before)), run(model(after, **found)))


def said(moves: Sequence[Move]) -> list[tuple[str, str]]:
    return [(move.contender, move.what) for move in moves]


# A slower program, and a slower machine


@pytest.mark.parametrize(("peers", "pairs"), [(5, 60), (2, 20), (1, 20)])
def test_equal_code_has_no_regression(peers: int, pairs: int) -> None:
    """None of about 2000 contenders with five, two and one peer."""
    noise, names = Noise(), OURS + PEERS[:peers]
    for seed in range(pairs):
        before = measured(2 * seed, replace(noise, **EARLIER), names=names)
        differences = compare(run(before), run(measured(2 * seed + 1, noise, names=names)))
        assert not differences.regressions, differences.text()


@pytest.mark.parametrize(
    ("noise", "least"),
    [(Noise(), 0.75), (Noise(each=0.01), 0.95), (Noise(scatter=(0.03, 0.03), each=0.01), 0.9), (Noise(each=0), 0.98)],
    ids=["usual", "steadier", "calls scatter", "steadiest"],
)
def test_a_tenth_slower_is_found(noise: Noise, least: float) -> None:
    found, pairs = 0, 20
    for seed in range(pairs):
        before = measured(2 * seed, replace(noise, **EARLIER))
        slower = {f"backend{i}": 1.1 for i in range(4)}
        moves = compare(run(before), run(measured(2 * seed + 1, noise, slower))).regressions
        assert {move.contender for move in moves} <= {f"{name} fp32" for name in slower}
        found += len(moves)
    assert found >= least * 4 * pairs


@pytest.mark.parametrize("openings", [3, 4, 5])
def test_differing_loads_are_no_regression(openings: int) -> None:
    """Loads of equal code differ by 3% within a run; code that is 10% slower, with loads 1% apart, is found."""
    names, slower = OURS[:8] + PEERS, {f"backend{i}": 1.1 for i in range(4)}
    found, pairs = 0, 30
    for seed in range(pairs):
        noise = Noise(instances=0.03, openings=openings)
        before = measured(2 * seed, replace(noise, **EARLIER), names=names)
        equal = compare(run(before), run(measured(2 * seed + 1, noise, names=names)))
        assert not equal.regressions, equal.text()
        noise = Noise(instances=0.01, openings=openings)
        before = measured(2 * seed, replace(noise, **EARLIER), names=names)
        moves = compare(run(before), run(measured(2 * seed + 1, noise, slower, names))).regressions
        assert {move.contender for move in moves} <= {f"{name} fp32" for name in slower}
        found += len(moves)
    assert found >= 0.75 * 4 * pairs


def test_a_different_number_of_loads_is_noted() -> None:
    old, new = (run(model([contender("b", openings=of), contender("eager", openings=of)])) for of in ([], [4, 4]))
    assert compare(new, new).notes == []
    (note,) = compare(old, new).notes
    assert "loads of each contender: 1 before, 2 now" in note


def test_what_slows_down_a_round_for_all_cancels() -> None:
    """A slowdown of all contenders in a round does not add to the uncertainty of one contender's change."""
    widths = []
    for wander in (0.0, 0.05):
        noise = Noise(wander=wander, each=0.0)
        before, after = measured(1, replace(noise, **EARLIER)), measured(2, noise, {"backend3": 1.5})
        (move,) = compare(run(before), run(after)).moved
        assert isinstance(move.change, Interval) and holds(move.change, 1.5)
        widths.append(width(move.change))
    assert widths[1] < 1.1 * widths[0]


def test_what_is_said_of_a_slower_contender() -> None:
    before = [contender(name) for name in ("backend3", *PEERS)]
    after = [contender(name, [[12.0]] * 8) for name in PEERS]
    differences = compared(before, [contender("backend3", [[15.0]] * 8), *after])
    (move,) = differences.regressions
    assert (move.model, move.contender, move.what, move.before, move.after) == (
        "vit", "backend3 fp32", "latency", 10.0, 15.0,
    )  # fmt: skip
    assert isinstance(move.change, Interval) and move.change.value == pytest.approx(1.25)
    assert move.drift == pytest.approx(1.2) and 1 + TOLERANCE < move.change.low < 1.25 < move.change.high < 1.35
    assert (
        "vit, backend3 fp32: latency 10 → 15 ms, 1.250 times" in differences.text()
        and "REGRESSION" in differences.text()
    )
    assert any("the machine takes 1.200 times as long, by its peers (5)" in note for note in differences.notes)


def test_faster_is_no_regression() -> None:
    noise = Noise(each=0.01)
    differences = compare(run(measured(0, replace(noise, **EARLIER))), run(measured(1, noise, {"backend3": 0.85})))
    assert said(differences.moved) == [("backend3 fp32", "latency")] and not differences.regressions


def test_a_peer_that_moved_is_no_regression_and_no_drift() -> None:
    noise = Noise(each=0.01, machine=0.0, wander=0.0)
    differences = compare(run(measured(0, replace(noise, **EARLIER))), run(measured(1, noise, {"eager": 1.4})))
    assert said(differences.moved) == [("eager fp32", "latency")] and not differences.regressions
    assert differences.moved[0].drift == pytest.approx(1, abs=0.02)


def test_peers_that_scatter_hide_small_changes() -> None:
    """If equal code of peers differs by 10%, smaller changes of ours cannot be detected either."""

    def after(peers: Sequence[float]) -> list[Contender]:
        return [contender(name, [[ms]] * 8) for name, ms in zip(("backend3", *PEERS), (11.0, *peers), strict=True)]

    before = [contender(name) for name in ("backend3", *PEERS)]
    assert said(compared(before, after([10, 10.1, 9.9, 10, 10])).regressions) == [("backend3 fp32", "latency")]
    hidden = compared(before, after([9, 10, 11, 10.5, 9.5]))
    assert not hidden.moved and any("the peers' changes spread by" in note for note in hidden.notes)


def test_without_peers_all_of_a_change_counts() -> None:
    differences = compared([contender("backend3")], [contender("backend3", [[12.0]] * 8)])
    (move,) = differences.regressions
    assert isinstance(move.change, Interval) and move.change.value == pytest.approx(1.2) and move.drift is None
    assert any("no peer is in both runs" in note for note in differences.notes)


def test_the_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = run(model([contender("b"), contender("eager")])), [contender("b", [[12.0]] * 8), contender("eager")]
    assert compare(before, run(model(after))).regressions
    monkeypatch.setattr("attnforge.bench.compare.TOLERANCE", 0.2)
    assert not compare(before, run(model(after))).moved


# Other quantities


def memory(extra: float = 100.0, peak: float = 500.0) -> MemoryUse:
    return MemoryUse(loaded_mib=400.0, peak_mib=peak, extra_mib=extra)


def cold(load: float, first: float = 0.0) -> Cold:
    return Cold(import_s=1.0, load_s=load, first_s=first)


@pytest.mark.parametrize(
    ("before", "after", "what"),
    [
        ({"memory": memory(extra=100)}, {"memory": memory(extra=112)}, "extra memory"),
        ({"memory": memory(extra=100)}, {"memory": memory(extra=109)}, None),
        ({"memory": memory(extra=3)}, {"memory": memory(extra=6)}, None),
        ({"memory": memory(extra=0)}, {"memory": memory(extra=6)}, "extra memory"),
        ({"memory": memory(peak=500)}, {"memory": memory(peak=560)}, "peak memory"),
        ({"memory": memory(peak=500)}, {"memory": memory(peak=540)}, None),
        ({"size_mb": 50.0}, {"size_mb": 51.5}, "size"),
        ({"size_mb": 50.0}, {"size_mb": 50.9}, None),
        ({"size_mb": 1.0}, {"size_mb": 1.09}, None),
        ({"cold": cold(0.5, 0.5)}, {"cold": cold(0.5, 1.2)}, "cold start"),
        ({"cold": cold(0.5, 0.5)}, {"cold": cold(0.9, 0.5)}, None),
        ({"cold": cold(0.1)}, {"cold": cold(0.3)}, None),
    ],
)
def test_what_else_is_a_regression(before: dict[str, Any], after: dict[str, Any], what: str | None) -> None:
    """Only for ours; in the other direction it is an improvement."""
    for name, regression in (("backend3", True), ("eager", False)):
        differences = compared([contender(name, **before)], [contender(name, **after)])
        key = f"{name} fp32"
        assert said(differences.moved) == ([] if what is None else [(key, what)]), differences.text()
        assert said(differences.regressions) == ([(key, what)] if what and regression else [])
        back = compared([contender(name, **after)], [contender(name, **before)])
        assert said(back.moved) == said(differences.moved) and not back.regressions


def test_a_slower_machine_starts_and_deploys_more_slowly() -> None:
    def at(load: float, seconds: float, peers: float, size_mb: float = 10.0) -> Results:
        contenders = [contender("b", [[peers]] * 8, cold=cold(load)), contender("eager", [[peers]] * 8)]
        return run(model(contenders, seconds, size_mb))

    assert not compare(at(1.0, 4.0, 10), at(1.7, 7.0, 12)).moved
    differences = compare(at(1.0, 4.0, 10), at(1.9, 7.5, 12))
    assert said(differences.moved) == [("b fp32", "cold start"), ("bundle fp32", "deploying")]
    assert said(differences.regressions) == [("b fp32", "cold start")]
    assert differences.moved[1].change == pytest.approx(7.5 / 4.8)
    assert not compare(at(1.0, 1.0, 10), at(1.0, 2.9, 10)).moved
    larger = compare(at(1.0, 4.0, 10, 10.0), at(1.0, 4.0, 10, 10.3))
    assert said(larger.regressions) == [("bundle fp32", "size")]
    assert not compare(at(1.0, 4.0, 10, 10.3), at(1.0, 4.0, 10, 10.0)).regressions


def test_a_start_is_no_regression_where_a_peers_moved_as_much() -> None:
    def at(ours: float, theirs: float) -> list[Contender]:
        return [contender("b", cold=cold(ours)), contender("eager", cold=cold(theirs))]

    assert said(compared(at(1.0, 2.0), at(1.8, 2.2)).regressions) == [("b fp32", "cold start")]
    for theirs in (4.0, 1.0):  # either way
        differences = compared(at(1.0, 2.0), at(1.8, theirs))
        assert ("b fp32", "cold start") in said(differences.moved) and not differences.regressions
        assert any("those of peers changed by up to 2 times" in line for line in differences.text().splitlines())


def test_errors_within_the_budget_are_no_regression() -> None:
    differences = compared([contender("b", error=2e-7)], [contender("b", error=6e-7)])
    assert said(differences.moved) == [("b fp32", "parity")] and not differences.regressions
    assert not compared([contender("b", error=2e-7)], [contender("b", error=3e-7)]).moved
    assert not compared([contender("b", error=1e-8)], [contender("b", error=8e-8)]).moved
    exact = [contender("b", error=0.0, budget=0.0)]
    assert not compared(exact, exact).moved and compared(exact, [], wrong={"b fp32": "3 differ"}).regressions


def test_to_miss_the_budget_in_a_case_is_a_regression() -> None:
    missed = "scaled-16, output: error 2 is over the budget of 1"
    for name, regression in (("backend3", True), ("eager", False)):
        held, wrong = Cases(held=9, of=9), Cases(held=4, of=9, wrong=missed)
        differences = compared([contender(name, cases=held)], [contender(name, cases=wrong)])
        assert said(differences.moved) == [(f"{name} fp32", "parity")] and bool(differences.regressions) == regression
        assert f"now it is wrong in {missed}" in differences.text()
        untried = compared([contender(name)], [contender(name, cases=wrong)])
        assert not untried.moved  # cases were not checked before


@pytest.mark.parametrize(
    ("found", "what", "reason"),
    [
        ({"wrong": {"b fp32": "error 1e-2 is over the budget"}}, "parity", "error 1e-2 is over the budget"),
        ({"skipped": {"b fp32": "no CUDA device"}}, "gone", "no CUDA device"),
        ({"deployed": []}, "gone", "the model is not deployed in fp32 in the new run"),
        ({}, "gone", "the new run gives no reason"),
    ],
)
def test_what_is_wrong_or_gone_is_a_regression(found: dict[str, Any], what: str, reason: str) -> None:
    after = compared([contender("b"), contender("eager")], [contender("eager")], **found)
    assert said(after.regressions) == [("b fp32", what)] and after.regressions[0].reason == reason
    assert reason in after.text()


def test_peers_in_one_run_alone_are_noted() -> None:
    differences = compared(
        [contender("b"), contender("eager"), contender("compiled")], [contender("b"), contender("torchscript")],
        wrong={"eager fp32": "error 2"},
    )  # fmt: skip
    assert not differences.moved
    for note in (
        "vit, eager fp32: only in the old run: error 2",
        "vit, compiled fp32: only in the old run: the new run gives no reason",
        "vit, torchscript fp32: only in the new run",
    ):
        assert note in differences.notes


def test_what_is_new_is_noted() -> None:
    """But a contender that no longer misses the budget has moved."""
    old = run(model([contender("eager")], wrong={"b fp32": "error 2"}))
    differences = compare(old, run(model([contender("eager"), contender("b"), contender("c")])))
    assert said(differences.moved) == [("b fp32", "parity")] and not differences.regressions
    assert "vit, c fp32: only in the new run" in differences.notes


def test_what_is_measured_no_longer_is_noted() -> None:
    differences = compared([contender("b", memory=memory())], [contender("b")])
    assert not differences.moved
    assert "vit, b fp32: peak memory was measured before and is not now" in differences.notes


# Models


def test_models_are_compared_at_the_same_sizes() -> None:
    slow = [contender("b", [[20.0]] * 8), contender("eager")]
    one, two = (model([contender("b"), contender("eager")], sizes={"batch": size}) for size in (1, 2))
    differences = compare(run(one, two), run(one, model(slow, sizes={"batch": 2})))
    assert [(move.model, move.contender) for move in differences.regressions] == [("vit (batch=2)", "b fp32")]
    differences = compare(run(one), run(model(slow, sizes={"batch": 2})))
    assert not differences.moved and "vit: not compared; batch=1 before, batch=2 now" in differences.notes
    differences = compare(run(one), run(model(slow, name="bert")))
    assert not differences.moved
    assert "vit: only in the old run" in differences.notes and "bert: only in the new run" in differences.notes


def test_a_model_that_was_left_out_is_gone() -> None:
    """Without a reason in the new run, it was not requested."""
    old = run(model([contender("b"), contender("eager")]))
    differences = compare(old, run(left_out={"vit": "the export failed"}))
    assert (
        said(differences.regressions) == [("b fp32", "gone")]
        and differences.regressions[0].reason == "the export failed"
    )
    assert not compare(old, run()).moved


def test_what_differs_is_noted_and_another_machine_first() -> None:
    machine = Machine(system="Linux", processor="other", processors=4, instructions=["avx2"], gpus=[])
    bundle = Deployed(precision="fp32", bundle="b", source="vit(layers=2)", seconds={}, size_mb=1.0)
    slow = [contender("b", [[20.0]] * 3, picked=True), contender("c"), contender("eager")]
    old = run(model([contender("b"), contender("c", picked=True), contender("eager")]))
    new = run(
        model(slow, deployed=[bundle], rounds=3, inputs={"x": "float16"}), machine=machine, threads=4,
        governor="powersave", versions={"torch": "2.12", "openvino": "2026.1"}, load_before=3.0, load_after=9.0,
        left_out={"bert": "no time"},
    )  # fmt: skip
    differences = compare(old, new)
    assert [note.partition(":")[0] for note in differences.notes[:2]] == [
        "different machine",
        "different number of threads",
    ]
    assert "processor some before, other now; processors 2 before, 4 now" in differences.notes[0]
    notes = "\n".join(differences.notes)
    for words in (
        "threads: 2 before, 4 now", "torch 2.11 before, 2.12 now; openvino none before, 2026.1 now", "powersave now",
        "busy before the new run: load 3", "busy during the new run: load 9 after it", "vit: different source",
        "x float32 before, float16 now", "3 rounds are too few", "different backend picked: fp32 c before, b now",
        "left out of the new run: bert: no time",
    ):  # fmt: skip
        assert words in notes
    assert ("b fp32", "latency") in said(differences.regressions)
    assert compare(old, old).notes == [] and compare(old, old).moved == []


# Growth


def growth(exponent: float, name: str = "b", sizes: Sequence[int] = (64, 128, 256, 512), mib: float = 1.0) -> Growth:
    """Time that grows with `exponent`, and memory that grows linearly."""
    ms: list[float | None] = [(n / 64) ** exponent for n in sizes]
    extra: list[float | None] = [mib * n / 64 for n in sizes]
    fits = fit_of(sizes, ms), fit_of(sizes, extra)
    series = Series(
        name=name, precision="fp32", ours=name not in PEERS, ms=ms, extra_mib=extra, time=fits[0], memory=fits[1]
    )
    return Growth(model="vit", along="tokens", sizes=list(sizes), series=[series])


def grown(before: Growth, after: Growth) -> Differences:
    return of_growth.compare(run(growth=[before]), run(growth=[after]))


def test_growth_that_is_steeper_is_a_regression() -> None:
    differences = grown(growth(1.0), growth(1.2))
    assert said(differences.regressions) == [("b fp32", "exponent of time over tokens")]
    assert differences.moved[0].before == pytest.approx(1.0) and differences.moved[0].after == pytest.approx(1.2)
    assert not grown(growth(1.0), growth(1.14)).moved
    better = grown(growth(1.2), growth(1.0))
    assert len(better.moved) == 1 and not better.regressions
    peers = grown(growth(1.0, "eager"), growth(1.5, "eager"))
    assert len(peers.moved) == 1 and not peers.regressions


def test_growth_has_to_be_steeper_at_the_end_too() -> None:
    """Less constant cost makes small sizes faster and the exponent larger, but is not a regression."""
    before, after = growth(1.0), growth(1.0)
    after.series[0].ms = [0.3, 1.5, 3.9, 8.0]
    after.series[0].time = fit_of(after.sizes, after.series[0].ms)
    assert after.series[0].time is not None and after.series[0].time.exponent.value > 1.5
    assert not grown(before, after).moved


def test_growth_that_no_one_exponent_fits_has_to_be_steeper_beyond_its_interval() -> None:
    before, after = growth(1.0), growth(1.0)
    before.series[0].ms, after.series[0].ms = [1.0, 3.0, 4.0, 8.0], [1.0, 2.0, 6.0, 16.0]
    for one in (before, after):
        one.series[0].time = fit_of(one.sizes, one.series[0].ms)
    was, now = before.series[0].time, after.series[0].time
    assert was is not None and now is not None and was.exponent.high > now.exponent.low
    assert now.exponent.value > was.exponent.value + 0.3 and now.last > was.last + 0.3
    assert not grown(before, after).moved


def test_memory_that_grows_more_steeply() -> None:
    for mib, moves in ((10.0, 1), (0.1, 0)):
        before, after = growth(1.0, mib=mib), growth(1.0, mib=mib)
        after.series[0].extra_mib = [mib * (n / 64) ** 1.5 for n in after.sizes]
        after.series[0].memory = fit_of(after.sizes, after.series[0].extra_mib)
        assert len(grown(before, after).regressions) == moves


def test_series_that_do_not_compare() -> None:
    gone = grown(growth(1.0), growth(1.0, "eager"))
    assert said(gone.regressions) == [("b fp32", "growth over tokens, gone")]
    assert "vit over tokens, eager fp32: only in the new run" in gone.notes
    assert not grown(growth(1.0, "eager"), growth(1.0)).moved
    other = grown(growth(1.0), growth(2.0, sizes=(64, 128)))
    assert not other.moved
    assert "vit over tokens: not compared; sizes 64, 128, 256, 512 before, 64, 128 now" in other.notes
    fewer = growth(2.0)
    fewer.series[0].ms[-1], fewer.series[0].notes = None, ["out of memory at 512"]
    differences = grown(growth(1.0), fewer)
    assert not differences.moved
    assert (
        "vit over tokens, b fp32: time was measured at other sizes than before: out of memory at 512"
        in differences.notes
    )
    assert "vit over tokens: only in the old run" in compare(run(growth=[growth(1.0)]), run()).notes


# Files


def numbers(move: Move) -> list[float]:
    values = [move.before, move.after, move.drift]
    values += [*move.change.model_dump().values()] if isinstance(move.change, Interval) else [move.change]
    return [one for one in values if one is not None]


def test_files_compare_as_what_they_hold(tmp_path: Path) -> None:
    """Files have fewer digits than results in memory."""
    noise = Noise()
    before = run(measured(0, replace(noise, **EARLIER)), growth=[growth(1.0, mib=3.3333333)])
    after = run(
        measured(1, noise, {"backend3": 1.3, "backend7": 0.7, "eager": 1.4}), growth=[growth(1.3)], load_before=5.0
    )
    before.models[0].contenders[0].memory, after.models[0].contenders[0].memory = memory(100.123456), memory(150.123456)
    whole = of_growth.compare(before, after)
    for name, measurement in (("before", before), ("after", after)):
        results.write(measurement, tmp_path / name)
    read = of_growth.compare(results.read(tmp_path / "before"), results.read(tmp_path / "after"))
    assert said(read.moved) == said(whole.moved) and said(read.regressions) == said(whole.regressions)
    assert len(read.moved) == 5 and len(read.notes) == len(whole.notes) == 2
    for one, other in zip(read.moved, whole.moved, strict=True):
        assert numbers(one) == pytest.approx(numbers(other), rel=1e-3)
    assert Differences.model_validate_json(whole.model_dump_json()) == whole
