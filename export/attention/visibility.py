"""The keys that every query of a site may see, proved from the mask's graph.

The mask is read backwards (:mod:`.mask_reader`) into regions of queries and keys (:mod:`.regions`). The regions are
never too small: what cannot be proved to be hidden counts as visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Literal

import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.export.attention.affine import BATCH, HEAD, KEY, QUERY, Affine, Atom, Dim, Variable, never_negative
from attnforge.export.attention.canonical import MASK_STEP
from attnforge.export.attention.indices import START, Index
from attnforge.export.attention.layout import LayoutError, Size, sizes_of
from attnforge.export.attention.mask_numbers import Between, Choice, Number, bounds, where
from attnforge.export.attention.mask_reader import Reader
from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.attention.regions import ALL, Region, Regions, visible
from attnforge.export.attention.truth import ALWAYS, NEVER, Kind, Largest, Truth, at_least_zero, unknown
from attnforge.export.graphs.nodes import input_of, optional_input

FullyMasked = Literal["never", "empty", "mean"]

MOST_COUNTED = 2**16
"""Maximum number of queries whose keys are counted; of more queries, this many are sampled at equal distances."""


class Unsized(Exception):
    """The number of a size or scalar is not known before the model runs."""


@dataclass(frozen=True)
class Visibility:
    """The pairs of a query and a key that a site's mask leaves visible.

    Attributes:
        regions: regions that contain every visible pair.
        residue: what the mask depends on apart from the regions. If it is empty, exactly the pairs in the regions are
            visible, nothing is added to their scores, and no mask has to be applied inside the regions.
        silent: what a fully masked row gets, whose query sees no key in the regions. `never`: there is no such row.
            `empty`: keys outside the regions have a score of minus infinity and never count, and the node's metadata
            says what the row gets. `mean`: all keys of the row, those outside the regions too, have the same very low
            score, so that the row gets the mean of all values.
        n_q: number of queries.
        n_k: number of keys.
    """

    regions: Regions
    residue: frozenset[Kind]
    silent: FullyMasked
    n_q: Affine
    n_k: Affine

    @property
    def is_full(self) -> bool:
        """Whether nothing is proved to be hidden."""
        return self.regions == ALL

    def text(self) -> str:
        """Format it as in `band −255 … 0, residue: padding`; a band is a range of the key's index minus the query's."""
        regions = " or ".join(region.text() for region in self.regions) or "nothing"
        return regions + (f", residue: {', '.join(sorted(self.residue))}" if self.residue else "")

    def share(self, sizes: Mapping[str, int]) -> float:
        """The share of all pairs that is in the regions.

        Args:
            sizes: sizes of the symbolic dims.

        Raises:
            Unsized: a size is missing, or a bound is a number that is known only at run time.
        """
        number_of = numbers_at(sizes)
        n_q, n_k = self.n_q.evaluate(number_of), self.n_k.evaluate(number_of)
        queries = np.unique(np.linspace(0, n_q - 1, min(n_q, MOST_COUNTED)).astype(np.int64))
        return visible(self.regions, queries, n_k, number_of) / (len(queries) * n_k) if n_q * n_k else 1.0


def numbers_at(sizes: Mapping[str, int]) -> Callable[[Atom], int]:
    """A function that gives the number of an atom, given the sizes of all symbols."""

    def number_of(atom: Atom) -> int:
        if isinstance(atom, Dim):
            try:
                number = ir.SymbolicDim(atom.name).evaluate(sizes)
            except ValueError:
                number = None
            if isinstance(number, int):
                return number
        raise Unsized(f"{Affine.atom(atom).text()} is not known before the model runs")

    return number_of


def visibility(node: ir.Node) -> Visibility:
    """The pairs that a canonical Attention node's mask and causality leave visible.

    Args:
        node: a canonical node (:mod:`.canonical`).
    """
    query, key, mask = input_of(node, 0), input_of(node, 1), optional_input(node, 3)
    assert query.shape is not None and key.shape is not None
    n_q, n_k = Affine.dim(query.shape[2]), Affine.dim(key.shape[2])
    reader = Reader({Variable.QUERY: n_q - 1, Variable.KEY: n_k - 1})
    causal = at_least_zero(QUERY - KEY, reader.largest) if node.attributes.get_int("is_causal", 0) else ALWAYS
    if mask is None:
        return Visibility(causal.true.most, frozenset(), "empty", n_q, n_k)
    number = _total(reader, mask, query, key)
    seen = _shown(number, NEGLIGIBLE) & causal
    leaves = _leaves(number) + ([] if causal == ALWAYS else [Between(-inf, -inf)])
    residue = frozenset() if seen.true.is_exact else seen.kinds or frozenset({"pattern"})
    if any(leaf.most > NEGLIGIBLE and leaf != Between(0, 0) for leaf in leaves):
        residue |= {"bias"}
    fully_masked = _fully_masked(mask, leaves, seen, reader.largest)
    if fully_masked is None:  # what such a row gets depends on the scores of all its keys
        seen = _shown(number, -inf) & causal
        return Visibility(seen.true.most, residue | {"bias"}, "empty", n_q, n_k)
    return Visibility(seen.true.most, residue, fully_masked, n_q, n_k)


def _total(reader: Reader, mask: ir.Value, query: ir.Value, key: ir.Value) -> Number:
    """The number that a mask adds to scores; a boolean mask adds minus infinity where it is False."""
    known = reader.read(mask, scores_index(mask, query, key))
    if isinstance(known, Truth):
        return Choice(known, Between(0, 0), Between(-inf, -inf))
    return known


def scores_index(mask: ir.Value, query: ir.Value, key: ir.Value) -> Index:
    """The index at which a mask is read for a score: its dims broadcast to those of the scores."""
    try:
        have, full = sizes_of(mask), (*sizes_of(query)[:3], sizes_of(key)[2])
    except LayoutError:
        return ()
    variables = (BATCH, HEAD, QUERY, KEY)

    def position(size: Size, whole: Size, variable: Affine) -> Affine | None:
        if size == whole:
            return variable if size != Size() else START
        return START if size == Size() else None  # a dynamic dim of another size may be 1 at run time

    triples = zip(have, full[4 - len(have) :], variables[4 - len(have) :], strict=True)
    return tuple(position(*triple) for triple in triples)


def _shown(number: Number, hidden: float) -> Truth:
    """The condition for a number that is added to scores to be above `hidden`."""
    if isinstance(number, Choice):
        return where(number.condition, _shown(number.yes, hidden), _shown(number.no, hidden))
    ends = bounds(number)
    return NEVER if ends.most <= hidden else ALWAYS if ends.least > hidden else unknown("bias")


def _leaves(number: Number) -> list[Between]:
    if isinstance(number, Choice):
        return _leaves(number.yes) + _leaves(number.no)
    return [replace(bounds(number), is_number=True)]  # NaN does not make a hidden key visible


# --- fully masked rows ------------------------------------------------------------------------------------------------


def _fully_masked(mask: ir.Value, leaves: list[Between], seen: Truth, largest: Largest) -> FullyMasked | None:
    """What fully masked rows get; None if it is none of the three cases."""
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
    """Whether a mask replaces scores by a number: with its only step, or because adding it absorbs the scores."""
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
    if not region.keys.is_open:  # only a prefix of at least one key
        first, last = region.keys.least, region.keys.most
        return first is None and band.is_open and blocks is None and last is not None and never_negative(last)
    least, most = band.least, band.most
    if blocks is not None:  # the query's own key
        in_own_block = (
            blocks.query == blocks.key
            and not blocks.numbers.is_empty
            and _has_zero(blocks.numbers.least, blocks.numbers.most)
        )
        return (
            in_own_block and _has_zero(least, most) and never_negative(largest[Variable.KEY] - largest[Variable.QUERY])
        )
    reaches = most is None or never_negative(most - largest[Variable.QUERY] + largest[Variable.KEY])
    begins = least is None or never_negative(-least)
    return reaches and begins and (least is None or most is None or never_negative(most - least))


def _has_zero(least: Affine | None, most: Affine | None) -> bool:
    return (least is None or never_negative(-least)) and (most is None or never_negative(most))


__all__ = ["Region", "Unsized", "Visibility", "numbers_at", "visibility"]
