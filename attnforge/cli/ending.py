"""Signals that end the command line in order: by an exception, so that every block that is open cleans up.

An exception that is raised in the middle of a library may be swallowed there, or become an error of that library's own.
So the signal is remembered: work that goes on ends at its next step, and the exit code is the signal's in any case.
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
    """The exit code of a command that was told to end, which is the shell's for that signal; None where it was not."""
    return None if _number is None else 128 + _number


def check() -> None:
    """End where the command was told to, and a library swallowed that.

    Raises:
        SystemExit: it was.
    """
    if (code := status()) is not None:
        raise SystemExit(code)


@contextmanager
def orderly() -> Iterator[None]:
    """A block in which the signals end the command in order. Only the main thread hears of signals; one that whoever
    started the command ignores (`nohup`) stays ignored."""
    global _number
    _number = None
    before = {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, _end) for number in heard}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    global _number
    signal.signal(number, signal.SIG_IGN)  # once is enough, and cleaning up is not to be interrupted
    if _number is None:
        _number = number
        print("interrupted", file=sys.__stderr__, flush=True)
        check()
