"""Conversion between the Open Inference Protocol's JSON and arrays."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from attnforge.arrays import BFLOAT16
from attnforge.errors import InputError, RunError
from attnforge.serving.open_inference import DATATYPES, document_of, inputs_of


def body(**changes: Any) -> bytes:
    return json.dumps(
        {"inputs": [{"name": "x", "shape": [2], "datatype": "INT8", "data": [1, -2], **changes}]}
    ).encode()


@pytest.mark.parametrize("dtype", sorted(DATATYPES))
def test_arrays_come_back(dtype: str) -> None:
    array = np.array([[1, 0, 1], [0, 1, 1]]).astype(BFLOAT16 if dtype == "bfloat16" else dtype)
    document = json.loads(json.dumps(document_of("model", {"x": array})))
    (tensor,) = document["outputs"]
    assert (tensor["datatype"], tensor["shape"]) == (DATATYPES[dtype], [2, 3])
    back = inputs_of(json.dumps({"inputs": [tensor]}).encode())["x"]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


def test_data_may_be_nested_and_empty() -> None:
    np.testing.assert_array_equal(inputs_of(body(shape=[1, 2], data=[[1, 2]]))["x"], [[1, 2]])
    assert inputs_of(body(shape=[0, 3], data=[]))["x"].shape == (0, 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"", "not a valid inference request"),
        (b"[]", "not a valid inference request"),
        (b'{"inputs": {"x": 1}}', "not a valid inference request"),
        (b'{"inputs": [{"name": "x"}]}', "not a valid inference request"),
        (b"[" * 100_000, "not a valid inference request"),
        (body(datatype="STRING"), "input 'x' is 'STRING'; the datatypes are BF16, BOOL, FP16"),
        (body(datatype=[]), "not a valid inference request"),
        (body(shape=[-1]), r"input 'x' has shape \[-1\]; give a whole number for every dim"),
        (body(shape=[2.0]), r"input 'x' has shape \[2.0\]; give a whole number"),
        (body(shape=[3]), r"input 'x' has 2 numbers; its shape \[3\] takes 3"),
        (body(shape=[10**30, 0]), r"input 'x' has 2 numbers; its shape \[1"),
        (body(data=[1, 300]), "the data of input 'x' are not INT8: Python integer 300 out of bounds"),
        (body(data=[1, 2.5]), "the data of input 'x' are not INT8: float64 was given"),
        (body(data=[True, False]), "the data of input 'x' are not INT8: bool was given"),
        (body(data=[1, 0], datatype="BOOL"), "the data of input 'x' are not BOOL: int64 was given"),
        (body(data=["1", "2"], datatype="FP32"), "the data of input 'x' are not FP32: str"),
        (body(data=[[1], [2, 3]]), "the data of input 'x' are not INT8"),
        (body(data=None), "the data of input 'x' are not INT8: object was given"),
    ],
)
def test_wrong_requests_are_refused_in_one_line(given: bytes, words: str) -> None:
    with pytest.raises(InputError, match=words) as refused:
        inputs_of(given)
    assert "\n" not in str(refused.value)


def test_numbers_that_json_has_not_are_refused() -> None:
    with pytest.raises(RunError, match="output 'y' has NaN or infinity, which JSON cannot represent"):
        document_of("model", {"y": np.array([1, np.inf], np.float32)})
