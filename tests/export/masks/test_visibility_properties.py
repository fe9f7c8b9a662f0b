"""Random masks (:mod:`tests.support.random_masks`): their proved visibility is true of what ONNX Runtime computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar
from unittest.mock import patch

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from attnforge.arrays import Array
from attnforge.export.attention.canonical import MASK_STEP
from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.graphs.sizes import Size
from attnforge.export.masks import scores
from attnforge.export.masks.affine import Atom, Scalar
from attnforge.export.masks.visibility import FAR_BELOW, Visibility, numbers_at, visibility
from tests.support.random_graphs import BOOL, FLOAT, INT64, Drawn
from tests.support.random_masks import KEYS, LEAVES, QUERIES, MaskWriter, RandomMask, drawn_mask

FLOAT16 = ir.DataType.FLOAT16
T = TypeVar("T")


def regions_of(mask: RandomMask, visible: Visibility) -> Array:
    """`(n_q, n_k)`: the pairs in any region."""
    at_sizes = numbers_at(mask.sizes)

    def number_of(atom: Atom) -> int:
        return mask.scalar(atom) if isinstance(atom, Scalar) else at_sizes(atom)

    assert visible.n_q.evaluate(number_of) == mask.n_q and visible.n_k.evaluate(number_of) == mask.n_k
    pairs, keys = np.zeros((mask.n_q, mask.n_k), bool), np.arange(mask.n_k)
    for region in visible.regions:
        starts, stops = region.keys_of(np.arange(mask.n_q), mask.n_k, number_of)
        pairs |= (keys >= starts[:, None]) & (keys < stops[:, None])
    return pairs


@pytest.mark.parametrize("leaf", ["", *LEAVES])
@settings(max_examples=settings().max_examples * 2 // 5)
@given(data=st.data())
def test_no_visible_key_is_hidden_and_no_residue_means_equal(leaf: str, data: st.DataObject) -> None:
    mask = drawn_mask(Drawn(data), leaf)
    visible = visibility(mask.node)
    numbers = mask.numbers()
    if mask.node.attributes["is_causal"].as_int():
        numbers = np.where(np.tri(mask.n_q, mask.n_k, dtype=bool), numbers, -np.inf)
    regions, shown = regions_of(mask, visible), numbers > NEGLIGIBLE
    if visible.silent == "empty":
        assert (numbers == -np.inf)[..., ~regions].all(), visible.text()
    else:
        inside = np.where(regions, numbers, -np.inf).max(-1, keepdims=True)
        hidden = (numbers <= inside + NEGLIGIBLE) | (~shown & (inside > NEGLIGIBLE)) | (numbers == -np.inf)
        hidden |= (visible.silent == "mean") & (numbers == numbers[..., :1]).all(-1, keepdims=True)
        assert hidden[..., ~regions].all(), visible.text()
    assert not shown[..., ~regions].any(), visible.text()
    above = [numbers > threshold for threshold in (NEGLIGIBLE, FAR_BELOW)]
    if visible.silent == "never":
        assert any((seen & regions).any(-1).all() for seen in above), visible.text()
    if visible.silent == "mean":
        assert any(len(set(numbers[~seen].tolist())) <= 1 for seen in above), visible.text()
    if not visible.residue:
        assert (shown == regions).all() and (numbers[shown] == 0).all(), visible.text()
    event("exact" if not visible.residue else "bounded" if not visible.is_full else "nothing proved")
    event(visible.silent)


class First:
    """Always makes the first choice, and says no."""

    def pick(self, options: Sequence[T]) -> T:
        return options[0]

    def chance(self, percent: int) -> bool:
        return False


def proved(write: Callable[[MaskWriter], ir.Value], tokens: int = 0) -> str:
    """The proved visibility of a mask of as many keys as queries: `tokens`, or any number."""
    n, two = Size(tokens) if tokens else Size(1, ("n",)), Size(2)
    g = MaskWriter(First(), size=(n, n))
    query, key = (g.input(name, [two, two, n, two]) for name in ("query", "key"))
    return visibility(ir.node("Attention", [query, key, key, write(g)], {"scale": 1.0})).text()


@pytest.mark.parametrize(("least", "known"), [(None, "band −∞ … 0"), (3, "all, residue: padding")])
def test_a_running_sum_is_over_all_before_the_index(least: int | None, known: str) -> None:
    """A mask that compares `(arange(n + 5) >= least).cumsum()[5:]`, or a cumsum of ones, to the query's index."""

    def write(g: MaskWriter) -> ir.Value:
        longer = Size.of(ir.SymbolicDim("n + 5"))
        length = g.binary("Add", g.length(KEYS), g.number(5))
        x = g.op("Expand", [g.ints(1), g.unsqueeze(length, [0])], [longer], INT64)
        if least is not None:
            positions = g.op("Range", [g.number(0), length, g.number(1)], [longer], INT64)
            x = g.cast(g.binary("GreaterOrEqual", positions, g.number(least)), INT64)
        x = g.op("CumSum", [x, g.number(0)], [longer], INT64)
        x = g.op("Slice", [x, g.ints(5), g.ints(np.iinfo(np.int64).max), g.ints(0)], [g.size[KEYS]], INT64)
        query = g.op("Range", [g.number(0), g.length(QUERIES), g.number(1)], [g.size[QUERIES]], INT64)
        query = g.binary("Add", query, g.number(6 - (least or 0)))
        return g.binary("LessOrEqual", g.along(x, KEYS), g.along(query, QUERIES))

    assert proved(write) == known


def with_slope(g: MaskWriter, slope: float, visible: float, hidden: float) -> ir.Value:
    """Write a bias by distance: `slope · (key − query)`, added to a number for earlier keys and one for later ones."""
    query, key = (g.op("Range", [g.number(0), g.length(dim), g.number(1)], [g.size[dim]], INT64) for dim in (0, 1))
    distance = g.binary("Sub", g.along(key, KEYS), g.along(query, QUERIES))
    is_later = g.binary("Greater", distance, g.number(0))
    bias = g.binary("Mul", g.cast(distance, FLOAT), g.constant(slope))
    return g.binary("Add", g.where(is_later, g.constant(hidden), g.constant(visible)), bias)


@pytest.mark.parametrize(("hidden", "known"), [(float(np.finfo(np.float32).min), "band −∞ … 0"), (-1e4, "all")])
def test_a_bias_by_distance_shows_no_key_again_that_the_lowest_number_hides(hidden: float, known: str) -> None:
    assert proved(lambda g: with_slope(g, 0.5, 0.0, hidden)) == f"{known}, residue: bias"


def test_keys_that_a_steep_bias_hides_count_for_queries_without_others() -> None:
    known = proved(lambda g: with_slope(g, -2500.0, -20_000.0, -np.inf), 9)
    assert known == "band −∞ … 0, residue: bias"


def test_numbers_that_hide_keys_count_next_to_the_lowest_number() -> None:
    """Each query sees keys with −1e6, −2e6 and so on, which are no region without a residue."""
    lowest = float(np.finfo(np.float32).min)
    assert proved(lambda g: with_slope(g, 1e6, -1e6, lowest)) == "band −∞ … 0, residue: bias"


def test_a_bias_of_positions_that_are_counted_over_data_shows_no_key_again() -> None:
    """`slope · (mask.cumsum(-1) - 1) · mask`, added to 0 or the lowest number."""

    def write(g: MaskWriter) -> ir.Value:
        mask = g.input("mask", [g.size[KEYS]], INT64)
        counted = g.op("CumSum", [mask, g.number(0)], [g.size[KEYS]], INT64)
        counted = g.binary("Mul", g.binary("Sub", counted, g.number(1)), mask)
        bias = g.binary("Mul", g.along(g.cast(counted, FLOAT), KEYS), g.constant(0.5))
        return g.binary("Add", with_slope(g, 0.0, 0.0, float(np.finfo(np.float32).min)), bias)

    assert proved(write) == "band −∞ … 0, residue: bias"


@pytest.mark.parametrize("least", [np.iinfo(np.int32).min, np.iinfo(np.int64).min])
def test_integers_wrap_around(least: int) -> None:
    """Twice the least number of a type is 0, and so is that of int64 as an int32."""
    dtype = ir.DataType.INT32 if least == np.iinfo(np.int32).min else INT64

    def hidden(g: MaskWriter) -> ir.Value:
        query, key = (g.op("Range", [g.number(0), g.length(dim), g.number(1)], [g.size[dim]], INT64) for dim in (0, 1))
        is_later = g.binary("Greater", g.along(key, KEYS), g.along(query, QUERIES))
        return g.cast(g.where(is_later, g.number(int(least)), g.number(0)), dtype)

    assert proved(lambda g: g.cast(hidden(g), FLOAT)) == "band −∞ … 0"
    assert proved(lambda g: g.cast(g.binary("Add", x := hidden(g), x), FLOAT)) == "all, residue: bias"
    if dtype == INT64:
        assert proved(lambda g: g.cast(g.cast(hidden(g), ir.DataType.INT32), FLOAT)) == "all, residue: bias"


@pytest.mark.parametrize(
    ("number", "known"),
    [(-1e4, "all, residue: bias, padding, empty"), (float(np.finfo(np.float32).min), "all, residue: padding, mean")],
)
def test_a_number_that_is_added_and_filled_in_replaces_scores_if_it_absorbs_them(number: float, known: str) -> None:
    """Of a query without keys: where -1e4 was added, the scores count."""
    g = MaskWriter(First(), size=(Size(4), Size(4)))
    keep, real = (g.along(g.input(name, [g.size[KEYS]], BOOL), KEYS) for name in ("keep", "real"))
    added = g.where(keep, g.constant(0.0), g.constant(number))
    mask = g.where(real, added, g.constant(number))
    node = mask.producer()
    assert node is not None
    node.metadata_props[MASK_STEP] = "fill"
    query = g.input("query", [Size(2), Size(2), Size(4), Size(2)])
    visible = visibility(ir.node("Attention", [query, query, query, mask], {"scale": 1.0}))
    assert f"{visible.text()}, {visible.silent}" == known


def test_two_unknown_conditions_are_not_one() -> None:
    """The keys that one mask shows and another does not hide: not a condition and its opposite."""

    def write(g: MaskWriter) -> ir.Value:
        shown, hidden = (g.along(g.input(name, [g.size[KEYS]], BOOL), KEYS) for name in ("shown", "hidden"))
        zero, fill = g.constant(0.0), g.constant(-np.inf)
        return g.binary("Add", g.where(shown, zero, fill), g.where(hidden, fill, zero))

    assert proved(write) == "all, residue: padding"


@pytest.mark.parametrize(("op_type", "other"), [("Greater", 2048.0), ("Equal", 2049.0)])
def test_a_number_is_rounded_to_its_type(op_type: str, other: float) -> None:
    def write(g: MaskWriter) -> ir.Value:
        number = g.binary("Add", g.constant(2048.0, FLOAT16), g.constant(1.0, FLOAT16))  # 2048 in fp16
        return g.where(g.binary(op_type, number, g.constant(other, FLOAT16)), g.constant(0.0), g.constant(-np.inf))

    assert proved(write) == proved(lambda g: g.constant(0.0 if other == 2049 else -np.inf))


@given(data=st.data(), operations=st.integers(20, 6000))
def test_no_visible_key_is_hidden_where_the_operations_are_spent(data: st.DataObject, operations: int) -> None:
    mask = drawn_mask(Drawn(data))
    with patch.object(scores, "MOST_OPERATIONS", operations):
        visible = visibility(mask.node)
    shown = mask.numbers() > NEGLIGIBLE
    if mask.node.attributes["is_causal"].as_int():
        shown &= np.tri(mask.n_q, mask.n_k, dtype=bool)
    assert not shown[..., ~regions_of(mask, visible)].any(), visible.text()
    event("all pairs" if visible.is_full else "proved")
