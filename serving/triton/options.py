"""The options for packaging a model in a Triton repository."""

from __future__ import annotations

from dataclasses import dataclass

from attnforge.errors import UsageError, check_known
from attnforge.runtime.backends.backend import check_threads
from attnforge.runtime.session import NAMES

BACKENDS = ("python", "onnxruntime", "tensorrt")
"""Triton backends that a bundle can be packaged for."""

KINDS = ("auto", "cpu", "gpu")
"""Devices of Triton's instances; `auto` uses GPUs if there are any."""


@dataclass(frozen=True)
class Packaging:
    """The options for packaging bundles.

    Attributes:
        backend: Triton backend: `python` runs a Session of the bundle, `onnxruntime` its model and `tensorrt` its
            plans.
        version: number of the version's folder.
        session: backend of the Session, as in :func:`attnforge.load`.
        threads: number of threads of one instance on the CPU; None for the library's default.
        max_batch: maximum samples that Triton may join; None for as many as the bundle takes, 0 to join none and to let
            requests have their own batch.
        preferred: numbers of samples that Triton prefers to join; None to measure the best on this machine.
        max_delay: microseconds that a request may wait for others.
        instances: number of loaded instances, each with its own weights.
        kind: one of :data:`KINDS`.
        server_tensorrt: version of the server's TensorRT, such as `10.7`; plans of other versions are refused.
    """

    backend: str = "python"
    version: int = 1
    session: str = "auto"
    threads: int | None = None
    max_batch: int | None = None
    preferred: tuple[int, ...] | None = None
    max_delay: int = 0
    instances: int = 1
    kind: str = "auto"
    server_tensorrt: str | None = None

    def __post_init__(self) -> None:
        check_known("backend of Triton", self.backend, BACKENDS)
        check_known("backend", self.session, [name for name in NAMES if name != "eager"])
        check_known("kind of instance", self.kind, KINDS)
        for name, value, least, most in (
            ("version", self.version, 1, 2**31 - 1),
            ("max_delay", self.max_delay, 0, 2**31 - 1),
            ("instances", self.instances, 1, 1024),
            ("max_batch", self.max_batch, 0, 2**31 - 1),
        ):
            if value is not None and not least <= value <= most:
                raise UsageError(f"{name} is {value}; give {least} to {most:,}")
        check_threads(self.threads)
        if self.backend != "python" and self.session != "auto":
            raise UsageError(f"only the python backend runs a Session; omit the Session's backend for {self.backend}")
        if self.backend == "tensorrt" and (self.kind == "cpu" or self.threads is not None):
            raise UsageError("TensorRT plans run on a GPU; omit kind cpu and threads")
