"""scikit-learn's handwritten digits, with a fixed split.

Data: UCI Optical Recognition of Handwritten Digits, from ``sklearn.datasets.load_digits``: 1,797 images of 8×8.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnforge.errors import extra


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
    rows = range(len(labels))
    train, test = selection.train_test_split(rows, test_size=0.25, random_state=seed, stratify=labels)
    targets = torch.tensor(labels, dtype=torch.int64)
    return DigitsSplit(images[train], targets[train], images[test], targets[test])
