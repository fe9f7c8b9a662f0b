"""S8, attention over patches, against its definition."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from attnforge.model.patch import PatchAttention, merge_patches, split_patches
from tests.support.tensors import agree, randn, randomized


@pytest.mark.parametrize(
    ("shape", "patch_size"),
    [((3, 224, 224), 4), ((2, 3, 8, 12), 4), ((5, 1, 6, 6), 1), ((2, 2, 6, 9), 3), ((1, 4, 4), 4)],
)
def test_s8_split_and_merge_are_exact_inverses(shape: tuple[int, ...], patch_size: int) -> None:
    image = torch.randn(shape)
    tokens = split_patches(image, patch_size)
    channels, height, width = shape[-3:]
    assert tokens.shape[-2:] == (height * width // patch_size**2, channels * patch_size**2)
    assert torch.equal(merge_patches(tokens, patch_size, height, width), image)
    assert torch.equal(split_patches(merge_patches(tokens, patch_size, height, width), patch_size), tokens)
    batched = image if image.ndim == 4 else image[None]
    unshuffled = F.pixel_unshuffle(batched, patch_size).flatten(2).mT  # 48×56×56 -> 3136 tokens of 48
    assert torch.equal(tokens if image.ndim == 4 else tokens[None], unshuffled)


def test_s8_tokens_are_row_major_and_features_raw_pixels() -> None:
    image = torch.arange(2 * 4 * 6).reshape(2, 4, 6)
    tokens = split_patches(image, 2)
    assert tokens.shape == (6, 8)
    assert tokens[1].tolist() == [2, 3, 8, 9, 26, 27, 32, 33]  # row 0, column 1: two channels of 2×2
    assert tokens[3].tolist() == [12, 13, 18, 19, 36, 37, 42, 43]  # row 1, column 0


def test_s8_patch_attention_is_s2_over_patches() -> None:
    module, image = randomized(PatchAttention(3, 4, 12, 3)), randn(2, 3, 8, 16)
    output = module(image)
    assert output.shape == (2, 8, 12)
    agree(output, module.attention(F.unfold(image, 4, stride=4).mT))
    agree(module(image[0]), output[0])
    assert PatchAttention().attention.query_proj.weight.shape == (192, 48)
