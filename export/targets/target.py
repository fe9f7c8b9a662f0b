"""The input and the result of building a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from attnforge.bundle import Cost, Range, TargetRecord, TensorSpec
from attnforge.export.attention.canonicalize import Site
from attnforge.export.graphs.saving import Shelf
from attnforge.export.lowering.attention import Lowered
from attnforge.export.reuse import Reuse
from attnforge.export.tensorrt.build import Builders
from attnforge.precision import Precision
from attnforge.progress import Steps


@dataclass(frozen=True)
class Job:
    """The inputs of a target's build.

    Attributes:
        out: the final folder of the bundle.
        folder: the folder that the bundle is written in until it is complete.
        shelf: saves graphs there.
        reuse: takes what an earlier deploy made from the cache.
        builders: run TensorRT's builders alongside this process.
        model: the canonical graph; a target lowers a copy.
        sites: its attention sites.
        inputs: name, dtype and dims of each input.
        precision: the bundle's precision.
        attention: precision of attention alone in TensorRT's plans; None for the bundle's own.
        measuring: seconds for choosing forms by measuring; 0 if rules choose.
        compute_capabilities: those that a TensorRT-RTX plan is built for, such as `SM89`; empty for portable plans.
        profiles: further optimization profiles of TensorRT's plans.
        not_in_fp8: why a site's attention is not in fp8 although products are, by site name.
        scores_in_int8: scales of queries and keys that OpenVINO may multiply in int8, by site name.
    """

    out: Path
    folder: Path
    shelf: Shelf
    reuse: Reuse
    builders: Builders
    model: ir.Model
    sites: list[Site]
    inputs: list[TensorSpec]
    precision: Precision
    attention: Precision | None
    measuring: float
    compute_capabilities: Sequence[str]
    profiles: Sequence[Mapping[str, Range]]
    not_in_fp8: Mapping[str, str] = field(default_factory=dict)
    scores_in_int8: Mapping[str, tuple[float, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Built:
    """The result of a target's build.

    Attributes:
        record: its entry in the manifest.
        lowered: the form of every canonical site.
        kernel_of: name of the fused kernel that the backend compiled for a site, or None; None itself if the backend
            does not report what it compiles.
        why_unfused: the reason why the backend compiled no fused kernel although the form has one.
        children: the processes that built it, by name.
    """

    record: TargetRecord
    lowered: list[Lowered]
    kernel_of: Callable[[Lowered], str | None] | None = None
    why_unfused: Callable[[Lowered], str] | None = None
    children: Mapping[str, Cost] = field(default_factory=dict)


Finish = Callable[[Steps], Built]
"""Waits for what a target started to build, and reports every plan that it waits for.

Raises:
    UsageError: a compute capability that the builder does not support.
    BuildError: the builder refused.
"""
