"""An ONNX graph as it is in its file: the reference for the model that is deployed from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx_ir.passes import common

from attnforge.arrays import Array, is_floating
from attnforge.errors import BuildError, CaptureError, UsageError, first_line, raised_as, shortened
from attnforge.export.graphs.execute import Runner, as_it_is, at_own_precision, in_float64, wide
from attnforge.export.graphs.float64 import FIRST_OPSET, NoDoublePath
from attnforge.export.graphs.nodes import is_op, is_used, optional_input
from attnforge.export.graphs.types import DOUBLE, FLOAT, FLOATS, LOW, retype
from attnforge.precision import Precision

CONVERSION = 2.0**-10
"""Relative to the largest number, how far the conversion of a graph's opset may change an output; in general it keeps
every bit."""


def has_scores(node: ir.Node) -> bool:
    """Whether the scores of an ai.onnx Attention are used."""
    return is_op(node, "Attention") and len(node.outputs) > 3 and is_used(node.outputs[3])


def is_unlike_standard(node: ir.Node) -> bool:
    """Whether ONNX Runtime 1.31 computes an ai.onnx Attention differently from the standard: it does not know windows,
    refuses a mask that is shorter than the keys, and its masked scores are the least number instead of minus infinity.
    """
    return is_op(node, "Attention") and bool(
        {"left_window_size", "right_window_size"} & set(node.attributes)
        or (optional_input(node, 3) is not None and optional_input(node, 6) is not None)
        or (has_scores(node) and node.attributes.get_int("qk_matmul_output_mode", 0) == 2)
    )


def as_standard(model: ir.Model, is_replaced: Callable[[ir.Node], bool]) -> None:
    """Replace operators of ai.onnx by the functions that the standard defines them by, in place. (ONNX's own inliner
    fails at nodes that omit an input.)"""
    for i, node in enumerate(list(filter(is_replaced, model.graph))):
        schema: Any = onnx.defs.get_schema(node.op_type, model.opset_imports[""])
        types = [b"" if value is None else ir.to_proto(value).type.SerializeToString() for value in node.inputs]
        body = schema.get_context_dependent_function_with_opset_version(
            schema.since_version, ir.to_proto(node).SerializeToString(), types
        )
        proto = onnx.FunctionProto.FromString(body)
        proto.domain, proto.name = "attnforge", f"{node.op_type}{i}"
        proto.output[:] = proto.output[: len(node.outputs)]
        for name in set(proto.output).difference(*(part.output for part in proto.node)):  # which the node omits
            proto.node.append(onnx.helper.make_node("Constant", [], [name], value_int=0))
        function = ir.from_proto(proto)
        model.functions[function.identifier()] = function
        node.domain, node.op_type, node.version = proto.domain, proto.name, None
        model.opset_imports[proto.domain] = 1
    common.InlinePass()(model)


class Original:
    """Runs a graph unoptimised on the CPU, at the bundle's precision and in float64.

    At 16 bits, every operator computes in fp32 and its result is rounded to 16 bits, as ONNX Runtime itself runs the
    fp16 operators that it has no kernels for; for bf16 it has almost none.

    Attributes:
        model: the graph.

    Args:
        model: a graph of any opset, at the bundle's precision.
        precision: the precision of the bundle.
    """

    def __init__(self, model: ir.Model, precision: Precision) -> None:
        self.model = model
        self._precision = precision

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs at the bundle's precision; 16-bit outputs as float32, which represents them exactly.

        Raises:
            CaptureError: the graph does not take inputs of these sizes or numbers, although its dims allow them.
        """
        return _run(self._eager, inputs)

    def exact(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs in float64, with weights widened from the bundle's precision."""
        return _run(self._exact, inputs)

    @cached_property
    def _eager(self) -> Runner:
        with raised_as(BuildError, "ONNX Runtime cannot run the graph as it was given"):
            return (at_own_precision if self._precision.is_low else as_it_is)(self.model)

    @cached_property
    def _exact(self) -> Callable[[Mapping[str, Array]], dict[str, Array]]:
        """A function from float64 inputs to float64 outputs, by ONNX Runtime or else onnx's reference evaluator."""
        try:
            return in_float64(self.model, least_stays_least=True)
        except NoDoublePath as error:
            reason = str(error)
        except Exception as error:  # ONNX Runtime raises errors of several kinds for a graph that it refuses
            reason = first_line(error)
        with raised_as(BuildError, f"no float64 reference: ONNX Runtime: {reason}; onnx.reference"):
            model = self.model.clone()
            retype(model, [t for t in FLOATS if t != DOUBLE], DOUBLE)
            evaluator = ReferenceEvaluator(ir.to_proto(model))
        return lambda inputs: _evaluate(evaluator, inputs, reason)


def check_converted(given: ir.Model, converted: ir.Model, inputs: Mapping[str, Array]) -> None:
    """Check on some inputs that a graph which cannot be the reference itself computes the same after its conversion. Of
    both, what is in 16 bits is computed in fp32. The graphs are changed.

    Raises:
        BuildError: ONNX Runtime does not run the graph as it was given.
        UsageError: the conversion changed what it computes.
    """
    for model in (given, converted):
        retype(model, LOW, FLOAT)
    with raised_as(BuildError, "ONNX Runtime cannot run the graph as it was given"):
        before, after = as_it_is(given), as_it_is(converted)
    results = _run(after, inputs)
    for name, array in _run(before, inputs).items():
        expected, got = wide(array), wide(results[name])
        within = CONVERSION * np.abs(expected[np.isfinite(expected)]).max(initial=0) if is_floating(array) else 0
        if expected.shape != got.shape or not np.allclose(got, expected, rtol=0, atol=within, equal_nan=True):
            raise UsageError(
                f"onnx's converter changes the output {name!r} of the graph, of opset {given.opset_imports['']}; "
                f"export it with opset {FIRST_OPSET} or later"
            )


def _run(runner: Callable[[Mapping[str, Array]], dict[str, Array]], inputs: Mapping[str, Array]) -> dict[str, Array]:
    shapes = shortened(", ".join(f"{name} {list(array.shape)}" for name, array in inputs.items()))
    failed = f"the graph does not run with {shapes}, which its dims allow"
    with raised_as(CaptureError, failed, "; give ranges that it takes"):
        return runner(inputs)


def _evaluate(evaluator: ReferenceEvaluator, inputs: Mapping[str, Array], reason: str) -> dict[str, Array]:
    """Run onnx's reference evaluator, and check that no operator fell back to fp32."""
    feeds = {name: wide(array) for name, array in inputs.items()}
    with raised_as(BuildError, f"no float64 reference: ONNX Runtime: {reason}; onnx.reference"):
        results: Any = evaluator.run(None, feeds, intermediate=True)
    fp32 = {name for name, a in results.items() if isinstance(a, np.ndarray) and a.dtype == np.float32}
    for node in evaluator.nodes_:
        if not fp32.isdisjoint(node.output) and any(
            isinstance(a := results.get(name), np.ndarray) and a.dtype == np.float64 for name in node.input
        ):
            raise BuildError(f"no float64 reference: {reason}; onnx.reference computes {node.op_type} in fp32")
    return {name: np.asarray(results[name]) for name in evaluator.output_names}
