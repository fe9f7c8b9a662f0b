"""A decoder's step behind a past, as diagnosis examines it where steps alone are wrong."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import CANONICAL, NEXT, Bundle
from attnforge.export.graphs.execute import in_float64
from attnforge.export.graphs.saving import load_graph


def behind(bundle: Bundle, feeds: Mapping[str, Array], place: int) -> dict[str, Array]:
    """Inputs of a step of one token, with caches as they are in float64.

    Args:
        bundle: with a cache.
        feeds: the model's inputs by name, whole sequences.
        place: of the first sample's token, or of the last one where there are fewer. Every further sample is at an
            earlier place, as far as there are such, so that samples that are mixed up show.

    Raises:
        NoDoublePath: an operator of the model is not computed in float64.
    """
    decoding, tokens = bundle.manifest.decoding, feeds[bundle.manifest.graph_inputs[0].name]
    assert decoding is not None
    place = min(place, tokens.shape[1] - 1)
    pasts = np.maximum(place - np.arange(len(tokens)), 0)
    caches = {
        spec.name: np.zeros((len(tokens), *(dim for dim in spec.dims[1:] if isinstance(dim, int))))
        for spec in decoding.tensors
    }
    if place:
        run = in_float64(load_graph(bundle, CANONICAL), [f"{name}{NEXT}" for name in caches])
        nothing = np.zeros(len(tokens), np.int64)
        filled = run({decoding.tokens: tokens[:, :place], decoding.past: nothing, **caches})
        for name, cache in caches.items():
            for sample, past in enumerate(pasts):
                cache[sample, :, :past] = filled[f"{name}{NEXT}"][sample, :, :past]
    following = tokens[np.arange(len(tokens)), pasts][:, None]
    return {decoding.tokens: following, decoding.past: pasts.astype(np.int64), **caches}
