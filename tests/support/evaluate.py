"""Evaluate ONNX graphs in float64 with NumPy: a reference without rounding, independent of every backend.

Casts between floating-point types have no effect here; constants keep the precision of the graph's types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from attnforge.arrays import Array
from attnforge.export.attention.canonical import MASK_STEP
from attnforge.export.graphs.attention import SILENT_ROWS

Tensor = NDArray[Any]


def evaluate(model: ir.Model, inputs: Mapping[str, Array]) -> dict[str, Tensor]:
    """Return the outputs of `model`, by name, floating-point ones in float64.

    Raises:
        NotImplementedError: the graph has an unsupported operator.
    """
    known: dict[ir.Value | None, Tensor] = {None: None}  # type: ignore[dict-item]
    for value in model.graph.inputs:
        known[value] = _exact(inputs[value.name or ""])
    for value in model.graph.initializers.values():
        assert value.const_value is not None
        known[value] = _exact(value.const_value.numpy())
    with np.errstate(all="ignore"):
        for node in model.graph:
            function = _OPERATORS.get(node.op_type)
            if function is None:
                raise NotImplementedError(node.op_type)
            operands = [known[v] for v in node.inputs]
            result: Any
            if node.op_type == "Attention" and len(operands) > 3:
                result = _attention(node, operands[0], operands[1], operands[2], _mask_steps(node.inputs[3], known))
            else:
                result = function(node, *operands)
            several: list[Tensor] = result if isinstance(result, list) else [result]
            known.update(zip(node.outputs, map(np.asarray, several), strict=False))
    return {value.name or "": known[value] for value in model.graph.outputs}


def _exact(array: Array) -> Tensor:
    if array.dtype == bool or np.issubdtype(array.dtype, np.integer):
        return array
    return array.astype(np.float64)


def _cast(node: ir.Node, x: Tensor) -> Tensor:
    dtype = ir.DataType(node.attributes["to"].as_int())
    return x.astype(np.float64 if dtype.is_floating_point() else dtype.numpy())


def _softmax(x: Tensor, axis: int) -> Tensor:
    exponentials = np.exp(x - x.max(axis, keepdims=True))
    return exponentials / exponentials.sum(axis, keepdims=True)  # type: ignore[no-any-return]


def _reshape(node: ir.Node, x: Tensor, shape: Tensor) -> Tensor:
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(shape.tolist())])


def _flatten(node: ir.Node, x: Tensor) -> Tensor:
    axis = node.attributes.get_int("axis", 1)
    return x.reshape(int(np.prod(x.shape[:axis])), -1) if x.size else x


def _transpose(node: ir.Node, x: Tensor) -> Tensor:
    perm = node.attributes.get_ints("perm")
    return x.transpose(perm) if perm is not None else x.T


def _unsqueeze(node: ir.Node, x: Tensor, axes: Tensor) -> Tensor:
    return np.expand_dims(x, tuple(axes.tolist()))


def _squeeze(node: ir.Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(axes.tolist()))


def _expand(node: ir.Node, x: Tensor, shape: Tensor) -> Tensor:
    return x * np.ones(shape, x.dtype) if x.dtype != bool else x & np.ones(shape, bool)


def _slice(
    node: ir.Node, x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None
) -> Tensor:
    index = [slice(None)] * x.ndim
    over = range(len(starts)) if axes is None else axes.tolist()
    by = [1] * len(starts) if steps is None else steps.tolist()
    for axis, start, end, step in zip(over, starts.tolist(), ends.tolist(), by, strict=True):
        index[axis] = slice(start, end, step)
    return x[tuple(index)]


def _split(node: ir.Node, x: Tensor, sizes: Tensor | None = None) -> list[Tensor]:
    axis = node.attributes.get_int("axis", 0)
    if sizes is None:
        return np.split(x, node.attributes["num_outputs"].as_int(), axis)
    return np.split(x, np.cumsum(sizes)[:-1].tolist(), axis)


def _shape(node: ir.Node, x: Tensor) -> Tensor:
    start, end = node.attributes.get_int("start", 0), node.attributes.get_int("end", None)
    return np.array(x.shape[start:end], np.int64)


def _gemm(node: ir.Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.T if node.attributes.get_int("transA", 0) else a
    b = b.T if node.attributes.get_int("transB", 0) else b
    product = node.attributes.get_float("alpha", 1.0) * (a @ b)
    return product if c is None else product + node.attributes.get_float("beta", 1.0) * c


def _einsum(node: ir.Node, *operands: Tensor) -> Tensor:
    return np.einsum(node.attributes["equation"].as_string(), *operands)  # type: ignore[no-any-return]


def _trilu(node: ir.Node, x: Tensor, k: Tensor | None = None) -> Tensor:
    offset = 0 if k is None else int(k.reshape(()))
    return np.triu(x, offset) if node.attributes.get_int("upper", 1) else np.tril(x, offset)


def _reduce(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def reduce(node: ir.Node, x: Tensor, axes: Tensor | None = None) -> Tensor:
        over = None if axes is None else tuple(axes.tolist())
        return function(x, axis=over, keepdims=bool(node.attributes.get_int("keepdims", 1)))  # type: ignore[no-any-return]

    return reduce


def _pad(node: ir.Node, x: Tensor, pads: Tensor) -> Tensor:
    return np.pad(x, list(zip(pads[: x.ndim].tolist(), pads[x.ndim :].tolist(), strict=True)))


Step = tuple[str, Tensor, Tensor | None]
"""`bias`, the values to add, None; or `fill`, where the scores are kept, and the number that replaces the others."""


def _mask_steps(mask: ir.Value | None, known: Mapping[ir.Value | None, Tensor]) -> list[Step]:
    """Return the steps of a canonical node's mask, in order.

    See :data:`attnforge.export.attention.canonicalize.MASK_STEP`.
    """
    node = mask.producer() if mask is not None else None
    kind = node.metadata_props.get(MASK_STEP) if node is not None else None
    if node is None or kind is None:
        return (
            [("fill", known[mask], np.array(-np.inf))] if known[mask].dtype == bool else [("bias", known[mask], None)]
        )
    if kind == "bias":
        return [*_mask_steps(node.inputs[0], known), ("bias", known[node.inputs[1]], None)]
    allowed, before, number = node.inputs
    return [*_mask_steps(before, known), ("fill", known[allowed], known[number])]


def _attention(node: ir.Node, query: Tensor, key: Tensor, value: Tensor, steps: Sequence[Step] = ()) -> Tensor:
    """Compute the canonical node on four dims: see :mod:`attnforge.export.attention.canonicalize`."""
    group = query.shape[1] // key.shape[1]
    key, value = (np.repeat(x, group, axis=1) for x in (key, value))
    scale = node.attributes.get_float("scale", query.shape[-1] ** -0.5)
    scores = scale * (query @ key.swapaxes(2, 3))
    if cap := node.attributes.get_float("softcap", 0.0):
        scores = cap * np.tanh(scores / cap)
    if node.attributes.get_int("is_causal", 0):
        scores = np.where(np.tri(*scores.shape[2:], dtype=np.bool_), scores, -np.inf)
    for kind, operand, number in steps:
        if kind == "bias":
            scores = scores + operand
        else:
            assert number is not None
            scores = np.where(operand, scores, number)
    weights = _softmax(scores, -1)
    if node.metadata_props.get(SILENT_ROWS) != "nan":
        weights = np.where((scores == -np.inf).all(-1, keepdims=True), 0.0, weights)
    return weights @ value


def _multi_head_attention(node: ir.Node, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """com.microsoft::MultiHeadAttention without a mask: `(B, n, H·d)` each."""
    heads = node.attributes["num_heads"].as_int()
    q, k, v = (x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2) for x in (query, key, value))
    result = _softmax(node.attributes["scale"].as_float() * (q @ k.swapaxes(2, 3)), -1) @ v
    return result.swapaxes(1, 2).reshape(*query.shape[:2], -1)


def _numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda node, *operands: function(*operands)


_ELEMENTWISE: dict[str, Callable[..., Any]] = {
    "Abs": np.abs,
    "Add": np.add,
    "And": np.logical_and,
    "Div": lambda a, b: a // b if np.issubdtype(a.dtype, np.integer) else a / b,
    "Equal": np.equal,
    "Exp": np.exp,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "IsNaN": np.isnan,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "MatMul": np.matmul,
    "Max": np.maximum,
    "Mod": np.mod,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Relu": lambda x: np.maximum(x, 0.0),
    "Sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Tanh": np.tanh,
    "Where": np.where,
}

_OPERATORS: dict[str, Callable[..., Any]] = {
    "Attention": _attention,
    "Cast": _cast,
    "Concat": lambda node, *xs: np.concatenate(xs, node.attributes["axis"].as_int()),
    "Constant": lambda node: _exact(node.attributes["value"].as_tensor().numpy()),
    "Dropout": lambda node, x, *_: x,
    "Einsum": _einsum,
    "Expand": _expand,
    "Flatten": _flatten,
    "Gather": lambda node, x, i: np.take(x, i, node.attributes.get_int("axis", 0)),
    "Gemm": _gemm,
    "Identity": lambda node, x: x,
    "MultiHeadAttention": _multi_head_attention,
    "Pad": _pad,
    "Range": _numpy(np.arange),
    "ReduceMax": _reduce(np.max),
    "ReduceSum": _reduce(np.sum),
    "Reshape": _reshape,
    "Shape": _shape,
    "Slice": _slice,
    "Softmax": lambda node, x: _softmax(x, node.attributes.get_int("axis", -1)),
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _numpy(np.tile),
    "Transpose": _transpose,
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    **{name: _numpy(function) for name, function in _ELEMENTWISE.items()},
}
