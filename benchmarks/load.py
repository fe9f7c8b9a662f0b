"""Clients that ask a server at once, each one request after the other, and what came of them; every answer is checked.

The clients share the machine's processors with the server, so they are light: requests are made before the load begins,
and answers are read and compared after it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from attnforge.arrays import Array
from attnforge.errors import first_line

PATIENCE = 120.0
"""Seconds that a client waits for an answer, and goes on asking for one."""

AGAIN = 0.05
"""Seconds until a client asks again that got no answer."""

Ask = Callable[[int], Callable[[], Array]]
"""Sends the request of a number and waits for its answer; what reads the output from the answer."""


class UnansweredError(Exception):
    """A request that got no answer and may be sent again; the message says why."""


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

    def figures(self) -> dict[str, Any]:
        """What is kept of it: the rate, the times within which a half and 99% were answered, and the counts."""
        p50, p99 = (float(np.quantile(self.milliseconds, share)) for share in (0.5, 0.99))
        return {
            "per_second": round(self.per_second, 1), "p50_ms": round(p50, 2), "p99_ms": round(p99, 2),
            "answered": len(self.milliseconds), "errors": self.errors, "wrong": self.wrong,
            "asked_again": self.asked_again, "error": self.error,
        }  # fmt: skip


def spread(numbers: Sequence[float]) -> str:
    """The median of rounds, and the least and the most of them where there are several."""
    digits = 0 if min(numbers) >= 100 else 1 if min(numbers) > 2 else 2
    low, middle, high = min(numbers), statistics.median(numbers), max(numbers)
    return f"{middle:,.{digits}f}" + (f" ({low:,.{digits}f}–{high:,.{digits}f})" if len(numbers) > 1 else "")


def is_right(answer: Array, expected: Array, tolerance: float) -> bool:
    """Whether an answer is the expected one.

    Args:
        answer: as it came.
        expected: a Session's.
        tolerance: how far the answer may be off, relative in the norm.
    """
    off = np.linalg.norm(answer - expected) <= tolerance * np.linalg.norm(expected)
    return bool(answer.shape == expected.shape and off)


def press(
    connect: Callable[[], Ask],
    expected: Sequence[Array],
    clients: int,
    requests: int,
    *,
    tolerance: float,
    again: bool = False,
    outcome: Load | None = None,
) -> Load:
    """Let clients ask a model at once.

    Args:
        connect: gives a client what it asks with.
        expected: the output of every request; clients begin at different ones.
        clients: how many ask at once.
        requests: how many each sends.
        tolerance: how far an answer may be off, relative in the norm.
        again: whether a request that gets no answer is sent again.
        outcome: gets what comes of it, while it comes.
    """
    load, lock = Load() if outcome is None else outcome, threading.Lock()

    def client(number: int) -> list[tuple[int, Callable[[], Array]]]:
        ask, answers = connect(), []
        for request in range(number * requests, (number + 1) * requests):
            place, began = request % len(expected), time.perf_counter()
            answer, failed = _answer(ask, place, again)
            milliseconds = 1e3 * (time.perf_counter() - began)
            with lock:
                load.error = load.error or failed
                if answer is None:
                    load.errors += 1
                    continue
                load.asked_again += failed is not None
                load.milliseconds.append(milliseconds)
            answers.append((place, answer))
        return answers

    with ThreadPoolExecutor(clients) as threads:
        start = time.perf_counter()
        every = list(threads.map(client, range(clients)))
        load.seconds = time.perf_counter() - start
    answers = [pair for of_client in every for pair in of_client]
    load.wrong += sum(not is_right(read(), expected[place], tolerance) for place, read in answers)
    return load


def _answer(ask: Ask, place: int, again: bool) -> tuple[Callable[[], Array] | None, str | None]:
    """The answer to a request, None where there was none; and what was said instead of an answer first."""
    failed, end = None, time.monotonic() + PATIENCE
    while True:
        try:
            return ask(place), failed
        except UnansweredError as error:
            failed = failed or first_line(error)
            if not again or time.monotonic() > end:
                return None, failed
            time.sleep(AGAIN)
        except Exception as error:  # of any kind: the request is lost
            return None, failed or f"{type(error).__name__}: {first_line(error)}"
