"""The named models, each with a module, example arguments and dynamic shapes for ``torch.export``.

``dynamic_shapes`` has torch.export's own format, keyed by the name of the forward argument. The range of a ``Dim`` is
the range of sizes that a deployment must serve, and the example's size is the one it is tuned for.
https://docs.pytorch.org/docs/stable/export.html
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.export import Dim

from attnforge.errors import ShapeError, UsageError, check_known, first_line
from attnforge.model.attention import (
    CrossAttention,
    MultiHeadAttention,
    MultiHeadSelfAttention,
    ParameterFreeAttention,
    SelfAttention,
)
from attnforge.model.decoder import Decoder, DecoderSizes
from attnforge.model.general import GeneralAttention, GeneralMultiHeadAttention
from attnforge.model.patch import PatchAttention, PatchAttentionClassifier
from attnforge.model.slips import PostSoftmaxScale, ReshapeWithoutTranspose
from attnforge.model.transformer import TransformerEncoder, VisionTransformer
from attnforge.model.worked_example import INPUT, WorkedExample

SEED = 0
BATCH, TOKENS, MEMORY_TOKENS = 2, 48, 40  # of the examples
MAX_TOKENS = 128
WEIGHTS = Path(__file__).parent / "weights"

batch = Dim("batch", min=1, max=8)
tokens = Dim("tokens", min=1, max=MAX_TOKENS)
queries = Dim("queries", min=1, max=MAX_TOKENS)
keys = Dim("keys", min=1, max=MAX_TOKENS)


DynamicShapes = dict[str, dict[int, Dim] | None]


class Example(NamedTuple):
    """A module, positional arguments for its forward, and their dynamic axes (None: all axes are static)."""

    module: nn.Module
    args: tuple[Tensor, ...]
    dynamic_shapes: DynamicShapes | None


@dataclass(frozen=True)
class RegisteredModel:
    """A named model.

    Attributes:
        name: its name.
        system: the system it is an instance of, such as "S1".
        summary: one line about it.
        make: function that builds it.
        weights: its trained weights, if any.
        tokenizer: for a text model, the ``tokenizers`` file of its token ids.
        stop: for a text model, the ids after which a text ends.
    """

    name: str
    system: str
    summary: str
    make: Callable[..., Example]
    weights: Path | None = None
    tokenizer: Path | None = None
    stop: tuple[int, ...] = ()


MODELS: dict[str, RegisteredModel] = {}

Make = TypeVar("Make", bound=Callable[..., Example])


def registered(system: str, summary: str, **trained: Any) -> Callable[[Make], Make]:
    """Register the function that makes a model under its own name, with `-` for `_`; the arguments are those of
    :class:`RegisteredModel`."""

    def register(make: Make) -> Make:
        name = make.__name__.replace("_", "-")
        MODELS[name] = RegisteredModel(name, system, summary, make, **trained)
        return make

    return register


def build_model(name: str, *, weights: str | PathLike[str] | None = None, **options: Any) -> Example:
    """Build a named model in eval mode, float32, on the CPU, with example arguments and dynamic shapes.

    ``options`` are the keyword arguments of the model's ``make``; strings are converted to the annotated types. The
    weights come from the safetensors file ``weights``, or from training if the model was trained, or are random with a
    fixed seed. The random state of the process does not change.

    Raises UnknownNameError for an unknown name or option, UsageError for an option of another type or of a size that
    does not fit into memory, and for a weights file of another model, and whatever the module itself raises.
    """
    check_known("model", name, MODELS)
    model = MODELS[name]
    options = read_options(model.make, options)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(SEED)  # only the CPU's: torch.manual_seed would reseed every GPU too
        try:
            example = model.make(**options)
        except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # TypeError: over 64 bits
            raise UsageError(f"{name} cannot be built with {options}: {first_line(error)}; give others") from error
    path = model.weights if weights is None else weights
    if path is not None:
        load_weights(example.module, path)
    example.module.eval()
    return example


def read_options(make: Callable[..., Example], options: dict[str, Any]) -> dict[str, Any]:
    """Convert ``options`` to the types that ``make`` is annotated with: str, int, float or bool.

    Raises UnknownNameError for an unknown option, UsageError for a value of another type.
    """
    known, read = inspect.signature(make, eval_str=True).parameters, {}
    for name, value in options.items():
        check_known("option", name, known)
        kind = known[name].annotation
        try:
            read[name] = TypeAdapter(kind).validate_python(value, strict=not isinstance(value, str))
        except ValidationError as error:
            raise UsageError(f"option {name} is {value!r}; give a {kind.__name__}") from error
    return read


def load_weights(module: nn.Module, path: str | PathLike[str]) -> None:
    """Load a safetensors file that has exactly the names and shapes of the module's state dict.

    Floating dtypes may differ; values are cast to the module's. Raises UsageError for any other difference.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"weights {path} cannot be read as safetensors ({error}); give a file that can") from error
    needed = module.state_dict()
    if missing := sorted(needed.keys() - tensors.keys()):
        has = ", ".join(sorted(tensors)) or "nothing"
        raise UsageError(f"weights {path} lack {missing[0]}; the file has {has}; the model needs {', '.join(needed)}")
    if unexpected := sorted(tensors.keys() - needed.keys()):
        needs = ", ".join(needed) or "nothing"
        raise UsageError(f"weights {path} have {unexpected[0]}, which the model does not; it needs {needs}")
    for name, tensor in needed.items():
        if tensors[name].shape != tensor.shape:
            shapes = f"{tuple(tensors[name].shape)}; the model needs {tuple(tensor.shape)}"
            raise UsageError(f"weights {path}: {name} is {shapes}, so give the options that the file was made with")
    module.load_state_dict(tensors)


@registered("S1", "one head, softmax(QKᵀ/√d_k)V")
def self_attention(input_dim: int = 64, key_dim: int = 64, value_dim: int = 64) -> Example:
    return on_rows(torch.randn(BATCH, TOKENS, input_dim), SelfAttention(input_dim, key_dim, value_dim))


@registered("S2", "heads without output projection, d_v ≠ d_k")
def multi_head_self_attention(
    input_dim: int = 256, key_dim: int = 256, value_dim: int = 128, num_heads: int = 4
) -> Example:
    x = torch.randn(BATCH, TOKENS, input_dim)
    return on_rows(x, MultiHeadSelfAttention(input_dim, key_dim, value_dim, num_heads))


@registered("S3", "heads with output projection, 512 wide")
def multi_head_attention(embed_dim: int = 512, num_heads: int = 8) -> Example:
    query = torch.randn(BATCH, TOKENS, embed_dim)
    key, value = torch.randn(2, BATCH, MEMORY_TOKENS, embed_dim)
    shapes: DynamicShapes = {"query": {0: batch, 1: queries}, "key": {0: batch, 1: keys}, "value": {0: batch, 1: keys}}
    return Example(MultiHeadAttention(embed_dim, num_heads), (query, key, value), shapes)


@registered("S3", "queries attend to a padded memory of another width")
def cross_attention(embed_dim: int = 256, num_heads: int = 4, memory_dim: int = 192) -> Example:
    query = torch.randn(BATCH, TOKENS, embed_dim)
    memory = torch.randn(BATCH, MEMORY_TOKENS, memory_dim)
    shapes: DynamicShapes = {
        "query": {0: batch, 1: queries},
        "memory": {0: batch, 1: keys},
        "key_padding_mask": {0: batch, 1: keys},
    }
    return Example(CrossAttention(embed_dim, num_heads, memory_dim), (query, memory, padding(MEMORY_TOKENS)), shapes)


@registered("S4", "three tokens by hand, unscaled, static")
def worked_example() -> Example:
    return Example(WorkedExample(), (torch.tensor(INPUT, dtype=torch.float32),), None)


@registered("S5", "column convention, any score and alignment")
def general_attention(
    score: str = "scaled-dot",
    align: str = "softmax",
    feature_dim: int = 96,
    key_dim: int = 64,
    value_dim: int = 32,
    query_dim: int = 64,
) -> Example:
    features = torch.randn(BATCH, feature_dim, TOKENS)
    module = GeneralAttention(feature_dim, key_dim, value_dim, query_dim, score, align)
    return Example(module, (features,), {"features": {0: batch, 2: tokens}})


@registered("S5", "the additive score, which is not an inner product")
def additive_attention(align: str = "softmax") -> Example:
    return general_attention("additive", align, query_dim=48)


@registered("S6", "column convention, heads, cross")
def general_multi_head_attention(
    score: str = "scaled-dot",
    align: str = "softmax",
    feature_dim: int = 96,
    key_dim: int = 32,
    value_dim: int = 64,
    num_heads: int = 4,
    output_dim: int = 80,
    query_dim: int = 32,
    query_input_dim: int = 72,
) -> Example:
    features = torch.randn(BATCH, feature_dim, MEMORY_TOKENS)
    query_features = torch.randn(BATCH, query_input_dim, TOKENS)
    module = GeneralMultiHeadAttention(
        feature_dim, key_dim, value_dim, num_heads, output_dim, query_dim, score, align, query_input_dim=query_input_dim
    )
    shapes: DynamicShapes = {"features": {0: batch, 2: keys}, "query_features": {0: batch, 2: queries}}
    return Example(module, (features, query_features), shapes)


@registered("S7", "softmax(XXᵀ)X, scaled or not")
def parameter_free_attention(scaled: bool = False, dim: int = 64) -> Example:
    return on_rows(torch.randn(BATCH, TOKENS, dim), ParameterFreeAttention(scaled))


@registered("S8", "an image of any size as 4×4 patches, 192 wide")
def patch_attention(
    image_size: int = 224, max_image_size: int = 256, max_batch: int = 2, embed_dim: int = 192, num_heads: int = 3
) -> Example:
    if max_image_size % 4 or not 8 <= image_size <= max_image_size or max_batch < 1:
        raise ShapeError(
            f"image_size {image_size}, max_image_size {max_image_size}, max_batch {max_batch}; give a max_image_size "
            "that is a multiple of 4, an image_size from 8 to it, and a max_batch of 1 (a fixed batch) or more"
        )
    module = PatchAttention(3, 4, embed_dim, num_heads)
    # From 2, because torch.export treats a grid of one row or column as a special case.
    rows, columns = Dim("rows", min=2, max=max_image_size // 4), Dim("cols", min=2, max=max_image_size // 4)
    # The largest case is also run in float64, where each of its score matrices takes 8 · tokens² bytes.
    shapes = {2: 4 * rows, 3: 4 * columns} | batch_axis(max_batch)
    return Example(module, (torch.randn(1, 3, image_size, image_size),), {"image": shapes})


@registered(
    "S8", "8×8 digits classified by patch attention, trained", weights=WEIGHTS / "patch-attention-digits.safetensors"
)
def patch_attention_digits(max_batch: int = 512) -> Example:
    require_sizes(batch_size=(BATCH, max_batch))
    image = torch.rand(BATCH, 1, 8, 8)
    return Example(PatchAttentionClassifier(), (image,), {"image": {0: Dim("batch", min=1, max=max_batch)}})


@registered("S12", "tokens, positions, padding, two layers")
def transformer_encoder(
    num_layers: int = 2,
    positions: str = "sinusoidal",
    norm_first: bool = True,
    is_causal: bool = False,
    activation: str = "gelu",
    embed_dim: int = 128,
    num_heads: int = 4,
    vocab_size: int = 1000,
    num_tokens: int = TOKENS,
    batch_size: int = BATCH,
    max_batch: int = 8,
) -> Example:
    module = TransformerEncoder(
        num_layers, embed_dim, num_heads, activation=activation, norm_first=norm_first, vocab_size=vocab_size,
        max_length=MAX_TOKENS, positions=None if positions == "none" else positions, final_norm=norm_first,
        is_causal=is_causal,
    )  # fmt: skip
    ids, dims = token_ids(vocab_size, num_tokens, MAX_TOKENS, batch_size, max_batch)
    shapes: DynamicShapes = {"tokens": dims, "key_padding_mask": dims}
    return Example(module, (ids, padding(num_tokens, batch_size)), shapes)


@registered("S12", "the next token's logits: causal, grouped keys, rotary positions, two layers")
def decoder(
    num_layers: int = 2,
    positions: str = "rotary",
    norm: str = "rms",
    feed_forward: str = "swiglu",
    bias: bool = False,
    window: int = 0,
    soft_cap: float = 0.0,
    tied: bool = False,
    embed_dim: int = 64,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int = 256,
    max_tokens: int = MAX_TOKENS,
    num_tokens: int = TOKENS,
    batch_size: int = BATCH,
    max_batch: int = 8,
) -> Example:
    sizes = DecoderSizes(
        vocab_size, embed_dim, num_heads, num_layers, max_tokens, num_kv_heads, positions=positions, norm=norm,
        feed_forward=feed_forward, bias=bias, window=window or None, soft_cap=soft_cap or None, tied=tied,
    )  # fmt: skip
    ids, dims = token_ids(vocab_size, num_tokens, max_tokens, batch_size, max_batch)
    return Example(Decoder(sizes), (ids,), {"input_ids": dims})


# The vocabulary: ten classes, seventeen grey levels, a newline and an end token.
DECODER_DIGITS = DecoderSizes(
    vocab_size=29, embed_dim=96, num_heads=6, num_layers=3, max_tokens=MAX_TOKENS, num_kv_heads=2
)


@registered(
    "S12",
    "8×8 digits written as characters by a decoder, trained",
    weights=WEIGHTS / "decoder-digits.safetensors",
    tokenizer=WEIGHTS / "decoder-digits.tokenizer.json",
    stop=(DECODER_DIGITS.vocab_size - 1,),
)
def decoder_digits(num_tokens: int = TOKENS, batch_size: int = BATCH, max_batch: int = 8) -> Example:
    ids, dims = token_ids(DECODER_DIGITS.vocab_size, num_tokens, MAX_TOKENS, batch_size, max_batch)
    return Example(Decoder(DECODER_DIGITS), (ids,), {"input_ids": dims})


@registered("S12", "a Vision Transformer of 32×32 images, two layers")
def vit(
    num_layers: int = 2,
    image_size: int = 32,
    patch_size: int = 4,
    embed_dim: int = 128,
    num_heads: int = 4,
    num_classes: int = 10,
    batch_size: int = BATCH,
    max_batch: int = 8,
) -> Example:
    require_sizes(batch_size=(batch_size, max_batch))
    module = VisionTransformer(image_size, patch_size, num_classes, embed_dim, num_heads, num_layers)
    dims = batch_axis(max_batch) or None
    return Example(module, (torch.randn(batch_size, 3, image_size, image_size),), {"image": dims})


def token_ids(
    vocab_size: int, num_tokens: int, max_tokens: int, batch_size: int, max_batch: int
) -> tuple[Tensor, dict[int, Dim]]:
    """Return token ids (batch_size, num_tokens) and their dynamic axes; raise ShapeError for sizes above the maxima."""
    require_sizes(num_tokens=(num_tokens, max_tokens), batch_size=(batch_size, max_batch))
    dims = {1: Dim("tokens", min=1, max=max_tokens)} | batch_axis(max_batch)
    return torch.randint(0, vocab_size, (batch_size, num_tokens)), dims


def batch_axis(max_batch: int) -> dict[int, Dim]:
    """Return axis 0 as a batch of 1 to ``max_batch`` samples, or no dynamic axis if that is 1."""
    return {0: Dim("batch", min=1, max=max_batch)} if max_batch > 1 else {}


def require_sizes(**sizes: tuple[int, int]) -> None:
    """Raise ShapeError unless every size of an example is between 1 and its maximum; sizes are (size, maximum)."""
    for name, (size, largest) in sizes.items():
        if not 1 <= size <= largest:
            raise ShapeError(f"{name} is {size}; give 1 to {largest}")


@registered("S13", "slip: 1/√d_k after the softmax")
def post_softmax_scale(input_dim: int = 64, key_dim: int = 64, value_dim: int = 64) -> Example:
    return on_rows(torch.randn(BATCH, TOKENS, input_dim), PostSoftmaxScale(input_dim, key_dim, value_dim))


@registered("S13", "slip: heads by reshape alone, mixes tokens")
def reshape_without_transpose(
    input_dim: int = 128, key_dim: int = 128, value_dim: int = 128, num_heads: int = 4
) -> Example:
    x = torch.randn(BATCH, TOKENS, input_dim)
    return on_rows(x, ReshapeWithoutTranspose(input_dim, key_dim, value_dim, num_heads))


def on_rows(x: Tensor, module: nn.Module) -> Example:
    """Return a module of one input, x (batch, tokens, features), of any number of samples and tokens."""
    return Example(module, (x,), {"x": {0: batch, 1: tokens}})


def padding(num_tokens: int, batch_size: int = BATCH) -> Tensor:
    """Return a key_padding_mask (batch_size, num_tokens) in which the first sample has no padding and the others do."""
    lengths = torch.tensor([[max(1, num_tokens - 8 * sample)] for sample in range(batch_size)])
    return torch.arange(num_tokens) >= lengths
