"""Attention without a softmax is a site, and `require_fused` counts it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.errors import UnfusedError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.sources.torch_module import capture
from attnforge.export.targets.registry import why_not_buildable
from attnforge.precision import precision_named

WIDTH, HEADS = 32, 4


class ByHand(nn.Module):
    """Attention, and the mean of its tokens weighted by exponentials that are divided by a little more than their
    sum."""

    def __init__(self, sum_of: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attend, self.score = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), nn.Linear(WIDTH, 1)
        self.sum_of = sum_of

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attend(x, x, x, need_weights=False)
        weights = torch.exp(torch.tanh(self.score(x))) * (x[..., :1] > -1)
        return (weights / self.sum_of(weights) * x).sum(1)


@pytest.mark.parametrize(
    "sum_of",
    [
        lambda weights: weights.sum(1, keepdim=True) + 1e-7,
        lambda weights: weights.sum(1).unsqueeze(1),
        lambda weights: weights.sum(1, keepdim=True).clamp(min=1e-9),
    ],
)
def test_softmaxes_written_by_hand(sum_of: Callable[[Tensor], Tensor]) -> None:
    shapes = {"x": {0: Dim("batch", max=4), 1: Dim("tokens", max=64)}}
    captured = capture(ByHand(sum_of).eval(), (torch.randn(2, 9, WIDTH),), shapes, precision_named("fp32"))
    fused, by_hand = canonicalize(captured.model).sites
    assert fused.reason is None
    assert by_hand.reason is not None and by_hand.reason.startswith("Exp computes the weights")


class BySigmoid(nn.Module):
    """Attention, attention whose weights are sigmoids of the scores, and a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.classes = nn.Sequential(nn.Linear(WIDTH, 5), nn.Softmax(-1))

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.attend(x, x, x, need_weights=False)
        query, key, value = (project(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for project in self.project)
        x = ((query @ key.mT).sigmoid() @ value).transpose(1, 2).flatten(2)
        result: Tensor = self.classes(x.mean(1))
        return result


@pytest.mark.parametrize(("target", "precision"), [("tensorrt_rtx", "fp16"), ("onnxruntime", "fp32")])
def test_require_fused_counts_attention_without_a_softmax(target: str, precision: str, tmp_path: Path) -> None:
    if (why := why_not_buildable(target)) is not None:
        pytest.skip(why)
    shapes = {"x": {0: Dim("batch", max=4), 1: Dim("tokens", max=64)}}
    with pytest.raises(UnfusedError, match="leaves 1 of 2 unfused") as caught:
        attnforge.deploy(
            BySigmoid().eval(), (torch.randn(2, 9, WIDTH),), tmp_path / "b", shapes, precision, [target], tune=False,
            require_fused=[target],
        )  # fmt: skip
    certificate = caught.value.certificate
    (unfused,) = certificate.unfused
    assert [*certificate.other_softmaxes] == ["classes.1"]
    assert unfused.site == "BySigmoid" and unfused.reason.startswith("Sigmoid computes the weights")
    assert not (tmp_path / "b").exists()
