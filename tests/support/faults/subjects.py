"""The models into which faults are put."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.export import Dim

import attnforge
from attnforge.bundle import Bundle
from attnforge.export.attention.canonicalize import Site
from attnforge.export.lowering import blocks, openvino, tensorrt
from attnforge.export.lowering import onnxruntime as lowering
from attnforge.export.targets import onnxruntime as target
from attnforge.model import Example, build_model
from attnforge.model.attention import MultiHeadAttention
from tests.support.random_decoders import CausalModel

PRECISIONS = {
    "encoder": ("fp32", "fp16", "bf16"),
    "causal": ("fp32", "fp16"),
    "vit": ("fp32", "fp16"),
    "cross": ("fp32", "fp16", "bf16"),
    "bare-window": ("fp32", "fp16"),
    "window": ("fp32", "fp16"),
    "padded": ("fp32", "fp16"),
    "padded-causal": ("fp32",),
    "window-in-products": ("fp32",),
    "steps": ("fp32",),
    "padded-steps": ("fp32",),
    "calibrated": ("int8",),
    "by-token": ("int8",),
    "static": ("fp8",),
    "blocks-of-4-bits": ("int4",),
    "llama": ("fp32", "fp16", "bf16"),
    "gpt": ("fp32", "fp16"),
    "windowed-decoder": ("fp32", "fp16"),
    "capped-decoder": ("fp32",),
    "odd-heads": ("fp32", "fp16"),
    "turning-decoder": ("fp32", "fp16"),
    "sloped-decoder": ("fp32", "fp16"),
}
"""The subjects, and the precisions that they are deployed in."""

USUAL_TOKENS, MOST_TOKENS, MOST_BATCH = 16, 24, 4

STATIC_TOKENS = 32
"""The smallest number of tokens for which fp8 attention is fused."""

MAX_ERROR = {"calibrated": 0.1, "by-token": 0.1, "static": 0.2, "blocks-of-4-bits": 0.4}
"""The quantised variants of the encoder, and their maximum error. In 8 bits: balanced on data, with one range after
norms, or with a range per token. In fp8, with static tokens, including its attention. With balanced 4-bit
weights."""

BY_MASK = ("bare-window", "window", "padded", "padded-causal")
"""The subjects that are lowered by their masks, as they would be with many tokens."""

FOR_TENSORRT = ("window-in-products", "steps", "padded-steps")
"""The subjects that ONNX Runtime runs in the form for TensorRT with many tokens."""

_ROTARY: dict[str, Any] = {"positions": "rotary", "norm": "rms", "activation": "silu", "gated": True, "bias": False}

DECODERS: dict[str, dict[str, Any]] = {
    "llama": _ROTARY | {"layers": 2},
    "gpt": {"positions": "learned", "norm": "layer", "activation": "gelu-tanh", "gated": False, "bias": True}
    | {"heads": 2},
    "windowed-decoder": _ROTARY | {"window": 5},
    "capped-decoder": _ROTARY | {"softcap": 2.0, "written": "products"},
    "odd-heads": _ROTARY | {"head_size": 6, "window": 5},
    "turning-decoder": _ROTARY | {"head_size": 16},
    "sloped-decoder": _ROTARY | {"positions": "slopes"},
}
"""The decoders: with rotary positions and grouped heads like Llama, with learned positions like GPT-2, with a window,
with a soft cap, with a head size for which attention reads the filled part of the caches, with one that the kernel
rotates itself, and with a bias by distance."""

PLACES = 32
"""Capacity of the caches: more than the tokens of a case, so that a row written too far stays inside."""


class Masked(nn.Module):
    """Self-attention with padding, except for a bare window and bare causal blocks: to all tokens, to those that are
    not later, or, in a window, to three before and one after."""

    def __init__(self, sees: str) -> None:
        super().__init__()
        self.sees, self.attention = sees, MultiHeadAttention(32, 2)

    def forward(self, tokens: Tensor, key_padding_mask: Tensor | None = None) -> Tensor:
        mask = None
        if "window" in self.sees:
            positions = torch.arange(tokens.shape[1])
            distance = positions[:, None] - positions
            mask = (distance >= -1) & (distance <= 3)
        is_causal = self.sees in ("padded-causal", "steps", "padded-steps")
        attended: Tensor = self.attention(tokens, tokens, tokens, mask, key_padding_mask, is_causal)
        return attended


def subject(name: str) -> Example:
    """Build a small subject with weights like a trained model's: norms and biases differ from their
    initialisation, and attention prefers some keys."""
    batch, tokens = Dim("batch", min=1, max=MOST_BATCH), Dim("tokens", min=1, max=MOST_TOKENS)
    sequence = {0: batch, 1: tokens}
    shapes: Any = {"tokens": sequence, "key_padding_mask": sequence}
    if name in ("encoder", *MAX_ERROR):
        module, args, _ = build_model("transformer-encoder")
        shapes = {key: {0: batch} for key in shapes} if name == "static" else shapes
    elif name == "causal":
        module, args, _ = build_model("transformer-encoder", num_layers=1, is_causal=True)
    elif name == "vit":
        module, args, _ = build_model("vit", num_layers=1)
        shapes = {"image": {0: batch}}
    elif name in DECODERS:
        module, args, _ = decoder(name)
        shapes = {"tokens": sequence}
    elif name in BY_MASK + FOR_TENSORRT:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            module, args = Masked(name).eval(), (torch.randn(2, USUAL_TOKENS, 32), _padding())
        if name in ("bare-window", "steps"):
            args, shapes = args[:1], {"tokens": sequence}
    else:
        module, args, _ = build_model("cross-attention", embed_dim=64, memory_dim=48)
        keys = {0: batch, 1: Dim("keys", min=1, max=MOST_TOKENS)}
        shapes = {"query": sequence, "memory": keys, "key_padding_mask": keys}
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if parameter.ndim == 1 or key == "class_token":
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=random))
            elif key.endswith(("query_proj.weight", "attention.query.weight")):
                parameter.mul_(4)
        if name in ("calibrated", "blocks-of-4-bits"):
            _with_outliers(module)
    if name != "vit":
        args = tuple(arg[:, -(STATIC_TOKENS if name == "static" else USUAL_TOKENS) :] for arg in args)
    return Example(module, args, shapes)


def decoder(name: str) -> Example:
    """Build one of :data:`DECODERS`."""
    options: dict[str, Any] = {
        "heads": 4,
        "key_heads": 2,
        "head_size": 8,
        "layers": 1,
        "outputs": 1,
        "norm_first": True,
    }
    options |= DECODERS[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = CausalModel(32, vocabulary=50, most_tokens=PLACES, **options).eval()
        tokens = torch.randint(0, 50, (2, USUAL_TOKENS))
    return Example(module, (tokens,), None)


def _with_outliers(encoder: nn.Module) -> None:
    """Give the output of each norm before a product two large channels, as in trained models. The weights that
    read them are reduced accordingly."""
    for layer in encoder.layers:  # type: ignore[union-attr]
        attention, feed_forward = layer.attention, layer.feed_forward
        readers = {
            layer.norm1: (attention.query_proj, attention.key_proj, attention.value_proj),
            layer.norm2: (feed_forward.linear1,),
        }
        for norm, linears in readers.items():
            for tensor in (norm.weight, norm.bias):
                tensor[[3, 17]] *= 40
            for linear in linears:
                linear.weight[:, [3, 17]] /= 40


def _padding() -> Tensor:
    """Return a padding mask `(2, tokens)` in which the second sample is shorter."""
    return torch.arange(USUAL_TOKENS) >= torch.tensor([[USUAL_TOKENS], [USUAL_TOKENS - 5]])


def deploy_in_blocks(name: str, folder: Path) -> Bundle:
    """Deploy a subject whose graph for OpenVINO has attention in blocks, or in causal blocks."""
    module, args, shapes = subject(name)
    many = mock.patch.multiple(openvino, MANY_SCORES=1, MANY_TOKENS=1, STEPS=(4,))
    with many, mock.patch.object(blocks, "BLOCKS", (4,)):
        return attnforge.deploy(module, args, folder, shapes, "fp32", ["onnxruntime"], name, tune=False)


def deploy(name: str, precision: str, folder: Path) -> Bundle:
    module, args, shapes = subject(name)
    if name in MAX_ERROR:
        return attnforge.deploy(
            module, args, folder, shapes, precision, ["onnxruntime"], name, tune=False,
            data=[args] if name != "by-token" else [], max_error=MAX_ERROR[name],
        )  # fmt: skip
    if name in DECODERS:
        return attnforge.deploy(
            module, args, folder, shapes, precision, ["onnxruntime"], name, tune=False, cache_tokens=PLACES
        )
    if name in FOR_TENSORRT:
        with (
            mock.patch.multiple(tensorrt, MANY_SCORES=1, MANY_TOKENS=1, BLOCKS=(4,)),
            mock.patch.object(target, "lower", _lowered_for_tensorrt),
        ):
            return attnforge.deploy(module, args, folder, shapes, precision, ["onnxruntime"], name, tune=False)
    many = mock.patch.object(lowering, "MANY_SCORES", 1) if name in BY_MASK else contextlib.nullcontext()
    with many, mock.patch.object(blocks, "BLOCKS", (4,)):
        return attnforge.deploy(module, args, folder, shapes, precision, ["onnxruntime"], name, tune=False)


def _lowered_for_tensorrt(model: ir.Model, sites: list[Site], sizes: Mapping[str, int], **_: Any) -> Any:
    return tensorrt.lower(model, sites, sizes=sizes)
