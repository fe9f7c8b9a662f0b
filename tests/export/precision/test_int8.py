"""precision="int8": products in 8 bits, counted in the compiled graph, and refused if they cost too much."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import openvino
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from torch import Tensor, nn
from torch.export import Dim
from typer.testing import CliRunner

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import CANONICAL, OPENVINO, REFERENCE_OUTPUTS, Bundle, Quantised, TargetRecord
from attnforge.cli import app
from attnforge.errors import AttnforgeError, BuildError, InputError, UnknownNameError, UsageError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.diagnosis.stages import sites_of
from attnforge.export.graphs.build import Builder, constant, like, typed
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.graphs.nodes import input_of
from attnforge.export.graphs.qdq import lookups_in_8_bits, products_between
from attnforge.export.graphs.saving import load_graph
from attnforge.export.lowering import openvino as for_openvino
from attnforge.export.lowering.attention import Attention
from attnforge.export.lowering.integers import integer_products, rows_first
from attnforge.export.lowering.openvino import INT8_FORM
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.precision import calibration, gate, rounding
from attnforge.export.precision.calibration import balanced, calibrate, is_normed
from attnforge.export.precision.quantisation import Quantisation, error_of, products, quantise, tables
from attnforge.export.precision.rounding import (
    RoundedOperands,
    Scale,
    sites_for_int8,
    whole,
    why_over_budget,
    with_errors,
)
from attnforge.export.sources.torch_module import capture
from attnforge.machine import Machine, this_machine
from attnforge.model import build_model
from attnforge.model.attention import MultiHeadAttention
from attnforge.model.data import real_data
from attnforge.precision import precision_named
from attnforge.runtime import cases
from attnforge.runtime.backends import openvino_graph
from attnforge.runtime.backends.openvino_graph import prepared
from attnforge.runtime.backends.registry import REGISTRY
from attnforge.runtime.parity.budget import relative_error
from tests.support.bundles import rewrite

FLOAT = ir.DataType.FLOAT
graph_of = REGISTRY[OPENVINO].model
WIDTH, TOKENS = 64, 12
SHAPES = {"x": {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=1, max=24)}}


class Block(nn.Module):
    """A pre-norm block of attention and a feed-forward layer, a norm, and a head."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward, self.last = (nn.LayerNorm(width) for _ in range(3))
        self.attention = MultiHeadAttention(width, 4)
        self.up, self.down, self.head = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.Linear(width, 128)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.before_attention(x)
        x = x + self.attention(normed, normed, normed)
        x = x + self.down(nn.functional.gelu(self.up(self.before_feed_forward(x))))
        logits: Tensor = self.head(self.last(x))
        return logits


class Outliers(Block):
    """The same block, with two normed channels a hundred times as large as the others, as in some trained models. The
    weights that read them are smaller by the same factor, so that all channels matter equally."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 32)
        attention = self.attention
        readers = {
            self.before_attention: (attention.query_proj, attention.key_proj, attention.value_proj),
            self.before_feed_forward: (self.up,),
        }
        with torch.no_grad():
            for norm, of_norm in readers.items():
                norm.weight[[3, 17]] *= 100
                for linear in of_norm:
                    linear.weight[:, [3, 17]] /= 100


def made(kind: Callable[[], nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind().eval(), (torch.randn(2, TOKENS, WIDTH),)


def real(count: int = 4) -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(2, TOKENS, WIDTH, generator=generator),) for _ in range(count)]


def deployed(folder: Path, kind: Callable[[], nn.Module] = Block, precision: str = "int8", **options: Any) -> Bundle:
    module, args = made(kind)
    options = {"targets": ["onnxruntime"], "tune": False, **options}
    return attnforge.deploy(module, args, folder, SHAPES, precision, **options)


def of(bundle: Bundle) -> Quantised:
    assert bundle.manifest.quantised is not None
    return bundle.manifest.quantised


# --- the numbers ------------------------------------------------------------------------------------------------------


def linear(weight: Array, bias: Array | None, dims: list[int], transposed: bool = False) -> ir.Model:
    """`x W + b`, followed by a norm because `products` skips a head; a Gemm if x has two dims."""
    x = ir.Value(name="x", shape=ir.Shape([*dims, len(weight)]), type=ir.TensorType(FLOAT))
    transposed = transposed and len(dims) == 1
    arrays = {"w": weight.T if transposed else weight, "b": bias, "gain": np.ones(weight.shape[1], np.float32)}
    given = {
        name: typed(ir.Value(name=name, const_value=ir.tensor(np.ascontiguousarray(array))), FLOAT, array.shape)
        for name, array in arrays.items()
        if array is not None
    }
    if len(dims) == 1:
        nodes = [ir.node("Gemm", [x, given["w"], given.get("b")], {"transB": int(transposed)}, name="product")]
    else:
        nodes = [ir.node("MatMul", [x, given["w"]], name="product")]
        if bias is not None:
            nodes.append(ir.node("Add", [given["b"], nodes[0].outputs[0]], name="bias"))
    nodes.append(ir.node("LayerNormalization", [nodes[-1].outputs[0], given["gain"]], name="norm"))
    for node in nodes:
        node.outputs[0].name, node.outputs[0].type = f"{node.name}:0", ir.TensorType(FLOAT)
        node.outputs[0].shape = ir.Shape([*dims, weight.shape[1]])
    weights = list(given.values())
    graph = ir.Graph([x], nodes[-1].outputs, nodes=nodes, initializers=weights, opset_imports={"": 23})
    return ir.Model(graph, ir_version=10)


def result(model: ir.Model, x: Array, optimised: bool = False) -> Array:
    """The product with its bias, as it is, or as ONNX Runtime runs the deployed graph."""
    name = next(str(node.inputs[0].name) for node in model.graph if node.name == "norm" and node.inputs[0] is not None)
    return as_it_is(model, [name], optimised=optimised)({"x": x})[name]


def by_hand(x: Array, weight: Array, bias: Array | None, form: Quantisation) -> Array:
    """The product by the formulas, in float64, without any code of the graph's."""
    inputs, matrix = x.astype(np.float64), weight.astype(np.float64)
    if form.balance is not None:
        inputs, matrix = inputs / form.balance, matrix * form.balance[:, None].astype(np.float64)
    steps = np.abs(matrix).max(axis=0) / 127
    steps[steps == 0] = 1
    matrix = np.round(matrix / steps) * steps
    if form.scale is None:
        size = np.abs(inputs).max(axis=-1, keepdims=True)
        size[size == 0] = 1
        inputs = np.round(inputs / size * 127) / 127 * size
    else:
        inputs = np.clip(np.round(inputs / form.scale), -128, 127) * form.scale
    product: Array = inputs @ matrix
    return product if bias is None else product + bias


@given(
    st.sampled_from(([3], [2, 5], [1, 2, 3])), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
    st.integers(0, 2**16),
)  # fmt: skip
def test_a_product_matches_the_formulas(
    dims: list[int], by_token: bool, is_balanced: bool, has_bias: bool, transposed: bool, seed: int
) -> None:
    """The canonical graph, and the integer product for ONNX Runtime: the same except where a number is half way between
    two steps, which earlier rounding may shift."""
    rng = np.random.default_rng(seed)
    channels, outputs = int(rng.integers(64, 90)), int(rng.integers(64, 90))
    weight = rng.standard_normal((channels, outputs)).astype(np.float32)
    bias = rng.standard_normal(outputs).astype(np.float32) if has_bias else None
    balance = np.exp(rng.standard_normal(channels)).astype(np.float32) if is_balanced else None
    x = rng.standard_normal([*dims, channels]).astype(np.float32) * np.float32(10.0 ** rng.integers(-3, 4))
    x[0, ..., :] *= rng.integers(0, 2)  # sometimes a row of zeros
    form = Quantisation(None if by_token else float(np.abs(x).max() or 1) / rng.uniform(60, 200), balance)
    model = linear(weight, bias, dims, transposed)
    wanted = by_hand(x, weight, bias, form)
    quantise(model, {"product": form})
    assert len(products_between(model)) == 1
    canonical = result(model, x)
    assert relative_error(canonical.astype(np.float64), wanted) < 4e-3
    rounded = np.isclose(canonical, wanted, rtol=1e-4, atol=1e-5 * float(np.abs(wanted).max() or 1))
    assert rounded.mean() > 0.9
    integer_products(model)
    assert [node.op_type for node in model.graph].count("MatMulIntegerToFloat") == 1
    lowered = result(model, x, optimised=True)
    assert relative_error(lowered.astype(np.float64), canonical.astype(np.float64)) < 1e-6


def test_non_finite_numbers_stay_in_their_token() -> None:
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    model = linear(weight, None, [1, 4])
    quantise(model, {"product": Quantisation()})
    x = np.random.default_rng(1).standard_normal((1, 4, 64)).astype(np.float32)
    whole = result(model, x)
    x[0, 1, 5], x[0, 2, 5] = np.nan, np.inf
    got = result(model, x)
    assert np.array_equal(got[0, [0, 3]], whole[0, [0, 3]])
    assert np.isfinite(whole).all() and not np.isfinite(got[0, 2]).any()


def test_products_of_a_model() -> None:
    """All products with weights except the head; those of one input share its Q/DQ."""
    module, args = made(Block)
    model = capture(module, args, SHAPES, precision_named("fp32")).model
    quantisable = products(model)
    assert len(quantisable) == 6 and len({product.input for product in quantisable}) == 4
    quantise(model, dict.fromkeys((product.name for product in quantisable), Quantisation()))
    assert len(products_between(model)) == 6
    assert [node.op_type for node in model.graph].count("QuantizeLinear") == 4
    assert sum(v.dtype == ir.DataType.INT8 for v in model.graph.initializers.values()) == 6
    assert not products(linear(np.ones((8, 8), np.float32), None, [1, 4]))


def test_rows_of_a_table_match_the_formulas() -> None:
    """In the canonical graph and for ONNX Runtime: equal to the bit, because both scale the same numbers."""
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal((100, 48)) * 10.0 ** rng.integers(-3, 4, (100, 1))).astype(np.float32)
    weight[7] = 0
    model, index = lookups(weight), np.array([[0, 99, 7], [-1, 3, 3]])
    (table,) = tables(model)
    steps = np.abs(weight.astype(np.float64)).max(axis=1, keepdims=True) / 127
    steps[7] = 1
    wanted = (np.round(weight / steps) * steps)[index]
    quantise(model, {table.name: Quantisation()})
    assert tables(model) == [] and len(lookups_in_8_bits(model)) == 1
    stored = {name: value.const_value.size for name, value in model.graph.initializers.items() if value.const_value}
    assert stored == {"w/rows": 4800, "w/scale": 100, "gain": 48}
    canonical = looked_up(model, index)
    assert relative_error(canonical.astype(np.float64), wanted) < 1e-6
    assert 1e-3 < error_of(table) < 1e-2 and np.array_equal(canonical[0, 2], np.zeros(48))
    rows_first(model)
    assert ir.DataType.INT8 in [input_of(node).dtype for node in model.graph if node.op_type == "Gather"]
    assert np.array_equal(looked_up(model, index), canonical)


def lookups(weight: Array) -> ir.Model:
    """Rows of a table, followed by a norm."""
    ids = ir.Value(name="ids", shape=ir.Shape([2, 3]), type=ir.TensorType(ir.DataType.INT64))
    stored, gain = (
        typed(ir.Value(name=name, const_value=ir.tensor(array)), FLOAT, array.shape)
        for name, array in (("w", weight), ("gain", np.ones(weight.shape[1], np.float32)))
    )
    rows = ir.node("Gather", [stored, ids], name="lookup")
    norm = ir.node("LayerNormalization", [rows.outputs[0], gain], name="norm")
    for node in (rows, norm):
        node.outputs[0].name = f"{node.name}:0"
        typed(node.outputs[0], FLOAT, [2, 3, weight.shape[1]])
    graph = ir.Graph([ids], norm.outputs, nodes=[rows, norm], initializers=[stored, gain], opset_imports={"": 23})
    return ir.Model(graph, ir_version=10)


def looked_up(model: ir.Model, index: Array) -> Array:
    name = next(str(node.inputs[0].name) for node in model.graph if node.name == "norm" and node.inputs[0] is not None)
    return as_it_is(model, [name])({"ids": index})[name]


class Words(nn.Module):
    """Tokens that are looked up in a table, and a block; if tied, the table is also the head's weights."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.table, self.block, self.tied = nn.Embedding(400, WIDTH), Block(), tied

    def forward(self, ids: Tensor) -> Tensor:
        rows: Tensor = self.table(ids)
        result: Tensor = rows @ self.table.weight.T if self.tied else self.block(rows)
        return result


def _reads_table(node: ir.Node) -> bool:
    return any(value is not None and str(value.name).startswith("table.weight/") for value in node.inputs)


def test_a_table_that_a_product_reads_is_not_quantised() -> None:
    ids, sizes = torch.arange(24).reshape(2, 12), {"ids": {0: Dim("batch", min=1, max=4)}}
    free, tied = (capture(Words(tied), (ids,), sizes, precision_named("fp32")).model for tied in (False, True))
    assert [table.weight.shape for table in tables(free)] == [(400, WIDTH)]
    assert tables(tied) == []


def test_tables_are_stored_in_8_bits_and_right_on_every_available_backend(tmp_path: Path) -> None:
    """ONNX Runtime and OpenVINO look up rows before they dequantise them."""
    ids, sizes = torch.arange(24).reshape(2, 12), {"ids": {0: Dim("batch", min=1, max=4)}}
    bundle = attnforge.deploy(
        made(Words)[0], (ids,), tmp_path / "b", sizes, "int8", ["onnxruntime", "tensorrt_rtx"],
        max_error=0.1, tune=False,
    )  # fmt: skip
    quantised = of(bundle)
    (error,) = quantised.tables.values()
    assert 1e-3 < error < 1e-2 and quantised.steps[0].startswith("6 of 6 products and 1 of 1 tables quantised")
    assert attnforge.verify(bundle, ["onnxruntime-cpu", "openvino"]).passed
    read = [node.op_type for node in ir.load(tmp_path / "b" / "onnxruntime" / "model.onnx").graph if _reads_table(node)]
    assert read == ["Gather", "Gather"]
    rewritten = prepared(openvino.Core().read_model(tmp_path / "b" / CANONICAL), widen=False)
    looked_up_in = [node.input_value(0) for node in rewritten.get_ordered_ops() if node.get_type_name() == "Gather"]
    assert "i8" in {port.get_element_type().get_type_name() for port in looked_up_in}
    assert CliRunner().invoke(app, ["inspect", str(tmp_path / "b")]).output.count("stored by row: 1 tables") == 1


def test_balancing_gives_channels_and_weights_the_same_spread() -> None:
    rng = np.random.default_rng(0)
    peak = np.exp(rng.standard_normal(64) * 2).astype(np.float32)
    weight = rng.standard_normal((64, 64)).astype(np.float32)
    balance = balanced(peak, weight, 0.5)
    share = (peak / balance) / (np.abs(weight).max(axis=1) * balance)
    assert np.allclose(share, share[0], rtol=1e-4)
    peak[:2], weight[2] = 0, 0
    balance = balanced(peak, weight, 0.8)
    assert np.isfinite(balance).all() and (balance[:3] == 1).all() and (balance > 0).all()


def test_one_range_is_used_for_values_that_a_norm_bounds_on_real_data() -> None:
    module, args = made(Block)
    model = capture(module, args, SHAPES, precision_named("fp32")).model
    quantisable = products(model)
    for is_real in (True, False):
        forms = calibrate(model, quantisable, [{"x": x.numpy()} for (x,) in real()], is_real)
        normed = [True, True, True, False, True, True]  # after the norm, attention, the norm, and a GELU of its product
        assert [forms[product.name].scale is not None for product in quantisable] == [is_real and n for n in normed]
        assert all(0 < form.error < 0.02 for form in forms.values())
        assert any(form.balance is not None for form in forms.values()) == is_real


@pytest.mark.parametrize(
    ("op_type", "others", "is_bounded"),
    [("Gelu", [], True), ("Mul", ["normed"], True), ("Div", [2.0], True), ("Div", ["normed"], False),
     ("Exp", [], False), ("Add", ["x"], False), ("MatMul", ["normed"], False), ("MatMul", [np.eye(8)], True)],
)  # fmt: skip
def test_a_norm_bounds_what_weights_and_activations_compute_from_it(
    op_type: str, others: list[Any], is_bounded: bool
) -> None:
    x = ir.Value(name="x")
    norm = ir.node("LayerNormalization", [x, ir.Value(name="gain")])
    values = {"x": x, "normed": norm.outputs[0]}
    operands = [
        values[operand] if isinstance(operand, str) else ir.Value(name="w", const_value=ir.tensor(np.float32(operand)))
        for operand in others
    ]
    assert is_normed(ir.node(op_type, [norm.outputs[0], *operands]).outputs[0]) is is_bounded
    assert not is_normed(ir.node(op_type, [x, *operands]).outputs[0])


# --- a deployment -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def by_tensor(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A deployment with few tokens, forced to have queries and keys in int8."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(for_openvino, "INT8_SCORES", 1)
        return deployed(tmp_path_factory.mktemp("int8") / "b", data=real(), max_error=0.05)


def test_a_deployment_is_verified_on_every_available_backend(by_tensor: Bundle) -> None:
    report = attnforge.verify(by_tensor, ["onnxruntime-cpu", "openvino"])
    assert report.passed and report.warnings == []
    assert {"data", "scaled", "outliers", "normal"} <= {case.kind for case in report.cases}
    manifest, quantised = by_tensor.manifest, of(by_tensor)
    assert manifest.precision == "int8" and manifest.eager_precision == "fp32"
    assert {spec.dtype for spec in (*manifest.inputs, *manifest.outputs)} == {"float32"}
    assert len(quantised.products) == 6 and quantised.kept == {} and quantised.calibrated == 4
    assert quantised.share > 0.7 and 0 < quantised.error <= 0.05
    assert manifest.targets["onnxruntime"].low_bit == 6
    assert manifest.attention.canonical == 1


def test_weights_are_stored_in_8_bits(by_tensor: Bundle, tmp_path: Path) -> None:
    whole = deployed(tmp_path / "fp32", precision="fp32", cache=False)
    sizes = []
    for bundle in (by_tensor, whole):
        weights = ir.load(bundle.file(CANONICAL)).graph.initializers.values()
        sizes.append(sum(value.const_value.nbytes for value in weights if value.const_value is not None))
    head = 4 * 128 * WIDTH
    assert sizes[0] - head < 0.3 * (sizes[1] - head)


def test_real_sizes_outside_the_data_are_right(by_tensor: Bundle) -> None:
    module, _ = made(Block)
    with attnforge.load(by_tensor, backend="onnxruntime-cpu") as session:
        for batch, tokens in ((1, 1), (4, 24), (3, 7)):
            x = torch.randn(batch, tokens, WIDTH, generator=torch.Generator().manual_seed(tokens))
            got = session(x)
            assert isinstance(got, Tensor)
            assert relative_error(got.double().numpy(), module.double()(x.double()).detach().numpy()) < 0.02


def test_inspect_says_what_is_in_8_bits(by_tensor: Bundle) -> None:
    shown = CliRunner().invoke(app, ["inspect", str(by_tensor.path)]).output
    assert (
        "6 products" in shown and "by tensor" in shown and "onnxruntime: 6 of 6 products multiplied as stored" in shown
    )
    document = json.loads(CliRunner().invoke(app, ["inspect", str(by_tensor.path), "--json"]).output)
    assert document["quantised"]["type"] == "int8" and document["targets"]["onnxruntime"]["low_bit"] == 6
    assert "openvino: queries × keys in int8 at 1 sites; largest error" in " ".join(shown.split())
    assert f"openvino: {INT8_FORM}" in shown and list(document["quantised"]["scores"]) == ["attention"]


def _stored_as(output: Any) -> str:
    """The type of the constant that an operand is computed from, following first inputs."""
    while output.get_node().get_input_size():
        output = output.get_node().input_value(0)
    kind: str = output.get_element_type().get_type_name()
    return kind


@pytest.mark.parametrize(("instructions", "kind"), [(["avx2", "avx512f"], "f32"), (["avx2", "avx512_vnni"], "i8")])
def test_if_products_would_saturate_openvino_multiplies_in_fp32(
    by_tensor: Bundle, monkeypatch: pytest.MonkeyPatch, instructions: list[str], kind: str
) -> None:
    machine = Machine(system="Linux x86_64", processor="", processors=1, instructions=instructions, gpus=[])
    monkeypatch.setattr(openvino_graph, "this_machine", lambda gpus: machine)
    model = openvino_graph.prepared(
        openvino.Core().read_model(by_tensor.file(graph_of(by_tensor.manifest))), widen=False, scores=True
    )
    nodes = model.get_ordered_ops()
    kinds = [_stored_as(node.input_value(1)) for node in nodes if node.get_type_name() == "MatMul"]
    rounded = [node for node in nodes if _rounds_scores(node)]
    assert len(rounded) == (0 if kind == "f32" else 2)
    assert kinds.count(kind) >= 6 and (kind == "i8" or "i8" not in kinds)
    if kind == "f32":
        assert attnforge.verify(by_tensor, ["openvino"]).passed


def _rounds_scores(node: Any) -> bool:
    """Whether an operator of OpenVINO's graph rounds a query or a key."""
    if node.get_type_name() != "FakeQuantize":
        return False
    return any("attention/Attention/" in user.get_node().get_friendly_name() for user in _readers(node))


def _readers(node: Any) -> list[Any]:
    readers: list[Any] = [*node.output(0).get_target_inputs()]
    return readers


def _restoring(attention: ir.Node, i: int) -> ir.Node | None:
    """The DequantizeLinear that computes an operand of attention; None if another node does."""
    value = attention.inputs[i]
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _scale(restoring: ir.Node | None) -> float:
    assert restoring is not None and restoring.inputs[0] is not None and restoring.inputs[1] is not None
    assert restoring.inputs[0].dtype == ir.DataType.INT8
    scale = ir.convenience.get_const_tensor(restoring.inputs[1])
    assert scale is not None
    return float(scale.numpy())


def test_queries_and_keys_are_rounded_by_the_ranges_of_the_data(by_tensor: Bundle) -> None:
    """A scale is 1.2 times the largest number of the data over 127 steps; only OpenVINO's graph rounds them."""
    module, _ = made(Block)
    assert isinstance(module, Block)
    expected = []
    with torch.no_grad():
        for projection in (module.attention.query_proj, module.attention.key_proj):
            largest = max(float(projection(module.before_attention(x)).abs().max()) for (x,) in real())
            expected.append(1.2 * largest / 127)
    model = load_graph(by_tensor, graph_of(by_tensor.manifest))
    (node,) = (node for node in model.graph if node.op_type == "Attention")
    assert [_restoring(node, i) is None for i in range(3)] == [False, False, True]
    scales = [_scale(_restoring(node, i)) for i in range(2)]
    assert scales == pytest.approx(expected, rel=1e-5)
    canonical = load_graph(by_tensor, CANONICAL)
    counts = [sum(node.op_type == "QuantizeLinear" for node in graph) for graph in (model.graph, canonical.graph)]
    assert counts[0] == counts[1] + 2
    (site,) = by_tensor.manifest.attention.details
    assert site.targets["openvino"].form == INT8_FORM and site.targets["onnxruntime"].form != INT8_FORM


@pytest.mark.skipif(this_machine(gpus=False).saturates, reason="8-bit products saturate on this machine")
def test_openvino_multiplies_queries_and_keys_in_int8(by_tensor: Bundle) -> None:
    """The attention kernel reads int8, while that of the canonical graph reads fp32."""
    types = []
    for file in (graph_of(by_tensor.manifest), CANONICAL):
        core = openvino.Core()
        graph = openvino_graph.prepared(core.read_model(by_tensor.file(file)), widen=False)
        compiled = core.compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        kernels = [
            node
            for node in compiled.get_runtime_model().get_ordered_ops()
            if "Softmax" in node.get_rt_info()["originalLayersNames"].astype(str)
        ]
        (kernel,) = kernels
        types.append([kernel.get_input_element_type(i).get_type_name() for i in range(2)])
    assert types == [["i8", "i8"], ["f32", "f32"]]


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_a_wrong_scale_of_queries_is_refused(by_tensor: Bundle, tmp_path: Path, factor: float) -> None:
    folder = Path(shutil.copytree(by_tensor.path, tmp_path / "b"))
    file = folder / graph_of(by_tensor.manifest)
    model = ir.load(file)
    node = next(node for node in model.graph if node.op_type == "Attention")
    restoring = _restoring(node, 0)
    scale = ir.tensor(np.float32(_scale(restoring) * factor), name="wrong")
    wrong = ir.Value(name="wrong", const_value=scale)
    model.graph.register_initializer(wrong)
    assert restoring is not None
    restoring.replace_input_with(1, wrong)
    ir.save(model, file)
    report = attnforge.verify(rewrite(folder), ["openvino", "onnxruntime-cpu"])
    assert not report.backends["openvino"].passed and report.backends["onnxruntime-cpu"].passed


@pytest.mark.parametrize(("factor", "passes"), [(1.0, True), (0.1, False)])
def test_clipped_queries_and_keys_would_miss_the_budget(by_tensor: Bundle, factor: float, passes: bool) -> None:
    model, manifest = load_graph(by_tensor, CANONICAL), by_tensor.manifest
    sites = sites_of(manifest.attention)
    scores = [RoundedOperands(sites[0].name, sites[0], dict.fromkeys((0, 1), 0.03 * factor), whole(ir.DataType.INT8))]
    why = why_over_budget(by_tensor.path, model, sites, scores, manifest.inputs, manifest.cases)
    assert (why is None) == passes


def test_an_error_that_no_sample_shows_would_miss_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of an output that is stored in part, which verify compares too."""
    monkeypatch.setattr(cases, "SAMPLED", 64)
    monkeypatch.setattr(for_openvino, "INT8_SCORES", 1)
    bundle = deployed(tmp_path / "b", data=real(), max_error=0.05)
    model, manifest, file = load_graph(bundle, CANONICAL), bundle.manifest, bundle.path / REFERENCE_OUTPUTS
    stored, (site, *_) = load_file(file), sites_of(manifest.attention)
    scores = [RoundedOperands(site.name, site, {0: 0.03, 1: 0.03}, whole(ir.DataType.INT8))]
    arguments = (bundle.path, model, [site], scores, manifest.inputs, manifest.cases)
    assert why_over_budget(*arguments) is None
    for name in ("normal-largest/output/eager/blocks", "normal-largest/output/float64/blocks"):
        stored[name][0] += 1.0
    save_file(stored, file)
    assert "normal-largest" in str(why_over_budget(*arguments))


def test_rules_and_measuring_choose_queries_and_keys_in_int8(by_tensor: Bundle) -> None:
    canonical, sites = load_graph(by_tensor, CANONICAL), sites_of(by_tensor.manifest.attention)
    scales = {"attention": (0.05, 0.05)}
    forms = []
    for tokens in (64, 128):
        sizes = {**by_tensor.manifest.cases[0].sizes, "tokens": tokens}
        forms += [site.form for site in for_openvino.lower(canonical.clone(), sites, sizes, None, scales)]
    assert forms == [for_openvino.CANONICAL_FORM, INT8_FORM]
    assert for_openvino.lower(canonical.clone(), sites, sizes) == []
    tuner = Tuner(sizes, 2.0, library=for_openvino.LIBRARY)
    (measured,) = for_openvino.lower(canonical.clone(), sites, sizes, tuner, scales)
    assert set(measured.measured) == {for_openvino.CANONICAL_FORM, INT8_FORM} and not measured.dropped


class Queries(nn.Module):
    """Attention whose queries and keys are computed from its inputs."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.query, self.key, self.is_causal = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), is_causal

    def forward(self, of_query: Tensor, of_key: Tensor) -> Tensor:
        query, key = (x.unflatten(-1, (4, -1)).transpose(1, 2) for x in (self.query(of_query), self.key(of_key)))
        y = nn.functional.scaled_dot_product_attention(query, key, key, is_causal=self.is_causal)
        return y.transpose(1, 2).flatten(2)


class SomeBounded(nn.Module):
    """Queries and keys of which a norm bounds one or both, and both with causality."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.both, self.keys, self.queries, self.causal = Queries(), Queries(), Queries(), Queries(is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        result: Tensor = self.last(self.both(y, y) + self.keys(x, y) + self.queries(y, x) + self.causal(y, y))
        return result


def test_queries_and_keys_are_rounded_if_a_norm_bounds_both() -> None:
    model = capture(SomeBounded().eval(), real()[0], SHAPES, precision_named("fp32")).model
    sites = canonicalize(model).sites
    assert [site.name for site in sites] == ["both", "keys", "queries", "causal"]
    rounded = sites_for_int8(model, sites, [{"x": x.numpy()} for (x,) in real()])
    assert [part.name for part in rounded] == ["both"] and 0 < rounded[0].error < 0.02


def test_without_data_each_token_has_a_range(tmp_path: Path) -> None:
    bundle = deployed(tmp_path / "b", max_error=0.05)
    assert OPENVINO not in bundle.manifest.targets and of(bundle).scores == {}
    assert {product.by for product in of(bundle).products} == {"token"} and of(bundle).calibrated == 0
    assert attnforge.verify(bundle, ["onnxruntime-cpu", "openvino"]).passed


@pytest.mark.parametrize("capability", ["SM89", "SM120"])
def test_tensorrt_multiplies_in_8_bits_with_fused_attention(tmp_path: Path, capability: str) -> None:
    """With dynamic batch and tokens, and attention in fp16, for which TensorRT has a fused kernel."""
    bundle = deployed(
        tmp_path / "b", data=real(1), max_error=0.05, targets=["tensorrt_rtx"], compute_capabilities=[capability]
    )
    record = bundle.manifest.targets["tensorrt_rtx"]
    assert record.low_bit == 6 and record.attention_precision == "fp16" and record.without is None
    assert bundle.manifest.attention.fused["tensorrt_rtx"] == 1


def test_digits_lose_no_accuracy(tmp_path: Path) -> None:
    module, args, shapes = build_model("patch-attention-digits")
    data = real_data("patch-attention-digits", args)
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, "int8", ["onnxruntime"], tune=False,
        data=data.inputs, labels=data.labels, metric="accuracy", least=0.95, max_error=0.015,
    )  # fmt: skip
    metric = attnforge.verify(bundle, ["onnxruntime-cpu"]).backends["onnxruntime-cpu"].metric
    assert metric is not None and metric.value >= metric.float64 - 0.003
    assert len(of(bundle).products) == 8
    # With queries and keys in int8 the error is 0.018.
    assert OPENVINO not in bundle.manifest.targets and of(bundle).scores == {}
    assert list(of(bundle).kept) == ["attentions.0", "attentions.1"]
    assert "queries and keys misses the requirement: an error of" in of(bundle).kept["attentions.0"]


# --- the gate ---------------------------------------------------------------------------------------------------------


def test_outlier_channels_are_refused_balanced_or_kept_in_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same gate: refused without data; met with data, by balancing; met without data by keeping products in
    fp32."""
    with pytest.raises(BuildError, match=r"int8 misses the requirement: an error of .*, with 0\.02 .*give real data"):
        deployed(tmp_path / "b", Outliers, max_error=0.02)
    assert not (tmp_path / "b").exists()
    monkeypatch.setattr(rounding, "SPARE", 0.4)  # eager's own error takes half of the budget
    bundle = deployed(tmp_path / "balanced", Outliers, max_error=0.02, data=real())
    quantised = of(bundle)
    assert list(quantised.kept) == ["attention"] and "% of the parity budget in" in quantised.kept["attention"]
    assert quantised.scores == {} and OPENVINO not in bundle.manifest.targets
    assert len(quantised.products) == 6 and quantised.error <= 0.02 and any(p.balanced for p in quantised.products)
    assert quantised.share >= 0.8
    some = of(deployed(tmp_path / "some", Outliers, "auto-int8", max_error=0.02))
    assert 0 < len(some.kept) < 6 and some.error <= 0.02
    assert len(some.products) + len(some.kept) == 6 and len(some.steps) > 1
    assert attnforge.verify(tmp_path / "some", ["onnxruntime-cpu"]).passed


def test_a_metric_that_is_missed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuildError, match=r"cosine 0\.9999\d+, with 0.999999 required.* as needed, or allow more"):
        deployed(tmp_path / "b", data=real(), metric="cosine", least=0.999999)
    monkeypatch.setattr(gate, "ADDS", 0.5)  # queries and keys in int8 add next to nothing
    bundle = deployed(tmp_path / "b", data=real(), metric="cosine", least=0.999)
    assert "adds too much error: an error of" in of(bundle).kept["attention"]
    report = attnforge.verify(bundle, ["onnxruntime-cpu"]).backends["onnxruntime-cpu"]
    assert report.metric is not None and report.metric.value >= 0.999


class Directions(Block):
    """The same block, whose result is a direction: 0 / 0 if rounding leaves no length. All weights that matter are so
    much smaller than one that does not, of a channel that is always 0, that 8 bits round them to 0."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.out = nn.Linear(WIDTH, 128, bias=False), nn.Linear(128, 128)
        with torch.no_grad():
            self.last.weight[0] = self.last.bias[0] = 0
            self.head.weight[:, 0] = 100
            self.head.weight[:, 1:] *= 0.1

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(self.last(x))
        result: Tensor = self.out(y / y.norm(dim=-1, keepdim=True))
        return result


@pytest.mark.parametrize("options", [{"max_error": 0.5}, {"metric": "cosine", "least": 0.9, "data": real(1)}])
def test_nan_passes_no_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(calibration, "DEGREES", ())  # balancing would prevent it
    with pytest.raises(BuildError, match="NaN or infinity in"):
        deployed(tmp_path / "b", Directions, **options)
    with pytest.raises(BuildError, match="no product may be in int8"):
        deployed(tmp_path / "b", Directions, "auto-int8", **options)


def test_nan_for_queries_and_keys_is_an_error() -> None:
    model = capture(SomeBounded().eval(), real()[0], SHAPES, precision_named("fp32")).model
    site, *_ = sites = canonicalize(model).sites
    assert site.node is not None

    def nothing(op: Builder, a: Attention, i: int, scale: Scale) -> ir.Value:
        value = input_of(a.node, i)
        return like(op.Mul(value, constant(op, np.nan, FLOAT)), value)

    (x,) = real()[0]
    (rounded,) = with_errors(model, sites, [RoundedOperands("both", site, {0: 1.0}, nothing)], [{"x": x.numpy()}])
    assert (rounded.name, rounded.error) == ("both", np.inf)


def test_a_count_under_its_earlier_name_is_read(by_tensor: Bundle) -> None:
    record = json.loads(by_tensor.manifest.targets["onnxruntime"].model_dump_json())
    record["eight_bit"] = record.pop("low_bit")
    assert TargetRecord.model_validate(record).low_bit == 6


def test_if_nothing_may_be_in_8_bits_an_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no product may be in int8 within the requirement"):
        deployed(tmp_path / "b", precision="auto-int8", max_error=1e-9)


# --- bad input --------------------------------------------------------------------------------------------------------


BAD: dict[str, tuple[dict[str, Any], type[AttnforgeError], str]] = {
    "no limit": ({}, UsageError, "no limit was given; give max_error"),
    "a metric without least": ({"metric": "cosine", "data": real(1)}, UsageError, "a metric and its least value"),
    "an error beyond one": ({"max_error": 2.0}, UsageError, "give a relative error between 0 and 1"),
    "int8 attention": (
        {"precision": "fp32", "attention_precision": "int8"}, UsageError, "which no TensorRT fuses",
    ),
    "an unknown type": ({"precision": "int7", "max_error": 0.1}, UnknownNameError, "int8"),
    "data of another shape": (
        {"max_error": 0.1, "data": [(torch.randn(2, TOKENS, WIDTH + 1),)]}, InputError, "is 65",
    ),
    "data of another name": (
        {"max_error": 0.1, "data": [{"y": torch.randn(1, 1, WIDTH)}]}, InputError, "takes x, and y was given",
    ),
    "data without an input": ({"max_error": 0.1, "data": [{}]}, InputError, "input 'x' is missing"),
    "an error for fp16": ({"precision": "fp16", "max_error": 0.1}, UsageError, "is for precision auto or int8"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused(name: str, tmp_path: Path) -> None:
    options, error, message = BAD[name]
    with pytest.raises(error, match=message) as raised:
        deployed(tmp_path / "b", **options)
    assert "\n" not in str(raised.value) and not (tmp_path / "b").exists()


def test_a_model_without_products_worth_quantising_is_refused(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = x[:, None]
            return nn.functional.scaled_dot_product_attention(heads, heads, heads)

    with pytest.raises(UsageError, match="no product of this model is worth 8 bits"):
        deployed(tmp_path / "b", Bare, max_error=0.1)


def test_the_cli_takes_real_inputs_from_files(tmp_path: Path) -> None:
    folder = tmp_path / "inputs"
    folder.mkdir()
    image = np.random.default_rng(0).random((3, 1, 8, 8), np.float32)
    np.savez(folder / "a.npz", image=image)
    np.savez(folder / "b.npz", image=image[:1])
    given = ["deploy", "patch-attention-digits", "--precision", "int8", "--max-error", "0.1", "--target", "onnxruntime"]
    run = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "b"), "--calibrate", str(folder), "--no-tune"])
    assert run.exit_code == 0, run.output
    assert of(Bundle(tmp_path / "b")).calibrated == 2
    np.savez(folder / "c.npz", picture=image)
    for wrong, message in (
        (folder, "the model has no input 'picture'; it takes image"),
        (tmp_path, "has no real inputs; give an .npz"),
        (tmp_path / "none.npz", "has no real inputs; give an .npz"),
    ):
        run = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "c"), "--calibrate", str(wrong)])
        assert isinstance(run.exception, AttnforgeError) and message in str(run.exception)


def test_labels_are_taken_from_files(tmp_path: Path) -> None:
    real = real_data("patch-attention-digits", build_model("patch-attention-digits")[1])
    folder, pairs = tmp_path / "inputs", list(zip(real.inputs, real.labels, strict=True))
    folder.mkdir()
    for i, ((image, *_), labels) in enumerate(pairs):
        np.savez(folder / f"{i}.npz", image=image.numpy(), labels=labels.numpy())
    given = ["deploy", "patch-attention-digits", "--precision", "int8", "--target", "onnxruntime", "--no-tune"]
    asked = [*given, "--calibrate", str(folder), "--metric", "accuracy", "--least", "0.98"]
    run = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "b")])
    assert run.exit_code == 0, run.output
    report = attnforge.verify(tmp_path / "b", ["onnxruntime-cpu"])
    assert report.passed
    (metric,) = [backend.metric for backend in report.backends.values()]
    assert metric is not None and metric.name == "accuracy" and metric.value >= 0.98
    np.savez(folder / "unlabelled.npz", image=pairs[0][0][0].numpy())
    run = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "c")])
    assert "real inputs have labels; give all of them labels" in str(run.exception)
    np.savez(folder / "unlabelled.npz", image=pairs[0][0][0].numpy(), labels=np.array([{}], object))
    run = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "c")])
    assert "Python objects" in str(run.exception)


def test_layers_that_share_their_weights_do_so_in_8_bits(tmp_path: Path) -> None:
    class Twice(Block):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2):
                x = x + self.down(nn.functional.gelu(self.up(self.before_feed_forward(x))))
            logits: Tensor = self.head(self.last(x))
            return logits

    for precision in ("int8", "int4"):
        bundle = deployed(tmp_path / precision, Twice, precision, data=real(1), max_error=0.15)
        assert len(of(bundle).products) == 4
        weights = [value.const_value for value in ir.load(bundle.file(CANONICAL)).graph.initializers.values()]
        assert sum(weight is not None and weight.nbytes >= 4096 for weight in weights) == 3
        assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed
