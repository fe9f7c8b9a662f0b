"""What a caller decides about a model in a Triton repository."""

from __future__ import annotations

from dataclasses import dataclass

from attnforge.errors import UsageError, check_known
from attnforge.runtime.options import check_threads
from attnforge.runtime.session import NAMES

BACKENDS = ("python", "onnxruntime", "tensorrt")
"""Triton's backends that a bundle can be packaged for."""

KINDS = ("auto", "cpu", "gpu")
"""Where Triton places instances; `auto` is on the GPUs where there are some."""


@dataclass(frozen=True)
class Packaging:
    """How bundles are packaged.

    Attributes:
        backend: of Triton: `python` runs a Session of the bundle, `onnxruntime` and `tensorrt` its model and its plans.
        version: the number of the version's folder.
        session: the backend of the Session, as :func:`attnforge.load` takes it.
        threads: of one instance on the CPU; None for the library's own choice.
        max_batch: samples that Triton may join; None for as many as the bundle takes, 0 to join none and to let
            requests bring their own batch.
        preferred: numbers of samples that Triton prefers to join; None to measure here which is best.
        max_delay: microseconds that a request may wait for others.
        instances: how many are loaded, each with weights of its own.
        kind: one of :data:`KINDS`.
        server_tensorrt: version of the server's TensorRT, such as `10.7`; plans of another are refused.
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
            raise UsageError(f"a Session is what the python backend runs; leave its backend out for {self.backend}")
        if self.backend == "tensorrt" and (self.kind == "cpu" or self.threads is not None):
            raise UsageError("TensorRT's plans run on a GPU; leave cpu and the number of threads out")
