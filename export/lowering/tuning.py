"""The fastest form of a site on this machine: all candidates are run and compared at the sizes they will see.

A site is measured alone, from its operands as the graph has them before any views to its output as the graph reads it,
so that transposes count. Sites with the same operands, mask and output layouts share one measurement. Every candidate
is first compared with the first one; a candidate that differs is not timed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from attnforge.arrays import Array
from attnforge.errors import first_line
from attnforge.export.attention.canonical import SiteAxes
from attnforge.export.attention.layout import Axis, Layout, Size, sizes_of
from attnforge.export.attention.operands import Operand, scalar
from attnforge.export.graphs.build import Builder, constant, typed
from attnforge.export.graphs.execute import open_session
from attnforge.export.lowering.attention import Attention, Lowered
from attnforge.export.lowering.band import Band
from attnforge.export.lowering.products import last_step
from attnforge.numbers import scientific
from attnforge.progress import Steps
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.race import ALIKE, medians

BOOL = ir.DataType.BOOL

ROUNDS = 9
"""Number of times that every candidate is timed."""

LARGEST_SCORES = 2**26
"""Bytes of scores above which no form that materialises them is tried: the forms of a site, which are in memory at
once, take about thirteen times as much."""

TOLERANCE = 1e-5
"""Relative difference from the products that fp32 rounding explains, with scores of magnitude one."""


@dataclass(frozen=True)
class Candidate:
    """A form that a site can be lowered to.

    Attributes:
        form: name of the form.
        node: name of the node by which the site is identified in the compiled graph.
        emit: writes it for such an attention, at any sizes, with a node of the given name.
        fused: whether one kernel does the work.
        materialises_scores: whether all scores are in memory at once.
        tolerance: maximum relative difference from the products.
    """

    form: str
    node: str
    emit: Callable[[Builder, Attention, str], ir.Value]
    fused: bool = True
    materialises_scores: bool = True
    tolerance: float = TOLERANCE

    def lowered(self, site: str, choice: FormChoice) -> Lowered:
        """The record of a site in this form."""
        unfused = None if self.fused else choice.why
        return Lowered(site, self.form, choice.why, self.node, unfused, choice.measured, choice.dropped)


@dataclass(frozen=True)
class FormChoice:
    """The form that was chosen for a site.

    Attributes:
        form: name of the form.
        why: why it was chosen.
        measured: milliseconds of every form that was timed.
        dropped: why each form that was tried was not timed.
    """

    form: str
    why: str
    measured: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)


class Unmeasurable(Exception):
    """A site cannot be measured; the message says why."""


@dataclass(frozen=True)
class Measurement:
    """The measurement of a site.

    Attributes:
        signature: identifies the work of a site at the usual sizes: equal for two sites that one measurement serves.
        measure: takes a site, its forms, the form that the rules choose, the usual sizes and seconds; returns the form
            to use.
    """

    signature: Callable[[Attention, Mapping[str, int]], Hashable]
    measure: Callable[[Attention, Sequence[Candidate], FormChoice, Mapping[str, int], float], FormChoice]


@dataclass(frozen=True)
class Engine:
    """The library that runs the forms that are measured.

    Attributes:
        name: name of the library.
        open: takes a model, which it may modify, and its inputs by name; returns a function that runs it and returns
            the library's own output object.
        read: converts that output to an array.
    """

    name: str
    open: Callable[[ir.Model, Mapping[str, Array]], Callable[[], Any]]
    read: Callable[[Any], Array]


def _opened(model: ir.Model, feeds: Mapping[str, Array]) -> Callable[[], Any]:
    """A function that runs `model` on `feeds` and returns ONNX Runtime's own output value."""
    session = open_session(model, optimised=True)
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    return lambda: session.run_with_ort_values(["output"], values)[0]


ONNX_RUNTIME = Engine("ONNX Runtime", _opened, lambda output: output.numpy())


class Tuner:
    """Chooses the form of each site by measuring.

    Args:
        sizes: the usual size of each symbolic dim.
        seconds: time for measuring all sites together. Once it is spent, the remaining sites are left to the rules.
        steps: counts every site; None if progress is not reported.
        measured: earlier measurements, by site.
        engine: runs the forms.

    Attributes:
        spent: seconds of measuring so far.
        chosen: the form of every site so far.
    """

    def __init__(
        self,
        sizes: Mapping[str, int],
        seconds: float = 20.0,
        steps: Steps | None = None,
        measured: Mapping[str, FormChoice] | None = None,
        engine: Engine = ONNX_RUNTIME,
    ) -> None:
        self.sizes, self._steps, self._before = sizes, steps, measured or {}
        self._alone = Measurement(_signature, partial(_measure, engine=engine))
        self.chosen: dict[str, FormChoice] = {}
        self.seconds, self.spent = seconds, 0.0
        self._known: dict[Hashable, FormChoice] = {}

    def choose(
        self, a: Attention, candidates: Sequence[Candidate], ruled: FormChoice, how: Measurement | None = None
    ) -> FormChoice:
        """The fastest of `candidates`, or `ruled` if they cannot be measured.

        Args:
            a: the site.
            candidates: its forms, the plain products first.
            ruled: the form that the rules choose.
            how: how the site is measured; by default alone, at its usual sizes.
        """
        site = str(a.node.name)
        if self._steps is not None:
            self._steps.begin(site.removesuffix("/Attention"))
        self.chosen[site] = self._before.get(site) or self._choose(a, candidates, ruled, how or self._alone)
        return self.chosen[site]

    def _choose(self, a: Attention, candidates: Sequence[Candidate], ruled: FormChoice, how: Measurement) -> FormChoice:
        try:
            scores = 4 * prod(evaluated(a.size(name), self.sizes) for name in ("B", "H", "n_q", "n_k"))
            if len(candidates) == 1:
                return ruled
            if scores > LARGEST_SCORES:
                raise Unmeasurable(f"its scores are {scores / 2**20:,.0f} MiB, and most forms would materialise them")
            key = (how.signature(a, self.sizes), tuple(candidate.form for candidate in candidates))
            if key not in self._known:
                if self.spent >= self.seconds:
                    raise Unmeasurable("the time for measuring was spent on other sites")
                start = time.perf_counter()
                seconds = (self.seconds - self.spent) / 2
                self._known[key] = how.measure(a, candidates, ruled, self.sizes, seconds)
                self.spent += time.perf_counter() - start
        except Unmeasurable as reason:
            return replace(ruled, why=f"{ruled.why}; not measured: {reason}")
        return self._known[key]


def evaluated(size: Size, sizes: Mapping[str, int]) -> int:
    """The number that `size` is, given the size of each symbol.

    Raises:
        Unmeasurable: `sizes` lacks a symbol.
    """
    try:
        factors = [ir.SymbolicDim(symbol).evaluate(sizes) for symbol in size.symbols]
    except ValueError:
        factors = [ir.SymbolicDim(None)]  # an expression of another grammar
    known = [factor for factor in factors if isinstance(factor, int)]
    if len(known) < len(factors):
        raise Unmeasurable(f"the dim {size.dim()} is not known before the model runs")
    return size.factor * prod(known)


def usual(size: Size, sizes: Mapping[str, int]) -> int:
    """The usual number that a size is; its static factor if its symbols are unknown."""
    try:
        return evaluated(size, sizes)
    except Unmeasurable:
        return size.factor


def _measure(
    a: Attention,
    candidates: Sequence[Candidate],
    ruled: FormChoice,
    sizes: Mapping[str, int],
    seconds: float,
    engine: Engine,
) -> FormChoice:
    start = time.perf_counter()

    def opened(candidate: Candidate) -> tuple[Callable[[], Any], Array]:
        model = alone(a, candidate, sizes)
        run = engine.open(model, operands(a, model))
        return run, engine.read(run())

    runs, dropped = agreeing(candidates, opened, engine.name)
    measured = medians(runs, ROUNDS, start + seconds - time.perf_counter())
    if not measured:
        raise Unmeasurable("; ".join(dropped.values()))
    without_scores = {candidate.form for candidate in candidates if not candidate.materialises_scores}
    chosen = _fastest(measured, without_scores, ruled.form)
    others = ", ".join(f"{form} {ms:.2f}" for form, ms in measured.items() if form != chosen)
    why = f"measured: {measured[chosen]:.2f} ms" + (f" against {others}" if others else "")
    why += "".join(f"; not {form}: {reason}" for form, reason in dropped.items())
    return FormChoice(chosen, why, measured, dropped)


def agreeing(
    candidates: Sequence[Candidate], opened: Callable[[Candidate], tuple[Callable[[], Any], Array]], engine: str
) -> tuple[dict[str, Callable[[], Any]], dict[str, str]]:
    """A run of every form that agrees with the first candidate, by form; and why the other forms are dropped.

    Args:
        candidates: the forms.
        opened: takes a form; returns a function that runs it, and its first output.
        engine: name of the library that runs them.

    Raises:
        Unmeasurable: the first form does not run.
    """
    runs: dict[str, Callable[[], Any]] = {}
    dropped: dict[str, str] = {}
    expected: Array | None = None
    for candidate in candidates:
        try:
            run, output = opened(candidate)
        except Exception as error:  # a kernel that refuses this shape is a result
            if expected is None:
                raise Unmeasurable(f"{engine} refuses the form that the others are checked against") from error
            dropped[candidate.form] = f"{engine} refuses it: {first_line(error)}"
            continue
        expected = output if expected is None else expected
        if reason := _disagreement(output, expected, candidate.tolerance):
            dropped[candidate.form] = reason
        else:
            runs[candidate.form] = run
    return runs, dropped


def _fastest(measured: Mapping[str, float], without_scores: set[str], ruled: str) -> str:
    """The fastest form; among equally fast ones, one that does not materialise the scores, or else the rules' form."""
    best = min(measured, key=lambda form: measured[form])
    alike = [form for form, ms in measured.items() if ms <= ALIKE * measured[best]]
    return next((form for form in alike if form in without_scores), ruled if ruled in alike else best)


def _disagreement(output: Array, expected: Array, tolerance: float) -> str | None:
    """The difference between an output and the products' output, as text; None if rounding explains the difference."""
    lost, without = (np.where(np.isfinite(array), 0, array) for array in (output, expected))
    if not np.array_equal(lost, without, equal_nan=True):
        return "it differs from the products in fully masked rows"
    finite = np.isfinite(expected)
    error = relative_error(output[finite].astype(np.float64), expected[finite].astype(np.float64))
    return f"it differs from the products by {scientific(error)}" if error > tolerance else None


# --- a site alone -----------------------------------------------------------------------------------------------------


def alone(a: Attention, candidate: Candidate, sizes: Mapping[str, int]) -> ir.Model:
    """A model of one site in one form, at one set of sizes.

    Its inputs are the operands before any views, and the operands of its mask; its output is the graph's, after views.
    """
    op, inputs = Builder(), dict[str, ir.Value]()
    axes: dict[Axis, Axis] = {}

    def fixed(layout: Layout) -> Layout:
        return Layout(
            [axes.setdefault(axis, Axis(Size(evaluated(axis.size, sizes)))) for axis in dim] for dim in layout.dims
        )

    def operand(name: str, original: Operand) -> Operand:
        layout = fixed(original.layout)
        value = inputs[name] = ir.Value(name=name)
        return Operand(typed(value, a.dtype, [size.dim() for size in layout.sizes()]), layout)

    site = replace(
        a,
        query=operand("query", a.query),
        key=operand("key", a.key),
        value=operand("value", a.value),
        mask=_copied(op, a.mask, sizes, inputs) if a.mask is not None else None,
        output=Operand(a.output.value, fixed(a.output.layout)),
        axes=SiteAxes({name: fixed(a.layout(name)).dims[0] for name in a.axes.dims}),
        band=a.band and replace(a.band, is_all=True),  # the operands of its mask are in another graph
    )
    result = candidate.emit(op, site, candidate.node)
    result.name = "output"
    graph = ir.Graph(
        list(inputs.values()), [result], nodes=op.nodes, opset_imports={"": 23, "com.microsoft": 1}, name="site"
    )
    return ir.Model(graph, ir_version=10)


def _copied(op: Builder, mask: ir.Value, sizes: Mapping[str, int], inputs: dict[str, ir.Value]) -> ir.Value:
    """A mask with its steps as nodes; the operands of the steps become inputs, which are added to `inputs`."""
    assert mask.dtype is not None
    dims = [evaluated(size, sizes) for size in sizes_of(mask)]
    if (number := scalar(mask)) is not None:
        return constant(op, np.full(dims, number), mask.dtype)
    if (node := last_step(mask)) is not None:
        parts = [_copied(op, part, sizes, inputs) for part in node.inputs if part is not None]
        copy = op.op(node.op_type, parts, metadata_props=dict(node.metadata_props))
        return typed(copy, mask.dtype, dims)
    name = f"mask_{mask.name}"
    if name not in inputs:
        inputs[name] = typed(ir.Value(name=name), mask.dtype, dims)
    return inputs[name]


def operands(a: Attention, model: ir.Model) -> dict[str, Array]:
    """Random inputs by name for a model that :func:`alone` made, with scores of magnitude one.

    A mask that leaves a band or a triangle visible, or is the same for every query, does so here too. In any other mask
    that differs by query, the first row is fully masked.
    """
    rng = np.random.default_rng(0)
    arrays: dict[str, Array] = {}
    hides_by_rule = a.is_triangle or (a.causal_prefix, a.band) != (None, None) or a.residue == "by key"
    for value in model.graph.inputs:
        assert value.name is not None and value.shape is not None and value.dtype is not None
        shape, is_mask = tuple(value.shape.numpy()), value.name.startswith("mask_")
        if is_mask and hides_by_rule:
            shown = np.broadcast_to(_shown(a, shape, rng), shape)
            array: Array = shown if value.dtype == BOOL else np.where(shown, np.float32(0), np.float32(-np.inf))
        elif value.dtype == BOOL:
            array = np.asarray(rng.random(shape) < 0.75)
        else:
            array = rng.standard_normal(shape, np.float32)
        if value.name == "query":
            array /= np.float32(a.scale * a.size("d_k").factor ** 0.5)
        elif is_mask and not hides_by_rule and prod(shape[:-1]) > 1:
            array.reshape(-1, shape[-1])[0] = False if value.dtype == BOOL else -np.inf
        arrays[value.name] = array
    return arrays


def _shown(a: Attention, shape: Sequence[int], rng: np.random.Generator) -> Array:
    """The visible pairs of a mask that hides by a rule; the first key is, wherever the rule allows it."""
    band = Band(0, sys.maxsize, first_keys=a.causal_prefix or 0) if a.is_triangle or a.causal_prefix else a.band
    shown = np.ones(shape[-2:], bool) if band is None else band.visible(*shape[-2:])
    if a.residue != "by key":
        return shown
    keys = rng.random(shape[-1]) < 0.75
    keys[0] = True
    return shown & keys


def _signature(a: Attention, sizes: Mapping[str, int]) -> Hashable:
    """Identify the work of a site: equal for two sites that one measurement serves."""
    dims = [a.layout(name) for name in a.axes.dims]
    numbers = {axis: i for i, axis in enumerate(axis for layout in dims for axis in layout.axes)}
    layouts = tuple(
        tuple(tuple((numbers[axis], evaluated(axis.size, sizes)) for axis in dim) for dim in layout.dims)
        for layout in (*dims, *(operand.layout for operand in (*a.operands, a.output)))
    )
    mask = tuple(_shapes(a.mask, sizes)) if a.mask is not None else ()
    how = a.scale, a.softcap, a.is_causal, a.silent_rows_are_nan, a.softmax_dtype
    return layouts, mask, a.dtype, a.causal_prefix, *how


def _shapes(mask: ir.Value, sizes: Mapping[str, int]) -> Iterator[Hashable]:
    """Type, constant and shape of a mask and of all operands of its steps."""
    yield mask.dtype, scalar(mask), tuple(evaluated(size, sizes) for size in sizes_of(mask))
    if (node := last_step(mask)) is not None:
        yield node.op_type
        for part in node.inputs:
            if part is not None:
                yield from _shapes(part, sizes)
