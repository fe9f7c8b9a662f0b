"""What every tensor's error is, and how much of it its inputs explain.

Of a tensor `y = f(x)`: `y₆₄` where everything is float64, `y` as it is stored at the graph's own precision, and
`f₆₄(x)`, the operator in float64 on its inputs as they are stored. Its error is `‖y − y₆₄‖ / ‖y₆₄‖`; its inputs explain
`‖f₆₄(x) − y₆₄‖`, which by the error that they have is the amplification; `‖y − f₆₄(x)‖` is the operator's own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.arrays import Array
from attnforge.export.graphs.execute import Tensors, at_own_precision, in_float64, wide
from attnforge.export.graphs.parts import computed
from attnforge.export.graphs.types import FLOATS


@dataclass(frozen=True)
class Measured:
    """A tensor and its errors, relative to its norm in float64, over its numbers that are finite there.

    Attributes:
        node: that computes it.
        largest: the largest magnitude in float64; `limit` that of its type.
        unit: the unit roundoff of its type.
        lost: how many numbers are not finite where float64's are.
        zeroed: share of the numbers that are zero where they are not in float64 on the same inputs.
        error: of what is stored; infinite where numbers are lost.
        error_in: the largest error of an input.
        explained: what the inputs explain of the error.
        own: what the operator and the rounding of its result add.
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
        """By how much the operator makes the error of its inputs larger."""
        return self.explained / self.error_in if self.error_in > 0 else 0.0


@dataclass(frozen=True)
class Run:
    """One run of a graph, tensor by tensor.

    Attributes:
        tensors: in the order in which they are computed.
        exact, stored, explained: their numbers: in float64, as stored, in float64 on inputs as stored.
        outputs: the graph's, or where these are whole numbers the tensors that they are made of.
        error: the largest of the outputs'.
    """

    tensors: list[Measured]
    exact: Tensors
    stored: Tensors
    explained: Tensors
    outputs: list[str]
    error: float


def measure(model: ir.Model, feeds: Mapping[str, Array], unrounded: Collection[ir.Value] = ()) -> Run:
    """Run `model` on `feeds` in all three ways; what is `unrounded` is never stored in 16 bits.

    Raises:
        NoDoublePath: an operator that is not computed in double.
    """
    names = computed(model)
    exact = in_float64(model, names)(feeds)
    stored = {name: wide(array) for name, array in at_own_precision(model, names, unrounded=unrounded)(feeds).items()}
    used = [name for name in names if _value(model, name).uses()]
    explained = in_float64(model, names, used)({**{n: wide(a) for n, a in feeds.items()}, **stored})
    found: dict[str, Measured] = {}
    for node in model.graph:
        for output in node.outputs:
            if node.op_type == "Constant" or output.dtype not in FLOATS or not output.name:
                continue
            name = output.name
            inputs = [found[str(v.name)].error for v in node.inputs if v is not None and v.name in found]
            found[name] = _measured(output, node, exact[name], stored[name], explained[name], max(inputs, default=0.0))
    outputs = _outputs(model, found)
    error = max((found[name].error for name in outputs), default=0.0)
    return Run(list(found.values()), exact, stored, explained, outputs, error)


def _outputs(model: ir.Model, found: Mapping[str, Measured]) -> list[str]:
    """The floating-point outputs, or else the last floating-point tensors before the others."""
    outputs: dict[str, None] = {str(v.name): None for v in model.graph.outputs if v.name in found}
    todo = [] if outputs else list(model.graph.outputs)
    while todo:
        value = todo.pop()
        if value.name in found:
            outputs[str(value.name)] = None
        elif (node := value.producer()) is not None:
            todo += [v for v in node.inputs if v is not None]
    return list(outputs)


def _value(model: ir.Model, name: str) -> ir.Value:
    return next(v for node in model.graph for v in node.outputs if v.name == name)


def _measured(
    value: ir.Value, node: ir.Node, exact: Array, stored: Array, explained: Array, error_in: float
) -> Measured:
    assert value.dtype is not None
    limits = ml_dtypes.finfo(value.dtype.numpy())  # type: ignore[no-untyped-call]
    finite = np.isfinite(exact)
    lost = int((finite & ~np.isfinite(stored)).sum())
    exact, stored, explained = exact[finite], stored[finite], explained[finite]
    norm = float(np.linalg.norm(exact)) or 1.0
    alive = np.isfinite(explained) & (explained != 0)
    return Measured(
        name=str(value.name),
        node=node,
        largest=float(np.max(np.abs(exact), initial=0.0)),
        limit=float(limits.max),
        unit=float(limits.eps) / 2,
        lost=lost,
        zeroed=float((alive & (stored == 0)).sum() / max(int(alive.sum()), 1)),
        error=np.inf if lost else float(np.linalg.norm(stored - exact)) / norm,
        error_in=error_in,
        explained=_off(explained, exact) / norm,
        own=_off(stored, explained) / norm,
    )


def _off(one: Array, other: Array) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        difference = one - other
    return float(np.linalg.norm(difference)) if np.isfinite(difference).all() else np.inf
