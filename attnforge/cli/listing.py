"""`attnforge models` and `attnforge doctor`."""

from __future__ import annotations

import os
import platform

from attnforge.cli.answers import Answer
from attnforge.cli.options import Json
from attnforge.cli.terminal import escape, out, print_table, say
from attnforge.version import __version__


def models(as_json: Json = False) -> Answer:
    """List the registered models and their options.

    Example: `attnforge models`
    """
    import inspect

    from attnforge.model.registry import MODELS

    options = {name: list(inspect.signature(model.make).parameters) for name, model in MODELS.items()}

    def view() -> None:
        for name, model in MODELS.items():
            out.print(f"[bold]{escape(name)}[/]" + (f" [dim]{escape(model.system)}[/]" if model.system else ""))
            say(model.summary, indent=2)
            if options[name]:
                say(f"options: {', '.join(options[name])}", "dim", indent=2)

    document = {
        name: {"system": model.system, "summary": model.summary, "options": options[name]}
        for name, model in MODELS.items()
    }
    return Answer(document, view)


def doctor(as_json: Json = False) -> Answer:
    """Show which targets and backends work on this machine, and what to install for the others.

    Example: `attnforge doctor`
    """
    from attnforge.export.targets.registry import TARGETS, why_not_buildable
    from attnforge.machine import cuda_devices, tool_versions
    from attnforge.runtime.backends.registry import BACKENDS, why_not_here

    python, packages = platform.python_version(), tool_versions()
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {cuda_devices()} CUDA devices"
    build = {target: why_not_buildable(target) for target in TARGETS}  # None, or why not and what would change that
    run = {backend: why_not_here(backend) for backend in BACKENDS}

    def view() -> None:
        say(f"attnforge {__version__}, Python {python}, {machine}")
        rows = [
            (f"{what} {name}", "[green]yes[/]" if reason is None else "[yellow]no[/]", escape(reason or ""))
            for what, reasons in (("build", build), ("run", run))
            for name, reason in reasons.items()
        ]
        print_table(("", "", ""), rows, words=3, wraps=2)
        say("packages: " + ", ".join(f"{name} {version}" for name, version in packages.items()))

    return Answer({"python": python, "machine": machine, "packages": packages, "build": build, "run": run}, view)
