"""Load on a server: concurrent clients, each sending one request after another; every answer is checked.

The clients share the machine's processors with the server, so they are light: requests are built before the load
starts, and answers are decoded and compared after it.
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
"""Seconds for which a client waits for an answer and retries."""

AGAIN = 0.05
"""Seconds until a client retries a request that got no answer."""

Ask = Callable[[int], Callable[[], Array]]
"""Sends the request with this number, waits for its answer, and returns a function that decodes the output."""


class UnansweredError(Exception):
    """A request got no answer and may be sent again; the message says why."""


@dataclass
class Load:
    """The outcome of a load.

    Attributes:
        seconds: time from the first request to the last answer.
        milliseconds: latency of every request that was answered.
        wrong: number of wrong answers.
        errors: number of requests that got no answer.
        error: first error of a request that was sent again or lost.
        asked_again: number of requests that were answered only after being sent again.
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
        """Return the figures to keep: the rate, the 50th and 99th percentile of latency, and the counts."""
        p50, p99 = (float(np.quantile(self.milliseconds, share)) for share in (0.5, 0.99))
        return {
            "per_second": round(self.per_second, 1), "p50_ms": round(p50, 2), "p99_ms": round(p99, 2),
            "answered": len(self.milliseconds), "errors": self.errors, "wrong": self.wrong,
            "asked_again": self.asked_again, "error": self.error,
        }  # fmt: skip


def spread(numbers: Sequence[float]) -> str:
    """Return the median of rounds as text, with minimum and maximum if there are several."""
    digits = 0 if min(numbers) >= 100 else 1 if min(numbers) > 2 else 2
    low, middle, high = min(numbers), statistics.median(numbers), max(numbers)
    return f"{middle:,.{digits}f}" + (f" ({low:,.{digits}f}–{high:,.{digits}f})" if len(numbers) > 1 else "")


def is_right(answer: Array, expected: Array, tolerance: float) -> bool:
    """Return whether an answer is the expected one.

    Args:
        answer: the answer.
        expected: the output of a Session.
        tolerance: allowed error of the answer, relative in the norm.
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
    """Send requests to a model from concurrent clients.

    Args:
        connect: connects a client, and returns the function that it sends requests with.
        expected: the output of every request; clients start at different requests.
        clients: number of concurrent clients.
        requests: number of requests per client.
        tolerance: allowed error of an answer, relative in the norm.
        again: whether to send a request again that got no answer.
        outcome: updated while the load runs; by default a new one.

    Returns:
        the outcome.
    """
    load, lock = Load() if outcome is None else outcome, threading.Lock()

    def client(number: int) -> list[tuple[int, Callable[[], Array]]]:
        ask, answers = connect(), []
        for request in range(number * requests, (number + 1) * requests):
            index, start = request % len(expected), time.perf_counter()
            answer, failed = _answer(ask, index, again)
            milliseconds = 1e3 * (time.perf_counter() - start)
            with lock:
                load.error = load.error or failed
                if answer is None:
                    load.errors += 1
                    continue
                load.asked_again += failed is not None
                load.milliseconds.append(milliseconds)
            answers.append((index, answer))
        return answers

    with ThreadPoolExecutor(clients) as threads:
        start = time.perf_counter()
        every = list(threads.map(client, range(clients)))
        load.seconds = time.perf_counter() - start
    answers = [pair for of_client in every for pair in of_client]
    load.wrong += sum(not is_right(read(), expected[index], tolerance) for index, read in answers)
    return load


def _answer(ask: Ask, index: int, again: bool) -> tuple[Callable[[], Array] | None, str | None]:
    """Return the answer to a request, or None, and the first error."""
    failed, end = None, time.monotonic() + PATIENCE
    while True:
        try:
            return ask(index), failed
        except UnansweredError as error:
            failed = failed or first_line(error)
            if not again or time.monotonic() > end:
                return None, failed
            time.sleep(AGAIN)
        except Exception as error:  # of any kind: the request is lost
            return None, failed or f"{type(error).__name__}: {first_line(error)}"
