"""`attnforge deploy`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from attnforge.cli import printing
from attnforge.cli.options import Force, Json, Options, archives, pairs, ranges
from attnforge.cli.terminal import Answer, stages_shown
from attnforge.errors import UnfusedError

Texts = list[str] | None

_Source = partial(typer.Option, rich_help_panel="Source")
_Accuracy = partial(typer.Option, rich_help_panel="Precision and accuracy")
_Decoder = partial(typer.Option, rich_help_panel="Decoders")
_TensorRT = partial(typer.Option, rich_help_panel="TensorRT")
_Measuring = partial(typer.Option, rich_help_panel="Measuring and reuse")


def deploy(
    model: Annotated[str, typer.Argument(show_default=False)],
    out_folder: Annotated[Path | None, typer.Option("--out")] = None,
    precision: str | None = None,
    target: Texts = None,
    option: Options = None,
    require_fused: Texts = None,
    force: Force = False,
    weights: Annotated[Path | None, _Source()] = None,
    dim: Annotated[Texts, _Source()] = None,
    random_weights: Annotated[bool, _Source("--random-weights")] = False,
    trust_source: Annotated[bool, _Source("--trust-source")] = False,
    calibrate: Annotated[list[Path] | None, _Accuracy()] = None,
    metric: Annotated[str | None, _Accuracy()] = None,
    least: Annotated[float | None, _Accuracy()] = None,
    max_error: Annotated[float | None, _Accuracy()] = None,
    data: Annotated[bool, _Accuracy()] = True,
    max_eager_error: Annotated[float | None, _Accuracy()] = None,
    keep_wrong: Annotated[bool, _Accuracy("--keep-wrong")] = False,
    cache_tokens: Annotated[int | None, _Decoder()] = None,
    cache_precision: Annotated[str | None, _Decoder()] = None,
    tokenizer: Annotated[Path | None, _Decoder()] = None,
    profile: Annotated[Texts, _TensorRT()] = None,
    compute_capability: Annotated[Texts, _TensorRT()] = None,
    attention_precision: Annotated[str | None, _TensorRT()] = None,
    tune: Annotated[bool, _Measuring()] = True,
    cache: Annotated[bool, _Measuring()] = True,
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
        weights: Safetensors file with the model's weights.
        dim: Range of a dynamic dim of the file, as name=min:opt:max; repeatable.
        random_weights: Allow random values for weights that an hf: folder lacks.
        trust_source: Read a .pt2 file, which may run code with your permissions.
        calibrate: Real inputs (and labels) to use instead of the model's: an .npz file, a picture, a folder of either,
            or a .txt file with a text on each line; repeatable.
        metric: Task metric on the real inputs: accuracy or cosine.
        least: Minimum value of the metric.
        max_error: Maximum relative error for auto and quantised precisions (auto's default: twice fp16 eager's error).
        data: Add the model's real inputs, if it has any, as reference cases.
        max_eager_error: Largest relative error of eager with which parity can still be judged (default: 0.1).
        keep_wrong: Write the bundle even if no backend computes the right result.
        cache_tokens: Deploy a causal model as a decoder step with a KV cache of this many tokens.
        cache_precision: KV-cache precision: int8, with --calibrate, and --max-error or --metric.
        tokenizer: tokenizer.json to store in the bundle for generate (default: the model's own).
        profile: Additional optimization profile, as name=min:opt:max,name=…; repeatable.
        compute_capability: GPUs of the TensorRT-RTX plan: SM89, CURRENT, …; repeatable (default: portable).
        attention_precision: Precision of attention in plans of fp32, tf32 and quantised models: fp16 or bf16.
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
