"""The keys that every query of a site may see, proved from the mask's graph.

The mask is read backwards (:mod:`.reader`) into a set of queries and keys, which is described by regions
(:mod:`.regions`). The regions are never too small: what cannot be proved to be hidden counts as visible.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import islpy as isl
import ml_dtypes
import numpy as np
import onnx_ir as ir

from attnforge.export.attention.canonical import MASK_STEP
from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.graphs.nodes import input_of, optional_input
from attnforge.export.graphs.sizes import LayoutError, Size, Unmeasurable, evaluated, sizes_of
from attnforge.export.masks.affine import Affine, Atom, Dim
from attnforge.export.masks.indices import Index, aligned
from attnforge.export.masks.numbers import Arithmetic, Between, Number
from attnforge.export.masks.reader import BOOL, Reader
from attnforge.export.masks.regions import ALL, Regions, fit, visible
from attnforge.export.masks.scores import INDICES, Kind, Scores

FullyMasked = Literal["never", "empty", "mean"]
FAR_BELOW = -(2.0**90)
"""A number at or below which a key is hidden from a query that sees another, whatever bias is added to both: low enough
that no integer of 64 bits, multiplied by an ordinary slope, lifts a key above it."""

MOST_COUNTED = 2**16
"""Maximum number of queries whose keys are counted; of more queries, this many are sampled at equal distances."""


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
            Unmeasurable: a size is missing, or a bound is a number that is known only at run time.
        """
        number_of = numbers_at(sizes)
        n_q, n_k = self.n_q.evaluate(number_of), self.n_k.evaluate(number_of)
        queries = np.unique(np.linspace(0, n_q - 1, min(n_q, MOST_COUNTED)).astype(np.int64))
        return visible(self.regions, queries, n_k, number_of) / (len(queries) * n_k) if n_q * n_k else 1.0


def numbers_at(sizes: Mapping[str, int]) -> Callable[[Atom], int]:
    """A function that gives the number of an atom, given the sizes of all symbols."""

    def number_of(atom: Atom) -> int:
        if isinstance(atom, Dim):
            return evaluated(Size(symbols=(atom.name,)), sizes)
        raise Unmeasurable(f"{Affine.atom(atom).text()} is not known before the model runs")

    return number_of


def visibility(node: ir.Node) -> Visibility:
    """The pairs that a canonical Attention node's mask and causality leave visible.

    Args:
        node: a canonical node (:mod:`~attnforge.export.attention.canonical`).
    """
    query, key, mask = input_of(node, 0), input_of(node, 1), optional_input(node, 3)
    assert query.shape is not None and key.shape is not None
    n_q, n_k = Affine.dim(query.shape[2]), Affine.dim(key.shape[2])
    try:
        return _visibility(node, n_q, n_k)
    except isl.Error:  # the mask is too large to be read
        kinds: frozenset[Kind] = frozenset({"pattern"})
        if mask is not None and mask.dtype != BOOL:
            kinds |= {"bias"}
        return Visibility(ALL, kinds, "empty", n_q, n_k)


def _visibility(node: ir.Node, n_q: Affine, n_k: Affine) -> Visibility:
    mask = optional_input(node, 3)
    reader = Reader(n_q, n_k)
    scores, arithmetic = reader.scores, reader.arithmetic
    shown, hidden = arithmetic.constant(0), arithmetic.constant(-inf)
    known = shown if mask is None else reader.read(mask, scores_index(scores, mask, input_of(node), input_of(node, 1)))
    scores.context.reset_operations()
    added = arithmetic.choose(known, shown, hidden) if isinstance(known, isl.Set) else known
    if node.attributes.get_int("is_causal", 0):
        added = arithmetic.choose(scores.query.ge_set(scores.key), added, hidden)
    found = _above(NEGLIGIBLE, mask, added, arithmetic)
    if found.fully_masked is None:
        with contextlib.suppress(isl.Error):  # the operations are spent: what is found stays
            scores.context.reset_operations()
            far = _above(FAR_BELOW, mask, added, arithmetic)
            found = far if far.fully_masked in ("never", "mean") else found
    scores.context.reset_operations()
    may, residue, fully_masked = scores.may(found.seen), frozenset[Kind](), found.fully_masked
    if any(leaf.most > found.threshold and leaf != Between(0, 0) for leaf in found.leaves):
        residue |= {"bias"}
    if not may.is_subset(found.must):
        kinds = {kind for name, (_, kind) in scores.opaque.items() if scores.depends_on(found.seen, name)}
        residue |= kinds or {"pattern"}
    if fully_masked is None:  # what such a row gets depends on the scores of all its keys
        may = scores.may(_shown(scores, added, -inf))
        residue, fully_masked = residue | {"bias"}, "empty"
    regions, is_exact = fit(scores, may)
    if not is_exact:
        residue |= {"pattern"}
    return Visibility(regions, residue, fully_masked, n_q, n_k)


class _Above(NamedTuple):
    """The keys whose scores get more than a threshold; the others are hidden from queries that see one of them.

    Attributes:
        threshold: the threshold.
        seen: the condition for it.
        must: the pairs at which the condition is always True.
        leaves: bounds of what is added to scores; of integers, those above and below the threshold apart.
        fully_masked: what fully masked rows get; None if it is none of the three cases.
    """

    threshold: float
    seen: isl.Set
    must: isl.Set
    leaves: list[Between]
    fully_masked: FullyMasked | None


def _above(threshold: float, mask: ir.Value | None, added: Number, arithmetic: Arithmetic) -> _Above:
    scores = arithmetic.scores
    seen = _shown(scores, added, threshold)
    wholes = added.whole.intersect_domain(seen), added.whole.subtract_domain(seen)
    parts = [*added.rest, *(part for whole in wholes for part in arithmetic.parts(Number(whole)))]
    leaves = [Between(x.least, x.most) for _, x in parts]
    must = scores.pairs.subtract(scores.may(scores.opposite(seen)))
    always_sees_a_key = scores.pairs.project_out(INDICES, 1, 1).is_subset(must.project_out(INDICES, 1, 1))
    return _Above(threshold, seen, must, leaves, _fully_masked(mask, leaves, threshold, always_sees_a_key))


def scores_index(scores: Scores, mask: ir.Value, query: ir.Value, key: ir.Value) -> Index:
    """The index at which a mask is read for a score: its dims broadcast to those of the scores."""
    try:
        have, full = sizes_of(mask), (*sizes_of(query)[:3], sizes_of(key)[2])
    except LayoutError:
        return ()
    return aligned(scores, have, full, (scores.batch, scores.head, scores.query, scores.key))


def _shown(scores: Scores, added: Number, hidden: float) -> isl.Set:
    """The condition for what is added to scores to be above `hidden`."""
    result = added.whole.domain()
    if hidden != -inf:
        result = added.whole.gt_set(scores.constant(int(np.floor(hidden))))
    unclear = scores.never
    for domain, bounds in added.rest:
        if bounds.least > hidden:
            result = result.union(domain)
        elif bounds.most > hidden:
            unclear = unclear.union(domain)
    return result.union(unclear.coalesce().intersect(scores.unknown_condition((), "bias")))


def _fully_masked(
    mask: ir.Value | None, leaves: list[Between], threshold: float, always_sees_a_key: bool
) -> FullyMasked | None:
    """What fully masked rows get, whose keys are all at or below a threshold; None if it is none of the three cases."""
    hidden = {leaf for leaf in leaves if leaf.most <= threshold}
    if mask is None or hidden <= {Between(-inf, -inf)}:
        return "empty"
    if always_sees_a_key:
        if threshold == NEGLIGIBLE:
            return "never"
        shown = min((leaf.least for leaf in leaves if leaf.least > threshold), default=-inf)
        return "never" if shown - max(leaf.most for leaf in hidden) > -NEGLIGIBLE else None
    if len(hidden) > 1 or any(leaf.least <= threshold < leaf.most for leaf in leaves):
        return None
    (number,) = hidden
    return "mean" if number.least == number.most and _replaces(mask, number.most) else None


def _replaces(mask: ir.Value, number: float) -> bool:
    """Whether a mask replaces scores by a number: with its only step, or because the number absorbs them."""
    node = mask.producer()
    step = node.metadata_props.get(MASK_STEP) if node is not None else None
    if node is not None and step == "fill" and ir.convenience.get_const_tensor(input_of(node, 1)) is not None:
        return True
    assert mask.dtype is not None
    if step == "bias" or (mask.dtype.bitwidth < 32 and mask.dtype != ir.DataType.BFLOAT16):
        return False
    return number <= 0.9 * float(ml_dtypes.finfo(mask.dtype.numpy()).min)  # type: ignore[no-untyped-call]
