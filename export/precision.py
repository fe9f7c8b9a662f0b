"""Types of a whole graph: 16-bit storage widened to fp32 arithmetic where a backend has no 16-bit kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.export.layout import like

FLOAT = ir.DataType.FLOAT
LOW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def widen(model: ir.Model) -> bool:
    """Let `model` compute in fp32 what it computes in fp16 or bf16, in place. Inputs and outputs keep their types.

    The weights' values stay what they were, rounded to 16 bits; only what is computed from them is rounded less.

    Returns:
        whether there was anything to widen.
    """
    graph = model.graph
    boundary = [v for v in (*graph.inputs, *graph.outputs) if v.dtype in LOW]
    if not boundary and not any(v.dtype in LOW for v in graph.initializers.values()):
        return False
    outputs = {id(v): (v.name, v.dtype) for v in graph.outputs if v.dtype in LOW}
    for value in list(graph.initializers.values()):
        if value.dtype in LOW and value.const_value is not None:
            value.const_value = _widened(value.const_value)
            value.type = ir.TensorType(FLOAT)
    for node in graph:
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in LOW:
                node.attributes[name] = ir.AttrTensor(name, _widened(attribute.value))
        if node.op_type in ("Cast", "RandomNormalLike", "RandomUniformLike", "EyeLike"):
            for name in ("to", "dtype"):
                if node.attributes.get_int(name, 0) in [t.value for t in LOW]:
                    node.attributes[name] = ir.AttrInt64(name, FLOAT.value)
        for value in node.outputs:
            if value.dtype in LOW:
                value.type = ir.TensorType(FLOAT)
                if value.const_value is not None:
                    value.const_value = _widened(value.const_value)
    for source in [v for v in graph.inputs if v.dtype in LOW]:
        users = list(source.uses())
        cast = ir.node("Cast", [source], {"to": FLOAT.value}, name=f"{source.name}/widened")
        cast.outputs[0].name = f"{source.name}/fp32"
        like(cast.outputs[0], source, FLOAT)
        for node, index in users:
            node.replace_input_with(index, cast.outputs[0])
        first = next(iter(graph))
        graph.insert_before(first, cast)
    for i, result in enumerate(list(graph.outputs)):
        if id(result) not in outputs:
            continue
        outer, dtype = outputs[id(result)]
        assert outer is not None and dtype is not None
        cast = ir.node("Cast", [result], {"to": dtype.value}, name=f"{outer}/narrowed")
        cast.outputs[0].name, result.name = outer, f"{outer}/fp32"
        like(cast.outputs[0], result, dtype)
        graph.outputs[i] = cast.outputs[0]
        graph.append(cast)
    return True


def _widened(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """`tensor` in fp32. A lone number that is the least of its type becomes the least of fp32: it stands for minus
    infinity, and must swallow whatever it is added to in the wider type too."""
    numbers = tensor.numpy().astype("float32")
    if numbers.size == 1 and numbers.reshape(()) == float(ml_dtypes.finfo(tensor.dtype.numpy()).min):  # type: ignore[no-untyped-call]
        numbers = np.full_like(numbers, np.finfo(np.float32).min)
    return ir.tensor(numbers, name=tensor.name)
