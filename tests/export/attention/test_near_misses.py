"""Graphs that are not attention, or not quite, stay as they are, with a reason."""

from __future__ import annotations

import re

import pytest

from tests.support.idioms.catalogue import EXAMPLE, inputs
from tests.support.idioms.near_misses import MISSES, NO_SITES, REASONS
from tests.support.idioms.together import Exported, Outputs, export, near

pytestmark = pytest.mark.xdist_group("near-misses")


@pytest.fixture(scope="module")
def misses() -> Exported:
    return export({**MISSES, **NO_SITES}, "static")


@pytest.fixture(scope="module")
def outputs(misses: Exported) -> tuple[Outputs, Outputs]:
    args = inputs(EXAMPLE["static"], seed=3)
    return misses.run(misses.for_onnxruntime("static"), args), misses.eager(args)


@pytest.mark.parametrize("name", MISSES)
def test_left_with_a_reason(misses: Exported, name: str) -> None:
    sites = misses.sites_of(name)
    assert sites
    for site in sites:
        assert site.node is None
        assert site.reason is not None and re.search(REASONS[name], site.reason), site.reason


def test_weights_by_a_softmax_and_another_function_are_one_site(misses: Exported) -> None:
    assert [site.written_as for site in misses.sites_of("signed_weights")] == ["Abs·Softmax·Mul"]


@pytest.mark.parametrize("name", NO_SITES)
def test_what_weights_no_values_is_no_site(misses: Exported, name: str) -> None:
    assert misses.sites_of(name) == []
    assert bool(misses.others_of(name)) == (name not in ("logits_of_pairs", "linear_attention"))


def test_nothing_is_attention_where_nothing_was_recognised(misses: Exported) -> None:
    assert [node.name for node in misses.captured.model.graph if node.op_type == "Attention"] == []


@pytest.mark.parametrize("name", [*MISSES, *NO_SITES])
def test_same_function(outputs: tuple[Outputs, Outputs], name: str) -> None:
    got, expected = outputs
    near(got[name], expected[name])
