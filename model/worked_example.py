"""S4, self-attention on paper: three tokens of four features, small integer weights, no scale.

``softmax(Q Kᵀ) V`` with every intermediate table written down, so that a wrong transpose, a wrong axis or a stray scale
shows as a number. Source: R. Karim, Illustrated: Self-Attention, 2019,
https://towardsdatascience.com/illustrated-self-attention-2d627e33b20a
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from attnforge.model.attention import attention, require_width

Table = tuple[tuple[float, ...], ...]

INPUT: Table = ((1, 0, 1, 0), (0, 2, 0, 2), (1, 1, 1, 1))  # (3, 4): three tokens
KEY_WEIGHT: Table = ((0, 0, 1), (1, 1, 0), (0, 1, 0), (1, 1, 0))  # (4, 3)
QUERY_WEIGHT: Table = ((1, 0, 1), (1, 0, 0), (0, 0, 1), (0, 1, 1))
VALUE_WEIGHT: Table = ((0, 2, 0), (0, 3, 0), (1, 0, 3), (1, 1, 0))

KEYS: Table = ((0, 1, 1), (4, 4, 0), (2, 3, 1))  # (3, 3)
QUERIES: Table = ((1, 0, 2), (2, 2, 2), (2, 1, 3))
VALUES: Table = ((1, 2, 3), (2, 8, 0), (2, 6, 3))
SCORES: Table = ((2, 4, 4), (4, 16, 12), (4, 12, 10))
WEIGHTS: Table = (
    (6.3379e-02, 4.6831e-01, 4.6831e-01),
    (6.0337e-06, 9.8201e-01, 1.7986e-02),
    (2.9539e-04, 8.8054e-01, 1.1917e-01),
)  # rows of the softmax, to five significant digits
OUTPUTS: Table = ((1.936621, 6.683105, 1.595068), (1.999994, 7.963992, 0.053976), (1.999705, 7.759892, 0.358389))
# The example's own rounding to one decimal keeps each row's sum at 1: its first weight, 0.063, is written 0.0, not 0.1.
ROUNDED_WEIGHTS: Table = ((0.0, 0.5, 0.5), (0.0, 1.0, 0.0), (0.0, 0.9, 0.1))
ROUNDED_OUTPUTS: Table = ((2.0, 7.0, 1.5), (2.0, 8.0, 0.0), (2.0, 7.8, 0.3))


class WorkedExample(nn.Module):
    """``softmax(Q Kᵀ) V`` with ``K = X Wk``, ``Q = X Wq``, ``V = X Wv`` and the weights of the example.

    Shapes: x (n, 4) or (B, n, 4), the example's own is ``INPUT``, (3, 4); result (n, 3) or (B, n, 3).
    Raises ShapeError where x is not 4 wide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_weight = nn.Parameter(torch.tensor(KEY_WEIGHT, dtype=torch.float32))
        self.query_weight = nn.Parameter(torch.tensor(QUERY_WEIGHT, dtype=torch.float32))
        self.value_weight = nn.Parameter(torch.tensor(VALUE_WEIGHT, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        require_width("x", x, 4)
        return attention(x @ self.query_weight, x @ self.key_weight, x @ self.value_weight, scale=1.0)
