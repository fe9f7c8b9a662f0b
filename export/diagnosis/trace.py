"""The error of every tensor of a graph, and how much of it the inputs of the operator explain.

For a tensor `y = f(x)`: `y` is what is stored at the graph's own precision, `y₆₄` the same with everything in float64,
and `f₆₄(x)` the operator in float64 on its inputs as they are stored. The error is `‖y − y₆₄‖ / ‖y₆₄‖`. The inputs
explain `‖f₆₄(x) − y₆₄‖`, which divided by the error of the inputs is the amplification; the operator's own part is
`‖y − f₆₄(x)‖`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.bundle import Wrong
from attnforge.export.diagnosis.stages import line_of, module_of
from attnforge.export.graphs.execute import Tensors, at_own_precision, computed, in_float64, values_of, wide
from attnforge.export.graphs.nodes import upstream
from attnforge.runtime.parity.budget import relative_error


@dataclass(frozen=True)
class TensorErrors:
    """A tensor and its errors, relative to its norm in float64, over the elements that are finite there.

    Attributes:
        name: name of the tensor.
        node: the node that computes it.
        largest: the largest magnitude in float64.
        limit: the largest magnitude that its type can represent.
        unit: the unit roundoff of its type.
        lost: how many elements are not finite although those of float64 are.
        zeroed: share of the elements that are zero, and below the range of the type in float64 on the same inputs.
        error: the error of what is stored; infinite if elements are lost.
        error_in: the largest error of an input.
        explained: the part of the error that the inputs explain.
        own: the part that the operator and the rounding of its result add.
    """

    name: str
    node: ir.Node
    largest: float
    limit: float
    unit: float
    lost: int
    zeroed: float
    error: float
    error_in: float
    explained: float
    own: float

    @property
    def amplification(self) -> float:
        """The factor by which the operator amplifies the error of its inputs."""
        return self.explained / self.error_in if self.error_in > 0 else 0.0


@dataclass(frozen=True)
class Trace:
    """One run of a graph, tensor by tensor.

    Attributes:
        model: the graph.
        feeds: its inputs by name.
        tensors: every floating-point tensor, in execution order.
        exact: their values in float64.
        stored: their values as they are stored, in float64.
        explained: the result of each operator in float64 on its inputs as they are stored.
        outputs: names of the outputs, or for integer outputs of the tensors that they are computed from.
        error: the largest error of an output.
    """

    model: ir.Model
    feeds: Mapping[str, Array]
    tensors: list[TensorErrors]
    exact: Tensors
    stored: Tensors
    explained: Tensors
    outputs: list[str]
    error: float

    def error_with_exact(self, name: str) -> float:
        """The error of the outputs if the tensor `name` is replaced by float64's."""
        if name in self.outputs:
            return 0.0
        results = at_own_precision(self.model, self.outputs, [name])({**self.feeds, name: self.exact[name]})
        return max(error_of(results[output], self.exact[output]) for output in self.outputs)


def trace(
    model: ir.Model,
    feeds: Mapping[str, Array],
    unrounded: Collection[ir.Value] = (),
    exact_model: ir.Model | None = None,
) -> Trace:
    """Run a graph in float64, at its own precision, and operator by operator in float64 on what is stored.

    Args:
        model: not modified.
        feeds: inputs by name.
        unrounded: tensors that are never stored in 16 bits.
        exact_model: the graph to compute in float64, with tensors of the same names; by default `model`.

    Raises:
        NoDoublePath: the graph has an operator without a double kernel.
    """
    names, values = computed(model), values_of(model)
    exact_model = model if exact_model is None else exact_model
    exact = in_float64(exact_model, names)(feeds)
    stored = {name: wide(array) for name, array in at_own_precision(model, names, unrounded=unrounded)(feeds).items()}
    used = [name for name in names if values[name].uses()]
    explained = in_float64(exact_model, names, used)({**{name: wide(array) for name, array in feeds.items()}, **stored})
    tensors: dict[str, TensorErrors] = {}
    for name in names:
        node = values[name].producer()
        assert node is not None
        errors_in = [tensors[str(v.name)].error for v in node.inputs if v is not None and v.name in tensors]
        error_in = max(errors_in, default=0.0)
        tensors[name] = _errors_of(values[name], node, exact[name], stored[name], explained[name], error_in)
    ends: Iterable[ir.Value] = model.graph.outputs
    if not any(value.name in tensors for value in ends):  # then the last floating-point tensors before them
        ends = upstream(ends, lambda value: value.name in tensors)
    outputs = list(dict.fromkeys(str(value.name) for value in ends if value.name in tensors))
    error = max((tensors[name].error for name in outputs), default=0.0)
    return Trace(model, feeds, list(tensors.values()), exact, stored, explained, outputs, error)


def error_of(got: Array, exact: Array) -> float:
    """Relative error over the elements that are finite in float64; infinite if one of these is lost, and 1 if the
    shape is another."""
    if got.shape != exact.shape:
        return 1.0
    finite = np.isfinite(exact)
    got, exact = got[finite].astype(np.float64), exact[finite].astype(np.float64)
    return relative_error(got, exact) if np.isfinite(got).all() else np.inf


def _errors_of(
    value: ir.Value, node: ir.Node, exact: Array, stored: Array, explained: Array, error_in: float
) -> TensorErrors:
    assert value.dtype is not None
    limits = ml_dtypes.finfo(value.dtype.numpy())  # type: ignore[no-untyped-call]
    finite = np.isfinite(exact)
    exact, stored, explained = exact[finite], stored[finite], explained[finite]
    norm = float(np.linalg.norm(exact)) or 1.0
    alive = np.isfinite(explained) & (explained != 0)
    flushed = alive & (stored == 0) & (np.abs(explained) < float(limits.smallest_normal))
    return TensorErrors(
        name=str(value.name),
        node=node,
        largest=float(np.max(np.abs(exact), initial=0.0)),
        limit=float(limits.max),
        unit=float(limits.eps) / 2,
        lost=int((~np.isfinite(stored)).sum()),
        zeroed=float(flushed.sum() / max(int(alive.sum()), 1)),
        error=error_of(stored, exact),
        error_in=error_in,
        explained=_distance(explained, exact) / norm,
        own=_distance(stored, explained) / norm,
    )


def _distance(a: Array, b: Array) -> float:
    """`‖a − b‖`, infinite if that is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        difference = a - b
    return float(np.linalg.norm(difference)) if np.isfinite(difference).all() else np.inf


# --- findings ---------------------------------------------------------------------------------------------------------

# The result of a diagnosis: the first wrong step of a deployment, and its cause.


Cause = Literal[
    "overflow", "underflow", "norm", "cancellation", "softmax", "conditioning", "accumulation", "clipping",
    "outlier channel", "saturation", "quantisation", "operator", "export", "rewrite", "reference", "rounding",
]  # fmt: skip

COSTS = ("rounding", "quantisation")
"""Causes that are nothing but the cost of a precision."""


class Finding(Wrong):
    """The first wrong step of a deployment, and its cause.

    Attributes:
        cause: `export`: the graph is a different function from the module; `rewrite`: a graph is a different function
            from the one that it was made from; otherwise an effect of the precision:
            `overflow`, `underflow`, `norm` (in the squares of a norm), `cancellation`, `softmax` (scores so large that
            their rounding decides), `conditioning` (a function that is steep there), `accumulation`, `clipping`
            (numbers beyond a quantised range), `outlier channel` (one that takes up a range), `operator` (an operator
            computes something else), `saturation` (sums of 8-bit products, in a backend), `reference` (the reference
            that the bundle was checked against is not this graph), or `rounding` or `quantisation`: only the cost of
            the precision.
        stage: the graph or the backend that is wrong; `eager` for the effect of the precision on the model as written.
        tensor, operator, module, line: where; None if no single tensor is responsible.
        evidence: the numbers that prove it.
        error_without: the final error if this tensor alone is exact.
        rule: for a rewrite, what was rewritten.
        reproduction: files that reproduce it.
    """

    cause: Cause
    stage: str = "eager"
    error_without: float | None = None
    rule: str | None = None
    reproduction: list[str] = []

    @classmethod
    def at(
        cls,
        tensor: TensorErrors,
        cause: Cause,
        evidence: str,
        *,
        stage: str = "eager",
        module: str | None = None,
        error_without: float | None = None,
    ) -> Finding:
        """A finding at a tensor.

        Args:
            tensor: the tensor that is wrong.
            cause: cause of the error.
            evidence: the numbers that prove it.
            stage: the graph or backend that is wrong.
            module: the tensor's module, if its node does not say.
            error_without: the final error if this tensor alone is exact; None if that was not tried.
        """
        return cls(
            cause=cause,
            stage=stage,
            evidence=evidence,
            tensor=tensor.name,
            operator=tensor.node.op_type,
            module=module or module_of(tensor.node),
            line=line_of(tensor.node),
            error_without=finite(error_without),
        )


def finite(number: float | None) -> float | None:
    """A finite number, or else None, which JSON can represent."""
    return None if number is None or not np.isfinite(number) else float(number)
