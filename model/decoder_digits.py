"""scikit-learn's handwritten digits as text.

A scan is its class, then eight rows of eight characters, one character for each of the seventeen grey levels, and every
line ends with a newline. Prompted with ``"3\\n"``, the digits decoder writes a three.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES = "0123456789"
INK = " .,:;-~=+ix*oX#%@"
"""One character for each grey level, 0 to 16."""

CHARACTERS = CLASSES + INK + "\n"
"""The character of every token id except the last."""

END = len(CHARACTERS)
"""The token that follows a scan's last newline."""

PROMPT = 2
"""Number of tokens in a prompt: the class and a newline."""

TOKENS = PROMPT + 8 * 9 + 1
"""Number of tokens in a scan: its class and a newline, eight rows of eight and a newline, the end token."""


def tokens_of(images: Tensor, labels: Tensor) -> Tensor:
    """Convert scans to tokens. Shapes: images (N, 1, 8, 8) in [0, 1], labels (N,) int64; result (N, TOKENS) int64."""
    ink = len(CLASSES) + (images.squeeze(1) * 16).round().long()  # (N, 8, 8)
    newline = CHARACTERS.index("\n")
    rows = F.pad(ink, (0, 1), value=newline).flatten(1)  # (N, 72)
    return F.pad(torch.cat([F.pad(labels[:, None], (0, 1), value=newline), rows], dim=1), (0, 1), value=END)
