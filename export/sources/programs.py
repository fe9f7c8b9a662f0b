"""Programs of torch.export on their way through torch's ONNX exporter.

Torch traces a program twice to decompose its operators into those that have ONNX functions, which takes half of an
export. Most programs have nothing to decompose but operators that are others under another name.

The exporter folds constants with NumPy, whose `exp`, `pow` or `sin` differ from torch's in the last bit. Embeddings of
timesteps and positions multiply such a constant by a thousand and take the sine, which turns that bit into an error of
5e-6 where eager's is 1e-7.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import permutations
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

from attnforge.export.attention.counted import writes
from attnforge.export.graphs.types import DOUBLE, FLOAT

aten: Any = torch.ops.aten

ASSERTIONS = frozenset({
    aten._assert_async.default, aten._assert_async.msg, aten._assert_scalar.default,
    aten._assert_tensor_metadata.default, aten.sym_constrain_range_for_size.default,
})  # fmt: skip
"""Operators that torch's exporter leaves out."""

SAME: Mapping[OpOverload, OpOverload] = {
    aten.__and__.Tensor: aten.bitwise_and.Tensor,
    aten.__or__.Tensor: aten.bitwise_or.Tensor,
    aten.broadcast_to.default: aten.expand.default,
    aten.detach_.default: aten.detach.default,
    aten.max.other: aten.maximum.default,
    aten.min.other: aten.minimum.default,
}
"""Operators that compute the same of the same arguments."""

CASTS: Mapping[OpOverload, int] = {aten.to.dtype: 1, aten.to.device: 2, aten.to.dtype_layout: 1}
"""Operators that cast, and the position of the dtype in their arguments."""

CAST: OpOverload = torch.ops.prims.convert_element_type.default
"""The operator by which the exporter casts operands of several dtypes to one."""

LEFT_TO_TORCH = frozenset({
    aten.chunk.default, aten.conj.default, aten.mH.default, aten.narrow.default, aten.resolve_conj.default,
    aten.resolve_neg.default, aten.native_batch_norm.default, aten.sym_storage_offset.default,
})  # fmt: skip
"""Operators that torch decomposes although they have ONNX functions, which are wrong (`narrow` from the end, `chunk` of
a dynamic size) or untested."""

AS_IT_IS = frozenset({
    aten._to_copy.default, aten.alias.default, aten.clone.default, aten.contiguous.default, aten.detach.default,
})  # fmt: skip
"""Operators that return a complex number of the same dtype unchanged."""

ARITHMETIC = frozenset({aten.add.Tensor, aten.div.Tensor, aten.mul.Tensor, aten.sub.Tensor})
"""Operators on two tensors, of which the exporter writes those on two complex ones."""


def _axis(dim: int) -> int:
    """The axis of real pairs, whose last is the pair, for one of complex numbers."""
    return dim - 1 if dim < 0 else dim


OF_PAIRS: Mapping[OpOverload, Callable[..., tuple[Any, ...]]] = {
    aten.expand.default: lambda sizes: ([*sizes, -1],),
    aten.flatten.using_ints: lambda start=0, end=-1: (_axis(start), _axis(end)),
    aten.index.Tensor: lambda indices: (indices,),
    aten.index_select.default: lambda dim, indices: (_axis(dim), indices),
    aten.repeat.default: lambda repeats: ([*repeats, 1],),
    aten.reshape.default: lambda sizes: ([*sizes, 2],),
    aten.select.int: lambda dim, index: (_axis(dim), index),
    aten.unsqueeze.default: lambda dim: (_axis(dim),),
    aten.view.default: lambda sizes: ([*sizes, 2],),
}
"""Views of complex numbers for which torch's exporter has no function, or one that it does not test; and from their
arguments after the first, those of the same view of real pairs."""

PARTS = (aten.split.Tensor, aten.split_with_sizes.default)
"""Views that return several parts of a dim."""

CLOSE = 1e-3
"""The largest difference, relative and absolute, between two results of the same operators."""

FLOAT16 = ir.DataType.FLOAT16


# --- decomposing ------------------------------------------------------------------------------------------------------


def decomposed(
    decompose: Callable[[ExportedProgram, Any], ExportedProgram], program: ExportedProgram, registry: Any
) -> ExportedProgram:
    """Return a program whose operators have ONNX functions and write to none of their inputs. The exporter writes
    complex numbers as pairs of real ones, but lacks functions for some of their operators: these work on pairs already.

    Args:
        decompose: torch's own function for this.
        program: changed in place, and returned, if all its other operators are in :data:`SAME` and :data:`CASTS`.
        registry: torch's table of ONNX functions.

    Raises:
        ValueError: see :func:`_is_projected`.
    """
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    einsums = [node for node in nodes if node.target == aten.einsum.default]
    if any(len(node.args[1]) > 2 or node.meta["val"].dtype == torch.bool for node in einsums):
        registry.functions.pop("aten::einsum")  # torch makes products of two of it, of which attention consists
    for node in einsums:  # ONNX's takes operands of one type
        dtype = node.meta["val"].dtype
        with program.graph.inserting_before(node):
            alike = [x if x.meta["val"].dtype == dtype else _call(node, CAST, x, dtype) for x in node.args[1]]
        node.args = (node.args[0], alike, *node.args[2:])
    if any(map(_is_projected, nodes)):
        registry.functions.pop("aten::lstm.input")
    known = {functions[0].fx_target for functions in registry.functions.values()} | ASSERTIONS
    for node in nodes:
        if node.target == aten.clamp.default and node.meta["val"].is_floating_point():  # the exporter wants one type
            bounds = (float(bound) if isinstance(bound, int) else bound for bound in node.args[1:])
            node.args, node.kwargs = (node.args[0], *bounds), {}
        if node.target == aten._is_all_true.default:  # in a condition, which torch does not decompose
            node.target = aten.all.default
    renamed = {node: call for node in nodes if (call := _other_name(node)) is not None}
    if all(node in renamed or _has_function(node, known) for node in nodes):
        for node, call in renamed.items():
            node.target, node.args, node.kwargs = call
    else:
        program = decompose(program, registry)
    for node in program.graph.nodes:
        with program.graph.inserting_before(node):
            if (other := _in_pairs(node) or _without_scatter(node)) is not None:
                node.replace_all_uses_with(other)
    program.graph.eliminate_dead_code()
    return program


def _other_name(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The call of the same operator under a name that has an ONNX function: that function, and its arguments; None if
    there is no such name."""
    target: Any = node.target
    if target in CASTS:
        dtype = node.kwargs.get("dtype", (*node.args, None, None)[CASTS[target]])
        return aten._to_copy.default, node.args[:1], {"dtype": dtype}
    if target == aten.mT.default:  # the exporter's is an Einsum, which does not take Booleans
        return aten.transpose.int, (*node.args, -2, -1), node.kwargs
    if target == aten.numpy_T.default:
        return aten.permute.default, (*node.args, [*reversed(range(node.meta["val"].dim()))]), node.kwargs
    if target == aten.chunk.default:  # the exporter's returns as many parts as asked for, some of them empty
        dim: Any = node.kwargs.get("dim", (*node.args, 0)[2])
        size = node.meta["val"][0].shape[dim]
        if isinstance(size, int) and size > 0:  # ONNX Runtime divides by the size
            return aten.split.Tensor, (node.args[0], size, dim), {}
    if target == aten.diff.default:
        return _difference(node)
    return (SAME[target], node.args, node.kwargs) if target in SAME else None


def _difference(node: Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
    """The differences of neighbours, which have no ONNX function, as a subtraction, whose operands are inserted. Every
    decoder of transformers looks for packed sequences with them."""
    given: dict[str, Any] = dict(zip(("x", "n", "dim", "prepend", "append"), node.args, strict=False)) | node.kwargs
    if given.get("n", 1) != 1 or node.meta["val"].dtype == torch.bool:
        return None
    dim = given.get("dim", -1)
    parts = [part for part in (given.get("prepend"), node.args[0], given.get("append")) if part is not None]
    with node.graph.inserting_before(node):
        joined = _call(node, aten.cat.default, parts, dim) if len(parts) > 1 else parts[0]
        ends = (1, sys.maxsize), (0, -1)
        return aten.sub.Tensor, tuple(_call(node, aten.slice.Tensor, joined, dim, *end) for end in ends), {}


def _without_scatter(node: Node) -> Node | None:
    """For a tensor in which a part is replaced by itself, the tensor. For one in which the rest of a dim is replaced by
    its sum with another tensor, a sum, which is inserted: torch writes `x[:, 1:] += y` so, as vision transformers add
    biases to all scores but those of a class token. None for other nodes."""
    if node.target != aten.slice_scatter.default or node.kwargs:
        return None
    whole, part, *place = _arguments(node)
    if part.target == aten.copy.default and part.args[0].meta["val"].dtype == part.args[1].meta["val"].dtype:
        part = part.args[1]
    if _is_slice(part, whole, place):
        assert isinstance(whole, Node)
        return whole
    (dim, start, end, step), sizes = place, whole.meta["val"].shape
    axis = dim - len(sizes) if dim >= 0 else dim
    if end != sys.maxsize or step != 1 or start <= 0 or part.target != aten.add.Tensor or part.kwargs:
        return None
    for kept, added in permutations(part.args):
        if _is_slice(kept, whole, place) and isinstance(added, Node):
            given = added.meta["val"].shape
            if len(given) >= -axis and str(given[axis]) == str(sizes[axis] - start):
                after_zeros = _call(node, aten.constant_pad_nd.default, added, [0, 0] * (-axis - 1) + [start, 0])
                padded = [*given[:axis], sizes[axis], *given[len(given) + axis + 1 :]]
                after_zeros.meta["val"] = added.meta["val"].new_empty(padded)
                return _call(node, aten.add.Tensor, whole, after_zeros)
    return None


def _arguments(node: Node) -> list[Any]:
    """The arguments of a `slice` or `slice_scatter`, without those that are left out."""
    count = 1 if node.target == aten.slice.Tensor else 2
    return [*node.args, *(0, None, None, 1)[len(node.args) - count :]]


def _is_slice(part: Any, whole: Any, place: Sequence[Any]) -> bool:
    """Whether a node takes a part, or the same as another node does, of a tensor."""
    if not isinstance(part, Node) or part.target != aten.slice.Tensor or part.kwargs:
        return False
    of, *its = _arguments(part)
    if its != list(place):
        return False
    if whole.target != aten.slice.Tensor or whole.kwargs:
        return of is whole
    within, *at = _arguments(whole)
    return of is whole or _is_slice(of, within, at)


def _in_pairs(node: Node) -> Node | None:
    """Insert what computes an operator on complex numbers by real ones, and return it; None if the exporter has a
    function for the node."""
    target: Any = node.target
    x, *rest = node.args or (None,)
    if target in (aten.add.Tensor, aten.mul.Tensor) and not _is_complex(x):
        x, rest = rest[0], [x]
    if target is operator.getitem and isinstance(x, Node) and x.target in PARTS and _is_complex(x.args[0]):
        given: Any = (*x.args, 0)
        parts = _call(node, x.target, _call(node, aten.view_as_real.default, given[0]), given[1], _axis(given[2]))
        return _call(node, aten.view_as_complex.default, _call(node, target, parts, *rest))
    if isinstance(x, complex) and target == aten.mul.Tensor:
        return _call(node, aten.complex.default, *(_call(node, target, *rest, part) for part in (x.real, x.imag)))
    if not _is_complex(x):
        return None
    assert isinstance(x, Node)
    if target in AS_IT_IS and node.meta["val"].dtype == x.meta["val"].dtype:
        return x
    pairs = _call(node, aten.view_as_real.default, x)
    if target in OF_PAIRS:
        return _call(node, aten.view_as_complex.default, _call(node, target, pairs, *OF_PAIRS[target](*rest)))
    real, imaginary = (_call(node, aten.select.int, pairs, -1, part) for part in (0, 1))
    if target == aten.exp.default:
        return _call(node, aten.polar.default, _call(node, target, real), imaginary)
    if target not in ARITHMETIC or _is_complex(rest[0]) or node.kwargs:
        return None
    return _call(node, aten.complex.default, *_with_number(node, (real, imaginary), rest[0]))


def _with_number(node: Node, parts: Sequence[Node], number: Any) -> list[Node]:
    """The real and the imaginary part of a complex tensor, given by its parts, plus, minus, times or divided by a real
    tensor or a number."""
    target: Any = node.target
    is_factor = target in (aten.div.Tensor, aten.mul.Tensor)
    if not isinstance(number, complex):
        return [_call(node, target, part, number) if is_factor or part is parts[0] else part for part in parts]
    if not is_factor:
        return [_call(node, target, *pair) for pair in zip(parts, (number.real, number.imag), strict=True)]
    factor = number if target == aten.mul.Tensor else 1 / number
    (a, b), (c, d) = (
        [_call(node, aten.mul.Tensor, part, of_factor) for of_factor in (factor.real, factor.imag)] for part in parts
    )
    return [_call(node, aten.sub.Tensor, a, d), _call(node, aten.add.Tensor, b, c)]


def _value(argument: Any) -> Any:
    """The fake value of a node, or an argument that is none. Conjugates have numbers of their own, as in ONNX."""
    value = argument.meta.get("val") if isinstance(argument, Node) else argument
    return value.resolve_conj() if isinstance(value, Tensor) else value


def _is_complex(argument: Any) -> bool:
    value = _value(argument)
    return isinstance(value, Tensor) and value.is_complex()


FIX_DIMS = (aten.complex.default, aten.constant_pad_nd.default, aten.polar.default)
"""Operators that make dims static if they are run again; their results have the place of the node's own value."""


def _call(node: Node, operator: Any, *args: Any) -> Node:
    """Insert a call of an operator in the graph of `node`, whose place in the module it shares."""
    call = node.graph.call_function(operator, args)
    call.meta = dict(node.meta)
    if operator not in FIX_DIMS:
        call.meta["val"] = operator(*map_arg(args, _value))
    return call


def _is_projected(node: Node) -> bool:
    """Whether a node is an LSTM that projects its output: ONNX's operator cannot, and torch unrolls such a layer.

    Raises:
        ValueError: the number of tokens is dynamic.
    """
    if node.target != aten.lstm.input:
        return False
    args: Any = node.args
    x, (hidden, cell), *_, batch_first = args
    is_projected: bool = hidden.meta["val"].shape[-1] != cell.meta["val"].shape[-1]
    if is_projected and not isinstance(x.meta["val"].shape[int(batch_first)], int):
        raise ValueError("an LSTM with proj_size needs a fixed number of tokens, as it has no ONNX operator")
    return is_projected


def _has_function(node: Node, known: Collection[object]) -> bool:
    is_left = node.target in LEFT_TO_TORCH or isinstance(node.target, HigherOrderOperator)
    return node.target in known and not is_left and not writes(node)


def promoted(interpreter: Any, run_node: Callable[[Any, Node], Any], node: Node) -> Any:
    """Run a node in torch's pass that casts operands of several dtypes to one: the nodes that the pass has no rule for
    have their values already.

    Args:
        interpreter: torch's, which runs the pass.
        run_node: torch's own method of it.
        node: the node.
    """
    has_rule = isinstance(node.target, OpOverload) and (
        interpreter.type_promotion_table.get_rule(node.target.overloadpacket) is not None
    )
    if node.op == "call_function" and not has_rule and "val" in node.meta:
        return node.meta["val"]
    return run_node(interpreter, node)


# --- constants --------------------------------------------------------------------------------------------------------


def computed_by_torch(program: torch.onnx.ONNXProgram) -> None:
    """Replace the floating-point constants that the exporter folded by what torch computes, in place."""
    assert program.exported_program is not None
    constants: dict[str, Node] = {}
    for node in program.exported_program.graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if node.op == "call_function" and not is_random and all(x.name in constants for x in node.all_input_nodes):
            constants[node.name] = node
    known: dict[Node, Any] = {}
    for name, value in program.model.graph.initializers.items():
        if name not in constants or value.const_value is None or value.dtype not in (DOUBLE, FLOAT, FLOAT16):
            continue
        result, folded = _result(constants[name], known), torch.from_numpy(value.const_value.numpy())
        is_alike = isinstance(result, Tensor) and (result.shape, result.dtype) == (folded.shape, folded.dtype)
        if is_alike and torch.allclose(result, folded, CLOSE, CLOSE, equal_nan=True):
            value.const_value = ir.tensor(result.numpy(), name=name)


def _result(node: Node, known: dict[Node, Any]) -> Any:
    """What torch computes at a node that depends on constants only."""
    if node not in known:
        for source in node.all_input_nodes:
            _result(source, known)
        target: Any = node.target
        known[node] = target(*map_arg(node.args, known.get), **map_arg(node.kwargs, known.get))
    return known[node]
