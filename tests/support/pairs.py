"""Fixed pairs in place of cross products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def pairs(some: Sequence[A], others: Sequence[B]) -> list[tuple[A, B]]:
    """Return each value of both lists at least once: those of the longer list in order, those of the shorter in turn.

    A test that takes pairs says in its docstring what covers the combinations that they leave out.
    """
    return [(some[i % len(some)], others[i % len(others)]) for i in range(max(len(some), len(others)))]
