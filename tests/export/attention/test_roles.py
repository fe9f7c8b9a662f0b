"""Roles of inputs: indices into tables, sizes, and numbers that are added to scores."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.bundle import TensorSpec
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.attention.roles import note_roles
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named

Function = Callable[[Tensor, Tensor, Tensor], Tensor]

IDS = torch.tensor([[1, 2, 3], [3, 0, 2]])


class Of(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function, self.table, self.short = function, nn.Parameter(torch.randn(10, 4)), nn.Parameter(torch.ones(7))

    def forward(self, given: Tensor) -> Tensor:
        return self.function(given, self.table, self.short)


def specs_of(function: Function, example: Tensor, negative: bool = False) -> TensorSpec:
    captured = capture(Of(function), (example,), None, precision_named("fp32"))
    canonicalize(captured.model)
    note_roles(captured.model.graph, captured.inputs, negative)
    return captured.inputs[0]


INDICES: dict[str, tuple[Function, tuple[int, int] | None]] = {
    "embedding": (lambda ids, table, _: F.embedding(ids, table), (0, 9)),
    "an embedding of a view": (lambda ids, table, _: F.embedding(ids.T.reshape(-1)[:, None], table), (0, 9)),
    "index_select": (lambda ids, table, _: table.index_select(0, ids.reshape(-1)), (0, 9)),
    "gather": (lambda ids, table, _: table.gather(0, ids), (0, 9)),
    "brackets": (lambda ids, table, _: table[ids], (-10, 9)),
    "brackets of a later dim": (lambda ids, table, _: table[:, ids], (-4, 3)),
    "two tables": (lambda ids, table, short: F.embedding(ids, table)[..., 0] + short[ids], (0, 6)),
    "and a comparison": (lambda ids, table, _: F.embedding(ids, table) * (ids != 0)[..., None], (0, 9)),
    "a part": (lambda ids, table, _: F.embedding(ids[:, 1:], table), None),
    "clamped": (lambda ids, table, _: F.embedding(ids.clamp(0, 9), table), None),
    "an earlier row": (lambda ids, table, _: F.embedding(ids - 1 + 2, table), None),
    "cast to 8 bits": (lambda ids, table, _: F.embedding(ids.to(torch.uint8).long(), table), None),
    "no table": (lambda ids, table, _: table[:2, :3] * ids, None),
}


@pytest.mark.parametrize("how", INDICES)
def test_an_index_is_bounded_as_eager_bounds_it(how: str) -> None:
    function, wanted = INDICES[how]
    module, spec = Of(function), specs_of(function, IDS)
    assert spec.index == wanted and spec.role != "shape"
    for number in (-11, -10, -5, -4, -1, 0, 3, 4, 6, 7, 9, 10) if wanted is not None else ():
        try:
            module(IDS.clone().fill_(number))
            takes = True
        except (IndexError, RuntimeError):
            takes = False
        assert takes == (wanted is not None and wanted[0] <= number <= wanted[1]), number


def test_an_index_of_32_bits_is_one() -> None:
    assert specs_of(INDICES["embedding"][0], IDS.int()).index == (0, 9)


def test_gather_of_onnx_counts_from_the_end() -> None:
    assert specs_of(INDICES["embedding"][0], IDS, negative=True).index == (-10, 9)


def test_a_size_is_one() -> None:
    spec = specs_of(lambda n, table, _: table * torch.arange(int(n[0])).sum(), torch.tensor([5, 3]))
    assert spec.role == "shape" and spec.index is None


@pytest.mark.parametrize(
    ("function", "role"),
    [
        (lambda n, table, _: table[:2, :3] * (n + 1)[:, None], "number"),
        (lambda n, table, _: table[:2, :3] * (n.reshape(2, 1) % 5), "number"),
        (lambda n, table, _: table[:2, :3] * (1 - n.float())[:, None], None),
        (lambda n, table, _: table[:2, :3].masked_fill((n == 0)[:, None], 0), None),
    ],
)
def test_an_input_of_arithmetic_is_not_a_mask(function: Function, role: str | None) -> None:
    assert specs_of(function, torch.tensor([0, 1])).role == role


def scored(bias: Tensor, table: Tensor, _: Tensor) -> Tensor:
    scores = table @ table.T / 2
    return (scores + bias[None].float()).softmax(-1) @ table


@pytest.mark.parametrize(
    ("function", "role"),
    [(scored, "scores"), (lambda x, table, _: (x @ table).softmax(-1), None), (lambda x, table, _: x + 1, None)],
)
def test_what_is_added_to_scores(function: Function, role: str | None) -> None:
    assert specs_of(function, torch.zeros(10, 10)).role == role
