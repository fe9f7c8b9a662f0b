"""Programs of torch.export that torch need not decompose, which takes half of an export."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.onnx._internal.exporter import _fx_passes

from attnforge.errors import CaptureError
from attnforge.export.graphs.execute import as_it_is
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named

SHAPES = {"x": {0: Dim("batch", max=4), 1: Dim("tokens", min=2, max=64)}}


class Renamed(nn.Module):
    """Operators that are others under another name, and one whose result is not used."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        unused = x.softmax(-1)
        seen = (x > 0) & (x < 1) | (x < -1)
        offset = torch.tensor([0.5, -0.5]).mean()  # a constant that torch detaches
        low, high = torch.min(x, x.roll(1, -1)), torch.max(x, offset)
        return seen.mT.to(torch.int64), low.mT, high.to(torch.float64).to("cpu"), unused[:0].to(x)


class Decomposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.rsub(x, 1)


def refuse(*_: Any) -> Any:
    raise AssertionError("torch decomposes the program")


def test_what_has_functions_is_not_decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", refuse)
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    captured = capture(Renamed().eval(), (x,), SHAPES, precision_named("fp32"))
    other = torch.randn(3, 7, 8, generator=torch.Generator().manual_seed(1))
    got = as_it_is(captured.model)({"x": other.numpy()}).values()
    for array, expected in zip(got, Renamed()(other), strict=True):
        torch.testing.assert_close(torch.from_numpy(array), expected, rtol=0, atol=0)


def test_what_has_no_function_is_decomposed_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_fx_passes, "decompose_with_registry", refuse)
    with pytest.raises(CaptureError, match="torch decomposes the program"):
        capture(Decomposed().eval(), (torch.randn(2, 5, 8),), SHAPES, precision_named("fp32"))
