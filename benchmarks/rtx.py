"""Plans of TensorRT-RTX, which need no GPU to be built."""

from __future__ import annotations

from collections.abc import Mapping

import onnx_ir as ir

from attnforge.atomic import temporary_folder
from attnforge.bundle import TensorSpec
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.saving import save
from attnforge.export.lowering.attention import Lowered
from attnforge.export.lowering.tensorrt import lower
from attnforge.export.tensorrt.build import Plan
from tests.support.plans import build


def plan_of(graph: ir.Model, inputs: list[TensorSpec], precision: str = "fp16") -> Plan:
    """Build the plan of a graph; raises what :func:`tests.support.plans.build` raises."""
    with temporary_folder() as folder:
        save(graph, folder / "model.onnx")
        return build(folder / "model.onnx", "tensorrt_rtx", inputs, precision)


def compiled(
    graph: ir.Model, sites: list[Site], inputs: list[TensorSpec], precision: str, sizes: Mapping[str, int] | None = None
) -> tuple[list[Lowered], Plan]:
    """Lower a canonical graph, which is changed, and build its plan; return the form of every site, and the plan."""
    return lower(graph, sites, sizes=sizes), plan_of(graph, inputs, precision)
