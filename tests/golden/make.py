"""Write the golden bundles with the current version: `python -m tests.golden.make FOLDER [NAME ...]`.

A bundle in the repository is not rewritten while its format still loads, because it tests the version that wrote it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge

HEADS, WORDS, CAPACITY = 2, 20, 12


class Attention(nn.Module):
    """Self-attention with a residual, causal or not; input and output are `(batch, tokens, width)`."""

    def __init__(self, width: int, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal
        self.norm, self.packed, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.packed(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        added: Tensor = x + self.out(attended.transpose(1, 2).flatten(-2))
        return added


class CausalModel(nn.Module):
    """Logits `(batch, tokens, 20)` of ids `(batch, tokens)`, from one causal attention over embeddings."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.attention = nn.Embedding(WORDS, width), Attention(width, is_causal=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.attention(self.embedding(input_ids)) @ self.embedding.weight.T
        return logits


BUNDLES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "encoder-fp32": ("fp32", 16, {}),
    "encoder-fp16": ("fp16", 16, {}),
    "encoder-int8": ("int8", 64, {"max_error": 0.2}),
    "decoder-fp32": ("fp32", 16, {"cache_tokens": CAPACITY}),
}
"""Precision, width and further options of each bundle; int8 has a larger width, as smaller products stay in fp32."""


def make(name: str, folder: Path) -> None:
    """Write a bundle to `folder/NAME`, and inputs with its outputs to `folder/NAME.npz`."""
    precision, width, options = BUNDLES[name]
    torch.manual_seed(0)
    batch, tokens = Dim("batch", min=1, max=2), Dim("tokens", min=1, max=8)
    is_decoder = name.startswith("decoder")
    module = CausalModel(width) if is_decoder else Attention(width)
    example = torch.randint(0, WORDS, (2, 5)) if is_decoder else torch.randn(2, 5, width)
    shapes = ({0: batch, 1: tokens},)
    bundle = attnforge.deploy(
        module.eval(), (example,), folder / name, shapes, precision, ["onnxruntime"], name, tune=False, **options
    )
    spec = bundle.manifest.inputs[0]
    given = example.numpy() if is_decoder else example.numpy().astype(spec.dtype)
    with attnforge.load(bundle, backend="onnxruntime-cpu") as session:
        if is_decoder:
            decoder = session.decoder(2)
            outputs = [decoder.prefill(given), decoder.step(given[:, 0])]
        else:
            outputs = [*session.run({spec.name: given}).values()]
    np.savez_compressed(folder / f"{name}.npz", given=given, **{str(i): output for i, output in enumerate(outputs)})


def main(folder: str, names: Sequence[str]) -> None:
    for name in names or BUNDLES:
        make(name, Path(folder))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
