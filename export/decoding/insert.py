"""A cache of keys and values is put into a canonical graph, so that a call takes the next tokens alone.

The author's own code for a cache is not needed: a canonical node says which keys and values it reads, where their
tokens are, and, by its mask, that no query sees a later one. What the graph computes beside attention is proved to be
by token (:mod:`.tokens`), what it computes of places becomes a table (:mod:`.positions`), and a bias by distance is
computed of the places of tokens and of the cache (:mod:`.distances`).

The step that comes out has the model's own input with the next tokens, how many came before in each sample, and a cache
of keys and one of values for every site, which are inputs and outputs of one shape. It is standard ONNX of opset 24:
TensorScatter (https://onnx.ai/onnx/operators/onnx__TensorScatter.html) writes the new keys and values behind the
earlier ones, before Attention reads them. Numbers of the cache behind the last token are hidden by the mask, whatever
they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.bundle import NEXT, CacheSpec, Decoding, DimSpec, Range, TensorSpec
from attnforge.errors import UsageError
from attnforge.export.attention.canonical import PLACES
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.emit import shared_heads
from attnforge.export.attention.layout import Layout, Size, rearrange
from attnforge.export.attention.operands import Operand
from attnforge.export.attention.roles import index_range
from attnforge.export.attention.visibility import Visibility, visibility
from attnforge.export.decoding.distances import NotByDistance, TooFewPlaces, slopes_of
from attnforge.export.decoding.positions import look_up_positions
from attnforge.export.decoding.tokens import check_by_token, kinds_of
from attnforge.export.graphs.build import Builder, constant, insert, like, typed
from attnforge.export.graphs.nodes import numpy_type
from attnforge.export.graphs.qdq import INT8, InInt8
from attnforge.export.lowering.attention import Attention, Seen, Slopes, attentions
from attnforge.export.lowering.band import Band, band_of, is_triangle
from attnforge.export.lowering.cached import step_mask

OPSET = 24
"""The first opset with TensorScatter."""

PAST = "past"
"""The input that says how many tokens each sample has in the cache."""

INT64 = ir.DataType.INT64


@dataclass(frozen=True)
class _Tokens:
    """The input that holds tokens.

    Attributes:
        spec: of the manifest.
        value: of the graph.
        batch: how many samples.
        count: the symbol of the number of tokens.
    """

    spec: TensorSpec
    value: ir.Value
    batch: int | DimSpec
    count: DimSpec


def with_cache(
    model: ir.Model, sites: Sequence[Site], inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], places: int
) -> Decoding:
    """Make a step of a decoder of a causal model, in place.

    Args:
        model: canonical.
        sites: its attention.
        inputs: of the model: one, `(batch, tokens, …)`, tokens dynamic.
        outputs: of the model, each `(batch, tokens, …)`.
        places: tokens that the cache holds for each sample.

    Returns:
        the manifest's record of the step.

    Raises:
        UsageError: the model takes more than tokens, or fewer places are asked for than a call may have tokens.
        NotByToken: a site sees later tokens, or something else mixes tokens.
        NotByPlace: positions change with the number of tokens, or end before the cache does.
    """
    graph = model.graph
    tokens = _tokens(graph, inputs, outputs, places)
    symbol = tokens.count.symbol
    attended = list(attentions(model, sites))
    _check_sites(sites, attended)
    seen = {a.node.name: _seen(site, a, tokens.count, places) for site, a in attended}
    for _, a in attended:  # their masks are written anew, so what computes the old ones is not looked at
        a.node.resize_inputs(3)
        a.node.attributes.pop("is_causal", None)
    RemoveUnusedNodesPass()(model)
    kinds = kinds_of(graph, symbol)
    check_by_token(graph, kinds, symbol, [str(a.node.name) for _, a in attended])
    past = ir.Value(name=_unused(graph, PAST))
    graph.inputs.append(typed(past, INT64, [_dim(tokens.batch)]))
    places_of_tokens = _positions(graph, tokens, past)
    look_up_positions(model, kinds, symbol, tokens.value, places_of_tokens, places)
    masks: dict[tuple[Seen, ir.DataType], ir.Value] = {}
    caches = []
    for i, (site, a) in enumerate(attended):
        mask = seen[a.node.name], a.dtype
        if mask not in masks:
            masks[mask] = _mask(graph, places_of_tokens, *mask, places, stem=f"decoding/mask{len(masks) or ''}")
        keys, values = _cached(graph, a, tokens, past, i, places)
        a.node.replace_input_with(1, keys.read)
        a.node.replace_input_with(2, values.read)
        a.node.resize_inputs(4)
        a.node.replace_input_with(3, masks[mask])
        a.node.metadata_props.update(mask[0].metadata)
        caches.append(CacheSpec(site=site.name, key=keys.spec, value=values.spec, window=mask[0].window))
    graph.opset_imports[""] = max(graph.opset_imports.get("", 0), OPSET)
    model.ir_version = max(model.ir_version, 11)
    ids = index_range(tokens.value)
    vocabulary = ids[1] + 1 if ids is not None else None
    return Decoding(tokens=tokens.spec.name, past=str(past.name), places=places, caches=caches, vocabulary=vocabulary)


def one_token(tokens: TensorSpec) -> dict[str, Range]:
    """TensorRT's profile of a step of one token.

    Args:
        tokens: of the step's input.
    """
    count = tokens.dims[1]
    assert isinstance(count, DimSpec)
    return {count.symbol: (1, 1, 1)}


# --- what a decoder can be made of ------------------------------------------------------------------------------------


def _tokens(graph: ir.Graph, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], places: int) -> _Tokens:
    """The one input, whose second dim is the tokens.

    Raises:
        UsageError: there are others, or its dims are not those; or a call may have more tokens than the cache.
    """
    if len(inputs) != 1:
        raise UsageError(
            f"a decoder with a cache takes tokens alone, and the model takes {', '.join(s.name for s in inputs)}; "
            "leave masks and positions out of forward: lengths say which tokens there are"
        )
    (spec,) = inputs
    count = spec.dims[1] if len(spec.dims) > 1 else None
    if not isinstance(count, DimSpec) or count.factor != 1:
        raise UsageError(
            f"{spec.name} is {spec.text()}; a decoder with a cache takes (batch, tokens, …) with a dynamic number of "
            "tokens: give its dim 1 a torch.export.Dim"
        )
    if count.max is not None and count.max > places:
        raise UsageError(
            f"cache_tokens is {places} and a call may have {count.max} tokens; give {count.max} or more, or a Dim with "
            "a smaller max"
        )
    if isinstance(spec.dims[0], int) and spec.dims[0] != 1:
        raise UsageError(
            f"{spec.name} is {spec.text()}; a prompt is run sample by sample: give its dim 0 a torch.export.Dim, or 1"
        )
    if open_ := [each for each in (spec, *outputs) if any(isinstance(dim, DimSpec) for dim in each.dims[2:])]:
        raise UsageError(
            f"{open_[0].name} is {open_[0].text()}; a decoder with a cache has no dynamic dims behind the tokens"
        )
    for output in outputs:
        if [_text(dim) for dim in output.dims[:2]] != [_text(dim) for dim in spec.dims[:2]]:
            raise UsageError(
                f"output {output.name} is {output.text()}; a decoder with a cache answers for every token: "
                "(batch, tokens, …)"
            )
    return _Tokens(spec, graph.inputs[0], spec.dims[0], count)


def _text(dim: int | DimSpec) -> str:
    return str(dim) if isinstance(dim, int) else dim.text


def _check_sites(sites: Sequence[Site], attended: Sequence[tuple[Site, Attention]]) -> None:
    known = {site.name for site, _ in attended}
    for site in sites:
        if site.name not in known:
            raise UsageError(f"the attention of {site.name} was not recognised ({site.reason}), so it has no cache")
    if not attended:
        raise UsageError("the model has no attention, so there is nothing to keep in a cache; leave out cache_tokens")


def _seen(site: Site, a: Attention, tokens: DimSpec, places: int) -> Seen:
    """What a query sees of itself and earlier tokens.

    Raises:
        UsageError: it sees later ones, or its mask does more than to hide some and to add a bias by distance.
    """
    n_q, n_k = a.size("n_q"), a.size("n_k")
    if not n_q == n_k == Size(1, (tokens.symbol,)):
        raise UsageError(
            f"{site.name} attends from {n_q.dim()} queries to {n_k.dim()} keys; of self-attention over the tokens "
            "alone earlier keys and values are a cache"
        )
    if a.is_triangle and a.residue == "none":
        return Seen()
    if a.band is not None and (seen := _of_band(a.band)) is not None:
        return seen
    left, slopes, why = visibility(a.node), None, ""
    if "bias" in left.residue:
        try:
            left, slopes = _slopes(site, a, tokens, places)
        except NotByDistance as reason:
            why = f"; what it adds to scores is no bias by distance: {reason}"
    if left.is_full and not left.residue:
        raise UsageError(f"{site.name} is bidirectional: a token sees later ones, so nothing can be kept in a cache")
    if slopes is not None:
        band = band_of(a.node, left)
        seen = Seen() if is_triangle(left) else _of_band(band) if band is not None else None
        if seen is not None:
            return replace(seen, slopes=slopes if any(slopes) else None)
    raise UsageError(
        f"the mask of {site.name} leaves {left.text()}; a cache is for attention to earlier tokens, all or the last "
        f"few{why}"
    )


def _of_band(band: Band) -> Seen | None:
    """What a query sees where its mask leaves a band; None where these are not its last few tokens."""
    return Seen(band.most + 1) if band.is_window and band.least == 0 and band.is_all else None


def _slopes(site: Site, a: Attention, tokens: DimSpec, places: int) -> tuple[Visibility, Slopes]:
    """As :func:`slopes_of`, which tells where there are no slopes because the cache is longer than a call."""
    try:
        return slopes_of(a.node, tokens.symbol, places)
    except NotByDistance:
        if tokens.max is not None and tokens.max < places:
            slopes_of(a.node, tokens.symbol, tokens.max)
            raise TooFewPlaces(
                f"the bias of {site.name} is by distance for {tokens.max} tokens and not for the cache's {places}; "
                "give a smaller cache_tokens"
            ) from None
        raise


# --- new values -------------------------------------------------------------------------------------------------------


def _dim(dim: int | DimSpec) -> int | ir.SymbolicDim:
    return dim if isinstance(dim, int) else ir.SymbolicDim(dim.text)


def _unused(graph: ir.Graph, name: str) -> str:
    """A name that no input, output or parameter has."""
    taken = {str(value.name) for value in (*graph.inputs, *graph.outputs, *graph.initializers.values())}
    while name in taken:
        name += "_"
    return name


def _positions(graph: ir.Graph, tokens: _Tokens, past: ir.Value) -> ir.Value:
    """`(batch, tokens)`, int64: the place of every new token in its sample."""

    def build(op: Builder) -> ir.Value:
        zero, one = constant(op, 0), constant(op, 1)
        count = op.Squeeze(op.Shape(tokens.value, start=1, end=2), constant(op, [0]))
        following = op.Unsqueeze(op.Range(zero, count, one), constant(op, [0]))
        places = op.Add(op.Unsqueeze(past, constant(op, [1])), following)
        op.nodes[-1].metadata_props[PLACES] = "1"
        return typed(places, INT64, [_dim(tokens.batch), _dim(tokens.count)])

    return insert(graph, graph[0], build, stem="decoding/positions")


def _mask(graph: ir.Graph, positions: ir.Value, seen: Seen, dtype: ir.DataType, places: int, stem: str) -> ir.Value:
    """`(batch, 1 or heads, tokens, places)`: whether a place is a token's own or an earlier one, within the window, or
    what is added to its score."""
    after = positions.producer()
    assert after is not None
    return insert(graph, after, lambda op: step_mask(op, positions, seen, places, dtype), after=True, stem=stem)


@dataclass(frozen=True)
class _Written:
    """A cache of keys or values.

    Attributes:
        spec: of the manifest, `(batch, key heads, places, size)`.
        read: what attention reads of it with the new tokens: the cache itself, or where it is int8, restored.
    """

    spec: TensorSpec
    read: ir.Value


def _cached(
    graph: ir.Graph, a: Attention, tokens: _Tokens, past: ir.Value, number: int, places: int
) -> tuple[_Written, _Written]:
    """The caches of keys and of values of a site, as inputs and outputs of the graph."""
    result = []
    sized = zip(("key", "value"), in_cache(a), ("d_k", "d_v"), strict=True)
    for what, (operand, layout), features in sized:
        size = a.size(features)
        _, count, *_ = layout.sizes()
        if not (count.is_static and size.is_static):
            raise UsageError(f"{a.node.name} has heads of a dynamic size, so its cache has none")
        dims = count.factor, places, size.factor
        rounded = InInt8.before(operand.value) if operand.layout.dims == layout.dims else None
        before = ir.Value(name=_unused(graph, f"{what}_cache.{number}"))
        graph.inputs.append(typed(before, a.dtype if rounded is None else INT8, [_dim(tokens.batch), *dims]))
        write = partial(_write, a=a, kept=(operand, layout), rounded=rounded, before=before, past=past)
        after = insert(graph, a.node, write, stem=f"{a.node.name}/{what}")
        after.name = f"{before.name}{NEXT}"
        graph.outputs.append(after)
        spec = TensorSpec(name=str(before.name), dtype=numpy_type(before).name, dims=[tokens.batch, *dims])
        read = after
        if rounded is not None:
            restore = partial(rounded.restored, stored=after)
            read = insert(graph, a.node, restore, stem=f"{a.node.name}/{what} restored")
        result.append(_Written(spec, read))
    keys, values = result
    return keys, values


def _write(
    op: Builder, a: Attention, kept: tuple[Operand, Layout], rounded: InInt8 | None, before: ir.Value, past: ir.Value
) -> ir.Value:
    """The cache with the new tokens."""
    operand, layout = kept
    new = rearrange(op, operand.value, operand.layout, layout, a.sized) if rounded is None else rounded.stored
    return like(op.op("TensorScatter", [before, new, past], {"axis": 2}), before)


def in_cache(a: Attention) -> tuple[tuple[Operand, Layout], tuple[Operand, Layout]]:
    """Keys and values of a site, each with its layout in a cache, `(batch, key heads, tokens, size)`. What several
    heads share is held once: the heads are those of the tensors before they are repeated."""
    heads = shared_heads(tuple(a.layout("H_kv").axes), a.key.layout, a.value.layout)
    key, value = (
        (operand, Layout([*a.layout("B").dims, heads, *a.layout("n_k", size).dims]))
        for operand, size in ((a.key, "d_k"), (a.value, "d_v"))
    )
    return key, value
