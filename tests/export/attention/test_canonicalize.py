"""Canonicalize special modules: site names, fully masked rows, two products, and graphs that only resemble an idiom."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

from attnforge.arrays import Array
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.graphs.attention import SILENT_ROWS
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.precision import precision_named
from attnforge.runtime.backends.eager import doubled, run
from tests.support.idioms.accounts import ConViT, Differential, TotalOverQueries
from tests.support.idioms.catalogue import DIMS, EXAMPLE, HEAD_DIM, HEADS, WIDTH, Layers, OnHeads, inputs, over_layers
from tests.support.idioms.on_heads import heads_merged_after
from tests.support.idioms.together import near, relative_error, session_of

X = inputs(EXAMPLE["dynamic"])["x"] / 2


class Masked(nn.Module):
    """PyTorch's own attention, which gives zeros for fully masked rows."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)


@pytest.mark.parametrize("kind", ["boolean", "float"])
def test_torchs_attention_is_zero_for_fully_masked_rows(kind: str) -> None:
    query, key, value = torch.randn(3, 2, 4, 5, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[2] = False
    given = mask if kind == "boolean" else torch.zeros(5, 5).masked_fill(~mask, -math.inf)
    captured = capture(Masked(), (query, key, value, given), None, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    assert [site.node for site in sites] == ["Masked/Attention"]
    expected = Masked()(query, key, value, given).numpy()
    assert not expected[:, :, 2].any()
    by_onnxruntime, by_tensorrt = captured.model.clone(), captured.model.clone()
    for_onnxruntime.lower(by_onnxruntime, sites, {})
    for_tensorrt.lower(by_tensorrt, sites)
    for model in (by_onnxruntime, by_tensorrt):
        feeds = dict(zip(("query", "key", "value", "mask"), (query, key, value, given), strict=True))
        (output,) = session_of(model).run(None, {name: tensor.numpy() for name, tensor in feeds.items()})
        assert not output[:, :, 2].any()
        near([output], [expected])


class OneHead(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value)


def test_torchs_attention_over_dynamic_features_is_right_or_left() -> None:
    """The scale is `1/√d`, where d is known only at run time."""
    shapes = {name: {3: Dim("d", min=2, max=64)} for name in ("query", "key", "value")}
    captured = capture(OneHead(), tuple(torch.randn(3, 2, 4, 5, 16)), shapes, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    for_onnxruntime.lower(captured.model, sites, {"d": 16})
    args = torch.randn(3, 2, 4, 5, 36, generator=torch.Generator().manual_seed(1))
    feeds = {name: arg.numpy() for name, arg in zip(("query", "key", "value"), args, strict=True)}
    near(session_of(captured.model).run(None, feeds), [OneHead()(*args).numpy()])


class Shared(nn.Module):
    """One module used twice, and two unnamed sites in the module itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = OnHeads(heads_merged_after)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(self.layer(x))
        x = (x @ x.mT).softmax(-1) @ x
        output: Tensor = (x @ x.mT / 8).softmax(-1) @ x
        return output


def test_sites_are_named_after_modules_and_numbered() -> None:
    captured = capture(Shared(), (torch.randn(2, 5, WIDTH),), None, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    assert [site.name for site in sites] == ["layer", "layer#2", "Shared", "Shared#2"]
    assert [site.node for site in sites] == [f"{site.name}/Attention" for site in sites]


class ScaleAsAParameter(nn.Module):
    """One learned number, with more dims than the tensor that it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.temperature = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.full((1, 1, 1, 1), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (t.view(-1, HEADS, HEAD_DIM).transpose(0, 1) for t in self.qkv(x).chunk(3, dim=-1))
        context: Tensor = ((query * self.temperature) @ key.mT).softmax(-1) @ value
        return context


def test_a_factor_may_have_more_dims_than_what_it_multiplies() -> None:
    module, x = ScaleAsAParameter(), torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1))
    captured = capture(module, (x,), None, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    for_onnxruntime.lower(captured.model, sites, {})
    with torch.no_grad():
        near(session_of(captured.model).run(None, {"x": x.numpy()}), [module(x).numpy()])


@pytest.mark.parametrize("kind", [ConViT, Differential, TotalOverQueries])
def test_sums_of_softmaxes_are_the_same_function(kind: type[nn.Module]) -> None:
    module = kind()
    captured = capture(module, (X,), None, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    for_onnxruntime.lower(captured.model, sites, {})
    with torch.no_grad():
        near(session_of(captured.model).run(None, {"x": X.numpy()}), [module(X).numpy()])


def two_products(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    weights = (q @ k.mT / 4).softmax(-1)
    return s.merge(weights @ v) + s.merge(weights @ v.square())


def sink_with_shifted_scores(s: Layers, x: Tensor) -> Tensor:
    q, k, v = s.qkv(x)
    scores = q @ k.mT / 4
    scores = scores - scores.amax(-1, keepdim=True)
    sinks = s.per_head.expand(x.shape[0], -1, x.shape[1], -1)
    return s.merge(torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1] @ v)


def numerator_is_an_output(s: Layers, x: Tensor) -> tuple[Tensor, Tensor]:
    q, k, v = s.qkv(x)
    weights = (q @ k.mT / 4).exp()
    product = weights @ v
    return product / weights.sum(-1, keepdim=True), product


def captured_over_layers(forward: Callable[..., Any]) -> Captured:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = over_layers(forward).eval()
    return capture(module, (X,), {"x": DIMS["x"]}, precision_named("fp32"))


def as_in_float64(captured: Captured, results: Sequence[Array]) -> bool:
    truth = run(doubled(captured.module), {"x": X.numpy()}, torch.float64)
    return all(relative_error(got, t.numpy()) <= 2e-6 for got, t in zip(results, truth.values(), strict=True))


def test_weights_that_two_products_take_are_two_sites() -> None:
    captured = captured_over_layers(two_products)
    sites = canonicalize(captured.model).sites
    assert [site.reason for site in sites] == [None, None] and len({site.name for site in sites}) == 2
    for_onnxruntime.lower(captured.model, sites, {})
    assert as_in_float64(captured, session_of(captured.model).run(None, {"x": X.numpy()}))


@pytest.mark.parametrize("forward", [sink_with_shifted_scores, numerator_is_an_output])
def test_what_only_looks_like_an_idiom_stays_the_same(forward: Callable[..., Any]) -> None:
    captured = captured_over_layers(forward)
    assert all(site.node is None for site in canonicalize(captured.model).sites)
    assert as_in_float64(captured, session_of(captured.model).run(None, {"x": X.numpy()}))


class ConstantMask(nn.Module):
    """A constant mask that lets every query attend to every key, or hides one key."""

    def __init__(self, mask: Tensor, inverted: bool, fused: bool) -> None:
        super().__init__()
        self.mask, self.inverted, self.fused = mask, inverted, fused

    def forward(self, x: Tensor) -> Tensor:
        heads, mask = x.view(*x.shape[:2], 2, 8).transpose(1, 2), self.mask.expand(x.shape[0], 1, 5, 5)
        if self.fused:
            return F.scaled_dot_product_attention(heads, heads, heads, mask)
        scores = heads @ heads.mT
        if mask.dtype == torch.bool:
            scores = scores.masked_fill(mask if self.inverted else ~mask, -torch.inf)
        else:
            scores = scores + mask
        result: Tensor = scores.softmax(-1) @ heads
        return result


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize(
    ("idle", "inverted", "fused"),
    [(True, False, True), (0.0, False, True), (True, False, False), (False, True, False), (0.0, False, False)],
)
def test_a_mask_that_hides_nothing_is_left_out(idle: float, inverted: bool, fused: bool, hides: bool) -> None:
    mask = torch.full((1, 1, 5, 5), idle)
    if hides:
        mask[..., 2, 3] = -torch.inf if isinstance(idle, float) else not idle
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    shapes = {"x": {0: Dim("batch", min=1, max=4)}}
    captured = capture(ConstantMask(mask, inverted, fused), (x,), shapes, precision_named("fp32"))
    (site,) = canonicalize(captured.model).sites
    (node,) = (node for node in captured.model.graph if node.name == site.node)
    assert (len(node.inputs) > 3 and node.inputs[3] is not None) == hides
    (result,) = session_of(captured.model).run(None, {"x": x.numpy()})
    assert relative_error(result, captured.exact({"x": x.numpy()})["output"]) < 1e-6


class Guarded(nn.Module):
    """Attention with a mask, and zeros for the rows that `zeroed` selects by the mask."""

    def __init__(self, zeroed: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.zeroed = zeroed

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = (x @ x.mT).masked_fill(~mask, -torch.inf).softmax(-1).masked_fill(self.zeroed(mask), 0.0)
        result: Tensor = weights @ x
        return result


ZEROED: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "none is seen": (lambda mask: ~mask.any(-1, keepdim=True), True),
    "all are hidden": (lambda mask: (~mask).all(-1, keepdim=True), True),
    "not one is seen": (lambda mask: mask.any(-1, keepdim=True).logical_not(), True),
    "all but the first are hidden": (lambda mask: ~mask[..., 1:].any(-1, keepdim=True), False),
    "one is hidden": (lambda mask: (~mask).any(-1, keepdim=True), False),
    "all are seen": (lambda mask: mask.all(-1, keepdim=True), False),
    "one is seen": (lambda mask: mask.any(-1, keepdim=True), False),
    "nobody sees it": (lambda mask: ~mask.any(-2, keepdim=True).mT, False),
}
"""Conditions for a row to be zeroed, and whether they hold for exactly the fully masked rows."""


@pytest.mark.parametrize("condition", ZEROED)
def test_zeros_for_fully_masked_rows_are_left_to_the_node(condition: str) -> None:
    """Rows that are zeroed by any other condition stay as they were written."""
    function, is_of_node = ZEROED[condition]
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(2, 5, 5, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, 1], mask[1, 3] = False, True
    captured = capture(Guarded(function), (x, mask), None, precision_named("fp32"))
    (site,) = canonicalize(captured.model).sites
    (node,) = (node for node in captured.model.graph if node.name == site.node)
    assert (SILENT_ROWS not in node.metadata_props) == is_of_node
    sees_none = ~mask.any(-1)
    feeds = {"x": x.numpy(), "mask": mask.numpy()}
    (result,) = session_of(captured.model).run(None, feeds)
    exact = captured.exact(feeds)["output"]
    rows = ~sees_none.numpy() if not is_of_node else np.ones_like(sees_none.numpy())
    assert relative_error(result[rows], exact[rows]) < 1e-6


class GuardedByAnother(nn.Module):
    """Attention with a mask for all samples, and zeros for rows that are fully masked by a mask of more dims."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        weights = (x @ x.mT).masked_fill(~mask[0], -torch.inf).softmax(-1).masked_fill(~mask.any(2, keepdim=True), 0.0)
        result: Tensor = weights @ x
        return result


def test_zeros_by_a_mask_of_more_dims_are_left() -> None:
    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    captured = capture(GuardedByAnother(), (torch.randn(2, 5, 16), mask), None, precision_named("fp32"))
    (reduction,) = (node for node in captured.model.graph if node.op_type == "ReduceMax")
    assert reduction.inputs[1] is not None
    axes = ir.convenience.get_const_tensor(reduction.inputs[1])
    assert axes is not None and axes.numpy().tolist() == [2]
    (site,) = canonicalize(captured.model).sites
    (node,) = (node for node in captured.model.graph if node.name == site.node)
    assert SILENT_ROWS in node.metadata_props


class Twice(nn.Module):
    """Weights that meet the values, and then what they made of the values."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (query @ key.mT).softmax(-1)
        return weights @ (weights @ value)


def test_the_values_of_a_product_are_those_of_another() -> None:
    args = torch.randn(3, 2, 4, 5, 16, generator=torch.Generator().manual_seed(1)).unbind(0)
    captured = capture(Twice(), args, None, precision_named("fp32"))
    sites = canonicalize(captured.model).sites
    assert [site.reason for site in sites] == [None, None]
    for_onnxruntime.lower(captured.model, sites, {})
    feeds = dict(zip(("query", "key", "value"), (arg.numpy() for arg in args), strict=True))
    near(session_of(captured.model).run(None, feeds), [Twice()(*args).numpy()])


class Padded(nn.Module):
    """Attention with padding up to the largest length, which is a value."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        keys = torch.arange(int(lengths.max()))
        scores = (x @ x.mT).masked_fill((keys >= lengths[:, None])[:, None], -1e9)
        return scores.softmax(-1) @ x


def test_a_size_that_depends_on_values_is_named() -> None:
    captured = capture(Padded(), (torch.randn(2, 5, 8), torch.tensor([5, 3])), None, precision_named("fp32"))
    (site,) = canonicalize(captured.model).sites
    assert site.reason is not None
    assert site.reason.endswith("; torch does not know the size u0, which depends on values of an input")
