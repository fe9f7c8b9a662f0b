"""`attnforge models` and `attnforge doctor`."""

from __future__ import annotations

from attnforge.cli import printing
from attnforge.cli.options import Json
from attnforge.cli.terminal import answer


def models(as_json: Json = False) -> None:
    """List the registered models and their options.

    Example: `attnforge models`
    """
    import inspect

    from attnforge.model.registry import MODELS

    listing = {
        name: {
            "system": model.system,
            "summary": model.summary,
            "options": list(inspect.signature(model.make).parameters),
        }
        for name, model in MODELS.items()
    }
    answer(as_json, listing, lambda: printing.print_models(listing))


def doctor(as_json: Json = False) -> None:
    """Say what this machine can build and run, and what to install for the rest.

    Example: `attnforge doctor`
    """
    from attnforge.doctor import examine

    report = examine()
    answer(as_json, report, lambda: printing.print_examination(report))
