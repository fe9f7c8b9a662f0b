"""`scaled_dot_product_attention` on any number of dims and with dims that broadcast, views, numbers that are
replaced by index, and `grouped_mm`."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F
from transformers.integrations import moe

from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.graphs.execute import in_float64
from attnforge.export.graphs.nodes import optional_input
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.sources.torch_module import capture
from attnforge.precision import PRECISIONS
from tests.support.idioms.together import session_of

Shape = tuple[int, ...]

QUERIES, KEYS = 5, 7


class Attend(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(query, key, value, mask, **self.options)


FORMS: dict[str, tuple[Shape, Shape, Shape, Shape | None]] = {
    "no batch": ((), (), (), None),
    "no heads": ((3,), (3,), (3,), None),
    "no heads, a mask by sample": ((3,), (3,), (3,), (3, QUERIES, KEYS)),
    "no heads, one mask": ((3,), (3,), (3,), (QUERIES, KEYS)),
    "one key head": ((2, 4), (2, 1), (2, 1), None),
    "one key head, as many value heads as query heads": ((2, 4), (2, 1), (2, 4), None),
    "keys of one sample": ((2, 4), (1, 4), (4,), (4, 1, KEYS)),
    "queries of one sample": ((1, 4), (3, 4), (3, 4), None),
    "two batch dims": ((3, 2, 4), (3, 2, 4), (3, 2, 4), None),
    "two batch dims, a mask along one": ((3, 2, 4), (3, 2, 4), (3, 2, 4), (3, 1, 1, QUERIES, KEYS)),
    "two batch dims, a mask along the other": ((3, 2, 4), (3, 2, 4), (3, 2, 4), (2, 1, QUERIES, KEYS)),
    "two batch dims, shared keys": ((3, 2, 4), (1, 2, 4), (3, 1, 1), None),
}


def check(module: Attend, args: list[Tensor], is_static: bool) -> str | None:
    """Export a module with dynamic tokens, compare it with eager, and return the canonical form."""
    queries, keys = Dim("queries", min=2, max=64), Dim("keys", min=2, max=64)
    along: list[dict[int, Any]] = [{args[0].dim() - 2: queries}] + [{x.dim() - 2: keys} for x in args[1:3]]
    for mask in args[3:]:
        by_key = {mask.dim() - 1: keys}
        along.append(by_key if mask.shape[-2] == 1 else {mask.dim() - 2: queries, **by_key})
    names = ("query", "key", "value", "mask")
    shapes = None if is_static else dict(zip(names, along, strict=False))
    captured = capture(module, args, shapes, PRECISIONS["fp32"])
    (site,) = canonicalize(captured.model).sites
    for_onnxruntime.lower(captured.model, [site], {"queries": QUERIES, "keys": KEYS})
    (result,) = session_of(captured.model).run(None, dict(zip(names, map(Tensor.numpy, args), strict=False)))
    np.testing.assert_allclose(result, module(*args).numpy(), rtol=1e-5, atol=1e-6)
    return site.form


@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_it_becomes_canonical_and_is_right(form: str, is_static: bool) -> None:
    query, key, value, mask = FORMS[form]
    args = [torch.randn(*shape, count, 16) for shape, count in ((query, QUERIES), (key, KEYS), (value, KEYS))]
    args += [] if mask is None else [torch.randn(mask) > -1]
    assert check(Attend(), args, is_static) is not None


@pytest.mark.parametrize("leading", [(2,), (3, 2)])
def test_grouped_key_heads(leading: Shape) -> None:
    query, key, value = (torch.randn(*leading, heads, QUERIES if heads == 4 else KEYS, 16) for heads in (4, 2, 2))
    form = check(Attend(enable_gqa=True), [query, key, value], False)
    assert form is not None and "key heads 2" in form


def put(x: Tensor, where: list[Tensor | None], values: float | Tensor) -> Tensor:
    """`x` with `x[where] = values`, where None is all of a dim."""
    result: Tensor = torch.ops.aten.index_put(x, where, torch.as_tensor(values))
    return result


def upper(x: Tensor) -> Tensor:
    """A mask of tokens and rows."""
    return torch.arange(x.shape[1])[:, None] < torch.arange(x.shape[2])


def ends(x: Tensor) -> Tensor:
    """The numbers of a tensor, and a zero in case that there are none."""
    return F.pad(x.flatten(), (0, 1))


ROW = torch.arange(32.0)
EDGES = torch.arange(-8.0, 8, 2)


def distances(x: Tensor, p: float) -> Tensor:
    return torch.cdist(x, x.flip(2), p)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads apart": lambda x: torch.unflatten(x, -1, (4, 8)),
    "the rest": lambda x: torch.unflatten(x, -1, (4, -1)),
    "in the middle": lambda x: torch.unflatten(x, 2, (-1, 3)),
    "a size of the input": lambda x: torch.unflatten(torch.unflatten(x, 2, (2, 3)), 0, (1, x.shape[0])),
    "samples": lambda x: torch.unflatten(x, 0, (1, -1)),
    "tokens": lambda x: torch.unflatten(x, 1, (-1, 1)),
    "reshaped by the batch": lambda x: x.reshape(x.shape[1], x.shape[0] * 192),
    "reshaped to a new dim": lambda x: x.reshape(2, x.shape[0], x.shape[1], 96),
    "reshaped to the rest": lambda x: x.transpose(1, 2).reshape(6, -1),
    "narrowed from the end": lambda x: x.narrow(3, -2, 2),
    "in fewer chunks than asked for": lambda x: x.chunk(4, 2)[1],
    "broadcast": lambda x: x.unsqueeze(0).broadcast_to(3, -1, -1, 6, 32),
    "adjoint": lambda x: x.mH,
    "mapped": lambda x: torch.vmap(lambda r: (r @ r.transpose(0, 1)).softmax(-1) @ r)(x.flatten(0, 1)),
    "as another": lambda x: x.flatten(2).view_as(x) + x[:, :, :1].expand_as(x),
    "all": lambda x: x.flatten(),
    "samples and tokens": lambda x: x.flatten(0, 1),
    "tokens and columns": lambda x: x.flatten(1, 2),
    "static ones": lambda x: x.flatten(-2),
    "one": lambda x: x.flatten(1, 1),
    "tokens, as the first": lambda x: x.transpose(0, 1).flatten(1, 2),
    "a number": lambda x: x.sum().flatten(),
    "squeezed": lambda x: x[..., :1].squeeze(-1).squeeze(2) + x[..., 0].sum(2, keepdim=True).squeeze(-1)[..., None],
    "a part replaced": lambda x: x.slice_scatter(x[..., :3] + 1, 3, 4, 7),
    "a part replaced, counted from the end": lambda x: x.slice_scatter(x[:, :, :2] + 1, 2, -2),
    "the first part replaced": lambda x: x.slice_scatter(x[..., :30] + 1, -1, None, -2),
    "all replaced": lambda x: x.slice_scatter(x + 1, 2, -9, 9),
    "nothing replaced": lambda x: x.slice_scatter(x[:, :, :0], 2, 3, 3),
    "nothing replaced, between crossed ends": lambda x: x.slice_scatter(x[:, :, :0], 2, 5, 3),
    **{f"distances of norm {p}": partial(distances, p=p) for p in (0.0, 1.0, 2.0, 3.0, math.inf)},
    "ranks among edges": lambda x: torch.searchsorted(EDGES, x),
    "ranks after equal edges": lambda x: torch.searchsorted(EDGES, x, side="right", out_int32=True),
    "ranks in a row of its own": lambda x: torch.searchsorted(x, x.flip(2), right=True, sorter=x.argsort(-1)),
    "every third replaced": lambda x: x.slice_scatter(x[..., ::3] + 1, 3, 0, 32, 3),
    "samples replaced": lambda x: x.slice_scatter(x[:1] + 1, 0, 0, 1) if x.shape[0] else x,
    "half of the tokens, rounding up": lambda x: x[:, : -(-x.shape[1] // 2)],
    "half of all tokens but four, rounding down": lambda x: x[:, : (x.shape[1] - 4) // 2 + 2],
    "logarithms of sigmoids": lambda x: F.logsigmoid(x * 20),
    "exponentials less 1, of small and of large numbers": lambda x: (x / 1e6).expm1() * 1e6 + (x * 200).expm1(),
    "logarithms of sums of two": lambda x: torch.logaddexp(x * 20, -x) + torch.logaddexp2(x * 20, -x),
    "divided, rounding down": lambda x: x // 3 + x.long() // 3 + x.long() // -2,
    "divided by a rule, of large integers": lambda x: torch.stack(
        [torch.div(x.long() * 2**40 + 1, by, rounding_mode=rule) % 97 for by in (3, -7) for rule in ("floor", "trunc")]
    ).float(),
    "a number where tokens are even": lambda x: put(x, [None, torch.arange(x.shape[1]) % 2 == 0], 0.5),
    "a number at some tokens and rows": lambda x: put(x, [None, upper(x)], torch.tensor([0.5])),
    "a number where it is negative": lambda x: put(x, [x < 0], 0.5),
    "a row at some tokens and rows": lambda x: put(x, [None, upper(x)], ROW),
    "a row where the first number is negative": lambda x: put(x, [x[..., 0] < 0], ROW),
    "added to nothing": lambda x: torch.addmm(ROW / 0, x[:, :, 0].flatten(0, 1), torch.eye(32), beta=0, alpha=2),
    "the largest and the least of all": lambda x: x + ends(x).amax() - ends(x).amin(),
    "the largest of rows and columns": lambda x: x + x.amax((-2, -1), keepdim=True) - x.amin((2, 3), keepdim=True),
    "sorted, equal ones in order": lambda x: x.argsort(dim=2, stable=True) - x.sort(stable=True, descending=True)[1],
    "counted": lambda x: torch.histc(x.long().float(), bins=5, min=0, max=4),
    "counted between other ends": lambda x: torch.histc(x.long().float(), bins=5, min=-2, max=6),
    "counted by halves": lambda x: torch.histc(x * 0.5, bins=5, min=0, max=4),
}


class View(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return self.view(x) * 2


@pytest.mark.parametrize("name", VIEWS)
def test_views_at_any_sizes(name: str) -> None:
    shapes = {"x": {0: Dim("batch", max=4), 1: Dim("tokens", max=64)}}
    captured = capture(View(VIEWS[name]).eval(), (torch.randn(2, 5, 6, 32),), shapes, PRECISIONS["fp32"])
    session = session_of(captured.model)
    for sizes in ((2, 5), (3, 7), (1, 1), (0, 5), (3, 0), (0, 0)):
        x = torch.randint(-8, 8, (*sizes, 6, 32)).float()  # sums are exact
        (got,) = session.run(None, {"x": x.numpy()})
        torch.testing.assert_close(torch.from_numpy(got), VIEWS[name](x) * 2, rtol=1e-5, atol=1e-5)


class Grouped(nn.Module):
    """Rows that go to one of four matrices, sorted by it; no row goes to the third."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, x: Tensor) -> Tensor:
        ends = (x.shape[0] * torch.tensor([1, 2, 2, 4]) // 4).int()
        return moe._grouped_mm(x, self.matrices, ends)  # torch's in bf16 and in eager mode, else transformers' operator


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_groups_have_matrices_of_their_own(precision: str) -> None:
    rows = {"x": {0: Dim("rows", max=64)}}
    captured = capture(Grouped().eval(), (torch.randn(8, 16),), rows, PRECISIONS[precision])
    graph = in_float64(captured.model)
    for count in (8, 11, 1):
        x = np.random.default_rng(0).standard_normal((count, 16))
        matrices = captured.module.get_parameter("matrices").double().numpy()[[0, 1, 3]]
        groups = np.split(x, [count // 4, count // 2])
        expected = np.concatenate([group @ matrix for group, matrix in zip(groups, matrices, strict=True)])
        for results in (captured.exact({"x": x}), graph({"x": x})):
            (got,) = results.values()
            np.testing.assert_allclose(got, expected, rtol=0, atol=1e-13)


class Nothing(nn.Module):
    """Scores that are added to memory that nothing wrote, times 0, as diffusers computes them without a mask."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        nothing = torch.empty(query.shape[0], query.shape[1], key.shape[1])
        return torch.baddbmm(nothing, query, key.mT, beta=0, alpha=0.25).softmax(-1) @ value


def test_scores_that_are_added_to_nothing_have_no_mask() -> None:
    tokens = {name: {1: Dim("tokens", min=2, max=64)} for name in ("query", "key", "value")}
    captured = capture(Nothing(), torch.randn(3, 2, 5, 16).unbind(0), tokens, PRECISIONS["fp32"])
    (site,) = canonicalize(captured.model).sites
    assert site.form is not None and "mask" not in site.form
    (node,) = (node for node in captured.model.graph if node.op_type == "Attention")
    assert optional_input(node, 3) is None
