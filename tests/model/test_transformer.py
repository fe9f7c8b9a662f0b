"""S11, permutation equivariance, and S12, the encoder, against torch."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnforge.model.attention import CrossAttention, MultiHeadSelfAttention, ParameterFreeAttention, SelfAttention
from attnforge.model.general import GeneralAttention
from attnforge.model.slips import PostSoftmaxScale
from attnforge.model.transformer import (
    FeedForward,
    LearnedPositions,
    SinusoidalPositions,
    TransformerEncoder,
    VisionTransformer,
)
from tests.model.from_torch import encoder_of
from tests.support.tensors import agree, differ, randn, randomized

# S11


def orderless_modules() -> dict[str, nn.Module]:
    return {
        "S1": SelfAttention(8, 8),
        "S2": MultiHeadSelfAttention(8, 8, 4, 2),
        "S7": ParameterFreeAttention(),
        "S13a": PostSoftmaxScale(8, 8, num_heads=2),
        "post-norm encoder": TransformerEncoder(2, 8, 2),
        "pre-norm encoder": TransformerEncoder(2, 8, 2, norm_first=True, final_norm=True),
    }


@pytest.mark.parametrize("name", orderless_modules())
def test_s11_permuting_tokens_permutes_outputs(name: str) -> None:
    module, x = randomized(orderless_modules()[name]), randn(2, 9, 8)
    order = torch.randperm(9)
    assert order.tolist() != list(range(9))
    agree(module(x[:, order]), module(x)[:, order])


@pytest.mark.parametrize(("positions", "is_causal"), [("sinusoidal", False), ("learned", False), (None, True)])
def test_s11_does_not_hold_with_positions_or_causality(positions: str | None, is_causal: bool) -> None:
    encoder = TransformerEncoder(2, 8, 2, max_length=16, positions=positions, is_causal=is_causal)
    module, x = randomized(encoder), randn(2, 9, 8)
    order = torch.arange(9).flip(0)
    assert differ(module(x[:, order]), module(x)[:, order])


def test_s11_holds_in_columns_and_over_memory() -> None:
    order = torch.randperm(9)
    general, features = randomized(GeneralAttention(6, 4, 5)), randn(6, 9)
    agree(general(features[:, order]), general(features)[:, order])
    cross, query, memory = randomized(CrossAttention(8, 2)), randn(2, 4, 8), randn(2, 9, 8)
    agree(cross(query, memory[:, order]), cross(query, memory))


# S12


def torch_encoder(norm_first: bool, activation: str, final_norm: bool, bias: bool = True) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        16, 4, 24, dropout=0.0, activation=activation, batch_first=True, norm_first=norm_first, bias=bias
    )
    norm = nn.LayerNorm(16) if final_norm else None
    # Nested tensors zero the outputs of padding tokens, which is an optimisation and not part of the function.
    return randomized(nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False))


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    ("activation", "final_norm", "bias"), [("relu", False, True), ("gelu", True, True), ("relu", True, False)]
)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_s12_encoder_agrees_with_torch(
    norm_first: bool, activation: str, final_norm: bool, bias: bool, padded: bool, is_causal: bool
) -> None:
    theirs = torch_encoder(norm_first, activation, final_norm, bias)
    ours = encoder_of(theirs, is_causal=is_causal)
    x = randn(2, 7, 16)
    padding = torch.arange(7) >= torch.tensor([[7], [3]]) if padded else None
    forbidden = torch.ones(7, 7, dtype=torch.bool).triu(1) if is_causal else None
    expected = theirs(x, mask=forbidden, src_key_padding_mask=padding)
    agree(ours(x, padding), expected)


def test_s12_vit_is_the_torch_encoder_over_patches() -> None:
    theirs, vit = torch_encoder(True, "gelu", True), randomized(VisionTransformer(8, 4, 10, 16, 4, 2))
    ours = encoder_of(theirs)
    vit.encoder.layers, vit.encoder.norm = ours.layers, ours.norm
    image = randn(2, 3, 8, 8)
    patches = vit.embedding(F.unfold(image, 4, stride=4).mT)
    x = torch.cat([vit.class_token.expand(2, 1, 16), patches], dim=1)
    expected = vit.head(theirs(x + vit.state_dict()["encoder.positions.table"])[:, 0])
    assert expected.shape == (2, 10)
    agree(vit(image), expected)


def test_s12_tokens_are_embedded_given_positions_and_truncated() -> None:
    encoder = randomized(TransformerEncoder(2, 16, 4, vocab_size=50, max_length=6, positions="learned"))
    tokens = torch.randint(0, 50, (2, 9))
    padding = torch.arange(9) >= torch.tensor([[9], [4]])
    state = encoder.state_dict()
    x = state["embedding.weight"][tokens[:, :6]] + state["positions.table"]
    for layer in encoder.layers:
        x = layer(x, attn_mask=~padding[:, None, None, :6])
    assert x.shape == (2, 6, 16)
    agree(encoder(tokens, padding), x)
    agree(encoder(tokens[:, :6], padding[:, :6]), x)
    assert encoder(tokens[:, :3]).shape == (2, 3, 16)


def test_s12_padding_and_later_tokens_do_not_matter() -> None:
    x, other = randn(2, 7, 16), randn(2, 7, 16)
    padding = torch.arange(7).expand(2, 7) >= 4
    late = torch.where(padding[..., None], other, x)
    encoder = randomized(TransformerEncoder(2, 16, 4))
    agree(encoder(late, padding)[:, :4], encoder(x, padding)[:, :4])
    assert differ(encoder(late)[:, :4], encoder(x)[:, :4])
    causal = randomized(TransformerEncoder(2, 16, 4, is_causal=True))
    agree(causal(late)[:, :4], causal(x)[:, :4])
    assert differ(causal(late)[:, 4:], causal(x)[:, 4:])
    everything = encoder(x, torch.ones(2, 7, dtype=torch.bool))
    assert everything.isfinite().all()


def test_s12_sinusoidal_table() -> None:
    positions = SinusoidalPositions(6, 40)
    added = positions(torch.zeros(2, 40, 6))
    for t in (0, 1, 17, 39):
        for i in range(3):
            angle = t / 10000 ** (2 * i / 6)
            assert added[1, t, 2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert added[1, t, 2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)
    assert not positions.state_dict()
    assert positions.half()(torch.zeros(1, 3, 6).half()).dtype == torch.float16


def test_s12_learned_positions_and_feed_forward() -> None:
    learned, x = randomized(LearnedPositions(4, 10)), randn(2, 6, 4)
    agree(learned(x) - x, learned.table[:6].expand(2, 6, 4))
    layer = randomized(FeedForward(4, 7, "gelu"))
    hidden = x @ layer.linear1.weight.T + layer.linear1.bias
    gelu = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    agree(layer(x), gelu @ layer.linear2.weight.T + layer.linear2.bias)
    for token in range(6):
        agree(layer(x)[:, token], layer(x[:, token]))
