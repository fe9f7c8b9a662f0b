"""`attnforge models`, `attnforge demo` and `attnforge doctor`."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from attnforge.cli.options import Json, Options, pairs
from attnforge.cli.terminal import Answer, escape, out, print_table, say, stages_shown
from attnforge.errors import UsageError
from attnforge.version import __version__


def models(
    model: Annotated[str | None, typer.Argument()] = None,
    option: Options = None,
    as_json: Json = False,
) -> Answer:
    """List the registered models and their options, or the inputs of one model before it is deployed.

    Example: `attnforge models`

    Example: `attnforge models hf:all-MiniLM-L6-v2 -o max_batch=32`

    Args:
        model: Show the inputs of this model, named as for deploy.
    """
    import inspect

    from attnforge.model.registry import MODELS

    if model is not None:
        return _inputs(model, pairs(option))
    options = {name: list(inspect.signature(model.make).parameters) for name, model in MODELS.items()}

    def view() -> None:
        slips = [name for name, model in MODELS.items() if model.summary.startswith("slip")]
        for name, model in MODELS.items():
            if name not in slips:
                out.print(f"[bold]{escape(name)}[/]")
                say(model.summary, indent=2)
                if options[name]:
                    say(f"options: {', '.join(options[name])}", "dim", indent=2)
        say(f"common mistakes, for comparison: {', '.join(slips)}", "dim")

    document = {
        name: {"system": model.system, "summary": model.summary, "options": options[name]}
        for name, model in MODELS.items()
    }
    return Answer(document, view)


def _inputs(model: str, options: Mapping[str, str]) -> Answer:
    from attnforge.bundle.schema import ranges_of
    from attnforge.export.sources.named import build, is_file
    from attnforge.export.sources.torch_module import inputs_of

    if is_file(model):
        raise UsageError(f"{model} is a file, which attnforge deploy opens; it says which dims need a range")
    example, _ = build(model, options, None)
    inputs = inputs_of(example.module, example.args, example.dynamic_shapes)

    def view() -> None:
        for spec in inputs:
            say(f"{spec.name}: {spec.text()}")
        say(f"sizes: {ranges_of(inputs) or 'fixed'}")

    return Answer({"inputs": [spec.model_dump() for spec in inputs]}, view)


def demo(
    folder: Annotated[Path, typer.Option("--out")] = Path("attnforge-demo"),
    as_json: Json = False,
) -> Answer:
    """Deploy and verify two small models on handwritten digits and a photograph: a few minutes, without a network.

    Needs `attnforge[data,report]`.

    Example: `attnforge demo`

    Args:
        folder: Folder for bundles, pictures and pages; an earlier demo's are replaced.
    """
    from attnforge.demo import run

    with stages_shown(as_json) as show:
        result = run(folder, show)
    return Answer(asdict(result), result.show, result.passed)


def doctor(as_json: Json = False) -> Answer:
    """Show which targets and backends work on this machine, and what to install for the others.

    Example: `attnforge doctor`
    """
    from attnforge.bundle import FLAVOURS, OPENVINO
    from attnforge.cli.refusing import EXPORTER
    from attnforge.machine import cuda_devices, tool_versions
    from attnforge.runtime.backends.registry import BACKENDS, why_not_here

    python, packages = platform.python_version(), tool_versions()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {cuda_devices()} CUDA devices"
    try:  # None, or why not and what would change that
        from attnforge.export.targets.registry import TARGETS, why_not_buildable

        build = {target: why_not_buildable(target) for target in TARGETS}
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] not in EXPORTER:
            raise
        reason = f"this environment only runs bundles, without {error.name}; pip install attnforge"
        build = dict.fromkeys((OPENVINO, "onnxruntime", *FLAVOURS), reason)
    run = {backend: why_not_here(backend) for backend in BACKENDS}

    def view() -> None:
        say(f"attnforge {__version__}, Python {python}, {machine}")
        rows = [
            (
                f"{what} {name}",
                "[green]yes[/]" if reason is None else "[yellow]no[/]",
                escape(reason or "").replace("; pip install", ";\npip install"),
            )
            for what, reasons in (("build", build), ("run", run))
            for name, reason in reasons.items()
        ]
        print_table(("", "", ""), rows, words=3, wraps=2)
        say("packages: " + ", ".join(f"{name} {version}" for name, version in packages.items()))

    return Answer({"python": python, "machine": machine, "packages": packages, "build": build, "run": run}, view)
