"""An ONNX graph as it was given: the reference of what is deployed from it."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
from onnx.reference import ReferenceEvaluator

from attnforge.arrays import Array, is_floating
from attnforge.errors import BuildError
from attnforge.export.graphs.float64 import NoDoublePath, to_double
from attnforge.export.graphs.saving import save
from attnforge.export.graphs.types import DOUBLE, FLOATS, LOW, retype, round_results
from attnforge.precision import Precision

ESTRANGED = 0.25
"""Relative error on the example from which a graph and its float64 are not one function, at any precision."""


class Original:
    """Runs a graph unoptimised on the CPU, at the bundle's precision and in float64.

    At 16 bits every operator computes in fp32 and its result is rounded to 16 bits, which is how ONNX Runtime itself
    runs the fp16 operators that it has no kernels for; for bf16 it has next to none.

    Attributes:
        model: the graph.

    Args:
        model: of any opset, at the bundle's precision.
        precision: of the bundle.
    """

    def __init__(self, model: ir.Model, precision: Precision) -> None:
        self.model = model
        self._precision = precision
        self._outputs = [str(value.name) for value in model.graph.outputs]
        self._low = {str(v.name): v.dtype.numpy() for v in model.graph.outputs if v.dtype in LOW}
        self._folder = tempfile.TemporaryDirectory(prefix="attnforge-")

    def eager(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs at the bundle's precision; 16-bit ones as float32, which holds every one of them."""
        results = self._eager.run(None, {name: _wider(array, np.float32) for name, array in inputs.items()})
        named = dict(zip(self._outputs, results, strict=True))
        return {
            name: a.astype(self._low[name]).astype(np.float32) if name in self._low else a for name, a in named.items()
        }

    def exact(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs in float64, of weights widened from the bundle's precision."""
        feeds = {name: _wider(array, np.float64) for name, array in inputs.items()}
        return dict(zip(self._outputs, self._exact(feeds), strict=True))

    def check(self, example: Mapping[str, Array]) -> None:
        """See that float64 computes what the graph does: a backend may err twice as much as the graph itself, so where
        these are two functions any would pass.

        Raises:
            BuildError: they are, or neither can be run.
        """
        eager, exact = self.eager(example), self.exact(example)
        for name, truth in exact.items():
            finite = np.isfinite(truth) & np.isfinite(eager[name])
            given, truth = eager[name][finite].astype(np.float64), truth[finite].astype(np.float64)
            if (error := float(np.linalg.norm(given - truth))) > ESTRANGED * float(np.linalg.norm(truth)):
                raise BuildError(
                    f"output {name!r} of the graph at {self._precision.name} is {error:.1e} off float64, whose norm is "
                    f"{np.linalg.norm(truth):.1e}: that is no reference; deploy at a higher precision"
                )

    @cached_property
    def _eager(self) -> ort.InferenceSession:
        model = self.model.clone()
        if self._precision.is_low:
            round_results(model)
        try:
            return self._session(model, "eager.onnx")
        except Exception as error:
            raise BuildError(f"ONNX Runtime cannot run the graph as it was given: {_first(error)}") from error

    @cached_property
    def _exact(self) -> Any:
        """A function from float64 inputs to float64 outputs: ONNX Runtime, or else onnx's own reference."""
        model = self.model.clone()
        try:
            to_double(model)
            session = self._session(model, "float64.onnx")
            return lambda feeds: session.run(None, feeds)
        except NoDoublePath as error:
            reason = str(error)
        except Exception as error:  # an operator without a double kernel, which ONNX Runtime names
            reason = _first(error)
        try:
            evaluator = self._evaluator()
        except Exception as error:
            raise BuildError(
                f"no float64 reference: ONNX Runtime has no double path ({reason}), nor has onnx.reference "
                f"({_first(error)})"
            ) from error
        return lambda feeds: _evaluate(evaluator, feeds, reason)

    def _evaluator(self) -> ReferenceEvaluator:
        model = self.model.clone()
        retype(model, [t for t in FLOATS if t != DOUBLE], DOUBLE)
        return ReferenceEvaluator(ir.to_proto(model))

    def _session(self, model: ir.Model, name: str) -> ort.InferenceSession:
        file = Path(self._folder.name) / name
        save(model, file)
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])


def _evaluate(evaluator: ReferenceEvaluator, feeds: dict[str, Array], reason: str) -> list[Array]:
    """Run onnx's reference, and see that no operator fell back to fp32 on the way."""
    try:
        results: Any = evaluator.run(None, feeds, intermediate=True)
    except Exception as error:
        raise BuildError(f"no float64 reference: {reason}; onnx.reference: {_first(error)}") from error
    fp32 = {name for name, a in results.items() if isinstance(a, np.ndarray) and a.dtype == np.float32}
    for node in evaluator.nodes_:
        if not fp32.isdisjoint(node.output) and any(
            isinstance(a := results.get(name), np.ndarray) and a.dtype == np.float64 for name in node.input
        ):
            raise BuildError(f"no float64 reference: {reason}; onnx.reference computes {node.op_type} in fp32")
    return [np.asarray(results[name]) for name in evaluator.output_names]


def _wider(array: Array, dtype: Any) -> Array:
    """Floats as `dtype`; of what is wider or no float, the array itself."""
    return array.astype(dtype) if is_floating(array) and array.dtype.itemsize < np.dtype(dtype).itemsize else array


def _first(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
