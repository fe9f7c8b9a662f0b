"""The table of fused attention sites: third-party optimizers get the graphs and sizes that they were written for."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir
import torch
from torch import nn
from torch.export import Dim

from attnforge.bench.contenders.peers import (
    fused_operators,
    transformers_optimizer,
    widths_of,
)
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named
from benchmarks.experiments import fusion
from tests.support.huggingface import build


def test_a_torchscript_export_keeps_names_and_dynamic_dims(tmp_path: Path) -> None:
    batch = Dim("batch", min=1, max=8)
    for i, shapes in enumerate((({0: batch},), {"input": {0: batch}})):
        fusion.export_by_torchscript(nn.Linear(8, 4), (torch.randn(3, 8),), shapes, file := tmp_path / f"{i}.onnx")
        (given,) = onnx.load(file).graph.input
        assert given.name == "input" and given.type.tensor_type.shape.dim[0].dim_param
        assert given.type.tensor_type.shape.dim[1].dim_value == 8


def test_the_optimizer_fuses_a_torchscript_graph_given_its_heads(tmp_path: Path) -> None:
    bert, file = build("bert", "eager"), tmp_path / "bert.onnx"
    captured = capture(*bert, precision_named("fp32"))
    canonicalize(captured.model)
    assert widths_of(captured.model) == {(4, 64)}
    fusion.export_by_torchscript(bert.module, bert.args, bert.dynamic_shapes, file)
    assert (
        fused_operators(transformers_optimizer(file, ir.Model(ir.Graph([], [], nodes=[]), ir_version=10), ("bert",)))
        == 0
    )
    assert fused_operators(transformers_optimizer(file, captured.model, ("bert",))) == 2


def test_a_tool_that_refuses_a_model_has_a_dash() -> None:
    row = {"sites": 2, **dict.fromkeys(fusion.COLUMNS, 2), "ort_fusions": 0, "refused": {"ort_fusions": "no"}}
    tools = dict.fromkeys(("tensorrt_rtx", "onnxscript", "transformers"), "1")
    lines = fusion.table({"models": {"m": row}, "tools": tools, "command": "c"}).splitlines()
    assert lines[2] == "| m | 2 | 2 | 2 | 2 | 2 | – | 2 |"
    assert lines[3] == "| **all** | **2** | **2** | **2** | **2** | **2** | **0** | **2** |"
