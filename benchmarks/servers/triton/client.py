"""Clients of a model on a Triton server, over HTTP or gRPC, called like a Session: inputs and outputs by name."""

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
"""The modules of tritonclient, which define the same names."""

HEADER = "Inference-Header-Content-Length"
"""The header with the length of the JSON at the start of a body, before the binary data of the arrays."""

PATIENCE = 60.0
"""Timeout of an answer, in seconds."""


@contextmanager
def client_of(server: Server, protocol: str) -> Iterator[Any]:
    """Return a client of tritonclient that is closed at the end of the block."""
    address = server.http if protocol == "http" else server.grpc
    patience = {"network_timeout": PATIENCE, "connection_timeout": PATIENCE} if protocol == "http" else {}
    client = PROTOCOLS[protocol].InferenceServerClient(address, **patience)
    try:
        yield client
    finally:
        client.close()


def inputs_of(protocol: str, values: Mapping[str, Array]) -> list[Any]:
    """Convert arrays to inputs of a request."""
    inputs = []
    for name, array in values.items():
        tensor = PROTOCOLS[protocol].InferInput(name, list(array.shape), DATATYPES[array.dtype.name])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def asking(client: Any, protocol: str, model: str, version: int = 1) -> Run:
    """Return a function that runs the model with one request."""

    def run(values: Mapping[str, Array]) -> dict[str, Array]:
        answer = client.infer(model, inputs_of(protocol, values), model_version=str(version))
        outputs = answer.get_response()["outputs"] if protocol == "http" else answer.get_response().outputs
        names = [output["name"] if protocol == "http" else output.name for output in outputs]
        return {name: answer.as_numpy(name) for name in names}

    return run


def connecting(server: Server, model: str, inputs: Sequence[Mapping[str, Array]]) -> Callable[[], Ask]:
    """Return a function that opens a persistent connection for a client; request bodies are built by tritonclient.

    Args:
        server: server of the model.
        model: name of a model with one output.
        inputs: inputs of every request, by name.
    """
    client: Any = tritonclient.http.InferenceServerClient
    made = [client.generate_request_body(inputs_of("http", values)) for values in inputs]

    def connect() -> Ask:
        pool = urllib3.connectionpool.connection_from_url(f"http://{server.http}", timeout=PATIENCE, retries=False)

        def ask(index: int) -> Callable[[], Array]:
            body, length = made[index]
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
    """Return the first output of an answer."""
    parsed: Any = tritonclient.http.InferenceServerClient.parse_response_body(
        body, header_length=None if header_length is None else int(header_length)
    )
    output: Array = parsed.as_numpy(parsed.get_response()["outputs"][0]["name"])
    return output
