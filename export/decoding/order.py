"""The order of rows where tokens share an axis: with samples, with the experts of each, or with parts of each."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import onnx_ir as ir

from attnforge.export.graphs.nodes import (
    BY_ELEMENT,
    VIEWS,
    constant_of,
    input_of,
    inputs_of,
    is_op,
    maker_of,
    optional_input,
    rank_of,
)
from attnforge.export.graphs.sizes import ONE, LayoutError, Size, product, sizes_of

_RESHAPES = ("Reshape", "Flatten", "Squeeze", "Unsqueeze")


def token_axes(value: ir.Value, tokens: str) -> list[int]:
    """The axes of a value whose size depends on the number of tokens; empty if the shape is not known."""
    if value.shape is None:
        return []
    return [i for i, dim in enumerate(value.shape) if tokens in Size.of(dim).names]


class RowOrder:
    """Follows how often tokens run from first to last in an axis, node by node.

    `(batch, tokens)` flattened has all tokens of a sample before those of the next: they run `batch` times.
    `(tokens, batch)` flattened has the same size, and they run once.

    Args:
        by_token: values that depend on the contents of the model's inputs.
        tokens: the symbol of the number of tokens.
    """

    def __init__(self, by_token: set[ir.Value], tokens: str) -> None:
        self._by_token, self._tokens, self._alone = by_token, tokens, Size(1, (tokens,))
        self._runs: dict[ir.Value, Size] = {}

    def of(self, value: ir.Value) -> Size | None:
        """How often tokens run from first to last in a value's only axis of tokens; None if it is not known."""
        return ONE if self._sizes(value) == [self._alone] else self._runs.get(value)

    def pass_on(self, value: ir.Value, source: ir.Value) -> None:
        """Note that a value has its rows in the order of another."""
        if (runs := self.of(source)) is not None:
            self._runs[value] = runs

    def repeats(self, node: ir.Node) -> bool:
        """Whether a node repeats all rows of the only axis of tokens, one copy after another, and nothing else; note
        the order."""
        counts = constant_of(input_of(node, 1)) if is_op(node, "Tile") else None
        if counts is None or (runs := self.of(input_of(node))) is None:
            return False
        (axis,) = token_axes(input_of(node), self._tokens)
        if any(count != 1 for i, count in enumerate(counts) if i != axis):
            return False
        self._runs[node.outputs[0]] = runs * Size(int(counts[axis]))
        return True

    def why_mixing(self, node: ir.Node) -> str | None:
        """Follow a node; why it mixes tokens, if it does."""
        if is_op(node, *_RESHAPES):
            try:
                return None if self._keeps_rows(node) else "regroups the tokens"
            except LayoutError as error:
                return f"cannot be followed: {error}"
        sources = [value for value in inputs_of(node) if value in self._by_token]
        for result in node.outputs:
            sizes = self._sizes(result)
            alike = [value for value in sources if self._sizes(value) == sizes]
            if len(sizes) != 1 or sizes == [self._alone] or not alike:
                continue
            if len({self.of(value) for value in alike}) > 1:
                return "combines tokens in different orders"
            self.pass_on(result, alike[0])
        return None

    def _keeps_rows(self, node: ir.Node) -> bool:
        """Whether a view leaves every number with its token."""
        source, result = input_of(node), node.outputs[0]
        before, sizes = self._before(source), sizes_of(result)
        axes = token_axes(result, self._tokens)
        for axis, runs in zip(axes, before, strict=False):
            within = runs and runs.divide(product(sizes[:axis]))
            if within is None or sizes[axis].divide(self._alone * within) is None:
                return False
            if sizes[axis] == self._alone and within != ONE:
                return False
            if len(axes) == 1:
                self._runs[result] = within
        return len(axes) == len(before)

    def _before(self, value: ir.Value) -> list[Size | None]:
        """For each axis of tokens, how often they run from first to last in the whole value."""
        sizes, axes = sizes_of(value), token_axes(value, self._tokens)
        runs = [ONE if sizes[axis] == self._alone else self._runs.get(value) for axis in axes]
        return [each and product(sizes[:axis]) * each for axis, each in zip(axes, runs, strict=True)]

    def _sizes(self, value: ir.Value) -> list[Size]:
        """The sizes of a value's axes of tokens."""
        return [Size.of(value.shape[axis]) for axis in token_axes(value, self._tokens)] if value.shape else []


# --- sorted rows ------------------------------------------------------------------------------------------------------

# Rows in the order of a number of each: a mixture of experts sorts its pairs of token and expert by expert, multiplies
# each expert's rows with its weights, and puts the rows back.
#
# The order depends on all tokens, and the result does not, if between sorting and putting back every row depends only
# on the same row. Then the whole is computed token by token, although neither sort nor group is.


_EXACT = (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64)


@dataclass(frozen=True)
class _Sorted:
    """What a value has to do with a sort of rows.

    Attributes:
        sort: the sort.
        has: `rows`, rows in its order; `indices`, `(rows,)` or `(rows, 1)`, where its rows were before, in groups of
            `group` rows; `places`, of the same shape, where the rows are after it; `others`, something else, which no
            result may depend on, except through groups of rows.
        group: the number of rows in a group.
        culprit: the node through which others depend on the sort.
    """

    sort: ir.Node
    has: Literal["rows", "indices", "places", "others"]
    group: int = 1
    culprit: ir.Node | None = None


class SortedRows:
    """Follows the values of a graph that depend on a sort of rows, node by node.

    Args:
        by_token: values that depend on the contents of the model's inputs.
        by_count: values that depend on the number of tokens only.
        order: the order of rows that are not sorted.
        why_mixing: why a node that reads tokens may mix them; None if it does not.

    Attributes:
        numbering: nodes that number the rows to put them back.
    """

    def __init__(
        self,
        by_token: set[ir.Value],
        by_count: set[ir.Value],
        order: RowOrder,
        why_mixing: Callable[[ir.Node], str | None],
    ) -> None:
        self._by_token, self._by_count, self._order, self._why_mixing = by_token, by_count, order, why_mixing
        self.numbering: set[ir.Node] = set()
        self._sorted: dict[ir.Value, _Sorted] = {}

    def follow(self, node: ir.Node) -> bool:
        """Follow a node; False if it neither sorts rows nor reads what depends on a sort."""
        if self._is_sort(node):
            rows, indices = node.outputs
            self._sorted |= {rows: _Sorted(node, "rows"), indices: _Sorted(node, "indices")}
            return True
        read = [self._sorted[value] for value in inputs_of(node) if value in self._sorted]
        if not read or node.outputs[0] not in self._by_token:
            return bool(read)
        sort = read[0].sort
        if self._is_put_back(node):
            return True
        known = self._indices(node) or self._places(node, sort)
        if known is None and self._are_rows(node, sort):
            known = _Sorted(sort, "rows")
        if known is None:
            earlier = next((known.culprit for known in read if known.culprit is not None), None)
            is_group = is_op(earlier, "Slice", "MatMul")  # a part of what its reader may join
            known = _Sorted(sort, "others", culprit=node if earlier is None or is_group else earlier)
        self._sorted.update(dict.fromkeys(node.outputs, known))
        return True

    def mixing(self, values: Iterable[ir.Value]) -> ir.Node | None:
        """The node that sorts what one of some values depends on, or that reads sorted rows in an unknown way."""
        return next((known.culprit or known.sort for v in values if (known := self._sorted.get(v)) is not None), None)

    # --- what a node computes of sorted rows --------------------------------------------------------------------------

    def _is_sort(self, node: ir.Node) -> bool:
        """Whether a node sorts integers of rows, ascending."""
        if not is_op(node, "TopK") or _attributes(node, largest=1, sorted=1) != [0, 1]:
            return False
        rows = input_of(node)
        is_free = rows in self._by_token and rows not in self._sorted
        is_integer = rows.dtype is not None and rows.dtype.is_integer()
        return is_free and is_integer and rank_of(rows) == 1 and self._have_equal_rows(rows, *node.outputs)

    def _indices(self, node: ir.Node) -> _Sorted | None:
        """Rows, places or indices with another dim, or indices divided by a number of rows, rounding down."""
        source = input_of(node)
        if is_op(node, "Unsqueeze") and _integers(node, 1) in ([1], [-1]) and rank_of(source) == 1:
            known = self._sorted.get(source)
            return known if known is not None and known.has != "others" else None
        less = maker_of(source) if is_op(node, "Div") else None
        rest = maker_of(input_of(less, 1)) if is_op(less, "Sub") else None
        if less is None or not is_op(rest, "Mod") or input_of(rest) is not input_of(less):
            return None
        by, others = (_integers(each, 1) for each in (node, rest))
        known = self._sorted.get(input_of(less))
        if known is None or known != _Sorted(known.sort, "indices") or by != others or len(by) != 1:
            return None
        return replace(known, group=by[0])

    def _places(self, node: ir.Node, sort: ir.Node) -> _Sorted | None:
        """The inverse of the indices: numbers from 0, scattered to them."""
        if not is_op(node, "ScatterND") or node.attributes.get_string("reduction", "none") != "none":
            return None
        data, indices, updates = (input_of(node, i) for i in range(3))
        numbers = maker_of(updates)
        is_range = is_op(numbers, "Range") and (_integers(numbers, 0), _integers(numbers, 2)) == ([0], [1])
        is_whole = self._have_equal_rows(data, indices, updates) and rank_of(data) == 1 and rank_of(indices) == 2
        is_of_sort = self._sorted.get(indices) == _Sorted(sort, "indices")
        if not is_range or not is_whole or data in self._by_token or not is_of_sort:
            return None
        self.numbering.add(node)
        return _Sorted(sort, "places")

    def _is_put_back(self, node: ir.Node) -> bool:
        """Whether a node returns sorted rows to where they were."""
        if not _gathers_rows(node):
            return False
        rows, places = (self._sorted.get(input_of(node, i)) for i in (0, 1))
        if rows is None or rows.has != "rows" or places != _Sorted(rows.sort, "places"):
            return False
        self._order.pass_on(node.outputs[0], input_of(rows.sort))
        return True

    def _are_rows(self, node: ir.Node, sort: ir.Node) -> bool:
        """Whether a node computes rows in the order of a sort that depend on the same rows only."""
        if not _gathers_rows(node):
            return self._is_by_group(node, sort) or self._is_by_row(node, sort)
        source, known = input_of(node), self._sorted.get(input_of(node, 1))
        if known is not None and known.has == "indices" and source in self._by_token and source not in self._sorted:
            return bool(source.shape) and self._is_in_line(source, input_of(sort), known.group)
        is_sorted = known is not None and known.has == "rows"  # rows of a table, by the number that is sorted
        return is_sorted and source not in self._by_token and not self._is_count(source)

    def _is_by_row(self, node: ir.Node, sort: ir.Node) -> bool:
        of_tokens = [value for value in inputs_of(node) if value in self._by_token]
        if node.domain != "" or node.op_type in ("GatherElements", "ScatterElements"):  # which may index few rows
            return False
        are_rows = all(self._sorted.get(value) == _Sorted(sort, "rows") for value in of_tokens)
        if not are_rows or any(map(self._is_count, inputs_of(node))):
            return False
        if node.op_type in VIEWS:
            perm = node.attributes.get_ints("perm", [-1]) if node.op_type == "Transpose" else [0]
            return perm[0] == 0 and self._have_equal_rows(input_of(node), node.outputs[0])
        if node.op_type in BY_ELEMENT:
            is_aligned = len({rank_of(value) for value in (*of_tokens, node.outputs[0])}) == 1
            return is_aligned and self._have_equal_rows(*of_tokens, node.outputs[0])
        return self._why_mixing(node) is None and self._have_equal_rows(*of_tokens, *node.outputs)

    def _is_by_group(self, node: ir.Node, sort: ir.Node) -> bool:
        """Whether a node joins the products of all groups of rows of one number with matrices of their own."""
        sources: set[ir.Value] = set()
        end: ir.Value | None = None
        if not is_op(node, "Concat") or _attributes(node, axis=0) != [0]:
            return False
        for i, part in enumerate(node.inputs):
            product = maker_of(part)
            rows = maker_of(input_of(product)) if is_op(product, "MatMul") else None
            if product is None or not is_op(rows, "Slice") or len(rows.inputs) != 4 or _integers(rows, 3) != [0]:
                return False
            start, weights = input_of(rows, 1), input_of(product, 1)
            follows = start is end if i else _integers(rows, 1) == [0]
            end = input_of(rows, 2)
            is_of_rows = self._sorted.get(input_of(rows)) == _Sorted(sort, "rows") and weights not in self._by_token
            if not follows or not is_of_rows or not _is_end(end, i, len(node.inputs), sort.outputs[0]):
                return False
            sources.add(input_of(rows))
        return len(sources) == 1

    def _is_in_line(self, rows: ir.Value, numbers: ir.Value, group: int) -> bool:
        """Whether a sort's index, divided by `group`, is that of a row of the same token."""
        runs = self._order.of(numbers)
        is_of_all = sizes_of(rows)[0] * Size(group) == sizes_of(numbers)[0]
        return is_of_all and runs is not None and self._order.of(rows) == runs

    def _is_count(self, value: ir.Value) -> bool:
        """Whether a value may have another number for every row."""
        is_sized = value.shape is not None and all(isinstance(dim, int) for dim in value.shape)
        return value in self._by_count and not is_sized

    def _have_equal_rows(self, *values: ir.Value) -> bool:
        """Whether values are known to have the same number of rows."""
        known = [sizes_of(value)[0] for value in values if value.shape is not None and len(value.shape)]
        return len(known) == len(values) and len(set(known)) == 1


def _is_end(end: ir.Value, group: int, groups: int, numbers: ir.Value) -> bool:
    """Whether a value is how many of some sorted numbers are at most `group`."""
    taken = _before_exact_casts(end)
    if not is_op(taken, "Gather") or (_integers(taken, 1), _attributes(taken, axis=0)) != ([group], [0]):
        return False
    total = _before_exact_casts(input_of(taken))
    if not is_op(total, "CumSum") or (_integers(total, 1), _attributes(total, exclusive=0, reverse=0)) != ([0], [0, 0]):
        return False
    counts = _before_exact_casts(input_of(total))
    if not is_op(counts, "ReduceSum") or (_integers(counts, 1), _attributes(counts, keepdims=1)) != ([1], [0]):
        return False
    equal = _before_exact_casts(input_of(counts))
    row = maker_of(input_of(equal)) if is_op(equal, "Equal") else None
    if equal is None or not is_op(row, "Unsqueeze") or _integers(row, 1) != [0] or input_of(row) is not numbers:
        return False
    every = constant_of(input_of(equal, 1))
    return every is not None and np.array_equal(every, np.arange(groups)[:, None])


def _gathers_rows(node: ir.Node) -> bool:
    """Whether a node takes whole rows of its first input, by one index each."""
    if is_op(node, "Gather"):
        return _attributes(node, axis=0) == [0] and rank_of(input_of(node, 1)) == 1
    return is_op(node, "GatherND") and _attributes(node, batch_dims=0) == [0] and rank_of(input_of(node, 1)) == 2


def _attributes(node: ir.Node, **defaults: int) -> list[int]:
    """Attributes that are integers, in the order of the keywords, which are their defaults."""
    return [node.attributes.get_int(name, default) for name, default in defaults.items()]


def _integers(node: ir.Node, i: int) -> list[int]:
    """The numbers of a constant input of integers; none if it is not one."""
    numbers = constant_of(optional_input(node, i))
    return [] if numbers is None or numbers.dtype.kind not in "iu" else [int(number) for number in numbers.reshape(-1)]


def _before_exact_casts(value: ir.Value) -> ir.Node | None:
    """The node that computes a value, before casts to types that represent all numbers of rows."""
    node = maker_of(value)
    while is_op(node, "Cast") and node.outputs[0].dtype in _EXACT:
        node = maker_of(input_of(node))
    return node
