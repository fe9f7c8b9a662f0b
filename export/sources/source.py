"""Open a model of any kind as a graph: torch module, exported program, `.pt2` file or ONNX file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram

from attnforge.bundle import Source
from attnforge.errors import UsageError, plain
from attnforge.export.sources.exported_program import load_program, open_program
from attnforge.export.sources.onnx_file import Imported, import_graph
from attnforge.export.sources.specs import Ranges
from attnforge.export.sources.torch_module import Captured, capture
from attnforge.precision import precision_named

Model = nn.Module | ExportedProgram | str | os.PathLike[str]


def open_source(
    model: Model, args: Any, dynamic_shapes: Any, precision: str | None, trusted: bool = False
) -> tuple[Captured | Imported, Source]:
    """Open a model as a graph, with the manifest's record of its source.

    Args:
        model: a module, an exported program, or the path of an `.onnx` or `.pt2` file.
        args: example inputs by position or by name, or one tensor; None for those of a program, or random ones for an
            ONNX graph.
        dynamic_shapes: for a module, as for `torch.export`; for the others, the range of every dynamic dim by name.
        precision: name of a precision; None for that of a graph or program, or fp32 for a module.
        trusted: whether a `.pt2` file may be read (:func:`load_program`).

    Raises:
        UntrustedError: the model is a `.pt2` file, and `trusted` is False.
        UsageError: the file is of another kind, or there are no example inputs.
        CaptureError: torch cannot export the module with these arguments.
        BuildError: ONNX Runtime cannot run the graph.
    """
    if hasattr(args, "shape"):
        args = (args,)
    if isinstance(model, str | os.PathLike):
        file = Path(model)
        if file.suffix == ".onnx":
            return import_graph(file, dynamic_shapes, precision, args), _record("onnx", file, dynamic_shapes)
        if file.suffix != ".pt2":
            raise UsageError(f"{str(file)!r} is not an .onnx or .pt2 file; give one, or a torch.nn.Module")
        origin, model = _record("program", file, dynamic_shapes), load_program(file, trusted)
    else:
        origin = Source(kind="module", name=f"{type(model).__module__}.{type(model).__qualname__}")
    if isinstance(model, ExportedProgram):
        opened = open_program(model, dynamic_shapes)
        model, dynamic_shapes = opened.module, opened.dynamic_shapes
        args, precision = opened.args if args is None else args, precision or opened.precision
    if args is None:
        raise UsageError(f"no example inputs were given; {type(model).__name__} needs them to be exported")
    return capture(model, args, dynamic_shapes, precision_named(precision or "fp32")), origin


def _record(kind: Any, file: Path, ranges: Ranges | None) -> Source:
    options = {name: ":".join(map(str, bounds)) for name, bounds in (ranges or {}).items()}
    return Source(kind=kind, name=plain(str(file)), options=dict(options))
