"""The one executor of ONNX graphs: any tensor of a graph, computed on ONNX Runtime's CPU.

A graph runs as it is, in float64, or at its own precision with 16-bit storage emulated. The three runs of one graph
have the same names, so what one operator does to an error can be told from what its inputs bring along. The backends of
:mod:`attnforge.runtime` run what is deployed, and are what these runs judge; so they share nothing with them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplemented_

from attnforge.arrays import Array, is_floating
from attnforge.errors import first_line
from attnforge.export.graphs.float64 import NoDoublePath, to_double
from attnforge.export.graphs.saving import save
from attnforge.export.graphs.types import FLOAT, FLOATS, round_results

Tensors = dict[str, Array]
"""Arrays by the names of tensors."""

GIVEN = "given:"
"""Prefix of the graph inputs that replace computed tensors."""


def open_session(model: ir.Model, *, optimised: bool = False) -> Any:
    """An `ort.InferenceSession` of `model` on the CPU, which logs nothing.

    The graph goes through a file, because protobuf holds 2 GiB: parameters beyond that lie in a file beside it.

    Args:
        model: is not touched.
        optimised: whether ONNX Runtime may rewrite the graph, as it does where the graph is deployed.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 4
    if not optimised:
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    with tempfile.TemporaryDirectory(prefix="attnforge-") as folder:
        file = Path(folder) / "model.onnx"
        save(model, file)
        return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


class Runner:
    """A graph, ready to run: from inputs by name to tensors by name. Nodes that these do not need are not run.

    NumPy has no bfloat16 that ONNX Runtime takes, so bfloat16 inputs and results are float32 here, which holds every
    bfloat16 number.

    Args:
        model: is not touched.
        names: of the tensors to compute; by default the outputs.
        given: names of tensors that the caller gives instead of the graph computing them.
        known_as: names in the graph of those tensors that have another name there.
        optimised: whether ONNX Runtime may rewrite the graph.
    """

    def __init__(
        self,
        model: ir.Model,
        names: Sequence[str] | None = None,
        given: Collection[str] = (),
        known_as: Mapping[str, str] | None = None,
        *,
        optimised: bool = False,
    ) -> None:
        model, known_as = model.clone(), known_as or {}
        values = values_of(model)
        names = [str(value.name) for value in model.graph.outputs] if names is None else names
        for name in given:
            _replace_by_input(model, values[known_as.get(name, name)], f"{GIVEN}{name}")
        wanted = {name: values[known_as.get(name, name)] for name in names}
        shown = {value: _as_output(model, value) for value in dict.fromkeys(wanted.values())}
        self._outputs = {name: str(shown[value].name) for name, value in wanted.items()}
        model.graph.outputs[:] = shown.values()
        for value in [value for value in model.graph.inputs if value.dtype == ir.DataType.BFLOAT16]:
            _widen_input(model, value)
        RemoveUnusedNodesPass()(model)
        self._dtypes = {str(v.name): v.dtype.numpy() for v in model.graph.inputs if v.dtype is not None}
        self._session = open_session(model, optimised=optimised)

    def __call__(self, feeds: Mapping[str, Array]) -> Tensors:
        """Compute the tensors.

        Args:
            feeds: the inputs and the tensors that are given, by name. Floating-point arrays are cast to the types of
                the graph; arrays that it does not take are left out.
        """
        arrays = {name: feeds[key] for name in self._dtypes if (key := name.removeprefix(GIVEN)) in feeds}
        arrays = {
            name: array.astype(self._dtypes[name], copy=False) if is_floating(array) else array
            for name, array in arrays.items()
        }
        wanted = list(dict.fromkeys(self._outputs.values()))
        results = dict(zip(wanted, self._session.run(wanted, arrays), strict=True))
        return {name: results[output] for name, output in self._outputs.items()}


def in_float64(
    model: ir.Model,
    names: Sequence[str] | None = None,
    given: Collection[str] = (),
    *,
    least_stays_least: bool = False,
) -> Runner:
    """`model` in float64.

    Args:
        model: is not touched.
        names: of the tensors to compute; by default the outputs.
        given: names of tensors that the caller gives: where all inputs of an operator are given, it works on them
            alone.
        least_stays_least: see :func:`~attnforge.export.graphs.types.retype`; else every number stays what it is.

    Raises:
        NoDoublePath: the graph has an operator that is not computed in double.
    """
    double = model.clone()
    if names is not None:
        values = values_of(double)
        double.graph.outputs[:] = [values[name] for name in names]  # an output keeps its name when it is written out
    to_double(double, least_stays_least=least_stays_least)
    try:
        return Runner(double, names, given)
    except NotImplemented_ as error:
        raise NoDoublePath(first_line(error)) from error


def at_own_precision(
    model: ir.Model,
    names: Sequence[str] | None = None,
    given: Collection[str] = (),
    unrounded: Collection[ir.Value] = (),
) -> Runner:
    """`model` at its own types, on a CPU that has few 16-bit kernels: each operator computes in float32 and its result
    is rounded to the type that it is stored in. 16-bit inputs and results are float32.

    Args:
        model: is not touched.
        names: of the tensors to compute; by default the outputs.
        given: names of tensors that the caller gives, as they are stored.
        unrounded: tensors that are never stored, because a fused kernel holds them in float32.
    """
    emulated = model.clone()
    names = [str(value.name) for value in model.graph.outputs] if names is None else names
    kept = {str(value.name) for value in unrounded}
    stored = round_results(emulated, [v for node in emulated.graph for v in node.outputs if v.name in kept])
    return Runner(emulated, names, given, stored)


def computed(model: ir.Model) -> list[str]:
    """Names of the floating-point tensors that `model` computes, in the order in which it does."""
    return [
        str(output.name)
        for node in model.graph
        if node.op_type != "Constant"
        for output in node.outputs
        if output.dtype in FLOATS and output.name
    ]


def values_of(model: ir.Model) -> dict[str, ir.Value]:
    """Every tensor of a graph by name: inputs, parameters, and results."""
    graph = model.graph
    results = (output for node in graph for output in node.outputs)
    return {str(value.name): value for value in (*graph.inputs, *graph.initializers.values(), *results)}


def wide(array: Array) -> Array:
    """A floating-point array in float64, any other as it is."""
    return array.astype(np.float64) if is_floating(array) else array


def _replace_by_input(model: ir.Model, value: ir.Value, name: str) -> None:
    """Let the users of `value` take a new input of the graph instead."""
    given = ir.Value(name=name, type=value.type, shape=value.shape)
    for user, index in list(value.uses()):
        user.replace_input_with(index, given)
    model.graph.inputs.append(given)


def _widen_input(model: ir.Model, value: ir.Value) -> None:
    """Let a bfloat16 input be float32, cast behind the input."""
    assert value.dtype is not None
    users = list(value.uses())
    cast = ir.node("Cast", [value], {"to": value.dtype.value}, name=f"{value.name}/narrowed")
    cast.outputs[0].name, cast.outputs[0].type = f"{cast.name}:0", value.type
    cast.outputs[0].shape, value.type = value.shape, ir.TensorType(FLOAT)
    for user, index in users:
        user.replace_input_with(index, cast.outputs[0])
    if model.graph.num_nodes():
        model.graph.insert_before(model.graph[0], cast)


def _as_output(model: ir.Model, value: ir.Value) -> ir.Value:
    """`value`, or a copy where it cannot be an output: parameters and inputs may not be, and no NumPy bfloat16 is."""
    is_bfloat16 = value.dtype == ir.DataType.BFLOAT16
    if value.producer() is not None and not is_bfloat16:
        return value
    copy = ir.node("Cast", [value], {"to": FLOAT.value}) if is_bfloat16 else ir.node("Identity", [value])
    copy.name = f"{value.name}/output"
    output = copy.outputs[0]
    output.name, output.shape = f"{copy.name}:0", value.shape
    output.type = ir.TensorType(FLOAT) if is_bfloat16 else value.type
    model.graph.append(copy)
    return output
