"""The process under test: a crash, a hang or excessive memory use is detected from outside.

`python -m tests.fuzz.subject` serves requests of :mod:`.tasks`.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from attnforge import memory
from attnforge.errors import AttnforgeError
from attnforge.machine import cuda_devices

MOST_SECONDS = 10.0
"""CPU seconds that one request may take; wall-clock time would depend on the load of the machine."""
MOST_WAITED = 60.0
"""Wall-clock seconds after which a process that waits, and so takes no CPU time, counts as hanging."""
MOST_MEMORY = 2**30
"""Bytes by which one request may increase the process's memory."""
MOST_LINE = 4_000

_STARTS = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "pty.spawn", "subprocess.Popen",
           "socket.connect", "socket.bind"}  # fmt: skip


class Answer(NamedTuple):
    """The result of a request.

    Attributes:
        kind: `accepted`, `refused` with an error of attnforge, or `raw` for any other error or a fault of the process.
        text: the task's result, the error message, or the traceback.
    """

    kind: str
    text: str


class Subject:
    """The process under test, restarted whenever it ended."""

    def __init__(self) -> None:
        self._process: multiprocessing.process.BaseProcess | None = None
        self._pipe: Connection | None = None

    def ask(self, task: str, *arguments: Any) -> Answer:
        """Let the process do one of :data:`.tasks.TASKS`, and check the result.

        Raises:
            AssertionError: the input was neither accepted rightly nor refused in one line.
        """
        answer = self._answer(task, arguments)
        assert answer.kind != "raw", answer.text
        if answer.kind == "refused":
            assert answer.text and len(answer.text) < MOST_LINE, f"not a readable line: {answer.text[:200]!r}"
            assert re.search(r"[\x00-\x1f\x7f-\x9f]", answer.text) is None, f"control characters in {answer.text!r}"
        return answer

    def _answer(self, task: str, arguments: tuple[Any, ...]) -> Answer:
        if self._pipe is None:
            self._start()
        assert self._pipe is not None and self._process is not None
        self._pipe.send((task, arguments))
        waited = time.monotonic()
        while not self._pipe.poll(1):
            if time.monotonic() - waited > MOST_WAITED:
                self.close()
                return Answer("raw", f"{task} did not end within {MOST_WAITED:.0f} s")
            if not self._process.is_alive():
                break
        try:
            answer: Answer = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            code = self._process.exitcode
            self.close()
            return Answer("raw", f"{task} ended the process with {code}")
        return answer

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(300) or self._pipe.recv() != "ready":
            self.close()
            raise RuntimeError("the process under test did not start")

    def close(self) -> None:
        """Kill the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
        self._process = self._pipe = None


def serve(pipe: Connection) -> None:
    """Run the requested tasks and report the results, including whether anything was started meanwhile."""
    from tests.fuzz.tasks import TASKS

    started: list[str] = []
    at_work: list[bool] = []
    here = Path.cwd()

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if at_work and event in _STARTS:
            started.append(f"{event}{arguments!r:.200}")

    cuda_devices()  # the first call of CUDA's bindings starts a process to locate libraries
    _limit_memory()
    sys.addaudithook(watch)
    pipe.send("ready")
    while True:
        try:
            task, arguments = pipe.recv()
        except EOFError:
            return
        memory.reset_peak()
        before, start = memory.peak(), time.process_time()
        at_work.append(True)
        faulthandler.dump_traceback_later(0.8 * MOST_WAITED)  # shows where it hangs
        try:
            answer = Answer("accepted", TASKS[task](*arguments))
        except AttnforgeError as error:
            answer = Answer("refused", str(error))
        except BaseException:  # any fault is of interest, including an exit
            answer = Answer("raw", traceback.format_exc(limit=-12))
        faulthandler.cancel_dump_traceback_later()
        at_work.clear()
        seconds, grown = time.process_time() - start, memory.peak() - before
        if started:
            answer = Answer("raw", f"{task} started {started}")
        elif seconds > MOST_SECONDS:
            answer = Answer("raw", f"{task} took {seconds:.1f} s of the processor, and then: {answer}"[:MOST_LINE])
        elif grown > MOST_MEMORY:
            answer = Answer("raw", f"{task} took {grown:,} bytes of memory, and then: {answer}"[:MOST_LINE])
        elif Path.cwd() != here:
            answer = Answer("raw", f"{task} left the process in another folder")
        started.clear()
        pipe.send(answer)


def _limit_memory() -> None:
    """Limit the address space, so that an unbounded allocation fails here before the system kills other processes."""
    if os.name == "posix":
        import resource

        most = 16 * 2**30
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
