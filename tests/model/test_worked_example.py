"""S4, the worked example, value by value."""

from __future__ import annotations

import pytest
import torch

from attnforge.model import worked_example
from attnforge.model.worked_example import WorkedExample
from tests.support.tensors import agree

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_s4_tables(dtype: torch.dtype) -> None:
    module = WorkedExample().to(dtype)
    x = torch.tensor(worked_example.INPUT, dtype=dtype)
    query, key, value = x @ module.query_weight, x @ module.key_weight, x @ module.value_weight
    scores = query @ key.T  # small integers, so exact in every dtype
    for given, table in (
        (key, [[0, 1, 1], [4, 4, 0], [2, 3, 1]]),
        (query, [[1, 0, 2], [2, 2, 2], [2, 1, 3]]),
        (value, [[1, 2, 3], [2, 8, 0], [2, 6, 3]]),
        (scores, [[2, 4, 4], [4, 16, 12], [4, 12, 10]]),
    ):
        assert given.tolist() == table
    outputs = [[1.936621, 6.683105, 1.595068], [1.999994, 7.963992, 0.053976], [1.999705, 7.759892, 0.358389]]
    accuracy = {torch.float64: 1e-6, torch.float32: 2e-6, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype]
    agree(module(x).double(), torch.tensor(outputs, dtype=torch.float64), atol=accuracy)


def test_s4_weights_and_rounded_outputs() -> None:
    module = WorkedExample().double()
    x = torch.tensor(worked_example.INPUT, dtype=torch.float64)
    weights = ((x @ module.query_weight) @ (x @ module.key_weight).T).softmax(-1)
    expected = [
        [6.3379e-02, 4.6831e-01, 4.6831e-01],
        [6.0337e-06, 9.8201e-01, 1.7986e-02],
        [2.9539e-04, 8.8054e-01, 1.1917e-01],
    ]
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=0)
    # The example rounds so that each row sums to 1: its first weight, 0.063, becomes 0.0, not 0.1.
    table = torch.tensor([[0.0, 0.5, 0.5], [0.0, 1.0, 0.0], [0.0, 0.9, 0.1]], dtype=torch.float64)
    agree(table.sum(-1), torch.ones(3, dtype=torch.float64))
    agree(table, weights, atol=0.07)
    rounded = table @ (x @ module.value_weight)
    agree(rounded, torch.tensor([[2.0, 7.0, 1.5], [2.0, 8.0, 0.0], [2.0, 7.8, 0.3]], dtype=torch.float64))
