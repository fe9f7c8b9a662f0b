"""Orderly ending on signals: by an exception, so that every open block cleans up.

A library may swallow an exception that is raised inside it, or turn it into an error of its own. So the signal is
remembered: work that continues ends at its next step, and the exit code is the signal's in any case.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]

_number: int | None = None


def status() -> int | None:
    """Return the exit code after a signal, 128 plus its number as in a shell; None if no signal arrived."""
    return None if _number is None else 128 + _number


def check() -> None:
    """End now if a signal arrived and a library swallowed its exception.

    Raises:
        SystemExit: a signal arrived.
    """
    if (code := status()) is not None:
        raise SystemExit(code)


@contextmanager
def orderly() -> Iterator[None]:
    """A block in which signals end the command in order. Only the main thread receives signals; a signal that is
    ignored when the command starts (`nohup`) stays ignored."""
    global _number
    _number = None
    before = {}
    if threading.current_thread() is threading.main_thread():
        handled = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, _end) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    global _number
    signal.signal(number, signal.SIG_IGN)  # a second signal must not interrupt the cleanup
    if _number is None:
        _number = number
        print("interrupted", file=sys.__stderr__, flush=True)
        check()
