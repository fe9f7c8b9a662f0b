"""Patch-attention at one size and precision: the model that is timed most."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attnforge.benchmarks.gpu.device import Device
from attnforge.benchmarks.gpu.large import Large, Truth, truth_of
from attnforge.benchmarks.gpu.steps import HEADS, PATCH, WIDTH
from attnforge.precision import precision_named

if TYPE_CHECKING:
    from torch import Tensor

    from attnforge.model.registry import Example


@dataclass(frozen=True)
class PatchPoint:
    """One size of patch-attention at one precision."""

    precision: str
    side: int
    batch: int

    @property
    def tokens(self) -> int:
        """Number of patches."""
        return (self.side // PATCH) ** 2

    @property
    def name(self) -> str:
        """Key of the task."""
        return f"{self.precision}, batch {self.batch}, {self.tokens} tokens"

    @property
    def shapes(self) -> tuple[list[tuple[int, ...]], tuple[int, ...], dict[str, int]]:
        """Shapes of the inputs and of the output, and the sizes of the symbolic dims."""
        patches = self.side // PATCH
        image = (self.batch, 3, self.side, self.side)
        return [image], (self.batch, self.tokens, WIDTH), {"batch": self.batch, "rows": patches, "cols": patches}

    @property
    def score_bytes(self) -> int:
        """Bytes of all scores, n² numbers a head."""
        return self.batch * HEADS * self.tokens**2 * precision_named(self.precision).dtype.itemsize

    def images(self, device: Device) -> Tensor:
        """Random images on the device, of unit variance, shape (batch, 3, side, side)."""
        generator = device.torch.Generator().manual_seed(self.side)
        images = device.torch.randn(self.shapes[0][0], generator=generator)
        return device.to_device(images, precision_named(self.precision))


def patch_attention() -> Example:
    """The registered model, with small images to be exported with."""
    from attnforge.model.registry import build_model

    return build_model("patch-attention", image_size=32, max_image_size=64)


def patch_truth(device: Device, large: Large, images: Tensor, point: PatchPoint) -> Truth:
    """What the model's answers to these images are held to."""
    return truth_of(device, point.name, precision_named(point.precision), large.module, large.exact, [images])
