"""A decoder's step for OpenVINO, which knows no TensorScatter and no Attention of grouped heads on four dims."""

from __future__ import annotations

from typing import Any

import numpy as np


def add_to(core: Any) -> None:
    """Let a core read the two operators of a step.

    Args:
        core: an `openvino.Core`, which reads one step.
    """
    from openvino.frontend.onnx import ConversionExtension

    step = _Step()
    for name, write in (("TensorScatter", step.scattered), ("Attention", step.attended)):
        core.add_extension(ConversionExtension(name, write))


class _Step:
    """Writes the two operators. Attention reads the places of the cache up to the last one that any sample has filled,
    which TensorScatter before it tells."""

    def __init__(self) -> None:
        from openvino import opset15

        self._ops: Any = opset15
        self._end: Any = None

    def scattered(self, node: Any) -> Any:
        """A cache `(batch, heads, places, size)` with new rows behind those that each sample has."""
        ops = self._ops
        cache, new, past = (node.get_input(i) for i in range(3))
        shape = ops.shape_of(new, "i64")
        count = ops.gather(shape, _ints(2), _ints(0))
        rows = ops.range(_ints(0), count, _ints(1), "i64")
        places = ops.add(ops.unsqueeze(past, _ints([1, 2, 3])), ops.unsqueeze(rows, _ints([0, 1, 3])))
        self._end = ops.unsqueeze(ops.add(ops.reduce_max(past, _ints([0]), False), count), _ints([0]))
        return ops.scatter_elements_update(cache, ops.broadcast(places, shape), new, _ints(2)).outputs()

    def attended(self, node: Any) -> Any:
        """Attention of `(batch, heads, tokens, size)`. Queries that share keys are rows of one head."""
        ops = self._ops
        query, *rest = (node.get_input(i) for i in range(4))
        key, value, mask = (
            ops.slice(x, _ints([0]), self._end, _ints([1]), _ints([axis]))
            for x, axis in zip(rest, (2, 2, 3), strict=True)
        )
        _, shared, _, size = (dim.get_length() if dim.is_static else 0 for dim in rest[0].get_partial_shape())
        shape = ops.shape_of(query, "i64")
        groups = ops.divide(ops.gather(shape, _ints([1]), _ints(0)), _ints([shared]))
        query = ops.reshape(query, _ints([0, shared, -1, size]), True)
        if rest[2].get_partial_shape()[1] == 1:
            mask = ops.tile(mask, ops.concat([_ints([1, 1]), groups, _ints([1])], 0))
        else:
            mask = ops.reshape(mask, ops.concat([_ints([0, shared, -1]), self._end], 0), True)
        scale = ops.convert_like(ops.constant(node.get_attribute("scale", 0.0), np.float32), query)
        if cap := node.get_attribute("softcap", 0.0):
            result = self._capped(query, key, value, mask, scale, cap)
        else:
            result = ops.scaled_dot_product_attention(query, key, value, mask, scale, False)
        size_v = ops.gather(ops.shape_of(value, "i64"), _ints([3]), _ints(0))
        return ops.reshape(
            result, ops.concat([ops.gather(shape, _ints([0, 1, 2]), _ints(0)), size_v], 0), False
        ).outputs()

    def _capped(self, query: Any, key: Any, value: Any, mask: Any, scale: Any, cap: float) -> Any:
        ops = self._ops
        scores = ops.multiply(ops.matmul(query, key, False, True), scale)
        limit, hidden = (ops.convert_like(ops.constant(x, np.float32), scores) for x in (cap, -np.inf))
        scores = ops.multiply(ops.tanh(ops.divide(scores, limit)), limit)
        is_boolean = mask.get_element_type().get_type_name() == "boolean"
        scores = ops.select(mask, scores, hidden) if is_boolean else ops.add(scores, mask)
        return ops.matmul(ops.softmax(scores, -1), value, False, False)


def _ints(numbers: int | list[int]) -> Any:
    from openvino import opset15

    return opset15.constant(numbers, np.int64)
