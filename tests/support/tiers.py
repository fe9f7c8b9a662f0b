"""Two tiers of tests: `make test` runs one draw of the large catalogues, `make test-all` and a bare pytest all of them.

`ATTNFORGE_DRAW` is the number of the draw; what one draw leaves out, those of other numbers take, and
:data:`TOGETHER` of them in a row are all there is (`tests/front/test_tiers.py`). `make test` takes the number of the
commit, so each change tries another part.

Three marks say what a draw takes, and all else is in every draw:

- `@pytest.mark.drawn("precision")` takes one test for all values of these parameters, in turn, for each combination of
  the others: every member of a catalogue, at one of its precisions, forms or devices.
- `share(turn, of)` marks a parameter, by its turn in its catalogue, of which a draw has every second to sixth.
- `@pytest.mark.full` leaves a test, or one of its parameters, to the full tier: each says beside it what a draw has in
  its place.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from typing import TypeVar

import pytest

T = TypeVar("T")

DRAW = int(named) if (named := os.environ.get("ATTNFORGE_DRAW", "")) else None
"""The number of the draw; None where all tests run."""

TOGETHER = 25
"""So many draws in a row leave nothing out but what is marked `full`: a fifth of the registered models is in a draw,
their plans for one of five devices; other catalogues take fewer."""


def one_of(values: Sequence[T], turn: int, draw: int) -> T:
    """The value that a draw takes, at its turn in a catalogue: neighbours in a catalogue take different ones."""
    return values[(turn + draw) % len(values)]


def is_in(turn: int, of: int, draw: int | None = DRAW) -> bool:
    """Whether a draw takes the member of a catalogue at its turn, where it takes every second, third, … of them."""
    return draw is None or (turn + draw) % of == 0


def share(turn: int, of: int = 2) -> pytest.MarkDecorator:
    """The mark of a parameter at its turn in a catalogue, of which a draw has one in `of`. What is marked with one turn
    is in the same draws; what starts at 0 and what starts at 1 complement each other."""
    return pytest.mark.share(turn, of)


def left_out(items: Sequence[pytest.Item], draw: int) -> list[pytest.Item]:
    """The tests that a draw leaves to others, or to the full tier."""
    left = [item for item in items if item.get_closest_marker("full") or not is_in(*_share_of(item), draw)]
    alike: dict[tuple[str, Hashable], list[pytest.Item]] = {}
    turns: dict[str, int] = {}
    for item in items:
        mark = item.get_closest_marker("drawn")
        if mark is None or item.get_closest_marker("full"):
            continue
        assert isinstance(item, pytest.Function)
        others = tuple((name, repr(value)) for name, value in item.callspec.params.items() if name not in mark.args)
        test = item.nodeid.partition("[")[0]
        alike.setdefault((test, others), []).append(item)
    for (test, _), same in alike.items():
        turn = turns[test] = turns.get(test, -1) + 1
        _, of = _share_of(same[0])
        taken = one_of(same, turn, draw // of)  # another one each time that the share's turn comes
        if is_in(*_share_of(taken), draw):
            left += [item for item in same if item is not taken]
    return left


def _share_of(item: pytest.Item) -> tuple[int, int]:
    """The turn of a test's parameter, and of how many a draw takes one."""
    marks = [*item.iter_markers("share")]
    assert len(marks) <= 1, f"{item.nodeid} has several shares, of which no draw may have all"
    turn, of = marks[0].args if marks else (0, 1)
    return turn, of
