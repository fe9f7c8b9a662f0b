"""Conditions and positions that are derived from constant arrays."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnforge.arrays import Array
from attnforge.export.masks.affine import Affine, Atom
from attnforge.export.masks.constants import constant_at
from attnforge.export.masks.numbers import Arithmetic, Number
from attnforge.export.masks.regions import Regions, fit
from attnforge.export.masks.scores import Scores

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
    "prefix": (lambda i, j: (i >= j) | (j < 3), "band −∞ … 0 or keys 0 … 2"),
    "global": (lambda i, j: (abs(i - j) <= 2) | (i == 7) | (j == 7), "band −2 … 2 or keys 7 … 7 or queries 7 … 7"),
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


def bounds(flags: Array) -> list[tuple[Regions, bool]]:
    """Regions that contain all pairs that an array shows or hides, in any of its samples, and whether they contain
    others."""
    scores = Scores(*(Affine(n) for n in flags.shape[-2:]))
    index = (scores.query, scores.key) if flags.ndim == 2 else (scores.head, scores.query, scores.key)
    shown = constant_at(Arithmetic(scores), flags, index)
    assert shown is not None and not isinstance(shown, Number)
    return [fit(scores, scores.may(condition)) for condition in (shown, scores.opposite(shown))]


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    make, text = STRUCTURES[name]
    i, j = np.ogrid[:16, :16]
    flags = make(i, j)
    (shown, is_exact), (hidden, is_opposite_exact) = bounds(flags)
    assert " or ".join(region.text() for region in shown) == text
    assert is_exact and is_opposite_exact
    np.testing.assert_array_equal(pairs(shown, (16, 16)), flags)
    np.testing.assert_array_equal(pairs(hidden, (16, 16)), ~flags)


@given(st.data())
def test_regions_contain_all_pairs(data: st.DataObject) -> None:
    shape = data.draw(st.tuples(st.integers(2, 9), st.integers(2, 9)))
    make, _ = data.draw(st.sampled_from(list(STRUCTURES.values())))
    flags = np.asarray(make(*np.ogrid[: shape[0], : shape[1]]), bool)
    for _ in range(data.draw(st.integers(0, 3))):
        flags[data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))] ^= True
    for (regions, _), wanted in zip(bounds(flags), (flags, ~flags), strict=True):
        assert (pairs(regions, shape) >= wanted).all()


def test_samples_that_differ_are_bounded_by_all_of_them() -> None:
    i, j = np.ogrid[:8, :8]
    (shown, _), (hidden, _) = bounds(np.stack([i - j >= 0, i - j >= -2]))
    np.testing.assert_array_equal(pairs(shown, (8, 8)), i - j >= -2)
    np.testing.assert_array_equal(pairs(hidden, (8, 8)), i - j < 0)


def test_large_arrays_are_read_in_a_few_passes() -> None:
    i, j = np.ogrid[:4096, :4096]
    flags, start = (i >= j) & (i - j < 256), time.process_time()
    (shown, _), _ = bounds(flags)
    assert shown[0].text() == "band −255 … 0"
    assert time.process_time() - start < 2


def test_indices_of_several_dims_are_distinguished() -> None:
    """Stacked sample and key indices, as GatherND takes them: in a static graph both are constants."""
    keys = np.arange(12)
    indices = np.stack([np.zeros(12, np.int64), keys], axis=-1)[None]
    scores = Scores(Affine(12), Affine(12))
    zero, one = scores.constant(0), scores.constant(1)
    for column, wanted in ((zero, zero), (one, scores.key)):
        number = constant_at(Arithmetic(scores), indices, (zero, scores.key, column))
        assert isinstance(number, Number) and number.whole.is_equal(wanted)
