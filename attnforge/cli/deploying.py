"""The commands that write what is deployed: `attnforge deploy | package`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnforge.cli import printing
from attnforge.cli.options import Force, Json, Options, TrustedKeys, archives, pairs, ranges, whole_numbers
from attnforge.cli.terminal import Answer, say, say_path, stages_shown
from attnforge.errors import UnfusedError, UsageError, check_known

if TYPE_CHECKING:
    from attnforge.serving.triton.repository import PackagedModel

Texts = list[str] | None

FORMS = ("triton", "polygraphy")
"""What `attnforge package` packages for."""

FOR_BOTH = ("bundle", "form", "out_folder", "trusted", "as_json")
"""Parameters of `package` that do not apply to Triton alone."""


def deploy(
    model: Annotated[str, typer.Argument(show_default=False)],
    out_folder: Annotated[Path | None, typer.Option("--out")] = None,
    precision: str | None = None,
    target: Texts = None,
    option: Options = None,
    require_fused: Texts = None,
    force: Force = False,
    weights: Path | None = None,
    dim: Texts = None,
    random_weights: Annotated[bool, typer.Option("--random-weights")] = False,
    trust_source: Annotated[bool, typer.Option("--trust-source")] = False,
    calibrate: list[Path] | None = None,
    metric: str | None = None,
    least: float | None = None,
    max_error: float | None = None,
    data: bool = True,
    max_eager_error: float | None = None,
    keep_wrong: Annotated[bool, typer.Option("--keep-wrong")] = False,
    cache_tokens: int | None = None,
    cache_precision: str | None = None,
    tokenizer: Path | None = None,
    profile: Texts = None,
    compute_capability: Texts = None,
    attention_precision: str | None = None,
    tune: bool = True,
    cache: bool = True,
    as_json: Json = False,
) -> Answer:
    """Export a model, lower it for every target and write a bundle.

    A package.module:function callable returns `(module, args, dynamic_shapes)`. It runs with your permissions, and so
    may code in a .pt2 file, which is therefore read only with --trust-source.

    Example: `attnforge deploy vit --precision fp16 --out vit.bundle`

    Example: `attnforge deploy model.onnx --dim batch=1:4:16 --dim tokens=1:128:512 --precision auto`

    Args:
        model: A registered name, package.module:function, hf:FOLDER, or an .onnx or .pt2 file.
        out_folder: Bundle folder (default: MODEL-PRECISION).
        precision: Precision: fp32, tf32, fp16, bf16, int8, fp8, int4, auto, auto-int8, … (default: fp32 or the file's).
        target: Target: onnxruntime, tensorrt or tensorrt_rtx; repeatable (default: all that this machine can build).
        require_fused: Fail unless this target fuses every attention site; repeatable.

    Source:
        weights: Safetensors file with the model's weights.
        dim: Range of a dynamic dim of the file, as name=min:opt:max; repeatable.
        random_weights: Allow random values for weights that an hf: folder lacks.
        trust_source: Read a .pt2 file, which may run code with your permissions.

    Precision and accuracy:
        calibrate: Real inputs (and labels) to use instead of the model's: an .npz file, a picture, a folder of either,
            or a .txt file with a text on each line; repeatable.
        metric: Task metric on the real inputs: accuracy or cosine.
        least: Minimum value of the metric.
        max_error: Maximum relative error for auto and quantised precisions (auto's default: twice fp16 eager's error).
        data: Add the model's real inputs, if it has any, as reference cases.
        max_eager_error: Largest relative error of eager with which parity can still be judged (default: 0.1).
        keep_wrong: Write the bundle even if no backend computes the right result.

    Decoders:
        cache_tokens: Deploy a causal model as a decoder step with a KV cache of this many tokens.
        cache_precision: KV-cache precision: int8, with --calibrate, and --max-error or --metric.
        tokenizer: tokenizer.json to store in the bundle for generate (default: the model's own).

    TensorRT:
        profile: Additional optimization profile, as name=min:opt:max,name=…; repeatable.
        compute_capability: GPUs of the TensorRT-RTX plan: SM89, CURRENT, …; repeatable (default: portable).
        attention_precision: Precision of attention in plans of fp32, tf32 and quantised models: fp16 or bf16.

    Measuring and reuse:
        tune: Choose forms of attention, settings and the backend by timing them, not by rules.
        cache: Reuse plans, reference outputs and measurements from earlier deploys of the same model.
    """
    from attnforge.export.deploy import deploy as deploy_model

    with stages_shown(as_json) as progress:
        try:
            bundle = deploy_model(
                model, None, out_folder, ranges(dim, "--dim"), precision, target,
                model_options=pairs(option) | ({"random_weights": "true"} if random_weights else {}), weights=weights,
                own_data=data, compute_capabilities=compute_capability or (),
                profiles=[ranges(text.split(","), "--profile") for text in profile or ()],
                attention_precision=attention_precision, require_fused=require_fused or (),
                data=archives(calibrate or ()), metric=metric, least=least, max_error=max_error, tune=tune, force=force,
                cache=cache, trust_source=trust_source, cache_tokens=cache_tokens, cache_precision=cache_precision,
                tokenizer=tokenizer, max_eager_error=max_eager_error, keep_wrong=keep_wrong, progress=progress,
            )  # fmt: skip
        except UnfusedError as error:
            if not as_json:
                printing.print_sites(error.certificate)
            raise
    return Answer({"bundle": str(bundle.path), **printing.summary(bundle)}, lambda: printing.print_bundle(bundle))


def package(
    context: typer.Context,
    bundle: Annotated[list[Path], typer.Argument(show_default=False)],
    form: Annotated[str, typer.Option("--for", show_default=False)],
    out_folder: Annotated[Path, typer.Option("--out", show_default=False)],
    trusted: TrustedKeys = None,
    as_json: Json = False,
    backend: Annotated[str, typer.Option("--backend", "-b")] = "python",
    version: int | None = None,
    name: str | None = None,
    session: str = "auto",
    threads: int | None = None,
    instances: int = 1,
    kind: str = "auto",
    server_tensorrt: str | None = None,
    max_batch: int | None = None,
    preferred: str | None = None,
    max_delay: int = 0,
) -> Answer:
    """Create a Triton model repository, or a Polygraphy comparison folder.

    Triton joins requests into batches if a run here shows that samples of a batch do not affect each other. Ordinary
    reference cases become warm-up requests, so a model that is READY has run them. A Polygraphy folder contains
    inputs, float64 outputs, and a function that checks results against the parity budget.

    Example: `attnforge package vit-fp16 --for triton --out repository`

    Example: `attnforge package vit-fp16 --for polygraphy --out comparison`

    Args:
        bundle: Bundle folders.
        form: Tool to package for: triton or polygraphy.
        out_folder: Model repository, or a new folder for Polygraphy.

    Triton: the model:
        backend: Triton backend: python (a Session), onnxruntime (the model) or tensorrt (the plans).
        version: Model version, to add one to a repository (default: 1).
        name: Model name (default: NAME-PRECISION of the bundle).
        session: Backend of the Session, by name, or auto.
        threads: Threads of each CPU instance (default: one per processor).
        instances: Number of instances, each with its own weights.
        kind: Where instances run: cpu, gpu or auto.
        server_tensorrt: TensorRT version of the server, such as 10.7.

    Triton: batching:
        max_batch: Maximum batch size, 0 for no batching (default: the bundle's maximum).
        preferred: Preferred batch sizes, comma-separated (default: measured on this machine).
        max_delay: Maximum time a request may wait for others, in microseconds.
    """
    check_known("form", form, FORMS)
    if form == "polygraphy":
        for parameter in context.command.params:
            source = context.get_parameter_source(parameter.name or "")
            if parameter.name not in FOR_BOTH and source is not None and source.name == "COMMANDLINE":
                raise UsageError(f"{parameter.opts[0]} applies to triton only; leave it out for polygraphy")
        return _for_polygraphy(bundle, out_folder, trusted, as_json)
    from attnforge.serving.triton.options import Packaging
    from attnforge.serving.triton.repository import package as package_for_triton

    if version is None and out_folder.exists():
        raise UsageError(f"{out_folder} exists; choose another folder, or add a version to it (--version 2)")
    options = Packaging(
        backend, 1 if version is None else version, session, threads, max_batch,
        None if preferred is None else tuple(whole_numbers(preferred, "--preferred")),
        max_delay, instances, kind, server_tensorrt,
    )  # fmt: skip
    with stages_shown(as_json) as progress:
        models = package_for_triton(bundle, out_folder, options, name=name, trusted=trusted, progress=progress)

    def view() -> None:
        for model in models:
            _print(model)
        say_path("repository", out_folder)

    return Answer({"repository": str(out_folder), "models": [model.model_dump() for model in models]}, view)


def _for_polygraphy(bundles: list[Path], out_folder: Path, trusted: list[Path] | None, as_json: bool) -> Answer:
    from attnforge.serving.polygraphy.folder import package as package_for_polygraphy

    if len(bundles) > 1:
        raise UsageError(f"{len(bundles)} bundles were given; for polygraphy, package them one by one")
    with stages_shown(as_json) as progress:
        progress(f"package {bundles[0]}")
        packaged = package_for_polygraphy(bundles[0], out_folder, trusted=trusted)

    def view() -> None:
        for name, command in packaged.commands.items():
            say_path(f"check {name} against the budget of {len(packaged.cases)} cases", command)
        say_path("written to", out_folder)

    return Answer(packaged.model_dump(), view)


def _print(model: PackagedModel) -> None:
    if model.apart is not None:
        joins = f"requests are not joined: {model.apart}"
    else:
        preferred = f", {' or '.join(str(number) for number in model.preferred)} preferred" if model.preferred else ""
        joins = f"up to {model.max_batch} samples are joined{preferred}"
    say(f"{model.name}, version {model.version}, on {model.backend}: {joins}")
    if model.kept:
        say("the configuration of its earlier versions is unchanged", indent=2)
    else:
        say(f"warm-up: {', '.join(model.warmups) or 'none'}", indent=2)
