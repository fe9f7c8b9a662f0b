"""What every target gets to build from, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from attnforge.bundle import Range, TargetRecord, TensorSpec
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.saving import Shelf
from attnforge.export.lowering.attention import Lowered
from attnforge.precision import Precision


@dataclass(frozen=True)
class Job:
    """What a target is built from.

    Attributes:
        out: the folder that the bundle will have.
        folder: the folder that it is written in until it is whole.
        shelf: saves graphs there.
        model: the canonical graph; a target lowers a copy.
        sites: its attention.
        inputs: name, dtype and dims of each input.
        precision: of the bundle.
        attention: precision of attention alone in TensorRT's plans; None for the bundle's own.
        tune: whether forms are chosen by measuring.
        compute_capabilities: that a TensorRT-RTX plan is for, such as `SM89`; none for portable ones.
        profiles: further optimization profiles of TensorRT's plans.
    """

    out: Path
    folder: Path
    shelf: Shelf
    model: ir.Model
    sites: list[Site]
    inputs: list[TensorSpec]
    precision: Precision
    attention: Precision | None
    tune: bool
    compute_capabilities: Sequence[str]
    profiles: Sequence[Mapping[str, Range]]


@dataclass(frozen=True)
class Built:
    """What was built for a target.

    Attributes:
        record: its entry in the manifest.
        lowered: the form of every canonical site.
        kernel_of: name of the fused kernel that the backend compiled for a site, or None.
        why_unfused: the reason where the backend compiled none although the form has one.
    """

    record: TargetRecord
    lowered: list[Lowered]
    kernel_of: Callable[[Lowered], str | None]
    why_unfused: Callable[[Lowered], str]
