"""scikit-learn's handwritten digits, written as text.

A scan is its class, then eight rows of eight characters, one for each of the seventeen levels of ink, and every line
ends with a newline. Asked to go on after ``"3\\n"``, the decoder of digits writes a three.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

CLASSES = "0123456789"
INK = " .,:;-~=+ix*oX#%@"
"""A character for each level of ink, 0 to 16."""

CHARACTERS = CLASSES + INK + "\n"
"""The character of every token id but the last."""

END = len(CHARACTERS)
"""The token that follows a scan's last newline."""

PROMPT = 2
"""Tokens of a prompt: the class and a newline."""

TOKENS = PROMPT + 8 * 9 + 1
"""Tokens of a scan: its class and a newline, eight rows of eight and a newline, the end."""


def tokens_of(images: Tensor, labels: Tensor) -> Tensor:
    """Scans as tokens. Shapes: images (N, 1, 8, 8) in [0, 1], labels (N,) int64; result (N, TOKENS) int64."""
    ink = len(CLASSES) + (images.squeeze(1) * 16).round().long()  # (N, 8, 8)
    newline = CHARACTERS.index("\n")
    rows = F.pad(ink, (0, 1), value=newline).flatten(1)  # (N, 72)
    return F.pad(torch.cat([F.pad(labels[:, None], (0, 1), value=newline), rows], dim=1), (0, 1), value=END)
