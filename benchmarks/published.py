"""Hugging Face architectures at their published sizes, each with the head of its task.

Sizes are those of the models' configuration files; defaults of the configuration classes in transformers are not
repeated. Weights are random unless a package ships them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import attnforge
from attnforge.atomic import temporary_folder
from attnforge.bundle import Bundle
from attnforge.export.sources.named import build
from attnforge.model.registry import Example
from benchmarks.experiment import say
from tests.support.huggingface import minilm


def deployed(example: Example, folder: Path, name: str | None = None, **options: Any) -> Bundle:
    """Deploy a model for ONNX Runtime.

    Args:
        example: the model.
        folder: folder of the bundle.
        name: name of the bundle; by default the class's.
        options: further options of :func:`attnforge.deploy`.
    """
    say(f"deploy {name or folder.name} …")
    module, args, shapes = example
    return attnforge.deploy(module, args, folder, shapes, targets=["onnxruntime"], name=name, **options)


@dataclass(frozen=True)
class Published:
    """One published model.

    Attributes:
        name: published name.
        kind: `encoder`, `decoder`, `vision`, `audio` or `cross` (attention across two sequences); `growth` for
            :data:`GROWTH`; or :data:`CALLABLE`.
        architecture: class in transformers, with the head of the task; :data:`SENTENCES`; or the name of a callable as
            :func:`attnforge.export.sources.named.build` takes it.
        sizes: configuration values that differ from the class's defaults.
        options: options of :func:`attnforge.export.sources.huggingface.example`.
    """

    name: str
    kind: str
    architecture: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def source(self, parent: Path) -> str:
        """Return the name that :func:`attnforge.export.sources.named.build` takes: that of a new folder under `parent`,
        or of the package that ships trained weights."""
        if self.kind == CALLABLE:
            return self.architecture
        if self.architecture == SENTENCES:
            return f"hf:{minilm()}"
        folder = parent / "model"
        kind: Any = getattr(import_module("transformers"), self.architecture)
        config = {"architectures": [self.architecture], "model_type": kind.config_class.model_type, **self.sizes}
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        return f"hf:{folder}"

    def example(self, **options: str | int) -> Example:
        """Build the model, with further options or others."""
        with temporary_folder() as folder:
            return build(self.source(folder), {**self.options, **options}, None)[0]

    def deployed(self, folder: Path, **options: Any) -> Bundle:
        """Deploy for ONNX Runtime to `folder`, as `attnforge deploy` does; options are those of deploy."""
        example, source = build(self.source(folder), self.options, None)
        return deployed(example, folder / "bundle", self.name, source=source, cache=False, **options)


CALLABLE = "callable"
"""The kind of a model that a function builds."""

SENTENCES = "sentence-transformers"
"""Instead of an architecture: all-MiniLM-L6-v2 with its trained weights, pooling and normalisation."""

PUBLISHED = [Published(**model) for model in json.loads(Path(__file__).with_suffix(".json").read_bytes())]
"""The models of `published.json`. Decoders have two samples at most: a batch of logits over a vocabulary of 100,000 and
more is larger than the model."""


def _bert(layers: int, width: int) -> Published:
    sizes = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": width // 64,
        "intermediate_size": 4 * width,
    }  # fmt: skip
    return Published(f"{layers} layers, {width} wide", "growth", "BertForSequenceClassification", sizes)


GROWTH = {
    "depth": [_bert(layers, 768) for layers in (6, 12, 24, 48)],
    "width": [_bert(12, width) for width in (192, 384, 768, 1536)],
}
"""BERTs that differ only in depth, and only in width; one is in both."""
