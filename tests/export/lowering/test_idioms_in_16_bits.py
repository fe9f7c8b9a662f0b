"""Every idiom in 16 bits: fused by the real TensorRT-RTX builder, and within the parity budget on both targets."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx_ir.passes.common import RemoveUnusedNodesPass

from attnforge.arrays import Array
from attnforge.bundle import Case
from attnforge.errors import BuildError
from attnforge.export.lowering.attention import Lowered
from attnforge.export.tensorrt.build import Plan
from attnforge.precision import precision_named
from attnforge.runtime.parity.budget import judge
from tests.support.idioms import IDIOMS
from tests.support.idioms.catalogue import EXAMPLE, Part, inputs, parts
from tests.support.idioms.together import Exported, Outputs, export, feeds
from tests.support.plans import build

A_PLAN = 14
"""Idioms per plan: one plan of all of them takes longer than several."""


def every(*, fuses: bool = False) -> list[Any]:
    """Every part and idiom; if they must be fused, those that are not yet are expected to fail."""
    params = []
    for part in parts():
        for name in part.names:
            marks = [pytest.mark.xdist_group(f"{part.group}-fp16")]
            reason = IDIOMS[name].not_yet.get(part.form)
            if fuses and reason is not None:
                marks.append(pytest.mark.xfail(strict=True, reason=reason))
            params.append(pytest.param(part, name, id=f"{name}-{part.form}", marks=marks))
    return params


@functools.lru_cache(maxsize=1)  # a worker runs one part after another
def half(part: Part) -> Exported:
    return export({name: IDIOMS[name] for name in part.names}, part.form, "fp16")


@dataclass
class Built:
    """The TensorRT form of all idioms, and the plan of each, or the builder's message."""

    lowered: dict[str, Lowered]
    model: ir.Model
    plans: dict[str, Plan | str]


@functools.lru_cache(maxsize=1)  # a worker runs one part after another
def built(part: Part) -> Built:
    together = half(part)
    model, lowered = together.for_tensorrt()
    idioms = list(together.module.takes)
    outputs = dict(zip(idioms, model.graph.outputs, strict=True))  # every idiom has one

    def plan_of(names: Sequence[str]) -> Plan:
        alone = only(model, [str(outputs[name].name) for name in names])
        kept = {value.name for value in alone.graph.inputs}
        with tempfile.TemporaryDirectory() as folder:
            ir.save(alone, file := Path(folder) / "model.onnx")
            specs = [spec for spec in together.captured.inputs if spec.name in kept]
            return build(file, "tensorrt_rtx", specs, "fp16")

    def fused(name: str, plan: Plan) -> bool:
        nodes = [lowered[site.name].node for site in together.sites_of(name) if site.name in lowered]
        return all(plan.kernel_of(node) for node in nodes)

    plans: dict[str, Plan | str] = {}
    pending = [idioms[i : i + A_PLAN] for i in range(0, len(idioms), A_PLAN)]
    while pending:
        names = pending.pop()
        try:
            plan = plan_of(names)
        except BuildError as error:
            plans[names[0]] = str(error)
            again = names
        else:
            plans |= dict.fromkeys(names, plan)
            again = [name for name in names if not fused(name, plan)]
        # The builder also merges layers of idioms that share an input; only its result for an idiom alone counts.
        pending += [[name] for name in again] if len(names) > 1 else []
    return Built(lowered, model, plans)


def only(model: ir.Model, outputs: Sequence[str]) -> ir.Model:
    """A copy of `model` with only these outputs and what they need."""
    part = model.clone()
    kept = [value for value in part.graph.outputs if value.name in outputs]
    part.graph.outputs.clear()
    part.graph.outputs.extend(kept)
    RemoveUnusedNodesPass()(part)
    unused = [value for value in part.graph.inputs if not value.uses()]
    for value in unused:
        part.graph.inputs.remove(value)
    return part


@pytest.mark.parametrize(("part", "name"), every(fuses=True))
def test_fused_by_tensorrt_rtx(part: Part, name: str) -> None:
    idiom, plan, sites = IDIOMS[name], built(part).plans[name], half(part).sites_of(name)
    assert isinstance(plan, Plan), plan
    assert len(sites) == idiom.sites
    for site in sites:
        assert site.node is not None, site.reason
        lowered = built(part).lowered[site.name]
        if idiom.unfused is None:
            assert lowered.unfused is None
            assert plan.kernel_of(lowered.node), f"{lowered.why}; the builder made {plan.layers_of(lowered.node)}"
        else:
            assert lowered.unfused is not None and idiom.unfused in lowered.unfused
            assert plan.kernel_of(lowered.node) is None


class GatherElements(OpRun):
    """The operator with negative axes, which onnx's own reference implementation gets wrong."""

    op_domain = ""

    def _run(self, data: Array, indices: Array, axis: int) -> tuple[Array]:
        return (np.take_along_axis(data, indices, axis),)


@functools.lru_cache(maxsize=1)  # a worker runs one part after another
def outputs(part: Part) -> dict[str, Outputs]:
    """Outputs of ONNX Runtime, which computes in fp32, and of TensorRT's graph in NumPy, with every result in fp16."""
    together = half(part)
    drawn = inputs(EXAMPLE[part.form], seed=2)
    args = {name: arg.half() if arg.is_floating_point() else arg for name, arg in drawn.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        tensorrt = ReferenceEvaluator(ir.to_proto(built(part).model), new_ops=[GatherElements]).run(None, feeds(args))
    assert isinstance(tensorrt, list)
    return {
        "onnxruntime": together.run(together.for_onnxruntime(part.form), args),
        "tensorrt": together.named(tensorrt, args),
        "eager": together.eager(args),
        "truth": together.truth(args),
    }


@pytest.mark.parametrize("target", ["onnxruntime", "tensorrt"])
@pytest.mark.parametrize(("part", "name"), every())
def test_within_the_budget(part: Part, name: str, target: str) -> None:
    within_budget(name, *(outputs(part)[which][name] for which in (target, "eager", "truth")))


def within_budget(name: str, got: Sequence[Array], eager: Sequence[Array], truth: Sequence[Array]) -> None:
    case = Case(name=name, sizes={}, kind="normal", seed=0)
    for arrays in zip(got, eager, truth, strict=True):
        output, baseline, exact = (array.astype(np.float64) for array in arrays)
        verdict = judge(case, "output", output, baseline, exact, precision_named("fp16"))
        assert verdict.passed, verdict
