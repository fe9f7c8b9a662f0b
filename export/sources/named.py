"""Models named by a string: a registered name, `package.module:function`, `hf:PATH`, an `.onnx` or a `.pt2` file."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from attnforge.bundle import Source
from attnforge.errors import UnknownNameError, UntrustedError, UsageError, first_line, plain
from attnforge.export.sources import huggingface
from attnforge.export.sources.exported_program import as_module, load_program
from attnforge.model.data import real_data as real_data
from attnforge.model.registry import MODELS, SEED, Example, build_model, load_weights

FILES = (".onnx", ".pt2")
HUGGING_FACE = "hf:"


def model_named(
    model: str, options: Mapping[str, Any], weights: str | os.PathLike[str] | None, dims: Any
) -> tuple[Example, Source] | None:
    """The named model in the form that :func:`attnforge.deploy` takes, and the manifest's record of it; None for a
    file, which `deploy` reads itself.

    Args:
        model: a name as for :func:`build`, or the path of an `.onnx` or `.pt2` file.
        options: options of a registered model or a callable.
        weights: weights of a registered model or a callable.
        dims: for a file, the least, usual and largest size of its dynamic dims, by name; None or empty for others.

    Raises:
        UnknownNameError: no registered model or option has that name.
        UsageError: the file or callable does not exist, or the option is for another kind of source.
    """
    if not is_file(model):
        if dims:
            raise UsageError(
                f"{model} defines the ranges of its dims itself; --dim (dynamic_shapes) is for .onnx and .pt2 files"
            )
        return build(model, options, weights)
    if options or weights is not None:
        raise UsageError(f"{model} is a file that contains its weights and sizes; it takes no options and no weights")
    if not Path(model).is_file():
        raise UsageError(f"no file {model!r}; give the path of an ONNX model or an exported program, or a model's name")
    return None


def build(model: str, options: Mapping[str, Any], weights: str | os.PathLike[str] | None) -> tuple[Example, Source]:
    """Build the module, example inputs and dynamic shapes that `model` names, and the manifest's record of it.

    Args:
        model: a registered name; `package.module:function`, which returns `(module, args, dynamic_shapes)`; or `hf:`
            followed by a Hugging Face folder or configuration.
        options: keyword arguments of the registered model, of the callable, or of
            :func:`attnforge.export.sources.huggingface.example`.
        weights: a safetensors file with exactly the tensors of the module's state dict.

    Raises:
        UnknownNameError: no registered model or option has that name.
        UsageError: the callable cannot be imported, or returns something else.
    """
    kind: Any = "huggingface" if model.startswith(HUGGING_FACE) else "callable" if ":" in model else "registered"
    path = None if weights is None else os.fspath(weights)
    example, random = KINDS[kind](model, options, path)
    return example, Source(kind=kind, name=model, options=dict(options), weights=path, random_weights=random)


class Files(NamedTuple):
    """Files of a model's source that its bundle keeps, and its stop token ids."""

    tokenizer: Path | None = None
    processor: Path | None = None
    stop: Sequence[int] = ()


def files_of(model: str) -> Files:
    """The tokenizer and the image processor of the named model, if it has them, and its stop token ids."""
    if model.startswith(HUGGING_FACE):
        return Files(*huggingface.files_of(model.removeprefix(HUGGING_FACE)))
    if (registered := MODELS.get(model)) is not None:
        tokenizer = registered.tokenizer and registered.tokenizer.resolve()  # installers may link a package's files
        return Files(tokenizer, None, registered.stop)
    return Files()


def is_file(model: str) -> bool:
    """Whether the name is that of a file that :func:`attnforge.deploy` reads itself."""
    return not model.startswith(HUGGING_FACE) and Path(model).suffix in FILES


def name_of(model: str) -> str:
    """The default name of a named model: a file's without its suffix; a folder's, and for a snapshot of the Hugging
    Face hub, or a folder called `model`, that of the folder that says which model it is."""
    if is_file(model):
        return plain(Path(model).stem)
    path = Path(os.path.abspath(model.rpartition(":")[2]))  # a link keeps its own name
    if not model.startswith(HUGGING_FACE):
        return path.name
    path = path.parent if path.is_file() else path
    if path.parent.name == "snapshots":
        return path.parents[1].name.rpartition("--")[2]
    return path.parent.name if path.name == "model" else path.name


def _registered(model: str, options: Mapping[str, Any], weights: str | None) -> tuple[Example, str | None]:
    if model not in MODELS and os.path.exists(model):
        raise UsageError(
            f"{model!r} is not an .onnx or .pt2 file; give one, hf:{model} for a Hugging Face folder, or a "
            "torch.nn.Module"
        )
    example = build_model(model, weights=weights, **options)
    random = f"all, seed {SEED}" if weights is None and MODELS[model].weights is None else None
    return example, random


def _from_callable(model: str, options: Mapping[str, Any], weights: str | None) -> tuple[Example, None]:
    module_name, _, function_name = model.partition(":")
    sys.path.insert(0, os.getcwd())  # for a user's own file in the folder in which the command is run
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError, ValueError, TypeError, SystemExit) as error:  # the middle two of ":f", "..a:f"
        known = ", ".join(MODELS)
        raise UsageError(
            f"cannot import {model!r} ({first_line(error)}); give package.module:function, or one of {known}"
        ) from error
    finally:
        sys.path.pop(0)
    try:
        module, args, dynamic_shapes = function(**options)
    except (TypeError, ValueError, SystemExit) as error:
        raise UsageError(f"{model} must return (module, args, dynamic_shapes): {first_line(error)}") from error
    if not isinstance(module, nn.Module):
        raise UsageError(f"{model} returned a {type(module).__name__} as module; return a torch.nn.Module")
    if weights is not None:
        load_weights(module, weights)
    return Example(module, tuple(args), dynamic_shapes), None


def _from_hugging_face(model: str, options: Mapping[str, Any], weights: str | None) -> tuple[Example, str | None]:
    if weights is not None:
        raise UsageError(f"{model} takes the weights in its folder (model.safetensors), not those of another file")
    known = [name for name in inspect.signature(huggingface.example).parameters if name != "path"]
    if unknown := [name for name in options if name not in known]:
        raise UnknownNameError(f"option of {model}", unknown[0], known)
    example = huggingface.example(model.removeprefix(HUGGING_FACE), **options)
    return example, getattr(example.module, "random_weights", None)


def _from_program(file: str, options: Mapping[str, Any], weights: str | None) -> tuple[Example, None]:
    module, args = as_module(load_program(Path(file), trusted=True))
    return Example(module, tuple(args.values()), None), None


KINDS: Mapping[str, Callable[[str, Mapping[str, Any], str | None], tuple[Example, str | None]]] = {
    "registered": _registered,
    "callable": _from_callable,
    "huggingface": _from_hugging_face,
    "program": _from_program,
}
"""By the kind of a source, a function from its name, options and weights to the module, and which weights are random.
Whoever calls it for a manifest's record checks first that the source is trusted."""


def check_trusted(source: Source, trusted: bool) -> None:
    """Check that the source named in a manifest may be imported, opened and run. A registered model is code of this
    library, so it needs no trust unless the manifest names a file of weights.

    Args:
        source: the manifest's record.
        trusted: whether the caller trusts the author of the manifest, like that of a program.

    Raises:
        UntrustedError: it may not; the message says what the manifest names.
    """
    if trusted or source.kind == "module" or (source.kind == "registered" and source.weights is None):
        return
    named = repr(source.name) + (f" and {source.weights!r}" if source.weights is not None else "")
    raise UntrustedError(
        f"the manifest names {named} ({source.kind}), which would be opened and run with your permissions; if you "
        "trust the author of the bundle, pass --trust-source (trust_source=True), or pass the module itself (module=…)"
    )


def rebuild(source: Source, trusted: bool = False) -> Example:
    """Rebuild the module that a bundle was deployed from.

    Args:
        source: the manifest's record.
        trusted: see :func:`check_trusted`.

    Raises:
        UntrustedError: the record names code or a file, and `trusted` is False.
        UsageError: the source was a module in memory, which only its owner has, or an ONNX graph.
    """
    if source.kind == "module":
        raise UsageError(f"the bundle was deployed from a module in memory ({source.name}); pass it as module=…")
    if source.kind == "onnx":
        raise UsageError(
            f"the bundle was deployed from an ONNX graph ({source.name}), so there is no torch module and no eager peer"
        )
    check_trusted(source, trusted)
    # by kind alone: the author of the manifest chooses what a name looks like
    return KINDS[source.kind](source.name, source.options, source.weights)[0]
