"""Faults of decoders: in the positions of tokens, in writing to the caches, in what is visible of them, and in the
code that runs the steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder, constant, like
from attnforge.runtime.decoding.decoder import Decoder
from tests.support.faults import driving
from tests.support.faults.graph import (
    Alter,
    Build,
    Family,
    Graph,
    NotThere,
    all_true,
    first_along,
    float_constant,
    is_constant,
    numbers,
    producer,
    required,
    rolled,
)

LLAMA, GPT, WINDOWED, CAPPED, ODD = "llama", "gpt", "windowed-decoder", "capped-decoder", "odd-heads"
TURNING, SLOPED = "turning-decoder", "sloped-decoder"
SUBJECTS = (LLAMA, GPT, WINDOWED, CAPPED, ODD)

FUSED = (LLAMA, GPT, WINDOWED, CAPPED)
"""Subjects whose attention is GroupQueryAttention."""

FILLED = (ODD,)
"""Subjects whose attention reads the filled part of the caches."""

ROTARY, LAYERS = (LLAMA, WINDOWED, CAPPED, ODD), (LLAMA,)

FIRST, LAST = 0, -1
"""The first and the last layer."""

QUERY, KEY, VALUE, KEY_CACHE, VALUE_CACHE, LENGTHS, TOTAL, COSINES, SINES = range(9)
"""Inputs of GroupQueryAttention."""

CLIPPED = 12

Driving = tuple[str, str, type[Decoder], tuple[str, ...]]
"""Name, description, the decoder class that makes the mistake, and the subjects."""


# --- positions --------------------------------------------------------------------------------------------------------


def past(g: Graph) -> ir.Value:
    return g.input("past")


def positions(g: Graph) -> ir.Node:
    """Return the Add of `past` and the indices of the new tokens."""
    for node in g.nodes("Add"):
        if all(value is not None and producer_is(value, "Unsqueeze") for value in node.inputs):
            return node
    raise NotThere("positions")


def producer_is(value: ir.Value, op_type: str) -> bool:
    node = value.producer()
    return node is not None and node.op_type == op_type


def placed(build: Build) -> Alter:
    """Apply `build` to the positions at which tables are looked up."""

    def alter(g: Graph) -> None:
        at, looked = positions(g).outputs[0], False
        for node in g.users(at):
            if node.op_type == "Gather":
                g.before(node, 1, build)
                looked = True
        if not looked:
            raise NotThere("a table of positions")

    return alter


def placed_by(build: Build) -> Alter:
    """Compute positions from another `past` than that of the caches."""

    def alter(g: Graph) -> None:
        reshaped = producer(positions(g).inputs[0])
        wrong = g.insert(reshaped, past(g), build)
        right = positions(g).outputs[0]
        rows = producer(right).inputs[1]

        def moved(op: Builder, x: ir.Value) -> ir.Value:
            return op.Add(op.Unsqueeze(wrong, constant(op, [1])), rows)

        for node in g.users(right):
            if node.op_type == "Gather":
                g.before(node, 1, moved)

    return alter


def where_some(by: int) -> Build:
    """Offset `past`, if there is a past."""

    def build(op: Builder, x: ir.Value) -> ir.Value:
        return op.Where(op.Greater(x, constant(op, 0)), op.Add(x, constant(op, by)), x)

    return build


def one_more(op: Builder, x: ir.Value) -> ir.Value:
    return op.Add(x, constant(op, 1))


def one_fewer(op: Builder, x: ir.Value) -> ir.Value:
    return op.Sub(x, constant(op, 1))


def nothing(op: Builder, x: ir.Value) -> ir.Value:
    return op.Sub(x, x)


def of_most(op: Builder, x: ir.Value) -> ir.Value:
    """Use the largest of all samples for all."""
    return op.Expand(op.ReduceMax(x, keepdims=1), op.Shape(x))


def clipped(op: Builder, x: ir.Value) -> ir.Value:
    return op.Min(x, constant(op, CLIPPED))


COS, SIN = 0, 1
"""Operands of the subtraction that gives the first rotated half."""


def rotary(which: int, change: Callable[[Array], Array]) -> Alter:
    """Change a rotary table, whose rows are positions."""

    def alter(g: Graph) -> None:
        value = rotary_table(g, which)
        g.set(value, change(numbers(value).copy()))

    return alter


def rotary_table(g: Graph, which: int) -> ir.Value:
    product = producer(producer(rotation(g, KEY, FIRST).inputs[0]).inputs[which])
    value = required(product.inputs[1])
    while not value.is_initializer():
        value = required(producer(value).inputs[0])
    return value


def tables_exchanged(g: Graph) -> None:
    cos, sin = (rotary_table(g, which) for which in (COS, SIN))
    cosines, sines = numbers(cos).copy(), numbers(sin).copy()
    g.set(cos, sines)
    g.set(sin, cosines)


def turning(which: int, change: Callable[[Array], Array]) -> Alter:
    """Change a table with which the kernel rotates queries and keys."""

    def alter(g: Graph) -> None:
        value = required(Step(g, FIRST).attention.inputs[which])
        g.set(value, change(numbers(value).copy()))

    return alter


def turning_exchanged(g: Graph) -> None:
    """Exchange the kernel's sines and cosines."""
    node = Step(g, FIRST).attention
    cosines, sines = node.inputs[COSINES : SINES + 1]
    node.replace_input_with(COSINES, sines)
    node.replace_input_with(SINES, cosines)


def not_turning(g: Graph) -> None:
    """Disable the kernel's rotation."""
    node = Step(g, FIRST).attention
    node.resize_inputs(COSINES)
    del node.attributes["do_rotary"]


def turning_neighbours(g: Graph) -> None:
    """Let the kernel rotate neighbours instead of halves."""
    Step(g, FIRST).attention.attributes["rotary_interleaved"] = ir.AttrInt64("rotary_interleaved", 1)


def learned(change: Callable[[Array], Array]) -> Alter:
    """Change the table of learned positions."""

    def alter(g: Graph) -> None:
        (name,) = (name for name in g.graph.initializers if name.endswith("/by place"))
        value = g.graph.initializers[name]
        g.set(value, change(numbers(value).copy()))

    return alter


def next_row(rows: Array) -> Array:
    return np.roll(rows, -1, 0)


def last_rows_lost(rows: Array) -> Array:
    rows[CLIPPED:] = rows[CLIPPED - 1]
    return rows


# --- keys and values --------------------------------------------------------------------------------------------------


class Step:
    """Attention of one layer over its cache.

    Attributes:
        attention: GroupQueryAttention, or Attention over the filled part.
        writers: the TensorScatter of keys and of values; none if attention writes the cache itself.
    """

    def __init__(self, g: Graph, layer: int) -> None:
        fused = g.nodes("GroupQueryAttention")
        self.attention = fused[layer] if fused else g.node("Attention", layer)
        self.is_fused = bool(fused)
        if self.is_fused:
            self.writers: list[ir.Node] = []
        else:
            first = 2 * (layer % len(g.nodes("Attention")))
            self.writers = g.nodes("TensorScatter")[first : first + 2]

    def new(self, what: int) -> tuple[ir.Node, int]:
        """Return the node that takes the query, or the new keys or values, and the index of the input."""
        if self.is_fused or what == QUERY:
            return self.attention, what
        return self.writers[what - KEY], 1

    def filled(self) -> list[ir.Node]:
        """Return the Slices of keys, values and mask."""
        if self.is_fused:
            raise NotThere("the filled part of a cache")
        return [producer(value) for value in self.attention.inputs[1:4]]


def rotated(what: int, layer: int = FIRST) -> Alter:
    """Rotate queries or keys twice."""

    def alter(g: Graph) -> None:
        cat = rotation(g, what, layer)
        first = producer(producer(cat.inputs[0]).inputs[0])
        second = producer(producer(cat.inputs[0]).inputs[1])
        cos, sin = first.inputs[1], second.inputs[1]

        def again(op: Builder, x: ir.Value) -> ir.Value:
            a, b = op.op_multi_out("Split", [x], {"axis": 3, "num_outputs": 2}, num_outputs=2)
            turned = op.Sub(op.Mul(a, cos), op.Mul(b, sin)), op.Add(op.Mul(b, cos), op.Mul(a, sin))
            return like(op.Concat(*turned, axis=-1), x)

        g.after(cat.outputs[0], again)

    return alter


def not_rotated(what: int, layer: int = FIRST) -> Alter:
    """Leave queries or keys unrotated."""

    def alter(g: Graph) -> None:
        cat = rotation(g, what, layer)
        split = producer(producer(producer(cat.inputs[0]).inputs[0]).inputs[0])
        g.replace(cat.outputs[0], required(split.inputs[0]))

    return alter


def rotation(g: Graph, what: int, layer: int) -> ir.Node:
    """Return the Concat of the two rotated halves."""
    user, index = Step(g, layer).new(what)
    node = producer(user.inputs[index])
    while node.op_type in ("Reshape", "Transpose"):
        node = producer(node.inputs[0])
    if node.op_type != "Concat" or not producer_is(required(node.inputs[0]), "Sub"):
        raise NotThere("a rotation")
    return node


def new_exchanged(g: Graph) -> None:
    """Write new keys as values and new values as keys."""
    step = Step(g, FIRST)
    (a, i), (b, j) = step.new(KEY), step.new(VALUE)
    key, value = a.inputs[i], b.inputs[j]
    a.replace_input_with(i, value)
    b.replace_input_with(j, key)
    g.graph.sort()


def group_of_another(g: Graph) -> None:
    """Assign key heads to queries in turn, not in groups."""
    node = Step(g, FIRST).attention
    heads, shared = node.attributes["num_heads"].as_int(), node.attributes["kv_num_heads"].as_int()
    order = np.arange(heads).reshape(shared, -1).T.reshape(-1)
    g.before(node, QUERY, heads_in(order))
    g.after(node.outputs[0], heads_in(np.argsort(order)))


def heads_in(order: Array) -> Build:
    """Reorder concatenated heads."""

    def build(op: Builder, x: ir.Value) -> ir.Value:
        apart = op.Reshape(x, constant(op, [0, 0, len(order), -1]))
        return op.Reshape(op.Gather(apart, constant(op, order), axis=2), constant(op, [0, 0, -1]))

    return build


# --- writing ----------------------------------------------------------------------------------------------------------


def lengths(build: Build, layer: int = FIRST) -> Alter:
    """Apply `build` to the lengths of GroupQueryAttention, which are int32."""
    return lambda g: g.before(Step(g, layer).attention, LENGTHS, as_lengths(build))


def as_lengths(build: Build) -> Build:
    def made(op: Builder, x: ir.Value) -> ir.Value:
        wide = op.Cast(x, to=ir.DataType.INT64.value)
        return op.Cast(build(op, wide), to=ir.DataType.INT32.value)

    return made


def after_a_prompt(by: int) -> Alter:
    """Write the rows of a step with a past at an offset."""

    def alter(g: Graph) -> None:
        before = past(g)

        def build(op: Builder, x: ir.Value) -> ir.Value:
            moved = op.Where(op.Greater(before, constant(op, 0)), op.Add(x, constant(op, by)), x)
            return op.Max(moved, constant(op, 0))

        lengths(build)(g)

    return alter


def total_too_small(g: Graph) -> None:
    """Make GroupQueryAttention's total length one too small, but not smaller than the number of new tokens."""
    tokens = g.input("tokens")

    def build(op: Builder, x: ir.Value) -> ir.Value:
        count = op.Squeeze(op.Shape(tokens, start=1, end=2), constant(op, [0]))
        return op.Max(op.Sub(x, constant(op, 1)), count)

    for node in g.nodes("GroupQueryAttention"):
        g.before(node, TOTAL, as_lengths(build))


def written_at(build: Build, which: tuple[int, ...] = (0, 1)) -> Alter:
    """Apply `build` to the position where new keys (0) or values (1) are written."""

    def alter(g: Graph) -> None:
        writers = Step(g, FIRST).writers
        if not writers:
            raise NotThere("a node that writes")
        for i in which:
            g.before(writers[i], 2, build)

    return alter


def caches_read(*pairs: tuple[tuple[int, int], tuple[int, int]]) -> Alter:
    """Exchange input caches, each given by its layer and 0 for keys or 1 for values."""

    def alter(g: Graph) -> None:
        sites = {cache: cache_input(g, *cache) for pair in pairs for cache in pair}
        values = {cache: node.inputs[index] for cache, (node, index) in sites.items()}
        for first, second in pairs:
            for target, source in ((first, second), (second, first)):
                node, index = sites[target]
                node.replace_input_with(index, values[source])

    return alter


def cache_input(g: Graph, layer: int, what: int) -> tuple[ir.Node, int]:
    step = Step(g, layer)
    return (step.attention, KEY_CACHE + what) if step.is_fused else (step.writers[what], 0)


def of_first_layer(g: Graph) -> None:
    """Let the last layer read the first one's key cache."""
    (node, index), (first, first_index) = cache_input(g, LAST, 0), cache_input(g, FIRST, 0)
    node.replace_input_with(index, first.inputs[first_index])


def not_written(*what: int) -> Alter:
    """Return the input cache of keys (0) or values (1) as the output cache."""

    def alter(g: Graph) -> None:
        for i in what:
            node, index = cache_input(g, FIRST, i)
            step = Step(g, FIRST)
            after = step.attention.outputs[1 + i] if step.is_fused else node.outputs[0]
            g.output_becomes(after, required(node.inputs[index]))

    return alter


# --- what is seen -----------------------------------------------------------------------------------------------------


def attribute(name: str, change: Callable[[float], float], layer: int = FIRST) -> Alter:
    """Change a numeric attribute of attention."""

    def alter(g: Graph) -> None:
        node = Step(g, layer).attention
        old = node.attributes.get(name)
        if old is None or not old.value:
            raise NotThere(name)
        is_whole = old.type == ir.AttributeType.INT
        node.attributes[name] = (
            ir.AttrInt64(name, int(change(old.as_int()))) if is_whole else ir.AttrFloat32(name, change(old.as_float()))
        )

    return alter


def filled_to(build: Build) -> Alter:
    """Change the end of the filled part, which has at least one slot."""

    def alter(g: Graph) -> None:
        end = required(Step(g, FIRST).filled()[0].inputs[2])
        g.after(end, lambda op, x: op.Max(build(op, x), constant(op, 1)))

    return alter


def filled_of(op_type: str) -> Alter:
    """Compute the filled part from another sample than the longest one."""

    def alter(g: Graph) -> None:
        most = producer(required(Step(g, FIRST).filled()[0].inputs[2]))
        if most.op_type != "ReduceMax":
            raise NotThere("the longest sample")
        most.op_type = op_type

    return alter


def token_position(build: Build) -> Alter:
    """Apply `build` to the positions of the tokens in the mask."""

    def alter(g: Graph) -> None:
        (least,) = g.nodes("LessOrEqual")
        g.before(least, 1, build)

    return alter


def mask(build: Build) -> Alter:
    def alter(g: Graph) -> None:
        (least,) = g.nodes("LessOrEqual")
        (both,) = g.users(least.outputs[0])
        g.after(both.outputs[0], build)

    return alter


def window_of_mask(by: int | None) -> Alter:
    """Extend the window, or remove it with None."""

    def alter(g: Graph) -> None:
        greater = next((node for node in g.nodes("Greater") if producer_is(required(node.inputs[1]), "Sub")), None)
        if greater is None:
            raise NotThere("a window")
        if by is None:
            g.after(greater.outputs[0], all_true)
        else:
            size = required(producer(greater.inputs[1]).inputs[1])
            assert is_constant(size)
            g.set(size, numbers(size) + by)

    return alter


def counted_in_the_call(g: Graph) -> None:
    """Count causality from the first token of the call."""
    (least,) = g.nodes("LessOrEqual")
    rows = positions(g).inputs[1]
    g.before(least, 1, lambda op, x: op.Expand(op.Unsqueeze(rows, constant(op, [1, 3])), op.Shape(x)))


def values_moved(g: Graph) -> None:
    """Shift the values by one against the keys."""
    values = Step(g, FIRST).filled()[1]
    g.after(values.outputs[0], lambda op, x: rolled(op, x, 2))


def times(factor: float) -> Build:
    return lambda op, x: op.Mul(x, float_constant(op, x, factor))


def new_keys(build: Build) -> Alter:
    def alter(g: Graph) -> None:
        node, index = Step(g, FIRST).new(KEY)
        g.before(node, index, build)

    return alter


def biased(build: Build) -> Alter:
    """Apply `build` to the bias that the kernel adds."""
    return lambda g: g.before(Step(g, FIRST).attention, driving.BIAS, build)


POSITIONS: Family = [
    ("places-one-later", "one later", placed(one_more), GPT),
    ("places-step-later", "one later in a call that has a past", placed_by(where_some(1)), SUBJECTS),
    ("places-step-earlier", "one earlier in a call that has a past", placed_by(where_some(-1)), SUBJECTS),
    ("places-without-past", "counted from the first token of the call", placed_by(nothing), SUBJECTS),
    ("places-of-first-sample", "all samples have the first one's", placed_by(first_along(0)), SUBJECTS),
    ("places-of-longest", "all samples have the longest one's", placed_by(of_most), SUBJECTS),
    ("places-clipped", f"right up to {CLIPPED}, constant after it", placed(clipped), SUBJECTS),
    ("cos-moved", "rotary cosines of the next position", rotary(COS, lambda t: np.roll(t, -1, 0)), ROTARY),
    ("sin-moved", "rotary sines of the next position", rotary(SIN, lambda t: np.roll(t, -1, 0)), ROTARY),
    ("sin-negated", "rotated the other way", rotary(SIN, lambda t: -t), ROTARY),
    ("sin-1%", "rotary sines 1% too large", rotary(SIN, lambda t: t * 1.01), (LLAMA, ODD)),
    ("cos-sin", "rotary sines and cosines exchanged", tables_exchanged, (LLAMA, ODD)),
    ("frequencies-reversed", "rotary frequencies in reverse", rotary(COS, lambda t: t[:, ::-1]), (LLAMA, ODD)),
    ("rotary-rows-lost", f"rotary cosines constant from {CLIPPED - 1} on", rotary(COS, last_rows_lost), ROTARY),
    ("positions-of-next", "learned positions one row off", learned(lambda t: np.roll(t, -1, 0)), GPT),
    ("keys-rotated-twice", "keys rotated twice", rotated(KEY), ROTARY),
    ("last-keys-rotated-twice", "keys rotated twice in the last layer", rotated(KEY, LAST), LAYERS),
    ("queries-rotated-twice", "queries rotated twice", rotated(QUERY), ROTARY),
    ("keys-not-rotated", "keys not rotated", not_rotated(KEY), ROTARY),
    ("queries-not-rotated", "queries not rotated", not_rotated(QUERY), (LLAMA, ODD)),
    ("kernel-cos-moved", "the kernel's cosines are those of the next position", turning(COSINES, next_row), TURNING),
    ("kernel-sin-moved", "the kernel's sines are those of the next position", turning(SINES, next_row), TURNING),
    ("kernel-sin-negated", "the kernel rotates the other way", turning(SINES, lambda t: -t), TURNING),
    ("kernel-sin-1%", "the kernel's sines 1% too large", turning(SINES, lambda t: t * 1.01), TURNING),
    ("kernel-rows-lost", f"cosines constant from {CLIPPED - 1} on", turning(COSINES, last_rows_lost), TURNING),
    ("kernel-cos-sin", "the kernel's sines and cosines exchanged", turning_exchanged, TURNING),
    ("kernel-turns-nothing", "the kernel rotates neither queries nor keys", not_turning, TURNING),
    ("slopes-of-other-heads", "every head has the slope of another", biased(lambda op, x: rolled(op, x, 1)), SLOPED),
    ("slopes-negated", "further keys count more", biased(times(-1.0)), SLOPED),
    ("slopes-1%", "ALiBi slopes 1% too steep", biased(times(1.01)), SLOPED),
    ("no-slopes", "no bias", biased(times(0.0)), SLOPED),
    ("bias-of-next-key", "every key has the bias of another", biased(lambda op, x: rolled(op, x, 3)), SLOPED),
    ("kernel-turns-neighbours", "the kernel rotates neighbours, not halves", turning_neighbours, TURNING),
]  # fmt: skip

CACHES: Family = [
    ("row-too-far", "a step's row is written one slot too far", after_a_prompt(1), FUSED),
    ("row-too-early", "a step's row is written one slot too early", after_a_prompt(-1), FUSED),
    ("last-row-too-far", "written one slot too far in the last layer", lengths(one_more, LAST), (LLAMA,)),
    ("lengths-first-sample", "all samples have the first one's lengths", lengths(first_along(0)), FUSED),
    ("lengths-of-longest", "all samples have the longest one's lengths", lengths(of_most), (LLAMA, WINDOWED)),
    ("total-too-small", "the total length one too small", total_too_small, (LLAMA, GPT)),
    ("scatter-too-far", "keys and values are written one slot too far", written_at(one_more), FILLED),
    ("scatter-too-early", "written one slot too early if there is a past", written_at(where_some(-1)), FILLED),
    ("scatter-keys-too-far", "only keys are written one slot too far", written_at(one_more, (0,)), FILLED),
    ("scatter-values-too-far", "only values are written one slot too far", written_at(one_more, (1,)), FILLED),
    ("scatter-at-start", "every call writes from the first slot on", written_at(nothing), FILLED),
    ("scatter-first-sample", "all samples are written at the first one's position", written_at(first_along(0)), FILLED),
    ("caches-exchanged", "the caches of keys and values exchanged", caches_read(((0, 0), (0, 1))), SUBJECTS),
    ("layers-caches-exchanged", "two layers have each other's keys", caches_read(((0, 0), (-1, 0))), LAYERS),
    ("layers-values-exchanged", "two layers have each other's values", caches_read(((0, 1), (-1, 1))), LAYERS),
    ("cache-of-first-layer", "the last layer reads the first one's keys", of_first_layer, LAYERS),
    ("keys-not-kept", "the cache of keys comes out as it went in", not_written(0), SUBJECTS),
    ("values-not-kept", "the cache of values comes out as it went in", not_written(1), SUBJECTS),
    ("steps-lost", "both caches come out as they went in", not_written(0, 1), (LLAMA, ODD)),
    ("new-exchanged", "new keys are written as values, and values as keys", new_exchanged, SUBJECTS),
    ("keys-scaled", "keys are 1% too large in the cache", new_keys(times(1.01)), (LLAMA, ODD)),
]  # fmt: skip

SEEN: Family = [
    ("gqa-window-shorter", "a query sees one token fewer", attribute("local_window_size", lambda n: n - 1), WINDOWED),
    ("gqa-window-longer", "a query sees one token more", attribute("local_window_size", lambda n: n + 1), WINDOWED),
    ("gqa-window-dropped", "a query sees all before it", attribute("local_window_size", lambda n: -1), WINDOWED),
    ("cap-dropped", "scores without a soft cap", attribute("softcap", lambda c: 0.0), CAPPED),
    ("cap-doubled", "a soft cap twice as high", attribute("softcap", lambda c: 2 * c), CAPPED),
    ("cap-1%", "a soft cap 1% too high", attribute("softcap", lambda c: 1.01 * c), CAPPED),
    ("step-scale-1%", "scores 1% too large", attribute("scale", lambda s: 1.01 * s), SUBJECTS),
    ("step-scale-by-d", "1/d for 1/√d", attribute("scale", lambda s: s * s), SUBJECTS),
    ("groups-in-turn", "queries read key heads in turn, not in groups", group_of_another, (LLAMA, WINDOWED)),
    ("filled-too-short", "the filled part ends one slot early", filled_to(one_fewer), FILLED),
    ("filled-of-shortest", "the filled part is the shortest sample's", filled_of("ReduceMin"), FILLED),
    ("seen-one-more", "a token sees the slot after it", token_position(one_more), FILLED),
    ("seen-one-fewer", "a token does not see itself", token_position(one_fewer), FILLED),
    ("seen-all", "every slot up to the last filled one is seen", mask(all_true), FILLED),
    ("seen-in-the-call", "causality counted from the first token of the call", counted_in_the_call, FILLED),
    ("seen-first-sample", "all samples see what the first one sees", mask(first_along(0)), FILLED),
    ("mask-window-shorter", "a query sees one token fewer", window_of_mask(-1), FILLED),
    ("mask-window-longer", "a query sees one token more", window_of_mask(1), FILLED),
    ("mask-window-dropped", "a query sees all before it", window_of_mask(None), FILLED),
    ("filled-values-moved", "values shifted by one against the keys", values_moved, FILLED),
]  # fmt: skip

DRIVEN: list[Driving] = [
    ("prompt-too-short", "a prompt leaves its last token out of the lengths", driving.PromptTooShort, SUBJECTS),
    ("prompt-too-long", "a prompt counts one token more", driving.PromptTooLong, SUBJECTS),
    ("step-not-counted", "the next step is written over the last", driving.StepsLost, SUBJECTS),
    ("ragged-as-longest", "every sample has the length of the longest", driving.LengthsOfLongest, (LLAMA, ODD)),
    ("ragged-as-first", "a step has the first sample's length for all", driving.LengthsOfFirst, (LLAMA, ODD)),
    ("prompts-in-one-cache", "prompts of all samples in the first one's cache", driving.CachesOfFirst, (LLAMA, ODD)),
    ("prompt-from-start", "several tokens are written over what is there", driving.PromptFromStart, (LLAMA, GPT, ODD)),
    ("answers-of-first", "a prompt answers for its first token", driving.AnswersOfFirst, SUBJECTS),
    ("answers-one-earlier", "a prompt answers for the token before its last", driving.AnswersOneEarlier, (LLAMA, ODD)),
    ("stale-token", "the first token after a crop is seen", driving.StaleToken, SUBJECTS),
    ("stale-numbers", "the values that a crop removes stay, but hidden", driving.StaleNumbers, (LLAMA, ODD)),
    ("crop-one-more", "a crop removes one token more", driving.CropOneMore, (LLAMA, GPT, ODD)),
    ("crop-erases", "a crop erases the last token that it keeps", driving.CropErases, (LLAMA, ODD)),
    ("crop-by-first", "a crop leaves all as long as the first", driving.CropByFirst, (LLAMA, ODD)),
    ("not-reset", "a reset leaves the first token", driving.NotReset, (LLAMA, GPT, ODD)),
    ("fork-shares", "a fork shares the caches", driving.ForkShares, SUBJECTS),
    ("fork-shares-lengths", "a fork shares the lengths", driving.ForkSharesLengths, (LLAMA, ODD)),
    ("fork-one-fewer", "a fork copies one slot too few", driving.ForkOneFewer, SUBJECTS),
    ("fork-without-values", "a fork copies only keys", driving.ForkWithoutValues, (LLAMA, ODD)),
    ("fork-reversed", "a fork has the samples in another order", driving.ForkReversed, (LLAMA, ODD)),
    ("driven-steps-lost", "values that a step writes are lost", driving.OutputsLost, (LLAMA, ODD)),
    ("driven-layers-exchanged", "caches of two layers are bound to each other", driving.CachesExchanged, LAYERS),
]  # fmt: skip
