"""Insert a cache of keys and values into a canonical graph, so that a call takes only the next tokens.

The author's own code for a cache is not needed: a canonical node says which keys and values it reads, where their
tokens are, and by its mask that no query sees a later token. The rest of the graph is proved to process tokens
independently (:mod:`.tokens`), what it computes from positions becomes a table (:mod:`.positions`), and a bias by
distance is computed from the positions of tokens and of the cache (:mod:`.distances`).

The resulting step takes the model's own input with the next tokens, the number of cached tokens of each sample, and a
cache of keys and one of values for every site, which are inputs and outputs of equal shape. It is standard ONNX of
opset 24: TensorScatter (https://onnx.ai/onnx/operators/onnx__TensorScatter.html) writes the new keys and values after
the earlier ones, before Attention reads them. The mask hides the numbers in the cache after the last token, whatever
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.bundle import NEXT, CacheSpec, Decoding, DimSpec, Range, TensorSpec
from attnforge.errors import UsageError
from attnforge.export.attention.canonical import PLACES
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.emit import shared_heads
from attnforge.export.attention.layout import Axis, Layout, before_views
from attnforge.export.attention.masking import before_sinks, take_sinks, with_zeros
from attnforge.export.attention.operands import Operand
from attnforge.export.attention.roles import index_range
from attnforge.export.decoding.distances import NotByDistance, TooFewPositions, slopes_of
from attnforge.export.decoding.positions import look_up_positions
from attnforge.export.decoding.tokens import Kinds, check_by_token, kinds_of
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.build import Builder, constant, dims_of, insert, like, typed
from attnforge.export.graphs.nodes import BY_ELEMENT, input_of, inputs_of, is_op, maker_of, numpy_type, rank_of
from attnforge.export.graphs.qdq import INT8, InInt8
from attnforge.export.graphs.sizes import LayoutError, Size, sizes_of
from attnforge.export.lowering.attention import Attention, ByHead, Seen, attention_of, attentions
from attnforge.export.lowering.band import band_of, is_triangle
from attnforge.export.lowering.cached import step_mask
from attnforge.export.masks.regions import Blocks
from attnforge.export.masks.visibility import Visibility, visibility

OPSET = 24
"""The first opset with TensorScatter."""

PAST = "past"
"""Name of the input with the number of cached tokens of each sample."""

INT64 = ir.DataType.INT64


def with_cache(
    model: ir.Model, sites: Sequence[Site], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], capacity: int
) -> Decoding:
    """Turn a causal model into a decoder step, in place.

    The step computes its outputs for the tokens of its input `kept`: a prompt needs them for the last token only.

    Args:
        model: a canonical graph.
        sites: its attention sites.
        inputs: the specs of its inputs: one, `(batch, tokens, …)`, with dynamic tokens.
        outputs: the specs of its outputs, each `(batch, tokens, …)`.
        capacity: tokens per sample for which the cache has slots.

    Returns:
        The manifest's record of the step.

    Raises:
        UsageError: the model takes more than tokens, a site sees later tokens or has sinks that depend on tokens, or a
            call may have more tokens than the cache.
        NotByToken: something other than attention mixes tokens.
        NotByPosition: positions change with the number of tokens, or end before the cache does.
    """
    graph = model.graph
    tokens, count = _tokens(inputs, outputs, capacity)
    batch, symbol, ids = tokens.dims[0], count.symbol, graph.inputs[0]
    cached = sites_over_tokens(model, sites)
    if (unread := next((site for site in sites if site.node is None), None)) is not None:
        raise UsageError(f"the attention of {unread.name} was not recognised ({unread.reason}), so it has no cache")
    if not cached:
        raise UsageError("the model has no attention to other tokens, so there is nothing to cache; omit cache_tokens")
    sinks = _without_sinks(graph, cached)
    attended = list(attentions(model, cached))
    seen = {a.node.name: replace(_seen(site, a, count, capacity), sinks=sinks[a.node.name]) for site, a in attended}
    for _, a in attended:  # their masks are rewritten, so the nodes that compute the old ones need no check
        a.node.resize_inputs(3)
        a.node.attributes.pop("is_causal", None)
    RemoveUnusedNodesPass()(model)
    kinds = kinds_of(graph, symbol)
    if fixed := [output for output in graph.outputs if output not in kinds.by_token]:
        raise UsageError(f"output {fixed[0].name} does not depend on the tokens; remove it from what forward returns")
    names = [str(a.node.name) for _, a in attended]
    numbering = check_by_token(graph, kinds, symbol, names, batch.symbol if isinstance(batch, DimSpec) else None)
    products = [last_products(output, kinds) for output in graph.outputs]
    past, kept = ir.Value(name=_unused(graph, PAST)), ir.Value(name=_unused(graph, KEPT, inputs))
    graph.inputs.append(typed(past, INT64, [_dim(batch)]))
    graph.inputs.append(typed(kept, INT64, [ir.SymbolicDim(str(kept.name))]))
    positions = _positions(graph, past)
    look_up_positions(model, kinds, symbol, ids, positions, capacity, max(count.min or 1, 1), numbering)
    compute_kept(graph, kept, products)
    masks: dict[tuple[Seen, ir.DataType], ir.Value] = {}
    caches, last = [], positions.producer()
    assert last is not None
    for i, (site, a) in enumerate(attended):
        mask = seen[a.node.name], a.dtype
        if mask not in masks:
            write = partial(step_mask, positions=positions, site=mask[0], capacity=capacity, dtype=mask[1])
            masks[mask] = insert(graph, last, write, after=True, stem=f"decoding/mask{len(masks) or ''}")
        keys, values = _cached(graph, attention_of(a.node), batch, past, i, capacity, mask[0].sinks is not None)
        a.node.resize_inputs(4)
        a.node.replace_input_with(3, masks[mask])
        a.node.metadata_props.update(mask[0].metadata)
        caches.append(CacheSpec(site=site.name, key=keys, value=values, window=mask[0].window))
    graph.opset_imports[""] = max(graph.opset_imports.get("", 0), OPSET)
    model.ir_version = max(model.ir_version, 11)
    range_of_ids = index_range(ids)
    return Decoding(
        tokens=tokens.name, past=str(past.name), kept=str(kept.name), places=capacity, caches=caches,
        vocabulary=range_of_ids[1] + 1 if range_of_ids is not None else None,
    )  # fmt: skip


def one_token(inputs: Sequence[TensorSpec]) -> dict[str, Range]:
    """TensorRT's profile for a step of one token.

    Args:
        inputs: the specs of the step's inputs.
    """
    tokens, _, kept = inputs[:3]
    return {dim.symbol: (1, 1, 1) for dim in (tokens.dims[1], kept.dims[0]) if isinstance(dim, DimSpec)}


# --- checks of the model ----------------------------------------------------------------------------------------------


def _tokens(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], capacity: int) -> tuple[TensorSpec, DimSpec]:
    """The only input, and its second dim, the number of tokens.

    Raises:
        UsageError: there are other inputs, dims are not as required, or a call may have more tokens than the cache.
    """
    if len(inputs) != 1:
        raise UsageError(
            f"a decoder with a cache takes only tokens, and the model takes {', '.join(s.name for s in inputs)}; "
            "remove masks and positions from forward: the decoder tracks the length of each sample"
        )
    (spec,) = inputs
    count = spec.dims[1] if len(spec.dims) > 1 else None
    if not isinstance(count, DimSpec) or count.factor != 1:
        raise UsageError(
            f"{spec.name} is {spec.text()}; a decoder with a cache takes (batch, tokens, …) with a dynamic number of "
            "tokens: give its dim 1 a torch.export.Dim"
        )
    if count.max is not None and count.max > capacity:
        raise UsageError(
            f"cache_tokens is {capacity} and a call may have {count.max} tokens; give {count.max} or more, or a Dim "
            "with a smaller max"
        )
    if isinstance(spec.dims[0], int) and spec.dims[0] != 1:
        raise UsageError(
            f"{spec.name} is {spec.text()}; prompts run sample by sample: give its dim 0 a torch.export.Dim, or size 1"
        )
    if open_ := [each for each in (spec, *outputs) if any(isinstance(dim, DimSpec) for dim in each.dims[2:])]:
        raise UsageError(
            f"{open_[0].name} is {open_[0].text()}; a decoder with a cache has no dynamic dims after the tokens"
        )
    for output in outputs:
        if list(map(_dim, output.dims[:2])) != list(map(_dim, spec.dims[:2])):
            raise UsageError(
                f"output {output.name} is {output.text()}; a decoder with a cache returns a result for every token: "
                "(batch, tokens, …)"
            )
    return spec, count


def sites_over_tokens(model: ir.Model, sites: Sequence[Site]) -> list[Site]:
    """The sites whose keys are tokens. The others read a fixed number of keys for each token, and need no cache.

    Args:
        model: a canonical graph whose only dynamic dims are samples and tokens.
        sites: its attention sites.
    """
    keys = {node.name: input_of(node, 1) for node in model.graph if is_op(node, "Attention")}
    return [site for site in sites if site.node in keys and not sizes_of(keys[site.node])[2].is_static]


def _without_sinks(graph: ir.Graph, sites: Sequence[Site]) -> dict[str | None, ByHead | None]:
    """Remove the attention sinks of all sites; return their scores, by the name of the canonical node.

    Raises:
        UsageError: they are not constants.
    """
    nodes, sinks = {node.name: node for node in graph}, dict[str | None, ByHead | None]()
    for site in sites:
        try:
            sinks[site.node] = take_sinks(nodes[site.node])
        except (NotAttention, LayoutError) as reason:
            raise UsageError(f"{site.name} has no cache: {reason}") from None
    return sinks


def _seen(site: Site, a: Attention, tokens: DimSpec, capacity: int) -> Seen:
    """What a query sees of itself and earlier tokens.

    Raises:
        UsageError: it sees later tokens, or its mask does more than hide some and add a bias by distance.
    """
    n_q, n_k = a.size("n_q"), a.size("n_k")
    if not n_q == n_k == Size(1, (tokens.symbol,)):
        raise UsageError(
            f"{site.name} attends from {n_q.text} queries to {n_k.text} keys; only self-attention over the tokens "
            "can cache earlier keys and values"
        )
    left, slopes, why = _within(visibility(a.node), capacity), None, ""
    if "bias" in left.residue:
        try:
            left, slopes = _slopes(site, a, tokens, capacity)
        except NotByDistance as reason:
            why = f"; what it adds to scores is not a bias by distance (ALiBi): {reason}"
    if left.is_full and not left.residue:
        raise UsageError(f"{site.name} is bidirectional: a token sees later ones, so nothing can be cached")
    if not left.residue and (seen := seen_of(a.node, left)) is not None:
        return replace(seen, slopes=slopes if slopes is not None and any(slopes) else None)
    raise UsageError(
        f"the mask of {site.name} leaves {left.text()}; a cache needs attention to all earlier tokens, or to the last "
        f"few{why}"
    )


def _within(left: Visibility, capacity: int) -> Visibility:
    """The same pairs of the first `capacity` tokens, which are in one chunk if chunks are as long."""

    def are_one(chunks: Blocks | None) -> bool:
        return chunks is not None and chunks == Blocks(chunks.size) and chunks.size >= capacity

    regions = (replace(each, blocks=None) if are_one(each.blocks) else each for each in left.regions)
    return replace(left, regions=tuple(regions))


def seen_of(node: ir.Node, left: Visibility) -> Seen | None:
    """What a query sees if a canonical node's mask leaves all earlier tokens or the last few; None if it is neither."""
    if is_triangle(left):
        return Seen()
    band = band_of(node, left)
    is_last_few = band is not None and band.is_window and band.least == 0 and band.is_all
    return Seen(band.most + 1) if band is not None and is_last_few else None


def _slopes(site: Site, a: Attention, tokens: DimSpec, capacity: int) -> tuple[Visibility, ByHead]:
    """As :func:`slopes_of`, but reports if there are no slopes only because the cache is longer than a call.

    Raises:
        NotByDistance: the bias is not by distance.
        TooFewPositions: it is by distance for the tokens of a call, but not for the whole cache.
    """
    try:
        return slopes_of(a.node, tokens.symbol, capacity)
    except NotByDistance:
        if tokens.max is not None and tokens.max < capacity:
            slopes_of(a.node, tokens.symbol, tokens.max)
            raise TooFewPositions(
                f"the bias of {site.name} is by distance for {tokens.max} tokens, but not for the {capacity} of the "
                "cache; give a smaller cache_tokens"
            ) from None
        raise


# --- new values -------------------------------------------------------------------------------------------------------


def _dim(dim: int | DimSpec) -> int | ir.SymbolicDim:
    return dim if isinstance(dim, int) else ir.SymbolicDim(dim.text)


def _unused(graph: ir.Graph, name: str, specs: Sequence[TensorSpec] = ()) -> str:
    """A name that no input, output or weight has, and no dim of the inputs with `specs`."""
    taken = {str(value.name) for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    taken |= {dim.symbol for spec in specs for dim in spec.dims if isinstance(dim, DimSpec)}
    while name in taken:
        name += "_"
    return name


def _positions(graph: ir.Graph, past: ir.Value) -> ir.Value:
    """`(batch, tokens)`, int64: the position of every new token in its sample."""
    tokens = graph.inputs[0]

    def build(op: Builder) -> ir.Value:
        zero, step = constant(op, 0), constant(op, 1)
        count = op.Squeeze(op.Shape(tokens, start=1, end=2), constant(op, [0]))
        following = op.Unsqueeze(op.Range(zero, count, step), constant(op, [0]))
        positions = op.Add(op.Unsqueeze(past, constant(op, [1])), following)
        op.nodes[-1].metadata_props[PLACES] = "1"
        return typed(positions, INT64, dims_of(tokens)[:2])

    return insert(graph, graph[0], build, stem="decoding/positions")


def _cached(
    graph: ir.Graph, a: Attention, batch: int | DimSpec, past: ir.Value, number: int, capacity: int, has_sinks: bool
) -> list[TensorSpec]:
    """Add the caches of keys and of values of a site as inputs and outputs of the graph, and make attention read them;
    return their specs, `(batch, key heads, capacity, size)`."""
    specs = []
    for index, role, (operand, layout) in zip((1, 2), ("key", "value"), in_cache(a), strict=True):
        _, count, _, size = layout.sizes()
        if not (count.is_static and size.is_static):
            raise UsageError(f"{a.node.name} has a dynamic number or size of heads; a cache needs static ones")
        dims = count.factor, capacity, size.factor
        rounded = InInt8.before(operand.value) if operand.layout.dims == layout.dims else None
        before = ir.Value(name=_unused(graph, f"{role}_cache.{number}"))
        graph.inputs.append(typed(before, a.dtype if rounded is None else INT8, [_dim(batch), *dims]))
        write = partial(_write, a=a, kept=(operand, layout), rounded=rounded, before=before, past=past)
        after = insert(graph, a.node, write, stem=f"{a.node.name}/{role}")
        after.name = f"{before.name}{NEXT}"
        graph.outputs.append(after)
        specs.append(TensorSpec(name=str(before.name), dtype=numpy_type(before).name, dims=[batch, *dims]))
        if rounded is not None:
            restore = partial(rounded.restored, stored=after)
            after = insert(graph, a.node, restore, stem=f"{a.node.name}/{role} restored")
        if has_sinks:
            zeros = partial(with_zeros, x=after, count=1, first=True)
            after = insert(graph, a.node, zeros, stem=f"{a.node.name}/{role} with sinks")
        a.node.replace_input_with(index, after)
    return specs


def _write(
    op: Builder, a: Attention, kept: tuple[Operand, Layout], rounded: InInt8 | None, before: ir.Value, past: ir.Value
) -> ir.Value:
    """Write the new tokens to a cache."""
    operand, layout = kept
    new = a.arranged(op, operand, layout) if rounded is None else rounded.stored
    return like(op.op("TensorScatter", [before, new, past], {"axis": 2}), before)


def in_cache(a: Attention) -> tuple[tuple[Operand, Layout], tuple[Operand, Layout]]:
    """Keys and values of a site, each with its layout in a cache, `(batch, key heads, tokens, size)`. What several
    query heads share is stored once: the heads are those of the tensors before they are repeated. Sinks are not
    stored."""
    operands, (tokens,) = list(a.operands[1:]), a.layout("n_k").dims
    own = [before_sinks(input_of(a.node, i)) for i in (1, 2)]
    if own != [*a.node.inputs[1:3]]:
        tokens = (Axis(sizes_of(own[0])[2]),)
        layouts = (Layout([*a.layout("B", "H_kv").dims, tokens, *a.layout(size).dims]) for size in ("d_k", "d_v"))
        operands = [Operand(*before_views(x, layout)) for x, layout in zip(own, layouts, strict=True)]
    heads = shared_heads(tuple(a.layout("H_kv").axes), operands[0].layout, operands[1].layout)
    layouts = (Layout([*a.layout("B").dims, heads, tokens, *a.layout(size).dims]) for size in ("d_k", "d_v"))
    key, value = zip(operands, layouts, strict=True)
    return key, value


# --- results of the tokens that a call asks for -----------------------------------------------------------------------

# Compute the results of the tokens that a call asks for: of a prompt, the logits of the last token alone are read.


KEPT = "kept"
"""Name of the input with the tokens of a call whose results are computed."""


def last_products(output: ir.Value, kinds: Kinds) -> list[ir.Node]:
    """The operators by element before an output, from the last, and the product with weights before these that
    computes it from each token; none if something else reads their results.

    Args:
        output: an output `(batch, tokens, …)` that is computed token by token.
        kinds: the kinds of the graph's values.
    """
    value, path = output, list[ir.Node]()
    while (node := value.producer()) is not None:
        path.append(node)
        expected = (0, True) if value is output else (1, False)
        if (len(value.uses()), value.is_graph_output()) != expected:
            break
        read = [each for each in inputs_of(node) if each in kinds.by_token]
        if len(node.outputs) != 1 or len(read) != 1 or not kinds.by_count.isdisjoint(inputs_of(node)):
            break
        if is_op(node, "MatMul"):
            is_rounded = is_op(maker_of(read[0]), "DequantizeLinear")  # which has to stay next to the product
            return path if read[0] is node.inputs[0] and rank_of(read[0]) == 3 and not is_rounded else []
        if not is_op(node, *BY_ELEMENT) or dims_of(read[0])[:2] != dims_of(node.outputs[0])[:2]:
            break
        value = read[0]
    return []


def compute_kept(graph: ir.Graph, kept: ir.Value, products: Sequence[Sequence[ir.Node]]) -> None:
    """Make every output `(batch, kept, …)`, of these tokens, in place.

    Args:
        graph: the graph; its outputs are `(batch, tokens, …)`.
        kept: the indices of the tokens, `(kept,)`.
        products: of each output, see :func:`last_products`.
    """
    for i, (output, path) in enumerate(zip(list(graph.outputs), products, strict=True)):
        if path:
            path[-1].replace_input_with(0, _taken(graph, path[-1], input_of(path[-1]), kept))
            for node in path:
                node.outputs[0].shape = ir.Shape(_dims(node.outputs[0], kept))
        elif (last := output.producer()) is not None:
            graph.outputs[i] = taken = _taken(graph, last, output, kept, after=True)
            output.name, taken.name = f"{output.name}/every token", output.name


def _taken(graph: ir.Graph, at: ir.Node, value: ir.Value, kept: ir.Value, after: bool = False) -> ir.Value:
    def take(op: Builder) -> ir.Value:
        return typed(op.Gather(value, kept, axis=1), value.dtype, _dims(value, kept))

    return insert(graph, at, take, after, stem=f"{at.name}/{value.name}/{KEPT}")


def _dims(value: ir.Value, kept: ir.Value) -> list[int | ir.SymbolicDim]:
    batch, _, *rest = dims_of(value)
    return [batch, dims_of(kept)[0], *rest]
