"""Graphs with every tensor in sight: run in float64, at their own precision with 16-bit storage emulated, and operator
by operator on another run's tensors.

The three runs of one graph have the same names, so what one operator does to an error can be told from what its inputs
bring along.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnxruntime.capi.onnxruntime_pybind11_state import NotImplemented as NotImplemented_

from attnforge.arrays import Array, is_floating
from attnforge.errors import first_line
from attnforge.export.graphs.float64 import NoDoublePath, to_double
from attnforge.export.graphs.saving import save
from attnforge.export.graphs.types import FLOATS, LOW, round_results

Tensors = dict[str, Array]


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
    """Every tensor of a graph by name: inputs, weights, and what is computed."""
    graph = model.graph
    computed = (output for node in graph for output in node.outputs)
    return {str(value.name): value for value in (*graph.inputs, *graph.initializers.values(), *computed)}


def _output(model: ir.Model, value: ir.Value) -> ir.Value:
    """What may be an output in the place of `value`: weights and inputs may not be themselves."""
    if value.producer() is not None:
        return value
    same = ir.node("Identity", [value], name=f"{value.name}/output")
    same.outputs[0].name, same.outputs[0].type = f"{value.name}/output:0", value.type
    same.outputs[0].shape = value.shape
    model.graph.append(same)
    return same.outputs[0]


def _name(value: ir.Value) -> str:
    return str(value.name)


class Runner:
    """A graph, ready to run unoptimised on ONNX Runtime's CPU, from inputs by name to some of its tensors by name.

    Args:
        model: is changed, and of no use afterwards.
        names: of the tensors to give.
        given: of tensors that are not computed but given, like inputs.
        known_as: under which names tensors are found, where not under their own.
    """

    def __init__(
        self,
        model: ir.Model,
        names: Sequence[str],
        given: Collection[str] = (),
        known_as: Mapping[str, str] | None = None,
    ) -> None:
        values = values_of(model)
        self._outputs = {name: (known_as or {}).get(name, name) for name in names}
        for name in given:
            _give(model, values[(known_as or {}).get(name, name)], name)
        model.graph.outputs[:] = [_output(model, values[i]) for i in dict.fromkeys(self._outputs.values())]
        self._inner = dict(zip(dict.fromkeys(self._outputs.values()), map(_name, model.graph.outputs), strict=True))
        self._dtypes = {str(v.name): v.dtype for v in model.graph.inputs}
        with tempfile.TemporaryDirectory(prefix="attnforge-") as folder:
            file = Path(folder) / "model.onnx"
            save(model, file)
            options = ort.SessionOptions()
            options.log_severity_level = 4
            options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            self._session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])

    def __call__(self, feeds: Mapping[str, Array]) -> Tensors:
        """The tensors. Of the inputs only those that the graph has are taken, in its own types."""
        taken = {
            name: feeds[name].astype(dtype.numpy()) if is_floating(feeds[name]) else feeds[name]
            for name, dtype in self._dtypes.items()
            if dtype is not None and (name in feeds or not name.startswith(GIVEN))
        } | {
            name: feeds[name.removeprefix(GIVEN)].astype(dtype.numpy())
            for name, dtype in self._dtypes.items()
            if dtype is not None and name.startswith(GIVEN)
        }
        found = dict(zip(self._inner, self._session.run(list(self._inner.values()), taken), strict=True))
        return {name: found[under] for name, under in self._outputs.items()}


GIVEN = "given:"


def _give(model: ir.Model, value: ir.Value, name: str) -> None:
    """Let the users of `value` take a new input of the graph instead."""
    given = ir.Value(name=f"{GIVEN}{name}", type=value.type, shape=value.shape)
    for user, index in list(value.uses()):
        user.replace_input_with(index, given)
    model.graph.inputs.append(given)


def in_float64(
    model: ir.Model, names: Sequence[str], given: Collection[str] = (), *, least_stays_least: bool = False
) -> Runner:
    """`model` in float64.

    Args:
        model: is not touched.
        names: of the tensors to give.
        given: of tensors that are given, not computed: with all but the first operators' inputs given, each operator
            works on them alone.
        least_stays_least: see :func:`~attnforge.export.graphs.types.retype`; else all numbers are as they are.

    Raises:
        NoDoublePath: an operator that is not computed in double.
    """
    double = model.clone()
    values = values_of(double)
    double.graph.outputs[:] = [values[name] for name in names]  # so that each keeps its name when it is written out
    to_double(double, least_stays_least=least_stays_least)
    try:
        return Runner(double, names, given)
    except NotImplemented_ as error:
        raise NoDoublePath(first_line(error)) from error


def at_own_precision(
    model: ir.Model, names: Sequence[str], given: Collection[str] = (), unrounded: Collection[ir.Value] = ()
) -> Runner:
    """`model` at its own types: each operator computes in fp32 and its result is rounded to what it is stored in.

    Args:
        model: is not touched.
        names: of the tensors to give.
        given: of tensors that are given, as they are stored.
        unrounded: of the tensors that are never stored, for a fused kernel holds them in fp32.
    """
    emulated = model.clone()
    kept = {str(value.name) for value in unrounded}
    stored = round_results(emulated, [v for node in emulated.graph for v in node.outputs if v.name in kept])
    return Runner(emulated, names, given, stored)


def wide(array: Array) -> Array:
    """Floats as float64."""
    return array.astype(np.float64) if is_floating(array) else array


def held_by_fused_kernels(model: ir.Model, softmaxes: Collection[str]) -> list[ir.Value]:
    """The scores of the sites whose Softmax has one of these names, from the product to the softmax: a fused kernel
    holds them in fp32, and rounds the weights alone."""
    found: list[ir.Value] = []
    for node in model.graph:
        if node.op_type != "Softmax" or node.name not in softmaxes:
            continue
        value = node.inputs[0]
        while value is not None and (made_by := value.producer()) is not None:
            if value.dtype in LOW:
                found.append(value)
            if made_by.op_type == "MatMul":
                break
            scores = 1 if made_by.op_type == "Where" else 0
            value = made_by.inputs[scores]
    return found
