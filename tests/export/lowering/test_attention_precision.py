"""Attention alone in 16 bits, in an fp32 bundle."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
import pytest

import attnforge
from attnforge.runtime.parity.verify import hold
from attnforge.runtime.session import Session
from tests.support.emulated import Emulated
from tests.support.idioms import IDIOMS

IN_16_BITS = (
    "scale_on_scores", "columns", "causal_by_adding_triu", "bias_table", "bias_under_a_finite_fill",
    "mask_and_softmax_in_float32", "scaled_dot_product_attention_grouped",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_16_BITS)
def test_attention_alone_in_fp16(name: str, tmp_path: Path) -> None:
    """Attention is fused in an fp32 bundle; and TensorRT's graph, emulated with the fused kernels' scores in fp32, is
    within the budget."""
    idiom, target = IDIOMS[name], "tensorrt_rtx"
    bundle = attnforge.deploy(
        idiom.module(), idiom.args, tmp_path / "b", idiom.dynamic_shapes, targets=[target], attention_precision="fp16",
        require_fused=[target], tune=False,
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
        idiom.module(), idiom.args, tmp_path / "b", idiom.dynamic_shapes, targets=targets, attention_precision="bf16",
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
