"""ONNX's own test cases of the Attention operator (`onnx.backend.test`): imported, made canonical, lowered for ONNX
Runtime and run, each gives the answer that the standard gives."""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from attnforge.arrays import Array
from attnforge.errors import AttnforgeError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.lowering.onnxruntime import lower
from attnforge.export.sources.onnx_file import import_graph

LEAST = "ONNX Runtime's scores have the least number where the standard has minus infinity"
TOLERANCE = {"bfloat16": 2.0**-7, "float16": 2.0**-10, "float32": 1e-5}
"""Of the largest number, by the type of the answer."""


@functools.cache
def cases() -> dict[str, Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other operators' cases
        found = {case.name: case for case in collect_testcases("Attention")}
    return {name: case for name, case in found.items() if "expanded" not in name}


def refused(name: str) -> bool:
    """Whether ONNX Runtime 1.31 refuses a case as it was given: it does not know the attributes of windows, and wants a
    mask as long as the keys."""
    return "_window" in name or "padded_kv" in name


def as_array(tensor: Any) -> Array:
    array: Array = numpy_helper.to_array(tensor) if isinstance(tensor, onnx.TensorProto) else np.asarray(tensor)
    return array


def answers(name: str, folder: Path) -> list[tuple[Array, Array]]:
    """What a case gives, and what it should give."""
    case = cases()[name]
    ((inputs, outputs),) = case.data_sets
    onnx.save(case.model, folder / "model.onnx")
    model = import_graph(folder / "model.onnx", None, None, None).model
    lower(model, canonicalize(model).sites, {})
    feeds = {value.name: as_array(array) for value, array in zip(case.model.graph.input, inputs, strict=True)}
    return list(zip(as_it_is(model)(feeds).values(), map(as_array, outputs), strict=True))


def test_every_case_is_here() -> None:
    assert len(cases()) >= 93
    assert sum(map(refused, cases())) == 14


def marked() -> list[Any]:
    least = pytest.mark.xfail(reason=LEAST, strict=True)
    return [
        pytest.param(name, marks=[least] if "qk_matmul_bias" in name and name.endswith("mask_causal") else [])
        for name in cases()
        if not refused(name)
    ]


@pytest.mark.parametrize("name", marked())
def test_the_answer_is_the_standards(name: str, tmp_path: Path) -> None:
    for got, expected in answers(name, tmp_path):
        wide, wanted = got.astype(np.float64), expected.astype(np.float64)
        np.testing.assert_array_equal(np.isfinite(wide), np.isfinite(wanted))
        finite = np.isfinite(wanted)
        largest = np.abs(wanted[finite]).max(initial=1e-9)
        assert np.abs(wide - wanted)[finite].max(initial=0) <= TOLERANCE[expected.dtype.name] * largest


@pytest.mark.parametrize("name", [name for name in cases() if refused(name)])
def test_what_onnxruntime_does_not_run_as_given_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(AttnforgeError, match=r"does not run|cannot run"):
        answers(name, tmp_path)
