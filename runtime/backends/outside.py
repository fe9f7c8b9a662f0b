"""Targets that other packages add, through the entry point group `attnforge.targets`.

A package names one :class:`Target` per entry point in its `pyproject.toml`:

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
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import TensorSpec
from attnforge.errors import RunError, UnavailableError, first_line, raised_as
from attnforge.runtime.inputs import Shapes
from attnforge.runtime.options import Memory

log = logging.getLogger("attnforge")

GROUP = "attnforge.targets"

Runner = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Computes a model's outputs from its inputs, both by name. Inputs are contiguous arrays of the model's dtypes; outputs
are new arrays of them. Several threads may call it at once."""


def _nothing() -> str | None:
    return None


@dataclass(frozen=True)
class Target:
    """A target of `deploy`, and the backend of the same name that runs it.

    Attributes:
        name: its name for users, in lower-case letters, digits, `-` and `_`.
        open: opens a file that `build` wrote; the second argument is the number of threads to use, None for the
            library's own choice.
        build: writes the one file that `open` reads. It is given the canonical graph (an ONNX file with one `Attention`
            node per site; weights of large models are in a file next to it) and an empty folder, and returns the name
            of the file in that folder. An exception means that the target cannot run this model. Without `build`,
            `open` is given the canonical graph.
        why_not_here: returns why this machine cannot run it, in one line, or None.
        runs_code: whether a file may hold code that runs when it is opened, as a compiled model does. If so, a bundle's
            file is opened only for a caller who names the target, or whose key signed the bundle.
        libraries: names of the distributions whose versions its speed and its results depend on.
    """

    name: str
    open: Callable[[Path, int | None], Runner]
    build: Callable[[Path, Path], str] | None = None
    why_not_here: Callable[[], str | None] = _nothing
    runs_code: bool = True
    libraries: Sequence[str] = ()

    def why_unusable(self) -> str | None:
        """Return why this machine cannot run it, in one line, or None."""
        try:
            reason = self.why_not_here()
        except Exception as error:  # whatever a package raises
            reason = f"{self.name} cannot be used here: {first_line(error)}"
        return None if reason is None else first_line(reason)


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


class Outside:
    """A backend that another package adds, in a session.

    Args:
        target: the target.
        file: the file to open.
        inputs, outputs: the model's tensors.
        threads: number of threads, or None.

    Raises:
        UnavailableError: the package cannot open the file.
    """

    gpu = None

    def __init__(
        self,
        target: Target,
        file: Path,
        inputs: Sequence[TensorSpec],
        outputs: Sequence[TensorSpec],
        threads: int | None,
    ) -> None:
        self.name = target.name
        self._inputs, self._outputs = [spec.name for spec in inputs], outputs
        with raised_as(UnavailableError, f"{target.name} cannot open {file}"):
            self._run = target.open(file, threads)

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

    def keep(self) -> None: ...

    def close(self) -> None:
        del self._run
