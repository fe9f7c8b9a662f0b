"""Lower canonical attention to the form that ONNX Runtime runs fastest on a CPU.

The fastest form depends on shapes, layouts and the machine, so a tuner measures (:mod:`.tuning`) if there is one;
otherwise rules choose:

- `com.microsoft::MultiHeadAttention` without a mask never materialises the n² scores: less time, and memory that grows
  with n instead of n². Its operands must have the heads side by side after the tokens, or one head at a time; if that
  needs transposes that the plain products do not (features as rows, say), it pays off from some hundred tokens on.
- `com.microsoft::GroupQueryAttention`, which is causal, does not materialise them either: eight heads of 64 over 4,096
  tokens take a tenth of the time of the products, which store several copies of them; over 1,024, two thirds.
- A mask that is the same for every query, such as a padding mask, becomes one more feature of the keys, and every query
  has a one there: so `MultiHeadAttention` without a mask computes it, at the cost of one feature.
- Attention under a mask that leaves a band visible, such as a window, is computed in blocks (:mod:`.blocks`): 256 keys
  before the query over 4,096 tokens take a third of the time of attention without a mask, and memory linear in tokens.
- With any other mask, and for causal attention where that does not apply, every fused form materialises the scores too,
  and is seldom faster than the products.
- On CUDA, `MultiHeadAttention` with a mask does not store the scores of a multiple of 8 tokens: BERT-base in fp16 takes
  0.79 (8 samples) and 0.84 (1 sample) of its time with the products on an H200.
- 16-bit types have no kernels for either: on the CPU the graph computes in fp32 between inputs and outputs of the
  bundle's own type. Quantised products become integer products (:mod:`.integers`).

The kernels of ONNX Runtime 1.31 require masks whose last two dims are not broadcast; a causal flag that counts from the
first key (`MultiHeadAttention` does so with as many queries as keys); and head sizes that are a multiple of 8 for
`GroupQueryAttention`, which is always causal. `Attention` gives zeros for a fully masked row; `MultiHeadAttention` with
a bias gives NaN, like a bare softmax.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod

import ml_dtypes
import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.export.attention.canonical import KEY, OUTPUT, QUERY, SCORES, VALUE
from attnforge.export.attention.canonicalize import Site
from attnforge.export.attention.layout import Layout, effort
from attnforge.export.attention.masking import NEGLIGIBLE, any_key
from attnforge.export.attention.operands import Operand
from attnforge.export.graphs.build import Builder, cast, constant, dims_of, initializer, like, typed
from attnforge.export.graphs.nodes import numpy_type
from attnforge.export.graphs.sizes import ONE, Size, sizes_of
from attnforge.export.graphs.types import in_fp32, widen
from attnforge.export.lowering.attention import (
    CONTRIB,
    NO_SIZES,
    SIDE_BY_SIDE,
    Attention,
    Candidate,
    Lowered,
    Sizes,
    usual,
)
from attnforge.export.lowering.blocks import BAND, forms_in_blocks, in_blocks, written
from attnforge.export.lowering.cached import caches, group_query, is_for_group_query, over_filled
from attnforge.export.lowering.integers import casts_for_fp8, integer_products, products_of_nibbles, rows_first
from attnforge.export.lowering.norms import centre_group_norms
from attnforge.export.lowering.products import fills_in_number, products
from attnforge.export.lowering.tuning import Tuner, lower_sites
from attnforge.export.masks.at_blocks import mask_by_key

BOOL, INT32, FLOAT = ir.DataType.BOOL, ir.DataType.INT32, ir.DataType.FLOAT

MULTI_HEAD = f"{CONTRIB}::MultiHeadAttention"
ONE_HEAD = f"{MULTI_HEAD}, a head at a time"
HEAD_AFTER_HEAD = f"{MULTI_HEAD}, head after head"
MASK_AS_FEATURE = f"{MULTI_HEAD}, mask as a feature"
GROUP_QUERY = f"{CONTRIB}::GroupQueryAttention"
GROUP_QUERY_FIRST = f"{GROUP_QUERY}, first queries apart"
CAUSAL_AS_FEATURE = f"{GROUP_QUERY}, mask as a feature"
GROUP_QUERY_CACHE, FILLED_ATTENTION = f"{GROUP_QUERY}, cache in place", "Attention, filled part of the cache"

HIDDEN = -2e38
"""The feature of a hidden key. Next to it every other score vanishes, so that fully masked rows get equal weights, as
with a very low number as mask. No score of up to 1e38 makes it infinite or raises it to that of a visible key; minus
infinity itself would give NaN if the kernel hides a whole block of keys."""

MANY_BYTES = 24 * 2**20
"""Bytes of queries, keys and values of all heads, at the largest sizes, from which each head is projected and computed
on its own. The kernel copies its inputs, so all heads at once take twice these bytes; below, one call for all heads is
chosen, which is about two percent faster."""

WITHOUT_BF16 = ("Clip",)
"""Operators that keep ONNX Runtime 1.31 from opening a graph in bf16 on CUDA; they are computed in fp32. Others without
a kernel for bf16 there are left as they are."""

MANY_SCORES = 512 * 512
"""Scores per head from which a form that does not materialise them is worth any transposes that it needs, and causal
attention in one kernel is worth its copies."""

ENDS = (("n_q", "d_k"), ("n_k", "d_k"), ("n_k", "d_v"), ("n_q", "d_v"))
"""Tokens and features of query, key, value and output."""


def lower(
    model: ir.Model,
    sites: list[Site],
    sizes: Sizes,
    device: str = "cpu",
    tuner: Tuner | None = None,
    largest: Mapping[str, int] | None = None,
) -> list[Lowered]:
    """Rewrite every canonical site of `model`, in place, for ONNX Runtime.

    Args:
        model: a graph with canonical Attention nodes.
        sites: what :func:`~attnforge.export.attention.canonicalize.canonicalize` found in it.
        sizes: the usual size of each symbolic dim.
        device: on `"cuda"` the graph's types are kept; on `"cpu"` 16-bit types are widened to fp32.
        tuner: chooses by measuring on this machine's CPU; without one the rules choose.
        largest: the largest size of each symbolic dim; by default the same as `sizes`.

    Returns:
        the form of every canonical site, and why it was chosen.
    """
    centre_group_norms(model)
    rows_first(model)
    products_of_nibbles(model)
    if device == "cpu":
        widen(model, caches(model))
        integer_products(model)
    else:
        in_fp32(model, WITHOUT_BF16)
    offered = partial(candidates_for, sizes=sizes, largest=largest or sizes, device=device)
    lowered = lower_sites(model, sites, offered, tuner)
    casts_for_fp8(model)  # after the sites, which are recognised by their Q/DQ
    RemoveUnusedNodesPass()(model)
    return lowered


# --- which form -------------------------------------------------------------------------------------------------------


def candidates_for(
    site: str, a: Attention, sizes: Sizes = NO_SIZES, largest: Sizes = NO_SIZES, device: str = "cpu"
) -> list[Candidate]:
    """The forms that compute a site at any sizes: the plain products, in a decoder step those over the cache, and the
    others in order of preference.

    Args:
        site: its name.
        a: the site.
        sizes: the usual size of each symbolic dim, by which forms pay.
        largest: the largest size of each.
        device: `"cpu"` or `"cuda"`, where only forms that were measured there pay.
    """
    on_cpu = device == "cpu"
    if a.cached is not None:
        return _of_step(site, a, on_cpu)
    scores = usual(a.size("n_q"), sizes) * usual(a.size("n_k"), sizes)
    found: list[Candidate] = []
    if a.softmax_dtype == a.dtype and a.scales is None:
        many = on_cpu and scores >= MANY_SCORES
        if a.mask is None or _is_additive(a):
            found += [*_group_queries(site, a, sizes, many), *_blocks(site, a, sizes, many)]
            found += _multi_head_forms(site, a, sizes, largest, scores, on_cpu)
            if a.mask is None or not a.silent_rows_are_nan:
                found.append(Candidate("Attention", f"{site}/Attention", _standard, False, "only if measured"))
        found = [*_by_key(site, a, many), *found]  # no other form that pays computes such a mask
    why = _why_products(a, scores)
    return [Candidate(_products_form(a), f"{site}/Softmax", products, True, why, fused=False), *found]


def _of_step(site: str, a: Attention, on_cpu: bool) -> list[Candidate]:
    """The forms of attention over a cache, the plain products first."""
    assert a.cached is not None
    why, emit = "reads only the filled part of the cache", partial(over_filled, attend=products)
    found = [Candidate(f"{_products_form(a)}, filled part", f"{site}/Softmax", emit, True, why, fused=False)]
    if is_for_group_query(a):
        name = f"{site}/GroupQueryAttention"
        emit = partial(group_query, all_slots=not on_cpu)
        pays = on_cpu or (a.dtype != FLOAT and a.cached.seen.slopes is None)  # all that CUDA's kernel supports
        how = "writes to the cache in place, and reads only its filled part"
        found.append(Candidate(GROUP_QUERY_CACHE, name, emit, pays, how, materialises_scores=False))
    if a.softmax_dtype == a.dtype:
        standard = partial(over_filled, attend=_standard)
        found.append(Candidate(FILLED_ATTENTION, f"{site}/Attention", standard, on_cpu, why))
    return found


def _group_queries(site: str, a: Attention, sizes: Sizes, many: bool) -> Iterator[Candidate]:
    """The kernel that is always causal, where a site is."""
    if a.residue != "none" or not is_for_group_query(a):
        return
    name = f"{site}/GroupQueryAttention"
    if a.is_triangle:
        why = "causal, with no other mask: memory linear in tokens, and less time with many tokens"
        yield Candidate(GROUP_QUERY, name, _group_query, many, why, materialises_scores=False)
    elif a.causal_prefix:
        pays = many and 2 * a.causal_prefix <= usual(a.size("n_q"), sizes)
        why, name = "causal, except for the first queries, which see only the first keys", f"{name}/later queries"
        yield Candidate(GROUP_QUERY_FIRST, name, _after_first, pays, why, materialises_scores=False)


def _by_key(site: str, a: Attention, many: bool) -> Iterator[Candidate]:
    """A mask that hides the same keys from every query, as one more feature."""
    if a.residue != "by key" or a.mask is None or a.dtype != FLOAT or not a.has_static_heads or a.softcap:
        return
    why = "the mask hides the same keys from every query: memory linear in tokens"
    if not a.is_triangle:
        name = f"{site}/MultiHeadAttention"
        yield Candidate(MASK_AS_FEATURE, name, _mask_as_feature, many, why, materialises_scores=False)
    elif sizes_of(a.mask)[1] == ONE:
        name = f"{site}/GroupQueryAttention"
        yield Candidate(CAUSAL_AS_FEATURE, name, _causal_mask_as_feature, many, why, materialises_scores=False)


def _blocks(site: str, a: Attention, sizes: Sizes, many: bool) -> Iterator[Candidate]:
    """The blocks of a band."""
    first = a.band.first_queries if a.band is not None else 0
    name, more = f"{site}/Attention", ""
    if first:  # two parts have no map
        name, more = f"{name}/blocks", f", {first} first queries"
    return forms_in_blocks(a, "Attention", name, _in_blocks, usual(a.size("n_k"), sizes), many, more)


def _multi_head_forms(
    site: str, a: Attention, sizes: Sizes, largest: Sizes, scores: int, on_cpu: bool
) -> Iterator[Candidate]:
    """The kernel of attention with at most a mask that is added, for all heads in one call or one at a time."""
    if a.softcap or (a.is_causal and a.size("n_q") != a.size("n_k")):
        return
    name, is_plain = f"{site}/MultiHeadAttention", a.mask is None and not a.is_causal
    is_packed = a.size("H").is_static and _moves(a, _packed(a)) <= _moves(a, _apart(a))
    moves = _moves(a, _packed(a) if is_packed else _apart(a))
    pays = is_plain and (scores >= MANY_SCORES or moves <= _moves(a, *_of_products(a)))
    why = "the fast path without a mask: memory linear in tokens"
    if is_plain and a.size("H").is_static and on_cpu and (size := _bytes(a, largest)) >= MANY_BYTES:
        how = f"head after head, because queries, keys and values of all heads take up to {size / 2**20:.0f} MiB"
        yield Candidate(
            HEAD_AFTER_HEAD, name, _head_after_head, pays and is_packed, f"{why}; {how}",
            materialises_scores=False, projects=True,
        )  # fmt: skip
    elif a.size("H").is_static:
        emit, packed_pays, how = partial(_multi_head, packed=True), pays and is_packed, why
        if not on_cpu and _pays_on_cuda(a, sizes):
            packed_pays, how = True, "for a multiple of 8 tokens, CUDA's kernel does not store the masked scores"
        yield Candidate(MULTI_HEAD, name, emit, packed_pays, how, materialises_scores=not is_plain)
    if a.mask is None or sizes_of(a.mask)[:2] == [ONE, ONE]:
        emit = partial(_multi_head, packed=False)
        yield Candidate(ONE_HEAD, name, emit, pays and not is_packed, why, materialises_scores=not is_plain)


def _is_additive(a: Attention) -> bool:
    """Whether adding the mask to the scores is equivalent, and its dims are the scores' own.

    A finite number that replaces scores is not equivalent; nor is a mask combined with a causal flag, which together
    may mask a row fully.
    """
    assert a.mask is not None
    fits = all(size in (ONE, a.size(dim)) for size, dim in zip(sizes_of(a.mask), SCORES, strict=True))
    return fits and not fills_in_number(a.mask) and not a.is_causal


def _products_form(a: Attention) -> str:
    return "MatMul·Tanh·Softmax·MatMul" if a.softcap else "MatMul·Softmax·MatMul"


def _why_products(a: Attention, scores: int) -> str:
    """Why the rules choose the products, where no other form pays."""
    if a.scales is not None:
        return "in fp8, for parity: no fused form rounds the softmax's output"
    if a.mask is not None or a.is_causal:
        return "with a mask, fused forms materialise the scores too, and are seldom faster than the products"
    if a.softcap:
        return "a soft cap on the scores, which the form that does not materialise them lacks"
    if a.softmax_dtype != a.dtype:
        return "the softmax is computed in another type than the products, which fused forms do not support"
    return f"the fused form needs other layouts, which do not pay off at about {scores} scores per head"


def _pays_on_cuda(a: Attention, sizes: Sizes) -> bool:
    """Whether one kernel pays with a mask: that was measured in fp16. The kernel stores the scores after all unless the
    tokens are a multiple of 8; what it computes for a fully masked row has not been compared with NaN."""
    tokens = a.size("n_q")
    masked = a.mask is not None and not a.is_causal and a.mask.dtype in (BOOL, a.dtype) and not a.silent_rows_are_nan
    return masked and a.dtype == ir.DataType.FLOAT16 and tokens == a.size("n_k") and usual(tokens, sizes) % 8 == 0


def _bytes(a: Attention, sizes: Sizes) -> int:
    """Bytes of queries, keys and values of all heads in fp32."""
    operands = [("B", "H", *ends) for ends in ENDS[:3]]
    return 4 * sum(prod(usual(a.size(dim), sizes) for dim in dims) for dims in operands)


def _packed(a: Attention) -> list[Layout]:
    """Layouts of query, key, value and output with the heads side by side in the last dim."""
    return [a.layout("B", tokens, f"H {features}") for tokens, features in ENDS]


def _apart(a: Attention) -> list[Layout]:
    """Layouts of query, key, value and output with heads as batches."""
    return [a.layout("B H", tokens, features) for tokens, features in ENDS]


def _of_products(a: Attention) -> list[list[Layout]]:
    """The layouts that the products take, as ONNX Runtime's product also takes the last two dims swapped."""
    return [[a.layout("B", "H", *ends[::step]) for ends in ENDS] for step in (1, -1)]


def _moves(a: Attention, *layouts: Sequence[Layout]) -> int:
    """The number of operands that have to be transposed, or need a computed shape, to get one of `layouts` each."""
    parts = zip((*a.operands, a.output), *layouts, strict=True)
    return sum(min(effort(part.layout, layout) for layout in either) for part, *either in parts)


# --- the forms --------------------------------------------------------------------------------------------------------


def _multi_head(op: Builder, a: Attention, name: str, packed: bool) -> ir.Value:
    *layouts, output = _packed(a) if packed else _apart(a)
    inputs: list[ir.Value | None] = [*a.inputs(op, layouts)]
    attributes: dict[str, int | float] = {"num_heads": a.size("H").factor if packed else 1, "scale": a.scale}
    if a.is_causal:
        attributes |= {"unidirectional": 1, "mask_filter_value": -np.inf}
    if a.mask is not None:
        inputs += [None, None, _bias(op, a, a.mask)]
    result = op.op("MultiHeadAttention", inputs, attributes, domain=CONTRIB, name=name)
    return _guarded(op, a, result, output)


def _mask_as_feature(op: Builder, a: Attention, name: str) -> ir.Value:
    mask, inputs = _with_feature(op, a, "H", 1)
    inputs.append(a.arranged(op, a.value, a.layout("B", "n_k", "H d_v")))
    output = a.layout("B", "n_q", "H d_v")
    attributes = {"num_heads": a.size("H").factor, "scale": 1.0}
    result = op.op("MultiHeadAttention", inputs, attributes, domain=CONTRIB, name=name)
    return _guarded(op, replace(a, mask=mask), result, output)


def _causal_mask_as_feature(op: Builder, a: Attention, name: str) -> ir.Value:
    """Heads of queries, keys and values are filled up to one size, a multiple of 8."""
    d_k, d_v = a.size("d_k").factor, a.size("d_v").factor
    size = -(-max(d_k + 1, d_v) // 8) * 8
    mask, inputs = _with_feature(op, a, "H_kv", size - d_k)
    value = a.arranged(op, a.value, a.layout("B", "n_k", "H_kv", "d_v"))
    if size > d_v:
        value = op.Pad(value, constant(op, [0] * 7 + [size - d_v]))
    inputs.append(op.Reshape(value, constant(op, [0, -1, a.size("H_kv").factor * size])))
    grouped = _grouped(op, inputs, {**a.attributes(), "scale": 1.0}, name)
    apart = op.Reshape(grouped, constant(op, [0, -1, a.size("H").factor, size]))
    output = a.layout("B", "n_q", "H", "d_v")
    result = a.laid_out(op.Slice(apart, constant(op, [0]), constant(op, [d_v]), constant(op, [3])), output)
    if not a.silent_rows_are_nan:  # zeros if neither the query's own key nor an earlier one is visible
        shown = op.CumSum(op.Cast(_is_shown(op, mask), to=INT32.value), constant(op, 3))
        some = op.Transpose(op.Greater(shown, constant(op, 0, INT32)), perm=[0, 3, 1, 2])
        result = like(op.Where(some, result, constant(op, 0.0, a.dtype)), result)
    return a.as_output(op, result, output)


def _with_feature(op: Builder, a: Attention, heads: str, more: int) -> tuple[ir.Value, list[ir.Value]]:
    """The mask of one query, and query and key, heads side by side, with `more` features per head: the first says
    whether a key is hidden, the others are zeros. The scale is already applied to the query."""
    query = a.arranged(op, a.query, a.layout("B", "n_q", "H", "d_k"))
    key = a.arranged(op, a.key, a.layout("B", "n_k", heads, "d_k"))
    mask = _mask_by_key(op, a, key)
    number = op.Where(_is_shown(op, mask), constant(op, 0.0, a.dtype), constant(op, HIDDEN, a.dtype))
    have = Operand(like(number, mask, a.dtype), _mask_layout(a, mask))
    column = a.arranged(op, have, a.layout("B", "n_k", heads, ""))
    one, none = constant(op, 1.0, a.dtype), constant(op, [0] * 7 + [more - 1])
    query = op.Pad(op.Mul(query, constant(op, a.scale, a.dtype)), constant(op, [0] * 7 + [1]), one)
    key = op.Concat(key, column, axis=3)
    if more > 1:
        query, key = op.Pad(query, none), op.Pad(key, none)
    width = a.size("d_k").factor + more
    query = op.Reshape(query, constant(op, [0, -1, a.size("H").factor * width]))
    return mask, [query, op.Reshape(key, constant(op, [0, -1, a.size(heads).factor * width]))]


def _is_shown(op: Builder, mask: ir.Value) -> ir.Value:
    """A mask that only hides, as a boolean."""
    if mask.dtype == BOOL:
        return mask
    return like(op.Greater(mask, constant(op, NEGLIGIBLE, mask.dtype)), mask, BOOL)


def _mask_by_key(op: Builder, a: Attention, key: ir.Value) -> ir.Value:
    """The mask of a query that sees no fewer keys than any other, `(B or 1, H or 1, 1, n_k)`; `key` has its tokens in
    dim 1."""
    mask = a.mask
    assert mask is not None
    if sizes_of(mask)[2] == ONE:
        return mask
    row = mask_by_key(op, a.node, a.is_triangle)
    assert row is not None
    whole = op.Expand(row, op.Concat(constant(op, [1, 1, 1]), op.Shape(key, start=1, end=2), axis=0))
    return typed(whole, mask.dtype, [*dims_of(row)[:3], dims_of(mask)[3]])


def _head_after_head(op: Builder, a: Attention, name: str) -> ir.Value:
    """MultiHeadAttention without a mask, one node per head."""
    *layouts, output = _packed(a)
    heads = a.size("H").factor
    parts = [
        _heads(op, a.arranged(op, operand, layout), heads, a.size(features))
        for operand, layout, (_, features) in zip(a.operands, layouts, ENDS[:3], strict=True)
    ]
    attributes = {"num_heads": 1, "scale": a.scale}
    results = []
    for i, inputs in enumerate(zip(*parts, strict=True)):
        result = op.op("MultiHeadAttention", inputs, attributes, domain=CONTRIB, name=f"{name}_{i}" if i else name)
        results.append(a.laid_out(result, a.layout("B", "n_q", "d_v")))
    return a.as_output(op, op.Concat(*results, axis=-1), output)


def _heads(op: Builder, value: ir.Value, heads: int, width: Size) -> list[ir.Value]:
    """Split the heads in the last dim of `value`. A projection is written head by head, so that its whole output is
    never materialised."""
    node, dims = value.producer(), [*dims_of(value)[:-1], width.dim()]
    weight = node.inputs[1].const_value if node is not None and node.op_type == "MatMul" and node.inputs[1] else None
    if node is None or weight is None or len(value.uses()) > 1 or len(weight.shape) != 2:
        outputs = op.op_multi_out("Split", [value], {"axis": -1, "num_outputs": heads}, num_outputs=heads)
        return [typed(output, value.dtype, dims) for output in outputs]
    assert isinstance(node.graph, ir.Graph)
    columns = enumerate(np.split(weight.numpy(), heads, axis=1))
    weights = [initializer(node.graph, f"{value.name}/head_{i}", part) for i, part in columns]
    return [typed(op.MatMul(node.inputs[0], part), value.dtype, dims) for part in weights]


def _standard(op: Builder, a: Attention, name: str) -> ir.Value:
    output = a.layout(*OUTPUT)
    inputs = a.inputs(op, [a.layout(*dims) for dims in (QUERY, KEY, VALUE)])
    attributes: dict[str, int | float] = {"scale": a.scale, "softcap": a.softcap, "is_causal": int(a.is_causal)}
    if a.mask is not None:
        inputs.append(_whole_rows(op, a, _without_least(op, a.mask)))
    return _guarded(op, a, op.op("Attention", inputs, attributes, name=name), output)


def _without_least(op: Builder, mask: ir.Value) -> ir.Value:
    """Replace the least number of a mask's type by the next one. ONNX Runtime's Attention takes the least number for
    minus infinity, and gives zeros for a row that has it for every key; by the standard, as in torch, such a query
    attends equally to all keys."""
    if mask.dtype == BOOL:
        return mask
    least = np.asarray(ml_dtypes.finfo(numpy_type(mask)).min)  # type: ignore[no-untyped-call]
    if mask.const_value is not None and not (mask.const_value.numpy() == least).any():
        return mask
    following = np.nextafter(least, np.zeros_like(least))
    is_least = like(op.Equal(mask, constant(op, least, mask.dtype)), mask, BOOL)
    return like(op.Where(is_least, constant(op, following, mask.dtype), mask), mask)


def _group_query(op: Builder, a: Attention, name: str) -> ir.Value:
    """If the heads are not side by side, they become samples, which the kernel computes in half the memory: it need not
    move them."""
    packed = [a.layout("B", *ends) for ends in SIDE_BY_SIDE]
    are_samples = a.size("H") == a.size("H_kv") and _moves(a, _apart(a)) < _moves(a, packed)
    *layouts, output = _apart(a) if are_samples else packed
    one_head = {"num_heads": 1, "kv_num_heads": 1} if are_samples else {}
    return a.as_output(op, _grouped(op, a.inputs(op, layouts), a.attributes() | one_head, name), output)


def _grouped(
    op: Builder, operands: Sequence[ir.Value], attributes: Mapping[str, int | float | str], name: str
) -> ir.Value:
    """GroupQueryAttention of `(batch, tokens, heads · size)` operands."""
    query, key, value = operands
    batch, tokens = op.Shape(query, start=0, end=1), op.Shape(query, start=1, end=2)
    last = op.Cast(op.Sub(tokens, constant(op, [1])), to=INT32.value)  # index of the last key, in every sequence
    last = op.Expand(last, batch)
    inputs = [query, key, value, None, None, last, op.Cast(op.Squeeze(tokens), to=INT32.value)]
    result, *_ = op.op_multi_out("GroupQueryAttention", inputs, attributes, domain=CONTRIB, num_outputs=3, name=name)
    return result


def _after_first(op: Builder, a: Attention, name: str) -> ir.Value:
    """Attention in which every query sees some first keys in addition to earlier ones: the first queries are computed
    on those keys alone, and the later ones as in causal attention."""
    count = a.causal_prefix
    assert count is not None
    *layouts, output = (a.layout("B", *ends) for ends in SIDE_BY_SIDE)
    operands = a.inputs(op, layouts)
    causal = _grouped(op, operands, a.attributes(), name)
    begin, axis = constant(op, [count]), constant(op, [1])
    size = Size.of(ir.SymbolicDim(f"min({a.size('n_q').dim()}, {count})"))
    rows = [op.Slice(x, constant(op, [0]), begin, axis) for x in operands]
    first = _attended(op, a.of_block({"n_q": size, "n_k": size}, rows, None), f"{name}/first_queries")
    result = op.Concat(first, op.Slice(causal, begin, constant(op, [sys.maxsize]), axis), axis=1)
    return a.as_output(op, result, output)


def _in_blocks(op: Builder, a: Attention, name: str, width: int) -> ir.Value:
    assert a.band is not None
    metadata = {BAND: written(a.band)}

    def attend(part: Attention, number: int) -> ir.Value:
        return _attended(op, part, f"{name}/first_queries") if number else _attended(op, part, name, metadata)

    return in_blocks(op, a, width, attend)


def _attended(op: Builder, part: Attention, name: str, metadata: Mapping[str, str] | None = None) -> ir.Value:
    """The standard operator on some queries and keys, laid out as `B` and `SIDE_BY_SIDE`, or with heads apart."""
    inputs = [operand.value for operand in part.operands]
    if part.mask is not None:
        inputs.append(cast(op, _bias(op, part, part.mask), part.dtype))
    are_apart = len(part.query.layout) == 4
    attributes = {"scale": part.scale, "softcap": part.softcap} if are_apart else part.attributes("q_num_heads")
    result = op.op("Attention", inputs, attributes, name=name, metadata_props=dict(metadata or {}))
    return part.as_output(op, result, part.output.layout)


# --- masks ------------------------------------------------------------------------------------------------------------


def _guarded(op: Builder, a: Attention, result: ir.Value, layout: Layout) -> ir.Value:
    """`result` as the graph's output, with zeros for fully masked rows if the site gives zeros there."""
    if a.mask is not None and not a.silent_rows_are_nan:
        a.laid_out(result, layout)
        have = Layout([*_mask_layout(a, a.mask).dims[:3], ()])
        if set(have.dims[1]) and len(layout) == 3:  # rows that differ by head do not broadcast to heads side by side
            apart = a.layout(*OUTPUT)
            result, layout = a.arranged(op, Operand(result, layout), apart), apart
        varies = set(have.axes)
        want = Layout([axis for axis in dim if axis in varies] for dim in layout.dims)
        some = a.arranged(op, Operand(any_key(op, a.mask), have), want)
        result = like(op.Where(some, result, constant(op, 0.0, a.dtype)), result)
    return a.as_output(op, result, layout)


def _mask_layout(a: Attention, mask: ir.Value) -> Layout:
    return Layout(() if size == ONE else dim for size, dim in zip(sizes_of(mask), a.layout(*SCORES).dims, strict=True))


def _bias(op: Builder, a: Attention, mask: ir.Value) -> ir.Value:
    """The mask as numbers to add, full-size along queries and keys."""
    if mask.dtype == BOOL:
        zero, least = constant(op, 0.0, a.dtype), constant(op, -np.inf, a.dtype)
        mask = like(op.Where(mask, zero, least), mask, a.dtype)
    return _whole_rows(op, a, mask)


def _whole_rows(op: Builder, a: Attention, mask: ir.Value) -> ir.Value:
    """`mask` repeated along queries and keys if it is broadcast there."""
    have = _mask_layout(a, mask)
    return a.arranged(op, Operand(mask, have), Layout([*have.dims[:2], *a.layout("n_q", "n_k").dims]))
