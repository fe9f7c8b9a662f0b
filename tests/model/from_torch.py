"""The reference modules with the weights of torch's own, which must compute the same."""

from __future__ import annotations

from copy import deepcopy

from torch import Tensor, nn
from torch.nn import functional as F

from attnforge.model.attention import MultiHeadAttention
from attnforge.model.transformer import EncoderLayer, TransformerEncoder


def attention_of(theirs: nn.MultiheadAttention) -> MultiHeadAttention:
    """Return the same function, batch first, with a copy of the weights."""
    has_bias = theirs.in_proj_bias is not None
    ours = MultiHeadAttention(theirs.embed_dim, theirs.num_heads, has_bias, theirs.kdim, theirs.vdim)
    if theirs.kdim == theirs.vdim == theirs.embed_dim:
        weights: tuple[Tensor, ...] = theirs.in_proj_weight.chunk(3)
    else:
        weights = theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight
    names = ("query_proj", "key_proj", "value_proj")
    state = {f"{name}.weight": weight for name, weight in zip(names, weights, strict=True)}
    if has_bias:
        state |= {f"{name}.bias": bias for name, bias in zip(names, theirs.in_proj_bias.chunk(3), strict=True)}
    state |= {f"output_proj.{name}": tensor for name, tensor in theirs.out_proj.state_dict().items()}
    ours.to(theirs.out_proj.weight).load_state_dict(state)
    return ours


def layer_of(theirs: nn.TransformerEncoderLayer) -> EncoderLayer:
    """Return the same function in eval mode, batch first, with a copy of the weights; the activation is relu or
    gelu."""
    mlp, attention = theirs.linear1, attention_of(theirs.self_attn)
    ours = EncoderLayer(
        mlp.in_features,
        attention.num_heads,
        mlp.out_features,
        activation="relu" if theirs.activation is F.relu else "gelu",
        norm_first=theirs.norm_first,
        bias=mlp.bias is not None,
    )
    ours.to(mlp.weight)  # before the weights are copied, so that float64 weights are not rounded to float32
    ours.attention = attention
    for name in ("linear1", "linear2"):
        getattr(ours.feed_forward, name).load_state_dict(getattr(theirs, name).state_dict())
    for name in ("norm1", "norm2"):
        getattr(ours, name).load_state_dict(getattr(theirs, name).state_dict())
    return ours


def encoder_of(theirs: nn.TransformerEncoder, is_causal: bool = False) -> TransformerEncoder:
    """Return the same function in eval mode, batch first, with a copy of the weights."""
    layers = [layer_of(layer) for layer in theirs.layers]
    ours = TransformerEncoder(1, layers[0].attention.embed_dim, layers[0].attention.num_heads, is_causal=is_causal)
    ours.layers, ours.norm = nn.ModuleList(layers), deepcopy(theirs.norm)
    return ours
