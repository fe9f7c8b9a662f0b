"""Layouts: the algebra of sizes, and that a chain of views of any length does what its layout says."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from attnforge.arrays import Array
from attnforge.export.attention.layout import (
    Axis,
    Layout,
    after_views,
    before_views,
    effort,
    needs_transpose,
    rearrange,
)
from attnforge.export.graphs.build import Builder, constant, typed
from attnforge.export.graphs.sizes import ONE, LayoutError, Size, sizes_of

FLOAT = ir.DataType.FLOAT

# Sizes


def size(text: str | int) -> Size:
    return Size.of(text if isinstance(text, int) else ir.SymbolicDim(text))


MONOMIALS = st.builds(
    lambda factor, symbols: Size(factor, tuple(sorted(symbols))),
    st.integers(1, 24),
    st.lists(st.sampled_from(["b", "n", "rows"]), max_size=3),
)


def test_sizes_are_read_as_monomials() -> None:
    assert size(6) == Size(6)
    assert size("n") == Size(1, ("n",))
    assert size("4*rows*b") == size("b * rows * 4") == size("2*b*2*rows") == Size(4, ("b", "rows"))
    assert size("n*n") == Size(1, ("n", "n"))
    assert size("n") != size("m") and size("2*n") != size("n")


@given(MONOMIALS, MONOMIALS)
def test_division_undoes_multiplication(a: Size, b: Size) -> None:
    assert a * b == b * a
    assert (a * b).divide(b) == a
    assert a.divide(a) == ONE and (a * ONE) == a
    quotient = a.divide(b)
    assert quotient is None or quotient * b == a


@pytest.mark.parametrize(("a", "b"), [(6, 4), (4, 6), ("n", "m"), ("n", "2*n"), (4, "n"), ("n", "n*n"), ("3*n", 2)])
def test_sizes_that_do_not_divide_for_every_value(a: str | int, b: str | int) -> None:
    assert size(a).divide(size(b)) is None


@given(MONOMIALS)
def test_a_size_comes_back_from_the_dim_that_it_is_written_as(a: Size) -> None:
    assert Size.of(a.dim()) == a


@pytest.mark.parametrize("text", ["n + 1", "n - 1", "n//2", "2*n + 3", "(n + 1)*4", "Mod(n, 2)", "Max(7, n)"])
def test_other_expressions_count_as_one_symbol(text: str) -> None:
    expression = size(text)
    assert not expression.is_static and len(expression.symbols) == 1
    assert Size.of(expression.dim()) == expression
    assert (expression * Size(3)).divide(Size(3)) == expression
    assert expression != size("n")


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("((n**2)//n)", "n"),
        ("n**2", "n*n"),
        ("4*b*n + 4*b", "4*(n + 1)*b"),
        ("Max(1, n)", "n"),
        ("(4*b*n)//b", "n*4"),
        ("lambda*import.x", "import.x*lambda"),
    ],
)
def test_one_size_however_it_is_written(text: str, same: str) -> None:
    assert size(text) == size(same)


def test_unknown_dims_are_all_different() -> None:
    first, second = ir.SymbolicDim(None), ir.SymbolicDim(None)
    assert Size.of(first) != Size.of(second)
    assert Size.of(first) == Size.of(first)
    assert len({Size.of(ir.SymbolicDim(None)) for _ in range(9)}) == 9, "although each is freed before the next one"


# Layouts


def fresh(*dims: str | int) -> Layout:
    return Layout(() if size(dim) == ONE else (Axis(size(dim)),) for dim in dims)


def test_dims_of_one_have_no_axes() -> None:
    layout = fresh(2, 1, "n")
    assert [len(dim) for dim in layout.dims] == [1, 0, 1]
    assert layout.sizes() == [Size(2), ONE, Size(1, ("n",))]
    assert len(layout) == 3 and len(layout.axes) == 2


def test_permuted() -> None:
    layout = fresh("b", 4, "n", 16)
    heads, tokens = layout.dims[1], layout.dims[2]
    assert layout.permuted([0, 2, 1, 3]).dims[1:3] == [tokens, heads]


def test_regrouping_merges_and_splits() -> None:
    layout = fresh("b", "n", 64)
    apart = layout.regrouped([size(s) for s in ("b", "n", 4, 16)])
    assert layout.sizes() == [size("b"), size("n"), size(64)]  # the same dims
    assert layout.dims[2] == (
        *apart.dims[2],
        *apart.dims[3],
    )  # now known to be two axes, for every layout that has them
    merged = apart.permuted([0, 2, 1, 3]).regrouped([size(s) for s in ("4*b", "n", 16)])
    assert merged.dims[0] == (*apart.dims[0], *apart.dims[2])
    assert merged.regrouped([size(s) for s in ("b", 1, 4, "n", 1, 16)]).axes == merged.axes
    assert merged.regrouped([size("64*b*n")]).dims == [tuple(merged.axes)]


@pytest.mark.parametrize(
    ("dims", "into"),
    [
        ((4, 6), (6, 4)),  # cuts across
        (("n", 4), (4, "n")),
        (("b", "n"), ("n", "b")),
        ((4, 6), (4, 5)),  # another number of elements
        ((4, 6), (4,)),
        ((4,), (4, 6)),
        (("n",), (2, "m")),
    ],
)
def test_regrouping_that_mixes_axes_is_refused(dims: tuple[str | int, ...], into: tuple[str | int, ...]) -> None:
    with pytest.raises(LayoutError, match="reshape"):
        fresh(*dims).regrouped([size(s) for s in into])


def test_what_moves() -> None:
    layout = fresh("b", "n", 64)
    apart = layout.regrouped([size(s) for s in ("b", "n", 4, 16)])
    by_head = apart.permuted([0, 2, 1, 3])
    assert not needs_transpose(layout, apart) and needs_transpose(layout, by_head)
    assert effort(layout, layout) == 0 and effort(layout, apart) == 0
    assert effort(layout, by_head) == 1  # a transpose; one dynamic dim has moved, and a Reshape can infer one
    assert effort(layout, apart.permuted([2, 0, 1, 3])) == 2  # two have moved, so their sizes must be computed
    assert effort(layout, Layout([(*apart.dims[0], *apart.dims[1]), apart.dims[2], apart.dims[3]])) == 0


def test_a_value_without_a_shape_has_no_layout() -> None:
    with pytest.raises(LayoutError, match="shape of 'x' is not known"):
        Layout.fresh(ir.Value(name="x", type=ir.TensorType(FLOAT)))


# Chains of views

VALUES = {"b": 3, "n": 5, "m": 7}


def number(size: Size, values: dict[str, int]) -> int:
    return size.factor * prod(values[symbol] for symbol in size.symbols)


@dataclass
class Chain:
    """A random chain of views over one input, both as ONNX nodes and in NumPy."""

    x: ir.Value
    array: Array
    values: dict[str, int]
    op: Builder = field(default_factory=Builder)

    def __post_init__(self) -> None:
        self.y, self.sizes, self.feed = self.x, sizes_of(self.x), self.array

    def _is(self, y: ir.Value, sizes: list[Size], array: Array) -> None:
        self.y, self.sizes, self.array = typed(y, FLOAT, [s.dim() for s in sizes]), sizes, array

    def transpose(self, perm: list[int]) -> None:
        self._is(self.op.Transpose(self.y, perm=perm), [self.sizes[i] for i in perm], self.array.transpose(perm))

    def reverse(self) -> None:
        self._is(self.op.Transpose(self.y), self.sizes[::-1], self.array.transpose())

    def unsqueeze(self, i: int) -> None:
        sizes = [*self.sizes[:i], ONE, *self.sizes[i:]]
        self._is(self.op.Unsqueeze(self.y, constant(self.op, [i])), sizes, np.expand_dims(self.array, i))

    def squeeze(self, i: int) -> None:
        sizes = self.sizes[:i] + self.sizes[i + 1 :]
        self._is(self.op.Squeeze(self.y, constant(self.op, [i])), sizes, self.array.squeeze(i))

    def flatten(self, axis: int) -> None:
        before, after = product(self.sizes[:axis]), product(self.sizes[axis:])
        shape = [number(before, self.values), number(after, self.values)]
        self._is(self.op.Flatten(self.y, axis=axis), [before, after], self.array.reshape(shape))

    def reshape(self, sizes: list[Size]) -> None:
        entries = [self._entry(size) for size in sizes]
        shape = self.op.Concat(*entries, axis=0) if entries else constant(self.op, np.zeros(0))
        array = self.array.reshape([number(size, self.values) for size in sizes])
        self._is(self.op.Reshape(self.y, shape), sizes, array)

    def _entry(self, size: Size) -> ir.Value:
        entry = constant(self.op, [size.factor])
        for symbol in size.symbols:
            axis = sizes_of(self.x).index(Size(1, (symbol,)))
            entry = self.op.Mul(entry, self.op.Shape(self.x, start=axis, end=axis + 1))
        return entry


def product(sizes: list[Size]) -> Size:
    result = ONE
    for factor in sizes:
        result = result * factor
    return result


@st.composite
def chains(draw: Any) -> Chain:
    """One to six views of a tensor of one to four dims: static, of size 1, or dynamic; a symbol may occur twice."""
    dims = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, "b", "n", "n", "m"]), min_size=1, max_size=4))
    values = {symbol: draw(st.integers(1, 4)) for symbol in VALUES}
    sizes = [size(dim) for dim in dims]
    x = typed(ir.Value(name="x"), FLOAT, [dim.dim() for dim in sizes])
    shape = [number(dim, values) for dim in sizes]
    chain = Chain(x, np.arange(prod(shape), dtype=np.float32).reshape(shape), values)
    for _ in range(draw(st.integers(1, 6))):
        draw_view(draw, chain)
    return chain


def draw_view(draw: Any, chain: Chain) -> None:
    sizes = chain.sizes
    rank = len(sizes)
    choices = ["transpose", "unsqueeze", "reverse", "flatten"]
    if rank > 1:
        choices += ["merge", "merge", "all in one"]
    if any(dim == ONE for dim in sizes):
        choices += ["squeeze"]
    if splits := [(i, d) for i, dim in enumerate(sizes) for d in (2, 3) if dim.factor % d == 0]:
        choices += ["split", "split", "split"]
    if apart := [i for i, dim in enumerate(sizes) if len(dim.symbols) > 1 or (dim.symbols and dim.factor > 1)]:
        choices += ["split symbols"]
    match draw(st.sampled_from(choices)):
        case "transpose":
            chain.transpose(list(draw(st.permutations(range(rank)))))
        case "reverse":
            chain.reverse()
        case "unsqueeze":
            chain.unsqueeze(draw(st.integers(0, rank)))
        case "squeeze":
            chain.squeeze(draw(st.sampled_from([i for i, dim in enumerate(sizes) if dim == ONE])))
        case "flatten":
            chain.flatten(draw(st.integers(0, rank)))
        case "all in one":
            chain.reshape([product(sizes)])
        case "merge":
            i = draw(st.integers(0, rank - 2))
            chain.reshape([*sizes[:i], sizes[i] * sizes[i + 1], *sizes[i + 2 :]])
        case "split":
            i, d = draw(st.sampled_from(splits))
            rest = sizes[i].divide(Size(d))
            assert rest is not None
            parts = [Size(d), rest] if draw(st.booleans()) else [rest, Size(d)]
            chain.reshape([*sizes[:i], *parts, *sizes[i + 1 :]])
        case "split symbols":
            i = draw(st.sampled_from(apart))
            first = Size(1, sizes[i].symbols[:1])
            rest = sizes[i].divide(first)
            assert rest is not None
            parts = [first, rest] if draw(st.booleans()) else [rest, first]
            chain.reshape([*sizes[:i], *parts, *sizes[i + 1 :]])


def run(chain: Chain, *results: ir.Value) -> list[Array]:
    """Compute `results` with ONNX Runtime, without graph optimisations."""
    ends = [ir.node("Identity", [result]) for result in results]
    nodes = [*chain.op.nodes, *ends]
    for i, node in enumerate(nodes):
        for j, value in enumerate(node.outputs):
            value.name = value.name or f"value_{i}_{j}"
    outputs = [end.outputs[0] for end in ends]
    for output in outputs:
        output.type = ir.TensorType(FLOAT)
    graph = ir.Graph([chain.x], outputs, nodes=nodes, opset_imports={"": 23}, name="views")
    proto = ir.to_proto(ir.Model(graph, ir_version=10))
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": chain.feed}))


def as_laid_out(array: Array, here: Layout, there: Layout, values: dict[str, int]) -> Array:
    """Rearrange `array` from layout `here` to `there`, which has the same axes."""
    apart = array.reshape([number(axis.size, values) for axis in here.axes])
    moved = apart.transpose([here.axes.index(axis) for axis in there.axes])
    return moved.reshape([number(size, values) for size in there.sizes()])


@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(chain=chains(), data=st.data())
def test_a_chain_of_views_is_what_its_layout_says(chain: Chain, data: st.DataObject) -> None:
    """Walking back to the furthest value and rearranging it to any other layout gives the same numbers."""
    layout = Layout.fresh(chain.y)
    origin, source = before_views(chain.y, layout)
    assert set(source.axes) == set(layout.axes)
    assert source.sizes() == sizes_of(origin)
    axes = data.draw(st.permutations(layout.axes))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(axes)), max_size=4)))
    target = Layout(axes[i:j] for i, j in zip([0, *cuts], [*cuts, len(axes)], strict=True))
    before = len(chain.op.nodes)
    written = rearrange(chain.op, origin, source, target)
    views = [node.op_type for node in list(chain.op.nodes)[before:] if node.op_type in ("Reshape", "Transpose")]
    assert views.count("Transpose") <= 1 and views.count("Reshape") <= 2
    assert sizes_of(written) == target.sizes()
    there, here = run(chain, chain.y, written)
    np.testing.assert_array_equal(there, chain.array)
    np.testing.assert_array_equal(here, as_laid_out(chain.array, layout, target, chain.values))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(chain=chains())
def test_walking_forward_ends_where_the_chain_does(chain: Chain) -> None:
    layout = Layout.fresh(chain.x)
    end, there = after_views(chain.x, layout)
    assert there.sizes() == sizes_of(end)
    written = rearrange(chain.op, chain.x, layout, there)
    expected, got = run(chain, end, written)
    np.testing.assert_array_equal(got, expected)


def views(*dims: str | int) -> Chain:
    values = dict(VALUES)
    sizes = [size(dim) for dim in dims]
    shape = [number(dim, values) for dim in sizes]
    x = typed(ir.Value(name="x"), FLOAT, [dim.dim() for dim in sizes])
    return Chain(x, np.arange(prod(shape), dtype=np.float32).reshape(shape), values)


def test_heads_are_found_after_a_split_and_a_transpose() -> None:
    chain = views("b", "n", 64)
    chain.reshape([size(s) for s in ("b", "n", 4, 16)])
    chain.transpose([0, 2, 1, 3])
    layout = Layout.fresh(chain.y)
    origin, source = before_views(chain.y, layout)
    batch, heads, tokens, features = layout.dims
    assert origin is chain.x
    assert source.dims == [batch, tokens, heads + features]


def test_a_walk_back_ends_at_a_view_that_mixes() -> None:
    """Heads split by a reshape alone: rows of the result are not rows of the input, so no layout of the input fits."""
    chain = views(6, "n", 8)
    chain.transpose([1, 0, 2])
    chain.reshape([size(s) for s in (4, "n", 12)])
    origin, source = before_views(chain.y, Layout.fresh(chain.y))
    assert origin is chain.y and source.sizes() == sizes_of(chain.y)


def test_a_view_that_mixes_leaves_the_axes_as_they_were() -> None:
    """Axes that a walk split on the way to a view that it cannot pass must not stay split where it stopped."""
    chain = views("n", 2, "m", "n")
    chain.reshape([size("2*m*n*n")])
    chain.reshape([size("2*n*n"), size("m")])
    layout = Layout.fresh(chain.y)
    origin, source = before_views(chain.y, layout)
    assert origin is chain.y and [len(dim) for dim in source.dims] == [1, 1]


def test_a_walk_back_passes_a_value_whose_shape_does_not_give_the_sizes() -> None:
    chain = views("b", "n", 6)
    chain.reshape([size("6*b*n")])
    flat = chain.y
    chain.reshape([size(s) for s in ("b", "n", 6)])
    origin, _ = before_views(chain.y, Layout.fresh(chain.y))
    assert origin is chain.x is not flat


def test_a_walk_forward_ends_at_a_second_use_and_at_an_output() -> None:
    chain = views(2, 6)
    chain.transpose([1, 0])
    middle = chain.y
    chain.transpose([1, 0])
    chain.op.Neg(middle)
    assert after_views(chain.x, Layout.fresh(chain.x))[0] is middle
    chain = views(2, 6)
    chain.transpose([1, 0])
    middle = chain.y
    chain.transpose([1, 0])
    ir.Graph([chain.x], [middle], nodes=list(chain.op.nodes))
    assert after_views(chain.x, Layout.fresh(chain.x))[0] is middle


@pytest.mark.parametrize(
    ("dims", "extra"), [(("b", 4), Size(3)), (("n",), Size(2)), ((4, 1, 2), Size(5)), (("b", "n"), Size(2))]
)
@pytest.mark.parametrize("position", [0, 1])
def test_axes_that_only_the_target_has_are_broadcast(dims: tuple[str | int, ...], extra: Size, position: int) -> None:
    chain = views(*dims)
    layout, axis = Layout.fresh(chain.x), Axis(extra)
    target = Layout([*layout.dims[:position], (axis,), *layout.dims[position:]])
    (got,) = run(chain, rearrange(chain.op, chain.x, layout, target))
    expected = np.repeat(np.expand_dims(chain.feed, position), extra.factor, axis=position)
    np.testing.assert_array_equal(got, expected)


def test_an_axis_that_the_target_lacks_is_an_error() -> None:
    chain = views("b", 4)
    layout = Layout.fresh(chain.x)
    with pytest.raises(LayoutError, match="1 axis of 'x' is not an axis of the product"):
        rearrange(chain.op, chain.x, layout, Layout(layout.dims[:1]))


def test_a_size_that_no_shape_gives_is_an_error() -> None:
    chain = views(4)
    layout = Layout.fresh(chain.x)
    with pytest.raises(LayoutError, match="a size cannot be read from the shape of 'x'"):
        rearrange(chain.op, chain.x, layout, Layout([(Axis(size("m")),), *layout.dims]))
