"""Truths and positions that are derived from constant arrays."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnforge.arrays import Array
from attnforge.export.attention.affine import KEY, ZERO, Affine, Atom, Variable
from attnforge.export.attention.constant_masks import truth_of
from attnforge.export.attention.constant_values import constant_at
from attnforge.export.attention.mask_numbers import Whole
from attnforge.export.attention.regions import Regions

STRUCTURES: dict[str, tuple[Callable[[Array, Array], Array], str]] = {
    "causal": (lambda i, j: i >= j, "band −∞ … 0"),
    "window": (lambda i, j: abs(i - j) <= 3, "band −3 … 3"),
    "window before, after": (lambda i, j: (j - i >= -4) & (j - i <= 1), "band −4 … 1"),
    "blocks": (lambda i, j: i // 4 == j // 4, "blocks of 4"),
    "two blocks": (lambda i, j: i // 8 == j // 8, "blocks of 8"),
    "shifted blocks": (lambda i, j: (i + 2) // 4 == (j + 2) // 4, "blocks of 4 (queries + 2, keys + 2)"),
    "block causal": (lambda i, j: i // 4 >= j // 4, "blocks of 4, −∞ … 0"),
    "blocks and the one before": (lambda i, j: (i // 4 - j // 4) * (i // 4 - j // 4 - 1) == 0, "blocks of 4, −1 … 0"),
    "chunks, causal": (lambda i, j: (i // 4 == j // 4) & (i >= j), "band −∞ … 0 and blocks of 4"),
    "prefix": (lambda i, j: (i >= j) | (j < 3), "keys 0 … 2 or band −∞ … 0"),
    "global": (lambda i, j: (abs(i - j) <= 2) | (i == 7) | (j == 7), "keys 7 … 7 or queries 7 … 7 or band −2 … 2"),
    "segments": (
        lambda i, j: (i >= 5) * 1 + (i >= 7) == (j >= 5) * 1 + (j >= 7),
        "keys 0 … 4 and queries 0 … 4 or keys 5 … 6 and queries 5 … 6 or keys 7 … ∞ and queries 7 … ∞",
    ),
}


def pairs(regions: Regions, shape: tuple[int, int]) -> Array:
    def number_of(atom: Atom) -> int:
        raise AssertionError(atom)

    flags, keys = np.zeros(shape, bool), np.arange(shape[1])
    for region in regions:
        starts, stops = region.keys_of(np.arange(shape[0]), shape[1], number_of)
        flags |= (keys >= starts[:, None]) & (keys < stops[:, None])
    return flags


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    make, text = STRUCTURES[name]
    i, j = np.ogrid[:16, :16]
    flags = make(i, j)
    truth = truth_of(flags)
    assert " or ".join(region.text() for region in truth.true.most) == text
    assert truth.is_exact and truth.false.is_exact
    np.testing.assert_array_equal(pairs(truth.true.most, (16, 16)), flags)
    np.testing.assert_array_equal(pairs(truth.false.most, (16, 16)), ~flags)


@given(st.data())
def test_both_bounds_hold(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(2, 9), st.integers(2, 9)))
    make, _ = data.draw(st.sampled_from(list(STRUCTURES.values())))
    flags = np.asarray(make(*np.ogrid[: shape[0], : shape[1]]), bool)
    for _ in range(data.draw(st.integers(0, 3))):
        flags[data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))] ^= True
    truth = truth_of(flags)
    for cover, wanted in ((truth.true, flags), (truth.false, ~flags)):
        assert (pairs(cover.most, shape) >= wanted).all() and (pairs(cover.least, shape) <= wanted).all()
        assert not cover.is_exact or (pairs(cover.most, shape) == wanted).all()


def test_samples_that_differ_are_bounded_by_all_of_them() -> None:
    i, j = np.ogrid[:8, :8]
    truth = truth_of(np.stack([i - j >= 0, i - j >= -2]))
    np.testing.assert_array_equal(pairs(truth.true.most, (8, 8)), i - j >= -2)
    np.testing.assert_array_equal(pairs(truth.true.least, (8, 8)), i - j >= 0)


def test_large_arrays_are_read_in_a_few_passes() -> None:
    i, j = np.ogrid[:4096, :4096]
    flags, start = (i >= j) & (i - j < 256), time.process_time()
    assert truth_of(flags).true.most[0].text() == "band −255 … 0"
    assert time.process_time() - start < 2


def test_indices_of_several_dims_are_distinguished() -> None:
    """Stacked sample and key indices, as GatherND takes them: in a static graph both are constants."""
    keys = np.arange(12)
    indices = np.stack([np.zeros(12, np.int64), keys], axis=-1)[None]
    largest = {Variable.KEY: Affine(11)}
    assert constant_at(indices, (ZERO, KEY, ZERO), largest) == Whole((ZERO,))
    assert constant_at(indices, (ZERO, KEY, ZERO + 1), largest) == Whole((KEY,))
