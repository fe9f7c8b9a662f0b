"""The executor of ONNX graphs: computes any tensor of a graph with ONNX Runtime on the CPU.

A graph runs as it is, in float64, or at its own precision with 16-bit storage emulated. The three runs of a graph use
the same tensor names, so that the error that an operator adds can be separated from that of its inputs. The backends of
:mod:`attnforge.runtime` run what is deployed and are judged by these runs, so they share no code with them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplemented_

from attnforge.arrays import Array, is_floating
from attnforge.atomic import temporary_folder
from attnforge.errors import first_line
from attnforge.export.graphs.build import read_instead
from attnforge.export.graphs.float64 import NoDoublePath, attention_as_products, to_double
from attnforge.export.graphs.saving import SHELVED, save
from attnforge.export.graphs.types import DOUBLE, FLOAT, FLOATS, LARGE, cast_input, cast_output, round_results
from attnforge.runtime.backends.onnxruntime import session_options

BFLOAT16 = ir.DataType.BFLOAT16

Tensors = dict[str, Array]
"""Arrays by the names of tensors."""


def open_session(model: ir.Model, *, optimised: bool = False) -> Any:
    """Open an `ort.InferenceSession` of `model` on the CPU, which logs nothing.

    The graph is passed in a file, and large weights in a second file next to it, which is mapped into memory.

    Args:
        model: is not changed.
        optimised: whether ONNX Runtime may rewrite the graph, as it does in deployment.
    """
    options = session_options()
    options.log_severity_level = 4
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with temporary_folder() as folder:
        file = Path(folder) / "model.onnx"
        save(model, file, SHELVED)
        return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


class Runner:
    """A graph that is ready to run: from inputs by name to outputs by name.

    NumPy has no bfloat16 that ONNX Runtime accepts, so bfloat16 inputs and outputs are float32 here, which represents
    every bfloat16 number.

    Args:
        model: owned by the runner, which changes it.
        names: names of the outputs, in order.
        optimised: whether ONNX Runtime may rewrite the graph.
    """

    def __init__(self, model: ir.Model, names: Sequence[str], *, optimised: bool = False) -> None:
        graph = model.graph
        for value in [value for value in graph.inputs if value.dtype == BFLOAT16]:
            cast_input(graph, value, outside=FLOAT, inside=BFLOAT16)
        for value in [value for value in graph.outputs if value.dtype == BFLOAT16]:
            cast_output(graph, value, FLOAT)
        self._names = list(names)
        self._dtypes = {str(v.name): v.dtype.numpy() for v in graph.inputs if v.dtype is not None}
        self._session = open_session(model, optimised=optimised)

    def __call__(self, feeds: Mapping[str, Array]) -> Tensors:
        """Run the graph.

        Args:
            feeds: inputs by name. Floating-point arrays are cast to the types of the graph; arrays that are not inputs
                are ignored.
        """
        given = ((name, feeds[name], dtype) for name, dtype in self._dtypes.items() if name in feeds)
        arrays = {name: a.astype(dtype, copy=False) if is_floating(a) else a for name, a, dtype in given}
        return dict(zip(self._names, self._session.run(None, arrays), strict=True))


def as_it_is(model: ir.Model, names: Sequence[str] | None = None, *, optimised: bool = False) -> Runner:
    """Run `model` in its own types, with the kernels that ONNX Runtime has for them.

    Args:
        model: is not changed.
        names: names of the tensors to compute; by default the outputs.
        optimised: whether ONNX Runtime may rewrite the graph.
    """
    names = _names(model, names)
    return Runner(part_of(model, names), names, optimised=optimised)


def in_float64(
    model: ir.Model,
    names: Sequence[str] | None = None,
    given: Collection[str] = (),
    *,
    least_stays_least: bool = False,
    runs_once: bool = False,
) -> Runner:
    """Run `model` in float64.

    Args:
        model: is not changed.
        names: names of the tensors to compute; by default the outputs.
        given: names of tensors that the caller supplies; an operator whose inputs are all given works on them alone.
        least_stays_least: see :func:`~attnforge.export.graphs.types.retype`; otherwise every number keeps its value.
        runs_once: whether large weights stay in fp32 and are cast in each run, so that no file of twice their size is
            written first.

    Raises:
        NoDoublePath: the graph has an operator that cannot be computed in float64.
    """
    names = _names(model, names)
    double = part_of(model, names, given)
    narrow = {name: value.const_value for name, value in double.graph.initializers.items()} if runs_once else {}
    to_double(double, least_stays_least=least_stays_least)
    for name, value in list(double.graph.initializers.items()):
        tensor = narrow.get(name)
        if tensor is not None and tensor.nbytes > LARGE and tensor.dtype == FLOAT and value.dtype == DOUBLE:
            value.const_value = tensor
            cast_input(double.graph, value, outside=FLOAT, inside=DOUBLE)
    try:
        return Runner(double, names)
    except NotImplemented_ as error:
        raise NoDoublePath(first_line(error)) from error


def with_products(model: ir.Model, names: Sequence[str] | None = None) -> ir.Model:
    """A copy of the part of `model` that computes some tensors, by default the outputs, with the attention operators
    decomposed that can be: ONNX Runtime's own do not take every mask."""
    part = part_of(model, _names(model, names))
    with suppress(NoDoublePath):
        attention_as_products(part)
    return part


def at_own_precision(
    model: ir.Model,
    names: Sequence[str] | None = None,
    given: Collection[str] = (),
    unrounded: Collection[ir.Value] = (),
) -> Runner:
    """Run `model` at its own precision on a CPU that has few 16-bit kernels: each operator computes in float32, and its
    result is rounded to the type that it is stored in. 16-bit inputs and results are float32.

    Args:
        model: is not changed.
        names: names of the tensors to compute; by default the outputs.
        given: names of tensors that the caller supplies, rounded as they are stored.
        unrounded: tensors that are never stored, because a kernel keeps them in float32; none of them is in `given`.
    """
    names = _names(model, names)
    emulated = part_of(model, names, given)
    kept = {str(value.name) for value in unrounded}
    round_results(emulated, [value for node in emulated.graph for value in node.outputs if value.name in kept])
    return Runner(emulated, names)


def wide(array: Array) -> Array:
    """Cast a floating-point array to float64; return any other array unchanged."""
    return array.astype(np.float64) if is_floating(array) else array


def _names(model: ir.Model, names: Sequence[str] | None) -> list[str]:
    return list(dict.fromkeys([str(value.name) for value in model.graph.outputs] if names is None else names))


# --- parts of a graph -------------------------------------------------------------------------------------------------

# Tensors of a graph by name, and the part of a graph that computes given tensors.


def computed(model: ir.Model) -> list[str]:
    """Names of the floating-point tensors that `model` computes, in graph order."""
    return [
        str(output.name)
        for node in model.graph
        if node.op_type != "Constant"
        for output in node.outputs
        if output.dtype in FLOATS and output.name
    ]


def values_of(model: ir.Model) -> dict[str, ir.Value]:
    """Every tensor of a graph by name: inputs, weights and results."""
    return ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)


def part_of(model: ir.Model, names: Sequence[str], given: Collection[str] = ()) -> ir.Model:
    """A copy of `model` that computes given tensors, with only the nodes, weights and inputs that they need.

    Args:
        model: is not changed; its weights are shared.
        names: names of the tensors, which are the outputs of the part in this order. A tensor that a node computes
            keeps its name, unless it is in `given` too: then the input has that name.
        given: names of tensors that are inputs of the part.
    """
    part = model.clone()
    graph, values = part.graph, values_of(part)
    for name in given:
        value = values[name]
        if value.is_graph_input():
            continue
        source = ir.Value(name=name, type=value.type, shape=value.shape)
        value.name = f"{name}/computed"
        read_instead(value, source)
        graph.inputs.append(source)
    graph.outputs[:] = [_as_output(graph, values[name]) for name in names]
    RemoveUnusedNodesPass()(part)
    graph.inputs[:] = [value for value in graph.inputs if value.uses()]
    return part


def _as_output(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """`value`, or an Identity of an input or weight, which cannot be an output itself."""
    if value.producer() is not None:
        return value
    output = ir.Value(name=f"{value.name}/output:0", type=value.type, shape=value.shape)
    graph.append(ir.node("Identity", [value], outputs=[output], name=f"{value.name}/output"))
    return output
