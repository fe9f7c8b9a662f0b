"""Reference attention in eager PyTorch, written out by hand, and the registry of named models.

Modules read like their formulas; :func:`build_model` gives a named one with weights, example arguments and the dynamic
shapes that ``torch.export`` takes.
"""

from attnforge.model.attention import (
    CrossAttention,
    MultiHeadAttention,
    MultiHeadSelfAttention,
    ParameterFreeAttention,
    SelfAttention,
    attention,
)
from attnforge.model.decoder import Decoder, DecoderLayer, DecoderSizes, KeyValueCache, RotaryPositions, SwiGLU
from attnforge.model.general import GeneralAttention, GeneralMultiHeadAttention
from attnforge.model.patch import PatchAttention, PatchAttentionClassifier, merge_patches, split_patches
from attnforge.model.registry import MODELS, Example, RegisteredModel, build_model
from attnforge.model.slips import PostSoftmaxScale, ReshapeWithoutTranspose
from attnforge.model.transformer import (
    EncoderLayer,
    FeedForward,
    LearnedPositions,
    SinusoidalPositions,
    TransformerEncoder,
    VisionTransformer,
)
from attnforge.model.worked_example import WorkedExample

__all__ = [
    "MODELS",
    "CrossAttention",
    "Decoder",
    "DecoderLayer",
    "DecoderSizes",
    "EncoderLayer",
    "Example",
    "FeedForward",
    "GeneralAttention",
    "GeneralMultiHeadAttention",
    "KeyValueCache",
    "LearnedPositions",
    "MultiHeadAttention",
    "MultiHeadSelfAttention",
    "ParameterFreeAttention",
    "PatchAttention",
    "PatchAttentionClassifier",
    "PostSoftmaxScale",
    "RegisteredModel",
    "ReshapeWithoutTranspose",
    "RotaryPositions",
    "SelfAttention",
    "SinusoidalPositions",
    "SwiGLU",
    "TransformerEncoder",
    "VisionTransformer",
    "WorkedExample",
    "attention",
    "build_model",
    "merge_patches",
    "split_patches",
]
