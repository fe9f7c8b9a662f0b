"""Lower canonical attention for OpenVINO: to blocks, where it then computes less of what a mask hides, and to int8
queries and keys in models with int8 products; elsewhere the canonical node stays, which OpenVINO reads and rewrites
itself (:mod:`attnforge.runtime.backends.openvino_graph`).

OpenVINO's one kernel for products around a softmax takes a mask and also computes everything that it hides. In fp32,
with 8 heads of 64 and 4,096 tokens on 2 cores, a window of 256 keys takes a fifth of the time in blocks, and causal
attention seven tenths in four blocks. Each part is one kernel, as the whole was.

After Q/DQ of queries and keys the same kernel computes its first product in int8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.export.attention.canonical import KEY, OUTPUT, QUERY, VALUE, attention_node
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.build import Builder
from attnforge.export.graphs.passes import SitesResult
from attnforge.export.graphs.qdq import in_int8 as rounded
from attnforge.export.lowering.attention import Attention, Lowered, attentions
from attnforge.export.lowering.blocks import in_blocks
from attnforge.export.lowering.causal_blocks import in_causal_blocks
from attnforge.export.lowering.onnxruntime import write
from attnforge.export.lowering.products import decompose
from attnforge.export.lowering.tuning import Candidate, Engine, FormChoice, Tuner, usual
from attnforge.runtime.backends.openvino_graph import prepared, swaps_apart

FLOAT = ir.DataType.FLOAT

CANONICAL_FORM = "Attention"

INT8_FORM = "Attention, queries × keys in int8"

BLOCKS = (64, 128, 256)
"""Queries per block, if a mask leaves a band visible."""

STEPS = (4, 8)
"""Blocks of queries for causal attention; the rules take the first."""

MANY_SCORES = 512 * 512
"""Scores per head from which the rules take blocks, if these leave out at least half of the products."""

Scales = tuple[float, ...]
"""Scales of int8 queries and keys."""

INT8_SCORES = 128 * 128
"""Scores per head from which the rules take int8 queries and keys. With AVX512-VNNI on 2 cores, the time of a whole
model with them, relative to the time without: with heads of 64 (BERT-base's size) 1.00 at 64 tokens, 0.97 at 128, 0.95
at 256 and 0.90 at 512; with heads of 32 (MiniLM's) 0.99, 1.00, 0.93 and 0.83, and 1.04 at 16."""

MANY_TOKENS = 1024
"""Tokens from which the rules take causal attention in blocks."""


def lower(
    model: ir.Model,
    sites: Sequence[Site],
    sizes: Mapping[str, int],
    tuner: Tuner | None = None,
    in_int8: Mapping[str, Scales] | None = None,
) -> SitesResult[Lowered]:
    """Rewrite the canonical sites of `model` that are faster in blocks or with scores in int8, in place, for OpenVINO.

    Args:
        model: a graph with canonical Attention nodes and no cache.
        sites: what :func:`~attnforge.export.attention.canonicalize.canonicalize` found in it.
        sizes: the usual size of each symbolic dim.
        tuner: chooses fp32 sites by measuring on :data:`ENGINE`; without one, and in 16 bits, the rules choose.
        in_int8: scales of the queries and keys that may be rounded, by site name.

    Returns:
        the form of every site that may differ from the canonical node, and why it was chosen.
    """
    lowered, modified = [], False
    for site, a in attentions(model, sites):
        candidates = candidates_for(site.name, a, (in_int8 or {}).get(site.name))
        if len(candidates) == 1:
            continue
        choice = _by_rules(a, candidates, sizes)
        if tuner is not None and a.dtype == FLOAT:  # what else the mask hides is computed in another graph
            choice = tuner.choose(replace(a, residue="none"), candidates, choice)
        candidate = next(candidate for candidate in candidates if candidate.form == choice.form)
        if candidate.form != CANONICAL_FORM:
            write(model.graph, a, candidate)
            modified = True
        lowered.append(candidate.lowered(site.name, choice))
    modified |= RemoveUnusedNodesPass()(model).modified
    return SitesResult(model, modified, lowered)


def may_round_scores(a: Attention) -> bool:
    """Whether a site is one that the backend decomposes into products, which OpenVINO compiles into one kernel with
    int8 queries and keys (:func:`~attnforge.runtime.backends.openvino_graph.as_products`): in fp32, with one key head
    per query head."""
    is_plain = not a.is_causal and not a.softcap and a.size("H") == a.size("H_kv") and a.size("d_k").is_static
    return is_plain and a.dtype == FLOAT and a.cached is None and a.scales is None


def candidates_for(site: str, a: Attention, in_int8: Scales | None = None) -> list[Candidate]:
    """The forms that compute `a` at any sizes: the canonical node, the same after int8 queries and keys if these have
    scales, and the forms in blocks that its mask allows if heads are static."""
    name = str(a.node.name)
    candidates = [Candidate(CANONICAL_FORM, name, _canonical)]
    if in_int8 is not None and may_round_scores(a):
        emit = partial(_canonical, in_int8=in_int8)
        candidates.append(Candidate(INT8_FORM, name, emit, tolerance=math.inf))  # the gate has judged its error
    if not a.has_static_heads or a.cached is not None or a.scales is not None:
        return candidates
    name = f"{site}/Softmax"
    if a.band is not None:
        for width in a.band.widths(BLOCKS):
            form = _form(f"blocks of {width} × {a.band.wide(width)}")
            candidates.append(Candidate(form, name, partial(_cut, by=in_blocks, size=width)))
    elif a.causal_prefix is not None:
        for steps in STEPS:
            candidates.append(Candidate(_form(f"{steps} blocks"), name, partial(_cut, by=in_causal_blocks, size=steps)))
    return candidates


def _form(how: str) -> str:
    return f"MatMul·Softmax·MatMul, {how}"


def _by_rules(a: Attention, candidates: Sequence[Candidate], sizes: Mapping[str, int]) -> FormChoice:
    """The form that the rules choose for a site that has several."""
    queries, keys = usual(a.size("n_q"), sizes), usual(a.size("n_k"), sizes)
    forms = [candidate.form for candidate in candidates]
    in_blocks = [form for form in forms if form not in (CANONICAL_FORM, INT8_FORM)]
    if in_blocks and (choice := _in_blocks_by_rules(a, in_blocks, queries, keys)).form != CANONICAL_FORM:
        return choice
    if INT8_FORM not in forms:
        return choice
    if queries * keys >= INT8_SCORES:
        return FormChoice(INT8_FORM, "the first product is faster in int8, and its rounding is within the limit")
    return FormChoice(CANONICAL_FORM, "with so few queries and keys, rounding takes as long as int8 saves")


def _in_blocks_by_rules(a: Attention, forms: Sequence[str], queries: int, keys: int) -> FormChoice:
    """The form that the rules choose among those in blocks and the canonical node."""
    if a.band is None:
        if queries >= MANY_TOKENS:
            return FormChoice(forms[0], "causal: each block of queries attends to the keys up to its own")
        return FormChoice(CANONICAL_FORM, f"causal, and blocks pay off from {MANY_TOKENS:,} tokens on")
    widths = a.band.widths(BLOCKS)
    number = next((i for i, width in enumerate(widths) if width >= a.band.span), len(widths) - 1)
    if queries * keys >= MANY_SCORES and 2 * a.band.products(widths[number], queries) <= queries * keys:
        why = "the mask leaves a band: each block of queries attends only to the keys in it"
        return FormChoice(forms[number], why)
    return FormChoice(CANONICAL_FORM, "blocks would not leave out enough of the products")


# --- the forms --------------------------------------------------------------------------------------------------------


def _canonical(op: Builder, a: Attention, name: str, in_int8: Scales | None = None) -> ir.Value:
    query, key, value = a.inputs(op, [a.layout(*dims) for dims in (QUERY, KEY, VALUE)])
    if in_int8 is not None:
        query, key = (rounded(op, x, scale) for x, scale in zip((query, key), in_int8, strict=True))
    result = attention_node(
        op, name, query, key, value, a.mask, scale=a.scale, is_causal=a.is_causal, softcap=a.softcap,
        softmax_precision=0 if a.softmax_dtype == a.dtype else a.softmax_dtype.value,
        silent_rows_are_nan=a.silent_rows_are_nan,
    )  # fmt: skip
    return a.as_output(op, result, a.layout(*OUTPUT))


def _cut(op: Builder, a: Attention, name: str, by: Callable[..., ir.Value], size: int) -> ir.Value:
    """The products of parts of a site, cut by :func:`~.blocks.in_blocks` or
    :func:`~.causal_blocks.in_causal_blocks`."""
    return by(op, a, size, lambda part, i: _products(op, part, f"{name}_{i}" if i else name))


def _products(op: Builder, a: Attention, name: str) -> ir.Value:
    query, value = (a.arranged(op, x, a.layout(*to)) for x, to in ((a.query, QUERY), (a.value, _VALUES)))
    key = a.arranged(op, a.key, a.layout("B", "H", "d_k", "n_k"))
    return a.as_output(op, decompose(op, a, query, key, value, name), a.layout(*OUTPUT))


_VALUES = ("B", "H", "n_k", "d_v")
"""The dims of values; those that query heads share are copied."""


# --- measuring --------------------------------------------------------------------------------------------------------


def _opened(model: ir.Model, feeds: Mapping[str, Array]) -> Callable[[], Any]:
    """A function that runs `model` on `feeds` as the backend runs repeated shapes, and returns OpenVINO's own output
    tensor."""
    import openvino

    RemoveUnusedNodesPass()(model)
    taken = [value for value in model.graph.inputs if value.uses()]  # without a mask that blocks do not read: OpenVINO
    model.graph.inputs[:] = taken  # lists such an input and does not find it
    core = openvino.Core()
    graph = prepared(core.read_model(ir.to_proto(model).SerializeToString()), widen=True, scores=True)
    swaps_apart(graph)
    properties = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = core.compile_model(graph, "CPU", properties).create_infer_request()
    arrays = {str(value.name): np.array(feeds[str(value.name)], order="C") for value in taken}

    def run() -> Any:
        for name, array in arrays.items():
            request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
        request.infer()
        return request.get_tensor("output")

    return run


ENGINE = Engine("OpenVINO", _opened, lambda output: output.data.copy())
