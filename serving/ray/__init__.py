"""Bundles in Ray (`pip install 'attnforge[ray]'`): a class for `Dataset.map_batches`, and a Serve deployment.

    handle = Handle("digits.bundle")
    rows.map_batches(Predictor, fn_constructor_args=[handle], batch_size=64, compute=ActorPoolStrategy(size=2))
    serve.run(PredictorDeployment.bind(handle))

Names are imported on first use: Ray Data does not need Ray Serve.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from attnforge.errors import extra

if TYPE_CHECKING:
    from attnforge.serving.ray.deployment import PredictorDeployment
    from attnforge.serving.ray.handle import Handle
    from attnforge.serving.ray.predictor import Predictor

__all__ = ["Handle", "Predictor", "PredictorDeployment"]

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a cluster that this process starts would report usage

_HOME = {"Handle": "handle", "Predictor": "predictor", "PredictorDeployment": "deployment"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(extra(f"{__name__}.{_HOME[name]}", "ray"), name)
