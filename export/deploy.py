"""From a model to a bundle: source, canonical graph, precisions, targets, certificate, reference, manifest,
measurement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from attnforge.bundle import (
    CANONICAL,
    FLAVOURS,
    OPENVINO,
    PLAIN,
    Bundle,
    Manifest,
    Source,
    Wrong,
    graph_tensors,
    write_manifest,
    writing,
)
from attnforge.cache import DeployCache
from attnforge.errors import WrongError
from attnforge.export.attention.canonicalize import canonicalize
from attnforge.export.attention.roles import note_roles
from attnforge.export.certificate import certify, check_fused, masks_of
from attnforge.export.checking import CHECKING, check
from attnforge.export.decoding.insert import one_token, with_cache
from attnforge.export.decoding.tokenizer import keep_tokenizer
from attnforge.export.diagnosis.departure import departure
from attnforge.export.expected_caches import ExpectedCaches
from attnforge.export.graphs.saving import Shelf
from attnforge.export.lowering.openvino import INT8_FORM
from attnforge.export.measuring import MEASURING, SECONDS, measure
from attnforge.export.options import DeployOptions, Keywords
from attnforge.export.precision.caches import RoundedCache
from attnforge.export.precision.gate import choose_forms
from attnforge.export.precision.int8_scores import why_over_budget
from attnforge.export.precision.rounding import Rounded
from attnforge.export.precision.search import choose
from attnforge.export.reference import ReferenceModel, write_reference
from attnforge.export.reuse import Reuse
from attnforge.export.room import Work
from attnforge.export.sources.onnx_file import Imported
from attnforge.export.sources.source import Model, open_source
from attnforge.export.sources.torch_module import Captured, DynamicShapes
from attnforge.export.targets.openvino import own_graph
from attnforge.export.targets.registry import Selection, begin, finish, select
from attnforge.export.targets.target import Job
from attnforge.export.tensorrt.build import Builders, profiles_of
from attnforge.machine import tool_versions
from attnforge.memory import give_back
from attnforge.progress import Listener, Stages
from attnforge.runtime.cases import WHOLE_CACHE, sizes_at


def deploy(
    module: Model,
    args: Sequence[Any] | None,
    out: str | os.PathLike[str],
    dynamic_shapes: DynamicShapes = None,
    precision: str | None = None,
    targets: Sequence[str] | None = None,
    name: str | None = None,
    *,
    progress: Listener = None,
    **keywords: Unpack[Keywords],
) -> Bundle:
    """Export `module` as it computes in eval mode, lower it for every target, and write a bundle to `out`.

    Args:
        module: a module that takes tensors by position and returns a tensor or a tuple, list or dict of them; an
            exported program; or the path of an `.onnx` or `.pt2` file. It is not modified.
        args: example inputs. None for a program, which has its own, and to draw random inputs for an ONNX graph.
        out: folder to write.
        dynamic_shapes: for a module, as in `torch.export`; every Dim needs a `max`. Min, example and max become
            TensorRT's profile. For a graph, `{dim: (min, opt, max)}` for every dynamic dim of its inputs; for a
            program, the same for dims that have no upper bound or need another range.
        precision: `fp32`, `tf32`, `fp16` or `bf16`; by default a graph's or program's own, and fp32 for a module.
            `auto` (or `auto-fp16`, `auto-bf16`) chooses: 16 bits, with fp32 for the operators that need it and for
            inputs and outputs; the manifest records which operators stayed in fp32, and why. `int8` and `fp8` compute
            products with weights in 8 bits, except heads and attention, and `int4` stores only their weights in 4 bits;
            the deploy is refused if that costs more than `max_error`, or `metric` and `least`, allow, one of which has
            to be given. `auto-int8`, `auto-fp8` and `auto-int4` keep products in fp32 until the requirement is met.
        targets: any of `onnxruntime`, `tensorrt`, `tensorrt_rtx`; by default all that this machine can build. If a
            builder refuses a target that was named here, that is an error; if it refuses a default one, the manifest
            records why the target is missing.
        name: name of the deployed model; by default the class's.
        progress: called with the name of every stage as it begins; an :class:`attnforge.progress.Progress` also
            receives every step within a stage.

    Keyword Args:
        compute_capabilities: GPUs that the TensorRT-RTX plan supports, such as `("SM89",)`; by default all from SM80
            on.
        profiles: further optimization profiles of TensorRT's plans, each (min, opt, max) of some dims; a session runs
            the one whose opt is nearest. By default there is one profile, over all that the dynamic shapes allow.
        attention_precision: `fp16` or `bf16`, with fp32 and tf32: TensorRT, which has no fused kernel for fp32,
            computes attention alone at this precision, between casts. Everything else is unchanged, including ONNX
            Runtime's model.
        require_fused: targets that must run every attention site as one fused kernel; if one does not, nothing is
            written.
        data: real inputs, each given like `args`, by name, or as an `.npz` of named arrays, of any sizes that the
            dynamic shapes allow. Each becomes a reference case that is verified; the bundle stores the inputs and their
            outputs. They also give the ranges for quantisation.
        labels: the correct labels for the samples of each of `data`; by default the `labels` array of its files.
        metric: `accuracy` or `cosine`, measured on `data` whenever the bundle is verified.
        least: value that the metric must reach; by default it may fall short of float64's by twice as much as eager's.
        max_error: for `auto`, the maximum relative error on ordinary inputs; by default twice that of eager at fp16,
            and at most 1e-2. If a metric is given and this is not, the metric decides. For quantised products, the
            maximum error against float64 on real data, or on ordinary inputs if there is none.
        tune: measure on this machine, for some seconds each, which form of each site and which session settings are
            fastest in ONNX Runtime on its CPU, and which backend is fastest within the parity budget; `auto` then loads
            that backend here. Without it, fixed rules choose, and the same module gives the same bundle everywhere.
        force: overwrite a bundle at `out`; the old one stays intact until the new one is complete.
        cache: reuse TensorRT plans, reference outputs and measurements from an earlier deploy of the same model on this
            machine, and keep them for the next one (:mod:`attnforge.cache`).
        source: the manifest's record of how to make the module again; by default its class or file.
        cache_tokens: deploy a causal model that takes only `(batch, tokens, …)` as a decoder step: the bundle's graphs
            take the next tokens and a KV cache with this many slots for every attention site
            (:mod:`attnforge.export.decoding.insert`). A session still answers for whole sequences, and
            :meth:`~attnforge.runtime.session.Session.decoder` steps through them.
        cache_precision: `int8` stores keys and values in 8 bits, a quarter of the bytes, with ranges from `data`; the
            deploy is refused if that costs more than `max_error`, or `metric` and `least`, allow. By default caches
            have the dtype of keys and values.
        tokenizer: a `tokenizer.json` file of the `tokenizers` library, which the bundle stores for `attnforge
            generate`.
        stop: stop token ids.
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
    options = DeployOptions(precision, targets, name, **keywords)
    selection = select(options.targets, options.require_fused)
    options.check_effect(selection.chosen)
    stages = Stages(progress, _stage_names(options, selection))
    with writing(out, options.force) as folder:
        reuse = Reuse(DeployCache.of_user(options.cache), folder)
        manifest = _made(module, args, dynamic_shapes, Path(out), folder, options, selection, stages, reuse)
        _write_manifest(folder, manifest, stages)
        if options.tune:
            give_back()  # everything that the steps allocated, before every backend loads the weights
            reuse.measured(manifest, partial(measure, folder, manifest, stages.begin(MEASURING)))
        if manifest.wrong is None:
            manifest.wrong = _kept(check(folder, manifest, stages.begin(CHECKING)), manifest.name, options)
        manifest.reused = list(dict.fromkeys(reuse.reused))
        _write_manifest(folder, manifest, stages, only_new=True)
    return Bundle(out, trusted=False)  # made here just now


def _kept(wrong: Wrong | None, name: str, options: DeployOptions) -> Wrong | None:
    """The problems of a bundle that is written anyway.

    Raises:
        WrongError: it is not to be written.
    """
    if wrong is not None and not options.keep_wrong:
        raise WrongError(
            f"{name} was not deployed: {wrong.text()}; to write the bundle anyway, for attnforge diagnose, pass "
            "--keep-wrong (keep_wrong=True)"
        )
    return wrong


def _made(
    module: Model,
    args: Sequence[Any] | None,
    dynamic_shapes: DynamicShapes,
    out: Path,
    folder: Path,
    options: DeployOptions,
    selection: Selection,
    stages: Stages,
    reuse: Reuse,
) -> Manifest:
    """Run the steps from a model to all files of its bundle in `folder`, and return the manifest."""
    with Builders(reuse.plan) as builders:
        stages.begin("export")
        source, origin = open_source(module, args, dynamic_shapes, options.source_precision, options.trust_source)
        name = options.name or _name_of(origin)
        wrong = _kept(departure(source) if isinstance(source, Captured) else None, name, options)
        attention = options.attention_at(source.precision, selection.chosen)
        data = options.real_data(source.inputs)
        profiles_of(source.inputs, options.profiles)  # refuses profiles before anything is built

        stages.begin("canonicalize")
        model, plain = source.model, source.model.clone()
        sites = canonicalize(model).sites
        masks = masks_of(model, sites, source.inputs)
        note_roles(model.graph, source.inputs, negative=isinstance(source, Imported))

        largest = sizes_at(source.inputs, "max")
        Work(model, source.precision, selection.chosen, options.tune, largest).check()

        reference: ReferenceModel = source
        mixed, quantised = None, None
        rounded: list[RoundedCache] = []
        scores: list[Rounded] = []
        if options.automatic:
            trials, requirement = stages.begin("choose precisions"), options.requirement(data)
            chosen = choose(model, sites, source, options.automatic, requirement, data, trials)
            model, reference, mixed = chosen.model, chosen.reference, chosen.mixed
        elif options.is_quantised:
            trials, requirement = stages.begin("quantise"), options.requirement(data)
            forms = choose_forms(
                model,
                sites,
                source,
                options.quantised or source.precision,
                options.keeps_some,
                requirement,
                data,
                trials,
                caches_in_int8=options.cache_precision is not None,
                scores_in_int8=options.cache_tokens is None,
            )
            model, reference, quantised, rounded = forms.model, forms.reference, forms.record, forms.caches
            scores = forms.scores

        whole, decoding, caches = model, None, None
        if options.cache_tokens is not None:
            model = whole.clone()  # the reference may be the graph itself
            decoding = with_cache(model, sites, source.inputs, source.outputs, options.cache_tokens)
            decoding.stop = list(options.stop)
            names = [spec.name for spec in decoding.tensors]
            scales = {cache.site.name: (cache.key, cache.value) for cache in rounded}
            stored = {
                spec.name: scale
                for cache in decoding.caches
                if cache.site in scales
                for spec, scale in zip((cache.key, cache.value), scales[cache.site], strict=True)
            }
            caches = ExpectedCaches(decoding.places, names, whole, source.model, sites, stored)
            if options.tokenizer is not None:
                decoding.tokenizer = keep_tokenizer(options.tokenizer, folder)
        taken, _ = graph_tensors(source.inputs, source.outputs, decoding)
        profiles = [*options.profiles, *([] if decoding is None else [one_token(taken[0])])]

        shelf = Shelf(folder)
        shelf.save(model, CANONICAL)
        if reference is source:  # otherwise the canonical graph has other weights, which the plain one cannot share
            shelf.save_sharing(plain, PLAIN, model, CANONICAL)
        if isinstance(source, Imported):
            shelf.share(source.original.model)

        job = Job(
            out=out,
            folder=folder,
            shelf=shelf,
            reuse=reuse,
            builders=builders,
            model=model,
            sites=sites,
            inputs=taken,
            precision=reference.precision,
            attention=attention,
            measuring=SECONDS / 2 if options.tune else 0.0,
            compute_capabilities=options.built_for,
            profiles=profiles,
            not_in_fp8=quantised.kept if quantised is not None and quantised.type == "fp8" else {},
            scores_in_int8={score.name: score.scales for score in scores},
        )
        begun = {target: begin(target, job, selection, stages.begin(_lowering(target))) for target in selection.chosen}
        give_back()
        alone = attention if quantised is None else None  # its error is far below that of quantised products
        begun_reference = stages.begin("reference")
        make = partial(write_reference, folder, reference, whole, alone, data, begun_reference, caches)
        has_caches = caches is not None
        cases = reuse.reference(reference, attention, data, make, has_caches) if reference is source else make()
        if decoding is not None:
            decoding.cases = [case for case in cases if case.name == WHOLE_CACHE]
            cases = [case for case in cases if case.name != WHOLE_CACHE]
        built, refused = finish(begun, selection, stages.begin(PLANS) if _has_plans(selection) else None)
        if decoding is None:
            lowering = stages.begin(_lowering(OPENVINO))
            if quantised is not None and scores:
                why = why_over_budget(folder, model, sites, scores, source.inputs, cases)
                if why is not None:
                    quantised.kept |= {score.name: why for score in scores}
                    job = replace(job, scores_in_int8={})
            openvino = own_graph(job, built, lowering)
            built |= {OPENVINO: openvino} if openvino is not None else {}
            if quantised is not None and openvino is not None:
                in_int8 = {site.site for site in openvino.lowered if site.form == INT8_FORM}
                quantised.scores = {score.name: score.error for score in scores if score.name in in_int8}
        certificate = certify(sites, built, masks)
        check_fused(options.require_fused, certificate)
        return Manifest(
            name=name,
            precision=reference.precision.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tools=tool_versions(),
            source=options.source or origin,
            inputs=source.inputs,
            outputs=source.outputs,
            reference=reference.reference,
            attention=certificate,
            targets={target: result.record for target, result in built.items()},
            skipped={**selection.skipped, **refused},
            cases=cases,
            mixed=mixed,
            quantised=quantised,
            decoding=decoding,
            metric=options.metric,
            least=options.least,
            max_eager_error=options.max_eager_error,
            wrong=wrong,
            children={name: child for result in built.values() for name, child in result.children.items()},
            reused=list(dict.fromkeys(reuse.reused)),
        )


PLANS = "wait for TensorRT's plans"
"""The stage in which only TensorRT's builders are at work; they started as soon as their models were saved."""


def _stage_names(options: DeployOptions, selection: Selection) -> list[str]:
    """The stages of a deployment, in order."""
    return [
        "export",
        "canonicalize",
        *(["choose precisions"] if options.automatic else []),
        *(["quantise"] if options.is_quantised else []),
        *(_lowering(target) for target in selection.chosen),
        "reference",
        *([PLANS] if _has_plans(selection) else []),
        *([_lowering(OPENVINO)] if options.cache_tokens is None else []),
        *([MEASURING] if options.tune else []),
        CHECKING,
    ]


def _lowering(target: str) -> str:
    return f"lower for {target}" if target in (*FLAVOURS, OPENVINO) else f"lower and build for {target}"


def _has_plans(selection: Selection) -> bool:
    return not set(FLAVOURS).isdisjoint(selection.chosen)


def _write_manifest(folder: Path, manifest: Manifest, stages: Stages, *, only_new: bool = False) -> None:
    """Write the manifest with the time and memory of every stage so far."""
    manifest.seconds, manifest.memory = stages.seconds(), stages.memory()
    write_manifest(folder, manifest, only_new=only_new)


def _name_of(origin: Source) -> str:
    """The name of a model that the caller did not name: its file's, or its class's."""
    return origin.name.rpartition(".")[2] if origin.kind == "module" else Path(origin.name).stem
