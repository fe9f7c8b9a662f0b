"""What came of clients that asked a server at once."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from attnforge.arrays import Array


@dataclass
class Load:
    """What came of a load.

    Attributes:
        seconds: from the first request to the last answer.
        milliseconds: of every request that was answered.
        wrong: answers that are not the expected ones.
        errors: requests that got no answer.
        error: what the first request got that had to be sent again or was lost.
        asked_again: requests that got no answer, were sent again, and were answered then.
    """

    seconds: float = 0.0
    milliseconds: list[float] = field(default_factory=list)
    wrong: int = 0
    errors: int = 0
    error: str | None = None
    asked_again: int = 0

    @property
    def per_second(self) -> float:
        return len(self.milliseconds) / self.seconds

    def quantile(self, share: float) -> float:
        """Milliseconds within which this share of the requests was answered."""
        return float(np.quantile(self.milliseconds, share))


def is_right(answer: Array, expected: Array, tolerance: float) -> bool:
    """Whether an answer is the expected one.

    Args:
        answer: as it came.
        expected: a Session's.
        tolerance: how far the answer may be off, relative in the norm.
    """
    off = np.linalg.norm(answer - expected) <= tolerance * np.linalg.norm(expected)
    return bool(answer.shape == expected.shape and off)
