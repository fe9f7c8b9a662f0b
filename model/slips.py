"""S13, two mistakes found in published code, reproduced on purpose.

Both run and train, and only their results are wrong. They test that a deployment reproduces the function it is given,
and not the one that was intended, which they inherit from.
"""

from __future__ import annotations

import math

from torch import Tensor

from attnforge.errors import ShapeError
from attnforge.model.attention import MultiHeadSelfAttention, merge_heads, require_width, split_heads


class PostSoftmaxScale(MultiHeadSelfAttention):
    """S13a, the scale on the wrong side of the softmax: ``(softmax(Q Kᵀ) / √d_k) V``.

    The correct function is ``softmax(Q Kᵀ / √d_k) V``. Here the rows of weights sum to 1 / √d_k, not to 1, and the
    softmax gets unscaled scores, so it saturates as d_k grows. Both agree only for d_k = 1.

    Shapes: x (n, d_in) or (B, n, d_in); result (n, d_v) or (B, n, d_v). ``num_heads`` None means one head without a
    head axis; with heads, d_k above is key_dim / num_heads. Raises ShapeError if num_heads does not divide key_dim and
    value_dim or x is not d_in wide.
    """

    def __init__(
        self, input_dim: int, key_dim: int, value_dim: int | None = None, num_heads: int | None = None
    ) -> None:
        value_dim = key_dim if value_dim is None else value_dim
        super().__init__(input_dim, key_dim, value_dim, 1 if num_heads is None else num_heads)
        self.has_heads = num_heads is not None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # without masks
        require_width("x", x, self.input_dim)
        query, key, value = self.query_proj(x), self.key_proj(x), self.value_proj(x)  # (..., n, d)
        if self.has_heads:
            query, key, value = (split_heads(part, self.num_heads) for part in (query, key, value))
        weights = (query @ key.transpose(-2, -1)).softmax(-1) / math.sqrt(key.shape[-1])  # rows sum to 1 / √d_k
        context = weights @ value
        return merge_heads(context) if self.has_heads else context  # (..., n, d_v)


class ReshapeWithoutTranspose(MultiHeadSelfAttention):
    """S13b, heads made by ``reshape(-1, B, n, d / h)`` instead of a reshape and a transpose.

    The reshape concatenates the h parts of every token and cuts the result into sequences of n parts, h of them per
    sample. So each "head" is a run of n / h neighbouring tokens with all their parts, and a token attends only within
    its run, across the parts of different heads; if h does not divide n, a run starts and ends inside tokens. Samples
    are not mixed. The correct function keeps the token axis: (B, n, h, d / h), then a transpose. Both agree for h = 1.

    Shapes: x (B, n, d_in); result (B, n, d_v). Raises ShapeError if num_heads does not divide key_dim and value_dim, x
    has no batch axis, or x is not d_in wide.
    """

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # without masks
        require_width("x", x, self.input_dim)
        if x.ndim != 3:
            raise ShapeError(f"x is {tuple(x.shape)}; give (B, n, d_in), with a batch of 1 for one sequence")
        batch, tokens, _ = x.shape
        # Flatten first: torch.export cannot decide for all sizes whether the reshape alone is a view.
        query, key, value = (
            part.flatten().reshape(-1, batch, tokens, part.shape[-1] // self.num_heads)  # (h, B, n, d / h), mixed
            for part in (self.query_proj(x), self.key_proj(x), self.value_proj(x))
        )
        scores = query @ key.transpose(-2, -1) / math.sqrt(key.shape[-1])
        context = scores.softmax(-1) @ value
        return context.flatten().reshape(batch, tokens, -1)  # (B, n, d_v)
