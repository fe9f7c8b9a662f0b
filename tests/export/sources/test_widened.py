"""A module in float64: every operand is widened, nothing is copied, and scores are computed in blocks of queries."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.export.sources import widened
from attnforge.export.sources.widened import Float64
from attnforge.runtime.backends.eager import doubled, run

RANDOM = torch.Generator().manual_seed(0)


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=RANDOM)


class Mixed(nn.Module):
    """Uses of types in code: casts, a cache that is written in place, a quotient of integers, a type check."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(8, 8, 3), nn.LayerNorm(6)
        self.lstm = nn.LSTM(6, 6, batch_first=True)
        self.cache: Tensor
        self.register_buffer("cache", torch.zeros(2, 8, 6))

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != self.conv.weight.dtype:
            raise TypeError("x has another type than the weights")
        y = self.norm(self.conv(x).float()).to(self.conv.weight.dtype)
        self.cache[:1] = y[:1]
        y = self.lstm(y + self.cache)[0]
        result: Tensor = y * (torch.arange(6) / 7).softmax(0, torch.float32)
        return result


def test_everything_is_computed_in_float64() -> None:
    module, inputs = Mixed().eval(), {"x": random(2, 8, 8).numpy()}
    exact, eager = Float64(module)(inputs)["output"], run(module, inputs, torch.float32)["output"]
    module.cache.zero_()
    with torch.no_grad():
        x = torch.from_numpy(inputs["x"]).double()
        wide = doubled(module)
        assert isinstance(wide, Mixed)
        y = F.layer_norm(wide.conv(x), (6,), wide.norm.weight, wide.norm.bias)
        truth = wide.lstm(y + torch.cat([y[:1], torch.zeros_like(y[1:])]))[0]
        truth = truth * (torch.arange(6, dtype=torch.float64) / 7).softmax(0)
    assert exact.dtype == torch.float64
    assert (exact - truth).norm() < 1e-15 * truth.norm() < 1e-7 * (eager - truth).norm()


def test_the_module_stays_as_it_is() -> None:
    module = Mixed().eval()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    Float64(module)({"x": random(2, 8, 8).numpy()})
    assert torch.get_default_dtype() == torch.float32
    for name, tensor in module.state_dict().items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, before[name]), name


class Squared(nn.Module):
    """Computes a large intermediate number, and a standard deviation."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 1e30).mT / 1e30 / x.std()


def test_the_largest_intermediate_numbers_are_recorded() -> None:
    """Views are not recorded; a standard deviation counts with the squares that it sums."""
    x = torch.tensor([[3.0, -4.0]])
    peaks: list[float] = [7.0]
    exact = Float64(Squared())({"x": x.numpy()}, peaks)["output"]
    assert peaks == pytest.approx([4e30, 4.0, 25.0, float(exact.abs().max())])


class Written(nn.Module):
    """Attention, and results that are written to new memory."""

    def forward(self, x: Tensor) -> Tensor:
        written = [*(make(x) for make in (torch.empty_like, lambda x: x.new_empty(x.shape))), torch.empty(x.shape)]
        return F.scaled_dot_product_attention(x, x, x) + sum(new.copy_(x) for new in written)


def test_memory_that_nothing_wrote_is_not_recorded() -> None:
    """torch fills new memory with NaN here; otherwise it holds any number."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        peaks: list[float] = []
        exact = Float64(Written().eval())({"x": random(1, 2, 5, 8).numpy()}, peaks)["output"]
    finally:
        torch.use_deterministic_algorithms(before)
    assert peaks and all(map(math.isfinite, peaks)) and exact.isfinite().all()


def test_a_script_has_its_weights_doubled() -> None:
    module = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval())
    inputs = {"x": random(3, 4).numpy()}
    exact = Float64(module)
    expected = run(doubled(module), inputs, torch.float64)["output"]
    assert torch.equal(exact(inputs)["output"], expected) and torch.equal(exact(inputs)["output"], expected)


class MaskedAttention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.arange(k.shape[2], dtype=torch.float32))


def test_a_mask_in_float32_is_read_as_such_in_a_script() -> None:
    """torch's fused kernel takes a float32 mask with float64 queries, and reads it as float64."""
    q, k, v = (random(2, 3, n, 8).numpy() for n in (5, 7, 7))
    scripted = torch.jit.script(MaskedAttention().eval())
    exact = Float64(scripted)({"q": q, "k": k, "v": v})["output"]
    weights = (torch.from_numpy(q).double() @ torch.from_numpy(k).double().mT / 8**0.5 + torch.arange(7)).softmax(-1)
    assert torch.allclose(exact, weights @ torch.from_numpy(v).double(), rtol=1e-12, atol=1e-12)


class AsRows(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).view(*q.shape[::2], -1)


def test_attention_lies_in_memory_as_in_the_fused_kernels_output() -> None:
    """So that a program of torch.export, which takes views of it, is widened and not converted to double."""
    q, k, v = (random(2, 3, n, 8) for n in (5, 7, 7))
    exact = Float64(AsRows().eval())
    answer = exact({"q": q.numpy(), "k": k.numpy(), "v": v.numpy()})["output"]
    assert exact._parameters is not None and answer.shape == (2, 5, 24)


class Attention(nn.Module):
    def __init__(self, is_causal: bool, mask: Tensor | None) -> None:
        super().__init__()
        self.is_causal, self.mask = is_causal, mask

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, is_causal=self.is_causal, scale=0.3, enable_gqa=True)


@pytest.mark.parametrize("heads", [4, 2])
@pytest.mark.parametrize(
    ("queries", "keys", "is_causal", "mask"),
    [
        (17, 17, True, None),
        (9, 21, True, None),
        (21, 9, True, None),
        (17, 13, False, None),
        (17, 13, False, torch.arange(13) < torch.arange(17)[:, None]),
        (17, 13, False, random(17, 13)),
        (17, 13, False, torch.arange(13)[None] < 9),
    ],
)
def test_attention_is_computed_a_block_of_queries_at_a_time(
    monkeypatch: pytest.MonkeyPatch, heads: int, queries: int, keys: int, is_causal: bool, mask: Tensor | None
) -> None:
    monkeypatch.setattr(widened, "SCORES", 5 * 2 * 4 * keys)  # five queries
    q, k, v = random(2, 4, queries, 8), random(2, heads, keys, 8), random(2, heads, keys, 8)
    module = Attention(is_causal, mask)
    exact = Float64(module)({"q": q.numpy(), "k": k.numpy(), "v": v.numpy()})["output"]
    k, v = (t.double().repeat_interleave(4 // heads, 1) for t in (k, v))
    scores = 0.3 * q.double() @ k.mT
    if is_causal:
        mask = torch.ones(queries, keys).tril().bool()
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    truth = scores.softmax(-1).nan_to_num() @ v
    assert (exact - truth).norm() < 1e-15 * truth.norm()


class OfInputs(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_the_scores_of_fused_attention_are_within_its_peak() -> None:
    query, key = (np.random.default_rng(seed).standard_normal((2, 4, 9, 8)) * 1e10 for seed in (0, 1))
    peaks: list[float] = []
    Float64(OfInputs())({"query": query, "key": key, "value": key}, peaks)
    scores = np.abs(query @ key.swapaxes(-1, -2)).max()
    assert scores <= max(peaks) <= 10 * scores
