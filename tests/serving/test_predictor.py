"""Prediction of rows without a cluster: batches of every length, rows of several sizes, and no batch."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import TRUSTED, Bundle
from attnforge.errors import InputError, UnknownNameError, UsageError
from attnforge.runtime.session import Session
from attnforge.serving.ray import Handle, Predictor
from tests.support.bundles import Deploy, DeploySmall, small_inputs

DIGITS = "patch-attention-digits"


@pytest.fixture
def digits(registered: Deploy) -> Handle:
    """A handle of a model that takes 1 to 32 images."""
    return handle_of(registered(DIGITS, "fp32"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the length of every call's first input."""
    lengths: list[int] = []
    run = Session.run

    def counting(self: Session, values: Any, **options: Any) -> dict[str, Any]:
        lengths.append(len(next(iter(values.values()))))
        return run(self, values, **options)

    monkeypatch.setattr(Session, "run", counting)
    return lengths


def handle_of(bundle: Bundle) -> Handle:
    return Handle(bundle.path, "onnxruntime-cpu", threads=1)


def images(count: int) -> Array:
    return np.random.default_rng(count).random((count, 1, 8, 8), np.float32)


# --- the handle -------------------------------------------------------------------------------------------------------


def test_a_handle_is_what_actors_need_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, registered: Deploy
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(TRUSTED, "maker.pub:/keys/other.pub")
    handle = pickle.loads(pickle.dumps(Handle("digits.bundle", "onnxruntime-cpu", threads=2, device=1)))
    assert handle.bundle == str(tmp_path / "digits.bundle")
    assert handle.trusted == (str(tmp_path / "maker.pub"), "/keys/other.pub")
    assert (handle.backend, handle.threads, handle.device) == ("onnxruntime-cpu", 2, 1)
    assert Handle("digits.bundle", trusted="my.pub").trusted == (str(tmp_path / "my.pub"),)
    assert Handle("digits.bundle", trusted=False).trusted is False
    monkeypatch.delenv(TRUSTED)
    assert Handle("digits.bundle").trusted is None
    assert len(pickle.dumps(handle_of(registered(DIGITS, "fp32")))) < 1000


def test_a_handle_refuses_what_no_actor_could_load() -> None:
    with pytest.raises(UnknownNameError, match=r"unknown backend 'eager'; known: .*onnxruntime-cpu"):
        Handle("digits.bundle", "eager")
    with pytest.raises(UsageError, match="0 threads were asked for"):
        Handle("digits.bundle", threads=0)


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "lengths"), [(None, [32, 32, 6]), (16, [16] * 5), (32, [32, 32, 32])])
def test_batches_are_cut_and_filled_up(
    digits: Handle, calls: list[int], samples: int | None, lengths: list[int]
) -> None:
    predictor = Predictor(digits, samples=samples)
    calls.clear()
    outputs = predictor({"image": images(70)})["output"]
    assert calls == lengths
    with digits.open() as session:
        np.testing.assert_allclose(
            outputs, np.concatenate([session(images(70)[i : i + 10]) for i in range(0, 70, 10)]), rtol=1e-4, atol=1e-6
        )


def test_with_samples_the_cut_changes_no_bit(digits: Handle) -> None:
    predictor = Predictor(digits, samples=16)
    whole = predictor({"image": images(40)})["output"]
    parts = [predictor({"image": images(40)[start:end]})["output"] for start, end in ((0, 1), (1, 30), (30, 40))]
    np.testing.assert_array_equal(np.concatenate(parts), whole)


def test_columns_stay_and_are_named(digits: Handle) -> None:
    rows = {"id": np.arange(3), "name": np.array(["a", "b", "c"], object), "pixels": images(3)}
    every = Predictor(digits, columns={"image": "pixels"}, outputs={"output": "scores"})(rows)
    assert list(every) == ["id", "name", "pixels", "scores"] and every["id"] is rows["id"]
    assert list(Predictor(digits, columns={"image": "pixels"}, keep=["id"])(rows)) == ["id", "output"]
    assert list(Predictor(digits, columns={"image": "pixels"}, keep=[])(rows)) == ["output"]


def test_no_rows_are_no_call(digits: Handle, calls: list[int]) -> None:
    predictor = Predictor(digits)
    calls.clear()
    assert predictor({"image": images(0)})["output"].shape == (0, 10)
    assert calls == []


def test_rows_of_several_sizes_are_a_call_for_each(registered: Deploy, calls: list[int]) -> None:
    handle = handle_of(registered("cross-attention", "fp32"))
    rng = np.random.default_rng(0)
    queries, keys = [3, 5, 3, 3, 5], [4, 4, 4, 7, 4]
    rows = {
        "query": ragged([rng.standard_normal((n, 256), np.float32) for n in queries]),
        "memory": ragged([rng.standard_normal((n, 192), np.float32) for n in keys]),
        "key_padding_mask": ragged([np.arange(n) > 2 for n in keys]),
    }
    predictor = Predictor(handle, keep=[])
    calls.clear()
    outputs = predictor(rows)["output"]
    assert sorted(calls) == [1, 2, 2]
    assert [row.shape for row in outputs] == [(n, 256) for n in queries]
    with handle.open() as session:
        for place, row in enumerate(outputs):
            alone = session.run({name: column[place][None] for name, column in rows.items()})["output"][0]
            np.testing.assert_allclose(row, alone, rtol=1e-4, atol=1e-5)


def ragged(rows: list[Array]) -> Array:
    column = np.empty(len(rows), object)
    column[:] = rows
    return column


class Scored(nn.Module):
    """Attention with one score per sample; `mixed` makes every sample's score the mean of all."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        scores = ((x @ x.transpose(1, 2)).softmax(-1) @ x).mean((1, 2))
        return scores.mean().expand_as(scores) + scores if self.mixed else scores


Scores = Callable[[bool, Dim | None], Handle]


@pytest.fixture
def scored(tmp_path: Path) -> Scores:
    """`scored(mixed, batch)`: such a model, with a batch of four if there is no dynamic dim."""

    def deploy(mixed: bool, batch: Dim | None) -> Handle:
        shapes = ({0: batch},) if batch is not None else None
        bundle = attnforge.deploy(
            Scored(mixed), (torch.randn(4, 3, 8),), tmp_path / "bundle", shapes, targets=["onnxruntime"], tune=False
        )
        return handle_of(bundle)

    return deploy


@pytest.mark.parametrize("batch", [None, Dim("batch", min=3, max=4)])
def test_a_batch_that_is_fixed_or_never_small_is_filled_up(scored: Scores, calls: list[int], batch: Dim | None) -> None:
    handle, rows = scored(False, batch), np.random.default_rng(0).random((9, 3, 8), np.float32)
    predictor = Predictor(handle)
    calls.clear()
    outputs = predictor({"x": rows})["output"]
    assert calls == ([4, 4, 4] if batch is None else [4, 4, 3]) and outputs.shape == (9,)
    with handle.open() as session:
        expected = session(np.concatenate([rows[5:], rows[8:], rows[8:]])[:4])
    np.testing.assert_allclose(outputs[5:], expected, rtol=1e-5)


def test_samples_that_meet_are_no_rows(scored: Scores) -> None:
    handle = scored(True, Dim("batch", min=1, max=4))
    rows = np.random.default_rng(0).random((3, 2, 3, 8), np.float32)
    assert Predictor(handle, keep=[])({"x": rows})["output"].shape == (3, 2)  # a row is a whole input
    with pytest.raises(
        InputError, match=r"has 2 dims .*; every row contains whole inputs, because output output of a sample changes"
    ):
        Predictor(handle)({"x": rows[0]})
    with pytest.raises(
        UsageError, match="2 samples per call were asked for, but calls have no samples: output output of a"
    ):
        Predictor(handle, samples=2)


def test_rows_hold_whole_inputs_where_one_has_no_batch(small: DeploySmall) -> None:
    rows = [small_inputs(batch, length=length, seed=batch) for batch, length in ((1, 4), (3, 8))]
    columns = {name: ragged([row[name] for row in rows]) for name in rows[0]}
    handle = handle_of(small("fp32"))
    outputs = Predictor(handle, keep=[])(columns)["output"]
    with handle.open() as session:
        for row, output in zip(rows, outputs, strict=True):
            np.testing.assert_array_equal(output, session.run(row)["output"])


def test_bfloat16_is_float32_in_rows(small: DeploySmall) -> None:
    rows = {name: array[None] for name, array in small_inputs().items()}
    outputs = Predictor(handle_of(small("bf16")), keep=[])(rows)["output"]
    assert outputs.dtype == np.float32 and outputs.shape == (1, 3, 4, 16)


# --- invalid rows -----------------------------------------------------------------------------------------------------


def test_wrong_rows_are_refused_in_one_line(digits: Handle) -> None:
    predictor = Predictor(digits)
    for rows, words in (
        ({"tile": images(2)}, "column 'image', from which input 'image' is read, is missing; the rows have tile"),
        ({"image": images(2)[:, 0]}, r"input 'image' has 3 dims \(2, 8, 8\); the model takes"),
        ({"image": images(2).astype(np.float64)}, "input 'image' is float64; the model takes .*: convert it first"),
        ({"image": np.array(["a", "b"], object)}, "input 'image' is str"),
    ):
        with pytest.raises(InputError, match=words) as refused:
            predictor(rows)
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match=r"output column 'output' would replace an input column; rename it"):
        predictor({"image": images(2), "output": np.zeros(2)})
    with pytest.raises(InputError, match="column 'id', which is to be kept, is missing; the rows have image"):
        Predictor(digits, keep=["id"])({"image": images(2)})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"columns": {"picture": "image"}}, "unknown input 'picture'; known: image"),
        ({"outputs": {"scores": "output"}}, "unknown output 'scores'; known: output"),
        ({"samples": 0}, "0 samples per call were asked for; the bundle takes 1 to 32"),
        ({"samples": 33}, "33 samples per call were asked for; the bundle takes 1 to 32"),
    ],
)
def test_wrong_options_are_refused_when_the_actor_starts(digits: Handle, options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Predictor(digits, **options)
