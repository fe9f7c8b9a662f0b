"""Models of other exporters: ONNX files of any opset and exported programs, checked against the original graph."""

import gc
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.arrays import Array, to_numpy
from attnforge.cli import main
from attnforge.errors import AttnforgeError, BuildError, CaptureError, UsageError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.graphs.execute import as_it_is, at_own_precision
from attnforge.export.graphs.types import FLOAT, retype
from attnforge.export.lowering.onnxruntime import lower
from attnforge.export.sources.exported_program import open_program
from attnforge.export.sources.onnx_file import Imported, import_graph
from attnforge.export.sources.shapes import infer_shapes
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named
from attnforge.runtime.parity.budget import relative_error
from tests.support.bundles import small_example

pytestmark = pytest.mark.xdist_group("sources")

RANGES = {"batch": (1, 2, 3), "height": (8, 24, 40), "width": (8, 16, 16)}
FP32 = precision_named("fp32")


class Encoder(nn.Module):
    """A block on the patches of an image: a convolution, attention, a norm, and a GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 32, 4, 4), nn.LayerNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.mlp = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        weights = (q @ k.transpose(-2, -1) * 0.25).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(b, n, c))
        output: Tensor = x + self.mlp(x)
        return output


def encoder() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Encoder().eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The encoder from torch's former exporter, with sizes computed by chains of Shape and Gather."""
    file = tmp_path_factory.mktemp("onnx") / "encoder.onnx"
    axes = {"image": {0: "batch", 2: "height", 3: "width"}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            encoder(), (torch.randn(2, 3, 24, 16),), str(file), dynamo=False, opset_version=17,
            input_names=["image"], output_names=["tokens"], dynamic_axes=axes,
        )  # fmt: skip
    return file


def one_node(
    op_type: str, inputs: list[Array | None], domain: str = "", opset: int = 23, **attributes: Any
) -> ir.Model:
    """A graph of one operator on inputs `x0`, `x1`, …; None omits an input."""
    names = ["" if array is None else f"x{i}" for i, array in enumerate(inputs)]
    specs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in zip(names, inputs, strict=True)
        if array is not None
    ]
    node = helper.make_node(op_type, names, ["y"], name="node", domain=domain, **attributes)
    graph = helper.make_graph([node], "graph", specs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)])
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    return ir.from_proto(helper.make_model(graph, opset_imports=opsets, ir_version=10))


def as_imported(model: ir.Model) -> Imported:
    return Imported(model, [], [], {}, model, FP32)


def feeds(inputs: list[Array | None]) -> dict[str, Array]:
    return {f"x{i}": array for i, array in enumerate(inputs) if array is not None}


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def two_heads(x: Tensor) -> Tensor:
    return torch.unflatten(x, -1, (2, 4)).transpose(1, 2)


# --- ONNX files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", [None, "fp16", "bf16"])
def test_an_old_export_is_recognised_and_checked_against_its_graph(
    precision: str | None, exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its weights in a separate file, as above 2 GiB."""
    monkeypatch.setattr("attnforge.export.graphs.saving.SHELVED", 10_000)
    fused = {"onnxruntime": 1} | ({"tensorrt_rtx": 1} if precision == "fp16" else {})
    bundle = attnforge.deploy(exported, None, tmp_path / "bundle", RANGES, precision, list(fused), tune=False)
    manifest = bundle.manifest
    assert manifest.precision == (precision or "fp32")
    assert manifest.attention.sites == manifest.attention.canonical == 1
    assert manifest.attention.fused == fused
    assert "weights.data" in manifest.files
    assert all((bundle.path / name).stat().st_size < 20_000 for name in manifest.files if name.endswith(".onnx"))
    report = attnforge.verify(bundle)
    assert report.passed and "no torch module" in report.reference
    assert report.backends["onnxruntime-cpu"].cases >= 8
    with pytest.raises(AttnforgeError, match="no eager"):
        attnforge.load(bundle, "eager")


def test_float64_is_the_graphs_own(exported: Path) -> None:
    """Equal to the module in double, except for the root of 2 in its GELU, which the exporter stored in fp32."""
    imported = import_graph(exported, RANGES)
    image = imported.example["image"]
    with torch.no_grad():
        truth = encoder().double()(torch.from_numpy(image).double()).numpy()
    assert relative_error(imported.exact(imported.example)["tokens"], truth) < 4e-9
    assert 2e-8 < relative_error(imported.eager(imported.example)["tokens"], truth) < 1e-6


def test_benchmark_against_the_graph_as_it_was_given(exported: Path, tmp_path: Path) -> None:
    bundle = attnforge.deploy(exported, None, tmp_path / "bundle", RANGES, targets=["onnxruntime"], tune=False)
    report = attnforge.benchmark(
        bundle, against=["eager", "onnxruntime-plain"], rounds=1, quick=True, trust_source=True
    ).models[0]
    assert {contender.name for contender in report.contenders if not contender.ours} == {"onnxruntime-plain"}
    assert "ONNX graph" in report.skipped["eager fp32"]
    assert not report.wrong


def test_hugging_face_bert_of_both_exporters(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=60, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=32, attn_implementation="eager",
    )  # fmt: skip

    class Bert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = transformers.BertModel(config, add_pooling_layer=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            result: Tensor = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
            return result

    torch.manual_seed(0)
    module, mask = Bert().eval(), torch.ones(2, 7, dtype=torch.long)
    mask[1, 5:] = 0
    args, names = (torch.randint(0, 60, (2, 7)), mask), {0: "batch", 1: "tokens"}
    given: dict[str, Any] = {"input_names": ["input_ids", "attention_mask"], "output_names": ["hidden"]}
    files = [tmp_path / "old.onnx", tmp_path / "new.onnx"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        axes = {"input_ids": names, "attention_mask": names}
        torch.onnx.export(module, args, str(files[0]), dynamo=False, opset_version=17, dynamic_axes=axes, **given)
        dims = {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=20)}
        torch.onnx.export(
            module.eval(), args, str(files[1]), dynamo=True, opset_version=18, dynamic_shapes=(dims, dims),
            verbose=False, **given,
        )  # fmt: skip
    for file in files:
        ranges = {"batch": (1, 2, 4), "tokens": (2, 7, 20)}
        bundle = attnforge.deploy(file, args, tmp_path / file.stem, ranges, targets=["onnxruntime"], tune=False)
        assert [site.reason for site in bundle.manifest.attention.details] == [None], file.name
        assert "self" in bundle.manifest.attention.details[0].site
        assert bundle.manifest.inputs[0].high == int(args[0].max())
        assert attnforge.verify(bundle).passed, file.name
    assert import_graph(files[0], ranges).inputs[0].high == 59  # without an example, from the table
    fused = optimized(files[0], tmp_path)
    bundle = attnforge.deploy(fused, None, tmp_path / "fused", ranges, precision="fp16", tune=False)
    assert "tensorrt_rtx" in bundle.manifest.skipped  # it has no operators of com.microsoft
    assert attnforge.verify(bundle).passed


def optimized(file: Path, folder: Path) -> Path:
    """The model as onnxruntime.transformers fuses it, with operators of com.microsoft."""
    from onnxruntime.transformers import optimizer

    model = optimizer.optimize_model(str(file), model_type="bert", num_heads=2, hidden_size=32, opt_level=0)
    model.save_model_to_file(str(folder / "fused.onnx"))
    assert {"Attention", "SkipLayerNormalization", "BiasGelu"} <= {n.op_type for n in model.model.graph.node}
    return folder / "fused.onnx"


# --- float64 ----------------------------------------------------------------------------------------------------------

X, IMAGE, HEADS = normal(2, 5, 8), normal(2, 4, 9, 8), normal(1, 4, 5, 8)
F = nn.functional


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes", "truth"),
    [
        ("Erf", [3 * X], {}, torch.erf),
        ("Gelu", [3 * X], {}, F.gelu),
        ("Gelu", [3 * X], {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
        ("HardSwish", [3 * X], {}, F.hardswish),
        ("Elu", [X], {}, F.elu),
        ("Softplus", [X], {}, F.softplus),
        ("Mean", [X, X[:1]], {}, lambda x, y: (x + y) / 2),
        ("GlobalAveragePool", [IMAGE], {}, lambda x: x.mean((2, 3), keepdim=True)),
        ("GroupNormalization", [IMAGE, np.ones(4, np.float32), np.ones(4, np.float32)], {"num_groups": 2},
         lambda x, w, b: F.group_norm(x, 2, w, b, float(np.float32(1e-5)))),
        ("Conv", [IMAGE, normal(6, 2, 3, 2), normal(6)],
         {"group": 2, "strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [1, 2]},
         lambda x, w, b: F.conv2d(F.pad(x, (0, 1, 1, 2)), w, b, (2, 1), 0, (1, 2), 2)),
        ("Attention", [HEADS, normal(1, 2, 7, 8), normal(1, 2, 7, 3)], {},
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)),
        ("Attention", [normal(2, 5, 8), normal(2, 5, 8), normal(2, 5, 8), normal(5, 5)],
         {"q_num_heads": 2, "kv_num_heads": 2, "scale": 0.5},
         lambda q, k, v, m: F.scaled_dot_product_attention(
             two_heads(q), two_heads(k), two_heads(v), m, scale=0.5).transpose(1, 2).flatten(2)),
        ("Attention", [HEADS, HEADS, HEADS], {"is_causal": 1},
         lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        # By onnx's reference: ONNX Runtime has no double kernel, and there is no decomposition.
        ("AveragePool", [IMAGE], {"kernel_shape": [2, 2]}, lambda x: F.avg_pool2d(x, 2, 1)),
    ],
)  # fmt: skip
def test_float64_is_float64(
    op_type: str, inputs: list[Array], attributes: dict[str, Any], truth: Callable[..., Tensor]
) -> None:
    original = as_imported(one_node(op_type, list(inputs), **attributes))
    (exact,) = original.exact(feeds(list(inputs))).values()
    expected = truth(*(torch.from_numpy(array).double() for array in inputs)).numpy()
    assert exact.dtype == np.float64
    assert np.abs(exact - expected).max() < 4e-15 * max(1, np.abs(expected).max())


WIDE = normal(2, 5, 8)


@pytest.mark.parametrize(
    ("op_type", "inputs", "attributes"),
    [
        ("FastGelu", [WIDE, normal(8)], {}),
        ("QuickGelu", [WIDE], {}),
        ("BiasGelu", [WIDE, normal(8)], {}),
        ("SkipLayerNormalization", [WIDE, 2 * WIDE, normal(8), normal(8), normal(8)], {}),
        ("SkipSimplifiedLayerNormalization", [WIDE, 2 * WIDE, normal(8), normal(8)], {}),
        ("Attention", [WIDE, normal(8, 24), normal(24), np.array([[1] * 5, [1, 1, 1, 0, 0]], np.int32)],
         {"num_heads": 2}),
        ("Attention", [WIDE, normal(8, 24), normal(24), np.array([5, 2], np.int32)], {"num_heads": 2}),
        ("Attention", [WIDE, normal(8, 24), normal(24)], {"num_heads": 2, "unidirectional": 1}),
        ("MultiHeadAttention", [WIDE, WIDE, 2 * WIDE, normal(24), None, normal(1, 2, 5, 5)], {"num_heads": 2}),
        ("MultiHeadAttention",
         [WIDE, WIDE, WIDE, None, np.array([[1] * 5, [1, 1, 1, 0, 0]], np.int32)], {"num_heads": 2}),
    ],
)  # fmt: skip
def test_float64_of_fused_operators(op_type: str, inputs: list[Array | None], attributes: dict[str, Any]) -> None:
    """Their decompositions equal ONNX Runtime's fp32 kernels, within the accuracy of fp32."""
    original = as_imported(one_node(op_type, inputs, "com.microsoft", **attributes))
    given, exact = original.eager(feeds(inputs))["y"], original.exact(feeds(inputs))["y"]
    assert exact.dtype == np.float64
    assert np.any(exact != exact.astype(np.float32))
    assert np.abs(given - exact).max() < 4e-6 * max(1, np.abs(exact).max())


def test_an_operator_without_a_double_path_is_refused_by_name() -> None:
    inputs: list[Array | None] = [WIDE, WIDE, WIDE, None, None, np.array([4, 4], np.int32), np.array(5, np.int32)]
    smooth = {"num_heads": 2, "kv_num_heads": 2, "smooth_softmax": 1}
    original = as_imported(one_node("GroupQueryAttention", inputs, "com.microsoft", **smooth))
    with pytest.raises(BuildError, match="GroupQueryAttention"):
        original.exact(feeds(inputs))


# --- types ------------------------------------------------------------------------------------------------------------


def test_retyping_changes_everything_that_names_a_type() -> None:
    model = ir.from_proto(
        onnx.parser.parse_model("""
        <ir_version: 10, opset_import: ["": 23]>
        graph (float[1, 2, 4, 4] x, bool[4, 4] mask) => (float[1, 2, 8, 8] y, int64 n)
        <float least = {-3.4028235e38}, float[4] scales = {1.0, 1.0, 2.0, 2.0}, float large = {4097.0}> {
            a = Constant<value_float = 0.5>()
            b = Constant<value_floats = [1.0, 2.0, 3.0, 4.0]>()
            shape = Constant<value_ints = [4]>()
            c = ConstantOfShape(shape)
            d = Cast<to = 1>(mask)
            e = Where(mask, d, least)
            f = Mul(x, a)
            g = Add(f, b)
            h = Add(g, c)
            i = Add(h, e)
            y = Resize<mode = "nearest">(i, , scales)
            whole = Abs(large)
            n = Cast<to = 7>(whole)
        }""")
    )
    infer_shapes(model)
    retype(model, (FLOAT,), ir.DataType.FLOAT16)
    least = model.graph.initializers["least"].const_value
    assert least is not None and float(least.numpy()) == -65504
    assert model.graph.initializers["scales"].dtype == FLOAT
    proto = ir.to_proto(model)
    x = normal(1, 2, 4, 4).astype(np.float16)
    mask = np.eye(4, dtype=bool)
    y, n = ort.InferenceSession(proto.SerializeToString()).run(None, {"x": x, "mask": mask})  # its types agree
    assert y.dtype == np.float16 and y.shape == (1, 2, 8, 8)
    assert n == 4097  # not representable in 16 bits


# --- exported programs ------------------------------------------------------------------------------------------------


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x: Tensor, *, mask: Tensor, scale: float = 0.25) -> dict[str, Tensor]:
        q, k, v = (self.qkv(x) + torch.tensor([0.1])).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~mask[:, None, None], torch.finfo(q.dtype).min)
        context = scores.to(torch.float32).softmax(-1).to(q.dtype) @ v
        return {"context": context.transpose(1, 2).flatten(2) + torch.full((32,), 0.5, dtype=torch.float32)}


def program(bound: int | None) -> torch.export.ExportedProgram:
    batch, tokens = Dim("batch", min=1, max=4), Dim("tokens", min=2, max=bound)
    dims = {0: batch, 1: tokens}
    torch.manual_seed(0)
    return torch.export.export(
        Masked().eval(),
        (torch.randn(2, 6, 32),),
        {"mask": torch.ones(2, 6, dtype=torch.bool)},
        dynamic_shapes={"x": dims, "mask": dims},
    )


@pytest.mark.parametrize("precision", [None, "fp16"])
def test_a_program_at_its_own_precision_and_at_another(precision: str | None, tmp_path: Path) -> None:
    """The types that its graph names (a cast, a fill, a constant) are converted too."""
    bundle = attnforge.deploy(
        program(20), None, tmp_path / "bundle", precision=precision, targets=["onnxruntime"], tune=False
    )
    assert [spec.text() for spec in bundle.manifest.inputs] == [
        f"{'float16' if precision else 'float32'}[x_dim0, x_dim1, 32]", "bool[x_dim0, x_dim1]",
    ]  # fmt: skip
    assert [site.reason for site in bundle.manifest.attention.details] == [None]
    assert bundle.manifest.outputs[0].name == "context"
    assert attnforge.verify(bundle).passed


def test_a_program_in_float64_is_float64() -> None:
    opened = open_program(program(20))
    x, mask = torch.randn(3, 4, 32, dtype=torch.float64), torch.rand(3, 4) < 0.7
    expected = Masked()
    expected.load_state_dict({key.removeprefix("inner."): value for key, value in opened.module.state_dict().items()})
    with torch.no_grad():
        given = opened.module.double()(x, mask)["context"]
        q, k, v = (expected.double().qkv(x) + float(np.float32(0.1))).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        truth = (
            F.scaled_dot_product_attention(q, k, v, mask[:, None, None], scale=0.25).transpose(1, 2).flatten(2) + 0.5
        )
    some = mask.any(-1)
    assert (given[some] - truth[some]).abs().max() < 1e-14


def test_a_program_without_a_bound_takes_one(tmp_path: Path) -> None:
    file = tmp_path / "masked.pt2"
    torch.export.save(program(None), file)
    with pytest.raises(UsageError, match=r"without an upper bound: x_dim1; give their ranges: --dim x_dim1=3:6:24"):
        attnforge.deploy(file, None, tmp_path / "bundle", trust_source=True)
    bundle = attnforge.deploy(
        file, None, tmp_path / "bundle", {"x_dim1": (2, 6, 9)}, targets=["onnxruntime"], tune=False, trust_source=True
    )
    assert bundle.manifest.inputs[0].dims[1].max == 9  # type: ignore[union-attr]
    assert bundle.manifest.source.kind == "program"


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_the_command_line_names_the_dims_that_lack_a_range(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["attnforge", "deploy", str(exported), "--dim", "batch=1:2:3"])
    with pytest.raises(SystemExit) as ended:
        main()
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert ended.value.code == 2
    assert "height (dim 2 of image), width (dim 3 of image)" in line
    assert "--dim height=1:4:16 --dim width=1:4:16" in line


def test_a_dim_without_a_name_gets_one(tmp_path: Path) -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["": 23]> graph (float[?, 4] x) => (float[?, 4] y) { y = Relu(x) }'
    )
    onnx.save(model, tmp_path / "relu.onnx")
    with pytest.raises(UsageError, match="x_dim0=1:4:16"):
        import_graph(tmp_path / "relu.onnx")
    assert import_graph(tmp_path / "relu.onnx", {"x_dim0": (1, 2, 3)}).outputs[0].text() == "float32[x_dim0, 4]"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("n = Shape(x) m = Size(n) z = RandomNormalLike(x) y = Add(x, z)", "RandomNormalLike.*eval mode"),
        ("i = Cast<to = 3>(x) one = Constant<value_float = 1.0>() y = DequantizeLinear(i, one)",
         "DequantizeLinear.*before it was quantized"),
        ("s = ReduceMax<keepdims = 0>(x) zero = Sub(s, s) c = Greater(s, zero)"
         " y = If(c)<then_branch = t () => (float[2] u) { u = Identity(x) },"
         " else_branch = e () => (float[2] w) { w = Neg(x) }>", "If.*without control flow"),
    ],
)  # fmt: skip
def test_graphs_that_are_random_quantized_or_nested(body: str, words: str, tmp_path: Path) -> None:
    text = f'<ir_version: 10, opset_import: ["": 23]> graph (float[2] x) => (float[2] y) {{ {body} }}'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(UsageError, match=words):
        import_graph(tmp_path / "model.onnx")


def test_parts_of_a_sequence_below_opset_18(tmp_path: Path) -> None:
    """torch's older exporter writes chunks as a sequence; a Split that replaces it has no `num_outputs` yet."""
    text = """<ir_version: 8, opset_import: ["": 17]> graph (float[2, 4] x) => (float[2, 2] y) {
        size = Constant<value_int = 2>() s = SplitToSequence<axis = 1>(x, size)
        first = Constant<value_int = 0>() second = Constant<value_int = 1>()
        a = SequenceAt(s, first) b = SequenceAt(s, second) y = Sub(a, b)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    graph = import_graph(tmp_path / "model.onnx")
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    assert np.array_equal(graph.eager({"x": x})["y"], np.full((2, 2), -2))


def saved(text: str, folder: Path) -> Path:
    model = onnx.parser.parse_model(text)
    if model.ir_version < 4:  # weights are inputs too
        weights = model.graph.initializer
        model.graph.input.extend(helper.make_tensor_value_info(w.name, w.data_type, w.dims) for w in weights)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize(
    ("opset", "body"),
    [
        (9, 's = Constant<value = float[4] {1.0, 1.0, 2.0, 2.5}>() y = Upsample<mode = "linear">(x, s)'),
        (10, 's = Constant<value = float[4] {1.0, 1.0, 1.5, 1.7}>() y = Resize<mode = "nearest">(x, s)'),
        (10, 's = Constant<value = float[4] {1.0, 1.0, 0.6, 0.5}>() y = Resize<mode = "nearest">(x, s)'),
        (10, 's = Constant<value = float[4] {1.0, 1.0, 0.6, 1.7}>() y = Resize<mode = "linear">(x, s)'),
        (7, "y = Softmax(x)"),
        (11, "y = LogSoftmax<axis = -2>(x)"),
        (8, "y = Add(x, w)"),
    ],
)
def test_graphs_of_opsets_before_13_compute_what_they_did_in_their_files(opset: int, body: str, tmp_path: Path) -> None:
    text = f"""<ir_version: {3 if opset < 9 else 5}, opset_import: ["": {opset}]>
        graph (float[1, 2, 5, 4] x) => (float[1, 2, a, b] y) <float[4] w = {{1.0, 2.0, 3.0, 4.0}}> {{ {body} }}"""
    file = saved(text, tmp_path)
    x = np.random.default_rng(0).standard_normal((1, 2, 5, 4)).astype(np.float32)
    (expected,) = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": x})
    graph = import_graph(file)
    for got in (graph.eager({"x": x})["y"], graph.exact({"x": x})["y"]):
        np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("op_type", ["LayerNormalization", "SimplifiedLayerNormalization"])
def test_operators_that_onnxruntime_adds_to_onnxs(op_type: str, tmp_path: Path) -> None:
    """Its optimizer writes them in graphs of any opset."""
    text = f"""<ir_version: 8, opset_import: ["": 14]> graph (float[n, 3, 4] x) => (float[n, 3, 4] y)
        <float[4] w = {{1.0, 2.0, 3.0, 4.0}}> {{ y = {op_type}<axis = -1>(x, w) }}"""
    graph = import_graph(saved(text, tmp_path), {"n": (1, 2, 4)})
    assert [node.op_type for node in graph.model.graph] == [op_type]
    np.testing.assert_allclose(as_it_is(graph.model)(graph.example)["y"], graph.eager(graph.example)["y"], atol=1e-6)


def test_a_conversion_that_changes_the_answer_is_refused(tmp_path: Path) -> None:
    text = '<ir_version: 5, opset_import: ["": 11]> g (float[2, 3, 4] x) => (float[2, 3, 4] y) { y = Hardmax(x) }'
    with pytest.raises(UsageError, match="converter changes the output 'y' of the graph, of opset 11; export it with"):
        import_graph(saved(text, tmp_path))


@pytest.mark.parametrize(
    "softmax",
    ["weights = Softmax<axis = 3>(scores)",
     "f = Flatten<axis = 3>(scores) w = Softmax<axis = 1>(f) of = Shape(scores) weights = Reshape(w, of)"],
)  # fmt: skip
def test_attention_of_opset_11_is_found(softmax: str, tmp_path: Path) -> None:
    """torch's older exporter writes the last axis as 3, and shapes as chains of operators; onnx's converter
    flattens."""
    text = f"""<ir_version: 6, opset_import: ["": 11]> graph (float[n, 3, 8] x) => (float[n, 3, 8] y) {{
        s = Shape(x) zero = Constant<value = int64 {{0}}>() n = Gather(s, zero) batch = Unsqueeze<axes = [0]>(n)
        rest = Constant<value = int64[3] {{-1, 2, 4}}>() shape = Concat<axis = 0>(batch, rest)
        heads = Reshape(x, shape) q = Transpose<perm = [0, 2, 1, 3]>(heads) k = Transpose<perm = [0, 2, 3, 1]>(heads)
        scores = MatMul(q, k) {softmax} o = MatMul(weights, q)
        t = Transpose<perm = [0, 2, 1, 3]>(o) flat = Constant<value = int64[3] {{0, 0, 8}}>() y = Reshape(t, flat)
    }}"""
    (site,) = canonicalize(import_graph(saved(text, tmp_path), {"n": (1, 2, 4)}).model).sites
    assert site.node is not None


@pytest.mark.parametrize(
    ("attributes", "a", "b"),
    [("transB = 1, alpha = 0.5", "2, 5, 4", "2, 8, 4"), ("transBatchA = 1, transBatchB = 1", "5, 2, 6", "6, 2, 4"),
     ("transA = 1, transB = 1, transBatchA = 1", "2, 3, 5", "3, 8, 2")],
)  # fmt: skip
def test_fused_products_are_written_as_the_standards(attributes: str, a: str, b: str, tmp_path: Path) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 14, "com.microsoft": 1]> graph (float[{a}] a, float[{b}] b)
        => (float[c, d, e] y) {{ p = com.microsoft.FusedMatMul<{attributes}>(a, b) y = Relu(p) }}"""
    file = saved(text, tmp_path)
    graph = import_graph(file)
    assert {node.op_type for node in graph.model.graph} <= {"MatMul", "Mul", "Transpose", "Relu"}
    (expected,) = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, graph.example)
    np.testing.assert_allclose(as_it_is(graph.model)(graph.example)["y"], expected, rtol=0, atol=1e-5)


def test_attention_in_double_stays_as_it_is(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17]> graph (float[2, 5, 4] x) => (float[2, 5, 4] y)
        <float[1] w = {2.0}> { d = Cast<to = 11>(x) t = Transpose<perm = [0, 2, 1]>(d) s = MatMul(d, t)
        p = Softmax(s) o = MatMul(p, d) f = Cast<to = 1>(o) y = Mul(f, w) }"""
    graph = import_graph(saved(text, tmp_path))
    (site,) = canonicalize(graph.model).sites
    assert site.reason == "it is computed in double, which fused attention kernels do not know"
    lower(graph.model, [site], {})
    np.testing.assert_allclose(as_it_is(graph.model)(graph.example)["y"], graph.eager(graph.example)["y"], atol=1e-6)


def test_one_hot_numbers_have_a_reference(tmp_path: Path) -> None:
    """ONNX Runtime has no kernel in double, and onnx's reference none for a depth with a dim."""
    text = """<ir_version: 8, opset_import: ["": 17]> graph (int64[2, 5] x) => (float[2, 5, 3] y)
        <int64[1] depth = {2}, float[2] values = {0.25, 1.5}, float[2, 3] w = {1.0, 2.0, 3.0, 4.0, 5.0, 6.0}>
        { o = OneHot(x, depth, values) y = MatMul(o, w) }"""
    graph = import_graph(saved(text, tmp_path))
    np.testing.assert_allclose(graph.exact(graph.example)["y"], graph.eager(graph.example)["y"], rtol=1e-6)


def test_fused_products_in_bfloat16(tmp_path: Path) -> None:
    """ONNX Runtime has no kernels for them on CPUs."""
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> graph (bfloat16[2, 5, 4] x)
        => (bfloat16[c, d, e] y) { p = com.microsoft.FusedMatMul<transB = 1, alpha = 0.3>(x, x) y = Relu(p) }"""
    assert [spec.dtype for spec in import_graph(saved(text, tmp_path)).outputs] == ["bfloat16"]


@pytest.mark.parametrize("op_type", ["ReduceMax", "ReduceL2", "ReduceLogSumExp"])
def test_the_shape_of_a_reduction_is_known(op_type: str, tmp_path: Path) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 18]> graph (float[n, 3, 4] x) => (float[n, a, b] y)
        <int64[1] axes = {{-1}}> {{ r = {op_type}(x, axes) y = Neg(r) }}"""
    assert import_graph(saved(text, tmp_path), {"n": (1, 2, 4)}).outputs[0].text() == "float32[n, 3, 1]"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ("y, a, b = com.microsoft.GroupQueryAttention<num_heads=2, kv_num_heads=2, local_window_size=2>(x,x,x,,,n,t)",
         "GroupQueryAttention"),
        ("s = com.microsoft.FusedMatMul<transB=1, alpha=0.5>(x, x) w = Softmax(s) y = MatMul(w, x)", "MatMul"),
    ],
)  # fmt: skip
def test_operators_whose_shapes_onnx_does_not_infer(body: str, kind: str, tmp_path: Path) -> None:
    text = f"""<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> graph (float[batch, 3, 16] x)
        => (float[batch, 3, 16] y) <int32[1] n = {{2}}, int32 t = {{3}}> {{ {body} }}"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    graph = import_graph(tmp_path / "model.onnx", {"batch": (1, 1, 1)})
    assert any(node.op_type == kind for node in graph.model.graph)
    assert graph.outputs[0].dims == [1, 3, 16]
    eager, exact = graph.eager(graph.example)["y"], graph.exact(graph.example)["y"]
    assert relative_error(eager, exact) < 1e-6


def test_an_output_whose_shape_is_not_known(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> graph (float[3, 3] x) => (float[3, 3] y) {
        i = com.microsoft.Inverse(x) y = MatMul(i, x)
    }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    with pytest.raises(UsageError, match=r"'y' cannot be inferred, since that of Inverse .* is not known; export"):
        import_graph(tmp_path / "model.onnx")


def test_an_example_by_name_in_any_order(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]> graph (float[2] x, float[2] z) => (float[2] y) { y = Sub(x, z) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    example = {"z": np.ones(2, np.float32), "x": np.zeros(2, np.float32)}
    graph = import_graph(tmp_path / "model.onnx", example=example)
    assert [*graph.example] == ["x", "z"] and np.array_equal(graph.eager(graph.example)["y"], [-1, -1])
    with pytest.raises(CaptureError, match="the example has z; the graph takes x, z"):
        import_graph(tmp_path / "model.onnx", example={"z": example["z"]})


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("none.onnx", None, "no file"),
        ("junk.onnx", b"junk", "cannot be read as an ONNX model"),
        ("empty.onnx", b"", "cannot be read as an ONNX model"),
        ("junk.pt2", b"junk", "cannot be read as an exported program"),
        ("model.bin", b"junk", "is not an .onnx or .pt2 file"),
    ],
)
def test_files_that_are_not_models(name: str, content: bytes | None, words: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        attnforge.deploy(tmp_path / name, None, tmp_path / "bundle", trust_source=True)
    assert not (tmp_path / "bundle").exists()


def test_one_tensor_that_is_given_twice_is_two_inputs(tmp_path: Path) -> None:
    """torch.export treats it as one input: a graph of self-attention from an example of cross-attention."""

    class Product(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x @ y

    x = torch.randn(4, 4)
    bundle = attnforge.deploy(Product(), (x, x), tmp_path / "b", targets=["onnxruntime"], tune=False, cache=False)
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed


@dataclass
class Attended:
    output: Tensor
    weights: Tensor | None = None


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, factor: float = 1.0, *, keys: Tensor, scale: float = 2.0) -> Attended:
        return Attended(factor * scale * self.attend(x, keys, keys, need_weights=False)[0])


def test_forward_has_keyword_only_parameters_and_returns_a_dataclass(tmp_path: Path) -> None:
    queries, keys = Dim("queries", min=2, max=32), Dim("keys", min=2, max=32)
    args = (torch.randn(1, 5, 16), torch.tensor(0.5), torch.randn(1, 7, 16))
    module, shapes = ByKeyword().eval(), {"x": {1: queries}, "keys": {1: keys}}
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    specs = [*bundle.manifest.inputs, *bundle.manifest.outputs]
    assert [f"{spec.name}: {spec.text()}" for spec in specs] == [
        "x: float32[1, queries, 16]", "factor: float32[]", "keys: float32[1, keys, 16]",
        "output: float32[1, queries, 16]",
    ]  # fmt: skip
    assert attnforge.verify(bundle, ["onnxruntime-cpu", "eager"], module=module).passed
    assert type(module) is ByKeyword


class Variadic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor, *others: Tensor, **options: Tensor) -> Tensor:
        attended, _ = self.attend(x, others[0], others[-1], need_weights=False)
        result: Tensor = attended
        return result


def test_forward_takes_any_number_of_inputs(tmp_path: Path) -> None:
    queries, keys = Dim("queries", min=2, max=32), Dim("keys", min=2, max=32)
    args = (torch.randn(1, 5, 16), torch.randn(1, 7, 16), torch.randn(1, 7, 16))
    module = Variadic().eval()
    shapes = ({1: queries}, {1: keys}, {1: keys})
    bundle = attnforge.deploy(module, args, tmp_path / "b", shapes, targets=["onnxruntime"], tune=False)
    assert [spec.text() for spec in bundle.manifest.inputs] == [
        "float32[1, queries, 16]", "float32[1, keys, 16]", "float32[1, keys, 16]",
    ]  # fmt: skip
    assert [spec.name for spec in bundle.manifest.inputs] == ["x", "others_0", "others_1"]
    assert attnforge.verify(bundle, ["onnxruntime-cpu"]).passed


def test_nothing_keeps_a_module_that_was_captured() -> None:
    """Rules of onnxscript, which torch's exporter runs, keep the graph that they visited last."""
    gc.unfreeze()  # the collector neither lists nor frees objects that the test run froze
    module, args, shapes = small_example()
    captured = capture(module, args, shapes, precision_named("fp32"))
    copied = weakref.ref(captured.module), weakref.ref(next(captured.module.parameters()))
    del captured
    gc.collect()
    gc.freeze()
    assert [reference() for reference in copied] == [None, None]


class Timesteps(nn.Module):
    """Sines and cosines of a thousand times a timestep, the embedding of diffusion models."""

    def forward(self, t: Tensor) -> Tensor:
        exponent = -math.log(10000) * torch.arange(128, dtype=torch.float32) / 128
        x = 1000 * t[:, None] * torch.exp(exponent)[None, :]
        return torch.cat([x.cos(), x.sin()], -1)


def test_constants_are_those_that_torch_computes() -> None:
    """NumPy's exp, with which the exporter folds, differs in the last bit of 55 of 128 numbers; a phase of 5,000 in
    radians shows it."""
    module, t = Timesteps(), torch.tensor([5.0, 0.7])
    model = capture(module, (t,), {"t": {0: Dim("batch", min=1, max=8)}}, precision_named("fp32")).model
    frequencies = torch.exp(-math.log(10000) * torch.arange(128, dtype=torch.float32) / 128).numpy()
    arrays = [value.const_value.numpy() for value in model.graph.initializers.values() if value.const_value is not None]
    assert any(array.size == 128 and (array.reshape(-1) == frequencies).all() for array in arrays)
    (result,) = as_it_is(model)({"t": t.numpy()}).values()
    assert relative_error(result.astype(np.float64), module(t).double().numpy()) < 1e-6


class Normed(nn.Module):
    """Batch norms after a convolution, its transpose and a product, with random statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.transposed = nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 4, 3)
        self.linear = nn.Linear(4, 5)
        self.norms = nn.ModuleList((nn.BatchNorm2d(8), nn.BatchNorm2d(4), nn.BatchNorm1d(5)))
        for norm in self.norms:
            norm.running_var.uniform_(0.5, 2)  # type: ignore[operator]

    def forward(self, image: Tensor) -> Tensor:
        first, second, third = self.norms
        y = second(self.transposed(first(self.convolution(image)).relu())).relu().mean((2, 3))
        result: Tensor = third(self.linear(y))
        return result


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_weights_that_are_fused_with_a_batch_norm_keep_their_type(precision: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, image = Normed().eval(), torch.randn(2, 3, 8, 8)
    model = capture(module, (image,), None, precision_named(precision)).model
    products = [node for node in model.graph if node.op_type in ("Conv", "ConvTranspose", "Gemm")]
    assert len(products) == 3 and not any(node.op_type == "BatchNormalization" for node in model.graph)
    wanted = precision_named(precision).dtype
    assert {value.dtype.numpy() for node in products for value in node.inputs if value and value.dtype} == {wanted}


class Normed32(nn.Module):
    """A norm in fp32, whose weight is multiplied in fp32 as in GPT-OSS, or in the input's type as in T5."""

    def __init__(self, in_fp32: bool) -> None:
        super().__init__()
        self.in_fp32 = in_fp32
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        wide = 1e5 * x.float()  # beyond the range of 16 bits
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight * (wide if self.in_fp32 else wide.to(x.dtype))).to(x.dtype).clamp(-1, 1)


@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_norm_of_two_types(precision: str, in_fp32: bool) -> None:
    """ONNX Runtime has kernels for CUDA that take fp16 with fp32, but not bf16 with fp32; nor Clip in bf16."""
    module, x = Normed32(in_fp32).eval(), torch.randn(2, 8)
    captured = capture(module, (x,), None, precision_named(precision))
    (norm,) = (node for node in captured.model.graph if node.op_type == "RMSNormalization")
    assert {value.dtype for value in norm.inputs if value is not None} == {ir.DataType.FLOAT}
    given = {"x": to_numpy("x", captured.args[0])}
    expected = captured.eager(given)["output"]
    assert relative_error(at_own_precision(captured.model)(given)["output"], expected) < 0.01
    lower(captured.model, [], {}, device="cuda")
    (clip,) = (node for node in captured.model.graph if node.op_type == "Clip")
    assert (clip.inputs[0].dtype == ir.DataType.FLOAT) == (precision == "bf16")  # type: ignore[union-attr]
    onnx.checker.check_model(ir.to_proto(captured.model), full_check=True)
