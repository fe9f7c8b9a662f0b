"""A model behind a Triton server, asked over HTTP or gRPC as a Session is called: inputs and outputs by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import tritonclient.grpc
import tritonclient.http

from attnforge.arrays import Array
from attnforge.runtime.parity.verify import Run
from attnforge.serving.open_inference import DATATYPES
from benchmarks.servers.triton.server import Server

PROTOCOLS: dict[str, Any] = {"http": tritonclient.http, "grpc": tritonclient.grpc}
"""The modules of tritonclient, which have the same names in them."""

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
