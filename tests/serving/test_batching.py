"""Batch dimensions, and requests that are joined along them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import DimSpec, Manifest, TensorSpec
from attnforge.errors import InputError, RunError
from attnforge.runtime.session import Session
from attnforge.serving.batching import Joiner, batch_of, why_not_apart
from tests.support.bundles import Deploy, DeploySmall

BATCH = DimSpec(symbol="batch", min=1, opt=2, max=8)
TOKENS = DimSpec(symbol="tokens", min=1, opt=2, max=8)


def tensor(*dims: int | DimSpec, name: str = "x") -> TensorSpec:
    return TensorSpec(name=name, dtype="float32", dims=list(dims))


def manifest_of(inputs: list[TensorSpec], outputs: list[TensorSpec]) -> Manifest:
    return Manifest.model_construct(inputs=inputs, outputs=outputs)


def test_a_dim_that_leads_all_inputs_and_outputs_is_a_batch() -> None:
    inputs = [tensor(BATCH, TOKENS, 4), tensor(BATCH, name="mask")]
    assert batch_of(manifest_of(inputs, [tensor(BATCH), tensor(BATCH, DimSpec(symbol="2*tokens"))])) == BATCH


ALONE: dict[str, tuple[list[TensorSpec], list[TensorSpec], str]] = {
    "static": ([tensor(2, 4)], [tensor(2, 4)], "does not lead with a dynamic dim"),
    "no dims": ([tensor()], [tensor()], "does not lead with a dynamic dim"),
    "no inputs": ([], [tensor(BATCH)], "does not lead with a dynamic dim"),
    "an input without it": ([tensor(BATCH), tensor(4, name="y")], [tensor(BATCH)], r"input y is float32\[4\] and does"),
    "an output without it": ([tensor(BATCH)], [tensor()], r"output x is float32\[\] and does not lead with batch"),
    "another factor": ([tensor(DimSpec(symbol="batch", factor=2, min=2, opt=2, max=8))], [], "does not lead"),
    "an output of twice as many": ([tensor(BATCH)], [tensor(DimSpec(symbol="batch", factor=2))], "does not lead"),
    "an expression": ([tensor(BATCH)], [tensor(DimSpec(symbol="batch + 1"))], "does not lead"),
    "after another dim": ([tensor(TOKENS, BATCH)], [tensor(BATCH, TOKENS)], "does not lead with tokens"),
    "twice": ([tensor(BATCH, BATCH)], [tensor(BATCH)], "has batch in a further dim"),
    "in an expression": ([tensor(BATCH)], [tensor(BATCH, DimSpec(symbol="4*batch"))], "has batch in a further dim"),
    "two at least": ([tensor(DimSpec(symbol="batch", min=2, opt=2, max=8))], [], "batch is at least 2"),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_is_no_batch_says_why(case: str) -> None:
    inputs, outputs, words = ALONE[case]
    reason = batch_of(manifest_of(inputs, outputs))
    assert isinstance(reason, str) and re.search(words, reason)


class Unbatched(nn.Module):
    """Attention over tokens without a batch: the first dim leads input and output, and its rows see each other."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.transpose(0, 1)).softmax(-1) @ x


def test_a_leading_dim_whose_rows_meet_is_no_batch(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("batch", min=1, max=8)}}
    bundle = attnforge.deploy(
        Unbatched(), (torch.randn(4, 16),), tmp_path / "bundle", shapes, targets=["onnxruntime"], tune=False
    )
    batch = batch_of(bundle.manifest)
    assert isinstance(batch, DimSpec)
    with attnforge.load(bundle, "onnxruntime-cpu") as session:
        assert why_not_apart(session, batch) == (
            "output output of a sample changes with the rest of the batch, so batch is not a batch dimension"
        )


@pytest.fixture
def session(registered: Deploy) -> Session:
    return attnforge.load(registered("cross-attention", "fp32"), "onnxruntime-cpu", threads=1)


def request(batch: int, queries: int = 3, keys: int = 5, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "query": rng.standard_normal((batch, queries, 256), np.float32),
        "memory": rng.standard_normal((batch, keys, 192), np.float32),
        "key_padding_mask": rng.random((batch, keys)) < 0.3,
    }


class Counting:
    """A session that counts its calls, and fails those of `fail`."""

    def __init__(self, session: Session, fail: int | None = None) -> None:
        self.inputs, self.outputs, self._session, self._fail = session.inputs, session.outputs, session, fail
        self.batches: list[int] = []

    def run(self, values: dict[str, Array]) -> dict[str, Array]:
        self.batches.append(len(values["query"]))
        if self._fail is not None and (values["query"] == self._fail).any():
            raise RunError("a value that the library does not take")
        results: dict[str, Array] = self._session.run(values)
        return results


def joined(session: Any, requests: list[dict[str, Array]], join: bool = True) -> list[Any]:
    return Joiner(session, join).answers(requests)


def test_samples_of_the_model_stay_apart(session: Session) -> None:
    batch = batch_of(session.bundle.manifest)
    assert isinstance(batch, DimSpec) and batch.symbol == "batch"
    assert why_not_apart(session, batch) is None


def test_requests_of_one_shape_are_one_call_each_with_its_own_samples(session: Session) -> None:
    requests = [request(batch, seed=batch) for batch in (1, 3, 2)]
    counting = Counting(session)
    answers = joined(counting, requests)
    assert counting.batches == [6]
    for answer, feeds in zip(answers, requests, strict=True):
        np.testing.assert_allclose(answer["output"], session.run(feeds)["output"], rtol=1e-4, atol=1e-5)


def test_requests_of_other_shapes_are_other_calls(session: Session) -> None:
    counting = Counting(session)
    answers = joined(counting, [request(1), request(2, queries=4), request(1), request(1, keys=6)])
    assert sorted(counting.batches) == [1, 2, 2]
    assert [answer["output"].shape[:2] for answer in answers] == [(1, 3), (2, 4), (1, 3), (1, 3)]


def test_what_is_wrong_with_a_request_is_its_own_error(session: Session) -> None:
    wrong = request(1) | {"key_padding_mask": np.zeros((2, 5), bool)}
    missing = {"query": request(1)["query"]}
    counting = Counting(session)
    answers = joined(counting, [request(1), wrong, request(2), missing, request(1, queries=129)])
    assert counting.batches == [3]
    assert [isinstance(answer, InputError) for answer in answers] == [False, True, False, True, True]
    assert answers[2]["output"].shape == (2, 3, 256)


class NoArray:
    """An object that claims to be an array, but is not."""

    shape, dtype = (1, 3, 256), np.dtype(np.float32)

    def __array__(self, *arguments: Any, **options: Any) -> Array:
        raise ZeroDivisionError("of a stranger's")

    __dlpack__ = __array__


POISON: dict[str, Any] = {
    "a list": [[[0.0] * 256] * 3],
    "rows of several lengths": [[[0.0], [0.0, 0.0]]],
    "nothing": None,
    "a text": "query",
    "a number": 1.0,
    "objects": np.full((1, 3, 256), None),
    "texts": np.full((1, 3, 256), "a"),
    "no array": NoArray(),
    "another rank": np.zeros((1, 256), np.float32),
    "no dims": np.array(1.0, np.float32),
    "another dtype": np.zeros((1, 3, 256)),
    "a sparse tensor": torch.zeros(1, 3, 256).to_sparse(),
    "a tensor without memory": torch.zeros(1, 3, 256, device="meta"),
}


@pytest.mark.parametrize("case", POISON)
def test_a_value_that_is_no_array_is_one_requests_error(session: Session, case: str) -> None:
    counting = Counting(session)
    bad = request(1, seed=1) | {"query": POISON[case]}
    answers = joined(counting, [request(1), bad, request(2, seed=2)])
    assert counting.batches == [3]
    assert [isinstance(answer, InputError) for answer in answers] == [False, True, False]
    assert isinstance(joined(session, [bad])[0], InputError)
    assert [isinstance(a, InputError) for a in joined(session, [bad, request(1)], join=False)] == [True, False]


def test_a_request_that_is_no_mapping_is_its_own_error(session: Session) -> None:
    for bad in (None, [1], "query", 5):
        answers = joined(session, [request(1), bad, request(1)])  # type: ignore[list-item]
        assert [isinstance(answer, InputError) for answer in answers] == [False, True, False]


def test_arrays_of_other_libraries_are_joined(session: Session) -> None:
    plain = request(2, seed=2)
    tensors: Any = {name: torch.from_numpy(array) for name, array in plain.items()}
    counting = Counting(session)
    answers = joined(counting, [request(1), tensors])
    assert counting.batches == [3]
    np.testing.assert_allclose(answers[1]["output"], session.run(plain)["output"], rtol=1e-4, atol=1e-5)


def test_values_that_a_library_refuses_are_one_requests_error(session: Session) -> None:
    bad = request(1, seed=1)
    bad["query"][0, 0, 0] = 77
    counting = Counting(session, fail=77)
    answers = joined(counting, [request(1), bad, request(2, seed=2)])
    assert counting.batches == [4, 1, 1, 2]
    assert [isinstance(answer, RunError) for answer in answers] == [False, True, False]


def test_where_nothing_is_joined_every_request_is_a_call(session: Session) -> None:
    counting = Counting(session)
    assert len(joined(counting, [request(2), request(2), request(1)], join=False)) == 3
    assert counting.batches == [2, 2, 1]


def test_a_model_with_an_input_without_batch_is_not_joined(small: DeploySmall) -> None:
    assert batch_of(small("fp32").manifest) == "input kinds is int64[16] and does not lead with batch"
