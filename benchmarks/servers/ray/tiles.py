"""Tiles of scikit-learn's photographs as Parquet, and plain processes that predict them, without Ray."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet

from attnforge.arrays import Array
from attnforge.runtime.session import load
from benchmarks.child import Ended, run

SIDE = 32
"""Side of a tile in pixels."""

STEP = 4
"""Offset between tiles in pixels."""

ROWS = 1000
"""Tiles per file."""

PATIENCE = 3600.0
"""Timeout of a plain process, in seconds."""

Rows = Mapping[str, Array]


def write_tiles(folder: Path, count: int, rows: int = ROWS) -> list[Path]:
    """Write tiles of the two photographs, with the numbers from 0 as `id` and the bytes of `SIDE × SIDE × 3` as `tile`.

    Args:
        folder: folder of the files.
        count: number of tiles.
        rows: tiles per file.
    """
    from sklearn.datasets import load_sample_images

    tiles = np.concatenate([tiles_of(photograph) for photograph in load_sample_images().images])[:count]
    if len(tiles) < count:
        raise ValueError(f"{count} tiles were asked for; the photographs have {len(tiles)}")
    files = []
    for start in range(0, count, rows):
        pixels = [tile.tobytes() for tile in tiles[start : start + rows]]
        table = pyarrow.table({"id": np.arange(start, start + len(pixels)), "tile": pixels})
        files.append(folder / f"tiles-{start:06}.parquet")
        pyarrow.parquet.write_table(table, files[-1])
    return files


def tiles_of(photograph: Array) -> Array:
    """Return the tiles (n, SIDE, SIDE, 3) uint8 of a photograph (height, width, 3)."""
    views = np.lib.stride_tricks.sliding_window_view(photograph, (SIDE, SIDE), (0, 1))[::STEP, ::STEP]
    return np.ascontiguousarray(views.transpose(0, 1, 3, 4, 2)).reshape(-1, SIDE, SIDE, 3)


def images_of(rows: dict[str, Array]) -> dict[str, Array]:
    """Convert rows of files to model inputs: `id`, and `image` (3, SIDE, SIDE) float32 from -1 to 1."""
    pixels = np.frombuffer(b"".join(rows["tile"]), np.uint8).reshape(-1, SIDE, SIDE, 3)
    return {"id": rows["id"], "image": np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)) / np.float32(127.5) - 1}


def call_of(rows: int, began: float, cpu: float) -> dict[str, Array]:
    """Return columns for the rows of a call that ends now: its process, its start and end in seconds since the epoch,
    and its CPU seconds per row.

    Args:
        rows: number of rows of the call.
        began: start in seconds since the epoch.
        cpu: CPU seconds of this process before the call.
    """
    numbers = {"process": os.getpid(), "began": began, "ended": time.time(), "cpu": (time.process_time() - cpu) / rows}
    return {name: np.full(rows, number) for name, number in numbers.items()}


def outcome_of(parts: Sequence[Rows], expected: Array) -> dict[str, Any]:
    """Return how many rows are lost, how many are duplicated, and whether all outputs are bitwise equal.

    Args:
        parts: the rows, with `id` and `output`.
        expected: the outputs by `id`.
    """
    ids, outputs = (np.concatenate([part[name] for part in parts]) for name in ("id", "output"))
    counts = np.bincount(ids, minlength=len(expected))
    return {
        "lost": int((counts == 0).sum()),
        "twice": int((counts > 1).sum()),
        "equal": bool(np.array_equal(outputs, expected[ids])),
    }


# --- without Ray ------------------------------------------------------------------------------------------------------


def batches_of(files: Sequence[Path], samples: int) -> Iterator[dict[str, Array]]:
    """Yield the rows of files as model inputs, `samples` at a time; the last batch of a file may be smaller."""
    for file in files:
        for batch in pyarrow.parquet.ParquetFile(file).iter_batches(samples):
            yield images_of({name: batch[name].to_numpy(zero_copy_only=False) for name in batch.schema.names})


def in_plain_processes(bundle: Path, files: Sequence[Path], samples: int, processes: int) -> list[dict[str, Array]]:
    """Predict in plain processes that share the files; return the columns of each.

    Args:
        bundle: folder of the bundle.
        files: files to distribute.
        samples: samples per call.
        processes: number of processes.
    """
    with TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as threads:
        outs, logs = ([Path(folder, f"{number}.{kind}") for number in range(processes)] for kind in ("npz", "log"))

        def predict(number: int) -> Ended:
            words = [str(bundle), str(outs[number]), str(samples), *map(str, files[number::processes])]
            return run(__name__, *words, log=logs[number], seconds=PATIENCE)

        for ended, log in zip(threads.map(predict, range(processes)), logs, strict=True):
            if ended.code != 0:
                raise RuntimeError(f"a plain process failed: {ended.why or log.read_text(errors='replace')}")
        return [dict(np.load(out)) for out in outs]


def _main(bundle: str, out: str, samples: str, *files: str) -> None:
    parts: list[dict[str, Array]] = []
    with load(bundle, threads=1) as session:
        for rows in batches_of([Path(file) for file in files], int(samples)):
            began, cpu = time.time(), time.process_time()
            output = session(rows["image"])
            parts.append({"id": rows["id"], "output": output, **call_of(len(output), began, cpu)})
    np.savez(out, allow_pickle=False, **{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


if __name__ == "__main__":
    _main(*sys.argv[1:])
