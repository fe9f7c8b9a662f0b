"""`attnforge package`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from attnforge.cli.options import Json, TrustedKeys, whole_numbers
from attnforge.cli.terminal import Answer, say, say_path, stages_shown
from attnforge.errors import UsageError, check_known

if TYPE_CHECKING:
    from attnforge.serving.triton.repository import PackagedModel

FORMS = ("triton", "polygraphy")

_Model = partial(typer.Option, rich_help_panel="Triton: the model")
_Batching = partial(typer.Option, rich_help_panel="Triton: batching")


def package(
    context: typer.Context,
    bundle: Annotated[list[Path], typer.Argument(show_default=False)],
    form: Annotated[str, typer.Option("--for", show_default=False)],
    out_folder: Annotated[Path, typer.Option("--out", show_default=False)],
    trusted: TrustedKeys = None,
    as_json: Json = False,
    backend: Annotated[str, _Model("--backend", "-b")] = "python",
    version: Annotated[int | None, _Model()] = None,
    name: Annotated[str | None, _Model()] = None,
    session: Annotated[str, _Model()] = "auto",
    threads: Annotated[int | None, _Model()] = None,
    instances: Annotated[int, _Model()] = 1,
    kind: Annotated[str, _Model()] = "auto",
    server_tensorrt: Annotated[str | None, _Model()] = None,
    max_batch: Annotated[int | None, _Batching()] = None,
    preferred: Annotated[str | None, _Batching()] = None,
    max_delay: Annotated[int, _Batching()] = 0,
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
        backend: Triton backend: python (a Session), onnxruntime (the model) or tensorrt (the plans).
        version: Model version, to add one to a repository (default: 1).
        name: Model name (default: NAME-PRECISION of the bundle).
        session: Backend of the Session, by name, or auto.
        threads: Threads of each CPU instance (default: one per processor).
        instances: Number of instances, each with its own weights.
        kind: Where instances run: cpu, gpu or auto.
        server_tensorrt: TensorRT version of the server, such as 10.7.
        max_batch: Maximum batch size, 0 for no batching (default: the bundle's maximum).
        preferred: Preferred batch sizes, comma-separated (default: measured on this machine).
        max_delay: Maximum time a request may wait for others, in microseconds.
    """
    check_known("form", form, FORMS)
    if form == "polygraphy":
        for parameter in context.command.params:
            source = context.get_parameter_source(parameter.name or "")
            in_panel = getattr(parameter, "rich_help_panel", None) is not None  # as Triton's options alone are
            if in_panel and source is not None and source.name == "COMMANDLINE":
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
