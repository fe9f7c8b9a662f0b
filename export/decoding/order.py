"""The order of rows where tokens share an axis: with samples, with the experts of each, or with parts of each."""

from __future__ import annotations

import onnx_ir as ir

from attnforge.export.graphs.nodes import constant_of, input_of, inputs_of, is_op
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
        sizes = self._sizes(value)
        return ONE if sizes == [self._alone] else self._runs.get(value)

    def pass_on(self, value: ir.Value, source: ir.Value) -> None:
        """Note that a value has its rows in the order of another."""
        runs = self.of(source)
        if runs is not None:
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
