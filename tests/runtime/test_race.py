"""Shuffled turns: their order, their calls, and when they end. No test depends on measured times."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import pytest

from attnforge.runtime import race


def test_contenders_take_turns_in_changing_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "LONG", 0.0)  # no untimed calls
    monkeypatch.setattr(race, "MOST_CALLS", 1)
    calls: list[str] = []
    names = ["a", "b", "c"]
    times = race.race({name: lambda name=name: calls.append(name) for name in names}, 12)  # type: ignore[misc]
    order = calls[len(names) :]  # the first call of each only measures its duration
    rounds = [order[i : i + 3] for i in range(0, len(order), 3)]
    assert len(rounds) == 12 and all(sorted(names_of_round) == names for names_of_round in rounds)
    assert len({tuple(names_of_round) for names_of_round in rounds}) > 2
    assert {name: [len(turn) for turn in times[name]] for name in names} == {name: [1] * 12 for name in names}


def test_another_seed_gives_other_orders() -> None:
    def orders(seed: int) -> list[str]:
        calls: list[str] = []
        race.race({name: lambda name=name: calls.append(name) for name in "abc"}, 4, seed=seed)  # type: ignore[misc]
        return calls

    assert orders(0) == orders(0) != orders(1)


def test_quick_contenders_run_several_times_a_turn_and_each_call_is_timed() -> None:
    times = race.race({"quick": lambda: None, "slow": lambda: time.sleep(0.03)}, 3)
    assert [len(turn) for turn in times["quick"]] == [race.MOST_CALLS] * 3
    assert [len(turn) for turn in times["slow"]] == [1] * 3
    assert all(ms >= 30 for turn in times["slow"] for ms in turn)


@pytest.mark.parametrize(
    ("seconds", "warmed"),
    [
        ([0.001, 0.02, 0.09], 0.09),
        ([0.09, 0.11, 0.15, 0.2, 0.5], 0.2),  # each but the last is less than twice the one before
        ([0.04, 0.1], 0.04),
        ([0.1, 0.11, 0.15], 0.0),  # all take long
    ],
)
def test_contenders_of_similar_speed_are_warmed_up_alike(seconds: list[float], warmed: float) -> None:
    assert race.longest_warmed_up(seconds) == warmed == race.longest_warmed_up(reversed(seconds))


def test_an_untimed_call_comes_before_the_timed_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    fake = {"perf_counter": lambda: clock[0], "process_time": lambda: 0.0, "sleep": lambda seconds: None}
    monkeypatch.setattr(race, "time", SimpleNamespace(**fake))
    calls: Counter[str] = Counter()
    takes = {"quick": 0.03, "slow": 0.3}

    def run(name: str) -> None:
        calls[name] += 1
        clock[0] += takes[name]

    times = race.race({name: lambda name=name: run(name) for name in takes}, 4)  # type: ignore[misc]
    timed = {name: sum(map(len, rounds)) for name, rounds in times.items()}
    assert {name: calls[name] - timed[name] for name in takes} == {"quick": 2 + 4, "slow": 1}


@pytest.mark.parametrize(("busy", "begins"), [(0.0, 0.005), (0.04, 0.045), (1.0, race.SETTLE)])
def test_a_turn_begins_when_threads_no_longer_spin(monkeypatch: pytest.MonkeyPatch, busy: float, begins: float) -> None:
    """Threads that the previous contender left spinning run for `busy` seconds."""
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    fake = {"perf_counter": lambda: clock[0], "process_time": lambda: min(clock[0], busy), "sleep": sleep}
    monkeypatch.setattr(race, "time", SimpleNamespace(**fake))
    assert race.in_turns({"a": lambda: clock[0]}, 1)["a"] == [pytest.approx(begins, abs=race.IDLE / 2)]


def test_a_race_has_at_least_three_rounds_however_little_time_there_is() -> None:
    assert len(race.race({"a": lambda: time.sleep(0.01)}, 50, 0.0)["a"]) == race.FEWEST_ROUNDS


def test_a_turn_keeps_what_it_returns_and_rounds_pair() -> None:
    order: list[str] = []

    def turn(name: str) -> tuple[str, int]:
        order.append(name)
        return name, len(order)

    results = race.in_turns({name: lambda name=name: turn(name) for name in "abc"}, 5, settle=0.0)  # type: ignore[misc]
    for name in "abc":
        assert [result[0] for result in results[name]] == [name] * 5
        assert [(number - 1) // 3 for _, number in results[name]] == list(range(5))


def test_turns_end_after_the_minimum_of_rounds_when_time_is_up() -> None:
    assert len(race.in_turns({"a": lambda: 1}, 50, 0.0, fewest=7, settle=0.001)["a"]) == 7
    assert race.in_turns({}, 50) == {}
