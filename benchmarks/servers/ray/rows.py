"""Tiles through actors of Ray, and requests to replicas."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray.data
from ray.exceptions import RayActorError

from attnforge.arrays import Array
from attnforge.serving.ray.handle import Handle
from attnforge.serving.ray.predictor import Predictor
from benchmarks.load import PATIENCE, Ask, UnansweredError
from benchmarks.servers.ray.tiles import Rows, call_of, images_of

BLOCK = 10
"""Calls that one block of rows makes. Ray hands out blocks; of files as small as these it reads all into one, which one
actor would get."""

LINE = 11
"""Bytes of a line of a progress file: the number of the actor's process."""


class Timed(Predictor):
    """A predictor whose rows say in which process their call was made, when it began and ended, in seconds since the
    epoch, and how many seconds of the processor it took.

    Args:
        progress: a file that gets a line at every call.
        arguments: of the predictor.
    """

    def __init__(self, *arguments: Any, progress: Path, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._progress = os.open(progress, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, batch: dict[str, Array]) -> dict[str, Array]:
        began, cpu = time.time(), time.process_time()
        rows = super().__call__(batch)
        os.write(self._progress, b"%*d\n" % (LINE - 1, os.getpid()))
        return {**rows, **call_of(len(batch["id"]), began, cpu)}


def in_actors(bundle: Path, files: Sequence[Path], samples: int, actors: int, progress: Path, **handle: Any) -> Rows:
    """Predict in actors of Ray; their columns.

    Args:
        bundle: its folder.
        files: that :func:`write_tiles` wrote.
        samples: of a call.
        actors: how many.
        progress: a file that gets a line at every call.
        handle: options of the handle.
    """
    rows = (
        ray.data.read_parquet([str(file) for file in files])
        .repartition(target_num_rows_per_block=BLOCK * samples)
        .map_batches(images_of, batch_size=samples)
        .map_batches(
            Timed,
            fn_constructor_args=[Handle(bundle, **handle)],
            fn_constructor_kwargs={"keep": ["id"], "samples": samples, "progress": progress},
            batch_size=samples,
            compute=ray.data.ActorPoolStrategy(size=actors),
        )
    )
    parts = list(rows.iter_batches(batch_size=None))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def busy_after(progress: Path, calls: int) -> int | None:
    """The process of the actor that made the latest call, once so many calls are made."""
    if not progress.exists() or progress.stat().st_size < calls * LINE:
        return None
    return int(progress.read_bytes()[-LINE:])


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
