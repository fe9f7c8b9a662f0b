"""Real inputs for some registered models: handwritten digits, as labelled images and as characters, and photographs.

All of them come with scikit-learn (`pip install 'attnforge[data]'`); without it no model has any. The digits are the
UCI Optical Recognition of Handwritten Digits, from `sklearn.datasets.load_digits`: 1,797 images of 8×8.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attnforge.errors import UnavailableError, extra
from attnforge.model.decoder_digits import tokens_of


class DigitsSplit(NamedTuple):
    """Images (N, 1, 8, 8) float32 in [0, 1] and labels (N,) int64, for training and testing."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits_split(seed: int = 0) -> DigitsSplit:
    """Return the digits, with a fixed quarter of every class as test set. Raises UnavailableError without
    scikit-learn."""
    datasets, selection = extra("sklearn.datasets", "data"), extra("sklearn.model_selection", "data")
    pixels, labels = datasets.load_digits(return_X_y=True)  # (1797, 64) in 0 ... 16
    images = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    train, test = selection.train_test_split(range(len(labels)), test_size=0.25, random_state=seed, stratify=labels)
    targets = torch.tensor(labels, dtype=torch.int64)
    return DigitsSplit(images[train], targets[train], images[test], targets[test])


class Real(NamedTuple):
    """Inputs by position, and labels of their samples if the task has labels."""

    inputs: tuple[tuple[Tensor, ...], ...] = ()
    labels: tuple[Tensor, ...] = ()


def real_data(name: str, args: Sequence[Tensor]) -> Real:
    """Return real inputs for a model, or an empty :class:`Real` if there are none.

    Args:
        name: name of a registered model; others have no real inputs.
        args: its example inputs. Photographs get the size of the example's image; digits as characters come in four
            batches of the example's size.
    """
    with suppress(UnavailableError):
        if name == "patch-attention-digits":
            split = load_digits_split()
            return Real(((split.test_images,),), (split.test_labels,))
        if name == "decoder-digits":
            split, rows = load_digits_split(), args[0].shape[0]
            scans = tokens_of(split.test_images, split.test_labels)[: 4 * rows]
            return Real(tuple((batch,) for batch in torch.split(scans, rows)))
        if name in ("patch-attention", "vit"):
            height, width = args[0].shape[-2:]
            return Real(tuple((photograph[None],) for photograph in photographs(height, width)))
    return Real()


def photographs(height: int, width: int) -> Tensor:
    """Return scikit-learn's two sample photographs (2, 3, height, width) float32 in [0, 1], cropped around the centre
    and resized. Raises UnavailableError without scikit-learn."""
    load_sample_images = extra("sklearn.datasets", "data").load_sample_images
    images = torch.stack([torch.tensor(image) for image in load_sample_images().images]).permute(0, 3, 1, 2) / 255
    rows, columns = images.shape[-2:]
    scale = min(rows / height, columns / width)
    tall, wide = int(height * scale), int(width * scale)
    top, left = (rows - tall) // 2, (columns - wide) // 2
    cropped = images[..., top : top + tall, left : left + wide]
    return F.interpolate(cropped, (height, width), mode="bilinear", antialias=True, align_corners=False).clamp(0, 1)
