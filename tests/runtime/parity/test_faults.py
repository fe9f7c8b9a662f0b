"""`verify` catches every seeded fault, unless it is measured to have no effect at this precision. These tests try a
sample of every kind of fault of :mod:`tests.support.faults`."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from attnforge.runtime.backends.registry import why_not_here
from tests.support.faults.bench import NEVER, Bench, Faults, is_sampled
from tests.support.faults.catalogue import FAULTS, INERT, softmax_twice
from tests.support.faults.graph import Graph, NotThere
from tests.support.faults.subjects import DECODERS, FOR_TENSORRT, PRECISIONS, deploy_in_blocks

TESTED = [
    (name, p)
    for name, precisions in PRECISIONS.items()
    for p in precisions
    if p != "bf16" and (p == "fp32" or name not in DECODERS)
]
"""fp16 stands for both 16-bit types, and decoders are in fp32 only: `python -m benchmarks run faults` tries all."""

TRIED = ("fp32", "fp16", "int8", "fp8", "int4")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Faults:
    return Faults(tmp_path_factory.mktemp("faults"), is_sampled)


PASSED_IN_FP32 = {*INERT, "epsilon-1e-6", "epsilon-1e-12"}
"""Of faults that change the function, rounding in fp32 hides only a smaller epsilon of a norm, not 1% of a weight."""


def grouped(precision: str) -> pytest.MarkDecorator:
    """Run all tests of one precision in one worker, which deploys for them once."""
    return pytest.mark.xdist_group(f"faults-{precision}")


@pytest.mark.parametrize(("name", "precision"), [pytest.param(n, p, marks=grouped(p)) for n, p in TESTED])
def test_no_fault_escapes(faults: Faults, name: str, precision: str) -> None:
    """A fault fails unless it has no effect or rounding hides it; a fault without effect passes."""
    assert faults.bench(name, precision).unaltered.passed
    rows = faults.rows(name, precision)
    assert [row for row in rows if row.verdict in NEVER] == []
    assert {row.fault.name for row in rows if row.verdict == "no effect"} <= set(INERT)
    if precision == "fp32":
        assert {row.fault.name for row in rows if row.verdict != "caught"} <= PASSED_IN_FP32


@pytest.mark.parametrize("name", DECODERS)
def test_steps_in_float64_are_the_reference(faults: Faults, name: str) -> None:
    """For every order of tokens; position tables are stored in fp32."""
    assert faults.bench(name, "fp32").off_reference() < 1e-7


@pytest.mark.parametrize("precision", [pytest.param(p, marks=grouped(p)) for p in TRIED])
def test_many_faults_of_every_kind_are_caught(faults: Faults, precision: str) -> None:
    subjects = [name for name, p in TESTED if p == precision]
    caught = [row for name in subjects for row in faults.rows(name, precision) if row.verdict == "caught"]
    assert len({row.fault.name for row in caught}) >= {"int8": 60, "fp8": 10, "int4": 7}.get(precision, 40)
    assert {row.fault.family for row in caught} == {f.family for f in FAULTS if not {*f.subjects}.isdisjoint(subjects)}


@grouped("fp32")
def test_in_fp32_all_are_caught_except_an_epsilon_and_faults_without_effect(faults: Faults) -> None:
    passed = {
        row.fault.name for name, p in TESTED if p == "fp32" for row in faults.rows(name, p) if row.verdict != "caught"
    }
    assert passed == PASSED_IN_FP32


def test_names_of_faults_are_unique() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names) >= 60
    assert set(INERT) <= set(names)
    assert {name for fault in FAULTS for name in fault.subjects} == set(PRECISIONS)


def test_a_fault_with_nothing_to_alter_raises(faults: Faults) -> None:
    x = ir.Value(name="x", shape=ir.Shape([2]), type=ir.TensorType(ir.DataType.FLOAT))
    node = ir.node("Relu", [x])
    node.outputs[0].name = "y"
    model = ir.Model(ir.Graph([x], node.outputs, nodes=[node], opset_imports={"": 23}), ir_version=10)
    with pytest.raises(NotThere, match="attention as products"):
        softmax_twice(Graph(model))
    by_name = {fault.name: fault for fault in FAULTS}
    for name in ("padding-ignored", "causal-upper", "query-sign", "epsilon-1e-6", "patches-transposed", "gelu-tanh"):
        with pytest.raises(NotThere):
            by_name[name].alter(Graph(model))
    graph = Graph(model)
    weight = ir.Value(name="w", const_value=ir.tensor(np.ones(3, np.float32)))
    with pytest.raises(NotThere, match="a change of w"):
        graph.set(weight, np.ones(3))


@pytest.mark.skipif(why_not_here("openvino") is not None, reason=str(why_not_here("openvino")))
@pytest.mark.parametrize("name", FOR_TENSORRT)
def test_faults_of_blocks_are_caught_on_openvino_as_well(name: str, tmp_path: Path) -> None:
    """Every second fault of blocks and of steps, which OpenVINO runs in the same form as TensorRT."""
    bench = Bench(deploy_in_blocks(name, tmp_path / "b"), name, tmp_path / "altered", "openvino")
    assert bench.unaltered.passed
    faults = [fault for fault in FAULTS if name in fault.subjects and fault.family in ("blocks", "causal blocks")]
    rows = [bench.tried(fault) for fault in faults if zlib.crc32(fault.name.encode()) // 16 % 2]
    assert len(rows) >= 5
    assert {row.verdict for row in rows} <= {"caught", "no effect"}
    assert {row.fault.name for row in rows if row.verdict == "no effect"} <= set(INERT)
