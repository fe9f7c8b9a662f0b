"""ONNX's own test cases of the Attention operator (`onnx.backend.test`): imported, made canonical, lowered for ONNX
Runtime and run, each gives the answer that the standard gives."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.lowering.onnxruntime import lower
from attnforge.export.masks.visibility import visibility
from attnforge.export.sources.onnx_file import Imported, import_graph
from attnforge.export.sources.specs import Ranges

TOLERANCE = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-5}
"""Of the largest number, by the type of the answer."""


@functools.cache
def cases() -> dict[str, Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other operators' cases
        found = {case.name: case for case in collect_testcases("Attention")}
    return {name: case for name, case in found.items() if "expanded" not in name}


def opened(model: onnx.ModelProto, folder: Path, ranges: Ranges | None = None) -> tuple[ir.Model, Imported]:
    onnx.save(model, folder / "model.onnx")
    imported = import_graph(folder / "model.onnx", ranges)
    return imported.model, imported


def as_array(tensor: Any) -> Array:
    array: Array = numpy_helper.to_array(tensor) if isinstance(tensor, onnx.TensorProto) else np.asarray(tensor)
    return array


def answers(name: str, folder: Path) -> list[tuple[Array, Array]]:
    """What a case gives, and what it should give."""
    case = cases()[name]
    ((inputs, outputs),) = case.data_sets
    model, _ = opened(case.model, folder)
    lower(model, canonicalize(model).sites, {})
    feeds = {value.name: as_array(array) for value, array in zip(case.model.graph.input, inputs, strict=True)}
    return list(zip(as_it_is(model)(feeds).values(), map(as_array, outputs), strict=True))


def test_every_case_is_here() -> None:
    assert len(cases()) >= 93


@pytest.mark.parametrize("name", cases())
def test_the_answer_is_the_standards(name: str, tmp_path: Path) -> None:
    for got, expected in answers(name, tmp_path):
        wide, wanted = got.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(wide), np.isfinite(wanted))
        finite = np.isfinite(wanted)
        largest = np.abs(wanted[finite]).max(initial=1e-9)
        assert np.abs(wide[finite] - wanted[finite]).max(initial=0) <= TOLERANCE[expected.dtype.name] * largest


WINDOWED = """
    <ir_version: 11, opset_import: ["": 25]>
    graph (float[2, 3, tokens, 8] q, float[2, 3, keys, 8] k, float[2, 3, keys, 8] v{inputs}) => (float[2, 3, n, 8] y)
    {{ y = Attention <left_window_size = {left}, right_window_size = {right}> ({operands}) }}
"""


@pytest.mark.parametrize(
    ("left", "right", "inputs", "operands", "form"),
    [
        (4, 0, "", "q, k, v", "band −4 … 0"),
        (2, 1, ", float[2, 3, 5, 8] past_k, float[2, 3, 5, 8] past_v", "q, k, v, , past_k, past_v", "band 3 … 6"),
        (1, 3, ", int64[2] lengths", "q, k, v, , , , lengths", None),
    ],
)
def test_a_window_over_any_number_of_tokens_is_the_standards(
    left: int, right: int, inputs: str, operands: str, form: str | None, tmp_path: Path
) -> None:
    text = WINDOWED.format(left=left, right=right, inputs=inputs, operands=operands)
    model, original = opened(onnx.parser.parse_model(text), tmp_path, {"tokens": (1, 8, 64), "keys": (1, 8, 64)})
    (site,) = canonicalize(model).sites
    (node,) = (node for node in model.graph if node.name == site.node)
    assert form is None or visibility(node).text() == form
    lower(model, [site], {})
    rng = np.random.default_rng(0)
    sizes: dict[str, Any] = {"tokens": 6, "keys": 9}
    feeds = {
        str(value.name): rng.standard_normal([sizes.get(str(dim), dim) for dim in value.shape or ()])
        for value in model.graph.inputs
    }
    feeds |= {"lengths": np.array([6, 9])} if "lengths" in feeds else {}
    (got,), (expected,) = as_it_is(model)(feeds).values(), original.eager(feeds).values()
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)
