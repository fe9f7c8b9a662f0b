"""Lower canonical attention for OpenVINO: to blocks, where it then computes less of what a mask hides, and to int8
queries and keys in models with int8 products; elsewhere the canonical node stays, which OpenVINO reads and rewrites
itself (:mod:`attnforge.runtime.backends.openvino_graph`).

OpenVINO's one kernel for products around a softmax takes a mask and also computes everything that it hides. In fp32,
with 8 heads of 64 and 4,096 tokens on 2 cores, a window of 256 keys takes a fifth of the time in blocks, and causal
attention three fifths in eight blocks. Each part is one kernel, as the whole was. No kernel stores the scores of all
heads: over 4,096 tokens each form takes some tens of MiB in addition to its operands. For the canonical node the mask
of all pairs is in memory, 0.6 GiB over 12,288 tokens.

After Q/DQ of queries and keys the same kernel computes its first product in int8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.export.attention.canonical import KEY, OUTPUT, QUERY, VALUE, attention_node
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.masking import any_key
from attnforge.export.attention.operands import scalar
from attnforge.export.graphs.attention import Reading
from attnforge.export.graphs.build import Builder, constant, like
from attnforge.export.graphs.nodes import is_op, upstream
from attnforge.export.graphs.qdq import FLOAT, INT8, rounded_to
from attnforge.export.lowering.attention import NO_SIZES, Attention, Candidate, Lowered, Sizes, usual
from attnforge.export.lowering.blocks import IN_CAUSAL_BLOCKS, forms_in_blocks, in_blocks, in_causal_blocks
from attnforge.export.lowering.products import BOOL, fills_in_number, products
from attnforge.export.lowering.tuning import Library, Tuner, lower_sites

CANONICAL_FORM = "Attention"

NAN_FORM = "Attention, NaN without keys"

INT8_FORM = "Attention, queries × keys in int8"

STEPS = (4, 8, 16, 32)
"""Blocks of queries for causal attention; from 16 on only with :data:`FEWEST_ROWS` in each."""

FEWEST_ROWS = 512
"""Queries of a causal block below which the kernel gets slower: with 8 heads of 64 over 4,096 keys on 2 cores, 512
queries are computed at 0.9 of the speed of 1,024, and 256 at 0.75. The rules take as many blocks as have so many, and
no fewer than four."""

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
    sizes: Sizes,
    tuner: Tuner | None = None,
    in_int8: Mapping[str, Scales] | None = None,
) -> list[Lowered]:
    """Rewrite the canonical sites of `model` that are faster in blocks or with scores in int8, in place, for OpenVINO.

    Args:
        model: a graph with canonical Attention nodes and no cache.
        sites: what :func:`~attnforge.export.attention.canonicalize.canonicalize` found in it.
        sizes: the usual size of each symbolic dim.
        tuner: chooses fp32 sites by measuring on :data:`LIBRARY`; without one, and in 16 bits, the rules choose.
        in_int8: scales of the queries and keys that may be rounded, by site name.

    Returns:
        the form of every site that may differ from the canonical node, and why it was chosen.
    """
    scales = in_int8 or {}
    lowered = lower_sites(
        model, sites, lambda site, a: candidates_for(site, a, scales.get(site), sizes), tuner, CANONICAL_FORM
    )
    RemoveUnusedNodesPass()(model)
    return lowered


def may_round_scores(a: Attention) -> bool:
    """Whether a site is one that the backend decomposes into products, which OpenVINO compiles into one kernel with
    int8 queries and keys (:func:`~attnforge.runtime.backends.openvino_graph.as_products`): in fp32, with one key head
    per query head, and no mask that replaces scores with a finite number."""
    is_plain = not a.is_causal and not a.softcap and a.size("H") == a.size("H_kv") and a.size("d_k").is_static
    return is_plain and a.dtype == FLOAT and a.scales is None and not fills_in_number(a.mask)


def candidates_for(site: str, a: Attention, in_int8: Scales | None = None, sizes: Sizes = NO_SIZES) -> list[Candidate]:
    """The forms that compute a site at any sizes: the canonical node; and in order of preference those in blocks that
    its mask allows if heads are static, and the canonical node after int8 queries and keys if these have scales.

    Args:
        site: its name.
        a: the site.
        in_int8: scales of queries and keys.
        sizes: the usual size of each symbolic dim, by which forms pay.
    """
    name, queries, keys = str(a.node.name), usual(a.size("n_q"), sizes), usual(a.size("n_k"), sizes)
    has_parts = a.has_static_heads and a.scales is None
    found, why, nan = list(_parts(f"{site}/Softmax", a, queries, keys)) if has_parts else [], "", _may_hide_all(a)
    if found:
        why = f"causal, and blocks pay off from {MANY_TOKENS:,} tokens on"
        why = why if a.band is None else "blocks would not leave out enough of the products"
    if fills_in_number(a.mask):
        why = "the mask replaces scores with a finite number, which OpenVINO's Attention would add to them"
        return [Candidate(_PRODUCTS, f"{site}/Softmax", products, True, why, materialises_scores=False), *found]
    if in_int8 is not None and may_round_scores(a):  # the gate has judged its error
        emit, pays = partial(_canonical, in_int8=in_int8, nan=nan), queries * keys >= INT8_SCORES
        reason = "the first product is faster in int8, and its rounding is within the limit"
        found.append(Candidate(INT8_FORM, name, emit, pays, reason, tolerance=math.inf))
        why = "with so few queries and keys, rounding takes as long as int8 saves"
    form = CANONICAL_FORM
    if nan:
        form, why = NAN_FORM, "the mask may hide all keys of a row: it is NaN, where OpenVINO's Attention gives zeros"
    return [Candidate(form, name, partial(_canonical, nan=nan), True, why, materialises_scores=False), *found]


def _may_hide_all(a: Attention) -> bool:
    """Whether the mask may hide all keys of a row that is NaN then: it depends on an input, and is boolean or has minus
    infinity, from an input or from a constant."""
    if a.mask is None or not a.silent_rows_are_nan:
        return False
    found = list(upstream([a.mask], lambda value: is_op(value.producer(), "Shape", "Size")))
    inputs = [value.dtype for value in found if value.is_graph_input()]
    if a.mask.dtype != BOOL and not any(dtype is not None and dtype.is_floating_point() for dtype in inputs):
        return bool(inputs) and any(scalar(value) == -math.inf for value in found)
    return bool(inputs)


def _parts(name: str, a: Attention, queries: int, keys: int) -> Iterator[Candidate]:
    """The forms in blocks of a band, or in causal blocks."""
    if a.band is not None:
        many = queries * keys >= MANY_SCORES
        yield from forms_in_blocks(a, _PRODUCTS, name, partial(_cut, by=in_blocks), queries, many)
    elif a.causal_prefix is not None:
        wide = [steps for steps in STEPS if steps * FEWEST_ROWS <= queries] or [STEPS[0]]
        for steps in sorted({*STEPS[:2], *wide}):
            pays = queries >= MANY_TOKENS and steps == wide[-1]
            form = f"{_PRODUCTS}, {steps} blocks"
            emit = partial(_cut, by=in_causal_blocks, width=steps)
            yield Candidate(form, name, emit, pays, IN_CAUSAL_BLOCKS, materialises_scores=False)


_PRODUCTS = "MatMul·Softmax·MatMul"


# --- the forms --------------------------------------------------------------------------------------------------------


def _canonical(op: Builder, a: Attention, name: str, in_int8: Scales | None = None, nan: bool = False) -> ir.Value:
    query, key, value = a.inputs(op, [a.layout(*dims) for dims in (QUERY, KEY, VALUE)])
    if in_int8 is not None:
        query, key = (rounded_to(op, x, scale, INT8) for x, scale in zip((query, key), in_int8, strict=True))
    reading = Reading(
        query, key, value, a.scale, is_causal=a.is_causal, softcap=a.softcap,
        softmax_precision=0 if a.softmax_dtype == a.dtype else a.softmax_dtype.value,
        silent_rows_are_nan=a.silent_rows_are_nan,
    )  # fmt: skip
    result = attention_node(op, name, reading, a.mask)
    if nan and a.mask is not None:
        result.name = f"{name}/without NaN"  # the site's value gets the name of the node's output
        result = like(op.Where(any_key(op, a.mask), result, constant(op, math.nan, a.dtype)), result)
    return a.as_output(op, result, a.layout(*OUTPUT))


def _cut(op: Builder, a: Attention, name: str, by: Callable[..., ir.Value], width: int) -> ir.Value:
    """The products of parts of a site, cut by :func:`~.blocks.in_blocks` or :func:`~.blocks.in_causal_blocks`."""
    return by(op, a, width, lambda part, i: products(op, part, f"{name}_{i}" if i else name))


# --- measuring --------------------------------------------------------------------------------------------------------


def _open_on_openvino(model: ir.Model, feeds: Mapping[str, Array]) -> Callable[[], Any]:
    """A function that runs `model` on `feeds` as the backend runs repeated shapes, and returns OpenVINO's own output
    tensor."""
    import openvino

    from attnforge.runtime.backends.openvino_graph import prepared, properties_for

    core = openvino.Core()
    graph = prepared(core.read_model(ir.to_proto(model).SerializeToString()), widen=True, scores=True)
    arrays = {str(value.name): np.array(feeds[str(value.name)], order="C") for value in model.graph.inputs}
    graph.reshape({name: list(array.shape) for name, array in arrays.items()})
    properties = properties_for(graph, {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"})
    request = core.compile_model(graph, "CPU", properties).create_infer_request()

    def run() -> Any:
        for name, array in arrays.items():
            request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
        request.infer()
        return request.get_output_tensor(0)

    return run


LIBRARY = Library("OpenVINO", _open_on_openvino, lambda output: output.data.copy())
