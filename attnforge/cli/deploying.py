"""`attnforge deploy`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from attnforge.cli import printing
from attnforge.cli.answers import Answer
from attnforge.cli.options import Json, archives, pairs, ranges
from attnforge.cli.terminal import stages_shown
from attnforge.errors import UnfusedError, plain


def deploy(
    model: Annotated[
        str,
        typer.Argument(
            help="A registered name, package.module:function, hf:FOLDER, or an .onnx or .pt2 file.",
            show_default=False,
        ),
    ],
    out_folder: Annotated[
        Path | None, typer.Option("--out", help="Folder to write; by default MODEL-PRECISION.")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(help="fp32, tf32, fp16, bf16, int8, fp8, int4, or auto, auto-int8, … to choose; a file's own."),
    ] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="onnxruntime, tensorrt or tensorrt_rtx; repeat. All by default.")
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="An option of the model, as name=value; repeat.")
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(help="Range of a file's dynamic dim, as name=min:opt:max; repeat.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="A safetensors file with the model's weights.")] = None,
    compute_capability: Annotated[
        list[str] | None,
        typer.Option(help="What the TensorRT-RTX plan is for (SM89, CURRENT, …); repeat. Portable by default."),
    ] = None,
    profile: Annotated[
        list[str] | None,
        typer.Option(help="A further TensorRT profile, as name=min:opt:max,name=…; repeat."),
    ] = None,
    attention_precision: Annotated[
        str | None, typer.Option(help="fp16 or bf16: of attention alone, in TensorRT plans of fp32 and tf32 models.")
    ] = None,
    require_fused: Annotated[
        list[str] | None,
        typer.Option(help="A target that must run every attention site fused; repeat. Else nothing is written."),
    ] = None,
    max_error: Annotated[
        float | None,
        typer.Option(
            help="The relative error allowed to auto, int8, fp8, int4; by default twice fp16 eager's for auto."
        ),
    ] = None,
    data: Annotated[
        bool, typer.Option(help="Keep the model's real inputs, where it has some, as further cases to verify.")
    ] = True,
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(
            help="Real inputs, instead of the model's: an .npz with each by name, and labels, or a folder; repeat."
        ),
    ] = None,
    metric: Annotated[str | None, typer.Option(help="accuracy or cosine: what measures the task on that data.")] = None,
    least: Annotated[float | None, typer.Option(help="What the metric must reach.")] = None,
    tune: Annotated[
        bool,
        typer.Option(help="Measure here which form of attention ONNX Runtime's CPU runs fastest; else rules choose."),
    ] = True,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a bundle.")] = False,
    cache: Annotated[
        bool,
        typer.Option(help="Reuse plans, reference outputs and measurements of an earlier deploy of the same model."),
    ] = True,
    cache_tokens: Annotated[
        int | None,
        typer.Option(
            help="Make steps of a decoder of a causal model, with caches of keys and values for so many tokens."
        ),
    ] = None,
    cache_precision: Annotated[
        str | None,
        typer.Option(help="int8: of the caches, by ranges of real inputs, within --max-error or --least."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="A tokenizer.json that the bundle keeps, for generate; by default the model's own."),
    ] = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Let weights be random that an hf: folder with others lacks.")
    ] = False,
    trust_source: Annotated[
        bool,
        typer.Option("--trust-source", help="Read a .pt2 file, from which torch may run code with your permissions."),
    ] = False,
    max_eager_error: Annotated[
        float | None,
        typer.Option(help="Relative error of eager against float64 beyond which nothing is proved (default: 0.1)."),
    ] = None,
    keep_wrong: Annotated[
        bool, typer.Option("--keep-wrong", help="Write the bundle even if no backend computes what the model does.")
    ] = False,
    as_json: Json = False,
) -> Answer:
    """Export a model, lower it for every target and write a bundle.

    The callable of package.module:function returns `(module, args, dynamic_shapes)`. It runs with all your rights, and
    so may code in a .pt2 file, which is read with --trust-source alone.

    Example: `attnforge deploy vit --precision fp16 --out vit.bundle`

    Example: `attnforge deploy my_models:encoder -o num_layers=6 --target onnxruntime`

    Example: `attnforge deploy vit --precision auto --require-fused tensorrt_rtx`

    Example: `attnforge deploy patch-attention-digits --precision auto --metric accuracy`

    Example: `attnforge deploy patch-attention-digits --precision int8 --metric accuracy --least 0.97`

    Example: `attnforge deploy hf:all-MiniLM-L6-v2 --precision auto-int8 --max-error 0.1 --calibrate sentences/`

    Example: `attnforge deploy hf:my-llama --precision fp16 --cache-tokens 2048`

    Example: `attnforge deploy vit --profile batch=1:1:1 --profile batch=8:8:8`

    Example: `attnforge deploy hf:all-MiniLM-L6-v2 -o attention=eager -o max_tokens=128`

    Example: `attnforge deploy model.onnx --dim batch=1:4:16 --dim tokens=1:128:512 --precision fp16`
    """
    from attnforge.bundle import check_place
    from attnforge.export.deploy import deploy as deploy_model
    from attnforge.export.sources.named import HUGGING_FACE, model_named, texts_of
    from attnforge.model.data import Real, real_data

    if out_folder is not None:
        check_place(out_folder, force)
    with stages_shown(as_json) as progress:
        progress(f"build {model}")
        stop: list[int] = []
        options = pairs(option) | ({"random_weights": "true"} if random_weights else {})
        if cache_tokens is not None and model.startswith(HUGGING_FACE):
            options = {"inputs": "input_ids", "max_tokens": str(cache_tokens), **options}
        example, source = model_named(model, options, weights, ranges(dim, "--dim"))
        if cache_tokens is not None:
            own, stop = texts_of(model)
            tokenizer = tokenizer or own
        real = real_data(model, example.args or ()) if data and not calibrate else Real()
        name = plain(Path(model).stem) if source is None else Path(model.rpartition(":")[2]).resolve().name
        suffix = precision or ("own" if source is None else "fp32")  # a file without a source record keeps its own
        try:
            bundle = deploy_model(
                example.module,
                example.args,
                out_folder or Path(f"{name}-{suffix}"),
                example.dynamic_shapes,
                precision,
                target,
                name,
                compute_capabilities=compute_capability or (),
                profiles=[ranges(text.split(","), "--profile") for text in profile or ()],
                attention_precision=attention_precision,
                require_fused=require_fused or (),
                data=[*real.inputs, *archives(calibrate or ())],
                labels=real.labels,
                metric=metric,
                least=least,
                max_error=max_error,
                tune=tune,
                force=force,
                cache=cache,
                source=source,
                trust_source=trust_source,
                cache_tokens=cache_tokens,
                cache_precision=cache_precision,
                tokenizer=tokenizer,
                stop=stop,
                max_eager_error=max_eager_error,
                keep_wrong=keep_wrong,
                progress=progress,
            )
        except UnfusedError as error:
            if not as_json:
                printing.print_sites(error.certificate)
            raise
    document = {"bundle": str(bundle.path), **printing.summary(bundle)}
    return Answer(document, lambda: printing.print_bundle(bundle))
