"""Canonical attention to the form that ONNX Runtime runs fastest on a CPU.

Which that is depends on shapes, layouts and the machine, so it is measured where it may be (:mod:`.tuning`). Rules
choose where it may not: `com.microsoft::MultiHeadAttention` without a mask takes a path that never holds the n² scores:
less time, and memory that grows with n instead of n². Its operands must have the heads side by side behind the tokens,
or one head at a time; where that costs transposes that the plain products do without (features as rows, say) it pays
from some hundred tokens on. With a mask or a causal flag every fused form holds the scores too, and is seldom faster
than the products.
16-bit types have no kernels for either: on the CPU the graph computes in fp32 between inputs and outputs of the
bundle's own type.

What the kernels of ONNX Runtime 1.31 are found to want: masks whose last two dims are not broadcast; a causal flag that
counts from the first key (`MultiHeadAttention` counts so where there are as many queries as keys); heads of a multiple
of 8 for `GroupQueryAttention`, which is always causal. `Attention` gives zeros to a query that may attend to nothing,
`MultiHeadAttention` with a bias NaN, as a bare softmax does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import prod

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import ONE, Layout, Size, effort, needs_transpose, rearrange, sizes_of
from attnforge.export.graphs.build import Builder, constant, dims_of, insert, like, replace_value, typed
from attnforge.export.graphs.passes import SitesResult
from attnforge.export.graphs.types import widen
from attnforge.export.lowering.attention import (
    Attention,
    Lowered,
    attends_to_some,
    attentions,
    decompose,
    mask_steps,
)
from attnforge.export.lowering.tuning import Candidate, Choice, Tuner, Unmeasurable, evaluated

BOOL = ir.DataType.BOOL

CONTRIB = "com.microsoft"
MULTI_HEAD = f"{CONTRIB}::MultiHeadAttention"
ONE_HEAD = f"{MULTI_HEAD}, a head at a time"
HEAD_AFTER_HEAD = f"{MULTI_HEAD}, head after head"
GROUP_QUERY = f"{CONTRIB}::GroupQueryAttention"

MANY_BYTES = 24 * 2**20
"""Bytes of queries, keys and values of all heads, at the largest sizes, from which they are made and attended to head
after head: the kernel copies what it is given, so that all heads at once take twice that. Else one call is chosen,
which is some two percent faster."""

MANY_SCORES = 512 * 512
"""Scores a head from which not holding them is worth any transposes that it takes."""


def lower(
    model: ir.Model,
    sites: list[Site],
    sizes: Mapping[str, int],
    device: str = "cpu",
    tuner: Tuner | None = None,
    largest: Mapping[str, int] | None = None,
) -> SitesResult[Lowered]:
    """Rewrite every canonical site of `model`, in place, for ONNX Runtime; say what was chosen and why.

    Args:
        model: with canonical Attention nodes.
        sites: what :func:`~attnforge.export.attention.canonicalize.canonicalize` found in it.
        sizes: what each symbol of the dims most often is.
        device: on `"cuda"` the types stay the graph's; on `"cpu"` 16-bit ones are widened.
        tuner: chooses by measuring on this machine's CPU; without one the rules choose.
        largest: the most that each symbol may be; by default as `sizes`.
    """
    modified = widen(model).modified if device == "cpu" else False
    lowered = []
    for site, attention in attentions(model, sites):
        candidates = candidates_for(site.name, attention)
        choice = _by_rules(attention, sizes)
        if tuner is not None:
            choice = tuner.choose(attention, candidates, choice)
        chosen = next(one for one in candidates if one.form == choice.form)
        if (
            device == "cpu"
            and chosen.form == MULTI_HEAD
            and not chosen.holds_scores
            and (size := _bytes(attention, largest or sizes)) >= MANY_BYTES
        ):
            chosen = replace(chosen, form=HEAD_AFTER_HEAD, emit=partial(_head_after_head, name=chosen.node))
            why = f"; head after head, for queries, keys and values of all are {size / 2**20:.0f} MiB at most"
            choice = replace(choice, form=chosen.form, why=choice.why + why)
        result = insert(model.graph, attention.node, lambda op, emit=chosen.emit, a=attention: emit(op, a))  # type: ignore[misc]
        replace_value(attention.output, result)
        _register_initializers(model.graph)
        if chosen.form.startswith(CONTRIB):
            model.graph.opset_imports[CONTRIB] = 1
        unfused = None if chosen.fused else choice.why
        lowered.append(
            Lowered(site.name, chosen.form, choice.why, chosen.node, unfused, choice.measured, choice.dropped)
        )
    modified |= RemoveUnusedNodesPass()(model).modified | bool(lowered)
    return SitesResult(model, modified, lowered)


def candidates_for(site: str, a: Attention) -> list[Candidate]:
    """The forms that compute what `a` does, whatever its sizes; the plain products first."""
    found = [Candidate(_products_form(a), f"{site}/Softmax", partial(_products, name=f"{site}/Softmax"), fused=False)]
    if a.softmax_dtype != a.dtype or (a.mask is not None and not _is_additive(a)):
        return found
    as_many = a.size("n_q") == a.size("n_k")
    if not a.softcap and (not a.is_causal or as_many):
        holds, name = a.mask is not None or a.is_causal, f"{site}/MultiHeadAttention"
        if a.size("H").is_static:
            found.append(Candidate(MULTI_HEAD, name, partial(_multi_head, packed=True, name=name), holds_scores=holds))
        if a.mask is None or sizes_of(a.mask)[:2] == [ONE, ONE]:
            apart = partial(_multi_head, packed=False, name=name)
            found.append(Candidate(ONE_HEAD, name, apart, holds_scores=holds))
    if a.mask is None or not a.silent_rows_are_nan:
        name = f"{site}/Attention"
        found.append(Candidate("Attention", name, partial(_standard, name=name)))
    sizes = [a.size(part) for part in ("H", "H_kv", "d_k", "d_v")]
    fits = a.size("d_k") == a.size("d_v") and a.size("d_k").factor % 8 == 0 and all(size.is_static for size in sizes)
    if a.is_causal and a.mask is None and as_many and fits:
        name = f"{site}/GroupQueryAttention"
        found.append(Candidate(GROUP_QUERY, name, partial(_group_query, name=name)))
    return found


def _is_additive(a: Attention) -> bool:
    """Whether the mask is the same added to the scores, with dims of the scores' own. A finite number that takes the
    place of scores is not; nor are a mask and a causal flag, which together may leave a query no key.
    """
    assert a.mask is not None
    same = all(step.fill in (None, -np.inf) for step in mask_steps(a.mask))
    fits = all(
        size in (ONE, a.size(name)) for size, name in zip(sizes_of(a.mask), ("B", "H", "n_q", "n_k"), strict=True)
    )
    return same and fits and not a.is_causal


def _products_form(a: Attention) -> str:
    return "MatMul·Tanh·Softmax·MatMul" if a.softcap else "MatMul·Softmax·MatMul"


def _by_rules(a: Attention, sizes: Mapping[str, int]) -> Choice:
    products = _products_form(a)
    if a.mask is not None or a.is_causal:
        return Choice(products, "with a mask fused forms hold the scores too, and are seldom faster than the products")
    if a.softcap:
        return Choice(products, "a soft cap on the scores, which the form that does not hold them does not know")
    if a.softmax_dtype != a.dtype:
        return Choice(products, "the softmax is computed in another type than the products, which fused forms cannot")
    form, layouts = ONE_HEAD, _apart(a)
    if a.size("H").is_static and _moves(a, _packed(a)) <= _moves(a, _apart(a)):
        form, layouts = MULTI_HEAD, _packed(a)
    scores = _typical(a.size("n_q"), sizes) * _typical(a.size("n_k"), sizes)
    if scores < MANY_SCORES and _moves(a, layouts) > _moves_of_products(a):
        why = f"the fused form would need other layouts, which about {scores} scores a head do not repay"
        return Choice(products, why)
    return Choice(form, "the fast path without a mask: memory linear in tokens")


def _bytes(a: Attention, sizes: Mapping[str, int]) -> int:
    """Of queries, keys and values in fp32."""
    ends = (("n_q", "d_k"), ("n_k", "d_k"), ("n_k", "d_v"))
    return 4 * sum(prod(_typical(a.size(name), sizes) for name in ("B", "H", *end)) for end in ends)


def _typical(size: Size, sizes: Mapping[str, int]) -> int:
    try:
        return evaluated(size, sizes)
    except Unmeasurable:
        return size.factor


def _packed(a: Attention) -> list[Layout]:
    """Query, key, value and output with the heads side by side in the last dim."""
    return [a.layout("B", n, f"H {d}") for n, d in (("n_q", "d_k"), ("n_k", "d_k"), ("n_k", "d_v"), ("n_q", "d_v"))]


def _apart(a: Attention) -> list[Layout]:
    """Query, key, value and output with every head a batch of its own."""
    return [a.layout("B H", n, d) for n, d in (("n_q", "d_k"), ("n_k", "d_k"), ("n_k", "d_v"), ("n_q", "d_v"))]


def _moves(a: Attention, layouts: list[Layout]) -> int:
    """How many operands must be transposed, or have their shape computed, to have `layouts`."""
    have = [a.query.layout, a.key.layout, a.value.layout, a.output_layout]
    return sum(effort(one, other) for one, other in zip(have, layouts, strict=True))


def _moves_of_products(a: Attention) -> int:
    """The same for the products, where the last two dims may come swapped: ONNX Runtime's product takes them so."""
    ends = (("n_q", "d_k"), ("n_k", "d_k"), ("n_k", "d_v"), ("n_q", "d_v"))
    have = (a.query.layout, a.key.layout, a.value.layout, a.output_layout)
    return sum(
        min(effort(layout, a.layout("B", "H", n, d)), effort(layout, a.layout("B", "H", d, n)))
        for layout, (n, d) in zip(have, ends, strict=True)
    )


def _multi_head(op: Builder, a: Attention, packed: bool, name: str) -> ir.Value:
    *inner, out = _packed(a) if packed else _apart(a)
    operands = (a.query, a.key, a.value)
    inputs = [rearrange(op, o.value, o.layout, layout, a.sized) for o, layout in zip(operands, inner, strict=True)]
    attributes: dict[str, int | float] = {"num_heads": a.size("H").factor if packed else 1, "scale": a.scale}
    if a.is_causal:
        attributes |= {"unidirectional": 1, "mask_filter_value": -np.inf}
    if a.mask is not None:
        inputs += [None, None, _bias(op, a)]  # type: ignore[list-item]
    result = op.op("MultiHeadAttention", inputs, attributes, domain=CONTRIB, name=name)
    typed(result, a.dtype, [size.dim() for size in out.sizes()])
    return _guarded(op, a, result, out)


def _head_after_head(op: Builder, a: Attention, name: str) -> ir.Value:
    """The same without a mask, one node a head."""
    *inner, out = _packed(a)
    heads = a.size("H").factor
    operands = (a.query, a.key, a.value)
    parts = [
        _heads(op, rearrange(op, o.value, o.layout, layout, a.sized), heads, a.size(width))
        for o, layout, width in zip(operands, inner, ("d_k", "d_k", "d_v"), strict=True)
    ]
    dims = [size.dim() for size in out.sizes()]
    results = [
        typed(
            op.op(
                "MultiHeadAttention",
                [query, key, value],
                {"num_heads": 1, "scale": a.scale},
                domain=CONTRIB,
                name=name if i == 0 else f"{name}_{i}",
            ),
            a.dtype,
            [*dims[:2], a.size("d_v").dim()],
        )
        for i, (query, key, value) in enumerate(zip(*parts, strict=True))
    ]
    result = typed(op.Concat(*results, axis=-1), a.dtype, dims)
    return rearrange(op, result, out, a.output_layout, a.sized)


def _heads(op: Builder, value: ir.Value, heads: int, width: Size) -> list[ir.Value]:
    """The parts of the last dim. What is a projection is projected head by head, so that the whole is never held."""
    node = value.producer()
    assert value.dtype is not None
    part = [*dims_of(value)[:-1], width.dim()]
    weight = node.inputs[1].const_value if node is not None and node.op_type == "MatMul" and node.inputs[1] else None
    if node is None or weight is None or len(value.uses()) > 1 or len(weight.shape) != 2:
        outputs = op.op_multi_out("Split", [value], {"axis": -1, "num_outputs": heads}, num_outputs=heads)
        return [typed(output, value.dtype, part) for output in outputs]
    columns = np.split(weight.numpy(), heads, axis=1)
    return [
        typed(op.MatMul(node.inputs[0], _weight(f"{value.name}/head_{i}", one, weight.dtype)), value.dtype, part)
        for i, one in enumerate(columns)
    ]


def _weight(name: str, data: Array, dtype: ir.DataType) -> ir.Value:
    tensor = ir.tensor(np.ascontiguousarray(data), dtype=dtype, name=name)
    return typed(ir.Value(name=name, const_value=tensor), dtype, data.shape)


def _register_initializers(graph: ir.Graph) -> None:
    """Weights that a form made are the graph's."""
    for node in graph:
        for value in node.inputs:
            if value is None or value.producer() is not None or value.const_value is None or value.name is None:
                continue
            if value not in graph.inputs and value.name not in graph.initializers:
                graph.register_initializer(value)


def _standard(op: Builder, a: Attention, name: str) -> ir.Value:
    ends = (("H", "n_q", "d_k"), ("H_kv", "n_k", "d_k"), ("H_kv", "n_k", "d_v"), ("H", "n_q", "d_v"))
    *inner, out = (a.layout("B", *end) for end in ends)
    operands = (a.query, a.key, a.value)
    inputs = [rearrange(op, o.value, o.layout, layout, a.sized) for o, layout in zip(operands, inner, strict=True)]
    attributes: dict[str, int | float] = {"scale": a.scale, "softcap": a.softcap, "is_causal": int(a.is_causal)}
    if a.mask is not None:
        inputs.append(_whole_rows(op, a, a.mask))
    result = op.op("Attention", inputs, attributes, name=name)
    typed(result, a.dtype, [size.dim() for size in out.sizes()])
    return _guarded(op, a, result, out)


def _group_query(op: Builder, a: Attention, name: str) -> ir.Value:
    ends = (("n_q", "H d_k"), ("n_k", "H_kv d_k"), ("n_k", "H_kv d_v"), ("n_q", "H d_v"))
    *inner, out = (a.layout("B", *end) for end in ends)
    operands = (a.query, a.key, a.value)
    query, key, value = (
        rearrange(op, o.value, o.layout, layout, a.sized) for o, layout in zip(operands, inner, strict=True)
    )
    int32 = ir.DataType.INT32.value
    batch, tokens = op.Shape(query, start=0, end=1), op.Shape(query, start=1, end=2)
    last = op.Expand(op.Cast(op.Sub(tokens, constant(op, [1])), to=int32), batch)  # of the keys, in every sequence
    attributes: dict[str, int | float] = {
        "num_heads": a.size("H").factor,
        "kv_num_heads": a.size("H_kv").factor,
        "scale": a.scale,
        "softcap": a.softcap,
    }
    inputs = [query, key, value, None, None, last, op.Cast(op.Squeeze(tokens), to=int32)]
    results = op.op_multi_out("GroupQueryAttention", inputs, attributes, domain=CONTRIB, num_outputs=3, name=name)
    result = typed(results[0], a.dtype, [size.dim() for size in out.sizes()])
    return rearrange(op, result, out, a.output_layout, a.sized)


def _guarded(op: Builder, a: Attention, result: ir.Value, layout: Layout) -> ir.Value:
    """`result` as the graph wants it, with zeros for queries without keys where these are meant."""
    if a.mask is not None and not a.silent_rows_are_nan:
        have = Layout([*_axes_of_mask(a, a.mask).dims[:3], ()])
        if set(have.dims[1]) and len(layout) == 3:  # rows that differ by head do not broadcast to heads side by side
            result, layout = rearrange(op, result, layout, rows := a.layout("B", "H", "n_q", "d_v"), a.sized), rows
        varies = set(have.axes)
        some = rearrange(
            op,
            attends_to_some(op, a.mask),
            have,
            Layout([axis for axis in dim if axis in varies] for dim in layout.dims),
            a.sized,
        )
        result = like(op.Where(some, result, constant(op, 0.0, a.dtype)), result)
    return rearrange(op, result, layout, a.output_layout, a.sized)


def _axes_of_mask(a: Attention, mask: ir.Value) -> Layout:
    names = ("B", "H", "n_q", "n_k")
    return Layout(
        () if size == ONE else a.layout(name).dims[0] for size, name in zip(sizes_of(mask), names, strict=True)
    )


def _bias(op: Builder, a: Attention) -> ir.Value:
    """The mask as a number to add."""
    assert a.mask is not None
    if a.mask.dtype != BOOL:
        return _whole_rows(op, a, a.mask)
    zero, least = constant(op, 0.0, a.dtype), constant(op, -np.inf, a.dtype)
    return _whole_rows(op, a, like(op.Where(a.mask, zero, least), a.mask, a.dtype))


def _whole_rows(op: Builder, a: Attention, mask: ir.Value) -> ir.Value:
    """`mask` repeated along queries and keys where it is broadcast there."""
    have = _axes_of_mask(a, mask)
    want = Layout([*have.dims[:2], a.layout("n_q").dims[0], a.layout("n_k").dims[0]])
    return rearrange(op, mask, have, want, a.sized)


def _products(op: Builder, a: Attention, name: str) -> ir.Value:
    rows, columns = a.layout("B", "H", "n_q", "d_v"), a.layout("B", "H", "d_v", "n_q")
    as_columns = needs_transpose(rows, a.output_layout) and not needs_transpose(columns, a.output_layout)
    value_layout = a.layout("B", "H", "d_v", "n_k") if as_columns else a.layout("B", "H", "n_k", "d_v")
    query = rearrange(op, a.query.value, a.query.layout, a.layout("B", "H", "n_q", "d_k"), a.sized)
    key = rearrange(op, a.key.value, a.key.layout, a.layout("B", "H", "d_k", "n_k"), a.sized)
    value = rearrange(op, a.value.value, a.value.layout, value_layout, a.sized)
    result = decompose(op, a, query, key, value, name, as_columns)
    return rearrange(op, result, columns if as_columns else rows, a.output_layout, a.sized)
