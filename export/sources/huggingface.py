"""Hugging Face models from a configuration or local folder: plain tensors as inputs and outputs, and example inputs.

Nothing is downloaded. A folder contains `config.json`, and optionally its weights as `model.safetensors`; a
configuration alone gives a model with random weights. A folder of sentence-transformers gives sentence embeddings,
pooled and normalised as in that library.
"""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from attnforge.bundle import PROCESSOR, TOKENIZER
from attnforge.errors import UsageError, extra, raised_as, shortened
from attnforge.export.sources import sentences
from attnforge.export.sources.exported_program import taking
from attnforge.memory import available
from attnforge.model.registry import Example
from attnforge.quiet import quiet
from attnforge.text import TYPES

SHORTEST, LONGEST = 2, 512
"""The range of the number of tokens, unless the caller or the model's position table gives a smaller maximum."""

TOKENS = 128
"""The number of tokens of the example, if the model takes that many: TensorRT's plan is fastest at the example's sizes.
"""


class PlainTensors(nn.Module):
    """A Hugging Face model that takes named tensors by position and returns a dict of tensors, without caches.

    Args:
        model: a model of transformers.
        embedding: turns token states into sentence embeddings, which are then the only output.

    Attributes:
        names: the inputs that it takes.
        random_weights: which weights are random, with their seed; None if all were loaded.
    """

    names: Sequence[str]

    def __init__(self, model: nn.Module, embedding: sentences.Embedding | None = None) -> None:
        super().__init__()
        self.model = model
        self.embedding = embedding
        self.random_weights: str | None = None

    def call(self, *tensors: Tensor) -> dict[str, Tensor]:
        inputs = dict(zip(self.names, tensors, strict=True))
        result = self.model(**inputs, return_dict=True)
        if self.embedding is not None:
            return {"sentence_embedding": self.embedding(result["last_hidden_state"], inputs["attention_mask"])}
        return {name: value for name, value in result.items() if isinstance(value, Tensor)}


def example(
    path: str | os.PathLike[str],
    *,
    attention: str | None = None,
    architecture: str | None = None,
    part: str | None = None,
    inputs: str | None = None,
    batch: int | str = 2,
    tokens: int | str | None = None,
    max_batch: int | str = 8,
    max_tokens: int | str | None = None,
    dynamic: str = "batch,tokens",
    seed: int | str = 0,
    random_weights: bool | str = False,
) -> Example:
    """Load the model at `path`, in eval mode, with example inputs and dynamic dims.

    Args:
        path: a folder with `config.json` (and weights), or a configuration file.
        attention: the attention implementation to run and export, `sdpa` or `eager`; by default `sdpa` if the
            architecture has it.
        architecture: class in transformers, such as `T5EncoderModel`; by default the one named in the configuration,
            or for a sentence-transformers folder its transformer followed by the pooling.
        part: `encoder` or `decoder`, to deploy only that part of an encoder-decoder.
        inputs: inputs of the deployed model, such as `input_ids,attention_mask`; by default all that are supported but
            `token_type_ids`, without which all are 0. A decoder with a cache takes `input_ids` alone.
        batch, tokens: sizes of the example; tokens is by default 128, or the model's maximum if that is less.
        max_batch, max_tokens: upper bounds of the dynamic dims; max_tokens is by default the model's own, at most 512.
        dynamic: the dims that vary: `batch,tokens`, `batch`, `tokens` or `none`.
        seed: random seed of weights and example inputs.
        random_weights: whether weights that are missing from the folder may be random, even if they are not heads.

    Raises:
        UnavailableError: transformers is not installed.
        UsageError: there is no configuration, the weights are of another model, an option is invalid, or the
            architecture takes inputs other than token ids, pixels, audio features or waveforms.
    """
    if attention not in (None, "eager", "sdpa"):
        raise UsageError(f"attention={attention!r}; give eager or sdpa, the implementations that can be exported")
    parts = sentences.parts(Path(path)) if architecture is None and part is None else None
    folder, embedding = parts or (Path(path), None)
    is_random = {"true": True, "false": False}.get(str(random_weights).lower())
    if is_random is None:
        raise UsageError(f"random_weights is {shortened(str(random_weights))!r}; give true or false")
    architecture = architecture or ("AutoModel" if embedding else None)
    model, random = _loaded(folder, attention, architecture, _number("seed", seed), is_random)
    if part is not None:
        if part not in ("encoder", "decoder") or not hasattr(model, f"get_{part}"):
            raise UsageError(f"{type(model).__name__} has no part {part!r}; encoder-decoders have encoder and decoder")
        model = getattr(model, f"get_{part}")()
    given = {"batch": batch, "tokens": tokens, "max_batch": max_batch, "max_tokens": max_tokens}
    sizes = {name: _number(name, size) for name, size in given.items() if size is not None}
    if max_tokens is None and (most := sentences.most_tokens(folder)) is not None:
        sizes["max_tokens"] = most
    made = around(model, **sizes, dynamic=dynamic, embedding=embedding, only=inputs)
    made.module.random_weights = random and f"{random}, seed {seed}"  # type: ignore[assignment]
    return made


def _number(name: str, value: int | str) -> int:
    if not str(value).isdecimal() or len(str(value)) > 18:
        raise UsageError(f"{name} is {shortened(str(value))!r}; give a whole number")
    if int(value) < 1 and name != "seed":
        raise UsageError(f"{name} is {value}; give 1 or more")
    return int(value)


def _loaded(
    folder: Path, attention: str | None, architecture: str | None, seed: int, random: bool
) -> tuple[Any, str | None]:
    """The model itself, with the weights in the folder if there are any, else with random weights; with `random`,
    missing weights are random too. And which weights are random."""
    transformers = extra("transformers", "hf")
    if not (folder.is_file() or (folder / "config.json").is_file()):
        raise UsageError(f"no Hugging Face configuration at {folder}; give a folder with config.json, or that file")
    with raised_as(UsageError, f"{folder} has no configuration that transformers knows"), quiet():
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    named = architecture or next(iter(config.architectures or ()), None)
    kind = getattr(transformers, str(named), None) if named else transformers.AutoModel
    if not inspect.isclass(kind) or not (
        issubclass(kind, transformers.PreTrainedModel) or kind.__name__.startswith("AutoModel")
    ):
        raise UsageError(
            f"transformers {transformers.__version__} has no model class {named}; give one that it has, such as "
            "architecture=BertModel"
        )
    _check_size(folder, config)
    torch.manual_seed(seed)
    with raised_as(UsageError, f"transformers cannot build {kind.__name__} from {folder}"):
        try:
            return _built(kind, config, folder, attention or "sdpa", random)
        except ValueError as error:
            if attention is not None or "attention implementation" not in str(error):
                raise
            return _built(kind, config, folder, "eager", random)


def _check_size(folder: Path, config: Any) -> None:
    """Refuse a configuration with too many layers or too large weights, before memory or hours are spent on it."""
    text = config.get_text_config()
    layers, width, words = (getattr(text, name, None) for name in ("num_hidden_layers", "hidden_size", "vocab_size"))
    layers, width, words = (n if isinstance(n, int) and n > 0 else 0 for n in (layers, width, words))
    needed, left = 4 * width * (12 * width * layers + words), available()
    if layers > MOST_LAYERS or (left is not None and needed > left):
        raise UsageError(
            f"the configuration in {folder} has {layers:,} layers of width {width:,}: at least {needed / 2**30:,.1f} "
            f"GiB of weights; at most {MOST_LAYERS:,} layers are allowed, and this machine has "
            f"{'no known limit' if left is None else f'{left / 2**30:,.1f} GiB left'}"
        )


MOST_LAYERS = 1_000
"""Maximum number of layers of a configuration; creating a layer takes time whatever its width."""

_NOT_READ = ("*.h5", "*.msgpack", "*.gguf", "*.pth", "*.pt", "*.ckpt", "*.bin")
"""Weight files in formats that are not supported; a folder with such a file is not meant to get random weights."""


def _has_weights(folder: Path) -> bool:
    """Whether a folder has weights to load; without any, weights are random.

    Raises:
        UsageError: it names or contains weights that cannot be loaded.
    """
    if not folder.is_dir():
        return False
    for index in (*folder.glob("*.safetensors.index.json"), *folder.glob("pytorch_model*.bin.index.json")):
        with raised_as(UsageError, f"{index} is not an index of weights"):
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        if outside := [name for name in shards if Path(str(name)).is_absolute() or ".." in Path(str(name)).parts]:
            raise UsageError(f"{index} names {str(outside[0])!r}, outside the folder; copy the weights into it")
        if missing := sorted(str(name) for name in shards if not (folder / str(name)).is_file()):
            raise UsageError(
                f"{index} names {missing[0]!r}, which does not exist ({len(missing)} of {len(shards)} are missing); "
                "download them, or give config.json alone for a model with random weights"
            )
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return True
    if others := sorted(file.name for kind in _NOT_READ for file in folder.glob(kind)):
        raise UsageError(
            f"{folder} has {others[0]}, a format that is not supported, and no model.safetensors; convert it, or give "
            "config.json alone for a model with random weights"
        )
    return False


def _built(kind: Any, config: Any, folder: Path, attention: str, random: bool) -> tuple[Any, str | None]:
    """The model in eval mode, and which of its weights are random."""
    if _has_weights(folder):
        with quiet():  # a progress bar
            model, loaded = kind.from_pretrained(
                str(folder), local_files_only=True, attn_implementation=attention, trust_remote_code=False,
                output_loading_info=True,
            )  # fmt: skip
        missing = sorted(loaded["missing_keys"])
        if not random:
            _check_loaded(model, missing, folder)
        return model.eval(), _named(missing)
    if kind.__name__ == "AutoModel":
        return kind.from_config(config, attn_implementation=attention, trust_remote_code=False).eval(), "all"
    config._attn_implementation = attention
    return kind(config).eval(), "all"


def _check_loaded(model: Any, missing: Sequence[str], folder: Path) -> None:
    """Check that a folder has the weights of a model. Heads may be missing, as in a base model: whole parts of the
    model, or of the base model in it, with less than half of the weights."""
    names = {name for name, _ in model.named_parameters()}  # each weight once, also if a head shares it
    lacking, loaded = names.intersection(missing), names.difference(missing)
    base = f"{model.base_model_prefix}."
    absent, present = ({name.removeprefix(base).split(".")[0] for name in part} for part in (lacking, loaded))
    if absent & present or len(lacking) > len(loaded):
        raise UsageError(
            f"{folder} has {len(loaded)} of the {len(names)} weights of {type(model).__name__} ({_named(missing)} are "
            "missing); give another architecture=…, or --random-weights (random_weights=True) to randomise them"
        )


def _named(weights: Sequence[str]) -> str | None:
    """The first of several weights, and the number of others; None if there are none."""
    if not weights:
        return None
    return weights[0] if len(weights) == 1 else f"{weights[0]} and {len(weights) - 1} more"


def around(
    model: Any,
    batch: int = 2,
    tokens: int | None = None,
    max_batch: int = 8,
    max_tokens: int | None = None,
    dynamic: str = "batch,tokens",
    embedding: sentences.Embedding | None = None,
    only: str | None = None,
) -> Example:
    """Wrap a model of transformers for export, with example inputs and dynamic dims."""
    varying = {part.strip() for part in dynamic.split(",")} - {"none"}
    if unknown := varying - {"batch", "tokens"}:
        raise UsageError(
            f"dynamic={dynamic!r} names {', '.join(sorted(unknown))}; the dims that can vary: batch, tokens"
        )
    model.config.use_cache = False
    most = max_tokens or longest(model.config)
    tokens = tokens or min(TOKENS, most)
    inputs = _example_inputs(model, batch, tokens, only)
    bounds = {"batch": (1, batch, max_batch), "tokens": (SHORTEST, tokens, most)}
    for name in varying:
        least, usual, largest = bounds[name]
        if least == largest or not least <= usual <= largest:
            raise UsageError(
                f"{name} is {usual} in the example, with a range from {least} to {largest}; choose {name} and "
                f"max_{name} that fit, or leave {name} out of dynamic"
            )
    dims = {name: Dim(name, min=bounds[name][0], max=bounds[name][2]) for name in varying}
    shapes: dict[str, dict[int, Any] | None] = {
        name: {i: dims[dim] for i, dim in enumerate(("batch", "tokens")) if dim in dims and (i == 0 or name in _TEXTS)}
        for name in inputs
    }
    return Example(taking("PlainTensors", PlainTensors, list(inputs))(model, embedding), tuple(inputs.values()), shapes)


def files_of(path: str | os.PathLike[str]) -> tuple[Path | None, Path | None, list[int]]:
    """The tokenizer and the image processor in a model's folder, if any, and the stop token ids of its configuration.

    Args:
        path: a folder, or a configuration file.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    config = Path(path) if Path(path).is_file() else folder / "config.json"
    try:
        end = json.loads(config.read_bytes()).get("eos_token_id")
    except (OSError, ValueError, AttributeError, RecursionError):
        end = None
    ids = [token for token in (end if isinstance(end, list) else [end]) if isinstance(token, int) and token >= 0]
    tokenizer, processor = (file if (file := folder / name).is_file() else None for name in (TOKENIZER, PROCESSOR))
    return tokenizer, processor, ids


_TEXTS = ("input_ids", "decoder_input_ids", "attention_mask", TYPES)
"""The inputs whose second dim is that of tokens."""


def longest(config: Any) -> int:
    """The maximum number of tokens of a model: the size of its position table, at most 512."""
    text = config.get_text_config()
    padding = (getattr(text, "pad_token_id", None) or 0) + 1  # RoBERTa's positions start after the padding's
    known = [size for name in _POSITIONS if isinstance(size := getattr(text, name, None), int) and size > 0]
    return min([LONGEST, *(size - padding if size > padding else size for size in known)])


_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_target_positions")
"""The names that configurations use for the size of their position table."""


def _example_inputs(model: Any, batch: int, tokens: int, only: str | None) -> dict[str, Tensor]:
    """Example inputs by name, in the order of forward's arguments; all texts except the first end in padding.

    Args:
        model: the model.
        batch, tokens: their sizes.
        only: names of the inputs that are wanted, optional ones among them, in their order; None for all others.

    Raises:
        UsageError: the model's main input is of an unsupported kind, or it has no input of a name.
    """
    takes = inspect.signature(model.forward).parameters
    main = model.main_input_name
    if main not in _MAKERS:
        raise UsageError(f"{type(model).__name__} takes {main}; the supported main inputs are {', '.join(_MAKERS)}")
    needed = {main, "input_ids", "pixel_values"} if main in ("input_ids", "pixel_values") else {main}
    if only is not None and TYPES in only:
        needed.add(TYPES)
    if "input_ids" in takes and "input_ids" in needed:
        needed.add("attention_mask")
    if model.config.is_encoder_decoder:
        needed.add("decoder_input_ids")
    random = torch.Generator().manual_seed(0)
    inputs = {name: _MAKERS[name](model.config, batch, tokens, random) for name in takes if name in needed}
    wanted = list(inputs) if only is None else [name.strip() for name in only.split(",")]
    if unknown := [name for name in wanted if name not in inputs]:
        raise UsageError(f"inputs={only!r} names {unknown[0]!r}; the inputs of this model are {', '.join(inputs)}")
    return {name: inputs[name] for name in wanted}


def _token_ids(config: Any, batch: int, tokens: int, random: torch.Generator) -> Tensor:
    size = config.get_text_config().vocab_size
    ids = torch.randint(0, size, (batch, tokens), generator=random)
    ids[0, 0], ids[-1, -1] = 0, size - 1  # the range that reference inputs are drawn from
    return ids


def _attention_mask(config: Any, batch: int, tokens: int, random: torch.Generator) -> Tensor:
    mask = torch.ones(batch, tokens, dtype=torch.int64)
    mask[1:, tokens - tokens // 3 :] = 0
    return mask


def _token_types(config: Any, batch: int, tokens: int, random: torch.Generator) -> Tensor:
    return torch.randint(0, getattr(config, "type_vocab_size", 1) or 1, (batch, tokens), generator=random)


def _pixel_values(config: Any, batch: int, tokens: int, random: torch.Generator) -> Tensor:
    config = getattr(config, "vision_config", None) or config
    size = getattr(config, "image_size", None) or 224
    rows, columns = (size, size) if isinstance(size, int) else size
    return torch.randn(batch, getattr(config, "num_channels", 3), rows, columns, generator=random)


def _input_features(config: Any, batch: int, tokens: int, random: torch.Generator) -> Tensor:
    config = getattr(config, "audio_config", None) or config
    return torch.randn(batch, config.num_mel_bins, 2 * config.max_source_positions, generator=random)


def _input_values(config: Any, batch: int, tokens: int, random: torch.Generator) -> Tensor:
    """One second of audio at 16 kHz, or a spectrogram of the length that the model expects."""
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_length"):
        return torch.randn(batch, config.max_length, config.num_mel_bins, generator=random)
    return torch.randn(batch, 16_000, generator=random)


_MAKERS: dict[str, Callable[[Any, int, int, torch.Generator], Tensor]] = {
    "input_ids": _token_ids,
    "attention_mask": _attention_mask,
    "token_type_ids": _token_types,
    "decoder_input_ids": _token_ids,
    "pixel_values": _pixel_values,
    "input_features": _input_features,
    "input_values": _input_values,
}
