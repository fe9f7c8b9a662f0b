"""The handle that Ray sends to its actors instead of a model: the bundle's path, and how to load it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from attnforge.bundle import TRUSTED, Trusted
from attnforge.bundle.trust import keys_of
from attnforge.errors import check_known
from attnforge.runtime.backends.backend import check_threads
from attnforge.runtime.session import NAMES, Session, load


@dataclass(frozen=True)
class Handle:
    """A bundle that actors load, each once.

    Paths are made absolute here, and read where the actor runs: bundle and keys must have the same path on every node,
    on a shared file system or as copies.

    Attributes:
        bundle: folder of the bundle.
        backend: as in :func:`attnforge.load`, except `eager`.
        threads: number of threads of a CPU backend; by default the number of CPUs that Ray gives the actor
            (`num_cpus`), and the library's default outside of Ray.
        device: number of the CUDA device, among those that Ray gives the actor (`num_gpus`).
        trusted: public keys, one of which must have signed the bundle; by default those that `ATTNFORGE_TRUSTED` names
            where the handle is created, otherwise where the actor runs. False requires no signature.

    Raises:
        UsageError: no such backend, an invalid number of threads, or `trusted` names no key.
    """

    bundle: str | os.PathLike[str]
    backend: str = "auto"
    threads: int | None = None
    device: int = 0
    trusted: Trusted = None

    def __post_init__(self) -> None:
        check_known("backend", self.backend, [name for name in NAMES if name != "eager"])  # which needs a module
        check_threads(self.threads)
        trusted = self.trusted
        if trusted is not False and (trusted is not None or TRUSTED in os.environ):
            trusted = tuple(map(str, keys_of(trusted)))
        object.__setattr__(self, "bundle", str(Path(self.bundle).absolute()))
        object.__setattr__(self, "trusted", trusted)

    def open(self) -> Session:
        """Load the bundle in this process.

        Raises:
            AttnforgeError: see :func:`attnforge.load`; among others SignatureError for a bundle that no trusted key has
                signed.
        """
        threads = self.threads or _assigned_threads()
        return load(self.bundle, self.backend, threads=threads, device=self.device, trusted=self.trusted)


def _assigned_threads() -> int | None:
    """Return the number of CPUs that Ray gives this actor; None outside of an actor."""
    context: Any = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return None
    return max(1, int(context.get_assigned_resources().get("CPU", 1)))
