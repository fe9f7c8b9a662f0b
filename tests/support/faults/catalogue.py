"""The list of faults."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.build import Builder, constant
from tests.support.faults.causal_blocks import IN_STEPS
from tests.support.faults.decoders import CACHES, DRIVEN, POSITIONS, SEEN
from tests.support.faults.eight_bits import IN_EIGHT_BITS
from tests.support.faults.graph import (
    KEPT,
    Alter,
    Build,
    Fault,
    Graph,
    NotThere,
    all_true,
    first_along,
    float_constant,
    is_constant,
    numbers,
    other,
    producer,
    required,
    rolled,
)
from tests.support.faults.low_bit import IN_4_BITS, IN_FP8, IN_TABLES
from tests.support.faults.masks import AS_FEATURES, IN_BLOCKS
from tests.support.faults.subjects import MOST_BATCH, MOST_TOKENS

FP16, BF16 = ir.DataType.FLOAT16, ir.DataType.BFLOAT16
CLIPPED = 16

# Scores


def factor(g: Graph) -> ir.Value:
    """Return the constant that scales the queries of the first site."""
    multiplied = producer(g.sites[0].scores.inputs[0])
    scale = next((value for value in multiplied.inputs if is_constant(value)), None)
    if multiplied.op_type != "Mul" or scale is None:
        raise NotThere("a scale")
    return scale


def rescaled(change: Callable[[float], float]) -> Alter:
    """Change the scale of the first site's scores."""

    def alter(g: Graph) -> None:
        if (node := g.fused) is not None:
            scale = node.attributes.get_float("scale", 0.0) or 0.0
            node.attributes["scale"] = ir.AttrFloat32("scale", change(scale))
        else:
            g.set(factor(g), np.asarray(change(float(numbers(factor(g))))))

    return alter


def scale_after_softmax(g: Graph) -> None:
    scale = float(numbers(factor(g)))
    g.set(factor(g), np.asarray(1.0))
    g.after(g.sites[0].softmax.outputs[0], lambda op, x: op.Mul(x, float_constant(op, x, scale)))


def softmax_over(axis: int) -> Alter:
    def alter(g: Graph) -> None:
        g.sites[0].softmax.attributes["axis"] = ir.AttrInt64("axis", axis)

    return alter


def softmax_twice(g: Graph) -> None:
    g.after(g.sites[0].softmax.outputs[0], lambda op, x: op.Softmax(x, axis=-1))


# Masks


def mask_becomes(build: Build) -> Alter:
    """Apply `build` to the graph's padding mask, which is True where a key is padding."""
    return lambda g: g.after(g.mask, build)


def allowed_becomes(build: Build, *layers: int) -> Alter:
    """Apply `build` to the mask of some layers, True where a query may attend: `(B, 1, 1 or n_q, n_k)`."""

    def alter(g: Graph) -> None:
        fills = [fill for fill, _ in g.masked()]
        for layer in layers or range(len(fills)):
            g.before(fills[layer], 0, build)

    return alter


def index_along(op: Builder, x: ir.Value, axis: int, shape: list[int]) -> tuple[ir.Value, ir.Value]:
    """Return the indices 0, 1, … along an axis of `x`, in the given shape, and the last index."""
    size = op.Squeeze(op.Shape(x, start=axis, end=axis + 1))
    return op.Reshape(op.Range(constant(op, 0), size, constant(op, 1)), constant(op, shape)), op.Sub(
        size, constant(op, 1)
    )


def also_head(op: Builder, allowed: ir.Value) -> ir.Value:
    return op.Or(allowed, constant(op, [[[[False]], [[True]], [[False]], [[False]]]], ir.DataType.BOOL))


def also_last_sample(op: Builder, allowed: ir.Value) -> ir.Value:
    return op.Or(allowed, op.Equal(*index_along(op, allowed, 0, [-1, 1, 1, 1])))


def also_last_row(g: Graph) -> None:
    for site in g.sites:
        assert site.fill is not None
        scores = site.scores.outputs[0]
        g.before(site.fill, 0, lambda op, x, s=scores: op.Or(x, op.Equal(*index_along(op, s, 2, [1, 1, -1, 1]))))  # type: ignore[misc]


def only_first_keys(op: Builder, allowed: ir.Value) -> ir.Value:
    indices, _ = index_along(op, allowed, 3, [1, 1, 1, -1])
    return op.And(allowed, op.Less(indices, constant(op, CLIPPED)))


def without_first_key(op: Builder, mask: ir.Value) -> ir.Value:
    indices, _ = index_along(op, mask, 1, [1, -1])
    return op.And(mask, op.Greater(indices, constant(op, 0)))


def nowhere(op: Builder, mask: ir.Value) -> ir.Value:
    return op.And(mask, constant(op, False, ir.DataType.BOOL))


def fill_with(number: float) -> Alter:
    def alter(g: Graph) -> None:
        for fill, _ in g.masked():
            assert fill.inputs[2] is not None
            g.set(fill.inputs[2], np.asarray(number))

    return alter


def without_guard(g: Graph) -> None:
    for site in g.sites:
        assert site.guard is not None
        g.replace(site.guard.outputs[0], site.context.outputs[0])


def zeros_for_one_key(g: Graph) -> None:
    for fill, guard in g.masked():
        allowed = fill.inputs[0]
        assert allowed is not None

        def several(op: Builder, some: ir.Value, allowed: ir.Value = allowed) -> ir.Value:
            count = op.ReduceSum(op.Cast(allowed, to=ir.DataType.INT64.value), constant(op, [-1]), keepdims=1)
            return op.And(some, op.Greater(count, constant(op, 1)))

        g.before(guard, 0, several)


def mask_after_softmax(g: Graph) -> None:
    """Zero the weights after the softmax, without renormalising them."""
    for site in g.sites:
        assert site.fill is not None and site.softmax.inputs[0] is site.fill.outputs[0]
        allowed = site.fill.inputs[0]
        site.softmax.replace_input_with(0, site.scores.outputs[0])
        g.after(
            site.softmax.outputs[0],
            lambda op, x, allowed=allowed: op.Where(allowed, x, float_constant(op, x, 0.0)),  # type: ignore[misc]
        )


def diagonal(k: int) -> Alter:
    """Shift the causal mask by `k` keys."""
    return lambda g: g.before(g.node("Trilu"), 1, lambda op, x: op.Add(x, constant(op, k)))


def upper(g: Graph) -> None:
    g.node("Trilu").attributes["upper"] = ir.AttrInt64("upper", 1)


def not_causal(g: Graph) -> None:
    node = g.node("Trilu")
    assert node.inputs[0] is not None
    g.replace(node.outputs[0], node.inputs[0])


def from_the_last_key(g: Graph) -> None:
    def aligned(op: Builder, k: ir.Value) -> ir.Value:
        rows, columns = (op.Squeeze(op.Shape(g.node("Trilu").inputs[0], start=i, end=i + 1)) for i in (0, 1))
        return op.Add(k, op.Sub(columns, rows))

    g.before(g.node("Trilu"), 1, aligned)


# Heads

EXCHANGED = [1, 0, 2, 3]


def heads_exchanged(of: str) -> Alter:
    """Exchange two heads of the queries, or of attention's output."""

    def alter(g: Graph) -> None:
        if (node := g.fused) is not None:
            width = node.inputs[0].shape[-1]  # type: ignore[union-attr,index]
            assert isinstance(width, int)
            columns = np.arange(width).reshape(4, -1)[EXCHANGED].ravel()

            def exchange(op: Builder, x: ir.Value) -> ir.Value:
                return op.Gather(x, constant(op, columns), axis=2)

            g.before(node, 0, exchange) if of == "query" else g.after(node.outputs[0], exchange)
            return
        site = g.sites[0]

        def exchange_apart(op: Builder, x: ir.Value) -> ir.Value:
            return op.Gather(x, constant(op, EXCHANGED), axis=1)

        if of == "query":
            g.before(site.scores, 0, exchange_apart)
        else:
            g.after(site.context.outputs[0], exchange_apart)

    return alter


def heads_interleaved(g: Graph) -> None:
    """Read the columns of the queries as (d, heads) instead of (heads, d)."""
    query = g.linear("query").output
    assert query.shape is not None and isinstance(query.shape[-1], int)
    columns = np.arange(query.shape[-1]).reshape(-1, 4).T.ravel()
    g.after(query, lambda op, x: op.Gather(x, constant(op, columns), axis=2))


def query_not_transposed(g: Graph) -> None:
    """Reshape (B, n, H, d) to (B, H, n, d) without a transpose."""
    node = producer(g.sites[0].scores.inputs[0])
    while node.op_type != "Transpose":
        node = producer(node.inputs[0])
    source = node.inputs[0]
    g.after(node.outputs[0], lambda op, x: op.Reshape(source, op.Shape(x)))


def output_not_transposed(g: Graph) -> None:
    """Reshape (B, H, n, d) to (B, n, H·d) without a transpose."""
    if (node := g.fused) is not None:

        def mixed(op: Builder, x: ir.Value) -> ir.Value:
            apart = op.Transpose(op.Reshape(x, constant(op, [0, 0, 4, -1])), perm=[0, 2, 1, 3])
            return op.Reshape(apart, op.Shape(x))

        g.after(node.outputs[0], mixed)
        return
    site = g.sites[0]
    assert site.guard is not None
    (transposed,) = g.users(site.guard.outputs[0])
    (merged,) = g.users(transposed.outputs[0])
    g.after(merged.outputs[0], lambda op, x: op.Reshape(transposed.inputs[0], op.Shape(x)))


def one_key_head(g: Graph) -> None:
    g.before(g.sites[0].scores, 1, lambda op, x: op.Gather(x, constant(op, [0, 0, 0, 0]), axis=1))


def half_the_heads(g: Graph) -> None:
    node = g.node("MultiHeadAttention")
    node.attributes["num_heads"] = ir.AttrInt64("num_heads", 2)


def head_lost(g: Graph) -> None:
    mask = [[[[1.0]], [[1.0]], [[1.0]], [[0.0]]]]
    g.after(g.sites[0].context.outputs[0], lambda op, x: op.Mul(x, float_constant(op, x, mask)))


# Weights


def transposed(part: str, layer: int = 0) -> Alter:
    def alter(g: Graph) -> None:
        weight = g.linear(part, layer).weight
        g.set(weight, numbers(weight).T)

    return alter


def exchanged(first: str, second: str, layers: tuple[int, int] = (0, 0)) -> Alter:
    """Exchange the weights and biases of two projections."""

    def alter(g: Graph) -> None:
        one, two = g.linear(first, layers[0]), g.linear(second, layers[1])
        swap(g, one.weight, two.weight)
        swap(g, one.bias, two.bias)

    return alter


def swap(g: Graph, one: ir.Value, two: ir.Value) -> None:
    before = numbers(one)
    g.set(one, numbers(two))
    g.set(two, before)


ELEMENT = {"sign": -1.0, "zero": 0.0, "half more": 1.5, "1%": 1.01}
CHANGES = {"sign": "has the other sign", "zero": "is zero", "half more": "is 1.5 times as large", "1%": "is 1% off"}


def element(weight: Callable[[Graph], ir.Value], change: str, row: int | None = None) -> Alter:
    """Change the largest element of a weight, or of one of its rows."""

    def alter(g: Graph) -> None:
        value = weight(g)
        array = numbers(value).copy()
        part = array if row is None else array[row]
        part[np.unravel_index(np.abs(part).argmax(), part.shape)] *= ELEMENT[change]
        g.set(value, array)

    return alter


def of(part: str, layer: int = 0) -> Callable[[Graph], ir.Value]:
    return lambda g: g.linear(part, layer).weight


def gain(i: int) -> Callable[[Graph], ir.Value]:
    return lambda g: required(g.node("LayerNormalization", i).inputs[1])


def shift(i: int) -> Callable[[Graph], ir.Value]:
    return lambda g: required(g.node("LayerNormalization", i).inputs[2])


def bias_of(part: str, layer: int = 0) -> Callable[[Graph], ir.Value]:
    return lambda g: g.linear(part, layer).bias


def named(ending: str) -> Callable[[Graph], ir.Value]:
    return lambda g: g.weight(ending)


def times(weight: Callable[[Graph], ir.Value], factor: float) -> Alter:
    def alter(g: Graph) -> None:
        g.set(weight(g), numbers(weight(g)) * factor)

    return alter


def rounded_weights(dtype: ir.DataType) -> Alter:
    def alter(g: Graph) -> None:
        for value in g.graph.initializers.values():
            array = numbers(value)
            if array.dtype == np.float32 and array.ndim == 2:
                value.const_value = ir.tensor(array.astype(dtype.numpy()).astype(np.float32), name=value.name)

    return alter


def layers_exchanged(g: Graph) -> None:
    for part in ("query", "key", "value", "output", "up", "down"):
        exchanged(part, part, (0, 1))(g)
    for which in (gain, shift):
        for i in (0, 1):
            swap(g, which(i)(g), which(i + 2)(g))


def first_layer_twice(g: Graph) -> None:
    for part in ("query", "key", "value", "output", "up", "down"):
        one, two = g.linear(part, 0), g.linear(part, 1)
        g.set(two.weight, numbers(one.weight))
        g.set(two.bias, numbers(one.bias))


def layer_left_out(g: Graph) -> None:
    """Skip the second layer: the last norm gets the output of the first one."""
    third, last = g.node("LayerNormalization", 2), g.node("LayerNormalization", -1)
    last.replace_input_with(0, third.inputs[0])


# Residuals, norms, activations


def sum_of(g: Graph, part: str, layer: int) -> tuple[ir.Node, ir.Value, ir.Value]:
    """Return the Add after a branch, the residual, and the branch."""
    branch = g.linear(part, layer).output
    adds = [user for user in g.users(branch) if user.op_type == "Add"]
    if len(adds) != 1:
        raise NotThere(f"a residual around {part}")
    return adds[0], other(adds[0], branch), branch


def residual(part: str, how: str, layer: int = 0) -> Alter:
    def alter(g: Graph) -> None:
        add, around, branch = sum_of(g, part, layer)
        if how == "dropped":
            g.replace(add.outputs[0], branch)
        elif how == "branch dropped":
            g.replace(add.outputs[0], around)
        else:
            g.after(add.outputs[0], lambda op, x: op.Add(x, around))

    return alter


def epsilon(number: float, i: int = 0) -> Alter:
    def alter(g: Graph) -> None:
        g.node("LayerNormalization", i).attributes["epsilon"] = ir.AttrFloat32("epsilon", number)

    return alter


def no_mean(g: Graph) -> None:
    """Normalise by the root mean square, without subtracting the mean."""
    node = g.node("LayerNormalization")
    x, scale, bias = (required(value) for value in node.inputs)

    def root_mean_square(op: Builder, normed: ir.Value) -> ir.Value:
        square = op.ReduceMean(op.Mul(x, x), constant(op, [-1]), keepdims=1)
        root = op.Sqrt(op.Add(square, float_constant(op, x, 1e-5)))
        return op.Add(op.Mul(op.Div(x, root), scale), bias)

    g.after(node.outputs[0], root_mean_square)


def norm_after(g: Graph) -> None:
    """Compute x + norm(attention(x)) instead of x + attention(norm(x))."""
    node = g.node("LayerNormalization")
    x, scale, bias = (required(value) for value in node.inputs)
    g.replace(node.outputs[0], x)
    g.after(g.linear("output").output, lambda op, y: op.LayerNormalization(y, scale, bias, axis=-1, epsilon=1e-5))


def norm_left_out(i: int) -> Alter:
    def alter(g: Graph) -> None:
        node = g.node("LayerNormalization", i)
        if node.outputs[0].is_graph_output():
            g.after(node.outputs[0], lambda op, y: op.Identity(node.inputs[0]))
        else:
            g.replace(node.outputs[0], required(node.inputs[0]))

    return alter


def norms_exchanged(g: Graph) -> None:
    swap(g, gain(0)(g), gain(1)(g))
    swap(g, shift(0)(g), shift(1)(g))


def activation(build: Build) -> Alter:
    def alter(g: Graph) -> None:
        node = g.node("Gelu")
        g.after(node.outputs[0], lambda op, y: build(op, required(node.inputs[0])))

    return alter


def quick_gelu(op: Builder, x: ir.Value) -> ir.Value:
    return op.Mul(x, op.Sigmoid(op.Mul(x, float_constant(op, x, 1.702))))


def tanh_gelu(g: Graph) -> None:
    g.node("Gelu").attributes["approximate"] = ir.AttrString("approximate", "tanh")


# Casts


def through(dtype: ir.DataType) -> Build:
    """Round a value to a narrower type."""

    def cast(op: Builder, x: ir.Value) -> ir.Value:
        assert x.dtype is not None
        narrow = op.Cast(x, to=dtype.value)
        narrow.type = ir.TensorType(dtype)
        producer(narrow).metadata_props[KEPT] = str(dtype.value)
        return op.Cast(narrow, to=x.dtype.value)

    return cast


def round_trip(value: Callable[[Graph], ir.Value], dtype: ir.DataType) -> Alter:
    return lambda g: g.after(value(g), through(dtype))


def norm_input(dtype: ir.DataType) -> Alter:
    return lambda g: g.before(g.node("LayerNormalization"), 0, through(dtype))


def scores(g: Graph) -> ir.Value:
    return g.sites[0].scores.outputs[0]


def softmax_weights(g: Graph) -> ir.Value:
    return g.sites[0].softmax.outputs[0]


def residual_stream(g: Graph) -> ir.Value:
    return sum_of(g, "output", 0)[0].outputs[0]


def result(g: Graph) -> ir.Value:
    """Return the output before it is cast to 16 bits."""
    output = g.graph.outputs[0]
    node = producer(output)
    return required(node.inputs[0]) if node.op_type == "Cast" else output


# Positions, images, batches


def moved_rows(g: Graph) -> None:
    table = g.weight("positions.table")
    g.set(table, np.roll(numbers(table), -1, axis=0))


def no_later_rows(g: Graph) -> None:
    """Give every token from index CLIPPED on the position before it."""
    table = g.weight("positions.table")
    rows = np.minimum(np.arange(len(numbers(table))), CLIPPED - 1)
    g.set(table, numbers(table)[rows])


def last_token(g: Graph) -> None:
    gather = g.nodes("Gather")[-1]
    g.before(gather, 1, lambda op, x: op.Sub(x, constant(op, 1)))


def grid_permuted(perm: list[int]) -> Alter:
    """Change the layout of the pixels in patches."""

    def alter(g: Graph) -> None:
        node = next((t for t in g.nodes("Transpose") if len(t.attributes["perm"].as_ints()) == 6), None)
        if node is None or list(node.attributes["perm"].as_ints()) == perm:
            raise NotThere("patches")
        node.attributes["perm"] = ir.AttrInt64s("perm", perm)

    return alter


def channels_swapped(g: Graph) -> None:
    g.after(g.input("image"), lambda op, x: op.Gather(x, constant(op, [2, 1, 0]), axis=1))


def keys_of_another(at_most: bool) -> Alter:
    """Let every sample attend to the keys of the next; or only the last one, in the largest batch."""

    def alter(g: Graph) -> None:
        node, index = (g.fused, 1) if g.fused is not None else (g.sites[0].scores, 1)
        assert node is not None

        def others(op: Builder, keys: ir.Value) -> ir.Value:
            moved = rolled(op, keys, 0)
            if not at_most:
                return moved
            indices, _ = index_along(op, keys, 0, [-1, *[1] * (len(keys.shape or ()) - 1)])
            return op.Where(op.Equal(indices, constant(op, MOST_BATCH - 1)), moved, keys)

        g.before(node, index, others)

    return alter


def last_zero(g: Graph) -> None:
    """Set the last element of the output to zero."""

    def build(op: Builder, x: ir.Value) -> ir.Value:
        flat = op.Reshape(x, constant(op, [-1]))
        count = op.Squeeze(op.Shape(flat))
        indices = op.Range(constant(op, 1), op.Add(count, constant(op, 1)), constant(op, 1))
        return op.Reshape(op.Where(op.Equal(indices, count), float_constant(op, x, 0.0), flat), op.Shape(x))

    g.after(result(g), build)


# The list

ENCODER, CAUSAL, VIT, CROSS = "encoder", "causal", "vit", "cross"
TOKENS, PRODUCTS = (ENCODER, CAUSAL), (ENCODER, CROSS)

FAULTS: list[Fault] = []

INERT = {
    "key-bias-dropped": "adds one number to all scores of a query",
    "key-bias-twice": "adds one number to all scores of a query",
    "fill-1e4": "exp(-1e4) is zero unless scores are as large",
    "causal-at-the-end": "there are as many keys as queries",
    "stale-numbers": "the mask hides the slots after the lengths",
}
"""Faults that do not change the function, at least for ordinary scores, and the reason."""

NOT_IN = {"matrices-fp16": ("fp16", "bf16"), "matrices-bf16": ("bf16",)}
"""Faults that alter nothing in some precisions, because the weights are rounded to them, or nearly, already."""


def unaltered(g: Graph) -> None:
    """Leave the graph unchanged: the decoder that runs it makes the mistake."""


def family(name: str, *faults: tuple[str, str, Alter, tuple[str, ...] | str]) -> None:
    for title, what, alter, subjects in faults:
        where = (subjects,) if isinstance(subjects, str) else subjects
        FAULTS.append(Fault(title, name, what, alter, where, title in INERT, NOT_IN.get(title, ())))


family(
    "scale",
    ("scale-1%", "scores 1% too large", rescaled(lambda s: s * 1.01), (ENCODER, VIT, CROSS)),
    ("scale-0.1%", "scores 0.1% too large", rescaled(lambda s: s * 1.001), (ENCODER, VIT, CROSS)),
    ("scale-by-d", "1/d for 1/√d", rescaled(lambda s: s * s), (ENCODER, VIT, CROSS)),
    ("scale-by-width", "1/√(all heads) for 1/√(one)", rescaled(lambda s: s / 2), (ENCODER, VIT, CROSS)),
    ("scale-missing", "1 for 1/√d", rescaled(lambda s: 1.0), (ENCODER, VIT, CROSS)),
    ("scale-late", "the softmax's weights scaled, not the scores", scale_after_softmax, PRODUCTS),
)
family(
    "softmax",
    ("softmax-queries", "over the queries", softmax_over(-2), PRODUCTS),
    ("softmax-heads", "over the heads", softmax_over(1), PRODUCTS),
    ("softmax-twice", "of the softmax", softmax_twice, PRODUCTS),
)
family(
    "mask",
    ("padding-shifted", "moved by one key", mask_becomes(lambda op, m: rolled(op, m, 1)), (ENCODER, CAUSAL, CROSS)),
    ("padding-inverted", "True and False exchanged", mask_becomes(lambda op, m: op.Not(m)), (ENCODER, CAUSAL, CROSS)),
    ("padding-ignored", "nothing is padding", mask_becomes(nowhere), (ENCODER, CAUSAL, CROSS)),
    ("padding-first-sample", "all samples have the first one's", mask_becomes(first_along(0)), PRODUCTS),
    ("padding-first-key", "the first key is never padding", mask_becomes(without_first_key), PRODUCTS),
    ("padding-one-head", "ignored by one head", allowed_becomes(also_head), PRODUCTS),
    ("padding-one-sample", "ignored for the last sample", allowed_becomes(also_last_sample), PRODUCTS),
    (
        "padding-one-layer",
        "ignored in the second layer",
        allowed_becomes(all_true, 1),
        ENCODER,
    ),
    ("mask-last-row", "one row too few: ignored by the last query", also_last_row, (ENCODER, CAUSAL, CROSS)),
    ("mask-late", "weights zeroed after the softmax", mask_after_softmax, PRODUCTS),
    ("fill-1e4", "-1e4 where -inf is meant", fill_with(-1e4), (ENCODER, CAUSAL, CROSS)),
    ("fill-10", "-10 where -inf is meant", fill_with(-10.0), PRODUCTS),
    ("empty-rows-nan", "NaN for queries without keys, where eager has zeros", without_guard, (ENCODER, CAUSAL, CROSS)),
    ("one-key-zeros", "zeros for queries with one key", zeros_for_one_key, PRODUCTS),
    ("causal-excludes-itself", "a token does not see itself", diagonal(-1), CAUSAL),
    ("causal-one-more", "a token sees the next", diagonal(1), CAUSAL),
    ("causal-upper", "a token sees the later ones", upper, CAUSAL),
    ("causal-ignored", "a token sees all", not_causal, CAUSAL),
    ("causal-at-the-end", "counted from the last key, with as many keys as queries", from_the_last_key, CAUSAL),
)
family(
    "heads",
    ("query-heads", "two heads exchanged in the queries", heads_exchanged("query"), (ENCODER, VIT, CROSS)),
    ("output-heads", "two heads exchanged in the output", heads_exchanged("output"), (ENCODER, VIT, CROSS)),
    ("query-interleaved", "columns of the queries read as (d, heads)", heads_interleaved, (ENCODER, VIT, CROSS)),
    ("query-reshaped", "heads split by a reshape without a transpose", query_not_transposed, PRODUCTS),
    ("output-reshaped", "heads joined by a reshape without a transpose", output_not_transposed, (ENCODER, VIT, CROSS)),
    ("one-key-head", "all heads have the first one's keys", one_key_head, PRODUCTS),
    ("heads-halved", "half as many heads, twice as wide", half_the_heads, VIT),
    ("head-lost", "the last head gives zeros", head_lost, PRODUCTS),
)
family(
    "transposed",
    ("query-transposed", "the query's weight", transposed("query"), (ENCODER, VIT, CROSS)),
    ("value-transposed", "the value's weight", transposed("value"), (ENCODER, VIT)),
    ("output-transposed", "the output projection's weight", transposed("output"), (ENCODER, VIT, CROSS)),
    ("last-transposed", "the second layer's key weight", transposed("key", 1), ENCODER),
    ("key-value", "key and value exchanged", exchanged("key", "value"), (ENCODER, VIT, CROSS)),
    ("query-key", "query and key exchanged", exchanged("query", "key"), (ENCODER, CAUSAL, VIT)),
)
for part, subjects in {
    "query": (ENCODER, VIT, CROSS),
    "key": (ENCODER, VIT, CROSS),
    "value": (ENCODER, VIT, CROSS),
    "output": (ENCODER, VIT, CROSS),
    "up": (ENCODER, VIT),
    "down": (ENCODER, VIT),
    "patches": (VIT,),
}.items():
    family("one number", (f"{part}-sign", f"of {part}'s weight {CHANGES['sign']}", element(of(part), "sign"), subjects))
    for change, what in CHANGES.items():
        if change != "sign":
            title = f"{part}-{change.replace(' ', '-')}"
            family("one number", (title, f"of {part}'s weight {what}", element(of(part), change), subjects[:1]))
family(
    "one number",
    ("last-output-sign", "of the second output projection, sign", element(of("output", 1), "sign"), ENCODER),
    ("last-down-1%", "of the last weight, 1% off", element(of("down", 1), "1%"), ENCODER),
    ("gain-half-more", "of the first norm's gain, ×1.5", element(gain(0), "half more"), (ENCODER, VIT)),
    ("gain-1%", "of the first norm's gain, 1% off", element(gain(0), "1%"), (ENCODER, VIT)),
    ("last-gain-1%", "of the last norm's gain, 1% off", element(gain(-1), "1%"), (ENCODER, VIT)),
    ("query-bias-sign", "of the query's bias, sign", element(bias_of("query"), "sign"), (ENCODER, CROSS)),
    ("output-bias-1%", "of the output's bias, 1% off", element(bias_of("output"), "1%"), (ENCODER, CROSS)),
    ("head-sign", "of the classifier's weight, sign", element(of("head"), "sign"), VIT),
    (
        "embedding-sign",
        "of the first token's embedding, sign",
        element(named("embedding.weight"), "sign", 108),
        ENCODER,
    ),
    (
        "first-position-sign",
        "of the first position, sign",
        element(named("positions.table"), "sign", 0),
        (ENCODER, VIT),
    ),
    (
        "last-position-sign",
        "of the last position that is used, sign",
        element(named("positions.table"), "sign", MOST_TOKENS - 1),
        ENCODER,
    ),
    ("class-token-sign", "of the class token, sign", element(named("class_token"), "sign"), VIT),
    ("last-number", "the last number of the output is zero", last_zero, (ENCODER, CAUSAL, VIT, CROSS)),
)
family(
    "bias",
    *(
        (f"{part}-bias-dropped", f"{part}'s is left out", times(bias_of(part), 0.0), subjects)
        for part, subjects in {
            "query": (ENCODER, VIT, CROSS),
            "key": (ENCODER, VIT, CROSS),
            "value": (ENCODER, VIT, CROSS),
            "output": (ENCODER, VIT, CROSS),
            "up": (ENCODER,),
            "down": (ENCODER,),
        }.items()
    ),
    ("norm-bias-dropped", "the first norm's is left out", times(shift(0), 0.0), (ENCODER, VIT)),
    ("last-norm-bias-dropped", "the last norm's is left out", times(shift(-1), 0.0), ENCODER),
    ("key-bias-twice", "the key's is added twice", times(bias_of("key"), 2.0), ENCODER),
    ("value-bias-twice", "the value's is added twice", times(bias_of("value"), 2.0), (ENCODER, CROSS)),
    ("output-bias-twice", "the output's is added twice", times(bias_of("output"), 2.0), (ENCODER, CROSS)),
)
family(
    "norm",
    ("epsilon-1e-6", "1e-6 for 1e-5", epsilon(1e-6), ENCODER),
    ("epsilon-1e-12", "1e-12 for 1e-5", epsilon(1e-12), (ENCODER, VIT)),
    ("epsilon-1e-3", "1e-3 for 1e-5", epsilon(1e-3), (ENCODER, VIT)),
    ("last-epsilon-1e-3", "1e-3 for 1e-5, in the last norm", epsilon(1e-3, -1), ENCODER),
    ("norm-mean", "the mean is not subtracted", no_mean, (ENCODER, VIT)),
    ("norm-unbiased", "the variance divided by n - 1", times(gain(0), math.sqrt(127 / 128)), (ENCODER, VIT)),
    ("norm-behind", "after the attention instead of before it", norm_after, (ENCODER, VIT)),
    ("norm-left-out", "the first is left out", norm_left_out(0), (ENCODER, VIT)),
    ("last-norm-left-out", "the last is left out", norm_left_out(-1), (ENCODER, VIT)),
    ("norms-exchanged", "the first and second have each other's weights", norms_exchanged, (ENCODER, VIT)),
)
family(
    "branches",
    ("residual-dropped", "around attention", residual("output", "dropped"), (ENCODER, VIT)),
    ("residual-doubled", "around attention", residual("output", "doubled"), (ENCODER, VIT)),
    ("last-residual-dropped", "around the last feed-forward layer", residual("down", "dropped", 1), ENCODER),
    ("branch-dropped", "the first feed-forward layer is left out", residual("down", "branch dropped"), (ENCODER, VIT)),
    ("layers-exchanged", "the second before the first", layers_exchanged, ENCODER),
    ("layer-twice", "the first also replaces the second", first_layer_twice, ENCODER),
    ("layer-left-out", "the second is left out", layer_left_out, ENCODER),
)
family(
    "activation",
    ("gelu-tanh", "tanh's approximation for erf", tanh_gelu, (ENCODER, VIT)),
    ("gelu-quick", "x·sigmoid(1.702 x) for GELU", activation(quick_gelu), (ENCODER, VIT)),
    ("gelu-relu", "ReLU for GELU", activation(lambda op, x: op.Relu(x)), (ENCODER, VIT)),
)
family(
    "early cast",
    *(
        (f"{what.replace(' ', '-')}-{name}", f"{what} in {name}", alter, PRODUCTS if value else TOKENS)
        for name, dtype in (("fp16", FP16), ("bf16", BF16))
        for what, value, alter in (
            ("scores", True, round_trip(scores, dtype)),
            ("softmax weights", True, round_trip(softmax_weights, dtype)),
            ("residual stream", False, round_trip(residual_stream, dtype)),
            ("norm input", False, norm_input(dtype)),
            ("output", True, round_trip(result, dtype)),
            ("matrices", True, rounded_weights(dtype)),
        )
    ),
)
family(
    "positions",
    ("positions-moved", "off by one", moved_rows, (ENCODER, VIT)),
    ("positions-absent", "there are none", times(named("positions.table"), 0.0), (ENCODER, VIT)),
    ("positions-clipped", f"right for {CLIPPED} tokens, constant for more", no_later_rows, ENCODER),
)
family(
    "image",
    ("class-token-last", "the last patch is classified", last_token, VIT),
    ("class-token-absent", "the class token is zeros", times(named("class_token"), 0.0), VIT),
    ("patches-transposed", "rows and columns of the grid exchanged", grid_permuted([0, 4, 2, 1, 3, 5]), VIT),
    ("pixels-transposed", "rows and columns inside of patches exchanged", grid_permuted([0, 2, 4, 1, 5, 3]), VIT),
    ("pixels-channels-last", "pixels before channels", grid_permuted([0, 2, 4, 3, 5, 1]), VIT),
    ("channels-swapped", "blue for red", channels_swapped, VIT),
)
family(
    "batch and size",
    ("keys-of-next", "every sample has the next one's keys", keys_of_another(False), (ENCODER, VIT, CROSS)),
    (
        "keys-of-next-at-most",
        "the last of the largest batch has the first one's",
        keys_of_another(True),
        (ENCODER, VIT),
    ),
    ("keys-clipped", f"right for {CLIPPED} keys, later ones unseen", allowed_becomes(only_first_keys), PRODUCTS),
)
family("blocks", *IN_BLOCKS)
family("causal blocks", *IN_STEPS)
family("mask as a feature", *AS_FEATURES)
family("8 bits", *IN_EIGHT_BITS)
family("8-bit tables", *IN_TABLES)
family("fp8", *IN_FP8)
family("4 bits", *IN_4_BITS)
family("step positions", *POSITIONS)
family("caches", *CACHES)
family("cache visibility", *SEEN)
for title, what, driver, subjects in DRIVEN:
    FAULTS.append(Fault(title, "decoder driver", what, unaltered, subjects, title in INERT, driver=driver))
