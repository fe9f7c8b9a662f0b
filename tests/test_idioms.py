"""Every idiom becomes one canonical node, stays the same function, and is fused by the real builder."""

import warnings
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from idioms import IDIOMS, Idiom

from attnforge.arrays import Array, to_numpy
from attnforge.bundle import DimSpec
from attnforge.eager import in_float64, named_outputs, run
from attnforge.export import engine
from attnforge.export.canonicalize import canonicalize
from attnforge.export.capture import Captured, capture
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.precision import precision_named
from attnforge.reference import cases, make_inputs
from attnforge.runtime.parity import relative_error


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
    sites = canonicalize(found.model)
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
    sites = canonicalize(found.model)
    (lowered,) = for_tensorrt.lower(found.model, sites)
    file = tmp_path / "model.onnx"
    ir.save(found.model, file)
    plan = engine.build(file, "tensorrt_rtx", found.inputs, "fp16")
    if idiom.unfused is None:
        assert plan.kernel_of(lowered.node) is not None, (lowered.why, plan.layers_of(lowered.node))
        assert lowered.unfused is None
    else:
        assert lowered.unfused is not None and idiom.unfused in lowered.unfused
        assert plan.kernel_of(lowered.node) is None


def test_there_are_sixty_and_they_vary() -> None:
    assert len(IDIOMS) >= 60
    dynamic = [idiom for idiom in IDIOMS.values() if idiom.dynamic is not None]
    assert len(dynamic) > 0.9 * len(IDIOMS)
    assert any(isinstance(d, DimSpec) for d in captured(dynamic[0], "fp32").inputs[0].dims)
