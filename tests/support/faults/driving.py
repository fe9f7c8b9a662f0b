"""Run decoders over a deployed step or over the same step in float64, correctly or with a mistake."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from attnforge.arrays import Array
from attnforge.bundle import Bundle, Manifest
from attnforge.export.graphs.build import Builder, constant, insert
from attnforge.export.graphs.float64 import to_double
from attnforge.export.graphs.types import DOUBLE
from attnforge.memory import available
from attnforge.runtime.backends.backend import Backend, Options
from attnforge.runtime.backends.onnxruntime import session_options
from attnforge.runtime.backends.registry import REGISTRY
from attnforge.runtime.backends.whole_sequences import WholeSequences
from attnforge.runtime.decoding.decoder import Decoder, Stepping
from attnforge.runtime.parity.verify import BackendReport, hold
from attnforge.runtime.session import Session
from tests.support.faults.graph import required

BACKEND = "onnxruntime-cpu"


class Driven(WholeSequences):
    """Runs whole sequences and schedules with a given decoder class."""

    def __init__(self, backend: Backend, manifest: Manifest, kind: type[Decoder] = Decoder) -> None:
        super().__init__(backend, manifest)
        self._kind = kind

    def decoder(self, batch: int) -> Decoder:
        return self._kind(cast(Stepping, self._backend), self._manifest, batch)

    def given(self, order: str | None, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Return the outputs, by name, for an order of the tokens; None gives all tokens at once."""
        if order is not None:
            return self.by_schedule(order, feeds)
        (tokens,) = feeds.values()
        return {name: np.stack(rows) for name, rows in self.decoder(len(tokens)).extend(tokens).items()}


def verified(bundle: Bundle, kind: type[Decoder]) -> BackendReport:
    """Verify a bundle whose steps are run by a given decoder class."""
    backend = REGISTRY[BACKEND].open(bundle, Options())
    with Session(bundle, Driven(backend, bundle.manifest, kind)) as session:
        return hold(bundle, BACKEND, session.run, schedules=session.schedules)


# --- steps in float64 -------------------------------------------------------------------------------------------------


BIAS = 10
"""Index of GroupQueryAttention's input that is added to the scores."""


class DoubleSteps:
    """A step in float64, whose input and output caches are separate buffers.

    Args:
        model: a deployed step; it is modified.
    """

    name, gpu = "float64", None
    new_cache, free_bytes = staticmethod(np.zeros), staticmethod(available)

    def __init__(self, model: ir.Model) -> None:
        for node in list(model.graph):
            if node.op_type == "GroupQueryAttention":
                _decompose(model.graph, node)
        to_double(model)
        options = session_options(threads=1)
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        self._session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, ["CPUExecutionProvider"])
        self._taken = {value.name for value in self._session.get_inputs()}

    def bound(self, inputs: Mapping[str, Array], outputs: Mapping[str, Array]) -> Callable[[], None]:
        feeds = {name: array for name, array in inputs.items() if name in self._taken}

        def run() -> None:
            for array, result in zip(outputs.values(), self._session.run(list(outputs), feeds), strict=True):
                np.copyto(array, result)

        return run

    def dtype_of(self, name: str) -> np.dtype[Any]:
        return np.dtype(np.float64)


def in_double(model: ir.Model, manifest: Manifest, kind: type[Decoder] = Decoder) -> Driven:
    """Return the decoder of a deployed step in float64, with float64 outputs.

    Args:
        model: a deployed step; it is modified.
        manifest: its bundle's manifest.
        kind: the decoder class.
    """
    outputs = [spec.model_copy(update={"dtype": "float64"}) for spec in manifest.outputs]
    wide = manifest.model_copy(update={"outputs": outputs})
    return Driven(cast(Backend, DoubleSteps(model)), wide, kind)


def _decompose(graph: ir.Graph, node: ir.Node) -> None:
    """Replace GroupQueryAttention over a cache with standard operators that match its CPU kernel."""
    results: list[ir.Value] = []

    def build(op: Builder) -> ir.Value:
        results.extend(_over_cache(op, node))
        return results[0]

    insert(graph, node, build, stem=f"{node.name}/in double")
    for old, new in zip(node.outputs, results, strict=True):
        new.type, new.shape = ir.TensorType(DOUBLE), old.shape
        if old.is_graph_output():
            old.name, new.name = f"{old.name}/replaced", old.name
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    graph.remove(node, safe=True)


def _over_cache(op: Builder, node: ir.Node) -> list[ir.Value]:
    query, key, value, key_cache, value_cache, last, total = (required(value) for value in node.inputs[:7])
    attributes = node.attributes
    heads, shared = attributes.get_int("num_heads", 1), attributes.get_int("kv_num_heads", 1)
    assert heads is not None and shared is not None
    query, key, value = (
        op.Transpose(op.Reshape(x, constant(op, [0, 0, count, -1])), perm=[0, 2, 1, 3])
        for x, count in ((query, heads), (key, shared), (value, shared))
    )
    count = op.Gather(op.Shape(query), constant(op, 2))
    last, total = (op.Cast(x, to=ir.DataType.INT64.value) for x in (last, total))
    is_prompt = op.Equal(op.Reshape(total, constant(op, [])), count)
    past = op.Where(is_prompt, constant(op, 0), op.Sub(op.Add(last, constant(op, 1)), count))
    if attributes.get_int("do_rotary", 0):
        rows = op.Range(constant(op, 0), count, constant(op, 1))
        places = op.Add(op.Reshape(past, constant(op, [-1, 1])), op.Unsqueeze(rows, constant(op, [0])))
        tables = [required(node.inputs[i]) for i in (7, 8)]
        query, key = (
            op.RotaryEmbedding(x, *tables, places, interleaved=attributes.get_int("rotary_interleaved", 0))
            for x in (query, key)
        )
    next_key, next_value = (
        op.TensorScatter(cache, new, past, axis=2) for cache, new in ((key_cache, key), (value_cache, value))
    )
    key_heads = constant(op, np.repeat(np.arange(shared), heads // shared))
    keys, values = (op.Gather(x, key_heads, axis=1) for x in (next_key, next_value))
    scale = op.CastLike(constant(op, attributes.get_float("scale", 0.0) or 0.0, DOUBLE), query)
    scores = op.MatMul(op.Mul(query, scale), op.Transpose(keys, perm=[0, 1, 3, 2]))
    if softcap := attributes.get_float("softcap", 0.0):
        cap = op.CastLike(constant(op, softcap, DOUBLE), query)
        scores = op.Mul(op.Tanh(op.Div(scores, cap)), cap)
    if len(node.inputs) > BIAS:  # has as many keys as the longest sample
        bias, slots = required(node.inputs[BIAS]), op.Shape(keys, start=2, end=3)
        missing = op.Sub(slots, op.Shape(bias, start=3, end=4))
        scores = op.Add(scores, op.Pad(bias, op.Concat(constant(op, [0] * 7), missing, axis=0)))
    by_sample = constant(op, [-1, 1, 1, 1])
    columns = op.Range(constant(op, 0), op.Gather(op.Shape(keys), constant(op, 2)), constant(op, 1))
    rows = op.Unsqueeze(op.Range(constant(op, 0), count, constant(op, 1)), constant(op, [1]))
    positions = op.Add(op.Reshape(past, by_sample), rows)
    seen = op.And(op.LessOrEqual(columns, positions), op.LessOrEqual(columns, op.Reshape(last, by_sample)))
    if (window := attributes.get_int("local_window_size", -1)) is not None and window > 0:
        seen = op.And(seen, op.Greater(columns, op.Sub(positions, constant(op, window))))
    hidden = op.CastLike(constant(op, -np.inf, DOUBLE), scores)
    weights = op.Softmax(op.Where(seen, scores, hidden), axis=-1)
    attended = op.Transpose(op.MatMul(weights, values), perm=[0, 2, 1, 3])
    return [op.Reshape(attended, constant(op, [0, 0, -1])), next_key, next_value]


# --- mistakes ---------------------------------------------------------------------------------------------------------


class PromptTooShort(Decoder):
    """A prompt leaves its last token out of the lengths."""

    def _extended(self, rows: Sequence[Array], *how: Any, **named: Any) -> dict[str, list[Array]]:
        answers = super()._extended(rows, *how, **named)
        self._past -= [len(row) > 1 for row in rows]
        return answers


class PromptTooLong(Decoder):
    """A prompt counts one token more, if there is a slot for it."""

    def _extended(self, rows: Sequence[Array], *how: Any, **named: Any) -> dict[str, list[Array]]:
        answers = super()._extended(rows, *how, **named)
        self._past[:] = np.minimum(self._past + [len(row) > 1 for row in rows], self.places - 1)
        return answers


class StepsLost(Decoder):
    """A step after a prompt is not counted, so the next one overwrites it."""

    def _extended(self, rows: Sequence[Array], *how: Any, **named: Any) -> dict[str, list[Array]]:
        had = self._past.copy()
        answers = super()._extended(rows, *how, **named)
        if all(len(row) == 1 for row in rows) and (had > 0).all():
            self._past[:] = had
        return answers


class LengthsOfLongest(Decoder):
    """Every sample has the length of the longest."""

    def _extended(self, rows: Sequence[Array], *how: Any, **named: Any) -> dict[str, list[Array]]:
        answers = super()._extended(rows, *how, **named)
        self._past[:] = self._past.max()
        return answers


class LengthsOfFirst(Decoder):
    """A step has the first sample's length for all."""

    def _run_one(self) -> None:
        lengths = self._past.copy()
        self._past[:] = lengths[0]
        super()._run_one()
        self._past[:] = lengths


class CachesOfFirst(Decoder):
    """Every sample's prompt is written to the first one's caches."""

    def _bound(
        self, tokens: Array, past: Array, kept: Array, outputs: Mapping[str, Array], samples: slice
    ) -> Callable[[], None]:
        first = slice(0, 1) if samples.stop is not None else samples
        return super()._bound(tokens, past, kept, outputs, first)


class PromptFromStart(Decoder):
    """Several tokens are always written from the first slot on, whatever is there."""

    def _bound(
        self, tokens: Array, past: Array, kept: Array, outputs: Mapping[str, Array], samples: slice
    ) -> Callable[[], None]:
        begin = np.zeros_like(past) if tokens.shape[1] > 1 else past
        return super()._bound(tokens, begin, kept, outputs, samples)


class AnswersOfFirst(Decoder):
    """A prompt gives the outputs of its first token."""

    def _bound(
        self, tokens: Array, past: Array, kept: Array, outputs: Mapping[str, Array], samples: slice
    ) -> Callable[[], None]:
        return super()._bound(tokens, past, kept if len(kept) > 1 else np.zeros_like(kept), outputs, samples)


class AnswersOneEarlier(Decoder):
    """A prompt gives the outputs of its last token but one."""

    def _bound(
        self, tokens: Array, past: Array, kept: Array, outputs: Mapping[str, Array], samples: slice
    ) -> Callable[[], None]:
        return super()._bound(tokens, past, kept if len(kept) > 1 else np.maximum(kept - 1, 0), outputs, samples)


class StaleToken(Decoder):
    """The first token that a crop should remove stays visible."""

    def crop(self, lengths: Any) -> None:
        wanted, had = self._lengths(lengths), self._past.copy()
        kept = np.minimum(wanted + 1, had)
        super().crop(kept)


class StaleNumbers(Decoder):
    """The values that a crop removes stay in the caches, but hidden."""

    def crop(self, lengths: Any) -> None:
        before = {name: cache.copy() for name, cache in self._caches.items()}
        super().crop(lengths)
        for name, cache in before.items():
            self._caches[name][:] = cache


class CropOneMore(Decoder):
    """A crop removes one token more, if it removes any."""

    def crop(self, lengths: Any) -> None:
        wanted = self._lengths(lengths)
        super().crop(np.maximum(wanted - (wanted < self._past), 0))


class CropErases(Decoder):
    """A crop also erases the last token that it keeps."""

    def crop(self, lengths: Any) -> None:
        super().crop(lengths)
        for sample, keep in enumerate(self._past):
            for cache in self._caches.values():
                cache[sample, :, max(keep - 1, 0) : keep] = 0


class CropByFirst(Decoder):
    """A crop leaves all samples as long as the first."""

    def crop(self, lengths: Any) -> None:
        wanted = self._lengths(lengths)
        super().crop(np.minimum(wanted[:1], self._past))


class NotReset(Decoder):
    """A reset leaves the first token."""

    def reset(self) -> None:
        self.crop(np.minimum(self._past, 1))


class _Forking(Decoder):
    """A decoder whose forks go wrong in one way."""

    def fork(self, samples: Sequence[int] | None = None) -> Decoder:
        copy = super().fork(samples)
        self.spoil(copy)
        return copy

    def spoil(self, copy: Decoder) -> None:
        raise NotImplementedError


class ForkShares(_Forking):
    """A fork shares the caches instead of copying them."""

    def spoil(self, copy: Decoder) -> None:
        copy._caches = self._caches


class ForkSharesLengths(_Forking):
    """A fork shares the lengths instead of copying them."""

    def spoil(self, copy: Decoder) -> None:
        copy._past = self._past


class ForkOneFewer(_Forking):
    """A fork copies one slot too few."""

    def spoil(self, copy: Decoder) -> None:
        last = int(self._past.max())
        for cache in copy._caches.values():
            cache[:, :, max(last - 1, 0) : last] = 0


class ForkWithoutValues(_Forking):
    """A fork copies only keys."""

    def spoil(self, copy: Decoder) -> None:
        for spec in self._decoding.caches:
            copy._caches[spec.value.name][:] = 0


class ForkReversed(_Forking):
    """A fork has the samples in another order."""

    def spoil(self, copy: Decoder) -> None:
        for name, cache in self._caches.items():
            copy._caches[name][:] = cache[::-1]


class OutputsLost(Decoder):
    """The values that a step writes are lost, as if input and output were separate buffers."""

    def _bound(
        self, tokens: Array, past: Array, kept: Array, outputs: Mapping[str, Array], samples: slice
    ) -> Callable[[], None]:
        run = super()._bound(tokens, past, kept, outputs, samples)
        values = [spec.value.name for spec in self._decoding.caches]

        def lost() -> None:
            before = {name: self._caches[name][samples].copy() for name in values}
            run()
            for name, cache in before.items():
                self._caches[name][samples] = cache

        return lost


class CachesExchanged(Decoder):
    """A step returns the layers' keys in the wrong order."""

    def _bound(
        self, tokens: Array, past: Array, kept: Array, outputs: Mapping[str, Array], samples: slice
    ) -> Callable[[], None]:
        run = super()._bound(tokens, past, kept, outputs, samples)
        first, *_, last = (spec.key.name for spec in self._decoding.caches)

        def exchanged() -> None:
            run()
            before = self._caches[first][samples].copy()
            self._caches[first][samples] = self._caches[last][samples]
            self._caches[last][samples] = before

        return exchanged
