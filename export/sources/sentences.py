"""Sentence embeddings: the parts after the transformer of a sentence-transformers folder, as a torch module.

`modules.json` lists the parts in order; each part's folder contains a `config.json`, and that of a Dense layer its
weights. The files are read as data, and nothing in the folder is executed. The parts compute the same as those of
sentence-transformers (https://github.com/UKPLab/sentence-transformers, `Pooling.forward`, `Normalize.forward` and
`Dense.forward`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from attnforge.errors import UsageError, raised_as

MODULES = "modules.json"
_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of older configurations, and the `pooling_mode` of newer ones; several are concatenated in this order."""

_ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU, "SiLU": nn.SiLU}


class Embedding(nn.Module):
    """Turns token states and their mask into one vector per text: pooling, then dense layers and normalisation."""

    def __init__(self, pooling: Pooling, *layers: nn.Module) -> None:
        super().__init__()
        self.pooling = pooling
        self.layers = nn.Sequential(*layers)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        """Args:
        states: (batch, tokens, width).
        mask: (batch, tokens), 1 for a token and 0 for padding.

        Returns:
            (batch, width'), of the states' dtype.
        """
        vectors: Tensor = self.layers(self.pooling(states, mask))
        return vectors


class Pooling(nn.Module):
    """Pools the states of a text's tokens into one vector; those of several modes are concatenated.

    Raises:
        UsageError: a mode is unknown.
    """

    def __init__(self, modes: Sequence[str]) -> None:
        super().__init__()
        if unknown := [mode for mode in modes if mode not in _MODES.values()]:
            raise UsageError(f"there is no pooling mode {unknown[0]!r}; give one of {', '.join(_MODES.values())}")
        self.modes = tuple(modes)

    def forward(self, states: Tensor, mask: Tensor) -> Tensor:
        return torch.cat([self._pooled(mode, states, mask) for mode in self.modes], dim=-1)

    def _pooled(self, mode: str, states: Tensor, mask: Tensor) -> Tensor:
        weights = mask[..., None].to(states.dtype)
        if mode == "cls":
            return _at(states, _first(mask))
        if mode == "lasttoken":
            return _at(states * weights, mask.shape[1] - 1 - _first(mask.flip(1)))
        if mode == "max":
            return states.masked_fill(weights == 0, float("-inf")).amax(1)
        wide = torch.float32 if states.dtype.itemsize == 2 else states.dtype
        if mode == "weightedmean":
            positions = torch.arange(1, mask.shape[1] + 1, device=mask.device) - _first(mask)[:, None]
            weights = weights.to(wide) * positions[..., None].to(wide)
        total = (states * weights).sum(1, dtype=wide)
        count = weights.sum(1, dtype=wide).clamp(min=1e-9)
        return (total / (count.sqrt() if mode == "mean_sqrt_len_tokens" else count)).to(states.dtype)


def _first(mask: Tensor) -> Tensor:
    """`(batch,)`: the position of every text's first token."""
    return mask.to(torch.int32).argmax(1)


def _at(states: Tensor, positions: Tensor) -> Tensor:
    """`(batch, width)`: the state at one position of every text."""
    return states.gather(1, positions[:, None, None].expand(-1, 1, states.shape[-1])).squeeze(1)


class Normalize(nn.Module):
    """Scales every vector to unit length."""

    def forward(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=-1)


def parts(folder: Path) -> tuple[Path, Embedding] | None:
    """The folder of the transformer in a sentence-transformers folder, and the parts after it; None for other folders,
    and for those that list a transformer alone.

    Raises:
        UsageError: a part is of an unsupported kind, or its files cannot be read.
    """
    if not (folder / MODULES).is_file():
        return None
    listed = _read(folder / MODULES)
    with raised_as(UsageError, f"{folder / MODULES} is not a list of parts, each with its type and path"):
        kinds = [(str(part["type"]).rpartition(".")[2], folder / str(part["path"])) for part in listed]
    if not kinds or kinds[0][0] != "Transformer":
        raise UsageError(f"{folder} does not begin with a Transformer; give architecture=… to deploy its model alone")
    if len(kinds) == 1:
        return None
    modules = [_part(kind, path) for kind, path in kinds[1:]]
    if not isinstance(modules[0], Pooling):
        raise UsageError(f"the Transformer of {folder} is followed by {kinds[1][0]}; only Pooling is supported there")
    return kinds[0][1], Embedding(modules[0], *modules[1:])


def most_tokens(folder: Path) -> int | None:
    """The number of tokens at which the folder's tokenizer truncates texts; None if it is not given."""
    file = folder / "sentence_bert_config.json"
    most = _read(file).get("max_seq_length") if file.is_file() else None
    return most if isinstance(most, int) else None


def _part(kind: str, folder: Path) -> nn.Module:
    if kind == "Normalize":
        return Normalize()
    if kind == "Pooling":
        config = _read(folder / "config.json")
        if config.get("include_prompt") is False:
            raise UsageError(f"{folder} excludes a prompt from the pooling, but the deployed model receives no prompt")
        modes = config.get("pooling_mode") or [mode for key, mode in _MODES.items() if config.get(key)] or ["mean"]
        return Pooling([modes] if isinstance(modes, str) else modes)
    if kind != "Dense":
        raise UsageError(f"{folder} is of the kind {kind}; supported are Transformer, Pooling, Dense and Normalize")
    config = _read(folder / "config.json")
    package, _, name = str(config.get("activation_function")).rpartition(".")
    if not package.startswith("torch.nn") or name not in _ACTIVATIONS or config.get("use_residual"):
        raise UsageError(f"the Dense layer in {folder} has an activation or residual that is not supported")
    linear = nn.Linear(config["in_features"], config["out_features"], bias=bool(config.get("bias", True)))
    file = folder / "model.safetensors"
    with raised_as(UsageError, f"the weights of the Dense layer are not in {file}"):
        linear.load_state_dict({key.removeprefix("linear."): value for key, value in load_file(file).items()})
    return nn.Sequential(linear, _ACTIVATIONS[name]())


def _read(file: Path) -> Any:
    with raised_as(UsageError, f"{file} cannot be read"):
        return json.loads(file.read_text(encoding="utf-8"))
