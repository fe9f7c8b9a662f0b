"""A warm TensorRT-RTX builder: every plan in a process of its own, as the product builds it, forked from one that has
the libraries loaded. Small plans take 0.05 s to build, and five times that to import what builds them.

`python -m tests.support.builder` serves requests, a line of JSON each, and answers each with a line.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import NoReturn

from attnforge.export.tensorrt.build import Builders
from attnforge.export.tensorrt.process import Answer, Request, answer, load
from attnforge.memory import peak

FLAVOUR = "tensorrt_rtx"


class WarmBuilder:
    """The process that forks builders.

    Attributes:
        aside: whether the product starts its own processes again.
    """

    def __init__(self) -> None:
        self.aside = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._cold = Builders._answer

    def answer(self, builders: Builders, request: Request, device: int) -> Answer:
        """In place of :meth:`Builders._answer`, which takes what the warm one cannot: another flavour, and whatever
        crashed or failed, to say it in the product's words."""
        line = ""
        if request.flavour == FLAVOUR and device == 0 and not self.aside and hasattr(os, "fork"):
            with self._lock:
                line = self._served(request)
        return Answer.model_validate_json(line) if line.strip() else self._cold(builders, request, device)

    def _served(self, request: Request) -> str:
        if self._process is None:
            command = [sys.executable, "-m", "tests.support.builder"]
            self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(request.model_dump_json() + "\n")
        self._process.stdin.flush()
        return self._process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.communicate()


def serve() -> None:
    """Answer requests until standard input ends; an empty line says that the builder crashed or failed."""
    load(FLAVOUR)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries write to standard output, too
    for line in sys.stdin:
        source, sink = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(source)
            _answer_and_exit(line, sink)
        os.close(sink)
        with os.fdopen(source) as pipe:
            result = pipe.read()
        _, status = os.waitpid(child, 0)
        print(result if status == 0 else "", file=answers, flush=True)


def _answer_and_exit(line: str, sink: int) -> NoReturn:
    """Build in a process that was forked, of which nothing that the parent left open is to be closed."""
    status = 1
    try:
        built = answer(Request.model_validate_json(line)).model_copy(update={"memory": peak()})
        with os.fdopen(sink, "w") as pipe:
            pipe.write(built.model_dump_json())
        status = 0
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve()
