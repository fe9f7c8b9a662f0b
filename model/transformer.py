"""S12, a Transformer encoder: embedding, positions, truncation, masks, heads, layers, and LayerNorm.

The same encoder is used for tokens and, in :class:`VisionTransformer`, for patches. With the same weights it computes
what ``torch.nn.TransformerEncoder`` computes in eval mode, except that a query that may attend to nothing yields zeros
from attention, not NaN. There is no dropout: these modules are for inference. They are always batch first.

Sources: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; pre-norm: Xiong et al. 2020,
https://arxiv.org/abs/2002.04745; the PyTorch documentation of ``torch.nn.TransformerEncoderLayer``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.errors import ShapeError, UsageError, check_known
from attnforge.model.attention import MultiHeadAttention, merge_masks, require_positive, require_width
from attnforge.model.patch import count_patches, split_patches

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": partial(F.gelu, approximate="tanh"),
}


class SinusoidalPositions(nn.Module):
    """``x + P`` with ``P[t, 2i] = sin(t / 10000^(2i/d))`` and ``P[t, 2i+1] = cos(t / 10000^(2i/d))``.

    Shapes: x (..., n, embed_dim) with n up to max_length; result the same. The table is a buffer: it follows ``.to``
    and is not in the state dict. Raises ShapeError for an odd embed_dim, or an x of another width or too many tokens.

    Source: Vaswani et al. 2017, section 3.5, https://arxiv.org/abs/1706.03762.
    """

    table: Tensor

    def __init__(self, embed_dim: int, max_length: int) -> None:
        super().__init__()
        require_positive(embed_dim=embed_dim, max_length=max_length)
        if embed_dim % 2:
            raise ShapeError(f"embed_dim {embed_dim}; sines and cosines come in pairs, so choose an even one")
        rate = torch.exp(torch.arange(0, embed_dim, 2, dtype=torch.float64) * (-math.log(10000.0) / embed_dim))
        angle = torch.arange(max_length, dtype=torch.float64)[:, None] * rate  # (max_length, embed_dim / 2)
        table = torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)  # (max_length, embed_dim)
        self.register_buffer("table", table.to(torch.get_default_dtype()), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + rows_of(self.table, x)


class LearnedPositions(nn.Module):
    """``x + P`` with a learned ``P`` (max_length, embed_dim).

    Shapes: x (..., n, embed_dim) with n up to max_length; result the same. Raises ShapeError for an x of another width
    or too many tokens.

    Source: Gehring et al. 2017, https://arxiv.org/abs/1705.03122, section 3.1.
    """

    def __init__(self, embed_dim: int, max_length: int) -> None:
        super().__init__()
        require_positive(embed_dim=embed_dim, max_length=max_length)
        self.table = nn.Parameter(0.02 * torch.randn(max_length, embed_dim))

    def forward(self, x: Tensor) -> Tensor:
        return x + rows_of(self.table, x)


POSITIONS = {"sinusoidal": SinusoidalPositions, "learned": LearnedPositions}


def rows_of(table: Tensor, x: Tensor) -> Tensor:
    """Return the first n rows of ``table`` (max_length, embed_dim) for x (..., n, embed_dim)."""
    require_width("x", x, table.shape[1])
    if x.shape[-2] > table.shape[0]:
        raise ShapeError(f"{x.shape[-2]} tokens; there are {table.shape[0]} positions, so truncate or raise max_length")
    return table[: x.shape[-2]]


class FeedForward(nn.Module):
    """The position-wise layer ``act(x W1 + b1) W2 + b2``, act "relu", "gelu" (exact) or "gelu-tanh" (approximated).

    Shapes: x (..., embed_dim); result the same. Raises UnknownNameError for another activation.

    Sources: Vaswani et al. 2017, section 3.3, https://arxiv.org/abs/1706.03762; gelu and its approximation by a tanh:
    Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415, section 2.
    """

    def __init__(self, embed_dim: int, hidden_dim: int, activation: str = "relu", bias: bool = True) -> None:
        super().__init__()
        check_known("activation", activation, ACTIVATIONS)
        require_positive(embed_dim=embed_dim, hidden_dim=hidden_dim)
        self.activation = ACTIVATIONS[activation]
        self.linear1 = nn.Linear(embed_dim, hidden_dim, bias=bias)
        self.linear2 = nn.Linear(hidden_dim, embed_dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.activation(self.linear1(x)))


class EncoderLayer(nn.Module):
    """Attention and a feed-forward layer, each with a residual and a LayerNorm.

    Post-norm (norm_first False): ``x = norm1(x + attention(x))``, ``x = norm2(x + feed_forward(x))``.
    Pre-norm (norm_first True): ``x = x + attention(norm1(x))``, ``x = x + feed_forward(norm2(x))``.

    Shapes: x (B, n, embed_dim) or (n, embed_dim); attn_mask as in :func:`attnforge.model.attention.merge_masks`;
    result like x. ``feedforward_dim`` defaults to 4 · embed_dim. Raises as :class:`MultiHeadAttention` and
    :class:`FeedForward` do.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        feedforward_dim: int | None = None,
        activation: str = "relu",
        norm_first: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        feedforward_dim = 4 * embed_dim if feedforward_dim is None else feedforward_dim
        self.norm_first = norm_first
        self.attention = MultiHeadAttention(embed_dim, num_heads, bias)
        self.feed_forward = FeedForward(embed_dim, feedforward_dim, activation, bias)
        self.norm1 = nn.LayerNorm(embed_dim, bias=bias)
        self.norm2 = nn.LayerNorm(embed_dim, bias=bias)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if self.norm_first:
            y = self.norm1(x)
            x = x + self.attention(y, y, y, attn_mask)
            x = x + self.feed_forward(self.norm2(x))
        else:
            x = self.norm1(x + self.attention(x, x, x, attn_mask))
            x = self.norm2(x + self.feed_forward(x))
        return x


class TransformerEncoder(nn.Module):
    """Token embedding, truncation, positions, layers and a final norm; all are optional except the layers.

    Shapes: tokens (B, n) int64 if ``vocab_size`` is given, else (B, n, embed_dim); key_padding_mask (B, n), bool,
    True = padding; result (B, min(n, max_length), embed_dim). ``max_length`` None keeps all tokens; positions need
    a ``max_length``. ``positions`` is "sinusoidal", "learned" or None. ``is_causal`` lets token i see only tokens
    0 ... i. Embeddings are not scaled.

    For torch.export, bound the number of tokens by max_length: it refuses a size that is the minimum of two, so a
    deployed encoder must be given truncated tokens.

    Raises UnknownNameError for unknown positions, UsageError for positions without a max_length, and as
    :class:`EncoderLayer` does.
    """

    def __init__(
        self,
        num_layers: int,
        embed_dim: int,
        num_heads: int,
        activation: str = "relu",
        norm_first: bool = False,
        *,
        vocab_size: int | None = None,
        max_length: int | None = None,
        positions: str | None = None,
        final_norm: bool = False,
        is_causal: bool = False,
    ) -> None:
        super().__init__()
        require_positive(num_layers=num_layers)
        self.max_length, self.is_causal = max_length, is_causal
        self.embedding = None if vocab_size is None else nn.Embedding(vocab_size, embed_dim)
        self.positions: nn.Module | None = None
        if positions is not None:
            check_known("positions", positions, POSITIONS)
            if max_length is None:
                raise UsageError(f"{positions} positions without max_length; their table needs a length, so give one")
            self.positions = POSITIONS[positions](embed_dim, max_length)
        self.layers = nn.ModuleList(
            EncoderLayer(embed_dim, num_heads, activation=activation, norm_first=norm_first) for _ in range(num_layers)
        )
        self.norm: nn.Module | None = nn.LayerNorm(embed_dim) if final_norm else None

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        if self.max_length is not None:
            tokens = tokens[:, : self.max_length]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[:, : self.max_length]
        x = tokens if self.embedding is None else self.embedding(tokens)  # (B, n, embed_dim)
        if self.positions is not None:
            x = self.positions(x)
        mask = merge_masks(None, key_padding_mask, self.is_causal, x, x)  # once for all layers
        for layer in self.layers:
            x = layer(x, attn_mask=mask)
        return x if self.norm is None else self.norm(x)  # (B, n, embed_dim)


class VisionTransformer(nn.Module):
    """A ViT: patches, linear embedding, class token, learned positions, pre-norm encoder, and a linear head.

    Shapes: image (B, C, image_size, image_size); result (B, num_classes), float. Raises ShapeError if patch_size does
    not divide image_size, num_heads does not divide embed_dim, or the image has another size.

    Source: Dosovitskiy et al. 2021, https://arxiv.org/abs/2010.11929, section 3.1.
    """

    def __init__(
        self,
        image_size: int,
        patch_size: int,
        num_classes: int,
        embed_dim: int,
        num_heads: int,
        num_layers: int,
        channels: int = 3,
    ) -> None:
        super().__init__()
        require_positive(image_size=image_size, patch_size=patch_size, num_classes=num_classes, channels=channels)
        num_patches = count_patches(image_size, patch_size)
        self.image_size, self.patch_size, self.channels = image_size, patch_size, channels
        self.embedding = nn.Linear(channels * patch_size**2, embed_dim)
        self.class_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.encoder = TransformerEncoder(
            num_layers, embed_dim, num_heads, activation="gelu", norm_first=True, max_length=num_patches + 1,
            positions="learned", final_norm=True,
        )  # fmt: skip
        self.head = nn.Linear(embed_dim, num_classes)

    def forward(self, image: Tensor) -> Tensor:
        for dim, size in (-3, self.channels), (-2, self.image_size), (-1, self.image_size):
            require_width("image", image, size, dim)
        patches = self.embedding(split_patches(image, self.patch_size))  # (B, n, embed_dim)
        class_token = self.class_token.expand(patches.shape[0], -1, -1)  # (B, 1, embed_dim)
        x = self.encoder(torch.cat([class_token, patches], dim=1))  # (B, 1 + n, embed_dim)
        return self.head(x[:, 0])  # (B, num_classes)
