"""Patch-attention, the model that most is asked of, at one size and precision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnforge.benchmarks.gpu.bench import Bench
from attnforge.benchmarks.gpu.large import Large, Truth, truth_of
from attnforge.benchmarks.gpu.records import HEADS, PATCH, WIDTH
from attnforge.precision import precision_named

if TYPE_CHECKING:
    from torch import Tensor

    from attnforge.model.registry import Example


@dataclass(frozen=True)
class Point:
    """One size of patch-attention at one precision."""

    precision: str
    side: int
    batch: int

    @property
    def tokens(self) -> int:
        return (self.side // PATCH) ** 2

    @property
    def name(self) -> str:
        return f"{self.precision}, batch {self.batch}, {self.tokens} tokens"

    @property
    def shapes(self) -> tuple[list[tuple[int, ...]], tuple[int, ...], dict[str, int]]:
        """Of input and output, and what the symbols stand for."""
        patches = self.side // PATCH
        image = (self.batch, 3, self.side, self.side)
        return [image], (self.batch, self.tokens, WIDTH), {"batch": self.batch, "rows": patches, "cols": patches}

    @property
    def score_bytes(self) -> int:
        """Of all scores, which are n² a head."""
        return self.batch * HEADS * self.tokens**2 * precision_named(self.precision).dtype.itemsize

    def images(self, bench: Bench) -> Tensor:
        generator = bench.torch.Generator().manual_seed(self.side)
        images = bench.torch.randn(self.shapes[0][0], generator=generator)
        return bench.to_device(images, precision_named(self.precision))


def patch_attention() -> Example:
    from attnforge.model.registry import build_model

    return build_model("patch-attention", image_size=32, max_image_size=64)


def patch_truth(bench: Bench, large: Large, images: Tensor, point: Point) -> Truth:
    return truth_of(bench, point.name, precision_named(point.precision), large.module, large.exact, [images])
