"""The way through the house: module, exported program or ONNX file → graph → canonical graph → each target's form →
bundle."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import torch
from torch import nn
from torch.export import ExportedProgram

from attnforge import bundle as b
from attnforge import cache
from attnforge.arrays import is_floating, to_numpy
from attnforge.errors import BuildError, UnavailableError, UnfusedError, UnknownNameError, UsageError
from attnforge.export.attention.canonicalize import Site, canonicalize
from attnforge.export.graphs.saving import LIMIT, SHELVED, Shelf, save_beside
from attnforge.export.lowering import onnxruntime as for_onnxruntime
from attnforge.export.lowering import tensorrt as for_tensorrt
from attnforge.export.lowering.attention import Lowered
from attnforge.export.lowering.tuning import Tuner
from attnforge.export.precision.search import AUTOMATIC, Budget, choose
from attnforge.export.reference import Data, Expected, write_reference
from attnforge.export.sources.exported_program import load_program, open_program
from attnforge.export.sources.onnx_file import Imported, import_graph
from attnforge.export.sources.torch_module import Captured, DynamicShapes, capture
from attnforge.export.tensorrt import build as engine
from attnforge.machine import compute_capability, device_name, tool_versions
from attnforge.precision import PRECISIONS, Precision, precision_named
from attnforge.progress import Listener, Progress, Stages
from attnforge.runtime import cases as reference
from attnforge.runtime.inputs import by_name
from attnforge.runtime.parity.metrics import Scores, metric_named

TARGETS = ("onnxruntime", "tensorrt", "tensorrt_rtx")
Model = nn.Module | ExportedProgram | str | os.PathLike[str]


def deploy(
    module: Model,
    args: Sequence[Any] | None,
    out: str | os.PathLike[str],
    dynamic_shapes: DynamicShapes = None,
    precision: str | None = None,
    targets: Sequence[str] | None = None,
    name: str | None = None,
    *,
    compute_capabilities: Sequence[str] = (),
    profiles: Sequence[Mapping[str, b.Range]] = (),
    attention_precision: str | None = None,
    require_fused: Sequence[str] = (),
    data: Sequence[Sequence[Any]] = (),
    labels: Sequence[Any] = (),
    metric: str | None = None,
    least: float | None = None,
    max_error: float | None = None,
    tune: bool = True,
    force: bool = False,
    one_file_limit: int = SHELVED,
    source: b.Source | None = None,
    progress: Listener = None,
) -> b.Bundle:
    """Export `module` as it computes in eval mode, lower it for every target, and write a bundle to `out`.

    Args:
        module: takes tensors by position and returns a tensor or a tuple, list or dict of them; or an
            exported program, or the path of an `.onnx` or `.pt2` file. It is not touched.
        args: example inputs. A program has its own, so None; an ONNX graph is given random ones where this is None.
        out: folder to write.
        dynamic_shapes: of a module, `torch.export`'s own; every Dim needs a `max`. Min, example and max become
            TensorRT's profile. Of a graph, `{dim: (min, opt, max)}` for every dynamic dim of its inputs; of a
            program, for those without a bound or that are to have another.
        precision: `fp32`, `tf32`, `fp16` or `bf16`; by default fp32, and of a graph or program its own. `auto` (or
            `auto-fp16`, `auto-bf16`) chooses: 16 bits, and fp32 for the operators that need it, with inputs and outputs
            in fp32; what stayed fp32, and why, is in the manifest.
        targets: of `onnxruntime`, `tensorrt`, `tensorrt_rtx`; by default every one that can be built on this machine. A
            builder that refuses one which was asked for by name is an error, else the manifest says why it is missing.
        name: of the deployed model; by default the class's.
        compute_capabilities: that the TensorRT-RTX plan is for, such as `("SM89",)`; by default portable from SM80.
        profiles: further optimization profiles of TensorRT's plans, each (min, opt, max) of some dims; a session runs
            the one whose opt is nearest. By default one, over all that the dynamic shapes allow.
        attention_precision: `fp16` or `bf16`, for fp32 and tf32: TensorRT, which has no fused kernel for fp32, computes
            attention alone in it, between casts. All else stays as it is, ONNX Runtime's model too.
        require_fused: targets that must run every attention site as one fused kernel; where one does not, nothing is
            written.
        data: real inputs, each as `args` are, of any sizes that the dynamic shapes allow: cases to be verified too.
            They and their outputs are kept in the bundle.
        labels: of each of `data`, what is right for its samples.
        metric: what the task is measured by on `data`, `accuracy` or `cosine`, whenever the bundle is verified.
        least: what the metric must reach; by default it may fall short of float64's twice as far as eager does.
        max_error: for `auto`, the relative error that is allowed on ordinary inputs; by default twice that of eager at
            fp16, and no more than 1e-2. Where a metric is given and this is not, the metric is what has to be met.
        tune: measure on this machine, for some seconds each, which form of each site ONNX Runtime runs fastest on its
            CPU, with which settings of its session, and which backend is fastest within the parity budget, which
            `auto` then loads here. Without it rules choose, and the same module gives the same bundle everywhere.
        force: overwrite a bundle at `out`; the old one stays whole until the new one is.
        one_file_limit: bytes of weights above which they stand in a file of their own, which the bundle's graphs share;
            at most what an ONNX file can hold, 2 GiB. That loads faster than weights inside a graph.
        source: where the module came from, for those who want to make it again.
        progress: hears of every stage as it begins, by its name, and a :class:`attnforge.progress.Progress` of every
            step within it too.

    Raises:
        UsageError: an argument that cannot be meant, `out` exists, or a file that is no model.
        CaptureError: torch cannot export the module so.
        UnavailableError: a target that was asked for cannot be built here.
        BuildError: a builder refused.
        UnfusedError: a target of `require_fused` leaves a site unfused, or the model has no site.
    """
    automatic = _automatic(precision, max_error, attention_precision)
    chosen, skipped = choose_targets(targets)
    _check_required(require_fused, chosen, skipped)
    building = {target: f"lower and build for {target}" for target in chosen}
    stages = Stages(
        progress,
        [
            *("export", "canonicalize", *(["choose precisions"] if automatic else []), *building.values(), "reference"),
            *(["measure backends"] if tune else []),
        ],
    )
    with b.writing(out, force) as folder:
        shelf = Shelf(folder, min(one_file_limit, LIMIT))
        stages.begin("export")
        captured, origin = _captured(module, args, dynamic_shapes, "fp32" if automatic else precision)
        p = captured.precision
        attention = _attention_precision(attention_precision, p, chosen)
        real = _data(captured.inputs, data, labels, metric)
        stages.begin("canonicalize")
        plain = captured.model.clone()
        sites = canonicalize(captured.model).sites
        source_of_truth: Expected = captured
        mixed = None
        if automatic:
            budget = Budget(max_error, partial(_scores, metric, real, least) if metric is not None else None)
            steps = stages.begin("choose precisions")
            found = choose(captured.model, sites, captured, automatic, budget, real, steps)
            source_of_truth, mixed = found.source, found.mixed
            captured = replace(captured, model=found.model, precision=found.source.precision)
            p = captured.precision
        shelf.save(captured.model, b.CANONICAL)
        if mixed is None:  # its weights are others than the canonical graph's
            save_beside(plain, folder / b.PLAIN, captured.model)
        engine.profiles_of(captured.inputs, profiles)  # refused before anything is built
        built = _Built(folder, shelf, captured, sites)
        for target in chosen:
            stages.begin(building[target])
            if target == "onnxruntime":
                _for_onnxruntime(built, tune)
                continue
            try:
                timings = _timing_cache(out) if target == "tensorrt" else None
                _for_tensorrt(built, target, compute_capabilities, profiles, timings, attention)
            except BuildError as error:
                if targets is not None or target in require_fused:
                    raise
                built.refused[target] = str(error)
        certificate = certify(built)
        _hold_to(require_fused, certificate)
        cases = write_reference(folder, source_of_truth, attention, real, stages.begin("reference"))
        manifest = b.Manifest(
            name=name or (Path(origin.name).stem if origin.kind != "module" else origin.name.rpartition(".")[2]),
            precision=p.name,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            tools=tool_versions(),
            source=source or origin,
            inputs=captured.inputs,
            outputs=captured.outputs,
            reference=source_of_truth.reference,
            attention=certificate,
            targets=built.records,
            skipped={**skipped, **built.refused},
            cases=cases,
            mixed=mixed,
            metric=metric,
            least=least,
        )
        manifest.seconds = stages.seconds()
        b.write_manifest(folder, manifest)
        if tune:
            _measure_backends(folder, manifest, stages.begin("measure backends"))
            manifest.seconds = stages.seconds()
            b.write_manifest(folder, manifest, only_new=True)
    return b.Bundle(out)


def _measure_backends(folder: Path, manifest: b.Manifest, progress: Progress) -> None:
    """Find how ONNX Runtime's session runs the model fastest here, and then which backend does."""
    from attnforge.runtime.choose import choose_backend, tune_session

    if "onnxruntime" in manifest.targets:
        with suppress(Exception):  # what ONNX Runtime does not run is seen when it is verified
            manifest.targets["onnxruntime"].session = tune_session(b.Bundle(folder, lazily=True))
        b.write_manifest(folder, manifest, only_new=True)
    manifest.choice = choose_backend(b.Bundle(folder, lazily=True), progress=progress)


def _captured(
    model: Model, args: Sequence[Any] | None, dynamic_shapes: Any, precision: str | None
) -> tuple[Captured | Imported, b.Source]:
    """The graph of a model of any kind, and where it came from."""
    if isinstance(model, str | os.PathLike):
        file = Path(model)
        if file.suffix == ".onnx":
            origin = b.Source(kind="onnx", name=str(file), options=_recorded(dynamic_shapes))
            return import_graph(file, dynamic_shapes, precision, args), origin
        if file.suffix != ".pt2":
            raise UsageError(f"{str(file)!r} is no .onnx or .pt2 file; give one, or a torch.nn.Module")
        origin, model = b.Source(kind="program", name=str(file), options=_recorded(dynamic_shapes)), load_program(file)
    else:
        origin = b.Source(kind="module", name=f"{type(model).__module__}.{type(model).__qualname__}")
    if isinstance(model, ExportedProgram):
        opened = open_program(model, dynamic_shapes)
        model, dynamic_shapes = opened.module, opened.dynamic_shapes
        args, precision = opened.args if args is None else args, precision or opened.precision
    if args is None:
        raise UsageError(f"no example inputs were given; {type(model).__name__} needs them to be exported")
    return capture(model, args, dynamic_shapes, precision_named(precision or "fp32")), origin


def _automatic(precision: str | None, max_error: float | None, attention: str | None) -> tuple[str, ...]:
    """The 16-bit precisions to choose from, where precisions are to be chosen.

    Raises:
        UnknownNameError: no such precision.
        UsageError: an error that cannot be allowed, or one without a choice.
    """
    if precision is not None and precision not in AUTOMATIC and precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, (*PRECISIONS, *AUTOMATIC))
    if max_error is not None:
        if precision not in AUTOMATIC:
            raise UsageError(f"a largest error of {max_error:g} is for precision auto, not {precision or 'fp32'}")
        if not 0 < max_error < 1:
            raise UsageError(f"the largest error is {max_error:g}; give a relative one, between 0 and 1")
    if attention is not None and precision in AUTOMATIC:
        raise UsageError("attention is given a precision of its own, and precision auto chooses it; leave one out")
    return AUTOMATIC.get(precision or "", ())


def _scores(metric: str, data: Data, least: float | None) -> Scores:
    labels = {f"data-{i}": data.labels[i] if data.labels else None for i in range(len(data.inputs))}
    return Scores(metric, metric_named(metric, bool(data.labels)), labels, least)


def _data(inputs: list[b.TensorSpec], data: Sequence[Sequence[Any]], labels: Sequence[Any], metric: str | None) -> Data:
    """Real inputs by name, in the dtypes of the model.

    Raises:
        UsageError: labels that are not one for each, or a metric without what it needs.
        InputError: inputs that the model does not take.
    """
    if labels and len(labels) != len(data):
        raise UsageError(f"{len(labels)} labels were given for {len(data)} inputs; give one for each")
    if metric is not None:
        if not data:
            raise UsageError(f"{metric} is measured on real inputs; give some as data")
        metric_named(metric, bool(labels))
    made = [
        {
            spec.name: array.astype(spec.dtype) if is_floating(array) else array
            for spec, array in ((spec, to_numpy(spec.name, value)) for spec, value in zip(inputs, one, strict=True))
        }
        for one in ([by_name(inputs, values).values() for values in data])
    ]
    return Data(made, [np.asarray(to_numpy("labels", one)) for one in labels])


def _recorded(ranges: Mapping[str, tuple[int, int, int]] | None) -> dict[str, str | int | float | bool]:
    return {name: ":".join(map(str, bounds)) for name, bounds in (ranges or {}).items()}


def choose_targets(targets: Sequence[str] | None) -> tuple[list[str], dict[str, str]]:
    """The targets to build, and why any other is not.

    Raises:
        UnknownNameError: a target that does not exist.
        UnavailableError: one that was asked for by name and cannot be built here.
    """
    for target in targets or ():
        if target not in TARGETS:
            raise UnknownNameError("target", target, TARGETS)
    if targets is not None and not targets:
        raise UsageError(
            f"no target was given; name some of {', '.join(TARGETS)}, or none to build all that can be built here"
        )
    chosen, skipped = [], {}
    for target in TARGETS:
        if targets is not None and target not in targets:
            continue
        if (reason := why_not_buildable(target)) is None:
            chosen.append(target)
        elif targets is not None:
            raise UnavailableError(reason)
        else:
            skipped[target] = reason
    return chosen, skipped


def _check_required(required: Sequence[str], chosen: list[str], skipped: Mapping[str, str]) -> None:
    """That every target which must fuse is one that will be built."""
    for target in required:
        if target not in TARGETS:
            raise UnknownNameError("target", target, TARGETS)
        if target in skipped:
            raise UnavailableError(skipped[target])
        if target not in chosen:
            raise UsageError(
                f"{target} is to run attention fused but is not among the targets to build ({', '.join(chosen)}); "
                f"add it to the targets, or do not require it"
            )


def _attention_precision(name: str | None, precision: Precision, chosen: list[str]) -> Precision | None:
    """The precision of attention alone that was asked for, if that can be meant."""
    if name is None:
        return None
    known = [p.name for p in PRECISIONS.values() if p.is_low]
    if name not in known:
        raise UnknownNameError("attention precision", name, known)
    if precision.is_low:
        raise UsageError(
            f"attention is to be {name} in a bundle that is {precision.name} throughout; leave the attention precision "
            "out, or deploy in fp32 or tf32"
        )
    if not set(chosen) & set(b.FLAVOURS):
        raise UsageError(
            f"attention is to be {name} for TensorRT, and only {', '.join(chosen)} is built; add a target "
            f"({', '.join(b.FLAVOURS)}), or leave the attention precision out"
        )
    return PRECISIONS[name]


def _hold_to(required: Sequence[str], certificate: b.Certificate) -> None:
    """That every target which must fuse does, at every site."""
    if required and certificate.sites == 0:
        raise UnfusedError(
            "no attention site was found in this model, so none can be required to be fused", certificate
        )
    for target in required:
        if (fused := certificate.fused[target]) < certificate.sites:
            missing = certificate.sites - fused
            raise UnfusedError(
                f"{target} does not fuse {missing} of {certificate.sites} attention sites, which was required; nothing "
                "was written. Change what the reasons name, or deploy without requiring it",
                certificate,
            )


def why_not_buildable(target: str) -> str | None:
    """Why `target` cannot be built on this machine, or None."""
    if target == "onnxruntime":
        return None
    try:
        engine.load_tensorrt(target)
    except UnavailableError as error:
        return str(error)
    if target == "tensorrt" and not torch.cuda.is_available():
        return "tensorrt builds for the GPU at hand and there is no CUDA device; tensorrt_rtx builds without one"
    return None


@dataclass
class _Built:
    """What the targets are made of and where; what came of them: their records, the forms they were lowered to, their
    plans, and what was refused."""

    folder: Path
    shelf: Shelf
    captured: Captured | Imported
    sites: list[Site]
    records: dict[str, b.TargetRecord] = field(default_factory=dict)
    lowered: dict[str, list[Lowered]] = field(default_factory=dict)
    plans: dict[str, engine.Plan] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def _for_onnxruntime(built: _Built, tune: bool) -> None:
    captured, sites = built.captured, built.sites
    sizes = reference.cases(captured.inputs)[0].sizes
    model = captured.model.clone()
    tuner = Tuner(sizes) if tune else None
    largest = {
        dim.symbol: (dim.max or 0) // dim.factor
        for spec in captured.inputs
        for dim in spec.dims
        if isinstance(dim, b.DimSpec)
    }
    built.lowered["onnxruntime"] = for_onnxruntime.lower(model, sites, sizes, tuner=tuner, largest=largest).sites
    record = built.records["onnxruntime"] = b.TargetRecord(model=built.shelf.save(model, "onnxruntime/model.onnx"))
    if tuner is not None and tuner.spent:
        seconds = round(tuner.spent, 3)
        record.tuning = b.Tuning(processors=os.cpu_count() or 1, sizes=sizes, seconds=seconds)
    if captured.precision.is_low:
        model = captured.model.clone()
        for_onnxruntime.lower(model, sites, sizes, device="cuda")
        record.cuda_model = built.shelf.save(model, "onnxruntime/model.cuda.onnx")


def _timing_cache(out: str | os.PathLike[str]) -> Path:
    """Where TensorRT keeps what it timed on this machine's first GPU, for which it builds."""
    return cache.timing_cache_file(Path(out), engine.load_tensorrt("tensorrt").__version__, device_name(0))


def _for_tensorrt(
    built: _Built,
    flavour: str,
    compute_capabilities: Sequence[str],
    profiles: Sequence[Mapping[str, b.Range]],
    timings: Path | None,
    attention: Precision | None,
) -> None:
    folder, captured = built.folder, built.captured
    capabilities = tuple(compute_capabilities) if flavour == "tensorrt_rtx" else ()
    record = b.TargetRecord(model="", attention_precision=attention.name if attention else None)

    def lower_and_build(dtype: ir.DataType | None) -> tuple[list[Lowered], engine.Plan]:
        model = captured.model.clone()
        lowered = for_tensorrt.lower(model, built.sites, dtype).sites
        record.model = built.shelf.save(model, "tensorrt/model.onnx")
        plan = engine.build(
            folder / record.model, flavour, captured.inputs, captured.precision.name, capabilities, profiles, timings
        )
        return lowered, plan

    if attention is not None:
        _, plain = lower_and_build(None)
        record.without = b.PlainPlan(
            layers=len(plain.layers), size=len(plain.data), activation_memory=plain.activation_memory
        )
    lowered, plan = lower_and_build(ir.DataType.from_numpy(attention.dtype) if attention is not None else None)
    file = f"tensorrt/engine.{flavour}.plan"
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(plan.data)
    built_for = ["CURRENT" if flavour == "tensorrt" else name for name in (capabilities or [b.PORTABLE])]
    record.engines = [plan.record(file, flavour, [compute_capability(0) if c == "CURRENT" else c for c in built_for])]
    built.records[flavour], built.lowered[flavour], built.plans[flavour] = record, lowered, plan


# --- the certificate --------------------------------------------------------------------------------------------------


def certify(built: _Built) -> b.Certificate:
    """What became of every site, counted in what each backend compiled."""
    details, unfused = [], []
    sites, lowered, plans = built.sites, built.lowered, built.plans
    model = built.records["onnxruntime"].model if "onnxruntime" in lowered else None
    kept = _nodes_kept_by_onnxruntime(built.folder / model) if model is not None else {}
    for site in sites:
        record = b.SiteRecord(
            site=site.name,
            written_as=site.written_as,
            canonical=site.node is not None,
            form=site.form,
            reason=site.reason,
        )
        for target, forms in lowered.items():
            form = next((one for one in forms if one.site == site.name), None)
            if form is None:
                unfused.append(b.Unfused(site=site.name, target=target, reason=site.reason or "not canonical"))
                continue
            if target == "onnxruntime":
                kernel = kept.get(form.node) if form.unfused is None else None
                otherwise = "ONNX Runtime's own optimiser took the fused node apart"
            else:
                kernel = plans[target].kernel_of(form.node)
                otherwise = plans[target].why_unfused(form.node)
            reason = None if kernel else form.unfused or otherwise
            record.targets[target] = b.SiteTarget(
                form=form.form,
                why=form.why,
                kernel=kernel,
                reason=reason,
                measured=dict(form.measured),
                dropped=dict(form.dropped),
            )
            if reason is not None:
                unfused.append(b.Unfused(site=site.name, target=target, reason=reason))
        details.append(record)
    return b.Certificate(
        sites=len(sites),
        canonical=sum(record.canonical for record in details),
        fused={t: sum(t in r.targets and r.targets[t].kernel is not None for r in details) for t in lowered},
        unfused=unfused,
        details=details,
    )


def _nodes_kept_by_onnxruntime(file: Path) -> dict[str, str]:
    """The operator of every node that is left after ONNX Runtime's own optimisation, by the node's name."""
    optimized = file.with_suffix(".optimized.onnx")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(optimized)
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", f"{optimized.name}.data"
    )  # without, a model of more than 2 GiB could not be written
    options.log_severity_level = 3
    try:
        ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return {
            node.name or "": f"{node.domain}::{node.op_type}".removeprefix("::") for node in ir.load(optimized).graph
        }
    except Exception as error:
        raise BuildError(f"ONNX Runtime cannot load the lowered graph: {error}") from error
    finally:
        for left in file.parent.glob(f"{optimized.name}*"):
            left.unlink()
