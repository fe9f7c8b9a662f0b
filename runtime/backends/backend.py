"""The interface of every backend to a session, its row in the registry, and targets that other packages add through the
entry point group `attnforge.targets`.

A package names one :class:`Target` per entry point in its `pyproject.toml`:

    [project.entry-points."attnforge.targets"]
    my_target = "my_package:TARGET"

Once it is installed, `deploy`, `load`, `verify`, `bench`, `inspect` and `doctor` know the target, and check its answers
as they check any other's. Entry points are those of packages that somebody installed; nothing else is imported.
"""

from __future__ import annotations

import importlib.metadata
import logging
import pkgutil
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from attnforge.arrays import Array
from attnforge.bundle import CANONICAL, MOST_THREADS, OF_PACKAGES, Bundle, Manifest, TensorSpec
from attnforge.errors import RunError, UnavailableError, UsageError, first_line, raised_as
from attnforge.numbers import whole
from attnforge.runtime.inputs import Shapes

if TYPE_CHECKING:
    from attnforge.runtime.gpu import Gpu


@dataclass(frozen=True)
class Options:
    """The options of a session; :func:`attnforge.load` describes each option."""

    threads: int | None = None
    device: int = 0
    contexts: int = 4
    graphs: bool | None = None
    cache: bool = True

    def __post_init__(self) -> None:
        if whole("contexts", self.contexts) < 1:
            raise UsageError(f"{self.contexts} execution contexts were asked for; give 1 or more")
        check_threads(self.threads)


def check_threads(threads: int | None) -> None:
    """Check a number of threads; libraries start as many as requested, until the machine has no more.

    Raises:
        UsageError: fewer than 1, or more than :data:`~attnforge.bundle.MOST_THREADS`.
    """
    if threads is not None and not 1 <= whole("threads", threads) <= MOST_THREADS:
        raise UsageError(f"{threads} threads were asked for; give 1 to {MOST_THREADS:,}")


@dataclass(frozen=True)
class Memory:
    """The memory of a session: bytes, None if its backend does not report them, and two counts.

    Attributes:
        weights: bytes of the model's parameters.
        activations: bytes for everything between inputs and outputs, in all execution contexts.
        buffers: bytes of inputs and outputs on the device, including those that callers refer to.
        pinned: bytes of host memory through which NumPy arrays reach the device.
        contexts: number of execution contexts.
        graphs: number of captured CUDA graphs.
    """

    weights: int | None = None
    activations: int | None = None
    buffers: int = 0
    pinned: int = 0
    contexts: int = 0
    graphs: int = 0


class Backend(Protocol):
    """Runs a deployed model on arrays that have been checked; from several threads at once. A class that inherits from
    it and says nothing else computes on the CPU, and has no compiled kernels to keep.

    A new backend is one file in this folder and one row of :data:`attnforge.runtime.backends.registry.REGISTRY`
    (:class:`Registered`).

    Attributes:
        name: name of the backend.
        gpu: the device that it computes on; such a backend is a :class:`~attnforge.runtime.gpu.GpuBackend` too. None on
            the CPU.
    """

    name: str
    gpu: Gpu | None = None

    @abstractmethod
    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        """The model's outputs for host arrays, in the order of the manifest.

        Args:
            feeds: the inputs by name, in the order of the manifest, contiguous and of its dtypes.
            shapes: shapes of inputs and outputs; an output's shape is None if the inputs' sizes do not determine it.
            out: arrays that the backend may write outputs to, by name. It returns a new array for an output that it
                does not write there, and if `shapes` does not have the output's shape.
        """

    def memory(self) -> Memory:
        """The memory that the backend uses, as far as its library reports it."""
        return Memory()

    def keep(self) -> None:
        """Write compiled kernels to disk, for the next start."""
        return

    @abstractmethod
    def close(self) -> None:
        """Free everything. Later runs raise a UsageError."""


CUDA_PROVIDER = "CUDAExecutionProvider"

OPENVINO_TYPES = {"bf16": ("BF16", "bf16")}
"""OpenVINO's names for a processor's 16-bit arithmetic and for the hint that requests it, by precision: those with
which its results meet the budget."""

Runner = Callable[[Mapping[str, Array]], Mapping[str, Array]]
"""Computes a model's outputs from its inputs, both by name. Inputs are contiguous arrays of the model's dtypes; outputs
are new arrays of them. Several threads may call it at once."""


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
    why_not_here: Callable[[], str | None] = lambda: None
    runs_code: bool = True
    libraries: Sequence[str] = ()

    def why_unusable(self) -> str | None:
        """Return why this machine cannot run it, in one line, or None."""
        try:
            reason = self.why_not_here()
        except Exception as error:  # whatever a package raises
            reason = f"{self.name} cannot be used here: {first_line(error)}"
        return None if reason is None else first_line(reason)


@dataclass(frozen=True)
class Registered:
    """A backend, before it is opened: a row of :data:`attnforge.runtime.backends.registry.REGISTRY`.

    Attributes:
        name: name of the backend as users write it.
        family: name under which users may load any of several backends of one library, and the key of what a bundle
            records of it.
        libraries: distribution names of the packages whose versions affect its speed and results.
        opener: `module:function` in this folder that opens a bundle, given the bundle, this row and the options of the
            session. The module is imported only then, because most of them import libraries that need not be installed.
        why_not_here: given the name, the reason why this machine cannot run it whatever the bundle, or None.
        targets: the targets of `deploy` whose model or plan it runs, one of which a bundle must have. A backend without
            targets runs the canonical graph, or a separate graph; if it misses the budget, another backend may still
            meet it.
        on_gpu: whether it computes on a CUDA device.
        provider: name of ONNX Runtime's execution provider that computes on a GPU; empty for other backends.
        steps: whether it runs the steps of a decoder.
        uncertified: why the bundle's certificate does not count what it compiled; empty if it does.
        target: the target of another package that it runs.
    """

    name: str
    family: str
    libraries: tuple[str, ...]
    opener: str
    why_not_here: Callable[[str], str | None] = lambda name: None
    targets: tuple[str, ...] = ()
    on_gpu: bool = False
    provider: str = ""
    steps: bool = False
    uncertified: str = ""
    target: Target | None = None

    def model(self, manifest: Manifest) -> str:
        """Return the name of the file of a bundle that it runs, or that its plan was built from.

        Raises:
            UnavailableError: the bundle was not deployed for it.
        """
        own, names = f"{OF_PACKAGES}/{self.name}/", self.targets or (self.family,)
        record = next((manifest.targets[name] for name in names if name in manifest.targets), None)
        if record is None and not self.targets:
            return CANONICAL
        # a file of another target may be code of another library
        if record is None or (self.target and record.model != CANONICAL and not record.model.startswith(own)):
            known = " or ".join(self.targets)
            raise UnavailableError(f"the bundle was not deployed for {known}; deploy it again with --target {known}")
        return (record.cuda_model if self.provider == CUDA_PROVIDER else None) or record.model

    def open(self, bundle: Bundle, options: Options) -> Backend:
        """Open a bundle that the backend can run here.

        Raises:
            UnavailableError: its library refuses the bundle's model or plan after all.
            BundleError: a file that it needs is missing or altered.
        """
        backend: Backend = pkgutil.resolve_name(f"{__package__}.{self.opener}")(bundle, self, options)
        return backend


# --- targets of other packages ----------------------------------------------------------------------------------------


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
        self._outputs = manifest.graph_outputs
        with bundle.steady():
            file = bundle.file(row.model(manifest))
            with raised_as(UnavailableError, f"{row.name} cannot open {file}"):
                self._run = row.target.open(file, options.threads)

    def run(self, feeds: dict[str, Array], shapes: Shapes, out: Mapping[str, Array]) -> list[Array]:
        with raised_as(RunError, f"{self.name} failed"):
            results = self._run(feeds)
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

    def close(self) -> None:
        del self._run
