"""Targets that other packages add, through the entry point group `attnforge.targets`.

A package names one :class:`~attnforge.runtime.backends.backend.Target` per entry point in its `pyproject.toml`:

    [project.entry-points."attnforge.targets"]
    my_target = "my_package:TARGET"

Once it is installed, `deploy`, `load`, `verify`, `bench`, `inspect` and `doctor` know the target, and check its answers
as they check any other's. Entry points are those of packages that somebody installed; nothing else is imported.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
import sys
from collections.abc import Collection, Sequence
from contextlib import redirect_stdout

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import Bundle, TensorSpec
from attnforge.errors import RunError, UnavailableError, first_line, raised_as
from attnforge.runtime.backends.backend import Backend, Registered, Target
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.options import Memory, Options

log = logging.getLogger("attnforge")

GROUP = "attnforge.targets"


def installed(taken: Collection[str]) -> dict[str, Target]:
    """Return the targets of installed packages, by name. One that cannot be imported, or has an unusable name, is left
    out with a warning of one line.

    Args:
        taken: names that it cannot have.
    """
    targets: dict[str, Target] = {}
    for entry in importlib.metadata.entry_points(group=GROUP):
        try:
            with redirect_stdout(sys.stderr):  # standard output may be a JSON document
                target = entry.load()
            if not isinstance(target, Target):
                raise TypeError(f"{entry.value} is a {type(target).__name__}, not an attnforge.Target")
            if not re.fullmatch(r"[a-z][a-z0-9_-]{0,63}", target.name) or target.name in {*taken, *targets}:
                raise ValueError(f"its name {target.name!r} is taken, or not of lower-case letters, digits, - and _")
        except (Exception, SystemExit) as error:  # whatever a package raises when it is imported
            of = entry.dist.name if entry.dist is not None else "a package"
            log.warning("the target %s of %s is left out: %s", entry.name, of, first_line(error))
        else:
            targets[target.name] = target
    return targets


class Outside(Backend):
    """A backend that another package adds, in a session.

    Args:
        bundle: the bundle, which was deployed for the target.
        row: the backend.
        options: options of the session, of which only the number of threads applies.

    Raises:
        UnavailableError: the package cannot open the file.
    """

    def __init__(self, bundle: Bundle, row: Registered, options: Options) -> None:
        assert row.target is not None
        self.name, manifest = row.name, bundle.manifest
        self._inputs, self._outputs = [spec.name for spec in manifest.graph_inputs], manifest.graph_outputs
        with bundle.steady():
            file = bundle.file(row.model(manifest))
            with raised_as(UnavailableError, f"{row.name} cannot open {file}"):
                self._run = row.target.open(file, options.threads)

    def run(self, arrays: Sequence[Array], shapes: Shapes, out: Sequence[Array | None] | None = None) -> list[Array]:
        with raised_as(RunError, f"{self.name} failed"):
            results = self._run(dict(zip(self._inputs, arrays, strict=True)))
        return [
            self._checked(spec, results.get(spec.name), shape)
            for spec, shape in zip(self._outputs, shapes.outputs, strict=True)
        ]

    def _checked(self, spec: TensorSpec, result: Array | None, shape: tuple[int, ...] | None) -> Array:
        """An output, if it is of the model's dtype and shape."""
        array = np.asarray(result)
        if array.dtype.name != spec.dtype or (shape is not None and array.shape != shape):
            expected = f"{spec.dtype}{list(shape or ('…',))}"
            raise RunError(f"{self.name} returned {array.dtype}{list(array.shape)} for {spec.name}, not {expected}")
        return array

    def memory(self) -> Memory:
        return Memory()

    def close(self) -> None:
        del self._run
