"""A model's way to a bundle: source, canonical graph, precisions, targets, certificate, reference, manifest,
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
        module: takes tensors by position and returns a tensor or a tuple, list or dict of them; or an exported
            program, or the path of an `.onnx` or `.pt2` file. It is not touched.
        args: example inputs. None for a program, which has its own, and for random inputs of an ONNX graph.
        out: folder to write.
        dynamic_shapes: of a module, `torch.export`'s own; every Dim needs a `max`. Min, example and max become
            TensorRT's profile. Of a graph, `{dim: (min, opt, max)}` for every dynamic dim of its inputs; of a program,
            for dims without an upper bound or that are to have another range.
        precision: `fp32`, `tf32`, `fp16` or `bf16`; by default a graph's or program's own, and fp32 of a module. `auto`
            (or `auto-fp16`, `auto-bf16`) chooses: 16 bits, and fp32 for the operators that need it, with inputs and
            outputs in fp32; the manifest says which operators stayed fp32, and why. `int8` and `fp8` put products with
            weights in 8 bits, heads and attention aside, `int4` their weights alone in 4, and refuse where that costs
            more than `max_error` or `metric` and `least` allow, one of which has to be given; `auto-int8`, `auto-fp8`
            and `auto-int4` keep products in fp32 until it does not.
        targets: any of `onnxruntime`, `tensorrt`, `tensorrt_rtx`; by default every one that this machine can build.
            Where a builder refuses a target that was asked for by name, that is an error; where it refuses another,
            the manifest says why the target is missing.
        name: of the deployed model; by default the class's.
        progress: hears the name of every stage as it begins, or as :class:`attnforge.progress.Progress` every step
            within it too.

    Keyword Args:
        compute_capabilities: GPUs that the TensorRT-RTX plan is for, such as `("SM89",)`; by default every one from
            SM80 on.
        profiles: further optimization profiles of TensorRT's plans, each (min, opt, max) of some dims; a session runs
            the one whose opt is nearest. By default one profile, over all that the dynamic shapes allow.
        attention_precision: `fp16` or `bf16`, for fp32 and tf32: TensorRT, which has no fused kernel for fp32, computes
            attention alone in it, between casts. All else stays as it is, ONNX Runtime's model too.
        require_fused: targets that must run every attention site as one fused kernel; where one does not, nothing is
            written.
        data: real inputs, each as `args` are, or by name, or an `.npz` that holds them by name, of any sizes that the
            dynamic shapes allow. Each becomes a reference case
            that is verified; the bundle keeps them and their outputs. They also give the ranges of what is quantised.
        labels: the right answers for the samples of each of `data`; by default what its files hold as `labels`.
        metric: `accuracy` or `cosine`, measured on `data` whenever the bundle is verified.
        least: value that the metric must reach; by default it may fall short of float64's twice as far as eager does.
        max_error: for `auto`, the relative error that is allowed on ordinary inputs; by default twice that of eager at
            fp16, and no more than 1e-2. Where a metric is given and this is not, the metric decides. Where
            products are quantised, the error against float64 on real data, or on ordinary inputs where there is none.
        tune: measure on this machine, for some seconds each, which form of each site ONNX Runtime runs fastest on its
            CPU, with which settings of its session, and which backend is fastest within the parity budget, which
            `auto` then loads here. Without it rules choose, and the same module gives the same bundle everywhere.
        force: overwrite a bundle at `out`; the old one stays whole until the new one is.
        cache: take TensorRT plans, reference outputs and what was measured from an earlier deploy of the same model on
            this machine, and keep them for the next one (:mod:`attnforge.cache`).
        source: the manifest's record of how to make the module again; by default its class or file.
        cache_tokens: make a step of a decoder of a causal model that takes `(batch, tokens, …)` alone: the bundle's
            graphs take the next tokens and a cache of this many keys and values for every attention site
            (:mod:`attnforge.export.decoding.insert`). A session still answers for whole sequences, and
            :meth:`~attnforge.runtime.session.Session.decoder` step by step.
        cache_precision: `int8`: caches hold keys and values in 8 bits, a quarter of the bytes, by ranges of `data`,
            and are refused where that costs more than `max_error` or `metric` and `least` allow. By default caches
            are as keys and values are.
        tokenizer: a file of the `tokenizers` library, `tokenizer.json`, which the bundle keeps for `attnforge
            generate`.
        stop: ids behind which a text ends.
        max_eager_error: relative error of eager itself on ordinary inputs beyond which nothing is proved, and the
            deploy refused; by default 0.1.
        keep_wrong: write the bundle though no backend computes what the model does, or though that is not proved, so
            that it can be diagnosed. `load` then refuses `auto`.
        trust_source: of a `.pt2` file, whether you trust its maker as you would a program's, for torch may run code
            while it reads one; without, none is read.

    Raises:
        UntrustedError: a `.pt2` file without `trust_source`.
        UsageError: an argument that cannot be meant, `out` exists, or a file that is no model.
        CaptureError: torch cannot export the module so.
        UnavailableError: a target that was asked for cannot be built here, or there is too little memory.
        BundleError: the disk is full.
        BuildError: a builder refused.
        UnfusedError: a target of `require_fused` leaves a site unfused, or the model has no site.
        WrongError: no backend computes what the model does on ordinary inputs, or eager is so far off float64 there
            that nothing is proved; says which tensor is the first to be wrong, and why.
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
            give_back()  # all that the steps held, before every backend holds the weights
            reuse.measured(manifest, partial(measure, folder, manifest, stages.begin(MEASURING)))
        if manifest.wrong is None:
            manifest.wrong = _kept(check(folder, manifest, stages.begin(CHECKING)), manifest.name, options)
        manifest.reused = list(dict.fromkeys(reuse.reused))
        _write_manifest(folder, manifest, stages, only_new=True)
    return Bundle(out, trusted=False)  # made here just now


def _kept(wrong: Wrong | None, name: str, options: DeployOptions) -> Wrong | None:
    """What is wrong with a bundle that is to be kept all the same.

    Raises:
        WrongError: it is not.
    """
    if wrong is not None and not options.keep_wrong:
        raise WrongError(
            f"{name} was not deployed: {wrong.text()}; to write the bundle anyway, for attnforge diagnose, say "
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
    """The steps from a model to all files of its bundle in `folder`, and the manifest of what was made."""
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
            scales = {one.site.name: (one.key, one.value) for one in rounded}
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
        if reference is source:  # else the canonical graph has other weights, which the plain one cannot share
            shelf.save_beside(plain, PLAIN, model, CANONICAL)
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
            scores_in_int8={one.name: one.scales for one in scores},
        )
        begun = {target: begin(target, job, selection, stages.begin(_lowering(target))) for target in selection.chosen}
        give_back()
        alone = attention if quantised is None else None  # errs by far less than quantised products
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
                    quantised.kept |= {one.name: why for one in scores}
                    job = replace(job, scores_in_int8={})
            beside = own_graph(job, built, lowering)
            built |= {OPENVINO: beside} if beside is not None else {}
            if quantised is not None and beside is not None:
                in_int8 = {site.site for site in beside.lowered if site.form == INT8_FORM}
                quantised.scores = {one.name: one.error for one in scores if one.name in in_int8}
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
"""The stage in which nothing but TensorRT's builders is at work; they began as soon as their models were saved."""


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
    """Write the manifest with what every stage took so far."""
    manifest.seconds, manifest.memory = stages.seconds(), stages.memory()
    write_manifest(folder, manifest, only_new=only_new)


def _name_of(origin: Source) -> str:
    """The name of a model that the caller did not name: its file's, or its class's."""
    return origin.name.rpartition(".")[2] if origin.kind == "module" else Path(origin.name).stem
