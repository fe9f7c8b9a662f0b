"""Clients that ask a model at once over HTTP, each one request after the other, and the answers, all of them checked.

The clients share the machine's processors with the server, so they are light: requests are made before the load begins,
by tritonclient, they are sent as they are over connections that stay open, and answers are read after the load.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import tritonclient.http

from attnforge.arrays import Array
from attnforge.errors import first_line
from benchmarks.load import Load, is_right
from benchmarks.servers.triton.client import PATIENCE, inputs_of
from benchmarks.servers.triton.server import Server

AGAIN = 0.05
"""Seconds until a client asks again that got no answer."""

MOST_AGAIN = 120.0
"""Seconds that a client goes on asking for."""

_LENGTH = re.compile(rb"\r\nContent-Length: (\d+)\r\n", re.IGNORECASE)
_HEADER_LENGTH = re.compile(rb"\r\nInference-Header-Content-Length: (\d+)\r\n", re.IGNORECASE)


class Client:
    """A client, in a thread of its own.

    Args:
        address: of the server.
        requests: to send, one after the other, as they go over the wire.
        again: whether a request that gets no answer is sent again.

    Attributes:
        answers: to every request, as it came; None where there was none.
        milliseconds: of every request that was answered.
        error: what went wrong first.
        asked_again: requests that were answered when they were sent again.
    """

    def __init__(self, address: str, requests: Sequence[bytes], again: bool) -> None:
        host, _, port = address.rpartition(":")
        self._place, self._requests, self._again = (host, int(port)), requests, again
        self._connection: socket.socket | None = None
        self.answers: list[bytes | None] = []
        self.milliseconds: list[float] = []
        self.error: str | None = None
        self.asked_again = 0

    def run(self) -> None:
        """Send every request."""
        for request in self._requests:
            start = time.perf_counter()
            answer = self._asked(request)
            if answer is not None:
                self.milliseconds.append(1e3 * (time.perf_counter() - start))
            self.answers.append(answer)
        self._close()

    def _asked(self, request: bytes) -> bytes | None:
        end, failed = time.monotonic() + MOST_AGAIN, False
        while True:
            try:
                answer = self._exchange(request)
            except OSError as error:
                self.error, failed = self.error or first_line(error), True
                self._close()
                if not self._again or time.monotonic() > end:
                    return None
                time.sleep(AGAIN)
            else:
                self.asked_again += failed
                return answer

    def _exchange(self, request: bytes) -> bytes:
        """Send a request and read its answer.

        Raises:
            OSError: there is no server, it went away, or it answered with an error.
        """
        if self._connection is None:
            self._connection = socket.create_connection(self._place, PATIENCE)
            self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection.sendall(request)
        data, whole = b"", None
        while whole is None or len(data) < whole:
            part = self._connection.recv(2**16)
            if not part:
                raise ConnectionResetError("the server closed the connection")
            data += part
            if whole is None and (head := data.find(b"\r\n\r\n")) >= 0:
                length = _LENGTH.search(data, 0, head + 2)
                whole = head + 4 + (int(length[1]) if length is not None else 0)
        if not data.startswith(b"HTTP/1.1 200"):
            raise OSError(data.decode(errors="replace"))
        return data

    def _close(self) -> None:
        if self._connection is not None:
            with suppress(OSError):
                self._connection.close()
            self._connection = None


def press(
    server: Server,
    model: str,
    inputs: Sequence[dict[str, Array]],
    expected: Sequence[Array],
    clients: int,
    requests: int,
    *,
    tolerance: float,
    again: bool = False,
) -> Load:
    """Let clients ask a model at once.

    Args:
        server: that serves it.
        model: of one output.
        inputs: of every request, by name; clients begin at different places.
        expected: the output for each.
        clients: how many ask at once.
        requests: how many each sends.
        tolerance: how far an answer may be off, relative in the norm.
        again: whether a request that gets no answer is sent again.
    """
    wire = [request_of(server.http, model, values) for values in inputs]
    places = [[place % len(wire) for place in range(n * requests, (n + 1) * requests)] for n in range(clients)]
    asking = [Client(server.http, [wire[place] for place in own], again) for own in places]
    threads = [threading.Thread(target=client.run) for client in asking]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    outcome = Load(seconds=time.perf_counter() - start)
    for client, own in zip(asking, places, strict=True):
        outcome.milliseconds += client.milliseconds
        outcome.asked_again += client.asked_again
        outcome.errors += client.answers.count(None)
        outcome.error = outcome.error or client.error
        outcome.wrong += sum(
            answer is not None and not is_right(output_of(answer), expected[place], tolerance)
            for answer, place in zip(client.answers, own, strict=True)
        )
    return outcome


def request_of(address: str, model: str, values: dict[str, Array]) -> bytes:
    """A request as it goes over the wire."""
    made: Any = tritonclient.http.InferenceServerClient.generate_request_body(inputs_of("http", values))
    body, header_length = made
    lines = [
        f"POST /v2/models/{model}/infer HTTP/1.1",
        f"Host: {address}",
        "Content-Type: application/octet-stream",
        f"Inference-Header-Content-Length: {header_length}",
        f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + bytes(body)


def output_of(answer: bytes) -> Array:
    """The first output of an answer that came over the wire."""
    head = answer.find(b"\r\n\r\n") + 4
    length = _HEADER_LENGTH.search(answer, 0, head)
    header_length = int(length[1]) if length is not None else None
    parsed: Any = tritonclient.http.InferenceServerClient.parse_response_body(
        answer[head:], header_length=header_length
    )
    output: Array = parsed.as_numpy(parsed.get_response()["outputs"][0]["name"])
    return output
