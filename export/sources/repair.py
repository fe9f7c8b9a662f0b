"""Simplify graphs of exporters without changing their numbers, and repair violations of the ONNX standard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions, pattern
from onnxscript.rewriter.rules import common as rules

from attnforge.arrays import Array
from attnforge.export.graphs.build import Builder, cast, constant, dims_of, insert, like, replace_value, typed
from attnforge.export.graphs.nodes import constant_of, input_of, inputs_of, is_op, maker_of, optional_input
from attnforge.export.graphs.sizes import ONE, sizes_of
from attnforge.export.graphs.types import LOW
from attnforge.export.sources.shapes import dims_as_multiplied

FLOAT, FUSED = ir.DataType.FLOAT, "FusedMatMul"

LEAST_BYTES = 1024
"""Minimum size of a weight that is shared."""

ROUNDS = 2
"""Rounds of folding constants and applying rules, as many as torch's exporter runs by default."""


def _neutral(op_type: str, number: int, *, commutes: bool) -> Sequence[rewriter.RewriteRule]:
    """Rules that drop an operator whose second operand is exactly its neutral element."""

    def target(op: Any, x: Any) -> Any:
        return getattr(op, op_type)(x, pattern.Constant(number, rel_tol=0, abs_tol=0))

    rule = rewriter.RewriteRule(target, lambda op, x, **_: op.Identity(x))
    return rule.commute() if commutes else [rule]


_RULES = [
    *_neutral("Mul", 1, commutes=True),
    *_neutral("Add", 0, commutes=True),
    *_neutral("Sub", 0, commutes=False),
    *_neutral("Div", 1, commutes=False),
    *(
        getattr(rules, f"{name}_rule")
        for name in (
            *("dropout_zero", "dropout_inference", "two_reshapes_matmul_reshape", "one_reshape_matmul_reshape"),
            *("cast_constant_of_shape", "cast_constant_of_shape_without_value", "collapse_slice", "collapse_slice2"),
            *("materialize_reshape_shape", "min_min", "max_max", "min_max", "max_min", "successive_clip_relu"),
            *("successive_relu_clip", "successive_relu", "successive_clip", "cast_cast", "no_op_cast", "no_op_expand"),
            *("flatten_to_reshape", "reshape_reshape", "slice_split", "no_op_transpose", "transpose_transpose"),
            *("unsqueeze_unsqueeze", "squeeze_reshape_1d", "no_op_dynamic_scatter_nd", "no_op_static_scatter_nd"),
            *("normalize_pad_format_conv", "fuse_pad_into_conv", "fuse_batchnorm_into_conv"),
            *("fuse_batchnorm_into_conv_transpose", "fuse_batchnorm_into_gemm", "remove_optional_bias_from_conv"),
            *("remove_optional_bias_from_conv_transpose", "remove_optional_bias_from_gemm"),
        )
    ),
    *rules.expand_before_binary_op_rules,
]


def optimise(model: ir.Model) -> None:
    """Fold constants and simplify a graph of torch's exporter, in place.

    This does what `torch.onnx.export(optimize=True)` does, except for four of its rules: onnxscript treats a number
    within 1e-8 of 0 as 0 and within 1e-5 of 1 as 1, so the exporter drops the `+ 1e-8` of a norm and a factor of
    1.000001 (torch 2.13, onnxscript 0.7).
    """
    common.InlinePass()(model)
    common.NameFixPass()(model)  # an output that is folded to a constant may have a weight's name
    for _ in range(ROUNDS):
        optimizer.fold_constants(model, onnx_shape_inference=True)
        with _rules_by_operator():
            rewriter.rewrite(model, _RULES)
    _keep_types(model.graph)
    optimizer.optimize(model, num_iterations=0)  # only what follows its rounds: constants and expressions are shared
    with _rules_by_operator():
        onnx_fusions.fuse(model)
    for node in list(model.graph):
        types = {input_of(node, i).dtype for i in range(2)} if is_op(node, "RMSNormalization") else set()
        is_mixed = len(types) == 2 and types < {FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
        if is_mixed or (is_op(node, "Where") and node.outputs[0].dtype == ir.DataType.BOOL):
            write = partial(_in_one_type if is_mixed else _either, node=node)
            replace_value(node.outputs[0], insert(model.graph, node, write))
            model.graph.remove(node, safe=True)


def _in_one_type(op: Builder, node: ir.Node) -> ir.Value:
    """A norm in float32 whose input or scale is in 16 bits. The standard allows two types, and onnxscript 0.7 fuses the
    casts between them; ONNX Runtime 1.31 has no kernel for two on the CPU, nor for bfloat16 and float32 on CUDA."""
    x, scale = (cast(op, input_of(node, i), FLOAT) for i in range(2))
    result = like(op.op("RMSNormalization", [x, scale], node.attributes), node.outputs[0], FLOAT)
    return cast(op, result, input_of(node, 1).dtype or FLOAT)


def _either(op: Builder, node: ir.Node) -> ir.Value:
    """A Where of Booleans, of which ONNX Runtime 1.31 has no kernel on the CPU, by operators of logic."""
    condition, if_true, if_false = inputs_of(node)
    result = op.Or(op.And(condition, if_true), op.And(op.Not(condition), if_false))
    return like(result, node.outputs[0], ir.DataType.BOOL)


def _keep_types(graph: ir.Graph) -> None:
    """Give weights that were fused with a batch norm the type of their input again: with bfloat16, onnxscript 0.7
    writes them in float32, which the operators do not take."""
    for node in graph:
        if is_op(node, "Conv", "ConvTranspose", "Gemm"):
            for weight in node.inputs[1:]:
                numbers, dtype = constant_of(weight), input_of(node).dtype
                if weight is not None and numbers is not None and dtype is not None and weight.dtype != dtype:
                    weight.const_value = ir.tensor(numbers.astype(dtype.numpy()), dtype, name=weight.name)
                    weight.dtype = dtype


def _rules_by_operator() -> AbstractContextManager[object]:
    """A block in which each rule is tried only at nodes of the operator that its pattern ends in. onnxscript tries each
    at every node, and lists all nodes of the graph again at each for the patterns that end in two. And its rules, which
    live as long as the process, would keep the graph that they visited last, with the module's weights.

    The matcher is private to onnxscript. With a version that has it elsewhere, this has no effect.
    """
    try:
        from onnxscript.rewriter._basics import MatchResult
        from onnxscript.rewriter._matcher import SimplePatternMatcher

        match, fails = SimplePatternMatcher.match, MatchResult().fail("another operator")
    except (AttributeError, ImportError):
        return nullcontext()

    def match_operator(matcher: Any, model: ir.Model, graph: Any, node: ir.Node, **options: Any) -> Any:
        # None if it ends in one of several operators, or is a commuted pattern
        ends_in = matcher.pattern.output_nodes[0].op_identifier()
        if ends_in is None or ends_in[:2] == (node.domain, node.op_type):
            result = match(matcher, model, graph, node, **options)
            matcher._graph = matcher._current_node = matcher._match = None
            return result
        return fails

    return patch.object(SimplePatternMatcher, "match", match_operator)


def unfuse(model: ir.Model) -> None:
    """Write every FusedMatMul of `model`, by ONNX Runtime's optimizer, as operators of the standard, in place, so that
    attention is found and every target runs it. The shapes of its operands must be known."""
    for node in [node for node in model.graph if node.op_type == FUSED]:
        attributes = {name: node.attributes.get_int(name, 0) for name in node.attributes if name != "alpha"}
        if all(x is not None and x.shape is not None and len(x.shape) > 1 for x in node.inputs):
            result = insert(model.graph, node, partial(_product, node=node, attributes=attributes))
            result.type, old = input_of(node).type, node.outputs[0]
            old.name, result.name = f"{old.name}/fused", old.name
            ir.convenience.replace_all_uses_with(old, result, replace_graph_outputs=True)
            model.graph.remove(node, safe=True)


def _product(op: Builder, node: ir.Node, attributes: Mapping[str, int]) -> ir.Value:
    sides = []
    for i, side in enumerate("AB"):
        x = input_of(node, i)
        dims = dims_as_multiplied(len(dims_of(x)), side, attributes)
        sides.append(x if dims == sorted(dims) else op.Transpose(x, perm=dims))
    product, alpha, dtype = op.MatMul(*sides), node.attributes.get_float("alpha", 1.0), input_of(node).dtype or FLOAT
    if dtype not in LOW or float(np.asarray(alpha, dtype.numpy())) == alpha:
        return product if alpha == 1 else op.Mul(product, constant(op, alpha, dtype))
    wide = op.Mul(op.Cast(product, to=FLOAT.value), constant(op, alpha, FLOAT))  # no 16-bit number is this factor
    return op.Cast(wide, to=dtype.value)


def repair(model: ir.Model) -> None:
    """Write known sizes into Reshapes, and expand the caches of every RotaryEmbedding of `model` to its input's batch
    size, in place.

    Without position ids, the caches are `(batch, tokens, head_size / 2)`
    (https://onnx.ai/onnx/operators/onnx__RotaryEmbedding.html). The exporter's fusion leaves them with a batch of one,
    as the author computed them, which ONNX Runtime refuses for larger batches.
    """
    expanded: dict[tuple[ir.Value, str], ir.Value] = {}
    for node in list(model.graph):
        if is_op(node, "Reshape"):
            _write_size(model.graph, node)
        if not is_op(node, "RotaryEmbedding") or optional_input(node, 3) is not None:
            continue
        x = input_of(node)
        for i in (1, 2):
            _know_shape(cache := input_of(node, i))
            if cache.shape is None or x.shape is None or sizes_of(cache)[0] != ONE or sizes_of(x)[0] == ONE:
                continue
            key = cache, str(dims_of(x)[0])  # layers share their caches
            if key not in expanded:
                build = partial(_expanded, cache=cache, x=x)
                expanded[key] = insert(model.graph, node, build, stem=f"{cache.name}/{key[1]}")
            node.replace_input_with(i, expanded[key])


def _write_size(graph: ir.Graph, node: ir.Node) -> None:
    """Replace the -1 of a Reshape whose other sizes are computed by its size, if it is known. OpenVINO does not infer
    it; if it is a number of heads, runs of attention whose queries share keys fail."""
    shape, made = maker_of(input_of(node, 1)), node.outputs[0].shape
    if made is None or not is_op(shape, "Concat") or len(shape.inputs) != len(made):
        return
    parts = inputs_of(shape)
    for i, (part, dim) in enumerate(zip(parts, made, strict=True)):
        if isinstance(dim, int) and (number := constant_of(part)) is not None and number.tolist() == [-1]:
            write = partial(_joined, before=parts[:i], size=dim, after=parts[i + 1 :])
            node.replace_input_with(1, insert(graph, node, write))


def _joined(op: Builder, before: list[ir.Value], size: int, after: list[ir.Value]) -> ir.Value:
    sizes = op.Concat(*before, constant(op, [size]), *after, axis=0)
    return typed(sizes, ir.DataType.INT64, [len(before) + 1 + len(after)])


def _know_shape(cache: ir.Value) -> None:
    """Set the shape of a cache: the exporter's fusion recreates caches without the shapes of their sine and cosine."""
    node = cache.producer()
    if cache.shape is None and node is not None and node.op_type in ("Cos", "Sin", "Mul", "Cast"):
        _know_shape(source := input_of(node))
        assert source.dtype is not None
        typed(cache, ir.DataType(node.attributes.get_int("to", source.dtype.value)), dims_of(source))


def _expanded(op: Builder, cache: ir.Value, x: ir.Value) -> ir.Value:
    assert cache.dtype is not None
    shape = op.Concat(op.Shape(x, start=0, end=1), constant(op, [1, 1]), axis=0)
    return typed(op.Expand(cache, shape), cache.dtype, [dims_of(x)[0], *dims_of(cache)[1:]])


def share_weights(model: ir.Model) -> None:
    """Share the transpose of a weight between the layers that share the weight, in place: torch folds one per layer,
    all views of the same memory, and each would be written to the file."""
    first: dict[tuple[object, ...], tuple[ir.Value, Array]] = {}
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is None or value.const_value.nbytes < LEAST_BYTES or value.is_graph_output():
            continue
        array = value.const_value.numpy()  # kept alive, so that no other array gets its address
        address = array.__array_interface__["data"][0]
        kept, _ = first.setdefault((value.dtype, array.shape, array.strides, address), (value, array))
        if kept is not value:
            value.replace_all_uses_with(kept)
            del model.graph.initializers[name]
