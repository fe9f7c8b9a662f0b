"""A Session as a Polygraphy runner.

Polygraphy's arrays are NumPy's or torch's. NumPy has no bfloat16, so such inputs and outputs are float32 here, which
represents them exactly.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from polygraphy.backend.base import BaseRunner
from polygraphy.common import TensorMetadata
from polygraphy.logger import G_LOGGER

from attnforge.arrays import BFLOAT16, to_numpy, without_bfloat16
from attnforge.bundle import DimSpec
from attnforge.errors import AttnforgeError
from attnforge.runtime.cases import shape_of, sizes_at
from attnforge.runtime.session import load


@contextmanager
def polygraphy_errors() -> Iterator[None]:
    """Turn attnforge's errors in the block into Polygraphy's: one line, without a traceback."""
    try:
        yield
    except AttnforgeError as error:
        G_LOGGER.critical(str(error))


class AttnforgeRunner(BaseRunner):  # type: ignore[misc]  # Polygraphy has no types
    """Runs a bundle.

    Args:
        bundle: folder of the bundle.
        backend: as in :func:`attnforge.load`.
        trusted: files of public keys, one of which must have signed the bundle; by default those that
            `ATTNFORGE_TRUSTED` names.
        name: name of the runner.
    """

    def __init__(
        self,
        bundle: str | os.PathLike[str],
        backend: str = "auto",
        trusted: Sequence[str | os.PathLike[str]] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(name=name, prefix="attnforge-runner")
        self._bundle, self._backend, self._trusted = bundle, backend, trusted

    def activate_impl(self) -> None:
        with polygraphy_errors():
            self.session = load(self._bundle, self._backend, trusted=self._trusted)
        G_LOGGER.info(f"{self.name:35} | Loaded {self._bundle} on {self.session.backend}")

    def get_input_metadata_impl(self) -> Any:
        """Return the model's inputs, with their minimum and maximum shapes."""
        low, high = (sizes_at(self.session.inputs, bound) for bound in ("min", "max"))
        metadata = TensorMetadata()
        for spec in self.session.inputs:
            shape = [dim.text if isinstance(dim, DimSpec) else dim for dim in spec.dims]
            dtype = np.dtype(np.float32 if spec.dtype == BFLOAT16.name else spec.dtype)
            metadata.add(spec.name, dtype, shape, min_shape=[*shape_of(spec, low)], max_shape=[*shape_of(spec, high)])
        return metadata

    def infer_impl(self, feed_dict: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Run the model; outputs are NumPy arrays.

        Args:
            feed_dict: inputs by name, NumPy arrays or torch tensors.
        """
        specs = {spec.name: spec for spec in self.session.inputs}
        with polygraphy_errors():
            feeds = {name: to_numpy(name, value) for name, value in feed_dict.items()}
            for name, array in feeds.items():
                if name in specs and specs[name].dtype == BFLOAT16.name:
                    feeds[name] = array.astype(BFLOAT16)
            start = time.perf_counter()
            outputs = self.session.run(feeds)
            self.inference_time = time.perf_counter() - start
        return OrderedDict((name, without_bfloat16(array)) for name, array in outputs.items())

    def deactivate_impl(self) -> None:
        self.session.close()
        del self.session
