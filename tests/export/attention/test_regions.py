"""Unions of regions are outer or inner bounds of what they are computed from."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attnforge.arrays import Array
from attnforge.export.attention.affine import Affine, Atom, Dim
from attnforge.export.attention.regions import (
    MOST_REGIONS,
    Blocks,
    Interval,
    Region,
    Regions,
    both,
    either,
    visible,
    without,
)

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
    region = st.builds(Region, intervals(), blocks, intervals(), intervals())
    return st.lists(region, min_size=1, max_size=4).map(tuple)


def pairs(union: Regions, queries: Array | None = None, n_k: int = 9) -> Array:
    queries = np.arange(8) if queries is None else queries
    flags, keys = np.zeros((len(queries), n_k), bool), np.arange(n_k)
    for region in union:
        starts, stops = region.keys_of(queries, n_k, number_of)
        flags |= (keys >= starts[:, None]) & (keys < stops[:, None])
    return flags


def bounded(operation: Callable[..., Regions], operands: tuple[Regions, ...], wanted: Array) -> None:
    outer, inner = operation(*operands, "outer"), operation(*operands, "inner")
    assert (pairs(outer) >= wanted).all() and (pairs(inner) <= wanted).all()
    assert len(outer) <= MOST_REGIONS and len(inner) <= MOST_REGIONS


@given(regions(), regions())
def test_unions_intersections_and_opposites_are_bounds(a: Regions, b: Regions) -> None:
    bounded(either, (a, b), pairs(a) | pairs(b))
    bounded(both, (a, b), pairs(a) & pairs(b))
    bounded(without, (a,), ~pairs(a))
    assert visible(a, np.arange(8), 9, number_of) == pairs(a).sum()


@given(regions(), st.integers(0, 3), st.integers(0, 3))
def test_moved_regions_have_the_pairs_whose_moved_indices_are_in_them(a: Regions, query: int, key: int) -> None:
    moved = tuple(region.moved(Affine(query), Affine(key)) for region in a)
    np.testing.assert_array_equal(pairs(moved), pairs(a, np.arange(query, query + 8), 9 + key)[:, key:])
