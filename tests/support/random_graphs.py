"""Random attention graphs, as people and exporters write them, built directly in ONNX in milliseconds.

:func:`attention` writes a graph of attention. With a `flaw` (:data:`FLAWS`), it writes a near miss; with
`mutations`, a graph in which some operator was dropped, inserted, moved to another axis or given another input, which
may compute anything.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol, TypeVar

import numpy as np
import onnx_ir as ir
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from attnforge.arrays import Array
from attnforge.export.graphs.sizes import ONE, Size, sizes_of

T = TypeVar("T")
Names = tuple[str, ...]
"""The axes of one dim, outermost first: `("h", "d")` are heads and features in one dim."""

BOOL, FLOAT, INT64 = ir.DataType.BOOL, ir.DataType.FLOAT, ir.DataType.INT64

FLAWS = (
    "weights are an output",
    "weights are used twice",
    "scores are an output",
    "scores are used twice",
    "softmax over the queries",
    "softmax over the heads",
    "softmax over the features",
    "softmax over heads and keys together",
    "mask after the softmax",
    "scale that differs by key",
    "scale that differs by key after the softmax",
    "sigmoid for a softmax",
    "relu on the scores",
    "relu on the weights",
    "dropout in training",
    "choice between two tensors of scores",
    "values summed over another axis",
    "shift of the weights",
    "sum over another axis",
    "sum of other exponentials",
    "sum with a small number added",
)


class Invalid(Exception):
    """The result would not be a valid graph."""


class Choices(Protocol):
    """Source of random choices."""

    def pick(self, options: Sequence[T]) -> T: ...

    def chance(self, percent: int) -> bool: ...


class Drawn:
    """Choices drawn by hypothesis, which shrinks towards the first option and towards False."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data

    def pick(self, options: Sequence[T]) -> T:
        return options[self._data.draw(st.integers(0, len(options) - 1))]

    def chance(self, percent: int) -> bool:
        return self._data.draw(st.integers(0, 99)) >= 100 - percent


@dataclass
class Mutation:
    """A mutation of the `at`-th operator that is written."""

    at: int
    kind: str


MUTATIONS = ("drop", "insert", "axis", "input", "use", "constant")


@dataclass
class Graph:
    """A graph under construction, in which every value has a dtype and shape.

    Attributes:
        choices: source of random choices.
        dtype: dtype of activations and weights.
        mutations: the mutations to apply.
        sizes: sizes of the dims' symbols.
    """

    choices: Choices
    dtype: ir.DataType = FLOAT
    mutations: list[Mutation] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    inputs: list[ir.Value] = field(default_factory=list)
    nodes: list[ir.Node] = field(default_factory=list)
    initializers: list[ir.Value] = field(default_factory=list)
    extra_outputs: list[ir.Value] = field(default_factory=list)
    seed: int = 0

    # --- values

    def input(self, name: str, dims: Sequence[Size], dtype: ir.DataType | None = None) -> ir.Value:
        value = ir.Value(name=f"{name}_{len(self.inputs)}")
        self.inputs.append(value)
        return _typed(value, dtype or self.dtype, dims)

    def constant(self, data: ArrayLike, dtype: ir.DataType | None = None) -> ir.Value:
        dtype = dtype or self.dtype
        if dtype.is_floating_point() and np.isfinite(data).all() and self._mutated("constant"):
            data = np.asarray(data) * self.choices.pick((-1.0, 2.0)) + self.choices.pick((0.0, 0.3))
        tensor = ir.tensor(np.asarray(data, dtype=dtype.numpy()), dtype=dtype)
        if self.choices.chance(50):
            value = ir.Value(name=f"constant_{len(self.initializers)}", const_value=tensor)
            self.initializers.append(value)
        else:
            node = ir.node("Constant", [], {"value": ir.AttrTensor("value", tensor)}, name=f"n{len(self.nodes)}")
            self.nodes.append(node)
            value = node.outputs[0]
            value.name = f"v{len(self.nodes)}"
        return _typed(value, dtype, [Size(n) for n in np.shape(data)])

    def weight(self, dims: Sequence[Size], scale: float = 1.0) -> ir.Value:
        self.seed += 1
        if not all(size.is_static for size in dims):
            raise Invalid("a weight of dynamic size")
        rng = np.random.default_rng(self.seed)
        return self.constant(scale * rng.standard_normal([size.factor for size in dims]))

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64), INT64)

    def concrete(self, size: Size) -> int:
        return size.factor * prod(self.sizes[symbol] for symbol in size.symbols)

    # --- operators

    def op(
        self, op_type: str, inputs: Sequence[ir.Value | None], dims: Sequence[Size],
        dtype: ir.DataType | None = None, outputs: int = 1, **attributes: Any,
    ) -> ir.Value:  # fmt: skip
        """Add a node and return its first output."""
        first = next(v for v in inputs if v is not None)
        dtype = dtype or first.dtype
        assert dtype is not None
        if dtype == INT64:  # shapes are not mutated
            return self._node(op_type, inputs, dims, dtype, outputs, attributes)
        same = [v for v in inputs if v is not None and v.dtype == dtype and sizes_of(v) == list(dims)]
        if same and self._mutated("drop"):
            return self.choices.pick(same)
        inputs = self._exchanged(list(inputs))
        if op_type in ("Transpose", "Softmax", "Einsum") and self._mutated("axis"):
            attributes = self._turned(op_type, attributes, list(dims))
        result = self._node(op_type, inputs, dims, dtype, outputs, attributes)
        if self._mutated("use"):
            self.extra_outputs.append(result)
        return self._insert(result) if self._mutated("insert") else result

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value | None], dims: Sequence[Size], dtype: ir.DataType, outputs: int,
        attributes: Mapping[str, Any],
    ) -> ir.Value:  # fmt: skip
        node = ir.node(op_type, inputs, attributes, num_outputs=outputs, name=f"n{len(self.nodes)}")
        self.nodes.append(node)
        for i, output in enumerate(node.outputs):
            output.name = f"v{len(self.nodes)}_{i}"
            _typed(output, dtype, dims)
        return node.outputs[0]

    def _mutated(self, kind: str) -> bool:
        here = [m for m in self.mutations if m.kind == kind and m.at <= len(self.nodes)]
        for mutation in here:
            self.mutations.remove(mutation)
        return bool(here)

    def _exchanged(self, inputs: list[ir.Value | None]) -> list[ir.Value | None]:
        """Return `inputs`, perhaps with one replaced by another value of the same type and shape."""
        known = [*self.inputs, *self.initializers, *(v for node in self.nodes for v in node.outputs)]
        exchanges = [
            (i, candidate)
            for i, v in enumerate(inputs)
            if v is not None and v.dtype != INT64 and any(m.kind == "input" for m in self.mutations)
            for candidate in known
            if candidate is not v and candidate.dtype == v.dtype and sizes_of(candidate) == sizes_of(v)
        ]
        if exchanges and self._mutated("input"):
            i, inputs[i] = self.choices.pick(exchanges)
        return inputs

    def _turned(self, op_type: str, attributes: dict[str, Any], dims: list[Size]) -> dict[str, Any]:
        """Return the attributes of an operator along other axes with the same output shape."""
        pairs = [(i, j) for i in range(len(dims)) for j in range(i) if dims[i] == dims[j]]
        if op_type == "Softmax":
            return {**attributes, "axis": self.choices.pick(range(len(dims)))}
        if not pairs:
            return attributes
        i, j = self.choices.pick(pairs)
        if op_type == "Transpose":
            perm = list(attributes["perm"])
            perm[i], perm[j] = perm[j], perm[i]
            return {**attributes, "perm": perm}
        terms, _, output = attributes["equation"].partition("->")
        letters = list(output)
        letters[i], letters[j] = letters[j], letters[i]
        return {**attributes, "equation": f"{terms}->{''.join(letters)}"}

    def _insert(self, x: ir.Value) -> ir.Value:
        """Apply some operator to `x` that keeps its type and shape."""
        if x.dtype is None or not x.dtype.is_floating_point():
            return self.unary("Not", x) if x.dtype == BOOL else x
        dims = sizes_of(x)
        pairs = [(i, j) for i in range(len(dims)) for j in range(i) if dims[i] == dims[j] != ONE]
        kind = self.choices.pick(
            (
                "Relu",
                "Neg",
                "Tanh",
                "Abs",
                "Sigmoid",
                "Mul",
                "Add",
                "Div",
                "factor",
                "shift",
                "Where",
                "Softmax",
                "swap",
                "mix",
                "roll",
            )
        )
        if kind in ("Relu", "Neg", "Tanh", "Abs", "Sigmoid"):
            return self.unary(kind, x)
        if kind in ("factor", "shift"):
            number = self.constant(self.choices.pick((0.5, -2.0, 3.0)))
            number = number if number.dtype == x.dtype else self.cast(number, x.dtype)
            return self.binary("Mul" if kind == "factor" else "Add", x, number)
        if kind == "Softmax" and dims:
            return self.softmax(x, self.choices.pick(range(len(dims))))
        if kind == "swap":
            if not pairs:
                return x
            i, j = self.choices.pick(pairs)
            perm = list(range(len(dims)))
            perm[i], perm[j] = j, i
            return self.transpose(x, perm)
        if kind == "mix" and len(dims) > 1:  # mixes axes that look separate
            i = self.choices.pick(range(len(dims) - 1))
            perm = list(range(len(dims)))
            perm[i], perm[i + 1] = i + 1, i
            return self.transpose(self.reshape(x, [dims[k] for k in perm]), perm)
        if kind == "roll":
            axes = [i for i, size in enumerate(dims) if size.is_static and size != ONE]
            if not axes:
                return x
            axis = self.choices.pick(axes)
            n = dims[axis].factor
            return self.concat([self.slice(x, axis, 1, n), self.slice(x, axis, 0, 1)], axis, dims[axis])
        some = [size if self.choices.chance(50) else ONE for size in dims]
        if kind == "Where":
            return self.where(self.input("keep", some, BOOL), x, self.constant(self.choices.pick((0.0, -1e4)), x.dtype))
        if kind in ("Mul", "Add", "Div"):
            return self.binary(kind, x, self.input("factor", some, x.dtype))
        return x

    def unary(self, op_type: str, x: ir.Value) -> ir.Value:
        return self.op(op_type, [x], sizes_of(x))

    def cast(self, x: ir.Value, dtype: ir.DataType) -> ir.Value:
        return self.op("Cast", [x], sizes_of(x), dtype, to=dtype.value)

    def binary(self, op_type: str, a: ir.Value, b: ir.Value) -> ir.Value:
        if a.dtype != b.dtype:
            raise Invalid("operands of different types")
        compares = op_type in ("LessOrEqual", "GreaterOrEqual", "Less", "Greater", "Equal")
        return self.op(op_type, [a, b], broadcast(sizes_of(a), sizes_of(b)), BOOL if compares else None)

    def where(self, condition: ir.Value, a: ir.Value, b: ir.Value) -> ir.Value:
        if a.dtype != b.dtype:
            raise Invalid("operands of different types")
        dims = broadcast(broadcast(sizes_of(condition), sizes_of(a)), sizes_of(b))
        return self.op("Where", [condition, a, b], dims, a.dtype)

    def transpose(self, x: ir.Value, perm: Sequence[int]) -> ir.Value:
        dims = sizes_of(x)
        return self.op("Transpose", [x], [dims[i] for i in perm], perm=list(perm))

    def unsqueeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        dims = sizes_of(x)
        for axis in sorted(axes):
            dims.insert(axis, ONE)
        return self.op("Unsqueeze", [x, self.ints(*axes)], dims)

    def squeeze(self, x: ir.Value, axes: Sequence[int]) -> ir.Value:
        dims = sizes_of(x)
        if any(dims[axis] != ONE for axis in axes):
            raise Invalid("a squeeze of a dim that is not 1")
        return self.op("Squeeze", [x, self.ints(*axes)], [d for i, d in enumerate(dims) if i not in axes])

    def reshape(self, x: ir.Value, dims: Sequence[Size]) -> ir.Value:
        have = sizes_of(x)
        if _product(have) != _product(dims):
            raise Invalid("a reshape to another number of elements")
        dynamic = [i for i, size in enumerate(dims) if not size.is_static]
        entries = [0 if i < len(have) and have[i] == d and i in dynamic else d.factor for i, d in enumerate(dims)]
        left = [i for i in dynamic if entries[i] != 0]
        if len(left) == 1:
            entries[left[0]] = -1
        if len(left) <= 1:
            return self.op("Reshape", [x, self.ints(*entries)], dims)
        return self.op("Reshape", [x, self.shape(dims)], dims)

    def shape(self, dims: Sequence[Size]) -> ir.Value:
        """Return `dims` as a shape tensor, with dynamic ones taken from the inputs."""
        parts = [self.ints(size.factor) if size.is_static else self._size(size) for size in dims]
        return self.op("Concat", parts, [Size(len(parts))], INT64, axis=0)

    def _size(self, size: Size) -> ir.Value:
        result = None
        for symbol in size.symbols:
            held = [(v, i) for v in self.inputs for i, d in enumerate(sizes_of(v)) if d == Size(1, (symbol,))]
            if not held:
                raise Invalid(f"no input has {symbol}")
            one = self.op("Shape", [held[0][0]], [ONE], INT64, start=held[0][1], end=held[0][1] + 1)
            result = one if result is None else self.binary("Mul", result, one)
        assert result is not None
        return result if size.factor == 1 else self.binary("Mul", result, self.ints(size.factor))

    def expand(self, x: ir.Value, dims: Sequence[Size]) -> ir.Value:
        broadcast(sizes_of(x), dims)
        return self.op("Expand", [x, self.shape(dims)], dims)

    def matmul(self, a: ir.Value, b: ir.Value) -> ir.Value:
        left, right = sizes_of(a), sizes_of(b)
        if min(len(left), len(right)) < 2 or left[-1] != right[-2] or a.dtype != b.dtype:
            raise Invalid("a product of incompatible tensors")
        if len(left) == len(right) == 2 and self.choices.chance(40):
            return self.op("Gemm", [a, b], [left[0], right[1]])
        return self.op("MatMul", [a, b], [*broadcast(left[:-2], right[:-2]), left[-2], right[-1]])

    def einsum(self, a: ir.Value, b: ir.Value, left: str, right: str, output: str) -> ir.Value:
        sizes: dict[str, Size] = {}
        for label, size in zip(left + right, sizes_of(a) + sizes_of(b), strict=True):
            if sizes.setdefault(label, size) != size:
                raise Invalid("an einsum of incompatible tensors")
        return self.op("Einsum", [a, b], [sizes[la] for la in output], equation=f"{left},{right}->{output}")

    def softmax(self, x: ir.Value, axis: int) -> ir.Value:
        rank = len(sizes_of(x))
        return self.op("Softmax", [x], sizes_of(x), axis=axis - rank if self.choices.chance(50) else axis)

    def reduce(self, op_type: str, x: ir.Value, axis: int) -> ir.Value:
        dims = sizes_of(x)
        if self._mutated("axis"):
            axis = self.choices.pick(range(len(dims)))
        dims[axis] = ONE
        return self.op(op_type, [x, self.ints(axis)], dims, keepdims=1)

    def slice(self, x: ir.Value, axis: int, start: int, end: int) -> ir.Value:
        dims = sizes_of(x)
        dims[axis] = Size(end - start)
        return self.op("Slice", [x, self.ints(start), self.ints(end), self.ints(axis)], dims)

    def concat(self, parts: Sequence[ir.Value], axis: int, size: Size) -> ir.Value:
        dims = sizes_of(parts[0])
        dims[axis] = size
        return self.op("Concat", parts, dims, axis=axis)

    # --- the whole

    def model(self, *outputs: ir.Value) -> ir.Model:
        results = list(dict.fromkeys([*outputs, *self.extra_outputs]))
        if any(v in self.inputs or v in self.initializers for v in results):
            raise Invalid("an output that depends on no input")
        graph = ir.Graph(
            self.inputs, results, nodes=self.nodes, initializers=self.initializers, opset_imports={"": 23}, name="graph"
        )
        return ir.Model(graph, ir_version=10)


def _typed(value: ir.Value, dtype: ir.DataType, dims: Sequence[Size]) -> ir.Value:
    value.type, value.shape = ir.TensorType(dtype), ir.Shape([size.dim() for size in dims])
    return value


def _product(dims: Sequence[Size]) -> Size:
    size = ONE
    for dim in dims:
        size = size * dim
    return size


def broadcast(a: Sequence[Size], b: Sequence[Size]) -> list[Size]:
    """Return the sizes to which two shapes broadcast."""
    rank = max(len(a), len(b))
    dims = []
    for x, y in zip([ONE] * (rank - len(a)) + list(a), [ONE] * (rank - len(b)) + list(b), strict=True):
        if x != y and ONE not in (x, y):
            raise Invalid("shapes that do not broadcast")
        dims.append(y if x == ONE else x)
    return dims


# --- tensors with named axes ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Named:
    """A value with the axes of its dims."""

    value: ir.Value
    dims: tuple[Names, ...]

    @property
    def axes(self) -> list[str]:
        return [axis for dim in self.dims for axis in dim]


@dataclass
class Writer(Graph):
    """A graph of tensors with named axes.

    Attributes:
        of: size of every axis.
    """

    of: dict[str, Size] = field(default_factory=dict)

    def size(self, names: Names) -> Size:
        return _product([self.of[name] for name in names])

    def grouped(self, axes: Sequence[str], apart: str | None = None) -> tuple[Names, ...]:
        """Return `axes` as dims, with neighbours merged at random, except for the axis `apart`."""
        dims: list[Names] = []
        for axis in axes:
            if dims and apart not in (axis, *dims[-1]) and self.choices.chance(35):
                dims[-1] = (*dims[-1], axis)
            else:
                dims.append((axis,))
        return tuple(dims)

    def shuffled(self, axes: Sequence[str]) -> list[str]:
        left, result = list(axes), []
        while left:
            result.append(self.choices.pick(left))
            left.remove(result[-1])
        return result

    def arranged(self, x: Named, dims: Sequence[Names]) -> Named:
        """Rearrange `x` to these dims by a chain of views; a missing axis becomes a dim of 1."""
        x = self.noise(x)
        present = set(x.axes)
        wanted = tuple(tuple(a for a in dim if a in present) for dim in dims)
        if set(x.axes) != {a for dim in wanted for a in dim}:
            raise Invalid("an axis without a dim")
        if sorted(x.dims) == sorted(wanted) and x.dims != wanted:
            x = self._permuted(x, wanted)
        order = [a for dim in wanted for a in dim]
        if x.axes != order:
            x = self._reshaped(x, tuple((a,) for a in x.axes))
            x = self._permuted(x, tuple((a,) for a in order))
        return self.noise(self._reshaped(x, wanted))

    def noise(self, x: Named) -> Named:
        """Return the same tensor after views that cancel each other."""
        if not self.choices.chance(15):
            return x
        kind, rank = self.choices.pick(("Identity", "squeeze", "transpose", "flatten", "swap")), len(x.dims)
        if kind == "Identity":
            return Named(self.unary("Identity", x.value), x.dims)
        if kind == "squeeze":
            axis = self.choices.pick(range(rank + 1))
            return Named(self.squeeze(self.unsqueeze(x.value, [axis]), [axis]), x.dims)
        if kind == "flatten":
            return self._reshaped(self._reshaped(x, (tuple(x.axes),)), x.dims)
        if rank < 2:
            return x
        perm = self.shuffled([str(i) for i in range(rank)])
        order = [int(i) for i in perm]
        there = self.transpose(x.value, order)
        return Named(self.transpose(there, [order.index(i) for i in range(rank)]), x.dims)

    def _permuted(self, x: Named, dims: tuple[Names, ...]) -> Named:
        perm, left = [], list(range(len(x.dims)))
        for dim in dims:
            i = next(i for i in left if x.dims[i] == dim)
            left.remove(i)
            perm.append(i)
        return Named(self.transpose(x.value, perm), dims)

    def _reshaped(self, x: Named, dims: tuple[Names, ...]) -> Named:
        if x.dims == dims:
            return x
        sizes = [self.size(dim) for dim in dims]
        if self.choices.chance(60):
            if [d for d in dims if d] == list(x.dims):
                return Named(self.unsqueeze(x.value, [i for i, d in enumerate(dims) if not d]), dims)
            if [d for d in x.dims if d] == list(dims):
                return Named(self.squeeze(x.value, [i for i, d in enumerate(x.dims) if not d]), dims)
            if len(dims) == 2:
                have = sizes_of(x.value)
                for axis in range(len(have) + 1):
                    if _product(have[:axis]) == sizes[0] and _product(have[axis:]) == sizes[1]:
                        return Named(self.op("Flatten", [x.value], sizes, axis=axis), dims)
        return Named(self.reshape(x.value, sizes), dims)

    def repeated(self, x: Named, axis: str) -> Named:
        """Repeat `x` along a new first axis."""
        one = self.unsqueeze(x.value, [0])
        dims, n = [self.of[axis], *sizes_of(x.value)], self.of[axis]
        kind = self.choices.pick(("Expand", "Tile", "Concat", "Gather")) if n.is_static else "Expand"
        if kind == "Tile":
            value = self.op("Tile", [one, self.ints(n.factor, *[1] * (len(dims) - 1))], dims)
        elif kind == "Concat":
            value = self.concat([one] * n.factor, 0, n)
        elif kind == "Gather":
            value = self.op("Gather", [one, self.ints(*[0] * n.factor)], dims, axis=0)
        else:
            value = self.expand(one, dims)
        return Named(value, ((axis,), *x.dims))

    def fits(self, x: Named, scores: Sequence[Names]) -> Named:
        """Rearrange `x` so that it broadcasts against a tensor with dims `scores`."""
        for dim in scores:
            if dim and 0 < len(set(dim) & set(x.axes)) < len(dim):
                for axis in dim:
                    if axis not in x.axes:
                        x = self.repeated(x, axis)
        x = self.arranged(x, scores)
        leading = next((i for i, dim in enumerate(x.dims) if dim), len(x.dims))
        if leading and self.choices.chance(50):
            return Named(self._reshaped(x, x.dims[leading:]).value, x.dims[leading:])
        return x


# --- attention --------------------------------------------------------------------------------------------------------


@dataclass
class Program:
    """A graph, the sizes of its symbols, and inputs for it."""

    model: ir.Model
    sizes: dict[str, int]
    attends: bool = True  # to more than one key
    by_hand: bool = False  # the softmax is decomposed

    def __repr__(self) -> str:
        nodes = (
            f"{', '.join(f'{v.name}{v.shape}' for v in n.outputs)} = {n.op_type}"
            f"({', '.join(str(v and v.name) for v in n.inputs)}) "
            f"{ {k: a.value for k, a in n.attributes.items()} or '' }"
            for n in self.model.graph
        )
        inputs = ", ".join(f"{v.name}{v.shape}" for v in self.model.graph.inputs)
        outputs = ", ".join(str(v.name) for v in self.model.graph.outputs)
        return "\n".join((f"inputs {inputs}; outputs {outputs}; sizes {self.sizes}", *nodes))

    def arrays(self, seed: int, sizes: Mapping[str, int]) -> dict[str, Array]:
        """Return random inputs: `mask…` are 0 or a large negative number, `keep…` are boolean, others normal."""
        rng = np.random.default_rng(seed)
        return {v.name or "": _random(rng, v, sizes) for v in self.model.graph.inputs}


def _random(rng: np.random.Generator, value: ir.Value, sizes: Mapping[str, int]) -> Array:
    shape = [size.factor * prod(sizes[s] for s in size.symbols) for size in sizes_of(value)]
    name, dtype = value.name or "", value.dtype
    assert dtype is not None
    if dtype == BOOL or name.startswith("mask"):
        keep = np.asarray(rng.random(shape) < 0.7)
        keep.reshape(-1, shape[-1] if shape else 1)[0] = rng.random() < 0.5
        low = -np.inf if "inf" in name else -1e4
        return keep if dtype == BOOL else np.where(keep, 0.0, low).astype(dtype.numpy())
    return np.asarray(rng.standard_normal(shape)).astype(dtype.numpy())


def attention(
    choices: Choices, flaw: str | None = None, mutations: Sequence[Mutation] = (), dtype: ir.DataType = FLOAT
) -> Program:
    """Write an attention graph. Raises :class:`Invalid` if a mutation, or chance, gave an invalid graph."""
    return _Attention(choices, flaw, mutations, dtype).write()


class _Attention:
    def __init__(self, choices: Choices, flaw: str | None, mutations: Sequence[Mutation], dtype: ir.DataType) -> None:
        self.choices, self.flaw = choices, flaw
        self.by_hand = self.shifted = self.rescaled = False
        self.fills: list[tuple[Named, float]] = []  # conditions under which scores are kept, and the replacement
        self.steps = self.biases = 0  # number of masks and biases, and of biases
        self.g = Writer(choices, dtype, list(mutations))
        self._name_axes()

    def _name_axes(self) -> None:
        """Batch axes `b c`, heads `h` (`g` groups of `h`), queries `i`, keys `j`, features `d` and `e`."""
        pick, chance, g = self.choices.pick, self.choices.chance, self.g
        flawed = self.flaw is not None
        small = (2, 3) if flawed else (1, 2, 2, 3, 4)

        def size(symbol: str, percent: int) -> Size:
            if chance(percent):
                g.sizes[symbol] = pick((2, 3, 5))
                return Size(1, (symbol,))
            return Size(pick(small))

        self.batch = list(pick(("", "b", "b", "b", "bc")))
        self.heads = list(pick(("h", "h", "h", "gh", ""))) if not flawed else ["h"]
        g.of = {"b": size("batch", 40), "c": Size(pick(small)), "g": Size(pick(small)), "h": Size(pick(small))}
        g.of |= {"i": size("n", 40), "d": Size(pick(small))}
        self.own = chance(50)  # self-attention
        g.of["j"] = g.of["i"] if self.own else size("m", 40)
        g.of["e"] = g.of["d"] if chance(60) else Size(pick(small))
        if flawed:  # distinct sizes
            g.of |= {"i": Size(3), "j": Size(5), "d": Size(4), "e": Size(7), "h": Size(2)}
            self.own = False
        self.apart = [*self.batch, *self.heads]

    def write(self) -> Program:
        query, key, value = self.operands()
        self.query = query
        if self.flaw is None and self.choices.chance(10):
            return self.program(self.finished(self.operator(query, key, value)))
        query, key = self.scaled(query), self.scaled(key)
        scores = self.product(query, key, ["i"], ["j"], "d")
        scores = self.modified(scores)
        weights = self.weights(scores)
        output = self.product(weights, self.scaled(value), ["i"], ["e"], "j", flawed=True)
        return self.program(self.finished(output))

    def program(self, final: ir.Value) -> Program:
        attends = self.g.of["j"] != ONE
        return Program(self.g.model(final), dict(self.g.sizes), attends, self.by_hand)

    def operator(self, query: Named, key: Named, value: Named) -> Named:
        """Write ONNX's own operator, as newer exporters do."""
        g, chance = self.g, self.choices.chance
        outer = [tuple(self.batch), tuple(self.heads)]
        sides = ((query, ["i", "d"]), (key, ["j", "d"]), (value, ["j", "e"]))
        whole = []
        for x, axes in sides:
            for axis in [a for a in self.apart if a not in x.axes]:
                x = g.repeated(x, axis)
            whole.append(g.arranged(x, [*outer, *((a,) for a in axes)]))
        dims: tuple[Names, ...] = (*outer, ("i",), ("j",))
        inputs = [x.value for x in whole]
        if chance(50):
            keep = Named(g.input("keep", [g.of["i"], g.of["j"]], BOOL), (("i",), ("j",)))
            bias = Named(g.input("mask_inf", [g.of["j"]]), (("j",),))
            inputs.append(g.arranged(self.choices.pick((keep, bias)), dims).value)
        attributes: dict[str, Any] = {"is_causal": 1} if len(inputs) == 3 and chance(50) else {}
        if chance(50):
            attributes["scale"] = 0.3
        result: tuple[Names, ...] = (*outer, ("i",), ("e",))
        return Named(g.op("Attention", inputs, [g.size(dim) for dim in result], **attributes), result)

    # --- operands

    def operands(self) -> tuple[Named, Named, Named]:
        pick, chance, g = self.choices.pick, self.choices.chance, self.g
        shared = self.apart if self.flaw else [a for a in self.apart if not chance(12)]
        if "h" in shared and "g" in self.heads and chance(60):
            shared = [a for a in shared if a != "h"]
        if self.own and g.of["d"] == g.of["e"] and chance(40):
            return self.packed()
        if self.own and g.of["d"] == g.of["e"] and chance(15):  # no projections
            x = self.operand([*self.apart, "i", "d"], "i", "d")
            as_key = Named(x.value, tuple(tuple("j" if a == "i" else a for a in dim) for dim in x.dims))
            as_value = Named(x.value, tuple(tuple("e" if a == "d" else a for a in dim) for dim in as_key.dims))
            return x, as_key, as_value
        everyone = [a for a in self.batch if a in shared and chance(10)]  # learned queries, shared along these axes
        query = self.operand([*(a for a in self.apart if a not in everyone), "i", "d"], "i", "d")
        key, value = (self.operand([*shared, "j", f], "j", f) for f in "de")
        if chance(10) and shared != self.apart and not self.flaw:
            value = self.operand([*self.apart, "j", "e"], "j", "e")
        for axis in [a for a in reversed(self.apart) if a not in shared]:
            if chance(40):
                key = g.repeated(key, axis)
                if axis not in value.axes:
                    value = g.repeated(value, axis)
        assert pick((True,))
        return query, key, value

    def operand(self, axes: list[str], tokens: str, features: str) -> Named:
        """Write an operand: an input, projected or not, a learned tensor, or a cache followed by new tokens."""
        g, chance = self.g, self.choices.chance
        heads = [a for a in axes if a in self.heads]
        if chance(35):  # (batch, tokens, width) times a weight
            dims: list[Names] = [*((a,) for a in axes if a in self.batch), (tokens,)]
            width = Size(self.choices.pick((2, 3)))
            x = g.input("x", [*map(g.size, dims), width])
            packed = tuple(self.choices.pick(([*heads, features], [features, *heads])))
            weight = g.weight([width, g.size(packed)], 0.7)
            projected = g.op("MatMul", [x, weight], [*map(g.size, dims), g.size(packed)])
            if chance(40):
                projected = g.binary("Add", projected, g.weight([g.size(packed)], 0.3))
            return Named(projected, (*dims, packed))
        order = g.grouped(g.shuffled(axes))
        sizes = [g.size(dim) for dim in order]
        if chance(8) and all(size.is_static for size in sizes):
            return Named(g.weight(sizes), order)
        position = next(i for i, dim in enumerate(order) if tokens in dim)
        if order[position] == (tokens,) and sizes[position].is_static and sizes[position].factor > 1 and chance(15):
            first, second = list(sizes), list(sizes)
            first[position], second[position] = Size(sizes[position].factor - 1), ONE
            return Named(g.concat([g.input("past", first), g.input("x", second)], position, sizes[position]), order)
        return Named(g.input("x", sizes), order)

    def packed(self) -> tuple[Named, Named, Named]:
        """Write query, key and value from one projection."""
        g, pick = self.g, self.choices.pick
        g.of["three"] = Size(3)
        dims: tuple[Names, ...] = (*((a,) for a in self.batch), ("i",))
        inner = pick((["three", *self.heads, "d"], [*self.heads, "three", "d"], [*self.heads, "d", "three"]))
        width = Size(pick((2, 3)))
        x = g.input("x", [*map(g.size, dims), width])
        together = g.op(
            "MatMul", [x, g.weight([width, g.size(tuple(inner))], 0.7)], [*map(g.size, dims), g.size(tuple(inner))]
        )
        if inner[0] == "three" and self.choices.chance(50):
            whole = (*dims, tuple(inner[1:]))
            parts = self.split(together, len(dims), [g.size(whole[-1])] * 3)
            three = [Named(part, whole) for part in parts]
        else:
            named = g.arranged(Named(together, (*dims, tuple(inner))), [*dims, *((a,) for a in inner)])
            if self.choices.chance(50):
                named = g.arranged(named, [(a,) for a in g.shuffled(named.axes)])
            axis = named.dims.index(("three",))
            rest = (*named.dims[:axis], *named.dims[axis + 1 :])
            sizes = [g.size(dim) for dim in rest]
            if self.choices.chance(50):
                index = [g.constant(np.int64(i), INT64) for i in range(3)]
                three = [Named(g.op("Gather", [named.value, i], sizes, axis=axis), rest) for i in index]
            else:
                parts = self.split(named.value, axis, [ONE] * 3)
                three = [Named(g.squeeze(part, [axis]), rest) for part in parts]
        names: tuple[dict[str, str], ...] = ({}, {"i": "j"}, {"i": "j", "d": "e"})
        query, key, value = (
            Named(x.value, tuple(tuple(names[k].get(a, a) for a in dim) for dim in x.dims)) for k, x in enumerate(three)
        )
        return query, key, value

    def split(self, x: ir.Value, axis: int, sizes: list[Size]) -> list[ir.Value]:
        g = self.g
        n = sizes[0].factor
        if self.choices.chance(50):
            return [g.slice(x, axis, n * k, n * (k + 1)) for k in range(len(sizes))]
        dims = sizes_of(x)
        dims[axis] = sizes[0]
        first = g.op("Split", [x, g.ints(*(s.factor for s in sizes))], dims, outputs=len(sizes), axis=axis)
        node = first.producer()
        if node is None or node.op_type != "Split":
            raise Invalid("an operator was inserted between a Split and its outputs")
        return list(node.outputs)

    def scaled(self, x: Named) -> Named:
        return self.factor(x) if self.choices.chance(15) else x

    def factor(self, x: Named) -> Named:
        g, pick = self.g, self.choices.pick
        kind, dtype = pick(("Mul", "Mul", "Div", "left", "Neg")), x.value.dtype
        assert dtype is not None
        number = g.constant(pick((0.5, 0.25, 1.5, -0.5)), dtype)
        if kind == "left":
            return Named(g.binary("Mul", number, x.value), x.dims)
        if kind == "Neg":
            return Named(g.unary("Neg", x.value), x.dims)
        return Named(g.binary(kind, x.value, number), x.dims)

    # --- products

    def product(
        self, left: Named, right: Named, rows: list[str], columns: list[str], summed: str, flawed: bool = False
    ) -> Named:
        """Write the product of two tensors over `summed`."""
        g, chance = self.g, self.choices.chance
        if flawed and self.flaw == "values summed over another axis":
            return self.summed_elsewhere(left, right)
        if self.choices.chance(30):
            return self.einsum(left, right, [*self.apart, *rows, *columns], summed)
        batch = g.grouped(g.shuffled(self.apart))
        left, right = (self.whole(x, batch) for x in (left, right))
        (row,), (column,) = rows, columns
        if chance(6):
            first = g.arranged(left, [*batch, (row,), (), (summed,)])
            second = g.arranged(right, [*batch, (), (column,), (summed,)])
            terms = g.binary("Mul", first.value, second.value)
            dims = [*sizes_of(terms)[:-1]]
            total = g.op("ReduceSum", [terms, g.ints(len(dims))], dims, keepdims=0)
            return Named(total, (*batch, (row,), (column,)))
        if chance(25):
            first = g.arranged(left, [*batch, (summed,), (row,)])
            second = g.arranged(right, [*batch, (column,), (summed,)])
            return Named(g.matmul(second.value, first.value), (*batch, (column,), (row,)))
        first = g.arranged(left, [*batch, (row,), (summed,)])
        second = g.arranged(right, [*batch, (summed,), (column,)])
        return Named(g.matmul(first.value, second.value), (*batch, (row,), (column,)))

    def whole(self, x: Named, batch: Sequence[Names]) -> Named:
        """Return `x` with all of each dim's axes."""
        for dim in batch:
            if 0 < len(set(dim) & set(x.axes)) < len(dim):
                for axis in dim:
                    if axis not in x.axes:
                        x = self.g.repeated(x, axis)
        return x

    def einsum(self, left: Named, right: Named, axes: list[str], summed: str) -> Named:
        g = self.g
        left, right = (g.arranged(x, [(a,) for a in g.shuffled(x.axes)]) for x in (left, right))
        output = g.shuffled([a for a in axes if a in {*left.axes, *right.axes}])
        value = g.einsum(left.value, right.value, "".join(left.axes), "".join(right.axes), "".join(output))
        return Named(value, tuple((a,) for a in output))

    def summed_elsewhere(self, weights: Named, value: Named) -> Named:
        """Write a flaw: sum the weights over the queries."""
        g = self.g
        weights = g.arranged(weights, [*((a,) for a in self.apart), ("i",), ("j",)])
        value = g.arranged(value, [*((a,) for a in self.apart), ("j",), ("e",)])
        axes = "".join(self.apart)
        mixed = g.einsum(weights.value, value.value, f"{axes}ij", f"{axes}je", f"{axes}je")
        return Named(g.op("Identity", [mixed], sizes_of(mixed)), (*((a,) for a in self.apart), ("j",), ("e",)))

    # --- scores

    def modified(self, scores: Named) -> Named:
        """Apply scales, then a soft cap, then masks and biases, then a scale of both, as in common code."""
        g, chance, pick = self.g, self.choices.chance, self.choices.pick
        if chance(50):
            scores = self.factor(scores)
        varies = chance(15)
        if varies:
            scores = self.tensor_scaled(scores, [a for a in ("h", "i", "b") if a in scores.axes and chance(50)])
        scores = self.viewed(scores)
        if not varies and chance(12) and not self.flaw:
            cap = pick((1.0, 2.0, 5.0))
            number = g.constant(cap, scores.value.dtype)
            inner = g.binary("Div", scores.value, number)
            scores = Named(g.binary("Mul", g.unary("Tanh", inner), number), scores.dims)
        if self.flaw == "scale that differs by key":
            scores = self.tensor_scaled(scores, ["j"])
        if self.flaw == "relu on the scores":
            scores = Named(g.unary("Relu", scores.value), scores.dims)
        if chance(6) and not self.flaw:
            scores = self.multiplied(scores)
        for _ in range(pick((0, 0, 0, 1, 1, 2, 3))):
            scores = self.masked(self.viewed(scores))
        self.rescaled = chance(8)
        if self.rescaled:
            scores = Named(g.binary("Mul", scores.value, g.constant(0.5, scores.value.dtype)), scores.dims)
        if self.flaw == "choice between two tensors of scores":
            keep = g.input("keep", sizes_of(scores.value), BOOL)
            other = g.input("x", sizes_of(scores.value), scores.value.dtype)
            scores = Named(g.where(keep, scores.value, other), scores.dims)
        return self.viewed(scores)

    def tensor_scaled(self, x: Named, axes: list[str]) -> Named:
        """Multiply or divide `x` by a tensor that varies along `axes`."""
        g, chance = self.g, self.choices.chance
        order = tuple((a,) for a in axes)
        sizes = [g.of[a] for a in axes]
        if chance(50) and all(size.is_static for size in sizes):
            by = Named(g.unary("Exp", g.weight(sizes, 0.5)), order)
        else:
            by = Named(g.unary("Exp", g.input("factor", sizes)), order)
        if by.value.dtype != x.value.dtype:
            assert x.value.dtype is not None
            by = Named(g.cast(by.value, x.value.dtype), by.dims)
        by = g.fits(by, x.dims)
        kind = self.choices.pick(("Mul", "Div", "left"))
        pair = (by.value, x.value) if kind == "left" else (x.value, by.value)
        return Named(g.binary("Div" if kind == "Div" else "Mul", *pair), x.dims)

    def viewed(self, x: Named) -> Named:
        """Return the same scores or weights, perhaps with other dims; the keys keep a dim of their own."""
        g = self.g
        if not self.choices.chance(20):
            return x
        return g.arranged(x, g.grouped(g.shuffled(x.axes), apart="j"))

    def masked(self, x: Named) -> Named:
        """Apply a boolean mask, a bias, or a causal comparison."""
        g, pick, chance = self.g, self.choices.pick, self.choices.chance
        dtype = x.value.dtype
        assert dtype is not None
        self.steps += 1
        kind = pick(("Where", "Where", "Add", "Add", "Sub", "causal", "content"))
        if (
            kind == "content"
            and not self.flaw
            and "d" in self.query.axes
            and g.of["j"].is_static
            and self.query.value.dtype == dtype
        ):
            query = g.arranged(self.query, [*((a,) for a in self.query.axes if a not in "id"), ("i",), ("d",)])
            table = g.matmul(query.value, g.weight([g.of["d"], g.of["j"]], 0.3))
            self.biases += 1
            bias = g.fits(Named(table, (*query.dims[:-1], ("j",))), x.dims)
            return Named(g.binary("Add", x.value, bias.value), x.dims)
        if kind == "causal":
            condition = g.fits(self.causal(), x.dims)
        else:
            axes = [a for a in x.axes if chance(60)] or ["j"]
            order = g.shuffled(axes) if chance(30) else axes
            sizes = [g.of[a] for a in order]
            if kind in ("Add", "Sub"):
                self.biases += 1
                name = pick(("bias", "mask", "mask_inf")) if kind == "Add" else "bias"
                if name == "bias" and chance(40) and all(size.is_static for size in sizes):
                    bias = Named(g.weight(sizes), tuple((a,) for a in order))
                else:
                    bias = Named(g.input(name, sizes, dtype), tuple((a,) for a in order))
                bias = g.fits(bias, x.dims)
                left = kind == "Add" and chance(30)
                pair = (bias.value, x.value) if left else (x.value, bias.value)
                return Named(g.binary(kind, *pair), x.dims)
            condition = g.fits(Named(g.input("keep", sizes, BOOL), tuple((a,) for a in order)), x.dims)
        lowest = -6e4 if dtype == ir.DataType.FLOAT16 else -1e9
        fill = pick((-np.inf, -np.inf, lowest, -1e4))
        number = g.constant(fill, dtype)
        self.fills.append((condition, fill))
        if chance(50):
            return Named(g.where(condition.value, x.value, number), x.dims)
        return Named(g.where(g.unary("Not", condition.value), number, x.value), x.dims)

    def multiplied(self, x: Named) -> Named:
        """Multiply scores by ones and zeros, and add large negative numbers at the zeros."""
        g = self.g
        dtype = x.value.dtype
        assert dtype is not None
        self.steps += 2
        axes = [a for a in x.axes if self.choices.chance(60)] or ["j"]
        keep = g.cast(g.input("keep", [g.of[a] for a in axes], BOOL), dtype)
        ones = g.fits(Named(keep, tuple((a,) for a in axes)), x.dims)
        low = g.binary("Mul", g.binary("Sub", g.constant(1.0, dtype), ones.value), g.constant(-1e4, dtype))
        return Named(g.binary("Add", g.binary("Mul", x.value, ones.value), low), x.dims)

    def causal(self) -> Named:
        """Return True where the key is not later than the query."""
        g = self.g
        if g.of["i"].is_static and g.of["j"].is_static and self.choices.chance(50):
            below = np.tri(g.of["i"].factor, g.of["j"].factor, dtype=bool)
            return Named(g.constant(below, BOOL), (("i",), ("j",)))
        if self.choices.chance(30):
            ones = g.expand(g.constant(np.ones((1, 1), bool), BOOL), [g.of["i"], g.of["j"]])
            return Named(g.op("Trilu", [ones], sizes_of(ones), upper=0), (("i",), ("j",)))
        rows, columns = (
            g.op(
                "Range",
                [g.constant(np.int64(0), INT64), g.squeeze(g.shape([g.of[a]]), [0]), g.constant(np.int64(1), INT64)],
                [g.of[a]],
            )
            for a in "ij"
        )
        return Named(g.binary("GreaterOrEqual", g.unsqueeze(rows, [1]), g.unsqueeze(columns, [0])), (("i",), ("j",)))

    # --- weights

    def weights(self, scores: Named) -> Named:
        g, chance, pick = self.g, self.choices.chance, self.choices.pick
        dtype = scores.value.dtype
        assert dtype is not None
        if self.flaw == "scores are an output":
            g.extra_outputs.append(scores.value)
        if self.flaw == "scores are used twice":
            g.extra_outputs.append(g.unary("Relu", scores.value))
        wider = ir.DataType.DOUBLE if dtype == FLOAT else FLOAT
        if chance(15):
            scores = Named(g.cast(scores.value, wider), scores.dims)
        weights = self.with_sinks(scores) if self.sinks_fit() else self.softmax(scores)
        if weights.value.dtype != dtype:
            weights = Named(g.cast(weights.value, dtype), weights.dims)
        if chance(25) and not self.flaw and not self.by_hand:
            weights = self.masked_again(weights)
        if self.flaw == "weights are an output":
            g.extra_outputs.append(weights.value)
        if self.flaw == "weights are used twice":
            g.extra_outputs.append(g.unary("Relu", weights.value))
        if self.flaw == "relu on the weights":
            weights = Named(g.unary("Sigmoid", weights.value), weights.dims)
        if self.flaw == "shift of the weights":
            weights = Named(g.binary("Add", weights.value, g.constant(0.1, dtype)), weights.dims)
        if self.flaw == "scale that differs by key after the softmax":
            weights = self.tensor_scaled(weights, ["j"])
        if self.flaw == "mask after the softmax":
            keep = g.fits(Named(g.input("keep", [g.of["j"]], BOOL), (("j",),)), weights.dims)
            weights = Named(g.where(keep.value, weights.value, g.constant(0.0, dtype)), weights.dims)
        if self.flaw == "dropout in training" or chance(10):
            training = g.constant(self.flaw == "dropout in training", BOOL)
            value = g.op("Dropout", [weights.value, g.constant(0.5, FLOAT), training], sizes_of(weights.value))
            weights = Named(value, weights.dims)
        gated = chance(8) and not self.flaw
        if gated:
            weights = self.tensor_scaled(weights, [a for a in ("h", "i", "b") if a in weights.axes and chance(50)])
        if chance(10):
            number = g.constant(pick((0.5, 2.0)), dtype)
            weights = Named(g.binary(pick(("Mul", "Div")), weights.value, number), weights.dims)
        weights = self.viewed(weights)
        if chance(10) and (self.shifted or not self.by_hand) and not gated:
            guard = g.where(
                g.op("IsNaN", [weights.value], sizes_of(weights.value), BOOL), g.constant(0.0, dtype), weights.value
            )
            weights = Named(guard, weights.dims)
        assert pick((True,))
        return self.viewed(weights)

    def masked_again(self, x: Named) -> Named:
        """Zero the weights where a mask of the scores already hides the keys."""
        g = self.g
        infinite = all(number == -np.inf for _, number in self.fills)
        hidden = self.fills if infinite or len(self.fills) == self.steps == 1 else []
        if not hidden or self.rescaled:
            return x
        condition, _ = self.choices.pick(hidden)
        if len(condition.dims) > len(x.dims) or condition.dims != x.dims[len(x.dims) - len(condition.dims) :]:
            fitting = [
                have and have != want
                for have, want in zip(condition.dims, x.dims[-len(condition.dims) :], strict=False)
            ]
            if len(condition.dims) > len(x.dims) or any(fitting):
                return x  # the weights have other dims by now
        assert x.value.dtype is not None
        return Named(g.where(condition.value, x.value, g.constant(0.0, x.value.dtype)), x.dims)

    def sinks_fit(self) -> bool:
        """Return whether to add sinks; not if a finite number may replace scores."""
        finite = any(number != -np.inf for _, number in self.fills)
        return self.choices.chance(8) and not self.flaw and self.steps == len(self.fills) + self.biases and not finite

    def with_sinks(self, scores: Named) -> Named:
        """Compute the softmax over the scores and one or two more columns, which are then removed."""
        g, pick = self.g, self.choices.pick
        count, first, axis = pick((1, 1, 2)), self.choices.chance(30), scores.dims.index(("j",))
        assert scores.value.dtype is not None
        keys = g.of["j"]
        g.of["s"] = Size(count)
        g.of["both"] = (
            Size(keys.factor + count) if keys.is_static else Size.of(ir.SymbolicDim(f"{keys.dim()} + {count}"))
        )
        of = [a for a in ("h",) if a in scores.axes and g.of[a].is_static]
        dims = tuple(("s",) if dim == ("j",) else dim for dim in scores.dims)
        column = Named(g.weight([g.of[a] for a in [*of, "s"]]), tuple((a,) for a in [*of, "s"]))
        if column.value.dtype != scores.value.dtype:
            column = Named(g.cast(column.value, scores.value.dtype), column.dims)
        column = g.arranged(column, [tuple(a for a in dim if a in column.axes) for dim in dims])
        whole = g.expand(column.value, [g.size(dim) for dim in dims])
        parts = [whole, scores.value] if first else [scores.value, whole]
        joint = g.concat(parts, axis, g.of["both"])
        if self.choices.chance(50):
            joint = g.binary("Sub", joint, g.reduce("ReduceMax", joint, axis))
        weights = g.softmax(joint, axis)
        ends = (count, 2**31 - 1) if first else (0, -count)
        inputs = [weights, g.ints(ends[0]), g.ints(ends[1]), g.ints(axis)]
        self.by_hand = False
        return Named(g.op("Slice", inputs, sizes_of(scores.value)), scores.dims)

    def softmax(self, scores: Named) -> Named:
        g, chance, x = self.g, self.choices.chance, scores.value
        axis = scores.dims.index(("j",))
        if self.flaw in ("softmax over the queries", "softmax over the heads", "softmax over the features"):
            scores = g.arranged(scores, [(a,) for a in scores.axes])
            name = {"queries": "i", "heads": "h", "features": self.batch[0] if self.batch else "h"}
            x, axis = scores.value, scores.dims.index((name[self.flaw.split()[-1]],))
            return Named(g.softmax(x, axis), scores.dims)
        if self.flaw == "softmax over heads and keys together":
            rest = [a for a in scores.axes if a not in "hj"]
            scores = g.arranged(scores, [*((a,) for a in rest), ("h", "j")])
            return Named(g.softmax(scores.value, len(rest)), scores.dims)
        if self.flaw == "sigmoid for a softmax":
            return Named(g.unary("Sigmoid", x), scores.dims)
        self.by_hand = chance(20) or (self.flaw is not None and self.flaw.startswith("sum "))
        if not self.by_hand:
            if chance(10):
                x = g.binary("Sub", x, g.reduce("ReduceMax", x, axis))
            return Named(g.softmax(x, axis), scores.dims)
        self.shifted = chance(60)
        if self.shifted:
            x = g.binary("Sub", x, g.reduce("ReduceMax", x, axis))
        exponentials = g.unary("Exp", x)
        terms, over = exponentials, axis
        if self.flaw == "sum of other exponentials":
            terms = g.unary("Exp", g.unary("Neg", x))
        if self.flaw == "sum over another axis":
            over = next(i for i, dim in enumerate(scores.dims) if "i" in dim)
        total = g.reduce("ReduceSum", terms, over)
        if self.flaw == "sum with a small number added":
            total = g.binary("Add", total, g.constant(0.1, total.dtype))
        return Named(g.binary("Div", exponentials, total), scores.dims)

    def finished(self, output: Named) -> ir.Value:
        """Return the output in some layout, perhaps projected."""
        g = self.g
        if "e" not in output.axes:  # a flaw
            return g.unary("Relu", output.value)
        output = g.arranged(output, g.grouped(g.shuffled(output.axes)))
        last = g.size(output.dims[-1])
        if last.is_static and self.choices.chance(30):
            weight = g.weight([last, Size(2)])
            if len(output.dims) > 1:
                return g.matmul(output.value, weight)
        return g.unary("Relu", output.value) if self.choices.chance(50) else output.value
