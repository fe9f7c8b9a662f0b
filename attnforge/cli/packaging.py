"""`attnforge package`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnforge.cli.answers import Answer
from attnforge.cli.options import Json, TrustedKeys, whole_numbers
from attnforge.cli.terminal import say, say_path, stages_shown
from attnforge.errors import UsageError, check_known

if TYPE_CHECKING:
    from attnforge.serving.triton.repository import Packaged

FORMS = ("triton", "polygraphy")

OF_ALL = {"bundle", "form", "out_folder", "trusted", "as_json"}
"""Parameters that every form takes; the others are Triton's."""


def package(
    context: typer.Context,
    bundle: Annotated[list[Path], typer.Argument(help="Folder of a bundle, or of several.", show_default=False)],
    form: Annotated[str, typer.Option("--for", help="triton, or polygraphy.", show_default=False)],
    out_folder: Annotated[
        Path, typer.Option("--out", help="The model repository; for polygraphy a new folder.", show_default=False)
    ],
    backend: Annotated[
        str,
        typer.Option(
            "--backend",
            "-b",
            help="Triton's: python (a Session of the bundle), onnxruntime (its model) or tensorrt (its plans).",
        ),
    ] = "python",
    version: Annotated[
        int | None, typer.Option(help="Number of the version; needed where the repository exists. By default 1.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Of the model; by default its name and precision.")] = None,
    session: Annotated[str, typer.Option(help="Backend of the Session: auto, or one by name.")] = "auto",
    threads: Annotated[
        int | None, typer.Option(help="Threads of an instance on the CPU; by default one for each processor.")
    ] = None,
    instances: Annotated[int, typer.Option(help="How many are loaded, each in memory of its own.")] = 1,
    kind: Annotated[str, typer.Option(help="Where instances run: cpu, gpu, or auto (GPUs where there are some).")] = (
        "auto"
    ),
    max_batch: Annotated[
        int | None,
        typer.Option(
            help="Samples that Triton joins at most, 0 for none; by default as many as the bundle takes.",
            show_default=False,
        ),
    ] = None,
    preferred: Annotated[
        str | None,
        typer.Option(
            help="Numbers of samples that Triton prefers to join, as 8,16; by default the largest that costs no more "
            "a sample than any other here, which is measured.",
            show_default=False,
        ),
    ] = None,
    max_delay: Annotated[int, typer.Option(help="Microseconds that a request may wait for others.")] = 0,
    server_tensorrt: Annotated[
        str | None, typer.Option(help="The server's TensorRT, such as 10.7, for plans.", show_default=False)
    ] = None,
    trusted: TrustedKeys = None,
    as_json: Json = False,
) -> Answer:
    """Write bundles as models that a server serves: a Triton model repository, whole or not at all. Or write one as
    what Polygraphy compares with: inputs, float64 outputs, and a function that holds results to the bundle's budget.

    Triton joins requests along the batch, where a run here shows that samples of a batch do not meet. Ordinary
    reference cases become warm-up requests, so a model that is READY has run them.

    Example: `attnforge package vit-fp16 --for triton --out repository`

    Example: `attnforge package vit-fp16 --for triton --out repository --version 2`

    Example: `attnforge package vit-fp32 --for triton --out repository --backend onnxruntime --max-delay 500`

    Example: `attnforge package vit-fp16 --for polygraphy --out held`
    """
    check_known("form", form, FORMS)
    if form == "polygraphy":
        for parameter in context.command.params:
            source = context.get_parameter_source(parameter.name or "")
            if parameter.name not in OF_ALL and source is not None and source.name == "COMMANDLINE":
                raise UsageError(f"{parameter.opts[0]} is Triton's; leave it out for polygraphy")
        return _for_polygraphy(bundle, out_folder, trusted, as_json)
    from attnforge.serving.triton.options import Packaging
    from attnforge.serving.triton.repository import package as package_for_triton

    if version is None and out_folder.exists():
        raise UsageError(f"{out_folder} exists; choose another folder, or say which version is added (--version 2)")
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
            say_path(f"hold {name} to the budget of {len(packaged.cases)} cases", command)
        say_path("written to", out_folder)

    return Answer(packaged.model_dump(), view)


def _print(model: Packaged) -> None:
    if model.apart is not None:
        joins = f"requests are not joined: {model.apart}"
    else:
        preferred = f", {' or '.join(str(number) for number in model.preferred)} preferred" if model.preferred else ""
        joins = f"up to {model.max_batch} samples are joined{preferred}"
    say(f"{model.name}, version {model.version}, on {model.backend}: {joins}")
    if model.kept:
        say("the configuration of its earlier versions is kept as it is", indent=2)
    else:
        say(f"warm-up: {', '.join(model.warmups) or 'none'}", indent=2)
