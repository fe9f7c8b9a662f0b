"""A decoder step after a past, as diagnosis examines it if only steps are wrong."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import CANONICAL, NEXT, Bundle
from attnforge.export.graphs.execute import in_float64
from attnforge.export.graphs.saving import load_graph


def step_inputs(bundle: Bundle, feeds: Mapping[str, Array], position: int) -> dict[str, Array]:
    """Inputs of a step of one token, with the caches computed in float64.

    Args:
        bundle: a bundle with a cache.
        feeds: the model's inputs by name, whole sequences.
        position: position of the first sample's token, limited to the last one. Every further sample is one position
            earlier, as far as possible, so that mixed-up samples show.

    Raises:
        NoDoublePath: an operator of the model cannot be computed in float64.
    """
    decoding, tokens = bundle.manifest.decoding, feeds[bundle.manifest.graph_inputs[0].name]
    assert decoding is not None
    position = min(position, tokens.shape[1] - 1)
    pasts = np.maximum(position - np.arange(len(tokens)), 0)
    caches = {
        spec.name: np.zeros((len(tokens), *(dim for dim in spec.dims[1:] if isinstance(dim, int))))
        for spec in decoding.tensors
    }
    first = {} if decoding.kept is None else {decoding.kept: np.zeros(1, np.int64)}
    if position:
        run = in_float64(load_graph(bundle, CANONICAL), [f"{name}{NEXT}" for name in caches])
        nothing = np.zeros(len(tokens), np.int64)
        filled = run({decoding.tokens: tokens[:, :position], decoding.past: nothing, **first, **caches})
        for name, cache in caches.items():
            for sample, past in enumerate(pasts):
                cache[sample, :, :past] = filled[f"{name}{NEXT}"][sample, :, :past]
    following = tokens[np.arange(len(tokens)), pasts][:, None]
    return {decoding.tokens: following, decoding.past: pasts.astype(np.int64), **first, **caches}
