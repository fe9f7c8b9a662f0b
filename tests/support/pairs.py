"""Fixed pairs in place of cross products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

A = TypeVar("A")
B = TypeVar("B")


def pairs(some: Sequence[A], others: Sequence[B]) -> list[tuple[A, B]]:
    """Return pairs with each value of both lists at least once: the longer list in order, the shorter one repeated.

    The docstring of a test that uses pairs says what covers the other combinations.
    """
    return [(some[i % len(some)], others[i % len(others)]) for i in range(max(len(some), len(others)))]
