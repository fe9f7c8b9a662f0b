"""Peers in ONNX Runtime: the bundle's canonical step, with the caches of other exporters.

- In optimum's style `past` is an input and `present` an output, longer by the new tokens: each step copies every cache.
  Here Concat replaces TensorScatter. Attention is the standard operator, or what transformers' code exports to: keys
  and values repeated for the heads that share them, two products and a softmax.
- onnxruntime-genai's models have `com.microsoft::GroupQueryAttention` with `do_rotary`: the operator rotates queries
  and keys, and updates the caches in place. attnforge's decoder runs such a graph.

Everything else is the graph from which attnforge's lowering starts, so a peer differs only in its caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.bench.contenders.decoding.stepper import Marking, OfDecoder, Stepper
from attnforge.bench.contenders.peers import PeerJob
from attnforge.bundle import CANONICAL, NEXT
from attnforge.errors import UnavailableError
from attnforge.export.attention.canonicalize import Site
from attnforge.export.diagnosis.stages import sites_of
from attnforge.export.graphs.build import Builder, constant, dims_of, insert, like, replace_value, resized, up_to
from attnforge.export.graphs.nodes import input_of, inputs_of
from attnforge.export.graphs.saving import SHELVED, load_graph, save
from attnforge.export.lowering.attention import attentions, write
from attnforge.export.lowering.onnxruntime import GROUP_QUERY_CACHE, candidates_for
from attnforge.runtime.backends.onnxruntime import OnnxRuntime, bind_host_input, host_value, session_options
from attnforge.runtime.backends.whole_sequences import WholeSequences

PAST_TOKENS, TOTAL_TOKENS = "past_tokens", "past_tokens + tokens"
"""Symbols of the dims of growing caches."""


def concat(job: PeerJob, stack: ExitStack) -> Stepper:
    """Caches by concatenation, and the standard Attention operator."""
    return Growing(job, _file(job, "concat", by_concatenation))


def concat_products(job: PeerJob, stack: ExitStack) -> Stepper:
    """Caches by concatenation, and attention as products around a softmax."""
    return Growing(job, _file(job, "concat-products", by_concatenation, as_products))


def genai_operator(job: PeerJob, stack: ExitStack) -> Stepper:
    """GroupQueryAttention that rotates queries and keys, and updates the caches in place."""
    sites = sites_of(job.bundle.manifest.attention)
    file, manifest = _file(job, "genai-operator", lambda model: with_rotary_operator(model, sites)), job.bundle.manifest
    backend = OnnxRuntime(file.stem, file, manifest.graph_inputs, manifest.graph_outputs, job.threads)
    stack.callback(backend.close)
    return OfDecoder(WholeSequences(backend, manifest).decoder(job.batch), job.output)


def _file(job: PeerJob, name: str, *changes: Callable[[ir.Model], None]) -> Path:
    """Return a file with the canonical step, modified by `changes`; it is written once.

    Raises:
        UnavailableError: the bundle is not in fp32.
    """
    if job.precision.name != "fp32":
        raise UnavailableError(f"the bundle is in {job.precision.name}; this peer is built from fp32 graphs only")

    def write_file(file: Path) -> None:
        model = load_graph(job.bundle, CANONICAL)
        for change in changes:
            change(model)
        save(model, file, SHELVED)

    return job.file(f"{name}.onnx", write_file)


# --- graphs -----------------------------------------------------------------------------------------------------------


def by_concatenation(model: ir.Model) -> None:
    """Make every cache of a canonical step grow by Concat; modifies the model. The input is
    `(batch, heads, past tokens, size)`, the output has the new tokens appended. All samples have the same length."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "TensorScatter"]:
        cache, new, _ = inputs_of(node)
        resized(cache, cache, 2, ir.SymbolicDim(PAST_TOKENS))

        def build(op: Builder, cache: ir.Value = cache, new: ir.Value = new) -> ir.Value:
            return op.Concat(cache, new, axis=2)

        longer, old = insert(graph, node, build), node.outputs[0]
        replace_value(old, longer)
        resized(longer, cache, 2, ir.SymbolicDim(TOTAL_TOKENS))
    masks: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        key, mask = input_of(node, 1), input_of(node, 3)
        if mask not in masks:  # the mask covers the whole capacity of the bundle's caches; these have only filled slots
            masks[mask] = insert(graph, node, partial(_of_filled, mask=mask, key=key), stem=f"{mask.name}/filled")
        node.replace_input_with(3, masks[mask])
    RemoveUnusedNodesPass()(model)


def _of_filled(op: Builder, mask: ir.Value, key: ir.Value) -> ir.Value:
    return up_to(op, mask, 3, op.Shape(key, start=2, end=3), ir.SymbolicDim(TOTAL_TOKENS))


def as_products(model: ir.Model) -> None:
    """Decompose Attention of a step as transformers does; modifies the model. Keys and values are repeated for the
    heads that share them, followed by two products with a softmax between them.

    Raises:
        UnavailableError: scores have a soft cap, which this form does not support.
    """
    graph = model.graph
    biases: dict[ir.Value, ir.Value] = {}
    for node in [node for node in graph if node.op_type == "Attention"]:
        if node.attributes.get_float("softcap", 0.0):
            raise UnavailableError("its scores have a soft cap, which this form of attention does not support")
        mask = input_of(node, 3)
        if mask not in biases:
            biases[mask] = insert(graph, node, partial(_bias, mask=mask), stem=f"{mask.name}/bias")
        result = insert(graph, node, partial(_products, node=node, bias=biases[mask]), stem=f"{node.name}/products")
        replace_value(node.outputs[0], result)
    RemoveUnusedNodesPass()(model)


def _bias(op: Builder, mask: ir.Value) -> ir.Value:
    """Return 0 where a query may attend, and the most negative number elsewhere; a numeric mask as it is."""
    if mask.dtype != ir.DataType.BOOL:
        return mask
    least = float(np.finfo(np.float32).min)
    float32 = ir.DataType.FLOAT
    return like(op.Where(mask, constant(op, 0.0, float32), constant(op, least, float32)), mask, float32)


def _products(op: Builder, node: ir.Node, bias: ir.Value) -> ir.Value:
    query, key, value = inputs_of(node)[:3]
    (_, heads, _, size), (_, key_heads, *_) = dims_of(query), dims_of(key)
    if not (isinstance(heads, int) and isinstance(key_heads, int) and isinstance(size, int)):
        raise UnavailableError(f"the number of heads of {node.name} is unknown")
    scale, groups = node.attributes.get_float("scale", 1 / math.sqrt(size)), heads // key_heads
    assert scale is not None

    def repeated(operand: ir.Value) -> ir.Value:
        if groups == 1:
            return operand
        wide = op.Expand(op.Unsqueeze(operand, constant(op, [2])), constant(op, [1, 1, groups, 1, 1]))
        ends = [op.Shape(operand, start=i, end=i + 1) for i in (0, 2, 3)]
        return op.Reshape(wide, op.Concat(ends[0], constant(op, [heads]), *ends[1:], axis=0))

    scores = op.MatMul(query, op.Transpose(repeated(key), perm=[0, 1, 3, 2]))
    scores = op.Add(op.Mul(scores, constant(op, scale, ir.DataType.FLOAT)), bias)
    return op.MatMul(op.Softmax(scores, axis=-1), repeated(value))


def with_rotary_operator(model: ir.Model, sites: list[Site]) -> None:
    """Replace rotation, cache update and attention with GroupQueryAttention; modifies the model.

    Raises:
        UnavailableError: the operator does not support the heads of a site; or its queries and keys are not rotated by
            tables right before attention, as the operator does it.
    """
    for site, attention in attentions(model, sites):
        candidates = {candidate.form: candidate for candidate in candidates_for(site.name, attention)}
        if GROUP_QUERY_CACHE not in candidates:
            raise UnavailableError(f"the operator does not support the heads of {site.name}")
        write(model.graph, attention, candidates[GROUP_QUERY_CACHE])
    RemoveUnusedNodesPass()(model)
    written = [node for node in model.graph if node.op_type == "GroupQueryAttention"]
    if not all(node.attributes.get_int("do_rotary", 0) for node in written):
        raise UnavailableError("its queries or keys are not rotated right before attention, as the operator does")


# --- the runner -------------------------------------------------------------------------------------------------------


class Growing(Marking[tuple[int, dict[str, Any]]]):
    """Caches that are passed in and out as ONNX Runtime values, longer each time, without copies between steps.

    The state is the number of tokens and the caches by name.
    """

    def __init__(self, job: PeerJob, file: Path) -> None:
        self._session: Any = ort.InferenceSession(
            str(file), session_options(job.threads), providers=["CPUExecutionProvider"]
        )
        self._decoding, self._output, empty = job.decoding, job.output, {}
        for spec in job.decoding.tensors:
            heads, _, size = (dim for dim in spec.dims[1:] if isinstance(dim, int))
            empty[spec.name] = host_value(np.zeros((job.batch, heads, 0, size), np.dtype(spec.dtype)))
        super().__init__((0, empty))

    def extend(self, tokens: Array) -> Array:
        (past, caches), binding = self._now, self._session.io_binding()
        bind_host_input(binding, self._decoding.tokens, np.ascontiguousarray(tokens))
        bind_host_input(binding, self._decoding.past, np.full(len(tokens), past, np.int64))
        if self._decoding.kept is not None:  # the logits of the last token alone
            bind_host_input(binding, self._decoding.kept, np.array([tokens.shape[1] - 1], np.int64))
        binding.bind_output(self._output, "cpu")
        for name, value in caches.items():
            binding.bind_ortvalue_input(name, value)
            binding.bind_output(f"{name}{NEXT}", "cpu")
        self._session.run_with_iobinding(binding)
        logits, *longer = binding.get_outputs()
        self._now = past + tokens.shape[1], dict(zip(caches, longer, strict=True))
        last: Array = logits.numpy()[:, -1]
        return last
