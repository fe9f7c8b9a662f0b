"""Clients that ask a Serve deployment at once, each one request after the other; every answer is checked."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError

from attnforge.arrays import Array
from attnforge.errors import first_line
from benchmarks.load import Load, is_right

PATIENCE = 120.0
"""Seconds that a client waits for an answer, and goes on asking for one."""


def press(
    handle: Any,
    inputs: Sequence[Mapping[str, Array]],
    expected: Sequence[Array],
    clients: int,
    requests: int,
    *,
    tolerance: float,
    outcome: Load,
) -> None:
    """Let clients ask a model at once. A request whose replica died is sent again.

    Args:
        handle: of the deployment, whose model has one output.
        inputs: of every request, by name; clients begin at different places.
        expected: the output for each.
        clients: how many ask at once.
        requests: how many each sends.
        tolerance: how far an answer may be off, relative in the norm.
        outcome: gets what comes of it, while it comes.
    """
    lock = threading.Lock()

    def client(number: int) -> None:
        for place in range(number * requests, (number + 1) * requests):
            began, again, answer = time.perf_counter(), 0, None
            error: str | None = None
            while answer is None and time.perf_counter() - began < PATIENCE:
                try:
                    answer = handle.predict.remote(inputs[place % len(inputs)]).result(timeout_s=PATIENCE)
                except RayActorError as death:
                    error, again = first_line(death), again + 1
                except Exception as other:  # of any kind: the request is lost
                    error = f"{type(other).__name__}: {first_line(other)}"
                    break
            with lock:
                outcome.error = outcome.error or error
                if answer is None:
                    outcome.errors += 1
                    continue
                outcome.asked_again += again > 0
                outcome.milliseconds.append(1e3 * (time.perf_counter() - began))
                (output,) = answer.values()
                outcome.wrong += not is_right(output, expected[place % len(inputs)], tolerance)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome.seconds = time.perf_counter() - start
