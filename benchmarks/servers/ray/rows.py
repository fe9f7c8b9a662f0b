"""Prediction of tiles by Ray actors, and requests to replicas."""

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
"""Calls per block of rows. Ray distributes blocks; files as small as these would end up in a single block, on one
actor."""

LINE = 11
"""Bytes of a line of a progress file: the id of the actor's process."""


class Timed(Predictor):
    """A predictor whose rows contain the process of their call, its start and end in seconds since the epoch, and its
    CPU seconds.

    Args:
        arguments: arguments of the predictor.
        progress: a file to which every call appends a line.
        options: options of the predictor.
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
    """Predict in Ray actors; return the columns.

    Args:
        bundle: folder of the bundle.
        files: files written by :func:`write_tiles`.
        samples: samples per call.
        actors: number of actors.
        progress: a file to which every call appends a line.
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
    """Return the process of the actor that made the latest call, or None before `calls` calls."""
    if not progress.exists() or progress.stat().st_size < calls * LINE:
        return None
    return int(progress.read_bytes()[-LINE:])


def asking(handle: Any, inputs: Sequence[Mapping[str, Array]]) -> Ask:
    """Return a function that sends requests to a deployment.

    Args:
        handle: handle of the deployment, whose model has one output.
        inputs: inputs of every request, by name.
    """

    def ask(index: int) -> Callable[[], Array]:
        try:
            (output,) = handle.predict.remote(inputs[index]).result(timeout_s=PATIENCE).values()
        except RayActorError as death:
            raise UnansweredError(str(death)) from death
        return lambda: output

    return ask
