"""A model on its way into a bundle, and the stages that it passes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from attnforge.bundle import (
    CANONICAL,
    FLAVOURS,
    OPENVINO,
    PLAIN,
    PROCESSOR,
    TOKENIZER,
    Case,
    Decoding,
    Manifest,
    Mixed,
    Quantised,
    Source,
    Wrong,
    graph_tensors,
)
from attnforge.certificate import SiteMask
from attnforge.errors import BuildError
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.attention.roles import note_roles
from attnforge.export.certificate import certify, check_fused, masks_of
from attnforge.export.decoding.insert import one_token, with_cache
from attnforge.export.diagnosis.departure import departure
from attnforge.export.expected_caches import ExpectedCaches
from attnforge.export.graphs.saving import Shelf, bytes_of_weights
from attnforge.export.lowering.openvino import INT8_FORM
from attnforge.export.measuring import SECONDS
from attnforge.export.options import DeployOptions
from attnforge.export.precision.gate import choose_forms
from attnforge.export.precision.mixed import choose
from attnforge.export.precision.rounding import RoundedOperands, why_over_budget
from attnforge.export.reference import Data, ReferenceModel, write_reference
from attnforge.export.reuse import Reuse
from attnforge.export.room import MemoryNeeds
from attnforge.export.sources.onnx_file import Imported
from attnforge.export.sources.source import Model, open_source
from attnforge.export.sources.torch_module import Captured, DynamicShapes
from attnforge.export.targets.openvino import own_graph
from attnforge.export.targets.registry import TARGETS, Selection
from attnforge.export.targets.target import Built, Finish, Job
from attnforge.export.tensorrt.build import Builders, profiles_of
from attnforge.machine import tool_versions
from attnforge.memory import give_back
from attnforge.precision import Precision
from attnforge.progress import Progress, Stages, Steps
from attnforge.runtime.cases import WHOLE_CACHE, sizes_at

SMALL = 32 * 2**20
"""Bytes of weights up to which the memory of an export is not collected before the reference is computed: searching all
of torch's objects takes half a second, as long as the other stages of a small model."""


@dataclass
class Deployment:
    """A model on its way into a bundle: what was asked for, and what the stages have made so far.

    The attributes are in the order of :data:`STAGES`. Each stage reads those of earlier ones, and sets or replaces its
    own.

    Attributes:
        module: the model, as the caller gave it.
        args: example inputs, if there are any.
        dynamic_shapes: dynamic dims and their ranges.
        options: the options of the deploy.
        selection: the targets to build.
        out: the final folder of the bundle.
        folder: the folder that the bundle is written in until it is complete.
        reuse: takes what an earlier deploy made from the cache.
        builders: run TensorRT's builders alongside this process.
        source: the exported module, or the imported graph.
        origin: the manifest's record of it.
        wrong: why the bundle is wrong although it is written; None if it is not.
        attention: precision of attention alone in TensorRT's plans; None for the bundle's own.
        data: real inputs and labels.
        model: the graph that targets lower: canonical, then in the chosen precisions, then with caches.
        plain: the graph as it was exported.
        sites: the attention sites.
        other_softmaxes: by module, why a softmax is no attention.
        masks: what the mask of each site hides.
        reference: what the deployed model is checked against.
        mixed: the record of precisions that were chosen.
        quantised: the record of quantised products and caches.
        caches: the sites whose keys and values are rounded to int8.
        scores: the sites whose queries and keys OpenVINO may round to int8.
        whole: the graph without caches.
        decoding: the record of the decoder step; None without caches.
        expected: computes the expected contents of caches.
        job: what targets are built from.
        begun: for each target what waits for it.
        refused: the builder's message for each target that it refused.
        cases: the reference cases.
        built: the targets that were built, by name.
    """

    module: Model
    args: Sequence[Any] | None
    dynamic_shapes: DynamicShapes
    options: DeployOptions
    selection: Selection
    out: Path
    folder: Path
    reuse: Reuse
    builders: Builders
    source: Captured | Imported = field(init=False)
    origin: Source = field(init=False)
    wrong: Wrong | None = None
    attention: Precision | None = None
    data: Data = field(init=False)
    model: ir.Model = field(init=False)
    plain: ir.Model = field(init=False)
    sites: list[Site] = field(init=False)
    other_softmaxes: Mapping[str, str] = field(init=False)
    masks: Mapping[str, SiteMask] = field(init=False)
    reference: ReferenceModel = field(init=False)
    mixed: Mixed | None = None
    quantised: Quantised | None = None
    caches: Sequence[RoundedOperands] = ()
    scores: Sequence[RoundedOperands] = ()
    whole: ir.Model = field(init=False)
    decoding: Decoding | None = None
    expected: ExpectedCaches | None = None
    job: Job = field(init=False)
    begun: dict[str, Finish] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    cases: list[Case] = field(init=False)
    built: dict[str, Built] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the deployed model: by default its class's, or its file's."""
        is_class = self.origin.kind == "module"
        return self.options.name or (self.origin.name.rpartition(".")[2] if is_class else Path(self.origin.name).stem)

    @property
    def keeps_weights(self) -> bool:
        """Whether the bundle's weights are those of the source, neither rounded nor quantised."""
        return self.reference is self.source

    @property
    def has_plans(self) -> bool:
        """Whether a plan of TensorRT is built."""
        return not set(FLAVOURS).isdisjoint(self.selection.chosen)

    def manifest(self) -> Manifest:
        """Return the bundle's manifest, with the certificate of its attention.

        Raises:
            UnfusedError: a target that must run every site fused does not.
        """
        certificate = certify(self.sites, self.built, self.masks, self.other_softmaxes)
        check_fused(self.options.require_fused, certificate)
        return Manifest(
            name=self.name,
            precision=self.reference.precision.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tools=tool_versions(),
            source=self.options.source or self.origin,
            inputs=self.source.inputs,
            outputs=self.source.outputs,
            reference=self.reference.reference,
            attention=certificate,
            targets={target: result.record for target, result in self.built.items()},
            skipped={**self.selection.skipped, **self.refused},
            cases=self.cases,
            mixed=self.mixed,
            quantised=self.quantised,
            decoding=self.decoding,
            metric=self.options.metric,
            least=self.options.least,
            max_eager_error=self.options.max_eager_error,
            wrong=self.wrong,
            children={name: child for result in self.built.values() for name, child in result.children.items()},
        )


@dataclass(frozen=True)
class Stage:
    """One step of a deployment.

    Attributes:
        name: its name for progress, and in the manifest's times; None to count it as part of the stage before.
        run: does its work; receives the steps' progress.
        applies: whether a deployment has this stage. Only what was asked for may decide.
    """

    name: str | None
    run: Callable[[Deployment, Progress], None]
    applies: Callable[[Deployment], bool] = lambda deployment: True


def names_of(deployment: Deployment) -> Iterator[str]:
    """Yield the names of a deployment's stages, in order."""
    for stage in STAGES:
        if stage.name is not None and stage.applies(deployment):
            yield stage.name


def run_stages(deployment: Deployment, stages: Stages) -> None:
    """Run the stages of a deployment, from its model to all files of its bundle but the manifest."""
    for stage in STAGES:
        if stage.applies(deployment):
            stage.run(deployment, stages.progress if stage.name is None else stages.begin(stage.name))


# --- the stages -------------------------------------------------------------------------------------------------------


def _export(d: Deployment, progress: Progress) -> None:
    options = d.options
    d.source, d.origin = open_source(d.module, d.args, d.dynamic_shapes, options.source_precision, options.trust_source)
    d.wrong = options.allow(departure(d.source) if isinstance(d.source, Captured) else None, d.name)
    d.attention = options.attention_at(d.source.precision, d.selection.chosen)
    d.data = options.real_data(d.source.inputs)
    profiles_of(d.source.inputs, options.profiles)  # refuses profiles before anything is built


def _canonicalize(d: Deployment, progress: Progress) -> None:
    d.model, d.plain, d.reference = d.source.model, d.source.model.clone(), d.source
    unexported = (d.source.without_effect, d.source.lost) if isinstance(d.source, Captured) else ()
    canonical = canonicalize(d.model, *unexported)
    d.sites, d.other_softmaxes = canonical.sites, canonical.other_softmaxes
    d.masks = masks_of(d.model, d.sites, d.source.inputs)
    note_roles(d.model.graph, d.source.inputs, negative=isinstance(d.source, Imported))
    largest = sizes_at(d.source.inputs, "max")
    MemoryNeeds(d.model, d.source.precision, d.selection.chosen, d.options.tune, largest).check()


def _choose_precisions(d: Deployment, progress: Progress) -> None:
    chosen = choose(d.model, d.sites, d.source, d.options, d.data, progress)
    d.model, d.reference, d.mixed = chosen.model, chosen.reference, chosen.mixed


def _quantise(d: Deployment, progress: Progress) -> None:
    forms = choose_forms(d.model, d.sites, d.source, d.options, d.data, progress)
    d.model, d.reference, d.quantised = forms.model, forms.reference, forms.record
    d.caches, d.scores = forms.caches, forms.scores


def _insert_caches(d: Deployment, progress: Progress) -> None:
    options, capacity = d.options, d.options.cache_tokens
    assert capacity is not None
    d.whole, d.model = d.model, d.model.clone()  # the reference may be the graph itself
    d.decoding = decoding = with_cache(d.model, d.sites, d.source.inputs, d.source.outputs, capacity)
    decoding.stop = list(options.stop)
    names = [spec.name for spec in decoding.tensors]
    scales = {cache.site.name: cache.scales for cache in d.caches}
    stored = {
        spec.name: np.asarray(scale)
        for cache in decoding.caches
        if cache.site in scales
        for spec, scale in zip((cache.key, cache.value), scales[cache.site].values(), strict=True)
    }
    d.expected = ExpectedCaches(decoding.places, names, d.whole, d.source.model, d.sites, stored)
    decoding.tokenizer = TOKENIZER if options.tokenizer is not None else None
    decoding.cuda = not stored


def _save(d: Deployment, progress: Progress) -> None:
    """Save the graphs that every bundle has, keep the model's files, and describe what targets are built from."""
    for file, name in ((d.options.tokenizer, TOKENIZER), (d.options.processor, PROCESSOR)):
        if file is not None:
            shutil.copyfile(file, d.folder / name)
    shelf = Shelf(d.folder)
    shelf.save(d.model, CANONICAL)
    if d.keeps_weights:  # otherwise the canonical graph has other weights, which the plain one cannot share
        shelf.save_sharing(d.plain, PLAIN, d.model, CANONICAL)
    if isinstance(d.source, Imported):
        shelf.share(d.source.original)
    taken, _ = graph_tensors(d.source.inputs, d.source.outputs, d.decoding)
    d.job = Job(
        out=d.out,
        folder=d.folder,
        shelf=shelf,
        reuse=d.reuse,
        builders=d.builders,
        model=d.model,
        sites=d.sites,
        inputs=taken,
        precision=d.reference.precision,
        attention=d.attention,
        measuring=SECONDS / 2 if d.options.tune else 0.0,
        compute_capabilities=d.options.built_for,
        profiles=[*d.options.profiles, *([] if d.decoding is None else [one_token(taken)])],
        not_in_fp8=d.quantised.kept if d.quantised is not None and d.quantised.type == "fp8" else {},
        scores_in_int8={score.name: tuple(map(float, score.scales.values())) for score in d.scores},
    )


def _lower(d: Deployment, progress: Progress, target: str) -> None:
    """Lower a target, and let its builder work alongside this process."""
    with _refusable(d, target):
        d.begun[target] = TARGETS[target](d.job, progress)


@contextmanager
def _refusable(d: Deployment, target: str) -> Iterator[None]:
    """Note the message of a builder that refuses a target, unless that must be built.

    Raises:
        BuildError: the builder refused a target that must be built.
    """
    try:
        yield
    except BuildError as error:
        if target in d.selection.named:
            raise
        d.refused[target] = str(error)


def _compute_reference(d: Deployment, progress: Progress) -> None:
    if bytes_of_weights(d.model) > SMALL:
        give_back()
    alone = d.attention if d.quantised is None else None  # its error is far below that of quantised products
    whole = d.model if d.decoding is None else d.whole
    make = partial(write_reference, d.folder, d.reference, whole, alone, d.data, progress, d.expected)
    has_caches = d.expected is not None
    d.cases = d.reuse.reference(d.source, d.attention, d.data, make, has_caches) if d.keeps_weights else make()
    if d.decoding is not None:
        d.decoding.cases = [case for case in d.cases if case.name == WHOLE_CACHE]
        d.cases = [case for case in d.cases if case.name != WHOLE_CACHE]


def _finish(d: Deployment, progress: Progress) -> None:
    steps = Steps(progress)
    for target, wait in d.begun.items():
        with _refusable(d, target):
            d.built[target] = wait(steps)


def _lower_for_openvino(d: Deployment, progress: Progress) -> None:
    quantised, scores = d.quantised, d.scores
    if quantised is not None and scores:
        why = why_over_budget(d.folder, d.model, d.sites, scores, d.source.inputs, d.cases)
        if why is not None:
            quantised.kept |= {score.name: why for score in scores}
            d.job = replace(d.job, scores_in_int8={})
    built = own_graph(d.job, d.built, progress)
    if built is None:
        return
    d.built[OPENVINO] = built
    if quantised is not None:
        in_int8 = {site.site for site in built.lowered if site.form == INT8_FORM}
        quantised.scores = {score.name: score.error for score in scores if score.name in in_int8}


def _lowering(target: str) -> Stage:
    name = f"lower for {target}" if target in FLAVOURS else f"lower and build for {target}"
    return Stage(name, partial(_lower, target=target), lambda d: target in d.selection.chosen)


STAGES: Sequence[Stage] = (
    Stage("export", _export),
    Stage("canonicalize", _canonicalize),
    Stage("choose precisions", _choose_precisions, lambda d: bool(d.options.automatic)),
    Stage("quantise", _quantise, lambda d: d.options.is_quantised),
    Stage(None, _insert_caches, lambda d: d.options.cache_tokens is not None),
    Stage(None, _save),
    *map(_lowering, TARGETS),
    Stage("reference", _compute_reference),
    Stage("wait for TensorRT's plans", _finish, lambda d: d.has_plans),
    Stage(None, _finish, lambda d: not d.has_plans),
    Stage(f"lower for {OPENVINO}", _lower_for_openvino, lambda d: d.options.cache_tokens is None),
)
"""All stages, in order. TensorRT's builders start as soon as their graphs are saved, and work in processes of their own
while the reference is computed."""
