"""Invalid and implausible ONNX graphs are refused immediately, with a one-line error."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

import attnforge
from attnforge.errors import AttnforgeError, UnavailableError, UsageError
from attnforge.export.sources.named import build, model_named
from attnforge.export.sources.onnx_check import check_growth
from attnforge.export.sources.onnx_file import import_graph
from attnforge.export.sources.shapes import infer_shapes
from attnforge.export.sources.specs import check_ranges
from attnforge.memory import peak, reset_peak

FLOAT = TensorProto.FLOAT
X, Y = (helper.make_tensor_value_info(name, FLOAT, [2]) for name in "xy")


def saved(
    folder: Path, nodes: list[onnx.NodeProto], functions: Sequence[onnx.FunctionProto] = (), **constants: Any
) -> Path:
    initializers = [numpy_helper.from_array(np.array(numbers, np.int64), name) for name, numbers in constants.items()]
    graph = helper.make_graph(nodes, "graph", [X], [Y], initializers)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=list(functions), ir_version=10)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def refused(file: Path, words: str | None = None) -> None:
    start = time.perf_counter()
    with pytest.raises(AttnforgeError, match=words or None) as raised:
        import_graph(file)
    assert time.perf_counter() - start < 10
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 2_000


def node(op: str, *inputs: str, output: str = "y", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [output], name=f"the {op}", **attributes)


@pytest.mark.parametrize(
    ("nodes", "words"),
    [
        ([node("Add", "x", "z")], "takes 'z', which nothing defines"),
        ([node("Add", "x", "y")], "which it defines itself"),
        ([node("Relu", "b", output="a"), node("Relu", "a", output="b"), node("Relu", "a")], "a later operator does"),
        ([node("Relu", "x", output="z")], "is not computed by any operator|which nothing defines"),
        ([node("NoSuchOperator", "x")], ""),
        ([node("Relu")], ""),
        ([node("Relu", "x", output="y"), node("Relu", "x", output="y")], ""),
    ],
    ids=["undefined", "itself", "cyclic", "no output", "unknown", "no input", "twice"],
)
def test_names_that_are_not_defined(tmp_path: Path, nodes: list[onnx.NodeProto], words: str) -> None:
    refused(saved(tmp_path, nodes), words)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (helper.make_node("Split", ["x"], ["y", "z"], num_outputs=1), "has 2 outputs, and 1 parts"),
        (helper.make_node("Split", ["x", "one"], ["y", "z"]), "has 2 outputs, and 1 parts"),
        (node("LayerNormalization", "x", "one", axis=2**31), "has the axis 2147483648"),
        (node("Gather", "x", ""), "lacks its input 'indices'"),
        (node("GatherND", "x", "one", batch_dims=-2), "has the batch_dims -2"),
        (node("Attention", "x", "x", "x", q_num_heads=1, kv_num_heads=0), "has the kv_num_heads 0"),
        (node("LayerNormalization", "x", "one", axis=1.0), "has the attribute axis of the type FLOAT, not INT"),
        (node("MaxPool", "x", kernel_shape=[2**62, 2]), "has a window of 4611686018427387904 × 2"),
    ],
)  # fmt: skip
def test_invalid_signatures(tmp_path: Path, made: onnx.NodeProto, words: str) -> None:
    refused(saved(tmp_path, [made], one=[1]), words)


@pytest.mark.parametrize("far", [2**40, 2, -(2**63)])
def test_indices_out_of_range_are_not_folded(tmp_path: Path, far: int) -> None:
    gathered = [node("GatherElements", "numbers", "far", output="n"), node("Cast", "n", to=FLOAT)]
    refused(saved(tmp_path, gathered, numbers=[1, 2], far=[far, 0]))


def test_an_input_of_very_many_numbers(tmp_path: Path) -> None:
    """Inference makes no dim of each."""
    many = helper.make_tensor_value_info("x", FLOAT, [2**40])
    graph = helper.make_graph([node("CastLike", "x", "x", output="a"), node("Shrink", "a")], "graph", [many], [Y])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    refused(tmp_path / "model.onnx")


def test_operators_in_any_order(tmp_path: Path) -> None:
    """ONNX Runtime sorts them, and its conversion to fp16 appends the casts of inputs."""
    ordered = [node("Relu", "x", output="b"), node("Exp", "b", output="a"), node("Add", "a", "b")]
    expected = import_graph(saved(tmp_path, ordered))
    inputs = expected.example
    for order in ((2, 1, 0), (1, 2, 0), (2, 0, 1)):
        imported = import_graph(saved(tmp_path, [ordered[i] for i in order]))
        assert np.array_equal(imported.eager(inputs)["y"], expected.eager(inputs)["y"])


def add_constant(file: Path, tensor: TensorProto, of: str) -> None:
    model = onnx.load(str(file))
    if of == "initializer":
        model.graph.initializer.append(tensor)
    else:
        model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
    file.write_bytes(model.SerializeToString())


def test_initializers_of_one_name(tmp_path: Path) -> None:
    """ONNX Runtime and onnx_ir use different ones."""
    file = saved(tmp_path, [node("Add", "x", "c")])
    for number in (1.0, 2.0):
        add_constant(file, helper.make_tensor("c", FLOAT, [1], [number]), "initializer")
    refused(file, "2 initializers named 'c'")


def test_operators_of_unknown_domains(tmp_path: Path) -> None:
    unknown = helper.make_node("Attend", ["x"], ["y"], domain="own")
    refused(saved(tmp_path, [unknown]), "own::Attend .*, an operator of neither ONNX nor ONNX Runtime")


def test_a_function_with_the_name_of_an_operator(tmp_path: Path) -> None:
    """ONNX Runtime runs its own operator, and onnx_ir the function."""
    function = helper.make_function("com.microsoft", "Gelu", ["a"], ["b"], [helper.make_node("Relu", ["a"], ["b"])], [])
    gelu = helper.make_node("Gelu", ["x"], ["y"], domain="com.microsoft")
    refused(saved(tmp_path, [gelu], [function]), "function com.microsoft::Gelu may be an operator of ONNX Runtime too")


def test_two_outputs_of_one_name(tmp_path: Path) -> None:
    file = saved(tmp_path, [node("Relu", "x")])
    model = onnx.load(file)
    model.graph.output.append(Y)
    onnx.save(model, file)
    refused(file, "2 outputs named 'y'")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (helper.make_tensor_value_info("z", TensorProto.STRING, [2]), "output 'z' is not a tensor of numbers"),
        (helper.make_tensor_sequence_value_info("z", FLOAT, None), "output 'z' is not a tensor of numbers"),
        (helper.make_tensor_value_info("z\x1b[31m", FLOAT, [2]), "is named .*without control characters"),
        (helper.make_tensor_value_info("z" * 2000, FLOAT, [2]), "at most 1,024 characters"),
    ],
    ids=["strings", "a sequence", "control characters", "long"],
)
def test_outputs_that_a_bundle_cannot_have(tmp_path: Path, value: onnx.ValueInfoProto, words: str) -> None:
    kind = {"z": "SequenceConstruct" if value.type.HasField("sequence_type") else "Cast"}.get(value.name, "Neg")
    more = {"to": TensorProto.STRING} if kind == "Cast" else {}
    file = saved(tmp_path, [node("Relu", "x"), node(kind, "x", output=value.name, **more)])
    model = onnx.load(file)
    model.graph.output.append(value)
    onnx.save(model, file)
    refused(file, words)


def test_an_input_of_strings(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["": 20]> g (float[2] x, string[2] s) => (float[2] y) { y = Relu(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    refused(tmp_path / "model.onnx", "input 's' of model.onnx takes strings; give a graph that takes their token ids")


@pytest.fixture(params=["elsewhere", "here"])
def folder(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model; also the current folder, where the model's path has no folder."""
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path / "model" if request.param == "here" else tmp_path)
    return Path(".") if request.param == "here" else tmp_path / "model"


def external(location: str) -> TensorProto:
    tensor = TensorProto(dims=[2], data_type=FLOAT, name="weight", data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value=location)
    return tensor


def saved_with(folder: Path, tensor: TensorProto, of: str) -> Path:
    """A graph that adds a tensor to its input."""
    constant = helper.make_node("Constant", [], ["weight"], value=tensor)
    if of != "function":
        file = saved(folder, [node("Add", "x", "weight")])
        add_constant(file, tensor, of)
        return file
    opsets = [helper.make_opsetid("", 20)]
    function = helper.make_function("own", "f", ["x"], ["y"], [constant, node("Add", "x", "weight")], opsets)
    return saved(folder, [helper.make_node("f", ["x"], ["y"], domain="own")], [function])


@pytest.mark.parametrize("where", ["absent", "../outside", "/etc/hostname", "", "link", "way/weights", "pipe", "*"])
@pytest.mark.parametrize("of", ["initializer", "constant", "function"])
def test_weights_elsewhere(folder: Path, where: str, of: str) -> None:
    for name in (folder / "../outside", folder / "*"):
        name.write_bytes(bytes(1000))
    (folder / "link").symlink_to("../outside")
    (folder / "way").symlink_to(".", target_is_directory=True)
    (folder / "weights").write_bytes(bytes(8))
    os.mkfifo(folder / "pipe")
    outside = where.startswith(("..", "/", "*"))
    refused(saved_with(folder, external(where), of), "outside its folder" if outside else "not a regular file in its")


@pytest.mark.parametrize("of", ["initializer", "constant", "function"])
def test_weights_next_to_the_graph(folder: Path, of: str) -> None:
    (folder / "below").mkdir()
    (folder / "below/weights").write_bytes(np.array([5, 7], np.float32).tobytes())
    imported = import_graph(saved_with(folder, external("below/weights"), of))
    np.testing.assert_array_equal(imported.eager({"x": np.ones(2, np.float32)})["y"], [6, 8])


def test_a_shape_in_another_file(folder: Path) -> None:
    (folder / "weights").write_bytes(np.array([2, 1], np.int64).tobytes())
    shape = external("weights")
    shape.data_type = TensorProto.INT64
    file = saved(folder, [node("Reshape", "x", "weight")])
    add_constant(file, shape, "initializer")
    model = onnx.load(str(file), load_external_data=False)
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, [2, 1]))
    file.write_bytes(model.SerializeToString())
    assert import_graph(file).outputs[0].text() == "float32[2, 1]"


@pytest.mark.parametrize("of", ["initializer", "constant"])
def test_sparse_constants(folder: Path, of: str) -> None:
    file = saved(folder, [node("Add", "x", "weight")])
    model = onnx.load(str(file))
    indices = numpy_helper.from_array(np.arange(2), "at")
    tensor = onnx.SparseTensorProto(values=external("weights"), indices=indices, dims=[2])
    if of == "initializer":
        model.graph.sparse_initializer.append(tensor)
    else:
        model.graph.node.insert(0, helper.make_node("Constant", [], ["weight"], sparse_value=tensor))
    file.write_bytes(model.SerializeToString())
    (folder / "weights").write_bytes(bytes(8))
    refused(file, "sparse constant")


@pytest.mark.parametrize("dims", [[2**40], [3, -1], [4]])
@pytest.mark.parametrize("of", ["initializer", "constant"])
def test_a_constant_that_is_cut_short(tmp_path: Path, of: str, dims: list[int]) -> None:
    tensor = numpy_helper.from_array(np.array([1, 2, 1], np.int64), "shape")
    tensor.dims[:] = dims
    file = saved(tmp_path, [node("Reshape", "x", "shape")])
    add_constant(file, tensor, of)
    refused(file)


@pytest.mark.parametrize("kind", ["undefined", "no tensor", "nothing"])
def test_an_input_without_a_type(tmp_path: Path, kind: str) -> None:
    """ONNX Runtime's symbolic inference would loop forever."""
    file = saved(tmp_path, [node("Relu", "x")])
    model = onnx.load(str(file))
    if kind == "undefined":
        model.graph.input[0].type.tensor_type.elem_type = TensorProto.UNDEFINED
    elif kind == "no tensor":
        model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("x", FLOAT, [2]))
    else:
        model.graph.input[0].ClearField("type")
    onnx.save(model, file)
    refused(file, "input 'x' ")


def test_inference_that_gives_up_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime's own function leaves a file in the current folder."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    model = onnx.load(str(saved(tmp_path, [node("Thing", "x", domain="own")])))
    with pytest.raises(Exception, match="Incomplete"):
        SymbolicShapeInference.infer_shapes(model, auto_merge=True)
    (tmp_path / "here/sym_shape_infer_temp.onnx").unlink()
    infer_shapes(ir.from_proto(model))
    assert list((tmp_path / "here").iterdir()) == []


@pytest.mark.parametrize("op", ["ConstantOfShape", "Expand", "Tile", "Range", "OneHot"])
def test_huge_constants(tmp_path: Path, op: str) -> None:
    huge = [node("ReduceSum", "huge", output="sum", keepdims=0), node("Cast", "sum", output="cast", to=FLOAT),
            node("Add", "x", "cast")]  # fmt: skip
    made = {
        "ConstantOfShape": node("ConstantOfShape", "shape", output="huge"),
        "Expand": node("Expand", "x", "shape", output="huge"),
        "Tile": node("Tile", "x", "repeats", output="huge"),
        "Range": node("Range", "zero", "many", "one", output="huge"),
        "OneHot": node("OneHot", "row", "many", "values", output="huge"),
    }[op]
    file = saved(tmp_path, [made, *huge], shape=[1_000_000, 1_000_000], repeats=[10**12], zero=[0], one=[1],
                 many=[10**12], row=[1, 2, 3], values=[0, 1])  # fmt: skip
    refused(file, "out of constants|cannot be read as an ONNX model|cannot be read as a graph")


@pytest.mark.parametrize("op", ["Concat", "Tile", "Expand", "Outer"])
def test_a_chain_of_operators_makes_a_huge_constant(tmp_path: Path, op: str) -> None:
    nodes, name = [node("Cast", "row", output="c0", to=FLOAT)], "c0"
    for i in range(1, 14):
        following = f"c{i}"
        nodes.append(
            {
                "Concat": node("Concat", *[name] * 8, output=following, axis=0),
                "Tile": node("Tile", name, "eight", output=following),
                "Expand": node("Unsqueeze", name, "first", output=f"u{i}"),
                "Outer": node("Unsqueeze", name, "last", output=f"u{i}"),
            }[op]
        )
        if op in ("Expand", "Outer"):
            shape = "many" if op == "Expand" else "shape"
            nodes += [
                node("Expand", f"u{i}", shape, output=f"e{i}"),
                node("Reshape", f"e{i}", "flat", output=following),
            ]
        name = following
    nodes += [node("ReduceSum", name, output="sum", keepdims=0), node("Add", "x", "sum")]
    file = saved(tmp_path, nodes, row=[1, 2, 3], eight=[8], first=[0], last=[1], many=[8, 1], shape=[1, 8], flat=[-1])
    refused(file, "out of constants|numbers at one time out of")


def grown(op: str) -> list[onnx.NodeProto]:
    """Nodes that turn the few numbers of the input into 2^29 or more."""
    nodes, name, times = (
        [],
        "x",
        {"Concat": 28, "Tile": 7, "Pad": 1, "Resize": 1, "Expand": 5, "Kept": 1, "Whole": 1}.get(op, 5),
    )
    for i in range(times):
        last, column, row, made = name, f"column{i}", f"row{i}", f"made{i}"
        name = f"c{i}"
        outer = [node("Unsqueeze", last, "last", output=column), node("Unsqueeze", last, "first", output=row)]
        flat = node("Reshape", made, "flat", output=name)
        nodes += {
            "Concat": [node("Concat", last, last, output=name, axis=0)],
            "Tile": [node("Tile", last, "many", output=name)],
            "Pad": [node("Pad", last, "pads", output=name)],
            "Resize": [node("Unsqueeze", last, "before", output=row), node("Resize", row, "", "", "size", output=name)],
            "Expand": [*outer, node("Shape", column, output=f"s{i}"), node("Shape", row, output=f"t{i}"),
                       node("Max", f"s{i}", f"t{i}", output=f"u{i}"), node("Expand", row, f"u{i}", output=made), flat],
            "Kept": [node("ConstantOfShape", "large", output=f"k{k}") for k in range(9)]
            + [node("Sum", *[f"k{k}" for k in range(9)], output=name)],
            "Whole": [node("Shape", last, output="s"), node("Mul", "s", "large", output="t"),
                      node("ConstantOfShape", "t", output="k", value=helper.make_tensor("v", 7, [1], [1])),
                      node("Cast", "k", output=name, to=FLOAT)],
            "Einsum": [node("Einsum", last, last, output=made, equation="i,j->ij"), flat],
            "MatMul": [*outer, node("MatMul", column, row, output=made), flat],
            "Gemm": [*outer, node("Gemm", column, row, output=made), flat],
            "Add": [*outer, node("Add", column, row, output=made), flat],
            "Gather": [node("Gather", last, "indices", output=name, axis=0)],
        }[op]  # fmt: skip
    return [*nodes, node("ReduceSum", name, output="sum", keepdims=0), node("Add", "x", "sum")]


@pytest.mark.parametrize(
    "op", ["Concat", "Tile", "Pad", "Resize", "Expand", "Kept", "Whole", "Einsum", "MatMul", "Gemm", "Add", "Gather"]
)
def test_a_few_numbers_do_not_grow_without_bound(tmp_path: Path, op: str) -> None:
    """A file of one kilobyte would use all memory when it runs."""
    file = saved(tmp_path, grown(op), many=[16], pads=[0, 2**30], size=[1, 1, 2**30], first=[0], last=[1], flat=[-1],
                 before=[0, 1], large=[2**25], indices=[[0, 1] * 32] * 64)  # fmt: skip
    reset_peak()
    before = peak()
    refused(file, r"numbers at one time out of [\d,]+ that it is given, the most by ")
    assert peak() - before < 2**28


def test_a_graph_without_nodes_does_not_grow(tmp_path: Path) -> None:
    check_growth(ir.from_proto(onnx.load(str(saved(tmp_path, [])))), {})


@pytest.mark.parametrize(("heads", "tokens"), [(8, 4096), (12, 2048)])
def test_scores_of_many_tokens_do_not_count_as_growth(heads: int, tokens: int) -> None:
    """Attention without weights grows most among plausible graphs."""
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 23]>
        graph (float[1, {heads}, {tokens}, 64] q, float[1, {heads}, 64, {tokens}] k) => (float[1, {heads}, 1, 1] y)
        {{ s = MatMul(q, k)  y = GlobalMaxPool(s) }}""")
    graph = ir.from_proto(model)
    infer_shapes(graph)
    check_growth(graph, {})


def test_a_shape_made_of_the_shape_of_a_large_table(tmp_path: Path) -> None:
    """As torch's former exporter writes for every large vocabulary."""
    nodes = [
        node("Cast", "x", output="ids", to=TensorProto.INT64),
        node("Gather", "table", "ids", output="rows"),
        node("Shape", "rows", output="shape"),
        node("Concat", "shape", "one", output="longer", axis=0),
        node("Reshape", "x", "longer", output="column"),
        node("Squeeze", "column", "last"),
    ]
    assert import_graph(saved(tmp_path, nodes, table=[0] * (2**20 + 1), one=[1], last=[1]))


def test_a_graph_for_which_no_memory_is_left_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attnforge.export.sources.onnx_check.available", lambda: 2**20)
    file = saved(tmp_path, [node("Tile", "x", "many", output="c"), node("ReduceSum", "c", output="s", keepdims=0),
                            node("Add", "x", "s")], many=[2**20])  # fmt: skip
    with pytest.raises(UnavailableError, match=r"needs at least 0\.0 GiB of memory.*and 0\.0 GiB are left"):
        import_graph(file)


def test_a_graph_that_does_not_take_the_sizes_its_dims_allow(tmp_path: Path) -> None:
    file = saved(tmp_path, [node("Reshape", "x", "shape", output="twice"), node("ReduceSum", "twice", keepdims=0)],
                 shape=[2, 2])  # fmt: skip
    model = onnx.load(str(file))
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", FLOAT, ["n"]))
    model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", FLOAT, []))
    onnx.save(model, file)
    with pytest.raises(
        UsageError, match=r"does not run with x \[\d+\], which its dims allow: .*; give ranges"
    ) as raised:
        attnforge.deploy(str(file), None, tmp_path / "out", {"n": (1, 4, 8)}, targets=["onnxruntime"], tune=False)
    assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()


def test_functions_that_double(tmp_path: Path) -> None:
    functions = [
        helper.make_function(
            "own", f"f{i}", ["a"], ["c"],
            [helper.make_node(f"f{i - 1}" if i else "Relu", ["a"], ["b"], domain="own" if i else ""),
             helper.make_node(f"f{i - 1}" if i else "Relu", ["b"], ["c"], domain="own" if i else "")],
            [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)],
        )
        for i in range(28)
    ]  # fmt: skip
    refused(
        saved(tmp_path, [helper.make_node("f27", ["x"], ["y"], domain="own")], functions), "more than 200,000 operators"
    )
    assert import_graph(
        saved(tmp_path, [helper.make_node("f3", ["x"], ["y"], domain="own")], functions[:4])
    ).model.graph


def test_a_function_that_calls_itself(tmp_path: Path) -> None:
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    both = [
        helper.make_function("own", name, ["a"], ["b"], [helper.make_node(called, ["a"], ["b"], domain="own")], opsets)
        for name, called in (("f", "g"), ("g", "f"))
    ]
    words = "calls itself|cannot be read as an ONNX model"
    refused(saved(tmp_path, [helper.make_node("f", ["x"], ["y"], domain="own")], both), words)


def test_branches_within_branches(tmp_path: Path) -> None:
    def nested(depth: int) -> onnx.GraphProto:
        name = f"out{depth}"
        out = helper.make_tensor_value_info(name, FLOAT, [2])
        if depth == 0:
            return helper.make_graph([helper.make_node("Relu", ["x"], [name])], name, [], [out])
        negative = helper.make_graph([helper.make_node("Neg", ["x"], ["n"])], "other", [], [out])
        negative.node[0].output[0] = negative.output[0].name = f"neg{depth}"
        made = helper.make_node("If", ["c"], [name], then_branch=nested(depth - 1), else_branch=negative)
        return helper.make_graph([made], name, [], [out])

    true = helper.make_tensor("c", TensorProto.BOOL, [], [True])
    nodes = [helper.make_node("Constant", [], ["c"], value=true), nested(12).node[0]]
    nodes[1].output[0] = "y"
    refused(saved(tmp_path, nodes), "nests graphs [0-9]+ deep; at most 8 are allowed|cannot be read as an ONNX model")


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.7])
def test_a_file_that_is_cut_or_altered(tmp_path: Path, cut: float) -> None:
    file = saved(tmp_path, [node("Relu", "x")])
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * cut)])
    refused(file)
    if cut > 0.5:
        return
    for i in range(0, len(data), 7):
        file.write_bytes(data[:i] + bytes([data[i] ^ 0x55]) + data[i + 1 :])
        try:
            import_graph(file)
        except AttnforgeError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize("bounds", [(1, 4, 10**12), (1, 4, 2**31), (0, 1, 2), (2, 1, 3), (1, 2)])
def test_invalid_ranges(bounds: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="up to 2,147,483,647"):
        check_ranges({"n": bounds}, ["n"], "the graph")


@pytest.mark.parametrize("name", [":f", "..a:f", "a:", ":", "no.such.module:f", "os:no_such_function"])
def test_callables_that_do_not_exist(name: str) -> None:
    with pytest.raises(UsageError, match="cannot import"):
        build(name, {}, None)


def test_a_file_that_does_not_exist() -> None:
    with pytest.raises(UsageError, match="no file"):
        model_named("absent.onnx", {}, None, {})


def test_options_that_would_have_no_effect(tmp_path: Path) -> None:
    from tests.support.bundles import small_example

    module, args, shapes = small_example()
    for options in ({"compute_capabilities": ["garbage"]}, {"profiles": [{"batch": (1, 1, 1)}]}):
        with pytest.raises(UsageError, match="onnxruntime is built; add"):
            attnforge.deploy(module, args, tmp_path / "out", shapes, targets=["onnxruntime"], **options)
    for least, words in ((float("nan"), "no metric was named"), (0.5, "no metric was named")):
        with pytest.raises(UsageError, match=words):
            attnforge.deploy(module, args, tmp_path / "out", shapes, targets=["onnxruntime"], least=least)
    with pytest.raises(UsageError, match="least value is nan; give a finite number"):
        attnforge.deploy(module, args, tmp_path / "out", shapes, data=[args], metric="cosine", least=float("nan"))
    assert list(tmp_path.iterdir()) == []
