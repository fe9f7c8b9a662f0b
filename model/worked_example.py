"""S4, self-attention computed by hand: three tokens of four features, small integer weights, no scale.

Every intermediate table of this ``softmax(Q Kᵀ) V`` is known, from scores of 2, 4 and 16 to outputs of five digits, so
a wrong transpose, a wrong axis or a stray scale gives a wrong number. The tables are in the tests.
Source: R. Karim, Illustrated: Self-Attention, 2019,
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


class WorkedExample(nn.Module):
    """``softmax(Q Kᵀ) V`` with ``K = X Wk``, ``Q = X Wq``, ``V = X Wv`` and the weights of the example.

    Shapes: x (n, 4) or (B, n, 4), in the example ``INPUT``, (3, 4); result (n, 3) or (B, n, 3).
    Raises ShapeError if x is not 4 wide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.key_weight = nn.Parameter(torch.tensor(KEY_WEIGHT, dtype=torch.float32))
        self.query_weight = nn.Parameter(torch.tensor(QUERY_WEIGHT, dtype=torch.float32))
        self.value_weight = nn.Parameter(torch.tensor(VALUE_WEIGHT, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        require_width("x", x, 4)
        return attention(x @ self.query_weight, x @ self.key_weight, x @ self.value_weight, scale=1.0)
