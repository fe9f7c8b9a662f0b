"""Check that a graph processes tokens independently: outside attention, the result for a token depends only on that
token and its position.

Then a call with the next tokens and a cache of earlier keys and values returns the same as a call with all tokens.
Values are of three kinds: constants, values that depend on the number of tokens (shapes, positions), and values that
depend on the tokens themselves. The axes of tokens are known from the dims of a value, which the exporter names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import onnx_ir as ir

from attnforge.errors import UsageError
from attnforge.export.attention.contraction import contraction_of
from attnforge.export.decoding.order import RowOrder, SortedRows, token_axes
from attnforge.export.graphs.attention import NotAttention
from attnforge.export.graphs.nodes import (
    BY_ELEMENT,
    VIEWS,
    constant_of,
    dependent_on_inputs,
    input_of,
    inputs_of,
    is_op,
    optional_input,
    rank_of,
)
from attnforge.export.graphs.sizes import sizes_of

REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean"),
    *("ReduceMin", "ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
"""Operators that combine the numbers along given axes."""


class NotByToken(UsageError):
    """A graph mixes tokens outside attention, so that a cache of keys and values does not make it a decoder."""


class Kinds(NamedTuple):
    """What the values of a graph depend on.

    Attributes:
        by_token: values that depend on the contents of the model's inputs.
        by_count: values that depend on the number of tokens, but not on the contents of inputs.
    """

    by_token: set[ir.Value]
    by_count: set[ir.Value]


def kinds_of(graph: ir.Graph, tokens: str) -> Kinds:
    """The kinds of all values of a graph.

    Args:
        graph: a graph whose inputs are all tokens.
        tokens: the symbol of the number of tokens.
    """
    kinds = Kinds(dependent_on_inputs(graph), set())
    for node in graph:
        is_size = False
        if is_op(node, "Shape", "Size"):
            start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
            axes = range(rank_of(input_of(node)))[start:end]
            is_size = not set(axes).isdisjoint(token_axes(input_of(node), tokens))
        if is_size or not kinds.by_count.isdisjoint(node.inputs):
            kinds.by_count.update(output for output in node.outputs if output not in kinds.by_token)
    return kinds


def check_by_token(
    graph: ir.Graph, kinds: Kinds, tokens: str, sites: Iterable[str], samples: str | None = None
) -> set[ir.Node]:
    """Check that everything except attention is computed token by token and sample by sample, and return the nodes for
    which this is so although they read numbers of rows of all tokens.

    Args:
        graph: a graph with canonical attention.
        kinds: the kinds of its values.
        tokens: the symbol of the number of tokens.
        sites: names of the canonical Attention nodes.
        samples: the symbol of the number of samples; None if there is one.

    Raises:
        NotByToken: an operator mixes tokens or samples, or is unknown; the message names it.
    """
    attending = set(sites)
    order = RowOrder(kinds.by_token, tokens)
    rows = SortedRows(*kinds, order, partial(_why_mixing, kinds=kinds, tokens=tokens))
    for node in graph:
        if node.name in attending or not any(value in kinds.by_token for value in inputs_of(node)):
            continue
        if rows.follow(node) or order.repeats(node):
            continue
        if (reason := _why_mixing(node, kinds, tokens) or order.why_mixing(node)) is not None:
            raise _mixing(node, reason)
        if samples is not None and (reason := _why_mixing(node, kinds, samples, "samples")) is not None:
            raise NotByToken(
                f"{node.op_type} ({node.name or 'without a name'}) {reason}, and a decoder runs prompts sample by "
                "sample; deploy the model without cache_tokens"
            )
    read = [value for node in graph if node.name in attending for value in inputs_of(node)]
    if (mixing := rows.mixing([*graph.outputs, *read])) is not None:
        is_sort = mixing.op_type == "TopK"
        raise _mixing(mixing, "sorts the tokens" if is_sort else "reads sorted rows in a way that may mix tokens")
    return rows.numbering


def _mixing(node: ir.Node, reason: str) -> NotByToken:
    return NotByToken(
        f"{node.op_type} ({node.name or 'without a name'}) {reason}, so a cache of keys and values does not contain "
        "all that later tokens need; deploy the model without cache_tokens"
    )


def _why_mixing(node: ir.Node, kinds: Kinds, tokens: str, what: str = "tokens") -> str | None:
    """Why a node that reads tokens may mix them; None if it does not.

    Args:
        node: the node.
        kinds: the kinds of values.
        tokens: the symbol of the number of tokens, or of samples.
        what: what it is the number of.
    """
    if node.op_type in ("Shape", "Size"):
        return None
    source = input_of(node)
    rank = rank_of(source)
    tokens_at = set(token_axes(source, tokens))
    if node.domain != "":
        return f"of the domain {node.domain!r} is not known to process tokens independently"
    if node.op_type in BY_ELEMENT:
        return None
    if node.op_type in VIEWS:
        return f"merges all {what}" if tokens_at and not token_axes(node.outputs[0], tokens) else None
    if node.op_type == "Einsum":
        try:
            summed_sizes = contraction_of(node).summed.values()
        except NotAttention as error:
            return f"cannot be followed: {error}"
        return f"sums over the {what}" if any(tokens in size.names for size in summed_sizes) else None
    if node.op_type in ("MatMul", "Gemm"):  # sums over the last axis of the first operand
        summed = 0 if node.attributes.get_int("transA", 0) else rank - 1
        return f"sums over the {what}" if summed in tokens_at else None
    if node.op_type in ("Gather", "GatherND"):  # selects tokens, or looks up rows by token
        selects = source in kinds.by_token and tokens_at & _indexed(node, rank)
        return f"selects some of the {what}" if selects else None
    if node.op_type == "Attention":
        return _why_attending(node, tokens, what)
    rule = _AXES.get(node.op_type)
    if rule is None:
        return "is not known to process tokens independently"
    if node.op_type in ("GatherElements", "ScatterElements") and _indexes_some(source, input_of(node, 1), tokens):
        return f"indexes some of the {what}"
    axes = rule(node, rank)
    if axes is None:
        return "works along axes that are known only at run time"
    return f"works along the {what}" if tokens_at & {axis % max(rank, 1) for axis in axes} else None


def _why_attending(node: ir.Node, tokens: str, what: str) -> str | None:
    """Why attention to a fixed number of keys may mix tokens."""
    queries, *read = (set(token_axes(value, tokens)) for value in inputs_of(node)[:3])
    mask = optional_input(node, 3)
    if (mask is not None and rank_of(mask) - 1 in token_axes(mask, tokens)) or any(axes & {2, 3} for axes in read):
        return f"attends to several {what}"
    return "is causal" if node.attributes.get_int("is_causal", 0) and 2 in queries else None


def _indexed(node: ir.Node, rank: int) -> set[int]:
    """The axes that a Gather or GatherND indexes."""
    if node.op_type == "Gather":
        return {node.attributes.get_int("axis", 0) % max(rank, 1)}
    first, indices = node.attributes.get_int("batch_dims", 0), input_of(node, 1).shape
    count = indices[-1] if indices is not None and len(indices) else None
    return set(range(first + count if isinstance(count, int) else rank))


def _indexes_some(source: ir.Value, indices: ir.Value, tokens: str) -> bool:
    """Whether an operator that indexes every element may have indices for some of the tokens only."""
    axes = {*token_axes(source, tokens), *token_axes(indices, tokens)}
    if source.shape is None or indices.shape is None:
        return True
    sizes, indexed = sizes_of(source), sizes_of(indices)
    return any(sizes[axis] != indexed[axis] for axis in axes)


def _of_axis(default: int) -> Callable[[ir.Node, int], list[int] | None]:
    return lambda node, rank: [node.attributes.get_int("axis", default)]


def _of_input(index: int) -> Callable[[ir.Node, int], list[int] | None]:
    def axes(node: ir.Node, rank: int) -> list[int] | None:
        value = optional_input(node, index)
        if value is None:
            return list(range(rank))
        numbers = constant_of(value)
        return None if numbers is None else [int(axis) for axis in numbers.reshape(-1)]

    return axes


def _repeated(node: ir.Node, rank: int) -> list[int] | None:
    """The axes along which numbers are repeated."""
    repeats = constant_of(input_of(node, 1))
    return None if repeats is None else [axis for axis, count in enumerate(repeats) if count != 1]


def _convolved(node: ir.Node, rank: int) -> list[int] | None:
    """The channels, and the axes along which a convolution combines, adds or drops positions."""
    kernel, places = input_of(node, 1).shape, rank - 2
    if kernel is None:
        return None
    strides = node.attributes.get_ints("strides", [1] * places)
    pads = node.attributes.get_ints("pads", [0] * 2 * places)
    alone = [(kernel[2 + i], strides[i], pads[i], pads[i + places]) == (1, 1, 0, 0) for i in range(places)]
    return [1, *(2 + i for i in range(places) if not alone[i])]


def _to_the_end(node: ir.Node, rank: int) -> list[int]:
    """All axes from a given one on."""
    return list(range(int(node.attributes.get_int("axis", -1) or 0) % max(rank, 1), rank))


_AXES: dict[str, Callable[[ir.Node, int], list[int] | None]] = {
    **dict.fromkeys(("CumSum", *REDUCTIONS), _of_input(1)),
    **dict.fromkeys(("Pad", "Slice"), _of_input(3)),
    **dict.fromkeys(("ArgMax", "ArgMin", "Concat", "GatherElements", "ScatterElements", "Split"), _of_axis(0)),
    **dict.fromkeys(("Hardmax", "LogSoftmax", "LpNormalization", "Softmax", "TopK"), _of_axis(-1)),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), _to_the_end),
    # by fixed numbers, unless it is in training mode
    "BatchNormalization": lambda node, rank: list(range(rank)) if node.attributes.get_int("training_mode", 0) else [],
    "Conv": _convolved,
    "GroupNormalization": lambda node, rank: list(range(1, rank)),
    "InstanceNormalization": lambda node, rank: list(range(2, rank)),
    "RotaryEmbedding": lambda node, rank: [],
    "Tile": _repeated,
}
