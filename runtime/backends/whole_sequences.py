"""Whole sequences in steps: a backend that runs a decoder step, presented as one that runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import Manifest
from attnforge.errors import RunError
from attnforge.runtime.backends.backend import Backend, Memory
from attnforge.runtime.decoding.decoder import Decoder, Stepping
from attnforge.runtime.decoding.schedules import SCHEDULES
from attnforge.runtime.inputs import Shapes


class WholeSequences(Backend):
    """A backend of a decoder step that runs whole sequences, each with new caches.

    Args:
        backend: the backend of the step.
        manifest: the bundle's manifest.
    """

    def __init__(self, backend: Backend, manifest: Manifest) -> None:
        self.name = backend.name
        self._backend, self._manifest = backend, manifest

    def decoder(self, batch: int) -> Decoder:
        """A decoder for this many samples."""
        return Decoder(cast(Stepping, self._backend), self._manifest, batch)

    def by_schedule(self, name: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The model's outputs by name if a decoder receives the tokens by one of :data:`SCHEDULES`; and, by the names
        of caches, the keys and values that they contain afterwards, `(batch, key heads, tokens, size)`.

        Raises:
            RunError: the caches contain a different number of tokens than were given.
        """
        (tokens,) = feeds.values()
        answers, decoder = SCHEDULES[name](self.decoder(len(tokens)), tokens)
        if (decoder.lengths != tokens.shape[1]).any():
            raise RunError(
                f"the caches contain {decoder.lengths.tolist()} tokens, and {tokens.shape[1]} were given to each"
            )
        cached = [decoder.cached(sample) for sample in range(len(tokens))]
        return {
            **{output: np.stack(samples) for output, samples in answers.items()},
            **{cache: np.stack([sample[cache] for sample in cached]) for cache in cached[0]},
        }

    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        (tokens,) = feeds.values()
        answers = self.decoder(len(tokens)).extend(list(tokens))
        return [np.stack(answers[spec.name]) for spec in self._manifest.outputs]

    def memory(self) -> Memory:
        return self._backend.memory()

    def keep(self) -> None:
        self._backend.keep()

    def close(self) -> None:
        self._backend.close()


def as_model(backend: Backend, manifest: Manifest) -> Backend:
    """The backend that runs a bundle's model: the backend itself, or its steps one after another."""
    return backend if manifest.decoding is None else WholeSequences(backend, manifest)
