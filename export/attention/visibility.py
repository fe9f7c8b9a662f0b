"""Which keys every query of a site may see, proved from the mask's graph.

The mask is read backwards (:mod:`.mask_reader`) into regions of queries and keys (:mod:`.regions`). They are never too
small: what cannot be proved to be hidden counts as visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.export.attention.affine import BATCH, HEAD, KEY, QUERY, Affine, Atom, Dim, Place, never_negative
from attnforge.export.attention.canonical import MASK_STEP
from attnforge.export.attention.indices import START, Index
from attnforge.export.attention.layout import LayoutError, Size, sizes_of
from attnforge.export.attention.mask_numbers import Between, Choice, Number, bounds, where
from attnforge.export.attention.mask_reader import Reader
from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.attention.regions import ALL, Region, Regions, visible
from attnforge.export.attention.truth import ALWAYS, NEVER, Kind, Largest, Truth, at_least_zero, unknown
from attnforge.export.graphs.nodes import input_of, optional_input

Silent = Literal["never", "empty", "mean"]


MOST_COUNTED = 2**16
"""Queries whose keys are counted; of more, as many are taken at equal distances."""


class Unsized(Exception):
    """The number of a size or scalar is not known before the model runs."""


@dataclass(frozen=True)
class Visibility:
    """What a site's mask leaves.

    Attributes:
        regions: every pair of a query and a key that may count is in one of these.
        residue: what the mask depends on beside them. Where it is empty, exactly the pairs in the regions are visible,
            nothing is added to their scores, and no mask has to be applied inside.
        silent: what a query gets of which no key in the regions is visible. `never`: there is no such query. `empty`:
            keys outside of the regions have a score of minus infinity, so that they never count, and the node says what
            such a query gets. `mean`: all its keys have one and the same very low number as their score, those outside
            too, so that it gets the mean of all values.
        n_q: how many queries there are.
        n_k: how many keys.
    """

    regions: Regions
    residue: frozenset[Kind]
    silent: Silent
    n_q: Affine
    n_k: Affine

    @property
    def is_full(self) -> bool:
        """Whether nothing is proved to be hidden."""
        return self.regions == ALL

    def text(self) -> str:
        """As `band −255 … 0, residue: padding`; a band is of the key's index minus the query's."""
        regions = " or ".join(region.text() for region in self.regions) or "nothing"
        return regions + (f", residue: {', '.join(sorted(self.residue))}" if self.residue else "")

    def share(self, sizes: Mapping[str, int]) -> float:
        """The share of all pairs that is in the regions.

        Args:
            sizes: of the symbolic dims.

        Raises:
            Unsized: a size is missing, or a bound is a number that only a run tells.
        """
        number_of = numbers_at(sizes)
        n_q, n_k = self.n_q.evaluate(number_of), self.n_k.evaluate(number_of)
        queries = np.unique(np.linspace(0, n_q - 1, min(n_q, MOST_COUNTED)).astype(np.int64))
        return visible(self.regions, queries, n_k, number_of) / (len(queries) * n_k) if n_q * n_k else 1.0


def numbers_at(sizes: Mapping[str, int]) -> Callable[[Atom], int]:
    """The numbers of sizes, where every symbol has its size in `sizes`."""

    def number_of(atom: Atom) -> int:
        if isinstance(atom, Dim):
            try:
                number = ir.SymbolicDim(atom.name).evaluate(sizes)
            except ValueError:
                number = None
            if isinstance(number, int):
                return number
        raise Unsized(f"{Affine.atom(atom).text()} is not known before it runs")

    return number_of


def visibility(node: ir.Node) -> Visibility:
    """What a canonical Attention node's mask, and its own causality, leave.

    Args:
        node: as :mod:`.canonical` has it.
    """
    query, key, mask = input_of(node, 0), input_of(node, 1), optional_input(node, 3)
    assert query.shape is not None and key.shape is not None
    n_q, n_k = Affine.dim(query.shape[2]), Affine.dim(key.shape[2])
    reader = Reader({Place.QUERY: n_q - 1, Place.KEY: n_k - 1})
    own = at_least_zero(QUERY - KEY, reader.largest) if node.attributes.get_int("is_causal", 0) else ALWAYS
    if mask is None:
        return Visibility(own.true.most, frozenset(), "empty", n_q, n_k)
    number = _total(reader, mask, query, key)
    seen = _shown(number, NEGLIGIBLE) & own
    leaves = _leaves(number) + ([] if own == ALWAYS else [Between(-inf, -inf)])
    residue = frozenset() if seen.true.is_exact else seen.kinds or frozenset({"pattern"})
    if any(leaf.most > NEGLIGIBLE and leaf != Between(0, 0) for leaf in leaves):
        residue |= {"bias"}
    silent = _silent(mask, leaves, seen, reader.largest)
    if silent is None:  # what a query without keys gets depends on the scores of all of them
        seen = _shown(number, -inf) & own
        return Visibility(seen.true.most, residue | {"bias"}, "empty", n_q, n_k)
    return Visibility(seen.true.most, residue, silent, n_q, n_k)


def _total(reader: Reader, mask: ir.Value, query: ir.Value, key: ir.Value) -> Number:
    """What a mask adds to scores; a boolean one adds minus infinity where it is False."""
    known = reader.read(mask, scores_index(mask, query, key))
    if isinstance(known, Truth):
        return Choice(known, Between(0, 0), Between(-inf, -inf))
    return known


def scores_index(mask: ir.Value, query: ir.Value, key: ir.Value) -> Index:
    """Where a mask is read for the score of a query and a key: by its dims, which broadcast to those of the scores."""
    try:
        have, full = sizes_of(mask), (*sizes_of(query)[:3], sizes_of(key)[2])
    except LayoutError:
        return ()
    places = (BATCH, HEAD, QUERY, KEY)

    def position(size: Size, whole: Size, place: Affine) -> Affine | None:
        if size == whole:
            return place if size != Size() else START
        return START if size == Size() else None  # a dynamic dim of another size may be 1 at run time

    triples = zip(have, full[4 - len(have) :], places[4 - len(have) :], strict=True)
    return tuple(position(*triple) for triple in triples)


def _shown(number: Number, hidden: float) -> Truth:
    """Where a number that is added to scores hides no key."""
    if isinstance(number, Choice):
        return where(number.condition, _shown(number.yes, hidden), _shown(number.no, hidden))
    ends = bounds(number)
    return NEVER if ends.most <= hidden else ALWAYS if ends.least > hidden else unknown("bias")


def _leaves(number: Number) -> list[Between]:
    if isinstance(number, Choice):
        return _leaves(number.yes) + _leaves(number.no)
    return [replace(bounds(number), is_number=True)]  # NaN shows no key that is hidden


# --- queries without keys ---------------------------------------------------------------------------------------------


def _silent(mask: ir.Value, leaves: list[Between], seen: Truth, largest: Largest) -> Silent | None:
    """What queries without keys get; None where it is neither nothing nor a mean."""
    hidden = {leaf for leaf in leaves if leaf.most <= NEGLIGIBLE}
    if hidden <= {Between(-inf, -inf)}:
        return "empty"
    if any(_sees_a_key(region, largest) for region in seen.true.least):
        return "never"
    if len(hidden) > 1 or any(leaf.least <= NEGLIGIBLE < leaf.most for leaf in leaves):
        return None
    (number,) = hidden
    return "mean" if number.least == number.most and _replaces(mask, number.most) else None


def _replaces(mask: ir.Value, number: float) -> bool:
    """Whether a mask puts a number in the place of scores: by its one step, or because scores vanish beside it."""
    node = mask.producer()
    if node is not None and node.metadata_props.get(MASK_STEP) == "fill":
        before = node.inputs[1]
        return before is not None and ir.convenience.get_const_tensor(before) is not None
    assert mask.dtype is not None
    if (node is not None and node.metadata_props.get(MASK_STEP) == "bias") or (
        mask.dtype.bitwidth < 32 and mask.dtype != ir.DataType.BFLOAT16
    ):
        return False
    return number <= 0.9 * float(ml_dtypes.finfo(mask.dtype.numpy()).min)  # type: ignore[no-untyped-call]


def _sees_a_key(region: Region, largest: Largest) -> bool:
    """Whether every query is proved to have a key in a region."""
    band, blocks = region.band, region.blocks
    if not region.queries.is_open:
        return False
    if not region.keys.is_open:  # a prefix of at least one key
        first, last = region.keys.least, region.keys.most
        return first is None and band.is_open and blocks is None and last is not None and never_negative(last)
    least, most = band.least, band.most
    if blocks is not None:  # the query's own key
        own = (
            blocks.query == blocks.key
            and not blocks.numbers.is_empty
            and _has_zero(blocks.numbers.least, blocks.numbers.most)
        )
        return own and _has_zero(least, most) and never_negative(largest[Place.KEY] - largest[Place.QUERY])
    reaches = most is None or never_negative(most - largest[Place.QUERY] + largest[Place.KEY])
    begins = least is None or never_negative(-least)
    return reaches and begins and (least is None or most is None or never_negative(most - least))


def _has_zero(least: Affine | None, most: Affine | None) -> bool:
    return (least is None or never_negative(-least)) and (most is None or never_negative(most))


__all__ = ["Region", "Unsized", "Visibility", "numbers_at", "visibility"]
