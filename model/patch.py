"""S8, an image as tokens: non-overlapping p × p patches whose raw pixels are the features, then attention over patches.

Source: Dosovitskiy et al., An Image is Worth 16x16 Words, 2021, https://arxiv.org/abs/2010.11929, section 3.1. A
patch's features are in the order of ``torch.nn.functional.pixel_unshuffle``: channel, row, column.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn

from attnforge.errors import ShapeError
from attnforge.model.attention import MultiHeadAttention, MultiHeadSelfAttention, require_positive, require_width


def split_patches(image: Tensor, patch_size: int) -> Tensor:
    """(C, H, W) or (B, C, H, W) -> (..., H/p · W/p, C · p · p): one token per patch, row-major over the grid.

    3×224×224 with p = 4 is 3,136 tokens of 48. Any dtype. Raises ShapeError if p does not divide H and W.
    """
    require_positive(patch_size=patch_size)
    height, width = image.shape[-2:]
    if height % patch_size or width % patch_size:
        raise ShapeError(
            f"image {tuple(image.shape)} with patch_size {patch_size}; pad or crop H and W to multiples of it"
        )
    return rearrange(image, "... c (h p1) (w p2) -> ... (h w) (c p1 p2)", p1=patch_size, p2=patch_size)


def merge_patches(tokens: Tensor, patch_size: int, height: int, width: int) -> Tensor:
    """(..., H/p · W/p, C · p · p) -> (..., C, H, W): the exact inverse of :func:`split_patches`.

    Raises ShapeError if p does not divide height and width, or the tokens do not match an image of that size.
    """
    require_positive(patch_size=patch_size)
    if height % patch_size or width % patch_size:
        raise ShapeError(f"height {height}, width {width} with patch_size {patch_size}; give multiples of patch_size")
    rows, columns = height // patch_size, width // patch_size
    if tokens.shape[-2] != rows * columns or tokens.shape[-1] % patch_size**2:
        raise ShapeError(
            f"tokens {tuple(tokens.shape)}; an image of {height}×{width} has {rows * columns} of C · {patch_size**2}"
        )
    return rearrange(tokens, "... (h w) (c p1 p2) -> ... c (h p1) (w p2)", h=rows, p1=patch_size, p2=patch_size)


def count_patches(image_size: int, patch_size: int) -> int:
    """Return the number of patches of a square image; raise ShapeError if patch_size does not divide image_size."""
    if image_size % patch_size:
        raise ShapeError(f"image_size {image_size} with patch_size {patch_size}; choose a patch_size that divides it")
    return (image_size // patch_size) ** 2


class PatchAttention(nn.Module):
    """S8, multi-head self-attention over the patches of an image: ``split_patches``, then S2 with d_in = C · p · p.

    Shapes: image (C, H, W) or (B, C, H, W); result (..., H/p · W/p, embed_dim).
    Raises ShapeError if p does not divide H and W, num_heads does not divide embed_dim, or the channels do not match.
    """

    def __init__(self, channels: int = 3, patch_size: int = 4, embed_dim: int = 192, num_heads: int = 3) -> None:
        super().__init__()
        require_positive(channels=channels, patch_size=patch_size)
        self.channels, self.patch_size = channels, patch_size
        self.attention = MultiHeadSelfAttention(channels * patch_size**2, embed_dim, embed_dim, num_heads)

    def forward(self, image: Tensor) -> Tensor:
        require_width("image", image, self.channels, dim=-3)
        return self.attention(split_patches(image, self.patch_size))  # (..., n, embed_dim)


class PatchAttentionClassifier(nn.Module):
    """A classifier that is patch attention and little else: ``x = x + attention(norm(x))``, mean over patches, head.

    Raw pixel patches, a linear embedding, learned positions, ``num_layers`` pre-norm attention blocks without
    feed-forward layers, the mean over patches, a LayerNorm, and a linear head. The defaults are for 8×8 digits: 16
    tokens of 4 pixels.

    Shapes: image (B, C, image_size, image_size); result (B, num_classes), logits. Raises ShapeError if patch_size does
    not divide image_size, num_heads does not divide embed_dim, or the image has another size.
    """

    def __init__(
        self,
        channels: int = 1,
        image_size: int = 8,
        patch_size: int = 2,
        embed_dim: int = 128,
        num_heads: int = 4,
        num_layers: int = 2,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        require_positive(channels=channels, patch_size=patch_size, num_layers=num_layers, num_classes=num_classes)
        num_patches = count_patches(image_size, patch_size)
        self.channels, self.image_size, self.patch_size = channels, image_size, patch_size
        self.embedding = nn.Linear(channels * patch_size**2, embed_dim)
        # The mean over patches discards their positions, so the position embedding starts as large as a LayerNorm's
        # output.
        self.positions = nn.Parameter(torch.randn(num_patches, embed_dim))
        self.norms = nn.ModuleList(nn.LayerNorm(embed_dim) for _ in range(num_layers))
        self.attentions = nn.ModuleList(MultiHeadAttention(embed_dim, num_heads) for _ in range(num_layers))
        self.head_norm = nn.LayerNorm(embed_dim)
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        for dim, size in (-3, self.channels), (-2, self.image_size), (-1, self.image_size):
            require_width("image", image, size, dim)
        x = self.embedding(split_patches(image, self.patch_size)) + self.positions  # (B, n, embed_dim)
        for norm, attention in zip(self.norms, self.attentions, strict=True):
            y = norm(x)
            x = x + attention(y, y, y)
        return self.head(self.head_norm(x.mean(-2)))  # (B, num_classes)
