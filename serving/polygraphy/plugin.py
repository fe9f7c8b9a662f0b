"""The plugin that adds `--attnforge BUNDLE` to `polygraphy run`, through the entry point `polygraphy.run.plugins`."""

from __future__ import annotations

import argparse
from typing import Any

from polygraphy.tools.args import util
from polygraphy.tools.args.base import BaseRunnerArgs
from polygraphy.tools.script import make_invocable

RUNNER = "attnforge"


class _Selected(argparse.Action):
    """Adds another runner, with its bundle."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.runners = [*(getattr(namespace, "runners", None) or []), RUNNER]
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest) or []), values])


class AttnforgeRunnerArgs(BaseRunnerArgs):  # type: ignore[misc]  # Polygraphy has no types
    """
    attnforge Inference: running inference with a bundle of attnforge.
    """

    def get_name_opt_impl(self) -> tuple[str, str]:
        return "attnforge", RUNNER

    def add_parser_args_impl(self) -> None:
        # The option that selects a runner takes no value in Polygraphy; this one replaces it and takes a bundle.
        self.group.conflict_handler = "resolve"
        self.group.add_argument(
            f"--{RUNNER}",
            metavar="BUNDLE",
            help="Run inference using attnforge, with the bundle in this folder; repeatable",
            action=_Selected,
            dest="attnforge_bundles",
        )
        self.group.add_argument(
            "--attnforge-backend",
            metavar="BACKEND",
            help="The backend that runs the bundles, such as onnxruntime-cpu. Defaults to auto",
        )
        self.group.add_argument(
            "--attnforge-trusted",
            metavar="KEY",
            help="Open only bundles that the owner of one of these public keys has signed. Defaults to the keys that "
            "the environment variable ATTNFORGE_TRUSTED names",
            nargs="+",
        )

    def parse_impl(self, args: Any) -> None:
        """
        Parses command-line arguments and populates the following attributes:

        Attributes:
            bundles (List[str]): The folders of bundles, in the order of their runners.
            backend (str): The backend that runs them.
            trusted (List[str]): Files of public keys.
        """
        self.bundles = list(util.get(args, "attnforge_bundles") or [])
        self.backend = util.get(args, "attnforge_backend")
        self.trusted = util.get(args, "attnforge_trusted")

    def add_to_script_impl(self, script: Any) -> None:
        """Add the next runner; Polygraphy calls this once per runner."""
        script.add_import(imports=["AttnforgeRunner"], frm="attnforge.serving.polygraphy.runner")
        bundle = self.bundles.pop(0)
        script.add_runner(make_invocable("AttnforgeRunner", bundle, backend=self.backend, trusted=self.trusted))


def export_argument_groups() -> list[Any]:
    """Return the option groups that `polygraphy run` adds."""
    return [AttnforgeRunnerArgs()]
