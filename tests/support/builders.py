"""Start TensorRT's builder in milliseconds.

The process of a builder (:mod:`attnforge.export.tensorrt.process`) imports its libraries for longer than it builds a
small plan. This file, run as a script, is a server that imports them once; each builder is a fork of it, with the
standard streams, the environment and the folder of the process that asked for it, which ends as the builder ends.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from select import select

from attnforge.children import command, environment
from attnforge.export.tensorrt.build import PROCESS
from attnforge.machine import cuda_devices

CLIENT = """
import contextlib, json, os, signal, socket, sys

with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(bytes.fromhex(sys.argv[1]))
    socket.send_fds(server, [json.dumps([os.getcwd(), dict(os.environ)]).encode()], [0, 1, 2])
    status = os.waitstatus_to_exitcode(int(server.recv(16)))
if status < 0:
    with contextlib.suppress(OSError):
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
"""Runs a builder as if it were this process; if this process is killed, so is the builder."""


class Server:
    """The server of this process, which starts with the first builder."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._lock = listener, threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, module: str, *arguments: str) -> list[str]:
        """The command of :func:`attnforge.children.command`; a builder's asks the server."""
        if module != PROCESS:
            return command(module, *arguments)
        with self._lock:
            if self.process is None:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", __file__, str(self._listener.fileno())],
                    stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[self._listener.fileno()],
                    env=environment(),
                )  # fmt: skip
        return [sys.executable, "-I", "-S", "-c", CLIENT, self._listener.getsockname().hex()]


@contextmanager
def builders() -> Iterator[Server | None]:
    """Yield a server; None where a builder may use a GPU or the full TensorRT, which it loads itself."""
    if cuda_devices() or importlib.util.find_spec("tensorrt_rtx") is None or importlib.util.find_spec("tensorrt"):
        yield None
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind("")  # to a name that Linux chooses
        listener.listen()
        server = Server(listener)
        yield server
        if server.process is not None:
            server.process.communicate()  # it ends with its standard input


def serve(listener: socket.socket) -> None:
    """Fork a builder for each client, until standard input ends."""
    importlib.import_module(PROCESS).load("tensorrt_rtx")
    del sys.modules[PROCESS]  # each builder runs it as a script
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    standard_input = sys.stdin.fileno()
    while standard_input not in select([listener.fileno(), standard_input], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            supervise(client)
            os._exit(0)
        client.close()


def supervise(client: socket.socket) -> None:
    """Run a builder and tell the client its exit status; a builder whose client has gone is killed."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, streams, _, _ = socket.recv_fds(client, 2**20, 3)
    if not request:
        return
    builder = os.fork()
    if builder == 0:
        client.close()
        folder, variables = json.loads(request)
        build(folder, variables, streams)
    for stream in streams:
        os.close(stream)
    if client.fileno() in select([client.fileno(), os.pidfd_open(builder)], [], [])[0]:
        os.kill(builder, signal.SIGKILL)
    _, status = os.waitpid(builder, 0)
    with suppress(OSError):
        client.send(str(status).encode())


def build(folder: str, variables: dict[str, str], streams: list[int]) -> None:
    """Run the builder in this process, which ends."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    try:
        runpy.run_module(PROCESS, run_name="__main__", alter_sys=True)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
