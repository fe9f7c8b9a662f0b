"""The command line, `attnforge`: :mod:`.commands`."""

from attnforge.cli.commands import app, main, out

__all__ = ["app", "main", "out"]
