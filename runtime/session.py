"""One Session, many backends."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from attnforge.arrays import Array, is_torch, to_torch
from attnforge.bundle import Bundle, TensorSpec
from attnforge.errors import UnavailableError, UnknownNameError, UsageError
from attnforge.runtime import onnxruntime, tensorrt
from attnforge.runtime.inputs import by_name, checked

log = logging.getLogger("attnforge")

BACKENDS = ("tensorrt", "tensorrt_rtx", "onnxruntime-cuda", "onnxruntime-cpu")
"""The deployed backends, the one that `auto` likes best first."""

NAMES = ("auto", "eager", "onnxruntime", *BACKENDS)


class Backend(Protocol):
    """Runs a deployed model on arrays that have been checked."""

    name: str

    def run(self, feeds: Mapping[str, Array]) -> dict[str, Array]: ...

    def close(self) -> None: ...


class Session:
    """A deployed model, ready to run.

    Attributes:
        bundle: what it was loaded from.
        backend: name of the backend that runs it.
    """

    def __init__(self, bundle: Bundle, backend: Backend) -> None:
        self.bundle = bundle
        self.backend = backend.name
        self._backend = backend
        self._closed = False

    @property
    def inputs(self) -> list[TensorSpec]:
        return self.bundle.manifest.inputs

    @property
    def outputs(self) -> list[TensorSpec]:
        return self.bundle.manifest.outputs

    def __call__(self, *values: Any) -> Any:
        """Run on inputs by position: NumPy arrays, or tensors of anything that offers DLPack.

        Returns:
            the output, or a tuple of them; torch tensors where the first input is one, else NumPy arrays.

        Raises:
            InputError: an input that the model does not take.
        """
        results = tuple(self.run(by_name(self.inputs, values)).values())
        return results[0] if len(results) == 1 else results

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Run on inputs by name; outputs by name, of the kind of the inputs."""
        if self._closed:
            raise UsageError(f"this session of {self.bundle.manifest.name} is closed; load the bundle again")
        results = self._backend.run(checked(self.inputs, values))
        if any(is_torch(value) for value in values.values()):
            return {name: to_torch(array) for name, array in results.items()}
        return results

    def close(self) -> None:
        """Free what the backend holds. The session cannot run after that."""
        if not self._closed:
            self._closed = True
            self._backend.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        takes = ", ".join(f"{spec.name}: {spec.text()}" for spec in self.inputs)
        return f"Session({self.bundle.manifest.name} on {self.backend}; {takes})"


def load(
    bundle: str | os.PathLike[str] | Bundle, backend: str = "auto", *, module: Any = None, threads: int | None = None
) -> Session:
    """Load a bundle.

    Args:
        bundle: its folder.
        backend: `auto` (the best that this machine can run: TensorRT, TensorRT-RTX, ONNX Runtime on CUDA, then on the
            CPU), `onnxruntime` (on CUDA where there is a device), one of those by name, or `eager`.
        module: for `eager`, the torch module, in any precision and mode.
        threads: of a CPU backend; by default its own choice.

    Raises:
        BundleError: what is there is no whole, unaltered bundle of this schema.
        UnknownNameError: no such backend.
        UnavailableError: this machine or this bundle cannot run it; says what would.
    """
    if backend not in NAMES:
        raise UnknownNameError("backend", backend, NAMES)
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    if backend == "eager":
        if opened.manifest.source.kind == "onnx":
            raise UnavailableError(
                f"{opened.path} was deployed from an ONNX graph; there is no torch module, so no eager backend"
            )
        if module is None:
            raise UnavailableError("the eager backend runs the module itself; give it: load(bundle, 'eager', module=…)")
        from attnforge.runtime.eager import Eager

        return Session(opened, Eager(opened, module))
    candidates = {"auto": BACKENDS, "onnxruntime": BACKENDS[2:]}.get(backend, (backend,))
    chosen, passed_over = choose(opened, candidates)
    session = Session(opened, _OPEN[chosen](opened, chosen, threads))
    log.info(
        "%s runs on %s%s", opened.manifest.name, chosen, "".join(f"; not {b}: {r}" for b, r in passed_over.items())
    )
    return session


_OPEN: dict[str, Callable[[Bundle, str, int | None], Backend]] = {
    "tensorrt": tensorrt.TensorRT,
    "tensorrt_rtx": tensorrt.TensorRT,
    "onnxruntime-cuda": onnxruntime.open_bundle,
    "onnxruntime-cpu": onnxruntime.open_bundle,
}


def choose(bundle: Bundle, candidates: Sequence[str]) -> tuple[str, dict[str, str]]:
    """The first of `candidates` that can run here, and why those before it cannot.

    Raises:
        UnavailableError: none can.
    """
    reasons: dict[str, str] = {}
    for candidate in candidates:
        reason = why_unavailable(bundle, candidate)
        if reason is None:
            return candidate, reasons
        reasons[candidate] = reason
    raise UnavailableError("; ".join(f"{name}: {reason}" for name, reason in reasons.items()))


def why_unavailable(bundle: Bundle, backend: str) -> str | None:
    """Why `backend` cannot run `bundle` on this machine, or None."""
    if backend.startswith("onnxruntime"):
        return onnxruntime.why_unavailable(bundle, backend)
    return tensorrt.why_unavailable(bundle, backend)
