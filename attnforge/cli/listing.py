"""`attnforge models` and `attnforge doctor`."""

from __future__ import annotations

from attnforge.cli import printing
from attnforge.cli.answers import Answer
from attnforge.cli.options import Json


def models(as_json: Json = False) -> Answer:
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
    return Answer(listing, lambda: printing.print_models(listing))


def doctor(as_json: Json = False) -> Answer:
    """Say what this machine can build and run, and what to install for the rest.

    Example: `attnforge doctor`
    """
    from attnforge.doctor import examine

    report = examine()
    return Answer(report, lambda: printing.print_examination(report))
