"""Common ways to write masks in torch, with what is proved for each; all are exported in one module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from transformers import MistralConfig, masking_utils

from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.masks.visibility import Visibility, visibility
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.precision import precision_named

Masks = Callable[[Tensor, Tensor, Tensor], Tensor | None]
"""Computes a mask from `query (B, 2, n, 8)`, `key (B, 2, m, 8)` and `keep (B, m)`, True where there is no padding."""

LOWEST = torch.finfo(torch.float32).min
SLOPES = torch.tensor([0.5, 0.25])[:, None, None]
TOKENS, KEYS = 16, 20
"""Sizes of the example: keys of a memory, or as many as tokens."""


@dataclass(frozen=True)
class MaskIdiom:
    """A way to write a mask.

    Attributes:
        mask: computes it.
        proved: what is proved if token counts are dynamic.
        static: what is proved if they are static and the exporter folded the mask; None if the same.
        silent: the result for queries without keys.
        cross: whether the numbers of keys and of tokens differ.
        is_causal: whether scaled_dot_product_attention gets the flag instead of a mask.
    """

    mask: Masks
    proved: str
    static: str | None = None
    silent: str = "empty"
    cross: bool = False
    is_causal: bool = False


def indices(query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])[None, :]


def distances(query: Tensor, key: Tensor) -> Tensor:
    rows, columns = indices(query, key)
    return rows - columns


def of_indices(condition: Callable[[Tensor, Tensor], Tensor]) -> Masks:
    return lambda query, key, keep: condition(*indices(query, key))


def ones(query: Tensor, key: Tensor) -> Tensor:
    return torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)


def _config(implementation: str) -> MistralConfig:
    config = MistralConfig(hidden_size=16, num_attention_heads=2, num_key_value_heads=2, sliding_window=5)
    config._attn_implementation, config.attention_chunk_size = implementation, 4
    return config


CONFIGS = {name: _config(name) for name in ("sdpa", "eager")}


def transformers(name: str, implementation: str = "sdpa", padded: bool = True) -> Masks:
    """Return a mask of transformers, `causal`, `sliding_window_causal`, `chunked_causal` or
    `bidirectional_sliding_window`."""
    create = getattr(masking_utils, f"create_{name}_mask")
    kept = (lambda keep: keep.long()) if padded else (lambda keep: None)
    return lambda query, key, keep: create(CONFIGS[implementation], query[:, 0], kept(keep), past_key_values=None)


def swin_shifted(query: Tensor, key: Tensor, keep: Tensor) -> Tensor:
    """Mask of the last window of an image rolled by two of four rows: two halves that do not see each other."""
    rows = torch.arange(16) // 4 >= 2
    return torch.where(rows[:, None] == rows[None, :], 0.0, -100.0)


def prefix_assigned(query: Tensor, key: Tensor, keep: Tensor) -> Tensor:
    return ones(query, key).tril() | (torch.arange(key.shape[2]) < 3)[None, :]


CAUSAL, WINDOW = "band −∞ … 0", "band −4 … 0"

IDIOMS: dict[str, MaskIdiom] = {
    "is_causal": MaskIdiom(lambda query, key, keep: None, CAUSAL, is_causal=True),
    "tril": MaskIdiom(lambda query, key, keep: ones(query, key).tril(), CAUSAL),
    "triu, to be hidden": MaskIdiom(lambda query, key, keep: ~ones(query, key).triu(1), CAUSAL),
    "triu of -inf": MaskIdiom(
        lambda query, key, keep: torch.full((query.shape[2], key.shape[2]), -math.inf).triu(1), CAUSAL
    ),
    "triu of ones times -1e9": MaskIdiom(
        lambda query, key, keep: ones(query, key).float().triu(1) * -1e9, CAUSAL, silent="never"
    ),
    "one minus, times -1e4": MaskIdiom(
        lambda query, key, keep: (1.0 - ones(query, key).tril().float()) * -10000.0, CAUSAL, silent="never"
    ),
    "where, the lowest number": MaskIdiom(
        lambda query, key, keep: torch.where(ones(query, key).tril(), 0.0, LOWEST), CAUSAL, silent="never"
    ),
    "positions compared": MaskIdiom(of_indices(lambda i, j: i >= j), CAUSAL),
    "flag off by one": MaskIdiom(of_indices(lambda i, j: i > j), "band −∞ … −1"),
    "diagonal one further": MaskIdiom(lambda query, key, keep: ones(query, key).tril(1), "band −∞ … 1"),
    "positions counted": MaskIdiom(
        lambda query, key, keep: ones(query, key).int().cumsum(0) >= ones(query, key).int().cumsum(1), CAUSAL
    ),
    "bottom-right causal": MaskIdiom(
        lambda query, key, keep: ones(query, key).tril(key.shape[2] - query.shape[2]),
        "band −∞ … m − n",
        "band −∞ … 4",
        cross=True,
    ),
    "top-left causal, more keys": MaskIdiom(lambda query, key, keep: ones(query, key).tril(), CAUSAL, cross=True),
    "window of earlier keys": MaskIdiom(of_indices(lambda i, j: (i >= j) & (i - j < 5)), WINDOW),
    "window by abs": MaskIdiom(of_indices(lambda i, j: (i - j).abs() <= 3), "band −3 … 3"),
    "window by clamp": MaskIdiom(of_indices(lambda i, j: (j >= (i - 4).clamp(min=0)) & (j <= i)), WINDOW),
    "window by tril and triu": MaskIdiom(lambda query, key, keep: ones(query, key).tril().triu(-4), WINDOW),
    "window of negative offsets": MaskIdiom(of_indices(lambda i, j: (j - i >= 2) & (j - i <= 5)), "band 2 … 5"),
    "window by floats": MaskIdiom(
        of_indices(lambda i, j: (i.float() - j.float() < 5.0) & (i.float() >= j.float())), WINDOW
    ),
    "window with a hole": MaskIdiom(
        of_indices(lambda i, j: (i >= j) & (i - j < 5) & (i - j != 2)),
        "band −1 … 0 or band −4 … −3",
        f"{WINDOW}, residue: pattern",
    ),
    "strided": MaskIdiom(
        of_indices(lambda i, j: (i - j) % 4 == 0), "all, residue: pattern", "band −12 … 12, residue: pattern"
    ),
    "chunks, causal": MaskIdiom(of_indices(lambda i, j: (i // 4 == j // 4) & (i >= j)), f"{CAUSAL} and blocks of 4"),
    "blocks": MaskIdiom(of_indices(lambda i, j: i // 4 == j // 4), "blocks of 4"),
    "blocks by remainders": MaskIdiom(of_indices(lambda i, j: i - i % 4 == j - j % 4), "blocks of 4"),
    "blocks by floor": MaskIdiom(
        of_indices(lambda i, j: torch.div(i, 4, rounding_mode="floor") == torch.div(j, 4, rounding_mode="floor")),
        "blocks of 4",
    ),
    "block causal": MaskIdiom(of_indices(lambda i, j: i // 4 >= j // 4), "blocks of 4, −∞ … 0"),
    "blocks, one before": MaskIdiom(
        of_indices(lambda i, j: (i // 4 - j // 4 <= 1) & (i // 4 >= j // 4)), "blocks of 4, −1 … 0"
    ),
    "shifted blocks": MaskIdiom(
        of_indices(lambda i, j: (i + 2) // 4 == (j + 2) // 4), "blocks of 4 (queries + 2, keys + 2)"
    ),
    "prefix": MaskIdiom(prefix_assigned, f"{CAUSAL} or keys 0 … 2"),
    "prefix of queries too": MaskIdiom(
        of_indices(lambda i, j: (i >= j) | ((i < 3) & (j < 3))),
        f"{CAUSAL} or keys 0 … 2",
    ),
    "local and global": MaskIdiom(
        of_indices(lambda i, j: ((i - j).abs() <= 2) | (j < 2) | (i < 2)),
        "band −2 … 2 or keys 0 … 1 or queries 0 … 1",
    ),
    "two windows of a rolled image": MaskIdiom(swin_shifted, "", "all, residue: bias"),
    "padding": MaskIdiom(lambda query, key, keep: keep[:, None, None, :], "all, residue: padding"),
    "window and padding": MaskIdiom(
        lambda query, key, keep: keep[:, None, None, :] & ones(query, key).tril().triu(-4),
        f"{WINDOW}, residue: padding",
    ),
    "window or not padding": MaskIdiom(
        lambda query, key, keep: ~keep[:, None, None, :] | ones(query, key).tril(), "all, residue: padding"
    ),
    "window, and padding of the lowest number": MaskIdiom(
        lambda query, key, keep: torch.where(keep[:, None, None, :] & ones(query, key).tril().triu(-4), 0.0, LOWEST),
        f"{WINDOW}, residue: padding",
        silent="mean",
    ),
    "causal of -inf, and padding of -1e4 added": MaskIdiom(
        lambda query, key, keep: (
            torch.full((query.shape[2], key.shape[2]), -math.inf).triu(1)
            + (1.0 - keep[:, None, None, :].float()) * -10000.0
        ),
        f"{CAUSAL}, residue: bias, padding",
    ),
    "a padding that the window's -1e4 is added to": MaskIdiom(
        lambda query, key, keep: (1.0 - (keep[:, None, None, :] & ones(query, key).tril()).float()) * -10000.0,
        "all, residue: bias, padding",
    ),
    "positions of the data": MaskIdiom(
        lambda query, key, keep: keep.long().cumsum(-1)[:, None, :, None] >= keep.long().cumsum(-1)[:, None, None, :],
        "all, residue: padding, queries",
    ),
    "a window of the data": MaskIdiom(
        lambda query, key, keep: (distances(query, key) <= keep.sum()) & ones(query, key).tril(),
        "band −sum_1 … 0",
    ),
    "slopes by distance, causal": MaskIdiom(
        lambda query, key, keep: (
            torch.where(ones(query, key).tril(), 0.0, -math.inf) + distances(query, key).float() * -0.5
        ),
        f"{CAUSAL}, residue: bias",
    ),
    "slopes by distance, and the lowest number": MaskIdiom(
        lambda query, key, keep: torch.where(ones(query, key).tril(), 0.0, LOWEST) + SLOPES * -distances(query, key),
        f"{CAUSAL}, residue: bias",
        silent="never",
    ),
    "slopes by key, and the lowest number": MaskIdiom(
        lambda query, key, keep: torch.where(ones(query, key).tril(), 0.0, LOWEST) + SLOPES * indices(query, key)[1],
        f"{CAUSAL}, residue: bias",
        silent="never",
    ),
    "transformers, causal": MaskIdiom(transformers("causal", padded=False), CAUSAL),
    "transformers, causal and padding": MaskIdiom(transformers("causal"), f"{CAUSAL}, residue: padding"),
    "transformers, sliding": MaskIdiom(transformers("sliding_window_causal", padded=False), WINDOW),
    "transformers, sliding and padding": MaskIdiom(
        transformers("sliding_window_causal"), f"{WINDOW}, residue: padding"
    ),
    "transformers, both sides": MaskIdiom(
        transformers("bidirectional_sliding_window"), "band −5 … 5, residue: padding"
    ),
    "transformers, chunked": MaskIdiom(transformers("chunked_causal", padded=False), f"{CAUSAL} and blocks of 4"),
    "transformers, chunked and padding": MaskIdiom(
        transformers("chunked_causal"), "band −3 … 0, residue: condition, padding"
    ),
    "transformers, eager sliding": MaskIdiom(
        transformers("sliding_window_causal", "eager", padded=False), WINDOW, silent="never"
    ),
    "transformers, eager sliding and padding": MaskIdiom(
        transformers("sliding_window_causal", "eager"), f"{WINDOW}, residue: padding", silent="mean"
    ),
}


class Masked(nn.Module):
    """A module with a site for every idiom; each scales its queries differently, so that no two are equal."""

    def __init__(self, idioms: Mapping[str, MaskIdiom]) -> None:
        super().__init__()
        self.idioms = dict(idioms)

    def forward(self, x: Tensor, key: Tensor, memory: Tensor, keep: Tensor) -> tuple[Tensor, ...]:
        outputs = []
        for i, idiom in enumerate(self.idioms.values()):
            query, keys = x * (1 + i / 64), memory if idiom.cross else key
            mask = idiom.mask(query, keys, keep)
            output = F.scaled_dot_product_attention(query, keys, keys, attn_mask=mask, is_causal=idiom.is_causal)
            outputs.append(output)
        return tuple(outputs)


def exported(names: Iterable[str], is_dynamic: bool) -> Captured:
    """Export a graph with one site for each idiom, in order."""
    rng = torch.Generator().manual_seed(0)
    x, key, memory = (torch.randn(2, 2, n, 8, generator=rng) for n in (TOKENS, TOKENS, KEYS))
    shapes = None
    if is_dynamic:
        batch, n, m = Dim("batch", min=2, max=9), Dim("n", min=2, max=4096), Dim("m", min=2, max=4096)
        shapes = {"x": {0: batch, 2: n}, "key": {0: batch, 2: n}, "memory": {0: batch, 2: m}, "keep": {0: batch, 1: n}}
    keep = torch.rand(2, TOKENS, generator=rng) < 0.7
    module = Masked({name: IDIOMS[name] for name in names}).eval()
    return capture(module, (x, key, memory, keep), shapes, precision_named("fp32"))


def proved(is_dynamic: bool, idioms: Iterable[str]) -> dict[str, Visibility]:
    """Return what is proved for the idioms that can be exported in this form."""
    names = [*idioms]
    model = exported(names, is_dynamic).model
    canonicalize(model)
    nodes = [node for node in model.graph if node.op_type == "Attention"]
    return {name: visibility(node) for name, node in zip(names, nodes, strict=True)}
