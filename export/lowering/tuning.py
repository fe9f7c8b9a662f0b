"""Which form of a site is fastest on this machine: every candidate run side by side, on the shapes that it will see.

A site is measured alone, between its operands as the graph has them laid out before its views and its output as the
graph wants it, so that transposes count. Sites alike in all of that share one measurement. Every candidate is first
held to the plain products: one that disagrees is not timed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from attnforge.arrays import Array
from attnforge.export.attention.canonical import MASK_STEP
from attnforge.export.attention.layout import Axis, Layout, Size, sizes_of
from attnforge.export.attention.operands import Operand, scalar
from attnforge.export.graphs.build import Builder, constant, typed
from attnforge.export.graphs.execute import open_session
from attnforge.export.lowering.attention import Attention
from attnforge.runtime.turns import ALIKE, medians

BOOL = ir.DataType.BOOL

ROUNDS = 9
"""How often every candidate is timed."""

LARGEST_SCORES = 2**29
"""Bytes of scores above which a form that holds them is not tried: several candidates are in memory at once."""

TOLERANCE = 1e-5
"""Relative difference from the products that fp32 rounding explains, where the scores are of the size of one."""


@dataclass(frozen=True)
class Candidate:
    """A form that a site can be lowered to.

    Attributes:
        form: its name.
        node: name of the node by which the site is found again in what the backend compiled.
        emit: writes it, given an attention of these properties at any sizes.
        fused: whether one kernel does the work.
        holds_scores: whether all scores are in memory at once.
    """

    form: str
    node: str
    emit: Callable[[Builder, Attention], ir.Value]
    fused: bool = True
    holds_scores: bool = True


@dataclass(frozen=True)
class Choice:
    """The form chosen and why; the milliseconds of every form that was timed, and why others were not."""

    form: str
    why: str
    measured: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


class Unmeasurable(Exception):
    """Why a site cannot be measured."""


class Tuner:
    """Chooses by measuring, within a time for all sites together.

    Args:
        sizes: what each symbol of the dims most often is.
        seconds: for all measuring. What is over when these are spent is left to the rules.

    Attributes:
        spent: seconds so far.
    """

    def __init__(self, sizes: Mapping[str, int], seconds: float = 20.0) -> None:
        self.sizes = sizes
        self.seconds, self.spent = seconds, 0.0
        self._known: dict[Hashable, Choice] = {}

    def choose(self, a: Attention, candidates: Sequence[Candidate], ruled: Choice) -> Choice:
        """The fastest of `candidates`, the first of which are the plain products, or `ruled` where none is measured."""
        try:
            scores = 4 * prod(evaluated(a.size(name), self.sizes) for name in ("B", "H", "n_q", "n_k"))
            if len(candidates) == 1:
                return ruled
            if scores > LARGEST_SCORES:
                raise Unmeasurable(f"its scores are {scores / 2**30:.1f} GiB, and all but one form would hold them")
            key = (_signature(a, self.sizes), tuple(one.form for one in candidates))
            if key not in self._known:
                if self.spent >= self.seconds:
                    raise Unmeasurable("the time for measuring was spent on other sites")
                start = time.perf_counter()
                self._known[key] = _measure(a, candidates, ruled, self.sizes, (self.seconds - self.spent) / 2)
                self.spent += time.perf_counter() - start
        except Unmeasurable as reason:
            return replace(ruled, why=f"{ruled.why}; not measured: {reason}")
        return self._known[key]


def evaluated(size: Size, sizes: Mapping[str, int]) -> int:
    """The number that `size` is where its symbols are `sizes`.

    Raises:
        Unmeasurable: a symbol is none of them, nor an expression of them.
    """
    try:
        factors = [ir.SymbolicDim(symbol).evaluate(sizes) for symbol in size.symbols]
    except ValueError:
        factors = [ir.SymbolicDim(None)]  # an expression of another grammar
    known = [factor for factor in factors if isinstance(factor, int)]
    if len(known) < len(factors):
        raise Unmeasurable(f"the dim {size.dim()} is not known before it runs")
    return size.factor * prod(known)


def _measure(
    a: Attention, candidates: Sequence[Candidate], ruled: Choice, sizes: Mapping[str, int], seconds: float
) -> Choice:
    runs: dict[str, Callable[[], Any]] = {}
    dropped: dict[str, str] = {}
    expected: Array | None = None
    start = time.perf_counter()
    for candidate in candidates:
        model = alone(a, candidate, sizes)
        feeds = operands(a, model)
        try:
            runs[candidate.form] = run = _opened(model, feeds)
            got: Array = run().numpy()
        except Exception as error:  # a kernel that refuses this shape is a result
            dropped[candidate.form] = "ONNX Runtime refuses it: " + str(error).strip().splitlines()[0]
            runs.pop(candidate.form, None)
            if expected is None:
                raise Unmeasurable("ONNX Runtime refuses the form that the others are held to") from error
            continue
        expected = got if expected is None else expected
        if reason := _disagreement(got, expected):
            dropped[candidate.form] = reason
            del runs[candidate.form]
    measured = medians(runs, ROUNDS, start + seconds - time.perf_counter())
    if not measured:
        raise Unmeasurable("; ".join(dropped.values()))
    form = _fastest(measured, {one.form for one in candidates if not one.holds_scores}, ruled.form)
    others = ", ".join(f"{other} {ms:.2f}" for other, ms in measured.items() if other != form)
    why = f"measured: {measured[form]:.2f} ms" + (f" against {others}" if others else "")
    why += "".join(f"; not {other}: {reason}" for other, reason in dropped.items())
    return Choice(form, why, measured, dropped)


def _fastest(measured: Mapping[str, float], frugal: set[str], ruled: str) -> str:
    """The fastest; of those about as fast one that does not hold the scores, else what the rules say."""
    best = min(measured, key=lambda form: measured[form])
    alike = [form for form, ms in measured.items() if ms <= ALIKE * measured[best]]
    return next((form for form in alike if form in frugal), ruled if ruled in alike else best)


def _disagreement(got: Array, expected: Array) -> str | None:
    if got.shape != expected.shape or not np.array_equal(np.isnan(got), np.isnan(expected)):
        return "it differs from the products where a query attends to nothing"
    difference = float(np.linalg.norm(np.nan_to_num(got - expected)))
    error = difference / (float(np.linalg.norm(np.nan_to_num(expected))) or 1.0)
    return f"it differs from the products by {error:.1e}" if error > TOLERANCE else None


# --- a site alone -----------------------------------------------------------------------------------------------------


def _opened(model: ir.Model, feeds: Mapping[str, Array]) -> Callable[[], Any]:
    """`model` in a session of its own, as often as wanted on `feeds`; gives its output as ONNX Runtime has it."""
    session = open_session(model, optimised=True)
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    return lambda: session.run_with_ort_values(["output"], values)[0]


def alone(a: Attention, candidate: Candidate, sizes: Mapping[str, int]) -> ir.Model:
    """A model of one site at one set of sizes: the inputs are its operands before any views, and what masks it."""
    op, inputs = Builder(), dict[str, ir.Value]()
    axes: dict[Axis, Axis] = {}

    def fixed(layout: Layout) -> Layout:
        return Layout(
            [axes.setdefault(axis, Axis(Size(evaluated(axis.size, sizes)))) for axis in dim] for dim in layout.dims
        )

    def operand(name: str, wanted: Operand) -> Operand:
        layout = fixed(wanted.layout)
        value = inputs[name] = ir.Value(name=name)
        return Operand(typed(value, a.dtype, [size.dim() for size in layout.sizes()]), layout)

    query, key, value = operand("query", a.query), operand("key", a.key), operand("value", a.value)
    small = replace(
        a,
        query=query,
        key=key,
        value=value,
        mask=_copied(op, a.mask, sizes, inputs) if a.mask is not None else None,
        output_layout=fixed(a.output_layout),
        dims={name: fixed(layout) for name, layout in a.dims.items()},
    )
    result = candidate.emit(op, small)
    result.name = "output"
    graph = ir.Graph(
        list(inputs.values()), [result], nodes=op.nodes, opset_imports={"": 23, "com.microsoft": 1}, name="site"
    )
    return ir.Model(graph, ir_version=10)


def _copied(op: Builder, mask: ir.Value, sizes: Mapping[str, int], inputs: dict[str, ir.Value]) -> ir.Value:
    """A mask, its steps as nodes and what these apply as inputs."""
    assert mask.dtype is not None
    dims = [evaluated(size, sizes) for size in sizes_of(mask)]
    if (number := scalar(mask)) is not None:
        return constant(op, np.full(dims, number), mask.dtype)
    if (node := step_of(mask)) is not None:
        parts = [_copied(op, part, sizes, inputs) for part in node.inputs if part is not None]
        copy = op.op(node.op_type, parts, metadata_props=dict(node.metadata_props))
        return typed(copy, mask.dtype, dims)
    name = f"mask_{mask.name}"
    if name not in inputs:
        inputs[name] = typed(ir.Value(name=name), mask.dtype, dims)
    return inputs[name]


def step_of(mask: ir.Value) -> ir.Node | None:
    """The node that makes `mask` by one more of the author's steps, or None."""
    node = mask.producer()
    if node is None or node.domain != "":
        return None
    fills = node.op_type == "Where" and scalar(node.inputs[2]) == -np.inf
    return node if fills or MASK_STEP in node.metadata_props else None


def operands(a: Attention, model: ir.Model) -> dict[str, Array]:
    """Random operands that make scores of about one. The first row of every mask with several attends to nothing."""
    rng = np.random.default_rng(0)
    made: dict[str, Array] = {}
    for value in model.graph.inputs:
        assert value.name is not None and value.shape is not None and value.dtype is not None
        shape = tuple(value.shape.numpy())
        if value.dtype == BOOL:
            array: Array = np.asarray(rng.random(shape) < 0.75)
        else:
            array = rng.standard_normal(shape, np.float32)
        if value.name == "query":
            array /= np.float32(a.scale * a.size("d_k").factor ** 0.5)
        elif value.name.startswith("mask_") and prod(shape[:-1]) > 1:
            array.reshape(-1, shape[-1])[0] = False if value.dtype == BOOL else -np.inf
        made[value.name] = array
    return made


def _signature(a: Attention, sizes: Mapping[str, int]) -> Hashable:
    """Equal where two sites are the same work."""
    numbers = {axis: i for i, axis in enumerate(axis for layout in a.dims.values() for axis in layout.axes)}
    layouts = tuple(
        tuple(tuple((numbers[axis], evaluated(axis.size, sizes)) for axis in dim) for dim in layout.dims)
        for layout in (*a.dims.values(), a.query.layout, a.key.layout, a.value.layout, a.output_layout)
    )
    mask = tuple(_shapes(a.mask, sizes)) if a.mask is not None else ()
    return layouts, mask, a.dtype, a.scale, a.softcap, a.is_causal, a.silent_rows_are_nan, a.softmax_dtype


def _shapes(mask: ir.Value, sizes: Mapping[str, int]) -> Iterator[Hashable]:
    yield mask.dtype, scalar(mask), tuple(evaluated(size, sizes) for size in sizes_of(mask))
    if (node := step_of(mask)) is not None:
        yield node.op_type
        for part in node.inputs:
            if part is not None:
                yield from _shapes(part, sizes)
