"""Checks of an ONNX graph before anything is done with it: names are defined, and the numbers of operators and
the sizes of constants are plausible. On any other graph, libraries fail with errors of their own, or run for hours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from math import prod
from pathlib import Path, PurePosixPath

import onnx
import onnx_ir as ir

from attnforge.bundle.external import locations, messages
from attnforge.bundle.schema import LONGEST_NAME, MOST_DIMS
from attnforge.errors import CONTROL, CaptureError, UnavailableError, UsageError, first_line, shortened
from attnforge.export.graphs.nodes import constant_of, optional_input
from attnforge.export.room import Numbers, most_alive
from attnforge.files import open_inside
from attnforge.memory import available

MOST_NODES = 200_000
"""Maximum number of operators of a graph whose functions are inlined."""

DEEPEST = 8
"""Maximum nesting depth of graphs, as in branches and loops."""

LARGEST_CONSTANT = 2**28
"""Maximum number of elements that operators may compute from constants alone."""


KNOWN_DOMAINS = (
    "", "ai.onnx", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training", "com.microsoft",
    "com.microsoft.experimental", "com.microsoft.nchwc", "com.ms.internal.nhwc",
)  # fmt: skip
"""Domains of operators that ONNX Runtime has."""


def check_files(model: onnx.ModelProto, folder: Path) -> None:
    """Check where the weights of a model are stored, before anything reads them.

    Args:
        model: the model as it is in its file.
        folder: the folder of the file.

    Raises:
        UsageError: weights are in a file outside the folder, reached through a link, or missing; or some are sparse.
    """
    for message in messages(model):
        if isinstance(message, onnx.SparseTensorProto):
            raise UsageError("the graph has a sparse constant, which is not supported; export it with dense ones")
        for location in locations(message):
            path = PurePosixPath(location)
            if path.is_absolute() or not {"..", "*"}.isdisjoint(path.parts):
                raise UsageError(f"the graph keeps weights in {location!r}, outside its folder; copy them into it")
            try:
                open_inside(folder, location).close()
            except (OSError, ValueError) as error:
                raise UsageError(
                    f"the graph keeps weights in {location!r}, which is not a regular file in its folder "
                    f"({first_line(error)}); copy it there"
                ) from error


def check_names(graph: onnx.GraphProto) -> None:
    """Check that a name has one initializer, of several of which libraries use different ones, and one output.

    Raises:
        UsageError: a name has more.
    """
    for kind, values in (("initializers", graph.initializer), ("outputs", graph.output)):
        (name, count), *_ = Counter(value.name for value in values).most_common(1) or [("", 1)]
        if count > 1:
            raise UsageError(f"the graph has {count} {kind} named {name!r}; export it again, with one for each name")


def check(model: ir.Model) -> None:
    """Check a graph as it is in its file, before its functions are inlined.

    Raises:
        UsageError: it is too large or nested too deep, a name in it is not defined or defined by itself, an input has
            no type, an output is no tensor of numbers, or a constant has fewer numbers than its dims say.
    """
    for value in model.graph.inputs:
        if not isinstance(value.type, ir.TensorType) or value.dtype in (None, ir.DataType.UNDEFINED):
            raise UsageError(f"the input {value.name!r} is not a tensor of a known type; export the graph again")
    for value in model.graph.outputs:
        if value.type is not None and (not isinstance(value.type, ir.TensorType) or value.dtype == ir.DataType.STRING):
            raise UsageError(f"the output {value.name!r} is not a tensor of numbers; export the graph without it")
    for name in (str(value.name) for value in (*model.graph.inputs, *model.graph.outputs)):
        if CONTROL.search(name) or not 0 < len(name) <= LONGEST_NAME:
            raise UsageError(
                f"an input or output is named {shortened(name)!r}; give it a name of at most {LONGEST_NAME:,} "
                "characters, without control characters"
            )
    for tensor in tensors(model):
        if isinstance(tensor, ir.serde.TensorProtoTensor):  # external data are checked where they are read
            _check_tensor(tensor.raw)
    _check_functions(model)
    if (deepest := _depth(model.graph)) > DEEPEST:
        raise UsageError(f"the graph nests graphs {deepest} deep; at most {DEEPEST} are allowed")
    _check_order(model.graph)
    _check_lists(model.graph)
    for node in model.graph.all_nodes():
        if (count := made_of_constants(node)) > LARGEST_CONSTANT:
            raise UsageError(_too_large(node, count))


LARGEST_WINDOW = 2**20
"""Maximum number of elements of a pooling window."""

BOUNDS = {
    **dict.fromkeys(("axis", "axes", "batch_axis", "time_axis"), (-MOST_DIMS, MOST_DIMS)),
    "batch_dims": (0, MOST_DIMS),
    **dict.fromkeys(("blocksize", "group", "kv_num_heads", "num_groups", "num_heads", "q_num_heads"), (1, 2**31 - 1)),
}
"""The smallest and largest numbers of attributes that name or count dims, or divide their sizes."""


def check_signatures(model: ir.Model) -> None:
    """Check what libraries do not: the shape inference of onnx and ONNX Runtime end the process where an operator lacks
    an input or has more outputs than parts, an axis is no axis, or a number of heads is 0. A huge window takes hours.

    Raises:
        UsageError: the inputs, outputs or attributes of an operator are invalid.
    """
    for node in model.graph.all_nodes():
        if why := _why_invalid(node, model.opset_imports.get(node.domain) or 0):
            raise UsageError(f"{node.op_type} ({node.name}) {why}; export the graph again")


def _why_invalid(node: ir.Node, opset: int) -> str:
    types: dict[str, str] = {}
    if onnx.defs.has(node.op_type, opset, node.domain):
        schema = onnx.defs.get_schema(node.op_type, opset, node.domain)
        types = {name: str(a.type).rpartition(".")[2] for name, a in schema.attributes.items()}
        for i, formal in enumerate(schema.inputs):
            if formal.option == onnx.defs.OpSchema.FormalParameterOption.Single and optional_input(node, i) is None:
                return f"lacks its input {formal.name!r}"
    if node.op_type == "Split":
        parts = constant_of(optional_input(node, 1))
        each = node.attributes.get_ints("split", node.outputs) if parts is None else parts  # before opset 13
        if (count := node.attributes.get_int("num_outputs", len(each))) != len(node.outputs):
            return f"has {len(node.outputs)} outputs, and {count} parts"
    for a in node.attributes.values():
        if (wanted := types.get(a.name, a.type.name)) != a.type.name:
            return f"has the attribute {a.name} of the type {a.type.name}, not {wanted}"
        numbers = {ir.AttributeType.INT: (a.value,), ir.AttributeType.INTS: a.value}.get(a.type, ())
        if a.name in BOUNDS and not all(BOUNDS[a.name][0] <= number <= BOUNDS[a.name][1] for number in numbers):
            return f"has the {a.name} {', '.join(map(str, numbers))}"
        if a.name == "kernel_shape" and "Pool" in node.op_type and prod(map(abs, numbers)) > LARGEST_WINDOW:
            return f"has a window of {' × '.join(map(str, numbers))}"
    return ""


MOST_REPEATED = 8
"""How often a graph may concatenate its constants, on average."""

_TAKES_SHAPE = ("Reshape", "Expand", "ConstantOfShape", "Tile", "CenterCropPad")


def _check_lists(graph: ir.Graph) -> None:
    """Check the length of integer lists that are repeatedly concatenated or used as shapes: inference keeps each."""
    counts = {value: _size(value) for value in graph.inputs if value.dtype is not None and value.dtype.is_integer()}
    counts |= {value: _size_of(value) for value in graph.initializers.values()}
    most = MOST_REPEATED * sum(counts.values()) + 2**20
    for node in graph:
        inputs = [counts.get(value, 0) for value in node.inputs if value is not None]
        if node.op_type in ("Constant", "Shape", "Size"):
            count = max(map(_size_of, node.outputs), default=0)
            most += MOST_REPEATED * count
        else:
            count = sum(inputs) if node.op_type == "Concat" else max(inputs, default=0)
        counts.update(dict.fromkeys(node.outputs, count))
        if node.op_type == "Concat" and count > most:
            raise UsageError(_too_large(node, count, most))
        if node.op_type in _TAKES_SHAPE and inputs and inputs[-1] > 2**12:
            raise UsageError(
                f"{node.op_type} ({node.name}) has a shape with more than 4,096 dims; export the graph again"
            )


def _size_of(value: ir.Value) -> int:
    tensor = ir.convenience.get_const_tensor(value)
    return MOST_DIMS if tensor is None else tensor.size


def tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """The constants of a model: weights, and tensors in attributes of its graphs and functions."""
    yield from (value.const_value for value in model.graph.initializers.values() if value.const_value is not None)
    graphs: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    for graph in graphs:
        for node in graph.all_nodes():
            yield from (a.as_tensor() for a in node.attributes.values() if a.type == ir.AttributeType.TENSOR)


def _check_tensor(proto: onnx.TensorProto) -> None:
    """Check that a constant has as many numbers as its dims say."""
    count = prod(proto.dims)
    lists = (proto.float_data, proto.int32_data, proto.int64_data, proto.double_data, proto.uint64_data)
    stored = 4 * len(proto.raw_data) or max(4 * max(map(len, lists)), len(proto.string_data))  # 2-bit types: 4 a byte
    if any(dim < 0 for dim in proto.dims) or count > stored:
        raise UsageError(
            f"the constant {proto.name!r} has too few numbers for its dims {list(proto.dims)}; export the graph again"
        )


SMALL, GROWTH = 2**26, 2**14
"""Limits on the numbers that a graph has in memory at one time: in any case, and for each number that it is given.
Among plausible graphs, attention scores grow most, by as many numbers per token as there are tokens."""


def check_growth(model: ir.Model, sizes: Mapping[str, int]) -> None:
    """Check how many numbers a graph has in memory at one time, after shapes are inferred and before it runs.

    Args:
        model: the graph.
        sizes: sizes of the symbolic dims of its inputs.

    Raises:
        UsageError: too many for what it is given: its inputs, and the constants in its file.
        UnavailableError: too many for the available memory, in float64.
    """
    count = Numbers(sizes)
    given = sum(map(count, (*model.graph.inputs, *model.graph.initializers.values())))
    made = {node: max(map(count, node.outputs), default=0) for node in model.graph}
    if not made:
        return
    largest = max(made, key=made.__getitem__)
    alive, most = max(most_alive(model, sizes), made[largest]), max(SMALL, GROWTH * given)
    if alive > most:
        raise UsageError(
            f"the graph makes {alive:,} numbers at one time out of {given:,} that it is given, the most by "
            f"{largest.op_type} ({largest.name}); at most {most:,} are allowed"
        )
    if (left := available()) is not None and 8 * alive > left:
        raise UnavailableError(
            f"the graph needs at least {8 * alive / 2**30:.1f} GiB of memory at the usual sizes of its dims, and "
            f"{left / 2**30:.1f} GiB are left; give smaller sizes"
        )


RANDOM = ("RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Bernoulli", "Multinomial")


def check_operator(node: ir.Node) -> None:
    """Check that an operator draws no random numbers and has no nested graphs.

    Raises:
        CaptureError: it does.
    """
    training = optional_input(node, 2) if node.op_type == "Dropout" else None
    off = constant_of(training)
    if node.op_type in RANDOM or (training is not None and (off is None or bool(off.any()))):
        raise CaptureError(
            f"the graph has {node.op_type} ({node.name}), which draws random numbers; export the model in eval mode"
        )
    if any(True for _ in _inner(node)):
        raise CaptureError(
            f"the graph has {node.op_type} ({node.name}), whose branches or bodies are nested graphs; export it "
            "without control flow"
        )


def _too_large(node: ir.Node, count: int, most: int = LARGEST_CONSTANT) -> str:
    return f"{node.op_type} ({node.name}) makes {count:,} numbers out of constants; at most {most:,} are allowed"


def made_of_constants(node: ir.Node) -> int:
    """The number of elements that an operator computes if constants determine it; 0 for other operators."""
    if node.domain not in ("", "ai.onnx"):
        return 0
    constants = [_numbers(value) for value in node.inputs]
    match node.op_type, constants:
        case "ConstantOfShape", [shape] if shape is not None:
            return prod(max(int(n), 0) for n in shape)
        case "Expand", [_, shape] if shape is not None:
            return prod(max(int(n), 1) for n in shape)
        case "Tile", [_, repeats] if repeats is not None:
            return prod(max(int(n), 1) for n in repeats) * _size(node.inputs[0])
        case "OneHot", [_, depth, _] if depth:
            return max(int(depth[0]), 0) * _size(node.inputs[0])
        case "Range", [[start], [limit], [step]] if step:
            return max(int((limit - start) / step), 0)
    return 0


def _numbers(value: ir.Value | None) -> list[float] | None:
    """The numbers of a small constant; None for other values."""
    tensor = ir.convenience.get_const_tensor(value) if value is not None else None
    if tensor is None or tensor.size > 64 or tensor.dtype == ir.DataType.STRING:
        return None
    return [number.item() for number in tensor.numpy().reshape(-1)]


def _size(value: ir.Value | None) -> int:
    """The minimum number of elements of a value."""
    shape = value.shape if value is not None else None
    return prod(dim for dim in shape or () if isinstance(dim, int))


def _depth(graph: ir.Graph) -> int:
    """How deep graphs are nested in a graph; protobuf reads no file in which it is more than a hundred."""
    return max((1 + _depth(inner) for node in graph for inner in _inner(node)), default=0)


def _inner(node: ir.Node) -> Iterator[ir.Graph]:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def _check_functions(model: ir.Model) -> None:
    """Check the domains of functions, and the number of operators after they are inlined, counting each once."""
    for domain, function, _ in model.functions:
        if domain in KNOWN_DOMAINS:
            raise UsageError(
                f"the function {domain or 'ai.onnx'}::{function} may be an operator of ONNX Runtime too, and libraries "
                "differ on which one counts; export the model without functions, or with their own domain"
            )
    calls = {name: _operators(function) for name, function in model.functions.items()}
    sizes: dict[ir.OperatorIdentifier, int] = {}
    try:
        for name in TopologicalSorter({name: calls[name].keys() & calls.keys() for name in calls}).static_order():
            sizes[name] = min(_inlined(calls[name], sizes), MOST_NODES + 1)
    except CycleError as error:
        (_, name, _), *_ = error.args[1]
        raise UsageError(f"the function {name} calls itself; export the model without functions") from error
    if _inlined(_operators(model.graph), sizes) > MOST_NODES:
        raise UsageError(f"the graph has more than {MOST_NODES:,} operators once its functions are inlined")


def _operators(graph: ir.Graph | ir.Function) -> Counter[ir.OperatorIdentifier]:
    return Counter(node.op_identifier() for node in graph.all_nodes())


def _inlined(operators: Counter[ir.OperatorIdentifier], sizes: Mapping[ir.OperatorIdentifier, int]) -> int:
    """The number of operators of which some are functions of these sizes."""
    return sum(count * sizes.get(name, 1) for name, count in operators.items())


def _check_order(graph: ir.Graph) -> None:
    """Sort the operators, as ONNX Runtime does, and check that every input of one is an input, a constant, or the
    output of an earlier one."""
    with suppress(ValueError):  # of a cycle, which the check names
        graph.sort()
    known = {id(value) for value in (*graph.inputs, *graph.initializers.values())}
    for node in graph:
        for value in node.inputs:
            if value is not None and id(value) not in known:
                who = "nothing defines" if value.producer() is None else "it defines itself or a later operator does"
                raise UsageError(
                    f"{node.op_type} ({node.name}) takes {value.name!r}, which {who}; export the graph again"
                )
        known |= {id(value) for value in node.outputs}
    if missing := [value.name for value in graph.outputs if id(value) not in known]:
        raise UsageError(f"the output {missing[0]!r} is not computed by any operator; export the graph again")
