"""Rows of Parquet files through a bundle with Ray Data: tiles of photographs, in actors, with the result checked.

python examples/ray_batch.py [FOLDER] [TILES]
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import ray.data
from sklearn.datasets import load_sample_images

import attnforge
from attnforge.model.registry import build_model
from attnforge.serving.ray import Handle, Predictor

SIDE, STEP, SAMPLES = 32, 8, 64


def write_tiles(folder: Path, count: int) -> None:
    """Parquet files of a thousand rows each: a number, and a tile of a photograph as bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    windows = [
        np.lib.stride_tricks.sliding_window_view(image, (SIDE, SIDE), (0, 1))[::STEP, ::STEP]
        for image in load_sample_images().images
    ]
    tiles = np.concatenate([window.transpose(0, 1, 3, 4, 2).reshape(-1, SIDE, SIDE, 3) for window in windows])[:count]
    for start in range(0, len(tiles), 1000):
        rows = [tile.tobytes() for tile in tiles[start : start + 1000]]
        table = pyarrow.table({"id": np.arange(start, start + len(rows)), "tile": rows})
        pyarrow.parquet.write_table(table, folder / f"{start:06}.parquet")


def images(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the model takes: (3, 32, 32) float32 from -1 to 1. Yours decodes your files."""
    pixels = np.frombuffer(b"".join(rows["tile"]), np.uint8).reshape(-1, SIDE, SIDE, 3)
    return {"id": rows["id"], "image": pixels.transpose(0, 3, 1, 2) / np.float32(127.5) - 1}


def main(folder: Path, count: int) -> None:
    folder = folder.absolute()  # actors stand elsewhere
    write_tiles(folder / "tiles", count)
    module, args, shapes = build_model("vit", max_batch=SAMPLES)  # or a module of yours
    bundle = attnforge.deploy(
        module, args, folder / "vit.bundle", shapes, targets=["onnxruntime"], tune=False, force=True
    )

    predictions = (
        ray.data.read_parquet(str(folder / "tiles"))
        .repartition(target_num_rows_per_block=2 * SAMPLES)  # small files are one block, which one actor would get
        .map_batches(images, batch_size=SAMPLES)
        .map_batches(
            Predictor,
            fn_constructor_args=[Handle(bundle.path)],
            # Every call has 64 samples, so a row's result does not depend on how Ray cuts batches.
            fn_constructor_kwargs={"keep": ["id"], "outputs": {"output": "scores"}, "samples": SAMPLES},
            batch_size=SAMPLES,
            compute=ray.data.ActorPoolStrategy(size=2),
            num_cpus=0.5,  # of two actors; where they take all processors, none is left to read the files
        )
        .materialize()  # or .write_parquet(…)
    )

    rows = list(predictions.iter_batches(batch_size=None))
    ids, scores = (np.concatenate([part[name] for part in rows]) for name in ("id", "scores"))
    assert sorted(ids) == list(range(len(ids))), "rows are lost or repeated"
    with attnforge.load(bundle, threads=1) as session:
        for file in sorted((folder / "tiles").glob("*.parquet")):
            for batch in pyarrow.parquet.ParquetFile(file).iter_batches(SAMPLES):
                row = images({name: batch[name].to_numpy(zero_copy_only=False) for name in ("id", "tile")})
                np.testing.assert_array_equal(scores[np.argsort(ids)][row["id"]], session(row["image"]))
    print(f"{len(ids)} tiles, equal to one Session's to the bit")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."), int(sys.argv[2]) if len(sys.argv) > 2 else 4000)
