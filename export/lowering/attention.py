"""Shared parts of all lowerings: the record of a lowered site, a canonical node as a lowering reads it, and the forms
that it can be written in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from attnforge.export.attention.canonical import KEY, OUTPUT, QUERY, SINKS, SLOPES, VALUE, WINDOW, SiteAxes
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import Axis, Dims, Layout, after_views, before_views, rearrange
from attnforge.export.attention.masking import before_sinks
from attnforge.export.attention.operands import Operand
from attnforge.export.graphs.attention import SILENT_ROWS
from attnforge.export.graphs.build import Builder, insert, replace_value, typed
from attnforge.export.graphs.nodes import input_of
from attnforge.export.graphs.qdq import InInt8, before_fp8, stored_before
from attnforge.export.graphs.sizes import ONE, Size, Unmeasurable, evaluated, sizes_of
from attnforge.export.lowering.band import Band, Residue, band_of, causal_prefix_of, is_triangle, residue_of
from attnforge.export.masks.visibility import visibility

SIDE_BY_SIDE = (("n_q", "H d_k"), ("n_k", "H_kv d_k"), ("n_k", "H_kv d_v"), ("n_q", "H d_v"))
"""Tokens and features of query, key, value and output with all heads in the last dim; several query heads may share one
head of keys and values."""

HEADS_FIRST = (("H", "n_q", "d_k"), ("H_kv", "n_k", "d_k"), ("H_kv", "n_k", "d_v"), ("H", "n_q", "d_v"))
"""The same with the heads before the tokens."""


@dataclass(frozen=True)
class FormChoice:
    """The form that was chosen for a site.

    Attributes:
        form: name of the form: the operators, or the fused operator, that compute the site.
        why: why it was chosen.
        measured: milliseconds of every form that was timed.
        dropped: why each form that was tried was not timed.
    """

    form: str
    why: str
    measured: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Lowered(FormChoice):
    """One site as written by a lowering, in the form that was chosen for it.

    Attributes:
        site: name of the site.
        node: name of the node by which the site is identified in the compiled graph.
        unfused: why no fused kernel is expected; None if one is.
    """

    site: str
    node: str
    unfused: str | None = None


ByHead = tuple[float, ...]
"""One number for each head."""


BY_HEAD = {"slopes": SLOPES, "sinks": SINKS}
"""Metadata of a canonical node with numbers for each head, by attribute of :class:`Seen`."""


@dataclass(frozen=True)
class Seen:
    """The tokens, up to itself, that a token sees.

    Attributes:
        window: how many, itself included; None for all.
        slopes: ALiBi slopes of the bias by distance, the increase of a key's score per position; None without one.
        sinks: score of each head's attention sinks together; None without any.
    """

    window: int | None = None
    slopes: ByHead | None = None
    sinks: ByHead | None = None

    @property
    def metadata(self) -> dict[str, str]:
        """Metadata of the canonical node."""
        by_head = {name: numbers for part, name in BY_HEAD.items() if (numbers := getattr(self, part)) is not None}
        return {WINDOW: str(self.window or 0), **{name: json.dumps(numbers) for name, numbers in by_head.items()}}

    @classmethod
    def of(cls, node: ir.Node) -> Seen | None:
        """Read from the metadata of a node; None if it reads no cache."""
        props = node.metadata_props
        if WINDOW not in props:
            return None
        by_head = {part: tuple(json.loads(props[name])) for part, name in BY_HEAD.items() if name in props}
        return cls(int(props[WINDOW]) or None, **by_head)


@dataclass(frozen=True)
class Cache:
    """The cache of keys or of values.

    Attributes:
        before: `(batch, key heads, capacity, size)`, an input of the graph.
        new: `(batch, key heads, tokens, size)`, which are written after the earlier tokens.
        after: the cache after that, an output of the graph.
        in_int8: how numbers are rounded if the cache is int8; `new` is int8 then, too.
    """

    before: ir.Value
    new: ir.Value
    after: ir.Value
    in_int8: InInt8 | None

    @classmethod
    def of(cls, read: ir.Value) -> Cache:
        """The cache that keys or values, without sinks, are read from."""
        writer = writer_of(read)
        before, new = input_of(writer), input_of(writer, 1)
        return cls(before, new, writer.outputs[0], InInt8.of_stored(new, read))


@dataclass(frozen=True)
class Cached:
    """What the keys and values of a decoder step are read from (:mod:`attnforge.export.decoding.insert`).

    Attributes:
        tokens: the graph's input, `(batch, tokens, …)`.
        past: `(batch,)`, int64: how many tokens each sample has in the cache.
        caches: that of keys, and that of values.
        seen: the keys that a query sees.
    """

    tokens: ir.Value
    past: ir.Value
    caches: tuple[Cache, Cache]
    seen: Seen


@dataclass(frozen=True)
class Attention:
    """A canonical Attention node, its operands traced back through views, its output forward through views.

    Attributes:
        node: the canonical node.
        query, key, value: the values before all views, and their layouts.
        mask: broadcasts to `(B, H, n_q, n_k)`, boolean or added to the scores.
        output: the value after all views, and its layout.
        silent_rows_are_nan: whether a fully masked row gets NaN instead of zeros.
        axes: the axes of the canonical dims.
        band: the band that the mask is proved to leave visible; None if it is not exactly a band.
        is_triangle: whether, with as many queries as keys, only pairs whose key is not later than the query may be
            visible, by causality or by the mask.
        causal_prefix: if the site can be computed in causal blocks, how many first keys every query sees in addition to
            those that are not later (:func:`~.band.causal_prefix_of`): 0 for a triangle.
        residue: what the mask does beyond that, or, if it is no triangle, at all (:func:`~.band.residue_of`).
        cached: where keys and values come from in a decoder step; None elsewhere.
        scales: scales of query, key and value if they are rounded to fp8, as the softmax's output is then, too.
    """

    node: ir.Node
    query: Operand
    key: Operand
    value: Operand
    mask: ir.Value | None
    output: Operand
    scale: float
    softcap: float
    is_causal: bool
    silent_rows_are_nan: bool
    softmax_dtype: ir.DataType
    axes: SiteAxes
    band: Band | None = None
    is_triangle: bool = False
    causal_prefix: int | None = None
    residue: Residue = "none"
    cached: Cached | None = None
    scales: tuple[float, ...] | None = None

    @property
    def dtype(self) -> ir.DataType:
        """The type of query, key, value and output."""
        assert self.query.value.dtype is not None
        return self.query.value.dtype

    @property
    def operands(self) -> tuple[Operand, Operand, Operand]:
        return self.query, self.key, self.value

    @property
    def has_static_heads(self) -> bool:
        """Whether the number of heads and their sizes are known."""
        return all(self.size(name).is_static for name in ("H", "H_kv", "d_k", "d_v"))

    def attributes(self, of_queries: str = "num_heads") -> dict[str, int | float | str]:
        """Attributes of a kernel that takes static numbers of heads; `of_queries` is its name for the query heads."""
        heads = {of_queries: self.size("H").factor, "kv_num_heads": self.size("H_kv").factor}
        return {**heads, "scale": self.scale, "softcap": self.softcap}

    def layout(self, *names: str) -> Layout:
        """The layout of named dims; `"H d_k"` is one dim with the heads side by side."""
        return self.axes.layout(*names)

    def size(self, name: str) -> Size:
        return self.axes.size(name)

    def arranged(self, op: Builder, operand: Operand, layout: Layout) -> ir.Value:
        """`operand` in the dims of `layout`."""
        sized = [(each.value, each.layout) for each in self.operands]  # have axes that it may lack, such as all heads
        return rearrange(op, operand.value, operand.layout, layout, sized)

    def inputs(self, op: Builder, layouts: Sequence[Layout]) -> list[ir.Value]:
        """Query, key and value in the dims of three layouts."""
        return [self.arranged(op, operand, to) for operand, to in zip(self.operands, layouts, strict=True)]

    def for_products(self, op: Builder) -> list[Operand]:
        """Query `(B, H, n_q, d_k)`, key `(B, H, d_k, n_k)` and value `(B, H, n_k, d_v)`; keys and values that query
        heads share are copied."""
        layouts = [self.layout("B", "H", *ends) for ends in (("n_q", "d_k"), ("d_k", "n_k"), ("n_k", "d_v"))]
        return list(map(Operand, self.inputs(op, layouts), layouts))

    def laid_out(self, value: ir.Value, layout: Layout) -> ir.Value:
        """Set the type of a value that a kernel computes to the operands', and its shape to that of `layout`; return
        it."""
        return typed(value, self.dtype, [size.dim() for size in layout.sizes()])

    def as_output(self, op: Builder, result: ir.Value, layout: Layout) -> ir.Value:
        """The result of a kernel, which gives it in `layout`, in the dims of the graph's output."""
        return self.arranged(op, Operand(self.laid_out(result, layout), layout), self.output.layout)

    def of_block(
        self,
        sizes: Mapping[str, Size],
        operands: Sequence[ir.Value],
        mask: ir.Value | None,
        ends: Sequence[Sequence[str]] = SIDE_BY_SIDE,
    ) -> Attention:
        """The attention of a part of the queries and keys, where the mask alone says which pairs are visible.

        Args:
            sizes: sizes of the dims that differ from this attention's, by name; `H` is for keys and values too.
            operands: query, key and value, laid out as `B` and `ends`.
            mask: `(B or 1, H or 1, n_q, n_k)`; None if every query sees every key.
            ends: :data:`SIDE_BY_SIDE` or :data:`HEADS_FIRST`.
        """
        others: dict[str, Dims] = {name: () if size == ONE else (Axis(size),) for name, size in sizes.items()}
        if "H" in others:
            others["H_kv"] = others["H"]
        axes = SiteAxes({**self.axes.dims, **others})
        *layouts, output = (axes.layout("B", *dims) for dims in ends)
        query, key, value = map(Operand, map(self.laid_out, operands, layouts), layouts)
        return replace(
            self, query=query, key=key, value=value, mask=mask, output=Operand(self.output.value, output),
            is_causal=False, axes=axes, band=None, is_triangle=False, causal_prefix=None, residue="other",
        )  # fmt: skip


def blocks_of(tokens: Size, width: int, shift: int = 0) -> Size:
    """The number of blocks of `width` that cover all tokens, the first of which begins `shift` before them."""
    return Size.of(ir.SymbolicDim(f"({tokens.dim()} + {shift + width - 1})//{width}"))


def attentions(model: ir.Model, sites: Sequence[Site]) -> Iterator[tuple[Site, Attention]]:
    """The canonical nodes of `model`, each with its site, in graph order."""
    by_name = {site.node: site for site in sites if site.node is not None}
    for node in list(model.graph):
        if node.op_type == "Attention" and node.domain == "" and node.name in by_name:
            yield by_name[node.name], attention_of(node)


def _cached(node: ir.Node) -> Cached | None:
    """What a node reads keys and values from; None if that is no cache."""
    seen = Seen.of(node)
    if seen is None:
        return None
    key, value = (before_sinks(input_of(node, i)) for i in (1, 2))
    assert isinstance(node.graph, ir.Graph)
    return Cached(node.graph.inputs[0], input_of(writer_of(key), 2), (Cache.of(key), Cache.of(value)), seen)


def writer_of(read: ir.Value) -> ir.Node:
    """The TensorScatter that writes the cache from which keys or values, without sinks, are read."""
    stored = stored_before(read)
    writer = (read if stored is None else stored).producer()
    assert writer is not None and writer.op_type == "TensorScatter"
    return writer


def attention_of(node: ir.Node) -> Attention:
    """A canonical node as lowerings read it."""
    query, key, value = (input_of(node, i) for i in range(3))
    dtype, scales = query.dtype, None
    assert dtype is not None
    if (rounded := before_fp8(query, key, value)) is not None:
        (query, key, value), scales = rounded
    axes = _axes(query, key, value)
    seen = visibility(node)
    return Attention(
        node,
        Operand(*before_views(query, axes.layout(*QUERY))),
        Operand(*before_views(key, axes.layout(*KEY))),
        Operand(*before_views(value, axes.layout(*VALUE))),
        node.inputs[3] if len(node.inputs) > 3 else None,
        Operand(*after_views(node.outputs[0], axes.layout(*OUTPUT))),
        scale=node.attributes["scale"].as_float(),
        softcap=node.attributes.get_float("softcap", 0.0) or 0.0,
        is_causal=bool(node.attributes.get_int("is_causal", 0)),
        silent_rows_are_nan=node.metadata_props.get(SILENT_ROWS) == "nan",
        softmax_dtype=ir.DataType(node.attributes.get_int("softmax_precision", 0) or dtype.value),
        axes=axes,
        band=band_of(node, seen),
        is_triangle=is_triangle(seen),
        causal_prefix=causal_prefix_of(node, seen),
        residue=residue_of(node, seen),
        cached=_cached(node),
        scales=scales,
    )


def _axes(query: ir.Value, key: ir.Value, value: ir.Value) -> SiteAxes:
    """Axes of canonical operands; each key head serves consecutive query heads."""
    batch, heads, n_q, d_k = Layout.fresh(query).dims
    n_k, d_v = Layout.fresh(key).dims[2], Layout.fresh(value).dims[3]
    shared: Dims = heads
    if (key_heads := sizes_of(key)[1]) != sizes_of(query)[1]:
        (head,) = heads
        group = head.size.divide(key_heads)
        assert group is not None
        head.split(key_heads, group)
        shared = () if key_heads == ONE else (head.leaves()[0],)
    return SiteAxes({"B": batch, "H": heads, "n_q": n_q, "n_k": n_k, "d_k": d_k, "d_v": d_v, "H_kv": shared})


# --- forms ------------------------------------------------------------------------------------------------------------

# The forms that a lowering can write for a site, and how a chosen one is written.
#
# A lowering lists the forms of a site. The tuner (:mod:`.tuning`) measures all of them; without it the first that pays
# decides.


CONTRIB = "com.microsoft"

TOLERANCE = 1e-5
"""Relative difference from the products that fp32 rounding explains, with scores of magnitude one."""


Emit = Callable[[Builder, Attention, str], ir.Value]
"""Writes a form of a site, at any sizes, with a node of the given name."""


@dataclass(frozen=True)
class Candidate:
    """A form that a site can be lowered to. The first one of a site is its plain form, which the others are checked
    against and which always pays; the others are in order of preference.

    Attributes:
        form: name of the form.
        node: name of the node by which the site is identified in the compiled graph.
        emit: writes it.
        pays: whether it is worth it at the usual sizes.
        why: the reason for it in the certificate if no form is measured.
        fused: whether one kernel does the work.
        materialises_scores: whether all scores are in memory at once.
        projects: whether it also writes the projections of its operands.
        tolerance: maximum relative difference from the products.
    """

    form: str
    node: str
    emit: Emit
    pays: bool
    why: str
    fused: bool = True
    materialises_scores: bool = True
    projects: bool = False
    tolerance: float = TOLERANCE


def write(graph: ir.Graph, a: Attention, candidate: Candidate, stem: str | None = None) -> None:
    """Replace a site by a form, whose nodes are named by the site's or by `stem`. The Attention node stays, without
    users."""
    replace_value(a.output.value, insert(graph, a.node, lambda op: candidate.emit(op, a, candidate.node), stem=stem))
    if candidate.form.startswith(CONTRIB):
        graph.opset_imports[CONTRIB] = 1


# --- sizes ------------------------------------------------------------------------------------------------------------

Sizes = Mapping[str, int]
"""The size of each symbolic dim."""

NO_SIZES: Sizes = {}


def usual(size: Size, sizes: Mapping[str, int]) -> int:
    """The usual number that a size is; its static factor if its symbols are unknown."""
    try:
        return evaluated(size, sizes)
    except Unmeasurable:
        return size.factor
