"""Every softmax and every attention operator that runs is part of a site, or no attention, with a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.export import export as export_program
from torch.nn.attention.flex_attention import flex_attention

from attnforge.export.attention.canonicalize import LOST, WITHOUT_EFFECT, Canonical, canonicalize
from attnforge.export.attention.counted import counted, in_graph, in_program, missing
from attnforge.export.graphs.nodes import input_of
from attnforge.export.sources.exported_program import open_program
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.precision import precision_named
from attnforge.runtime.backends.eager import outputs_of
from tests.support.idioms.accounts import ACCOUNTS, MODULES, Classes, Gated, UnusedOperator
from tests.support.idioms.catalogue import WIDTH
from tests.support.idioms.together import Exported, export

pytestmark = pytest.mark.xdist_group("accounts")

FP32 = precision_named("fp32")


@pytest.fixture(scope="module")
def modules() -> Exported:
    return export(MODULES, "static")


@pytest.mark.parametrize("kind", ACCOUNTS)
def test_sites_and_other_softmaxes(modules: Exported, kind: type[nn.Module]) -> None:
    sites, others = ACCOUNTS[kind]
    found = modules.sites_of(kind.__name__)
    assert len(found) == len(sites)
    for site, expected in zip(found, sites, strict=True):
        assert (site.reason is None) == (not expected) and expected in (site.reason or "")
    reasons = modules.others_of(kind.__name__)
    assert len(reasons) == len(others)
    assert all(any(expected in reason for reason in reasons) for expected in others)


def test_as_many_as_ran(modules: Exported) -> None:
    with counted(modules.module) as ran:
        modules.eager(modules.args)
    assert ran.total() == len(modules.sites) + len(modules.other_softmaxes)


def account_of(captured: Captured) -> Canonical:
    return canonicalize(captured.model, captured.without_effect, captured.lost)


def test_an_operator_whose_result_is_not_used_is_not_lost() -> None:
    account = account_of(capture(UnusedOperator().eval(), (torch.randn(2, 9, WIDTH),), None, FP32))
    assert [site.reason for site in account.sites] == [None]
    assert [*account.other_softmaxes.values()] == [WITHOUT_EFFECT]


def test_a_program_and_a_graph_have_the_account_of_their_module() -> None:
    x, shapes = torch.randn(2, 9, WIDTH), {"x": {0: Dim("batch", max=4)}}
    opened = open_program(export_program(Classes().eval(), (x,), dynamic_shapes=shapes))
    captured = capture(opened.module, opened.args, opened.dynamic_shapes, FP32)
    assert (captured.without_effect, captured.lost) == ([], [])
    without_names = captured.model.clone()
    for node in without_names.graph:  # as in a file that another exporter wrote
        node.metadata_props.clear()
    for name, account in (("ExportedProgram", account_of(captured)), ("graph", canonicalize(without_names))):
        assert [(site.name, site.reason) for site in account.sites] == [(name, None)]
        assert [*account.other_softmaxes] == [name]


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.forward = function


class Shared(nn.Module):
    """Blocks that have two names, and attention of which nothing is used."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))
        self.first, self.unused = self.blocks[0], nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        self.unused(x, x, x)
        for block in (*self.blocks, self.first):
            x = block(x, x, x)[0]
        return x


def test_blocks_with_two_names() -> None:
    captured = capture(Shared(), (torch.randn(2, 9, WIDTH),), None, FP32)
    account = account_of(captured)
    assert len(account.sites) == 3 and len(account.other_softmaxes) == 1 and captured.lost == []


def test_lost_by_the_exporter() -> None:
    """An exporter's fault is made by hand: the second site's values take the place of its output."""
    captured = capture(nn.Sequential(Gated(), Gated()), (torch.randn(2, 9, WIDTH),), None, FP32)
    assert captured.program is not None
    *_, second = (node for node in captured.model.graph if node.op_type == "Attention")
    ir.convenience.replace_all_uses_with(second.outputs[0], input_of(second, 2))
    captured.model.graph.remove(second)
    lost = missing(in_program(captured.program), in_graph(captured.model.graph))
    first, site = canonicalize(captured.model, lost=lost).sites
    assert (first.reason, site.name, site.reason) == (None, "1", LOST)


def test_flex_attention_and_compiled_code_are_counted() -> None:
    weigh = torch.compile(lambda x: x.softmax(-1) @ x.mT, backend="eager")
    module = Function(lambda x: (weigh(x), flex_attention(x[:, None], x[:, None], x[:, None])))
    with torch.inference_mode(), counted(module) as ran:
        outputs_of(module, [torch.randn(2, 5, 8)], torch.float32)
    assert ran == {"Function": 2}
