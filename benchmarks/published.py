"""Hugging Face architectures at the sizes that their authors published, each with the head of its task.

Sizes are those of the models' own configuration files; what a configuration class of transformers has by default is not
repeated. Weights are random but where a package brings them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import attnforge
from attnforge.bundle import Bundle
from attnforge.export.sources.named import build
from attnforge.model.registry import Example
from benchmarks.experiment import say
from tests.support.huggingface import minilm


def deployed(example: Example, folder: Path, name: str | None = None, **options: Any) -> Bundle:
    """The bundle of a model for ONNX Runtime.

    Args:
        example: the model.
        folder: where the bundle is written.
        name: of the bundle; by default the class's.
        options: further ones of :func:`attnforge.deploy`.
    """
    say(f"deploy {name or folder.name} …")
    module, args, shapes = example
    return attnforge.deploy(module, args, folder, shapes, targets=["onnxruntime"], name=name, **options)


@dataclass(frozen=True)
class Published:
    """One published model.

    Attributes:
        name: that its authors gave it.
        kind: `encoder`, `decoder`, `vision`, `audio` or `cross`, whose attention is across two sequences;
            `growth` of :data:`GROWTH`, and :data:`CALLABLE`.
        architecture: class in transformers, with the head of the task; :data:`SENTENCES`; or the name of a callable as
            :func:`attnforge.export.sources.named.build` takes it.
        sizes: where the published configuration differs from the class's defaults.
        options: of :func:`attnforge.export.sources.huggingface.example`.
    """

    name: str
    kind: str
    architecture: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def source(self, parent: Path) -> str:
        """The name that :func:`attnforge.export.sources.named.build` takes: that of a new folder under `parent`, or of
        the package that brings trained weights."""
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

    def deployed(self, folder: Path, **options: Any) -> Bundle:
        """The bundle for ONNX Runtime in `folder`, deployed as `attnforge deploy` does; options are those of deploy."""
        example, source = build(self.source(folder), self.options, None)
        return deployed(example, folder / "bundle", self.name, source=source, cache=False, **options)


CALLABLE = "callable"
"""The kind of what a function makes."""

SENTENCES = "sentence-transformers"
"""In the place of an architecture: all-MiniLM-L6-v2 with its trained weights, pooling and normalisation."""

PUBLISHED = [Published(**model) for model in json.loads(Path(__file__).with_suffix(".json").read_bytes())]
"""Of `published.json`. Decoders have two samples at most: a batch of logits over 100,000 words and more is larger than
the model."""


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
"""BERTs that differ in depth alone, and in width alone; one is in both."""
