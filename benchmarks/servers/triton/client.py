"""A model behind a Triton server, asked over HTTP or gRPC as a Session is called: inputs and outputs by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import tritonclient.grpc
import tritonclient.http
import urllib3

from attnforge.arrays import Array
from attnforge.runtime.parity.verify import Run
from attnforge.serving.open_inference import DATATYPES
from benchmarks.load import Ask, UnansweredError
from benchmarks.servers.triton.server import Server

PROTOCOLS: dict[str, Any] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
"""The modules of tritonclient, which have the same names in them."""

HEADER = "Inference-Header-Content-Length"
"""The header with the number of bytes of JSON in a body, before the numbers of the arrays."""

PATIENCE = 60.0
"""Seconds that an answer may take."""


@contextmanager
def client_of(server: Server, protocol: str) -> Iterator[Any]:
    """A client of tritonclient, closed where the block ends."""
    address = server.http if protocol == "http" else server.grpc
    patience = {"network_timeout": PATIENCE, "connection_timeout": PATIENCE} if protocol == "http" else {}
    client = PROTOCOLS[protocol].InferenceServerClient(address, **patience)
    try:
        yield client
    finally:
        client.close()


def inputs_of(protocol: str, values: Mapping[str, Array]) -> list[Any]:
    """Arrays as inputs of a request."""
    inputs = []
    for name, array in values.items():
        tensor = PROTOCOLS[protocol].InferInput(name, list(array.shape), DATATYPES[array.dtype.name])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def asking(client: Any, protocol: str, model: str, version: int = 1) -> Run:
    """A run of the model: one request."""

    def run(values: Mapping[str, Array]) -> dict[str, Array]:
        answer = client.infer(model, inputs_of(protocol, values), model_version=str(version))
        outputs = answer.get_response()["outputs"] if protocol == "http" else answer.get_response().outputs
        names = [output["name"] if protocol == "http" else output.name for output in outputs]
        return {name: answer.as_numpy(name) for name in names}

    return run


def connecting(server: Server, model: str, inputs: Sequence[Mapping[str, Array]]) -> Callable[[], Ask]:
    """What gives clients of a load a connection that stays open; requests go over it as tritonclient has made them.

    Args:
        server: that serves the model.
        model: of one output.
        inputs: of every request, by name.
    """
    client: Any = tritonclient.http.InferenceServerClient
    made = [client.generate_request_body(inputs_of("http", values)) for values in inputs]

    def connect() -> Ask:
        pool = urllib3.connectionpool.connection_from_url(f"http://{server.http}", timeout=PATIENCE, retries=False)

        def ask(place: int) -> Callable[[], Array]:
            body, length = made[place]
            head = {"Content-Type": "application/octet-stream", HEADER: str(length)}
            try:
                answer = pool.request("POST", f"/v2/models/{model}/infer", body=body, headers=head)
            except urllib3.exceptions.HTTPError as error:
                raise UnansweredError(str(error)) from error
            if answer.status != 200:
                raise UnansweredError(answer.data.decode(errors="replace"))
            return partial(_output, answer.data, answer.headers.get(HEADER))

        return ask

    return connect


def _output(body: bytes, header_length: str | None) -> Array:
    """The first output of an answer."""
    parsed: Any = tritonclient.http.InferenceServerClient.parse_response_body(
        body, header_length=None if header_length is None else int(header_length)
    )
    output: Array = parsed.as_numpy(parsed.get_response()["outputs"][0]["name"])
    return output
