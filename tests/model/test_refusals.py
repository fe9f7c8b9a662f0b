"""One-line errors for invalid arguments of the models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from attnforge.errors import ShapeError, UnknownNameError, UsageError
from attnforge.model.attention import MultiHeadAttention, MultiHeadSelfAttention, SelfAttention
from attnforge.model.decoder import Decoder, DecoderSizes
from attnforge.model.general import GeneralAttention, GeneralMultiHeadAttention
from attnforge.model.patch import PatchAttention, PatchAttentionClassifier, merge_patches, split_patches
from attnforge.model.slips import PostSoftmaxScale, ReshapeWithoutTranspose
from attnforge.model.transformer import (
    FeedForward,
    LearnedPositions,
    SinusoidalPositions,
    TransformerEncoder,
    VisionTransformer,
)
from attnforge.model.worked_example import WorkedExample
from tests.support.identities import multi_head_by_slicing, selection_matrices


def decoder(**sizes: Any) -> Decoder:
    """Build a small decoder with ten positions."""
    small = {"vocab_size": 9, "embed_dim": 16, "num_heads": 4, "num_layers": 1, "max_tokens": 10}
    return Decoder(DecoderSizes(**small | sizes))


REFUSED: dict[str, Callable[[], object]] = {
    "S1 query_dim": lambda: SelfAttention(8, 8, query_dim=4),
    "S1 size": lambda: SelfAttention(8, 0),
    "S1 width": lambda: SelfAttention(8, 8)(torch.randn(3, 7)),
    "S2 key_dim": lambda: MultiHeadSelfAttention(8, 10, 8, 4),
    "S2 value_dim": lambda: MultiHeadSelfAttention(8, 8, 10, 4),
    "S2 heads": lambda: MultiHeadSelfAttention(8, 8, 8, 0),
    "S2 width": lambda: MultiHeadSelfAttention(8, 8, 8, 2)(torch.randn(2, 3, 7)),
    "S3 embed_dim": lambda: MultiHeadAttention(10, 4),
    "S3 key": lambda: MultiHeadAttention(8, 2, kdim=6)(*torch.randn(3, 2, 4, 8)),
    "S3 mask rank": lambda: MultiHeadAttention(8, 2)(*torch.randn(3, 2, 4, 8), torch.ones(4, dtype=torch.bool)),
    "S3 padding rank": lambda: MultiHeadAttention(8, 2)(
        *torch.randn(3, 2, 4, 8), key_padding_mask=torch.ones(4, dtype=torch.bool)
    ),
    "S4 width": lambda: WorkedExample()(torch.randn(3, 3)),
    "S5 dot": lambda: GeneralAttention(8, 8, 8, query_dim=4, score="dot"),
    "S5 scaled-dot": lambda: GeneralAttention(8, 8, 8, query_dim=4),
    "S5 size": lambda: GeneralAttention(8, 8, -1),
    "S5 features": lambda: GeneralAttention(8, 4, 4)(torch.randn(5, 7)),
    "S5 query features": lambda: GeneralAttention(8, 4, 4, query_input_dim=6)(torch.randn(8, 7)),
    "S6 dot": lambda: GeneralMultiHeadAttention(8, 8, 8, 2, 8, query_dim=4),
    "S6 heads": lambda: GeneralMultiHeadAttention(8, 8, 8, 0, 8),
    "S6 output_dim": lambda: GeneralMultiHeadAttention(8, 8, 8, 2, 0),
    "S8 height": lambda: split_patches(torch.randn(3, 10, 8), 4),
    "S8 width": lambda: PatchAttention()(torch.randn(2, 3, 8, 10)),
    "S8 patch size": lambda: split_patches(torch.randn(3, 8, 8), 0),
    "S8 channels": lambda: PatchAttention()(torch.randn(2, 1, 8, 8)),
    "S8 merge size": lambda: merge_patches(torch.randn(4, 48), 4, 8, 10),
    "S8 merge tokens": lambda: merge_patches(torch.randn(5, 48), 4, 8, 8),
    "S8 merge features": lambda: merge_patches(torch.randn(4, 47), 4, 8, 8),
    "S8 digits": lambda: PatchAttentionClassifier()(torch.randn(2, 1, 10, 10)),
    "S8 digits patch": lambda: PatchAttentionClassifier(patch_size=3),
    "S9 width": lambda: selection_matrices(10, 4),
    "S9 value": lambda: multi_head_by_slicing(torch.randn(4, 8), torch.randn(4, 8), torch.randn(4, 6), 4),
    "S12 odd": lambda: SinusoidalPositions(7, 10),
    "S12 sinusoidal length": lambda: SinusoidalPositions(8, 10)(torch.randn(2, 11, 8)),
    "S12 learned length": lambda: LearnedPositions(8, 10)(torch.randn(2, 11, 8)),
    "S12 learned width": lambda: LearnedPositions(8, 10)(torch.randn(2, 5, 1)),
    "S12 layers": lambda: TransformerEncoder(0, 8, 2),
    "S12 vit patch": lambda: VisionTransformer(10, 4, 10, 8, 2, 1),
    "S12 vit image": lambda: VisionTransformer(8, 4, 10, 8, 2, 1)(torch.randn(2, 3, 12, 12)),
    "S12 decoder heads": lambda: decoder(embed_dim=10),
    "S12 decoder no heads": lambda: decoder(num_heads=0),
    "S12 decoder key heads": lambda: decoder(num_kv_heads=3),
    "S12 decoder no key heads": lambda: decoder(num_kv_heads=0),
    "S12 decoder odd head": lambda: decoder(embed_dim=12),
    "S12 decoder size": lambda: decoder(vocab_size=0),
    "S12 decoder layers": lambda: decoder(num_layers=0),
    "S12 decoder hidden": lambda: decoder(hidden_dim=-1),
    "S12 decoder positions": lambda: decoder(max_tokens=0),
    "S12 decoder window": lambda: decoder(window=-1),
    "S12 decoder soft cap": lambda: decoder(soft_cap=-1.0),
    "S12 decoder rank": lambda: decoder()(torch.zeros(4, dtype=torch.int64)),
    "S12 decoder length": lambda: decoder()(torch.zeros(1, 11, dtype=torch.int64)),
    "S12 decoder learned length": lambda: decoder(positions="learned")(torch.zeros(1, 11, dtype=torch.int64)),
    "S13a heads": lambda: PostSoftmaxScale(8, 10, num_heads=4),
    "S13b heads": lambda: ReshapeWithoutTranspose(8, 8, 10, 4),
    "S13b batch": lambda: ReshapeWithoutTranspose(8, 8, 8, 4)(torch.randn(5, 8)),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_match_are_refused_in_one_line(case: str) -> None:
    with pytest.raises(ShapeError) as caught:
        REFUSED[case]()
    assert "\n" not in str(caught.value)


def test_unknown_names_and_invalid_masks_are_refused() -> None:
    with pytest.raises(UnknownNameError, match="unknown score 'cosine'; known: additive, concat, dot"):
        GeneralAttention(8, 8, 8, score="cosine")
    with pytest.raises(UnknownNameError, match="unknown align 'sparsemax'; known: hard, softmax"):
        GeneralMultiHeadAttention(8, 8, 8, 2, 8, align="sparsemax")
    with pytest.raises(UnknownNameError, match="unknown activation 'silu'"):
        FeedForward(8, 8, "silu")
    with pytest.raises(UnknownNameError, match="unknown positions 'rotary'"):
        TransformerEncoder(1, 8, 2, max_length=4, positions="rotary")
    with pytest.raises(UsageError, match="max_length"):
        TransformerEncoder(1, 8, 2, positions="learned")
    for kind in ("positions", "norm", "feed_forward"):
        with pytest.raises(UnknownNameError, match=f"unknown {kind} 'other'; known: "):
            decoder(**{kind: "other"})
    with pytest.raises(UsageError, match=r"input_ids are torch\.int32; give torch\.int64"):
        decoder()(torch.zeros(1, 4, dtype=torch.int32))
    x = torch.randn(2, 4, 8)
    with pytest.raises(UsageError, match=r"attn_mask is torch\.float32"):
        MultiHeadSelfAttention(8, 8, 8, 2)(x, attn_mask=torch.zeros(4, 4))
    with pytest.raises(UsageError, match=r"key_padding_mask is torch\.int64"):
        MultiHeadSelfAttention(8, 8, 8, 2)(x, key_padding_mask=torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"attn_mask is torch\.float32"):
        SelfAttention(8, 8)(x, torch.zeros(4, 4))
