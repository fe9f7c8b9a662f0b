"""Every idiom becomes one canonical node, stays the same function, and is fused by the real builder."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch

import attnforge
from attnforge.arrays import Array, to_numpy
from attnforge.bundle import DimSpec
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.export.tensorrt import build as engine
from attnforge.precision import precision_named
from attnforge.runtime.backends.eager import in_float64, named_outputs, run
from attnforge.runtime.cases import cases, make_inputs
from attnforge.runtime.parity.budget import relative_error
from attnforge.runtime.parity.verify import hold
from attnforge.runtime.session import Session
from tests.support.emulated import Emulated
from tests.support.idioms import IDIOMS, X_DIMS, Idiom, Layers, X


def captured(idiom: Idiom, precision: str) -> Captured:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return capture(idiom.module(), idiom.inputs, idiom.dynamic, precision_named(precision))


def run_onnx(model: ir.Model, file: Path, inputs: dict[str, Array]) -> Array:
    ir.save(model, file)
    options = ort.SessionOptions()
    options.log_severity_level = 3
    result: Array = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"]).run(None, inputs)[0]
    return result


@pytest.mark.parametrize("name", IDIOMS)
def test_same_function(name: str, tmp_path: Path) -> None:
    """In fp32, at three sizes, both lowerings err by no more than 2e-6, or than twice what eager errs by."""
    found = captured(IDIOMS[name], "fp32")
    sites = canonicalize(found.model).sites
    assert [site.reason for site in sites] == [None]
    exact = in_float64(found.module)
    example = {spec.name: to_numpy(spec.name, arg) for spec, arg in zip(found.inputs, found.args, strict=True)}
    wanted = [case for case in cases(found.inputs) if case.name in ("example", "normal-smallest", "normal-odd")]
    low_onnxruntime, low_tensorrt = found.model.clone(), found.model.clone()
    for_onnxruntime.lower(low_onnxruntime, sites, wanted[0].sizes)
    for_tensorrt.lower(low_tensorrt, sites)
    for case in wanted:
        inputs = make_inputs(case, found.inputs, example)
        truth = next(iter(run(exact, inputs, torch.float64).values())).numpy()
        eager = next(iter(named_outputs(found.module(*(torch.from_numpy(a) for a in inputs.values()))).values()))
        for target, model in (("onnxruntime", low_onnxruntime), ("tensorrt", low_tensorrt)):
            got = run_onnx(model, tmp_path / f"{target}.onnx", inputs)
            assert np.array_equal(np.isnan(got), eager.isnan().numpy()), (case.name, target)
            finite = np.isfinite(truth)
            error, eager_error = (relative_error(t[finite], truth[finite]) for t in (got, eager.numpy()))
            assert error <= max(2e-6, 2 * eager_error), (case.name, target)


@pytest.mark.parametrize("name", IDIOMS)
def test_fused_by_tensorrt_rtx(name: str, tmp_path: Path) -> None:
    idiom = IDIOMS[name]
    found = captured(idiom, "fp16")
    sites = canonicalize(found.model).sites
    (lowered,) = for_tensorrt.lower(found.model, sites).sites
    file = tmp_path / "model.onnx"
    ir.save(found.model, file)
    plan = engine.build(file, "tensorrt_rtx", found.inputs, "fp16")
    if idiom.unfused is None:
        assert plan.kernel_of(lowered.node) is not None, (lowered.why, plan.layers_of(lowered.node))
        assert lowered.unfused is None
    else:
        assert lowered.unfused is not None and idiom.unfused in lowered.unfused
        assert plan.kernel_of(lowered.node) is None


IN_16_BITS = (
    "scale_on_scores", "columns", "causal_by_adding_triu", "bias_table", "bias_under_a_finite_fill",
    "mask_and_softmax_in_float32", "scaled_dot_product_attention_grouped",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_16_BITS)
def test_attention_alone_in_fp16(name: str, tmp_path: Path) -> None:
    """Fused in an fp32 bundle; and what TensorRT is given, emulated with the fused kernels' scores in fp32, is within
    the budget."""
    idiom, target = IDIOMS[name], "tensorrt_rtx"
    bundle = attnforge.deploy(
        idiom.module(), idiom.inputs, tmp_path / "b", idiom.dynamic, targets=[target], attention_precision="fp16",
        require_fused=[target],
    )  # fmt: skip
    record = bundle.manifest.targets[target]
    assert record.attention_precision == "fp16" and record.without is not None
    assert bundle.manifest.precision == "fp32" and bundle.manifest.outputs[0].dtype == "float32"
    session = Session(bundle, Emulated(bundle, target))
    report = hold(bundle, session.backend, session.run)
    assert report.passed and report.budget >= 1e-3, report.failures


@pytest.mark.parametrize("name", ["padding_mask", "columns"])
def test_attention_alone_in_bf16_leaves_onnxruntime_in_fp32(name: str, tmp_path: Path) -> None:
    idiom, targets = IDIOMS[name], ["onnxruntime", "tensorrt_rtx"]
    bundle = attnforge.deploy(
        idiom.module(), idiom.inputs, tmp_path / "b", idiom.dynamic, targets=targets, attention_precision="bf16",
        require_fused=targets[1:], tune=False,
    )  # fmt: skip
    types = {
        name: {value.dtype for node in ir.load(bundle.file(record.model)).graph for value in node.outputs}
        for name, record in bundle.manifest.targets.items()
    }
    assert ir.DataType.BFLOAT16 in types["tensorrt_rtx"] and ir.DataType.BFLOAT16 not in types["onnxruntime"]
    assert bundle.manifest.targets["onnxruntime"].attention_precision is None
    report = attnforge.verify(bundle, ["onnxruntime-cpu"])
    assert report.passed and report.backends["onnxruntime-cpu"].budget < 1e-4


def two_products(s: Layers, x: torch.Tensor) -> torch.Tensor:
    q, k, v = s.qkv(x)
    weights = (q @ k.mT / 4).softmax(-1)
    return s.merge(weights @ v) + s.merge(weights @ v.square())


def test_weights_that_two_products_take_are_two_sites(tmp_path: Path) -> None:
    found = captured(Idiom("two_products", two_products, (X,), {"x": X_DIMS}, None), "fp32")
    sites = canonicalize(found.model).sites
    assert [site.reason for site in sites] == [None, None] and len({site.name for site in sites}) == 2
    for_onnxruntime.lower(found.model, sites, {})
    inputs = {"x": X.numpy()}
    truth = run(in_float64(found.module), inputs, torch.float64)["output"].numpy()
    assert relative_error(run_onnx(found.model, tmp_path / "model.onnx", inputs), truth) <= 2e-6


def sink_beside_shifted_scores(s: Layers, x: torch.Tensor) -> torch.Tensor:
    q, k, v = s.qkv(x)
    scores = q @ k.mT / 4
    scores = scores - scores.amax(-1, keepdim=True)
    sinks = s.per_head.expand(x.shape[0], -1, x.shape[1], -1)
    return s.merge(torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v)


def numerator_is_an_output(s: Layers, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = s.qkv(x)
    weights = (q @ k.mT / 4).exp()
    product = weights @ v
    return product / weights.sum(-1, keepdim=True), product


@pytest.mark.parametrize("forward", [sink_beside_shifted_scores, numerator_is_an_output])
def test_what_only_looks_like_an_idiom_stays_the_same(forward: Any, tmp_path: Path) -> None:
    found = captured(Idiom(forward.__name__, forward, (X,), {"x": X_DIMS}, None), "fp32")
    assert all(site.node is None for site in canonicalize(found.model).sites)
    inputs = {"x": X.numpy()}
    truth = run(in_float64(found.module), inputs, torch.float64)
    ir.save(found.model, file := tmp_path / "model.onnx")
    results = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, inputs)
    assert all(relative_error(got, t.numpy()) <= 2e-6 for got, t in zip(results, truth.values(), strict=True))


def test_there_are_sixty_and_they_vary() -> None:
    assert len(IDIOMS) >= 60
    dynamic = [idiom for idiom in IDIOMS.values() if idiom.dynamic is not None]
    assert len(dynamic) > 0.9 * len(IDIOMS)
    assert any(isinstance(d, DimSpec) for d in captured(dynamic[0], "fp32").inputs[0].dims)
