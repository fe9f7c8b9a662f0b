"""Two tiers of tests: `make test` runs one draw of the large catalogues, `make test-all` and a bare pytest all of them.

A draw leaves nothing of a catalogue out: every idiom, fault, broken and published model is in it, at one of its
precisions, forms or devices in place of all. `ATTNFORGE_DRAW` is the number of the draw; the other tests of a
catalogue are those of other numbers.

`@pytest.mark.drawn("precision")` draws one test for all values of these parameters, in turn, for each combination of
the others. `@pytest.mark.full` leaves a test, or one of its parameters, to the full tier; `half` leaves every second
parameter to it.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

DRAW = int(named) if (named := os.environ.get("ATTNFORGE_DRAW", "")) else None
"""The number of the draw; None where all tests run."""


def one_of(values: Sequence[T], turn: int, draw: int) -> T:
    """The value that a draw takes, at its turn in a catalogue: neighbours in a catalogue take different ones."""
    return values[(turn + draw) % len(values)]


def half(turn: int, start: int = 0) -> list[pytest.MarkDecorator]:
    """The marks of a parameter at its turn in a catalogue, of which a draw has every second. What starts at 0 and what
    starts at 1 have one half each."""
    return [] if (turn + start + (DRAW or 0)) % 2 == 0 else [pytest.mark.full]


def left_out(items: Sequence[pytest.Item], draw: int) -> list[pytest.Item]:
    """The tests that a draw leaves to the full tier."""
    left = [item for item in items if item.get_closest_marker("full")]
    alike: dict[tuple[str, Hashable], list[pytest.Item]] = {}
    turns: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is None or item in left:
            continue
        assert isinstance(item, pytest.Function)
        others = tuple((name, repr(value)) for name, value in item.callspec.params.items() if name not in mark.args)
        test = item.nodeid.partition("[")[0]
        alike.setdefault((test, others), []).append(item)
    for (test, _), same in alike.items():
        turn = turns[test] = turns.get(test, -1) + 1
        taken = one_of(same, turn, draw)
        left += [item for item in same if item is not taken]
    return left
