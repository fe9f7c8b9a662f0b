"""A bundle as a Ray Serve deployment."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Deployment
from starlette.requests import Request
from starlette.responses import JSONResponse

from attnforge.arrays import Array, to_numpy
from attnforge.bundle import DimSpec
from attnforge.errors import AttnforgeError, InputError, UsageError, first_line
from attnforge.runtime import cases as reference
from attnforge.serving import open_inference
from attnforge.serving.batching import Answer, Joiner, batch_of, why_not_apart
from attnforge.serving.ray.handle import Handle
from attnforge.serving.ray.metrics import observed

ONGOING = 256
"""Maximum concurrent requests of a replica, so that many can be joined; Ray's default is 5."""


class Replica:
    """A bundle whose requests, over handles and HTTP, are joined along the batch; a replica of
    :data:`PredictorDeployment`.

    A replica is ready once it has run the model. Requests that arrive during a call are joined in the next one, if
    samples are independent; an invalid request affects only its own answer.

    Args:
        handle: the bundle.
        max_batch_size: maximum number of joined requests; by default the maximum samples of the bundle, at most
            :data:`ONGOING`.
        batch_wait_timeout_s: seconds that a request may wait for others.

    Raises:
        AttnforgeError: the bundle cannot be opened; see :meth:`Handle.open`.
        UsageError: `max_batch_size` is below 1, or `batch_wait_timeout_s` is negative.
    """

    def __init__(self, handle: Handle, max_batch_size: int | None = None, batch_wait_timeout_s: float = 0.0) -> None:
        if max_batch_size is not None and max_batch_size < 1:
            raise UsageError(f"max_batch_size is {max_batch_size}; give 1 or more")
        if batch_wait_timeout_s < 0:
            raise UsageError(f"batch_wait_timeout_s is {batch_wait_timeout_s}; give 0 or more seconds")
        session = handle.open()
        session.warm_up()
        batch = batch_of(session.bundle.manifest)
        join = isinstance(batch, DimSpec) and why_not_apart(session, batch) is None
        most = batch.max if isinstance(batch, DimSpec) and join else 1
        self._name, self._session = session.bundle.manifest.name, observed(session)
        self._joiner = Joiner(self._session, join, most)
        smallest = reference.at(session.inputs, reference.sizes_at(session.inputs, "min"))
        self._answered_since, self._sample = False, reference.make_inputs(smallest, session.inputs, {})
        self._joined: Any = serve.batch(
            max_batch_size=max_batch_size or min(most or 1, ONGOING), batch_wait_timeout_s=batch_wait_timeout_s
        )(self._answers)

    async def predict(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs by name: `handle.predict.remote({"image": array}).result()`.

        Args:
            inputs: inputs by name.

        Raises:
            InputError: an input is invalid.
            AttnforgeError: the run failed.
        """
        if not isinstance(inputs, Mapping):
            raise InputError(f"inputs are of type {type(inputs).__name__}; give a mapping from names to arrays")
        answer: Answer = await self._joined({name: to_numpy(str(name), value) for name, value in inputs.items()})
        if isinstance(answer, BaseException):
            raise answer
        self._answered_since = True
        return answer

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer an HTTP request: a POST with the Open Inference Protocol's JSON, or a GET for readiness."""
        if request.method == "GET":
            return JSONResponse({"name": self._name, "ready": True})
        try:
            outputs = await self.predict(open_inference.inputs_of(await request.body()))
            return JSONResponse(open_inference.document_of(self._name, outputs))
        except (AttnforgeError, MemoryError) as error:
            return JSONResponse({"error": first_line(error)}, 400 if isinstance(error, UsageError) else 500)

    async def check_health(self) -> None:
        """Run one sample, unless a request was answered since the last check.

        Raises:
            AttnforgeError: the run failed; Ray then replaces the replica.
        """
        answered, self._answered_since = self._answered_since, False
        if not answered:
            await asyncio.to_thread(self._session.session.run, self._sample)

    async def _answers(self, requests: list[Mapping[str, Array]]) -> list[Answer]:
        return await asyncio.to_thread(self._joiner.answers, requests)


PredictorDeployment: Deployment = serve.deployment(name="PredictorDeployment", max_ongoing_requests=ONGOING)(Replica)
"""The deployment, to be bound to the arguments of a :class:`Replica`; replicas, autoscaling, processors, GPUs and the
interval of health checks are Ray's options.

    serve.run(PredictorDeployment.options(num_replicas=2).bind(Handle("digits.bundle")))
"""
