"""The keys that every query of a site may see, proved from the mask's graph.

The mask is read backwards (:mod:`.reader`) into a set of queries and keys, which is described by regions
(:mod:`.regions`). The regions are never too small: what cannot be proved to be hidden counts as visible.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

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
from attnforge.export.masks.numbers import Between, Number
from attnforge.export.masks.reader import BOOL, Reader
from attnforge.export.masks.regions import ALL, Regions, fit, visible
from attnforge.export.masks.scores import INDICES, Kind, Scores

FullyMasked = Literal["never", "empty", "mean"]
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
    leaves = [Between(x.least, x.most) for _, x in arithmetic.parts(added)]
    seen = _shown(scores, added, NEGLIGIBLE)
    must = scores.pairs.subtract(scores.may(scores.opposite(seen)))
    residue: frozenset[Kind] = frozenset()
    if any(leaf.most > NEGLIGIBLE and leaf != Between(0, 0) for leaf in leaves):
        residue |= {"bias"}
    may = scores.may(seen)
    if not may.is_subset(must):
        kinds = {kind for name, (_, kind) in scores.opaque.items() if scores.depends_on(seen, name)}
        residue |= kinds or {"pattern"}
    always_sees_a_key = scores.pairs.project_out(INDICES, 1, 1).is_subset(must.project_out(INDICES, 1, 1))
    fully_masked = _fully_masked(mask, leaves, always_sees_a_key)
    if fully_masked is None:  # what such a row gets depends on the scores of all its keys
        may = scores.may(_shown(scores, added, -inf))
        residue, fully_masked = residue | {"bias"}, "empty"
    regions, is_exact = fit(scores, may)
    if not is_exact:
        residue |= {"pattern"}
    return Visibility(regions, residue, fully_masked, n_q, n_k)


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
    for domain, bounds in added.rest:
        if bounds.most > hidden:
            shown = domain if bounds.least > hidden else domain.intersect(scores.unknown_condition((), "bias"))
            result = result.union(shown)
    return result


def _fully_masked(mask: ir.Value | None, leaves: list[Between], always_sees_a_key: bool) -> FullyMasked | None:
    """What fully masked rows get; None if it is none of the three cases."""
    hidden = {leaf for leaf in leaves if leaf.most <= NEGLIGIBLE}
    if mask is None or hidden <= {Between(-inf, -inf)}:
        return "empty"
    if always_sees_a_key:
        return "never"
    if len(hidden) > 1 or any(leaf.least <= NEGLIGIBLE < leaf.most for leaf in leaves):
        return None
    (number,) = hidden
    return "mean" if number.least == number.most and _replaces(mask, number.most) else None


def _replaces(mask: ir.Value, number: float) -> bool:
    """Whether a mask replaces scores by a number: with its only step, or because adding it absorbs the scores."""
    node = mask.producer()
    step = node.metadata_props.get(MASK_STEP) if node is not None else None
    if node is not None and step == "fill":
        return ir.convenience.get_const_tensor(input_of(node, 1)) is not None
    assert mask.dtype is not None
    if step == "bias" or (mask.dtype.bitwidth < 32 and mask.dtype != ir.DataType.BFLOAT16):
        return False
    return number <= 0.9 * float(ml_dtypes.finfo(mask.dtype.numpy()).min)  # type: ignore[no-untyped-call]
