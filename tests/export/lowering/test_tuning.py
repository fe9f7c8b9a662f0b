"""The forms that ONNX Runtime can run: each computes the same function, and the measurements are recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx_ir.passes.common import RemoveUnusedNodesPass
from torch import Tensor, nn
from torch.export import Dim
from torch.nn import functional as F

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import Bundle
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.graphs.build import Builder
from attnforge.export.graphs.sizes import Unmeasurable
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tuning
from attnforge.export.lowering.attention import Attention, FormChoice, Lowered, attentions, write
from attnforge.export.lowering.onnxruntime import (
    GROUP_QUERY,
    HEAD_AFTER_HEAD,
    MULTI_HEAD,
    ONE_HEAD,
    candidates_for,
)
from attnforge.export.sources.torch_module import capture
from attnforge.precision import precision_named
from tests.support import broken
from tests.support.attends import CPU, OPT, SIZES, Attends, agree, run
from tests.support.idioms import IDIOMS

QUICK = 0.01
"""Seconds for measuring where it only matters that it is done."""

PRODUCTS, CAPPED = "MatMul·Softmax·MatMul", "MatMul·Tanh·Softmax·MatMul"


def forms(attends: Attends) -> list[str]:
    ((site, attention),) = attentions(*attends.model())
    return [candidate.form for candidate in candidates_for(site.name, attention)]


def as_form(attends: Attends, form: str) -> ir.Model:
    """The graph with its only site lowered to `form`."""
    model, sites = attends.model()
    ((site, attention),) = attentions(model, sites)
    (candidate,) = (each for each in candidates_for(site.name, attention) if each.form == form)
    write(model.graph, attention, candidate)
    model.graph.remove(attention.node, safe=True)
    assert candidate.node in {node.name for node in model.graph}
    return model


@pytest.mark.parametrize(
    ("attends", "expected"),
    [
        (Attends(), {PRODUCTS, MULTI_HEAD, ONE_HEAD, "Attention"}),
        (Attends(key_heads=2), {PRODUCTS, MULTI_HEAD, ONE_HEAD, "Attention"}),
        (Attends(n_k="n", is_causal=True), {PRODUCTS, MULTI_HEAD, ONE_HEAD, "Attention", GROUP_QUERY}),
        (Attends(n_k="n", is_causal=True, key_heads=2, softcap=3.0), {CAPPED, "Attention", GROUP_QUERY}),
        (Attends(n_k="n", is_causal=True, d_k=20, d_v=20), {PRODUCTS, MULTI_HEAD, ONE_HEAD, "Attention"}),
        (Attends(is_causal=True), {PRODUCTS, "Attention"}),
        (Attends(mask=("batch", 1, "n", "m")), {PRODUCTS, MULTI_HEAD, "Attention"}),
        (Attends(mask=(1, 1, "n", "m"), silent_rows="nan"), {PRODUCTS, MULTI_HEAD, ONE_HEAD}),
        (Attends(softcap=3.0), {CAPPED, "Attention"}),
        (Attends(mask=(1, 1, 1, "m"), is_causal=True), {PRODUCTS}),
    ],
)  # fmt: skip
def test_forms_that_can_express_a_site(attends: Attends, expected: set[str]) -> None:
    assert set(forms(attends)) == expected
    assert forms(attends)[0].startswith("MatMul")


SITES = CPU | {
    "causal, as many keys": Attends(n_k="n", is_causal=True),
    "causal, grouped heads": Attends(n_k="n", is_causal=True, key_heads=2),
    "causal, one key head, soft cap": Attends(n_k="n", is_causal=True, key_heads=1, softcap=2.5),
    "causal, fixed sizes": Attends(batch=1, n_q=7, n_k=7, is_causal=True, key_heads=2),
}


@pytest.mark.parametrize("form", SITES)
def test_every_candidate_computes_the_same(form: str) -> None:
    for candidate in forms(SITES[form]):
        model = as_form(SITES[form], candidate)
        for sizes in SIZES:
            feeds = SITES[form].feeds(sizes)
            agree(run(model, feeds), SITES[form].expected(feeds))


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.too_slow])
@given(
    attends=st.builds(
        Attends,
        batch=st.sampled_from(["batch", 1, 2]),
        heads=st.sampled_from([1, 2, 4]),
        key_heads=st.sampled_from([None, 1, 2]),
        n_q=st.sampled_from(["n", 1, 7]),
        n_k=st.sampled_from(["n", "m", 1, 7]),
        d_k=st.sampled_from([1, 3, 8, 20, 32]),
        d_v=st.sampled_from([1, 8, 32]),
        is_causal=st.booleans(),
        scale=st.sampled_from([1.0, 0.3125]),
        softcap=st.sampled_from([0.0, 0.0, 2.5]),
        silent_rows=st.sampled_from(["zero", "nan"]),
    ),
    mask=st.sampled_from(["none", "bool", "bias"]),
    broadcast=st.tuples(*[st.booleans()] * 4),
    large=st.booleans(),
    sizes=st.fixed_dictionaries({"batch": st.integers(1, 3), "n": st.integers(1, 9), "m": st.integers(1, 9)}),
)
def test_every_candidate_computes_the_same_at_any_sizes(
    attends: Attends, mask: str, broadcast: tuple[bool, ...], large: bool, sizes: dict[str, int]
) -> None:
    assume(attends.heads % (attends.key_heads or 1) == 0)
    if mask != "none":
        full: tuple[int | str, ...] = (attends.batch, attends.heads, attends.n_q, attends.n_k)
        shape = tuple(1 if ones else dim for ones, dim in zip(broadcast, full, strict=True))
        attends = replace(attends, mask=shape, bias=mask == "bias", is_causal=False)
    feeds = attends.feeds(sizes)
    if large:
        feeds["query"] *= 16
    if mask == "bias":
        feeds["mask"].reshape(-1, feeds["mask"].shape[-1])[0] = -np.inf
    expected = attends.expected(feeds)
    for candidate in forms(attends):
        agree(run(as_form(attends, candidate), feeds), expected, 1e-5 if large else 1e-6)


@pytest.mark.parametrize("shape", [("batch", 1, "n", "m"), ("batch", 4, "n", "m"), (1, 1, 3, 5)])
def test_a_query_with_the_least_number_for_every_key_attends_to_all(shape: tuple[int | str, ...]) -> None:
    """Padding is often written so, with a bias of positions: ONNX Runtime's Attention treats it as no keys."""
    attends = Attends(mask=shape, bias=True, n_q=shape[2], n_k=shape[3])
    feeds = attends.feeds({"batch": 2, "n": 3, "m": 5})
    least = np.finfo(np.float32).min
    rows = feeds["mask"].reshape(-1, 5)
    rows[0], rows[1], rows[2] = least, -np.inf, 0.5
    rows[1, 2:] = least
    wide = np.where(feeds["mask"] == least, np.finfo(np.float64).min, feeds["mask"])  # sums round to it, too
    expected = attends.expected({**feeds, "mask": wide})
    assert np.allclose(expected[0, 0, 0], feeds["value"][0, 0].mean(0), rtol=1e-6, atol=1e-6)
    assert "Attention" in forms(attends)
    for candidate in forms(attends):
        agree(run(as_form(attends, candidate), feeds), expected)


def test_a_number_that_replaces_scores_is_left_to_the_products() -> None:
    """Adding it to the scores would be another function."""
    idiom = IDIOMS["bias_under_a_finite_fill"]
    captured = capture(idiom.module(), idiom.args, idiom.dynamic_shapes, precision_named("fp32"))
    ((site, attention),) = attentions(captured.model, canonicalize(captured.model).sites)
    assert [candidate.form for candidate in candidates_for(site.name, attention)] == [PRODUCTS]


# Measuring


@pytest.mark.parametrize("form", [form for form in SITES if len(forms(SITES[form])) > 1])
def test_every_candidate_that_agrees_is_measured(form: str) -> None:
    model, sites = SITES[form].model()
    (lowered,) = for_onnxruntime.lower(model, sites, OPT, tuner=tuning.Tuner(OPT, QUICK))
    assert set(lowered.measured) == set(forms(SITES[form])) and not lowered.dropped
    assert lowered.form in lowered.measured and all(ms > 0 for ms in lowered.measured.values())
    assert lowered.why.startswith("measured: ")
    assert (lowered.unfused is None) == (lowered.form not in (PRODUCTS, CAPPED))
    for sizes in SIZES:
        feeds = SITES[form].feeds(sizes)
        agree(run(model, feeds), SITES[form].expected(feeds))


def test_equal_sites_share_a_measurement(tmp_path: Path) -> None:
    module = nn.Sequential(*(broken.Attention(32) for _ in range(3))).eval()
    shapes = ({0: Dim("batch", min=1, max=4)},)
    bundle = attnforge.deploy(module, (torch.randn(2, 6, 32),), tmp_path / "tuned", shapes, targets=["onnxruntime"])
    first, *rest = (record.targets["onnxruntime"] for record in bundle.manifest.attention.details)
    assert len(rest) == 2 and first.measured
    assert all(record.measured == first.measured for record in rest)
    tuning = bundle.manifest.targets["onnxruntime"].tuning
    assert tuning is not None and tuning.sizes == {"batch": 2} and tuning.seconds > 0
    assert attnforge.verify(bundle).passed


def test_without_tuning_nothing_is_measured(small: Callable[[str], Bundle]) -> None:
    manifest = small("fp32").manifest
    assert manifest.targets["onnxruntime"].tuning is None
    assert not any(made.measured or made.dropped for r in manifest.attention.details for made in r.targets.values())


def test_sizes_that_are_too_large_or_unknown_are_left_to_the_rules() -> None:
    for attends, sizes, why in (
        (Attends(mask=(1, 1, "n", "m")), OPT | {"n": 2**14, "m": 2**14}, "8,192 MiB"),
        (Attends(n_q="u0"), OPT, "u0 is not known"),
    ):
        model, sites = attends.model()
        (lowered,) = for_onnxruntime.lower(model, sites, sizes, tuner=tuning.Tuner(sizes))
        assert "not measured" in lowered.why and why in lowered.why
        assert not lowered.measured


@pytest.mark.parametrize(
    ("tokens", "device", "form"),
    [(4096, "cpu", "com.microsoft::GroupQueryAttention"), (64, "cpu", "MatMul·Softmax·MatMul"),
     (4096, "cuda", "MatMul·Softmax·MatMul")],
)  # fmt: skip
def test_many_causal_tokens_take_the_form_that_materialises_no_scores(tokens: int, device: str, form: str) -> None:
    model, sites = Attends(n_k="n", is_causal=True).model()
    (lowered,) = for_onnxruntime.lower(model, sites, {"batch": 1, "n": tokens}, device)
    assert lowered.form == form


class Rotated(nn.Module):
    """Attention within a window and between words, of queries and keys that are rotated by their positions."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, words: Tensor) -> Tensor:
        """From `(batch, heads, tokens, 16)` operands and `(batch, tokens)`, True for words."""
        index = torch.arange(query.shape[2])
        angle = (index[:, None] * 0.1 ** torch.arange(8)).repeat(1, 2)

        def turned(x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return x * angle.cos() + torch.cat((-second, first), -1) * angle.sin()

        back = index[:, None] - index
        mask = (back >= 0) & (back < 7) & words[:, None, None]
        return F.scaled_dot_product_attention(turned(query), turned(key), value, mask)


class Measured:
    """Keeps the graphs that are measured; they run in ONNX Runtime."""

    def __init__(self) -> None:
        self.models: list[ir.Model] = []
        self.tuner = tuning.Tuner({"batch": 2, "tokens": 40}, QUICK, library=replace(tuning.ONNX_RUNTIME, open=self))

    def __call__(self, model: ir.Model, feeds: Mapping[str, Array]) -> Callable[[], Any]:
        self.models.append(model.clone())
        return tuning.ONNX_RUNTIME.open(model, feeds)

    def operators(self) -> list[Counter[str]]:
        return [operators(model) for model in self.models]


def operators(model: ir.Model) -> Counter[str]:
    return Counter(node.op_type for node in model.graph if node.op_type != "Constant")


class Chain(nn.Module):
    """Attention after attention, with a product between them."""

    def __init__(self, sites: int) -> None:
        super().__init__()
        self.between = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(sites - 1))
        self.attend = Rotated()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, words: Tensor) -> Tensor:
        value = self.attend(query, key, value, words)
        for layer in self.between:
            value = self.attend(query, key, layer(value), words)
        return value


def rotated(sites: int = 1) -> tuple[ir.Model, list[Site]]:
    """A canonical graph of :class:`Chain`."""
    batch, tokens = Dim("batch", min=1, max=4), Dim("tokens", min=2, max=64)
    operand = {0: batch, 2: tokens}
    args = *(torch.randn(2, 4, 40, 16) for _ in range(3)), torch.rand(2, 40) < 0.8
    shapes = (operand, operand, operand, {0: batch, 1: tokens})
    captured = capture(Chain(sites).eval(), args, shapes, precision_named("fp32"))
    return captured.model, canonicalize(captured.model).sites


def test_what_is_measured_is_what_is_deployed() -> None:
    """Each form with the rotation of queries and keys, and with what it computes of the mask."""
    (model, sites), measured = rotated(), Measured()
    ((site, attention),) = attentions(model, sites)
    candidates = candidates_for(site.name, attention)
    assert any("blocks of" in candidate.form for candidate in candidates)
    (lowered,) = for_onnxruntime.lower(model.clone(), sites, measured.tuner.sizes, tuner=measured.tuner)
    assert set(lowered.measured) == {candidate.form for candidate in candidates} and not lowered.dropped
    for candidate, count in zip(candidates, measured.operators(), strict=True):
        deployed = model.clone()
        ((_, attention),) = attentions(deployed, sites)
        write(deployed.graph, attention, candidate)
        RemoveUnusedNodesPass()(deployed)
        assert count == operators(deployed), candidate.form
        assert count["Neg"] == 2  # rotations
    assert all("words" in {value.name for value in model.graph.inputs} for model in measured.models)


def test_what_sites_share_is_not_measured_at_each() -> None:
    """The mask is an input of the forms that read it, and the rotated queries and keys of all; blocks of the mask are
    computed at each site."""
    (model, sites), measured = rotated(2), Measured()
    first, second = for_onnxruntime.lower(model, sites, measured.tuner.sizes, tuner=measured.tuner)
    assert first.measured == second.measured and len(measured.models) == len(first.measured)
    for form, part in zip(first.measured, measured.models, strict=True):
        kinds = [value.dtype for value in part.graph.inputs]
        assert kinds.count(ir.DataType.BOOL) == 1 and not operators(part)["Neg"]
        assert ("words" in {value.name for value in part.graph.inputs}) == ("blocks of" in form)


class Projected(nn.Module):
    """Attention of `(batch, tokens, 32)` with projections that have no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(32, 32, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2)


def test_the_projections_of_a_form_that_writes_them_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(for_onnxruntime, "MANY_BYTES", 0)
    shapes = ({0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=64)},)
    captured = capture(Projected().eval(), (torch.randn(2, 40, 32),), shapes, precision_named("fp32"))
    measured = Measured()
    sites = canonicalize(captured.model).sites
    (lowered,) = for_onnxruntime.lower(captured.model, sites, measured.tuner.sizes, tuner=measured.tuner)
    assert HEAD_AFTER_HEAD in lowered.measured and MULTI_HEAD not in lowered.measured
    products = dict(zip(lowered.measured, (count["MatMul"] for count in measured.operators()), strict=True))
    assert products == {PRODUCTS: 5, HEAD_AFTER_HEAD: 12, ONE_HEAD: 3, "Attention": 3}


def test_forms_that_hold_no_scores_are_measured_where_others_would_be_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tuning, "LARGEST_SCORES", 0)
    sizes = {"batch": 1, "n": 600, "m": 600}

    def lowered(attends: Attends) -> Lowered:
        model, sites = attends.model()
        (site,) = for_onnxruntime.lower(model, sites, sizes, tuner=tuning.Tuner(sizes, QUICK))
        return site

    assert set(lowered(Attends()).measured) == {MULTI_HEAD, ONE_HEAD}
    one = lowered(Attends(n_k="n", is_causal=True))
    assert (one.form, dict(one.measured)) == (GROUP_QUERY, {}) and "not measured: its scores are" in one.why
    monkeypatch.setattr(tuning, "LONG", 0.0)
    slow = lowered(Attends())
    assert not slow.measured and "not measured: a call takes" in slow.why


def test_forms_for_whose_calls_there_is_no_time_are_left_out() -> None:
    seconds = {"plain": 4.0, "products": 2.0, "fused": 0.2, "in blocks": 0.3}
    assert tuning._too_slow(seconds, 40, "fused") == {}
    assert set(tuning._too_slow(seconds, 13, "fused")) == {"plain"}
    assert tuning._too_slow(seconds, 3, "fused") == {
        "plain": "a call takes 4.0 seconds", "products": "a call takes 2.0 seconds"
    }  # fmt: skip
    assert tuning._too_slow({"plain": 0.05, "fused": 0.01}, 0, "fused") == {}  # quick calls are always timed
    for left, ruled in ((3, "products"), (1, "fused")):
        with pytest.raises(Unmeasurable, match="so there is no time"):
            tuning._too_slow(seconds, left, ruled)


def test_rules_and_the_tuner_have_the_same_candidates() -> None:
    for attends in SITES.values():
        ((site, attention),) = attentions(*attends.model())
        offered = candidates_for(site.name, attention, OPT, OPT)
        assert offered[0].pays and [candidate.form for candidate in offered] == forms(attends)


def test_a_form_that_disagrees_is_dropped() -> None:
    model, sites = CPU["mask"].model()
    ((site, attention),) = attentions(model, sites)
    products, fused, *_ = candidates_for(site.name, attention)

    def wrong(op: Builder, a: Attention, name: str) -> ir.Value:
        return fused.emit(op, replace(a, scale=1.01 * a.scale), name)

    choice = tuning.Tuner(OPT, QUICK).choose(
        model, attention, [products, replace(fused, emit=wrong)], FormChoice(fused.form, "the rules")
    )
    assert choice.form == products.form and set(choice.measured) == {products.form}
    assert f"differs from {PRODUCTS} by" in choice.dropped[fused.form]


@pytest.mark.parametrize(
    ("output", "expected", "agrees"),
    [
        ([300.0, 3.0], [300.0, 3.0], True),
        ([300.0, 3.0], [300.0, 300.0], False),  # the squares are beyond fp16
        ([np.inf, 3.0], [np.inf, 3.0], True),
        ([np.inf, 30.0], [np.inf, 3.0], False),
        ([np.inf, 3.0], [np.nan, 3.0], False),
        ([np.nan, 3.0], [1.0, 3.0], False),
    ],
)
def test_non_finite_numbers_hide_no_difference(output: list[float], expected: list[float], agrees: bool) -> None:
    model, sites = CPU["mask"].model()
    ((site, attention),) = attentions(model, sites)
    products, fused, *_ = candidates_for(site.name, attention)
    answers = {products.form: expected, fused.form: output}
    models = {form: model.clone() for form in answers}
    for form, copy in models.items():
        copy.graph.name = form
    library = tuning.Library(
        "here", lambda model, feeds: lambda: model.graph.name, lambda form: np.array(answers[form], np.float16)
    )
    forms, _, dropped = tuning.agreeing([products, replace(fused, tolerance=0.5)], models, {}, library, math.inf)
    assert (fused.form in forms) is agrees and (fused.form in dropped) is not agrees
