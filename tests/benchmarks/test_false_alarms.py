"""Correctly deployed models pass: a sample of the models that the experiment draws."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from attnforge.bundle import Case
from attnforge.model.registry import Example
from attnforge.precision import precision_named
from attnforge.runtime.decoding.schedules import SCHEDULES
from attnforge.runtime.parity.budget import judge
from attnforge.runtime.parity.comparison import Comparison
from benchmarks.experiments.false_alarms import (
    DRAWS,
    Outcome,
    draw_in_8_bits,
    figures_of,
    summary,
    table,
    tables,
    tried,
)
from tests.support.hostile_models import HOSTILE, draw_hostile, make_hostile
from tests.support.random_decoders import draw_decoder, make_decoder
from tests.support.random_models import KINDS, PRECISIONS, Recipe, draw

SEEDS = (1001, 1005, 1007, 1009, 1010, 1011, 1012, 1015)

HOSTILE_SEEDS = (16, 17, 31, 48, 152, 170, 1005, 1009)
"""Seeds that were rejected at some time, and others."""

DECODER_SEEDS = (2, 10)
"""Rotary positions and attention that updates its caches; learned positions and an unsupported head size."""

INT8_SEEDS = (2, 3, 4)
"""One of each kind that has products to quantise."""


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_right_is_not_rejected(seed: int) -> None:
    outcome = tried(draw(seed))
    assert outcome.refused is None and not outcome.not_held, outcome.text()
    assert outcome.comparisons and outcome.rejected == {}, outcome.text()


@pytest.mark.parametrize("seed", HOSTILE_SEEDS)
def test_what_is_right_is_not_rejected_where_inputs_are_hostile(seed: int) -> None:
    outcome = tried(draw_hostile(seed), make_hostile)
    assert outcome.refused is None and not outcome.not_held, outcome.text()
    assert outcome.comparisons and outcome.rejected == {}, outcome.text()


@pytest.mark.parametrize("seed", DECODER_SEEDS)
def test_what_is_right_is_not_rejected_of_decoders(seed: int) -> None:
    """Whole, token by token, in pieces, ragged, and cut and forked."""
    outcome = tried(draw_decoder(seed), make_decoder)
    assert outcome.refused is None and not outcome.not_held, outcome.text()
    assert outcome.rejected == {} and {c.schedule for c in outcome.comparisons["onnxruntime"]} == {None, *SCHEDULES}


@pytest.mark.parametrize("seed", INT8_SEEDS)
def test_what_is_right_is_not_rejected_in_8_bits(seed: int) -> None:
    outcome = tried(draw_in_8_bits(seed))
    assert outcome.refused is None and outcome.recipe.precision == "int8", outcome.text()
    assert outcome.comparisons["onnxruntime"] and outcome.rejected == {}, outcome.text()


def test_seeds_draw_every_kind_and_precision() -> None:
    for seeds, recipe_of, kinds in ((SEEDS, draw, KINDS), (HOSTILE_SEEDS, draw_hostile, HOSTILE)):
        recipes = [recipe_of(seed) for seed in seeds]
        assert {recipe.kind for recipe in recipes} == set(kinds)
        assert {recipe.precision for recipe in recipes} == set(PRECISIONS)


@pytest.mark.parametrize(("draw", "make"), DRAWS.values(), ids=DRAWS)
def test_a_seed_is_always_the_same_model(draw: Callable[[int], Recipe], make: Callable[[Recipe], Example]) -> None:
    one, other = make(draw(7)), make(draw(7))
    assert draw(7) == draw(7) != draw(8)
    for first, second in zip(
        (*one.module.parameters(), *one.args), (*other.module.parameters(), *other.args), strict=True
    ):
        assert torch.equal(first, second)


def test_what_is_said_of_them() -> None:
    """A rejection comes with its recipe; models that overflow or are refused are not rejections."""
    truth, case = np.ones(8), Case(name="normal-opt", sizes={}, kind="normal", seed=1)

    def judged(got: float, eager: float) -> list[Comparison]:
        return [judge(case, "output", truth * got, truth * eager, truth, precision_named("fp32"))]

    found = [
        Outcome(draw(0), comparisons={"onnxruntime": judged(1.0, 1.0)}),
        Outcome(draw(1), comparisons={"onnxruntime": judged(1.1, 1.0)}),
        Outcome(draw(2), comparisons={"onnxruntime": judged(np.inf, np.inf)}),
        Outcome(draw(3), refused="no"),
    ]
    figures = summary(found)
    made = {**figures_of({"usual": found}, 0, 4), "command": "run"}
    assert made["seeds"] == [0, 3] and table(made).count(", 1 rejected") == 1
    assert list(tables(made)) == ["false-alarms-usual"]
    assert figures["deployed"] == 2 and [one["seed"] for one in figures["rejected"]] == [1]
    assert figures["rejected"][0]["cases"][0].startswith("normal-opt/output: error 1e-1 is over the budget")
    assert [one["seed"] for one in figures["not_held"]] == [2] and figures["refused"][0]["why"] == "no"
    text = table({"draws": {"usual": figures, "hostile": figures}, "command": "run"})
    assert "2 usual models" in text and "2 hostile models" in text and text.count(", 1 rejected") == 2
