"""A draw of the tests has every test function, and some draws in a row have everything but what is left to the full
tier, whatever their numbers."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import pytest

from tests.support.faults.bench import is_drawn
from tests.support.faults.catalogue import FAULTS
from tests.support.faults.graph import Fault
from tests.support.faults.subjects import DECODERS, IN_TURNS, PRECISIONS
from tests.support.idioms import IDIOMS
from tests.support.idioms.catalogue import parts
from tests.support.session import EVERY
from tests.support.tiers import TOGETHER, is_in, left_out, one_of

BY_DRAW_ALONE = {
    "tests/export/attention/test_idioms.py",
    "tests/export/lowering/test_idioms_in_16_bits.py",
}
"""Idioms are exported together, so their draw is made as they are collected, and looked at here by itself."""

IN_SOME_DRAWS = {
    "test_every_block_of_the_page_of_ray_runs",
    "test_the_example_of_ray_runs",
    "test_embeddings_of_real_sentences_stay_where_they_are",
    "test_caches_are_held_to_their_own_error_where_precisions_are_chosen",
    "test_measuring_decides_and_nothing_is_written_where_nothing_is_gained",
    "test_the_command_of_auto",
    "test_a_smaller_error_takes_more_of_fp32",
    "test_memory_of_a_run_is_that_of_its_scores",
    "test_the_suite_measures_writes_and_compares",
}
"""What takes five seconds and more, and does together what other tests do singly."""

SERVERS = {"tests/serving/test_ray.py", "tests/serving/test_triton.py"}
"""One draw has a Ray cluster, and the next a Triton server: each takes most of a minute."""


@pytest.fixture(scope="module")
def every(request: pytest.FixtureRequest) -> list[pytest.Item]:
    """All tests of this run, but for those of idioms."""
    return [item for item in request.config.stash[EVERY] if item.nodeid.split("::")[0] not in BY_DRAW_ALONE]


def test_each_function_is_in_each_draw(every: list[pytest.Item]) -> None:
    """So every room, mechanism, refusal and message has a test in each draw; what takes long, and what counts a whole
    catalogue, says so."""
    in_turns = {function(item) for item in every if item.nodeid.split("::")[0] in SERVERS} | IN_SOME_DRAWS
    in_some = {function(item) for item in every if not item.get_closest_marker("full")} - in_turns
    for draw in range(TOGETHER):
        left = set(left_out(every, draw))
        assert in_some - {function(item) for item in every if item not in left} == set(), draw


def test_draws_in_a_row_leave_nothing_out(every: list[pytest.Item]) -> None:
    for first in (0, 7):
        draws = [set(left_out(every, draw)) for draw in range(first, first + TOGETHER)]
        in_none = functools.reduce(set.intersection, draws)
        assert {item.nodeid for item in in_none} == {i.nodeid for i in every if i.get_closest_marker("full")}


def test_what_no_draw_has_is_little(every: list[pytest.Item]) -> None:
    functions = {function(item) for item in every if item.get_closest_marker("full")}
    functions -= {function(item) for item in every if not item.get_closest_marker("full")}
    assert functions <= {
        "test_in_fp32_all_are_caught_but_an_epsilon_and_those_that_change_no_function",
        "test_many_are_caught_and_of_every_kind",
        "test_static",
        "test_two_layers_are_fused_and_compute_what_is_needed",
    }


def function(item: pytest.Item) -> str:
    """The name of a test without its parameters."""
    return item.nodeid.partition("[")[0].rpartition("::")[2].partition("@")[0]


@pytest.mark.parametrize("draw", range(4))
def test_five_draws_have_every_idiom_once(draw: int) -> None:
    names = [
        name
        for number in range(draw, draw + 5)
        for precision in ("fp32", "fp16")
        for part in parts(precision, number)
        for name in part.names
    ]
    assert sorted(names) == sorted(IDIOMS)


@pytest.mark.parametrize("draw", range(TOGETHER))
def test_each_draw_has_idioms_of_each_form_and_precision(draw: int) -> None:
    for precision in ("fp32", "fp16"):
        names = {form: [n for part in parts(precision, draw) if part.form == form for n in part.names]
                 for form in ("dynamic", "static")}  # fmt: skip
        assert all(len(of_form) > len(IDIOMS) / 30 for of_form in names.values())


def test_draws_in_a_row_have_every_idiom_in_every_form_and_precision() -> None:
    for precision in ("fp32", "fp16"):
        every = {(part.form, name) for part in parts(precision, None) for name in part.names}
        drawn = {(part.form, n) for draw in range(TOGETHER) for part in parts(precision, draw) for n in part.names}
        assert drawn == every


def ways_of(names: Iterable[str]) -> list[tuple[str, str]]:
    """Subjects and precisions of a draw."""
    return [(name, precision) for name in names for precision in PRECISIONS[name] if precision not in ("fp16", "bf16")]


def faults_of(draw: int) -> list[Fault]:
    """The faults that a draw tries, once for each subject and precision."""
    ways = ways_of(set(PRECISIONS) - {*IN_TURNS[(1 + draw) % 2]})
    return [f for f in FAULTS for name, at in ways if at not in f.not_in and is_drawn(f, name, at, draw)]


@pytest.mark.parametrize("draw", range(4))
def test_each_draw_has_faults_of_every_family(draw: int) -> None:
    assert {fault.family for fault in faults_of(draw)} == {fault.family for fault in FAULTS}


@pytest.mark.parametrize("first", range(4))
def test_every_fault_is_in_every_four_draws(first: int) -> None:
    """A draw has half of the subjects in fp32 or in few bits, and tries half of their faults. Of decoders, of fp8 and
    of 4 bits the tests try every second fault."""
    tried = {fault.name for draw in range(first, first + 4) for fault in faults_of(draw)}
    left = [fault for fault in FAULTS if fault.name not in tried]
    halved = {*DECODERS, *(name for name, at in PRECISIONS.items() if {*at} <= {"fp8", "int4"})}
    assert [fault.name for fault in left if not {*fault.subjects} <= halved] == []
    of_both = [fault for fault in FAULTS if {*fault.subjects} <= halved]
    assert len(left) < 0.7 * len(of_both)


def test_neighbours_take_turns() -> None:
    assert [one_of("abc", turn, 0) for turn in range(4)] == ["a", "b", "c", "a"]
    assert [one_of("abc", turn, 1) for turn in range(4)] == ["b", "c", "a", "b"]
    assert [[turn for turn in range(6) if is_in(turn, 3, draw)] for draw in range(4)] == [
        [0, 3],
        [2, 5],
        [1, 4],
        [0, 3],
    ]
    assert all(is_in(turn, 3, None) for turn in range(3))


def test_one_of_those_that_differ_in_what_is_drawn_stays(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.drawn("precision")
        @pytest.mark.parametrize("precision", ["fp32", "fp16"])
        @pytest.mark.parametrize("name", ["one", "other"])
        def test_drawn(name, precision): ...

        @pytest.mark.parametrize("name", ["one", pytest.param("other", marks=pytest.mark.full)])
        def test_full(name): ...
        """
    )
    items = pytester.inline_genitems()[0]
    first, second = ({item.name for item in left_out(items, draw)} for draw in (0, 1))
    assert first == {"test_drawn[one-fp16]", "test_drawn[other-fp32]", "test_full[other]"}
    assert second == {"test_drawn[one-fp32]", "test_drawn[other-fp16]", "test_full[other]"}


def test_a_share_is_drawn_at_another_precision_when_its_turn_comes_again(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from tests.support.tiers import share

        @pytest.mark.drawn("precision")
        @pytest.mark.parametrize("precision", ["fp32", "fp16"])
        @pytest.mark.parametrize("name", [pytest.param(name, marks=share(turn)) for turn, name in enumerate("ab")])
        def test_shared(name, precision): ...
        """
    )
    items = pytester.inline_genitems()[0]
    kept = [{item.name for item in items} - {item.name for item in left_out(items, draw)} for draw in range(4)]
    assert kept == [{"test_shared[a-fp32]"}, {"test_shared[b-fp16]"}, {"test_shared[a-fp16]"}, {"test_shared[b-fp32]"}]
