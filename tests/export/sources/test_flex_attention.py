"""Torch's `flex_attention` is deployed as attention whose masks are understood."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.attention import flex_attention as flex

import attnforge
from attnforge.errors import CaptureError, UsageError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.sources.exported_program import open_program
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named

HEADS, WIDTH = 4, 32
DIMS = {0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=48)}
FP32 = precision_named("fp32")

REPLACED = ("flex_attention_hop", "create_mask", "_transpose_ordered", "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG")

compiled = torch.compile(flex.flex_attention)


class Flexible(nn.Module):
    """Attention with a window; with a bias by distance and half as many key heads; within documents, of which the first
    query sees no key; with a soft cap, compiled; and with a gate by its sums of exponentials."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 7 * WIDTH)
        self.slopes = nn.Parameter(0.5 ** torch.arange(1.0, 1 + HEADS))

    def forward(self, x: Tensor, document: Tensor) -> tuple[Tensor, ...]:
        batch, tokens, _ = x.shape
        key, value, *queries = self.project(x).view(batch, tokens, 7, HEADS, -1).permute(2, 0, 3, 1, 4)

        def window(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (q >= k) & (q - k < 8)

        def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return score - self.slopes[h] * (q - k).abs()

        def same(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return (document[b, q] == document[b, k]) & (q > 0)

        def capped(score: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
            return torch.where(q >= k, 20 * torch.tanh(score / 20), -torch.inf)

        masks = [
            flex.create_block_mask(mask, rows, None, tokens, tokens, device="cpu")
            for mask, rows in ((window, None), (same, batch))
        ]
        half = key[:, : HEADS // 2], value[:, : HEADS // 2]
        gated, sums = flex.flex_attention(queries[4], key, value, return_lse=True)
        return (
            flex.flex_attention(queries[0], key, value, block_mask=masks[0]),
            flex.flex_attention(queries[1], *half, score_mod=biased, enable_gqa=True),
            flex.flex_attention(queries[2], key, value, block_mask=masks[1], scale=0.5),
            compiled(queries[3], key, value, score_mod=capped),
            gated * sums.sigmoid()[..., None],
        )


@pytest.fixture
def inputs() -> Iterator[Callable[[int, int], tuple[Tensor, Tensor]]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield lambda batch, tokens: (torch.randn(batch, tokens, WIDTH), torch.randint(0, 3, (batch, tokens)))
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated")
def test_deployed_as_torch_computes_it(tmp_path: Path, inputs: Callable[[int, int], tuple[Tensor, Tensor]]) -> None:
    torch.manual_seed(0)
    module, before = Flexible().eval(), {name: vars(flex)[name] for name in REPLACED}
    bundle = attnforge.deploy(
        module, inputs(2, 16), out=tmp_path / "bundle", dynamic_shapes=(DIMS, DIMS), targets=["onnxruntime"], tune=False
    )
    assert {name: vars(flex)[name] for name in REPLACED} == before
    gated, *sites = bundle.manifest.attention.details
    assert [site.reason for site in sites] == [None] * 4 and "are used 2 times" in (gated.reason or "")
    assert sites[0].mask is not None and sites[0].mask.text == "band −7 … 0"
    with torch.no_grad(), attnforge.load(bundle.path, "onnxruntime-cpu") as session:
        for batch, tokens in ((1, 2), (3, 41)):
            given = inputs(batch, tokens)
            for got, expected in zip(session(*given), module(*given), strict=True):
                torch.testing.assert_close(torch.as_tensor(got), expected, rtol=1e-5, atol=1e-5)


class Attending(nn.Module):
    """Attention of one head over `(batch, tokens, width)`, and a function of it."""

    def __init__(self, function: Callable[[Tensor], Tensor] = lambda attended: attended, **options: Any) -> None:
        super().__init__()
        self.function, self.options = function, options

    def forward(self, x: Tensor) -> Tensor:
        return self.function(flex.flex_attention(x[:, None], x[:, None], x[:, None], **self.options))


def test_a_mask_that_the_module_itself_computes_is_whole() -> None:
    def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return q >= k

    module = Attending(lambda attended: attended * flex.create_mask(causal, 1, 1, 9, 9, device="cpu").sum())
    captured = capture(module, (torch.randn(2, 9, 8),), None, FP32)
    assert [site.reason for site in canonicalize(captured.model).sites] == [None]
    constants = (value.const_value for value in captured.model.graph.initializers.values())
    assert 45 in [tensor.numpy().item() for tensor in constants if tensor is not None and tensor.size == 1]


def test_an_exported_program_is_refused() -> None:
    with torch.no_grad():
        program = torch.export.export(Attending(), (torch.randn(2, 9, 8),))
    with pytest.raises(UsageError, match="has flex_attention, which has no ONNX function; deploy its module"):
        open_program(program)


def test_indices_one_after_the_other_are_refused() -> None:
    table = torch.randn(9, 9)
    module = Attending(score_mod=lambda score, b, h, q, k: score + table[q][k])
    with pytest.raises(CaptureError, match=r"all their indices at once, as in bias\[head, query - key\]") as error:
        capture(module, (torch.randn(2, 9, 8),), None, FP32)
    assert "\n" not in str(error.value)
