"""The page of a verification: its attention weights, its text, and how a browser shows it."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import attnforge
from attnforge.arrays import Array
from attnforge.bundle import CANONICAL, Bundle, Kind, Manifest, Masks
from attnforge.cli import app
from attnforge.errors import BundleError, UnavailableError, UsageError
from attnforge.export.lowering.attention import Attention, FormChoice
from attnforge.export.lowering.onnxruntime import GROUP_QUERY, HEAD_AFTER_HEAD, MULTI_HEAD, ONE_HEAD
from attnforge.model import build_model
from attnforge.model.attention import attention
from attnforge.report import attention_maps as looking
from attnforge.report import attention_section, error_charts
from attnforge.report.attention_maps import SiteMaps, attention_maps, patch_grid
from attnforge.report.render import check_page, environment, error
from attnforge.report.verify_page import write_page
from attnforge.runtime.parity.comparison import BINS, Comparison
from attnforge.runtime.parity.metrics import MetricReport
from attnforge.runtime.parity.verify import Report
from tests.support.bundles import DeploySmall, rewrite
from tests.support.html_pages import Parsed, inaccessible, of_size

pytestmark = pytest.mark.xdist_group("verify-page")

PRODUCTS = "MatMul·Softmax·MatMul"
Pages = dict[str, tuple[Report, str, Path]]


# --- attention weights ------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Four heads of 16, whose scale is exact in fp32, with four or fewer key heads; a mask of (queries, keys)."""

    def __init__(self, key_heads: int = 4, is_causal: bool = False) -> None:
        super().__init__()
        self.key_heads, self.is_causal = key_heads, is_causal
        self.query, self.key, self.value = (nn.Linear(32, 16 * heads) for heads in (4, key_heads, key_heads))

    def parts(self, x: Tensor) -> list[Tensor]:
        return [f(x).unflatten(-1, (-1, 16)).transpose(1, 2) for f in (self.query, self.key, self.value)]

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.parts(x)
        result: Tensor = nn.functional.scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.is_causal, enable_gqa=self.key_heads != 4
        )
        return result.transpose(1, 2).flatten(2)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Array:
        """Return the weights of the first sample, in float64."""
        query, key, _ = self.double().parts(x.double())
        scores = query @ key.repeat_interleave(4 // self.key_heads, 1).transpose(-2, -1) / 4
        if self.is_causal:
            scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf)
        return np.asarray(scores.softmax(-1).detach()[0])


class InTurn(nn.Module):
    """A module with one site per form."""

    def __init__(self) -> None:
        super().__init__()
        self.sites = nn.ModuleList(Attends(form.key_heads, form.is_causal) for form in FORMS)

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        return tuple(site(x, mask if form.masked else None) for site, form in zip(self.sites, FORMS, strict=True))


class Form(NamedTuple):
    """A form, and a site that it applies to."""

    form: str
    key_heads: int
    is_causal: bool
    masked: bool


FORMS = [
    Form(PRODUCTS, 4, False, False),
    Form(PRODUCTS, 4, False, True),
    Form(PRODUCTS, 2, True, False),
    Form(MULTI_HEAD, 4, False, False),
    Form(MULTI_HEAD, 2, False, True),
    Form(MULTI_HEAD, 4, True, False),
    Form(ONE_HEAD, 4, False, False),
    Form(ONE_HEAD, 2, True, False),
    Form(ONE_HEAD, 4, False, True),
    Form("Attention", 4, False, False),
    Form("Attention", 2, False, True),
    Form("Attention", 2, True, False),
    Form(GROUP_QUERY, 2, True, False),
]


class Always:
    """A tuner that chooses a given form without measuring, or the form of :data:`FORMS` for each site of `InTurn`."""

    form, spent = "", 0.0
    measured: Mapping[str, FormChoice] = {}

    def __init__(self, *given: object) -> None: ...

    def choose(self, model: object, attention: Attention, candidates: list[Any], ruled: FormChoice) -> FormChoice:
        number = re.match(r"sites\.(\d+)/", attention.node.name or "")
        form = self.form if number is None else FORMS[int(number[1])].form
        assert form in [candidate.form for candidate in candidates]
        return FormChoice(form, "asked for")


def deployed_as(
    form: str, module: nn.Module, masked: bool, out: Path, precision: str, patch: pytest.MonkeyPatch
) -> tuple[Bundle, tuple[Tensor, ...]]:
    patch.setattr("attnforge.export.targets.onnxruntime.Tuner", type("Chosen", (Always,), {"form": form}))
    patch.setattr("attnforge.export.deploy.measure", lambda *arguments: None)
    args: tuple[Tensor, ...] = (torch.randn(2, 7, 32),)
    if masked:
        args = (*args, (torch.rand(7, 7) < 0.6) | torch.eye(7, dtype=torch.bool))
    return attnforge.deploy(module, args, out, None, precision, ["onnxruntime"], force=True), args


@pytest.fixture(scope="module")
def in_turn(tmp_path_factory: pytest.TempPathFactory) -> tuple[InTurn, tuple[Tensor, ...], dict[str, SiteMaps]]:
    """A module with every form, its example, and the maps of its sites."""
    torch.manual_seed(1)
    module, out = InTurn(), tmp_path_factory.mktemp("forms") / "bundle"
    with pytest.MonkeyPatch.context() as patch:
        bundle, args = deployed_as("none", module, True, out, "fp32", patch)
    found = attention_maps(bundle)
    assert (found.left_out, found.no_exact, found.case.name) == ({}, None, "example")
    return module, args, {one.site: one for one in found}


@pytest.mark.parametrize("number", range(len(FORMS)), ids=["-".join(map(str, form)) for form in FORMS])
def test_weights_are_those_of_torch(
    number: int, in_turn: tuple[InTurn, tuple[Tensor, ...], dict[str, SiteMaps]]
) -> None:
    module, (x, mask), found = in_turn
    one, form, site = found[f"sites.{number}"], FORMS[number], module.sites[number]
    assert isinstance(site, Attends) and len(found) == len(FORMS)
    assert (one.form, one.is_held, one.samples) == (form.form, form.form == PRODUCTS, 2)
    truth = site.weights(x, mask if form.masked else None)
    assert one.exact is not None
    np.testing.assert_allclose(one.exact, truth, rtol=0, atol=1e-14)
    for near in (one.eager, one.deployed):
        np.testing.assert_allclose(near, truth, rtol=0, atol=3e-7)
        np.testing.assert_allclose(near.sum(-1), 1, rtol=0, atol=1e-6)


def test_weights_of_heads_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr("attnforge.export.lowering.onnxruntime.MANY_BYTES", 0)
    module = Attends(4, False)
    bundle, args = deployed_as(HEAD_AFTER_HEAD, module, False, tmp_path / "bundle", "fp32", monkeypatch)
    (one,) = attention_maps(bundle)
    assert one.form == HEAD_AFTER_HEAD
    np.testing.assert_allclose(one.deployed, module.weights(*args), rtol=0, atol=3e-7)


class Capped(Attends):
    """Scores between -1 and 1, where the mask lets them be."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return attention(*self.parts(x), scale=1 / 4, attn_mask=mask, soft_cap=1.0).transpose(1, 2).flatten(2)


def test_weights_of_capped_scores_with_a_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    module = Capped()
    bundle, (x, mask) = deployed_as("Attention", module, True, tmp_path / "bundle", "fp32", monkeypatch)
    (one,) = attention_maps(bundle)
    assert one.form == "Attention"
    query, key, _ = module.double().parts(x.double())
    scores = torch.tanh(query @ key.transpose(-2, -1) / 4).masked_fill(~mask, -torch.inf)
    np.testing.assert_allclose(one.deployed, scores.softmax(-1)[0].detach().numpy(), rtol=0, atol=3e-7)


class Apart(nn.Module):
    """Causal attention with four separately projected heads."""

    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.Parameter(torch.randn(3, 4, 32, 8) / 6)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x[:, None] @ self.projections[:, None]
        return nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def test_weights_of_heads_that_are_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    module = Apart()
    bundle, (x,) = deployed_as(GROUP_QUERY, module, False, tmp_path / "bundle", "fp32", monkeypatch)
    model = ir.load(bundle.file(bundle.manifest.targets["onnxruntime"].model))
    (node,) = (node for node in model.graph if node.op_type == "GroupQueryAttention")
    assert node.attributes.get_int("num_heads") == 1
    assert attnforge.verify(bundle).passed
    query, key, _ = x[:1].double() @ module.projections.double()
    scores = query @ key.mT / 8**0.5
    truth = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf).softmax(-1)
    (one,) = attention_maps(bundle)
    np.testing.assert_allclose(one.deployed, truth.detach().numpy(), rtol=0, atol=3e-7)


class Window(Attends):
    """Each query sees the three keys before its own, its own, and the next one."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x, self.window(x))

    @staticmethod
    def window(x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1])
        back = index[:, None] - index
        return (back >= -1) & (back <= 3)


class FirstKey(Window):
    """Every query also sees the first key, and with `first` the first query sees all keys."""

    first = False

    @classmethod
    def window(cls, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1])
        seen = Window.window(x) | (index < 1)
        return seen | (index[:, None] < 1) if cls.first else seen


class FirstQuery(FirstKey):
    first = True


class Chunks(Window):
    """Each query sees its own chunk of four tokens."""

    shift = 0

    @classmethod
    def window(cls, x: Tensor) -> Tensor:
        index = torch.arange(x.shape[1]) + cls.shift
        return index[:, None] // 4 == index // 4


class ShiftedChunks(Chunks):
    """The first chunk has one token."""

    shift = 3


@pytest.mark.parametrize(
    ("kind", "width", "keys"), [(Window, 64, 68), (FirstKey, 64, 69), (Chunks, 4, 4), (ShiftedChunks, 4, 4)]
)
def test_weights_of_blocks(
    kind: type[Window], width: int, keys: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    monkeypatch.setattr("attnforge.export.lowering.blocks.BLOCKS", (width,))
    module = kind(2)
    form = f"Attention, blocks of {width} × {keys}"
    bundle, (x,) = deployed_as(form, module, False, tmp_path / "bundle", "fp32", monkeypatch)
    (one,) = attention_maps(bundle)
    assert one.form == form
    np.testing.assert_allclose(one.deployed, module.weights(x, module.window(x)), rtol=0, atol=3e-7)


def test_there_is_no_map_where_first_queries_are_computed_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = "Attention, blocks of 64 × 69, 1 first queries"
    bundle, _ = deployed_as(form, FirstQuery(2), False, tmp_path / "bundle", "fp32", monkeypatch)
    maps = attention_maps(bundle)
    assert list(maps) == []
    assert list(maps.left_out.values()) == ["its first queries are computed separately"]


def test_eager_is_rounded_and_deployed_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp16 and bf16 ONNX Runtime's CPU computes in fp32; eager's error is that of the precision."""
    torch.manual_seed(2)
    for precision, unit in (("fp16", 2.0**-11), ("bf16", 2.0**-8)):
        bundle, _ = deployed_as(MULTI_HEAD, Attends(), False, tmp_path / "bundle", precision, monkeypatch)
        (one,) = attention_maps(bundle)
        assert one.exact is not None
        assert 0.05 * unit < np.abs(one.eager - one.exact).max() < 8 * unit
        assert np.abs(one.deployed - one.exact).max() < 3e-7


def test_a_query_without_keys_has_no_weights(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return ((x @ x.transpose(-2, -1)).masked_fill(~mask, -torch.inf).softmax(-1) @ x).nan_to_num()

    mask = torch.ones(2, 5, 5, dtype=torch.bool)
    mask[0, 3] = False
    bundle = attnforge.deploy(
        Bare(), (torch.randn(2, 5, 8), mask), tmp_path / "bare", None, "fp32", ["onnxruntime"], tune=False
    )
    (one,) = attention_maps(bundle)
    assert one.exact is not None
    for weights in (one.exact, one.eager, one.deployed):
        np.testing.assert_allclose(weights.sum(-1), [[1, 1, 1, 0, 1]], atol=1e-6)


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two sites on images of 4 × 4 patches, on ONNX Runtime alone."""
    module, args, shapes = build_model("patch-attention-digits", max_batch=16)
    out = tmp_path_factory.mktemp("page") / "digits"
    return attnforge.deploy(module, args, out, shapes, "fp16", ["onnxruntime"], name="digits", tune=False)


@pytest.fixture(scope="module")
def small(small: DeploySmall) -> Bundle:
    """Two heads of attention to a padded memory."""
    return small("fp32")


@pytest.fixture(scope="module")
def faulty(digits: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same bundle, with the scale of its second site off by 1%."""
    folder = Path(shutil.copytree(digits.path, tmp_path_factory.mktemp("faulty") / "bundle"))
    file = folder / "onnxruntime/model.onnx"
    model = ir.load(file)
    node = next(node for node in model.graph if node.name == "attentions.1/MultiHeadAttention")
    node.attributes["scale"] = ir.AttrFloat32("scale", 1.01 * node.attributes["scale"].as_float())
    ir.save(model, file)
    return rewrite(folder)


def off(one: SiteMaps) -> float:
    assert one.exact is not None
    return float(np.abs(one.deployed - one.exact).max())


def test_a_fault_in_the_deployed_graph_shows(digits: Bundle, faulty: Bundle) -> None:
    clean, broken = ({one.site: off(one) for one in attention_maps(bundle)} for bundle in (digits, faulty))
    assert broken["attentions.0"] == clean["attentions.0"] < 1e-5
    assert clean["attentions.1"] < 1e-5 < 1e-3 < broken["attentions.1"]


def test_what_is_left_out_says_why(
    digits: Bundle, small: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, args, shapes = build_model("additive-attention")
    additive = attnforge.deploy(module, args, tmp_path / "additive", shapes, "fp32", ["onnxruntime"], tune=False)
    found = attention_maps(additive)
    assert not list(found) and "the keys differ by query" in next(iter(found.left_out.values()))
    folder = Path(shutil.copytree(small.path, tmp_path / "copy"))
    found = attention_maps(rewrite(folder, lambda manifest: manifest.targets.pop("onnxruntime")))
    assert not list(found) and "no ONNX Runtime model" in next(iter(found.left_out.values()))
    monkeypatch.setattr(looking, "MOST_IN_ALL", 4 * 16 * 16)
    found = attention_maps(digits)
    assert [one.site for one in found] == ["attentions.0"] and "limit" in found.left_out["attentions.1"]
    monkeypatch.setattr(looking, "MOST_SCORES", 100)
    found = attention_maps(digits)
    assert not list(found) and "4 × 16 × 16" in found.left_out["attentions.0"]


def test_patches_of_an_image() -> None:
    def grid(*given: int) -> tuple[int, ...] | None:
        found = patch_grid(*given)
        return None if found is None else (found.rows, found.columns, found.side, found.extra)

    assert grid(8, 8, 16) == (4, 4, 2, 0)
    assert grid(32, 48, 24) == (4, 6, 8, 0)
    assert grid(32, 32, 65) == (8, 8, 4, 1)
    assert grid(224, 224, 197) == (14, 14, 16, 1)
    assert grid(32, 32, 50) is None and grid(32, 32, 2) is None and grid(30, 50, 17) is None


# --- charts -----------------------------------------------------------------------------------------------------------


def test_maps_of_many_tokens_are_pooled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_section, "MOST_CELLS", 2)
    values = np.array([[1.0, 3, 5, 7, 9], [1, 3, 5, 7, 9], [-8, 0, 0, 0, 0]])
    np.testing.assert_allclose(attention_section.pooled(values), np.array([[3, 8], [-8 / 3, 0]]))
    np.testing.assert_allclose(attention_section.pooled(values, extreme=True), [[5, 9], [-8, 0]])
    np.testing.assert_array_equal(attention_section.pooled(values[:2, :2]), values[:2, :2])


def test_charts_bear_what_a_report_may_hold() -> None:
    zero, one = [0] * BINS, [7, *[0] * (BINS - 2), 1]
    for errors, eager, allowed in ((one, zero, None), (zero, one, (1e-30, 1e30)), (one, one, (1e-3, 1e-3))):
        assert error_charts.histogram("b", errors, eager, allowed, "alt").src.startswith("data:image/svg+xml;base64,")
    of_number = {"output": "y", "eager_error": 0.0, "max_error": 0.0, "max_budget": 1.0}
    exact = Comparison(case=r"no $\frac{ formula", error=0.0, budget=1e-6, passed=True, **of_number)  # type: ignore[arg-type]
    infinite = Comparison(case="lost", error=1.0, budget=1e-3, passed=False, **of_number)  # type: ignore[arg-type]
    for marks in ([exact], [exact, infinite], [infinite]):
        assert error_charts.by_case("b", marks, "alt").height > 100
    gone = attention_section.heatmap(np.full((3, 4), np.nan), 0.0, "alt")
    assert gone.src.startswith("data:image/png;base64,")


# --- what the page says -----------------------------------------------------------------------------------------------


def written(report: Report, bundle: Bundle, file: Path) -> str:
    return write_page(report, bundle, file).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages(small: Bundle, digits: Bundle, faulty: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """Report, page and file of a bundle that passes, one with images, and one that fails."""
    folder = tmp_path_factory.mktemp("pages")
    made = {}
    for name, bundle in {"small": small, "digits": digits, "faulty": faulty}.items():
        report = attnforge.verify(bundle, ["onnxruntime-cpu"])
        made[name] = report, written(report, bundle, folder / f"{name}.html"), folder / f"{name}.html"
    return made


@pytest.mark.parametrize("name", ["small", "digits", "faulty"])
def test_numbers_are_the_reports(name: str, pages: Pages) -> None:
    report, text, _ = pages[name]
    ((backend, found),) = report.backends.items()
    parsed = Parsed(text)
    head, *rows = parsed.tables["cases"]
    assert len(rows) == len(found.comparisons)
    for row, one in zip(rows, found.comparisons, strict=True):
        cells = dict(zip(head, row, strict=True))
        case = next(case for case in report.cases if case.name == one.case)
        assert cells["Case"] == one.case and cells["Verdict"] == ("passed" if one.passed else "FAILED")
        for column, number in (("Error", one.error), ("Eager’s", one.eager_error), ("Budget", one.budget)):
            exact, shown = cells[column].removeprefix("=").split()
            assert float(exact) == number and shown == error(number) and float(shown) == float(f"{number:.1e}")
        assert cells["Cosine"] == f"{one.cosine:.9f}" and cells["Seed"] == str(case.seed)
        assert cells["Sizes"] == ", ".join(f"{symbol} {size}" for symbol, size in case.sizes.items())
        assert cells["Kind of input"].startswith(case.kind)
        assert cells.get("Masks", "random") == case.masks
    summary = parsed.tables[""][1]
    assert summary[:2] == [backend, "passed" if found.passed else "FAILED"]
    for cell, number in zip(summary[2:5], (found.error, found.eager_error, found.budget), strict=True):
        assert cell == f"={number} {error(number)}"
    assert summary[6:] == [found.case, str(len(report.cases))]
    worst = next(iter(found.outputs.values())).worst
    assert worst is not None and worst.got is not None
    assert f"[{', '.join(map(str, worst.index))}]" in text and f"{worst.got:.9g}" in text


def test_a_failure_says_so_and_names_the_case(pages: Pages) -> None:
    report, text, _ = pages["faulty"]
    found = report.backends["onnxruntime-cpu"]
    assert not report.passed and found.failures
    said = " ".join(Parsed(text).text.split())
    assert "digits in fp16: FAILED" in said and "does not compute the same function" in said
    assert f"fails {len({c.case for c in found.failures})} of {found.cases} cases" in said
    furthest = max(found.failures, key=lambda c: c.error / c.budget)
    assert f"{furthest.case}, output {furthest.output}: {furthest.reason}" in said
    sites = {row[0]: row for row in Parsed(text).tables["sites"]}
    assert float(sites["attentions.1"][2].removeprefix("=").split()[0]) > 1e-3
    assert "digits in fp16: passed" in " ".join(Parsed(pages["digits"][1]).text.split())


def test_images_have_attention_laid_over_them(pages: Pages) -> None:
    alts = [attrs["alt"] or "" for tag, attrs in Parsed(pages["digits"][1]).tags if tag == "img"]
    over = [alt for alt in alts if "over the image, 4 × 4 patches of 2 pixels" in alt]
    assert len(over) == 6  # two sites: eager, deployed, difference
    assert not any("over the image" in (a.get("alt") or "") for _, a in Parsed(pages["small"][1]).tags)


def test_every_kind_of_input_and_mask_is_explained() -> None:
    explained: Any = environment().get_template("kinds.html").module
    assert set(explained.KINDS) == set(get_args(Kind)) and set(explained.MASKS) == set(get_args(Masks))


def test_the_page_needs_nothing_else_and_can_be_read_aloud(pages: Pages) -> None:
    for _, text, _ in pages.values():
        parsed = Parsed(text)
        assert not {"script", "iframe", "object", "embed"} & {tag for tag, _ in parsed.tags}
        for _, attrs in parsed.tags:
            for name in ("src", "href", "srcset", "action"):
                assert (attrs.get(name) or "data:").startswith("data:")
        style = re.sub(r"data:[\w/+;]*base64,[\w/+=]*", "", text)
        assert "url(" not in style and "@import" not in style and "http" not in style
        assert parsed.tags[0] == ("html", {"lang": "en"}) or ("html", {"lang": "en"}) in parsed.tags
        levels = [int(tag[1]) for tag, _ in parsed.tags if re.fullmatch(r"h[1-6]", tag)]
        assert levels[0] == 1 and levels.count(1) == 1
        assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
        images = [attrs for tag, attrs in parsed.tags if tag == "img"]
        assert len(images) > 6 and all(len(attrs["alt"] or "") > 20 for attrs in images)
        assert len({attrs["alt"] for attrs in images}) > 5


def test_hostile_names_are_text(small: Bundle, pages: Pages, tmp_path: Path) -> None:
    hostile = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
    report = pages["small"][0]
    found = report.backends["onnxruntime-cpu"]
    changed = report.model_copy(
        update={
            "name": hostile,
            "bundle": hostile,
            "reference": hostile,
            "warnings": [hostile],
            "skipped": {hostile: hostile},
            "backends": {hostile: found.model_copy(update={"reason": hostile, "case": hostile})},
        }
    )
    text = written(changed, small, tmp_path / "page.html")
    parsed = Parsed(text)
    assert "script" not in {tag for tag, _ in parsed.tags}
    assert not any("onerror" in attrs for _, attrs in parsed.tags)
    assert hostile in parsed.text and hostile not in text


def test_warnings_metrics_and_what_did_not_run_are_shown(small: Bundle, pages: Pages, tmp_path: Path) -> None:
    report = pages["small"][0]
    metric = MetricReport(
        name="accuracy", value=0.875, eager=0.9375, float64=0.96875, least=0.91, samples=32, passed=False,
        reason="accuracy is 0.875, below the required 0.91",
    )  # fmt: skip
    found = report.backends["onnxruntime-cpu"].model_copy(
        update={"metric": metric, "reason": metric.reason, "passed": False}
    )
    changed = report.model_copy(
        update={
            "passed": False,
            "backends": {"onnxruntime-cpu": found},
            "warnings": ["fp16 drifts"],
            "skipped": {"tensorrt": "no CUDA device"},
        }
    )
    said = " ".join(Parsed(written(changed, small, tmp_path / "page.html")).text.split())
    assert "Warning. fp16 drifts" in said and "tensorrt: no CUDA device" in said
    assert metric.text() in said and metric.reason is not None and said.count(metric.reason) == 2
    nothing = report.model_copy(update={"passed": False, "backends": {}, "skipped": {"tensorrt": "no CUDA device"}})
    said = " ".join(Parsed(written(nothing, small, tmp_path / "none.html")).text.split())
    assert "No backend could run on this machine" in said and "FAILED" in said


# --- bundles that strangers made --------------------------------------------------------------------------------------


@pytest.fixture
def copy(small: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small.path, tmp_path / "copy"))


def page_of(folder: Path) -> str:
    """Return the page that the command writes for a bundle, whether or not its verification passes."""
    done = CliRunner().invoke(app, ["verify", "-b", "onnxruntime-cpu", str(folder), "--html", str(folder) + ".html"])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Path(f"{folder}.html").read_text(encoding="utf-8")


def test_a_bundle_without_cases_has_a_page(copy: Path) -> None:
    rewrite(copy, lambda manifest: manifest.cases.clear())
    text = page_of(copy)
    assert "FAILED" in text and "random numbers around 0" in text


def test_what_is_no_site_and_what_is_left_out_have_reasons(copy: Path) -> None:
    def change(manifest: Manifest) -> None:
        manifest.attention.details[0].targets.clear()
        manifest.attention.other_softmaxes |= {"gate": "an axis of <weights>", "head": "an axis of <weights>"}

    rewrite(copy, change)
    text = page_of(copy)
    assert "the manifest does not say how it was lowered for ONNX Runtime" in text
    assert "A softmax, but no attention, in gate, head: an axis of &lt;weights&gt;." in text


@pytest.mark.parametrize("size", [1e30, 1e300])
def test_a_budget_of_any_size_is_drawn(copy: Path, size: float) -> None:
    rewrite(copy, lambda manifest: [case.spread.update(output=(size, size)) for case in manifest.cases])
    assert "Error in every case" in page_of(copy)


def turned_back(graph: onnx.GraphProto) -> None:
    """Connect the last node's output to the first node, which makes a cycle."""
    graph.node[0].input[0] = graph.node[-1].output[0]


def altered(folder: Path, name: str, change: Callable[[onnx.GraphProto], object]) -> None:
    model = onnx.load(str(folder / name))
    change(model.graph)
    onnx.save(model, folder / name)
    rewrite(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: rewrite(folder, lambda manifest: setattr(manifest.attention.details[0], "site", "another")),
        lambda folder: altered(folder, CANONICAL, lambda graph: [node.ClearField("name") for node in graph.node]),
        lambda folder: altered(folder, CANONICAL, turned_back),
        lambda folder: altered(folder, CANONICAL, lambda graph: graph.ClearField("node")),
    ],
    ids=["a renamed site", "nodes without names", "a cycle", "no nodes"],
)
def test_a_page_that_cannot_be_made_ends_in_one_line(copy: Path, change: Callable[[Path], object]) -> None:
    change(copy)
    with pytest.raises(BundleError, match="cannot be shown") as raised:
        page_of(copy)
    assert "\n" not in str(raised.value) and not Path(f"{copy}.html").exists()


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it raises
import attnforge
from attnforge.report.verify_page import write_page
report = attnforge.verify(sys.argv[1], ["onnxruntime-cpu"])
print(write_page(report, sys.argv[1], sys.argv[2]))
assert "matplotlib.pyplot" not in sys.modules
"""


def test_a_page_needs_no_torch(digits: Bundle, tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, str(digits.path), str(tmp_path / "new/page.html")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "new/page.html").is_file()


# --- the command ------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_reported_first(
    digits: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def verify(*_: object, **__: object) -> Report:
        raise AssertionError("verified before it was known that a page can be written")

    monkeypatch.setattr(attnforge, "verify", verify, raising=False)
    taken = tmp_path / "taken.html"
    taken.write_text("mine")
    run = CliRunner().invoke
    assert isinstance(error := run(app, ["verify", str(digits.path), "--html", str(taken)]).exception, UsageError)
    assert "--force" in str(error) and taken.read_text() == "mine"
    assert isinstance(run(app, ["verify", str(digits.path), "--html", str(tmp_path)]).exception, UsageError)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    error = run(app, ["verify", str(digits.path), "--html", str(tmp_path / "new.html")]).exception
    assert isinstance(error, UnavailableError) and "pip install 'attnforge[report]'" in str(error)
    with pytest.raises(UnavailableError):
        check_page(tmp_path / "new.html")


def test_the_command_writes_a_page(digits: Bundle, faulty: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    arguments = ["verify", "-b", "onnxruntime-cpu", "--html", str(file)]
    done = CliRunner().invoke(app, [*arguments, str(digits.path), "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["page"] == str(file)
    assert "digits in fp16: passed" in file.read_text(encoding="utf-8")
    done = CliRunner().invoke(app, [*arguments, str(faulty.path), "--force"])
    assert done.exit_code == 1 and str(file) in "".join(done.output.split())
    assert "digits in fp16: FAILED" in file.read_text(encoding="utf-8")


def test_the_command_takes_a_metric_and_says_reasons(
    small: Bundle, pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(small.path)
    error = CliRunner().invoke(app, ["verify", path, "--metric", "accuracy", "--least", "0.9"]).exception
    assert isinstance(error, UsageError) and "real data" in str(error)
    metric = MetricReport(
        name="accuracy", value=0.5, eager=0.75, float64=0.75, least=0.7, samples=4, passed=False, reason="too low"
    )
    report = pages["small"][0]
    found = report.backends["onnxruntime-cpu"].model_copy(update={"metric": metric, "reason": "too low"})
    changed = report.model_copy(update={"backends": {"onnxruntime-cpu": found}, "warnings": ["fp16 drifts"]})
    given: dict[str, object] = {}
    monkeypatch.setattr(attnforge, "verify", lambda *_, **named: given.update(named) or changed, raising=False)
    done = CliRunner().invoke(app, ["verify", path, "--metric", "cosine", "--least", "0.5"])
    assert given == {"metric": "cosine", "least": 0.5, "trusted": None}
    said = " ".join(done.output.split())
    for text in (metric.text(), "onnxruntime-cpu too low", "fp16 drifts"):
        assert text in said


# --- in a browser -----------------------------------------------------------------------------------------------------

SEEN = """
const root = document.documentElement, verdict = document.querySelector('.verdict').getBoundingClientRect();
return {
  scroll: root.scrollWidth, client: root.clientWidth, width: window.innerWidth, height: window.innerHeight,
  verdict: [verdict.top, verdict.bottom, verdict.width],
  heading: document.querySelector('h1').getBoundingClientRect().bottom,
  pictures: [...document.querySelectorAll('img, svg')].map(p => {
    const box = p.getBoundingClientRect();
    return [box.width, box.height, box.right, p.naturalWidth, p.complete, p.alt];
  }),
  wide: [...document.querySelectorAll('body *')].filter(e => !e.closest('.scroll')
    && e.getBoundingClientRect().right > root.clientWidth + 1).map(e => e.outerHTML.slice(0, 80)),
  text: document.body.innerText,
  ground: getComputedStyle(document.body).backgroundColor,
};
"""


@pytest.mark.parametrize("name", ["small", "digits", "faulty"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_browser_shows_it(name: str, width: int, height: int, browser: Any, pages: Pages) -> None:
    report, _, file = pages[name]
    of_size(browser, width, height)
    grounds = set()
    for scheme in ("dark", "light"):
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        browser.get(file.as_uri())
        grounds.add(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert len(grounds) == 2
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [e["params"]["request"]["url"] for e in events if e["method"] == "Network.requestWillBeSent"]
    assert file.as_uri() in asked and all(url.startswith(("data:", file.as_uri())) for url in asked)
    assert inaccessible(browser) == []
    seen = browser.execute_script(SEEN)
    assert (seen["width"], seen["height"]) == (width, height)
    assert seen["scroll"] <= seen["client"] and seen["wide"] == []
    top, bottom, across = seen["verdict"]
    assert 0 <= seen["heading"] < top < bottom < height and across > 0.8 * width - 60
    first = "passed" if report.passed else "FAILED"
    assert f"in {report.precision}: {first}" in seen["text"][:200]
    assert len(seen["pictures"]) > 6
    for shown, tall, right, natural, complete, alt in seen["pictures"]:
        assert shown > 150 and tall > 100 and right <= width and natural > 0 and complete and alt
