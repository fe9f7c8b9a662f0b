"""A client of a Serve deployment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ray.exceptions import RayActorError

from attnforge.arrays import Array
from benchmarks.load import PATIENCE, Ask, UnansweredError


def asking(handle: Any, inputs: Sequence[Mapping[str, Array]]) -> Ask:
    """What asks a deployment.

    Args:
        handle: of the deployment, whose model has one output.
        inputs: of every request, by name.
    """

    def ask(place: int) -> Callable[[], Array]:
        try:
            (output,) = handle.predict.remote(inputs[place]).result(timeout_s=PATIENCE).values()
        except RayActorError as death:
            raise UnansweredError(str(death)) from death
        return lambda: output

    return ask
