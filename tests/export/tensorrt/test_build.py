"""TensorRT plans from the real builder, which needs no GPU: its inputs, and what it reports."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import attnforge
from attnforge.bundle import CANONICAL, DimSpec, TensorSpec
from attnforge.children import command
from attnforge.errors import BuildError, UnavailableError, UsageError
from attnforge.export.diagnosis.stages import sites_of
from attnforge.export.graphs.saving import load_graph
from attnforge.export.lowering.tensorrt import lower
from attnforge.export.tensorrt.build import Builders, Plan, load_tensorrt, profiles_of
from attnforge.export.tensorrt.process import Request
from tests.support.bundles import small_example
from tests.support.plans import build

pytest.importorskip("tensorrt_rtx")


BATCH, TOKENS = DimSpec(symbol="batch", min=1, opt=2, max=4), DimSpec(symbol="tokens", min=1, opt=24, max=32)
HEADS, HEAD_DIM = 4, 32


def specs(*dims: int | DimSpec, dtype: str = "float16") -> list[TensorSpec]:
    return [TensorSpec(name=name, dtype=dtype, dims=list(dims)) for name in ("query", "key", "value")]


def attention(file: Path, inputs: list[TensorSpec], softmax: str = "Softmax") -> Path:
    """`softmax(Q Kᵀ / √32) V` in the form that TensorRT fuses, in the inputs' type."""
    dtype = {"float16": ir.DataType.FLOAT16, "float32": ir.DataType.FLOAT}[inputs[0].dtype]
    shape = ir.Shape(d if isinstance(d, int) else d.symbol for d in inputs[0].dims)
    query, key, value = (ir.Value(name=spec.name, shape=shape, type=ir.TensorType(dtype)) for spec in inputs)
    scale = ir.node("Constant", [], {"value": ir.tensor(np.array(HEAD_DIM**-0.5, dtype.numpy()))})
    transposed = ir.node("Transpose", [key], {"perm": [0, 1, 3, 2]}, name="transposed")
    scaled = ir.node("Mul", [query, scale.outputs[0]], name="scaled")
    scores = ir.node("MatMul", [scaled.outputs[0], transposed.outputs[0]], name="scores")
    weights = ir.node(softmax, [scores.outputs[0]], {"axis": -1}, name="the/Softmax")
    context = ir.node("MatMul", [weights.outputs[0], value], name="context")
    output = context.outputs[0]
    output.name, output.type = "output", ir.TensorType(dtype)
    nodes = [scale, transposed, scaled, scores, weights, context]
    for i, node in enumerate(nodes[:-1]):
        node.outputs[0].name = f"value_{i}"
    graph = ir.Graph([query, key, value], [output], nodes=nodes, opset_imports={"": 23}, name="attention")
    ir.save(ir.Model(graph, ir_version=10), file)
    return file


def plan_of(
    tmp_path: Path, inputs: list[TensorSpec], precision: str = "fp16", capabilities: tuple[str, ...] = ()
) -> Plan:
    return build(attention(tmp_path / "model.onnx", inputs), "tensorrt_rtx", inputs, precision, capabilities)


@pytest.fixture
def as_deployed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start each builder as `deploy` does."""
    monkeypatch.setattr("attnforge.children.command", command)


@pytest.mark.usefixtures("as_deployed")
def test_a_plan_and_its_layers(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, specs(BATCH, HEADS, TOKENS, HEAD_DIM))
    assert len(plan.data) == plan.size > 1000 and plan.seconds > 0
    assert plan.process.seconds >= plan.seconds and plan.process.memory > 2**24
    assert plan.activation_memory is not None and plan.activation_memory > 0
    assert plan.version == load_tensorrt("tensorrt_rtx").__version__
    (fused,) = (layer for layer in plan.layers if layer.is_fused_attention)
    assert {"scores", "the/Softmax", "context"} <= set(fused.onnx_nodes)
    assert plan.kernel_of("the/Softmax") == plan.kernel_of("context") == fused.name
    assert plan.kernel_of("another/Softmax") is None
    assert fused.name in plan.layers_of("the/Softmax") and plan.layers_of("another/Softmax") == []


def test_an_unfused_plan_names_the_layers_that_it_has_instead(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, specs(BATCH, HEADS, TOKENS, HEAD_DIM, dtype="float32"), "fp32")
    assert plan.layers and not any(layer.is_fused_attention for layer in plan.layers)
    assert plan.kernel_of("the/Softmax") is None
    assert plan.layers_of("the/Softmax")


def test_builds_do_not_see_each_others_layers(tmp_path: Path) -> None:
    inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM)
    alone = plan_of(tmp_path, inputs)
    plan_of(tmp_path, specs(2, 8, 64, 64))
    again = plan_of(tmp_path, inputs)
    assert [layer.type for layer in again.layers] == [layer.type for layer in alone.layers]


@pytest.mark.parametrize(
    "dims", [(2, HEADS, 24, HEAD_DIM), (BATCH, HEADS, 24, HEAD_DIM), (BATCH, HEADS, TOKENS, HEAD_DIM)]
)
def test_static_and_dynamic_profiles(tmp_path: Path, dims: tuple[int | DimSpec, ...]) -> None:
    assert plan_of(tmp_path, specs(*dims)).kernel_of("the/Softmax")


@pytest.mark.parametrize(
    ("batch", "bound"),
    [
        (DimSpec(symbol="batch", min=3, opt=2, max=4), "min"),
        (DimSpec(symbol="batch", min=1, opt=5, max=4), "opt"),
    ],
)
def test_a_profile_whose_bounds_are_out_of_order_is_refused(tmp_path: Path, batch: DimSpec, bound: str) -> None:
    with pytest.raises((BuildError, ValueError)):
        plan_of(tmp_path, specs(batch, HEADS, TOKENS, HEAD_DIM))


@pytest.mark.parametrize("capabilities", [("SM80",), ("SM89",), ("SM120",), ("SM80", "SM89", "SM120")])
def test_plans_for_chosen_devices_are_fused(tmp_path: Path, capabilities: tuple[str, ...]) -> None:
    plan = plan_of(tmp_path, specs(BATCH, HEADS, TOKENS, HEAD_DIM), capabilities=capabilities)
    assert plan.kernel_of("the/Softmax")


def differ_for_good(plans: list[bytes], others: list[bytes]) -> bool:
    """Whether plans differ from others in bytes that are the same in every build: not all bytes of a plan are."""
    if {len(plan) for plan in plans}.isdisjoint(len(other) for other in others):
        return True
    size = min(len(plan) for plan in (*plans, *others))
    ours, theirs = (np.array([np.frombuffer(p[:size], np.uint8) for p in side]) for side in (plans, others))
    settled = (ours == ours[0]).all(0) & (theirs == theirs[0]).all(0)
    return bool((settled & (ours[0] != theirs[0])).any())


def test_plans_for_two_devices_differ(tmp_path: Path) -> None:
    inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM)
    ampere, ada = ([plan_of(tmp_path, inputs, capabilities=(c,)).data for _ in range(3)] for c in ("SM80", "SM89"))
    assert differ_for_good(ampere, ada)


@pytest.mark.parametrize("name", ["SM00", "sm89", "8.9", "NONE", ""])
def test_unknown_compute_capabilities_are_refused_with_the_supported_ones(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=f"unknown compute capability {name!r};.* supports .*SM80.*SM89") as caught:
        plan_of(tmp_path, specs(BATCH, HEADS, TOKENS, HEAD_DIM), capabilities=(name,))
    assert "\n" not in str(caught.value)


def test_tf32_is_a_flag_that_fp32_does_not_set(tmp_path: Path) -> None:
    """The only setting outside the graph: for one graph, fp32 and tf32 give different plans."""
    inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM, dtype="float32")
    exact, rounded = ([plan_of(tmp_path, inputs, p, ("SM89",)).data for _ in range(3)] for p in ("fp32", "tf32"))
    assert differ_for_good(exact, rounded)


# Errors with the builder's message


@pytest.mark.usefixtures("as_deployed")
def test_a_file_that_is_no_model(tmp_path: Path) -> None:
    inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM)
    data = attention(tmp_path / "model.onnx", inputs).read_bytes()
    (tmp_path / "half.onnx").write_bytes(data[: len(data) // 2])
    with pytest.raises(BuildError, match=r"tensorrt_rtx cannot .* half\.onnx: .*[Pp]arse"):
        build(tmp_path / "half.onnx", "tensorrt_rtx", inputs, "fp16")
    with pytest.raises(BuildError, match=r"tensorrt_rtx cannot .* absent\.onnx: .*cannot be found"):
        build(tmp_path / "absent.onnx", "tensorrt_rtx", inputs, "fp16")


def test_an_operator_that_the_parser_does_not_support_is_named(tmp_path: Path) -> None:
    inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM)
    file = attention(tmp_path / "odd.onnx", inputs, softmax="Entmax")
    with pytest.raises(BuildError, match=r"odd\.onnx: .*Entmax"):
        build(file, "tensorrt_rtx", inputs, "fp16")


def test_a_graph_that_parses_and_does_not_build(tmp_path: Path) -> None:
    """Dynamic dims without a profile: the error comes from the builder, not from us."""
    inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM)
    file = attention(tmp_path / "model.onnx", inputs)
    with pytest.raises(BuildError, match=r"cannot build model\.onnx: .*no optimization profile"):
        build(file, "tensorrt_rtx", [], "fp16")


def one_node(file: Path, op_type: str, **inputs: tuple[list[int | str], ir.DataType]) -> Path:
    """A graph of one node; the name of `x` is `x[0]`, which may be mistaken for a pattern."""
    values = [
        ir.Value(name=name.replace("x", "x[0]"), shape=ir.Shape(dims), type=ir.TensorType(dtype))
        for name, (dims, dtype) in inputs.items()
    ]
    node = ir.node(op_type, values)
    node.outputs[0].name, node.outputs[0].type = "output", values[0].type
    graph = ir.Graph(values, node.outputs, nodes=[node], opset_imports={"": 23}, name="one")
    ir.save(ir.Model(graph, ir_version=10), file)
    return file


@pytest.mark.parametrize(("low", "what"), [(1, None), (3, "MIN<=OPT<=MAX")])
def test_a_name_is_not_a_pattern(tmp_path: Path, low: int, what: str | None) -> None:
    """If `x[0]` were a pattern, it would have no profile, and the builder no reason to complain about one."""
    file = one_node(tmp_path / "model.onnx", "Softmax", x=(["batch", 4], ir.DataType.FLOAT))
    inputs = [TensorSpec(name="x[0]", dtype="float32", dims=[DimSpec(symbol="batch", min=low, opt=2, max=4), 4])]
    with pytest.raises(BuildError, match=what) if what is not None else contextlib.nullcontext():
        assert build(file, "tensorrt_rtx", inputs, "fp32").data


@pytest.mark.parametrize("size", [1, 2])
def test_an_input_whose_values_decide_shapes_is_refused(tmp_path: Path, size: int) -> None:
    kinds = {"x": (["batch", 4], ir.DataType.FLOAT), "shape": ([size], ir.DataType.INT64)}
    file = one_node(tmp_path / "model.onnx", "Reshape", **kinds)  # type: ignore[arg-type]
    inputs = [
        TensorSpec(name="x[0]", dtype="float32", dims=[BATCH, 4]),
        TensorSpec(name="shape", dtype="int64", dims=[size]),
    ]
    with pytest.raises(BuildError, match=r"values of input shape decide shapes; deploy it for onnxruntime$"):
        build(file, "tensorrt_rtx", inputs, "fp32")


def test_polygraphy_installs_nothing_and_loads_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYGRAPHY_AUTOINSTALL_DEPS", "1")
    monkeypatch.setenv("POLYGRAPHY_USE_TENSORRT_RTX", "0")
    code = (
        "import sys; from attnforge.export.tensorrt.process import load; load('tensorrt_rtx');"
        "from polygraphy import config; from polygraphy.backend import trt;"
        "print(config.AUTOINSTALL_DEPS, config.USE_TENSORRT_RTX, trt.loader.trt.__name__, 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["False", "True", "tensorrt_rtx", "False"]


@pytest.mark.usefixtures("as_deployed")
def test_a_failed_build_does_not_affect_the_next(tmp_path: Path) -> None:
    inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM)
    with pytest.raises(BuildError):
        build(attention(tmp_path / "model.onnx", inputs), "tensorrt_rtx", [], "fp16")
    assert plan_of(tmp_path, inputs).kernel_of("the/Softmax")


def test_tensorrt_is_distinguished_from_tensorrt_rtx(tmp_path: Path) -> None:
    try:
        load_tensorrt("tensorrt")
    except UnavailableError as error:
        assert "pip install 'attnforge[tensorrt]'" in str(error)
    else:
        inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM)
        with pytest.raises(UsageError, match="tensorrt builds for a GPU of this machine"):
            build(attention(tmp_path / "model.onnx", inputs), "tensorrt", inputs, "fp16", ("SM89",))


# Builders alongside the caller


@pytest.mark.usefixtures("as_deployed")
def test_a_builder_runs_alongside_the_caller_and_ends_with_the_block(tmp_path: Path) -> None:
    inputs = specs(BATCH, HEADS, TOKENS, HEAD_DIM)
    file = attention(tmp_path / "model.onnx", inputs)
    request = Request(
        onnx_file=file, plan_file=tmp_path / "0.plan", flavour="tensorrt_rtx", inputs=inputs, precision="fp16",
        profiles=profiles_of(inputs),
    )  # fmt: skip
    with Builders() as builders:
        first = builders.start(request)
        second = builders.start(request.model_copy(update={"plan_file": tmp_path / "1.plan"}))
        plan = first.result()
        assert plan.data == b"" and plan.size == (tmp_path / "0.plan").stat().st_size
        assert plan.kernel_of("the/Softmax") and not (tmp_path / "1.plan").exists()
    assert not (tmp_path / "1.plan").exists() and second.exception() is not None


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="a process cannot be stopped here")
@pytest.mark.usefixtures("as_deployed")
def test_a_deploy_that_fails_during_a_build_ends_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: queue.Queue[subprocess.Popen[str]] = queue.Queue()

    class Stopped(subprocess.Popen[str]):
        """A builder that does not end by itself."""

        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            if "attnforge.export.tensorrt.process" in args[0]:
                self.send_signal(signal.SIGSTOP)
                started.put(self)

    builders: list[subprocess.Popen[str]] = []

    def fail(*arguments: object) -> None:
        builders.append(started.get(timeout=60))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", Stopped)
    monkeypatch.setattr("attnforge.export.deployment.write_reference", fail)
    module, args, shapes = small_example()
    with pytest.raises(KeyboardInterrupt):
        attnforge.deploy(module, args, tmp_path / "bundle", shapes, targets=["tensorrt_rtx"], tune=False)
    assert [builder.returncode for builder in builders] == [-signal.SIGKILL] and started.empty()
    assert list(tmp_path.iterdir()) == []


class WithoutBf16(nn.Module):
    """The operators that TensorRT-RTX has no bf16 for, before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.transposed = nn.ConvTranspose1d(32, 16, 3, padding=1)
        self.attention = nn.MultiheadAttention(16, 1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.mish(F.hardswish(self.transposed(self.gru(x)[0].mT).mT))
        result: Tensor = y + self.attention(y, y, y, need_weights=False)[0]
        return result


@pytest.mark.parametrize(("precision", "casts"), [("fp16", 0), ("bf16", 8)])
def test_operators_without_bf16_are_built_in_fp32(precision: str, casts: int, tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, x = WithoutBf16().eval(), torch.randn(2, 40, 16)
    bundle = attnforge.deploy(module, (x,), tmp_path / "b", precision=precision, targets=["tensorrt_rtx"], tune=False)
    assert bundle.manifest.attention.fused == {"tensorrt_rtx": 1}
    model = load_graph(bundle, CANONICAL)
    lower(model, sites_of(bundle.manifest.attention))
    types = {node.op_type: {v.dtype for v in node.inputs if v is not None} for node in model.graph}
    wanted = ir.DataType.FLOAT if precision == "bf16" else ir.DataType.FLOAT16
    assert all(types[name] == {wanted} for name in ("ConvTranspose", "GRU", "HardSwish", "Mish"))
    assert sum(node.op_type == "Cast" for node in model.graph) == casts
