"""Requests that are joined along the batch into one call, whose outputs are cut apart again.

A leading dim that several requests may share is a batch only where its samples do not meet: of tokens without a batch,
say, requests that are joined would attend to each other. :func:`batch_of` reads the manifest for dims that lead, and
:func:`why_not_apart` runs two samples together and alone.
"""

from __future__ import annotations

import ast
import functools
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
"""What a request gets: the outputs by name, or why there are none."""

APART = 16
"""How many floors of its precision a sample's output may differ by when another sample is beside it: kernels that sum
in another order for another batch stay below, and samples that attend to each other are far above."""


class Runs(Protocol):
    """A Session, or what stands for one."""

    @property
    def inputs(self) -> list[TensorSpec]: ...

    @property
    def outputs(self) -> list[TensorSpec]: ...

    def run(self, values: Request, /) -> dict[str, Array]:
        """The outputs by name."""


def batch_of(manifest: Manifest) -> DimSpec | str:
    """The dynamic dim that leads every input and every output and stands nowhere else, from size 1 on; or why there is
    none."""
    if not manifest.inputs or not isinstance(next(iter(manifest.inputs[0].dims), None), DimSpec):
        return "its first input leads with no dynamic dim"
    batch = leading_dim(manifest)
    if isinstance(batch, DimSpec) and batch.min != 1:
        return f"{batch.symbol} is {batch.min} at least, and a request may have one sample"
    return batch


def leading_dim(manifest: Manifest) -> DimSpec | str:
    """The dim that leads every input and every output, and that stands nowhere else if it is dynamic; or why there is
    none. A dim of one size has that size as its symbol."""
    first = manifest.inputs[0].dims[:1] if manifest.inputs else []
    if not first:
        return "its first input has no dims"
    if isinstance(first[0], int):
        return _static_dim(manifest, first[0])
    batch = first[0]
    for kind, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            if not spec.dims or not _is(spec.dims[0], batch):
                return f"{kind} {spec.name} is {spec.text()} and does not lead with {batch.symbol}"
            if any(batch.symbol in symbols_of(dim) for dim in spec.dims[1:]):
                return f"{kind} {spec.name} is {spec.text()} and has {batch.symbol} in a further dim"
    return batch


def _static_dim(manifest: Manifest, size: int) -> DimSpec | str:
    for kind, specs in (("input", manifest.inputs), ("output", manifest.outputs)):
        for spec in specs:
            if spec.dims[:1] != [size]:
                return f"{kind} {spec.name} is {spec.text()} and does not lead with {size}"
    return DimSpec(symbol=str(size), min=size, opt=size, max=size)


def _is(dim: int | DimSpec, batch: DimSpec) -> bool:
    return isinstance(dim, DimSpec) and (dim.symbol, dim.factor) == (batch.symbol, 1) == (batch.symbol, batch.factor)


def symbols_of(dim: int | DimSpec) -> set[str]:
    """The symbols that decide a dim's size; an expression that is no Python is a symbol of its own."""
    if isinstance(dim, int):
        return set()
    try:
        return {node.id for node in ast.walk(ast.parse(dim.symbol)) if isinstance(node, ast.Name)} or {dim.symbol}
    except (SyntaxError, RecursionError, MemoryError):
        return {dim.symbol}


def why_not_apart(session: Session, batch: DimSpec) -> str | None:
    """Why requests must not be joined: a sample's outputs depend on what is beside it in the batch. None where they do
    not, by a run of two samples together and of each alone, repeated where the batch may not be as small as that.

    Args:
        session: of the model.
        batch: the dim that leads its inputs and outputs, as :func:`leading_dim` gives it.
    """
    manifest = session.bundle.manifest
    least = batch.min or 1
    if (batch.max or 0) < 2:
        return None  # one sample has nobody beside it
    sizes = {} if batch.symbol.isdecimal() else {batch.symbol: max(2, least)}
    try:
        pair = reference.make_inputs(reference.at(manifest.inputs, sizes), manifest.inputs, {})
        together = session.run(pair)
        for place in (slice(0, 1), slice(1, 2)):
            alone = session.run({name: np.repeat(array[place], least, 0) for name, array in pair.items()})
            for name, array in alone.items():
                if not _alike(array[:1], together[name][place], APART * precision_named(manifest.precision).floor):
                    return f"{name} of a sample is another with another sample beside it, so {batch.symbol} is no batch"
    except AttnforgeError as error:
        return f"{session.backend} does not run it with a {batch.symbol} of 1 and 2: {first_line(error)}"
    return None


def _alike(alone: Array, beside: Array, most: float) -> bool:
    if alone.shape != beside.shape or not is_floating(alone):
        return bool(np.array_equal(alone, beside))
    alone, beside = alone.astype(np.float64), beside.astype(np.float64)
    finite = np.isfinite(alone)
    if not np.array_equal(finite, np.isfinite(beside)):
        return False
    return relative_error(beside[finite], alone[finite]) <= most


class Joiner:
    """Answers several requests by one call of a session where their shapes allow it. What is wrong with one request is
    that request's error, and no other's.

    Args:
        session: runs the model.
        join: whether requests may be joined along their leading dim.
        most: samples in one call, where the caller may bring requests that have more together.
    """

    def __init__(self, session: Runs, join: bool, most: int | None = None) -> None:
        self._session, self._join, self._most = session, join, most
        self._check: Callable[..., object] = functools.lru_cache(4096)(
            functools.partial(shapes_of, session.inputs, session.outputs)
        )

    def answers(self, requests: Sequence[Request]) -> list[Answer]:
        """The answer to every request, in order.

        Args:
            requests: of each the inputs by name.
        """
        if not self._join or len(requests) == 1:
            return [self._alone(request) for request in requests]
        specs = self._session.inputs
        answers: dict[int, Answer] = {}
        read: dict[int, Request] = {}
        alike: dict[object, list[int]] = {}
        for place, request in enumerate(requests):
            try:
                values = zip(specs, in_order(specs, request), strict=True)
                arrays = {spec.name: on_host(spec, value) for spec, value in values}
                self._check(*((array.shape, array.dtype) for array in arrays.values()))
            except (InputError, MemoryError) as error:
                answers[place] = error
            else:
                read[place] = arrays
                alike.setdefault(tuple(array.shape[1:] for array in arrays.values()), []).append(place)
        for places in (part for every in alike.values() for part in self._parts(every, read)):
            answers.update(zip(places, self._together([read[place] for place in places]), strict=True))
        return [answers[place] for place in range(len(requests))]

    def _parts(self, places: list[int], requests: Mapping[int, Request]) -> Iterator[list[int]]:
        """The places of requests that are joined, so that no call has more samples than it may."""
        first = self._session.inputs[0].name
        part, size = [places[0]], len(requests[places[0]][first])
        for place in places[1:]:
            samples = len(requests[place][first])
            if self._most is not None and size + samples > self._most:
                yield part
                part, size = [], 0
            part, size = [*part, place], size + samples
        yield part

    def _alone(self, request: Request) -> Answer:
        try:
            return self._session.run(request)
        except (AttnforgeError, MemoryError) as error:
            return error

    def _together(self, requests: Sequence[Request]) -> list[Answer]:
        """The answers to requests that differ in their number of samples alone. Where the joint call fails, each is run
        alone: the values of one may be the reason."""
        if len(requests) == 1:
            return [self._alone(requests[0])]
        names = [spec.name for spec in self._session.inputs]
        try:
            joint = self._session.run({name: np.concatenate([request[name] for request in requests]) for name in names})
        except (AttnforgeError, MemoryError):
            return [self._alone(request) for request in requests]
        ends = np.cumsum([len(request[names[0]]) for request in requests]).tolist()
        places = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        return [{name: array[place] for name, array in joint.items()} for place in places]


def is_open(spec: TensorSpec, inputs: Sequence[TensorSpec]) -> bool:
    """Whether an output's shape is decided by the inputs' values, and not by their sizes alone."""
    known = {symbol for tensor in inputs for dim in tensor.dims for symbol in symbols_of(dim)}
    return any(not symbols_of(dim) <= known for dim in spec.dims)
