"""Reference attention in eager PyTorch, and the registry of named models.

Modules read like their formulas. :func:`build_model` returns a named model with weights, example arguments and dynamic
shapes for ``torch.export``.
"""

from attnforge.model.attention import CrossAttention as CrossAttention
from attnforge.model.attention import MultiHeadAttention as MultiHeadAttention
from attnforge.model.attention import MultiHeadSelfAttention as MultiHeadSelfAttention
from attnforge.model.attention import ParameterFreeAttention as ParameterFreeAttention
from attnforge.model.attention import SelfAttention as SelfAttention
from attnforge.model.attention import attention as attention
from attnforge.model.decoder import Decoder as Decoder
from attnforge.model.decoder import DecoderLayer as DecoderLayer
from attnforge.model.decoder import DecoderSizes as DecoderSizes
from attnforge.model.decoder import KeyValueCache as KeyValueCache
from attnforge.model.decoder import RotaryPositions as RotaryPositions
from attnforge.model.decoder import SwiGLU as SwiGLU
from attnforge.model.general import GeneralAttention as GeneralAttention
from attnforge.model.general import GeneralMultiHeadAttention as GeneralMultiHeadAttention
from attnforge.model.patch import PatchAttention as PatchAttention
from attnforge.model.patch import PatchAttentionClassifier as PatchAttentionClassifier
from attnforge.model.patch import merge_patches as merge_patches
from attnforge.model.patch import split_patches as split_patches
from attnforge.model.registry import MODELS as MODELS
from attnforge.model.registry import Example as Example
from attnforge.model.registry import RegisteredModel as RegisteredModel
from attnforge.model.registry import build_model as build_model
from attnforge.model.slips import PostSoftmaxScale as PostSoftmaxScale
from attnforge.model.slips import ReshapeWithoutTranspose as ReshapeWithoutTranspose
from attnforge.model.transformer import EncoderLayer as EncoderLayer
from attnforge.model.transformer import FeedForward as FeedForward
from attnforge.model.transformer import LearnedPositions as LearnedPositions
from attnforge.model.transformer import SinusoidalPositions as SinusoidalPositions
from attnforge.model.transformer import TransformerEncoder as TransformerEncoder
from attnforge.model.transformer import VisionTransformer as VisionTransformer
from attnforge.model.worked_example import WorkedExample as WorkedExample
