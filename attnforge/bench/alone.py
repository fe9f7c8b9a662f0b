"""Start-up time and memory of one contender, measured in its own process.

In a shared process a contender would profit from what another has imported, allocated or compiled
(:mod:`attnforge.children`).
"""

from __future__ import annotations

import time

STARTED = time.perf_counter()  # before all other imports, which count

import importlib
import os
from contextlib import ExitStack
from pathlib import Path

from attnforge.arrays import Array
from attnforge.bench.contenders.engines import ENGINES, Runner, Setup, open_backend
from attnforge.bench.results import Cold, MemoryUse
from attnforge.bundle import Bundle
from attnforge.children import call, serve
from attnforge.memory import peak, reset_peak
from attnforge.progress import Progress
from attnforge.records import Record
from attnforge.runtime import cases as reference

TIMEOUT = 300
"""Timeout of a process, in seconds."""


class RunRequest(Record):
    """The request to a process.

    Attributes:
        bundle: folder of the bundle.
        contender: name of a backend of the bundle, or of a peer.
        engine: engine that runs the peer's file, `torch` for peers that need the module, or `backend` for the bundle's
            backends.
        file: file that the engine runs.
        sizes: sizes of the dynamic dims.
        threads: number of threads that a run may use.
        folder: folder of the peers' files.
        any_sizes: whether the contender runs at other sizes than these.
        warm: run at the least sizes first, so that only what the run at `sizes` adds is measured.
        trust_source: whether what the manifest names may be imported, opened and run.
        stands: working directory of the caller, from which a callable may import its files.
        trusted: public keys, one of which must have signed the bundle; empty if no signature is required.
    """

    bundle: str
    contender: str
    engine: str
    file: str | None
    sizes: dict[str, int]
    threads: int
    folder: str
    any_sizes: bool
    warm: bool
    trust_source: bool = False
    stands: str = "."
    trusted: list[str] = []


class FreshRun(Record):
    """The measurements of a process; `memory` is None where the system does not report it (Linux does)."""

    cold: Cold
    memory: MemoryUse | None


def measured(request: RunRequest) -> FreshRun:
    """Run `request` in its own process.

    Raises:
        ChildError: the process failed or took too long.
    """
    return call("attnforge.bench.alone", request, FreshRun, timeout=TIMEOUT)


# --- in that process --------------------------------------------------------------------------------------------------


def _main(request: RunRequest, progress: Progress) -> FreshRun:
    libraries = {"backend": LIBRARIES.get(request.contender, "onnxruntime")}
    importlib.import_module(libraries.get(request.engine, request.engine.partition("-")[0]))
    if request.engine == "torch":
        importlib.import_module("attnforge.bench.contenders.peers")
    imported = time.perf_counter()
    bundle = Bundle(request.bundle, lazily=True, trusted=request.trusted or False)
    feeds, least = _inputs(bundle, request.sizes), _inputs(bundle, reference.sizes_at(bundle.manifest.inputs, "min"))
    prepared = time.perf_counter()
    with ExitStack() as stack:
        run = _open(request, Setup(bundle, feeds, request.threads), stack)
        loaded = time.perf_counter()
        if request.warm and request.any_sizes:
            run(least)
        most, is_reset, before = peak(), reset_peak(), peak()  # a peak that was reset is the memory in use now
        started = time.perf_counter()
        run(feeds)
        first = time.perf_counter()
        if request.warm and request.engine == "backend":
            run(feeds)  # prepares for repeated sizes
        extra = peak() - before
    loaded_mib, extra_mib = before / 2**20, extra / 2**20
    peak_mib = max(most / 2**20, loaded_mib + extra_mib)
    memory = MemoryUse(loaded_mib=loaded_mib, peak_mib=peak_mib, extra_mib=extra_mib)
    cold = Cold(import_s=imported - STARTED, load_s=loaded - prepared, first_s=first - started)
    return FreshRun(cold=cold, memory=memory if is_reset else None)


LIBRARIES = {"openvino": "openvino", "tensorrt": "tensorrt", "tensorrt_rtx": "tensorrt_rtx"}
"""The library that a backend imports first; the other backends import ONNX Runtime."""


def _open(request: RunRequest, setup: Setup, stack: ExitStack) -> Runner:
    if request.engine == "backend":
        return open_backend(request.contender, setup, stack)
    if request.file is not None:
        return ENGINES[request.engine](setup, Path(request.file), stack)
    from attnforge.bench.contenders.peers import PeerJob
    from attnforge.bench.contenders.registry import PEERS

    if request.trust_source:
        os.chdir(request.stands)  # the folder is on no import path, but the source may read files relative to it
    job = PeerJob(setup.bundle, setup.feeds, setup.threads, Path(request.folder), trust_source=request.trust_source)
    return PEERS[request.contender].open(job, stack)


def _inputs(bundle: Bundle, sizes: dict[str, int]) -> dict[str, Array]:
    inputs = bundle.manifest.inputs
    return reference.make_inputs(reference.at(inputs, sizes), inputs, {})


if __name__ == "__main__":
    serve(RunRequest, _main)
