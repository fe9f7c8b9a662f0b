"""Random masks, as people and exporters write them, built directly in ONNX: comparisons of positions, triangles,
constants, paddings, biases, and all combinations of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from attnforge.arrays import Array
from attnforge.export.graphs.sizes import ONE, Size
from attnforge.export.masks.affine import Scalar
from tests.support.random_graphs import BOOL, FLOAT, INT64, Choices, Graph, Invalid

QUERIES, KEYS = 0, 1
"""The dims of a mask."""

FILLS = (-np.inf, -1e9, float(np.finfo(np.float32).min), -1e4, -5.0)
COMPARISONS = ("GreaterOrEqual", "LessOrEqual", "Less", "Greater", "Equal")


@dataclass
class RandomMask:
    """A mask, and a site that uses it.

    Attributes:
        model: a graph that computes only the mask.
        node: a canonical Attention node.
        mask: its mask.
        inputs: the model's inputs, at the sizes.
        sizes: sizes of the symbols.
        n_q: number of queries.
        n_k: number of keys.
    """

    model: ir.Model
    node: ir.Node
    mask: ir.Value
    inputs: dict[str, Array]
    sizes: dict[str, int]
    n_q: int
    n_k: int

    def numbers(self) -> Array:
        """Return the mask computed by ONNX Runtime, as `(B, H, n_q, n_k)` numbers to add to scores."""
        (numbers,) = outputs_of(self.model, self.inputs)
        numbers = np.where(numbers, 0.0, -np.inf) if numbers.dtype == bool else numbers.astype(np.float64)
        return np.broadcast_to(numbers, np.broadcast_shapes(numbers.shape, (1, 1, self.n_q, self.n_k)))

    def scalar(self, scalar: Scalar) -> int:
        """Return a run-time scalar computed by ONNX Runtime."""
        array = self.inputs.get(str(scalar.value.name))
        if array is None:
            graph = self.model.graph
            outputs, graph.outputs[:] = list(graph.outputs), [scalar.value]
            (array,) = outputs_of(self.model, self.inputs)
            graph.outputs[:] = outputs
        return int(array[scalar.index])


def outputs_of(model: ir.Model, inputs: dict[str, Array]) -> list[Array]:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), options, providers=["CPUExecutionProvider"])
    wanted = {value.name for value in session.get_inputs()}
    results: list[Array] = session.run(None, {name: array for name, array in inputs.items() if name in wanted})
    return results


@dataclass
class MaskWriter(Graph):
    """Writes a mask of `(n_q, n_k)`, with more dims in the end.

    Attributes:
        size: sizes of queries and of keys.
        lengths: the sizes as scalars of the graph.
        data: shared inputs, by name.
        leaf: the only method that writes conditions, or empty for all.
    """

    size: tuple[Size, Size] = (ONE, ONE)
    lengths: dict[int, ir.Value] = field(default_factory=dict)
    data: dict[str, ir.Value] = field(default_factory=dict)
    leaf: str = ""

    def pick_number(self, least: int, most: int) -> int:
        return self.choices.pick(range(least, most + 1))

    def number(self, n: int) -> ir.Value:
        return self.constant(np.int64(n), INT64)

    def length(self, along: int) -> ir.Value:
        if along not in self.lengths:
            size = self.size[along]
            if size.is_static:
                self.lengths[along] = self.number(size.factor)
            elif size.symbols == ("n + p",):
                both = self.binary("Add", self._size(Size(1, ("n",))), self._size(Size(1, ("p",))))
                self.lengths[along] = self.squeeze(both, [0])
            else:
                self.lengths[along] = self.squeeze(self._size(size), [0])
        return self.lengths[along]

    def along(self, x: ir.Value, dim: int) -> ir.Value:
        """Return a vector as a row or a column."""
        if self.choices.chance(20) and dim == QUERIES:
            return self.transpose(self.unsqueeze(x, [0]), [1, 0])
        return self.unsqueeze(x, [1 - dim])

    # --- integers

    def position(self, dim: int) -> ir.Value:
        size, pick = self.size[dim], self.choices.pick
        kind = pick(("range", "range", "cumsum", "constant", "backwards", "sum"))
        if kind == "sum":
            x = self.sum(dim)
        elif kind == "constant" and size.is_static:
            x = self.constant(np.arange(size.factor) // pick((1, 1, 2, 3)), INT64)
        elif kind == "cumsum":
            ones = self.op("Expand", [self.constant([1], INT64), self.unsqueeze(self.length(dim), [0])], [size], INT64)
            x = self.binary("Sub", self.op("CumSum", [ones, self.number(0)], [size], INT64), self.number(1))
        else:
            x = self.op("Range", [self.number(0), self.length(dim), self.number(1)], [size], INT64)
            if kind == "backwards":
                ends = [self.ints(n) for n in (-1, np.iinfo(np.int64).min, 0, -1)]
                x = self.op("Slice", [x, *ends], [size], INT64)
        x = self.along(x, dim)
        shift = pick(("none", "none", "number", "lengths", "scalar"))
        if shift == "number":
            x = self.binary("Add", x, self.number(self.pick_number(-4, 4)))
        elif shift == "lengths" and dim == QUERIES:
            x = self.binary("Add", x, self.binary("Sub", self.length(KEYS), self.length(QUERIES)))
        elif shift == "scalar":
            x = self.binary("Add", x, self.shared("offset", [], INT64))
        return x

    def sum(self, dim: int) -> ir.Value:
        """Write the running sum of conditions, numbers or data over a dim, or over a longer one that is then sliced."""
        size, pick, more = self.size[dim], self.choices.pick, self.pick_number(0, 4)
        longer = Size.of(size.factor + more if size.is_static else ir.SymbolicDim(f"{size.dim()} + {more}"))
        length = self.binary("Add", self.length(dim), self.number(more))
        at = self.op("Range", [self.number(0), length, self.number(1)], [longer], INT64)
        kind = pick(("from", "from", "until", "every", "ones", "positions", "data"))
        if kind in ("from", "until"):
            x = self.binary("GreaterOrEqual" if kind == "from" else "Less", at, self.number(self.pick_number(1, 4)))
        elif kind == "every":
            x = self.binary("Equal", self.binary("Mod", at, self.number(2)), self.number(self.pick_number(0, 1)))
        elif kind == "ones":
            x = self.binary("GreaterOrEqual", at, self.number(0))
        elif kind == "data" and not more:
            x = self.shared(f"padding{dim}", [size], BOOL)
        else:
            x = at
        x = self.cast(x, INT64) if x.dtype == BOOL else x
        x = self.binary("Mul", x, self.number(pick((1, 1, 1, -1, 2))))
        ends = {"exclusive": self.pick_number(0, 1), "reverse": int(self.choices.chance(20))}
        x = self.op("CumSum", [x, self.number(pick((0, -1)))], [longer], INT64, **ends)
        start, end = (more, np.iinfo(np.int64).max) if self.choices.chance(70) or not size.is_static else (0, -more)
        return self.op("Slice", [x, self.ints(start), self.ints(end), self.ints(0)], [size], INT64) if more else x

    def shared(self, name: str, dims: list[Size], dtype: ir.DataType) -> ir.Value:
        if name not in self.data:
            self.data[name] = self.input(name, dims, dtype)
        return self.data[name]

    def whole(self, dim: int, depth: int = 2) -> ir.Value:
        x = self.position(dim)
        for _ in range(self.pick_number(0, depth)):
            kind = self.choices.pick(("Div", "Add", "Mul", "Mod", "Max", "Min", "Neg", "floored", "floats", "Clip"))
            if kind == "Neg":
                x = self.unary("Neg", x)
            elif kind in ("Div", "Mod"):
                x = self.binary(kind, x, self.number(self.pick_number(1, 5)))
            elif kind == "floored":
                x = self.floored(x, self.pick_number(2, 5))
            elif kind == "Clip":
                least = self.pick_number(-2, 4)
                ends = [self.number(least), self.number(least + self.pick_number(0, 6))]
                x = self.op("Clip", [x, *ends], _dims(x), INT64)
            elif kind == "floats":
                x = self.cast(self.cast(x, FLOAT), INT64)
            else:
                x = self.binary(kind, x, self.number(self.pick_number(-3, 6)))
        return x

    def floored(self, x: ir.Value, divisor: int) -> ir.Value:
        """Write `x // divisor` as torch's exporter does."""
        by = self.number(divisor)
        signs = self.binary("Equal", self.binary("Less", x, self.number(0)), self.constant(True, BOOL))
        rest = self.cast(self.binary("Mod", x, by), BOOL)
        return self.binary("Sub", self.binary("Div", x, by), self.cast(self.binary("And", signs, rest), INT64))

    # --- conditions

    def condition(self, depth: int) -> ir.Value:
        pick = self.choices.pick
        if depth > 0 and self.choices.chance(60):
            kind = pick(("And", "And", "Or", "Or", "Not", "Xor", "cast", "Where"))
            if kind == "Not":
                return self.unary("Not", self.condition(depth - 1))
            if kind == "cast":
                return self.cast(self.cast(self.condition(depth - 1), pick((FLOAT, INT64))), BOOL)
            if kind == "Where":
                choice = [self.cast(self.condition(depth - 1), FLOAT) for _ in range(2)]
                return self.cast(self.where(self.condition(depth - 1), *choice), BOOL)
            return self.binary(kind, self.condition(depth - 1), self.condition(depth - 1))
        leaves = (self._compared, self._compared, self._compared, *self._leaves)
        leaf = pick([leaf for leaf in leaves if self.leaf in ("", leaf.__name__)])
        return leaf()

    @property
    def _leaves(self) -> tuple[Callable[[], ir.Value], ...]:
        return (
            self._triangle, self._flags, self._data, self._rolled, self._buffer, self._summed, self._bounded,
            self._numbered, self._gathered,
        )  # fmt: skip

    def _compared(self) -> ir.Value:
        kind = self.choices.pick(("both", "both", "difference", "distance", "one"))
        if kind == "one":
            dim = self.choices.pick((QUERIES, KEYS))
            return self.binary(self.choices.pick(COMPARISONS), self.whole(dim), self.number(self.pick_number(-2, 9)))
        query, key = self.whole(QUERIES), self.whole(KEYS)
        if kind == "both":
            pair = (query, key) if self.choices.chance(50) else (key, query)
            return self.binary(self.choices.pick(COMPARISONS), *pair)
        difference = self.binary("Sub", query, key)
        if kind == "distance":
            difference = self.unary("Abs", difference)
        return self.binary(self.choices.pick(COMPARISONS), difference, self.number(self.pick_number(-3, 6)))

    def _summed(self) -> ir.Value:
        """Compare a running sum with a position, another sum or a number."""
        dim = self.choices.pick((QUERIES, KEYS))
        x, kind = self.along(self.sum(dim), dim), self.choices.pick(("position", "sum", "number"))
        if kind == "number":
            return self.binary(self.choices.pick(COMPARISONS), x, self.number(self.pick_number(-2, 6)))
        other = self.whole(1 - dim) if kind == "position" else self.along(self.sum(1 - dim), 1 - dim)
        return self.binary(self.choices.pick(COMPARISONS), x, other)

    def _numbered(self) -> ir.Value:
        """Compare integers of the data, such as segments of packed sequences: with one another, or with a position."""
        numbers = [self.shared(f"segments{dim}", [self.size[dim]], INT64) for dim in (QUERIES, KEYS)]
        query, key = (self.along(x, dim) for x, dim in zip(numbers, (QUERIES, KEYS), strict=True))
        kind = self.choices.pick(("both", "both", "position", "number"))
        if kind == "position":
            query = self.whole(QUERIES)
        elif kind == "number":
            query = self.number(self.pick_number(-2, 4))
        return self.binary(self.choices.pick(COMPARISONS), query, key)

    def _gathered(self) -> ir.Value:
        """Look up positions in a table of integers, flags or data."""
        dim, count = self.choices.pick((QUERIES, KEYS)), 8
        at = self.whole(dim, 1)
        at = self.op("Clip", [at, self.number(0), self.number(count - 1)], _dims(at), INT64)
        rng = np.random.default_rng(self.pick_number(0, 9))
        kind = self.choices.pick(("flags", "counted", "drawn", "data"))
        if kind == "flags":
            return self.op("Gather", [self.constant(rng.random(count) < 0.5, BOOL), at], _dims(at), BOOL)
        table = {
            "counted": lambda: self.constant(np.arange(count) // self.pick_number(1, 3), INT64),
            "drawn": lambda: self.constant(rng.integers(0, self.pick_number(2, 6), count), INT64),
            "data": lambda: self.shared("table", [Size(count)], INT64),
        }[kind]()
        x = self.op("Gather", [table, at], _dims(at), INT64)
        return self.binary(self.choices.pick(COMPARISONS), x, self.whole(1 - dim, 1))

    def _square(self, number: bool) -> ir.Value:
        shape = self.op("Concat", [self.unsqueeze(self.length(dim), [0]) for dim in (0, 1)], [Size(2)], INT64, axis=0)
        return self.op("Expand", [self.constant([[number]], BOOL), shape], list(self.size), BOOL)

    def _triangle(self) -> ir.Value:
        k = self.constant(np.int64(self.pick_number(-3, 3)), INT64)
        if self.choices.chance(20):
            k = self.binary("Sub", self.length(KEYS), self.length(QUERIES))
        return self.op("Trilu", [self._square(True), k], list(self.size), upper=self.pick_number(0, 1))

    def _flags(self) -> ir.Value:
        """Write a constant mask."""
        if not (self.size[0].is_static and self.size[1].is_static):
            return self._triangle()
        n_q, n_k = (size.factor for size in self.size)
        return self.constant(self._array(n_q, n_k), BOOL)

    def _array(self, n_q: int, n_k: int) -> Array:
        i, j = np.ogrid[:n_q, :n_k]
        least, width, size = self.pick_number(-3, 3), self.pick_number(0, 6), self.pick_number(1, 5)
        flags: Array = self.choices.pick(
            (
                (i - j >= least) & (i - j <= least + width),
                i - j >= least,
                i // size == j // size,
                (i + least) // size >= (j + least) // size,
                (i // size == j // size) & (i >= j),
                (abs(i - j) <= width) | (i < size) | (j == least),
                (i >= j) | (j < width),
                np.random.default_rng(size).random((n_q, n_k)) < 0.2 * size,
                (j < width) & (i >= 0),
            )
        )
        if self.choices.chance(20) and flags.size:
            flags = flags.copy()
            flags[width % n_q, size % n_k] ^= True
        return flags

    def _data(self) -> ir.Value:
        """Write a run-time input: padding of keys or queries, or a mask of all pairs."""
        kind = self.choices.pick(("keys", "keys", "queries", "pairs", "gathered"))
        if kind == "pairs":
            return self.shared("pairs", list(self.size), BOOL)
        dim = QUERIES if kind == "queries" else KEYS
        name = self.choices.pick(("padding", "padding", "another"))
        flags = self.shared(f"{name}{dim}", [self.size[dim]], BOOL)
        flags = self.unary("Not", flags) if self.choices.chance(30) else flags
        if kind != "gathered":
            return self.along(flags, dim)
        positions = self.op("Range", [self.number(0), self.length(KEYS), self.number(1)], [self.size[KEYS]], INT64)
        if self.choices.chance(50):
            return self.op("Gather", [flags, self.unsqueeze(positions, [0])], [ONE, self.size[KEYS]], BOOL)
        return self.op("GatherND", [flags, self.unsqueeze(positions, [0, 2])], [ONE, self.size[KEYS]], BOOL)

    def _bounded(self) -> ir.Value:
        """Compare data within bounds, some of it NaN, for which every comparison is false."""
        numbers = self.shared("numbers", [self.size[KEYS]], FLOAT)
        number, other = (self.constant(self.pick_number(-2, 2) / 2) for _ in range(2))
        x = self.binary(self.choices.pick(("Max", "Min")), numbers, number)
        x = self.binary("Mul", x, self.constant(0.5)) if self.choices.chance(30) else x
        return self.binary(self.choices.pick(COMPARISONS), self.along(x, KEYS), other)

    def _rolled(self) -> ir.Value:
        x, axis = self._compared(), self.choices.pick((QUERIES, KEYS))
        x = self.binary("And", x, self._square(True))
        size, by = self.size[axis], self.pick_number(1, 2)
        rest = size.factor - by if size.is_static else None
        if rest is None or rest < 1:
            return x
        dims = list(self.size)
        return self.concat([self.slice(x, axis, by, size.factor), self.slice(x, axis, 0, by)], axis, dims[axis])

    def _buffer(self) -> ir.Value:
        """Slice a larger constant, as GPT-2 does with its causal mask."""
        flags = self.constant(self._array(40, 44), BOOL)
        starts, ends = [self.ints(0), self.ints(0)], []
        for dim in (QUERIES, KEYS):
            length = self.unsqueeze(self.length(dim), [0])
            if self.choices.chance(30):
                starts[dim] = self.ints(self.pick_number(0, 3))
            elif self.choices.chance(30) and dim == QUERIES and self.size[KEYS].symbols == ("n + p",):
                starts[dim] = self._size(Size(1, ("p",)))
            ends.append(self.binary("Add", starts[dim], length))
        start, end = (self.op("Concat", parts, [Size(2)], INT64, axis=0) for parts in (starts, ends))
        return self.op("Slice", [flags, start, end, self.ints(0, 1)], list(self.size), BOOL)

    # --- masks

    def added(self, depth: int) -> ir.Value:
        """Write numbers to add to scores."""
        pick = self.choices.pick
        kind = pick(("where", "where", "times", "one minus", "triangle", "sum", "sum", "bias", "slope", "constant"))
        if kind == "sum" and depth:
            return self.binary("Add", self.added(depth - 1), self.added(depth - 1))
        if kind == "bias":
            return self.shared("bias", list(self.size), FLOAT)
        if kind == "slope":
            return self._slope()
        if kind == "constant" and self.size[0].is_static and self.size[1].is_static:
            array = self._array(self.size[0].factor, self.size[1].factor)
            shown = np.random.default_rng(1).standard_normal(array.shape) * self.pick_number(0, 1)
            return self.constant(np.where(array, shown, pick(FILLS)))
        fill = pick(FILLS)
        if kind == "triangle":
            numbers = self.where(self._square(True), self.constant(fill), self.constant(0.0))
            return self.op("Trilu", [numbers, self.number(self.pick_number(-2, 2))], list(self.size), upper=1)
        flags = self.condition(depth)
        if kind == "times" and np.isfinite(fill):
            return self.binary("Mul", self.cast(self.unary("Not", flags), FLOAT), self.constant(fill))
        if kind == "one minus" and np.isfinite(fill):
            ones = self.binary("Sub", self.constant(1.0), self.cast(flags, FLOAT))
            return self.binary("Mul", ones, self.constant(fill))
        return self.where(flags, self.constant(0.0), self.constant(fill))

    def _slope(self) -> ir.Value:
        """Write a bias by position or by distance, as ALiBi; some slopes are steep enough to hide a key."""
        x = self.whole(KEYS, 1)
        if self.choices.chance(70):
            x = self.binary("Sub", x, self.whole(QUERIES, 1))
        slope = self.choices.pick((0.5, -0.25, -2500.0, 2500.0, 1e30))
        slopes = slope * np.arange(1, 3).reshape(2, 1, 1) if self.choices.chance(50) else slope
        return self.binary("Mul", self.cast(x, FLOAT), self.constant(slopes))


LEAVES = (
    "_compared",
    "_triangle",
    "_flags",
    "_data",
    "_rolled",
    "_buffer",
    "_summed",
    "_bounded",
    "_numbered",
    "_gathered",
)
"""Names of the methods of :class:`MaskWriter` that write conditions."""


def random_mask(choices: Choices, leaf: str = "") -> RandomMask:
    """Draw a mask.

    Args:
        leaf: the only one of :data:`LEAVES` to use, or empty for all.
    """
    n, p = choices.pick((5, 1, 2, 8, 12)), choices.pick((3, 1, 7))
    kind = choices.pick(("static", "one", "two", "cache"))
    sizes = {"n": n, "p": p, "m": choices.pick((7, 1, n))}
    dims = {
        "static": (Size(n), Size(choices.pick((n, n, sizes["m"])))),
        "one": (Size(1, ("n",)), Size(1, ("n",))),
        "two": (Size(1, ("n",)), Size(1, ("m",))),
        "cache": (Size(1, ("n",)), Size(1, ("n + p",))),
    }[kind]
    n_q, n_k = n, {"static": dims[1].factor, "one": n, "two": sizes["m"], "cache": n + p}[kind]
    g = MaskWriter(choices, size=dims, leaf=leaf)
    heads = Size(2)
    query = g.input("query", [heads, heads, dims[0], heads])
    key = g.input("key", [heads, heads, dims[1], heads])
    if kind == "cache":
        g.input("past", [Size(1, ("p",))])
    mask = g.added(2) if choices.chance(50) else g.condition(3)
    mask = g.op("Identity", [mask], [*_dims(mask)])
    if choices.chance(70):
        mask = g.unsqueeze(mask, [*range(4 - len(_dims(mask)))])
    node = ir.node("Attention", [query, key, key, mask], {"scale": 1.0, "is_causal": int(choices.chance(10))})
    arrays = {str(value.name): _array_of(value, {**sizes, "n + p": n + p}) for value in g.inputs}
    model = g.model(mask)
    return RandomMask(model, node, mask, arrays, sizes, n_q, n_k)


def drawn_mask(choices: Choices, leaf: str = "") -> RandomMask:
    """Draw a random mask that is a valid graph."""
    while True:
        try:
            return random_mask(choices, leaf)
        except Invalid:
            continue


def _dims(value: ir.Value) -> list[Size]:
    assert value.shape is not None
    return [Size.of(dim) for dim in value.shape]


def _array_of(value: ir.Value, sizes: dict[str, int]) -> Array:
    rng = np.random.default_rng(7)
    shape = [size.factor if size.is_static else sizes[size.symbols[0]] for size in _dims(value)]
    if value.dtype == BOOL:
        return rng.random(shape) < 0.7
    if value.dtype == INT64:
        return rng.integers(-3, 4, shape)
    numbers = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.random(shape) < 0.3, np.nan, numbers) if str(value.name).startswith("numbers") else numbers
