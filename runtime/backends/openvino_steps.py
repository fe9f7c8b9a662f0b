"""A decoder step for OpenVINO, which supports neither TensorScatter nor Attention of grouped heads on four dims.

OpenVINO copies an output of a graph that is its input as well, which for caches means all of their slots at every step.
So the step that it runs returns only the new rows, and the caches are written on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from openvino import opset15
from openvino.frontend.onnx import ConversionExtension

from attnforge.arrays import Array
from attnforge.bundle import NEXT

ops: Any = opset15


def read_step(core: Any, model: Any) -> Any:
    """A step that returns only the new rows of caches, `(batch, heads, tokens, size)`.

    Args:
        core: an `openvino.Core` that reads no other model.
        model: the canonical graph: a file, or its content.
    """
    step = _StepConversion()
    for name, write in (("TensorScatter", step.scattered), ("Attention", step.attended)):
        core.add_extension(ConversionExtension(name, write))
    read = core.read_model(model)
    for result in read.get_results():
        name = result.input_value(0).get_any_name()
        if name.endswith(NEXT):
            joined = result.input_value(0)
            rows = joined.get_node().input_value(1)
            joined.get_tensor().set_names(set())
            rows.get_tensor().add_names({name})
            result.input(0).replace_source_output(rows)
    read.validate_nodes_and_infer_types()
    return read


def write_rows(caches: Mapping[str, Array], rows: Mapping[str, Array], past: Array) -> None:
    """Write new rows, `(batch, heads, tokens, size)`, into caches, `(batch, heads, capacity, size)`, after the tokens
    that each sample has."""
    for name, cache in caches.items():
        for of_sample, new, first in zip(cache, rows[name], past.tolist(), strict=True):
            of_sample[:, first : first + new.shape[1]] = new


class _StepConversion:
    """Converts the two operators. Attention reads the slots of the cache up to any sample's last token, followed by the
    new rows, without knowing their order: the mask of their positions is rearranged with them."""

    _past: Any
    _most: Any
    _new: Any
    _slots: int

    def scattered(self, node: Any) -> Any:
        """The filled part of a cache `(batch, heads, capacity, size)`, followed by the new rows."""
        cache, new, past = (node.get_input(i) for i in range(3))
        rows = ops.range(0, ops.gather(ops.shape_of(new, "i64"), 2, 0), 1, "i64")
        self._slots = cache.get_partial_shape()[2].get_length()
        self._past, self._most = past, ops.reduce_max(past, [0], True)
        self._new = ops.add(ops.unsqueeze(past, [1]), rows)
        return ops.concat([ops.slice(cache, [0], self._most, [1], [2]), new], 2).outputs()

    def _seen(self, mask: Any) -> Any:
        """A mask over all slots `(batch, heads, tokens, capacity)` as one over the filled part and the new rows. Before
        them stay columns for attention sinks."""
        count = mask.get_partial_shape()[3].get_length() - self._slots
        sinks = []
        if count:
            sinks = [ops.slice(mask, [0], [count], [1], [3])]
            mask = ops.slice(mask, [count], [2**62], [1], [3])
        filled = ops.slice(mask, [0], self._most, [1], [3])
        slots = ops.range(0, ops.squeeze(self._most, [0]), 1, "i64")
        past = ops.less(slots, ops.unsqueeze(self._past, [1, 2, 3]))  # later slots have outdated rows
        if _is_boolean(mask):
            filled = ops.logical_and(filled, past)
        else:
            filled = ops.select(past, filled, ops.convert_like(ops.constant(-np.inf, np.float32), mask))
        return ops.concat([*sinks, filled, ops.gather(mask, self._new, 3, 1)], 3)

    def attended(self, node: Any) -> Any:
        """Attention of `(batch, heads, tokens, size)`. Queries that share keys are rows of one head."""
        if node.get_input(1).get_partial_shape()[2].is_static:
            return self._over_fixed_keys(node)
        query, key, value, mask = (node.get_input(i) for i in range(4))
        _, shared, _, size = (dim.get_length() if dim.is_static else 0 for dim in key.get_partial_shape())
        shape = ops.shape_of(query, "i64")
        groups = ops.divide(ops.gather(shape, [1], 0), [shared])
        query = ops.reshape(query, [0, shared, -1, size], True)
        seen = self._seen(mask)
        if mask.get_partial_shape()[1] == 1:
            mask = ops.tile(seen, ops.concat([[1, 1], groups, [1]], 0))
        else:
            mask = ops.reshape(seen, [0, shared, -1, 0], True)
        result = self._result(node, query, key, value, mask)
        return ops.reshape(result, ops.concat([[0], ops.gather(shape, [1, 2], 0), [0]], 0), True).outputs()

    def _over_fixed_keys(self, node: Any) -> Any:
        """Attention to keys that are no tokens, and are in no cache."""
        query, key, value = (node.get_input(i) for i in range(3))
        heads, shared = (x.get_partial_shape()[1] for x in (query, key))
        if heads.is_static and shared != heads:
            each = heads.get_length() // shared.get_length()
            of_key = [head // each for head in range(heads.get_length())]
            key, value = (ops.gather(x, of_key, 1) for x in (key, value))
        none = ops.convert_like(ops.constant(0.0, np.float32), query)
        mask = node.get_input(3) if node.get_input_size() > 3 else none
        return self._result(node, query, key, value, mask).outputs()

    def _result(self, node: Any, query: Any, key: Any, value: Any, mask: Any) -> Any:
        scale = ops.convert_like(ops.constant(node.get_attribute("scale", 0.0), np.float32), query)
        if not (cap := node.get_attribute("softcap", 0.0)):
            return ops.scaled_dot_product_attention(query, key, value, mask, scale, False)
        scores = ops.multiply(ops.matmul(query, key, False, True), scale)
        limit, hidden = (ops.convert_like(ops.constant(x, np.float32), scores) for x in (cap, -np.inf))
        scores = ops.multiply(ops.tanh(ops.divide(scores, limit)), limit)
        scores = ops.select(mask, scores, hidden) if _is_boolean(mask) else ops.add(scores, mask)
        return ops.matmul(ops.softmax(scores, -1), value, False, False)


def _is_boolean(mask: Any) -> bool:
    return bool(mask.get_element_type().get_type_name() == "boolean")
