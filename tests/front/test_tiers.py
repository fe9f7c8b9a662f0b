"""A draw of the tests leaves no idiom and no fault out, whatever its number."""

from __future__ import annotations

import pytest

from tests.support.faults.bench import is_sampled
from tests.support.faults.catalogue import FAULTS
from tests.support.faults.subjects import DECODERS, PRECISIONS
from tests.support.idioms import IDIOMS
from tests.support.idioms.catalogue import parts
from tests.support.tiers import left_out, one_of


@pytest.mark.parametrize("draw", range(4))
def test_every_idiom_is_in_every_draw_once(draw: int) -> None:
    names = [name for precision in ("fp32", "fp16") for part in parts(precision, draw) for name in part.names]
    assert sorted(names) == sorted(IDIOMS)


def test_four_draws_are_all_there_is() -> None:
    for precision in ("fp32", "fp16"):
        every = {(part.form, name) for part in parts(precision, None) for name in part.names}
        drawn = {(part.form, name) for draw in range(4) for part in parts(precision, draw) for name in part.names}
        assert drawn == every


def test_every_fault_is_in_every_draw() -> None:
    """But for those of decoders, of fp8 and of 4 bits, of which the tests try every second."""
    ways = [
        (name, precision) for name, at in PRECISIONS.items() for precision in at if precision not in ("fp16", "bf16")
    ]
    left = [fault for fault in FAULTS if not any(is_sampled(fault, name, precision) for name, precision in ways)]
    halved = {*DECODERS, *(name for name, at in PRECISIONS.items() if {*at} <= {"fp8", "int4"})}
    assert [fault.name for fault in left if not {*fault.subjects} <= halved] == []
    of_both = [fault for fault in FAULTS if {*fault.subjects} <= halved]
    assert len(left) < 0.7 * len(of_both)


def test_neighbours_take_turns() -> None:
    assert [one_of("abc", turn, 0) for turn in range(4)] == ["a", "b", "c", "a"]
    assert [one_of("abc", turn, 1) for turn in range(4)] == ["b", "c", "a", "b"]


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
