"""Batching: requests are joined along the batch into one call, whose outputs are split again.

A leading dim that several requests share is a batch dimension only if its samples are independent: with tokens but no
batch, for example, joined requests would attend to each other. :func:`batch_of` finds the leading dim in the manifest,
and :func:`why_not_apart` runs two samples together and alone.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from attnforge.arrays import Array, is_floating
from attnforge.bundle import DimSpec, Manifest, TensorSpec
from attnforge.errors import AttnforgeError, InputError, first_line
from attnforge.precision import precision_named
from attnforge.runtime import cases as reference
from attnforge.runtime.inputs import in_order, on_host, shapes_of
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.session import Session

Request = Mapping[str, Array]
Answer = dict[str, Array] | AttnforgeError | MemoryError
"""The answer to a request: the outputs by name, or the error."""

APART = 16
"""Maximum change of a sample's output, in floors of the precision, when another sample joins the batch: kernels whose
order of summation depends on the batch stay below, and samples that attend to each other are far above."""


class Runs(Protocol):
    """A Session, or an object with the same interface."""

    @property
    def inputs(self) -> list[TensorSpec]: ...

    @property
    def outputs(self) -> list[TensorSpec]: ...

    def run(self, values: Request, /) -> dict[str, Array]:
        """Return the outputs by name."""


def batch_of(manifest: Manifest) -> DimSpec | str:
    """Return the dynamic dim that leads every input and every output, occurs nowhere else and allows size 1; or why
    there is none."""
    if not manifest.inputs or not isinstance(next(iter(manifest.inputs[0].dims), None), DimSpec):
        return "its first input does not lead with a dynamic dim"
    batch = leading_dim(manifest)
    if isinstance(batch, DimSpec) and batch.min != 1:
        return f"{batch.symbol} is at least {batch.min}, but a request may have one sample"
    return batch


def leading_dim(manifest: Manifest) -> DimSpec | str:
    """Return the dim that leads every input and every output, and that occurs nowhere else if it is dynamic; or why
    there is none. A static dim has its size as its symbol."""
    if not manifest.inputs or not manifest.inputs[0].dims:
        return "its first input has no dims"
    lead = manifest.inputs[0].dims[0]
    batch = lead if isinstance(lead, DimSpec) else DimSpec(symbol=str(lead), min=lead, opt=lead, max=lead)
    for kind, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            if not spec.dims or not _is(spec.dims[0], lead):
                return f"{kind} {spec.name} is {spec.text()} and does not lead with {batch.symbol}"
            if batch is lead and any(batch.symbol in symbols_of(dim) for dim in spec.dims[1:]):
                return f"{kind} {spec.name} is {spec.text()} and has {batch.symbol} in a further dim"
    return batch


def _is(dim: int | DimSpec, lead: int | DimSpec) -> bool:
    if isinstance(dim, int) or isinstance(lead, int):
        return dim == lead
    return (dim.symbol, dim.factor) == (lead.symbol, 1) == (lead.symbol, lead.factor)


def symbols_of(dim: int | DimSpec) -> set[str]:
    """Return the symbols that determine a dim's size: the names in its expression, or the whole text without any."""
    return set() if isinstance(dim, int) else set(re.findall(r"\b[^\W\d]\w*", dim.symbol)) or {dim.symbol}


def why_not_apart(session: Session, batch: DimSpec) -> str | None:
    """Return why requests must not be joined, because a sample's outputs depend on the rest of the batch; None if they
    do not. Runs two samples together and each alone, repeated if the batch may not be that small.

    Args:
        session: session of the model.
        batch: the dim that leads its inputs and outputs, from :func:`leading_dim`.
    """
    manifest = session.bundle.manifest
    least = batch.min or 1
    if (batch.max or 0) < 2:
        return None  # a single sample is always alone
    sizes = {} if batch.symbol.isdecimal() else {batch.symbol: max(2, least)}
    try:
        pair = reference.make_inputs(reference.at(manifest.inputs, sizes), manifest.inputs, {})
        together = session.run(pair)
        for part in (slice(0, 1), slice(1, 2)):
            alone = session.run({name: np.repeat(array[part], least, 0) for name, array in pair.items()})
            for name, array in alone.items():
                if not _alike(array[:1], together[name][part], APART * precision_named(manifest.precision).floor):
                    return (
                        f"output {name} of a sample changes with the rest of the batch, so {batch.symbol} is not a "
                        "batch dimension"
                    )
    except AttnforgeError as error:
        return f"{session.backend} cannot run it with a {batch.symbol} of 1 and 2: {first_line(error)}"
    return None


def _alike(alone: Array, joined: Array, most: float) -> bool:
    if alone.shape != joined.shape or not is_floating(alone):
        return bool(np.array_equal(alone, joined))
    alone, joined = alone.astype(np.float64), joined.astype(np.float64)
    finite = np.isfinite(alone)
    if not np.array_equal(finite, np.isfinite(joined)):
        return False
    return relative_error(joined[finite], alone[finite]) <= most


class Joiner:
    """Answers several requests with one call of a session if their shapes allow it. An invalid request affects only its
    own answer.

    Args:
        session: runs the model.
        join: whether requests may be joined along their leading dim.
        most: maximum samples per call, if the caller may pass requests with more in total.
    """

    def __init__(self, session: Runs, join: bool, most: int | None = None) -> None:
        self._session, self._join, self._most = session, join, most
        self._check: Callable[..., object] = functools.lru_cache(4096)(
            functools.partial(shapes_of, session.inputs, session.outputs)
        )

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answer to every request, in order.

        Args:
            requests: the inputs of each request, by name.
        """
        if not self._join or len(requests) == 1:
            return [self._alone(request) for request in requests]
        specs = self._session.inputs
        answers: dict[int, Answer] = {}
        read: dict[int, Request] = {}
        alike: dict[object, list[int]] = {}
        for index, request in enumerate(requests):
            try:
                values = zip(specs, in_order(specs, request), strict=True)
                arrays = {spec.name: on_host(spec, value) for spec, value in values}
                self._check(*((array.shape, array.dtype) for array in arrays.values()))
            except (InputError, MemoryError) as error:
                answers[index] = error
            else:
                read[index] = arrays
                alike.setdefault(tuple(array.shape[1:] for array in arrays.values()), []).append(index)
        for indices in (part for every in alike.values() for part in self._parts(every, read)):
            answers.update(zip(indices, self._together([read[index] for index in indices]), strict=True))
        return [answers[index] for index in range(len(requests))]

    def _parts(self, indices: list[int], requests: Mapping[int, Request]) -> Iterator[list[int]]:
        """Yield the indices of requests to join, so that no call exceeds the maximum number of samples."""
        first = self._session.inputs[0].name
        part, size = [indices[0]], len(requests[indices[0]][first])
        for index in indices[1:]:
            samples = len(requests[index][first])
            if self._most is not None and size + samples > self._most:
                yield part
                part, size = [], 0
            part, size = [*part, index], size + samples
        yield part

    def _alone(self, request: Request) -> Answer:
        try:
            return self._session.run(request)
        except (AttnforgeError, MemoryError) as error:
            return error

    def _together(self, requests: Sequence[Request]) -> list[Answer]:
        """Return the answers to requests that differ only in their number of samples. If the joint call fails, each is
        run alone, because the values of one of them may be the reason."""
        if len(requests) == 1:
            return [self._alone(requests[0])]
        names = [spec.name for spec in self._session.inputs]
        try:
            joint = self._session.run({name: np.concatenate([request[name] for request in requests]) for name in names})
        except (AttnforgeError, MemoryError):
            return [self._alone(request) for request in requests]
        ends = np.cumsum([len(request[names[0]]) for request in requests]).tolist()
        parts = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return [{name: array[part] for name, array in joint.items()} for part in parts]


def is_open(spec: TensorSpec, inputs: Sequence[TensorSpec]) -> bool:
    """Return whether an output's shape depends on the inputs' values, not only on their sizes."""
    known = {symbol for tensor in inputs for dim in tensor.dims for symbol in symbols_of(dim)}
    return any(not symbols_of(dim) <= known for dim in spec.dims)
