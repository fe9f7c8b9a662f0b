"""A bias by distance (ALiBi) is recognised in every form and computed from positions; near misses are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.bundle import Decoding
from attnforge.errors import UsageError
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.decoding.distances import NotByDistance, TooFewPositions, evenly, slopes_of
from attnforge.export.decoding.insert import seen_of, with_cache
from attnforge.export.graphs.execute import in_float64
from attnforge.export.lowering.attention import Seen
from attnforge.export.lowering.onnxruntime import lower
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.sources.torch_module import capture
from attnforge.precision import PRECISIONS
from attnforge.runtime.backends.registry import why_not_here
from attnforge.runtime.parity.budget import relative_error
from tests.support.decoders import in_pieces
from tests.support.random_biases import FLAWS, RandomBias

WIDTH, HEADS, SHARED, WORDS, LONGEST = 32, 4, 2, 40, 64
SLOPES = (0.5, 0.25, 0.125, 0.0625)

Bias = Callable[["Biased", Tensor, Tensor], Tensor]
"""The bias that is added to scores `(batch, heads, tokens, tokens)`, from the module, its input and its queries."""


def causal(count: int) -> Tensor:
    return torch.ones(count, count, dtype=torch.bool).triu(1)


def hidden(bias: Tensor, count: int) -> Tensor:
    """A bias with later keys hidden."""
    return bias.masked_fill(causal(count), -math.inf)


class Biased(nn.Module):
    """One layer of causal attention with grouped heads and a bias that is added to the scores."""

    slopes: Tensor
    learned: Tensor
    table: Tensor
    crooked: Tensor
    pairs: Tensor
    holes: Tensor

    def __init__(self, bias: Bias) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.query, self.pair = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // HEADS * SHARED * 2)
        self.head, self.bias = nn.Linear(WIDTH, WORDS), bias
        slopes, positions = torch.tensor(SLOPES)[:, None, None], torch.arange(LONGEST)
        self.register_buffer("slopes", slopes)
        self.register_buffer("table", slopes * (positions - LONGEST + 1.0))
        self.register_buffer("crooked", slopes * (positions + 0.05 * (positions % 7 == 3)))
        self.register_buffer("pairs", slopes * (positions - positions[:, None]))
        is_far = (positions[:, None] - positions >= 5) & (positions > 0)
        self.register_buffer("holes", self.pairs.masked_fill(is_far, -math.inf))
        self.learned = nn.Parameter(torch.randn(HEADS, 1, LONGEST))

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.words(x)
        query = self.query(embedded).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key, value = (
            part.unflatten(-1, (SHARED, -1)).transpose(1, 2).repeat_interleave(HEADS // SHARED, 1)
            for part in self.pair(embedded).chunk(2, -1)
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1]) + self.bias(self, x, query)
        result: Tensor = self.head(embedded + (scores.softmax(-1) @ value).transpose(1, 2).flatten(2))
        return result


def positions(x: Tensor) -> Tensor:
    return torch.arange(x.shape[1])


def absolute(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(-module.slopes * (positions(x)[:, None] - positions(x)).abs(), x.shape[1])


def by_key(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden((module.slopes * positions(x)), x.shape[1])


def from_the_last(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    """The bias depends on the length, which is the same for all keys."""
    return hidden(module.slopes * (positions(x) + 1 - x.shape[1]), x.shape[1])


def of_a_table(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.table[:, :, -x.shape[1] :], x.shape[1])


def of_pairs(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.pairs[:, : x.shape[1], : x.shape[1]], x.shape[1])


def clamped(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    """Later keys would have no bias, but are hidden."""
    distance = (positions(x) - positions(x)[:, None]).clamp(max=0)
    return hidden(module.slopes * distance, x.shape[1])


def by_a_low_number(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    low = torch.zeros(x.shape[1], x.shape[1]).masked_fill(causal(x.shape[1]), torch.finfo(torch.float32).min)
    return low + (module.slopes * positions(x)).repeat(x.shape[0], 1, 1).view(x.shape[0], HEADS, 1, -1)


def with_computed_slopes(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    slopes = 2.0 ** -torch.arange(1.0, HEADS + 1)
    return hidden(slopes[:, None, None] * (positions(x) - positions(x)[:, None]), x.shape[1])


def within_a_window(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    distance = positions(x)[:, None] - positions(x)
    return hidden(-module.slopes * distance, x.shape[1]).masked_fill(distance >= 5, -math.inf)


def one_slope(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(0.5 * (positions(x) - positions(x)[:, None]), x.shape[1])


def by_query(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    """The same for all keys, so it is no bias."""
    return hidden(module.slopes * positions(x)[:, None], x.shape[1])


FORMS: dict[Bias, Seen] = {
    absolute: Seen(None, SLOPES),
    by_key: Seen(None, SLOPES),
    from_the_last: Seen(None, SLOPES),
    of_a_table: Seen(None, SLOPES),
    of_pairs: Seen(None, SLOPES),
    clamped: Seen(None, SLOPES),
    by_a_low_number: Seen(None, SLOPES),
    with_computed_slopes: Seen(None, SLOPES),
    within_a_window: Seen(5, SLOPES),
    one_slope: Seen(None, (0.5,) * HEADS),
    by_query: Seen(),
}


def step_of(bias: Bias, count: int = LONGEST) -> tuple[Decoding, ir.Model, list[Site], ir.Model]:
    """The record, graph and sites of a step, and the graph for whole sequences."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, args = Biased(bias).eval(), (torch.randint(0, WORDS, (2, 9)),)
    shapes = ({0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=32)},)
    captured = capture(module, args, shapes, PRECISIONS["fp32"])
    sites = canonicalize(captured.model).sites
    whole = captured.model.clone()
    return with_cache(captured.model, sites, captured.inputs, captured.outputs, count), captured.model, sites, whole


@pytest.mark.parametrize("bias", FORMS)
def test_a_bias_by_distance_is_computed_from_positions(bias: Bias) -> None:
    decoding, step, sites, whole = step_of(bias)
    (node,) = (node for node in step.graph if node.op_type == "Attention")
    assert Seen.of(node) == FORMS[bias] and decoding.caches[0].window == FORMS[bias].window
    ids = np.random.default_rng(0).integers(0, WORDS, (2, 24))
    (expected,) = in_float64(whole)({decoding.tokens: ids}).values()
    assert relative_error(in_pieces(step, ids, (9, 14, 15, 24), decoding), expected) < 1e-12
    lower(step, sites, {"batch": 2, "tokens": 9})
    assert [node.op_type for node in step.graph].count("GroupQueryAttention") == 1
    assert relative_error(in_pieces(step, ids, (9, 14, 15, 24), decoding), expected) < 1e-12


# --- near misses ------------------------------------------------------------------------------------------------------


def of_data(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    """Slopes that depend on the tokens."""
    return hidden(query.mean(-1, keepdim=True) * positions(x), x.shape[1])


def of_ids(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    """Padding tokens do not count as positions."""
    return hidden(module.slopes * (x != 0).cumsum(-1)[:, None, None], x.shape[1])


def over_the_length(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.slopes * (positions(x) / x.shape[1]), x.shape[1])


def of_learned(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.learned[:, :, : x.shape[1]], x.shape[1])


def nearly_even(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.crooked[:, :, : x.shape[1]], x.shape[1])


def by_the_root(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(-module.slopes * (positions(x)[:, None] - positions(x)).abs().sqrt(), x.shape[1])


def in_steps(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.slopes * (positions(x) // 2), x.shape[1])


def up_to_a_distance(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.slopes * (positions(x) - positions(x)[:, None]).clamp(min=-8), x.shape[1])


def steeper_by_query(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.slopes * positions(x) * positions(x)[:, None], x.shape[1])


def with_a_sink(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.slopes * positions(x) + 3.0 * (positions(x) == 0), x.shape[1])


def in_a_table_with_holes(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return hidden(module.holes[:, : x.shape[1], : x.shape[1]], x.shape[1])


def not_hidden(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return module.slopes * positions(x)


def barely_hidden(module: Biased, x: Tensor, query: Tensor) -> Tensor:
    return module.slopes * positions(x) - 100.0 * causal(x.shape[1])


NEAR: dict[Bias, str] = {
    of_data: "it multiplies two numbers that differ by position|is computed by",
    of_ids: "is computed by CumSum",
    over_the_length: "it divides by a number that differs by position",
    of_learned: "is a table whose steps are not equal",
    nearly_even: "is a table whose steps are not equal",
    by_the_root: "is computed by (Sqrt|Pow)",
    in_steps: "is computed by|is rounded to integers|depends on more",
    up_to_a_distance: "it is not one line over the visible keys",
    steeper_by_query: "it multiplies two numbers that differ by position",
    with_a_sink: "it is not one line over the visible keys",
    in_a_table_with_holes: "is a table whose steps are not equal",
    not_hidden: "Biased is bidirectional",
    barely_hidden: "it is not one line over the visible keys",
}


@pytest.mark.parametrize("bias", NEAR)
def test_near_misses_are_refused(bias: Bias) -> None:
    with pytest.raises(UsageError, match=NEAR[bias]):
        step_of(bias)


@pytest.mark.parametrize("bias", [of_a_table, of_pairs])
def test_a_table_of_biases_that_ends_before_the_cache(bias: Bias) -> None:
    with pytest.raises(UsageError, match="give a smaller cache_tokens"):
        step_of(bias, LONGEST + 1)


@pytest.mark.parametrize("slope", [0.3, 0.07])
def test_even_low_bit_tables(slope: float) -> None:
    table = (5 - slope * np.arange(40.0)).astype(np.float16)
    fitted = evenly(table, 2.0**-10)
    assert fitted is not None
    first, (step,) = fitted
    assert np.allclose(step, -slope, rtol=1e-3) and np.allclose(first, 5, rtol=1e-3)
    table = (-slope * np.arange(40.0)).astype(np.float16).astype(np.float64)
    table[3] *= 1.01  # far below the rounding error of the largest numbers
    assert evenly(table, 2.0**-10) is None


# --- random biases ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(100))
def test_a_random_bias_by_distance_is_found(seed: int) -> None:
    bias = RandomBias.draw(seed)
    left, slopes = slopes_of(bias.node, "tokens", bias.capacity)
    assert seen_of(bias.node, left) == Seen(bias.window)
    np.testing.assert_allclose(slopes, bias.slopes, rtol=1e-6 if bias.dtype == ir.DataType.FLOAT else 4e-3)


@pytest.mark.parametrize("seed", range(100))
def test_a_random_near_miss_is_refused(seed: int) -> None:
    bias = RandomBias.draw(seed, FLAWS[seed % len(FLAWS)])
    try:
        left, _ = slopes_of(bias.node, "tokens", bias.capacity)
    except (NotByDistance, TooFewPositions):
        return
    assert seen_of(bias.node, left) is None


# --- forms and backends -----------------------------------------------------------------------------------------------


def test_the_forms_that_read_a_cache_agree_on_a_bias() -> None:
    _, step, sites, _ = step_of(absolute)
    (site,) = lower(step, sites, {"batch": 1, "tokens": 9}, tuner=Tuner({"batch": 1, "tokens": 9}, 0.3))
    assert len(site.measured) == 3 and not site.dropped


@pytest.mark.parametrize(
    ("backend", "caches"), [("onnxruntime-cpu", None), ("openvino", None), ("onnxruntime-cpu", "int8")]
)
def test_a_window_and_a_bias_on_a_backend(backend: str, caches: str | None, tmp_path: Path) -> None:
    if (why := why_not_here(backend)) is not None:
        pytest.skip(why)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module, args = Biased(within_a_window).eval(), (torch.randint(0, WORDS, (2, 9)),)
    shapes = ({0: Dim("batch", min=1, max=4), 1: Dim("tokens", min=2, max=32)},)
    low: dict[str, Any] = {"cache_precision": caches, "data": [args], "max_error": 0.05} if caches else {}
    bundle = attnforge.deploy(
        module, args, tmp_path / "b", shapes, "fp32", ["onnxruntime"], tune=False, cache_tokens=LONGEST, **low
    )
    report = attnforge.verify(bundle, [backend]).backends[backend]
    assert report.passed, report.failures
