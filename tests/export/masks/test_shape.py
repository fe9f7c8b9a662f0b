"""Regions that are read from sets of queries and keys contain all pairs of the sets."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import islpy as isl
import numpy as np
from hypothesis import event, given
from hypothesis import strategies as st

from attnforge.arrays import Array
from attnforge.export.masks.affine import Affine, Atom, Dim
from attnforge.export.masks.regions import MOST_REGIONS, Blocks, Interval, PairRegion, Regions, fit, pairs_of, visible
from attnforge.export.masks.scores import Scores

NUMBERS = {"m": 3, "n": 7}


def number_of(atom: Atom) -> int:
    assert isinstance(atom, Dim)
    return NUMBERS[atom.name]


def ends() -> st.SearchStrategy[Affine | None]:
    numbers = st.integers(-4, 9).map(Affine)
    sizes = st.builds(lambda name, n: Affine.atom(Dim(name)) + n, st.sampled_from(list(NUMBERS)), st.integers(-6, 2))
    return st.one_of(st.none(), numbers, numbers, sizes)


def intervals() -> st.SearchStrategy[Interval]:
    return st.one_of(st.just(Interval()), st.builds(Interval, ends(), ends()))


def regions() -> st.SearchStrategy[Regions]:
    shifts = st.integers(-2, 2).map(Affine)
    blocks = st.one_of(st.none(), st.builds(Blocks, st.integers(1, 4), shifts, shifts, intervals()))
    region = st.builds(PairRegion, intervals(), blocks, intervals(), intervals())
    return st.lists(region, min_size=1, max_size=3).map(tuple)


def pairs(union: Regions, queries: Array | None = None, n_k: int = 9) -> Array:
    queries = np.arange(8) if queries is None else queries
    flags, keys = np.zeros((len(queries), n_k), bool), np.arange(n_k)
    for region in union:
        starts, stops = region.keys_of(queries, n_k, number_of)
        flags |= (keys >= starts[:, None]) & (keys < stops[:, None])
    return flags


@given(regions(), regions())
def test_regions_contain_all_pairs_of_a_set(a: Regions, b: Regions) -> None:
    scores = Scores(Affine(8), Affine(9))
    first, second = (reduce(isl.Set.union, (pairs_of(scores, region) for region in union)) for union in (a, b))
    conditions: list[tuple[Callable[[], isl.Set], Array]] = [
        (lambda: first, pairs(a)),
        (lambda: scores.opposite(first), ~pairs(a)),
        (lambda: first.union(second), pairs(a) | pairs(b)),
        (lambda: first.subtract(second), pairs(a) & ~pairs(b)),
    ]
    for condition, wanted in conditions:
        scores.context.reset_operations()
        try:
            found, is_exact = fit(scores, scores.may(condition()))
        except isl.Error:
            event("too large")
            continue
        event("exact" if is_exact else "bounded")
        assert (pairs(found) >= wanted).all() and len(found) <= MOST_REGIONS
        assert not is_exact or (pairs(found) == wanted).all()
    assert visible(a, np.arange(8), 9, number_of) == pairs(a).sum()


def test_blocks_before_a_quotient_of_the_size_are_exact() -> None:
    """isl leaves the quotient of the key in the constraint."""
    size = Affine.atom(Dim("n"))
    scores = Scores(Affine(8), size)
    key = scores.key.div(scores.constant(8)).floor()
    found, is_exact = fit(scores, scores.may(key.lt_set(scores.whole(size.floor_divided(8)))))
    assert is_exact
    for n_k, shown in ((7, 0), (8, 8), (23, 16)):
        NUMBERS["n"], before = n_k, NUMBERS["n"]
        try:
            assert pairs(found, n_k=n_k).sum(1).tolist() == [shown] * 8
        finally:
            NUMBERS["n"] = before
