"""The model class for packaged bundles in Triton's Python backend; the repository's `model.py` imports it.

https://github.com/triton-inference-server/python_backend#usage
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attnforge.bundle import Bundle
from attnforge.errors import UsageError, first_line
from attnforge.runtime.session import load
from attnforge.serving.batching import Answer, Joiner
from attnforge.serving.triton.tensors import array_of, tensor_of

FOLDER = "bundle"
"""The folder of the bundle, next to `model.py`."""

SESSION, THREADS = "session", "threads"
"""The configuration's parameters for loading the bundle."""


class TritonPythonModel:
    """A bundle served by Triton: complete, unaltered, and signed if `ATTNFORGE_TRUSTED` requires it."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Open the bundle, and check all its files.

        Args:
            args: Triton's arguments: the model's folder, and its configuration.

        Raises:
            AttnforgeError: the bundle cannot be opened; the server logs why, and the model does not become ready.
        """
        self._backend: Any = importlib.import_module("triton_python_backend_utils")  # provided by the server
        config = json.loads(args["model_config"])
        settings = {name: value["string_value"] for name, value in config.get("parameters", {}).items()}
        self._session = load(
            Bundle(Path(args["model_repository"]) / args["model_version"] / FOLDER),
            settings.get(SESSION, "auto"),
            threads=int(settings[THREADS]) if THREADS in settings else None,
            device=int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else 0,
        )
        self._inputs = {spec.name: spec for spec in self._session.inputs}
        self._joiner = Joiner(self._session, join=config["max_batch_size"] > 0)
        self._memory = self._measured(args)

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer the requests that Triton gathered, with one call if they can be joined."""
        feeds = [
            {tensor.name(): array_of(tensor, self._inputs[tensor.name()]) for tensor in request.inputs()}
            for request in requests
        ]
        answers = self._joiner.answers(feeds)
        return [self._response(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def finalize(self) -> None:
        """Close the session."""
        self._session.close()

    def _measured(self, args: Mapping[str, str]) -> list[Any]:
        """Return metrics with the memory of this instance's loaded Session, exported by the server. Triton drops
        metrics without references, hence the list."""
        family = self._backend.MetricFamily(
            name="attnforge_memory_bytes",
            description="Bytes that a Session of attnforge holds",
            kind=self._backend.MetricFamily.GAUGE,
        )
        metrics: list[Any] = [family]
        about = {"model": args["model_name"], "version": args["model_version"], "instance": args["model_instance_name"]}
        for what in ("weights", "activations", "buffers", "pinned"):
            if (size := getattr(self._session.memory, what)) is not None:
                metric = family.Metric(labels={**about, "backend": self._session.backend, "what": what})
                metric.set(size)
                metrics.append(metric)
        return metrics

    def _response(self, request: Any, answer: Answer) -> Any:
        if isinstance(answer, BaseException):
            error = self._backend.TritonError
            code = error.INVALID_ARG if isinstance(answer, UsageError) else error.INTERNAL
            return self._backend.InferenceResponse([], error(first_line(answer), code))
        wanted, make = request.requested_output_names(), self._backend.Tensor.from_dlpack
        return self._backend.InferenceResponse(
            [tensor_of(name, array, make) for name, array in answer.items() if name in wanted]
        )
