"""Layouts: which logical axes make up a tensor's dims, and how to turn one layout into another.

A view (Reshape, Transpose, Squeeze, Unsqueeze, Flatten, Identity) moves numbers without changing them. The layouts at
both ends of a chain of views describe all that the chain does, however its author wrote it. So the walks compose views
into layouts, and :func:`rearrange` turns one layout into another with at most one Reshape, one Transpose and one
Reshape. This is einops (https://einops.rocks), with axes inferred instead of named.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import pairwise
from math import prod

import onnx_ir as ir

from attnforge.export.graphs.build import Builder, constant, typed
from attnforge.export.graphs.nodes import VIEWS, input_of, is_op
from attnforge.export.graphs.sizes import ONE, LayoutError, Size, product, sizes_of


@dataclass(eq=False)
class Axis:
    """A logical axis. If a Reshape shows that it is two axes, it is split in place, for every layout that contains it.

    Attributes:
        parts: the outer and the inner axis, if it was split.
    """

    size: Size
    parts: tuple[Axis, Axis] | None = field(default=None, repr=False)

    def leaves(self) -> list[Axis]:
        """The axes that this one was split into, outermost first; itself if it was not split."""
        return [self] if self.parts is None else [leaf for part in self.parts for leaf in part.leaves()]

    def split(self, outer: Size, inner: Size) -> None:
        self.parts = (Axis(outer), Axis(inner))


Dims = tuple[Axis, ...]
"""The axes of one dim of a tensor, outermost first; empty for a dim of size 1."""


class Layout:
    """The axes of every dim of a tensor.

    Args:
        dims: the axes of each dim, outermost first.
    """

    def __init__(self, dims: Iterable[Iterable[Axis]]) -> None:
        self._dims = [tuple(dim) for dim in dims]

    @classmethod
    def fresh(cls, value: ir.Value) -> Layout:
        """A layout with one new axis for every dim of `value` that is not 1."""
        return cls(() if size == ONE else (Axis(size),) for size in sizes_of(value))

    @property
    def dims(self) -> list[Dims]:
        return [tuple(leaf for axis in dim for leaf in axis.leaves()) for dim in self._dims]

    @property
    def axes(self) -> list[Axis]:
        return [axis for dim in self.dims for axis in dim]

    def sizes(self) -> list[Size]:
        return [product(axis.size for axis in dim) for dim in self.dims]

    def __len__(self) -> int:
        return len(self._dims)

    def with_dim(self, i: int, dim: Dims) -> Layout:
        """The layout with dim `i` replaced."""
        dims = self.dims
        dims[i] = dim
        return Layout(dims)

    def permuted(self, perm: Sequence[int]) -> Layout:
        dims = self.dims
        return Layout(dims[i] for i in perm)

    def regrouped(self, sizes: Sequence[Size]) -> Layout:
        """The layout after a reshape to `sizes`. Axes that the reshape divides are split in place.

        Raises:
            LayoutError: the reshape cuts across axes, so its dims are not products of them.
        """
        todo = self.axes
        dims: list[Dims] = []
        split: list[tuple[Axis, tuple[Axis, Axis]]] = []
        for size in sizes:
            dim: list[Axis] = []
            while size != ONE:
                if not todo:
                    raise LayoutError("a reshape that does not keep the axes apart")
                axis = todo.pop(0)
                rest = size.divide(axis.size)
                if rest is not None:
                    dim.append(axis)
                    size = rest
                    continue
                inner = axis.size.divide(size)
                if inner is None:
                    raise LayoutError("a reshape that mixes axes")
                parts = Axis(size), Axis(inner)
                split.append((axis, parts))
                todo[:0] = parts
            dims.append(tuple(dim))
        if todo:
            raise LayoutError("a reshape that does not keep the axes apart")
        for axis, parts in split:  # a reshape that fails leaves the axes as they were
            axis.parts = parts
        return Layout(dims)


def _permutation(node: ir.Node, rank: int) -> list[int]:
    perm = node.attributes.get_ints("perm")
    return list(perm) if perm is not None else list(range(rank))[::-1]


def before_view(node: ir.Node, after: Layout, *, sized: bool = False) -> Layout:
    """The layout of the input of a view or an Expand, given its output's: without the axes along which it repeats.

    Args:
        node: the view or Expand.
        after: the layout of its output.
        sized: whether the sizes of the axes can be read elsewhere.

    Raises:
        LayoutError: the axes are not kept apart, or an Expand repeats along a dim of dynamic size, which cannot be
            read from the input.
    """
    if node.op_type == "Transpose":
        perm = _permutation(node, len(after))
        return after.permuted([perm.index(i) for i in range(len(perm))])
    sizes = sizes_of(input_of(node))
    if node.op_type != "Expand":
        return after.regrouped(sizes)
    kept = after.dims[len(after) - len(sizes) :]
    before = Layout(() if size == ONE else dim for size, dim in zip(sizes, kept, strict=True))
    if not sized and any(not axis.size.is_static for axis in set(after.axes) - set(before.axes)):
        raise LayoutError("an Expand along a dynamic dim")
    return before


def after_view(node: ir.Node, before: Layout) -> Layout:
    """The layout of a view's output, given its input's."""
    if node.op_type == "Transpose":
        return before.permuted(_permutation(node, len(before)))
    return before.regrouped(sizes_of(node.outputs[0]))


def before_views(value: ir.Value, layout: Layout, *, sized: bool = False) -> tuple[ir.Value, Layout]:
    """The value before all views and Expands that lead to `value`, and its layout.

    The walk passes values whose shape does not give the size of every axis (all flattened into one dim, say), and
    returns the furthest value whose shape does; or just the furthest, if sizes can be read elsewhere (`sized`).
    """
    furthest = value, layout
    while (node := value.producer()) is not None and is_op(node, *VIEWS, "Expand"):
        try:
            layout = before_view(node, layout, sized=sized)
        except LayoutError:
            break
        value = input_of(node)
        if sized or all(axis.size.is_static or _holder(axis, layout) is not None for axis in layout.axes):
            furthest = value, layout
    return furthest


def after_views(value: ir.Value, layout: Layout) -> tuple[ir.Value, Layout]:
    """The value after all views of `value`, and its layout; each view must be the only user of its input."""
    while not value.is_graph_output() and len(value.uses()) == 1:
        node, index = next(iter(value.uses()))
        if not is_op(node, *VIEWS) or index != 0:
            break
        try:
            layout = after_view(node, layout)
        except LayoutError:
            break
        value = node.outputs[0]
    return value, layout


def needs_transpose(source: Layout, target: Layout) -> bool:
    """Whether numbers must move in memory when `source` becomes `target`."""
    present = set(source.axes)
    return source.axes != [axis for axis in target.axes if axis in present]


def effort(source: Layout, target: Layout) -> int:
    """The number of run-time operations, 0 to 2, that turn `source` into `target`: a transpose, a computed shape."""
    if source.dims == target.dims:
        return 0
    moved = [dim for i, dim in enumerate(target.dims) if i >= len(source) or source.dims[i] != dim]
    return needs_transpose(source, target) + (sum(any(not axis.size.is_static for axis in dim) for dim in moved) > 1)


Sized = tuple[ir.Value, Layout]
"""A value from whose shape axis sizes can be read, and its layout."""


def rearrange(op: Builder, value: ir.Value, source: Layout, target: Layout, sized: Sequence[Sized] = ()) -> ir.Value:
    """Write the nodes that turn `value` from one layout into another.

    Args:
        value: the value to rearrange.
        source: the layout of `value`.
        target: the layout of the result, which is repeated along axes that only `target` has.
        sized: further values from which sizes of dynamic axes can be read.

    Returns:
        The rearranged value; `value` itself if the layouts are equal.

    Raises:
        LayoutError: `source` has an axis that `target` lacks, or a size cannot be read from any value.
    """
    sized = [(value, source), *sized]
    axes = source.axes
    if lost := set(axes) - set(target.axes):
        raise LayoutError(f"{len(lost)} axis of {value.name!r} is not an axis of the product")
    missing = set(target.axes) - set(axes)
    order = [axis for axis in target.axes if axis not in missing]
    steps: list[Layout] = []
    if axes != order:
        steps += [Layout((a,) for a in axes), Layout((a,) for a in order)]
    if missing:
        steps += [Layout(() if a in missing else (a,) for a in target.axes), Layout((a,) for a in target.axes)]
    for here, there in pairwise([source, *steps, target]):
        value = _step(op, sized, value, here, there)
    return value


def _step(op: Builder, sized: Sequence[Sized], value: ir.Value, here: Layout, there: Layout) -> ir.Value:
    """Write one Transpose, Expand, Unsqueeze, Squeeze or Reshape; nothing if the layouts are equal."""
    a, b = here.dims, there.dims
    if a == b:
        return value
    if set(there.axes) != set(here.axes):
        result = op.Expand(value, _shape(op, there.dims, sized))
    elif here.axes != there.axes:
        result = op.Transpose(value, perm=[a.index(dim) for dim in b])
    elif (new := _inserted(a, b)) is not None:
        result = op.Unsqueeze(value, constant(op, new))
    elif (old := _inserted(b, a)) is not None:
        result = op.Squeeze(value, constant(op, old))
    else:
        result = op.Reshape(value, _shape(op, b, sized, reshape_from=a))
    return typed(result, value.dtype, [size.dim() for size in there.sizes()])


def _inserted(few: list[Dims], many: list[Dims]) -> list[int] | None:
    """Positions in `many` of the dims that `few` lacks; None if these are not all of size 1, or `many` lacks others."""
    positions, i = [], 0
    for j, dim in enumerate(many):
        if i < len(few) and few[i] == dim:
            i += 1
        elif dim:
            return None
        else:
            positions.append(j)
    return positions if i == len(few) else None


def _shape(op: Builder, dims: list[Dims], sized: Sequence[Sized], reshape_from: list[Dims] | None = None) -> ir.Value:
    """A shape tensor for `dims`, computed at run time only if dims are dynamic and a Reshape's 0 and -1 do not suffice.

    Args:
        dims: the dims of the result.
        sized: values from which sizes can be read.
        reshape_from: the dims of the input, if the shape is for a Reshape.
    """
    entries: list[int | Dims] = []
    for i, dim in enumerate(dims):
        size = product(axis.size for axis in dim)
        if size.is_static:
            entries.append(size.factor)
        else:
            entries.append(0 if reshape_from is not None and reshape_from[i : i + 1] == [dim] else dim)
    dynamic = [i for i, entry in enumerate(entries) if isinstance(entry, tuple)]
    if reshape_from is not None and len(dynamic) == 1:
        entries[dynamic[0]] = -1
    if all(isinstance(entry, int) for entry in entries):
        return constant(op, [entry for entry in entries if isinstance(entry, int)])
    sizes = (constant(op, [e]) if isinstance(e, int) else _dynamic_size(op, e, sized) for e in entries)
    return op.Concat(*sizes, axis=0)


def _dynamic_size(op: Builder, dim: Dims, sized: Sequence[Sized]) -> ir.Value:
    """The size of a dim as a tensor of one element, computed from the shapes of values."""
    factors = []
    static = 1
    for axis in dim:
        if axis.size.is_static:
            static *= axis.size.factor
            continue
        holder = next(((value, layout, i) for value, layout in sized if (i := _holder(axis, layout)) is not None), None)
        if holder is None:
            raise LayoutError(f"a size cannot be read from the shape of {sized[0][0].name!r}")
        value, layout, i = holder
        size = op.Shape(value, start=i, end=i + 1)
        divisor = prod(other.size.factor for other in layout.dims[i] if other is not axis)
        factors.append(size if divisor == 1 else op.Div(size, constant(op, [divisor])))
    if static != 1:
        factors.append(constant(op, [static]))
    return reduce(op.Mul, factors)


def _holder(axis: Axis, layout: Layout) -> int | None:
    """The dim whose size gives that of `axis`, because all its other axes are static; None if there is none."""
    for i, dim in enumerate(layout.dims):
        if axis in dim and all(other is axis or other.size.is_static for other in dim):
            return i
    return None
