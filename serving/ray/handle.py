"""What Ray sends to its actors instead of a model: where the bundle is, and how it is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from attnforge.bundle import TRUSTED, Trusted
from attnforge.bundle.trust import keys_of
from attnforge.errors import check_known
from attnforge.runtime.options import check_threads
from attnforge.runtime.session import NAMES, Session, load


@dataclass(frozen=True)
class Handle:
    """A bundle that actors load, each once.

    Paths are made absolute here, and read where the actor runs: bundle and keys have to be at the same place on every
    node, on a shared file system or copied there.

    Attributes:
        bundle: its folder.
        backend: as :func:`attnforge.load` takes it, but for `eager`.
        threads: over how many a CPU backend spreads one run; by default as many as the CPUs that Ray gives the actor
            (`num_cpus`), and the library's own choice outside of Ray.
        device: number of the CUDA device, of those that Ray gives the actor (`num_gpus`).
        trusted: public keys, of which one must have signed the bundle; by default those that `ATTNFORGE_TRUSTED` names
            where the handle is made, else where the actor runs. False asks for no signature.

    Raises:
        UsageError: no such backend, or number of threads, or no key where keys are asked for.
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
            AttnforgeError: as :func:`attnforge.load` raises it, among them SignatureError for a bundle that no trusted
                key has signed.
        """
        threads = self.threads or _assigned_threads()
        return load(self.bundle, self.backend, threads=threads, device=self.device, trusted=self.trusted)


def _assigned_threads() -> int | None:
    """As many threads as Ray gives this actor CPUs; None outside of an actor."""
    context: Any = ray.get_runtime_context() if ray.is_initialized() else None
    if context is None or context.get_actor_id() is None:
        return None
    return max(1, int(context.get_assigned_resources().get("CPU", 1)))
