"""Random masks (:mod:`tests.support.random_masks`): what is proved of them holds for what ONNX Runtime computes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from attnforge.arrays import Array
from attnforge.export.attention.affine import Atom, Scalar
from attnforge.export.attention.masking import NEGLIGIBLE
from attnforge.export.attention.visibility import Visibility, numbers_at, visibility
from tests.support.random_graphs import Drawn
from tests.support.random_masks import LEAVES, RandomMask, drawn_mask


def regions_of(mask: RandomMask, visible: Visibility) -> Array:
    """`(n_q, n_k)`: the pairs in any region."""
    at_sizes = numbers_at(mask.sizes)

    def number_of(atom: Atom) -> int:
        return int(mask.inputs[str(atom.value.name)]) if isinstance(atom, Scalar) else at_sizes(atom)

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
    assert not shown[..., ~regions].any(), visible.text()
    if not visible.residue:
        assert (shown == regions).all() and (numbers[shown] == 0).all(), visible.text()
    if visible.silent == "never":
        assert (shown & regions).any(-1).all(), visible.text()
    if visible.silent == "mean":
        assert len(set(numbers[~shown].tolist())) <= 1, visible.text()
    event("exact" if not visible.residue else "bounded" if not visible.is_full else "nothing proved")
    event(visible.silent)
