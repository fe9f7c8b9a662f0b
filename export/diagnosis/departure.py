"""Whether an exported graph computes the same function as its module, and if not, at which tensor it first differs.

torch's exporter is a suspect like any other: it has dropped small numbers, frozen sizes and left dropout on. So module
and graph are both run in float64, where no rounding hides a fault, and checked against the parity budget. The exporter
gives the values of its graph the names that they have in the program of `torch.export`, by which the two are compared
tensor by tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from math import prod
from typing import Any

import numpy as np
import onnx_ir as ir
import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from attnforge.arrays import Array, is_floating, to_numpy
from attnforge.bundle import Case, Wrong
from attnforge.errors import BuildError, CaptureError, raised_as
from attnforge.export.diagnosis.rewrites import SAME, region_of
from attnforge.export.diagnosis.stages import line_of, module_of
from attnforge.export.diagnosis.trace import error_of
from attnforge.export.flops import run_cost
from attnforge.export.graphs.execute import Tensors, at_own_precision, in_float64, values_of, with_products
from attnforge.export.graphs.float64 import NoDoublePath
from attnforge.export.graphs.nodes import is_op
from attnforge.export.graphs.sizes import Unmeasurable, shape_at
from attnforge.export.room import most_alive
from attnforge.export.sources.torch_module import Captured, symbols_of
from attnforge.export.sources.widened import Float64
from attnforge.memory import available
from attnforge.numbers import scientific
from attnforge.runtime.cases import CHEAP, at, cases, make_inputs, sizes_at
from attnforge.runtime.parity.budget import judge
from attnforge.runtime.parity.comparison import Comparison

SHOWN = 4
"""Maximum number of the module's operators that are named for a wrong tensor."""


def departure(source: Captured) -> Wrong | None:
    """The first difference between the exported graph and the module, on inputs of small sizes; None if it is the same
    function. What a small input does not show, backends show in the check at the end of a deploy.

    Args:
        source: not modified.
    """
    for case in (_small(source), cases(source.inputs)[0]):
        with suppress(_NotRunError):
            if (wrong := _departure_at(source, case)) is not None:
                return wrong
            break
    for text, sizes in assumptions(source):
        with suppress(_NotRunError):
            if (wrong := _departure_at(source, at(source.inputs, sizes))) is None:
                continue
            given = ", ".join(f"{name} {size}" for name, size in sizes.items())
            evidence = f"the module's code branches on sizes, and torch.export assumes {text}: with {given}, "
            return Wrong(cause="export", stage="torch.export", evidence=f"{evidence}{wrong.evidence}")
    return None


class _NotRunError(Exception):
    """The module does not take the sizes of a case, or memory is short."""


def _departure_at(source: Captured, case: Case) -> Wrong | None:
    """The first difference on one case.

    Raises:
        _NotRunError: the case was not run.
    """
    if not _has_room(source.model, case):
        raise _NotRunError
    inputs = make_inputs(case, source.inputs, source.example)
    try:
        eager, exact = source.eager(inputs), Float64(source.module)(inputs)  # whose widened weights are not kept
    except CaptureError as error:  # integers that small sizes do not support; then the example is used
        raise _NotRunError from error
    truth = {name: to_numpy(name, value) for name, value in exact.items()}
    try:
        with raised_as(BuildError, f"the exported graph does not run with {_shapes(inputs)}", passing=(OSError,)):
            got, is_exact = _graph(source.model, inputs)
    except BuildError as error:  # such as a frozen size
        return Wrong(cause="export", stage="plain", evidence=str(error))
    # The graph's error may be twice eager's, because what the exporter computed ahead of time it computed at the
    # bundle's precision. No sum of a graph in float64 is rounded, so its floor is that of a single rounding.
    precision = replace(source.precision, floor=2 * source.precision.unit) if is_exact else source.precision
    limits = precision.with_own_limits
    for name, array in truth.items():
        comparison = judge(case, name, limits(got[name]), eager[name], limits(array), precision)
        if not comparison.passed and not comparison.overflowed:
            return _located(source, inputs, comparison)
    return None


def _small(source: Captured) -> Case:
    """A case of small sizes, all different, so that no softmax is over one score and no two axes are alike; of the
    smallest sizes if these would cost as much as the example."""
    low, opt, high = (sizes_at(source.inputs, bound) for bound in ("min", "opt", "max"))
    sizes = {s: min(max(size, low[s]), high[s]) for size, s in zip(count(3, 2), low, strict=False)}
    cost = run_cost(source.model)
    return at(source.inputs, sizes if cost(sizes) < max(cost(opt), CHEAP) else low)


def _has_room(model: ir.Model, case: Case) -> bool:
    """Whether half of the available memory suffices for a float64 run, in which attention stores its scores three
    times."""
    scores = [0]
    for node in model.graph:
        with suppress(Unmeasurable):
            if node.op_type == "Attention":
                query, key = (shape_at(node.inputs[i], case.sizes) for i in (0, 1))
                scores.append(prod(query[:-1]) * key[-2])
    weights = sum(v.const_value.size for v in model.graph.initializers.values() if v.const_value is not None)
    left = available()
    return left is None or 8 * (weights + most_alive(model, case.sizes) + 3 * max(scores)) <= left / 2


def _graph(model: ir.Model, inputs: Mapping[str, Array], names: Sequence[str] | None = None) -> tuple[Tensors, bool]:
    """Run the graph in float64 or, if it has an operator without a double kernel, at its own precision; return its
    outputs, or the named tensors, and whether they are in float64."""
    try:
        return in_float64(model, names, least_stays_least=True, runs_once=True)(inputs), True
    except NoDoublePath:
        return at_own_precision(with_products(model, names), names)(inputs), False


def _shapes(inputs: Mapping[str, Array]) -> str:
    return ", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items())


def _located(source: Captured, inputs: Mapping[str, Array], missed: Comparison) -> Wrong | None:
    """The first tensor in which a graph that misses the budget differs from the module; None if that is a constant
    which the bundle's precision rounds, because eager may add a number to 16-bit ones in fp32."""
    summary = f"{missed.output} of the exported graph differs from the module's with {_shapes(inputs)}: {missed.reason}"
    program = source.program
    if program is None:
        return Wrong(cause="export", stage="plain", evidence=summary, tensor=missed.output)
    outputs = zip(source.model.graph.outputs, program.graph_signature.user_outputs, strict=True)
    renamed = {name: str(value.name) for value, name in outputs}
    tensors = {name: to_numpy(name, value) for name, value in Float64(_Tensors(program))(inputs).items()}
    module = {renamed.get(name, name): tensor for name, tensor in tensors.items()}
    kept = [name for name, value in values_of(source.model).items() if value.uses() or value.is_graph_output()]
    names = [name for name in kept if name in module and is_floating(module[name])]
    graph, is_exact = _graph(source.model, inputs, names)
    limits = (source.precision.floor / 4, SAME) if is_exact else (source.precision.floor, source.precision.floor / 4)
    within = source.precision.with_own_limits
    off = {name: error_of(within(graph[name]), within(module[name])) for name in names}
    tensor = next((name for limit in limits for name in names if off[name] > limit), None)
    if tensor is None:
        evidence = f"{summary}; so does that of torch.export's program"
        return Wrong(cause="export", stage="torch.export", evidence=evidence)
    node = values_of(source.model)[tensor].producer()
    if node is None and np.array_equal(module[tensor].astype(source.precision.dtype), graph[tensor]):
        return None
    agreed = {name for name in names[: names.index(tensor)] if off[name] <= limits[-1]}
    nodes = {renamed.get(n.name, n.name): n for n in program.graph.nodes if n.op == "call_function"}
    way = _way(nodes[tensor], agreed, tensors)
    lost = [node for node in way if renamed.get(node.name, node.name) not in kept]
    region, _ = region_of(source.model, tensor, agreed)
    computed = ", ".join(node.op_type for node in region) or "has a constant"
    if any(is_op(node, "ArgMax", "ArgMin", "TopK") for node in region):
        computed += ", which may choose others of equal numbers"
    evidence = (
        f"in {'float64' if is_exact else source.precision.name}, {tensor} of the exported graph is "
        f"{scientific(off[tensor])} off the module's, although its operands agree: the module computes {_text(way)}, "
        f"the graph {computed}"
    )
    return Wrong(
        cause="export",
        stage="plain",
        evidence=f"{evidence}, without {_text(lost)}" if lost else evidence,
        tensor=tensor,
        operator=str(_operator(lost[-1] if lost else way[-1]).target),
        module=None if node is None else module_of(node),
        line=None if node is None else line_of(node),
    )


class _Tensors(nn.Module):
    """A program whose outputs are all tensors that it computes, by node name."""

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.inner = program.module(check_guards=False)

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        assert isinstance(self.inner, fx.GraphModule)
        interpreter = fx.Interpreter(self.inner, garbage_collect_values=False)
        interpreter.run(*inputs)
        results = {node: result for node, result in interpreter.env.items() if node.op == "call_function"}
        return {node.name: result for node, result in results.items() if isinstance(result, Tensor)}


def _way(node: fx.Node, agreed: Collection[str], tensors: Collection[str]) -> list[fx.Node]:
    """The operators that lead from tensors that agree to a node, in order."""
    way: dict[fx.Node, None] = {}
    todo = [node]
    while todo:
        current = todo.pop()
        if current.name in tensors and current not in way and (current is node or current.name not in agreed):
            way[current] = None
            todo += current.all_input_nodes
    return list(way)[::-1]


def _operator(node: fx.Node) -> fx.Node:
    """The node itself, or the operator of which it is one of several results."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _text(nodes: list[fx.Node]) -> str:
    """The last of these operators with their operands: `add = aten.add.Tensor(mean, 1e-08)`."""
    return ", ".join(f"{n.name} = {n.target}({', '.join(map(str, n.args))})" for n in nodes[-SHOWN:])


# --- sizes of which a program assumes something -----------------------------------------------------------------------

# Sizes of which a program of torch.export assumes something that its Dims do not say.
#
# Where a module's code branches on a size, the exporter keeps the branch that the example takes, and leaves out the
# check that sizes take it. What it assumes is left in the program: as ranges of sizes, and as comparisons that nothing
# uses.


MOST_SCANNED = 512
"""Number of sizes up to which all sizes of a dim are tried. Of a wider range, the smallest and the largest are, and
those at the numbers of the assumption, at their products, and at the sizes of other dims."""

MOST = 32
"""Maximum number of sizes at which a module is compared."""


def assumptions(source: Captured) -> list[tuple[str, dict[str, int]]]:
    """Return what the program assumes of sizes that the inputs' dims do not guarantee, such as `Eq(Mod(tokens, 4), 0)`,
    each with sizes of all dims for which that is not so, up to :data:`MOST`: for each, in order, the failing size that
    is nearest the example's, and the smallest. One dim has another size than the example."""
    if source.program is None:
        return []
    names = {s: name for s, name in symbols_of(source.program, source.inputs).items() if isinstance(s, sympy.Symbol)}
    low, opt, high = (sizes_at(source.inputs, bound) for bound in ("min", "opt", "max"))
    usual = {symbol: opt[name] for symbol, name in names.items()}
    found: list[tuple[str, dict[str, int]]] = []
    for condition in dict.fromkeys(_conditions(source)):
        if not condition.free_symbols <= names.keys():
            continue
        text = str(condition.subs({s: sympy.Symbol(name) for s, name in names.items()}))
        for symbol in sorted(condition.free_symbols, key=str):
            name = names[symbol]
            tried = _tried(condition, low[name], high[name], usual.values())
            failing = [size for size in tried if condition.subs({**usual, symbol: size}) == sympy.false]
            for size in sorted(failing, key=lambda size: abs(size - opt[name]))[:1] + failing[:1]:
                sizes = {**opt, name: size}
                if len(found) < MOST and sizes not in [known for _, known in found]:
                    found.append((text, sizes))
    return found


def _conditions(source: Captured) -> Iterator[Any]:
    """The program's comparisons of sizes that no operator uses, and the ranges of its symbols."""
    assert source.program is not None
    for symbol, bounds in source.program.range_constraints.items():
        yield from (symbol >= bounds.lower, symbol <= bounds.upper)
    for node in source.program.graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and not node.users and isinstance(value, torch.SymBool):
            yield value.node.expr


def _tried(condition: Any, low: int, high: int, usual: Collection[int]) -> list[int]:
    """The sizes of a dim to try, in order: see :data:`MOST_SCANNED`."""
    if high - low < MOST_SCANNED:
        return [*range(low, high + 1)]
    numbers = [abs(int(number)) for number in condition.atoms(sympy.Integer)]
    marks = {*numbers, *(a * b for a in numbers for b in numbers), *usual}
    sizes = {low + i for i in range(16)} | {mark + i for mark in marks for i in (-1, 0, 1)} | {high}
    return sorted(size for size in sizes if low <= size <= high)
