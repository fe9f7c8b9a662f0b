"""A module of your own with a dynamic batch: deploy, verify, run.

python examples/own_module.py [FOLDER]
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim

import attnforge


class Block(nn.Module):
    """A pre-norm transformer block, with its attention written out."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, tokens, width)
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))  # (batch, tokens, 3, heads, head_dim)
        query, key, value = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, tokens, head_dim)
        weights = (query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5).softmax(-1)
        x = x + self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


def main(folder: Path) -> None:
    batch, tokens = Dim("batch", min=1, max=16), Dim("tokens", min=1, max=64)
    example = torch.randn(4, 32, 64)  # the usual sizes; at least 2 where a dim is dynamic
    bundle = attnforge.deploy(
        Block(), (example,), folder / "block.bundle", {"x": {0: batch, 1: tokens}}, precision="fp16", force=True
    )
    attention = bundle.manifest.attention
    print(f"{attention.canonical} of {attention.sites} sites canonical; fused: {attention.fused}")

    report = attnforge.verify(bundle)
    for name, backend in report.backends.items():
        print(f"{name}: error {backend.error:.1e}, allowed {backend.budget:.1e} (worst case: {backend.case})")
    if not report.passed:
        sys.exit("a backend is over its budget; attnforge diagnose says where it begins")

    with attnforge.load(bundle) as session:
        for size in (1, 7, 16):
            y = session(torch.randn(size, 64, 64, dtype=torch.float16))
            print(f"batch {size} on {session.backend}: {tuple(y.shape)}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
