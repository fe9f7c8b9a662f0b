"""Rewrite the attention operators of exporters and other tools to the canonical node (:mod:`.canonical`)."""

from __future__ import annotations

import onnx_ir as ir

from attnforge.export.attention.canonical import attention_node
from attnforge.export.attention.masking import all_of, masks_nothing, within
from attnforge.export.graphs.attention import NotAttention, Reading, merged_heads, reach
from attnforge.export.graphs.attention_operators import read, scale_of
from attnforge.export.graphs.build import Builder, broadcast_like, insert, like, replace_value
from attnforge.export.graphs.nodes import is_used, optional_input
from attnforge.export.graphs.sizes import ONE, sizes_of

BOOL = ir.DataType.BOOL


def is_standard(node: ir.Node) -> bool:
    """Whether an Attention node is canonical already, apart from its scale."""
    query, key, value, mask, *others = (optional_input(node, i) for i in range(7))
    return (
        node.domain == ""
        and all(v is not None and v.shape is not None and len(v.shape) == 4 for v in (query, key, value))
        and _is_whole(mask, key)
        and not (mask is not None and node.attributes.get_int("is_causal"))
        and all(v is None for v in others)
        and not any(is_used(output) for output in node.outputs[1:])
        and not {"left_window_size", "right_window_size"} & set(node.attributes)
    )


def _is_whole(mask: ir.Value | None, key: ir.Value | None) -> bool:
    """Whether a mask has four dims, the last as long as the keys or one, and masks something."""
    if mask is None or key is None:
        return True
    if _is_idle(mask):
        return False
    return mask.shape is not None and len(mask.shape) == 4 and sizes_of(mask)[3] in (ONE, sizes_of(key)[2])


def _is_idle(mask: ir.Value) -> bool:
    return masks_nothing(mask, attends=mask.dtype == BOOL)


def standard(graph: ir.Graph, node: ir.Node, name: str) -> None:
    """Replace an operator of :data:`~attnforge.export.graphs.attention_operators.READERS` by a canonical node called
    `name`; an Attention that is one already gets its scale and name.

    Raises:
        NotAttention: the operator does something that no canonical node does.
        LayoutError: the shape of an operand is not known.
    """
    if is_standard(node):
        node.attributes["scale"] = ir.AttrFloat32("scale", scale_of(node, node.inputs[0]))
        node.name = name
        return

    def build(op: Builder) -> tuple[ir.Value, ...]:
        reading = read(op, node)
        if reading.in_buffer:
            raise NotAttention(f"a {node.op_type} with a cache, whose buffer may be longer than the keys in it")
        return _emit(op, reading, name), *reading.present

    for old, new in zip(node.outputs, insert(graph, node, build, stem=f"{name}/operands"), strict=False):
        if old is node.outputs[0] or is_used(old):
            like(old, new)
            replace_value(old, new)


def _emit(op: Builder, reading: Reading, name: str) -> ir.Value:
    if reading.sinks is not None:
        raise NotAttention("a GroupQueryAttention with attention sinks")
    masks = [mask for mask in reading.masks if not _is_idle(mask)]
    # With a mask, causality becomes part of it: both together may mask a row fully that neither masks alone.
    plain_causal = reading.is_causal and reading.offset is None and not reading.is_windowed and not masks
    if (reading.is_causal and not plain_causal) or reading.is_windowed:
        masks.append(all_of(op, reach(op, reading)))
    result = attention_node(
        op, name, reading.query, reading.key, reading.value, _joined(op, masks),
        scale=reading.scale, is_causal=plain_causal, softcap=reading.softcap,
        softmax_precision=reading.softmax_precision,
        silent_rows_are_nan=reading.silent_rows_are_nan and bool(masks),
    )  # fmt: skip
    return merged_heads(op, result) if reading.packed_output else result


def _joined(op: Builder, masks: list[ir.Value]) -> ir.Value | None:
    """Combine masks into one mask; None if there are none."""
    conditions = [mask for mask in masks if mask.dtype == BOOL]
    mask = None
    for bias in (mask for mask in masks if mask.dtype != BOOL):
        mask = bias if mask is None else broadcast_like(op.Add(mask, bias), mask, bias)
    return within(op, all_of(op, conditions), mask) if conditions else mask
