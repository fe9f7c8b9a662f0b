"""From a model to a bundle, in stages (:mod:`attnforge.export.deployment`), a measurement and a check."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch.export import ExportedProgram

from attnforge.bundle import PROCESSOR, Bundle, Manifest, write_manifest, writing
from attnforge.cache import DeployCache
from attnforge.errors import UsageError, first_line
from attnforge.export.checking import CHECKING, check
from attnforge.export.deployment import Deployment, names_of, run_stages
from attnforge.export.measuring import MEASURING, measure
from attnforge.export.options import DeployOptions, Keywords
from attnforge.export.reuse import Reuse
from attnforge.export.sources import named
from attnforge.export.sources.source import Model
from attnforge.export.sources.torch_module import DynamicShapes
from attnforge.export.targets.registry import select
from attnforge.export.tensorrt.build import Builders
from attnforge.keywords import guessable
from attnforge.memory import give_back
from attnforge.precision import spelled
from attnforge.progress import Listener, Stages


@guessable(DeployOptions)
def deploy(
    module: Model,
    args: Any = None,
    out: str | os.PathLike[str] | None = None,
    dynamic_shapes: DynamicShapes = None,
    precision: Any = None,
    targets: Sequence[str] | str | None = None,
    name: str | None = None,
    *,
    progress: Listener = None,
    **keywords: Unpack[Keywords],
) -> Bundle:
    """Export `module` as it computes in eval mode, lower it for every target, and write a bundle to `out`.

    Args:
        module: a module that takes tensors and returns a tensor or a tuple, list, dict or dataclass of them; an
            exported program; the path of an `.onnx` or `.pt2` file; or a name as on the command line: `hf:FOLDER`, a
            registered model, or `package.module:function`, which is imported and run. It is not modified.
        args: example inputs: by position, those of keyword-only parameters after the others; by name; or one tensor.
            None for a program or a named model, which has its own, and to draw random inputs for an ONNX graph.
        out: folder to write; by default `NAME-PRECISION`.
        dynamic_shapes: for a module, as in `torch.export`; every Dim needs a `max`. Min, example and max become
            TensorRT's profile. For a graph, `{dim: (min, opt, max)}` for every dynamic dim of its inputs; for a
            program, the same for dims that have no upper bound or need another range.
        precision: `fp32`, `tf32`, `fp16` or `bf16`, or the torch dtype; by default a graph's or program's own, and fp32
            for a module.
            `auto` (or `auto-fp16`, `auto-bf16`) chooses: 16 bits, with fp32 for the operators that need it and for
            inputs and outputs; the manifest records which operators stayed in fp32, and why. `int8` and `fp8` compute
            products with weights in 8 bits, except heads and attention, and `int4` stores only their weights in 4 bits;
            the deploy is refused if that costs more than `max_error`, or `metric` and `least`, allow, one of which has
            to be given. `auto-int8`, `auto-fp8` and `auto-int4` keep products in fp32 until the requirement is met.
        targets: any of `onnxruntime`, `tensorrt`, `tensorrt_rtx`; by default all that this machine can build. If a
            builder refuses a target that was named here, that is an error; if it refuses a default one, the manifest
            records why the target is missing.
        name: name of the deployed model; by default the class's, the file's or the Hugging Face folder's.
        progress: called with the name of every stage as it begins; an :class:`attnforge.progress.Progress` also
            receives every step within a stage.

    Keyword Args:
        compute_capabilities: GPUs that the TensorRT-RTX plan supports, such as `("SM89",)`; by default all from SM80
            on.
        profiles: further optimization profiles of TensorRT's plans, each (min, opt, max) of some dims; a session runs
            the one whose opt is nearest. By default there is one profile, over all that the dynamic shapes allow.
        attention_precision: `fp16` or `bf16`, with fp32, tf32 and quantised precisions (for these `fp16` by default):
            TensorRT, which has no fused kernel for fp32, computes attention alone at this precision, between casts.
            Everything else is unchanged, including ONNX Runtime's model.
        require_fused: targets that must run every attention site as one fused kernel; if one does not, nothing is
            written.
        data: real inputs, each given like `args`, by name, or as an `.npz` of named arrays, of any sizes that the
            dynamic shapes allow. Each becomes a reference case that is verified; the bundle stores the inputs and their
            outputs. They also give the ranges for quantisation.
        own_data: whether a registered model's own real inputs, if it has any, are used when no `data` is given.
        labels: the correct labels for the samples of each of `data`; by default the `labels` array of its files.
        metric: `accuracy` or `cosine`, measured on `data` whenever the bundle is verified.
        least: value that the metric must reach; by default it may fall short of float64's by twice as much as eager's.
        max_error: for `auto`, the maximum relative error on ordinary inputs; by default twice that of eager at fp16,
            and at most 1e-2. If a metric is given and this is not, the metric decides. For quantised products, the
            maximum error against float64 on real data, or on ordinary inputs if there is none.
        tune: measure on this machine, for about 20 seconds, which form of each site is fastest on ONNX Runtime's CPU
            backend and on OpenVINO, which settings of ONNX Runtime's session are, and which backend is fastest within
            the parity budget; `auto` then loads that backend here. Without it, fixed rules choose, and the same module
            gives the same bundle everywhere.
        force: overwrite a bundle at `out`; the old one stays intact until the new one is complete.
        cache: reuse TensorRT plans, reference outputs and measurements from an earlier deploy of the same model on this
            machine, and keep them for the next one (:mod:`attnforge.cache`).
        source: the manifest's record of how to make the module again; by default its class, file or name.
        model_options: options of a named model, such as `{"max_batch": 32}` for `hf:`
            (:func:`attnforge.export.sources.huggingface.example`).
        weights: safetensors file with the weights of a registered model or a callable's.
        cache_tokens: deploy a causal model that takes only `(batch, tokens, …)` as a decoder step: the bundle's graphs
            take the next tokens and a KV cache with this many slots for every attention site
            (:mod:`attnforge.export.decoding.insert`). A session still answers for whole sequences, and
            :meth:`~attnforge.runtime.session.Session.decoder` steps through them.
        cache_precision: `int8` stores keys and values in 8 bits, a quarter of the bytes, with ranges from `data`; the
            deploy is refused if that costs more than `max_error`, or `metric` and `least`, allow. By default caches
            have the dtype of keys and values.
        tokenizer: a `tokenizer.json` file of the `tokenizers` library, which the bundle keeps, so that it takes texts;
            by default that of the Hugging Face folder.
        processor: a `preprocessor_config.json` file of transformers, by which pictures are prepared
            (:class:`attnforge.pictures.ImageProcessor`) and which the bundle keeps; by default that of the Hugging Face
            folder.
        stop: stop token ids; by default those of the Hugging Face folder's configuration.
        max_eager_error: maximum relative error of eager itself on ordinary inputs; beyond it nothing is proved, and the
            deploy is refused. By default 0.1.
        keep_wrong: write the bundle even if no backend computes what the model computes, or if that is not proved, so
            that it can be diagnosed. `load` then refuses `auto`.
        trust_source: allow reading a `.pt2` file. torch may run code while it reads one, so set this only if you trust
            its author as you would a program's.

    Raises:
        UntrustedError: a `.pt2` file without `trust_source`.
        UsageError: an invalid argument, `out` exists, or a file is not a model.
        CaptureError: torch cannot export the module.
        UnavailableError: a target that was asked for cannot be built here, or there is too little memory.
        BundleError: the disk is full.
        BuildError: a builder refused.
        UnfusedError: a target of `require_fused` leaves a site unfused, or the model has no site.
        WrongError: no backend computes what the model computes on ordinary inputs, or eager is so far from float64
            there that nothing is proved; names the first tensor that is wrong, and why.
    """
    precision = spelled(precision)
    name = name or (named.name_of(module) if isinstance(module, str) else None)
    out = out or _default_folder(module, name, precision)
    options = DeployOptions(precision, targets, name, **keywords)
    selection = select(options.targets, options.require_fused)
    options.check_effect(selection.chosen)
    if options.tokenizer is not None:
        check_tokenizer(options.tokenizer)
    if options.processor is not None:
        check_processor(options.processor)
    with writing(out, options.force) as folder:
        if isinstance(module, str):
            module, args, dynamic_shapes, options = _built(module, args, dynamic_shapes, options, progress)
        options.check_data()
        reuse = Reuse(DeployCache.of_user(options.cache), folder)
        with Builders(reuse.plan) as builders:
            deployment = Deployment(
                module, args, dynamic_shapes, options, selection, Path(out), folder, reuse, builders
            )
            stages = Stages(progress, [*names_of(deployment), *([MEASURING] if options.tune else []), CHECKING])
            run_stages(deployment, stages)
            manifest = deployment.manifest()
        del deployment, module, args
        _write_manifest(folder, manifest, stages)
        if options.tune:
            give_back()  # everything that the steps allocated, before every backend loads the weights
            reuse.measured(manifest, partial(measure, folder, manifest, stages.begin(MEASURING)))
        if manifest.wrong is None:
            manifest.wrong = options.allow(check(folder, manifest, stages.begin(CHECKING)), manifest.name)
        manifest.reused = list(dict.fromkeys(reuse.reused))
        _write_manifest(folder, manifest, stages, only_new=True)
    return Bundle(out, trusted=False)  # made here just now


def _default_folder(module: Model, name: str | None, precision: str | None) -> str:
    if isinstance(module, os.PathLike):
        name, module = name or Path(module).stem, str(module)
    has_own = isinstance(module, ExportedProgram) or (isinstance(module, str) and named.is_file(module))
    return f"{name or type(module).__name__}-{precision or ('own' if has_own else 'fp32')}"


def _built(
    model: str, args: Any, dynamic_shapes: DynamicShapes, options: DeployOptions, progress: Listener
) -> tuple[Model, Any, DynamicShapes, DeployOptions]:
    """Build a model that is named by a string, and complete the options by what its source has: real inputs, files to
    keep, and stop token ids.

    Raises:
        UsageError, UnknownNameError: as in :func:`attnforge.export.sources.named.model_named`.
    """
    if callable(progress):
        progress(f"build {model}")
    given = dict(options.model_options or {})
    if options.cache_tokens is not None and model.startswith(named.HUGGING_FACE):
        given = {"inputs": "input_ids", "max_tokens": str(options.cache_tokens), **given}
    built = named.model_named(model, given, options.weights, dynamic_shapes)
    if built is None:
        return Path(model), args, dynamic_shapes, options
    example, source = built
    if args is not None:
        raise UsageError(f"{model} has example inputs of its own; leave args out, or give the module itself")
    files = named.files_of(model)
    data, labels = options.data, options.labels
    if options.own_data and not (data or labels):
        data, labels = named.real_data(model, example.args or ())
    options = replace(
        options,
        source=options.source or source,
        tokenizer=options.tokenizer or usable(files.tokenizer, check_tokenizer),
        processor=options.processor or usable(files.processor, check_processor),
        stop=options.stop or (files.stop if options.cache_tokens is not None else ()),
        data=data,
        labels=labels,
    )
    return example.module, example.args, example.dynamic_shapes, options


def _write_manifest(folder: Path, manifest: Manifest, stages: Stages, *, only_new: bool = False) -> None:
    """Write the manifest with the time and memory of every stage so far."""
    manifest.seconds, manifest.memory = stages.seconds(), stages.memory()
    write_manifest(folder, manifest, only_new=only_new)


# --- files of a model that its bundle keeps ---------------------------------------------------------------------------

# Files of a model that its bundle keeps: the tokenizer of texts, and the image processor.


log = logging.getLogger("attnforge")


def check_tokenizer(file: str | os.PathLike[str]) -> None:
    """Check that a file is a tokenizer.

    Raises:
        UsageError: the file does not exist, or is not a tokenizer of the `tokenizers` library.
    """
    if "model" not in _object(file, "a tokenizer", "a tokenizer.json of the tokenizers library"):
        raise UsageError(f"{os.fspath(file)} contains no tokenizer model; give a tokenizer.json")


def check_processor(file: str | os.PathLike[str]) -> None:
    """Check that a file has the settings of an image processor.

    Raises:
        UsageError: the file does not exist, or contains no JSON object that names a processor.
    """
    content = _object(file, "an image processor", f"a {PROCESSOR} of transformers")
    if content.keys().isdisjoint(names := ("image_processor_type", "feature_extractor_type")):
        raise UsageError(f"{os.fspath(file)} has no {' or '.join(names)}; give a {PROCESSOR} of transformers")


def usable(file: Path | None, check: Callable[[Path], None]) -> Path | None:
    """A file that was found in a model's folder; None, with a warning, if it is not one that can be kept.

    Args:
        file: the file, if there is one.
        check: raises a UsageError if it cannot.
    """
    if file is None:
        return None
    try:
        # it is of its folder, or of the hub's cache that the folder is part of, and not a link to another file, which a
        # model from elsewhere could take into the bundle
        folder, target = file.parent.resolve(), file.resolve()
        blobs = [folder.parent.parent / "blobs"] if folder.parent.name == "snapshots" else []
        if not any(map(target.is_relative_to, [folder, *blobs])):
            raise UsageError(f"{file} is a link to a file outside its folder; give that file by name, or copy it")
        check(file)
    except UsageError as error:
        log.warning("the bundle keeps no %s: %s", file.name, error)
        return None
    return file


def _object(file: str | os.PathLike[str], kind: str, advice: str) -> dict[str, object]:
    try:
        content = json.loads(Path(file).read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{os.fspath(file)} is not {kind} ({first_line(error)}); give {advice}") from error
    return content if isinstance(content, dict) else {}
